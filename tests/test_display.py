"""rsnakit.display: shades as DCMTK shows them on real files, as the standard's formulas on written ones (D01 to D07)."""

import json
import logging
import tracemalloc
from pathlib import Path

import numpy as np
import pydicom
import pytest
from dicom_files import j2k, jpeg_lossless, write
from pydicom import uid
from pydicom.dataset import Dataset

from rsnakit.dicom import Stored, read_encoded, read_stored, shading, to_display

REAL = Path(__file__).parents[2] / "shared" / "data" / "dicom"
EXPECTED = json.loads((REAL / "expected.json").read_text()) if (REAL / "expected.json").exists() else {}
GOOD = sorted(name for name, answer in EXPECTED.items() if "points" in answer)
needs_real = pytest.mark.skipif(not EXPECTED, reason=f"the DICOM test files are not in {REAL}")

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # each 12-bit value once


def lut(data, first=0, bits=12):
    item = Dataset()
    item.add_new("LUTDescriptor", "US" if first >= 0 else "SS", [len(data) % 2**16, first, bits])
    item.add_new("LUTData", "US", [int(number) for number in data])
    return [item]


def stored(pixels, **elements):
    header = Dataset()
    for keyword, value in ({"PhotometricInterpretation": "MONOCHROME2"} | elements).items():
        setattr(header, keyword, value)
    return Stored(pixels, header)


def grey(shades):
    return np.round(255 * shades.astype(np.float64)).astype(int)


@needs_real
@pytest.mark.parametrize("name", GOOD)
def test_shades_equal_those_of_dcmtk_within_a_grey_level(name):
    answer, image = EXPECTED[name], read_stored(REAL / name)
    rows, columns, _ = np.transpose(answer["points"])
    render = answer["render"]
    first = next(render[key] for key in ("voilut1", "window1", "minmax") if key in render)
    assert np.abs(grey(to_display(image)[rows, columns]) - first).max() <= 1

    span = to_display(image, "none")[rows, columns].astype(np.float64)
    if image.header.get("VOILUTFunction") == "SIGMOID":
        # DCMTK sends its smallest-to-largest window through the header's function; "none" is always straight
        span = 1 / (1 + np.exp(-4 * (span - 0.5)))
    assert np.abs(grey(span) - render["minmax"]).max() <= 1


@needs_real
@pytest.mark.parametrize("name", [name for name in GOOD if "window1" in EXPECTED[name].get("render", {})])
def test_windows_of_real_headers_equal_dcmtk_without_the_lut_and_with_sigmoid(name):
    answer, image = EXPECTED[name], read_stored(REAL / name)
    rows, columns, _ = np.transpose(answer["points"])
    if "VOILUTSequence" in image.header:
        del image.header.VOILUTSequence
    assert np.abs(grey(to_display(image)[rows, columns]) - answer["render"]["window1"]).max() <= 1
    image.header.VOILUTFunction = "SIGMOID"
    assert np.abs(grey(to_display(image)[rows, columns]) - answer["render"]["window1_sigmoid"]).max() <= 1


def test_monochrome1_shows_as_monochrome2(tmp_path):  # D01
    window = dict(WindowCenter=2047.5, WindowWidth=4096)
    write(tmp_path / "2.dcm", RAMP, j2k(12), uid.JPEG2000Lossless, **window)
    write(
        tmp_path / "1.dcm",
        4095 - RAMP,
        jpeg_lossless(12),
        uid.JPEGLosslessSV1,
        PhotometricInterpretation="MONOCHROME1",
        **window,
    )
    one, two = read_stored(tmp_path / "1.dcm"), read_stored(tmp_path / "2.dcm")
    for mode in ("first", "none"):
        assert np.abs(grey(to_display(one, mode)) - grey(to_display(two, mode))).max() <= 1
        assert to_display(one, mode)[0, 0] < 0.01  # 4095 stored: dark
    np.testing.assert_array_equal(one.pixels, 4095 - RAMP)  # nothing was turned in place
    np.testing.assert_array_equal(to_display(one), to_display(one))


