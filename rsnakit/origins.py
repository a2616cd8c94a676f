"""What differs between the sites and machines that images come from: their size, their window, and how bright they come out."""

from functools import partial

import numpy as np
import pandas as pd

from rsnakit import env
from rsnakit.dicom import DicomError
from rsnakit.prepare import PreprocessConfig, prepare
from rsnakit.store_formats import MAX_VALUE
from rsnakit.workers import over_items

FROM = ("site_id", "machine_id")
SAID = ["rows", "columns", "window_center", "window_width"]  # by the header


def measure(
    table: pd.DataFrame,
    headers: pd.DataFrame,
    config: PreprocessConfig,
    each: int = 6,
    n_jobs: int = 0,
    seed: int = 0,
) -> pd.DataFrame:
    """Headers beside where their images come from, and the brightness of a few of each machine.

    Args:
        table: a row an image, as `load_table` gives it.
        headers: of some of them, as `headers.scan_headers` gives it.
        config: how the images are prepared whose brightness is measured.
        each: so many images of each machine of each site are prepared, or all that it has.
        n_jobs: processes; 0 means all cores.
        seed: of the draw.

    Returns:
        A row a header that could be read, on the table's index: site_id and machine_id, where the table has them; rows and
        columns (pixels), window_center and window_width (stored units) as the header has them; and `brightness`, the median
        shade of what is not background in the prepared image, from 0 to 1: NaN where it was not drawn or could not be read.
    """
    read = headers[headers["error"].isna()]
    names = [name for name in FROM if name in table]
    found = table.loc[read.index, names].join(read[SAID])
    shuffled = found.iloc[np.random.default_rng(seed).permutation(len(found))]
    drawn = shuffled.groupby([shuffled[name].astype(str) for name in names]) if names else shuffled
    files = [(label, str(table.at[label, "path"])) for label in drawn.head(each).index]
    shades = {item[0]: shade for item, shade in over_items(partial(_brightness, config), files, n_jobs or env.cores())}
    return found.assign(brightness=pd.to_numeric(pd.Series(shades, dtype=object), errors="coerce"))


def _brightness(config: PreprocessConfig, item: tuple[object, str]) -> float:
    try:
        image = prepare(item[1], config).image
    except DicomError:  # named where the store is made
        return np.nan
    return float(np.median(image[image > 0])) / MAX_VALUE if image.any() else np.nan
