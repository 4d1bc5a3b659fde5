"""Reward hacking: a search that pleases its verifier more and more, and a held-out judge less and less."""

from __future__ import annotations

import math
from collections.abc import Sequence

from imgscale.result import TracePoint

LEAST = 4  # new best images, below which no order is significant
CHANCE = 0.05  # of a judge that has nothing to do with the search, to look like falling


def falling(scores: Sequence[float]) -> bool:
    """Whether scores fall with their place: the last is below the first, and Kendall's tau says that it isn't chance.

    The test is one-sided at `CHANCE` (Kendall 1938), exact where no scores are equal.
    """
    from scipy import stats

    if len(scores) < LEAST or scores[-1] >= scores[0]:
        return False
    return bool(stats.kendalltau(range(len(scores)), scores, alternative="less").pvalue <= CHANCE)


def hacked(trace: Sequence[TracePoint], held_out: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Held-out judges whose score falls over the new best images of a search, with the first and the last score.

    The steering score only rises from one new best image to the next, so that this is what reward hacking means here:
    the first rises while the second falls.

    Args:
        trace: The best so far, each time it changed.
        held_out: Names of the judges.
    """
    found = {}
    for name in held_out:
        scores = [point.report[name] for point in bests(trace) if math.isfinite(point.report.get(name, math.nan))]
        if falling(scores):
            found[name] = scores[0], scores[-1]
    return found


def bests(trace: Sequence[TracePoint]) -> list[TracePoint]:
    """The points with a new best image, without the one that only says where the search ended."""
    return [point for i, point in enumerate(trace) if i == 0 or point.report is not trace[i - 1].report]


def warning(verifier: str, trace: Sequence[TracePoint], held_out: Sequence[str]) -> str | None:
    """One sentence for people if a search was hacked."""
    fallen = hacked(trace, held_out)
    if not fallen:
        return None
    points = bests(trace)
    judges = " and ".join(f"{name} from {first:.4g} to {last:.4g}" for name, (first, last) in fallen.items())
    return (
        f"Over {len(points)} new best images {verifier} rose from {points[0].score:.4g} to {points[-1].score:.4g} while"
        f" the held-out judge fell: {judges}. The search may be finding mistakes of {verifier} (reward hacking); spend"
        " less, or steer by several verifiers, such as clip+aesthetic."
    )
