"""Scores of images that are there already: what is read of files, how they are batched, and `imgscale score`."""

from __future__ import annotations

import csv
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

import imgscale
from imgscale import images, png, registry, scoring
from imgscale.app import main, pairs
from imgscale.app import score as command_of
from imgscale.errors import UserError
from imgscale.images import Unreadable, look, prompt_in, tensor
from imgscale.scoring import score


class Bright:
    """A verifier that likes light images, and counts its calls."""

    name = "bright"
    range = (0.0, 1.0)
    reads_prompt = False
    differentiable = True

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        assert len(prompts) == len(images)
        self.batches.append(tuple(images.shape))
        return images.flatten(1).mean(1)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


class Words(Bright):
    """A verifier that likes long prompts, and refuses some."""

    name = "words"
    reads_prompt = True

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.batches.append(tuple(images.shape))
        if "forbidden" in prompts:
            raise UserError("The prompt 'forbidden' is; write another.")
        return torch.tensor([float(len(prompt)) for prompt in prompts])


def flat(path: Path, level: int, size: tuple[int, int] = (8, 8), **options: Any) -> Path:
    """An image file of one grey."""
    Image.new("RGB", size, (level, level, level)).save(path, **options)
    return path


# ----------------------------------------------------------------------------------------------- images from files


def gradient(h: int = 6, w: int = 9) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (h, w, 3), np.uint8)


def test_pixels_are_those_of_the_file(tmp_path: Path) -> None:
    pixels = gradient()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = tensor(tmp_path / "a.png")
    assert found.dtype == torch.float32 and found.shape == (3, 6, 9) and found.is_contiguous()
    assert np.array_equal((found * 255).round().byte().permute(1, 2, 0).numpy(), pixels)
    assert torch.equal(tensor(str(tmp_path / "a.png")), found)
    with Image.open(tmp_path / "a.png") as image:
        assert torch.equal(tensor(image), found)
    assert look(tmp_path / "a.png") == ((9, 6), None)


@pytest.mark.parametrize(
    ("mode", "suffix", "expected"),
    [
        *[("L", suffix, (0.3, 0.3, 0.3)) for suffix in (".png", ".tif", ".jpg")],
        *[("1", suffix, (0.3, 0.3, 0.3)) for suffix in (".png", ".tif")],
        *[("P", suffix, (1, 0, 0)) for suffix in (".png", ".tif", ".gif")],
        *[("CMYK", suffix, (1, 0, 0)) for suffix in (".tif", ".jpg")],
        ("YCbCr", ".jpg", (1, 0, 0)),  # Pillow 12 can't read the TIFF that it writes in this mode
    ],
)
def test_every_mode_becomes_rgb(mode: str, suffix: str, expected: tuple[float, ...], tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), (255, 0, 0)).convert(mode).save(tmp_path / f"a{suffix}", quality=100)
    found = tensor(tmp_path / f"a{suffix}")
    assert found.shape == (3, 64, 64)
    assert found.mean((1, 2)).tolist() == pytest.approx(expected, abs=0.02)


def test_sixteen_bits_of_grey_are_not_cut_off(tmp_path: Path) -> None:
    grey = np.array([[0, 128, 32768, 65535]], np.uint16)
    for name in ("a.png", "a.tif"):
        Image.fromarray(grey).save(tmp_path / name)
        found = tensor(tmp_path / name)
        assert torch.allclose(found, torch.from_numpy(grey / 65535).float().expand(3, -1, -1))


