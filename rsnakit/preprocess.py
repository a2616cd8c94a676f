"""One file to a cropped, resized image, and a whole competition to a store.

`load_image` is the one way from a DICOM file to pixels: training, inference and the notebooks all go through it.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import rsnakit
from rsnakit import dicom, env, store, workers
from rsnakit.crop import breast_is_right, find_breast
from rsnakit.files import Lock
from rsnakit.params import flags, setting

INDEX_ROW_BYTES = 200  # a line of index.csv, rounded up
COMMIT_S = 1.0  # what is prepared is put on the disk so often; a kill costs no more than that
MAX_VALUE = 4095  # prepared images carry 12 significant bits, as mammography detectors mostly do


@dataclasses.dataclass(frozen=True)
class PreprocessConfig:
    """What shapes pixels, and nothing else: it is hashed into the store and travels with the weights."""

    height: int = setting(256, low=16, high=4096)  # pixels; enough for the demo, real mammograms want 1024 and more
    width: int = setting(128, low=16, high=4096)  # pixels; a breast is about twice as high as it is wide
    window: str = setting("first", choices=("first", "none"))  # the header's first VOI LUT or window, or min-max
    crop: bool = setting(True)  # to the breast; False keeps the whole frame
    crop_margin: float = setting(0.02, low=0.0, high=0.5)  # left around the breast, as a share of its box


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared image and how it came about.

    Attributes:
        image: (height, width) uint16 in 0..4095, the breast at the left edge, padded with 0.
        box: (top, left, bottom, right), the crop in pixels of the source frame as it is stored, before any turn.
        flipped: whether it was mirrored to bring the breast to the left.
        source_shape: (height, width) of the source frame.
    """

    image: np.ndarray
    box: tuple[int, int, int, int]
    flipped: bool
    source_shape: tuple[int, int]


class BlankImage(dicom.DicomError):
    """A file that decodes to nothing to be seen; it must not pass for a healthy breast."""


def status_of(error: Exception) -> tuple[str, str]:
    """What a table says of an image that could not be prepared: `blank` or `failed`, and the cause in one line."""
    cause = error.cause if isinstance(error, dicom.DicomError) else f"{type(error).__name__}: {error}"
    return "blank" if isinstance(error, BlankImage) else "failed", " ".join(cause.split())


def load_image(path: Path | str, config: PreprocessConfig) -> np.ndarray:
    """A DICOM file as (height, width) uint16 with 12 significant bits; see `prepare` for how and what is raised."""
    return prepare(path, config).image


def prepare(path: Path | str, config: PreprocessConfig) -> Prepared:
    """Reads a DICOM file, applies its window once, crops to the breast, turns it to the left, fits and pads.

    Raises:
        BlankImage: nearly all pixels have the same value, or get the same shade from the header's window.
        rsnakit.dicom.DicomError: the file cannot be read; it names file and cause.
    """
    stored = dicom.read_stored(path)
    if dicom.is_blank(stored.pixels):
        raise BlankImage(path, f"blank image: nearly every stored value is {int(np.median(stored.pixels))}")
    display = dicom.to_display(stored, config.window)
    if dicom.is_blank(display[::4, ::4]):
        raise BlankImage(path, f"blank image: its window leaves nearly every pixel at shade {np.median(display):.2f}")
    return prepare_display(display, config)


def prepare_display(display: np.ndarray, config: PreprocessConfig) -> Prepared:
    """The part of `prepare` after decoding: from display values, (H, W) float32 in [0, 1], to a prepared image."""
    height, width = display.shape
    flipped = breast_is_right(display)
    if flipped:
        display = np.ascontiguousarray(display[:, ::-1])
    box = (0, 0, height, width)
    if config.crop:
        box = _with_margin(find_breast(display), config.crop_margin, display.shape)
    top, left, bottom, right = box
    image = fit_and_pad(display[top:bottom, left:right], config.height, config.width)
    image = np.rint(image * MAX_VALUE).astype(np.uint16)
    if flipped:
        left, right = width - right, width - left
    return Prepared(image, (top, left, bottom, right), flipped, (height, width))


