"""The bandit's statistics, features, actions and files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imgscale import files
from imgscale.bandit import Action, Context, LinUCB, Model, Pool, Prompts, Schema, load, save
from imgscale.bandit.linear import Thompson
from imgscale.bandit.persistence import schema as schema_of
from imgscale.bandit.ridge import REFRESH, Ridge
from imgscale.errors import UserError
from tests.bandits import FEATURES, MODELS, actions

NAMES = tuple(f"z{i}" for i in range(FEATURES))
CLIP = {"name": "clip", "sha256": "ab" * 32}


def pool(**options: Any) -> Pool:
    return Pool(actions(), Schema.of(actions(), NAMES, **options))


def contexts(n: int, seed: int = 0) -> list[Context]:
    return [Context(z) for z in np.random.default_rng(seed).standard_normal((n, FEATURES))]


def taught(policy: LinUCB, n: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Teaches n random rewards of random actions; their features (n, dim) and what was more than expected (n,)."""
    rng, rows, surplus = np.random.default_rng(seed), [], []
    for context in contexts(n, seed):
        action, reward = policy.pool.actions[rng.integers(len(policy.pool))], float(rng.random())
        assert policy.learn(context, action, reward)
        rows.append(policy.pool.schema.phi(policy.pool.schema.features(action), context.z))
        surplus.append(reward - (policy.prior(action) if policy.prior else 0.5))
    return np.array(rows), np.array(surplus)


# -------------------------------------------------------------------------------------------------------- statistics


def test_sherman_and_morrison_agree_with_solving_before_and_after_a_refresh() -> None:
    rng, ridge = np.random.default_rng(0), Ridge(np.ones(7), 0.5)
    x, y = rng.standard_normal((REFRESH + 30, 7)), rng.standard_normal(REFRESH + 30)
    for n, (phi, value) in enumerate(zip(x, y, strict=True), 1):
        ridge.observe(phi, value)
        if n in (1, 40, REFRESH - 1, REFRESH, REFRESH + 1, REFRESH + 30):
            gram = 0.5 * np.eye(7) + x[:n].T @ x[:n]
            np.testing.assert_allclose(ridge.gram, gram, atol=1e-9)
            np.testing.assert_allclose(ridge.inverse @ gram, np.eye(7), atol=1e-9)
            np.testing.assert_allclose(ridge.theta, np.linalg.solve(gram, x[:n].T @ y[:n]), atol=1e-10)


def test_forgetting_has_its_closed_form() -> None:
    rng, g, lam = np.random.default_rng(1), 0.9, 0.7
    firm = np.array([1.0, 1.0, 3.0, 0.5])
    ridge, x, y = Ridge(firm, lam, g), rng.standard_normal((25, 4)), rng.standard_normal(25)
    for phi, value in zip(x, y, strict=True):
        ridge.observe(phi, value)
    weights = g ** np.arange(24, -1, -1)
    gram = lam * np.diag(firm) + (weights[:, None] * x).T @ x
    np.testing.assert_allclose(ridge.gram, gram, atol=1e-12)
    np.testing.assert_allclose(ridge.theta, np.linalg.solve(gram, x.T @ (weights * y)), atol=1e-12)
    for _ in range(300):  # nothing new to be seen: back to what was believed at first
        ridge.observe(np.zeros(4), 0.0)
    np.testing.assert_allclose(ridge.gram, lam * np.diag(firm), atol=1e-9)


def test_many_observations_of_the_same_kind_stay_accurate() -> None:
    ridge, phi = Ridge(np.ones(5), 1e-3), np.array([100.0, 100.0, 1e-3, 0.0, 1.0])
    for _ in range(2 * REFRESH - 1):
        ridge.observe(phi, 0.5)
    np.testing.assert_allclose(ridge.inverse @ ridge.gram, np.eye(5), atol=1e-4)
    assert phi @ ridge.theta == pytest.approx(0.5, abs=1e-4)  # A's condition is 2e10


def prior(action: Action) -> float:
    return 0.2 + 0.01 * action.candidates


