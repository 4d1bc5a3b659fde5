"""Pictures about a search: its trace, and the plain image beside the one that it found."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.result import SearchOutput

INK, MUTED, STEERS, REPORTS = "#1b1b1f", "#6b6b76", "#1f5fbf", ("#c2571a", "#7a3e9d", "#2a7f4f")
SMALLEST = 320  # pixels: smaller images are enlarged to at least this width


def trace(output: SearchOutput) -> bytes:
    """A PNG of the best score against NFE: the steering verifier's solid, the held-out ones' dashed.

    A held-out score gets an axis of its own, on the right, where it moves in other numbers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    points = [p for p in output.trace if math.isfinite(p.score)]
    nfe = [p.nfe for p in points]
    scores = {output.verifier: [p.score for p in points]}
    reported = points[0].report if points else {}
    held_out = {
        name: [p.report[name] if math.isfinite(p.report[name]) else math.nan for p in points] for name in reported
    }
    lines = [_steps(left, nfe, scores[output.verifier], STEERS, "-", f"{output.verifier} (steers)")]
    shared = all(_alike(scores[output.verifier], values) for values in held_out.values())
    right = left if shared else left.twinx()
    for i, (name, values) in enumerate(held_out.items()):
        lines.append(_steps(right, nfe, values, REPORTS[i % 3], "--", f"{name} (held out)"))
    if output.plain is not None and math.isfinite(plain := output.plain.scores[output.verifier]):
        lines.append(
            left.axhline(
                plain, color=MUTED, linewidth=1, linestyle=(0, (1, 2)), label=f"plain sample's {output.verifier}"
            )
        )
    left.set_xlabel("model evaluations (NFE)", color=INK)
    left.set_ylabel(f"best {output.verifier}" if not shared or not held_out else "best score", color=INK)
    if not shared:
        right.set_ylabel(", ".join(held_out), color=REPORTS[0])
    left.set_xlim(0, max([*nfe, 1]) * 1.02)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in {left, right}:
        axis.spines["top"].set_visible(False)
        axis.spines["right"].set_visible(axis is right and not shared)
        axis.tick_params(colors=MUTED)
        axis.ticklabel_format(axis="y", useOffset=False, style="plain")
        low, high = axis.dataLim.intervaly
        room = max(0.12 * (high - low), 0.005 * max(abs(low), abs(high)), 0.002)  # or noise would look like progress
        if low <= high:  # and not infinite, for want of any score
            axis.set_ylim(low - room, high + room)
    left.grid(True, color="#e6e6ea", linewidth=0.8)
    left.set_axisbelow(True)
    title = "\n".join(wrapped(output.prompt, 78, 2))
    left.set_title(title, loc="left", fontsize=10, color=INK, parse_math=False, pad=30)
    left.legend(
        handles=lines, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=8, borderaxespad=0.3
    )
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box will do
        figure.savefig(data, format="png")
    return data.getvalue()


def _steps(axis: Any, nfe: list[int], scores: list[float], colour: str, style: str, label: str) -> Any:
    """The best so far holds until it changes: a curve with steps, and a dot at each change."""
    (line,) = axis.step(nfe, scores, where="post", color=colour, linestyle=style, linewidth=1.8, label=label)
    axis.plot(nfe[: max(1, len(nfe) - 1)], scores[: max(1, len(nfe) - 1)], "o", color=colour, markersize=3)
    return line


def _alike(a: list[float], b: list[float]) -> bool:
    """Whether two curves can share an axis: neither is flattened by the range of both."""
    values = [v for v in (*a, *b) if math.isfinite(v)]
    span = max(values, default=0) - min(values, default=0)
    return all(max(c, default=0) - min(c, default=0) >= span / 3 for c in (a, b))


def comparison(output: SearchOutput) -> bytes:
    """A PNG of the plain image beside the found one, each above its scores and cost; the prompt on top."""
    from PIL import Image, ImageDraw

    assert output.plain is not None
    pictures = [enlarged(output.plain.image), enlarged(output.images[0])]
    steps = f"{output.plain.ledger.nfe} NFE", f"{output.nfe} NFE"
    names = "plain sample", f"{output.searcher} search"
    captions = [
        [(names[i], INK, 17, True), (_scores(scores), INK, 14, False), (steps[i], MUTED, 14, False)]
        for i, scores in enumerate((output.plain.scores, output.scores))
    ]
    gap, line = 24, 22
    width, height = pictures[0].size
    total = 2 * width + 3 * gap
    font = typeface(17, True)
    letters = len(output.prompt) * (total - 2 * gap) / font.getlength(" ".join(output.prompt.split()))
    rows = wrapped(output.prompt, int(0.95 * letters), 3)
    top = gap + line * len(rows) + 10
    sheet = Image.new("RGB", (total, top + height + 14 + line * 3 + gap // 2), "white")
    pen = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        pen.text((gap, gap - 6 + i * line), row, INK, font)
    for i, picture in enumerate(pictures):
        x = gap + i * (width + gap)
        sheet.paste(picture, (x, top))
        pen.rectangle((x - 1, top - 1, x + width, top + height), outline="#d5d5da")
        for k, (text, colour, size, bold) in enumerate(captions[i]):
            font = typeface(size, bold)
            while font.getlength(text) > width and len(text) > 1:
                text = text[:-2] + "…"
            pen.text((x, top + height + 10 + k * line), text, colour, font)
    data = io.BytesIO()
    sheet.save(data, "PNG")
    return data.getvalue()


def enlarged(image: Image) -> Image:
    """A tiny image by a whole factor, each pixel a square; others as they are."""
    from PIL import Image

    factor = math.ceil(SMALLEST / image.width) if image.width < SMALLEST else 1
    return image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _scores(scores: dict[str, float]) -> str:
    return " · ".join(f"{name} {score:.3f}" for name, score in scores.items())


def wrapped(text: str, width: int, most: int) -> list[str]:
    """A prompt in lines of so many letters, cut off after so many lines."""
    return textwrap.wrap(text, max(width, 8), max_lines=most, placeholder=" …")


def typeface(size: int, bold: bool) -> Any:
    """DejaVu, which matplotlib ships: it has far more scripts than Pillow's own font."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)
