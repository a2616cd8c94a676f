"""Damaged files: each gives an image or a DicomError, in bounded time and memory, and none takes others with it (D12, D13).

Files of every coding are mutated by seeded chance: bits flipped, parts cut, zeroed, doubled, lengths and dimensions set to
absurd values. They are read in processes whose memory is limited, as a batch is.
"""

import re
import struct
import time
from collections import Counter
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
from dicom_files import htj2k, j2k, jpeg, jpeg_lossless, rle, write
from pydicom import uid

from rsnakit import dicom
from rsnakit.workers import ProcessDied, over_items

resource = pytest.importorskip("resource", reason="memory is limited by a call of Unix")
REAL = Path(__file__).parents[2] / "shared" / "data" / "dicom"
MEMORY = 2**30  # bytes of a process; the largest image that is taken needs about half
SECONDS = 20  # a file, on a busy machine
ABSURD = (0, 1, 2, 127, 255, 2**15 - 1, 2**15, 60000, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)


def sources(folder: Path) -> list[Path]:
    """A small file of each coding, and the small ones among the real files."""
    rows, columns = np.mgrid[:96, :80]
    noise = np.random.default_rng(0).integers(0, 60, rows.shape)
    image = (rows * 20 + columns * 15 + noise).astype(np.uint16)
    small = (image >> 4).astype(np.uint8)
    tiled = np.tile(image, (3, 3))
    codings = {
        "explicit": (image, None, uid.ExplicitVRLittleEndian),
        "implicit": (image, None, uid.ImplicitVRLittleEndian),
        "big_endian": (image, None, uid.ExplicitVRBigEndian),
        "deflated": (image, None, uid.DeflatedExplicitVRLittleEndian),
        "rle": (image, rle, uid.RLELossless),
        "jpeg": (small, jpeg(8), uid.JPEGBaseline8Bit),
        "jpeg_12": (image, jpeg(12), uid.JPEGExtended12Bit),
        "lossless": (image, jpeg_lossless(12, predictor=6), uid.JPEGLossless),
        "lossless_1": (image, jpeg_lossless(12), uid.JPEGLosslessSV1),
        "jpeg_ls": (image, imagecodecs.jpegls_encode, uid.JPEGLSLossless),
        "jpeg_ls_near": (image, partial(imagecodecs.jpegls_encode, level=3), uid.JPEGLSNearLossless),
        "jpeg_2000": (tiled, j2k(12), uid.JPEG2000Lossless),
        "jpeg_2000_lossy": (tiled, partial(imagecodecs.jpeg2k_encode, level=40, codecformat="jp2"), uid.JPEG2000),
    }
    if htj2k:
        codings["htj2k"] = (tiled, htj2k, uid.HTJ2KLossless)
    window = dict(WindowCenter=[1500, 900], WindowWidth=[2000, 1000], RescaleSlope=1, RescaleIntercept=-100)
    files = [
        write(folder / f"{name}.dcm", pixels, encode, syntax, **window)
        for name, (pixels, encode, syntax) in codings.items()
    ]
    return files + sorted(path for path in REAL.glob("*.dcm") if path.stat().st_size < 2**20)


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """`raw` with one to three things done to it, most of them near a header or the beginning of the pixel data."""
    for _ in range(rng.integers(1, 4)):
        raw = bytearray(raw)
        pixel_data = max(raw.find(b"\xe0\x7f\x10\x00"), 0)
        start = int(rng.choice([0, 128, pixel_data, pixel_data]))
        span = int(rng.choice([64, 512, 4096, len(raw)]))
        at = min(start + int(rng.integers(0, span)), len(raw) - 1)
        size = int(rng.choice([1, 2, 16, 300, 5000]))
        match rng.integers(0, 9):
            case 0 | 1:
                for where in at + rng.integers(0, size, rng.integers(1, 9)):
                    if where < len(raw):
                        raw[where] ^= 1 << rng.integers(0, 8)
            case 2:
                raw = raw[:at]
            case 3:
                raw[at : at + size] = bytes(size)
            case 4:
                raw[at : at + size] = rng.bytes(size)
            case 5:
                raw[at:at] = raw[at : at + size]
            case 6:  # a number anywhere, of 2 or 4 bytes, in both orders
                number, width = int(rng.choice(ABSURD)), int(rng.choice([2, 4]))
                order = str(rng.choice(["little", "big"]))
                raw[at : at + width] = (number % 256**width).to_bytes(width, order)
            case 7:  # a number of the image module: rows, columns, bits and their like
                element = int(rng.choice([0x02, 0x08, 0x10, 0x11, 0x100, 0x101, 0x102, 0x103]))
                found = raw.find(struct.pack("<2H", 0x28, element))
                if found >= 0:
                    raw[found + 8 : found + 10] = struct.pack("<H", int(rng.choice(ABSURD)) % 2**16)
            case 8:  # header and codestream ask for the same, which is more than there is
                rows, columns = (int(rng.choice([1, 97, 4000, 9000, 11000, 60000])) for _ in range(2))
                for element, number in ((0x10, rows), (0x11, columns)):
                    found = raw.find(struct.pack("<2H", 0x28, element))
                    raw[found + 8 : found + 10] = struct.pack("<H", number)
                if (siz := raw.find(b"\xff\x4f\xff\x51")) > 0:
                    raw[siz + 8 : siz + 16] = struct.pack(">2L", columns, rows)
                    if rng.integers(0, 2):
                        raw[siz + 24 : siz + 32] = struct.pack(">2L", columns, rows)
                for marker in (0xC0, 0xC1, 0xC3, 0xF7):
                    if (sof := raw.find(bytes([0xFF, marker, 0x00, 0x0B]), pixel_data)) > 0:
                        raw[sof + 5 : sof + 9] = struct.pack(">2H", rows, columns)
        raw = bytes(raw) or b"\0"
    return raw


