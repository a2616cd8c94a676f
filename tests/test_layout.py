"""The shape of the repository: what stands at its top, which way imports go, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MODULES = {path.stem: path for path in (REPOSITORY / "rsnakit").glob("*.py") if path.stem != "__init__"}
# Imports go down this ladder only; within a rung the later ones may use the earlier.
LADDER = (
    (
        "fields", "device", "files", "blocks", "store_formats", "codestream", "codecs", "bits", "dicomfile", "elements",
        "look", "scoring", "resampling", "operating", "breasts", "metrics", "calibration", "nested", "phantom", "tables",
        "folds", "oof", "versions", "cluster", "workers", "targets", "dryrun", "hooks", "patching", "pooling", "progress",
        "stopping", "failures", "aside", "launching", "distributed", "mixing", "mounts", "packages", "slugs", "wheels",
        "confined", "sandbox", "client", "listing", "shared",
    ),
    (
        "params", "env", "budget", "display", "dicom", "png", "crop", "machines", "taps", "anatomy", "cost", "stems", "flow",
        "pyramid", "surgery", "taming", "families", "necks", "views", "leaks", "subgroups",
    ),
    (
        "store", "augment", "losses", "plots_data", "plots_train", "plots_scores", "plots_groups", "plots_cases", "plots",
        "plots_models", "plots_tricks", "plots_speed", "formats", "checkpoint", "runfiles", "runs", "tally", "history",
        "results", "headers",
        "weights", "states", "chunks", "stepping", "checkpointing",
    ),
    (
        "models", "heatmaps", "samplers", "data", "prepare", "origins", "reading", "batches", "compare", "jobs", "preprocess",
        "demo", "recipe", "loop",
    ),
    (
        "trainer", "rounds", "resuming", "engine", "submission", "ledger", "replica", "crew", "ensemble", "scored", "infer",
        "calling", "evaluation", "comparing", "viewer", "device_memory", "measuring", "trials", "feeding",
        "deciding", "stretches", "tried", "tuning", "speed",
    ),
    ("parcel", "bundle", "hidden", "checking", "outlook", "rehearsal", "publishing", "kaggle"),
)  # fmt: skip
RANK = {name: (rung, place) for rung, names in enumerate(LADDER) for place, name in enumerate(names)}


def imports_of(path: Path) -> set[str]:
    """The kit's modules that a module imports at its top."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rsnakit":
            inner = node.module.split(".")[1:]
            found |= set(inner[:1]) if inner else {alias.name for alias in node.names}
    return found


def test_the_ladder_names_every_module():
    assert set(RANK) == set(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down_the_ladder(name):
    for imported in imports_of(MODULES[name]):
        assert RANK[imported] < RANK[name], f"{name} imports {imported}"


def test_nothing_else_shows_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines() if not line.startswith(".")}
    assert top <= {"notebooks", "rsnakit", "params", "tests", "requirements.txt", "README.md"}


def test_importing_the_package_and_its_parameters_imports_nothing_heavy():
    heavy = "torch", "timm", "pandas", "matplotlib", "albumentations", "pydicom", "cv2", "kaggle"
    code = f"import sys, rsnakit, rsnakit.params, rsnakit.env; print([n for n in {heavy} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_module_of_the_kit_imports_kaggle():
    """Importing it authenticates, and without credentials ends the process."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "kaggle" not in names and getattr(node, "module", None) != "kaggle", name
