"""Names for searchers, guides and verifiers: one decorator each, collisions refused, options read off the signature.

A name may carry options, in Python or on the command line alike: ``"rbf(restarts=2, path=vp)"``. Installed packages add
theirs by an entry point of the group ``imgscale.plugins`` that names a module (docs/extending.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from imgscale.errors import UnknownName, UserError

PLUGINS = "imgscale.plugins"  # the group of entry points

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A registered searcher, guide or verifier.

    Args:
        name: What users write.
        target: The function or class.
        cite: BibTeX keys of the papers (see `imgscale cite`).
    """

    name: str
    target: Callable[..., Any]
    cite: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.target) or "").partition("\n")[0]

    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters: the options that users may set."""
        parameters = inspect.signature(self.target).parameters.values()
        return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with texts turned into the types of the signature.

        Raises:
            UserError: An option that doesn't exist or doesn't have the right type.
        """
        known = self.options()
        try:
            hints = typing.get_type_hints(self.target if inspect.isfunction(self.target) else self.target.__init__)
        except NameError:  # a searcher of one's own may import its types for type checkers only
            hints = {}
        for name in options:
            if name not in known:
                raise UnknownName(f"option of {self.name!r}", name, known)
        return {k: _typed(v, hints.get(k, Any), f"{self.name}'s option {k}") for k, v in options.items()}


class Registry:
    """Entries by name, filled on first use by importing the modules of one package, and then all plugins."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, Entry] = {}
        self._imported = False

    def __call__(self, name: str, *, cite: str | tuple[str, ...] = ()) -> Callable[[T], T]:
        """Decorator that registers its target under a name, for Python and the command line alike.

        Args:
            name: What users write. Keyword-only parameters of the target are its options.
            cite: BibTeX keys of the papers.

        Raises:
            ValueError: The name is taken by another target.
        """

        def register(target: T) -> T:
            old = self._entries.get(name)
            if old and (old.target.__module__, old.target.__qualname__) != (
                target.__module__,
                target.__qualname__,
            ):
                raise ValueError(f"The {self.kind} name {name!r} is taken by {old.target.__module__}.")
            self._entries[name] = Entry(name, target, (cite,) if isinstance(cite, str) else cite)
            return target

        return register

    def __iter__(self) -> Iterator[Entry]:
        self._discover()
        return iter(sorted(self._entries.values(), key=lambda entry: entry.name))

    def __getitem__(self, name: str) -> Entry:
        self._discover()
        if name not in self._entries:
            raise UnknownName(self.kind, name, self._entries)
        return self._entries[name]

    def resolve(self, spec: str, options: Mapping[str, Any] | None = None) -> tuple[Entry, dict[str, Any]]:
        """The entry and the checked options of ``"name"`` or ``"name(option=value, …)"``."""
        name, written = parse(spec)
        entry = self[name]
        return entry, entry.check({**written, **(options or {})})

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def _discover(self) -> None:
        if not self._imported:
            self._imported = True  # a plugin may look at the names that are there
            try:
                _import_all(self._package)
                _import_plugins()
            except BaseException:
                self._imported = False
                raise


def _import_all(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)


def _import_plugins() -> None:
    """Imports what installed packages add.

    Raises:
        UserError: One can't be imported; the message names it.
    """
    plugins = importlib.metadata.entry_points(group=PLUGINS)
    if not plugins:
        return
    for package in ("imgscale.searchers", "imgscale.verifiers"):  # first, so that a name taken twice is the plugin's
        _import_all(package)
    for plugin in plugins:
        try:
            plugin.load()
        except Exception as error:
            source = plugin.dist.name if plugin.dist else plugin.value
            raise UserError(
                f"The plugin {plugin.name!r} of the package {source!r} can't be imported"
                f" ({type(error).__name__}: {error}); mend it, or uninstall it."
            ) from error


searcher = Registry("searcher", "imgscale.searchers")
guide = Registry("guide", "imgscale.searchers")
verifier = Registry("verifier", "imgscale.verifiers")


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Splits ``"name(a=1, b=x(2,3))"`` into the name and its options as texts.

    Raises:
        UserError: The text has another form.
    """
    match = re.fullmatch(r"\s*([\w.+-]+)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if not match:
        raise UserError(f"{spec!r} is no name; write it like rbf or rbf(option=value, other=value).")
    options: dict[str, str] = {}
    for part in split(match[2] or ""):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"The option {part.strip()!r} in {spec!r} is no option=value pair.")
        if key.strip() in options:
            raise UserError(f"The option {key.strip()} stands twice in {spec!r}; give it once.")
        options[key.strip()] = value.strip()
    return match[1], options


