"""What the store's format and decoding at reduced size do to images, against the same images decoded whole and kept exactly."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit import store
from rsnakit.prepare import PreprocessConfig, prepare


@dataclasses.dataclass(frozen=True)
class Variant:
    """What became of an image: (height, width) uint16 of 12 bits, and by how many source pixels its crop moved."""

    image: np.ndarray
    moved: int = 0


def variants(path: Path | str, config: PreprocessConfig, image_format: str) -> tuple[np.ndarray, dict[str, Variant]]:
    """An image decoded whole, and what becomes of it.

    Args:
        path: its file.
        config: how images are prepared; its `reduce` is what is looked at.
        image_format: of a store, one of `store.FORMATS`.

    Returns:
        (height, width) uint16 of 12 bits with `reduce=0`; and what was made of it by what was done: decoded as `config` has
        it, where that makes a difference to the file, and written in the format and read again. The first can move the
        crop too, since the breast is looked for on another small copy then.
    """
    exact, reduced = prepare(path, dataclasses.replace(config, reduce=0)), prepare(path, config)
    found = {}
    if reduced.reduce:
        moved = int(np.abs(np.subtract(reduced.box, exact.box)).max())
        found[f"decoded at 1/{2**reduced.reduce}"] = Variant(reduced.image, moved)
    record = np.frombuffer(store.encode_record(exact.image, image_format), np.uint8)
    found[image_format] = Variant(store.decode_record(record, image_format, exact.image.shape))
    return exact.image, found


def differences(paths: Iterable[Path | str], config: PreprocessConfig, image_format: str) -> pd.DataFrame:
    """What `variants` come to, in the 4,096 levels of 12 bits: a row an image and variant."""
    rows = {}
    for path in paths:
        exact, others = variants(path, config, image_format)
        for name, variant in others.items():
            error = np.abs(variant.image.astype(np.int32) - exact)
            rows[Path(path).stem, name] = {
                "pixels as they were, %": 100 * (error == 0).mean(),
                "off by, mean": error.mean(),
                "99 % are off by at most": np.percentile(error, 99),
                "largest": error.max(),
                "crop moved, source pixels": variant.moved,
            }
    table = pd.DataFrame.from_dict(rows, orient="index").round(2)
    return table.rename_axis(["image", "variant"])
