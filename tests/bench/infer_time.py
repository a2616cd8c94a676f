"""How many images a second inference scores without a GPU, from DICOM file to score, against the bound that the cores set.

    python tests/bench/infer_time.py [--out work/bench] [--rounds 3]

The bound is the number of cores divided by the CPU seconds that an image takes to be decoded and to be scored, each alone,
on one thread of one core: all else that inference does, and all that processes and threads take from one another, is what
is lost. Two sets: the demo's files, and a real mammogram made into files of 4096x3328, half JPEG 2000 and half JPEG
Lossless; the model is the demo's, `tf_efficientnet_lite0` at 256x128, one fold. Decoding, model and the whole (`infer.predict`,
timed from its first file to its last score, so without the loading of the model) take turns; a ratio is of one round, and its
median, smallest and largest are told. Beside it stands the share of all CPU seconds that decoding and model would have
needed alone: where a machine has other things to do, that one still tells what is lost here. The parent's own
work, which takes over images and keeps scores, is 0.4 ms an image; the rest is that the same work takes more CPU seconds
beside other work, with which it shares caches and memory, than alone.

Writes infer_time.md and infer_time.json. Takes about a minute and a half on two cores.
"""

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import samples
import table
import turns

TARGET = 0.85
BATCH = 8  # images
ALONE = 64  # images that decoding and model take in a round


class Whole(NamedTuple):
    """What a run took: seconds on the clock and of all processors, and how many images."""

    seconds: float
    cpu_seconds: float
    images: int


