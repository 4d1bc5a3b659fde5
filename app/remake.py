"""`imgscale rerun FILE.noise.safetensors`: make a picture again from its noise, by one trajectory, and compare.

The header of the file is somebody else's words, as the settings in a PNG are: see `imgscale.app.rerun`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import imgscale
from imgscale.app import checks
from imgscale.app.console import only_results_on_stdout, print_json
from imgscale.app.job import Job
from imgscale.errors import UserError

if TYPE_CHECKING:
    from imgscale.app.rerun import Difference
    from imgscale.noise import Noise, Remade


def refuse(**named: str | None) -> None:
    """Raises:
    UserError: An option is given that belongs to the search.
    """
    for name, value in named.items():
        if value is not None:
            raise UserError(f"--{name} is of the search, and a noise file needs none; leave it out.")


def remake(
    file: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Reads, makes, writes and compares.

    Args:
        file: That `generate --save-noise` wrote.
        model: Load this one instead of the recorded one.
        device: Where to load to.
        out: Folder to write to; the file's own for None.
        as_json: Print one JSON object.
        quiet: Show no progress.

    Returns:
        The exit status: 0 if all pixels are the same, 1 if not.
    """
    from imgscale import png
    from imgscale.app import outputs, rerun
    from imgscale.noise import SUFFIX, Noise

    noise = Noise.load(file)
    name = file.name.removesuffix(SUFFIX).removesuffix(".safetensors")
    folder = checks.folder(file.parent if out is None else out)
    job = job_of(noise, model, device)
    job.check()
    scaler = job.load(quiet)
    with only_results_on_stdout():
        made = scaler.from_noise(noise, another_model=model is not None)
    text = png.parameters(noise.record)
    path = outputs.save_picture(made.image, folder, f"{name}-rerun", text)
    found = _beside(file.with_name(f"{name}.png"), noise, made)
    now = {"imgscale": imgscale.__version__, **png.versions()}
    then = {"imgscale": noise.record.imgscale, **noise.record.versions}
    changed = {name: [then.get(name), now[name]] for name in now if then.get(name) != now[name]}
    if as_json:
        print_json(
            {
                "noise": str(file),
                "image": str(path),
                "identical": made.same,
                "pixels": made.image.width * made.image.height,
                "different_pixels": found.different if found else None,
                "largest_difference": found.largest if found else None,
                "changed": changed,
                "nfe": made.nfe,
            }
        )
    else:
        unknown = "Different: not the pixels that the noise was saved with, and their picture isn't beside it."
        print(rerun.verdict(found, changed) if found else unknown)
        print(f"Wrote {path}")
    return int(not made.same)


def job_of(noise: Noise, model: str | None, device: str | None) -> Job:
    """What loads the model, with nothing in it that would load from a place the file names.

    Raises:
        UserError: It needs something that only the user may name.
    """
    from imgscale.models import bundled

    record = noise.record
    if model is None and record.model not in bundled():
        raise UserError(
            f"The noise was found with the model {record.model!r}, which isn't bundled, and a file may not say what to"
            " load; if you have it and trust it, name it with --model."
        )
    dtype = record.pipeline.get("dtype")
    return Job(
        prompt=record.prompt,
        model=model or record.model,
        device=device,
        dtype=dtype if isinstance(dtype, str) and dtype in checks.DTYPES else None,
        max_batch=record.max_batch,
        exact=record.exact,
    )


def _beside(picture: Path, noise: Noise, made: Remade) -> Difference | None:
    """How the picture differs from the one that was saved with the noise; None where that can't be known."""
    from imgscale import png
    from imgscale.app import rerun
    from imgscale.noise import pixels

    if made.same:
        return rerun.Difference(made.image.width * made.image.height, 0, 0)
    try:
        png.read(picture)  # its size is checked before a pixel is decoded
        before = rerun.pixels(picture)
    except UserError:
        return None
    return rerun.difference(before, made.image) if pixels(before) == noise.pixels else None
