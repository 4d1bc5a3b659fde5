"""`imgscale serve`: any verifier over HTTP, by the protocol of `imgscale.verifiers.http`."""

from __future__ import annotations

import base64
import binascii
import hmac
import io
import json
import math
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from imgscale.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from imgscale.rewards import Verifier

PIXELS = 2**27  # in one request: 128 images of 1024 × 1024, 1.6 GB as float32
IDLE = 60.0  # seconds that a client may take between two packets


class Refused(Exception):
    """A request that gets no scores.

    Args:
        status: Of the answer.
        reason: One sentence.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves one verifier, one request at a time; others wait.

    Args:
        verifier: What scores.
        host: Where to listen: 127.0.0.1 is for this machine alone, 0.0.0.0 for all that can reach it.
        port: 0 takes a free one.
        token: What clients must show; anyone may ask if None.
        limit: Bytes of the largest request.
        quiet: Don't tell of failures on standard error.

    Raises:
        OSError: It can't listen there.
    """

    daemon_threads = True  # Ctrl-C waits for nobody
    allow_reuse_address = os.name != "nt"  # where it would share the port with another server

    def __init__(
        self,
        verifier: Verifier,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        limit: int = 2**28,
        quiet: bool = False,
    ) -> None:
        self.verifier, self.token, self.limit, self.quiet = verifier, token, limit, quiet
        self.lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def about(self) -> dict[str, Any]:
        """What it says of its verifier."""
        v = self.verifier
        bounds = None if v.range is None else [bound if math.isfinite(bound) else None for bound in v.range]
        return {"name": v.name, "range": bounds, "reads_prompt": v.reads_prompt, "identity": v.identity()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no concern of the server's."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.tell(f"{client_address[0]}: {error!r}")

    def tell(self, text: str) -> None:
        """One line on standard error."""
        if not self.quiet:
            print(f"imgscale: {text}", file=sys.stderr, flush=True)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "imgscale", ""
    timeout = IDLE

    _left = 0  # bytes of the body that weren't read

    def do_GET(self) -> None:
        self._answer_with(self.server.about)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        self._left = int(length) if length.isascii() and length.isdigit() else 0
        self._answer_with(self._scores)

    def _answer_with(self, work: Any) -> None:
        try:
            self._check_token()
            if self.path != "/":
                raise Refused(404, f"There is nothing at {self.path[:80]}; ask at /.")
            status, answer = 200, work()
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
        except UserError as error:
            status, answer = 422, {"error": str(error)}
        except OSError:  # the client went away
            raise
        except Exception as error:  # whatever a verifier does, the next request is served
            from imgscale.rewards import is_out_of_memory

            # Asked again, it wouldn't fit either: that status isn't tried again. A search halves its batch.
            status = 413 if is_out_of_memory(error) else 500
            answer = {"error": f"{type(error).__name__}: {error}"}
        if status >= 400:
            self._drain()
            self.server.tell(f"{self.command} from {self.client_address[0]}: {status} {answer['error'][:300]}")
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _drain(self) -> None:
        """Reads what is left of a refused request: a client that still sends would never see the answer."""
        while self._left > 0 and (part := self.rfile.read(min(self._left, 2**16))):
            self._left -= len(part)

    def _check_token(self) -> None:
        token = self.server.token
        shown = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            raise Refused(401, "The token is missing or wrong.")

    def _scores(self) -> dict[str, Any]:
        images, prompts = decode(self.headers.get_content_type(), self._body())
        with self.server.lock:
            scores = self.server.verifier(images, prompts)
        if tuple(scores.shape) != (len(images),):
            raise ValueError(f"the verifier returned shape {tuple(scores.shape)} for {len(images)} images")
        return {"scores": [score if math.isfinite(score) else None for score in scores.float().tolist()]}

    def _body(self) -> bytes:
        length = self._left
        if not length:
            raise Refused(411, "A request needs a body and its Content-Length.")
        if length > self.server.limit:
            raise Refused(413, f"A request may have {self.server.limit} bytes; send fewer images at once.")
        body = self.rfile.read(length)
        self._left = 0
        if len(body) < length:
            raise ConnectionError("the request broke off")
        return body

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line for each request."""


def decode(kind: str, body: bytes) -> tuple[Tensor, list[str]]:
    """Images ``(n, 3, h, w)`` in [0, 1], float32, and their n prompts: the inverse of `imgscale.verifiers.http.encode`.

    Args:
        kind: The content type.
        body: The request's.

    Raises:
        Refused: It isn't by the protocol.
    """
    from imgscale.verifiers.http import JSON, TENSORS

    if kind not in (JSON, TENSORS):
        raise Refused(415, f"The content type can't be {kind[:80]!r}; send {JSON} or {TENSORS}.")
    images, prompts = _from_tensors(body) if kind == TENSORS else _from_json(body)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise Refused(400, "prompts must be a list of texts.")
    if len(prompts) != len(images):
        raise Refused(400, f"There are {len(images)} images and {len(prompts)} prompts; send one for each.")
    return images, prompts


def _from_json(body: bytes) -> tuple[Tensor, Any]:
    import numpy as np
    import torch

    try:
        said = json.loads(body)
        files, prompts = said["images"], said["prompts"]
        pictures = [_picture(base64.b64decode(text, validate=True)) for text in files]
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise Refused(400, f"The body isn't {{prompts, images}} with PNG files as base64 ({error}).") from error
    if len({picture.size for picture in pictures}) > 1:
        raise Refused(400, "The images of a request must have one size.")
    if not pictures:
        return torch.zeros(0, 3, 1, 1), prompts
    width, height = pictures[0].size
    _check_pixels(len(pictures) * width * height)
    pixels = torch.from_numpy(np.stack([np.asarray(picture.convert("RGB")) for picture in pictures]))
    return pixels.permute(0, 3, 1, 2).float() / 255, prompts


def _picture(file: bytes) -> Any:
    """A picture whose size is known, and whose pixels aren't read yet: few bytes can hold very many."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(file), formats=("PNG",))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
    _check_pixels(picture.width * picture.height)
    return picture


def _from_tensors(body: bytes) -> tuple[Tensor, Any]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        images = load(body)["images"]
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])  # `load` leaves the metadata out
        prompts = json.loads(header["__metadata__"]["prompts"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Refused(400, f"The body is no safetensors file with images and prompts ({error}).") from error
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.float32:
        raise Refused(400, f"images can't be {images.dtype} {tuple(images.shape)}; send float32 (n, 3, h, w).")
    return images, prompts


def _check_pixels(pixels: int) -> None:
    if pixels > PIXELS:
        raise Refused(413, f"A request may have {PIXELS} pixels in all; send fewer images at once.")


def serve(
    spec: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    device: str | None = None,
    token: str | None = None,
    limit: int = 256,
    quiet: bool = False,
) -> int:
    """Serves a verifier until Ctrl-C.

    Args:
        spec: A name, or a name with options.
        host: Where to listen.
        port: Where to listen; 0 takes a free one.
        device: Where the verifier runs.
        token: Name of an environment variable with the token that clients must show.
        limit: Megabytes (2**20 bytes) of the largest request.
        quiet: Say nothing.

    Returns:
        The exit status, 0.

    Raises:
        UserError: There is no such verifier, or it can't listen there.
    """
    from imgscale import rewards, verification
    from imgscale.verifiers.http import secret

    shown = None if token is None else secret(token, "imgscale serve's token")
    verifier = verification.make(spec, device=device)
    if rewards.is_ensemble(verifier):
        raise UserError(f"{spec!r} compares the images of one search, which a server doesn't know; serve its members.")
    try:
        server = Server(verifier, host, port, token=shown, limit=limit * 2**20, quiet=quiet)
    except (OSError, OverflowError) as error:
        raise UserError(f"imgscale can't listen at {host} port {port} ({error}); choose another.") from error
    try:
        with server:
            server.tell(f"{spec} is served at {server.url}; Ctrl-C ends.")
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0
