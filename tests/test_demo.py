"""The synthetic competition: its layout and label rules, its DICOM files, its oddities, and the breasts it draws."""

import hashlib
import io
import json
import os
import time

import imagecodecs
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydicom import dcmread
from pydicom.encaps import get_frame
from scipy import ndimage

from rsnakit import demo, machines, phantom

ARGUMENTS = {"n_patients": 8, "n_test": 3, "size": 256, "seed": 3}
TINY = {"n_patients": 4, "n_test": 1, "size": 128}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small competition, and the stored values (H, W) it wrote, by image_id."""
    written = {}
    write = machines.write_dicom

    def remember(path, stored, *rest):
        written[int(path.stem)] = stored.copy()
        write(path, stored, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "write_dicom", remember)
        root = demo.make_competition(tmp_path_factory.mktemp("demo") / "competition", n_jobs=1, **ARGUMENTS)
    return root, written


@pytest.fixture(scope="module")
def plan():
    """The table of a large competition: rules and rates can be seen in it, and nothing is drawn."""
    return demo._plan(np.random.default_rng(0), 1500, 50, 0.25)


def decode(ds):
    """Stored values by decoders other than those the writer's library would use for itself."""
    frame = get_frame(ds.PixelData, 0, number_of_frames=1)
    if ds.file_meta.TransferSyntaxUID == "1.2.840.10008.1.2.4.90":
        return np.asarray(Image.open(io.BytesIO(frame))) >> 4  # Pillow widens 12 bits to 16
    return imagecodecs.ljpeg_decode(frame)


def shown(root, row):
    """Header, and values turned so that the breast is bright."""
    ds = dcmread(root / "train_images" / str(row.patient_id) / f"{row.image_id}.dcm")
    pixels = decode(ds).astype(int)
    return ds, 4095 - pixels if ds.PhotometricInterpretation == "MONOCHROME1" else pixels


def hashes(root):
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


def test_layout_is_the_competitions(made):
    root, _ = made
    train, test = pd.read_csv(root / "train.csv"), pd.read_csv(root / "test.csv")
    assert list(train) == [
        "site_id", "patient_id", "image_id", "laterality", "view", "age", "cancer", "biopsy", "invasive", "BIRADS",
        "implant", "density", "machine_id", "difficult_negative_case",
    ]  # fmt: skip
    assert list(test) == [
        "site_id", "patient_id", "image_id", "laterality", "view", "age", "implant", "machine_id", "prediction_id",
    ]  # fmt: skip
    for split, table in (("train", train), ("test", test)):
        files = {p.relative_to(root / f"{split}_images").as_posix() for p in root.glob(f"{split}_images/*/*")}
        ids = table[["patient_id", "image_id"]].astype(str)
        assert files == set(ids["patient_id"] + "/" + ids["image_id"] + ".dcm")
        assert table["patient_id"].nunique() == ARGUMENTS["n_patients" if split == "train" else "n_test"]
    assert (test["prediction_id"] == test["patient_id"].astype(str) + "_" + test["laterality"]).all()
    submission = pd.read_csv(root / "sample_submission.csv")
    assert list(submission) == ["prediction_id", "cancer"]
    assert submission["prediction_id"].tolist() == list(dict.fromkeys(test["prediction_id"]))
    assert submission["cancer"].nunique() == 1
    assert set(test["machine_id"]) - set(train["machine_id"])
    assert train.dtypes[["patient_id", "image_id", "cancer"]].eq("int64").all() and train.dtypes.iloc[-1].kind == "b"
    assert {p.name for p in root.iterdir()} == {
        "train.csv", "test.csv", "sample_submission.csv", "train_images", "test_images", "demo.json",
    }  # fmt: skip


