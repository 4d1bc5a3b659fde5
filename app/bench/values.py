"""The values of a configuration, each read from what YAML or a command line gives, or refused in one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from imgscale.app import checks
from imgscale.errors import UserError


def threshold(solved: str, name: str = "solved") -> tuple[str, float]:
    """The verifier and the value of a text such as "shapes>=1".

    Raises:
        UserError: It has another form.
    """
    match = re.fullmatch(r"\s*(\S.*?)\s*>=\s*(\S+)\s*", solved)
    try:
        value = float(match[2]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise UserError(f"{name} can't be {solved!r}; give VERIFIER>=VALUE, such as shapes>=1, or none.")
    return match[1], value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if not isinstance(item, str) or not item.strip():
            raise UserError(f"{name} can't hold {item!r}; give names.")
        if item.count("(") != item.count(")"):
            raise UserError(
                f"{name} can't hold {item!r}, which lacks a parenthesis; in a YAML list, put a name with commas in"
                " quotes."
            )
    return tuple(dict.fromkeys(item.strip() for item in items))


def _some(value: Any, name: str) -> tuple[str, ...]:
    found = _texts(value, name)
    if not found:
        raise UserError(f"{name} can't be empty; give at least one.")
    return found


def _judges(value: Any, name: str) -> tuple[str, ...]:
    return tuple(spec for spec in _texts(value, name) if spec != "none")


def _split(value: Any, name: str) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return _texts([part for item in items for part in str(item).split(",")], name)


def _budgets(value: Any, name: str) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    found = {_whole(1)(part, name) for item in items for part in str(item).split(",")}
    if not found:
        raise UserError(f"{name} can't be empty; give at least one.")
    return tuple(sorted(found))


def _whole(low: int, high: int | None = None) -> Callable[[Any, str], int]:
    def read(value: Any, name: str) -> int:
        number = checks.whole(str(value).strip(), name, low, high)
        assert number is not None
        return number

    return read


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{name} can't be {value!r}; give a text.")
    return value.strip()


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} can't be {value!r}; give true or false.")
    return value


def _solved(value: Any, name: str) -> str:
    text = _text(value, name)
    if text != "none":
        threshold(text, name)
    return text


def _preview(value: Any, name: str) -> str:
    from imgscale.previews import check

    text = _text(value, name)
    check(text)
    return text


READ: dict[str, Callable[[Any, str], Any]] = {
    "models": _some,
    "searchers": _some,
    "verifiers": _some,
    "report": _judges,
    "budgets": _budgets,
    "prompts": _text,
    "categories": _split,
    "every": _whole(1),
    "limit": _whole(1),
    "seed": _whole(0, checks.LARGEST),
    "seeds": _whole(1, 100_000),
    "plain": _flag,
    "solved": _solved,
    "against": _text,
    "together": _whole(1),
    "max_batch": _whole(1),
    "steps": _whole(1, 1000),
    "guidance": lambda value, name: checks.positive(str(value), name, zero=True),
    "height": _whole(1, 16384),
    "width": _whole(1, 16384),
    "preview": _preview,
    "device": _text,
    "dtype": lambda value, name: checks.dtype(_text(value, name)),
}
