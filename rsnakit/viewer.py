"""A viewer of a run's patients for JupyterLab: all views with crop box, window switch, scores and heat maps.

`show` is the last line of a notebook's cell. Where nobody is there to turn a widget (papermill, nbconvert) it gives the
figure of one patient, as `patient_figure` does.
"""

import base64
import dataclasses
import functools
import html
import io
import math
import os
import sys
from pathlib import Path

import ipywidgets
import numpy as np
import pandas as pd
from IPython import get_ipython
from matplotlib.figure import Figure

from rsnakit import dicom, heatmaps, metrics, plots_cases, runs
from rsnakit.plots_cases import View
from rsnakit.prepare import PreprocessConfig, preview
from rsnakit.store import Store

KINDS = ("missed cancers", "false alarms", "cancers", "all")  # of patients that can be listed
LISTED = 500  # patients of a kind, the worst first; others are found by their id
WIDGET = "application/vnd.jupyter.widget-view+json"


def show(
    run: Path | str,
    table: pd.DataFrame,
    store: Store | None,
    breasts: pd.DataFrame | None = None,
    threshold: float | None = None,
    patient_id: str = "",
    device: str = "cpu",
    interactive: bool | None = None,
) -> "Viewer | Figure":
    """A viewer of the patients that a run's folds held out; without widgets, the figure of one of them.

    Args:
        run: a run's folder.
        table: of the competition's images, as `data.load_table` gives it. Frames are left out whose files are not there.
        store: that holds these images, prepared as the run was trained; None: frames and scores alone are shown.
        breasts: a row a breast: patient_id, laterality, cancer, score; None: the mean of each breast's out-of-fold scores.
        threshold: breasts that score as much or more are called; None: that of the run's summary, if it has one.
        patient_id: who is shown first; empty: the worst, whose cancer has the lowest score.
        device: that heat maps are computed on.
        interactive: whether widgets are wanted; None: where a person runs the cell, as far as that can be told.

    Raises:
        ValueError: the table has no such patient, or the store was prepared with other settings than the run was trained with.
    """
    cases = Cases(run, table, store, breasts, threshold, device)
    if not len(cases.breasts) and not patient_id:
        return plots_cases.patient([], "No patient was scored by a fold that held it out")
    if is_interactive() if interactive is None else interactive:
        return Viewer(cases, patient_id)
    return cases.figure(patient_id or cases.patients().index[0])


def patient_figure(
    run: Path | str, table: pd.DataFrame, store: Store | None, patient_id: str, window: str = "first", **options: object
) -> Figure:
    """All views of a patient as `show` draws them; `options` are further arguments of `Cases`."""
    return Cases(run, table, store, **options).figure(patient_id, window)


def is_interactive() -> bool:
    """Whether a person runs the notebook's cell, and not papermill or nbconvert.

    JupyterLab and VS Code send a cell's code with its name, which papermill and nbconvert do not; Colab and Kaggle's editor
    are known by other marks.
    """
    if "google.colab" in sys.modules or os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Interactive":
        return True
    request = getattr(get_ipython(), "get_parent", dict)()
    return bool(request.get("metadata"))


