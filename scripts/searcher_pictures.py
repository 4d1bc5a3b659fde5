"""Draws docs/images/searchers/NAME.png: what every searcher does on a model that is known exactly, in one coordinate.

Run from the repository: python -m scripts.searcher_pictures [NAME …]. The searchers are the real ones, run by the real
engine. The model's images are of two kinds, the rarer of which has the better rewards; see `World` and `reward`.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from imgscale import registry
from imgscale.budget import Budget, Meter
from imgscale.kernels import Kernel
from imgscale.particles import Particles, Schedule
from imgscale.paths import Time, as_time
from imgscale.problem import Gradient, Problem, Request, Score, Verb
from imgscale.search import Search
from tests.doubles import Reward, as_denoiser, latents, run
from tests.worlds import Condition, Mixture

Floats = npt.NDArray[np.float64]

DIMENSIONS = 4  # noise has directions only in several; the pictures show the first, and the others don't matter
MODES, WEIGHTS, STD = (-1.3, 1.3), (0.75, 0.25), 0.4
PEAK = 2.0  # where the reward is highest
HEIGHT = 2.75  # the pictures show x from -HEIGHT to HEIGHT

INK, MUTED, DROPPED, KEPT, WON, STAR = "#24292f", "#6e7781", "#b6bcc4", "#8cb8dd", "#0b5cad", "#d4700a"


@dataclass(frozen=True)
class Picture:
    """How one searcher is shown.

    Args:
        spec: The searcher and its options, as users write them.
        nfe: The budget.
        seed: Of the search.
        steps: Transitions of a sample.
        keeps: What counts as kept besides the answer: "parents" of later candidates, or what became an "image".
        kin: Which earlier state with the same starting noise a new one comes from: the "nearest", the "best", the
            "latest".
        compare: Options of a second search that is drawn as what would have been without.
        turns: Whether going back up is part of one trajectory.
    """

    spec: str
    nfe: int
    seed: int = 0
    steps: int = 10
    keeps: str = "image"
    kin: str = "nearest"
    compare: str = ""
    turns: bool = False


PICTURES = {
    "best-of-n": Picture("best-of-n", nfe=80, keeps="parents"),
    "rbf": Picture("rbf", nfe=100, seed=4),
    "svdd": Picture("svdd(chains=2, children=5)", nfe=60),
    "code": Picture("code(chains=2, children=5)", nfe=60),
    "threshold": Picture("threshold(draws=3)", nfe=60),
    "dfs": Picture("dfs(chains=2, depth=0.4)", nfe=50),
    "smc": Picture("smc(particles=8, strength=2)", nfe=80, seed=5),
    "bfs": Picture("bfs(particles=8)", nfe=80),
    "zero-order": Picture("zero-order", nfe=130, seed=8, keeps="parents", kin="best"),
    "paths": Picture("paths(samples=1, branches=3)", nfe=100, seed=2, keeps="parents"),
    "evolve": Picture(
        "evolve(population=6, elites=2, mutation=0.5, schedule=0 0.4 0.7)", nfe=140, seed=5, keeps="parents"
    ),
    "cycle": Picture("cycle(starts=3, levels=3)", nfe=70, seed=3, keeps="parents"),
    "dps": Picture("dps(scale=1, batch=3)", nfe=30, seed=3, compare="dps(scale=0, batch=3)"),
    "local": Picture("local(rho=1, batch=1)", nfe=12, seed=7, steps=6, turns=True),
    "noise-gradient": Picture(
        "noise-gradient(lr=0.4, iterations=8, chains=2)", nfe=84, seed=6, keeps="parents", kin="latest"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="searchers; all if none is given")
    parser.add_argument("--out", type=Path, default=Path("docs/images/searchers"))
    args = parser.parse_args()
    for name in args.names or PICTURES:
        file = make(name, args.out)
        print(file, file.stat().st_size)


def make(name: str, folder: Path) -> Path:
    """Runs one searcher and draws it; the file."""
    picture = PICTURES[name]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.png"
    without = watch(replace(picture, spec=picture.compare)) if picture.compare else None
    file.write_bytes(draw(picture, watch(picture), without))
    return file


# ------------------------------------------------------------------------------------------------- the search


class World(Mixture):
    """Images of two kinds, which differ in the first coordinate. Remembers where the model was asked."""

    def __init__(self) -> None:
        means = torch.zeros(2, DIMENSIONS)
        means[:, 0] = torch.tensor(MODES)
        super().__init__(means, WEIGHTS, STD, (DIMENSIONS,))
        self.asked: list[tuple[float, Tensor]] = []

    def predict(self, x: Tensor, t: Time, cond: Condition) -> Tensor:
        self.asked.append((float(as_time(t).max()), x.detach().clone()))
        return super().predict(x, t, cond)


def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Highest where the first coordinate is PEAK."""
    return -(latents(images)[:, 0] - PEAK).square()