def test_inversion_comes_after_the_window():  # D02
    image = stored(RAMP, PhotometricInterpretation="MONOCHROME1", WindowCenter=3000, WindowWidth=800)
    shades = grey(to_display(image)).ravel()
    assert shades[3400] == 0 and shades[2600] == 255


@pytest.mark.parametrize(
    "function", [None, "LINEAR", " linear ", "LINEAR_EXACT", "linear exact", "SIGMOID", "sigmoid "]
)
def test_window_functions_equal_the_standard_formulas(function):
    image = stored(RAMP, WindowCenter="2000", WindowWidth="1000", VOILUTFunction=function)
    x = RAMP.astype(np.float64)
    if "SIG" in str(function).upper():
        expected = 1 / (1 + np.exp(-4 * (x - 2000) / 1000))
    elif "EXACT" in str(function).upper():
        expected = np.clip((x - 2000) / 1000 + 0.5, 0, 1)
    else:
        expected = np.clip((x - 1999.5) / 999 + 0.5, 0, 1)
    np.testing.assert_allclose(to_display(image), expected, atol=1e-6)
    assert to_display(image).dtype == np.float32


def test_linear_window_of_width_one_is_a_step():
    shades = to_display(stored(RAMP, WindowCenter=100.5, WindowWidth=1)).ravel()
    np.testing.assert_array_equal(shades, (np.arange(4096) > 100).astype(np.float32))


def test_several_windows_are_as_the_first_alone(tmp_path, caplog):  # D03
    one = to_display(read_stored(write(tmp_path / "1.dcm", RAMP, WindowCenter="2000", WindowWidth="4000")))
    path = write(tmp_path / "2.dcm", RAMP, WindowCenter=["2000", "1500"], WindowWidth=["4000", "1000"])
    np.testing.assert_array_equal(to_display(read_stored(path)), one)
    assert not caplog.records
    path = write(tmp_path / "uneven.dcm", RAMP, WindowCenter=["2000", "1500"], WindowWidth="4000")
    np.testing.assert_array_equal(to_display(read_stored(path)), one)
    assert "uneven.dcm: 2 WindowCenter and 1 WindowWidth" in caplog.text


@pytest.mark.parametrize(
    ("elements", "logged"),
    [
        ({"WindowCenter": 2000, "WindowWidth": 0}, "WindowWidth 0"),
        ({"WindowCenter": 2000, "WindowWidth": 0.5}, "WindowWidth 0.5"),
        ({"WindowCenter": 2000, "WindowWidth": -3, "VOILUTFunction": "SIGMOID"}, "WindowWidth -3"),
        ({"WindowCenter": 2000}, "1 WindowCenter and 0 WindowWidth"),
        ({"WindowCenter": "", "WindowWidth": ""}, ""),
        ({"WindowCenter": "nan", "WindowWidth": "100"}, "unreadable WindowCenter"),
        ({}, ""),
    ],
)
def test_unusable_windows_fall_back_to_the_span(elements, logged, caplog):  # D03
    shades = to_display(stored(RAMP[10:50], **elements))
    np.testing.assert_allclose(shades.ravel(), np.linspace(0, 1, shades.size), atol=1e-6)
    assert logged in caplog.text and bool(caplog.records) == bool(logged)


@pytest.mark.parametrize("raw", [b"40.5,7", b"broken", b"\\1500", b"  "])
def test_windows_that_are_no_numbers_do_not_stop_a_file(tmp_path, raw, caplog):  # D03
    path = write(tmp_path / "a.dcm", RAMP, WindowCenter="777777", WindowWidth="4000")
    path.write_bytes(path.read_bytes().replace(b"777777", raw.ljust(6)))
    with caplog.at_level(logging.WARNING):
        shades = to_display(read_stored(path))
    np.testing.assert_allclose(shades.ravel(), np.linspace(0, 1, 4096), atol=1e-6)
    assert "a.dcm" in caplog.text


