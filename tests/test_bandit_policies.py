"""Every policy does what the interface says."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imgscale.bandit import POLICIES, Action, Context, Policy, Pool, Schema, make
from imgscale.bandit.neural import Network
from imgscale.errors import UserError
from tests.bandits import FEATURES, actions

PAGE = Path(__file__).parent.parent / "docs" / "bandit.md"
INSTALLED = importlib.util.find_spec("vowpalwabbit") is not None
outside = pytest.mark.skipif(not INSTALLED, reason='vowpalwabbit isn\'t installed: pip install "imgscale[bandits]"')
every = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=outside) if n == "vowpalwabbit" else n for n in POLICIES]
)
NAMES = tuple(f"z{i}" for i in range(FEATURES))
SOME = actions()[::3]  # 16: four models, best-of-n


def new(name: str, acts: tuple[Action, ...] = SOME, **options: Any) -> Policy:
    if name == "fixed":
        options = {"action": acts[0], **options}
    return make(name, Pool(acts, Schema.of(acts, NAMES)), **options)


def context(seed: int, n: int = len(SOME)) -> Context:
    rng = np.random.default_rng(seed)
    return Context(rng.standard_normal(FEATURES), truth=rng.random(n))


def lived(policy: Policy, steps: int, reward: Any = None) -> list[tuple[str, float]]:
    """Chooses and learns; names and propensities."""
    rng, made = np.random.default_rng(0), []
    for step in range(steps):
        seen = context(step, len(policy.pool))
        choice = policy.choose(seen)
        policy.learn(seen, choice.action, rng.random() if reward is None else reward)
        made.append((choice.action.name, choice.propensity))
    return made


@every
def test_choices_are_the_same_for_a_seed(name: str) -> None:
    assert lived(new(name, seed=4), 40) == lived(new(name, seed=4), 40)


@every
def test_propensities_are_the_frequencies_of_choices(name: str) -> None:
    """Of decisions in one state; the votes of Thompson sampling are random themselves, and right on average."""
    policy = new(name, epsilon=0.3, seed=2)
    lived(policy, 30)
    here, mask = context(99), np.arange(16) % 2 == 0
    shares = np.mean([policy.probabilities(here, mask) for _ in range(100)], 0)
    assert shares.sum() == pytest.approx(1) and not shares[~mask].any() and shares.min() >= 0
    assert name in ("routing-only", "search-only") or shares[mask].min() >= 0.3 / 8 - 1e-9
    n = 1000
    found = Counter(policy.choose(here, mask).action.name for _ in range(n))
    for action, share in zip(policy.pool.actions, shares, strict=True):
        assert abs(found[action.name] / n - share) <= 4.5 * np.sqrt(max(share * (1 - share), 1e-3) / n) + 0.01


@every
def test_the_propensity_is_that_of_the_chosen_action(name: str) -> None:
    policy = new(name, epsilon=0.5)
    for step in range(20):
        here = context(step)
        state = policy.rng.bit_generator.state
        shares = policy.probabilities(here)
        policy.rng.bit_generator.state = state
        choice = policy.choose(here)
        assert choice.propensity == pytest.approx(shares[policy.pool.index(choice.action)]) and choice.propensity > 0


@every
def test_masks_hold(name: str) -> None:
    policy = new(name, epsilon=0.5)
    lived(policy, 10)
    for place in range(16):
        mask = np.arange(16) == place
        choice = policy.choose(context(place), mask)
        assert choice.action == SOME[place] and choice.propensity == pytest.approx(1)
    with pytest.raises(UserError, match="None of the 16 actions can be chosen"):
        policy.choose(context(0), np.zeros(16, bool))


@every
def test_one_action_is_chosen_for_sure(name: str) -> None:
    policy = new(name, SOME[:1])
    assert {choice for choice, _ in lived(policy, 5)} == {SOME[0].name}


@every
def test_rewards_that_are_no_numbers_are_refused_and_change_nothing(name: str) -> None:
    policy, twin = (new(name, seed=1) for _ in range(2))
    for reward in (float("nan"), float("inf"), -float("inf")):
        assert policy.learn(context(1), SOME[2], reward) is False
    assert (policy.refused, policy.learned) == (3, 0)
    assert lived(policy, 20) == lived(twin, 20)


@every
@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_constant_rewards_are_survived(name: str, reward: float) -> None:
    policy = new(name)
    lived(policy, 60, reward)
    shares = policy.probabilities(context(5))
    assert np.isfinite(shares).all() and shares.sum() == pytest.approx(1)


@every
def test_actions_come_and_go(name: str) -> None:
    policy = new(name, SOME[4:], seed=3)  # without turbo
    lived(policy, 20)
    for action in SOME[:4]:
        policy.pool.add(action)
    lived(policy, 20)
    assert policy.learn(context(1), SOME[0], 0.9)
    policy.pool.remove_model("large")
    assert not {choice for choice, _ in lived(policy, 40)} & {a.name for a in SOME if a.model.name == "large"}
    gone = SOME[-1]
    assert policy.learn(context(2), gone, 0.1)  # one that was running as it left


@every
def test_an_action_of_nowhere_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="Unknown action"):
        new(name).learn(context(0), actions()[1], 0.5)


LEARNERS = ("linucb", "thompson", "epsilon-greedy", "knn", "mlp", "neuralucb")  # greedy may get stuck, and does


@pytest.mark.parametrize("name", [*LEARNERS, pytest.param("vowpalwabbit", marks=outside)])
def test_learners_find_the_action_that_is_better_for_a_prompt(name: str) -> None:
    """One model is good where z0 is positive, another where it is negative; costs don't matter."""
    acts = (SOME[4], SOME[8])
    policy = new(name, acts, mode=1.0, seed=5)
    rng, right = np.random.default_rng(6), []
    for _ in range(500):
        seen = Context(np.concatenate([[rng.choice([-1.0, 1.0])], 0.1 * rng.standard_normal(FEATURES - 1)]))
        choice = policy.choose(seen)
        good = (choice.action == acts[0]) == (seen.z[0] > 0)
        policy.learn(seen, choice.action, 0.3 + 0.4 * good + 0.05 * rng.standard_normal())
        right.append(good)
    assert np.mean(right[-200:]) > 0.85


