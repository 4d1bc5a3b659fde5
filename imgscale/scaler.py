"""The front door: `load` a model, call it like a pipeline, get a searched image."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import imgscale
from imgscale import hacking, previews, registry, usefulness, verification
from imgscale.budget import Budget, Meter, Price
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.journal import Journal
from imgscale.models import ModelSettings, folder_of, load_pipeline
from imgscale.problem import Guide, Problem, Verb
from imgscale.result import Candidate, Plain, SearchOutput
from imgscale.rewards import Verifier, is_ensemble, panel, timed
from imgscale.search import Search
from imgscale.usefulness import Usefulness
from imgscale.verification import VerifierLike

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from imgscale.cost import Cost

Searcher = Callable[..., Verb]


@dataclass(frozen=True)
class Progress:
    """What a callback hears after every engine step.

    Args:
        searches: How many run together.
        nfe: Model evaluations spent by all of them.
        total: What they may spend together, or None.
        best: The best scores so far, one per search; None while there is none.
        rounds: Engine steps so far, one number per search; they stand still once it has stopped.
        preview: Decodes the most promising x0 of a search, by its number: a PIL image, or None at the very start.
        cancel: Ends all searches with their best so far; with ``finish=True`` as a deadline does, once each has
            finished an image.
    """

    searches: int
    nfe: int
    total: int | None
    best: list[float | None]
    rounds: list[int]
    preview: Callable[[int], Image | None]
    cancel: Callable[..., None]


def load(
    model: Any = "shapes-flow",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int = 32,
) -> Scaler:
    """A model, ready to search with.

    Args:
        model: A bundled name (`imgscale list models`), a diffusers folder, a hub id, or a loaded diffusers pipeline,
            which is left exactly as it is: LoRAs, offloading, tiling and quantisation stay the user's.
        device: Where to load to; the accelerator if there is one.
        dtype: Of the weights; float32 on a CPU and bfloat16 elsewhere.
        max_batch: Images per call of the network; halved by itself when memory runs out.

    Raises:
        UserError: It can't be loaded; the message says why and what to do.
    """
    from imgscale.denoiser import Denoiser

    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
        raise UserError(f"max_batch can't be {max_batch!r}; give a whole number of at least 1.")
    pipe, name, settings = load_pipeline(model, device=device, dtype=dtype)
    measured = usefulness.known(folder_of(model), name)
    return Scaler(Engine(Denoiser(pipe, settings.defaults), max_batch), name, settings, measured)


class Scaler:
    """Searches for better images with one model. Made by `load`.

    Args:
        engine: Runs the searches.
        name: The model's name in records.
        settings: What the search should know of the model.
        usefulness: What was measured of it, by verifier.

    Attributes:
        price: What searches reckon with in eFLOPs in the place of what `cost` counts, for a re-run elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        settings: ModelSettings | None = None,
        usefulness: Mapping[str, Usefulness] | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self.settings = settings or ModelSettings()
        self.usefulness = dict(usefulness or {})
        self.price: Price | None = None
        self._verifiers: dict[Any, Verifier] = {}
        self._previews: dict[str, Any] = {}
        self._costs: dict[Any, tuple[Cost, Any]] = {}

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
        for text in prompts:
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"The prompt can't be {text!r}; write what the image should show.")
        seeds = _seeds(seed, prompt, len(prompts))
        limits = Budget.of(budget)
        if isinstance(searcher, str):
            given = str(guide) if guide is not None else None
            searcher, named = registry.compose(searcher, given)
            guide = guide if named == given else named
        name, make, searcher_options = _searcher(searcher, options)
        guide_name, guided = _guide(guide)
        judge = patient = self.verifier(verifier)
        reports = _distinct(judge, [self.verifier(spec) for spec in report])
        if verifier_timeout is not None:
            judge, *reports = (timed(v, _seconds(verifier_timeout)) for v in (judge, *reports))
        decoder = self.preview(self.settings.preview if preview is None else preview)

        steps = self._steps(num_inference_steps)
        useful = self._useful(verifier)
        size = {"height": height, "width": width, "guidance_scale": guidance_scale}
        price = self._price(
            limits, patient, decoder, {**size, "negative_prompt": negative_prompt, **pipeline_arguments}
        )
        conds = [
            self.engine.denoiser.encode(
                text,
                negative_prompt,
                height=height,
                width=width,
                guidance_scale=self.settings.guidance_scale if guidance_scale is None else guidance_scale,
                **pipeline_arguments,
            )
            for text in prompts
        ]

        def search(cond: Any, seed: int, budget: Budget, make: Callable[[Problem], Verb]) -> Search:
            problem = Problem(
                self.engine.denoiser,
                cond,
                steps=steps,
                seed=seed,
                meter=Meter(budget, price=price),
                distilled=self.settings.distilled,
                path=self.settings.path,
                ceiling=judge.range[1] if judge.range else None,
                differentiable=judge.differentiable,
                guide=guided,
                usefulness=useful,
            )
            _check_budget(budget, problem)
            return Search(problem, make(problem), judge, reports, decoder)

        def steer(problem: Problem) -> Verb:
            return make(problem, np.random.default_rng((problem.seed, 1)), **searcher_options)

        settings: dict[str, Any] = {
            "model": self.name,
            "negative_prompt": negative_prompt,
            "searcher": name,
            "options": searcher_options,
            "guide": guide_name,
            "usefulness": None if useful is None else asdict(useful),  # measured anew, the search would be another
            "verifier": verifier if isinstance(verifier, str) else judge.name,
            "report": [v if isinstance(v, str) else self.verifier(v).name for v in report],
            "verifiers": {v.name: v.identity() for v in (judge, *reports)},
            "verifier_timeout": verifier_timeout,
            "preview": (preview or self.settings.preview) if isinstance(preview, str | None) else str(type(preview)),
            "preview_decoder": previews.identity(decoder),
            "budget": {k: v for k, v in asdict(limits).items() if v is not None},
            "height": conds[0].height,
            "width": conds[0].width,
            "num_inference_steps": steps,
            "guidance_scale": self.settings.guidance_scale if guidance_scale is None else guidance_scale,
            "pipeline_arguments": pipeline_arguments,
            "pipeline": self.engine.denoiser.description,
        }
        if price is not None and limits.eflops is not None:
            settings["price"] = asdict(price)  # counted anew, the search might be another
        plains: list[Search] = []
        searches = [search(cond, seed, limits, steer) for cond, seed in zip(conds, seeds, strict=True)]
        self.engine.prime(searches)
        asked = {"imgscale": imgscale.__version__, "prompts": prompts, "seeds": seeds, **settings}
        log = None if journal is None else Journal(Path(journal).expanduser(), asked)
        with _Watch(self.engine, searches, limits, progress, callback) as watch:
            if plain:
                one = Budget(nfe=searches[0].problem.sample_nfe)
                plains = [search(cond, seed, one, _one_sample) for cond, seed in zip(conds, seeds, strict=True)]
                for s in plains:
                    s.meter.restart()
                self.engine.run(plains, lambda _: watch.tick(searches), watch.stop)
            for s in searches:  # the clock of a search starts now, not while others were made
                s.meter.restart()
            self.engine.run(searches, watch.tick, watch.stop, log)
        settings["max_batch"] = self.engine.max_batch
        outputs = [
            self._output(text, s, plains[i] if plains else None, settings)
            for i, (text, s) in enumerate(zip(prompts, searches, strict=True))
        ]
        return outputs[0] if isinstance(prompt, str) else outputs

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
        return self._cost(judge, decoder, {**size, "negative_prompt": negative_prompt, **pipeline_arguments})

    def _cost(self, judge: Verifier | None, decoder: Any, arguments: Mapping[str, Any]) -> Cost:
        from imgscale import cost, hardware

        key, denoiser = _cost_key(judge, decoder, arguments), self.engine.denoiser
        if key not in self._costs:
            given = dict(arguments)
            if given["guidance_scale"] is None:
                given["guidance_scale"] = self.settings.guidance_scale
            found = cost.measure(
                denoiser.pipe,
                self.name,
                hardware.of(denoiser.device, denoiser.dtype),
                defaults=denoiser.defaults,
                steps=self.settings.steps,
                preview=decoder,
                verifier=judge,
                **given,
            )
            self._costs[key] = found, (judge, decoder)  # alive, or another might get its id
        return self._costs[key][0]

    def _price(self, limits: Budget, judge: Verifier, decoder: Any, arguments: Mapping[str, Any]) -> Price | None:
        """What a search reckons with: where eFLOPs are limited, or have been counted already."""
        if self.price is not None:
            return self.price
        if limits.eflops is None and _cost_key(judge, decoder, arguments) not in self._costs:
            return None
        return self._cost(judge, decoder, arguments).price

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

    def _output(self, prompt: str, search: Search, plain: Search | None, settings: dict[str, Any]) -> SearchOutput:
        best = search.best
        assert best is not None, "the engine always leaves an answer"
        reports = [verifier.name for verifier in search.reports]
        if (said := hacking.warning(search.verifier.name, search.trace, reports)) is not None:
            search.notice(said)
        stopped = {"stopped": search.stopped, "rounds": search.rounds, "nfe": search.meter.ledger.nfe}
        return SearchOutput(
            prompt=prompt,
            model=self.name,
            searcher=registry.composed(settings["searcher"], settings["guide"]),
            verifier=search.verifier.name,
            images=[to_pil(best.image)],
            scores=_scores(search, best),
            seeds=[best.seed],
            ledger=search.meter.ledger,
            trace=search.trace,
            plain=_plain(search, plain),
            stopped=search.stopped,
            finished=best.finished,
            settings={"prompt": prompt, "seed": search.problem.seed, **settings, **stopped},
            events=search.events,
        )


