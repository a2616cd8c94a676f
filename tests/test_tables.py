"""Tables of a competition: what is read, and what is refused."""

import itertools
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rsnakit.env import find_data
from rsnakit.folds import check_folds, count_folds, make_folds
from rsnakit.tables import TableError, fingerprint, load_table, with_png

TRAIN = ["site_id", "patient_id", "image_id", "laterality", "view", "age", "cancer"]
TEST = ["site_id", "patient_id", "image_id", "laterality", "view", "age", "prediction_id"]


def write(root: Path, split: str, rows: list[str], columns: list[str] | None = None) -> Path:
    header = ",".join(columns or (TRAIN if split == "train" else TEST))
    (root / f"{split}.csv").write_text("\n".join([header, *rows]) + "\n")
    return root


# --- load_table ---------------------------------------------------------------------------------------------------------


def test_a_good_table_keeps_order_and_adds_path_and_breast(tmp_path):
    write(tmp_path, "train", ["1,12,900,R,CC,50.5,0", "2,7,5,L,MLO,,1", "2,7,6,L,CC,61,1"])
    table = load_table(tmp_path, "train")
    assert table["image_id"].tolist() == ["900", "5", "6"]
    assert table["breast_id"].tolist() == ["12_R", "7_L", "7_L"]
    assert table["path"].tolist()[1] == tmp_path / "train_images" / "7" / "5.dcm"
    assert table["cancer"].dtype == np.int64 and table["cancer"].tolist() == [0, 1, 1]
    assert table.index.tolist() == [0, 1, 2]


def test_ids_stay_as_written(tmp_path):
    # I02: an image_id above 2**31; leading zeros and ids that are no numbers stay too
    write(
        tmp_path,
        "train",
        ["1,00012,4294967297123,R,CC,50,0", "1,P-7,0x1F,L,CC,50,0", "1,1.2.840.0,1.2.840.00,L,CC,5,0"],
    )
    table = load_table(str(tmp_path), "train")
    assert table["patient_id"].tolist() == ["00012", "P-7", "1.2.840.0"]
    assert table["image_id"].tolist() == ["4294967297123", "0x1F", "1.2.840.00"]
    assert table["path"].iloc[0].parts[-2:] == ("00012", "4294967297123.dcm")


def test_labels_written_as_floats_or_booleans_are_integers(tmp_path):
    write(tmp_path, "train", ["1,1,1,R,CC,50,1.0", "1,2,2,L,CC,50,0.0"])
    assert load_table(tmp_path, "train")["cancer"].tolist() == [1, 0]
    write(tmp_path, "train", ["1,1,1,R,CC,50,True", "1,2,2,L,CC,50,False"])
    table = load_table(tmp_path, "train")
    assert table["cancer"].tolist() == [1, 0] and table["cancer"].dtype == np.int64


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_missing_csv_names_itself(tmp_path, split):
    with pytest.raises(FileNotFoundError, match=f"{split}.csv"):
        load_table(tmp_path, split)


def test_missing_columns_are_named_with_what_is_there(tmp_path):
    write(tmp_path, "train", ["1,2,3,R,CC"], ["site_id", "patient", "image_id", "laterality", "view"])
    with pytest.raises(
        TableError, match=r"train\.csv: column patient_id, cancer missing; found site_id, patient, image_id"
    ):
        load_table(tmp_path, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe\x00\x01,\x80", "cannot be read"),
        (b"a,b\n1,2\n1,2,3,4\n", "cannot be read|missing"),
        (",".join(TRAIN).encode() + b"\n", "no rows"),
    ],
    ids=["nothing", "binary", "ragged", "header alone"],
)
def test_an_empty_or_broken_csv_is_refused(tmp_path, content, message):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(TableError, match=rf"train\.csv: .*({message})"):
        load_table(tmp_path, "train")


@pytest.mark.filterwarnings("ignore:Length of header")
def test_a_comma_at_the_end_of_each_line_shifts_no_column(tmp_path):
    write(tmp_path, "train", ["1,12,900,R,CC,50,0,", "1,7,5,L,CC,50,1,"])
    table = load_table(tmp_path, "train")
    assert table["patient_id"].tolist() == ["12", "7"] and table["cancer"].tolist() == [0, 1]


def test_whole_repeats_are_dropped_with_a_warning(tmp_path, caplog):
    # V04
    write(tmp_path, "train", ["1,1,10,R,CC,,0", "1,1,10,R,CC,,0", "1,2,20,L,CC,50,1", "1,1,10,R,CC,,0"])
    with caplog.at_level(logging.WARNING):
        table = load_table(tmp_path, "train")
    assert table["image_id"].tolist() == ["10", "20"] and table.index.tolist() == [0, 1]
    assert "2 rows repeat another" in caplog.text


