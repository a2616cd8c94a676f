"""Step loops compiled by speed.compile_steps against the plain loop on this CPU: waves on a small grid and on a large one.

    python tests/bench/steps_time.py [--out work/bench] [--rounds 9] [--threads 1 2] [--budget 60] [--cases ...]

The loop is that of tests/waves.py, 1,000 steps in float32 under no_grad, its chunk size chosen by n="auto" for 10,000
calls; and the same with gradients to the velocity, forward and backward, by plain autograd, compiled, and compiled with
checkpointed chunks. Plain and compiled loops take turns; a ratio is of one round, and its median, smallest and largest over
the rounds are told. torch keeps what it compiled on the disk: compile seconds are those of a first run, into an empty folder,
unless --warm is given; the compiler's start is the first grid's alone. `MB kept` is what autograd holds between forward and
backward; backward needs `MB a chunk` besides, where chunks are computed again. Takes about four minutes on two cores.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}  # read when torch is loaded; spins as in rsnakit

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
import table  # noqa: E402
import torch  # noqa: E402
import waves  # noqa: E402
from kept import bytes_kept  # noqa: E402
from torch import nn  # noqa: E402

from rsnakit import speed  # noqa: E402

CALLS = 10_000  # OpenFWI's data sets have 30,000 to 67,000 velocity models each, of five shots


class Case(NamedTuple):
    """A grid, and how many times as fast as the plain loop it is to be, on how many threads."""

    cells: int
    pad: int
    shots: int
    target: float
    threads: int

    @property
    def name(self) -> str:
        width = self.cells + 2 * self.pad
        return f"{width}x{width}, batch {self.shots}"


CASES = {"small": Case(70, 0, 1, 4.5, 1), "large": Case(70, 120, 5, 2.0, 1)}
TRAINED = 10  # steps a chunk, with gradients
PLAIN, COMPILED, CHECKPOINTED = WAYS = ("plain loop", "compiled", "compiled, checkpointed")


def loop(step: Callable, state: Any, total: int) -> Any:
    for _ in range(total):
        state = step(state)
    return state


def in_turn(ways: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; each comes first as often as the others."""
    names, seconds = list(ways), {name: [] for name in ways}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begun = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def measure(
    case: Case, threads: int, rounds: int, total: int, budget_s: float, **options: Any
) -> tuple[dict, list[dict]]:
    """A row of the loop without gradients, and the report of n="auto"; `options` are those of compile_steps."""
    torch.set_num_threads(threads)
    velocity = torch.full((case.cells, case.cells), 3000.0)
    step, state = waves.make_waves(velocity, waves.ricker(total), case.shots, case.pad)
    with torch.no_grad():
        steps = speed.compile_steps(step, "auto", state=state, total=total, calls=CALLS, budget_s=budget_s, **options)
        error = (steps.run(state, total).now - loop(step, state, total).now).abs().max().item()
        seconds = in_turn({"plain": lambda: loop(step, state, total), "ours": lambda: steps.run(state, total)}, rounds)
    report = steps.report
    median, low, high = table.over_rounds(seconds["plain"], seconds["ours"])
    chosen = report[report["chosen"]].iloc[0]
    tried = report[report["left_out"].eq("") & report["n"].gt(0)]
    row = {
        "grid": case.name,
        "threads": threads,
        "plain, ms a step": 1000 * statistics.median(seconds["plain"]) / total,
        "compiled, ms a step": 1000 * statistics.median(seconds["ours"]) / total,
        "times as fast": median,
        "from": low,
        "to": high,
        "n": int(chosen["n"]),
        "tried": ", ".join(map(str, tried["n"])) or "none",
        "compile s": chosen["compile_s"],
        "compile s, all": sum_compiled(report),
        "pays after calls": chosen["pays_after"],
        "differs by": error,
    }
    rows = [{"grid": case.name, "threads": threads, **each} for each in report.to_dict("records")]
    return row, rows


def sum_compiled(report: Any) -> float:
    """Seconds spent on compiling all sizes; in each row's a single step's are counted."""
    compiled = report[report["left_out"].eq("") & report["n"].gt(0)].set_index("n")["compile_s"]
    single = compiled.get(1, 0.0)
    return float(sum(seconds - (single if n > 1 else 0) for n, seconds in compiled.items()))


