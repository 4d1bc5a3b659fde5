"""`imgscale rerun`: make the image in a PNG once more, and say whether it came out the same.

The settings in a PNG are somebody else's words. They choose numbers and names that imgscale itself defines, and never
a place to load from: a model that isn't bundled, or a verifier with options (which may name weights), is used only if
the user names it on the command line. Output goes beside the picture or into ``--out``, under the picture's own name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgscale.app import checks
from imgscale.app.console import CANCELLED, Interrupt, complain, only_results_on_stdout, print_json
from imgscale.app.job import Job
from imgscale.budget import Budget, Price
from imgscale.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.png import Record
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler
    from imgscale.watch import Progress

NO_LIMIT = 1e9  # seconds, for a search that only the clock limited; it is stopped by its rounds instead


@dataclass(frozen=True)
class Difference:
    """How two images of one size differ.

    Args:
        pixels: How many there are.
        different: How many of them differ.
        largest: The largest difference of a colour value, of 255.
    """

    pixels: int
    different: int
    largest: int


def rerun(
    picture: Path,
    *,
    model: str | None = None,
    verifier: str | None = None,
    preview: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Reads, searches again, writes and compares.

    Args:
        picture: A PNG that `generate` wrote.
        model: Load this one instead of the recorded one.
        verifier: Use this one instead of the recorded one.
        preview: The same for what decodes previews.
        device: Where to load to.
        out: Folder to write to; the picture's own for None.
        as_json: Print one JSON object.
        quiet: Show no progress.

    Returns:
        The exit status: 0 if all pixels are the same, 1 if not, 130 if Ctrl-C ended the search early.
    """
    from imgscale import png
    from imgscale.app import outputs

    record = png.read(picture)
    before = pixels(picture)
    folder = checks.folder(picture.parent if out is None else out)
    job = job_of(record, model, verifier, preview, device)
    job.check()
    scaler = job.load(quiet)
    as_recorded(scaler, record, job)
    with Interrupt() as interrupt, only_results_on_stdout():
        output = job.run(scaler, interrupt, quiet, lambda progress: stop_again(record, progress))
        path = outputs.save_image(output, folder, f"{picture.stem}-rerun")
    if interrupt.asked and output.stopped == "cancelled":
        complain(f"stopped by {interrupt.by} after {output.nfe} of {record.nfe} NFE, so there is nothing to compare.")
        return CANCELLED
    found, changed = difference(before, output.images[0]), _changed(record, png.Record.of(output))
    if as_json:
        print_json(
            {
                "picture": str(picture),
                "image": str(path),
                "identical": not found.different,
                "pixels": found.pixels,
                "different_pixels": found.different,
                "largest_difference": found.largest,
                "changed": changed,
                "nfe": output.nfe,
                "seconds": output.ledger.seconds,
                "scores": png.finite(output.scores),
            }
        )
    else:
        print(verdict(found, changed))
        print(f"Wrote {path}")
    return int(found.different > 0)


