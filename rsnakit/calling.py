"""From scored images to breasts that are called positive: at which threshold, and whether as many are called as were out of
fold."""

from pathlib import Path

import pandas as pd

from rsnakit import metrics, runs, submission
from rsnakit.infer import InferConfig

FROM_SUMMARY = ("auto", "percentile")  # thresholds that the run's summary has


def to_breasts(report: pd.DataFrame, run: Path, how: str = "mean") -> pd.DataFrame:
    """A report's images to breasts, as `submission.to_breasts`, which see.

    Args:
        report: as `predict` gives it.
        run: the run that scored it, which is asked what a score is of where the report does not say it (`score_of`), as one
            of an older version of the kit.
        how: one of `metrics.HOWS`.
    """
    if "score_of" not in report:
        described = runs.read_model(next(iter(runs.trained_folds(run).values())))
        by_breast = described["model"].get("views", "none") != "none"
        report = report.assign(score_of="breast" if by_breast else "image")
    return submission.to_breasts(report, how)


def check_threshold(config: InferConfig, run: Path) -> None:
    """Stops where `choose_threshold` would for want of what the run's summary has; to be asked before anything is scored.

    Raises:
        rsnakit.runs.RunError: as `choose_threshold`.
    """
    if config.threshold in FROM_SUMMARY:
        _chosen(config, run)


def choose_threshold(config: InferConfig, run: Path, breasts: pd.DataFrame | None = None) -> tuple[float | None, str]:
    """The threshold that the settings mean for a run, None for none, and a sentence on where it comes from.

    `auto` is the out-of-fold threshold of scores that were brought to breasts by the same `aggregate`: the maximum of
    several images is higher than their mean, and wants a higher one. `percentile` calls the share of these breasts that was
    called out of fold (see `metrics.threshold_at`): for scores that are shifted as a whole, as those of a mean over folds are
    against single models'. It takes for granted that cancers are as frequent here as in training.

    Args:
        breasts: those to be called, as `to_breasts` gives them; `percentile` needs them.

    Raises:
        rsnakit.runs.RunError: `auto` or `percentile`, and the run has no summary, one of other folds, or one without this
            aggregate's threshold.
        ValueError: `percentile`, and no breasts are given.
    """
    if config.threshold == "none":
        return None, "no threshold: the scores are submitted as they are"
    if config.threshold not in FROM_SUMMARY:
        return float(config.threshold), f"threshold {float(config.threshold):g}, as given"
    chosen, folds = _chosen(config, run)
    origin = (
        f"the out-of-fold scores of fold {', '.join(map(str, folds))}, each breast's {config.aggregate} over images"
    )
    if config.threshold == "percentile":
        if breasts is None:
            raise ValueError("threshold='percentile' is one of these breasts' scores; give breasts")
        threshold, called = metrics.threshold_at(breasts["score"], chosen["percentile"]), 100 - chosen["percentile"]
        return threshold, f"threshold {threshold:.4f}, which calls nearest to the {called:.1f} % called on {origin}"
    source, expected = f"threshold {chosen['threshold']:.4f}, the best on {origin}", chosen.get("nested_f1")
    if expected is None:
        return chosen["threshold"], source
    return chosen["threshold"], f"{source}; pF1 to be expected: {expected:.3f}, that of thresholds from other folds"


def called_note(config: InferConfig, run: Path, threshold: float | None, breasts: pd.DataFrame) -> str:
    """A sentence where far more or fewer breasts are called than were out of fold; else "".

    Far is beyond what chance gives so many breasts (Wilson's 95 % interval), and more than twice the odds, or less than half.
    Out of fold a threshold met scores of single models, and here the mean over folds, whose spread is smaller; and patients
    may differ.

    Args:
        config: with the threshold's kind and the aggregate.
        run: its folder; where it has no out-of-fold scores nothing is known, and nothing said.
        threshold: as `choose_threshold` gives it.
        breasts: those that were called, as `to_breasts` gives them.
    """
    then = None if threshold is None or breasts.empty else _called_then(config, run, threshold)
    if then is None:
        return ""
    n, k = len(breasts), int((breasts["score"] >= threshold).sum())
    low, high = metrics.wilson(k, n)
    ours, theirs = k / n * (1 - then), then * (1 - k / n)  # in the ratio of the odds
    if low <= then <= high or max(ours, theirs) <= 2 * min(ours, theirs):
        return ""
    advice = (
        "many breasts share a score, and are called together"
        if config.threshold == "percentile"
        else "look at how the scores lie; -p threshold percentile calls the same share"
    )
    return f"NOTE: {then:.1%} of the out-of-fold breasts were called, and {k / n:.1%} of {n:,} are here: {advice}"


def _called_then(config: InferConfig, run: Path, threshold: float) -> float | None:
    """Share of the out-of-fold breasts that is called; None where that is not known."""
    if config.threshold in FROM_SUMMARY:
        percentile = _chosen(config, run)[0].get("percentile")
        return None if percentile is None else 1 - percentile / 100
    try:
        images = runs.read_oof(run)
    except runs.RunError:
        return None
    return None if images.empty else float((metrics.to_breast(images, config.aggregate)["score"] >= threshold).mean())


def _chosen(config: InferConfig, run: Path) -> tuple[dict, list[int]]:
    """What the run's summary says of an aggregate's threshold, and of which folds."""
    summary, wanted = runs.read_summary(run), f"threshold={config.threshold!r}"
    if summary is None:
        raise runs.RunError(
            f"{run}: no summary.json, and {wanted} is read from it; run 03_train, or give a number, such as threshold=0.3"
        )
    if summary.get("folds") != list(runs.trained_folds(run)):
        raise runs.RunError(
            f"{run}: the threshold in summary.json is that of folds {summary.get('folds')}, and there are weights of folds "
            f"{list(runs.trained_folds(run))}. Run 03_train again, which rewrites it, or give a number, such as threshold=0.3."
        )
    chosen = summary.get("by_aggregate", {"mean": summary}).get(config.aggregate)
    kind = "percentile" if config.threshold == "percentile" else "threshold"
    if chosen is None or chosen.get(kind) is None:
        raise runs.RunError(
            f"{run}: summary.json has no {kind} for aggregate={config.aggregate!r}; an older version of the kit wrote it. "
            "Run 03_train again, which rewrites it, or give a number, such as threshold=0.3."
        )
    return chosen, summary["folds"]
