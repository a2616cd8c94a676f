"""PNG files: what they decode to, that they and the DICOM file of the same image are prepared alike, and what is refused."""

import io
import re
import struct
import zlib
from pathlib import Path

import cv2
import dicom_files
import numpy as np
import pytest
from PIL import Image

from rsnakit import dicom, png
from rsnakit.phantom import draw_breast
from rsnakit.prepare import BlankImage, PreprocessConfig, prepare

REAL = Path(__file__).parents[2] / "shared" / "data" / "dicom"
RNG = np.random.default_rng(0)
SHADES = {8: RNG.integers(0, 256, (23, 17), np.uint8), 16: RNG.integers(0, 65536, (23, 17), np.uint16)}
GREY_LEVEL = 4095 / 255  # of 8 bits, in the 12 of prepared images


def save(path: Path, pixels: np.ndarray, **options) -> Path:
    Image.fromarray(pixels).save(path, "PNG", **options)
    return path


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_bytes(
    rows: int,
    columns: int,
    bits: int,
    color: int,
    lines: bytes,
    interlace: int = 0,
    extra: bytes = b"",
    end: bytes = b"",
) -> bytes:
    """A file written by the standard (ISO/IEC 15948); `lines` are its rows, each behind a byte 0 for no filter."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, bits, color, 0, 0, interlace))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(lines)) + end + chunk(b"IEND", b"")


def lines_of(pixels: np.ndarray) -> bytes:
    """Rows of (H, W) or (H, W, C) pixels, unfiltered."""
    big_endian = pixels.astype(pixels.dtype.newbyteorder(">"))
    return b"".join(b"\0" + row.tobytes() for row in big_endian)


def grey_bytes(pixels: np.ndarray, **parts) -> bytes:
    return png_bytes(*pixels.shape, 8 * pixels.dtype.itemsize, 0, lines_of(pixels), **parts)


def refusal(path: Path, window: str = "first") -> str:
    with pytest.raises(dicom.DicomError) as caught:
        png.read_encoded(path, window).decode()
    assert caught.value.path == str(path) and str(caught.value) == f"{path}: {caught.value.cause}"
    return caught.value.cause


# What a file decodes to


@pytest.mark.parametrize("bits", [8, 16])
def test_shades_are_shown_as_they_are(tmp_path, bits):
    pixels = SHADES[bits]
    encoded = png.read_encoded(save(tmp_path / "a.png", pixels), "first")
    assert (encoded.path, encoded.shape, encoded.reductions) == (str(tmp_path / "a.png"), (23, 17), 0)
    stored = encoded.decode()
    assert stored.notes == () and stored.header.filename == encoded.path
    np.testing.assert_array_equal(stored.pixels, pixels)
    np.testing.assert_allclose(dicom.to_display(stored, "first"), pixels / (2**bits - 1), atol=1e-7)
    stretched = (pixels - float(pixels.min())) / (int(pixels.max()) - int(pixels.min()))
    np.testing.assert_allclose(dicom.to_display(stored, "none"), stretched, atol=1e-6)
    with pytest.raises(ValueError, match="reduce=1"):
        encoded.decode(1)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("color", [2, 4, 6])
def test_grey_coded_with_more_channels(tmp_path, bits, color):
    pixels = SHADES[bits]
    half = np.full_like(pixels, np.iinfo(pixels.dtype).max // 2)
    channels = {2: [pixels] * 3, 4: [pixels, half], 6: [pixels] * 3 + [half]}[color]
    (tmp_path / "a.png").write_bytes(png_bytes(23, 17, bits, color, lines_of(np.dstack(channels))))
    stored = png.read_encoded(tmp_path / "a.png", "first").decode()
    np.testing.assert_array_equal(stored.pixels, pixels)
    assert "read as grey" in stored.notes[0]
    assert any("transparent" in note for note in stored.notes) == (color > 2)


def test_a_palette_of_greys(tmp_path):
    palette = Image.fromarray(SHADES[8]).convert("P")
    palette.putpalette([255 - i // 3 for i in range(768)])  # entry 0 is white
    palette.save(tmp_path / "a.png")
    stored = png.read_encoded(tmp_path / "a.png", "first").decode()
    np.testing.assert_array_equal(stored.pixels, 255 - SHADES[8])


@pytest.mark.parametrize("bits", [8, 16])
def test_interlaced(tmp_path, bits):
    pixels = SHADES[bits]
    passes = [
        "0088",
        "0488",
        "4084",
        "0244",
        "2042",
        "0122",
        "1021",
    ]  # Adam7: first row and column, steps down and right
    lines = b"".join(
        lines_of(pixels[top::down, left::right]) for top, left, down, right in (map(int, p) for p in passes)
    )
    (tmp_path / "a.png").write_bytes(png_bytes(23, 17, bits, 0, lines, interlace=1))
    np.testing.assert_array_equal(png.read_encoded(tmp_path / "a.png", "first").decode().pixels, pixels)


def test_what_is_no_pixel_is_passed_over(tmp_path):
    broken_text = bytearray(chunk(b"tEXt", b"Comment\0" + b"x" * 50))
    broken_text[20] ^= 255
    extra = (
        chunk(b"gAMA", struct.pack(">I", 100_000))
        + chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(10**7)))
        + chunk(b"tRNS", SHADES[8][:1, :1].astype(">u2").tobytes())
        + bytes(broken_text)
    )
    whole = grey_bytes(SHADES[8], extra=extra, end=chunk(b"tIME", bytes(7)))
    (tmp_path / "a.png").write_bytes(whole + b"behind the end")
    encoded = png.read_encoded(tmp_path / "a.png", "first")
    np.testing.assert_array_equal(encoded.decode().pixels, SHADES[8])
    assert len(encoded.data) < len(whole) - len(extra) + 1


# The same image as PNG and as DICOM


def linear(values: np.ndarray, center: float, width: float) -> np.ndarray:
    """DICOM PS3.3 C.11.2.1.2."""
    return np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1)


WAYS = [("first", "MONOCHROME2"), ("first", "MONOCHROME1"), ("none", "MONOCHROME2")]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("window", "photometric"), WAYS)
def test_png_and_dicom_are_prepared_alike(tmp_path, bits, window, photometric):  # D07
    pixels, _ = draw_breast(np.random.default_rng(3), (600, 450), "MLO", "R")
    inverted = photometric == "MONOCHROME1"
    stored = 4095 - pixels if inverted else pixels
    center = 4095 - 1300 if inverted else 1300
    elements = {"WindowCenter": f"{center}", "WindowWidth": "2200", "PhotometricInterpretation": photometric}
    path = dicom_files.write(tmp_path / "a.dcm", stored, **elements)
    lowest, span = float(stored.min()), int(stored.max()) - int(stored.min())
    shades = linear(stored.astype(float), center, 2200) if window == "first" else (stored - lowest) / span
    shades = 1 - shades if inverted else shades
    image = save(tmp_path / "a.png", np.rint(shades * (2**bits - 1)).astype(f"u{bits // 8}"))
    config = PreprocessConfig(height=128, width=64, window=window, crop=False)
    expected, found = prepare(path, config).image, prepare(image, config).image
    assert np.abs(found.astype(int) - expected).max() <= (GREY_LEVEL if bits == 8 else 1)
    assert expected.max() > 1500  # or black would equal black
    # The breast is looked for on means, of stored values here and of shades there: edges may lie a little apart.
    config = PreprocessConfig(height=128, width=64, window=window)
    expected, found = prepare(path, config), prepare(image, config)
    assert np.abs(np.subtract(found.box, expected.box)).max() <= 8
    assert found.flipped and expected.flipped and found.source_shape == (600, 450)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_real_mammogram_as_png_and_as_dicom(tmp_path, bits):  # D07
    path = REAL / "mg_ge_sigmoid_3windows_jpll.dcm"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    shades = dicom.to_display(dicom.read_stored(path))
    image = save(tmp_path / "a.png", np.rint(shades * (2**bits - 1)).astype(f"u{bits // 8}"))
    config = PreprocessConfig(height=512, width=256)
    expected, found = prepare(path, config), prepare(image, config)
    assert found.box == expected.box and found.flipped == expected.flipped
    assert np.abs(found.image.astype(int) - expected.image).max() <= GREY_LEVEL


def test_detector_values_in_16_bits(tmp_path):  # D07
    """Shown as they are they would be nearly black; stretched they are what DICOM gives."""
    pixels, _ = draw_breast(np.random.default_rng(4), (600, 450), "CC", "L")
    assert pixels.max() < 4096
    image = save(tmp_path / "a.png", pixels)
    assert "-p window none" in refusal(image, "first")
    with pytest.raises(dicom.DicomError, match="-p window none"):
        prepare(image, PreprocessConfig(height=128, width=64))
    config = PreprocessConfig(height=128, width=64, window="none")
    expected = prepare(dicom_files.write(tmp_path / "a.dcm", pixels), config)
    np.testing.assert_array_equal(prepare(image, config).image, expected.image)
    fine = 4 * pixels + RNG.integers(0, 4, pixels.shape).astype(np.uint16)  # 14 bits
    assert "-p window none" in refusal(save(tmp_path / "b.png", fine), "first")


@pytest.mark.parametrize("window_bits", [12, 14])
def test_a_dark_image_is_no_detectors(tmp_path, window_bits):
    """Values up to 255 under a window of 12 bits, as the competition has, and up to a tenth of one of 14."""
    pixels, _ = draw_breast(np.random.default_rng(5), (300, 200), "CC", "L")
    values = pixels // 16 if window_bits == 12 else np.minimum(pixels, 1638)
    shades = np.rint(linear(values.astype(float), 2 ** (window_bits - 1), 2**window_bits) * 65535).astype(np.uint16)
    assert shades.max() < 2**13
    stored = png.read_encoded(save(tmp_path / "a.png", shades), "first").decode()
    np.testing.assert_allclose(dicom.to_display(stored), shades / 65535, atol=1e-7)


def test_values_in_a_small_part_of_the_range_fill_it(tmp_path):  # D19
    values = RNG.integers(300, 901, (200, 150)).astype(np.uint16)
    values[:, 75:] = 300
    stretched = (values - 300.0) / 600
    path = dicom_files.write(tmp_path / "a.dcm", values)
    np.testing.assert_allclose(dicom.to_display(dicom.read_stored(path)), stretched, atol=1e-6)
    config = PreprocessConfig(height=200, width=150, crop=False)
    expected = prepare(path, config).image
    for bits in (8, 16):
        saved = np.rint(stretched * (2**bits - 1)).astype(f"u{bits // 8}")
        image = save(tmp_path / f"{bits}.png", saved)
        np.testing.assert_array_equal(png.read_encoded(image, "first").decode().pixels, saved)
        found = prepare(image, config).image
        assert found.min() == 0 and found.max() == 4095
        assert np.abs(found.astype(int) - expected).max() <= GREY_LEVEL


@pytest.mark.parametrize("value", [0, 200])
def test_a_blank_image(tmp_path, value):  # D12
    image = save(tmp_path / "a.png", np.full((300, 200), value, np.uint8))
    with pytest.raises(BlankImage, match=r"a\.png: blank image"):
        prepare(image, PreprocessConfig(height=64, width=32))


# What is refused


def huge(rows: int, columns: int) -> bytes:
    return png_bytes(rows, columns, 16, 0, bytes(1000))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


GOOD = grey_bytes(SHADES[16])
COLORS = np.dstack([SHADES[8], SHADES[8], SHADES[8] // 2])
COLORS[0, 0] = (255, 255, 127)
CASES = {  # what the file holds, and words of the cause
    "nothing": (b"", "the file is empty"),
    "JPEG": (cv2.imencode(".jpg", SHADES[8])[1].tobytes(), "not a PNG file: it begins with b'.*, as JPEG does"),
    "text": (b"<!DOCTYPE html> not found", "not a PNG file: it begins with b'<!DOCTYP'"),
    "the first bytes": (GOOD[:20], "cut short: it has 20 bytes"),
    "damaged header": (damaged(GOOD, 18), "header .* is damaged"),
    "damaged pixels": (damaged(GOOD, len(GOOD) // 2), "the checksum of the chunk IDAT at byte 33 is wrong"),
    "half of it": (GOOD[: len(GOOD) // 2], "cut short: [0-9]+ bytes, and no end"),
    "all but its end": (GOOD[:-12], "cut short: [0-9]+ bytes, and no end"),
    "no pixels": (GOOD[:33] + GOOD[-12:], "can't be unpacked"),
    "rows missing": (png_bytes(23, 17, 16, 0, lines_of(SHADES[16])[:-35]), "can't be unpacked"),
    "60,000 x 60,000": (huge(60_000, 60_000), "60000 x 60000 pixels, more than"),
    "8,000 x 8,000 in nothing": (huge(8_000, 8_000), "can't hold 8000 x 8000 pixels"),
    "2**31 rows": (huge(2**31 - 1, 1), "2147483647 x 1 pixels, more than"),
    "no rows": (huge(0, 100), "0 x 100 pixels"),
    "1 bit": (png_bytes(2, 8, 1, 0, b"\0\xaa\0\x55"), "1 bits a pixel, as of a mask: expected 8 or 16"),
    "4 bits": (png_bytes(2, 2, 4, 0, b"\0\x0f\0\xf0"), "4 bits a pixel"),
    "colours": (png_bytes(23, 17, 8, 2, lines_of(COLORS)), "in colours, whose channels lie up to 128 apart"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_is_refused_with_its_cause(tmp_path, name):  # D12, D13, D15
    data, cause = CASES[name]
    (tmp_path / "a.png").write_bytes(data)
    found = refusal(tmp_path / "a.png")
    assert re.search(cause, found), found


def test_a_missing_file(tmp_path):
    assert "FileNotFoundError" in refusal(tmp_path / "a.png")


def test_a_dicom_file_that_is_called_png(tmp_path):
    assert "not a PNG file" in refusal(dicom_files.write(tmp_path / "a.png", SHADES[16]))


def test_cut_anywhere(tmp_path):  # D13
    for length in range(len(GOOD)):
        (tmp_path / "a.png").write_bytes(GOOD[:length])
        with pytest.raises(dicom.DicomError):
            png.read_encoded(tmp_path / "a.png", "first")


def test_damaged_files_are_images_or_refused(tmp_path):
    """Bytes changed in a file or in its pixel data, with checksums made right so that the decoder has to deal with it."""
    rng = np.random.default_rng(1)
    compressed, refused = zlib.compress(lines_of(SHADES[16])), 0
    for _ in range(300):
        data = bytearray(compressed if rng.random() < 0.7 else GOOD)
        whole = len(data) == len(GOOD)
        for place in rng.integers(0 if not whole else 8, len(data), rng.integers(1, 5)):
            data[place] = rng.integers(256)
        if not whole:
            data = GOOD[:33] + chunk(b"IDAT", bytes(data[: rng.integers(1, len(data) + 1)])) + GOOD[-12:]
        (tmp_path / "a.png").write_bytes(bytes(data))
        try:
            pixels = png.read_encoded(tmp_path / "a.png", "none").decode().pixels
            assert pixels.shape == (23, 17) and pixels.dtype == np.uint16
        except dicom.DicomError as error:
            refused += 1
            assert error.path == str(tmp_path / "a.png") and error.cause
    assert refused > 250


def test_headers_of_files(tmp_path):
    assert png.read_header(save(tmp_path / "a.png", SHADES[16])) == png.PngHeader(23, 17, 16, 0)
    buffer = io.BytesIO()
    Image.fromarray(COLORS).save(buffer, "PNG")
    (tmp_path / "b.png").write_bytes(buffer.getvalue()[:33])  # that is all it takes
    assert png.read_header(tmp_path / "b.png") == png.PngHeader(23, 17, 8, 2)
    with pytest.raises(dicom.DicomError, match=r"c\.png: the file is empty"):
        (tmp_path / "c.png").touch()
        png.read_header(tmp_path / "c.png")
