"""The engine: always an answer, never beyond a limit, the same whatever the batches, and nothing leaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale.budget import Budget, BudgetSpent
from imgscale.engine import PATIENCE, Engine
from imgscale.errors import UserError
from imgscale.kernels import DDIM
from imgscale.particles import Schedule
from imgscale.paths import VP
from imgscale.problem import Predict, Problem, Score, Verb
from imgscale.search import Search
from tests.doubles import (
    MEMORY,
    STEPS,
    Clock,
    Reward,
    Watched,
    as_denoiser,
    clock,
    latents,
    near_one,
    new,
    run,
    stop_after,
)
from tests.worlds import Condition

__all__ = ["clock"]


def ran_well(search: Search, world: Watched) -> bool:
    """The ledger is the truth, the limits hold, and there is an answer."""
    ledger, budget = search.meter.ledger, search.meter.budget
    assert isinstance(search.verifier, Reward)
    assert (ledger.nfe, ledger.decodes) == (world.evaluations, sum(world.decoded))
    assert ledger.verifier_calls == search.verifier.images
    for kind in ("nfe", "verifier_calls", "decodes"):
        limit = getattr(budget, kind)
        assert limit is None or getattr(ledger, kind) <= limit
    last = search.trace[-1]
    assert (last.nfe, last.verifier_calls, last.seconds) == (ledger.nfe, ledger.verifier_calls, ledger.seconds)
    assert search.best is not None and search.stopped and not search.running
    assert last.score == search.best.score == search.trace[-1].score
    return True


# ------------------------------------------------------------------------------------------------ always an answer


def nothing(problem: Problem) -> Verb:
    """Ends at once."""
    return
    yield


def starts_only(problem: Problem) -> Verb:
    """Never moves anything."""
    while True:
        yield from problem.start(1)


def previews_only(problem: Problem) -> Verb:
    """Never finishes anything, though it scores previews."""
    while True:
        start = yield from problem.start(2)
        near = yield from problem.denoise(start, 2, DDIM())
        yield from problem.score(near)


def raises_spent(problem: Problem) -> Verb:
    yield from problem.start(1)
    raise BudgetSpent


def raises_spent_at_once(problem: Problem) -> Verb:
    raise BudgetSpent
    yield


def finishes_without_scoring(problem: Problem) -> Verb:
    while True:
        yield from problem.sample(1)


def greedy(problem: Problem) -> Verb:
    """Asks for far more than there is."""
    yield from problem.start(1)
    yield from problem.sample(10**6)


def walks_step_by_step(problem: Problem) -> Verb:
    """Exactly one sample, in the smallest requests."""
    particles = yield from problem.start(1)
    for step in range(problem.schedule.steps):
        particles, _ = yield from problem.score(particles)
        particles = yield from problem.denoise(particles, step + 1)
    yield from problem.score(particles)


def turns_back(problem: Problem) -> Verb:
    """Likes an early particle best, then spends on others until that one can't be finished any more."""
    first = yield from problem.start(1)
    yield from problem.score(replace(first, scores=None))
    while True:
        others = yield from problem.start(1)
        for step in range(1, problem.schedule.steps):
            others = yield from problem.denoise(others, step)


def on_another_path(problem: Problem) -> Verb:
    schedule = Schedule(VP(), (1.0, 0.6, 0.3, 0.1))
    while True:
        particles = yield from problem.start(1, schedule)
        particles = yield from problem.denoise(particles, kernel=DDIM())
        yield from problem.score(particles)


def title(searcher: Any) -> str:
    return str(getattr(searcher, "__name__", searcher))


LAZY = [
    nothing,
    starts_only,
    previews_only,
    raises_spent,
    raises_spent_at_once,
    finishes_without_scoring,
    greedy,
    walks_step_by_step,
    turns_back,
    on_another_path,
]
each_lazy = pytest.mark.parametrize("searcher", LAZY, ids=title)


@each_lazy
@pytest.mark.parametrize("nfe", [STEPS, STEPS + 1, 7, 11, 30])
def test_whatever_a_searcher_does_an_image_is_finished_within_budget(searcher: Any, nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, searcher, budget=nfe))
    assert ran_well(search, world)
    assert search.best is not None and search.best.finished
    assert search.stopped in ("budget", "complete")


