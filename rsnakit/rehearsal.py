"""The bundle run here as Kaggle would run it: both layouts, offline, on test sets that it has never seen.

`rehearse` lays `work/dist/` out as Kaggle mounts it, runs the kernel's notebook from top to bottom in a sandbox, and checks
what it left: first on the competition's own test rows, then on sets that are made to hurt (see `hidden`).
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pydicom

from rsnakit import bundle, checking, demo, env, hidden, mounts, sandbox
from rsnakit.bundle import Bundle
from rsnakit.files import Lock, LockedError, write_atomic
from rsnakit.hidden import HiddenSet
from rsnakit.sandbox import Isolation, Outcome, SandboxError

STAGES = (("flat", "visible"), ("nested", "visible"), ("flat", "one"), ("nested", "many"))  # layout, test set
LIMIT_H = 9.0  # of a submission
HIDDEN_IMAGES, KAGGLE_CORES = 32_000, 4
PREFIX = "rsnakit-rehearsal-"
SMALLEST_MP = 2082 * 2776 / 1e6  # of the competition's images


class Projection(NamedTuple):
    """What the hidden test set would take on Kaggle, from a run on one image and one on many.

    Attributes:
        startup_s: seconds before and after the images.
        image_s: seconds an image takes here.
        models_share: share of these that are the models', what decoding does not account for.
        hours: on Kaggle.
    """

    startup_s: float
    image_s: float
    models_share: float
    hours: float


@dataclass(frozen=True)
class Stage:
    """One run of the notebook.

    Attributes:
        name: of its executed notebook and log: `<name>.ipynb`, `<name>.log`.
        layout: one of `mounts.LAYOUTS`.
        kind: one of `hidden.KINDS`.
        images, breasts: of the test set.
        outcome: seconds, memory and disk.
        faults: what would be a failed or a wrong submission, a sentence each.
        notes: what is worth knowing.
        decode_s: seconds that its images took to decode, all together.
        cells_s: seconds of each code cell.
        notebook: the executed notebook.
    """

    name: str
    layout: str
    kind: str
    images: int
    breasts: int
    outcome: Outcome
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    decode_s: float
    cells_s: tuple[float, ...]
    notebook: Path


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal: its stages, what they project (None where they cannot), and sentences on the whole."""

    stages: tuple[Stage, ...]
    projection: Projection | None
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    open: str = ""  # what it could not tell

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would spoil a submission."""
        return not self.faults and not any(stage.faults for stage in self.stages)

    def table(self) -> pd.DataFrame:
        """A row a stage, indexed by its name."""
        rows = {
            stage.name: {
                "images": stage.images, "breasts": stage.breasts, "seconds": round(stage.outcome.seconds, 1),
                "peak memory, GB": round(stage.outcome.peak_memory / 1e9, 2),
                "peak disk, MB": round(stage.outcome.peak_disk / 1e6, 1), "faults": len(stage.faults),
            }
            for stage in self.stages
        }  # fmt: skip
        return pd.DataFrame.from_dict(rows, "index").rename_axis("stage")

    def sentences(self) -> list[str]:
        """Faults first, then notes, then the sentence that decides."""
        lines = [f"FAULT, {stage.name}: {fault}" for stage in self.stages for fault in stage.faults]
        lines += [f"FAULT: {fault}" for fault in self.faults]
        lines += [f"{stage.name}: {note}" for stage in self.stages for note in stage.notes]
        lines += self.notes
        count = len(self.faults) + sum(len(stage.faults) for stage in self.stages)
        ends = (
            f"this bundle can go to Kaggle{self.open}"
            if self.ok
            else f"{count} fault{'s' * (count > 1)}: do not submit this bundle"
        )
        return [*lines, ends]


def rehearse(
    dist: Path | str,
    competition: Path | str | None = None,
    keep: Path | str | None = None,
    images: int = 200,
    gpu_speedup: float = 1.0,
    seed: int = 0,
    stages: Sequence[tuple[str, str]] = STAGES,
    timeout_s: float = LIMIT_H * 3600,
    isolation: Isolation | None = None,
    say: Callable[[str], object] = print,
) -> Rehearsal:
    """Runs a bundle's notebook as Kaggle would, on several test sets in both layouts, and checks what it leaves.

    Args:
        dist: what `bundle.make` made.
        competition: the folder whose images are used; None: the one that is found (see `env.find_data`), else the demo.
        keep: folder for the executed notebooks, logs, submissions and reports; None: `rehearsal` beside `dist`.
        images: of the largest test set.
        gpu_speedup: how much faster Kaggle's GPU runs the models than this machine, for the projected hours.
        seed: of the test sets.
        stages: pairs of layout and test set.
        timeout_s: seconds that one run may take.
        isolation: by what means it is kept apart; the strongest that there is, if not given.
        say: is told what is done and found as it goes.

    Raises:
        rsnakit.bundle.BundleError: what is in `dist` is not what was bundled.
        rsnakit.sandbox.SandboxError: this machine cannot keep it apart, or has the package installed; or another rehearsal is
            writing to `keep`.
        ValueError, FileNotFoundError: no test set can be made of the competition, see `hidden.make`.
    """
    if not gpu_speedup > 0:
        raise ValueError(f"gpu_speedup is {gpu_speedup}, expected a number above 0")
    if images < hidden.LEAST:
        raise ValueError(f"images is {images}: a set made to hurt has {hidden.LEAST} or more")
    dist = Path(dist).resolve()
    made = bundle.read(dist)
    keep = Path(keep) if keep else dist.parent / checking.REHEARSED
    keep.mkdir(parents=True, exist_ok=True)
    place = env.RunConfig(data_dir=str(competition or ""), work_dir=str(dist.parent))
    source = demo.open_competition(place, demo.DemoConfig())
    isolation = isolation or sandbox.strongest()
    say(str(isolation))
    private = (env.REPOSITORY, dist.parent, dist, source.path.resolve(), keep.resolve())
    if isolation.inputs == "mount":
        say(_hidden(private))
    with tempfile.TemporaryDirectory(prefix="rsnakit-") as nowhere:
        sandbox.refuse_package("rsnakit", Path(nowhere), isolation)
    done: list[Stage] = []
    megapixels, before = 0.0, checking.fingerprint(made)
    with _alone(keep):
        for number, (layout, kind) in enumerate(stages, 1):
            name = f"{number}_{layout}_{kind}"
            with _root(keep) as root:
                test = _lay_out(made, root, layout, source.path, kind, images, seed, isolation.inputs == "mount")
                say(f"{name}: {len(test.images):,} images")
                megapixels = _megapixels(test)
                done.append(_perform(made, root, layout, test, keep / name, timeout_s, isolation, private))
            say(_line(done[-1]))
            if done[-1].outcome.timed_out:
                break
    faults, notes = checking.check_code(made.kernel / bundle.NOTEBOOK, made.files)
    if checking.fingerprint(made) != before:
        faults.append("the bundle was made anew, or changed, while it was rehearsed")
    found = _conclude(done, faults, megapixels, gpu_speedup, [*notes, *made.notes])
    checking.keep_verdict(made, found.ok and tuple(stages) == STAGES, keep)
    return found


@contextlib.contextmanager
def _alone(keep: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Lock(keep, "the rehearsal"))
        except LockedError as error:
            raise SandboxError(str(error)) from error
        yield


def _hidden(folders: Sequence[Path]) -> str:
    """A sentence on what the notebook does not see of this machine."""
    outermost = sorted(f for f in {*folders} if not any(other in f.parents for other in folders))
    there = sandbox.python_in(folders)
    but = f", but for this Python: {', '.join(map(str, there))}" if there else ""
    return f"hidden from the notebook: {', '.join(map(str, outermost))}{but}"


# ---- as Kaggle mounts it


@contextlib.contextmanager
def _root(keep: Path) -> Iterator[Path]:
    """A folder that stands for /, outside of the repository; afterwards it is gone, whatever may be written in it.

    One that a rehearsal left which was killed is removed by the next of the same `keep`, where its path is noted.
    """
    noted = keep / "root.txt"
    if noted.exists():
        _remove(Path(noted.read_text(encoding="utf-8")))
    root = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    write_atomic(noted, str(root))
    try:
        yield root
    finally:
        _remove(root)
        noted.unlink(missing_ok=True)


def _remove(root: Path) -> None:
    if root.name.startswith(PREFIX) and root.is_dir():
        for folder, _, _ in os.walk(root):
            os.chmod(folder, 0o700)
        shutil.rmtree(root, ignore_errors=True)


def _lay_out(
    made: Bundle, root: Path, layout: str, source: Path, kind: str, images: int, seed: int, link: bool
) -> HiddenSet:
    """The bundle's data set and a test set mounted under a root, and an empty working folder."""
    (root / "kaggle/working").mkdir(parents=True)
    folder = mounts.data_set_folder(root, layout, made.owner, made.slug)
    for path in (*made.files, mounts.MANIFEST):  # the upload leaves out the data set's metadata
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden.link_or_copy(made.dataset / path, target, link)
    folder = mounts.competition_folder(root, layout)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return hidden.make(source, folder, kind, images, seed, link)


