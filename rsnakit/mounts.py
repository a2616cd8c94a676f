"""Where Kaggle mounts a competition and data sets, in either layout, and what of the kit is in them.

Two layouts are live: /kaggle/input/<slug> for all, and /kaggle/input/competitions/<slug> beside
/kaggle/input/datasets/<owner>/<slug>.
"""

from pathlib import Path

SLUG = "rsna-breast-cancer-detection"
LAYOUTS = ("flat", "nested")
MANIFEST = "bundle.json"  # in the data set that `bundle` makes
INPUT = "kaggle/input"


def competition_folder(root: Path, layout: str, slug: str = SLUG) -> Path:
    """Where a competition is mounted in one of the LAYOUTS, under a root, which is / on Kaggle."""
    return root / INPUT / slug if layout == "flat" else root / INPUT / "competitions" / slug


def data_set_folder(root: Path, layout: str, owner: str, slug: str) -> Path:
    """Where a data set is mounted in one of the LAYOUTS."""
    return root / INPUT / slug if layout == "flat" else root / INPUT / "datasets" / owner / slug


def bundles(root: Path) -> list[Path]:
    """The folders of mounted data sets that `rsnakit.bundle` made, in either layout.

    One folder deeper counts too: what was uploaded as an archive may have been unpacked into a folder of its name.
    """
    patterns = ("*", "*/*", "datasets/*/*", "datasets/*/*/*")
    found = {file.parent for pattern in patterns for file in (root / INPUT).glob(f"{pattern}/{MANIFEST}")}
    return sorted(found)
