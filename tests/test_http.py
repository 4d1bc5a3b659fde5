"""The HTTP verifier and its reference server, and servers that are broken in every way that was thought of."""

from __future__ import annotations

import base64
import inspect
import io
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

import imgscale
from imgscale import registry
from imgscale.app import serve
from imgscale.app.serve import Server, decode
from imgscale.errors import UserError
from imgscale.rewards import judge
from imgscale.verifiers import http
from imgscale.verifiers.http import JSON, TENSORS, Http, Unanswered, encode

PROMPTS = ["a red circle", "ein Würfel 立方体", ""]


def pictures(n: int, h: int = 6, w: int = 5) -> Tensor:
    return torch.randint(0, 256, (n, 3, h, w)) / 255


def own(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Depends on everything that is sent: each pixel, the order, the prompt."""
    weights = torch.linspace(0.1, 1, images[0].numel()).reshape(images.shape[1:])
    return (images * weights).sum((1, 2, 3)) + torch.tensor([zlib.crc32(p.encode()) % 7 for p in prompts])


@contextmanager
def served(verifier: Any, **settings: Any) -> Iterator[Server]:
    server = Server(verifier, quiet=True, **settings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Act = Callable[[BaseHTTPRequestHandler, int], None]


@contextmanager
def broken(act: Act, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that does with a POST whatever ``act(handler, number of the request)`` does; and the headers it saw."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(dict(self.headers))
            act(self, len(seen) - 1)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def say(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"{}", **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def always(status: int, body: bytes = b"{}", **headers: str) -> Act:
    return lambda handler, _: say(handler, status, body, **headers)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(http, "sleep", slept.append)
    return slept


# ------------------------------------------------------------------------------------------ with the reference server


@pytest.mark.parametrize("format", ["png", "tensors"])
def test_scores_are_those_of_the_served_verifier(format: Any) -> None:
    images = pictures(3)
    calls: list[int] = []

    def counted(given: Tensor, prompts: Sequence[str]) -> Tensor:
        calls.append(len(given))
        return own(given, prompts)

    with served(imgscale.verifier(counted)) as server:
        scores = Http(url=server.url, format=format)(images, PROMPTS)
    assert scores.dtype == torch.float32 and calls == [3]  # one request for all
    torch.testing.assert_close(scores, own(images, PROMPTS))


def test_tensors_are_exact_and_png_has_8_bits() -> None:
    images = torch.rand(3, 3, 6, 5)
    with served(imgscale.verifier(own)) as server:
        exact, rounded = (Http(url=server.url, format=f)(images, PROMPTS) for f in ("tensors", "png"))
    torch.testing.assert_close(exact, own(images, PROMPTS), rtol=0, atol=0)
    torch.testing.assert_close(rounded, own((images * 255).round() / 255, PROMPTS))
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("format", ["png", "tensors"])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_what_is_encoded_is_decoded(format: str, n: int) -> None:
    images, prompts = pictures(n, 7, 3), [f"{i} 'quoted\" \n" for i in range(n)]
    found, texts = decode(*encode(images, prompts, format))
    assert texts == prompts and found.dtype == torch.float32
    if n:
        torch.testing.assert_close(found, images)
    assert len(found) == n


def test_the_protocol_needs_nothing_but_json_and_png() -> None:
    """Written out by hand, as a server in another language would."""
    kind, body = encode(pictures(2), PROMPTS[:2], "png")
    said = json.loads(body)
    assert kind == "application/json" and said["prompts"] == PROMPTS[:2]
    picture = Image.open(io.BytesIO(base64.b64decode(said["images"][1])))
    assert picture.format == "PNG" and picture.mode == "RGB" and picture.size == (5, 6)


def test_learns_range_and_identity_and_needs_neither() -> None:
    made = imgscale.verifier(own, name="own", range=(-float("inf"), 0.0), reads_prompt=False)
    with served(made) as server:
        verifier = Http(url=server.url)
    assert verifier.range == (-float("inf"), 0.0) and verifier.reads_prompt is False
    identity = verifier.identity()
    assert identity["served"] == {"name": "own", "identity": made.identity()}
    assert identity["source"] == server.url and identity["format"] == "png"
    json.dumps(identity)
    with served(imgscale.verifier(own)) as server:
        verifier = Http(url=server.url)
    assert verifier.range is None and verifier.reads_prompt is True
    silent = Http(url=server.url)  # nobody is there any more
    assert silent.range is None and silent.identity() == {"name": "http", "source": server.url, "format": "png"}


@pytest.mark.parametrize("about", [b"[]", b"<html>", b'{"range": [0, "1"], "reads_prompt": 1}', b'{"range": [0, NaN]}'])
def test_what_a_server_wrongly_says_of_itself_is_passed_over(about: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with broken(always(200)) as (url, _):
        monkeypatch.setattr(Http, "_ask", lambda *_: http._Answer(200, about, {}))
        verifier = Http(url=url)
    assert verifier.range is None and verifier.reads_prompt is True and "served" not in verifier.identity()


def test_a_mistake_of_the_users_comes_back_as_one() -> None:
    def refuses(images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise UserError("The prompt 'x' isn't a scene; write one.")

    with served(imgscale.verifier(refuses)) as server, pytest.raises(UserError) as caught:
        Http(url=server.url)(pictures(1), ["x"])
    assert str(caught.value).endswith("refuses this: The prompt 'x' isn't a scene; write one.")


def test_a_failure_is_told_and_the_next_request_served(pauses: list[float]) -> None:
    def fails_once(images: Tensor, prompts: Sequence[str]) -> Tensor:
        if not failed:
            failed.append(1)
            raise RuntimeError("no weights")
        return own(images, prompts)

    failed: list[int] = []
    with served(imgscale.verifier(fails_once)) as server:
        verifier = Http(url=server.url, retries=0)
        with pytest.raises(Unanswered, match=r"answered 500: RuntimeError: no weights \(1 tries\)"):
            verifier(pictures(1), [""])
        assert verifier(pictures(1), [""]).isfinite().all()


def test_memory_that_runs_out_there_halves_the_batch_here(pauses: list[float]) -> None:
    """The engine halves a batch for any error of that kind, but it isn't worth asking again."""

    def small(images: Tensor, prompts: Sequence[str]) -> Tensor:
        if len(images) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(images, prompts)

    with served(imgscale.verifier(small)) as server:
        verifier = Http(url=server.url)
        with pytest.raises(Unanswered, match="out of memory"):
            judge(verifier, pictures(2), ["", ""], lambda text: None)
        assert judge(verifier, pictures(1), [""], lambda text: None).isfinite().all()
    assert pauses == []


def test_an_image_without_a_score_costs_only_itself() -> None:
    def odd(images: Tensor, prompts: Sequence[str]) -> list[float]:
        return [1.0, float("nan"), float("inf")]

    notices: list[str] = []
    with served(imgscale.verifier(odd)) as server:
        scores = judge(Http(url=server.url), pictures(3), PROMPTS, notices.append)
    assert scores.tolist() == [1.0, -float("inf"), -float("inf")] and len(notices) == 1


def test_requests_wait_for_each_other() -> None:
    inside: list[int] = []
    most: list[int] = []

    def slow(images: Tensor, prompts: Sequence[str]) -> Tensor:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return own(images, prompts)

    with served(imgscale.verifier(slow)) as server:
        verifier = Http(url=server.url)
        threads = [threading.Thread(target=verifier, args=(pictures(1), [""])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 4


# ------------------------------------------------------------------------------------------------- what it refuses


def post(server: Server, body: bytes, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", given.pop("path", "/"), body, given)
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return answer.status, said.get("error", "")


def a_png(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def body_of(*sizes: tuple[int, int], prompts: Any = None) -> bytes:
    texts = [""] * len(sizes) if prompts is None else prompts
    return json.dumps({"prompts": texts, "images": [a_png(*size) for size in sizes]}).encode()


TWO = {"images": torch.zeros(2, 3, 4, 4)}
REQUESTS: dict[str, tuple[bytes, str, int, str]] = {
    "grey pictures do": (body_of((4, 4), (4, 4)), JSON, 200, ""),
    "none do": (body_of(), JSON, 200, ""),
    "no json": (b"{", JSON, 400, "isn't {prompts, images}"),
    "a list": (b"[]", JSON, 400, "isn't {prompts, images}"),
    "no images": (b'{"prompts": []}', JSON, 400, "isn't {prompts, images}"),
    "no base64": (b'{"prompts": [""], "images": ["?!"]}', JSON, 400, "isn't {prompts, images}"),
    "no png": (b'{"prompts": [""], "images": ["R0lGODlh"]}', JSON, 400, "cannot identify image"),
    "sizes": (body_of((4, 4), (4, 5)), JSON, 400, "must have one size"),
    "prompts": (body_of((4, 4), prompts=[]), JSON, 400, "There are 1 images and 0 prompts"),
    "no texts": (body_of((4, 4), prompts=[3]), JSON, 400, "prompts must be a list of texts"),
    "one text": (body_of((4, 4), prompts="a"), JSON, 400, "prompts must be a list of texts"),
    "type": (b"{}", "text/plain", 415, "The content type can't be 'text/plain'"),
    "no tensors": (b"\0" * 40, TENSORS, 400, "no safetensors file"),
    "no metadata": (save(TWO), TENSORS, 400, "no safetensors file"),
    "halves": (save({"images": TWO["images"].half()}, {"prompts": '["", ""]'}), TENSORS, 400, "send float32"),
    "flat": (save({"images": torch.zeros(2, 3)}, {"prompts": '["", ""]'}), TENSORS, 400, "send float32 (n, 3, h, w)"),
    "empty": (b"", JSON, 411, "needs a body"),
    "large": (b" " * 2**20 + b"x", JSON, 413, "may have 1048576 bytes"),
    "bomb": (body_of((20000, 20000)), JSON, 400, "bomb"),
    "many pixels": (body_of(*[(8000, 8000)] * 3), JSON, 413, "may have 134217728 pixels"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_requests_are_checked(case: str) -> None:
    body, kind, status, message = REQUESTS[case]
    with served(imgscale.verifier(lambda i, p: [0.0] * len(i), name="flat"), limit=2**20) as server:
        found, error = post(server, body, Content_Type=kind)
    assert (found, message in error) == (status, True), error


def test_only_the_root_and_only_with_the_token(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    monkeypatch.setenv("WRONG_TOKEN", "guess")
    with served(imgscale.verifier(own), token="s3cret") as server:
        assert post(server, body_of((4, 4)), Content_Type=JSON)[0] == 401
        right = {"Content_Type": JSON, "Authorization": "Bearer s3cret"}
        assert post(server, body_of((4, 4)), **right)[0] == 200
        assert post(server, body_of((4, 4)), **right, path="/other")[0] == 404
        assert Http(url=server.url, token="OWN_TOKEN")(pictures(1), [""]).isfinite().all()
        with pytest.raises(Unanswered, match=r"wants another token \(401: The token is missing or wrong\)"):
            Http(url=server.url, token="WRONG_TOKEN")(pictures(1), [""])
    assert pauses == []


def test_a_client_that_goes_away_or_sends_garbage_harms_nobody() -> None:
    with served(imgscale.verifier(own)) as server:
        for sent in (b"", b"garbage\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9999\r\n\r\nabc", b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
                connection.sendall(sent)
        assert Http(url=server.url)(pictures(1), [""]).isfinite().all()


# -------------------------------------------------------------------------------------------------- broken servers


def test_two_failures_are_tried_again_with_longer_and_longer_pauses(pauses: list[float]) -> None:
    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 500) if number < 2 else say(handler, 200, b'{"scores": [0.25]}')

    with broken(act) as (url, seen):
        assert Http(url=url)(pictures(1), [""]).tolist() == [0.25]
    assert pauses == [0.5, 1.0] and len(seen) == 3


def test_tries_end(pauses: list[float]) -> None:
    with broken(always(503, b'{"error": "busy."}')) as (url, seen):
        with pytest.raises(Unanswered) as caught:
            Http(url=url, retries=8)(pictures(1), [""])
    assert str(caught.value) == f"{url} answered 503: busy (9 tries)."
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30] and len(seen) == 9


@pytest.mark.parametrize(("asked", "pause"), [("7", 7.0), ("0", 0.0), ("soon", 0.5), ("-3", 0.5), ("", 0.5)])
def test_a_server_may_ask_for_a_pause(asked: str, pause: float, pauses: list[float]) -> None:
    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 429, Retry_After=asked) if not number else say(handler, 200, b'{"scores": [1]}')

    with broken(act) as (url, _):
        assert Http(url=url)(pictures(1), [""]).tolist() == [1.0]
    assert pauses == [pause]


def test_a_pause_may_be_given_as_a_date(pauses: list[float]) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))

    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 503, Retry_After=date) if not number else say(handler, 200, b'{"scores": [1]}')

    with broken(act) as (url, _):
        Http(url=url)(pictures(1), [""])
    assert len(pauses) == 1 and 15 < pauses[0] <= 20


def test_nobody_waits_an_hour(pauses: list[float]) -> None:
    with broken(always(429, Retry_After="3600")) as (url, seen):
        with pytest.raises(Unanswered, match="answered 429"):
            Http(url=url)(pictures(1), [""])
    assert pauses == [] and len(seen) == 1


ANSWERS: dict[str, tuple[int, bytes, str]] = {
    "garbage": (200, b"\x00\xff<html>", "answered what isn't JSON"),
    "empty": (200, b"", "answered what isn't JSON"),
    "nan": (200, b'{"scores": [NaN, 1]}', "answered what isn't JSON (NaN is no JSON)"),
    "infinity": (200, b'{"scores": [1, -Infinity]}', "answered what isn't JSON (-Infinity is no JSON)"),
    "overflow": (200, b'{"scores": [1, 1e999]}', "answered the score 'inf', which is no finite number"),
    "float32": (200, b'{"scores": [1, 1e39]}', "answered the score '1e+39', which is no finite number"),
    "text": (200, b'{"scores": [1, "0.5"]}', "answered the score '0.5', which is no finite number"),
    "bool": (200, b'{"scores": [1, true]}', "answered the score 'True'"),
    "few": (200, b'{"scores": [1]}', "answered 1 scores for 2 images"),
    "many": (200, b'{"scores": [1, 2, 3]}', "answered 3 scores for 2 images"),
    "a list": (200, b"[1, 2]", 'answered without {"scores": […]}'),
    "a number": (200, b'{"scores": 1}', 'answered without {"scores": […]}'),
    "huge": (200, b'{"scores": [' + b"0," * 600_000 + b"0]}", "answered with more than 1048576 bytes"),
    "404": (404, b"not here", "answered 404."),
    "400": (400, b'{"error": "no\\n good."}', "answered 400: no good."),
    "201": (201, b'{"scores": [1, 2]}', "answered 201."),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_other_answers_are_named_and_not_asked_for_again(case: str, pauses: list[float]) -> None:
    status, body, message = ANSWERS[case]
    with broken(always(status, body)) as (url, seen):
        verifier = Http(url=url)
        with pytest.raises(Unanswered) as caught:
            verifier(pictures(2), ["", ""])
    assert str(caught.value).startswith(f"{url} {message}"), caught.value
    assert len(seen) == 1 and pauses == []


def test_redirects_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a token would go wherever a server says."""
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    with broken(always(200, b'{"scores": [1]}')) as (other, seen):
        with broken(always(307, Location=f"{other}there?key=s3cret")) as (url, _):
            with pytest.raises(Unanswered) as caught:
                Http(url=url, token="OWN_TOKEN")(pictures(1), [""])
    assert seen == [] and "s3cret" not in str(caught.value)
    assert f"redirects to {other.removeprefix('http://')}there; give its final address" in str(caught.value)


def test_a_dead_server(pauses: list[float]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and doesn't listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        notices: list[str] = []
        verifier = Http(url=url, retries=2)
        scores = judge(verifier, pictures(2), ["", ""], notices.append)
    assert scores.isnan().all() and pauses == [0.5, 1.0]
    assert len(notices) == 1 and "can't be reached" in notices[0] and "(3 tries)" in notices[0]


def drip_body(handler: BaseHTTPRequestHandler, number: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    drip(handler)


def drip(handler: BaseHTTPRequestHandler, _: int = 0) -> None:
    for _ in range(100):
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.mark.parametrize("act", [lambda handler, _: time.sleep(1.5), drip_body, drip], ids=["silent", "body", "header"])
def test_a_slow_server_is_given_up_on_in_time(act: Act, pauses: list[float]) -> None:
    with broken(act) as (url, seen):
        verifier = Http(url=url, timeout=0.3, retries=1)
        began = time.monotonic()
        with pytest.raises(Unanswered, match=r"gave no answer within 0.3 s \(2 tries\)"):
            verifier(pictures(1), [""])
        assert time.monotonic() - began < 1.4 and len(seen) == 2


def test_an_answer_that_breaks_off_is_asked_for_again(pauses: list[float]) -> None:
    def act(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 200, b'{"scores": [1]}', **({"Content-Length": "999"} if not number else {}))

    with broken(act) as (url, seen):
        assert Http(url=url)(pictures(1), [""]).tolist() == [1.0]
    assert len(seen) == 2 and pauses == [0.5]


def test_https_speaks_tls(pauses: list[float]) -> None:
    """A server that doesn't is never asked in the clear instead."""
    with broken(always(200, b'{"scores": [1]}')) as (url, seen):
        with pytest.raises(Unanswered, match="can't be reached"):
            Http(url=url.replace("http:", "https:"), retries=0)(pictures(1), [""])
    assert seen == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https_checks_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made = [*make, "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def once(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 200, b'{"scores": [0.5]}') if not number else drip_body(handler, number)

    with broken(once, context) as (url, seen):
        port = url.rpartition(":")[2]
        with pytest.raises(Unanswered, match="has a certificate that isn't trusted: self.signed"):
            Http(url=f"https://localhost:{port}")(pictures(1), [""])
        assert seen == [] and pauses == []  # it won't be trusted later, either
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert Http(url=f"https://localhost:{port}")(pictures(1), [""]).tolist() == [0.5]
        with pytest.raises(Unanswered, match="isn't trusted: .*doesn't match|isn't trusted: .*not valid"):
            Http(url=f"https://127.0.0.1:{port}")(pictures(1), [""])
        with pytest.raises(Unanswered, match=r"gave no answer within 0.5 s"):
            Http(url=f"https://localhost:{port}", timeout=0.5, retries=0)(pictures(1), [""])


# ---------------------------------------------------------------------------------------------------------- secrets


def test_a_token_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "s3cret\n")
    with broken(always(200, b'{"scores": [1]}')) as (url, seen):
        verifier = Http(url=url, token="OWN_TOKEN")
        verifier(pictures(1), [""])
    assert seen[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in json.dumps(verifier.identity())


def test_a_token_in_the_clear_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    monkeypatch.setattr(Http, "_introduce", lambda self: None)
    with pytest.warns(UserWarning, match="unencrypted; use https"):
        Http(url="http://scores.example/", token="OWN_TOKEN")
    for url in ("https://scores.example/", "http://127.0.0.1:1/", "http://[::1]:1/", "http://localhost:1/"):
        Http(url=url, token="OWN_TOKEN")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "http asks a server that you run; give url=…"),
        ({"url": "127.0.0.1:8765"}, "http's url can't be '127.0.0.1:8765'; give one such as"),
        ({"url": "ftp://host/"}, "can't be 'ftp://host/'"),
        ({"url": "http://"}, "can't be 'http://'"),
        ({"url": "http://host:99999/"}, "can't be 'http://host:99999/'"),
        ({"url": "http://host:port/"}, "can't be"),
        ({"url": "http://host/a b"}, "can't be"),
        ({"url": "http://höst/"}, "can't be"),
        ({"url": "http://me:s3cret@host/"}, "can't hold a password, a query or a fragment"),
        ({"url": "http://host/?key=s3cret"}, "can't hold a password, a query or a fragment"),
        ({"url": "http://host/", "timeout": 0.0}, "timeout can't be 0.0; give seconds above 0"),
        ({"url": "http://host/", "timeout": float("inf")}, "timeout can't be inf"),
        ({"url": "http://host/", "retries": -1}, "retries can't be -1; give a whole number from 0 to 100"),
        ({"url": "http://host/", "token": "s3cret-123"}, "must be the name of an environment variable"),
        (
            {"url": "http://host/", "token": "NOT_SET"},
            "The environment variable NOT_SET, which is http's token, is empty",
        ),
        ({"url": "http://host/", "token": "ODD"}, "has characters that no header can hold"),
    ],
)
def test_what_can_not_be_is_explained(options: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", "s3cret\nX: y")
    with pytest.raises(UserError) as caught:
        Http(**options)
    assert message in str(caught.value) and "s3cret" not in str(caught.value)


def test_is_named_with_its_options() -> None:
    entry, options = registry.verifier.resolve(
        "http(url=http://127.0.0.1:8765/x, format=tensors, timeout=2, retries=0)"
    )
    assert entry.target is Http
    assert options == {"url": "http://127.0.0.1:8765/x", "format": "tensors", "timeout": 2.0, "retries": 0}


# ------------------------------------------------------------------------------------------------- imgscale serve


def test_the_command_serves_a_registered_verifier(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    found: list[Tensor] = []

    def until(self: Server) -> None:
        """Serves one conversation and ends as Ctrl-C does."""
        thread = threading.Thread(target=ThreadingHTTPServer.serve_forever, args=(self, 0.01))
        thread.start()
        found.append(Http(url=self.url)(noise, ["a", "b"]))
        self.shutdown()
        thread.join()
        raise KeyboardInterrupt

    noise = pictures(2, 16, 16)
    monkeypatch.setattr(Server, "serve_forever", until)
    from imgscale.app.main import main

    with pytest.raises(SystemExit) as ended:
        main(["serve", "jpeg(direction=incompressibility)", "--port", "0"])
    assert ended.value.code == 0
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("imgscale: jpeg(direction=incompressibility) is served at http://127.0.0.1:")
    assert err.endswith("/; Ctrl-C ends.\n") and err.count("\n") == 1
    torch.testing.assert_close(
        found[0], registry.verifier["jpeg"].target(direction="incompressibility")(noise, ["", ""])
    )


def test_what_can_not_be_served_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"can't listen at 127.0.0.1 port \d+ .*; choose another"):
            serve.serve("jpeg", port=taken.getsockname()[1])
    with pytest.raises(UserError, match="Unknown verifier 'jpg'"):
        serve.serve("jpg", port=0)
    with pytest.raises(UserError, match="imgscale serve's token must be the name"):
        serve.serve("jpeg", port=0, token="s3-cret")
    with pytest.raises(UserError, match="'jpeg[+]sharpness' compares the images of one search"):
        serve.serve("jpeg+sharpness", port=0)


def test_listens_on_this_machine_alone_unless_told() -> None:
    assert inspect.signature(serve.serve).parameters["host"].default == "127.0.0.1"
    with served(imgscale.verifier(own)) as server:
        assert server.server_address[0] == "127.0.0.1"
