"""A verifier behind HTTP: one POST for each batch, by a small protocol. `imgscale serve` is a server that speaks it.

Request: ``POST url``, and ``Authorization: Bearer …`` where there is a token. The body is one of two:

- ``application/json``: ``{"prompts": [n texts], "images": [n PNG files as base64]}``, 8 bits a channel.
- ``application/x-safetensors``: a safetensors file with the tensor ``images``, float32 ``(n, 3, h, w)`` in [0, 1], and
  the metadata ``prompts``, a JSON list of n texts.

Answer: 200 and ``{"scores": [n numbers]}``, higher is better, null for an image that got none. Otherwise a status that
says what is wrong and, if possible, ``{"error": "one sentence"}``: 422 for a mistake of the user's (such as a prompt
that the verifier can't read), which ends the search; 429 and 5xx for what may pass, which is tried again.

``GET url`` may tell ``{"name": …, "range": [low, high], "reads_prompt": …, "identity": {…}}``, all of them optional,
null for a bound that isn't finite.
"""

from __future__ import annotations

import base64
import io
import ipaddress
import json
import math
import os
import re
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import monotonic, sleep
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import torch
from PIL import Image
from torch import Tensor

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import check

JSON, TENSORS = "application/json", "application/x-safetensors"
LIMIT = 2**20  # bytes of an answer
PAUSE, LONGEST = 0.5, 30.0  # seconds before the first retry, then twice as long each time, but no longer than this
PATIENCE = 5.0  # seconds to ask a server about itself


class Unanswered(RuntimeError):
    """The server gave no scores; the message says why."""


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    headers: Any


