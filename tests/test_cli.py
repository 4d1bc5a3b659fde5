"""The command line: what it writes and prints, and one clear sentence for everything that can't be."""

import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image

import imgscale
from imgscale import models, png, registry
from imgscale.app import cite, doctor, job, main, outputs
from imgscale.app.console import Interrupt
from imgscale.denoiser import Denoiser
from imgscale.engine import Engine
from imgscale.models import ModelSettings
from imgscale.result import SearchOutput
from imgscale.scaler import Scaler
from imgscale.watch import Progress
from tests import zoo
from tests.commands import Bright, Command

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "two red circles above a blue square"
SETTINGS = ModelSettings(steps=4, guidance_scale=3.0, defaults={"max_sequence_length": 16}, summary="Random weights.")
BUNDLED = (
    models.bundled_folder() / "shapes-flow" / "model_index.json",
    models.bundled_folder() / "shapes-clip" / "open_clip_config.json",
)
bundled_model = pytest.mark.skipif(
    not all(path.exists() for path in BUNDLED), reason="the bundled models aren't trained yet"
)


@pytest.fixture(scope="module")
def scaler() -> Scaler:
    return Scaler(Engine(Denoiser(zoo.build("StableDiffusion3Pipeline"), SETTINGS.defaults)), "tiny", SETTINGS)


@pytest.fixture(autouse=True)
def tiny(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Any]]]:
    """A bundled model `tiny`, loaded once, and a verifier `bright`. Yields the arguments of each load."""
    loads: list[dict[str, Any]] = []
    if request.node.get_closest_marker("weights"):
        yield loads
        return
    folder = tmp_path_factory.mktemp("bundled") / "tiny"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    (folder / models.SETTINGS).write_text(json.dumps({"steps": 4, "summary": "Random weights."}))

    def load(model: str, **arguments: Any) -> Scaler:
        loads.append({"model": model, **arguments})
        made: Scaler = request.getfixturevalue("scaler")
        made.engine.max_batch = arguments["max_batch"]
        return made

    monkeypatch.setattr(models, "bundled", lambda: {"tiny": folder})
    monkeypatch.setattr(imgscale, "load", load, raising=False)
    list(registry.verifier)  # or a later discovery would come after the next line
    monkeypatch.setitem(registry.verifier._entries, "bright", registry.Entry("bright", Bright))
    yield loads


BASE = ("generate", PROMPT, "--model", "tiny", "--searcher", "best-of-n", "--verifier", "bright", "--budget", "12")


# ------------------------------------------------------------------------------------------------------ generate


def test_json_is_one_object_with_everything(command: Command) -> None:
    ran = command(*BASE, "--json", "--seed", "7")
    assert ran.status == 0
    found = ran.json
    assert found["prompt"] == PROMPT
    assert (found["model"], found["searcher"], found["verifier"], found["seed"]) == ("tiny", "best-of-n", "bright", 7)
    assert found["nfe"] == found["ledger"]["nfe"] == 12
    assert found["seconds"] == found["ledger"]["seconds"] > 0
    assert set(found["scores"]) == set(found["plain"]["scores"]) == {"bright", "shapes"}
    assert 0 <= found["scores"]["shapes"] <= 1
    assert found["scores"]["bright"] >= found["plain"]["scores"]["bright"]
    for path in (*found["images"], found["plain"]["image"], found["trace"], found["compare"]):
        with Image.open(path) as image:
            image.load()


def test_without_the_plain_image(command: Command) -> None:
    found = command(*BASE, "--json", "--no-plain").json
    assert "plain" not in found
    assert sorted(p.name for p in Path("imgscale-out").iterdir()) == [
        "two-red-circles-above-a-blue-square-0-trace.png",
        "two-red-circles-above-a-blue-square-0.png",
    ]


def test_it_is_the_search_of_the_python_interface(command: Command, scaler: Scaler) -> None:
    found = command(*BASE, "--json", "--steps", "3", "--set", "n=2", "--seed", "5", "--guidance", "2").json
    out = scaler(
        PROMPT,
        searcher="best-of-n",
        verifier=Bright(),
        budget=12,
        seed=5,
        num_inference_steps=3,
        guidance_scale=2.0,
        options={"n": 2},
        progress=False,
    )
    with Image.open(found["images"][0]) as image:
        assert image.tobytes() == out.images[0].tobytes()
    with Image.open(found["plain"]["image"]) as image:
        assert image.tobytes() == out.plain.image.tobytes()
    assert found["nfe"] == out.nfe == 6
    assert found["scores"]["bright"] == out.scores["bright"]


