"""What the folds of a run have come to so far, from what they left on disk: summary, tables, histories. A notebook that is
opened again shows it without training."""

from pathlib import Path

import pandas as pd

from rsnakit import metrics, nested, runs
from rsnakit.files import READ_ONLY, write_json

COUNTS = ("epoch", "breasts", "positives")
NESTED = ("nested_f1", "nested_low", "nested_high")
SCORES = ("AUC", "AP", "pF1", "pF1 at best cut (flatters)")


def histories(run: Path) -> dict[int, pd.DataFrame]:
    """`history.csv` of all folds that have weights, unfinished ones too, by fold number."""
    found = {fold: runs.read_history(folder) for fold, folder in runs.begun_folds(run).items()}
    return {fold: history for fold, history in found.items() if history is not None}


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
        What was written, as `summarize` gives it for the mean of a breast's images.

    Folds that two processes train may end at the same moment. The one that writes last sees the other's files, since each
    looks again after writing: the summary that stays has both.
    """
    while True:
        before = _written(run)
        summary = summarize(run)
        write_json(run / "summary.json", summary)
        if _written(run) == before:
            return summary


def update_summary(run: Path) -> dict:
    """As `write_summary`, for whoever only looks at a run: where its folder cannot be written to, as a data set's on Kaggle or
    a colleague's, `summary.json` stays as it is, with a line that says so."""
    try:
        return write_summary(run)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        print(f"NOTE: {run / 'summary.json'} stays as it is, since it cannot be written to: {error.strerror}")
    return summarize(run)


def summarize(run: Path, aggregate: str = "mean") -> dict:
    """Scores the out-of-fold predictions of the folds there are, per breast.

    Args:
        run: its folder.
        aggregate: from a breast's images to its score, one of `metrics.HOWS`.

    Returns:
        - `aggregate`, `folds`, `epochs` (of the weights kept), `unfinished` (see `runs.unfinished_folds`), `select`, `prior`
          (share of positive images in training);
        - `threshold` and `percentile`: the best on these very scores, so that their F1 flatters;
        - `by_aggregate`: for each of `metrics.HOWS` the same two, their `naive_f1`, and `nested_f1` with its 95 % interval
          from `nested_low` to `nested_high`;
        - `nested`: see `nested.Nested.plain`; None with one fold, and `nested_note` says why;
        - `epoch_choice`: see `nested.epoch_choice`;
        - `scores`: see `nested.score_breasts`.
    """
    folders = runs.trained_folds(run)
    images = runs.read_oof(run)
    breasts = {how: metrics.to_breast(images, how) for how in metrics.HOWS}
    models = [runs.read_model(folder) for folder in folders.values()]
    found = {how: nested.nested_threshold(frame) for how, frame in breasts.items()}
    by_aggregate = {how: _choice(frame, found[how]) for how, frame in breasts.items()}
    return {
        "aggregate": aggregate,
        "folds": list(folders),
        "epochs": [model["epoch"] for model in models],
        "unfinished": {str(fold): state for fold, state in runs.unfinished_folds(run).items()},
        "select": models[0]["select"],
        "prior": sum(model["prior"] for model in models) / len(models),
        "threshold": by_aggregate[aggregate]["threshold"],
        "percentile": by_aggregate[aggregate]["percentile"],
        "by_aggregate": by_aggregate,
        "nested": found[aggregate].plain() if found[aggregate] else None,
        "nested_note": "" if found[aggregate] else nested.NOT_NESTED,
        "epoch_choice": _epoch_choice(run, models[0]["select"]),
        "scores": nested.score_breasts(breasts[aggregate]),
    }


def _written(run: Path) -> dict[Path, tuple]:
    """What a summary is made of, with marks that change when a file is written again; of checkpoints that they are there."""
    names = ("model.json", "oof.csv", "history.csv")
    stats = {path: path.stat() for path in run.glob("fold*/*") if path.name in names}
    marks = {path: (found.st_mtime_ns, found.st_ino, found.st_size) for path, found in stats.items()}
    return marks | {path: () for path in run.glob("fold*/last.pt")}


