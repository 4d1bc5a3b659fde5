"""What the page knows of each search of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from imgscale.app import pages
from imgscale.app.batch.store import Failure, Item
from imgscale.app.generate import REASONS
from imgscale.errors import UserError

BYTES = 24_000_000  # of pictures in a page, about: there may be thousands of them
SMALLEST, LARGEST = 48, 384  # pixels
PER_PIXEL = 0.3  # bytes of a JPEG
POINTS = 48  # of a trace


def names(items: Sequence[Item]) -> list[str]:
    """The verifiers, the steering one first."""
    return list(dict.fromkeys(name for item in items for name in (item.verifier, *item.scores)))


def describe(items: Sequence[Item], failures: Sequence[Failure], page: Path) -> list[dict[str, Any]]:
    """What the page's script shows, in JSON's types: the searches in their order, and then what failed.

    Args:
        items: Those with an image.
        failures: Those without.
        page: Where it will be, to tell where the images are from there.
    """
    verifiers = names(items)
    pictures = _embedded(items)
    found = []
    for item in items:
        image, plain = next(pictures), next(pictures) if item.plain else None
        found.append(_described(item, verifiers, image, plain, page))
    return [
        *found,
        *(
            {"order": len(found) + i, "prompt": failure.text, "error": failure.reason, "facts": [["row", failure.row]]}
            for i, failure in enumerate(failures)
        ),
    ]


def _described(item: Item, verifiers: Sequence[str], image: str, plain: str | None, page: Path) -> dict[str, Any]:
    ended = REASONS.get(item.stopped, item.stopped)
    facts = {
        "ended": ended if item.finished else f"{ended} It is only a preview.",
        **{"NFE": item.nfe, "verifier calls": item.ledger.get("verifier_calls"), "seconds": f"{item.seconds:.2f}"},
        **{"model": item.model, "searcher": item.searcher, "steered by": item.verifier, "seed": item.seed},
        "steps": item.settings.get("num_inference_steps"),
        "guidance": item.settings.get("guidance_scale"),
        "noise key": str(item.images[0].seed),
        **{name: value for name, value in item.prompt.columns.items() if isinstance(value, str | int | float)},
    }
    found: dict[str, Any] = {
        "order": item.number,
        "prompt": item.prompt.text,
        "category": item.prompt.category,
        "image": image,
        "file": quote(Path(os.path.relpath(item.images[0].path, page.parent)).as_posix()),
        "scores": [item.scores.get(name) for name in verifiers],
        "nfe": item.nfe,
        "seconds": round(item.seconds, 3),
        "seed": str(item.seed),
        "facts": [[name, value] for name, value in facts.items() if value not in (None, "")],
        "events": item.events,
        "command": command(item),
        "trace": _trace(item, verifiers),
    }
    if plain is not None:
        found |= {"plain": plain, "before": [item.plain_scores.get(name) for name in verifiers]}
    return found


def command(item: Item) -> str | None:
    """The `imgscale generate` that makes the image again; None where no command line can."""
    from pydantic import ValidationError

    from imgscale.app.rerun import job_of
    from imgscale.png import Record

    try:
        record = Record.model_validate(item.settings)
        return job_of(record, item.model, record.verifier, record.preview).command()
    except (UserError, ValidationError):
        return None


def _trace(item: Item, verifiers: Sequence[str]) -> list[list[float | None]] | None:
    """NFE, and the best so far by each verifier, where it changed; a long one is thinned out."""
    nfe, scores = item.trace.get("nfe", []), item.trace.get("scores", {})
    if not nfe or not verifiers:
        return None
    every = math.ceil(len(nfe) / POINTS)
    kept = sorted({*range(0, len(nfe), every), len(nfe) - 1})
    columns = [scores.get(name) or [None] * len(nfe) for name in verifiers]
    return [[nfe[i] for i in kept], *([_rounded(column[i]) for i in kept] for column in columns)]


def _rounded(score: float | None) -> float | None:
    return None if score is None or not math.isfinite(score) else float(f"{score:.5g}")


def _embedded(items: Sequence[Item]) -> Iterator[str]:
    """Data URIs of the images, each followed by that of its plain one, if it has one; "" for what can't be read."""
    paths = [path for item in items for path in (item.images[0].path, item.plain) if path]
    side = int(min(LARGEST, max(SMALLEST, math.sqrt(BYTES / PER_PIXEL / max(1, len(paths))))))

    def embed(path: Path) -> str:
        from PIL import Image

        try:
            with Image.open(path, formats=["PNG"]) as image:
                return pages.embedded(image, side, 80)[0]
        except (OSError, ValueError, SyntaxError):  # gone, or damaged
            return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow lets go of the lock while it works
        yield from pool.map(embed, paths)


def tiny(items: Sequence[Item]) -> bool:
    """Whether the images are so small that their pixels are shown as squares."""

    def side(settings: Mapping[str, Any]) -> int:
        return max(settings.get("width") or 0, settings.get("height") or 0)

    return bool(items) and max(side(item.settings) for item in items) <= pages.TINY
