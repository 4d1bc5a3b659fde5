"""Features of prompt and action together: phi = [1, a, a (x) z].

A linear model on [a, z] alone would give every action the same prompt term, and its ranking of the actions would never
depend on the prompt. The products a (x) z let it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from imgscale.bandit.prompts import Prompts
from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.bandit.actions import Action

Floats = npt.NDArray[np.float64]
Form = Literal["interactions", "concatenated"]

NUMBERS = (
    "log parameters",
    "log eFLOPs per step",
    "distilled",
    "prior score",
    "log candidates",
    "log candidates squared",
    "log children",
    "log kept",
    "log steps",
    "checks",
    "log NFE",
)


@dataclass(frozen=True)
class Schema:
    """Which features, in which order and units. Statistics learned with one schema mean nothing under another.

    Args:
        searchers: Families that have a feature of their own.
        centre: Of each of `NUMBERS`; they are centred and scaled once, so that a newcomer doesn't move the others.
        scale: Of each of `NUMBERS`.
        prompt: The names of the prompt's features, z.
        form: "interactions" is [1, a, a (x) z]; "concatenated", for comparison, is [1, a, z].
        names: If given, an action's features are a one-hot code of its name among these and nothing else: for
            comparison, too. Such a policy learns nothing about one action from another.
    """

    searchers: tuple[str, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    prompt: tuple[str, ...]
    form: Form = "interactions"
    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        actions: Sequence[Action],
        prompt: Sequence[str] | None = None,
        *,
        form: Form = "interactions",
        onehot: bool = False,
        searchers: Sequence[str] = (),
    ) -> Schema:
        """The schema that fits a pool: numbers get mean 0 and deviation 1 over its actions.

        Args:
            actions: Of the pool.
            prompt: Names of the prompt's features, by default those of `Prompts()`.
            form: See the class.
            onehot: Whether actions are told apart by their names alone.
            searchers: Families beyond those of the actions, that may be added later.

        Raises:
            UserError: There are no actions.
        """
        if not actions:
            raise UserError("The pool is empty; give at least one action to choose from.")
        numbers = np.array([_numbers(action) for action in actions])
        scale = numbers.std(0)
        scale[scale < 1e-9] = 1.0  # a number that is the same for all
        return cls(
            searchers=tuple(sorted({action.family for action in actions} | set(searchers))),
            centre=tuple(map(float, numbers.mean(0))),
            scale=tuple(map(float, scale)),
            prompt=tuple(Prompts().names if prompt is None else prompt),
            form=form,
            names=tuple(action.name for action in actions) if onehot else (),
        )

    @property
    def action_names(self) -> tuple[str, ...]:
        """The names of the features of an action."""
        return self.names or (*NUMBERS, *(f"searcher {family}" for family in self.searchers))

    @property
    def action_dim(self) -> int:
        return len(self.action_names)

    @property
    def dim(self) -> int:
        """Of phi."""
        a, z = self.action_dim, len(self.prompt)
        return 1 + a + (a * z if self.form == "interactions" else z)

    @property
    def of_prompt(self) -> npt.NDArray[np.bool_]:
        """(dim,): which of phi depend on the prompt."""
        return np.asarray(self.phi(np.ones(self.action_dim), np.zeros(len(self.prompt))) == 0)

    @property
    def hash(self) -> str:
        """64 hexadecimal digits, the same for schemas that mean the same."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def features(self, action: Action) -> Floats:
        """a, of shape (action_dim,).

        Raises:
            UserError: The schema doesn't know its searcher (or its name, if one-hot).
        """
        known, own = (self.names, action.name) if self.names else (self.searchers, action.family)
        if own not in known:
            what = "action of this schema" if self.names else "searcher of this schema"
            raise UnknownName(what, own, known, "Learning begins anew with a schema that holds it (Schema.of).")
        code = [float(own == other) for other in known]
        if self.names:
            return np.array(code)
        return np.concatenate([(np.array(_numbers(action)) - self.centre) / self.scale, code])

    def phi(self, a: Floats, z: Floats) -> Floats:
        """Features of action and prompt: (dim,), or (n, dim) for an (n, action_dim) of actions."""
        one = np.ones((*a.shape[:-1], 1))
        if self.form == "concatenated":
            return np.concatenate([one, a, np.broadcast_to(z, (*a.shape[:-1], len(z)))], -1)
        # An action's own feature stands first in its group, as if z began with a 1.
        products = a[..., :, None] * np.concatenate([[1.0], z])
        return np.concatenate([one, products.reshape(*a.shape[:-1], -1)], -1)

    def project(self, values: Floats, z: Floats) -> Floats:
        """A linear or quadratic form on phi as one on [1, a], given the prompt.

        With phi = M(z) [1, a], a vector v (dim,) becomes M' v (1 + action_dim,), and a symmetric matrix V (dim, dim)
        becomes M' V M: hundreds of actions are then compared without a phi for each of them.
        """
        if values.ndim == 2:
            return self._fold(self._fold(values, z).T, z)
        folded: Floats = self._fold(values[None], z)[0]
        return folded

    def _fold(self, rows: Floats, z: Floats) -> Floats:
        """rows @ M(z)."""
        n, a = len(rows), self.action_dim
        if self.form == "concatenated":
            folded: Floats = rows[:, : 1 + a].copy()
            folded[:, 0] += rows[:, 1 + a :] @ z
            return folded
        products: Floats = rows[:, 1:].reshape(n, a, 1 + len(z)) @ np.concatenate([[1.0], z])
        return np.concatenate([rows[:, :1], products], 1)

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schema:
        """The inverse of `to_dict`.

        Raises:
            UserError: Other values.
        """
        try:
            made = cls(
                searchers=tuple(map(str, values["searchers"])),
                centre=tuple(map(float, values["centre"])),
                scale=tuple(map(float, values["scale"])),
                prompt=tuple(map(str, values["prompt"])),
                form=values["form"],
                names=tuple(map(str, values["names"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"This is no schema of features ({error!r}).") from error
        fits = len(made.centre) == len(made.scale) == len(NUMBERS) and min(made.scale) > 0
        if not fits or not np.isfinite(made.centre + made.scale).all() or made.form not in get_args(Form):
            raise UserError("This is no schema of features: its parts don't fit together.")
        return made


def _numbers(action: Action) -> list[float]:
    model, log_n = action.model, math.log(action.candidates)
    return [
        math.log(model.parameters),
        math.log(model.step_eflops),
        float(model.distilled),
        model.prior,
        log_n,
        log_n**2,
        math.log(action.children),
        math.log(action.kept),
        math.log(action.steps),
        float(action.checks),
        math.log(action.nfe),
    ]