@each_lazy
@pytest.mark.parametrize("kind", ["verifier_calls", "decodes"])
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_the_verifier_and_the_decoder_have_limits_too(searcher: Any, kind: str, limit: int) -> None:
    world = Watched()
    search = run(world, new(world, searcher, budget=Budget(nfe=40, **{kind: limit})))
    assert ran_well(search, world)
    assert search.best is not None and search.best.finished


@each_lazy
def test_cancelling_at_any_moment_leaves_an_answer(searcher: Any) -> None:
    for ticks in range(12):
        world = Watched()
        search = run(world, new(world, searcher, budget=12), stop=stop_after(ticks))
        assert ran_well(search, world)
        assert search.stopped in ("cancelled", "budget", "complete")


@each_lazy
def test_stopping_at_any_moment_finishes_an_image(searcher: Any) -> None:
    for ticks in range(12):
        world = Watched()
        search = run(world, new(world, searcher, budget=12), stop=stop_after(ticks, "deadline"))
        assert ran_well(search, world)
        assert search.best is not None and search.best.finished
        assert search.stopped in ("deadline", "budget", "complete")


def test_an_exact_budget_is_used_step_by_step() -> None:
    """Moving the only particle forward must not need what it itself no longer needs."""
    world = Watched()
    search = run(world, new(world, walks_step_by_step, budget=STEPS))
    assert search.stopped == "complete"
    assert search.meter.ledger.verifier_calls == STEPS + 1


def test_a_cancelled_search_shows_its_best_preview() -> None:
    world = Watched()
    search = run(world, new(world, previews_only, budget=100), stop=stop_after(7))
    assert search.stopped == "cancelled" and search.best is not None and not search.best.finished
    assert "before it finished" in search.events[0]
    # Two particles were scored at step 2; the better one is shown, and not scored again.
    assert isinstance(search.verifier, Reward)
    scores = torch.cat(search.verifier.given)
    assert len(scores) == 4 and search.best.score == pytest.approx(float(scores.max()))
    torch.testing.assert_close(latents(search.best.image[None])[0], search.best.latents.double(), atol=1e-5, rtol=0)


def test_an_unscored_preview_is_scored_and_paid() -> None:
    world = Watched()
    search = run(world, new(world, starts_only, budget=100), stop=stop_after(3))
    assert search.best is not None and not search.best.finished
    assert search.meter.ledger.verifier_calls == search.meter.ledger.decodes == 1
    assert ran_well(search, world)


def test_the_incumbent_is_what_gets_finished() -> None:
    """The best preview, not the first or the last particle."""
    world = Watched()
    wanted: list[int] = []

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(5)
        particles = yield from problem.denoise(particles, 2)
        particles, scores = yield from problem.score(particles)
        wanted.append(int(particles.seeds[scores.argmax()]))
        yield from problem.start(3)  # later and unscored

    search = run(world, new(world, searcher, budget=100, seed=5))
    assert search.best is not None and search.best.seed == wanted[0] and search.best.finished
    assert wanted[0] != 5, "where the first particle is the best one, this tells nothing"


def test_the_best_finished_image_is_returned_though_later_ones_are_worse() -> None:
    world = Watched()
    search = run(world, new(world, budget=STEPS * 20, batch=3))
    assert isinstance(search.verifier, Reward) and search.best is not None
    everything = torch.cat(search.verifier.given)
    assert len(everything) == 20 and search.best.score == float(everything.max())
    winner = int(everything.argmax())
    assert 3 <= winner < 18, "neither in the first batch nor in the last"
    torch.testing.assert_close(search.best.image, torch.cat(search.verifier.seen)[winner])


def test_a_finished_image_is_scored_as_finished_whatever_its_preview_got() -> None:
    """A preview with a high score is a promise: the answer's score is that of the image itself."""

    def flatters_previews(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(images),), 100.0 if len(images) == 2 else -5.0)

    world = Watched()
    search = run(world, new(world, previews_only, budget=12, verifier=Reward(flatters_previews)))
    assert search.best is not None and search.best.finished and search.best.score == -5.0
    assert [point.score for point in search.trace] == [-5.0, -5.0]