def test_sixteen_bits_of_colour(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + struct.pack(">3H", 65535, 32768, 0)
    head = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    assert torch.allclose(tensor(tmp_path / "a.png").flatten(), torch.tensor([1.0, 0.5, 0.0]), atol=1 / 255)


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "tRNS"])
def test_what_is_transparent_becomes_white(kind: str, tmp_path: Path) -> None:
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 3] = 0, 128, 255  # black: all, half, and not transparent
    image = Image.fromarray(pixels)
    if kind == "LA":
        image = image.convert("LA")
    elif kind == "P":
        image = image.quantize(8)
    elif kind == "tRNS":
        image = Image.new("RGB", (3, 1), (9, 9, 9))
        image.putpixel((2, 0), (0, 0, 0))
        image.info["transparency"] = (9, 9, 9)
    image.save(tmp_path / "a.png")
    found = tensor(tmp_path / "a.png")[:, 0]
    expected = torch.tensor([1.0, 1.0 if kind == "tRNS" else 0.5, 0.0])
    assert torch.allclose(found, expected.expand(3, -1), atol=0.01)


def test_exif_says_what_is_up(tmp_path: Path) -> None:
    image = Image.fromarray(gradient(4, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    image.save(tmp_path / "a.png", exif=exif)
    assert torch.equal(tensor(tmp_path / "a.png"), tensor(image).rot90(-1, (1, 2)))
    image.save(tmp_path / "a.jpg", exif=exif)
    assert tensor(tmp_path / "a.jpg").shape == (3, 6, 4)


def test_tensors() -> None:
    grey = torch.rand(1, 3, 5)
    assert torch.equal(tensor(grey), grey.expand(3, -1, -1))
    levels = torch.randint(0, 256, (3, 3, 5), dtype=torch.uint8)
    assert torch.equal(tensor(levels), levels / 255)
    assert tensor(torch.rand(3, 3, 5).half()).dtype == torch.float32


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (torch.rand(4, 5, 5), r"shape \(4, 5, 5\)"),
        (torch.rand(3, 0, 5), "shape"),
        (torch.ones(3, 5, 5).long(), "int64"),
        (torch.rand(3, 5, 5) * 255, r"outside \[0, 1\]"),
        (torch.full((3, 5, 5), torch.nan), r"outside \[0, 1\]"),
        (Image.new("F", (4, 4)), "floating point"),
    ],
)
def test_what_is_no_image(bad: Any, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        tensor(bad)


def broken_files(folder: Path) -> dict[str, str]:
    """Files that are no use, and why."""
    good = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    good.save(folder / "whole.png")
    good.save(folder / "whole.jpg")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:2000])
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:1000])
    (folder / "text.png").write_text("a cat")
    (folder / "empty.png").write_bytes(b"")
    (folder / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    size = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    head = struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    (folder / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + head + (folder / "whole.png").read_bytes()[33:])
    for name in ("whole.png", "whole.jpg"):
        (folder / name).unlink()
    return {
        "cut.png": "can't be read",
        "cut.jpg": "can't be read",
        "text.png": "no image of a known kind",
        "empty.png": "no image of a known kind",
        "script.png": "no image of a known kind",
        "huge.png": "pixels",
        "missing.png": "isn't there",
    }


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bad_file_costs_no_other_its_score(tmp_path: Path) -> None:
    why = broken_files(tmp_path)
    flat(tmp_path / "good.png", 102, (64, 64))
    paths = [tmp_path / name for name in (*why, "good.png")]
    found = score(paths, verifiers=Bright())
    assert [each.image for each in found] == paths
    for each in found[:-1]:
        assert isinstance(each.image, Path)
        assert each.scores == {"bright": None} and each.error is not None and why[each.image.name] in each.error
    assert found[-1].scores["bright"] == pytest.approx(0.4) and found[-1].error is None


def test_sizes_are_checked_before_anything_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    assert look(flat(tmp_path / "a.png", 0, (10, 10)))[0] == (10, 10)
    with pytest.raises(Unreadable, match="has 10x11 pixels, more than the 100 allowed"):
        look(flat(tmp_path / "b.png", 0, (10, 11)))


# ---------------------------------------------------------------------------------------- the prompts that they carry

A1111 = "a cat,\nsitting on a mat\nNegative prompt: dogs\nmore dogs\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1"


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (A1111, "a cat,\nsitting on a mat"),
        ("a cat\nSteps: 20, Sampler: Euler", "a cat"),
        ("a cat", "a cat"),
        ("two Steps: of stone\nSteps: 20, Seed: 3", "two Steps: of stone"),
        ("Negative prompt: dogs\nSteps: 20, Seed: 3", None),
        ("", None),
    ],
)
def test_the_prompt_in_a1111s_text(text: str, prompt: str | None) -> None:
    assert prompt_in(text) == prompt


