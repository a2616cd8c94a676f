"""Figures of a competition's tables and headers: counts, rates with intervals, what headers say, the leak of BI-RADS."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rsnakit import look, metrics, subgroups
from rsnakit.look import NAMES, NEUTRAL, SITES, WIDTH, counted, number, percent
from rsnakit.subgroups import categories

RATE_COLUMNS = (("site_id", "machine_id"), ("view", "implant"), ("age", "density"))


@look.styled
def counts(table: pd.DataFrame) -> Figure:
    """How many images there are by site, machine, view, age and density; missing values have a grey bar of their own.

    Args:
        table: a row an image, as `data.load_table` gives it; columns that a split lacks are left out.
    """
    names = [name for name in ("site_id", "view", "density", "age", "machine_id") if name in table]
    if not names or table.empty:
        return look.nothing("No images to count" if table.empty else "No column to count images by")
    rows = [row for row in (names[:3], names[3:]) if row]
    parts = {name: 1 + (name == "machine_id") for name in names}  # of a row's width: there may be many machines
    totals = [sum(parts[name] for name in row) for row in rows]
    span = math.lcm(*totals)
    mosaic = [
        [name for name in row for _ in range(span // total * parts[name])]
        for row, total in zip(rows, totals, strict=True)
    ]
    figure, axes = plt.subplot_mosaic(mosaic, figsize=(WIDTH, 2.6 * len(rows)))
    for row, total in zip(rows, totals, strict=True):
        for name in row:
            values, order = categories(table, name)
            heights = values.value_counts().reindex(order)
            colors = [look.color_of(value, SITES if name == "site_id" else None) for value in order]
            bars = axes[name].bar(range(len(order)), heights, 0.75, color=colors)
            look.label_bars(axes[name], order, WIDTH * parts[name] / total - 0.9)
            axes[name].set(title=NAMES.get(name, name) + (", years" if name == "age" else ""), ylabel="images")
            axes[name].yaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes[name].yaxis.set_major_formatter("{x:,.0f}")
            if len(order) <= 12:
                axes[name].bar_label(bars, [f"{n:,}" for n in heights], fontsize=8, padding=1)
                axes[name].margins(y=0.12)
    patients = f" of {counted(table['patient_id'].nunique(), 'patient')}" if "patient_id" in table else ""
    lacking = {NAMES.get(name, name): table[name].isna().mean() for name in names}
    lacking = ", ".join(f"{name} in {percent(share)}" for name, share in lacking.items() if share)
    return look.titled(
        figure, f"{counted(len(table), 'image')}{patients}; missing: {lacking or 'none of these values'}"
    )


@look.styled
def positive_rate(table: pd.DataFrame) -> Figure:
    """Share of breasts with cancer by site, machine, view, implant, age and density, with 95 % Wilson intervals.

    A breast counts once in each group that an image of it is in. The dotted line is the rate of all breasts; a triangle
    at the right edge is a rate beyond it, in a group too small to stretch the axis for.

    Args:
        table: a row an image: patient_id, laterality and cancer; columns that it lacks are left out.
    """
    if "cancer" not in table:
        return look.nothing("No column cancer: this split has no labels")
    if table.empty:
        return look.nothing("No images to take a rate of")
    breasts = table.drop_duplicates(metrics.BREAST)["cancer"]
    title = f"{percent(breasts.mean())} of breasts have cancer ({int(breasts.sum()):,} of {len(breasts):,})."
    columns = [[name for name in names if name in table] for names in RATE_COLUMNS]
    columns = [{name: _rates(table, name) for name in names} for names in columns if names]
    rates = {name: rate for column in columns for name, rate in column.items()}
    if not rates:
        return look.nothing(title + " No column to group them by")
    lines = max(sum(len(rate) + 1.5 for rate in column.values()) for column in columns)
    ends = pd.concat(rate.loc[rate["n"] >= 0.02 * rate["n"].sum(), "high"] for rate in rates.values())
    limit = min(100.0, 105 * ends.max())
    figure, axes = plt.subplots(1, len(columns), figsize=(WIDTH, 1.3 + 0.24 * lines), squeeze=False)
    for ax, column in zip(axes[0], columns, strict=True):
        ax.axvline(100 * breasts.mean(), color="black", linewidth=1, linestyle=":", zorder=1)
        look.forest(
            ax, {f"{NAMES.get(name, name)} (breasts)": _lines(name, rate) for name, rate in column.items()}, (0, limit)
        )
        ax.set(ylim=(lines - 0.7, -0.8), xlabel="breasts with cancer, %")
    return look.titled(figure, f"{title} {_compare_sites(rates.get('site_id'))}".strip())


@look.styled
def header_overview(headers: pd.DataFrame) -> Figure:
    """Image sizes, first windows, transfer syntaxes and photometric interpretations.

    Args:
        headers: as `headers.scan_headers` gives it; files with an error count in the title alone.
    """
    good = headers[headers["error"].isna()]
    bad = len(headers) - len(good)
    if good.empty:
        return look.nothing(f"None of {bad} files can be read" if bad else "No headers to show")
    mosaic = [["size", "window"], ["transfer_syntax", "photometric"]]
    figure, axes = plt.subplot_mosaic(mosaic, figsize=(WIDTH, 6.4), height_ratios=(3, 1.2))
    sizes = good.dropna(subset=["rows", "columns"]).groupby(["columns", "rows"]).size()
    width, height = (sizes.index.get_level_values(i).to_numpy(float) for i in (0, 1))
    axes["size"].scatter(width, height, 20 + 500 * sizes / sizes.sum(), NEUTRAL, alpha=0.6, linewidths=0)
    axes["size"].set(title=f"{counted(len(sizes), 'image size')}; area: share of images", xlabel="columns, pixels")
    axes["size"].set(ylabel="rows, pixels")
    axes["size"].margins(0.15)
    if sizes.empty:
        axes["size"].set(title="no image size is known", xticks=[], yticks=[])
    n_windowed = _windows(axes["window"], good)
    for name in ("transfer_syntax", "photometric"):
        shares = good[name].fillna("missing").value_counts(ascending=True)
        bars = axes[name].barh(range(len(shares)), shares, color=[look.color_of(value) for value in shares.index])
        axes[name].set_yticks(range(len(shares)), map(look.short, shares.index))
        axes[name].set(title=name.replace("_", " "), xlabel="images")
        axes[name].bar_label(bars, [f"{n:,}" for n in shares], fontsize=9, padding=3)
        axes[name].margins(x=0.15)
    inverted, kinds = (good["photometric"] == "MONOCHROME1").mean(), good["transfer_syntax"].nunique()
    title = f"{counted(kinds, 'encoding') if kinds else 'No encoding known'}, {percent(inverted)} MONOCHROME1 and "
    title += f"{percent(1 - n_windowed / len(good))} without a window among {counted(len(good), 'header')}"
    return look.titled(figure, title + (f"; {bad:,} more cannot be read" if bad else ""))


@look.styled
def machine_differences(images: pd.DataFrame) -> Figure:
    """Brightness, frame size and first window of each machine's images, by site: medians, with 10 to 90 % of the images, or
    with the ends of the window.

    Args:
        images: a row an image, as `origins.measure` gives it; machines and sites that it does not know are "missing".
    """
    if images.empty:
        return look.nothing("No headers to compare machines by")
    site, machine = (
        categories(images, name)[0] if name in images else pd.Series(subgroups.MISSING, index=images.index)
        for name in ("site_id", "machine_id")
    )
    center, half = images["window_center"], images["window_width"] / 2
    pixels = (images["rows"] * images["columns"]).astype(float) / 1e6
    panels = (
        ("brightness of the breast", "% of white\n(median; 10 to 90 % of images)", 100 * images["brightness"], None),
        ("frame", "million pixels\n(median; 10 to 90 % of images)", pixels, None),
        ("first window", "stored units\n(center; from end to end)", center, (center - half, center + half)),
    )
    n = site.nunique() + (site + " " + machine).nunique()
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 1.5 + 0.24 * (n + site.nunique() / 2)))
    for ax, (name, unit, values, ends) in zip(axes, panels, strict=True):
        sections = {}
        for place in sorted(site.unique()):
            lines = _machine_lines(values[site == place], machine, ends, SITES.get(place, NEUTRAL))
            sections.setdefault(f"site {look.short(place, 14)} (images)", []).extend(lines)
        found = np.array([line[1:4] for lines in sections.values() for line in lines], dtype=float)
        found = found[np.isfinite(found)] if np.isfinite(found).any() else np.array([0.0, 1.0])
        margin = 0.08 * np.ptp(found) or 0.1 * abs(found[0]) or 1.0
        look.forest(ax, sections, (found.min() - margin, found.max() + margin))
        ax.set(title=name, xlabel=unit)
        ax.locator_params(axis="x", nbins=4)
        ax.tick_params(axis="y", labelleft=ax is axes[0])
    return look.titled(figure, _say_differences(images["brightness"], site, machine))


@look.styled
def birads_leak(table: pd.DataFrame) -> Figure:
    """Share of images with cancer by BI-RADS, missing included, a panel a site, and the AUC that BI-RADS alone reaches.

    The score of an image is the rate of cancer in its category, missing being one, taken on the same rows.

    Args:
        table: a row an image, with BIRADS and cancer; site_id where known.
    """
    lacking = [name for name in ("BIRADS", "cancer") if name not in table]
    if lacking or table.empty:
        return look.nothing(f"No column {' and '.join(lacking)}: nothing to leak" if lacking else "No images to show")
    values, order = categories(table, "BIRADS")
    sites = categories(table, "site_id")[0] if "site_id" in table else "unknown"
    table = pd.DataFrame({"BIRADS": values, "site": sites, "cancer": table["cancer"]})
    names = sorted(table["site"].unique())
    figure, axes = plt.subplots(1, len(names), figsize=(WIDTH, 3.6), squeeze=False, sharey=True)
    for ax, (site, rows) in zip(axes[0], table.groupby("site"), strict=True):
        found = _rate_table(rows["BIRADS"], rows["cancer"], order)
        errors = 100 * np.vstack([found["rate"] - found["low"], found["high"] - found["rate"]]).clip(0)
        errors[:, found["n"] == 0] = math.nan  # nothing known: no bar, rather than one from 0 to 100 %
        colors = [look.color_of(value, dict.fromkeys(order, SITES.get(site, NEUTRAL))) for value in order]
        ax.bar(range(len(order)), 100 * found["rate"], 0.7, color=colors, yerr=errors, capsize=3)
        ax.set_xticks(range(len(order)), [f"{look.short(name, 10)}\nn = {n:,}" for name, n in found["n"].items()])
        ax.set_title(f"site {look.short(site, 14)}: AUC {number(_birads_auc(rows))}")
    axes[0][0].set_ylabel("images with cancer, %")
    figure.supxlabel("BI-RADS, and number of images", fontsize=10)
    auc = _birads_auc(table)
    if math.isnan(auc):
        return look.titled(figure, "One class only: what BI-RADS alone tells of cancer has no AUC")
    title = f"BI-RADS alone reaches an AUC of {auc:.2f} on images (scored with the rates of these very rows)"
    advice = ". The test set does not have it: never an input, at most a target" if auc > 0.6 else ""
    return look.titled(figure, title + advice)


def _machine_lines(
    values: pd.Series, machine: pd.Series, ends: tuple[pd.Series, pd.Series] | None, color: str
) -> list[look.Line]:
    """A line a machine of one site's images: their median with 10 to 90 % of them, or with the medians of their `ends`."""
    lines = {}
    for name, rows in values.groupby(machine[values.index]):
        known, label = rows.dropna().astype(float), f"{look.short(name)} ({len(rows):,})"
        if known.empty:
            lines[name] = look.Line(label, note="none known", color=color)
            continue
        low, high = known.quantile([0.1, 0.9]) if ends is None else (end[known.index].median() for end in ends)
        lacking = (
            f"none in {percent(1 - len(known) / len(rows))}" if ends is not None and len(known) < len(rows) else ""
        )
        lines[name] = look.Line(label, known.median(), low, high, color, lacking)
    in_order = sorted(lines, key=lambda name: (name == subgroups.MISSING, len(name), name))  # 49 before 170
    return [lines[name] for name in in_order]


