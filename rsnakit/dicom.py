"""One DICOM file to stored values (`read_stored`), and stored values to what a viewer would show (`to_display`).

It reads and never writes. Damage is refused with one `DicomError` a file; what could be put right is told in
`Stored.notes`, and a header's display settings that make no sense are logged and passed over.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np
import pydicom
from pydicom import uid
from pydicom.encaps import get_frame
from pydicom.pixels import get_decoder

from rsnakit.codecs import CODECS, missing_decoder, read_codestream

__all__ = [
    "DicomError",
    "Stored",
    "header_numbers",
    "is_blank",
    "missing_decoder",
    "read_header",
    "read_stored",
    "to_display",
    "transfer_syntax",
]  # fmt: skip

logger = logging.getLogger(__name__)

MAX_PIXELS = 2**28  # of a compressed image: some ten times the largest mammogram, and 512 MiB of 16-bit values
ZERO_RUN = 4096  # bytes of 0 in a row that no JPEG 2000 coder writes, while an unfinished copy of a file does


class DicomError(Exception):
    """A file that can't be read or shown; `path` says which and `cause` why."""

    def __init__(self, path: str | os.PathLike, cause: str):
        super().__init__(str(path), cause)  # both in args, so that the error survives the way back from a process
        self.path, self.cause = str(path), cause

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}"


@dataclass(frozen=True, eq=False)
class Stored:
    """A decoded file: `pixels` (H, W) in stored units, `header` without pixel data, `notes` on what was put right."""

    pixels: np.ndarray
    header: pydicom.Dataset
    notes: tuple[str, ...] = ()


def read_stored(path: str | os.PathLike) -> Stored:
    """Decode the first frame of a single-channel file to stored values, sign and BitsStored applied.

    Where header and codestream disagree, the codestream decides the precision and the header the sign: the bits that
    were coded are read as two's complement of that precision if PixelRepresentation is 1. Bits above BitsStored are
    masked off, unless the image is smoother with them, which means that its values run on past BitsStored.

    Raises:
        DicomError: not DICOM, cut short, a part is missing, not grey, damaged, or no decoder is installed.
    """
    notes: list[str] = []
    try:
        header = _read(path, notes)
        pixels = _decode(header, notes)
        del header.PixelData
    except Exception as error:
        raise DicomError(path, _cause(error)) from error
    return Stored(pixels, header, tuple(notes))


def read_header(path: str | os.PathLike) -> pydicom.Dataset:
    """The header of a file, without its pixel data. Raises DicomError where the file is no DICOM file."""
    try:
        return _read(path, [], stop_before_pixels=True)
    except Exception as error:
        raise DicomError(path, _cause(error)) from error


def to_display(stored: Stored, window: str = "first") -> np.ndarray:
    """Stored values as a viewer shows them: (H, W) float32 in [0, 1], 0 black, MONOCHROME1 turned round last.

    The modality LUT or rescale comes first, then one of: the header's first VOI LUT, else its first window with its
    VOILUTFunction (DICOM PS3.3 C.11.2.1), else the span from the smallest to the largest value. `stored` isn't changed.

    Args:
        window: "first" as above, or "none" for smallest to largest whatever the header says. A constant image spans
            nothing and comes out black.
    """
    if window not in ("first", "none"):
        raise ValueError(f"window={window!r}: expected 'first' or 'none'")
    pixels = stored.pixels
    if pixels.dtype.kind not in "iu" or pixels.dtype.itemsize > 2:
        return _shade(pixels, stored.header, window)
    # One shade a value instead of one a pixel; unsigned differences wrap round to the right place for signed values.
    low, unsigned = pixels.min(), f"u{pixels.dtype.itemsize}"
    table = _shade(np.arange(int(low), int(pixels.max()) + 1), stored.header, window)
    return table[pixels.view(unsigned) - low.view(unsigned)]


