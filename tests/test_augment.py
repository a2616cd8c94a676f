"""Augmentation: only on what albumentations takes, decided by the seed alone, every argument known."""

import collections
import hashlib
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import albumentations as A
import numpy as np
import pytest

from rsnakit import augment

SIZE = (48, 32)
PIPELINES = [name for name in augment.NAMES if name != "none"]


def picture(shape=SIZE, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def breast() -> np.ndarray:
    """A bright half-ellipse with soft stripes at the left of a black frame, (200, 120) uint8."""
    y, x = np.mgrid[:200, :120]
    shape = np.exp(-(((y - 90) / 60) ** 2) - (x / 50) ** 2)
    return np.where(x < 100, 200 * shape + 20 * np.sin(y / 5) * np.cos(x / 7) + 25, 0).clip(0, 255).astype(np.uint8)


def steps_of(transforms) -> list[A.BasicTransform]:
    """Transforms without those that only hold others."""
    found = []
    for transform in transforms:
        found += steps_of(transform.transforms) if isinstance(transform, A.BaseCompose) else [transform]
    return found


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("shape", [SIZE, (33, 57), (8, 8)])
def test_shape_type_and_range_stay(name, shape):
    pipeline = augment.build(name, *shape)
    for image in (picture(shape), np.zeros(shape, np.float32), np.ones(shape, np.float32)):
        for kind in (image, (image * 255).astype(np.uint8)):
            before = kind.copy()
            for seed in range(20):
                out = pipeline(kind, seed)
                assert out.shape == shape and out.dtype == kind.dtype and out.flags.c_contiguous
                assert out.min() >= 0 and out.max() <= (1 if kind.dtype == np.float32 else 255)
                assert not np.shares_memory(out, kind)
            assert np.array_equal(kind, before)  # never in place: it may be the store's own memory


@pytest.mark.parametrize("name", PIPELINES)
def test_float_and_bytes_of_a_picture_come_out_alike(name):
    """Each transform of a pipeline by itself: had one taken either for another range, they would differ by far more."""
    image = breast()
    for transform in steps_of(augment.build(name, *image.shape).pipeline.transforms):
        transform.p = 1
        pipeline, changed = augment.Augment([transform]), []
        for seed in range(25):
            fine, coarse = pipeline(image.astype(np.float32) / 255, seed) * 255, pipeline(image, seed)
            assert np.abs(fine - coarse).max() <= 1.01, transform  # rounded, or cut to whole numbers
            changed.append(np.abs(fine - image).mean())
        assert (np.mean(changed) > 0.3) == (type(transform) is not A.NoOp), transform
        assert np.mean(changed) < 90, transform  # a flip brings 79, of the mean of 68 that there is


@pytest.mark.parametrize("name", PIPELINES)
def test_float_and_bytes_go_the_same_way_through_a_pipeline(name):
    image = breast()
    pipeline = augment.build(name, *image.shape)
    for seed in range(60):
        off = np.abs(pipeline(image.astype(np.float32) / 255, seed) * 255 - pipeline(image, seed))
        assert off.mean() < 2, seed  # a grey level off turns a few pixels over where Solarize or Posterize comes after


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
        np.full(SIZE, 0.5, np.float16),
        np.full(SIZE, 1, np.int8),
        np.full(SIZE, True),
        np.full(SIZE, -0.01, np.float32),
        np.full(SIZE, 1.01, np.float32),
        np.full(SIZE, np.nan, np.float32),
        np.where(np.eye(*SIZE, dtype=bool), np.nan, 0.5).astype(np.float32),
        np.full((*SIZE, 1), 0.5, np.float32),
        np.full((1, *SIZE), 0.5, np.float32),
        np.full((*SIZE, 3), 100, np.uint8),
    ],
    ids=lambda image: f"{image.dtype} {image.shape} {image.flat[0]}",
)
def test_what_albumentations_would_spoil_is_refused(name, image):
    # P04
    with pytest.raises(ValueError, match="augmentation takes"):
        augment.build(name, *SIZE)(image, 0)


@pytest.mark.parametrize("name", PIPELINES)
def test_images_of_another_size_are_refused(name):
    with pytest.raises(ValueError, match=r"built for images of \(48, 32\), and got one of \(32, 48\)"):
        augment.build(name, *SIZE)(np.zeros(SIZE[::-1], np.uint8), 0)


