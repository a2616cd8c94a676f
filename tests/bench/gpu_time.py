"""What each trick of speed and memory gives on a CUDA GPU; without one every row says that it was not measured, and why.

    python tests/bench/gpu_time.py [--out work/bench] [--rounds 9] [--device cuda]

A training step is that of the kit (`rsnakit.trials`: the loop of training over batches that are there already, in a process
of its own), in bf16 and channels last where nothing else is said; fp32 is torch's, with TF32 in convolutions. What is
compared takes turns; a ratio is of one round, and its median, smallest and largest over the rounds are told. The largest
batch is found by bisection, with the GPU as it is: nothing else should hold its memory. The wave equation is that of
tests/waves.py, 1,000 steps. Inference goes from DICOM files of 4096x3328 to scores. What fails costs its own rows alone.
Takes up to twenty-five minutes on a GPU.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import samples
import table

from rsnakit import env


@dataclass(frozen=True)
class Plan:
    """What is measured on which device: the model, its images' (height, width), the batch, the largest batch that is tried,
    grids as cells, boundary and shots, the steps on them, the images of inference and their (rows, columns)."""

    device: str = "cuda"
    rounds: int = 9
    backbone: str = "convnext_tiny"
    size: tuple[int, int] = (1024, 512)
    batch: int = 8
    most: int = 1024
    grids: tuple[tuple[int, int, int], ...] = ((70, 0, 1), (70, 120, 5))
    steps: int = 1000
    images: int = 320
    detector: tuple[int, int] = samples.SIZE
    limit_s: float = 150.0  # of each comparison, and of each search for the largest batch


class Row(NamedTuple):
    """What a row of RESULTS.md compares, and in what."""

    what: str
    against: str
    ratio: str = "times as fast"


Found = tuple[tuple[float, float, float], str] | str  # median, smallest and largest, and a note; or why there is none
PRECISIONS = ("fp32", "bf16", "fp16")


def rows_of(plan: Plan) -> dict[str, list[Row]]:
    """The rows by what measures them."""
    size = "x".join(map(str, plan.size))
    step = f"training step on a GPU, {plan.backbone}, {plan.batch} x {size}"
    batch = f"largest batch on a GPU, {plan.backbone}, {size}"
    grids = [f"{cells + 2 * pad}x{cells + 2 * pad}, {shots} shots" for cells, pad, shots in plan.grids]
    return {
        "precisions": [Row(f"{step}, {name}", "fp32") for name in PRECISIONS[1:]],
        "batches": [Row(f"{batch}, {name}", "fp32", "times as many images") for name in PRECISIONS[1:]],
        "layout": [Row(f"{step}, channels last", "plain layout")],
        "compiling": [Row(f"{step}, torch.compile", "not compiled")],
        "checkpointing": [
            Row(f"{step}, checkpoint_blocks: time", "plain", "times as long"),
            Row(f"{step}, checkpoint_blocks: memory", "plain", "of the memory"),
        ],
        "loops": [Row(f"compile_steps on a GPU, waves on {grid}", "a plain loop") for grid in grids],
        "inference": [Row("inference on a GPU, from DICOM file to score", "the same machine without it")],
    }


class Bench:
    """Measures the rows of a plan.

    Attributes:
        plan: what is measured.
        trials: of training steps, `rsnakit.trials.Trials` or what stands in for it.
        folder: for files, removed by whoever made it.
        tried: a row for each setting whose training step was timed.
    """

    def __init__(self, plan: Plan, trials: Any, folder: Path) -> None:
        self.plan, self.trials, self.folder = plan, trials, folder
        self.tried: list[dict] = []

    def results(self) -> list[table.Result]:
        """All rows; those that fail with the reason."""
        found = []
        for name, rows in rows_of(self.plan).items():
            try:
                values: Sequence[Found] = getattr(self, name)()
            except Exception as error:  # whatever torch, a driver or a compiler raises
                values = [in_line(error)] * len(rows)
            for row, value in zip(rows, values, strict=True):
                missing = isinstance(value, str)
                found.append(
                    table.Result.missing(*row, value) if missing else table.Result(*row, *value[0], note=value[1])
                )
        return found

    def precisions(self) -> list[Found]:
        return self._against(*(self._setting(precision=name) for name in PRECISIONS))

    def layout(self) -> list[Found]:
        return self._against(self._setting(channels_last=False), self._setting())

    def compiling(self) -> list[Found]:
        return self._against(self._setting(), self._setting(compile="default"))

    def checkpointing(self) -> list[Found]:
        plain, ours = self._steps(self._setting(), self._setting(grad_checkpointing=True))
        if problem := plain.error or ours.error:
            return [problem, problem]
        times: Found = table.over_rounds(*even(plain.images_s, ours.images_s)), ""
        share = ours.peak_mb / plain.peak_mb
        told = f"{plain.peak_mb:.0f} MB, and {ours.peak_mb:.0f}"
        return [times, ((share, share, share), told) if share > 0 else "the memory cannot be told here"]

    def batches(self) -> list[Found]:
        first, *others = (
            self.trials.largest_batch(self._setting(precision=name), self.plan.most, limit_s=self.plan.limit_s)
            for name in PRECISIONS
        )
        values: list[Found] = []
        for each in others:
            if not (first.largest and each.largest):
                values.append(next((tried["why"] for tried in (*each.tried, *first.tried) if tried["why"]), "no time"))
                continue
            share = each.largest / first.largest
            values.append(((share, share, share), f"{each.largest} images, and {first.largest}; set by {each.ended}"))
        return values

    def loops(self) -> list[Found]:
        return [self._loop(*grid) for grid in self.plan.grids]

    def _loop(self, cells: int, pad: int, shots: int) -> Found:
        import torch
        import waves

        from rsnakit.speed import compile_steps

        total, device = self.plan.steps, self.plan.device
        with torch.device(device):
            step, state = waves.make_waves(torch.full((cells, cells), 3000.0), waves.ricker(total), shots, pad)

        def plain() -> None:
            now = state
            for _ in range(total):
                now = step(now)

        with torch.no_grad():
            steps = compile_steps(step, "auto", state=state, total=total, calls=1000, budget_s=self.plan.limit_s)
            seconds = in_turn({"plain": plain, "ours": lambda: steps.run(state, total)}, self.plan.rounds, device)
        compiled_s = steps.report.set_index("n")["compile_s"].get(steps.n, 0.0)
        note = f"n = {steps.n}, compiled in {compiled_s:.0f} s; {statistics.median(seconds['ours']):.3g} s for {total} steps"
        return table.over_rounds(seconds["plain"], seconds["ours"]), note

    def inference(self) -> list[Found]:
        import infer_time

        (self.folder / "files").mkdir()
        paths = list(samples.write_made(self.folder / "files", self.plan.detector).values())
        competition = infer_time.competition_of(self.folder / "competition", paths, self.plan.images)
        run = infer_time.make_run(self.folder / "work")
        wholes = {"ours": [], "cpu": []}
        for number in range(4):  # the first warms up
            for name, device in (("ours", self.plan.device), ("cpu", "cpu")):
                found = infer_time.whole(competition, run, device)
                if number:
                    wholes[name].append(found.seconds)
        note = f"{self.plan.images / statistics.median(wholes['ours']):.0f} images/s with {env.cores()} cores"
        return [(table.over_rounds(wholes["cpu"], wholes["ours"]), note)]

    def _setting(self, **changed: Any) -> Any:
        from rsnakit.trials import Setting

        return replace(Setting("bf16", True, "off", False, self.plan.batch), **changed)

    def _steps(self, *settings: Any) -> list[Any]:
        found = self.trials.in_turn(settings, self.plan.rounds, self.plan.limit_s)
        for setting, measured in zip(settings, found, strict=True):
            row = {**setting.__dict__, "images/s": measured.median, "peak MB": measured.peak_mb}
            self.tried.append({**row, "compile, s": measured.compile_s, "error": measured.error})
        return found

    def _against(self, *settings: Any) -> list[Found]:
        """All but the first setting against the first, by images a second."""
        first, *others = self._steps(*settings)
        return [
            first.error or each.error or (table.over_rounds(*even(each.images_s, first.images_s)), note_of(each))
            for each in others
        ]


def note_of(measured: Any) -> str:
    return f"{measured.median:.0f} images/s" + (f", compiled in {measured.compile_s:.0f} s" * (measured.compile_s > 1))


def even(a: Sequence[float], b: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Rounds that both had: where time ran out one may have had one more."""
    rounds = min(len(a), len(b))
    return a[:rounds], b[:rounds]


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each way and round, after a call for warming up; the device is waited for before the clock is read."""
    from rsnakit.device import synchronize

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            synchronize(device)
            begun = time.perf_counter()
            ways[name]()
            synchronize(device)
            if number:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def make_workload(plan: Plan, folder: Path) -> Any:
    """Training of the plan's model on a store of drawn breasts."""
    import build_time

    from rsnakit import engine, models, preprocess
    from rsnakit.recipe import LoopConfig
    from rsnakit.trials import Workload

    (folder / "drawn").mkdir()
    paths = samples.write_drawn(folder / "drawn", 8, (plan.size[0] * 5 // 4, plan.size[1] * 2))
    images = build_time.images_of(paths, 8).assign(cancer=[1, 0, 0, 0] * 2, laterality="L", view="CC", site_id=1)
    config = preprocess.PreprocessConfig(height=plan.size[0], width=plan.size[1])
    preprocess.build_store(images, config, folder / "store", n_jobs=1)
    model = models.ModelConfig(backbone=plan.backbone, weights="none")
    train = engine.TrainConfig(batch_size=max(2, plan.batch))
    return Workload(images, folder / "store", model, train, LoopConfig(), plan.device)


def why_not(device: str) -> str:
    """Why a device can't be measured, or nothing."""
    try:
        env.choose_device(device)
    except RuntimeError as error:
        return str(error).removeprefix(f"device {device} was asked for, but ").partition("; use device")[0]
    return ""


def in_line(error: Exception) -> str:
    """An error's first line, as a reason."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:200]


def measure(plan: Plan) -> tuple[list[table.Result], list[dict]]:
    """All rows, and what was timed for those of training steps."""
    from rsnakit.trials import Trials

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with Trials(make_workload(plan, folder)) as trials:
            bench = Bench(plan, trials, folder)
            return bench.results(), bench.tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--device", default=Plan.device, help="cuda or cuda:N")
    options = parser.parse_args()
    plan = Plan(device=options.device, rounds=options.rounds)
    if reason := why_not(plan.device):
        print(f"nothing is measured: {reason}", file=sys.stderr)
        results = [table.Result.missing(*row, reason) for rows in rows_of(plan).values() for row in rows]
        table.save(options.out, "gpu_time", {}, {"reason": reason}, results)
        return
    results, tried = measure(plan)
    import torch

    name = torch.cuda.get_device_name(plan.device) if plan.device.startswith("cuda") else plan.device
    table.save(options.out, "gpu_time", {f"Training steps on {name}": tried}, {"device": name}, results)


if __name__ == "__main__":
    main()
