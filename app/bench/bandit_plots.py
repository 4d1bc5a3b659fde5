"""Plots of replayed policies: regret over time with bands, and what is right against what it costs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from imgscale.app.bench.plots import COLOURS, MARKERS
from imgscale.app.plots import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from imgscale.app.bench.bandit import Line

SHOWN = ("linucb", "knn", "thompson", "epsilon-greedy", "fixed", "neuralucb")
ACROSS = 4


def regrets(lines: Sequence[Line], steps: int) -> bytes:
    """A PNG: cumulative regret of some policies, a panel for each scenario, with 95% bands over shuffles."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(line.scenario for line in lines))
    rows = -(-len(kinds) // ACROSS)
    figure = Figure(figsize=(12.5, 3.2 * rows), dpi=130, layout="constrained")
    panels = figure.subplots(rows, ACROSS, squeeze=False).ravel()
    for axes, kind in zip(panels, kinds, strict=False):
        for colour, name in zip(COLOURS, SHOWN, strict=True):
            for line in lines:
                if (line.policy, line.scenario) == (name, kind):
                    middle, low, high = line.curve
                    at = np.linspace(1, steps, len(middle))
                    axes.plot(at, middle, color=colour, lw=2.2 if name == "linucb" else 1.3, label=name)
                    axes.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
        axes.set_title(kind, color=INK, fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=8)
        axes.set_xlim(0, steps)
        axes.set_ylim(bottom=0)
    for axes in panels[len(kinds) :]:
        axes.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    if len(panels) > len(kinds):
        panels[len(kinds)].legend(handles, labels, frameon=False, loc="center left", fontsize=10)
    else:
        figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside lower center")
    figure.supxlabel("decisions", color=MUTED, fontsize=10)
    figure.supylabel("cumulative regret", color=MUTED, fontsize=10)
    return _png(figure)


def trade(lines: Sequence[Line]) -> bytes:
    """A PNG: the share of right images against cost, a panel for each mode; better is up and to the left."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("cost", "balanced", "quality") if any(line.scenario == kind for line in lines)]
    figure = Figure(figsize=(12.5, 4.2), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharex=True, sharey=True)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        shown = [line for line in lines if line.scenario == kind and "," not in line.policy]
        for i, line in enumerate(shown):
            own = line.policy == "linucb"
            axes.scatter(
                line.values["cost"][0],
                100 * line.values["correct"][0],
                s=110 if own else 55,
                color=COLOURS[0] if own else COLOURS[1 + i % (len(COLOURS) - 1)],
                marker="o" if own else MARKERS[i % len(MARKERS)],
                label=line.policy,
                zorder=3 if own else 2,
            )
        axes.set_title(kind, color=INK, fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=8)
        axes.grid(color="#e6e6ea", lw=0.6)
    panels[0].set_ylabel("images that are right, %", color=MUTED)
    figure.supxlabel("mean cost, of the dearest action's", color=MUTED, fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right center", fontsize=9)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()
