"""rsnakit.codecs and rsnakit.codestream: every backend gives the integers that were coded, at whole and reduced size."""

import io
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
from dicom_files import htj2k, j2k, jpeg, jpeg_lossless, rle, write
from PIL import Image
from pydicom import uid

from rsnakit import codecs, dicom
from rsnakit.codecs import ORDER, available_backends, decode_reduced, reductions
from rsnakit.codestream import MAX_PIXELS, read_codestream
from rsnakit.dicom import DicomError, read_encoded, read_stored

REPOSITORY = Path(__file__).parents[1]
SHAPE = 61, 84


def picture(bits, signed=False, shape=SHAPE):
    """A slope with noise and a dark corner that uses all values from the smallest to the largest of so many bits."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    slope = (rows + columns) / (shape[0] + shape[1]) + np.random.default_rng(bits).uniform(-0.05, 0.05, shape)
    values = np.rint(np.clip(slope, 0, 1) * (2**bits - 1)).astype(int)
    values[:4, :4], values[-1, -1] = 0, 2**bits - 1
    return (values - signed * 2 ** (bits - 1)).astype(f"{'i' if signed else 'u'}{1 if bits <= 8 else 2}")


def coders(bits):
    """Lossless codings of unsigned images, by name: what to call, and the transfer syntax."""
    made = {
        "J2K": (j2k(bits), uid.JPEG2000Lossless),
        "JP2": (
            partial(imagecodecs.jpeg2k_encode, level=0, codecformat="jp2", bitspersample=bits),
            uid.JPEG2000Lossless,
        ),
        "JPEG-LS": (imagecodecs.jpegls_encode, uid.JPEGLSLossless),
        "RLE": (rle, uid.RLELossless),
        **{f"JPEG lossless, predictor {p}": (jpeg_lossless(bits, p), uid.JPEGLossless) for p in range(1, 8)},
        "JPEG lossless SV1": (jpeg_lossless(bits), uid.JPEGLosslessSV1),
    }
    if htj2k:
        made |= {
            f"HTJ2K {syntax[-3:]}": (htj2k, syntax) for syntax in (uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K)
        }
    return made


NAMES = list(coders(8))
# What each backend decodes, by its documentation and pydicom's.
DECODES = {
    "imagecodecs": ("",),
    "pylibjpeg": ("",),
    "gdcm": ("J2K", "JP2", "JPEG"),
    "pyjpegls": ("JPEG-LS",),
    "pillow": ("J2K", "JP2", "HTJ2K"),
    "pydicom": ("RLE",),
}
WAYS = [(name, backend) for backend in ORDER for name in NAMES if name.startswith(DECODES[backend])]


def needs(backend, syntax):
    if backend not in available_backends(syntax):
        pytest.skip(f"{backend} is not installed, or without {uid.UID(syntax).name}")


# Every backend, every coding


@pytest.mark.parametrize(("name", "backend"), [(name, "") for name in NAMES] + WAYS)
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_the_same_image_in_every_coding_is_the_same_array_on_every_backend(tmp_path, name, bits, backend):  # D11
    encode, syntax = coders(bits)[name]
    if backend:
        needs(backend, syntax)
    image = picture(bits)
    read = read_stored(write(tmp_path / "a.dcm", image, encode, syntax, bits=bits), backend=backend)
    np.testing.assert_array_equal(read.pixels, image)
    assert read.pixels.dtype == image.dtype and read.notes == ()


@pytest.mark.parametrize(("name", "backend"), WAYS)
@pytest.mark.parametrize(("bits", "stated"), [(8, 16), (12, 10), (12, 16), (14, 12), (14, 16)])
@pytest.mark.parametrize("signed", [False, True])
def test_every_backend_agrees_where_the_header_says_other_bits(tmp_path, name, bits, stated, signed, backend):  # D11
    """Signed values are coded as two's complement without a sign, as in most such files."""
    encode, syntax = coders(bits)[name]
    needs(backend, syntax)
    image = picture(bits, signed)
    coded = (image.astype(int) & (2**bits - 1)).astype(f"u{image.dtype.itemsize}")
    elements = dict(BitsAllocated=16, BitsStored=stated, HighBit=stated - 1, PixelRepresentation=int(signed))
    path = write(tmp_path / "a.dcm", coded, encode, syntax, **elements)
    precision = read_encoded(path).frame.precision
    if signed and precision > bits:
        pytest.skip("neither the coder's precision nor the header says where the sign is")
    read = read_stored(path, backend=backend)
    np.testing.assert_array_equal(read.pixels, image)
    assert dicom.to_display(read).max() == 1  # not a quarter of it
    assert read.header.BitsStored == min(precision, max(stated, bits)) and read.header.PixelRepresentation == signed