def test_labels_keep_the_rules_of_the_original(plan):
    train = plan[plan["split"] == "train"]
    site1, site2 = train[train["site_id"] == 1], train[train["site_id"] == 2]
    cancer = train["cancer"] == 1
    assert (train.loc[cancer, "biopsy"] == 1).all() and train.loc[~cancer, "biopsy"].mean() == pytest.approx(
        0.034, abs=0.015
    )
    assert (train.loc[train["invasive"] == 1, "cancer"] == 1).all()
    assert train.loc[cancer, "invasive"].mean() == pytest.approx(0.7, abs=0.08)
    assert site2["BIRADS"].isna().all() and site2["density"].isna().all() and (site2["implant"] == 0).all()
    assert (site1.loc[site1["cancer"] == 1, "BIRADS"] == 0).all() and set(site1["BIRADS"].dropna()) == {0, 1, 2}
    assert site1["density"].isna().mean() < 0.01 < site1["implant"].mean()
    assert set(site1["density"].dropna()) == set("ABCD")
    assert not (train["difficult_negative_case"] & cancer).any() and train["difficult_negative_case"].any()
    assert train.groupby("machine_id")["site_id"].nunique().eq(1).all()
    assert (
        0 < site1["age"].isna().sum() < 10
        and site2["age"].notna().all()
        and train["age"].dropna().between(26, 89).all()
    )
    assert site1["age"].mean() == pytest.approx(57.4, abs=1.2) and site2["age"].mean() == pytest.approx(59.9, abs=1.2)
    breasts = train.groupby(["patient_id", "laterality"])
    assert breasts["cancer"].nunique().eq(1).all()
    assert breasts["view"].agg(set).ge({"CC", "MLO"}).all()
    assert breasts.size().between(2, 8).all() and breasts.size().gt(2).mean() == pytest.approx(0.21, abs=0.05)
    rare = train["view"].value_counts()
    assert set(rare.index) == {"CC", "MLO", "AT", "LM", "ML"} and rare[["AT", "LM", "ML"]].between(1, 40).all()
    assert train.groupby("patient_id")["cancer"].max().mean() == 0.25
    assert train["image_id"].is_unique and train["image_id"].between(68491, 2147471846).all()
    assert train["patient_id"].between(5, 65534).all()


def test_only_the_findings_of_cancer_tell_it(plan):
    """Machine, age, density, letters and each benign finding are as frequent with cancer as without."""
    breasts = plan.drop_duplicates(["patient_id", "laterality"])
    cancer = breasts["cancer"] == 1
    traits = {f"machine {m}": breasts["machine_id"] == m for m in breasts["machine_id"].unique()}
    traits |= {f"density {d}": breasts["drawn_density"] == d for d in "ABCD"}
    traits |= {kind: breasts["kinds"].map(lambda kinds, kind=kind: kind in kinds) for kind in phantom.BENIGN}
    traits |= {"old": breasts["age"] > 58, "letters": breasts["letters"], "left": breasts["laterality"] == "L"}
    for name, trait in traits.items():
        with_it, without = trait[cancer], trait[~cancer]
        error = np.sqrt(trait.mean() * (1 - trait.mean()) * (1 / len(with_it) + 1 / len(without)))
        assert abs(with_it.mean() - without.mean()) < 4 * error, name
    has_sign = breasts["kinds"].map(lambda kinds: bool(set(kinds) & set(phantom.CANCERS)))
    assert (has_sign == cancer).all()


def test_same_arguments_same_bytes_however_many_processes(made, tmp_path):
    root, _ = made
    again = demo.make_competition(tmp_path / "again", n_jobs=2, **ARGUMENTS)
    assert hashes(again) == hashes(root)
    other = demo.make_competition(tmp_path / "other", n_jobs=1, **TINY, seed=1)
    third = demo.make_competition(tmp_path / "third", n_jobs=1, **TINY, seed=2)
    assert hashes(other).keys() != hashes(third).keys()


def test_dicom_files_read_back_to_what_was_drawn(made):
    root, written = made
    seen = {"syntax": set(), "photometric": set(), "window": set(), "function": set()}
    for path in root.glob("*_images/*/*.dcm"):
        ds = dcmread(path)
        pixels = decode(ds)
        np.testing.assert_array_equal(pixels, written[int(path.stem)])
        assert pixels.shape == (ds.Rows, ds.Columns) == (256, pixels.shape[1])
        assert (ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation) == (16, 12, 11, 0)
        assert ds.SOPClassUID == "1.2.840.10008.5.1.4.1.1.1.2" == ds.file_meta.MediaStorageSOPClassUID
        assert ds.PatientID == path.parent.name and ds.Modality == "MG" and "StudyDate" not in ds
        seen["syntax"].add(ds.file_meta.TransferSyntaxUID)
        seen["photometric"].add(ds.PhotometricInterpretation)
        seen["window"].add(ds["WindowCenter"].VM if "WindowCenter" in ds else 0)
        seen["function"].add(ds.get("VOILUTFunction"))
    assert seen["syntax"] == {"1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.70"}
    assert seen["photometric"] == {"MONOCHROME1", "MONOCHROME2"}
    assert seen["window"] == {0, 1, 2} and {None, "LINEAR", "SIGMOID"} <= seen["function"]