def refused(tmp_path: Path, split: str, rows: list[str], *parts: str) -> None:
    write(tmp_path, split, rows)
    with pytest.raises(TableError) as caught:
        load_table(tmp_path, split)
    message = str(caught.value)
    assert all(part in message for part in (f"{split}.csv", *parts)), message


def test_an_image_id_with_two_contents_is_refused(tmp_path):
    rows = ["1,1,10,R,CC,50,0", "1,3,30,R,CC,50,0", "1,2,10,R,MLO,50,0"]
    refused(tmp_path, "train", rows, "image_id 10", "[2, 4]", "patient_id, view")
    # differing in a missing value alone counts too
    refused(tmp_path, "train", ["1,1,10,R,CC,50,0", "1,1,10,R,CC,,0"], "image_id 10", "[2, 3]", "age")


@pytest.mark.parametrize("name", ["patient_id", "image_id"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("7", "007"), ("123", "123.0"), ("0", "00"), ("2147483699", "2147483699.0"), ("7", "7 "), ("0.0", "0")],
)
def test_one_number_in_two_spellings_is_refused(tmp_path, name, first, second):
    # V04
    ids = {"patient_id": ("1", "2"), "image_id": ("10", "20"), name: (first, second)}
    rows = [f"1,{p},{i},R,CC,50,0" for p, i in zip(ids["patient_id"], ids["image_id"], strict=True)]
    refused(tmp_path, "train", rows, name, repr(first), repr(second))


def test_integers_beside_floats_are_refused(tmp_path):
    # V04: two tables put together, one of which had been read as float
    refused(tmp_path, "train", ["1,7,10,R,CC,50,0", "1,8.0,20,R,CC,50,0"], "patient_id", "'8.0'", "'7'")


@pytest.mark.parametrize("named", ["1519946254", "1519946254.0"])
def test_ids_that_went_through_floats_lead_to_the_files(tmp_path, named):  # I02
    """The ids stay as they are written; files that are named so, too, are found as well."""
    (tmp_path / "test.csv").write_text(
        "patient_id,image_id,laterality,view,prediction_id\n7.0,1519946254.0,L,CC,7.0_L\n7.0,4294967301.0,L,MLO,7.0_L\n"
    )
    (tmp_path / "test_images" / "7").mkdir(parents=True)
    (tmp_path / "test_images" / "7" / f"{named}.dcm").touch()
    table = load_table(tmp_path, "test")
    assert table["path"][0] == tmp_path / "test_images" / "7" / f"{named}.dcm"
    assert table["image_id"].tolist() == ["1519946254.0", "4294967301.0"] and table["breast_id"][0] == "7.0_L"


@pytest.mark.parametrize("ids", [("10", "100"), ("0a", "a"), ("1.2.0", "1.2"), ("0010", "1000"), ("a.0", "a")])
def test_different_ids_are_not_taken_for_one(tmp_path, ids):
    write(tmp_path, "train", [f"1,{p},{n},R,CC,50,0" for n, p in enumerate(ids)])
    assert load_table(tmp_path, "train")["patient_id"].tolist() == list(ids)


@pytest.mark.parametrize("bad", ["../x", "..", "/etc/passwd", "a/b", "a\\b", "."])
@pytest.mark.parametrize("name", ["patient_id", "image_id"])
def test_ids_that_leave_the_folder_are_refused(tmp_path, name, bad):
    ids = {"patient_id": "1", "image_id": "10", name: bad}
    refused(
        tmp_path, "train", [f"1,{ids['patient_id']},{ids['image_id']},R,CC,50,0"], "row 2", name, repr(bad), "out of"
    )


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("1,2,20,B,CC,50,0", ("row 4", "laterality", "'B'", "L or R")),
        ("1,2,20,,CC,50,0", ("row 4", "laterality", "nan", "L or R")),
        ("1,2,20,l,CC,50,0", ("row 4", "laterality", "'l'", "L or R")),
        ("1,2,20,L,CC,50,2", ("row 4", "cancer is 2,", "0 or 1")),
        ("1,2,20,L,CC,50,0.5", ("row 4", "cancer", "0.5", "0 or 1")),
        ("1,2,20,L,CC,50,", ("row 4", "cancer", "nan", "0 or 1")),
        ("1,2,20,L,CC,50,yes", ("row 4", "cancer", "'yes'", "0 or 1")),
        ("1,,20,L,CC,50,0", ("row 4", "patient_id", "empty")),
        ("1,2,,L,CC,50,0", ("row 4", "image_id", "empty")),
    ],
)
def test_a_bad_value_is_refused_with_its_row(tmp_path, row, parts):
    # the repeated row before it moves no row number
    refused(tmp_path, "train", ["1,1,10,R,CC,50,0", "1,1,10,R,CC,50,0", row], *parts)


