"""rsnakit.prepare on JPEG 2000 that is decoded at a half or a quarter of its size."""

import functools
from pathlib import Path

import cv2
import numpy as np
import pytest
from dicom_files import j2k, jpeg_lossless, write
from phantoms import CONFIG, WINDOW
from pydicom import uid

from rsnakit import dicom
from rsnakit.phantom import draw_breast
from rsnakit.prepare import BlankImage, PreprocessConfig, load_image, prepare, preview

LARGE = (800, 640)


@functools.lru_cache
def large(laterality: str = "L") -> np.ndarray:
    """12 bits, a breast on black, of a size that allows for two halvings."""
    return draw_breast(np.random.default_rng(5), LARGE, laterality=laterality)[0]


def in_both_codings(folder: Path, pixels: np.ndarray) -> tuple[Path, Path]:
    """The same image as JPEG 2000 and as JPEG Lossless, which cannot be decoded at reduced size."""
    one = write(folder / "j2k.dcm", pixels, j2k(12), uid.JPEG2000Lossless, **WINDOW)
    return one, write(folder / "jpll.dcm", pixels, jpeg_lossless(12), uid.JPEGLosslessSV1, **WINDOW)


@pytest.mark.parametrize(
    ("size", "setting", "expected"),
    [
        ((400, 320), "auto", 1), ((401, 320), "auto", 1), ((401, 321), "auto", 0), ((200, 160), "auto", 2),
        ((200, 161), "auto", 2), ((400, 80), "auto", 2), ((100, 80), "auto", 2), ((1600, 1280), "auto", 0),
        ((100, 80), 0, 0), ((100, 80), 1, 1), ((400, 320), 2, 2), ((100, 80), 2, 2),
    ],
)  # fmt: skip
def test_reduction_is_the_largest_that_the_output_does_not_outgrow(tmp_path, size, setting, expected):
    config = PreprocessConfig(height=size[0], width=size[1], crop=False, reduce=setting)
    one, other = in_both_codings(tmp_path, large())
    prepared = prepare(one, config)
    assert prepared.reduce == expected and prepare(other, config).reduce == 0
    assert prepared.box == (0, 0, *LARGE) and prepared.source_shape == LARGE and prepared.image.shape == size


def test_what_is_trained_on_png_decodes_dicom_whole(tmp_path):  # D07
    """A PNG holds the whole image, so inference must not see another one of the DICOM file."""
    path, _ = in_both_codings(tmp_path, large())
    config = PreprocessConfig(height=100, width=80, source="png")
    prepared = prepare(path, config)
    assert prepared.reduce == 0
    cv2.imwrite(str(tmp_path / "a.png"), large() * 16 + large() // 256)
    assert np.abs(load_image(tmp_path / "a.png", config).astype(int) - prepared.image).max() <= 1


def test_without_reduction_all_codings_are_alike(tmp_path):
    config = PreprocessConfig(height=96, width=64, reduce=0)
    one, other = (prepare(path, config) for path in in_both_codings(tmp_path, large()))
    np.testing.assert_array_equal(one.image, other.image)
    assert one.box == other.box


@pytest.mark.parametrize("reduce", [1, 2])
def test_reduction_smooths_a_little_differently(tmp_path, reduce):
    """Against means of the stored values, that NumPy takes: a wavelet's low-pass lies near them, half a pixel aside."""
    step = 2**reduce
    config = PreprocessConfig(height=LARGE[0] // step, width=LARGE[1] // step, crop=False, reduce=reduce)
    image = load_image(in_both_codings(tmp_path, large())[0], config).astype(float)
    means = large().reshape(LARGE[0] // step, step, LARGE[1] // step, step).mean(axis=(1, 3))
    error = np.abs(image - means) * 255 / 4095
    assert 0 < error.mean() < 1.5 and np.percentile(error, 99) < 12


@pytest.mark.parametrize("laterality", ["L", "R"])
def test_reduction_leaves_box_and_side_nearly_where_they_are(tmp_path, laterality):
    one, other = in_both_codings(tmp_path, large(laterality))
    config = PreprocessConfig(height=128, width=64)
    reduced, whole = prepare(one, config), prepare(other, config)
    assert reduced.reduce >= 1 and reduced.flipped == whole.flipped == (laterality == "R")
    assert np.abs(np.subtract(reduced.box, whole.box)).max() <= 8  # two steps of the grid; a pixel of the search is 3
    for top, left, bottom, right in (reduced.box, whole.box):
        assert top % 4 == 0 and left % 4 == 0 and bottom % 4 == 0 and right % 4 == 0


def test_blank_jpeg_2000_is_refused_before_it_is_decoded_whole(tmp_path, monkeypatch):  # D12
    path = write(tmp_path / "a.dcm", np.zeros((2048, 1024), np.uint16), j2k(12), uid.JPEG2000Lossless, **WINDOW)
    decoded, decode = [], dicom.Encoded.decode
    monkeypatch.setattr(dicom.Encoded, "decode", lambda self, n=0: decoded.append(n) or decode(self, n))
    with pytest.raises(BlankImage, match="nearly every stored value is 0"):
        load_image(path, PreprocessConfig(height=1024, width=512))
    assert decoded == [3]


def test_preview_is_the_whole_frame_in_small(tmp_path):
    for path in in_both_codings(tmp_path, large()):
        small = preview(path, CONFIG, side=200)
        assert small.shape == (200, 160) and small.dtype == np.float32
        means = large().reshape(200, 4, 160, 4).mean(axis=(1, 3)) / 4095
        assert np.abs(small - means).mean() < 0.01
