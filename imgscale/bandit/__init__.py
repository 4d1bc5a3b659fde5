"""The bandit that chooses, for each prompt, a model and how much search on it, and learns from the scores.

It knows neither diffusion models nor verifiers: actions with their costs go in, a choice comes out, a reward goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from imgscale.bandit.actions import Action, Model, Pool
from imgscale.bandit.baselines import Fixed, Neighbours, Oracle, Random, routing_only, search_only
from imgscale.bandit.features import Schema
from imgscale.bandit.linear import LinUCB, Thompson
from imgscale.bandit.neural import MLP, NeuralUCB
from imgscale.bandit.persistence import load, save
from imgscale.bandit.policy import MODES, Choice, Context, Policy
from imgscale.bandit.prompts import Prompts
from imgscale.bandit.vw import VowpalWabbit
from imgscale.errors import UnknownName

__all__ = [
    "MODES",
    "POLICIES",
    "Action",
    "Choice",
    "Context",
    "LinUCB",
    "Model",
    "Policy",
    "Pool",
    "Prompts",
    "Schema",
    "load",
    "make",
    "save",
]


def _greedy(pool: Pool, **options: Any) -> LinUCB:
    return LinUCB(pool, **{"alpha": 0.0, **options})


def _epsilon_greedy(pool: Pool, **options: Any) -> LinUCB:
    return LinUCB(pool, **{"alpha": 0.0, "epsilon": 0.1, **options})


POLICIES: dict[str, Callable[..., Policy]] = {
    "linucb": LinUCB,
    "thompson": Thompson,
    "greedy": _greedy,
    "epsilon-greedy": _epsilon_greedy,
    "knn": Neighbours,
    "mlp": MLP,
    "neuralucb": NeuralUCB,
    "routing-only": routing_only,
    "search-only": search_only,
    "fixed": Fixed,
    "random": Random,
    "oracle": Oracle,
    "vowpalwabbit": VowpalWabbit,
}


def make(name: str, pool: Pool, **options: Any) -> Policy:
    """A policy by name.

    Args:
        name: One of `POLICIES`.
        pool: The actions.
        options: Of `Policy` and its kind.

    Raises:
        UserError: There is none such, or an option can't be.
    """
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)
    return POLICIES[name](pool, **options)
