"""rsnakit.leaks: what gives the label away is found, by values known from elsewhere, and stops a training."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from rsnakit import data, engine, folds, leaks, metrics, models, runs
from rsnakit.engine import TrainConfig
from rsnakit.env import RunConfig
from rsnakit.models import ModelConfig
from rsnakit.preprocess import PreprocessConfig
from rsnakit.tables import TableError

KNOWN = leaks.TEST_COLUMNS


def images(n: int = 400, seed: int = 0, **columns: object) -> tuple[pd.DataFrame, pd.Series]:
    """A table with an image a patient, a quarter with cancer, and its folds, four in turn."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {"patient_id": [str(i) for i in rng.permutation(n) + 1000], "cancer": np.arange(n) // 4 % 4 == 0}
    )
    table["image_id"] = [str(i) for i in rng.permutation(n) + 5000]
    table = table.assign(
        cancer=table["cancer"].astype(int), laterality="L", view="CC", breast_id=table["patient_id"] + "_L"
    )
    return table.assign(**columns), pd.Series(np.arange(n) % 4, name="fold")


def unknown(table: pd.DataFrame) -> pd.Series:
    return pd.Series("", index=table.index)


# ---- columns


def test_birads_of_the_original_by_hand():
    """The competition's numbers of images: by site and BI-RADS, in all and with cancer; AUCs worked out from these alone."""
    cells = {
        (1, 0.0): (8249, 664),
        (1, 1.0): (15772, 0),
        (1, 2.0): (2265, 0),
        (1, None): (3233, 0),
        (2, None): (25187, 494),
    }
    table = pd.concat(
        pd.DataFrame({"site_id": site, "BIRADS": birads, "cancer": np.arange(n) < sick})
        for (site, birads), (n, sick) in cells.items()
    ).reset_index(drop=True)
    table = table.assign(patient_id=table.index.astype(str), cancer=table["cancer"].astype(int))
    found = leaks.column_aucs(table, KNOWN, pd.Series(table.index % 4)).loc["BIRADS"]
    # Rates 664/8249 > 494/28420 > 0. Without cancer: 7585 have 0, 27926 none, 18037 have 1 or 2.
    pooled = (664 * (27926 + 18037 + 7585 / 2) + 494 * (18037 + 27926 / 2)) / (1158 * 53548)
    assert pooled == pytest.approx(0.788, abs=0.0005)  # the 0.79 that is known of it
    assert found["auc"] == pytest.approx(pooled, abs=0.002)
    # At site 1 every cancer has 0, as have 7585 of its 28855 others; at site 2 it is missing everywhere.
    assert found["auc site 1"] == pytest.approx(1 - 7585 / 28855 / 2, abs=0.002)
    assert found["auc site 2"] == 0.5
    assert not found["in test"] and found["verdict"] == "leak"


def slow_auc(values: list, labels: list[int], of_fold: list[int]) -> float:
    """Cross-fitted AUC row by row: rates of the other folds, then scikit-learn's AUC of each fold, weighted by its pairs."""
    total = pairs = 0
    for fold in set(of_fold):
        others = [(v, y) for v, y, f in zip(values, labels, of_fold, strict=True) if f != fold]
        overall = sum(y for _, y in others) / len(others) if others else 0.0
        rates, here = [], [y for y, f in zip(labels, of_fold, strict=True) if f == fold]
        for value, f in zip(values, of_fold, strict=True):
            if f == fold:
                same = [y for v, y in others if v == value]
                rates.append((sum(same) + overall) / (len(same) + 1))
        n = sum(here) * (len(here) - sum(here))
        if n:
            total, pairs = total + n * roc_auc_score(here, rates), pairs + n
    return total / pairs if pairs else float("nan")


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 1), st.integers(0, 3), st.sampled_from("12")),
        min_size=2,
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_aucs_are_those_of_a_slow_reference(rows, random):
    random.shuffle(rows)
    values, labels, of_fold, sites = map(list, zip(*rows, strict=True))
    if len(set(of_fold)) == 1:
        of_fold[0] = 1 - min(of_fold[0], 1)
    table = pd.DataFrame({"patient_id": [f"p{i}" for i in range(len(rows))], "site_id": sites, "cancer": labels})
    table = table.assign(column=pd.Series(values, dtype=object))
    sick = pd.Series(of_fold)[table["cancer"] == 1]
    assume((sick.groupby(table["site_id"]).nunique() > 1).all())  # else the folds are not used
    found = leaks.column_aucs(table, KNOWN, pd.Series(of_fold)).loc["column"]
    assert found["auc"] == pytest.approx(slow_auc(values, labels, of_fold), nan_ok=True)
    for site in set(sites) if len(set(sites)) > 1 else ():
        here = [i for i, other in enumerate(sites) if other == site]
        expected = slow_auc(*([column[i] for i in here] for column in (values, labels, of_fold)))
        assert found[f"auc site {site}"] == pytest.approx(expected, nan_ok=True)


