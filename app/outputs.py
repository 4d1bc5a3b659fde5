"""Where results go: names that can't leave the output folder, and files that never overwrite another search's."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale import files, png
from imgscale.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.result import SearchOutput

LONGEST_SLUG = 80  # bytes: with seed and ending well below the 143 that the strictest file systems allow


def slug(prompt: str) -> str:
    """A prompt as part of a file name: letters and digits of any script, and single hyphens between them."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", prompt).lower())
    cut = "-".join(words).encode()[:LONGEST_SLUG].decode(errors="ignore")
    return cut.strip("-") or "image"


def stem(folder: Path, base: str, record: png.Record) -> str:
    """``base``, numbered if that is taken by another search; the same search keeps its name."""
    name, number = base, 1
    while (folder / f"{name}.png").exists() and not _holds(folder / f"{name}.png", record):
        number += 1
        name = f"{base}-{number}"
    return name


def _holds(path: Path, record: png.Record) -> bool:
    try:
        return png.read(path).same_search(record)
    except UserError:
        return False


def save_image(output: SearchOutput, folder: Path, base: str) -> Path:
    """Writes the image alone, with its settings inside.

    Raises:
        UserError: The folder can't be written.
    """
    record = png.Record.of(output)
    with _writing(folder):
        path = folder / f"{stem(folder, base, record)}.png"
        png.write(path, output.images[0], record)
    return path


def save_picture(image: Image, folder: Path, name: str, text: str) -> Path:
    """Writes a picture without a record, with a text for viewers inside; one of the same text keeps its name.

    Raises:
        UserError: The folder can't be written.
    """
    with _writing(folder):
        path, number = folder / f"{name}.png", 1
        while path.exists() and not _says(path, text):
            number += 1
            path = folder / f"{name}-{number}.png"
        png.write(path, image, text=text)
    return path


def _says(path: Path, text: str) -> bool:
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            return png.KEYWORD not in image.info and image.info.get("parameters") == text
    except (OSError, ValueError, SyntaxError):
        return False


def save(output: SearchOutput, folder: Path) -> dict[str, Path]:
    """Writes everything about a search.

    Args:
        output: Its outcome.
        folder: Where to; made if it doesn't exist.

    Returns:
        The files: "image", with its settings inside; "trace"; "noise" if that was kept; and "plain" and "compare" if
        there is a plain image.

    Raises:
        UserError: The folder can't be written.
    """
    from imgscale.app import plots
    from imgscale.noise import SUFFIX

    record = png.Record.of(output)
    with _writing(folder):
        name = stem(folder, f"{slug(record.prompt)}-{record.seed}", record)
        paths = {"image": folder / f"{name}.png"}
        png.write(paths["image"], output.images[0], record)  # first, so that it is safe whatever comes then
        if output.noise is not None:
            paths["noise"] = output.noise.save(folder / f"{name}{SUFFIX}")
        paths["trace"] = folder / f"{name}-trace.png"
        files.write(paths["trace"], plots.trace(output))
        if output.plain is not None:
            paths["plain"], paths["compare"] = folder / f"{name}-plain.png", folder / f"{name}-compare.png"
            png.write(paths["plain"], output.plain.image, text=png.parameters(record, searched=False))
            files.write(paths["compare"], plots.comparison(output))
    return paths


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"The output folder {str(folder)!r} can't be written ({reason}); choose another.") from error


def summary(output: SearchOutput, paths: dict[str, Path]) -> dict[str, Any]:
    """The object that `generate --json` prints."""
    ledger = output.ledger.as_dict()
    values: dict[str, Any] = {
        "prompt": output.prompt,
        "model": output.model,
        "searcher": output.searcher,
        "options": {name: str(value) for name, value in output.settings["options"].items()},
        "guide": output.settings["guide"],
        "verifier": output.verifier,
        "report": output.settings["report"],
        "budget": output.settings["budget"],
        "seed": output.settings["seed"],
        "nfe": output.nfe,
        "ledger": ledger,
        "seconds": ledger["seconds"],
        "images": [str(paths["image"])],
        "scores": png.finite(output.scores),
        "seeds": output.seeds,
        "stopped": output.stopped,
        "finished": output.finished,
        "events": output.events,
        "trace": str(paths["trace"]),
        **({"noise": str(paths["noise"])} if "noise" in paths else {}),
    }
    if (decision := output.decision) is not None:
        came = {"quality": decision.quality, "reward": decision.reward, "eflops": decision.eflops}
        said = {"category": decision.category, "correct": decision.correct, "learned": decision.learned}
        values["auto"] = {**decision.as_dict(), **png.finite(came), **said}
    if output.plain is not None:
        values["plain"] = {"image": str(paths["plain"]), "scores": png.finite(output.plain.scores)}
        values["compare"] = str(paths["compare"])
    return values
