"""FLOPs and traffic against sums worked out by hand, real runs of the same networks, and published figures."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from imgscale import cost
from imgscale.denoiser import Denoiser
from imgscale.flops import Counter, Work, hollow, networks
from imgscale.hardware import Hardware
from tests import zoo

UNIT = Hardware("test", 0.0, "table")  # traffic is free


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


class Block(nn.Module):
    """One of each kind of operation; 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.into = nn.Linear(8, 24)
        self.out = nn.Linear(8, 5, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.conv(images)).flatten(2).transpose(1, 2)
        query, key, value = self.into(tokens).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def by_hand(rows: int, side: int) -> Work:
    """Of `Block`, in float32."""
    n = side * side
    flops = 2 * n * 8 * 27 + 2 * n * 8 * 24 + 2 * (2 * n * n * 8) + 2 * n * 8 * 5
    weights = 8 * 27 + 8 + 8 * 24 + 8 * 5  # the second bias is a sum of its own, as the tokens aren't contiguous
    moved = n * (3 + 8) + n * (8 + 24) + n * 4 * 8 + n * (8 + 5)
    return Work(rows * flops, 4 * weights, 4 * rows * moved, weights + 24 + 16)


@pytest.mark.parametrize("make", [lambda: hollow(Block()), Block], ids=["hollow", "real"])
def test_work_by_hand(make: Callable[[], nn.Module]) -> None:
    block = make()
    with torch.no_grad(), Counter([block]) as counter:
        block(torch.zeros(2, 3, 6, 6))
    found, right = counter.work, by_hand(2, 6)
    assert (found.flops, found.weights, found.parameters) == (right.flops, right.weights, right.parameters)
    if next(block.parameters()).is_meta:  # a real attention also writes what its gradient would need
        assert found.activations == right.activations


def test_eflops_add_traffic_at_the_ridge_and_share_weights() -> None:
    work = Work(flops=1000, weights=100, activations=10)
    assert work.eflops(0) == 1000
    assert work.eflops(3) == 1000 + 3 * 110
    assert work.eflops(3, rows=4) == 4 * (1000 + 3 * 10) + 3 * 100
    assert work + Work(1, 2, 3, 4) == Work(1001, 102, 13, 4)


def test_attention_with_shared_heads_and_masks() -> None:
    query, key = empty(1, 4, 7, 16), empty(1, 2, 9, 16)
    with Counter() as counter:
        out = functional.scaled_dot_product_attention(
            query, key, value=empty(1, 2, 9, 6), attn_mask=torch.ones(7, 9, dtype=torch.bool), enable_gqa=True
        )
    assert out.shape == (1, 4, 7, 6)
    assert counter.flops == 4 * 7 * 9 * 2 * (16 + 6)


def test_hollow_results_answer_what_needs_numbers() -> None:
    x = empty(4, 6)
    mask = torch.tensor([True, False, True, True])
    with Counter():
        assert x[mask].shape == (3, 6)
        assert x[torch.ones(4, 6, dtype=torch.bool)].shape == (24,)
        assert x[empty(4).bool()].shape == (4, 6)
        assert x.sum().item() == 1 and torch.equal(x, x)
        assert (x + torch.zeros(6)).is_meta and x.to("cpu").is_meta
        assert torch.arange(3).sum().item() == 3, "what is real stays so"


def test_hollow_copies_no_weights_and_leaves_the_original_alone() -> None:
    block = Block()
    block.register_buffer("ages", torch.zeros(3))
    copied = hollow(block)
    assert {t.device.type for t in copied.state_dict().values()} == {"meta"}
    assert {t.device.type for t in block.state_dict().values()} == {"cpu"}
    assert copied.conv is not block.conv and networks(copied) == [copied]


def test_hooks_that_move_weights_are_left_out() -> None:
    from accelerate import cpu_offload

    block = Block()
    cpu_offload(block, execution_device=torch.device("cpu"))
    copied = hollow(block)
    with torch.no_grad(), Counter([copied]) as counter:
        copied(torch.zeros(1, 3, 4, 4))
    assert counter.work == by_hand(1, 4)
    assert hasattr(block, "_hf_hook")


EVERYDAY = ("FluxPipeline", "StableDiffusion3Pipeline", "StableDiffusionXLPipeline", "QwenImagePipeline")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.slow) for name in zoo.NAMES]
)
def test_every_pipeline_is_counted_as_it_runs(name: str) -> None:
    """The hollow count equals that of a real run on the CPU."""
    pipe, species = zoo.build(name), zoo.ZOO[name]
    height, width = species.size
    asked = dict(species.plain if species.guided is None else species.guided)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cost.measure(pipe, name, UNIT, defaults=species.defaults, height=height, width=width, **asked)
        denoiser = Denoiser(pipe, species.defaults)
        cond = denoiser.encode(cost.PROMPT, height=height, width=width, **asked)
        with torch.no_grad(), Counter() as evaluation:
            denoiser.evaluate(torch.zeros(1, *cond.latent_shape), torch.tensor(0.5, dtype=torch.float64), cond)
        with torch.no_grad(), Counter() as decode:
            denoiser.decode(torch.zeros(1, *cond.latent_shape), cond)
    assert found.evaluation.flops == evaluation.flops > 0
    assert found.decode.flops == decode.flops > 0
    assert found.passes == cond.passes and found.text.flops > 0
    assert (found.height, found.width) == (cond.height, cond.width)
