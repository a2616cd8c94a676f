"""What an epoch leaves to be read: rows of scores, its row of `history.csv`, its line on the screen, its events."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from torch.utils.tensorboard import SummaryWriter

from rsnakit import metrics
from rsnakit.runs import OOF_COLUMNS
from rsnakit.tally import Scored


def oof_rows(
    table: pd.DataFrame, bad: pd.DataFrame, items: np.ndarray, scores: np.ndarray, fold: int, prior: float
) -> pd.DataFrame:
    """Out-of-fold rows, one an image or a breast; what has no pixels gets the prior, as it does in inference.

    Args:
        table: the images, or the breasts (`data.per_breast`), that were scored.
        bad: those without pixels.
        items: (N,) rows of the table, and their `scores` (N,).
    """
    scored = table.iloc[items].assign(score=scores.astype(np.float64))
    rows = pd.concat([scored, bad.assign(score=prior)], ignore_index=True).assign(fold=fold)
    return rows[OOF_COLUMNS]


def train_rows(table: pd.DataFrame, items: np.ndarray, scores: np.ndarray) -> pd.DataFrame:
    """Training scores, an image or breast once: one that was drawn several times counts with its mean. A score that half
    precision made NaN, in a step that was left out, does not count."""
    mean = pd.Series(scores.astype(np.float64)).groupby(items).mean().dropna()
    return table.iloc[mean.index].assign(score=mean.to_numpy())[
        ["patient_id", "laterality", "image_id", "cancer", "score"]
    ]


def side_scores(side: str, rows: pd.DataFrame) -> dict[str, float]:
    """Scores of one side per breast: pF1 of the raw scores, F1 at the best threshold, AUC, average precision."""
    breasts = metrics.to_breast(rows)
    labels, scores = breasts["cancer"].to_numpy(), breasts["score"].to_numpy()
    found = {"pf1": metrics.pfbeta(labels, scores), "f1": metrics.best_threshold(labels, scores)[1]}
    found |= {"auc": metrics.auc(labels, scores), "ap": metrics.average_precision(labels, scores)}
    return {f"{side}_{name}": float(value) for name, value in found.items()}


def row(
    epoch: int,
    lr: float,
    trained: Scored,
    train_items: pd.DataFrame,
    scored: Mapping[str, Scored],
    oof: Mapping[str, pd.DataFrame],
) -> dict[str, float]:
    """A row of `history.csv`, in the order of its columns.

    Args:
        epoch: counted from 1.
        lr: after the epoch's last step; with layer decay the head's.
        trained: what training gave, and `train_items`, the rows that its items number.
        scored: by side, `valid` and where weights are averaged `ema_valid`, what evaluation gave; `oof`: its rows.
    """
    found = {"epoch": epoch, "lr": lr, "train_loss": trained.loss}
    found |= side_scores("train", train_rows(train_items, trained.items, trained.scores))
    for side, one in scored.items():
        found |= {f"{side}_loss": one.loss, **side_scores(side, oof[side])}
    return {**found, "grad_norm": trained.grad_norm, "skipped_steps": trained.skipped}


def line(row: dict, epochs: int) -> str:
    """A row of the history as it is printed after its epoch, in a notebook's width; `cut` is the pF1 at the threshold that is
    best there. A second line has the averaged weights' scores, where there are some."""
    skipped = f", {row['skipped_steps']} steps skipped" if row["skipped_steps"] else ""
    parts = [
        f"epoch {row['epoch']}/{epochs}, {row['seconds']:.0f} s, lr {row['lr']:.0e}, norm {row['grad_norm']:.2g}{skipped}",
        f"train loss {row['train_loss']:.3f} pF1 {row['train_pf1']:.3f} AUC {row['train_auc']:.3f}",
        f"valid {_scores(row, 'valid')}",
    ]
    average = f"\n    averaged weights: valid {_scores(row, 'ema_valid')}" if "ema_valid_loss" in row else ""
    return " | ".join(parts) + average


def _scores(row: dict, side: str) -> str:
    loss, pf1, f1, auc = (row[f"{side}_{score}"] for score in ("loss", "pf1", "f1", "auc"))
    return f"loss {loss:.3f} pF1 {pf1:.3f} (cut {f1:.3f}) AUC {auc:.3f}"


def log(writer: SummaryWriter, row: dict) -> None:
    """Writes a row of the history as TensorBoard's events: curves named `train/loss`, `valid/auc`, `ema_valid/auc` and so
    on."""
    for name, value in row.items():
        if name not in ("epoch", "train_resampled", "train_mixed"):
            side = next((side for side in ("train", "valid", "ema_valid") if name.startswith(f"{side}_")), None)
            writer.add_scalar(f"{side}/{name[len(side) + 1 :]}" if side else name, value, row["epoch"])
    writer.flush()
