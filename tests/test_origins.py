"""rsnakit.origins and its figure: what differs between machines, measured on files and drawn."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import same_color
from scipy.stats import f_oneway

from rsnakit import look, origins, plots
from rsnakit.headers import scan_headers
from rsnakit.plots_data import variance_explained
from rsnakit.preprocess import PreprocessConfig, load_image

CONFIG = PreprocessConfig(height=64, width=32)


@pytest.fixture(scope="module")
def scan(table) -> pd.DataFrame:
    return scan_headers(table, n_jobs=1)


def test_measures_a_few_images_of_each_machine(table, scan):
    found = origins.measure(table, scan, CONFIG, each=2, n_jobs=1)
    assert found.index.equals(table.index)
    for name in ("site_id", "machine_id"):
        assert found[name].equals(table[name])
    for name in origins.SAID:
        assert found[name].equals(scan[name])
    drawn = found["brightness"].notna().groupby(found["machine_id"]).sum()
    assert (drawn == np.minimum(found["machine_id"].value_counts(), 2)[drawn.index]).all()
    for row, shade in found["brightness"].dropna().items():
        image = load_image(table.at[row, "path"], CONFIG)
        assert shade == pytest.approx(np.median(image[image > 0]) / 4095)
    again = origins.measure(table, scan, CONFIG, each=2, n_jobs=1)
    pd.testing.assert_frame_equal(again, found)
    assert not origins.measure(table, scan, CONFIG, each=2, n_jobs=1, seed=1)["brightness"].equals(found["brightness"])


def test_measures_what_can_be_read(table, scan, tmp_path):
    few = table.head(6).drop(columns="site_id")
    (tmp_path / "cut.dcm").write_bytes(Path(few["path"].iloc[1]).read_bytes()[:3000])
    few = few.assign(path=[tmp_path / "gone.dcm", tmp_path / "cut.dcm", *few["path"].iloc[2:]])
    headers = scan.head(6).assign(error=["No such file", None, None, None, None, None])
    found = origins.measure(few, headers, CONFIG, each=99, n_jobs=1)
    assert found.index.tolist() == few.index[1:].tolist() and "site_id" not in found
    assert found["brightness"].isna().tolist() == [True, False, False, False, False]
    nowhere = origins.measure(few.drop(columns="machine_id"), headers, CONFIG, each=2, n_jobs=1)
    assert list(nowhere.columns) == [*origins.SAID, "brightness"]
    nothing = origins.measure(few, headers.assign(error="cut short"), CONFIG, n_jobs=1)
    assert nothing.empty and "brightness" in nothing


def measured(n: int = 60) -> pd.DataFrame:
    """Machines 9 and 12 at site 1, 30 at site 2; brightness and windows that are known."""
    rng = np.random.default_rng(0)
    machine = np.repeat([9, 12, 30], n // 3)
    frame = pd.DataFrame({"site_id": np.where(machine == 30, 2, 1), "machine_id": machine})
    frame["brightness"] = 0.2 + 0.01 * machine + rng.normal(0, 0.02, n)
    frame = frame.assign(
        rows=1000 * (1 + frame["site_id"]), columns=2000, window_center=1000.0 + machine, window_width=600.0
    )
    frame.loc[frame["machine_id"] == 12, ["window_center", "window_width"]] = np.nan
    frame.loc[[0, 1], "window_center"] = np.nan
    return frame


def lines_of(ax) -> dict[str, tuple]:
    """What a panel shows of each machine: value, low, high and colour. The first panel alone has their names."""
    found, first = {}, ax.figure.axes[0]
    for y, label in zip(first.get_yticks(), first.get_yticklabels(), strict=True):
        at = [line for line in ax.lines if line.get_ydata()[0] == y]
        if at:
            span, dot = at
            found[label.get_text()] = (dot.get_xdata()[0], *span.get_xdata(), dot.get_color())
    return found


def test_the_figure_shows_each_machines_images():
    images = measured()
    figure = plots.machine_differences(images)
    brightness, frame, window = figure.axes
    labels = [label.get_text() for label in brightness.get_yticklabels()]
    assert labels == ["site 1 (images)", "9 (20)", "12 (20)", "site 2 (images)", "30 (20)"]
    for label, machine in (("9 (20)", 9), ("12 (20)", 12), ("30 (20)", 30)):
        shades = 100 * images.loc[images["machine_id"] == machine, "brightness"]
        assert lines_of(brightness)[label][:3] == pytest.approx([np.median(shades), *np.quantile(shades, [0.1, 0.9])])
        pixels = 6 if machine == 30 else 4
        assert lines_of(frame)[label][:3] == pytest.approx((pixels, pixels, pixels))
        assert same_color(lines_of(brightness)[label][3], look.SITES["2" if machine == 30 else "1"])
    assert lines_of(window)["9 (20)"][:3] == (1009, 709, 1309) and lines_of(window)["30 (20)"][:3] == (1030, 730, 1330)
    assert "12 (20)" not in lines_of(window)
    assert [text.get_text() for text in window.texts] == ["none in 10.0 %", "none known"]  # 2 of the 20 of machine 9
    title = " ".join(figure._suptitle.get_text().split())
    shares = [variance_explained(images["brightness"], images[name]) for name in ("machine_id", "site_id")]
    assert shares[0] > shares[1] > 0.3
    machine, site = (look.percent(share) for share in shares)
    assert (
        title
        == f"The machine accounts for {machine} of the variance of brightness among 60 images, the site alone for {site}"
    )


@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_variance_explained_is_that_of_the_f_test(shift):
    rng = np.random.default_rng(1)
    groups = pd.Series(rng.choice(list("abcd"), 50))
    values = pd.Series(rng.normal(size=50)) + shift * (groups == "a")
    f = f_oneway(*(values[groups == name] for name in "abcd")).statistic
    expected = 3 * (f - 1) / (3 * f + 50 - 4)  # epsilon squared by F, of k - 1 = 3 and N - k degrees of freedom
    assert variance_explained(values, groups) == pytest.approx(max(0, expected))
    assert variance_explained(values.where(values.index != 7), groups) == pytest.approx(
        variance_explained(values.drop(7), groups.drop(7))
    )


def test_variance_of_too_little_is_not_known():
    values = pd.Series([1.0, 2.0, 3.0])
    for groups in (["a"] * 3, ["a", "b", "c"], [None] * 3):
        assert np.isnan(variance_explained(values, pd.Series(groups, dtype=object)))
    assert np.isnan(variance_explained(pd.Series([1.0, 1.0, 1.0]), pd.Series(list("aab"))))
    assert "Too few" in plots.machine_differences(measured().assign(machine_id=None, site_id=None))._suptitle.get_text()


def test_chance_alone_explains_nothing_on_average():
    rng = np.random.default_rng(2)
    found = [variance_explained(pd.Series(rng.normal(size=54)), pd.Series(np.arange(54) // 6)) for _ in range(100)]
    plain = 8 / 53  # what the ratio of sums of squares comes to on average: (k - 1) / (N - 1)
    assert np.mean(found) < 0.4 * plain and np.median(found) < 0.01
