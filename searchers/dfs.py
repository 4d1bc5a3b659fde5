"""Depth-first search: go on while the preview is good enough, and back up where it isn't."""

from __future__ import annotations

from collections import defaultdict
from math import ceil
from typing import Literal

import numpy as np
import torch

from imgscale.errors import UserError
from imgscale.grids import search_schedule
from imgscale.kernels import kernel as read_kernel
from imgscale.particles import Particles, join
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher
from imgscale.searchers._population import at_least_one
from imgscale.searchers.best_of_n import best_of_n
from imgscale.searchers.threshold import bar


@searcher("dfs", cite="zhang2025classical")
def dfs(
    problem: Problem,
    rng: np.random.Generator,
    *,
    chains: int = 4,
    backtracks: int = 4,
    depth: float = 0.25,
    checkpoints: int = 3,
    threshold: float | None = None,
    scale: Literal["constant", "alpha"] = "constant",
    quantile: float = 0.5,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
) -> Verb:
    """Marches to a checkpoint, and re-noises what is below the threshold there, to try that part again.

    A chain without backtracks left goes on from the best that it saw at the checkpoint. Chains march side by side, so
    that their steps share batches; new ones start until the budget is spent.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        chains: Chains side by side.
        backtracks: Times that one chain may go back, at all its checkpoints together.
        depth: How far back, as a share of the transitions; the paper advises a quarter or more.
        checkpoints: Places where previews are judged, spread evenly over the transitions.
        threshold: The score that lets a chain go on. If None, a quantile of all scores seen at the same checkpoint, in
            this chain and others, since previews sharpen from one to the next.
        scale: The threshold as it is, or times the checkpoint's alpha (its share of data), which asks less of early
            previews if scores are positive.
        quantile: The quantile if there is no threshold.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions. By
            default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The step: "ode", whose trials differ by the re-noising alone, or a stochastic one such as "ddim(1)".

    Source: algorithm DFS of Zhang et al. 2025 (arXiv 2505.23614). Beyond it: thresholds learnt from what was seen,
    chains side by side until the budget is spent, and the ODE finish.
    """
    at_least_one("dfs", chains=chains, checkpoints=checkpoints)
    if not 0 < depth <= 1 or not 0 <= quantile <= 1 or backtracks < 0:
        raise UserError(
            f"dfs's depth ({depth}) must be above 0 and up to 1, its quantile ({quantile}) from 0 to 1, and its"
            f" backtracks ({backtracks}) not negative."
        )
    schedule, step = search_schedule(problem, path, steps), read_kernel(kernel)
    marks = _marks(checkpoints, schedule.steps)
    back = ceil(depth * schedule.steps - 1e-9)
    seen: dict[int, list[float]] = defaultdict(list)

    def cost(start: int, stop: int) -> np.ndarray:
        """Evaluations and verifier calls of one chain; a guide takes a gradient before each transition."""
        gradients = (stop - max(start, 0)) if problem.guide is not None else 0
        return np.array([problem.cost(schedule, start, stop, step), 0]) + gradients

    def image(mark: int) -> np.ndarray:
        """What takes one chain from a mark to its score."""
        return cost(mark, marks[-1]) + [problem.finishing_from(schedule, marks[-1]), 1]

    def fitting(n: int, each: np.ndarray, held: np.ndarray | int = 0) -> int:
        """How many, up to n, can pay this each, if something else is held back."""
        return max(0, int(min(n, *((np.array([problem.left, problem.scores_left]) - held) / each))))

    while marks and (n := fitting(chains, image(-1))):
        group, chances = (yield from problem.start(n, schedule)), torch.full((n,), backtracks)
        for mark in marks:
            group = yield from problem.denoise(group, mark, step)
            start = max(mark - back, 0)
            alpha = float(schedule.path.alpha(schedule.times[mark])) if scale == "alpha" else 1.0
            trial, chain, retry = group, torch.arange(n), cost(start, mark) + 1
            if not chances.any() or not fitting(1, retry, held=n * image(mark) + [0, n]):
                continue  # whatever a look said, nobody could go back
            while True:
                trial, scores = yield from problem.score(trial)
                group = _better(group, trial, chain)
                seen[mark] += scores.tolist()
                enough = bar(seen[mark], None if threshold is None else alpha * threshold, quantile)
                failed = ((scores < enough) & (chances[chain] > 0)).nonzero()[:, 0]
                failed = failed[: fitting(n, retry, held=n * image(mark))]
                if not len(failed):
                    break
                chain = chain[failed]
                chances[chain] -= 1
                trial = yield from problem.renoise(trial[failed], start)
                trial = yield from problem.denoise(trial, mark, step)
        yield from problem.score((yield from problem.finish(group)))
    yield from best_of_n(problem, rng)


def _better(group: Particles, trial: Particles, chain: torch.Tensor) -> Particles:
    """The group, in which the trials of these chains replace what scored less."""
    if group.scores is None or trial.scores is None:
        return trial  # the first trial of all chains
    better = trial.scores > group.scores[chain]
    rows = torch.arange(len(group))
    rows[chain[better]] = len(group) + better.nonzero()[:, 0]
    return join([group, trial])[rows]


def _marks(checkpoints: int, steps: int) -> list[int]:
    """The steps at which previews are judged: neither the noise nor the image."""
    even = (round(steps * (i + 1) / (checkpoints + 1)) for i in range(checkpoints))
    return sorted({mark for mark in even if 0 < mark < steps})
