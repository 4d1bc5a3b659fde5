"""Files of prompts, wildcards and seeds, and the run that comes of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from imgscale.app import asked, records
from imgscale.app.batch import rounds
from imgscale.app.batch.clock import Clock
from imgscale.app.batch.plan import Plan, Wish, differences, plan
from imgscale.app.batch.rounds import Turn
from imgscale.app.batch.wildcards import expand, seeds
from imgscale.app.job import Job
from imgscale.errors import UserError

BASE = Job(prompt="", model="shapes-turbo", searcher="best-of-n")


def planned(tmp_path: Path, text: str | bytes, name: str = "p.txt", **wishes: Any) -> Plan:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return plan(Wish(str(file), **{"base": BASE, **wishes}))


def texts(found: Plan) -> list[str]:
    return [prompt.text for prompt in found.prompts]


# ------------------------------------------------------------------------------------------------ wildcards and seeds


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a cat", ["a cat"]),
        ("a {red|blue} {cat|dog}", ["a red cat", "a red dog", "a blue cat", "a blue dog"]),
        ("{a|{b|c}d}", ["a", "bd", "cd"]),
        ("a {|very }big cat", ["a big cat", "a very big cat"]),
        (r"a \{red|blue\}", ["a {red|blue}"]),
        (r"{a\|b|c}", ["a|b", "c"]),
        (r"{\}|\{}", ["}", "{"]),
        ("{alone}", ["{alone}"]),
        ("{a|b} and {x", ["a and {x", "b and {x"]),
        ("{a|b", ["{a|b"]),
        ("a|b } c", ["a|b } c"]),
        (r"C:\new", [r"C:\new"]),
        ("{" * 200, ["{" * 200]),
    ],
)
def test_wildcards(text: str, found: list[str]) -> None:
    assert expand(text) == found


def test_too_many_combinations_are_refused_before_they_are_made() -> None:
    with pytest.raises(UserError, match="more than 10000 prompts"):
        expand("{a|b}" * 60)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("7", [7]),
        (7, [7]),
        ("1,5,9", [1, 5, 9]),
        ("1..4", [1, 2, 3, 4]),
        ("1,2,..,5", [1, 2, 3, 4, 5]),
        ("1,..,4", [1, 2, 3, 4]),
        ("0, 10, .., 30", [0, 10, 20, 30]),
        ("1..3,9", [1, 2, 3, 9]),
        ([1, "4..5"], [1, 4, 5]),
        (str(2**63 - 1), [2**63 - 1]),
    ],
)
def test_seeds(value: Any, found: list[int]) -> None:
    assert seeds(value, "--seed") == found


@pytest.mark.parametrize(
    "value", ["", "a", "-1", "1,1", "5..1", "..", "1,..", "1,3,..,8", "1,1,..,3", "0..99999", 2**63, []]
)
def test_seeds_that_cannot_be(value: Any) -> None:
    with pytest.raises(UserError, match="--seed"):
        seeds(value, "--seed")


# ------------------------------------------------------------------------------------------------------------- files


def test_a_text_has_a_prompt_a_line() -> None:
    text = "# a comment\r\n\r\n  a cat \rtwo\u2028lines, one prompt\n\\#1 cat\n\x0b\n赤い丸\n"
    found = list(records.prompts(".txt", text))
    assert [(row.number, row.text) for row in found] == [
        (3, "a cat"),
        (4, "two\u2028lines, one prompt"),
        (5, "#1 cat"),
        (7, "赤い丸"),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks(encoding: str) -> None:
    assert records.decoded("é 赤\r\n".encode(encoding)) == "é 赤\r\n"


def test_a_text_in_another_encoding_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p.txt' can't be read \(.*utf-8.*\); mend it"):
        planned(tmp_path, "caf\xe9\n".encode("latin-1"))


PARTI = 'Prompt\tCategory\tChallenge\tNote\r\nbond\tAbstract\tBasic\t"Of ""Dogs"""\r\na "PEACE" sign\tArts\tBasic\t\r\n'
GENEVAL = '{"tag": "counting", "include": [{"class": "bench", "count": 2}], "prompt": "a photo of two benches"}\n'


def test_partiprompts(tmp_path: Path) -> None:
    found = planned(tmp_path, PARTI, "PartiPrompts.tsv")
    assert texts(found) == ["bond", 'a "PEACE" sign']
    assert found.prompts[0].columns == {"Category": "Abstract", "Challenge": "Basic", "Note": 'Of "Dogs"'}
    assert found.prompts[0].category == "Abstract"


def test_drawbench(tmp_path: Path) -> None:
    found = planned(tmp_path, '\ufeffPrompts,Category\r\n"A red car, fast",Colors\r\n', "DrawBench.csv")
    assert texts(found) == ["A red car, fast"] and found.prompts[0].category == "Colors"


