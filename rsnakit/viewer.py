"""A patient's views side by side, to be picked in JupyterLab."""