def test_the_settings_are_inside(command: Command) -> None:
    path = Path(command(*BASE, "--json", "--set", "batch=2", "--negative", "blur", "--seconds", "60").json["images"][0])
    record = png.read(path)
    assert (record.prompt, record.negative_prompt, record.options) == (PROMPT, "blur", {"batch": 2})
    assert record.budget.nfe == 12 and record.budget.seconds == 60
    assert record.num_inference_steps == 4 and record.guidance_scale == 3.0
    assert record.report == ["shapes"] and record.model == "tiny"


def test_the_table_is_short_and_says_what_steers(command: Command) -> None:
    ran = command(*BASE)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["plain", "searched"]
    assert re.match(r"bright \(steers\) +0\.\d{4} +0\.\d{4}$", lines[1])
    assert re.match(r"shapes \(held out\) +0\.\d{4} +0\.\d{4}$", lines[2])
    assert lines[3].split() == ["NFE", "4", "12"]
    assert [line for line in lines if line.endswith("-compare.png")]
    assert len(lines) <= 14


def test_progress_goes_to_standard_error_and_can_be_silenced(command: Command) -> None:
    ran = command(*BASE, "--no-plain")
    assert re.search(r"^12/12 NFE, best 0\.\d{4}, \d+ s$", ran.err, re.MULTILINE)
    quiet = command(*BASE, "--no-plain", "--quiet")
    assert quiet.err == ""
    assert quiet.out.splitlines() == ["imgscale-out/two-red-circles-above-a-blue-square-0.png"]


def test_markup_in_a_prompt_is_text(command: Command) -> None:
    ran = command("generate", "a [red]cat[/blue] $x^2$", *BASE[2:], "--report", "bright")
    assert ran.status == 0
    assert "a-red-cat-blue-x-2-0.png" in ran.out


def test_another_search_never_overwrites(command: Command) -> None:
    def image(*more: str) -> str:
        return Path(command(*BASE, "--json", "--no-plain", *more).json["images"][0]).name

    first = image()
    assert image() == first
    assert image("--set", "n=1") == first.replace("-0.", "-0-2.")
    assert image("--set", "n=1") == first.replace("-0.", "-0-2.")
    Path("imgscale-out", first).write_bytes(b"somebody else's")
    assert image() == first.replace("-0.", "-0-3.")
    assert Path("imgscale-out", first).read_bytes() == b"somebody else's"


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("../../etc/passwd", "etc-passwd"),
        ("/root/.ssh", "root-ssh"),
        ("C:\\con\0:", "c-con"),
        ("...", "image"),
        ("A  Red_CIRCLE!", "a-red-circle"),
        ("赤い丸", "赤い丸"),
        ("é" * 100, "é" * 40),
        ("--budget", "budget"),
    ],
)
def test_names_stay_in_the_folder(prompt: str, name: str) -> None:
    assert outputs.slug(prompt) == name
    assert Path("out", outputs.slug(prompt)).parent == Path("out")


def test_the_oracle_reports_where_it_can_and_unless_told_otherwise(command: Command) -> None:
    assert set(command(*BASE, "--json").json["scores"]) == {"bright", "shapes"}
    assert set(command(*BASE, "--json", "--report", "none").json["scores"]) == {"bright"}
    assert set(command("generate", "a cat", *BASE[2:], "--json").json["scores"]) == {"bright"}


def test_before_an_image_is_finished_the_progress_tells_of_previews(command: Command) -> None:
    said = command(*change(searcher="rbf", budget="60"), "--no-plain").err
    lines = re.findall(r"^(\d+)/60 NFE, (best preview|best) (-?\d\.\d{4}), \d+ s$", said, re.MULTILINE)
    kinds = [kind for _, kind, _ in lines]
    assert kinds == sorted(kinds, reverse=True) and {*kinds} == {"best preview", "best"} and "–" not in said


def test_values_reach_the_model(command: Command, tiny: list[dict[str, Any]]) -> None:
    sizes = ("--height", "8", "--width", "24")
    found = command(*BASE, "--json", *sizes, "--dtype", "float32", "--device", "cpu", "--distilled").json
    place = {"device": "cpu", "dtype": torch.float32, "max_batch": 32, "exact": False}
    assert tiny == [{"model": "tiny", **place, "distilled": True}]
    with Image.open(found["images"][0]) as image:
        assert image.size == (24, 8)


def test_no_score_is_null_in_json(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bright, "__call__", lambda self, images, prompts: torch.full((len(images),), torch.nan))
    ran = command(*BASE, "--json", "--no-plain")
    assert ran.json["scores"]["bright"] is None
    assert "imgscale: The verifier bright gave NaN" in ran.err


# ------------------------------------------------------------------------------------------------------ mistakes