def test_a1111s_text_in_files(tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text("parameters", A1111)
    flat(tmp_path / "a.png", 0, pnginfo=info)
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + A1111.encode("utf-16-be")
    flat(tmp_path / "a.jpg", 0, exif=exif)
    flat(tmp_path / "a.webp", 0, exif=exif)
    for name in ("a.png", "a.jpg", "a.webp"):
        assert look(tmp_path / name)[1] == "a cat,\nsitting on a mat"
        assert look(tmp_path / name, wants_prompt=False)[1] is None
    exif.get_ifd(0x8769)[0x9286] = b"ASCII\0\0\0taken in the garden"
    assert look(flat(tmp_path / "camera.jpg", 0, exif=exif))[1] is None


# ------------------------------------------------------------------------------------------------------------- score


def test_images_of_one_size_share_batches_and_keep_their_order(tmp_path: Path) -> None:
    sizes = [(8, 8), (4, 8), (8, 8), (8, 4), (8, 8), (4, 8), (8, 8)]
    paths = [flat(tmp_path / f"{i}.png", 10 * i, size) for i, size in enumerate(sizes)]
    bright = Bright()
    found = score(paths, verifiers=bright, max_batch=3)
    assert [each.scores["bright"] for each in found] == pytest.approx([10 * i / 255 for i in range(7)])
    assert sorted(bright.batches) == [(1, 3, 4, 8), (1, 3, 8, 8), (2, 3, 8, 4), (3, 3, 8, 8)]


def test_images_that_exif_turns_are_scored_among_their_likes(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    paths = [flat(tmp_path / "a.png", 0, (4, 8)), flat(tmp_path / "b.png", 255, (4, 8), exif=exif)]
    bright = Bright()
    found = score(paths, verifiers=bright)
    assert [each.scores["bright"] for each in found] == [0.0, 1.0]
    assert bright.batches == [(1, 3, 8, 4), (1, 3, 4, 8)]


def test_prompts_for_all_for_each_and_from_the_image(tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text("parameters", "in file")
    paths = [flat(tmp_path / f"{i}.png", 0, pnginfo=info) for i in range(3)]

    def lengths(prompts: Any) -> list[float | None]:
        return [each.scores["words"] for each in score(paths, prompts, Words())]

    assert lengths("all") == [3, 3, 3]
    assert lengths(["a", "bb", None]) == [1, 2, 7]
    assert lengths(None) == [7, 7, 7]


def test_an_image_without_a_prompt_lacks_only_what_reads_prompts(tmp_path: Path) -> None:
    paths = [flat(tmp_path / "a.png", 255), flat(tmp_path / "b.png", 255)]
    first, second = score(paths, ["a prompt", None], [Words(), Bright()])
    assert first.scores == {"words": 8, "bright": 1} and first.error is None
    assert second.scores == {"words": None, "bright": 1} and second.prompt is None
    assert second.error == "words reads prompts, and the image has none"
    assert score(paths, None, Bright())[0].scores == {"bright": 1}
    with pytest.raises(UserError, match="words reads prompts, and no image carries one"):
        score(paths, None, [Bright(), Words()])


def test_a_prompt_that_is_refused_costs_no_other_its_score() -> None:
    prompts = ["a", "bb", "forbidden", "dddd", "eeeee"]
    found = score(torch.rand(5, 3, 4, 4), prompts, Words())
    assert [each.scores["words"] for each in found] == [1, 2, None, 4, 5]
    assert found[2].error == "words: The prompt 'forbidden' is; write another."


def test_memory_that_runs_out_halves_the_batch() -> None:
    class Hungry(Bright):
        def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
            if len(images) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(images, prompts)

    hungry = Hungry()
    levels = torch.linspace(0, 1, 7)
    found = score(levels[:, None, None, None].expand(-1, 3, 4, 4), verifiers=hungry)
    assert [each.scores["bright"] for each in found] == pytest.approx(levels.tolist())
    assert max(batch[0] for batch in hungry.batches) <= 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda images: torch.full((len(images),), torch.nan), "bright gave nan instead of a number"),
        (lambda images: torch.full((len(images),), -torch.inf), "bright gave -inf instead of a number"),
        (lambda images: torch.zeros(len(images), 1), r"bright failed \(it returned shape \(2, 1\) for 2 images\)"),
        (lambda images: 1 / 0, r"bright failed \(division by zero\)"),
    ],
)
def test_a_verifier_that_fails_costs_only_its_own_scores(answer: Callable[[Tensor], Tensor], why: str) -> None:
    class Failing(Bright):
        def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
            return answer(images)

    for each in score(torch.rand(2, 3, 4, 4), "a", [Failing(), Words()]):
        assert each.scores == {"bright": None, "words": 1.0}
        assert each.error is not None and re.fullmatch(why, each.error)


