"""Augmentation pipelines by name, made of albumentations; on single images, (H, W) float32 in [0, 1] or uint8."""

import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else importing it asks a server for its newest version

import albumentations as A
import cv2
import numpy as np
import pandas as pd

NAMES = ("none", "light", "heavy", "first_place", "second_place")
REST = "around them"  # of `costs`: drawing the seed, checks, Compose, clipping
DRAWS = 8  # of `costs`: seeds an image and round


class Augment:
    """A pipeline as a function of an image and a seed; the same seed gives the same picture, in any process.

    Args:
        transforms: one after another.
        p: how often they come at all.
        shape: (height, width) that they were made for; None: any.
    """

    def __init__(
        self, transforms: list[A.BasicTransform], p: float = 1.0, shape: tuple[int, int] | None = None
    ) -> None:
        self.pipeline = A.Compose(transforms, p=p)
        self.shape = shape

    def __call__(self, image: np.ndarray, seed: int) -> np.ndarray:
        """Augments (H, W) float32 in [0, 1] or uint8; the result has the same shape, type and range.

        Raises:
            ValueError: another type, range or size. albumentations would take it and give rubbish without a word.
        """
        if image.dtype not in (np.float32, np.uint8) or image.ndim != 2:
            raise ValueError(f"augmentation takes (H, W) float32 in [0, 1] or uint8, not {image.shape} {image.dtype}")
        if image.dtype == np.float32 and not ((low := image.min()) >= 0 and image.max() <= 1):
            raise ValueError(f"augmentation takes float32 in [0, 1], found values of {low:g} to {image.max():g}")
        if self.shape not in (None, image.shape):
            raise ValueError(f"augmentation was built for images of {self.shape}, and got one of {image.shape}")
        # Not set_random_seed: it gives every transform the same numbers, and those with the same p then always come together.
        self.pipeline.set_random_state(np.random.default_rng(seed), random.Random(seed))
        # A channel is added, since some transforms read (H, W) and (H, W, 1) differently.
        out = self.pipeline(image=image[..., None])["image"].reshape(image.shape)
        # Never the image itself, which a pipeline that did nothing gives back. What it made is clipped where it lies: a third
        # picture at a time is more than the C library keeps, and would be brought from the system anew, page by page.
        out = np.array(out, order="C") if np.may_share_memory(out, image) else np.ascontiguousarray(out)
        return np.clip(out, 0, 1, out=out) if image.dtype == np.float32 else out


def build(name: str, height: int, width: int) -> Augment | None:
    """The pipeline of a name, for images of (height, width); None for `none`.

    `light`: flips and a small shift, zoom and turn. `heavy`: larger ones, brightness and contrast, holes. `first_place`,
    `second_place`: what is known of those in the competition.

    Raises:
        ValueError: no such name, or an argument that this release of albumentations does not know.
    """
    if name not in NAMES:
        raise ValueError(f"augmentation {name!r}: expected one of {', '.join(NAMES)}")
    if name == "none":
        return None
    make, p = {
        "light": (_light, 1), "heavy": (_heavy, 1), "first_place": (_first_place, 0.9), "second_place": (_second_place, 1)
    }[name]  # fmt: skip
    return Augment(checked(make, height, width), p, (height, width))


def costs(name: str, images: Sequence[np.ndarray], rounds: int = 5) -> pd.DataFrame:
    """What the transforms of a pipeline cost on images, each within the pipeline and as often as it comes there.

    Args:
        name: one of `NAMES`.
        images: (H, W) float32 in [0, 1], all of one size.
        rounds: in each, every image is augmented with 8 seeds of its own; one more, the first, is not counted.

    Returns:
        A row a transform, the dearest first, under its class's name (those of one class together), and one for the rest of
        a call; `ms` are milliseconds an image, over those too where it did not come, and `share` is of their sum. No rows
        for `none`.

    Raises:
        ValueError: no such name, no image or no round, or an image that the pipeline refuses.
    """
    if not len(images):
        raise ValueError("costs of augmentation: no images; give at least one")
    if rounds < 1:
        raise ValueError(f"costs of augmentation: {rounds} rounds, expected at least 1")
    pipeline = build(name, *images[0].shape)
    seconds: dict[str, float] = {}
    if pipeline is not None:
        for transform in _leaves(pipeline.pipeline):
            seconds[type(transform).__name__] = 0.0  # also where it never comes
            for method in ("get_params", "get_params_dependent_on_data", "apply_with_params"):
                setattr(transform, method, _timed(getattr(transform, method), seconds, type(transform).__name__))
        seconds[REST] = 0.0
        a_round = DRAWS * len(images)
        for seed in range(a_round * (rounds + 1)):
            if seed == a_round:
                seconds.update(dict.fromkeys(seconds, 0.0))
            begun = time.perf_counter()
            pipeline(images[seed % len(images)], seed)
            seconds[REST] += time.perf_counter() - begun
        seconds[REST] -= sum(spent for transform, spent in seconds.items() if transform != REST)
    ms = pd.Series(seconds, dtype=float).sort_values(ascending=False) * (1000 / (DRAWS * rounds * len(images)))
    return pd.DataFrame({"ms": ms, "share": ms / ms.sum()}).rename_axis("transform")


