"""Runs and a competition to a submission: every breast of test.csv gets its row, whatever happens to its images.

What is written, and checked as the competition would, stands in `submission`; where breasts are cut, in `calling`; models and
devices in `ensemble`; the time there is in `budget`; what a restart goes on from in `ledger`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import rsnakit
from rsnakit import budget, data, env, metrics, runs
from rsnakit.batches import in_batches
from rsnakit.budget import Clock
from rsnakit.crew import in_line
from rsnakit.ensemble import TTA, Ensemble, Pass, Scorer, devices_of, levels, load_ensemble
from rsnakit.fields import check_all
from rsnakit.headers import refuse_missing_decoders, scan_headers
from rsnakit.ledger import Ledger
from rsnakit.params import setting
from rsnakit.preprocess import load_image
from rsnakit.scored import REPORT_COLUMNS, Scored
from rsnakit.stopping import Stop
from rsnakit.store import config_hash
from rsnakit.submission import SubmissionError, check_submission, shown, write_files, write_submission

__all__ = [
    "REPORT_COLUMNS", "Ensemble", "InferConfig", "SubmissionError", "check_submission", "load_ensemble", "predict",
    "refuse_other_settings", "shown", "write_files", "write_submission",
]  # fmt: skip

HEADERS = 100  # looked at before the work begins
MANY = 0.1  # share of failed images that is spoken of


@dataclasses.dataclass(frozen=True)
class InferConfig:
    """How a run's models are used on new images."""

    threshold: float | str = setting("auto", low=0.0, high=1.0, choices=("auto", "none", "percentile"))
    aggregate: str = setting("mean", choices=metrics.HOWS)  # of a breast's images
    infer_batch_size: int = setting(8, low=1, high=1024)  # images
    tta: str = setting(
        "none", choices=tuple(TTA)
    )  # flips that an image is shown in besides: hflip, vflip, diagonal, all
    infer_compile: str = setting("off", choices=("off", "default", "max-autotune"))

    def __post_init__(self):
        check_all(self)


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
    competition: Path | str,
    run: Path | str,
    config: InferConfig,
    run_config: env.RunConfig | None = None,
    folder: Path | str | None = None,
) -> pd.DataFrame:
    """Scores every image of a competition's test.csv with all folds of a run, and all flips that `tta` names.

    There is a time limit on Kaggle, or where `max_hours` sets one (see `budget.deadline`): where the images that remain would
    not fit, they are scored by fewer passes (a pass is one fold on one flip), and in the end get the prior. A model that sees
    breasts gives its features of each image as it comes, and scores the breasts at the end, each from its images that have
    pixels, by those passes that all of them have. Until then the features are kept in memory: images x passes x channels x 4
    bytes, 0.66 GB for 32,000 images, 4 passes and 1,280 channels. All else takes some hundred bytes an image.

    A device that fails is done without; an image that the models fail over is `failed`, unless they spare none, which is an
    error. While Kaggle scores a submission nothing but debug is one, once the table and one of the folds are read: what cannot
    be had (a fold, a device, breasts' scores) is left out, and that is said; the CPU goes on where no GPU is left; and what no
    score is to be had of gets the prior.

    Args:
        competition: its folder.
        run: a run's folder (see `runs.find_run`).
        config: flips, batch size, compilation; threshold and aggregation come later, in `write_submission`.
        run_config: device, precision, processes, hours, debug (the first few breasts alone are scored, the rest get the
            prior).
        folder: where scores are kept as they come, and gone on from (see `ledger`), features of breasts too, in a folder for
            each set of weights, images, flips, precision that was asked for, and version of the kit; None: nowhere. What
            was scored by fewer passes is scored again, once all others have been.

    Returns:
        `report.csv` as a frame, a row an image of test.csv in its order: prediction_id, patient_id, laterality, image_id,
        status (`ok`, `blank`, `failed` or `skipped`), score (mean of the passes' probabilities; the training prior where the
        status is not ok), score_of (`image` or `breast`), seconds to decode, reason: why there is no score, or why it is of
        fewer passes. Where the models see breasts, an image has the score of its breast whatever its own status is, and the
        prior stands where no image of the breast is ok.

    Raises:
        ValueError: debug, while Kaggle scores a submission.
        rsnakit.dicom.DicomError: no decoder is installed for some of the images; a sample of headers tells before any work.
        rsnakit.files.LockedError: another process keeps its scores in `folder`.
        KeyboardInterrupt: Ctrl-C; what was scored until then is in `folder`.
    """
    run, run_config = Path(run), run_config or env.RunConfig()
    rerun = env.is_rerun()
    if rerun and run_config.debug:
        raise ValueError(
            "debug=True scores a few breasts only, and Kaggle is scoring this submission, which would be worthless: set debug "
            "to False, and submit again"
        )
    until, said = budget.deadline(run_config.max_hours)
    table = data.load_table(competition, "test")
    if not rerun:  # then those that can be decoded are worth more than a stop
        refuse_missing_decoders(scan_headers(table, n_jobs=1, limit=HEADERS), competition)
    devices = devices_of(run_config.device)
    precision = env.choose_precision(devices[0], run_config.precision).value
    scorer = Scorer(run, devices, precision, config.infer_compile, config.infer_batch_size, keep_going=rerun)
    steps = levels(list(scorer.ensemble.models), config.tta)
    found = Scored(table, scorer.ensemble, steps[0])
    wanted = table["breast_id"].isin(table["breast_id"].unique()[:4]).to_numpy() if run_config.debug else None
    with Stop() as stop, _ledger(folder, run, scorer, found, config, run_config) as ledger:
        for record in ledger.records():
            found.put(record)
        asked_for = np.ones(len(table), bool) if wanted is None else wanted
        new = np.flatnonzero((found.status == "") & asked_for)
        poor = np.flatnonzero((found.status == "ok") & ~found.asked.all(1) & asked_for)
        _tell_what_is_left(found, new, poor, ledger)
        if said:
            print(f"time: {said}, of which {budget.in_words(max(0.0, until - time.monotonic()))} are left")
        cause = ""
        for rows in (new, poor):  # those that have no score come first, and the clock is theirs alone
            clock = _clock(until, steps, len(rows), scorer, run_config.n_jobs)
            args = clock, stop, found, ledger, run_config.n_jobs, config.infer_batch_size
            cause = cause or _go_through(scorer, rows, *args, keep_going=rerun)
        why_not = (stop.reason and f"stopped by {stop.reason}") or cause or f"no time was left of {said}"
        report = _report(scorer, found, why_not, wanted, keep_going=rerun)
    _tell_what_is_missing(report, int(((found.status == "") & asked_for).sum()), why_not, ledger)
    if stop.reason == "Ctrl-C":  # whoever asks for a stop wants no submission of priors from the cells that follow
        raise KeyboardInterrupt
    return report


