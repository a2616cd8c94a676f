"""What a training step of the default model costs on the CPU, by memory layout and by how OpenMP's threads wait.

    python tests/bench/step_time.py [--out work/bench] [--rounds 3]

Medians of ms an image, the variants in turn. `two at once` runs the same training in two processes, as loader workers or a
second notebook do: there long spins of waiting threads take the cores from those that work. Takes about a minute and a half
on two cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import table

REPOSITORY = Path(__file__).parents[2]
STEPS, BATCH = 4, 16
PLAIN, LAST, DEFAULT = "plain layout, alone", "channels last, alone", "channels last, alone, default spins"
TWO, TWO_DEFAULT = "channels last, two at once", "channels last, two at once, default spins"
VARIANTS = {  # OpenMP's spins (None: its own default), channels last, processes at once
    PLAIN: (1000, False, 1),
    LAST: (1000, True, 1),
    DEFAULT: (None, True, 1),
    TWO: (1000, True, 2),
    TWO_DEFAULT: (None, True, 2),
}
MODEL = "tf_efficientnet_lite0"


def measure(channels_last: bool) -> float:
    """ms an image of forward and backward, on random images of 256x128."""
    sys.path.insert(0, str(REPOSITORY))
    import timm
    import torch

    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = timm.create_model(MODEL, in_chans=1, num_classes=1).to(memory_format=layout).train()
    images = torch.rand(BATCH, 1, 256, 128)
    model(images).sum().backward()
    begun = time.perf_counter()
    for _ in range(STEPS):
        model(images).sum().backward()
    return (time.perf_counter() - begun) / STEPS / BATCH * 1000


def run(spins: int | None, channels_last: bool, processes: int) -> float:
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")}
    if spins is not None:
        environment["GOMP_SPINCOUNT"] = str(spins)
    command = [sys.executable, __file__, "--one", str(int(channels_last))]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return statistics.mean(float(process.communicate()[0]) for process in started)


def results_of(ms: dict[str, list[float]]) -> list[table.Result]:
    """What the kit sets, against what would be without it: memory layout and short spins."""
    step = f"training step of {MODEL}, {BATCH} x 256x128, fp32"
    pairs = (
        (f"{step}, channels last", "plain layout", PLAIN, LAST),
        (f"{step}, short spins", "OpenMP's default spins", DEFAULT, LAST),
        (f"{step}, short spins, two at once", "OpenMP's default spins, two at once", TWO_DEFAULT, TWO),
    )
    return [
        table.Result(what, against, "times as fast", *table.over_rounds(ms[theirs], ms[ours]))
        for what, against, theirs, ours in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ms: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, variant in VARIANTS.items():
            ms[name].append(run(*variant))
    rows = [
        {"training step": name, "ms an image": statistics.median(values), "from": min(values), "to": max(values)}
        for name, values in ms.items()
    ]
    table.save(options.out, "step_time", {f"{MODEL}, {BATCH} x 256x128, fp32": rows}, ms, results_of(ms))


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(measure(sys.argv[-1] == "1"))
    else:
        main()
