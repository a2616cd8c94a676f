"""One file to a cropped, resized image, and a whole competition to a store.

`load_image` is the one way from a DICOM file to pixels: training, inference and the notebooks all go through it.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import joblib
import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import rsnakit
from rsnakit import dicom, env, store
from rsnakit.crop import breast_is_right, find_breast
from rsnakit.files import Lock
from rsnakit.params import setting

INDEX_ROW_BYTES = 200  # a line of index.csv, rounded up
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


def load_image(path: Path | str, config: PreprocessConfig) -> np.ndarray:
    """A DICOM file as (height, width) uint16 with 12 significant bits; see `prepare` for how and what is raised."""
    return prepare(path, config).image


def prepare(path: Path | str, config: PreprocessConfig) -> Prepared:
    """Reads a DICOM file, applies its window once, crops to the breast, turns it to the left, fits and pads.

    Raises:
        BlankImage: every pixel has the same value.
        rsnakit.dicom.DicomError: the file cannot be read; it names file and cause.
    """
    stored = dicom.read_stored(path)
    if dicom.is_blank(stored.pixels):
        raise BlankImage(path, f"blank image: nearly every stored value is {int(np.median(stored.pixels))}")
    return prepare_display(dicom.to_display(stored, config.window), config)


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
    table: pd.DataFrame, config: PreprocessConfig, path: Path, n_jobs: int, image_format: str, build: bool
) -> store.Store:
    """The store at `path`, with every image of the table: opened, or where `build` says so made or completed.

    Raises:
        rsnakit.store.StoreError: it was made with other settings, or it lacks images and `build` is False; the message
            has the command that makes it.
    """
    if build:
        return build_store(table, config, path, n_jobs, image_format)
    settings = " ".join(f"-p {name} {value}" for name, value in dataclasses.asdict(config).items())
    command = f"papermill 02_preprocess.ipynb out.ipynb {settings} -p store_format {image_format}"
    if not (path / "manifest.json").exists():
        raise store.StoreError(f"{path}: no image store for these settings yet. This makes it:\n  {command}")
    store.check_settings(store.read_manifest(path), {**dataclasses.asdict(config), "format": image_format}, path)
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
        out: the store's folder. Images it holds already are kept and not read again; those that failed are tried again.
        n_jobs: processes; 0 means all cores.
        image_format: `block8`, 9 bits a pixel, or `raw16`, exact.

    Returns:
        The store, with a row for every image of the table: status `ok`, `blank` or `failed` and the reason.

    Raises:
        rsnakit.store.StoreError: another config, or an image whose file has another size than the one stored.
        OSError: the disk has no room (ENOSPC); found out before any work.
        rsnakit.files.LockedError: another process writes to this store.
    """
    out = Path(out)
    shape = (config.height, config.width)
    with Lock(out, f"store {out.name}"):
        versions = {"rsnakit": rsnakit.__version__, "pydicom": _version("pydicom"), "numpy": np.__version__}
        done = store.open_for_writing(out, dataclasses.asdict(config), image_format, shape, versions)
        _check_same_files(done, table, out)
        rows = dict(zip(done["image_id"], done["row"], strict=True))
        kept = set(done.loc[done["status"] != "failed", "image_id"])
        next_row = itertools.count(int(done["row"].max()) + 1 if len(done) else 0)
        todo = [
            (rows[image_id] if image_id in rows else next(next_row), patient_id, image_id, path)
            for patient_id, image_id, path in zip(table["patient_id"], table["image_id"], table["path"], strict=True)
            if image_id not in kept
        ]
        env.check_disk(out, estimate_bytes(len(todo), config, image_format), f"store of {len(todo)} images")
        _run(todo, config, out, n_jobs or env.cores(), image_format)
    return store.Store(out)


def _run(todo: list[tuple], config: PreprocessConfig, out: Path, n_jobs: int, image_format: str) -> None:
    failures = 0
    progress = tqdm(
        _results(todo, config, out, n_jobs, image_format), total=len(todo), unit="image", desc="store", mininterval=1
    )
    for result in progress:
        store.append_index(out, [result])
        failures += result["status"] != "ok"
        progress.set_postfix(not_ok=failures, refresh=False)


def _results(todo: list[tuple], config: PreprocessConfig, out: Path, n_jobs: int, image_format: str) -> Iterator[dict]:
    if n_jobs == 1 or len(todo) < 8:  # starting processes takes longer than a few images
        yield from (_prepare_into(out, *item, config, image_format) for item in todo)
        return
    chunks = [todo[i : i + 4] for i in range(0, len(todo), 4)]
    parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered", pre_dispatch="3*n_jobs")
    for results in parallel(joblib.delayed(_prepare_chunk)(out, chunk, config, image_format) for chunk in chunks):
        yield from results


def _prepare_chunk(out: Path, chunk: list[tuple], config: PreprocessConfig, image_format: str) -> list[dict]:
    cv2.setNumThreads(1)  # the processes are the parallelism
    return [_prepare_into(out, *item, config, image_format) for item in chunk]


def _prepare_into(
    out: Path, row: int, patient_id: str, image_id: str, path: Path, config: PreprocessConfig, image_format: str
) -> dict:
    """Prepares one file into its record, and says in a row of the index how that went."""
    begun = time.perf_counter()
    result = {
        "row": row,
        "patient_id": patient_id,
        "image_id": image_id,
        "status": "ok",
        "reason": "",
        "flipped": False,
    }
    result |= {"source_height": 0, "source_width": 0, "top": 0, "left": 0, "bottom": 0, "right": 0}
    try:
        result["source_bytes"] = os.path.getsize(path) if os.path.exists(path) else 0
        prepared = prepare(path, config)
        store.write_record(out, row, store.encode_record(prepared.image, image_format))
        result["source_height"], result["source_width"] = prepared.source_shape
        result["top"], result["left"], result["bottom"], result["right"] = prepared.box
        result["flipped"] = prepared.flipped
    except dicom.DicomError as error:
        result["status"] = "blank" if isinstance(error, BlankImage) else "failed"
        result["reason"] = " ".join(str(error).split())  # one line, for the index
        logging.getLogger(__name__).info("%s", error)
    result["seconds"] = round(time.perf_counter() - begun, 4)
    return result


def _check_same_files(done: pd.DataFrame, table: pd.DataFrame, out: Path) -> None:
    """Refuses a store that holds other images under the same ids: another competition's, most likely."""
    sizes = dict(zip(done["image_id"], done["source_bytes"], strict=True))
    for image_id, path in zip(table["image_id"], table["path"], strict=True):
        size = sizes.get(image_id, 0)
        if size and os.path.exists(path) and os.path.getsize(path) != size:
            raise store.StoreError(
                f"{out}: image {image_id} was stored from a file of {size} bytes and {path} has {os.path.getsize(path)}: "
                "this store belongs to another competition. Give another store_dir, or delete this one."
            )


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