@pytest.mark.parametrize(("name", "backend"), [way for way in WAYS if way[0] in ("J2K", "HTJ2K 201")])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_values_coded_with_a_sign(tmp_path, bits, name, backend):  # D10
    encode, syntax = coders(bits)[name]
    needs(backend, syntax)
    image = picture(bits, signed=True)
    read = read_stored(write(tmp_path / "a.dcm", image, encode, syntax, bits=bits), backend=backend)
    np.testing.assert_array_equal(read.pixels, image)
    assert read.notes == () or name != "J2K"  # the coder of HTJ2K writes 8 or 16 bits alone


@pytest.mark.parametrize("backend", ["imagecodecs", "pylibjpeg", "gdcm", "pillow"])
@pytest.mark.parametrize(
    ("syntax", "bits", "encode", "error"),
    [
        (uid.JPEGBaseline8Bit, 8, jpeg(8), 3),
        (uid.JPEGExtended12Bit, 12, jpeg(12), 24),
        (uid.JPEGExtended12Bit, 8, jpeg(8), 3),
        (uid.JPEGLSNearLossless, 12, partial(imagecodecs.jpegls_encode, level=5), 5),
        (uid.JPEG2000, 12, partial(imagecodecs.jpeg2k_encode, level=60, codecformat="j2k", bitspersample=12), 40),
    ],
)
def test_lossy_codings_are_near_and_all_backends_near_each_other(tmp_path, syntax, bits, encode, error, backend):
    needs(backend, syntax)
    image = picture(bits, shape=(64, 80))
    path = write(tmp_path / "a.dcm", image, encode, syntax, bits=bits)
    if syntax in (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit) and bits == 12 and backend in ("gdcm", "pillow"):
        with pytest.raises(DicomError, match=f"{backend} decodes 8 bits of this coding at most"):
            read_stored(path, backend=backend)
        return
    read = read_stored(path, backend=backend).pixels.astype(int)
    assert np.abs(read - image).max() <= error
    first = read_stored(path).pixels.astype(int)
    # Decoders of the cosine transform may round differently, the standards of the others leave no choice.
    rounding = {uid.JPEGBaseline8Bit: 1, uid.JPEGExtended12Bit: 2}.get(syntax, 0)
    assert np.abs(read - first).max() <= rounding


def test_pydicom_finds_imagecodecs_among_its_plugins(tmp_path):
    for name, (encode, syntax) in coders(12).items():
        path = write(tmp_path / "a.dcm", picture(12), encode, syntax)
        header = pydicom.dcmread(path)
        header.pixel_array_options(decoding_plugin="imagecodecs")
        np.testing.assert_array_equal(header.pixel_array, picture(12), err_msg=name)


# The order of backends


def test_the_table_shows_every_coding_and_the_backend_that_is_taken():
    rows = {row["transfer_syntax"]: row for row in dicom.backends()}
    assert len(rows) == 12
    for row in rows.values():
        assert row["taken"] == "imagecodecs" == row["installed"].split(", ")[0]
        assert set(row["installed"].split(", ")) <= set(ORDER)
    assert rows["RLELossless"]["installed"].split(", ")[-1] == "pydicom"
    assert "pillow" in rows["JPEG2000Lossless"]["installed"] and rows["JPEG2000Lossless"]["uid"] == uid.JPEG2000Lossless
    assert "pillow" not in rows["JPEGLosslessSV1"]["installed"]


