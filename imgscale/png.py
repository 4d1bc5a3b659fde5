"""PNG files that carry their settings: text that image viewers show, and a record that `imgscale rerun` reads back.

The record is untrusted when it is read: sizes are capped before anything is decoded, every field is checked, and
nothing in it is loaded or opened here. What a re-run may do with the names in it is decided in `imgscale.app.rerun`.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

import imgscale
from imgscale import files
from imgscale.errors import UserError
from imgscale.registry import composed

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.result import SearchOutput

KEYWORD = "imgscale"
MAX_RECORD = 1 << 20  # bytes of the chunk
MAX_PIXELS = 1 << 26  # 8192 x 8192
MAX_CHUNKS = 100_000
LONGEST_PROMPT = 10_000  # characters, as in `imgscale.app.checks`, which loads before pydantic
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PACKAGES = ("torch", "diffusers", "transformers", "numpy", "pillow")

Name = Annotated[str, Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(max_length=LONGEST_PROMPT)]
Side = Annotated[int, Field(ge=1, le=16384)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(gt=0, lt=2**63)] | None
Scalar = bool | int | float | Annotated[str, Field(max_length=4096)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Limits(_Strict):
    """The budget of a search; see `imgscale.budget.Budget`."""

    nfe: Limit = None
    verifier_calls: Limit = None
    decodes: Limit = None
    gradients: Limit = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    eflops: Annotated[float, Field(gt=0)] | None = None


class Prices(_Strict):
    """What the search reckoned with in eFLOPs; see `imgscale.budget.Price`."""

    text: Count
    nfe: Count
    decode: Count
    preview: Count
    score: Count


class Curves(_Strict):
    """What the search knew of the model; see `imgscale.usefulness.Usefulness`."""

    spread: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1, max_length=1000)]
    foresight: Annotated[list[float], Field(min_length=2, max_length=1001)]


class LearnedMargins(_Strict):
    """See `imgscale.calibration.Margins`."""

    centre: Annotated[list[float], Field(max_length=1000)]
    scale: Annotated[list[float], Field(max_length=1000)]
    factors: Annotated[list[tuple[Count, float]], Field(max_length=100)]


class Exit(_Strict):
    """By what rule candidates were dropped; see `imgscale.early_exit.Rule`."""

    mode: Literal["calibrated", "paper"]
    delta: float
    checks: Annotated[list[Count], Field(max_length=1000)] | None = None
    v_sup: float | None = None
    lead: Count
    audit: float
    at: Annotated[list[Count], Field(max_length=1000)]
    steps: Count
    top: float | None = None
    margins: dict[Literal["fresh", "kin"], LearnedMargins] = {}


class Chosen(_Strict):
    """What `model="auto"` chose, and what it expected; see `imgscale.automatic.Decision`."""

    action: Name
    expected: float | None
    uncertainty: float
    propensity: float
    quality_weight: float


class Record(_Strict):
    """How an image was made: what was asked for, and how it went.

    The fields are those of `SearchOutput.settings`, and of the output itself. A score that isn't finite is None.
    """

    format: Literal[1] = 1
    imgscale: Annotated[str, Field(max_length=100)]
    prompt: Annotated[Text, Field(min_length=1)]
    negative_prompt: Text | None = None
    model: Name
    searcher: Name
    options: Annotated[dict[Name, Scalar], Field(max_length=100)] = {}
    guide: Name | None = None
    usefulness: Curves | None = None
    verifier: Name
    report: Annotated[list[Name], Field(max_length=100)] = []
    budget: Limits
    price: Prices | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    height: Side
    width: Side
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)]
    guidance_scale: float | None = None
    distilled: bool | None = None
    path: Literal["own", "linear", "vp"] | None = None
    preview: Name = "full"
    preview_decoder: Name | None = None
    verifier_timeout: Annotated[float, Field(gt=0)] | None = None
    early_exit: Exit | None = None
    exits: dict[Name, Count] = {}
    auto: Chosen | None = None
    max_batch: Annotated[int, Field(ge=1, le=4096)]
    exact: bool = False
    pipeline_arguments: Annotated[dict[Name, Scalar], Field(max_length=100)] = {}
    pipeline: dict[str, JsonValue] = {}
    verifiers: dict[str, JsonValue] = {}

    stopped: Literal["budget", "complete", "ceiling", "deadline", "cancelled", "verifier"]
    rounds: Count
    finished: bool
    nfe: Count
    ledger: dict[Name, Annotated[float, Field(ge=0)]] = {}
    scores: dict[Name, float | None] = {}
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(max_length=1000)] = []
    versions: dict[Name, Annotated[str, Field(max_length=100)]] = {}

    @classmethod
    def of(cls, output: SearchOutput) -> Record:
        """The record of a search's outcome."""
        settings = output.settings
        values = {
            **{name: _without_folders(value) for name, value in settings.items()},
            "prompt": output.prompt,
            "negative_prompt": settings["negative_prompt"],
            "options": _scalars(settings["options"]),
            "pipeline_arguments": _scalars(settings["pipeline_arguments"]),
            "imgscale": imgscale.__version__,
            "finished": output.finished,
            "ledger": output.ledger.as_dict(),
            "scores": finite(output.scores),
            "seeds": output.seeds,
            "versions": versions(),
        }
        return cls.model_validate_json(json.dumps(values, default=str, allow_nan=False))

    def same_search(self, other: Record) -> bool:
        """Whether the other one asks for the same image: the same settings, and the same end."""
        return self.model_dump(exclude=_INCIDENTAL) == other.model_dump(exclude=_INCIDENTAL)


_INCIDENTAL = {"auto", "imgscale", "ledger", "scores", "versions", "verifiers", "report", "preview_decoder"}


def finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Scores as JSON can hold them: None for −inf, which means that there was no score."""
    return {name: score if math.isfinite(score) else None for name, score in scores.items()}


def _without_folders(value: Any) -> Any:
    """The value with absolute paths cut to their last part: pictures are shared, and folders tell who made them."""
    if isinstance(value, Mapping):
        return {name: _without_folders(item) for name, item in value.items()}
    return f"…/{Path(value).name}" if isinstance(value, str) and Path(value).is_absolute() else value


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, bool | int | float | str | None) else str(v) for k, v in values.items()}


def parameters(record: Record, searched: bool = True) -> str:
    """The settings as the text that A1111 writes, which image viewers know to show.

    Args:
        record: Of a search.
        searched: Whether the image is what it found, and not the plain one beside it.
    """
    fields: dict[str, Any] = {
        "Steps": record.num_inference_steps,
        "Sampler": record.pipeline.get("scheduler", "unknown"),
        "CFG scale": "default" if record.guidance_scale is None else f"{record.guidance_scale:g}",
        "Seed": record.seed,
        "Size": f"{record.width}x{record.height}",
        "Model": _quoted(record.model),
        "Version": f"imgscale {record.imgscale}",
    }
    searching = {
        "Searcher": _quoted(
            " ".join([composed(record.searcher, record.guide), *(f"{k}={v}" for k, v in record.options.items())])
        ),
        "Verifier": _quoted(record.verifier),
        "NFE": record.nfe,
        "Scores": _quoted(", ".join(f"{k} {v:.4f}" for k, v in record.scores.items() if v is not None)),
    }
    fields |= searching if searched else {}
    lines = [record.prompt, *([f"Negative prompt: {record.negative_prompt}"] if record.negative_prompt else [])]
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in fields.items())])


def write(path: Path, image: Image, record: Record | None = None, text: str | None = None) -> None:
    """Writes a PNG, whole or not at all.

    Args:
        path: Where to; its folder must exist.
        image: What to write.
        record: How it was made, to be read back by `read`.
        text: What viewers show; derived from the record if there is one.

    Raises:
        OSError: It can't be written.
    """
    from PIL.PngImagePlugin import PngInfo

    chunks = PngInfo()
    if record is not None:
        text = parameters(record) if text is None else text
        chunks.add_text(KEYWORD, json.dumps(record.model_dump(mode="json"), allow_nan=False))
    if text is not None:
        chunks.add_text("parameters", text)
    data = io.BytesIO()
    image.save(data, "PNG", pnginfo=chunks)
    files.write(path, data.getvalue())


def read(path: Path) -> Record:
    """The record in a PNG.

    Raises:
        UserError: There is none, it isn't imgscale's, or the file is damaged.
    """
    try:
        with path.open("rb") as file:
            size, found = _scan(file)
    except IsADirectoryError as error:
        raise UserError(f"{str(path)!r} is a folder; give a PNG that imgscale generate wrote.") from error
    except OSError as error:
        raise UserError(
            f"{str(path)!r} can't be read ({error.strerror or error}); give a PNG that is there."
        ) from error
    except _Damaged as error:
        raise UserError(f"{str(path)!r} {error}; give a PNG that imgscale generate wrote.") from error
    if len(found) != 1:
        how_many = "no imgscale settings" if not found else "imgscale settings more than once"
        raise UserError(
            f"{str(path)!r} holds {how_many}; give a PNG that imgscale generate wrote and no other program saved anew."
        )
    try:
        record = Record.model_validate_json(found[0])
    except ValidationError as error:
        raise UserError(
            f"The imgscale settings in {str(path)!r} can't be used ({_first(error)}); they were written by another"
            " version of imgscale or changed since."
        ) from error
    if (record.width, record.height) != size:
        raise UserError(
            f"The imgscale settings in {str(path)!r} speak of {record.width}x{record.height} pixels and the picture has"
            f" {size[0]}x{size[1]}; give the one that imgscale generate wrote."
        )
    return record


class _Damaged(Exception):
    """Why a file is no PNG to read from."""


def _scan(file: BinaryIO) -> tuple[tuple[int, int], list[bytes]]:
    """Width and height of a PNG, and the texts of all its chunks by our keyword; no pixel is decoded."""
    if file.read(8) != _SIGNATURE:
        raise _Damaged("is no PNG")
    size: tuple[int, int] | None = None
    found: list[bytes] = []
    for _ in range(MAX_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IEND":
            if size is None:
                break
            return size, found
        if kind not in (b"IHDR", b"tEXt"):
            file.seek(length + 4, io.SEEK_CUR)
            continue
        if length > MAX_RECORD:
            raise _Damaged(f"holds a text of {length} bytes, more than the {MAX_RECORD} allowed")
        data, check = file.read(length), file.read(4)
        if len(data) < length or check != struct.pack(">I", zlib.crc32(kind + data)):
            break
        if kind == b"IHDR" and length == 13:
            size = struct.unpack(">II", data[:8])
            if size[0] * size[1] > MAX_PIXELS:
                raise _Damaged(f"has {size[0]}x{size[1]} pixels, more than the {MAX_PIXELS} allowed")
        elif data.startswith(KEYWORD.encode() + b"\0"):
            found.append(data.partition(b"\0")[2])
    raise _Damaged("is damaged or cut off")


def _first(error: ValidationError) -> str:
    """The first thing wrong with a record, in a few words."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:100]
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _quoted(value: Any) -> str:
    """A value of the last line of `parameters`, quoted where a comma or colon would cut it in two."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if set(text) & set(',:\n"') else text


def versions() -> dict[str, str]:
    """Those of the packages here that pixels may depend on."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
