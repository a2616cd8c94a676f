"""Building a store with one process and with two, and what that makes of a whole competition.

    python tests/bench/build_time.py [--out work/bench] [--images 96] [--rounds 3]

The images are one real mammogram made into 12-bit files of 4096x3328, half of them JPEG 2000 and half JPEG Lossless, read
again and again under other ids from the page cache; every store is made anew. One and two processes take turns; starting
the processes counts. Writes build_time.md and build_time.json: images/s, their ratio within a round, the peak of memory a
process, and how long the competition's 54,706 images would take. Takes about two minutes on two cores.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import cv2
import pandas as pd
import samples
import table
import turns

from rsnakit import preprocess
from rsnakit.preprocess import PreprocessConfig

COMPETITION, CORES = 54_706, 4  # images of the competition; cores of a Kaggle machine
TARGET_RATIO, TARGET_MB = 1.7, 700.0


class PeakMemory:
    """Largest resident memory of each process started while it is open, in MB: Linux keeps the peak, so polling is enough.

    Elsewhere nothing is found, and `mb` stays empty.
    """

    def __init__(self) -> None:
        self.mb: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(0.05):
            for pid in children(os.getpid()):
                self.mb[pid] = max(peak_mb(pid), self.mb.get(pid, 0.0))


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs; [] where the system has no /proc."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(word) for word in task.read_text().split()]
        except OSError:  # ended meanwhile
            continue
        found += direct + [deeper for each in direct for deeper in children(each)]
    return found


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process so far, MB (10**6 bytes); 0 where it can't be told."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM")), 0.0)


def images_of(paths: list[Path], count: int) -> pd.DataFrame:
    """A table of `count` images whose files are `paths`, over and over."""
    ids = [str(number) for number in range(count)]
    return pd.DataFrame(
        {"patient_id": ids, "image_id": ids, "path": [paths[number % len(paths)] for number in range(count)]}
    )


def build(images: pd.DataFrame, config: PreprocessConfig, n_jobs: int) -> tuple[float, list[float]]:
    """Seconds of making a store, and the peak MB of each process that worked on it."""
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as memory:
        begun = time.perf_counter()
        made = preprocess.build_store(images, config, Path(folder) / "store", n_jobs=n_jobs)
        seconds = time.perf_counter() - begun
        if not (made.index["status"] == "ok").all():
            raise RuntimeError(f"not all images were prepared: {made.index['reason'].unique()}")
    return seconds, [mb for mb in memory.mb.values() if mb > 50]  # joblib's resource tracker is smaller than any worker


def summarize(images: int, seconds: dict[int, list[float]], peaks: list[float]) -> dict[str, float | str]:
    """The row of the table from the seconds of the rounds by number of processes."""
    gain = turns.ratio(seconds[1], seconds[2])
    rates = {jobs: images / statistics.median(each) for jobs, each in seconds.items()}
    hours = {jobs: COMPETITION / rate / 3600 for jobs, rate in rates.items()}
    peak = max(peaks, default=float("nan"))
    return {
        "images/s, one process": rates[1],
        "images/s, two": rates[2],
        "ratio": gain.median,
        "smallest to largest": f"{gain.low:.2f} to {gain.high:.2f}",
        "largest process, MB": peak,
        f"{COMPETITION} images, hours, one process": hours[1],
        "two": hours[2],
        f"{CORES}, if they gain as two do": hours[2] * 2 / CORES,
        "ratio reached": "yes" if gain.median >= TARGET_RATIO else "no",
        "memory reached": "yes" if peak < TARGET_MB else "no",
    }


def result_of(size: str, count: int, seconds: dict[int, list[float]], row: dict) -> table.Result:
    """What a second process gains, with the memory and the time of a whole competition beside it."""
    hours = row[f"{CORES}, if they gain as two do"]
    return table.Result(
        f"a store of {count} images of 4096x3328 to {size}, two processes", "one process", "times as fast",
        *turns.ratio(seconds[1], seconds[2]), TARGET_RATIO,
        note=f"largest process {row['largest process, MB']:.0f} MB (target {TARGET_MB:g}); {COMPETITION} images on {CORES} "
        f"cores that gain as two do: {hours:.1f} h",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cv2.setNumThreads(1)  # one process is one core
    rows, results, details = [], [], {}
    with tempfile.TemporaryDirectory() as temporary:
        made = samples.write_made(Path(temporary))
        images = images_of(list(made.values()), options.images)
        for size in ((1024, 512), (512, 256)):
            config = PreprocessConfig(height=size[0], width=size[1])
            seconds: dict[int, list[float]] = {1: [], 2: []}
            peaks: list[float] = []
            for _ in range(options.rounds):
                for jobs in seconds:
                    took, mb = build(images, config, jobs)
                    seconds[jobs].append(took)
                    peaks += mb
            name = "x".join(map(str, size))
            rows.append({"to": name, **summarize(len(images), seconds, peaks)})
            results.append(result_of(name, len(images), seconds, rows[-1]))
            details[name] = {"seconds": seconds, "peaks": peaks}
    headline = (
        f"Building a store of {len(images)} images of 4096x3328, half JPEG 2000, half JPEG Lossless "
        f"(targets: {TARGET_RATIO:g} times, under {TARGET_MB:g} MB a process)"
    )
    table.save(options.out, "build_time", {headline: rows}, details, results)


if __name__ == "__main__":
    main()