@dataclass(eq=False)
class Place:
    """A state that the search was at.

    Args:
        t: Its time.
        x: (d,).
        origin: The key of its starting noise.
        parent: Where it came from, if it isn't fresh noise.
        how: "step" towards the image, "back" up by noising, or "kin": changed from its parent at the same time.
        reward: What the verifier gave, if it looked.
    """

    t: float
    x: Tensor
    origin: int
    parent: Place | None = None
    how: str = ""
    reward: float | None = None
    children: list[Place] = field(default_factory=list)


class Watched(Problem):
    """A problem that remembers every state of a search, and which other it came from."""

    def __init__(self, world: World, kin: str, **settings: Any) -> None:
        denoiser = as_denoiser(world)
        super().__init__(denoiser, denoiser.encode(""), differentiable=True, **settings)
        self.world, self.kin = world, kin
        self.places: list[Place] = []

    def advance(
        self, particles: Particles, kernel: Kernel, noise: Tensor | None, shift: Tensor | float = 0.0
    ) -> Generator[Request, Any, Tensor]:
        x = yield from super().advance(particles, kernel, noise, shift)
        self._went(self._all_at(particles), particles.schedule.times[particles.step + 1], x, "step")
        return x

    def renoise(
        self, particles: Particles, to: int, schedule: Schedule | None = None, sloped: bool = False
    ) -> Generator[Request, Any, Particles]:
        moved = yield from super().renoise(particles, to, schedule, sloped)
        self._went(self._all_at(particles), moved.time, moved.x, "back")
        return moved

    def solve_with_gradient(self, particles: Particles) -> Generator[Request, Any, tuple[Particles, Tensor]]:
        first = len(self.world.asked)
        ends, slope = yield from super().solve_with_gradient(particles)
        here = self._all_at(particles)
        for t, x in [*self.world.asked[first + 1 :], (0.0, ends.x)]:
            here = self._went(here, t, x, "step")
        return ends, slope

    def looked(self, particles: Particles, rewards: Tensor) -> None:
        """Takes down what the verifier gave for these particles."""
        for x, seed, reward in zip(particles.x, particles.seeds.tolist(), rewards.tolist(), strict=True):
            self._at(particles.time, x, seed).reward = reward

    def _all_at(self, particles: Particles) -> list[Place]:
        """Where the particles are. New places are of the kin of earlier ones that began with the same noise."""
        before = len(self.places)
        here = [
            self._at(particles.time, x, seed) for x, seed in zip(particles.x, particles.seeds.tolist(), strict=True)
        ]
        for place in self.places[before:]:
            if kin := [p for p in self.places[:before] if p.origin == place.origin and abs(p.t - place.t) < 1e-5]:
                _link(max(kin, key=lambda other: self._kinship(place, other)), place, "kin")
        return here

    def _kinship(self, place: Place, other: Place) -> float:
        if self.kin == "best":
            return max((end.reward for end in _descent(other) if end.reward is not None), default=-inf)
        if self.kin == "latest":
            return self.places.index(other)
        return -float((place.x - other.x).norm())

    def _went(self, sources: Sequence[Place], t: float, x: Tensor, how: str) -> list[Place]:
        targets = [self._at(t, row, source.origin) for row, source in zip(x, sources, strict=True)]
        for source, target in zip(sources, targets, strict=True):
            if target is not source and target.parent is None:
                _link(source, target, how)
        return targets

    def _at(self, t: float, x: Tensor, origin: int) -> Place:
        for place in self.places:
            if abs(place.t - t) < 1e-5 and bool((place.x - x).abs().max() < 1e-4):
                return place
        self.places.append(Place(t, x.detach().clone(), origin))
        return self.places[-1]


def _link(parent: Place, child: Place, how: str) -> None:
    child.parent, child.how = parent, how
    parent.children.append(child)


def _descent(place: Place, turns: bool = False) -> Iterator[Place]:
    """The place and all that one trajectory made of it."""
    yield place
    for child in place.children:
        if turns or child.how == "step":
            yield from _descent(child, turns)


