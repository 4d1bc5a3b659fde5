"""What `imgscale bench` compares: from a YAML file, from flags, or from both, and checked before a model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from imgscale.app.bench import prompts as prompt_lists
from imgscale.app.bench.values import READ, threshold
from imgscale.errors import UnknownName, UserError

FLAGS = {"models": "model", "searchers": "searcher", "verifiers": "verifier", "budgets": "budget"}
"""Flags that are repeated and so say one thing; all others are called as the key in the file."""


@dataclass(frozen=True)
class Config:
    """A comparison: every searcher, at every budget, under every verifier, on every model, for every prompt and seed.

    Args:
        models: Bundled names, folders or hub ids.
        searchers: Names, or names with options.
        verifiers: What steers.
        report: Held-out judges; None for the shapes oracle where it can judge.
        budgets: Model evaluations per image.
        prompts: A bundled list or a file; see `prompts.load`.
        categories: Of the prompts; all for none.
        every: One prompt of so many.
        limit: Prompts per category.
        seed: The first seed. Each prompt gets starting noises of its own from it, the same for every searcher.
        seeds: How many seeds.
        plain: Whether a sample without a search is made, too.
        solved: When a prompt counts as solved, such as "shapes>=1"; None for that where it is reported.
        against: The searcher that the others are compared with; None for best-of-n, or else the first.
        together: Prompts that are searched side by side.
        max_batch: Images per call of the network.
        steps: Of an ordinary sample; the model's own for None, as are the next three.
        guidance: Guidance scale.
        height: In pixels.
        width: In pixels.
        preview: What decodes previews: full, tiny, linear, a folder or hub id.
        device: Where to load to.
        dtype: Of the weights.
    """

    models: tuple[str, ...] = ("shapes-flow",)
    searchers: tuple[str, ...] = ("best-of-n", "rbf")
    verifiers: tuple[str, ...] = ("clip",)
    report: tuple[str, ...] | None = None
    budgets: tuple[int, ...] = (50, 100, 200)
    prompts: str = "prompts"
    categories: tuple[str, ...] = ()
    every: int = 1
    limit: int | None = None
    seed: int = 0
    seeds: int = 1
    plain: bool = True
    solved: str | None = None
    against: str | None = None
    together: int = 16
    max_batch: int = 32
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    preview: str | None = None
    device: str | None = None
    dtype: str | None = None

    def but(self, values: Mapping[str, Any], name: Callable[[str], str] = str) -> Config:
        """A configuration with some values replaced; None leaves one as it is.

        Args:
            values: By field, as YAML or a command line writes them.
            name: What to call a field in messages.

        Raises:
            UserError: A value that can't be; the message says which ones can.
        """
        given = {key: value for key, value in values.items() if value is not None}
        return replace(self, **{key: READ[key](value, name(key)) for key, value in given.items()})

    @classmethod
    def read(cls, file: Path) -> Config:
        """The configuration in a YAML file. A prompt file is looked for beside it.

        Raises:
            UserError: It can't be read, or holds what can't be.
        """
        import yaml

        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise UserError(f"The configuration {str(file)!r} can't be read ({reason}); mend it.") from error
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise UserError(f"The configuration {str(file)!r} holds no keys; write lines such as 'budgets: [50, 100]'.")
        for key in values:
            if key not in READ:
                raise UnknownName(f"key in {str(file)!r}", key, READ)
        config = cls().but(values, lambda key: f"{key} in {str(file)!r}")
        if config.prompts not in prompt_lists.bundled():
            config = replace(config, prompts=str(file.parent / config.prompts))
        return config

    def dump(self, folder: Path) -> str:
        """YAML that `read` understands in that folder, without what isn't set."""
        import yaml

        values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items() if v is not None}
        if self.prompts not in prompt_lists.bundled():
            values["prompts"] = os.path.relpath(self.prompts, folder)
        text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        return text

    def checked(self) -> tuple[Config, list[prompt_lists.Prompt]]:
        """This configuration with its defaults worked out, and its prompts. No model is loaded.

        Raises:
            UserError: A name that doesn't exist, an option that doesn't fit, a prompt that can't be judged.
        """
        from imgscale import models, registry
        from imgscale.app.job import default_report, parse_shapes

        for model in self.models:
            models.locate(model)
        for searcher in self.searchers:
            base, guide = registry.compose(searcher)
            registry.searcher.resolve(base)
            if guide is not None:
                registry.guide.resolve(guide)
        chosen = prompt_lists.load(self.prompts, self.categories, self.every, self.limit)
        report = self.report
        if report is None:
            fits = all(default_report(model, prompt.text) for model in self.models for prompt in chosen)
            report = ("shapes",) if fits else ()
        judges = [verifier_name(spec) for spec in (*self.verifiers, *report)]
        if "shapes" in judges:
            for prompt in chosen:
                try:
                    parse_shapes(prompt.text)
                except ValueError as error:
                    raise UserError(f"The verifier 'shapes' can't judge {prompt.text!r}: {error}") from error
        if self.solved is not None and self.solved != "none":
            name, _ = threshold(self.solved)
            if name not in judges:
                raise UnknownName("verifier in solved", name, judges)
        if self.against is not None and self.against not in self.searchers:
            raise UnknownName("searcher to compare against", self.against, self.searchers)
        return replace(self, report=report), chosen

    @property
    def baseline(self) -> str:
        """The searcher that the others are compared with."""
        first = next((s for s in self.searchers if re.match(r"\s*best-of-n\b", s)), self.searchers[0])
        return self.against or first

    def joined(self, before: Config) -> Config:
        """This configuration with the models, searchers, verifiers and budgets of an earlier one as well."""
        return replace(
            self,
            models=_joined(before.models, self.models),
            searchers=_joined(before.searchers, self.searchers),
            verifiers=_joined(before.verifiers, self.verifiers),
            budgets=tuple(sorted({*before.budgets, *self.budgets})),
        )

    def differences(self, other: Config) -> list[str]:
        """Settings in which two configurations differ although the rows of one folder must share them."""
        shared = ("report", "steps", "guidance", "height", "width", "preview", "device", "dtype")
        return [key for key in shared if getattr(self, key) != getattr(other, key)]


def _joined(first: tuple[str, ...], then: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *then)))


def verifier_name(spec: str) -> str:
    """What results call a verifier."""
    from imgscale import registry

    names = registry.judges(spec)
    return spec if len(registry.members(spec)) == 1 and registry.parse(spec)[1] else "+".join(names)


def flag(key: str) -> str:
    """What the command line calls a field."""
    return "--" + FLAGS.get(key, key).replace("_", "-")


def merged(file: Path | None, flags: Mapping[str, Any], folder: Path) -> Config:
    """The configuration of a command: flags over the file, or without one over what the folder was begun with.

    Args:
        file: YAML, or None.
        flags: By field; None or an empty sequence where a flag isn't given.
        folder: The one to write to.

    Raises:
        UserError: See `Config.read` and `Config.but`.
    """
    begun = folder / "bench.yaml"
    base = Config.read(file) if file else Config.read(begun) if begun.is_file() else Config()
    given = {key: value for key, value in flags.items() if value not in ([], ())}
    return base.but(given, flag)
