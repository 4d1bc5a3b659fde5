"""One search as somebody asks for it, and the checks that need no model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from imgscale import registry
from imgscale.budget import Budget
from imgscale.early_exit import EarlyExit, Rule, chosen
from imgscale.errors import UserError
from imgscale.problem import Guide, Verb
from imgscale.result import SearchOutput
from imgscale.rewards import Verifier, is_ensemble, panel
from imgscale.verification import VerifierLike

if TYPE_CHECKING:
    from imgscale.problem import Problem

Searcher = Callable[..., Verb]


@dataclass(frozen=True)
class Ask:
    """One search; the arguments are those of `Scaler.__call__`, and explained there."""

    prompt: str
    negative_prompt: str | None = None
    searcher: str | Searcher = "rbf"
    guide: str | Guide | None = None
    verifier: VerifierLike = "clip"
    report: Sequence[VerifierLike] = ()
    budget: int | Budget = 200
    seed: int = 0
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    options: Mapping[str, Any] | None = None
    plain: bool = True
    preview: Any = None
    verifier_timeout: float | None = None
    keep: int | None = 1
    keep_noise: bool = False
    early_exit: str | EarlyExit | Rule = "off"
    pipeline_arguments: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuses what no model could do.

        Raises:
            UserError: A prompt, seed, number, time or early exit that isn't one.
        """
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise UserError(f"The prompt can't be {self.prompt!r}; write what the image should show.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"The seed can't be {self.seed!r}; give a whole number from 0 to 2**63 - 1.")
        whole = not isinstance(self.keep, bool) and isinstance(self.keep, int | None)
        if not whole or (self.keep is not None and self.keep < 1):
            raise UserError(f"keep can't be {self.keep!r}; give how many images to keep, from 1 on, or None for all.")
        chosen(self.early_exit)
        time = self.verifier_timeout
        number = not isinstance(time, bool) and isinstance(time, int | float) and math.isfinite(time) and time > 0
        if time is not None and not number:
            raise UserError(f"verifier_timeout can't be {time!r}; give a positive number of seconds, such as 30.")


@dataclass(frozen=True)
class Done:
    """How one of several searches ended.

    Args:
        ask: What was asked for.
        place: Its number, the first being 0.
        output: Its outcome, or None if it couldn't begin.
        error: Why it couldn't, or None.
    """

    ask: Ask
    place: int
    output: SearchOutput | None = None
    error: UserError | None = None


def seeds(seed: int | Sequence[int], several: bool, n: int) -> list[int]:
    """A seed for each of ``n`` prompts.

    Raises:
        UserError: There are more or fewer.
    """
    many = isinstance(seed, Sequence) and not isinstance(seed, str)
    found = list(seed) if many else [seed] * n  # type: ignore[arg-type]
    if many and (not several or len(found) != n):
        raise UserError(
            f"There can't be {len(found)} seeds for {n} prompts; give one, or a list with one for each prompt."
        )
    return found  # type: ignore[return-value]


def searcher(spec: str | Searcher, options: Mapping[str, Any] | None) -> tuple[str, Searcher, dict[str, Any]]:
    """What records call a searcher, the searcher, and its options.

    Raises:
        UserError: There is none such, or it has no such options.
    """
    if isinstance(spec, str):
        entry, checked = registry.searcher.resolve(spec, options)
    elif inspect.isgeneratorfunction(spec):
        entry = registry.Entry(getattr(spec, "__name__", "custom").replace("_", "-"), spec)
        checked = entry.check(options or {})
    else:
        raise UserError(f"The searcher can't be {spec!r}; give a name or a generator function (problem, rng).")
    return entry.name, entry.target, checked


def guide(spec: str | Guide | None) -> tuple[str | None, Guide | None]:
    """What records call a guide, and the guide.

    Raises:
        UserError: There is none such, or it has no such options.
    """
    if spec is None or not isinstance(spec, str):
        return None if spec is None else getattr(spec, "__name__", None) or str(spec), spec
    entry, options = registry.guide.resolve(spec)
    return spec, entry.target(**options)


def distinct(judge: Verifier, reports: Sequence[Verifier]) -> list[Verifier]:
    """The reports without repetitions and without the judge itself; results tell verifiers apart by name.

    Of an ensemble, results hold what its members say in any case.

    Raises:
        UserError: Two have one name, or an ensemble is to report.
    """
    named = {judge.name: judge, **{member.name: member for member in panel(judge)}}
    known = len(named)
    for verifier in reports:
        if is_ensemble(verifier):
            raise UserError(
                f"The ensemble {verifier.name!r} can't report, since its scores only compare the images of one search;"
                " give its members."
            )
        other = named.setdefault(verifier.name, verifier)
        if getattr(other, "function", other) is not getattr(verifier, "function", verifier):
            raise UserError(f"Two verifiers are called {verifier.name!r}; give one of them another name.")
    return list(named.values())[known:]


def check_budget(budget: Budget, problem: Problem) -> None:
    """Raises:
    UserError: The budget can't finish one image.
    """
    sample_nfe, price = problem.sample_nfe, problem.meter.price
    if budget.eflops is not None and price is not None:
        least = price.text + sample_nfe * price.nfe + price.image
        if budget.eflops < least:
            raise UserError(
                f"A budget of {budget.eflops:.3g} eFLOPs can't finish one image, which takes {least:.3g}; give a budget"
                " of that or more, or fewer steps."
            )
    if budget.nfe is not None and budget.nfe < sample_nfe:
        raise UserError(
            f"A budget of {budget.nfe} model evaluations can't finish one image, which takes {sample_nfe}; give"
            f" a budget of {sample_nfe} or more, or fewer steps."
        )
