"""Short ways to write many: `{red|blue}` in a prompt, and `1,2,..,10` for seeds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgscale.app import checks
from imgscale.errors import UserError

MOST = 10_000  # prompts of one, and seeds


def expand(text: str) -> list[str]:
    """All combinations of the alternatives in a prompt, the last ones changing first.

    ``{red|blue}`` is either; alternatives may be empty and hold others. Braces without a bar stand for themselves, and
    so do ``\\{``, ``\\}`` and, within braces, ``\\|``.

    >>> expand("a {red|blue} {cat|dog}")
    ['a red cat', 'a red dog', 'a blue cat', 'a blue dog']

    Raises:
        UserError: There would be too many.
    """
    open_: list[list[list[str]]] = [[[""]]]  # of each brace that is open the alternatives so far, each as all its texts
    at = 0
    while at < len(text):
        char, inside = text[at], len(open_) > 1
        escaped = char == "\\" and text[at + 1 : at + 2] in (("{", "}", "|") if inside else ("{", "}"))
        if escaped:
            at += 1
            _append(open_[-1], [text[at]])
        elif char == "{":
            open_.append([[""]])
        elif inside and char == "|":
            open_[-1].append([""])
        elif inside and char == "}":
            parts = open_.pop()
            choice = len(parts) > 1
            _append(
                open_[-1], [one for part in parts for one in part] if choice else [f"{{{one}}}" for one in parts[0]]
            )
        else:
            _append(open_[-1], [char])
        at += 1
    while len(open_) > 1:  # what was never closed stands for itself
        first, *more = open_.pop()
        _append(open_[-1], ["{"])
        _append(open_[-1], first)
        for part in more:
            _append(open_[-1], ["|"])
            _append(open_[-1], part)
    return open_[0][0]


def _append(parts: list[list[str]], more: list[str]) -> None:
    """Continues the last alternative by each of some texts."""
    if len(parts[-1]) * len(more) > MOST:
        raise UserError(f"The alternatives in braces make more than {MOST} prompts; take some out.")
    parts[-1] = [a + b for a in parts[-1] for b in more]


def seeds(value: object, name: str) -> list[int]:
    """The seeds of a text such as ``7``, ``1,5,9``, ``1..10``, ``1,2,..,10`` or ``0,10,..,100``, or of a list.

    Args:
        value: A number, a text, or a list of either.
        name: What to call it in messages.

    Raises:
        UserError: It is none, or names one twice.
    """
    items = value if isinstance(value, list | tuple) else [value]
    found = [seed for item in items for seed in _seeds(str(item), name)]
    if len(found) > MOST:
        raise UserError(f"{name} can't name {len(found)} seeds; give at most {MOST}.")
    if twice := sorted({seed for seed in found if found.count(seed) > 1}) if len(found) > len(set(found)) else []:
        raise UserError(f"{name} names {twice[0]} twice; give it once.")
    if not found:
        raise UserError(f"{name} is empty; give a seed, such as 0 or 1,2,..,10.")
    return found


def _seeds(text: str, name: str) -> Iterator[int]:
    parts = [part.strip() for part in text.split(",")]
    said: list[int] = []
    for i, part in enumerate(parts):
        if part == "..":
            if not said or i + 1 == len(parts):
                raise UserError(f"{name} can't be {text!r}; give a number before and after the dots, as in 1,2,..,10.")
            step = said[-1] - said[-2] if len(said) > 1 else 1
            last = _seed(parts[i + 1], name)
            if step == 0 or (last - said[-1]) % step or (last - said[-1]) // step < 1:
                raise UserError(f"{name} can't be {text!r}: steps of {step} from {said[-1]} don't come to {last}.")
            new = range(said[-1] + step, last, step)
        elif match := re.fullmatch(r"(\d+)\s*\.\.\s*(\d+)", part):
            first, last = _seed(match[1], name), _seed(match[2], name)
            if last < first:
                raise UserError(f"{name} can't be {text!r}; give the lower number first.")
            new = range(first, last + 1)
        else:
            new = range(one := _seed(part, name), one + 1)
        if len(new) > MOST:
            raise UserError(f"{name} can't name {len(new)} seeds; give at most {MOST}.")
        said += new
    yield from said


def _seed(text: str, name: str) -> int:
    number = checks.whole(text, name, 0, checks.LARGEST)
    assert number is not None
    return number
