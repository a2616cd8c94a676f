"""A test set made to hurt: what the hidden one may hold and the visible one does not show.

`make` builds a competition's folder from the images of another one, under ids, machines, sites and views that nothing was
trained on, and says what was done to which image, so that whoever rehearses can tell whether each got its row and status.
"""

import dataclasses
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset

from rsnakit.demo import TEST_COLUMNS
from rsnakit.tables import TableError, load_table

KINDS = ("visible", "one", "many")
LEAST = 32  # images of `many`: the breasts that it must hold take so many, but for some sound ones
# What is done to an image, and the status that its row in report.csv has to have.
HURTS = {
    "cut": "failed",  # the first half of a file
    "garbage": "failed",  # bytes by chance
    "empty": "failed",  # a file without any
    "missing": "failed",  # a row of test.csv without a file
    "all_zero": "blank",  # every stored value is 0
    "huge": "ok",  # larger than any of the competition's, which are 4,915 x 5,355 pixels at most
}
HUGE = (8000, 6000)  # rows, columns
CC_AND_MLO = (("L", "CC"), ("L", "MLO"), ("R", "CC"), ("R", "MLO"))
RATE = 0.021168  # of the original's sample_submission.csv
SAFE_AS_FLOAT = 2**53


@dataclasses.dataclass(frozen=True)
class HiddenSet:
    """A test set, and what is in it.

    Attributes:
        folder: in a competition's layout.
        kind: one of KINDS.
        images: a row an image in test.csv's order: patient_id, image_id, prediction_id, laterality, view, `source` (the file
            whose image it is), `hurt` (a name of HURTS, or empty) and `status` that report.csv has to say.
    """

    folder: Path
    kind: str
    images: pd.DataFrame


def make(source: Path | str, out: Path | str, kind: str, n: int = 200, seed: int = 0, link: bool = True) -> HiddenSet:
    """Makes the folder of a competition with a test set of its own.

    `visible` is the competition's own test.csv and its images. `one` is a single image of a new machine, site and age.
    `many` has a breast with one view, whose patient has no other side, and one with six; new machines and sites; views that
    no table names; missing ages; ids above 2**31, one of which no float holds; prediction_ids that cannot be built from
    patient and side; a breast none of whose images can be read; all of HURTS; and its rows in shuffled order. train.csv
    comes along as it is, without its images.

    Args:
        source: the competition's folder. Images are taken from training and test, those that are there.
        out: the folder to make; it must not be there.
        kind: one of KINDS.
        n: images of `many`, at least LEAST. Where the source has fewer, its images come again under other ids.
        seed: decides ids, order and which images.
        link: hard links where the file system allows them, and not copies. Whoever writes into one writes into the source.

    Raises:
        ValueError: another kind, or too few images are asked for.
        FileNotFoundError: the source has no table, or, for `visible`, no test.csv.
        FileExistsError: `out` is there.
        rsnakit.tables.TableError: a table of the source is not as it should be, or has no image that is there.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    if kind == "many" and n < LEAST:
        raise ValueError(f"n is {n}: a set made to hurt has {LEAST} images or more")
    source, out = Path(source), Path(out)
    out.mkdir(parents=True)
    if (source / "train.csv").exists():
        shutil.copyfile(source / "train.csv", out / "train.csv")
    if kind == "visible":
        return HiddenSet(out, kind, _visible(source, out, link))
    rng = np.random.default_rng(seed)
    tables = [load_table(source, split) for split in ("train", "test") if (source / f"{split}.csv").exists()]
    if not tables:
        raise FileNotFoundError(f"{source}: neither train.csv nor test.csv is there")
    pool = pd.concat(tables, ignore_index=True)
    header = pd.read_csv(source / "test.csv", nrows=0).columns if (source / "test.csv").exists() else TEST_COLUMNS
    planned = _plan_one() if kind == "one" else _plan_many(n)
    rows = _named(rng, planned, pool, source)
    if kind == "many":
        rows = rows.iloc[rng.permutation(len(rows))].reset_index(drop=True)
    rows.reindex(columns=list(header)).to_csv(out / "test.csv", index=False)
    ids = rows["prediction_id"].drop_duplicates()
    pd.DataFrame({"prediction_id": ids, "cancer": RATE}).to_csv(out / "sample_submission.csv", index=False)
    for row in rows.to_dict("records"):
        target = out / "test_images" / row["patient_id"] / f"{row['image_id']}.dcm"
        target.parent.mkdir(parents=True, exist_ok=True)
        _put(rng, row["source"], target, row["hurt"], link)
    rows["status"] = rows["hurt"].map({"": "ok", **HURTS})
    return HiddenSet(
        out, kind, rows[["patient_id", "image_id", "prediction_id", "laterality", "view", "source", "hurt", "status"]]
    )


def _visible(source: Path, out: Path, link: bool) -> pd.DataFrame:
    """The competition's own test set; an image that is not there is expected to fail."""
    table = load_table(source, "test")
    for name in ("test.csv", "sample_submission.csv"):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    for path in table["path"]:
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _put(np.random.default_rng(0), path, target, "", link)
    hurt = ["" if path.exists() else "missing" for path in table["path"]]
    table = table.assign(source=table["path"], hurt=hurt, status=["failed" if name else "ok" for name in hurt])
    return table[["patient_id", "image_id", "prediction_id", "laterality", "view", "source", "hurt", "status"]]


