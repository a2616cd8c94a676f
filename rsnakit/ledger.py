"""What inference has done so far, on the disk as it comes, so that after a kill the same call goes on.

scores/key.json       what decided the scores, and what is noted beside it
       scores.csv     a line an image, about 120 bytes; ok or blank: what failed is tried again
       features.bin   of models that see breasts: passes x channels float32 an image, 4 bytes each
       room           kept free for the files that come at the end; gone as soon as the disk is full, and at the end

A line counts where it is whole, its checksum is right (its features are in it) and its image's file is as it was: as long, as
old, and of the same bytes at its beginning and in its middle.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rsnakit import runs
from rsnakit.files import Lock, open_regular, read_json, write_atomic, write_json

FIELDS = (
    "row", "image_id", "status", "score", "seconds", "asked", "used", "bytes", "mtime_ns", "record", "reason", "crc",
)  # fmt: skip
KEPT = ("ok", "blank")  # statuses that are not tried again
REASON = 200  # characters that are kept of it
LINE_BYTES = 400
KEY_BYTES = 10_000
ROOM = 1_000_000, 500  # bytes kept free: for all, and an image; report.csv and submission.csv take half of it
AT_ONCE = 16  # files on a network disk are looked at so
LOOKED_AT = 4096  # bytes at a file's beginning, and in its middle


class Record(NamedTuple):
    """What was found of an image.

    Attributes:
        row: of the table.
        status, score, seconds, reason: as in the report; the score of an image that a breast's score is made of is 0.
        asked, used: bits by the number of a pass: those that it was shown to, and those that gave something finite.
        features: (passes, channels) float32, of models that see breasts; zeros of passes that are not among `used`.
    """

    row: int
    status: str
    score: float
    seconds: float
    asked: int
    used: int
    reason: str = ""
    features: np.ndarray | None = None


class Ledger:
    """The scores of a folder, as a context manager: `with Ledger(...) as ledger`, then `records`, then `keep` after `keep`.

    Whatever fails in writing (a full disk, a drive that is gone) is said once, and inference goes on without it. Records of
    other weights, images, settings or passes are deleted, and that is said.

    Args:
        folder: made where there is none; None: nothing is kept.
        key: plain values that decide the scores.
        image_ids, paths: of the table's rows.
        shape: (passes, channels) of an image's features; None where models score images.
        noted: plain values that are said where they have changed, but do not begin anew.

    Raises:
        rsnakit.files.LockedError: on entering, where another process writes there.
    """

    def __init__(
        self,
        folder: Path | str | None,
        key: Mapping,
        image_ids: Sequence[str],
        paths: Sequence[Path],
        shape: tuple[int, int] | None = None,
        noted: Mapping | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.key, self.noted = (json.loads(json.dumps(dict(part or {}))) for part in (key, noted))
        self.image_ids, self.paths, self.shape = list(map(str, image_ids)), list(paths), shape
        self._bytes = 4 * int(np.prod(shape)) if shape else 0  # of a record of features
        self._open: dict[str, io.FileIO] = {}  # nothing is kept where it is empty
        self._n_records, self._readable = 0, False
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "Ledger":
        if self.folder is None:
            return self
        with contextlib.ExitStack() as undo:
            try:
                undo.enter_context(Lock(self.folder, "inference"))
                self._begin()
            except OSError as error:
                self._give_up(error)
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self._exit.__exit__(*error)

    @property
    def size(self) -> int:
        """Bytes on the disk at most, if no image's file is changed meanwhile: of all images, and of the room."""
        return (LINE_BYTES + self._bytes + ROOM[1]) * len(self.paths) + ROOM[0] + KEY_BYTES

    def records(self) -> Iterator[Record]:
        """What was kept before of files that are as they were, in the order it came; of an image's several the last counts."""
        if not self._readable:
            return
        try:
            names = {"encoding": "utf-8", "errors": "replace", "newline": "\n"}
            with open(self._path("scores.csv"), **names) as lines, self._features() as features:
                rows = [row for row in map(self._row, lines) if row is not None]
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    looks = dict(zip(rows, pool.map(_look, [self.paths[row] for row in rows]), strict=True))
                lines.seek(0)
                for line in lines:
                    if (row := self._row(line)) is not None and (
                        found := self._parse(line, features, looks[row])
                    ) is not None:
                        yield found
        except OSError as error:
            self._give_up(error)

    def keep(self, records: Sequence[Record]) -> None:
        """Adds records of images that are done; when it comes back a kill costs them no more."""
        records = [record for record in records if record.status in KEPT]
        if not (self._open and records):
            return
        try:
            data = [b"" if record.features is None else record.features.astype("<f4").tobytes() for record in records]
            if self.shape:  # before the lines that speak of them
                _write(self._open["features.bin"], b"".join(data))
            lines = map(self._line, records, data, range(self._n_records, self._n_records + len(records)))
            _write(self._open["scores.csv"], "".join(lines).encode())
            self._n_records += len(records)
        except OSError as error:
            self._give_up(error)

    def _begin(self) -> None:
        before = _read_key(self._path("key.json"))
        differing = runs.compare(before.get("key", {}), self.key) if before else {}
        if not before or differing:
            if self._path("scores.csv").exists():
                because = f"{', '.join(differing)} differ" if differing else "it cannot be read what decided them"
                print(f"{self.folder}: the scores that were kept there are deleted and begun anew, since {because}")
            for name in ("scores.csv", "features.bin"):  # before there is a key that they do not fit
                self._path(name).unlink(missing_ok=True)
        elif changed := runs.compare(before.get("noted", {}), self.noted):
            said = ", ".join(f"{name}: {was!r}, now {now!r}" for name, (was, now) in changed.items())
            print(f"NOTE: {self.folder}: the scores kept there were made otherwise, and are gone on with ({said})")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self._stats = list(pool.map(_size_and_time, self.paths))
        if before and not differing and self._path("scores.csv").exists():
            self._mend()
            self._readable = True  # on a full disk, too
        if before != (now := {"key": self.key, "noted": self.noted}):
            write_json(self._path("key.json"), now)
        self._take_room()
        if not self._readable:
            self._path("features.bin").unlink(missing_ok=True)
            write_atomic(self._path("scores.csv"), ",".join(FIELDS) + "\n")
        names = ("scores.csv", "features.bin") if self.shape else ("scores.csv",)
        self._open = {name: open(self._path(name), "ab", buffering=0) for name in names}  # noqa: SIM115

    def _mend(self) -> None:
        """Cuts off what a kill left half written, so that what is added stands on a line and a record of its own."""
        scores, features = self._path("scores.csv"), self._path("features.bin")
        text = scores.read_bytes()
        os.truncate(scores, text.rfind(b"\n") + 1)
        if self.shape and features.exists():
            self._n_records = features.stat().st_size // self._bytes
            os.truncate(features, self._n_records * self._bytes)

    def _take_room(self) -> None:
        size = ROOM[0] + ROOM[1] * len(self.paths)
        with open(self._path("room"), "wb") as room:
            room.write((os.urandom(4096) * (size // 4096 + 1))[:size])  # no zeros, which some disks do not write

    def _line(self, record: Record, data: bytes, number: int) -> str:
        values = (
            record.row, self.image_ids[record.row], record.status, repr(float(record.score)), f"{record.seconds:.4f}",
            record.asked, record.used, *self._stats[record.row], number if self.shape else "",
            " ".join(record.reason.split())[:REASON],
        )  # fmt: skip
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(values)
        return f"{text.getvalue()},{_crc(text.getvalue(), data, _look(self.paths[record.row]))}\n"

    def _row(self, line: str) -> int | None:
        """A line's row; None of the header, of a line that is not whole, and of a file that is not as long or as old."""
        try:
            values = next(csv.reader([line]))
            row, stats = int(values[0]), (int(values[7]), int(values[8]))
            return row if row >= 0 and stats == self._stats[row] else None
        except (ValueError, IndexError, OverflowError, StopIteration, csv.Error):
            return None

    def _parse(self, line: str, features: io.BufferedReader | None, look: bytes) -> Record | None:
        """A line's record; None of a line that is not whole, and of a file that was changed since."""
        text, _, crc = line.rstrip("\n").rpartition(",")
        try:
            row, image_id, status, score, seconds, asked, used, _, _, number, reason = next(csv.reader([text]))
            data = b""
            if features is not None:
                features.seek(int(number) * self._bytes)
                data = features.read(self._bytes)
            if crc != _crc(text, data, look) or image_id != self.image_ids[int(row)]:
                return None
        except (ValueError, IndexError, OverflowError, StopIteration, csv.Error):
            return None
        found = np.frombuffer(data, "<f4").reshape(self.shape) if self.shape else None
        return Record(int(row), status, float(score), float(seconds), int(asked), int(used), reason, found)

    def _give_up(self, error: OSError) -> None:
        self._close()
        print(
            f"NOTE: {self.folder}: scores cannot be kept there ({error.strerror or error}). Inference goes on without: after a "
            "restart what was not kept is scored again."
        )

    def _close(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
        self._open = {}
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self._path("room").unlink(missing_ok=True)

    def _features(self) -> contextlib.AbstractContextManager:
        return open(self._path("features.bin"), "rb") if self.shape else contextlib.nullcontext()

    def _path(self, name: str) -> Path:
        return self.folder / name


def _write(file: io.FileIO, data: bytes) -> None:
    """All of it, though a nearly full disk may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _crc(text: str, data: bytes, look: bytes) -> str:
    return f"{zlib.crc32(look, zlib.crc32(data, zlib.crc32(text.encode()))):08x}"


def _size_and_time(path: Path | str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _look(path: Path | str) -> bytes:
    """What tells a file's content from another's: files of one machine are equally long, and copies keep their time."""
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            first = file.read(LOOKED_AT)
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOOKED_AT) // 2)
            return hashlib.blake2b(first + file.read(LOOKED_AT), digest_size=8).digest()
    except OSError:
        return b""


def _read_key(path: Path) -> dict:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("key"), dict) else {}
