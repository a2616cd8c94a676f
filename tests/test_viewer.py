"""The viewer: what it shows of a patient is what files, store, scores and models say, by widgets and without."""

import base64
import math

import numpy as np
import pandas as pd
import pytest
from figures import title
from matplotlib.figure import Figure
from small_run import BREASTS, write_run

from rsnakit import heatmaps, metrics, prepare, runs, viewer
from rsnakit.plots_cases import facts
from rsnakit.prepare import PreprocessConfig
from rsnakit.viewer import Cases, Viewer

CUT = 0.5


@pytest.fixture(scope="module")
def fold_of(table) -> dict[str, int]:
    """One fold of all patients but one, whom no trained fold held out."""
    return dict.fromkeys(sorted(table["patient_id"].unique())[:-1], 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory, table, store, fold_of):
    return write_run(tmp_path_factory.mktemp("runs") / "run", table, store, fold_of)


@pytest.fixture(scope="module")
def cases(run, table, store) -> Cases:
    return Cases(run, table, store, threshold=CUT)


@pytest.fixture(scope="module")
def breasts(run) -> pd.DataFrame:
    """A row a breast, by hand."""
    rows = runs.read_oof(run)
    return rows.groupby(["patient_id", "laterality"], sort=False)[["cancer", "score"]].mean().reset_index()


def drawn_of(figure: Figure, table: pd.DataFrame, patient: str) -> list[tuple]:
    """The axes of each of a patient's images, (row of the table, frame, image), in the order in which they are hung."""
    rows = table[table["patient_id"] == patient]
    key = [
        ("CC" not in view, view, laterality == "L")
        for view, laterality in zip(rows["view"], rows["laterality"], strict=True)
    ]
    ordered = [row for _, row in sorted(zip(key, rows.itertuples(), strict=True), key=lambda pair: pair[0])]
    above = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert len(above) == len(ordered) <= 6
    return list(zip(ordered, above, figure.axes[len(above) :], strict=True))


def test_a_figure_shows_frames_boxes_images_scores_and_heat(cases, table, store, run):
    patient = cases.patients().index[0]
    scores = runs.read_oof(run).set_index("image_id")["score"]
    maps = heatmaps.OutOfFold(run, table, store)
    index = store.index.set_index("image_id")
    for window in ("first", "none"):
        figure = cases.figure(patient, window)
        for row, above, below in drawn_of(figure, table, patient):
            assert above.get_title(loc="left") == f"{row.laterality} {row.view}\nscore {scores[row.image_id]:.3g}"
            config = PreprocessConfig(height=64, width=32, window=window)
            np.testing.assert_allclose(above.images[0].get_array(), prepare.preview(row.path, config), atol=1e-6)
            line, (box,) = index.loc[row.image_id], above.patches
            shrunk = above.images[0].get_array().shape[0] / line["source_height"]
            corners = box.get_x() + 0.5, box.get_y() + 0.5, box.get_width(), box.get_height()
            expected = line["left"], line["top"], line["right"] - line["left"], line["bottom"] - line["top"]
            np.testing.assert_allclose(np.divide(corners, shrunk), np.array(expected, float), rtol=1e-6)
            picture, *overlay = below.images
            np.testing.assert_array_equal(picture.get_array(), store[int(store.rows_of([row.image_id])[0])])
            (heat,) = maps.of([row.image_id]).values()
            (over,) = overlay
            np.testing.assert_allclose(over.get_array()[..., 3], 0.5 * heat, atol=1e-6)
        assert figure.axes[0].get_ylabel() == f"frame, window {window}"
    bare = cases.figure(patient, heat=False)
    assert [len(below.images) for _, _, below in drawn_of(bare, table, patient)] == [1] * len(
        drawn_of(bare, table, patient)
    )


def test_the_title_says_how_both_breasts_fared(cases, breasts, run, table, store):
    said_of = set()
    for patient, sides in breasts.groupby("patient_id"):
        if {*zip(sides["cancer"], sides["score"] >= CUT, strict=True)} <= said_of:
            continue
        text = title(cases.figure(patient, heat=False))
        for side in sides.itertuples():
            said_of.add((side.cancer, side.score >= CUT))
            word = {"L": "left", "R": "right"}[side.laterality]
            verdict = {(1, True): ", found", (1, False): ", missed", (0, True): ", a false alarm", (0, False): ""}
            said = verdict[(int(side.cancer), side.score >= CUT)]
            label = "with" if side.cancer else "without"
            assert f"{word} breast {label} cancer scores {side.score:.3g}{said}" in text
        known = facts(table[table["patient_id"] == patient].iloc[0])
        assert text.startswith(f"Patient {patient} ({known}): ") and text.endswith("(threshold 0.5)")
    assert len(said_of) == 4
    without = Cases(run, table, store)  # the run has no summary
    assert math.isnan(without.threshold) and without.kinds == ("cancers", "all")
    text = title(without.figure(breasts["patient_id"].iloc[0], heat=False))
    assert "threshold" not in text and "missed" not in text and "found" not in text
    left_out = table.loc[~table["patient_id"].isin(breasts["patient_id"]), "patient_id"].iloc[0]
    figure = without.figure(left_out)
    assert "breast not scored, as no trained fold held it out" in title(figure)
    assert all("no score" in above.get_title(loc="left") for _, above, _ in drawn_of(figure, table, left_out))