# ---- who is in it


def _plan_one() -> list[list[dict]]:
    return [[{"laterality": "R", "view": "MLO", "site_id": "3", "machine_id": "9001", "age": np.nan}]]


def _plan_many(n: int) -> list[list[dict]]:
    """Images by patient: what has to be in it, then ordinary patients of four images up to n in all."""

    def patient(
        views: tuple[tuple[str, str], ...], hurts: dict[int, str] | None = None, **columns: object
    ) -> list[dict]:
        hurts = hurts or {}
        return [
            {"laterality": side, "view": view, "hurt": hurts.get(i, ""), **columns}
            for i, (side, view) in enumerate(views)
        ]

    six = tuple(("L", view) for view in ("CC", "MLO", "CC", "MLO", "AT", "LM"))
    odd_views = (("L", "XCCL"), ("L", "view of no table"), ("R", "SIO"), ("R", "CC"))
    planned = [
        patient((("L", "CC"),)),
        patient(six + CC_AND_MLO[2:]),
        patient(odd_views, age=np.nan),
        patient(CC_AND_MLO, site_id="3", machine_id="9001", age=np.nan, prediction_form="breast {side} of {patient}"),
        patient(CC_AND_MLO, {0: "cut", 1: "garbage", 2: "missing"}),  # no image of the left breast can be read
        patient(CC_AND_MLO, {0: "all_zero", 2: "huge", 3: "empty"}, machine_id="9002"),
    ]  # fmt: skip
    left = n - sum(map(len, planned))
    planned += [patient(CC_AND_MLO[: min(4, left - begun)]) for begun in range(0, left, 4)]
    return planned


def _named(rng: np.random.Generator, planned: list[list[dict]], pool: pd.DataFrame, source: Path) -> pd.DataFrame:
    """The planned images with new ids, an image of the pool each, and what its row says of age, site, machine, implant."""
    images = _there(pool, rng, source)
    patients = _new_ids(rng, len(planned), set(pool["patient_id"]), 5, 2**31)
    count = sum(map(len, planned))
    ids = _new_ids(rng, count, set(pool["image_id"]), 68491, 2**31)
    ids[::8] = _new_ids(rng, len(ids[::8]), set(pool["image_id"]), 2**31, 2**32)
    if count > 1:
        ids[-1] = str(SAFE_AS_FLOAT + 1)
    rows, number = [], iter(ids)
    for patient, members in zip(patients, planned, strict=True):
        of_patient = None
        for member in members:
            image = next(images)
            of_patient = of_patient or {name: image[name] for name in ("site_id", "machine_id", "age") if name in image}
            form = member.get("prediction_form", "{patient}_{side}")
            named = {
                "patient_id": patient, "image_id": next(number), "source": image["path"], "hurt": "",
                "prediction_id": form.format(patient=patient, side=member["laterality"]),
            }  # fmt: skip
            rows.append({**image, **of_patient, **named, **member})
    return pd.DataFrame(rows)


