"""Searchers: what every registered one must do, and what best-of-n and rbf do in particular."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from imgscale import registry
from imgscale.budget import Budget
from imgscale.errors import UnknownName, UserError
from imgscale.kernels import DDIM, ODE, Kernel
from imgscale.keys import fold, normal, root
from imgscale.particles import Schedule
from imgscale.paths import VP, Discrete, Linear
from imgscale.problem import NOISE
from imgscale.search import Search
from imgscale.usefulness import Usefulness
from tests.doubles import STEPS, Clock, Reward, Scripted, Watched, clock, near_one, new, run, stop_after

__all__ = ["clock"]

# ------------------------------------------------------------------------------------------- every registered searcher

ALL = [entry.name for entry in registry.searcher]
NFES = [STEPS, STEPS + 1, 7, 13, 29, 50, 101]

each = pytest.mark.parametrize("name", ALL)
either = pytest.mark.parametrize("distilled", [False, True], ids=["ordinary", "distilled"])


def check(search: Search, world: Watched) -> None:
    """Nothing was spent that isn't booked, no limit was passed, and the answer is the best finished image."""
    ledger, verifier, best = search.meter.ledger, search.verifier, search.best
    assert isinstance(verifier, Reward) and best is not None
    assert ledger.nfe == world.evaluations
    assert ledger.verifier_calls == verifier.images
    assert ledger.decodes == sum(world.decoded)
    for kind in ("nfe", "verifier_calls", "decodes"):
        assert search.meter.left(kind) >= 0, f"{kind} exceeded by {-search.meter.left(kind)}"
    assert best.finished
    shown = world.decode(best.latents[None], world.encode(""))
    torch.testing.assert_close(best.image[None], shown, atol=1e-6, rtol=0)
    assert best.score == pytest.approx(float(near_one(shown, [""])), abs=1e-5)


def test_the_registry_is_not_empty() -> None:
    assert {"best-of-n", "rbf"} <= set(ALL)


@each
@either
@pytest.mark.parametrize("nfe", NFES)
def test_model_evaluations_stay_within_any_budget(name: str, distilled: bool, nfe: int) -> None:
    for steps in (1, 2, STEPS):
        world = Watched()
        search = run(world, new(world, name, budget=nfe, distilled=distilled, steps=steps))
        check(search, world)
        assert search.meter.ledger.nfe > nfe - 2 * (steps + 10), "what is left was used"


@each
@either
@pytest.mark.parametrize("kind", ["verifier_calls", "decodes"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20, 61])
def test_verifier_and_decoder_stay_within_any_budget(name: str, distilled: bool, kind: str, limit: int) -> None:
    for both in ({}, {"nfe": 30}):
        world = Watched()
        search = run(world, new(world, name, budget=Budget(**{kind: limit}, **both), distilled=distilled))
        check(search, world)
        if not both:
            assert getattr(search.meter.ledger, kind) > limit - 2, "what is left was used"


@each
@either
@pytest.mark.parametrize("seconds", [12, 40])
def test_time_stays_within_any_budget(name: str, distilled: bool, seconds: int, clock: Clock) -> None:
    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        clock.pass_by(0.5)
        return near_one(images, prompts)

    world = Watched(evaluate=lambda n: clock.pass_by(1.0))
    search = run(world, new(world, name, budget=Budget(seconds=seconds), distilled=distilled, verifier=Reward(rule)))
    assert search.stopped == "deadline" and search.best is not None and search.best.finished
    assert search.meter.ledger.seconds <= seconds


@each
@either
def test_equal_seeds_give_equal_images_and_others_do_not(name: str, distilled: bool) -> None:
    def latent(seed: int) -> Tensor:
        world = Watched()
        best = run(world, new(world, name, budget=60, seed=seed, distilled=distilled)).best
        assert best is not None
        return best.latents

    assert torch.equal(latent(1), latent(1))
    assert not torch.equal(latent(1), latent(2))


@each
@either
def test_the_size_of_batches_changes_nothing(name: str, distilled: bool) -> None:
    worlds = [Watched() for _ in range(3)]
    searches = [
        run(world, new(world, name, budget=60, distilled=distilled), max_batch=size)
        for world, size in zip(worlds, (1, 3, 32), strict=True)
    ]
    assert max(worlds[0].batches) == 1 and max(worlds[1].batches) <= 3 < max(worlds[2].batches)
    for search in searches[1:]:
        assert search.best is not None and searches[0].best is not None
        assert search.best.seed == searches[0].best.seed
        assert search.best.score == pytest.approx(searches[0].best.score, abs=1e-4)
        assert search.meter.ledger.nfe == searches[0].meter.ledger.nfe


