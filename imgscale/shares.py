"""One budget for many prompts: what those don't need that are solved, or stopped improving, goes to the others.

A run is played in rounds. The first gives every prompt the same; each further one asks what every prompt would gain by
so much more, from the scores of what it has found, and gives to those that would gain most. What a round doesn't spend,
because searches reach the top of their verifier's range, moves on to the next (`Rollover`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, ndtr, polygamma

from imgscale.budget import Rollover
from imgscale.errors import UserError

ROUNDS = (0.4, 0.2, 0.2, 0.2)  # of the total; even splits are rounds of (1.0,)
POINTS = 64  # of the integral
FIRM, LOOSE = 1e3, 1e-2  # degrees of freedom of a common spread that all prompts have, and of one that says nothing


@dataclass
class Progress:
    """What a prompt has got so far.

    Args:
        nfe: Model evaluations spent on it.
        scores: Of its finished images, by the verifier that steers; those that aren't finite don't count.
        ceiling: The highest score that there is, or None.
    """

    nfe: int = 0
    scores: list[float] = field(default_factory=list)
    ceiling: float | None = None

    @property
    def best(self) -> float:
        """The highest score, −inf if there is none."""
        return max(self.scores, default=-math.inf)

    @property
    def solved(self) -> bool:
        """Whether no score could be higher."""
        return self.ceiling is not None and self.best >= self.ceiling

    def add(self, nfe: int, scores: Sequence[float]) -> None:
        """Takes in the outcome of a search."""
        self.nfe += nfe
        self.scores += [score for score in scores if math.isfinite(score)]


class Shares:
    """Splits one total over the searches of many prompts.

    The same results give the same split, in whatever order they came: a run that was stopped in the middle goes on
    as it would have.

    Args:
        total: Model evaluations for all of it.
        prompts: How many there are, at least 1.
        least: What the smallest useful search takes: one sample. Every search gets a multiple of it.
        rounds: Shares of the total, not negative.

    Raises:
        UserError: The total can't give every prompt one sample.
    """

    def __init__(self, total: int, prompts: int, least: int, rounds: Sequence[float] = ROUNDS) -> None:
        if total < prompts * least:
            raise UserError(
                f"A total budget of {total} NFE can't give {prompts} prompts one image each, which takes"
                f" {prompts * least}; give that or more, or fewer prompts."
            )
        self.least = least
        self.prompts = [Progress() for _ in range(prompts)]
        weights = list(rounds)
        first = max(weights[0], prompts * least / total)  # everybody gets an image
        rest = sum(weights[1:])
        shares = [first, *(w * (1 - first) / rest for w in weights[1:])] if rest else [1.0]
        self.ledger = Rollover(total, [max(share, 0.0) for share in shares])

    def plan(self, round_: int) -> dict[int, int]:
        """What to spend on which prompt in a round, after those before it are over.

        Args:
            round_: Its number, the first being 0.

        Returns:
            A budget in NFE for each prompt that gets one; a multiple of ``least`` but for what can't be divided, which
            the first ones get.
        """
        left = self.ledger.left(round_)
        open_ = [i for i, prompt in enumerate(self.prompts) if not prompt.solved]
        helpings = left // self.least
        if not open_ or not helpings:
            return {}
        counts = self._even(open_, helpings) if round_ == 0 else self._by_gain(open_, helpings)
        return {i: n * self.least for i, n in sorted(counts.items()) if n}

    def book(self, round_: int, place: int, nfe: int, scores: Sequence[float], ceiling: float | None = None) -> None:
        """Takes in what a search of a round spent and found.

        Args:
            round_: The round.
            place: The prompt.
            nfe: What was spent.
            scores: Of the finished images.
            ceiling: The top of the verifier's range, or None.
        """
        self.ledger.charge(round_, nfe)
        self.prompts[place].ceiling = ceiling
        self.prompts[place].add(nfe, scores)

    def close(self, round_: int) -> None:
        """Ends a round: what is left of it moves on."""
        self.ledger.close(round_)

    def _even(self, places: Sequence[int], helpings: int) -> dict[int, int]:
        each, more = divmod(helpings, len(places))
        return {place: each + (i < more) for i, place in enumerate(places)}

    def _by_gain(self, places: Sequence[int], helpings: int) -> dict[int, int]:
        """Helpings one by one, each to the prompt that gains most by it; ties go to the first."""
        counts = dict.fromkeys(places, 0)
        variances = self._variances()
        gains = {place: self._gains(self.prompts[place], variances[place]) for place in places}
        queue = [(-next(gains[place]), place) for place in places]
        heapq.heapify(queue)
        for _ in range(helpings):
            _, place = queue[0]
            counts[place] += 1
            heapq.heapreplace(queue, (-next(gains[place]), place))
        return counts

    def _gains(self, prompt: Progress, variance: float) -> Iterator[float]:
        """How much the best score is expected to rise by the 1st, 2nd, … further helping, without end.

        Scores are taken to be normal draws with the prompt's own mean. The rise of the best by k draws is the integral
        of 1 - F(x)^k from the best on.
        """
        n, scores = len(prompt.scores), np.array(prompt.scores)
        if not n:
            yield from itertools.repeat(-math.inf)  # its verifier fails: nothing to gain
        if not variance > 0:
            yield from itertools.repeat(0.0)
        mean, spread = float(scores.mean()), math.sqrt(variance)
        top = max(prompt.best, mean) + 8 * spread
        top = top if prompt.ceiling is None else max(prompt.best, min(top, prompt.ceiling))
        x = np.linspace(prompt.best, top, POINTS)
        below = np.log(np.maximum(ndtr((x - mean) / spread), 1e-300))
        draws = n * self.least / max(prompt.nfe, 1)  # finished images by one more helping
        rise = 0.0
        for helping in itertools.count(1):
            now = float(np.trapezoid(-np.expm1(helping * draws * below), x))
            yield now - rise
            rise = now

    def _variances(self) -> list[float]:
        """Of each prompt's scores: its own, drawn to the common one as far as prompts are found to be alike.

        The empirical Bayes of Smyth (2004), section 6.2: log variances differ by chance alone by a trigamma function of
        their degrees of freedom; what they differ by beyond that says how many degrees the common one is worth.
        """
        own = [(float(np.var(p.scores, ddof=1)), len(p.scores) - 1) if len(p.scores) > 1 else None for p in self.prompts]
        found = np.array([each for each in own if each]).reshape(-1, 2)
        if not (found[:, 0] > 0).any():
            return [0.0] * len(own)
        squares, freedom = found[:, 0], found[:, 1]
        squares = np.maximum(squares, 1e-6 * squares.mean())  # equal scores are a spread too small to be seen
        logs = np.log(squares) - digamma(freedom / 2) + np.log(freedom / 2)
        beyond = logs.var(ddof=1) - polygamma(1, freedom / 2).mean() if len(logs) > 1 else 0.0
        worth = _degrees(beyond)
        common = math.exp(logs.mean() + digamma(worth / 2) - math.log(worth / 2))
        return [(worth * common + (each[1] * each[0] if each else 0)) / (worth + (each[1] if each else 0)) for each in own]


def _degrees(beyond: float) -> float:
    """The degrees of freedom whose log variance varies by so much: the inverse of trigamma(d / 2)."""
    if beyond <= polygamma(1, FIRM / 2):
        return FIRM
    if beyond >= polygamma(1, LOOSE / 2):
        return LOOSE
    return float(brentq(lambda d: polygamma(1, d / 2) - beyond, LOOSE, FIRM))
