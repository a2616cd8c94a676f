"""Where the breast is in a frame: its box, and the side it lies at. Asks the pixels alone, never the header.

It is looked for on a small copy, and no step prefers a side: a mirrored frame gives the mirrored box. Lengths are shares
of the copy's longer side; contrast is what the brightest hundredth of the pixels has over the background.
"""

import dataclasses

import cv2
import numpy as np

SEARCH_SIDE = 256  # the breast is looked for on a copy whose longer side has so many pixels
Box = tuple[int, int, int, int]  # top, left, bottom, right: pixels, the last two behind the last row and column


@dataclasses.dataclass(frozen=True)
class Breast:
    """Where a breast is: its `box`, and whether it lies at the right edge of the frame."""

    box: Box
    is_right: bool


def find_breast(display: np.ndarray) -> Box:
    """The box (top, left, bottom, right) of the breast in display values, (H, W) float32 in [0, 1]."""
    return locate_breast(shrink(display), display.shape).box


def shrink(pixels: np.ndarray) -> np.ndarray:
    """A copy of (H, W) pixels whose longer side has `SEARCH_SIDE`, by averaging; smaller ones are returned as they are.

    The copy of a mirrored frame is the mirrored copy, to the last bit.
    """
    scale = SEARCH_SIDE / max(pixels.shape)
    if scale >= 1:
        return pixels
    height, width = (max(1, round(length * scale)) for length in pixels.shape)
    rows = cv2.resize(pixels, (pixels.shape[1], height), interpolation=cv2.INTER_AREA).astype(np.float32)
    # Averaging goes from left to right and rounds on its way: so it is done from either side.
    there, back = (cv2.resize(r, (width, height), interpolation=cv2.INTER_AREA) for r in (rows, rows[:, ::-1].copy()))
    small = (there + back[:, ::-1]) / 2
    return (small if pixels.dtype.kind == "f" else np.rint(small)).astype(pixels.dtype)


