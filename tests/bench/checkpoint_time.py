"""What checkpointing takes and gives on the CPU: plain, by speed.checkpoint_blocks, and by timm's own switch, in turns.

    python tests/bench/checkpoint_time.py

A step is forward, backward and no optimizer, in fp32 on two threads. The ratios are those of one round each, their median,
smallest and largest over the rounds. `MB kept` is what autograd holds between forward and backward, parameters and
buffers apart. `statistics moved` is how often one step moves those of BatchNorm: once is right, 0 without BatchNorms.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}  # read when torch is loaded; spins as in rsnakit

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
import table  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from kept import bytes_kept  # noqa: E402
from torch import nn  # noqa: E402

from rsnakit import speed  # noqa: E402

MODELS = {"convnext_tiny": (8, 128), "tf_efficientnetv2_b0": (8, 128), "vit_tiny_patch16_224": (8, 224)}  # batch, size
WAYS = ("plain", "checkpoint_blocks", "timm's own")


def make(name: str, way: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=1).train()
    if way == "checkpoint_blocks":
        speed.checkpoint_blocks(model)
    elif way == "timm's own":
        model.set_grad_checkpointing()
    return model


def seconds(model: nn.Module, images: torch.Tensor) -> float:
    """One step's."""
    begun = time.perf_counter()
    model(images).sum().backward()
    return time.perf_counter() - begun


def steps_counted(model: nn.Module) -> int:
    """By the BatchNorm that counted most; 0 where there is none."""
    return max((int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d)), default=0)


def measure(name: str, batch: int, size: int, rounds: int) -> list[dict]:
    """A row for each way to train a model."""
    images = torch.rand(batch, 3, size, size)
    models = {way: make(name, way) for way in WAYS}
    kept = {way: bytes_kept(model, images) for way, model in models.items()}
    moved = {}
    for way, model in models.items():
        before = steps_counted(model)
        seconds(model, images)  # warming up
        moved[way] = steps_counted(model) - before
    times = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:  # each comes first, second and third
            times[way].append(seconds(models[way], images))
    rows = []
    for way in WAYS:
        ratios = [ours / plain for ours, plain in zip(times[way], times["plain"], strict=True)]
        rows.append(
            {
                "model, batch x size": f"{name}, {batch}x{size}",
                "way": way,
                "MB kept": kept[way] / 1e6,
                "of plain": kept[way] / kept["plain"],
                "ms a step": 1000 * statistics.median(times[way]),
                "times plain": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
                "statistics moved": moved[way],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = [row for name in options.models for row in measure(name, *MODELS[name], options.rounds)]
    table.save(table.OUT, "checkpoint_time", {"Training step with and without checkpointing, fp32, 2 threads": rows})


if __name__ == "__main__":
    main()
