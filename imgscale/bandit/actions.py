"""What a bandit chooses from: a model together with how much search on it, and a pool of such actions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgscale.bandit.features import Schema
from imgscale.errors import UnknownName, UserError

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Model:
    """What is known of a model before it has drawn anything: what lets a new one start warm.

    Args:
        name: What users call it.
        parameters: Of the denoiser, a number above 0.
        step_eflops: Of one denoiser pass, in eFLOPs, above 0.
        distilled: Whether it needs few steps and no guidance.
        prior: The mean score that its images are expected to get, in [0, 1]; 0.5 says nothing.
    """

    name: str
    parameters: float
    step_eflops: float
    distilled: bool = False
    prior: float = 0.5

    def __post_init__(self) -> None:
        for field in ("parameters", "step_eflops"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{self.name}'s {field} can't be {value!r}; give a number above 0.")
        if not 0 <= self.prior <= 1:
            raise UserError(f"{self.name}'s prior can't be {self.prior!r}; give a mean score from 0 to 1.")


@dataclass(frozen=True)
class Action:
    """A model and a search on it.

    Args:
        model: Which one.
        searcher: Its name and options, as users write them: ``"rbf(quota=4)"``.
        nfe: The search's budget in model evaluations, at least 1.
        eflops: What the whole request is expected to cost, above 0.
        candidates: Independent starts, n.
        children: Per branch point, K.
        kept: Particles that live on after a choice, B.
        steps: Of one trajectory.
        checks: Previews judged on the way.
    """

    model: Model
    searcher: str
    nfe: int
    eflops: float
    candidates: int = 1
    children: int = 1
    kept: int = 1
    steps: int = 1
    checks: int = 0

    def __post_init__(self) -> None:
        for field, least in (("nfe", 1), ("candidates", 1), ("children", 1), ("kept", 1), ("steps", 1), ("checks", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{self.name}'s {field} can't be {value!r}; give a whole number from {least} on.")
        if not (math.isfinite(self.eflops) and self.eflops > 0):
            raise UserError(f"{self.name}'s eflops can't be {self.eflops!r}; give a number above 0.")

    @property
    def name(self) -> str:
        """What tells it from the others of its pool."""
        return f"{self.model.name}, {self.searcher}, {self.nfe} NFE"

    @property
    def family(self) -> str:
        """The searcher without its options and guide."""
        return re.split(r"[(+]", self.searcher)[0].strip()


class Pool:
    """Actions with their features and costs. Places are stable: an action that leaves is masked, and may come back.

    Args:
        actions: At least one, no two of one name.
        schema: Their features; by default fitted to these actions (see `Schema.of`).
        reference: The eFLOPs that count as cost 1 (dearer actions do, too); by default those of the dearest action.

    Raises:
        UserError: No actions, two of one name, a searcher that the schema doesn't know, or a reference of 0 or less.
    """

    def __init__(
        self, actions: Sequence[Action], schema: Schema | None = None, *, reference: float | None = None
    ) -> None:
        if not actions:
            raise UserError("The pool is empty; give at least one action to choose from.")
        if reference is not None and not (math.isfinite(reference) and reference > 0):
            raise UserError(f"The reference cost can't be {reference!r}; give eFLOPs above 0.")
        self.schema = schema or Schema.of(actions)
        self.actions: list[Action] = []
        self.alive: Mask = np.zeros(0, bool)
        self.features: Floats = np.zeros((0, self.schema.action_dim))  # (actions, action features)
        self._reference = reference
        for action in actions:
            if any(action.name == other.name for other in self.actions):
                raise UserError(f"The action {action.name!r} is in the pool twice; give it once.")
            self.add(action)

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def costs(self) -> Floats:
        """(actions,) in [0, 1]: eFLOPs in units of the reference. A dearer newcomer rescales them: policies that learn
        quality alone have nothing to relearn."""
        eflops = np.array([action.eflops for action in self.actions])
        return np.minimum(eflops / (self._reference or eflops.max()), 1.0)

    def index(self, action: Action | str) -> int:
        """The place of an action.

        Raises:
            UserError: It has never been in the pool.
        """
        name = action if isinstance(action, str) else action.name
        for i, known in enumerate(self.actions):
            if known.name == name and (isinstance(action, str) or known == action):
                return i
        raise UnknownName("action", name, (known.name for known in self.actions))

    def add(self, action: Action) -> None:
        """Takes in an action, or takes back one that had left.

        Raises:
            UserError: Another one has its name, or the schema doesn't know its searcher.
        """
        for i, known in enumerate(self.actions):
            if known.name == action.name:
                if known != action:
                    raise UserError(f"Another action is called {action.name!r}; give it a different searcher or nfe.")
                self.alive[i] = True
                return
        self.features = np.vstack([self.features, self.schema.features(action)])
        self.actions.append(action)
        self.alive = np.append(self.alive, True)

    def remove(self, action: Action | str) -> None:
        """Lets an action leave; what was learned from it stays.

        Raises:
            UserError: It has never been in the pool.
        """
        self.alive[self.index(action)] = False

    def remove_model(self, model: str) -> None:
        """Lets all actions of a model leave.

        Raises:
            UserError: None is of this model.
        """
        models = {action.model.name for action in self.actions}
        if model not in models:
            raise UnknownName("model", model, models)
        self.alive &= np.array([action.model.name != model for action in self.actions])

    def allowed(self, mask: Mask | None = None) -> Mask:
        """(actions,): which are in the pool and allowed by the mask.

        Raises:
            UserError: None is, or the mask has another length.
        """
        if mask is not None and np.shape(mask) != (len(self),):
            raise UserError(
                f"A mask of shape {np.shape(mask)} doesn't fit {len(self)} actions; give one flag for each."
            )
        allowed: Mask = self.alive if mask is None else self.alive & np.asarray(mask, bool)
        if not allowed.any():
            why = "all have been removed" if not self.alive.any() else "the mask forbids all that are left"
            raise UserError(f"None of the {len(self)} actions can be chosen: {why}; allow at least one.")
        return allowed