@verifier("http")
class Http:
    """Scores from a server of your own, in any language: PNG or raw tensors over HTTP or HTTPS.

    HTTPS certificates are always checked, against the system's authorities or those of SSL_CERT_FILE. Proxies aren't
    used and redirects aren't followed. Images never touch the disk here.

    Args:
        url: Where it listens, such as http://127.0.0.1:8765/. Needed. Without a password or a query, which records
            would show.
        format: "png": JSON with PNG files, 8 bits a channel. "tensors": safetensors, float32 as they are.
        timeout: Seconds for each try.
        retries: How often it is tried again when there is no connection, when it takes too long, and at the statuses
            429 and 5xx; after 0.5 s, 1 s, 2 s and so on, or when Retry-After says.
        token: Name of an environment variable with a token for the Authorization header; records never show it.

    Raises:
        UserError: The URL or another option can't be; the message says why.
    """

    name = "http"
    range: tuple[float, float] | None = None
    reads_prompt = True
    differentiable = False
    licence = "that of what is served"

    def __init__(
        self,
        *,
        url: str | None = None,
        format: Literal["png", "tensors"] = "png",
        timeout: float = 60.0,
        retries: int = 3,
        token: str | None = None,
    ) -> None:
        if not url:
            raise UserError("http asks a server that you run; give url=…, such as url=http://127.0.0.1:8765/.")
        if not (timeout > 0 and math.isfinite(timeout)):
            raise UserError(f"http's timeout can't be {timeout!r}; give seconds above 0.")
        if not 0 <= retries <= 100:
            raise UserError(f"http's retries can't be {retries!r}; give a whole number from 0 to 100.")
        self._url = _checked(url)
        self.url = self._url.geturl()
        self.format, self.timeout, self.retries = format, timeout, retries
        self._headers = {"Accept": JSON, "User-Agent": "imgscale"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {secret(token)}"
            if self._url.scheme == "http" and not _is_loopback(self._url.hostname or ""):
                warnings.warn(f"The token goes to {self.url} unencrypted; use https.", UserWarning, stacklevel=2)
        self._served: dict[str, Any] = {}
        self._introduce()

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)``, NaN for a null.

        Raises:
            Unanswered: There was no answer, or not one by the protocol.
            UserError: The server says that the user asked for something that can't be.
        """
        check("http", images, prompts)
        if not len(images):
            return torch.zeros(0, device=images.device)
        kind, body = encode(images, prompts, self.format)
        answer = self._ask_until_heard(body, {**self._headers, "Content-Type": kind})
        return torch.tensor(self._scores(answer, len(images)), dtype=torch.float32, device=images.device)

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: where it is, and what the server says of itself."""
        about = {"name": "http", "source": self.url, "format": self.format}
        return {**about, "served": self._served} if self._served else about

    # ------------------------------------------------------------------------------------------------- conversation

    def _introduce(self) -> None:
        """Asks the server for its range and identity. It needn't know, nor even be up yet."""
        try:
            answer = self._ask("GET", None, self._headers, min(self.timeout, PATIENCE))
            about = json.loads(answer.body, parse_constant=_no_constant) if answer.status == 200 else None
        except (OSError, HTTPException, Unanswered, ValueError):
            return
        if not isinstance(about, dict):
            return
        if isinstance(about.get("reads_prompt"), bool):
            self.reads_prompt = about["reads_prompt"]
        match about.get("range"):
            case [int() | float() | None as low, int() | float() | None as high] if (low, high) != (None, None):
                self.range = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        self._served = {k: about[k] for k in ("name", "identity") if k in about}

    def _ask_until_heard(self, body: bytes, headers: dict[str, str]) -> _Answer:
        """The answer of the first try that isn't worth another."""
        for attempt in range(self.retries + 1):
            pause = min(PAUSE * 2**attempt, LONGEST)
            try:
                answer = self._ask("POST", body, headers, self.timeout)
            except TimeoutError:
                problem = f"gave no answer within {self.timeout:g} s"
            except ssl.SSLCertVerificationError as error:  # won't pass by itself
                raise Unanswered(f"{self.url} has a certificate that isn't trusted: {error.verify_message}.") from error
            except (OSError, HTTPException) as error:
                problem = f"can't be reached: {str(error)[:200] or type(error).__name__}"
            else:
                if answer.status != 429 and answer.status < 500:
                    return answer
                problem = f"answered {answer.status}{_reason(answer)}"
                pause = _asked_pause(answer, pause)
            if attempt == self.retries or pause > max(self.timeout, LONGEST):
                break
            sleep(pause)
        raise Unanswered(f"{self.url} {problem} ({attempt + 1} tries).")

    def _ask(self, method: str, body: bytes | None, headers: dict[str, str], seconds: float) -> _Answer:
        """One request on a connection of its own.

        Raises:
            TimeoutError: It took longer than ``seconds``.
            OSError, HTTPException: There was no connection, or no HTTP.
            Unanswered: The answer is too large.
        """
        began = monotonic()
        host, port = self._url.hostname or "", self._url.port
        connection = (
            HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())
            if self._url.scheme == "https"
            else HTTPConnection(host, port, timeout=seconds)
        )
        try:
            connection.connect()
            with _deadline(connection.sock, seconds - (monotonic() - began)):
                connection.request(method, self._url.path, body, headers)
                response = connection.getresponse()
                said = response.read(LIMIT + 1)
        finally:
            connection.close()
        if len(said) > LIMIT:
            raise Unanswered(f"{self.url} answered with more than {LIMIT} bytes, where scores should be.")
        if response.length:  # of what it announced, this much didn't come
            raise HTTPException("the connection broke off")
        return _Answer(response.status, said, response.headers)

    def _scores(self, answer: _Answer, n: int) -> list[float]:
        """The scores in an answer.

        Raises:
            Unanswered: There aren't any, or not ``n``, or not numbers.
            UserError: The server says that the user asked for something that can't be.
        """
        status = answer.status
        if status == 422:
            raise UserError(f"The verifier at {self.url} refuses this{_reason(answer)}.")
        if 300 <= status < 400:
            where = urlsplit(answer.headers.get("Location", ""))
            raise Unanswered(f"{self.url} redirects to {where.netloc}{where.path}; give its final address as the url.")
        if status in (401, 403):
            raise Unanswered(f"{self.url} wants another token ({status}{_reason(answer)}); give token=VARIABLE.")
        if status != 200:
            raise Unanswered(f"{self.url} answered {status}{_reason(answer)}.")
        try:
            said = json.loads(answer.body, parse_constant=_no_constant)
        except ValueError as error:
            raise Unanswered(f"{self.url} answered what isn't JSON ({error}).") from error
        scores = said.get("scores") if isinstance(said, dict) else None
        if not isinstance(scores, list):
            raise Unanswered(f'{self.url} answered without {{"scores": […]}}.')
        if len(scores) != n:
            raise Unanswered(f"{self.url} answered {len(scores)} scores for {n} images.")
        return [math.nan if score is None else self._number(score) for score in scores]

    def _number(self, score: Any) -> float:
        if isinstance(score, int | float) and not isinstance(score, bool) and abs(score) <= 3e38:
            return float(score)
        raise Unanswered(f"{self.url} answered the score {str(score)[:40]!r}, which is no finite number.")


