"""The demo without a browser: its line, what it allows, what it shows, what it serves, and its API."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gradio import networking
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from imgscale import png
from imgscale.app import doctor, main
from imgscale.app.auto import AutoJob
from imgscale.app.demo import desk as desks
from imgscale.app.demo import handlers, page, serve, view
from imgscale.app.demo.chart import chart
from imgscale.app.demo.desk import Desk, Point, Ticket, View
from imgscale.app.demo.guard import Guard
from imgscale.app.demo.offer import LONGEST_PROMPT, Offer
from imgscale.app.demo.pace import Pace, span
from imgscale.app.demo.runner import Runner
from imgscale.app.job import Job
from imgscale.bandit.store import opened
from imgscale.budget import Budget, Ledger
from imgscale.errors import UserError
from imgscale.result import Candidate, SearchOutput

PROMPT = "two red circles above a blue square"
WAIT = 60.0  # seconds that something may take on a busy machine before a test gives up

# ----------------------------------------------------------------------------------------------------------- the line


class Held:
    """Work that goes on until it is let go, and notes its order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def __call__(self, ticket: Ticket) -> None:
        self.begun.append(ticket.who)
        ticket.show(state="searching", total=10)
        while not self.go.wait(0.005) and not ticket.ending:
            pass
        ticket.show(state="done")


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(3)
    yield made
    made.close()


