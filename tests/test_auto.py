"""`model="auto"`: what it chooses, learns and keeps, and what it says when something goes wrong."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import imgscale
from imgscale import models, png
from imgscale.bandit.memory import KEPT, Scale, category
from imgscale.bandit.store import decisions, default_path, log_of, logged, opened, set_aside
from imgscale.budget import Budget
from imgscale.errors import UserError
from tests.auto import PRICE, PROMPT, Double, auto, use


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.policy"


def one(score: float = 0.2) -> Double:
    return Double("small/one", lambda searcher, nfe: score)


def two(score: float = 0.8) -> Double:
    return Double("small/two", lambda searcher, nfe: score)


def judged(monkeypatch: pytest.MonkeyPatch, right: set[str]) -> None:
    """A check that finds the images of some models right."""
    monkeypatch.setattr("imgscale.bandit.judging.Judging.correct", lambda self, prompt, output: output.model in right)


# ------------------------------------------------------------------------------------------------ choosing, learning


def test_it_explains_its_choice_in_a_line_runs_it_and_learns_at_once(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    made, said = auto(file), []
    output = made(PROMPT, explain=lambda decision: said.append(str(decision)), progress=False)
    assert output.decision is not None
    action = output.decision.choice.action
    assert output.model == action.model.name and output.decision.learned and made.last is output.decision
    (line,) = said
    name, numbers = line.split(": ")
    assert name == f"{output.model}, best-of-n, {action.nfe} NFE"
    assert numbers.startswith("expected quality ") and " ± " in numbers and numbers.endswith(" FLOPs")
    first = made.last
    assert first is not None
    before, after = first.choice, made.choose(PROMPT)
    known = next(c for c, _ in made.store.policy.ranking(made._context(PROMPT)) if c.action == action)
    assert known.uncertainty < before.uncertainty and after.choice is not before
    assert made.store.policy.learned == 1 and opened(file)[1].categories["hard"].n == 1


def test_it_comes_to_prefer_the_model_that_is_right(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    judged(monkeypatch, {"small/two"})
    made = auto(file, mode="quality")
    for seed in range(12):
        made(PROMPT, seed=seed, progress=False)
    assert made.choose(PROMPT).choice.action.model.name == "small/two"
    with pytest.raises(UserError, match="Unknown mode"):
        made.switch("best")
    made.switch(0.0)  # cost alone
    assert made.choose(PROMPT).choice.action.eflops == min(action.eflops for action in made.pool.actions)


def test_a_search_gets_what_the_pool_says_and_what_is_asked_for(file: Path, monkeypatch: Any) -> None:
    double = one()
    use(monkeypatch, double)
    entry = {"name": "small/one", "steps": 7, "guidance": 3.0, "height": 32, "width": 16, "preview": "linear"}
    made = auto(file, models=[entry], early_exit="paper")
    made(PROMPT, "blurry", seed=5, plain=False, keep=3, height=48, progress=False, verifier_timeout=2.0)
    (asked,) = double.asked
    assert {name: asked[name] for name in ("num_inference_steps", "guidance_scale", "width", "preview")} == {
        **{"num_inference_steps": 7, "guidance_scale": 3.0, "width": 16, "preview": "linear"},
    }
    assert (asked["height"], asked["seed"], asked["keep"], asked["plain"]) == (48, 5, 3, False)
    assert asked["early_exit"] == "paper" and asked["verifier_timeout"] == 2.0
    assert asked["price"] is None  # of another size: counted anew if it is needed
    made(PROMPT, progress=False)
    assert double.asked[1]["price"] == PRICE


def test_several_prompts_are_drawn_one_after_another_with_their_seeds(file: Path, monkeypatch: Any) -> None:
    double = one()
    use(monkeypatch, double)
    made = auto(file, ["small/one"])
    outputs = made(["a star", PROMPT], seed=[3, 4], progress=False)
    assert [each["seed"] for each in double.asked] == [3, 4] and len(outputs) == 2
    assert made.store.policy.learned == 2
    refused: Any = (
        ([], 0, "can't be empty"),
        (["a star", ""], 0, "The prompt can't be ''"),
        (["a star"], [1, 2], "2 seeds for 1 prompts"),
        (3, 0, "The prompt can't be 3"),
    )
    for prompts, seed, sentence in refused:
        with pytest.raises(UserError, match=sentence):
            made(prompts, seed=seed, progress=False)
    assert len(double.asked) == 2  # refused before anything is drawn


@pytest.mark.parametrize("name", ["searcher", "verifier", "num_inference_steps", "preview", "early_exit", "journal"])
def test_what_it_decides_is_refused(name: str, file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    with pytest.raises(UserError, match=f'model="auto" decides {name} itself; leave it out'):
        made: Any = auto(file, ["small/one"])
        made(PROMPT, **{name: "rbf"})


def test_load_takes_auto_and_refuses_what_is_not_for_it(file: Path, monkeypatch: Any) -> None:
    with pytest.raises(UserError, match="mode can only be said of model=\"auto\"; this is 'shapes-flow'"):
        imgscale.load("shapes-flow", mode="cost")  # type: ignore[call-overload]
    with pytest.raises(UserError, match="say them in the pool file"):
        imgscale.load("auto", max_batch=4)
    with pytest.raises(UserError, match='distilled can\'t be said of model="auto"'):
        imgscale.load("auto", distilled=True)


def test_a_budget_masks_dearer_actions(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    made = auto(file, own={"epsilon": 1.0})
    assert {made.choose(PROMPT, 4).choice.action.nfe for _ in range(20)} == {4}
    assert {made.choose(PROMPT, Budget(eflops=50)).choice.action.name for _ in range(9)} == {
        "small/one, best-of-n, 4 NFE"
    }
    with pytest.raises(
        UserError, match="too small for every action of the pool; the smallest takes 4 NFE and 40 eFLOPs"
    ):
        made.choose(PROMPT, 3)
    for name in ("small/one", "small/two"):
        made.pool.remove_model(name)
    with pytest.raises(UserError, match="No model of the pool can be used"):
        made(PROMPT)


def test_one_action_is_chosen_for_sure(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    made = auto(file, models=[{"name": "small/one", "budgets": [4]}])
    choice = made.choose(PROMPT).choice
    assert (choice.propensity, choice.action.nfe) == (1.0, 4)


@pytest.mark.parametrize(("dense", "quality"), [(True, 0.75), (False, 1.0)])
def test_dense_feedback_on_and_off(dense: bool, quality: float, file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    judged(monkeypatch, {"small/one"})
    made = auto(file, ["small/one"], own={"dense": dense})
    decision = made(PROMPT, progress=False).decision  # the first score is the middle of the scale
    assert (decision.correct, decision.quality) == (True, quality)


def test_without_a_check_the_quality_is_the_score_s_place_among_all(file: Path, monkeypatch: Any) -> None:
    scores = iter([0.5, 0.7, 0.1, 0.6])
    use(monkeypatch, Double("small/one", lambda searcher, nfe: next(scores)))
    made = auto(file, ["small/one"])
    qualities = [made("a dog", progress=False).decision.quality for _ in range(4)]
    assert qualities == pytest.approx([1 / 2, 3 / 4, 1 / 6, 5 / 8])


def test_constant_scores_do_no_harm(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(0.5), two(0.5))
    made = auto(file)
    for _ in range(30):
        decision = made("a dog", progress=False).decision
        assert decision.quality == 0.5 and math.isfinite(decision.choice.expected)


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_a_score_that_is_no_number_is_said_and_not_learned(score: float, file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(score))
    made = auto(file, ["small/one"])
    theta = made.store.policy.model.theta.copy()
    output = made(PROMPT, progress=False)
    assert output.events == [f"Nothing was learned from this search, since its score is {score}."]
    assert np.allclose(made.store.policy.model.theta, theta, atol=1e-12) and made.store.policy.refused == 1
    assert decisions(file)[0]["score"] is None
    made(PROMPT, progress=False)  # goes on


@pytest.mark.parametrize(
    ("stopped", "why"),
    [
        *(("cancelled", "it was stopped early"), ("deadline", "it was stopped early")),
        ("verifier", "the verifier judged none of its images"),
    ],
)
def test_a_search_that_was_cut_short_teaches_nothing(stopped: str, why: str, file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, Double("small/one", lambda searcher, nfe: 0.1, stopped))
    made = auto(file, ["small/one"])
    output = made(PROMPT, progress=False)
    assert output.events == [f"Nothing was learned from this search, since {why}."]
    assert not output.decision.learned and not file.exists() and not log_of(file).exists()


def test_it_need_not_learn(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    output = auto(file, ["small/one"], learn=False)(PROMPT, progress=False)
    assert not output.decision.learned and output.events == [] and not file.exists()


# ------------------------------------------------------------------------------------------------------------ models


def test_models_are_loaded_when_they_are_chosen_and_the_least_recently_used_leaves(
    file: Path, monkeypatch: Any
) -> None:
    names = ["small/one", "small/two", "small/three"]
    there = use(monkeypatch, *(Double(name, lambda searcher, nfe: 0.5) for name in names))
    made = auto(file, names, resident=2)
    assert there.loaded == [] and made.resident == []
    for name, resident in (
        *(("small/one", ["small/one"]), ("small/two", ["small/one", "small/two"])),
        *(("small/one", ["small/two", "small/one"]), ("small/three", ["small/one", "small/three"])),
    ):
        made.pool.alive = np.array([action.model.name == name for action in made.pool.actions])
        made(PROMPT, progress=False)
        assert made.resident == resident
    assert there.loaded == ["small/one", "small/two", "small/three"]


@pytest.mark.parametrize(
    "error", [UserError("A weights file is damaged."), RuntimeError("CUDA error"), OSError("gone")]
)
def test_a_model_that_fails_to_load_is_left_out_and_the_others_go_on(
    error: Exception, file: Path, monkeypatch: Any
) -> None:
    there = use(monkeypatch, one(), two())
    made = auto(file, own={"epsilon": 1.0})
    made(PROMPT, progress=False)
    there.broken["small/two"] = error
    made.residents.drop("small/two")
    outputs = [made(PROMPT, seed=seed, progress=False) for seed in range(8)]
    said = [event for output in outputs for event in output.events]
    assert len(said) == 1 and said[0].startswith("The model 'small/two' is left out, and the others go on: ")
    assert str(error) in said[0] and said == made.notices
    assert outputs[-1].model == "small/one" and there.loaded.count("small/two") <= 2
    there.broken["small/one"] = error
    made.residents.drop("small/one")
    with pytest.raises(UserError, match="No model of the pool can be used. The model 'small/two' is left out"):
        made(PROMPT)


def test_a_model_that_runs_out_of_memory_in_a_search_is_left_out(file: Path, monkeypatch: Any) -> None:
    def full(searcher: str, nfe: int) -> float:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB.")

    use(monkeypatch, one(), Double("small/two", full))
    made = auto(file, own={"epsilon": 1.0})
    outputs = [made(PROMPT, seed=seed, progress=False) for seed in range(6)]
    assert {output.model for output in outputs} == {"small/one"} and made.resident == ["small/one"]
    assert sum("'small/two' is left out" in event for output in outputs for event in output.events) == 1


def test_what_breaks_otherwise_in_a_search_is_the_user_s_to_see(file: Path, monkeypatch: Any) -> None:
    def broken(searcher: str, nfe: int) -> float:
        raise RuntimeError("shapes don't fit")

    use(monkeypatch, Double("small/one", broken))
    with pytest.raises(RuntimeError, match="shapes don't fit"):
        auto(file, ["small/one"])(PROMPT, progress=False)
    assert not file.exists()


def test_models_that_are_not_here(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    made = auto(file, models=[{"name": "small/one"}, {"name": "big/one", "optional": True}, {"name": "big/two"}])
    assert made.notices == ["The model 'big/two' is left out, and the others go on: There is no big/two."]
    with pytest.raises(UserError, match="None of the pool's models is on this machine"):
        auto(file, models=[{"name": "big/one", "optional": True}])
    with pytest.raises(UserError, match="No model of the pool can be used. The model 'big/two'"):
        auto(file, models=[{"name": "big/two"}])


# ------------------------------------------------------------------------------------------------------- the policy


def test_the_policy_lies_where_it_is_said_and_goes_on(file: Path, home: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    first = auto(file)
    for seed in range(3):
        first(PROMPT, seed=seed, progress=False)
    again = auto(file)
    assert again.store.policy.learned == 3 and again.store.memory.scale.seen == 3
    assert np.allclose(again.store.policy.model.theta, first.store.policy.model.theta)
    assert default_path() == home / "data" / "imgscale" / "default.policy"
    mine = default_path(home / "mine.toml")
    assert mine.parent == default_path().parent and mine.name.startswith("mine-") and mine.suffix == ".policy"
    assert auto(None).store.path.name.startswith("given-")  # type: ignore[arg-type]


def test_two_that_teach_one_file_lose_nothing(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    a, b = auto(file), auto(file)
    for seed in range(3):
        a(PROMPT, seed=seed, progress=False)
        b(PROMPT, seed=seed, progress=False)
    assert (a.store.policy.learned, b.store.policy.learned) == (5, 6) and auto(file).store.policy.learned == 6
    assert len(decisions(file)) == 6


TEACHER = """
import sys
from pathlib import Path
import pytest
from tests.auto import PROMPT, Double, auto, use
with pytest.MonkeyPatch.context() as patch:
    use(patch, Double("small/one", lambda searcher, nfe: 0.5))
    made = auto(Path(sys.argv[1]), ["small/one"])
    for seed in range(10):
        made(PROMPT, seed=seed, progress=False)