def to_pil(image: Tensor) -> Image:
    """A PIL image of a tensor (3, h, w) in [0, 1], rounded as diffusers does."""
    from PIL import Image

    pixels = (image.clamp(0, 1).permute(1, 2, 0).cpu().numpy() * 255).round().astype("uint8")
    return Image.fromarray(pixels)


def _scores(search: Search, best: Candidate) -> dict[str, float]:
    return {search.verifier.name: best.score, **best.report}


def _plain(search: Search, plain: Search | None) -> Plain | None:
    if plain is None or plain.best is None or not plain.best.finished:
        return None
    scores = {**_scores(plain, plain.best), search.verifier.name: search.value(plain)}
    return Plain(to_pil(plain.best.image), scores, plain.meter.ledger)


def _distinct(judge: Verifier, reports: Sequence[Verifier]) -> list[Verifier]:
    """The reports without repetitions and without the judge itself; results tell verifiers apart by name.

    Of an ensemble, results hold what its members say in any case.
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


def _seeds(seed: int | Sequence[int], prompt: object, n: int) -> list[int]:
    """A seed for each of ``n`` prompts."""
    several = isinstance(seed, Sequence) and not isinstance(seed, str)
    seeds = list(seed) if several else [seed] * n  # type: ignore[arg-type]
    if several and (isinstance(prompt, str) or len(seeds) != n):
        raise UserError(
            f"There can't be {len(seeds)} seeds for {n} prompts; give one, or a list with one for each prompt."
        )
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise UserError(f"The seed can't be {value!r}; give a whole number from 0 to 2**63 - 1.")
    return seeds  # type: ignore[return-value]


def _seconds(value: Any) -> float:
    right = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value > 0
    if not right:
        raise UserError(f"verifier_timeout can't be {value!r}; give a positive number of seconds, such as 30.")
    return float(value)


def _one_sample(problem: Problem) -> Verb:
    samples = yield from problem.sample(1)
    yield from problem.score(samples)


def _cost_key(judge: Verifier | None, decoder: Any, arguments: Mapping[str, Any]) -> Any:
    """What costs depend on; objects that are alive here are told apart by their ids."""
    from imgscale.conditions import freeze

    return id(getattr(judge, "function", judge)), id(decoder), freeze(arguments)


def _check_budget(budget: Budget, problem: Problem) -> None:
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


def _searcher(spec: str | Searcher, options: Mapping[str, Any] | None) -> tuple[str, Searcher, dict[str, Any]]:
    if isinstance(spec, str):
        entry, checked = registry.searcher.resolve(spec, options)
    elif inspect.isgeneratorfunction(spec):
        entry = registry.Entry(getattr(spec, "__name__", "custom").replace("_", "-"), spec)
        checked = entry.check(options or {})
    else:
        raise UserError(f"The searcher can't be {spec!r}; give a name or a generator function (problem, rng).")
    return entry.name, entry.target, checked


def _guide(spec: str | Guide | None) -> tuple[str | None, Guide | None]:
    """What records call a guide, and the guide."""
    if spec is None or not isinstance(spec, str):
        return None if spec is None else getattr(spec, "__name__", None) or str(spec), spec
    entry, options = registry.guide.resolve(spec)
    return spec, entry.target(**options)


class _Watch:
    """Progress for people: a tqdm bar and the callback; and the wish to cancel."""

    def __init__(
        self,
        engine: Engine,
        searches: Sequence[Search],
        budget: Budget,
        progress: bool,
        callback: Callable[[Progress], None] | None,
    ) -> None:
        self._engine, self._searches, self._callback = engine, searches, callback
        self._total = None if budget.nfe is None else budget.nfe * len(searches)
        self._show = progress
        self._stop = ""

    def __enter__(self) -> _Watch:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=self._total, unit="NFE", disable=not self._show, leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def stop(self) -> str:
        return self._stop

    def cancel(self, finish: bool = False) -> None:
        self._stop = "deadline" if finish else "cancelled"

    def tick(self, searches: Sequence[Search]) -> None:
        nfe = sum(s.meter.ledger.nfe for s in searches)
        best = [s.best.score if s.best else None for s in searches]
        known = [score for score in best if score is not None and math.isfinite(score)]
        if known:
            self._bar.set_postfix(best=f"{sum(known) / len(known):.4f}", refresh=False)
        self._bar.update(nfe - self._bar.n)
        if self._callback:
            rounds = [s.rounds for s in searches]
            self._callback(Progress(len(searches), nfe, self._total, best, rounds, self._preview, self.cancel))

    def _preview(self, index: int) -> Image | None:
        search = self._searches[index]
        if search.best is not None:
            return to_pil(search.best.image)
        held = search.problem.incumbent
        if held is None:
            return None
        return to_pil(self._engine.decode(held.x0, [search.problem.cond], [1], search.preview)[0])
