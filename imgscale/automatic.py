"""`model="auto"`: for each prompt a model and how much search on it, chosen by a bandit that learns from the scores.

    auto = imgscale.load("auto", mode="balanced")
    out = auto("two red circles and a blue square", seed=0)
    print(out.decision)  # shapes-flow, rbf, 160 NFE: expected quality 0.76 ± 0.14, 212 GFLOPs

The bandit itself, `imgscale.bandit`, knows nothing of models; here it is joined with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from imgscale import asks, models
from imgscale.asks import Ask
from imgscale.bandit import costs, lessons, persistence, poolfile, priors
from imgscale.bandit.actions import Action, Mask, Pool
from imgscale.bandit.features import Schema
from imgscale.bandit.judging import WHOLE, Judging
from imgscale.bandit.lessons import Lessons
from imgscale.bandit.linear import LinUCB, Thompson
from imgscale.bandit.memory import Memory, Scale, category
from imgscale.bandit.policy import Choice, Context, quality_weight
from imgscale.bandit.poolfile import Entry, PoolFile
from imgscale.bandit.store import Store, default_path, path_of_given
from imgscale.budget import Budget, Price
from imgscale.errors import UserError
from imgscale.outlines import cached
from imgscale.residents import Residents
from imgscale.rewards import is_out_of_memory
from imgscale.verification import VerifierLike

if TYPE_CHECKING:
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress

CHOSEN = ("searcher", "guide", "options", "verifier", "num_inference_steps", "preview", "early_exit", "journal")
SEARCHERS = ("best-of-n", "rbf", "svdd", "bfs")  # that every new policy knows, so that a pool may take them up later


@dataclass(frozen=True)
class Decision:
    """What was chosen for a prompt, and what came of it.

    Args:
        prompt: The text.
        category: Its kind; see `imgscale.bandit.memory.category`.
        choice: The action, how likely it was to be chosen, and what was expected of it.
        weight: Of quality at the time.
        score: The verifier's; NaN before the search.
        quality: What was learned: the score on [0, 1] and the check's verdict, as far as there is one.
        correct: The check's verdict, or None.
        eflops: What was spent.
        reward: weight * quality + (1 - weight) * (1 - cost).
        learned: Whether it was learned from.
    """

    prompt: str
    category: str
    choice: Choice
    weight: float
    score: float = math.nan
    quality: float = math.nan
    correct: bool | None = None
    eflops: float = math.nan
    reward: float = math.nan
    learned: bool = False

    def __str__(self) -> str:
        return str(self.choice)

    def as_dict(self) -> dict[str, Any]:
        """What was chosen and expected, in values that JSON can hold; see `Auto.recalled`."""
        choice = self.choice
        return {
            "action": choice.action.name,
            "expected": choice.expected if math.isfinite(choice.expected) else None,
            "uncertainty": choice.uncertainty,
            "propensity": choice.propensity,
            "quality_weight": self.weight,
        }


def auto(
    *,
    mode: str | float | None = None,
    pool: str | Path | Mapping[str, Any] | PoolFile | None = None,
    policy: str | Path | None = None,
    device: str | None = None,
    learn: bool = True,
    draws: int | None = None,
) -> Auto:
    """A bandit over models and searches, to be called like a `Scaler`.

    Args:
        mode: "cost", "balanced", "quality", or the weight of quality, in [0, 1]; the pool's for None.
        pool: A pool file (docs/auto.md), its values, or a `PoolFile`; the bundled models for None.
        policy: The file that keeps what is learned; one in the user's data folder for None.
        device: Where models run that don't say otherwise; the accelerator if there is one.
        learn: Whether to learn from what it does.
        draws: A seed for its own draws (of exploration); they differ from run to run for None.

    Raises:
        UserError: The pool or the policy can't be used; the message says why and what to do.
    """
    if pool is None or isinstance(pool, str | Path):
        name, path = "default" if pool is None else Path(pool).name, default_path(pool)
        pool = poolfile.read(pool)
    else:
        name = "given"
        pool = pool.checked(name) if isinstance(pool, PoolFile) else poolfile.of(dict(pool), name)
        path = path_of_given(pool.model_dump_json())
    where = path if policy is None else Path(policy).expanduser()
    return Auto(pool, where, mode=mode, device=device, learn=learn, draws=draws, name=name)


class Auto:
    """Chooses a model and a search for each prompt, runs it, and learns from its score. Made by `auto`.

    Models are loaded when they are first chosen; the least recently used leaves when more than ``resident`` would be
    loaded. One that can't be loaded is masked, with a sentence in `notices`, and the others go on.

    Attributes:
        last: The latest decision, or None.
        notices: What went wrong on the way without ending it.
        pool: The actions.
        residents: The models that are loaded.
        store: The policy and its file.
    """

    def __init__(
        self,
        file: PoolFile,
        policy: Path,
        *,
        mode: str | float | None = None,
        device: str | None = None,
        learn: bool = True,
        draws: int | None = None,
        name: str = "given",
    ) -> None:
        self.file, self._learns = file, learn
        self.last: Decision | None = None
        self.notices: list[str] = []
        self.residents = Residents(file.resident, device)
        self._weight = quality_weight(file.policy.mode if mode is None else mode)
        self._draws = draws
        here = [entry for entry in file.models if not (entry.optional and missing(entry))]
        if not here:
            raise UserError("None of the pool's models is on this machine; list one that is under [[models]].")
        self._judging = Judging(file, here, device)
        self._entries: dict[str, Entry] = {}
        self._prices: dict[str, Price] = {}
        actions: list[Action] = []
        for entry in here:
            try:
                found, price, left_out = costs.actions(file, entry, self._judging.verifier, device=device)
            except UserError as error:
                self._lose(entry.name, error)
                continue
            self.notices += left_out
            self._entries[entry.name], self._prices[entry.name] = entry, price
            actions += found
        if not actions:
            raise UserError(f"No model of the pool can be used. {' '.join(self.notices)}")
        if len(actions) > costs.MOST:
            raise UserError(
                f"The pool has {len(actions)} actions and may have {costs.MOST}; give fewer searchers or budgets."
            )
        self._prompts, self._embed = self._judging.reader()
        self.pool = Pool(actions, self._schema(policy, actions))
        memory = Memory(actions=actions, reference=max(action.eflops for action in actions), pool=name)
        judge = self._judging.verifier.identity()
        self._lessons = self._taught_before(judge)
        if self._lessons:
            memory.scale = Scale(list(self._lessons.scores))
        self.store = Store(policy, self._policy, judge, memory, log=file.policy.log, writes=learn)

    # ------------------------------------------------------------------------------------------------------ making

    def _schema(self, policy: Path, actions: Sequence[Action]) -> Schema:
        """That of the file, so that what it learned goes on; a new one where there is no file yet.

        Raises:
            UserError: The file's policy can't go on with this verifier, these features or these searchers.
        """
        if not policy.exists():
            return Schema.of(actions, self._prompts.names, searchers=SEARCHERS)
        kept = persistence.stored(policy)
        persistence.check_verifier(policy, kept.verifier, self._judging.verifier.identity())
        schema, anew = kept.schema, f"begin anew with imgscale policy reset {str(policy)!r}"
        if schema.prompt != self._prompts.names:
            raise UserError(
                f"The policy in {policy} was learned with other features of prompts: set `projected` of the pool file"
                f" back to {sum(name.startswith('embedding') for name in schema.prompt)}, or {anew}."
            )
        for action in actions:
            if action.family not in schema.searchers:
                raise UserError(
                    f"The policy in {policy} doesn't know the searcher {action.family!r}, and can't learn of it; leave"
                    f" it out, or {anew}."
                )
        return schema

    def _policy(self) -> LinUCB:
        """One that has learned nothing."""
        said = self.file.policy
        kind = {"linucb": LinUCB, "thompson": Thompson}[said.kind]
        given = {name: getattr(said, name) for name in ("alpha", "epsilon", "ridge", "products", "discount")}
        made = kind(self.pool, mode=self._weight, prior=priors.expected if said.prior else None, **given)
        made.rng = np.random.default_rng(self._draws)
        if self._lessons:
            self._lessons.teach(made, said.worth)
        return made

    def _taught_before(self, judge: Mapping[str, Any]) -> Lessons | None:
        """The pool's lessons, if they are any for this verifier and these features.

        Raises:
            UserError: They can't be read.
        """
        if self.file.lessons_path is None:
            return None
        found = lessons.read(self.file.lessons_path)
        if found.fits(self.pool.schema.prompt, judge):
            return found
        self.notices.append(
            f"The lessons {self.file.lessons!r} are of another verifier or other features of prompts, and are left out."
        )
        return None

    # ---------------------------------------------------------------------------------------------------- choosing

    def switch(self, mode: str | float) -> None:
        """Goes on in another mode; nothing has to be learned anew."""
        self.store.policy.switch(mode)

    def choose(self, prompt: str, budget: int | Budget | None = None, *, draws: int | None = None) -> Decision:
        """The action for a prompt, without running it.

        Args:
            prompt: The text.
            budget: What the search may take at most: model evaluations, or a `Budget`. None is no limit.
            draws: A seed for this decision's draw; for None, it goes on from the one before.

        Raises:
            UserError: A prompt that is none, a budget that is too small for every action, or no model is left.
        """
        Ask(prompt).check()
        if not self.pool.alive.any():
            raise UserError(f"No model of the pool can be used. {' '.join(self.notices)}")
        policy = self.store.policy
        if draws is not None:
            policy.rng = np.random.default_rng(draws)
        choice = policy.choose(self._context(prompt), self._mask(budget))
        return Decision(prompt, category(prompt), choice, policy.weight)

    def recalled(self, prompt: str, values: Mapping[str, Any]) -> Decision | None:
        """A decision from its `Decision.as_dict`; None if its action isn't to be had any more."""
        for action, there in zip(self.pool.actions, self.pool.alive, strict=True):
            if there and action.name == values["action"]:
                expected = math.nan if values["expected"] is None else values["expected"]
                choice = Choice(action, values["propensity"], expected, values["uncertainty"])
                return Decision(prompt, category(prompt), choice, values["quality_weight"])
        return None

    def _context(self, prompt: str) -> Context:
        return Context(self._prompts(prompt, self._embed(prompt) if self._embed else None), prompt)

    def _mask(self, budget: int | Budget | None) -> Mask | None:
        if budget is None:
            return None
        limits = Budget.of(budget)
        nfe, eflops = limits.nfe or math.inf, limits.eflops or math.inf
        fits = np.array([action.nfe <= nfe and action.eflops <= eflops for action in self.pool.actions])
        if not (fits & self.pool.alive).any():
            least = min((a for a, there in zip(self.pool.actions, self.pool.alive, strict=True) if there), key=_size)
            raise UserError(
                f"The budget is too small for every action of the pool; the smallest takes {least.nfe} NFE and"
                f" {least.eflops:.3g} eFLOPs: {least.name}."
            )
        return fits

    @property
    def resident(self) -> list[str]:
        """The models that are loaded, the least recently used first."""
        return self.residents.names

    def _lose(self, name: str, error: BaseException) -> None:
        if name in self._entries:
            self.pool.remove_model(name)
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.notices.append(f"The model {name!r} is left out, and the others go on: {reason}")

    # ------------------------------------------------------------------------------------------------------ running

    def __call__(
        self,
        prompt: str | Iterable[str],
        negative_prompt: str | None = None,
        *,
        budget: int | Budget | None = None,
        seed: int | Sequence[int] = 0,
        report: Sequence[VerifierLike] = (),
        plain: bool = True,
        progress: bool = True,
        callback: Callable[[Progress], None] | None = None,
        explain: Callable[[Decision], None] | None = None,
        keep: int | None = 1,
        keep_noise: bool = False,
        verifier_timeout: float | None = None,
        **arguments: Any,
    ) -> Any:
        """Chooses, searches, learns.

        Args:
            prompt: What to draw. Several prompts are drawn one after another, and each is learned from.
            negative_prompt: What guidance steers away from.
            budget: The most that a search may take: model evaluations, or a `Budget`. Dearer actions aren't chosen.
            seed: Of the search, as for `Scaler`.
            report: Held-out judges.
            plain: Also make the pipeline's own image for comparison, outside of the budget.
            progress: Show a tqdm bar.
            callback: Called after every engine step, also to cancel.
            explain: Called with each decision before its search; its `str` is the line that explains it. Twice for a
                prompt if the first choice can't be run.
            keep: How many finished images the output holds; all of them for None.
            keep_noise: Also keep what makes them again in one trajectory, as for `Scaler`.
            verifier_timeout: Seconds that one call of a verifier may take.
            **arguments: height, width and guidance_scale, in the place of the pool's; further ones of the pipelines.

        Returns:
            A `SearchOutput`, whose ``decision`` says what was chosen and what came of it; or a list of them for several
            prompts.

        Raises:
            UserError: No model is left, the budget is too small, or an argument can't be.
        """
        several = isinstance(prompt, Iterable) and not isinstance(prompt, str)
        prompts: list[Any] = list(prompt) if several else [prompt]
        if not prompts:
            raise UserError("The list of prompts can't be empty; give at least one.")
        given: dict[str, Any] = {"negative_prompt": negative_prompt, "report": report, "plain": plain, "keep": keep}
        given |= {"keep_noise": keep_noise, "verifier_timeout": verifier_timeout}
        wanted = [
            Ask(text, seed=each, budget=1, **given)
            for text, each in zip(prompts, asks.seeds(seed, several, len(prompts)), strict=True)
        ]
        for ask in wanted:
            ask.check()
        arguments |= {"progress": progress, "callback": callback}
        outputs = []
        for ask in wanted:
            output = self.search(ask, budget=budget, explain=explain, **arguments)
            self.learn(output)
            outputs.append(output)
        return outputs if several else outputs[0]

    def search(
        self,
        ask: Ask,
        *,
        budget: int | Budget | None = None,
        decided: Decision | None = None,
        draws: int | None = None,
        explain: Callable[[Decision], None] | None = None,
        **arguments: Any,
    ) -> SearchOutput:
        """Chooses and searches, without learning yet.

        Args:
            ask: The search, without what is chosen: its budget, searcher and verifier don't matter.
            budget: The most that it may take.
            decided: What was decided before; it is run if its model can be had.
            draws: As of `choose`.
            explain: Called with the decision before its search.
            **arguments: As of `__call__`.

        Raises:
            UserError: See `__call__`.
        """
        for name in CHOSEN:
            if name in arguments:
                raise UserError(f'model="auto" decides {name} itself; leave it out, or say it in the pool file.')
        told = len(self.notices)
        while True:
            decision = decided or self.choose(ask.prompt, budget, draws=draws)
            model, decided = decision.choice.action.model.name, None
            try:
                scaler = self.residents.get(self._entries[model])
                self.last = decision
                if explain:
                    explain(decision)
                output = self._run(scaler, ask, decision, budget, arguments)
                break
            except UserError as error:
                if model in self.residents.names:  # it was loaded: something asked for can't be done
                    raise
                self._lose(model, error)
            except (RuntimeError, MemoryError, OSError) as error:
                if model in self.residents.names and not is_out_of_memory(error):
                    raise
                self.residents.drop(model)
                self._lose(model, error)
        output.events += self.notices[told:]
        return output

    def _run(
        self, scaler: Scaler, ask: Ask, decision: Decision, budget: int | Budget | None, arguments: Mapping[str, Any]
    ) -> SearchOutput:
        action = decision.choice.action
        entry = self._entries[action.model.name]
        own = {"height": entry.height, "width": entry.width, "guidance_scale": entry.guidance}
        given = {**own, **{name: value for name, value in arguments.items() if value is not None or name not in own}}
        resized = any(given[name] != own[name] for name in own)
        scaler.price = None if resized else self._prices[entry.name]
        limits = replace(budget, nfe=action.nfe) if isinstance(budget, Budget) else Budget(nfe=action.nfe)
        output: SearchOutput = scaler(
            ask.prompt,
            ask.negative_prompt,
            searcher=action.searcher,
            verifier=self._judging.verifier,
            budget=limits,
            num_inference_steps=entry.steps,
            preview=entry.preview,
            early_exit=self.file.early_exit,
            seed=ask.seed,
            report=ask.report,
            plain=ask.plain,
            keep=ask.keep,
            keep_noise=ask.keep_noise,
            verifier_timeout=ask.verifier_timeout,
            **given,
        )
        output.settings["verifier"] = self._judging.spec  # by which `rerun` finds it
        output.settings["auto"] = decision.as_dict()
        output.decision = decision
        return output

    # ----------------------------------------------------------------------------------------------------- learning

    def learn(self, output: SearchOutput) -> Decision:
        """Works out what the image of a `search` is worth, and teaches it to the policy.

        A search that was stopped early, or whose image nobody could judge, says nothing about its action: nothing is
        learned from it, which becomes an event of the output.

        Returns:
            The decision with what came of it, which is the output's own from now on.
        """
        decision = output.decision
        assert decision is not None, "an output of search"
        action = decision.choice.action
        score = output.scores[output.verifier]
        correct = self._judging.correct(decision.prompt, output)
        quality = self._judging.quality(self.store.memory.scale(score), correct)
        eflops = float(output.ledger.eflops or action.eflops)
        cost = min(eflops / (self.store.memory.reference or eflops), 1.0)
        reward = decision.weight * quality + (1 - decision.weight) * (1 - cost)
        done = replace(decision, score=score, quality=quality, correct=correct, eflops=eflops, reward=reward)
        if self._learns:
            done = replace(done, learned=self._taught(done, output))
        self.last = output.decision = done
        return done

    def _taught(self, done: Decision, output: SearchOutput) -> bool:
        if not output.finished or output.stopped not in WHOLE:
            why = {"verifier": "the verifier judged none of its images"}.get(output.stopped, "it was stopped early")
            output.events.append(f"Nothing was learned from this search, since {why}.")
            return False
        action = done.choice.action
        row = {
            "time": round(time.time(), 3),
            **{"prompt": done.prompt, "category": done.category, "seed": output.settings["seed"]},
            **{"pool": self.store.memory.pool, **done.as_dict(), "model": action.model.name},
            **{"searcher": action.searcher, "nfe": output.nfe, "score": done.score, "correct": done.correct},
            **{"eflops": done.eflops, "reward": done.reward},
        }
        try:
            learned = self.store.teach(self._context(done.prompt), row, self.pool.index(action), done.quality)
        except UserError as error:
            output.events.append(f"Nothing was learned from this search: {error}")
            return False
        if not learned:
            output.events.append(f"Nothing was learned from this search, since its score is {done.score}.")
        return learned


def _size(action: Action) -> tuple[float, int]:
    return action.eflops, action.nfe


def missing(entry: Entry) -> bool:
    """Whether a model of a pool isn't on this machine."""
    try:
        if models.locate(entry.model) is None:
            cached(entry.model)
    except UserError:
        return True
    return False
