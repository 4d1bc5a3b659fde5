"""One budget for many prompts: what those don't need that are solved, or stopped improving, goes to the others.

A run is played in rounds. The first gives every prompt the same; each further one asks what every prompt would gain by
so much more, and gives to those that would gain most. What a round doesn't spend, because searches reach the top of
their verifier's range, moves on to the next (`Rollover`).

What a prompt would gain follows from extreme values: the best of n draws of a bounded score lacks c n^(-1/a) of the
bound in the mean, so the next draw is worth what still lacks, divided by a n. The exponent a is taken to be the same
for all prompts, and then doesn't matter. The bound is the verifier's where it has one, or else a little above the best
that any prompt of the run has got.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from imgscale.budget import Rollover
from imgscale.errors import UserError

ROUNDS = (0.4, 0.2, 0.2, 0.2)  # of the total; an even split is the rounds (1.0,)
ABOVE = 0.5  # of the standard deviation of prompts' best scores: how far above the highest of them the bound is put


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
        lacks = self._lacks(places)
        queue = [(-self._gain(place, lacks[place], 1), place) for place in places]
        heapq.heapify(queue)
        for _ in range(helpings):
            place = queue[0][1]
            counts[place] += 1
            heapq.heapreplace(queue, (-self._gain(place, lacks[place], counts[place] + 1), place))
        return counts

    def _gain(self, place: int, lack: float, helping: int) -> float:
        """What the 1st, 2nd, … further helping of a prompt is worth, but for a factor that is the same for all."""
        return lack / (self.prompts[place].nfe / self.least + helping)

    def _lacks(self, places: Sequence[int]) -> dict[int, float]:
        """How far each prompt's best score is from the bound: 0 where no score is finite, since its verifier fails."""
        bests = [prompt.best for prompt in self.prompts if prompt.scores]
        bound = max(bests, default=0.0) + ABOVE * (statistics.pstdev(bests) if bests else 0.0)
        if (ceiling := max((p.ceiling for p in self.prompts if p.ceiling is not None), default=None)) is not None:
            bound = min(bound, ceiling)
        least = 1e-9 * max(abs(bound), 1.0)  # where all are equally good, they share what is left evenly
        return {i: max(bound - self.prompts[i].best, least) if self.prompts[i].scores else 0.0 for i in places}