@pytest.mark.parametrize("make", [augment._light, augment._heavy, augment._first_place, augment._second_place])
def test_pipelines_are_built_with_warnings_as_errors(make, monkeypatch):
    # P05
    def dated(height: int, width: int) -> list:
        return [*make(height, width), A.CoarseDropout(max_holes=8)]

    monkeypatch.setattr(augment, make.__name__, dated)
    with pytest.raises(ValueError, match=r"refuses this pipeline: .*max_holes"):
        augment.build(make.__name__[1:], *SIZE)


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
        np.mean([np.abs(augment.build(name, *SIZE)(image, s) - image).mean() for s in range(60)])
        for name in ("light", "heavy")
    )
    assert 0 < light < heavy


def test_first_place_is_what_is_known_of_it():
    image = breast()
    pipeline = augment.build("first_place", *image.shape)
    steps = {type(step).__name__: step for step in steps_of(pipeline.pipeline.transforms)}
    crop, holes, turn = steps["RandomResizedCrop"], steps["CoarseDropout"], steps["Affine"]
    assert (crop.scale, crop.ratio, crop.p) == ((0.5, 1), (0.5, 0.8), 0.4)
    assert (steps["HorizontalFlip"].p, steps["VerticalFlip"].p) == (0.5, 0.5)
    assert turn.rotate == (-30, 30) and (holes.num_holes_range, holes.p) == ((1, 6), 0.25)
    assert {"Downscale", "RandomToneCurve", "RandomBrightnessContrast", "ElasticTransform", "GridDistortion"} <= set(
        steps
    )
    # 0.1 that nothing comes at all, 0.9 * 0.6 * 0.25 * 0.8 * 0.5 * 0.5 * 0.75 that each step stays out: 0.12 of pictures
    untouched = np.mean([np.array_equal(pipeline(image, seed), image) for seed in range(600)])
    assert abs(untouched - 0.12) < 0.04  # deviation 0.013


def test_second_place_is_what_is_known_of_it():
    steps = augment.build("second_place", *SIZE).pipeline.transforms
    assert steps[0].rotate == (-45, 45) and steps[0].scale == {"x": (0.85, 1.15), "y": (0.85, 1.15)}
    assert type(steps[-1]) is A.Erasing and steps[-1].p == 0.25
    steps[0].warp_p, image = 0, picture()
    flips = augment.Augment(steps[:1])
    flipped = np.mean([not np.array_equal(flips(image, seed), image) for seed in range(600)])
    assert abs(flipped - 0.75) < 0.06  # deviation 0.018


# Flips and warp in one


WARP = {
    "translate_percent": (-0.1, 0.1), "scale": (0.8, 1.2), "rotate": (-30, 30), "shear": (-5, 5), "fill": 0,
}  # fmt: skip


def one_by_one(warp_p: float) -> list[A.BasicTransform]:
    return [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5), A.Affine(**WARP, p=warp_p)]


