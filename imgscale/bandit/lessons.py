"""What other prompts taught: a table of what actions brought for them, from which a new policy learns at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from imgscale import files
from imgscale.bandit.actions import Action, Model
from imgscale.bandit.linear import LinUCB
from imgscale.bandit.policy import Context, Policy
from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

FORMAT = 1


@dataclass(frozen=True)
class Lessons:
    """Mean qualities of p prompts' images by k actions. The prompts' texts aren't needed, and aren't kept.

    Args:
        verifier: The identity of the verifier whose scores they are made of.
        prompt: The names of the prompts' features.
        actions: k of them.
        z: (p, len(prompt)).
        quality: (p, k), in [0, 1].
        scores: A sample of the verifier's scores, by which others are put onto [0, 1].
    """

    verifier: dict[str, Any]
    prompt: tuple[str, ...]
    actions: tuple[Action, ...]
    z: Floats
    quality: Floats
    scores: tuple[float, ...]

    def __post_init__(self) -> None:
        p, k = len(self.z), len(self.actions)
        if self.z.shape != (p, len(self.prompt)) or self.quality.shape != (p, k) or not p * k * len(self.scores):
            raise ValueError(f"{self.z.shape} features and {self.quality.shape} qualities of {k} actions")
        if not (np.isfinite(self.z).all() and self.quality.min() >= 0 and self.quality.max() <= 1):
            raise ValueError("features that aren't finite, or qualities outside [0, 1]")

    def without(self, model: str) -> Lessons:
        """Those of all models but one."""
        left = [i for i, action in enumerate(self.actions) if action.model.name != model]
        return replace(self, actions=tuple(self.actions[i] for i in left), quality=self.quality[:, left])

    def fits(self, prompt: Sequence[str], verifier: Mapping[str, Any]) -> bool:
        """Whether they are of the same features of prompts, and of the same verifier, in whichever precision."""
        return _known(self.verifier) == _known(verifier) and self.prompt == tuple(prompt)

    def teach(self, policy: LinUCB, worth: float) -> None:
        """Lets a policy learn them.

        Args:
            policy: Of the same features of prompts. It needn't have the same actions: what was learned of one action
                says something of others. Searchers that it doesn't know are left out.
            worth: How many of its own observations they count for, all together.
        """
        schema = policy.pool.schema
        known = [i for i, action in enumerate(self.actions) if action.family in schema.searchers]
        if not known or worth <= 0:
            return
        acts = [self.actions[i] for i in known]
        a = np.array([schema.features(action) for action in acts])
        expected = np.array([0.5 if policy.prior is None else policy.prior(action) for action in acts])
        phi = np.concatenate([schema.phi(a, z) for z in self.z])
        surplus = (self.quality[:, known] - expected).ravel()
        policy.model.study(phi, surplus, worth / len(phi))

    def show(self, policy: Policy) -> None:
        """Lets a policy of any kind learn them as if they were its own observations; for comparison.

        Actions that aren't in its pool are left out.
        """
        places = {action.name: i for i, action in enumerate(policy.pool.actions)}
        for z, row in zip(self.z, self.quality, strict=True):
            for action, quality in zip(self.actions, row, strict=True):
                if action.name in places:
                    policy.learn(Context(z), policy.pool.actions[places[action.name]], float(quality))


def _known(verifier: Mapping[str, Any]) -> str:
    said = {name: value for name, value in verifier.items() if name != "dtype"}
    return json.dumps(said, sort_keys=True, default=str)


def read(path: Path) -> Lessons:
    """The lessons in a file.

    Raises:
        UserError: It can't be read, or isn't what `write` writes.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}")
        return Lessons(
            verifier=dict(values["verifier"]),
            prompt=tuple(map(str, values["prompt"])),
            actions=tuple(Action(**{**each, "model": Model(**each["model"])}) for each in values["actions"]),
            z=np.array(values["z"], np.float64),
            quality=np.array(values["quality"], np.float64),
            scores=tuple(map(float, values["scores"])),
        )
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"The lessons {str(path)!r} can't be read ({why}); give another file, or none.") from error
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"The lessons {str(path)!r} are damaged ({error}); give another file, or none.") from error


def write(lessons: Lessons, path: Path) -> None:
    """Writes lessons as JSON, whole or not at all, with four digits."""
    values = {
        "format": FORMAT,
        "verifier": lessons.verifier,
        "prompt": lessons.prompt,
        "actions": [asdict(action) for action in lessons.actions],
        "scores": [round(score, 4) for score in lessons.scores],
        "z": lessons.z.round(4).tolist(),
        "quality": lessons.quality.round(4).tolist(),
    }
    files.write(path, (json.dumps(values) + "\n").encode())