@each
@either
@pytest.mark.parametrize("path", [Linear(), VP(), Discrete((1 - torch.linspace(0.001, 0.2, 40)).cumprod(0))], ids=str)
def test_any_model_will_do(name: str, distilled: bool, path: Any) -> None:
    for shape in ((1,), (5,)):
        world = Watched(path=path, shape=shape)
        search = run(world, new(world, name, budget=40, distilled=distilled))
        check(search, world)


@each
@either
def test_cancelling_at_any_moment_closes_and_answers(name: str, distilled: bool) -> None:
    for ticks in range(0, 24, 3):
        world = Watched()
        search = run(world, new(world, name, budget=60, distilled=distilled), stop=stop_after(ticks))
        assert search.best is not None and search.stopped
        assert getattr(search.steps, "gi_frame", None) is None, "the generator is closed"


@each
@either
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_scores_that_are_no_numbers_are_survived(name: str, distilled: bool, bad: float) -> None:
    """Half of the images, or all of them."""

    def rule(images: Tensor, prompts: Sequence[str], threshold: float) -> Tensor:
        return torch.where(images[:, 0, 0, 0] < threshold, bad, near_one(images, prompts))

    for threshold in (0.63, 2.0):
        world = Watched()
        verifier = Reward(partial(rule, threshold=threshold))
        search = run(world, new(world, name, budget=80, distilled=distilled, verifier=verifier))
        assert search.best is not None and search.best.finished and search.stopped == "complete"
        assert math.isfinite(search.best.score) == (threshold < 1)


@each
@either
def test_latents_that_blow_up_are_survived(name: str, distilled: bool) -> None:
    world = Watched(spoil=lambda x: x[:, 0] > 1.0)
    search = run(world, new(world, name, budget=120, distilled=distilled))
    assert search.best is not None and search.best.finished and math.isfinite(search.best.score)


@each
@either
def test_equal_scores_are_survived(name: str, distilled: bool) -> None:
    def rule(images: Tensor, prompts: Sequence[str], value: float) -> Tensor:
        return torch.full((len(images),), value)

    for value in (0.0, -1e30, 1e30):
        world = Watched()
        verifier = Reward(partial(rule, value=value))
        search = run(world, new(world, name, budget=60, distilled=distilled, verifier=verifier))
        assert search.best is not None and search.best.finished and search.best.score == pytest.approx(value)


@each
@either
def test_prompts_side_by_side_are_as_alone(name: str, distilled: bool) -> None:
    shifts = {"left": -1.0, "right": 2.0}

    def start(world: Watched, prompt: str, budget: int) -> Search:
        return new(world, name, budget=budget, prompt=prompt, distilled=distilled)

    world = Watched(shifts=shifts)
    together = [start(world, prompt, budget) for prompt, budget in (("left", 45), ("right", 70))]
    run(world, *together)
    for search, prompt, budget in zip(together, ("left", "right"), (45, 70), strict=True):
        own = Watched(shifts=shifts)
        alone = run(own, start(own, prompt, budget))
        assert alone.best is not None and search.best is not None
        torch.testing.assert_close(search.best.latents, alone.best.latents, atol=1e-5, rtol=0)
        assert search.meter.ledger.nfe == alone.meter.ledger.nfe


@each
@either
def test_searching_beats_sampling(name: str, distilled: bool) -> None:
    """At equal cost a search's mean reward is well above that of plain samples."""
    gains = []
    for seed in range(12):
        world = Watched(shape=(4,))
        best = run(world, new(world, name, budget=60, seed=seed, distilled=distilled)).best
        plain = -(plain_samples(world, seed, 1).double() - 1).square().sum()
        assert best is not None
        gains.append(best.score - float(plain))
    gain = torch.tensor(gains)
    assert gain.mean() > 3 * gain.std() / len(gain) ** 0.5
    assert gain.mean() > 0.3


@each
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(UnknownName, match=f"Unknown option of '{name}' 'nonsense'"):
        new(Watched(), name, budget=40, nonsense=1)


@each
def test_every_option_is_documented(name: str) -> None:
    entry = registry.searcher[name]
    text = entry.target.__doc__ or ""
    assert entry.summary.endswith(".") and entry.cite and "Source:" in text
    for option in entry.options():
        assert f"\n        {option}: " in text, option


