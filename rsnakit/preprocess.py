"""A whole competition to a store. One file to an image is in prepare.py, whose names this module has too."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import rsnakit
from rsnakit import dicom, env, store, workers
from rsnakit.fields import check_all
from rsnakit.files import Lock, LockedError
from rsnakit.headers import refuse_missing_decoders, scan_headers
from rsnakit.jobs import Job, JobError, failed_row, file_size, prepare_into_store, read_lock
from rsnakit.params import flags, setting
from rsnakit.prepare import BlankImage, Prepared, PreprocessConfig, load_image, prepare, status_of
from rsnakit.store_formats import are_there
from rsnakit.tables import with_png

__all__ = [
    "BlankImage", "BuildConfig", "Prepared", "PreprocessConfig", "build_store", "ensure_store", "estimate_bytes",
    "estimate_seconds", "format_difference", "load_image", "prepare", "sources", "status_of", "store_path",
]  # fmt: skip

INDEX_ROW_BYTES = 200  # a line of index.csv, rounded up
PNG_SHARE = {"png16": 0.7, "png8": 0.4}  # of the most that a PNG may take, so much or less is taken by mammograms
WAIT_S = 6 * 3600  # for another process to finish a store, which of a whole competition takes hours
POLL_S = 1.0
COMMIT_S = 1.0  # what is prepared is put on the disk so often; a kill costs no more than that


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """By which processes a store is made and from where. Nothing here changes a byte of it."""

    backend: str = setting("loky", choices=("loky", "dask"))  # processes of this machine, or of a Dask cluster
    address: str = ""  # of a Dask scheduler, tcp://host:8786
    png_dir: str = ""  # folder of the PNG images, where source is png; "": the competition's folder

    def __post_init__(self):
        check_all(self)
        if self.backend == "dask" and not self.address:
            raise ValueError("address: is empty, expected that of the Dask scheduler, such as tcp://host:8786")
        if self.backend != "dask" and self.address:
            raise ValueError(
                f"address: got {self.address!r} with backend {self.backend!r}, which has none; set backend to dask"
            )


def ensure_store(
    table: pd.DataFrame, config: PreprocessConfig, path: Path, run: env.RunConfig, build: bool
) -> store.Store:
    """The store at `path`, with every image of the table: opened, or where `build` says so made or completed.

    Where another process is making it, this one waits, says so, and goes on with what is there then.

    Raises:
        rsnakit.files.LockedError: another process is still making it after `WAIT_S`.
        rsnakit.store.StoreError: it was made with other settings, or it lacks images and `build` is False; the message
            has the command that makes it.
    """
    if build:
        return _build_in_turn(table, config, path, run)
    png = " -p png_dir FOLDER" if config.source == "png" else ""
    command = f"papermill 02_preprocess.ipynb out.ipynb {flags(run, config)}{png}"
    if not (path / "manifest.json").exists():
        raise store.StoreError(f"{path}: no image store for these settings yet. This makes it:\n  {command}")
    return _open_whole(table, config, path, run.store_format, f" yet. This goes on with it:\n  {command}")


def _build_in_turn(table: pd.DataFrame, config: PreprocessConfig, path: Path, run: env.RunConfig) -> store.Store:
    """What `build_store` gives, without its lock where nothing is to be done, and after its turn where that is taken."""
    table, give_up, said = sources(table, config, BuildConfig()), time.monotonic() + WAIT_S, False
    while not _is_whole(table, config, path, run.store_format):
        try:
            return build_store(table, config, path, run.n_jobs, run.store_format)
        except LockedError as error:
            if time.monotonic() > give_up:
                raise
            if not said:
                print(f"waiting, up to {WAIT_S / 3600:g} h: {error}", flush=True)
            said = True
            time.sleep(POLL_S)
    images = store.Store(path)
    _check_same_files(images.index, table, path)
    return images


def _is_whole(table: pd.DataFrame, config: PreprocessConfig, path: Path, image_format: str) -> bool:
    """Whether `build_store` would find nothing to do; StoreError for a store of other settings.

    An image without pixels is something to do: its file may have been put right.
    """
    if not (path / "manifest.json").exists():
        return False
    store.check_settings(store.read_manifest(path), {**dataclasses.asdict(config), "format": image_format}, path)
    index = store.read_index(path)
    ok = index[index["status"] == "ok"]
    return bool(
        table["image_id"].isin(ok["image_id"]).all()
        and are_there(path, image_format, (config.height, config.width), ok).all()
    )


def store_path(work: Path, competition: Path, config: PreprocessConfig, run: env.RunConfig) -> Path:
    """The folder of a competition's store: `run.store_dir`, or one in `work` named after the settings.

    Other settings make another store beside it.
    """
    if run.store_dir:
        return Path(run.store_dir).expanduser().absolute()
    digest = store.config_hash({**dataclasses.asdict(config), "format": run.store_format})
    return work / "stores" / f"{competition.name}-{config.height}x{config.width}-{digest[:8]}"


def estimate_bytes(n_images: int, config: PreprocessConfig, image_format: str = "block8") -> int:
    """Disk that a store of so many images takes, index included; of PNG files about."""
    image = store.record_bytes(image_format, (config.height, config.width)) * PNG_SHARE.get(image_format, 1)
    return math.ceil(n_images * (image + INDEX_ROW_BYTES))


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


def sources(table: pd.DataFrame, config: PreprocessConfig, build: BuildConfig) -> pd.DataFrame:
    """The table with the paths of what is prepared: as they are, or of the PNG files where those are the source.

    Raises:
        rsnakit.tables.TableError: none of the PNG files is there.
    """
    if config.source != "png" or all(Path(path).suffix.lower() == ".png" for path in table["path"]):
        return table
    return with_png(table, build.png_dir or Path(table["path"].iloc[0]).parents[2])  # the competition's folder


def build_store(
    table: pd.DataFrame,
    config: PreprocessConfig,
    out: Path | str,
    n_jobs: int = 0,
    image_format: str = "block8",
    build: BuildConfig | None = None,
    headers: pd.DataFrame | None = None,
) -> store.Store:
    """Prepares every image of a table into a store; goes on with one begun before, and past files that cannot be read.

    Args:
        table: a row an image: patient_id and image_id (strings) and path (the DICOM file), as `data.load_table` gives it.
        config: what shapes the pixels. A store made with another config is refused.
        out: the store's folder. Images it holds already are kept and not read again; those without pixels are tried again.
        n_jobs: processes; 0 means all cores. A Dask cluster uses all its workers, whatever this says.
        image_format: `block8`, 9 bits a pixel, `raw16`, exact, or a file an image: `png16`, exact, or `png8`.
        build: which processes do it; those of this machine if not given. On a cluster, all have to see `out` and the
            images under the same paths.
        headers: what `headers.scan_headers` says of these images, if that was asked before.

    Rows are given out in the table's order, so that neither processes nor a kill in between change a byte of the images.

    Returns:
        The store, with a row for every image of the table: status `ok`, `blank` or `failed` and the reason.

    Raises:
        rsnakit.store.StoreError: another config, or an image whose file has another size than the one stored.
        rsnakit.jobs.JobError: a process of the cluster does not see the store or the images.
        rsnakit.dicom.DicomError: no decoder for some of the images; found out before any work.
        OSError: the disk has no room (ENOSPC), found out before any work, or cannot be written to.
        rsnakit.files.LockedError: another process writes to this store.
        rsnakit.cluster.ClusterError: the cluster cannot be worked with.
    """
    out, build = Path(out).absolute(), build or BuildConfig()
    table = sources(table, config, build)
    if (out / "manifest.json").exists() and not os.access(out, os.W_OK):
        return _read_only(table, config, out, image_format)
    lacking = ~table["image_id"].isin(_stored_ids(store.read_index(out)))
    env.check_disk(out, estimate_bytes(int(lacking.sum()), config, image_format), f"store of {lacking.sum()} images")
    with Lock(out, f"store {out.name}"):
        versions = {"rsnakit": rsnakit.__version__, "pydicom": version("pydicom"), "numpy": np.__version__}
        shape = (config.height, config.width)
        done = store.open_for_writing(out, dataclasses.asdict(config), image_format, shape, versions)
        _check_same_files(done, table, out)
        if config.source == "dicom" and lacking.any():
            refuse_missing_decoders(scan_headers(table[lacking], n_jobs) if headers is None else headers, out)
        kept, row_of = _stored_ids(done), dict(zip(done["image_id"], done["row"].tolist(), strict=True))
        taken = set(row_of.values())
        free_rows = (row for row in itertools.count() if row not in taken)
        todo = [
            (row_of[image_id] if image_id in row_of else next(free_rows), patient_id, image_id, os.path.abspath(path))
            for patient_id, image_id, path in zip(table["patient_id"], table["image_id"], table["path"], strict=True)
            if image_id not in kept
        ]
        job = Job(str(out), config, image_format, read_lock(out), elsewhere=build.backend == "dask")
        work = functools.partial(prepare_into_store, job)
        results = workers.over_items(work, todo, n_jobs or env.cores(), build.backend, build.address)
        _collect(results, job, len(todo), len(table))
    images = store.Store(out)
    _refuse_no_pixels(images)
    return images


def _read_only(table: pd.DataFrame, config: PreprocessConfig, out: Path, image_format: str) -> store.Store:
    """A store that cannot be written to, such as a data set of Kaggle's: as it is, if nothing is missing."""
    what_to_do = ", and it cannot be written to. Give another store_dir."
    images = _open_whole(table, config, out, image_format, what_to_do)
    _check_same_files(images.index, table, out)
    return images


