"""The shapes world: a caption grammar, a renderer, and the split into trained and held-out scenes.

A scene is one to three groups of equal objects ("two red circles") and at most one relation. The caption describes
the *whole* picture: counts are exact and nothing else is there. In "A above B and C" the relation holds between A and
every object of the other groups. The renderer never lets objects touch, so a render always fits its caption.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (210, 20, 55),
    "green": (40, 160, 60),
    "blue": (45, 85, 215),
    "yellow": (250, 220, 30),
    "purple": (140, 60, 180),
    "orange": (240, 120, 20),
}
SHAPES = ("circle", "square", "triangle", "star")
KINDS = [(shape, colour) for shape in SHAPES for colour in COLOURS]
COUNTS = {1: "a", 2: "two", 3: "three", 4: "four", 5: "five"}
RELATIONS = {
    "left of": (0, -1),
    "right of": (0, 1),
    "above": (1, -1),
    "below": (1, 1),
}  # (axis x=0 y=1, side)
CATEGORIES = ("single", "two", "counting", "colours", "position", "attribution", "hard")
TRAIN_SHARE = dict(zip(CATEGORIES, (0.04, 0.10, 0.14, 0.07, 0.21, 0.16, 0.28), strict=True))
GAP = 2.5  # pixels between the outlines of two objects, so that components never merge
MARGIN = 3.0  # pixels by which a relation holds between the centres of any two objects


@dataclass(frozen=True)
class Group:
    """``count`` equal objects; ``colour`` None means any one colour."""

    count: int
    shape: str
    colour: str | None = None

    def __str__(self) -> str:
        noun = self.shape if self.count == 1 else self.shape + "s"
        article = "an" if self.count == 1 and (self.colour or noun).startswith("o") else COUNTS[self.count]
        return " ".join(w for w in (article, self.colour, noun) if w)


@dataclass(frozen=True)
class Scene:
    """What a caption asks for; ``str(scene)`` is the caption."""

    groups: tuple[Group, ...]
    relation: str | None = None

    def __str__(self) -> str:
        first, *rest = map(str, self.groups)
        if self.relation:
            return f"{first} {self.relation} {' and '.join(rest)}"
        return first if not rest else f"{', '.join([first, *rest[:-1]])} and {rest[-1]}"

    @property
    def total(self) -> int:
        return sum(g.count for g in self.groups)


_NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5} | {str(i): i for i in range(1, 6)}
_GROUP = re.compile(rf"^({'|'.join(_NUMBERS)}) (?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)})(s?)$")
_RELATION = re.compile(r"\s+(?:to the |on the )?(left of|right of|above|below)\s+")


def parse(caption: str) -> Scene:
    """The scene a caption asks for.

    Raises:
        ValueError: when the caption is outside the grammar; the message says which part.
    """
    text = " ".join(caption.lower().strip().rstrip(".").split())
    parts = _RELATION.split(text)
    if len(parts) not in (1, 3):
        raise ValueError(f"The caption {caption!r} has more than one relation; the shapes world knows at most one.")
    relation = parts[1] if len(parts) == 3 else None
    phrases = [p for side in parts[::2] for p in re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", side)]
    groups = []
    for phrase in phrases:
        m = _GROUP.match(phrase)
        if not m:
            raise ValueError(
                f"The phrase {phrase!r} is outside the shapes world; write a count (a, two … five), optionally a"
                f" colour ({', '.join(COLOURS)}) and one of {', '.join(SHAPES)}, joined by 'and', ',' or one of"
                f" {', '.join(RELATIONS)}."
            )
        groups.append(Group(_NUMBERS[m[1]], m[3], m[2]))
    if not 1 <= len(groups) <= 3 or (relation and len(re.split(r"\s*,\s*|\s+and\s+", parts[0])) > 1):
        raise ValueError(f"The caption {caption!r} must have one to three groups, and only one before a relation.")
    return Scene(tuple(groups), relation)


# ---------------------------------------------------------------------------------------------------- the split


def _share(*words: object) -> float:
    digest = hashlib.sha256("|".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


@cache
def _unseen_group(colour: str, shape: str, count: int) -> bool:
    return count > 1 and _share("group", colour, shape, count) < 0.12


def held_out(scene: Scene) -> bool:
    """Whether a scene is never trained on: an unseen colour-shape-count group, or a quarter of all combinations.

    The captions of the categories `single` and `two` are too few to hold out; they are always trained.
    """
    if any(g.colour and _unseen_group(g.colour, g.shape, g.count) for g in scene.groups):
        return True
    if category(scene) in ("single", "two"):
        return False
    order = sorted(map(str, scene.groups)) if scene.relation is None else list(map(str, scene.groups))
    return _share("scene", scene.relation, *order) < 0.25


def category(scene: Scene) -> str:
    """GenEval's category of a scene, or `hard`."""
    if scene.total > 2 and len(scene.groups) > 1:
        return "hard"
    if scene.relation:
        return "position"
    coloured = scene.groups[0].colour is not None
    if len(scene.groups) == 2:
        return "attribution" if coloured else "two"
    if scene.total > 1:
        return "counting"
    return "colours" if coloured else "single"


