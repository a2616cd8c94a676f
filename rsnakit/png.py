"""One PNG file to stored values, as `dicom` gives them of a DICOM file: many share a competition's images so.

A PNG does not say what its pixels are; the setting `window` has to. "first": shades, made with the window of the DICOM
header and turned round where that was MONOCHROME1. They are shown as they are, black at 0 and white at 255 or 65,535, and
no window is applied a second time. "none": values of any span, a detector's own or stretched already; they are stretched
from smallest to largest. Inference reads DICOM and does the same with the same `window`, so that a model that was trained
on PNG meets images there as it knows them, but for the 8 bits that many PNG are rounded to.

Grey of 8 or 16 bits is read, also where it is coded as RGB or by a palette. Transparency and colour management (gAMA, sRGB,
iCCP) are passed over: no tool that turns mammograms into PNG means anything by them.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

import cv2
import numpy as np
from pydicom.dataset import Dataset

from rsnakit.dicom import MAX_PIXELS, DicomError, Stored
from rsnakit.files import open_regular

SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER_BYTES = 33  # the signature and the chunk IHDR, which comes first in every file
COLORS = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with transparency", 6: "RGB with transparency"}
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a pixel, by the kind of colour
KEPT = (b"PLTE", b"IDAT", b"IEND")  # chunks that pixels come from; text and profiles are not even unpacked
DEFLATE = 1032  # bytes that a byte of compressed data can stand for at most
DETECTOR_BITS = 14  # of mammography detectors at most


@dataclass(frozen=True)
class PngHeader:
    """What a PNG says of itself: rows and columns, bits of a sample, and its kind of colour (a key of COLORS)."""

    rows: int
    columns: int
    bits: int
    color: int


@dataclass(frozen=True, eq=False)
class PngEncoded:
    """A PNG that is read and checked, and not decoded yet: has what `dicom.Encoded` has.

    Attributes:
        path: the file.
        shape: (rows, columns).
        data: its header and the chunks that pixels come from.
        window: "first" or "none": what the file is said to hold (see above).
        reductions: 0, as PNG can only be decoded whole.
        notes: on what was put right in reading.
    """

    path: str
    shape: tuple[int, int]
    data: bytes
    window: str
    reductions: int = 0
    notes: tuple[str, ...] = ()

    def decode(self, reduce: int = 0) -> Stored:
        """The pixels as they are, (H, W) uint8 or uint16, and a header by which `dicom.shading` shows them as meant.

        Raises:
            rsnakit.dicom.DicomError: damaged data, colours, or `window` is "first" and the values are no shades.
        """
        if reduce:
            raise ValueError(f"reduce={reduce}: PNG can only be decoded whole")
        notes = list(self.notes)
        try:
            pixels = _grey(cv2.imdecode(np.frombuffer(self.data, np.uint8), cv2.IMREAD_UNCHANGED), notes)
            if self.window == "first":
                _refuse_detector_values(pixels)
        except Exception as error:
            raise DicomError.of(self.path, error) from error
        return Stored(pixels, _dicom_header(self.path, pixels), tuple(notes))


def read_encoded(path: str | os.PathLike, window: str = "none") -> PngEncoded:
    """A file, checked as far as that can be done before it is decoded.

    Args:
        window: what the file is said to hold: "first", shades, which is checked in decoding, or "none", any values.

    Raises:
        rsnakit.dicom.DicomError: not PNG, cut short, damaged, or larger than any mammogram.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            start = file.read(HEADER_BYTES)
            header = _parse(start)
            pixel_bytes = _check_size(header)
            data = _pixel_chunks(start + file.read(2 * pixel_bytes + (1 << 24)))
        if pixel_bytes > DEFLATE * len(data):
            raise ValueError(
                f"cut short, or its header is wrong: {len(data):,} bytes can't hold {header.rows} x {header.columns} pixels"
            )
    except Exception as error:
        raise DicomError.of(path, error) from error
    notes = [f"stored as {COLORS[header.color]}, read as grey"] if header.color else []
    return PngEncoded(str(path), (header.rows, header.columns), data, window, notes=tuple(notes))


