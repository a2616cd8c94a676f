"""Packed image store: one file of records of one size, read by memory map; or a PNG file an image.

A store is a folder: `manifest.json` says what its images are (format, shape, settings and their hash), `index.csv` has a
row an image (a failed one too, with its reason), and the images are as rsnakit.store_formats says. An image is on the disk
before its line is written, and a line counts only when it is whole, so a killed writer leaves nothing half done.
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit.blocks import Blocks, dequantize_blocks, quantize_blocks
from rsnakit.files import read_json, replacing, write_json
from rsnakit.store_formats import (
    FORMATS,
    PNG_FORMATS,
    are_there,
    decode_record,
    encode_record,
    png_path,
    record_bytes,
    write_image,
)

__all__ = [
    "FORMATS", "INDEX_COLUMNS", "Blocks", "Store", "StoreError", "append_index", "check_settings", "config_hash",
    "decode_record", "dequantize_blocks", "encode_record", "open_for_writing", "quantize_blocks", "read_index",
    "read_manifest", "record_bytes", "write_image",
]  # fmt: skip

LAYOUT = 2  # of block8: tiles of 8 x 4 pixels, where the first one had runs of 32
INDEX_COLUMNS = (
    "row", "patient_id", "image_id", "status", "reason", "source_height", "source_width", "source_bytes",
    "top", "left", "bottom", "right", "flipped", "seconds", "content",
)  # fmt: skip
WITHOUT_CONTENT = INDEX_COLUMNS[:-1]  # the index of a store that an older version made


class StoreError(ValueError):
    """A store that is not what it is asked to be; the message says what differs and what to do."""


class Store:
    """A store on disk, for reading. `store[i]` is the image of row i of `index`, as (height, width) uint16, 12 bits.

    Attributes:
        path: its folder.
        manifest: what `manifest.json` holds: format, height, width, preprocess (the settings), hash, versions.
        index: DataFrame, a row an image in the store's order; ids are strings; status is `ok`, `blank` or `failed`; reason
            says why there are no pixels, or of an image that is `ok` what was put right in reading its file; content is a
            hash of the prepared pixels, by which equal images are found, and "" where it is not known.

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
        self._check_complete()

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        if not self._ok[row]:
            bad = self.index.iloc[row]
            raise StoreError(f"{self.path}: image {bad.image_id} has no pixels: {bad.status}, {bad.reason}")
        try:
            return self._read(row)
        except ValueError as error:
            line = self.index.iloc[row]
            raise StoreError(
                f"{self.path}: image {line.image_id} (patient {line.patient_id}): {error}. Delete its line in index.csv, the "
                f"one that begins with '{line.row},', and run 02_preprocess, which makes the image anew."
            ) from error

    def __getstate__(self) -> dict:
        # A worker process opens its own map instead of receiving the images.
        return {**self.__dict__, "_map": None}

    def _read(self, row: int) -> np.ndarray:
        image_format = self.manifest["format"]
        if image_format in PNG_FORMATS:
            file = png_path(self.path, self.index["patient_id"].iat[row], self.index["image_id"].iat[row])
            try:
                return decode_record(np.fromfile(file, np.uint8), image_format, self.shape)
            except FileNotFoundError:
                raise ValueError(f"there is no {file}") from None
        if self._map is None:
            shape = (self._count_records(), self._record_bytes)
            self._map = np.memmap(self.path / "images.bin", np.uint8, "r", shape=shape).view(np.ndarray)
        if self._record[row] >= len(self._map):
            raise ValueError(f"it is record {self._record[row]}, and images.bin was cut to {len(self._map)} since")
        return decode_record(self._map[self._record[row]], image_format, self.shape)

    def _check_complete(self) -> None:
        """Refuses a copy whose pixels are missing, or cut short. PNG files are not looked for one by one before their turn:
        that takes minutes where folders are slow."""
        needed = int(self._record[self._ok].max(initial=-1)) + 1
        if self.manifest["format"] in PNG_FORMATS:
            complete, found = not needed or (self.path / "images").is_dir(), "there is no folder images"
        else:
            complete, found = self._count_records() >= needed, f"images.bin holds {self._count_records()} whole images"
        if not complete:
            raise StoreError(
                f"{self.path}: {found} and the index goes up to {needed}: the copy is not complete. Copy the store again, or "
                "run 02_preprocess, which makes what is missing."
            )

    def _count_records(self) -> int:
        file = self.path / "images.bin"
        return file.stat().st_size // self._record_bytes if file.exists() else 0

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
    if manifest["format"] == "block8" and manifest.get("layout", 1) != LAYOUT:
        raise StoreError(
            f"{path}: its block8 images are laid out in way {manifest.get('layout', 1)} and this version reads way {LAYOUT}. "
            "Delete the store and run 02_preprocess, or use the version that made it."
        )
    return manifest


def open_for_writing(
    path: Path, settings: dict, image_format: str, shape: tuple[int, int], versions: dict
) -> pd.DataFrame:
    """Makes a store's folder, or goes on with the one there; returns the index of what it holds already.

    An image that the index names and the disk does not hold (one was copied without the other, or the copy has a hole)
    counts as not there; see `store_formats.are_there` for what is looked at.

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
        if any((path / name).exists() for name in ("index.csv", "images.bin", "images")):
            raise StoreError(
                f"{path}: holds images but no manifest.json, so nobody knows how they were made. Delete it."
            )
        manifest = {
            "format": image_format, "layout": LAYOUT, "height": shape[0], "width": shape[1], "bits": 12,
            "preprocess": settings, "hash": config_hash(settings), "versions": versions,
        }  # fmt: skip
        write_json(path / "manifest.json", manifest)
    index = read_index(path)
    ok = index["status"] == "ok"
    lost = ok.copy()
    lost[ok] = ~are_there(path, image_format, (manifest["height"], manifest["width"]), index[ok])
    if lost.any():
        logging.getLogger(__name__).warning(
            "%s: %d images that index.csv names are not on the disk, %s among them; they are made anew",
            path, lost.sum(), index.loc[lost, "image_id"].head(3).tolist(),
        )  # fmt: skip
    index = index[~lost]
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


def append_index(path: Path, rows: list[dict]) -> None:
    """Adds rows of `INDEX_COLUMNS` to the index, once the images written so far are on the disk.

    PNG files are by themselves, and records of another machine where it wrote them with `sync`.
    """
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
    header = tuple(whole.split("\n", 1)[0].split(","))
    if header not in (INDEX_COLUMNS, WITHOUT_CONTENT):
        raise StoreError(
            f"{path / 'index.csv'}: not the index of a store, its first line is {whole[:60]!r}. Delete the store."
        )
    strings = {name: str for name in ("patient_id", "image_id", "status", "reason", "content")}
    index = pd.read_csv(io.StringIO(whole), dtype=strings, keep_default_na=False, na_values={"seconds": [""]})
    if header == WITHOUT_CONTENT:
        index["content"] = ""
    index = index.drop_duplicates("row", keep="last")  # an image tried again has a later line
    return index.sort_values("row").reset_index(drop=True)
