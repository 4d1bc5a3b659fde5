"""What an exporter sees of a run: its images, each with its prompt and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgscale.app.batch.store import Failure, Item, Prompt, Scores
from imgscale.errors import UnknownName

CHOICES = ("best", "kept", "plain")


@dataclass(frozen=True)
class Picture:
    """One image of a run.

    Args:
        path: The PNG.
        prompt: What it was searched for with.
        values: What is known of it, by names that are the same for all images of a run.
    """

    path: Path
    prompt: Prompt
    values: Mapping[str, Any]


def pictures(items: Iterable[Item], choice: str, verifiers: Iterable[str]) -> Iterator[Picture]:
    """Images in the order of the prompts and seeds.

    Args:
        items: Those of a run.
        choice: "best" for the winner of each search, "kept" for all that it kept, "plain" for what the model draws
            without a search.
        verifiers: All of the run, so that every image has the same names.

    Raises:
        UserError: It is another choice.
    """
    if choice not in CHOICES:
        raise UnknownName("choice of --images", choice, CHOICES)
    judges = list(verifiers)
    for item in items:
        if choice == "plain":
            if item.plain is not None:
                yield Picture(item.plain, item.prompt, _values(item, 0, item.seed, item.plain_scores, judges))
            continue
        for image in item.images if choice == "kept" else item.images[:1]:
            yield Picture(image.path, item.prompt, _values(item, image.rank, image.seed, image.scores, judges))


def _values(item: Item, rank: int, key: int, scores: Scores, verifiers: Iterable[str]) -> dict[str, Any]:
    """Flat, so that a table can hold it; rank 0 is the plain image."""
    searched = rank > 0
    return {
        **{"prompt": item.prompt.text, "category": item.prompt.category, "row": item.prompt.row, "rank": rank},
        **{"seed": item.seed, "noise_key": str(key), "model": item.model},
        **{"searcher": item.searcher if searched else "plain", "verifier": item.verifier},
        **{f"score_{name}": scores.get(name) for name in verifiers},
        "nfe": item.nfe if searched else item.settings.get("num_inference_steps"),
        "seconds": item.seconds if searched else None,
        "steps": item.settings.get("num_inference_steps"),
        "guidance": item.settings.get("guidance_scale"),
        **{"width": item.settings.get("width"), "height": item.settings.get("height")},
        **{"stopped": item.stopped, "finished": item.finished, "state": item.state},
    }


def by_prompt(pictures: Iterable[Picture]) -> dict[int, list[Picture]]:
    """The images of each prompt, by its number."""
    found: dict[int, list[Picture]] = {}
    for picture in pictures:
        found.setdefault(picture.prompt.number, []).append(picture)
    return dict(sorted(found.items()))


def lost(failures: Iterable[Failure]) -> list[dict[str, Any]]:
    """Rows of a table for what has no image."""
    return [{"prompt": failure.text, "row": failure.row, "error": failure.reason} for failure in failures]
