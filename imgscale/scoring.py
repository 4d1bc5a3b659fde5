"""Scores of images that are there already: `imgscale.score`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from imgscale import images as pictures
from imgscale import verification
from imgscale.errors import UserError
from imgscale.images import Source, Unreadable
from imgscale.models import place
from imgscale.rewards import Verifier, is_ensemble, is_out_of_memory, panel
from imgscale.verification import VerifierLike


@dataclass(frozen=True)
class Scored:
    """An image and what verifiers say of it.

    Attributes:
        image: As it was given.
        prompt: What it was scored for, or None.
        scores: By verifier; None where there is no score.
        error: Why a score is missing, or None.
    """

    image: Source
    prompt: str | None
    scores: dict[str, float | None]
    error: str | None = None


def score(
    images: Source | Iterable[Source],
    prompts: str | Sequence[str | None] | None = None,
    verifiers: VerifierLike | Sequence[VerifierLike] = "clip",
    *,
    device: str | torch.device | None = None,
    max_batch: int = 32,
    progress: bool = False,
) -> list[Scored]:
    """Scores images.

    Images of one size are scored together, and no more than ``max_batch`` are in memory at once. An image that can't
    be read costs nobody else the score: its `Scored.error` says what is wrong with it.

        for each in imgscale.score(["a.png", "b.png"], "two red circles", ["clip", "shapes"]):
            print(each.image, each.scores)

    Args:
        images: One or several: paths, PIL images, or tensors ``(3, h, w)``, or one tensor ``(n, 3, h, w)``; floating
            point in [0, 1] or uint8.
        prompts: For all of them, or for each. None stands for the one in the image file: `imgscale generate` and A1111
            write it there.
        verifiers: One or several names, names with options, verifiers or functions. What an ensemble says of an image
            depends on the others of the same prompt.
        device: Where verifiers run; the accelerator if there is one.
        max_batch: Images per call of a verifier.
        progress: Show a tqdm bar.

    Returns:
        One `Scored` for each image, in their order.

    Raises:
        UserError: A verifier doesn't exist or can't be made; the prompts don't fit the images; or no image has a
            prompt and a verifier reads it.
    """
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise UserError(f"max_batch can't be {max_batch!r}; give a whole number of at least 1.")
    sources = _sources(images)
    texts = _texts(prompts, len(sources))
    judges = make(verifiers, device)
    parts = list({id(part): part for judge in judges for part in panel(judge)}.values())
    entries = [_Entry(source, text) for source, text in zip(sources, texts, strict=True)]
    buckets = _buckets(entries)
    readers = [judge.name for judge in judges if judge.reads_prompt]
    found = [entry for bucket in buckets.values() for entry in bucket]
    if readers and found and all(entry.prompt is None for entry in found):
        raise UserError(
            f"The verifier {readers[0]} reads prompts, and no image carries one; give the prompt that they are to be"
            " scored for (--prompt), or a table of pairs."
        )
    from tqdm.auto import tqdm

    with torch.inference_mode(), tqdm(total=len(entries), unit="images", disable=not progress, leave=False) as bar:
        bar.update(len(entries) - len(found))
        for bucket in buckets.values():
            for start in range(0, len(bucket), max_batch):
                batch = bucket[start : start + max_batch]
                _score_batch(batch, parts)
                bar.update(len(batch))
    for judge in judges:
        _conclude(judge, [entry for entry in entries if all(part.name in entry.said for part in panel(judge))])
    return [entry.scored([judge.name for judge in judges]) for entry in entries]


@dataclass
class _Entry:
    """An image on its way.

    Attributes:
        said: By verifier, the members of ensembles among them: what it says.
        scores: By verifier.
        errors: Why something is missing.
    """

    source: Source
    prompt: str | None
    said: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def scored(self, names: Sequence[str]) -> Scored:
        found = {name: self.scores.get(name) for name in names}
        return Scored(self.source, self.prompt, found, "; ".join(dict.fromkeys(self.errors)) or None)


def _sources(images: Source | Iterable[Source]) -> list[Source]:
    if isinstance(images, Tensor):
        return list(images) if images.ndim == 4 else [images]
    found = [images] if isinstance(images, str | Path | Image) else list(images)
    for source in found:
        if not isinstance(source, str | Path | Image | Tensor):
            raise UserError(f"An image can't be {source!r}; give a path, a PIL image or a tensor.")
    return found


def _texts(prompts: str | Sequence[str | None] | None, n: int) -> list[str | None]:
    texts = [prompts] * n if prompts is None or isinstance(prompts, str) else list(prompts)
    if len(texts) != n:
        raise UserError(f"There can't be {len(texts)} prompts for {n} images; give one, or one for each.")
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise UserError(f"A prompt can't be {text!r}; give a text, or None for the one in the image.")
    return texts


def make(verifiers: VerifierLike | Sequence[VerifierLike], device: str | torch.device | None = None) -> list[Verifier]:
    """Verifiers, those that several ensembles share made once.

    Raises:
        UserError: There is none such, it can't be made, or two have one name.
    """
    specs: list[VerifierLike] = list(verifiers) if isinstance(verifiers, list | tuple) else [verifiers]  # type: ignore[list-item]
    if not specs:
        raise UserError("The list of verifiers can't be empty; give at least one.")
    where = str(place(device))
    made: dict[str, Verifier] = {}

    def find(spec: str) -> Verifier:
        if spec not in made:
            made[spec] = verification.make(spec, device=where, member=find)
        return made[spec]

    each = (find(spec) if isinstance(spec, str) else verification.make(spec) for spec in specs)
    judges = {id(judge): judge for judge in each}
    named: dict[str, Verifier] = {}
    for judge in judges.values():
        for one in (judge, *panel(judge)):
            if named.setdefault(one.name, one) is not one:
                raise UserError(f"Two verifiers are called {one.name!r}; give one of them another name.")
    return list(judges.values())


def _buckets(entries: Sequence[_Entry]) -> dict[tuple[int, int], list[_Entry]]:
    """The images that can be looked at, by size; completes their prompts."""
    found: dict[tuple[int, int], list[_Entry]] = {}
    for entry in entries:
        try:
            size, prompt = pictures.look(entry.source, entry.prompt is None)
        except Unreadable as error:
            entry.errors.append(str(error))
            continue
        entry.prompt = prompt if entry.prompt is None else entry.prompt
        found.setdefault(size, []).append(entry)
    return found


def _score_batch(entries: Sequence[_Entry], verifiers: Sequence[Verifier]) -> None:
    alike: dict[tuple[torch.Size, torch.device], list[tuple[_Entry, Tensor]]] = {}
    for entry in entries:
        try:
            pixels = pictures.tensor(entry.source)
        except Unreadable as error:
            entry.errors.append(str(error))
        else:  # EXIF may have turned some on their side
            alike.setdefault((pixels.shape, pixels.device), []).append((entry, pixels))
    for pairs in alike.values():
        for verifier in verifiers:
            able = [pair for pair in pairs if pair[0].prompt is not None or not verifier.reads_prompt]
            for entry, _ in pairs:
                if entry.prompt is None and verifier.reads_prompt:
                    entry.errors.append(f"{verifier.name} reads prompts, and the image has none")
            if able:
                batch = torch.stack([pixels for _, pixels in able])
                answers = _ask(verifier, batch, [entry.prompt or "" for entry, _ in able])
                for (entry, _), answer in zip(able, answers, strict=True):
                    if isinstance(answer, str):
                        entry.errors.append(answer)
                    else:
                        entry.said[verifier.name] = answer


def _ask(verifier: Verifier, images: Tensor, prompts: list[str]) -> Iterator[float | str]:
    """What a verifier says of each image, or why it says nothing."""
    failed: Exception | None = None
    try:
        scores = verifier(images, prompts)
        if tuple(scores.shape) != (len(images),):
            raise ValueError(f"it returned shape {tuple(scores.shape)} for {len(images)} images")
    except Exception as error:  # whatever one does must leave the others their scores
        failed = error.with_traceback(None)  # which would hold on to the memory
    if failed is None:
        values = scores.to("cpu", torch.float64).tolist()
        yield from (v if math.isfinite(v) else f"{verifier.name} gave {v} instead of a number" for v in values)
    elif len(images) > 1 and (isinstance(failed, UserError) or is_out_of_memory(failed)):
        half = len(images) // 2  # one image's prompt may be at fault, or there are too many for the memory
        yield from _ask(verifier, images[:half], prompts[:half])
        yield from _ask(verifier, images[half:], prompts[half:])
    else:
        said = " ".join(str(failed).split())[:300] or type(failed).__name__
        why = f"{verifier.name}: {said}" if isinstance(failed, UserError) else f"{verifier.name} failed ({said})"
        yield from [why] * len(images)


def _conclude(judge: Verifier, entries: Sequence[_Entry]) -> None:
    """Turns what was said of images into scores: an ensemble compares those of one prompt."""
    if not is_ensemble(judge):
        for entry in entries:
            entry.scores[judge.name] = entry.said[judge.name]
        return
    groups: dict[str | None, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.prompt if judge.reads_prompt else None, []).append(entry)
    for group in groups.values():
        said = torch.tensor([[entry.said[part.name] for part in judge.parts] for entry in group], dtype=torch.float64)
        for entry, value in zip(group, judge.combine(said, said).tolist(), strict=True):
            entry.scores[judge.name] = value
