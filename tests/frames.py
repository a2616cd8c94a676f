"""Made frames for the tests of the crop: a drawn breast whose box is known, and what stands about it on real frames.

Magnitudes: letters, stripes and white frames of any place and width up to several times the demo's; a frame's height
stands for 24 cm, so that a pacemaker of 5 cm has a fifth of it and a nipple marker of 2 mm has 0.008; fog, grey
backgrounds and slanted letters as on the digitised films of CBIS-DDSM and on NEMA's sample mammogram; a noise of 0.03 is
ten times that of a detector. Breasts are drawn at the left and the whole frame is mirrored for half of the seeds.
"""

import dataclasses

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rsnakit.machines import MACHINES
from rsnakit.phantom import VIEWS, draw_breast, random_breast

Box = tuple[int, int, int, int]  # top, left, bottom, right


@dataclasses.dataclass
class Scene:
    """A frame in the making: `display` (H, W) float in [0, 1], and `mask` (H, W) bool, where breast is to be seen."""

    display: np.ndarray
    mask: np.ndarray

    def __post_init__(self):
        self.height, self.width = self.mask.shape
        self.y, self.x = np.mgrid[: self.height, : self.width].astype(np.float32)

    def cover(self, cover: np.ndarray, shade: np.ndarray | float) -> bool:
        """Paints `shade` where `cover` (H, W) bool is, unless that would hide how far the breast reaches."""
        seen = self.mask & ~cover
        if seen.any() and iou(box_of(seen), box_of(self.mask)) > 0.99:
            self.display = np.where(cover, shade, self.display)
            return True
        return False


def made_frame(seed: int) -> tuple[np.ndarray, Box, bool | None, str]:
    """A frame whose oddity is the seed's, its box and side.

    Returns:
        display: (H, W) float32 in [0, 1].
        box: the breast's; the whole frame where there is none, or nothing but breast.
        is_right: None where no side can be told.
        oddity: one of ODDITIES.
    """
    rng = np.random.default_rng(seed)
    oddity = ODDITIES[seed % len(ODDITIES)]
    names = {oddity}
    if oddity == "several":
        names = {str(name) for name in rng.choice([*PAINTERS][: -len(LAST)], rng.integers(2, 4), replace=False)}
        names |= {str(rng.choice(LAST))}
    scene = _blank(rng) if oddity == "blank" else _breast(rng, oddity, names)
    for name, paint in PAINTERS.items():  # in their order: what lies in the breast first, what lies over all last
        if name in names:
            paint(rng, scene)
    if oddity not in ("blank", "tiny", "fills the frame") and "label" not in oddity and rng.random() < 0.25:
        letters(rng, scene)
    display = np.clip(scene.display, 0, 1).astype(np.float32)
    box = (0, 0, *display.shape) if oddity == "blank" else box_of(scene.mask)
    side = bool(rng.random() < 0.5)
    if side:
        display, box = np.ascontiguousarray(display[:, ::-1]), mirrored(box, scene.width)
    return display, box, None if oddity in ("blank", "fills the frame") else side, oddity


def box_of(mask: np.ndarray) -> Box:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    shared = np.prod([max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)])
    return float(shared / (sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - shared))


def mirrored(box: Box, width: int) -> Box:
    return box[0], width - box[3], box[2], width - box[1]


# The breast


def _breast(rng: np.random.Generator, oddity: str, names: set[str]) -> Scene:
    height = int(rng.choice([320, 400, 480, 560, 640, 800, 1000], p=[0.2, 0.2, 0.15, 0.15, 0.15, 0.1, 0.05]))
    if oddity == "tiny":
        height = int(rng.integers(24, 97))
    size = height, round(height * rng.uniform(0.7, 0.92))  # as wide as the competition's frames
    view = str(rng.choice(VIEWS, p=[0.44, 0.4, 0.04, 0.04, 0.04, 0.04]))
    if names & {"narrow tail", "pacemaker"}:  # only these views reach so far up
        view = str(rng.choice(["MLO", "LMO", "AT"]))
    shape = random_breast(rng)
    if oddity == "small breast":  # about an eighth of the frame
        view, small = "CC", rng.uniform(0.2, 0.28, 2)
        shape = dataclasses.replace(shape, width=small[0], height=small[1])
    zoom = 2 if oddity == "fills the frame" else 1
    size = zoom * size[0], zoom * size[1]
    implant = "implant" in names and bool(rng.random() < 0.5)
    pixels, mask = draw_breast(rng, size, view, "L", str(rng.choice([*"ABCD"])), breast=shape, implant=implant)
    scene = Scene(_display(rng, pixels), mask[: size[0] - rng.integers(4)])
    scene.display = scene.display[: scene.height]
    for name, change in SHAPES.items():
        if name in names:
            scene = change(rng, scene)
    return scene