def test_patients_are_listed_by_kind_the_worst_first(cases, breasts):
    order = {
        "missed cancers": breasts[(breasts["cancer"] == 1) & (breasts["score"] < CUT)].sort_values("score"),
        "false alarms": breasts[(breasts["cancer"] == 0) & (breasts["score"] >= CUT)].sort_values("score")[::-1],
        "cancers": breasts[breasts["cancer"] == 1].sort_values("score"),
        "all": breasts,
    }
    assert cases.kinds == tuple(order)
    for kind, expected in order.items():
        assert len(expected) and cases.patients(kind).index.tolist() == list(dict.fromkeys(expected["patient_id"])), (
            kind
        )
    patient, line = next(cases.patients().items())
    assert patient == order["missed cancers"]["patient_id"].iloc[0]
    sides = breasts[breasts["patient_id"] == patient].sort_values("laterality")
    words = [f"{s.laterality} {s.score:.3g}{' cancer' if s.cancer else ''}" for s in sides.itertuples()]
    assert line == f"{patient}:  {', '.join(words)}"


def test_without_cancers_the_first_kind_that_there_is(run, table, store, breasts):
    healthy = breasts[breasts["cancer"] == 0]
    cases = Watched(run, table, store, healthy, threshold=2.0)  # nothing is called
    assert cases.patients().index.tolist() == list(dict.fromkeys(healthy["patient_id"]))
    assert Viewer(cases).kind.options == ("all",)
    nobody = viewer.show(run, table, store, healthy.head(0))
    assert title(nobody) == "No patient was scored by a fold that held it out: no images"


def picture_of(figure: Figure) -> tuple:
    """What tells one of the figures from another: its title, its first label, and how many images lie over one another."""
    return title(figure), figure.axes[0].get_ylabel(), sum(len(ax.images) for ax in figure.axes)


class Watched(Cases):
    """Cases that keep what was asked for, and draw nothing else than that."""

    def figure(self, *arguments) -> Figure:
        self.drawn = [*getattr(self, "drawn", []), arguments]
        figure = Figure(figsize=(2, 1))
        figure.text(0, 0.5, str(arguments))
        return figure


def test_widgets_choose_what_is_drawn(run, table, store):
    cases = Watched(run, table, store, threshold=CUT)
    shown = Viewer(cases)
    first = cases.patients("missed cancers").index[0]
    assert cases.drawn == [(first, "first", True)] and shown.patient.value == first
    pictures = [shown.picture.value]
    assert pictures[0][:8] == b"\x89PNG\r\n\x1a\n" and shown.message.value == ""
    shown.window.value = "none"
    shown.heat.value = False
    shown.kind.value = "false alarms"
    worst, second = cases.patients("false alarms").index[:2]
    assert shown.patient.value == worst and [name for _, name in shown.patient.options] == [
        *cases.patients("false alarms").index
    ]
    shown.patient.value = second
    assert cases.drawn[1:] == [
        (first, "none", True),
        (first, "none", False),
        (worst, "none", False),
        (second, "none", False),
    ]
    assert shown.picture.value != pictures[0]
    # by its id, one that the list does not hold
    other = next(patient for patient in table["patient_id"] if patient not in cases.patients("false alarms").index)
    shown.find.value = f" {other} "
    assert cases.drawn[-1] == (other, "none", False) and shown.patient.value == other and len(cases.drawn) == 6
    shown.find.value = "nobody <b>"
    assert shown.message.value == "There is no patient nobody &lt;b&gt;." and len(cases.drawn) == 6
    shown.heat.value = True
    assert cases.drawn[-1] == (other, "none", True) and shown.message.value == ""


def test_what_goes_wrong_is_said_in_the_viewer(run, table, store, monkeypatch):
    cases = Watched(run, table, store)
    shown = Viewer(cases)
    before = shown.picture.value
    with monkeypatch.context() as patch:
        patch.setattr(cases, "figure", lambda *_: 1 / 0)
        shown.heat.value = False
        assert shown.message.value == "<b>ZeroDivisionError</b>: division by zero" and shown.picture.value == before
    shown.window.value = "none"  # and it goes on
    assert shown.message.value == "" and shown.picture.value != before


def test_it_shows_itself_and_a_picture_where_widgets_are_not_drawn(cases):
    shown = Viewer(cases)
    bundle = shown._repr_mimebundle_(include=None, exclude=None)
    assert bundle[viewer.WIDGET]["model_id"] == shown.widget.model_id
    assert base64.b64decode(bundle["image/png"]) == shown.picture.value


