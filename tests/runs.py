"""Run folders as `imgscale batch` leaves them, made without a model."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from imgscale.app.batch import store

SETTINGS: dict[str, Any] = {
    "format": 1,
    "imgscale": "0",
    "model": "shapes-turbo",
    "searcher": "rbf",
    "verifier": "clip",
    "report": ["shapes"],
    "budget": {"nfe": 40},
    "height": 16,
    "width": 16,
    "num_inference_steps": 4,
    "max_batch": 32,
    "stopped": "budget",
    "rounds": 3,
    "finished": True,
    "nfe": 40,
}


@dataclass
class Made:
    """An item of a run.

    Args:
        prompt: Its prompt.
        number: Of the prompt; several items with the same are its seeds.
        columns: What else its row says.
        scores: Of its images by verifier, the best image first.
        plain: Scores of the plain image; None for no such image.
        size: Of its images.
    """

    prompt: str
    number: int
    columns: Mapping[str, Any] = field(default_factory=dict)
    scores: Sequence[Mapping[str, float | None]] = ({"clip": 0.75, "shapes": 1.0},)
    plain: Mapping[str, float | None] | None = field(default_factory=lambda: {"clip": 0.5, "shapes": 0.5})
    size: tuple[int, int] = (16, 16)
    state: str = store.DONE


def colour(item: int, rank: int) -> tuple[int, int, int]:
    """Of all pixels of an image; rank 0 is the plain one."""
    return (10 + item, 40 * rank, 200)


def make(folder: Path, items: Sequence[Made], failures: Sequence[tuple[int, str, str]] = (), waiting: int = 0) -> Path:
    """A run.

    Args:
        folder: Where it goes.
        items: In order.
        failures: Row, text and reason.
        waiting: How many items aren't done yet.
    """
    (folder / "images").mkdir(parents=True)
    database = sqlite3.connect(folder / store.NAME)
    database.executescript(store.SCHEMA)
    database.execute(f"PRAGMA user_version = {store.VERSION}")
    config = {"model": "shapes-turbo", "budget": 40, "prompts": "a & <b>.txt"}
    database.execute("INSERT INTO run VALUES ('id', ?, ?, 0.0)", (json.dumps(config), json.dumps({"imgscale": "0"})))
    for number, made in enumerate(items):
        _item(folder, database, number, made)
    for row, text, reason in failures:
        database.execute("INSERT INTO failures (row, text, reason, at) VALUES (?, ?, ?, 0.0)", (row, text, reason))
    for number in range(len(items), len(items) + waiting):
        database.execute("INSERT OR IGNORE INTO prompts VALUES (999, 'x', 1000, 'later', '{}', '{}')")
        values = (number, f"w{number}", 999, number, "shapes-turbo", store.WAITING)
        database.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, NULL)", values)
    database.commit()
    database.close()
    return folder


def _item(folder: Path, database: sqlite3.Connection, number: int, made: Made) -> None:
    values: tuple[Any, ...] = (made.number, f"p{made.number}", made.number + 1, made.prompt, json.dumps(made.columns))
    database.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?, '{}')", values)
    values = (number, f"i{number}", made.number, number, "shapes-turbo", made.state)
    database.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, NULL)", values)
    best = made.scores[0]
    trace = {
        "nfe": [4, 12, 40],
        "seconds": [0.1, 0.2, 0.3],
        "verifier_calls": [1, 3, 10],
        "scores": {name: [0.25, None if name == "shapes" else 0.5, score] for name, score in best.items()},
    }
    settings = {**SETTINGS, "prompt": made.prompt, "seed": number}
    plain = None if made.plain is None else _image(folder, f"{number:05d}-plain.png", number, 0, made.size)
    values = (
        *(number, "rbf", "clip", json.dumps(["shapes"]), 40, 1.5, json.dumps({"nfe": 40, "verifier_calls": 10})),
        *(json.dumps(trace), json.dumps(settings), "budget", 1, json.dumps([]), plain),
        *(None if made.plain is None else json.dumps(made.plain), 0.0),
    )
    database.execute(f"INSERT INTO results VALUES ({', '.join('?' * 15)})", values)
    for rank, scores in enumerate(made.scores, 1):
        file = _image(folder, f"{number:05d}{f'-{rank}' if rank > 1 else ''}.png", number, rank, made.size)
        database.execute("INSERT INTO images VALUES (?, ?, ?, ?, ?)", (number, rank, file, 7, json.dumps(scores)))


def _image(folder: Path, name: str, item: int, rank: int, size: tuple[int, int]) -> str:
    Image.new("RGB", size, colour(item, rank)).save(folder / "images" / name)
    return f"images/{name}"