def draw_scene(kind: str, rng: np.random.Generator) -> Scene:
    """A random scene of a category, trained or held out."""

    def pick(n: int, coloured: bool, counts: tuple[int, int] = (1, 1)) -> tuple[Group, ...]:
        while True:
            groups = tuple(
                Group(
                    int(rng.integers(counts[0], counts[1] + 1)),
                    SHAPES[rng.integers(4)],
                    list(COLOURS)[rng.integers(6)] if coloured else None,
                )
                for _ in range(n)
            )
            if len({(g.shape, g.colour) for g in groups}) == n:
                return groups

    relation = list(RELATIONS)[rng.integers(4)]
    match kind:
        case "single":
            return Scene(pick(1, False))
        case "two":
            return Scene(pick(2, False))
        case "counting":
            return Scene(pick(1, False, (2, 5)))
        case "colours":
            return Scene(pick(1, True))
        case "position":
            return Scene(pick(2, bool(rng.random() < 0.5)), relation)
        case "attribution":
            return Scene(pick(2, True))
    while True:
        if rng.random() < 0.6:
            scene = Scene(pick(2, True, (1, 4)), relation if rng.random() < 0.7 else None)
        else:
            scene = Scene(pick(3, True, (1, 3)), relation if rng.random() < 0.4 else None)
        if 4 <= scene.total <= 7:
            return scene


def training_scene(rng: np.random.Generator, share: Mapping[str, float] = TRAIN_SHARE) -> Scene:
    """A random scene that training may see, categories by ``share``."""
    while True:
        scene = draw_scene(str(rng.choice(list(share), p=list(share.values()))), rng)
        if not held_out(scene):
            return scene


def hard_negatives(scene: Scene, rng: np.random.Generator) -> dict[str, Scene]:
    """Scenes one mistake away: count off by one, swapped or changed colour, shape, mirrored relation."""
    g, out = scene.groups, {}

    def put(kind: str, groups: tuple[Group, ...], relation: str | None = scene.relation) -> None:
        if len({(x.shape, x.colour) for x in groups}) == len(groups):
            out[kind] = Scene(groups, relation)

    def at(i: int, **change: object) -> tuple[Group, ...]:
        return g[:i] + (replace(g[i], **change),) + g[i + 1 :]  # type: ignore[arg-type]

    i = int(rng.integers(len(g)))
    up = g[i].count == 1 or (g[i].count < 5 and rng.random() < 0.5)
    put("count", at(i, count=g[i].count + (1 if up else -1)))
    i = int(rng.integers(len(g)))
    put("shape", at(i, shape=str(rng.choice([s for s in SHAPES if s != g[i].shape]))))
    if g[0].colour:
        put("colour", at(i, colour=str(rng.choice([c for c in COLOURS if c != g[i].colour]))))
    if len(g) > 1:
        a, b = (int(k) for k in rng.choice(len(g), 2, replace=False))
        for kind, field in (("swap-colour", "colour"), ("swap-shape", "shape"), ("swap-count", "count")):
            va, vb = getattr(g[a], field), getattr(g[b], field)
            if va != vb:
                swapped = list(g)
                swapped[a], swapped[b] = replace(g[a], **{field: vb}), replace(g[b], **{field: va})
                lead = 1 if scene.relation else 0  # the groups after it may stand in any order
                if swapped[:lead] != list(g[:lead]) or set(swapped[lead:]) != set(g[lead:]):
                    put(kind, tuple(swapped))
    if scene.relation:
        axis, side = RELATIONS[scene.relation]
        put("mirror", g, next(r for r, v in RELATIONS.items() if v == (axis, -side)))
        put("turn", g, str(rng.choice([r for r, v in RELATIONS.items() if v[0] != axis])))
    return out


