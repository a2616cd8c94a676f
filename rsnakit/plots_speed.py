"""Figures of speed: what each setting gives on the device at hand, whether the loader or the model is the limit.

Orange is what was chosen. Whiskers reach from the smallest to the largest of the rounds. Figures of single tricks, which
`plots_tricks` draws, are found here as well.
"""

import math
import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from rsnakit import look
from rsnakit.look import NEUTRAL, WIDTH, counted, plain, short, times
from rsnakit.plots_tricks import (
    CHOSEN,
    OTHER,
    as_fast,
    bar,
    beside,
    chunk_gain,
    format_costs,
    name_rows,
    notes,
    shot_record,
    time_memory,
    top_of,
)

__all__ = [
    "batch_rates", "chunk_gain", "format_costs", "loader_limits", "rates", "shot_record", "time_memory", "transform_costs",
    "tuned",
]  # fmt: skip

FORMAT_COLORS = {"block8": CHOSEN, "raw16": "#0072B2", "png16": "#009E73", "png8": "#CC79A7"}
PRECISION_COLORS = {"fp32": "#000000", "bf16": "#0072B2", "fp16": "#009E73"}
MARKERS = "osD^v"
HEADINGS = {"precision": "precision and memory layout", "compile": "compiling", "together": "all together"}  # of parts


@look.styled
def rates(table: pd.DataFrame, unit: str = "images") -> Figure:
    """Images a second of the settings that were tried, a bar each; what was skipped has its reason in place of a bar.

    Args:
        table: rows of a tuner's table, of one part or several: part, name, images_s, low, high, chosen, skipped. The first row
            of a part is what was asked.
        unit: what is counted: images, or breasts.
    """
    if table.empty:
        return look.nothing("No settings were tried, so there is nothing to compare")
    parts = list(dict.fromkeys(table["part"]))
    figure, ax = plt.subplots(figsize=(WIDTH, 1.3 + 0.31 * (len(table) + 1.3 * len(parts) * (len(parts) > 1))))
    ticks, y = [], 0.0
    for part in parts:
        rows = table[table["part"] == part]
        if len(parts) > 1:
            ticks.append((y, short(HEADINGS.get(part, part), 36), "bold"))
            y += 1
        asked = rows["images_s"].iloc[0]
        for place, (_, row) in enumerate(rows.iterrows()):
            ticks.append((y, short(row["name"], 36), "normal"))
            if row["images_s"] > 0:
                bar(ax, y, row)
                ratio = f", {times(row['images_s'] / asked)} times" if asked > 0 else ""
                beside(ax, y, plain(row["images_s"]) + (", as asked" if place == 0 else ratio))
            else:
                reason = textwrap.shorten(str(row["skipped"] or "not measured"), 170, placeholder=" …")
                text = "\n".join(short(line, 85) for line in textwrap.wrap(reason, 85)[:2])
                ax.text(0.008, y, text, va="center", fontsize=8, transform=ax.get_yaxis_transform())
            y += 1
        y += 0.3
    name_rows(ax, ticks, y)
    ax.set(xlabel=f"{unit}/s, with the smallest and the largest of the rounds; orange: chosen", xlim=(0, top_of(table)))
    return look.titled(figure, _choices_title(table, unit))


