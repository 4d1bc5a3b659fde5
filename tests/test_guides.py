"""Guides and the searchers made of them: the papers' formulas, the tilted law in the limit, costs, and compositions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale import registry
from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.kernels import DDIM, ODE, Glass, Kernel
from imgscale.keys import fold, normal
from imgscale.paths import VP, Linear
from imgscale.problem import NOISE, RENOISE, Problem, Verb
from imgscale.searchers.dps import DPS, limited, spread
from imgscale.searchers.local import Local, growth
from imgscale.searchers.noise_gradient import noise_gradient, norm_slope
from tests.doubles import STEPS, Reward, Watched, latents, near_one, new, run

KINDS = ("nfe", "verifier_calls", "decodes", "gradients")


def linear(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward whose gradient in x0 is 1 everywhere."""
    return latents(images).sum(-1)


def one_transition(guide: Any, kernel: Kernel, step: int = 1, rule: Any = linear) -> dict[str, Any]:
    """x before and after a guided transition of two particles, and what goes in."""
    found: dict[str, Any] = {}

    def searcher(problem: Problem) -> Verb:
        before = yield from problem.denoise(problem.prior(2), step)
        after = yield from problem.denoise(before, step + 1, kernel, guide)
        found.update(x=before.x, x0=before.x0, after=after.x, keys=before.keys, time=before.time)
        found["noise"] = normal(fold(before.keys, NOISE, step + 1), (2,))
        found["next"] = after.time

    world = Watched()
    found["world"] = world
    found["search"] = run(world, new(world, searcher, budget=100, verifier=Reward(rule)))
    return found


# ----------------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("kernel", [DDIM(1), DDIM(0.5), ODE()], ids=str)
def test_dps_shifts_x0_by_the_gradient_through_the_model(kernel: Kernel) -> None:
    found = one_transition(DPS(scale=0.3, limit=10.0), kernel)
    t, t_next = found["time"], found["next"]
    a, s = 1 - t, t
    gain = a * 0.09 / (a**2 * 0.09 + s**2)  # d x0 / dx of the Gaussian
    shift = torch.full((2, 2), s**2 / a * 0.3 * gain)
    expected = kernel(Linear(), t, t_next, found["x"], found["x0"] + shift, found["noise"])
    torch.testing.assert_close(found["after"], expected, rtol=1e-4, atol=1e-4)
    # Which is the scale times the covariance of x0 given x.
    torch.testing.assert_close(shift, torch.full((2, 2), 0.3 * 0.09 * s**2 / (a**2 * 0.09 + s**2)))


def test_dps_without_scale_is_the_kernel() -> None:
    found = one_transition(DPS(scale=0.0), DDIM(1))
    expected = DDIM(1)(Linear(), found["time"], found["next"], found["x"], found["x0"], found["noise"])
    assert torch.equal(found["after"], expected)


def test_glass_is_shifted_at_every_inner_step() -> None:
    """The shift of a frozen model would move y by b shift, and x' with it."""
    plain, guided = one_transition(DPS(scale=0.0), Glass(3)), one_transition(DPS(scale=0.5, limit=10.0), Glass(3))
    moved = guided["after"] - plain["after"]
    assert (moved > 0).all()
    single = one_transition(DPS(scale=0.5, limit=10.0), DDIM(1))["after"]
    unguided = one_transition(DPS(scale=0.0), DDIM(1))["after"]
    assert (moved > 0.8 * (single - unguided)).all()


def test_shifts_are_limited_row_by_row() -> None:
    shift = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]])
    held = limited(shift, 0.5)
    assert held[0].square().mean().sqrt() == pytest.approx(0.5)
    torch.testing.assert_close(held[0] / held[0, 0], shift[0] / 3)
    assert torch.equal(held[1:], shift[1:])
    found = one_transition(DPS(scale=1e6, limit=0.5), ODE())
    plain = ODE()(Linear(), found["time"], found["next"], found["x"], found["x0"])
    # Of x0 by .5 in both coordinates; x' = a' x0 + s' / s (x - a x0).
    t, t_next = found["time"], found["next"]
    weight = (1 - t_next) - t_next / t * (1 - t)
    torch.testing.assert_close(found["after"] - plain, torch.full((2, 2), 0.5 * weight), rtol=1e-4, atol=1e-4)


def test_where_there_is_no_data_in_x_the_shift_is_finite() -> None:
    found = one_transition(DPS(scale=10.0), DDIM(1), step=0)
    assert found["time"] == 1.0 and found["after"].isfinite().all()


