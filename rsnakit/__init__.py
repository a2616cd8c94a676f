"""rsnakit: from mammography DICOM files to a Kaggle submission.

Importing it imports nothing heavy; its modules are imported one by one.
"""

import os

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other. Where something else wants the cores too (loader processes, a
# second notebook, a shared machine) that slows training down, by three quarters with two trainings on two cores, and short
# spins cost little alone (tests/bench/step_time.py). GNU's OpenMP, which torch brings, reads this when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
