"""Which bits of a coded value are the image's, and whether they have a sign, where header and codestream disagree.

Two readings of the same bits differ by a jump where values wrap round. A picture has few of them, so the smoother reading
decides where neither side can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLEARLY = 0.75  # of the roughness of the reading that is preferred: noise comes out rougher or smoother by a little


Span = tuple[int, int]  # the smallest and the largest of some values


@dataclass(frozen=True)
class Bits:
    """BitsStored, HighBit and PixelRepresentation of a header."""

    stored: int
    high: int
    signed: bool


def settle(
    coded: np.ndarray, precision: int, stated: Bits, notes: list[str], says_sign: bool = False
) -> tuple[np.ndarray, Bits, Span]:
    """Takes from each coded value the bits that are the image's, and its sign.

    - The codestream's precision wins over BitsStored where it is smaller.
    - Values in upper bits, as HighBit says, are moved down where the bits below are empty.
    - Bits above BitsStored are masked off, unless the image is smoother with them: then its values run on past it.
    - JPEG 2000 says whether values have a sign. Where the header says otherwise, an unsigned codestream is read as two's
      complement and a signed one as it is; that gives the original where an encoder was handed signed values as bits, and
      where the header is wrong. What an encoder made of unsigned values of its full range, taken for signed, has a jump in
      mid-grey then; so if the other reading is clearly smoother, that one is taken.

    Args:
        coded: (H, W) integers as a decoder gives them, of a signed type if they were coded with a sign.
        precision: bits a value is coded with.
        stated: by the header.
        notes: what was found is added.
        says_sign: whether the coding itself says if values have a sign.

    Returns:
        (H, W) values (`coded` itself where nothing is to be changed), what a header that describes them says, and their
        smallest and largest.
    """
    if precision < stated.stored:
        notes.append(f"BitsStored {stated.stored}, but coded with {precision} bits: taken as {precision}")
    elif stated.high >= stated.stored:
        coded, precision = _move_down(coded, stated, precision, notes)
    if coded.dtype.kind == "i":
        pixels = coded if stated.signed else _keep_sign(coded, precision, notes)
    elif stated.signed:
        is_open = says_sign or precision < stated.stored
        pixels = _give_sign(coded, precision, is_open, notes)
    else:
        pixels = coded
    return _mask_unused(pixels, min(stated.stored, precision), notes)


def refuse_astray(coded: np.ndarray, settled: np.ndarray, stated: Bits) -> None:
    """Refuses (ValueError) what a decoder makes of a damaged codestream of differences, which decoders say nothing of.

    A fault in one value goes on to the image's end and carries values out of the range of BitsStored: far beyond it, or out
    of it and back again, so that they jump by all of it where they were `settled` by masking. An overlay's bits come and go
    without the bits below.
    """
    largest, beyond = int(coded.max()), 1 << stated.stored
    if stated.signed or coded.dtype.kind != "u" or largest < beyond:
        return
    if settled is coded:
        is_astray = largest >= 8 * beyond
    else:
        upper = coded >> stated.stored
        crosses = upper[:, 1:] != upper[:, :-1]
        jumps = np.abs(np.diff(settled.astype(np.int32), axis=1))[crosses]
        is_astray = np.median(jumps) > beyond // 2 if jumps.size else bool(np.ptp(upper[:, 0]))  # or whole rows did
    if is_astray:
        raise ValueError(
            f"damaged: values run away, up to {largest} where BitsStored is {stated.stored}; a part of the codestream is wrong"
        )


def extremes(values: np.ndarray) -> Span:
    """The smallest and the largest of integers."""
    return int(values.min()), int(values.max())


def _move_down(coded: np.ndarray, stated: Bits, precision: int, notes: list[str]) -> tuple[np.ndarray, int]:
    shift, said = stated.high + 1 - stated.stored, f"HighBit {stated.high} of {stated.stored} BitsStored"
    if 0 < shift <= precision - stated.stored and not np.any(coded & ((1 << shift) - 1)):
        notes.append(f"{said}: values moved down by {shift} bits")
        return coded >> shift, precision - shift
    notes.append(f"{said}: taken as {stated.stored - 1}, where the values are")
    return coded, precision


def _keep_sign(coded: np.ndarray, precision: int, notes: list[str]) -> np.ndarray:
    """Values coded with a sign, under a header that says unsigned."""
    said = "PixelRepresentation 0, but coded with a sign"
    without = coded.view(f"u{coded.dtype.itemsize}") & ((1 << precision) - 1)
    if coded.min() < 0 and _roughness(without) < CLEARLY * _roughness(coded):
        notes.append(f"{said}: read without, which wraps round less")
        return without
    notes.append(f"{said}: read with it")
    return coded


def _give_sign(coded: np.ndarray, precision: int, is_open: bool, notes: list[str]) -> np.ndarray:
    """Values coded without a sign, under a header that says signed; `is_open` if it may be wrong."""
    said, unused = "PixelRepresentation 1, but coded without a sign", 8 * coded.dtype.itemsize - precision
    signed = (coded << unused).view(f"i{coded.dtype.itemsize}") >> unused  # the second shift brings the sign back
    if is_open and signed.min() < 0 and _roughness(coded) < CLEARLY * _roughness(signed):
        notes.append(f"{said}: read without, which wraps round less")
        return coded
    if is_open:
        notes.append(f"{said}: read as two's complement of {precision} bits")
    return signed


def _mask_unused(pixels: np.ndarray, bits: int, notes: list[str]) -> tuple[np.ndarray, Bits, Span]:
    signed = pixels.dtype.kind == "i"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    smallest, largest = span = extremes(pixels)
    if low <= smallest and largest <= high:
        return pixels, Bits(bits, bits - 1, signed), span
    unused = 8 * pixels.dtype.itemsize - bits
    masked = pixels << unused >> unused
    if _roughness(pixels) < _roughness(masked):
        notes.append(f"values from {smallest} to {largest} run on past BitsStored {bits}: kept")
        bits = max(largest.bit_length(), (~smallest).bit_length() if smallest < 0 else 0) + signed
        return pixels, Bits(bits, bits - 1, signed), span
    notes.append(f"bits above BitsStored {bits} masked off")
    return masked, Bits(bits, bits - 1, signed), extremes(masked)


def _roughness(pixels: np.ndarray) -> float:
    """Sum of the steps between neighbours, on a share of the rows of a large image: wrapping round adds to it."""
    values = pixels[:: 1 + pixels.size // 2**22].astype(np.float32)
    return sum(float(np.abs(np.diff(values, axis=axis)).sum(dtype=np.float64)) for axis in (0, 1))
