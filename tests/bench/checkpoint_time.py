"""What checkpointing takes and gives on the CPU: plain, by speed.checkpoint_blocks, and by timm's own switch, in turns.

    python tests/bench/checkpoint_time.py [--out work/bench] [--rounds 7]

A step is forward, backward and no optimizer, in fp32 on two threads. The ratios are those of one round each, their median,
smallest and largest over the rounds. `MB kept` is what autograd holds between forward and backward, parameters and
buffers apart. `statistics moved` is how often one step moves those of BatchNorm: once is right, 0 without BatchNorms.
`differs from plain` counts the tensors, of the loss, all gradients and all running statistics after two steps on the same
images with the same random numbers, that are not bit for bit those of the plain model. Takes about two minutes on two cores.
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
PLAIN, OURS, TIMM = "plain", "checkpoint_blocks", "timm's own"
WAYS = (PLAIN, OURS, TIMM)
KEPT, TIMES = 0.2, 1.35  # targets on convnext_tiny: of the bytes, and times the plain step
NAMED, WITH_NORMS = (
    "convnext_tiny",
    "tf_efficientnetv2_b0",
)  # the model of the targets; one whose statistics may go wrong


def make(name: str, way: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=1).train()
    if way == OURS:
        speed.checkpoint_blocks(model)
    elif way == TIMM:
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


def after_two_steps(name: str, way: str, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss, the gradients (added up over both steps) and the running statistics, by name."""
    model = make(name, way)
    torch.manual_seed(1)
    for _ in range(2):
        loss = model(images).sum()
        loss.backward()
    found = {"loss": loss.detach()} | {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return found | dict(model.named_buffers())


def different(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not bit for bit the same; those that only one has, too."""
    names = dict.fromkeys([*plain, *found])
    return [n for n in names if n not in found or n not in plain or not torch.equal(found[n], plain[n])]


def measure(name: str, batch: int, size: int, rounds: int) -> tuple[list[dict], dict[str, dict]]:
    """A row for each way to train a model; and by way the bytes kept, the seconds of the rounds and what differs."""
    images = torch.rand(batch, 3, size, size)
    plain = after_two_steps(name, PLAIN, images[:2])
    differs = {way: different(after_two_steps(name, way, images[:2]), plain) for way in WAYS}
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
        median, low, high = table.over_rounds(times[way], times[PLAIN])
        rows.append(
            {
                "model, batch x size": f"{name}, {batch}x{size}",
                "way": way,
                "MB kept": kept[way] / 1e6,
                "of plain": kept[way] / kept[PLAIN],
                "ms a step": 1000 * statistics.median(times[way]),
                "times plain": median,
                "from": low,
                "to": high,
                "statistics moved": moved[way],
                "differs from plain": len(differs[way]),
            }
        )
    return rows, {"kept": kept, "seconds": times, "differs": differs, "tensors": len(plain)}


def results_of(name: str, found: dict[str, dict]) -> list[table.Result]:
    """A model's rows: bytes and time of `checkpoint_blocks`, and, where there are BatchNorms, what it changes."""
    goal, where = name == NAMED, f"{name}, {MODELS[name][0]} x {MODELS[name][1]}x{MODELS[name][1]}"
    share = found["kept"][OURS] / found["kept"][PLAIN]
    times = table.over_rounds(found["seconds"][OURS], found["seconds"][PLAIN])
    what, bound = f"checkpoint_blocks on {where}", {"at_most": True}
    rows = [
        table.Result(
            f"{what}: kept for backward", "plain", "of the bytes", *[share] * 3, KEPT if goal else None, **bound
        ),
        table.Result(f"{what}: training step", "plain", "times as long", *times, TIMES if goal else None, **bound),
    ]
    if name == WITH_NORMS:
        for way in (OURS, TIMM):
            names = found["differs"][way]
            note = f"of {found['tensors']}; {', '.join(names[:2])} among them" if names else f"of {found['tensors']}"
            what = f"{way} on {name}: loss, gradients and BatchNorm's statistics after two steps"
            count, target = [len(names)] * 3, 0 if way == OURS else None
            rows.append(table.Result(what, "plain", "tensors with other bits", *count, target, **bound, note=note))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows, results, details = [], [], {}
    for name in options.models:
        found, details[name] = measure(name, *MODELS[name], options.rounds)
        rows += found
        results += results_of(name, details[name])
    headline = "Training step with and without checkpointing, fp32, 2 threads"
    table.save(options.out, "checkpoint_time", {headline: rows}, details, results)


if __name__ == "__main__":
    main()
