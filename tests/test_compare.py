"""rsnakit.compare: what a store's format and reduced decoding do, on a file where it is known."""

import numpy as np
import pytest
from dicom_files import j2k, jpeg_lossless, write
from pydicom import uid

from rsnakit import compare
from rsnakit.preprocess import PreprocessConfig, load_image

CONFIG = PreprocessConfig(height=64, width=48, crop=False)


@pytest.fixture
def noise() -> np.ndarray:
    """(256, 192), 12 bits, half of it black."""
    pixels = np.random.default_rng(0).integers(0, 4096, (256, 192)).astype(np.uint16)
    pixels[:, 96:] = 0
    return pixels


def test_variants_are_the_image_and_what_becomes_of_it(tmp_path, noise):
    window = {"WindowCenter": 2048, "WindowWidth": 4096}
    path = write(tmp_path / "a.dcm", noise, j2k(12), uid.JPEG2000Lossless, **window)
    exact, others = compare.variants(path, CONFIG, "png8")
    np.testing.assert_array_equal(exact, load_image(path, PreprocessConfig(height=64, width=48, crop=False, reduce=0)))
    assert list(others) == ["decoded at 1/4", "png8"]
    np.testing.assert_array_equal(others["decoded at 1/4"].image, load_image(path, CONFIG))
    np.testing.assert_array_equal(others["png8"].image, np.rint(np.rint(exact / 4095 * 255) / 255 * 4095))

    same = write(tmp_path / "b.dcm", noise, jpeg_lossless(12), uid.JPEGLosslessSV1, **window)
    assert list(compare.variants(same, CONFIG, "raw16")[1]) == ["raw16"]


def test_differences_are_those_of_the_pixels(tmp_path, noise):
    path = write(tmp_path / "a.dcm", noise, j2k(12), uid.JPEG2000Lossless)
    exact, others = compare.variants(path, CONFIG, "png8")
    table = compare.differences([path], CONFIG, "png8")
    assert table.index.tolist() == [("a", "decoded at 1/4"), ("a", "png8")]
    for (_, name), row in table.iterrows():
        error = np.abs(others[name].image - exact.astype(float))
        assert row["off by, mean"] == pytest.approx(error.mean(), abs=0.01)
        assert row["crop moved, source pixels"] == 0
        assert row["largest"] == error.max() > 0
        assert row["pixels as they were, %"] == pytest.approx(100 * (error == 0).mean(), abs=0.01)
    assert (compare.differences([path], CONFIG, "raw16").loc[("a", "raw16"), "largest"]) == 0
