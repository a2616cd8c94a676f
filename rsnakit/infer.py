"""Runs and a competition to a submission: every breast of test.csv gets its row, whatever happens to its images. What is
written, and checked as the competition would, stands in `submission`; where breasts are cut, in `calling`."""

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
from rsnakit.loop import autocast
from rsnakit.params import setting
from rsnakit.preprocess import PreprocessConfig, load_image
from rsnakit.submission import SubmissionError, check_submission, write_submission
from rsnakit.targets import view_ids

__all__ = [
    "Ensemble", "InferConfig", "SubmissionError", "check_submission", "load_ensemble", "predict", "refuse_other_settings",
    "write_submission",
]  # fmt: skip

REPORT_COLUMNS = ["prediction_id", "patient_id", "laterality", "image_id", "status", "score", "seconds", "reason"]
NOT_FINITE = "the model gave no finite score"
BREASTS = 512  # pooled at a time


@dataclasses.dataclass(frozen=True)
class InferConfig:
    """How a run's models are used on new images."""

    threshold: float | str = setting("auto", low=0.0, high=1.0, choices=("auto", "none", "percentile"))
    aggregate: str = setting("mean", choices=metrics.HOWS)  # of a breast's images
    infer_batch_size: int = setting(8, low=1, high=1024)  # images

    def __post_init__(self):
        check_all(self)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The models of a run's folds, and what all of them agree on.

    Attributes:
        models: by fold number, on the device, in evaluation mode.
        preprocess: the settings that shaped the pixels they were trained on.
        prior: share of positive images, or breasts, in their training.
    """

    models: dict[int, torch.nn.Module]
    preprocess: PreprocessConfig
    prior: float

    @property
    def by_breast(self) -> bool:
        """Whether the models score a breast from all its images, and not each image by itself."""
        return next(iter(self.models.values())).config.views != "none"


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
        built[fold] = models.load_model(folder).to(device, memory_format=torch.channels_last)
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
    for name in ("weights", "drop_weights"):  # what training began from
        trained.pop(name, None)
    # Tuples as lists, which is what JSON made of them.
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
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

    A model that sees breasts gives its features of each image as it comes, and scores the breasts at the end, each from its
    images that have pixels. Until then the features are kept in memory: images x folds x channels x 4 bytes, 0.66 GB for
    32,000 images, 4 folds and 1,280 channels.

    Args:
        competition: its folder.
        run: a run's folder (see `runs.find_run`).
        config: batch size; threshold and aggregation come later, in `write_submission`.
        run_config: device, precision, processes, debug (the first few breasts alone are scored, the rest get the prior).

    Returns:
        `report.csv` as a frame, a row an image of test.csv in its order: prediction_id, patient_id, laterality, image_id,
        status (`ok`, `blank`, `failed` or `skipped`), score (mean over folds; the training prior where the status is not
        ok), seconds to decode, reason. Where the models see breasts, an image has the score of its breast whatever its own
        status is, and the prior stands where no image of the breast is ok.
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
    features = _Features(ensemble, len(table)) if ensemble.by_breast else None
    with tqdm(total=len(paths), desc="inference", unit="image", mininterval=1) as progress:

        def take(batch: dict) -> None:
            rows = wanted[batch["item"]]
            found = _outputs(ensemble, batch["image"], device, precision)
            score = _mean_probability(found) if features is None else features.keep(rows, found)
            for name, column in _columns(batch, score, ensemble.prior).items():
                report.loc[rows, name] = column
            progress.update(len(rows))

        read, shape = functools.partial(load_image, config=pixels), (pixels.height, pixels.width)
        for_each_batch(paths, read, shape, take, config.infer_batch_size, n_jobs)
    if features is not None:
        ok = (report["status"] == "ok").to_numpy()
        score = features.scores(table, ok, device)
        odd = ok & ~np.isfinite(score)
        report.loc[odd, ["status", "reason"]] = "failed", NOT_FINITE
        report["score"] = np.where(np.isfinite(score), score, ensemble.prior)
    return report[REPORT_COLUMNS]


@torch.no_grad()
def _outputs(ensemble: Ensemble, images: torch.Tensor, device: str, precision: str) -> list[torch.Tensor]:
    """What each fold's model makes of images, on the CPU: cancer logits (B,), or features (B, C) float32 for breasts."""
    images, found = images.to(device), []
    for model in ensemble.models.values():
        with autocast(device, precision):
            found.append(model.features(images) if ensemble.by_breast else model(images)["cancer"])
    return [output.float().cpu() for output in found]


def _mean_probability(logits: list[torch.Tensor]) -> np.ndarray:
    """The mean over folds, (B,) float64; sigmoid and mean are taken in full precision."""
    return torch.stack(logits).double().sigmoid().mean(0).numpy()


def _columns(batch: dict, score: np.ndarray, prior: float) -> dict[str, np.ndarray | list]:
    """The columns of a report for a batch: the training prior stands in where there are no pixels or no finite score."""
    status, reason = np.array(batch["status"], dtype=object), np.array(batch["reason"], dtype=object)
    odd = ~np.isfinite(score) & (status == "ok")
    status[odd], reason[odd] = "failed", NOT_FINITE
    score = np.where(status == "ok", score, prior)
    return {"status": status, "reason": reason, "seconds": batch["seconds"], "score": score}


class _Features:
    """Features of single images, kept until all images of a breast are there."""

    def __init__(self, ensemble: Ensemble, n_images: int) -> None:
        self.models, self.n_images = ensemble.models, n_images
        self.of_fold: list[torch.Tensor] = []  # (n_images, C) each

    def keep(self, rows: np.ndarray, found: list[torch.Tensor]) -> np.ndarray:
        """Takes features of the table's rows, and says of each image whether they are finite: 0, else NaN, (B,)."""
        if not self.of_fold:
            self.of_fold = [torch.zeros(self.n_images, features.shape[1]) for features in found]
        for kept, features in zip(self.of_fold, found, strict=True):
            kept[rows] = features
        finite = torch.stack([features.isfinite().all(1) for features in found]).all(0)
        return np.where(finite.numpy(), 0.0, np.nan)

    @torch.no_grad()
    def scores(self, table: pd.DataFrame, ok: np.ndarray, device: str) -> np.ndarray:
        """Each image's breast's score, (n_images,) float64, from those of its images that are `ok`; NaN where none is."""
        codes, _ = pd.factorize(table["breast_id"])
        members = data.grouped(codes)  # (breasts, views) rows of the table
        mask = torch.from_numpy((members >= 0) & ok[members])
        members = torch.from_numpy(members.clip(min=0))
        kinds = torch.from_numpy(view_ids(table["view"]))[members]
        logits = []
        for model, features in zip(self.models.values(), self.of_fold, strict=True):
            parts = zip(members.split(BREASTS), mask.split(BREASTS), kinds.split(BREASTS), strict=True)
            found = [model.classify(features[rows].to(device), there, kind)["cancer"] for rows, there, kind in parts]
            logits.append(torch.cat(found).float().cpu())
        scores = _mean_probability(logits)
        scores[~mask.any(1).numpy()] = np.nan
        return scores[codes]
