"""PNG files with settings: what is written is read back, and nothing hostile gets through."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from imgscale import files, png
from imgscale.errors import UserError

IMAGE = Image.new("RGB", (16, 8), (10, 20, 30))


def record(**changes: Any) -> png.Record:
    """A small valid record with some fields changed."""
    values: dict[str, Any] = {
        "imgscale": "0.1.0",
        "prompt": "two red circles",
        "model": "shapes-flow",
        "searcher": "rbf",
        "options": {"steps": 8, "kernel": "sde", "explore": 0.5, "starts": None},
        "verifier": "clip",
        "report": ["shapes"],
        "budget": {"nfe": 200},
        "seed": 2**63 - 1,
        "height": 8,
        "width": 16,
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "max_batch": 32,
        "pipeline": {"scheduler": "FlowMatchEulerDiscreteScheduler", "dtype": "float32"},
        "stopped": "budget",
        "rounds": 17,
        "finished": True,
        "nfe": 200,
        "ledger": {"nfe": 200, "seconds": 1.5},
        "scores": {"clip": 0.25, "shapes": None},
        "seeds": [3],
    }
    return png.Record.model_validate({**values, **changes})


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I4s", len(data), kind) + data + struct.pack(">I", zlib.crc32(kind + data))


def with_text(path: Path, *texts: bytes, keyword: bytes = b"imgscale", header: bytes | None = None) -> Path:
    """Writes a PNG with these texts in chunks of one keyword, straight after its header."""
    png.write(path, IMAGE)
    data = path.read_bytes()
    header = data[8:33] if header is None else header
    chunks = b"".join(chunk(b"tEXt", keyword + b"\0" + text) for text in texts)
    path.write_bytes(data[:8] + header + chunks + data[33:])
    return path


def as_text(**changes: Any) -> bytes:
    """The record as JSON, with fields set to anything at all."""
    return json.dumps({**record().model_dump(mode="json"), **changes}).encode()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    before = record(prompt="zwei rote Kreise, 赤い丸\n\U0001f534 [bold]", negative_prompt="blurry")
    png.write(tmp_path / "a.png", IMAGE, before)
    assert png.read(tmp_path / "a.png") == before
    with Image.open(tmp_path / "a.png") as image:
        assert image.tobytes() == IMAGE.tobytes()


def test_viewers_find_parameters(tmp_path: Path) -> None:
    png.write(tmp_path / "a.png", IMAGE, record(prompt="ein Kreis: größer, bitte", negative_prompt="a blur"))
    with Image.open(tmp_path / "a.png") as image:
        prompt, negative, last = image.info["parameters"].splitlines()
    assert prompt == "ein Kreis: größer, bitte"
    assert negative == "Negative prompt: a blur"
    assert last.startswith(
        "Steps: 4, Sampler: FlowMatchEulerDiscreteScheduler, CFG scale: 3.5, Seed: 9223372036854775807"
    )
    assert "Size: 16x8, Model: shapes-flow" in last
    assert "Scores: clip 0.2500" in last


def test_values_with_commas_are_quoted_in_parameters() -> None:
    text = png.parameters(record(verifier="clip(model=a,b)"))
    assert 'Verifier: "clip(model=a,b)"' in text


def test_the_plain_image_tells_of_no_search() -> None:
    assert "Searcher" in png.parameters(record())
    assert "Searcher" not in png.parameters(record(), searched=False)


def test_same_search_ignores_what_a_machine_does_and_nothing_else() -> None:
    assert record().same_search(record(ledger={"seconds": 9.0}, versions={"torch": "9"}, scores={}, report=[]))
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"prompt": "b"},
        {"options": {}},
        {"stopped": "cancelled"},
        {"rounds": 3},
    ]
    for change in changes:
        assert not record().same_search(record(**change))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "seed as text": ({"seed": "0"}, "seed"),
    "seed as bool": ({"seed": True}, "seed"),
    "seed with a fraction": ({"seed": 0.5}, "seed"),
    "seed below 0": ({"seed": -1}, "seed"),
    "seed too large": ({"seed": 2**63}, "seed"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "endless prompt": ({"prompt": "x" * 10_001}, "prompt"),
    "prompt as list": ({"prompt": ["a"]}, "prompt"),
    "no steps": ({"num_inference_steps": 0}, "num_inference_steps"),
    "a million steps": ({"num_inference_steps": 10**6}, "num_inference_steps"),
    "huge side": ({"height": 10**9}, "height"),
    "huge batch": ({"max_batch": 10**9}, "max_batch"),
    "budget below 0": ({"budget": {"nfe": -5}}, "budget.nfe"),
    "unknown limit": ({"budget": {"dollars": 5}}, "budget.dollars"),
    "option that holds code": ({"options": {"n": {"__reduce__": ["os.system", "true"]}}}, "options.n"),
    "pipeline argument that holds a list": ({"pipeline_arguments": {"image": ["/etc/passwd"]}}, "pipeline_arguments"),
    "unknown reason": ({"stopped": "bored"}, "stopped"),
    "unknown field": ({"trust_remote_code": True}, "trust_remote_code"),
    "another format": ({"format": 2}, "format"),
    "other size than the picture": ({"height": 16}, "16x16"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_fields_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, named = HOSTILE[case]
    path = with_text(tmp_path / "a.png", as_text(**changes))
    with pytest.raises(UserError, match=named):
        png.read(path)


def test_a_valid_record_passes_the_same_way(tmp_path: Path) -> None:
    assert png.read(with_text(tmp_path / "a.png", as_text())) == record()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[1, 2]",
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"seed":' * 50_000,
        as_text()[:-1] + b', "guidance_scale": NaN}',
        as_text()[:-1] + b', "guidance_scale": 1e999}',
        b"!!python/object/apply:os.system ['true']",
    ],
    ids=["empty", "open", "null", "list", "not UTF-8", "deep list", "deep object", "NaN", "infinity", "YAML"],
)
def test_text_that_is_no_record_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be used"):
        png.read(with_text(tmp_path / "a.png", text))


def test_settings_must_be_there_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no imgscale settings"):
        png.read(with_text(tmp_path / "none.png"))
    with pytest.raises(UserError, match="no imgscale settings"):
        png.read(with_text(tmp_path / "foreign.png", b"a cat\nSteps: 20, Seed: 1", keyword=b"parameters"))
    with pytest.raises(UserError, match="more than once"):
        png.read(with_text(tmp_path / "twice.png", as_text(), as_text(seed=5)))


def test_sizes_are_capped_before_anything_is_decoded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="text of 1100010 bytes"):
        png.read(with_text(tmp_path / "long.png", b"x" * 1_100_001))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    with pytest.raises(UserError, match="60000x60000 pixels"):
        png.read(with_text(tmp_path / "bomb.png", as_text(), header=header))


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    png.write(path, IMAGE, record())
    data = path.read_bytes()
    for length in (0, 4, 8, 20, 40, len(data) // 2, len(data) - 12):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match="is no PNG|damaged or cut off"):
            png.read(path)
    at = data.index(b"rbf")
    path.write_bytes(data[:at] + b"abc" + data[at + 3 :])  # a changed text no longer fits its checksum
    with pytest.raises(UserError, match="damaged"):
        png.read(path)
    path.write_bytes(b"GIF89a" + data)
    with pytest.raises(UserError, match="is no PNG"):
        png.read(path)
    with pytest.raises(UserError, match="No such file"):
        png.read(tmp_path / "missing.png")
    with pytest.raises(UserError, match="is a folder"):
        png.read(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    png.write(path, IMAGE, record())
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        png.write(path, IMAGE, record(seed=1))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    files.write(tmp_path / "a", b"1")
    (tmp_path / "b").write_bytes(b"1")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
