"""`--model auto` on the command line: a job whose model and search the bandit chooses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app.console import Live, complain, only_results_on_stdout, waiting
from imgscale.app.job import Job, default_report, judgeable
from imgscale.budget import Budget
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.automatic import Decision
    from imgscale.bandit.poolfile import PoolFile
    from imgscale.result import SearchOutput
    from imgscale.watch import Progress

NO_LIMIT = 10**12  # NFE: for the budget of a job whose action alone says how much is spent

# Fields of a job that the bandit decides or the pool file says, and what the command line calls them.
DECIDED = {
    "searcher": "--searcher",
    "guide": "--guide",
    "options": "--set",
    "verifier": "--verifier",
    "steps": "--steps",
    "dtype": "--dtype",
    "distilled": "--distilled",
    "journal": "--journal",
    "preview": "--preview",
    "max_batch": "--max-batch",
    "exact": "--exact",
    "early_exit": "--early-exit",
}


@dataclass(frozen=True)
class AutoJob(Job):
    """A job for ``model="auto"``; its budget is the most that a search may take.

    Args:
        mode: "cost", "balanced", "quality", or the weight of quality; the pool's for None.
        policy: The file that keeps what is learned; one in the user's data folder for None.
        pool: A pool file; the bundled models for None.
        written: A hash of what the pool file said, where a run has to know whether it is still the same.
    """

    mode: str | float | None = None
    policy: Path | None = None
    pool: Path | None = None
    written: str | None = None

    def check(self) -> None:
        """Refuses what can't be run before a model is loaded.

        Raises:
            UserError: A prompt that is empty or can't be judged, an option that isn't the user's to set here, a pool
                that can't be.
        """
        from imgscale.app import checks
        from imgscale.bandit import policy

        if self.model != "auto":
            raise UserError(f"The model can't be {self.model!r} in a run with --model auto; leave it to the bandit.")
        checks.prompt(self.prompt)
        if self.negative is not None:
            checks.prompt(self.negative, "negative prompt")
        for field in fields(Job):
            if field.name in DECIDED and getattr(self, field.name) != _default(field):
                raise decided(DECIDED[field.name])
        if self.mode is not None:
            policy.quality_weight(self.mode)
        judgeable(self.prompt, (self.judge, *self.report))

    @cached_property
    def judge(self) -> str:
        """What steers all searches: the pool's verifier."""
        from imgscale.bandit import poolfile

        return poolfile.read(self.pool).verifier

    def command(self) -> str:
        """The `imgscale generate` that asks the same of a bandit, in a form that a POSIX shell takes.

        It chooses by what its own policy knows then.
        """
        limits = self.budget
        texts = {
            **{"model": self.model, "mode": self.mode, "policy": self.policy, "pool": self.pool},
            **{"budget": None if limits.nfe == NO_LIMIT else limits.nfe, "seconds": limits.seconds},
            **{"eflops": limits.eflops, "seed": self.seed, "guidance": self.guidance, "height": self.height},
            **{"width": self.width, "negative": self.negative, "device": self.device},
            "verifier-timeout": self.verifier_timeout,
        }
        return self._written(texts)

    def load(self, quiet: bool = False, learn: bool = True) -> Any:
        """The bandit; it loads its models when it chooses them.

        Args:
            quiet: Show no progress.
            learn: Whether it is to learn from what it does.
        """
        with only_results_on_stdout(), waiting(quiet, "Making the pool"):
            import imgscale

            made = imgscale.auto(mode=self.mode, pool=self.pool, policy=self.policy, device=self.device, learn=learn)
        for notice in made.notices:
            complain(notice)
        return made

    def answer(self, bandit: Any, callback: Callable[[Progress], None]) -> SearchOutput:
        """Chooses and searches by what a bandit knows now, and teaches it nothing. What is drawn is drawn by the seed.

        Args:
            bandit: From `load`.
            callback: Called after every engine step.
        """
        bandit.switch(bandit.file.policy.mode if self.mode is None else self.mode)
        output: SearchOutput = bandit.search(
            self.ask(), budget=self.budget, draws=self.seed, progress=False, callback=callback, **self.sizes
        )
        return output

    def _search(self, scaler: Any, callback: Callable[[Progress], None]) -> SearchOutput:
        def explain(decision: Decision) -> None:
            complain(str(decision))
            if isinstance(callback, Live):
                callback.aim(decision.choice.action.nfe)

        output: SearchOutput = scaler(
            self.prompt,
            self.negative,
            budget=self.budget,
            seed=self.seed,
            report=self.report,
            plain=self.plain,
            progress=False,
            callback=callback,
            explain=explain,
            verifier_timeout=self.verifier_timeout,
            keep_noise=self.save_noise,
            **self.sizes,
            **self.arguments,
        )
        return output

    @property
    def sizes(self) -> dict[str, Any]:
        """What is asked for in the place of the pool's, as the pipelines call it."""
        given = {"guidance_scale": self.guidance, "height": self.height, "width": self.width}
        return {name: value for name, value in given.items() if value is not None}


