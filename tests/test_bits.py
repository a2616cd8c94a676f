"""rsnakit.bits: sign, precision and unused bits where header and codestream disagree (D10, D11)."""

import numpy as np
import pytest
from dicom_files import j2k, jpeg_lossless, rle, write
from pydicom import uid
from pydicom.dataset import Dataset

from rsnakit.bits import Bits, settle
from rsnakit.dicom import read_stored, to_display

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # each 12-bit value once
NOISE = np.random.default_rng(0).integers(0, 4096, (64, 64)).astype(np.uint16)


def as_bits(signed, bits):
    """Signed values as two's complement of so many bits, the bits above 0."""
    return (signed.astype(np.int64) & (1 << bits) - 1).astype(np.uint16)


# Signs


@pytest.mark.parametrize("image", [RAMP, RAMP.T.copy(), NOISE])
def test_signed_values_in_a_codestream_without_a_sign(tmp_path, image):  # D10
    signed = 2 * image.astype(np.int16) - 4096
    path = write(tmp_path / "a.dcm", as_bits(signed, 13), j2k(13), uid.JPEG2000Lossless, bits=13, PixelRepresentation=1)
    read = read_stored(path)
    np.testing.assert_array_equal(read.pixels, signed)
    assert read.notes == ("PixelRepresentation 1, but coded without a sign: read as two's complement of 13 bits",)
    shades = to_display(read)
    np.testing.assert_allclose(shades, (image - image.min()) / np.ptp(image), atol=1e-6)  # not split at mid-grey


@pytest.mark.parametrize("image", [RAMP, RAMP.T.copy(), NOISE])
def test_values_coded_with_a_sign_under_a_header_that_says_unsigned(tmp_path, image):  # D10
    signed = image.astype(np.int16) - 2048
    read = read_stored(write(tmp_path / "a.dcm", signed, j2k(12), uid.JPEG2000Lossless, PixelRepresentation=0))
    np.testing.assert_array_equal(read.pixels, signed)
    assert read.header.PixelRepresentation == 1
    assert read.notes == ("PixelRepresentation 0, but coded with a sign: read with it",)
    np.testing.assert_allclose(to_display(read), (image - image.min()) / np.ptp(image), atol=1e-6)


@pytest.mark.parametrize(("bits", "scale"), [(12, 1), (16, 16)])
def test_unsigned_picture_that_a_coder_took_for_signed(tmp_path, bits, scale):  # D10
    """A buffer of unsigned values, handed to a coder as signed ones: the upper half of them has become negative."""
    image = RAMP * np.uint16(scale)
    unused = 16 - bits
    taken = (image << unused).view(np.int16) >> unused
    path = write(tmp_path / "a.dcm", taken, j2k(bits), uid.JPEG2000Lossless, bits=bits, PixelRepresentation=0)
    read = read_stored(path)
    np.testing.assert_array_equal(read.pixels, image)
    assert read.header.PixelRepresentation == 0 and "read without, which wraps round less" in read.notes[0]


@pytest.mark.parametrize(("encode", "syntax"), [(j2k(12), uid.JPEG2000), (jpeg_lossless(12), uid.JPEGLosslessSV1)])
def test_unsigned_picture_under_a_header_that_says_signed(tmp_path, encode, syntax):  # D10
    """BitsStored 16 and a precision that was chosen by the largest value: there is no room for a sign in the 12 bits."""
    elements = dict(BitsStored=16, HighBit=15, PixelRepresentation=1)
    read = read_stored(write(tmp_path / "a.dcm", RAMP, encode, syntax, **elements))
    np.testing.assert_array_equal(read.pixels, RAMP)
    assert read.header.PixelRepresentation == 0 and "coded without a sign: read without" in read.notes[-1]


@pytest.mark.parametrize("representation", [0, 1])
def test_8_coded_bits_in_16_allocated(tmp_path, representation):  # D11
    image = (RAMP >> 4).astype(np.uint8)
    expected = (image.astype(np.int16) - 128).astype(np.int8) if representation else image
    for syntax, encode in ((uid.JPEG2000Lossless, j2k(8)), (uid.JPEGLosslessSV1, jpeg_lossless(8))):
        elements = dict(BitsAllocated=16, BitsStored=16, HighBit=15, PixelRepresentation=representation)
        path = write(tmp_path / "a.dcm", expected.view(np.uint8), encode, syntax, **elements)
        np.testing.assert_array_equal(read_stored(path).pixels, expected)


