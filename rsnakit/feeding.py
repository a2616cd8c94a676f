"""How fast stored images reach the model, by store format and number of loader processes.

What is timed is the training's own loader, augmentation included, over images that the page cache holds: how fast the disk
is that a whole store is read from, it does not say.
"""

import math
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch.utils.data import DataLoader, Sampler

from rsnakit import augment, data, device_memory, env, failures
from rsnakit.look import counted
from rsnakit.models import ModelConfig
from rsnakit.recipe import TrainConfig
from rsnakit.store import FORMATS, INDEX_COLUMNS, Store, append_index, open_for_writing, record_bytes, write_image
from rsnakit.trainer import make_loader, unit_of

COLUMNS = ("store_format", "workers", "images_s", "low", "high", "skipped")
SAMPLE, SAMPLE_BYTES = 64, 64e6  # images that are written again in each format, or so many that they take these bytes
ROUNDS = 3
HUNG_S = 60  # a loader that gives no batch for so long never will
AHEAD = 2  # batches that torch has a worker load ahead
NO_TIME = "not measured: no time was left for it"
IMAGES = ModelConfig()


def rates(
    images: pd.DataFrame,
    store: Store | Path | str,
    train_config: TrainConfig,
    formats: Sequence[str] = FORMATS,
    workers: Sequence[int] | None = None,
    seconds: float = 1.5,
    *,
    model_config: ModelConfig = IMAGES,
    device: str = "cpu",
    limit_s: float = math.inf,
) -> pd.DataFrame:
    """Images a second that the training loader gives to whom takes them at once, a row each format and number of workers.

    A sample of the store's images is written again in each format, into a temporary folder that is removed. A row's loader
    is alone; its rounds follow one another, once its workers have started and what they loaded ahead has been taken.

    Args:
        images: of the store, with pixels: `data.usable` or the training side.
        store: or its folder.
        train_config: batch_size, augment and seed of it.
        formats: of stores; tried in this order, each with all numbers of workers before the next.
        workers: numbers of loader processes, 0 for none; those of `worker_counts` if not given.
        seconds: that a row is measured for, all rounds together.
        model_config: views and aux of it; where its views are scored together, breasts are counted, not images.
        device: batches are pinned for a GPU, as training does.
        limit_s: seconds for all; rows that it does not suffice for say so.

    Returns:
        `store_format`, `workers`, `images_s` (the rounds' median), `low`, `high` (the slowest and the fastest round) and
        `skipped`, the reason where it was not measured.

    Raises:
        ValueError: there are no images, or no such format.
        rsnakit.store.StoreError: an image is not in the store.
    """
    end = time.monotonic() + limit_s
    workers = worker_counts() if workers is None else workers
    rows = []
    with tempfile.TemporaryDirectory(prefix="rsnakit-") as folder:
        sample = sampled(images, store, unit_of(model_config))
        for image_format in formats:
            late = rows and time.monotonic() > end
            found = NO_TIME if late else _written(sample, store, image_format, Path(folder) / image_format)
            for count in workers:
                rate, skipped = (), found
                if isinstance(found, Store):
                    rate, skipped = _timed(
                        sample, found, train_config, model_config, count, device, seconds, end if rows else math.inf
                    )
                low, middle, high = (f(rate) if rate else math.nan for f in (min, statistics.median, max))
                rows.append((image_format, count, middle, low, high, skipped))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def worker_counts(cores: int | None = None) -> tuple[int, ...]:
    """Numbers of loader processes that are worth trying: 0, powers of two up to the cores, and all cores."""
    cores = env.cores() if cores is None else cores
    return tuple(sorted({0, *(2**k for k in range(cores.bit_length())), cores}))


def loader_name(store_format: str, workers: int) -> str:
    """A loader in words."""
    return f"{store_format}, {counted(workers, 'worker')}"


def size_ratio(image_format: str, than: str, shape: tuple[int, int]) -> float:
    """How many times as large a store of a format is as one of another; PNG files count as large as they may become."""
    return record_bytes(image_format, shape) / record_bytes(than, shape)


def no_room(store: Store, image_format: str) -> str:
    """Why a store of all images in another format would be no faster than a sample of it is, or nothing: it has no room on the
    disk, beside the one there is, or does not stay in memory, so that the disk decides."""
    size, free = len(store) * record_bytes(image_format, store.shape), shutil.disk_usage(store.path).free
    if size > free:
        return f"{image_format} needs {size / 1e9:.2g} GB of disk, and {free / 1e9:.2g} are free"
    there = device_memory.available()
    if size > there and size_ratio(image_format, store.manifest["format"], store.shape) > 1:
        room = f"more than stay in memory ({there / 1e9:.2g})"
        return f"{image_format} takes {size / 1e9:.2g} GB, {room}, and how fast the disk is was not measured"
    return ""


def loader(
    images: pd.DataFrame, store: Store, train_config: TrainConfig, model_config: ModelConfig, workers: int, device: str
) -> DataLoader:
    """The training loader over a table's images, in an order without end; how often cancers come decides no speed."""
    transform, unit = augment.build(train_config.augment, *store.shape), unit_of(model_config)
    dataset = data.MammogramDataset(images, store, transform, unit, train_config.seed, model_config.aux, draw=True)
    batches = _Endless(len(dataset), train_config.batch_size)
    return make_loader(dataset, batches, workers, device, HUNG_S if workers else 0)