def _say_differences(brightness: pd.Series, site: pd.Series, machine: pd.Series) -> str:
    shares = [variance_explained(brightness, groups) for groups in (site + " " + machine, site)]
    if math.isnan(shares[0]):
        return "Too few images or machines to say how much brightness depends on the machine"
    by_site = f", the site alone for {percent(shares[1])}" if not math.isnan(shares[1]) else ""
    few = int(brightness.notna().sum())
    return f"The machine accounts for {percent(shares[0])} of the variance of brightness among {few:,} images{by_site}"


def _compare_sites(rates: pd.DataFrame | None) -> str:
    if rates is None or len(rates) != 2:
        return ""
    (a, first), (b, second) = ((look.short(site), row) for site, row in rates.iterrows())
    apart = first["high"] < second["low"] or second["high"] < first["low"]
    text = f"Site {a} has {percent(first['rate'])}, site {b} {percent(second['rate'])}: their intervals "
    return text + ("do not overlap" if apart else "overlap")


def _lines(name: str, rates: pd.DataFrame) -> list[look.Line]:
    """Of a forest: a line a category of a column, its rate in %."""
    colors = [look.color_of(value, SITES if name == "site_id" else None) for value in rates.index]
    values = (100 * rates[["rate", "low", "high"]]).itertuples(index=False)
    labels = [f"{look.short(value)} ({int(n):,})" for value, n in rates["n"].items()]
    return [look.Line(label, *row, color) for label, row, color in zip(labels, values, colors, strict=True)]


