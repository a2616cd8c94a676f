"""What the folds of a run have come to so far, from what they left on disk: summary, tables, histories. A notebook that is
opened again shows it without training."""

from pathlib import Path

import pandas as pd

from rsnakit import metrics, nested, runs
from rsnakit.files import write_json

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


def write_summary(run: Path) -> dict:
    """Scores the out-of-fold predictions of the folds there are, per breast, and writes them to `summary.json`.

    Returns:
        What was written: `folds`, `epochs` (of the weights kept), `unfinished` (see `runs.unfinished_folds`), `select`, `prior`
        (share of positive images in training), `scores` (as `nested.score_breasts` has them), `threshold` and
        `percentile` (the best on these very scores, so that their F1 flatters).

    Folds that two processes train may end at the same moment. The one that writes last sees the other's files, since each
    looks again after writing: the summary that stays has both.
    """
    while True:
        before = _written(run)
        summary = _score(run)
        write_json(run / "summary.json", summary)
        if _written(run) == before:
            return summary


def _written(run: Path) -> dict[Path, tuple]:
    """What a summary is made of, with marks that change when a file is written again; of checkpoints that they are there."""
    names = ("model.json", "oof.csv", "history.csv")
    stats = {path: path.stat() for path in run.glob("fold*/*") if path.name in names}
    marks = {path: (found.st_mtime_ns, found.st_ino, found.st_size) for path, found in stats.items()}
    return marks | {path: () for path in run.glob("fold*/last.pt")}


def _score(run: Path) -> dict:
    folders = runs.trained_folds(run)
    breasts = metrics.to_breast(runs.read_oof(run))
    models = [runs.read_model(folder) for folder in folders.values()]
    threshold, _ = metrics.best_threshold(breasts["cancer"], breasts["score"])
    return {
        "folds": list(folders),
        "epochs": [model["epoch"] for model in models],
        "unfinished": {str(fold): state for fold, state in runs.unfinished_folds(run).items()},
        "select": models[0]["select"],
        "prior": sum(model["prior"] for model in models) / len(models),
        "threshold": float(threshold),
        "percentile": float(metrics.percentile_of(breasts["score"], threshold)),
        "scores": nested.score_breasts(breasts),
    }


def summary_table(summary: dict) -> pd.DataFrame:
    """The scores of a summary with their 95 % intervals, a row a score, for a notebook to show; empty for no summary."""
    names = {
        "auc": "AUC",
        "average_precision": "average precision",
        "pf1": "pF1 of the raw scores",
        "naive_f1": "pF1 at its best threshold (flatters)",
    }
    columns = ["value", "95 % from", "to"]
    if not summary:
        return pd.DataFrame(columns=columns)
    rows = {text: [summary["scores"][name][k] for k in ("value", "low", "high")] for name, text in names.items()}
    return pd.DataFrame.from_dict(rows, "index", columns=columns, dtype=float).round(3)


def _scores(folder: Path) -> dict[str, float]:
    breasts = metrics.to_breast(pd.read_csv(folder / "oof.csv", dtype={"patient_id": str, "image_id": str}))
    labels, scores = breasts["cancer"].to_numpy(), breasts["score"].to_numpy()
    counts = (runs.read_model(folder)["epoch"], len(breasts), int(labels.sum()))
    found = [score(labels, scores) for score in (metrics.auc, metrics.average_precision, metrics.pfbeta)]
    return dict(zip((*COUNTS, *SCORES), (*counts, *found, metrics.best_threshold(labels, scores)[1]), strict=True))