@pytest.mark.parametrize("value", [2.0, -math.inf], ids=["equal", "all -inf"])
def test_ties_go_to_the_lowest_index(value: float) -> None:
    world = Watched()
    verifier = Reward(lambda images, prompts: torch.full((len(images),), value))
    search = run(world, new(world, budget=40, batch=4, verifier=verifier, seed=5))
    assert search.best is not None and search.best.seed == 5 and search.best.finished
    assert search.meter.ledger.nfe == 40 and search.stopped == "complete"


# --------------------------------------------------------------------------------------------- mistakes of searchers


def test_a_forgotten_from_is_named() -> None:
    def searcher(problem: Problem) -> Any:
        particles = yield from problem.start(1)
        try:
            yield problem.denoise(particles)
        finally:
            closed.append(True)

    closed: list[bool] = []
    world = Watched()
    with pytest.raises(TypeError, match=r"yielded .*denoise\(…\); write 'yield from' before it"):
        run(world, new(world, searcher, budget=20))
    assert closed == [True]


@pytest.mark.parametrize("request_", [None, 3, "score", torch.zeros(2)], ids=repr)
def test_an_unknown_request_is_refused(request_: Any) -> None:
    def searcher(problem: Problem) -> Any:
        yield request_

    world = Watched()
    with pytest.raises(TypeError, match="no request of imgscale.problem"):
        run(world, new(world, searcher, budget=20))


def test_an_error_in_a_searcher_is_the_users_to_see_and_closes_all() -> None:
    closed: list[str] = []

    def bystander(problem: Problem) -> Verb:
        try:
            while True:
                yield from problem.start(1)
        finally:
            closed.append("bystander")

    def broken(problem: Problem) -> Verb:
        yield from problem.start(1)
        raise ZeroDivisionError("mine")

    world = Watched()
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(world, new(world, bystander, budget=20), new(world, broken, budget=20))
    assert closed == ["bystander"]


def careful(closed: list[str]) -> Callable[[Problem], Verb]:
    def searcher(problem: Problem) -> Verb:
        try:
            yield from previews_only(problem)
        finally:
            closed.append("closed")

    return searcher


def explode(searches: Sequence[Search]) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["budget", "cancelled", "deadline", "interrupt"])
def test_the_searcher_is_closed_whatever_ends_it(end: str) -> None:
    closed: list[str] = []
    world = Watched()
    search = new(world, careful(closed), budget=20)
    if end == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            run(world, search, tick=explode)
    else:
        assert run(world, search, stop=stop_after(3 if end != "budget" else 10**6, end)).stopped == end
    assert closed == ["closed"]


def test_no_particles_are_no_work() -> None:
    """Resampling may leave none; the model and the verifier are then not called."""

    def searcher(problem: Problem) -> Verb:
        none = (yield from problem.start(3))[[]]
        moved = yield from problem.denoise(none, 2)
        moved, scores = yield from problem.score(moved)
        assert len(moved) == len(scores) == 0
        yield from problem.score((yield from problem.finish(moved)))

    world = Watched()
    search = run(world, new(world, searcher, budget=20))
    assert search.stopped == "complete" and ran_well(search, world)
    assert world.batches == [3, 1, 1, 1]


def test_raw_requests_are_held_to_the_limits_too() -> None:
    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.sample(1)
        while True:
            yield Score(particles)

    world = Watched()
    search = run(world, new(world, searcher, budget=Budget(nfe=20, verifier_calls=3)))
    assert search.stopped == "budget" and search.meter.ledger.verifier_calls == 3

    def predicts(problem: Problem) -> Verb:
        particles = yield from problem.sample(1)
        yield Score(particles)
        while True:
            yield Predict(particles.x, 0.5, problem.schedule.path)

    world = Watched()
    search = run(world, new(world, predicts, budget=9))
    assert search.stopped == "budget" and search.meter.ledger.nfe == world.evaluations == 9


# ----------------------------------------------------------------------------------------------- verifiers that fail


