"""`model="auto"`: for each prompt a model and how much search on it, chosen by a bandit that learns from the scores.

    auto = imgscale.load("auto", mode="balanced")
    out = auto("two red circles above a blue square", seed=0)
    print(auto.last)   # shapes-turbo, best-of-n, 32 NFE: expected quality 0.71 ± 0.06, 24.3 GFLOPs

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

from imgscale import models
from imgscale.bandit import costs, persistence, poolfile
from imgscale.bandit.actions import Action, Mask, Pool
from imgscale.bandit.features import Schema
from imgscale.bandit.judging import WHOLE, Judging
from imgscale.bandit.linear import LinUCB, Thompson
from imgscale.bandit.memory import Memory, category
from imgscale.bandit.policy import Choice, Context, quality_weight
from imgscale.bandit.poolfile import Entry, PoolFile
from imgscale.bandit.store import Store, default_path
from imgscale.budget import Budget, Price
from imgscale.errors import UserError
from imgscale.residents import Residents
from imgscale.verification import VerifierLike

if TYPE_CHECKING:
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress

CHOSEN = ("searcher", "guide", "options", "verifier", "num_inference_steps", "preview", "journal")


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
    name = "default" if pool is None else Path(pool).name if isinstance(pool, str | Path) else "given"
    if pool is None or isinstance(pool, str | Path):
        path = default_path(pool)
        pool = poolfile.read(pool)
    else:
        path = default_path(name)
        pool = pool.checked(name) if isinstance(pool, PoolFile) else poolfile.of(dict(pool))
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
        self._residents = Residents(file.resident, device)
        weight = quality_weight(file.policy.mode if mode is None else mode)
        here = [entry for entry in file.models if not (entry.optional and _missing(entry))]
        if not here:
            raise UserError("None of the pool's models is on this machine; list one that is under [[models]].")
        self._judging = Judging(file, here, device)
        self._entries: dict[str, Entry] = {}
        self._prices: dict[str, Price] = {}
        actions: list[Action] = []
        for entry in here:
            try:
                found, price = costs.actions(file, entry, self._judging.verifier, device=device)
            except UserError as error:
                self._lose(entry.name, error)
                continue
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
        fresh = self._policy(weight, draws)
        self.store = Store(policy, fresh, self._judging.verifier.identity(), memory, log=file.policy.log)

    # ------------------------------------------------------------------------------------------------------ making

    def _schema(self, policy: Path, actions: Sequence[Action]) -> Schema:
        """That of the file, so that what it learned goes on; a new one where there is no file yet."""
        if policy.exists():
            return persistence.schema(policy)
        return Schema.of(actions, self._prompts.names, searchers=("best-of-n", "rbf", "svdd", "bfs"))

    def _policy(self, weight: float, draws: int | None) -> LinUCB:
        said = self.file.policy
        kind = {"linucb": LinUCB, "thompson": Thompson}[said.kind]
        alpha = {} if said.alpha is None else {"alpha": said.alpha}
        made = kind(self.pool, mode=weight, epsilon=said.epsilon, ridge=said.ridge, discount=said.discount, **alpha)
        made.rng = np.random.default_rng(draws)
        made.warm(said.trust)
        return made

    # ---------------------------------------------------------------------------------------------------- choosing

    def switch(self, mode: str | float) -> None:
        """Goes on in another mode; nothing has to be learned anew."""
        self.store.policy.switch(mode)

    def choose(self, prompt: str, budget: int | Budget | None = None) -> Decision:
        """The action for a prompt, without running it.

        Args:
            prompt: The text.
            budget: What the search may take at most: model evaluations, or a `Budget`. None is no limit.

        Raises:
            UserError: A prompt that is none, a budget that is too small for every action, or no model is left.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"The prompt can't be {prompt!r}; write what the image should show.")
        if not self.pool.alive.any():
            raise UserError(f"No model of the pool can be used. {' '.join(self.notices)}")
        policy = self.store.policy
        choice = policy.choose(self._context(prompt), self._mask(budget))
        return Decision(prompt, category(prompt), choice, policy.weight)

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
        return self._residents.names

    def _lose(self, name: str, error: BaseException) -> None:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.notices.append(f"The model {name!r} is left out, and the others go on: {reason}")

    # ------------------------------------------------------------------------------------------------------ running

    def __call__(
        self,
        prompt: str | Iterable[str],
        negative_prompt: str | None = None,
        *,
        budget: int | Budget | None = None,
        seed: int = 0,
        report: Sequence[VerifierLike] = (),
        plain: bool = True,
        progress: bool = True,
        callback: Callable[[Progress], None] | None = None,
        explain: Callable[[Decision], None] | None = None,
        keep: int | None = 1,
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
            explain: Called with each decision before its search; its `str` is the line that explains it.
            keep: How many finished images the output holds; all of them for None.
            verifier_timeout: Seconds that one call of a verifier may take.
            **arguments: height, width and guidance_scale, in the place of the pool's; further ones of the pipelines.

        Returns:
            A `SearchOutput`, or a list of them for several prompts.

        Raises:
            UserError: No model is left, the budget is too small, or an argument can't be.
        """
        for name in CHOSEN:
            if name in arguments:
                raise UserError(f'model="auto" decides {name} itself; leave it out, or say it in the pool file.')
        common: dict[str, Any] = {
            "negative_prompt": negative_prompt,
            "report": report,
            "plain": plain,
            "progress": progress,
        }
        common |= {"callback": callback, "keep": keep, "verifier_timeout": verifier_timeout, "seed": seed}
        common |= arguments
        if isinstance(prompt, str) or not isinstance(prompt, Iterable):
            return self._one(prompt, budget, explain, common)
        return [self._one(text, budget, explain, common) for text in prompt]

    def _one(
        self,
        prompt: str,
        budget: int | Budget | None,
        explain: Callable[[Decision], None] | None,
        arguments: dict[str, Any],
    ) -> SearchOutput:
        told = len(self.notices)
        while True:
            decision = self.choose(prompt, budget)
            model = decision.choice.action.model.name
            try:
                scaler = self._residents.get(self._entries[model])
                break
            except (UserError, RuntimeError, MemoryError, OSError) as error:
                self.pool.remove_model(model)
                self._lose(model, error)
        self.last = decision
        if explain:
            explain(decision)
        output = self._search(scaler, prompt, decision.choice.action, budget, arguments)
        output.events += self.notices[told:]
        self.last = self._learn(decision, output, arguments["seed"])
        return output

    def _search(
        self, scaler: Scaler, prompt: str, action: Action, budget: int | Budget | None, arguments: dict[str, Any]
    ) -> SearchOutput:
        entry = self._entries[action.model.name]
        own = {"height": entry.height, "width": entry.width, "guidance_scale": entry.guidance}
        given = {**own, **{name: value for name, value in arguments.items() if value is not None or name not in own}}
        resized = any(given[name] != own[name] for name in own)
        scaler.price = None if resized else self._prices[entry.name]
        limits = replace(budget, nfe=action.nfe) if isinstance(budget, Budget) else Budget(nfe=action.nfe)
        output: SearchOutput = scaler(
            prompt,
            searcher=action.searcher,
            verifier=self._judging.verifier,
            budget=limits,
            num_inference_steps=entry.steps,
            preview=entry.preview,
            **given,
        )
        output.settings["verifier"] = self._judging.spec  # by which `rerun` finds it
        return output

    # ----------------------------------------------------------------------------------------------------- learning

    def _learn(self, decision: Decision, output: SearchOutput, seed: int) -> Decision:
        """Works out what the image is worth, and teaches it to the policy."""
        action = decision.choice.action
        place = self.pool.index(action)
        score = output.scores[output.verifier]
        correct = self._judging.correct(decision.prompt, output)
        quality = self._judging.quality(self.store.memory.scale(score), correct)
        eflops = float(output.ledger.eflops or action.eflops)
        reference = max(a.eflops for a in self.pool.actions)
        reward = decision.weight * quality + (1 - decision.weight) * (1 - min(eflops / reference, 1.0))
        done = replace(decision, score=score, quality=quality, correct=correct, eflops=eflops, reward=reward)
        if not (self._learns and output.finished and output.stopped in WHOLE):
            return done
        row = {
            "time": round(time.time(), 3),
            **{"prompt": decision.prompt, "category": decision.category, "seed": seed, "pool": self.store.memory.pool},
            **{"action": action.name, "model": action.model.name, "searcher": action.searcher, "nfe": output.nfe},
            **{"propensity": decision.choice.propensity, "expected": decision.choice.expected},
            **{"uncertainty": decision.choice.uncertainty, "weight": decision.weight, "score": score},
            **{"correct": correct, "eflops": eflops, "reward": reward},
        }
        try:
            learned = self.store.teach(self._context(decision.prompt), row, place, quality)
        except UserError as error:
            output.events.append(f"Nothing was learned from this image: {error}")
            return done
        if not learned:
            output.events.append(f"Nothing was learned from this image, since its score is {score}.")
        return replace(done, learned=learned)


def _size(action: Action) -> tuple[float, int]:
    return action.eflops, action.nfe


def _missing(entry: Entry) -> bool:
    try:
        return models.locate(entry.model) is None
    except UserError:
        return True