def competition_of(folder: Path, paths: list[Path], count: int) -> Path:
    """A competition of `count` test images, four a patient, whose files are `paths` over and over."""
    views = [("L", "CC"), ("L", "MLO"), ("R", "CC"), ("R", "MLO")]
    rows = []
    for number in range(count):
        patient, (laterality, view) = str(1000 + number // 4), views[number % 4]
        rows.append(
            {
                "site_id": 1,
                "patient_id": patient,
                "image_id": str(10_000 + number),
                "laterality": laterality,
                "view": view,
                "age": 60,
                "implant": 0,
                "machine_id": 49,
                "prediction_id": f"{patient}_{laterality}",
            }
        )
        images = folder / "test_images" / patient
        images.mkdir(parents=True, exist_ok=True)
        (images / f"{10_000 + number}.dcm").symlink_to(paths[number % len(paths)].absolute())
    pd.DataFrame(rows).to_csv(folder / "test.csv", index=False)
    return folder


def make_run(work: Path) -> Path:
    """A run of one fold with the default settings, its weights drawn at random."""
    from rsnakit import engine, models, preprocess, runs

    config, pixels = models.ModelConfig(weights="none"), preprocess.PreprocessConfig()
    settings = runs.settings_of(pixels, config, engine.TrainConfig(), "data", True, False)
    folder = runs.open_run(work, "run", settings)
    models.save_model(
        models.build_model(config),
        folder / "fold0",
        preprocess=settings["preprocess"],
        prior=0.02,
        epoch=1,
        select="last",
    )
    return folder


def open_decoding(paths: list[Path], count: int) -> Callable[[], None]:
    """Prepares `count` files, one after another."""
    import samples  # noqa: F401  finds the package

    from rsnakit.preprocess import PreprocessConfig, load_image

    config = PreprocessConfig()

    def decode() -> None:
        for number in range(count):
            load_image(paths[number % len(paths)], config)

    return decode


def open_model(run: Path, path: Path, count: int) -> Callable[[], None]:
    """Scores `count` images with the fold's model as plain torch does it, in batches that are there already."""
    import samples  # noqa: F401  finds the package
    import torch

    from rsnakit import models
    from rsnakit.preprocess import PreprocessConfig, load_image

    torch.set_num_threads(1)
    model = models.load_model(run / "fold0").to(memory_format=torch.channels_last)
    image = load_image(path, PreprocessConfig()).astype(np.float32) / 4095
    images = torch.from_numpy(np.repeat(image[None, None], BATCH, 0))

    def score() -> None:
        with torch.inference_mode():
            for _ in range(count // BATCH):
                model(images)["cancer"]

    return score


@contextlib.contextmanager
def clocked() -> Iterator[list[tuple[float, float]]]:
    """While it is open, the seconds and CPU seconds that each run of a Scorer takes, reading of files included, are noted."""
    from rsnakit.ensemble import Scorer

    seconds, plain = [], Scorer.run

    def run(*args, **options) -> None:
        begun, cpu_begun = time.perf_counter(), cpu_seconds()
        plain(*args, **options)
        seconds.append((time.perf_counter() - begun, cpu_seconds() - cpu_begun))

    Scorer.run = run
    try:
        yield seconds
    finally:
        Scorer.run = plain


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def whole(competition: Path, run: Path, device: str = "cpu") -> Whole:
    """Inference as 04 does it."""
    from rsnakit import env, infer

    with clocked() as seconds:
        report = infer.predict(
            competition, run, infer.InferConfig(infer_batch_size=BATCH), env.RunConfig(device=device)
        )
    if not (report["status"] == "ok").all():
        raise RuntimeError(f"not all images were scored: {report['reason'].unique()}")
    return Whole(*seconds[0], len(report))


def row_of(name: str, cores: int, decoding: list[float], model: list[float], wholes: list[Whole]) -> dict:
    """A set's row, from CPU seconds an image by round."""
    bounds = [cores / (a + b) for a, b in zip(decoding, model, strict=True)]
    rates = [each.images / each.seconds for each in wholes]
    share = turns.ratio(rates, bounds)
    needed = [each.cpu_seconds / each.images for each in wholes]
    alone = [a + b for a, b in zip(decoding, model, strict=True)]
    return {
        "files": name,
        "decoding, ms": 1000 * statistics.median(decoding),
        "model, ms": 1000 * statistics.median(model),
        "bound, images/s": statistics.median(bounds),
        "reached": statistics.median(rates),
        "ratio": share.median,
        "from": share.low,
        "to": share.high,
        "CPU ms, all": 1000 * statistics.median(needed),
        "share of it": turns.ratio(alone, needed).median,
        "target reached": "yes" if share.median >= TARGET else "no",
    }


def result_of(row: dict) -> table.Result:
    """A set's row for RESULTS.md."""
    return table.Result(
        f"inference from DICOM file to score, {row['files']}", "what the cores could do: decoding and model, each alone",
        "of the images/s", row["ratio"], row["from"], row["to"], TARGET,
        note=f"{row['reached']:.3g} images/s; decoding {row['decoding, ms']:.1f} ms, model {row['model, ms']:.1f} ms of a core",
    )  # fmt: skip


def measure(name: str, paths: list[Path], run: Path, folder: Path, count: int, rounds: int) -> tuple[dict, dict]:
    """A set's row and what it was made from. The first round warms up and is left out."""
    from rsnakit import env

    competition = competition_of(folder, paths, count)
    alone = {"decoding": turns.Turn(open_decoding, paths, ALONE), "model": turns.Turn(open_model, run, paths[0], ALONE)}
    cpu, wholes = {each: [] for each in alone}, []
    for number in range(rounds + 1):
        calls = {each: turn.call() for each, turn in alone.items()}
        for each, call in calls.items():
            if call.error:
                raise RuntimeError(f"{each}: {call.error}")
        found = whole(competition, run)
        if number:
            wholes.append(found)
            for each, call in calls.items():
                cpu[each].append(call.cpu_seconds / ALONE)
    for turn in alone.values():
        turn.close()
    row = row_of(name, env.cores(), cpu["decoding"], cpu["model"], wholes)
    return row, {**cpu, "whole": wholes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from rsnakit import demo, env, tables

    rows, details = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        made = demo.make_competition(root / "demo", n_patients=8, n_test=16)
        sets = {
            "the demo's 768 rows": (tables.load_table(made, "test")["path"].tolist(), 768),
            "4096x3328, JPEG 2000 and JPEG Lossless": (list(samples.write_made(root).values()), 160),
        }
        run = make_run(root / "work")
        for number, (name, (paths, count)) in enumerate(sets.items()):
            row, details[name] = measure(name, paths, run, root / str(number), count, options.rounds)
            rows.append(row)
    headline = f"Inference on {env.cores()} cores without a GPU (target: {TARGET:g} of the bound)"
    table.save(options.out, "infer_time", {headline: rows}, details, [result_of(row) for row in rows])


if __name__ == "__main__":
    main()