def _default(field: Any) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def decided(option: str) -> UserError:
    """Why an option can't be given beside --model auto."""
    return UserError(f"With --model auto the bandit decides {option}, or the pool file says it; leave it out.")


def undecided(names: Collection[str]) -> None:
    """Refuses settings that aren't the user's to make here, be they the defaults.

    Raises:
        UserError: One of them is.
    """
    for name, option in DECIDED.items():
        if name in names:
            raise decided(option)


def asked(
    job: Job,
    mode: str | None,
    policy: Path | None,
    pool: Path | None,
    report: Sequence[str],
    given: Collection[str] = (),
) -> Job:
    """The job as it is, or for ``--model auto`` that of the bandit.

    Args:
        job: What was asked for.
        mode: --mode.
        policy: --policy.
        pool: --pool.
        report: --report.
        given: Which options were written, by the names of their parameters; a default may be written, too.

    Raises:
        UserError: Options of the bandit without it, or a mode that is none.
    """
    if job.model != "auto":
        for option, value in (("--mode", mode), ("--policy", policy), ("--pool", pool)):
            if value is not None:
                raise UserError(f"{option} is for --model auto; add that, or leave it out.")
        return job
    undecided({"options" if name == "settings" else name for name in given})
    values = {field.name: getattr(job, field.name) for field in fields(Job)}
    judges = tuple(report) if report else default_judges(pool, job.prompt)
    named = tuple(name for name in judges if name != "none")
    return replace(AutoJob(**values), mode=weight(mode), policy=policy, pool=pool, report=named)


def batched(mode: str | None, policy: Path | None, pool: Path | None) -> AutoJob:
    """What the items of a run have in common, before their settings are read.

    Args:
        mode: --mode.
        policy: --policy.
        pool: --pool.

    Raises:
        UserError: The pool file can't be.
    """
    from imgscale.bandit import poolfile

    written = hashlib.sha256(poolfile.read(pool).model_dump_json().encode()).hexdigest()[:16]
    everything = Budget(nfe=NO_LIMIT)
    return AutoJob("", model="auto", budget=everything, mode=weight(mode), policy=policy, pool=pool, written=written)


def default_judges(pool: Path | PoolFile | None, prompt: str) -> tuple[str, ...]:
    """Held-out judges where nobody names any: the oracle, if all models of a pool are bundled and it reads the prompt.

    Raises:
        UserError: The pool file can't be.
    """
    from imgscale.bandit import poolfile

    made = poolfile.read(pool) if isinstance(pool, Path | None) else pool
    judges = [default_report(entry.model, prompt) for entry in made.models if not entry.optional]
    return ("shapes",) if judges and all(judges) else ()


def weight(mode: str | None) -> str | float | None:
    """A mode by its name, or the weight of quality that a text gives."""
    if mode is None:
        return None
    try:
        return float(mode)
    except ValueError:
        return mode