def locate_breast(small: np.ndarray, shape: tuple[int, int]) -> Breast:
    """The breast in a frame of `shape` (rows, columns), on `small`, its display values on a copy as `shrink` makes it.

    Where nothing stands out from a background, or where there is no background, the box is the whole frame. The side is
    asked of the pixels, since ImageLaterality can be wrong.
    """
    mask = breast_mask(small)
    spans = []
    for length, filled in zip(shape, (mask.any(axis=1), mask.any(axis=0)), strict=True):
        first, last = np.flatnonzero(filled)[[0, -1]].tolist() if filled.any() else (0, len(filled) - 1)
        spans.append((first * length // len(filled), -(-(last + 1) * length // len(filled))))
    (top, bottom), (left, right) = spans
    return Breast((top, left, bottom, right), _lies_right(mask))


def breast_mask(small: np.ndarray) -> np.ndarray:
    """Where the breast is, as bool on a small copy of the frame; nowhere if nothing stands out from a background.

    The mask of a copy much smaller than `SEARCH_SIDE` is a whole number of times as large.

    Bright borders are cut off, the background is fitted and taken off, what stands out is freed from gaps, stripes and
    labels, and the largest thick piece that is left is the breast.
    """
    times = max(1, SEARCH_SIDE // max(small.shape))  # what has a pixel in a tiny frame is no speck there
    small = small.repeat(times, axis=0).repeat(times, axis=1) if times > 1 else small
    small = cv2.medianBlur(np.ascontiguousarray(small, np.float32), 3)  # takes lines of one pixel, salt and pepper
    mask = np.zeros(small.shape, bool)
    dark, light = np.quantile(small[_some(small)], [0.01, 0.99])
    sides = small, small[::-1], small.T, small.T[::-1]
    top, bottom, left, right = (_border(lines, dark, light - dark) for lines in sides)
    inside = slice(top, len(small) - bottom), slice(left, small.shape[1] - right)
    shades = small[inside] - _background(small[inside])
    some = _some(shades)
    contrast = np.quantile(shades[some], 0.99)
    for lines in (shades, shades[::-1], shades.T, shades.T[::-1]):
        _take_off_fog(lines, contrast)
    # The background's noise shows on its dark side, where no tissue mixes in.
    below = shades[some][(shades[some] <= 0) & (shades[some] > -0.1 * contrast)]
    noise = -1.48 * np.median(below) if below.size else np.inf  # a Gaussian's deviation, from its dark half
    if contrast < 0.001 or noise > 0.025 * contrast:  # a blank image, or tissue from edge to edge
        return mask
    level = max(4 * noise, 0.025 * contrast)
    found = _without_thin((shades > level).astype(np.uint8))
    found = _without_gaps(_without_gaps(found).T).T
    found = _without_stripes(_without_stripes(found).T).T
    found[_labels(found, (shades > 0.65 * contrast) & (found > 0))] = 0
    body = _body(found)
    mask[inside] = body | _dark_rim(body, shades < -level, shades < -0.5 * (small[inside] - shades))
    return mask


def _border(lines: np.ndarray, dark: float, span: float) -> int:
    """How many of the lines (N, length) from an edge of the frame inwards are a bright border of one shade."""
    lines = lines[: max(1, min(round(0.12 * max(lines.shape)), len(lines) // 2))]
    shade = np.median(lines[0])
    alike = np.mean(np.abs(lines - shade) < 0.06 * span, axis=1)  # share of a line
    end = int(np.argmax(alike < 0.6))
    ends_at_once = alike[end : end + 4].min() < 0.5  # tissue changes slowly
    return end if shade > dark + 0.15 * span and alike[0] > 0.85 and ends_at_once else 0


def _some(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of about every third row and column, enough for statistics; the same pixels seen from either side."""
    step = -(-3 * max(pixels.shape) // SEARCH_SIDE)
    halves = (np.arange(0, (n + 1) // 2, step) for n in pixels.shape)
    return np.ix_(*(np.r_[half, n - 1 - half] for half, n in zip(halves, pixels.shape, strict=True)))


def _background(small: np.ndarray) -> np.ndarray:
    """The background's shade at each pixel, (H, W) float32: a plane through the darkest shade that is common.

    Pixels with even surroundings count more, since a background is smoother than tissue.
    """
    low, span = small.min(), max(np.ptp(small), np.float32(1e-6))
    codes = ((small - low) * (255 / span)).astype(np.uint8)
    uneven = cv2.blur(cv2.absdiff(codes, cv2.blur(codes, (5, 5))), (5, 5))
    rows, columns = some = _some(small)
    crowd = np.bincount(codes[some].ravel() // 2, 1 / (uneven[some].ravel() + 2.0), 128)
    crowd = np.convolve(crowd, [1, 2, 3, 2, 1], mode="same")
    peak = np.argmax(crowd > 0.25 * crowd.max())  # the darkest that is common; the top of its hill is just behind
    peak += np.argmax(crowd[peak : peak + 8])
    y, x = ((np.arange(n, dtype=np.float32) - (n - 1) / 2) / n for n in small.shape)  # from the middle
    terms = np.stack([t.ravel() for t in np.broadcast_arrays(1.0, y[rows], x[columns])], 1)
    values, plane, close = small[some].ravel(), np.array([low + (peak + 0.5) / 128 * span, 0, 0]), None
    for _ in range(10):  # fitted to what lies close to it, the plane turns until it lies in the background
        before, close = close, np.abs(values - terms @ plane) < 0.04 * span
        if np.count_nonzero(close) < 20 or np.array_equal(close, before):
            break
        chosen = terms.T * close
        plane = np.linalg.lstsq(chosen @ terms, chosen @ values, rcond=None)[0]
        plane[0] += np.median((values - terms @ plane)[close])  # some tissue lies close too
    level, rise, slope = plane.round(6).astype(np.float32)  # a mirrored frame is summed in another order
    return (level + rise * y[:, None]) + slope * x


def _take_off_fog(lines: np.ndarray, contrast: float) -> None:
    """Takes off, in place, a glow that is the same along the first line and falls off inwards, as at the edge of a film."""
    lines = lines[: min(round(0.15 * max(lines.shape)), len(lines) // 2)]
    least = np.sort(lines, axis=1)[:, lines.shape[1] // 10]  # a tenth of each line is background
    least = np.minimum.accumulate(np.maximum(least, 0))
    if len(lines) and least[0] < 0.4 * contrast and least[-1] < 0.03 * contrast:
        lines -= np.clip(lines, 0, least[:, None])


def _without_thin(mask: np.ndarray) -> np.ndarray:
    """Without what a small disc doesn't fit in: scratches, strokes of letters, what is left of a border."""
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * round(0.008 * max(mask.shape)) + 1,) * 2)
    return cv2.morphologyEx(mask, cv2.MORPH_OPEN, disc, borderType=cv2.BORDER_CONSTANT, borderValue=0)


def _without_gaps(mask: np.ndarray) -> np.ndarray:
    """With empty rows between filled ones filled: dead lines would cut a breast in pieces."""
    above, below = _near_rows(mask, cv2.dilate, round(0.022 * max(mask.shape)))
    gap = mask.sum(axis=1) < 0.3 * np.minimum(above.sum(axis=1), below.sum(axis=1))
    return np.where(gap[:, None], mask | (above & below), mask)


def _without_stripes(mask: np.ndarray) -> np.ndarray:
    """With rows that are much fuller than those around them reduced to what is there above or below: bright stripes."""
    reach = round(0.03 * max(mask.shape))
    above, below = _near_rows(mask, cv2.erode, reach)
    count = mask.mean(axis=1, dtype=np.float32)
    least = np.maximum(*_near_rows(count[:, None], cv2.erode, reach))[:, 0]
    full = (count > 0.5) & (count > np.where(count > 0.9, 1.08, 1.5) * least)
    return np.where(full[:, None], mask & (above | below), mask)


def _near_rows(rows: np.ndarray, combine, reach: int) -> list[np.ndarray]:
    """Maximum (cv2.dilate) or minimum (cv2.erode) over the rows just above each row, and over those just below."""
    above = np.repeat([1, 0], (reach + 1, reach + 2)).astype(np.uint8)[:, None]
    rows = np.ascontiguousarray(rows)
    return [
        combine(rows, kernel, borderType=cv2.BORDER_CONSTANT, borderValue=0) for kernel in (above, above[::-1].copy())
    ]


def _labels(mask: np.ndarray, bright: np.ndarray) -> np.ndarray:
    """Bright pieces that border on background more than on tissue, bool: labels, and what of a pacemaker sticks out."""
    grown = cv2.dilate(bright.astype(np.uint8), np.ones((3, 3), np.uint8))
    n, pieces = cv2.connectedComponents(grown, connectivity=4)
    rim, deep = (grown > 0) & ~bright, cv2.erode(mask, np.ones((7, 7), np.uint8))
    around, inside = (np.bincount(pieces[some], minlength=n) for some in (rim, rim & (deep > 0)))
    found = (2 * inside < around)[pieces] & (grown > 0)
    return found & (found.sum() < 0.5 * mask.sum())  # else that is the breast, shown in white


def _body(mask: np.ndarray) -> np.ndarray:
    """The largest thick piece, bool, and what sticks out of it a little: corners and nipple, but no label that touches."""
    radius, unit = 0.065 * min(mask.shape), max(mask.shape)
    core = _largest_piece(_away(1 - mask) > radius)
    if not core.any() or core.all():
        return core
    away = _away(core) - radius
    core = away <= 0
    _, pieces = cv2.connectedComponents(mask, connectivity=4)
    whole = pieces == pieces[np.unravel_index(np.argmax(core), core.shape)]
    n, pieces = cv2.connectedComponents((whole & ~core).astype(np.uint8), connectivity=4)
    far = np.bincount(pieces[away > 0.025 * unit], minlength=n) > 0  # 6 mm of 24 cm
    far[0] = False
    return whole & ~far[pieces]


def _dark_rim(body: np.ndarray, dark: np.ndarray, black: np.ndarray) -> np.ndarray:
    """Thin tissue along the skin that is darker than a bright background, bool; gaps and blacked-out boxes are black."""
    if not (body.any() and dark.any()):
        return np.zeros_like(body)
    rim = dark & ~black & (_away(body) < 0.04 * max(body.shape))
    return cv2.medianBlur(rim.astype(np.uint8), 3) > 0


def _largest_piece(mask: np.ndarray) -> np.ndarray:
    """The largest connected piece of a mask, bool."""
    _, pieces = cv2.connectedComponents(mask.astype(np.uint8), connectivity=4)
    return pieces == np.argmax(np.bincount(pieces[mask])) if mask.any() else mask


def _away(mask: np.ndarray) -> np.ndarray:
    """How far each pixel is from a mask, 0 in it."""
    if not mask.any():
        return np.full(mask.shape, np.inf, np.float32)
    return cv2.distanceTransform((mask == 0).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5)


def _lies_right(mask: np.ndarray) -> bool:
    """Whether the chest wall, where a breast is cut off, is at the right edge."""
    width = mask.shape[1]
    for columns in (max(1, width // 32), width // 2):  # cut loose, or touching both edges: where there is more of it
        left, right = mask[:, :columns].sum(), mask[:, width - columns :].sum()
        if left != right:
            break
    return bool(right > left)
