"""Mixed precision in bf16 against fp32 on this CPU: forward alone, and forward with backward.

    python tests/bench/amp_time.py [--out work/bench] [--rounds 9] [--threads 2]

Whether the processor has units for bf16 (avx512_bf16, amx_bf16) is told beside the numbers: without them bf16 is emulated,
and slower than fp32. Models in channels-last layout, weights in float32, forward under `loop.autocast`, as in training; no
optimizer. fp32 and bf16 take turns; a ratio is of one round, and its median, smallest and largest over the rounds are
told: above 1 bf16 is the faster. Takes about two minutes on two cores.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}  # read when torch is loaded; spins as in rsnakit

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
import table  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from rsnakit.loop import autocast  # noqa: E402

MODELS = {"resnet18": (8, 256), "convnext_tiny": (8, 128)}  # batch, size
UNITS = ("avx512_bf16", "amx_bf16")
PRECISIONS = ("fp32", "bf16")


def units(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's units for bf16, as Linux names them; or that there are none, or that it can't be told."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        return "bf16 units unknown"
    return ", ".join(unit for unit in UNITS if unit in flags) or "no bf16 units"


def seconds(model: nn.Module, images: torch.Tensor, precision: str) -> tuple[float, float]:
    """Of a forward pass, and of a whole step, which is one with its backward pass."""
    begun = time.perf_counter()
    with autocast("cpu", precision):
        logits = model(images)
    forward = time.perf_counter() - begun
    logits.float().sum().backward()
    return forward, time.perf_counter() - begun


def measure(name: str, batch: int, size: int, rounds: int) -> tuple[list[dict], dict]:
    """A row for each of forward and step; and the seconds of the rounds."""
    torch.manual_seed(0)
    model = timm.create_model(name, in_chans=1, num_classes=1).train().to(memory_format=torch.channels_last)
    images = torch.rand(batch, 1, size, size).contiguous(memory_format=torch.channels_last)
    times: dict[str, list[tuple[float, float]]] = {precision: [] for precision in PRECISIONS}
    for number in range(-1, rounds):  # one round for warming up
        for precision in PRECISIONS[:: 1 if number % 2 else -1]:
            took = seconds(model, images, precision)
            if number >= 0:
                times[precision].append(took)
    rows = []
    for part, what in enumerate(("forward", "forward and backward")):
        fp32, bf16 = ([each[part] for each in times[precision]] for precision in PRECISIONS)
        ratios = [a / b for a, b in zip(fp32, bf16, strict=True)]
        rows.append(
            {
                "model, batch x size": f"{name}, {batch}x{size}",
                "what": what,
                "fp32, ms": 1000 * statistics.median(fp32),
                "bf16, ms": 1000 * statistics.median(bf16),
                "times as fast": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
            }
        )
    return rows, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, details = [], {"units": units()}
    for name in options.models:
        found, details[name] = measure(name, *MODELS[name], options.rounds)
        rows += found
    headline = f"bf16 against fp32 on the CPU ({units()}), channels last, {options.threads} threads"
    table.save(options.out, "amp_time", {headline: rows}, details)


if __name__ == "__main__":
    main()