def fit_and_pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes (H, W) to fit into (height, width) with its aspect kept; padded with 0 at the right, and above and below."""
    scale = min(height / image.shape[0], width / image.shape[1])
    inner = (max(1, min(height, round(image.shape[0] * scale))), max(1, min(width, round(image.shape[1] * scale))))
    # Area averaging is the one that neither aliases nor rings when shrinking; enlarging it would show its pixels.
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    resized = cv2.resize(image, (inner[1], inner[0]), interpolation=method)
    padded = np.zeros((height, width), image.dtype)
    top = (height - inner[0]) // 2
    padded[top : top + inner[0], : inner[1]] = resized
    return padded


def _with_margin(box: tuple[int, int, int, int], margin: float, shape: tuple[int, int]) -> tuple[int, int, int, int]:
    top, left, bottom, right = box
    y, x = round((bottom - top) * margin), round((right - left) * margin)
    return max(0, top - y), max(0, left - x), min(shape[0], bottom + y), min(shape[1], right + x)


def ensure_store(
    table: pd.DataFrame, config: PreprocessConfig, path: Path, run: env.RunConfig, build: bool
) -> store.Store:
    """The store at `path`, with every image of the table: opened, or where `build` says so made or completed.

    Raises:
        rsnakit.store.StoreError: it was made with other settings, or it lacks images and `build` is False; the message
            has the command that makes it.
    """
    if build:
        return build_store(table, config, path, run.n_jobs, run.store_format)
    command = f"papermill 02_preprocess.ipynb out.ipynb {flags(run, config)}"
    if not (path / "manifest.json").exists():
        raise store.StoreError(f"{path}: no image store for these settings yet. This makes it:\n  {command}")
    store.check_settings(store.read_manifest(path), {**dataclasses.asdict(config), "format": run.store_format}, path)
    opened = store.Store(path)
    missing = ~table["image_id"].isin(opened.index["image_id"])
    if missing.any():
        raise store.StoreError(
            f"{path}: {int(missing.sum())} of {len(table)} images are not in it yet. This goes on with it:\n  {command}"
        )
    return opened


def store_path(work: Path, competition: Path, config: PreprocessConfig, run: env.RunConfig) -> Path:
    """The folder of a competition's store: `run.store_dir`, or one in `work` named after the settings.

    Other settings make another store beside it.
    """
    if run.store_dir:
        return Path(run.store_dir).expanduser().absolute()
    digest = store.config_hash({**dataclasses.asdict(config), "format": run.store_format})
    return work / "stores" / f"{competition.name}-{config.height}x{config.width}-{digest[:8]}"


def estimate_bytes(n_images: int, config: PreprocessConfig, image_format: str = "block8") -> int:
    """Disk that a store of so many images takes, index included."""
    return n_images * (store.record_bytes(image_format, (config.height, config.width)) + INDEX_ROW_BYTES)


def estimate_seconds(table: pd.DataFrame, config: PreprocessConfig, n: int = 8) -> float:
    """Seconds that preparing an image takes in one process: the mean over `n` of the table's that can be read."""
    begun, done = time.perf_counter(), 0
    for path in table["path"].sample(min(n, len(table)), random_state=0):
        with contextlib.suppress(dicom.DicomError):
            prepare(path, config)
            done += 1
    return (time.perf_counter() - begun) / done if done else float("nan")


def format_difference(paths: Iterable[Path], config: PreprocessConfig) -> pd.DataFrame:
    """What a store's `block8` does to prepared images, a row an image: share of exact pixels, largest and mean error in
    the 4,096 levels of 12 bits, and bits a pixel."""
    rows = {}
    for path in paths:
        image = load_image(path, config)
        record = store.encode_record(image, "block8")
        back = store.decode_record(np.frombuffer(record, np.uint8), "block8", image.shape)
        error = np.abs(back.astype(np.int32) - image)
        rows[Path(path).stem] = {
            "exact pixels, %": 100 * (error == 0).mean(),
            "largest error": error.max(),
            "mean error": error.mean(),
            "bits a pixel": 8 * len(record) / image.size,
        }
    return pd.DataFrame(rows).T.round(3)


