"""Stored values to what a viewer shows: modality LUT or rescale, VOI LUT or window, and MONOCHROME1 turned round last.

A header's display settings that make no sense are logged and passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pydicom
from pydicom import uid

from rsnakit.elements import header_numbers, log, photometric, transfer_syntax

if TYPE_CHECKING:
    from rsnakit.dicom import Stored

MAX_LUT_BYTES = 2**22  # of a sequence of tables; one of 65,536 entries has 131,072


def to_display(stored: Stored, window: str = "first") -> np.ndarray:
    """Stored values as a viewer shows them: (H, W) float32 in [0, 1], 0 black, MONOCHROME1 turned round last.

    The modality LUT or rescale comes first, then one of: the header's first VOI LUT, else its first window with its
    VOILUTFunction (DICOM PS3.3 C.11.2.1), else the span from the smallest to the largest value. `stored` isn't changed.

    Args:
        window: "first" as above, or "none" for smallest to largest whatever the header says. A constant image spans
            nothing and comes out black.
    """
    return shading(stored, window)(stored.pixels)


def shading(stored: Stored, window: str = "first") -> Callable[[np.ndarray], np.ndarray]:
    """`to_display` as a function for a part of an image's pixels: shades are a lookup away.

    Args:
        window: as `to_display` takes it.

    Returns:
        A function from (h, w) values of the type of `stored.pixels` to float32 shades of that shape.
    """
    if window not in ("first", "none"):
        raise ValueError(f"window={window!r}: expected 'first' or 'none'")
    pixels, header = stored.pixels, stored.header
    low, high = stored.span or (pixels.min().item(), pixels.max().item())
    if pixels.dtype.kind not in "iu" or pixels.dtype.itemsize > 2:
        span = _modality(np.array([low, high]), header)
        return lambda values: _in_parts(
            lambda part: _shade(_modality(part, header), header, window, span.min(), span.max()), values
        )
    # One shade for each value that the type has; negative ones stand where their bits do when they are read without a sign.
    unsigned = np.dtype(f"u{pixels.dtype.itemsize}")
    units = _modality(np.arange(np.iinfo(unsigned).max + 1, dtype=unsigned).view(pixels.dtype), header)
    span = _modality(np.arange(low, high + 1), header)
    table = _shade(units, header, window, span.min(), span.max())
    return lambda values: _look_up(table, values.view(unsigned))


def _look_up(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    import cv2

    try:
        return cv2.LUT(values, table)
    except cv2.error:  # tables for 16 bits came with OpenCV 5
        return _in_parts(lambda part: table[part], values)


def _in_parts(function: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
    """float32 of the shape of `values`, by `function`, which takes 8 bytes a pixel and more of the part that it is given."""
    shades = np.empty(values.shape, np.float32)
    rows = 2**20 * len(values) // max(1, values.size) or 1
    for first in range(0, len(values), rows):
        shades[first : first + rows] = function(values[first : first + rows])
    return shades


def _shade(units: np.ndarray, header: pydicom.Dataset, window: str, low: float, high: float) -> np.ndarray:
    """Shades in [0, 1] of values in the modality's units; `low` and `high` are the smallest and largest of the image."""
    shades = None
    if window == "first" and (lut := _lut(header, "VOILUTSequence", _has_negative_units(header) or low < 0, high)):
        data, first, bits = lut
        shades = data[np.clip(np.rint(units).astype(np.int64) - first, 0, len(data) - 1)] / (2**bits - 1)
    elif window == "first":
        shades = _window(units, header)
    if shades is None:
        if low == high:
            return np.zeros(units.shape, np.float32)
        shades = np.clip((units - low) / (high - low), 0, 1)
    if photometric(header) == "MONOCHROME1":
        shades = 1 - shades
    return shades.astype(np.float32)


