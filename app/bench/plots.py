"""Plots of a comparison: the best image's scores against model evaluations, and against seconds.

Up to five searchers share a panel for each score. More would hide each other, and get a panel each, the others in pale
behind it.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from imgscale.app.bench import statistics
from imgscale.app.bench.groups import Group
from imgscale.app.bench.rows import PLAIN
from imgscale.app.bench.statistics import Measure, values
from imgscale.app.bench.tables import mean
from imgscale.app.plots import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by eyes of every kind, without the yellow, which white paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
BASELINE, PALE = "#3d3d46", "#d4d4da"
MARKERS = ("s", "^", "D", "v", "P", "X", "*", "<", ">")
AXES = {"nfe": "model evaluations per image (NFE)", "seconds": "seconds per image"}
TOGETHER = 5  # searchers that share a panel
ACROSS = 4  # panels in a row, where each searcher has its own
DASHES = (0, (4, 1.6))
DOTS = (0, (1, 2))


def plot(group: Group, axis: str) -> bytes:
    """A PNG for one model and steering verifier.

    A marker is where the runs with a budget ended; the lines between them, solid for scores that steer and dashed for
    held-out ones, have 95% bands. Thin lines are the best so far within the runs with the largest budget; where there
    is but one budget, they have the bands.

    Args:
        group: What to show.
        axis: "nfe" or "seconds".
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=160)
    FigureCanvasAgg(figure)
    (_shared if len(group.searchers) <= TOGETHER else _apart)(figure, group, axis)
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box will do
        figure.savefig(data, format="png")
    return data.getvalue()


def style(group: Group) -> dict[str, tuple[str, str]]:
    """Colour and marker by searcher; the baseline is grey."""
    others = [name for name in group.searchers if name != group.baseline]
    found = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(others)}
    return {PLAIN: (MUTED, ""), group.baseline: (BASELINE, "o"), **found}


def _shared(figure: Figure, group: Group, axis: str) -> None:
    """A panel for each score and one for the share solved, all searchers in each."""
    panels = [Measure(name) for name in (group.steers, *group.held_out)]
    panels += [group.by] if group.by.at_least is not None else []
    styles = style(group)
    shown = [name for name in (PLAIN, *group.searchers) if any(name == searcher for searcher, _ in group.rows)]
    wide = max(4.3 * len(panels), 6)
    columns = max(1, min(len(shown), int(wide / (0.7 + 0.08 * max(map(len, shown))))))
    below = 0.75 + 0.24 * math.ceil(len(shown) / columns)
    high = _size(figure, wide, 3.15, 0.85, below, 1, len(panels))
    for axes, by in zip(figure.axes, panels, strict=True):
        for name in reversed(group.searchers):  # the baseline on top
            _line(axes, group, axis, by, name, *styles[name], thin=True)
        _dress(axes, group, axis, by)
        axes.set_title(_what(group, by), loc="left", fontsize=10, color=INK, parse_math=False)
        axes.set_xlabel(AXES[axis], color=MUTED, fontsize=9)
    handles = [_key(name, *styles[name]) for name in shown]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.01, 0),
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    _title(figure, group.title, wide, high)


