"""A total budget in rounds: what the searches of a run may spend, dealt anew after each by what they have found.

Who gets what is worked out by `imgscale.shares` from the rows of earlier rounds alone, so that a resumed run and
several processes come to the same. An item that failed keeps what it was given, to be tried again with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from imgscale import keys
from imgscale.shares import ROUNDS, Shares


@dataclass(frozen=True)
class Turn:
    """An item in a round.

    Args:
        item: Its number.
        round: From 0.
        least: Model evaluations of one sample.
        budget: Model evaluations that it may spend.
        nfe: What it spent; None until it is over.
        scores: Of the finished images, by the verifier that steers.
        ceiling: The top of that verifier's range, or None.
    """

    item: int
    round: int
    least: int
    budget: int
    nfe: int | None = None
    scores: Sequence[float] = field(default=())
    ceiling: float | None = None


def deal(total: int, least: Mapping[int, int], weights: Mapping[int, float], past: Sequence[Turn]) -> list[Turn]:
    """The next round, after those in the past are over; empty if there is none.

    Args:
        total: Model evaluations of the whole run.
        least: By item what one sample takes.
        weights: By item how much it counts.
        past: All turns so far.

    Raises:
        UserError: The total isn't enough for an image each.
    """
    items = sorted(least)
    places = {item: place for place, item in enumerate(items)}
    shares = Shares(total, [least[item] for item in items], [weights[item] for item in items])
    begun = 1 + max((turn.round for turn in past), default=-1)
    for round_ in range(begun):
        for turn in sorted((turn for turn in past if turn.round == round_), key=lambda turn: turn.item):
            spent = turn.budget if turn.nfe is None else turn.nfe
            shares.book(round_, places[turn.item], spent, turn.scores, turn.ceiling)
        shares.close(round_)
    for round_ in range(begun, len(ROUNDS)):
        if plan := shares.plan(round_):
            return [Turn(items[place], round_, least[items[place]], budget) for place, budget in plan.items()]
        shares.close(round_)
    return []


def seed(first: int, round_: int) -> int:
    """The seed of an item's search in a round, below 2**53 so that every reader of JSON keeps it."""
    if round_ == 0:
        return first
    return int(keys.fold(torch.tensor([first]), round_)[0]) % 2**53
