"""Figures of scores side by side: subgroups, folds and runs, each with its interval, beside the score of all."""

import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rsnakit import look
from rsnakit.look import NAMES, NEUTRAL, SITES, VALIDATION, WIDTH, Line, Score, number, percent

__all__ = ["comparison", "fold_scores", "forest"]


@look.styled
def forest(table: pd.DataFrame, overall: Score, name: str = "AUC") -> Figure:
    """A score within groups, with intervals, beside that of all breasts (the dotted line).

    Args:
        table: column, group, breasts, positive, value, low, high, note, as `subgroups.group_table` gives it.
        overall: the score of all breasts.
        name: what the score is called.
    """
    if table.empty:
        return look.nothing(f"No groups to take the {name} of")
    whole = look.interval_of(overall)[0]
    sections = {NAMES.get(column, column): rows for column, rows in table.groupby("column", sort=False)}
    halves = _halved({heading: len(rows) + 1.5 for heading, rows in sections.items()})
    lengths = [sum(len(sections[heading]) + 1.5 for heading in half) for half in halves]
    ends = table[["value", "low", "high"]].stack().to_list() + [whole] * (not math.isnan(whole))
    ends = [end for end in ends if math.isfinite(end)] or [0.0, 1.0]
    margin = 0.05 * (max(ends) - min(ends)) or 0.05
    limits = (min(ends) - margin, max(ends) + margin)
    size = (WIDTH, 1.2 + 0.24 * max(lengths))
    figure, axes = plt.subplots(1, len(halves), figsize=size, squeeze=False)
    for ax, half in zip(axes[0], halves, strict=True):
        look.forest(ax, {heading: _group_lines(sections[heading]) for heading in half}, limits, "{:.2f}")
        ax.axvline(whole, color="black", linewidth=1, linestyle=":", zorder=1)
        ax.set(ylim=(max(lengths) - 0.7, -0.8), xlabel=f"{name} with its 95 % interval\n(breasts, with cancer)")
    return look.titled(figure, _forest_title(table, whole, name))


