"""Images as verifiers want them, from files, PIL images and tensors; and the prompts that files carry.

Files are untrusted: only formats that Pillow decodes by itself are opened, and sizes are capped before anything is
decoded. Colour profiles are ignored, as the preprocessing of published verifiers ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from imgscale import png
from imgscale.errors import UserError

Source = str | Path | Image.Image | Tensor

SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MAX_PIXELS = png.MAX_PIXELS
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not EPS, which runs another program
_EXIF, _USER_COMMENT = 0x8769, 0x9286  # tags


class Unreadable(Exception):
    """Why an image can't be used, in a few words."""


def look(source: Source, wants_prompt: bool = True) -> tuple[tuple[int, int], str | None]:
    """Width and height as stored, and the prompt that the image carries, or None; no pixel is decoded.

    Args:
        source: A path, a PIL image, or a tensor.
        wants_prompt: Whether to look for a prompt: imgscale's own record, A1111's `parameters`, or the same text as the
            user comment of a JPEG or WebP file.

    Raises:
        Unreadable: It is none that can be used.
    """
    if isinstance(source, Tensor):
        return (source.shape[-1], source.shape[-2]), None
    with _opened(source) as image:
        return image.size, _prompt(source, image) if wants_prompt else None


def tensor(source: Source) -> Tensor:
    """An image as float32 ``(3, h, w)`` in [0, 1], on the CPU unless it is a tensor already.

    It is upright as its EXIF orientation says; what is transparent becomes white; of an animation it is the first
    frame.

    Args:
        source: A path; a PIL image of any mode but floating point; or a tensor ``(3, h, w)`` or ``(1, h, w)``, floating
            point in [0, 1] or uint8.

    Raises:
        Unreadable: It is none that can be used.
    """
    if isinstance(source, Tensor):
        return _checked(source)
    with _opened(source) as image:
        return _pixels(ImageOps.exif_transpose(image))


def to_pil(image: Tensor) -> Image.Image:
    """A PIL image of a tensor (3, h, w) in [0, 1], rounded as diffusers does."""
    pixels = (image.clamp(0, 1).permute(1, 2, 0).cpu().numpy() * 255).round().astype("uint8")
    return Image.fromarray(pixels)


def prompt_in(parameters: str) -> str | None:
    """The prompt in A1111's text: what precedes the negative prompt and the line of settings."""
    lines = parameters.strip().splitlines()
    if lines and re.match(r"Steps: \d", lines[-1]):
        lines.pop()
    end = next((i for i, line in enumerate(lines) if line.startswith("Negative prompt:")), len(lines))
    return "\n".join(lines[:end]).strip() or None


@contextmanager
def _opened(source: str | Path | Image.Image) -> Iterator[Image.Image]:
    """The image, its pixels not decoded yet; what goes wrong within this context is said in a few words."""
    try:
        if isinstance(source, Image.Image):
            yield source
            return
        Image.init()
        with Image.open(source, formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Unreadable(f"has {image.width}x{image.height} pixels, more than the {MAX_PIXELS} allowed")
            yield image
    except (Unreadable, MemoryError):
        raise
    except FileNotFoundError:
        raise Unreadable("isn't there") from None
    except UnidentifiedImageError:
        raise Unreadable("is no image of a known kind") from None
    except Image.DecompressionBombError:
        raise Unreadable(f"has more than the {MAX_PIXELS} pixels allowed") from None
    except Exception as error:  # Pillow's decoders raise whatever damaged bytes lead them to
        said = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise Unreadable(f"can't be read ({said or type(error).__name__})") from error


def _pixels(image: Image.Image) -> Tensor:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would cut off at 255
        grey = torch.from_numpy(np.asarray(image).astype(np.float32) / 65535)
        return grey.clamp(0, 1).expand(3, -1, -1).contiguous()
    if image.mode == "F":
        raise Unreadable("has pixels in floating point, whose range is unknown; save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous().float() / 255


def _checked(image: Tensor) -> Tensor:
    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise Unreadable(f"is a tensor of shape {tuple(image.shape)}; give (3, h, w)")
    if image.dtype == torch.uint8:
        image = image / 255
    elif not image.is_floating_point():
        raise Unreadable(f"is a tensor of {image.dtype}; give floating point in [0, 1] or uint8")
    image = image.float()
    if not bool(((image >= 0) & (image <= 1)).all()):
        raise Unreadable("is a tensor with values outside [0, 1]; scale it")
    return image.expand(3, -1, -1)


def _prompt(source: str | Path | Image.Image, image: Image.Image) -> str | None:
    if not isinstance(source, Image.Image) and image.format == "PNG":
        try:
            return png.read(Path(source)).prompt
        except UserError:
            pass  # no record of ours, or one that another program changed: the text may still be there
    text = image.info.get("parameters")
    if text is None and image.format != "PNG":  # a PNG would be decoded whole, since EXIF may follow the pixels
        comment = image.getexif().get_ifd(_EXIF).get(_USER_COMMENT)
        text = _comment(comment) if isinstance(comment, bytes) else None
    return prompt_in(text) if isinstance(text, str) else None


def _comment(data: bytes) -> str | None:
    """An EXIF user comment, if it is A1111's text and not some camera's."""
    for encoding in ("utf-16-be", "utf-16-le") if data.startswith(b"UNICODE\0") else ("utf-8",):
        text = data[8:].decode(encoding, "ignore")
        if re.search(r"^Steps: \d", text, re.MULTILINE):
            return text
    return None
