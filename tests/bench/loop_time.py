"""What a training loop costs a step: this kit's, a bare one, Lightning, Fabric, Accelerate, and one that reads every step.

    python tests/bench/loop_time.py [--out work/bench] [--steps 1000] [--rounds 11]

On the CPU, each way in a process of its own on one core, in turn; what is told is time of the processor, as one thread does
all the work. The model is one linear layer on 16 images of 8x8, so that the loop is what is timed. Every way does the same,
which is checked: forward under autocast, loss in float32, backward, the norm clipped at 10, AdamW, timm's cosine moved each
step; at the end every image's score and number are there as NumPy arrays, and the mean loss. Time runs from the moment
the first batch is asked for until then, so what a way sets up before does not count. The kit's loop has its progress
bar on meanwhile; the others have none, and Lightning's Trainer runs `barebones`, its own switch for raw speed: no
logger, no checkpoints, no bar. Peers are in tests/bench/requirements.txt; those that are not installed are named.
Takes about two minutes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import table
import torch
import turns
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH, SIZE, CLIP = 16, 8, 10.0
TARGET = 1.3  # times the bare loop
OURS, BARE = "rsnakit", "bare loop"


class Outcome(NamedTuple):
    """What a way to train gave: `seconds` of the processor for all steps, `scores` and `items` (N,), the mean `loss`, and the
    `weights` it ended with."""

    seconds: float
    scores: np.ndarray
    items: np.ndarray
    loss: float
    weights: np.ndarray


class Small(nn.Module):
    """One layer, called as the kit's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE * SIZE, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"cancer": self.layer(x.flatten(1)).squeeze(1).float()}


class Batches:
    """Batches that are there already, and when the first of them was asked for."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(32, BATCH, 1, SIZE, SIZE, generator=generator)
        labels = (images.mean((2, 3, 4)) > 0.5).float()
        items = torch.arange(steps * BATCH).view(steps, BATCH)
        self.batches = [{"image": images[i % 32], "cancer": labels[i % 32], "item": items[i]} for i in range(steps)]
        self.begun = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        self.begun = time.process_time()
        return iter(self.batches)


def make(steps: int) -> tuple[Small, torch.optim.Optimizer, CosineLRScheduler, Batches]:
    """Model, optimiser, schedule and batches: the same for every way."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Small()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.02)
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, lr_min=1e-4, t_in_epochs=False)
    return model, optimizer, scheduler, Batches(steps)


