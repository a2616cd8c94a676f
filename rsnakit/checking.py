"""What a run of the inference notebook left: which cell stopped it, whether each image got its row and status, what was
written and where; and what its code names that only this machine has."""

import ast
import contextlib
import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
from packaging.utils import canonicalize_name

from rsnakit import bundle, dicom, metrics, submission, wheels
from rsnakit.bundle import Bundle
from rsnakit.files import read_json, write_json
from rsnakit.hidden import HiddenSet
from rsnakit.sandbox import Outcome

SHOWN = 3  # examples in a sentence
LINES = 6  # of an error
# Of a notebook with two T4: kaggle.com/docs/notebooks, technical specifications.
DISK_GB = 20.0  # of /kaggle/working
MEMORY_GB = 29.0
# An absolute path, and whose first part every Linux has.
ABSOLUTE = re.compile(r"/[\w.+@~-]+(/[\w.+@~ -]*)*|[A-Za-z]:[\\/].*")
EVERYWHERE = ("bin", "dev", "etc", "kaggle", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var")
# What IPython makes of lines that begin with ! and %.
SHELL = ("system", "getoutput", "run_line_magic", "run_cell_magic")
NOTEBOOKS = ("IPython", "ipykernel", "ipywidgets")  # have these wherever they run
REHEARSED, VERDICT = "rehearsal", "verdict.json"  # folder beside a bundle, and file in it
NEAR = 1e-6  # between what a table says and what is made of it again


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


def over_limits(outcome: Outcome) -> list[str]:
    """What a run took and Kaggle has not."""
    faults = []
    if outcome.peak_disk > DISK_GB * 1e9:
        faults.append(f"{outcome.peak_disk / 1e9:.1f} GB were in /kaggle/working, which holds {DISK_GB:.0f}")
    if outcome.peak_memory > MEMORY_GB * 1e9:
        faults.append(
            f"it took {outcome.peak_memory / 1e9:.1f} GB of memory, and Kaggle's machine with two T4 has {MEMORY_GB:.0f}; "
            "-p n_jobs 4 has as many processes decode as there, and a smaller infer_batch_size holds fewer images"
        )
    return faults


def keep_verdict(made: Bundle, is_ok: bool, folder: Path) -> None:
    """Notes whether a bundle passed, for `verdict_note`."""
    write_json(folder / VERDICT, {"bundle": fingerprint(made), "ok": is_ok})


def verdict_note(made: Bundle) -> str:
    """A sentence where a bundle was not rehearsed as it is, or did not pass; else "". It is looked for beside the bundle."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(made.folder.resolve().parent / REHEARSED / VERDICT)
        if found["bundle"] == fingerprint(made):
            return "" if found["ok"] else "its rehearsal found faults, or left out some of the test sets"
    return "this bundle, as it is, was not rehearsed: python -m rsnakit.kaggle rehearse"


def fingerprint(made: Bundle) -> str:
    """What tells a bundle from any other: a hash of its list of files, of the notebook and of its metadata."""
    files = (made.dataset / bundle.MANIFEST, made.kernel / bundle.KERNEL_METADATA, made.kernel / bundle.NOTEBOOK)
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def check_code(notebook: Path, files: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Faults and notes on what a notebook's code names by a path that is none of Kaggle's.

    A path that is there on this machine is a fault: here it may do, and on Kaggle it will not. A use of $RSNAKIT_ROOT that
    does without a default of / is noted: a rehearsal sets it, and Kaggle does not. So is a package that neither travels nor is
    sure to be in Kaggle's image: what is installed here the notebook finds here.

    Args:
        notebook: its path.
        files: of the data set, its wheels among them.
    """
    faults, notes = [], []
    brought = {path.rpartition("/")[2].partition("-")[0] for path in files if path.endswith(".whl")}
    for number, cell in enumerate(_code_cells(notebook), 1):
        tree = _parsed(cell.source)
        paths, asks = _named_in(tree)
        if unsure := _not_on_kaggle(tree, brought):
            notes.append(
                f"code cell {number} imports {', '.join(unsure)}, which Kaggle's image may lack, and no wheel of it travels"
            )
        for path in paths:
            known = Path(path).parts[1:2] and Path(path).parts[1] in EVERYWHERE
            if Path(path).exists() and not known:
                faults.append(f"code cell {number} names {path}, which is there on this machine and not on Kaggle")
            elif not known:
                notes.append(f"code cell {number} names {path}, which is none of Kaggle's folders")
        if asks:
            notes.append(f"code cell {number} uses $RSNAKIT_ROOT, which Kaggle does not set: / has to be its default")
    return faults, notes


def _parsed(code: str) -> list[ast.AST]:
    """The nodes of a cell's syntax; none where it has an error, which a run tells."""
    from IPython.core.inputtransformer2 import TransformerManager

    with contextlib.suppress(SyntaxError):
        return list(ast.walk(ast.parse(TransformerManager().transform_cell(code))))
    return []


def _not_on_kaggle(nodes: Sequence[ast.AST], brought: Collection[str]) -> list[str]:
    """What is imported of packages that neither are among those brought nor in `wheels.IMAGE`."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    asked = [top for top in tops if top not in sys.stdlib_module_names and top not in (*NOTEBOOKS, "rsnakit")]
    there = {*wheels.IMAGE, *map(canonicalize_name, brought)}
    if not any(top not in there for top in asked):
        return []
    of = importlib.metadata.packages_distributions()
    return [top for top in asked if not there & {top, *map(canonicalize_name, of.get(top, ()))}]


def _named_in(nodes: Sequence[ast.AST]) -> tuple[list[str], bool]:
    """Absolute paths in a cell's texts, in order, and whether it asks for $RSNAKIT_ROOT without a default."""
    found, with_default, continued = [], set(), set()
    for node in nodes:
        if isinstance(node, ast.Call):
            texts = [part.value for part in node.args if isinstance(part, ast.Constant)]
            if isinstance(node.func, ast.Attribute) and node.func.attr in SHELL:
                found += [word for text in texts for word in re.split(r"[\s'\"=]+", str(text))]
            if texts[:1] == ["RSNAKIT_ROOT"] and len(texts) > 1:
                with_default.add(id(node.args[0]))
        elif isinstance(node, ast.JoinedStr):
            continued.update(map(id, node.values[1:]))
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found += [node.value for node in texts if id(node) not in continued]
    asks = any(node.value == "RSNAKIT_ROOT" and id(node) not in with_default for node in texts)
    return list(dict.fromkeys(filter(ABSOLUTE.fullmatch, found))), asks


def _code_cells(executed: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(executed, 4).cells if executed.exists() else []
    return [cell for cell in cells if cell.cell_type == "code"]


def _plain(lines: Sequence[str]) -> str:
    """Lines in one, without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", " | ".join(line.strip() for line in lines))


def listed(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file below a folder."""
    files = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (found.st_size, found.st_mtime_ns) for name, found in files.items()}


def changes(before: Mapping, after: Mapping) -> list[str]:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{len(changed)} files of the inputs were written, {_some(changed)}"] if changed else []


def check(working: Path, test: HiddenSet) -> tuple[pd.DataFrame | None, list[str], list[str]]:
    """The report that a run left, faults and notes."""
    faults, notes, submitted = [], [], None
    there = {name: size for name, (size, _) in listed(working).items()}
    if "submission.csv" in there:
        try:
            submitted = submission.check_submission(working / "submission.csv", test.folder / "test.csv")
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
    if submitted is not None and not found["status_found"].isna().any():
        contradicted, noted = _compare(submitted, frame.reset_index())
        more, told = more + contradicted, told + noted
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


def _compare(submitted: pd.DataFrame, report: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Whether the submission is what the report's scores lead to.

    The kit's own ways to a breast's score, cut by one threshold or not at all, are right. Whoever has a way of their own is
    told so; no way leads to a breast whose every image has a lower score than all images of another one, and that is
    predicted above it.

    Args:
        submitted: as `check_submission` gives it.
        report: a row for each image of test.csv.
    """
    predicted, notes = submitted.set_index("prediction_id")["cancer"], []
    if len(predicted) > 1 and predicted.nunique() == 1:
        notes.append(f"all {len(predicted)} breasts have the same prediction, {predicted.iloc[0]:g}")
    report = report.assign(score=pd.to_numeric(report["score"], errors="coerce"))
    lacking = report["score"].isna()
    if lacking.any():
        return [f"report.csv has no score for {lacking.sum()} images, {_some(report.loc[lacking, 'image_id'])}"], notes
    by_breast = report.groupby("prediction_id", sort=False)["score"]
    low, high = by_breast.min().reindex(predicted.index), by_breast.max().reindex(predicted.index)
    if low.isna().any():
        return [f"report.csv has no prediction_id {_some(low.index[low.isna()])}"], notes
    if any(_leads_to(report, how, predicted) for how in metrics.HOWS):
        return [], notes
    order = np.argsort(low.to_numpy())
    # Predicted of those with a higher lowest score.
    least = np.minimum.accumulate(predicted.to_numpy()[order][::-1])[::-1]
    above = np.searchsorted(low.to_numpy()[order], high.to_numpy() + NEAR, side="right")
    wrong = predicted.to_numpy() > np.append(least, np.inf)[above] + NEAR
    if wrong.any():
        name = predicted.index[wrong][0]
        return [
            f"submission.csv contradicts report.csv: {wrong.sum()} breasts are predicted above others all of whose images "
            f"have higher scores, {name} among them with {predicted[name]:g}"
        ], notes
    notes.append("submission.csv is not what the kit makes of report.csv's scores, by any aggregate and threshold")
    return [], notes


def _leads_to(report: pd.DataFrame, how: str, predicted: pd.Series) -> bool:
    """Whether the images' scores, brought to breasts in a way, are the predictions, or are where one threshold cuts them."""
    try:
        breasts = submission.to_breasts(report, how).set_index("prediction_id")["score"]
    except ValueError:  # no scores of the kit's
        return False
    scores = breasts.reindex(predicted.index).clip(0, 1).to_numpy()
    cancer = predicted.to_numpy()
    if np.allclose(scores, cancer, rtol=0, atol=NEAR):
        return True
    called = cancer == 1
    cut = (called | (cancer == 0)).all()
    return bool(cut and (called.all() or not called.any() or scores[called].min() >= scores[~called].max() - NEAR))


def _is_blank(path: Path) -> bool:
    with contextlib.suppress(dicom.DicomError):
        return dicom.is_blank(dicom.read_stored(path).pixels)
    return False


def _some(names: Sequence) -> str:
    return ", ".join(map(str, list(names)[:SHOWN])) + (" and others" if len(names) > SHOWN else "")
