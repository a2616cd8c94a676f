"""What a run of the inference notebook left: which cell stopped it, whether each image got its row and status, what was
written and where."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
import pandas as pd

from rsnakit import dicom
from rsnakit.hidden import HiddenSet
from rsnakit.sandbox import Outcome
from rsnakit.submission import check_submission

SHOWN = 3  # examples in a sentence
LINES = 6  # of an error


def what_failed(executed: Path, outcome: Outcome) -> str:
    """Which cell stopped, and of what; of a kernel that died, the last that was said."""
    for number, cell in enumerate(_code_cells(executed), 1):
        for output in cell.outputs:
            if output.output_type == "error":
                lines = [line for line in f"{output.ename}: {output.evalue}".splitlines() if line.strip()]
                return f"code cell {number} stopped with {_plain(lines[:1] + lines[1:][-LINES:])}"
    return f"ended with status {outcome.status}: {_plain(outcome.tail(LINES).splitlines())}"


def seconds_of_cells(executed: Path) -> tuple[float, ...]:
    """Seconds of each code cell, as papermill notes them; 0 of one that did not run."""
    return tuple(cell.metadata.get("papermill", {}).get("duration") or 0.0 for cell in _code_cells(executed))


def _code_cells(executed: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(executed, 4).cells if executed.exists() else []
    return [cell for cell in cells if cell.cell_type == "code"]


def _plain(lines: Sequence[str]) -> str:
    """Lines in one, without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", " | ".join(line.strip() for line in lines))


def listed(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file below a folder."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


def changes(before: Mapping, after: Mapping) -> list[str]:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{len(changed)} files of the inputs were written, {_some(changed)}"] if changed else []


def check(working: Path, test: HiddenSet) -> tuple[pd.DataFrame | None, list[str], list[str]]:
    """The report that a run left, faults and notes."""
    faults, notes = [], []
    there = {path.relative_to(working).as_posix(): path.stat().st_size for path in working.rglob("*") if path.is_file()}
    if "submission.csv" in there:
        try:
            check_submission(working / "submission.csv", test.folder / "test.csv")
        except ValueError as error:  # and what pandas says of no csv
            faults.append(f"submission.csv: {error}")
    else:
        others = [name for name in there if name.endswith("submission.csv")]
        where = f", but {_some(others)} is" if others else ""
        faults.append(f"submission.csv is not in /kaggle/working{where}")
    stray = {name: size for name, size in there.items() if name not in ("submission.csv", "report.csv")}
    if stray:
        largest = sorted(stray, key=lambda name: (-stray[name], name))
        notes.append(
            f"{len(stray)} more files in /kaggle/working, {sum(stray.values()) / 1e6:.1f} MB: {_some(largest)}"
        )
    if "report.csv" not in there:
        return None, [*faults, "report.csv is not in /kaggle/working"], notes
    ids = {"patient_id": str, "image_id": str, "prediction_id": str}
    try:
        frame = pd.read_csv(working / "report.csv", dtype=ids, keep_default_na=False).set_index("image_id")
        said = frame[["status", "reason", "seconds"]].rename(columns={"status": "status_found"})
        found = test.images.join(said, "image_id")
    except (ValueError, KeyError) as error:
        return None, [*faults, f"report.csv cannot be used: {error}"], notes
    more, told = _check_images(found)
    return frame, faults + more, notes + told


def _check_images(found: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Whether each image has the status that it must have, by what was done to it."""
    faults, notes = [], []
    lacking = found["status_found"].isna()
    if lacking.any():
        faults.append(f"report.csv has no row for {lacking.sum()} images, {_some(found.loc[lacking, 'image_id'])}")
    for row in found[~lacking & (found["hurt"] != "") & (found["status_found"] != found["status"])].to_dict("records"):
        what = row["hurt"].replace("_", "-")
        faults.append(
            f"the {what} image {row['image_id']} is {row['status_found']!r}, expected {row['status']!r}; {row['reason']}"
        )
    odd = found[~lacking & (found["hurt"] == "") & (found["status_found"] != "ok")]
    blank = (
        odd[[row.status_found == "blank" and _is_blank(row.source) for row in odd.itertuples()]] if len(odd) else odd
    )
    if len(blank):
        notes.append(f"{len(blank)} images are blank in the competition itself, {_some(blank['source'].unique())}")
    wrong = odd.drop(blank.index)
    if len(wrong):
        row = wrong.iloc[0]
        said = f"{row['source']} is {row['status_found']!r}: {row['reason']}"
        faults.append(f"{len(wrong)} of {(found['hurt'] == '').sum()} sound images were not scored; {said}")
    reasons = found.loc[(found["status_found"] == "ok") & (found["reason"].fillna("") != ""), "reason"]
    for reason, count in reasons.value_counts().head(SHOWN).items():
        notes.append(f"{count} images: {reason}")
    return faults, notes


def _is_blank(path: Path) -> bool:
    with contextlib.suppress(dicom.DicomError):
        return dicom.is_blank(dicom.read_stored(path).pixels)
    return False


def _some(names: Sequence) -> str:
    return ", ".join(map(str, list(names)[:SHOWN])) + (" and others" if len(names) > SHOWN else "")
