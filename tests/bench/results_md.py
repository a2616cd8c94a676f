"""RESULTS.md: a section for each bench, and on top a summary of all rows; and the README's figures, which are rows of it.

A section is replaced as a whole, and what stands in the file is all that is known: the summary and the README's table are
made from the sections' text, however long ago each was measured.
"""

import datetime
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import table

if str(table.REPOSITORY) not in sys.path:
    sys.path.insert(0, str(table.REPOSITORY))

from rsnakit.files import replacing

HEAD = """# What was measured

`python tests/bench/all.py` runs all benches, one after another, and writes this file; `python tests/bench/all.py NAME` runs one
anew and replaces its section alone, so each section has its own date and machine. A ratio is taken within a round, in which
the compared ways take turns; told are the median over the rounds, the smallest and the largest. What could not be measured
where it ran says so, with the reason.
"""
COLUMNS = ("what", "against", "ratio", "median", "smallest to largest", "target", "reached", "note")
NOT_MEASURED = "not measured"
BUSY = ", while other work ran on it"  # behind the machine's cores
HIGH_LOAD = 0.5  # processes that wait for a core, for each core there is
FIRST, LAST = "<!-- figures of tests/bench/RESULTS.md -->", "<!-- end of figures -->"


class Figure(NamedTuple):
    """A line of the README: a name, and the rows of RESULTS.md that it shows, as (bench, what, against)."""

    name: str
    rows: tuple[tuple[str, str, str], ...]


# A section


def section(about: str, data: Mapping[str, Any], date: datetime.date, seconds: float, load: float | None) -> str:
    """The text of a section, from what `table.save` wrote.

    Args:
        about: what the bench measures, in a sentence.
        data: the bench's JSON file.
        date, seconds: when it ran, and for how long.
        load: of the machine before the first bench began (`os.getloadavg`'s first), None where it can't be told.
    """
    machine = dict(data["machine"])
    processor, cores = machine.pop("processor"), machine.pop("cores")
    told = "unknown" if load is None else f"{load:.2f}"
    where = f"{date.isoformat()}, {processor}, {cores} cores{BUSY if is_high(load, cores) else ''}."
    versions = ", ".join(f"{package} {version}" for package, version in machine.items())
    text = f"{about}\n\n{where} Load at the start {told}; took {seconds:.0f} s. {versions}.\n\n"
    text += table.markdown([row_of(result) for result in data["results"]]) + "\n"
    for headline, rows in data["sections"].items():
        text += f"**{headline}**\n\n{table.markdown(rows)}\n"
    return text.replace(str(table.REPOSITORY), ".").strip() + "\n"


def row_of(result: Mapping[str, Any]) -> dict[str, str]:
    """A `table.Result`, given as a dict, in words."""
    median, target = result["median"], result["target"]
    measured, alike = not math.isnan(median), result["low"] == result["high"]
    aim = "" if target is None else f"{'at most' if result['at_most'] else 'at least'} {target:g}"
    good = target is not None and (median <= target if result["at_most"] else median >= target)
    values = (
        result["what"], result["against"], result["ratio"], number(median) if measured else NOT_MEASURED,
        f"{number(result['low'])} to {number(result['high'])}" if measured and not alike else "", aim,
        ("yes" if good else "no") if aim and measured else "", result["note"],
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def number(value: float) -> str:
    """A ratio: two digits behind the point below 10, then one, then none; a whole number without any."""
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def is_high(load: float | None, cores: int) -> bool:
    """Whether a machine is too busy for its times to be trusted."""
    return load is not None and load > HIGH_LOAD * cores


def parse(text: str) -> list[dict[str, str]]:
    """The rows of the first Markdown table in a text; [] without one."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("|")), len(lines))
    found = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return [dict(zip(found[0], row, strict=True)) for row in found[2:]] if found else []


def where(text: str) -> str:
    """Date and machine of a section."""
    return next((line.partition(". Load at ")[0] for line in text.splitlines() if ". Load at " in line), "")


# The file


def read(path: Path) -> dict[str, str]:
    """The sections of a RESULTS.md by the name of their bench, without the summary; {} where there is no file."""
    if not path.exists():
        return {}
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], (part.strip() + "\n" for part in parts[2::2]), strict=True))
    return {name: text for name, text in sections.items() if name != "Summary"}


def write(path: Path, sections: Mapping[str, str], order: Iterable[str] = ()) -> None:
    """Writes a RESULTS.md, whole or not at all: first the sections named in `order`, then others as they come."""
    names = [name for name in order if name in sections]
    names += [name for name in sections if name not in names]
    text = f"{HEAD}\n## Summary\n\n{summary({name: sections[name] for name in names})}"
    text += "".join(f"\n## {name}\n\n{sections[name]}" for name in names)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def summary(sections: Mapping[str, str]) -> str:
    """All sections' rows in one table, and how many of the targets were reached."""
    rows = []
    for name, text in sections.items():
        for row in parse(text):
            note = row.pop("note")
            row["median"] += f" ({note})" if row["median"] == NOT_MEASURED and note else ""
            rows.append({"bench": f"[{name}](#{name})", **row})
    reached = [row["reached"] for row in rows if row["reached"]]
    missing = sum(row["median"].startswith(NOT_MEASURED) for row in rows)
    count = f"{reached.count('yes')} of {len(reached)} targets reached; {missing} of {len(rows)} rows not measured."
    busy = [name for name, text in sections.items() if BUSY in where(text)]
    warning = f" Other work ran on the machine during {', '.join(busy)}: these are rough." if busy else ""
    return f"{count}{warning}\n\n{table.markdown(rows)}"


# The README


def figures(wanted: Sequence[Figure], sections: Mapping[str, str]) -> str:
    """The README's table, and what its figures were measured on."""
    rows, places = [], []
    for figure in wanted:
        for number, (bench, what, against) in enumerate(figure.rows):
            text = sections.get(bench, "")
            found = next((row for row in parse(text) if (row["what"], row["against"]) == (what, against)), None)
            shown = NOT_MEASURED
            if found and found["median"] != NOT_MEASURED:
                spread = found["smallest to largest"]
                shown = f"{found['median']} {found['ratio']}" + (f" ({spread})" if spread else "")
                places.append(where(text))
            name = f"**{figure.name}**" if not number else ""
            rows.append({"": name, "measured": what, "against": against, "ratio (smallest to largest)": shown})
    places = [place for place in dict.fromkeys(places) if place]
    return table.markdown(rows) + (f"\nMeasured on: {'; '.join(places)}.\n" if places else "")


def replace_figures(readme: str, text: str) -> str:
    """A README with another table between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, first, rest = readme.partition(FIRST)
    _, last, after = rest.partition(LAST)
    if not (first and last):
        raise ValueError(f"README.md has no place for its figures: put the lines {FIRST} and {LAST} there")
    return f"{before}{FIRST}\n\n{text}\n{LAST}{after}"