def test_voi_lut_is_indexed_by_stored_value_with_rescale_or_without():  # D05
    table = np.random.default_rng(0).permutation(4096)
    for elements in ({}, {"RescaleSlope": 1, "RescaleIntercept": 0}):
        shades = to_display(stored(RAMP, VOILUTSequence=lut(table), **elements))
        np.testing.assert_allclose(shades, table[RAMP] / 4095, atol=1e-6)
    # after a rescale that moves values below 0 the table's first value is negative, also where it is written as US
    for first in (-1000, 2**16 - 1000):
        image = stored(RAMP, VOILUTSequence=lut(table, first % 2**16), RescaleSlope=1, RescaleIntercept=-1000)
        np.testing.assert_allclose(to_display(image), table[RAMP] / 4095, atol=1e-6)


def test_voi_lut_wins_over_window_and_only_one_is_applied():  # D06
    inverting = 4095 - np.arange(4096)
    image = stored(RAMP, VOILUTSequence=lut(inverting), WindowCenter=100, WindowWidth=50)
    np.testing.assert_allclose(to_display(image), (4095 - RAMP) / 4095, atol=1e-6)
    np.testing.assert_allclose(to_display(image, "none"), RAMP / 4095, atol=1e-6)


def test_short_voi_lut_holds_its_ends_and_a_broken_one_gives_way_to_the_window(caplog):
    shades = to_display(stored(RAMP, VOILUTSequence=lut([0, 100, 4095], first=2000))).ravel()
    np.testing.assert_allclose(shades[[0, 2000, 2001, 2002, 4000]], [0, 0, 100 / 4095, 1, 1], atol=1e-6)
    shades = to_display(stored(RAMP, VOILUTSequence=lut([0, 100, 4095], first=2000, bits=10))).ravel()
    np.testing.assert_allclose(shades[2000:2003], [0, 100 / 4095, 1], atol=1e-6)  # 12 bits, whatever it says
    broken = lut([0, 100, 4095])
    broken[0].LUTDescriptor = [4096, 0, 12]
    image = stored(RAMP, VOILUTSequence=broken, WindowCenter=100, WindowWidth=50)
    np.testing.assert_array_equal(to_display(image), to_display(stored(RAMP, WindowCenter=100, WindowWidth=50)))
    assert "unreadable VOILUTSequence" in caplog.text


def bytes_lut(data, descriptor, form):
    item = Dataset()
    item.add_new("LUTDescriptor", "US", descriptor)
    item.add_new("LUTData", "OW", np.asarray(data).astype(form).tobytes())
    return [item]


def test_luts_of_8_bits_in_bytes_in_words_and_two_in_a_word():
    table = np.random.default_rng(0).permutation(256)
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pairs = table[::2] + 256 * table[1::2]
    for item in (
        bytes_lut(table, [256, 0, 8], "u1"),
        bytes_lut(table, [256, 0, 8], "<u2"),
        bytes_lut(np.append(table, 0), [256, 0, 8], "u1"),
        lut(pairs, bits=8),
        lut(table, bits=8),
    ):
        item[0].LUTDescriptor = [256, 0, 8]
        np.testing.assert_allclose(to_display(stored(pixels, VOILUTSequence=item)), table[pixels] / 255, atol=1e-6)


def test_lut_of_all_16_bit_values_and_one_of_a_single_entry():
    table = np.random.default_rng(0).permutation(2**16)
    pixels = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    shades = to_display(stored(pixels, VOILUTSequence=bytes_lut(table, [0, 0, 16], "<u2")))  # 0 stands for 65,536
    np.testing.assert_allclose(shades, table[pixels] / 65535, atol=1e-6)
    one = stored(RAMP, VOILUTSequence=lut([7], bits=3))
    np.testing.assert_array_equal(to_display(one), np.ones((64, 64)))
    black = stored(RAMP, VOILUTSequence=lut([0] * 4096, bits=0))
    np.testing.assert_array_equal(to_display(black), np.zeros((64, 64)))


