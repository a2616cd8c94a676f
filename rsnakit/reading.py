"""Files as prepared images, each an item of a list; one that cannot be read is an item too.

torch is not imported: where a file kills its process, others are begun for it and its neighbours, and shall not wait seconds
for that.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rsnakit.prepare import status_of
from rsnakit.store_formats import MAX_VALUE


class Files:
    """Files as prepared images; one that cannot be read is an item too, of zeros, with its reason."""

    def __init__(self, paths: Sequence[Path | str], read: Callable, shape: tuple[int, int]) -> None:
        self.paths, self.read, self.shape = [str(path) for path in paths], read, shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, item: int) -> dict:
        begun = time.perf_counter()
        try:
            image = self.read(self.paths[item])
        except Exception as error:  # whatever one image does, the others must get their rows
            return self.failed(item, error, time.perf_counter() - begun)
        return _item(item, image, "ok", "", time.perf_counter() - begun)

    def failed(self, item: int, error: Exception, seconds: float = 0.0) -> dict:
        return _item(item, np.zeros(self.shape, np.uint16), *status_of(error), seconds)


def _item(item: int, image: np.ndarray, status: str, reason: str, seconds: float) -> dict:
    pixels = image[None].astype(np.float32) / np.float32(MAX_VALUE)
    return {"image": pixels, "status": status, "reason": reason, "item": item, "seconds": seconds}