def test_an_ensemble_compares_the_images_of_one_prompt() -> None:
    class Relative:
        """How far each is above the mean of its members' sum."""

        name, range, reads_prompt, differentiable = "relative", None, True, False

        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
            raise AssertionError("an ensemble's scores mean nothing alone")

        def combine(self, new: Tensor, seen: Tensor) -> Tensor:
            return new.sum(1) - seen.sum(1).mean()

        def identity(self) -> dict[str, Any]:
            return {}

    bright, words = Bright(), Words()
    levels = torch.tensor([0.0, 0.5, 1.0, 1.0])
    batch = levels[:, None, None, None].expand(-1, 3, 4, 4)
    found = score(batch, ["a", "bb", "a", "forbidden"], [Relative(bright, words), bright], max_batch=4)
    assert [each.scores["relative"] for each in found] == [-0.5, 0.0, 0.5, None]
    assert [each.scores["bright"] for each in found] == levels.tolist()
    assert bright.batches == [(4, 3, 4, 4)], "a verifier that is also a member is asked once"


def test_single_images_and_functions() -> None:
    def redness(images: Tensor, prompts: list[str]) -> Tensor:
        return images[:, 0].flatten(1).mean(1)

    assert score(torch.ones(3, 4, 4), "a", redness)[0].scores == {"redness": 1.0}
    assert score(Image.new("RGB", (4, 4), "red"), "a", [redness])[0].scores == {"redness": 1.0}
    assert score([], "a", redness) == []
    assert imgscale.score is scoring.score


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ["a"]}, "can't be 1 prompts for 2 images"),
        ({"prompts": [1, 2]}, "A prompt can't be 1"),
        ({"verifiers": []}, "list of verifiers can't be empty"),
        ({"verifiers": ["brigth"]}, "Unknown verifier 'brigth'"),
        ({"verifiers": [Bright(), Bright()]}, "Two verifiers are called 'bright'"),
        ({"verifiers": 3}, "The verifier can't be 3"),
        ({"max_batch": 0}, "max_batch can't be 0"),
        ({"device": "qpu"}, "The device 'qpu' can't be used here"),
        ({"images": [3]}, "An image can't be 3"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(**{"images": torch.rand(2, 3, 4, 4), "prompts": "a", "verifiers": Bright(), **arguments})


@pytest.mark.weights
def test_the_bundled_clip_scores_what_it_is_shown(tmp_path: Path) -> None:
    path = flat(tmp_path / "a.png", 128, (64, 64))
    (found,) = score([path], "a red circle", ["clip", "shapes", "clip+shapes"])
    clip = registry.verifier["clip"].target()
    assert found.scores["clip"] == pytest.approx(float(clip(tensor(path)[None], ["a red circle"])), abs=1e-5)
    assert found.scores["shapes"] is not None and found.scores["clip+shapes"] is not None and found.error is None


# ------------------------------------------------------------------------------------------------------- the command


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs ``imgscale score …`` in an empty folder, with the verifiers `bright` and `words` beside the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        monkeypatch.setenv(name, "error")
    list(registry.verifier)  # or a later discovery would come after the next line
    for made in (Bright, Words):
        monkeypatch.setitem(registry.verifier._entries, made.name, registry.Entry(made.name, made))

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main(["score", *arguments])
        return (int(ended.value.code or 0), *capfd.readouterr())

    return run


def test_a_table_in_the_order_of_the_input(command: Command) -> None:
    for name, level in (("b.png", 51), ("a.png", 255), ("c.png", 153)):
        flat(Path(name), level)
    status, out, err = command("c.png", ".", "-v", "bright,words", "--prompt", "four")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["image", "bright", "words"],
        ["c.png", "0.6000", "4.0000"],
        ["a.png", "1.0000", "4.0000"],
        ["b.png", "0.2000", "4.0000"],
        ["c.png", "0.6000", "4.0000"],
    ]


