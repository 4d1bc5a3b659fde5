"""`imgscale grid`: axes, a search for each cell, models loaded once, failures that stay in their cells, two files."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import imgscale
from imgscale import models, png, registry, verification
from imgscale.app import generate
from imgscale.app.grid import axes, cells, page, picture
from imgscale.app.grid.axes import Axis
from imgscale.app.grid.cells import Cell
from imgscale.app.job import Job
from imgscale.app.plots import typeface
from imgscale.bandit.policy import quality_weight
from imgscale.budget import Budget
from imgscale.denoiser import Denoiser
from imgscale.engine import Engine
from imgscale.errors import UserError
from imgscale.models import ModelSettings
from imgscale.problem import Problem, Verb
from imgscale.scaler import Scaler
from tests import auto, zoo
from tests.commands import Bright, Command

SETTINGS = ModelSettings(steps=4, guidance_scale=3.0, defaults={"max_sequence_length": 16})
PROMPT = "two red circles"
EVIL = '<script>alert("x")</script> & "quoted" </script>'
GRID = ("grid", PROMPT, "-m", "tiny", "-v", "bright", "-s", "best-of-n", "-o", "out")


def breaks(problem: Problem, rng: Any) -> Verb:
    """Breaks after its first image."""
    yield from problem.score((yield from problem.sample(1)))
    raise RuntimeError("a bug in\nthis searcher")


@pytest.fixture(scope="module")
def scaler() -> Scaler:
    return Scaler(Engine(Denoiser(zoo.build("StableDiffusion3Pipeline"), SETTINGS.defaults)), "tiny", SETTINGS)


@pytest.fixture(autouse=True)
def loads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Bundled models `tiny`, `other` and `broken`, and a verifier `bright`. Yields the models that were loaded."""
    loaded: list[str] = []
    folders = {name: tmp_path_factory.mktemp("bundled") / name for name in ("tiny", "other", "broken")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "model_index.json").write_text("{}")

    def load(model: str, **arguments: Any) -> Scaler:
        loaded.append(model)
        if model == "broken":
            raise UserError("'broken' can't be loaded; mend it.")
        made: Scaler = request.getfixturevalue("scaler")
        return made

    monkeypatch.setattr(models, "bundled", lambda: folders)
    monkeypatch.setattr(imgscale, "load", load, raising=False)
    list(registry.verifier), list(registry.searcher)  # or a later discovery would come after the next lines
    monkeypatch.setitem(registry.verifier._entries, "bright", registry.Entry("bright", Bright))
    monkeypatch.setitem(registry.searcher._entries, "breaks", registry.Entry("breaks", breaks))
    monkeypatch.setattr(Bright, "calls", 0)
    monkeypatch.setattr(Bright, "press_at", 0)
    yield loaded