# ------------------------------------------------------------------------------------------------- the renderer


def outline(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    """The polygon of an upright shape of radius ``r`` around ``(x, y)``."""
    if shape == "square":
        h = 0.86 * r
        return [(x - h, y - h), (x + h, y - h), (x + h, y + h), (x - h, y + h)]
    if shape == "triangle":
        return [(x, y - 0.95 * r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)]
    n, inner = (40, 0.95) if shape == "circle" else (10, 0.48)
    radii = [0.95 * r if shape == "circle" else r * (1.12 if k % 2 == 0 else inner) for k in range(n)]
    angles = [2 * math.pi * k / n - math.pi / 2 for k in range(n)]
    return [(x + q * math.cos(a), y + q * math.sin(a)) for q, a in zip(radii, angles, strict=True)]


def _place(scene: Scene, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """Centres and radii for all objects in group order, by rejection; radii shrink until everything fits."""
    n = scene.total
    low, high = (7.0, 11.0) if n == 1 else (6.0, 8.5) if n <= 3 else (5.0, 6.8)
    for attempt in range(1000):
        shrink = max(0.8, 1 - attempt / 200)
        radii = rng.uniform(low, high) * shrink * rng.uniform(0.92, 1.08, n)
        edge = radii * 1.15 + 1
        xy = np.empty((0, 2))
        bounds = [(edge, SIZE - edge), (edge, SIZE - edge)]
        if scene.relation:
            axis, side = RELATIONS[scene.relation]
            first = np.arange(n) < scene.groups[0].count
            cut = rng.uniform(0.38, 0.62) * SIZE
            low_side = first if side < 0 else ~first
            lo, hi = bounds[axis]
            bounds[axis] = (np.where(low_side, lo, cut + MARGIN), np.where(low_side, cut - MARGIN, hi))
        if any((lo > hi).any() for lo, hi in bounds):
            continue
        for i in range(n):
            spots = np.stack([rng.uniform(lo[i], hi[i], 40) for lo, hi in bounds], 1)
            apart = np.linalg.norm(spots[:, None] - xy[None], axis=-1) - 1.12 * (radii[i] + radii[:i]) > GAP
            free = np.flatnonzero(apart.all(1))
            if not len(free):
                break
            xy = np.vstack([xy, spots[free[:1]]])
        if len(xy) == n:
            return [(float(x), float(y), float(r)) for (x, y), r in zip(xy, radii, strict=True)]
    raise RuntimeError(f"no room for {scene}")


@dataclass(frozen=True)
class Placed:
    """One object of a picture: its kind, its centre and radius in pixels, its colour as drawn."""

    shape: str
    colour: str
    x: float
    y: float
    r: float
    tint: tuple[int, ...]


def arrange(scene: Scene, rng: np.random.Generator) -> list[Placed]:
    """Random places, sizes and tints for the objects of a scene, in the order of its groups.

    Raises:
        RuntimeError: when there is no room for that many.
    """
    placed = []
    spots = iter(_place(scene, rng))
    for group in scene.groups:
        colour = group.colour
        while colour is None or (group.colour is None and _unseen_group(colour, group.shape, group.count)):
            colour = list(COLOURS)[rng.integers(6)]
        for _ in range(group.count):
            tint = tuple(int(np.clip(c + rng.integers(-10, 11), 0, 255)) for c in COLOURS[colour])
            placed.append(Placed(group.shape, colour, *next(spots), tint))
    return placed


def draw(placed: list[Placed], background: int) -> np.ndarray:
    """The picture of ``placed`` objects on a grey ``background``, uint8 ``(64, 64, 3)``, anti-aliased."""
    scale = 4
    canvas = Image.new("RGB", (SIZE * scale, SIZE * scale), (background,) * 3)
    pen = ImageDraw.Draw(canvas)
    for o in placed:
        pen.polygon([(px * scale, py * scale) for px, py in outline(o.shape, o.x, o.y, o.r)], fill=o.tint)
    return np.asarray(canvas.reduce(scale))


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """A picture of the scene, uint8 ``(64, 64, 3)``; position, size and tint are random.

    Args:
        scene: What to show. A group without a colour gets one random colour.
        rng: The only source of randomness.
    """
    background = int(rng.integers(236, 256))
    return draw(arrange(scene, rng), background)