# ------------------------------------------------------------------------------------------------------------ best-of-n


@pytest.mark.parametrize("nfe", range(STEPS, 6 * STEPS + 2))
def test_best_of_n_spends_all_that_makes_a_sample(nfe: int) -> None:
    world = Watched()
    search = run(world, new(world, "best-of-n", budget=nfe, batch=4))
    assert search.meter.ledger.nfe == nfe // STEPS * STEPS and search.stopped == "complete"


@pytest.mark.parametrize("batch", [1, 3, 32, 100])
def test_best_of_n_draws_in_batches(batch: int) -> None:
    world = Watched()
    search = run(world, new(world, "best-of-n", budget=STEPS * 70, batch=batch), max_batch=1000)
    full, rest = divmod(70, batch)
    expected = [batch] * full + [rest] * (rest > 0)
    assert isinstance(search.verifier, Reward)
    assert [len(images) for images in search.verifier.seen] == expected


@pytest.mark.parametrize(("n", "drawn"), [(1, 1), (3, 3), (5, 5), (12, 5)])
def test_best_of_n_takes_n_as_the_most(n: int, drawn: int) -> None:
    world = Watched()
    search = run(world, new(world, "best-of-n", budget=STEPS * 5, n=n, batch=2))
    assert search.meter.ledger.verifier_calls == drawn


def test_best_of_n_is_the_argmax_of_plain_samples() -> None:
    world = Watched()
    best = run(world, new(world, "best-of-n", budget=STEPS * 9, batch=4, seed=2)).best
    x0 = plain_samples(world, 2, 9)
    rewards = -(x0.double() - 1).square().sum(-1)
    winner = int(rewards.argmax())
    assert winner > 0 and best is not None
    torch.testing.assert_close(best.latents, x0[winner], atol=1e-5, rtol=0)
    assert best.seed == int(root(2, 9)[winner])


def test_best_of_one_is_the_plain_image() -> None:
    world = Watched()
    best = run(world, new(world, "best-of-n", budget=100, n=1, seed=11)).best
    assert best is not None and best.seed == 11
    torch.testing.assert_close(best.latents, plain_samples(world, 11, 1)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{"n": 0}, {"n": -2}, {"batch": 0}])
def test_best_of_n_says_what_its_options_may_be(options: dict[str, int]) -> None:
    world = Watched()
    with pytest.raises(UserError, match="must be at least 1"):
        run(world, new(world, "best-of-n", budget=40, options=options))


def plain_samples(world: Watched, seed: int, n: int, steps: int = STEPS) -> Tensor:
    """What the model's own ODE makes of the first n noises, by hand."""
    cond = world.encode("")
    x, times = world.prior(root(seed, n), cond), world.grid(steps, cond).tolist()
    for t, t_next in zip(times, times[1:], strict=False):
        x = ODE()(world.path, t, t_next, x, world.predict(x, t, cond))
    return x


# -------------------------------------------------------------------------------------- rbf: the table of algorithm 2

PUBLISHED: dict[str, Any] = {
    "look": 0.0,
    "skip": 0.0,
    "keep": 1,
    "images": 1,
    "starts": 1,
    "draws": 8,
}  # what is beyond algorithm 2, switched off
TRANSITIONS = STEPS - 1  # that rbf can search: the last one leads to t = 0 without an evaluation
VP_TIMES = [math.sqrt(1 - (i / 10) ** 2) for i in range(11)]


def table(rewards: Sequence[float], drawn: Sequence[int], budget: int, **options: Any) -> tuple[Search, Watched]:
    """Runs one chain of rbf on scripted rewards; checks how many were drawn at each transition.

    Args:
        rewards: Of the start, then of every draw in turn; the last one is that of the finished image, too.
        drawn: The number expected at each transition.
        budget: The evaluations that the chain may make.
        options: Of rbf.
    """
    world = Watched()
    options = {"chain_nfe": budget, "explore": 1.0, **PUBLISHED, "draws": 1, **options}
    search = run(world, new(world, "rbf", budget=budget, verifier=Scripted(rewards), options=options))
    at = Counter(t for call in world.places for t, _ in call)
    assert at[1.0] == options.get("starts", 1)
    assert [at[t] for t in (0.75, 0.5, 0.25)] == list(drawn)
    return search, world