def job_of(
    record: Record,
    model: str | None = None,
    verifier: str | None = None,
    preview: str | None = None,
    device: str | None = None,
) -> Job:
    """The search that a record describes, with nothing in it that would load from a place the record names.

    Raises:
        UserError: It needs something that only the user may name.
    """
    from imgscale import registry
    from imgscale.early_exit import Rule
    from imgscale.models import bundled

    if model is None and record.model not in bundled():
        raise UserError(
            f"The picture was made with the model {record.model!r}, which isn't bundled, and settings in a picture may"
            " not say what to load; if you have it and trust it, name it with --model."
        )
    if verifier is None and "(" in record.verifier:
        raise UserError(
            f"The picture was judged by the verifier {record.verifier!r}, whose options may say what to load; if you"
            f" trust them, add --verifier {record.verifier!r}."
        )
    if preview is None and record.preview not in ("full", "tiny", "linear"):
        raise UserError(
            f"The picture's previews were decoded by {record.preview!r}, and settings in a picture may not say what to"
            " load; if you have it and trust it, name it with --preview."
        )
    for name, value in record.pipeline_arguments.items():
        if isinstance(value, str) and not re.fullmatch(r"(negative_)?prompt_\d", name):
            raise UserError(
                f"The picture was made with the pipeline argument {name}={value!r}, which rerun doesn't pass on; make"
                " the image again in Python."
            )
    known = {entry.name for entry in registry.verifier}
    limits = {name: limit for name, limit in record.budget if limit is not None and name != "seconds"}
    dtype = record.pipeline.get("dtype")
    return Job(
        prompt=record.prompt,
        negative=record.negative_prompt,
        model=model or record.model,
        searcher=record.searcher,
        guide=record.guide,
        options=record.options,
        verifier=verifier or record.verifier,
        report=tuple(name for name in record.report if name in known),
        budget=Budget(**(limits or {"seconds": NO_LIMIT})),
        seed=record.seed,
        steps=record.num_inference_steps,
        guidance=record.guidance_scale,
        height=record.height,
        width=record.width,
        device=device,
        dtype=dtype if isinstance(dtype, str) and dtype in checks.DTYPES else None,
        max_batch=record.max_batch,
        exact=record.exact,
        arguments=record.pipeline_arguments,
        plain=False,
        preview=preview or record.preview,
        verifier_timeout=record.verifier_timeout,
        early_exit="off" if record.early_exit is None else Rule.from_dict(record.early_exit.model_dump()),
    )


def as_recorded(scaler: Scaler, record: Record, job: Job) -> None:
    """Lets a model know what it knew when a picture was made, so that a search decides as it did then."""
    from imgscale.usefulness import Usefulness

    if record.distilled is not None:
        scaler.settings = replace(scaler.settings, distilled=record.distilled, path=record.path)
    scaler.usefulness = {}  # not what has been measured since
    if record.usefulness is not None:
        curves = tuple(record.usefulness.spread), tuple(record.usefulness.foresight)
        scaler.usefulness[job.verifier] = Usefulness(*curves)
    if record.price is not None:  # another machine may reckon otherwise
        scaler.price = Price(**dict(record.price))


def stop_again(record: Record, progress: Progress) -> None:
    """Ends a search where the clock or Ctrl-C ended the recorded one; everything else ends by itself as it did."""
    if record.stopped in ("deadline", "cancelled") and progress.rounds[0] >= record.rounds:
        progress.cancel(finish=record.stopped == "deadline")


def pixels(picture: Path) -> Image:
    """The image in a PNG whose size `png.read` has checked, RGB.

    Raises:
        UserError: It is damaged.
    """
    from PIL import Image

    try:
        with Image.open(picture, formats=["PNG"]) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"The pixels of {str(picture)!r} are damaged ({error}); give an intact copy.") from error


def difference(a: Image, b: Image) -> Difference:
    """How two images of one size differ."""
    import numpy as np

    gaps = np.abs(np.asarray(a, np.int16) - np.asarray(b.convert("RGB"), np.int16)).max(-1)
    return Difference(gaps.size, int((gaps > 0).sum()), int(gaps.max()))


def _changed(before: Record, after: Record) -> dict[str, Any]:
    """What is different about this machine: name to [then, now]."""
    then, now = {"imgscale": before.imgscale, **before.versions}, {"imgscale": after.imgscale, **after.versions}
    return {name: [then.get(name), now[name]] for name in now if then.get(name) != now[name]}


def compare(record: Record, before: Image, output: SearchOutput) -> str:
    """How a picture made again compares with the one before, in one sentence."""
    from imgscale import png

    if before.size != output.images[0].size:
        return "Different: the sizes aren't the same."
    return verdict(difference(before, output.images[0]), _changed(record, png.Record.of(output)))


def verdict(found: Difference, changed: dict[str, Any]) -> str:
    """How two images differ, and what may have changed since, in one sentence."""
    if not found.different:
        return f"Identical: all {found.pixels} pixels are the same."
    because = ", ".join(f"{name} {then} then and {now} now" for name, (then, now) in changed.items())
    return (
        f"Different: {found.different} of {found.pixels} pixels, by up to {found.largest} of 255"
        f" ({because or 'with the same versions: another device, or other weights'})."
    )