def test_a_forced_backend_that_cannot_do_it_is_refused_by_name(tmp_path):
    path = write(tmp_path / "a.dcm", picture(12), jpeg_lossless(12), uid.JPEGLosslessSV1)
    with pytest.raises(
        DicomError, match=r"a\.dcm: pillow is not installed, or does not decode JPEG Lossless.*imagecodecs"
    ):
        read_stored(path, backend="pillow")
    with pytest.raises(DicomError, match="backend 'dcmtk' is unknown: expected one of imagecodecs, pylibjpeg"):
        read_stored(path, backend="dcmtk")
    assert read_encoded(path).backend == "imagecodecs"
    native = write(tmp_path / "b.dcm", picture(12))
    assert read_encoded(native, backend="pillow").backend == ""  # nothing to decode


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(","), None))
from rsnakit import dicom
print({row["uid"]: row["taken"] for row in dicom.backends()})
for path in sys.argv[2:]:
    try:
        encoded = dicom.read_encoded(path)
        print(encoded.backend, int(encoded.decode().pixels.astype(int).sum()))
    except dicom.DicomError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("blocked", "left"),
    [
        ("imagecodecs", {}),  # whatever else is installed
        (
            "imagecodecs,pylibjpeg,libjpeg,openjpeg,rle,gdcm,_gdcm",
            {"JPEG-LS": "", "JPEG lossless SV1": "", "RLE": "pydicom"},
        ),
        (
            "imagecodecs,pylibjpeg,PIL",
            {"J2K": "gdcm", "JPEG lossless SV1": "gdcm", "JPEG-LS": "gdcm", "RLE": "pydicom"},
        ),
        ("imagecodecs,gdcm,_gdcm,PIL", dict.fromkeys(("J2K", "JPEG lossless SV1", "JPEG-LS", "RLE"), "pylibjpeg")),
    ],
)
def test_everything_works_with_what_else_is_installed(tmp_path, blocked, left):  # D16
    """In a process that cannot import some decoders; where none is left, the message says what to install."""
    image, names = picture(12), ["J2K", "JPEG lossless SV1", "JPEG-LS", "RLE"]
    paths = []
    for name in names:
        encode, syntax = coders(12)[name]
        paths.append(write(tmp_path / f"{len(paths)}.dcm", image, encode, syntax))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, blocked, *map(str, paths)],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = dict(zip(names, result.stdout.splitlines()[1:], strict=True))
    assert "'imagecodecs'" not in result.stdout.splitlines()[0]
    for name, line in lines.items():
        backend = line.split()[0]
        if "no decoder for" in line:
            assert line.startswith(str(tmp_path)) and "pip install imagecodecs" in line
            _, syntax = coders(12)[name]
            others = set(available_backends(syntax)) - set(blocked.split(",")) - {"imagecodecs"}
            assert not others - ({"pillow"} if "PIL" in blocked else set())
        else:
            assert int(line.split()[1]) == image.astype(int).sum()
            assert backend in ORDER and backend not in blocked
            if name in left and left[name] in available_backends(coders(12)[name][1]):
                assert backend == left[name]


def test_a_backend_that_fails_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.dcm", picture(12), j2k(12), uid.JPEG2000)
    monkeypatch.setattr(codecs, "_with_imagecodecs", lambda _: (_ for _ in ()).throw(RuntimeError("opj_decode failed")))
    with pytest.raises(DicomError, match=r"a\.dcm: damaged or cut short: imagecodecs cannot decode it: RuntimeError"):
        read_stored(path)


# Reduced size


