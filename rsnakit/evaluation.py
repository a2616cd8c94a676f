"""What 05_evaluate reads: a run's out-of-fold scores with what the table says of their breasts, alone and beside other runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from rsnakit import breasts, data, env, leaks, metrics, models, preprocess, runs
from rsnakit.breasts import BREAST
from rsnakit.fields import check_all
from rsnakit.nested import nested_threshold
from rsnakit.params import setting
from rsnakit.store import Store, StoreError

INTERVAL = ["value", "95 % from", "to"]
SCORES = {"AUC": metrics.auc, "average precision": metrics.average_precision, "pF1 of the raw scores": metrics.pfbeta}


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What is looked at of a run, and beside what; nothing here changes the run."""

    compare: tuple[str, ...] = setting(())  # names of other runs on the same data, to be set beside this one
    aggregate: str = setting("mean", choices=breasts.HOWS)  # of a breast's images, as 04_inference has it
    resamples: int = setting(1000, low=100, high=100_000)  # of patients, for the intervals
    mistakes: int = setting(4, low=1, high=20)  # breasts of each kind that are shown
    patient: str = setting("")  # whose views are shown at the end; empty: the one with the largest mistake

    def __post_init__(self) -> None:
        check_all(self)


def table_of(run: Path, competition: Path) -> pd.DataFrame:
    """The training table that a run was trained on: all of it, or the few patients of a run with debug.

    Raises:
        rsnakit.runs.RunError: the competition's images, labels, views or sites are not those that the run was trained on.
    """
    settings = runs.read_config(run)
    table = data.load_table(competition, "train")
    if settings["debug"]:
        table = data.debug_subset(table)
    if data.fingerprint(table) != settings["data"]:
        raise runs.RunError(
            f"{run.name}: trained on other images, labels, views or sites than {competition / 'train.csv'} has. Give data_dir "
            "the competition that it was trained on, or run= another run; 03_train trains one on this data."
        )
    return table


