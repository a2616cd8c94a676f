"""rsnakit.prepare on small files: one file to a cropped, resized image."""

import numpy as np
import pandas as pd
import pytest
from dicom_files import write
from phantoms import CONFIG, WHOLE, WINDOW, no_more_than_one_grey_level, phantom

from rsnakit.dicom import DicomError
from rsnakit.phantom import draw_breast
from rsnakit.prepare import GRID, BlankImage, PreprocessConfig, fit_and_pad, load_image, prepare
from rsnakit.preprocess import build_store


@pytest.mark.parametrize("window", ["first", "none"])
@pytest.mark.parametrize("elements", [WINDOW, {}, {"WindowCenter": 1500, "WindowWidth": 1800}], ids=str)
def test_monochrome1_is_prepared_like_monochrome2(tmp_path, window, elements):  # D01
    pixels = phantom()
    turned = dict(elements)
    if "WindowCenter" in turned:
        turned["WindowCenter"] = 4096 - turned["WindowCenter"]
    plain = write(tmp_path / "2.dcm", pixels, **elements)
    inverse = write(tmp_path / "1.dcm", 4095 - pixels, PhotometricInterpretation="MONOCHROME1", **turned)
    config = PreprocessConfig(height=64, width=32, window=window)
    one, other = load_image(plain, config), load_image(inverse, config)
    assert no_more_than_one_grey_level(one, other)
    assert np.median(one[:3, -8:]) < 400 < np.median(one[20:44, :8])  # background dark, breast bright

    table = pd.DataFrame({"patient_id": ["1", "1"], "image_id": ["2", "1"], "path": [plain, inverse]})
    for _ in range(2):  # made, and opened again
        images = build_store(table, config, tmp_path / "store", n_jobs=1, image_format="raw16")
        np.testing.assert_array_equal(images[0], one)
        np.testing.assert_array_equal(images[1], other)


def test_narrow_values_fill_the_range(tmp_path):  # D19
    values = 300 + (600 * (phantom() / phantom().max())).astype(np.uint16)
    image = load_image(write(tmp_path / "a.dcm", values), CONFIG)
    assert image.min() == 0 and image.max() > 0.7 * 4095  # averaging takes the peaks
    whole = load_image(tmp_path / "a.dcm", WHOLE)
    assert (whole.min(), whole.max()) == (0, 4095)


def test_values_are_the_display_values_in_12_bits(tmp_path):
    pixels = phantom()
    path = write(tmp_path / "a.dcm", pixels, **WINDOW)
    image = load_image(path, WHOLE)
    assert image.dtype == np.uint16 and image.shape == (200, 160)
    np.testing.assert_array_equal(image, pixels)  # this window maps 0..4095 to [0, 1]

    span = load_image(path, PreprocessConfig(height=200, width=160, crop=False, window="none"))
    stretched = (pixels.astype(float) - pixels.min()) / (int(pixels.max()) - int(pixels.min()))
    np.testing.assert_allclose(span, 4095 * stretched, atol=0.51)


@pytest.mark.parametrize("laterality", ["L", "R"])
def test_box_is_in_pixels_of_the_file_whatever_its_header_says_of_the_side(tmp_path, laterality):
    pixels, mask = draw_breast(np.random.default_rng(3), (200, 160), laterality=laterality)
    wrong = "R" if laterality == "L" else "L"
    path = write(tmp_path / "a.dcm", pixels, ImageLaterality=wrong, **WINDOW)
    prepared = prepare(path, PreprocessConfig(height=64, width=32, crop_margin=0.0))
    assert prepared.flipped == (laterality == "R")
    assert prepared.source_shape == (200, 160)
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    expected = np.array([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1])
    # Found to 3 pixels, and widened to the grid from there.
    outside = (np.array(prepared.box) - expected) * [-1, -1, 1, 1]
    assert (outside >= -3).all() and (outside < 3 + GRID).all()
    assert prepared.image[:, :8].mean() > 2 * prepared.image[:, -8:].mean()  # the chest wall is at the left


