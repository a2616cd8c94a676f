"""One image of a long job: prepared and written into the store by whichever process it falls to, of this machine or not.

It imports little: every process that is started has to.
"""

import hashlib
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rsnakit.prepare import BlankImage, PreprocessConfig, prepare, status_of
from rsnakit.store_formats import write_image


class JobError(RuntimeError):
    """A process that cannot go on with its job; the message says why and what to do."""


@dataclass(frozen=True)
class Job:
    """What all images of a job have in common; it travels to the processes.

    Attributes:
        out: the store's folder, an absolute path.
        config: what shapes the pixels.
        image_format: of the store.
        lock: the text of the store's lock while the job runs, as `read_lock` gives it.
        elsewhere: whether other machines write, so that a record is only told of once it has left them.
    """

    out: str
    config: PreprocessConfig
    image_format: str
    lock: str
    elsewhere: bool = False


def read_lock(out: Path | str) -> str:
    """What the lock of a store says, "" where there is none."""
    try:
        return Path(out, "lock.json").read_text(encoding="utf-8")
    except OSError:
        return ""


def prepare_into_store(job: Job, item: tuple[int, str, str, str]) -> dict:
    """Prepares one file and writes its image; it counts once its row is in the index.

    Args:
        item: row in the store, patient_id, image_id, path.

    Returns:
        Its row of the index. A file that cannot be read is `failed`, whatever it does.

    Raises:
        JobError: the job is over, or its store is not seen from here.
        OSError: the store cannot be written to.
    """
    row, patient_id, image_id, path = item
    _check_lock(job)
    begun = time.perf_counter()
    try:
        prepared = prepare(path, job.config)
        if not prepared.image.any():
            raise BlankImage(path, "blank image: nothing of it is left at this size")
    except Exception as error:  # whatever one file does, the others go on
        return failed_row(item, error, time.perf_counter() - begun)
    _check_lock(job)
    try:
        write_image(Path(job.out), job.image_format, row, patient_id, image_id, prepared.image, sync=job.elsewhere)
    except ValueError as error:  # an id that is no file's name
        return failed_row(item, error, time.perf_counter() - begun)
    except OSError as error:
        message = f"{job.out}: image {image_id} could not be written ({error.strerror}); what was done before is kept"
        raise OSError(error.errno, message) from error
    names = ("top", "left", "bottom", "right", "source_height", "source_width")
    numbers = dict(zip(names, (*prepared.box, *prepared.source_shape), strict=True))
    found = {
        "row": row,
        "patient_id": patient_id,
        "image_id": image_id,
        "status": "ok",
        "reason": "; ".join(prepared.notes),
    }
    more = {"flipped": prepared.flipped, "source_bytes": file_size(path), "content": content_hash(prepared.image)}
    return {**found, **numbers, **more, "seconds": round(time.perf_counter() - begun, 4)}


def content_hash(image: np.ndarray) -> str:
    """16 hex digits of an image (H, W) uint16 that another one has by chance alone: among a million images once in 37 million
    such sets. Equal pixels give equal digits, whatever files they came from and whatever the store's format."""
    return hashlib.blake2b(np.ascontiguousarray(image, "<u2").tobytes(), digest_size=8).hexdigest()


def failed_row(item: tuple[int, str, str, str], error: Exception, seconds: float = 0.0) -> dict:
    """The row of the index for a file that gave no image."""
    row, patient_id, image_id, path = item
    status, reason = status_of(error)
    logging.getLogger(__name__).info("%s: %s", path, reason)
    found = {"row": row, "patient_id": patient_id, "image_id": image_id, "status": status, "reason": reason}
    empty = dict.fromkeys(("source_height", "source_width", "top", "left", "bottom", "right"), 0)
    more = {"flipped": False, "source_bytes": file_size(path), "content": ""}
    return {**found, **empty, **more, "seconds": round(seconds, 4)}


def file_size(path: Path | str) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _check_lock(job: Job) -> None:
    """Refuses to go on for a job that is over: the next one may have given the row to another image."""
    if read_lock(job.out) != job.lock:
        raise JobError(
            f"{job.out}: {socket.gethostname()} does not find there the lock of the job that it works for. Either the job "
            "has ended, or the folder is not the same one everywhere: a cluster needs a folder that all its workers share."
        )
