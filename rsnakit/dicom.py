"""One DICOM file to stored values (`read_stored`), and stored values to what a viewer would show (`to_display`).

It reads and never writes. Damage is refused with one `DicomError` a file; what could be put right is told in
`Stored.notes`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pydicom
from pydicom import uid

from rsnakit import codecs
from rsnakit.bits import Bits, Span, extremes, refuse_astray, settle
from rsnakit.codecs import FAMILIES, backends, missing_decoder
from rsnakit.codestream import MAX_PIXELS, Codestream, read_codestream
from rsnakit.dicomfile import DicomFile, find_pixel_data, parse_header, read_coded, read_uncompressed
from rsnakit.display import shading, to_display
from rsnakit.elements import header_integer, header_numbers, photometric, transfer_syntax

__all__ = [
    "DicomError",
    "Encoded",
    "Stored",
    "backends",
    "header_numbers",
    "is_blank",
    "missing_decoder",
    "read_encoded",
    "read_header",
    "read_stored",
    "shading",
    "to_display",
    "transfer_syntax",
]  # fmt: skip


class DicomError(Exception):
    """A file that can't be read or shown; `path` says which and `cause` why."""

    def __init__(self, path: str | os.PathLike, cause: str):
        super().__init__(str(path), cause)  # both in args, so that the error survives the way back from a process
        self.path, self.cause = str(path), cause

    @classmethod
    def of(cls, path: str | os.PathLike, error: Exception) -> DicomError:
        """What went wrong with a file in one line; an error that isn't ours is named by its type too."""
        return cls(path, _cause(error))

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}"


@dataclass(frozen=True, eq=False)
class Stored:
    """A decoded file: `pixels` (H, W) in stored units, `header` without pixel data, `notes` on what was put right.

    The header's BitsAllocated, BitsStored, HighBit and PixelRepresentation are those of `pixels`. Uncompressed pixels may be
    read-only. `span` is the smallest and the largest value of the image; where `pixels` are a smaller copy of it they may
    reach beyond. None means those of `pixels`.
    """

    pixels: np.ndarray
    header: pydicom.Dataset
    notes: tuple[str, ...] = ()
    span: Span | None = None