def _open_whole(
    table: pd.DataFrame, config: PreprocessConfig, path: Path, image_format: str, what_to_do: str
) -> store.Store:
    """A store made with these settings; StoreError for another, and with `what_to_do` for one that lacks images."""
    store.check_settings(store.read_manifest(path), {**dataclasses.asdict(config), "format": image_format}, path)
    images = store.Store(path)
    missing = int((~table["image_id"].isin(images.index["image_id"])).sum())
    if missing:
        raise store.StoreError(f"{path}: {missing} of {len(table)} images are not in it{what_to_do}")
    return images


def _refuse_no_pixels(images: store.Store) -> None:
    reasons = images.index["reason"].str.replace(r"^.*/", "", regex=True).value_counts()
    if len(images) and not (images.index["status"] == "ok").any():
        raise store.StoreError(
            f"{images.path}: not one of {len(images)} images could be prepared. {reasons.iloc[0]} times: {reasons.index[0]}"
        )


def _collect(results: Iterator[tuple[tuple, Any]], job: Job, todo: int, total: int) -> None:
    """Puts the rows of what processes have prepared into the index, and shows how it goes."""
    finished, committed, counts = [], time.monotonic(), {"failed": 0, "blank": 0}
    bar = tqdm(total=total, initial=total - todo, unit="image", desc="store", mininterval=1)
    with contextlib.closing(results), bar as progress:
        try:
            for item, row in results:
                row = failed_row(item, row) if isinstance(row, workers.ProcessDied) else row
                if job.elsewhere and row["source_bytes"] == 0 and file_size(item[3]) > 0:
                    raise JobError(
                        f"{item[3]}: is here, and a worker of the cluster does not find it ({row['reason']}): the images "
                        "must lie in a folder that all workers share, under the same path."
                    )
                finished.append(row)
                if time.monotonic() - committed > COMMIT_S:
                    store.append_index(Path(job.out), finished)
                    finished, committed = [], time.monotonic()
                if row["status"] in counts:
                    counts[row["status"]] += 1
                    progress.set_postfix(counts, refresh=False)
                progress.update()
        finally:
            if finished:
                store.append_index(Path(job.out), finished)


def _stored_ids(index: pd.DataFrame) -> set[str]:
    return set(index.loc[index["status"] == "ok", "image_id"])


def _check_same_files(done: pd.DataFrame, table: pd.DataFrame, out: Path) -> None:
    """Refuses a store that holds other images under the same ids: another competition's, most likely."""
    stored = done[done["status"] == "ok"]
    sizes = dict(zip(stored["image_id"], stored["source_bytes"], strict=True))
    for image_id, path in zip(table["image_id"], table["path"], strict=True):
        if image_id in sizes and (size := file_size(path)) not in (0, sizes[image_id]):
            raise store.StoreError(
                f"{out}: image {image_id} was stored from a file of {sizes[image_id]} bytes and {path} has {size}: this "
                "store was made from other files, another competition's most likely. Give another store_dir, or delete "
                "this one."
            )
