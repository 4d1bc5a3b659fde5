"""`imgscale report`: one page that needs nothing else, with what the store says and numbers checked by hand."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from imgscale.app.batch import store
from imgscale.app.batch.store import Store
from imgscale.app.report import command, items, summary
from imgscale.errors import UserError
from tests import runs
from tests.runs import Made

EVIL = '<script>alert("x")</script> & "quoted" </script><img src=http://evil.example/x onerror=alert(1)>'


def page(run: Path, **more: Any) -> tuple[str, dict[str, Any]]:
    """The page's HTML, and the data that its script reads."""
    assert command.write(run, quiet=True, **more) == 0
    text = (more.get("out") or run / "report.html").read_text(encoding="utf-8")
    return text, json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_the_page_shows_every_search_and_every_failure(tmp_path: Path) -> None:
    made = [
        Made("a red circle", 0, {"category": "colours", "note": "n"}),
        Made("a red circle", 0, {"category": "colours"}, ({"clip": 0.25, "shapes": None},)),
        Made("two stars", 1, {"tag": "counting"}, plain=None),
    ]
    run = runs.make(tmp_path / "run", made, [(7, "bad \ud7ff", "Row 7 has no prompt.")], waiting=2)
    text, data = page(run)
    first, second, third, failure = data["items"]
    assert data["names"] == ["clip", "shapes"] and data["tiny"] is True
    assert [item["order"] for item in data["items"]] == [0, 1, 2, 3]
    assert (first["prompt"], first["category"], first["scores"]) == ("a red circle", "colours", [0.75, 1.0])
    assert first["before"] == [0.5, 0.5] and second["scores"] == [0.25, None]
    assert third["category"] == "counting" and "before" not in third and "plain" not in third
    assert first["trace"] == [[4, 12, 40], [0.25, 0.5, 0.75], [0.25, None, 1.0]]
    assert ["note", "n"] in first["facts"] and ["seed", 0] in first["facts"]
    assert failure == {
        "order": 3,
        "prompt": "bad \ud7ff",
        "error": "Row 7 has no prompt.",
        "facts": [["row", 7]],
    }
    for value, what in (("3", "images"), ("2", "prompts"), ("1", "without an image"), ("120", "NFE in all")):
        assert f"<li><b>{value}</b><span>{what}</span></li>" in text
    assert "<b>2</b><span>still to be made</span>" in text
    assert '<option value="=colours">colours</option><option value="=counting">' in text
    assert "1 × Row 7 has no prompt." in text and "prompts: a &amp; &lt;b&gt;.txt" in text


def test_the_images_are_inside(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", [Made("a", 0), Made("b", 1, plain=None)])
    _, data = page(run, out=tmp_path / "elsewhere" / "page.html")
    seen = []
    for source in (data["items"][0]["plain"], data["items"][0]["image"], data["items"][1]["image"]):
        assert source.startswith("data:image/png;base64,")
        with Image.open(urlopen(source)) as image:
            seen.append(image.getpixel((3, 3)))
    assert seen == [runs.colour(0, 0), runs.colour(0, 1), runs.colour(1, 1)]
    assert data["items"][1]["file"] == "../run/images/00001.png"


def urlopen(uri: str) -> Any:
    import base64
    import io

    return io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))


def test_nothing_in_a_prompt_gets_out_and_nothing_is_loaded(tmp_path: Path) -> None:
    made = [Made(EVIL, 0, {"category": EVIL, EVIL: EVIL}), Made("b", 1)]
    text, data = page(runs.make(tmp_path / "run", made, [(3, EVIL, EVIL)]))
    assert [item["prompt"] for item in data["items"]] == [EVIL, "b", EVIL]
    assert text.count("<script") == text.count("</script>") == 2  # the data and the page's own
    body, script = text.split('<script type="application/json"')
    assert "<img" not in body and 'onerror=alert(1)">' not in body
    assert "http" not in script.split("</script>", 1)[1].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(?:src|href)\s*=\s*["']|@import|url\(""", body + script.split("</script>", 1)[1])


