"""Where the time of `preprocess.load_image` goes, and what decoding at reduced size changes in its images."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def open_stages() -> Callable[[Path, tuple[int, int]], dict[str, float]]:
    """A function that prepares a file and returns seconds by stage; their sum is the whole time.

    `rest` is what is left of `prepare`: looking for blank images, shades, turning, resizing, rounding.
    """
    import samples  # noqa: F401  finds the package

    from rsnakit import dicom, prepare

    spent: dict[str, float] = {}
    decodings: list[str] = []

    def timed(function: Callable, stage: Callable[[], str]) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            begun, name = time.perf_counter(), stage()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun

        return wrapper

    def decoding() -> str:
        decodings.append("decode again" if decodings else "decode")
        return decodings[-1]

    dicom.read_encoded = timed(dicom.read_encoded, lambda: "read")
    dicom.Encoded.decode = timed(dicom.Encoded.decode, decoding)
    prepare.shrink = timed(prepare.shrink, lambda: "search")
    prepare.locate_breast = timed(prepare.locate_breast, lambda: "search")

    def way(path: Path, size: tuple[int, int]) -> dict[str, float]:
        spent.clear()
        decodings.clear()
        begun = time.perf_counter()
        prepared = prepare.prepare(path, prepare.PreprocessConfig(height=size[0], width=size[1]))
        whole = time.perf_counter() - begun
        stages = {name: spent.get(name, 0.0) for name in ("read", "decode", "search", "decode again")}
        return {**stages, "rest": whole - sum(stages.values()), "whole": whole, "reduce": prepared.reduce}

    return way


def reduction_difference(path: Path, size: tuple[int, int]) -> dict[str, float]:
    """How far the image at `reduce="auto"` lies from the one at `reduce=0`, in grey levels of 255, nothing aligned.

    `brighter` is the mean with its sign: a shift of all shades, as where the span from smallest to largest value is the
    window, and averaging takes the extremes away. `box moved` is the largest distance between the edges of the two crop
    boxes, in pixels of the source: what one image shows elsewhere than the other counts as a difference.
    """
    import samples  # noqa: F401  finds the package

    from rsnakit.prepare import PreprocessConfig, prepare

    reduced, full = (
        prepare(path, PreprocessConfig(height=size[0], width=size[1], reduce=reduce)) for reduce in ("auto", 0)
    )
    change = (reduced.image.astype(np.float64) - full.image) * 255 / 4095
    error = np.abs(change)
    moved = max(abs(a - b) for a, b in zip(reduced.box, full.box, strict=True))
    return {
        "reduce": reduced.reduce, "mean": float(error.mean()), "99th percentile": float(np.percentile(error, 99)),
        "largest": float(error.max()), "brighter": float(change.mean()), "box moved": moved,
    }  # fmt: skip
