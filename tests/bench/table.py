"""What the measurements share in telling: Markdown and JSON files, and what they ran on."""

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "work" / "bench"
PACKAGES = (
    "numpy", "pydicom", "imagecodecs", "Pillow", "opencv-python-headless", "joblib", "pylibjpeg", "pylibjpeg-libjpeg",
    "pylibjpeg-openjpeg", "pylibjpeg-rle", "python-gdcm", "dicomsdl", "monai", "itk-io", "torch", "medip", "timm", "lightning",
    "accelerate", "scikit-learn", "scipy", "albumentations",
)  # fmt: skip


class Result(NamedTuple):
    """A row of RESULTS.md: what was measured, against what, and the ratio of the two over the rounds.

    Attributes:
        what, against: in words, with sizes; `ratio` says which way round, as "times as fast" or "share of the bytes".
        median, low, high: of the rounds' ratios; NaN where nothing was measured, with the reason in `note`.
        target: what was aimed at, if anything was: at least that, or with `at_most` at most that.
    """

    what: str
    against: str
    ratio: str
    median: float
    low: float
    high: float
    target: float | None = None
    at_most: bool = False
    note: str = ""

    @classmethod
    def missing(cls, what: str, against: str, ratio: str, reason: str, **rest: Any) -> "Result":
        """A row of what could not be measured here."""
        return cls(what, against, ratio, math.nan, math.nan, math.nan, note=reason, **rest)


def over_rounds(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """theirs / ours, round by round: the median, the smallest and the largest."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows of the same keys as a Markdown table: text to the left, numbers to the right."""
    if not rows:
        return "(no rows)\n"
    names = list(rows[0])
    rights = [all(isinstance(row[name], (int, float)) for row in rows) for name in names]
    lines = [names, ["--:" if right else "---" for right in rights]]
    lines += [[text_of(row[name]).replace("|", "/") for name in names] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save(
    out: Path, name: str, sections: dict[str, list[dict]], details: Any = None, results: Sequence[Result] = ()
) -> Path:
    """Prints the sections' tables and writes `name`.md and `name`.json with them and with what they ran on.

    Args:
        out: a folder, made where it is missing.
        sections: rows under a headline each.
        details: goes into the JSON file alone.
        results: what of it RESULTS.md takes.
    """
    ran_on = machine()
    text = "".join(f"**{headline}**\n\n{markdown(rows)}\n" for headline, rows in sections.items())
    text += "Measured on " + ", ".join(f"{key} {value}" for key, value in ran_on.items()) + ".\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    rows = [result._asdict() for result in results]
    data = {"machine": ran_on, "sections": sections, "results": rows, "details": details}
    (out / f"{name}.json").write_text(json.dumps(data, indent=1, default=float) + "\n", encoding="utf-8")
    print(text)
    return out / f"{name}.md"


def machine() -> dict[str, Any]:
    """Processor, cores, Python, packages that are installed, and the OpenJPEG inside Pillow and imagecodecs."""
    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    try:
        from PIL import features

        found["Pillow's OpenJPEG"] = features.version_codec("jpg_2000")
    except ImportError:
        pass
    try:
        import imagecodecs

        found["imagecodecs' OpenJPEG"] = imagecodecs.jpeg2k_version().removeprefix("openjpeg ")
        found["imagecodecs' JPEG"] = imagecodecs.jpeg8_version().removeprefix("libjpeg_turbo ")
    except ImportError:
        pass
    return found


def text_of(value: Any) -> str:
    """A value as a table shows it: floats with three digits, or all before the point."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