def until(condition: Any) -> None:
    """Waits for something another thread does."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_who_comes_first_is_served_first_and_sees_how_many_are_before(desk: Desk) -> None:
    work = Held()
    tickets = [desk.enter(who, work) for who in ("ann", "ben", "cem")]
    until(lambda: work.begun)
    assert [ticket.look().ahead for ticket in tickets] == [0, 1, 2]
    assert [ticket.look().state for ticket in tickets] == ["searching", "waiting", "waiting"]
    work.go.set()
    until(lambda: all(ticket.look().over for ticket in tickets))
    assert work.begun == ["ann", "ben", "cem"]


def test_stop_ends_who_waits_at_once_and_the_others_move_up(desk: Desk) -> None:
    work = Held()
    first, second, third = (desk.enter(who, work) for who in ("ann", "ben", "cem"))
    until(lambda: work.begun)
    assert desk.stop("ben")
    assert second.look().state == "left"
    assert third.look().ahead == 1
    assert desk.stop("ann")
    until(lambda: first.look().over)
    until(lambda: work.begun == ["ann", "cem"])


def test_stop_while_the_model_loads_ends_at_once_though_the_device_is_busy(desk: Desk) -> None:
    loaded = threading.Event()

    def load(ticket: Ticket) -> None:
        loaded.wait(WAIT)
        ticket.show(state="searching")

    ticket = desk.enter("ann", load)
    until(lambda: ticket.look().state == "loading")
    ticket.stop()
    assert ticket.look().state == "left"
    assert len(desk) == 1
    again = desk.enter("ann", Held())  # who gave up may come again
    loaded.set()
    until(lambda: again.look().state == "searching")
    assert ticket.look().state == "left"


def test_a_line_is_refused_when_it_is_full_and_to_those_who_are_in_it(desk: Desk) -> None:
    work = Held()
    for who in ("ann", "ben", "cem"):
        desk.enter(who, work)
    with pytest.raises(UserError, match="full with 3 searches"):
        desk.enter("dan", work)
    with pytest.raises(UserError, match="a search here already"):
        desk.enter("cem", work)


def test_what_breaks_is_one_sentence_and_the_next_is_served(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(ticket: Ticket) -> None:
        raise RuntimeError("no\nmore paper")

    def refused(ticket: Ticket) -> None:
        raise UserError("The paper is full; take other paper.")

    tickets = [desk.enter("ann", broken), desk.enter("ben", refused)]
    until(lambda: all(ticket.look().over for ticket in tickets))
    assert tickets[0].look().said == (
        "The search broke off (RuntimeError: no more paper); the demo's own log says more."
    )
    assert tickets[1].look().said == "The paper is full; take other paper."
    assert "Traceback" in capfd.readouterr().err  # for whoever runs the demo


def test_a_search_that_nobody_looks_at_any_more_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "PATIENCE", 0.2)
    work = Held()
    ticket = desk.enter("ann", work)
    until(lambda: len(desk) == 0)  # without a look
    assert ticket.view.state == "done"


def test_pictures_are_wanted_only_by_those_who_look(desk: Desk) -> None:
    ticket = desk.enter("ann", Held())
    until(lambda: ticket.view.state == "searching")
    assert ticket.wanted  # the first is made in any case
    assert not ticket.wanted
    ticket.look()
    assert ticket.wanted and not ticket.wanted


# ------------------------------------------------------------------------------------------------------ what it allows


POOL = """
[policy]
epsilon = 0
[[models]]
name = "shapes-turbo"
actions = [{searcher = "best-of-n", nfe = 8}, {searcher = "rbf", nfe = 40}]
"""


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> Offer:
    folder = tmp_path_factory.mktemp("auto")
    (folder / "pool.toml").write_text(POOL)
    return Offer.of(max_budget=200, max_queue=3, policy=folder / "demo.policy", pool=folder / "pool.toml")


FORM: dict[str, Any] = {
    "prompt": PROMPT,
    "model": "shapes-turbo",
    "searcher": "best-of-n",
    "verifiers": ["clip"],
    "report": [],
    "budget": 20,
    "seed": "7",
}


def test_a_form_becomes_a_search(offer: Offer) -> None:
    job = offer.job(**FORM)
    assert (job.prompt, job.model, job.searcher, job.verifier, job.seed) == (
        PROMPT,
        *("shapes-turbo best-of-n clip".split()),
        7,
    )
    assert job.report == ("shapes",)  # the oracle reads this prompt
    assert job.budget == Budget(nfe=20)
    assert offer.job(**{**FORM, "prompt": "a dream of blue"}).report == ()
    both = offer.job(**{**FORM, "verifiers": ["clip", "aesthetic"], "report": ["sharpness", "clip"]})
    assert (both.verifier, both.report) == ("clip+aesthetic", ("sharpness",))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": "  "}, "The prompt is empty; write what the image should show."),
        ({"prompt": "x" * (LONGEST_PROMPT + 1)}, "The prompt has 1001 characters; shorten it to 1000 or fewer."),
        ({"budget": 201}, "The budget can't be 201; give a whole number from 1 to 200."),
        ({"budget": 0}, "The budget can't be 0; give a whole number from 1 to 200."),
        ({"budget": math.nan}, "The budget can't be nan; give a whole number from 1 to 200."),
        ({"budget": None}, "The budget can't be None; give a whole number from 1 to 200."),
        ({"seed": "abc"}, "The seed can't be 'abc'; give a whole number from 0 to 2**63 - 1."),
        ({"verifiers": []}, "No verifier is chosen; choose what steers the search, such as clip."),
        ({"prompt": "a dream", "verifiers": ["shapes"]}, "The verifier 'shapes' can't judge this prompt"),
        ({"model": "/etc"}, "Unknown model '/etc'; choose one of: "),
        ({"verifiers": ["clip(model=/etc/passwd)"]}, "Unknown verifier 'clip(model=/etc/passwd)'"),
        ({"report": ["http(url=http://127.0.0.1/)"]}, "Unknown verifier 'http(url=http://127.0.0.1/)'"),
        ({"searcher": "rbf+dps(scale=2)"}, "Unknown searcher 'rbf+dps(scale=2)'"),
    ],
)
def test_a_form_that_cannot_be_is_one_sentence(offer: Offer, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        offer.job(**{**FORM, **change})
    assert str(refused.value).startswith(sentence)


AUTO: dict[str, Any] = {**FORM, "model": "auto", "mode": "cost"}


def test_a_form_becomes_a_bandit_s_search(offer: Offer) -> None:
    """Searcher and verifiers don't matter; what is copied names no place on this machine."""
    job = offer.job(**{**AUTO, "searcher": "", "verifiers": []})
    assert isinstance(job, AutoJob) and (job.mode, job.policy, job.pool) == ("cost", offer.policy, offer.pool)
    assert (job.report, job.budget, job.judge) == (("shapes",), Budget(nfe=20), "clip")
    assert offer.job(**{**AUTO, "report": ["clip", "sharpness"]}).report == ("sharpness",)  # clip steers
    command = job.command()
    assert f"--policy {offer.policy}" in command and "--searcher" not in command and "--mode cost" in command
    shown = view.settings(handlers._copied(job))
    assert str(offer.policy) not in shown and "imgscale.load(&#x27;auto&#x27;, mode=&#x27;cost&#x27;)" in shown
    assert "searcher" not in shown and "Command line for auto" in shown
    both = view.settings(Job(PROMPT), job)  # what was chosen, and what was asked for
    assert both.index("<h3>Python <") < both.index("Command line for auto")
    for change, sentence in (
        ({"mode": "best"}, "Unknown mode 'best'"),
        ({"prompt": "a dream", "report": ["shapes"]}, "The verifier 'shapes' can't judge this prompt"),
        ({"report": ["http(url=http://127.0.0.1/)"]}, "Unknown verifier 'http"),
        ({"budget": 201}, "The budget can't be 201"),
        ({"prompt": " "}, "The prompt is empty"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            offer.job(**{**AUTO, **change})


def test_a_pool_or_a_policy_that_cannot_be_is_said_when_it_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.policy").write_bytes(b"junk")
    with pytest.raises(UserError, match="is damaged or isn't one"):
        Offer.of(policy=tmp_path / "bad.policy")
    (tmp_path / "bad.toml").write_text("models = 3")
    with pytest.raises(UserError, match="bad.toml"):
        Offer.of(pool=tmp_path / "bad.toml")
    assert Offer.of(["auto"]).models[0] == "auto" and Offer.of().models[-1] == "auto"


def test_the_mode_at_the_start_is_the_pool_s(offer: Offer, tmp_path: Path) -> None:
    assert offer.usual_mode == "balanced"
    for mode, usual in (('"quality"', "quality"), ("0.7", "balanced")):
        (tmp_path / "pool.toml").write_text(f"[policy]\nmode = {mode}\n[[models]]\nname = 'shapes-turbo'\n")
        other = replace(offer, pool=tmp_path / "pool.toml")
        job = other.job(**{name: value for name, value in AUTO.items() if name != "mode"})
        assert isinstance(job, AutoJob) and job.mode == other.usual_mode == usual


def test_the_fields_that_a_model_takes_are_shown(offer: Offer, tmp_path: Path) -> None:
    on = handlers.Handlers(Runner(offer, tmp_path), tmp_path)
    for model, chooses in (("auto", True), ("shapes-turbo", False)):
        assert [update["visible"] for update in on.fits(model)] == [chooses, not chooses, not chooses]
    assert "At most that many" in on.estimate("auto", "", [], 20)


def record(**changes: Any) -> png.Record:
    """The settings of a picture, as somebody may have written them."""
    values: dict[str, Any] = {
        **{"imgscale": "0.1.0", "prompt": PROMPT, "model": "shapes-turbo", "searcher": "best-of-n", "verifier": "clip"},
        **{"budget": {"nfe": 20}, "seed": 7, "height": 64, "width": 64, "num_inference_steps": 4, "max_batch": 32},
        **{"stopped": "budget", "rounds": 5, "finished": True, "nfe": 20},
    }
    return png.Record.model_validate_json(json.dumps({**values, **changes}))


def test_a_picture_becomes_a_search(offer: Offer) -> None:
    job = offer.again(record(options={"n": 5}, guidance_scale=1.0))
    assert (job.model, job.searcher, job.options, job.seed, job.plain) == (
        "shapes-turbo",
        "best-of-n",
        {"n": 5},
        7,
        False,
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model": "somebody/model"}, "may not say what to load; offered are shapes-flow"),
        ({"model": "/etc"}, "may not say what to load"),
        ({"verifier": "clip(model=/tmp/x)"}, "which this demo doesn't offer"),
        ({"verifier": "clip+http(url=http://10.0.0.1/)"}, "the verifier 'http(url=http://10.0.0.1/)'"),
        ({"preview": "/tmp/decoder"}, "may not say what to load"),
        ({"pipeline_arguments": {"max_sequence_length": 9}}, "arguments for the pipeline"),
        ({"budget": {"seconds": 3.0}}, "no limit in NFE"),
        ({"budget": {"nfe": 10**9}}, "The budget can't be 1000000000; give a whole number from 1 to 200."),
        ({"prompt": "x" * 2000}, "The prompt has 2000 characters"),
        ({"searcher": "eval"}, "Unknown searcher 'eval'"),
        ({"options": {"batch": "__import__('os')"}}, "batch"),
    ],
)
def test_a_picture_never_says_what_to_load_nor_more_than_is_allowed(
    offer: Offer, change: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError) as refused:
        offer.again(record(**change))
    assert part in str(refused.value)


def test_a_picture_by_auto_is_made_again_with_what_the_pool_has(offer: Offer, tmp_path: Path) -> None:
    """Though nobody may choose it by name: whoever started the demo listed it."""
    model = {"name": "mine", "source": "shapes-turbo", "preview": "my/own", "height": 128, "width": 96}
    lines = [f"{name} = {value!r}" for name, value in model.items()]
    gone = "[[models]]\nname = 'some/gone'\noptional = true\n"
    (tmp_path / "pool.toml").write_text("\n".join(['verifier = "jpeg(quality=50)"', "[[models]]", *lines, gone]))
    own = replace(offer, models=("shapes-flow", "auto"), verifiers=("clip",), pool=tmp_path / "pool.toml")
    made = record(verifier="jpeg(quality=50)", preview="my/own")
    job = own.again(made)
    assert (job.model, job.verifier, job.preview) == ("shapes-turbo", "jpeg(quality=50)", "my/own")
    assert (own.largest("shapes-turbo"), own.largest("shapes-flow")) == (128 * 96, 0)
    form = handlers.Handlers(Runner(own, tmp_path), tmp_path)._form(job)
    assert form[0] == PROMPT and all(isinstance(form[at], dict) for at in (1, 3))  # left as they are
    for change in ({"model": "auto"}, {"model": "mine"}, {"model": "some/gone"}, {"verifier": "jpeg(quality=51)"}):
        with pytest.raises(UserError, match="this demo doesn't offer"):
            own.again(png.Record.model_validate_json(made.model_copy(update=change).model_dump_json()))
    with pytest.raises(UserError, match="may not say what to load"):
        own.again(made.model_copy(update={"preview": "your/own"}))


def test_further_models_and_verifiers_come_first_and_must_exist() -> None:
    assert Offer.of(["shapes-ddpm"], ["clip(dtype=float32)"]).models[0] == "shapes-ddpm"
    assert Offer.of((), ["clip(dtype=float32)"]).verifiers[0] == "clip(dtype=float32)"
    with pytest.raises(UserError, match="Unknown model"):
        Offer.of(["nothing"])
    with pytest.raises(UserError, match="Unknown verifier"):
        Offer.of((), ["nothing"])


# ------------------------------------------------------------------------------------------------------- what it shows


def output(nfe: int = 20, seconds: float = 4.0, **changes: Any) -> SearchOutput:
    black = Image.new("RGB", (64, 64))
    values: dict[str, Any] = {
        **{"prompt": PROMPT, "model": "m", "searcher": "rbf", "verifier": "clip", "images": [black]},
        **{
            "scores": {"clip": 0.5},
            "seeds": [1],
            "ledger": Ledger(nfe=nfe, seconds=seconds),
            "trace": [],
            "plain": None,
        },
        **{"stopped": "budget", "finished": True, "settings": {}, "events": []},
    }
    return SearchOutput(**{**values, **changes})


def test_the_time_of_a_search_is_learnt_from_others() -> None:
    pace = Pace()
    assert pace.estimate("m", "rbf", "clip", 100) is None
    pace.note("m", "rbf", "clip", output(nfe=4, seconds=60.0))  # mostly start-up
    assert pace.estimate("m", "rbf", "clip", 100) is None
    pace.note("m", "rbf", "clip", output(nfe=20, seconds=4.0))
    assert pace.estimate("m", "rbf", "clip", 100) == pytest.approx(20.0)
    assert pace.estimate("m", "smc", "aesthetic", 100) == pytest.approx(20.0)  # another search with the same model
    assert pace.estimate("other", "rbf", "clip", 100) is None
    pace.note("m", "rbf", "clip", output(nfe=20, seconds=2.0))
    assert pace.estimate("m", "rbf", "clip", 100) == pytest.approx(15.0)
    assert [span(s) for s in (0.2, 6.4, 300.0, 7200.0)] == ["under 1 s", "6 s", "5 min", "2.0 h"]


def test_a_plot_has_a_solid_line_dashed_held_out_ones_and_their_own_axis() -> None:
    points = [Point(5, 0.2, {"shapes": 0.0}), Point(10, 0.4, {"shapes": 1.0}), Point(20, -math.inf)]
    drawn = chart(points, "clip", 20, now=15, plain=0.1)
    assert 'class="steers" d="M25.00' in drawn  # a quarter of the budget
    assert 'class="held h0" d="M25.00' in drawn
    assert drawn.count('H75.00"') == 2  # up to now
    assert 'class="axis right"' in drawn and "shapes (held out)" in drawn and "plain sample" in drawn
    assert "nan" not in drawn and "inf" not in drawn
    assert 'class="axis right"' not in chart([Point(5, 0.2)], "clip", 20)
    assert "is-empty" in chart([Point(5, -math.inf)], "clip", 20)


def test_nothing_from_outside_becomes_markup() -> None:
    evil = '<img src=x onerror="alert(1)">'
    job = Job(prompt=evil, verifier=evil)
    candidate = Candidate(torch.zeros(3, 8, 8), torch.zeros(1), 0.5, 3)
    shown = "".join(
        [
            view.note(evil),
            view.status(View(state="failed", said=evil), job),
            view.status(View(state="searching", nfe=1, total=2, trace=(Point(1, 0.5),)), job),
            view.status(View(state="done", output=output(events=[evil])), job),
            view.stage(View(state="done", output=output(scores={evil: 1.0})), job),
            view.gallery([candidate], evil),
            view.settings(job),
            chart([Point(1, 0.5, {evil: 0.1})], evil, 2),
        ]
    )
    assert evil not in shown and 'onerror="' not in shown
    assert shown.count("&lt;img src=x") >= 8


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (View(state="waiting", ahead=2), ["Number 2 in line", "2 searches before yours"]),
        (View(state="waiting", ahead=1), ["Next in line", "1 search before yours"]),
        (View(), ["Starting"]),
        (View(state="loading"), ["Loading", "shapes-flow"]),
        (View(state="searching", total=20), ["Drawing the plain sample", "0 of 20 NFE"]),
        (
            View(state="searching", nfe=5, total=20, seconds=2.0, trace=(Point(4, 0.25),)),
            ["best clip 0.2500", "6 s left"],
        ),
        (View(state="searching", chosen="m, rbf, 60 NFE: expected <b>"), ["m, rbf, 60 NFE: expected &lt;b&gt;"]),
        (View(state="left"), ["Stopped", "before there was an image"]),
        (View(state="done", output=output(stopped="cancelled")), ["Stopped", "this is the best so far"]),
        (View(state="done", output=output()), ["Done", "The budget is spent."]),
    ],
)
def test_the_status_says_what_is_going_on(state: View, words: list[str]) -> None:
    said = view.status(state, Job(prompt=PROMPT))
    assert all(word in said for word in words), said


