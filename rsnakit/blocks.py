"""8+1-bit block quantisation: a byte a value, and for each block of values its minimum and its step.

Integers get back more than that promises. A constant block needs no codes, so its bytes carry the upper bits of blocks that
span too many levels for 8, and those come back exactly too: all of them, in an array with the background of a mammogram.
"""

import dataclasses
import functools
import math

import numpy as np

BLOCK = 32  # integers a block: 32 codes of a byte, and two uint16, are 9 bits a value
WIDE = 65534  # in place of the step of a block whose codes have 12 bits: 8 of its own, and 4 of a carrier's
CARRIER = 65535  # in place of the step of a constant block whose codes are the upper 4 bits of two wide ones


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array in blocks: `base + low + codes * step`, a `low` and a `step` for each block.

    Blocks are tiles of a 2-D array, R of them down and C across: of the array itself, or of its values in C order, laid out
    a block a row.

    Attributes:
        codes: (R * tile height, C * tile width) uint8, each in the place of its value.
        low: (R, C) uint16 for integers, float32 for floats: the smallest value of each block.
        step: (R, C) of low's type: what one level of the code is worth. For integers it is 1 to 257, `WIDE` or `CARRIER`;
            for floats it is 0 in a constant block.
        block: values a block in C order, or (height, width) of a tile.
        shape: shape of the array that was quantised.
        dtype: its NumPy type.
        top: its largest value, which no value that comes back exceeds.
        base: the smallest of integers that do not all lie in 0..65535, else 0.

    Of n carriers, in C order, the lower 4 bits of their codes go to the first n wide blocks, the upper 4 to the others.
    """

    codes: np.ndarray
    low: np.ndarray
    step: np.ndarray
    block: int | tuple[int, int]
    shape: tuple[int, ...]
    dtype: np.dtype
    top: float
    base: int = 0


def quantize_blocks(x: np.ndarray, block: int | tuple[int, int] = BLOCK) -> Blocks:
    """Quantises an array to 8-bit codes with a minimum and a step for each block of values.

    Integers are exact wherever a block spans 255 levels or fewer, and up to 4,095 wherever a constant block has room for
    its upper bits (each has for two; first come, first served); else they are within half a step. Floats are within half a
    step and what float32 rounds; a constant block is exact where float32 holds its value.

    Args:
        x: integers, signed ones too, that span at most 65,535 levels, or floats; of any shape, strides and byte order.
        block: so many values in C order, the last block filled up with the last value; or (height, width) of the tiles of a
            2-D array, filled up from its right and lower edges. 32 integers or 64 floats a block make 9 bits a value.

    Raises:
        ValueError: a NaN or an infinity, integers of a wider range, floats beyond float32's, or a block that does not fit.
        TypeError: neither integers nor floats. A mask is refused as well: `np.packbits` makes it one bit a value.
    """
    x = np.asarray(x)
    if x.dtype.kind not in "uif":
        raise TypeError(f"quantize_blocks takes integers or floats, not {x.dtype}")
    tile = _tile(block)
    if min(tile) < 1 or (isinstance(block, tuple) and (x.ndim, len(block)) != (2, 2)):
        raise ValueError(f"quantize_blocks: no blocks of {block} in an array of shape {x.shape}")
    values = np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    if not isinstance(block, tuple):
        values = values.reshape(1, -1)
    missing = [(0, -n % side) for n, side in zip(values.shape, tile, strict=True)]
    if np.any(missing):
        values = np.pad(values, missing, mode="edge")
    if not isinstance(block, tuple):
        values = values.reshape(-1, tile[1])
    quantize = _quantize_floats if x.dtype.kind == "f" else _quantize_integers
    return Blocks(**quantize(values, tile), block=block, shape=x.shape, dtype=x.dtype)


def dequantize_blocks(blocks: Blocks) -> np.ndarray:
    """The array that was quantised, in its shape and type (see `quantize_blocks` for how near it comes).

    Raises:
        ValueError: the parts do not fit each other, or hold what quantising never makes: they are damaged.
    """
    _check(blocks)
    values = _float_values(blocks) if blocks.dtype.kind == "f" else _integer_values(blocks)
    if not isinstance(blocks.block, tuple):
        return values.reshape(-1)[: math.prod(blocks.shape)].reshape(blocks.shape)
    return np.ascontiguousarray(values[: blocks.shape[0], : blocks.shape[1]])


def _quantize_integers(values: np.ndarray, tile: tuple[int, int]) -> dict:
    low, high = _extremes(values, tile)
    smallest, top = (int(low.min()), int(high.max())) if values.size else (0, 0)
    base = 0 if smallest >= 0 and top <= 65535 else smallest
    if top - base > 65535:
        raise ValueError(f"quantize_blocks: integers from {smallest} to {top}, expected to span 65535 at most")
    # Modulo 65536, which is right for differences of at most that, whatever the type.
    values, low, high = (a.astype(np.uint16, copy=False) - np.uint16(base % 65536) for a in (values, low, high))
    span = high - low
    step = np.maximum(1, (span.astype(np.uint32) + 254) // 255).astype(np.uint16)
    _down_tiles(values, tile)[...] -= _across(low, tile)
    codes = values.astype(np.uint8)  # right where the step is 1

    coarse = np.flatnonzero(step > 1)
    divisor, in_twelve_bits = step.reshape(-1, 1, 1)[coarse], (span.reshape(-1)[coarse] <= 4095)
    carriers = np.flatnonzero(span == 0)[: (np.count_nonzero(in_twelve_bits) + 1) // 2]
    chosen = np.flatnonzero(in_twelve_bits)[: 2 * len(carriers)]
    differences = _take(values, coarse, tile)
    upper = np.zeros((2 * len(carriers), *tile), np.uint8)
    upper[: len(chosen)] = differences[chosen] >> 8
    level, remainder = differences // divisor, differences % divisor
    level += remainder >= divisor - remainder  # to the nearest
    level[chosen] = differences[chosen] & 255
    _put(codes, coarse, tile, level.astype(np.uint8))
    _put(codes, carriers, tile, upper[: len(carriers)] | upper[len(carriers) :] << 4)
    step.reshape(-1)[coarse[chosen]] = WIDE
    step.reshape(-1)[carriers] = CARRIER
    return {"codes": codes, "low": low, "step": step, "top": top, "base": base}


def _integer_values(blocks: Blocks) -> np.ndarray:
    """The values in the places of their codes, of the array's type."""
    codes, tile, top = blocks.codes, _tile(blocks.block), blocks.top - blocks.base
    low, step = blocks.low.reshape(-1), blocks.step.reshape(-1)
    values = codes.astype(np.uint16)
    _down_tiles(values, tile)[...] += _across(blocks.low, tile)  # right where the step is 1

    others = np.flatnonzero(step > 1)
    kinds = step.take(others)
    carriers, wide, coarse = others[kinds == CARRIER], others[kinds == WIDE], others[kinds < WIDE]
    if len(wide) not in (2 * len(carriers) - 1, 2 * len(carriers)):
        raise ValueError(f"dequantize_blocks: {len(carriers)} blocks carry the upper bits of {len(wide)}: damaged")
    if len(carriers):
        _add_upper_bits(values, carriers, wide, low.take(carriers), tile)
    if len(coarse):
        # Rounded to the nearest level, a block's largest value may come back too large, for uint16 even.
        found = _take(codes, coarse, tile) * step[coarse, None, None].astype(np.uint32) + low[coarse, None, None]
        _put(values, coarse, tile, np.minimum(found, np.uint32(top)).astype(np.uint16))
    values = values.astype(blocks.dtype, copy=False)  # modulo the type, again; adding the base makes it right
    if blocks.base:
        values += blocks.dtype.type(blocks.base)
    return values