def test_local_takes_both_gradients_and_its_growth() -> None:
    """One turn without re-noising: rho through the model, then two steps of mu, each of the reward's slope 1 in x0."""
    guide = Local(rho=0.3, mu=0.05, iterations=2, recur=1, schedule="increase", limit=10.0)
    found = one_transition(guide, DDIM(1))
    t, t_next = found["time"], found["next"]
    a, s = 1 - t, t
    strength = a / (sum(1 - k / STEPS for k in range(1, STEPS + 1)) / STEPS)
    shift = strength * (0.3 * 0.09 * s**2 / (a**2 * 0.09 + s**2) + 2 * 0.05)
    expected = DDIM(1)(Linear(), t, t_next, found["x"], found["x0"] + shift, found["noise"])
    torch.testing.assert_close(found["after"], expected, rtol=1e-4, atol=1e-4)


def test_local_goes_back_and_down_again() -> None:
    """Two turns without gradients: down, up by forward noising, and down with other noise."""
    found = one_transition(Local(rho=0.0, mu=0.0, recur=2), DDIM(1))
    t, t_next = found["time"], found["next"]
    x = DDIM(1)(Linear(), t, t_next, found["x"], found["x0"], found["noise"])
    from imgscale import kernels

    keys = fold(fold(found["keys"], 0), RENOISE, 1)
    x = kernels.renoise(Linear(), t_next, t, x, normal(fold(keys, NOISE, 1), (2,)))
    world = found["world"]
    noise = normal(fold(keys, NOISE, 2), (2,))
    x = DDIM(1)(Linear(), t, t_next, x, world.predict(x, t, world.encode("")), noise)
    torch.testing.assert_close(found["after"], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", ["increase", "decrease", "constant"])
def test_growth_has_a_mean_of_one(schedule: Any) -> None:
    found: list[float] = []

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(1)
        found.extend(growth(schedule, replace(particles, step=step)) for step in range(problem.schedule.steps))

    world = Watched()
    run(world, new(world, searcher, budget=100))
    assert sum(found) / len(found) == pytest.approx(1.0)
    order = sorted(found, reverse=schedule == "decrease")
    assert found == order and (len(set(found)) == 1) == (schedule == "constant")


def test_the_norms_slope_is_that_of_its_density() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    norm = x.flatten(1).norm(dim=1)
    (expected,) = torch.autograd.grad((7 * norm.log() - norm.square() / 2).sum(), x)
    torch.testing.assert_close(norm_slope(x.detach()), expected)


# --------------------------------------------------------------------------------------------- the law in the limit


def tilted(scale: float, variance: float = 0.09, mean: float = 0.5) -> tuple[float, float]:
    """Mean and variance of N(mean, variance) times exp(scale * -(x0 - 1)^2)."""
    precision = 1 / variance + 2 * scale
    return (mean / variance + 2 * scale) / precision, 1 / precision


def samples(world: Watched, guide: Any, steps: int, n: int = 1500) -> Tensor:
    """Guided samples, float64 (n * d,): the coordinates of the world are independent."""
    found: list[Tensor] = []

    def searcher(problem: Problem) -> Verb:
        ends = yield from problem.denoise(problem.prior(n), kernel=DDIM(1), guide=guide)
        found.append(ends.x.double())

    run(world, new(world, searcher, budget=10**7, steps=steps), max_batch=10**5)
    return found[0].flatten()


def test_langevin_samples_approach_the_tilted_law_as_turns_and_steps_grow() -> None:
    """N(.5, .09) tilted by exp(-8 (x0 - 1)^2): mean .795, standard deviation .192.

    The gradient at x0, the mean, in the place of the mean over x0 given x, leaves the law of a noise level slightly
    wrong; at small noise levels it is right, and turns there forget where a sample came from.
    """
    mean, variance = tilted(8.0)
    errors = []
    for steps, recur in ((6, 1), (12, 2), (24, 6)):
        world = Watched(shape=(4,))
        x = samples(world, Local(rho=8.0, recur=recur, schedule="constant", limit=100.0), steps)
        errors.append(abs(float(x.mean()) - mean) / variance**0.5 + abs(float(x.std()) / variance**0.5 - 1))
    assert errors[0] > 0.1 and errors[1] < 0.8 * errors[0] and errors[2] < 0.5 * errors[0], errors


def test_dps_moves_the_law_towards_the_tilted_one() -> None:
    mean, _ = tilted(2.0)
    world = Watched(shape=(4,))
    x = samples(world, DPS(scale=2.0, limit=100.0), 20)
    assert abs(float(x.mean()) - mean) < 0.25 * (mean - 0.5)


# ---------------------------------------------------------------------------------------------------- what they cost


@pytest.mark.parametrize(
    ("name", "options", "nfe", "gradients"),
    [
        ("dps", {}, STEPS, STEPS),
        ("dps", {"kernel": "glass(3)"}, STEPS + 2 * (STEPS - 1), STEPS),
        ("local", {"recur": 1}, STEPS, STEPS),
        ("local", {"recur": 3}, 3 * STEPS, 3 * STEPS),
        ("local", {"recur": 2, "mu": 0.1, "iterations": 3}, 2 * STEPS, 2 * 4 * STEPS),
        ("local", {"recur": 2, "mu": 0.1, "rho": 0.0}, 2 * STEPS, 2 * STEPS),
        ("noise-gradient", {"iterations": 3, "chains": 1, "steps": 2}, 3 * 2 + STEPS, 3),
        ("noise-gradient", {"iterations": 3, "chains": 1, "steps": STEPS}, 3 * STEPS, 3),
    ],
)
def test_what_a_guided_sample_costs(name: str, options: dict[str, Any], nfe: int, gradients: int) -> None:
    """x0 and gradient come of one evaluation; what is left goes to plain samples."""
    world = Watched()
    search = run(world, new(world, name, budget=nfe, options=options))
    ledger = search.meter.ledger
    assert (ledger.nfe, ledger.gradients) == (nfe, gradients) == (world.evaluations, gradients)
    scored = 1 if name != "noise-gradient" or options["steps"] < STEPS else 0
    assert ledger.verifier_calls == gradients + scored
    world = Watched()
    search = run(world, new(world, name, budget=nfe + STEPS - 1, options=options))
    assert search.meter.ledger.gradients == gradients


@pytest.mark.parametrize("name", ["dps", "local", "noise-gradient"])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("limit", [1, 2, 5, 9, 30])
def test_no_limit_is_passed(name: str, kind: str, limit: int) -> None:
    world = Watched()
    search = run(world, new(world, name, budget=Budget(**{"nfe": 60, kind: limit})))
    for each in KINDS:
        assert search.meter.left(each) >= 0, each
    assert search.best is not None and search.best.finished and search.stopped == "complete"
    if kind == "gradients":
        assert search.meter.left("nfe") < STEPS, "the rest went to plain samples"


@pytest.mark.parametrize("name", ["dps", "local", "noise-gradient"])
def test_a_verifier_without_gradients_is_refused_before_anything_is_spent(name: str) -> None:
    world = Watched()
    verifier = Reward()
    verifier.differentiable = False
    for spec in [name] + [f"rbf+{name}"] * (name != "noise-gradient"):
        with pytest.raises(UserError, match="verifier has none"):
            run(world, new(world, spec, budget=60, verifier=verifier))
    assert world.evaluations == 0


@pytest.mark.parametrize("name", ["dps", "local"])
def test_a_guide_takes_no_guide(name: str) -> None:
    world = Watched()
    with pytest.raises(UserError, match="takes no other"):
        run(world, new(world, f"{name}+dps", budget=60))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("dps", {"scale": -1.0}, "scale of at least 0"),
    ("dps", {"limit": 0.0}, "limit above it"),
    ("dps", {"scale": math.nan}, "scale of at least 0"),
    ("dps", {"batch": 0}, "batch can't be 0"),
    ("dps", {"kernel": "euler"}, "Unknown kernel 'euler'"),
    ("local", {"rho": -1.0}, "rho (-1.0)"),
    ("local", {"recur": 0}, "recur (0) must be at least 1"),
    ("local", {"iterations": 0}, "iterations (0)"),
    ("local", {"schedule": "linear"}, "'increase' or 'decrease' or 'constant'"),
    ("noise-gradient", {"lr": 0.0}, "lr can't be 0.0"),
    ("noise-gradient", {"iterations": 0}, "iterations can't be 0"),
    ("noise-gradient", {"steps": 0}, "steps can't be 0"),
    ("noise-gradient", {"clip": -0.1}, "clip can't be -0.1"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD, ids=str)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    world = Watched()
    with pytest.raises(UserError) as caught:
        run(world, new(world, name, budget=60, options=options))
    assert message in str(caught.value) and "\n" not in str(caught.value) and world.evaluations == 0
    if name in registry.guide and next(iter(options)) in registry.guide[name].options():
        entry = registry.guide[name]
        with pytest.raises(UserError):
            entry.target(**entry.check(options))


# ------------------------------------------------------------------------------------------------------ what they do


@pytest.mark.parametrize("name", ["dps", "local", "noise-gradient"])
def test_gradients_beat_plain_samples_at_equal_cost(name: str) -> None:
    """In eight dimensions, where luck doesn't help."""
    gains = []
    for seed in range(6):
        found = run(world := Watched(shape=(8,)), new(world, name, budget=60, seed=seed)).best
        plain = run(world := Watched(shape=(8,)), new(world, "best-of-n", budget=60, seed=seed)).best
        assert found is not None and plain is not None
        gains.append(found.score - plain.score)
    assert sum(gains) / len(gains) > 0.2, gains


def test_noise_gradient_keeps_the_best_iterate() -> None:
    """A learning rate that throws it about: the answer is the best image ever solved, not the last."""
    world = Watched()
    search = run(world, new(world, "noise-gradient", budget=STEPS * 8, steps=STEPS, lr=500.0, iterations=8, chains=1))
    assert isinstance(search.verifier, Reward) and search.best is not None
    rewards = torch.cat(search.verifier.given)
    assert search.best.score == float(rewards.max()) > float(rewards[-1])


def test_noise_gradient_holds_the_norm() -> None:
    world = Watched(shape=(64,))
    found: dict[str, Tensor] = {}

    def flat(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return latents(images).sum(-1) * 1e-9

    def searcher(problem: Problem) -> Verb:
        prior = problem.prior

        def short(n: int, *args: Any) -> Any:
            noise = prior(n, *args)
            return replace(noise, x=2 * noise.x)

        problem.prior = short  # type: ignore[method-assign, assignment]
        verb = noise_gradient(problem, None, iterations=60, steps=1, chains=1, clip=10.0, regularise=0.05, lr=0.5)  # type: ignore[arg-type]
        request = next(verb)
        try:
            while True:
                if hasattr(request, "particles") and request.particles.step < 0:
                    found["x"] = request.particles.x
                request = verb.send((yield request))
        except StopIteration:
            pass

    run(world, new(world, searcher, budget=STEPS + 60, verifier=Reward(flat)))
    assert found["x"].norm() == pytest.approx(8.0, rel=0.15), "sqrt(63), and it began at 16"


COMPOSED = ["rbf+dps", "rbf(draws=3)+dps(scale=2)", "rbf+local", "svdd+dps", "bfs(local)", "dfs(local)", "smc+dps"]


@pytest.mark.parametrize("spec", COMPOSED)
@pytest.mark.parametrize("nfe", [STEPS, 7, 13, 33, 90])
def test_compositions_stay_within_budget_and_answer(spec: str, nfe: int) -> None:
    if registry.compose(spec)[0].partition("(")[0] not in registry.searcher:
        pytest.skip("not there yet")
    for distilled in (False, True):
        world = Watched()
        search = run(world, new(world, spec, budget=nfe, distilled=distilled))
        assert search.meter.ledger.nfe == world.evaluations <= nfe
        assert search.best is not None and search.best.finished
        if nfe == 90:
            assert search.meter.ledger.gradients > 0
        shown = world.decode(search.best.latents[None], world.encode(""))
        assert search.best.score == pytest.approx(float(near_one(shown, [""])), abs=1e-5)


def test_a_guide_bends_the_searchers_transitions_and_not_plain_samples() -> None:
    world = Watched()
    guided, alone = (new(world, spec, budget=100) for spec in ("best-of-n+dps", "best-of-n"))
    run(world, guided, alone)
    assert guided.best is not None and alone.best is not None
    assert torch.equal(guided.best.latents, alone.best.latents), "best-of-n takes no transitions of its own"
    moved = [run(w := Watched(), new(w, spec, budget=60, explore=1.0)).best for spec in ("rbf+dps", "rbf")]
    assert moved[0] is not None and moved[1] is not None
    assert not torch.allclose(moved[0].latents, moved[1].latents, atol=1e-3)


def test_spread_is_that_of_the_path() -> None:
    found: list[tuple[float, float]] = []

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(1)
        found.extend((spread(replace(particles, step=step)), problem.schedule.times[step]) for step in range(1, STEPS))

    run(world := Watched(path=VP()), new(world, searcher, budget=100))
    for value, t in found:
        assert value == pytest.approx(float(VP().sigma(t) ** 2 / VP().alpha(t)))