def test_geneval(tmp_path: Path) -> None:
    (prompt,) = planned(tmp_path, GENEVAL, "evaluation_metadata.jsonl").prompts
    assert prompt.text == "a photo of two benches" and prompt.category == "counting"
    assert prompt.columns == {"tag": "counting", "include": [{"class": "bench", "count": 2}]}


@pytest.mark.parametrize(("text", "kind"), [("a cat\n{x|y}\n", ".txt"), (GENEVAL, ".jsonl")])
def test_standard_input(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(text.encode())))
    found = plan(Wish("-", BASE))
    assert texts(found) == (["a cat", "x", "y"] if kind == ".txt" else ["a photo of two benches"])


def test_bad_rows_leave_the_others_alone(tmp_path: Path) -> None:
    rows = ['{"prompt": "a cat"}', "{", "7", '{"caption": "x"}', '{"prompt": " "}', '{"prompt": "a dog"}']
    rows += ['{"prompt": "x", "budget": "lots"}', '{"prompt": "x", "seed": -1}', '{"prompt": "x\\ud800"}']
    found = planned(tmp_path, "\n".join(rows), "p.jsonl")
    assert texts(found) == ["a cat", "a dog"]
    said = {bad.number: bad.reason for bad in found.bad}
    assert list(said) == [2, 3, 4, 5, 7, 8, 9]
    assert said[2].startswith("is no JSON") and "no object" in said[3] and "no text" in said[4]
    assert said[7] == "The budget in its row can't be 'lots'; give a whole number of at least 1."


def test_an_unquoted_comma_is_no_shorter_prompt(tmp_path: Path) -> None:
    found = planned(tmp_path, "prompt\na cat, asleep\na dog\n", "p.csv")
    assert texts(found) == ["a dog"] and "more values than there are columns" in found.bad[0].reason


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.txt", "\n# only this\n", "is empty"),
        ("p.json", '{"prompt": "x"}', "holds no list"),
        ("p.png", "x", "no known ending.*--format"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(tmp_path, text, name)


# ------------------------------------------------------------------------------------------------------------- a plan


def test_a_row_may_change_settings_and_the_rest_passes_through(tmp_path: Path) -> None:
    row = {
        **{
            "text": "a red circle",
            "Seed": "3..4",
            "budget": 12.0,
            "searcher": "rbf(explore=0.5)",
            "negative_prompt": "b",
        },
        **{
            "num_inference_steps": 2,
            "guidance_scale": 1.5,
            "keep": "all",
            "plain": False,
            "options": {"explore": 0.25},
        },
        **{"height": None, "width": "", "id": 17, "report": "none"},
    }
    found = planned(tmp_path, json.dumps(row), "p.jsonl", seeds=(1,))
    first, second = found.tasks
    assert (first.job.seed, second.job.seed, first.keep) == (3, 4, None)
    job = first.job
    assert (job.budget.nfe, job.negative, job.steps, job.guidance, job.plain) == (12, "b", 2, 1.5, False)
    assert (job.searcher, dict(job.options), job.report) == ("rbf(explore=0.5)", {"explore": 0.25}, ())
    assert found.prompts[0].columns == {"id": 17}


def test_settings_in_rows_can_be_left_alone(tmp_path: Path) -> None:
    found = planned(tmp_path, '{"prompt": "a cat", "width": 640}', "p.jsonl", overrides=False)
    assert found.tasks[0].job.width is None and found.prompts[0].columns == {"width": 640}


def test_another_searcher_doesn_t_get_the_options_of_the_first() -> None:
    job = asked.changed(BASE, {"options": {"n": "8"}})
    assert dict(job.options) == {"n": "8"} and dict(asked.changed(job, {"searcher": "rbf"}).options) == {}


def test_what_cannot_be_judged_is_its_own_matter(tmp_path: Path) -> None:
    found = planned(tmp_path, "a red circle\na cat\n", base=replace(BASE, verifier="shapes"))
    assert [bool(task.error) for task in found.tasks] == [False, True]
    assert found.tasks[1].error.startswith("The verifier 'shapes' can't judge this prompt")


def test_the_oracle_reports_where_it_can(tmp_path: Path) -> None:
    found = planned(tmp_path, "a red circle\na cat\n")
    assert [task.job.report for task in found.tasks] == [("shapes",), ()]
    assert all(not task.job.report for task in planned(tmp_path, "a red circle\n", report=()).tasks)


def test_mistakes_in_the_command_are_no_matter_of_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Unknown searcher 'rfb'"):
        planned(tmp_path, "a cat\n", base=replace(BASE, searcher="rfb"))
    found = planned(tmp_path, '{"prompt": "a cat", "searcher": "rfb"}', "p.jsonl")
    assert "Unknown searcher 'rfb'" in found.tasks[0].error


def test_copies_are_told_apart_and_ids_come_from_content(tmp_path: Path) -> None:
    found = planned(tmp_path, "a cat\na dog\na cat\n", seeds=(1, 2))
    ids = [task.id for task in found.tasks]
    assert len(set(ids)) == 6 and ids[4] == f"{ids[0]}-2" and ids[5] == f"{ids[1]}-2"
    turned = planned(tmp_path, "a dog\na cat\na cat\n", seeds=(1, 2))
    assert sorted(ids) == sorted(task.id for task in turned.tasks) and turned.id != found.id
    assert planned(tmp_path, "\ufeffa cat\r\n\r\na dog\r\na cat", seeds=(1, 2)).id == found.id


def test_differences_are_named(tmp_path: Path) -> None:
    before = planned(tmp_path, "a cat\n").config
    now = planned(tmp_path, "a cat\n", base=replace(BASE, searcher="rbf"), keep=None).config
    assert differences(before, now) == ['searcher "best-of-n" and not "rbf"', "keep 1 and not the default"]
    assert differences(before, planned(tmp_path, "a dog\n").config) == ["other prompts"]
    assert differences(before, planned(tmp_path, "a dog\nx\n").config) == ["prompts 1 and not 2"]
    assert differences(before, planned(tmp_path, "a cat\n", "q.txt").config) == []


def test_ten_thousand_rows(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"prompt": f"cat {i}", "budget": i + 10}) for i in range(10_000))
    found = planned(tmp_path, rows, "p.jsonl")
    assert len(found.tasks) == len({task.id for task in found.tasks}) == 10_000
    assert found.tasks[9_999].job.budget.nfe == 10_009