def change(**changes: str) -> list[str]:
    """`BASE` with some of its values replaced, or options added."""
    arguments = list(BASE)
    for name, value in changes.items():
        option = f"--{name}"
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
    return arguments


MISTAKES: dict[str, tuple[list[str], str]] = {
    "empty prompt": (["generate", ""], "The prompt is empty"),
    "blank prompt": (["generate", " \t\n"], "The prompt is empty"),
    "endless prompt": (["generate", "x" * 10_001], "10001 characters"),
    "undecodable prompt": (["generate", "a \udcff"], "isn't UTF-8"),
    "empty negative prompt": (change(negative=""), "The negative prompt is empty"),
    "unknown model": (change(model="tony"), "Unknown model 'tony'.*Did you mean 'tiny'?"),
    "no pipeline": (change(model="."), "holds no model_index.json"),
    "unknown searcher": (change(searcher="best-off-n"), "Unknown searcher 'best-off-n'.*Did you mean 'best-of-n'?"),
    "unknown verifier": (change(verifier="shape"), "Unknown verifier 'shape'.*Did you mean 'shapes'?"),
    "unknown report": (change(report="brigt"), "Unknown verifier 'brigt'.*Did you mean 'bright'?"),
    "unknown searcher option": (change(set="bach=3"), "Unknown option of 'best-of-n' 'bach'.*Did you mean 'batch'?"),
    "searcher option of a wrong type": (change(set="n=many"), "option n can't be 'many'; give a whole number or none"),
    "searcher option out of range": (change(set="n=0"), r"n \(0\).*at least 1"),
    "no pair": (change(set="n"), "--set can't be 'n'; give option=value"),
    "twice": ([*change(set="n=1"), "--set", "n=2"], "--set gives 'n' twice"),
    "budget 0": (change(budget="0"), "--budget can't be '0'; give a whole number of at least 1"),
    "budget below 0": (change(budget="-5"), "--budget can't be '-5'"),
    "budget as text": (change(budget="lots"), "--budget can't be 'lots'"),
    "budget for no image": (change(budget="3"), "budget of 3 .*can't finish one image, which takes 4"),
    "seconds 0": (change(seconds="0"), "--seconds can't be '0'; give a number above 0"),
    "seconds not a number": (change(seconds="nan"), "--seconds can't be 'nan'"),
    "seed as text": (change(seed="abc"), r"--seed can't be 'abc'; give a whole number from 0 to 2\*\*63 - 1"),
    "seed with a fraction": (change(seed="1.5"), "--seed can't be '1.5'"),
    "seed below 0": (change(seed="-1"), "--seed can't be '-1'"),
    "seed too large": (change(seed=str(2**63)), "--seed can't be"),
    "no steps": (change(steps="0"), "--steps can't be '0'; give a whole number from 1 to 1000"),
    "guidance below 0": (change(guidance="-1"), "--guidance can't be '-1'; give a number of at least 0"),
    "height as text": (change(height="tall"), "--height can't be 'tall'"),
    "height the model can't do": (change(height="15"), "can't draw a height of 15 pixels: give a multiple of 4"),
    "width the model can't do": (change(width="2"), "can't draw a width of 2 pixels"),
    "unknown dtype": (change(dtype="float31"), "Unknown dtype 'float31'.*Did you mean 'float32'?"),
    "prompt outside the oracle's world": (
        ["generate", "a cat", *change(verifier="shapes")[2:]],
        "'shapes' can't judge this prompt: The phrase 'a cat' is outside",
    ),
    "unknown option": ([*BASE, "--sed", "1"], "Unknown option '--sed'.*Did you mean '--seed'?"),
    "no value": ([*BASE, "--seed"], "--seed.* requires an argument"),
    "no prompt": (["generate"], "The prompt is missing"),
    "prompt without quotes": (["generate", "two", "red", "circles"], "'red circles' is too much.*quotes"),
    "unknown command": (["generat", "a cat"], "Unknown command 'generat'.*Did you mean 'generate'?"),
    "unknown kind of list": (["list", "modles"], "Unknown kind of list 'modles'.*Did you mean 'models'?"),
    "unknown paper": (["cite", "kim2025"], "Unknown paper, searcher, guide.*'kim2025'.*Did you mean 'kim2025rbf'?"),
    "missing picture": (["rerun", "nowhere.png"], "'nowhere.png' can't be read"),
    "no picture": (["rerun"], "The picture is missing"),
}
NEEDS_THE_MODEL = {
    "budget for no image",
    "height the model can't do",
    "width the model can't do",
    "searcher option out of range",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case: str, command: Command, tiny: list[dict[str, Any]]) -> None:
    arguments, said = MISTAKES[case]
    ran = command(*arguments)
    assert re.search(said, ran.sentence)
    assert bool(tiny) == (case in NEEDS_THE_MODEL), "what can be checked without the model is checked without it"
    assert list(Path().iterdir()) == []