@dataclass(frozen=True, eq=False)
class Encoded:
    """A file whose header and first frame are read and held against each other, and not decoded yet.

    Attributes:
        path: the file.
        header: without pixel data; all that is decoded from it shares it.
        frame: as it is coded, or the values themselves where they are not compressed.
        bits: which bits of a value are the image's, by the header.
        backend: the decoder that is taken; "" for uncompressed values.
        reductions: how many times the frame can be halved while it is decoded, which takes less time each time; 0 where
            it can only be decoded whole. JPEG 2000 alone holds its image at smaller sizes too, and Pillow decodes those.
        notes: on what was put right in reading.
    """

    path: str
    header: pydicom.Dataset
    frame: Codestream | np.ndarray
    bits: Bits
    backend: str = ""
    reductions: int = 0
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the whole frame."""
        return self.frame.shape

    def decode(self, reduce: int = 0) -> Stored:
        """The stored values as `read_stored` gives them, at 1 / 2**reduce of rows and columns, rounded up.

        Where the frame cannot be halved so often in decoding, the whole one is decoded and averaged down, with a note.
        """
        notes = list(self.notes)
        try:
            pixels, span = self._whole_or_reduced(reduce, notes)
        except Exception as error:
            raise DicomError.of(self.path, error) from error
        return Stored(pixels, self.header, tuple(notes), span)

    def _whole_or_reduced(self, reduce: int, notes: list[str]) -> tuple[np.ndarray, Span]:
        if not 0 <= reduce < 16:
            raise ValueError(f"reduce={reduce!r}: expected 0 to 15")
        reason = f"it can be halved {self.reductions} times in decoding"
        if 0 < reduce <= self.reductions:
            try:
                pixels, _ = self._settled(codecs.decode_reduced(self.frame, reduce), notes)
                return pixels, _span_of_reduced(pixels)
            except MemoryError:
                raise
            except Exception as error:
                reason = f"decoding it so small failed with {_cause(error)}"
        whole = codecs.decode(self.frame, self.backend) if isinstance(self.frame, Codestream) else self.frame
        pixels, span = self._settled(whole, notes)
        if reduce:
            notes.append(f"averaged to 1/{2**reduce} of its size: {reason}")
            pixels = _average(pixels, 2**reduce)
        return pixels, span

    def _settled(self, coded: np.ndarray, notes: list[str]) -> tuple[np.ndarray, Span]:
        if isinstance(self.frame, Codestream):
            says_sign = codecs.says_sign(self.frame)
            pixels, bits, span = settle(coded, self.frame.precision, self.bits, notes, says_sign)
            if codecs.is_differential(self.frame):
                refuse_astray(coded, pixels, self.bits)
        else:
            pixels, bits, span = settle(coded, 8 * coded.dtype.itemsize, self.bits, notes)
        self.header.BitsAllocated, self.header.PixelRepresentation = 8 * pixels.dtype.itemsize, int(bits.signed)
        self.header.BitsStored, self.header.HighBit = bits.stored, bits.high
        return pixels, span


def read_encoded(path: str | os.PathLike, backend: str = "") -> Encoded:
    """A file's header and first frame, checked against each other before any pixel is decoded; raises DicomError.

    Args:
        path: the file.
        backend: the decoder to take, one of `backends`' names; "" takes the first that is installed and can.
    """
    notes: list[str] = []
    try:
        with DicomFile(path) as file:
            header = parse_header(file, notes)
            shape, bits = _check_header(header, notes)
            frame = _read_frame(file, header, shape, notes)
        if not isinstance(frame, Codestream):
            return Encoded(str(path), header, frame, bits, notes=tuple(notes))
        backend = codecs.choose_backend(frame, backend)
        # Halving goes before what _settled does to bits and signs, and would average over a jump between values.
        is_plain = not bits.signed and frame.precision <= bits.stored
        reductions = codecs.reductions(frame) if is_plain else 0
        return Encoded(str(path), header, frame, bits, backend, reductions, (*notes, *frame.notes))
    except Exception as error:
        raise DicomError.of(path, error) from error


def read_stored(path: str | os.PathLike, backend: str = "") -> Stored:
    """Decode the first frame of a single-channel file to stored values, sign and BitsStored applied.

    Where header and codestream disagree on size, the file is refused; on coding or precision the codestream decides; on the
    sign of values see `bits.settle`. Bits above BitsStored are masked off, unless the image is smoother with them, which
    means that its values run on past BitsStored.

    Args:
        path: the file.
        backend: the decoder to take, one of `backends`' names; "" takes the first that is installed and can.

    Raises:
        DicomError: not DICOM, cut short, a part is missing, not grey, damaged, or no decoder is installed.
    """
    return read_encoded(path, backend).decode()


def read_header(path: str | os.PathLike) -> pydicom.Dataset:
    """The header of a file, without its pixel data. Raises DicomError where the file is no DICOM file."""
    try:
        with DicomFile(path) as file:
            header = parse_header(file, [])
            header.buffer = None
            return header
    except Exception as error:
        raise DicomError.of(path, error) from error


def is_blank(pixels: np.ndarray) -> bool:
    """Whether all pixels but one in a thousand hold one value, as in an image that was never exposed or decoded."""
    sample = np.sort(pixels[::16, ::16], axis=None)
    common = sample[sample.size // 2]
    if np.count_nonzero(sample != common) * 1000 >= pixels.size:
        return False  # a look at one pixel in 256 is enough for most images
    return bool(np.count_nonzero(pixels != common) * 1000 < pixels.size)


# Checks of a header, and of a frame against it


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _check_header(header: pydicom.Dataset, notes: list[str]) -> tuple[tuple[int, int], Bits]:
    """(rows, columns) and the bits of a value; completes `header` where a part that has a default is missing."""
    rows, columns, allocated = (_needed(header, keyword) for keyword in ("Rows", "Columns", "BitsAllocated"))
    if not photometric(header):
        raise ValueError(
            "no PhotometricInterpretation, or it is empty: the file is incomplete, cut short, or holds no image"
        )
    for keyword, default in (("SamplesPerPixel", 1), ("PixelRepresentation", 0), ("BitsStored", allocated)):
        if header_integer(header, keyword) is None:
            setattr(header, keyword, default)
            notes.append(f"no {keyword}: taken as {default}")
    if header.SamplesPerPixel != 1 or photometric(header) not in ("MONOCHROME1", "MONOCHROME2"):
        raise ValueError(
            f"{header.SamplesPerPixel} samples a pixel and PhotometricInterpretation {header.PhotometricInterpretation}: "
            "expected 1 sample, MONOCHROME1 or MONOCHROME2"
        )
    if rows * columns > MAX_PIXELS:
        raise ValueError(f"the header asks for {rows} x {columns} pixels, more than the {MAX_PIXELS} taken here")
    stored = int(header.BitsStored)
    if not 0 < stored <= allocated:
        notes.append(f"BitsStored {stored} of {allocated} BitsAllocated: taken as {allocated}")
        stored = allocated
    high = header_integer(header, "HighBit")
    return (rows, columns), Bits(stored, stored - 1 if high is None else high, int(header.PixelRepresentation) == 1)


def _needed(header: pydicom.Dataset, keyword: str) -> int:
    number = header_integer(header, keyword)
    if not number or number < 0:
        raise ValueError(f"no {keyword}, or it is empty: the file is incomplete, cut short, or holds no image")
    return number


def _read_frame(
    file: DicomFile, header: pydicom.FileDataset, shape: tuple[int, int], notes: list[str]
) -> Codestream | np.ndarray:
    """The first frame as it is coded, or its values; sets the transfer syntax in `header` to what it is, if it says else."""
    data = find_pixel_data(file, header)
    stated, syntax = header.file_meta.get("TransferSyntaxUID"), transfer_syntax(header)
    if (frames := max(1, header_integer(header, "NumberOfFrames") or 1)) > 1:
        notes.append(f"{frames} frames: the first is read")
    if data.length is None or (syntax in FAMILIES and data.is_encapsulated):
        frame = read_codestream(read_coded(data, frames), shape)
        if frame is None:
            begins = "the pixel data do not begin as any coding does that is known here"
            raise ValueError(missing_decoder(syntax) or f"{begins}: damaged, or not {uid.UID(syntax).name}")
        if FAMILIES[frame.syntax] != FAMILIES.get(syntax):
            syntax = frame.syntax
    else:
        frame = read_uncompressed(data, shape, header_integer(header, "BitsAllocated"), frames, notes)
        if syntax in FAMILIES:
            syntax = str(uid.ExplicitVRLittleEndian)
    if reason := missing_decoder(syntax):
        raise ValueError(reason)
    if syntax != stated:
        notes.append(f"TransferSyntaxUID {stated or 'missing'}: read as {uid.UID(syntax).name}")
        header.file_meta.TransferSyntaxUID = uid.UID(syntax)
    return frame


def _span_of_reduced(pixels: np.ndarray) -> Span:
    """The span of the whole image, nearly: a low-pass overshoots at edges, on film by a tenth, and its means do so less."""
    import cv2

    return extremes(cv2.blur(pixels, (2, 2)))


def _average(pixels: np.ndarray, step: int) -> np.ndarray:
    """Means of squares of `step` x `step` pixels, of what there is of them at the right and lower edges."""
    left = np.arange(0, pixels.shape[1], step)
    widths = np.minimum(step, pixels.shape[1] - left)
    averaged = np.empty((-(-pixels.shape[0] // step), len(left)), pixels.dtype)
    for row in range(len(averaged)):  # by rows, since sums take more memory than values
        band = pixels[row * step : (row + 1) * step]
        averaged[row] = np.rint(np.add.reduceat(band.sum(axis=0, dtype=np.int64), left) / (widths * len(band)))
    return averaged