def build_store(
    table: pd.DataFrame,
    config: PreprocessConfig,
    out: Path | str,
    n_jobs: int = 0,
    image_format: str = "block8",
) -> store.Store:
    """Prepares every image of a table into a store; goes on with one begun before, and past files that cannot be read.

    Args:
        table: a row an image: patient_id and image_id (strings) and path (the DICOM file), as `data.load_table` gives it.
        config: what shapes the pixels. A store made with another config is refused.
        out: the store's folder. Images it holds already are kept and not read again; those without pixels are tried again.
        n_jobs: processes; 0 means all cores.
        image_format: `block8`, 9 bits a pixel, or `raw16`, exact.

    Rows are given out in the table's order, so that neither `n_jobs` nor a kill in between changes a byte of images.bin.

    Returns:
        The store, with a row for every image of the table: status `ok`, `blank` or `failed` and the reason.

    Raises:
        rsnakit.store.StoreError: another config, or an image whose file has another size than the one stored.
        OSError: the disk has no room (ENOSPC); found out before any work.
        rsnakit.files.LockedError: another process writes to this store.
    """
    out = Path(out)
    lacking = ~table["image_id"].isin(_stored_ids(store.read_index(out)))
    env.check_disk(out, estimate_bytes(int(lacking.sum()), config, image_format), f"store of {lacking.sum()} images")
    with Lock(out, f"store {out.name}"):
        versions = {"rsnakit": rsnakit.__version__, "pydicom": version("pydicom"), "numpy": np.__version__}
        shape = (config.height, config.width)
        done = store.open_for_writing(out, dataclasses.asdict(config), image_format, shape, versions)
        _check_same_files(done, table, out)
        kept, row_of = _stored_ids(done), dict(zip(done["image_id"], done["row"], strict=True))
        taken = set(row_of.values())
        free_rows = (row for row in itertools.count() if row not in taken)
        todo = [
            (row_of[image_id] if image_id in row_of else next(free_rows), patient_id, image_id, path)
            for patient_id, image_id, path in zip(table["patient_id"], table["image_id"], table["path"], strict=True)
            if image_id not in kept
        ]
        _fill(todo, config, out, n_jobs or env.cores(), image_format)
    return store.Store(out)


def _fill(todo: list[tuple], config: PreprocessConfig, out: Path, n_jobs: int, image_format: str) -> None:
    """Prepares (row, patient_id, image_id, path) each into the store. Processes prepare, and this one alone writes."""
    results = workers.over_items(functools.partial(_prepare_row, config, image_format), todo, n_jobs)
    finished, committed, failures = [], time.monotonic(), 0
    with contextlib.closing(results), tqdm(total=len(todo), unit="image", desc="store", mininterval=1) as progress:
        try:
            for item, result in results:
                died = isinstance(result, workers.ProcessDied)
                row, record = _failed_row(item, result) if died else result
                if record is not None:
                    store.write_record(out, row["row"], record)
                finished.append(row)
                if time.monotonic() - committed > COMMIT_S:
                    store.append_index(out, finished)
                    finished, committed = [], time.monotonic()
                failures += record is None
                progress.set_postfix(not_ok=failures, refresh=False)
                progress.update()
        finally:
            if finished:
                store.append_index(out, finished)


def _prepare_row(config: PreprocessConfig, image_format: str, item: tuple) -> tuple[dict, bytes | None]:
    """Prepares one file: its row of the index, and its record where it has one."""
    row, patient_id, image_id, path = item
    begun = time.perf_counter()
    try:
        prepared = prepare(path, config)
    except Exception as error:  # whatever one file does, the others go on
        return _failed_row(item, error, time.perf_counter() - begun)
    record = store.encode_record(prepared.image, image_format)
    names = ("top", "left", "bottom", "right", "source_height", "source_width")
    numbers = dict(zip(names, (*prepared.box, *prepared.source_shape), strict=True))
    found = {"row": row, "patient_id": patient_id, "image_id": image_id, "status": "ok", "reason": "", **numbers}
    seconds = round(time.perf_counter() - begun, 4)
    return {**found, "flipped": prepared.flipped, "source_bytes": _size(path), "seconds": seconds}, record


def _failed_row(item: tuple, error: Exception, seconds: float = 0.0) -> tuple[dict, None]:
    row, patient_id, image_id, path = item
    status, reason = status_of(error)
    logging.getLogger(__name__).info("%s: %s", path, reason)
    found = {"row": row, "patient_id": patient_id, "image_id": image_id, "status": status, "reason": reason}
    empty = dict.fromkeys(("source_height", "source_width", "top", "left", "bottom", "right"), 0)
    return {**found, **empty, "flipped": False, "source_bytes": _size(path), "seconds": round(seconds, 4)}, None


def _size(path: Path | str) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _stored_ids(index: pd.DataFrame) -> set[str]:
    return set(index.loc[index["status"] == "ok", "image_id"])


def _check_same_files(done: pd.DataFrame, table: pd.DataFrame, out: Path) -> None:
    """Refuses a store that holds other images under the same ids: another competition's, most likely."""
    stored = done[done["status"] == "ok"]
    sizes = dict(zip(stored["image_id"], stored["source_bytes"], strict=True))
    for image_id, path in zip(table["image_id"], table["path"], strict=True):
        if image_id in sizes and (size := _size(path)) not in (0, sizes[image_id]):
            raise store.StoreError(
                f"{out}: image {image_id} was stored from a file of {sizes[image_id]} bytes and {path} has {size}: this "
                "store was made from other files, another competition's most likely. Give another store_dir, or delete "
                "this one."
            )