@pytest.mark.parametrize(
    ("encode", "bits"),
    [(None, 12), (rle, 12), (jpeg_lossless(12), 12), (jpeg_lossless(16), 12), (jpeg_lossless(12), 16)],
)
@pytest.mark.parametrize("extended", [False, True])
def test_sign_is_taken_from_the_bits_that_are_used(tmp_path, encode, bits, extended):
    """The four bits above may be 0, or repeat the sign."""
    signed = (RAMP.astype(np.int16) - 2048).T.copy()
    coded = as_bits(signed, 16 if extended else 12)
    syntax = {None: uid.ExplicitVRLittleEndian, rle: uid.RLELossless}.get(encode, uid.JPEGLosslessSV1)
    if extended and syntax == uid.JPEGLosslessSV1:
        encode = jpeg_lossless(16)
    path = write(tmp_path / "a.dcm", coded, encode, syntax, bits=bits, PixelRepresentation=1)
    np.testing.assert_array_equal(read_stored(path).pixels, signed)


# Bits above and below those that are stored


@pytest.mark.parametrize(
    ("encode", "syntax"),
    [
        (None, uid.ExplicitVRLittleEndian),
        (rle, uid.RLELossless),
        (j2k(16), uid.JPEG2000Lossless),
        (jpeg_lossless(16), uid.JPEGLosslessSV1),
    ],
)
@pytest.mark.parametrize("signed", [False, True])
def test_overlay_bits_are_masked_and_values_that_run_on_are_kept(tmp_path, encode, syntax, signed):
    rows, columns = np.mgrid[:64, :64]
    image = (40 * rows + 20 * columns - 2000 * signed).astype(np.int16 if signed else np.uint16)  # 12 bits
    overlay = as_bits(image, 12)
    overlay[10:20, 30:50] |= 1 << 13
    read = read_stored(write(tmp_path / "a.dcm", overlay, encode, syntax, PixelRepresentation=int(signed)))
    np.testing.assert_array_equal(read.pixels, image)
    assert "bits above BitsStored 12 masked off" in read.notes
    assert read.header.BitsStored == 12

    beyond = 2 * image  # smooth through 4095, or from -4000 to 3560
    coded = as_bits(beyond, 16)
    read = read_stored(write(tmp_path / "b.dcm", coded, encode, syntax, PixelRepresentation=int(signed)))
    np.testing.assert_array_equal(read.pixels, beyond)
    assert f"values from {beyond.min()} to {beyond.max()} run on past BitsStored 12: kept" in read.notes
    assert read.header.BitsStored == 13 and read.header.HighBit == 12
    assert to_display(read).max() == 1


@pytest.mark.parametrize(("encode", "syntax"), [(None, uid.ImplicitVRLittleEndian), (rle, uid.RLELossless)])
@pytest.mark.parametrize("signed", [False, True])
def test_values_in_the_upper_bits_are_moved_down(tmp_path, encode, syntax, signed):
    image = RAMP.astype(np.int16) - 2048 if signed else RAMP
    elements = dict(HighBit=15, PixelRepresentation=int(signed))
    read = read_stored(write(tmp_path / "a.dcm", as_bits(image, 12) << 4, encode, syntax, **elements))
    np.testing.assert_array_equal(read.pixels, image)
    assert read.notes == ("HighBit 15 of 12 BitsStored: values moved down by 4 bits",)
    assert (read.header.BitsStored, read.header.HighBit) == (12, 11)
    if not signed:  # a header that is wrong about it, as the values show
        read = read_stored(write(tmp_path / "b.dcm", RAMP, encode, syntax, **elements))
        np.testing.assert_array_equal(read.pixels, RAMP)
        assert read.notes == ("HighBit 15 of 12 BitsStored: taken as 11, where the values are",)


def test_modality_lut_is_looked_up_by_the_sign_that_was_decided(tmp_path):
    """Its first value, -2048, is written as US; that it is negative follows from the sign of the pixels alone."""
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [4096, 2**16 - 2048, 12])
    item.add_new("LUTData", "US", list(range(4095, -1, -1)))
    signed = RAMP.astype(np.int16) - 2048
    elements = dict(PixelRepresentation=0, ModalityLUTSequence=[item])
    read = read_stored(write(tmp_path / "a.dcm", signed, j2k(12), uid.JPEG2000Lossless, **elements))
    np.testing.assert_allclose(to_display(read), 1 - RAMP / 4095, atol=1e-6)


def test_what_agrees_is_not_touched():
    for coded, bits in ((RAMP, Bits(12, 11, False)), (RAMP.view(np.int16), Bits(16, 15, True))):
        notes = []
        pixels, settled, span = settle(coded, bits.stored, bits, notes)
        assert pixels is coded and settled == bits and span == (coded.min(), coded.max()) and not notes
