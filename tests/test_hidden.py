"""rsnakit.hidden: test sets that hurt are what they say, read back with pydicom and pandas alone."""

import hashlib
import os
import shutil

import numpy as np
import pandas as pd
import pydicom
import pytest

from rsnakit import hidden, tables

COLUMNS = ["site_id", "patient_id", "image_id", "laterality", "view", "age", "implant", "machine_id", "prediction_id"]


@pytest.fixture(scope="module")
def many(competition, tmp_path_factory):
    return hidden.make(competition, tmp_path_factory.mktemp("hidden") / "many", "many", n=200, seed=1)


def rows_of(made: hidden.HiddenSet) -> pd.DataFrame:
    """Its test.csv, every value as it is written."""
    return pd.read_csv(made.folder / "test.csv", dtype=str, keep_default_na=False)


def file_of(made: hidden.HiddenSet, row: dict):
    return made.folder / "test_images" / row["patient_id"] / f"{row['image_id']}.dcm"


def train_of(competition) -> pd.DataFrame:
    return pd.read_csv(competition / "train.csv", dtype=str, keep_default_na=False)


def contents(folder) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


def test_many_has_the_columns_of_the_original_and_no_labels(competition, many):  # I02
    table = rows_of(many)
    assert list(table.columns) == COLUMNS and len(table) == 200
    assert table["image_id"].is_unique
    sample = pd.read_csv(many.folder / "sample_submission.csv", dtype=str)
    assert sample["prediction_id"].tolist() == list(dict.fromkeys(table["prediction_id"]))
    known = train_of(competition), pd.read_csv(competition / "test.csv", dtype=str)
    for name in ("patient_id", "image_id"):
        assert not set(table[name]) & {value for frame in known for value in frame[name]}
    assert (many.folder / "train.csv").read_bytes() == (competition / "train.csv").read_bytes()


def test_many_has_what_no_training_has_shown(competition, many):  # I02
    table, train = rows_of(many), train_of(competition)
    for name in ("site_id", "machine_id", "view"):
        assert set(table[name]) - set(train[name]) and set(table[name]) & set(train[name])
    assert (table["age"] == "").sum() >= 8 and (table["age"] != "").sum() >= 100
    numbers = table["image_id"].astype(object).map(int)
    assert (numbers > 2**31).sum() >= 20 and (numbers < 2**31).sum() >= 100
    assert any(int(float(number)) != number for number in numbers)  # one that a float rounds to another id
    breasts = table.groupby("prediction_id")["view"]
    assert {1, 6} <= set(breasts.size())
    assert {"CC", "MLO"} <= set(table[table["prediction_id"] == breasts.size().idxmax()]["view"])
    sides = table.groupby("patient_id")["laterality"].nunique()
    assert (sides == 1).any() and (sides == 2).any()
    built = table["patient_id"] + "_" + table["laterality"]
    assert (built != table["prediction_id"]).any() and (built == table["prediction_id"]).any()
    # Shuffled: the images of a breast do not stand together.
    changes = (table["prediction_id"] != table["prediction_id"].shift()).sum()
    assert changes > 1.5 * table["prediction_id"].nunique()