def _apart(figure: Figure, group: Group, axis: str) -> None:
    """For the steering score and for what counts, a panel for each searcher beside the baseline."""
    panels = list(dict.fromkeys([Measure(group.steers), group.by]))
    styles = style(group)
    names = [name for name in group.searchers if name != group.baseline]
    rows = math.ceil(len(names) / ACROSS)
    wide = 3.05 * ACROSS
    high = _size(figure, wide, 1.75, 0.8, 0.62, rows * len(panels), ACROSS)
    for i, axes in enumerate(figure.axes):
        by, place = panels[i // (rows * ACROSS)], i % (rows * ACROSS)
        axes.set_visible(place < len(names))
        if place >= len(names):
            continue
        name = names[place]
        for other in names:
            if other != name:
                _line(axes, group, axis, by, other, PALE, "", pale=True)
        for each in (group.baseline, name):
            _line(axes, group, axis, by, each, *styles[each])
        _dress(axes, group, axis, by)
        title = textwrap.shorten(name, 44, placeholder=" …")
        axes.set_title(title, loc="left", fontsize=8.5, color=styles[name][0], fontweight="bold", parse_math=False)
        if not place % ACROSS:
            axes.set_ylabel("\n".join(textwrap.wrap(_what(group, by), 24)), color=INK, fontsize=8.5, parse_math=False)
    for first in range(0, len(figure.axes), rows * ACROSS):
        block = [axes for axes in figure.axes[first : first + rows * ACROSS] if axes.get_visible()]
        lows, highs = zip(*(axes.get_ylim() for axes in block), strict=True)
        for axes in block:
            axes.set_ylim(min(lows), max(highs))
    note = f"Grey: {group.baseline}. Pale: the other searchers. Dotted: one plain sample. Across: {AXES[axis]}."
    figure.text(0.22 / wide, 0.16 / high, note, fontsize=9, color=MUTED, parse_math=False)
    _title(figure, group.title, wide, high)


def _size(figure: Figure, wide: float, each: float, above: float, below: float, rows: int, columns: int) -> float:
    """Lays out panels of ``each`` inches in height, and returns the height of it all."""
    gap = 0.62
    high = above + below + rows * each + (rows - 1) * gap
    figure.set_size_inches(wide, high)
    figure.subplots(rows, columns)
    width = (wide - 0.9) / columns
    figure.subplots_adjust(
        left=0.7 / wide,
        right=1 - 0.2 / wide,
        top=1 - above / high,
        bottom=below / high,
        hspace=gap / each,
        wspace=0.6 / (width - 0.6),
    )
    return high


def _title(figure: Figure, text: str, wide: float, high: float) -> None:
    where = {"x": 0.2 / wide, "y": 1 - 0.18 / high, "ha": "left", "va": "top"}
    figure.text(s=text, fontsize=12, fontweight="bold", color=INK, parse_math=False, **where)  # type: ignore[arg-type]


def _what(group: Group, by: Measure) -> str:
    what = f"solved: {by.label}, %" if by.at_least is not None else f"best {by.name}"
    return f"{what} ({'steers' if by.name == group.steers else 'held out'})"


def _key(name: str, colour: str, marker: str) -> Any:
    from matplotlib.lines import Line2D

    label = "one plain sample" if name == PLAIN else name.replace("$", r"\$")
    dots: Any = DOTS if name == PLAIN else "-"
    return Line2D([], [], color=colour, linestyle=dots, linewidth=1.8, label=label, **_face(marker))


def _face(marker: str) -> dict[str, Any]:
    return {"marker": marker, "markerfacecolor": "white", "markeredgewidth": 1.4, "markersize": 5.5}


def _line(
    axes: Axes,
    group: Group,
    axis: str,
    by: Measure,
    name: str,
    colour: str,
    marker: str,
    *,
    thin: bool = False,
    pale: bool = False,
) -> None:
    """One searcher: what it reached with each budget, with the band; ``pale`` is a line alone."""
    scale = 100 if by.at_least is not None else 1
    dash: Any = "-" if by.name == group.steers else DASHES
    runs = group.of(name)
    if not runs:
        return
    found = [(mean(rows, axis), statistics.estimate(values(rows, by))) for rows in runs.values()]
    ends = np.array([(at, scale * e.value, scale * e.low, scale * e.high) for at, e in found if e is not None])
    if pale:
        axes.plot(*ends.T[:2], color=colour, linewidth=1, zorder=1) if len(ends) else None
        return
    single = len(ends) < 2
    trace = statistics.curve(runs[max(runs)], axis, by) if single or thin else None
    if trace is not None:
        look: dict[str, Any] = {"linewidth": 1.8} if single else {"linewidth": 0.9, "alpha": 0.6}
        axes.step(trace.at, scale * trace.mean, where="post", color=colour, linestyle=dash, **look)
        if single:
            band = scale * trace.low, scale * trace.high
            axes.fill_between(trace.at, *band, step="post", color=colour, alpha=0.13, linewidth=0)
    if not single:
        at, value, low, high = ends.T
        axes.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(at, value, color=colour, linestyle=dash, linewidth=1.8)
    if len(ends):
        axes.plot(*ends.T[:2], linestyle="", color=colour, zorder=3, **_face(marker))


def _dress(axes: Axes, group: Group, axis: str, by: Measure) -> None:
    """The plain sample's line, a quiet frame, and a logarithmic axis where budgets lie far apart."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

    plain = statistics.estimate(values(group.rows.get((PLAIN, 0), []), by))
    if plain is not None:
        height = plain.value * (100 if by.at_least is not None else 1)
        axes.axhline(height, color=MUTED, linewidth=1.4, linestyle=DOTS, zorder=1)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=3)
    axes.grid(True, axis="y", color="#e8e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9c9d0")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    low, high = axes.dataLim.intervaly
    room = max(0.06 * (high - low), 1e-3 * max(abs(low), abs(high), 1))  # or noise would look like progress
    if np.isfinite(low):
        axes.set_ylim(low - room, high + room)
    first, last = axes.dataLim.intervalx
    if axis == "nfe" and group.budgets[-1] >= 4 * group.budgets[0]:  # or the small budgets would be a smudge
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_spaced(group.budgets)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.set_xlim(first / 1.1, last * 1.1)
    elif np.isfinite(last):
        axes.set_xlim(0, last * 1.05)


def _spaced(budgets: Sequence[int]) -> list[int]:
    """Budgets whose labels don't touch on a logarithmic axis."""
    kept: list[int] = []
    for budget in budgets:
        if not kept or budget >= 1.3 * kept[-1]:
            kept.append(budget)
    return kept