def test_breast_is_bright_at_its_own_edge_and_background_is_dark(made):  # D01
    root, _ = made
    odd = json.loads((root / "demo.json").read_text())["oddities"]
    for row in pd.read_csv(root / "train.csv").itertuples():
        ds, pixels = shown(root, row)
        assert (ds.PhotometricInterpretation == "MONOCHROME1") == (row.machine_id in (29, 210))
        assert ds.ViewPosition == row.view
        if str(row.image_id) in odd:
            continue
        assert ds.ImageLaterality == row.laterality
        wall, far = (pixels[128:, :8], pixels[128:, -8:])[:: 1 if row.laterality == "L" else -1]
        assert np.median(wall) > 400 > 100 > np.median(far)
        if "WindowCenter" in ds:  # the first window spans the breast, as stored
            center, width = np.atleast_1d(ds.WindowCenter)[0], np.atleast_1d(ds.WindowWidth)[0]
            assert (
                abs(np.median(decode(ds)[128:, :8] if row.laterality == "L" else decode(ds)[128:, -8:]) - center)
                < width
            )


def test_oddities_are_there_and_in_sound_company(made):
    root, _ = made
    notes = json.loads((root / "demo.json").read_text())
    train = pd.read_csv(root / "train.csv")
    train["oddity"] = train["image_id"].astype(str).map(notes["oddities"])
    assert sorted(train["oddity"].dropna()) == sorted(demo.ODDITIES)
    for row in train[train["oddity"].notna()].itertuples():
        others = train[
            (train["patient_id"] == row.patient_id)
            & (train["laterality"] == row.laterality)
            & (train["image_id"] != row.image_id)
        ]
        assert row.cancer == 0 and others["oddity"].isna().all() and len(others)
        ds, pixels = shown(root, row)
        away = pixels if row.laterality == "L" else pixels[:, ::-1]  # background at the right
        if row.oddity == "all_zero":
            assert not decode(ds).any()
        elif row.oddity == "white_frame":
            edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert (edges == 4095).all()
        elif row.oddity == "burned_in_letters":
            white = away == 4095
            assert white[:40, -60:].any() and str(row.image_id) in notes["letters"]
        elif row.oddity == "wrong_laterality":
            assert {ds.ImageLaterality, row.laterality} == {"L", "R"}
        elif row.oddity == "duplicate":
            twins = [other for other in others.itertuples() if np.array_equal(shown(root, other)[1], pixels)]
            assert len(twins) == 1 and twins[0].view == row.view
        elif row.oddity == "bright_stripe":
            assert (away == 4095).all(axis=0).sum() >= 2
        else:
            assert np.median(away[:, -20:]) > 500


def test_made_once_and_never_over_something_else(made, monkeypatch):
    root, _ = made
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    monkeypatch.setattr(demo, "_make", lambda *_: pytest.fail("made again"))
    assert demo.make_competition(str(root), **ARGUMENTS) == root
    with pytest.raises(FileExistsError, match=r"n_patients.*8.*n_patients.*9"):
        demo.make_competition(root, **ARGUMENTS | {"n_patients": 9})
    monkeypatch.setattr(demo, "GENERATOR", demo.GENERATOR + 1)
    with pytest.raises(FileExistsError, match="generator"):
        demo.make_competition(root, **ARGUMENTS)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


@pytest.mark.parametrize("content", ["photo.jpg", "demo.json"])
def test_foreign_folder_is_refused_and_kept(tmp_path, content):
    (tmp_path / content).write_text("[]")
    with pytest.raises(FileExistsError, match="no demo competition"):
        demo.make_competition(tmp_path, **TINY)
    assert [p.name for p in tmp_path.iterdir()] == [content]


