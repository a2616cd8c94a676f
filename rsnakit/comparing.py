"""A run set beside others: on the same breasts and the same resampled patients, and all of them together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from rsnakit import look, metrics, runs
from rsnakit.breasts import BREAST
from rsnakit.evaluation import SCORES
from rsnakit.nested import nested_threshold


def find_others(work: Path, names: Sequence[str], run: Path) -> dict[str, Path]:
    """Folders of the runs to compare with, by name; the run itself is left out, with a line that says so.

    Raises:
        rsnakit.runs.RunError: one is not there.
    """
    found = {name: runs.find_run(work, name, is_demo=False) for name in dict.fromkeys(names)}
    if found.pop(run.name, None):
        print(f"NOTE: compare: {run.name} is the run itself, and left out")
    return found


def settings_table(folders: Mapping[str, Path]) -> pd.DataFrame:
    """How each run's folds were made and its weights chosen, which decides what its scores are worth; indexed by `run`.

    Says so where runs were held out in different ways: by patients, or by whole machines.
    """
    rows = {}
    for name, folder in folders.items():
        settings = runs.read_config(folder)
        train = settings["train"]
        rows[name] = {
            "backbone": settings.get("model", {}).get("backbone"),
            "folds scored": f"{len(runs.trained_folds(folder))} of {train.get('n_folds')}",
            **{name: train.get(name) for name in ("split", "seed", "epochs", "select")},
        }
    table = pd.DataFrame.from_dict(rows, "index").rename_axis("run")
    if table["split"].nunique(dropna=False) > 1:
        print("NOTE: these runs were not held out alike (split): new machines are harder than new patients")
    return table


def on_the_same(scored: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Tables with a row a breast, cut to the breasts that all have, in the order of the first; says where that is fewer.

    Args:
        scored: by the run's name, as `metrics.to_breast` gives them.

    Raises:
        rsnakit.runs.RunError: they have no breast in common, or those they have are all of one class.
    """
    first, *others = scored.values()
    common = first[BREAST]
    for other in others:
        common = common.merge(other[BREAST], on=BREAST)
    same = {name: common.merge(frame, on=BREAST) for name, frame in scored.items()}
    labels = next(iter(same.values()))["cancer"]
    if labels.nunique() < 2:
        raise runs.RunError(
            f"runs {', '.join(scored)}: {len(common)} breasts are scored by all of them, {int(labels.sum())} with cancer; "
            "both kinds are needed. Train the same folds of each, with the same seed and n_folds."
        )
    for name, frame in scored.items():
        if len(frame) > len(common):
            print(f"NOTE: {name} has {len(frame):,} breasts; compared on the {len(common):,} that all have")
    return same


def differences(scored: Mapping[str, pd.DataFrame], n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """The first run less each other one, on the same breasts and the same resampled patients.

    Args:
        scored: by the run's name, as `on_the_same` gives them.
        n, seed: of the resampling.

    Returns:
        A row a pair and score: `other`, `score`, `difference` (above 0: the first is better), `low` and `high` at 95 %, and
        `probability`, the share of resamples in which the first is better. First comes pF1 of the calls at nested thresholds,
        where both runs have several folds.
    """
    first, *_ = scored.values()
    rows = []
    for name, other in list(scored.items())[1:]:
        pairs = {score: (first["score"], other["score"], statistic) for score, statistic in SCORES.items()}
        calls = [nested_threshold(frame, n=n, seed=seed) for frame in (first, other)]
        if None not in calls:
            pairs = {f"pF1 {look.NESTED}": (*(c.called.astype(float) for c in calls), metrics.pfbeta), **pairs}
        for score, (ours, theirs, statistic) in pairs.items():
            found = metrics.compare(first["cancer"], ours, theirs, first["patient_id"], statistic, n=n, seed=seed)
            rows.append(
                {"other": name, "score": score, "difference": found.value, "low": found.low, "high": found.high,
                 "probability": found.probability}
            )  # fmt: skip
    return pd.DataFrame(rows, columns=["other", "score", "difference", "low", "high", "probability"])


def blends(scored: Mapping[str, pd.DataFrame], n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Average precision and AUC, with 95 % intervals, of each run and of all of them together, by the mean of their
    probabilities, logits or ranks; indexed by `scores of`.

    Args:
        scored: by the run's name, as `on_the_same` gives them.
    """
    frames = list(scored.values())
    ways = ("mean", "logits", "ranks") if len(frames) > 1 else ()
    together = {f"all, {how}": metrics.combine(frames, how) for how in ways}
    rows = {}
    for name, frame in {**scored, **together}.items():
        row = {}
        for score in ("average precision", "AUC"):
            found = metrics.bootstrap(
                frame["cancer"], frame["score"], frame["patient_id"], SCORES[score], n=n, seed=seed
            )
            row |= {score: found.value, f"{score}, 95 % from": found.low, f"{score}, to": found.high}
        rows[name] = row
    return pd.DataFrame.from_dict(rows, "index").rename_axis("scores of").round(3)