class Cases:
    """What is known of a run's patients. Arguments are those of `show`.

    Attributes:
        table: a row an image.
        breasts: a row a breast that has a score.
        threshold: NaN where there is none.
        kinds: of `KINDS`, those that `patients` can tell.
    """

    def __init__(
        self,
        run: Path | str,
        table: pd.DataFrame,
        store: Store | None,
        breasts: pd.DataFrame | None = None,
        threshold: float | None = None,
        device: str = "cpu",
    ) -> None:
        scores, summary = runs.read_oof(Path(run)), runs.read_summary(Path(run)) or {}
        self.table, self.store = table, store
        self.breasts = metrics.to_breast(scores) if breasts is None else breasts
        chosen = summary.get("threshold") if threshold is None else threshold
        self.threshold = math.nan if chosen is None else float(chosen)
        self.kinds = KINDS[2:] if math.isnan(self.threshold) else KINDS
        self._config = runs.rebuild(PreprocessConfig, runs.read_config(Path(run))["preprocess"], Path(run))
        self._maps, self._index = None, pd.DataFrame()
        if store is not None:
            self._maps, self._index = heatmaps.OutOfFold(run, table, store, device), store.index.set_index("image_id")
        self._image_scores = scores[scores["image_id"] != ""].set_index("image_id")["score"]
        # What a switch of the window or the heat map does not change is kept, of the last few patients.
        self._frame = functools.lru_cache(32)(self._read_frame)
        self._heat = functools.lru_cache(4)(self._compute_heat)

    def patients(self, kind: str = "") -> pd.Series:
        """Patients of one of `kinds`, or if it is empty of the first that has any, the worst first: a line of text on each, by
        patient_id."""
        for name in [kind] if kind else self.kinds:
            found = self._of_kind(name)
            if len(found):
                break
        sides = found["laterality"] + " " + found["score"].map("{:.3g}".format)
        sides += np.where(found["cancer"] == 1, " cancer", "")
        lines = sides.groupby(found["patient_id"], sort=False).agg(", ".join)
        return lines.index.to_series() + ":  " + lines

    def figure(self, patient_id: str, window: str = "first", heat: bool = True) -> Figure:
        """All views of a patient, see `plots_cases.patient`.

        Raises:
            ValueError: the table has no such patient.
        """
        rows = self._rows(patient_id)
        views = [self._view(row, window, heat) for row in rows.to_dict("records")]
        return plots_cases.patient(views, self._title(patient_id, rows), window)

    def _of_kind(self, kind: str) -> pd.DataFrame:
        """Breasts of the patients of a kind: those for which they are of it, or all, come first and in order."""
        cancer, score = self.breasts["cancer"] == 1, self.breasts["score"]
        if kind == "missed cancers":
            chosen = self.breasts[cancer & (score < self.threshold)].sort_values("score")
        elif kind == "false alarms":
            chosen = self.breasts[~cancer & (score >= self.threshold)].sort_values("score", ascending=False)
        elif kind == "cancers":
            chosen = self.breasts[cancer].sort_values("score")
        else:
            chosen = self.breasts
        order = chosen["patient_id"].drop_duplicates().head(LISTED)
        place = self.breasts["patient_id"].map(dict(zip(order, range(len(order)), strict=True)))
        return (
            self.breasts.assign(place=place).dropna(subset="place").sort_values(["place", "laterality"], kind="stable")
        )

    def _rows(self, patient_id: str) -> pd.DataFrame:
        """A patient's images as they are hung: right beside left breast, those from above first."""
        rows = self.table[self.table["patient_id"] == patient_id]
        if not len(rows):
            raise ValueError(
                f"the table has no patient {patient_id!r}; ids are such as {self.table['patient_id'].iloc[0]!r}"
            )
        from_side = ~rows["view"].astype(str).str.contains("CC")
        order = pd.DataFrame({"view": from_side, "kind": rows["view"].astype(str), "left": rows["laterality"] == "L"})
        return rows.loc[order.sort_values(list(order.columns), kind="stable").index]

    def _view(self, row: dict, window: str, heat: bool) -> View:
        image_id, breast = row["image_id"], self._breast(row["patient_id"], row["laterality"])
        score = self._image_scores.get(image_id, math.nan) if len(self._image_scores) else breast.get("score", math.nan)
        view = View(row["laterality"], str(row["view"]), image_id, row.get("cancer", math.nan), score)
        frame, note = self._frame(row["path"], window)
        view = dataclasses.replace(view, frame=frame, note=note)
        if image_id not in self._index.index:
            return dataclasses.replace(view, note="not in a store")
        line = self._index.loc[image_id]
        if line["status"] != "ok":
            return dataclasses.replace(view, note=f"{line['status']}: {line['reason']}")
        return dataclasses.replace(
            view,
            box=tuple(int(line[edge]) for edge in ("top", "left", "bottom", "right")),
            shape=(int(line["source_height"]), int(line["source_width"])),
            image=self.store[int(self.store.rows_of([image_id])[0])],
            heat=self._heat(row["patient_id"]).get(image_id) if heat else None,
        )

    def _read_frame(self, path: Path, window: str) -> tuple[np.ndarray | None, str]:
        """A frame, or why there is none."""
        try:
            return preview(path, dataclasses.replace(self._config, window=window)), ""
        except (dicom.DicomError, OSError) as error:
            return None, getattr(error, "cause", str(error))

    def _compute_heat(self, patient_id: str) -> dict[str, np.ndarray]:
        return self._maps.of(self.table.loc[self.table["patient_id"] == patient_id, "image_id"])

    def _breast(self, patient_id: str, laterality: str) -> dict:
        same = (self.breasts["patient_id"] == patient_id) & (self.breasts["laterality"] == laterality)
        return self.breasts[same].iloc[0].to_dict() if same.any() else {}

    def _title(self, patient_id: str, rows: pd.DataFrame) -> str:
        found = []
        for laterality in rows["laterality"].unique():
            breast, side = self._breast(patient_id, laterality), {"L": "left", "R": "right"}.get(laterality, laterality)
            if not breast:
                found.append(f"{side} breast not scored, as no trained fold held it out")
                continue
            cancer, called = breast["cancer"] == 1, breast["score"] >= self.threshold
            verdict = ("", ", a false alarm", ", missed", ", found")[2 * cancer + called]
            verdict = "" if math.isnan(self.threshold) else verdict
            found.append(
                f"{side} breast {'with' if cancer else 'without'} cancer scores {breast['score']:.3g}{verdict}"
            )
        facts = plots_cases.facts(rows.iloc[0])
        cut = "" if math.isnan(self.threshold) else f" (threshold {self.threshold:.3g})"
        return f"Patient {patient_id}{f' ({facts})' if facts else ''}: {'; '.join(found)}{cut}"


