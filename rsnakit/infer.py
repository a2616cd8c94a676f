"""Runs and a competition to a submission: every breast of test.csv gets its row, whatever happens to its images."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from rsnakit import data, env, metrics, models, runs
from rsnakit.batches import for_each_batch
from rsnakit.fields import check_all
from rsnakit.files import replacing
from rsnakit.loop import autocast
from rsnakit.params import setting
from rsnakit.preprocess import PreprocessConfig, load_image

COLUMNS = ["prediction_id", "cancer"]  # of a submission
REPORT_COLUMNS = ["prediction_id", "patient_id", "laterality", "image_id", "status", "score", "seconds", "reason"]


@dataclasses.dataclass(frozen=True)
class InferConfig:
    """How a run's models are used on new images."""

    threshold: float | str = setting("auto", low=0.0, high=1.0, choices=("auto", "none"))  # or a number in [0, 1]
    aggregate: str = setting("mean", choices=("mean", "max"))  # of a breast's images
    infer_batch_size: int = setting(8, low=1, high=1024)  # images

    def __post_init__(self):
        check_all(self)


class SubmissionError(ValueError):
    """A submission that the competition would refuse or score wrongly; the message says what is wrong in which row."""


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The models of a run's folds, and what all of them agree on.

    Attributes:
        models: by fold number, on the device, in evaluation mode.
        preprocess: the settings that shaped the pixels they were trained on.
        prior: share of positive images in their training.
    """

    models: dict[int, torch.nn.Module]
    preprocess: PreprocessConfig
    prior: float


def load_ensemble(run: Path, device: str = "cpu") -> Ensemble:
    """Rebuilds the models of all folds that a run has, from its own files alone.

    Raises:
        rsnakit.runs.RunError: no fold is trained, or the folds were trained on differently prepared pixels.
        rsnakit.models.WeightsError: weights that do not fit what `model.json` says.
    """
    folders = runs.trained_folds(run)
    if not folders:
        raise runs.RunError(f"{run}: no fold with best.safetensors and model.json; 03_train makes one")
    built, described = {}, {}
    for fold, folder in folders.items():
        described[fold] = runs.read_model(folder)
        # Its own weights follow; the ones it began from are neither needed nor, on Kaggle, to be had.
        saved = {**described[fold]["model"], "weights": "none"}
        config = runs.rebuild(models.ModelConfig, saved, folder)
        built[fold] = models.load_weights(models.build_model(config), folder / "best.safetensors")
        built[fold] = built[fold].to(device, memory_format=torch.channels_last).eval()
    first, *others = described.values()
    for other in others:
        differences = runs.compare(first["preprocess"], other["preprocess"])
        if differences:
            raise runs.RunError(f"{run}: folds were trained on differently prepared images: {differences}")
    return Ensemble(
        models=built,
        preprocess=runs.rebuild(PreprocessConfig, first["preprocess"], run),
        prior=float(np.mean([model["prior"] for model in described.values()])),
    )


def refuse_other_settings(run: Path, given: dict[str, object]) -> None:
    """Stops (RunError) where a parameter was given that shapes pixels or the model and is not what the run was trained with.

    Args:
        given: parameters by name that the notebook does not use itself, as `params.unused` gives them.
    """
    settings = runs.read_config(run)
    trained = {**settings["preprocess"], **settings["model"]}
    trained.pop("weights")  # what training began from
    differing = {name: (trained[name], value) for name, value in given.items() if trained.get(name, value) != value}
    if differing:
        shown = ", ".join(f"{name}={now!r} (trained with {before!r})" for name, (before, now) in differing.items())
        raise runs.RunError(
            f"{run.name}: {shown}: the settings of pixels and model travel with the weights. Leave them out here, or name "
            "the run that was trained with them."
        )


def predict(
    competition: Path | str, run: Path | str, config: InferConfig, run_config: env.RunConfig | None = None
) -> pd.DataFrame:
    """Scores every image of a competition's test.csv with all folds of a run.

    Args:
        competition: its folder.
        run: a run's folder (see `runs.find_run`).
        config: batch size; threshold and aggregation come later, in `write_submission`.
        run_config: device, precision, processes, debug (the first few breasts alone are scored, the rest get the prior).

    Returns:
        `report.csv` as a frame, a row an image of test.csv in its order: prediction_id, patient_id, laterality, image_id,
        status (`ok`, `blank`, `failed` or `skipped`), score (mean over folds; the training prior where the status is not
        ok), seconds to decode, reason.
    """
    run_config = run_config or env.RunConfig()
    device = env.choose_device(run_config.device).value
    precision = env.choose_precision(device, run_config.precision).value
    table = data.load_table(competition, "test")
    ensemble = load_ensemble(Path(run), device)
    report = table[["prediction_id", "patient_id", "laterality", "image_id"]].assign(
        status="skipped", score=ensemble.prior, seconds=0.0, reason="debug: not looked at"
    )
    wanted = np.arange(len(table))
    if run_config.debug:
        wanted = wanted[table["breast_id"].isin(table["breast_id"].unique()[:4]).to_numpy()]
    paths, pixels = table["path"].iloc[wanted].tolist(), ensemble.preprocess
    n_jobs = (run_config.n_jobs or env.cores()) if len(paths) > 8 else 0
    with tqdm(total=len(paths), desc="inference", unit="image", mininterval=1) as progress:

        def score(batch: dict) -> None:
            rows = wanted[batch["item"]]
            for name, column in _scored(ensemble, batch, device, precision).items():
                report.loc[rows, name] = column
            progress.update(len(rows))

        read, shape = functools.partial(load_image, config=pixels), (pixels.height, pixels.width)
        for_each_batch(paths, read, shape, score, config.infer_batch_size, n_jobs)
    return report[REPORT_COLUMNS]


def _scored(ensemble: Ensemble, batch: dict, device: str, precision: str) -> dict[str, np.ndarray | list]:
    """The columns of a report for a batch: the training prior stands in where there are no pixels or no finite score."""
    score = _score(ensemble, batch["image"], device, precision)
    status, reason = np.array(batch["status"], dtype=object), np.array(batch["reason"], dtype=object)
    odd = ~np.isfinite(score) & (status == "ok")
    status[odd], reason[odd] = "failed", "the model gave no finite score"
    score = np.where(status == "ok", score, ensemble.prior)
    return {"status": status, "reason": reason, "seconds": batch["seconds"], "score": score}


@torch.no_grad()
def _score(ensemble: Ensemble, images: torch.Tensor, device: str, precision: str) -> np.ndarray:
    """Mean probability over the folds, (B,) float64; sigmoid and mean are taken in full precision."""
    images = images.to(device)
    total = torch.zeros(len(images), dtype=torch.float64)
    for model in ensemble.models.values():
        with autocast(device, precision):
            logits = model(images)["cancer"]
        total += logits.cpu().double().sigmoid()  # on the CPU: Apple's GPUs have no float64
    return (total / len(ensemble.models)).numpy()


def choose_threshold(config: InferConfig, run: Path) -> tuple[float | None, str]:
    """The threshold that the settings mean for a run, None for none, and a sentence on where it comes from.

    Raises:
        rsnakit.runs.RunError: `auto`, and the run has no summary, or one of other folds.
    """
    if config.threshold == "none":
        return None, "no threshold: the scores are submitted as they are"
    if config.threshold != "auto":
        return float(config.threshold), f"threshold {float(config.threshold):g}, as given"
    summary = runs.read_summary(run)
    if summary is None:
        raise runs.RunError(
            f"{run}: no summary.json, and threshold='auto' is read from it; run 03_train, or give a number"
        )
    if summary["folds"] != list(runs.trained_folds(run)):
        raise runs.RunError(
            f"{run}: the threshold in summary.json is that of folds {summary['folds']}, and there are weights of folds "
            f"{list(runs.trained_folds(run))}. Run 03_train again, which rewrites it, or give a number."
        )
    threshold, folds = summary["threshold"], ", ".join(map(str, summary["folds"]))
    return threshold, f"threshold {threshold:.4f}, the best on the out-of-fold scores of fold {folds}"


def write_submission(
    report: pd.DataFrame, path: Path | str, threshold: float | None, aggregate: str = "mean"
) -> pd.DataFrame:
    """Brings a report's images to breasts, cuts at the threshold and writes the submission, whole or not at all.

    Args:
        report: as `predict` gives it.
        threshold: scores at or above it become 1, others 0; None leaves them.
        aggregate: `mean` or `max` over a breast's images.

    Returns:
        What was written: prediction_id, cancer, a row a breast in first-seen order.
    """
    breasts = metrics.to_breast(report, aggregate)
    cancer = breasts["score"].clip(0, 1)
    if threshold is not None:
        cancer = (breasts["score"] >= threshold).astype(float)
    submission = pd.DataFrame({"prediction_id": breasts["prediction_id"], "cancer": cancer})
    with replacing(path) as temporary:
        submission.to_csv(temporary, index=False)
    return submission


def check_submission(submission: Path | str | pd.DataFrame, test: Path | str | pd.DataFrame) -> pd.DataFrame:
    """Checks a submission against test.csv as the competition would.

    Args:
        submission: its file, or a frame of it.
        test: test.csv, or a frame with its prediction_id.

    Returns:
        The submission.

    Raises:
        SubmissionError: other columns; a prediction_id missing, twice, unknown or out of order; a value that is missing,
            no number, or outside [0, 1].
    """
    ids = {"prediction_id": str}
    if not isinstance(submission, pd.DataFrame):
        submission = pd.read_csv(submission, dtype=ids, keep_default_na=False)
    if not isinstance(test, pd.DataFrame):
        test = pd.read_csv(test, dtype=ids, usecols=["prediction_id"])
    if list(submission.columns) != COLUMNS:
        raise SubmissionError(f"columns are {list(submission.columns)}, expected {COLUMNS}")
    expected = test["prediction_id"].astype(str).drop_duplicates().tolist()
    found = submission["prediction_id"].astype(str).tolist()
    for what, names in (
        ("twice", submission["prediction_id"][submission["prediction_id"].duplicated()].tolist()),
        ("missing", sorted(set(expected) - set(found))),
        ("not in test.csv", sorted(set(found) - set(expected))),
    ):
        if names:
            raise SubmissionError(f"{len(names)} prediction_ids are {what}, {names[:3]} among them")
    if found != expected:
        row = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise SubmissionError(f"row {row + 2} is {found[row]}, test.csv has {expected[row]} there: keep its order")
    values = pd.to_numeric(submission["cancer"], errors="coerce")
    wrong = ~values.between(0, 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        value = submission["cancer"].iloc[row]
        shown = repr(value) if isinstance(value, str) else str(value)
        raise SubmissionError(f"row {row + 2}, {found[row]}: cancer is {shown}, expected 0 to 1")
    return submission.assign(cancer=values.to_numpy(dtype=float))
