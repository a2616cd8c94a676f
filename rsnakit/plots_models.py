"""Figures of models: what a stem costs, what stages see, what blocks and basic parts do to a map, how heads score."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import nn

from rsnakit import look
from rsnakit.look import NEUTRAL, WIDTH
from rsnakit.metrics import Interval

__all__ = ["activation_maps", "as_map", "block_changes", "head_scores", "parts_gallery", "reach", "stem_costs"]

HEAT = "inferno"  # dark to light in grey print too
OWN = look.TRAIN  # orange: the model as it comes, the head that is one's own


@look.styled
def stem_costs(table: pd.DataFrame, own: object = None) -> Figure:
    """What each stem stride costs, a panel a measure, in times of the largest stride's.

    Args:
        table: a row a stride (its index, largest first), a column a measure, whose name has its unit.
        own: the stride that the model comes with, which is marked.
    """
    if table.empty:
        return look.nothing("No stride of the stem could be set, so there is nothing to compare")
    names = list(table.columns)
    figure, axes = plt.subplots(1, len(names), figsize=(WIDTH, 3.0), squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        values = table[name].to_numpy(float)
        colors = [OWN if stride == own else NEUTRAL for stride in table.index]
        bars = ax.bar([str(stride) for stride in table.index], values, color=colors)
        ax.bar_label(bars, [_short(value) if np.isfinite(value) else "unknown" for value in values], padding=2)
        ax.set(title=name, xlabel="stem stride" + (" (orange: as it comes)" if own in table.index else ""))
        ax.set_ylim(0, 1.15 * np.nanmax(values, initial=1e-9))
        ax.yaxis.set_major_locator(plt.MaxNLocator(5))
    first, last = table.iloc[0], table.iloc[-1]
    times = [
        f"{_short(last[name] / first[name])} times the {name.split(',')[0]}"
        for name in names
        if last[name] / (first[name] or np.nan) > 0
    ]
    title = f"From stride {table.index[0]} to {table.index[-1]}: {_listed(times) or 'what it takes is not known'}"
    return look.titled(figure, title if len(table) > 1 else f"Stride {table.index[0]} alone could be set")


@look.styled
def activation_maps(image: np.ndarray, maps: Mapping[str, torch.Tensor]) -> Figure:
    """What stages see of an image: how strong each responds where, and below the channel with the sharpest peak.

    A channel counts by how far it departs from its own mean over the map, in its own deviations, so that loud channels do
    not drown the others. Every cell is drawn as large as what it stands for.

    Args:
        image: (H, W) whole numbers in 0..4095 or floats in [0, 1].
        maps: (C, h, w) each, by the stage's name, finest first.
    """
    if not maps:
        return look.nothing("No maps of stages to show")
    height, width = image.shape
    n = 1 + len(maps)
    cell = min(WIDTH / n, 1.75)  # inches
    size = (max(n * cell, 5), 2 * (cell * height / width + 0.35) + 0.7)
    figure, axes = plt.subplots(2, n, figsize=size, squeeze=False)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    breast = (image > 0.02 * image.max()).astype(np.float32)
    edges = {}
    for column, (name, x) in zip(axes[:, 1:].T, maps.items(), strict=True):
        scaled = _standard(x)
        strength = scaled.square().mean(0).sqrt().numpy()
        sharpest = int(scaled.flatten(1).amax(1).argmax())
        texts = f"{name}\n{x.shape[0]} of {x.shape[1]}x{x.shape[2]}", f"channel {sharpest}"
        for ax, picture, text in zip(column, (strength, x[sharpest].float().numpy()), texts, strict=True):
            low, high = np.percentile(picture, (1, 99))  # the map's borders would take the whole scale
            ax.imshow(picture, cmap=HEAT, vmin=low, vmax=high, extent=extent, interpolation="nearest")
            if 0 < breast.mean() < 1:
                ax.contour(breast, [0.5], colors="white", linewidths=0.8)
            look.bare(ax)
            ax.set_title(text, fontsize=9)
        edges[name] = _at_outline(strength, breast)
    look.show_image(axes[0, 0], image)
    axes[0, 0].set_title(f"the image\n{height}x{width}", fontsize=9)
    axes[1, 0].set_axis_off()
    words = (
        "above: all channels,\nbelow: the one with\nthe sharpest peak.\nBright: strong,\nwhite: the breast's\noutline"
    )
    axes[1, 0].text(0, 1, words, va="top", fontsize=9, transform=axes[1, 0].transAxes)
    cells = [f"{round(height / x.shape[1])}x{round(width / x.shape[2])}" for x in maps.values()]
    title = f"A cell stands for {cells[0]} pixels" + (
        f" at first and {cells[-1]} at last" if cells[0] != cells[-1] else " in the first stage and in the last"
    )
    edges = {name: ratio for name, ratio in edges.items() if np.isfinite(ratio)}
    if edges:
        most = max(edges, key=edges.get)
        title += f"; the outline of the breast draws {edges[most]:.1f} times the response of its inside in {most}"
        if len(edges) > 1 and list(edges)[-1] != most:
            title += f", {edges[list(edges)[-1]]:.1f} times in {list(edges)[-1]}"
    return look.titled(figure, title)


@look.styled
def block_changes(changes: pd.Series) -> Figure:
    """By how much each block changes the map that goes into it.

    Args:
        changes: by the block's name, in the model's order: the norm of what the block adds over that of what goes in.
    """
    if changes.empty:
        return look.nothing(
            "No block gives a map of the size that goes into it, so none can be compared with its input"
        )
    if changes.isna().all():
        return look.nothing("By how much blocks change their maps is not a number: the maps themselves are not finite")
    figure, ax = plt.subplots(figsize=(WIDTH, 0.28 * len(changes) + 1.3))
    values = 100 * changes.to_numpy(float)
    bars = ax.barh(range(len(changes)), values, color=[OWN if v == np.nanmax(values) else NEUTRAL for v in values])
    ax.bar_label(bars, [f"{v:.0f}" if np.isfinite(v) else "not finite" for v in values], padding=3, fontsize=9)
    ax.set_yticks(range(len(changes)), changes.index, fontsize=9)
    ax.set(
        xlabel="size of what the block adds, % of the size of what goes in",
        xlim=(0, 1.1 * np.nanmax(values, initial=1e-9)),
    )
    ax.invert_yaxis()
    most, least = changes.idxmax(), changes.idxmin()
    title = f"{most} changes its map most, by {look.percent(changes[most])} of its size"
    if most != least:
        title += f", and {least} least, by {look.percent(changes[least])}"
    return look.titled(figure, title)


@look.styled
def parts_gallery(x: torch.Tensor, parts: Mapping[str, nn.Module], title: str = "") -> Figure:
    """What basic parts do to a map: a column a part, its output above, and below what one output pixel depends on.

    Args:
        x: (C, H, W), the map that goes in; its first channel is shown, as is the output's.
        parts: modules by the name that their column gets; each takes (1, C, H, W) and gives a map.
        title: of the whole; empty: what the parts have in common and where they differ.
    """
    if not parts:
        return look.nothing(title or "No parts to show")
    with torch.no_grad():
        outputs = {name: part(x[None])[0] for name, part in parts.items()}
    seen = {name: reach(part, len(x)) for name, part in parts.items()}
    dark = plt.get_cmap(HEAT).with_extremes(bad="black", under="#1B0C41")  # black where there is no dependence at all
    n = 1 + len(parts)
    cell = min(WIDTH / n, 2.1)
    figure, axes = plt.subplots(2, n, figsize=(n * cell, 2 * cell + 1.6))
    _show(axes[0, 0], x[0], "what goes in", _size(x))
    axes[1, 0].set_axis_off()
    axes[1, 0].text(0, 1, "below: input pixels\nthat one output\npixel depends on,\nbright: much", va="top", fontsize=9,
                    transform=axes[1, 0].transAxes)  # fmt: skip
    for (above, below), (name, y) in zip(axes[:, 1:].T, outputs.items(), strict=True):
        weights = sum(weight.numel() for weight in parts[name].parameters())
        _show(above, y[0], name, f"{_size(y)}\n{weights:,} parameters")
        below.imshow(seen[name], cmap=dark, norm=LogNorm(1e-4, 1), interpolation="nearest")
        look.bare(below)
        below.set_xlabel(_said(_count(seen[name]), seen[name].size), fontsize=9)
    return look.titled(figure, title or _gallery_title(x, outputs, seen))


@look.styled
def head_scores(scores: Mapping[str, Interval], difference: Interval | None = None) -> Figure:
    """AUC of heads on the same maps, each with its interval.

    Args:
        scores: by the head's name, the naive one first, one's own last.
        difference: of the last over the first, on the same patients.
    """
    if not scores:
        return look.nothing("No head has been scored")
    figure, ax = plt.subplots(figsize=(WIDTH, 0.5 * len(scores) + 1.6))
    for row, (value, low, high) in enumerate(scores.values()):
        color = OWN if row == len(scores) - 1 else NEUTRAL
        ax.plot([low, high], [row, row], color=color, linewidth=3, solid_capstyle="round")
        ax.plot(value, row, "o", color=color, markersize=9)
        where = value if np.isfinite(value) else 0.5  # without both kinds there is no AUC, and no dot
        ax.annotate(look.number(value), (where, row), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    lows = [low for _, low, _ in scores.values() if np.isfinite(low)]
    ax.axvline(0.5, color="black", linestyle=":", linewidth=1)
    ax.set(xlabel="AUC a breast, out of fold, with its 95 % interval over patients; dotted: chance",
           xlim=(max(0, min([0.45, *(low - 0.02 for low in lows)])), 1.0), ylim=(len(scores) - 0.5, -0.7))  # fmt: skip
    ax.set_yticks(range(len(scores)), list(scores))
    ax.grid(True, axis="x")
    return look.titled(figure, _heads_title(scores, difference))


def as_map(x: torch.Tensor, channels: int, aspect: float = 1.0) -> torch.Tensor:
    """What a stage gives for a batch as (N, C, h, w): some timm models give (N, h, w, C), some (N, tokens, C).

    Args:
        x: as it came.
        channels: C, as the model's `feature_info` tells it.
        aspect: height over width of the image, by which tokens are laid out again. What are more than fill a map of that
            shape, class tokens, stands in front and is left out.

    Raises:
        ValueError: x has neither shape.
    """
    if x.ndim == 4 and x.shape[1] == channels:
        return x
    if x.ndim == 4 and x.shape[3] == channels:
        return x.permute(0, 3, 1, 2)
    if x.ndim == 3 and x.shape[2] == channels:
        width = int((x.shape[1] / aspect) ** 0.5)
        while width > 1 and round(width * aspect) * width > x.shape[1]:
            width -= 1
        height = round(width * aspect)
        return x[:, x.shape[1] - height * width :].transpose(1, 2).unflatten(2, (height, width))
    raise ValueError(f"a stage gives {tuple(x.shape)}, expected (N, {channels}, h, w), (N, h, w, C) or (N, tokens, C)")


def reach(part: nn.Module, channels: int, side: int = 16, tries: int = 16) -> np.ndarray:
    """How much one output pixel in the middle depends on each input pixel: (side, side), 1 where most.

    Gradients of the output's first channel, their sizes summed over input channels and averaged over random inputs: a
    maximum depends on one pixel at a time, and over many inputs on all of its window.
    """
    x = torch.rand(tries, channels, side, side, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.enable_grad():
        y = part(x)
        (gradient,) = torch.autograd.grad(y[:, 0, y.shape[2] // 2, y.shape[3] // 2].sum(), x)
    strength = gradient.abs().sum(1).mean(0)
    return (strength / strength.max().clamp(min=1e-12)).numpy()


def _show(ax: Axes, picture: torch.Tensor, above: str, below: str) -> None:
    picture = picture.float().numpy()
    low, high = np.percentile(picture, (2, 98))  # zeros of the padding at the borders would take the scale
    ax.imshow(picture, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
    look.bare(ax)
    ax.set_title(above, fontsize=9)
    ax.set_xlabel(below, fontsize=9)


def _size(x: torch.Tensor) -> str:
    return "x".join(map(str, x.shape))


def _count(reached: np.ndarray) -> int:
    """Pixels that the output depends on, however little: gradients of all others are exactly 0."""
    return int((reached > 0).sum())


def _said(count: int, of: int) -> str:
    return "the whole map" if count == of else f"{count} pixel{'s' * (count != 1)}"


def _gallery_title(x: torch.Tensor, outputs: Mapping[str, torch.Tensor], seen: Mapping[str, np.ndarray]) -> str:
    """How far the parts look, and what they do to the size of the map."""
    far = {name: int(np.ptp(np.argwhere(reached > 0), axis=0).max()) + 1 for name, reached in seen.items()}
    most = max(far.values())
    names = [_plain(name) for name, value in far.items() if value == most]
    others = sorted({value for value in far.values() if value < most})
    span = " to ".join(f"{value}x{value}" for value in dict.fromkeys([*others[:1], *others[-1:]]))
    widest = f"{most}x{most} pixels" if most < len(next(iter(seen.values()))) else "the whole map"
    clauses = [
        f"{_names(names)} look{'s' * (len(names) == 1)} over {widest}" + f", the others over {span}" * bool(others)
    ]
    cells = {name: y.shape[1] * y.shape[2] / (x.shape[1] * x.shape[2]) for name, y in outputs.items()}
    for ratio in sorted({value for value in cells.values() if abs(value - 1) > 0.1}):
        names = [_plain(name) for name, value in cells.items() if value == ratio]
        verb = ("leave" if ratio < 1 else "make") + "s" * (len(names) == 1)
        share = f"1/{_short(1 / ratio)} of" if ratio < 1 else f"{_short(ratio)} times"
        clauses.append(f"{_names(names)} {verb} {share} the cells")
    text = "; ".join(clauses)
    return text if text.startswith("scSE") else text[0].upper() + text[1:]


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parts" if len(names) > 2 else " and ".join(names)


def _heads_title(scores: Mapping[str, Interval], difference: Interval | None) -> str:
    first, last = next(iter(scores)), list(scores)[-1]
    if difference is None or len(scores) == 1:
        return f"'{_plain(last)}' reaches an AUC of {look.number(scores[last].value)}"
    value, low, high = difference
    text = f"'{_plain(last)}' scores {abs(value):.2f} {'above' if value >= 0 else 'below'} '{_plain(first)}'"
    if not np.isfinite(value):
        return f"'{_plain(last)}' and '{_plain(first)}' cannot be compared: scores need both kinds"
    text += f", 95 % interval {low:+.2f} to {high:+.2f}" if np.isfinite(low) else ""
    return text + ("" if low > 0 or high < 0 else ": that may be noise")


def _standard(x: torch.Tensor) -> torch.Tensor:
    """Each channel less its mean over the map, over its deviation there; channels that are constant are 0."""
    x = x.float()
    deviation = x.std((1, 2), correction=0, keepdim=True)
    return torch.where(deviation > 1e-6, (x - x.mean((1, 2), keepdim=True)) / deviation.clamp(min=1e-6), 0.0)


def _at_outline(strength: np.ndarray, breast: np.ndarray) -> float:
    """How much stronger a map is on the outline of the breast than inside; NaN where it is too coarse to tell."""
    share = nn.functional.adaptive_avg_pool2d(torch.from_numpy(breast)[None, None], strength.shape)[0, 0].numpy()
    edge, inside = strength[(share > 0.05) & (share < 0.95)], strength[share >= 0.95]
    return float(edge.mean() / inside.mean()) if len(edge) > 3 and len(inside) > 3 and inside.mean() > 0 else np.nan


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else "".join(texts)


def _plain(name: str) -> str:
    return name.replace("\n", " ")


def _short(value: float) -> str:
    return (
        f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 1 else f"{value:.1f}".removesuffix(".0")
    )
