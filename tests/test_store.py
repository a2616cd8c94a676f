"""rsnakit.blocks and rsnakit.store: what comes back, and what is refused."""

import json
import multiprocessing
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rsnakit import store
from rsnakit.store import INDEX_COLUMNS, Store, StoreError, dequantize_blocks, quantize_blocks

SETTINGS = {"height": 40, "width": 24, "window": "first", "crop": True, "crop_margin": 0.02}
SHAPE = (40, 24)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=14)


def blocks_of(x: np.ndarray, block: int) -> list[np.ndarray]:
    flat = x.reshape(-1)
    return [flat[i : i + block] for i in range(0, flat.size, block)]


def round_trip(x: np.ndarray, block: int = 32) -> np.ndarray:
    packed = quantize_blocks(x, block)
    assert packed.codes.dtype == np.uint8 and packed.codes.shape == (-(-x.size // block), block)
    assert packed.low.shape == packed.step.shape == (len(packed.codes),)
    assert np.isfinite(packed.low).all() and np.isfinite(packed.step).all()
    back = dequantize_blocks(packed)
    assert back.shape == x.shape and back.dtype == x.dtype
    return back


def integers(dtype: type, low: int, high: int) -> st.SearchStrategy:
    return hnp.arrays(dtype, SHAPES, elements=st.integers(low, high))


# Quantisation


@settings(deadline=None, max_examples=150)
@given(
    x=st.one_of(
        integers(np.uint16, 0, 65535),
        integers(np.uint16, 3000, 3400),
        integers(np.uint8, 0, 255),
        integers(np.int8, 0, 127),
        integers(np.int64, 0, 65535),
        integers(np.int32, 100, 420),
        integers(np.uint64, 0, 65535),
    ),
    block=st.sampled_from([1, 32, 64]),
)
def test_integers_are_exact_or_within_half_a_step(x, block):  # A06
    back = round_trip(x, block)
    for before, after in zip(blocks_of(x, block), blocks_of(back, block), strict=True):
        before, after = before.astype(np.int64), after.astype(np.int64)
        span = before.max() - before.min()
        error = np.abs(before - after).max()
        assert error <= -(-span // 255) / 2
        if span <= 255:
            assert error == 0


@settings(deadline=None, max_examples=150)
@given(
    x=st.one_of(
        hnp.arrays(np.float32, SHAPES, elements=st.floats(-(2.0**126), 2.0**126, width=32)),
        hnp.arrays(np.float32, SHAPES, elements=st.floats(-(2.0**-140), 2.0**-140, width=32)),
        hnp.arrays(np.float64, SHAPES, elements=st.floats(-1e30, 1e30)),
        hnp.arrays(np.float64, SHAPES, elements=st.floats(1.0, 1.0 + 1e-9)),
        hnp.arrays(np.float16, SHAPES, elements=st.floats(-60000, 60000, width=16)),
    )
)
def test_floats_are_within_half_a_step(x):  # A06
    packed = quantize_blocks(x, 64)
    back = round_trip(x, 64)
    for before, after, step in zip(blocks_of(x, 64), blocks_of(back, 64), packed.step, strict=True):
        # half a step, and what the array's own type rounds the answer by
        allowed = step.astype(np.float64) * (0.5 + 1e-6) + np.spacing(np.abs(before).max()).astype(np.float64)
        assert np.abs(before.astype(np.float64) - after.astype(np.float64)).max() <= allowed
        # the step is a 255th of the span, but for float32's rounding of step and minimum
        span = float(before.max()) - float(before.min())
        assert step <= span / 255 * (1 + 1e-6) + np.spacing(np.float32(np.abs(before).max())) / 100 + 2e-45


@settings(deadline=None, max_examples=60)
@given(value=st.floats(allow_nan=False, allow_infinity=False, width=32), size=st.integers(1, 200))
def test_constant_floats_come_back_exactly(value, size):  # A06
    for dtype in (np.float32, np.float64):
        x = np.full(size, value, dtype)
        np.testing.assert_array_equal(round_trip(x, 64), x)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8, np.uint16, np.int64])
@pytest.mark.parametrize("value", [0, 9, -9])
def test_constant_blocks(value, dtype):  # A06
    x = np.full((7, 33), value, np.int64).astype(dtype) if value >= 0 or np.dtype(dtype).kind != "u" else None
    if x is None or (value < 0 and np.dtype(dtype).kind == "i"):
        with pytest.raises(ValueError, match="-9"):
            quantize_blocks(np.full((7, 33), value))
        return
    np.testing.assert_array_equal(round_trip(x), x)


def test_spike_among_zeros():  # A06
    x = np.zeros(96, np.float32)
    x[40] = 1000
    packed = quantize_blocks(x)
    np.testing.assert_allclose(packed.step, [0, 1000 / 255, 0], rtol=1e-6)
    back = dequantize_blocks(packed)
    assert (back[x == 0] == 0).all() and back[40] == pytest.approx(1000, rel=1e-6)

    whole = np.zeros(96, np.uint16)
    whole[40], whole[41] = 65535, 128
    packed = quantize_blocks(whole)
    assert packed.step.tolist() == [1, 257, 1]
    back = dequantize_blocks(packed)
    assert back[40] == 65535 and abs(int(back[41]) - 128) <= 128 and not back[whole == 0].any()


@pytest.mark.parametrize(
    ("bad", "named"), [(np.nan, "a NaN at flat position 37"), (np.inf, "an infinity at"), (-np.inf, "an infinity at")]
)
def test_what_is_not_finite_is_refused_by_name(bad, named):  # A06
    x = np.zeros(100, np.float32)
    x[37] = bad
    with pytest.raises(ValueError, match=named):
        quantize_blocks(x)


@pytest.mark.parametrize(
    ("x", "error", "named"),
    [
        (np.array([3, -1]), ValueError, "-1 to 3"),
        (np.array([65536, 70000]), ValueError, "65536 to 70000"),
        (np.array([-1], np.int8), ValueError, "-1"),
        (np.array([1e300, 0]), ValueError, "float32"),
        (np.array([1e300]), ValueError, "float32"),
        (np.array([True]), TypeError, "bool"),
        (np.array([1j]), TypeError, "complex"),
        (np.array(["a"]), TypeError, "U1"),
    ],
)
def test_values_out_of_range_and_other_types_are_refused(x, error, named):
    with pytest.raises(error, match=named):
        quantize_blocks(x)


@pytest.mark.parametrize(("dtype", "block"), [(np.uint16, 32), (np.float32, 64)])
def test_nine_bits_a_value(dtype, block):
    packed = quantize_blocks(np.arange(64 * 96).reshape(64, 96).astype(dtype), block)
    assert 8 * (packed.codes.nbytes + packed.low.nbytes + packed.step.nbytes) == 9 * 64 * 96


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7, 3)])
def test_any_shape(shape):
    for dtype in (np.uint16, np.float32):
        x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        back = round_trip(x)
        np.testing.assert_allclose(back, x, atol=0.2)