def test_a_column_that_says_nothing_is_at_one_half_in_uneven_folds_too():
    """As of held-out machines, each with its own rate of cancer: rates of the other folds are low where the own is high."""
    table, of_fold = images(4000, noise=np.random.default_rng(1).integers(0, 4, 4000), same="x")
    table["cancer"] = (np.random.default_rng(2).random(4000) < 0.05 + 0.25 * (of_fold == 0)).astype(int)
    found = leaks.column_aucs(table, KNOWN, of_fold)["auc"]
    assert found["same"] == 0.5
    assert found["noise"] == pytest.approx(0.5, abs=0.04)  # twice the error of an AUC of 430 against 3,570
    others = table["cancer"].groupby(of_fold).transform(lambda own: (table["cancer"].sum() - own.sum()) / 3000)
    assert roc_auc_score(table["cancer"], others) < 0.35  # what pairs over all folds would have come to


TELLING = {
    "a category": lambda cancer, n: np.where(cancer == 1, "A", "B"),
    "missing or not": lambda cancer, n: np.where(cancer == 1, np.nan, n),
    "present or not": lambda cancer, n: pd.Series(np.where(cancer == 1, "x", None), dtype=object),
    "numbers": lambda cancer, n: 1000.0 * cancer + n,
    "few numbers": lambda cancer, n: n % 3 + 3 * cancer,
    "numbers as text": lambda cancer, n: [str(10**9 * c + i) for c, i in zip(cancer, n, strict=True)],
    "texts in order": lambda cancer, n: [f"{'zy'[c]}.{i:04}" for c, i in zip(cancer, n, strict=True)],
    "a boolean": lambda cancer, n: cancer == 1,
}


@pytest.mark.parametrize("how", TELLING)
def test_what_tells_of_cancer_is_found_in_any_kind_of_column(how):
    table, of_fold = images()
    table["column"] = TELLING[how](table["cancer"].to_numpy(), np.random.default_rng(0).permutation(400))
    there, lacking = (leaks.column_aucs(table, test, of_fold).loc["column"] for test in ((*KNOWN, "column"), KNOWN))
    assert there["auc"] == lacking["auc"] > 0.97
    assert (there["verdict"], lacking["verdict"]) == ("suspicious", "leak")
    assert there["in test"] and not lacking["in test"]


def test_ids_that_were_given_by_label_are_found():
    table, of_fold = images()
    honest = leaks.column_aucs(table, KNOWN, of_fold)
    assert honest["auc"][["patient_id", "image_id"]].between(0.35, 0.65).all()
    assert (honest["verdict"] == "").all() and set(honest.index) == {"patient_id", "image_id", "laterality", "view"}
    table["image_id"] = [str(n) for n in table["cancer"].rank(method="first").astype(int) + 68_490]
    found = leaks.column_aucs(table, KNOWN, of_fold)
    assert found.loc["image_id", "verdict"] == "suspicious" and found.index[0] == "image_id"


def test_what_tells_within_one_site_alone_is_found():
    """A column that means the opposite at the other site says nothing when both are put together."""
    table, of_fold = images(800)
    table["site_id"] = np.arange(800) // 16 % 2 + 1
    table["implant"] = np.where(table["site_id"] == 1, table["cancer"], 1 - table["cancer"])
    table["implant"] = table["implant"].where(np.arange(800) % 8 != 1, 1 - table["implant"])
    found = leaks.column_aucs(table, KNOWN, of_fold).loc["implant"]
    assert found["auc"] < 0.75 < 0.8 < min(found["auc site 1"], found["auc site 2"])
    assert found["verdict"] == "suspicious"


def test_a_leak_is_one_whatever_its_auc():
    table, of_fold = images(density="B", BIRADS=np.nan)
    found = leaks.column_aucs(table, KNOWN, of_fold)
    assert found.loc[["density", "BIRADS"], "auc"].tolist() == [0.5, 0.5]
    assert found.loc[["density", "BIRADS"], "verdict"].tolist() == ["leak", "leak"]


