"""Rollover budget forcing: search each transition until it improves, and let the rest of its quota roll over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Literal

import numpy as np

from imgscale.budget import Rollover
from imgscale.errors import UserError
from imgscale.kernels import Kernel
from imgscale.kernels import kernel as read_kernel
from imgscale.particles import Particles, Schedule, join
from imgscale.paths import VP, Linear
from imgscale.problem import Problem, Verb
from imgscale.registry import searcher

BATCH = 32  # starts or draws of all chains in one request: enough to fill a batch, few enough to heed a deadline


@dataclass
class _Chain:
    """One trajectory: where it is, the reward to beat, its quotas, and what it drew at this transition."""

    at: Particles
    beat: float
    quotas: Rollover
    drawn: list[Particles] = field(default_factory=list)


@searcher("rbf", cite="kim2025rbf")
def rbf(
    problem: Problem,
    rng: np.random.Generator,
    *,
    chain_nfe: int | None = None,
    starts: int | None = None,
    explore: float | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
    draws: int = 8,
    accept: Literal["first", "best"] = "best",
    beat: Literal["best", "current"] = "best",
) -> Verb:
    """Rollover budget forcing: draws at each transition until one improves; the rest of the quota rolls over.

    Chains run side by side, each on its share of the budget: it picks a start, searches the first transitions by
    stochastic steps, and solves the rest by the model's ODE. What is left afterwards buys more chains.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        chain_nfe: Model evaluations of one chain; the number of chains follows from the budget. 50 by default on a
            distilled model, as published, and 33 on an ordinary one.
        starts: Starting noises to choose from, per chain. 1 by default on an ordinary model, where x0 at t = 1 is the
            same for all; half of the chain's budget on a distilled one, as the paper's code has it.
        explore: Share of the transitions that is searched; the rest is solved. All of them by default on a distilled
            model, the first half on an ordinary one, since they decide the picture.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions at the
            paper's times. By default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".
        draws: Speculative draws per chain and batch, all of them charged.
        accept: Of a batch with several improvements, take the first or the best.
        beat: The reward to beat is the best seen so far, or that of the current particle.

    Source: algorithm 2 of Kim et al. 2025 (arXiv 2503.19385). Beyond it: batched draws, the ODE finish, and chains
    until the budget is spent.
    """
    schedule = _schedule(problem, path, steps)
    step = read_kernel(kernel)
    explore = (1.0 if problem.distilled else 0.5) if explore is None else explore
    chain_nfe = (50 if problem.distilled else 33) if chain_nfe is None else chain_nfe
    _check(step, explore, chain_nfe, starts, draws)
    evaluated = schedule.nfe(0, schedule.steps)
    searched = ceil(explore * evaluated - 1e-9)
    if starts is None:
        starts = chain_nfe // 2 if problem.distilled else 1

    def room(chains: int) -> int:
        """Previews that so many chains may have between them, besides what their images take."""
        return int(min(min(problem.left, 16 * size) - chains * tail, problem.scores_left - chains))

    while True:
        lean, tail = 1 + searched, problem.finishing_from(schedule, searched)  # one start, and one draw a transition
        size = max(chain_nfe, lean + tail)
        if not searched or room(1) >= lean:
            break
        searched -= 1
    while room(1) >= lean:
        n = max(1, round((room(1) + tail) / size))
        while room(n) < n * lean:
            n -= 1
        shares = Rollover(room(n), [1] * n).quotas
        chains = []
        together = max(1, BATCH // starts)  # chains whose starts make one request
        for part in (shares[i : i + together] for i in range(0, n, together)):
            firsts = [min(starts, share - searched) for share in part]
            fresh, scores = yield from problem.score((yield from problem.start(sum(firsts), schedule)))
            for share, first, end in zip(part, firsts, np.cumsum(firsts), strict=True):
                best = int(end) - first + int(scores[end - first : end].argmax())
                quotas = Rollover(share - first, [1] * searched or [1])
                chains.append(_Chain(fresh[best], float(scores[best]), quotas))
        for stage in range(searched):
            yield from _search_transition(problem, chains, stage, step, draws, accept, beat)
        ends = [chain.at for chain in chains]
        if tail and room(n + 1) < lean:  # too little for another chain: it finishes the best not taken
            ends += _runners_up(chains, problem.affordable(tail, at_most=16 * size) - n)
        yield from problem.score((yield from problem.finish(join(ends))))


def _search_transition(
    problem: Problem, chains: Sequence[_Chain], stage: int, kernel: Kernel, draws: int, accept: str, beat: str
) -> Verb:
    """One transition of all chains: batches of draws until each chain improves or has used its quota."""
    for chain in chains:
        chain.drawn = []
    waiting = list(chains)
    while waiting:
        asked = waiting[: max(1, BATCH // draws)]
        sizes = [min(draws, chain.quotas.left(stage)) for chain in asked]
        firsts = [sum(map(len, chain.drawn)) for chain in asked]
        children = join([c.at.branch(n, first) for c, n, first in zip(asked, sizes, firsts, strict=True)])
        children, scores = yield from problem.score((yield from problem.denoise(children, stage + 1, kernel)))
        ends = np.cumsum(sizes)
        for chain, n, end in zip(asked, sizes, ends, strict=True):
            chain.quotas.charge(stage, n)
            mine, rewards = children[end - n : end], scores[end - n : end]
            chain.drawn.append(mine)
            better = (rewards > chain.beat).nonzero()[:, 0].tolist()
            if better:
                winner = better[0] if accept == "first" else int(rewards.argmax())
                chain.at, chain.beat = mine[winner], float(rewards[winner])
            elif chain.quotas.left(stage):
                continue
            else:
                chain.at = _ranked(chain.drawn)[0]
                if beat == "current":
                    chain.beat = _score(chain.at)
            chain.quotas.close(stage)
            waiting.remove(chain)


def _runners_up(chains: Sequence[_Chain], n: int) -> list[Particles]:
    """The ``n`` best of the last transition's draws that no chain took."""
    taken = {int(chain.at.keys[0]) for chain in chains}
    ranked = _ranked([part for chain in chains for part in chain.drawn])
    return [particle for particle in ranked if int(particle.keys[0]) not in taken][:n]