def test_labels_that_differ_within_a_breast_are_refused(tmp_path):
    rows = ["1,1,10,R,CC,50,0", "1,2,20,L,CC,50,0", "1,1,11,R,MLO,50,1", "1,1,12,L,MLO,50,1"]
    refused(tmp_path, "train", rows, "1_R", "cancer", "[0, 1]", "[2, 4]")


def test_test_csv_needs_no_label_and_keeps_its_prediction_ids(tmp_path):
    write(tmp_path, "test", ["1,1,10,R,CC,50,007_X", "1,1,11,R,MLO,,007_X", "2,1,12,L,CC,50,1_L"])
    table = load_table(tmp_path, "test")
    assert table["prediction_id"].tolist() == ["007_X", "007_X", "1_L"]
    assert table["path"].iloc[0] == tmp_path / "test_images" / "1" / "10.dcm"


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (["1,1,10,R,CC,50,1_R", "1,1,11,R,MLO,50,1_X"], ("1_R", "prediction_id", "1_X", "[2, 3]")),
        (["1,1,10,R,CC,50,1_R", "1,2,11,R,MLO,50,1_R"], ("1_R", "breast_id", "2_R", "[2, 3]")),
        (["1,1,10,R,CC,50,1_R", "1,2,11,R,MLO,50,"], ("row 3", "prediction_id", "nan")),
    ],
    ids=["two ids for a breast", "two breasts for an id", "no id"],
)
def test_prediction_ids_and_breasts_go_one_to_one(tmp_path, rows, parts):
    refused(tmp_path, "test", rows, *parts)


# --- PNG in place of DICOM ----------------------------------------------------------------------------------------------

ROWS = ["1,7,10,R,CC,50,0", "1,7,11,R,MLO,50,0", "1,12,20,L,CC,60,1"]
LAYOUTS = {
    "a folder a patient": ["7/10.png", "7/11.png", "12/20.png"],
    "one folder": ["7_10.png", "7_11.png", "12_20.png"],
    "both": ["7/10.png", "7_11.png", "12/20.png"],
    "upper case": ["7/10.PNG", "7/11.png", "12/20.Png"],
}


def touch(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize("inner", ["", "train_images"])
@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)
def test_png_files_are_found(tmp_path, caplog, names, inner):
    table = load_table(write(tmp_path, "train", ROWS), "train")
    root = tmp_path / "png" / inner
    others = ["7/10.dcm", "7/99.png", "8/10.png", "10.png", "7_10.jpg", "._7_10.png", "notes/readme.txt"]
    touch(root, [*names, *others])
    found = with_png(table, tmp_path / "png")
    assert found["path"].tolist() == [root / name for name in names] and not caplog.records
    pd.testing.assert_frame_equal(found.drop(columns="path"), table.drop(columns="path"))
    assert with_png(table.tail(1), str(tmp_path / "png"))["path"].tolist() == [root / names[2]]


def test_a_competition_with_png_alone(tmp_path):
    write(tmp_path, "train", ROWS)
    write(tmp_path, "test", ["1,3,30,R,CC,50,3_R"])
    touch(tmp_path / "train_images", LAYOUTS["a folder a patient"])
    touch(tmp_path / "test_images", ["3_30.png"])
    assert find_data(str(tmp_path)).path == tmp_path
    train, test = (with_png(load_table(tmp_path, split), tmp_path) for split in ("train", "test"))
    assert train["path"].tolist() == [tmp_path / "train_images" / name for name in LAYOUTS["a folder a patient"]]
    assert test["path"].tolist() == [tmp_path / "test_images" / "3_30.png"]


@pytest.mark.parametrize(("there", "expected"), [("12/20.png", "7/10.png"), ("12_20.png", "7_10.png")])
def test_missing_png_files_are_counted_and_keep_their_rows(tmp_path, caplog, there, expected):
    table = load_table(write(tmp_path, "train", ROWS), "train")
    touch(tmp_path / "png", ["7/other.png", there])
    found = with_png(table, tmp_path / "png")
    assert found["path"].iloc[[0, 2]].tolist() == [tmp_path / "png" / expected, tmp_path / "png" / there]
    assert f"2 of 3 images are not there, such as {expected}" in caplog.text


