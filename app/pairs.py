"""Which images to score, and for which prompts: files, folders, and tables of pairs."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgscale.app import records
from imgscale.errors import UserError
from imgscale.images import SUFFIXES

ENDINGS = (".csv", ".tsv", ".jsonl")
IMAGE = ("image", "file_name", "path", "file")  # what data sets call the columns, in any case of letters
PROMPT = ("prompt", "text", "caption")


@dataclass(frozen=True)
class Pair:
    """An image to score.

    Args:
        image: Where it is.
        prompt: None for the image's own.
        columns: Everything else in its row of a table.
    """

    image: Path
    prompt: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)


def gather(paths: Sequence[Path], recursive: bool = False) -> list[Pair]:
    """The images of files, folders and tables, in their order; those of a folder sorted by name.

    Args:
        paths: Image files; folders, of which files with an image's ending are taken; tables by their ending.
        recursive: Also folders within folders. Links to folders aren't followed.

    Raises:
        UserError: There is no such file, no image in it, or a table that can't be read.
    """
    found: list[Pair] = []
    for path in paths:
        if path.is_dir():
            found += _in_folder(path, recursive)
        elif not path.exists():
            raise UserError(f"There is no file {str(path)!r}; give images, folders, or a table ({', '.join(ENDINGS)}).")
        else:
            found += _in_table(path) if path.suffix.lower() in ENDINGS else [Pair(path)]
    return found


def _in_folder(folder: Path, recursive: bool) -> list[Pair]:
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        files += [Path(place, name) for name in names if _is_image(name)]
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
    if not files:
        below = "" if recursive else ", or add --recursive for the folders in it"
        raise UserError(
            f"The folder {str(folder)!r} holds no images ({', '.join(SUFFIXES)}); give one that does{below}."
        )
    return [Pair(file) for file in sorted(files)]


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _in_table(path: Path) -> Iterator[Pair]:
    try:
        rows = records.parse(path.suffix.lower(), path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"The table {str(path)!r} can't be read ({error}); mend it.") from error
    if not rows:
        raise UserError(f"The table {str(path)!r} is empty; give one with a column 'image'.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"Row {number} of the table {str(path)!r} is no object; give one with a key 'image'.")
        columns = {str(k).strip(): v for k, v in row.items() if k is not None}  # None: more values than columns
        image, prompt = _taken(columns, IMAGE), _taken(columns, PROMPT)
        if image is None:
            raise UserError(f"Row {number} of the table {str(path)!r} has no text in a column 'image'; give it one.")
        yield Pair(path.parent / Path(image).expanduser(), prompt, columns)


def _taken(columns: dict[str, Any], names: Sequence[str]) -> str | None:
    """The text of the first of some columns that there is, which is taken out; None if it is empty."""
    text = records.take(columns, names)
    return text.strip() or None if isinstance(text, str) else None