def sometimes(bad: Any) -> Reward:
    """Fails on every image whose first pixel is below the middle."""

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = near_one(images, prompts)
        return torch.where(images[:, 0, 0, 0] < 0.6, bad, scores)

    return Reward(rule)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_a_number_never_wins(bad: float) -> None:
    world = Watched()
    search = run(world, new(world, budget=80, verifier=sometimes(bad)))
    assert ran_well(search, world) and search.best is not None
    assert isinstance(search.verifier, Reward)
    given = torch.cat(search.verifier.given)
    sound = given[given.isfinite()]
    assert 0 < len(sound) < 20 and search.best.score == float(sound.max())
    assert bool(search.events) == math.isnan(bad)


def raises(images: Tensor, prompts: Sequence[str]) -> Tensor:
    raise RuntimeError("no licence")


FAILURES: dict[str, Callable[..., Any]] = {
    "raises": raises,
    "wrong shape": lambda images, prompts: torch.zeros(len(images), 1),
    "one for all": lambda images, prompts: torch.tensor(1.0),
    "no tensor": lambda images, prompts: [1.0] * len(images),
    "nothing": lambda images, prompts: None,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_verifier_that_always_fails_ends_the_search_with_an_image(failure: str) -> None:
    world = Watched()
    search = run(world, new(world, budget=400, batch=1, verifier=Reward(FAILURES[failure], name="mine")))
    assert search.stopped == "verifier" and search.best is not None and search.best.finished
    assert search.best.score == -math.inf and search.meter.ledger.verifier_calls == PATIENCE
    assert len(search.events) == 1 and "mine failed" in search.events[0]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_verifier_that_fails_now_and_then_costs_only_that(failure: str) -> None:
    calls: list[int] = []

    def rule(images: Tensor, prompts: Sequence[str]) -> Any:
        calls.append(len(images))
        return (FAILURES[failure] if len(calls) in (1, 4, 5, 6, 7) else near_one)(images, prompts)

    world = Watched()
    search = run(world, new(world, budget=40, batch=1, verifier=Reward(rule)))
    assert search.stopped == "complete" and len(calls) == 10
    assert search.best is not None and math.isfinite(search.best.score)


def test_a_broken_verifier_is_reported_at_the_end_of_a_short_search() -> None:
    world = Watched()
    search = run(world, new(world, budget=STEPS, verifier=Reward(raises)))
    assert search.stopped == "verifier" and search.best is not None and search.best.finished


def test_previews_that_cannot_be_scored_do_not_end_a_search() -> None:
    """A verifier may have no opinion of blurred previews, and yet of the image."""

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(images),), math.nan) if len(world.batches) < STEPS * 6 else near_one(images, prompts)

    world = Watched()
    search = run(world, new(world, walks_step_by_step, steps=STEPS * 6, budget=100, verifier=Reward(rule)))
    assert search.stopped == "complete" and search.best is not None and math.isfinite(search.best.score)


