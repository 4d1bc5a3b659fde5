"""What stands before gradio's own server: it fetches nothing from elsewhere, and neither does the page."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

LARGEST = 2**20  # bytes of a request that isn't an upload; gradio itself limits those
FETCHES = re.compile(r"/(file=https?:|proxy=)", re.IGNORECASE)  # gradio would get these for anybody who asks
HEADERS = (
    # All that the page shows comes from here or is made in it: no fonts, scripts or beacons of others.
    (
        b"content-security-policy",
        b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:;"
        b" style-src 'self' 'unsafe-inline'; connect-src 'self' data: blob:; frame-ancestors 'self';"
        b" form-action 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class Guard:
    """An ASGI application around another.

    Args:
        app: Gradio's.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        if FETCHES.search(scope["path"]):
            await _refuse(headed, 404, "This demo fetches nothing from elsewhere.")
            return
        if scope["method"] != "POST" or scope["path"].rstrip("/").endswith("/upload"):
            await self._app(scope, receive, headed)
            return
        body = await _read(receive)
        if body is None:
            await _refuse(headed, 413, f"A request may have {LARGEST} bytes.")
        elif _names_url(body):
            await _refuse(headed, 400, "Upload the file: this demo fetches nothing from elsewhere.")
        else:
            await self._app(scope, _again(body, receive), headed)


async def _read(receive: Receive) -> bytes | None:
    """The body of a request, or None if it is too large."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > LARGEST:
            return None
        if not message.get("more_body"):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read, and then what comes after it."""
    given = False

    async def give() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


def _names_url(body: bytes) -> bool:
    """Whether there is a file in it that lies elsewhere."""
    try:
        found = [json.loads(body)]
    except (ValueError, RecursionError):
        return False  # gradio refuses it, too
    while found:
        value = found.pop()
        if isinstance(value, dict):
            if re.match(r"\s*[a-z]+://", str(value.get("path", "")), re.IGNORECASE):
                return True
            found += value.values()
        elif isinstance(value, list):
            found += value
    return False


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
