"""Where the breast is in a frame: its box, and the side it lies at. Asks the pixels alone, never the header."""

import cv2
import numpy as np

SEARCH_SIDE = 256  # the breast is looked for on a copy whose longer side has so many pixels


def find_breast(display: np.ndarray) -> tuple[int, int, int, int]:
    """The box (top, left, bottom, right) of the breast in display values, (H, W) float32 in [0, 1].

    Works on a small copy: the background's level is read from the frame, what is brighter is kept, thin things (letters,
    scratches, frames) are opened away, and the largest piece that is left is the breast. Where nothing stands out the
    whole frame is returned.
    """
    height, width = display.shape
    mask = breast_mask(display)
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return 0, 0, height, width
    y, x = height / mask.shape[0], width / mask.shape[1]
    top, bottom = int(np.floor(rows[0] * y)), int(np.ceil((rows[-1] + 1) * y))
    left, right = int(np.floor(columns[0] * x)), int(np.ceil((columns[-1] + 1) * x))
    return top, left, min(bottom, height), min(right, width)


def breast_is_right(display: np.ndarray) -> bool:
    """Whether the breast lies at the right edge of the frame; asks the pixels, since ImageLaterality can be wrong."""
    mask = breast_mask(display)
    width = mask.shape[1]
    edge = max(1, width // 32)
    left, right = mask[:, :edge].sum(), mask[:, width - edge :].sum()  # the chest wall lies along one edge
    if left == right:  # cut loose, or touching both: then where there is more of it
        half = width // 2
        left, right = mask[:, :half].sum(), mask[:, width - half :].sum()
    return bool(right > left)


def breast_mask(display: np.ndarray) -> np.ndarray:
    """Where the breast is, as bool on a small copy whose longer side has `SEARCH_SIDE` pixels (see `find_breast`)."""
    scale = min(1.0, SEARCH_SIDE / max(display.shape))
    size = (max(1, round(display.shape[1] * scale)), max(1, round(display.shape[0] * scale)))
    small = cv2.resize(display, size, interpolation=cv2.INTER_AREA)
    small = cv2.medianBlur(small, 3)  # lines of one pixel, salt and pepper
    frame = _bright_frame(small)
    level = _background_level(small[~frame] if (~frame).any() else small)
    mask = ((small > level) & ~frame).astype(np.uint8)
    side = max(3, round(min(small.shape) * 0.13)) | 1
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
    core = _largest_piece(cv2.morphologyEx(mask, cv2.MORPH_OPEN, disc))
    if not core.any():
        return mask.astype(bool)
    # Opening rounds corners off and takes the nipple. What hangs together with the core comes back, but for pieces that
    # stick out far: a label that touches the breast.
    _, pieces = cv2.connectedComponents(mask, connectivity=4)
    whole = pieces == pieces[np.unravel_index(np.argmax(core), core.shape)]
    _, pieces = cv2.connectedComponents((whole & (core == 0)).astype(np.uint8), connectivity=4)
    far = np.unique(pieces[cv2.dilate(core, disc) == 0])
    return whole & ~np.isin(pieces, far[far > 0])


def _background_level(values: np.ndarray) -> float:
    """The value above which a pixel is breast and no longer background.

    The background is the darkest crowded level of a mammogram. Its noise is measured on its dark side, where no tissue
    mixes in, and the level is put above both that and a small share of the way to the bright tissue.
    """
    low, high = np.percentile(values, [0.5, 99])
    if high <= low:
        return float(high)
    counts, edges = np.histogram(values, bins=128, range=(low, high))
    smooth = np.convolve(counts, [1, 2, 3, 2, 1], mode="same")
    darker_half = smooth[: len(smooth) // 2]
    peak = edges[int(np.argmax(darker_half))] + (edges[1] - edges[0]) / 2
    below = values[values <= peak]
    spread = float(np.sqrt(np.mean((below - peak) ** 2))) if len(below) else 0.0
    return float(peak + max(4 * spread, 0.04 * (high - peak), 2 * (edges[1] - edges[0])))


def _bright_frame(small: np.ndarray) -> np.ndarray:
    """Rows and columns at the rim that are bright from end to end, as white frames of digitised films are."""
    frame = np.zeros(small.shape, bool)
    bright = small >= 0.97 * small.max()
    for axis in (0, 1):
        full = bright.mean(axis=1 - axis) > 0.95
        if full.all():
            continue
        index = [slice(None), slice(None)]
        first, last = int(np.argmin(full)), len(full) - int(np.argmin(full[::-1]))
        for rim in (slice(0, first), slice(last, None)):
            index[axis] = rim
            frame[tuple(index)] = True
    return frame


def _largest_piece(mask: np.ndarray) -> np.ndarray:
    """The largest connected piece of a mask (uint8, 0 or 1)."""
    n, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    if n < 2:
        return mask
    return (labels == 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))).astype(np.uint8)
