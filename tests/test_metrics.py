"""rsnakit.metrics: what the others import stands behind one name, and importing it costs little."""

import subprocess
import sys
from pathlib import Path

from rsnakit import breasts, metrics, operating, resampling, scoring


def test_every_name_is_that_of_one_module():
    assert sorted(metrics.__all__) == sorted(set(metrics.__all__))
    for name in metrics.__all__:
        found = {
            id(getattr(module, name)) for module in (scoring, resampling, operating, breasts) if hasattr(module, name)
        }
        assert found == {id(getattr(metrics, name))}


def test_import_is_light():
    heavy = "{'torch', 'sklearn', 'scipy', 'matplotlib', 'pydicom'}"
    code = f"import sys, rsnakit.metrics; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"
