"""A synthetic mammography competition in the layout of RSNA's, to run everything on where the data is not at hand.

Tables, ids, DICOM headers and oddities follow the original; the breasts are drawn (phantom.py). A cancer is a spiculated
mass, a cluster of microcalcifications or both; cysts, coarse and vascular calcifications are drawn with the same
frequency in breasts with and without cancer, so that a model has to tell them apart. Nothing else goes with the label,
but for the columns that give it away in the original too (biopsy, invasive, BIRADS, difficult_negative_case).
Scores on it say that the code works, and nothing about real mammograms.

`demo.json` lists the images with an oddity (ODDITIES), one of each, all in breasts without cancer whose other images are
sound (so a competition of a handful of patients may lack some), and those with letters burned in, as on many real ones.
"""

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from rsnakit import env
from rsnakit.fields import check_all
from rsnakit.machines import MACHINES, TEST_MACHINE, finish, write_dicom
from rsnakit.params import setting
from rsnakit.phantom import draw_breast, random_breast, random_finding
from rsnakit.workers import over_items

__all__ = ["ODDITIES", "Competition", "DemoConfig", "draw_breast", "make_competition", "open_competition"]

GENERATOR = 5  # raise it when the same arguments give other files: old competitions are then refused

# What a whole competition shows once, by the name it has in demo.json.
ODDITIES = {
    "all_zero": "every stored value is 0",
    "white_frame": "a white border around the whole image",
    "burned_in_letters": "laterality and view in white letters, in the corner away from the breast",
    "wrong_laterality": "ImageLaterality in the header contradicts train.csv and the picture",
    "duplicate": "the pixels of another image of the same breast, under an id of its own",
    "bright_stripe": "a white vertical stripe beside the breast",
    "high_background": "a background as bright as fat instead of black",
}

TRAIN_COLUMNS = [
    "site_id", "patient_id", "image_id", "laterality", "view", "age", "cancer", "biopsy", "invasive", "BIRADS",
    "implant", "density", "machine_id", "difficult_negative_case",
]  # fmt: skip
TEST_COLUMNS = [
    "site_id", "patient_id", "image_id", "laterality", "view", "age", "implant", "machine_id", "prediction_id",
]  # fmt: skip


@dataclass(frozen=True)
class DemoConfig:
    """How large the synthetic competition is. Original: 11,913 patients, 4 % with a cancer, up to 5,355 pixels high."""

    demo_patients: int = setting(160, low=4, high=20_000)  # training patients
    # Share of patients with a cancer. At the original's 4 % a demo of this size would hold six: too few for four folds.
    demo_rate: float = setting(0.25, low=0.0, high=1.0)
    demo_size: int = setting(640, low=128, high=4096)  # height of a frame, pixels; its width is about 3/4 of that

    def __post_init__(self):
        check_all(self)


# Odds of BIRADS 0, 1, 2 and missing at site 1, of breasts without cancer: without and with a benign finding.
BIRADS = [0.0, 1.0, 2.0, np.nan]
BIRADS_ODDS = {False: [0.20, 0.66, 0.03, 0.11], True: [0.36, 0.36, 0.17, 0.11]}


@dataclass(frozen=True)
class Competition:
    """The competition that is worked on: its folder, whether it is the demo, and how it was chosen."""

    path: Path
    is_demo: bool
    reason: str


def open_competition(run: env.RunConfig, config: DemoConfig) -> Competition:
    """The competition that `run` names or that is found (see `env.find_data`), else the demo, made if need be.

    Says which it is, loudly where it is the demo. With `run.debug` the demo has 24 patients at most.
    """
    found = env.find_data(run.data_dir)
    if found.path is not None:
        print(f"competition: {found.path} ({found.reason})")
        return Competition(found.path, False, found.reason)
    patients = min(24, config.demo_patients) if run.debug else config.demo_patients
    name = f"demo-{patients}x{config.demo_size}-{config.demo_rate:g}-v{GENERATOR}"
    print(
        f"SYNTHETIC DATA: a made competition of {patients} patients stands in for the real one.\n"
        "Scores on it say that the code works, and nothing about mammograms.\n"
        f"Why: {found.reason}"
    )
    root = make_competition(
        env.work_folder(run.work_dir) / "demo" / name,
        n_patients=patients,
        size=config.demo_size,
        positive_rate=config.demo_rate,
        n_jobs=run.n_jobs or None,
    )
    return Competition(root, True, found.reason)


