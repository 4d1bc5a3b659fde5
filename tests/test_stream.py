"""Many searches as a stream: what they share, what they don't, and how they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import imgscale
from imgscale import Ask, Done, Progress, SearchOutput, UserError
from imgscale.engine import Engine
from imgscale.models import ModelSettings
from imgscale.scaler import Scaler
from tests.doubles import STEPS, Reward, as_denoiser
from tests.worlds import Gaussian

PROMPTS = [
    "two red circles",
    "a blue star left of a green square",
    "three yellow triangles",
    "a red square",
    "a purple circle above two blue stars",
]


def world(max_batch: int = 32, exact: bool = False) -> Scaler:
    engine = Engine(as_denoiser(Gaussian(mean=0.6, cov=0.3)), max_batch, exact)
    return Scaler(engine, "world", ModelSettings(steps=STEPS))


def ask(prompt: str = "a", **settings: object) -> Ask:
    given = {"searcher": "best-of-n", "verifier": Reward(), "budget": STEPS * 3, "plain": False, **settings}
    return Ask(prompt, **given)  # type: ignore[arg-type]


def outputs(done: Sequence[Done]) -> dict[int, SearchOutput]:
    return {each.place: each.output for each in done if each.output is not None}


def test_each_search_comes_once_with_what_it_was_asked_for() -> None:
    asked = [ask(str(i), seed=i, budget=STEPS * (1 + i % 3), plain=i % 2 == 0) for i in range(11)]
    done = list(world().stream(asked, together=3))
    assert sorted(each.place for each in done) == list(range(11))
    for each in done:
        assert each.ask is asked[each.place] and each.error is None and each.output is not None
        assert each.output.prompt == str(each.place) and each.output.settings["seed"] == each.place
        assert each.output.nfe == STEPS * (1 + each.place % 3)
        assert (each.output.plain is not None) == (each.place % 2 == 0)


def test_no_more_run_at_a_time_than_asked_and_asks_are_read_as_there_is_room() -> None:
    read: list[int] = []
    ended = 0

    def asks() -> Iterator[Ask]:
        for i in range(9):
            read.append(i)
            yield ask(str(i), budget=STEPS * (1 + i % 2))

    most: list[int] = []
    for _ in world().stream(asks(), together=4, callback=lambda progress: most.append(progress.searches)):
        ended += 1
        assert len(read) <= ended + 4
    assert ended == 9 and max(most) == 4


def test_the_searches_share_batches() -> None:
    scaler = world()
    sizes: list[int] = []
    predict = scaler.engine.denoiser.predict
    scaler.engine.denoiser.predict = lambda x, t, cond: sizes.append(len(x)) or predict(x, t, cond)  # type: ignore
    list(scaler.stream([ask(str(i), seed=i, options={"batch": 1}) for i in range(6)], together=6))
    assert set(sizes) == {6}


def test_what_is_wrong_with_one_leaves_the_others_alone() -> None:
    asked = [ask(), ask(""), ask(budget=1), ask(searcher="nowhere"), ask(seed=-1), ask(keep=0), ask("b")]
    done = {each.place: each for each in world().stream(asked, together=2)}
    assert sorted(done) == list(range(7))
    assert [place for place in done if done[place].output] == [0, 6]
    said = {place: str(each.error) for place, each in done.items() if each.error}
    assert "prompt can't be ''" in said[1] and "can't finish one image" in said[2] and "'nowhere'" in said[3]
    assert "seed can't be -1" in said[4] and "keep can't be 0" in said[5]
    assert all(isinstance(done[place].error, UserError) for place in said)


def test_all_may_be_wrong_and_there_may_be_none() -> None:
    assert list(world().stream([])) == []
    assert [each.place for each in world().stream([ask("")] * 5, together=2)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("together", [0, -1, True, 1.5, "2"])
def test_together_is_a_number_of_searches(together: object) -> None:
    with pytest.raises(UserError, match="together can't be"):
        list(world().stream([ask()], together=together))  # type: ignore[arg-type]


def test_cancel_ends_those_that_run_with_their_best_and_begins_no_other() -> None:
    ticks = 0

    def stop(progress: Progress) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == STEPS + 2:
            progress.cancel()

    done = outputs(list(world().stream([ask(str(i), budget=STEPS * 50) for i in range(8)], together=3, callback=stop)))
    assert sorted(done) == [0, 1, 2]
    assert all(output.stopped == "cancelled" and output.finished for output in done.values())


def test_progress_names_the_searches_that_run() -> None:
    seen: list[Progress] = []

    def look(progress: Progress) -> None:
        assert len(progress.places) == len(progress.best) == len(progress.rounds) == progress.searches
        for i in range(progress.searches):
            assert progress.ledger(i).nfe <= STEPS * 3
            if progress.best[i] is not None:
                assert progress.gallery(i)[0].score == progress.best[i] and progress.preview(i) is not None
        seen.append(progress)

    list(world().stream([ask(str(i)) for i in range(5)], together=2, callback=look))
    assert sorted({place for progress in seen for place in progress.places}) == [0, 1, 2, 3, 4]
    assert [p.nfe for p in seen] == sorted(p.nfe for p in seen) and seen[-1].nfe == 5 * STEPS * 3


def test_leaving_the_stream_early_closes_the_searches() -> None:
    stream = world().stream([ask(str(i)) for i in range(6)], together=3)
    next(stream)
    stream.close()
    assert torch.is_grad_enabled()


def test_between_two_results_torch_is_as_the_caller_left_it() -> None:
    for _ in world().stream([ask(str(i)) for i in range(4)], together=2):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# ----------------------------------------------------------------------------------------------------------------- keep


def test_keep_gives_the_best_finished_images_in_order() -> None:
    reward = Reward()
    scores: list[float] = []

    def noted(images: Tensor, prompts: Sequence[str]) -> Tensor:
        found: Tensor = reward(images, prompts)
        scores.extend(found.tolist())
        return found

    for keep in (1, 3, 7, 50, None):
        scores.clear()
        out = world()(
            "a", searcher="best-of-n", verifier=noted, budget=STEPS * 7, plain=False, progress=False, keep=keep
        )
        best = sorted(scores, reverse=True)[:keep]
        assert [candidate.score for candidate in out.gallery] == pytest.approx(best)
        assert len(out.images) == len(out.seeds) == len(best) == min(7, keep or 7)
        assert out.gallery[0].score == out.scores[out.verifier] and out.seeds[0] == out.gallery[0].seed
        assert len({candidate.seed for candidate in out.gallery}) == len(best)


def test_kept_images_are_judged_by_those_who_report() -> None:
    def held(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.flatten(1).mean(1)

    out = world()(
        "a",
        searcher="best-of-n",
        verifier=Reward(),
        report=[held],
        budget=STEPS * 5,
        keep=4,
        plain=False,
        progress=False,
    )
    for candidate in out.gallery:
        assert candidate.report["held"] == pytest.approx(float(candidate.image.mean()), abs=1e-6)


def test_kept_images_survive_a_resumed_search(tmp_path: object) -> None:
    def run(stop_after: int | None = None) -> SearchOutput:
        ticks = 0

        def callback(progress: Progress) -> None:
            nonlocal ticks
            ticks += 1
            if ticks == stop_after:
                raise KeyboardInterrupt

        found: SearchOutput = world()(
            "a",
            searcher="best-of-n",
            options={"batch": 2},
            verifier="jpeg",
            budget=STEPS * 8,
            keep=5,
            plain=False,
            progress=False,
            journal=f"{tmp_path}/journal" if stop_after is not None else None,
            callback=callback,
        )
        return found

    straight = run()
    with pytest.raises(KeyboardInterrupt):
        run(2 * (STEPS + 1) + 3)
    again = run(10**6)
    assert [c.score for c in again.gallery] == [c.score for c in straight.gallery]
    for one, other in zip(straight.gallery, again.gallery, strict=True):
        assert torch.allclose(one.image, other.image, atol=1e-6)


def test_an_unfinished_answer_is_the_whole_gallery() -> None:
    out = world()(
        "a",
        searcher="best-of-n",
        verifier=Reward(),
        budget=STEPS * 5,
        keep=4,
        plain=False,
        progress=False,
        callback=lambda progress: progress.cancel(),
    )
    assert not out.finished and len(out.images) == len(out.gallery) == 1 and not out.gallery[0].finished


# ---------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("model", ["shapes-turbo", "shapes-ddpm"])
def test_an_exact_result_does_not_depend_on_what_shares_its_batches(model: str) -> None:
    scaler, few = imgscale.load(model, exact=True, max_batch=8), 4
    common = {"verifier": "clip", "report": ["shapes"], "budget": few * 4, "num_inference_steps": few}
    asked = [
        Ask(prompt, searcher=searcher, seed=i, plain=i == 0, **common)  # type: ignore[arg-type]
        for i, (prompt, searcher) in enumerate(zip(PROMPTS, ("rbf", "best-of-n", "svdd", "rbf", "smc"), strict=True))
    ]
    alone = [next(iter(scaler.stream([each]))).output for each in asked]
    company = outputs(list(scaler.stream(asked, together=5)))
    turned = outputs(list(imgscale.load(model, exact=True, max_batch=8).stream(asked[::-1], together=2)))
    for i, one in enumerate(alone):
        assert one is not None
        for other in (company[i], turned[len(asked) - 1 - i]):
            assert np.array_equal(np.asarray(one.images[0]), np.asarray(other.images[0]))
            assert one.scores == other.scores and one.nfe == other.nfe
            assert torch.equal(one.gallery[0].latents, other.gallery[0].latents)


def test_exact_batches_are_full_and_charge_only_what_was_asked() -> None:
    scaler = world(max_batch=8, exact=True)
    sizes: list[int] = []
    predict = scaler.engine.denoiser.predict
    scaler.engine.denoiser.predict = lambda x, t, cond: sizes.append(len(x)) or predict(x, t, cond)  # type: ignore
    out = scaler("a", searcher="best-of-n", verifier=Reward(), budget=STEPS * 11, plain=False, progress=False)
    assert set(sizes) == {8} and out.nfe == STEPS * 11
    assert out.settings["exact"] is True and out.settings["max_batch"] == 8
