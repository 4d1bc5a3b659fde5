"""What a command checks before anything slow is loaded: each refusal names the value, what is allowed, what to do."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from imgscale.errors import UnknownName, UserError

DTYPES = ("bfloat16", "float16", "float32")
LONGEST_PROMPT = 10_000  # characters
LARGEST = 2**63 - 1  # seed


def prompt(text: str, what: str = "prompt") -> str:
    """The text if it can be drawn and recorded."""
    if not text.strip():
        raise UserError(f"The {what} is empty; write what the image should {'not ' * (what != 'prompt')}show.")
    if len(text) > LONGEST_PROMPT:
        raise UserError(f"The {what} has {len(text)} characters; shorten it to {LONGEST_PROMPT} or fewer.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The {what} {ascii(text[:40])} isn't UTF-8 text; mend the terminal's encoding.") from error
    return text


def whole(value: str | None, option: str, low: int, high: int | None = None) -> int | None:
    """A whole number in [low, high], or of any size from ``low`` on; None stays None."""
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        number = None
    if number is None or not low <= number <= (LARGEST if high is None else high):
        top = "2**63 - 1" if high == LARGEST else high
        allowed = f"of at least {low}" if high is None else f"from {low} to {top}"
        raise UserError(f"{option} can't be {value!r}; give a whole number {allowed}.")
    return number


def positive(value: str | None, option: str, *, zero: bool = False) -> float | None:
    """A finite number above zero (or zero, too); None stays None."""
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise UserError(f"{option} can't be {value!r}; give a number {'of at least' if zero else 'above'} 0.")
    return number


def dtype(name: str | None) -> str | None:
    """The name of a dtype that weights can be loaded in."""
    if name is not None and name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return name


def options(pairs: Sequence[str]) -> dict[str, str]:
    """The searcher's options from ``option=value`` texts."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UserError(f"--set can't be {pair!r}; give option=value, such as --set n=8.")
        if name in found:
            raise UserError(f"--set gives {name!r} twice ({found[name]!r} and {value!r}); give it once.")
        found[name] = value.strip()
    return found


def folder(path: Path, option: str = "--out") -> Path:
    """The folder if files can be written into it. What doesn't exist yet is tried out and taken away again."""
    made: list[Path] = []
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for part in reversed(missing):
            part.mkdir()
            made.append(part)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"The output folder {str(path)!r} can't be written ({reason}); choose another with {option}."
        ) from error
    finally:
        for part in reversed(made):
            part.rmdir()
    return path
