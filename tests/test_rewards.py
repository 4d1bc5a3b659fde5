"""Verifiers that hang: given up on in time, without a second call into a network that is still at work."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import imgscale
from imgscale.errors import UserError
from imgscale.rewards import timed
from imgscale.verifiers.ensemble import Ensemble
from tests.doubles import Reward, Watched, near_one, new, run

IMAGES = torch.full((2, 3, 1, 2), 0.5)


class Hanging:
    """Hangs in the calls with these numbers, until it is let go."""

    def __init__(self, *calls: int) -> None:
        self.hangs, self.calls, self.inside = calls, 0, 0
        self.go = threading.Event()
        self.most = 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.calls += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.calls in self.hangs:
            self.go.wait(30)
        self.inside -= 1
        return near_one(images, prompts)


def test_a_call_in_time_is_the_verifiers_own() -> None:
    reward = Reward(near_one, "near", (-5.0, 0.0))
    quick = timed(reward, 30)
    assert torch.equal(quick(IMAGES, ["", ""]), reward(IMAGES, ["", ""]))
    assert (quick.name, quick.range, quick.differentiable) == ("near", (-5.0, 0.0), True)
    assert quick.identity() == {"name": "near"}


def test_errors_and_gradients_pass_through() -> None:
    def broken(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        timed(Reward(broken), 30)(IMAGES, ["", ""])
    leaf = IMAGES.clone().requires_grad_()
    timed(Reward(near_one), 30)(leaf, ["", ""]).sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.any())
    with torch.no_grad():
        assert not timed(Reward(near_one), 30)(leaf, ["", ""]).requires_grad


def test_a_hanging_call_costs_its_candidates_and_no_others() -> None:
    rule = Hanging(1)
    world = Watched()
    search = new(world, "rbf", verifier=timed(Reward(rule, "slow"), 0.05), budget=60)

    def free() -> str:
        if search.events:
            rule.go.set()
        return ""

    run(world, search, stop=free)
    assert search.best is not None and search.stopped in ("budget", "complete")
    assert "The verifier slow failed and cost its candidates −inf: TimeoutError('it took longer than 0.05 s')." in (
        search.events
    )
    assert search.best.score > -float("inf")
    assert rule.calls > 2 and rule.most == 1


def test_one_that_never_comes_back_is_called_once() -> None:
    rule = Hanging(1)
    world = Watched()
    search = run(world, new(world, "rbf", verifier=timed(Reward(rule, "slow"), 0.02), budget=400))
    rule.go.set()
    assert search.stopped == "verifier" and search.best is not None and rule.calls == 1


def test_each_member_of_an_ensemble_has_the_time() -> None:
    rule = Hanging(1)
    ensemble = timed(Ensemble(of=[Reward(near_one, "near"), Reward(rule, "slow")]), 0.02)
    with pytest.raises(TimeoutError):
        ensemble(IMAGES, ["", ""])
    rule.go.set()


def test_users_set_it() -> None:
    rule = Hanging(*range(1, 100))

    def slow(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return rule(images, prompts)

    scaler = imgscale.load("shapes-turbo")
    output = scaler("a red circle", verifier=slow, verifier_timeout=0.02, budget=12, plain=False, progress=False)
    rule.go.set()
    assert output.stopped == "verifier" and output.settings["verifier_timeout"] == 0.02
    with pytest.raises(UserError, match="verifier_timeout can't be 0"):
        scaler("a red circle", verifier_timeout=0)