def test_the_status_of_a_bandit_says_that_it_chooses() -> None:
    assert "<strong>Choosing</strong>" in view.status(View(state="loading"), AutoJob(prompt=PROMPT, model="auto"))


def test_large_pictures_are_sent_small() -> None:
    noise = Image.effect_noise((1500, 1000), 80).convert("RGB")
    sent = view.data(noise, 768)
    assert sent.startswith("data:image/jpeg;base64,") and len(sent) < 600_000
    assert view.data(Image.new("RGB", (64, 64)), 768).startswith("data:image/png;base64,")


# ------------------------------------------------------------------------------------- what it serves, and its API


@pytest.fixture(scope="module")
def served(offer: Offer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, str]]:
    """A demo on a free port of this machine."""
    runner = Runner(offer, tmp_path_factory.mktemp("demo") / "out")
    (runner.out.parent / "secret.txt").write_text("secret")
    with serve.served(runner) as url:
        yield runner, url


@pytest.fixture
def client(served: tuple[Runner, str], tmp_path: Path) -> Iterator[Client]:
    made = Client(served[1], verbose=False, download_files=tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "place",
    ["/etc/passwd", "{out}/../secret.txt", "{out}", "{here}/pyproject.toml", "/proc/self/environ", "../../etc/passwd"],
)
def test_files_outside_of_its_own_are_not_served(served: tuple[Runner, str], place: str) -> None:
    runner, url = served
    place = place.format(out=runner.out, here=Path(page.__file__).resolve().parents[2])
    for path in (f"file={place}", f"file/{place}", f"file=%2F..{place}"):
        answer = httpx.get(f"{url}gradio_api/{path}")
        assert answer.status_code in (403, 404), (path, answer.status_code)
        assert "root:" not in answer.text and "secret" not in answer.text.replace("secret.txt", "")