def loss_of(outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    return binary_cross_entropy_with_logits(outputs["cancer"].float(), labels["cancer"])


def autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


class Kept:
    """Lists of what the steps gave, read at the end: what the ways without lists of their own fill."""

    def __init__(self) -> None:
        self.losses, self.logits, self.items, self.norms = [], [], [], []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, items: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        self.logits.append(logits.detach())
        self.items.append(items)

    def outcome(self, batches: Batches, model: nn.Module) -> Outcome:
        scores = torch.cat(self.logits).sigmoid().numpy()
        items, loss = torch.cat(self.items).numpy(), torch.stack(self.losses).mean().item()
        return outcome(batches, model, scores, items, loss)


def outcome(batches: Batches, model: nn.Module, scores: np.ndarray, items: np.ndarray, loss: float) -> Outcome:
    """Stops the clock."""
    seconds = time.process_time() - batches.begun
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    return Outcome(seconds, np.asarray(scores), np.asarray(items), loss, weights)


def open_rsnakit(precision: str, steps: int) -> Callable[[], Outcome]:
    import samples  # noqa: F401  finds the package

    from rsnakit.loop import train_one_epoch

    def way() -> Outcome:
        model, optimizer, scheduler, batches = make(steps)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        found = train_one_epoch(
            model, batches, optimizer, scheduler, scaler, loss_of, clip_norm=CLIP, precision=precision
        )
        return outcome(batches, model, found.scores, found.items, found.loss)

    return way


def open_bare(precision: str, steps: int) -> Callable[[], Outcome]:
    def way() -> Outcome:
        model, optimizer, scheduler, batches = make(steps)
        kept = Kept()
        model.train()
        for step, batch in enumerate(batches, start=1):
            with autocast(precision):
                outputs = model(batch["image"])
            loss = loss_of(outputs, batch)
            optimizer.zero_grad()
            loss.backward()
            kept.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            scheduler.step_update(step)
            kept.add(loss, outputs["cancer"], batch["item"])
        return kept.outcome(batches, model)

    return way


def open_reading(precision: str, steps: int) -> Callable[[], Outcome]:
    def way() -> Outcome:
        model, optimizer, scheduler, batches = make(steps)
        losses, scores, items = [], [], []
        model.train()
        for step, batch in enumerate(batches, start=1):
            with autocast(precision):
                outputs = model(batch["image"])
            loss = loss_of(outputs, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step_update(step)
            losses.append(loss.item())
            scores.extend(outputs["cancer"].sigmoid().detach().cpu().numpy().tolist())
            items.extend(batch["item"].cpu().numpy().tolist())
        return outcome(batches, model, np.array(scores), np.array(items), statistics.mean(losses))

    return way


def open_trainer(precision: str, steps: int) -> Callable[[], Outcome]:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self, model, optimizer, scheduler, batches) -> None:
            super().__init__()
            self.model, self.kept, self.batches, self.found, self.taken = model, Kept(), batches, None, 0
            self.made = optimizer, scheduler

        def training_step(self, batch, _):
            outputs = self.model(batch["image"])
            loss = loss_of(outputs, batch)
            self.kept.add(loss, outputs["cancer"], batch["item"])
            return loss

        def configure_optimizers(self):
            optimizer, scheduler = self.made
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def lr_scheduler_step(self, scheduler, _):
            self.taken += 1
            scheduler.step_update(self.taken)

        def on_train_epoch_end(self):
            self.found = self.kept.outcome(self.batches, self.model)

    def way() -> Outcome:
        made = make(steps)
        module = Module(*made)
        trainer = Trainer(
            accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true", max_epochs=1,
            gradient_clip_val=CLIP, barebones=True,
        )  # fmt: skip
        trainer.fit(module, made[-1])
        return module.found

    return way


def open_fabric(precision: str, steps: int) -> Callable[[], Outcome]:
    from lightning.fabric import Fabric

    def way() -> Outcome:
        plain, optimizer, scheduler, batches = make(steps)
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true")
        model, optimizer = fabric.setup(plain, optimizer)
        kept = Kept()
        model.train()
        for step, batch in enumerate(batches, start=1):
            outputs = model(batch["image"])
            loss = loss_of(outputs, batch)
            optimizer.zero_grad()
            fabric.backward(loss)
            kept.norms.append(fabric.clip_gradients(model, optimizer, max_norm=CLIP))
            optimizer.step()
            scheduler.step_update(step)
            kept.add(loss, outputs["cancer"], batch["item"])
        return kept.outcome(batches, plain)

    return way


def open_accelerate(precision: str, steps: int) -> Callable[[], Outcome]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16" else "no")

    def way() -> Outcome:
        plain, optimizer, scheduler, batches = make(steps)
        model, optimizer = accelerator.prepare(plain, optimizer)
        kept = Kept()
        model.train()
        for step, batch in enumerate(batches, start=1):
            outputs = model(batch["image"])
            loss = loss_of(outputs, batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            kept.norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            scheduler.step_update(step)
            kept.add(loss, outputs["cancer"], batch["item"])
        found = kept.outcome(batches, plain)
        accelerator.free_memory()
        return found

    return way


WAYS = {
    OURS: open_rsnakit,
    BARE: open_bare,
    "loss.item() and lists": open_reading,
    "Fabric": open_fabric,
    "Accelerate": open_accelerate,
    "Lightning Trainer": open_trainer,
}


def measure(precision: str, steps: int, rounds: int, names: tuple[str, ...] = tuple(WAYS)) -> tuple[dict, dict]:
    """Seconds of each way and round, all taking turns, and why others could not run.

    Raises:
        RuntimeError: a way did other work than the bare loop.
    """
    opened = {name: turns.Turn(WAYS[name], precision, steps) for name in names}
    first = {name: turn.call(keep=True) for name, turn in opened.items()}  # warming up
    failed = {name: call.error for name, call in first.items() if call.error}
    ran = [name for name in names if name not in failed]
    for name in ran:
        check_alike(name, first[name].result, first[BARE].result)
    seconds: dict[str, list[float]] = {name: [] for name in ran}
    for number in range(rounds):
        for name in ran[number % len(ran) :] + ran[: number % len(ran)]:  # each comes first at some time
            seconds[name].append(opened[name].call(keep=True).result.seconds)
    for turn in opened.values():
        turn.close()
    return seconds, failed


def check_alike(name: str, found: Outcome, bare: Outcome) -> None:
    """Refuses a way that did other work: fewer steps, no clipping, another schedule, lost images."""
    for what in ("items", "scores", "loss", "weights"):
        a, b = np.asarray(getattr(found, what)), np.asarray(getattr(bare, what))
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"{name}: other {what} than the bare loop's, so the two cannot be compared")


def rows_of(seconds: dict[str, list[float]], steps: int) -> list[dict]:
    """A row for each way: time a step, and in ratios of the same round to the bare loop and to this kit's."""
    rows = []
    for name, each in seconds.items():
        to_bare, to_ours = turns.ratio(each, seconds[BARE]), turns.ratio(each, seconds[OURS])
        rows.append(
            {
                "loop": name,
                "µs a step": 1e6 * statistics.median(each) / steps,
                "times the bare loop": to_bare.median,
                "from": to_bare.low,
                "to": to_bare.high,
                "times rsnakit": to_ours.median,
            }
        )
    return rows


def verdict(rows: list[dict], failed: dict[str, str]) -> dict[str, str]:
    """Whether the kit's loop is within the target, and below each of the others."""
    ours = next(row["times the bare loop"] for row in rows if row["loop"] == OURS)
    faster = [row["loop"] for row in rows if row["loop"] not in (OURS, BARE) and row["times rsnakit"] <= 1]
    found = {
        f"within {TARGET:g} times the bare loop": "yes" if ours <= TARGET else f"no: {ours:.2f}",
        "below each of the others": f"no: {', '.join(faster)}" if faster else "yes",
    }
    if failed:
        found["could not run"] = "; ".join(f"{name} ({error})" for name, error in failed.items())
    return found


def results_of(precision: str, seconds: dict[str, list[float]], failed: dict[str, str]) -> list[table.Result]:
    """The kit's loop against each of the others; those that are not installed, too."""
    what, ratio = f"a step of the kit's loop around one small layer, {precision}", "times as long"
    rows = [
        table.Result(
            what, name, ratio, *turns.ratio(seconds[OURS], each), TARGET if name == BARE else 1.0, at_most=True
        )
        for name, each in seconds.items()
        if name != OURS
    ]
    return rows + [table.Result.missing(what, name, ratio, reason_of(error)) for name, error in failed.items()]


def reason_of(error: str) -> str:
    """Why a way could not run, as RESULTS.md tells it."""
    return "not installed" if "ModuleNotFoundError" in error else error[:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    sections, details, verdicts, results = {}, {}, [], []
    for precision in ("fp32", "bf16"):
        seconds, failed = measure(precision, options.steps, options.rounds)
        rows = rows_of(seconds, options.steps)
        sections[f"A step of a loop around one small layer, {precision}, one core"] = rows
        verdicts.append({"precision": precision, "could not run": "", **verdict(rows, failed)})
        results += results_of(precision, seconds, failed)
        details[precision] = {"seconds": seconds, "failed": failed}
    table.save(options.out, "loop_time", {**sections, "Targets": verdicts}, details, results)


if __name__ == "__main__":
    main()
