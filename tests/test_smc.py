"""SMC: its weights against a direct computation, what resampling must keep together, and the law it samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch

from imgscale.budget import Budget
from imgscale.errors import UserError
from imgscale.kernels import DDIM
from imgscale.keys import fold, normal
from imgscale.particles import Particles
from imgscale.paths import Discrete
from imgscale.potentials import Potential, Tempering, Tilt, log_potential
from imgscale.problem import NOISE, Problem, Verb
from imgscale.resampling import SCHEMES, Counts, Floats, Scheme, ssp, weights
from imgscale.searchers._population import course
from imgscale.searchers.smc import steer
from tests.doubles import STEPS, Reward, Scripted, Watched, near_one, new, run

POTENTIALS: tuple[Potential, ...] = get_args(Potential)
TEMPERINGS: tuple[Tempering, ...] = get_args(Tempering)

each_potential = pytest.mark.parametrize("potential", POTENTIALS)
each_tempering = pytest.mark.parametrize("tempering", TEMPERINGS)


class Watch:
    """A scheme that notes the log-weights it is given and returns counts of a script, or leaves all as they are."""

    def __init__(self, *script: Sequence[int]) -> None:
        self.script = list(script)
        self.seen: list[Floats] = []

    def __call__(self, log_weights: Any, rng: np.random.Generator) -> Counts:
        self.seen.append(log_weights.copy())
        return np.array(self.script.pop(0) if self.script else np.ones(len(log_weights), int))


def population(
    world: Watched,
    verifier: Reward,
    n: int,
    places: Sequence[int],
    tilt: Tilt,
    resample: Scheme,
    threshold: float = 1.0,
    steps: int = STEPS,
    seed: int = 0,
) -> tuple[Particles, Floats]:
    """Runs one population on the model's own path, all transitions searched; what `steer` returns."""
    made: list[tuple[Particles, Floats]] = []

    def search(problem: Problem) -> Verb:
        plan = course(problem, "smc", path="own", steps=0, kernel="ddim(1)", explore=1.0)
        rng = np.random.default_rng(seed)
        made.append((yield from steer(plan, rng, n, places, tilt, resample, threshold)))

    run(world, new(world, search, budget=10**6, steps=steps, seed=seed, verifier=verifier), max_batch=10**6)
    return made[0]


def tilted(potential: Potential, tempering: Tempering = "constant", strength: float = 2.0) -> Tilt:
    return Tilt("smc", potential, strength, standardise=False, tempering=tempering)


# -------------------------------------------------------------------------------------------------------- the weights


def by_hand(potential: str, tempering: str, rewards: list[float], last: int, strength: float) -> float:
    """log G of one lineage after these rewards, from the papers' formulas."""
    gamma = 2 ** (1 / last) - 1

    def lam(i: int) -> float:
        return strength if tempering == "constant" else strength * ((1 + gamma) ** i - 1)

    i = len(rewards)
    if potential == "current":
        return lam(i) * rewards[-1]
    if potential == "diff":
        return lam(i) * rewards[-1] - (lam(i - 1) * rewards[-2] if i > 1 else 0)
    if potential == "max":
        return lam(i) * max(rewards)
    return lam(i) * sum(rewards)


@each_potential
@each_tempering
def test_weights_are_the_potentials_when_every_place_resamples(potential: Potential, tempering: Tempering) -> None:
    """Three particles at three places; all rewards are below 0, so that a maximum that began at 0 would tie them."""
    rewards = [[-3.0, -1.0, -2.0], [-2.5, -1.5, -4.0], [-1.0, -2.0, -0.5]]
    watch = Watch()
    verifier = Scripted([*sum(rewards, []), -1.0, -1.2, -0.4])
    population(Watched(), verifier, 3, [0, 1, 2], tilted(potential, tempering), watch)
    for k, log_w in enumerate(watch.seen, 1):
        expected = [by_hand(potential, tempering, [row[j] for row in rewards[:k]], 3, 2.0) for j in range(3)]
        np.testing.assert_allclose(log_w, expected, atol=1e-6)
    assert len(watch.seen) == 3


