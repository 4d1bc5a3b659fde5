"""The front door: `load` a model, call it like a pipeline, get a searched image."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

import imgscale
from imgscale import asks, hacking, previews, registry, usefulness, verification
from imgscale.asks import Ask, Done, Searcher
from imgscale.budget import Budget, Meter, Price
from imgscale.calibration import Calibrations, fingerprint, margins
from imgscale.early_exit import EarlyExit, Rule, chosen, resumed
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.images import to_pil
from imgscale.journal import HEAD, Journal
from imgscale.models import ModelSettings, folder_of, load_pipeline
from imgscale.noise import Noise, Remade, remake
from imgscale.pricing import Prices
from imgscale.problem import Guide, Problem, Verb
from imgscale.result import Candidate, Plain, SearchOutput
from imgscale.rewards import Verifier, is_ensemble, panel, timed
from imgscale.search import Search
from imgscale.usefulness import Usefulness
from imgscale.verification import VerifierLike
from imgscale.watch import Progress, Watch

if TYPE_CHECKING:
    import torch

    from imgscale.automatic import Auto
    from imgscale.cost import Cost


@overload
def load(
    model: Literal["auto"],
    *,
    device: str | torch.device | None = None,
    mode: str | float | None = None,
    pool: Any = None,
    policy: str | Path | None = None,
    learn: bool = True,
    draws: int | None = None,
) -> Auto: ...


@overload
def load(
    model: Any = "shapes-flow",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int = 32,
    exact: bool = False,
    steps: int | None = None,
    guidance_scale: float | None = None,
    distilled: bool | None = None,
    path: Literal["own", "linear", "vp"] | None = None,
    clip: str | None = None,
    tiny: str | None = None,
    preview: Literal["full", "tiny", "linear"] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Scaler: ...


def load(
    model: Any = "shapes-flow",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int = 32,
    exact: bool = False,
    steps: int | None = None,
    guidance_scale: float | None = None,
    distilled: bool | None = None,
    path: str | None = None,
    clip: str | None = None,
    tiny: str | None = None,
    preview: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    **choice: Any,
) -> Any:
    """A model, ready to search with.

    Args:
        model: "auto", for a bandit that chooses model and search for each prompt (`imgscale.auto`, whose arguments
            follow: mode, pool, policy, …); or a bundled name (`imgscale list models`), a diffusers folder, a hub id, or
            a loaded diffusers pipeline, which is left exactly as it is: LoRAs, offloading, tiling and quantisation stay
            the user's.
        device: Where to load to; the accelerator if there is one.
        dtype: Of the weights; float32 on a CPU and bfloat16 elsewhere.
        max_batch: Images per call of the network; halved by itself when memory runs out.
        exact: Fill every call up to ``max_batch``, so that an image is the same to the bit whatever else is searched
            for at the time. Small requests cost as much as large ones then: for many searches at once.
        steps: Transitions of an ordinary sample. This and what follows is what the model is known by from then on; what
            its folder's ``imgscale.json`` says for None, or else the pipeline's own default.
        guidance_scale: Of every call that doesn't say another.
        distilled: Whether it is a few-step model, whose x0 is sharp from the start.
        path: Where stepwise searches walk by default: "own", "linear" or "vp".
        clip: What ``verifier="clip"`` means for it: an open_clip folder or "model/pretrained", or a bundled CLIP.
        tiny: What ``preview="tiny"`` means for it: a bundled tiny autoencoder, or the folder or hub id of one.
        preview: What decodes previews by default: "full", "tiny" or "linear".
        defaults: Further arguments of every call of the pipeline, such as {"max_sequence_length": 256}.
        **choice: Of "auto" alone.

    Raises:
        UserError: It can't be loaded; the message says why and what to do.
    """
    said: dict[str, Any] = {"steps": steps, "guidance_scale": guidance_scale, "distilled": distilled, "path": path}
    said |= {"clip": clip, "tiny": tiny, "preview": preview, "defaults": defaults}
    if isinstance(model, str) and model == "auto":
        if dtype is not None or max_batch != 32 or exact:
            raise UserError('dtype, max_batch and exact can\'t be said of model="auto"; say them in the pool file.')
        if one := next((name for name, value in said.items() if value is not None), None):
            raise UserError(f'{one} can\'t be said of model="auto"; say it of a model, in its folder or the pool file.')
        return imgscale.auto(device=None if device is None else str(device), **choice)
    if choice:
        raise UserError(f'{", ".join(choice)} can only be said of model="auto"; this is {str(model)!r}.')
    from imgscale.denoiser import Denoiser

    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise UserError(f"max_batch can't be {max_batch!r}; give a whole number of at least 1.")
    ModelSettings().but(**said)  # before anything is loaded
    pipe, name, settings = load_pipeline(model, device=device, dtype=dtype)
    settings = settings.but(**said)
    measured = usefulness.known(folder_of(model), name)
    engine = Engine(Denoiser(pipe, settings.defaults), max_batch, exact)
    return Scaler(engine, name, settings, measured, folder_of(model))


class Scaler:
    """Searches for better images with one model. Made by `load`.

    Args:
        engine: Runs the searches.
        name: The model's name in records.
        settings: What the search should know of the model.
        usefulness: What was measured of it, by verifier.
        folder: The model's own, if it has one, with what early exit has learned of it.

    Attributes:
        price: What searches reckon with in eFLOPs in the place of what `cost` counts, for a re-run elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        settings: ModelSettings | None = None,
        usefulness: Mapping[str, Usefulness] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self.settings = settings or ModelSettings()
        self.usefulness = dict(usefulness or {})
        self.price: Price | None = None
        self.calibrations = Calibrations(folder, name)
        self._verifiers: dict[Any, Verifier] = {}
        self._patience: dict[tuple[int, float], tuple[Verifier, Verifier]] = {}
        self._previews: dict[str, Any] = {}
        self._prices = Prices(engine.denoiser, name, self.settings)

    def __call__(
        self,
        prompt: str | Iterable[str],
        negative_prompt: str | None = None,
        *,
        searcher: str | Searcher = "rbf",
        guide: str | Guide | None = None,
        verifier: VerifierLike = "clip",
        report: Sequence[VerifierLike] = (),
        budget: int | Budget = 200,
        seed: int | Sequence[int] = 0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        options: Mapping[str, Any] | None = None,
        plain: bool = True,
        progress: bool = True,
        callback: Callable[[Progress], None] | None = None,
        journal: str | Path | None = None,
        preview: Any = None,
        verifier_timeout: float | None = None,
        keep: int | None = 1,
        keep_noise: bool = False,
        early_exit: str | EarlyExit | Rule = "off",
        **pipeline_arguments: Any,
    ) -> Any:
        """Searches for the image of a prompt that the verifier likes best.

        Args:
            prompt: What to draw. Several prompts are searched side by side and share batches.
            negative_prompt: What guidance steers away from.
            searcher: A name, a name with options such as "rbf(explore=0.5)", or a searcher function. A name may bring
                its guide: "rbf+dps(scale=2)" or "bfs(local, width=4)".
            guide: Bends the searcher's transitions: a name, a name with options, or a `Guide`.
            verifier: Steers the search: a name, a name with options, a verifier, or any function of images
                (n, 3, h, w) in [0, 1] and n prompts to n scores.
            report: Verifiers that score the best images and never steer: the held-out judges.
            budget: Model evaluations, or a `Budget`. Never exceeded.
            seed: From 0 to 2**63 − 1. The plain image is the pipeline's own for this seed on a CPU generator. Several
                prompts share it, and so their starting noises, unless there is a seed for each.
            height: In pixels; the model's default for None.
            width: In pixels; the model's default for None.
            num_inference_steps: Transitions of an ordinary sample; the model's default for None.
            guidance_scale: The model's default for None.
            options: The searcher's options by name.
            journal: A folder to write the search's answers to as it goes on. The same call with the same folder goes on
                where it was stopped, whatever stopped it, and ends as if it hadn't been.
            preview: What decodes what isn't finished yet: "full" (the VAE), "tiny", "linear", a folder or hub id of an
                `AutoencoderTiny`, or a loaded one; the model's default for None. Finished images always come from the
                VAE, and the winner's score by its preview is kept beside that of the image.
            verifier_timeout: Seconds that one call of a verifier may take; more costs its images −inf.
            keep: How many finished images the output holds, the best first; all of them for None.
            keep_noise: Also keep the noise of these images (``out.noise``, ``out.noises``), from which `from_noise`
                makes them again in one trajectory. The search is the same.
            early_exit: Stops candidates whose previews show that they can't win: "off", "calibrated", "paper", one with
                options such as "calibrated(delta=0.1)", or an `EarlyExit`. Calibrated learns from search to search, and
                drops none at first; a `Rule` is one that a search had.
            plain: Also make the pipeline's own image for comparison, outside of the budget.
            progress: Show a tqdm bar.
            callback: Called after every engine step, also to cancel.
            **pipeline_arguments: Further arguments of the pipeline's call.

        Returns:
            A `SearchOutput`, or a list of them for several prompts.

        Raises:
            UserError: Something asked for doesn't exist or can't be done; the message says what would do.
        """
        prompts = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str) else [prompt]
        if not prompts:
            raise UserError("The list of prompts can't be empty; give at least one.")
        limits = Budget.of(budget)
        judge = verifier if isinstance(verifier, str) else self.verifier(verifier)
        reports = [spec if isinstance(spec, str) else self.verifier(spec) for spec in report]
        if journal is not None:
            early_exit = resumed(Path(journal).expanduser() / HEAD, early_exit)
        made = [
            self._prepare(
                Ask(
                    prompt=text,
                    negative_prompt=negative_prompt,
                    searcher=searcher,
                    guide=guide,
                    verifier=judge,
                    report=reports,
                    budget=limits,
                    seed=each,
                    height=height,
                    width=width,
                    num_inference_steps=num_inference_steps,
                    guidance_scale=guidance_scale,
                    options=options,
                    plain=plain,
                    preview=preview,
                    verifier_timeout=verifier_timeout,
                    keep=keep,
                    keep_noise=keep_noise,
                    early_exit=early_exit,
                    pipeline_arguments=pipeline_arguments,
                )
            )
            for text, each in zip(prompts, asks.seeds(seed, not isinstance(prompt, str), len(prompts)), strict=True)
        ]
        searches = [each.search for each in made]
        self.engine.prime(searches)
        seeds = [each.ask.seed for each in made]
        asked = {"imgscale": imgscale.__version__, "prompts": prompts, "seeds": seeds, **made[0].settings}
        log = None if journal is None else Journal(Path(journal).expanduser(), asked)
        total = None if limits.nfe is None else limits.nfe * len(searches)
        with Watch(self.engine, total, progress, callback) as watch:
            plains = [each.plain for each in made if each.plain is not None]
            for s in plains:
                s.meter.restart()
            self.engine.run(plains, lambda _: watch.tick(searches), watch.stop)
            for s in searches:  # the clock of a search starts now, not while others were made
                s.meter.restart()
            self.engine.run(searches, watch.tick, watch.stop, log)
        outputs = [self._output(each) for each in made]
        return outputs[0] if isinstance(prompt, str) else outputs

    def stream(
        self,
        asks: Iterable[Ask],
        *,
        together: int = 8,
        callback: Callable[[Progress], None] | None = None,
    ) -> Generator[Done, None, None]:
        """Searches one after the other and several at a time, so that requests of different prompts fill batches.

        The next search begins when one has ended, so that ``asks`` may be any length. The plain image of a search is
        made beside it.

        Args:
            asks: What to search for; read as there is room.
            together: How many searches run at a time.
            callback: Called after every engine step with the searches that run; may cancel all of them, and then no
                further one begins.

        Yields:
            Each search as it ends, in no certain order. One that can't begin leaves the others alone.

        Raises:
            UserError: ``together`` is no number of searches.
        """
        if isinstance(together, bool) or not isinstance(together, int) or together < 1:
            raise UserError(f"together can't be {together!r}; give how many searches run at a time, from 1 on.")
        waiting = enumerate(asks)
        here: dict[int, _Prepared] = {}
        refused: list[Done] = []

        def more(_: int) -> list[Search]:
            new: list[Search] = []
            while len(here) < together and not watch.stop():
                if (found := next(waiting, None)) is None:
                    break
                place, ask = found
                try:
                    made = self._prepare(ask)
                    searches = [made.search] if made.plain is None else [made.search, made.plain]
                    self.engine.prime(searches)
                except UserError as error:
                    refused.append(Done(ask, place, error=error))
                    break  # said before the next one is begun
                for search in searches:
                    search.meter.restart()
                here[place] = made
                new += searches
            return new

        with Watch(self.engine, None, False, callback) as watch:
            while True:
                for _ in self.engine.steps((), watch.stop, more=more):
                    if here:
                        watch.tick([made.search for made in here.values()], list(here))
                    for place, made in [item for item in here.items() if item[1].over]:
                        del here[place]
                        watch.leave(made.search)
                        yield Done(made.ask, place, self._output(made))
                    yield from refused
                    refused.clear()
                if not refused:
                    return
                yield from refused
                refused.clear()

    def _prepare(self, ask: Ask) -> _Prepared:
        """A search that is ready to begin.

        Raises:
            UserError: What is asked for doesn't exist or can't be done.
        """
        ask.check()
        limits = Budget.of(ask.budget)
        searcher, guide = ask.searcher, ask.guide
        if isinstance(searcher, str):
            given = str(guide) if guide is not None else None
            searcher, named = registry.compose(searcher, given)
            guide = guide if named == given else named
        name, make, options = asks.searcher(searcher, ask.options)
        guide_name, guided = asks.guide(guide)
        judge = patient = self.verifier(ask.verifier)
        reports = asks.distinct(judge, [self.verifier(spec) for spec in ask.report])
        if ask.verifier_timeout is not None:
            judge, *reports = (self._timed(v, float(ask.verifier_timeout)) for v in (judge, *reports))
        decoder = self.preview(self.settings.preview if ask.preview is None else ask.preview)
        steps = self._steps(ask.num_inference_steps)
        useful = self._useful(ask.verifier)
        guidance = self.settings.guidance_scale if ask.guidance_scale is None else ask.guidance_scale
        size = {"height": ask.height, "width": ask.width, "guidance_scale": ask.guidance_scale}
        arguments = {**size, "negative_prompt": ask.negative_prompt, **ask.pipeline_arguments}
        price = self.price or self._prices.price(limits, patient, decoder, arguments)
        cond = self.engine.denoiser.encode(
            ask.prompt,
            ask.negative_prompt,
            height=ask.height,
            width=ask.width,
            guidance_scale=guidance,
            **ask.pipeline_arguments,
        )
        told = {"guidance": guidance, "arguments": arguments, "height": cond.height, "width": cond.width}
        rule, key = self._rule(chosen(ask.early_exit), judge, decoder, steps, useful, told)
        if self.engine.exact:
            _encode_alone(ask.prompt, (judge, *reports))

        def search(budget: Budget, make: Callable[[Problem], Verb], keep: int | None = 1) -> Search:
            problem = Problem(
                self.engine.denoiser,
                cond,
                steps=steps,
                seed=ask.seed,
                meter=Meter(budget, price=price),
                distilled=self.settings.distilled,
                path=self.settings.path,
                ceiling=judge.range[1] if judge.range else None,
                differentiable=judge.differentiable,
                guide=guided,
                usefulness=useful,
                early_exit=rule,
                traces=ask.keep_noise and make is steer,
            )
            asks.check_budget(budget, problem)
            return Search(problem, make(problem), judge, reports, decoder, keep)

        def steer(problem: Problem) -> Verb:
            return make(problem, np.random.default_rng((problem.seed, 1)), **options)

        settings: dict[str, Any] = {
            "model": self.name,
            "negative_prompt": ask.negative_prompt,
            "searcher": name,
            "options": options,
            "guide": guide_name,
            "usefulness": None if useful is None else asdict(useful),  # measured anew, the search would be another
            "verifier": ask.verifier if isinstance(ask.verifier, str) else judge.name,
            "report": [v if isinstance(v, str) else self.verifier(v).name for v in ask.report],
            "verifiers": {v.name: v.identity() for v in (judge, *reports)},
            "verifier_timeout": ask.verifier_timeout,
            "preview": (ask.preview or self.settings.preview)
            if isinstance(ask.preview, str | None)
            else str(type(ask.preview)),
            "preview_decoder": previews.identity(decoder),
            "budget": {k: v for k, v in asdict(limits).items() if v is not None},
            "height": cond.height,
            "width": cond.width,
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            "pipeline_arguments": dict(ask.pipeline_arguments),
            "pipeline": self.engine.denoiser.description,
            "distilled": self.settings.distilled,
            "path": self.settings.path,
            "exact": self.engine.exact,
        }
        if rule is not None:
            settings["early_exit"] = rule.as_dict()  # learned anew, the search might be another
        if price is not None and limits.eflops is not None:
            settings["price"] = asdict(price)  # counted anew, the search might be another
        wanted = search(limits, steer, ask.keep)
        one = Budget(nfe=wanted.problem.sample_nfe)
        return _Prepared(ask, wanted, search(one, _one_sample) if ask.plain else None, settings, key)

    def from_noise(
        self, noise: Noise | str | Path, *, another_model: bool = False, **pipeline_arguments: Any
    ) -> Remade:
        """Makes a picture again from its noise, by one trajectory and without a verifier.

        Last bits depend on how many images share a call of the network. So where a pixel differs, the trajectory is run
        once more in calls as large as the search's.

        Args:
            noise: Of a `SearchOutput`, or the file that it was saved to.
            another_model: Take it though this model has another name than the one that it was found with.
            **pipeline_arguments: Further arguments of the pipeline's call, in the place of the recorded ones.

        Raises:
            UserError: It is no such file, damaged, another model's or of another size.
        """
        found = noise if isinstance(noise, Noise) else Noise.load(noise)
        return remake(self.engine, self.name, found, pipeline_arguments, another_model)

    def sample_nfe(self, ask: Ask) -> int:
        """Model evaluations of one ordinary sample of such a search: the least that it can be done with.

        Raises:
            UserError: What is asked for can't be done.
        """
        return self._prepare(ask).search.problem.sample_nfe

    def lessons_of(self, ask: Ask) -> Mapping[str, Any]:
        """All that early exit's lessons from such a search depend on.

        Raises:
            UserError: What is asked for can't be done, or early exit learns nothing from it.
        """
        key = self._prepare(ask).key
        if key is None:
            raise UserError(f"early_exit={ask.early_exit!r} learns nothing; give calibrated.")
        return key

    def _rule(
        self,
        exit: EarlyExit | Rule | None,
        judge: Verifier,
        decoder: Any,
        steps: int,
        useful: Usefulness | None,
        told: Mapping[str, Any],
    ) -> tuple[Rule | None, dict[str, Any] | None]:
        """What decides on early exit in one search, and what its lessons are kept under; None where it learns nothing.

        Raises:
            UserError: Early exit can't be had here.
        """
        if exit is None or isinstance(exit, Rule):
            return exit, None
        if is_ensemble(judge):
            raise UserError(
                f"early_exit can't judge by the ensemble {judge.name!r}, whose scores only compare the images at hand;"
                " give one verifier, or early_exit='off'."
            )
        checks = exit.steps(steps, useful)
        top = judge.range[1] if exit.v_sup is None and judge.range else exit.v_sup
        rule = Rule(exit, checks, steps, np.inf if top is None else top)
        if exit.mode == "paper":
            return rule, None
        key = {
            "model": fingerprint(self.engine.denoiser.pipe),
            "sampling": {k: v for k, v in self.engine.denoiser.description.items() if k != "source"},
            "verifier": judge.identity(),
            "preview": previews.identity(decoder),
            "steps": steps,
            "checks": checks,
            **told,
        }
        races = {kind: self.calibrations.races(key, kind) for kind in ("fresh", "kin")}
        learned = {kind: found for kind in races if (found := margins(races[kind], exit.delta)) is not None}
        return replace(rule, margins=learned), key

    def verifier(self, spec: VerifierLike) -> Verifier:
        """The verifier of a name, a name with options, or a function; made once and kept.

        Raises:
            UserError: There is none such.
        """
        if not isinstance(spec, str):
            return verification.make(spec)
        if spec not in self._verifiers:
            device = str(self.engine.denoiser.device)
            self._verifiers[spec] = verification.make(
                spec, clip=self.settings.clip, device=device, member=self.verifier
            )
        return self._verifiers[spec]

    def _timed(self, verifier: Verifier, seconds: float) -> Verifier:
        """One for all searches, or else they couldn't share its batches."""
        key = id(verifier), seconds
        if key not in self._patience:
            self._patience[key] = verifier, timed(verifier, seconds)  # alive, or another might get its id
        return self._patience[key][1]

    def preview(self, preview: Any) -> Any:
        """The decoder of previews that is meant, or None for the VAE; loaded once and kept. See `imgscale.previews`.

        Raises:
            UserError: There is none such, or it doesn't fit the model.
        """
        if not isinstance(preview, str | Path):
            return previews.load(preview, self.engine.denoiser, self.settings)
        if str(preview) not in self._previews:
            self._previews[str(preview)] = previews.load(preview, self.engine.denoiser, self.settings)
        return self._previews[str(preview)]

    def cost(
        self,
        *,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        verifier: VerifierLike | None = "clip",
        preview: Any = None,
        **pipeline_arguments: Any,
    ) -> Cost:
        """What each part costs in FLOPs and eFLOPs, counted without running anything; see `imgscale.cost`.

        Once it has been counted, the ledgers of searches of this kind hold their eFLOPs.

        Args:
            height: In pixels; the model's default for None.
            width: In pixels; the model's default for None.
            guidance_scale: The model's default for None.
            negative_prompt: For pipelines whose guidance needs one.
            verifier: What scores; nothing for None.
            preview: What decodes previews; the model's default for None.
            **pipeline_arguments: Further arguments of the pipeline's call.

        Raises:
            UserError: It can't be counted.
        """
        judge = None if verifier is None else self.verifier(verifier)
        decoder = self.preview(self.settings.preview if preview is None else preview)
        size = {"height": height, "width": width, "guidance_scale": guidance_scale}
        return self._prices.cost(judge, decoder, {**size, "negative_prompt": negative_prompt, **pipeline_arguments})

    def _useful(self, verifier: VerifierLike) -> Usefulness | None:
        """What was measured of the model with this verifier; or with another, which is mostly of the model, too."""
        named = self.usefulness.get(verifier) if isinstance(verifier, str) else None
        return named or next(iter(self.usefulness.values()), None)

    def _steps(self, steps: int | None) -> int:
        if steps is None:
            return self.settings.steps or self.engine.denoiser.steps_default
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
            raise UserError(f"num_inference_steps can't be {steps!r}; give a whole number from 1 to 1000.")
        return steps

    def _output(self, made: _Prepared) -> SearchOutput:
        search, settings = made.search, made.settings
        best = search.best
        assert best is not None, "the engine always leaves an answer"
        reports = [verifier.name for verifier in search.reports]
        if (said := hacking.warning(search.verifier.name, search.trace, reports)) is not None:
            search.notice(said)
        gallery = search.gallery(lambda x0: self.engine.decode(x0, [search.problem.cond], [len(x0)]))
        for candidate in gallery:
            for verifier in search.reports:
                if verifier.name not in candidate.report:  # it never was the best
                    candidate.report[verifier.name] = float(search.judge(verifier, candidate.image[None])[0])
                    search.meter.charge(report_calls=1)
        if made.key is not None:
            self.calibrations.learn(made.key, search.problem.exits.lessons)
        if self.calibrations.complaint:
            search.notice(self.calibrations.complaint)
            self.calibrations.complaint = ""
        exits = {"exits": search.problem.exits.as_dict()} if search.problem.early_exit is not None else {}
        stopped = {"stopped": search.stopped, "rounds": search.rounds, "nfe": search.meter.ledger.nfe}
        batch = {"max_batch": self.engine.max_batch}
        output = SearchOutput(
            prompt=made.ask.prompt,
            model=self.name,
            searcher=registry.composed(settings["searcher"], settings["guide"]),
            verifier=search.verifier.name,
            images=[to_pil(candidate.image) for candidate in gallery],
            scores=_scores(search, best),
            seeds=[candidate.seed for candidate in gallery],
            ledger=search.meter.ledger,
            trace=search.trace,
            plain=_plain(search, made.plain),
            stopped=search.stopped,
            finished=best.finished,
            settings={"prompt": made.ask.prompt, "seed": made.ask.seed, **settings, **batch, **stopped, **exits},
            events=search.events,
            gallery=gallery,
            scored=search.scored,
        )
        if made.ask.keep_noise:
            output.noises = self._noises(output, search.problem)
        return output

    def _noises(self, output: SearchOutput, problem: Problem) -> list[Noise]:
        own = problem.schedule

        def grid(steps: int) -> tuple[float, ...]:
            return own.times if steps == own.steps else problem.grid(steps).times

        pairs = [pair for pair in zip(output.gallery, output.images, strict=True) if pair[0].origin is not None]
        return [Noise.of(output, candidate, image, own.path, grid) for candidate, image in pairs]


@dataclass(frozen=True)
class _Prepared:
    """A search that was asked for, the plain sample beside it, its settings for records, and the key of its lessons."""

    ask: Ask
    search: Search
    plain: Search | None
    settings: dict[str, Any]
    key: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        return not (self.search.running or (self.plain is not None and self.plain.running))


def _encode_alone(prompt: str, judges: Iterable[Verifier]) -> None:
    """Has verifiers that remember texts encode this one now: in a batch, its last bits would depend on the others."""
    for verifier in (member for judge in judges for member in panel(judge)):
        embed = getattr(verifier, "embed_texts", None)
        if embed is not None:
            embed([prompt])


def _scores(search: Search, best: Candidate) -> dict[str, float]:
    return {search.verifier.name: best.score, **best.report}


def _plain(search: Search, plain: Search | None) -> Plain | None:
    if plain is None or plain.best is None or not plain.best.finished:
        return None
    scores = {**_scores(plain, plain.best), search.verifier.name: search.value(plain)}
    return Plain(to_pil(plain.best.image), scores, plain.meter.ledger)


def _one_sample(problem: Problem) -> Verb:
    samples = yield from problem.sample(1)
    yield from problem.score(samples)