def test_negative_first_value_of_a_lut_where_no_value_of_this_image_is_negative():
    """Rescaled values can be below 0, so 64,512 stands for -1024; but in this image none is."""
    table = np.arange(4096)
    image = stored(RAMP, VOILUTSequence=lut(table, 2**16 - 1024), RescaleSlope=1, RescaleIntercept=-1024)
    bright = stored(RAMP[20:], VOILUTSequence=lut(table, 2**16 - 1024), RescaleSlope=1, RescaleIntercept=-1024)
    np.testing.assert_allclose(to_display(image), RAMP / 4095, atol=1e-6)
    np.testing.assert_allclose(to_display(bright), RAMP[20:] / 4095, atol=1e-6)


def test_first_value_of_a_modality_lut_follows_the_sign_of_the_pixels():
    table = np.random.default_rng(0).permutation(4096)
    signed = RAMP.astype(np.int16) - 2048
    units = np.ptp(table)
    for first in (-2048, 2**16 - 2048):
        item = lut(table, first % 2**16)
        image = stored(signed, ModalityLUTSequence=item, PixelRepresentation=1)
        np.testing.assert_allclose(to_display(image), table[RAMP] / units, atol=1e-6)
    high = (RAMP.astype(np.int64) + 40000).astype(np.uint16)
    image = stored(high, ModalityLUTSequence=lut(table, 40000), PixelRepresentation=0)
    np.testing.assert_allclose(to_display(image), table[RAMP] / units, atol=1e-6)


def test_modality_lut_comes_before_the_window_and_instead_of_a_rescale():
    table = 2 * np.arange(4096)
    elements = dict(WindowCenter=2000, WindowWidth=1000, VOILUTFunction="LINEAR_EXACT")
    image = stored(RAMP, ModalityLUTSequence=lut(table, bits=16), RescaleSlope=-9, RescaleIntercept=7, **elements)
    np.testing.assert_allclose(to_display(image), np.clip((2.0 * RAMP - 2000) / 1000 + 0.5, 0, 1), atol=1e-6)


def test_empty_absurd_and_broken_luts_give_way(caplog):
    window = dict(WindowCenter=100, WindowWidth=50)
    expected = to_display(stored(RAMP, **window))
    np.testing.assert_array_equal(to_display(stored(RAMP, VOILUTSequence=[], **window)), expected)
    assert not caplog.records
    for keyword in ("VOILUTSequence", "ModalityLUTSequence"):
        broken = stored(RAMP, **{keyword: lut([0, 1, 2])}, **window)
        del broken.header[keyword].value[0].LUTData
        np.testing.assert_array_equal(to_display(broken), expected)
        assert f"unreadable {keyword}" in caplog.text
    huge = stored(RAMP, **window)
    tag = pydicom.tag.Tag("VOILUTSequence")
    huge.header[tag] = pydicom.dataelem.RawDataElement(tag, "SQ", 2**23, bytes(2**23), 0, False, True)
    np.testing.assert_array_equal(to_display(huge), expected)
    assert "more than 4194304 bytes" in caplog.text


def test_rescale_slope_of_0_is_passed_over(caplog):
    np.testing.assert_allclose(to_display(stored(RAMP, RescaleSlope=0, RescaleIntercept=5)), RAMP / 4095, atol=1e-6)
    assert "RescaleSlope 0" in caplog.text


def test_a_part_of_an_image_is_shaded_as_in_the_whole():
    rows, columns = np.mgrid[:3000, :700]
    image = stored((rows + columns).astype(np.uint16), WindowCenter=1500, WindowWidth=900, VOILUTFunction="SIGMOID")
    whole, shade = to_display(image), shading(image)
    np.testing.assert_allclose(whole, 1 / (1 + np.exp(-4 * (rows + columns - 1500.0) / 900)), atol=1e-6)
    for part in (np.s_[10:20, 30:50], np.s_[::7, ::-3], np.s_[1000:, 5:6], np.s_[0:0]):
        np.testing.assert_array_equal(shade(image.pixels[part]), whole[part])
    np.testing.assert_array_equal(shade(image.pixels[7]), whole[7])
    assert whole.dtype == shade(image.pixels[7]).dtype == np.float32


