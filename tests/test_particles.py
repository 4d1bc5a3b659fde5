"""Particles: what selecting, branching and joining must keep together."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from imgscale.kernels import DDIM
from imgscale.keys import fold, normal, root
from imgscale.particles import Particles, Schedule, join
from imgscale.paths import VP, Linear, Path, Time
from imgscale.problem import NOISE, Problem, Verb
from tests.doubles import Watched, new, run

GRID = (1.0, 0.7, 0.3, 0.0)


def some(n: int = 5, step: int = 1, scored: bool = True, first: int = 0) -> Particles:
    """Particles whose every field tells which one they are: x is i, x0 10 i, keys and seeds follow from i."""
    number = torch.arange(first, first + n)
    x = number.float()[:, None, None].expand(n, 2, 3)
    keys = root(7, first + n)[first:]
    scores = number.double() / 8 if scored else None
    return Particles(Schedule(Linear(), GRID), step, x, 10 * x, keys, fold(keys, 99), scores)


def which(particles: Particles) -> list[int]:
    """The numbers of the particles, after checking that everything of each is of the same one."""
    numbers = particles.x[:, 0, 0].long()
    n = len(particles)
    assert particles.x.shape == particles.x0.shape == (n, 2, 3)
    assert torch.equal(particles.x0, 10 * particles.x)
    assert torch.equal(particles.seeds, fold(root(7, 20)[numbers], 99))
    if particles.scores is not None:
        assert torch.equal(particles.scores, numbers.double() / 8)
    return numbers.tolist()


def test_a_schedule_counts_evaluations() -> None:
    schedule = Schedule(Linear(), GRID)
    assert schedule.steps == 3
    # Done up to `start`: what is evaluated at times after it, but never at t = 0.
    assert [schedule.nfe(0, k) for k in range(4)] == [0, 1, 2, 2]
    assert schedule.nfe(-1, 0) == 1 and schedule.nfe(2, 3) == 0
    open_ended = Schedule(VP(), (1.0, 0.5))
    assert open_ended.nfe(0, 1) == 1


def test_a_schedule_between_two_times() -> None:
    schedule = Schedule(Linear(), (1.0, 0.7, 0.5, 0.3, 0.0))
    assert schedule.between(0.89, 0.08) == Schedule(Linear(), (0.89, 0.7, 0.5, 0.3, 0.08))
    assert schedule.between(1.0, 0.3) == Schedule(Linear(), (1.0, 0.7, 0.5, 0.3)), "its own times are not doubled"
    assert schedule.between(0.6, 0.0) == Schedule(Linear(), (0.6, 0.5, 0.3, 0.0))
    assert schedule.between(0.2, 0.1).steps == 1


def test_where_particles_are() -> None:
    assert [some(step=k).time for k in range(4)] == list(GRID)
    assert [some(step=k).finished for k in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (2, [2]),
        (-1, [4]),
        (np.int64(3), [3]),
        (torch.tensor(3), [3]),
        (torch.tensor([0.1, 0.9, 0.3]).argmax(), [1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2, 4]),
        ([4, 0, 0], [4, 0, 0]),
        (torch.tensor([3, 3, 1]), [3, 3, 1]),
        (np.array([1, 0]), [1, 0]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
        ([False, True, False, False, False], [1]),
        ([], []),
        (slice(0, 0), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("scored", [True, False])
def test_indexing_keeps_everything_together(index: int, expected: list[int], scored: bool) -> None:
    chosen = some(scored=scored)[index]
    assert which(chosen) == expected and len(chosen) == len(expected)
    assert (chosen.scores is not None) == scored
    assert chosen.step == 1 and chosen.schedule == some().schedule


def test_the_best_come_first_and_of_equals_the_first() -> None:
    tied = replace(some(5), scores=torch.tensor([0.5, -torch.inf, 0.9, 0.5, 0.9], dtype=torch.float64))
    assert [tied.top(n).x[:, 0, 0].long().tolist() for n in (1, 3, 9)] == [[2], [2, 4, 0], [2, 4, 0, 3, 1]]
    assert tied.top(2).scores is not None and which(replace(tied.top(5), scores=None)) == [2, 4, 0, 3, 1]


def test_an_index_out_of_range() -> None:
    with pytest.raises(IndexError):
        some()[5]


def test_selecting_copies_keys_and_branching_renews_them() -> None:
    particles = some(3)
    assert torch.equal(particles[[1, 1]].keys, particles.keys[[1, 1]])
    children = particles.branch(4)
    assert which(children) == [0] * 4 + [1] * 4 + [2] * 4, "children of one parent stand together"
    everyone = [*particles.keys.tolist(), *children.keys.tolist()]
    assert len(set(everyone)) == 15


def test_children_of_different_numbers_never_share_a_key() -> None:
    """Drawn in one batch or in several, child number k is the same child."""
    particles = some(3)
    together = particles.branch(6).keys.reshape(3, 6)
    apart = torch.cat([particles.branch(n, first).keys.reshape(3, n) for n, first in ((1, 0), (3, 1), (2, 4))], 1)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [0, 0, 4, 0], [0, 0, 0, 0]])
def test_children_by_counts_are_the_first_children_of_each(counts: list[int]) -> None:
    parents = some(4)
    children = parents.branch(np.array(counts), first=2)
    expected = [p for p, n in enumerate(counts) for _ in range(n)]
    assert which(children) == expected
    alone = [parents[p].branch(n, first=2).keys for p, n in enumerate(counts)]
    assert torch.equal(children.keys, torch.cat(alone))


def test_children_depend_on_the_step() -> None:
    assert set(some(step=1).branch(8).keys.tolist()).isdisjoint(some(step=2).branch(8).keys.tolist())


def test_a_family_tree_has_no_twins() -> None:
    """Noise is drawn for the starts and for every transition of every particle: no two draws may be equal."""
    drawn = [root(7, 40)]
    generation = some(6, step=0)
    for step in range(3):
        drawn.append(fold(generation.keys, NOISE, step + 1))
        generation = replace(generation.branch(3), step=step + 1)
    keys = torch.cat(drawn)
    assert len(keys) == 40 + 6 + 18 + 54 and len(set(keys.tolist())) == len(keys)


@pytest.mark.parametrize("n", [1, 12])
def test_transition_noise_is_never_another_start(n: int) -> None:
    """The noise that particle 0 gets at step k must not be what some other particle started from."""
    world = Watched(mean=0.0, cov=1.0)
    noises: list[Tensor] = []

    class Spy(DDIM):
        def __call__(
            self, path: Path, t: Time, t_next: Time, x: Tensor, x0: Tensor, noise: Tensor | None = None
        ) -> Tensor:
            if noise is not None:
                noises.append(noise)
            return super().__call__(path, t, t_next, x, x0, noise)

    def searcher(problem: Problem) -> Verb:
        particles = yield from problem.start(n)
        particles = yield from problem.denoise(particles, kernel=Spy())
        yield from problem.score(particles)

    run(world, new(world, searcher, budget=12 * n, steps=12))
    starts = normal(root(0, 50), (2,))
    rows = torch.cat([starts, *noises])
    assert len(noises) == 11
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_joining_is_the_reverse_of_slicing() -> None:
    whole = some(5)
    back = join([whole[:2], whole[2], whole[3:]])
    assert which(back) == [0, 1, 2, 3, 4] and torch.equal(back.keys, whole.keys)


def test_joined_particles_are_scored_only_if_all_are() -> None:
    assert join([some(2), some(3, scored=False, first=2)]).scores is None
    assert which(join([some(2), some(3, first=2)])) == [0, 1, 2, 3, 4]


OTHERS: dict[str, Callable[[], Particles]] = {
    "step": lambda: some(step=2),
    "path": lambda: replace(some(), schedule=Schedule(VP(), GRID)),
    "grid": lambda: replace(some(), schedule=Schedule(Linear(), (1.0, 0.7, 0.2, 0.0))),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_particles_at_different_places_cannot_be_joined(other: Callable[[], Particles]) -> None:
    with pytest.raises(ValueError, match="same step of the same schedule"):
        join([some(), other()])


def test_scores_end_with_a_move_and_travel_with_a_choice() -> None:
    world = Watched()
    told: list[object] = []

    def searcher(problem: Problem) -> Verb:
        start = yield from problem.start(3)
        assert start.scores is None
        start, scores = yield from problem.score(start)
        assert start.scores is not None and torch.equal(start.scores, scores)
        chosen = start[[2, 0]]
        again, memo = yield from problem.score(chosen)
        assert torch.equal(memo, scores[[2, 0]]) and again is chosen
        told.append(len(world.decoded))  # no new call was made for it
        moved = yield from problem.denoise(chosen, 2)
        assert moved.scores is None and moved.step == 2
        assert torch.equal(moved.keys, chosen.keys) and torch.equal(moved.seeds, chosen.seeds)
        yield from problem.score((yield from problem.denoise(moved)))

    search = run(world, new(world, searcher, budget=50))
    assert told == [1] and search.stopped == "complete"


def test_children_of_pure_noise_have_keys_that_no_noise_is_drawn_from() -> None:
    from imgscale.problem import NOISE, RENOISE

    schedule = Schedule(Linear(), (1.0, 0.5, 0.0))
    keys = torch.arange(3)
    noise = Particles(schedule, -1, torch.zeros(3, 2), torch.zeros(3, 2), keys, keys)
    children = set(noise.branch(4).keys.tolist())
    drawn = {int(k) for purpose in (NOISE, RENOISE) for step in range(8) for k in fold(keys, purpose, step)}
    assert len(children) == 12 and not children & drawn
