"""What a coded frame says of itself: its coding, size, bits and sign, read before any decoder is let at it.

A decoder takes memory, and trusts lengths, by what stands in a codestream's header. What no mammogram has is refused here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pydicom import uid

MAX_PIXELS = 2**26  # of a frame: twice the largest mammograms, and 128 MiB of 16-bit values
ZERO_RUN = 4096  # bytes of 0 in a row that no JPEG 2000 coder writes, while an unfinished copy of a file does
_J2K = b"\xff\x4f\xff\x51"
_DELIMITER = b"\xfe\xff\xdd\xe0"  # DICOM's end of all fragments
_END = b"\xff\xd9"
# Frame headers by their marker, ISO/IEC 10918-1, table B.1, and 14495-1: baseline, extended, progressive, lossless, LS.
_FRAME_HEADERS = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive", 0xC3: "lossless", 0xF7: "LS"}
_OTHER_FRAME_HEADERS = {*range(0xC5, 0xD0)} - {0xC8, 0xCC}  # differential, arithmetic: DICOM has retired them all
# No coder gets below so many bits a pixel: a Huffman code has a bit at least, a block of 64 has two codes, and a pair of
# bytes makes a run of 128. What asks for more pixels than that is cut short, or made to take memory.
_LEAST_BITS = {"lossless": 1, "baseline": 1 / 32, "extended": 1 / 32, "progressive": 1 / 64, "RLE": 1 / 8}


@dataclass(frozen=True)
class Codestream:
    """A frame as it is coded, and what its own header says.

    Attributes:
        data: the codestream from its first marker on.
        syntax: UID of the transfer syntax that this is, whatever the DICOM header says.
        shape: (rows, columns).
        precision: bits a pixel.
        signed: whether values are coded with a sign; of all codings JPEG 2000 alone can say so.
        halvings: how often it could be decoded to half the size; 0 but for JPEG 2000.
        notes: on what was put right.
    """

    data: bytes
    syntax: str
    shape: tuple[int, int]
    precision: int
    signed: bool = False
    halvings: int = 0
    notes: tuple[str, ...] = ()


def read_codestream(frame: bytes, shape: tuple[int, int]) -> Codestream | None:
    """What a frame's own header says; None if it is neither JPEG of a kind nor RLE.

    Args:
        frame: the bytes of one frame, its fragments joined.
        shape: (rows, columns) by the DICOM header, for codings that leave them to it.

    Raises:
        ValueError: it is cut short (decoders fill what is missing with grey and say nothing), damaged, or asks for what
            no mammogram needs.
    """
    start = frame.find(_J2K, 0, 2**16) if frame[4:8] == b"jP  " else 0  # some writers leave the JP2 wrapper on
    try:
        if frame[start : start + 4] == _J2K:
            codestream = _read_jpeg_2000(frame[start:] if start else frame)
        elif frame[:2] == b"\xff\xd8":
            codestream = _read_jpeg(frame, shape)
        elif _is_rle(frame):
            codestream = _read_rle(frame, shape)
        else:
            return None
    except (IndexError, struct.error) as error:
        raise ValueError("the codestream is cut short: it ends inside its own header") from error
    if codestream.shape != shape:
        raise ValueError(
            f"the header says {shape[0]} x {shape[1]} pixels, the codestream {codestream.shape[0]} x {codestream.shape[1]}"
        )
    return codestream


def _ended(data: bytes, start: int) -> tuple[str, ...]:
    """Raises ValueError where no end marker comes after `start`; notes on bytes behind it, but for one of padding."""
    end = data.rfind(_END, start) + len(_END)
    if end < len(_END):
        raise ValueError("the codestream is cut short: it has no end marker")
    surplus = len(data) - end
    if _DELIMITER in data[end:]:
        raise ValueError("bytes of the codestream are missing: its fragment reaches past the end of the pixel data")
    return () if surplus <= 1 else (f"{surplus} surplus bytes after the codestream: passed over",)


# JPEG 2000: ISO/IEC 15444-1, annex A


def _read_jpeg_2000(data: bytes) -> Codestream:
    right, bottom, left, top, tile_width, tile_height, tile_left, tile_top = struct.unpack_from(">8I", data, 8)
    components, depth, step_x, step_y = struct.unpack_from(">H3B", data, 40)
    rows, columns, precision, signed = bottom - top, right - left, (depth & 0x7F) + 1, depth > 0x7F
    if components != 1 or (step_x, step_y) != (1, 1):
        raise ValueError(
            f"the codestream has {components} components, sampled at 1/{step_x} x 1/{step_y}: expected one"
        )
    if min(rows, columns, tile_width, tile_height) < 1:
        raise ValueError(f"the codestream has {rows} x {columns} pixels in tiles of {tile_height} x {tile_width}")
    tiles = -(-(right - tile_left) // tile_width) * -(-(bottom - tile_top) // tile_height)
    at, coding = 4 + int.from_bytes(data[4:6], "big"), None
    while (marker := data[at : at + 2]) != b"\xff\x90":  # start of the first tile
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker[0] != 0xFF or length < 2:
            raise ValueError(
                f"the codestream's header is damaged: marker {marker.hex()} of {length} bytes at byte {at}"
            )
        if marker == b"\xff\x52":
            coding = data[at + 4 : at + 2 + length]
        at += 2 + length
    if coding is None:
        raise ValueError("the codestream's header is damaged: it does not say how it is coded (COD)")
    _, _, layers, _, levels, _, _, style, _ = struct.unpack_from(">2BH6B", coding)
    whole = (left, top, tile_left, tile_top) == (0, 0, 0, 0)
    _refuse_absurd_parts(rows, columns, tiles, layers, levels, coding)
    if bytes(ZERO_RUN) in data.rstrip(b"\0"):
        raise ValueError(f"more than {ZERO_RUN} bytes of the codestream are zero: an unfinished or damaged copy")
    return Codestream(
        data,
        uid.HTJ2K if style & 0x40 else uid.JPEG2000,  # which leave open whether anything was lost
        (rows, columns),
        precision,
        signed,
        levels if whole else 0,  # elsewhere halves begin between two pixels
        _ended(data, at),
    )


def _refuse_absurd_parts(rows: int, columns: int, tiles: int, layers: int, levels: int, coding: bytes) -> None:
    """Decoders take memory for each tile, and for each precinct and layer; real files have few of each."""
    precincts = largest = 0
    for level in range(min(levels, 32) + 1):  # from the smallest image to the whole one
        size = coding[10 + level] if coding[0] & 1 else 0xFF  # exponents of a precinct's height and width
        halved = levels - level
        in_level = -(-rows // (1 << halved + (size >> 4))) * -(-columns // (1 << halved + (size & 15)))
        precincts, largest = precincts + in_level, max(largest, in_level)
    for what, number, most in (
        ("tiles", tiles, 16 + rows * columns // 1024),
        ("precincts", precincts, 1024 + rows * columns // 64),
        ("packets", largest * layers * (levels + 1), 2**22),
        ("wavelet levels", levels, 32),
    ):
        if number > most:
            raise ValueError(f"the codestream has {number} {what} on {rows} x {columns} pixels: at most {most} taken")


# JPEG, JPEG Lossless and JPEG-LS: ISO/IEC 10918-1, annex B, and 14495-1, annex C


def _read_jpeg(data: bytes, shape: tuple[int, int]) -> Codestream:
    at, notes = _next_segment(data, 0), ()
    while (kind := _FRAME_HEADERS.get(data[at + 1])) is None:  # tables and the like come before the frame header
        at = _next_segment(data, at)
    precision, rows, columns, components = struct.unpack_from(">B2HB", data, at + 4)
    if components != 1:
        raise ValueError(f"the codestream has {components} components: expected one")
    if rows == 0:  # then the number of lines follows the first scan (B.2.5), where decoders do not look for it
        lines = data.rfind(b"\xff\xdc\x00\x04", at)
        rows = int.from_bytes(data[lines + 4 : lines + 6], "big") if lines > 0 else shape[0]
        data = data[: at + 5] + struct.pack(">H", rows) + data[at + 7 :]
        notes = (f"the codestream's header leaves the rows open: {rows} taken",)
    while data[at + 1] != 0xDA:  # tables may follow, then the first scan
        at = _next_segment(data, at)
    notes += _ended(data, at)
    if kind == "progressive" and (scans := data.count(b"\xff\xda")) > 100:
        raise ValueError(f"the codestream has {scans} scans: a coder writes about ten")
    _refuse_too_few_bytes(kind, len(data), rows, columns)
    selection = data[at + 5 + 2 * data[at + 4]]  # the predictor, or the error that JPEG-LS may make
    syntax = {
        "baseline": uid.JPEGBaseline8Bit,
        "lossless": uid.JPEGLosslessSV1 if selection == 1 else uid.JPEGLossless,
        "LS": uid.JPEGLSNearLossless if selection else uid.JPEGLSLossless,
    }.get(kind, uid.JPEGExtended12Bit)
    return Codestream(data, syntax, (rows, columns), precision, notes=notes)


def _next_segment(data: bytes, at: int) -> int:
    """Where the segment after the one at `at` begins."""
    at += 2 if at == 0 else 2 + struct.unpack_from(">H", data, at + 2)[0]
    while data[at] == data[at + 1] == 0xFF:
        at += 1
    marker = data[at + 1]
    if data[at] != 0xFF or marker in _OTHER_FRAME_HEADERS or marker < 0xC0 or marker in range(0xD0, 0xDA):
        raise ValueError(
            f"the codestream's header is damaged, or of no known kind: {data[at : at + 2].hex()} at byte {at}"
        )
    return at


# RLE: DICOM PS3.5, annex G


def _is_rle(frame: bytes) -> bool:
    """A table of offsets stands first: their number, 64, further ones in order, and zeros."""
    if len(frame) < 66:
        return False
    segments, *offsets = struct.unpack_from("<16L", frame)
    used, unused = offsets[:segments], offsets[segments:]
    return 1 <= segments <= 15 and used[0] == 64 and not any(unused)


def _read_rle(frame: bytes, shape: tuple[int, int]) -> Codestream:
    segments, *offsets = struct.unpack_from("<16L", frame)
    ends = [*offsets[1:segments], len(frame)]
    if segments not in (1, 2, 4) or any(end - offset < 2 for offset, end in zip(offsets, ends, strict=False)):
        raise ValueError(
            f"the codestream is cut short or damaged: {segments} segments at {offsets[:segments]} in {len(frame)} bytes"
        )
    _refuse_too_few_bytes("RLE", len(frame), *shape)
    return Codestream(frame, uid.RLELossless, shape, 8 * segments)


def _refuse_too_few_bytes(kind: str, size: int, rows: int, columns: int) -> None:
    if 8 * size < (least := _LEAST_BITS.get(kind, 0) * rows * columns):
        raise ValueError(
            f"the codestream is cut short: {size} bytes, and {rows} x {columns} pixels take {least / 8:.0f} at least"
        )