def _display(rng: np.random.Generator, pixels: np.ndarray) -> np.ndarray:
    """Shades that one of the demo's machines gives, by its window or from the smallest to the largest value."""
    machine = list(MACHINES.values())[rng.integers(len(MACHINES))]
    values = pixels * machine.gain + machine.floor
    if machine.window is None or rng.random() < 0.2:
        return (values - values.min()) / (values.max() - values.min())
    center, width = machine.window[0][0], machine.window[1][0]
    if machine.function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (values - center) / width))
    return np.clip((values - center) / width + 0.5, 0, 1)


def _blank(rng: np.random.Generator) -> Scene:
    size = rng.integers(24, 640, 2)
    noise = rng.choice([0, 0.01, 0.05]) * rng.standard_normal(size)
    return Scene(rng.choice([0, rng.random(), 1]) + noise, np.zeros(size, bool))


def _narrow_tail(rng, scene):
    """Towards the armpit the breast gets narrower than an ellipse."""
    start, end = rng.uniform(0.25, 0.5) * scene.height, rng.uniform(0.15, 0.6)
    up = np.clip((start - scene.y) / start, 0, 1)
    squeeze = 1 - (1 - end) * up**2 * (3 - 2 * up)  # smooth at both ends
    at = scene.x / squeeze, scene.y
    shades = cv2.remap(scene.display.astype(np.float32), *at, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return Scene(shades, cv2.remap(scene.mask.astype(np.uint8), *at, cv2.INTER_NEAREST) > 0)


def _fills_the_frame(rng, scene):
    """A piece from the middle of a breast."""
    columns = int(box_of(scene.mask)[3] * rng.uniform(0.4, 0.6))
    rows = np.flatnonzero(scene.mask[:, :columns].all(axis=1))
    place = slice(rows[0], min(rows[-1] + 1, rows[0] + int(columns / 0.7))), slice(0, columns)
    return Scene(scene.display[place], scene.mask[place])


def _touches_all_sides(rng, scene):
    """Cut as close to the breast as its box, or closer."""
    top, _, bottom, right = box_of(scene.mask)
    y, x = np.rint(rng.uniform(0, 0.04, 2) * (bottom - top, right)).astype(int)
    place = slice(top + y, bottom - y), slice(0, right - x)
    return Scene(scene.display[place], scene.mask[place])


def _cut_loose(rng, scene):
    """Some background between the breast and the edge of its chest wall."""
    room = scene.width - box_of(scene.mask)[3]
    shift = max(1, min(room, int(rng.uniform(0.01, 0.1) * scene.width)))
    display = np.roll(scene.display, shift, axis=1)
    display[:, :shift] = np.median(display[:, -shift:])
    return Scene(display, np.roll(scene.mask, shift, axis=1))


SHAPES = {
    "narrow tail": _narrow_tail,
    "fills the frame": _fills_the_frame,
    "touches all sides": _touches_all_sides,
    "cut loose": _cut_loose,
}


# What lies in the breast


def _implant(rng, scene):
    """A bright bag in front of the chest wall, its shell brighter, some tissue over it."""
    top, left, bottom, right = box_of(scene.mask)
    reach, half = rng.uniform(0.5, 0.75) * (right - left), rng.uniform(0.5, 0.75) * (bottom - top) / 2
    middle = scene.y[scene.mask].mean()
    depth = cv2.distanceTransform(scene.mask.astype(np.uint8), cv2.DIST_L2, 5)
    inside = 1 - np.hypot((scene.x - left) / reach, (scene.y - middle) / half)
    bag = np.minimum(inside * min(reach, half), depth - 0.02 * scene.height)
    shade = rng.uniform(0.7, 1)
    bright = np.where(bag < 0.01 * scene.height, shade + 0.1, shade)
    scene.display = np.where(bag > 0, np.maximum(scene.display, bright), scene.display)


def _pacemaker(rng, scene):
    """A bright can near the armpit, in part beyond the breast or the frame, and its wire."""
    unit = scene.height
    for _ in range(20):
        size = rng.uniform(0.12, 0.2) * unit
        y, x = rng.uniform(-0.02, 0.2) * unit, rng.uniform(-0.02, 0.3) * unit
        can = (np.abs(scene.y - y) / (0.5 * size)) ** 4 + (np.abs(scene.x - x) / (0.42 * size)) ** 4 < 1
        if can.any() and scene.mask[can].any() and scene.cover(can, rng.uniform(0.95, 1)):
            break
    along = np.linspace(0, 1, 60)
    rows = y + along * rng.uniform(0.3, 0.8) * unit + rng.uniform(0, 0.08) * unit * np.sin(6 * along)
    columns = x + along * rng.uniform(-0.3, 0.1) * unit + rng.uniform(0, 0.08) * unit * np.sin(5 * along)
    wire = np.zeros(scene.mask.shape, np.uint8)
    points = np.rint(np.stack([columns, rows], 1)).astype(np.int32)
    cv2.polylines(wire, [points], False, 1, max(1, round(0.006 * unit)))
    scene.cover(wire > 0, 0.95)


def _nipple_marker(rng, scene):
    """A lead ball on the nipple, or a ring on the skin."""
    if rng.random() < 0.5:
        column = box_of(scene.mask)[3] - 1
        row, thick = int(np.flatnonzero(scene.mask[:, column]).mean()), -1
        radius = rng.uniform(0.003, 0.006)
    else:
        row, column = np.argwhere(scene.mask)[rng.integers(scene.mask.sum())]
        radius, thick = rng.uniform(0.02, 0.04), max(1, round(0.003 * scene.height))
    mark = np.zeros(scene.mask.shape, np.uint8)
    cv2.circle(mark, (int(column), int(row)), max(1, round(radius * scene.height)), 1, thick)
    scene.cover(mark > 0, 1.0)


# Behind the breast


def _haze(rng, scene):
    """A background up to as bright as the thin fat along the skin instead of black, or a veil over all."""
    if rng.random() < 0.5:
        depth = cv2.distanceTransform(scene.mask.astype(np.uint8), cv2.DIST_L2, 5)
        fat = np.median(scene.display[scene.mask & (depth < 0.05 * scene.height)])
        haze = rng.uniform(0.4, 1) * fat + rng.normal(0, 0.005, scene.mask.shape)
        scene.display = np.where(scene.mask, scene.display, haze)
    else:
        scene.display += rng.uniform(0.1, 0.5) * (1 - scene.display)


def _gradient(rng, scene):
    """A veil that grows from one side to the other."""
    turn = rng.uniform(0, 2 * np.pi)
    along = np.cos(turn) * scene.x / scene.width + np.sin(turn) * scene.y / scene.height
    along = (along - along.min()) / (along.max() - along.min())
    scene.display += (rng.uniform(0, 0.1) + rng.uniform(0.05, 0.2) * along) * (1 - scene.display)


def _fog(rng, scene):
    """Light that has crept in at the edges of a film, and falls off from there."""
    edges = np.stack([scene.x, scene.width - 1 - scene.x, scene.y, scene.height - 1 - scene.y])
    for away in edges[rng.permutation(4)[: rng.integers(1, 5)]]:
        fog = rng.uniform(0.05, 0.2) * np.exp(-away / (rng.uniform(0.015, 0.04) * scene.height))
        scene.display += fog * (1 - scene.display)


def _noise(rng, scene):
    scene.display += rng.normal(0, rng.uniform(0.005, 0.03), scene.mask.shape)


# What is painted over


def _label(rng, size: int, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Letters `size` pixels high, bare or in a box, turned by degrees: where they cover (bool), their shades."""
    text = f"{rng.choice(['R', 'L'])}{rng.choice([' ', ''])}{rng.choice(VIEWS)}"
    font = ImageFont.load_default(max(size, 4))
    left, top, right, bottom = font.getbbox(text)
    edge = max(1, size // 3)
    shades = Image.new("L", (int(right - left) + 2 * edge, int(bottom - top) + 2 * edge), 0)
    draw, style = ImageDraw.Draw(shades), rng.choice(["bare", "bare", "white box", "outlined box"])
    if style == "white box":
        shades.paste(255, (0, 0, *shades.size))
    elif style == "outlined box":
        draw.rectangle((0, 0, shades.width - 1, shades.height - 1), outline=255, width=max(1, size // 8))
    draw.text((edge - left, edge - top), text, 0 if style == "white box" else 255, font)
    cover = shades if style == "bare" else Image.new("L", shades.size, 255)
    cover, shades = (np.asarray(image.rotate(angle, expand=True)) for image in (cover, shades))
    return cover > 100, shades / 255 * rng.uniform(0.75, 1)


def _place(scene: Scene, cover: np.ndarray, top: int, left: int) -> np.ndarray | None:
    """A label's cover on the frame; None if less than half of it comes to lie there."""
    placed = np.zeros(scene.mask.shape, bool)
    rows = np.arange(max(0, top), min(scene.height, top + cover.shape[0]))
    columns = np.arange(max(0, left), min(scene.width, left + cover.shape[1]))
    placed[np.ix_(rows, columns)] = cover[np.ix_(rows - top, columns - left)]
    return placed if placed.sum() >= 0.5 * cover.sum() else None


def letters(rng, scene, share: tuple[float, float] = (0.003, 0.02), touching: bool = False):
    """A label in a corner beside the breast, or touching it; it takes a `share` of the frame."""
    for _ in range(30):
        share_now = np.exp(rng.uniform(*np.log(share)))
        angle = float(rng.choice([0, 0, 90, 45, rng.uniform(-60, 60)]))
        seed = rng.integers(2**31)
        area = _label(np.random.default_rng(seed), 40, angle=0)[0].size
        size = round(40 * np.sqrt(share_now * scene.mask.size / area))
        cover, shades = _label(np.random.default_rng(seed), size, angle)
        high, wide = cover.shape
        if touching:
            top, left = _touching(rng, scene, cover)
        else:
            y, x = np.rint(rng.uniform(-0.01, 0.05, 2) * scene.height).astype(int)
            top, left = rng.choice([y, scene.height - high - y]), rng.choice([x, scene.width - wide - x])
        placed = _place(scene, cover, int(top), int(left))
        if placed is None or (scene.mask & placed).sum() > 0.03 * placed.sum():
            continue
        full = np.zeros(scene.mask.shape)
        rows, columns = np.nonzero(placed)
        full[rows, columns] = shades[rows - int(top), columns - int(left)]
        if scene.cover(placed, full):
            return


def _touching(rng, scene, cover):
    """Where a label touches the nipple or another place of the skin: pushed outwards until it is off the breast."""
    skin = np.argwhere(scene.mask & ~cv2.erode(scene.mask.astype(np.uint8), np.ones((3, 3))).astype(bool))
    skin = skin[(skin > 2).all(1) & (skin < np.array(scene.mask.shape) - 3).all(1)]
    if not len(skin):
        return -scene.height, 0
    at = skin[np.argmax(skin[:, 1])] if rng.random() < 0.4 else skin[rng.integers(len(skin))]
    out = at - np.argwhere(scene.mask).mean(0)
    out /= np.hypot(*out)
    for away in range(0, 2 * max(cover.shape)):
        top, left = np.rint(at + away * out - np.array(cover.shape) / 2).astype(int)
        placed = _place(scene, cover, top, left)
        if placed is not None and not (placed & scene.mask).any():
            return np.rint(at + (away - rng.integers(1, 4)) * out - np.array(cover.shape) / 2).astype(int)
    return -scene.height, 0


def _stripe(rng, scene, upright: bool):
    """From edge to edge, half of them beside the breast where there is room, the others across it or anywhere."""
    beside = rng.random() < 0.5
    at, end = (scene.x, scene.width) if upright else (scene.y, scene.height)
    for attempt in range(40):
        thick = max(1, round(rng.uniform(0.003, 0.03) * scene.height))
        start = rng.uniform(0, end - thick)
        stripe = (at >= start) & (at < start + thick)
        if beside and scene.mask[stripe].any() and attempt < 20:
            continue
        if scene.cover(stripe, rng.uniform(0.6, 1)):
            return


def _dark_gap(rng, scene):
    """Black from edge to edge, or a box blacked out."""
    for _ in range(rng.integers(1, 3)):
        top, left, bottom, right = box_of(scene.mask)
        y, x = top + rng.uniform(0.1, 0.9) * (bottom - top), left + rng.uniform(0.1, 0.9) * (right - left)
        thick = rng.uniform(0.003, 0.02) * scene.height
        gap = rng.choice(["upright", "level", "box"])
        if gap == "upright":
            cover = np.abs(scene.x - x) < thick / 2
        elif gap == "level":
            cover = np.abs(scene.y - y) < thick / 2
        else:
            y, x = rng.uniform(0.05, 0.95, 2) * scene.mask.shape
            half = rng.uniform(0.01, 0.08, 2) * scene.height
            cover = (np.abs(scene.y - y) < half[0]) & (np.abs(scene.x - x) < half[1])
        scene.cover(cover, 0.0)


def _scratches(rng, scene):
    layer = np.zeros(scene.mask.shape, np.uint8)
    for _ in range(rng.integers(1, 6)):
        ends = rng.uniform(-0.2, 1.2, (2, 2)) * (scene.width, scene.height)
        cv2.line(layer, *(tuple(int(v) for v in end) for end in ends), 1, int(rng.integers(1, 3)))
    scene.display = np.where(layer > 0, rng.uniform(0.4, 1), scene.display)


def _salt_and_pepper(rng, scene):
    share, drawn = np.exp(rng.uniform(*np.log([0.001, 0.02]))), rng.random(scene.mask.shape)
    scene.display = np.where(drawn < share, drawn < share / 2, scene.display)


def _border(rng, scene, shade: float, sides: int, softness: float = 0.0):
    """Bright along some sides of the frame, each of its own width and a little slanted; it hides the breast there."""
    edges = [
        (scene.x, scene.y),
        (scene.width - 1 - scene.x, scene.y),
        (scene.y, scene.x),
        (scene.height - 1 - scene.y, scene.x),
    ]
    border = np.zeros(scene.mask.shape)
    for side in rng.permutation(4)[:sides]:
        away, along = edges[side]
        width = rng.uniform(0.004, 0.05) * scene.height + rng.choice([0, rng.uniform(-0.01, 0.01)]) * along
        border = np.maximum(border, np.clip((width - away) / max(1, softness * scene.height) + 0.5, 0, 1))
    scene.display = scene.display + border * (shade - scene.display)
    scene.mask = scene.mask & (border < 0.5)


def _collimator(rng, scene):
    """Outside of the collimator's opening a turned MONOCHROME1 image is white; the opening is round at its corners."""
    y, x = scene.y / scene.height, scene.x / scene.height
    top, bottom, right = rng.uniform(0.01, 0.08, 3)
    left = rng.choice([0, rng.uniform(0.01, 0.05)])
    turn = rng.uniform(-0.03, 0.03)
    y, x = y + turn * (x - 0.4), x - turn * (y - 0.5)
    radius = rng.uniform(0.005, 0.1)
    aspect = scene.width / scene.height
    inside_y = np.maximum(top + radius - y, y - (1 - bottom - radius))
    inside_x = np.maximum(-1 if left == 0 else left + radius - x, x - (aspect - right - radius))
    outside = np.hypot(np.maximum(inside_y, 0), np.maximum(inside_x, 0)) > radius
    scene.display = np.where(outside, rng.uniform(0.95, 1), scene.display)
    scene.mask = scene.mask & ~outside


LAST = ("white frame", "white frame on some sides", "bright border", "collimator", "salt and pepper")
PAINTERS = {
    "implant": _implant,
    "pacemaker": _pacemaker,
    "nipple marker": _nipple_marker,
    "haze": _haze,
    "gradient": _gradient,
    "fog": _fog,
    "noise": _noise,
    "dark gap": _dark_gap,
    "upright stripe": lambda rng, scene: _stripe(rng, scene, upright=True),
    "level stripe": lambda rng, scene: _stripe(rng, scene, upright=False),
    "letters": letters,
    "large label": lambda rng, scene: letters(rng, scene, (0.03, 0.08)),
    "touching label": lambda rng, scene: letters(rng, scene, (0.003, 0.03), touching=True),
    "large touching label": lambda rng, scene: letters(rng, scene, (0.03, 0.08), touching=True),
    "scratches": _scratches,
    "white frame": lambda rng, scene: _border(rng, scene, rng.uniform(0.97, 1), sides=4),
    "white frame on some sides": lambda rng, scene: _border(rng, scene, rng.uniform(0.97, 1), rng.integers(1, 4)),
    "bright border": lambda rng, scene: _border(rng, scene, rng.uniform(0.4, 0.9), rng.integers(1, 5), 0.01),
    "collimator": _collimator,
    "salt and pepper": _salt_and_pepper,
}
ODDITIES = ("plain", "small breast", "tiny", "blank", *SHAPES, *PAINTERS, "several")
