"""Decoders of coded frames: which are installed, in what order they are taken, and how each is called.

imagecodecs comes first, for its speed, then pydicom's plugins, Pillow and pydicom's own RLE decoder. Every one is told what
the codestream says of itself, not what the DICOM header says, and gives the integers that were coded; so all agree.

Importing this module registers imagecodecs with pydicom too, so that `pydicom.Dataset.pixel_array` has it to choose from;
`is_available`, `DECODER_DEPENDENCIES` and `decode_frame` are what pydicom calls.
"""

from __future__ import annotations

import contextlib
import importlib.util
from io import BytesIO

import numpy as np
from pydicom import uid
from pydicom.encaps import encapsulate
from pydicom.pixels import get_decoder

from rsnakit.codestream import Codestream, read_codestream

# gdcm comes late: damaged data can end its process.
ORDER = ("imagecodecs", "pylibjpeg", "pyjpegls", "pillow", "gdcm", "pydicom")
_JPEG = uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit
_JPEG_LOSSLESS = uid.JPEGLossless, uid.JPEGLosslessSV1
_JPEG_LS = uid.JPEGLSLossless, uid.JPEGLSNearLossless
_JPEG_2000 = uid.JPEG2000Lossless, uid.JPEG2000
_HTJ2K = uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K
# Transfer syntaxes of one family differ in what a coder may do, not in how they are decoded.
FAMILIES = {syntax: family[0] for family in (_JPEG, _JPEG_LOSSLESS, _JPEG_LS, _JPEG_2000, _HTJ2K) for syntax in family}
FAMILIES[uid.RLELossless] = uid.RLELossless
_IMAGECODECS = {"jpeg8": (*_JPEG, *_JPEG_LOSSLESS), "jpegls": _JPEG_LS, "jpeg2k": (*_JPEG_2000, *_HTJ2K)}
_CODECS = {syntax: codec for codec, syntaxes in _IMAGECODECS.items() for syntax in syntaxes}
_CODECS[uid.RLELossless] = "dicomrle"
DECODER_DEPENDENCIES = {syntax: ("imagecodecs",) for syntax in _CODECS}


def available_backends(syntax: str) -> tuple[str, ...]:
    """Names of the installed decoders of a transfer syntax, the one that is taken first; () for uncompressed ones too."""
    if syntax not in FAMILIES:
        return ()
    found = set(get_decoder(syntax).available_plugins)
    if _pillow_reads(syntax):
        found.add("pillow")
    return tuple(name for name in ORDER if name in found)


def backends() -> list[dict[str, str]]:
    """A row a transfer syntax: its name and UID, the installed decoders in order, and the one that is taken."""
    rows = []
    for syntax in FAMILIES:
        names = available_backends(syntax)
        taken = names[0] if names else "none: pip install imagecodecs"
        rows.append(
            {
                "transfer_syntax": uid.UID(syntax).keyword,
                "uid": str(syntax),
                "installed": ", ".join(names),
                "taken": taken,
            }
        )
    return rows


def missing_decoder(syntax: str) -> str | None:
    """Why files of a transfer syntax can't be decoded here and what to install; None where they can."""
    name = f"transfer syntax {uid.UID(syntax).name} ({syntax})"
    if syntax in FAMILIES:
        return None if available_backends(syntax) else f"no decoder for {name} is installed: pip install imagecodecs"
    with contextlib.suppress(NotImplementedError):  # how pydicom says that it knows no such transfer syntax
        if get_decoder(syntax).is_native:
            return None
    return f"{name} is none that holds grey images"


