"""What the steps of an epoch gave, collected on the device and read in one go, so that the loop need not wait for it."""

import dataclasses
import math

import numpy as np
import torch

from rsnakit import distributed, metrics

PARTS = ("losses", "counts", "logits", "labels", "items", "norms")


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a pass over images or breasts gave, over all processors: `items` (N,) their numbers, `scores` (N,) in [0, 1],
    `loss`, and for training `grad_norm`, the mean norm before clipping over the steps taken, and `skipped`, steps that
    fp16 overflow made void."""

    items: np.ndarray
    scores: np.ndarray
    loss: float
    grad_norm: float = math.nan
    skipped: int = 0


class Tally:
    """Losses, logits and gradient norms of an epoch's steps on one processor.

    `add` and `add_step` keep tensors where they are; `read` brings what is new to the CPU in one copy, the only moment at
    which the device is waited for. Its `state` is a part of the checkpoints within an epoch.

    Attributes:
        taken: optimiser steps that were taken; `skipped`: those that overflow made void; `in_a_row`: of these, the last ones,
            counted on over epochs.

    Args:
        in_a_row: steps skipped in a row before this epoch.
    """

    def __init__(self, in_a_row: int = 0) -> None:
        self.taken, self.skipped, self.in_a_row = 0, 0, in_a_row
        self._new: dict[str, list] = {name: [] for name in PARTS}
        self._read: dict[str, list[np.ndarray]] = {name: [] for name in PARTS}

    def add(self, loss: torch.Tensor, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Notes a batch: its mean loss (), its cancer logits (B,), and `cancer` and `item` of the batch itself, (B,) on the
        CPU."""
        self._new["losses"].append(loss.detach())
        # A copy: where a compiled model replays what a GPU has recorded, its next logits come to lie in the same place.
        self._new["logits"].append(logits.detach().clone())
        self._new["items"].append(batch["item"])
        self._new["labels"].append(batch["cancer"])

    def add_step(self, norm: torch.Tensor, taken: bool) -> None:
        """Notes an optimiser step: the gradients' norm () before clipping, and whether it was taken."""
        if taken:
            self._new["norms"].append(norm)
            self.taken, self.in_a_row = self.taken + 1, 0
        else:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1

    def read(self, may_overflow: bool = False) -> None:
        """Brings what is new to the CPU.

        Args:
            may_overflow: a scaler is there, which leaves steps out whose gradients are not finite.

        Raises:
            FloatingPointError: a loss or a norm is NaN or infinite where no scaler is there to leave the step out.
        """
        new, batches = self._new, sum(len(part) for part in self._read["losses"])
        if not new["losses"]:
            return
        self._new = {name: [] for name in PARTS}
        counts = [items.shape[0] for items in new["items"]]
        parts = [
            torch.stack(new["losses"]),
            torch.cat(new["logits"]),
            *([torch.stack(new["norms"])] if new["norms"] else []),
        ]
        on_device = torch.cat([part.float() for part in parts]).cpu().numpy()
        losses, logits, norms = np.split(on_device, [len(counts), len(counts) + sum(counts)])
        values = (
            losses,
            np.array(counts),
            logits,
            torch.cat(new["labels"]).numpy(),
            torch.cat(new["items"]).numpy(),
            norms,
        )
        for name, value in zip(PARTS, values, strict=True):
            self._read[name].append(value)
        for what, values in (("loss", losses), ("gradients' norm", norms)):
            if not (may_overflow or np.isfinite(values).all()):
                first = int(np.flatnonzero(~np.isfinite(values))[0])
                where = f" in batch {batches + first + 1} of this epoch" if what == "loss" else ""
                raise FloatingPointError(
                    f"the {what} is {values[first]}{where}. Lower lr, lengthen warmup, or take precision fp32. No "
                    "checkpoint is written after that: one that is there is sound."
                )

    def live(self) -> dict[str, float]:
        """What was read so far, as a progress bar shows it: loss, norm, and pF1 and AUC once there are both kinds."""
        labels, logits = self._get("labels"), self._get("logits")
        shown = {"loss": _mean_loss(self._get("losses"), self._get("counts"))}
        if len(norms := self._get("norms")):
            shown["norm"] = float(norms[-1])
        whole = np.isfinite(logits) & np.isfinite(labels)
        labels, scores = labels[whole], _sigmoid(logits[whole])
        if 0 < labels.sum() < len(labels):
            shown |= {"pF1": metrics.pfbeta(labels, scores), "AUC": metrics.auc(labels, scores)}
        return shown

    def scored(self, may_overflow: bool = False) -> Scored:
        """The whole epoch, of all processors; every one of them has to call it."""
        self.read(may_overflow)
        parts = distributed.gather({name: self._get(name) for name in PARTS})
        whole = {name: np.concatenate([part[name] for part in parts]) for name in PARTS}
        norms = parts[0]["norms"]  # gradients are shared: the same on all
        return Scored(
            whole["items"],
            _sigmoid(whole["logits"]),
            _mean_loss(whole["losses"], whole["counts"]),
            float(norms.mean()) if len(norms) else math.nan,
            self.skipped,
        )

    def state(self) -> dict:
        """Everything that was read, as plain values and tensors."""
        counters = {name: getattr(self, name) for name in ("taken", "skipped", "in_a_row")}
        return {**counters, **{name: torch.from_numpy(self._get(name)) for name in PARTS}}

    def load_state(self, *states: dict) -> None:
        """Takes up a state; or those of several processors, where another number of them goes on."""
        for name in ("taken", "skipped", "in_a_row"):
            setattr(self, name, states[0][name])
        self._read = {name: [state[name].numpy() for state in states] for name in PARTS}
        self._read["norms"] = [states[0]["norms"].numpy()]

    def forget(self) -> None:
        """Drops what was noted, but for the number of steps."""
        self._read = {name: [] for name in PARTS}

    def _get(self, name: str) -> np.ndarray:
        """All that was read of a part, in one array."""
        kind = np.int64 if name in ("counts", "items") else np.float32
        self._read[name] = [np.concatenate([np.zeros(0, kind), *self._read[name]])]
        return self._read[name][0]


def _mean_loss(losses: np.ndarray, counts: np.ndarray) -> float:
    """Mean over the images or breasts; batches whose step a scaler left out, with a loss that is not finite, do not count."""
    finite = np.isfinite(losses)
    return float(np.average(losses[finite], weights=counts[finite])) if finite.any() else math.nan


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    """Scores (N,) float32, by torch, whose sigmoid is the model's."""
    return torch.from_numpy(logits).sigmoid().numpy()
