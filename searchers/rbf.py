"""Rollover budget forcing: search each transition until it improves, and let the rest of its quota roll over."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import numpy as np

from imgscale.budget import Rollover
from imgscale.particles import Particles, join
from imgscale.problem import Problem, Request, Verb
from imgscale.registry import searcher
from imgscale.searchers._plan import Plan, make_plan
from imgscale.searchers._population import at_least_one
from imgscale.searchers.best_of_n import best_of_n

FEW = 5  # samples' worth of evaluations, below which whole images tell more than draws that are judged ahead
BATCH = 32  # starts or draws of all chains in one request: enough to fill a batch, few enough to heed a deadline


@searcher("rbf", cite="kim2025rbf")
def rbf(
    problem: Problem,
    rng: np.random.Generator,
    *,
    chain_nfe: int | None = None,
    starts: int | None = None,
    skip: float | None = None,
    explore: float | None = None,
    look: float | None = None,
    keep: int | None = None,
    images: int | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    steps: int = 10,
    kernel: str = "ddim(1)",
    draws: int | None = None,
    accept: Literal["first", "best"] = "best",
    beat: Literal["best", "current"] = "best",
) -> Verb:
    """Rollover budget forcing: draws at each transition until one improves; the rest of the quota rolls over.

    Chains run side by side, each on its share of the budget: it picks a start, searches the first transitions by
    stochastic steps, and solves the rest by the model's ODE. What is left afterwards buys more chains. Where the
    verifier has a highest score, chains run one after another, since the search ends once an image has it.

    On a model whose x0 is blurred early, draws are judged further on: each is solved to the place where previews tell,
    and since all are judged there, a draw of a later transition only counts if it beats the best of the earlier ones. A
    budget of fewer than five samples is best-of-n's there, unless ``chain_nfe`` or a guide is given.

    Args:
        problem: What to solve.
        rng: Not needed: all noise follows from the seed.
        chain_nfe: Model evaluations of one chain; the number of chains follows from the budget. 50 by default, as
            published, and 100 where draws are judged further on.
        starts: Starting noises per chain, of which the best ``keep`` are drawn from. Half of the chain's budget by
            default on a distilled model, as the paper's code has it, and 1 on another; where draws are judged further
            on they aren't judged, all are drawn from, and there are 3.
        skip: Share of the transitions that pass before the first draws. A tenth by default where draws are judged
            further on, since draws of the very first transition would differ as starts do and cost more; else 0.
        explore: Share of the transitions that is searched; the rest is solved. By default those that decide the picture
            if that was measured (`imgscale profile`); else all of them on a distilled model, and three tenths on an
            ordinary one.
        look: Share of the transitions after which draws are judged; 0 judges each where it lands, as published. By
            default where previews tell if that was measured; else 0 on a distilled model and half on an ordinary one.
        keep: The best so many trajectories are drawn from at the next transition. 1 by default, as published, and 2
            where draws are judged further on.
        images: The best so many trajectories are finished; more when budget is left. 1 by default, and 3 where draws
            are judged further on.
        path: The path to walk: the model's own (with its own grid), or linear or vp with ``steps`` transitions at the
            paper's times. By default vp on a distilled flow model and own otherwise.
        steps: Transitions on the linear or vp path.
        kernel: The stochastic step, such as "ddim(1)" or "sde(g=3t^2)".
        draws: Speculative draws per chain and batch, all of them charged. 8 by default, and 16 where they are judged
            further on.
        accept: Of a batch with several improvements, take the first or the best.
        beat: The reward to beat is the best seen so far, or that of the current particle.

    Source: algorithm 2 of Kim et al. 2025 (arXiv 2503.19385). Beyond it: batched draws, the place where they are
    judged, several trajectories, the ODE finish, and chains until the budget is spent.
    """
    at_least_one("rbf", chain_nfe=chain_nfe, starts=starts, keep=keep, images=images, draws=draws)
    plan = make_plan(problem, "rbf", skip=skip, explore=explore, look=look, path=path, steps=steps, kernel=kernel)
    ahead = not plan.judges_starts
    if ahead and chain_nfe is None and problem.guide is None and problem.left < FEW * problem.sample_nfe:
        return (yield from best_of_n(problem, rng))
    chain_nfe = chain_nfe or (100 if ahead else 50)
    starts = starts or (3 if ahead else max(1, chain_nfe // 2) if problem.distilled else 1)
    keep = keep or (2 if ahead else 1)
    images = images or (3 if ahead else 1)
    draws = draws or (16 if ahead else 8)

    def room(chains: int) -> int:
        """Evaluations that so many chains may have between them, besides what their images take."""
        affordable = min(problem.left, 16 * chain_nfe) - chains * images * plan.tail
        return int(min(affordable, (problem.scores_left - chains * images) * plan.mean_cost))

    while plan.stages and room(1) < plan.lean:
        if images > 1:
            images -= 1
        else:
            plan = plan.shorter()
    while plan.stages and room(1) >= plan.lean:
        size = max(chain_nfe, plan.lean + images * plan.tail)
        n = max(1, round((room(1) + images * plan.tail) / size))
        while room(n) < n * plan.lean:
            n -= 1
        shares = Rollover(room(n), [1] * n).quotas
        if problem.ceiling is not None:
            shares = shares[-1:]  # the largest
        chains = yield from _begin(plan, shares, starts, keep)
        for stage in plan.stages:
            yield from _search_transition(plan, chains, stage, draws, keep, accept, beat)
            if ahead and problem.ceiling is not None and plan.judged(stage) == plan.judged(plan.stages[-1]):
                yield from _finish_the_perfect(plan, chains, images, problem.ceiling)
        ends = [way for chain in chains for way in chain.open[: images - len(chain.finished)]]
        if plan.tail and room(len(chains) + 1) < plan.lean:  # not enough for another chain: finishes the best not taken
            rest = _ranked(way for chain in chains for way in chain.open[images - len(chain.finished) :])
            ends += rest[: max(0, problem.affordable(plan.tail, at_most=16 * chain_nfe) - len(ends))]
        if ends:
            yield from problem.score((yield from problem.finish(join([way.end for way in ends]))))
    yield from best_of_n(problem, rng)  # too little for a chain may do for a sample


@dataclass(eq=False)
class _Way:
    """A trajectory: its particle at each step from where it was drawn to where it was judged, and its reward there."""

    at: dict[int, Particles]
    reward: float

    @property
    def end(self) -> Particles:
        return self.at[max(self.at)]


@dataclass
class _Chain:
    """What the next draws are made from, the reward to beat, the quotas, and all that was judged at this place."""

    parents: list[_Way]
    beat: float
    quotas: Rollover
    found: list[_Way] = field(default_factory=list)
    finished: list[_Way] = field(default_factory=list)

    @property
    def open(self) -> list[_Way]:
        """What was judged at this place and isn't an image yet, the best first."""
        return [way for way in self.found if way not in self.finished]


