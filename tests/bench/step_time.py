"""What a training step of the default model costs on the CPU, by memory layout and by how OpenMP's threads wait.

    python tests/bench/step_time.py

Prints medians of ms an image, the variants in turn, three rounds. `two at once` runs the same training in two processes,
as loader workers or a second notebook do: there long spins of waiting threads take the cores from those that work.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROUNDS, STEPS, BATCH = 3, 4, 16
VARIANTS = {  # OpenMP's spins (None: its own default), channels last, processes at once
    "plain layout, alone": (1000, False, 1),
    "channels last, alone": (1000, True, 1),
    "channels last, alone, default spins": (None, True, 1),
    "channels last, two at once": (1000, True, 2),
    "channels last, two at once, default spins": (None, True, 2),
}


def measure(channels_last: bool) -> float:
    """ms an image of forward and backward, on random images of 256x128."""
    sys.path.insert(0, str(REPOSITORY))
    import timm
    import torch

    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = timm.create_model("tf_efficientnet_lite0", in_chans=1, num_classes=1).to(memory_format=layout).train()
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


def main() -> None:
    results: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, variant in VARIANTS.items():
            results[name].append(run(*variant))
    import torch

    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print("| training step of tf_efficientnet_lite0, 256x128, fp32 | ms an image, median | spread |\n|---|---|---|")
    for name, values in results.items():
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} to {max(values):.0f} |")


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(measure(sys.argv[-1] == "1"))
    else:
        main()