@dataclass(frozen=True)
class Story:
    """What a search did: all places it was at, and the one of its answer."""

    places: list[Place]
    answer: Place


def watch(picture: Picture) -> Story:
    """Runs the picture's search."""
    torch.manual_seed(picture.seed)
    world, verifier = World(), Reward(reward)
    meter = Meter(Budget(nfe=picture.nfe))
    problem = Watched(world, picture.kin, steps=picture.steps, seed=picture.seed, meter=meter)
    name, bend = registry.compose(picture.spec)
    if bend:
        guide, settings = registry.guide.resolve(bend)
        problem.guide = guide.target(**settings)
    entry, options = registry.searcher.resolve(name)
    steps = entry.target(problem, np.random.default_rng(picture.seed), **options)
    search = run(world, Search(problem, _overheard(problem, steps), verifier))
    assert search.best is not None
    answer = search.best.latents
    ends = [place for place in problem.places if place.t == 0]
    return Story(problem.places, min(ends, key=lambda end: float((end.x - answer).abs().max())))


def _overheard(problem: Watched, steps: Verb) -> Verb:
    """The searcher's requests, with a note of what the verifier said."""
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            return
        answer = yield request
        if isinstance(request, Score):
            problem.looked(request.particles, answer)
        elif isinstance(request, Gradient) and request.to == max(request.particles.step, 0):
            problem.looked(request.particles, answer.scores)
        elif isinstance(request, Gradient):
            step = request.particles.step if request.to is None else request.to
            problem.looked(replace(request.particles, step=step, x=answer.x), answer.scores)


# ------------------------------------------------------------------------------------------------ the picture


def draw(picture: Picture, story: Story, without: Story | None) -> bytes:
    """The PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0.025, 0.12, 0.86, 0.76))
    side = figure.add_axes((0.888, 0.12, 0.09, 0.76), sharey=axis)
    _backdrop(axis, side)
    if without is not None:
        for place in without.places:
            _mark(axis, place, DROPPED, 1.0, 2, dashed=True)
    levels = {place.t for place in story.places if place.reward is not None and place.t > 0}
    for t in levels if len(levels) <= 5 else ():
        axis.axvline(t, color="#d0d7de", lw=0.6, zorder=1)
    lineage = _lineage(story.answer, picture.turns)
    shown = {place.how for place in story.places} | ({"without"} if without else set())
    for place in story.places:
        if place in lineage:
            _mark(axis, place, _blend(WON, lineage[place]), 1.2 + lineage[place], 5)
        else:
            kept = _kept(place, picture)
            shown.add("kept" if kept else "dropped")
            _mark(axis, place, *((KEPT, 1.2, 4) if kept else (DROPPED, 0.8, 3)))
    axis.plot(0, _y(story.answer), "*", ms=15, color=STAR, mec="white", mew=0.8, zorder=12, clip_on=False)
    _legend(figure, picture, shown)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return _small(buffer.getvalue())


def _y(place: Place) -> float:
    return float(place.x[0])


def _lineage(answer: Place, turns: bool) -> dict[Place, float]:
    """Where the answer came from, and how strongly to draw it: less what was before the last way back."""
    strengths, strength, place = {}, 1.0, answer
    while True:
        taken_back = turns and any(child.how == "back" for child in place.children)
        strengths[place] = 0.5 if taken_back else strength
        if place.how in ("back", "kin") and not turns:
            strength = max(0.75 * strength, 0.45)
        if place.parent is None:
            return strengths
        place = place.parent


def _kept(place: Place, picture: Picture) -> bool:
    """Whether anything came of it: an image, or other trajectories."""
    if picture.keeps == "image":
        return any(other.t == 0 for other in _descent(place, picture.turns))
    while place.parent is not None and place.how == "step":
        place = place.parent
    return any(child.how != "step" for other in _descent(place) for child in other.children)


def _blend(colour: str, strength: float) -> tuple[float, ...]:
    """The colour, mixed with white."""
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))


def _mark(axis: Any, place: Place, colour: Any, width: float, order: int, dashed: bool = False) -> None:
    """The way to a place, and a dot where the verifier looked."""
    from matplotlib.patches import FancyArrowPatch

    if place.reward is not None and not dashed:
        axis.plot(place.t, _y(place), "o", ms=3.8, color=colour, mec="white", mew=0.5, zorder=order + 3)
    if place.parent is None:
        return
    start, end = (place.parent.t, _y(place.parent)), (place.t, _y(place))
    if place.how == "step":
        line = (0, (3, 2)) if dashed else "-"
        axis.plot(*zip(start, end, strict=True), color=colour, lw=width, zorder=order, ls=line)
        return
    bend = "arc3,rad=0.12" if place.how == "back" else "arc3,rad=-0.3"
    dots = {"linestyle": (0, (1, 1.5)), "linewidth": 0.9, "color": colour, "mutation_scale": 7}
    arrow = FancyArrowPatch(start, end, arrowstyle="-|>", connectionstyle=bend, shrinkA=0, shrinkB=0, **dots)
    axis.add_patch(arrow).set_zorder(order)


def _backdrop(axis: Any, side: Any) -> None:
    """Where the model's images are on their way from noise, and at the side what they are worth."""
    x = np.linspace(-HEIGHT, HEIGHT, 241)
    t = np.linspace(1, 0, 181)
    law = np.stack([_law(time, x) for time in t], 1)
    axis.contourf(
        t,
        x,
        (law / law.max(0)) ** 0.7,
        levels=[0.12, 0.35, 0.62, 2],
        colors=["#f6f8fa", "#eff2f5", "#e7ebef"],
        zorder=0,
    )
    axis.set(xlim=(1.035, -0.022), ylim=(-HEIGHT, HEIGHT), yticks=[], xticks=[1, 0.75, 0.5, 0.25, 0])
    axis.set_xticklabels(["noise  t = 1", "0.75", "0.5", "0.25", "0  image"], fontsize=8, color=MUTED)
    worth = -((x - PEAK) ** 2)
    shade = np.clip(1 + worth / 6, 0, 1)
    side.imshow(
        shade[:, None], extent=(0, 1.15, -HEIGHT, HEIGHT), origin="lower", aspect="auto", cmap=_greens(), zorder=0
    )
    side.fill_betweenx(x, 0, law[:, -1] / law.max(), color="#8c959f", alpha=0.55, lw=0, zorder=1)
    side.text(1.1, 2.35, "reward ", fontsize=8, color="#116329", ha="right", va="center", zorder=2)
    side.text(1.1, -2.35, "images of\nthe model ", fontsize=8, color=MUTED, ha="right", va="center", zorder=2)
    side.set(xticks=[], xlim=(0, 1.15))
    for each in (axis, side):
        each.tick_params(length=0, pad=3)
        for spine in each.spines.values():
            spine.set_visible(False)