def encode(images: Tensor, prompts: Sequence[str], format: str) -> tuple[str, bytes]:
    """Content type and body of a request.

    Args:
        images: ``(n, 3, h, w)`` in [0, 1].
        prompts: One for each.
        format: "png" or "tensors".
    """
    images = images.detach().to("cpu", torch.float32)
    if format == "tensors":
        from safetensors.torch import save

        return TENSORS, save({"images": images.contiguous()}, {"prompts": json.dumps(list(prompts))})
    pixels = (images.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    files = [base64.b64encode(_png(one)).decode() for one in pixels.numpy()]
    return JSON, json.dumps({"prompts": list(prompts), "images": files}).encode()


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)  # twice the speed of the default and hardly larger
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------ what is given


def _checked(url: str) -> SplitResult:
    """The parts of a URL that records may show.

    Raises:
        UserError: It is none, or holds what records mustn't show; then the message doesn't show it, either.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            "http's url can't hold a password, a query or a fragment, which records would show; put the secret into an"
            " environment variable and give its name as token=…."
        )
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise UserError(f"http's url can't be {url!r}; give one such as http://127.0.0.1:8765/ or https://host/path.")
    return parts._replace(path=parts.path or "/")


def secret(variable: str, what: str = "http's token") -> str:
    """The token in an environment variable.

    Args:
        variable: Its name.
        what: What names it, for messages.

    Raises:
        UserError: There is none; messages don't show what may be the token itself.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise UserError(f"{what} must be the name of an environment variable that holds it, not the token itself.")
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UserError(f"The environment variable {variable}, which is {what}, is empty; set it.")
    if not re.fullmatch(r"[!-~]+", value):
        raise UserError(f"The token in the environment variable {variable} has characters that no header can hold.")
    return value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --------------------------------------------------------------------------------------------------- what is answered


@contextmanager
def _deadline(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Cuts a connection off at its time, since a socket's own timeout starts anew with every byte that comes.

    Raises:
        TimeoutError: It was cut off.
    """
    late = threading.Event()

    def cut() -> None:
        late.set()
        with suppress(OSError):  # it may be closed by now
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS's own method would wait for the other side

    timer = threading.Timer(max(seconds, 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _reason(answer: _Answer) -> str:
    """What the server gives as a reason, to append to a sentence."""
    try:
        said = json.loads(answer.body)
        text = said["error"] if isinstance(said, dict) else ""
    except (ValueError, KeyError):
        return ""
    text = " ".join(str(text).split()).rstrip(".")
    return f": {text[:300]}" if text else ""


def _asked_pause(answer: _Answer, otherwise: float) -> float:
    """Seconds that a Retry-After header asks for: a number, or until a date."""
    asked = (answer.headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d{1,9}", asked):
        return float(asked)
    try:
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return otherwise


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
