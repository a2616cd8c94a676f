"""A DICOM file's header, and the bytes of its first frame: no more of it is read, and no length in it takes memory."""

from __future__ import annotations

import io
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import pydicom

from rsnakit.files import open_regular

MAX_READS = 2**18  # of one file; a large header takes some thousands
MAX_INFLATED = 2**29  # bytes of a deflated file
_PIXEL_DATA, _ITEM = 0x7FE00010, b"\xfe\xff\x00\xe0"
_JPEG_STARTS = (b"\xff\xd8", b"\xff\x4f", b"\0\0\0\x0c")  # JPEG, JPEG 2000, and that in a JP2 file
_LONG_VRS = (b"OB", b"OW", b"UN", b"OL", b"OV", b"OF", b"OD")


class DicomFile(io.BufferedReader):
    """An open file that bounds what a reader who believes its lengths can make it do. Raises ValueError at a bound."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(io.FileIO(os.fspath(path), opener=open_regular))
        self._size = os.fstat(self.fileno()).st_size
        self._reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise ValueError(f"more than {MAX_READS} elements and items: damaged, or no image")
        if size is None or size < 0:  # pydicom takes all that is left only to inflate it
            deflated = super().read()
            _check_inflated(deflated)
            return deflated
        # For a length of 4 GB Python would take 4 GB first, and look what there is then.
        return super().read(size if size < 2**16 else min(size, max(0, self._size - self.tell())))


def parse_header(file: DicomFile, notes: list[str]) -> pydicom.FileDataset:
    """The header, up to the pixel data, where `file` stands then. Raises ValueError if the file is no DICOM file."""
    start = file.read(132)
    file.seek(0)
    if not start:
        raise ValueError("the file is empty")
    if start[128:] == b"DICM":
        header = _parse(file)
        if len(header) == 0:  # how pydicom reports a file that ends inside an element
            raise ValueError("the file is cut short: it ends inside an element, before its pixel data")
        return header
    try:
        header = _parse(file, force=True)
        recognised = any(keyword in header for keyword in ("SOPClassUID", "Modality", "Rows"))
    except Exception:  # text taken for tags and lengths fails in many ways, none of which says more than this
        recognised = False
    if not recognised:
        raise ValueError("not a DICOM file: no DICM marker after a preamble, and no header at the first byte")
    notes.append("no preamble and no DICM marker: read from the first byte")
    return header


def _parse(file: DicomFile, **options) -> pydicom.FileDataset:
    try:
        return pydicom.dcmread(file, stop_before_pixels=True, **options)
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        if getattr(error, "errno", None):  # the file cannot be read at all
            raise
        # Inside a sequence pydicom turns every error into one of its own, ours too.
        inner = error.__context__
        text = inner if isinstance(inner, ValueError) else f"the header is damaged: {type(error).__name__}: {error}"
        raise ValueError(str(text)) from error


@dataclass(frozen=True)
class PixelData:
    """Pixel data that are not read yet: a file or buffer that stands at their first byte, their length and VR.

    `length` is in bytes, None where it is left open; `order` of bytes is "<" or ">", `vr` empty where it is implicit.
    """

    source: io.BufferedIOBase
    length: int | None
    order: str
    vr: bytes

    @property
    def is_encapsulated(self) -> bool:
        """Whether an item comes first, as it does in all compressed pixel data."""
        ahead = self.source.read(4)
        self.source.seek(-len(ahead), os.SEEK_CUR)
        return ahead == _ITEM


def find_pixel_data(file: DicomFile, header: pydicom.FileDataset) -> PixelData:
    """The pixel data that come next after `parse_header`. Raises ValueError where there are none."""
    # What was inflated stands in a buffer, which is given up here: it could not be pickled with the header.
    source, header.buffer = getattr(header, "buffer", None) or file, None
    order = ">" if header.original_encoding[1] is False else "<"
    start = source.read(8)
    group, element = struct.unpack(f"{order}HH", start[:4]) if len(start) == 8 else (0, 0)
    if group << 16 | element != _PIXEL_DATA:
        raise ValueError("no PixelData: the file is cut short, or holds no image")
    # The header's first element need not have told explicit from implicit. A length is even, and these letters' are not.
    vr = start[4:6] if start[4:6] in _LONG_VRS else b""
    (length,) = struct.unpack(f"{order}L", source.read(4).ljust(4, b"\0") if vr else start[4:])
    return PixelData(source, None if length == 0xFFFFFFFF else length, order, vr)


def read_uncompressed(
    data: PixelData, shape: tuple[int, int], allocated: int, frames: int, notes: list[str]
) -> np.ndarray:
    """The first frame of pixel data that are not compressed, (rows, columns) unsigned, without a copy where it can be.

    Args:
        data: where it stands.
        shape: (rows, columns).
        allocated: bits a pixel, by the header.
        frames: that follow each other.
        notes: what was found is added.

    Raises:
        ValueError: there are fewer bytes than that takes, or pixels are packed otherwise than in whole bytes.
    """
    rows, columns = shape
    if 8 < allocated < 16 and data.length >= 2 * rows * columns:
        notes.append(f"BitsAllocated {allocated}: taken as 16, which the length of PixelData fits")
        allocated = 16
    if allocated not in (8, 16, 32):
        raise ValueError(f"BitsAllocated {allocated}: expected 8, 16 or 32")
    needed = rows * columns * allocated // 8
    pad = needed * frames % 2
    swap = data.order == ">" and allocated == 8 and data.vr == b"OW"  # then bytes stand in words, each turned round
    values = data.source.read(needed + pad)
    if len(values) < needed or data.length < needed:
        raise ValueError(
            f"pixel data is cut short: {min(len(values), data.length)} bytes, and {rows} x {columns} pixels of {allocated} "
            f"bits need {needed}"
        )
    if data.length not in (needed * frames, needed * frames + pad):
        notes.append(f"{data.length - needed * frames} surplus bytes after the pixels: passed over")
    elif pad and (data.length % 2 or len(values) == needed):
        notes.append("PixelData lacks its padding byte")
    if swap:
        values = np.frombuffer(values, "u2", len(values) // 2).byteswap()
    pixels = np.frombuffer(values, f"{data.order}u{allocated // 8}", rows * columns).reshape(shape)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def read_coded(data: PixelData, frames: int) -> bytes:
    """The first frame of encapsulated pixel data, its fragments joined: DICOM PS3.5, A.4.

    It ends where the second one begins by the table of offsets, or else, of several frames, with the first fragment that
    ends a codestream, or with the first one, as for RLE.
    """
    tables = _read_item(data.source)
    offsets = struct.unpack(f"<{len(tables) // 4}L", tables[: len(tables) // 4 * 4]) if tables else ()
    end = offsets[1] - offsets[0] if len(offsets) > 1 and offsets[1] > offsets[0] else None
    fragments, length = [], 0
    while (fragment := _read_item(data.source)) is not None:
        fragments.append(fragment)
        length += 8 + len(fragment)
        is_last = b"\xff\xd9" in fragment[-10:] or not fragments[0].startswith(_JPEG_STARTS)
        if frames > 1 and (is_last if end is None else length >= end):
            break
    if not fragments:
        raise ValueError("PixelData holds no fragment: the file is cut short or damaged")
    return fragments[0] if len(fragments) == 1 else b"".join(fragments)


def _read_item(source: io.BufferedIOBase) -> bytes | None:
    """The value of the next item; None at the end of the items, or of the file."""
    start = source.read(8)
    if len(start) < 8 or start[:4] == b"\xfe\xff\xdd\xe0":
        return None
    length = int.from_bytes(start[4:], "little")
    if start[:4] != _ITEM or length == 0xFFFFFFFF:
        raise ValueError(f"PixelData is damaged: {start.hex(' ', 4)} where a fragment should begin")
    return source.read(length)


def _check_inflated(deflated: bytes) -> None:
    """Raises ValueError where deflated data are damaged or would take too much memory."""
    inflater, size = zlib.decompressobj(-zlib.MAX_WBITS), 0
    try:
        while not inflater.eof:
            inflated = inflater.decompress(deflated, 2**20)
            deflated = inflater.unconsumed_tail
            size += len(inflated)
            if size > MAX_INFLATED:
                raise ValueError(f"its data are deflated, and take more than {MAX_INFLATED} bytes")
            if not inflated and not deflated:
                raise ValueError("the file is cut short: its deflated data have no end")
    except zlib.error as error:
        raise ValueError(f"its deflated data are damaged: {error}") from error
