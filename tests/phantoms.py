"""Small drawn breasts as DICOM files, one or many, for the tests of what is made of them."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from dicom_files import write
from pydicom import uid

from rsnakit.phantom import draw_breast
from rsnakit.prepare import PreprocessConfig

CONFIG = PreprocessConfig(height=64, width=32)
WHOLE = PreprocessConfig(height=200, width=160, crop=False)  # of the frames written here, pixel by pixel
WINDOW = {"WindowCenter": 2048, "WindowWidth": 4096}  # the whole of 12 bits


@functools.lru_cache
def phantom(seed: int = 0, laterality: str = "L") -> np.ndarray:
    """(200, 160) uint16 of 12 bits, a breast on black."""
    return draw_breast(np.random.default_rng(seed), (200, 160), laterality=laterality)[0]


def write_many(folder: Path, count: int, encode=None, syntax=uid.ExplicitVRLittleEndian) -> pd.DataFrame:
    """A table of `count` files; ids have zeros in front."""
    folder.mkdir()
    paths = [write(folder / f"{i:03}.dcm", phantom(i), encode, syntax, **WINDOW) for i in range(count)]
    ids = [f"{i:03}" for i in range(count)]
    return pd.DataFrame({"patient_id": [f"0{i[:2]}" for i in ids], "image_id": ids, "path": [str(p) for p in paths]})


def no_more_than_one_grey_level(a: np.ndarray, b: np.ndarray) -> bool:
    """Of 255, on images of 12 bits."""
    return np.abs(a.astype(int) - b.astype(int)).max() <= 4095 / 255


def deadly(victim: str) -> Callable:
    """Stands for `jobs.prepare_into_store`; the image of an id kills the process that prepares it.

    It is of no module, so that processes get it with its code.
    """

    def prepare_into_store(job, item):
        from rsnakit import jobs

        if item[2] == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return jobs.prepare_into_store(job, item)

    return prepare_into_store
