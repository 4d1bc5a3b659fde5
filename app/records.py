"""Rows of a table in a text file: CSV, TSV, JSONL or JSON; and prompts, which plain text may hold, too."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPT = ("prompt", "prompts", "text")  # what data sets call the column, in any case of letters
ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".tsv")


@dataclass(frozen=True)
class Row:
    """A prompt in a file.

    Args:
        number: Of its row, from 1: the line of a text, or the record of a table without its head.
        text: The prompt.
        columns: Everything else in its row.
    """

    number: int
    text: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bad:
    """A row that holds no prompt.

    Args:
        number: As of `Row`.
        reason: What follows on "Row 3".
        text: What there is of it.
    """

    number: int
    reason: str
    text: str = ""


def decoded(data: bytes) -> str:
    """The text of a file: UTF-8 with or without a byte order mark, or UTF-16 with one, as spreadsheets write it.

    Raises:
        UnicodeDecodeError: It is neither.
    """
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if wide else "utf-8-sig")


def prompts(ending: str, text: str) -> Iterator[Row | Bad]:
    """The prompts of a file, in their order. A row that has none is said to be bad, and doesn't end the others.

    Args:
        ending: One of `ENDINGS`. In ".txt" there is a prompt a line, but for lines that are blank or begin with ``#``
            (``\\#`` begins a prompt with a ``#``).
        text: Of the file.

    Raises:
        ValueError: It is no JSON at all, or holds no list.
        csv.Error: It is no CSV.
    """
    if ending == ".txt":
        for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):  # not at Unicode's other line ends
            if (prompt := line.strip()) and not prompt.startswith("#"):
                yield Row(number, prompt.removeprefix("\\") if prompt.startswith("\\#") else prompt)
        return
    for number, row in enumerate(_each(ending, text), 1):
        yield row if isinstance(row, Bad) else _row(number, row)


def _each(ending: str, text: str) -> Iterator[Any]:
    if ending == ".jsonl":
        for number, line in enumerate(filter(str.strip, text.split("\n")), 1):
            try:
                yield _json(line)
            except ValueError as error:
                yield Bad(number, f"is no JSON ({error}); mend it.", line.strip()[:200])
        return
    rows = parse(ending, text)
    if not isinstance(rows, list):
        raise ValueError("it holds no list of objects with a key 'prompt'")
    yield from rows


def _row(number: int, row: Any) -> Row | Bad:
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        return Bad(number, "is no object; give one with a key 'prompt'.", json.dumps(row)[:200])
    columns = {str(name).strip(): value for name, value in row.items() if name is not None}
    prompt = take(columns, PROMPT)
    if not isinstance(prompt, str) or not prompt.strip():
        return Bad(number, "has no text in a column 'prompt'; give it one.")
    if None in row:
        reason = "has more values than there are columns; put a text with commas or tabs in double quotes."
        return Bad(number, reason, prompt.strip())
    return Row(number, prompt.strip(), columns)


def take(columns: dict[str, Any], names: Sequence[str]) -> Any:
    """Takes out the first of some columns that there is, in any case of letters; None if there is none."""
    lower = {name.lower(): name for name in columns}
    name = next((lower[n] for n in names if n in lower), None)
    return None if name is None else columns.pop(name)


def parse(ending: str, text: str) -> Any:
    """What the text of a file holds: a list with a dict for each row, if it is CSV or TSV, or else any JSON.

    Args:
        ending: ".csv", ".tsv", ".jsonl", or anything else for JSON.
        text: Of the file.

    Raises:
        ValueError: It isn't JSON.
        csv.Error: It is no CSV.
    """
    if ending in (".csv", ".tsv"):
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if ending == ".tsv" else ","))
    if ending == ".jsonl":
        return [_json(line) for line in text.split("\n") if line.strip()]  # texts may hold Unicode's other line ends
    return _json(text)


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=lambda _: None)  # NaN and infinity, which aren't JSON