def test_shades_of_a_large_image_take_little_memory_beside_them():
    image = stored(np.zeros((4096, 3328), np.uint16) + np.arange(3328, dtype=np.uint16))
    tracemalloc.start()
    shades = to_display(image)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shades.nbytes < most < shades.nbytes + 20e6


def test_display_values_saved_as_an_image_are_not_windowed_again(tmp_path):  # D07
    window = dict(WindowCenter=3000, WindowWidth=800, PhotometricInterpretation="MONOCHROME1")
    shades = to_display(read_stored(write(tmp_path / "a.dcm", RAMP, **window)))
    assert np.abs(shades - to_display(read_stored(tmp_path / "a.dcm"), "none")).max() > 0.2  # the flag matters
    again = read_stored(write(tmp_path / "b.dcm", np.round(4095 * shades).astype(np.uint16)))
    for mode in ("first", "none"):
        np.testing.assert_allclose(to_display(again, mode), shades, atol=1 / 4095)


def test_narrow_values_fill_the_range():  # D19
    pixels = np.random.default_rng(0).integers(300, 901, (50, 40)).astype(np.uint16)
    pixels[0, :2] = 300, 900
    shades = grey(to_display(stored(pixels)))
    assert (shades.min(), shades.max()) == (0, 255) and len(np.unique(shades)) > 200


def test_rescale_comes_before_the_window_and_the_span():
    image = stored(RAMP, RescaleSlope="-2", RescaleIntercept="100", WindowCenter="-3900", WindowWidth="2000")
    units = 100 - 2.0 * RAMP
    np.testing.assert_allclose(to_display(image), np.clip((units + 3900.5) / 1999 + 0.5, 0, 1), atol=1e-6)
    np.testing.assert_allclose(to_display(image, "none"), (4095 - RAMP) / 4095, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint32, np.float32])
def test_table_and_arithmetic_give_the_same_shades(dtype):
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.iinfo(np.int16)
    pixels = np.linspace(info.min, info.max, 4000).astype(dtype).reshape(80, 50)
    before = pixels.copy()
    shades = to_display(stored(pixels[:, ::2]))
    span = pixels[:, ::2].astype(np.float64)
    np.testing.assert_allclose(shades, (span - span.min()) / (span.max() - span.min()), atol=1e-6)
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("reduce", [1, 2])
def test_letters_darken_a_film_that_is_decoded_at_reduced_size_only_by_a_little(tmp_path, reduce):
    """A wavelet overshoots at sharp edges, here to the end of the range; the span is to stay nearer to the image's."""
    rows, columns = np.mgrid[:512, :384]
    film = (20000 + 40 * rows + 10 * columns).astype(np.uint16)
    film[40:200, 280:360] = 0
    film[60:180, 300:312] = film[60:72, 300:350] = film[110:122, 300:350] = 55000  # an F of 12 pixels' breadth
    path = write(tmp_path / "a.dcm", film, j2k(16), uid.JPEG2000Lossless, bits=16)
    small = read_encoded(path).decode(reduce)
    assert small.pixels.max() == 65535
    darker = 1 - to_display(small).astype(np.float64)[300 // 2**reduce :] / (small.pixels[300 // 2**reduce :] / 55000)
    assert darker.max() < 0.7 * (1 - 55000 / 65535)
    assert to_display(small).max() == to_display(read_stored(path)).max() == 1


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_constant_image_is_black(photometric):
    shades = to_display(stored(np.full((4, 5), 9, np.uint16), PhotometricInterpretation=photometric))
    np.testing.assert_array_equal(shades, np.zeros((4, 5)))


def test_unknown_window_choice_is_refused():
    with pytest.raises(ValueError, match="expected 'first' or 'none'"):
        to_display(stored(RAMP), "all")
