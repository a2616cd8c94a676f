"""rsnakit: from mammography DICOM files to a Kaggle submission.

Importing it imports nothing heavy; its modules are imported one by one.
"""

import os

__version__ = "0.1.0"

# OpenMP's threads spin while they wait. Where something else wants the cores too (loader processes, a second notebook,
# a shared machine) that slows training several times over; asleep they cost next to nothing. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