@pytest.mark.parametrize("form", ["interactions", "concatenated"])
def test_linucb_is_ridge_regression_with_its_bound(form: Any) -> None:
    """On what differs from what was expected, with the products' coefficients held more firmly."""
    policy = LinUCB(pool(form=form), alpha=0.7, ridge=2.0, products=3.0, prior=prior, mode=0.6)
    x, y = taught(policy, 60)
    place = np.arange(policy.pool.schema.dim)  # of phi: which are 1 and the action's own features?
    own = place <= policy.pool.schema.action_dim if form == "concatenated" else place % (1 + FEATURES) == 1
    own[0] = True
    gram = 2.0 * np.diag(np.where(own, 1.0, 3.0)) + x.T @ x
    theta = np.linalg.solve(gram, x.T @ y)
    (context,) = contexts(1, seed=9)
    phi = np.array([policy.pool.schema.phi(policy.pool.schema.features(a), context.z) for a in policy.pool.actions])
    mean = np.array([prior(action) for action in policy.pool.actions]) + phi @ theta
    width = 0.7 * np.sqrt((phi * np.linalg.solve(gram, phi.T).T).sum(1))
    best = int((0.6 * (mean + width) + 0.4 * (1 - policy.pool.costs)).argmax())
    choice = policy.choose(context)
    assert choice.action == policy.pool.actions[best] and choice.propensity == 1
    assert choice.expected == pytest.approx(mean[best], abs=1e-10)
    assert choice.uncertainty == pytest.approx(width[best], abs=1e-10)


@pytest.mark.parametrize("form", ["interactions", "concatenated"])
@pytest.mark.parametrize("onehot", [False, True])
def test_forms_on_phi_are_forms_on_the_action(form: Any, onehot: bool) -> None:
    made, rng = pool(form=form, onehot=onehot), np.random.default_rng(2)
    schema, z = made.schema, rng.standard_normal(FEATURES)
    v, half = rng.standard_normal(schema.dim), rng.standard_normal((schema.dim, 3))
    phi = schema.phi(made.features, z)
    assert phi.shape == (48, schema.dim)
    design = np.concatenate([np.ones((48, 1)), made.features], 1)
    np.testing.assert_allclose(design @ schema.project(v, z), phi @ v, atol=1e-9)
    np.testing.assert_allclose(
        design @ schema.project(half @ half.T, z) @ design.T, (phi @ half) @ (phi @ half).T, atol=1e-6
    )


def test_the_ranking_depends_on_the_prompt_with_products_only() -> None:
    for form, depends in (("interactions", True), ("concatenated", False)):
        made, rng = pool(form=form), np.random.default_rng(3)
        theta = rng.standard_normal(made.schema.dim)
        best = {int((made.schema.phi(made.features, c.z) @ theta).argmax()) for c in contexts(20)}
        assert (len(best) > 1) is depends


def test_thompson_draws_from_the_posterior() -> None:
    """Votes of many decisions against direct draws of the whole theta."""
    few = Pool(actions()[::12], Schema.of(actions(), NAMES))
    policy = Thompson(few, alpha=0.5, mode="quality", seed=1)
    x, y = taught(policy, 30)
    (context,) = contexts(1, seed=4)
    votes = np.mean([policy.probabilities(context) for _ in range(200)], 0)
    gram = np.eye(few.schema.dim) + x.T @ x
    drawn = np.random.default_rng(5).multivariate_normal(
        np.linalg.solve(gram, x.T @ y), 0.25 * np.linalg.inv(gram), size=12800
    )
    utility = 0.95 * (0.5 + few.schema.phi(few.features, context.z) @ drawn.T) + 0.05 * (1 - few.costs[:, None])
    expected = np.bincount(utility.argmax(0), minlength=len(few)) / 12800
    assert 0.02 < np.sort(expected)[-2]  # there is something to be wrong about
    np.testing.assert_allclose(votes, expected, atol=4 * np.sqrt(0.5 / 12800))


# ----------------------------------------------------------------------------------------------- modes and the pool


def test_a_switch_of_mode_needs_no_relearning() -> None:
    policy = LinUCB(pool(), mode="cost")
    twin = LinUCB(pool(), mode="quality")
    taught(policy, 80)
    taught(twin, 80)
    before = [policy.choose(c).action for c in contexts(20, 7)]
    policy.switch("quality")
    after = [policy.choose(c).action for c in contexts(20, 7)]
    assert after == [twin.choose(c).action for c in contexts(20, 7)] != before