@look.styled
def batch_rates(table: pd.DataFrame, unit: str = "images") -> Figure:
    """Images a second and memory of a step against the batch; batches that could not be trained are crosses at the foot.

    Args:
        table: rows of the part "batch" of a tuner's table: name, batch, images_s, low, high, peak_mb, chosen, skipped. Names
            such as "bf16, batch 8" make a line a precision.
        unit: what a batch counts: images, or breasts.
    """
    if table.empty:
        return look.nothing("No batch was tried, so the largest is not known")
    lines = table["name"].str.replace(r",? ?batch \d+$", "", regex=True)
    table = table.assign(line=lines.map(lambda name: short(name, 24))).sort_values("batch", kind="stable")
    order = list(dict.fromkeys([*table.loc[table["chosen"].eq(True), "line"], *table.sort_index()["line"]]))
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.8))
    for ax, column, label in zip(
        axes, ("images_s", "peak_mb"), (f"{unit}/s", "most memory of a step, MB"), strict=True
    ):
        for place, name in enumerate(order):
            rows = table[table["line"] == name]
            fits, color = rows[rows["images_s"] > 0], PRECISION_COLORS.get(name, NEUTRAL)
            ax.plot(fits["batch"], fits[column], f"{MARKERS[place % len(MARKERS)]}-", color=color, label=name)
            if column == "images_s":
                ax.vlines(fits["batch"], fits["low"], fits["high"], color=color, linewidth=1.5)
            failed = rows.drop(fits.index)["batch"]
            if len(failed):  # an empty line that is not clipped takes the layout apart
                ax.plot(failed, [0.0] * len(failed), "X", color=color, markersize=8, clip_on=False)
        chosen = table[table["chosen"].eq(True) & (table["images_s"] > 0)]
        ax.plot(chosen["batch"], chosen[column], "o", color=CHOSEN, markersize=11)
        ax.set(ylabel=label, ylim=(0, top_of(table, column)))
        ax.set_xscale("log", base=2)
        least, most = math.log2(table["batch"].min()), math.log2(table["batch"].max())
        powers = range(math.floor(least), math.ceil(most) + 1, 1 + int(most - least) // 6)
        ax.set_xticks([2.0**k for k in powers], [f"{2**k:,}" for k in powers])
        ax.minorticks_off()
        ax.set_xlim(2 ** (least - 0.4), 2 ** (most + 0.4))
        ax.grid(True)
    failed = table[~(table["images_s"] > 0)]
    left_out = [(name, why or "unknown") for name, why in zip(failed["name"], failed["skipped"], strict=True)]
    axes[0].set_xlabel(
        "batch; orange: chosen" + notes(left_out, 56),
        loc="left",
    )
    axes[1].set_xlabel("batch; cross: could not be trained", loc="left")
    if len(order) > 1:
        axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return look.titled(figure, _batch_title([table[table["line"] == name] for name in order], unit))


@look.styled
def loader_limits(table: pd.DataFrame, model_images_s: float, unit: str = "images") -> Figure:
    """Images a second that the loader gives, by format of the store and number of workers, against what the model takes.

    Args:
        table: store_format, workers, images_s, low, high, skipped, as `feeding.rates` gives it.
        model_images_s: images a second of training steps whose batches are at hand; NaN if it is not known.
        unit: what is counted: images, or breasts.
    """
    measured = table[table["images_s"] > 0]
    if measured.empty:
        reasons = [str(reason) for reason in table.get("skipped", ()) if reason]
        return look.nothing(f"No loader was measured{': ' * bool(reasons)}{short(reasons[0], 120) if reasons else ''}")
    figure, ax = plt.subplots(figsize=(WIDTH, 3.6))
    for place, (name, rows) in enumerate(measured.groupby("store_format", sort=False)):
        color, rows = FORMAT_COLORS.get(name, NEUTRAL), rows.sort_values("workers")
        where = rows["workers"] + 0.05 * (place - 1.5)  # beside each other, so that whiskers are seen
        ax.plot(where, rows["images_s"], f"{MARKERS[place % len(MARKERS)]}-", color=color, label=short(name))
        ax.vlines(where, rows["low"], rows["high"], color=color, linewidth=2)
    if model_images_s > 0:
        ax.axhline(model_images_s, color="black", linestyle="--", label=f"the model takes {plain(model_images_s)}")
    workers = sorted({int(n) for n in measured["workers"]})
    ax.set_xticks(workers[:: 1 + len(workers) // 16])
    top = max(top_of(measured), 1.08 * model_images_s if model_images_s > 0 else 0.0)
    ax.set(
        xlabel="workers of the loader" + notes(_left_out(table.drop(measured.index))), ylabel=f"{unit}/s", ylim=(0, top)
    )
    ax.set_xlim(workers[0] - 0.5, workers[-1] + 0.5)
    ax.grid(True, axis="y")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return look.titled(figure, _limit_title(measured, model_images_s, unit))


@look.styled
def transform_costs(table: pd.DataFrame) -> Figure:
    """What each transform of an augmentation costs, an image, times how often it comes.

    Args:
        table: by the transform: ms and share (0 to 1), as `augment.costs` gives it.
    """
    if table.empty or not table["ms"].sum() > 0:
        return look.nothing("This augmentation has no transform that takes time")
    table = table.sort_values("ms", ascending=False)
    figure, ax = plt.subplots(figsize=(WIDTH, 1.3 + 0.3 * len(table)))
    ax.barh(range(len(table)), table["ms"].fillna(0), color=[CHOSEN, *[OTHER] * (len(table) - 1)], height=0.7)
    for y, (ms, share) in enumerate(zip(table["ms"], table["share"], strict=True)):
        beside(ax, y, f"{plain(ms)} ms" + (f", {look.percent(share)}" if math.isfinite(share) else ""))
    name_rows(ax, [(y, short(name, 36), "normal") for y, name in enumerate(table.index)], len(table))
    ax.set(xlabel="ms an image, times how often the transform comes", xlim=(0, 1.04 * table["ms"].max()))
    total = f"the {plain(table['ms'].sum())} ms that augmentation takes an image"
    if len(table) == 1:
        return look.titled(figure, f"{short(table.index[0], 36)} is all of {total}")
    title = f"{short(table.index[0], 36)} takes {look.percent(table['ms'].iloc[0] / table['ms'].sum())} of {total}"
    return look.titled(
        figure, f"{title}, {short(table.index[1], 36)} {look.percent(table['ms'].iloc[1] / table['ms'].sum())}"
    )


@look.styled
def tuned(table: pd.DataFrame, unit: str = "images") -> Figure:
    """What all settings together give: images a second and memory, of what was asked and of what was chosen.

    Args:
        table: name, images_s, low, high, peak_mb, chosen, as the tuner's last part gives it: what was asked in the first row.
        unit: what is counted: images, or breasts.
    """
    if table.empty:
        return look.nothing("Nothing was measured before and after, so nothing can be said of the gain")
    columns = ["name", "images_s", "low", "high", "peak_mb", "chosen"]
    table = table.reindex(columns=columns).reset_index(drop=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 1.4 + 0.4 * len(table)), width_ratios=(3, 2))
    for ax, column, label in ((left, "images_s", f"{unit}/s"), (right, "peak_mb", "most memory of a step, MB")):
        for y, row in table.iterrows():
            ends = {} if column == "images_s" else {"low": math.nan, "high": math.nan}
            bar(ax, y, {**row, **ends}, column)
            beside(ax, y, plain(row[column]))
        names = [short(name, 36) if ax is left else "" for name in table["name"]]
        name_rows(ax, [(y, name, "normal") for y, name in enumerate(names)], len(table))
        ax.set(xlabel=label, xlim=(0, top_of(table, column)))
    left.set_xlabel(f"{unit}/s, with the slowest and the fastest round; orange: chosen")
    return look.titled(figure, _together_title(table, unit))


def _left_out(rows: pd.DataFrame) -> list[tuple[str, str]]:
    return [
        (f"{row.store_format} {counted(int(row.workers), 'worker')}", str(row.skipped or "unknown"))
        for row in rows.itertuples()
    ]


# Titles that state the finding


def _choices_title(table: pd.DataFrame, unit: str) -> str:
    """What was chosen in each part; of more than three parts, what was changed."""
    parts = [rows for _, rows in table.groupby("part", sort=False)]
    if len(parts) > 3:
        changed = [rows for rows in parts if rows["chosen"].eq(True).any() and not rows["chosen"].eq(True).iloc[0]]
        parts = changed[:3] or parts[-1:]
    return "; ".join(_choice_title(rows, unit) for rows in parts)


def _choice_title(rows: pd.DataFrame, unit: str) -> str:
    part = str(rows["part"].iloc[0])
    verb = "loads" if part == "loader" else "trains"
    rows = rows.assign(name=[short(name, 36) for name in rows["name"]])
    measured = rows[rows["images_s"] > 0]
    if measured.empty:
        return f"{look.capital(HEADINGS.get(part, part))}: nothing could be measured"
    asked, chosen = rows.iloc[0], measured[measured["chosen"].eq(True)]
    kept = chosen.iloc[0] if len(chosen) else measured.loc[measured["images_s"].idxmax()]
    if not asked["images_s"] > 0:
        rate = f"{kept['name']} {verb} {plain(kept['images_s'])} {unit}/s"
        return f"{rate}; what was asked, {asked['name']}, could not be measured"
    if kept.name != asked.name:
        text = f"{kept['name']} {verb} {as_fast(kept['images_s'] / asked['images_s'])} as what was asked"
        return text + ", and nothing is chosen" * chosen.empty
    others = measured.drop(asked.name)
    if others.empty:
        return f"{asked['name']} {verb} {plain(asked['images_s'])} {unit}/s; nothing else could be measured"
    best = others.loc[others["images_s"].idxmax()]
    ratio = best["images_s"] / asked["images_s"]
    text = f"{asked['name']} stays: {best['name']} {verb} {as_fast(ratio)}"
    if ratio > 1 and best["low"] <= asked["high"]:
        return text + ", which lies within the spread of the rounds"
    return text + ", as the best of the others" * (len(others) > 1)


def _batch_title(lines: Sequence[pd.DataFrame], unit: str) -> str:
    """How far each line goes and what stopped it, the chosen one's first; of that one what the largest batch gives."""
    clauses = []
    for rows in lines:
        name, fits = rows["line"].iloc[0], rows[rows["images_s"] > 0]
        said, most = f"{name}: " * bool(name), int(fits["batch"].max()) if len(fits) else 0
        failed = rows[~(rows["images_s"] > 0) & (rows["batch"] > most)]
        why = short(failed["skipped"].iloc[0] or "no reason is known", 60) if len(failed) else ""
        if not len(fits):
            clauses.append(f"{said}not even a batch of {rows['batch'].min():,} could be trained, {why}")
            continue
        stopped = f" ({failed['batch'].iloc[0]:,}: {why})" if len(failed) else ", and no larger one was tried"
        clauses.append(f"{said}batches up to {most:,} fit{stopped}")
        if len(fits) > 1 and len(clauses) == 1:
            ratio = times(fits["images_s"].iloc[-1] / fits["images_s"].iloc[0])
            clauses[0] += f"; the largest trains {ratio} times as many {unit}/s as a batch of {fits['batch'].iloc[0]:,}"
    text = "; ".join(clauses)
    return text if lines[0]["line"].iloc[0] else look.capital(text)


def _together_title(table: pd.DataFrame, unit: str) -> str:
    asked, chosen = table.iloc[0], table[table["chosen"].eq(True)]
    chosen = asked if chosen.empty else chosen.iloc[0]
    speed, memory = (chosen[name] / asked[name] if asked[name] > 0 else math.nan for name in ("images_s", "peak_mb"))
    if not speed > 0:
        return f"What {chosen['name']} gains over {asked['name']} is not known: one was not measured"
    if chosen.name == asked.name:
        others = len(table[table["images_s"] > 0]) - 1
        why = "nothing else that was tried trains faster" if others else "nothing else promised to be faster"
        return f"What was asked stays, {plain(asked['images_s'])} {unit}/s: {why}"
    title = f"All settings together train {as_fast(speed)} as what was asked"
    if memory > 0:
        title += ", in the same memory" if times(memory) == "1" else f", in {times(memory)} times the memory"
    return title


def _limit_title(measured: pd.DataFrame, model: float, unit: str) -> str:
    best = measured.loc[measured["images_s"].idxmax()]
    at = f"{short(best['store_format'])} with {counted(int(best['workers']), 'worker')}"
    if not model > 0:
        return f"{at} loads fastest, {plain(best['images_s'])} {unit}/s; what the model takes is not known"
    ratio = best["images_s"] / model
    if ratio >= 1:
        with_it = at.replace(" with ", " and ")
        return f"The model is the limit with {with_it}, which load {times(ratio)} times the {unit}/s that it takes"
    return (
        f"The loader is the limit: at its best, {at}, it loads {times(ratio)} times the {unit}/s that the model takes"
    )
