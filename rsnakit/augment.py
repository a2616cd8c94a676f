"""Augmentation pipelines by name, made of albumentations; on single images, (H, W) float32 in [0, 1]."""

import os
import random
import warnings
from collections.abc import Callable

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else importing it asks a server for its newest version

import albumentations as A
import cv2
import numpy as np

NAMES = ("none", "light", "heavy")


class Augment:
    """A pipeline as a function of an image and a seed; the same seed gives the same picture, in any process."""

    def __init__(self, transforms: list[A.BasicTransform]) -> None:
        self.pipeline = A.Compose(transforms)

    def __call__(self, image: np.ndarray, seed: int) -> np.ndarray:
        """Augments (H, W) float32 in [0, 1]; the result has the same shape, type and range.

        Raises:
            ValueError: another type or range. albumentations would take it and give rubbish without a word.
        """
        if image.dtype != np.float32 or image.ndim != 2:
            raise ValueError(f"augmentation takes (H, W) float32, not {image.shape} {image.dtype}")
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"augmentation takes values in [0, 1], found {low:g} to {high:g}")
        # Not set_random_seed: it gives every transform the same numbers, and those with the same p then always come together.
        self.pipeline.set_random_state(np.random.default_rng(seed), random.Random(seed))
        # A channel is added, since some transforms read (H, W) and (H, W, 1) differently.
        out = self.pipeline(image=image[..., None])["image"][..., 0]
        return np.ascontiguousarray(np.clip(out, 0, 1), dtype=np.float32)


def build(name: str, height: int, width: int) -> Augment | None:
    """The pipeline of a name, for images of (height, width); None for `none`.

    `light`: flips and a small shift, zoom and turn. `heavy`: larger ones, brightness and contrast, holes.

    Raises:
        ValueError: no such name, or an argument that this release of albumentations does not know.
    """
    if name not in NAMES:
        raise ValueError(f"augmentation {name!r}: expected one of {', '.join(NAMES)}")
    if name == "none":
        return None
    return Augment(checked(_light if name == "light" else _heavy, height, width))


def checked(make: Callable[[int, int], list[A.BasicTransform]], height: int, width: int) -> list[A.BasicTransform]:
    """Makes transforms with albumentations' warnings as errors: it takes an argument it does not know, and ignores it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return make(height, width)
        except (UserWarning, TypeError, ValueError) as error:
            raise ValueError(f"albumentations {A.__version__} refuses this pipeline: {error}") from error


def _flips() -> list[A.BasicTransform]:
    return [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]


def _light(height: int, width: int) -> list[A.BasicTransform]:
    return [*_flips(), _warp(shift=0.05, zoom=(0.9, 1.1), turn=10)]


def _heavy(height: int, width: int) -> list[A.BasicTransform]:
    holes = (max(1, height // 16), max(2, height // 6)), (max(1, width // 16), max(2, width // 6))
    return [
        *_flips(),
        _warp(shift=0.1, zoom=(0.8, 1.2), turn=30),
        A.RandomBrightnessContrast(brightness_limit=0.15, contrast_limit=0.2, p=0.5),
        A.CoarseDropout(num_holes_range=(1, 6), hole_height_range=holes[0], hole_width_range=holes[1], fill=0, p=0.25),
    ]


def _warp(shift: float, zoom: tuple[float, float], turn: float) -> A.BasicTransform:
    return A.Affine(
        translate_percent=(-shift, shift), scale=zoom, rotate=(-turn, turn), interpolation=cv2.INTER_LINEAR,
        border_mode=cv2.BORDER_CONSTANT, fill=0, p=0.9,
    )  # fmt: skip
