"""Codecs of pixel data: which are there, what a codestream says of itself, and imagecodecs as pydicom's plugin.

Importing this module registers imagecodecs with pydicom's decoders; `is_available`, `DECODER_DEPENDENCIES` and
`decode_frame` are what pydicom calls.
"""

import contextlib
import struct

import numpy as np
from pydicom import uid
from pydicom.pixels import get_decoder

_J2K = b"\xff\x4f\xff\x51"
_JPEG = uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1
_JPEG_LS = uid.JPEGLSLossless, uid.JPEGLSNearLossless
_JPEG_2000 = uid.JPEG2000Lossless, uid.JPEG2000, uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K
CODECS = {**dict.fromkeys(_JPEG, "jpeg8"), **dict.fromkeys(_JPEG_LS, "jpegls"), **dict.fromkeys(_JPEG_2000, "jpeg2k")}
CODECS[uid.RLELossless] = "dicomrle"
_JPEG_FRAMES = {0xC0: _JPEG[0], 0xC1: _JPEG[1], 0xC2: _JPEG[1], 0xC3: _JPEG[3], 0xF7: _JPEG_LS[0]}  # by SOF marker
DECODER_DEPENDENCIES = {syntax: ("imagecodecs",) for syntax in CODECS}


def missing_decoder(syntax: str) -> str | None:
    """Why files of a transfer syntax can't be decoded here and what to install; None where they can."""
    name = f"transfer syntax {uid.UID(syntax).name} ({syntax})"
    try:
        if get_decoder(syntax).is_available:
            return None
    except NotImplementedError:
        return f"{name} is none that holds grey images"
    return f"no decoder for {name} is installed: pip install imagecodecs"


def read_codestream(frame: bytes) -> tuple[str, int, tuple[int, int]] | None:
    """Transfer syntax, bits a pixel and (rows, columns) by a codestream's own header; None if it is no JPEG of a kind.

    Raises ValueError where the end marker is missing: JPEG decoders fill what was cut off with grey and say nothing.
    """
    start = frame.find(_J2K) if frame[4:8] == b"jP  " else 0  # some writers leave the JP2 wrapper on
    if frame[start : start + 4] != _J2K and frame[:2] != b"\xff\xd8":
        return None
    if not frame[-1024:].rstrip(b"\0\xff").endswith(b"\xff\xd9"):
        raise ValueError("the codestream is cut short: it has no end marker")
    if frame[start : start + 4] == _J2K:  # SIZ comes first: ISO/IEC 15444-1, A.5.1
        right, bottom, left, top = struct.unpack_from(">4I", frame, start + 8)
        return uid.JPEG2000, (frame[start + 42] & 0x7F) + 1, (bottom - top, right - left)
    at = 2
    while frame[at + 1] not in _JPEG_FRAMES:  # segments up to the frame header: ISO/IEC 10918-1, B.2.2
        at += 1 if frame[at + 1] == 0xFF else 2 + int.from_bytes(frame[at + 2 : at + 4], "big")
    return _JPEG_FRAMES[frame[at + 1]], frame[at + 4], struct.unpack_from(">2H", frame, at + 5)


def is_available(syntax: str) -> bool:
    """Whether imagecodecs is installed with the codec for a transfer syntax."""
    try:
        import imagecodecs
    except ImportError:
        return False
    return bool(getattr(imagecodecs, CODECS[syntax].upper()).available)


def decode_frame(frame: bytes, runner) -> bytes:
    import imagecodecs

    codec = CODECS[runner.transfer_syntax]
    if codec == "dicomrle":
        return imagecodecs.dicomrle_decode(frame, np.dtype(f"<u{runner.bits_allocated // 8}"))
    pixels = getattr(imagecodecs, f"{codec}_decode")(frame)
    runner.set_option("bits_allocated", 8 * pixels.dtype.itemsize)  # coded precision, not the header's, chose the type
    return pixels.tobytes()


for _syntax in CODECS:
    with contextlib.suppress(ValueError):  # there already if this module is imported anew
        get_decoder(_syntax).remove_plugin("imagecodecs")
    get_decoder(_syntax).add_plugin("imagecodecs", (__name__, "decode_frame"))
