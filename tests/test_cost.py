"""What models cost, against published figures; and budgets in eFLOPs, which no search exceeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import imgscale
from imgscale import cost, hardware, registry
from imgscale.app.main import main
from imgscale.budget import Budget, Meter, Price
from imgscale.errors import UserError
from imgscale.flops import Counter
from imgscale.hardware import Hardware
from imgscale.problem import Problem
from imgscale.rehearsal import rehearse
from imgscale.search import Search
from tests import zoo
from tests.doubles import Reward, as_denoiser, run
from tests.worlds import Gaussian

UNIT = Hardware("test", 0.0, "table")
PRICE = Price(text=500, nfe=100, decode=60, preview=10, score=7)
PROMPT = "two red circles above a blue square"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ------------------------------------------------------------------------------------------------- published figures


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def sd15() -> tuple[nn.Module, Any]:
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    return net, lambda: net(empty(1, 4, 64, 64), empty(1), empty(1, 77, 768))


def sdxl() -> tuple[nn.Module, Any]:
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(
        sample_size=128,
        cross_attention_dim=2048,
        attention_head_dim=[5, 10, 20],
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        block_out_channels=[320, 640, 1280],
        transformer_layers_per_block=[1, 2, 10],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    more = {"text_embeds": empty(1, 1280), "time_ids": empty(1, 6)}
    return net, lambda: net(empty(1, 4, 128, 128), empty(1), empty(1, 77, 2048), added_cond_kwargs=more)


def sd3() -> tuple[nn.Module, Any]:
    from diffusers import SD3Transformer2DModel

    net = SD3Transformer2DModel(
        num_layers=24,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
    )
    return net, lambda: net(empty(1, 16, 128, 128), empty(1, 77 + 256, 4096), empty(1, 2048), empty(1))


def flux() -> tuple[nn.Module, Any]:
    from diffusers import FluxTransformer2DModel

    net = FluxTransformer2DModel(guidance_embeds=True)
    places = empty(4096, 3), empty(512, 3)
    return net, lambda: net(empty(1, 4096, 64), empty(1, 512, 4096), empty(1, 768), empty(1), *places, empty(1))


def vae() -> tuple[nn.Module, Any]:
    from diffusers import AutoencoderKL

    net = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
    )
    return net, lambda: net.decode(empty(1, 4, 128, 128))


def clip() -> tuple[nn.Module, Any]:
    import open_clip

    net = open_clip.create_model("ViT-L-14", device="meta")
    return net.visual, lambda: net.encode_image(empty(1, 3, 224, 224))


@pytest.mark.parametrize(
    ("make", "tflop", "billions"),
    [
        (sd15, 0.803, 0.860),
        (sdxl, 6.76, 2.567),
        (sd3, 8.90, 2.03),
        (flux, 74.4, 11.9),
        (vae, 10.5, None),
        (clip, 0.162, 0.304),
    ],
)
def test_published_figures(make: Any, tflop: float, billions: float | None) -> None:
    """FLOPs of one pass for one image, a multiplication and its addition being two, and parameters."""
    with torch.device("meta"), Counter():
        net, call = make()
    net.eval()
    with torch.no_grad(), Counter([net]) as counter:
        call()
    assert counter.flops / 1e12 == pytest.approx(tflop, rel=0.03)
    if billions is not None:
        assert counter.parameters / 1e9 == pytest.approx(billions, rel=0.01)


# ----------------------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def scaler() -> Any:
    return imgscale.load("shapes-turbo", device="cpu")


@pytest.fixture(scope="module")
def counted(scaler: Any) -> cost.Cost:
    found: cost.Cost = scaler.cost(preview="tiny")
    return found


def test_configs_say_the_same_as_the_loaded_model(scaler: Any, counted: cost.Cost) -> None:
    built = cost.of("shapes-turbo", device="cpu", preview="tiny", verifier=scaler.verifier("clip"))
    for part in ("text", "evaluation", "decode", "preview", "verifier", "passes", "schedule", "height", "dtype"):
        assert getattr(built, part) == getattr(counted, part), part


def test_guidance_doubles_an_evaluation() -> None:
    pipe = zoo.build("StableDiffusion3Pipeline")
    size: dict[str, Any] = {"height": 16, "width": 16}
    one = cost.measure(pipe, "m", UNIT, guidance_scale=1.0, **size)
    two = cost.measure(pipe, "m", UNIT, guidance_scale=3.0, **size)
    assert (one.passes, two.passes) == (1, 2)
    assert two.evaluation.flops == 2 * one.evaluation.flops
    both_of_one_batch = pytest.approx(one.evaluation.weights, rel=0.01)  # a bias may be added apart
    assert two.evaluation.weights == both_of_one_batch
    assert two.text.flops == 2 * one.text.flops


def test_size_and_batch(counted: cost.Cost) -> None:
    pipe = zoo.build("FluxPipeline")
    small, large = (cost.measure(pipe, "m", UNIT, height=16, width=w) for w in (16, 32))
    assert large.decode.flops == pytest.approx(2 * small.decode.flops, rel=0.1)
    assert large.evaluation.weights == small.evaluation.weights
    price, rows = counted.price, 4
    one, many = counted.sample(), counted.sample(rows)
    assert one == price.text + counted.sample_nfe * price.nfe + price.decode + price.score
    shared = counted.sample_nfe * counted.evaluation.weights + counted.decode.weights
    shared += counted.verifier.weights if counted.verifier else 0
    saved = rows * (one - price.text) - (many - price.text)
    assert saved == pytest.approx((rows - 1) * counted.hardware.ridge * shared, rel=1e-6)


def test_verifiers_without_a_network_count_as_nothing_and_say_so(scaler: Any) -> None:
    found = cost.measure(zoo.build("FluxPipeline"), "m", UNIT, verifier=scaler.verifier("jpeg"))
    assert found.verifier is not None and found.verifier.flops == 0 and "jpeg" in found.notes[0]
    both = cost.measure(zoo.build("FluxPipeline"), "m", UNIT, verifier=scaler.verifier("clip+jpeg"))
    alone = cost.measure(zoo.build("FluxPipeline"), "m", UNIT, verifier=scaler.verifier("clip"))
    assert both.verifier == alone.verifier and alone.notes == ()


def test_a_verifier_that_looks_at_numbers_is_counted_by_a_real_call() -> None:
    class Picky:
        name = "picky"
        range: tuple[float, float] | None = None
        reads_prompt = differentiable = False

        def __init__(self) -> None:
            self.net = nn.Linear(3, 2)

        def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
            found = self.net(images.mean((2, 3)))
            return torch.tensor([float(row.tolist()[0]) for row in found])

        def identity(self) -> dict[str, Any]:
            return {}

    found = cost.measure(zoo.build("FluxPipeline"), "m", UNIT, verifier=Picky())
    assert found.verifier is not None and found.verifier.flops == 2 * 3 * 2


# -------------------------------------------------------------------------------------------------------- hardware


def test_known_gpus_and_this_machine() -> None:
    assert hardware.of("H100") == Hardware("H100", 295.0, "table")
    assert hardware.of("a100").ridge == 153 and hardware.of("H200").ridge == 206
    assert hardware.of("H200").seconds(1e12) is None
    here = hardware.of("cpu")
    assert here.source == "measured" and here.speed and here.ridge > 0
    assert here.seconds(3 * here.speed) == pytest.approx(3)
    assert hardware.of("cpu") == here, "it is measured once"
    with pytest.raises(UserError, match="A100, H100, H200"):
        hardware.of("H900")


def test_a_damaged_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "probe", lambda device, dtype: hardware.Rates(8e9, 2e9))
    file = tmp_path / "cache" / "imgscale" / "hardware.json"
    file.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"x": {"flops": "many"}}', '{"x": {"flops": 0, "bytes": 1}}'):
        file.write_text(text)
        assert hardware.of("cpu").ridge == 4.0
        assert [*json.loads(file.read_text()).values()] == [{"flops": 8e9, "bytes": 2e9}]


# ---------------------------------------------------------------------------------------------------------- budgets


class Same:
    """Decodes previews as the world does its images."""

    def decode(self, z: Tensor) -> tuple[Tensor]:
        return (z.float().sigmoid()[:, None, None, :].expand(-1, 3, -1, -1),)


def search(name: str, budget: Budget, price: Price = PRICE, **options: Any) -> Search:
    world = as_denoiser(Gaussian())
    reward = Reward()
    meter = Meter(budget, price=price)
    problem = Problem(world, world.encode(""), steps=4, seed=0, meter=meter, differentiable=True)
    entry, checked = registry.searcher.resolve(name, options)
    return Search(problem, entry.target(problem, np.random.default_rng(0), **checked), reward, preview=Same())


def least(price: Price) -> int:
    """One sample of four evaluations."""
    return price.text + 4 * price.nfe + price.decode + price.score


DEAR_LOOKS = Price(text=0, nfe=10, decode=1000, preview=900, score=300)


@pytest.mark.parametrize("price", [PRICE, DEAR_LOOKS], ids=["dear-model", "dear-looks"])
@pytest.mark.parametrize("name", sorted(entry.name for entry in registry.searcher))
def test_no_search_exceeds_its_eflops_and_each_leaves_a_finished_image(name: str, price: Price) -> None:
    for more in (0, 57, 1200, 9001):
        limit = least(price) + more
        done = run(Gaussian(), search(name, Budget(eflops=limit), price))
        ledger = done.meter.ledger
        assert ledger.eflops is not None and ledger.eflops <= limit
        assert done.best is not None and done.best.finished


@pytest.mark.parametrize("name", ["best-of-n", "rbf", "bfs", "zero-order", "dps"])
def test_eflops_are_those_of_what_was_done(name: str) -> None:
    done = run(Gaussian(), search(name, Budget(nfe=120)))
    ledger = done.meter.ledger
    assert ledger.eflops is not None
    most = PRICE.text + ledger.nfe * PRICE.nfe + ledger.decodes * PRICE.decode + ledger.verifier_calls * PRICE.score
    if name in ("best-of-n", "zero-order"):  # which look at nothing unfinished
        assert ledger.eflops == most
    elif name == "dps":
        assert ledger.gradients and ledger.eflops > PRICE.text + ledger.nfe * PRICE.nfe + 2 * ledger.gradients * 100
    else:
        previews = (most - ledger.eflops) / (PRICE.decode - PRICE.preview)
        assert previews == int(previews) and 0 < previews < ledger.decodes


def test_best_of_n_uses_what_fits() -> None:
    each = 4 * PRICE.nfe + PRICE.image
    for n in (1, 2, 7):
        done = run(Gaussian(), search("best-of-n", Budget(eflops=PRICE.text + n * each)))
        assert done.meter.ledger.eflops == PRICE.text + n * each and done.meter.ledger.decodes == n


def test_nothing_is_counted_where_nobody_asks() -> None:
    meter = Meter(Budget(nfe=10))
    assert meter.ledger.eflops is None and "eflops" not in meter.ledger.as_dict()
    with pytest.raises(ValueError, match="price"):
        Meter(Budget(eflops=1e9))
    for value in (0, -1.0, True, float("inf"), "many"):
        with pytest.raises(UserError, match="eflops"):
            Budget(eflops=value)  # type: ignore[arg-type]


def test_a_scalers_budget(scaler: Any, counted: cost.Cost) -> None:
    price = counted.price
    limit = price.text + 3 * (counted.sample_nfe * price.nfe + price.image) + 1
    ask = {"searcher": "best-of-n", "plain": False, "progress": False, "preview": "tiny"}
    out = scaler(PROMPT, budget=Budget(eflops=limit), **ask)
    assert out.ledger.eflops == limit - 1 and out.ledger.decodes == 3
    from imgscale import png

    record = png.Record.of(out)
    assert record.budget.eflops == limit and record.price is not None and record.price.nfe == price.nfe
    assert scaler(PROMPT, budget=4, **ask).ledger.eflops, "once counted, it costs nothing"
    too_little = price.text + counted.sample_nfe * price.nfe + price.image - 1
    with pytest.raises(UserError, match="can't finish one image"):
        scaler(PROMPT, budget=Budget(eflops=too_little), **ask)


def test_another_machines_prices(scaler: Any) -> None:
    scaler.price = Price(text=0, nfe=1, decode=0, preview=0, score=0)
    try:
        out = scaler(PROMPT, searcher="best-of-n", budget=Budget(eflops=9), plain=False, progress=False)
    finally:
        scaler.price = None
    assert out.ledger.nfe == out.ledger.eflops == 8


# ------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", ["best-of-n", "rbf"])
def test_a_rehearsal_is_what_the_search_does(scaler: Any, counted: cost.Cost, name: str) -> None:
    budget = Budget(nfe=60)
    played = rehearse(counted.schedule, scaler.settings, name, budget, counted.price, scaler._useful("clip"))
    out = scaler(PROMPT, searcher=name, budget=budget, plain=False, progress=False, preview="tiny")
    assert (played.nfe, played.decodes) == (out.ledger.nfe, out.ledger.decodes)
    assert played.eflops == out.ledger.eflops


def test_the_command(capsys: pytest.CaptureFixture[str], counted: cost.Cost) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["cost", "shapes-turbo", "--device", "H200", "--dtype", "float32", "--preview", "tiny", "--json"])
    assert not stopped.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["hardware"]["ridge"] == 206 and said["parts"]["evaluation"]["flops"] == counted.evaluation.flops
    assert said["parts"]["verifier"]["eflops"] == counted.verifier.eflops(206) if counted.verifier else False
    assert said["searches"]["best-of-n"]["nfe"] == 200 and said["searches"]["rbf"]["verifier_calls"] > 50
    with pytest.raises(SystemExit):
        main(["cost", "shapes-turbo", "--device", "H200", "--verifier", "none", "--budget", "8"])
    shown = capsys.readouterr().out
    assert "model evaluation" in shown and "score by" not in shown and "seconds" not in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nobody/nothing"], "hf download nobody/nothing"),
        (["shapes-turbo", "--budget", "2", "--verifier", "none"], "give a budget of 4 or more"),
        (["shapes-turbo", "--device", "H900"], "A100, H100, H200"),
        (["shapes-turbo", "--preview", "nowhere"], "preview decoder 'nowhere'"),
    ],
)
def test_mistakes(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["cost", *arguments])
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


def test_a_folder_that_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["diffusers", "Nothing"]}')
    with pytest.raises(UserError, match="can't be built from its configs"):
        cost.of(str(tmp_path), device="H100")