def test_array_that_is_not_contiguous():
    x = np.arange(4000, dtype=np.uint16).reshape(50, 80)[::-1, ::3].T
    np.testing.assert_allclose(round_trip(x).astype(int), x, atol=8)


# Stores


def picture(seed: int) -> np.ndarray:
    """(40, 24) uint16, smooth with noise, up to 4095."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 3800, SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    image = np.clip(ramp + rng.normal(0, 150, SHAPE), 0, 4095).astype(np.uint16)
    image[0, :5] = 0, 4095, 1, 4094, 2048
    return image


def row(number: int, image_id: str, status: str = "ok", reason: str = "") -> dict:
    zeros = dict.fromkeys(INDEX_COLUMNS, 0)
    return {**zeros, "row": number, "patient_id": "007", "image_id": image_id, "status": status, "reason": reason,
            "flipped": number % 2 == 1}  # fmt: skip


def make(path, image_format="raw16", numbers=(0, 1, 2)):
    """A store of pictures; image 1 has failed."""
    index = store.open_for_writing(path, SETTINGS, image_format, SHAPE, {"rsnakit": "0"})
    assert len(index) == 0
    for number in numbers:
        if number == 1:
            store.append_index(path, [row(1, "0101", "failed", 'a.dcm: cut, "short"')])
        else:
            store.write_record(path, number, store.encode_record(picture(number), image_format))
            store.append_index(path, [row(number, f"010{number}")])
    return path


def test_raw16_comes_back_exactly(tmp_path):
    opened = Store(make(tmp_path))
    assert len(opened) == 3 and opened.shape == SHAPE
    for number in (0, 2):
        assert type(opened[number]) is np.ndarray and opened[number].dtype == np.uint16
        np.testing.assert_array_equal(opened[number], picture(number))
    assert opened.index["image_id"].tolist() == ["0100", "0101", "0102"]
    assert opened.index["patient_id"].tolist() == ["007"] * 3
    assert opened.index["flipped"].tolist() == [False, True, False]
    assert opened.index["reason"].tolist() == ["", 'a.dcm: cut, "short"', ""]
    assert opened.manifest["preprocess"] == SETTINGS and opened.manifest["format"] == "raw16"
    opened[0][:] = 0  # what is given out is a copy
    np.testing.assert_array_equal(opened[0], picture(0))


def test_block8_is_within_half_a_step_and_never_above_12_bits(tmp_path):
    opened = Store(make(tmp_path, "block8"))
    assert (tmp_path / "images.bin").stat().st_size == 3 * SHAPE[0] * SHAPE[1] * 9 // 8
    for number in (0, 2):
        before, after = picture(number).astype(int), opened[number].astype(int)
        assert after.max() <= 4095
        for one, other in zip(blocks_of(before, 32), blocks_of(after, 32), strict=True):
            assert np.abs(one - other).max() <= -(-(one.max() - one.min()) // 255) / 2


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_image_that_does_not_fill_its_last_block(tmp_path, image_format):
    image = np.arange(35, dtype=np.uint16).reshape(5, 7)
    store.open_for_writing(tmp_path, SETTINGS, image_format, (5, 7), {})
    for number in (1, 0):
        store.write_record(tmp_path, number, store.encode_record(image + number, image_format))
    store.append_index(tmp_path, [row(0, "a"), row(1, "b")])
    opened = Store(tmp_path)
    np.testing.assert_array_equal(opened[0], image)
    np.testing.assert_array_equal(opened[1], image + 1)


def test_image_without_pixels_is_refused_by_name(tmp_path):
    opened = Store(make(tmp_path))
    with pytest.raises(StoreError, match=r"0101.*failed.*a\.dcm: cut"):
        opened[1]
    for outside in (3, -1):
        with pytest.raises(IndexError, match=str(outside)):
            opened[outside]


def test_rows_of_finds_images_and_names_what_is_missing(tmp_path):
    opened = Store(make(tmp_path))
    assert opened.rows_of(["0102", "0100"]).tolist() == [2, 0]
    with pytest.raises(StoreError, match=r"2 of 3 images.*'101'.*'9'"):
        opened.rows_of(["101", "0100", "9"])


def test_rows_of_an_unfinished_store_are_not_mixed_up(tmp_path):
    """A kill in the middle leaves gaps, since processes finish out of turn."""
    opened = Store(make(tmp_path, numbers=(6, 2)))
    assert opened.rows_of(["0106", "0102"]).tolist() == [1, 0]
    for number in (2, 6):
        image = opened[int(opened.rows_of([f"010{number}"])[0])]
        np.testing.assert_array_equal(image, picture(number))


def _sums(opened: Store, rows: list[int]) -> list[int]:
    return [int(opened[number].sum()) for number in rows]


def test_goes_to_workers_without_its_images(tmp_path):
    opened = Store(make(tmp_path))
    expected = [int(picture(number).sum()) for number in (0, 2)]
    assert _sums(opened, [0, 2]) == expected  # the map is open now
    assert len(pickle.dumps(opened)) < 8000 < (tmp_path / "images.bin").stat().st_size * 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sums, (opened, [0, 2])) == expected


def test_line_that_a_kill_cut_short_does_not_count(tmp_path):  # C01
    make(tmp_path)
    whole = (tmp_path / "index.csv").read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for end in (last + 1, last + 10, len(whole) - 1):
        (tmp_path / "index.csv").write_bytes(whole[:end])
        assert Store(tmp_path).index["image_id"].tolist() == ["0100", "0101"]
    index = store.open_for_writing(tmp_path, SETTINGS, "raw16", SHAPE, {})
    assert index["row"].tolist() == [0, 1]
    store.append_index(tmp_path, [row(2, "0102")])
    assert (tmp_path / "index.csv").read_bytes() == whole


def test_later_line_of_a_row_wins(tmp_path):
    make(tmp_path)
    store.write_record(tmp_path, 1, store.encode_record(picture(1), "raw16"))
    store.append_index(tmp_path, [row(1, "0101")])
    for _ in range(2):  # and when the index is written anew
        opened = Store(tmp_path)
        assert opened.index["status"].tolist() == ["ok"] * 3 and opened.index["row"].tolist() == [0, 1, 2]
        np.testing.assert_array_equal(opened[1], picture(1))
        store.open_for_writing(tmp_path, SETTINGS, "raw16", SHAPE, {})


@pytest.mark.parametrize(
    ("name", "value"), [("height", 64), ("window", "none"), ("crop_margin", 0.1), ("crop", False), ("format", "block8")]
)
def test_other_settings_are_refused_with_both_values(tmp_path, name, value):  # P03
    make(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wanted = {**SETTINGS, "format": "raw16", name: value}
    old = {**SETTINGS, "format": "raw16"}[name]
    with pytest.raises(StoreError) as refused:
        store.open_for_writing(tmp_path, {k: wanted[k] for k in SETTINGS}, wanted["format"], SHAPE, {})
    assert f"other settings: {name} is {old!r} in the store and {value!r} now." in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_setting_that_only_one_side_knows_is_refused(tmp_path):  # P03
    make(tmp_path)
    manifest = store.read_manifest(tmp_path)
    known = {**SETTINGS, "format": "raw16"}
    store.check_settings(manifest, known, tmp_path)
    with pytest.raises(StoreError, match="sharpen is 'not set' in the store and True now"):
        store.check_settings(manifest, {**known, "sharpen": True}, tmp_path)
    del known["crop"]
    with pytest.raises(StoreError, match="crop is True in the store and 'not set' now"):
        store.check_settings(manifest, known, tmp_path)


def test_hash_is_that_of_the_settings_in_any_order():
    turned = dict(reversed(SETTINGS.items()))
    assert store.config_hash(SETTINGS) == store.config_hash(turned)
    assert store.config_hash(SETTINGS) != store.config_hash({**SETTINGS, "height": 41})


def test_folders_that_are_no_store_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no image store here"):
        Store(tmp_path)
    (tmp_path / "images.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        store.open_for_writing(tmp_path, SETTINGS, "raw16", SHAPE, {})
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "zarr"}))
    with pytest.raises(StoreError, match=r"'zarr'.*block8, raw16"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="'png8'"):
        store.open_for_writing(tmp_path / "new", SETTINGS, "png8", SHAPE, {})


def test_copy_without_all_images_is_found_out_and_completed(tmp_path):
    make(tmp_path)
    size = (tmp_path / "images.bin").stat().st_size
    with open(tmp_path / "images.bin", "rb+") as f:
        f.truncate(size - 1)
    with pytest.raises(StoreError, match="holds 2 whole images and the index goes up to 3"):
        Store(tmp_path)
    index = store.open_for_writing(tmp_path, SETTINGS, "raw16", SHAPE, {})
    assert index["image_id"].tolist() == ["0100", "0101"]
    assert len(Store(tmp_path)) == 2


def test_empty_store(tmp_path):
    store.open_for_writing(tmp_path, SETTINGS, "raw16", SHAPE, {})
    opened = Store(tmp_path)
    assert len(opened) == 0 and list(opened.index.columns) == list(INDEX_COLUMNS)
    assert opened.rows_of([]).shape == (0,)