class Viewer:
    """Widgets over `Cases`: a list of patients by kind, a field to find one by id, switches of window and heat map.

    In a notebook it shows itself; where widgets are not drawn, as in a notebook that was saved and turned to HTML, the
    picture that was drawn first stands in its place.

    Attributes:
        cases: what is shown.
        kind, patient, find, window, heat: the widgets that are turned, each with its `value`.
        message: what is being done, or went wrong.
        picture: the figure as PNG.
        widget: all of them together.
    """

    def __init__(self, cases: Cases, patient_id: str = "") -> None:
        self.cases = cases
        wide = ipywidgets.Layout(width="98%")
        kinds = [kind for kind in cases.kinds if len(cases.patients(kind))] or [KINDS[-1]]
        self.kind = ipywidgets.Dropdown(options=kinds, description="show")
        self.patient = ipywidgets.Select(rows=6, layout=wide)
        self.find = ipywidgets.Text(description="patient", placeholder="id, then Enter", continuous_update=False)
        self.window = ipywidgets.ToggleButtons(options=[("first window", "first"), ("min to max", "none")])
        self.window.style.button_width = "9em"
        self.heat = ipywidgets.Checkbox(value=True, description="heat maps")
        self.message = ipywidgets.HTML()
        self.picture = ipywidgets.Image(
            format="png", layout=ipywidgets.Layout(max_width="100%", align_self="flex-start")
        )
        switches = ipywidgets.VBox([self.kind, self.find, self.window, self.heat])
        lists = ipywidgets.VBox([self.patient, self.message], layout=ipywidgets.Layout(flex="1 1 auto"))
        self.widget = ipywidgets.VBox([ipywidgets.HBox([switches, lists]), self.picture])
        self._drawn, self._listing = None, False
        self.kind.observe(lambda _: self._list(), "value")
        self.find.observe(lambda _: self._find(), "value")
        for switch in (self.patient, self.window, self.heat):
            switch.observe(lambda _: self._draw(), "value")
        self._list(patient_id)

    def _repr_mimebundle_(self, **_: object) -> dict:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        still = base64.b64encode(self.picture.value).decode()
        return {WIDGET: view, "image/png": still, "text/plain": f"viewer of {len(self.cases.breasts)} breasts"}

    def _list(self, patient_id: str = "") -> None:
        """Lists the patients of the chosen kind, and shows one of them, the first if none is asked for."""
        lines = self.cases.patients(self.kind.value)
        options = [(line, name) for name, line in lines.items()]
        if patient_id and patient_id not in lines.index:
            options.insert(0, (f"{patient_id}:  found by id", patient_id))
        self._listing = True  # new options choose one by themselves, too
        self.patient.options = options
        self.patient.value = patient_id or next(iter(lines.index), None)
        self._listing = False
        self._draw()

    def _find(self) -> None:
        wanted = self.find.value.strip()
        if wanted and wanted in set(self.cases.table["patient_id"]):
            self._list(wanted)
        elif wanted:
            self.message.value = f"There is no patient {html.escape(wanted)}."

    def _draw(self) -> None:
        wanted = (self.patient.value, self.window.value, self.heat.value)
        if self._listing or wanted[0] is None or wanted == self._drawn:
            return
        self._drawn = wanted
        self.message.value = f"drawing patient {html.escape(wanted[0])} ..."
        try:
            figure, buffer = self.cases.figure(*wanted), io.BytesIO()
            figure.savefig(buffer, format="png", dpi=figure.dpi)
            self.picture.value, self.message.value = buffer.getvalue(), ""
        except Exception as error:  # a widget's exceptions are not shown in the notebook
            self._drawn = None
            self.message.value = f"<b>{type(error).__name__}</b>: {html.escape(str(error))}"
