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
from collections.abc import Callable, Sequence
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
        least: By prompt what the smallest useful search takes: one sample. Every search gets a multiple of it.
        weights: By prompt how much it counts, positive; all the same for None.
        rounds: Shares of the total, not negative.

    Raises:
        UserError: The total can't give every prompt one sample.
    """

    def __init__(
        self,
        total: int,
        least: Sequence[int],
        weights: Sequence[float] | None = None,
        rounds: Sequence[float] = ROUNDS,
    ) -> None:
        needed = sum(least)
        if total < needed:
            raise UserError(
                f"A total budget of {total} NFE can't give {len(least)} searches one image each, which takes {needed};"
                " give that or more, or fewer prompts."
            )
        self.least = list(least)
        self.weights = [1.0] * len(least) if weights is None else list(weights)
        self.prompts = [Progress() for _ in least]
        first = max(rounds[0], needed / total)  # everybody gets an image
        rest = sum(rounds[1:])
        shares = [first, *(max(w * (1 - first) / rest, 0.0) for w in rounds[1:])] if rest else [1.0]
        self.ledger = Rollover(total, shares)

    def plan(self, round_: int) -> dict[int, int]:
        """What to spend on which prompt in a round, after those before it are over.

        Args:
            round_: Its number, the first being 0.

        Returns:
            A budget in NFE for each prompt that gets one, a multiple of its ``least``.
        """
        open_ = [i for i, prompt in enumerate(self.prompts) if not prompt.solved]
        if round_ == 0:
            return self._deal(open_, self.ledger.left(0), dict.fromkeys(open_, 1), self._evenly)
        lacks = self._lacks(open_)
        return self._deal(open_, self.ledger.left(round_), {}, lambda place, n: self._gain(place, lacks[place], n))

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

    def _deal(
        self, places: Sequence[int], left: int, given: dict[int, int], worth: Callable[[int, int], float]
    ) -> dict[int, int]:
        """Helpings one by one, each to the prompt to which it is worth most; ties go to the first.

        Args:
            places: The prompts.
            left: What there is.
            given: Helpings that they have for sure.
            worth: Of a prompt's n-th helping.
        """
        left -= sum(self.least[place] * n for place, n in given.items())
        queue = [(-worth(place, given.get(place, 0) + 1), place) for place in places]
        heapq.heapify(queue)
        while queue:
            place = queue[0][1]
            if self.least[place] > left:
                heapq.heappop(queue)
                continue
            left -= self.least[place]
            given[place] = given.get(place, 0) + 1
            heapq.heapreplace(queue, (-worth(place, given[place] + 1), place))
        return {place: n * self.least[place] for place, n in sorted(given.items())}

    def _evenly(self, place: int, helping: int) -> float:
        """Who has got least so far, for its weight, comes first."""
        return -(helping - 1) * self.least[place] / self.weights[place]

    def _gain(self, place: int, lack: float, helping: int) -> float:
        """What a model evaluation of the n-th further helping is worth, but for a factor that is the same for all."""
        least = self.least[place]
        return self.weights[place] * lack / (self.prompts[place].nfe / least + helping) / least

    def _lacks(self, places: Sequence[int]) -> dict[int, float]:
        """How far each prompt's best score is from the bound: 0 where no score is finite, since its verifier fails."""
        bests = [prompt.best for prompt in self.prompts if prompt.scores]
        bound = max(bests, default=0.0) + ABOVE * (statistics.pstdev(bests) if bests else 0.0)
        if (ceiling := max((p.ceiling for p in self.prompts if p.ceiling is not None), default=None)) is not None:
            bound = min(bound, ceiling)
        least = 1e-9 * max(abs(bound), 1.0)  # where all are equally good, they share what is left evenly
        return {i: max(bound - self.prompts[i].best, least) if self.prompts[i].scores else 0.0 for i in places}
