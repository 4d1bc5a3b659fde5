"""The oracle: what it reads off images, how it judges captions, and that nothing makes it fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from imgscale import registry
from imgscale.assets.shapes.evaluate_oracle import blur, draw, fade, noise, pairs
from imgscale.assets.shapes.training import to_tensor
from imgscale.assets.shapes.world import COLOURS, SHAPES, hard_negatives, parse, render, training_scene
from imgscale.errors import UserError
from imgscale.verifiers.shapes import Object, Shapes, judge, read


def thing(shape: str | None, colour: str | None, x: float = 32, y: float = 32, fit: float = 0.95) -> Object:
    return Object(shape, colour, x, y, 100, fit, (shape or "star", colour or "red"))


def score(image: Tensor, caption: str) -> float:
    return float(Shapes()(image, [caption])[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_reads_what_was_drawn(shape: str, colour: str) -> None:
    (seen,) = read(draw([(shape, colour, 20.3, 40.6, 8)]))[0]
    assert (seen.shape, seen.colour) == (shape, colour)
    assert (seen.x, seen.y) == pytest.approx((20.3, 40.6), abs=0.4)
    assert seen.fit > 0.85


def test_is_right_about_clean_renders() -> None:
    cases, images = pairs(5000, seed=11)
    seen = [objects for part in images.split(100) for objects in read(part)]
    own = [judge(scene, o) == 1 for (scene, _), o in zip(cases, seen, strict=True)]
    other = [judge(wrong, o) == 1 for (_, wrong), o in zip(cases, seen, strict=True)]
    assert np.mean(own) >= 0.995
    assert np.mean(other) <= 0.005


@pytest.mark.parametrize("spoil", [noise(0.05), blur(1.0), fade(0.25)], ids=["noise", "blur", "fade"])
def test_sees_through_mild_flaws(spoil: object) -> None:
    cases, images = pairs(140, seed=12)
    seen = read(spoil(images))  # type: ignore[operator]
    assert np.mean([judge(scene, o) == 1 for (scene, _), o in zip(cases, seen, strict=True)]) >= 0.98
    assert np.mean([judge(wrong, o) == 1 for (_, wrong), o in zip(cases, seen, strict=True)]) <= 0.01


def test_only_the_whole_caption_scores_one() -> None:
    picture = draw([("circle", "red", 16, 16, 8), ("circle", "red", 46, 14, 7), ("square", "blue", 30, 48, 8)])
    exact = "two red circles above a blue square"
    assert score(picture, exact) == 1
    assert score(picture, "a blue square below two red circles") == 1
    assert score(picture, "two red circles and a blue square") == 1
    assert score(picture, "two circles and a square") == 1
    for wrong in (
        "two red circles",
        "a blue square",
        "two red circles below a blue square",
        "two red circles left of a blue square",
        "three red circles above a blue square",
        "two blue circles above a red square",
        "two red squares above a blue circle",
        "a red circle, a circle and a blue star",
    ):
        assert 0 <= score(picture, wrong) < 1, wrong


def test_a_relation_holds_for_every_pair_or_not_at_all() -> None:
    picture = draw([("star", "red", 14, 32, 7), ("star", "red", 50, 32, 7), ("square", "blue", 32, 14, 7)])
    assert score(picture, "two red stars and a blue square") == 1
    assert score(picture, "two red stars below a blue square") == 1
    assert score(picture, "two red stars left of a blue square") < 1


def test_equal_groups_are_told_apart_by_the_relation() -> None:
    objects = [thing("circle", "red", y=40), thing("circle", "red", y=10)]
    assert judge(parse("a red circle above a circle"), objects) == 1
    assert judge(parse("a circle above a red circle"), objects) == 1
    assert judge(parse("a circle left of a red circle"), objects) < 1


def test_a_group_without_a_colour_takes_any() -> None:
    assert judge(parse("two stars"), [thing("star", "red"), thing("star", "blue")]) == 1


def test_part_of_the_caption_earns_part_of_the_score() -> None:
    scene = parse("three red circles left of a blue square")
    right = [thing("circle", "red", x) for x in (5, 10, 15)] + [thing("square", "blue", 50)]
    other_colour = [*right[:3], thing("square", "green", 50)]
    vague = [*right[:3], Object(None, "blue", 50, 32, 100, 0.7, ("square", "blue"))]
    one_misplaced = [*right[:2], thing("circle", "red", 55), right[3]]
    all_misplaced = [*right[:3], thing("square", "blue", 1)]
    falling = [right, vague, other_colour, right[:3], right[:2], right[:1], []]
    scores = [judge(scene, objects) for objects in falling]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == len(scores)
    assert scores[0] == 1 and scores[-1] == 0
    assert 1 > judge(scene, one_misplaced) > judge(scene, all_misplaced) > judge(scene, right[:1])
    assert 1 > judge(scene, [*right, thing("star", "green")]) > judge(scene, [*right, *right])
    nearer, farther = (judge(scene, [*right[:3], thing("square", "blue", x)]) for x in (4, -9))
    assert nearer > farther  # a search is shown the way


def test_what_is_no_object_of_the_world_still_counts_as_there() -> None:
    picture = draw([("circle", "red", 16, 16, 8)])
    assert score(picture, "a red circle") == 1
    picture[:, :, 40:55, 40:55] = 0  # a black square
    assert [o.colour for o in read(picture)[0]].count(None) == 1
    assert score(picture, "a red circle") == 0.5
    picture[:, :, 40:55, 40:55] = torch.tensor(COLOURS["red"])[:, None, None] / 255
    picture[:, :, 45:52, 45:52] = 1  # a red frame
    assert [o.shape for o in read(picture)[0]].count(None) == 1
    assert score(picture, "a red circle") < 1


def test_specks_are_dirt() -> None:
    picture = draw([("circle", "red", 16, 16, 8)])
    picture[:, 1, 40:42, 40:43] = 0
    assert score(picture, "a red circle") == 1


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (128, 128), (200, 200)])
def test_any_size_will_do(size: tuple[int, int]) -> None:
    picture = draw([("circle", "red", 16, 16, 9), ("square", "green", 44, 40, 9)])
    scaled = torch.nn.functional.interpolate(picture, size, mode="bilinear", antialias=True)
    assert score(scaled, "a red circle above a green square") == 1
    wide = torch.cat([scaled, scaled[..., -1:].expand(*scaled.shape[:3], size[1] // 2)], -1)
    assert score(wide, "a red circle above a green square") == 1


@pytest.mark.parametrize("kind", ["noise", "nan", "inf", "grey", "black", "white", "tiny", "thin", "half", "wild"])
def test_nothing_makes_it_fail(kind: str) -> None:
    images = {
        "noise": torch.rand(4, 3, 64, 64),
        "nan": torch.full((4, 3, 64, 64), math.nan),
        "inf": torch.full((4, 3, 64, 64), math.inf),
        "grey": torch.full((4, 3, 64, 64), 0.5),
        "black": torch.zeros(4, 3, 64, 64),
        "white": torch.ones(4, 3, 64, 64),
        "tiny": torch.rand(4, 3, 1, 1),
        "thin": torch.rand(4, 3, 300, 1),
        "half": torch.rand(4, 3, 64, 64).half(),
        "wild": torch.randn(4, 3, 64, 64) * 1e6,
    }[kind]
    scores = Shapes()(images, ["a red circle"] * 4)
    assert scores.shape == (4,) and scores.dtype == torch.float32
    assert ((scores >= 0) & (scores < 1)).all()


def test_an_image_that_is_not_finite_scores_nothing() -> None:
    picture = draw([("circle", "red", 16, 16, 8)])
    picture[0, 0, 60, 60] = math.nan
    assert score(picture, "a red circle") == 0


def test_scores_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(13)
    scenes = [training_scene(rng) for _ in range(24)]
    images = to_tensor([render(s, rng) for s in scenes])
    prompts = [str(list(hard_negatives(s, rng).values())[-1]) for s in scenes]
    oracle = Shapes()
    together = oracle(images, prompts)
    alone = torch.cat([oracle(images[i : i + 1], prompts[i : i + 1]) for i in range(24)])
    order = torch.randperm(24)
    assert torch.equal(together, alone)
    assert torch.equal(oracle(images[order], [prompts[i] for i in order]), together[order])
    assert oracle(images[:0], []).shape == (0,)


def test_a_prompt_outside_the_grammar_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="'a cat' is outside the shapes world"):
        Shapes()(torch.rand(1, 3, 64, 64), ["a cat"])
    with pytest.raises(UserError, match=r"\(n, 3, h, w\)"):
        Shapes()(torch.rand(3, 64, 64), ["a star"])


def test_is_registered_and_names_itself() -> None:
    entry, options = registry.verifier.resolve("shapes")
    oracle = entry.target(**options)
    assert isinstance(oracle, Shapes) and oracle.identity()["name"] == "shapes"
    assert oracle.range == (0, 1) and oracle.reads_prompt and not oracle.differentiable
