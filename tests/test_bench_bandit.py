"""`imgscale bench bandit` on a small made-up table: what it reads, what it reckons, and what it writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from imgscale.app.bench import bandit, bandit_table
from imgscale.app.main import app
from imgscale.errors import UserError

PRICE = {"text": 10, "nfe": 100, "decode": 50, "preview": 50, "score": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    texts = ["a red circle", "two stars", "a circle above a star", "five squares"]
    kinds = ["colours", "counting", "position", "counting"]
    prompts = [
        {"prompt": text, "category": kind, "embedding": rng.standard_normal(32).tolist()}
        for text, kind in zip(texts, kinds, strict=True)
    ]
    write(tmp_path / "prompts.jsonl", prompts)
    models = {
        name: {"parameters": 1e6, "step_eflops": 100.0, "distilled": name == "shapes-turbo", "sample_nfe": steps}
        | {"ridge": 1.0, "price": PRICE}
        for name, steps in (("shapes-turbo", 4), ("shapes-flow", 10), ("shapes-flow-large", 10))
    }
    (tmp_path / "models.json").write_text(json.dumps(models))
    for name in ("shapes-turbo", "shapes-flow"):
        rows = []
        for text in texts if name == "shapes-turbo" else texts[:3]:
            clip, right = rng.random(6).tolist(), rng.choice([0.5, 1.0], 6).tolist()
            rows.append({"kind": "bank", "prompt": text, "seed": 0, "samples": 6, "clip": clip, "shapes": right})
            for seed in range(2):
                row = {"kind": "rbf", "prompt": text, "seed": seed, "samples": 3, "clip": rng.random(), "shapes": 1.0}
                rows.append(row | {"nfe": 30, "decodes": 5, "verifier_calls": 5})
        write(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_table_holds_what_all_models_have(folder: Path) -> None:
    found = bandit_table.read(folder)
    assert len(found.table.z) == 3 and found.table.z.shape[1] == 7 + 16
    names = [action.name for action in found.table.actions]
    assert names[:2] == ["shapes-turbo, best-of-n, 4 NFE", "shapes-turbo, best-of-n, 8 NFE"]
    assert "shapes-flow, rbf, 30 NFE" in names and not any("large" in name for name in names)
    assert found.left_out == ("shapes-flow-large has no rows yet and is left out.",)
    plain = found.table.actions[0]
    assert plain.eflops == 10 + 4 * 100 + 55 and found.table.costs.max() == 1


def test_a_row_that_is_half_written_is_none(folder: Path) -> None:
    with (folder / "shapes-flow.jsonl").open("a") as file:
        file.write('{"kind": "bank", "prom')
    assert len(bandit_table.read(folder).table.z) == 3


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_best_of_n_is_the_mean_over_all_subsets(n: int) -> None:
    score, value = np.array([0.3, 0.9, 0.1, 0.5, 0.7]), np.array([1.0, 0.0, 0.5, 0.25, 1.0])
    every = [value[max(some, key=lambda i: score[i])] for some in itertools.combinations(range(5), n)]
    assert bandit_table.best_of(n, 5) @ value[np.argsort(score)] == pytest.approx(np.mean(every))


def test_the_oracle_s_luck_is_told_by_halves(folder: Path) -> None:
    inside, outside = bandit_table.luck(bandit_table.read(folder), 0.95)
    assert inside > outside


def test_rewards_without_dense_feedback_leave_regret_as_it_is(folder: Path) -> None:
    table = bandit_table.read(folder).table
    plan = bandit.scenarios(table, 20)["quality"]
    _, _, seen = bandit._maker(table, "linucb, no dense feedback", plan)
    assert set(np.unique(seen.rewards)) <= {0.0, 1.0} and np.array_equal(seen.utility(0.8), table.utility(0.8))


def test_the_command_writes_tables_and_plots(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["bench", "bandit", "--table", str(folder), "--quick", "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["results"]
    scenarios = ("cost", "balanced", "quality", "model added", "model removed", "mode switched", "drift")
    assert {(x["policy"], x["scenario"]) for x in found} >= {("linucb", kind) for kind in scenarios}
    assert all(x["regret"][0] >= -1e-9 for x in found)
    for name in ("results.json", "results.csv", "tables.md", "regret.png", "trade.png"):
        assert (out / name).stat().st_size > 500
    again = bandit.play(bandit_table.read(folder).table, "linucb", "cost", 20, 2)
    (first,) = [x for x in found if (x["policy"], x["scenario"]) == ("linucb", "cost")]
    assert first["regret"] == pytest.approx(again.values["regret"])


def test_a_table_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no table in .*--table"):
        bandit_table.read(tmp_path)


def test_rows_that_are_damaged_are_said(folder: Path) -> None:
    (folder / "models.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        bandit_table.read(folder)


def test_bench_itself_is_still_there() -> None:
    assert "FILE.yaml" in CliRunner().invoke(app, ["bench", "--help"]).stdout
