"""Figures of single tricks: what compiled chunks, checkpointing and formats of arrays cost and gain.

Orange is what was chosen. Whiskers reach from the smallest to the largest of the rounds.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from rsnakit import look
from rsnakit.look import NEUTRAL, WIDTH, counted, plain, short, times

CHOSEN, OTHER = look.TRAIN, "#9AA3AD"  # orange, and a grey on which black whiskers are seen
BETTER = "#EDEDED"  # behind points: where it pays
STORED = "8+1 bits"  # the store's own format


@look.styled
def chunk_gain(reports: Mapping[str, pd.DataFrame]) -> Figure:
    """What chunks of compiled steps gain against what compiling them takes, a panel a case; in the grey, compiling pays.

    Args:
        reports: by the case, the `.report` of `speed.compile_steps` with n="auto": n (0: eager), compile_s, ms_step, run_s,
            total_s, pays_after, chosen, left_out and, where it has that, cached.
    """
    reports = {
        name: report.reset_index(drop=True) for name, report in reports.items() if report is not None and len(report)
    }
    if not reports:
        return look.nothing("No chunk of steps was tried, so there is no gain to show")
    columns = min(2, len(reports))
    rows = -(-len(reports) // columns)
    most = max(len(report) for report in reports.values())
    size = (WIDTH, 0.7 + rows * max(3.3, 1.2 + 0.23 * most))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for ax, (name, report) in zip(axes.flat, reports.items(), strict=False):
        _draw_chunks(ax, _with_gain(report))
        ax.set_title(short(name, 44))
    for ax in axes.flat[len(reports) :]:
        ax.set_axis_off()
    titles = [_chunk_title(short(name, 36), _with_gain(report)) for name, report in reports.items()]
    more = f"; and {counted(len(titles) - 3, 'case')} more" if len(titles) > 3 else ""
    return look.titled(figure, "; ".join(titles[:3]) + more)


@look.styled
def time_memory(table: pd.DataFrame) -> Figure:
    """What tricks cost in time and gain in memory, or the other way round: a point each, both as ratios to the plain way.

    Args:
        table: by what the figure calls them: time and memory, each in times of what it is without the trick.
    """
    known = table[(table["time"] > 0) & (table["memory"] > 0)] if len(table) else table
    if known.empty:
        return look.nothing("Time and memory of no trick are known, so there is nothing to weigh")
    figure, ax = plt.subplots(figsize=(WIDTH, max(3.4, 1.2 + 0.24 * len(known))))
    top = 1.12 * np.maximum(1.0, known[["time", "memory"]].max())
    ax.fill_between([0, 1], 1, color=BETTER, linewidth=0)
    ax.axhline(1, color="black", linestyle=":", linewidth=1)
    ax.axvline(1, color="black", linestyle=":", linewidth=1)
    ax.set(xlim=(0, top["time"]), ylim=(0, top["memory"]), ylabel="memory, times that of the plain way")
    lost = [(short(name, 30), "not measured") for name in table.index.difference(known.index, sort=False)]
    ax.set_xlabel("time, times that of the plain way (grey: less of both)" + notes(lost), loc="left")
    texts = [
        f"{short(name, 30)}: time {times(time)}, memory {times(memory)}"
        for name, time, memory in known[["time", "memory"]].itertuples()
    ]
    _name_points(ax, known["time"], known["memory"], texts)
    changed = known[(known["time"] != 1) | (known["memory"] != 1)]  # the plain way is among them, maybe
    known = changed if len(changed) else known
    lean, quick = known.loc[known["memory"] == known["memory"].min()].iloc[0], known["time"].idxmin()
    title = f"{short(lean.name, 36)} takes {times(lean['memory'])} times the memory and {times(lean['time'])} times the time"
    if quick != lean.name:
        time, memory = known.loc[quick, ["time", "memory"]]
        title += f"; {short(quick, 36)} {times(memory)} and {times(time)}"
    return look.titled(figure, title)


@look.styled
def format_costs(table: pd.DataFrame) -> Figure:
    """What formats of an array of floats take on disk, how near they come and how long they take to load.

    Args:
        table: by format, float32 first: bytes, bits, error, load_ms, low, high, times, as `formats.compare` gives it.
    """
    if table.empty:
        return look.nothing("No format was measured")
    panels = {
        "bits": (
            "bits a value on disk",
            [f"{plain(bits)}, {_bytes(n)}" for bits, n in zip(table["bits"], table["bytes"], strict=True)],
        ),
        "error": ("error, share of the values (both rms)", [_error(error) for error in table["error"]]),
        "load_ms": ("ms to load as float32", [f"{plain(ms)}{' ms' * math.isfinite(ms)}" for ms in table["load_ms"]]),
    }
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 1.4 + 0.38 * len(table)))
    for ax, (column, (label, texts)) in zip(axes, panels.items(), strict=True):
        for y, (name, row) in enumerate(table.iterrows()):
            ends = (
                {"low": row["low"], "high": row["high"]} if column == "load_ms" else {"low": math.nan, "high": math.nan}
            )
            bar(ax, y, {column: row[column], **ends, "chosen": name == STORED}, column)
            beside(ax, y, texts[y])
        names = [short(name, 24) if ax is axes[0] else "" for name in table.index]
        name_rows(ax, [(y, name, "normal") for y, name in enumerate(names)], len(table))
        ax.set(xlabel=label, xlim=(0, top_of(table, column)))
    errors = table["error"][np.isfinite(table["error"]) & (table["error"] > 0)]
    axes[1].set_xscale("log")
    low, high = (
        (10.0 ** math.floor(math.log10(errors.min())), 10.0 ** math.ceil(math.log10(1.01 * errors.max())))
        if len(errors)
        else (0.1, 1.0)
    )
    powers = np.arange(round(math.log10(low / 10)), round(math.log10(high)) + 1)
    axes[1].set_xlim(low / 10, high)
    axes[1].set_xticks(
        10.0 ** powers[:: 1 + len(powers) // 5], [f"{10.0**k:g}" for k in powers[:: 1 + len(powers) // 5]]
    )
    axes[1].minorticks_off()
    return look.titled(figure, _format_title(table))


@look.styled
def shot_record(record: np.ndarray, dt_s: float, dx_m: float, arrival_s: np.ndarray | None = None) -> Figure:
    """What receivers record of a shot, time downwards, with the time at which the wave should reach each.

    Grey is cut at 2 % of the largest values, so that late arrivals are seen.

    Args:
        record: (nt, nx) pressure, in any unit; a receiver a column.
        dt_s: between two samples, in s.
        dx_m: between two receivers, in m.
        arrival_s: (nx,) predicted arrival, in s; None: not drawn.
    """
    record = np.asarray(record, float)
    if not record.size:
        return look.nothing("The record of the shot is empty: no time or no receiver")
    strength = np.abs(np.where(np.isfinite(record), record, 0.0))
    nt, nx = record.shape
    figure, ax = plt.subplots(figsize=(WIDTH, 4.6))
    top = float(np.quantile(strength, 0.98)) or float(strength.max()) or 1.0
    extent = (-0.5 * dx_m, (nx - 0.5) * dx_m, (nt - 0.5) * dt_s, -0.5 * dt_s)
    ax.imshow(record, cmap="gray", vmin=-top, vmax=top, extent=extent, aspect="auto", interpolation="nearest")
    ax.set(xlabel="receiver, m along the line", ylabel="time, s")
    if arrival_s is not None:
        line, text = "--o"[: 2 + (nx == 1)], "predicted: distance over velocity"
        ax.plot(np.arange(nx) * dx_m, arrival_s, line, color=CHOSEN, linewidth=2, label=text)
        ax.set_ylim(extent[2:])  # not beyond what was recorded
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return look.titled(figure, _record_title(strength, dt_s, arrival_s))


# Parts that figures of speed share


def bar(ax: Axes, y: float, row: Mapping, column: str = "images_s") -> None:
    """A bar to the right, with the rounds' smallest and largest where they are known."""
    value, low, high = (float(row[name]) for name in (column, "low", "high"))
    if not math.isfinite(value):
        return
    ax.barh(y, value, color=CHOSEN if row["chosen"] == True else OTHER, height=0.7)  # noqa: E712  (it may be NaN)
    if low <= high:
        ax.plot([low, high], [y, y], color="black", linewidth=1.5, marker="|", markersize=6)


