"""The axes of a grid: a setting and its values, read from texts such as ``budget=25,50,100``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from imgscale.errors import UnknownName, UserError

TEXTS = ("model", "searcher", "guide", "verifier", "preview", "negative", "mode")
NUMBERS = ("budget", "seconds", "eflops", "seed", "steps", "guidance", "height", "width")
PROMPT = "prompt"
OPTION = "set."  # and the name of an option of the searcher
MOST = 1000  # values


@dataclass(frozen=True)
class Axis:
    """A setting that changes from column to column, or from row to row.

    Args:
        flag: Where it was given: "--x" or "--y".
        name: One of `TEXTS` or `NUMBERS`, "prompt", or "set." and an option of the searcher.
        values: As they were written, none twice. Of "prompt", the first is the part of the prompt that each replaces.
    """

    flag: str
    name: str
    values: tuple[str, ...]

    @property
    def title(self) -> str:
        """What stands over the values."""
        if self.name == PROMPT:
            return f"“{self.values[0]}” in the prompt"
        return self.name.removeprefix(OPTION)


def read(flag: str, text: str) -> Axis:
    """The axis of a text ``SETTING=VALUE,VALUE,…``.

    Commas within parentheses or double quotes don't part values. Between numbers, ``..`` stands for those left out.

    Raises:
        UserError: It has another form, an unknown setting, no value, or one twice.
    """
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals:
        raise UserError(f"{flag} can't be {text!r}; give SETTING=VALUE,VALUE,… such as budget=25,50,100.")
    option = name.startswith(OPTION) and name.removeprefix(OPTION).isidentifier()
    if not option and name not in (*TEXTS, *NUMBERS, PROMPT):
        raise UnknownName(f"setting for {flag}", name, (*TEXTS, *NUMBERS, PROMPT, "set.OPTION"))
    values = _split(flag, rest)
    if name in NUMBERS or option:
        values = _expanded(flag, values)
    if not values:
        raise UserError(f"{flag} {name} has no value; give some, such as budget=25,50,100.")
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise UserError(f"{flag} {name} has {twice[0]!r} twice; give it once.")
    return Axis(flag, name, tuple(values))


def pair(x: str | None, y: str | None) -> tuple[Axis, Axis | None]:
    """Both axes, of which the second may be missing: one row, or one column if only ``y`` is given.

    Raises:
        UserError: Neither is there, both change the same, or there would be too many cells.
    """
    if x is None and y is None:
        raise UserError("A grid needs an axis; give --x SETTING=VALUE,VALUE,… such as --x budget=25,50,100.")
    axes = [read(flag, text) for flag, text in (("--x", x), ("--y", y)) if text is not None]
    if len(axes) == 2:
        one, other = axes
        if one.name == other.name and (one.name != PROMPT or one.values[0] == other.values[0]):
            what = f"replace {one.values[0]!r} in the prompt" if one.name == PROMPT else f"set {one.name!r}"
            raise UserError(f"Both axes {what}; give another setting to one of them.")
    cells = len(axes[0].values) * len(axes[-1].values if len(axes) == 2 else "1")
    if cells > MOST:
        raise UserError(f"The grid would have {cells} cells; give fewer values, for at most {MOST}.")
    return axes[0], axes[1] if len(axes) == 2 else None


def replaced(prompt: str, at: Sequence[tuple[Axis, str]]) -> str:
    """The prompt with the parts that prompt axes stand for in their values, all at once.

    Args:
        prompt: As it was given.
        at: Axes, and the value of each.

    Raises:
        UserError: A part isn't in the prompt.
    """
    pairs = {axis.values[0]: value for axis, value in at if axis.name == PROMPT}
    for axis, _ in at:
        if axis.name == PROMPT and (not axis.values[0] or axis.values[0] not in prompt):
            raise UserError(
                f"{axis.flag} prompt puts each of its values in the place of the first, and {axis.values[0]!r} isn't in"
                f" the prompt {prompt[:80]!r}; begin with a part of it."
            )
    if not pairs:
        return prompt
    longest = sorted(pairs, key=len, reverse=True)  # first, or a part of it would be replaced in its place
    return re.sub("|".join(map(re.escape, longest)), lambda found: pairs[found[0]], prompt)


def _split(flag: str, text: str) -> list[str]:
    """Values between commas. What stands in quotes is taken as it is, and may be empty or hold commas."""
    parts, depth, inside = [("", False)], 0, False
    for char in text:
        value, quoted = parts[-1]
        if inside:
            inside = char != '"'
            parts[-1] = (value + char * inside, True)
        elif char == '"' and depth == 0 and not quoted and not value.strip():
            inside, parts[-1] = True, ("", True)
        elif char == "," and depth == 0:
            parts.append(("", False))
        elif not (quoted and char.isspace()):
            depth += (char == "(") - (char == ")")
            parts[-1] = (value + char, quoted)
    if inside:
        raise UserError(f"{flag} can't be {text!r}, in which a quote has no end; close it.")
    found = [value if quoted else value.strip() for value, quoted in parts]
    return [value for value, (_, quoted) in zip(found, parts, strict=True) if value or quoted]


def _expanded(flag: str, values: list[str]) -> list[str]:
    """The values with numbers for each ``..``: by steps of one, or as far as the two values before it lie apart."""
    parts: list[str] = []
    for value in values:
        ends = re.fullmatch(r"(\d+)\.\.(\d+)", value)
        parts += [ends[1], "..", ends[2]] if ends else [value]
    values = parts
    found: list[str] = []
    for i, value in enumerate(values):
        if value != "..":
            found.append(value)
            continue
        try:
            first, last = Decimal(values[i - 1] if i else ""), Decimal(values[i + 1] if i + 1 < len(values) else "")
            step = first - Decimal(values[i - 2]) if i >= 2 else Decimal(1)
            count = int((last - first) / step)
        except (InvalidOperation, ZeroDivisionError, OverflowError, ValueError) as error:
            raise UserError(f"{flag} has .. where no numbers can be told; write it like 1,2,..,10.") from error
        if not 0 < count <= MOST or first + step * count != last:
            raise UserError(f"{flag} can't count from {first} to {last} by {step}; write it like 1,2,..,10.")
        found += [f"{first + step * k:f}" for k in range(1, count)]
    return found