def is_blank(pixels: np.ndarray) -> bool:
    """Whether all pixels but one in a thousand hold one value, as in an image that was never exposed or decoded."""
    common = np.sort(pixels[::16, ::16], axis=None)[pixels[::16, ::16].size // 2]
    return bool(np.count_nonzero(pixels != common) * 1000 < pixels.size)


def transfer_syntax(header: pydicom.Dataset) -> str:
    """The transfer syntax UID of a header; where there is none, that of uncompressed data encoded as the header is."""
    if stated := getattr(header, "file_meta", {}).get("TransferSyntaxUID"):
        return str(stated)
    implicit, little = getattr(header, "original_encoding", (True, True))
    if little is False:
        return str(uid.ExplicitVRBigEndian)
    return str(uid.ExplicitVRLittleEndian if implicit is False else uid.ImplicitVRLittleEndian)


# File to stored values


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _read(path: str | os.PathLike, notes: list[str], **options) -> pydicom.Dataset:
    with open(path, "rb") as file:
        start = file.read(132)
    if not start:
        raise ValueError("the file is empty")
    if start[128:] == b"DICM":
        header = pydicom.dcmread(path, **options)
        if len(header) == 0:  # how pydicom reports a file that ends inside an element
            raise ValueError("the file is cut short: it ends inside an element, before the end of its pixel data")
        return header
    try:
        header = pydicom.dcmread(path, force=True, **options)
        recognised = any(keyword in header for keyword in ("SOPClassUID", "Modality", "Rows", "PixelData"))
    except Exception:  # text taken for tags and lengths fails in many ways, none of which says more than this
        recognised = False
    if not recognised:
        raise ValueError("not a DICOM file: no DICM marker after a preamble, and no header at the first byte")
    notes.append("no preamble and no DICM marker: read from the first byte")
    return header


def _decode(header: pydicom.Dataset, notes: list[str]) -> np.ndarray:
    """(H, W) stored values; completes `header` where a part that has a default is missing."""
    for keyword in ("Rows", "Columns", "BitsAllocated", "PhotometricInterpretation", "PixelData"):
        if not header.get(keyword):
            raise ValueError(f"no {keyword}, or it is empty: the file is incomplete, cut short, or holds no image")
    for keyword, default in (("SamplesPerPixel", 1), ("PixelRepresentation", 0), ("BitsStored", header.BitsAllocated)):
        if header.get(keyword) is None:
            setattr(header, keyword, default)
            notes.append(f"no {keyword}: taken as {default}")
    if header.SamplesPerPixel != 1 or _photometric(header) not in ("MONOCHROME1", "MONOCHROME2"):
        raise ValueError(
            f"{header.SamplesPerPixel} samples a pixel and PhotometricInterpretation {header.PhotometricInterpretation}: "
            "expected 1 sample, MONOCHROME1 or MONOCHROME2"
        )
    precision = _check_pixel_data(header, notes)
    decoder = get_decoder(transfer_syntax(header))
    plugin = "imagecodecs" if "imagecodecs" in decoder.available_plugins else ""
    # pydicom would mask whatever is above BitsStored; whether that is right is for _settle_bits to say
    pixels, _ = decoder.as_array(header, index=0, decoding_plugin=plugin, correct_unused_bits=False)
    return _settle_bits(pixels.astype(pixels.dtype.newbyteorder("="), copy=False), header, precision, notes)


def _check_pixel_data(header: pydicom.Dataset, notes: list[str]) -> int:
    """Hold pixel data against the header before memory is taken for it; returns the bits a pixel is coded with.

    Sets the transfer syntax in `header` to what the pixel data are, where that is missing or says otherwise.
    """
    rows, columns, bits, data = header.Rows, header.Columns, header.BitsAllocated, header["PixelData"]
    stated, syntax, precision = header.file_meta.get("TransferSyntaxUID"), transfer_syntax(header), bits
    if (frames := int(header.get("NumberOfFrames") or 1)) > 1:
        notes.append(f"{frames} frames: the first is read")
    if data.is_undefined_length or syntax in CODECS:
        if rows * columns > MAX_PIXELS:
            raise ValueError(f"the header asks for {rows} x {columns} pixels, more than the {MAX_PIXELS} taken here")
        frame = get_frame(data.value, 0, number_of_frames=frames)
        found, precision, shape = read_codestream(frame) or (syntax, bits, (rows, columns))
        if shape != (rows, columns):
            raise ValueError(f"the header says {rows} x {columns} pixels, the codestream {shape[0]} x {shape[1]}")
        if CODECS.get(found) == "jpeg2k" and bytes(ZERO_RUN) in frame.rstrip(b"\0"):
            raise ValueError(f"more than {ZERO_RUN} bytes of the codestream are zero: an unfinished or damaged copy")
        if precision > bits:
            header.BitsAllocated = 16 if precision <= 16 else 32  # pydicom makes the array that it decodes into by it
        if CODECS.get(found) != CODECS.get(syntax):
            syntax = found
    elif len(data.value) < (needed := -(-rows * columns * bits // 8)):
        raise ValueError(
            f"pixel data is cut short: {len(data.value)} bytes, and {rows} x {columns} pixels of {bits} bits need {needed}"
        )
    if reason := missing_decoder(syntax):
        raise ValueError(reason)
    if syntax != stated:
        notes.append(f"TransferSyntaxUID {stated or 'missing'}: read as {uid.UID(syntax).name}")
        header.file_meta.TransferSyntaxUID = uid.UID(syntax)
    return precision


def _settle_bits(pixels: np.ndarray, header: pydicom.Dataset, precision: int, notes: list[str]) -> np.ndarray:
    """Take from each value the bits that are the image's, and its sign."""
    stored = header.BitsStored if 0 < header.BitsStored <= header.BitsAllocated else header.BitsAllocated
    if precision < stored:
        notes.append(f"BitsStored {stored}, but coded with {precision} bits: taken as {precision}")
    bits = min(stored, precision)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if pixels.dtype.kind == "i" else (0, (1 << bits) - 1)
    smallest, largest = int(pixels.min()), int(pixels.max())
    if low <= smallest and largest <= high:
        return pixels
    unused = 8 * pixels.dtype.itemsize - bits
    masked = pixels << unused >> unused  # the second shift brings the sign back to signed types
    if _roughness(pixels) < _roughness(masked):
        notes.append(f"values from {smallest} to {largest} run on past BitsStored {bits}: kept")
        return pixels
    notes.append(f"bits above BitsStored {bits} masked off")
    return masked


def _roughness(pixels: np.ndarray) -> float:
    """Sum of the steps between neighbours: an overlay's bits add to it, and wrapping round adds more."""
    values = pixels.astype(np.float32)
    return sum(float(np.abs(np.diff(values, axis=axis)).sum(dtype=np.float64)) for axis in (0, 1))


# Stored values to shades


def _shade(values: np.ndarray, header: pydicom.Dataset, window: str) -> np.ndarray:
    """Shades in [0, 1] of stored values that span the image's range."""
    units, shades = _modality(values, header), None
    if window == "first" and (lut := _lut(header, "VOILUTSequence", signed=units.min() < 0)):
        data, first, bits = lut
        shades = data[np.clip(np.rint(units).astype(np.int64) - first, 0, len(data) - 1)] / (2**bits - 1)
    elif window == "first":
        shades = _window(units, header)
    if shades is None:
        low, high = units.min(), units.max()
        if low == high:
            return np.zeros(units.shape, np.float32)
        shades = (units - low) / (high - low)
    if _photometric(header) == "MONOCHROME1":
        shades = 1 - shades
    return shades.astype(np.float32)


def _modality(values: np.ndarray, header: pydicom.Dataset) -> np.ndarray:
    if lut := _lut(header, "ModalityLUTSequence", signed=header.get("PixelRepresentation") == 1):
        data, first, _ = lut
        return data[np.clip(values - first, 0, len(data) - 1)].astype(np.float64)
    slope, intercept = (header_numbers(header, keyword) for keyword in ("RescaleSlope", "RescaleIntercept"))
    return values.astype(np.float64) * (slope or (1,))[0] + (intercept or (0,))[0]


def _lut(header: pydicom.Dataset, keyword: str, signed: bool) -> tuple[np.ndarray, int, int] | None:
    """First table of a sequence: its data, the value that its first entry is for, its bits; None if there is none."""
    if not header.get(keyword):
        return None
    try:
        item = header[keyword].value[0]
        entries, first, bits = (int(number) for number in item.LUTDescriptor)
        entries, data = entries or 2**16, item.LUTData
        if isinstance(data, bytes):
            little = transfer_syntax(header) != uid.ExplicitVRBigEndian
            data = np.frombuffer(data, "u1" if len(data) in (entries, entries + 1) else "<u2" if little else ">u2")
        data = np.asarray(data, dtype=np.int64)[:entries]
        if len(data) < entries:
            raise ValueError(f"{len(data)} entries, and its descriptor says {entries}")
    except Exception as error:
        _log(header, f"unreadable {keyword} passed over: {_cause(error)}")
        return None
    if signed and first >= 2**15:  # a negative number written as US
        first -= 2**16
    return data, first, max(bits, int(data.max()).bit_length())


def _window(units: np.ndarray, header: pydicom.Dataset) -> np.ndarray | None:
    """DICOM PS3.3 C.11.2.1.2 (LINEAR) and C.11.2.1.3 (SIGMOID, LINEAR_EXACT); None where there is no usable window."""
    centers, widths = header_numbers(header, "WindowCenter"), header_numbers(header, "WindowWidth")
    if len(centers) != len(widths):
        _log(header, f"{len(centers)} WindowCenter and {len(widths)} WindowWidth: the first of both is used, if any")
    if not centers or not widths:
        return None
    function = str(header.get("VOILUTFunction") or "LINEAR").strip().upper().replace(" ", "_")
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        _log(header, f"unknown VOILUTFunction {function}: taken as LINEAR")
        function = "LINEAR"
    center, width = centers[0], widths[0]
    if width <= 0 or (function == "LINEAR" and width < 1):
        _log(header, f"WindowWidth {width:g} is too small for {function}: smallest to largest value instead")
        return None
    if function == "SIGMOID":
        return 0.5 + 0.5 * np.tanh(2 * (units - center) / width)  # = 1 / (1 + exp(-4 (x - c) / w)), and can't overflow
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    if width == 0:
        return (units > center).astype(np.float64)
    return np.clip((units - center) / width + 0.5, 0, 1)


def header_numbers(header: pydicom.Dataset, keyword: str) -> tuple[float, ...]:
    """Finite numbers of a decimal string element; () where it is absent, empty or unreadable."""
    try:
        value = header.get(keyword)
        if value is None or value == "":
            return ()
        numbers = tuple(float(number) for number in np.atleast_1d(np.asarray(value, dtype=object)))
        if not np.isfinite(numbers).all():
            raise ValueError(f"{numbers}")
        return numbers
    except Exception as error:
        _log(header, f"unreadable {keyword} passed over: {_cause(error)}")
        return ()


def _photometric(header: pydicom.Dataset) -> str:
    return str(header.get("PhotometricInterpretation", "")).strip().upper()


def _log(header: pydicom.Dataset, message: str) -> None:
    logger.warning("%s: %s", getattr(header, "filename", None) or "a header", message)
