"""The shapes world: grammar, split, mistakes, renderer."""

from __future__ import annotations

import numpy as np
import pytest

from imgscale.assets.shapes.text import LENGTH, words
from imgscale.assets.shapes.world import (
    CATEGORIES,
    MARGIN,
    RELATIONS,
    SIZE,
    TRAIN_SHARE,
    Group,
    Scene,
    category,
    draw_scene,
    hard_negatives,
    held_out,
    parse,
    render,
    training_scene,
)
from imgscale.assets.shapes.world import _place as place


@pytest.mark.parametrize("kind", CATEGORIES)
def test_every_caption_parses_to_its_scene_and_category(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        scene = draw_scene(kind, rng)
        assert parse(str(scene)) == scene
        assert category(scene) == kind
        assert len(str(scene).replace(",", " ,").split()) + 2 <= LENGTH
        assert set(str(scene).replace(",", " ,").split()) <= set(words())


@pytest.mark.parametrize(
    ("caption", "scene"),
    [
        ("a star", Scene((Group(1, "star"),))),
        ("An orange square.", Scene((Group(1, "square", "orange"),))),
        ("  TWO   red circles ", Scene((Group(2, "circle", "red"),))),
        ("3 blue stars", Scene((Group(3, "star", "blue"),))),
        ("one circle and one square", Scene((Group(1, "circle"), Group(1, "square")))),
        (
            "a circle to the left of two stars and a square",
            Scene((Group(1, "circle"), Group(2, "star"), Group(1, "square")), "left of"),
        ),
        (
            "a red star, two squares, and a blue circle",
            Scene((Group(1, "star", "red"), Group(2, "square"), Group(1, "circle", "blue"))),
        ),
    ],
)
def test_people_may_write_captions_their_way(caption: str, scene: Scene) -> None:
    assert parse(caption) == scene


@pytest.mark.parametrize(
    ("caption", "part"),
    [
        ("", "''"),
        ("a cat", "'a cat'"),
        ("six circles", "'six circles'"),
        ("a pink star", "'a pink star'"),
        ("a star above a circle below a square", "more than one relation"),
        ("a star and a circle above a square", "only one before a relation"),
        ("a star, a circle, a square and a triangle", "one to three groups"),
        ("a star and", "outside the shapes world"),
    ],
)
def test_a_caption_outside_the_grammar_says_what_is_wrong(caption: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse(caption)


def test_captions_are_english() -> None:
    assert str(Scene((Group(1, "square", "orange"),))) == "an orange square"
    assert str(Scene((Group(1, "star"), Group(2, "circle", "red")), "above")) == "a star above two red circles"
    three = (Group(1, "star"), Group(2, "circle"), Group(5, "square"))
    assert str(Scene(three)) == "a star, two circles and five squares"


def test_training_never_sees_what_is_held_out() -> None:
    rng = np.random.default_rng(1)
    seen = [training_scene(rng) for _ in range(2000)]
    assert not any(map(held_out, seen))
    shares = {k: sum(category(s) == k for s in seen) / len(seen) for k in CATEGORIES}
    # Rejection takes from the categories that have held-out scenes, so their share falls a little.
    assert all(abs(shares[k] - TRAIN_SHARE[k]) < 0.08 for k in CATEGORIES)


def test_what_is_held_out_is_a_property_of_the_scene() -> None:
    rng = np.random.default_rng(2)
    shares = {}
    for kind in CATEGORIES:
        scenes = [draw_scene(kind, rng) for _ in range(400)]
        shares[kind] = np.mean([held_out(s) for s in scenes])
        for scene in scenes[:50]:
            if scene.relation is None:
                assert held_out(Scene(scene.groups[::-1])) == held_out(scene)
    assert shares["single"] == shares["two"] == 0
    assert all(0.1 < shares[k] < 0.6 for k in CATEGORIES if k not in ("single", "two")), shares


def test_the_split_stays_as_the_models_were_trained() -> None:
    rng = np.random.default_rng(3)
    scenes = [draw_scene("hard", rng) for _ in range(20)]
    assert "".join(str(int(held_out(s))) for s in scenes) == "01101001000010010001"


def test_mistakes_change_the_caption_by_one_step() -> None:
    rng = np.random.default_rng(4)
    kinds = set()
    for kind in CATEGORIES:
        for _ in range(150):
            scene = draw_scene(kind, rng)
            wrong = hard_negatives(scene, rng)
            assert "count" in wrong
            kinds |= set(wrong)
            for mistake in wrong.values():
                assert parse(str(mistake)) == mistake != scene
                lead = 1 if scene.relation else 0
                reordered = (mistake.groups[:lead], set(mistake.groups[lead:]), mistake.relation)
                assert reordered != (scene.groups[:lead], set(scene.groups[lead:]), scene.relation)
    swaps = {"swap-colour", "swap-shape", "swap-count"}
    assert kinds == {"count", "shape", "colour", "mirror", "turn"} | swaps


def test_rendering_depends_on_its_generator_alone() -> None:
    scene = parse("two red circles above a blue square")
    one, two, other = (render(scene, np.random.default_rng(s)) for s in (5, 5, 6))
    assert one.shape == (SIZE, SIZE, 3) and one.dtype == np.uint8
    assert (one == two).all() and (one != other).any()


@pytest.mark.parametrize("kind", CATEGORIES)
def test_objects_never_touch_stay_inside_and_keep_their_relation(kind: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        scene = draw_scene(kind, rng)
        x, y, r = np.array(place(scene, rng)).T
        assert (np.minimum(np.minimum(x, SIZE - x), np.minimum(y, SIZE - y)) > 1.12 * r).all()
        apart = np.hypot(x[:, None] - x, y[:, None] - y) - 1.12 * (r[:, None] + r)
        assert apart[~np.eye(len(x), dtype=bool)].min(initial=np.inf) > 2
        if scene.relation:
            axis, side = RELATIONS[scene.relation]
            at, first = side * (y if axis else x), scene.groups[0].count
            assert at[:first].min() - at[first:].max() >= MARGIN


def test_a_group_without_a_colour_has_one_that_may_be_seen() -> None:
    images = [render(parse("a circle"), np.random.default_rng(s)) for s in range(60)]
    middles = {tuple((np.median(i[i.min(2) < 200], 0) // 64).tolist()) for i in images}
    assert len(middles) > 3
