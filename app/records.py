"""Rows of a table in a text file: CSV, TSV, JSONL or JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any


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