def sampled(images: pd.DataFrame, store: Store | Path | str, unit: str = "image") -> pd.DataFrame:
    """Some of a table's images, whole breasts of them where the unit is `breast`, in the table's order, one of each class among
    them where there are both; as many as `SAMPLE` and `SAMPLE_BYTES` allow."""
    if not len(images):
        raise ValueError("there are no images to load")
    store = store if isinstance(store, Store) else Store(store)
    count = int(min(SAMPLE, max(8, SAMPLE_BYTES // record_bytes("raw16", store.shape))))
    shuffled = images.sample(frac=1, random_state=0)
    keys = shuffled["breast_id"] if unit == "breast" else pd.Series(shuffled.index, shuffled.index)
    first = shuffled["cancer"].drop_duplicates().index if "cancer" in shuffled else shuffled.index[:0]
    order = pd.unique(pd.concat([keys[first], keys]))
    sizes = keys.value_counts()[order].cumsum()
    kept = set(order[: max(1, len(first), int((sizes <= count).sum()))])
    return images[keys.isin(kept).reindex(images.index)].reset_index(drop=True)


def repeated(images: pd.DataFrame, times: int) -> pd.DataFrame:
    """A table several times over, with other breasts each time, for epochs that are longer than a sample."""
    copies = [images.assign(breast_id=images["breast_id"].astype(str) + f"~{k}") for k in range(times)]
    return pd.concat(copies, ignore_index=True)


def written(sample: pd.DataFrame, store: Store | Path | str, image_format: str, folder: Path) -> Store:
    """A table's images of a store, in a new one of another format.

    Raises:
        ValueError: there is no such format, or an id can be no file's name, as PNG stores want.
        OSError: as of a full disk.
    """
    store = store if isinstance(store, Store) else Store(store)
    of_source = store.rows_of(sample["image_id"])
    index = store.index.iloc[of_source].reset_index(drop=True)
    open_for_writing(folder, store.manifest["preprocess"], image_format, store.shape, {"numpy": np.__version__})
    for row, (source, line) in enumerate(zip(of_source, index.itertuples(), strict=True)):
        write_image(folder, image_format, row, line.patient_id, line.image_id, store[int(source)])
    append_index(folder, index.assign(row=range(len(index)))[list(INDEX_COLUMNS)].to_dict("records"))
    return Store(folder)


def why(error: Exception) -> str:
    """What a loader failed of, in a sentence: a worker's own error, or its death, where only a consequence reached us."""
    cause = failures.death_of_worker(error) or error
    own = str(cause).strip().splitlines()[-1:] if "Original Traceback" in str(cause) else []
    return own[0] if own and failures.what_ran_out(cause) is None else device_memory.in_words(cause)


def _written(sample: pd.DataFrame, store: Store | Path | str, image_format: str, folder: Path) -> Store | str:
    """The store, or why there is none."""
    if image_format not in FORMATS:
        raise ValueError(f"store format {image_format!r}: expected one of {', '.join(FORMATS)}")
    try:
        return written(sample, store, image_format, folder)
    except (OSError, ValueError) as error:
        return f"cannot be written: {device_memory.in_words(error)}"


def _timed(
    images: pd.DataFrame,
    store: Store,
    train_config: TrainConfig,
    model_config: ModelConfig,
    workers: int,
    device: str,
    seconds: float,
    end: float,
) -> tuple[tuple[float, ...], str]:
    """Images a second of each round, and why there are none."""
    if time.monotonic() > end:
        return (), NO_TIME
    views = 1 if unit_of(model_config) == "image" else 2
    ahead = AHEAD * workers * train_config.batch_size * views * math.prod(store.shape) * np.dtype(np.float32).itemsize
    if ahead > (there := device_memory.available()):  # the system would kill something to have it
        return (), f"batches that are loaded ahead would take {ahead / 1e9:.2g} GB, and {there / 1e9:.2g} are free"
    rounds, batches = [], None
    try:
        batches = iter(loader(images, store, train_config, model_config, workers, device))
        for _ in range(AHEAD * workers + 1):
            next(batches)
        for _ in range(ROUNDS):
            begun, count, taken = time.perf_counter(), 0, 0
            while taken < max(1, workers) or time.perf_counter() - begun < seconds / ROUNDS:
                count, taken = count + len(next(batches)["item"]), taken + 1
            rounds.append(count / (time.perf_counter() - begun))
    except Exception as error:  # whatever a decoder, a dying worker or a lack of memory raises
        return (), why(error)
    except BaseException as error:  # Ctrl-C, of which a notebook keeps the frames, and with them the workers
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        del batches  # and so its workers
    return tuple(rounds), ""


class _Endless(Sampler[list[tuple[int, int, int]]]):
    """Batches of items in random order, without end, as (number, epoch, position)."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count, self.batch_size = count, batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        rng, position = np.random.default_rng(0), 0
        while True:
            rows = rng.integers(self.count, size=self.batch_size).tolist()
            yield [(row, 0, position + place) for place, row in enumerate(rows)]
            position += self.batch_size