def chosen(search: Search, numbers: Sequence[int | None], seed: int = 0) -> bool:
    """Whether the answer grew from these draws: the so-manieth of each transition, counted from 0 (None: its ODE)."""
    assert search.best is not None
    expected = by_hand(Watched(), torch.tensor([seed]), numbers)
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)
    return True


def by_hand(
    world: Watched,
    keys: Tensor,
    numbers: Sequence[int | None],
    kernel: Kernel | None = None,
    schedule: Schedule | None = None,
) -> Tensor:
    """One stochastic trajectory through the draws of these numbers, then the model's own ODE, from bare kernels."""
    cond = world.encode("")
    own = Schedule(world.path, tuple(world.grid(STEPS, cond).tolist()))
    schedule = schedule or own
    assert schedule.path == own.path
    x = world.prior(keys, cond)
    for step, number in enumerate(numbers):
        t, t_next = schedule.times[step : step + 2]
        if number is None:
            x = ODE()(schedule.path, t, t_next, x, world.predict(x, t, cond))
            continue
        keys = fold(keys, step, number)
        noise = normal(fold(keys, NOISE, step + 1), world.shape)
        x = (kernel or DDIM(1))(schedule.path, t, t_next, x, world.predict(x, t, cond), noise)
    t = schedule.times[len(numbers)]
    for t_next in (time for time in own.times if time < t - 1e-6):
        x = ODE()(own.path, t, t_next, x, world.predict(x, t, cond))
        t = t_next
    return x[0]


def test_an_improvement_ends_a_transition_and_the_rest_rolls_over() -> None:
    # 10 evaluations: 1 start, then quotas of 3, 3 and 3. To beat: .5.
    # 1st transition, quota 3: .4, .6 improves with 1 left over.           To beat: .6.
    # 2nd transition, quota 3 + 1: .1 .2 .15 .05, none improves, all used; .2 is taken, .6 stays.
    # 3rd transition, quota 3: .55, .7 improves; the 1 left over has nowhere to go.
    search, _ = table([0.5, 0.4, 0.6, 0.1, 0.2, 0.15, 0.05, 0.55, 0.7], [2, 4, 2], budget=10)
    assert search.meter.ledger.nfe == 9 and search.meter.ledger.verifier_calls == 10
    assert chosen(search, [1, 1, 1])


def test_quotas_pile_up_at_the_last_transition() -> None:
    # Quotas 3, 3, 3: the first draw improves twice, so that 2 + 4 roll over and the last transition has 3 + 4 = 7.
    search, _ = table([0.1, 0.2, 0.3, 0.0, 0.25, 0.1, 0.28, 0.2, 0.1, 0.0], [1, 1, 7], budget=10)
    assert search.meter.ledger.nfe == 10
    assert chosen(search, [0, 0, 3])


def test_equal_is_no_improvement_and_ties_go_to_the_first_draw() -> None:
    search, _ = table([0.5] * 10, [3, 3, 3], budget=10)
    assert chosen(search, [0, 0, 0])


def test_nothing_improves() -> None:
    search, _ = table([0.9, 0.1, 0.3, 0.2, 0.2, 0.1, 0.3, 0.3, 0.1, 0.2], [3, 3, 3], budget=10)
    assert chosen(search, [1, 2, 0])


@pytest.mark.parametrize(("beat", "draws"), [("best", [3, 3, 3]), ("current", [3, 1, 5])])
def test_what_must_be_beaten(beat: str, draws: list[int]) -> None:
    # The 1st transition ends with .3, below the start's .9. With "best", .9 stays to be beaten, and .4 isn't enough;
    # with "current", .4 beats .3 at once, and 2 roll over.
    rewards = [0.9, 0.3, 0.2, 0.1, 0.4]
    rewards += [0.2, 0.1, 0.1, 0.3, 0.2] if beat == "best" else [0.2, 0.3, 0.1, 0.1, 0.2]
    search, _ = table(rewards, draws, budget=10, beat=beat)
    assert chosen(search, [0, 0, 1])


@pytest.mark.parametrize(("accept", "number"), [("first", 1), ("best", 2)])
def test_which_of_a_batch_is_accepted(accept: str, number: int) -> None:
    # Batches of 3, which is the quota: all three are charged, nothing rolls over.
    rewards = [0.5, 0.4, 0.6, 0.9, 0, 0, 0, 0, 0, 0]
    search, world = table(rewards, [3, 3, 3], budget=10, draws=3, accept=accept)
    assert world.batches == [1, 3, 3, 3]
    assert chosen(search, [number, 0, 0])


