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
from PIL import Image, ImageDraw
from scipy import ndimage, optimize, sparse
from torch import Tensor

from imgscale.assets.shapes.world import COLOURS, RELATIONS, SHAPES, SIZE, Group, Scene, outline, parse
from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import check

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

COVERED = 0.4  # of a pixel: from here on it belongs to an object
SPECK = 8.0  # pixels of area: anything smaller is dirt, not an object (the smallest star that is drawn has 16)
FIT = 0.8  # soft IoU with the best template below which a component has no shape
HUE = 0.96  # cosine with the nearest palette direction below which a component has no colour; between two: 0.98
STRENGTH = 0.6, 1.25  # depth of a component's inside relative to its palette colour's: paler or darker has no colour
BLURS = 0.05, 0.15, 0.28  # Gaussian blur of the templates in radii: as rendered, and softer, as autoencoders draw
DARKEST = 0.85  # a background can be; a darker one is an object
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
    parts = _segment(*_frame(images))
    if parts is None:
        return found
    fits, x, y = _fits(parts)
    shape = fits.argmax(1)
    for i, image in enumerate(parts.image):
        fit, (hue, strength) = float(fits[i, shape[i]]), (parts.hue[i], parts.strength[i])
        coloured = hue.max() >= HUE and STRENGTH[0] <= strength <= STRENGTH[1]
        likely = SHAPES[shape[i]], _NAMES[hue.argmax()]
        found[image].append(
            Object(
                shape=likely[0] if fit >= FIT else None,
                colour=likely[1] if coloured else None,
                x=float(x[i, shape[i]]) + 0.5,
                y=float(y[i, shape[i]]) + 0.5,
                area=float(parts.area[i]),
                fit=fit,
                likely=likely,
            )
        )
    return [sorted(objects, key=lambda o: -o.area) for objects in found]


@dataclass(frozen=True)
class _Parts:
    """The components of one colour in a batch of images, as arrays with one row each.

    Attributes:
        label: What they are called in ``owner``.
        image: Which image each is in.
        area, x, y: Covered pixels and their centroid.
        hue: Cosines of the inside's depth with those of the palette ``(components, colours)``.
        strength: Length of the inside's depth relative to that of the nearest palette colour.
        owner, cover: For each pixel ``(n, h, w)``, which component it belongs to (0: none) and how far it is covered.
    """

    label: Ints
    image: Ints
    area: Floats
    x: Floats
    y: Floats
    hue: Floats
    strength: Floats
    owner: Ints
    cover: Floats


def _segment(rgb: Floats, finite: npt.NDArray[np.bool_]) -> _Parts | None:
    """The components in images ``(n, h, w, 3)``; None if there is nothing at all."""
    background = np.median(rgb[:, ::2, ::2].reshape(len(rgb), -1, 3), 1).mean(1).clip(DARKEST, 1)
    depth = background[:, None, None, None] - rgb  # what an object takes away from the background
    full = background[:, None, None] - _PALETTE  # (n, colours, 3): the depth of a fully covered pixel
    reach = np.linalg.norm(full, axis=-1)
    unit = full / reach[..., None]
    along = np.matmul(depth.reshape(len(rgb), -1, 3), unit.transpose(0, 2, 1)).reshape(*rgb.shape[:3], -1)
    colour = along.argmax(-1)
    # Not the projection: a depth along no palette direction, such as a black object's, is there too.
    length = np.sqrt(np.einsum("nhwk,nhwk->nhw", depth, depth))
    covered = length > COVERED * reach[np.arange(len(rgb))[:, None, None], colour]
    covered &= finite[:, None, None]
    if not covered.any():
        return None
    inner, image, plane = _components(covered, colour)
    inner[np.bincount(inner.ravel())[inner] < SPECK / 1.5] = 0

    # Inside, away from the soft edge, is the component's own colour. One too thin to have an inside counts whole.
    core = (ndimage.minimum_filter(inner, footprint=_CROSS) == inner) & (inner > 0)
    core |= (np.bincount(inner[core], minlength=len(image)) == 0)[inner] & (inner > 0)
    sums = np.stack([np.bincount(inner[core], v, len(image)) for v in depth[core].T], 1)
    within = sums / np.maximum(np.bincount(inner[core], minlength=len(image)), 1)[:, None]
    deep = np.linalg.norm(within, axis=-1)
    hue = np.einsum("ik,ick->ic", within, unit[image]) / np.maximum(deep, 1e-6)[:, None]
    strength = deep / reach[image, hue.argmax(1)]

    owner = inner
    for _ in range(2):  # the soft edge is the nearest component's
        owner = np.where(owner, owner, ndimage.maximum_filter(owner, size=(1, 3, 3)))
    n, y, x = np.nonzero(owner)
    label = owner[n, y, x]
    share = along[n, y, x, plane[label]] / (reach[n, plane[label]] * strength[label].clip(COVERED, 2))
    cover = np.zeros(owner.shape, np.float32)
    cover[n, y, x] = share.clip(0, 1)
    area = np.bincount(label, cover[n, y, x], len(image))
    kept = np.flatnonzero(area >= SPECK)
    cx, cy = (np.bincount(label, cover[n, y, x] * v, len(image))[kept] / area[kept] for v in (x, y))
    return (
        _Parts(kept, image[kept], np.asarray(area[kept], np.float32), cx, cy, hue[kept], strength[kept], owner, cover)
        if len(kept)
        else None
    )


_CROSS = np.array([[[0, 1, 0], [1, 1, 1], [0, 1, 0]]])  # a pixel and its four neighbours, in each image