def _add_upper_bits(
    values: np.ndarray, carriers: np.ndarray, wide: np.ndarray, low: np.ndarray, tile: tuple[int, int]
) -> None:
    """Moves the upper 4 bits of wide blocks from the carriers to them; `low` is what the carriers' own values are."""
    # Four values at a time, where a line has them: each is 16 bits of a number of 64, which it does not outgrow.
    number, ones = (np.uint64, 0x0001000100010001) if tile[1] % 4 == 0 else (np.uint16, 1)
    lines, items, n = _lines(np.concatenate([carriers, wide]), values, tile), _items(values, tile), len(carriers)
    taken = items.take(lines)
    numbers = taken.view(number).reshape(*lines.shape, -1)  # (tile height, blocks, numbers a line)
    constant = (low * number(ones))[:, None]
    carried = numbers[:, :n] - constant
    numbers[:, n : 2 * n] += (carried & number(15 * ones)) << number(8)
    second = numbers[:, 2 * n :]
    second += (carried[:, : second.shape[1]] >> number(4) & number(15 * ones)) << number(8)
    numbers[:, :n] = constant
    items[lines] = taken


def _quantize_floats(values: np.ndarray, tile: tuple[int, int]) -> dict:
    finite = np.isfinite(values)
    if not finite.all():
        at = int(np.argmin(finite))
        bad = "a NaN" if np.isnan(values.flat[at]) else "an infinity"
        raise ValueError(f"quantize_blocks: {bad} at flat position {at}, expected finite values")
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype(np.float64)
        low, high = _extremes(wide, tile)
        # The minimum is rounded down and the step up, so that low + codes * step reaches from minimum to maximum.
        low = _round_to_float32(low, -np.inf)
        step = _round_to_float32((high - low) / 255, np.inf)
    if not (np.isfinite(low).all() and np.isfinite(step).all()):
        raise ValueError("quantize_blocks: values beyond the range of float32")
    down = _down_tiles(wide, tile)
    down -= _across(low, tile)
    down /= _across(np.where(step > 0, step, 1), tile)  # a constant block: every code is 0
    codes = np.rint(wide, out=wide).astype(np.uint8)
    return {"codes": codes, "low": low, "step": step, "top": float(high.max()) if high.size else 0.0}


