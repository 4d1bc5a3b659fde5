"""The rows of a comparison: one for every search, kept as they are finished, so that a stopped run can go on.

A folder holds `rows.jsonl`, the images beside it, and `bench.yaml`, the configuration that the rows were made with.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import files
from imgscale.app.bench.config import Config
from imgscale.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Row = dict[str, Any]
Key = tuple[str, str, int, str, int, str]

PLAIN = "plain"  # the searcher of a row without a search; its budget is 0
LARGEST = 256  # pixels: kept images are shrunk to this


def key(row: Row) -> Key:
    """What a row is one of."""
    return row["model"], row["prompt"], row["seed"], row["searcher"], row["budget"], row["verifier"]


class Rows:
    """The rows of a folder. Made by `opened`, or by `of` to look at them only.

    Attributes:
        all: In the order in which they were finished.
        config: What they were made with, all of them together.
    """

    def __init__(self, folder: Path, rows: Sequence[Row], config: Config | None = None) -> None:
        self.folder = folder
        self.config = config or Config()
        self.all: list[Row] = []
        self._known: dict[Key, Row] = {}
        for row in rows:
            self._take(row)

    @classmethod
    def of(cls, folder: Path, config: Config | None = None) -> Rows:
        """The rows that are there.

        Raises:
            UserError: The file is damaged.
        """
        return cls(folder, list(_read(folder / "rows.jsonl")), config)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def get(self, key: Key) -> Row | None:
        return self._known.get(key)

    def _take(self, row: Row) -> bool:
        fresh = self._known.setdefault(key(row), row) is row
        if fresh:
            self.all.append(row)
        return fresh

    def add(self, row: Row, image: Image) -> None:
        """Keeps a finished row on the disk, its image first; one that is there already stays as it is."""
        name = hashlib.sha256(json.dumps(key(row)).encode()).hexdigest()[:16]
        row["image"] = f"images/{name}.png"
        if self._take(row):
            (self.folder / "images").mkdir(exist_ok=True)
            small = image.convert("RGB")
            small.thumbnail((LARGEST, LARGEST))
            data = io.BytesIO()
            small.save(data, "PNG")
            files.write(self.folder / row["image"], data.getvalue())
            with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _read(file: Path) -> Iterator[Row]:
    """All whole lines; the last one may have been cut off by a crash."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            key(row)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"Line {number} of {str(file)!r} is damaged; delete it, and its row is made again."
            ) from error
        yield row


@contextmanager
def opened(folder: Path, config: Config) -> Iterator[Rows]:
    """The rows of a folder, to add to; no other process may at the same time.

    Args:
        folder: Made if it doesn't exist.
        config: What the new rows are made with; rows of other models, searchers, prompts and so on may be there.

    Raises:
        UserError: The rows that are there were made with other settings, or another process is at work.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "rows.jsonl").open("a+b")
    except OSError as error:
        raise UserError(f"The output folder {str(folder)!r} can't be written ({error}); choose another.") from error
    with file:
        _lock(file, folder)
        begun = folder / "bench.yaml"
        rows = Rows.of(folder, config)
        if rows.all and not begun.is_file():
            raise UserError(f"{str(folder)!r} holds rows but no bench.yaml that says how; choose another --out.")
        if rows.all:
            before = Config.read(begun)
            if different := before.differences(config):
                what = ", ".join(f"{k}={_said(before, k)} and not {_said(config, k)}" for k in different)
                raise UserError(f"The rows in {str(folder)!r} were made with {what}; choose another --out.")
            rows.config = config.joined(before)
        files.write(begun, rows.config.dump(folder).encode())
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # what a crash cut off would spoil the next line
        yield rows


def _said(config: Config, name: str) -> str:
    value = getattr(config, name)
    return "the default" if value is None else "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def _lock(file: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(f"Another imgscale bench is writing to {str(folder)!r}; wait for it, or stop it.") from error


# ------------------------------------------------------------------------------------------------- other formats


def flat(row: Row) -> dict[str, Any]:
    """A row as a line of a table: scores and what the prompt list said get columns of their own."""
    line = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
    line |= {f"held_out_{name}": score for name, score in row["held_out"].items()}
    line |= {f"plain_{name}": score for name, score in (row["plain"] or {}).items()}
    for name, value in row["columns"].items():
        line["category" if name == "category" else f"prompt_{name}"] = value if _scalar(value) else json.dumps(value)
    return line | {"events": "; ".join(row["events"]), "trace": json.dumps(row["trace"])}


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def to_csv(rows: Iterable[Row]) -> bytes:
    lines = [flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)))
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue().encode()


def to_parquet(rows: Iterable[Row]) -> bytes | None:
    """Parquet, or None where pyarrow isn't installed. A column that mixes kinds of values is written as texts."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return None
    lines = [flat(row) for row in rows]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        values = [line.get(name) for line in lines]
        kinds = {float if isinstance(v, int) and not isinstance(v, bool) else type(v) for v in values if v is not None}
        columns[name] = values if len(kinds) < 2 else [None if v is None else str(v) for v in values]
    data = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), data)
    return data.getvalue()
