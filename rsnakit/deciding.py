"""How a tuner decides, and says why: when a setting counts as faster, when compiling pays, which loader is worth a try."""

import datetime
import math
import platform
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

import rsnakit
from rsnakit import env
from rsnakit.look import counted, plain, times
from rsnakit.trials import Batches, Measured

LEAST = 1.02  # times as fast, at the median, that a change has to be worth
FEW, LEAST_OF_FEW = 3, 1.2  # with fewer rounds than that it has to be more
TIMES_COMPILED = 2  # the graph of training, and the one that scores after each epoch
WORTH = 1.03  # times as fast, by loader and model measured alone, that another loader has to promise to be tried
INEXACT = ("png8",)  # a store of it keeps 8 of 12 bits: never a mere matter of speed
USED_UP = "memory is used up"  # as `failures` and `trials` say it


class Limit(NamedTuple):
    """What training waits for: `by` is `loader` or `model`; both rates, in images (or breasts) a second, each measured without
    the other; and the loader that was measured."""

    by: str
    loader: float
    model: float
    store_format: str
    workers: int
    unit: str = "images"

    def __str__(self) -> str:
        if not (self.loader > 0 and self.model > 0):
            unknown = "loader" if self.model > 0 else "model"
            return f"what the limit is, is not known: the {unknown} could not be measured"
        rates = f"the loader gives {plain(self.loader)} {self.unit}/s ({self.store_format}, {counted(self.workers, 'worker')})"
        text = f"the {self.by} is the limit: {rates}, the model takes {plain(self.model)}"
        if self.workers:
            return text
        share = 100 * self.model / (self.model + self.loader)
        return f"{text}; without workers they take turns, and loading takes {plain(share)} % of the time"


def beats(challenger: Sequence[float], incumbent: Sequence[float], in_turn: bool = True) -> bool:
    """Whether rates are higher than others beyond the rounds' spread.

    Rounds that took turns, which are as many, are compared one by one: the challenger has to win each of them, and by 2 % in
    the middle (by a fifth where there are fewer than three). Others have to lie apart altogether.

    Args:
        challenger, incumbent: images a second of each round; none: it could not be measured, and loses.
        in_turn: rounds took turns.
    """
    if not challenger or not incumbent:
        return bool(challenger)
    if in_turn and len(challenger) == len(incumbent):
        ratios = [new / old for new, old in zip(challenger, incumbent, strict=True)]
    else:
        ratios = [min(challenger) / max(incumbent), statistics.median(challenger) / statistics.median(incumbent)]
    least = LEAST if min(len(challenger), len(incumbent)) >= FEW else LEAST_OF_FEW
    return min(ratios) > 1 and statistics.median(ratios) >= least


def compared(name: str, new: Sequence[float], than: str, old: Sequence[float], unit: str = "images") -> str:
    """A sentence on how two rates compare, such as: bf16 trains 1.8 times as many images/s as fp32 (54 against 30)."""
    if not new or not old:
        return f"{name if new else than} alone could be measured"
    middle, other = statistics.median(new), statistics.median(old)
    text = f"{name} trains {times(middle / other)} times as many {unit}/s as {than} ({plain(middle)} against {plain(other)})"
    if middle != other and not beats(*((new, old) if middle > other else (old, new))):
        text += ", which is within the spread of the rounds"
    return text


def pays_after(compile_s: float, compiled: float, plain: float) -> float:
    """After how many images what compiling takes is won back; infinite where compiled steps are no faster.

    Args:
        compile_s: seconds that compiling took.
        compiled, plain: images a second.
    """
    gain = 1 / plain - 1 / compiled
    return TIMES_COMPILED * compile_s / gain if gain > 0 else math.inf