def read_header(path: str | os.PathLike) -> PngHeader:
    """What a file says of itself in its first bytes. Raises DicomError where it is no PNG."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return _parse(file.read(HEADER_BYTES))
    except Exception as error:
        raise DicomError.of(path, error) from error


# Bytes to chunks (ISO/IEC 15948)


def _parse(start: bytes) -> PngHeader:
    if not start:
        raise ValueError("the file is empty")
    if not start.startswith(SIGNATURE):
        kind = ", as JPEG does" if start.startswith(b"\xff\xd8\xff") else ""
        raise ValueError(f"not a PNG file: it begins with {start[:8]!r}{kind}")
    if len(start) < HEADER_BYTES:
        raise ValueError(f"cut short: it has {len(start)} bytes")
    length, kind, columns, rows, bits, color, _, _, _, checksum = struct.unpack(">I4sIIBBBBBI", start[8:])
    if (length, kind) != (13, b"IHDR") or zlib.crc32(start[12:29]) != checksum or color not in SAMPLES:
        raise ValueError("its header (IHDR) is damaged")
    return PngHeader(rows, columns, bits, color)


def _check_size(header: PngHeader) -> int:
    """The bytes of its pixels before they are compressed; refuses what no mammogram is, before memory is taken."""
    rows, columns = header.rows, header.columns
    if header.bits not in (8, 16):
        raise ValueError(f"{header.bits} bits a pixel, as of a mask: expected 8 or 16")
    if not rows or not columns or rows * columns * SAMPLES[header.color] > MAX_PIXELS:
        raise ValueError(
            f"its header asks for {rows} x {columns} pixels, more than the {MAX_PIXELS} taken here, or none"
        )
    return rows * columns * SAMPLES[header.color] * header.bits // 8


def _pixel_chunks(data: bytes) -> bytes:
    """The file without what has no bearing on its pixels; every chunk kept is held against its checksum.

    Decoders differ in what they let pass: some fill up what is missing and only print a warning.
    """
    parts, at = [data[:HEADER_BYTES]], HEADER_BYTES
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length  # length, kind, what is in it, checksum
        if end > len(data):
            break
        if kind in KEPT:
            chunk = data[at:end]
            if zlib.crc32(memoryview(chunk)[4:-4]) != int.from_bytes(chunk[-4:], "big"):
                raise ValueError(f"damaged: the checksum of the chunk {kind.decode()} at byte {at:,} is wrong")
            parts.append(chunk)
        if kind == b"IEND":
            return b"".join(parts)
        at = end
    raise ValueError(f"cut short: {len(data):,} bytes, and no end (IEND) among them")


# Chunks to stored values


def _grey(image: np.ndarray | None, notes: list[str]) -> np.ndarray:
    """(H, W) of what OpenCV decoded, which has more channels where the file isn't coded as grey."""
    if image is None:
        raise ValueError("damaged: its pixel data can't be unpacked")
    if image.ndim == 2:
        return image
    grey = np.ascontiguousarray(image[..., 0])
    for other in (1, 2):
        if not np.array_equal(grey, image[..., other]):
            apart = int(np.abs(grey.astype(np.int32) - image[..., other]).max())
            raise ValueError(f"a picture in colours, whose channels lie up to {apart} apart: expected grey")
    if image.shape[2] == 4 and image[..., 3].min() < np.iinfo(image.dtype).max:
        notes.append("transparent parts are read as if they were not")
    return grey


def _refuse_detector_values(pixels: np.ndarray) -> None:
    """Refuses a detector's values saved in 16 bits without scaling, which would all come out nearly black.

    They take up the lowest bits alone and lie side by side. Shades may all be dark too, but those that a window makes of
    values of 14 bits or fewer lie 4 or more apart.
    """
    largest = int(pixels.max())
    if pixels.dtype == np.uint8 or largest >= 1 << DETECTOR_BITS:
        return
    counts = cv2.calcHist([pixels], [0], None, [largest + 1], [0, largest + 1])
    used = np.flatnonzero(counts)
    if len(used) > 2 and np.median(np.diff(used)) < 1 << (16 - DETECTOR_BITS):
        raise ValueError(
            f"16 bits, and its values run from {used[0]} to {largest} without gaps: a detector's own, not shades that a "
            "window made of them. Read such files with -p window none, which stretches them from smallest to largest"
        )


def _dicom_header(path: str, pixels: np.ndarray) -> Dataset:
    """A header whose window leaves pixels as they are: `shading` divides them by the largest value of their type."""
    white = int(np.iinfo(pixels.dtype).max)
    header = Dataset()
    header.filename = path
    header.Rows, header.Columns = pixels.shape
    header.BitsAllocated = header.BitsStored = 8 * pixels.dtype.itemsize
    header.PixelRepresentation, header.PhotometricInterpretation = 0, "MONOCHROME2"
    header.WindowCenter, header.WindowWidth, header.VOILUTFunction = white / 2, white, "LINEAR_EXACT"
    return header
