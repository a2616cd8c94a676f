"""Packed image store: one file of records of one size, read by memory map.

A store is a folder: `manifest.json` says what its images are (format, shape, settings and their hash), `index.csv` has a
row an image (a failed one too, with its reason) and `images.bin` the records, row r at r times the record's size. A record
is on the disk before its line is written, and a line counts only when it is whole, so a killed writer leaves nothing half
done.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit.blocks import BLOCK, Blocks, dequantize_blocks, quantize_blocks
from rsnakit.files import read_json, replacing, write_json

FORMATS = ("block8", "raw16")
INDEX_COLUMNS = (
    "row", "patient_id", "image_id", "status", "reason", "source_height", "source_width", "source_bytes",
    "top", "left", "bottom", "right", "flipped", "seconds",
)  # fmt: skip


class StoreError(ValueError):
    """A store that is not what it is asked to be; the message says what differs and what to do."""


class Store:
    """A store on disk, for reading. `store[i]` is the image of row i of `index`, as (height, width) uint16, 12 bits.

    Attributes:
        path: its folder.
        manifest: what `manifest.json` holds: format, height, width, preprocess (the settings), hash, versions.
        index: DataFrame, a row an image in the store's order; ids are strings; status is `ok`, `blank` or `failed`.

    Raises:
        StoreError: the folder holds no store, one of a format that this version cannot read, or one whose images.bin is
            shorter than its index says.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.index = read_index(self.path)
        self.shape = (self.manifest["height"], self.manifest["width"])
        self._record_bytes = record_bytes(self.manifest["format"], self.shape)
        self._ok = (self.index["status"] == "ok").to_numpy(bool)
        self._record = self.index["row"].to_numpy(np.int64)  # not 0, 1, 2 while a store is unfinished
        self._row_of = {image_id: row for row, image_id in enumerate(self.index["image_id"])}
        self._map: np.ndarray | None = None  # opened on first use, in the process that uses it
        needed, found = self._record[self._ok].max(initial=-1) + 1, count_records(self.path, self.manifest)
        if found < needed:
            raise StoreError(
                f"{self.path}: images.bin holds {found} whole images and the index goes up to {needed}: the copy is not "
                "complete. Copy the store again, or run 02_preprocess, which makes what is missing."
            )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        if not self._ok[row]:
            bad = self.index.iloc[row]
            raise StoreError(f"{self.path}: image {bad.image_id} has no pixels: {bad.status}, {bad.reason}")
        if self._map is None:
            shape = (count_records(self.path, self.manifest), self._record_bytes)
            self._map = np.memmap(self.path / "images.bin", np.uint8, "r", shape=shape).view(np.ndarray)
        image = decode_record(self._map[self._record[row]], self.manifest["format"], self.shape)
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


def count_records(path: Path, manifest: dict) -> int:
    """Whole records in a store's images.bin."""
    size = (path / "images.bin").stat().st_size if (path / "images.bin").exists() else 0
    return size // record_bytes(manifest["format"], (manifest["height"], manifest["width"]))


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
        manifest = read_json(path / "manifest.json")
    except FileNotFoundError:
        raise StoreError(f"{path}: no image store here (no manifest.json). 02_preprocess makes one.") from None
    except ValueError as error:
        raise StoreError(f"{error}. Delete the store {path} and make it again.") from error
    if manifest["format"] not in FORMATS:
        raise StoreError(f"{path}: images in format {manifest['format']!r}; this version reads {', '.join(FORMATS)}")
    return manifest


def open_for_writing(
    path: Path, settings: dict, image_format: str, shape: tuple[int, int], versions: dict
) -> pd.DataFrame:
    """Makes a store's folder, or goes on with the one there; returns the index of what it holds already.

    What the index names and images.bin does not hold (one was copied without the other) counts as not there.

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
    index = index[(index["status"] != "ok") | (index["row"] < count_records(path, manifest))]
    with replacing(path / "index.csv") as temporary:  # a line that a kill cut short is dropped for good
        index.to_csv(temporary, index=False, lineterminator="\n")
    return index


def check_settings(manifest: dict, wanted: dict, path: Path) -> None:
    """Refuses (StoreError) a store whose settings differ from the wanted ones, naming each that differs."""
    have = {**manifest["preprocess"], "format": manifest["format"]}
    unset = "not set"
    pairs = {name: (have.get(name, unset), wanted.get(name, unset)) for name in sorted({*have, *wanted})}
    rows = [
        f"{name} is {there!r} in the store and {here!r} now" for name, (there, here) in pairs.items() if there != here
    ]
    if rows:
        raise StoreError(
            f"{path}: made with other settings: {'; '.join(rows)}. Give another store_dir, or delete this one."
        )


def write_record(path: Path, row: int, record: bytes) -> None:
    """Writes a record at its place in images.bin; it counts once `append_index` has its row."""
    descriptor = os.open(path / "images.bin", os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    with open(descriptor, "wb") as f:  # a descriptor is not cut to nothing by "wb", as a path would be
        f.seek(row * len(record))
        f.write(record)


def append_index(path: Path, rows: list[dict]) -> None:
    """Adds rows of `INDEX_COLUMNS` to the index, once the records written so far are on the disk."""
    if (path / "images.bin").exists():
        with open(path / "images.bin", "rb+") as f:
            os.fsync(f.fileno())
    text = pd.DataFrame(rows, columns=list(INDEX_COLUMNS)).to_csv(index=False, header=False, lineterminator="\n")
    with open(path / "index.csv", "a", encoding="utf-8", newline="") as f:
        f.write(text)


def read_index(path: Path) -> pd.DataFrame:
    """The index of a store's folder, in the order of its rows, without a last line that was cut short."""
    try:
        text = (path / "index.csv").read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    whole = text[: text.rfind("\n") + 1] or ",".join(INDEX_COLUMNS) + "\n"
    if whole.split("\n", 1)[0] != ",".join(INDEX_COLUMNS):
        raise StoreError(
            f"{path / 'index.csv'}: not the index of a store, its first line is {whole[:60]!r}. Delete the store."
        )
    strings = {name: str for name in ("patient_id", "image_id", "status", "reason")}
    index = pd.read_csv(io.StringIO(whole), dtype=strings, keep_default_na=False, na_values={"seconds": [""]})
    index = index.drop_duplicates("row", keep="last")  # an image tried again has a later line
    return index.sort_values("row").reset_index(drop=True)