def checked(make: Callable[[int, int], list[A.BasicTransform]], height: int, width: int) -> list[A.BasicTransform]:
    """Makes transforms with albumentations' warnings as errors: it takes an argument it does not know, and ignores it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return make(height, width)
        except (UserWarning, TypeError, ValueError) as error:
            raise ValueError(f"albumentations {A.__version__} refuses this pipeline: {error}") from error


class FlipsAndWarp(A.Affine):
    """Flips from left to right and from top to bottom, and then an affine warp, in one go: the picture is gone through once.

    It draws the numbers that `A.HorizontalFlip(flip_p)`, `A.VerticalFlip(flip_p)` and `A.Affine(p=warp_p)` would draw one
    after another: with the same seed it gives their picture, but for what the warp rounds. Without a warp the flips are
    exact. For images, masks and boxes.

    Args:
        flip_p: how often each flip comes, between 0 and 1.
        warp_p: how often the warp comes, likewise.
        p: how often any of it may come.
        affine: as `A.Affine` takes it.

    Raises:
        ValueError: a share is not between 0 and 1, or what `A.Affine` raises.
    """

    def __init__(self, flip_p: float = 0.5, warp_p: float = 0.9, p: float = 1.0, **affine: Any) -> None:
        for name, share in (("flip_p", flip_p), ("warp_p", warp_p)):
            if not 0 <= share <= 1:
                raise ValueError(f"FlipsAndWarp: {name} is {share}, expected a number between 0 and 1")
        super().__init__(**affine, p=p)
        self.flip_p = flip_p
        self.warp_p = warp_p

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        height, width = params["shape"][:2]
        across, down = self._comes(self.flip_p), self._comes(self.flip_p)
        if self._comes(self.warp_p):
            drawn = super().get_params_dependent_on_data(params, data) | {"flip": None}
        else:
            drawn = {
                "matrix": np.eye(3), "bbox_matrix": np.eye(3), "rotate": 0.0, "scale": {"x": 1.0, "y": 1.0},
                "output_shape": (height, width), "flip": (across, down),
            }  # fmt: skip
        for name, edge in ("matrix", 1), ("bbox_matrix", 0):  # of pixels the last is at width - 1, of boxes at width
            mirrored = np.diag([-1.0 if across else 1.0, -1.0 if down else 1.0, 1.0])
            mirrored[:2, 2] = across * (width - edge), down * (height - edge)
            drawn[name] = drawn[name] @ mirrored
        return drawn

    def _comes(self, share: float) -> bool:
        """Whether what has this share comes now; for what is certain albumentations draws no number."""
        return share >= 1 or (share > 0 and self.py_random.random() < share)

    def apply(self, img: np.ndarray, flip: tuple[bool, bool] | None, **params: Any) -> np.ndarray:
        if flip is None:
            return super().apply(img, **params)
        across, down = flip
        if not (across or down):
            return img
        return cv2.flip(img, -1 if across and down else int(across)).reshape(img.shape)

    def apply_to_keypoints(self, keypoints: np.ndarray, **params: Any) -> np.ndarray:
        raise NotImplementedError("FlipsAndWarp does not turn keypoints; take A.HorizontalFlip and A.Affine for those")


def _flips() -> list[A.BasicTransform]:
    return [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]


def _light(height: int, width: int) -> list[A.BasicTransform]:
    return [_warp(shift=0.05, zoom=(0.9, 1.1), turn=10, flips=True)]


def _heavy(height: int, width: int) -> list[A.BasicTransform]:
    holes = (max(1, height // 16), max(2, height // 6)), (max(1, width // 16), max(2, width // 6))
    return [
        _warp(shift=0.1, zoom=(0.8, 1.2), turn=30, flips=True),
        A.RandomBrightnessContrast(brightness_limit=0.15, contrast_limit=0.2, p=0.5),
        A.CoarseDropout(num_holes_range=(1, 6), hole_height_range=holes[0], hole_width_range=holes[1], fill=0, p=0.25),
    ]


def _first_place(height: int, width: int) -> list[A.BasicTransform]:
    """Known of the first place: the order, what excludes what, the crop's scale, ratio and p, that of the flips, turns of up
    to 30 degrees, 1 to 6 holes with p 0.25, and p 0.9 for all of it. Not known, and so ours: every other number, and what
    becomes of the crop, which here is stretched to the whole picture."""
    holes = (max(1, height // 20), max(2, height // 7)), (max(1, width // 10), max(2, width // 4))
    sigma = max(1.0, width / 48)  # of the blur that makes the elastic field smooth; its time grows with it
    alpha = 6.1 * sigma * width / 100  # so that a pixel moves 1 % of the width, as a deviation
    return [
        A.RandomResizedCrop((height, width), scale=(0.5, 1.0), ratio=(0.5, 0.8), interpolation=cv2.INTER_LINEAR, p=0.4),
        *_flips(),
        A.Downscale((0.6, 0.95), {"downscale": cv2.INTER_AREA, "upscale": cv2.INTER_LINEAR}, p=0.2),
        A.OneOf(
            [
                A.RandomToneCurve(scale=0.3, p=0.5),  # by way of 8 bits, also where the picture has more
                A.RandomBrightnessContrast(brightness_limit=0.15, contrast_limit=0.3, p=0.5),
            ],
            p=0.5,
        ),
        A.OneOf(
            [
                _warp(shift=0.1, zoom=(0.85, 1.15), turn=30, p=0.6),  # within OneOf, p is a weight
                A.ElasticTransform(alpha=alpha, sigma=sigma, noise_distribution="uniform", p=0.2),
                A.GridDistortion(num_steps=5, distort_limit=0.3, p=0.2),
            ],
            p=0.5,
        ),
        A.CoarseDropout(num_holes_range=(1, 6), hole_height_range=holes[0], hole_width_range=holes[1], fill=0, p=0.25),
    ]


def _second_place(height: int, width: int) -> list[A.BasicTransform]:
    """Known of the second place: a flip with p 0.75, turns of up to 45 degrees, scale by up to 0.15, RandAugment, erasing with
    p 0.25. Not known, and so ours: that the flips are the four ways a picture can lie, each as often, that turn and scale
    always come, what RandAugment drew from and how strongly, and how large an erased rectangle is, which is as in Random
    Erasing (Zhong et al., 2020)."""
    return [
        # Flips with p 0.5 each: no flip at all in a quarter of the pictures.
        _warp(shift=0, zoom=(0.85, 1.15), turn=45, p=1, flips=True),
        _rand_augment(),
        A.Erasing(scale=(0.02, 0.33), ratio=(0.3, 3.3), fill=0, p=0.25),
    ]


def _rand_augment() -> A.BaseCompose:
    """Two of the operations of RandAugment (Cubuk et al., 2020), in random order, at moderate strength; colour is left out,
    which a grey picture hasn't, and `Equalize`, `AutoContrast` and `Posterize` work by way of 8 bits."""
    return A.RandomOrder(
        [
            A.NoOp(p=1),
            A.AutoContrast(method="pil", p=1),  # its default method is another equalisation
            A.Equalize(p=1),
            A.Posterize(num_bits=(4, 7), p=1),
            A.Solarize(threshold_range=(0.8, 1.0), p=1),
            A.ColorJitter(brightness=(0.7, 1.3), contrast=(1, 1), saturation=(1, 1), hue=(0, 0), p=1),
            A.ColorJitter(brightness=(1, 1), contrast=(0.7, 1.3), saturation=(1, 1), hue=(0, 0), p=1),
            A.Sharpen(alpha=(0.1, 0.5), p=1),
            A.Affine(rotate=(-15, 15), p=1),
            A.Affine(shear={"x": (-10, 10), "y": (0, 0)}, p=1),
            A.Affine(shear={"x": (0, 0), "y": (-10, 10)}, p=1),
            A.Affine(translate_percent={"x": (-0.1, 0.1), "y": (0, 0)}, p=1),
            A.Affine(translate_percent={"x": (0, 0), "y": (-0.1, 0.1)}, p=1),
        ],
        n=2,
    )


def _warp(
    shift: float, zoom: tuple[float, float], turn: float, p: float = 0.9, flips: bool = False
) -> A.BasicTransform:
    """A warp that comes with p; with `flips` each of the two before it, which cost nothing then."""
    how = {
        "translate_percent": (-shift, shift), "scale": zoom, "rotate": (-turn, turn), "interpolation": cv2.INTER_LINEAR,
        "border_mode": cv2.BORDER_CONSTANT, "fill": 0,
    }  # fmt: skip
    return FlipsAndWarp(flip_p=0.5, warp_p=p, **how) if flips else A.Affine(**how, p=p)


def _leaves(compose: A.BaseCompose) -> list[A.BasicTransform]:
    """Its transforms without those that only hold others."""
    return [
        leaf
        for transform in compose.transforms
        for leaf in (_leaves(transform) if isinstance(transform, A.BaseCompose) else [transform])
    ]


def _timed(function: Callable, seconds: dict[str, float], name: str) -> Callable:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - begun

    return timed
