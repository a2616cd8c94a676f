"""Drawn mammograms: a breast with its tissue, and the findings in it that mean cancer and those that don't.

A picture is a sum of simple parts: the outline of the view, its fat and skin, gland behind the nipple, power-law texture
(the spectrum of mammograms falls with about the third power of frequency: Burgess, Jacobson & Judy, Med. Phys. 28, 2001),
strands towards the nipple and across, veins, findings, quantum noise. Lengths are shares of the frame's height.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import fft, ndimage

VIEWS = ("CC", "MLO", "ML", "LM", "LMO", "AT")
CANCERS = ("spiculated_mass", "microcalcifications")
BENIGN = ("cyst", "coarse_calcification", "vascular_calcification")

# How far gland spreads (lower is wider) and how bright it is over fat, from almost all fat (A) to all gland (D).
_GLAND = {"A": (1.45, 420.0), "B": (0.95, 560.0), "C": (0.45, 680.0), "D": (-0.10, 740.0)}


@dataclass(frozen=True)
class Breast:
    """What all views of one breast share.

    width: nipple to chest wall, as a share of the frame's height. height: half of the chest wall's length in CC.
    nipple: how far the nipple sits below the middle. sag: how far the tip hangs in MLO. profile: the nipple shows at the
    edge. spread: added to the threshold of gland, so that two breasts of one density differ.
    """

    width: float
    height: float
    nipple: float
    sag: float
    profile: bool
    spread: float


@dataclass(frozen=True)
class Finding:
    """Something to see in a breast; `depth` and `angle` put it at the same distance from the nipple in every view.

    kind: one of CANCERS or BENIGN. depth: distance from the nipple, as a share of the distance to the chest wall.
    angle: for CC and for the oblique views, radians off the line from the nipple to the chest wall. radius: share of the
    frame's height. contrast: 1 is typical. seed: its shape.
    """

    kind: str
    depth: float
    angle: tuple[float, float]
    radius: float
    contrast: float
    seed: int


def random_breast(rng: np.random.Generator) -> Breast:
    """A breast of random size and shape."""
    return Breast(
        width=float(rng.uniform(0.40, 0.62)),
        height=float(rng.uniform(0.34, 0.45)),
        nipple=float(rng.normal(0, 0.02)),
        sag=float(rng.uniform(0.0, 0.07)),
        profile=bool(rng.random() < 0.7),
        spread=float(rng.normal(0, 0.15)),
    )


def random_finding(rng: np.random.Generator, kind: str) -> Finding:
    """A finding of one kind, anywhere between nipple and chest wall. Masses and cysts share sizes and contrasts."""
    low, high = {
        "spiculated_mass": (0.028, 0.046),
        "cyst": (0.022, 0.046),
        "microcalcifications": (0.018, 0.035),
        "coarse_calcification": (0.005, 0.010),
        "vascular_calcification": (0.08, 0.14),
    }[kind]
    return Finding(
        kind=kind,
        depth=float(rng.uniform(0.28, 0.75)),
        angle=(float(rng.uniform(-0.5, 0.5)), float(rng.uniform(-0.5, 0.5))),
        radius=float(rng.uniform(low, high)),
        contrast=float(rng.uniform(0.6, 1.13)),
        seed=int(rng.integers(2**31)),
    )


def draw_breast(
    rng: np.random.Generator,
    size: tuple[int, int] = (640, 480),
    view: str = "CC",
    laterality: str = "L",
    density: str = "B",
    findings: Sequence[Finding] = (),
    *,
    breast: Breast | None = None,
    implant: bool = False,
    noise: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one view of a breast: left breasts stand at the left edge of the frame, right ones at the right.

    Args:
        rng: decides everything that is not in `breast` and `findings`: tissue and noise differ from view to view.
        size: (H, W) pixels.
        view: one of VIEWS; all but CC show the pectoral muscle in the upper corner.
        laterality: "L" or "R".
        density: "A" (fat) to "D" (gland).
        findings: drawn in this order.
        breast: shape shared by the views; a random one by default.
        implant: an implant in front of the chest wall.
        noise: quantum noise, 1 is typical, 0 none.

    Returns:
        pixels: (H, W) uint16 of 12 bits, breast bright on a background of 0 (MONOCHROME2).
        mask: (H, W) bool, True on the breast, its muscle included.

    Raises:
        ValueError: an unknown view, laterality, density or kind of finding.
    """
    if view not in VIEWS or laterality not in ("L", "R") or density not in _GLAND:
        raise ValueError(
            f"cannot draw view {view!r}, laterality {laterality!r}, density {density!r}: "
            f"expected one of {VIEWS}, L or R, and A to D"
        )
    for finding in findings:
        if finding.kind not in CANCERS + BENIGN:
            raise ValueError(f"unknown kind of finding {finding.kind!r}: expected one of {CANCERS + BENIGN}")
    height, width = size
    breast = breast or random_breast(rng)
    breadth = min(breast.width, 0.95 * width / height)  # a narrow frame holds a narrow breast
    columns = min(width, -(-round((breadth + 0.03) * height) // 32) * 32)  # beyond is background; 32 suits the FFT
    y = (np.arange(height, dtype=np.float32) / np.float32(height))[:, None]
    x = (np.arange(columns, dtype=np.float32) / np.float32(height))[None]

    depth, nipple_y, muscle = _outline(rng, y, x, breast, breadth, view)
    tissue = _tissue(rng, y, x, depth, breast, breadth, nipple_y, density, muscle)
    if implant:
        bag = 1 - np.hypot((x + 0.05) / (0.62 * breadth + 0.05), (y - nipple_y) / (0.75 * breast.height))
        bag = _step(bag, 0.02) * _step(depth - 0.03, 0.01)
        tissue += bag * (2000 - 0.8 * tissue)
    dots = np.zeros_like(tissue)  # calcifications, one pixel each before they are blurred
    for finding in findings:
        angle = finding.angle[0 if view == "CC" else 1]
        center_y = nipple_y + finding.depth * breadth * np.sin(angle)
        center_x = breadth - finding.depth * breadth * np.cos(angle)
        _add_finding(tissue, dots, finding, y - center_y, x - center_x)
    if findings:
        tissue += ndimage.gaussian_filter(dots, 0.8)

    pixels = tissue * np.clip(depth * height + 0.5, 0, 1)  # the edge of the skin is half covered
    if noise:
        pixels += rng.standard_normal(pixels.shape, dtype=np.float32) * (noise * 0.28) * np.sqrt(np.maximum(pixels, 0))
    beyond = ((0, 0), (0, width - columns))
    pixels = np.pad(np.clip(np.rint(pixels), 0, 4095).astype(np.uint16), beyond)
    mask = np.pad(depth > 0, beyond)
    if laterality == "R":
        pixels, mask = pixels[:, ::-1], mask[:, ::-1]
    return np.ascontiguousarray(pixels), np.ascontiguousarray(mask)


def letters(laterality: str, view: str, size: tuple[int, int]) -> np.ndarray:
    """(H, W) bool, True on letters such as "R CC" in the upper corner away from the breast."""
    height, width = size
    place, anchor = (0.97 * width, "ra") if laterality == "L" else (0.03 * width, "la")
    picture = Image.new("1", (width, height))
    font = ImageFont.load_default(height / 28)
    ImageDraw.Draw(picture).text((place, 0.02 * height), f"{laterality} {view}", 1, font, anchor)
    return np.asarray(picture)


def _outline(rng, y, x, breast, breadth, view):
    """Depth under the skin (H, W), negative outside; the nipple's height; and the muscle (H, W), 0 to 1."""
    if view == "CC":
        center, above, below, sag = 0.5 + rng.normal(0, 0.02), breast.height, breast.height, breast.nipple
    else:  # the oblique views reach up into the armpit, out of the frame
        center = rng.uniform(0.58, 0.66)
        above, below, sag = center * rng.uniform(1.10, 1.2), 0.96 - center, breast.sag
    shifted = y - center - sag * (x / breadth) ** 2
    vertical = np.where(shifted < 0, shifted / above, shifted / below)
    wave = 1 + 0.012 * np.sin(rng.uniform(9, 14) * y + rng.uniform(0, 6))
    radius = np.sqrt((x / (breadth * wave)) ** 2 + vertical**2 + 1e-6)
    slope_y, slope_x = np.gradient(radius)
    slope = np.hypot(slope_y, slope_x) * len(y)
    depth = (1 - radius) / np.maximum(slope, 0.3)  # first-order distance: exact near the skin, where it matters
    nipple_y = center + sag
    if breast.profile:
        depth += np.where(x > 0.7 * breadth, 0.018 * np.exp(-(((y - nipple_y) / 0.016) ** 2)), 0)
    muscle = np.zeros_like(depth)
    if view != "CC":
        reach, fall = rng.uniform(0.30, 0.48) * breadth, rng.uniform(0.45, 0.72)
        reach *= 1.4 if view == "AT" else 0.7 if view in ("ML", "LM") else 1.0
        muscle = _step(1 - x / reach - (y / fall) ** 1.25, 0.025)
    return depth.astype(np.float32), nipple_y, muscle.astype(np.float32)


def _tissue(rng, y, x, depth, breast, breadth, nipple_y, density, muscle):
    """Brightness of everything but findings, (H, W) float32."""
    size = depth.shape
    threshold, gain = _GLAND[density]
    thick = np.clip(depth / 0.11, 0, 1)
    fat = 330 + 620 * np.sqrt(1 - (1 - thick) ** 2)

    coarse, fine = power_noise(rng, size, 3.6), power_noise(rng, size, 3.0, longest=0.35)
    web = power_noise(rng, size, 6.0, longest=0.12)
    # Gland fills a cone behind the nipple and keeps off the skin. Noise frays it into lobes and lets fat in.
    span = 0.28 + 0.62 * np.clip((breadth - x) / (0.6 * breadth), 0, 1)  # a wedge that opens away from the nipple
    behind = 1.4 - ((x - 0.55 * breadth) / (0.52 * breadth)) ** 2 - ((y - nipple_y) / (span * breast.height)) ** 2
    gland = _step(behind + 0.7 * coarse + 0.3 * fine - threshold - breast.spread, 0.35) * _step(depth - 0.04, 0.01)

    # Ducts and septa run to the nipple: noise drawn in polar coordinates around it, long in radius, short in angle.
    away, angle = np.hypot(x - breadth, y - nipple_y), np.arctan2(y - nipple_y, breadth - x)
    polar = power_noise(rng, (192, 64), 2.2, longest=0.12)
    at = np.stack([(angle + np.pi) * (192 / (2 * np.pi)), away * 40])
    ducts = ndimage.map_coordinates(polar, at, order=1, mode="grid-wrap")
    ducts = np.exp(-((ducts / 0.25) ** 2)) * np.exp(-away / 0.45)
    septa = np.exp(-((web / 0.11) ** 2))  # the zero lines of smooth noise make a web, as Cooper's ligaments do
    inner = _step(depth - 0.02, 0.006)

    tissue = fat + gain * gland * (0.9 + 0.2 * fine) + fine * (40 + 50 * gland)
    tissue += inner * (ducts * (90 + 130 * gland) + septa * 110 * np.clip(0.6 + 0.6 * coarse, 0, 1.5))
    tissue += inner * _veins(rng, size, breadth, nipple_y, breast)
    tissue += 190 * np.exp(-(((depth - 0.004) / 0.003) ** 2))  # skin, seen edge on
    tissue += 330 * np.exp(-((x - breadth) ** 2 + (y - nipple_y) ** 2) / 0.025**2)  # nipple and areola
    streaks = 1 + 0.10 * fine
    return (tissue * (1 - muscle) + muscle * np.maximum(tissue, 1500 * streaks + 250 * (1 - y))).astype(np.float32)


def _veins(rng, size, breadth, nipple_y, breast):
    """Two or three soft bright lines from the chest wall towards the nipple, (H, W)."""
    layer = np.zeros(size, np.float32)
    along = np.linspace(0, 1, 700)
    for _ in range(rng.integers(2, 4)):
        start = nipple_y + rng.uniform(-0.8, 0.8) * breast.height
        bend = rng.normal(0, 0.05) * np.sin(np.pi * along) + rng.normal(0, 0.02) * np.sin(3 * np.pi * along)
        rows = start + (nipple_y - start) * along**1.5 * rng.uniform(0.4, 0.8) + bend
        columns = breadth * along * rng.uniform(0.5, 0.9)
        _plot(layer, rows * size[0], columns * size[0], rng.uniform(90, 160))
    return ndimage.gaussian_filter(layer, size[0] / 400)


def _add_finding(tissue, dots, finding, dy, dx):
    """Add one finding to `tissue` and `dots` in place; dy (H, 1) and dx (1, W) are offsets from its center."""
    rng = np.random.default_rng(finding.seed)
    kind, radius, height = finding.kind, finding.radius, len(dy)
    if kind in ("spiculated_mass", "cyst", "coarse_calcification"):
        reach = radius * (3.2 if kind == "spiculated_mass" else 1.6)
        window = np.ix_(np.abs(dy[:, 0]) < reach, np.abs(dx[0]) < reach)
        dy, dx = dy[window[0][:, 0]], dx[:, window[1][0]]
        tissue[window] += _mass(rng, kind, radius, np.hypot(dy, dx), np.arctan2(dy, dx)) * finding.contrast
        return
    center = -dy[0, 0] * height, -dx[0, 0] * height
    if kind == "microcalcifications":
        count = rng.integers(6, 20)
        rows, columns = rng.normal(0, radius * height / 2, (2, count))
        bright = rng.uniform(2500, 5500, count)
    else:  # a winding artery's two walls, chalked in patches
        along = np.linspace(-1, 1, int(3 * radius * height))
        line = 0.25 * np.sin(along * rng.uniform(2, 4) + rng.uniform(0, 6))
        turn = rng.uniform(0, np.pi)
        side = np.where(rng.random(along.size) < 0.5, -1, 1) * 0.008 * height
        u, v = along * radius * height, line * radius * height + side
        rows, columns = u * np.sin(turn) + v * np.cos(turn), u * np.cos(turn) - v * np.sin(turn)
        bright = rng.uniform(0, 1600, along.size) * (np.sin(along * 9 + rng.uniform(0, 6)) > -0.4)
    _plot(dots, center[0] + rows, center[1] + columns, bright * finding.contrast)


def _mass(rng, kind, radius, away, angle):
    """A round thing of a kind, over distance and direction from its center."""
    if kind == "coarse_calcification":
        return 1700 * _step(1 - away / radius, 0.15)
    if kind == "cyst":  # an even disc with a sharp edge and a thin dark halo
        lobe = radius * (1 + 0.06 * np.cos(2 * angle + rng.uniform(0, 6)))
        return 430 * _step(1 - away / lobe, 0.05) - 70 * np.exp(-(((away / lobe - 1.2) / 0.12) ** 2))
    edge = np.ones_like(angle)  # a ragged edge, brightest in the middle
    for wave in range(2, 8):
        edge += 0.10 * rng.normal() * np.cos(wave * angle + rng.uniform(0, 6))
    core = 480 * _step(1 - away / (0.85 * radius * edge), 0.14)
    count = rng.integers(12, 20)
    towards = np.linspace(0, 2 * np.pi, count, endpoint=False) + rng.normal(0, 0.12, count)
    length = rng.uniform(0.8, 1.8, count) * radius
    bends = rng.normal(0, 0.12, count)
    rays = np.zeros_like(angle)
    for direction, far, bend in zip(towards, length, bends, strict=True):  # thin lines that fade outwards
        bent = angle + bend * away / radius
        off = np.abs((bent - direction + np.pi) % (2 * np.pi) - np.pi)
        sideways = np.sin(np.minimum(off, np.pi / 2)) * away
        rays += np.exp(-((sideways / (0.07 * radius)) ** 2) - np.maximum(away - 0.5 * radius, 0) / far)
    outside = _step(away / radius - 0.6, 0.12) * _step(1 - away / (3.0 * radius), 0.06)
    return core + 395 * np.minimum(rays, 1.2) * outside


def power_noise(rng: np.random.Generator, size: tuple[int, int], power: float, longest: float = 1.0) -> np.ndarray:
    """(H, W) float32 noise of mean 0 and deviation 1 whose power falls as 1 / frequency ** power.

    longest: wavelengths above this share of the height are left out.
    """
    noise = fft.irfft2(fft.rfft2(rng.standard_normal(size, dtype=np.float32)) * _spectrum(size, power, longest), s=size)
    return noise / noise.std()


@lru_cache(maxsize=64)
def _spectrum(size, power, longest):
    """Amplitude over frequency, as rfft2 orders it: (H, W // 2 + 1) float32."""
    waves = np.hypot(fft.fftfreq(size[0])[:, None], fft.rfftfreq(size[1])[None]) * size[0]  # in a frame's height
    kept = waves * longest >= 0.99
    return np.where(kept, np.where(kept, waves, 1) ** (-power / 2), 0).astype(np.float32)


def _step(value, softness):
    """0 below zero, 1 above, softly."""
    return 1 / (1 + np.exp(-np.clip(value / softness, -30, 30)))


def _plot(layer, rows, columns, bright):
    """Add brightness at rounded pixel positions; those outside the frame are dropped."""
    rows, columns = np.rint(rows).astype(int), np.rint(columns).astype(int)
    inside = (rows >= 0) & (rows < layer.shape[0]) & (columns >= 0) & (columns < layer.shape[1])
    np.add.at(layer, (rows[inside], columns[inside]), np.broadcast_to(bright, rows.shape)[inside])
