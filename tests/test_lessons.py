"""What other prompts taught: a policy that learned it at once, and the file that it comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import imgscale
from imgscale.bandit import Context, LinUCB, Pool, Schema, lessons, poolfile, priors
from imgscale.bandit.lessons import Lessons
from imgscale.errors import UserError
from tests.auto import PROMPT, Double, auto, use
from tests.bandits import FEATURES, actions

CLIP = {"name": "clip", "sha256": "ab" * 32, "dtype": "float32"}
NAMES = tuple(f"z{i}" for i in range(FEATURES))
SOME = actions()[::4]


def made(p: int = 6, **changes: Any) -> Lessons:
    rng = np.random.default_rng(0)
    known = {"verifier": CLIP, "prompt": NAMES, "actions": SOME, "scores": tuple(np.linspace(0.1, 0.9, 9))}
    return Lessons(**{**known, "z": rng.random((p, FEATURES)), "quality": rng.random((p, len(SOME))), **changes})


def policy(acts: Any = SOME, **options: Any) -> LinUCB:
    return LinUCB(Pool(acts, Schema.of(acts, NAMES)), **options)


def test_they_count_as_so_many_observations() -> None:
    """Worth p k of them, they are the very observations, in whichever order."""
    learned, own = policy(prior=priors.expected, products=2.0), policy(prior=priors.expected, products=2.0)
    said = made()
    said.teach(learned, said.quality.size)
    for z, row in zip(said.z, said.quality, strict=True):
        for action, quality in zip(SOME, row, strict=True):
            own.learn(Context(z), action, quality)
    np.testing.assert_allclose(learned.model.theta, own.model.theta, atol=1e-9)
    np.testing.assert_allclose(learned.model.inverse, own.model.inverse, atol=1e-9)
    half = policy(products=2.0)
    said.teach(half, said.quality.size / 2)
    np.testing.assert_allclose(
        half.model.gram - np.diag(half.model._least), (own.model.gram - half.model.gram), atol=1e-9
    )


def test_shown_to_a_policy_of_any_kind_they_are_its_own_observations() -> None:
    shown, taught = policy(), policy()
    said = made()
    said.show(shown)
    said.teach(taught, said.quality.size)
    np.testing.assert_allclose(shown.model.theta, taught.model.theta, atol=1e-9)


def test_they_say_something_of_actions_that_they_lack() -> None:
    """Of a model whose other searches they know; a searcher that the policy doesn't know is left out."""
    said = made(40)
    said = replace(said, quality=np.array([[0.9 if a.model.name == "large" else 0.2 for a in SOME]] * 40))
    learned = policy(actions()[1::4], alpha=0.0, mode=1.0)
    said.teach(learned, 400)
    assert learned.choose(Context(np.full(FEATURES, 0.5))).action.model.name == "large"
    few = [action for action in actions() if action.searcher == "rbf"]
    ignorant = policy(few)
    replace(said, actions=tuple(a for a in actions() if a.searcher == "bfs")[: len(SOME)]).teach(ignorant, 400)
    assert not ignorant.model.theta.any()


def test_those_of_a_model_can_be_left_out() -> None:
    less = made().without("large")
    assert {action.model.name for action in less.actions} == {"turbo", "small", "medium"}
    assert less.quality.shape == (6, len(less.actions))


def test_a_file_says_the_same(tmp_path: Path) -> None:
    said = made()
    lessons.write(said, tmp_path / "l.json")
    again = lessons.read(tmp_path / "l.json")
    assert (again.verifier, again.prompt, again.actions) == (said.verifier, said.prompt, said.actions)
    np.testing.assert_allclose(again.quality, said.quality, atol=5e-5)
    np.testing.assert_allclose(again.z, said.z, atol=5e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "are damaged \\(format 2\\); give another file, or none"),
        ({"quality": [[0.5]]}, "features and \\(1, 1\\) qualities of"),
        ({"quality": [[2.0] * len(SOME)] * 6}, "qualities outside"),
        ({"actions": [{}]}, "are damaged"),
        ({"scores": []}, "are damaged"),
        ({"z": "none"}, "are damaged"),
    ],
)
def test_a_damaged_file_is_one_sentence(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "l.json"
    lessons.write(made(), file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=message) as caught:
        lessons.read(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="can't be read .*give another file, or none"):
        lessons.read(tmp_path / "nowhere.json")


def test_they_are_for_their_verifier_in_whichever_precision() -> None:
    said = made()
    assert said.fits(NAMES, {**CLIP, "dtype": "float16"})
    assert not said.fits(NAMES, {**CLIP, "sha256": "cd" * 32}) and not said.fits(NAMES[1:], CLIP)


def test_a_new_policy_of_a_pool_begins_with_its_lessons(monkeypatch: Any, tmp_path: Path) -> None:
    """What they taught is expected at once, and their scores are the first of the scale; other pools begin without."""
    doubles = [Double("small/one", lambda searcher, nfe: 0.2), Double("small/two", lambda searcher, nfe: 0.4)]
    use(monkeypatch, *doubles)
    plain = auto(tmp_path / "plain.policy")
    acts, names = tuple(plain.pool.actions), plain.pool.schema.prompt
    quality = np.array([[0.9 if action.model.name == "small/two" else 0.1 for action in acts]] * 30)
    said = made(30, actions=acts, prompt=names, z=np.random.default_rng(1).random((30, len(names))), quality=quality)
    said = replace(said, verifier=plain._judging.verifier.identity())
    lessons.write(said, tmp_path / "l.json")
    pool = poolfile.of({**plain.file.model_dump(exclude_unset=True), "lessons": "l.json"})
    pool._folder = tmp_path
    taught = imgscale.auto(pool=pool, policy=tmp_path / "a.policy", draws=0)
    expected = {c.action.name: c.expected for c, _ in taught.store.policy.ranking(taught._context(PROMPT))}
    assert all((value > 0.6) == ("two" in name) for name, value in expected.items())
    assert taught.store.memory.scale.seen == 9 and plain.store.memory.scale.seen == 0
    taught(PROMPT, progress=False)
    again = imgscale.auto(pool=pool, policy=tmp_path / "a.policy").store.policy  # goes on, and isn't taught again
    assert again.learned == 1 and np.allclose(again.model.gram, taught.store.policy.model.gram)
    lessons.write(replace(said, verifier={"name": "hps"}), tmp_path / "l.json")
    other = imgscale.auto(pool=pool, policy=tmp_path / "other.policy")
    assert "are of another verifier or other features" in other.notices[0]
