"""Preview decoders: what they draw, which images they are used for, and what results keep of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from torch import Tensor, nn
from torch.nn import functional

import imgscale
from imgscale import png, previews
from imgscale.app import main, rerun
from imgscale.denoiser import Denoiser
from imgscale.errors import UserError
from imgscale.kernels import ODE
from imgscale.models import ModelSettings, bundled
from tests import zoo
from tests.doubles import STEPS, Reward, Watched, near_one, new, run


class Half:
    """A preview decoder of the analytic worlds that draws half as bright."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def decode(self, x0: Tensor) -> tuple[Tensor]:
        self.decoded.append(len(x0))
        return (x0.float().sigmoid()[:, None, None, :].expand(-1, 3, -1, -1) / 2,)


# ---------------------------------------------------------------------------------------------------- in a search


@pytest.mark.parametrize("searcher", ["rbf", "smc", "bfs", "svdd"])
def test_only_finished_images_come_from_the_vae(searcher: str) -> None:
    world, half, reward = Watched(), Half(), Reward(near_one)
    search = new(world, searcher, budget=60, verifier=reward)
    search.preview = half
    run(world, search)
    assert half.decoded and search.best is not None and search.best.finished
    assert torch.equal(search.best.image[0, 0], search.best.latents.float().sigmoid())
    ledger = search.meter.ledger
    assert ledger.decodes == ledger.verifier_calls
    assert sum(world.decoded) == ledger.decodes + len(set(search_bests(search)))  # and once for each new best's preview


def search_bests(search: Any) -> list[tuple[int, float]]:
    return [(i, p.score) for i, p in enumerate(search.trace[:-1])]


def test_both_scores_of_the_winner_are_kept() -> None:
    world = Watched()
    search = new(world, "rbf", budget=60, verifier=Reward(near_one, "near"))
    search.preview = Half()
    run(world, search)
    best = search.best
    assert best is not None
    (half,) = Half().decode(best.latents[None])
    assert best.report == {"near (preview)": pytest.approx(float(near_one(half, [])[0]))}
    assert best.score == pytest.approx(float(near_one(best.image[None], [])[0]))
    assert search.meter.ledger.report_calls == len(search.trace) - 1


def test_searches_with_different_decoders_run_side_by_side() -> None:
    world = Watched()
    alone = [run(world, one) for one in (new(world, "rbf", budget=60), with_preview(world))]
    both = [new(world, "rbf", budget=60), with_preview(world)]
    both[1].verifier = both[0].verifier
    run(world, *both)
    for a, b in zip(alone, both, strict=True):
        assert a.best is not None and b.best is not None
        assert torch.equal(a.best.latents, b.best.latents) and a.best.score == b.best.score


def with_preview(world: Watched) -> Any:
    search = new(world, "rbf", budget=60)
    search.preview = Half()
    return search


def test_gradients_go_through_the_decoder_in_use() -> None:
    world, half = Watched(), Half()
    search = new(world, "rbf+dps", budget=60)
    search.preview = half
    run(world, search)
    assert (
        search.best is not None and search.meter.ledger.gradients and sum(half.decoded) >= search.meter.ledger.gradients
    )


# ------------------------------------------------------------------------------------------------------ the decoders


def kl(channels: int = 4, **config: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=64,
        **config,
    ).eval()


def tiny_vae(channels: int = 4) -> AutoencoderTiny:
    torch.manual_seed(1)
    return AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=channels,
    ).eval()


