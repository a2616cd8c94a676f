"""rsnakit.crop on drawn frames whose breast is known."""

import dicom_files
import numpy as np
import pytest
from frames import ODDITIES, box_of, iou, made_frame, mirrored
from PIL import Image, ImageDraw, ImageFont

from rsnakit.crop import find_breast, locate_breast, shrink
from rsnakit.machines import MACHINES, finish
from rsnakit.phantom import draw_breast
from rsnakit.prepare import PreprocessConfig, prepare

HEIGHT, WIDTH = 640, 480
Y, X = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)


def ellipse(middle: float = 300, half: float = 220, breadth: float = 250) -> np.ndarray:
    """(H, W) bool, a half ellipse at the left edge."""
    return ((Y - middle) / half) ** 2 + (X / breadth) ** 2 <= 1


def frame(mask: np.ndarray, background: float = 0.0, noise: float = 0.005) -> np.ndarray:
    """Display values: a breast that thins out towards its skin, on a background with a little noise."""
    depth = np.clip(1 - np.hypot((Y - 300) / 220, X / 250), 0, 1)
    shades = background + (1 - background) * mask * (0.25 + 0.5 * np.sqrt(depth))
    noisy = shades + np.random.default_rng(0).normal(0, noise, shades.shape)
    return np.clip(noisy, 0, 1).astype(np.float32)


def is_right(display: np.ndarray) -> bool:
    return locate_breast(shrink(display), display.shape).is_right


def flipped(display: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(display[:, ::-1])


def with_label(display: np.ndarray, left: int, top: int) -> np.ndarray:
    """A white box of 90 x 40 with 'R CC' in it, black."""
    picture = Image.fromarray(display.copy())
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left, top, left + 89, top + 39), fill=1.0)
    draw.text((left + 12, top + 8), "R CC", 0.0, ImageFont.load_default(24))
    return np.asarray(picture)


# Made frames with the oddities of real ones


@pytest.fixture(scope="module")
def made():
    """120 frames, each oddity four times: seed, display, box, side, oddity."""
    return [(seed, *made_frame(seed)) for seed in range(120)]


def poor(frames) -> tuple[int, list]:
    """How many frames there are, and those whose box or side isn't right: seed, oddity, IoU, side."""
    count, found = 0, []
    for seed, display, box, side, oddity in frames:
        breast = locate_breast(shrink(display), display.shape)
        overlap, count = iou(breast.box, box), count + 1
        if overlap <= 0.95 or side not in (None, breast.is_right):
            found.append((seed, oddity, round(overlap, 3), "side" if side not in (None, breast.is_right) else ""))
    return count, found


def test_boxes_of_120_made_frames(made):
    count, found = poor(made)
    assert {oddity for *_, oddity in made} == set(ODDITIES)
    assert len(found) <= 0.01 * count, found


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 20_000])
def test_boxes_of_1000_made_frames(first):
    count, found = poor((seed, *made_frame(seed)) for seed in range(first, first + 1000))
    assert len(found) <= 0.01 * count, found


def test_left_and_right_mirror_each_other_exactly(made):  # P01
    widths = set()
    for seed, display, _, side, oddity in made:
        one, other = (locate_breast(shrink(view), view.shape) for view in (display, flipped(display)))
        assert other.box == mirrored(one.box, display.shape[1]), (seed, oddity)
        assert side is None or one.is_right != other.is_right, (seed, oddity)
        widths.add(display.shape[1] % 2)
    assert widths == {0, 1}


def low_pass(pixels: np.ndarray) -> np.ndarray:
    """Half the size, as JPEG 2000's reversible 5/3 wavelet keeps it (ISO/IEC 15444-1, F.3), borders mirrored."""
    for axis in (0, 1):
        values = np.moveaxis(pixels, axis, 0)
        if len(values) % 2:
            values = np.concatenate([values, values[-2:-1]])
        even, odd = values[::2], values[1::2]
        detail = odd - (even + np.concatenate([even[1:], even[-1:]])) // 2
        pixels = np.moveaxis(even + (np.concatenate([detail[:1], detail[:-1]]) + detail + 2) // 4, 0, axis)
    return pixels


def test_a_wavelets_small_copy_does_as_well(made):
    overlaps = {}
    for seed, display, box, side, oddity in made[:60]:
        if max(display.shape) >= 512:
            small = np.rint(display * 4095).astype(int)
            while max(small.shape) >= 512:
                small = low_pass(small)
            breast = locate_breast(shrink((small / 4095).astype(np.float32)), display.shape)
            assert side in (None, breast.is_right)
            overlaps[seed, oddity] = iou(breast.box, box)
    assert len(overlaps) > 10
    assert min(overlaps.values()) > 0.95, overlaps


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int16, np.float32])
@pytest.mark.parametrize("size", [(640, 480), (601, 477), (300, 1999), (257, 1)])
def test_shrunk_copies_mirror_each_other_exactly(kind, size):
    pixels = np.random.default_rng(0).integers(0, 120, size).astype(kind)
    small = shrink(pixels)
    np.testing.assert_array_equal(shrink(flipped(pixels)), small[:, ::-1])
    assert small.dtype == kind and max(small.shape) == 256
    assert abs(small.mean(dtype=float) - pixels.mean(dtype=float)) < 1


@pytest.mark.parametrize("size", [(640, 480), (601, 477), (1333, 1011)])
def test_left_and_right_files_give_the_same_image(size, tmp_path):  # P01
    config = PreprocessConfig(height=128, width=64)
    for seed, view in enumerate(("CC", "MLO")):
        left, _ = draw_breast(np.random.default_rng(seed), size, view)
        paths = [tmp_path / f"{view}_{side}.dcm" for side in "LR"]
        one, other = (
            prepare(dicom_files.write(path, pixels), config)
            for path, pixels in zip(paths, (left, flipped(left)), strict=True)
        )
        np.testing.assert_array_equal(one.image, other.image)
        assert other.box == mirrored(one.box, size[1])
        assert (one.flipped, other.flipped) == (False, True)