def _windows(ax: Axes, headers: pd.DataFrame) -> int:
    """First windows, centre against width, by their function; returns how many headers have one."""
    windowed = headers.dropna(subset=["window_center", "window_width"])
    functions = windowed["voi_function"].fillna("no function")
    for number_, (function, rows) in enumerate(windowed.groupby(functions)):
        color, marker = look.FUNCTIONS.get(function, "white"), "osD^v<>P"[number_ % 8]
        label = f"{look.short(function)}: {counted(len(rows), 'image')}"
        x, y = rows["window_center"], rows["window_width"]
        ax.scatter(x, y, 45, color, marker=marker, edgecolors="black", label=label)
    ax.set(title="first windows", xlabel="center, stored units", ylabel="width, stored units")
    ax.margins(0.15)
    if len(windowed):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    else:
        ax.set(title="no first window is known", xticks=[], yticks=[])
    return len(windowed)


# Rates and shares


def variance_explained(values: pd.Series, groups: pd.Series) -> float:
    """Share of the variance of values (N,) that lies between groups, from 0 to 1.

    It is epsilon squared (T. L. Kelley, PNAS 21, 1935, 554-559), cut at 0: unlike the plain ratio of sums of squares it does
    not rise with the number of groups that differ by chance alone. NaN where there is one group, nothing differs, or no group
    has two values.
    """
    known = values.notna() & groups.notna()
    values, groups = values[known].astype(float), groups[known]
    n, k = len(values), groups.nunique()
    total = ((values - values.mean()) ** 2).sum()
    if k < 2 or n <= k or total == 0:
        return math.nan
    within = ((values - values.groupby(groups).transform("mean")) ** 2).sum()
    return max(0.0, 1 - within / (n - k) * (n - 1) / total)


def _rates(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rate of cancer by category of a column: a breast counts once in each that an image of it is in."""
    values, order = categories(table, name)
    breasts = table.assign(group=values).drop_duplicates([*metrics.BREAST, "group"])
    return _rate_table(breasts["group"], breasts["cancer"], order)


def _rate_table(groups: pd.Series, cancer: pd.Series, order: list[str]) -> pd.DataFrame:
    """A row a group: n, rate (0 where n is) and its 95 % interval, low and high."""
    found = cancer.groupby(groups).agg(["sum", "size"]).reindex(order, fill_value=0)
    low, high = metrics.wilson(found["sum"], found["size"])
    rate = (found["sum"] / found["size"]).fillna(0.0)
    return pd.DataFrame({"n": found["size"], "rate": rate, "low": low, "high": high}, index=order)


def _birads_auc(table: pd.DataFrame) -> float:
    return metrics.auc(table["cancer"], table.groupby("BIRADS")["cancer"].transform("mean"))
