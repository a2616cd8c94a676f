"""One image of a store, to its bytes on the disk and back.

- `block8`, 9 bits a pixel: codes of 8 bits with a minimum and a step for each tile of 8 x 4 pixels. Exact in tiles that
  span 255 levels or fewer, and in two others for each constant tile; the rest within half a step (see rsnakit.blocks).
- `raw16`, exact: 16 bits a pixel.
- `png16`, exact: a PNG file an image, its 16 bits filled up: 65535 is a value of 4095.
- `png8`: the same in 8 bits, within 8 of the 4,096 levels.

The first two are records of one size in images.bin, record r at r times the size; the PNG files, which any viewer and many
competitors' code read, are `images/{patient_id}/{image_id}.png`.
"""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from rsnakit.blocks import BLOCK, Blocks, dequantize_blocks, quantize_blocks
from rsnakit.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd  # processes that only write images start faster without it

FORMATS = ("block8", "raw16", "png16", "png8")
PNG_FORMATS = ("png16", "png8")
MAX_VALUE = 4095  # prepared images carry 12 significant bits, as mammography detectors mostly do
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
# Pixels of a block lie together: on mammograms fitted to 1024x512, 83 to 92 % of such tiles span 255 levels or fewer, and
# 54 to 70 % of runs of 32.
TILE = (8, 4)
PAGE = 4096  # bytes; a disk reads no fewer
FROM_8_BITS = np.rint(np.arange(256) * (MAX_VALUE / 255)).astype(np.uint16)