def test_margin_widens_the_box_within_the_frame(tmp_path):
    path = write(tmp_path / "a.dcm", phantom(3), **WINDOW)
    tight, wide, whole = (
        np.array(prepare(path, PreprocessConfig(height=64, width=32, crop_margin=share)).box) for share in (0, 0.1, 0.5)
    )
    height, width = tight[2] - tight[0], tight[3] - tight[1]
    expected = tight + np.round(0.1 * np.array([-height, -width, height, width]))
    np.testing.assert_allclose(wide, np.clip(expected, 0, [200, 160, 200, 160]), atol=GRID)  # both are on the grid
    assert (wide * [-1, -1, 1, 1] >= tight * [-1, -1, 1, 1]).all() and wide[0] < tight[0] and wide[2] > tight[2]
    assert whole[0] == whole[1] == 0 and whole[2] == 200


def test_box_is_on_a_grid_that_left_and_right_share(tmp_path):
    """So that it is the same box where the image was decoded at a half or a quarter of its size."""
    for seed in range(6):
        boxes = {}
        for laterality, pixels in (("L", phantom(seed)[:, :157]), ("R", phantom(seed)[:, 156::-1])):
            path = write(tmp_path / f"{seed}{laterality}.dcm", np.ascontiguousarray(pixels), **WINDOW)
            boxes[laterality] = prepare(path, CONFIG).box
        top, left, bottom, right = boxes["L"]
        assert boxes["R"] == (top, 157 - right, bottom, 157 - left)
        assert top % GRID == left % GRID == 0
        assert (bottom % GRID == 0 or bottom == 200) and (right % GRID == 0 or right == 157)


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (90, 40), (64, 32), (700, 60), (500, 250)])
def test_a_circle_stays_a_circle_and_padding_is_right_and_even(size):
    y, x = np.mgrid[: size[0], : size[1]]
    radius = 0.4 * min(size)
    circle = np.hypot(y - (size[0] - 1) / 2, x - (size[1] - 1) / 2) <= radius
    image = fit_and_pad(0.25 + 0.75 * circle.astype(np.float32), 128, 64)
    assert image.shape == (128, 64)
    seen = image > 0.25 * 1.01 + 0.37
    height, width = seen.any(axis=1).sum(), seen.any(axis=0).sum()
    scale = min(128 / size[0], 64 / size[1])
    assert abs(int(height) - int(width)) <= 1
    assert height == pytest.approx(2 * radius * scale, abs=1.5)

    inside = image > 0
    rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    assert columns[0] == 0 and len(columns) == round(size[1] * scale)
    assert len(rows) == round(size[0] * scale)
    assert abs(rows[0] - (127 - rows[-1])) <= 1


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (8, 8), (17, 3)])
def test_tiny_frames(tmp_path, size):
    pixels = np.arange(size[0] * size[1], dtype=np.uint16).reshape(size) * 20
    image = load_image(write(tmp_path / "a.dcm", pixels), CONFIG)
    assert image.shape == (64, 32) and image.max() > 2000


def test_blank_images_are_refused(tmp_path):  # D12
    black = write(tmp_path / "black.dcm", np.zeros((200, 160), np.uint16), **WINDOW)
    off = write(tmp_path / "off.dcm", phantom(), WindowCenter=9000, WindowWidth=100)
    for path, reason in ((black, "nearly every stored value is 0"), (off, "its window leaves nearly every pixel")):
        with pytest.raises(BlankImage, match=reason) as refused:
            load_image(path, CONFIG)
        assert refused.value.path == str(path)
    assert load_image(off, PreprocessConfig(height=64, width=32, window="none")).max() > 2000


def test_missing_file_is_a_dicom_error(tmp_path):
    with pytest.raises(DicomError, match=r"nowhere\.dcm"):
        load_image(tmp_path / "nowhere.dcm", CONFIG)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("height", 0, "from 16 to 4096"), ("window", "minmax", "'first', 'none'"), ("reduce", "nonsense", "'auto'"),
        ("reduce", 5, "from 0 to 2"), ("source", "jpg", "'dicom', 'png'"), ("crop_margin", 0.9, "0.5"),
    ],
)  # fmt: skip
def test_settings_made_in_python_are_checked_too(setting, value, expected):
    with pytest.raises(ValueError, match=f"{setting}: got {value!r}, expected .*{expected}"):
        PreprocessConfig(**{setting: value})