def test_a_file_that_a_request_names_is_not_taken(served: tuple[Runner, str], client: Client) -> None:
    runner, _ = served
    secret = runner.out.parent / "secret.txt"
    for path in (str(secret), "/etc/passwd"):
        with pytest.raises(AppError):
            client.predict({"path": path, "meta": {"_type": "gradio.FileData"}}, api_name="/rerun")


def test_it_fetches_nothing_from_elsewhere(served: tuple[Runner, str]) -> None:
    _, url = served
    assert httpx.get(f"{url}gradio_api/file=https://example.org/x.png").status_code == 404
    assert httpx.get(f"{url}gradio_api/proxy=https://a.hf.space/x").status_code == 404
    asked = {"data": [{"path": "https://example.org/x.png", "meta": {"_type": "gradio.FileData"}}], "fn_index": 1}
    refused = httpx.post(f"{url}gradio_api/queue/join", json={**asked, "session_hash": "a"})
    assert (refused.status_code, refused.json()["error"]) == (
        400,
        "Upload the file: this demo fetches nothing from elsewhere.",
    )
    assert httpx.post(f"{url}gradio_api/queue/join", content=b"[" + b" " * 2**20 + b"]").status_code == 413


def test_the_page_may_load_only_what_is_its_own(served: tuple[Runner, str]) -> None:
    _, url = served
    answer = httpx.get(url)
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert Guard.__doc__  # it is what sends this header
    config = httpx.get(f"{url}config").json()
    assert not config.get("analytics_enabled") and not config.get("share_url")


