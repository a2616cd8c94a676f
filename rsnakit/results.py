"""What the folds of a run have come to so far, read from disk: a notebook that is opened again shows it without training."""

from pathlib import Path

import pandas as pd

from rsnakit import metrics, runs

COUNTS = ("epoch", "breasts", "positives")
SCORES = ("AUC", "AP", "pF1", "pF1 at best cut (flatters)")


def histories(run: Path) -> dict[int, pd.DataFrame]:
    """`history.csv` of all folds that have weights, unfinished ones too, by fold number."""
    paths = {fold: folder / "history.csv" for fold, folder in runs.begun_folds(run).items()}
    return {fold: pd.read_csv(path) for fold, path in paths.items() if path.exists()}


def fold_table(run: Path) -> pd.DataFrame:
    """A row a fold that was begun: the epoch its weights are of, and the scores of its breasts by these very weights.

    Returns:
        Indexed by `fold`: epoch, breasts, positives, AUC, AP, pF1 of the raw scores, pF1 at the threshold that is best on this
        fold alone (flatters), and state: `finished`, or the epochs that an unfinished fold has. Empty cells where it has no
        weights yet.
    """
    unfinished, begun = runs.unfinished_folds(run), runs.begun_folds(run)
    rows = {}
    for fold in sorted({*unfinished, *begun}):
        state = f"not finished: {unfinished[fold]}" if fold in unfinished else "finished"
        rows[fold] = {**(_scores(begun[fold]) if fold in begun else {}), "state": state}
    table = pd.DataFrame.from_dict(rows, "index", columns=[*COUNTS, *SCORES, "state"]).rename_axis("fold")
    return table.astype(dict.fromkeys(COUNTS, "Int64") | dict.fromkeys(SCORES, float)).round(3)


def _scores(folder: Path) -> dict[str, float]:
    breasts = metrics.to_breast(pd.read_csv(folder / "oof.csv", dtype={"patient_id": str, "image_id": str}))
    labels, scores = breasts["cancer"].to_numpy(), breasts["score"].to_numpy()
    counts = (runs.read_model(folder)["epoch"], len(breasts), int(labels.sum()))
    found = [score(labels, scores) for score in (metrics.auc, metrics.average_precision, metrics.pfbeta)]
    return dict(zip((*COUNTS, *SCORES), (*counts, *found, metrics.best_threshold(labels, scores)[1]), strict=True))
