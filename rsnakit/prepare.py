"""One file to a cropped, resized image: `load_image` is the one way from a DICOM or PNG file to pixels.

Training, inference and the notebooks all go through it, with the same `PreprocessConfig`.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from rsnakit import dicom, png
from rsnakit.crop import SEARCH_SIDE, Box, locate_breast, shrink
from rsnakit.fields import check_all
from rsnakit.params import setting
from rsnakit.store_formats import MAX_VALUE

BAND = 16  # rows
MAX_REDUCE = 2
GRID = 2**MAX_REDUCE  # pixels; boxes lie on it, and so between the pixels of an image that was halved in decoding


@dataclasses.dataclass(frozen=True)
class PreprocessConfig:
    """What shapes pixels, and nothing else: it is hashed into the store and travels with the weights."""

    height: int = setting(256, low=16, high=4096)  # pixels; enough for the demo, real mammograms want 1024 and more
    width: int = setting(128, low=16, high=4096)  # pixels; a breast is about twice as high as it is wide
    window: str = setting("first", choices=("first", "none"))  # the header's first VOI LUT or window, or min-max
    crop: bool = setting(True)  # to the breast; False keeps the whole frame
    crop_margin: float = setting(0.02, low=0.0, high=0.5)  # left around the breast, as a share of its box
    # JPEG 2000 files are decoded at 1 / 2**reduce of their size: auto takes the smallest that the output does not outgrow.
    # That smooths them, and them alone, a little differently than the resizing does; 0 treats all files alike.
    reduce: int | str = setting("auto", low=0, high=MAX_REDUCE, choices=("auto",))
    # What the training images are: dicom, or png made of them by somebody, with `window` as that one did (see png.py). With
    # png nothing is decoded at reduced size, so that inference, on DICOM, sees what training saw.
    source: str = setting("dicom", choices=("dicom", "png"))

    def __post_init__(self):
        check_all(self)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared image and how it came about.

    Attributes:
        image: (height, width) uint16 in 0..4095, the breast at the left edge, padded with 0.
        box: (top, left, bottom, right), the crop in pixels of the source frame as it is stored, before any turn.
        flipped: whether it was mirrored to bring the breast to the left.
        source_shape: (height, width) of the source frame.
        reduce: how many times the source was halved in decoding.
        notes: on what was put right in reading.
    """

    image: np.ndarray
    box: Box
    flipped: bool
    source_shape: tuple[int, int]
    reduce: int = 0
    notes: tuple[str, ...] = ()


class BlankImage(dicom.DicomError):
    """A file that decodes to nothing to be seen; it must not pass for a healthy breast."""


def status_of(error: Exception) -> tuple[str, str]:
    """What a table says of an image that could not be prepared: `blank` or `failed`, and the cause in one line."""
    cause = error.cause if isinstance(error, dicom.DicomError) else f"{type(error).__name__}: {error}"
    return "blank" if isinstance(error, BlankImage) else "failed", " ".join(cause.split())


def load_image(path: Path | str, config: PreprocessConfig) -> np.ndarray:
    """A file as (height, width) uint16 with 12 significant bits; see `prepare` for how and what is raised."""
    return prepare(path, config).image