def test_without_a_person_it_is_the_figure_of_the_worst(run, table, store, cases):
    figure = viewer.show(run, table, store, threshold=CUT)  # in a test nobody turns a widget
    assert isinstance(figure, Figure) and picture_of(figure) == picture_of(cases.figure(cases.patients().index[0]))
    other = cases.patients("all").index[-1]
    figures = (
        viewer.show(run, table, None, threshold=CUT, patient_id=other),
        viewer.patient_figure(run, table, None, other, threshold=CUT),
    )
    assert all(title(figure).startswith(f"Patient {other} (") for figure in figures)
    with pytest.raises(ValueError, match=r"the table has no patient 'nobody'; ids are such as '\d+'"):
        viewer.show(run, table, store, patient_id="nobody")


def test_with_a_person_it_is_the_viewer(run, table, store, monkeypatch):
    monkeypatch.setattr(viewer, "Cases", Watched)
    assert isinstance(viewer.show(run, table, store, interactive=True), Viewer)
    monkeypatch.setattr(viewer, "is_interactive", lambda: True)
    shown = viewer.show(run, table, store, patient_id=table["patient_id"].iloc[0])
    assert shown.cases.drawn == [(table["patient_id"].iloc[0], "first", True)]


class Kernel:
    def __init__(self, metadata: dict) -> None:
        self.metadata = metadata

    def get_parent(self) -> dict:
        return {"header": {"msg_type": "execute_request"}, "metadata": self.metadata}


@pytest.mark.parametrize(
    ("shell", "kaggle", "expected"),
    [
        (
            Kernel({"cellId": "fd87611a", "deletedCells": [], "recordTiming": False}),
            "",
            True,
        ),  # as JupyterLab 4.6 sends it
        (Kernel({}), "", False),  # as papermill 2.7 does
        (object(), "", False),  # IPython in a terminal
        (None, "", False),  # Python
        (Kernel({}), "Interactive", True),
        (Kernel({}), "Batch", False),
    ],
)
def test_who_runs_the_cell(monkeypatch, shell, kaggle, expected):
    monkeypatch.setattr(viewer, "get_ipython", lambda: shell)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", kaggle)
    assert viewer.is_interactive() is expected


def test_files_that_are_gone_cost_the_frame_alone(cases, run, table, store, tmp_path):
    moved = table.assign(path=[tmp_path / path.name for path in table["path"]])
    patient = cases.patients().index[0]
    for _, above, below in drawn_of(Cases(run, moved, store).figure(patient), table, patient):
        assert not above.images and len(below.images) == 2
        assert "No such file" in " ".join(above.texts[0].get_text().split())


def test_an_image_without_pixels_says_why(cases, table, store):
    blank = store.index[store.index["status"] == "blank"].iloc[0]
    figure = cases.figure(blank["patient_id"])
    ((_, above, below),) = [
        d for d in drawn_of(figure, table, blank["patient_id"]) if d[0].image_id == blank["image_id"]
    ]
    assert not below.images and not above.patches and above.get_title(loc="left").endswith("no score")
    assert "".join(below.texts[0].get_text().split()) == "".join(f"blank: {blank['reason']}".split())


def test_without_a_store_frames_and_scores_are_shown(run, table, cases):
    patient = cases.patients().index[0]
    for _, above, below in drawn_of(Cases(run, table, None).figure(patient), table, patient):
        assert above.images and not below.images and "score 0" in above.get_title(loc="left")


def test_a_model_of_breasts_has_a_score_a_breast(tmp_path, table, store, fold_of):
    run = write_run(tmp_path / "run", table, store, fold_of, BREASTS)
    cases, score_of = Cases(run, table, store), runs.read_oof(run).set_index(["patient_id", "laterality"])["score"]
    patient = cases.patients().index[0]
    drawn = drawn_of(cases.figure(patient), table, patient)
    for row, above, _ in drawn:
        assert above.get_title(loc="left").endswith(f"score {score_of[patient, row.laterality]:.3g}")
    for side in "LR":  # the views of a breast share one scale
        overlays = [below.images[1].get_array()[..., 3] for row, _, below in drawn if row.laterality == side]
        assert max(a.max() for a in overlays) in (0, pytest.approx(0.5))


def test_the_summarys_threshold_is_taken_where_none_is_given(tmp_path, table, store, fold_of):
    run = write_run(tmp_path / "run", table, store, fold_of)
    (run / "summary.json").write_text('{"threshold": 0.25}')
    assert Cases(run, table, store).threshold == 0.25
    by_mean = metrics.to_breast(runs.read_oof(run))
    pd.testing.assert_frame_equal(Cases(run, table, store).breasts, by_mean)


def test_a_patient_of_many_images_is_drawn_in_bands(cases, table, store):
    patient = cases.patients().index[0]
    rows = table[table["patient_id"] == patient].sample(9, replace=True, random_state=0)
    many = Cases.__new__(Cases)
    many.__dict__.update({**vars(cases), "table": rows.reset_index(drop=True)})
    shown = [ax for ax in many.figure(patient).axes if ax.get_title(loc="left")]
    assert len(shown) == 9 and len({round(ax.get_position().y1, 3) for ax in shown}) == 2