def test_a_users_mistake_that_a_verifier_finds_is_told() -> None:
    def refuses(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise UserError("I judge cats only.")

    world = Watched()
    with pytest.raises(UserError, match="cats only"):
        run(world, new(world, budget=40, verifier=Reward(refuses)))


@pytest.mark.parametrize("searcher", ["best-of-n", "rbf"])
def test_latents_that_blow_up_never_win(searcher: str) -> None:
    world = Watched(spoil=lambda x: x[:, 0] > 0.9)
    search = run(world, new(world, searcher, budget=160))
    assert ran_well(search, world)
    assert search.best is not None and search.best.finished and math.isfinite(search.best.score)
    assert any("finite" in event for event in search.events)
    assert isinstance(search.verifier, Reward)
    assert all(bool(images.isfinite().all()) for images in search.verifier.seen), "a NaN can spoil a whole batch"


def darkness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Likes black best, which is what stands in for an image that isn't finite."""
    return -images.mean((1, 2, 3))


def test_what_stands_in_for_a_broken_image_never_wins() -> None:
    for spoil in (lambda x: x[:, 0] > 0.9, lambda x: x[:, 0] > 0.6):
        world = Watched(spoil=spoil)
        search = run(world, new(world, budget=160, verifier=Reward(darkness)))
        assert search.best is not None and search.best.latents.isfinite().all()
        assert any("finite" in event for event in search.events)


class Blots(Watched):
    """Decodes some finite latents to NaN, as a VAE in float16 does."""

    def decode(self, x0: Tensor, cond: Condition, preview: Any = None) -> Tensor:
        images = super().decode(x0, cond, preview)
        return torch.where((x0[:, 0] > 0.6).reshape(-1, 1, 1, 1), torch.nan, images)


class Censored(Watched):
    """Blackens some images, as a safety checker does."""

    def decode(self, x0: Tensor, cond: Condition, preview: Any = None) -> Tensor:
        images = super().decode(x0, cond, preview)
        return torch.where((x0[:, 0] > 0.6).reshape(-1, 1, 1, 1), 0.0, images)


@pytest.mark.parametrize("searcher", ["best-of-n", "rbf", "rbf+dps"])
def test_black_images_are_never_ranked_and_said_so(searcher: str) -> None:
    world = Censored()
    search = run(world, new(world, searcher, budget=160, verifier=Reward(darkness)))
    assert search.best is not None and search.best.latents[0] <= 0.6 and search.best.score > -math.inf
    assert any("came out black" in event for event in search.events)
    assert any((images == 0).flatten(1).all(1).any() for images in search.verifier.seen)  # type: ignore[attr-defined]


def test_images_that_are_not_finite_never_win_and_are_not_shown_to_verifiers() -> None:
    world = Blots()
    search = run(world, new(world, budget=160, verifier=Reward(darkness)))
    assert search.best is not None and search.best.latents[0] <= 0.6 and search.best.score > -math.inf
    assert isinstance(search.verifier, Reward) and search.events
    seen = torch.cat(search.verifier.seen)
    assert len(seen) == 40 and seen.isfinite().all() and (seen.flatten(1) == 0).all(1).any()
    # As previews neither.
    world = Blots(mean=1.0)
    verifier = Reward(darkness)
    search = run(world, new(world, starts_only, budget=40, verifier=verifier), stop=stop_after(2))
    assert search.best is not None and search.best.score == -math.inf and search.best.image.isfinite().all()
    assert len(verifier.seen) == 1 and verifier.seen[0].isfinite().all()


def test_if_everything_blows_up_there_is_still_an_answer() -> None:
    world = Watched(spoil=lambda x: torch.ones(len(x), dtype=torch.bool))
    search = run(world, new(world, budget=40))
    assert ran_well(search, world)
    assert search.best is not None and search.best.score == -math.inf
    assert search.best.image.isfinite().all()
    assert search.stopped == "complete", "the verifier is not to blame"


def test_the_reward_that_cannot_be_beaten_ends_the_search() -> None:
    world = Watched()
    verifier = Reward(lambda images, prompts: (latents(images)[:, 0] > 0.75).float(), range=(0.0, 1.0))
    search = run(world, new(world, budget=4000, batch=1, verifier=verifier, ceiling=1.0, seed=4))
    assert search.stopped == "ceiling" and search.best is not None and search.best.score == 1.0
    assert search.meter.ledger.nfe < 400 and len(verifier.given) > 1
    assert [float(g.max()) for g in verifier.given] == [0.0] * (len(verifier.given) - 1) + [1.0]


def test_a_preview_at_the_ceiling_is_no_answer_yet() -> None:
    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(images),), 1.0 if len(world.batches) < STEPS else 0.5)

    world = Watched()
    search = run(world, new(world, walks_step_by_step, budget=50, verifier=Reward(rule), ceiling=1.0))
    assert search.stopped == "complete" and search.best is not None and search.best.score == 0.5


# ------------------------------------------------------------------------------------------------- reporting verifiers


def test_reports_hear_of_new_bests_only_and_never_steer() -> None:
    world = Watched()
    alone = run(world, new(world, "best-of-n", budget=120, batch=2))
    held_out = Reward(lambda images, prompts: -near_one(images, prompts), name="held-out")
    world = Watched()
    search = run(world, new(world, "best-of-n", budget=120, batch=2, reports=[held_out]))
    assert search.best is not None and alone.best is not None
    assert torch.equal(search.best.latents, alone.best.latents) and search.meter.ledger.nfe == alone.meter.ledger.nfe
    bests = {point.score for point in search.trace}
    assert held_out.images == len(bests) == search.meter.ledger.report_calls
    assert len(bests) > 1
    assert search.best.report == {"held-out": pytest.approx(-search.best.score)}
    assert all(point.report["held-out"] == pytest.approx(-point.score) for point in search.trace)