def _there(pool: pd.DataFrame, rng: np.random.Generator, source: Path) -> Iterator[dict]:
    """Rows of the pool whose image is there, in an order by chance, again and again."""

    def once() -> Iterator[dict]:
        for place in rng.permutation(len(pool)):
            row = pool.iloc[place]
            if row["path"].exists():
                yield row.to_dict()

    found = once()
    first = next(found, None)
    if first is None:
        raise TableError(f"{source}: no image that its tables name is there, {pool['path'].iloc[0]} for one")
    return itertools.cycle(itertools.chain([first], found))


def _new_ids(rng: np.random.Generator, count: int, used: set[str], low: int, high: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found |= {text: None for text in map(str, rng.integers(low, high, count)) if text not in used}
    return list(found)[:count]


# ---- its files


def _put(rng: np.random.Generator, source: Path, target: Path, hurt: str, link: bool) -> None:
    """One image's file: the source's, or what the hurt makes of it."""
    if hurt == "cut":
        data = source.read_bytes()
        target.write_bytes(data[: len(data) // 2])
    elif hurt == "garbage":
        target.write_bytes(rng.bytes(50_000))
    elif hurt == "empty":
        target.touch()
    elif hurt == "all_zero":
        header = pydicom.dcmread(source, specific_tags=["Rows", "Columns"], stop_before_pixels=True)
        _write(target, np.zeros((header.Rows, header.Columns), np.uint16))
    elif hurt == "huge":
        _write(target, _draw_huge(rng))
    elif hurt != "missing":
        link_or_copy(source, target, link)


def link_or_copy(source: Path, target: Path, link: bool) -> None:
    """The file under another name, by a hard link where that is wanted and can be."""
    if link:
        try:
            os.link(source.resolve(), target)  # a link to a symbolic one would lead astray from here
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, target)


def _draw_huge(rng: np.random.Generator) -> np.ndarray:
    """Half an ellipse of tissue with grain at the left edge of a dark frame, HUGE uint16 of 12 bits."""
    rows, columns = HUGE
    y, x = np.linspace(-1, 1, rows, dtype=np.float32)[:, None], np.linspace(0, 1.3, columns, dtype=np.float32)
    depth = np.clip(1 - y * y - x * x, 0, None)
    np.sqrt(depth, out=depth)
    depth *= 3000
    grain = rng.integers(0, 200, columns, dtype=np.uint16)  # of a row, and moved in each
    pixels = depth.astype(np.uint16)
    pixels += np.stack([np.roll(grain, 7 * row) for row in range(rows)]) * (depth > 0)
    return pixels


def _write(path: Path, pixels: np.ndarray) -> None:
    """A valid uncompressed mammogram of 12 bits."""
    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = uid.DigitalMammographyXRayImageStorageForPresentation
    header.file_meta.MediaStorageSOPInstanceUID = uid.generate_uid(entropy_srcs=[path.stem])
    header.SOPClassUID, header.SOPInstanceUID = (
        header.file_meta.MediaStorageSOPClassUID,
        header.file_meta.MediaStorageSOPInstanceUID,
    )
    header.Modality, header.PhotometricInterpretation = "MG", "MONOCHROME2"
    header.Rows, header.Columns = pixels.shape
    header.SamplesPerPixel, header.BitsAllocated, header.BitsStored, header.HighBit = 1, 16, 12, 11
    header.PixelRepresentation = 0
    header.PixelData = pixels.tobytes()
    header["PixelData"].VR = "OW"
    header.save_as(path, enforce_file_format=True)