def test_batches_of_draws_are_charged_as_a_whole_and_counted_on() -> None:
    # Quotas 5, 5, 5 and batches of 2: (.1 .2) (.3 .6!) leaves 1; then 6: (0 0) (0 0) (0 .7!) leaves none; then 5.
    rewards = [0.5, 0.1, 0.2, 0.3, 0.6, 0, 0, 0, 0, 0, 0.7, 0, 0, 0, 0, 0.1, 0]
    search, world = table(rewards, [4, 6, 5], budget=16, draws=2)
    assert world.batches == [1, 2, 2, 2, 2, 2, 2, 2, 1]
    assert chosen(search, [3, 5, 4])


def test_the_best_start_is_taken() -> None:
    # 3 starts of 12 evaluations leave 9: quotas 3, 3, 3.
    rewards = [0.1, 0.8, 0.3, 0.9, 0.95, 0.0]
    search, _ = table(rewards, [1, 1, 7], budget=12, starts=3)
    assert chosen(search, [0, 0, 0], seed=int(root(0, 3)[1]))
    assert search.best is not None and search.best.seed == int(root(0, 3)[1])


def test_starts_never_take_what_the_leanest_chain_needs() -> None:
    search, _ = table([0.0], [1, 1, 1], budget=7, starts=4)
    assert search.meter.ledger.nfe == 7
    world = Watched()
    search = run(world, new(world, "rbf", budget=7, starts=50, explore=1.0, chain_nfe=100, verifier=Scripted([0.0])))
    assert Counter(t for call in world.places for t, _ in call)[1.0] == 4


def test_only_the_first_transitions_are_searched_and_the_rest_is_solved() -> None:
    # Half of 3 transitions, rounded up, is 2; 1 start and 1 evaluation to finish leave quotas of 4 and 4.
    search, world = table([0.0], [4, 4, 1], budget=10, explore=0.5)
    assert chosen(search, [0, 0])
    assert world.batches == [1] * 10


def test_what_is_too_little_for_a_chain_finishes_runners_up() -> None:
    # 1 transition of 3 is searched, and an image takes 2 more. 8 evaluations: 1 start, a quota of 5, 2 to finish.
    # The 3rd draw improves. 4 are left, too few for another chain after finishing: the 2nd best is finished, too.
    # In the end the image of that one, scored last, is the better one.
    search, world = table([0.5, 0.1, 0.2, 0.6, 0.3, 0.9], [3, 2, 2], budget=8, explore=0.3)
    assert search.meter.ledger.nfe == 8 and search.meter.ledger.verifier_calls == 4 + 2
    assert world.batches == [1, 1, 1, 1, 2, 2]
    assert chosen(search, [1])


# ------------------------------------------------------------------------------------------------- rbf: special cases


@pytest.mark.parametrize("kernel", ["ddim(1)", "ddim(0.5)", "sde(g=3t^2)", "sde(g=t)"])
@pytest.mark.parametrize("explore", [0.3, 0.5, 1.0])
def test_a_quota_of_one_is_a_plain_stochastic_sample(kernel: str, explore: float) -> None:
    """Every transition has a single draw, so nothing is chosen: the trajectory is the kernel's own."""
    from imgscale.kernels import kernel as read

    world = Watched(shape=(3,))
    searched = math.ceil(explore * TRANSITIONS)
    search = run(world, new(world, "rbf", budget=STEPS, explore=explore, kernel=kernel, seed=21, **PUBLISHED))
    expected = by_hand(Watched(shape=(3,)), torch.tensor([21]), [0] * searched, read(kernel))
    assert search.best is not None and search.meter.ledger.nfe == STEPS and search.stopped == "complete"
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(expected, plain_samples(Watched(shape=(3,)), 21, 1)[0], atol=1e-2)