@pytest.mark.parametrize("failure", [*FAILURES, "memory"])
def test_a_report_that_fails_costs_nothing_but_itself(failure: str) -> None:
    def out_of_memory(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    broken = Reward(FAILURES.get(failure, out_of_memory), name="held-out")
    world = Watched()
    search = run(world, new(world, budget=80, reports=[broken]))
    assert search.stopped == "complete" and search.best is not None and math.isfinite(search.best.score)
    assert search.best.report == {"held-out": -math.inf} and "held-out failed" in search.events[0]


# ---------------------------------------------------------------------------------------------------- the trace


@pytest.mark.parametrize("searcher", ["best-of-n", "rbf"])
def test_the_trace_only_rises(searcher: str) -> None:
    options: dict[str, Any] = {"batch": 2} if searcher == "best-of-n" else {"chain_nfe": 10}
    world = Watched()
    search = run(world, new(world, searcher, budget=150, **options))
    points = search.trace
    assert len(points) > 1 and ran_well(search, world)
    for before, after in zip(points, points[1:], strict=False):
        assert (before.nfe, before.seconds, before.verifier_calls) <= (after.nfe, after.seconds, after.verifier_calls)
    scores = [point.score for point in points]
    assert scores[:-1] == sorted(set(scores[:-1])) and scores[-1] == scores[-2]


# ------------------------------------------------------------------------------------------------------ deadlines


def world_of(clock: Clock, seconds: float) -> tuple[Watched, Reward]:
    """A world and a verifier that take so long for each call, whatever its size; decoding is free."""

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        clock.pass_by(seconds)
        return near_one(images, prompts)

    return Watched(evaluate=lambda n: clock.pass_by(seconds)), Reward(rule)


@pytest.mark.parametrize(
    "searcher",
    [previews_only, starts_only, walks_step_by_step, "best-of-n", "rbf"],
    ids=lambda s: getattr(s, "__name__", s),
)
@pytest.mark.parametrize("seconds", [10, 13, 21, 60])
def test_a_deadline_is_kept_with_a_finished_image(searcher: Any, seconds: int, clock: Clock) -> None:
    world, verifier = world_of(clock, 1.0)
    search = run(world, new(world, searcher, budget=Budget(seconds=seconds), verifier=verifier))
    assert search.best is not None and search.best.finished
    assert search.meter.ledger.seconds <= seconds
    if searcher != walks_step_by_step:
        assert search.stopped == "deadline"
        # The slowest round takes 2 s, and what is held back is at most one of them and those of finishing.
        assert search.meter.ledger.seconds >= seconds - 2 * (1 + STEPS + 1)


def test_a_deadline_too_short_for_anything_still_leaves_an_image(clock: Clock) -> None:
    world, verifier = world_of(clock, 1.0)
    search = run(world, new(world, "rbf", budget=Budget(seconds=0.5), verifier=verifier))
    assert search.stopped == "deadline" and search.best is not None and search.best.finished
    assert world.batches[1:] == [1] * (STEPS - 1), "after the first request, one image on the straightest way"


def test_large_batches_do_not_make_finishing_look_cheap(clock: Clock) -> None:
    """Where a batch takes as long as a row does, time must be reckoned by steps, not by evaluations."""

    def searcher(problem: Problem) -> Verb:
        while True:
            yield from problem.start(32)

    world, verifier = world_of(clock, 1.0)
    search = run(world, new(world, searcher, budget=Budget(seconds=30), verifier=verifier))
    assert search.best is not None and search.best.finished and search.meter.ledger.seconds <= 30


def test_a_slow_first_step_is_forgotten(clock: Clock) -> None:
    """Compiling or warming up says nothing of later steps."""
    waits: Iterator[float] = iter([20.0])
    world = Watched(evaluate=lambda n: clock.pass_by(next(waits, 0.1)))
    search = run(world, new(world, budget=Budget(seconds=100), batch=1))
    assert search.stopped == "deadline" and 95 <= search.meter.ledger.seconds <= 100


# --------------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("searcher", ["best-of-n", "rbf"])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_the_batch_size_changes_nothing(searcher: str, max_batch: int) -> None:
    worlds = [Watched(), Watched()]
    whole, parts = (
        run(world, new(world, searcher, budget=120), max_batch=size)
        for world, size in zip(worlds, (32, max_batch), strict=True)
    )
    assert max(worlds[1].batches) <= max_batch < max(worlds[0].batches)
    assert max(worlds[1].decoded) <= max_batch
    assert whole.best is not None and parts.best is not None
    assert whole.best.seed == parts.best.seed and whole.meter.ledger.nfe == parts.meter.ledger.nfe
    assert whole.best.score == pytest.approx(parts.best.score, abs=1e-4)
    torch.testing.assert_close(whole.best.image, parts.best.image, atol=1e-4, rtol=0)


def test_slices_are_of_equal_size() -> None:
    world = Watched()
    run(world, new(world, budget=STEPS * 10, batch=10), max_batch=4)
    assert world.batches == [4, 3, 3] * STEPS


@pytest.mark.parametrize("error", MEMORY)
@pytest.mark.parametrize("where", ["evaluate", "render", "verifier"])
def test_running_out_of_memory_halves_the_batch_for_good(error: str, where: str) -> None:
    tried: list[int] = []

    def limited(n: int) -> None:
        tried.append(n)
        if n > 5:
            raise MEMORY[error]()

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        limited(len(images))
        return near_one(images, prompts)

    roomy = Watched()
    expected = run(roomy, new(roomy, budget=STEPS * 20, batch=20))
    failing: dict[str, Any] = {} if where == "verifier" else {where: limited}
    world = Watched(**failing)
    verifier = Reward(rule) if where == "verifier" else Reward()
    search = new(world, budget=STEPS * 20, batch=20, verifier=verifier)
    engine = Engine(as_denoiser(world), 32)
    engine.run([search])
    assert engine.max_batch == 5
    assert tried[:3] == [20, 10, 5] and max(tried[3:]) == 5, "remembered"
    assert search.best is not None and expected.best is not None
    assert search.best.seed == expected.best.seed and search.stopped == expected.stopped
    assert search.best.score == pytest.approx(expected.best.score, abs=1e-4)
    assert search.meter.ledger.nfe == expected.meter.ledger.nfe, "failed attempts aren't charged"


def test_a_model_too_large_for_one_row_says_so() -> None:
    def full(n: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    world = Watched(evaluate=full)
    with pytest.raises(torch.OutOfMemoryError):
        run(world, new(world, budget=40))


def test_a_verifier_too_large_for_one_image_fails_like_any_other() -> None:
    def full(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    world = Watched()
    search = run(world, new(world, budget=40, verifier=Reward(full)))
    assert search.stopped == "verifier" and search.best is not None and search.best.finished


def test_other_errors_of_the_model_are_not_taken_for_memory() -> None:
    def broken(n: int) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    world = Watched(evaluate=broken)
    with pytest.raises(RuntimeError, match="multiplied"):
        run(world, new(world, budget=40))
    assert world.batches == []


# ----------------------------------------------------------------------------------------------- concurrent searches

SHIFTS = {"left": -2.0, "middle": 0.0, "right": 3.0}


def steps_behind(k: int) -> Callable[[Problem], Verb]:
    """Best-of-n in lots of two, after k scored starts: searches with different k are at different places."""

    def searcher(problem: Problem) -> Verb:
        for _ in range(k):
            yield from problem.start(1)
        while True:
            particles = yield from problem.sample(2)
            yield from problem.score(particles)

    return searcher


def trio(world: Watched) -> list[Search]:
    return [
        new(world, steps_behind(k), budget=40, prompt=prompt, seed=3, verifier=Reward(lambda i, p: latents(i).sum(-1)))
        for k, prompt in enumerate(SHIFTS)
    ]


@pytest.mark.parametrize("mixed", [True, False])
def test_prompts_share_batches_and_rows_stay_apart(mixed: bool) -> None:
    world = Watched(shifts=SHIFTS)
    world.mixed_times = mixed
    together = trio(world)
    run(world, *together)
    for k, prompt in enumerate(SHIFTS):
        own = Watched(shifts=SHIFTS)
        alone = run(own, trio(own)[k])
        best = together[k].best
        assert alone.best is not None and best is not None
        torch.testing.assert_close(best.latents, alone.best.latents, atol=1e-5, rtol=0)
        assert best.seed == alone.best.seed
        assert together[k].meter.ledger.nfe == alone.meter.ledger.nfe == own.evaluations
        assert abs(float(alone.best.latents.mean()) - 0.5 - SHIFTS[prompt]) < 1.5
    assert world.evaluations == sum(search.meter.ledger.nfe for search in together)
    times = [{t for t, _ in call} for call in world.places]
    if mixed:
        assert max(map(len, times)) > 1, "one batch held different times"
        assert len(world.batches) < 30
    else:
        assert max(map(len, times)) == 1
    assert max(len({shift for _, shift in call}) for call in world.places) > 1, "one batch held different prompts"


def test_searches_at_one_place_share_every_batch() -> None:
    world = Watched(shifts=SHIFTS)
    world.mixed_times = False
    verifier = Reward()
    searches = [new(world, budget=STEPS, prompt=prompt, verifier=verifier) for prompt in SHIFTS]
    run(world, *searches)
    assert world.batches == [3] * STEPS and world.decoded == [3]


def test_verifiers_get_the_prompt_of_each_image() -> None:
    world = Watched(shifts=SHIFTS)
    verifier = Reward(lambda images, prompts: latents(images).sum(-1))
    searches = [new(world, budget=2 * STEPS, prompt=prompt, verifier=verifier) for prompt in SHIFTS]
    run(world, *searches)
    assert verifier.asked == [["left"] * 2 + ["middle"] * 2 + ["right"] * 2]
    means = latents(verifier.seen[0]).mean(-1)
    for i, prompt in enumerate(verifier.asked[0]):
        assert abs(means[i] - 0.5 - SHIFTS[prompt]) < 1.2


def test_different_verifiers_are_not_mixed_up() -> None:
    world = Watched()
    high = Reward(lambda images, prompts: latents(images).sum(-1))
    low = Reward(lambda images, prompts: -latents(images).sum(-1))
    up, down = new(world, budget=80, verifier=high), new(world, budget=80, verifier=low)
    run(world, up, down)
    assert up.best is not None and down.best is not None
    assert float(up.best.latents.sum()) > float(down.best.latents.sum())
    assert high.images == low.images == 20


def test_one_search_may_end_long_before_another() -> None:
    world = Watched()
    short, long = new(world, budget=STEPS), new(world, budget=STEPS * 30, batch=1)
    run(world, short, long)
    assert short.meter.ledger.nfe == STEPS and long.meter.ledger.nfe == STEPS * 30
    assert short.rounds == STEPS and long.rounds == STEPS * 30


def test_ticks_come_after_every_step_and_tell_the_truth() -> None:
    heard: list[tuple[int, int]] = []

    def tick(searches: Sequence[Search]) -> None:
        heard.append((searches[0].meter.ledger.nfe, world.evaluations))
        assert searches[0].rounds == len(heard)

    world = Watched()
    run(world, new(world, budget=STEPS * 3, batch=1), tick=tick)
    assert heard == [(n, n) for n in range(1, STEPS * 3 + 1)]


# ------------------------------------------------------------------------------------------------- nothing leaks


def test_gradients_are_off_inside_and_as_before_outside() -> None:
    modes: list[bool] = []
    world = Watched(evaluate=lambda n: modes.append(torch.is_grad_enabled()))
    with torch.enable_grad():
        search = run(world, new(world, budget=20))
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.no_grad():
        run(world, new(world, budget=20))
        assert not torch.is_grad_enabled()
    assert modes and not any(modes)
    # The answer can be worked with: a tensor of inference mode couldn't.
    assert search.best is not None
    image = search.best.image.requires_grad_()
    (image * 2).sum().backward()


def test_gradients_are_as_before_after_an_error() -> None:
    world = Watched()
    with pytest.raises(ZeroDivisionError):
        run(world, new(world, budget=40), tick=lambda searches: print(1 // 0))
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_global_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    world = Watched()
    run(world, new(world, "rbf", budget=60))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_verifier_that_returns_gradients_is_cut_off() -> None:
    weight = torch.ones(1, requires_grad=True)

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        with torch.enable_grad():
            return near_one(images, prompts) * weight

    world = Watched()
    search = run(world, new(world, budget=20, verifier=Reward(rule)))
    assert search.best is not None and math.isfinite(search.best.score)