def choose_backend(codestream: Codestream, backend: str = "") -> str:
    """The first installed decoder that can decode a codestream, or `backend` if it can. Raises ValueError if none can."""
    name = f"{uid.UID(codestream.syntax).name} of {codestream.precision} bits"
    installed = available_backends(codestream.syntax)
    if backend and backend not in ORDER:
        raise ValueError(f"backend {backend!r} is unknown: expected one of {', '.join(ORDER)}")
    if backend and backend not in installed:
        raise ValueError(
            f"{backend} is not installed, or does not decode {name}; installed for it: {', '.join(installed) or 'none'}"
        )
    if not installed:
        raise ValueError(missing_decoder(codestream.syntax))
    reasons = []
    for each in (backend,) if backend else installed:
        if (reason := _limit(each, codestream)) is None:
            return each
        reasons.append(f"{each} {reason}")
    raise ValueError(f"no decoder for {name} is installed: pip install imagecodecs ({'; '.join(reasons)})")


def decode(codestream: Codestream, backend: str = "") -> np.ndarray:
    """The integers that were coded, (rows, columns), of the smallest type of 8, 16 or 32 bits that holds the precision.

    Args:
        backend: the name of one to take; "" takes the first of `available_backends` that can decode it.

    Raises:
        ValueError: the decoder isn't installed or refuses the codestream; it names the decoder and the reason.
    """
    name = choose_backend(codestream, backend)
    function = {"imagecodecs": _with_imagecodecs, "pillow": _with_pillow}.get(name)
    try:
        pixels = function(codestream) if function else _with_pydicom(codestream, name)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust, which pylibjpeg-rle is written in, comes as one
        text = " ".join(str(error).split())
        raise ValueError(f"damaged or cut short: {name} cannot decode it: {type(error).__name__}: {text}") from error
    if pixels.shape != codestream.shape:
        raise ValueError(f"{name} made {pixels.shape} pixels of {codestream.shape}")
    room = 8 * pixels.dtype.itemsize - codestream.precision
    if pixels.dtype.kind == "u" and room > 2 and (largest := int(pixels.max())) >> codestream.precision + 2:
        # JPEG Lossless adds up differences, modulo 2**16: a part that is lost shifts all that follows, often below 0, and
        # decoders say nothing. Values a little above the precision may be the image's.
        raise ValueError(
            f"damaged: coded with {codestream.precision} bits, but {name} finds values up to {largest} in it"
        )
    return pixels


