"""From a name, a folder or a pipeline to something to search with; and what can be wrong with each."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import imgscale
from imgscale import models
from imgscale.errors import UnknownName, UserError
from imgscale.models import ModelSettings, bundled, load_pipeline, locate
from tests import zoo

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Stable Diffusion pipeline of random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    zoo.build("StableDiffusionPipeline").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "spoilt"))


def refusal(model: Any, **settings: Any) -> str:
    """The one sentence that a model is refused with."""
    with pytest.raises(UserError) as caught:
        load_pipeline(model, **{"device": "cpu", "dtype": None, **settings})
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


# ---------------------------------------------------------------------------------------------------------- by name


def test_what_lies_in_the_bundled_folder_is_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("shapes-b", "model_index.json"), ("shapes-a", "model_index.json"), ("logs", "a.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "model_index.json").write_text("{}")
    monkeypatch.setattr(models, "bundled_folder", lambda: tmp_path)
    assert bundled() == {"shapes-a": tmp_path / "shapes-a", "shapes-b": tmp_path / "shapes-b"}
    assert locate("shapes-a") == tmp_path / "shapes-a"


def test_the_bundled_folder_is_the_assets() -> None:
    assert (models.bundled_folder() / "world.py").exists()
    for name, folder in bundled().items():
        assert folder.name == name and ModelSettings.read(folder).summary


@pytest.mark.parametrize(
    ("name", "near"), [("shapes-flwo", "shapes-flow"), ("turbo", "shapes-turbo"), ("zzz", None), ("a/b/c", None)]
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: Path("nowhere") for name in ("shapes-flow", "shapes-turbo")}
    monkeypatch.setattr(models, "bundled", lambda: known)
    with pytest.raises(UnknownName) as caught:
        locate(name)
    message = str(caught.value)
    assert message.startswith(f"Unknown model {name!r}; choose one of: shapes-flow, shapes-turbo.")
    assert (f"Did you mean {near!r}?" in message) == (near is not None)
    assert message.endswith("A folder or a hub id (owner/name) will do, too.")


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("owner/model", True),
        ("Owner-1/model.v2", True),
        ("./owner", False),
        ("/owner/model", False),
        ("~/model", False),
    ],
)
def test_what_may_be_a_hub_id(name: str, possible: bool) -> None:
    if possible:
        assert locate(name) is None
    else:
        with pytest.raises(UnknownName):
            locate(name)


def test_a_folder_wins_over_a_hub_id(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent.parent)
    assert locate(f"{tiny.parent.name}/{tiny.name}") == Path(tiny.parent.name) / tiny.name


def test_a_folder_without_a_pipeline(tmp_path: Path) -> None:
    message = refusal(str(tmp_path))
    assert (
        message == f"The folder {str(tmp_path)!r} holds no model_index.json, so it is no diffusers pipeline; give one."
    )


def test_a_hub_id_without_a_network() -> None:
    message = refusal("nobody/nothing")
    assert message.startswith("The model 'nobody/nothing' can't be loaded: ")
    assert message.endswith("Check the name, the network, or give a local folder.")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("401 Client Error: Cannot access gated repo for url …"), "is gated: accept its licence"),
        (OSError("403 Client Error: Forbidden"), "is gated"),
        (torch.OutOfMemoryError("CUDA out of memory."), "isn't enough memory"),
        (MemoryError(), "isn't enough memory"),
        (OSError("no such thing in /tmp/401/403"), "can't be loaded: no such thing in /tmp/401/403"),
        (ValueError(), "can't be loaded: ValueError"),
        (ValueError("x" * 1000), "xxx…"),
    ],
    ids=str,
)
def test_why_loading_failed(error: Exception, said: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", fail)
    assert said in refusal(str(tiny))


# ---------------------------------------------------------------------------------------------------------- folders


def test_a_folder_is_loaded_as_it_is(tiny: Path) -> None:
    original = zoo.build("StableDiffusionPipeline")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for model in (str(tiny), tiny):
            pipe, name, settings = load_pipeline(model, device="cpu", dtype=None)
            assert type(pipe) is type(original) and name == str(tiny) and settings == ModelSettings()
            assert pipe.unet.dtype == torch.float32 and pipe.device.type == "cpu"
    for key, weight in original.unet.state_dict().items():
        assert torch.equal(pipe.unet.state_dict()[key], weight), key


def test_the_dtype_is_the_users_choice(tiny: Path) -> None:
    pipe, _, _ = load_pipeline(str(tiny), device="cpu", dtype=torch.bfloat16)
    assert pipe.unet.dtype == pipe.vae.dtype == pipe.text_encoder.dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_here(device: str, tiny: Path) -> None:
    message = refusal(str(tiny), device=device)
    assert message.startswith(f"The device {device!r} can't be used here (") and message.endswith("; try 'cpu'.")


def test_loading_shows_no_bars_and_leaves_them_as_they_were(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from diffusers.utils import logging

    assert logging.is_progress_bar_enabled()
    load_pipeline(str(tiny), device="cpu", dtype=None)
    assert "it/s" not in capfd.readouterr().err and logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        load_pipeline(str(tiny), device="cpu", dtype=None)
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


def test_a_search_with_a_loaded_folder(tiny: Path) -> None:
    scaler = imgscale.load(str(tiny), device="cpu")
    out = scaler(
        "a cat",
        searcher="best-of-n",
        verifier=lambda images, prompts: images.mean((1, 2, 3)),
        budget=4,
        num_inference_steps=2,
        height=16,
        width=16,
        plain=False,
        progress=False,
    )
    assert out.finished and out.nfe == 4 and out.images[0].size == (16, 16) and out.model == str(tiny)


@pytest.mark.parametrize("file", [UNET, VAE, TEXT])
@pytest.mark.parametrize("keep", [0, 5, 100, -1, -5000])
def test_a_truncated_weights_file_is_told(file: str, keep: int, copy: Path) -> None:
    whole = (copy / file).read_bytes()
    (copy / file).write_bytes(whole[:keep])
    message = refusal(str(copy))
    assert message.startswith(f"A weights file of {str(copy)!r} is damaged or incomplete (")
    assert message.endswith("); fetch the model again.")


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize(
    ("file", "pickled"),
    [
        (UNET, "unet/diffusion_pytorch_model.bin"),
        (VAE, "vae/diffusion_pytorch_model.bin"),
        (TEXT, "text_encoder/pytorch_model.bin"),
    ],
)
def test_pickled_weights_are_never_loaded(file: str, pickled: str, copy: Path, tmp_path: Path) -> None:
    (copy / file).unlink()
    (copy / pickled).write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    message = refusal(str(copy))
    assert message == (
        f"The model {str(copy)!r} lacks {copy / file}; give one with all its weights as safetensors, since pickled ones"
        " (.bin, .ckpt) can run code and are never loaded."
    )
    assert not (tmp_path / "boom").exists()


SPOILS: dict[str, Callable[[Path], Any]] = {
    "index": lambda folder: (folder / "model_index.json").write_text("{"),
    "class": lambda folder: (folder / "model_index.json").write_text('{"_class_name": "NoPipeline"}'),
    "config": lambda folder: (folder / "unet" / "config.json").unlink(),
    "tokenizer": lambda folder: shutil.rmtree(folder / "tokenizer"),
}


@pytest.mark.parametrize("part", SPOILS)
def test_a_folder_with_something_wrong(part: str, copy: Path) -> None:
    SPOILS[part](copy)
    assert refusal(str(copy)).startswith(f"The model {str(copy)!r} can't be loaded: ")


# --------------------------------------------------------------------------------------------------------- pipelines


def test_a_loaded_pipeline_is_taken_as_it_is() -> None:
    pipe = zoo.build("StableDiffusionPipeline").to(torch.float64)
    before = {key: id(value) for key, value in vars(pipe).items()}
    taken, name, settings = load_pipeline(pipe, device=None, dtype=None)
    assert taken is pipe and name == "StableDiffusionPipeline" and settings == ModelSettings()
    assert pipe.unet.dtype == torch.float64
    assert {key: id(value) for key, value in vars(pipe).items()} == before


def test_a_pipeline_loaded_from_a_folder_has_the_folders_settings(copy: Path) -> None:
    from diffusers import StableDiffusionPipeline

    (copy / "imgscale.json").write_text('{"steps": 7, "distilled": true}')
    pipe = StableDiffusionPipeline.from_pretrained(copy)
    _, name, settings = load_pipeline(pipe, device=None, dtype=None)
    assert name == str(copy) and settings == ModelSettings(steps=7, distilled=True)
    assert imgscale.load(pipe).settings.steps == 7


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"dtype": torch.float16}], ids=str)
def test_a_loaded_pipeline_keeps_its_place(settings: dict[str, Any]) -> None:
    pipe = zoo.build("StableDiffusionPipeline")
    message = refusal(pipe, **{"device": None, **settings})
    assert message == (
        "A loaded pipeline keeps its device and dtype; move it yourself (pipe.to(…)) and leave out device= and dtype=."
    )


@pytest.mark.parametrize("model", [3, None, [], torch.nn.Linear(1, 1), zoo.build], ids=lambda m: type(m).__name__)
def test_what_is_no_model(model: Any) -> None:
    message = refusal(model, device=None)
    assert message.startswith("The model can't be ")
    assert message.endswith("; give a name, a folder, a hub id or a loaded diffusers pipeline.")


# ---------------------------------------------------------------------------------------------------------- settings


def write(folder: Path, text: str) -> Path:
    (folder / "imgscale.json").write_text(text, encoding="utf-8")
    return folder


def test_a_folder_without_settings_has_the_defaults(tmp_path: Path) -> None:
    assert ModelSettings.read(tmp_path) == ModelSettings()


def test_settings_are_read(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "steps": 10,
        "guidance_scale": 3.5,
        "distilled": True,
        "path": "own",
        "clip": "shapes-clip",
        "tiny": "shapes-tiny",
        "preview": "tiny",
        "defaults": {"max_sequence_length": 1},
        "summary": "größer",
    }
    assert {f.name for f in fields(ModelSettings)} == set(values), "a new one needs a test"
    assert ModelSettings.read(write(tmp_path, json.dumps(values))) == ModelSettings(**values)
    nothing = {"steps": None, "guidance_scale": None}
    assert ModelSettings.read(write(tmp_path, json.dumps(nothing))) == ModelSettings()
    assert ModelSettings.read(write(tmp_path, '{"guidance_scale": 4}')).guidance_scale == 4


def test_settings_reach_the_pipelines_calls(copy: Path) -> None:
    def images(settings: str) -> bytes:
        scaler = imgscale.load(write(copy, settings), device="cpu")
        out = scaler("a cat", searcher="best-of-n", verifier=_flat, budget=3, height=16, width=16, progress=False)
        assert (out.nfe, out.settings["num_inference_steps"], out.settings["guidance_scale"]) == (3, 3, 5.0)
        pixels: bytes = out.images[0].tobytes()
        return pixels

    with_defaults = images('{"steps": 3, "guidance_scale": 5.0, "defaults": {"guidance_rescale": 1.0}}')
    assert with_defaults != images('{"steps": 3, "guidance_scale": 5.0}')


def _flat(images: torch.Tensor, prompts: Any) -> torch.Tensor:
    return torch.zeros(len(images))


def test_what_load_is_told_goes_before_the_folder(copy: Path) -> None:
    from diffusers import StableDiffusionPipeline

    kept = {"guidance_rescale": 0.5, "clip_skip": None}
    write(copy, json.dumps({"steps": 7, "guidance_scale": 2.0, "distilled": True, "defaults": kept}))
    told: dict[str, Any] = {"steps": 3, "distilled": False, "path": "own", "clip": "shapes-clip", "tiny": "shapes-tiny"}
    here: dict[str, Any] = {"device": "cpu"}
    told |= {"preview": "linear", "defaults": {"guidance_rescale": 0.25}}
    wanted = ModelSettings(**{**told, "guidance_scale": 2.0, "defaults": {"guidance_rescale": 0.25, "clip_skip": None}})
    assert {*told, "guidance_scale", "summary"} == {f.name for f in fields(ModelSettings)}, "load takes all but summary"
    for model, place in ((str(copy), here), (StableDiffusionPipeline.from_pretrained(copy), {})):
        scaler = imgscale.load(model, **place, **told)
        assert scaler.settings == wanted
        assert dict(scaler.engine.denoiser.defaults) == wanted.defaults
        out = scaler("a cat", searcher="best-of-n", verifier=_flat, budget=3, height=16, width=16, progress=False)
        assert (out.settings["num_inference_steps"], out.settings["guidance_scale"]) == (3, 2.0)
        assert out.settings["distilled"] is False and out.settings["path"] == "own"
    pipe = zoo.build("StableDiffusionPipeline")
    assert imgscale.load(pipe, guidance_scale=0).settings == ModelSettings(guidance_scale=0)
    assert imgscale.load(pipe).settings == ModelSettings()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"steps": 0}, "steps can't be 0; give a whole number from 1."),
        ({"steps": 2.5}, "steps can't be 2.5; give a whole number from 1."),
        ({"guidance_scale": "high"}, "guidance_scale can't be 'high'; give a number."),
        ({"distilled": 1}, "distilled can't be 1; give true or false."),
        ({"path": "straight"}, "path can't be 'straight'; give one of own, linear, vp."),
        ({"clip": ""}, "clip can't be ''; give a text."),
        ({"tiny": 3}, "tiny can't be 3; give a text."),
        ({"preview": "small"}, "preview can't be 'small'; give full, tiny or linear."),
        ({"defaults": []}, "defaults can't be []; give a dictionary."),
    ],
)
def test_what_load_is_told_is_looked_at_before_the_weights(told: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        imgscale.load("nowhere/at-all", **told)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read as JSON ("),
        ("", "can't be read as JSON ("),
        ("\ufeff{}", "can't be read as JSON ("),
        ("[]", "holds [], but settings are an object"),
        ("7", "holds 7, but settings are an object"),
        ('{"step": 3}', "Did you mean 'steps'?"),
        ('{"Steps": 3}', "Unknown key in "),
        ('{"steps": "ten"}', "The key 'steps' in "),
        ('{"steps": 0}', "can't be 0; give a whole number from 1 or null."),
        ('{"steps": 2.5}', "can't be 2.5"),
        ('{"steps": true}', "can't be True"),
        ('{"guidance_scale": "high"}', "can't be 'high'; give a number or null."),
        ('{"distilled": 1}', "can't be 1; give true or false."),
        ('{"distilled": null}', "can't be None; give true or false."),
        ('{"clip": 3}', "can't be 3; give a text."),
        ('{"clip": ""}', "can't be ''; give a text."),
        ('{"defaults": []}', "can't be []; give a dictionary."),
        ('{"summary": null}', "can't be None; give a text."),
    ],
)
def test_settings_that_are_wrong(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ModelSettings.read(write(tmp_path, text))
    message = str(caught.value)
    assert said in message and str(tmp_path / "imgscale.json") in message and "\n" not in message


def test_settings_are_looked_at_before_the_weights(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo must not cost the minutes that loading takes."""
    monkeypatch.setattr(models, "_from_pretrained", lambda *_: pytest.fail("loaded first"))
    assert "Unknown key" in refusal(str(write(copy, '{"step": 3}')))