def test_it_listens_on_this_machine_alone(served: tuple[Runner, str]) -> None:
    assert served[1].startswith("http://127.0.0.1:")


def test_the_api_has_names_and_no_inner_handlers(client: Client) -> None:
    described: Any = client.view_api(return_format="dict", print_info=False)
    assert set(described["named_endpoints"]) == {"/search", "/rerun", "/stop", "/choices"}
    assert described["unnamed_endpoints"] == {}
    named = [p["parameter_name"] for p in described["named_endpoints"]["/search"]["parameters"]]
    assert named == ["prompt", "model", "searcher", "verifiers", "report", "budget", "seed", "mode"]
    choices = client.predict(api_name="/choices")
    assert "shapes-turbo" in choices["models"] and choices["max_budget"] == 200


@pytest.mark.weights
def test_a_search_through_the_api_and_again_from_its_picture(served: tuple[Runner, str], client: Client) -> None:
    runner, _ = served
    job = client.submit(**FORM, api_name="/search")
    told = list(job)
    image, plain, result = told[-1]
    assert [m[2]["nfe"] for m in told] == sorted(m[2]["nfe"] for m in told)
    assert result["state"] == "done" and result["nfe"] == 20 and result["stopped"] == "complete"
    assert set(result["scores"]) == {"clip", "shapes"} and set(result["plain"]["scores"]) == {"clip", "shapes"}
    assert str(runner.out) not in json.dumps(result)
    found = png.read(Path(image))
    assert (found.prompt, found.seed, found.nfe, found.model) == (PROMPT, 7, 20, "shapes-turbo")
    assert Image.open(plain).size == Image.open(image).size
    assert "two-red-circles-above-a-blue-square-7-compare.png" in {path.name for path in runner.out.iterdir()}
    assert runner.estimate("shapes-turbo", "best-of-n", ["clip"], 20) is not None

    again, none, said = client.predict(handle_file(image), api_name="/rerun")
    assert said["said"] == "Identical: all 4096 pixels are the same."
    assert none is None
    assert Image.open(again).tobytes() == Image.open(image).tobytes()

    words = shlex.split(result["command"])
    assert words[:2] == ["imgscale", "generate"] and words[-1] == PROMPT and words[words.index("--seed") + 1] == "7"
    code = result["python"].replace('"image.png"', repr(str(Path(image).with_name("python.png"))))
    exec(compile(code, "python", "exec"), {})
    assert Image.open(Path(image).with_name("python.png")).tobytes() == Image.open(image).convert("RGB").tobytes()