def test_each_hurt_image_is_hurt_as_it_says(many):  # I02
    table, images = rows_of(many), many.images
    assert images["image_id"].tolist() == table["image_id"].tolist()
    assert set(images["hurt"]) == {"", *hidden.HURTS}
    hurt = {row["hurt"]: (file_of(many, row), row) for row in images.to_dict("records") if row["hurt"]}
    path, row = hurt["cut"]
    whole = row["source"].read_bytes()
    assert path.read_bytes() == whole[: len(whole) // 2] and row["status"] == "failed"
    with pytest.raises(pydicom.errors.InvalidDicomError):
        pydicom.dcmread(hurt["garbage"][0])
    assert hurt["empty"][0].stat().st_size == 0
    assert not hurt["missing"][0].exists()
    blank = pydicom.dcmread(hurt["all_zero"][0]).pixel_array
    assert blank.size > 10_000 and not blank.any() and hurt["all_zero"][1]["status"] == "blank"
    huge = pydicom.dcmread(hurt["huge"][0])
    pixels = huge.pixel_array
    assert min(pixels.shape) > 4915 and max(pixels.shape) > 5355 and pixels.dtype == np.uint16
    assert 1000 < pixels.max() < 2**huge.BitsStored and len(np.unique(pixels[::50, ::50])) > 100
    assert huge.file_meta.TransferSyntaxUID == "1.2.840.10008.1.2.1" and hurt["huge"][1]["status"] == "ok"
    # A breast of which nothing can be read has its rows too.
    assert (images.groupby("prediction_id")["status"].agg(lambda found: set(found) == {"failed"})).any()


def test_sound_images_are_the_source_s(competition, many):
    sound = many.images[many.images["hurt"] == ""].to_dict("records")
    before = {path.read_bytes() for path in competition.rglob("*.dcm")}
    assert len(sound) == 194 and {row["status"] for row in sound} == {"ok"}
    for row in sound[:40]:
        assert file_of(many, row).read_bytes() in before


def test_the_kit_reads_its_table(many):
    table = tables.load_table(many.folder, "test")
    assert table["image_id"].tolist() == many.images["image_id"].tolist()
    assert table["prediction_id"].tolist() == many.images["prediction_id"].tolist()


def test_one_image(competition, tmp_path):  # I02
    made = hidden.make(competition, tmp_path / "one", "one")
    table = rows_of(made)
    assert len(table) == 1 and list(table.columns) == COLUMNS
    row = table.iloc[0]
    assert (
        int(row["image_id"]) > 2**31
        and row["age"] == ""
        and row["machine_id"] not in set(train_of(competition)["machine_id"])
    )
    assert pydicom.dcmread(file_of(made, row)).pixel_array.any() and made.images["status"].tolist() == ["ok"]


def test_visible_is_the_competition_s_own_test_set(competition, tmp_path):
    made = hidden.make(competition, tmp_path / "visible", "visible", link=False)
    expected = {
        name: digest for name, digest in contents(competition).items() if not name.startswith(("train_", "demo."))
    }
    assert contents(made.folder) == expected
    assert set(made.images["status"]) == {"ok"}


def test_a_seed_decides_all(competition, tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "HUGE", (800, 600))

    def made(name: str, seed: int) -> dict[str, str]:
        return contents(hidden.make(competition, tmp_path / name, "many", n=32, seed=seed).folder)

    first = made("a", 3)
    assert made("b", 3) == first
    assert made("c", 4)["test.csv"] != first["test.csv"]


def test_links_and_copies(competition, tmp_path):
    linked = hidden.make(competition, tmp_path / "linked", "one")
    copied = hidden.make(competition, tmp_path / "copied", "one", link=False)
    for made, same in ((linked, True), (copied, False)):
        row = made.images.to_dict("records")[0]
        assert os.path.samefile(row["source"], file_of(made, row)) == same


def test_images_that_are_symbolic_links(competition, tmp_path):
    """As where the images lie on another disk: what stands in the test set leads to them all the same."""
    (tmp_path / "source/test_images").mkdir(parents=True)
    shutil.copy(competition / "test.csv", tmp_path / "source")
    for folder in (competition / "test_images").iterdir():
        (tmp_path / "source/test_images" / folder.name).mkdir()
        for path in folder.iterdir():
            relative = os.path.relpath(path, tmp_path / "source/test_images" / folder.name)
            (tmp_path / "source/test_images" / folder.name / path.name).symlink_to(relative)
    made = hidden.make(tmp_path / "source", tmp_path / "out/further/down", "visible")
    for row in made.images.to_dict("records"):
        assert pydicom.dcmread(file_of(made, row)).Modality == "MG"


def test_what_cannot_be_made_is_refused(competition, tmp_path):
    with pytest.raises(ValueError, match="expected one of visible, one, many"):
        hidden.make(competition, tmp_path / "a", "few")
    with pytest.raises(ValueError, match="32 images or more"):
        hidden.make(competition, tmp_path / "a", "many", n=31)
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError):
        hidden.make(competition, tmp_path / "there", "one")
    with pytest.raises(FileNotFoundError, match=r"neither train.csv nor test.csv"):
        hidden.make(tmp_path / "nowhere", tmp_path / "b", "one")
    (tmp_path / "tables").mkdir()
    for name in ("train.csv", "test.csv"):
        (tmp_path / "tables" / name).write_bytes((competition / name).read_bytes())
    with pytest.raises(tables.TableError, match="no image that its tables name is there"):
        hidden.make(tmp_path / "tables", tmp_path / "c", "many")
    visible = hidden.make(tmp_path / "tables", tmp_path / "d", "visible")
    assert set(visible.images["status"]) == {"failed"}