class Pooling(nn.Module):
    """A VAE whose latents are mean colours in other axes: its linear map is known."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.tensor([[1.0, 0.2, 0.0, 0.5], [0.0, -1.0, 0.3, 0.5], [0.4, 0.0, 2.0, 0.5]])
        self.config = {"sample_size": 64, "latent_channels": 4}
        self.dtype = torch.float32

    def encode(self, images: Tensor) -> tuple[Tensor]:
        return (torch.einsum("kc,nkhw->nchw", self.matrix, functional.avg_pool2d(images, 4)),)

    def decode(self, z: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        colours = torch.einsum("kc,nchw->nkhw", torch.linalg.pinv(self.matrix).T, z)
        return (functional.interpolate(colours - 0.1, scale_factor=4),)


def test_the_linear_map_is_the_decoders_own_where_that_is_linear() -> None:
    vae = Pooling()
    fitted = previews.fit(vae, torch.device("cpu"))
    images = previews.dead_leaves(2, 64, seed=5) * 2 - 1
    (z,) = vae.encode(images)
    wanted = functional.avg_pool2d(vae.decode(z)[0], 4)
    colours = torch.einsum("kc,nchw->nkhw", fitted.weight, z) + fitted.bias[:, None, None]
    assert torch.allclose(colours, wanted, atol=1e-4)
    assert fitted.decode(z)[0].shape == images.shape and fitted.decode(z[:, :, None])[0].shape == (2, 3, 1, 64, 64)


def test_dead_leaves_are_reproducible_and_lie_in_range() -> None:
    images = previews.dead_leaves(2, 64)
    assert torch.equal(images, previews.dead_leaves(2, 64)) and images.std() > 0.1
    assert images.min() >= 0 and images.max() <= 1


def watched(decode: Callable[..., Any], seen: list[Tensor]) -> Callable[..., Any]:
    def call(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(z)
        return decode(z, *args, **kwargs)

    return call


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "StableDiffusion3Pipeline", "FluxPipeline"])
@pytest.mark.parametrize("kind", ["linear", "tiny"])
def test_pipelines_decode_by_it(name: str, kind: str) -> None:
    """Each pipeline scales and unpacks its latents by its own rules before any decoder sees them."""
    pipe = zoo.build(name)
    denoiser = Denoiser(pipe)
    cond = denoiser.encode("a red circle")
    x0 = denoiser.prior(torch.arange(2), cond)
    seen: list[Tensor] = []
    channels = pipe.vae.config.latent_channels
    decoder = previews.load("linear" if kind == "linear" else tiny_vae(channels), denoiser, ModelSettings())
    decoder.decode = watched(decoder.decode, seen)
    vae_decode = pipe.vae.decode
    images = denoiser.decode(x0, cond, decoder)
    assert images.shape[:2] == (2, 3) and len(images.unique()) > 2
    assert 0 <= images.min() and images.max() <= 1 and pipe.vae.decode == vae_decode
    z = seen[0]
    assert z.shape[1] == channels
    whole: list[Tensor] = []
    pipe.vae.decode = watched(vae_decode, whole)
    denoiser.decode(x0, cond)
    del pipe.vae.decode
    if kind == "linear":  # made for the same latents as the VAE
        assert torch.allclose(z, whole[0], atol=1e-5)
        assert images.shape == denoiser.decode(x0, cond).shape
    else:  # a tiny autoencoder takes them as the model has them
        scale, shift = pipe.vae.config.scaling_factor, pipe.vae.config.get("shift_factor") or 0.0
        assert torch.allclose((whole[0] - shift) * scale, z, atol=1e-4)


def test_tiny_is_the_one_that_was_made_for_the_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(source: str, vae: Any, device: Any) -> Any:
        asked.append(source)
        return tiny_vae(vae.config.latent_channels)

    monkeypatch.setattr(previews, "_tiny", load)

    class Holder:
        device = torch.device("cpu")

        def __init__(self, vae: Any) -> None:
            self.vae = vae

    for channels, scale in previews.TINY:
        previews.load("tiny", Holder(kl(channels, scaling_factor=scale)), ModelSettings())  # type: ignore[arg-type]
    assert asked == list(previews.TINY.values())
    previews.load("tiny", Holder(kl(4)), ModelSettings(tiny="mine"))  # type: ignore[arg-type]
    assert asked[-1] == "mine"
    with pytest.raises(
        UserError, match="No tiny autoencoder is known for this VAE \\(4 channels, scaling factor 0.7\\)"
    ):
        previews.load("tiny", Holder(kl(4, scaling_factor=0.7)), ModelSettings())  # type: ignore[arg-type]


def test_one_from_a_folder(tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path / "tiny")
    scaler = imgscale.load("shapes-turbo")
    decoder = scaler.preview(str(tmp_path / "tiny"))
    assert isinstance(decoder, AutoencoderTiny) and scaler.preview(str(tmp_path / "tiny")) is decoder
    tiny_vae(16).save_pretrained(tmp_path / "wide")
    with pytest.raises(UserError, match="takes latents of 16 channels, and this model's have 4"):
        scaler.preview(str(tmp_path / "wide"))


@pytest.mark.parametrize(
    ("preview", "message"),
    [
        ("tinny", "Unknown preview 'tinny'; choose one of: full, linear, tiny. Did you mean 'tiny'?"),
        (7, "can't be 7; give full, tiny, linear"),
        ("no/where", "'no/where' can't be loaded"),
        (".", "holds no config.json"),
    ],
)
def test_what_is_no_preview(preview: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        imgscale.load("shapes-turbo")("a red circle", preview=preview, budget=4, progress=False)


def test_a_pipeline_without_a_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = imgscale.load("shapes-turbo")
    monkeypatch.setattr(Denoiser, "vae", None)
    assert scaler.preview("full") is None
    with pytest.raises(UserError, match="has no VAE whose previews could be 'linear'"):
        scaler.preview("linear")


# --------------------------------------------------------------------------------------------------- the bundled one


@pytest.mark.weights
@pytest.mark.parametrize("name", sorted(bundled()))
def test_the_bundled_tiny_autoencoder_draws_what_the_vae_draws(name: str) -> None:
    scaler = imgscale.load(name)
    assert scaler.settings.tiny == "shapes-tiny"
    denoiser, ode = scaler.engine.denoiser, ODE()
    cond = denoiser.encode("two red circles and a blue square", guidance_scale=scaler.settings.guidance_scale)
    grid = denoiser.grid(scaler.settings.steps or 10, cond).tolist()
    x = denoiser.prior(torch.arange(4), cond)
    decibels = []
    for t, t_next in zip(grid[:-1], grid[1:], strict=True):
        x0 = denoiser.predict(x, t, cond)
        off = denoiser.decode(x0, cond) - denoiser.decode(x0, cond, scaler.preview("tiny"))
        decibels.append(-10 * math.log10(float(off.square().mean())))
        x = ode(denoiser.path, t, t_next, x, x0)
    assert min(decibels[1:]) > 25 and decibels[-1] > 30  # guidance overdoes the first, which nobody can read yet


@pytest.mark.weights
def test_results_and_records_say_which_decoder() -> None:
    scaler = imgscale.load("shapes-turbo")
    prompt = "two red circles and a blue square"
    output = scaler(prompt, preview="tiny", budget=STEPS * 6, plain=False, progress=False)
    assert set(output.scores) == {"clip", "clip (preview)"}
    assert abs(output.scores["clip"] - output.scores["clip (preview)"]) < 0.2
    assert output.settings["preview"] == "tiny" and output.settings["preview_decoder"].startswith("AutoencoderTiny ")
    full = scaler(prompt, preview="full", budget=STEPS * 6, plain=False, progress=False)
    assert set(full.scores) == {"clip"} and full.settings["preview_decoder"] is None


# ------------------------------------------------------------------------------------------------ the command line


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    return int(end.value.code or 0)


@pytest.mark.weights
def test_a_picture_knows_its_previews_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = "two red circles and a blue square"
    options = ("-m", "shapes-turbo", "-b", "24", "--no-plain", "--preview", "linear", "--verifier-timeout", "60")
    assert ended("generate", prompt, *options, "--json") == 0
    values = json.loads(capfd.readouterr().out)
    assert {"clip", "clip (preview)"} <= values["scores"].keys()
    picture = values["images"][0]
    record = png.read(Path(picture))
    assert (record.preview, record.verifier_timeout) == ("linear", 60.0)
    assert record.preview_decoder is not None and record.preview_decoder.startswith("Linear ")
    assert ended("rerun", picture) == 0
    assert "Identical" in capfd.readouterr().out


def test_a_picture_may_not_say_where_a_decoder_lies() -> None:
    record = png.Record.model_construct(model="shapes-turbo", verifier="clip", preview="somebody/decoder")
    with pytest.raises(UserError, match="'somebody/decoder', and settings in a picture may not say what to load"):
        rerun.job_of(record)


@pytest.mark.parametrize("command", [("generate", "a red circle"), ("bench",)])
def test_a_bad_preview_is_refused_before_anything_loads(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imgscale, "load", None, raising=False)
    assert ended(*command, "--preview", "tinny") == 2
    assert "Did you mean 'tiny'?" in capfd.readouterr().err


def test_a_bad_time_limit_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("generate", "a red circle", "--verifier-timeout", "0") == 2
    assert "--verifier-timeout" in capfd.readouterr().err