def _law(t: float, x: Floats) -> Floats:
    """The density of the first coordinate at a time."""
    centre, spread = 1 - t, ((1 - t) ** 2 * STD**2 + t**2) ** 0.5
    bells = [w * np.exp(-(((x - centre * m) / spread) ** 2) / 2) / spread for m, w in zip(MODES, WEIGHTS, strict=True)]
    return sum(bells, np.zeros_like(x))


def _greens() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("reward", ["#ffffff", "#a5e0b4"], N=9)


def _legend(figure: Any, picture: Picture, shown: set[str]) -> None:
    from matplotlib.lines import Line2D

    kept = "became an image" if picture.keeps == "image" else "led to later tries"
    handles = {
        "without": Line2D([], [], color=DROPPED, lw=1.2, ls=(0, (3, 2)), label="without the gradient"),
        "dropped": Line2D([], [], color=DROPPED, lw=1.2, label="dropped"),
        "kept": Line2D([], [], color=KEPT, lw=1.6, label=kept),
        "answer": Line2D([], [], color=WON, lw=2.2, label="led to the answer"),
        "back": Line2D([], [], color=MUTED, lw=1, ls=(0, (1, 1.5)), label="noised again"),
        "kin": Line2D([], [], color=MUTED, lw=1, ls=(0, (1, 1.5)), label="noise changed"),
        "look": Line2D([], [], color=MUTED, lw=0, marker="o", ms=4, label="the verifier looked"),
        "star": Line2D([], [], color=STAR, lw=0, marker="*", ms=10, label="answer"),
    }
    chosen = [line for name, line in handles.items() if name in shown | {"answer", "look", "star"}]
    place = {"loc": "upper left", "bbox_to_anchor": (0.045, 1.0), "borderaxespad": 0.3, "columnspacing": 1.8}
    figure.legend(handles=chosen, ncols=6, frameon=False, fontsize=8, labelcolor=INK, handlelength=1.6, **place)


def _small(png: bytes) -> bytes:
    """The same picture with a palette."""
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(256, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
