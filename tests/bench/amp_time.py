"""Mixed precision in bf16 against fp32 on this CPU: a training step, and its forward pass alone.

    python tests/bench/amp_time.py [--out work/bench] [--rounds 9] [--threads 2]

Whether the processor has units for bf16 (avx512_bf16, amx_bf16) is told beside the numbers: without them bf16 is emulated,
and slower than fp32, so that there is no target then. Models in channels-last layout, weights in float32, forward under
`loop.autocast` as in training, backward, and a step of AdamW, which is in float32 in both. fp32 and bf16 take turns; a
ratio is of one round, and its median, smallest and largest over the rounds are told: above 1 bf16 is the faster.

Where the time of the median step goes is told by torch's profiler, in two more steps of each: `copies` are all casts between
the precisions, of weights among them, and changes of layout. Takes about a minute and a half on two cores.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ |= {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}  # read when torch is loaded; spins as in rsnakit

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
import table  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from rsnakit.loop import autocast  # noqa: E402


class Case(NamedTuple):
    """Images in a batch, their (height, width), and how many times as fast bf16 should be on a processor with units."""

    batch: int
    size: tuple[int, int]
    target: float | None = None


CASES = {
    "convnext_tiny": Case(4, (512, 256), 1.3),
    "resnet18": Case(32, (256, 128), 1.8),
    "tf_efficientnet_lite0": Case(16, (256, 128)),
}
UNITS = ("avx512_bf16", "amx_bf16")
NO_UNITS = "no bf16 units"
PRECISIONS = ("fp32", "bf16")
CONVOLUTIONS, DEPTHWISE, REST = "convolutions", "depthwise ones", "the rest"
PARTS = {  # of a step by the names of torch's operators
    CONVOLUTIONS: ("mkldnn_convolution", "::convolution_backward"),
    "matrix products": ("addmm", "mkldnn_linear", "::mm", "::bmm"),
    "norms": ("native_batch_norm", "native_layer_norm"),
    "copies": ("copy_",),
}


def units(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's units for bf16, as Linux names them; or that there are none, or that it can't be told."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        return "bf16 units unknown"
    return ", ".join(unit for unit in UNITS if unit in flags) or NO_UNITS


class Step:
    """A model's training step on random images, which are the same for both precisions; so are the weights."""

    def __init__(self, name: str, case: Case) -> None:
        torch.manual_seed(0)
        model = timm.create_model(name, in_chans=1, num_classes=1)
        self.model = model.train().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.images = torch.rand(case.batch, 1, *case.size).contiguous(memory_format=torch.channels_last)

    def __call__(self, precision: str) -> tuple[float, float]:
        """Seconds of the forward pass, and of the whole step."""
        begun = time.perf_counter()
        with autocast("cpu", precision):
            logits = self.model(self.images)
        forward = time.perf_counter() - begun
        nn.functional.softplus(logits.float()).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forward, time.perf_counter() - begun


def measure(name: str, case: Case, rounds: int) -> tuple[list[dict], dict[str, list[tuple[float, float]]], list[dict]]:
    """A row for each of forward and step; the seconds of the rounds; and a row a precision of where a step's time goes."""
    step = Step(name, case)
    times: dict[str, list[tuple[float, float]]] = {precision: [] for precision in PRECISIONS}
    for number in range(-1, rounds):  # one round for warming up
        for precision in PRECISIONS[:: 1 if number % 2 else -1]:
            took = step(precision)
            if number >= 0:
                times[precision].append(took)
    where = f"{name}, {case.batch} x {'x'.join(map(str, case.size))}"
    rows = []
    for part, what in enumerate(("forward", "training step")):
        fp32, bf16 = ([each[part] for each in times[precision]] for precision in PRECISIONS)
        median, low, high = table.over_rounds(fp32, bf16)
        rows.append(
            {
                "model, batch x size": where,
                "what": what,
                "fp32, ms": 1000 * statistics.median(fp32),
                "bf16, ms": 1000 * statistics.median(bf16),
                "times as fast": median,
                "from": low,
                "to": high,
            }
        )
    profiles = [
        {"model, batch x size": where, "in": precision, **parts_of(step, precision)} for precision in PRECISIONS
    ]
    return rows, times, profiles


def parts_of(step: Step, precision: str, steps: int = 2) -> dict[str, float]:
    """ms a step of each of `PARTS`, and of the rest, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(steps):
            step(precision)
    spent = dict.fromkeys((*PARTS, DEPTHWISE, REST), 0.0)
    for event in profiler.key_averages(group_by_input_shape=True):
        part = next((part for part, names in PARTS.items() if any(name in event.key for name in names)), REST)
        if part == CONVOLUTIONS and is_depthwise(event.input_shapes[event.key.endswith("_backward") :]):
            part = DEPTHWISE
        spent[part] += event.self_cpu_time_total / 1000 / steps
    return {f"{part}, ms": ms for part, ms in spent.items()}


def is_depthwise(shapes: list[list[int]]) -> bool:
    """Of a convolution's input (N, C, H, W) and weight: whether each channel has a kernel of its own."""
    return shapes[0][1] > 1 and shapes[1][1] == 1


def result_of(name: str, case: Case, times: dict[str, list[tuple[float, float]]], found_units: str) -> table.Result:
    """The row of a model's training step."""
    fp32, bf16 = ([step for _, step in times[precision]] for precision in PRECISIONS)
    emulated = found_units == NO_UNITS
    note = "the processor has no bf16 units: they are emulated, and there is no target" if emulated else found_units
    return table.Result(
        what=f"training step of {name} in bf16, {case.batch} x {'x'.join(map(str, case.size))}",
        against="fp32",
        ratio="times as fast",
        **dict(zip(("median", "low", "high"), table.over_rounds(fp32, bf16), strict=True)),
        target=None if emulated else case.target,
        note=note,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, profiles, results, details = [], [], [], {"units": units()}
    for name in options.models:
        found, details[name], parts = measure(name, CASES[name], options.rounds)
        rows += found
        profiles += parts
        results.append(result_of(name, CASES[name], details[name], units()))
    sections = {
        f"bf16 against fp32 on the CPU ({units()}), channels last, {options.threads} threads": rows,
        "Where a step's time goes": profiles,
    }
    table.save(options.out, "amp_time", sections, details, results)


if __name__ == "__main__":
    main()