def read_mutated(item: tuple[int, Path, Path]) -> tuple[str, str, float, int]:
    """What became of a mutated file: `image`, `refused` or `wrong`; the reason; seconds; most memory of the process, MB."""
    seed, source, folder = item
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    path = folder / f"{seed}_{source.name}"
    path.write_bytes(mutated(source.read_bytes(), np.random.default_rng(seed)))
    start, outcome, reason = time.perf_counter(), "image", ""
    try:
        encoded = dicom.read_encoded(path)
        whole = encoded.decode()
        small = encoded.decode(min(2, max(1, encoded.reductions)))
        shades = dicom.to_display(small)
        dicom.is_blank(whole.pixels)
        if whole.pixels.shape != encoded.shape or not (shades.min() >= 0 and shades.max() <= 1):
            outcome, reason = "wrong", f"{whole.pixels.shape} pixels, shades from {shades.min()} to {shades.max()}"
    except dicom.DicomError as error:
        outcome, reason = "refused", error.cause
        if error.path != str(path) or not error.cause:
            outcome = "wrong"
    except BaseException as error:
        outcome, reason = "wrong", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    path.unlink()
    return outcome, reason, seconds, most_memory()


def most_memory() -> int:
    """MB; what getrusage tells would include what the parent took when it started this process. 0 where it is not told."""
    status = Path("/proc/self/status")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) // 1024 if status.exists() else 0


def fuzz(folder: Path, seeds: range) -> Counter:
    files = sources(folder)
    items = [(seed, files[seed % len(files)], folder) for seed in seeds]
    outcomes = Counter()
    for item, result in over_items(read_mutated, items, n_jobs=2):
        assert not isinstance(result, ProcessDied), f"{item}: {result}"
        outcome, reason, seconds, megabytes = result
        assert outcome != "wrong", f"{item}: {reason}"
        assert seconds < SECONDS and megabytes < MEMORY / 2**20, f"{item}: {seconds} s, {megabytes} MB"
        outcomes[outcome] += 1
    return outcomes


def test_500_mutated_files_give_an_image_or_an_error(tmp_path):
    outcomes = fuzz(tmp_path, range(500))
    assert outcomes["image"] > 50 and outcomes["refused"] > 200  # the mutations are neither harmless nor all fatal


@pytest.mark.slow
def test_5000_more_mutated_files(tmp_path):
    fuzz(tmp_path, range(1000, 6000))
