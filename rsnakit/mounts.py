"""Where Kaggle mounts a competition and data sets, in either layout, what of the kit is in them, and where Colab and
Paperspace keep files.

Two layouts are live: /kaggle/input/<slug> for all, and /kaggle/input/competitions/<slug> beside
/kaggle/input/datasets/<owner>/<slug>.
"""

import os
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


def keep_work(place: str, root: Path) -> str:
    """Has the work folder kept where it outlives the machine, by $RSNAKIT_WORK, and says in a sentence where that is.

    Args:
        place: as `env.where` names it. On Colab the person's Drive is mounted where it isn't yet, which asks for consent.
        root: / on those machines.

    Raises:
        OSError: there is no Drive or no /storage here.
    """
    if place == "kaggle":
        return "work/ is kept: Kaggle saves /kaggle/working with a version that is run by Save & Run All, up to 20 GB"
    if place == "local":
        return "work/ is kept: it is on this machine"
    folder = _drive(root) if place == "colab" else root / "storage"
    if not folder.is_dir():
        raise OSError(f"work/ cannot be kept: there is no folder {folder} on this machine; set keep_work to False")
    named = os.environ.get("RSNAKIT_WORK", "")
    work = named if Path(named).is_relative_to(folder) else str(folder / "rsnakit")
    os.environ["RSNAKIT_WORK"] = work
    return f"work/ is kept in {work}"


def _drive(root: Path) -> Path:
    """The person's files on Google Drive, mounted if it isn't."""
    mount = root / "content/drive"
    if not os.path.ismount(mount):
        try:
            from google.colab import drive
        except ImportError as error:
            raise OSError(
                f"work/ cannot be kept: no Drive is mounted at {mount}, and google.colab, which mounts it, is not "
                "installed; set keep_work to False"
            ) from error
        drive.mount(str(mount))
    return mount / "MyDrive"
