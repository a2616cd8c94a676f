"""Packed image store: one file of records of one size, read by memory map, and 8+1-bit block quantisation.

A store is a folder: `manifest.json` says what its images are (format, shape, settings and their hash), `index.csv` has a
row an image (a failed one too, with its reason) and `images.bin` the records, row r at r times the record's size. A record
is written before its row, and a row counts only when its line is whole, so a killed writer leaves nothing half done.
"""

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit.files import replacing, write_json

FORMATS = ("block8", "raw16")
BLOCK = 32  # pixels a block of the format block8: 32 codes of a byte, and two uint16, are 9 bits a pixel
INDEX_COLUMNS = (
    "row", "patient_id", "image_id", "status", "reason", "source_height", "source_width", "source_bytes",
    "top", "left", "bottom", "right", "flipped", "seconds",
)  # fmt: skip


class StoreError(ValueError):
    """A store that is not what it is asked to be; the message says what differs and what to do."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array in blocks: `low + codes * step`, a `low` and a `step` for each block.

    Attributes:
        codes: (n_blocks, block) uint8.
        low: (n_blocks,) uint16 for integers, float32 for floats: the smallest value of each block.
        step: (n_blocks,) of low's type: what one level of the code is worth; 1 (0 for floats) in a constant block.
        shape: shape of the array that was quantised.
        dtype: its NumPy type.
    """

    codes: np.ndarray
    low: np.ndarray
    step: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype


def quantize_blocks(x: np.ndarray, block: int = BLOCK) -> Blocks:
    """Quantises an array to 8-bit codes with a minimum and a step for each run of `block` values.

    The array is taken in C order; a last short block is filled up with its own last value. Integers are exact wherever a
    block spans 255 levels or fewer, else within half a step; floats are within half a step, and constant blocks exact.

    Args:
        x: integers in 0..65535, or floats, of any shape.
        block: values a block; 32 for integers and 64 for floats make 9 bits a value.

    Raises:
        ValueError: a NaN or an infinity, an integer outside 0..65535, or a range that float32 does not hold.
        TypeError: neither integers nor floats.
    """
    x = np.asarray(x)
    if x.dtype.kind not in "uif":
        raise TypeError(f"quantize_blocks takes integers or floats, not {x.dtype}")
    flat = np.ascontiguousarray(x).reshape(-1)
    n_blocks = -(-flat.size // block)
    if flat.size % block:
        flat = np.pad(flat, (0, n_blocks * block - flat.size), mode="edge")
    rows = flat.reshape(n_blocks, block)
    if x.dtype.kind == "f":
        codes, low, step = _quantize_floats(rows)
    else:
        codes, low, step = _quantize_integers(rows)
    return Blocks(codes, low, step, x.shape, x.dtype)


def dequantize_blocks(blocks: Blocks) -> np.ndarray:
    """The array that was quantised, in its shape and type (see `quantize_blocks` for how near it comes)."""
    if blocks.dtype.kind == "f":
        # In float64: low + 255 * step may lie beyond float32 by a rounding error although the maximum does not.
        values = blocks.low[:, None].astype(np.float64) + blocks.codes * blocks.step[:, None].astype(np.float64)
        limit = np.finfo(blocks.dtype).max
        values = np.clip(values, -limit, limit).astype(blocks.dtype)
    else:
        # In uint16 throughout: low + code * step is at most half a step over the maximum, and is cut to the type's range.
        values = blocks.codes * blocks.step[:, None].astype(np.uint32)
        values += blocks.low[:, None]
        top = min(np.iinfo(blocks.dtype).max, 65535)
        values = np.minimum(values, top, out=values).astype(blocks.dtype)
    return values.reshape(-1)[: int(np.prod(blocks.shape, dtype=np.int64))].reshape(blocks.shape)


def _quantize_integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = rows.min(axis=1, initial=65535), rows.max(axis=1, initial=0)
    if rows.size and (low.min() < 0 or high.max() > 65535):
        raise ValueError(f"quantize_blocks: integers from {low.min()} to {high.max()}, expected 0..65535")
    span = high.astype(np.uint32) - low.astype(np.uint32)
    step = np.maximum(1, (span + 254) // 255)
    codes = (rows.astype(np.uint32) - low[:, None].astype(np.uint32) + step[:, None] // 2) // step[:, None]
    return codes.astype(np.uint8), low.astype(np.uint16), step.astype(np.uint16)


def _quantize_floats(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not np.isfinite(rows).all():
        bad = "a NaN" if np.isnan(rows).any() else "an infinity"
        raise ValueError(f"quantize_blocks: {bad} at flat position {int(np.argmin(np.isfinite(rows.reshape(-1))))}")
    wide = rows.astype(np.float64)
    # float32 may round the minimum up; then the lowest values get code 0, which is within the rounding.
    low = wide.min(axis=1, initial=np.inf).astype(np.float32) if rows.size else np.zeros(0, np.float32)
    step = (
        ((wide.max(axis=1, initial=-np.inf) - low) / 255).astype(np.float32) if rows.size else np.zeros(0, np.float32)
    )
    if not (np.isfinite(low).all() and np.isfinite(step).all()):
        raise ValueError("quantize_blocks: values beyond the range of float32")
    step = np.maximum(step, 0)
    divisor = np.where(step > 0, step, 1).astype(np.float64)[:, None]  # a constant block: every code is 0
    codes = np.clip(np.rint((wide - low[:, None]) / divisor), 0, 255)
    return codes.astype(np.uint8), low, step


class Store:
    """A store on disk, for reading. `len(store)` counts rows, `store[i]` is row i as (height, width) uint16, 12 bits.

    Attributes:
        path: its folder.
        manifest: what `manifest.json` holds: format, height, width, preprocess (the settings), hash, versions.
        index: DataFrame, a row an image in the store's order; ids are strings; status is `ok`, `blank` or `failed`.

    Raises:
        StoreError: the folder holds no store, or one of a format that this version cannot read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.index = read_index(self.path)
        self.shape = (self.manifest["height"], self.manifest["width"])
        self._record_bytes = record_bytes(self.manifest["format"], self.shape)
        self._ok = (self.index["status"] == "ok").to_numpy()
        self._row_of = {image_id: row for row, image_id in enumerate(self.index["image_id"])}
        self._map: np.ndarray | None = None  # opened on first use, in the process that uses it

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        if not self._ok[row]:
            bad = self.index.iloc[row]
            raise StoreError(f"{self.path}: image {bad.image_id} has no pixels: {bad.status}, {bad.reason}")
        if self._map is None:
            size = (self.path / "images.bin").stat().st_size // self._record_bytes
            self._map = np.memmap(self.path / "images.bin", np.uint8, "r", shape=(size, self._record_bytes))
        image = decode_record(self._map[row], self.manifest["format"], self.shape)
        return np.minimum(image, 4095, out=image)  # a block's largest value may come back half a step above itself

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_map": None}  # a worker process opens its own map instead of receiving the images

    def rows_of(self, image_ids: Iterable[str]) -> np.ndarray:
        """Rows of the images, (n,) int64; StoreError naming the first few that are not in the store."""
        image_ids = list(image_ids)
        missing = [i for i in image_ids if i not in self._row_of]
        if missing:
            raise StoreError(
                f"{self.path}: {len(missing)} of {len(image_ids)} images are not in this store, {missing[:3]} among them. "
                "Run 02_preprocess on this competition, or give the store_dir that holds it."
            )
        return np.array([self._row_of[i] for i in image_ids], dtype=np.int64)


def config_hash(settings: dict) -> str:
    """SHA-256 of plain settings, the same whatever the order of their names."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def record_bytes(image_format: str, shape: tuple[int, int]) -> int:
    """Bytes of one image of (height, width) pixels in a format."""
    pixels = shape[0] * shape[1]
    if image_format == "raw16":
        return 2 * pixels
    n_blocks = -(-pixels // BLOCK)
    return n_blocks * (BLOCK + 4)


def encode_record(image: np.ndarray, image_format: str) -> bytes:
    """One image, (height, width) uint16, as the bytes of its record."""
    if image_format == "raw16":
        return np.ascontiguousarray(image, "<u2").tobytes()
    blocks = quantize_blocks(image, BLOCK)
    return blocks.codes.tobytes() + blocks.low.astype("<u2").tobytes() + blocks.step.astype("<u2").tobytes()


def decode_record(record: np.ndarray, image_format: str, shape: tuple[int, int]) -> np.ndarray:
    """The image of a record, (record_bytes,) uint8, as (height, width) uint16."""
    if image_format == "raw16":
        return record.view("<u2").reshape(shape).astype(np.uint16)
    n_blocks = len(record) // (BLOCK + 4)
    codes, low, step = np.split(record, [n_blocks * BLOCK, n_blocks * (BLOCK + 2)])
    blocks = Blocks(codes.reshape(n_blocks, BLOCK), low.view("<u2"), step.view("<u2"), shape, np.dtype(np.uint16))
    return dequantize_blocks(blocks)


def read_manifest(path: Path) -> dict:
    """The manifest of a store's folder; StoreError where there is none or its format is unknown."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path}: no image store here (no manifest.json). 02_preprocess makes one.") from None
    if manifest["format"] not in FORMATS:
        raise StoreError(f"{path}: images in format {manifest['format']!r}; this version reads {', '.join(FORMATS)}")
    return manifest


def open_for_writing(
    path: Path, settings: dict, image_format: str, shape: tuple[int, int], versions: dict
) -> pd.DataFrame:
    """Makes a store's folder, or goes on with the one there; returns the index of what it holds already.

    Raises:
        StoreError: the store there was made with other settings, named with both values.
    """
    if image_format not in FORMATS:
        raise StoreError(f"store format {image_format!r}: expected one of {', '.join(FORMATS)}")
    if (path / "manifest.json").exists():
        manifest = read_manifest(path)
        check_settings(manifest, {**settings, "format": image_format}, path)
    else:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "index.csv").exists() or (path / "images.bin").exists():
            raise StoreError(
                f"{path}: holds images but no manifest.json, so nobody knows how they were made. Delete it."
            )
        manifest = {
            "format": image_format, "height": shape[0], "width": shape[1], "bits": 12,
            "preprocess": settings, "hash": config_hash(settings), "versions": versions,
        }  # fmt: skip
        write_json(path / "manifest.json", manifest)
    index = read_index(path)
    with replacing(path / "index.csv") as temporary:  # a line that a kill cut short is dropped for good
        index.to_csv(temporary, index=False)
    return index


def check_settings(manifest: dict, wanted: dict, path: Path) -> None:
    """Refuses (StoreError) a store whose settings differ from the wanted ones, naming each that differs."""
    have = {**manifest["preprocess"], "format": manifest["format"]}
    names = [n for n in sorted({*have, *wanted}) if n in wanted and have.get(n) != wanted[n]]
    if names:
        rows = "; ".join(f"{n} is {have.get(n)!r} in the store and {wanted[n]!r} now" for n in names)
        raise StoreError(f"{path}: made with other settings: {rows}. Give another store_dir, or delete this one.")


def append_index(path: Path, rows: list[dict]) -> None:
    """Adds rows of `INDEX_COLUMNS` to the index: from then on their records count."""
    text = pd.DataFrame(rows, columns=list(INDEX_COLUMNS)).to_csv(index=False, header=False)
    with open(path / "index.csv", "a", encoding="utf-8") as f:
        f.write(text)


def write_record(path: Path, row: int, record: bytes) -> None:
    """Writes a record at its place in images.bin; several processes may do so at once."""
    descriptor = os.open(path / "images.bin", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        written, offset = 0, row * len(record)
        while written < len(record):
            written += os.pwrite(descriptor, record[written:], offset + written)
    finally:
        os.close(descriptor)


def read_index(path: Path) -> pd.DataFrame:
    """The index of a store's folder, in the order of its rows, without a last line that was cut short."""
    try:
        text = (path / "index.csv").read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ",".join(INDEX_COLUMNS) + "\n"
    whole = text[: text.rfind("\n") + 1]
    strings = {name: str for name in ("patient_id", "image_id", "status", "reason")}
    index = pd.read_csv(io.StringIO(whole), dtype=strings, keep_default_na=False, na_values={"seconds": [""]})
    index = index.drop_duplicates("row", keep="last")  # an image tried again has a later line
    return index.sort_values("row").reset_index(drop=True)