class Modelling(nn.Module):
    """The loss of a loop, with the velocity as its parameter; its argument is not used."""

    def __init__(self, way: str, case: Case, total: int, **options: Any) -> None:
        super().__init__()
        self.case, self.total = case, total
        self.velocity = nn.Parameter(torch.full((case.cells, case.cells), 3000.0))
        self.steps, self.compile_s = None, 0.0
        if way != PLAIN:
            self.steps = speed.compile_steps(self.once, TRAINED, checkpoint=way == CHECKPOINTED, **options)
            self.compile_s = self.steps.warm_up(self.begin())

    def begin(self) -> waves.Waves:
        """The first state; what a step closes over is made anew from the velocity, since backward goes through it once."""
        self.step, state = waves.make_waves(self.velocity, waves.ricker(self.total), self.case.shots, self.case.pad)
        return state

    def once(self, state: waves.Waves) -> waves.Waves:
        return self.step(state)

    def forward(self, _: Any = None) -> torch.Tensor:
        state = self.begin()
        final = self.steps.run(state, self.total) if self.steps else loop(self.once, state, self.total)
        return final.now.square().mean()

    def train_once(self) -> torch.Tensor:
        """The gradient to the velocity."""
        return torch.autograd.grad(self(), self.velocity)[0]


def train(
    case: Case, threads: int, rounds: int, total: int, **options: Any
) -> tuple[list[dict], dict[str, list[float]]]:
    """A row for each way to get the loop's gradient, and the seconds of the rounds."""
    torch.set_num_threads(threads)
    models = {way: Modelling(way, case, total, **options) for way in WAYS}
    kept = {way: bytes_kept(model, None) for way, model in models.items()}
    gradients = {way: model.train_once() for way, model in models.items()}
    seconds = in_turn({way: model.train_once for way, model in models.items()}, rounds)
    rows = []
    for way in WAYS:
        median, low, high = table.over_rounds(seconds[way], seconds[PLAIN])
        rows.append(
            {
                "grid": case.name,
                "way": way,
                "threads": threads,
                "MB kept": kept[way] / 1e6,
                "of plain": kept[way] / kept[PLAIN],
                "MB a chunk": kept[COMPILED] / 1e6 * TRAINED / total if way == CHECKPOINTED else 0.0,
                "s": statistics.median(seconds[way]),
                "times plain": median,
                "from": low,
                "to": high,
                # Both have the same chunks: the one that came second found them compiled.
                "compile s": 0.0 if way == PLAIN else max(model.compile_s for model in models.values()),
                "gradient differs by": relative(gradients[way], gradients[PLAIN]),
            }
        )
    return rows, seconds


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, by the largest value that is expected."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def results_of(rows: list[dict], trained: list[dict], total: int) -> list[table.Result]:
    """What RESULTS.md takes: each grid on the threads of its target, and the checkpointed loop."""
    results = []
    for row in rows:
        case = next(case for case in CASES.values() if case.name == row["grid"])
        how = (
            f"n = {row['n']} of those tried ({row['tried']}), compiled in {row['compile s']:.0f} s; "
            f"pays after {row['pays after calls']:.0f} calls"
            if row["n"]
            else f"the plain loop stays (tried: {row['tried']})"
        )
        results.append(
            table.Result(
                f"waves on {case.name}, {total} steps, compile_steps n=auto, {threads_of(row)}",
                "the plain loop",
                "times as fast",
                row["times as fast"],
                row["from"],
                row["to"],
                case.target if row["threads"] == case.threads else None,
                note=f"{how}; results differ by {row['differs by']:.1g}",
            )
        )
    for row in trained:
        if row["way"] == CHECKPOINTED:
            what = f"waves on {row['grid']}, {total} steps with gradients, checkpointed chunks of {TRAINED}, {threads_of(row)}"
            memory, note = (
                row["of plain"],
                f"{row['MB kept']:.3g} MB, and {row['MB a chunk']:.3g} MB for a chunk in backward",
            )
            results.append(
                table.Result(
                    f"{what}: memory", "plain autograd", "of the bytes kept", memory, memory, memory, note=note
                )
            )
            times = row["times plain"], row["from"], row["to"]
            note = f"compiled in {row['compile s']:.0f} s; gradients differ by {row['gradient differs by']:.1g}"
            results.append(table.Result(f"{what}: time", "plain autograd", "times as long", *times, note=note))
    return results


def threads_of(row: dict) -> str:
    return f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds of compiling for each grid and number of threads"
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--warm", action="store_true", help="with what torch finds compiled on the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not options.warm:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows, tried, trained, details = [], [], [], {}
        for threads in options.threads:
            for name in options.cases:
                row, report = measure(CASES[name], threads, options.rounds, options.steps, options.budget)
                rows.append(row)
                tried += report
            found, details[f"trained, {threads} threads"] = train(
                CASES["small"], threads, options.rounds, options.steps
            )
            trained += found
    sections = {
        f"Waves, {options.steps} steps, compiled by compile_steps n=auto, float32": rows,
        f"The same with gradients, chunks of {TRAINED}": trained,
        f"Chunk sizes that were tried, for {CALLS} calls": tried,
    }
    table.save(options.out, "steps_time", sections, details, results_of(rows, trained, options.steps))


if __name__ == "__main__":
    main()