def test_columns_of_the_kit_are_not_looked_at_and_the_order_of_rows_does_not_matter():
    table, of_fold = images(path="x", fold=0, score=0.5, age=np.random.default_rng(3).integers(30, 90, 400))
    found = leaks.column_aucs(table, KNOWN, of_fold)
    assert not {"path", "breast_id", "cancer", "fold", "score"} & set(found.index)
    shuffled = table.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(
        leaks.column_aucs(shuffled, KNOWN, of_fold[shuffled.index]).sort_index(), found.sort_index()
    )


def test_of_a_single_fold_patients_are_dealt_out():
    table, _ = images(age=np.random.default_rng(0).integers(30, 90, 400))
    table["biopsy"] = table["cancer"]
    found = leaks.column_aucs(table, KNOWN, pd.Series(2, index=table.index))
    assert found.loc["biopsy", "auc"] == 1.0 and 0.35 < found.loc["age", "auc"] < 0.65
    one_class = leaks.column_aucs(table.assign(cancer=0), KNOWN, pd.Series(2, index=table.index))
    assert one_class["auc"].isna().all()


def test_a_site_whose_cancers_are_all_in_one_fold_is_looked_at_all_the_same():
    """As with held-out machines: the other folds know of no cancer at that site."""
    table, _ = images(800)
    table["site_id"] = np.arange(800) // 16 % 2 + 1
    table["implant"] = np.where(table["site_id"] == 2, table["cancer"], 0)
    by_machine = pd.Series(np.where(table["site_id"] == 2, 0, np.arange(800) % 3 + 1 - (table["cancer"] == 1)))
    assert by_machine[(table["site_id"] == 2) & (table["cancer"] == 1)].nunique() == 1
    found = leaks.column_aucs(table, KNOWN, by_machine).loc["implant"]
    assert found["auc site 2"] == 1.0 and found["auc site 1"] == 0.5 and found["verdict"] == "suspicious"


# ---- duplicates


def test_duplicates_by_hand():
    # V04
    rows = [
        ("1", "10", 0, 0, "a"), ("1", "11", 0, 0, "b"), ("2", "20", 1, 1, "b"), ("2", "21", 1, 1, "c"), ("3", "30", 0, 0, "d"),
        ("3", "31", 0, 0, "d"), ("4", "40", 0, 1, ""), ("5", "50", 0, 1, ""), ("6", "60", 1, 0, "c"), ("7", "70", 1, 1, "c"),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["patient_id", "image_id", "cancer", "fold", "content"], index=range(5, 15))
    of_fold, content = table.pop("fold"), table.pop("content")
    found = leaks.duplicates(table.assign(site_id=1), content, of_fold)
    assert found["image_id"].tolist() == ["11", "20", "21", "60", "70", "30", "31"]  # by content, then as they come
    assert found["content"].tolist() == list("bbcccdd") and found["fold"].tolist() == [0, 1, 1, 0, 1, 0, 0]
    assert found["same patient"].tolist() == [False] * 5 + [True] * 2
    assert found["same fold"].tolist() == [False] * 5 + [True] * 2
    assert found["same label"].tolist() == [False] * 2 + [True] * 5
    assert (
        leaks.duplicates(table, content.replace("", np.nan), of_fold)["image_id"].tolist() == found["image_id"].tolist()
    )
    none = leaks.duplicates(table, unknown(table), of_fold)
    assert none.empty and list(none.columns)[-3:] == ["same patient", "same fold", "same label"]


def test_the_demos_duplicate_is_found_by_the_stores_hashes(competition, store, table):
    notes = json.loads((competition / "demo.json").read_text())["oddities"]
    (planted,) = [image_id for image_id, what in notes.items() if what == "duplicate"]
    found = leaks.duplicates(table, leaks.content_of(table, store), data.make_folds(table, 2, 0))
    assert planted in found["image_id"].tolist() and len(found) == 2
    assert found[["same patient", "same fold", "same label"]].all(axis=None)
    first, second = store.rows_of(found["image_id"])
    np.testing.assert_array_equal(store[int(first)], store[int(second)])


def test_content_comes_with_the_tables_rows(store, table):
    some = table.iloc[[7, 3]]
    expected = store.index.set_index("image_id")["content"][some["image_id"]].tolist()
    found = leaks.content_of(some, store)
    assert found.tolist() == expected and found.index.tolist() == [7, 3] and len(set(expected)) == 2
    assert leaks.content_of(some, None).tolist() == ["", ""]


# ---- the checks together


def test_nothing_wrong_is_said_in_a_line(capsys):
    table, of_fold = images(biopsy=0)
    content = pd.Series([f"{i:016x}" for i in range(400)])
    leaks.check(table, of_fold, content, KNOWN, ("view",))
    assert capsys.readouterr().out == (
        "leak checks: 400 patients, none on two sides; no two images are equal\n"
        "leak checks: test.csv lacks biopsy: never to be an input\n"
    )