def _begin(plan: Plan, shares: Sequence[int], starts: int, keep: int) -> Generator[Request, Any, list[_Chain]]:
    """A chain for every share of the budget: at the best of its starts where those are judged, else at all of them."""
    musts, each = plan.musts, 1 + plan.skipped
    judged = plan.judges_starts
    chains = []
    together = max(1, BATCH // starts)  # chains whose starts make one request
    for part in (shares[i : i + together] for i in range(0, len(shares), together)):
        firsts = [min(starts, (share - sum(musts)) // each) for share in part]
        fresh = yield from plan.problem.start(sum(firsts), plan.schedule)
        fresh = yield from plan.problem.denoise(fresh, plan.skipped)
        rewards = [-inf] * len(fresh)
        if judged:
            fresh, scores = yield from plan.problem.score(fresh)
            rewards = scores.tolist()
        for share, first, end in zip(part, firsts, np.cumsum(firsts), strict=True):
            mine = _ranked(_Way({plan.skipped: fresh[j]}, rewards[j]) for j in range(end - first, end))
            mine = mine[:keep] if judged else mine
            quotas = Rollover(share - first * each, plan.weights, musts)
            chains.append(_Chain(mine, mine[0].reward if judged else -inf, quotas))
    return chains


def _search_transition(
    plan: Plan, chains: Sequence[_Chain], stage: int, draws: int, keep: int, accept: str, beat: str
) -> Verb:
    """One transition of all chains: batches of draws until each chain improves or has used its quota."""
    drawn = [0] * len(chains)
    quota = stage - plan.skipped
    for chain in chains:
        chain.found = chain.found if plan.known(stage) else []
    waiting = list(range(len(chains)))
    while waiting:
        asked = waiting[: max(1, BATCH // draws)]
        sizes = [plan.fitting(chains[c].quotas.left(quota), stage, draws, len(chains[c].parents)) for c in asked]
        ways = yield from _draw(
            plan, stage, [(chains[c].parents, n, drawn[c]) for c, n in zip(asked, sizes, strict=True)]
        )
        for c, n in zip(asked, sizes, strict=True):
            chain, mine, ways = chains[c], ways[:n], ways[n:]
            drawn[c] += n
            chain.quotas.charge(quota, plan.cost(stage, n, len(chain.parents)))
            better = [way for way in mine if way.reward > chain.beat]
            chain.found = _ranked([*chain.found, *mine])
            if better and accept == "first":
                chain.found.sort(key=lambda way: way is not better[0])
            if not better and plan.fitting(chain.quotas.left(quota), stage, 1, len(chain.parents)):
                continue
            chain.parents = chain.found[:keep]
            if better or beat == "current":
                chain.beat = chain.parents[0].reward
            chain.quotas.close(quota)
            waiting.remove(c)


def _finish_the_perfect(plan: Plan, chains: Sequence[_Chain], images: int, ceiling: float) -> Verb:
    """Images of trajectories that look as good as can be: if they are, the search is over.

    Each chain keeps one of its images for what it may still find.
    """
    ends = []
    for chain in chains:
        perfect = [way for way in chain.open if way.reward >= ceiling][: max(0, images - 1 - len(chain.finished))]
        chain.finished += perfect
        ends += [way.end for way in perfect]
    if ends:
        yield from plan.problem.score((yield from plan.problem.finish(join(ends))))


def _draw(
    plan: Plan, stage: int, orders: Sequence[tuple[Sequence[_Way], int, int]]
) -> Generator[Request, Any, list[_Way]]:
    """New trajectories, judged: for each order (parents, n, drawn before) n draws, shared among its parents."""
    families = []
    for parents, n, before in orders:
        for i, parent in enumerate(parents):
            first, last = ((count + len(parents) - 1 - i) // len(parents) for count in (before, before + n))
            families.append(parent.at[stage].branch(last - first, first))
    here = yield from plan.problem.denoise(join(families), stage + 1, plan.kernel)
    steps = [here]
    while here.step < plan.judged(stage):
        here = yield from plan.problem.denoise(here, here.step + 1)
        steps.append(here)
    steps[-1], scores = yield from plan.problem.score(here)
    return [_Way({s.step: s[j] for s in steps}, reward) for j, reward in enumerate(scores.tolist())]


def _ranked(ways: Iterable[_Way]) -> list[_Way]:
    """Best first; of equals the one drawn first."""
    return sorted(ways, key=lambda way: way.reward, reverse=True)