def test_a_joint_policy_learns_utility() -> None:
    made = pool()
    policy = LinUCB(made, joint=True, mode=0.3)
    (context,) = contexts(1)
    action = made.actions[-1]
    policy.learn(context, action, 0.8)
    phi = made.schema.phi(made.features[-1], context.z)
    np.testing.assert_allclose(policy.model.moment, 0.3 * (0.8 - 0.5) * phi)  # costs are as expected


def test_a_new_model_starts_warm_by_its_descriptors() -> None:
    """Quality grows with the model's size here: a newcomer that is larger still is expected to be better."""
    old = [a for a in actions() if a.model.name in ("small", "medium")]
    made = Pool(old, Schema.of(old, NAMES))
    policy = LinUCB(made, mode=1.0, alpha=0.0)
    rng = np.random.default_rng(0)
    for context in contexts(200):
        action = old[rng.integers(len(old))]
        policy.learn(context, action, 0.4 + 0.3 * (action.model.name == "medium") + 0.02 * rng.standard_normal())
    new = [a for a in actions() if a.model.name == "large"]
    for action in new:
        made.add(action)
    context = Context(np.zeros(FEATURES))
    choice = policy.choose(context)
    assert choice.action in new and choice.expected > 0.6
    made.remove_model("large")
    assert policy.choose(context).action.model.name == "medium"
    made.add(new[3])
    assert policy.choose(context).action == new[3]


def test_cost_is_in_units_of_the_dearest_or_of_a_reference() -> None:
    some = actions()[:12]
    dearest = max(a.eflops for a in some)
    np.testing.assert_allclose(Pool(some).costs, [a.eflops / dearest for a in some])
    np.testing.assert_allclose(Pool(some, reference=2 * dearest).costs, [a.eflops / dearest / 2 for a in some])
    assert Pool(some, reference=dearest / 2).costs.max() == 1.0


ONE = actions()[0]
REFUSED: dict[str, tuple[Any, str]] = {
    "empty": (lambda: Pool([]), "The pool is empty; give at least one action"),
    "twice": (lambda: Pool([ONE, ONE]), "is in the pool twice"),
    "reference": (lambda: Pool([ONE], reference=0), "The reference cost can't be 0"),
    "searcher": (lambda: pool().add(replace(ONE, searcher="svdd")), "Unknown searcher of this schema 'svdd'"),
    "name": (lambda: pool().add(replace(ONE, eflops=1.0)), "Another action is called"),
    "unknown": (lambda: pool().remove("none"), "Unknown action 'none'"),
    "model": (lambda: pool().remove_model("larg"), "Did you mean 'large'?"),
    "masked": (lambda: pool().allowed(np.zeros(48, bool)), "the mask forbids all that are left"),
    "mask": (lambda: pool().allowed(np.ones(3, bool)), "A mask of shape (3,) doesn't fit 48 actions"),
    "nfe": (lambda: replace(ONE, nfe=0), "nfe can't be 0"),
    "eflops": (lambda: replace(ONE, eflops=float("nan")), "eflops can't be nan"),
    "parameters": (lambda: Model("m", 0, 1.0), "m's parameters can't be 0"),
    "prior": (lambda: Model("m", 1, 1.0, prior=2), "m's prior can't be 2"),
    "mode": (lambda: LinUCB(pool(), mode="qualty"), "Did you mean 'quality'?"),
    "weight": (lambda: LinUCB(pool(), mode=1.5), "The weight of quality can't be 1.5"),
    "epsilon": (lambda: LinUCB(pool(), epsilon=-1), "epsilon can't be -1"),
    "alpha": (lambda: LinUCB(pool(), alpha=-1), "alpha can't be -1"),
    "ridge": (lambda: LinUCB(pool(), ridge=0), "The ridge can't be 0"),
    "products": (lambda: LinUCB(pool(), products=0), "The factor of products can't be 0"),
    "discount": (lambda: LinUCB(pool(), discount=0), "The discount can't be 0"),
    "context": (lambda: LinUCB(pool()).choose(Context(np.zeros(3))), "the schema has (8,)"),
    "NaN": (lambda: Context(np.array([0, np.nan]), "a cat"), "'a cat' aren't finite"),
    "directions": (lambda: Prompts(8, 9), "can't be projected onto 9 directions"),
    "embedding": (lambda: Prompts(8, 2)("a cat", np.zeros(7)), "shape (7,); it must be (8,)"),
    "broken": (lambda: Prompts(2, 1)("a cat", [np.inf, 0]), "The embedding of 'a cat' isn't finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_told_in_one_sentence(case: str) -> None:
    do, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        do()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_removed_is_told_as_such() -> None:
    made = Pool([ONE])
    made.remove(ONE)
    with pytest.raises(UserError, match="all have been removed"):
        made.allowed()


# ------------------------------------------------------------------------------------------------------------ prompts


def test_prompts_are_read_for_what_they_ask() -> None:
    read = dict(zip(Prompts().names, Prompts()('Two red cats left of 3 Blue dogs, a sign "open late"'), strict=True))
    assert read["numbers"] == 2 / 4 and read["things"] == pytest.approx(np.log(6) / 3)
    assert read["colours"] == 2 / 4 and read["spatial words"] == 1 / 4 and read["quoted words"] == 2 / 4
    assert read["content words"] == pytest.approx(np.log(6) / 3)  # cats, dogs, sign, open, late
    assert np.isfinite(Prompts()("")).all() and not Prompts()("").any()


def test_the_projection_keeps_distances_on_average_and_forgets_length() -> None:
    prompts, rng = Prompts(512, 32, seed=3), np.random.default_rng(0)
    assert len(prompts.names) == 39
    a, b = rng.standard_normal((2, 400, 512))
    kept = [float(((prompts("", x) - prompts("", y)) ** 2).sum()) for x, y in zip(a, b, strict=True)]
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b)]
    assert np.mean(kept) == pytest.approx(((unit[0] - unit[1]) ** 2).sum(1).mean(), rel=0.05)
    np.testing.assert_allclose(prompts("a cat", a[0]), prompts("a cat", 7 * a[0]))
    assert not np.allclose(prompts("", a[0]), replace(prompts, seed=4)("", a[0]))


