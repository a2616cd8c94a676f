"""Augmentation: only on what albumentations takes, decided by the seed alone, every argument known."""

import collections
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import albumentations as A
import numpy as np
import pytest

from rsnakit import augment

SIZE = (48, 32)
PIPELINES = [name for name in augment.NAMES if name != "none"]


def picture(shape=SIZE, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("shape", [SIZE, (33, 57), (8, 8)])
def test_shape_type_and_range_stay(name, shape):
    pipeline = augment.build(name, *shape)
    for image in (picture(shape), np.zeros(shape, np.float32), np.ones(shape, np.float32)):
        before = image.copy()
        for seed in range(30):
            out = pipeline(image, seed)
            assert out.shape == shape and out.dtype == np.float32 and out.flags.c_contiguous
            assert out.min() >= 0 and out.max() <= 1
        assert np.array_equal(image, before)  # never in place: it may be the store's own memory


@pytest.mark.parametrize("name", PIPELINES)
def test_the_seed_alone_decides(name):
    image, other = picture(), picture(seed=1)
    first, second = augment.build(name, *SIZE), pickle.loads(pickle.dumps(augment.build(name, *SIZE)))
    np.random.seed(5)  # a global state must not matter
    expected = [first(image, seed) for seed in range(20)]
    np.random.seed(6)
    for seed in reversed(range(20)):  # nor what was asked for before
        second(other, seed + 100)
        assert np.array_equal(second(image, seed), expected[seed])
    assert len({e.tobytes() for e in expected}) >= 18


def test_flips_come_independently():
    """albumentations gives every transform the pipeline's seed: two flips with p=0.5 would always come together."""
    pipeline = augment.Augment(augment._flips())
    image = np.array([[0.0, 0.1], [0.2, 0.3]], np.float32)
    kinds = {tuple(f.ravel().tolist()) for f in (image, image[::-1], image[:, ::-1], image[::-1, ::-1])}
    counts = collections.Counter(tuple(pipeline(image, seed).ravel().tolist()) for seed in range(400))
    assert set(counts) == kinds
    assert min(counts.values()) >= 60  # 100 expected, with a deviation of 8.7


def test_transforms_of_one_pipeline_are_independent():
    pipeline = augment.Augment([A.InvertImg(p=0.5), A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.25)])
    image = np.array([[0.0, 0.1], [0.2, 0.4]], np.float32)
    drawn = []
    for seed in range(1000):
        out = pipeline(image, seed)
        inverted = out.max() == 1
        out = np.round(1 - out, 6) if inverted else out
        drawn.append((inverted, out[:, 0].sum() > out[:, 1].sum(), out[0].sum() > out[1].sum()))
    drawn = np.array(drawn, dtype=float)
    assert np.allclose(drawn.mean(0), [0.5, 0.5, 0.25], atol=0.06)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.12  # deviation 0.032


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(
    "image",
    [
        np.full(SIZE, 1000, np.uint16),
        np.full(SIZE, 300, np.float32),
        np.full(SIZE, 0.5, np.float64),
        np.full(SIZE, 128, np.uint8),
        np.full(SIZE, -0.01, np.float32),
        np.full(SIZE, np.nan, np.float32),
        np.where(np.eye(*SIZE, dtype=bool), np.nan, 0.5).astype(np.float32),
        np.full((*SIZE, 1), 0.5, np.float32),
        np.full((1, *SIZE), 0.5, np.float32),
    ],
    ids=["uint16 1000", "float 300", "float64", "uint8", "negative", "NaN", "some NaN", "(H,W,1)", "(1,H,W)"],
)
def test_what_albumentations_would_spoil_is_refused(name, image):
    # P04
    with pytest.raises(ValueError, match="augmentation takes"):
        augment.build(name, *SIZE)(image, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda h, w: [A.CoarseDropout(max_holes=8, max_height=4, p=0.5)],
        lambda h, w: [A.PadIfNeeded(min_height=h, min_width=w, value=0)],
        lambda h, w: [A.RandomResizedCrop(height=h, width=w)],
        lambda h, w: [A.OneOf([A.HorizontalFlip(), A.CoarseDropout(max_holes=8)])],
        lambda h, w: [A.HorizontalFlip(probability=1)],
        lambda h, w: [A.Affine(scale="large")],
    ],
    ids=["max_holes", "value", "height and width", "nested", "probability", "wrong type"],
)
def test_arguments_of_another_release_are_refused(make):
    # P05
    with pytest.raises(ValueError, match=rf"albumentations {A.__version__} refuses"):
        augment.checked(make, *SIZE)


def test_known_arguments_are_let_through():
    made = augment.checked(
        lambda h, w: [A.PadIfNeeded(min_height=h, min_width=w, fill=0), A.HorizontalFlip(p=1)], *SIZE
    )
    assert [type(t).__name__ for t in made] == ["PadIfNeeded", "HorizontalFlip"]


def test_names():
    assert augment.build("none", *SIZE) is None
    with pytest.raises(ValueError, match="'strong': expected one of none, light, heavy"):
        augment.build("strong", *SIZE)


def test_heavy_changes_more_than_light():
    image = picture()
    light, heavy = (
        np.mean([np.abs(augment.build(name, *SIZE)(image, s) - image).mean() for s in range(60)]) for name in PIPELINES
    )
    assert 0 < light < heavy


def test_importing_asks_no_server(tmp_path):
    code = (
        "import socket\n"
        "def refuse(*a, **k): print('NETWORK'); raise OSError('no network here')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from rsnakit import augment\n"
        "import hashlib, numpy as np\n"
        "image = np.random.default_rng(0).random((48, 32), dtype=np.float32)\n"
        "print(hashlib.sha256(augment.build('heavy', 48, 32)(image, 7).tobytes()).hexdigest())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "NO_ALBUMENTATIONS_UPDATE"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        cwd=Path(augment.__file__).parents[1], env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = hashlib.sha256(augment.build("heavy", *SIZE)(picture(), 7).tobytes()).hexdigest()
    assert done.stdout.split() == [here]  # nothing on the network, and the same picture as in this process