def _choice(breasts: pd.DataFrame, found: nested.Nested | None) -> dict[str, float | None]:
    threshold, naive_f1 = metrics.best_threshold(breasts["cancer"], breasts["score"])
    percentile = metrics.percentile_of(breasts["score"], threshold)
    interval = dict(zip(NESTED, tuple(found.f1) if found else (None, None, None), strict=True))
    return {"threshold": threshold, "percentile": percentile, "naive_f1": naive_f1, **interval}


def _epoch_choice(run: Path, select: str) -> dict | None:
    trained = {fold: history for fold, history in histories(run).items() if fold in runs.trained_folds(run)}
    train = runs.read_config(run)["train"]
    averaged = train.get("ema_decay") and train.get("ema_keep")
    return nested.epoch_choice(trained, select, "ema_valid" if averaged else "valid")


def summary_table(summary: dict) -> pd.DataFrame:
    """The scores of a summary with their 95 % intervals, a row a score, for a notebook to show; empty for no summary.

    First the F1 at thresholds from other folds, then the naive one, by how much it flatters, and what choosing the epoch on
    the scored fold added where that was done. A summary of one fold, or of an older kit, has no nested score, and says so.
    """
    columns = ["value", "95 % from", "to"]
    if not summary:
        return pd.DataFrame(columns=columns)
    scores, found, choice = summary["scores"], summary.get("nested"), summary.get("epoch_choice")
    if found:
        rows = {
            "pF1 at thresholds from other folds (nested)": _row(found["f1"]),
            "pF1 at its best threshold (naive, flatters)": _row(found["naive_f1"]),
            "by which the naive one is higher": [found["optimism"], None, None],
        }
    else:
        why = "one fold" if len(summary["folds"]) == 1 else "an older summary"
        rows = {f"pF1 at its best threshold (naive, flatters; {why}: no nested score)": _row(scores["naive_f1"])}
    if choice:
        rows[f"added by choosing the epoch by {choice['select']} on the scored fold"] = [choice["f1"], None, None]
    names = {"auc": "AUC", "average_precision": "average precision", "pf1": "pF1 of the raw scores"}
    rows |= {text: _row(scores[name]) for name, text in names.items()}
    return pd.DataFrame.from_dict(rows, "index", columns=columns, dtype=float).round(3)


def aggregate_table(summary: dict) -> pd.DataFrame:
    """The ways from images to breasts side by side, indexed by `aggregate`; empty for no summary or one of an older kit.

    Returns:
        threshold, F1 at thresholds from other folds with its 95 % interval, and at the threshold itself, which flatters; with
        one fold the last alone.
    """
    columns = {
        "threshold": "threshold",
        "nested_f1": "pF1 at thresholds from other folds (nested)",
        "nested_low": "95 % from",
        "nested_high": "to",
        "naive_f1": "pF1 at this threshold (naive, flatters)",
    }
    rows = (summary or {}).get("by_aggregate") or {}
    table = pd.DataFrame.from_dict(rows, "index", columns=None if rows else list(columns), dtype=float)[list(columns)]
    if table["nested_f1"].isna().all():
        table = table[["threshold", "naive_f1"]]
    return table.rename(columns=columns).rename_axis("aggregate").round(3)


def _row(interval: dict) -> list[float | None]:
    return [interval[name] for name in ("value", "low", "high")]


def _scores(folder: Path) -> dict[str, float]:
    breasts = metrics.to_breast(runs.read_fold_oof(folder))
    labels, scores = breasts["cancer"].to_numpy(), breasts["score"].to_numpy()
    counts = (runs.read_model(folder)["epoch"], len(breasts), int(labels.sum()))
    found = [score(labels, scores) for score in (metrics.auc, metrics.average_precision, metrics.pfbeta)]
    return dict(zip((*COUNTS, *SCORES), (*counts, *found, metrics.best_threshold(labels, scores)[1]), strict=True))
