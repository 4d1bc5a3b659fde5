"""A picture's noise as a file: what makes it again in one trajectory, without the search that found it.

A search's winner has no seed where its noise was moved, mixed or drawn on the way. What it has is a last place to which
anything but the model's own ODE led it: the starting noise, or noisy latents further on. The ODE makes the picture from
there. The file is safetensors, and untrusted when it is read: every field is checked, and nothing in it is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imgscale import files
from imgscale.errors import UserError
from imgscale.images import to_pil
from imgscale.png import Record

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from imgscale.engine import Engine
    from imgscale.result import Candidate, SearchOutput

SUFFIX = ".noise.safetensors"
LARGEST = 1 << 28  # bytes of a file: latents of the largest models take some 10 MB
_TENSOR = "latents"


class Trajectory(BaseModel):
    """What the header of the file says besides the record."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    format: Literal[1] = 1
    times: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1, max_length=2000)]
    calls: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=2000)]
    steps: Annotated[int, Field(ge=1, le=2000)] | None
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    score: float | None
    pixels: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, eq=False)
class Noise:
    """What makes a picture again in one trajectory.

    Args:
        latents: float32 (*latent), on the CPU: the last place to which anything but the model's own ODE led it.
        times: Of that place, and of all that the ODE comes by from there, on the model's own path; the last is 0.
        calls: Images in each call of the network that the search made there, and in that of the decoder: last bits
            depend on it.
        steps: Where the latents are the starting noise, the ``num_inference_steps`` whose times these are: the plain
            pipeline makes the same picture of ``latents=noise.latents[None]``. Else None.
        seed: The key of the prior noise that the trajectory began with.
        score: The steering verifier's, of the picture; None where there was no number.
        pixels: SHA-256 of the picture's size and pixels.
        record: The search that found it.
    """

    latents: Tensor
    times: tuple[float, ...]
    calls: tuple[int, ...]
    steps: int | None
    seed: int
    score: float | None
    pixels: str
    record: Record

    @property
    def nfe(self) -> int:
        """Model evaluations that the picture takes."""
        return len(self.times) - 1

    @classmethod
    def of(cls, output: SearchOutput, candidate: Candidate, image: Image, path: Any, grid: Any) -> Noise:
        """That of one of a search's images.

        Args:
            output: The search's outcome.
            candidate: With its origin.
            image: The same as a picture.
            path: The model's own.
            grid: Gives the times (n + 1,) of an ordinary sample of n steps.
        """
        origin, record = candidate.origin, Record.of(output)
        assert origin is not None
        x, times, calls = origin.x, origin.times, origin.calls
        if origin.path != path or len(calls) != len(times):  # a searcher of the user's own that goes other ways
            x, times, calls = candidate.latents, (0.0,), calls[-1:] or ((1, 0),)
        n = len(times) - 1
        rows = [record.max_batch if record.exact else _together(*call, record.max_batch) for call in calls]
        return cls(
            x,
            times,
            tuple(rows),
            n if n and times == tuple(grid(n)) else None,
            candidate.seed,
            candidate.score if math.isfinite(candidate.score) else None,
            pixels(image),
            record,
        )

    def save(self, path: str | Path) -> Path:
        """Writes it, whole or not at all.

        Args:
            path: Where to, such as "picture.noise.safetensors"; its folder must exist.

        Raises:
            UserError: It can't be written.
        """
        from safetensors.torch import save

        place = Path(path).expanduser()
        header = Trajectory(
            times=list(self.times),
            calls=list(self.calls),
            **{name: getattr(self, name) for name in ("steps", "seed", "score", "pixels")},
        )
        words = {"imgscale_noise": header.model_dump_json(), "imgscale": self.record.model_dump_json()}
        try:
            files.write(place, save({_TENSOR: self.latents.contiguous()}, words))
        except OSError as error:
            raise UserError(
                f"The noise file {str(place)!r} can't be written ({error.strerror or error}); choose another place."
            ) from error
        return place

    @classmethod
    def load(cls, path: str | Path) -> Noise:
        """Reads what `save` wrote.

        Raises:
            UserError: It isn't such a file, or damaged.
        """
        from safetensors import SafetensorError, safe_open

        place = Path(path).expanduser()
        advice = "give a file that imgscale generate --save-noise wrote"
        try:
            if not place.is_file():
                raise UserError(f"{str(place)!r} is {'a folder' if place.is_dir() else 'not there'}; {advice}.")
            if place.stat().st_size > LARGEST:
                raise UserError(f"{str(place)!r} has {place.stat().st_size} bytes, more than {LARGEST}; {advice}.")
            with safe_open(place, "pt") as file:
                words, names = file.metadata() or {}, list(file.keys())
                if not {"imgscale_noise", "imgscale"} <= set(words) or names != [_TENSOR]:
                    raise UserError(f"{str(place)!r} holds no noise of imgscale; {advice}.")
                kind = file.get_slice(_TENSOR).get_dtype()
                latents: Tensor = file.get_tensor(_TENSOR).clone()  # not a view of a file that may change
            said = Trajectory.model_validate_json(words["imgscale_noise"])
            record = Record.model_validate_json(words["imgscale"])
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:100]
            raise UserError(
                f"The header of {str(place)!r} can't be used ({where}: {first['msg']}); it was written by another"
                " version of imgscale or changed since."
            ) from error
        except (SafetensorError, OSError) as error:
            why = str(getattr(error, "strerror", None) or error)
            raise UserError(f"{str(place)!r} can't be read as safetensors ({why}); {advice}.") from error
        if kind != "F32" or not bool(latents.isfinite().all()):
            raise UserError(f"The latents in {str(place)!r} aren't finite float32 numbers; {advice}.")
        times = said.times
        if times[-1] != 0 or any(a <= b for a, b in pairwise(times)) or len(said.calls) != len(times):
            raise UserError(
                f"The times in {str(place)!r} aren't those of a trajectory, which fall to 0, with a call for each;"
                f" {advice}."
            )
        return cls(latents, tuple(times), tuple(said.calls), said.steps, said.seed, said.score, said.pixels, record)