# One thing at a time


@pytest.mark.parametrize("oddity", ["high_background", "bright_stripe", "white_frame"])
@pytest.mark.parametrize("number", MACHINES)
def test_oddities_of_the_demo(oddity, number):
    rng = np.random.default_rng(number)
    view, side, density = str(rng.choice(["CC", "MLO"])), str(rng.choice(["L", "R"])), str(rng.choice([*"ABCD"]))
    pixels, mask = draw_breast(rng, (HEIGHT, WIDTH), view, side, density)
    row = {"oddity": oddity, "laterality": side, "view": view, "letters": True}
    display = finish(rng, pixels, mask, row, MACHINES[number]).astype(np.float32) / 4095
    if oddity == "white_frame":
        border = HEIGHT // 50
        mask[:border] = mask[-border:] = mask[:, :border] = mask[:, -border:] = False
    assert iou(find_breast(display), box_of(mask)) > 0.95
    assert is_right(display) == (side == "R")


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
        display, expected = flipped(display), mirrored(expected, WIDTH)
    assert iou(find_breast(display), expected) > 0.95
    assert is_right(display) == flip


@pytest.mark.parametrize(("half", "breadth"), [(130, 70), (90, 120)])
def test_small_breast_wins_over_a_brighter_label(half, breadth):  # P01
    mask = ellipse(half=half, breadth=breadth)
    display = with_label(np.where(mask, 0.4, 0.0).astype(np.float32), 380, 10)
    assert iou(find_breast(display), box_of(mask)) > 0.95
    assert not is_right(display)


def test_white_frame_is_no_breast():
    mask = ellipse() & (X >= 12)
    display = frame(mask)
    display[:12] = display[-12:] = 1
    display[:, :12] = display[:, -12:] = 1
    assert iou(find_breast(display), box_of(mask)) > 0.95
    assert not is_right(display) and is_right(flipped(display))


@pytest.mark.parametrize("background", [0.1, 0.3, 0.6])
def test_high_background(background):
    mask = ellipse()
    assert iou(find_breast(frame(mask, background, noise=0.01)), box_of(mask)) > 0.95


@pytest.mark.parametrize("width", [3, 12])
def test_bright_stripe_across_the_background_is_no_breast(width):
    mask = ellipse()
    display = frame(mask)
    display[:, 420 : 420 + width] = 0.9
    assert iou(find_breast(display), box_of(mask)) > 0.95
    display = frame(mask)
    display[600 : 600 + width] = 0.9  # from the chest wall to the other edge
    assert iou(find_breast(display), box_of(mask)) > 0.95
    assert not is_right(display)


@pytest.mark.parametrize("turned", [False, True])
def test_two_dark_gaps_do_not_cut_a_breast_in_pieces(turned):
    mask = ellipse()
    display = frame(mask)
    for place in (150, 175):
        display[(slice(None), slice(place, place + 8)) if turned else (slice(place, place + 8), slice(None))] = 0
    assert iou(find_breast(display), box_of(mask)) > 0.95


def test_breast_that_leaves_the_frame_above_and_below():
    mask = ellipse(middle=320, half=500)
    assert iou(find_breast(frame(mask)), (0, 0, HEIGHT, 250)) > 0.95


def test_breast_that_fills_the_frame():
    display = np.full((HEIGHT, WIDTH), 0.6, np.float32) + 0.2 * np.sin(X / 40) * np.cos(Y / 50)
    assert iou(find_breast(display.astype(np.float32)), (0, 0, HEIGHT, WIDTH)) > 0.95


def test_breast_cut_loose_from_the_edge():
    mask = np.roll(ellipse(), 60, axis=1)
    display = np.roll(frame(ellipse()), 60, axis=1)
    assert iou(find_breast(display), box_of(mask)) > 0.95
    assert not is_right(display) and is_right(flipped(display))


def test_breast_shown_all_in_white():
    mask = ellipse()
    assert iou(find_breast(mask.astype(np.float32)), box_of(mask)) > 0.95


def test_a_narrow_window_makes_no_difference():
    display = frame(ellipse(), noise=0)
    assert find_breast(display * np.float32(0.06)) == find_breast(display)  # 8-bit values under a 12-bit window


@pytest.mark.parametrize("shade", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (8, 8), (1, 50), (50, 1), (1, 1)])
def test_frame_of_one_shade_is_returned_whole(shade, size):
    display = np.full(size, shade, np.float32)
    assert find_breast(display) == (0, 0, *size)
    assert not is_right(display)


@pytest.mark.parametrize("size", [(8, 8), (1, 50), (50, 1), (3, 2), (5, 4000), (300, 200)])
def test_noise_gives_a_box_inside_the_frame(size):
    for seed in range(5):
        display = np.random.default_rng(seed).random(size, dtype=np.float32)
        top, left, bottom, right = find_breast(display)
        assert 0 <= top < bottom <= size[0] and 0 <= left < right <= size[1]
        assert isinstance(is_right(display), bool)


def test_bright_specks_do_not_widen_the_box():
    mask = ellipse()
    display = frame(mask)
    rows, columns = np.random.default_rng(1).integers(0, (HEIGHT, WIDTH), (300, 2)).T
    display[rows, columns] = 1
    assert iou(find_breast(display), box_of(mask)) > 0.95