def prepare(path: Path | str, config: PreprocessConfig) -> Prepared:
    """Reads a DICOM or PNG file, applies its window once, crops to the breast, turns it to the left, fits and pads.

    Of a JPEG 2000 file both the small copy that the breast is looked for on and the crop come from decodings at a fraction
    of its size, as `config.reduce` allows.

    Raises:
        BlankImage: nearly all pixels have the same value, or get the same shade from the header's window.
        rsnakit.dicom.DicomError: the file cannot be read; it names file and cause.
    """
    encoded = _read(path, config)
    shape = encoded.shape
    reductions = 0 if config.reduce == 0 or config.source == "png" else encoded.reductions  # as PNG, which has none
    reduce = min(reductions, _halvings(max(shape) / SEARCH_SIDE))
    stored, shade, sample = _decode(encoded, reduce, config.window)
    breast = locate_breast(shrink(sample), shape)
    box = (0, 0, *shape)
    if config.crop:
        box = _on_grid(_with_margin(breast.box, config.crop_margin, shape), shape, breast.is_right)
    top, left, bottom, right = box
    wanted = config.reduce
    if wanted == "auto":  # as small as the crop can be and still need no enlarging
        wanted = min(MAX_REDUCE, _halvings(max((bottom - top) / config.height, (right - left) / config.width)))
    if min(wanted, reductions) != reduce:
        reduce = min(wanted, reductions)
        stored, shade, _ = _decode(encoded, reduce, config.window)
    step = 2**reduce
    crop = stored.pixels[top // step : -(-bottom // step), left // step : -(-right // step)]
    crop = crop[:, ::-1] if breast.is_right else crop
    half_will_do = _halvings(max(crop.shape[0] / config.height, crop.shape[1] / config.width)) > 0
    image = fit_and_pad(_halved(shade, crop) if half_will_do else shade(crop), config.height, config.width)
    image = np.rint(image * MAX_VALUE).astype(np.uint16)
    return Prepared(image, box, breast.is_right, shape, reduce, stored.notes)


def preview(path: Path | str, config: PreprocessConfig, side: int = 600) -> np.ndarray:
    """A whole frame as `prepare` sees it, small enough to be drawn: (H, W) float32 in [0, 1], about `side` pixels high.

    Raises DicomError where the file cannot be read.
    """
    encoded = _read(path, config)
    scale = max(1, max(encoded.shape) / side)
    display = dicom.to_display(encoded.decode(min(encoded.reductions, _halvings(scale))), config.window)
    size = (max(1, round(encoded.shape[1] / scale)), max(1, round(encoded.shape[0] / scale)))
    return cv2.resize(display, size, interpolation=cv2.INTER_AREA)


def fit_and_pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes (H, W) to fit into (height, width) with its aspect kept; padded with 0 at the right, and above and below."""
    scale = min(height / image.shape[0], width / image.shape[1])
    inner = (max(1, min(height, round(image.shape[0] * scale))), max(1, min(width, round(image.shape[1] * scale))))
    # Area averaging is the one that neither aliases nor rings when shrinking; enlarging it would show its pixels.
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    resized = cv2.resize(image, (inner[1], inner[0]), interpolation=method)
    padded = np.zeros((height, width), image.dtype)
    top = (height - inner[0]) // 2
    padded[top : top + inner[0], : inner[1]] = resized
    return padded


def _read(path: Path | str, config: PreprocessConfig) -> dicom.Encoded | png.PngEncoded:
    if Path(path).suffix.lower() == ".png":
        return png.read_encoded(path, config.window)
    return dicom.read_encoded(path)


def _decode(
    encoded: dicom.Encoded | png.PngEncoded, reduce: int, window: str
) -> tuple[dicom.Stored, Callable, np.ndarray]:
    """Stored values, the function that gives their shades, and those of a sample; BlankImage where there is nothing."""
    stored = encoded.decode(reduce)
    if dicom.is_blank(stored.pixels):
        raise BlankImage(encoded.path, f"blank image: nearly every stored value is {int(np.median(stored.pixels))}")
    shade = dicom.shading(stored, window)
    sample = shade(_sample(stored.pixels))
    if dicom.is_blank(sample):
        raise BlankImage(
            encoded.path, f"blank image: its window leaves nearly every pixel at shade {np.median(sample):.2f}"
        )
    return stored, shade, sample


def _sample(pixels: np.ndarray) -> np.ndarray:
    """Every n-th row and column of a large frame: some 800 at the longer side are enough to see what is on it.

    The step is odd, for then the columns can be those that they are in the mirrored frame.
    """
    step = max(1, max(pixels.shape) // (3 * SEARCH_SIDE))
    step -= 1 - step % 2
    first_row, first_column = ((n - 1) * (step + 1) // 2 % step for n in pixels.shape)
    return pixels[first_row::step, first_column::step]


def _halved(shade: Callable, pixels: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 shades, in bands that stay in the processor's cache: faster than averaging all at once to any size.

    A last odd row or column is left out.
    """
    rows, columns = pixels.shape[0] // 2, pixels.shape[1] // 2
    half = np.empty((rows, columns), np.float32)
    for first in range(0, rows, BAND):
        band = half[first : first + BAND]
        shades = shade(pixels[2 * first : 2 * (first + len(band)), : 2 * columns])
        cv2.resize(shades, (columns, len(band)), dst=band, interpolation=cv2.INTER_AREA)
    return half


def _halvings(ratio: float) -> int:
    """How often something `ratio` times as large as it needs to be can be halved."""
    return max(0, int(math.log2(ratio)))


def _with_margin(box: Box, margin: float, shape: tuple[int, int]) -> Box:
    top, left, bottom, right = box
    y, x = round((bottom - top) * margin), round((right - left) * margin)
    return max(0, top - y), max(0, left - x), min(shape[0], bottom + y), min(shape[1], right + x)


def _on_grid(box: Box, shape: tuple[int, int], from_right: bool) -> Box:
    """The box widened to multiples of GRID, counted from the breast's side so that left and right mirror each other."""
    top, left, bottom, right = box
    if from_right:
        left, right = shape[1] - right, shape[1] - left
    top, left = top // GRID * GRID, left // GRID * GRID
    bottom, right = min(shape[0], -(-bottom // GRID) * GRID), min(shape[1], -(-right // GRID) * GRID)
    return (top, shape[1] - right, bottom, shape[1] - left) if from_right else (top, left, bottom, right)
