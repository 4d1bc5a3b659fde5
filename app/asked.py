"""What a search is asked for in: settings by the names of the command line, from its texts or from a row of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from imgscale.app import checks
from imgscale.app.job import Job
from imgscale.errors import UserError

ALIASES = {"negative_prompt": "negative", "num_inference_steps": "steps", "guidance_scale": "guidance"}
"""What the Python interface calls settings that the command line calls otherwise."""

Reader = Callable[[Any, str], Any]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{name} can't be {value!r}; give a text.")
    return value.strip()


def _whole(low: int, high: int | None = None) -> Reader:
    def read(value: Any, name: str) -> int | None:
        whole = isinstance(value, float) and value.is_integer()  # tables with gaps turn 5 into 5.0
        return checks.whole(str(int(value) if whole else value).strip(), name, low, high)

    return read


def _positive(zero: bool = False) -> Reader:
    return lambda value, name: checks.positive(str(value), name, zero=zero)


def _flag(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in ("true", "false"):
        raise UserError(f"{name} can't be {value!r}; give true or false.")
    return str(value).lower() == "true"


def _report(value: Any, name: str) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(text for item in items if (text := _text(item, name)) != "none")


def _options(value: Any, name: str) -> Mapping[str, Any]:
    """Of a dict, of a JSON object, of a list of option=value, or of such with commas between."""
    from imgscale.registry import split

    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{name} can't be {value!r}, which is no JSON ({error}).") from error
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    pairs = split(value) if isinstance(value, str) else value
    if not isinstance(pairs, list | tuple):
        raise UserError(f"{name} can't be {value!r}; give option=value, such as n=8.")
    return checks.options([str(pair) for pair in pairs])


def _keep(value: Any, name: str) -> int | None:
    """How many images to keep, or None for all."""
    if value == "all":
        return None
    try:
        return 1 if value == "best" else _whole(1, 10_000)(value, name)
    except UserError as error:
        raise UserError(f"{name} can't be {value!r}; give best, all, or how many, such as 4.") from error


READ: dict[str, Reader] = {
    "negative": lambda value, name: checks.prompt(_text(value, name), "negative prompt"),
    "model": _text,
    "searcher": _text,
    "guide": _text,
    "options": _options,
    "verifier": _text,
    "report": _report,
    "budget": _whole(1),
    "seconds": _positive(),
    "eflops": _positive(),
    "steps": _whole(1, 1000),
    "guidance": _positive(zero=True),
    "height": _whole(1, 16384),
    "width": _whole(1, 16384),
    "preview": _text,
    "verifier_timeout": _positive(),
    "early_exit": _text,
    "plain": _flag,
    "keep": _keep,
    "max_batch": _whole(1, 4096),
    "device": _text,
    "dtype": lambda value, name: checks.dtype(_text(value, name)),
}
"""By setting: what makes its value of a text or of JSON, or refuses it under the name it is given."""
LIMITS = {"budget": "nfe", "seconds": "seconds", "eflops": "eflops"}


def read(values: Mapping[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Settings from what a command line or a file says.

    Args:
        values: By setting; what is None isn't set.
        label: What to call a setting in messages.

    Raises:
        UserError: A value can't be; the message says which ones can.
    """
    return {name: READ[name](value, label(name)) for name, value in values.items() if value is not None}


def changed(job: Job, settings: Mapping[str, Any]) -> Job:
    """A job with other settings.

    Options belong to a searcher: with another one and no options, there are none.

    Args:
        job: To be changed.
        settings: From `read`; ``keep`` is no matter of a job.
    """
    limits = {LIMITS[name]: value for name, value in settings.items() if name in LIMITS}
    values = {name: value for name, value in settings.items() if name not in LIMITS and name != "keep"}
    if "searcher" in values:
        values.setdefault("options", {})
    if limits:
        values["budget"] = replace(job.budget, **limits)
    return replace(job, **values)
