"""A synthetic world for bandits: four models, three searchers and four budgets on prompts of seven kinds."""

from __future__ import annotations

import math

import numpy as np

from imgscale.bandit.actions import Action, Model
from imgscale.bandit.replay import Table

KINDS = ("attribution", "colours", "counting", "hard", "position", "single", "two")
FEATURES = 8  # of a prompt

MODELS = (
    Model("turbo", 1e9, 0.5e12, distilled=True, prior=0.45),
    Model("small", 1e9, 0.8e12, prior=0.5),
    Model("medium", 2.5e9, 3e12, prior=0.6),
    Model("large", 12e9, 9e12, prior=0.7),
)


def actions() -> tuple[Action, ...]:
    """48: models x searchers x budgets of 1, 2, 4 and 8 trajectories."""
    made = []
    for model in MODELS:
        steps = 4 if model.distilled else 20
        for n in (1, 2, 4, 8):
            for searcher, children, checks in (("best-of-n", 1, 0), ("bfs", 2, 2), ("rbf", 4, 4)):
                nfe = steps * n + checks  # a searcher's previews make its actions a little dearer
                eflops = model.step_eflops * (nfe + 2)
                made.append(Action(model, searcher, nfe, eflops, n, children, 1, steps, checks))
    return tuple(made)


def world(seed: int = 0, prompts: int = 1000, draws: int = 8, noise: float = 0.15, curved: bool = False) -> Table:
    """A table in which models differ by kind of prompt, and search helps where there is something left to gain.

    The mean quality follows from the ability of the model for the prompt, less its difficulty, plus what the searcher
    gains, and log n times what the prompt gains by search. Abilities have a part that goes with the models' prior
    scores and a part of each model's own.

    Args:
        seed: Of abilities, prompts and noise.
        prompts: How many.
        draws: Results of each action on each prompt.
        noise: Their standard deviation about the mean quality, before they are cut to [0, 1].
        curved: Whether that sum goes through a logistic function, so that no linear policy can come near it; else it is
            linear between 0 and 1 and cut there.
    """
    rng = np.random.default_rng(seed)
    acts = actions()
    kinds = rng.integers(len(KINDS), size=prompts)
    z = rng.standard_normal((len(KINDS), FEATURES))[kinds] + 0.5 * rng.standard_normal((prompts, FEATURES))
    z /= math.sqrt(FEATURES)
    difficulty = z @ rng.standard_normal(FEATURES) * 1.2
    ability = {model.name: 4 * (model.prior - 0.5) + z @ (1.5 * rng.standard_normal(FEATURES)) for model in MODELS}
    gain = 0.35 + 0.5 * z @ rng.standard_normal(FEATURES)
    better = {name: 0.5 * z @ rng.standard_normal(FEATURES) for name in ("best-of-n", "bfs", "rbf")}
    columns = [ability[a.model.name] - difficulty + better[a.searcher] + gain * math.log(a.candidates) for a in acts]
    logits = np.stack(columns, 1)
    mean = 1 / (1 + np.exp(-logits)) if curved else np.clip(0.5 + logits / 8, 0, 1)
    drawn = noise * rng.standard_normal((prompts, len(acts), draws))
    drawn -= drawn.mean(2, keepdims=True)  # so that the oracle, which knows their mean, has no luck of its own
    rewards = np.clip(mean[..., None] + drawn, 0, 1)
    eflops = np.array([action.eflops for action in acts])
    costs = np.broadcast_to(eflops / eflops.max(), mean.shape)
    return Table(acts, z, rewards, costs, rewards > 0.5, tuple(KINDS[kind] for kind in kinds))