def scored_images(run: Path, table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the table that a run has out-of-fold scores of, with `fold` and `score`; where the model scores breasts, each
    image has its breast's score.

    Raises:
        rsnakit.runs.RunError: no fold is trained, or an image of `oof.csv` is not in the table.
    """
    oof = runs.read_oof(run)
    if oof.empty:
        raise runs.RunError(f"{run}: no fold with out-of-fold scores yet; 03_train makes them")
    whole = (oof["image_id"] == "").all()
    keys = BREAST if whole else ["image_id"]
    found = table.merge(oof[[*keys, "fold", "score"]], on=keys, validate="many_to_one")
    missing = len(oof) - len(found[keys].drop_duplicates())
    if missing:
        raise runs.RunError(
            f"{run}: {missing} of {len(oof)} rows of oof.csv are not in the table; delete the folds and train again"
        )
    return found


def read_other(work: Path, name: str, competition: Path, how: str = "mean") -> pd.DataFrame:
    """Out-of-fold scores of another run on the same competition, a row a breast, to be compared with.

    Raises:
        rsnakit.runs.RunError: there is no such run, or it was trained on other data.
    """
    run = runs.find_run(work, name, is_demo=False)
    return metrics.to_breast(scored_images(run, table_of(run, competition)), how)


def with_pixels(images: pd.DataFrame, store: Store | None) -> pd.DataFrame:
    """The rows whose image can be shown; none without a store."""
    return images.iloc[:0] if store is None else data.usable(images, store)[0]


def open_store(
    run: Path, work: Path, competition: Path, table: pd.DataFrame, run_config: env.RunConfig
) -> Store | None:
    """The store of the images that a run was trained on; None, with a line that says so, where it is not there: scores need
    no pixels.

    Args:
        run: the run's folder.
        work: the work folder.
        competition: its folder.
        table: as `table_of` gives it.
        run_config: where the store is, and in what format; the demo's is made where it is missing.
    """
    settings = runs.read_config(run)
    config = runs.rebuild(preprocess.PreprocessConfig, settings["preprocess"], run)
    path = preprocess.store_path(work, competition, config, run_config)
    try:
        return preprocess.ensure_store(table, config, path, run_config, settings["is_demo"] or settings["debug"])
    except StoreError as error:
        print(f"NOTE: no pictures, since the images are not there: {error}")
        return None


def check(run: Path, images: pd.DataFrame, store: Store | None, competition: Path) -> None:
    """The checks that training runs too (`leaks.check`), on the images that a run was scored on, in its own folds.

    Raises:
        rsnakit.data.TableError: a patient is in two folds, or a leak is among what the model is fed with.
    """
    model = next(runs.read_model(folder) for folder in runs.trained_folds(run).values())
    config = runs.rebuild(models.ModelConfig, model["model"], run)
    leaks.check(
        images,
        images["fold"],
        leaks.content_of(images, store),
        leaks.test_columns(competition),
        models.inputs_of(config),
    )


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


def comparison(scored: Mapping[str, pd.DataFrame], n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """The first run less each other one, on the same breasts and the same resampled patients.

    Args:
        scored: by the run's name, as `on_the_same` gives them.
        n, seed: of the resampling.

    Returns:
        A row a pair and score: `other`, `score`, `difference` (above 0: the first is better), `low` and `high` at 95 %, and
        `probability`, the share of resamples in which the first is better. F1 is that of calls at nested thresholds, where
        both runs have several folds.
    """
    first, *_ = scored.values()
    rows = []
    for name, other in list(scored.items())[1:]:
        pairs = {score: (first["score"], other["score"], statistic) for score, statistic in SCORES.items()}
        calls = [nested_threshold(frame, n=n, seed=seed) for frame in (first, other)]
        if None not in calls:
            pairs = {"F1 at nested thresholds": (*(c.called.astype(float) for c in calls), metrics.pfbeta), **pairs}
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


def operating_points(frame: pd.DataFrame, thresholds: Mapping[int, float] | None) -> dict[str, float]:
    """Thresholds to mark in a figure, by what they are: the mean of the nested ones, the one that is best on these very
    scores, and those of 90 % sensitivity and of 90 % specificity.

    Args:
        frame: a row a breast, with cancer and score.
        thresholds: by fold, each chosen on the other folds; None where there are none.
    """
    labels, scores = frame["cancer"], frame["score"]
    points = {"mean of the folds' nested ones": sum(thresholds.values()) / len(thresholds)} if thresholds else {}
    points["best F1 on these scores"] = metrics.best_threshold(labels, scores)[0]
    points["90 % sensitivity"] = metrics.threshold_of_sensitivity(labels, scores, 0.9)
    points["90 % specificity"] = metrics.threshold_of_specificity(labels, scores, 0.9)
    return points


def quantities(frame: pd.DataFrame, threshold: float, n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """What a threshold and a score mean beyond F1, with 95 % intervals over patients; indexed by what it is.

    Args:
        frame: a row a breast, with patient_id, cancer and score.
        threshold: scores at or above it are called positive.
    """
    wanted = {
        "sensitivity at 90 % specificity": metrics.SensitivityAt(0.9),
        "specificity at 90 % sensitivity": metrics.SpecificityAt(0.9),
        f"sensitivity at the threshold {threshold:.3g}": metrics.SensitivityOf(threshold),
        f"specificity at the threshold {threshold:.3g}": metrics.SpecificityOf(threshold),
        f"recall rate at the threshold {threshold:.3g}, share of all that is called": metrics.RecallRateAt(threshold),
        "Brier score, 0 is best": metrics.brier,
        "expected calibration error, 0 is best": metrics.calibration_error,
    }
    columns = (frame["cancer"], frame["score"], frame["patient_id"])
    rows = {name: tuple(metrics.bootstrap(*columns, statistic, n=n, seed=seed)) for name, statistic in wanted.items()}
    return pd.DataFrame.from_dict(rows, "index", columns=INTERVAL).round(3)
