"""Runs the benches, each in a process of its own, and writes what came of them to RESULTS.md and into the README.

    pip install -r tests/requirements.txt -r tests/bench/requirements.txt
    python tests/bench/all.py [NAME ...] [--rounds N] [--list]

Without names all of them run, one after another: about twenty minutes on two cores. Each replaces its own section of
RESULTS.md as soon as it is done, so that an interrupted run keeps what it has; the README's table of figures is written
with it. A bench that fails, is killed or takes longer than half an hour leaves its old section where it is and is named at
the end, with exit code 1. Nothing else should run on the machine meanwhile: its load is told, and warned of where it is high.
"""

import argparse
import ast
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import results_md
import table
from results_md import Figure

HERE = Path(__file__).parent
RESULTS, README = HERE / "RESULTS.md", table.REPOSITORY / "README.md"
ORDER = (  # of the sections, as an image goes
    "dicom_time", "build_time", "store_time", "formats_time", "loader_time", "amp_time", "checkpoint_time", "steps_time",
    "step_time", "loop_time", "infer_time", "metrics_time", "gpu_time",
)  # fmt: skip
LIMIT_S = 1800.0  # of one bench
USUAL, PNG = "pydicom, apply_voi_lut, crop and cv2.resize", "16-bit PNG files read by cv2 in a plain Dataset"
LOADER, CHECKPOINTED = "training loader, block8, 1024x512, 2 workers", "checkpoint_blocks on convnext_tiny, 8 x 128x128"
FIGURES = (  # of the README, by bench, what was measured and against what
    Figure("DICOM to pixels", (("dicom_time", "DICOM file to 1024x512: made, 4096x3328, JPEG 2000 lossless", USUAL),)),
    Figure("Loading in training", (("loader_time", f"{LOADER}, no augmentation", PNG),)),
    Figure("Mixed precision on a CPU", (("amp_time", "training step of convnext_tiny in bf16, 4 x 512x256", "fp32"),)),
    Figure(
        "Gradient checkpointing",
        (
            ("checkpoint_time", f"{CHECKPOINTED}: kept for backward", "plain"),
            ("checkpoint_time", f"{CHECKPOINTED}: training step", "plain"),
        ),
    ),
    Figure(
        "Compiled step loops",
        (("steps_time", "waves on 70x70, batch 1, 1000 steps, compile_steps n=auto, 1 thread", "the plain loop"),),
    ),
)


def find(folder: Path) -> dict[str, Path]:
    """The benches of a folder by name: files that end in `_time.py`, in the order of the sections."""
    names = sorted(path.stem for path in folder.glob("*_time.py"))
    names.sort(key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return {name: folder / f"{name}.py" for name in names}


def about(path: Path) -> str:
    """The first sentence of a bench's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
    return " ".join(text.split("\n\n")[0].split())


def run(path: Path, out: Path, rounds: int | None, limit_s: float = LIMIT_S) -> str:
    """Runs a bench; what it prints is shown. Processes that it started end with it, when it is broken off, too.

    Returns:
        Why it failed, or nothing.
    """
    command = [sys.executable, str(path), "--out", str(out)] + ([] if rounds is None else ["--rounds", str(rounds)])
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        end(process)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def end(process: subprocess.Popen) -> None:
    """Kills a process and, where the system has groups, all that it started."""
    with contextlib.suppress(OSError):  # no one is left
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def load_now() -> float | None:
    """Processes that ran or waited for a core over the last minute, on average; None where it can't be told."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def measure(path: Path, out: Path, rounds: int | None, load: float | None, limit_s: float) -> tuple[str, str]:
    """A bench's section, or why there is none. Its files go to `out`."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        failed = run(path, Path(temporary), rounds, limit_s)
        written = Path(temporary) / f"{path.stem}.json"
        if not failed and not written.exists():
            failed = f"it wrote no {written.name}"
        if failed:
            return "", failed
        data = json.loads(written.read_text(encoding="utf-8"))
        out.mkdir(parents=True, exist_ok=True)
        shutil.copytree(temporary, out, dirs_exist_ok=True)
    if not data["results"]:
        return "", "it gave no results for RESULTS.md"
    return results_md.section(about(path), data, datetime.date.today(), time.monotonic() - begun, load), ""


def write(results: Path, readme: Path | None, sections: dict[str, str]) -> None:
    """RESULTS.md and, of it, the README's figures."""
    results_md.write(results, sections, ORDER)
    if readme is not None:
        text = results_md.replace_figures(
            readme.read_text(encoding="utf-8"), results_md.figures(FIGURES, results_md.read(results))
        )
        with results_md.replacing(readme) as temporary:
            temporary.write_text(text, encoding="utf-8")


def main(
    arguments: Sequence[str] | None = None, folder: Path = HERE, results: Path = RESULTS, readme: Path | None = README,
    limit_s: float = LIMIT_S,
) -> int:  # fmt: skip
    """The command; the exit code."""
    benches = find(folder)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(benches)}")
    parser.add_argument("--rounds", type=int, help="in place of each bench's own number of rounds")
    parser.add_argument("--list", action="store_true", help="tell the benches and when each was measured, and end")
    parser.add_argument("--out", type=Path, default=table.OUT, help="for the benches' own tables and JSON files")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in benches]:
        parser.error(f"no bench {', '.join(unknown)}: there are {', '.join(benches)}")
    if readme is not None:
        results_md.replace_figures(
            readme.read_text(encoding="utf-8"), ""
        )  # has to have a place for them: not found out late
    sections = results_md.read(results)
    if options.list:
        for name, path in benches.items():
            print(f"{name}: {about(path)} [{results_md.where(sections.get(name, '')) or results_md.NOT_MEASURED}]")
        return 0
    load, cores, failures = load_now(), os.cpu_count() or 1, {}
    print("load at the start", "unknown" if load is None else f"{load:.2f} on {cores} cores", flush=True)
    if results_md.is_high(load, cores):
        print(
            "WARNING: other work runs on this machine; the figures will be rough, and RESULTS.md will say so",
            flush=True,
        )
    for name in options.names or benches:
        print(f"\n== {name}: {about(benches[name])}", flush=True)
        text, failed = measure(benches[name], options.out, options.rounds, load, limit_s)
        if failed:
            failures[name] = failed
            print(f"{name} failed: {failed}", flush=True)
            continue
        write(results, readme, results_md.read(results) | {name: text})
    for name, failed in failures.items():
        print(f"FAILED {name}: {failed}; RESULTS.md has of it what was there before")
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a bench ends with this, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted: RESULTS.md has the benches that were done")
        sys.exit(130)