def beside(ax: Axes, y: float, text: str) -> None:
    ax.annotate(text, (1, y), (6, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=9)


def name_rows(ax: Axes, ticks: Sequence[tuple[float, str, str]], end: float) -> None:
    """Names of rows, the first at the top."""
    ax.set_yticks([y for y, _, _ in ticks], [text for _, text, _ in ticks])
    for label, (_, _, weight) in zip(ax.get_yticklabels(), ticks, strict=True):
        label.set_fontweight(weight)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(end - 0.4, -0.6)
    ax.grid(True, axis="x")


def top_of(table: pd.DataFrame, column: str = "images_s") -> float:
    names = [column, "high"] if column in ("images_s", "load_ms") else [column]
    most = table[names].to_numpy(float)
    return 1.04 * float(np.max(most, where=np.isfinite(most), initial=0.0)) or 1.0


def notes(left_out: Sequence[tuple[str, str]], width: int = 120) -> str:
    """What could not be measured, by its reason, as further lines below an axis."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out:
        by_reason.setdefault(reason, []).append(name)
    lines = [f"{short(', '.join(names), width - 2)}: {reason}" for reason, names in by_reason.items()]
    lines = lines[:3] + [f"and {len(lines) - 3} more reasons"] * (len(lines) > 3)
    return "".join("\n" + short(part, width) for line in lines for part in textwrap.wrap(line, width)[:2])


def as_fast(ratio: float) -> str:
    return "as fast" if times(ratio) == "1" else f"{times(ratio)} times as fast"


# Parts of these figures


def _draw_chunks(ax: Axes, report: pd.DataFrame) -> None:
    """Gain against compile time; `report` has a column `gain`."""
    known = report[report["gain"] > 0]
    slowest, best = (float(known[column].max()) if len(known) else 1.0 for column in ("compile_s", "gain"))
    right, top = 1.08 * max(slowest, 1e-3), 1.15 * max(best, 1.0)
    ax.axhline(1, color="black", linestyle=":", linewidth=1)
    eager, label = known[known["n"] == 0], "s to compile"
    if len(eager) and eager["run_s"].iloc[0] > 0:
        run, total = float(eager["run_s"].iloc[0]), float(eager["total_s"].iloc[0])
        x = np.linspace(0, min(right, 0.999 * total), 200)
        ax.fill_between(x, 1 / (1 - x / total), top, where=1 / (1 - x / total) < top, color=BETTER, linewidth=0)
        label += f" (grey: pays within {counted(max(1, round(total / run)), 'call')}; orange: chosen)"
    ax.set(xlim=(-0.03 * right, right), ylim=(0, top), ylabel="times as fast as eager", xlabel=label)
    left = report[report["left_out"].map(lambda why: isinstance(why, str) and why != "")]
    sizes = ", ".join("eager" if n == 0 else str(n) for n in left["n"])
    # The reasons of further sizes differ in their numbers alone.
    ax.set_xlabel(label + notes([(f"not {sizes}", left["left_out"].iloc[0])] if sizes else [], 50), loc="left")
    colors = [CHOSEN if chosen else NEUTRAL for chosen in known["chosen"].eq(True)]
    if len(known):
        _name_points(ax, known["compile_s"], known["gain"], [_chunk_text(row) for row in known.itertuples()], colors)


def _chunk_text(row: tuple) -> str:
    if row.n == 0:
        return "eager"
    pays = f"pays after {counted(math.ceil(row.pays_after), 'call')}" if math.isfinite(row.pays_after) else "never pays"
    cached = ", cached" * (getattr(row, "cached", False) is True)  # compiled by an earlier run: it takes longer anew
    return f"{counted(int(row.n), 'step')}: {times(row.gain)} times, {pays}{cached}"


def _with_gain(report: pd.DataFrame) -> pd.DataFrame:
    eager = report.loc[report["n"] == 0, "ms_step"]
    return report.assign(gain=(float(eager.iloc[0]) if len(eager) else math.nan) / report["ms_step"].astype(float))


def _name_points(
    ax: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str], colors: Sequence[str] = ()
) -> None:
    """Points, and their names in a column right of the axes, in the order of heights, so that none lies over another."""
    height = ax.get_window_extent().height / ax.figure.dpi  # inches, before the title takes its place
    gap, top = 0.2 / max(0.5, height - 0.6), ax.get_ylim()[1]
    order = np.argsort(-np.asarray(ys, float), kind="stable")
    places = [float(np.asarray(ys, float)[i]) / top for i in order]
    for i in range(1, len(places)):
        places[i] = min(places[i], places[i - 1] - gap)
    places[-1] = max(places[-1], 0.0)
    for i in range(len(places) - 2, -1, -1):
        places[i] = max(places[i], places[i + 1] + gap)
    for i, place in zip(order, places, strict=True):
        x, y = np.asarray(xs, float)[i], np.asarray(ys, float)[i]
        line = ConnectionPatch(
            (x, y), (1.02, place), "data", "axes fraction", axesA=ax, axesB=ax, color="#BDBDBD", linewidth=0.8
        )
        line.set_in_layout(False)
        ax.add_artist(line)
        ax.plot(x, y, "o", color=colors[i] if len(colors) else NEUTRAL, markersize=9, clip_on=False, zorder=5)
        ax.annotate(texts[i], (1.03, place), xycoords="axes fraction", va="center", fontsize=9)


# Titles that state the finding


def _chunk_title(name: str, report: pd.DataFrame) -> str:
    chosen = report[report["chosen"].eq(True)]
    if chosen.empty:
        return f"{name}: no chunk is chosen"
    row = next(chosen.itertuples())
    if row.n == 0:
        return f"{name}: eager steps stay, no chunk pays in the calls there are"
    pays = f" and pay after {counted(math.ceil(row.pays_after), 'call')}" if math.isfinite(row.pays_after) else ""
    chunk = "chunks of one compiled step" if row.n == 1 else f"chunks of {int(row.n)} compiled steps"
    return f"{name}: {chunk} are {times(row.gain)} times as fast as eager{pays}"


def _format_title(table: pd.DataFrame) -> str:
    names = [STORED] if STORED in table.index else list(table.index[-1:])
    row, first = table.loc[names[0]], table.iloc[0]
    if names[0] == table.index[0]:
        return f"{names[0]} takes {plain(row['bits'])} bits a value and {plain(row['load_ms'])} ms to load"
    speed = f"loads {times(row['times'])} times as fast" if math.isfinite(row["times"]) else "has no known speed"
    title = f"{names[0]} takes {look.percent(row['bytes'] / first['bytes'])} of the bytes of {table.index[0]}, "
    title += f"{_off(row['error'])} and {speed}"
    scale = [name for name in table.index if name.startswith("int8")]
    return title + (f"; {scale[0]} {_off(table.loc[scale[0], 'error'])}" if scale else "")


def _off(error: float) -> str:
    if error == 0:
        return "is exact"
    return (
        f"is off by {_error(error)}"
        if math.isfinite(error)
        else "overflows"
        if error > 0
        else "is off by what is not known"
    )


def _error(error: float) -> str:
    if math.isnan(error):
        return "unknown"
    return "exact" if error == 0 else "overflows" if math.isinf(error) else f"{100 * error:.2g} %"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} kB"


def _record_title(strength: np.ndarray, dt_s: float, arrival_s: np.ndarray | None) -> str:
    heard = strength.max(axis=0) > 0
    if not heard.any():
        return "No receiver records anything"
    strongest = strength.argmax(axis=0)[heard] * dt_s
    whom = counted(int(heard.sum()), "receiver")
    if arrival_s is None:
        first, last = strongest.min(), strongest.max()
        return f"The wave is strongest at {first:.3f} s where it comes first and at {last:.3f} s where it comes last"
    late = 1000 * (strongest - np.asarray(arrival_s, float)[heard])
    late = late[np.isfinite(late)]
    if not len(late):
        return "No arrival is predicted for a receiver that records something"
    middle = float(np.median(late))
    text = f"The wave is strongest {abs(middle):.0f} ms {'after' if middle >= 0 else 'before'} the time predicted"
    return text + (f", {late.min():+.0f} to {late.max():+.0f} ms over {whom}" if np.ptp(late) >= 1 else f" at {whom}")