def low_pass(values):
    """Every second sample of the reversible 5/3 wavelet along the first axis: ISO/IEC 15444-1, F.4.8.1.

    Lifting with whole-sample symmetric extension at both ends: (N, ...) integers to (ceil(N / 2), ...).
    """
    if len(values) == 1:
        return values
    even, odd = values[::2], values[1::2]
    after = np.concatenate([even[1:], even[-1:]])[: len(odd)]
    high = odd - ((even[: len(odd)] + after) >> 1)
    before, here = np.concatenate([high[:1], high])[: len(even)], np.concatenate([high, high[-1:]])[: len(even)]
    return even + ((before + here + 2) >> 2)


def halved(image, times, bits):
    values = image.astype(np.int64)
    for _ in range(times):
        values = low_pass(low_pass(values).T).T
    return np.clip(values, 0, 2**bits - 1)  # decoders clip at the end


@pytest.mark.parametrize("shape", [(64, 96), (95, 96), (63, 66), (61, 84), (98, 100), (33, 40)])
@pytest.mark.parametrize("bits", [8, 10, 12, 16])
def test_reduced_image_is_the_low_pass_of_the_wavelet(tmp_path, shape, bits):
    noise = np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8 if bits == 8 else np.uint16)
    for image in (picture(bits, shape=shape), noise):
        for name in ("J2K", "JP2", "HTJ2K 201"):
            if name not in NAMES or (name[0] == "H" and bits in (10, 12)):  # the coder of HTJ2K writes 8 or 16 bits
                continue
            encode, syntax = coders(bits)[name]
            encoded = read_encoded(write(tmp_path / "a.dcm", image, encode, syntax, bits=bits))
            assert encoded.reductions >= 1
            for reduce in range(1, encoded.reductions + 1):
                stored = encoded.decode(reduce)
                np.testing.assert_array_equal(stored.pixels, halved(image, reduce, bits))
                assert stored.pixels.dtype == image.dtype and stored.notes == ()
            np.testing.assert_array_equal(encoded.decode().pixels, image)


def test_reduced_tiles_fit_together(tmp_path):
    image = picture(8, shape=(256, 192))
    with io.BytesIO() as file:
        Image.fromarray(image).save(file, "JPEG2000", no_jp2=True, tile_size=(64, 64), num_resolutions=3)
        coded = file.getvalue()
    encoded = read_encoded(write(tmp_path / "a.dcm", image, lambda _: coded, uid.JPEG2000, bits=8))
    assert encoded.reductions == 2
    for reduce in (1, 2):
        tiles = [[halved(tile, reduce, 8) for tile in np.hsplit(row, 3)] for row in np.vsplit(image, 4)]
        np.testing.assert_array_equal(encoded.decode(reduce).pixels, np.block(tiles))


@pytest.mark.parametrize(
    ("encode", "syntax", "bits", "elements"),
    [
        (jpeg_lossless(12), uid.JPEGLosslessSV1, 12, {}),
        (rle, uid.RLELossless, 12, {}),
        (None, uid.ExplicitVRLittleEndian, 12, {}),
        (j2k(12), uid.JPEG2000, 12, {"PixelRepresentation": 1}),  # bits of signed values: means would be of jumps
        (j2k(16), uid.JPEG2000, 16, {"BitsStored": 12, "HighBit": 11}),  # there may be an overlay above
        (lambda pixels: j2k(12)(pixels.astype(np.int16) - 2048), uid.JPEG2000, 12, {}),  # coded with a sign
        (partial(imagecodecs.jpeg2k_encode, level=0, codecformat="j2k", resolutions=1), uid.JPEG2000, 16, {}),
    ],
)
def test_what_cannot_be_reduced_in_decoding_is_averaged(tmp_path, encode, syntax, bits, elements):
    image = picture(12) // 2 * 2
    encoded = read_encoded(write(tmp_path / "a.dcm", image, encode, syntax, bits=bits, **elements))
    assert encoded.reductions == 0
    whole, reduced = encoded.decode(), encoded.decode(2)
    assert reduced.pixels.shape == (16, 21) and reduced.pixels.dtype == whole.pixels.dtype
    values = whole.pixels.astype(float)
    for row, column in ((0, 0), (7, 9), (15, 20), (15, 3)):
        mean = values[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].mean()
        assert abs(reduced.pixels[row, column] - mean) <= 0.5
    assert "averaged to 1/4 of its size: it can be halved 0 times" in reduced.notes[-1]
    assert whole.span == reduced.span == (values.min(), values.max())


