"""The layouts. Each takes images and a folder to fill, and returns notes on what isn't as one might think.

What each evaluator reads, and where that is written, is in docs/export.md.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from imgscale.app.export.folder import Folder
from imgscale.app.export.pictures import Picture, by_prompt
from imgscale.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_NAME = 255  # bytes, of a file
ITEM = ("item_id", "id", "prompt_id")  # what DPG-Bench's prompts are named by
Layout = Callable[[Sequence[Picture], Folder], list[str]]


def geneval(pictures: Sequence[Picture], folder: Folder) -> list[str]:
    """``00000/metadata.jsonl``, which is the row, and ``00000/samples/0000.png``; the folder is the prompt's number."""
    rows = by_prompt(pictures)
    for images in rows.values():
        if "tag" not in images[0].prompt.columns:
            raise UserError(
                f"Row {images[0].prompt.row} of the prompts has no 'tag', which GenEval's evaluator reads; make the run"
                " from its evaluation_metadata.jsonl, or choose another --format."
            )
    for number, images in rows.items():
        row = {**images[0].prompt.columns, "prompt": images[0].prompt.text}
        folder.write(f"{number:05d}/metadata.jsonl", json.dumps(row, ensure_ascii=False).encode() + b"\n")
        for i, image in enumerate(images):
            folder.copy(f"{number:05d}/samples/{i:04d}.png", image.path)
    return _uneven(rows)


def t2i_compbench(pictures: Sequence[Picture], folder: Folder) -> list[str]:
    """``samples/{prompt}_{i:06d}.png``, counted over all images; ``changes.csv`` says which prompts were changed."""
    ordered = [image for images in by_prompt(pictures).values() for image in images]
    changed: dict[str, str] = {}
    for i, image in enumerate(ordered):
        ending = f"_{i:06d}.png"
        name = file_name(image.prompt.text, LONGEST_NAME - len(ending))
        folder.copy(f"samples/{name}{ending}", image.path)
        if name != image.prompt.text:
            changed[image.prompt.text] = name
    if not changed:
        return []
    folder.write("changes.csv", table([{"prompt": prompt, "name": name} for prompt, name in changed.items()]))
    return [
        f"{len(changed)} prompts aren't what stands in the names of their files, which the evaluator reads instead of"
        " them: a name can't hold every character, nor more than 255 bytes; changes.csv lists them."
    ]


def dpg_bench(pictures: Sequence[Picture], folder: Folder) -> list[str]:
    """``images/{item}.png``, two by two images of an item, or one alone where there are no more."""
    from PIL import Image

    items: dict[str, list[Picture]] = {}
    for picture in pictures:
        items.setdefault(_item(picture), []).append(picture)
    most = min(4, min(map(len, items.values())))
    size: tuple[int, int] | None = None
    for item, images in items.items():
        parts = []
        for image in images[:most]:
            with Image.open(image.path, formats=["PNG"]) as opened:
                parts.append(opened.convert("RGB"))
        size = size or parts[0].size
        odd = next((part.size for part in parts if part.size != size or part.width != part.height), None)
        if odd:
            raise UserError(
                f"DPG-Bench's evaluator cuts all grids at one --resolution, and an image of item {item!r} has"
                f" {odd[0]}x{odd[1]} pixels; it needs square images of one size."
            )
        folder.write(f"images/{item}.png", _png(_grid(parts)))
    assert size is not None
    said = f"evaluate with --image-root-path …/images --pic-num {most} --resolution {size[0]}"
    left = sum(max(0, len(images) - most) for images in items.values())
    return [said, *([f"{left} images have no place in grids of {most}"] if left else [])]


def imagefolder(pictures: Sequence[Picture], folder: Folder) -> list[str]:
    """``train/000000.png`` and ``train/metadata.jsonl``, which `datasets.load_dataset` reads."""
    lines = []
    for i, picture in enumerate(pictures):
        name = f"{i:06d}.png"
        folder.copy(f"train/{name}", picture.path)
        row = json.dumps(dict(picture.prompt.columns), ensure_ascii=False)  # its own columns may be of any kind
        values = {"file_name": name, **picture.values, "row_json": row}
        lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False))
    folder.write("train/metadata.jsonl", "".join(f"{line}\n" for line in lines).encode())
    return []


LAYOUTS: dict[str, Layout] = {
    "geneval": geneval,
    "t2i-compbench": t2i_compbench,
    "dpg-bench": dpg_bench,
    "imagefolder": imagefolder,
}


def file_name(prompt: str, longest: int) -> str:
    """A prompt as the beginning of a file name, changed as little as can be.

    The evaluators take what stands before the first underscore for the prompt, and one what stands before ".png".

    Args:
        prompt: Any text.
        longest: Bytes of UTF-8.
    """
    banned = r"[\x00-\x1f\x7f/\\_]" if os.name != "nt" else r'[\x00-\x1f\x7f/\\_<>:"|?*]'
    text = re.sub(rf"(?:\s*{banned}\s*)+", " ", prompt).replace(".png", " png")
    text = text.encode()[:longest].decode(errors="ignore") if len(text.encode()) > longest else text
    return text.strip() or "untitled"


def table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A CSV with all columns that any row has; lists and objects are JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _flat(value) for name, value in row.items()})
    return text.getvalue().encode()


def _flat(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else value


def _item(picture: Picture) -> str:
    """The item that an image is of, which must be a plain name.

    Raises:
        UserError: The row has none, or it is no name that the evaluator could find again.
    """
    for name in ITEM:
        if (value := picture.prompt.columns.get(name)) not in (None, ""):
            item = str(value)
            if not re.fullmatch(r"[\w-]{1,200}", item):
                raise UserError(
                    f"Row {picture.prompt.row} of the prompts has the {name} {item[:80]!r}, and DPG-Bench's grids are"
                    " named by it; give letters, digits, hyphens and underscores only."
                )
            return item
    raise UserError(
        f"Row {picture.prompt.row} of the prompts has none of the columns {', '.join(ITEM)}, and DPG-Bench's grids are"
        " named by it; make the run from a table that has one."
    )


def _grid(parts: Sequence[Image]) -> Image:
    """One image as it is; up to four in two rows, left to right."""
    from PIL import Image

    if len(parts) == 1:
        return parts[0]
    side = parts[0].width
    sheet = Image.new("RGB", (2 * side, 2 * side))
    for i, part in enumerate(parts):
        sheet.paste(part, (i % 2 * side, i // 2 * side))
    return sheet


def _png(image: Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _uneven(rows: Mapping[int, Sequence[Picture]]) -> list[str]:
    counts = sorted({len(images) for images in rows.values()})
    return [f"rows have from {counts[0]} to {counts[-1]} images, and those with more weigh more"] if counts[1:] else []
