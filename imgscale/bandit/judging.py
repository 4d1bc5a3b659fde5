"""What an image is worth to the bandit: the verifier's score on [0, 1], and a check's verdict where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from imgscale import models, registry, verification
from imgscale.bandit.poolfile import Entry, PoolFile, threshold
from imgscale.bandit.prompts import Prompts
from imgscale.errors import UserError
from imgscale.rewards import judge

if TYPE_CHECKING:
    from imgscale.result import SearchOutput
    from imgscale.rewards import Verifier

WHOLE = ("budget", "complete", "ceiling")  # ends of a search that say what its action is worth


class Judging:
    """The verifier and the check of a pool.

    Args:
        file: The pool.
        entries: Its models that are here.
        device: Where verifiers run; the accelerator if there is one.

    Attributes:
        spec: The verifier's name in records, which means the same for all models.
        verifier: What steers.

    Raises:
        UserError: The verifier can't be loaded.
    """

    def __init__(self, file: PoolFile, entries: Sequence[Entry], device: str | None) -> None:
        self._file, self._device = file, str(models.place(device))
        clips = [settings(entry).clip for entry in entries]
        self.spec = file.verifier
        name, options = registry.parse(file.verifier)
        if name == "clip" and "model" not in options and len(set(clips)) > 1:
            self.spec = f"clip({', '.join(f'{k}={v}' for k, v in {'model': clips[0], **options}.items())})"
        self.verifier: Verifier = verification.make(self.spec, clip=clips[0], device=self._device)
        self._checks: dict[str, Verifier] = {}
        self._shapes = all(entry.model in models.bundled() for entry in entries)

    def reader(self) -> tuple[Prompts, Callable[[str], Any] | None]:
        """What makes features of prompts, and the embedding that it needs: the verifier's own, if it has one."""
        embed: Any = getattr(self.verifier, "embed_texts", None)
        if embed is None or not self._file.policy.projected:
            return Prompts(), None

        def embedding(prompt: str) -> Any:
            return embed([prompt])[0].detach().to("cpu", torch.float64).numpy()

        length = len(embedding("a circle"))
        return Prompts(length, min(self._file.policy.projected, length)), embedding

    def quality(self, scaled: float, correct: bool | None) -> float:
        """w1 correct + w2 score, in [0, 1], renormalised to what there is; the verdict alone if feedback isn't dense.

        Args:
            scaled: The verifier's score on [0, 1]; NaN if there is none.
            correct: The check's verdict, if there is one.
        """
        said = self._file.policy
        if correct is None:
            return scaled
        if not said.dense:
            return float(correct)
        return (said.correct * correct + said.score * scaled) / (said.correct + said.score)

    def correct(self, prompt: str, output: SearchOutput) -> bool | None:
        """Whether the winner is right; None where nobody can say, which becomes an event if somebody should."""
        if self._file.check == "none" or not output.finished:
            return None
        if self._file.check == "auto" and not (self._shapes and parses(prompt)):
            return None
        spec, least = threshold(self._file.check) or ("shapes", 1.0)
        try:
            value = output.scores[spec] if spec in output.scores else self._asked(spec, prompt, output)
        except UserError as error:  # a prompt that it can't judge, or a judge that isn't here
            output.events.append(f"The check {spec!r} says nothing of this image: {error}")
            return None
        return value >= least if math.isfinite(value) else None

    def _asked(self, spec: str, prompt: str, output: SearchOutput) -> float:
        if spec not in self._checks:
            self._checks[spec] = verification.make(spec, device=self._device)
        pixels = np.array(output.images[0].convert("RGB"))
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
        return float(judge(self._checks[spec], image, [prompt], output.events.append)[0])


def parses(prompt: str) -> bool:
    """Whether a prompt is of the shapes world."""
    from imgscale.assets.shapes.world import parse

    try:
        parse(prompt)
    except ValueError:
        return False
    return True


def settings(entry: Entry) -> models.ModelSettings:
    """What a model's folder says of it; the defaults where it isn't a folder here."""
    try:
        folder = models.locate(entry.model)
    except UserError:  # said when its costs are counted
        folder = None
    return models.ModelSettings.read(folder) if folder else models.ModelSettings()
