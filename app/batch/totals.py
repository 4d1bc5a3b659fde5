"""How many model evaluations an item may spend where a run has a total.

What a search doesn't spend moves on to later ones, by `imgscale.budget.Rollover`. To which must not depend on which of
the searches that run side by side happens to end first, or a resumed run would differ from one that wasn't stopped. So
the items are dealt to as many lanes as run together, and what is left over moves on in its lane, whose items are run
one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from imgscale.budget import Rollover
from imgscale.errors import UserError


class Allowance(Protocol):
    """Says what an item may spend."""

    def nfe(self, number: int, spent: Mapping[int, int]) -> int:
        """Model evaluations of an item.

        Args:
            number: The item's.
            spent: What those that are done have spent, by number; all before it in its lane are over.
        """
        ...


class Lanes:
    """A total for a run, dealt by the items' budgets.

    Args:
        total: Model evaluations of all items.
        budgets: Of each item, if there were no total: its weight.
        lanes: How many there are.

    Raises:
        UserError: There is less than one evaluation for an item.
    """

    def __init__(self, total: int, budgets: Sequence[int], lanes: int) -> None:
        if total < len(budgets):
            raise UserError(
                f"--total-budget can't be {total} for {len(budgets)} searches; give more, or fewer prompts and seeds."
            )
        quotas = Rollover(total, budgets).quotas
        self._lanes = lanes
        self._quotas = [quotas[lane::lanes] for lane in range(lanes)]
        self._at = [0] * lanes  # the stage that each lane has come to
        self._split = [Rollover(sum(own), own) if own else None for own in self._quotas]

    def nfe(self, number: int, spent: Mapping[int, int]) -> int:
        """See `Allowance`. An item that failed keeps its share, to be tried again with."""
        lane, stage = number % self._lanes, number // self._lanes
        split = self._split[lane]
        assert split is not None
        for before in range(self._at[lane], stage):
            used = spent.get(before * self._lanes + lane)
            if used is not None:
                split.charge(before, used)
                split.close(before)
        self._at[lane] = max(self._at[lane], stage)
        return split.left(stage)