def test_the_command_of_an_image_asks_for_it(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", [Made('-"a" $b', 0), Made("b", 1)])
    _, data = page(run)
    words = shlex.split(data["items"][0]["command"])
    assert words[:2] == ["imgscale", "generate"] and words[-2:] == ["--", '-"a" $b']
    options = dict(zip(words[2:-2:2], words[3:-2:2], strict=True))
    assert options == {
        **{"--model": "shapes-turbo", "--searcher": "rbf", "--verifier": "clip", "--budget": "40", "--seed": "0"},
        **{"--steps": "4", "--height": "16", "--width": "16", "--preview": "full", "--report": "shapes"},
    }
    assert [item["seed"] for item in data["items"]] == ["0", "1"]


def test_an_image_that_cant_be_read_is_left_blank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.make(tmp_path / "run", [Made("a", 0), Made("b", 1)])
    (run / "images" / "00000.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (run / "images" / "00001.png").unlink()
    _, data = page(run)
    assert [item["image"] for item in data["items"]] == ["", ""]
    assert "2 images can't be read, and are left blank." in capsys.readouterr().err


def test_thousands_of_images_stay_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    run = runs.make(tmp_path / "run", [Made("a", 0)])
    noise = Image.fromarray(rng.integers(0, 256, (200, 200, 3), dtype=np.uint8))
    noise.save(run / "images" / "00000.png")
    with Store.open(run) as kept:
        (item,) = kept.items()
    many = [item] * 3000  # noise is the worst for a JPEG
    total = sum(map(len, items._embedded(many)))
    assert total < 3 * items.BYTES


def test_long_traces_are_thinned_out_and_keep_their_ends(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", [Made("a", 0)])
    with Store.open(run) as kept:
        (item,) = kept.items()
    nfe = list(range(1, 1001))
    item.trace.update(nfe=nfe, scores={"clip": [n / 1000 for n in nfe]})
    found = items._trace(item, ["clip", "shapes"])
    assert found is not None and len(found[0]) <= items.POINTS + 1
    assert (found[0][0], found[0][-1], found[1][0], found[1][-1]) == (1, 1000, 0.001, 1.0)
    assert found[2] == [None] * len(found[0])


# ------------------------------------------------------------------------------------------------------- sums


def sums(run: Path) -> summary.Summary:
    with Store.open(run) as kept:
        found = list(kept.items())
        names = items.names(found)
        return summary.summary(found, kept.failures(), kept.states(), kept.config, kept.versions, names)


def test_means_and_gains(tmp_path: Path) -> None:
    def made(number: int, after: float | None, before: float | None) -> Made:
        return Made(f"prompt {number}", number, {}, ({"clip": after, "shapes": 1.0},), {"clip": before, "shapes": 1.0})

    # Prompt 0 has two seeds: they are averaged first. No score is no number.
    found = sums(
        runs.make(tmp_path / "run", [made(0, 0.8, 0.6), made(0, 0.6, 0.6), made(1, 0.3, 0.2), made(2, None, 0.9)])
    )
    head, clip, shapes = found.scores
    assert head == ["", "plain", "searched", "gain", "better", "n"]
    assert clip[0] == "clip (steers)" and shapes[0] == "shapes (held out)"
    assert clip[2].startswith("0.500 (0.300 to 0.700)")  # of 0.7 and 0.3
    assert clip[3].startswith("+0.100 (+0.100 to +0.100)")
    assert clip[4:] == ["67%", "3"] and shapes[4:] == ["0%", "4"]
    assert [value for value, name in found.tiles if name == "seconds an image, shared"] == ["1.5"]


def test_sums_without_plain_images(tmp_path: Path) -> None:
    found = sums(runs.make(tmp_path / "run", [Made("a", 0, plain=None), Made("b", 1, plain=None)]))
    assert found.scores[0] == ["", "searched", "n"] and found.scores[1][2] == "2"


def test_the_mean_of_the_best_so_far(tmp_path: Path) -> None:
    made = [Made("a", 0, scores=({"clip": 0.75},)), Made("b", 1, scores=({"clip": 0.95},))]
    found = sums(runs.make(tmp_path / "run", made))
    assert found.curve == [[4.0, 12.0, 40.0], [0.25, 0.5, 0.85]]


def test_intervals_of_very_many_prompts_agree_with_the_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = {(f"prompt {i}", i): float(x) for i, x in enumerate(rng.normal(0.5, 0.2, 900))}
    drawn = [float(x) for x in re.findall(r"[-\d.]+", summary._estimate(values))]
    monkeypatch.setattr(summary, "MOST", 10)
    direct = [float(x) for x in re.findall(r"[-\d.]+", summary._estimate(values))]
    assert direct == pytest.approx(drawn, abs=0.002) and drawn[1] < drawn[0] < drawn[2]
    assert math.isclose(direct[0], np.mean(list(values.values())), abs_tol=0.001)


# -------------------------------------------------------------------------------------------------- the command


def test_json_and_the_line_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.make(tmp_path / "run", [Made("a", 0)], [(2, "b", "It broke.")])
    assert command.write(run, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["page"], said["images"], said["failures"]) == (str(run / "report.html"), 1, 1)
    assert said["scores"][1][0] == "clip (steers)"
    assert command.write(run) == 0
    assert capsys.readouterr().out == f"1 images, 1 failures. Wrote {run / 'report.html'}\n"


def test_what_cant_be(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", [], waiting=1)
    for arguments, says in (
        ((tmp_path / "nowhere", None), "There is no run in"),
        ((run, None), "has no image yet; wait for the first."),
        ((run, tmp_path), "is a folder; give a file with --out"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            command.write(*arguments)
    full = runs.make(tmp_path / "full", [Made("a", 0)])
    with pytest.raises(UserError, match="can't be written"):
        command.write(full, full / store.NAME / "page.html")