def test_json_mistakes_leave_standard_output_empty(command: Command) -> None:
    assert "Unknown searcher" in command(*change(searcher="x"), "--json").sentence


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_output_folder_that_cannot_be_written(place: str, command: Command, tiny: list[dict[str, Any]]) -> None:
    Path("file").write_text("in the way")
    said = command(*change(out=place)).sentence
    assert re.match(r"The output folder '.*' can't be written \(.+\); choose another with --out\.$", said)
    assert tiny == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(command: Command) -> None:
    Path("locked").mkdir(mode=0o500)
    assert "Permission denied" in command(*change(out="locked/in")).sentence


def test_a_truncated_weights_file(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "model"
    zoo.build("StableDiffusionPipeline").save_pretrained(folder, safe_serialization=True)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    monkeypatch.undo()  # the real load
    monkeypatch.chdir(tmp_path)
    said = command("generate", "a cat", "--model", str(folder), "--searcher", "best-of-n", "--verifier", "shapes")
    assert "can't judge" in said.sentence
    said = command("generate", PROMPT, "--model", str(folder), "--searcher", "best-of-n", "--verifier", "shapes")
    assert re.search(r"weights file of '.*model' is damaged or incomplete", said.sentence)


def test_what_nobody_foresaw_is_one_line_and_a_traceback_on_demand(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the moon\nis full")

    monkeypatch.setattr(imgscale, "load", broken, raising=False)
    ran = command(*BASE)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("imgscale: RuntimeError: the moon is full.") and "IMGSCALE_DEBUG=1" in ran.err
    assert ran.err.count("\n") == 1
    monkeypatch.setenv("IMGSCALE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="the moon"):
        main.main(BASE)


def test_memory_that_runs_out_is_said_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(imgscale, "load", broken, raising=False)
    ran = command(*BASE)
    assert ran.status == 1
    assert "Out of memory" in ran.err and "--height" in ran.err


# --------------------------------------------------------------------------------------------------------- rerun


def generate(command: Command, *more: str) -> Path:
    return Path(command(*BASE, "--json", "--no-plain", *more).json["images"][0])


def stopping(monkeypatch: pytest.MonkeyPatch, rounds: int, finish: bool) -> None:
    """Makes searches end after so many engine steps, as by Ctrl-C or as by a deadline."""
    run = job.Job._search

    def search(self: job.Job, scaler: Scaler, callback: Callable[[Progress], None]) -> SearchOutput:
        def stop(progress: Progress) -> None:
            callback(progress)
            if progress.rounds[0] >= rounds:
                progress.cancel(finish=finish)

        return run(self, scaler, stop)

    monkeypatch.setattr(job.Job, "_search", search)


@pytest.mark.parametrize("more", [(), ("--seed", "3", "--set", "batch=2", "--steps", "3", "--height", "8")])
def test_rerun_gives_the_same_pixels(more: tuple[str, ...], command: Command) -> None:
    picture = generate(command, *more)
    ran = command("rerun", str(picture))
    assert ran.status == 0
    assert re.match(r"Identical: all \d+ pixels are the same\.\nWrote .*-rerun\.png\n$", ran.out)
    again = picture.with_name(f"{picture.stem}-rerun.png")
    assert png.read(again).same_search(png.read(picture))


def test_rerun_goes_by_what_the_model_was_said_to_be(command: Command, scaler: Scaler) -> None:
    own = scaler.settings
    try:
        scaler.settings = replace(own, distilled=True, path="vp")
        words = (*change(searcher="rbf", budget="24"), "--json", "--no-plain")
        picture = Path(command(*words).json["images"][0])
        scaler.settings = own
        other = command(*words, "-o", "other").json["images"][0]
        assert not png.read(Path(other)).same_search(png.read(picture))
        assert command("rerun", str(picture), "--json").json["identical"]
        assert scaler.settings.distilled and scaler.settings.path == "vp"
    finally:
        scaler.settings = own


@pytest.mark.parametrize("searcher", ["best-of-n", "rbf"])
@pytest.mark.parametrize("finish", [False, True], ids=["cancelled", "deadline"])
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_a_stopped_search_is_stopped_at_the_same_place(
    rounds: int, finish: bool, searcher: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as stopped:
        stopping(stopped, rounds, finish)
        options = () if searcher == "rbf" else ("--set", "batch=1")
        picture = Path(
            command(*change(searcher=searcher, budget="60"), "--json", "--no-plain", *options).json["images"][0]
        )
    record = png.read(picture)
    assert (record.stopped, record.rounds) == ("deadline" if finish else "cancelled", rounds)
    assert record.nfe < 60
    ran = command("rerun", str(picture), "--json")
    assert ran.status == 0
    assert ran.json["identical"] and ran.json["nfe"] == record.nfe
    assert png.read(Path(ran.json["image"])).same_search(record)


def test_a_search_that_only_the_clock_limits_is_run_again(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = generate(command)
    record = png.read(picture)
    timed = record.model_copy(update={"budget": png.Limits(seconds=0.5), "stopped": "deadline", "rounds": 5})
    with Image.open(picture) as image:
        png.write(picture, image, timed)
    ran = command("rerun", str(picture), "--json")
    assert "seconds" in png.read(Path(ran.json["image"])).budget.model_dump(exclude_none=True)
    assert png.read(Path(ran.json["image"])).rounds == 5


def test_rerun_says_how_a_changed_picture_differs(command: Command, tmp_path: Path) -> None:
    picture = generate(command)
    record = png.read(picture)
    with Image.open(picture) as image:
        pixel = image.load()
        assert pixel
        red, green, blue = pixel[3, 4]
        pixel[3, 4] = red, green ^ 4, blue
        png.write(picture, image, record.model_copy(update={"versions": {"torch": "1.0"}}))
    ran = command("rerun", str(picture), "--out", "elsewhere", "--json")
    assert ran.status == 1
    assert (ran.json["different_pixels"], ran.json["largest_difference"]) == (1, 4)
    assert ran.json["changed"]["torch"][0] == "1.0"
    assert Path(ran.json["image"]) == Path("elsewhere", f"{picture.stem}-rerun.png")
    text = command("rerun", str(picture), "--out", "elsewhere")
    assert text.out.startswith("Different: 1 of 256 pixels, by up to 4 of 255 (torch 1.0 then and ")


def rewrite(picture: Path, **changes: Any) -> None:
    with Image.open(picture) as image:
        png.write(picture, image, png.read(picture).model_copy(update=changes))


def test_a_picture_cannot_say_what_to_load(command: Command, tiny: list[dict[str, Any]]) -> None:
    picture = generate(command)
    tiny.clear()
    for model in ("somebody/evil", "/tmp", "../tiny"):
        rewrite(picture, model=model)
        assert "isn't bundled" in command("rerun", str(picture)).sentence
    rewrite(picture, model="tiny", verifier="bright(model=somebody/evil)")
    assert "--verifier" in command("rerun", str(picture)).sentence
    rewrite(picture, verifier="bright", pipeline_arguments={"ip_adapter_image": "/etc/passwd"})
    assert "ip_adapter_image" in command("rerun", str(picture)).sentence
    assert tiny == []


def test_the_user_can_say_what_to_load(command: Command, tiny: list[dict[str, Any]]) -> None:
    picture = generate(command)
    rewrite(picture, model="…/tiny", verifier="bright(x=1)")
    assert command("rerun", str(picture), "--model", "tiny", "--verifier", "bright").status == 0
    assert tiny[-1]["model"] == "tiny"


def test_rerun_refuses_pictures_that_are_not_ours(command: Command, tiny: list[dict[str, Any]]) -> None:
    picture = generate(command)
    tiny.clear()
    shutil.copy(picture.with_name(f"{picture.stem}-trace.png"), "foreign.png")
    Path("text.png").write_text("a cat")
    Path("cut.png").write_bytes(picture.read_bytes()[:-60])
    data = picture.read_bytes()
    at = data.index(b"IDAT") + 8
    Path("pixels.png").write_bytes(data[:at] + b"\0\0\0\0" + data[at + 4 :])
    said = {name: command("rerun", f"{name}.png").sentence for name in ("foreign", "text", "cut", "pixels")}
    assert "no imgscale settings" in said["foreign"]
    assert "is no PNG" in said["text"]
    assert "cut off" in said["cut"]
    assert "pixels of 'pixels.png' are damaged" in said["pixels"]
    rewrite(picture, searcher="os.system")
    assert "Unknown searcher 'os.system'" in command("rerun", str(picture)).sentence
    rewrite(picture, searcher="best-of-n", options={"shell": "rm"})
    assert "Unknown option of 'best-of-n' 'shell'" in command("rerun", str(picture)).sentence
    assert tiny == []


# -------------------------------------------------------------------------------------------------------- Ctrl-C

CHILD = """
import signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
sys.path.insert(0, {root!r})
import imgscale
from imgscale import models, registry
from imgscale.app import main
from imgscale.denoiser import Denoiser
from imgscale.engine import Engine
from imgscale.models import ModelSettings
from imgscale.scaler import Scaler
from tests import zoo

torch.set_num_threads(1)

@registry.verifier("slow")
class Slow:
    name, range, reads_prompt, differentiable = "slow", None, False, False
    def __call__(self, images, prompts):
        time.sleep(0.05)
        print("scored", file=sys.stderr, flush=True)
        return images.flatten(1).mean(1)
    def identity(self):
        return {{}}

settings = ModelSettings(steps=4, guidance_scale=3.0, defaults={{"max_sequence_length": 16}})
scaler = Scaler(Engine(Denoiser(zoo.build("StableDiffusion3Pipeline"), settings.defaults)), "tiny", settings)
imgscale.load = lambda model, **arguments: scaler
print("ready", file=sys.stderr, flush=True)
main.main(["generate", "a cat", "-m", "some/model", "-s", "best-of-n", "-v", "slow", "-b", "1000000",
           "--set", "batch=1", "-o", "out", "--json"])
"""


def child(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=str(ROOT))],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], word: str, times: int) -> None:
    assert process.stderr
    seen = ""
    while seen.count(word) < times:
        line = process.stderr.readline()
        assert line, seen
        seen += line


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_best_so_far(sent: signal.Signals, tmp_path: Path) -> None:
    with child(tmp_path) as process:
        read_until(process, "scored", 4)
        process.send_signal(sent)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopping; the best so far will be written" in err
    by = "Ctrl-C" if sent == signal.SIGINT else "SIGTERM"
    assert re.search(rf"imgscale: stopped by {by} after \d+ NFE; the best so far is in 'out/a-cat-0.png'\.", err)
    found = json.loads(out)
    assert (found["stopped"], found["finished"]) == ("cancelled", True)
    record = png.read(tmp_path / "out" / "a-cat-0.png")
    assert (record.stopped, record.nfe) == ("cancelled", found["nfe"])
    assert [p.name for p in (tmp_path / "out").iterdir() if p.suffix != ".png"] == []


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell may have it ignored
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from imgscale.app import main\n"
        "from imgscale.app.console import Interrupt\n"
        "def work():\n"
        "    with Interrupt() as interrupt:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        assert interrupt.asked\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "@main.app.command()\n"
        "def wait():\n"
        "    main._do(work)\n"
        "main.main(['wait'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "imgscale: stopped before there was an image to keep."


def test_ctrl_c_before_anything_is_finished_keeps_a_preview(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: Interrupt) -> Interrupt:
        self.asked = True
        return self

    monkeypatch.setattr(Interrupt, "__enter__", pressed)
    monkeypatch.setattr(Interrupt, "__exit__", lambda *_: None)
    ran = command(*BASE, "--json")
    assert ran.status == 130
    assert ran.json["finished"] is False and "plain" not in ran.json
    assert re.search(r"stopped by Ctrl-C after \d+ NFE; a preview, since no image was finished yet", ran.err)
    assert png.read(Path(ran.json["images"][0])).finished is False


# ------------------------------------------------------------------------------------------- list, cite and doctor


def test_list_names_everything(command: Command) -> None:
    found = command("list", "--json").json
    kinds = {entry["name"]: entry["kind"] for entry in found}
    assert kinds["tiny"] == "model" and kinds["best-of-n"] == "searcher" and kinds["shapes"] == "verifier"
    searchers = command("list", "searchers", "--json").json
    assert [entry["name"] for entry in searchers] == [entry.name for entry in registry.searcher]
    guides = command("list", "guides", "--json").json
    assert [entry["name"] for entry in guides] == [entry.name for entry in registry.guide]
    assert {"dps", "local"} <= {entry["name"] for entry in guides} and guides[0]["kind"] == "guide"
    options = {entry["name"]: entry["options"] for entry in searchers}
    assert options["best-of-n"] == {"n": None, "batch": 32}
    assert command("list", "models", "--json").json[0]["summary"] == "Random weights."


def test_list_for_people(command: Command) -> None:
    ran = command("list")
    assert [line for line in ran.out.splitlines() if not line.startswith(" ")] == [
        "Models",
        "Searchers",
        "Guides",
        "Verifiers",
    ]
    for entry in (*registry.searcher, *registry.guide):
        assert entry.name in ran.out


def test_every_entry_cites_what_there_is() -> None:
    known = cite.references()
    for entry in (*registry.searcher, *registry.guide, *registry.verifier):
        assert set(entry.cite) <= set(known), entry.name


def test_references_are_well_formed() -> None:
    for key, entry in cite.references().items():
        assert re.match(rf"@\w+{{{key},\n", entry)
        assert entry.count("{") == entry.count("}")
        for needed in ("title", "author", "year"):
            assert re.search(rf"^ +{needed} += {{", entry, re.MULTILINE), (key, needed)
    assert {"imgscale", "ma2025inference", "kim2025rbf"} <= set(cite.references())


def test_cite_a_guide(command: Command) -> None:
    keys = [entry["key"] for entry in command("cite", "local", "--json").json]
    assert keys == ["imgscale", "zhang2025classical", "ye2024tfg"], "a searcher and a guide by one name, cited once"


def test_cite_a_searcher(command: Command) -> None:
    ran = command("cite", "best-of-n")
    assert re.findall(r"^@\w+{(\w+),", ran.out, re.MULTILINE) == ["imgscale", "ma2025inference"]
    assert "arXiv:2501.09732" in ran.out
    everything = command("cite", "--json").json
    assert [entry["key"] for entry in everything] == list(cite.references())
    assert command("cite", "kim2025rbf", "--json").json[1]["bibtex"].startswith("@article{kim2025rbf,")


def test_doctor_says_what_fails(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def broken(*_: Any, **__: Any) -> None:
        raise imgscale.UserError("A weights file is damaged; fetch it again.")

    monkeypatch.setattr(imgscale, "load", broken, raising=False)
    monkeypatch.setattr(registry.verifier, "_entries", {"bright": registry.Entry("bright", Bright)})
    ran = command("doctor", "--json")
    assert ran.status == 1 and ran.json["ok"] is False
    found = {(f["kind"], f["name"]): f for f in ran.json["findings"]}
    assert found["package", "torch"]["ok"] and found["device", "cpu"]["ok"]
    assert found["job", "shapes-flow"] == {
        "kind": "job",
        "name": "shapes-flow",
        "ok": False,
        "detail": "A weights file is damaged; fetch it again.",
        "needs": None,
    }
    assert found["verifier", "bright"] == {
        "kind": "verifier",
        "name": "bright",
        "ok": True,
        "detail": "scores a grey image 0.500",
        "needs": None,
    }
    assert "A search with the bundled model fails here." in command("doctor").out


def test_doctor_tells_what_a_verifier_waits_for_from_what_is_broken(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    class Chosen(Bright):
        def __init__(self, *, model: str | None = None) -> None:
            if model is None:
                raise imgscale.UserError("chosen needs a model; give model=….")

    class Required(Bright):
        def __init__(self, *, url: str) -> None:
            raise AssertionError

    class Packaged(Bright):
        def __init__(self) -> None:
            try:
                importlib.import_module("no_such_package")
            except ImportError as error:
                raise imgscale.UserError("packaged needs no-such-package: pip install no-such-package.") from error

    class Damaged(Bright):
        def __init__(self) -> None:
            raise imgscale.UserError("Its weights are damaged.") from ValueError("header")

    class Failing(Bright):
        def __call__(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
            raise RuntimeError("it fails")

    def elsewhere() -> Bright:
        from imgscale.verifiers.clip import Clip

        return cast(Bright, Clip(model="hf-hub:nobody/nothing"))

    kinds: dict[str, Callable[..., Any]] = {
        **{"bright": Bright, "chosen": Chosen, "required": Required, "packaged": Packaged, "elsewhere": elsewhere},
        **{"damaged": Damaged, "failing": Failing},
    }
    monkeypatch.setattr(
        registry.verifier, "_entries", {name: registry.Entry(name, kind) for name, kind in kinds.items()}
    )
    found = {f["name"]: f for f in command("doctor", "--json").json["findings"] if f["kind"] == "verifier"}
    assert {name: (f["ok"], f["needs"]) for name, f in found.items()} == {
        "bright": (True, None),
        "chosen": (False, "option"),
        "required": (False, "option"),
        "packaged": (False, "package"),
        "elsewhere": (False, "weights"),
        "damaged": (False, None),
        "failing": (False, None),
    }
    assert found["required"]["detail"] == "give required(url=…)" and "no-such-package" in found["packaged"]["detail"]
    shown = command("doctor").out
    for words in (
        "chosen +needs option +chosen needs a model",
        "elsewhere +needs weights +the weights aren't here",
        "damaged +no +Its weights",
    ):
        assert re.search(words, shown)


def test_doctor_names_a_missing_package(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    ran = command("doctor")
    assert ran.status == 1
    assert "missing: pip install no-such-package" in ran.out


# ---------------------------------------------------------------------------------------------- weight of the help


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "command_line", [["--help"], ["generate", "--help"], ["score", "--help"], ["rerun", "-h"], ["--version"], []]
)
def test_help_loads_nothing_heavy(command_line: list[str]) -> None:
    heavy = ("torch", "diffusers", "transformers", "open_clip", "matplotlib", "numpy", "PIL", "rich.progress")
    out = python(
        "import sys\nfrom imgscale.app.main import main\n"
        f"try: main({command_line!r})\nexcept SystemExit as e: assert not e.code\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert out.splitlines()[-1] == "[]"
    assert len(out.splitlines()) > 1


def test_help_answers_at_once() -> None:
    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    spent = []
    for _ in range(3):
        before = cpu()
        python("from imgscale.app.main import main; main(['--help'])")
        spent.append(cpu() - before)
    assert min(spent) < 0.5


def test_help_names_every_command_and_option(command: Command) -> None:
    overview = command("--help").out
    commands = ["generate", "rerun", "score", "batch", "bench", "bench bandit", "demo", "grid", "report", "export"]
    commands += ["profile", "cost", "serve", "list", "doctor", "cite", "policy"]
    assert re.findall(r"^  (\w+(?: \w+)?)  +\S", overview, re.MULTILINE) == commands
    assert "..." not in overview.partition("Commands:")[2]
    options = ("--set", "--seconds", "--eflops", "--no-plain", "--quiet", "--negative", "--json", "--dtype")
    for option in (*options, "--save-noise", "--distilled"):
        assert option in command("generate", "--help").out


# ------------------------------------------------------------------------------------------- with the bundled model


@bundled_model
@pytest.mark.weights
def test_the_bundled_job(command: Command) -> None:
    found = command("generate", PROMPT, "--json", "--budget", "64").json
    assert found["nfe"] <= 64
    assert set(found["scores"]) == {"clip", "shapes"} == set(found["plain"]["scores"])
    again = command("rerun", found["images"][0], "--json")
    assert again.status == 0 and again.json["identical"]


@bundled_model
@pytest.mark.weights
def test_doctor_is_content(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = command("doctor", "--json")
    assert ran.status == 0
    found = {(f["kind"], f["name"]): f["ok"] for f in ran.json["findings"]}
    assert found["job", "shapes-flow"] and found["verifier", "clip"] and found["verifier", "shapes"]
    broken = [f for f in ran.json["findings"] if not f["ok"] and not f["needs"]]
    assert broken == []


# -------------------------------------------------------------------------------------------------------- guides

GUIDED = ("generate", PROMPT, "--model", "tiny", "--verifier", "bright", "--budget", "16", "--no-plain", "--json")


@pytest.mark.parametrize(
    "how",
    [("--searcher", "rbf+dps(scale=2)"), ("--searcher", "rbf(dps(scale=2))"), ("--guide", "dps(scale=2)")],
    ids=["plus", "inside", "apart"],
)
def test_a_guided_search_says_so_and_is_repeated_exactly(how: tuple[str, str], command: Command) -> None:
    ran = command(*GUIDED, *how)
    assert ran.status == 0, ran.err
    assert (ran.json["searcher"], ran.json["guide"]) == ("rbf+dps(scale=2)", "dps(scale=2)")
    assert ran.json["ledger"]["gradients"] > 0
    picture = Path(ran.json["images"][0])
    record = png.read(picture)
    assert (record.searcher, record.guide) == ("rbf", "dps(scale=2)")
    assert "Searcher: rbf+dps(scale=2)" in png.parameters(record)
    again = command("rerun", str(picture), "--json")
    assert again.status == 0 and again.json["identical"], again.err


def test_guides_that_cannot_be_are_refused(command: Command) -> None:
    said = command(*GUIDED, "--guide", "dpz").sentence
    assert said.startswith("Unknown guide 'dpz'; choose one of: dps, local.") and "Did you mean 'dps'?" in said
    assert "can't be two guides" in command(*GUIDED, "--searcher", "rbf+dps", "--guide", "local").sentence
    assert "scale of at least 0" in command(*GUIDED, "--guide", "dps(scale=-1)").sentence
    assert "Unknown option of 'dps'" in command(*GUIDED, "--guide", "dps(size=1)").sentence
    said = command(*GUIDED[:3], "tiny", "--verifier", "shapes", "--guide", "dps").sentence
    assert "the verifier has none; take one that has" in said


def test_a_journal_resumes_and_refuses_another_search(command: Command, tmp_path: Path, scaler: Scaler) -> None:
    first = command(*GUIDED, "--journal", "kept", "--seed", "3").json
    assert (tmp_path / "kept" / "head.json").exists() and list((tmp_path / "kept").glob("part-*.safetensors"))
    again = command(*GUIDED, "--journal", "kept", "--seed", "3", "--out", "again").json
    assert (again["nfe"], again["scores"]) == (first["nfe"], first["scores"])
    pixels = [Image.open(run["images"][0]).tobytes() for run in (first, again)]
    assert pixels[0] == pixels[1]
    said = command(*GUIDED, "--journal", "kept", "--seed", "4").sentence
    assert said.endswith("'kept' is another search's: its seeds is [3], and here it is [4]; choose another place.")