def test_the_linear_path_has_the_papers_times() -> None:
    """On its own kind of path a flow model is just given another grid; by hand, with 10 transitions."""
    world = Watched()
    schedule = Schedule(Linear(), tuple(VP_TIMES))
    lean = 1 + 9  # 9 transitions have an evaluation at their end, the last of them at .436; the model's own grid has
    own = sum(0 < t < VP_TIMES[9] - 1e-6 for t in (0.75, 0.5, 0.25))  # one more time below that
    options = {"path": "linear", "explore": 1.0, **PUBLISHED, "draws": 1}
    search = run(world, new(world, "rbf", budget=lean + own, seed=4, options=options))
    expected = by_hand(Watched(), torch.tensor([4]), [0] * 9, schedule=schedule)
    assert own == 1 and search.best is not None and search.meter.ledger.nfe == 11
    torch.testing.assert_close(search.best.latents, expected, atol=1e-5, rtol=0)
    seen = [t for call in world.places for t, _ in call]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor([*VP_TIMES[:10], 0.25]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_on_the_vp_path_the_model_is_asked_at_equal_log_snr(steps: int) -> None:
    world = Watched()
    times = [math.sqrt(1 - (i / steps) ** 2) for i in range(steps)]
    searched = [float(Linear().time_at(VP().log_snr(t))) for t in times]
    # The finish: the rest of the model's own grid, below where the search ended.
    expected = [*searched, *(t for t in (0.75, 0.5, 0.25) if t < searched[-1])]
    options = {"path": "vp", "steps": steps, "explore": 1.0, **PUBLISHED, "draws": 1}
    search = run(world, new(world, "rbf", budget=len(expected), options=options))
    seen = torch.tensor([t for call in world.places for t, _ in call])
    torch.testing.assert_close(seen, torch.tensor(expected), atol=1e-6, rtol=0)
    assert search.best is not None and search.best.finished


def test_defaults_by_what_the_model_is() -> None:
    """Ordinary: its own path, three transitions, judged half-way. Distilled flow: VP, everything, half of it starts."""
    world = Watched()
    search = run(world, new(world, "rbf", budget=100, steps=10, verifier=Scripted([0.0])))
    at = Counter(round(t, 6) for call in world.places for t, _ in call)
    assert at[1.0] == at[0.9] == 3 and set(at) == {round(t / 10, 6) for t in range(1, 11)}, "three starts, and on"
    assert 10 < at[0.8] < at[0.7] == at[0.6] == at[0.5], "draws at two transitions, all solved to the middle"
    assert at[0.4] == at[0.1] == search.meter.ledger.verifier_calls - at[0.5] >= 3, "and the best of them to the end"

    world = Watched()
    run(world, new(world, "rbf", budget=50, distilled=True, verifier=Scripted([0.0])))
    at = Counter(round(t, 6) for call in world.places for t, _ in call)
    times = [round(float(Linear().time_at(VP().log_snr(t))), 6) for t in VP_TIMES[:10]]
    assert at[times[0]] == 25 and all(at[t] >= 2 for t in times[1:])


# ---------------------------------------------------------------------------------------- rbf: judging further on

LOOKING: dict[str, Any] = {"starts": 1, "skip": 0.0, "keep": 1, "images": 1, "explore": 1.0, "look": 1.0, "draws": 8}


def looking(
    rewards: Sequence[float], budget: int, ceiling: float | None = None, **options: Any
) -> tuple[Search, Counter[float]]:
    """One chain on 3 transitions whose draws are all judged at the 3rd: a draw costs 3, 2 or 1. An image takes no more.

    Args:
        rewards: Of the draws as they come, then of the finished images.
        budget: The evaluations that the chain may make.
        ceiling: The highest score that there is.
        options: Of rbf.
    """
    world = Watched()
    options = {"chain_nfe": budget, **LOOKING, **options}
    search = run(world, new(world, "rbf", budget=budget, verifier=Scripted(rewards), ceiling=ceiling, options=options))
    return search, Counter(t for call in world.places for t, _ in call)


def test_draws_are_judged_where_previews_tell() -> None:
    # 1 start, 17 for draws: one must be made at the first transition; 14 by 3 : 2 : 1 is 7, 5, 2, so 10, 5 and 2. That
    # pays for 3 draws with 1 left over, then 6 for 3 draws, then 2 for 2 draws.
    search, at = looking([0.1, 0.5, 0.2, 0.4, 0.3, 0.2, 0.3, 0.1, 0.4], budget=18)
    assert [at[t] for t in (1.0, 0.75, 0.5, 0.25)] == [1, 3, 3 + 3, 3 + 3 + 2]
    assert search.meter.ledger.nfe == 18 and search.meter.ledger.verifier_calls == 8 + 1
    assert chosen(search, [1]), "no later draw was better than where the second of the first transition led"


def test_a_later_draw_goes_on_from_the_best_trajectory() -> None:
    search, _ = looking([0.1, 0.5, 0.2, 0.4, 0.6, 0.2, 0.3, 0.1, 0.4], budget=18)
    assert chosen(search, [1, 1])
    search, _ = looking([0.1, 0.5, 0.2, 0.4, 0.6, 0.2, 0.3, 0.9, 0.4], budget=18)
    assert chosen(search, [1, 1, 1])
    search, _ = looking([0.1, 0.5, 0.2, 0.4, 0.3, 0.2, 0.7, 0.6, 0.4], budget=18)
    assert chosen(search, [1, None, 0]), "also at a transition where it has just been solved"


def test_several_trajectories_are_drawn_from_and_finished() -> None:
    # Two are kept: the first transition's draws alternate between the two starts, the second's between the best two.
    # Of 3 images, that of the third best preview is the best.
    rewards = [0.1, 0.5, 0.2, 0.4, 0.3, 0.2, 0.3, 0.1, 0.5, 0.6, 0.7]
    search, at = looking(rewards, budget=19, starts=2, keep=2, images=3)
    assert at[1.0] == 2 and search.meter.ledger.verifier_calls == 8 + 3
    assert search.best is not None and search.best.score == pytest.approx(0.7)


def test_chains_follow_each_other_where_the_search_may_end_early() -> None:
    rewards = [0.1, 0.5, 0.2, 0.4, 0.3, 0.2, 0.3, 0.1, 1.0]  # of one chain's draws, and of its image
    search, _ = looking(rewards, budget=54, ceiling=1.0, chain_nfe=18)
    assert (search.stopped, search.meter.ledger.nfe) == ("ceiling", 18)
    search, _ = looking(rewards, budget=54, chain_nfe=18)
    assert search.meter.ledger.nfe > 50, "without a highest score they run side by side"


def test_what_looks_perfect_is_finished_at_once() -> None:
    # 3 draws of the first transition, the second of which looks perfect; then its image.
    search, at = looking([0.1, 1.0, 0.2, 1.0], budget=18, ceiling=1.0, images=3)
    assert search.stopped == "ceiling" and search.meter.ledger.verifier_calls == 3 + 1
    assert [at[t] for t in (1.0, 0.75, 0.5, 0.25)] == [1, 3, 3, 3]


def test_what_only_looked_perfect_costs_one_image_and_the_chain_goes_on() -> None:
    # The image of the second draw is no good; those of the others are made at the end, and the second's not again.
    rewards = [0.1, 1.0, 0.2, 0.3, 0.4, 0.3, 0.2, 0.3, 0.1, 0.8, 0.7]
    search, _ = looking(rewards, budget=18, ceiling=1.0, images=2)
    assert search.best is not None and search.best.score == pytest.approx(0.8)
    assert search.meter.ledger.verifier_calls == 8 + 2 and search.meter.ledger.nfe == 18
    search, _ = looking([0.1, 1.0, 0.2, 0.4, 0.3, 0.2, 0.3, 0.1, 0.9], budget=18, ceiling=1.0, images=1)
    assert search.meter.ledger.verifier_calls == 8 + 1, "the only image is kept for what may still be found"


def test_draws_begin_where_starts_have_come_to() -> None:
    # 2 starts take 2 each, which leaves 14: a draw of 2, and 12 by 2 : 1 is 8 and 4, so 10 and 4. None improves.
    search, at = looking([0.0], budget=18, starts=2, skip=0.34)
    assert [at[t] for t in (1.0, 0.75, 0.5, 0.25)] == [2, 2, 5, 5 + 4]
    assert search.meter.ledger.nfe == 18


def test_measured_usefulness_sets_the_quotas() -> None:
    world = Watched()
    search = new(world, "rbf", budget=34, verifier=Scripted([0.0]), options={"chain_nfe": 34, **LOOKING})
    search.problem.usefulness = Usefulness((0.0, 1.0, 0.0, 0.0), (0, 0, 0, 1, 1))
    run(world, search)
    at = Counter(t for call in world.places for t, _ in call)
    assert [at[t] for t in (1.0, 0.75, 0.5, 0.25)] == [1, 1, 1 + 15, 16], "but for the one that must be drawn"


def test_a_distilled_model_of_another_kind_keeps_its_own_path() -> None:
    path = Discrete((1 - torch.linspace(0.001, 0.2, 40)).cumprod(0))
    world = Watched(path=path)
    run(world, new(world, "rbf", budget=50, distilled=True))
    grid = world.grid(STEPS, world.encode("")).tolist()[:-1]
    assert {t for call in world.places for t, _ in call} == set(grid)


@either
@pytest.mark.parametrize("explore", [None, 0.2, 1.0])
@pytest.mark.parametrize("starts", [None, 1, 6])
def test_rbf_leaves_less_than_a_lean_chain(distilled: bool, explore: float | None, starts: int | None) -> None:
    for budget in (*range(STEPS, 26, 3), 61, 100):
        world = Watched()
        search = run(
            world, new(world, "rbf", budget=budget, distilled=distilled, explore=explore, starts=starts, chain_nfe=20)
        )
        check(search, world)
        # On the model's own path a lean chain is a sample; on the 10 transitions of the VP path, at most this:
        lean = 1 + 9 + STEPS if distilled else STEPS
        assert search.meter.left("nfe") < lean, budget


@pytest.mark.parametrize("calls", [4, 5, 6, 11, 24, 50])
def test_rbf_scores_its_last_images_within_the_verifiers_limit(calls: int) -> None:
    """An image whose last preview spent the last call would be lost."""
    world = Watched()
    search = run(world, new(world, "rbf", budget=Budget(verifier_calls=calls), explore=1.0, chain_nfe=12))
    check(search, world)
    assert search.stopped == "complete", "not cut short"
    assert search.meter.ledger.verifier_calls > calls - STEPS - 1


def test_rbf_beats_best_of_n_where_previews_tell() -> None:
    """On the Gaussian with a quadratic reward, over 20 seeds, at equal cost."""
    gains = []
    for seed in range(20):
        world = Watched(shape=(12,))
        found = run(world, new(world, "rbf", budget=40, seed=seed, explore=1.0, accept="best")).best
        plain = run(world, new(world, "best-of-n", budget=40, seed=seed)).best
        assert found is not None and plain is not None
        gains.append(found.score - plain.score)
    gain = torch.tensor(gains)
    assert gain.mean() > 0.2 and (gain > 0).sum() >= 14


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ode": ({"kernel": "ode"}, "needs noise to choose from, and the kernel ode has none; take ddim"),
    "ddim(0)": ({"kernel": "ddim(0)"}, "has none"),
    "sde(g=0)": ({"kernel": "sde(g=0)"}, "has none"),
    "unknown kernel": ({"kernel": "euler"}, "Unknown kernel 'euler'; choose one of: ddim"),
    "no exploring": ({"explore": 0.0}, "explore can't be 0.0; give a share above 0 and up to 1"),
    "percent": ({"explore": 40.0}, "explore can't be 40.0"),
    "nan": ({"explore": math.nan}, "explore can't be nan"),
    "no chain": ({"chain_nfe": 0}, "must be at least 1"),
    "no draws": ({"draws": 0}, "must be at least 1"),
    "no starts": ({"starts": 0}, "must be at least 1"),
    "nothing kept": ({"keep": 0}, "keep can't be 0; it must be at least 1"),
    "no images": ({"images": 0}, "images can't be 0; it must be at least 1"),
    "looking behind": ({"look": -0.1}, "look can't be -0.1; give a share from 0 to 1"),
    "skipping all": ({"skip": 2.0}, "skip can't be 2.0; give a share from 0 to 1"),
    "looking too far": ({"look": 1.5}, "look can't be 1.5; give a share from 0 to 1"),
    "path": ({"path": "cosine"}, "option path can't be 'cosine'; give 'own' or 'linear' or 'vp' or none"),
    "accept": ({"accept": "last"}, "option accept can't be 'last'; give 'first' or 'best'"),
    "beat": ({"beat": "mean"}, "option beat can't be 'mean'; give 'best' or 'current'"),
    "fraction": ({"draws": 2.5}, "option draws can't be 2.5; give a whole number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rbf_says_what_its_options_may_be(case: str) -> None:
    options, message = REFUSED[case]
    world = Watched()
    with pytest.raises(UserError) as caught:
        run(world, new(world, "rbf", budget=40, options=options))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert world.batches == [], "refused before anything was spent"


def test_rbf_needs_two_steps_on_a_path_of_its_own() -> None:
    world = Watched()
    entry = registry.searcher["rbf"]
    problem = new(world, "best-of-n", budget=40).problem
    with pytest.raises(UserError, match="steps can't be 1; give 2 or more"):
        next(entry.target(problem, None, path="linear", steps=1))