def test_the_fuller_of_two_folders_is_taken(tmp_path):
    table = load_table(write(tmp_path, "train", ROWS), "train")
    touch(tmp_path / "png", ["7_10.png", "train_images/7/10.png", "train_images/7/11.png"])
    assert with_png(table, tmp_path / "png")["path"].iloc[0] == tmp_path / "png/train_images/7/10.png"


def test_a_folder_without_the_images_says_what_was_expected_and_found(tmp_path):
    table = load_table(write(tmp_path, "train", ROWS), "train")
    touch(tmp_path / "png", ["10.png", "7-10.png", "train_images/10.dcm"])
    with pytest.raises(TableError) as caught:
        with_png(table, tmp_path / "png")
    parts = (
        "none of 3 images",
        "7/10.png",
        "7_10.png",
        "train_images",
        "3 other names: 10.png, 7-10.png, train_images",
    )
    assert all(part in str(caught.value) for part in (str(tmp_path / "png"), *parts)), caught.value
    with pytest.raises(TableError, match="nowhere: no such folder"):
        with_png(table, tmp_path / "nowhere")


def test_a_png_that_could_be_two_images_is_refused(tmp_path):
    table = load_table(write(tmp_path, "train", ["1,7,8_9,R,CC,50,0", "1,7_8,9,R,CC,50,0"]), "train")
    touch(tmp_path, ["png/7_8_9.png"])
    with pytest.raises(TableError, match=r"7_8_9\.png: its name fits two images"):
        with_png(table, tmp_path / "png")
    touch(tmp_path, ["in/7/8_9.png", "in/7_8/9.png"])
    assert with_png(table, tmp_path / "in")["path"].tolist() == [tmp_path / "in/7/8_9.png", tmp_path / "in/7_8/9.png"]


# --- what tells tables apart, and one of the full size -------------------------------------------------------------------


def test_the_fingerprint_tells_data_apart_and_not_their_order():
    table = pd.DataFrame({"patient_id": list("1122334455"), "image_id": [f"{n}" for n in range(10)], "site_id": 1})
    table = table.assign(cancer=(table.index < 4) * (1 - table.index % 2), breast_id=[f"{n // 2}_L" for n in range(10)])
    same = fingerprint(table)
    assert same == fingerprint(table.sample(frac=1, random_state=0)) == fingerprint(table.assign(age=1.0))
    changes = [table.iloc[1:], table.assign(cancer=1 - table["cancer"]), table.assign(image_id=table["image_id"] + "0")]
    more = {
        "breast_id": table["breast_id"] + "x",
        "site_id": 9,
        "machine_id": 49,
        "view": "ML",
        "BIRADS": 1.0,
    }  # folds, views and heads hang on them
    prints = [same, *map(fingerprint, changes), *(fingerprint(table.assign(**{k: v})) for k, v in more.items())]
    assert all(a != b for a, b in itertools.combinations(prints, 2))


def test_a_table_of_the_competitions_size(tmp_path):
    rng = np.random.default_rng(0)
    n_patients, n_images = 11_913, 54_706
    patients = rng.choice(np.arange(5, 65_535), n_patients, replace=False)
    of_patient = np.r_[np.repeat(np.arange(n_patients), 4), rng.integers(0, n_patients, n_images - 4 * n_patients)]
    positive = np.zeros(n_patients, int)
    positive[rng.choice(n_patients, 486, replace=False)] = 1
    side = np.arange(n_images) % 2
    site = rng.integers(1, 3, n_patients)
    frame = pd.DataFrame(
        {
            "site_id": site[of_patient],
            "patient_id": patients[of_patient],
            "image_id": rng.choice(np.arange(68_491, 2_147_471_846, 1_001), n_images, replace=False),
            "laterality": np.where(side, "L", "R"),
            "view": np.where(np.arange(n_images) % 4 < 2, "CC", "MLO"),
            "age": rng.uniform(26, 89, n_images).round(1),
            "cancer": positive[of_patient] * side,
            "density": rng.choice(["A", "B", "C", "D", ""], n_images),
        }
    )
    frame.to_csv(tmp_path / "train.csv", index=False)
    table = load_table(tmp_path, "train")
    folds = make_folds(table, 4, seed=0)
    check_folds(table, folds)
    assert len(table) == n_images and table["patient_id"].nunique() == n_patients
    counts = count_folds(table, folds)
    assert counts["patients"].max() - counts["patients"].min() <= 1
    assert counts["positive breasts"].sum() == 486
    assert counts["positive breasts"].max() - counts["positive breasts"].min() <= 1
