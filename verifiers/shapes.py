"""The oracle of the shapes world: reads the objects off an image and judges a caption by them. It has no weights.

`read` estimates the light background, classifies each pixel by the direction of ``background - rgb`` (which an
anti-aliased edge, being a blend with the background, leaves unchanged), takes connected components of one colour, and
gives each the shape whose template, placed by the component's area and centroid, overlaps it best.
`judge` compares the objects with the scene that a caption asks for. `docs/shapes.md` has the measured limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage, optimize
from torch import Tensor

from imgscale.assets.shapes.world import COLOURS, RELATIONS, SHAPES, SIZE, Group, Scene, outline, parse
from imgscale.errors import UserError
from imgscale.registry import verifier

Floats = npt.NDArray[np.float32]

COVERED = 0.5  # of a pixel: from here on it belongs to an object
SPECK = (
    8.0  # pixels of area: anything smaller is dirt, not an object (the smallest star that is drawn has 16)
)
FIT = 0.8  # soft IoU with the best template below which a component has no shape
SPREAD = (
    50 / 255
)  # RGB distance from a palette colour beyond which a component has no colour (the closest two: 101)
LIGHTEST, DARKEST = 1.0, 0.85  # range of the background's grey
_PALETTE = np.array(list(COLOURS.values()), np.float32) / 255
_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Object:
    """One thing seen in an image.

    Attributes:
        shape: Its shape, or None where no template fits.
        colour: Its colour, or None where no palette colour is near.
        x, y: Centre in pixels of the 64-pixel frame, from the top left corner.
        area: Covered pixels of that frame.
        fit: Soft intersection over union with the best template, in [0, 1].
        likely: The nearest shape and colour, whether near enough or not.
    """

    shape: str | None
    colour: str | None
    x: float
    y: float
    area: float
    fit: float
    likely: tuple[str, str]


def read(images: Tensor) -> list[list[Object]]:
    """The objects in each image, largest first.

    Args:
        images: ``(n, 3, h, w)`` in [0, 1], any size; the longer side is scaled to the world's 64 pixels. An image with
            a value that isn't finite shows nothing.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise UserError(f"The oracle reads images of shape (n, 3, h, w); these are {tuple(images.shape)}.")
    found: list[list[Object]] = [[] for _ in range(len(images))]
    if not images.numel():
        return found
    rgb, finite = _frame(images)
    background = np.median(rgb[:, ::2, ::2].reshape(len(rgb), -1, 3), 1).mean(1).clip(DARKEST, LIGHTEST)
    depth = background[:, None, None, None] - rgb  # what an object takes away from the background
    full = background[:, None, None] - _PALETTE  # (n, colours, 3): the depth of a fully covered pixel
    reach = np.linalg.norm(full, axis=-1)
    along = np.einsum("nhwk,nck->nhwc", depth, full / reach[..., None], optimize=True)
    colour = along.argmax(-1)
    # The projection on the nearest direction counts, but also a depth that lies along no palette direction is there.
    length = np.linalg.norm(depth, axis=-1)
    covered = length > COVERED * np.take_along_axis(reach[:, None, None], colour[..., None], -1)[..., 0]
    covered &= finite[:, None, None]
    planes = covered[..., None] & (colour[..., None] == np.arange(len(_NAMES)))
    labels, count = ndimage.label(planes, _IN_PLANE)
    if not count:
        return found
    flat = labels.max(-1)
    image, _, _, plane = (np.array([s[k].start for s in ndimage.find_objects(labels)]) for k in range(4))
    plane = np.concatenate([[0], plane])
    keep = np.bincount(flat.ravel(), minlength=count + 1) >= SPECK / 1.5
    keep[0] = False
    flat[~keep[flat]] = 0
    core = ndimage.minimum_filter(flat, footprint=_CROSS) == flat
    owned = np.where(flat, flat, ndimage.maximum_filter(flat, size=(1, 3, 3)))
    n, y, x = np.nonzero(owned)
    label = owned[n, y, x]
    cover = (along[n, y, x, plane[label]] / reach[n, plane[label]]).clip(0, 1)
    area = np.bincount(label, cover, count + 1)
    core = core & (flat > 0)
    tint = _means(rgb[core], flat[core], count + 1)
    cx, cy = (np.bincount(label, cover * v, count + 1) / np.maximum(area, 1e-6) for v in (x, y))
    keep &= area >= SPECK
    kept = np.flatnonzero(keep)
    if not len(kept):
        return found
    cover_map = np.zeros(owned.shape, np.float32)
    cover_map[n, y, x] = cover
    fits, sx, sy = _fits(kept, image[kept - 1], area[kept], cx[kept], cy[kept], owned, cover_map)
    best = fits.argmax(1)
    gaps = np.linalg.norm(tint[kept, None] - _PALETTE, axis=-1)
    nearest = gaps.argmin(1)
    for i, k in enumerate(kept):
        s, c = SHAPES[best[i]], _NAMES[nearest[i]]
        fit = float(fits[i, best[i]])
        found[image[k - 1]].append(
            Object(
                s if fit >= FIT else None,
                c if gaps[i, nearest[i]] <= SPREAD else None,
                float(sx[i, best[i]]) + 0.5,
                float(sy[i, best[i]]) + 0.5,
                float(area[k]),
                fit,
                (s, c),
            )
        )
    return [sorted(objects, key=lambda o: -o.area) for objects in found]


