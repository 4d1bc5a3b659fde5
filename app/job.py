"""One search as the command line asks for it: checked first, then run under a progress line and Ctrl-C."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app import checks
from imgscale.app.console import Interrupt, Live, only_results_on_stdout, waiting
from imgscale.budget import Budget
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.asks import Ask
    from imgscale.early_exit import Rule
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress


@dataclass(frozen=True)
class Job:
    """What `Scaler` is called with, in values that a command line or a PNG can hold; see there."""

    prompt: str
    negative: str | None = None
    model: str = "shapes-flow"
    searcher: str = "rbf"
    guide: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    verifier: str = "clip"
    report: tuple[str, ...] = ()
    budget: Budget = Budget(nfe=200)
    seed: int = 0
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    device: str | None = None
    dtype: str | None = None
    distilled: bool = False
    max_batch: int = 32
    exact: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = True
    journal: Path | None = None
    preview: str | None = None
    verifier_timeout: float | None = None
    early_exit: str | Rule = "off"
    save_noise: bool = False

    @property
    def judge(self) -> str:
        """What steers."""
        return self.verifier

    def check(self) -> None:
        """Refuses what can't be run, before the model is loaded; the cheapest checks come first.

        Raises:
            UserError: A name that doesn't exist, an option that doesn't fit, a prompt that can't be judged.
        """
        from imgscale import early_exit, models, previews, registry

        checks.prompt(self.prompt)
        if self.negative is not None:
            checks.prompt(self.negative, "negative prompt")
        models.locate(self.model)
        if self.preview is not None:
            previews.check(self.preview)
        early_exit.chosen(self.early_exit)
        searcher, guide = registry.compose(self.searcher, self.guide)
        registry.searcher.resolve(searcher, self.options)
        if guide is not None:
            registry.guide.resolve(guide)
        judgeable(self.prompt, (self.verifier, *self.report))

    def command(self) -> str:
        """The `imgscale generate` that asks for this image, in a form that a POSIX shell takes.

        Pipeline arguments other than the ones with options of their own have no place in it.
        """
        limits = self.budget
        texts = {
            **{"model": self.model, "searcher": self.searcher, "guide": self.guide, "verifier": self.verifier},
            **{"budget": limits.nfe, "seconds": limits.seconds, "eflops": limits.eflops, "seed": self.seed},
            **{"steps": self.steps, "guidance": self.guidance, "height": self.height, "width": self.width},
            **{"negative": self.negative, "device": self.device, "dtype": self.dtype, "preview": self.preview},
            "verifier-timeout": self.verifier_timeout,
            "early-exit": self.early_exit if self.early_exit != "off" and isinstance(self.early_exit, str) else None,
        }
        return self._written(texts)

    def _written(self, texts: Mapping[str, Any]) -> str:
        """The command with some options by name, None where one isn't given, and with those that all searches have."""
        pairs = [(f"--{name}", f"{value}") for name, value in texts.items() if value is not None]
        pairs += [("--set", f"{name}={value}") for name, value in self.options.items()]
        pairs += [("--report", name) for name in self.report or ("none",)]
        alone = ["--distilled"] * self.distilled + ["--"] * self.prompt.startswith("-")
        return shlex.join(["imgscale", "generate", *(word for pair in pairs for word in pair), *alone, self.prompt])

    def ask(self) -> Ask:
        """The same for `Scaler.stream`, which keeps no journal."""
        from imgscale.asks import Ask

        return Ask(
            self.prompt,
            self.negative,
            searcher=self.searcher,
            guide=self.guide,
            verifier=self.verifier,
            report=self.report,
            budget=self.budget,
            seed=self.seed,
            height=self.height,
            width=self.width,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            options=self.options,
            plain=self.plain,
            preview=self.preview,
            verifier_timeout=self.verifier_timeout,
            early_exit=self.early_exit,
            keep_noise=self.save_noise,
            pipeline_arguments=self.arguments,
        )

    def load(self, quiet: bool = False) -> Scaler:
        """The model, ready to search with.

        Args:
            quiet: Show no progress.
        """
        with only_results_on_stdout(), waiting(quiet, f"Loading {self.model}"):
            import torch

            import imgscale

            dtype = None if self.dtype is None else getattr(torch, self.dtype)
            return imgscale.load(
                self.model,
                device=self.device,
                dtype=dtype,
                max_batch=self.max_batch,
                exact=self.exact,
                distilled=self.distilled or None,
            )

    def run(
        self,
        scaler: Scaler,
        interrupt: Interrupt,
        quiet: bool = False,
        watch: Callable[[Progress], None] | None = None,
    ) -> SearchOutput:
        """Searches.

        Args:
            scaler: From `load`.
            interrupt: Ends the search with its best so far.
            quiet: Show no progress.
            watch: Called after every engine step; may cancel, too.
        """

        def follow(progress: Progress) -> None:
            if watch:
                watch(progress)
            if interrupt.asked:
                progress.cancel()

        with only_results_on_stdout(), Live(quiet, self.budget.nfe, follow) as live:
            return self._search(scaler, live)

    def _search(self, scaler: Scaler, callback: Callable[[Progress], None]) -> SearchOutput:
        output: SearchOutput = scaler(
            self.prompt,
            self.negative,
            searcher=self.searcher,
            guide=self.guide,
            verifier=self.verifier,
            report=self.report,
            budget=self.budget,
            seed=self.seed,
            height=self.height,
            width=self.width,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            options=self.options,
            plain=self.plain,
            progress=False,
            callback=callback,
            journal=self.journal,
            preview=self.preview,
            verifier_timeout=self.verifier_timeout,
            early_exit=self.early_exit,
            keep_noise=self.save_noise,
            **self.arguments,
        )
        return output


def judgeable(prompt: str, verifiers: Iterable[str]) -> None:
    """Refuses verifiers that don't exist, and the oracle for a prompt that it can't read.

    Raises:
        UserError: One of them is.
    """
    from imgscale import registry

    if "shapes" in [entry.name for spec in verifiers for entry in registry.judges(spec).values()]:
        try:
            parse_shapes(prompt)
        except ValueError as error:
            raise UserError(f"The verifier 'shapes' can't judge this prompt: {error}") from error


def parse_shapes(prompt: str) -> None:
    """Checks a prompt against the grammar of the shapes world.

    Raises:
        ValueError: It is outside; the message says which part.
    """
    from imgscale.assets.shapes.world import parse

    parse(prompt)


def default_report(model: str, prompt: str) -> tuple[str, ...]:
    """The held-out judge where there is one: the oracle, for a bundled model and a prompt that it can read."""
    from imgscale.models import bundled

    if model not in bundled():
        return ()
    try:
        parse_shapes(prompt)
    except ValueError:
        return ()
    return ("shapes",)