def test_sorted_and_only_the_best(command: Command) -> None:
    for name, level in (("a.png", 51), ("b.png", 255), ("c.png", 153)):
        flat(Path(name), level)
    Path("bad.png").write_text("a cat")

    def shown(*more: str) -> list[str]:
        status, out, err = command(".", "-v", "bright", "-v", "words", "-p", "x", *more)
        assert status == 1 and "1 of 4 images lack a score; the first is 'bad.png'" in err
        return [line.split()[0] for line in out.splitlines()[1:]]

    assert shown() == ["a.png", "b.png", "bad.png", "c.png"]
    assert shown("--sort", "bright") == ["b.png", "c.png", "a.png", "bad.png"]
    assert shown("--sort", "words") == ["a.png", "b.png", "c.png", "bad.png"], "equals stay in their order"
    assert shown("--top", "2") == ["b.png", "c.png"]


def test_what_is_wrong_stands_in_the_table(command: Command) -> None:
    flat(Path("a.png"), 51)
    Path("bad.png").write_text("a cat")
    status, out, _ = command("a.png", "bad.png", "-v", "bright")
    assert status == 1
    assert out.splitlines()[0].rstrip().endswith("what is wrong")
    assert out.splitlines()[2].split(maxsplit=2) == ["bad.png", "–", "is no image of a known kind"]