def test_schemas_that_differ_have_different_hashes() -> None:
    base = Schema.of(actions(), NAMES)
    assert (
        base.hash == Schema.of(actions(), NAMES).hash == Schema.from_dict(json.loads(json.dumps(base.to_dict()))).hash
    )
    others = [
        Schema.of(actions(), NAMES[::-1]),
        Schema.of(actions()[:24], NAMES),
        Schema.of(actions(), NAMES, form="concatenated"),
        Schema.of(actions(), NAMES, onehot=True),
        Schema.of(actions(), NAMES, searchers=("svdd",)),
        Schema.of(actions(), Prompts(8, 2).names),
        Schema.of(actions(), Prompts(8, 2, seed=1).names),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == len(others) + 1


def test_numbers_are_standardised_over_the_pool() -> None:
    features = pool().features
    np.testing.assert_allclose(features[:, :11].mean(0), 0, atol=1e-12)
    assert set(features[:, :11].std(0).round(9)) == {0.0, 1.0}  # a number that doesn't vary stays 0
    assert (features[:, 11:].sum(1) == 1).all()


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", [LinUCB, Thompson])
@pytest.mark.parametrize("discount", [1.0, 0.99])
def test_a_saved_policy_goes_on_as_the_first(kind: type[LinUCB], discount: float, tmp_path: Path) -> None:
    policy = kind(pool(), epsilon=0.2, alpha=0.4, ridge=1.5, products=2.0, discount=discount, seed=3)
    taught(policy, 50)
    policy.learn(contexts(1)[0], ONE, float("nan"))
    save(policy, tmp_path / "policy.npz", CLIP)
    again = load(tmp_path / "policy.npz", Pool(actions(), schema_of(tmp_path / "policy.npz")), CLIP)
    assert type(again) is kind and (again.learned, again.refused, again.products) == (50, 1, 2.0)
    for context in contexts(40, seed=8):
        one, two = policy.choose(context), again.choose(context)
        assert one == two
        for each in (policy, again):
            each.learn(context, one.action, 0.3)


def test_a_saved_policy_may_go_on_with_other_actions_and_another_mode(tmp_path: Path) -> None:
    policy = LinUCB(pool())
    taught(policy, 20)
    save(policy, tmp_path / "p", CLIP)
    fewer = Pool(actions()[:5], policy.pool.schema)
    assert load(tmp_path / "p", fewer, CLIP, mode="cost").weight == 0.5


def test_a_policy_of_other_features_or_another_verifier_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    save(LinUCB(pool()), path, CLIP)
    with pytest.raises(UserError, match="learned with other features"):
        load(path, pool(form="concatenated"), CLIP)
    with pytest.raises(UserError, match="rewarded by 'clip', not by 'hps'"):
        load(path, pool(), {**CLIP, "name": "hps"})
    with pytest.raises(UserError, match="'clip' with other weights or settings"):
        load(path, pool(), {**CLIP, "sha256": "cd" * 32})
    with pytest.raises(UserError, match="There is no policy file"):
        load(tmp_path / "q.npz", pool(), CLIP)


def tampered(path: Path, **changes: Any) -> bytes:
    """The file with parts of its head or its arrays replaced."""
    with np.load(path) as archive:
        arrays = dict(archive)
    head = json.loads(arrays["head"].tobytes())
    for name, value in changes.items():
        if name in arrays:
            arrays[name] = value
        else:
            head[name.replace("_", " ")] = value
    data = io.BytesIO()
    np.savez(data, **{**arrays, "head": np.frombuffer(json.dumps(head).encode(), np.uint8)})
    return data.getvalue()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "damaged or isn't one"),
        ("cut", "damaged or isn't one"),
        ("flipped", "damaged or isn't one"),
        ("text", "damaged or isn't one"),
        ("pickle", "damaged or isn't one"),
        ("format", "has format 99"),
        ("old", "has format 2, and this imgscale reads 3; begin a new one"),
        ("hash", "head doesn't fit together"),
        ("NaN", "aren't finite and symmetric"),
        ("indefinite", "not positive definite"),
        ("shape", "statistics of shapes"),
        ("rng", "damaged or isn't one"),
        ("alpha", "alpha can't be"),
        ("kind", "damaged or isn't one"),
        ("verifier", "head doesn't fit together"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(case: str, message: str, tmp_path: Path) -> None:
    path, policy = tmp_path / "policy.npz", LinUCB(pool())
    taught(policy, 10)
    save(policy, path, CLIP)
    whole, dim = path.read_bytes(), policy.pool.schema.dim
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    contents: dict[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "cut": lambda: whole[: len(whole) // 2],
        "flipped": lambda: bytes(flipped),
        "text": lambda: b"not a policy\n" * 9,
        "pickle": lambda: tampered(path, b=np.array(["pickled"], dtype=object)),
        "format": lambda: tampered(path, format=99),
        "old": lambda: tampered(path, format=2),
        "hash": lambda: tampered(path, schema_hash="0" * 64),
        "NaN": lambda: tampered(path, b=np.full(dim, np.nan)),
        "indefinite": lambda: tampered(path, A=-np.eye(dim)),
        "shape": lambda: tampered(path, b=np.zeros(3)),
        "rng": lambda: tampered(path, rng={"bit_generator": "PCG64"}),
        "alpha": lambda: tampered(path, alpha=-3),
        "kind": lambda: tampered(path, kind="mlp"),
        "verifier": lambda: tampered(path, verifier=["clip"]),
    }
    files.write(path, contents[case]())
    with pytest.raises(UserError, match=message) as caught:
        load(path, pool(), CLIP)
    assert "\n" not in str(caught.value)


def test_saving_replaces_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.npz"
    save(LinUCB(pool()), path, CLIP)
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save(LinUCB(pool(), alpha=0.1), path, CLIP)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_choice_says_what_it_is() -> None:
    action = Action(MODELS[2], "rbf", 60, 4.1e9)
    pool_ = Pool([action])
    policy = LinUCB(pool_)
    text = str(policy.choose(Context(np.zeros(len(pool_.schema.prompt)))))
    assert text == "medium, rbf, 60 NFE: expected quality 0.50 ± 0.42, 4.1 GFLOPs"