_CROSS = np.array([[[0, 1, 0], [1, 1, 1], [0, 1, 0]]])  # a pixel and its four neighbours, in each image
_IN_PLANE = np.zeros((3, 3, 3, 3), int)  # (image, row, column, colour)
_IN_PLANE[1, :, :, 1] = _CROSS[0]


def _frame(images: Tensor) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Images as ``(n, h, w, 3)`` with the longer side 64, and which of them are finite throughout."""
    images = images.detach().float()
    finite = images.flatten(1).isfinite().all(1)
    images = images.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    h, w = images.shape[-2:]
    if max(h, w) != SIZE:
        size = [max(1, round(side * SIZE / max(h, w))) for side in (h, w)]
        images = torch.nn.functional.interpolate(
            images, size, mode="bilinear", antialias=True, align_corners=False
        )
    return images.permute(0, 2, 3, 1).cpu().numpy(), finite.cpu().numpy()


def _means(values: Floats, label: npt.NDArray[Any], count: int) -> Floats:
    """The mean of the rows of ``values`` with each label; rows of an absent label are nan-free zeros."""
    total = np.stack([np.bincount(label, v, count) for v in values.T], 1)
    return (total / np.maximum(np.bincount(label, minlength=count), 1)[:, None]).astype(np.float32)


def _fits(
    kept: npt.NDArray[Any],
    image: npt.NDArray[Any],
    area: npt.NDArray[Any],
    cx: npt.NDArray[Any],
    cy: npt.NDArray[Any],
    owned: npt.NDArray[Any],
    cover: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Soft IoU of components with every shape, and the centres that each shape would have; all ``(components, shapes)``."""
    distance, areas, drop = _templates()
    radius = np.sqrt(area[:, None] / areas)
    sx, sy = np.repeat(cx[:, None], len(SHAPES), 1), cy[:, None] - drop * radius
    half = int(min(SIZE, np.ceil(radius.max() * 1.2) + 1))
    steps = np.arange(-half, half + 1)
    px, py = np.rint(cx).astype(int)[:, None] + steps, np.rint(cy).astype(int)[:, None] + steps
    h, w = owned.shape[1:]
    inside = ((py >= 0) & (py < h))[:, :, None] & ((px >= 0) & (px < w))[:, None, :]
    at = image[:, None, None], py.clip(0, h - 1)[:, :, None], px.clip(0, w - 1)[:, None, :]
    seen = np.where(inside & (owned[at] == kept[:, None, None]), cover[at], 0).astype(np.float32)[:, None]
    scale = (_FINE / radius).astype(np.float32)  # pixels to template cells
    ix = (
        ((px[:, None] - sx[..., None]) * scale[..., None] + _EXTENT * _FINE + 0.5)
        .astype(int)
        .clip(0, len(distance[0]) - 1)
    )
    iy = (
        ((py[:, None] - sy[..., None]) * scale[..., None] + _EXTENT * _FINE + 0.5)
        .astype(int)
        .clip(0, len(distance[0]) - 1)
    )
    shape = np.arange(len(SHAPES))[:, None, None]
    away = distance[shape, iy[..., None], ix[..., None, :]] * radius[..., None, None].astype(np.float32)
    drawn = (0.5 - away).clip(0, 1)
    both = np.minimum(drawn, seen).sum((2, 3))
    # Intersection plus union is the sum of both areas; the part of a component beyond the window counts in its area.
    return (both / (area[:, None] + drawn.sum((2, 3)) - both)).astype(np.float32), sx, sy


_EXTENT, _FINE = 1.5, 64  # templates reach this many radii from the centre, with this many cells a radius


