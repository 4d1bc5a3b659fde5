"""The noise of a picture: kept by every searcher, written, read, and made into the same picture by one trajectory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import imgscale
from imgscale import registry
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.noise import Noise, _together
from imgscale.particles import Particles
from imgscale.problem import Problem, Verb
from imgscale.result import SearchOutput
from imgscale.scaler import Scaler
from imgscale.search import Search
from tests.commands import Command, command
from tests.doubles import STEPS, Watched, as_denoiser, new, run

__all__ = ["command"]

PROMPT = "two red circles above a blue square"
ALL = [entry.name for entry in registry.searcher]
GUIDED = {"dps", "local"}  # their reward bends the very last transition: only the finished latents are left
either = pytest.mark.parametrize("distilled", [False, True], ids=["ordinary", "distilled"])


def retraced(world: Watched, search: Search) -> torch.Tensor:
    """The latents that the winner's origin leads to, in one trajectory alone."""
    best = search.best
    assert best is not None and best.origin is not None
    origin = best.origin
    assert origin.path == world.path and origin.times[-1] == 0 and len(origin.calls) == len(origin.times)
    assert len(origin.times) - 1 <= STEPS + 2, "one sample's worth"
    before = world.evaluations
    cond = as_denoiser(world).encode("")
    made, image = Engine(as_denoiser(world)).retrace(origin.x[None], origin.times, cond, [1] * len(origin.times))
    assert world.evaluations - before == len(origin.times) - 1
    torch.testing.assert_close(image[0], best.image, atol=1e-5, rtol=0)
    return made[0]


@pytest.mark.parametrize("name", [*ALL, "rbf+dps", "smc+dps", "bfs(local)"])
@either
@pytest.mark.parametrize("nfe", [STEPS, 13, 60])
def test_every_winner_is_made_again_from_its_origin(name: str, distilled: bool, nfe: int) -> None:
    for seed in range(3):
        world, plain = Watched(shape=(3,)), Watched(shape=(3,))
        search = run(world, new(world, name, budget=nfe, distilled=distilled, seed=seed, traces=True))
        alike = run(plain, new(plain, name, budget=nfe, distilled=distilled, seed=seed))
        assert search.best is not None and alike.best is not None
        assert torch.equal(search.best.latents, alike.best.latents), "it is the same search"
        assert alike.best.origin is None
        torch.testing.assert_close(retraced(world, search), search.best.latents, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted({*ALL} - GUIDED))
def test_more_than_the_finished_latents_is_kept(name: str) -> None:
    world = Watched(shape=(3,))
    best = run(world, new(world, name, budget=60, traces=True)).best
    assert best is not None and best.origin is not None
    assert len(best.origin.times) > 1 and not torch.equal(best.origin.x, best.latents)


@pytest.mark.parametrize("name", ["best-of-n", "zero-order", "noise-gradient"])
def test_searches_for_starting_noise_keep_the_starting_noise(name: str) -> None:
    world = Watched(shape=(3,))
    search = run(world, new(world, name, budget=60, traces=True))
    assert search.best is not None and search.best.origin is not None
    assert search.best.origin.times == search.problem.schedule.times


def test_a_searcher_that_moves_x_itself_begins_a_new_trajectory() -> None:
    def shifted(problem: Problem) -> Verb:
        here = yield from problem.denoise((yield from problem.start(2)), 2)
        moved = Particles(**{**vars(here), "x": here.x + 0.5})
        yield from problem.score((yield from problem.finish(moved)))

    world = Watched(shape=(3,))
    search = run(world, new(world, shifted, budget=60, traces=True))
    assert search.best is not None and search.best.origin is not None
    assert search.best.origin.times == search.problem.schedule.times[3:], "x0 was of another x"


def test_only_the_winners_noise_is_held() -> None:
    """Nothing is traced unless it is asked for, and origins go with the particles that had them."""
    world = Watched(shape=(3,))
    assert new(world, "rbf", budget=60).problem.prior(2).traced is None
    held = new(world, "rbf", budget=60, traces=True).problem.prior(4)
    assert held.traced is not None and len(held[1:3].origins) == 2
    assert held[2:].origins[0] is held.traced.each[2]
    assert held[torch.tensor([False, True, True, False])].origins == held.traced.each[1:3]


@pytest.mark.parametrize(("n", "most"), [(1, 32), (10, 32), (33, 32), (65, 32), (7, 2)])
def test_the_size_of_calls_is_as_the_engine_divides_them(n: int, most: int) -> None:
    sizes = Engine(as_denoiser(Watched()), most)._in_batches(n, lambda a, b: [b - a] * (b - a))
    assert [_together(n, i, most) for i in range(n)] == [size for part in sizes for size in part]


# --------------------------------------------------------------------------------------------------- a bundled model


@pytest.fixture(scope="module")
def flow() -> Scaler:
    return imgscale.load("shapes-flow", device="cpu")