@pytest.mark.weights
def test_a_bandit_chooses_explains_learns_and_its_picture_is_made_again(
    served: tuple[Runner, str], client: Client, offer: Offer
) -> None:
    told = list(client.submit(**{**AUTO, "budget": 50}, api_name="/search"))
    image, _, result = told[-1]
    assert re.fullmatch(
        r"shapes-turbo, best-of-n, 8 NFE: expected quality 0\.\d\d ± 0\.\d\d, .* GFLOPs", result["chosen"]
    )
    assert any(m[2].get("chosen") == result["chosen"] for m in told[:-1])  # before it is over
    assert (result["model"], result["nfe"], result["state"]) == ("shapes-turbo", 8, "done")
    assert set(result["scores"]) == {"clip", "shapes"}
    assert offer.policy is not None and opened(offer.policy)[0].learned == 1
    words = shlex.split(result["command"])  # the very search, not another decision
    assert words[words.index("--model") + 1] == "shapes-turbo" and words[words.index("--budget") + 1] == "8"
    asked = shlex.split(result["auto"]["command"])
    assert asked[2:6] == ["--model", "auto", "--mode", "cost"] and "--pool" not in asked
    assert "imgscale.load('auto', mode='cost')" in result["auto"]["python"]
    _, _, said = client.predict(handle_file(image), api_name="/rerun")
    assert said["said"] == "Identical: all 4096 pixels are the same."
    with pytest.raises(AppError, match="The budget is too small for every action of the pool"):
        client.predict(**{**AUTO, "budget": 4}, api_name="/search")
    assert opened(offer.policy)[0].learned == 1


