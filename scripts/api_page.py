"""Writes docs/api.md from the docstrings of all public names: python scripts/api_page.py"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
WIDTH = 120

# Chapters: heading, an introduction, and names as "module:name". Methods of the classes come with them.
CHAPTERS: list[tuple[str, str, list[str]]] = [
    (
        "imgscale",
        "What `import imgscale` offers. Names are resolved on first use, so that the import costs next to nothing.",
        [
            "imgscale:load",
            "imgscale:Scaler",
            "imgscale:SearchOutput",
            "imgscale.result:Candidate",
            "imgscale:Noise",
            "imgscale.noise:Remade",
            "imgscale.result:Plain",
            "imgscale.result:TracePoint",
            "imgscale:Budget",
            "imgscale.budget:Ledger",
            "imgscale:Rollover",
            "imgscale:EarlyExit",
            "imgscale:Progress",
            "imgscale:Ask",
            "imgscale:Done",
            "imgscale:score",
            "imgscale:Scored",
            "imgscale:searcher",
            "imgscale:verifier",
            "imgscale:auto",
            "imgscale:UserError",
        ],
    ),
    (
        "Writing a searcher",
        "A searcher is a generator function `(problem, rng, *, options)`: it holds the algorithm, and asks for all else"
        " by `yield from` and the verbs of `Problem`. [extending.md](extending.md) begins with an example.",
        [
            "imgscale.problem:Problem",
            "imgscale.particles:Particles",
            "imgscale.particles:Schedule",
            "imgscale.problem:Guide",
            "imgscale.kernels:Kernel",
        ],
    ),
    (
        "Writing a verifier",
        "A function of images and prompts will do. A class gets options and a name on the command line.",
        ["imgscale.rewards:Verifier", "imgscale.rewards:Ensemble", "imgscale.callables:Function"],
    ),
    (
        "imgscale.bandit",
        'What chooses behind `model="auto"`, for any actions and rewards of yours ([bandit.md](bandit.md)).',
        [],
    ),
]


def page() -> str:
    """The whole page."""
    parts = [
        "# The Python API\n",
        "Written by `python scripts/api_page.py` from the docstrings: don't edit it by hand.\n",
        "\n".join(f"- [{heading}](#{_anchor(heading)}): {_contents(heading, names)}" for heading, _, names in CHAPTERS),
        "",
    ]
    for heading, introduction, names in CHAPTERS:
        parts += [f"## {heading}\n", _wrapped(introduction) + "\n"]
        parts += [_described(name) for name in names or list(_bandit())]
    return "\n".join(parts).rstrip() + "\n"


def public() -> list[str]:
    """Everything on the page, as "module:name"."""
    return [name for heading, _, names in CHAPTERS for name in (names or list(_bandit()))]


def _bandit() -> Iterator[str]:
    return (f"imgscale.bandit:{name}" for name in importlib.import_module("imgscale.bandit").__all__)


def _contents(heading: str, names: list[str]) -> str:
    words = [name.partition(":")[2] for name in names or list(_bandit())]
    return ", ".join(
        f"[{word}](#{_anchor(_title(full))})" for word, full in zip(words, names or _bandit(), strict=True)
    )


def _title(full: str) -> str:
    """What a name is called: as it is imported, but without the package where users write the name alone."""
    module, _, name = full.partition(":")
    return f"{module}.{name}"


def _anchor(heading: str) -> str:
    """GitHub's."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _described(full: str) -> str:
    module, _, name = full.partition(":")
    target = getattr(importlib.import_module(module), name)
    lines = [f"### {_title(full)}\n"]
    if not callable(target):
        shown = (
            _short(target)
            if full != "imgscale.bandit:POLICIES"
            else f"{{{', '.join(f'{each!r}: …' for each in target)}}}"
        )
        return "\n".join([*lines, f"```python\n{name} = {shown}\n```\n"])
    if target is importlib.import_module("imgscale.registry").searcher:
        lines.append("```python\n@searcher(name, *, cite=())\n```\n")
        return "\n".join([*lines, _docs(inspect.getdoc(type(target).__call__) or "", name)])
    lines += [_signature(name, target), _docs(inspect.getdoc(target) or "", name)]
    if inspect.isclass(target) and not issubclass(target, BaseException):
        lines += [_member(name, *each) for each in _members(target)]
    return "\n".join(lines)