def test_reduction_stops_where_pillow_would_round_the_size_otherwise(tmp_path):
    for shape, expected in (((97, 96), 1), ((96, 96), 3), ((98, 96), 2), ((96, 93), 1)):
        encoded = read_encoded(write(tmp_path / "a.dcm", picture(12, shape=shape), j2k(12), uid.JPEG2000))
        assert min(encoded.reductions, 3) == expected, shape
        assert encoded.decode(2).pixels.shape == tuple(-(-size // 4) for size in shape)


def test_an_image_that_begins_off_the_grid_is_decoded_whole(tmp_path):
    image = picture(12, shape=(64, 96))
    coded = bytes(j2k(12)(image))
    moved = changed(coded, 8, ">4L", 96 + 1024, 64 + 1024, 1024, 1024)
    moved = changed(moved, 32, ">2L", 1024, 1024)  # and its one tile with it
    encoded = read_encoded(write(tmp_path / "a.dcm", image, lambda _: moved, uid.JPEG2000))
    assert (encoded.reductions, read_codestream(coded, (64, 96)).halvings) == (0, 3)
    np.testing.assert_array_equal(encoded.decode().pixels, image)


def test_a_reduction_that_fails_gives_way_to_the_whole_image(tmp_path, monkeypatch):
    image = picture(12, shape=(64, 96))
    encoded = read_encoded(write(tmp_path / "a.dcm", image, j2k(12), uid.JPEG2000))
    monkeypatch.setattr(codecs, "decode_reduced", lambda *_: (_ for _ in ()).throw(OSError("broken data stream")))
    reduced = encoded.decode(1)
    expected = image.reshape(32, 2, 48, 2).mean(axis=(1, 3))
    assert np.abs(reduced.pixels - expected).max() <= 0.5
    assert reduced.notes == (
        "averaged to 1/2 of its size: decoding it so small failed with OSError: broken data stream",
    )


def test_reduced_size_that_is_none_is_refused(tmp_path):
    encoded = read_encoded(write(tmp_path / "a.dcm", picture(12), j2k(12), uid.JPEG2000))
    with pytest.raises(DicomError, match="reduce=-1: expected 0 to 15"):
        encoded.decode(-1)


def test_without_pillow_nothing_is_reduced(tmp_path, monkeypatch):
    codestream = read_codestream(j2k(12)(picture(12)), SHAPE)
    assert reductions(codestream) == 1 and decode_reduced(codestream, 1).shape == (31, 42)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert reductions(codestream) == 0


# What a codestream's own header may say


def changed(codestream, at, form, *numbers):
    return codestream[:at] + struct.pack(form, *numbers) + codestream[at + struct.calcsize(form) :]


J2K = bytes(j2k(12)(picture(12)))
COD = J2K.index(b"\xff\x52")


@pytest.mark.parametrize(
    ("codestream", "cause"),
    [
        (changed(J2K, 40, ">H", 3), "3 components"),
        (changed(J2K, 43, ">2B", 2, 2), "sampled at 1/2 x 1/2"),
        (changed(J2K, 24, ">2L", 1, 1), "5124 tiles on 61 x 84"),
        (changed(J2K, 24, ">2L", 0, 0), "tiles of 0 x 0"),
        (changed(J2K, 8, ">2L", 60000, 60000), "the codestream 60000 x 60000"),
        (changed(J2K, 16, ">2L", 90, 0), "-6 pixels"),
        (
            J2K[:COD] + b"\xff\x52\x00\x0f\x01\x00\xff\xff\x00\x02\x04\x04\x00\x01\x33\x33\x33" + J2K[COD + 14 :],
            "packets",
        ),
        (changed(J2K, COD + 9, ">B", 200), "200 wavelet levels"),
        (
            J2K[:COD] + b"\xff\x52\x00\x0e\x01\x00\x00\x01\x00\x01\x04\x04\x00\x01\x00\x00" + J2K[COD + 14 :],
            "precincts",
        ),
        (changed(J2K, COD, ">2B", 0xFF, 0x55), "does not say how it is coded"),
        (changed(J2K, COD + 2, ">H", 1), "marker ff52 of 1 bytes"),
        (J2K[:COD], "ends inside its own header"),
        (J2K[:30], "ends inside its own header"),
    ],
)
def test_jpeg_2000_that_asks_for_what_no_mammogram_has_is_refused(tmp_path, codestream, cause):
    path = write(tmp_path / "a.dcm", picture(12), lambda _: codestream, uid.JPEG2000)
    with pytest.raises(DicomError, match=rf"a\.dcm: .*{cause}"):
        read_encoded(path)


JPLL = bytes(jpeg_lossless(12)(picture(12)))
SOF = JPLL.index(b"\xff\xc3")


@pytest.mark.parametrize(
    ("codestream", "cause"),
    [
        (changed(JPLL, SOF + 9, ">B", 3), "3 components"),
        (changed(JPLL, SOF + 5, ">2H", 60000, 60000), "3600000000|450000000 at least"),
        (changed(JPLL, SOF + 1, ">B", 0xCB), "damaged, or of no known kind: ffcb"),  # arithmetic coding
        (changed(JPLL, SOF, ">B", 0x00), "damaged, or of no known kind: 00c3"),
        (JPLL[: SOF + 3], "ends inside its own header"),
        (JPLL[:SOF] + b"\xff\xd9", "damaged, or of no known kind: ffd9"),
        (b"\xff\xd8" + 2000 * b"\xff", "ends inside its own header"),
    ],
)
def test_jpeg_that_asks_for_what_no_mammogram_has_is_refused(tmp_path, codestream, cause):
    path = write(tmp_path / "a.dcm", picture(12), lambda _: codestream, uid.JPEGLosslessSV1)
    with pytest.raises(DicomError, match=rf"a\.dcm: .*({cause})"):
        read_encoded(path)


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ((2, 64, 60), "2 segments at"),
        ((2, 64, 10**9), "2 segments at"),  # imagecodecs reads past the end of the frame for this one
        ((15, *range(64, 64 + 15)), "15 segments at"),
        ((3, 64, 80, 96), "3 segments at"),
        ((2, 2**32 - 1, 64), "do not begin as any coding does"),
        ((0,), "do not begin as any coding does"),
        ((2**31,), "do not begin as any coding does"),
    ],
)
def test_rle_whose_offsets_lead_nowhere_is_refused(tmp_path, numbers, cause):
    def coded(pixels):
        return struct.pack("<16L", *numbers, *[0] * (16 - len(numbers))) + rle(pixels)[64:]

    path = write(tmp_path / "a.dcm", picture(12), coded, uid.RLELossless)
    with pytest.raises(DicomError, match=rf"a\.dcm: .*{cause}"):
        read_stored(path)


