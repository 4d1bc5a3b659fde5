"""A grid as one picture: values along both edges, and under each image its scores and what it cost."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from imgscale.app.grid.axes import Axis
from imgscale.app.grid.cells import Cell
from imgscale.app.plots import INK, MUTED, STEERS, typeface

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SMALLEST, LARGEST, WIDEST = 192, 512, 3600  # pixels: of a cell, of a cell, and of all cells in a row
EDGE, GAP = 28, 14
BEST, PALE, FAILED = "#00664b", "#f3f3f5", "#b34a00"


def picture(cells: Sequence[Cell], x: Axis, y: Axis | None, title: str, settings: str) -> Image:
    """The picture, RGB.

    Args:
        cells: All of them.
        x: See `cells.cells`.
        y: See there.
        title: The prompt.
        settings: What all cells share, for a line below it.
    """
    from PIL import Image, ImageDraw

    plan = _Plan(cells, x, y, title, settings)
    sheet = Image.new("RGB", plan.size, "white")
    pen = ImageDraw.Draw(sheet)
    _head(pen, plan)
    for cell in cells:
        left = EDGE + plan.gutter + cell.column * (plan.wide + GAP)
        top = plan.top + cell.row * (plan.high + plan.caption + GAP)
        if cell.output is None:
            _failed(pen, plan, cell, left, top)
            continue
        shown = _fitted(cell.output.images[0], plan.wide, plan.high)
        pen.rectangle((left - 1, top - 1, left + plan.wide, top + plan.high), outline="#e4e4e9")
        sheet.paste(shown, (left + (plan.wide - shown.width) // 2, top + (plan.high - shown.height) // 2))
        star = cell is plan.best
        if star:
            pen.rectangle((left - 3, top - 3, left + plan.wide + 2, top + plan.high + 2), outline=BEST, width=3)
        for k, (text, bold) in enumerate(plan.captions[cell.column, cell.row]):
            colour = BEST if star and bold else INK if bold else MUTED
            pen.text((left, top + plan.high + 6 + 18 * k), text, colour, typeface(13, bold))
    return sheet


def best(cells: Sequence[Cell]) -> Cell | None:
    """The cell with the highest steering score, where all were steered by the same verifier."""
    found = [cell for cell in cells if cell.output is not None and math.isfinite(_score(cell))]
    if len(found) < 2 or len({cell.output.verifier for cell in found if cell.output}) > 1:
        return None
    return max(found, key=_score)


def _score(cell: Cell) -> float:
    assert cell.output is not None
    return cell.output.scores[cell.output.verifier]


@dataclass
class _Plan:
    """Where everything goes."""

    cells: Sequence[Cell]
    x: Axis
    y: Axis | None
    title: str
    settings: str

    @cached_property
    def columns(self) -> int:
        return max(cell.column for cell in self.cells) + 1

    @cached_property
    def rows(self) -> int:
        return max(cell.row for cell in self.cells) + 1

    @cached_property
    def scale(self) -> float:
        """Of the images: whole where they are enlarged, so that pixels stay squares."""
        sides = [max(cell.output.images[0].size) for cell in self.cells if cell.output] or [LARGEST]
        if max(sides) < SMALLEST:
            return math.ceil(SMALLEST / max(sides))
        return min(1.0, max(SMALLEST, min(LARGEST, WIDEST // self.columns)) / max(sides))

    @cached_property
    def wide(self) -> int:
        widths = [cell.output.images[0].width for cell in self.cells if cell.output]
        return max(160, *(math.ceil(self.scale * width) for width in widths), 0)

    @cached_property
    def high(self) -> int:
        heights = [cell.output.images[0].height for cell in self.cells if cell.output]
        return max((math.ceil(self.scale * height) for height in heights), default=160)

    @cached_property
    def across(self) -> Axis | None:
        """The axis along the columns."""
        return None if self.y is None and self.x.flag == "--y" else self.x

    @cached_property
    def down(self) -> Axis | None:
        """The axis along the rows."""
        return self.y if self.across is self.x else self.x

    @cached_property
    def over(self) -> list[list[str]]:
        """The values over the columns, in lines."""
        return [lines(value, typeface(15, True), self.wide, 4) for value in self.across.values] if self.across else []

    @cached_property
    def beside(self) -> list[list[str]]:
        """The values beside the rows, in lines."""
        return [lines(value, typeface(15, True), 200, 6) for value in self.down.values] if self.down else []

    @cached_property
    def gutter(self) -> int:
        if not self.down:
            return 0
        texts = [line for value in self.beside for line in value]
        wide = [typeface(15, True).getlength(line) for line in texts]
        return int(min(200, max([*wide, *(typeface(13, False).getlength(t) for t in self.down_title)]))) + 18

    @cached_property
    def down_title(self) -> list[str]:
        return lines(self.down.title, typeface(13, False), 200, 3) if self.down else []

    @cached_property
    def captions(self) -> dict[tuple[int, int], list[tuple[str, bool]]]:
        """Lines under each image, and whether they are set in bold: the steering score is."""
        found = {}
        for cell in self.cells:
            if cell.output is None:
                continue
            of, spent = cell.output, f"{cell.output.nfe} NFE"  # and no seconds, which cells share
            names = [of.verifier, *(name for name in of.scores if name != of.verifier)]
            texts = [(_written(name, of.scores[name]), name == of.verifier) for name in names]
            texts += [(f"{of.model}, {of.searcher}", False)] if of.decision is not None else []
            texts += [(spent, False), *([("stopped early", False)] if of.stopped == "cancelled" else [])]
            found[cell.column, cell.row] = [(_cut(t, typeface(13, bold), self.wide), bold) for t, bold in texts]
        return found

    @cached_property
    def caption(self) -> int:
        return 12 + 18 * max(map(len, self.captions.values()), default=0)

    @cached_property
    def best(self) -> Cell | None:
        return best(self.cells)

    @cached_property
    def width(self) -> int:
        return max(2 * EDGE + self.gutter + self.columns * (self.wide + GAP) - GAP, 560)

    @cached_property
    def heading(self) -> list[tuple[str, Any, str, int]]:
        """The lines above the grid: text, typeface, colour, height."""
        room, bold, small = self.width - 2 * EDGE, typeface(19, True), typeface(13, False)
        return [
            *((text, bold, INK, 26) for text in lines(self.title, bold, room, 4)),
            *((text, small, MUTED, 19) for text in lines(self.settings, small, room, 3)),
        ]

    @cached_property
    def top(self) -> int:
        """Where the first row begins."""
        labels = 22 + 19 * max(map(len, self.over)) + 8 if self.across else 19 * len(self.down_title) + 8
        return EDGE + sum(height for *_, height in self.heading) + 12 + labels

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.top + self.rows * (self.high + self.caption + GAP) - GAP + EDGE - 10


def _head(pen: ImageDraw, plan: _Plan) -> None:
    at = EDGE - 8
    for text, font, colour, height in plan.heading:
        pen.text((EDGE, at), text, colour, font)
        at += height
    start = EDGE + plan.gutter
    if plan.across:
        font, y = typeface(13, False), plan.top - 8 - 19 * max(map(len, plan.over)) - 21
        pen.text((start, y), _cut(plan.across.title, font, plan.width - start), STEERS, font)
        for i, value in enumerate(plan.over):
            for k, text in enumerate(value):
                y = plan.top - 8 - 19 * (len(value) - k)
                pen.text((start + i * (plan.wide + GAP), y), text, INK, typeface(15, True))
    for k, text in enumerate(plan.down_title):
        y = plan.top - 8 - 19 * (len(plan.down_title) - k)
        pen.text((EDGE, y), text, STEERS, typeface(13, False))
    for i, value in enumerate(plan.beside):
        for k, text in enumerate(value):
            y = plan.top + i * (plan.high + plan.caption + GAP) + 19 * k
            pen.text((EDGE, y), text, INK, typeface(15, True))


def _failed(pen: ImageDraw, plan: _Plan, cell: Cell, left: int, top: int) -> None:
    pen.rectangle((left, top, left + plan.wide - 1, top + plan.high - 1), fill=PALE, outline="#dcdce2")
    small = typeface(12, False)
    pen.text((left + 10, top + 8), "no image", FAILED, typeface(13, True))
    for k, text in enumerate(lines(cell.error, small, plan.wide - 20, (plan.high - 36) // 16)):
        pen.text((left + 10, top + 28 + 16 * k), text, INK, small)


def _fitted(image: Image, wide: int, high: int) -> Image:
    """The image as large as fits, enlarged by whole factors only."""
    from PIL import Image as Images

    scale = min(wide / image.width, high / image.height)
    if scale >= 1:
        size = image.width * int(scale), image.height * int(scale)
        return image.convert("RGB").resize(size, Images.Resampling.NEAREST)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.convert("RGB").resize(size, Images.Resampling.LANCZOS)


def _written(name: str, score: float) -> str:
    return f"{name} {score:.3f}" if math.isfinite(score) else f"{name} –"


def _cut(text: str, font: Any, width: float) -> str:
    """The text, with three dots for what is too wide."""
    if font.getlength(text) <= width:
        return text
    return text[: _fits(text, font, width - font.getlength("…"))].rstrip() + "…"


def _fits(text: str, font: Any, width: float) -> int:
    """How many letters fit, at least one. By halves: a prompt may be ten thousand letters without a space."""
    return max(1, bisect_right(range(1, len(text) + 1), width, key=lambda n: font.getlength(text[:n])))


def lines(text: str, font: Any, width: float, most: int) -> list[str]:
    """A text in lines of so many pixels, broken between words where it can be, and cut off after so many lines."""
    found = [""]
    for word in text.split():
        joined = f"{found[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            found[-1] = joined
            continue
        found += [word] if found[-1] else []
        found[-1] = found[-1] or word
        while font.getlength(found[-1]) > width and len(found[-1]) > 1 and len(found) <= most + 1:
            fits = _fits(found[-1], font, width)
            found[-1:] = [found[-1][:fits], found[-1][fits:]]
    if len(found) > max(most, 1):
        found[max(most, 1) - 1 :] = [_cut(f"{found[max(most, 1) - 1]} …", font, width)]
    return found