@pytest.mark.weights
def test_who_stops_while_the_choice_loads_is_not_searched_for(
    served: tuple[Runner, str], offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn or learned then; who stops in the search has the best so far, and nothing is learned either."""
    runner, _ = served
    job = offer.job(**AUTO)
    assert isinstance(job, AutoJob)
    bandit = runner._auto(job)
    before, choose, chosen = bandit.store.policy.learned, bandit.choose, []
    ticket = Ticket(runner.desk, "ann", lambda ticket: None)
    ticket.stopped = True
    runner._choose(ticket, job)
    assert ticket.view == View()

    leaving = Ticket(runner.desk, "eve", lambda ticket: None)

    def while_it_chooses(*given: Any, **more: Any) -> Any:
        leaving.stopped = True
        chosen.append(choose(*given, **more))
        return chosen[-1]

    monkeypatch.setattr(bandit, "choose", while_it_chooses)
    runner._choose(leaving, job)
    assert leaving.view == View() and len(chosen) == 1
    monkeypatch.undo()

    class Late(Ticket):
        def show(self, **changes: Any) -> None:
            super().show(**changes)
            self.stopped = True

    late = Late(runner.desk, "ben", lambda ticket: None)
    runner._choose(late, job)
    assert late.view.output is not None and late.view.output.stopped == "cancelled"
    assert bandit.store.policy.learned == before


@pytest.mark.weights
def test_no_model_is_loaded_twice(offer: Offer, tmp_path: Path) -> None:
    """What the bandit has is lent to others, and the other way round; its price stays its own."""
    for first in ("auto", "shapes-turbo"):
        runner = Runner(replace(offer, policy=tmp_path / f"{first}.policy"), tmp_path)
        plain, auto = runner.offer.job(**FORM), runner.offer.job(**AUTO)
        assert isinstance(auto, AutoJob)
        for job in (plain, auto) if first == "shapes-turbo" else (auto, plain):
            runner._choose(Ticket(runner.desk, "ann", lambda ticket: None), auto) if job is auto else runner._scaler(
                job
            )
        own, lent = runner._scaler(plain), runner._auto(auto).residents.find("shapes-turbo")
        assert lent is not None and lent.engine is own.engine
        assert lent.price is not None and own.price is None
        assert runner._scaler(replace(plain, dtype="float32")) is own  # as its pictures say
        runner.desk.close()


@pytest.mark.weights
def test_two_clients_wait_for_each_other_and_stop_at_once(served: tuple[Runner, str], client: Client) -> None:
    runner, url = served
    second = Client(url, verbose=False)
    long = {**FORM, "searcher": "rbf", "budget": 200, "model": "shapes-flow"}
    one = client.submit(**long, api_name="/search")
    until(lambda: any(m[2]["state"] == "searching" and m[2]["nfe"] for m in one.outputs()))
    two = second.submit(**FORM, api_name="/search")
    until(lambda: two.outputs())
    assert (two.outputs()[0][2]["state"], two.outputs()[0][2]["ahead"]) == ("waiting", 1)
    assert second.predict(api_name="/stop")
    until(two.done)
    assert two.outputs()[-1][2]["state"] == "left"
    assert client.predict(api_name="/stop")
    until(one.done)
    image, _, result = one.outputs()[-1]
    assert result["stopped"] == "cancelled" and 0 < result["nfe"] < 200
    assert png.read(Path(image)).stopped == "cancelled"
    assert not client.predict(api_name="/stop")
    until(lambda: len(runner.desk) == 0)
    second.close()


@pytest.mark.weights
def test_the_docs_example(served: tuple[Runner, str], tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "demo.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    said: list[str] = []
    code = code.replace('"http://127.0.0.1:7860"', f"{served[1]!r}, download_files={str(tmp_path)!r}")
    exec(compile(code, "demo.md", "exec"), {"print": lambda *values: said.append(" ".join(map(str, values)))})
    assert said[-1] == "Identical: all 4096 pixels are the same."
    assert re.fullmatch(r"done (5\d|60) 0", said[-3])


def test_the_apis_refusals_are_sentences(client: Client) -> None:
    with pytest.raises(AppError, match=r"^The seed can't be 'abc'; give a whole number from 0 to 2\*\*63 - 1\.$"):
        client.predict(**{**FORM, "seed": "abc"}, api_name="/search")
    with pytest.raises(AppError, match="The prompt is empty"):
        client.predict(**{**FORM, "prompt": " "}, api_name="/search")
    with pytest.raises(AppError, match="maximum value 200"):  # gradio's own check
        client.predict(**{**FORM, "budget": 10**9}, api_name="/search")


def test_a_picture_without_settings_is_one_sentence(client: Client, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    with pytest.raises(AppError, match="^The picture holds no imgscale settings; give a PNG that"):
        client.predict(handle_file(tmp_path / "plain.png"), api_name="/rerun")


@pytest.mark.parametrize("slow", [2, 3])
def test_a_busy_machine_is_given_time_and_then_told(
    slow: int, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradio gives up on its own page after three seconds: that is tried again, twice."""
    asked: list[str] = []
    real = networking.url_ok

    def ok(url: str) -> bool:
        asked.append(url)
        return len(asked) > slow and real(url)

    monkeypatch.setattr(networking, "url_ok", ok)
    if slow < serve.PATIENCE:
        with serve.served(Runner(offer, tmp_path)) as url:
            assert httpx.get(url).status_code == 200
    else:
        with pytest.raises(UserError, match="didn't answer itself at 127.0.0.1 in 3 attempts: the machine is too busy"):
            with serve.served(Runner(offer, tmp_path)):
                pass
    assert len(asked) == 3


def test_a_port_that_is_taken_is_one_sentence(served: tuple[Runner, str], offer: Offer, tmp_path: Path) -> None:
    port, folder = int(served[1].rstrip("/").rpartition(":")[2]), os.environ["GRADIO_TEMP_DIR"]
    with pytest.raises(UserError, match=f"can't listen at 127.0.0.1 port {port}"):
        with serve.served(Runner(replace(offer), tmp_path), port=port):
            pass
    assert os.environ["GRADIO_TEMP_DIR"] == folder  # of the one that goes on


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--port", "70000"], "--port can't be '70000'; give a whole number from 0 to 65535."),
        (["--max-budget", "0"], "--max-budget can't be '0'"),
        (["--max-queue", "many"], "--max-queue can't be 'many'"),
        (["--model", "nothing"], "Unknown model 'nothing'"),
        (["--verifier", "nothing"], "Unknown verifier 'nothing'"),
        (["--dtype", "int8"], "Unknown dtype 'int8'"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(
    options: list[str], part: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main.main(["demo", *options])
    said = capfd.readouterr().err
    assert ended.value.code == 2 and part in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_gradio_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['gradio'] = None; from imgscale.app import main; main.main(['demo'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and "get it with pip install 'imgscale[demo]'." in ran.stderr


def test_the_doctor_says_what_the_demo_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"no-such-package": "demo"})
    found = list(doctor._packages())[-1]
    assert (found.ok, found.needs) == (False, "package")
    assert found.detail == "imgscale demo needs it: pip install 'imgscale[demo]'"


@pytest.mark.weights
def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    words = ["demo", "--port", "0", "--model", "shapes-turbo", "--device", "cpu", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-m", "imgscale.app", *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.fullmatch(
            r"imgscale: the demo is at (http://127\.0\.0\.1:\d+/); results go to .*; Ctrl-C ends\.\n", line
        )
        assert found, line
        assert "imgscale" in httpx.get(found[1]).text
        server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
        assert server.wait(WAIT) == 0, rest
    assert rest == "\nimgscale: stopping; searches end with their best so far.\n"