def same_step(batch: int, accumulate: int, largest: int, world: int = 1, least: int = 2) -> tuple[int, int]:
    """The largest batch that fits, and as many of them to an optimiser step that it sees the images it saw before.

    Where no such batch divides a step evenly without being halved for it, the step sees a few images more at most.

    Args:
        batch, accumulate: as asked; `accumulate` counts the batches of a step on all processors.
        largest: batch that fits.
        world: processors, which share the batches of a step evenly.
        least: batch that may be taken.

    Raises:
        ValueError: not even `least` fits.
    """
    if largest < least:
        raise ValueError(f"batches of {largest} fit at most, and training needs {least}")
    if batch <= largest:
        return batch, accumulate
    images = batch * accumulate
    fewest = -(-images // (largest * world)) * world
    for count in range(fewest, min(2 * fewest, images // least) + 1, world):
        if images % count == 0:
            return images // count, count
    return max(least, min(largest, -(-images // fewest))), fewest


def winner(rates: Mapping, asked: object) -> object:
    """The fastest (by its median) of what beats what was asked; else that."""
    better = {key: statistics.median(new) for key, new in rates.items() if beats(new, rates.get(asked, ()))}
    better.pop(asked, None)
    return max(better, key=better.get) if better else asked


def precision_reasons(
    best: tuple[str, bool], found: Mapping[tuple[str, bool], Measured], cannot: Mapping[str, str], unit: str
) -> dict[str, str]:
    """Why a precision and a layout: against the fastest of each other precision, and the other layout.

    Args:
        best: precision, and whether channels come last.
        found: of each that was tried.
        cannot: precisions that the device does not do, and why.
    """
    fastest: dict[str, tuple[tuple[str, bool], Measured]] = {}
    for pair, measured in found.items():
        known = fastest.get(pair[0])
        if known is None or (measured.images_s and not measured.median <= known[1].median):
            fastest[pair[0]] = pair, measured
    parts = []
    for name, (_, measured) in fastest.items():
        if name != best[0]:
            rates = measured.images_s, found[best].images_s
            against = compared(name, rates[0], best[0], rates[1], unit)
            parts.append(f"{name}: {measured.error}" if measured.error else against)
    parts += [f"{name} cannot be had: {problem}" for name, problem in cannot.items() if name != best[0]]
    other = found.get((best[0], not best[1]), Measured(error="not tried"))
    names = [layout_name(best[0], layout) for layout in (best[1], not best[1])]
    if found[best].error:
        layout = f"as asked: {found[best].error}"
    else:
        layout = other.error or compared(names[0], found[best].images_s, names[1], other.images_s, unit)
    return {"precision": "; ".join(parts) or "nothing else could be tried", "channels_last": layout}


def layout_name(precision: str, channels_last: bool) -> str:
    return f"{precision}, channels last" if channels_last else precision


def compile_reason(mode: str, new: Measured, off: Measured, pays: float, steps: float, batch: int, unit: str) -> str:
    """Whether compiling pays, in words.

    Args:
        pays: after how many images (see `pays_after`).
        steps: batches of the training that is asked for.
    """
    text = compared(f"compiled ({mode})", new.images_s, "not compiled", off.images_s, unit)
    if math.isinf(pays):
        return f"{text}, and never pays"
    return (
        f"{text}, and compiling takes {plain(new.compile_s)} s, for scoring again: it pays after {pays / batch:,.0f} steps, "
        f"and this training has {steps:,.0f}"
    )


def checkpointing_choice(batch: int, asked: bool, without: Measured, with_it: Measured) -> tuple[bool, str]:
    """Whether to checkpoint: only where the batch does not fit without. And why."""
    if not without.error:
        stays = asked and not with_it.error and not beats(without.images_s, with_it.images_s)
        reason = f"batches of {batch} fit without" + (", which is no faster, so that it stays" if stays else "")
        if with_it.error:
            return stays, f"{reason}; with it: {with_it.error}"
        reason += f"; with it a step takes {times(without.median / with_it.median)} times as long"
        if without.peak_mb > 0 and with_it.peak_mb > 0:
            reason += f" and {times(with_it.peak_mb / without.peak_mb)} times the memory"
        return stays, reason
    if lacks_room(without) and not with_it.error:
        return True, f"batches of {batch} do not fit without: {without.error}"
    if lacks_room(without) and lacks_room(with_it):
        return (
            False,
            f"batches of {batch} fit neither without nor with it, so that smaller ones are taken: {without.error}",
        )
    return asked, f"as asked: {without.error}"


def lacks_room(measured: Measured) -> bool:
    return USED_UP in measured.error


def side_by_side(model: float, loader: float, beside: bool) -> float:
    """Images a second of a model and its loader, from the rates of both alone: the lower one where workers load `beside` the
    model; their times add up without workers, and where the model computes on the cores that workers need."""
    return min(model, loader) if beside else model * loader / (model + loader)


def loaders_worth_a_try(
    rates: Mapping[tuple[str, int], float], asked: tuple[str, int], model: float, on_cpu: bool
) -> list[tuple[str, int]]:
    """Loaders that promise more than the one that is asked for, at most two: with other workers, and of another store.

    Args:
        rates: images a second of a loader, by store format and workers; NaN where there are none.
        asked: store format and workers.
        model: images a second that it takes.
        on_cpu: the model computes on the cores that workers need.
    """
    promised = {
        key: side_by_side(model, rate, key[1] > 0 and not on_cpu)
        for key, rate in rates.items()
        if rate > 0 and model > 0
    }
    least, found = promised.get(asked, 0.0), []
    for same in (True, False):
        among = {
            key: value for key, value in promised.items() if (key[0] == asked[0]) == same and key[0] not in INEXACT
        }
        top = max(among.values(), default=0.0)
        if top > WORTH * least:
            found.append(min((key for key, value in among.items() if value > 0.98 * top), key=lambda key: key[1]))
            least = top
    return found


def largest_in_words(precision: str, found: Batches) -> str:
    """What `Trials.largest_batch` found, such as: bf16 at least 96."""
    if not found.largest:
        return f"{precision} unknown"
    return f"{precision} {'' if found.ended == 'memory' else 'at least '}{found.largest}"


def heading(device: str, trained: str, world: int, path: Path) -> list[str]:
    """The comments at the top of a file of settings: for what they were measured, and how they are used."""
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "timm"))
    lines = [
        "What trains fastest on this machine, each with what was measured. Another device, model, size or batch may want",
        "others, which 07_speed finds.",
        f"  papermill 03_train.ipynb out.ipynb -f {shlex.quote(str(path))}",
        f"measured {now} on {device_name(device)}, {env.cores()} cores, with rsnakit {rsnakit.__version__}, {versions}",
        f"for {trained}",
    ]
    if world > 1:
        lines.append(f"measured on one device; training takes {world} processes, each with its own loader")
    return lines


def device_name(device: str) -> str:
    """A device as people call it."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return f"{device} ({found[1].strip() if found else platform.processor() or platform.machine()})"


def as_yaml(heading: Sequence[str], settings: Mapping[str, object], reasons: Mapping[str, str]) -> str:
    """Settings as the flat YAML that papermill's `-f` takes, each with its reason, below comments."""
    lines = [f"# {in_comment(line)}" for line in heading] + [""]
    for name, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if value in ("off", "on") else str(value)
        lines.append(f"{name}: {text}  # {in_comment(reasons[name])}")
    return "\n".join(lines) + "\n"


def in_comment(text: str) -> str:
    """A text in one line, without what YAML does not take even there, such as the colours that compilers write in."""
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text)
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
