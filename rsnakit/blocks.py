"""8+1-bit block quantisation: a byte a value, and for each block of values its minimum and its step."""

import dataclasses

import numpy as np

BLOCK = 32  # integers a block: 32 codes of a byte, and two uint16, are 9 bits a value


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array in blocks: `low + codes * step`, a `low` and a `step` for each block.

    Attributes:
        codes: (n_blocks, block) uint8.
        low: (n_blocks,) uint16 for integers, float32 for floats: the smallest value of each block.
        step: (n_blocks,) of low's type: what one level of the code is worth; 1 (0 for floats) in a constant block.
        shape: shape of the array that was quantised.
        dtype: its NumPy type.
    """

    codes: np.ndarray
    low: np.ndarray
    step: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype


def quantize_blocks(x: np.ndarray, block: int = BLOCK) -> Blocks:
    """Quantises an array to 8-bit codes with a minimum and a step for each run of `block` values.

    The array is taken in C order; a last short block is filled up with its own last value. Integers are exact wherever a
    block spans 255 levels or fewer, else within half a step. Floats are within half a step, and a constant block is exact
    where float32 holds its value.

    Args:
        x: integers in 0..65535, or floats, of any shape.
        block: values a block; 32 for integers and 64 for floats make 9 bits a value.

    Raises:
        ValueError: a NaN or an infinity, an integer outside 0..65535, or a range that float32 does not hold.
        TypeError: neither integers nor floats.
    """
    x = np.asarray(x)
    if x.dtype.kind not in "uif":
        raise TypeError(f"quantize_blocks takes integers or floats, not {x.dtype}")
    flat = np.ascontiguousarray(x).reshape(-1)
    n_blocks = -(-flat.size // block)
    if flat.size % block:
        flat = np.pad(flat, (0, n_blocks * block - flat.size), mode="edge")
    rows = flat.reshape(n_blocks, block)
    if x.dtype.kind == "f":
        codes, low, step = _quantize_floats(rows)
    else:
        codes, low, step = _quantize_integers(rows)
    return Blocks(codes, low, step, x.shape, x.dtype)


def dequantize_blocks(blocks: Blocks) -> np.ndarray:
    """The array that was quantised, in its shape and type (see `quantize_blocks` for how near it comes)."""
    if blocks.dtype.kind == "f":
        # In float64: low + 255 * step may lie beyond the type by half a step although the maximum does not.
        values = blocks.low[:, None].astype(np.float64) + blocks.codes * blocks.step[:, None].astype(np.float64)
        limit = np.finfo(blocks.dtype).max
        values = np.clip(values, -limit, limit).astype(blocks.dtype)
    else:
        # low + code * step is at most half a step over the maximum: within uint16 but for the highest blocks.
        peak = int((blocks.low + 255 * blocks.step.astype(np.int64)).max(initial=0))
        wide = np.uint16 if peak <= 65535 else np.uint32
        values = np.multiply(blocks.codes, blocks.step[:, None], dtype=wide)
        values += blocks.low[:, None]
        top = min(np.iinfo(blocks.dtype).max, 65535)
        values = np.minimum(values, top, out=values).astype(blocks.dtype)
    return values.reshape(-1)[: int(np.prod(blocks.shape, dtype=np.int64))].reshape(blocks.shape)


def _quantize_integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if rows.size and (rows.min() < 0 or rows.max() > 65535):
        raise ValueError(f"quantize_blocks: integers from {rows.min()} to {rows.max()}, expected 0..65535")
    low, high = rows.min(axis=1).astype(np.uint32), rows.max(axis=1).astype(np.uint32)
    step = np.maximum(1, (high - low + 254) // 255)
    codes = (rows.astype(np.uint32) - low[:, None] + step[:, None] // 2) // step[:, None]
    return codes.astype(np.uint8), low.astype(np.uint16), step.astype(np.uint16)


def _quantize_floats(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    finite = np.isfinite(rows)
    if not finite.all():
        at = int(np.argmin(finite))
        bad = "a NaN" if np.isnan(rows.flat[at]) else "an infinity"
        raise ValueError(f"quantize_blocks: {bad} at flat position {at}, expected finite values")
    wide = rows.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        # The minimum is rounded down and the step up, so that low + codes * step reaches from minimum to maximum.
        low = _round_to_float32(wide.min(axis=1), -np.inf)
        step = _round_to_float32((wide.max(axis=1) - low) / 255, np.inf)
    if not (np.isfinite(low).all() and np.isfinite(step).all()):
        raise ValueError("quantize_blocks: values beyond the range of float32")
    divisor = np.where(step > 0, step, 1).astype(np.float64)[:, None]  # a constant block: every code is 0
    codes = np.rint((wide - low[:, None]) / divisor)
    return codes.astype(np.uint8), low, step


def _round_to_float32(values: np.ndarray, towards: float) -> np.ndarray:
    rounded = values.astype(np.float32)
    beyond = rounded > values if towards < 0 else rounded < values
    return np.where(beyond, np.nextafter(rounded, np.float32(towards)), rounded)
