"""What a rehearsal came to: its stages, faults and notes, and the hours that the hidden test set would take."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pydicom

from rsnakit import env
from rsnakit.hidden import HiddenSet
from rsnakit.sandbox import Outcome

LIMIT_H = 9.0  # of a submission
HIDDEN_IMAGES, KAGGLE_CORES = 32_000, 4
SMALLEST_MP = 2082 * 2776 / 1e6  # of the competition's images


class Projection(NamedTuple):
    """What the hidden test set would take on Kaggle, from a run on one image and one on many.

    Attributes:
        startup_s: seconds before and after the images.
        image_s: seconds an image takes here.
        models_share: share of these that are the models', what decoding does not account for.
        hours: on Kaggle.
    """

    startup_s: float
    image_s: float
    models_share: float
    hours: float


@dataclass(frozen=True)
class Stage:
    """One run of the notebook.

    Attributes:
        name: of its executed notebook and log: `<name>.ipynb`, `<name>.log`.
        layout: one of `mounts.LAYOUTS`.
        kind: one of `hidden.KINDS`.
        images, breasts: of the test set.
        outcome: seconds, memory and disk.
        faults: what would be a failed or a wrong submission, a sentence each.
        notes: what is worth knowing.
        decode_s: seconds that its images took to decode, all together.
        cells_s: seconds of each code cell.
        notebook: the executed notebook.
    """

    name: str
    layout: str
    kind: str
    images: int
    breasts: int
    outcome: Outcome
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    decode_s: float
    cells_s: tuple[float, ...]
    notebook: Path


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal: its stages, what they project (None where they cannot), and sentences on the whole."""

    stages: tuple[Stage, ...]
    projection: Projection | None
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    open: str = ""  # what it could not tell

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would spoil a submission."""
        return not self.faults and not any(stage.faults for stage in self.stages)

    def table(self) -> pd.DataFrame:
        """A row a stage, indexed by its name."""
        rows = {
            stage.name: {
                "images": stage.images, "breasts": stage.breasts, "seconds": round(stage.outcome.seconds, 1),
                "peak memory, GB": round(stage.outcome.peak_memory / 1e9, 2),
                "peak disk, MB": round(stage.outcome.peak_disk / 1e6, 1), "faults": len(stage.faults),
            }
            for stage in self.stages
        }  # fmt: skip
        return pd.DataFrame.from_dict(rows, "index").rename_axis("stage")

    def sentences(self) -> list[str]:
        """Faults first, then notes, then the sentence that decides."""
        lines = [f"FAULT, {stage.name}: {fault}" for stage in self.stages for fault in stage.faults]
        lines += [f"FAULT: {fault}" for fault in self.faults]
        lines += [f"{stage.name}: {note}" for stage in self.stages for note in stage.notes]
        lines += self.notes
        count = len(self.faults) + sum(len(stage.faults) for stage in self.stages)
        ends = (
            f"this bundle can go to Kaggle{self.open}"
            if self.ok
            else f"{count} fault{'s' * (count > 1)}: do not submit this bundle"
        )
        return [*lines, ends]


def project(one: Stage, many: Stage, cores: int, gpu_speedup: float = 1.0) -> Projection:
    """The hours of HIDDEN_IMAGES on KAGGLE_CORES: start-up + images x seconds an image x cores here / cores there.

    The start-up is what a single image takes. An image takes what the images of `many` take beyond that, each; or what the
    cell takes beyond it that grew the most, where that is more: a slow start of `one` would else hide it. Of this, decoding
    has the seconds that report.csv names, shared by the cores, and the models have the rest, which `gpu_speedup` divides.

    Args:
        one, many: runs on one image and on many.
        cores: that this process may use.
        gpu_speedup: how much faster Kaggle's GPU runs the models than what runs them here.
    """
    grew = [later - first for first, later in zip(one.cells_s, many.cells_s, strict=True)]
    image_s = max(0.0, many.outcome.seconds - one.outcome.seconds, *grew) / max(1, many.images - one.images)
    decode_s = min(image_s, many.decode_s / many.images / cores)
    share = 1 - decode_s / image_s if image_s else 0.0
    there_s = image_s * (1 - share + share / gpu_speedup) * cores / KAGGLE_CORES
    return Projection(one.outcome.seconds, image_s, share, (one.outcome.seconds + HIDDEN_IMAGES * there_s) / 3600)


def conclude(
    done: Sequence[Stage], faults: list[str], megapixels: float, gpu_speedup: float, notes: Sequence[str] = ()
) -> Rehearsal:
    """The whole of it, with the hours that the hidden test set would take."""
    of_kind = {stage.kind: stage for stage in done if not stage.outcome.status}
    if not {"one", "many"} <= of_kind.keys():
        unknown = "hours on Kaggle: not known, for want of a run on one image and one on many"
        return Rehearsal(tuple(done), None, tuple(faults), (*notes, unknown))
    cores, device = env.cores(), env.choose_device().value
    found = project(of_kind["one"], of_kind["many"], cores, gpu_speedup)
    faster = "" if device.startswith("cuda") else "; a T4 is faster, which gpu_speedup takes into account"
    divided = f", of which the models' share is divided by {gpu_speedup:g}" if gpu_speedup != 1 else ""
    notes = [
        *notes,
        f"hours on Kaggle: {found.hours:.1f} = {found.startup_s:.0f} s of start-up + {HIDDEN_IMAGES:,} images x "
        f"{found.image_s:.3f} s x {cores} cores here / {KAGGLE_CORES} there"
        f"{divided}. The models have {found.models_share:.0%} of an image's time, on {device}{faster}.",
    ]
    unproven = ""
    if megapixels < SMALLEST_MP:
        unproven = f"; that it keeps to {LIMIT_H:.0f} hours is not proven, for its images were small"
        notes.append(
            f"the images here have {megapixels:.2g} megapixels, those of the competition {SMALLEST_MP:.1f} to 26: there they "
            "take longer than these hours say. Give --competition a folder with some of its own."
        )
    if found.hours > LIMIT_H:
        faults += [
            f"{HIDDEN_IMAGES:,} images would take {found.hours:.1f} h, more than {LIMIT_H:.0f}: use fewer folds, smaller "
            "images, a smaller model, or a GPU (gpu_speedup)"
        ]
    return Rehearsal(tuple(done), found, tuple(faults), tuple(notes), unproven)


def megapixels_of(test: HiddenSet) -> float:
    """The mean of some of its sound images; 0 where none can be read."""
    paths, sizes = test.images.loc[test.images["hurt"] == "", "source"].head(20), []
    for path in paths:
        with contextlib.suppress(pydicom.errors.InvalidDicomError, AttributeError):
            header = pydicom.dcmread(path, specific_tags=["Rows", "Columns"], stop_before_pixels=True)
            sizes.append(header.Rows * header.Columns / 1e6)
    return sum(sizes) / len(sizes) if sizes else 0.0


def in_a_line(stage: Stage) -> str:
    """A stage in a line, once it is done."""
    said = "; ".join(stage.faults) or "as it should be"
    return f"{stage.name}: {stage.outcome.seconds:.0f} s, {stage.outcome.peak_memory / 1e9:.2f} GB of memory: {said}"