def test_json(command: Command) -> None:
    flat(Path("a.png"), 255)
    Path("pairs.jsonl").write_text(
        '{"image": "a.png", "prompt": "four", "by": "me", "n": NaN}\n\n{"image": "b.png", "text": "x\u2028y"}\n'
    )
    status, out, _ = command("pairs.jsonl", "-v", "bright,words", "--json")
    assert status == 1
    assert json.loads(out) == {
        "verifiers": {"bright": {"name": "bright"}, "words": {"name": "words"}},
        "images": [
            {
                "image": "a.png",
                "prompt": "four",
                "scores": {"bright": 1.0, "words": 4.0},
                "error": None,
                "columns": {"by": "me", "n": None},
            },
            {
                "image": "b.png",
                "prompt": "x\u2028y",
                "scores": {"bright": None, "words": None},
                "error": "isn't there",
            },
        ],
    }


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_and_prompts_that_a_terminal_would_obey(command: Command) -> None:
    names = [b"caf\xe9.png", b"\x1b[31mred\n.png"]
    for name in names:
        info = PngInfo()
        info.add_text("parameters", f"a \x1b]0;title\x07 {len(name)}\nb")
        Image.new("RGB", (8, 8)).save(Path("a.png"), pnginfo=info)
        os.rename(b"a.png", name)
    status, out, err = command(".", "-v", "words")
    assert (status, err) == (0, "")
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == ["?[31mred .png", "caf\ufffd.png"]
    assert "a ?]0;title? 13 b" in out and "\x1b" not in out
    found = json.loads(command(".", "-v", "words", "--json")[1])["images"]
    assert [each["image"] for each in found] == ["\x1b[31mred\n.png", "caf\ufffd.png"]


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_a_table_of_pairs_and_one_of_scores(ending: str, command: Command) -> None:
    Path("data").mkdir()
    flat(Path("data", "a.png"), 255), flat(Path("data", "b.png"), 51)
    rows = [
        {"Image": "a.png", "id": "1", "Prompt": "a cat,\nasleep", "bright": "old"},
        {"Image": "b.png", "id": "2", "Prompt": "", "bright": "old"},
        {"Image": str(Path("data", "a.png").absolute()), "id": "3", "Prompt": "ü", "bright": "old"},
    ]
    with Path("data", f"pairs{ending}").open("w", newline="", encoding="utf-8-sig") as file:
        sheet = csv.DictWriter(file, list(rows[0]), delimiter="\t" if ending == ".tsv" else ",")
        sheet.writeheader()
        sheet.writerows(rows)
    status, out, err = command(f"data/pairs{ending}", "-v", "bright,words", "--csv", "new/scores.csv", "--quiet")
    assert (status, out) == (1, "") and "words reads prompts, and the image has none" in err
    with Path("new", "scores.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["image", "prompt", "bright", "words", "error", "id"]
    assert [row["id"] for row in found] == ["1", "2", "3"]
    assert [float(row["bright"]) for row in found] == pytest.approx([1.0, 0.2, 1.0])
    assert [row["words"] for row in found] == ["13.0", "", "1.0"]
    assert found[0]["prompt"] == "a cat,\nasleep" and found[0]["image"] == "data/a.png"
    status, out, _ = command(f"data/pairs{ending}", "-v", "words", "--csv", "-", "--prompt", "all")
    assert status == 0
    assert [row["words"] for row in csv.DictReader(out.splitlines())] == ["3.0"] * 3


def test_folders(command: Command) -> None:
    for name in ("b.PNG", "a.webp", ".hidden.png", "sub/c.jpg", "sub/.git/d.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        flat(Path(name), 0)
    Path("notes.txt").write_text("no image")
    Path("sub", "link").symlink_to(Path(), target_is_directory=True)
    assert [str(pair.image) for pair in pairs.gather([Path()])] == ["a.webp", "b.PNG"]
    assert [str(pair.image) for pair in pairs.gather([Path()], recursive=True)] == ["a.webp", "b.PNG", "sub/c.jpg"]
    assert [str(pair.image) for pair in pairs.gather([Path("notes.txt")])] == ["notes.txt"], "as it was asked for"


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["clip"], ["clip"]),
        (["a, b(x=1, y=c(2,3))", "d"], ["a", "b(x=1, y=c(2,3))", "d"]),
        (["a,b", "b"], ["a", "b"]),
        (["a+b(x=1,y=2),c"], ["a+b(x=1,y=2)", "c"]),
    ],
)
def test_names_of_verifiers(texts: list[str], names: list[str]) -> None:
    assert command_of.specs(texts) == names


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no image": ([], "The image is missing"),
    "no such file": (["no.png"], "There is no file 'no.png'"),
    "empty folder": (["void"], "folder 'void' holds no images .* or add --recursive"),
    "empty folder, recursively": (["void", "-r"], r"holds no images \(.*\); give one that does\."),
    "table without images": (["pairs.csv"], "Row 1 of the table 'pairs.csv' has no text in a column 'image'"),
    "table of nothing": (["void.csv"], "table 'void.csv' is empty"),
    "broken table": (["broken.jsonl"], "table 'broken.jsonl' can't be read"),
    "table of numbers": (["numbers.jsonl"], "Row 1 of the table 'numbers.jsonl' is no object"),
    "unknown verifier": (["a.png", "-v", "brigth"], "Unknown verifier 'brigth'.*Did you mean 'bright'?"),
    "unknown option": (["a.png", "-v", "bright(x=1)"], "Unknown option of 'bright' 'x'"),
    "no verifier": (["a.png", "-v", "bright,,words"], "--verifier can't be 'bright,,words'"),
    "no prompt": (["a.png", "-v", "words"], r"words reads prompts, and no image carries one; .*\(--prompt\)"),
    "empty prompt": (["a.png", "-p", " "], "The prompt is empty"),
    "another verifier to sort by": (
        ["a.png", "-v", "bright", "--sort", "words"],
        "Unknown verifier to sort by 'words'",
    ),
    "none": (["a.png", "--top", "0"], "--top can't be '0'"),
    "no batch": (["a.png", "--max-batch", "x"], "--max-batch can't be 'x'"),
    "both on standard output": (["a.png", "--json", "--csv", "-"], "would both print"),
    "csv as a folder": (["a.png", "--csv", "void"], "--csv can't be 'void', which is a folder"),
    "csv within a file": (["a.png", "--csv", "a.png/x.csv"], "can't be written .* choose another with --csv"),
    "unknown device": (["a.png", "-v", "bright", "--device", "qpu"], "The device 'qpu' can't be used here"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case: str, command: Command) -> None:
    arguments, said = MISTAKES[case]
    flat(Path("a.png"), 0)
    Path("void").mkdir()
    Path("void.csv").write_text("image,prompt\n")
    Path("pairs.csv").write_text("picture,prompt\na.png,a cat\n")
    Path("broken.jsonl").write_text("{")
    Path("numbers.jsonl").write_text("3")
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("imgscale: ") and err.count("\n") == 1
    assert re.search(said, err)


