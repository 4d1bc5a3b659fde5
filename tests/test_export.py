"""`imgscale export`: the layouts that evaluators read, checked by reading them as those do."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from imgscale.app.export import command, folder, layouts
from imgscale.errors import UserError
from tests import runs
from tests.runs import Made, colour

GENEVAL = {"tag": "two_object", "include": [{"class": "bench", "count": 1}, {"class": "cow", "count": 2}]}
EVIL = "../../../etc/passwd"


def pixel(path: Path | str, at: tuple[int, int] = (0, 0)) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB").getpixel(at)


def export(run: Path, kind: str, images: str = "best") -> Path:
    out = run.parent / f"{kind}-{images}"
    assert command.lay_out(run, kind, out, images=images, quiet=True) == 0
    return out


# ------------------------------------------------------------------------------------------------------ geneval


def test_geneval_as_its_evaluator_reads_it(tmp_path: Path) -> None:
    items = [Made("a bench", 0, GENEVAL), Made("a bench", 0, GENEVAL), Made("two cows", 3, {"tag": "counting"})]
    out = export(runs.make(tmp_path / "run", items), "geneval")
    found = {}
    for sub in out.iterdir():  # what isn't a folder with a number is passed over
        assert sub.is_dir() and sub.name.isdigit()
        metadata = json.loads((sub / "metadata.jsonl").read_text())
        names = sorted(path.name for path in (sub / "samples").iterdir())
        assert all(re.match(r"\d+\.png", name) for name in names)
        found[sub.name] = (metadata, [pixel(sub / "samples" / name) for name in names])
    assert found == {
        "00000": ({**GENEVAL, "prompt": "a bench"}, [colour(0, 1), colour(1, 1)]),
        "00003": ({"tag": "counting", "prompt": "two cows"}, [colour(2, 1)]),
    }


def test_geneval_needs_tags(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", [Made("a bench", 0, GENEVAL), Made("a cow", 4)])
    with pytest.raises(UserError, match="Row 5 of the prompts has no 'tag'"):
        command.lay_out(run, "geneval", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]  # nothing half done stays


# ------------------------------------------------------------------------------------------------ t2i-compbench


def test_t2i_compbench_as_its_evaluators_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["a red book and a yellow vase", "a_b/c\\d", EVIL, "x" * 300, "日本語" * 60, "../", "img.png, he said"]
    items = [Made(prompt, i) for i, prompt in enumerate(prompts)]
    out = export(runs.make(tmp_path / "run", items), "t2i-compbench")
    assert sorted(path.name for path in out.iterdir()) == ["changes.csv", "samples"]
    found = {}
    for path in (out / "samples").iterdir():
        assert len(path.name.encode()) <= 255
        number = int(path.name.split("_")[-1].split(".")[0])  # as BLIP_vqa.py and CLIP_similarity.py do
        assert number == int(path.name.split(".png")[0].split("_")[1])  # as numeracy_eval.py does
        found[number] = path.name.split("_")[0]
        assert pixel(path) == colour(number, 1)
    assert [found[i] for i in sorted(found)] == [
        "a red book and a yellow vase",
        "a b c d",
        ".. .. .. etc passwd",
        "x" * 244,
        ("日本語" * 60).encode()[:244].decode(errors="ignore"),
        "..",
        "img png, he said",
    ]
    with (out / "changes.csv").open(newline="") as file:
        changes = list(csv.DictReader(file))
    assert [row["prompt"] for row in changes] == prompts[1:]
    assert [row["name"] for row in changes] == [found[i] for i in range(1, 7)]
    assert "6 prompts aren't what stands in the names" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["/", "___", "\\ / _", "\x00\n\t"])
def test_a_prompt_without_a_letter_that_a_name_can_hold(prompt: str) -> None:
    assert layouts.file_name(prompt, 244) == "untitled"


def test_nothing_to_say_where_nothing_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = export(runs.make(tmp_path / "run", [Made('a "red" book: one, two?', 0)]), "t2i-compbench")
    assert [path.relative_to(out).as_posix() for path in out.rglob("*.png")] == [
        'samples/a "red" book: one, two?_000000.png'
    ]
    assert capsys.readouterr().err == "" and not (out / "changes.csv").exists()


# ---------------------------------------------------------------------------------------------------- dpg-bench


def test_dpg_bench_grids_as_its_evaluator_cuts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [Made(f"prompt {i // 5}", i // 5, {"item_id": f"vg{i // 5}"}) for i in range(10)]
    out = export(runs.make(tmp_path / "run", items), "dpg-bench")
    assert sorted(path.name for path in (out / "images").iterdir()) == ["vg0.png", "vg1.png"]
    corners = [(0, 0), (16, 0), (0, 16), (16, 16)]  # left to right, then down
    with Image.open(out / "images" / "vg1.png") as image:
        assert image.size == (32, 32)
        assert [image.getpixel((x + 8, y + 8)) for x, y in corners] == [colour(i, 1) for i in (5, 6, 7, 8)]
    said = capsys.readouterr().err
    assert "--pic-num 4 --resolution 16" in said and "2 images have no place" in said


def test_dpg_bench_with_fewer_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [Made("a", 0, {"id": 7}), Made("b", 1, {"id": 8}), Made("b", 1, {"id": 8})]
    out = export(runs.make(tmp_path / "run", items), "dpg-bench")
    with Image.open(out / "images" / "8.png") as image:
        assert image.size == (16, 16)
    assert "--pic-num 1 --resolution 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([Made("a", 0)], "Row 1 of the prompts has none of the columns item_id, id, prompt_id"),
        ([Made("a", 2, {"item_id": EVIL})], "Row 3 of the prompts has the item_id '../../../etc/passwd'"),
        ([Made("a", 2, {"item_id": "a.b"})], "letters, digits, hyphens and underscores"),
        ([Made("a", 0, {"id": 1}), Made("b", 1, {"id": 2}, size=(32, 32))], "item '2' has 32x32 pixels"),
        ([Made("a", 0, {"id": 1}, size=(32, 16))], "item '1' has 32x16 pixels"),
    ],
)
def test_what_dpg_bench_cant_read(items: list[Made], says: str, tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", items)
    with pytest.raises(UserError, match=re.escape(says)):
        command.lay_out(run, "dpg-bench", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------- tables and folders


TWO = ({"clip": 0.75, "shapes": None}, {"clip": 0.5, "shapes": 1.0})


def test_the_csv_holds_everything(tmp_path: Path) -> None:
    items = [
        Made('say "a, b"\nand c', 0, {"note": "x", "include": [1, {"a": 2}]}, TWO),
        Made("plainly", 1, {"score": 5}, plain=None),
    ]
    run = runs.make(tmp_path / "run", items, failures=[(9, "", "Row 9 has no prompt.")])
    with (export(run, "csv", "kept") / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == ['say "a, b"\nand c', 'say "a, b"\nand c', "plainly", ""]
    assert [(row["rank"], row["score_clip"], row["score_shapes"]) for row in rows[:3]] == [
        ("1", "0.75", ""),
        ("2", "0.5", "1.0"),
        ("1", "0.75", "1.0"),
    ]
    assert [row["error"] for row in rows] == ["", "", "", "Row 9 has no prompt."]
    assert json.loads(rows[0]["row_include"]) == [1, {"a": 2}] and rows[2]["row_score"] == "5"
    assert [pixel(run / row["file"]) for row in rows[:3]] == [colour(0, 1), colour(0, 2), colour(1, 1)]


def test_the_image_folder_as_datasets_reads_it(tmp_path: Path) -> None:
    items = [Made("a", 0, {"n": 1}, TWO), Made("b", 1, {"n": "text"})]
    out = export(runs.make(tmp_path / "run", items), "imagefolder", "kept")
    rows = [json.loads(line) for line in (out / "train" / "metadata.jsonl").read_text().splitlines()]
    assert {path.name for path in (out / "train").iterdir()} == {*(row["file_name"] for row in rows), "metadata.jsonl"}
    assert [pixel(out / "train" / row["file_name"]) for row in rows] == [colour(0, 1), colour(0, 2), colour(1, 1)]
    assert len({tuple(row) for row in rows}) == 1  # every row has the same columns
    kinds = {name: {type(row[name]) for row in rows} - {type(None)} for name in rows[0]}
    assert all(len(kind) <= 1 for kind in kinds.values()), kinds  # of one type each, which Arrow asks for
    assert [(row["prompt"], row["score_clip"], json.loads(row["row_json"])["n"]) for row in rows] == [
        ("a", 0.75, 1),
        ("a", 0.5, 1),
        ("b", 0.75, "text"),
    ]


def test_plain_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.make(tmp_path / "run", [Made("a", 0, plain=None), Made("b", 1)], waiting=3)
    with (export(run, "csv", "plain") / "images.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["prompt"], row["searcher"], row["score_clip"], row["nfe"]) == ("b", "plain", "0.5", "4")
    assert pixel(run / row["file"]) == colour(1, 0)
    assert "3 searches of the run aren't done yet." in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "genval"}, "Did you mean 'geneval'?"),
        ({"images": "worst"}, "Unknown choice of --images 'worst'"),
        ({"images": "plain"}, "has no plain image"),
        ({"run": "nowhere"}, "There is no run in"),
        ({"out": "full"}, "isn't empty"),
        ({"out": "full/file"}, "isn't empty"),
        ({"out": "full/file/below"}, "can't be written"),
    ],
)
def test_what_cant_be(arguments: dict[str, str], says: str, tmp_path: Path) -> None:
    runs.make(tmp_path / "run", [Made("a", 0, plain=None)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    given = {"run": "run", "kind": "csv", "out": "out", "images": "best", **arguments}
    with pytest.raises(UserError, match=re.escape(says)):
        command.lay_out(tmp_path / given["run"], given["kind"], tmp_path / given["out"], images=given["images"])
    assert (tmp_path / "full" / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]


def test_a_run_without_an_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no image; wait for one"):
        command.lay_out(runs.make(tmp_path / "run", [], waiting=2), "csv", tmp_path / "out")


def test_an_image_that_is_gone_leaves_nothing_half_done(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", [Made("a", 0), Made("b", 1)])
    (run / "images" / "00001.png").unlink()
    with pytest.raises(UserError, match=r"00001\.png' can't be read \(No such file"):
        command.lay_out(run, "imagefolder", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\b", ""])
def test_no_name_leaves_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError), folder.Folder(tmp_path / "out") as inside:
        inside.write(name, b"")
    assert list(tmp_path.iterdir()) == []
