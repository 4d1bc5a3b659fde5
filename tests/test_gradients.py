"""The reward's gradient through verifier, decoder and model: right, paid for, within limits, and never deadly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import imgscale
from imgscale.budget import Budget
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.kernels import DDIM, ODE
from imgscale.particles import Particles, Schedule
from imgscale.paths import VP, Discrete, Linear, Path
from imgscale.problem import Problem, Verb
from imgscale.scaler import Scaler
from imgscale.search import Search
from tests.doubles import MEMORY, STEPS, Reward, Watched, as_denoiser, near_one, new, run
from tests.worlds import Mixture, World

Asked = dict[str, Any]
PATHS = [Linear(), VP(), Discrete((1 - torch.linspace(0.001, 0.2, 40)).cumprod(0))]

each_path = pytest.mark.parametrize("path", PATHS, ids=str)


def asking(kind: str, found: Asked, n: int = 3, step: int = 2) -> Callable[[Problem], Verb]:
    """A search that asks once for a gradient, of ``n`` particles at a step, and remembers the answer."""

    def searcher(problem: Problem) -> Verb:
        particles = problem.prior(n)
        if step >= 0:
            particles = yield from problem.denoise(particles, step)
        found["particles"] = particles
        if kind == "x":
            found["gradient"] = yield from problem.gradient(particles)
        elif kind == "x0":
            found["gradient"], found["scores"] = yield from problem.gradient_x0(particles)
        else:
            found["ends"], found["gradient"] = yield from problem.solve_with_gradient(particles)

    return searcher


def reward(world: World, particles: Particles, kind: str, values: Tensor) -> Tensor:
    """The reward of which the gradient is asked, by hand, of values in the place of x, or of x0."""
    cond, schedule = world.encode(""), particles.schedule
    if kind != "x0":
        x, steps = values, schedule.times[max(particles.step, 0) :]
        values = world.predict(x, steps[0], cond)
        for t, t_next in zip(steps, steps[1:], strict=False) if kind == "all" else ():
            x = ODE()(schedule.path, t, t_next, x, values)
            values = x if t_next == 0 else world.predict(x, t_next, cond)
    return near_one(world.decode(values, cond), [""])


def differences(function: Callable[[Tensor], Tensor], x: Tensor, h: float = 2e-2) -> Tensor:
    """Central differences of a function of rows (n, d) in each coordinate."""
    columns = []
    for i in range(x.shape[1]):
        step = torch.zeros_like(x)
        step[:, i] = h
        columns.append((function(x + step) - function(x - step)) / (2 * h))
    return torch.stack(columns, 1).float()


# ------------------------------------------------------------------------------------------------------ what it is


@each_path
@pytest.mark.parametrize("kind", ["x", "x0", "all"])
@pytest.mark.parametrize("step", [-1, 0, 2, STEPS - 1])
def test_gradients_are_those_of_finite_differences(path: Path, kind: str, step: int) -> None:
    for world in (Watched(path=path, cov=torch.tensor([[0.3, 0.1], [0.1, 0.2]])), Mixture(path=path, std=0.5)):
        found: Asked = {}
        run(world, new(world, asking(kind, found, step=step), budget=100))
        particles = found["particles"]
        at = particles.x0 if kind == "x0" else particles.x
        expected = differences(partial(reward, world, particles, kind), at)
        torch.testing.assert_close(found["gradient"], expected, rtol=0.02, atol=2e-3)
        # At t = 1 of a path where no data is left, the model's answer is one and the same.
        assert found["gradient"].abs().max() > 1e-3 or (kind == "x" and path == Linear() and step <= 0)


def test_the_whole_solution_comes_with_its_gradient() -> None:
    """Finished and scored as an ordinary sample is, but for the rounding of other batches."""
    world, found = Watched(), Asked()
    search = run(world, new(world, asking("all", found, step=-1), budget=100, seed=5))
    ends = found["ends"]
    assert ends.finished and len(ends) == 3 and torch.equal(ends.x, ends.x0)
    torch.testing.assert_close(ends.scores, near_one(world.decode(ends.x0, world.encode("")), [""]))
    expected = world.encode("")
    x = found["particles"].x
    for t, t_next in ((1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)):
        x = ODE()(world.path, t, t_next, x, world.predict(x, t, expected))
    torch.testing.assert_close(ends.x0, x)
    assert search.best is not None and search.best.finished and search.best.score == float(ends.scores.max())


def test_gradients_on_another_path() -> None:
    found: Asked = {}

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(2, Schedule(VP(), (1.0, 0.6, 0.3, 0.1)))
        found["particles"] = yield from problem.denoise(particles, 2, DDIM())
        found["gradient"] = yield from problem.gradient(found["particles"])

    world = Watched()
    run(world, new(world, searcher, budget=100))
    particles = found["particles"]

    def by_hand(x: Tensor) -> Tensor:
        from imgscale.paths import convert

        moved, t = convert(x, particles.time, VP(), world.path)
        return near_one(world.decode(world.predict(moved, t, world.encode("")), world.encode("")), [""])

    torch.testing.assert_close(found["gradient"], differences(by_hand, particles.x), rtol=0.02, atol=2e-3)


@cache
def shapes() -> Scaler:
    return imgscale.load("shapes-flow", device="cpu")


@pytest.mark.parametrize("kind", ["x", "x0", "all"])
def test_gradients_of_clip_through_a_real_model(kind: str) -> None:
    """Along the gradient and along a random direction, with guidance on."""
    found: Asked = {}
    steps, h = 3, 5e-4

    def both(problem: Problem, rng: Any) -> Verb:
        yield from asking(kind, found, n=2, step=1)(problem)
        particles, gradient = found["particles"], found["gradient"]
        random = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
        place = "x0" if kind == "x0" else "x"
        for direction in (gradient, random):
            unit = direction / direction.square().mean((1, 2, 3), keepdim=True).sqrt()
            slopes = []
            for sign in (-1, 1):
                moved = getattr(particles, place) + sign * h * unit
                if kind == "x0":
                    _, scores = yield from problem.gradient_x0(_with(particles, x0=moved))
                else:
                    again = Particles(
                        Schedule(problem.schedule.path, (particles.time, *particles.schedule.times[2:])),
                        -1,
                        moved,
                        moved,
                        particles.keys,
                        particles.seeds,
                    )
                    to = 0 if kind == "x" else None
                    _, scores = yield from problem.score((yield from problem.denoise(again, to)))
                slopes.append(scores)
            measured = (slopes[1] - slopes[0]) / (2 * h)
            found.setdefault("pairs", []).append(((gradient * unit).sum((1, 2, 3)).double(), measured))

    shapes()(
        "two red circles above a blue square",
        searcher=both,
        budget=1000,
        num_inference_steps=steps,
        progress=False,
        plain=False,
    )
    (along, measured), (across, other) = found["pairs"]
    assert (along > 1e-3).all()
    torch.testing.assert_close(along, measured, rtol=0.1, atol=1e-3)
    torch.testing.assert_close(across, other, rtol=0.1, atol=float(along.min()) / 20)


def _with(particles: Particles, **changes: Any) -> Particles:
    from dataclasses import replace

    return replace(particles, scores=None, **changes)


# ------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize(
    ("kind", "step", "nfe"),
    [("x", 2, 1), ("x", -1, 1), ("x0", 2, 0), ("all", -1, STEPS), ("all", 0, STEPS), ("all", 2, 2)],
)
def test_what_a_gradient_costs(kind: str, step: int, nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, asking(kind, {}, step=step), budget=100))
    ledger = search.meter.ledger
    before = 3 * (step + 1)
    finish = 0 if kind == "all" else world.evaluations - before - 3 * nfe
    assert ledger.nfe == world.evaluations == before + 3 * nfe + finish
    assert 0 <= finish <= STEPS, "the engine finishes one image in the end"
    images = 3 + (kind != "all")
    assert (ledger.gradients, ledger.decodes, ledger.verifier_calls) == (3, images, images)
    assert isinstance(search.verifier, Reward)
    assert sum(world.decoded) == search.verifier.images == images


def test_children_of_one_parent_share_their_gradient_and_it_is_remembered() -> None:
    found: Asked = {}

    def searcher(problem: Problem) -> Verb:
        parents = yield from problem.start(2)
        parents = yield from problem.denoise(parents, 1)
        children = parents.branch(5)
        found["children"] = yield from problem.gradient(children)
        found["parents"] = yield from problem.gradient(parents)
        found["third"] = yield from problem.gradient((yield from problem.denoise((yield from problem.start(1)), 1)))
        problem.meter.ledger.report_calls = problem.meter.ledger.gradients

    world = Watched()
    search = run(world, new(world, searcher, budget=100))
    assert search.meter.ledger.report_calls == 3, "two parents, and another one"
    assert torch.equal(found["children"], found["parents"].repeat_interleave(5, 0))
    assert not torch.equal(found["third"][0], found["parents"][0])


@pytest.mark.parametrize("kind", ["x", "x0", "all"])
def test_gradients_of_nothing_cost_nothing(kind: str) -> None:
    world, found = Watched(), Asked()
    search = run(world, new(world, asking(kind, found, n=0), budget=100))
    assert found["gradient"].shape == (0, 2) and search.meter.ledger.gradients == 0
    assert search.best is not None and search.best.finished


def climbing(problem: Problem) -> Verb:
    """Asks for gradients of every kind as long as it may."""
    while True:
        particles = yield from problem.start(2)
        for step in range(1, problem.schedule.steps):
            yield from problem.gradient(particles)
            yield from problem.gradient_x0(particles)
            particles = yield from problem.denoise(particles, step, DDIM())
        yield from problem.solve_with_gradient(particles)


LIMITS = [
    *({"nfe": n} for n in (STEPS, 5, 7, 9, 16, 33, 60)),
    *({kind: n, "nfe": 60} for kind in ("verifier_calls", "decodes", "gradients") for n in (1, 2, 3, 8, 19)),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_gradients_stay_within_every_limit_and_leave_an_image(limits: dict[str, int]) -> None:
    world = Watched()
    search = run(world, new(world, climbing, budget=Budget(**limits)))
    assert search.stopped == "budget" and search.best is not None and search.best.finished
    for kind in ("nfe", "verifier_calls", "decodes", "gradients"):
        assert search.meter.left(kind) >= 0, kind
    assert isinstance(search.verifier, Reward)
    ledger = search.meter.ledger
    assert (ledger.nfe, ledger.decodes) == (world.evaluations, sum(world.decoded))
    assert ledger.verifier_calls == search.verifier.images


def test_a_budget_of_gradients_alone_is_refused() -> None:
    """A search that takes none would never end."""
    with pytest.raises(UserError, match="needs a limit"):
        Budget(gradients=5)
    assert Budget(gradients=5, nfe=100).gradients == 5


# -------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("kind", ["x", "x0", "all"])
def test_a_verifier_without_gradients_is_refused_in_one_sentence(kind: str) -> None:
    world = Watched()
    verifier = Reward()
    verifier.differentiable = False
    with pytest.raises(UserError, match="verifier has none; take one that has") as caught:
        run(world, new(world, asking(kind, {}, step=-1), budget=100, verifier=verifier))
    assert "\n" not in str(caught.value) and world.evaluations == 0


def test_scores_that_do_not_depend_on_the_image_have_no_slope() -> None:
    world, found = Watched(), Asked()
    rule = Reward(lambda images, prompts: torch.zeros(len(images)))
    run(world, new(world, asking("x", found), budget=100, verifier=rule))
    assert (found["gradient"] == 0).all()


def test_gradients_that_are_no_numbers_count_as_nothing_and_are_told() -> None:
    """Of one row only: the others keep theirs."""

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        rows = images[:, 0, 0].double().logit()
        root = (rows[:, 0] - rows[:, 0].detach().min()).sqrt()  # of infinite slope at its smallest
        return root - rows[:, 1].square()

    world, found = Watched(), Asked()
    search = run(world, new(world, asking("x", found), budget=100, verifier=Reward(rule)))
    zero = (found["gradient"] == 0).all(1)
    assert int(zero.sum()) == 1 and found["gradient"].isfinite().all()
    assert "Some gradients weren't finite; they count as 0." in search.events


@pytest.mark.parametrize("kind", ["x", "x0", "all"])
def test_what_blows_up_spoils_neither_its_batch_nor_the_search(kind: str) -> None:
    found: Asked = {}

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        assert images.isfinite().all(), "never shown to verifiers"
        return near_one(images, prompts)

    world = Watched(spoil=lambda x: x[:, 0] > 0.5)
    search = run(world, new(world, asking(kind, found, n=8, step=1), budget=100, verifier=Reward(rule)))
    bad = ~found["particles"].x0.isfinite().all(1)
    assert 0 < int(bad.sum()) < 8
    slopes = (found["gradient"] != 0).any(1)
    assert not slopes[bad].any() and slopes.any()
    assert kind == "all" or slopes[~bad].all(), "on its way to the end another one blows up"
    if kind == "x0":
        assert (found["scores"][bad] == -math.inf).all() and found["scores"][~bad].isfinite().all()
    assert search.best is not None and search.best.finished


def test_a_verifier_that_fails_has_no_slope_and_is_survived() -> None:
    def broken(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise ZeroDivisionError("oops")

    world, found = Watched(), Asked()
    search = run(world, new(world, asking("x0", found), budget=100, verifier=Reward(broken)))
    assert (found["gradient"] == 0).all() and (found["scores"] == -math.inf).all()
    assert search.best is not None and search.stopped == "verifier"
    assert any("ZeroDivisionError" in event for event in search.events)


# ------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("error", MEMORY)
@pytest.mark.parametrize("where", ["evaluate", "render", "verifier"])
def test_running_out_of_memory_halves_the_batch_for_good(error: str, where: str) -> None:
    tried: list[int] = []

    def limited(n: int) -> None:
        if torch.is_grad_enabled():
            tried.append(n)
            if n > 3:
                raise MEMORY[error]()

    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        limited(len(images))
        return near_one(images, prompts)

    world, found, expected = Watched(), Asked(), Asked()
    run(world, new(world, asking("x", expected, n=12), budget=100))
    failing: dict[str, Any] = {} if where == "verifier" else {where: limited}
    world = Watched(**failing)
    search = new(world, asking("x", found, n=12), budget=100, verifier=Reward(rule) if where == "verifier" else None)
    engine = Engine(as_denoiser(world), 48)
    engine.run([search])
    assert engine.gradient_batch == 3 and engine.max_batch == 48
    assert tried[0] == 12 and max(tried[2:]) == 3
    torch.testing.assert_close(found["gradient"], expected["gradient"])


@pytest.mark.parametrize("kind", ["x", "x0", "all"])
def test_batches_and_company_change_nothing(kind: str) -> None:
    shifts = {"left": -1.0, "right": 2.0}

    def gradients(max_batch: int, *prompts: str) -> list[Asked]:
        world = Watched(shifts=shifts)
        found: list[Asked] = [{} for _ in prompts]
        searches = [
            new(world, asking(kind, f, n=5 + i), budget=100, prompt=p, seed=i)
            for i, (f, p) in enumerate(zip(found, prompts, strict=True))
        ]
        run(world, *searches, max_batch=max_batch)
        return found

    together = gradients(64, "left", "right")
    alone = gradients(64, "left")
    small = gradients(4, "left", "right")
    torch.testing.assert_close(alone[0]["gradient"], together[0]["gradient"])
    for a, b in zip(small, together, strict=True):
        torch.testing.assert_close(a["gradient"], b["gradient"])


def test_graphs_do_not_leak() -> None:
    world, found = Watched(), Asked()
    search = run(world, new(world, asking("all", found), budget=100))
    assert not any(t.requires_grad for t in (found["gradient"], found["ends"].x, found["ends"].scores))
    assert search.best is not None and not search.best.image.requires_grad and torch.is_grad_enabled()


# --------------------------------------------------------------------------------------- re-noising, and noise itself


@each_path
@pytest.mark.parametrize("to", [0, 1, 2])
def test_renoised_particles_have_the_law_of_their_place(path: Path, to: int) -> None:
    found: Asked = {}

    def searcher(problem: Problem) -> Verb:
        data = world.data(4000, seed=3).float()
        first = problem.prior(1)
        keys = torch.arange(4000)
        ends = Particles(first.schedule, STEPS, data, data, keys, keys)
        found["back"] = yield from problem.renoise(ends, to)
        found["again"] = yield from problem.renoise(ends, to)
        found["branched"] = yield from problem.renoise(ends[:2].branch(2), to)

    world = Watched(path=path)
    run(world, new(world, searcher, budget=10**5), max_batch=10**5)
    back, t = found["back"], found["back"].time
    alpha, sigma = float(path.alpha(t)), float(path.sigma(t))
    assert back.step == to and back.scores is None
    std = math.sqrt(alpha**2 * 0.09 + sigma**2)
    assert (back.x.mean(0) - alpha * 0.5).abs().max() < 4 * std / 4000**0.5
    assert (back.x.std(0) / std - 1).abs().max() < 4 / (2 * 4000) ** 0.5
    torch.testing.assert_close(back.x0, world.predict(back.x, t, world.encode("")), rtol=1e-4, atol=1e-4)
    assert torch.equal(found["again"].x, back.x), "the noise follows from the keys"
    four = found["branched"]
    assert len(torch.unique(four.x[:, 0])) == 4, "branches go back different ways"
    assert not set(back.keys.tolist()) & set(range(4000)), "and on with new keys"


def test_renoised_to_another_path() -> None:
    found: Asked = {}
    schedule = Schedule(VP(), (1.0, 0.5, 0.2))

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.denoise(problem.prior(500), 3)
        found["from"] = particles
        found["back"] = yield from problem.renoise(particles, 1, schedule)

    world = Watched()
    run(world, new(world, searcher, budget=10**4), max_batch=1000)
    back = found["back"]
    assert back.schedule == schedule and back.step == 1
    alpha, sigma = float(VP().alpha(0.5)), float(VP().sigma(0.5))
    std = math.sqrt(alpha**2 * 0.09 + sigma**2)
    assert (back.x.std(0) / std - 1).abs().max() < 0.15


def test_going_back_is_paid_and_within_the_budget() -> None:
    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(1)
        while True:
            particles = yield from problem.denoise(particles, 1, DDIM())
            particles = yield from problem.renoise(particles, 0)

    for nfe in range(STEPS, 20):
        world = Watched()
        search = run(world, new(world, searcher, budget=nfe))
        assert search.meter.ledger.nfe == world.evaluations <= nfe
        assert search.best is not None and search.best.finished


def test_the_prior_is_noise_that_the_model_has_not_seen() -> None:
    found: Asked = {}

    def searcher(problem: Problem) -> Verb:
        first, second = problem.prior(2), problem.prior(3)
        found["noise"] = torch.cat([first.x, second.x])
        assert (first.step, first.time, len(second)) == (-1, 1.0, 3)
        assert problem.meter.ledger.nfe == 0
        started = yield from problem.denoise(first, 0)
        found["start"] = started
        found["end"] = yield from problem.denoise(second)
        own = Particles(first.schedule, -1, -first.x, first.x0, first.keys, first.seeds)
        found["mirrored"] = yield from problem.denoise(own, 0)

    world = Watched()
    run(world, new(world, searcher, budget=1000, seed=9))
    plain: Asked = {}

    def samples(problem: Problem) -> Verb:
        plain["start"] = yield from problem.start(2)
        plain["end"] = yield from problem.sample(3)

    run(world, new(world, samples, budget=1000, seed=9))
    assert torch.equal(found["start"].x, plain["start"].x) and torch.equal(found["start"].x0, plain["start"].x0)
    torch.testing.assert_close(found["end"].x, plain["end"].x)
    assert torch.equal(found["noise"][:2], found["start"].x)
    assert torch.equal(found["mirrored"].x, -found["start"].x)


def test_the_engine_alone_charges_raw_gradient_requests() -> None:
    from imgscale.problem import Gradient

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(4)
        yield Gradient(particles, 0)

    world = Watched()
    search: Search = run(world, new(world, searcher, budget=Budget(nfe=100, gradients=3)))
    assert search.meter.ledger.gradients == 0 and search.stopped == "budget"
    assert search.best is not None and search.best.finished