def _members(target: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that have a docstring of their own (all of a protocol's), in their order."""
    for name, value in vars(target).items():
        plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        documented = inspect.isfunction(plain) and (plain.__doc__ or getattr(target, "_is_protocol", False))
        if documented and (not name.startswith("_") or name in ("__call__", "__getitem__")):
            yield name, value


def _member(owner: str, name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"#### {owner}.{name}\n\n{_docs(inspect.getdoc(value) or '', name)}"
    plain = getattr(value, "__func__", value)
    shown = f"{owner[0].lower()}{owner[1:]}" if name == "__call__" else name
    title = (
        f"Calling a {owner}" if name == "__call__" else f"{owner}[…]" if name == "__getitem__" else f"{owner}.{name}"
    )
    return f"#### {title}\n\n{_signature(shown, plain, method=not isinstance(value, staticmethod))}\n" + _docs(
        inspect.getdoc(plain) or "", name
    )


def _signature(name: str, target: Any, method: bool = False) -> str:
    """A block of code: on one line if it fits, and else with a line for each parameter."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return f"```python\n{name}\n```\n"
    if getattr(target, "_is_protocol", False) and target.__init__ is not object.__init__:
        return f"```python\nclass {name}(Protocol)\n```\n"
    parameters = list(signature.parameters.values())[int(method) :]
    shown, star = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star:
            shown.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        shown.append(_parameter(p))
    back = signature.return_annotation
    end = "" if inspect.isclass(target) or back is inspect.Signature.empty else f" -> {_type(back)}"
    one = f"{name}({', '.join(shown)}){end}"
    many = f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){end}"
    return f"```python\n{one if len(one) <= 100 else many}\n```\n"


def _parameter(p: inspect.Parameter) -> str:
    mark = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    kind = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
    default = "" if p.default is p.empty else f" = {_short(p.default)}" if kind else f"={_short(p.default)}"
    return f"{mark}{p.name}{kind}{default}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:typing|collections\.abc|numpy\.typing|numpy)\.", "", text)


def _short(value: Any) -> str:
    text = repr(value)
    if "<factory>" in text:
        return "…"
    if text.startswith("<") or " at 0x" in text:
        return getattr(value, "__name__", type(value).__name__)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _docs(text: str, name: str) -> str:
    """Markdown of a Google-style docstring: what stands before the first section, and a list for each section."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Example|Source):(?=\s)", text, flags=re.MULTILINE)
    made = [_prose(parts[0])] if parts[0].strip() else []
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        body = textwrap.dedent(body.strip("\n")) if body.startswith("\n") else body.strip()
        items = _items(body) if title in ("Args", "Attributes", "Raises") else None
        made.append(f"**{title}**" + (f"\n\n{items}" if items else f": {_prose(body)}"))
    return "\n\n".join(made) + "\n"


def _prose(text: str) -> str:
    """Paragraphs as they are; what is indented, after a double colon or not, becomes code."""
    made = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if part.startswith("    "):
            made.append(f"```python\n{textwrap.dedent(part)}\n```")
        else:
            made.append(_wrapped(re.sub(r"::$", ":", part.replace("``", "`"))))
    return "\n\n".join(made)


def _items(body: str) -> str:
    found = re.split(r"^(\*{0,2}[\w.]+): ", body.replace("``", "`"), flags=re.MULTILINE)
    rows = zip(found[1::2], found[2::2], strict=True)
    return "\n".join(_wrapped(f"- `{name}`: {' '.join(what.split())}", "  ") for name, what in rows)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
