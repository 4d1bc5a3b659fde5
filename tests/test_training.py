"""What the training scripts tell their models, and that a stopped run goes on as if it hadn't."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPTokenizer

from imgscale.assets.shapes import training
from imgscale.assets.shapes.text import ANSWERS, LENGTH, nouns_of, parsed, parsing_loss, write_tokenizer
from imgscale.assets.shapes.train_clip import as_seen, facts
from imgscale.assets.shapes.train_flow import labels
from imgscale.assets.shapes.training import run, schedule, to_tensor
from imgscale.assets.shapes.world import COLOURS, KINDS, SHAPES, arrange, draw, parse, render, training_scene
from imgscale.verifiers.shapes import judge, read


def test_a_render_is_its_objects_drawn() -> None:
    scene = parse("three red circles left of two blue stars")
    rng = np.random.default_rng(4)
    background = int(rng.integers(236, 256))
    assert np.array_equal(render(scene, np.random.default_rng(4)), draw(arrange(scene, rng), background))


def test_the_scholar_is_told_what_the_oracle_sees() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scene = training_scene(rng)
        placed = arrange(scene, rng)
        told, (seen,) = as_seen(placed), read(to_tensor([draw(placed, 245)]))
        assert judge(scene, told) == 1
        assert sorted((o.shape, o.colour) for o in told) == sorted((o.shape, o.colour) for o in seen)
        for o in told:
            assert min(np.hypot(o.x - s.x, o.y - s.y) for s in seen if (s.shape, s.colour) == (o.shape, o.colour)) < 2


def test_facts_tell_counts_apart_and_places() -> None:
    rng = np.random.default_rng(1)
    two, three = (as_seen(arrange(parse(text), rng)) for text in ("two red stars", "three red stars"))
    a, b = facts([two])[0], facts([three])[0]
    star = KINDS.index(("star", "red")) * 10
    assert a[star : star + 6].tolist() == [0, 0, 1, 0, 0, 0] and b[star : star + 6].tolist() == [0, 0, 0, 1, 0, 0]
    top, bottom, left, right = a[star + 6 : star + 10].tolist()
    assert (top, bottom) == pytest.approx((min(o.y for o in two) / 32 - 1, max(o.y for o in two) / 32 - 1))
    assert (left, right) == pytest.approx((min(o.x for o in two) / 32 - 1, max(o.x for o in two) / 32 - 1))
    assert (a[:star] == 0).all() and facts([[]])[0].sum() == 5  # no star, circle, square, triangle, nothing at all


def test_each_noun_is_asked_what_it_stands_for(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    texts = ["three red circles left of two stars", "an orange square, two blue stars and a triangle"]
    ids = tokenizer(texts, padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
    places, asked = parsed([parse(text) for text in texts], ids, nouns_of(vocabulary))
    words = [tokenizer.decode([ids[i, j]]).strip() for i, j in places.tolist()]
    assert words == ["circles", "stars", "square", "stars", "triangle"] and places[:, 0].tolist() == [0, 0, 1, 1, 1]
    colours = ["", *COLOURS]
    assert [(c + 1, SHAPES[s], colours[k], side) for c, s, k, side in asked.tolist()] == [
        (3, "circle", "red", 1),
        (2, "star", "", 2),
        (1, "square", "orange", 0),
        (2, "star", "blue", 0),
        (1, "triangle", "", 0),
    ]
    perfect = torch.cat([nn.functional.one_hot(a, n) for a, n in zip(asked.T, ANSWERS, strict=True)], 1) * 50.0
    assert parsing_loss(perfect, asked) < 1e-6 < 1 < parsing_loss(-perfect, asked)


def test_each_patch_is_labelled_by_what_covers_it() -> None:
    rng = np.random.default_rng(2)
    placed = arrange(parse("a red circle above two blue stars"), rng)
    made = labels([as_seen(placed)])[0].reshape(8, 8, 2)
    for o in placed:
        kind = 1 + KINDS.index((o.shape, o.colour))
        row, column = int(o.y / 8), int(o.x / 8)
        assert made[row, column, 1] == kind
        assert (made[..., 0] == kind).any()
    assert (made[..., 1] > 0).sum() == 3 and 3 <= (made[..., 0] > 0).sum() < 24


def test_the_learning_rate_warms_up_and_falls_in_each_phase() -> None:
    assert schedule(0, 1000, 1.0) == pytest.approx(1 / 200) and schedule(500, 1000, 1.0) == 1
    assert schedule(875, 1000, 1.0) == pytest.approx(0.5) and schedule(750, 1000, 1.0, decay=0.5) == pytest.approx(0.5)


def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "HERE", tmp_path)
    rates: dict[str, list[float]] = {}

    def train(name: str, *stops: int) -> Tensor:
        finished: list[Tensor] = []
        for stop in stops:
            torch.manual_seed(0)
            model = nn.Linear(3, 2)

            def loss(step: int, model: nn.Module = model, stop: int = stop) -> tuple[Tensor, dict[str, float]]:
                if step == stop:
                    raise KeyboardInterrupt
                x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
                value = (model(x) - x[:, :2]).square().mean()
                return value, {"loss": value.item()}

            def finish(model: nn.Module = model) -> None:
                finished.append(model.weight.detach().clone())  # type: ignore[operator]

            args: Any = argparse.Namespace(
                seed=0, device="cpu", steps=600, lr=0.1, warmup=200, decay=0.25, log_every=10, save_every=100
            )
            try:
                run(args, name, model, loss, finish, phases=(300,))
            except KeyboardInterrupt:
                continue
            lines = (tmp_path / "logs" / f"{name}.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(10, 601, 10))
            rates[name] = [json.loads(line)["loss"] for line in lines]
        return finished[-1]

    straight, stopped = train("straight", 1000), train("stopped", 350, 1000)
    assert torch.equal(straight, stopped)
    assert rates["straight"][:30] == rates["stopped"][:30]


def test_new_weights_are_shipped_without_what_was_measured_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe:
        components: dict[str, Any] = {}

        def save_pretrained(self, folder: Path, safe_serialization: bool) -> None:
            assert safe_serialization

    monkeypatch.setattr(training, "HERE", tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "usefulness.json").write_text("{}")
    training.ship(Pipe(), "model", {"steps": 4})
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["imgscale.json"]