@each_potential
@each_tempering
def test_weights_multiply_until_they_are_resampled(potential: Potential, tempering: Tempering) -> None:
    """They differ a little at two places and a lot at the third, where the effective sample size is too small."""
    rewards = [[-0.50, -0.45, -0.55], [-0.40, -0.42, -0.41], [-0.3, 5.0, -0.2], [-0.2, 4.9, -0.3]]
    watch = Watch()
    verifier = Scripted([*sum(rewards, []), 0.0])
    population(Watched(), verifier, 3, [0, 1, 2, 3], tilted(potential, tempering), watch, threshold=0.8, steps=5)
    log_g = [
        [by_hand(potential, tempering, [row[j] for row in rewards[: k + 1]], 4, 2.0) for j in range(3)]
        for k in range(4)
    ]
    np.testing.assert_allclose(watch.seen[0], np.sum(log_g[:3], axis=0), atol=1e-6)
    assert len(watch.seen) == (1 if potential == "diff" and tempering == "constant" else 2)
    for log_w in watch.seen[1:]:
        np.testing.assert_allclose(log_w, log_g[3], atol=1e-6, err_msg="they start at 0 again")


@each_potential
@each_tempering
def test_what_a_lineage_remembers_goes_with_its_children(potential: Potential, tempering: Tempering) -> None:
    """After the counts 0, 2, 1 the histories are those of particles 1, 1 and 2."""
    first, second, third = [-3.0, -1.0, -2.0], [-2.5, -1.5, -4.0], [-1.0, -2.0, -0.5]
    watch = Watch([0, 2, 1], [1, 0, 2])
    population(Watched(), Scripted([*first, *second, *third, 0.0]), 3, [0, 1, 2], tilted(potential, tempering), watch)
    histories = [[first[p], s] for p, s in zip((1, 1, 2), second, strict=True)]
    expected = [by_hand(potential, tempering, history, 3, 2.0) for history in histories]
    np.testing.assert_allclose(watch.seen[1], expected, atol=1e-6)
    histories = [[*histories[p], t] for p, t in zip((0, 2, 2), third, strict=True)]
    expected = [by_hand(potential, tempering, history, 3, 2.0) for history in histories]
    np.testing.assert_allclose(watch.seen[2], expected, atol=1e-6)


@each_potential
@each_tempering
def test_without_resampling_the_weights_are_those_of_importance_sampling(
    potential: Potential, tempering: Tempering
) -> None:
    """Whatever the potentials were, they cancel in the end: the weight is exp(strength r) of the image."""
    finished, log_w = population(Watched(), Reward(), 6, [0, 1, 2], tilted(potential, tempering), ssp, threshold=0.0)
    assert finished.scores is not None
    np.testing.assert_allclose(log_w, 2.0 * finished.scores.numpy(), atol=1e-5)


def test_a_growing_strength_may_be_given_its_growth() -> None:
    tilt = Tilt("smc", "current", 5.0, standardise=False, tempering="increase", gamma=0.4)
    rewards = np.array([0.0, 1.0])
    assert [tilt.at(i, 9, rewards, []) for i in (1, 2, 3, 9)] == pytest.approx([2.0, 4.8, 5.0, 5.0])


def test_standardised_rewards_fit_every_verifier() -> None:
    """An affine change of the verifier changes nothing: neither shift nor scale."""
    rewards = np.random.default_rng(1).normal(size=(3, 7))
    tilt = Tilt("smc", "max", 3.0, standardise=True, tempering="increase")

    def log_weights(potential: Potential, scale: float, shift: float) -> Floats:
        strengths: list[float] = []
        for k in range(3):
            strengths.append(tilt.at(k + 1, 3, scale * rewards[k] + shift, strengths))
        return weights(log_potential(potential, scale * rewards + shift, strengths))

    for potential in POTENTIALS:
        for scale, shift in ((0.02, 0.3), (100.0, -7.0)):
            np.testing.assert_allclose(log_weights(potential, scale, shift), log_weights(potential, 1, 0), atol=1e-9)
    assert tilt.at(3, 3, rewards[0], []) == pytest.approx(3.0 / rewards[0].std())


def test_rewards_that_differ_by_rounding_have_no_weight() -> None:
    tilt = Tilt("smc", "current", 3.0, standardise=True, tempering="constant")
    same = 0.25 + np.array([0.0, 1e-9, -1e-9])
    assert tilt.at(1, 3, same, []) == 0
    assert tilt.at(2, 3, same, [7.0]) == 7
    assert tilt.at(2, 3, np.full(3, -np.inf), [7.0]) == 7
    assert math.isfinite(tilt.at(1, 3, np.array([1.0, -np.inf, 2.0]), []))