@look.styled
def fold_scores(table: pd.DataFrame) -> Figure:
    """Scores of each fold with intervals, a panel a score, and those over all folds (black).

    Args:
        table: score, fold, breasts, positive, value, low, high, note, as `subgroups.fold_table` gives it.
    """
    if table.empty:
        return look.nothing("No fold has been scored")
    panels = {name: rows for name, rows in table.groupby("score", sort=False)}
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    most = max(map(len, panels.values()))
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, 0.8 + rows * (0.8 + 0.26 * most)), squeeze=False)
    for number_, (ax, (name, folds)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        lines = [
            Line(_fold_label(row), row.value, row.low, row.high, VALIDATION if row.fold == "all" else NEUTRAL, row.note)
            for row in folds.itertuples()
        ]
        if number_ % columns:
            lines = [line._replace(label="") for line in lines]
        ends = [end for end in folds[["value", "low", "high"]].to_numpy().ravel() if math.isfinite(end)] or [0.0, 1.0]
        margin = 0.08 * (max(ends) - min(ends)) or 0.05
        look.forest(ax, {"": lines}, (min(ends) - margin, max(ends) + margin), "{:.2f}")
        ax.set(title=name, xlabel="with its 95 % interval")
        ax.xaxis.set_major_locator(plt.MaxNLocator(3))
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    return look.titled(figure, _folds_title(next(iter(panels.values()))))


@look.styled
def comparison(table: pd.DataFrame, name: str = "This run") -> Figure:
    """By how much a run scores above others on the same breasts, with intervals over the same resampled patients.

    Args:
        table: other, score, difference, low, high, probability (of being better), as `comparing.differences` gives it.
        name: of the run.
    """
    if table.empty:
        return look.nothing("No other run to compare with")
    sections = {}
    for row in table.itertuples():
        line = Line(row.score, row.difference, row.low, row.high, VALIDATION, _better(row.probability))
        sections.setdefault(f"{look.short(name)} less {look.short(row.other)}", []).append(line)
    widest = np.nanmax(table[["difference", "low", "high"]].abs().to_numpy(float), initial=0.0) or 0.05
    figure, ax = plt.subplots(figsize=(WIDTH, 1.2 + 0.26 * (len(table) + 1.5 * len(sections))))
    look.forest(ax, sections, (-1.08 * widest, 1.08 * widest), "{:+.3f}")
    ax.axvline(0, color="black", linewidth=1, linestyle=":", zorder=1)
    ax.set_xlabel(f"difference with its 95 % interval; right of the dotted line {look.short(name)} is better")
    return look.titled(figure, _comparison_title(table.iloc[0], name))


def _better(probability: float) -> str:
    return "not to be compared" if math.isnan(probability) else f"better in {percent(probability)}"


def _group_lines(rows: pd.DataFrame) -> list[Line]:
    colors = SITES if rows["column"].iloc[0] == "site_id" else None
    return [
        Line(f"{look.short(row.group)} ({row.breasts:,}, {row.positive:,})", row.value, row.low, row.high,
             look.color_of(row.group, colors), row.note)
        for row in rows.itertuples()
    ]  # fmt: skip


def _fold_label(row: tuple) -> str:
    fold = "all folds" if row.fold == "all" else f"fold {row.fold}"
    return f"{fold} ({row.breasts:,}, {row.positive:,} with cancer)"


def _halved(lengths: Mapping[str, float]) -> list[list[str]]:
    """Names, in order, in two columns that are as even as their lengths allow; one name alone in one."""
    names = list(lengths)
    if len(names) == 1:
        return [names]
    cut = min(
        range(1, len(names)), key=lambda k: max(sum(map(lengths.get, names[:k])), sum(map(lengths.get, names[k:])))
    )
    return [names[:cut], names[cut:]]


# Titles that state the finding


def _forest_title(table: pd.DataFrame, whole: float, name: str) -> str:
    scored = table[table["value"].notna()]
    few = len(table) - len(scored)
    note = f"; too small to score: {few:,} of {len(table):,} groups" if few else ""
    if scored.empty or math.isnan(whole):
        return f"No group has enough breasts of both kinds for its {name}" + note
    apart = scored[(scored["low"] > whole) | (scored["high"] < whole)]
    if apart.empty:
        return f"No group's {name} is apart from that of all, {number(whole)}, by more than its interval{note}"
    names = [
        f"{NAMES.get(row.column, row.column)} {look.short(row.group)} ({number(row.value)})"
        for row in apart.itertuples()
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    chance = f"{0.05 * len(scored):.1f}".removesuffix(".0")
    return (
        f"{name} of all, {number(whole)}, is outside the interval of {', '.join(names[:3])}{more}: {len(apart)} of "
        f"{len(scored)} groups, where chance alone gives up to about {chance}{note}"
    )


def _folds_title(folds: pd.DataFrame) -> str:
    name = folds["score"].iloc[0]
    parts, whole = folds[folds["fold"] != "all"], folds.loc[folds["fold"] == "all", "value"]
    parts = parts[parts["value"].notna()]
    if parts.empty:
        return f"No fold has breasts of both kinds, so there is no {name}"
    if len(parts) == 1 or whole.empty:
        row = parts.iloc[0]
        return f"Fold {row['fold']}: {name} {look.with_interval(row[['value', 'low', 'high']])}"
    least, most = parts["value"].min(), parts["value"].max()
    span = f"{look.capital(name)} of {len(parts)} folds runs from {number(least)} to {number(most)}"
    if parts["low"].isna().any():
        return f"{span}; over all it is {number(whole.iloc[0])}"
    apart = parts[(parts["low"] > whole.iloc[0]) | (parts["high"] < whole.iloc[0])]
    if apart.empty:
        return (
            f"{span}; that over all, {number(whole.iloc[0])}, is within the interval of each: noise alone could do that"
        )
    names = ", ".join(apart["fold"])
    return f"{span}; that over all, {number(whole.iloc[0])}, is outside the interval of fold {names}"


def _comparison_title(row: pd.Series, name: str) -> str:
    value, low, high = (row[column] for column in ("difference", "low", "high"))
    name, other = look.short(name, 40), look.short(row["other"], 40)
    if not math.isfinite(value):
        return f"{row['score']} of {name} and {other} cannot be compared"
    side = "above" if value >= 0 else "below"
    title = f"{name} scores {abs(value):.3f} {side} {other} in {row['score']}"
    if math.isnan(low):
        return title
    title += f", 95 %: {low:+.3f} to {high:+.3f}, and is better in {percent(row['probability'])} of resamples"
    return title + ("" if low > 0 or high < 0 else ": that may be noise")