# --------------------------------------------------------------------------------------------------------- axes


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("budget=25,50,100", "budget", ["25", "50", "100"]),
        ("searcher=best-of-n, rbf(draws=4, path=own),rbf+dps", "searcher", None),
        ("seed=1,2,..,5", "seed", ["1", "2", "3", "4", "5"]),
        ("seed=3,..,6,9", "seed", ["3", "4", "5", "6", "9"]),
        ("seed=1..3,8", "seed", ["1", "2", "3", "8"]),
        ("set.schedule=0 0.4 0.8,0 0.5", "set.schedule", ["0 0.4 0.8", "0 0.5"]),
        ("steps=8,6,..,2", "steps", ["8", "6", "4", "2"]),
        ("guidance=1,1.5,..,3", "guidance", ["1", "1.5", "2.0", "2.5", "3"]),
        ("set.draws=1,2,..,4", "set.draws", ["1", "2", "3", "4"]),
        ('prompt=red,"blue, shiny" ,""', "prompt", ["red", "blue, shiny", ""]),
        ('prompt=5" pipe,6" pipe', "prompt", ['5" pipe', '6" pipe']),
        ("guide=none,dps(scale=2)", "guide", ["none", "dps(scale=2)"]),
    ],
)
def test_values_of_an_axis(text: str, name: str, values: list[str] | None) -> None:
    axis = axes.read("--x", text)
    assert axis.name == name
    assert list(axis.values) == (values or ["best-of-n", "rbf(draws=4, path=own)", "rbf+dps"])


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (None, None, "A grid needs an axis"),
        ("budget", None, "give SETTING=VALUE,VALUE"),
        ("budgets=1", None, "Did you mean 'budget'?"),
        ("set.=1", None, "Unknown setting for --x 'set.'"),
        ("budget=", None, "--x budget has no value"),
        ("budget=8,12,8", None, "--x budget has '8' twice"),
        ('prompt="red,blue', None, "a quote has no end"),
        ("seed=..,4", None, "no numbers can be told"),
        ("seed=1,..", None, "no numbers can be told"),
        ("seed=1,3,..,6", None, "can't count from 3 to 6 by 2"),
        ("seed=5,..,1", None, "can't count from 5 to 1 by 1"),
        ("seed=1,1,..,6", None, "no numbers can be told"),
        ("seed=0,..,99", "budget=4,..,40", "would have 3700 cells"),
        ("seed=1,2", "seed=3,4", "Both axes set 'seed'"),
        ("prompt=red,blue", "prompt=red,green", "Both axes replace 'red' in the prompt"),
    ],
)
def test_axes_that_cant_be(x: str | None, y: str | None, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        axes.pair(x, y)


def test_parts_of_the_prompt_are_replaced_all_at_once() -> None:
    one, other = axes.read("--x", "prompt=red,blue"), axes.read("--y", "prompt=red circle,blue square,red")
    assert axes.replaced("a red circle and a red star", [(one, "blue")]) == "a blue circle and a blue star"
    at = [(one, "blue"), (other, "red")]  # what one puts in, the other leaves alone
    assert axes.replaced("a red circle and a red star", at) == "a red and a blue star"
    with pytest.raises(UserError, match="'red' isn't in the prompt 'a blue circle'"):
        axes.replaced("a blue circle", [(one, "blue")])


# -------------------------------------------------------------------------------------------------------- cells


def test_a_cell_for_each_combination(command: Command) -> None:
    ran = command(*GRID, "--x", "budget=4,8", "--y", "seed=0,1,2", "--json")
    assert ran.status == 0, ran.err
    found = ran.json["cells"]
    assert [(cell["x"], cell["y"]) for cell in found] == [(b, s) for s in "012" for b in "48"]
    assert [cell["nfe"] for cell in found] == [4, 8] * 3
    for cell in found:
        record = png.read(Path(cell["image"]))
        assert (record.budget.nfe, record.seed) == (int(cell["x"]), int(cell["y"]))
        assert record.scores == cell["scores"]


def test_a_cell_is_the_search_of_its_own_command(command: Command) -> None:
    ran = command(*GRID, "--x", "set.n=1,2", "--y", "prompt=red,blue", "--steps", "3", "-b", "9", "--json")
    assert ran.status == 0, ran.err
    for cell in ran.json["cells"]:
        again = command(*shlex.split(cell["command"])[1:], "--json", "--no-plain", "-o", "again")
        with Image.open(again.json["images"][0]) as image, Image.open(cell["image"]) as before:
            assert image.tobytes() == before.tobytes()
        assert again.json["scores"] == pytest.approx(cell["scores"], rel=1e-5)
        assert again.json["prompt"] == PROMPT.replace("red", cell["y"])
        assert again.json["options"] == {"n": cell["x"]}


def test_only_rows(command: Command) -> None:
    ran = command(*GRID, "--y", "budget=4,8", "--json")
    assert [(cell["y"], cell["nfe"]) for cell in ran.json["cells"]] == [("4", 4), ("8", 8)]
    with Image.open(ran.json["picture"]) as image:
        assert image.height > 2 * picture.SMALLEST


def test_each_model_is_loaded_once_whichever_axis_it_is_on(command: Command, loads: list[str]) -> None:
    base = ("grid", PROMPT, "-v", "bright", "-s", "best-of-n", "--quiet")
    assert command(*base, "--x", "model=tiny,other", "--y", "budget=4,8,12").status == 0
    assert loads == ["tiny", "other"]
    assert command(*base, "--x", "budget=4,8,12", "--y", "model=other,tiny").status == 0
    assert loads == ["tiny", "other", "other", "tiny"]


def test_a_value_that_goes_with_no_other_is_refused_before_any_model_is_loaded(
    command: Command, loads: list[str]
) -> None:
    for x, says in {
        "searcher=best-of-n,rfb": "Unknown searcher 'rfb'; choose one of:",
        "model=tiny,tine": "tine",
        "budget=8,many": "--x budget can't be 'many'; give a whole number of at least 1.",
        "set.draws=2,3": "draws",
        "prompt=green,blue": "'green' isn't in the prompt",
    }.items():
        base = [word for word in GRID if word not in LEFT_OUT.get(x.split("=")[0], ())]
        assert says in command(*base, "--x", x, "--y", "seed=1,2").sentence
    assert "both set 'seed'" in command(*GRID, "--x", "seed=1,2", "--seed", "3").sentence
    assert loads == [] and not Path("out").exists()


LEFT_OUT = {"searcher": ("-s", "best-of-n"), "model": ("-m", "tiny")}


def test_what_doesnt_go_together_is_said_in_its_cell(command: Command) -> None:
    base = ("grid", PROMPT, "-m", "tiny", "-s", "best-of-n", "-b", "4", "--report", "none", "--json", "-q")
    ran = command(*base, "--x", "prompt=red,fluffy", "--y", "verifier=bright,shapes")
    assert ran.status == 1
    found = {(cell["x"], cell["y"]): cell for cell in ran.json["cells"]}
    bad = found.pop(("fluffy", "shapes"))
    assert bad["image"] is None and "The verifier 'shapes' can't judge this prompt" in bad["error"]
    assert all(cell["image"] for cell in found.values())
    assert ran.err == f"imgscale: 1 without an image: {bad['error']}\n"


def test_one_that_breaks_leaves_the_others_alone(command: Command, loads: list[str]) -> None:
    base = ("grid", PROMPT, "-m", "tiny", "-v", "bright", "--json", "-q")
    ran = command(*base, "--x", "searcher=best-of-n,breaks,best-of-n(n=1)", "--y", "budget=3,8,12")
    assert ran.status == 1
    why = [cell.get("error", "") for cell in ran.json["cells"]]
    assert ["can't finish one image" in text for text in why] == [True] * 3 + [False] * 6
    assert [text for text in why[3:] if text] == ["RuntimeError: a bug in this searcher"] * 2
    assert [cell["x"] for cell in ran.json["cells"] if cell["image"]] == ["best-of-n", "best-of-n(n=1)"] * 2
    assert loads == ["tiny"]


def test_a_model_that_cant_be_loaded_leaves_the_others_alone(command: Command) -> None:
    base = ("grid", PROMPT, "-v", "bright", "-s", "best-of-n", "-b", "4")
    ran = command(*base, "--x", "model=broken,tiny", "--json", "-q")
    assert ran.status == 1
    broken, tiny = ran.json["cells"]
    assert broken["error"] == "'broken' can't be loaded; mend it." and tiny["image"]
    alone = command(*base, "--x", "model=broken")
    assert (alone.status, alone.out) == (1, "") and alone.err.endswith("imgscale: 'broken' can't be loaded; mend it.\n")


def test_ctrl_c_shows_what_is_finished(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bright, "press_at", 3)
    ran = command(*GRID, "-b", "4", "--x", "seed=0,..,9", "--together", "1", "--json", "-q")
    assert ran.status == 130
    with_image = [cell["image"] is not None for cell in ran.json["cells"]]
    assert with_image == sorted(with_image, reverse=True) and 2 <= sum(with_image) < 10
    assert ran.json["cells"][-1]["error"] == cells.STOPPED
    assert Path(ran.json["picture"]).exists() and "stopped by Ctrl-C" in ran.err


def test_the_same_command_keeps_its_name_and_another_takes_a_new_one(command: Command) -> None:
    first, again, other = (command(*GRID, "-q", "-b", "4", "--x", f"seed={seeds}") for seeds in ("1,2", "1,2", "2,3"))
    assert (first.out, again.out, other.out) == (
        "out/two-red-circles-seed.png\n",
        "out/two-red-circles-seed.png\n",
        "out/two-red-circles-seed-2.png\n",
    )
    assert len(list(Path("out/two-red-circles-seed").iterdir())) == 2


def test_the_table_shows_the_steering_scores(command: Command) -> None:
    ran = command(*GRID, "--x", "budget=4,8", "--y", "seed=5,6")
    assert ran.status == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["seed", "4", "8"]
    assert [line[0] for line in lines[1:3]] == ["5", "6"] and re.fullmatch(r"0\.\d{4}", lines[1][1])
    assert ran.out.endswith("out/two-red-circles-budget-seed.html\n")


def test_a_job_s_command_asks_for_the_job(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    asked: list[Job] = []

    def take(job: Job, *_: Any, **__: Any) -> int:
        asked.append(job)
        return 0

    monkeypatch.setattr(generate, "generate", take)
    for job in (
        Job("a red circle", model="tiny", verifier="bright"),
        Job(
            "-\"quoted\" $HOME `x` 'y' \\ ü",
            negative="- blur",
            model="tiny",
            searcher="rbf",
            guide="dps(scale=2.0)",
            options={"draws": "4"},
            verifier="bright+clip",
            report=("clip", "shapes"),
            budget=Budget(nfe=12, seconds=60.5, eflops=2e12),
            seed=2**63 - 1,
            steps=7,
            guidance=1.5,
            height=64,
            width=32,
            device="cpu",
            dtype="float32",
            preview="full",
            verifier_timeout=2.5,
        ),
    ):
        assert command(*shlex.split(job.command())[1:]).status == 0
        assert asked.pop() == job


# ------------------------------------------------------------------------------------------------- model auto


POOL = """verifier = "bright"
searchers = ["best-of-n"]
[policy]
epsilon = 0.5
[[models]]
name = "tiny"
[[models]]
name = "other"
"""
AUTO = ("grid", PROMPT, "--pool", "pool.toml", "--policy", "its.policy", "--report", "none", "-q", "--json")


@pytest.fixture
def pool(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool file with searches of 4 and 8 NFE on `tiny` and `other`."""
    load = imgscale.load
    auto.use(monkeypatch, *(auto.Double(name, lambda *_: 0.5) for name in ("tiny", "other")))
    monkeypatch.setattr(imgscale, "load", load)
    monkeypatch.setattr(verification, "make", lambda *_, **__: Bright())
    Path("pool.toml").write_text(POOL)


@pytest.mark.usefixtures("pool")
def test_a_bandit_answers_each_cell_by_what_it_knew_before(command: Command, loads: list[str]) -> None:
    def cells_of(x: str, y: str) -> dict[tuple[str, str], dict[str, Any]]:
        ran = command(*AUTO, "--model", "auto", "--x", x, "--y", y)
        assert ran.status == 0, ran.err
        found = {(cell["x"], cell["y"]): cell for cell in ran.json["cells"]}
        return {key if x.startswith("mode") else (key[1], key[0]): cell for key, cell in found.items()}

    one = cells_of("mode=cost,quality", "seed=1,2,3,4")
    other = cells_of("seed=4,2,1,3", "mode=quality,cost")
    assert one.keys() == other.keys() and len(one) == 8
    for key, cell in one.items():
        assert cell["auto"] == other[key]["auto"] and cell["nfe"] == other[key]["nfe"]
        with Image.open(cell["image"]) as image, Image.open(other[key]["image"]) as before:
            assert image.tobytes() == before.tobytes() and cell["scores"] == other[key]["scores"]
        assert "--mode" in cell["command"] and "--model auto" in cell["command"]
    assert {cell["auto"]["quality_weight"] for cell in one.values()} == {
        quality_weight("cost"),
        quality_weight("quality"),
    }
    assert len({cell["auto"]["action"] for cell in one.values()}) > 1
    assert not Path("its.policy").exists(), "a grid teaches nothing"
    text = next(Path("imgscale-grid").glob("*.html")).read_text()
    assert "best-of-n" in text and '"chosen"' in text


@pytest.mark.usefixtures("pool")
def test_a_model_can_be_compared_with_a_bandit(command: Command) -> None:
    ran = command(*AUTO, "--x", "model=auto,tiny", "--budget", "4")
    assert ran.status == 0, ran.err
    chosen, plain = ran.json["cells"]
    assert chosen["auto"]["action"] and chosen["nfe"] == plain["nfe"] == 4 and "auto" not in plain
    assert plain["command"].startswith("imgscale generate --model tiny --searcher rbf")


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--x", "searcher=rbf,svdd", "--model", "auto"), "the bandit decides --x searcher, or the pool file says it"),
        (("--x", "set.n=1,2", "--model", "auto"), "the bandit decides --x set.n"),
        (("--x", "seed=1,2", "--model", "auto", "--set", "n=2"), "the bandit decides --set"),
        (("--x", "seed=1,2", "--model", "auto", "--steps", "2"), "the bandit decides --steps"),
        (("--x", "mode=cost,best", "--model", "auto"), "best"),
        (("--x", "mode=cost,quality", "--model", "tiny"), "--policy is for --model auto"),
        (("--x", "model=tiny,other"), "--policy is for --model auto"),
        (("--x", "mode=cost,quality", "--y", "model=auto,tiny"), "--x mode is for --model auto"),
        (("--x", "mode=cost,quality", "--mode", "cost", "--model", "auto"), "both set 'mode'"),
    ],
)
def test_what_a_bandit_decides_is_no_axis(words: tuple[str, ...], says: str, command: Command) -> None:
    assert says in command(*AUTO, *words).sentence


# --------------------------------------------------------------------------------------------- picture and page


def run_all(found: list[Cell], scaler: Scaler) -> None:
    for cell in found:
        if not cell.error:
            assert cell.job is not None
            cell.output = scaler(
                cell.job.prompt, searcher="best-of-n", verifier=Bright(), budget=cell.job.budget, progress=False
            )


def planned(x: Axis, y: Axis | None, prompt: str = PROMPT, **flags: Any) -> list[Cell]:
    names = (*axes.TEXTS, *axes.NUMBERS, "device", "dtype", "verifier-timeout")
    every: dict[str, Any] = {**dict.fromkeys(names), "set": [], "report": []}
    return cells.cells(prompt, {**every, "model": "tiny", "verifier": "bright", **flags}, x, y)


def test_the_best_is_marked_only_where_scores_compare(scaler: Scaler) -> None:
    found = planned(axes.read("--x", "budget=4,16"), None)
    run_all(found, scaler)
    first, second = (cell.output for cell in found)
    assert first is not None and second is not None
    first.scores["bright"], second.scores["bright"] = 0.2, 0.4
    assert picture.best(found) is found[1]
    second.scores["bright"] = float("-inf")
    assert picture.best(found) is None  # there is but one score
    second.verifier, second.scores["other"] = "other", 9.0
    assert picture.best(found) is None


def test_the_picture_holds_the_images(scaler: Scaler) -> None:
    x, y = axes.read("--x", "seed=1,2,3"), axes.read("--y", "budget=2,4")
    found = planned(x, y)
    run_all(found[3:], scaler)
    for cell in found[:3]:
        cell.error = "no " + "budget " * 400
    sheet = picture.picture(found, x, y, "x" * 5000, "settings")
    plan = picture._Plan(found, x, y, "x" * 5000, "settings")
    assert found[4].output is not None
    image = found[4].output.images[0]
    left, top = picture.EDGE + plan.gutter + plan.wide + picture.GAP, plan.top + plan.high + plan.caption + picture.GAP
    shown = sheet.crop((left, top, left + plan.wide, top + plan.high))
    assert shown.resize(image.size, Image.Resampling.NEAREST).tobytes() == image.tobytes()
    assert sheet.width < 4000 and sheet.height < 4000


def test_lines_fit(scaler: Scaler) -> None:
    font = typeface(15, True)
    for text in ("a red circle", "word " * 50, "w" * 300, "", "日本語の長い文章" * 30, "a" * 40 + " b " + "c" * 90):
        found = picture.lines(text, font, 120, 4)
        assert 1 <= len(found) <= 4 and all(font.getlength(line) <= 120 for line in found)
    assert picture.lines("one two", font, 400, 4) == ["one two"]
    assert picture.lines("w" * 300, font, 120, 2)[-1].endswith("…")


def test_the_page_needs_nothing_else_and_escapes_the_prompt(scaler: Scaler) -> None:
    x, y = axes.read("--x", f"prompt=red,{EVIL!s}"), axes.read("--y", "seed=0,1")
    found = planned(x, y, PROMPT)
    run_all(found[:3], scaler)
    found[3].error = EVIL
    text = page.page(found, x, y, EVIL, EVIL, EVIL)
    assert text.count("<script") == text.count("</script>") == 2  # the data and the page's own
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", text)
    assert len(sources) == 3 and all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"https?://|url\(", text)
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [cell["error"] for cell in data["cells"]] == ["", "", "", EVIL]
    assert data["cells"][1]["settings"][0] == ["prompt", f"two {EVIL} circles"]
    assert shlex.split(data["cells"][1]["command"])[-1] == f"two {EVIL} circles"