def test_runs_that_make_more_than_the_image_take_no_more_memory(tmp_path):
    runs = b"\x81\x00" * 500_000  # 64 MB of zeros
    bomb = struct.pack("<16L", 2, 64, 64 + len(runs), *[0] * 13) + runs + runs
    for backend in available_backends(uid.RLELossless):
        path = write(tmp_path / "a.dcm", picture(12), lambda _: bomb, uid.RLELossless)
        try:
            assert read_stored(path, backend).pixels.shape == SHAPE  # a backend may cut off what is too much
        except DicomError as error:
            assert "cannot decode it" in error.cause


def test_size_that_no_frame_has_is_refused_before_its_codestream_is_read(tmp_path):
    side = int(MAX_PIXELS**0.5) + 1
    for encode, syntax in ((None, uid.ExplicitVRLittleEndian), (j2k(12), uid.JPEG2000), (rle, uid.RLELossless)):
        path = write(tmp_path / "a.dcm", picture(12), encode, syntax, Rows=side, Columns=side)
        with pytest.raises(DicomError, match=rf"the header asks for {side} x {side} pixels, more than"):
            read_encoded(path)


def test_lines_given_after_the_scan_and_restart_markers(tmp_path):
    """ISO/IEC 10918-1, B.2.5: a frame header with 0 lines, and their number in a segment behind the scan."""
    image = picture(8, shape=(64, 80))
    with io.BytesIO() as file:
        Image.fromarray(image).save(file, "JPEG", quality=95, restart_marker_blocks=4)
        restarted = file.getvalue()
    assert b"\xff\xdd" in restarted and b"\xff\xd1" in restarted
    sof = restarted.index(b"\xff\xc0")
    open_lines = changed(restarted, sof + 5, ">H", 0)[:-2] + b"\xff\xdc\x00\x04\x00\x40\xff\xd9"
    unsaid = changed(restarted, sof + 5, ">H", 0)
    whole = read_stored(write(tmp_path / "a.dcm", image, lambda _: restarted, uid.JPEGBaseline8Bit, bits=8))
    assert np.abs(whole.pixels.astype(int) - image).max() < 16 and whole.notes == ()
    for codestream in (open_lines, unsaid):
        read = read_stored(write(tmp_path / "b.dcm", image, lambda _: codestream, uid.JPEGBaseline8Bit, bits=8))  # noqa: B023
        np.testing.assert_array_equal(read.pixels, whole.pixels)
        assert read.notes == ("the codestream's header leaves the rows open: 64 taken",)