@each_potential
def test_what_scores_minus_infinity_weighs_nothing_and_later_has_no_say(potential: Potential) -> None:
    rewards = np.array([[-1.0, -math.inf, -2.0], [-2.0, -3.0, -math.inf]])
    log_g = log_potential(potential, rewards, [2.0, 2.0])
    assert np.isneginf(log_g[2])
    expected = {"current": [-4, -6], "diff": [-2, -6], "max": [-2, -6], "sum": [-6, -6]}[potential]
    np.testing.assert_allclose(log_g[:2], expected)


def test_the_dead_are_replaced_at_once_and_if_all_are_nobody_is() -> None:
    watch = Watch([1, 0, 2])
    rewards = [0.0, -math.inf, 0.0] + [-math.inf] * 3 + [0.0] * 6
    _, log_w = population(Watched(), Scripted(rewards), 3, [0, 1, 2], tilted("current"), watch, threshold=0.1)
    assert len(watch.seen) == 1 and np.isneginf(watch.seen[0][1])
    assert np.isfinite(log_w).all()


# ------------------------------------------------------------------------------------------- what belongs together


@pytest.mark.parametrize("resampler", SCHEMES)
def test_score_and_image_travel_together(resampler: str) -> None:
    """The differences that weigh are those between a child's own reward and its own parent's."""
    chosen: list[Counts] = []
    seen: list[Floats] = []

    def resample(log_weights: Any, rng: np.random.Generator) -> Counts:
        seen.append(log_weights.copy())
        chosen.append(SCHEMES[resampler](log_weights, rng))
        return chosen[-1]

    verifier = Reward()
    finished, _ = population(Watched(), verifier, 8, [1, 2], tilted("diff", strength=30.0), resample)
    first, second, last = (given.double().numpy() for given in verifier.given)
    parents = np.repeat(np.arange(8), chosen[0])
    assert len(set(parents)) < 8, "some died"
    np.testing.assert_allclose(seen[0], 30 * first, atol=1e-4)
    np.testing.assert_allclose(seen[1], 30 * (second - first[parents]), atol=1e-4)
    images = Watched().decode(finished.x0, Watched().encode(""))
    assert finished.scores is not None
    np.testing.assert_allclose(finished.scores, near_one(images, [""]), atol=1e-5)
    np.testing.assert_allclose(finished.scores, last)
    fresh = torch.unique(finished.seeds, return_counts=True)[0]
    grandparents = parents[np.repeat(np.arange(8), chosen[1])]
    assert len(fresh) == len(set(grandparents))
    assert [int(s) for s in finished.seeds] == [int(finished.seeds[list(grandparents).index(g)]) for g in grandparents]


def test_children_of_one_parent_differ() -> None:
    finished, _ = population(Watched(shape=(3,)), Reward(), 4, [2], tilted("current"), Watch([0, 4, 0, 0]))
    assert len(set(finished.seeds.tolist())) == 1
    assert len(torch.unique(finished.x0, dim=0)) == 4


def test_nothing_is_evaluated_or_scored_twice() -> None:
    world, verifier = Watched(), Reward()
    run(world, new(world, "smc", budget=10 * STEPS, particles=10, explore=1.0, verifier=verifier))
    assert world.batches == [10] * STEPS
    assert [len(images) for images in verifier.seen] == [10] * 3, "the places 1 and 2, and the images"


def test_the_answer_is_the_highest_reward_not_the_last_nor_the_heaviest() -> None:
    verifier = Scripted([0.0] * 4 + [0.1, 0.9, 0.2, 0.3] + [0.0])
    search = run(Watched(), new(Watched(), "smc", budget=4 * STEPS, particles=4, explore=0.5, verifier=verifier))
    assert search.best is not None and search.best.score == pytest.approx(0.9)


# --------------------------------------------------------------------------------------------------- special cases