def test_broken_making_leaves_nothing_that_counts(tmp_path, monkeypatch):
    root = tmp_path / "competition"
    abandoned = tmp_path / ".competition.making-host.1-x"  # what a kill leaves
    (abandoned / "train_images").mkdir(parents=True)
    os.utime(abandoned, (time.time() - 2 * 86400,) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(demo, "write_dicom", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            demo.make_competition(root, n_jobs=1, **TINY)
    assert not list(tmp_path.iterdir())
    root.mkdir()  # an empty folder is no obstacle
    assert (demo.make_competition(root, n_jobs=1, **TINY) / "train.csv").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["competition"]


@pytest.mark.parametrize("wrong", [{"n_patients": 3}, {"n_test": 0}, {"size": 64}, {"positive_rate": 1.5}])
def test_arguments_out_of_range_are_named(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        demo.make_competition(tmp_path / "x", **TINY | wrong)


@pytest.mark.parametrize("view", phantom.VIEWS)
def test_mask_is_where_the_breast_is(view):
    pixels, mask = demo.draw_breast(np.random.default_rng(5), (320, 240), view, "L", "C")
    assert pixels.dtype == np.uint16 and mask.dtype == bool and pixels.shape == mask.shape == (320, 240)
    assert pixels.max() < 4096 and np.median(pixels[mask]) > 600
    assert not pixels[~ndimage.binary_dilation(mask, iterations=2)].any()  # the edge itself is half covered
    assert 0.15 < mask.mean() < 0.8 and mask[180:220, 0].all() and not mask[:, -1].any()
    assert mask[0, 0] == (view != "CC")  # the oblique views reach into the armpit
    right, right_mask = demo.draw_breast(np.random.default_rng(5), (320, 240), view, "R", "C")
    np.testing.assert_array_equal(right[:, ::-1], pixels)
    np.testing.assert_array_equal(right_mask[:, ::-1], mask)


@pytest.mark.parametrize("kind", phantom.CANCERS + phantom.BENIGN)
def test_finding_keeps_its_distance_from_the_nipple(kind):
    rng = np.random.default_rng(11)
    shape = phantom.Breast(width=0.5, height=0.4, nipple=0.0, sag=0.0, profile=True, spread=0.0)
    finding = phantom.random_finding(rng, kind)
    for view in ("CC", "MLO"):
        drawings = [
            demo.draw_breast(np.random.default_rng(2), (400, 300), view, "L", "B", findings, breast=shape, noise=0)
            for findings in ((), [finding])
        ]
        mask = drawings[0][1]
        change = np.abs(drawings[1][0].astype(float) - drawings[0][0])
        rows, columns = np.nonzero(change > 0.2 * change.max())
        tip = np.nonzero(mask.any(0))[0].max()
        nipple = np.array([np.median(np.nonzero(mask[:, tip])[0]), 0.5 * 400])
        center = np.array([rows.mean(), columns.mean()])
        away = np.hypot(*(center - nipple)) / 400
        assert away == pytest.approx(finding.depth * 0.5, abs=0.035)
        assert np.hypot(rows - center[0], columns - center[1]).max() < 4 * finding.radius * 400
        assert change[mask].max() > 150


def test_denser_breasts_are_brighter():
    def brightness(density):
        drawn = [demo.draw_breast(np.random.default_rng(seed), (160, 120), "CC", "L", density) for seed in range(6)]
        return np.mean([pixels[mask].mean() for pixels, mask in drawn])

    a, b, c, d = (brightness(density) for density in "ABCD")
    assert a < b < c < d


def test_texture_has_the_power_law_it_is_asked_for():
    noise = phantom.power_noise(np.random.default_rng(0), (512, 512), 3.0)
    power = np.abs(np.fft.fft2(noise)) ** 2
    frequency = np.hypot(np.fft.fftfreq(512)[:, None], np.fft.fftfreq(512)[None])
    kept = (frequency > 0.01) & (frequency < 0.4)
    slope = np.polyfit(np.log(frequency[kept]), np.log(power[kept]), 1)[0]
    assert slope == pytest.approx(-3.0, abs=0.05) and noise.std() == pytest.approx(1, abs=1e-3)


def test_what_cannot_be_drawn_is_named():
    rng = np.random.default_rng(0)
    for wrong in ({"view": "XX"}, {"laterality": "B"}, {"density": "E"}):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            demo.draw_breast(rng, (128, 96), **wrong)
    with pytest.raises(ValueError, match="scar"):
        demo.draw_breast(rng, (128, 96), findings=[phantom.Finding("scar", 0.5, (0, 0), 0.03, 1, 0)])