def reductions(codestream: Codestream) -> int:
    """How often a frame can be halved while it is decoded, which Pillow does for JPEG 2000; 0 where it does not fit."""
    if codestream.signed or codestream.precision > 16 or not _pillow_reads(codestream.syntax):
        return 0
    halvings = 0
    # Pillow rounds the halved sizes where the standard rounds them up; it refuses a file where that differs.
    while halvings < codestream.halvings and all(
        (size + (1 << halvings)) >> (halvings + 1) == -(-size // (2 << halvings)) for size in codestream.shape
    ):
        halvings += 1
    return halvings


def decode_reduced(codestream: Codestream, reduce: int) -> np.ndarray:
    """The image at 1 / 2**reduce of its rows and columns, rounded up: the wavelet's low-pass, values as `decode` gives them.

    `reduce` is at most `reductions` of it; whatever Pillow raises is passed on.
    """
    pixels = _with_pillow(codestream, reduce)
    if pixels.shape != (expected := tuple(-(-size >> reduce) for size in codestream.shape)):
        raise ValueError(f"pillow made {pixels.shape} pixels of {codestream.shape}, expected {expected}")
    return pixels


def says_sign(codestream: Codestream) -> bool:
    """Whether a coding says of its values if they have a sign."""
    return codestream.syntax in (*_JPEG_2000, *_HTJ2K)


def is_differential(codestream: Codestream) -> bool:
    """Whether values are coded as differences from each other, so that a fault in one goes on to the image's end."""
    return codestream.syntax in _JPEG_LOSSLESS


def _limit(name: str, codestream: Codestream) -> str | None:
    """Why a decoder that is installed for a coding cannot take this codestream."""
    if name in ("gdcm", "pillow") and codestream.syntax in _JPEG and codestream.precision > 8:
        return "decodes 8 bits of this coding at most"
    return None


def _with_imagecodecs(codestream: Codestream) -> np.ndarray:
    import imagecodecs

    codec, data = _CODECS[codestream.syntax], codestream.data
    if codec == "jpeg2k":
        return imagecodecs.jpeg2k_decode(data, numthreads=1)  # the processes are the parallelism
    if codec != "dicomrle":
        return getattr(imagecodecs, f"{codec}_decode")(data)
    # Given a place for its output, it can't be made to take more; a pair of bytes too many may be padding.
    pixel = np.dtype(f"<u{codestream.precision // 8}")
    size = codestream.shape[0] * codestream.shape[1] * pixel.itemsize
    decoded = imagecodecs.dicomrle_decode(data, pixel, out=np.zeros(size + 256 * pixel.itemsize, np.uint8))
    if len(decoded) < size:
        raise ValueError(f"the codestream is cut short: it holds {len(decoded)} bytes of {size}")
    return decoded[:size].view(pixel).reshape(codestream.shape)


def _with_pillow(codestream: Codestream, reduce: int = 0) -> np.ndarray:
    from PIL import Image

    image = Image.open(BytesIO(codestream.data), formats=("JPEG", "JPEG2000"))
    if reduce:
        image.reduce = reduce  # calling image.reduce() would decode the whole image first
    image.load()
    pixels = np.asarray(image)
    if codestream.syntax not in _JPEG:
        # Pillow moves JPEG 2000 values to the upper bits of 8 or 16, and signed ones up by half the range.
        pixels = pixels >> (8 * pixels.dtype.itemsize - codestream.precision)
        if codestream.signed:
            pixels = (pixels.astype(np.int32) - (1 << codestream.precision - 1)).astype(f"i{pixels.dtype.itemsize}")
    return pixels


def _pillow_reads(syntax: str) -> bool:
    if importlib.util.find_spec("PIL") is None:
        return False
    from PIL import features

    if syntax in _JPEG:
        return bool(features.check_codec("jpg"))
    if syntax not in (*_JPEG_2000, *_HTJ2K) or not features.check_codec("jpg_2000"):
        return False
    openjpeg = features.version_codec("jpg_2000") or "0"
    return syntax in _JPEG_2000 or tuple(map(int, openjpeg.split(".")[:2])) >= (2, 5)  # since when it knows HTJ2K


def _with_pydicom(codestream: Codestream, plugin: str) -> np.ndarray:
    """Through pydicom, with every option as the codestream has it, so that no plugin corrects bits by a wrong header."""
    rows, columns = codestream.shape
    precision = codestream.precision
    pixels, _ = get_decoder(codestream.syntax).as_array(
        encapsulate([codestream.data]),
        index=0,
        decoding_plugin=plugin,
        raw=True,
        rows=rows,
        columns=columns,
        number_of_frames=1,
        samples_per_pixel=1,
        photometric_interpretation="MONOCHROME2",
        bits_allocated=8 if precision <= 8 else 16 if precision <= 16 else 32,
        bits_stored=precision,
        pixel_representation=int(codestream.signed),
        pixel_keyword="PixelData",
        correct_unused_bits=False,
    )
    return pixels


# pydicom's interface for plugins


def is_available(syntax: str) -> bool:
    """Whether imagecodecs is installed with the codec for a transfer syntax."""
    try:
        import imagecodecs
    except ImportError:
        return False
    return bool(getattr(imagecodecs, _CODECS[syntax].upper()).available)


def decode_frame(frame: bytes, runner) -> bytes:
    codestream = read_codestream(frame, (runner.rows, runner.columns))
    if codestream is None:
        raise ValueError(f"the frame is not {uid.UID(runner.transfer_syntax).name}")
    pixels = _with_imagecodecs(codestream)
    runner.set_option("bits_allocated", 8 * pixels.dtype.itemsize)  # coded precision, not the header's, chose the type
    return pixels.tobytes()


for _syntax in _CODECS:
    with contextlib.suppress(ValueError):  # there already if this module is imported anew
        get_decoder(_syntax).remove_plugin("imagecodecs")
    get_decoder(_syntax).add_plugin("imagecodecs", (__name__, "decode_frame"))