def _ranked(parts: Sequence[Particles]) -> list[Particles]:
    """Single particles, best first; of equals the one drawn first."""
    singles = [part[i] for part in parts for i in range(len(part))]
    return sorted(singles, key=_score, reverse=True)


def _score(particle: Particles) -> float:
    assert particle.scores is not None
    return float(particle.scores[0])


def _schedule(problem: Problem, path: str | None, steps: int) -> Schedule:
    if path is None:
        path = "vp" if problem.distilled and isinstance(problem.schedule.path, Linear) else "own"
    if path == "own":
        return problem.schedule
    if steps < 2:
        raise UserError(f"rbf's steps can't be {steps}; give 2 or more.")
    times = [sqrt(1 - (i / steps) ** 2) for i in range(steps + 1)]  # s = sqrt(1 - (1 - tau)^2)
    return Schedule(VP() if path == "vp" else Linear(), tuple(times))


def _check(kernel: Kernel, explore: float, chain_nfe: int, starts: int | None, draws: int) -> None:
    if not kernel.stochastic:
        raise UserError(f"rbf needs noise to choose from, and the kernel {kernel} has none; take ddim(1) or sde.")
    if not 0 < explore <= 1:
        raise UserError(f"rbf's explore can't be {explore}; give a share above 0 and up to 1.")
    for name, value in (("chain_nfe", chain_nfe), ("starts", starts), ("draws", draws)):
        if value is not None and value < 1:
            raise UserError(f"rbf's {name} can't be {value}; it must be at least 1.")