def _tell_what_is_left(found: Scored, new: np.ndarray, poor: np.ndarray, ledger: Ledger) -> None:
    if before := int((found.status != "").sum()):
        again = f"; {len(poor):,} that were by fewer passes are scored again" if len(poor) else ""
        print(f"{before:,} of {len(found.table):,} images were scored before, {len(new):,} are left{again}")
    if ledger.folder is not None:
        print(f"scores are kept in {ledger.folder}, {ledger.size / 1e6:,.0f} MB at most")
        others = sorted(path.name for path in ledger.folder.parent.glob("*/") if path.name != ledger.folder.name)
        if others:
            print(f"beside them are those of other weights, flips or versions of the kit: {', '.join(others)}")


def _tell_what_is_missing(report: pd.DataFrame, unreached: int, why_not: str, ledger: Ledger) -> None:
    if unreached:
        kept = "" if ledger.folder is None else f"; the others are kept in {ledger.folder}, and the same call goes on"
        print(f"NOTE: {unreached:,} of {len(report):,} images were not scored: {why_not}{kept}")
    failed = report["status"] == "failed"
    if failed.mean() > MANY:
        image_id, reason = report.loc[failed, ["image_id", "reason"]].iloc[0]
        print(f"NOTE: {failed.sum():,} of {len(report):,} images failed, {image_id} for this reason: {reason}")


def _go_through(scorer: Scorer, left: np.ndarray, *args: object, keep_going: bool) -> str:
    """Scores the table's rows `left` as `_score`, which see. To keep going, what remains is begun anew after an error, as long
    as there is less of it each time; if there is not, the error is given back in a sentence."""
    found, todo = args[2], left
    while len(todo):
        try:
            _score(scorer, todo, *args)
            break
        except Exception as error:
            if not keep_going:
                raise
            traceback.print_exc()  # with what there is, the submission is worth more than nothing
            before, todo = todo, todo[found.status[todo] == ""]
            if len(todo) == len(before):
                return f"inference ended with an error: {in_line(error)}"
    return ""