def _frame(images: Tensor) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Images as ``(n, h, w, 3)`` with the longer side 64, and which of them are finite throughout."""
    images = images.detach().float()
    finite = images.flatten(1).isfinite().all(1)
    images = images.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    h, w = images.shape[-2:]
    if max(h, w) != SIZE:
        size = [max(1, round(side * SIZE / max(h, w))) for side in (h, w)]
        images = torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
    return images.permute(0, 2, 3, 1).cpu().numpy(), finite.cpu().numpy()


def _components(covered: npt.NDArray[np.bool_], colour: Ints) -> tuple[Ints, Ints, Ints]:
    """Labels from 1 of the covered pixels that touch side by side in one colour; each label's image and colour.

    A graph over the covered pixels only: several times faster than labelling one plane for each colour.
    """
    n, y, x = np.nonzero(covered)
    node = np.zeros(covered.shape, np.int32)
    node[n, y, x] = np.arange(len(n))
    ends = []
    for axis in (1, 2):
        low = tuple(slice(0, -1) if k == axis else slice(None) for k in range(3))
        high = tuple(slice(1, None) if k == axis else slice(None) for k in range(3))
        joined = covered[low] & covered[high] & (colour[low] == colour[high])
        ends.append((node[low][joined], node[high][joined]))
    a, b = (np.concatenate(side) for side in zip(*ends, strict=True))
    graph = sparse.coo_array((np.ones(len(a), bool), (a, b)), shape=(len(n), len(n)))
    count, component = sparse.csgraph.connected_components(graph, directed=False)
    flat = np.zeros(covered.shape, np.int32)
    flat[n, y, x] = component + 1
    image, plane = np.zeros(count + 1, int), np.zeros(count + 1, int)
    image[component + 1], plane[component + 1] = n, colour[n, y, x]
    return flat, image, plane


def _fits(parts: _Parts) -> tuple[Floats, Floats, Floats]:
    """Soft IoU of components with each shape, and the centres it would have: three arrays ``(components, shapes)``."""
    templates, areas, drop = _templates()
    radius = np.sqrt(parts.area[:, None] / areas)
    sx, sy = np.repeat(parts.x[:, None], len(SHAPES), 1), parts.y[:, None] - drop * radius
    half = int(min(SIZE, np.ceil(radius.max() * 1.2) + 2))
    steps = np.arange(-half, half + 1)
    px, py = (np.rint(v).astype(int)[:, None] + steps for v in (parts.x, parts.y))
    h, w = parts.owner.shape[1:]
    inside = ((py >= 0) & (py < h))[:, :, None] & ((px >= 0) & (px < w))[:, None, :]
    at = parts.image[:, None, None], py.clip(0, h - 1)[:, :, None], px.clip(0, w - 1)[:, None, :]
    own = inside & (parts.owner[at] == parts.label[:, None, None])
    seen = np.where(own, parts.cover[at], 0).astype(np.float32)[:, None]

    def cell(pixels: Ints, centre: Floats) -> Ints:  # row or column of the templates: (components, shapes, pixels)
        places = (pixels[:, None] - centre[..., None]) / radius[..., None]
        return ((places + _EXTENT) * _FINE + 0.5).astype(np.int32).clip(0, templates.shape[-1] - 1)

    shape = np.arange(len(SHAPES))[:, None, None]
    place = (shape * templates.shape[-2] + cell(py, sy)[..., None]) * templates.shape[-1] + cell(px, sx)[..., None, :]
    fits = []
    for template in templates:
        drawn = template.ravel()[place]
        both = np.minimum(drawn, seen).sum((2, 3))
        # Intersection plus union is the sum of both areas, that of the component beyond the window included.
        fits.append(both / (parts.area[:, None] + drawn.sum((2, 3)) - both))
    return np.max(fits, 0).astype(np.float32), sx, sy


_EXTENT, _FINE = 2, 32  # templates reach this many radii from the centre, with this many cells a radius


@lru_cache(maxsize=1)
def _templates() -> tuple[npt.NDArray[np.float32], Floats, Floats]:
    """Coverage of each shape at radius 1, blurred ``(blurs, shapes, cells, cells)``; its area; its centroid's drop."""
    over = 4  # drawn so much finer, then averaged
    cells = 2 * _EXTENT * _FINE + 1
    middle = cells * over / 2 - 0.5
    masks = []
    for shape in SHAPES:
        canvas = Image.new("L", (cells * over, cells * over))
        corners = outline(shape, middle, middle, _FINE * over)
        ImageDraw.Draw(canvas).polygon(corners, fill=1)
        masks.append(np.asarray(canvas, np.float32).reshape(cells, over, cells, over).mean((1, 3)))
    areas = np.array([m.sum() for m in masks]) / _FINE**2
    rows = (np.arange(cells) - _EXTENT * _FINE)[:, None] / _FINE
    drop = np.array([(m * rows).sum() / m.sum() for m in masks])
    blurred = [[ndimage.gaussian_filter(m, blur * _FINE) for m in masks] for blur in BLURS]
    return np.array(blurred, np.float32), areas, drop


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
    licence = "none"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores images in [0, 1] of shape ``(n, 3, h, w)``: float32 ``(n,)`` in [0, 1].

        Raises:
            UserError: when a prompt is outside the grammar of the shapes world.
        """
        check("shapes", images, prompts)
        scenes = [_scene(p) for p in prompts]
        scores = [judge(s, o) for s, o in zip(scenes, read(images), strict=True)]
        return torch.tensor(scores, dtype=torch.float32, device=images.device)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: there is no checkpoint, only this rule."""
        rule = {"covered": COVERED, "speck": SPECK, "fit": FIT, "hue": HUE, "strength": STRENGTH}
        return {
            "name": self.name,
            "source": "imgscale.verifiers.shapes",
            "rule": rule,
            "licence": "Apache-2.0",
        }
