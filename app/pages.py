"""What our pages share: a design for light and dark, pictures inside them, and texts to copy.

A page is one file with everything in it: it needs no network, and looks the same wherever it is opened.
"""

from __future__ import annotations

import base64
import io
import json
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

TINY = 128  # pixels: up to here each is shown as a square
DIALOG = """<dialog aria-label="One image"><div class="bar">
<button id="back" type="button" aria-label="The one before">←</button>
<button id="on" type="button" aria-label="The next one">→</button>
<span class="copies"></span><button id="close" type="button">Close</button></div><div class="inside"></div></dialog>"""


def document(title: str, body: str, *, package: str, data: Any) -> str:
    """A page.

    Args:
        title: Its title, as text.
        body: HTML.
        package: Where its `page.css` and `page.js` are, which follow the shared ones.
        data: Anything that JSON can hold; the script finds it as ``data``.
    """
    style = _shipped("imgscale.app", "pages.css") + _shipped(package, "page.css")
    script = _shipped("imgscale.app", "pages.js") + _shipped(package, "page.js")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        '<button id="theme" type="button" title="Light or dark" aria-label="Light or dark">◐</button>\n'
        f"{body}\n{DIALOG}\n"
        f'<script type="application/json" id="data">{in_script(data)}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _shipped(package: str, name: str) -> str:
    return (resources.files(package) / name).read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """JSON that nothing inside can end the script element of."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def uri(data: bytes, kind: str) -> str:
    """A data URI of an image file; ``kind`` is "png" or "jpeg"."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def embedded(image: Image, side: int, quality: int = 85) -> tuple[str, bool]:
    """An image as a data URI, shrunk to ``side`` pixels, and whether its pixels should be shown as squares."""
    small = image.convert("RGB")
    tiny = max(small.size) <= TINY
    small.thumbnail((side, side))
    data = io.BytesIO()
    if tiny and side >= TINY:
        small.save(data, "PNG", optimize=True)
        return uri(data.getvalue(), "png"), True
    small.save(data, "JPEG", quality=quality)
    return uri(data.getvalue(), "jpeg"), tiny