"""


def test_two_processes_teach_one_file(file: Path) -> None:
    root = Path(__file__).parents[1]
    both = [subprocess.Popen([sys.executable, "-c", TEACHER, str(file)], cwd=root) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    policy, memory = opened(file)
    assert policy.learned == memory.scale.seen == len(decisions(file)) == 20


def test_a_reset_holds_for_those_that_run(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    made = auto(file, ["small/one"])
    made(PROMPT, progress=False)
    moved = set_aside(file)
    assert [path.exists() for path in moved] == [True, True] and not file.exists() and set_aside(file) == []
    made(PROMPT, progress=False)
    assert opened(file)[0].learned == made.store.policy.learned == 1


def test_a_mode_belongs_to_who_asks_and_a_kind_to_the_pool(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    auto(file, ["small/one"], mode="cost")(PROMPT, progress=False)
    made = auto(file, ["small/one"], mode="quality", own={"kind": "thompson", "alpha": 0.4, "discount": 0.99})
    policy = made.store.policy
    assert (policy.name, policy.weight, policy.alpha, policy.model.forget) == ("thompson", 0.95, 0.4, 0.99)
    assert policy.learned == 1


def test_models_come_and_go_and_the_policy_goes_on(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two(), Double("small/three", lambda searcher, nfe: 0.9))
    auto(file)(PROMPT, progress=False)
    more = auto(file, ["small/one", "small/two", "small/three"])
    assert more.store.policy.learned == 1 and len(more.pool) == 6
    assert np.isfinite(more.pool.features).all()
    new = [c for c, _ in more.store.policy.ranking(more._context(PROMPT)) if c.action.model.name == "small/three"]
    assert len(new) == 2 and all(0 < choice.expected < 1 for choice in new)  # by what describes it
    more(PROMPT, progress=False)
    fewer = auto(file, ["small/two"])
    assert fewer.store.policy.learned == 2 and {a.model.name for a in fewer.pool.actions} == {"small/two"}
    fewer(PROMPT, progress=False)
    assert {action.model.name for action in opened(file)[1].actions} == {"small/two"}


def test_priors_warm_a_new_policy(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    made = auto(file, models=[{"name": "small/one", "prior": 0.2}, {"name": "small/two", "prior": 0.6}])
    expected = {c.action.name: c.expected for c, _ in made.store.policy.ranking(made._context(PROMPT))}
    assert expected["small/one, best-of-n, 4 NFE"] == pytest.approx(0.2, abs=0.1)
    assert expected["small/two, best-of-n, 4 NFE"] == pytest.approx(0.6, abs=0.1)
    cold = auto(file, own={"prior": False})
    assert {c.expected for c, _ in cold.store.policy.ranking(cold._context(PROMPT))} == {0.5}


def test_a_file_that_cannot_go_on_is_one_sentence(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    auto(file, ["small/one"])(PROMPT, progress=False)
    with pytest.raises(UserError, match=r"was rewarded by 'aesthetic', not by 'sharpness'; .*imgscale policy reset"):
        auto(file, ["small/one"], verifier="sharpness")
    with pytest.raises(UserError, match=r"doesn't know the searcher 'paths', and can't learn of it; leave it out, or"):
        auto(file, ["small/one"], searchers=["best-of-n", "paths"])
    auto(file, ["small/one"], searchers=["best-of-n", "rbf"])  # known from the beginning
    monkeypatch.setattr("imgscale.automatic.Judging.reader", lambda self: (imgscale.bandit.Prompts(4, 2), None))
    with pytest.raises(UserError, match="set `projected` of the pool file back to 0, or begin anew with imgscale"):
        auto(file, ["small/one"])


def test_a_corrupt_file_is_one_sentence_and_a_reset_mends_it(file: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    file.write_bytes(b"junk")
    with pytest.raises(UserError, match="is damaged or isn't one .*imgscale policy reset"):
        auto(file, ["small/one"])
    set_aside(file)
    made = auto(file, ["small/one"])
    made(PROMPT, progress=False)
    file.write_bytes(file.read_bytes()[:1000])  # while it runs
    output = made(PROMPT, progress=False)
    assert not output.decision.learned and "Nothing was learned from this search: The policy file" in output.events[0]


def test_a_place_that_cannot_be_written_is_said_before_a_search(tmp_path: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't be kept there \(.*\); name another file"):
        auto(tmp_path / "file" / "a.policy", ["small/one"])


def test_the_log_can_be_used_for_other_policies_and_left_out(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    use(monkeypatch, one(), two())
    made = auto(file, own={"epsilon": 0.5})
    for seed in range(4):
        made(PROMPT, seed=seed, progress=False)
    rows = logged(file, made.pool)
    assert len(rows) == 4 and all(0 < row.propensity <= 1 and 0 <= row.reward <= 1 for row in rows)
    with log_of(file).open("a") as log:
        log.write('{"cut sho')
    assert len(decisions(file)) == 4
    log_of(file).write_text("junk\n")
    with pytest.raises(UserError, match="The log .* is damaged"):
        decisions(file)
    silent = tmp_path / "silent.policy"
    auto(silent, own={"log": False})(PROMPT, progress=False)
    assert silent.exists() and not log_of(silent).exists()


def test_a_decision_can_be_recalled(file: Path, monkeypatch: Any) -> None:
    double = one()
    use(monkeypatch, double, two())
    made = auto(file, own={"epsilon": 1.0})
    values = json.loads(json.dumps(made.choose(PROMPT, draws=7).as_dict()))
    assert values == made.choose(PROMPT, draws=7).as_dict()
    decision = made.recalled(PROMPT, values)
    assert decision is not None and decision.as_dict() == values
    output = made.search(imgscale.Ask(PROMPT), decided=decision)
    assert output.decision is not None and output.decision.choice.action == decision.choice.action
    assert made.store.policy.learned == 0
    assert made.recalled(PROMPT, {**values, "action": "gone, rbf, 4 NFE"}) is None


def test_a_decision_takes_under_a_millisecond(file: Path, monkeypatch: Any) -> None:
    names = [f"small/{i}" for i in range(8)]
    use(monkeypatch, *(Double(name, lambda searcher, nfe: 0.5) for name in names))
    made = auto(file, names, models=[{"name": name, "budgets": list(range(4, 44, 4))} for name in names])
    assert len(made.pool) == 80
    times = []
    for _ in range(50):
        began = time.process_time()
        made.choose(PROMPT)
        times.append(time.process_time() - began)
    assert sorted(times)[25] < 1e-3


def test_the_scale_is_the_empirical_distribution_of_what_it_saw() -> None:
    scale = Scale()
    assert scale(3.0) == 0.5 and math.isnan(scale(math.nan))
    rng = np.random.default_rng(0)
    for score in rng.standard_normal(3 * KEPT):
        scale.add(float(score))
    scale.add(math.inf)
    assert (scale.seen, len(scale.kept)) == (3 * KEPT, KEPT)
    assert scale(0.0) == pytest.approx(0.5, abs=0.05) and scale(1.0) == pytest.approx(0.84, abs=0.05)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        *(("a red circle", "colours"), ("three stars", "counting"), ('a sign that says "open"', "with text")),
        *(
            ("a red cat left of a dog", "places and colours"),
            ("seven dogs", "numbers"),
            ("a dog under a table", "places"),
        ),
        *(("a red car", "colours"), ("a dog", "short"), ("a dog " * 20, "long")),
    ],
)
def test_prompts_have_categories(prompt: str, kind: str) -> None:
    assert category(prompt) == kind


# ------------------------------------------------------------------------------------------------------- real models

BUNDLED = all((models.bundled_folder() / name / "model_index.json").exists() for name in ("shapes-turbo",))


@pytest.mark.skipif(not BUNDLED, reason="the bundled models aren't trained yet")
def test_a_real_search_is_learned_from_and_its_picture_can_be_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    from imgscale.app import rerun

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pool = {"models": [{"name": "shapes-turbo"}], "searchers": ["best-of-n", "rbf+dps"], "samples": [2]}
    made = imgscale.load("auto", pool=pool, policy=tmp_path / "real.policy", device="cpu")
    assert made.notices == [
        "The searcher 'rbf+dps' is left out on shapes-turbo: its cost isn't known beforehand, or its budgets can't"
        " finish an image."
    ]
    output = made(PROMPT, seed=1, plain=False, progress=False)
    decision = output.decision
    assert decision.learned and decision.correct is not None and output.nfe == 8
    assert decision.eflops == pytest.approx(decision.choice.action.eflops)  # as it was rehearsed
    picture = tmp_path / "a.png"
    png.write(picture, output.images[0], png.Record.of(output))
    record = png.read(picture)
    assert record.auto is not None and record.auto.action == "shapes-turbo, best-of-n, 8 NFE"
    assert rerun.rerun(picture, device="cpu", quiet=True) == 0
    (kept,) = (tmp_path / "cache" / "imgscale" / "costs").glob("*.json")
    monkeypatch.setattr("imgscale.cost.of", None)  # nothing is counted twice
    assert len(imgscale.auto(pool=pool, policy=tmp_path / "real.policy", device="cpu").pool) == 1
    kept.write_text("junk")
    with pytest.raises(TypeError):
        imgscale.auto(pool=pool, policy=tmp_path / "real.policy", device="cpu")


@pytest.mark.skipif(not BUNDLED, reason="the bundled models aren't trained yet")
def test_a_batch_that_was_stopped_goes_on_as_it_was_decided_and_learns_once(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from imgscale.app import main
    from imgscale.app.batch.store import Store
    from imgscale.automatic import Auto

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("pool.toml").write_text("searchers = ['best-of-n']\nsamples = [1, 2]\n[[models]]\nname = 'shapes-turbo'\n")
    rows = [{"prompt": PROMPT}, {"prompt": "a red circle"}, {"prompt": "a dog", "searcher": "rbf"}]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def batch(*more: str) -> int:
        words = ["batch", "p.jsonl", "-m", "auto", "--pool", "pool.toml", "--policy", "a.policy", "--out", "run"]
        with pytest.raises(SystemExit) as left:
            main.main([*words, "--device", "cpu", "--quiet", *more])
        return int(left.value.code or 0)

    def decisions() -> dict[int, Any]:
        with sqlite3.connect("run/run.sqlite") as database:
            return {item: json.loads(said) for item, said in database.execute("SELECT * FROM decisions")}

    run = Auto._run

    def stopped(self: Auto, scaler: Any, ask: imgscale.Ask, *more: Any) -> Any:
        if ask.prompt != PROMPT:
            raise KeyboardInterrupt
        return run(self, scaler, ask, *more)

    monkeypatch.setattr(Auto, "_run", stopped)
    assert batch() == 130
    assert set(decisions()) == {0, 1} and opened(Path("a.policy"))[0].learned == 1
    monkeypatch.setattr(Auto, "_run", run)
    other = {4: 8, 8: 4}[int(decisions()[1]["action"].split()[-2])]  # what it wouldn't have chosen
    with sqlite3.connect("run/run.sqlite") as database:
        said = {**decisions()[1], "action": f"shapes-turbo, best-of-n, {other} NFE"}
        database.execute("UPDATE decisions SET decision = ? WHERE item = 1", (json.dumps(said),))
    before = decisions()
    assert batch() == 1  # for the row that says how to search
    assert "row 3 failed: With --model auto the bandit decides --searcher" in capsys.readouterr().err
    with Store.open(Path("run")) as store:
        items = list(store.items())
        assert [item.nfe for item in items][1] == other and decisions() == before
        assert [item.settings["auto"] for item in items] == [before[0], before[1]]
        assert [(item.model, item.held_out) for item in items] == [("shapes-turbo", ["shapes"])] * 2
    assert opened(Path("a.policy"))[0].learned == 2
    batch()
    assert opened(Path("a.policy"))[0].learned == 2  # nothing is taught twice
    for more, sentence in (
        (["--total-budget", "9"], "--total-budget can't be divided where --model auto"),
        (["--dry-run"], "--dry-run can't reckon what --model auto will choose"),
        (["--verifier", "clip"], "the bandit decides --verifier"),
    ):
        assert batch(*more) == 2 and sentence in capsys.readouterr().err