Searched = Callable[..., SearchOutput]


@pytest.fixture(scope="module")
def searched(flow: Scaler) -> Searched:
    found: dict[Any, SearchOutput] = {}

    def search(searcher: str = "zero-order", **more: Any) -> SearchOutput:
        key = searcher, tuple(sorted(more.items()))
        if key not in found:
            settings = {"num_inference_steps": 6, "plain": False, "progress": False, "budget": 40, **more}
            found[key] = flow(PROMPT, searcher=searcher, keep_noise=True, **settings)
        return found[key]

    return search


@pytest.mark.parametrize("searcher", ["zero-order", "rbf(explore=0.5)", "svdd", "cycle", "dps"])
def test_the_file_makes_the_same_pixels(searcher: str, searched: Searched, flow: Scaler, tmp_path: Path) -> None:
    out = searched(searcher)
    assert out.noise is not None
    file = out.noise.save(tmp_path / "it.noise.safetensors")
    made = flow.from_noise(file)
    assert made.same and made.image.tobytes() == out.images[0].tobytes()
    assert made.nfe == out.noise.nfe <= 6 or made.together
    torch.testing.assert_close(made.latents, out.gallery[0].latents, atol=1e-3, rtol=0)


def test_the_starting_noise_serves_the_plain_pipeline(searched: Searched, flow: Scaler) -> None:
    out = searched()
    noise = out.noise
    assert noise is not None and noise.steps == 6
    picture = flow.engine.denoiser.pipe(
        PROMPT,
        latents=noise.latents[None],
        num_inference_steps=noise.steps,
        guidance_scale=noise.record.guidance_scale,
        output_type="pt",
        **flow.engine.denoiser.defaults,
    ).images[0]
    torch.testing.assert_close(picture.float(), out.gallery[0].image, atol=1e-3, rtol=0)
    later = searched("rbf(explore=0.5)").noise
    assert later is not None and (later.steps is None) == (later.times[0] < 1)


def test_all_that_are_kept_have_theirs(flow: Scaler) -> None:
    out = flow(PROMPT, searcher="best-of-n", budget=12, num_inference_steps=3, keep=3, keep_noise=True, plain=False)
    assert [noise.seed for noise in out.noises] == out.seeds and len(out.noises) == 3
    for noise, image in zip(out.noises, out.images, strict=True):
        assert flow.from_noise(noise).image.tobytes() == image.tobytes()
    without = flow(PROMPT, searcher="best-of-n", budget=12, num_inference_steps=3, keep=3, plain=False)
    assert without.noise is None and without.noises == []
    assert [image.tobytes() for image in without.images] == [image.tobytes() for image in out.images]


def test_the_header_says_what_it_is(searched: Searched, tmp_path: Path) -> None:
    out = searched()
    assert out.noise is not None
    file = out.noise.save(tmp_path / "it.noise.safetensors")
    length = int.from_bytes(file.read_bytes()[:8], "little")
    words = json.loads(file.read_bytes()[8 : 8 + length])["__metadata__"]
    record, said = json.loads(words["imgscale"]), json.loads(words["imgscale_noise"])
    assert record["model"] == "shapes-flow" and record["prompt"] == PROMPT and record["searcher"] == "zero-order"
    assert record["num_inference_steps"] == 6 and record["seed"] == 0 and record["height"] == out.images[0].height
    assert said["format"] == 1 and said["score"] == pytest.approx(out.gallery[0].score)
    assert [p.name for p in tmp_path.iterdir()] == ["it.noise.safetensors"], "nothing is left beside it"
    read = Noise.load(file)
    assert torch.equal(read.latents, out.noise.latents) and read.times == out.noise.times