def test_the_record_of_a_search_gives_the_prompt(command: Command) -> None:
    record = png.Record.model_validate(
        {
            **{"imgscale": "0", "prompt": "seven", "model": "m", "searcher": "s", "verifier": "v", "seed": 0},
            **{"budget": {}, "height": 8, "width": 8, "num_inference_steps": 1, "max_batch": 1},
            **{"stopped": "budget", "rounds": 1, "finished": True, "nfe": 1},
        }
    )
    png.write(Path("a.png"), Image.new("RGB", (8, 8)), record)
    status, out, _ = command("a.png", "-v", "words", "--json")
    assert status == 0
    assert (json.loads(out)["images"][0]["prompt"], json.loads(out)["images"][0]["scores"]) == ("seven", {"words": 5.0})
    png.write(
        Path("a.png"), Image.new("RGB", (4, 4)), record
    )  # another size than it speaks of: the text is still there
    assert json.loads(command("a.png", "-v", "words", "--json")[1])["images"][0]["prompt"] == "seven"


@pytest.mark.weights
def test_the_bundled_clip_says_that_it_knows_only_shapes(command: Command) -> None:
    flat(Path("a.png"), 128)
    status, out, err = command("a.png", "--prompt", "a cat")
    assert status == 0 and out.splitlines()[1].startswith("a.png")
    assert err.startswith("imgscale: clip is the bundled one and knows only shapes;")
    assert command("a.png", "--prompt", "a red circle")[2] == ""


def test_ctrl_c_says_what_became_of_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: Any, images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bright, "__call__", pressed)
    flat(Path("a.png"), 128)
    assert command("a.png", "-v", "bright") == (130, "", "imgscale: stopped; no score was kept.\n")