@pytest.mark.parametrize("resampler", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_an_infinite_strength_is_svdd(resampler: str, seed: int) -> None:
    """With the current reward all children come of the best: a population is then a chain that draws as many."""
    path = Discrete((1 - torch.linspace(0.001, 0.2, 40)).cumprod(0))  # whose x0 at t = 1 aren't all the same
    width, chains = 5, 2
    budget = chains * width * STEPS
    worlds = [Watched(path=path, shape=(3,)) for _ in range(2)]
    limit: dict[str, Any] = {"strength": 1e12, "potential": "current", "threshold": 1.0, "resampler": resampler}
    smc = run(
        worlds[0],
        new(worlds[0], "smc", budget=budget, seed=seed, distilled=True, particles=width, options=limit),
    )
    svdd = run(
        worlds[1],
        new(worlds[1], "svdd", budget=budget, seed=seed, distilled=True, chains=chains, children=width),
    )
    assert smc.best is not None and svdd.best is not None
    assert torch.equal(smc.best.latents, svdd.best.latents) and smc.best.seed == svdd.best.seed
    assert smc.meter.ledger.nfe == svdd.meter.ledger.nfe == budget


def test_one_particle_is_a_plain_stochastic_sample() -> None:
    world = Watched(shape=(3,))
    search = run(world, new(world, "smc", budget=STEPS, particles=1, explore=1.0, seed=5))
    key, cond = torch.tensor([5]), world.encode("")
    x, times = world.prior(key, cond), world.grid(STEPS, cond).tolist()
    for step, (t, t_next) in enumerate(zip(times, times[1:], strict=False)):
        noise = normal(fold(key, NOISE, step + 1), world.shape)  # what isn't resampled keeps its key
        x = DDIM(1)(world.path, t, t_next, x, world.predict(x, t, cond), noise)
    assert search.best is not None
    torch.testing.assert_close(search.best.latents, x[0], atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------- the law


def chain_law(world: Watched, steps: int) -> tuple[float, float]:
    """Mean and variance of x0 where ancestral sampling in so many steps leads, for a Gaussian of one coordinate."""
    mean, variance = 0.0, 1.0
    prior, spread = float(world.mean[0]), float(world.cov[0, 0])
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    for t, t_next in zip(times, times[1:], strict=False):
        alpha, sigma = float(world.path.alpha(t)), float(world.path.sigma(t))
        gain = alpha * spread / (alpha**2 * spread + sigma**2)  # x0 = prior + gain (x - alpha prior)
        signal, residual, fresh = (float(w) for w in DDIM(1).weights(world.path, t, t_next))
        slope = signal * gain + residual * (1 - alpha * gain) / sigma
        offset = (signal - residual * alpha / sigma) * (prior - gain * alpha * prior)
        mean, variance = slope * mean + offset, slope**2 * variance + fresh**2
    return mean, variance


def tilt_by(mean: float, variance: float, strength: float) -> tuple[float, float]:
    """Mean and variance of N(mean, variance) tilted by exp(-strength (x - 1)^2)."""
    precision = 1 / variance + 2 * strength
    return (mean / variance + 2 * strength) / precision, 1 / precision


def errors(n: int, law: tuple[float, float], seeds: int, **settings: Any) -> Floats:
    """Root mean squares of the errors of the weighted mean and second moment."""
    gaps = []
    for seed in range(seeds):
        finished, log_w = population(Watched(shape=(1,)), Reward(), n, seed=seed, **settings)
        x, w = finished.x0[:, 0].double().numpy(), weights(log_w)
        gaps.append([w @ x - law[0], w @ x**2 - law[0] ** 2 - law[1]])
    rms: Floats = np.sqrt(np.square(gaps).mean(0))
    return rms


@each_potential
@each_tempering
def test_more_particles_come_closer_to_the_tilted_law(potential: Potential, tempering: Tempering) -> None:
    """Exactly that of the chain: whatever the potentials on the way, the last one makes up for them."""
    steps, strength = 8, 3.0
    mean, variance = chain_law(Watched(shape=(1,)), steps)
    law = tilt_by(mean, variance, strength)
    assert law[0] > mean + 0.09, "there is something to miss"
    settings: dict[str, Any] = {"places": [2, 4, 6], "tilt": tilted(potential, tempering, strength), "steps": steps}
    few, many = (errors(n, law, seeds, resample=ssp, **settings) for n, seeds in ((8, 12), (512, 4)))
    assert (many < few / 3).all()
    assert (many < 0.035).all()


def test_a_wrong_strength_would_be_seen() -> None:
    """The test above tells strengths of 3 and 4 apart."""
    steps = 8
    law = tilt_by(*chain_law(Watched(shape=(1,)), steps), strength=4.0)
    wrong = errors(512, law, 4, places=[2, 4, 6], tilt=tilted("max", strength=2.5), resample=ssp, steps=steps)
    assert (wrong > 0.035).all()


@pytest.mark.parametrize("resampler", SCHEMES)
def test_every_scheme_samples_the_tilted_law(resampler: str) -> None:
    law = tilt_by(*chain_law(Watched(shape=(1,)), 8), strength=3.0)
    settings: dict[str, Any] = {"places": [2, 4, 6], "tilt": tilted("diff", strength=3.0), "steps": 8}
    few, many = (errors(n, law, k, resample=SCHEMES[resampler], **settings) for n, k in ((8, 12), (512, 4)))
    assert (many < few / 3).all() and (many < 0.035).all()


def test_finely_spaced_steps_sample_the_tilted_data() -> None:
    """exp(strength r) p of the Gaussian itself, which ancestral sampling reaches only in many steps."""
    strength, steps = 5.0, 64
    law = tilt_by(0.5, 0.09, strength)
    settings: dict[str, Any] = {
        "places": range(1, steps - 1),
        "tilt": tilted("diff", "constant", strength),
        "resample": ssp,
        "threshold": 0.5,
        "steps": steps,
    }
    few, more, many = (errors(n, law, seeds, **settings) for n, seeds in ((4, 8), (32, 6), (256, 3)))
    assert (more < few / 1.3).all() and (many < more / 1.3).all()
    assert (many < 0.05).all(), "of a mean that is tilted by .24"


# ---------------------------------------------------------------------------------------------- budget and options


@pytest.mark.parametrize(("budget", "sizes"), [(10 * STEPS, [10]), (64 * STEPS, [64]), (100 * STEPS, [50, 50])])
def test_the_population_follows_from_the_budget(budget: int, sizes: list[int]) -> None:
    world = Watched()
    run(world, new(world, "smc", budget=budget), max_batch=1000)
    assert world.batches == [n for n in sizes for _ in range(STEPS)]


def test_populations_are_repeated_and_the_last_is_smaller() -> None:
    world = Watched()
    search = run(world, new(world, "smc", budget=14 * STEPS + 3, particles=4))
    assert world.batches[::STEPS] == [4, 4, 4, 2] and search.meter.ledger.nfe == 14 * STEPS


def test_verifier_calls_size_a_population_too() -> None:
    world = Watched()
    search = run(world, new(world, "smc", budget=Budget(verifier_calls=32), explore=1.0))
    assert world.batches[0] == 10 and search.meter.ledger.verifier_calls == 32
    assert search.stopped == "complete", "3 of each particle, and two plain samples"


def test_a_budget_for_one_image_is_a_plain_sample() -> None:
    world = Watched()
    search = run(world, new(world, "smc", budget=2 * STEPS - 1, seed=3))
    plain = run(world, new(world, "best-of-n", budget=STEPS, seed=3))
    assert search.best is not None and plain.best is not None
    assert torch.equal(search.best.latents, plain.best.latents)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ode": ({"kernel": "ode"}, "smc needs noise to choose from, and the kernel ode has none; take ddim(1) or sde"),
    "ddim(0)": ({"kernel": "ddim(0)"}, "has none"),
    "explore": ({"explore": 0.0}, "smc's explore can't be 0.0; give a share above 0 and up to 1"),
    "threshold": ({"threshold": 1.5}, "smc's threshold can't be 1.5; give a share from 0 to 1"),
    "strength": ({"strength": 0.0}, "smc's strength can't be 0.0; give a number above 0"),
    "endless": ({"strength": math.inf}, "smc's strength can't be inf"),
    "gamma": ({"gamma": -1.0}, "smc's gamma can't be -1.0"),
    "particles": ({"particles": 0}, "smc's particles can't be 0; it must be at least 1"),
    "steps": ({"path": "vp", "steps": 1}, "steps can't be 1; give 2 or more"),
    "potential": ({"potential": "min"}, "option potential can't be 'min'"),
    "resampler": ({"resampler": "best"}, "option resampler can't be 'best'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_smc_says_what_its_options_may_be(case: str) -> None:
    options, message = REFUSED[case]
    world = Watched()
    with pytest.raises(UserError) as caught:
        run(world, new(world, "smc", budget=40, options=options))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert world.batches == [], "refused before anything was spent"


def test_smc_beats_best_of_n_where_previews_tell() -> None:
    gains = []
    for seed in range(20):
        found, plain = (
            run(world, new(world, name, budget=40, seed=seed)).best
            for name, world in (("smc", Watched(shape=(12,))), ("best-of-n", Watched(shape=(12,))))
        )
        assert found is not None and plain is not None
        gains.append(found.score - plain.score)
    assert np.mean(gains) > 0.1 and np.mean(np.array(gains) > 0) > 0.6