# ------------------------------------------------------------------------------------------------- totals and clocks


LEAST = {0: 10, 1: 10, 2: 20}
EVEN = {0: 1.0, 1: 1.0, 2: 1.0}


def dealt(total: int, past: list[Turn], weights: dict[int, float] = EVEN) -> dict[int, int]:
    return {turn.item: turn.budget for turn in rounds.deal(total, LEAST, weights, past)}


def ended(turns: list[Turn], found: dict[int, tuple[int, list[float]]]) -> list[Turn]:
    return [replace(t, nfe=found[t.item][0], scores=found[t.item][1]) if t.item in found else t for t in turns]


def test_a_round_goes_by_what_the_ones_before_it_found() -> None:
    first = rounds.deal(200, LEAST, EVEN, [])
    assert {turn.item: turn.budget for turn in first} == {0: 30, 1: 30, 2: 20} and {t.round for t in first} == {0}
    past = ended(first, {0: (30, [0.1]), 1: (30, [0.9]), 2: (20, [0.5])})
    second = rounds.deal(200, LEAST, EVEN, past)
    assert {turn.round for turn in second} == {1} and sum(turn.budget for turn in second) <= 40
    assert {turn.item: turn.budget for turn in second} == {0: 40}
    assert rounds.deal(200, LEAST, EVEN, list(reversed(past))) == second  # in whatever order they ended


def test_a_total_is_never_exceeded_and_what_failed_keeps_its_share() -> None:
    past: list[Turn] = []
    while turns := rounds.deal(1000, LEAST, EVEN, past):
        past += ended(turns, {turn.item: (turn.budget, [0.3]) for turn in turns if turn.item != 1})
    assert {turn.round for turn in past if turn.item == 1} == {0}  # it failed, and got nothing more
    assert 1000 - 20 < sum(turn.budget for turn in past) <= 1000


def test_a_round_counts_searches_by_their_budgets() -> None:
    assert dealt(400, [], {0: 100.0, 1: 300.0, 2: 100.0}) == {0: 30, 1: 90, 2: 40}


def test_a_total_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="39 NFE can't give 3 searches one image each, which takes 40"):
        rounds.deal(39, LEAST, EVEN, [])


def test_rounds_have_seeds_of_their_own() -> None:
    assert rounds.seed(7, 0) == 7
    seeds = {rounds.seed(first, round_) for first in (0, 1, 7) for round_ in range(4)}
    assert len(seeds) == 12 and all(0 <= seed < 2**53 for seed in seeds)


def test_a_clock_rings_at_the_earlier_deadline() -> None:
    noon = 1_700_000_000.0
    soon, late = Clock.of(None, "0.5", noon), Clock.of("06:00", None, noon)
    assert soon.ends == noon + 1800
    assert late.ends is not None and 0 < late.ends - noon <= 86_400 and (late.ends % 60) == 0
    assert Clock.of("06:00", "0.001", noon).ends == noon + 3.6
    assert Clock.of(None, None).ends is None and Clock.of(None, None).room()


@pytest.mark.parametrize(("until", "hours"), [("25:00", None), ("6", None), ("06:60", None), (None, "0"), (None, "x")])
def test_clocks_that_cannot_be(until: str | None, hours: str | None) -> None:
    with pytest.raises(UserError, match="--until|--hours"):
        Clock.of(until, hours)


def test_nothing_is_begun_that_would_not_end_in_time() -> None:
    import time

    clock = Clock(time.time() + 100)
    assert clock.room()
    clock.took(500)
    assert not clock.room() and not clock.over()
