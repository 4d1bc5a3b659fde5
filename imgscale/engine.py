"""The engine: answers the requests of one or many searches, and does once what no searcher should do again.

It merges the requests of concurrent searches into full batches, sizes them to memory, keeps the ledgers, and ends
searches: by budget, deadline, cancellation or a score that can't rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from imgscale.budget import BudgetSpent
from imgscale.journal import Entry, Journal
from imgscale.kernels import ODE
from imgscale.particles import Particles
from imgscale.paths import convert
from imgscale.problem import Gradient, Predict, Request, Score, Slope, bill
from imgscale.rewards import is_ensemble, is_out_of_memory, opinions, panel, preview_name
from imgscale.search import Search, subject

if TYPE_CHECKING:
    from imgscale.conditions import Condition
    from imgscale.denoiser import Denoiser

T = TypeVar("T")

PATIENCE = 3  # failed verifier calls, without any score before, that end a search


class Engine:
    """Runs searches on one model.

    Args:
        denoiser: The model.
        max_batch: Images per call of the network and of the decoder; halved whenever memory runs out.
        exact: Fill every call of a network up to ``max_batch`` by repeating its last row. Kernels are chosen by size,
            and so are the last bits of a result; at one size they depend neither on the other rows nor on the place
            among them, and a search gives the same image to the bit whatever shares its batches.
    """

    def __init__(self, denoiser: Denoiser, max_batch: int = 32, exact: bool = False) -> None:
        self.denoiser = denoiser
        self.max_batch = max_batch
        self.exact = exact
        self.gradient_batch = max(1, max_batch // 4)  # activations are kept; halved by itself, too

    def prime(self, searches: Sequence[Search]) -> None:
        """Brings new searches to their first requests: what a searcher refuses, it refuses before anything is spent."""
        with torch.no_grad():
            for search in searches:
                if not search.running:
                    search.advance()

    def run(
        self,
        searches: Sequence[Search],
        tick: Callable[[Sequence[Search]], None] | None = None,
        stop: Callable[[], str] = lambda: "",
        journal: Journal | None = None,
    ) -> None:
        """Runs all searches to their ends; their fields then hold the outcome.

        Args:
            searches: New or primed ones. Requests that fit together share batches, whatever search they come from.
            tick: Called after every engine step.
            stop: Asked before every engine step. "cancelled" ends all searches with their best so far, another
                reason ends them once each has finished an image.
            journal: The answers up to where the same searches stopped before, and the place for further ones.

        Raises:
            UserError: The journal is of other searches.
        """
        for _ in self.steps(searches, stop, journal):
            if tick:
                tick(searches)

    def steps(
        self,
        searches: Sequence[Search] = (),
        stop: Callable[[], str] = lambda: "",
        journal: Journal | None = None,
        more: Callable[[int], Sequence[Search]] = lambda running: (),
    ) -> Iterator[list[Search]]:
        """Does the same step by step, and takes in further searches on the way.

        Args:
            searches: As in `run`.
            stop: As in `run`.
            journal: As in `run`; of the first searches alone.
            more: Given how many are running, the primed searches to begin with now. It is asked before every engine
                step, and once more when none is running.

        Yields:
            The searches that ended in each engine step, with their outcomes.

        Raises:
            UserError: The journal is of other searches.
        """
        running = list(searches)
        try:
            with torch.no_grad():
                self.prime(running)
                if journal is not None:
                    self._replay(running, journal)
                ended = self._conclude(running)
            while True:
                if ended:
                    yield ended
                running = [search for search in running if search.running]
                running += more(len(running))
                if not running:
                    return
                with torch.no_grad():
                    if active := [search for search in running if search.running]:
                        self._step(active, stop())
                        if journal is not None:
                            journal.step()
                    ended = self._conclude(running)
                if active and not ended:
                    yield ended
        finally:
            for search in running:
                search.steps.close()
            if journal is not None:
                journal.write()

    def _step(self, active: Sequence[Search], stop: str) -> None:
        """Answers one request of each search."""
        self._check_stops(active, stop)
        for search in active:
            search.rounds += not search.stopped
        self._predict([s for s in active if isinstance(s._request, Predict)])
        self._score([s for s in active if isinstance(s._request, Score)])
        self._differentiate([s for s in active if isinstance(s._request, Gradient)])

    def _conclude(self, searches: Sequence[Search]) -> list[Search]:
        """Those that have ended, each left with an answer."""
        ended = [search for search in searches if not search.running]
        for search in ended:
            if search.best is None:
                self._show_preview(search)
            if search._unheard and not search._heard and search.stopped in ("budget", "complete"):
                search.stopped = "verifier"
            search.mark()
        return ended

    def _replay(self, searches: Sequence[Search], journal: Journal) -> None:
        """Answers the searches from the journal until it has no more, and has them write to it from there."""
        for number, search in enumerate(searches):
            search.number, search.journal = number, journal
        for entry in journal.read():
            if not 0 <= entry.search < len(searches):
                raise journal.damaged("it has more searches")
            search = searches[entry.search]
            while search.running and not self._open(search):
                pass  # it was answered without work, or ended and goes on to finish its incumbent
            request = search._request
            if request is None or not entry.answers(type(request).__name__, subject(request)):
                raise journal.damaged("the search asks for something else than it did")
            search.rounds, search._checked, search._pace = entry.rounds, entry.seconds, entry.pace
            search.meter.restart(entry.seconds)
            for event in entry.events:
                search.notice(event)
            search._told = len(search.events)
            search._replayed = entry
            self._answer_again(search, request, entry)
            search._replayed = None

    def _answer_again(self, search: Search, request: Request, entry: Entry) -> None:
        device = subject(request).device
        tensors = {name: t if name in ("scores", "image") else t.to(device) for name, t in entry.tensors.items()}
        try:
            if isinstance(request, Predict):
                self._answer(search, tensors["x0"])
                return
            scores = search.reward(tensors["said"].cpu()) if "said" in tensors else tensors["scores"]
            particles, answer = request.particles, scores
            if isinstance(request, Gradient):
                slope = Slope(tensors["x"], tensors["x0"], scores, tensors["gradient"])
                particles, answer = _there(request, slope), slope  # type: ignore[assignment]
        except KeyError as error:
            assert search.journal is not None
            raise search.journal.damaged(f"an answer lacks its {error}") from error
        self._settle(search, particles, None, scores, entry.lost, answer, {})

    def _open(self, search: Search) -> bool:
        """Whether a request needs work, and is paid: empty ones are answered, those beyond the budget end it."""
        request = search._request
        assert request is not None
        n = len(subject(request))
        if n == 0:
            none = torch.zeros(0, dtype=torch.float64)
            if isinstance(request, Predict):
                self._answer(search, request.x)
            elif isinstance(request, Score):
                self._answer(search, none)
            else:
                self._answer(search, Slope(request.particles.x, request.particles.x0, none, request.particles.x))
            return False
        amounts = {"nfe": n}
        if not isinstance(request, Predict):
            amounts = {"verifier_calls": n, "decodes": n}
            if isinstance(request, Gradient):
                amounts |= {"nfe": n * request.nfe, "gradients": n}
        if search.meter.price is not None:
            amounts["eflops"] = bill(request, search.meter.price)
        try:
            search.meter.require(**amounts)
        except BudgetSpent:
            search.end("budget")
            return False
        search.meter.charge(**amounts)
        return True

    def _check_stops(self, active: Sequence[Search], stop: str) -> None:
        for search in active:
            left = search.clock()
            incumbent = search.problem.incumbent
            if incumbent is None and search.best is None:
                continue  # there is nothing to leave yet
            if stop == "cancelled" or (stop and not search._closing):
                search.end(stop)
            elif not search._closing:
                rounds = 1
                # One slow step may be a warm-up: not yet a reason to give up searching.
                if search.best is None and incumbent is not None and search.rounds > 1:
                    rounds += search.problem.finishing_nfe(incumbent) + 1
                if left <= 0 or left < search._pace * rounds:
                    search.end("deadline")

    # ------------------------------------------------------------------------------------- model evaluations

    def _predict(self, searches: Sequence[Search]) -> None:
        own = self.denoiser.path
        groups: dict[Hashable, list[tuple[Search, Tensor, float]]] = {}
        for search in searches:
            request = search._request
            assert isinstance(request, Predict)
            if not self._open(search):
                continue
            x, t = convert(request.x, request.t, request.path, own)
            time = float(t)
            place = None if self.denoiser.mixed_times else time
            groups.setdefault((search.problem.cond.key, place), []).append((search, x, time))
        for members in groups.values():
            x0 = self._predict_group(members)
            for (search, _, _), answer in zip(members, x0.split([len(x) for _, x, _ in members]), strict=True):
                assert search._request is not None
                search.log(search._request, {"x0": answer}, best=search.best)
                self._answer(search, answer)

    def _answer(self, search: Search, answer: Any) -> None:
        search._request = None
        search.advance(answer)

    def _predict_group(self, members: list[tuple[Search, Tensor, float]]) -> Tensor:
        x = torch.cat([x for _, x, _ in members])
        counts = [len(x) for _, x, _ in members]
        times = torch.tensor([t for _, _, t in members], dtype=torch.float64).repeat_interleave(torch.tensor(counts))
        same = bool((times == times[0]).all()) and not (self.exact and self.denoiser.mixed_times)
        cond = _stack([s.problem.cond for s, _, _ in members], counts)
        rows = self._fill(len(x))

        def work(a: int, b: int) -> Tensor:
            part = rows[a:b]
            t = float(times[0]) if same else times[part]
            return self.denoiser.predict(x[part], t, cond.at(part))

        return torch.cat(self._in_batches(len(rows), work))[: len(x)]

    # ---------------------------------------------------------------------------------------------- rewards

    def _score(self, searches: Sequence[Search]) -> None:
        groups: dict[Hashable, list[Search]] = {}
        for search in searches:
            assert isinstance(search._request, Score)
            if self._open(search):
                place = (search.problem.cond.key, id(search.verifier), id(_decoder(search)))
                groups.setdefault(place, []).append(search)
        for members in groups.values():
            self._score_group(members)

    def _score_group(self, members: list[Search]) -> None:
        requests = [s._request for s in members if isinstance(s._request, Score)]
        counts = [len(r.particles) for r in requests]
        x0 = torch.cat([r.particles.x0 for r in requests])
        sound = x0.flatten(1).isfinite().all(1)
        images = self.decode(
            torch.where(sound.reshape(-1, *[1] * (x0.ndim - 1)), x0, 0.0),
            [s.problem.cond for s in members],
            counts,
            _decoder(members[0]),
        )
        finite = sound & images.flatten(1).isfinite().all(1)
        black = _black(images)
        images = torch.where(finite.reshape(-1, 1, 1, 1), images, 0.0)  # one NaN must not spoil a verifier's batch
        prompts = [s.problem.cond.prompt for s, n in zip(members, counts, strict=True) for _ in range(n)]
        notice = _notices(members)

        rows = self._fill(len(x0))

        def work(a: int, b: int) -> Tensor:
            part = rows[a:b]
            return opinions(members[0].verifier, images[part], [prompts[i] for i in part], notice)

        said = torch.cat(self._in_batches(len(rows), work))[: len(x0)]
        failed = said.isnan().any(1)
        said[failed | ~finite.cpu() | black.cpu()] = -math.inf
        for search, request, part, pictures, good, dark, lost in zip(
            members, requests, *(rows.split(counts) for rows in (said, images, finite, black, failed)), strict=True
        ):
            _tell(search, good, dark)
            scores = search.reward(part)
            answer = {"scores": scores, "said": part} if is_ensemble(search.verifier) else {"scores": scores}
            self._settle(search, request.particles, pictures, scores, bool(lost.all()), scores, answer)

    def _settle(
        self,
        search: Search,
        particles: Particles,
        images: Tensor | None,
        scores: Tensor,
        lost: bool,
        answer: Any,
        tensors: dict[str, Tensor],
    ) -> None:
        """Takes rewards of one search's images: ``lost`` if the verifier failed for all of them."""
        request, best = search._request, search.best
        assert request is not None
        search._heard |= bool(scores.isfinite().any())
        search._unheard += lost
        search.settle(images, scores, particles)
        if images is not None and search.best is not None and search.best is not best:
            self._compare_preview(search, images.device)
        search.log(request, tensors, best=best, lost=lost)
        if search.stopped and not search._closing:
            return
        if not search._heard and search._unheard >= PATIENCE:
            search.end("verifier")
        else:
            search.advance(answer)

    def _compare_preview(self, search: Search, device: torch.device) -> None:
        """Notes what the verifier would have said of a new best image's preview, beside what it says of the image."""
        best = search.best
        if search.preview is None or best is None or not best.finished:
            return
        image = self.decode(best.latents[None].to(device), [search.problem.cond], [1], search.preview)
        for verifier in panel(search.verifier):
            best.report[preview_name(verifier.name)] = float(search.judge(verifier, image.nan_to_num(0.0))[0])
            search.meter.charge(report_calls=1)

    # -------------------------------------------------------------------------------------------- gradients

    def _differentiate(self, searches: Sequence[Search]) -> None:
        groups: dict[Hashable, list[Search]] = {}
        for search in searches:
            request = search._request
            assert isinstance(request, Gradient)
            if self._open(search):
                at = (request.particles.schedule, request.particles.step, request.to)
                place = (search.problem.cond.key, id(search.verifier), id(_decoder(search)), at)
                groups.setdefault(place, []).append(search)
        for members in groups.values():
            self._differentiate_group(members)

    def _differentiate_group(self, members: list[Search]) -> None:
        requests = [s._request for s in members if isinstance(s._request, Gradient)]
        counts = [len(r.particles) for r in requests]
        first = requests[0]
        x = torch.cat([r.particles.x0 if first.to is None else r.particles.x for r in requests])
        cond = _stack([s.problem.cond for s in members], counts)
        prompts = [s.problem.cond.prompt for s, n in zip(members, counts, strict=True) for _ in range(n)]
        verifier, notice, decoder = members[0].verifier, _notices(members), _decoder(members[0])

        chosen = self._fill(len(x), "gradient_batch")

        def work(a: int, b: int) -> tuple[Tensor, ...]:
            part = chosen[a:b]
            there = cond.at(part)
            with torch.inference_mode(False), torch.enable_grad():
                leaf = x[part].clone().requires_grad_()
                end, x0 = (leaf, leaf) if first.to is None else self._solve(leaf, first, there)
                images = self.denoiser.decode(x0, there, decoder)
                sound = (x0.flatten(1).isfinite().all(1) & images.flatten(1).isfinite().all(1)).reshape(-1, 1, 1, 1)
                # As in _score_group: one NaN must not spoil a verifier's batch.
                asked = [prompts[i] for i in part]
                scores = opinions(verifier, torch.where(sound, images, 0.0), asked, notice, detach=False)[:, 0]
                gradient = torch.zeros_like(leaf)
                if scores.requires_grad:
                    (gradient,) = torch.autograd.grad(scores[scores.isfinite()].sum(), leaf)
            return end.detach(), x0.detach(), images.detach(), scores.detach(), gradient

        done = self._in_batches(len(chosen), work, "gradient_batch")
        rows = [torch.cat(parts)[: len(x)] for parts in zip(*done, strict=True)]
        end, x0, images, scores, gradient = rows
        failed = scores.isnan()
        good = x0.flatten(1).isfinite().all(1) & images.flatten(1).isfinite().all(1)
        black = _black(images)
        scores[failed | ~good.cpu() | black.cpu()] = -math.inf
        if not bool(gradient.isfinite().all()):
            notice("Some gradients weren't finite; they count as 0.")
        sloping = gradient.flatten(1).isfinite().all(1).reshape(-1, *[1] * (x.ndim - 1))
        gradient = torch.where(sloping, gradient, 0.0)
        for search, request, *parts in zip(
            members,
            requests,
            *(rows.split(counts) for rows in (end, x0, images, scores, gradient, good, black, failed)),
            strict=True,
        ):
            x_end, x0_end, pictures, rewards, steepness, sound, dark, lost = parts
            slope = Slope(x_end, x0_end, rewards, steepness)
            _tell(search, sound, dark)
            self._settle(search, _there(request, slope), pictures, rewards, bool(lost.all()), slope, vars(slope))

    def _solve(self, x: Tensor, request: Gradient, cond: Condition) -> tuple[Tensor, Tensor]:
        """x and x0 where the ODE from x leads, with their graph."""
        assert request.to is not None
        schedule, own, ode = request.particles.schedule, self.denoiser.path, ODE()

        def predict(x: Tensor, t: float) -> Tensor:
            moved, time = convert(x, t, schedule.path, own)
            return self.denoiser.predict(moved, float(time), cond)

        start = max(request.particles.step, 0)
        x0 = predict(x, schedule.times[start])
        for step in range(start, request.to):
            t, t_next = schedule.times[step : step + 2]
            x = ode(schedule.path, t, t_next, x, x0)
            x0 = x if t_next == 0 else predict(x, t_next)
        return x, x0

    def decode(self, x0: Tensor, conds: Sequence[Condition], counts: Sequence[int], preview: Any = None) -> Tensor:
        """Images float32 (n, 3, h, w) of latents; ``counts[i]`` rows belong to ``conds[i]``.

        ``preview`` takes the place of the VAE.
        """
        cond = _stack(conds, counts)
        rows = self._fill(len(x0))

        def work(a: int, b: int) -> Tensor:
            part = rows[a:b]
            return self.denoiser.decode(x0[part], cond.at(part), preview)

        return torch.cat(self._in_batches(len(rows), work))[: len(x0)]

    def retrace(
        self, x: Tensor, times: Sequence[float], cond: Condition, calls: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The finished latents (1, *latent), and their image (1, 3, h, w), to which the model's own ODE leads from x.

        Args:
            x: (1, *latent) on the model's own path, at the first time.
            times: From there to 0.
            cond: What to draw.
            calls: Rows of each call of the network, and of the decoder: copies of the one, since last bits depend on
                how many there are.
        """
        path, ode = self.denoiser.path, ODE()
        with torch.no_grad():
            for t, t_next, n in zip(times, times[1:], calls, strict=False):
                x = ode(path, t, t_next, x, self._predict_copies(x, t, cond, n))
            image = self.decode(x[[0] * calls[-1]], [cond], [calls[-1]])[:1]
        return x, image.nan_to_num(0.0, 1.0, 0.0)

    def _predict_copies(self, x: Tensor, t: float, cond: Condition, n: int) -> Tensor:
        rows = [0] * len(self._fill(n))
        mixed = self.exact and self.denoiser.mixed_times

        def work(a: int, b: int) -> Tensor:
            part = rows[a:b]
            times = torch.full((len(part),), t, dtype=torch.float64) if mixed else t
            return self.denoiser.predict(x[part], times, cond.at(part))

        return self._in_batches(len(rows), work)[0][:1]

    def _show_preview(self, search: Search) -> None:
        """The answer of a search that was stopped before it finished anything: its most promising preview."""
        held = search.problem.incumbent
        if held is None:
            return
        images = self.decode(held.x0, [search.problem.cond], [1])
        price = search.meter.price
        search.meter.charge(decodes=1, **({"eflops": price.decode} if price else {}))
        scores = None if search.preview is not None else held.scores
        if scores is None:
            finite = images.flatten(1).isfinite().all(1)
            images = torch.where(finite.reshape(-1, 1, 1, 1), images, 0.0)
            said = opinions(search.verifier, images, [search.problem.cond.prompt], search.notice)
            said[said.isnan() | ~finite.cpu()] = -math.inf
            scores = search.reward(said)
            search.meter.charge(verifier_calls=1, **({"eflops": price.score} if price else {}))
        search.notice("The search was stopped before it finished an image; this is its best preview.")
        search.crown(images, held.x0, scores, held.seeds, 0, finished=held.finished)

    # -------------------------------------------------------------------------------------------- micro-batches

    def _fill(self, n: int, size: str = "max_batch") -> list[int]:
        """Which of ``n`` rows to compute: each once, and if exact the last one again until the batches are full."""
        most = getattr(self, size)
        return [*range(n), *[n - 1] * (-n % most if self.exact else 0)]

    def _in_batches(self, n: int, work: Callable[[int, int], T], size: str = "max_batch") -> list[T]:
        """``work(a, b)`` on equal slices of range(n), halved when memory runs out."""
        done: list[T] = []
        a = 0
        while a < n:
            rounds = math.ceil((n - a) / getattr(self, size))
            b = a + math.ceil((n - a) / rounds)
            try:
                done.append(work(a, b))
                a = b
            except RuntimeError as error:
                if b - a == 1 or not is_out_of_memory(error):
                    raise
                setattr(self, size, (b - a) // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return done


def _decoder(search: Search) -> Any:
    """What decodes the images that a request is about: None for the VAE, by which every finished image is made."""
    request = search._request
    assert isinstance(request, Score | Gradient)
    schedule = request.particles.schedule
    step = request.particles.step if isinstance(request, Score) or request.to is None else request.to
    return None if schedule.times[max(step, 0)] == 0 else search.preview


def _there(request: Gradient, slope: Slope) -> Particles:
    """The particles where their rewards were taken."""
    step = request.particles.step if request.to is None else request.to
    return request.particles.solved(step, slope.x, slope.x0)


def _black(images: Tensor) -> Tensor:
    """Which images are black all over: a safety checker's, or those of a VAE that overflowed; never worth a rank."""
    return images.flatten(1).amax(1) == 0


def _tell(search: Search, good: Tensor, black: Tensor) -> None:
    if bool(black.any()):
        search.notice(
            "Some images came out black, as a safety checker or an overflowing VAE makes them; they count as −inf."
        )
    if not bool(good.all()):
        search.notice("Some latents or images weren't finite; they count as −inf.")


def _stack(conds: Sequence[Condition], counts: Sequence[int]) -> Condition:
    return conds[0] if len(conds) == 1 else type(conds[0]).stack(conds, counts)


def _notices(members: Sequence[Search]) -> Callable[[str], None]:
    def notice(text: str) -> None:
        for search in members:
            search.notice(text)

    return notice
