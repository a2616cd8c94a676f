"""Arrays of floats on disk in several formats: how near they come, how large they are, how fast they load.

The store's 8+1 bits take 9 bits a value and give each block of values a step of its own, so that quiet parts keep their
digits beside loud ones, which one scale for all takes from them: of waveforms late arrivals are off by 0.6 % in blocks and
by 24 % in int8. They don't pay where files come from the page cache: 22 MB of waveforms loaded as float32 in 0.9 ms, as
float16 in 1.2, as 8+1 bits in 4.3, on one of two cores of an AMD EPYC (tests/bench/formats_time.py). They pay where reading is
slower than 5 GB/s or so (`pays_below` tells that of a machine), against float16 slower than 1.6 GB/s: from most disks and
networks, and where the page cache holds the small array and has no room for the large one.
"""

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rsnakit.blocks import Blocks, dequantize_blocks, quantize_blocks

FLOAT32, FLOAT16, BLOCKS, INT8 = "float32", "float16", "8+1 bits", "int8, one scale"
FORMATS = (FLOAT32, FLOAT16, BLOCKS, INT8)
LEVELS = 127  # of int8 on either side of 0


def compare(x: np.ndarray, folder: Path | str, rounds: int = 5, block: int = 64) -> pd.DataFrame:
    """Writes an array in each format and loads it back, the formats in turn.

    What is loaded is a float32 array in memory, from files in the page cache. They hold values alone: shape and type, and of
    8+1 bits the largest value, stand elsewhere, as a store's manifest has them.

    Args:
        x: floats of any shape and precision; float32 of them is what errors are against.
        folder: for the files, which stay there; made where it is missing.
        rounds: how often each format is loaded, after once that isn't counted.
        block: values a block of the 8+1 bits, in C order; 64 make 9 bits a value.

    Returns:
        By format: `bytes` on disk, `bits` a value, `largest_error` in the units of x, `error` (root mean square of the errors
        over that of the values; inf where float16 overflows), `load_ms` (median) with `low` and `high`, `times` (as fast to
        load as float32: the median of the rounds' ratios) with `times_low` and `times_high`.

    Raises:
        TypeError: x holds no floats.
        ValueError: x is empty, has a NaN, an infinity or what float32 makes one; there are no rounds.
    """
    values = _as_float32(x)
    if rounds < 1:
        raise ValueError(f"formats.compare: {rounds} rounds, expected at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: write(values, folder / _file_name(name)) for name, write in _writers(block).items()}
    errors = {
        name: _errors(load(), values) for name, (_, load) in stored.items()
    }  # the first time, which isn't counted
    seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
    for number in range(rounds):
        first = number % len(FORMATS)
        for name in FORMATS[first:] + FORMATS[:first]:
            begun = time.perf_counter()
            stored[name][1]()
            seconds[name].append(time.perf_counter() - begun)
    rows = []
    for name, (paths, _) in stored.items():
        size, ms = sum(path.stat().st_size for path in paths), [1000 * each for each in seconds[name]]
        ratios = [a / b for a, b in zip(seconds[FLOAT32], seconds[name], strict=True)]
        rows.append(
            {
                "bytes": size, "bits": 8 * size / values.size, "largest_error": errors[name][0], "error": errors[name][1],
                "load_ms": statistics.median(ms), "low": min(ms), "high": max(ms), "times": statistics.median(ratios),
                "times_low": min(ratios), "times_high": max(ratios),
            }
        )  # fmt: skip
    return pd.DataFrame(rows, pd.Index(stored, name="format"))


def round_trip(x: np.ndarray, name: str, folder: Path | str, block: int = 64) -> np.ndarray:
    """What comes back of an array in one of `FORMATS`, as float32 in its shape (see `compare`, which refuses the same)."""
    values = _as_float32(x)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return _writers(block)[name](values, folder / _file_name(name))[1]()


def pays_below(table: pd.DataFrame, name: str = BLOCKS) -> float:
    """The speed of reading, in bytes a second, below which a format loads faster than float32; inf: it does in the page
    cache already; 0: never.

    Bytes that are not read are weighed against the time that is computed more, both as `compare` found them in the page cache.
    """
    spared = float(table.loc[FLOAT32, "bytes"] - table.loc[name, "bytes"])
    longer = float(table.loc[name, "load_ms"] - table.loc[FLOAT32, "load_ms"]) / 1000
    if longer <= 0:
        return math.inf
    return max(0.0, spared / longer)


# Each writes float32 values and gives the files and a function that loads them as float32.
_Stored = tuple[list[Path], Callable[[], np.ndarray]]


def _write_float(values: np.ndarray, path: Path, dtype: type) -> _Stored:
    with np.errstate(over="ignore"):  # told by the error, which is infinite
        values.astype(dtype).tofile(path)

    def load() -> np.ndarray:
        stored = np.fromfile(path, dtype).reshape(values.shape)
        if dtype is np.float32:
            return stored
        loaded = np.empty(values.shape, np.float32)
        torch.from_numpy(loaded).copy_(torch.from_numpy(stored))  # which takes NumPy nine times as long, value by value
        return loaded

    return [path], load


def _write_blocks(values: np.ndarray, path: Path, block: int) -> _Stored:
    packed = quantize_blocks(values, block)
    paths = [path.with_suffix(f".{part}") for part in ("codes", "low", "step")]
    for part, array in zip(paths, (packed.codes, packed.low, packed.step), strict=True):
        array.tofile(part)
    grid, top = packed.low.shape, packed.top

    def load() -> np.ndarray:
        codes, low, step = (
            np.fromfile(part, dtype) for part, dtype in zip(paths, (np.uint8, np.float32, np.float32), strict=True)
        )
        codes = codes.reshape(grid[0], -1)
        blocks = Blocks(codes, low.reshape(grid), step.reshape(grid), block, values.shape, np.dtype(np.float32), top)
        return dequantize_blocks(blocks)

    return paths, load


def _write_int8(values: np.ndarray, path: Path) -> _Stored:
    scale = np.float32(np.abs(values).max() / LEVELS)
    if scale == 0 and values.any():
        scale = np.finfo(np.float32).smallest_subnormal
    levels = np.rint(values / scale if scale else values).clip(-LEVELS, LEVELS)
    paths = [path, path.with_suffix(".scale")]
    levels.astype(np.int8).tofile(paths[0])
    np.array([scale], np.float32).tofile(paths[1])

    def load() -> np.ndarray:
        loaded = np.fromfile(paths[0], np.int8).reshape(values.shape).astype(np.float32)
        loaded *= np.fromfile(paths[1], np.float32)[0]
        return loaded

    return paths, load


def _writers(block: int) -> dict[str, Callable[[np.ndarray, Path], _Stored]]:
    return {
        FLOAT32: lambda values, path: _write_float(values, path, np.float32),
        FLOAT16: lambda values, path: _write_float(values, path, np.float16),
        BLOCKS: lambda values, path: _write_blocks(values, path, block),
        INT8: _write_int8,
    }


def _file_name(name: str) -> str:
    return name.split(",")[0].replace("8+1 bits", "blocks") + ".bin"


def _errors(loaded: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """The largest error, and the root mean square of errors over that of the values."""
    error = loaded.astype(np.float64) - values
    size = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    of_errors = float(np.sqrt(np.mean(np.square(error))))
    return float(np.abs(error).max()), of_errors / size if size else of_errors


def _as_float32(x: np.ndarray) -> np.ndarray:
    """Values as float32, finite and at least one; see `compare` for what is refused."""
    x = np.asarray(x)
    if x.dtype.kind != "f":
        raise TypeError(f"formats.compare takes floats, not {x.dtype}: cast them first, or store integers as they are")
    if not x.size:
        raise ValueError(f"formats.compare: an empty array of shape {x.shape}, expected at least one value")
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(x, np.float32).reshape(x.shape)
    finite = np.isfinite(values)
    if not finite.all():
        at = int(np.argmin(finite))
        bad = x.reshape(-1)[at]
        what = (
            "a NaN" if np.isnan(bad) else "an infinity" if np.isinf(bad) else f"{bad:g}, beyond the range of float32,"
        )
        raise ValueError(f"formats.compare: {what} at flat position {at}, expected finite values")
    return values