def test_a_patient_on_both_sides_stops():
    # V04
    table, of_fold = images()
    table.loc[1, "patient_id"] = table.loc[0, "patient_id"]
    with pytest.raises(TableError, match=r"is in folds \[0, 1\], and 1 patients"):
        leaks.check(table, of_fold, unknown(table), KNOWN)


def test_a_leak_among_the_inputs_stops():
    table, of_fold = images(BIRADS=1.0, density="B")
    with pytest.raises(TableError, match=r"^BIRADS, density: the model is fed with this, and test\.csv lacks it"):
        leaks.check(table, of_fold, unknown(table), KNOWN, ("view", "density", "BIRADS"))
    leaks.check(table, of_fold, unknown(table), (*KNOWN, "density"), ("view", "density"))
    with pytest.raises(TableError, match=r"^view: "):  # of another competition, whose test set has no views
        leaks.check(table, of_fold, unknown(table), ("patient_id", "image_id"), ("view",))


def test_what_is_suspicious_or_equal_is_named(capsys):
    # V04: a set whose images are there again under other ids
    table, of_fold = images()
    table["age"] = 40.0 + 30 * table["cancer"]
    content = pd.Series([f"{i:016x}" for i in range(400)])
    content[[0, 1]] = "same"  # of two patients, both with cancer, in folds 0 and 1
    content[[2, 398]] = "other"  # with cancer and without, both in fold 2
    content[5:8] = ""
    leaks.check(table, of_fold, content, KNOWN)
    lines = capsys.readouterr().out.splitlines()
    ids = [f"{table['image_id'][i]} of patient {table['patient_id'][i]}" for i in range(400)]
    assert lines[0].endswith(
        "; 4 images equal another one in every pixel (of 3 of 400 images the pixels are not known)"
    )
    assert lines[1].startswith("NOTE: leak checks: 2 equal images of different patients in different folds")
    assert lines[1].endswith(f"such as {ids[0]} and {ids[1]}")
    assert lines[2].startswith("NOTE: leak checks: 2 equal images with different labels")
    assert lines[2].endswith(f"such as {ids[2]} and {ids[398]}")
    assert lines[3].startswith("NOTE: leak checks: AUC above 0.8 by one column alone") and "age (1.00)" in lines[3]
    assert lines[3].endswith("100 patients have cancer: of few, it may be chance")
    assert len(lines) == 4
    leaks.check(table, of_fold, unknown(table), KNOWN)
    assert "equal images not looked for" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["test.csv", "nothing", "an empty file", "no folder"])
def test_columns_of_the_test_set(tmp_path, there):
    if there == "test.csv":
        (tmp_path / "test.csv").write_text("patient_id, image_id,view\n1,2,CC\n")
    elif there == "an empty file":
        (tmp_path / "test.csv").touch()
    found = leaks.test_columns(None if there == "no folder" else tmp_path)
    assert found == (("patient_id", "image_id", "view") if there == "test.csv" else KNOWN)


def test_columns_of_the_demos_test_set(competition):
    assert leaks.test_columns(competition) == KNOWN  # the demo is in the real layout


# ---- before training


def begin(tmp_path, store, table, train: TrainConfig, model: ModelConfig):
    pixels = PreprocessConfig(**store.manifest["preprocess"])
    plain = runs.settings_of(pixels, model, train, data.fingerprint(table), is_demo=True, debug=False)
    return runs.open_run(tmp_path, "", plain)


MODEL = ModelConfig(backbone="test_resnet", weights="none")
RUN = RunConfig(device="cpu", fold="0", num_workers=0)


def test_a_training_stops_before_it_begins(tmp_path, store, table, competition, monkeypatch):
    # V04
    config = TrainConfig(n_folds=2, epochs=1)
    folder = begin(tmp_path, store, table, config, MODEL)
    arguments = (table, store, MODEL, config, RUN, folder, engine.PLAIN, competition)
    with monkeypatch.context() as patched:
        patched.setattr(models, "inputs_of", lambda model: ("view", "BIRADS"))
        with pytest.raises(TableError, match="BIRADS: the model is fed with this"):
            engine.fit_folds(*arguments)
    with monkeypatch.context() as patched:
        by_image = pd.Series(np.arange(len(table)) % 2, index=table.index)
        patched.setattr(data, "make_folds", lambda *settings: by_image)
        with pytest.raises(TableError, match=r"is in folds \[0, 1\]"):
            engine.fit_folds(*arguments)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]


