"""Early exit: the winner stays in the race as often as promised, and searches stay what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.early_exit_replay import replay
from imgscale import journal as journals
from imgscale import registry
from imgscale.budget import Budget, Price
from imgscale.calibration import PILOT, Calibrations, Margins, Race, margins
from imgscale.early_exit import EarlyExit, Rule, resumed
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.journal import Journal
from imgscale.scaler import Scaler
from imgscale.search import Search
from tests.doubles import STEPS, Clock, Reward, Watched, as_denoiser, clock, near_one, new, run, stop_after

__all__ = ["clock"]

CHECKS = (2, 4, 6)
Floats = np.ndarray[Any, np.dtype[np.float64]]

# ---------------------------------------------------------------------------------------------------- the guarantee


def plain(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    """Independent errors that shrink along the way."""
    finals = rng.normal(0, 1) + rng.normal(0, 0.5, n)
    return finals[:, None] - rng.normal(0, 1, (n, 8)) * np.linspace(1, 0.1, 8), finals


def walk(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    """Errors of one trajectory and of one prompt go together, and how early previews tell differs by prompt."""
    finals = rng.normal(0, 1) + rng.normal(0, 0.5, n)
    steps = rng.normal(0, 0.3, (n, 8)) * rng.uniform(0.3, 1.7)
    return finals[:, None] - np.cumsum(steps[:, ::-1], 1)[:, ::-1] + rng.normal(0, 0.4), finals


def skewed(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    """Heavy tails, and the better the image, the more its previews fall short."""
    finals = rng.normal(0, 1) + rng.normal(0, 0.5, n)
    above = (finals - finals.mean())[:, None]
    noise = rng.standard_t(3, (n, 8)) * np.linspace(1, 0.1, 8) * np.exp(above + rng.normal(0, 0.5))
    return finals[:, None] - noise - 0.3 * above, finals


WORLDS = {world.__name__: world for world in (plain, walk, skewed)}


def lost(world: str, n: int, delta: float, races: int, runs: int, spoil: Any = lambda found, races: found) -> float:
    """In how many runs the winner is dropped, when a rival that is hardly worse has finished before."""
    count = 0
    for seed in range(runs):
        rng = np.random.default_rng((seed, n))
        learned = []
        for _ in range(PILOT + races):
            previews, finals = WORLDS[world](rng, 16)
            learned.append(Race.of(previews[:, CHECKS], finals))
        found = spoil(margins(learned, delta), learned)
        previews, finals = WORLDS[world](rng, n)
        rule = Rule(EarlyExit(delta=delta, checks=CHECKS, audit=0.0), CHECKS, 8, margins={"fresh": found})
        assert rule.judges("fresh", n)
        outcome = replay(rule, previews, finals, beat=float(finals.max()) - 1e-9)
        count += not math.isfinite(outcome.scores[finals.argmax()])
    return count / runs


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("n", "races"), [(4, 9), (16, 9), (64, 39)])
def test_the_winner_is_dropped_in_at_most_delta_of_the_searches(world: str, n: int, races: int) -> None:
    """As few races as will do, and the hardest opponent: the bound has no slack but that of the checks."""
    runs, delta = 150, 0.1
    assert lost(world, n, delta, races, runs) <= delta + 3 * math.sqrt(delta * (1 - delta) / runs)


def test_the_simulation_finds_a_wrong_quantile() -> None:
    """The quantile of all candidates, as if the winner were an ordinary one, and delta not spread over blocks."""

    def of_everybody(found: Margins, races: Sequence[Race]) -> Margins:
        gaps = [(r.finals[:, None] - r.previews - np.array(found.centre)) / np.array(found.scale) for r in races]
        return replace(found, factors=((1024, float(np.quantile(np.concatenate(gaps).max(1), 0.9))),))

    runs, delta = 150, 0.1
    assert lost("skewed", 64, delta, 39, runs, of_everybody) > delta + 3 * math.sqrt(delta * (1 - delta) / runs)


def test_delta_is_spread_over_the_blocks_of_a_large_search() -> None:
    """By hand: 39 races of 4; a factor for 4 leaves 3 winners above it at delta .1, and one for 8 or 16 fewer."""
    races = [Race(str(i), np.zeros((4, 1)), np.array([0.0, 1.0, 2.0, -2.0])) for i in range(PILOT)]  # spread 1.48
    races += [Race(f"r{i}", np.zeros((4, 1)), np.array([3.0 + i, 0, 0, 0])) for i in range(39)]
    found = margins(races, 0.1)
    assert found is not None
    ends = {n: found.centre[0] + found.scale[0] * factor for n, factor in found.factors}
    assert {n: ends[n] for n in (4, 8, 16)} == pytest.approx({4: 38, 8: 40, 16: 41})
    assert set(ends) == {2, 4, 8, 16}, "for 32, delta / 8 needs 79 races"


def test_with_too_few_races_nothing_is_dropped() -> None:
    rng = np.random.default_rng(0)
    races = []
    for _ in range(PILOT + 18):
        previews, finals = plain(rng, 16)
        races.append(Race.of(previews[:, CHECKS], finals))
    assert margins(races[:PILOT], 0.5) is None
    assert margins(races, 0.05) is None, "19 races are needed besides the pilot"
    previews, finals = plain(rng, 16)
    found = margins([*races, Race.of(previews[:, CHECKS], finals)], 0.05)
    assert found is not None and found.factor(16) is not None and found.factor(17) is None
    outcome = replay(Rule(EarlyExit(checks=CHECKS), CHECKS, 8), previews, finals)
    assert outcome.nfe == outcome.full and np.isfinite(outcome.scores).all()


def test_previews_without_scores_doom_nobody() -> None:
    rule = Rule(EarlyExit(checks=(2,), audit=0.0), (2,), 8, margins={"fresh": Margins((0.0,), (1.0,), ((16, 0.1),))})
    previews = np.array([[1.0] * 8, [-math.inf] * 8, [0.0] * 8])
    outcome = replay(rule, previews, np.array([1.0, 5.0, 0.5]))
    assert outcome.scores.tolist() == [1.0, 5.0, -math.inf]


def test_the_papers_rule_is_its_formula() -> None:
    """[j V + (H - j) v_sup] / H < V_max; of 8 evaluations 5 are made at step 4, so 5/8 s + 3/8 < .8 below s = .68."""
    rule = Rule(EarlyExit("paper", checks=(4,), v_sup=1.0, lead=1), (4,), 8, top=1.0)
    finals = np.array([0.8, 0.9, 0.9])
    previews = np.repeat(np.array([[0.9], [0.67], [0.69]]), 8, 1)
    assert np.isfinite(replay(rule, previews, finals).scores).tolist() == [True, False, True]
    with pytest.raises(UserError, match="paper needs the highest possible score"):
        Rule(EarlyExit("paper"), (4,), 8)


# ------------------------------------------------------------------------------------------------- searches with it

BOLD = Margins((0.0, 0.0), (1.0, 1.0), ((1024, 0.1),))
RULE = Rule(EarlyExit(checks=(0, 2), audit=0.0), (0, 2), STEPS, margins={"fresh": BOLD, "kin": BOLD})
ALL = [entry.name for entry in registry.searcher]
each = pytest.mark.parametrize("name", ALL)


def with_exit(world: Watched, name: str, rule: Rule | None = RULE, price: Price | None = None, **more: Any) -> Search:
    search = new(world, name, **more)
    search.problem.early_exit = rule
    if price is not None:
        search.meter.price = price
    return search


def check(search: Search, world: Watched) -> None:
    """As in test_searchers: all is booked, nothing passes a limit, and the answer is finished."""
    ledger, verifier, best = search.meter.ledger, search.verifier, search.best
    assert isinstance(verifier, Reward) and best is not None and best.finished
    assert (ledger.nfe, ledger.verifier_calls, ledger.decodes) == (
        world.evaluations,
        verifier.images,
        sum(world.decoded),
    )
    assert all(search.meter.left(kind) >= 0 for kind in ("nfe", "verifier_calls", "decodes"))
    shown = world.decode(best.latents[None], world.encode(""))
    assert best.score == pytest.approx(float(near_one(shown, [""])), abs=1e-5)


@each
@pytest.mark.parametrize("budget", [4, 13, 50, 101, Budget(verifier_calls=20), Budget(decodes=7, nfe=60)], ids=str)
def test_limits_hold(name: str, budget: int | Budget) -> None:
    world = Watched()
    search = run(world, with_exit(world, name, budget=budget))
    check(search, world)
    if isinstance(budget, int):
        assert search.meter.ledger.nfe > budget - 2 * (STEPS + 10), "what is left was used"


@each
@pytest.mark.parametrize("seconds", [12, 40])
def test_deadlines_hold(name: str, seconds: int, clock: Clock) -> None:
    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        clock.pass_by(0.5)
        return near_one(images, prompts)

    world = Watched(evaluate=lambda n: clock.pass_by(1.0))
    search = run(world, with_exit(world, name, budget=Budget(seconds=seconds), verifier=Reward(rule)))
    assert search.stopped == "deadline" and search.best is not None and search.best.finished
    assert search.meter.ledger.seconds <= seconds


@each
def test_cancelling_and_bad_scores_are_survived(name: str) -> None:
    def rule(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.where(images[:, 0, 0, 0] < 0.63, math.nan, near_one(images, prompts))

    for ticks in range(0, 20, 4):
        world = Watched()
        search = run(world, with_exit(world, name, budget=60), stop=stop_after(ticks))
        assert search.best is not None and search.stopped
        assert getattr(search.steps, "gi_frame", None) is None, "the generator is closed"
    world = Watched()
    search = run(world, with_exit(world, name, budget=80, verifier=Reward(rule)))
    assert search.best is not None and search.best.finished and math.isfinite(search.best.score)


@each
def test_batches_and_seeds_decide_nothing_else(name: str) -> None:
    found = []
    for size in (1, 32):
        world = Watched()
        search = run(world, with_exit(world, name, budget=60, seed=5), max_batch=size)
        assert search.best is not None
        found.append(
            (search.best.seed, round(search.best.score, 4), search.meter.ledger.nfe, search.problem.exits.dropped)
        )
    assert found[0] == found[1]


@each
def test_a_resumed_search_is_a_straight_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "EVERY", 3)

    def play(folder: Path | None, **hooks: Any) -> tuple[Any, ...]:
        world = Watched()
        search = with_exit(world, name, budget=60)
        search.meter.restart()
        log = None if folder is None else Journal(folder, {"early_exit": RULE.as_dict()})
        Engine(as_denoiser(world)).run([search], journal=log, **hooks)
        assert search.best is not None
        best, ledger = search.best, search.meter.ledger
        return best.score, best.seed, ledger.nfe, ledger.verifier_calls, search.rounds, search.problem.exits.as_dict()

    straight = play(None)
    play(tmp_path / "log", stop=stop_after(straight[4] // 2))
    assert play(tmp_path / "log") == straight


@pytest.mark.parametrize("name", ["best-of-n", "zero-order"])
def test_the_dropped_are_denoised_no_further(name: str) -> None:
    world = Watched()
    search = run(world, with_exit(world, name, budget=90))
    assert search.problem.exits.dropped > 0 and search.problem.exits.saved > 0
    times = [t for call in world.places for t, _ in call]
    assert times.count(0.25) < times.count(1.0), "fewer reach the last evaluation than began"


def test_what_is_saved_buys_more_candidates() -> None:
    """At equal budget best-of-n begins more candidates, and its answer is at least as good on average."""
    gains, begun = [], []
    for seed in range(12):
        few, many = Watched(shape=(4,)), Watched(shape=(4,))
        before = run(few, new(few, "best-of-n", budget=64, seed=seed)).best
        after = run(many, with_exit(many, "best-of-n", budget=64, seed=seed)).best
        assert before is not None and after is not None
        gains.append(after.score - before.score)
        begun.append([t for call in many.places for t, _ in call].count(1.0))
    assert min(begun) > 16 and np.mean(gains) > 0


def test_a_limit_on_eflops_holds_and_leaves_room_for_looks() -> None:
    price = Price(text=5, nfe=10, decode=4, preview=4, score=2)
    for limit in (60, 200, 777):
        world = Watched()
        search = new(world, "best-of-n", budget=Budget(nfe=10**6))
        search.problem.early_exit = RULE
        search.meter.budget, search.meter.price = Budget(eflops=limit), price
        search.meter.ledger.eflops = price.text
        run(world, search)
        assert search.best is not None and search.meter.left("eflops") >= 0
    assert search.problem.exits.dropped > 0


# ---------------------------------------------------------------------------------------------------------- learning


def ready(audit: float) -> Rule:
    return replace(RULE, exit=replace(RULE.exit, audit=audit))


def test_only_races_that_were_to_run_in_full_teach() -> None:
    """Never those in which nothing happened to be dropped: their previews are better than most."""
    for rule, taught in ((ready(0.0), 0), (ready(1.0), 1), (replace(RULE, margins={}), 1)):
        world = Watched()
        search = run(world, with_exit(world, "best-of-n", rule, budget=40, n=8))
        assert len(search.problem.exits.lessons) == taught
        if taught:
            kind, race = search.problem.exits.lessons[0]
            assert kind == "fresh" and race.previews.shape == (8, 2) and search.problem.exits.dropped == 0
            assert search.best is not None and race.finals.max() == pytest.approx(search.best.score, abs=1e-5)


def test_about_the_share_asked_for_is_audited() -> None:
    audited = 0
    for seed in range(300):
        outcome = replay(ready(0.2), np.zeros((4, STEPS)) - np.arange(4)[:, None], -np.arange(4.0), seed=seed)
        audited += bool(np.isfinite(outcome.scores).all())
    assert 0.2 - 3 * math.sqrt(0.16 / 300) < audited / 300 < 0.2 + 3 * math.sqrt(0.16 / 300)


def lesson(value: float) -> tuple[str, Race]:
    return "fresh", Race.of(np.full((4, 1), value), np.array([value, 1.0, -math.inf, math.nan])[[0, 1, 2, 1]])


def test_races_are_kept_by_all_that_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = Calibrations(None, "owner/model")
    kept.learn({"model": 1}, [lesson(0.1), lesson(0.2), lesson(0.1)])
    again = Calibrations(None, "owner/model")
    again.learn({"model": 1}, [lesson(0.3)])
    found = again.races({"model": 1}, "fresh")
    assert [race.previews[0, 0] for race in found] == [0.1, 0.2, 0.3]
    assert found[0].finals.tolist() == [0.1, 1.0, -math.inf, 1.0]
    assert again.races({"model": 2}, "fresh") == [] and again.races({"model": 1}, "kin") == []
    assert Calibrations(None, "other").races({"model": 1}, "fresh") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "races": {"a": {"b": {"c": {}}}}}'])
def test_a_corrupt_file_is_told_of_and_written_anew(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "imgscale" / "early-exit" / "m.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    kept = Calibrations(None, "m")
    assert kept.races({}, "fresh") == [] and "learns anew" in kept.complaint and "\n" not in kept.complaint
    kept.learn({}, [lesson(0.5)])
    assert len(Calibrations(None, "m").races({}, "fresh")) == 1


# --------------------------------------------------------------------------------------------------------- the front


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sometimes", "give off, calibrated or paper"),
        ("calibrated(delta=2)", "between 0 and 1"),
        ("calibrated(gamma=1)", "gamma"),
        ("calibrated(checks=3 x)", "steps with spaces"),
        ("calibrated(lead=0)", "at least 1"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        EarlyExit.of(text)


def test_texts_say_what_objects_say() -> None:
    assert EarlyExit.of("off") is None
    assert EarlyExit.of("calibrated(delta=0.1, checks=5 3)") == EarlyExit(delta=0.1, checks=(5, 3))
    assert EarlyExit(checks=(5, 3)).steps(10) == (3, 5)
    assert EarlyExit().steps(10) == (4, 6, 8)
    assert EarlyExit().steps(1) == ()
    with pytest.raises(UserError, match="give checks from 0 to 8"):
        EarlyExit(checks=(9,)).steps(10)
    assert Rule.from_dict(json.loads(json.dumps(RULE.as_dict()))) == RULE


def world_scaler(world: Watched) -> Scaler:
    class Pipe:
        components: dict[str, Any] = {}

    vars(world).update(pipe=Pipe(), steps_default=STEPS)
    return Scaler(Engine(as_denoiser(world)), "world")


def test_a_model_learns_from_search_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: dict[str, Any] = {"searcher": "best-of-n(n=8)", "verifier": Reward(), "budget": 32, "progress": False}
    asked |= {"plain": False, "early_exit": EarlyExit(delta=0.2, checks=(1, 2), audit=0.0)}
    scaler = world_scaler(Watched(shape=(4,)))
    dropped = [scaler("x", seed=seed, **asked).settings["exits"]["dropped"] for seed in range(PILOT + 8)]
    assert dropped[: PILOT + 4] == [0] * (PILOT + 4), "four races besides the pilot are the least at delta .2"
    assert sum(dropped[PILOT + 4 :]) > 0
    other = {**asked, "verifier": Reward(name="other")}
    assert scaler("x", seed=99, **other).settings["exits"]["dropped"] == 0, "another verifier is learned anew"
    fresh = world_scaler(Watched(shape=(4,)))("x", seed=PILOT + 6, **asked)
    rule = Rule.from_dict(fresh.settings["early_exit"])
    again = world_scaler(Watched(shape=(4,)))("x", seed=PILOT + 6, **{**asked, "early_exit": rule})
    assert fresh.settings["exits"] == again.settings["exits"] and again.scores == fresh.scores


def test_a_journal_keeps_the_rule_that_its_search_began_with(tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    asked = RULE.exit
    assert resumed(head, asked) == asked
    head.write_text(json.dumps({"early_exit": RULE.as_dict()}))
    assert resumed(head, asked) == RULE
    assert resumed(head, "calibrated(delta=0.3)") == "calibrated(delta=0.3)"
    head.write_text('{"early_exit": 3}')
    assert resumed(head, asked) == asked


def test_an_ensemble_is_refused() -> None:
    from imgscale import verification

    scaler = world_scaler(Watched())
    members = [Reward(name="a"), Reward(name="b")]

    class Both(Reward):
        parts = members

    with pytest.raises(UserError, match="early_exit can't judge by the ensemble"):
        scaler._rule(EarlyExit(), verification.make(Both(name="both")), None, STEPS, None, {})
