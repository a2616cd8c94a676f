"""rsnakit.crop on drawn frames whose breast is known."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from rsnakit.crop import breast_is_right, find_breast
from rsnakit.phantom import draw_breast
from rsnakit.preprocess import PreprocessConfig, prepare_display

HEIGHT, WIDTH = 640, 480
Y, X = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
Box = tuple[int, int, int, int]


def ellipse(middle: float = 300, half: float = 220, breadth: float = 250) -> np.ndarray:
    """(H, W) bool, a half ellipse at the left edge."""
    return ((Y - middle) / half) ** 2 + (X / breadth) ** 2 <= 1


def box_of(mask: np.ndarray) -> Box:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    sides = [min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
    shared = max(0, sides[0]) * max(0, sides[1])
    return shared / (sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - shared)


def mirrored(box: Box, width: int) -> Box:
    return box[0], width - box[3], box[2], width - box[1]


def frame(mask: np.ndarray, background: float = 0.0, noise: float = 0.005) -> np.ndarray:
    """Display values: a breast that thins out towards its skin, on a background with a little noise."""
    depth = np.clip(1 - np.hypot((Y - 300) / 220, X / 250), 0, 1)
    shades = background + (1 - background) * mask * (0.25 + 0.5 * np.sqrt(depth))
    noisy = shades + np.random.default_rng(0).normal(0, noise, shades.shape)
    return np.clip(noisy, 0, 1).astype(np.float32)


def with_label(display: np.ndarray, left: int, top: int) -> np.ndarray:
    """A white box of 90 x 40 with 'R CC' in it, black."""
    picture = Image.fromarray(display.copy())
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left, top, left + 89, top + 39), fill=1.0)
    draw.text((left + 12, top + 8), "R CC", 0.0, ImageFont.load_default(24))
    return np.asarray(picture)


@pytest.mark.parametrize(
    ("left", "top"),
    [(380, 10), (380, 590), (248, 280), (150, 498), (140, 40)],
    ids=["far corner", "lower corner", "touching the nipple", "touching below", "touching above"],
)
@pytest.mark.parametrize("flip", [False, True])
def test_label_is_left_out(left, top, flip):  # P01
    mask = ellipse()
    display = with_label(frame(mask), left, top)
    expected = box_of(mask)
    if flip:
        display, expected = np.ascontiguousarray(display[:, ::-1]), mirrored(expected, WIDTH)
    found = find_breast(display)
    assert overlap(found, expected) > 0.95
    assert breast_is_right(display) == flip


@pytest.mark.parametrize("size", [(640, 480), (601, 477), (1333, 1011)])
def test_left_and_right_breasts_mirror_each_other(size):  # P01
    for seed, view in enumerate(("CC", "MLO")):
        pixels, _ = draw_breast(np.random.default_rng(seed), size, view)
        left = (pixels / 4095).astype(np.float32)
        right = np.ascontiguousarray(left[:, ::-1])
        assert not breast_is_right(left) and breast_is_right(right)
        config = PreprocessConfig(height=128, width=64)
        one, other = prepare_display(left, config), prepare_display(right, config)
        np.testing.assert_array_equal(one.image, other.image)
        assert other.box == mirrored(one.box, size[1])
        assert (one.flipped, other.flipped) == (False, True)
        found = np.array(find_breast(right))  # by itself it may round the other way
        assert np.abs(found - mirrored(find_breast(left), size[1])).max() <= np.ceil(max(size) / 256)


@pytest.mark.parametrize(("half", "breadth"), [(130, 70), (90, 120)])
def test_small_breast_wins_over_a_brighter_label(half, breadth):  # P01
    mask = ellipse(half=half, breadth=breadth)
    display = with_label(np.where(mask, 0.4, 0.0).astype(np.float32), 380, 10)
    assert overlap(find_breast(display), box_of(mask)) > 0.95
    assert not breast_is_right(display)


def test_boxes_of_drawn_breasts():
    found = {}
    for seed in range(60):
        view, side, density = ("CC", "MLO")[seed % 2], "LR"[seed // 2 % 2], "ABCD"[seed // 4 % 4]
        pixels, mask = draw_breast(np.random.default_rng(seed), (HEIGHT, WIDTH), view, side, density)
        display = (pixels / 4095).astype(np.float32)
        assert breast_is_right(display) == (side == "R")
        found[seed, view, side, density] = overlap(find_breast(display), box_of(mask))
    poor = {name: value for name, value in found.items() if value <= 0.95}
    assert len(poor) <= 3, poor


def test_white_frame_is_no_breast():
    mask = ellipse() & (X >= 12)
    display = frame(mask)
    display[:12] = display[-12:] = 1
    display[:, :12] = display[:, -12:] = 1
    assert overlap(find_breast(display), box_of(mask)) > 0.95
    assert not breast_is_right(display) and breast_is_right(np.ascontiguousarray(display[:, ::-1]))


@pytest.mark.parametrize("background", [0.1, 0.3, 0.6])
def test_high_background(background):
    mask = ellipse()
    assert overlap(find_breast(frame(mask, background, noise=0.01)), box_of(mask)) > 0.95


@pytest.mark.parametrize("width", [3, 12])
def test_bright_stripe_across_the_background_is_no_breast(width):
    mask = ellipse()
    display = frame(mask)
    display[:, 420 : 420 + width] = 0.9
    assert overlap(find_breast(display), box_of(mask)) > 0.95
    display = frame(mask)
    display[600 : 600 + width] = 0.9  # from the chest wall to the other edge
    assert overlap(find_breast(display), box_of(mask)) > 0.95
    assert not breast_is_right(display)


def test_breast_that_leaves_the_frame_above_and_below():
    mask = ellipse(middle=320, half=500)
    assert overlap(find_breast(frame(mask)), (0, 0, HEIGHT, 250)) > 0.95


def test_breast_that_fills_the_frame():
    display = np.full((HEIGHT, WIDTH), 0.6, np.float32) + 0.2 * np.sin(X / 40) * np.cos(Y / 50)
    assert overlap(find_breast(display.astype(np.float32)), (0, 0, HEIGHT, WIDTH)) > 0.95


def test_breast_cut_loose_from_the_edge():
    mask = ellipse()
    mask, display = np.roll(mask, 60, axis=1), np.roll(frame(ellipse()), 60, axis=1)
    assert overlap(find_breast(display), box_of(mask)) > 0.95
    assert not breast_is_right(display) and breast_is_right(np.ascontiguousarray(display[:, ::-1]))


@pytest.mark.parametrize("shade", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (8, 8), (1, 50), (50, 1), (1, 1)])
def test_frame_of_one_shade_is_returned_whole(shade, size):
    display = np.full(size, shade, np.float32)
    assert find_breast(display) == (0, 0, *size)
    assert not breast_is_right(display)


@pytest.mark.parametrize("size", [(8, 8), (1, 50), (50, 1), (3, 2), (5, 4000), (300, 200)])
def test_noise_gives_a_box_inside_the_frame(size):
    for seed in range(5):
        display = np.random.default_rng(seed).random(size, dtype=np.float32)
        top, left, bottom, right = find_breast(display)
        assert 0 <= top < bottom <= size[0] and 0 <= left < right <= size[1]
        assert isinstance(breast_is_right(display), bool)


def test_bright_specks_do_not_widen_the_box():
    mask = ellipse()
    display = frame(mask)
    rows, columns = np.random.default_rng(1).integers(0, (HEIGHT, WIDTH), (300, 2)).T
    display[rows, columns] = 1
    assert overlap(find_breast(display), box_of(mask)) > 0.95
