"""What a demo offers and allows, and the searches that it makes of forms and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app import checks
from imgscale.app.job import Job, default_report
from imgscale.budget import Budget
from imgscale.errors import UnknownName, UserError

if TYPE_CHECKING:
    from imgscale.app.auto import AutoJob
    from imgscale.bandit.poolfile import PoolFile
    from imgscale.png import Record

MODE = "balanced"
LONGEST_PROMPT = 1000  # characters
AUTO = "auto"  # in the place of a model: the bandit chooses it, and the search
READY = ("clip", "aesthetic", "shapes", "sharpness", "jpeg")  # verifiers that need nothing which isn't bundled
EXAMPLES = (
    "two red circles above a blue square",
    "three green triangles",
    "a yellow star to the left of a purple circle",
    "four blue squares and a red star",
)


@dataclass(frozen=True)
class Offer:
    """What a demo offers and allows.

    Args:
        models: Names, the first chosen at the start.
        searchers: The same.
        verifiers: The same.
        max_budget: NFE of a search.
        max_queue: Searches in the line.
        device: Where models run; the accelerator if there is one.
        dtype: Of their weights; the device's usual one for None.
        policy: The file that keeps what "auto" learns; one in the user's data folder for None.
        pool: The pool file that "auto" chooses from; the bundled models for None.
    """

    models: tuple[str, ...]
    searchers: tuple[str, ...]
    verifiers: tuple[str, ...]
    max_budget: int = 1000
    max_queue: int = 16
    device: str | None = None
    dtype: str | None = None
    policy: Path | None = None
    pool: Path | None = None

    @property
    def usual_mode(self) -> str:
        """Of "auto" where nobody says otherwise: the pool's, if it is one with a name."""
        mode = self._pool.policy.mode
        return mode if isinstance(mode, str) else MODE

    @property
    def _pool(self) -> PoolFile:
        from imgscale.bandit import poolfile

        return poolfile.read(self.pool)

    @classmethod
    def of(cls, models: Sequence[str] = (), verifiers: Sequence[str] = (), **more: Any) -> Offer:
        """The usual offer, and further models and verifiers, which then come first.

        Raises:
            UserError: One of them doesn't exist, or the pool or the policy can't be used.
        """
        from imgscale import registry
        from imgscale.bandit import persistence, poolfile
        from imgscale.models import locate

        for name in models:
            if name != AUTO:
                locate(name)
        if more.get("pool") is not None:
            poolfile.read(more["pool"])
        if more.get("policy") is not None and more["policy"].exists():
            persistence.stored(more["policy"])
        for name in verifiers:
            registry.judges(name)
        searchers = [entry.name for entry in registry.searcher]
        return cls(
            models=tuple(dict.fromkeys([*models, *bundled_first("shapes-flow"), AUTO])),
            searchers=tuple(sorted(searchers, key=lambda name: (name != "rbf", name != "best-of-n", name))),
            verifiers=tuple(dict.fromkeys([*verifiers, *READY])),
            **more,
        )

    def job(
        self,
        prompt: str,
        model: str,
        searcher: str,
        verifiers: Sequence[str],
        report: Sequence[str],
        budget: float,
        seed: str,
        mode: str | None = None,
    ) -> Job:
        """The search that a form asks for.

        Args:
            prompt: What to draw.
            model: One of the offered.
            searcher: One of the offered.
            verifiers: One or more of the offered, which steer; several as an ensemble.
            report: Any of the offered, which only report; the oracle where it can, if none is given.
            budget: NFE.
            seed: A whole number as a text: the page's own numbers end at 2**53.
            mode: Of "auto", to which searcher and verifiers don't matter, and whose searches may take the budget at
                most; `usual_mode` for None.

        Raises:
            UserError: One of them isn't allowed.
        """
        self._check_prompt(prompt)
        if model == AUTO and AUTO in self.models:
            return self._auto(prompt, report, budget, seed, mode or self.usual_mode)
        known = {"model": (self.models, [model]), "searcher": (self.searchers, [searcher])}
        for kind, (names, given) in {**known, "verifier": (self.verifiers, [*verifiers, *report])}.items():
            for name in given:
                if name not in names:
                    raise UnknownName(kind, str(name)[:100], names)
        if not verifiers:
            raise UserError("No verifier is chosen; choose what steers the search, such as clip.")
        held_out = tuple(name for name in report if name not in verifiers)
        if not report:
            held_out = tuple(name for name in default_report(model, prompt) if name not in verifiers)
        job = Job(
            prompt=prompt.strip(),
            model=model,
            searcher=searcher,
            verifier="+".join(dict.fromkeys(verifiers)),
            report=held_out,
            budget=Budget(nfe=self._check_budget(budget)),
            seed=self._check_seed(seed),
            device=self.device,
            dtype=self.dtype,
        )
        job.check()
        return job

    def _auto(self, prompt: str, report: Sequence[str], budget: float, seed: str, mode: str) -> AutoJob:
        from imgscale.app.auto import AutoJob, default_judges
        from imgscale.bandit import MODES

        for kind, names, given in (("mode", tuple(MODES), [mode]), ("verifier", self.verifiers, report)):
            for name in given:
                if name not in names:
                    raise UnknownName(kind, str(name)[:100], names)
        steering = self._pool.verifier
        job = AutoJob(
            prompt=prompt.strip(),
            model=AUTO,
            report=tuple(name for name in report or default_judges(self.pool, prompt) if name != steering),
            budget=Budget(nfe=self._check_budget(budget)),
            seed=self._check_seed(seed),
            device=self.device,
            mode=mode,
            policy=self.policy,
            pool=self.pool,
        )
        job.check()
        return job

    def again(self, record: Record) -> Job:
        """The search that a picture describes; like `imgscale rerun`, a picture never says what to load.

        What the pool has is offered, too: a picture by "auto" was made with it.

        Raises:
            UserError: This demo doesn't do that.
        """
        from imgscale import registry
        from imgscale.app import rerun
        from imgscale.automatic import missing

        pool = self._pool
        of_pool = [entry for entry in pool.models if entry.model == record.model and not missing(entry)]
        if record.model == AUTO or not (record.model in self.models or of_pool):
            raise UserError(
                f"The picture was made with the model {record.model[:100]!r}, which this demo doesn't offer, and"
                f" settings in a picture may not say what to load; offered are {', '.join(self.models)}."
            )
        for name in registry.members(record.verifier):
            if name not in (*self.verifiers, pool.verifier):
                raise UserError(
                    f"The picture was judged by the verifier {name[:100]!r}, which this demo doesn't offer; offered are"
                    f" {', '.join(self.verifiers)}."
                )
        if record.pipeline_arguments:
            raise UserError(
                "The picture was made with arguments for the pipeline, which the demo doesn't pass on; use imgscale"
                " rerun on the command line."
            )
        if record.budget.nfe is None:
            raise UserError(
                "The picture's search had no limit in NFE, which the demo needs; use imgscale rerun on the command"
                " line."
            )
        self._check_prompt(record.prompt)
        self._check_budget(record.budget.nfe)
        preview = record.preview if record.preview in [entry.preview for entry in of_pool] else None
        job = rerun.job_of(record, record.model, record.verifier, preview, self.device)
        job.check()
        return job

    def largest(self, model: str) -> int:
        """Pixels of the images that the pool makes with a model; 0 where it leaves that to the model."""
        sizes = [(entry.height, entry.width) for entry in self._pool.models if entry.model == model]
        return max((height * width for height, width in sizes if height and width), default=0)

    def _check_prompt(self, prompt: str) -> None:
        if len(prompt) > LONGEST_PROMPT:
            raise UserError(f"The prompt has {len(prompt)} characters; shorten it to {LONGEST_PROMPT} or fewer.")
        checks.prompt(prompt)

    def _check_seed(self, seed: str) -> int:
        return checks.whole(str(seed).strip() or "0", "The seed", 0, checks.LARGEST) or 0

    def _check_budget(self, budget: float | None) -> int:
        number = budget if isinstance(budget, int | float) and not isinstance(budget, bool) else 0
        if not 1 <= number <= self.max_budget or number != int(number):  # which NaN fails, too
            raise UserError(f"The budget can't be {budget!r}; give a whole number from 1 to {self.max_budget}.")
        return int(number)


def bundled_first(first: str) -> list[str]:
    """The models that imgscale itself offers, with one of them first."""
    from imgscale.app import listing

    return sorted((entry["name"] for entry in listing.entries("models")), key=lambda name: (name != first, name))
