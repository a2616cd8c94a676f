"""The store's 8+1 bits on float waveforms: how near they come and how fast they load, beside float32, float16 and int8.

    python tests/bench/formats_time.py [--out work/bench] [--rounds 15] [--copies 16]

Waveforms are those of the worked example of compiled step loops: five shots of the acoustic wave equation over a velocity
that grows in layers, in copies of other loudness, since one file of the kind holds hundreds. They load from the page cache
into a float32 array, on one thread, the formats in turn; a ratio is of one round. int8 has one scale for the whole array.
Late arrivals are the second half of the time, where waves are weak. Takes about half a minute on two cores.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import table
import torch

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from waves import make_waves, ricker  # noqa: E402

from rsnakit import formats  # noqa: E402

SHOTS, CELLS, STEPS, PAD = 5, 70, 1000, 120
TITLES = {formats.BLOCKS: "8+1 bits", formats.FLOAT16: "float16", formats.INT8: "int8 with one scale"}


def waveforms(steps: int = STEPS, pad: int = PAD, shots: int = SHOTS) -> np.ndarray:
    """(shots, steps, receivers) float32, as OpenFWI lays them out: pressure at the surface over three layers."""
    velocity = torch.full((CELLS, CELLS), 1500.0)  # m/s
    velocity[25:], velocity[45:] = 2200.0, 3500.0
    step, state = make_waves(velocity, ricker(max(steps, STEPS)), shots=shots, pad=pad)
    record = torch.empty(steps, shots, CELLS)
    with torch.inference_mode():
        for number in range(steps):
            state = step(state)
            record[number] = state.now[:, pad + 1, pad : pad + CELLS]
    return record.transpose(0, 1).contiguous().numpy()


def late_errors(x: np.ndarray, folder: Path) -> dict[str, float]:
    """By format, the error of the second half of the time over the values there, of one scale and blocks for the whole."""
    half = x.shape[1] // 2
    found = {}
    for name in formats.FORMATS:
        error = formats.round_trip(x, name, folder)[:, half:] - x[:, half:].astype(np.float64)
        found[name] = float(np.sqrt(np.mean(error**2) / np.mean(x[:, half:].astype(np.float64) ** 2)))
    return found


def measure(record: np.ndarray, copies: int, rounds: int, folder: Path) -> list[dict]:
    """A row a format; `copies` of the record, each times a random factor, are what is loaded."""
    loudness = np.random.default_rng(0).uniform(0.5, 2.0, copies).astype(np.float32)
    x = (record[None] * loudness[:, None, None, None]).reshape(-1, *record.shape[1:])
    found, late = formats.compare(x, folder, rounds), late_errors(x, folder)
    return [
        {
            "format": name,
            "MB": row["bytes"] / 1e6,
            "bits a value": row["bits"],
            "error, % (rms)": 100 * row["error"],
            "of late arrivals, %": 100 * late[name],
            "largest error, % of the largest value": 100 * row["largest_error"] / float(np.abs(x).max()),
            "load, ms": row["load_ms"],
            "from": row["low"],
            "to": row["high"],
            "times as fast as float32": row["times"],
            "least": row["times_low"],
            "most": row["times_high"],
        }
        for name, row in found.iterrows()
    ]


def results_of(rows: list[dict]) -> list[table.Result]:
    """Loading against float32 and the late arrivals' error against int8; there is no target for either."""
    by_name = {row["format"]: row for row in rows}
    size = f"{by_name[formats.FLOAT32]['MB']:.0f} MB of float32 waveforms"
    found = [
        table.Result(
            what=f"loading {size} as {title}", against="float32", ratio="times as fast",
            median=by_name[name]["times as fast as float32"], low=by_name[name]["least"], high=by_name[name]["most"],
            note="from the page cache; {bits a value:.3g} bits a value, error {error, % (rms):.2g} %".format(**by_name[name]),
        )
        for name, title in TITLES.items()
    ]  # fmt: skip
    blocks, int8 = (by_name[name]["of late arrivals, %"] for name in (formats.BLOCKS, formats.INT8))
    ratio = blocks / int8
    note = f"{blocks:.2g} % against {int8:.2g} %, rms, over the second half of the time"
    return [*found, table.Result("error of late arrivals in 8+1 bits", "int8 with one scale", "share of its error",
                                 ratio, ratio, ratio, note=note)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--copies", type=int, default=16)
    options = parser.parse_args()
    record = waveforms()
    torch.set_num_threads(1)  # which widens float16; NumPy does the rest on one
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(record, options.copies, options.rounds, Path(folder))
    table.save(options.out, "formats_time", {"Formats of float waveforms": rows}, results=results_of(rows))


if __name__ == "__main__":
    main()
