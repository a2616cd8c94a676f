"""What 05_evaluate reads: a run's out-of-fold scores with what the table says of their breasts; and what these scores mean."""

import dataclasses
import difflib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from rsnakit import breasts, data, env, leaks, metrics, models, preprocess, runs
from rsnakit.breasts import BREAST
from rsnakit.fields import check_all
from rsnakit.nested import Nested
from rsnakit.params import setting
from rsnakit.store import Store, StoreError
from rsnakit.tables import DECIDING

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


class Scores(NamedTuple):
    """Out-of-fold scores of a run.

    Attributes:
        images: the table's rows of the images that were scored, with `fold`; and with `score` where the model scores images.
        breasts: a row a breast, as `metrics.to_breast` gives it.
    """

    images: pd.DataFrame
    breasts: pd.DataFrame


def check_patient(patient_id: str, images: pd.DataFrame) -> None:
    """Stops (ValueError) where a patient that is to be shown is not among the images; empty: whichever is shown."""
    if patient_id and patient_id not in set(images["patient_id"]):
        near = difflib.get_close_matches(patient_id, images["patient_id"].unique(), 3, cutoff=0.0)
        raise ValueError(
            f"patient: no {patient_id!r} among {images['patient_id'].nunique():,} scored ones; near it: {near}"
        )


def table_of(run: Path, competition: Path) -> pd.DataFrame:
    """The training table that a run was trained on: all of it, or the few patients of a run with debug.

    Raises:
        rsnakit.runs.RunError: the competition's images, or what training depends on of them (`tables.DECIDING`), are not
            those that the run was trained on.
    """
    settings = runs.read_config(run)
    table = data.load_table(competition, "train")
    if settings["debug"]:
        table = data.debug_subset(table)
    if data.fingerprint(table) != settings["data"]:
        raise runs.RunError(
            f"{run.name}: trained on other data than {competition / 'train.csv'} has: the images differ, or one of their "
            f"{', '.join(DECIDING)}. Give data_dir the competition that it was trained on, or run= another run; 03_train "
            "trains one on this data."
        )
    return table


def read_scores(run: Path, table: pd.DataFrame, how: str = "mean") -> Scores:
    """A run's out-of-fold scores, joined to the table.

    Args:
        run: its folder.
        table: as `table_of` gives it.
        how: from a breast's images to its score; without effect where the model scores whole breasts.

    Raises:
        rsnakit.runs.RunError: no fold is trained, or `oof.csv` has images, breasts or labels that the table has not.
    """
    oof = runs.read_oof(run)
    if oof.empty:
        raise runs.RunError(f"{run}: no fold with out-of-fold scores yet; 03_train makes them")
    by_breast = (oof["image_id"] == "").all()
    keys = BREAST if by_breast else ["image_id"]
    taken = [*keys, "fold"] if by_breast else [*keys, "fold", "score"]
    images = table.merge(oof[taken], on=keys, validate="many_to_one")
    labels = images[[*keys, "cancer"]].drop_duplicates().merge(oof[[*keys, "cancer"]], on=keys, suffixes=("", "_then"))
    missing, other = len(oof) - len(labels), int((labels["cancer"] != labels["cancer_then"]).sum())
    if missing or other:
        raise runs.RunError(
            f"{run}: of {len(oof)} rows of oof.csv {missing} are not in the table, and {other} have another label there. Give "
            "data_dir the competition that it was trained on; if it is, delete the folds and train again."
        )
    return Scores(images, metrics.to_breast(oof, how))


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


def operating_points(frame: pd.DataFrame, threshold: float, nested: Nested | None) -> dict[str, float | np.ndarray]:
    """Points to mark in a figure, by what they are: thresholds, and first the calls (N,) bool of each fold at the threshold of
    the others, where there are several folds.

    Args:
        frame: a row a breast, with cancer and score.
        threshold: that 04_inference takes.
    """
    labels, scores = frame["cancer"], frame["score"]
    return {
        **({"each fold at the others' threshold": nested.called} if nested else {}),
        "04's threshold": threshold,
        "90 % sensitivity": metrics.threshold_of_sensitivity(labels, scores, 0.9),
        "90 % specificity": metrics.threshold_of_specificity(labels, scores, 0.9),
    }


def quantities(
    frame: pd.DataFrame, threshold: float, nested: Nested | None, n: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """What calls and scores mean beyond F1, with 95 % intervals over patients; indexed by what it is.

    Sensitivity, specificity and recall rate are those of each fold's calls at the threshold of the other folds, as new patients
    are to expect them; then those at the threshold that 04_inference takes, which was chosen on these very scores.

    Args:
        frame: a row a breast, with patient_id, cancer and score.
        threshold: that 04_inference takes.
        nested: as `nested.nested_threshold` gives it; None with one fold, and then these rows are missing.
    """
    called = frame["score"] >= threshold
    rows = _at("each fold at the others' threshold", nested.called) if nested else {}
    rows |= _at(f"04's threshold {threshold:.3g} (flatters)", called)
    rows |= {
        "sensitivity at 90 % specificity": (frame["score"], metrics.SensitivityAt(0.9)),
        "specificity at 90 % sensitivity": (frame["score"], metrics.SpecificityAt(0.9)),
        "Brier score, 0 is best": (frame["score"], metrics.brier),
        "expected calibration error, 0 is best (resampling adds some)": (frame["score"], metrics.calibration_error),
    }
    found = {
        name: tuple(metrics.bootstrap(frame["cancer"], scores, frame["patient_id"], statistic, n=n, seed=seed))
        for name, (scores, statistic) in rows.items()
    }
    return pd.DataFrame.from_dict(found, "index", columns=INTERVAL).round(3)


def _at(where: str, called: np.ndarray | pd.Series) -> dict[str, tuple]:
    """What calls come to, as scores and statistics by name."""
    calls = np.asarray(called, dtype=float)
    return {
        f"sensitivity, {where}": (calls, metrics.SensitivityOf(0.5)),
        f"specificity, {where}": (calls, metrics.SpecificityOf(0.5)),
        f"recall rate (share of all that is called), {where}": (calls, metrics.RecallRateAt(0.5)),
    }