@pytest.mark.parametrize("split", folds.SPLITS)
def test_a_training_has_the_folds_that_its_settings_name(tmp_path, store, table, monkeypatch, capsys, split):
    config, seen = TrainConfig(n_folds=2, epochs=1, split=split), []
    folder = begin(tmp_path, store, table, config, MODEL)
    monkeypatch.setattr(engine, "fit", lambda fold, table, of_fold, *others: seen.append(of_fold) or True)
    engine.fit_folds(table, store, MODEL, config, RUN, folder)
    (of_fold,) = seen
    assert (of_fold.groupby(table["machine_id"]).nunique().max() == 1) == (split == "machine")
    assert capsys.readouterr().out.startswith("leak checks: 16 patients, none on two sides; 2 images equal another one")
    other = {"patient": "machine", "machine": "patient"}[split]
    with pytest.raises(runs.RunError, match=rf"train\.split: '{split}' before, '{other}' now"):
        engine.fit_folds(table, store, MODEL, dataclasses.replace(config, split=other), RUN, folder)


def test_several_processes_are_checked_once_by_the_one_that_starts_them(tmp_path, store, table, monkeypatch, capsys):
    config = TrainConfig(n_folds=2, epochs=1)
    folder = begin(tmp_path, store, table, config, MODEL)
    monkeypatch.setattr(engine, "fit", lambda *arguments: True)
    monkeypatch.setattr(engine.distributed, "world", lambda: 2)
    engine.fit_folds(table, store, MODEL, config, RUN, folder)
    assert capsys.readouterr().out == ""


def test_what_a_model_is_fed_with():
    assert [models.inputs_of(dataclasses.replace(MODEL, views=views)) for views in ("none", "mean", "max", "attention")] == [
        (), (), (), ("view",)
    ]  # fmt: skip
    assert models.inputs_of(dataclasses.replace(MODEL, aux=("birads", "density"))) == ()  # learnt, and not fed


# ---- sites


def test_a_score_that_tells_sites_apart_and_nothing_else():
    """Site 1 has cancer in 40 %, site 2 in 10 %: known from the counts alone."""
    n = 500
    breasts = pd.DataFrame({"patient_id": [f"{i}" for i in range(2 * n)], "site_id": np.repeat([1, 2], n)})
    breasts["cancer"] = np.r_[np.arange(n) < 200, np.arange(n) < 50].astype(int)
    score = np.where(breasts["site_id"] == 1, 0.7, 0.3)
    found = leaks.within_sites(breasts.assign(score=score), n=50)
    pooled = (
        0.8 * 300 / 750 / 2 + 0.8 * 450 / 750 + 0.2 * 450 / 750 / 2
    )  # of positives 200 are of site 1, of the others 300
    assert found.index.tolist() == ["all sites", "site 1", "site 2", "site alone"]
    np.testing.assert_allclose(found["AUC"], [pooled, 0.5, 0.5, pooled])
    assert found["breasts"].tolist() == [1000, 500, 500, 1000] and found["with cancer"].tolist() == [250, 200, 50, 250]
    shown = found.loc[["site 1", "site 2"], ["95 % from", "to"]]
    assert (shown == 0.5).all(axis=None)

    rng = np.random.default_rng(0)
    real = breasts.assign(score=rng.random(2 * n) + breasts["cancer"])  # tells nothing of the site but by cancer
    found = leaks.within_sites(real, n=50)
    for site in (1, 2):
        rows = real[real["site_id"] == site]
        assert found.loc[f"site {site}", "AUC"] == pytest.approx(roc_auc_score(rows["cancer"], rows["score"]))
        expected = metrics.bootstrap(rows["cancer"], rows["score"], rows["patient_id"], metrics.auc, n=50)
        assert tuple(found.loc[f"site {site}", ["AUC", "95 % from", "to"]]) == pytest.approx(tuple(expected))
    assert found.loc["site alone", "AUC"] == pytest.approx(pooled)


def test_a_site_of_one_class_and_a_missing_column():
    breasts = pd.DataFrame({"patient_id": list("abcd"), "cancer": [0, 1, 0, 0], "score": [0.1, 0.9, 0.2, 0.3]})
    with pytest.raises(ValueError, match="column site_id missing"):
        leaks.within_sites(breasts)
    found = leaks.within_sites(breasts.assign(site_id=[1, 1, 2, 2]), n=20)
    assert found.loc["site 1", "AUC"] == 1.0 and np.isnan(found.loc["site 2", "AUC"])
