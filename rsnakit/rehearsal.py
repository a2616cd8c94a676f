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
from pathlib import Path

from rsnakit import bundle, checking, demo, env, hidden, mounts, sandbox
from rsnakit.bundle import Bundle
from rsnakit.files import Lock, LockedError, write_atomic
from rsnakit.hidden import HiddenSet
from rsnakit.outlook import LIMIT_H, Rehearsal, Stage, conclude, in_a_line, megapixels_of
from rsnakit.sandbox import Isolation, SandboxError

STAGES = (("flat", "visible"), ("nested", "visible"), ("flat", "one"), ("nested", "many"))  # layout, test set
PREFIX = "rsnakit-rehearsal-"


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
                megapixels = megapixels_of(test)
                done.append(_perform(made, root, layout, test, keep / name, timeout_s, isolation, private))
            say(in_a_line(done[-1]))
            if done[-1].outcome.timed_out:
                break
    faults, notes = checking.check_code(made.kernel / bundle.NOTEBOOK, made.files)
    if checking.fingerprint(made) != before:
        faults.append("the bundle was made anew, or changed, while it was rehearsed")
    found = conclude(done, faults, megapixels, gpu_speedup, [*notes, *made.notes])
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