def _float_values(blocks: Blocks) -> np.ndarray:
    """The values in the places of their codes, of the array's type."""
    # What a block covers is up to twice what float32 holds.
    narrow = blocks.dtype.itemsize <= 4 and 255 * float(blocks.step.max(initial=0)) < np.finfo(np.float32).max
    values = blocks.codes.astype(np.float32 if narrow else np.float64)
    low, step = blocks.low.astype(values.dtype), blocks.step.astype(values.dtype)
    with np.errstate(over="ignore"):  # past the type's range by half a step, and brought back into it
        down = _down_tiles(values, _tile(blocks.block))
        down *= _across(step, _tile(blocks.block))
        down += _across(low, _tile(blocks.block))
    np.clip(values, float(np.finfo(blocks.dtype).min), blocks.top, out=values)
    return values.astype(blocks.dtype, copy=False)


def _round_to_float32(values: np.ndarray, towards: float) -> np.ndarray:
    rounded = values.astype(np.float32)
    beyond = rounded > values if towards < 0 else rounded < values
    return np.where(beyond, np.nextafter(rounded, np.float32(towards)), rounded)


def _tile(block: int | tuple[int, int]) -> tuple[int, int]:
    return block if isinstance(block, tuple) else (1, block)


def _down_tiles(values: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """A view, (R, tile height, columns)."""
    return values.reshape(values.shape[0] // tile[0], tile[0], values.shape[1])


def _across(of_blocks: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """(R, C) numbers of blocks as what broadcasts with `_down_tiles`: NumPy is quick where the last axis is long."""
    if of_blocks.shape[1] == 1:
        return of_blocks[:, None]
    if tile[1] == 4 and of_blocks.dtype == np.uint16:  # four at once, as one number of 64 bits
        return (of_blocks * np.uint64(0x0001000100010001)).view(np.uint16)[:, None]
    return np.repeat(of_blocks, tile[1], axis=1)[:, None]


def _extremes(values: np.ndarray, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of each block, (R, C) each."""
    down = _down_tiles(values, tile)
    shape = (down.shape[0], down.shape[2] // tile[1], tile[1])
    return down.min(axis=1).reshape(shape).min(axis=2), down.max(axis=1).reshape(shape).max(axis=2)


def _take(values: np.ndarray, chosen: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """The values of chosen blocks, given by their numbers in C order, as (n, *tile)."""
    return _items(values, tile).take(_lines(chosen, values, tile).T).view(values.dtype).reshape(-1, *tile)


def _put(values: np.ndarray, chosen: np.ndarray, tile: tuple[int, int], new: np.ndarray) -> None:
    """Writes (n, *tile) of the same type to chosen blocks."""
    _items(values, tile)[_lines(chosen, values, tile).T] = _items(new, tile).reshape(-1, tile[0])


def _items(values: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """A view of the lines of all tiles, in C order, each as one item of so many bytes: NumPy is quick with items."""
    return values.reshape(-1).view(f"V{tile[1] * values.itemsize}")


def _lines(chosen: np.ndarray, values: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Where the lines of chosen blocks are among `_items`, (tile height, n)."""
    down, across = values.shape[0] // tile[0], values.shape[1] // tile[1]
    return _first_lines(down, across, tile[0]).take(chosen) + np.arange(tile[0])[:, None] * across


@functools.lru_cache(maxsize=4)
def _first_lines(down: int, across: int, height: int) -> np.ndarray:
    """Where the first line of each block is among `_items`; kept, since a division takes longer than looking it up."""
    blocks = np.arange(down * across)
    return blocks + blocks // max(1, across) * ((height - 1) * across)


def _check(blocks: Blocks) -> None:
    """Refuses (ValueError) blocks whose parts do not fit each other, as of another version or a damaged file."""
    codes, low, step, kind = blocks.codes, blocks.low, blocks.step, blocks.dtype.kind
    expected = np.dtype({"f": np.float32, "u": np.uint16, "i": np.uint16}.get(kind))
    if kind not in "uif" or codes.dtype != np.uint8 or not low.dtype == step.dtype == expected:
        raise ValueError(
            f"dequantize_blocks: codes of {codes.dtype}, minima of {low.dtype} and steps of {step.dtype} for an array of "
            f"{blocks.dtype}: they do not belong together"
        )
    tile, size = _tile(blocks.block), math.prod(blocks.shape)
    sides = blocks.shape if isinstance(blocks.block, tuple) else (-(-size // max(1, tile[1])), tile[1])
    grid = tuple(-(-n // max(1, side)) for n, side in zip(sides, tile, strict=False))
    if (
        min(tile) < 1
        or len(sides) != 2
        or min(blocks.shape, default=0) < 0
        or not (low.shape == step.shape == grid and codes.shape == (grid[0] * tile[0], grid[1] * tile[1]))
    ):
        raise ValueError(
            f"dequantize_blocks: codes {codes.shape}, minima {low.shape} and steps {step.shape} do not make up an array of "
            f"shape {blocks.shape} in blocks of {blocks.block}"
        )
    if kind == "f" and not (np.isfinite(low).all() and np.isfinite(step).all() and (step >= 0).all()):
        raise ValueError("dequantize_blocks: minima or steps that are no numbers, or negative steps: damaged")
    if kind != "f" and step.min(initial=1) == 0:
        raise ValueError(
            f"dequantize_blocks: {np.count_nonzero(step == 0)} of {step.size} steps are 0: damaged, or never written"
        )
    if kind != "f" and not low.max(initial=0) <= blocks.top - blocks.base <= 65535:
        raise ValueError(
            f"dequantize_blocks: a minimum of {int(low.max(initial=0)) + blocks.base} in an array from {blocks.base} to "
            f"{blocks.top}: damaged"
        )