@lru_cache(maxsize=1)
def _templates() -> tuple[Floats, Floats, Floats]:
    """Signed distances from each shape's outline at radius 1 ``(shapes, cells, cells)``, its area, its centroid's drop."""
    axis = np.linspace(-_EXTENT, _EXTENT, int(2 * _EXTENT * _FINE) + 1)
    points = np.stack(np.meshgrid(axis, axis), -1)
    distances = []
    for shape in SHAPES:
        a = np.array(outline(shape, 0, 0, 1))
        b = np.roll(a, -1, 0)
        nearest, inside = np.full(points.shape[:2], np.inf), np.zeros(points.shape[:2], bool)
        for p, q in zip(a, b, strict=True):
            along = ((points - p) @ (q - p) / ((q - p) @ (q - p))).clip(0, 1)
            nearest = np.minimum(nearest, np.linalg.norm(points - p - along[..., None] * (q - p), axis=-1))
            if p[1] != q[1]:  # crossing number along the ray to the right
                crosses = (p[1] > points[..., 1]) != (q[1] > points[..., 1])
                inside ^= crosses & (
                    points[..., 0] < (q[0] - p[0]) * (points[..., 1] - p[1]) / (q[1] - p[1]) + p[0]
                )
        distances.append(np.where(inside, -nearest, nearest))
    within = np.array(distances) < 0
    areas = within.mean((1, 2)) * (2 * _EXTENT) ** 2
    drop = (within * points[..., 1]).sum((1, 2)) / within.sum((1, 2))
    return np.array(distances, np.float32), areas.astype(np.float32), drop.astype(np.float32)


def judge(scene: Scene, objects: Sequence[Object]) -> float:
    """How much of a scene the objects fulfil, in [0, 1]; 1 if and only if all of it and nothing else.

    Objects are paired with the wanted ones so that most agrees: half a credit for the colour, half for the shape (less
    for a shape or colour that is only likely). Their sum is divided by the larger of the two numbers, so that missing
    and extra objects cost alike. A relation is worth 0.3 of that: each pair of an object of the first group with one of
    the others counts 1 if the relation holds between their centres, less the further they are from it.
    """
    wanted = [(i, g) for i, g in enumerate(scene.groups) for _ in range(g.count)]
    if not objects:
        return 0.0
    axis, side = RELATIONS[scene.relation] if scene.relation else (0, 0)
    place = [side * (o.y if axis else o.x) for o in objects]  # how far along the relation an object is
    agree = np.array([[_agreement(o, g) for _, g in wanted] for o in objects])
    # Where several pairings agree equally, the one that serves the relation is meant.
    lead = np.array([[p * (1 if i == 0 else -1) for i, _ in wanted] for p in place])
    rows, columns = optimize.linear_sum_assignment(agree + 1e-5 * lead, maximize=True)
    paired = [(wanted[c][0], place[r], agree[r, c]) for r, c in zip(rows, columns, strict=True)]
    content = sum(a for _, _, a in paired) / max(len(wanted), len(objects))
    if not scene.relation:
        return float(content)
    ahead = [p for i, p, a in paired if i == 0 and a]
    behind = [p for i, p, a in paired if i and a]
    pairs = scene.groups[0].count * sum(g.count for g in scene.groups[1:])
    held = sum(1.0 if p > q else 0.5 * np.exp((p - q) / 16) for p in ahead for q in behind) / pairs
    return float(content if held == 1 else content * (0.7 + 0.3 * held))


def _agreement(o: Object, g: Group) -> float:
    colour = 1.0 if g.colour in (None, o.colour) else 0.6 if g.colour == o.likely[1] else 0.0
    shape = 1.0 if g.shape == o.shape else 0.6 * o.fit if g.shape == o.likely[0] else 0.0
    return (colour + shape) / 2


@lru_cache(maxsize=4096)
def _scene(prompt: str) -> Scene:
    try:
        return parse(prompt)
    except ValueError as error:
        raise UserError(str(error)) from None


@verifier("shapes")
class Shapes:
    """The oracle as a verifier: 1 exactly when the image shows what the caption asks and nothing else."""

    name = "shapes"
    reads_prompt = True
    differentiable = False
    range = (0.0, 1.0)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores images in [0, 1] of shape ``(n, 3, h, w)``: float32 ``(n,)`` in [0, 1].

        Raises:
            UserError: when a prompt is outside the grammar of the shapes world.
        """
        scenes = [_scene(p) for p in prompts]
        return torch.tensor(
            [judge(s, o) for s, o in zip(scenes, read(images), strict=True)], dtype=torch.float32
        )

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: there is no checkpoint, only this rule."""
        rule = {"covered": COVERED, "speck": SPECK, "fit": FIT, "spread": round(SPREAD, 4)}
        return {
            "name": self.name,
            "source": "imgscale.verifiers.shapes",
            "rule": rule,
            "licence": "Apache-2.0",
        }
