"""What an epoch leaves to be read: rows of scores, its row of `history.csv`, its line on the screen, its events."""

import numpy as np
import pandas as pd
from torch.utils.tensorboard import SummaryWriter

from rsnakit import metrics
from rsnakit.runs import OOF_COLUMNS


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
    """Training scores, an image or breast once: one that was drawn several times counts with its mean."""
    mean = pd.Series(scores.astype(np.float64)).groupby(items).mean()
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


def line(row: dict, epochs: int) -> str:
    """A row of the history as it is printed after its epoch; `best cut` is the pF1 at the threshold that is best there."""
    mark = " (resampled)" if row["train_resampled"] else ""
    return (
        f"epoch {row['epoch']}/{epochs}, {row['seconds']:.0f} s, lr {row['lr']:.0e} | "
        f"train{mark} loss {row['train_loss']:.3f} pF1 {row['train_pf1']:.3f} AUC {row['train_auc']:.3f} | "
        f"valid loss {row['valid_loss']:.3f} pF1 {row['valid_pf1']:.3f} (best cut {row['valid_f1']:.3f}) "
        f"AUC {row['valid_auc']:.3f}"
    )


def log(writer: SummaryWriter, row: dict) -> None:
    """Writes a row of the history as TensorBoard's events: curves named `train/loss`, `valid/auc` and so on."""
    for name, value in row.items():
        if name not in ("epoch", "train_resampled"):
            writer.add_scalar(name.replace("_", "/", 1), value, row["epoch"])
    writer.flush()