def _modality(values: np.ndarray, header: pydicom.Dataset) -> np.ndarray:
    if lut := _lut(header, "ModalityLUTSequence", header.get("PixelRepresentation") == 1, np.inf):
        data, first, _ = lut
        return data[np.clip(values.astype(np.int64) - first, 0, len(data) - 1)].astype(np.float64)
    slope, intercept = _rescale(header)
    return values.astype(np.float64) * slope + intercept


def _rescale(header: pydicom.Dataset) -> tuple[float, float]:
    slope, intercept = (header_numbers(header, keyword) for keyword in ("RescaleSlope", "RescaleIntercept"))
    if slope and slope[0] == 0:
        log(header, "RescaleSlope 0 would leave nothing to be seen: taken as 1")
        slope = ()
    return (slope or (1.0,))[0], (intercept or (0.0,))[0]


def _has_negative_units(header: pydicom.Dataset) -> bool:
    """Whether stored values can be below 0 in the modality's units, whatever they are in this image."""
    if "ModalityLUTSequence" in header:
        return False
    return header.get("PixelRepresentation") == 1 or min(_rescale(header)) < 0


def _lut(header: pydicom.Dataset, keyword: str, signed: bool, high: float) -> tuple[np.ndarray, int, int] | None:
    """First table of a sequence: its data, the value that its first entry is for, its bits; None if there is none.

    Args:
        signed: whether the values that are looked up can be negative.
        high: the largest of them.
    """
    if keyword not in header:
        return None
    try:
        if len(header.get_item(keyword).value or ()) > MAX_LUT_BYTES:
            raise ValueError(f"more than {MAX_LUT_BYTES} bytes")
        if not (items := header[keyword].value):
            return None
        item = items[0]
        entries, first, bits = (int(number) for number in item.LUTDescriptor)
        entries, data = entries % 2**16 or 2**16, item.LUTData  # modulo, since a large number may be written as SS
        if isinstance(data, bytes):
            little = transfer_syntax(header) != uid.ExplicitVRBigEndian
            data = np.frombuffer(data, "u1" if len(data) in (entries, entries + 1) else "<u2" if little else ">u2")
        data = np.atleast_1d(np.asarray(data, dtype=np.int64)) % 2**16
        if len(data) == (entries + 1) // 2 < entries and bits == 8:  # two entries a word
            data = np.stack([data & 255, data >> 8], axis=1).ravel()
        data = data[:entries]
        if len(data) < entries:
            raise ValueError(f"{len(data)} entries, and its descriptor says {entries}")
    except Exception as error:
        log(header, f"unreadable {keyword} passed over: {' '.join(str(error).split())}")
        return None
    if first >= 2**15 and (signed or high < first):  # a negative number written as US
        first -= 2**16
    return data, first, max(bits if bits <= 16 else 0, int(data.max()).bit_length(), 1)


def _window(units: np.ndarray, header: pydicom.Dataset) -> np.ndarray | None:
    """DICOM PS3.3 C.11.2.1.2 (LINEAR) and C.11.2.1.3 (SIGMOID, LINEAR_EXACT); None where there is no usable window."""
    centers, widths = header_numbers(header, "WindowCenter"), header_numbers(header, "WindowWidth")
    if len(centers) != len(widths):
        log(header, f"{len(centers)} WindowCenter and {len(widths)} WindowWidth: the first of both is used, if any")
    if not centers or not widths:
        return None
    function = str(header.get("VOILUTFunction") or "LINEAR").strip().upper().replace(" ", "_")
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        log(header, f"unknown VOILUTFunction {function}: taken as LINEAR")
        function = "LINEAR"
    center, width = centers[0], widths[0]
    if width <= 0 or (function == "LINEAR" and width < 1):
        log(header, f"WindowWidth {width:g} is too small for {function}: smallest to largest value instead")
        return None
    if function == "SIGMOID":
        return 0.5 + 0.5 * np.tanh(2 * (units - center) / width)  # = 1 / (1 + exp(-4 (x - c) / w)), and can't overflow
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    if width == 0:
        return (units > center).astype(np.float64)
    return np.clip((units - center) / width + 0.5, 0, 1)