def write_image(
    path: Path,
    image_format: str,
    row: int,
    patient_id: str,
    image_id: str,
    image: np.ndarray,
    sync: bool = False,
) -> None:
    """Puts an image at its place in the store's folder; it counts once `store.append_index` has its row.

    Many processes may do so at once, each with other rows. A PNG file is on the disk when this returns; a record is, once
    the row is appended on the same machine.

    Args:
        path: the store's folder.
        image_format: one of `FORMATS`.
        row: the image's row in the store: where its record lies.
        patient_id, image_id: what a PNG file is named after.
        image: (height, width) uint16 in 0..4095, not all 0: such a record would look like one that was never written.
        sync: waits until a record is on the disk, for a folder that another machine shares and appends the row from.

    Raises:
        ValueError: another type or other values.
        OSError: as of a full disk (ENOSPC).
    """
    data = encode_record(image, image_format)
    if image_format in PNG_FORMATS:
        file = png_path(path, patient_id, image_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, data)
        return
    # O_CREAT alone: a file that is there keeps its other records.
    descriptor = os.open(path / "images.bin", os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        _write_at(descriptor, data, row * len(data))
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def png_path(path: Path, patient_id: str, image_id: str) -> Path:
    """The PNG file of an image; ValueError for ids that are no names of files."""
    for name in (patient_id, image_id):
        if name in ("", ".", "..") or any(c in name for c in '/\\:*?"<>|\0'):
            raise ValueError(f"id {name!r} cannot name a file, as PNG stores do: take store_format block8 or raw16")
    return path / "images" / patient_id / f"{image_id}.png"


def record_bytes(image_format: str, shape: tuple[int, int]) -> int:
    """Bytes of one image of (height, width) pixels: its record's size, or for PNG the most that its file may take.

    Mammograms take about 60 % of that in png16 and a fifth in png8.
    """
    height, width = shape
    if image_format == "block8":
        return _n_tiles(shape) * (BLOCK + 4)
    if image_format == "raw16":
        return 2 * height * width
    # Noise, which does not get smaller: a filter byte a line, and what zlib's and PNG's own blocks add.
    content = height * (1 + width * (2 if image_format == "png16" else 1))
    return content + content // 256 + 1024


def encode_record(image: np.ndarray, image_format: str) -> bytes:
    """One image, (height, width) uint16 in 0..4095, as the bytes of its record or file; ValueError for anything else."""
    if image.dtype != np.uint16 or image.ndim != 2 or not 0 < image.max(initial=0) <= MAX_VALUE:
        raise ValueError(
            f"an image of shape {image.shape}, {image.dtype}, up to {image.max(initial=0)}: a store takes (height, width) "
            f"uint16 in 0..{MAX_VALUE}, and none that is all 0"
        )
    if image_format == "block8":
        blocks = quantize_blocks(image, TILE)
        return blocks.codes.tobytes() + blocks.low.astype("<u2").tobytes() + blocks.step.astype("<u2").tobytes()
    if image_format == "raw16":
        return np.ascontiguousarray(image, "<u2").tobytes()
    if image_format == "png16":
        pixels = (image << 4) + (image + 136) // 273  # value * 65535 / 4095, rounded; 65535 / 4095 is 16 + 1 / 273
    else:
        pixels = np.rint(image * np.float32(255 / MAX_VALUE)).astype(np.uint8)
    # OpenCV's own choice of level and strategy: 5.4 bits a pixel in 6 ms on mammograms of 1024x512, where zlib's level 6
    # takes 5.8 in 89 ms, and 5.6 with PNG's filters at their best in 120 ms.
    return cv2.imencode(".png", pixels)[1].tobytes()


def decode_record(record: np.ndarray, image_format: str, shape: tuple[int, int]) -> np.ndarray:
    """The image of a record or file, (bytes,) uint8, as (height, width) uint16 in 0..4095.

    Args:
        record: its bytes.
        image_format: one of `FORMATS`.
        shape: (height, width).

    Raises:
        ValueError: no image of this shape: never written, or damaged.
    """
    if image_format == "block8":
        grid = rows, columns = _grid(shape)
        end = rows * columns * BLOCK
        codes = record[:end].reshape(rows * TILE[0], columns * TILE[1])
        low, step = record[end:].view("<u2").reshape(2, *grid)
        image = dequantize_blocks(Blocks(codes, low, step, TILE, shape, np.dtype(np.uint16), MAX_VALUE))
    elif image_format == "raw16":
        image = record.view("<u2").reshape(shape).astype(np.uint16)
    else:
        image = _decode_png(record, image_format, shape)
    top = image.max()
    if top > MAX_VALUE or (top == 0 and image_format not in PNG_FORMATS):
        raise ValueError(f"values up to {top}, expected 1 to {MAX_VALUE}: damaged, or never written")
    return image


def are_there(path: Path, image_format: str, shape: tuple[int, int], index: pd.DataFrame) -> np.ndarray:
    """Whether the images of an index are on the disk, (n,) bool, as far as a short look tells.

    A PNG file is looked for by name. Of a record a page is read, where a hole in the file (a copy that lost a part, a disk
    that lost power) is all 0 and an image is not: the last steps in block8; in raw16 the lines at half height, and the whole
    record where these are 0.
    """
    if image_format in PNG_FORMATS:
        names = zip(index["patient_id"], index["image_id"], strict=True)
        return np.array([_size(png_path(path, *name)) > 0 for name in names], bool)
    size = record_bytes(image_format, shape)
    if not (path / "images.bin").exists():
        return np.zeros(len(index), bool)
    with open(path / "images.bin", "rb", buffering=0) as f:  # unbuffered: what lies between the pages is not read
        n_whole = os.fstat(f.fileno()).st_size // size
        return np.array(
            [row < n_whole and _is_written(f, row * size, image_format, shape) for row in index["row"]], bool
        )


def _is_written(f: io.RawIOBase, start: int, image_format: str, shape: tuple[int, int]) -> bool:
    size = record_bytes(image_format, shape)
    if image_format == "block8":
        n = min(PAGE, 2 * _n_tiles(shape))
        f.seek(start + size - n)
        return bool(np.frombuffer(f.read(n), "<u2").all())
    middle = shape[0] // 2 * 2 * shape[1]
    for first, end in (middle, min(middle + PAGE, size)), (0, size):
        f.seek(start + first)
        if np.frombuffer(f.read(end - first), np.uint8).any():
            return True
    return False


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:  # a call may write a part, of a disk that fills up for one
        if hasattr(os, "pwrite"):
            n = os.pwrite(descriptor, left, offset)
        else:  # Windows; the descriptor is the caller's own, so nobody moves its position in between
            os.lseek(descriptor, offset, os.SEEK_SET)
            n = os.write(descriptor, left)
        left, offset = left[n:], offset + n


def _decode_png(data: np.ndarray, image_format: str, shape: tuple[int, int]) -> np.ndarray:
    whole = data[-len(PNG_END) :].tobytes() == PNG_END  # OpenCV may give the upper part of a file that was cut short
    pixels = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if whole else None
    if pixels is None:
        raise ValueError(f"{len(data)} bytes that are no whole PNG file: damaged")
    wanted = np.uint16 if image_format == "png16" else np.uint8
    if pixels.shape != shape or pixels.dtype != wanted:
        raise ValueError(f"a PNG of {pixels.shape} {pixels.dtype}, expected {shape} {np.dtype(wanted)}")
    return pixels >> 4 if image_format == "png16" else FROM_8_BITS[pixels]


def _grid(shape: tuple[int, int]) -> tuple[int, int]:
    """Tiles down and across an image of (height, width)."""
    return -(-shape[0] // TILE[0]), -(-shape[1] // TILE[1])


def _n_tiles(shape: tuple[int, int]) -> int:
    return math.prod(_grid(shape))


def _size(file: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