def smooth(shape: tuple[int, int], kind: type) -> np.ndarray:
    """Waves of about 20 pixels, from 0.1 to 0.9 of the range: a 32nd of a pixel, to which some releases of OpenCV round a
    place, is less than a hundredth of the range."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    waves = 0.5 + 0.4 * np.sin(x / 3.3 + y / 9) * np.cos(y / 3.7)
    return waves.astype(np.float32) if kind is np.float32 else np.rint(255 * waves).astype(np.uint8)


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
@pytest.mark.parametrize("shape", [(96, 64), (57, 33), (40, 41), (1, 7)])
@pytest.mark.parametrize("warp_p", [0.5, 1.0])
def test_flips_and_warp_in_one_are_those_of_albumentations_one_after_another(shape, kind, warp_p):
    image, full = smooth(shape, kind), 1 if kind is np.float32 else 255
    merged = augment.Augment([augment.FlipsAndWarp(flip_p=0.5, warp_p=warp_p, **WARP)])
    expected = augment.Augment(one_by_one(warp_p))
    exact = 0
    for seed in range(80):
        got, want = merged(image, seed).astype(float), expected(image, seed).astype(float)
        # Where the picture ends, 0 begins: a place that rounds to the other side of its edge may differ by more.
        off = np.abs(got - want) / full
        assert off.mean() < 0.002 and np.mean(off > 0.02) < 0.02, (seed, off.max(), off.mean())
        exact += np.array_equal(got, want)
        changed = np.abs(want - image) / full
        assert min(shape) == 1 or (changed.mean() > 0.02) == (not np.array_equal(want, image))  # and they do something
    if warp_p == 0.5:
        assert exact >= 25  # of 40 that are flips alone, with a deviation of 4.5


@pytest.mark.parametrize(("flip_p", "warp_p"), [(0, 0.5), (1, 0.5), (0.5, 0), (1, 1), (0, 0)])
def test_what_is_certain_draws_no_number_just_as_in_albumentations(flip_p, warp_p):
    """So that what comes after it draws the same ones."""
    after = A.RandomBrightnessContrast(p=0.5)
    merged = augment.Augment([augment.FlipsAndWarp(flip_p=flip_p, warp_p=warp_p, **WARP), after])
    flips = A.HorizontalFlip(p=flip_p), A.VerticalFlip(p=flip_p)
    expected, image = augment.Augment([*flips, A.Affine(**WARP, p=warp_p), after]), smooth((57, 33), np.float32)
    for seed in range(20):
        assert np.abs(merged(image, seed) - expected(image, seed)).mean() < 0.002
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        augment.FlipsAndWarp(flip_p=1.5)


def test_flips_alone_are_exact_and_come_as_often_as_they_should():
    image = np.random.default_rng(0).random((7, 5), dtype=np.float32)
    ways = {
        f.tobytes(): name
        for name, f in {"": image, "v": image[::-1], "h": image[:, ::-1], "hv": image[::-1, ::-1]}.items()
    }
    merged = augment.Augment([augment.FlipsAndWarp(warp_p=0.25, rotate=(20, 30))])
    counts = collections.Counter(ways.get(merged(image, seed).tobytes(), "warp") for seed in range(1600))
    assert abs(counts["warp"] - 400) < 70  # deviation 17
    assert all(abs(counts[way] - 300) < 65 for way in ways.values())  # deviation 16


def test_beyond_the_edge_of_a_flipped_and_warped_picture_is_black():
    merged = augment.Augment([augment.FlipsAndWarp(warp_p=1, translate_percent={"x": (0.5, 0.5), "y": (0, 0)})])
    columns = np.tile(np.arange(1, 9, dtype=np.uint8), (4, 1))
    found = {tuple(merged(columns, seed)[0].tolist()) for seed in range(30)}
    assert found == {(0, 0, 0, 0, 1, 2, 3, 4), (0, 0, 0, 0, 8, 7, 6, 5)}  # the shift comes after the flip


def test_a_mask_and_boxes_go_with_the_picture():
    merged = A.Compose(
        [augment.FlipsAndWarp(warp_p=0.3, scale=(0.8, 0.9))],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["kind"]),
    )
    lit = np.zeros((60, 40), np.uint8)
    lit[10:20, 4:12] = 200
    for seed in range(30):
        merged.set_random_seed(seed)
        out = merged(image=lit, mask=(lit > 0).astype(np.uint8), bboxes=[[4, 10, 12, 20]], kind=[1])
        (left, top, right, bottom), inner = out["bboxes"][0], np.argwhere(out["mask"])
        assert np.abs(inner.min(0) - (top, left)).max() <= 1 and np.abs(inner.max(0) + 1 - (bottom, right)).max() <= 1
        assert (out["image"][out["mask"] == 1] > 45).all()  # half a pixel off in both directions is a quarter of 200
    with pytest.raises(NotImplementedError, match="does not turn keypoints"):
        A.Compose([augment.FlipsAndWarp()], keypoint_params=A.KeypointParams("xy"))(image=lit, keypoints=[(1, 1)])


def test_flips_and_warp_can_be_written_down_and_read_again():
    pipeline = augment.build("heavy", *SIZE).pipeline
    again = A.from_dict(A.to_dict(pipeline))
    assert isinstance(again.transforms[0], augment.FlipsAndWarp) and A.to_dict(again) == A.to_dict(pipeline)
    assert A.to_dict(again)["transform"]["transforms"][0]["warp_p"] == 0.9


@pytest.mark.parametrize("name", ["light", "heavy", "second_place"])
def test_pipelines_with_flips_before_the_warp_have_both_in_one(name):
    steps = augment.build(name, *SIZE).pipeline.transforms
    assert type(steps[0]) is augment.FlipsAndWarp and (steps[0].flip_p, steps[0].p) == (0.5, 1)
    assert steps[0].warp_p == (1 if name == "second_place" else 0.9)
    assert not {"HorizontalFlip", "VerticalFlip"} & {type(step).__name__ for step in steps_of(steps)}


# What transforms cost


class Slow(A.ImageOnlyTransform):
    """Takes a known time."""

    def __init__(self, ms: float, p: float) -> None:
        super().__init__(p=p)
        self.ms = ms

    def apply(self, img, **params):
        time.sleep(self.ms / 1000)
        return img


class Slower(Slow):
    pass


def test_costs_are_those_of_transforms_times_how_often_they_come(monkeypatch):
    made = augment.Augment([A.OneOf([Slow(2, p=0.25), Slower(4, p=0.75)], p=0.5), A.NoOp(p=0.5), A.InvertImg(p=0)])
    monkeypatch.setattr(augment, "build", lambda name, height, width: made)
    costs = augment.costs("x", [picture()] * 4, rounds=5)
    assert costs.index.name == "transform" and list(costs.index[:2]) == ["Slower", "Slow"]
    assert set(costs.index) == {"Slower", "Slow", "NoOp", "InvertImg", augment.REST}
    # 160 draws: 4 ms in 0.375 of them and 2 ms in 0.125, at least, since a sleep may take longer.
    assert costs.loc["Slower", "ms"] > 1.05 and costs.loc["Slow", "ms"] > 0.08
    assert costs.loc["InvertImg", "ms"] == 0 and costs["share"].sum() == pytest.approx(1)
    assert np.allclose(costs["share"], costs["ms"] / costs["ms"].sum()) and costs["ms"].is_monotonic_decreasing


def test_costs_draw_anew_for_each_image_and_round(monkeypatch):
    class Noting(augment.Augment):
        def __call__(self, image, seed):
            asked.append((image[0, 0], seed))
            return image

    asked = []
    monkeypatch.setattr(augment, "build", lambda name, height, width: Noting([A.NoOp()]))
    augment.costs("x", [np.full(SIZE, level, np.float32) for level in (0, 0.5, 1)], rounds=2)
    assert len({seed for _, seed in asked}) == len(asked) == 3 * 8 * (1 + 2)
    assert collections.Counter(level for level, _ in asked) == {0: 24, 0.5: 24, 1: 24}


def test_costs_name_every_transform_of_a_pipeline():
    costs = augment.costs("heavy", [picture(seed=n) for n in range(2)], rounds=1)
    assert set(costs.index) == {"FlipsAndWarp", "RandomBrightnessContrast", "CoarseDropout", augment.REST}
    assert (costs["ms"] > 0).all()
    assert augment.costs("none", [picture()]).empty and list(augment.costs("none", [picture()])) == ["ms", "share"]
    with pytest.raises(ValueError, match="no images"):
        augment.costs("heavy", [])
    with pytest.raises(ValueError, match="0 rounds"):
        augment.costs("heavy", [picture()], rounds=0)
    with pytest.raises(ValueError, match="built for images of"):
        augment.costs("heavy", [picture(), picture((8, 8))])


def test_elastic_moves_a_pixel_by_about_a_hundredth_of_the_width():
    for shape in ((96, 64), (512, 256)):
        elastic = next(s for s in steps_of(augment._first_place(*shape)) if isinstance(s, A.ElasticTransform))
        elastic.p = 1
        columns = np.tile(np.linspace(0.25, 0.75, shape[1], dtype=np.float32), (shape[0], 1))
        inner = np.s_[shape[0] // 8 : -shape[0] // 8, shape[1] // 8 : -shape[1] // 8]  # beyond the edge is black
        moved = [augment.Augment([elastic])(columns, seed) - columns for seed in range(5)]
        pixels = np.std([off[inner] for off in moved]) / (0.5 / (shape[1] - 1))
        assert 0.006 < pixels / shape[1] < 0.014


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