def wrong(name: str, file: Path) -> None:
    """Spoils a good file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        words = opened.metadata()
    said = json.loads(words["imgscale_noise"])
    if name == "text":
        file.write_text("no tensors at all")
    elif name == "pickle":
        torch.save(tensors, file)
    elif name == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif name == "folder":
        file.unlink()
        file.mkdir()
    elif name == "missing":
        file.unlink()
    elif name == "foreign":
        save_file(tensors, file)
    elif name == "other tensors":
        save_file({**tensors, "more": torch.zeros(1)}, file, words)
    elif name == "half":
        save_file({"latents": tensors["latents"].half()}, file, words)
    elif name == "nan":
        save_file({"latents": tensors["latents"] * torch.nan}, file, words)
    elif name == "shape":
        save_file({"latents": tensors["latents"][:-1].contiguous()}, file, words)
    else:
        change = {
            "later version": {"format": 2},
            "rising times": {"times": said["times"][::-1]},
            "no end": {"times": said["times"][:-1], "calls": said["calls"][:-1]},
            "lacking calls": {"calls": said["calls"][:-1]},
            "huge calls": {"calls": [10**9] * len(said["calls"])},
            "unknown": {"run": "rm -rf"},
        }[name]
        save_file(tensors, file, {**words, "imgscale_noise": json.dumps({**said, **change})})


WRONG = {
    "text": "can't be read as safetensors",
    "pickle": "can't be read as safetensors",
    "cut": "can't be read as safetensors",
    "folder": "is a folder",
    "missing": "is not there",
    "foreign": "holds no noise of imgscale",
    "other tensors": "holds no noise of imgscale",
    "half": "aren't finite float32",
    "nan": "aren't finite float32",
    "shape": "takes (",
    "later version": "another version of imgscale",
    "rising times": "aren't those of a trajectory",
    "no end": "aren't those of a trajectory",
    "lacking calls": "aren't those of a trajectory",
    "huge calls": "calls.0: Input should be less than or equal to 4096",
    "unknown": "run: Extra inputs",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_sentence(name: str, searched: Searched, flow: Scaler, tmp_path: Path) -> None:
    noise = searched().noise
    assert noise is not None
    file = noise.save(tmp_path / "it.noise.safetensors")
    wrong(name, file)
    with pytest.raises(UserError) as said:
        flow.from_noise(file)
    assert WRONG[name] in str(said.value) and "\n" not in str(said.value)


def test_another_model_is_refused(searched: Searched) -> None:
    noise = searched().noise
    assert noise is not None
    ddpm = imgscale.load("shapes-ddpm", device="cpu")
    with pytest.raises(UserError, match="was found with the model 'shapes-flow', and this is 'shapes-ddpm'"):
        ddpm.from_noise(noise)
    with pytest.raises(UserError, match="whose pipeline is"):
        ddpm.from_noise(noise, another_model=True)


def test_another_picture_is_said_to_differ(searched: Searched, flow: Scaler) -> None:
    noise = searched().noise
    assert noise is not None
    changed = Noise(**{**vars(noise), "latents": noise.latents.flip(0)})
    made = flow.from_noise(changed)
    assert not made.same and not made.together and made.nfe >= noise.nfe


# -------------------------------------------------------------------------------------------------- the command line


def generated(command: Command, *more: str) -> dict[str, Any]:
    settings = ("--searcher", "zero-order", "--budget", "24", "--steps", "4", "--no-plain", "--json")
    ran = command("generate", PROMPT, *settings, *more)
    assert ran.status == 0, ran.err
    found: dict[str, Any] = ran.json
    return found


def test_the_command_writes_it_and_rerun_reads_it(command: Command) -> None:
    found = generated(command, "--save-noise")
    file, picture = Path(found["noise"]), Path(found["images"][0])
    assert file.name == f"{picture.stem}.noise.safetensors" and file.parent == picture.parent
    ran = command("rerun", str(file))
    assert ran.status == 0 and ran.out.startswith("Identical: all "), ran.out
    again = picture.with_name(f"{picture.stem}-rerun.png")
    assert Image.open(again).tobytes() == Image.open(picture).tobytes()
    told = command("rerun", str(file), "--json", "--out", "elsewhere").json
    assert told["identical"] and told["nfe"] <= 4 * (1 + 4) and Path(told["image"]).parent == Path("elsewhere")
    before = picture.read_bytes()
    plain = generated(command)
    assert "noise" not in plain and plain["images"] == found["images"]
    assert Image.open(picture).tobytes() == Image.open(again).tobytes() and len(before)


def test_rerun_says_how_a_changed_noise_differs(command: Command) -> None:
    file = Path(generated(command, "--save-noise")["noise"])
    noise = Noise.load(file)
    Noise(**{**vars(noise), "latents": noise.latents.flip(0)}).save(file)
    ran = command("rerun", str(file))
    assert ran.status == 1 and ran.out.startswith("Different: ") and "by up to" in ran.out
    Path(generated(command)["images"][0]).unlink()
    ran = command("rerun", str(file))
    assert ran.status == 1 and ran.out.startswith("Different: not the pixels that the noise was saved with")


def test_rerun_loads_only_what_the_user_names(command: Command) -> None:
    file = Path(generated(command, "--save-noise")["noise"])
    noise = Noise.load(file)
    record = noise.record.model_copy(update={"model": "somebody/else"})
    Noise(**{**vars(noise), "record": record}).save(file)
    assert "isn't bundled" in command("rerun", str(file)).sentence
    assert command("rerun", str(file), "--model", "shapes-flow").status == 0
    assert "--verifier" in command("rerun", str(file), "--verifier", "clip").sentence
    assert "holds no noise" in command("rerun", str(_foreign(file))).sentence
    assert "is not there" in command("rerun", "nowhere.safetensors").sentence


def _foreign(file: Path) -> Path:
    save_file({"latents": torch.zeros(1)}, file.with_name("foreign.safetensors"))
    return file.with_name("foreign.safetensors")