def compose(spec: str, guide: str | None = None) -> tuple[str, str | None]:
    """Splits ``"rbf+dps(scale=2)"`` or ``"bfs(local, width=4)"`` into the searcher and the guide of its transitions.

    Args:
        spec: What users write.
        guide: One that was given apart.

    Raises:
        UserError: There are two guides, or none after a plus.
    """
    base, *guides = split(spec, "+", empty=True)
    if inside := re.fullmatch(r"\s*([\w.-]+)\s*\((.*)\)\s*", base, re.DOTALL):
        parts = [part.strip() for part in split(inside[2])]
        named = [part for part in parts if "=" in part.partition("(")[0]]
        if len(named) < len(parts):
            guides = [part for part in parts if part not in named] + guides
            base = f"{inside[1]}({', '.join(named)})" if named else inside[1]
    if len(guides) > 1:
        raise UserError(f"{spec!r} has {len(guides)} guides ({', '.join(g.strip() for g in guides)}); give one.")
    if not base.strip() or not all(guide.strip() for guide in guides):
        raise UserError(f"{spec!r} is no name; write it like rbf, rbf(option=value) or rbf+dps.")
    if guides and guide is not None:
        raise UserError(f"There can't be two guides, that of {spec!r} and {guide!r}; give one.")
    return base.strip(), guides[0].strip() if guides else guide


def members(spec: str) -> list[str]:
    """The names in ``"clip+aesthetic(head=…)"``, which is an ensemble if there are several.

    Raises:
        UserError: One is empty.
    """
    names = [name.strip() for name in split(spec, "+", empty=True)]
    if not all(names):
        raise UserError(f"{spec!r} is no name; write it like clip or clip+aesthetic.")
    return names


def judges(spec: str) -> dict[str, Entry]:
    """The verifiers that a name stands for, by what results call them: one, or the members of an ensemble.

    Raises:
        UserError: There is none such, or it has other options.
    """
    names = members(spec)
    if len(names) == 1:
        entry, options = verifier.resolve(spec)
        if "of" not in options:
            return {spec if options else entry.name: entry}
        names = members(options["of"])
    return {name: entry for part in names for name, entry in judges(part).items()}


def composed(searcher: str, guide: str | None) -> str:
    """The inverse of `compose`: one name for a searcher and its guide."""
    return searcher if guide is None else f"{searcher}+{guide}"


def split(text: str, at: str = ",", empty: bool = False) -> list[str]:
    """Splits at commas, or another character, outside parentheses; empty parts are left out unless wanted."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == at and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in [*parts, text[start:]] if empty or part.strip()]


def _typed(value: Any, hint: Any, what: str) -> Any:
    """The value in the type of the hint; texts are read as the command line writes them."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) not in (None, typing.Literal) else (hint,)
    allowed: list[str] = []
    if NoneType in kinds and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None  # before text could take it literally
    for kind in kinds:
        if kind is Any:
            return value
        if typing.get_origin(kind) is typing.Literal:
            allowed += map(repr, typing.get_args(kind))
            if value in typing.get_args(kind):
                return value
        elif kind is NoneType:
            allowed.append("none")
        elif kind is bool:
            allowed.append("true or false")
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and value.lower() in ("true", "false"):
                return value.lower() == "true"
        elif kind in (int, float):
            allowed.append("a whole number" if kind is int else "a number")
            try:
                if not isinstance(value, bool) and (kind is float or float(value) == int(float(value))):
                    return kind(float(value)) if kind is float else int(float(value))
            except (TypeError, ValueError, OverflowError):
                pass
        else:
            allowed.append("text" if kind is str else getattr(kind, "__name__", str(kind)))
            if isinstance(value, kind) if isinstance(kind, type) else True:
                return value
    raise UserError(f"{what[0].upper()}{what[1:]} can't be {value!r}; give {' or '.join(allowed)}.")
