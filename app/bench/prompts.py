"""Prompts to compare searches on: a bundled list by its name, or a file."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgscale.app import checks, records
from imgscale.errors import UnknownName, UserError

ENDINGS = records.ENDINGS


@dataclass(frozen=True)
class Prompt:
    """A prompt and what else its list says of it.

    Args:
        text: The prompt.
        columns: Everything else in its row; `category` is used, the rest is kept.
    """

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def category(self) -> str:
        return str(self.columns.get("category") or "")


def bundled() -> dict[str, Path]:
    """The lists that ship with imgscale, by name."""
    from imgscale.models import bundled_folder

    return {path.stem: path for path in sorted(bundled_folder().glob("prompts*.json"))}


def load(
    source: str,
    categories: Sequence[str] = (),
    every: int = 1,
    limit: int | None = None,
    without: Collection[str] = (),
) -> list[Prompt]:
    """Prompts, each once.

    Args:
        source: A bundled name, or a file: text with a prompt a line, or JSON, JSONL, CSV or TSV with a column `prompt`.
        categories: Which to take; all for none.
        every: Takes the first of so many prompts, in every category alike.
        limit: Takes at most so many of these per category.
        without: Texts that are left out from the beginning.

    Raises:
        UserError: There is no such list, or it can't be read.
    """
    once: dict[str, Prompt] = {}
    for prompt in _read(source):
        if prompt.text not in without:
            once.setdefault(checks.prompt(prompt.text), prompt)
    groups: dict[str, list[Prompt]] = {}
    for prompt in once.values():
        groups.setdefault(prompt.category, []).append(prompt)
    for name in categories:
        if name not in groups:
            raise UnknownName(f"category of {source!r}", name, filter(None, groups))
    chosen = [group[::every][:limit] for name, group in groups.items() if name in (categories or groups)]
    prompts = [prompt for group in chosen for prompt in group]
    if not prompts:
        raise UserError(f"The prompt list {source!r} is empty; give one with at least one prompt.")
    return prompts


def spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts in an order that mixes the categories evenly: the first rows of a run say something of them all."""
    sizes = Counter(prompt.category for prompt in prompts)
    seen: Counter[str] = Counter()
    places = []
    for i, prompt in enumerate(prompts):
        places.append(((seen[prompt.category] + 0.5) / sizes[prompt.category], i))
        seen[prompt.category] += 1
    return [prompts[i] for _, i in sorted(places)]


def _read(source: str) -> Iterator[Prompt]:
    known = bundled()
    path = known.get(source) or Path(source)
    if source not in known and not path.is_file():
        hint = f"A file that ends in {', '.join(ENDINGS)} will do, too."
        raise UnknownName("prompt list", source, known, hint)
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"The prompt file {source!r} has no known ending; name it as one of {', '.join(ENDINGS)}.")
    try:
        for row in records.prompts(path.suffix.lower(), records.decoded(path.read_bytes())):
            if isinstance(row, records.Bad):
                raise UserError(f"Row {row.number} of the prompt file {source!r} {row.reason}")
            category = records.take(row.columns, ("category",))
            yield Prompt(row.text, row.columns if category is None else {**row.columns, "category": category})
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"The prompt file {source!r} can't be read ({error}); mend it.") from error
