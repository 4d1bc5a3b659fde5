"""The best reward against NFE, as markup that stays sharp at any width and follows the page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from imgscale.app.demo.desk import Point

Curve = list[tuple[float, float]]


def chart(points: Sequence[Point], verifier: str, total: int, now: int = 0, plain: float | None = None) -> str:
    """A plot: the steering verifier's best solid, the others' scores of the same images dashed.

    Scores of different verifiers can't be compared, so the dashed ones have an axis of their own on the right.

    Args:
        points: Wherever the best changed.
        verifier: The steering one's name.
        total: NFE at the right end.
        now: NFE spent, up to which the last best holds.
        plain: The plain image's score, a dotted line.
    """
    found = [point for point in points if math.isfinite(point.score)]
    if not found:
        return '<div class="is-chart is-empty"><p>The best score against model evaluations.</p></div>'
    now = max(now, found[-1].nfe)
    right_end = max(total, now, 1)
    steers: Curve = [(p.nfe, p.score) for p in found]
    names = list(dict.fromkeys(name for p in found for name in p.report))
    held: dict[str, Curve] = {
        n: [(p.nfe, p.report[n]) for p in found if math.isfinite(p.report.get(n, math.nan))] for n in names
    }
    held = {name: curve for name, curve in held.items() if curve}
    low, high = _range([score for _, score in steers] + ([plain] if plain is not None else []))
    lines = []
    if plain is not None:
        y = _up(plain, low, high)
        lines.append(f'<line class="plain" x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}"/>')
    legend = [_key("steers", verifier, steers[-1][1])]
    right = ""
    if held:
        bottom, top = _range([score for curve in held.values() for _, score in curve])
        bottom -= 0.25 * (top - bottom)  # or two curves that are flat would lie on each other
        right = _axis("right", bottom, top)
        for i, (name, curve) in enumerate(held.items()):
            lines.append(_path(f"held h{i % 3}", curve, now, right_end, bottom, top))
            legend.append(_key(f"held h{i % 3}", f"{name} (held out)", curve[-1][1]))
    lines.append(_path("steers", steers, now, right_end, low, high))
    if plain is not None:
        legend.append(_key("plain", "plain sample", plain))
    grid = "".join(f'<line class="grid" x1="0" x2="100" y1="{y}" y2="{y}"/>' for y in (0, 50, 100))
    alt = escape(f"Best {verifier} against model evaluations: {steers[-1][1]:.3f} after {found[-1].nfe}.")
    return (
        f'<figure class="is-chart" role="img" aria-label="{alt}"><figcaption>{"".join(legend)}</figcaption>'
        f'<div class="frame">{_axis("left", low, high)}'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{grid}{"".join(lines)}</svg>{right}</div>'
        f'<div class="below"><span>0</span><span>model evaluations (NFE)</span><span>{right_end}</span></div></figure>'
    )


def _range(scores: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis: some room around the scores, or noise would look like progress."""
    low, high = min(scores), max(scores)
    room = max(0.1 * (high - low), 0.005 * max(abs(low), abs(high)), 0.002)
    return low - room, high + room


def _up(score: float, low: float, high: float) -> float:
    return 100 - 100 * (score - low) / (high - low)


def _path(kind: str, curve: Curve, now: int, end: float, low: float, high: float) -> str:
    """Steps, and a dot at each change: the best so far holds until it changes, and the last one up to now."""
    x, y = 100 * curve[0][0] / end, _up(curve[0][1], low, high)
    parts, dots = [f"M{x:.2f} {y:.2f}"], [f"M{x:.2f} {y:.2f}h0"]
    for nfe, score in curve[1:]:
        x, y = 100 * nfe / end, _up(score, low, high)
        parts.append(f"H{x:.2f}V{y:.2f}")
        dots.append(f"M{x:.2f} {y:.2f}h0")
    line = f'<path class="{kind}" d="{"".join(parts)}H{100 * now / end:.2f}"/>'
    return f'{line}<path class="{kind} dots" d="{"".join(dots)}"/>'


def _axis(side: str, low: float, high: float) -> str:
    digits = max(0, min(4, 2 - math.floor(math.log10(high - low))))
    marks = "".join(f"<span>{value:.{digits}f}</span>" for value in (high, (low + high) / 2, low))
    return f'<div class="axis {side}" aria-hidden="true">{marks}</div>'


def _key(kind: str, name: str, value: float) -> str:
    return f'<span class="key {kind}"><i></i>{escape(name)} <b>{value:.3f}</b></span>'