def test_lossless_jpeg_damaged_in_the_middle_is_refused_where_its_values_leave_their_range(tmp_path):  # D12
    """imagecodecs takes it for whole. What stays in range cannot be told from an image."""
    image = picture(12, shape=(400, 300))

    def damaged(pixels):
        coded = bytes(jpeg_lossless(12)(pixels))
        return coded[:5000] + bytes(3000) + coded[8000:]

    path = write(tmp_path / "a.dcm", image, damaged, uid.JPEGLosslessSV1)
    assert imagecodecs.jpeg8_decode(damaged(image)).max() > 2**14
    with pytest.raises(DicomError, match=r"a\.dcm: damaged: coded with 12 bits, but imagecodecs finds values up to"):
        read_stored(path)


def test_values_of_a_lossless_jpeg_that_run_on_past_its_own_precision_are_kept(tmp_path):
    """Coded with 14 bits by a coder that writes 12 into the header, which decoding does not need."""
    rows, columns = np.mgrid[:64, :80]
    image = (40 * rows + 30 * columns).astype(np.uint16)  # up to 4890

    def coded(pixels):
        # The first value is coded as its difference to the middle of the range: 8192 here, 2048 by the header.
        codestream = bytes(jpeg_lossless(14)(pixels + (8192 - 2048)))
        return changed(codestream, codestream.index(b"\xff\xc3") + 4, ">B", 12)

    read = read_stored(write(tmp_path / "a.dcm", image, coded, uid.JPEGLosslessSV1))
    np.testing.assert_array_equal(read.pixels, image)
    assert "run on past BitsStored 12: kept" in read.notes[0]


def test_bytes_after_the_end_of_a_codestream_are_passed_over_with_a_note(tmp_path):
    for encode, syntax in ((j2k(12), uid.JPEG2000), (jpeg_lossless(12), uid.JPEGLosslessSV1)):
        for padding, noted in ((b"", False), (b"\0" * 40, True), (b"padding!", True)):
            path = write(tmp_path / "a.dcm", picture(12), lambda pixels: bytes(encode(pixels)) + padding, syntax)  # noqa: B023
            read = read_stored(path)
            np.testing.assert_array_equal(read.pixels, picture(12))
            assert bool(read.notes) == noted and all(
                "surplus bytes after the codestream" in note for note in read.notes
            )