def _report(scorer: Scorer, found: Scored, why_not: str, wanted: np.ndarray | None, keep_going: bool) -> pd.DataFrame:
    found.ensemble = scorer.ensemble  # on a device that has not failed
    try:
        return found.report(why_not, wanted)
    except Exception as error:
        if not keep_going:
            raise
        traceback.print_exc()
        print(f"NOTE: breasts are classified again, on the CPU ({in_line(error)})")
        found.ensemble = scorer.on_cpu
        return found.report(why_not, wanted, keep_going=True)


def _score(
    scorer: Scorer,
    left: np.ndarray,
    clock: Clock,
    stop: Stop,
    found: Scored,
    ledger: Ledger,
    n_jobs: int,
    batch_size: int,
) -> None:
    """Scores the table's rows `left`, until they are done, it is asked to stop, or the clock says so."""
    config = scorer.ensemble.preprocess
    n_jobs = min(n_jobs or env.cores(), len(left))

    def take(batch: dict, outputs: dict[Pass, np.ndarray], seconds: float) -> None:
        changes = len(clock.changes)
        clock.told(len(batch["item"]), len(outputs), seconds, sum(batch["seconds"]))
        for change in clock.changes[changes:]:
            progress.write(f"NOTE: {change.reason}")
        records = found.records(left[batch["item"]], batch, outputs)
        records = [each for each in records if found.improves(each)]
        for record in records:
            found.put(record)
        ledger.keep(records)
        progress.update(len(batch["item"]))

    def is_over() -> bool:
        return clock.over() or stop.asked()

    read, shape = functools.partial(load_image, config=config), (config.height, config.width)
    with tqdm(total=len(left), desc="inference", unit="image", mininterval=1) as progress:
        batches = in_batches(found.table["path"].iloc[left].tolist(), read, shape, batch_size, n_jobs, is_over)
        scorer.run(_until(batches, is_over), clock.passes, take)


def _until(batches: Iterator[dict], is_over: Callable[[], bool]) -> Iterator[dict]:
    """Batches as long as there is time to score another."""
    with contextlib.closing(batches):
        for batch in batches:
            if is_over():
                return
            yield batch


def _clock(until: float, steps: Sequence, n_images: int, scorer: Scorer, n_jobs: int) -> Clock:
    cores, model_cores = env.cores(), 1.0 if scorer.devices == ["cpu"] else 0.0
    return Clock(until, steps, n_images, n_jobs or cores, scorer.n_threads, cores, model_cores)


def _ledger(
    folder: Path | str | None, run: Path, scorer: Scorer, found: Scored, config: InferConfig, run_config: env.RunConfig
) -> Ledger:
    table, device = found.table, scorer.devices[0].split(":")[0]
    noted = {"precision": scorer.precision, "device": device, "compile": config.infer_compile, **runs.versions()}
    key = _key(run, table, scorer.ensemble, found.passes)
    if run_config.precision != "auto":
        key["precision"] = run_config.precision  # then it is what somebody wants to see
    if folder is not None:
        folder = Path(folder) / config_hash(key)[:8]
    return Ledger(folder, key, table["image_id"], table["path"], found.shape, noted)


def _key(run: Path, table: pd.DataFrame, ensemble: Ensemble, passes: Sequence[Pass]) -> dict:
    """What decides scores: by its content, so that a run that was copied or trained on is told from what it was."""
    weights, folders, code = {}, runs.trained_folds(run), hashlib.sha256()
    for fold, folder in ((fold, folders[fold]) for fold in ensemble.models):
        for name in ("best.safetensors", "model.json"):
            with open(folder / name, "rb") as file:
                weights[f"fold{fold}/{name}"] = hashlib.file_digest(file, "sha256").hexdigest()
    for path in sorted(Path(rsnakit.__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    ids = table[["patient_id", "laterality", "image_id"]].to_csv(index=False).encode()
    return {
        "code": code.hexdigest(),
        "weights": weights,
        "images": hashlib.sha256(ids).hexdigest(),
        "passes": [[each.fold, list(each.flips)] for each in passes],
        "preprocess": dataclasses.asdict(ensemble.preprocess),
    }