@every
def test_what_is_expected_beforehand_holds_until_something_is_learned(name: str) -> None:
    """Policies that expect something of actions begin with the prior; an action that joins has its own."""
    few, unsure = SOME[:-1], name in ("random", "fixed", "oracle", "vowpalwabbit")
    policy = new(name, few, prior=lambda action: 0.2 + 0.01 * action.candidates, epsilon=0.0)
    policy.pool.add(SOME[-1])
    for choice, _ in policy.ranking(context(0)):
        assert choice.expected == pytest.approx(
            np.nan if unsure else 0.2 + 0.01 * choice.action.candidates, nan_ok=True
        )


def test_routing_chooses_models_and_search_only_searches() -> None:
    routed = {choice for choice, _ in lived(new("routing-only", epsilon=1.0), 100)}
    assert routed == {a.name for a in SOME if a.candidates == 1}
    searched = {choice for choice, _ in lived(new("search-only", epsilon=1.0), 100)}
    assert searched == {a.name for a in SOME if a.model.name == "large"}
    turbo = {choice for choice, _ in lived(new("search-only", epsilon=1.0, model="turbo"), 100)}
    assert turbo == {a.name for a in SOME if a.model.name == "turbo"}


def test_a_fixed_action_that_is_masked_gives_way_to_the_nearest_in_cost() -> None:
    policy = new("fixed", action=SOME[5])
    mask = np.ones(16, bool)
    mask[5] = False
    costs = policy.pool.costs
    nearest = min((i for i in range(16) if i != 5), key=lambda i: abs(costs[i] - costs[5]))
    assert policy.choose(context(0), mask).action == SOME[nearest]


def test_neighbours_are_averaged() -> None:
    policy = new("knn", neighbours=2, epsilon=0.0, scale=1e6)  # other actions are far away
    for z, reward in ((0.0, 0.1), (1.0, 0.5), (1.2, 0.9), (5.0, 0.0)):
        policy.learn(Context(np.full(FEATURES, z)), SOME[3], reward)
    choice = policy.choose(Context(np.full(FEATURES, 1.1)), np.arange(16) == 3)
    assert choice.expected == pytest.approx(0.7)


def test_gradients_of_the_network_are_those_of_differences() -> None:
    rng = np.random.default_rng(0)
    network, x, y = Network(5, 4, rng), rng.standard_normal((6, 5)), rng.standard_normal(6)
    network.weights = rng.standard_normal(len(network.weights))
    found, weights, small = network.gradients(x), network.weights.copy(), 1e-6
    for i in range(len(weights)):
        network.weights = weights + small * (np.arange(len(weights)) == i)
        up = network(x)
        network.weights = weights - small * (np.arange(len(weights)) == i)
        np.testing.assert_allclose(found[:, i], (up - network(x)) / (2 * small), atol=1e-6)
    network.weights = weights.copy()
    network.train(x, y)  # Adam's first step is its rate against the sign of the gradient
    gradient = found.T @ (Network.__call__(_at(network, weights), x) - y)
    moved = np.abs(gradient) > 1e-6
    np.testing.assert_allclose((network.weights - weights)[moved], -3e-3 * np.sign(gradient)[moved], rtol=1e-3)


def _at(network: Network, weights: np.ndarray[Any, Any]) -> Network:
    twin = Network(network.inputs, network.hidden, np.random.default_rng(0))
    twin.weights = weights
    return twin


def test_neuralucb_is_less_sure_of_what_it_has_not_seen() -> None:
    policy = new("neuralucb")
    seen, other = Context(np.full(FEATURES, 0.5)), Context(np.linspace(-2, 2, FEATURES))
    before = policy._estimate(seen)[1][3]
    for _ in range(30):
        policy.learn(seen, SOME[3], 0.5)
    assert policy._estimate(seen)[1][3] < 0.5 * before < 0.5 * policy._estimate(other)[1][3] * 5


def test_unknown_policies_are_told() -> None:
    with pytest.raises(UserError, match="Did you mean 'linucb'"):
        make("linucp", Pool(SOME))


@pytest.mark.skipif(INSTALLED, reason="vowpalwabbit is installed")
def test_a_missing_extra_is_named() -> None:
    with pytest.raises(UserError, match=r'vowpalwabbit isn\'t installed; run: pip install "imgscale\[bandits\]"'):
        new("vowpalwabbit")


def test_the_oracle_needs_the_truth() -> None:
    with pytest.raises(UserError, match="for replays only"):
        new("oracle").choose(Context(np.zeros(FEATURES)))


def test_the_page_s_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    example, other = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (printed,) = re.findall(r"print\(choice\) +# (.*)", example)
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed + "\n"
    exec(compile(other, str(PAGE), "exec"), {})