@dataclass(frozen=True)
class Remade:
    """A picture that was made again from its noise.

    Args:
        image: The picture.
        latents: float32 (*latent), on the CPU, finished.
        same: Whether all pixels are those of the picture that the search found.
        together: Whether it took calls as large as the search's, since the picture made alone had other pixels.
        nfe: Model evaluations spent.
    """

    image: Image
    latents: Tensor
    same: bool
    together: bool
    nfe: int


def remake(
    engine: Engine, model: str, noise: Noise, arguments: Mapping[str, Any], another_model: bool = False
) -> Remade:
    """The picture of a noise by one trajectory. If it differs, once more in calls as large as the search's were.

    Args:
        engine: Of the model.
        model: Its name.
        noise: What to make it of.
        arguments: Further ones of the pipeline's call, in the place of recorded ones.
        another_model: Take it though the recorded model has another name.

    Raises:
        UserError: The noise is another model's, or of another size.
    """
    record, denoiser = noise.record, engine.denoiser
    if not another_model and Path(model).name != Path(record.model).name:
        raise UserError(
            f"The noise was found with the model {record.model!r}, and this is {model!r}; load that one, or give"
            " another_model=True if you know that they are the same."
        )
    for name, value in record.pipeline_arguments.items():
        if isinstance(value, str) and name not in arguments and not re.fullmatch(r"(negative_)?prompt_\d", name):
            raise UserError(
                f"The noise was found with the pipeline argument {name}={value!r}, which a file can't hold; give it"
                " to Scaler.from_noise."
            )
    cond = denoiser.encode(
        record.prompt,
        record.negative_prompt,
        **{
            **{"height": record.height, "width": record.width, "guidance_scale": record.guidance_scale},
            **record.pipeline_arguments,
            **arguments,
        },
    )
    here = denoiser.description
    for what in ("pipeline", "path", "prediction"):
        if record.pipeline.get(what) != here.get(what):
            raise UserError(
                f"The noise is of a model whose {what} is {record.pipeline.get(what)!r}, and that of {model!r} is"
                f" {here.get(what)!r}; take the model that it was found with."
            )
    if tuple(noise.latents.shape) != cond.latent_shape:
        raise UserError(
            f"The noise has the shape {tuple(noise.latents.shape)}, and {model!r} takes {cond.latent_shape} for"
            f" {record.width}x{record.height} pixels; take the model that it was found with."
        )
    x = noise.latents[None].to(cond.device)
    spent = noise.nfe
    latents, image = engine.retrace(x, noise.times, cond, [1] * len(noise.times))
    picture = to_pil(image[0])
    same, together = pixels(picture) == noise.pixels, False
    if not same and max(noise.calls) > 1:
        latents, image = engine.retrace(x, noise.times, cond, noise.calls)
        spent += sum(noise.calls[:-1])
        again = to_pil(image[0])
        if pixels(again) == noise.pixels:
            picture, same, together = again, True, True
    return Remade(picture, latents[0].cpu(), same, together, spent)


def pixels(image: Image) -> str:
    """SHA-256 of an image's size and RGB pixels."""
    rgb = image.convert("RGB")
    return hashlib.sha256(json.dumps(rgb.size).encode() + rgb.tobytes()).hexdigest()


def _together(n: int, place: int, most: int) -> int:
    """Rows of the call with the so-manieth of n rows, as the engine divides them."""
    start = 0
    while True:
        rounds = math.ceil((n - start) / most)
        size = math.ceil((n - start) / rounds)
        if place < start + size:
            return size
        start += size