def _perform(
    made: Bundle,
    root: Path,
    layout: str,
    test: HiddenSet,
    kept: Path,
    timeout_s: float,
    isolation: Isolation,
    private: Sequence[Path],
) -> Stage:
    """Runs the notebook where it cannot see what is private, and checks what it leaves."""
    inputs, working, running = root / "kaggle/input", root / "kaggle/working", root / "executed.ipynb"
    code = shutil.copyfile(made.kernel / bundle.NOTEBOOK, root / "code.ipynb")
    executed, log = kept.with_name(kept.name + ".ipynb"), kept.with_name(kept.name + ".log")
    for old in (executed, log):
        old.unlink(missing_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    marks = {"RSNAKIT_ROOT": str(root), "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    if test.kind != "visible":
        marks["KAGGLE_IS_COMPETITION_RERUN"] = "1"
    command = [
        sys.executable, "-m", "papermill", str(code), str(running), "--cwd", str(working), "--kernel", "python3",
        "--no-progress-bar", "--log-output",
    ]  # fmt: skip
    before = checking.listed(inputs)
    try:
        outcome = sandbox.run(command, working, log, [inputs], marks, timeout_s, isolation, private, [root])
    finally:
        if running.exists():
            shutil.copyfile(running, executed)
    frame, faults, notes = None, checking.changes(before, checking.listed(inputs)), []
    if outcome.timed_out:
        faults.append(f"it was stopped after {timeout_s:,.0f} s")
    elif outcome.status:
        faults.append(checking.what_failed(executed, outcome))
    else:
        frame, found, notes = checking.check(working, test)
        faults += found
    faults += checking.over_limits(outcome)
    kept.mkdir()
    for name in ("submission.csv", "report.csv"):
        if (working / name).is_file():
            shutil.copyfile(working / name, kept / name)
    decode_s = 0.0 if frame is None else float(frame["seconds"].sum())
    breasts = test.images["prediction_id"].nunique()
    return Stage(
        kept.name, layout, test.kind, len(test.images), breasts, outcome, tuple(faults), tuple(notes), decode_s,
        checking.seconds_of_cells(executed), executed,
    )  # fmt: skip


# ---- what it comes to


def project(one: Stage, many: Stage, cores: int, gpu_speedup: float = 1.0) -> Projection:
    """The hours of HIDDEN_IMAGES on KAGGLE_CORES: start-up + images x seconds an image x cores here / cores there.

    The start-up is what a single image takes. An image takes what the images of `many` take beyond that, each; or what the
    cell takes beyond it that grew the most, where that is more: a slow start of `one` would else hide it. Of this, decoding
    has the seconds that report.csv names, shared by the cores, and the models have the rest, which `gpu_speedup` divides.

    Args:
        one, many: runs on one image and on many.
        cores: that this process may use.
        gpu_speedup: how much faster Kaggle's GPU runs the models than what runs them here.
    """
    grew = [later - first for first, later in zip(one.cells_s, many.cells_s, strict=True)]
    image_s = max(0.0, many.outcome.seconds - one.outcome.seconds, *grew) / max(1, many.images - one.images)
    decode_s = min(image_s, many.decode_s / many.images / cores)
    share = 1 - decode_s / image_s if image_s else 0.0
    there_s = image_s * (1 - share + share / gpu_speedup) * cores / KAGGLE_CORES
    return Projection(one.outcome.seconds, image_s, share, (one.outcome.seconds + HIDDEN_IMAGES * there_s) / 3600)


def _conclude(
    done: Sequence[Stage], faults: list[str], megapixels: float, gpu_speedup: float, notes: Sequence[str] = ()
) -> Rehearsal:
    """The whole of it, with the hours that the hidden test set would take."""
    of_kind = {stage.kind: stage for stage in done if not stage.outcome.status}
    if not {"one", "many"} <= of_kind.keys():
        unknown = "hours on Kaggle: not known, for want of a run on one image and one on many"
        return Rehearsal(tuple(done), None, tuple(faults), (*notes, unknown))
    cores, device = env.cores(), env.choose_device().value
    found = project(of_kind["one"], of_kind["many"], cores, gpu_speedup)
    faster = "" if device.startswith("cuda") else "; a T4 is faster, which gpu_speedup takes into account"
    divided = f", of which the models' share is divided by {gpu_speedup:g}" if gpu_speedup != 1 else ""
    notes = [
        *notes,
        f"hours on Kaggle: {found.hours:.1f} = {found.startup_s:.0f} s of start-up + {HIDDEN_IMAGES:,} images x "
        f"{found.image_s:.3f} s x {cores} cores here / {KAGGLE_CORES} there"
        f"{divided}. The models have {found.models_share:.0%} of an image's time, on {device}{faster}.",
    ]
    unproven = ""
    if megapixels < SMALLEST_MP:
        unproven = f"; that it keeps to {LIMIT_H:.0f} hours is not proven, for its images were small"
        notes.append(
            f"the images here have {megapixels:.2g} megapixels, those of the competition {SMALLEST_MP:.1f} to 26: there they "
            "take longer than these hours say. Give --competition a folder with some of its own."
        )
    if found.hours > LIMIT_H:
        faults += [
            f"{HIDDEN_IMAGES:,} images would take {found.hours:.1f} h, more than {LIMIT_H:.0f}: use fewer folds, smaller "
            "images, a smaller model, or a GPU (gpu_speedup)"
        ]
    return Rehearsal(tuple(done), found, tuple(faults), tuple(notes), unproven)


def _megapixels(test: HiddenSet) -> float:
    """The mean of some of its sound images; 0 where none can be read."""
    paths, sizes = test.images.loc[test.images["hurt"] == "", "source"].head(20), []
    for path in paths:
        with contextlib.suppress(pydicom.errors.InvalidDicomError, AttributeError):
            header = pydicom.dcmread(path, specific_tags=["Rows", "Columns"], stop_before_pixels=True)
            sizes.append(header.Rows * header.Columns / 1e6)
    return sum(sizes) / len(sizes) if sizes else 0.0


def _line(stage: Stage) -> str:
    """A stage in a line, once it is done."""
    said = "; ".join(stage.faults) or "as it should be"
    return f"{stage.name}: {stage.outcome.seconds:.0f} s, {stage.outcome.peak_memory / 1e9:.2f} GB of memory: {said}"