def make_competition(
    root: str | Path,
    n_patients: int = 160,
    seed: int = 0,
    size: int = 640,
    positive_rate: float = 0.25,
    n_test: int = 12,
    n_jobs: int | None = None,
) -> Path:
    """Make a synthetic competition, or find it made already.

    A competition appears under `root` complete or not at all: it is made beside it and renamed. The same arguments give
    the same bytes (with the same versions of the libraries), however many processes draw.

    Args:
        root: folder to make; if it holds a competition with these arguments it is left as it is.
        n_patients: training patients, 4 or more; 4 images each, some more.
        seed: decides everything.
        size: height of a frame, pixels.
        positive_rate: share of patients with a cancer, in training and test.
        n_test: test patients.
        n_jobs: processes; all cores by default.

    Returns:
        `root`.

    Raises:
        FileExistsError: `root` holds something else, or a competition made with other arguments.
        ValueError: an argument is out of range.
    """
    if n_patients < 4 or n_test < 1 or size < 128 or not 0 <= positive_rate <= 1:
        raise ValueError(
            f"cannot make a competition of n_patients={n_patients}, n_test={n_test}, size={size}, "
            f"positive_rate={positive_rate}: expected at least 4 and 1 patients, 128 pixels and a rate from 0 to 1"
        )
    root = Path(root)
    arguments = {"n_patients": n_patients, "seed": seed, "size": size, "positive_rate": positive_rate, "n_test": n_test}
    made_by = {"generator": GENERATOR, "arguments": arguments}
    if _is_made(root, made_by):
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{root.name}.making-"
    for leftover in root.parent.glob(prefix + "*"):  # of killed makings; one still at work is younger than a day
        if time.time() - leftover.stat().st_mtime > 86400:
            shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root.parent))
    try:
        notes = _make(folder, arguments, n_jobs)
        (folder / "demo.json").write_text(json.dumps(made_by | notes, indent=1) + "\n", encoding="utf-8", newline="\n")
        if not _is_made(root, made_by):  # another process may have been faster
            if root.is_dir():
                root.rmdir()
            folder.chmod(0o755)  # mkdtemp keeps others out
            os.replace(folder, root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return root


def _is_made(root: Path, made_by: dict) -> bool:
    """True if `root` is that very competition, False if there is nothing at `root`; raises for anything else."""
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    try:
        found = json.loads((root / "demo.json").read_text(encoding="utf-8"))
        found = {key: found[key] for key in made_by}
    except (OSError, ValueError, KeyError, TypeError):
        raise FileExistsError(
            f"{root} holds something that is no demo competition: nothing was changed. Give another folder"
        ) from None
    if found != made_by:
        raise FileExistsError(
            f"{root} holds a demo competition made with {found}, wanted {made_by}: delete it or give another folder"
        )
    return True


def _make(folder: Path, arguments: dict, n_jobs: int | None) -> dict:
    """Write tables and images; returns what demo.json says about single images."""
    seeds = np.random.SeedSequence(arguments["seed"])
    n_train, n_test = arguments["n_patients"], arguments["n_test"]
    table = _plan(np.random.default_rng(seeds.spawn(1)[0]), n_train, n_test, arguments["positive_rate"])
    patients = [rows for _, rows in table.groupby("patient_id", sort=False)]
    items = [(rows.to_dict("records"), s) for rows, s in zip(patients, seeds.spawn(len(patients)), strict=True)]
    done = over_items(partial(_write_patient, folder, arguments["size"]), items, n_jobs or env.cores())
    for _, died in tqdm(done, total=len(items), desc="drawing a synthetic competition", unit="patient", mininterval=2):
        if died:
            raise died

    table = table.sort_values(["patient_id", "laterality", "view", "image_id"])
    train, test = table[table["split"] == "train"], table[table["split"] == "test"]
    test = test.assign(prediction_id=test["patient_id"].astype(str) + "_" + test["laterality"])
    submission = pd.DataFrame({"prediction_id": test["prediction_id"].unique(), "cancer": 0.021168})
    frames = {"train": train[TRAIN_COLUMNS], "test": test[TEST_COLUMNS], "sample_submission": submission}
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
    odd = table[table["oddity"] != ""]
    return {
        "oddities": {str(i): name for i, name in zip(odd["image_id"], odd["oddity"], strict=True)},
        "letters": [str(i) for i in table.loc[table["letters"], "image_id"]],
    }


# Tables


def _plan(rng: np.random.Generator, n_train: int, n_test: int, positive_rate: float) -> pd.DataFrame:
    """A row an image: the columns of train.csv, and split, kinds (of findings), oddity and letters."""
    ids = rng.choice(np.arange(5, 65535), n_train + n_test, replace=False)
    images = []
    for split, patients in (("train", ids[:n_train]), ("test", ids[n_train:])):
        n_positive = round(positive_rate * len(patients))
        if positive_rate > 0:
            n_positive = max(n_positive, 1)
        positive = set(rng.permutation(patients)[:n_positive])
        for site, members in zip((1, 2), np.array_split(rng.permutation(patients), 2), strict=True):
            machines = _share_out(site, len(members))
            if split == "test" and site == 1:
                machines[-1] = TEST_MACHINE
            for number, (patient, machine) in enumerate(zip(members, machines, strict=True)):
                unknown = site == 1 and split == "train"
                age = float(np.clip(np.rint(rng.normal(57.4 if site == 1 else 59.9, 10)), 26, 89))
                age = np.nan if unknown and number == 1 else age
                density = str(rng.choice(list("ABCD"), p=[0.105, 0.43, 0.413, 0.052]))
                common = {
                    "split": split, "site_id": site, "patient_id": int(patient), "age": age, "machine_id": machine,
                    "drawn_density": density,
                    "density": np.nan if site == 2 or (unknown and number == 0) else density,
                }  # fmt: skip
                images += _plan_breasts(rng, common, patient in positive)
    table = pd.DataFrame(images)
    # Views beyond the usual two: a fifth of the breasts has one of them twice, a few have a rare one.
    breasts = table.drop_duplicates(["patient_id", "laterality"])
    again = breasts[rng.random(len(breasts)) < 0.2].assign(view=lambda frame: rng.choice(["CC", "MLO"], len(frame)))
    rare = breasts.iloc[rng.permutation(len(breasts))[: max(3, len(breasts) // 80)]]
    rare = rare.assign(view=["AT", "LM", "ML"] * (len(rare) // 3) + ["AT"] * (len(rare) % 3))
    table = pd.concat([table, again, rare], ignore_index=True)
    table["letters"] = rng.random(len(table)) < 0.25
    table = _plant_oddities(rng, table)
    # Other pictures have other ids: what was trained on an older generator's must not pass for trained on this one's.
    ids = np.random.default_rng([GENERATOR, int(rng.integers(2**32))])
    table["image_id"] = ids.choice(2147471846 - 68491, len(table), replace=False) + 68491
    return table


def _share_out(site: int, count: int) -> list[int]:
    """Machines for `count` patients of a site, in proportion to their shares."""
    machines = {number: machine.share for number, machine in MACHINES.items() if machine.site == site and machine.share}
    places = np.searchsorted(np.cumsum(list(machines.values())), (np.arange(count) + 0.5) / max(count, 1))
    return [list(machines)[min(place, len(machines) - 1)] for place in places]


def _plan_breasts(rng: np.random.Generator, common: dict, positive: bool) -> list[dict]:
    """CC and MLO rows of a patient's two breasts."""
    sick = {"L", "R"} if rng.random() < 0.012 else {"LR"[rng.integers(2)]}  # seldom on both sides
    implant = int(common["site_id"] == 1 and rng.random() < 0.05)
    rows = []
    for laterality in "LR":
        cancer = int(positive and laterality in sick)
        benign = [
            kind
            for kind, odds in (("cyst", 0.22), ("coarse_calcification", 0.2), ("vascular_calcification", 0.08))
            if rng.random() < odds
        ]
        kinds = [("spiculated_mass",), ("spiculated_mass", "microcalcifications"), ("microcalcifications",)]
        kind = kinds[rng.choice(3, p=[0.6, 0.3, 0.1])] if cancer else ()
        biopsy = 1 if cancer else int(rng.random() < 0.034)
        invasive = int(rng.random() < 0.7) if cancer else 0
        birads = float(rng.choice(BIRADS, p=BIRADS_ODDS[bool(benign)]))
        birads = np.nan if common["site_id"] == 2 else 0.0 if cancer else birads
        difficult = not cancer and (birads == 0 or bool(biopsy))
        for view in ("CC", "MLO"):
            rows.append(
                common
                | {"laterality": laterality, "view": view, "cancer": cancer, "biopsy": biopsy, "invasive": invasive,
                   "BIRADS": birads, "implant": implant, "difficult_negative_case": difficult,
                   "kinds": (*benign, *kind)}
            )  # fmt: skip
    return rows


def _plant_oddities(rng: np.random.Generator, table: pd.DataFrame) -> pd.DataFrame:
    """Give one oddity each to the CC view of training breasts without cancer; a duplicate comes as one more row."""
    table["oddity"] = ""
    healthy = table[(table["split"] == "train") & (table["cancer"] == 0) & (table["view"] == "CC")]
    healthy = healthy.drop_duplicates(["patient_id", "laterality"])
    chosen = healthy.index[rng.permutation(len(healthy))[: len(ODDITIES)]]
    for index, oddity in zip(chosen, ODDITIES, strict=False):
        if oddity == "duplicate":
            table = pd.concat([table, table.loc[[index]]], ignore_index=True)
            index = table.index[-1]
        else:
            table.loc[index, "letters"] = oddity == "burned_in_letters"
        table.loc[index, "oddity"] = oddity
    return table


# Images


def _write_patient(folder: Path, size: int, patient: tuple[list[dict], np.random.SeedSequence]) -> None:
    """Draw and write all images of one patient: its rows of the plan, and its seed."""
    rows, seed = patient
    rng = np.random.default_rng(seed)
    directory = folder / f"{rows[0]['split']}_images" / str(rows[0]["patient_id"])
    directory.mkdir(parents=True)
    machine = MACHINES[rows[0]["machine_id"]]
    breasts = {}  # laterality: shape and findings, the same in all its views
    first = {}  # laterality, view: the picture a duplicate repeats
    for row in rows:
        side = row["laterality"]
        if side not in breasts:
            breasts[side] = random_breast(rng), [random_finding(rng, kind) for kind in row["kinds"]]
        shape, findings = breasts[side]
        if row["oddity"] == "duplicate":
            pixels = first[side, row["view"]]
        else:
            pixels, mask = draw_breast(
                rng, (size, round(size * machine.aspect)), row["view"], side, row["drawn_density"], findings,
                breast=shape, implant=bool(row["implant"]), noise=machine.noise,
            )  # fmt: skip
            pixels = finish(rng, pixels, mask, row, machine)
        first.setdefault((side, row["view"]), pixels)
        stored = 4095 - pixels if machine.inverted else pixels
        stored = np.zeros_like(stored) if row["oddity"] == "all_zero" else stored
        write_dicom(directory / f"{row['image_id']}.dcm", stored, row, machine, 240.0 / size)
