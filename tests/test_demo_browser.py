"""The demo as people use it: a real browser, driven by playwright. Screenshots go to build/screenshots/."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from imgscale import png
from imgscale.app.demo import serve
from imgscale.app.demo.offer import Offer
from imgscale.app.demo.runner import Runner

ROOT = Path(__file__).resolve().parents[1]
SHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT = 120_000  # ms that something may take on a busy machine
PROMPT = "two red circles above a blue square"

POOL = """
[[models]]
name = "shapes-turbo"
actions = [{searcher = "best-of-n", nfe = 16}, {searcher = "rbf", nfe = 40}]
"""

pytestmark = [pytest.mark.weights]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("IMGSCALE_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("NO BROWSER: the demo's page isn't tested. Install Chromium (Debian: make browser).")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, str]]:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "pool.toml").write_text(POOL)
    auto: dict[str, Any] = {"policy": folder / "demo.policy", "pool": folder / "pool.toml"}
    offer = Offer.of(["shapes-turbo"], max_budget=1000, max_queue=4, **auto)
    runner = Runner(offer, folder)
    ticket = runner.measure("shapes-turbo")
    while not ticket.look().over:
        ticket.rest(1.0)
    with serve.served(runner) as url:
        yield runner, url


class Visitor:
    """Somebody with the page open, and what the page asked of which addresses.

    Args:
        page: Of the browser.
        url: Of the demo.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.asked, self.broken = page, [], []  # type: ignore[var-annotated]
        page.set_default_timeout(WAIT)
        expect.set_options(timeout=WAIT)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.broken.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#is-search")
        expect(page.locator(".is-estimate")).to_contain_text("on this machine")

    @property
    def status(self) -> Any:
        return self.page.locator(".is-status")

    def budget(self, nfe: int) -> None:
        field = self.page.locator("#is-budget input[type=number]")
        field.fill(str(nfe))
        field.press("Tab")

    def search(self) -> None:
        self.page.click("#is-search")

    def reaches(self, state: str, seconds: int = WAIT // 1000) -> str:
        expect(self.status).to_have_attribute("data-state", state, timeout=1000 * seconds)
        return str(self.status.inner_text())

    def picture(self, of: str) -> str | None:
        """Where a picture of the stage comes from: the data of the image itself."""
        shown = self.page.locator(f'.is-stage figure[data-of="{of}"] img')
        return shown.get_attribute("src") if shown.count() else None

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


@pytest.fixture
def visit(browser: Browser, served: tuple[Runner, str]) -> Iterator[Any]:
    """Opens the page, each time for another person; all leave at the end, and the line is empty again."""
    contexts = []

    def enter(width: int = 1280, height: int = 900, **options: Any) -> Visitor:
        context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True, **options)
        contexts.append(context)
        return Visitor(context.new_page(), served[1])

    yield enter
    for context in contexts:
        context.close()
    idle(served[0])


def idle(runner: Runner) -> None:
    """Waits until nobody is in the line."""
    for ticket in list(runner.desk._line):
        while not ticket.view.over:
            ticket.rest(0.1)


def test_a_search_from_the_prompt_to_the_download_and_again_from_the_png(visit: Any, tmp_path: Path) -> None:
    ann = visit()
    ann.shot("empty")
    ann.budget(160)
    ann.search()
    ann.reaches("searching")
    previews: set[str] = set()
    while ann.status.get_attribute("data-state") == "searching":  # the preview changes while it runs
        before = len(previews)
        previews |= {src for src in [ann.picture("best")] if src}
        if len(previews) > before:
            ann.shot("running")
    assert "Done" in ann.reaches("done")
    assert len(previews | {ann.picture("best")}) >= 2
    assert ann.picture("plain") and ann.picture("plain") != ann.picture("best")
    assert ann.page.locator(".is-gallery .cell").count() >= 1
    assert ann.page.locator(".is-chart path.steers").count() == 2
    assert ann.page.locator(".is-chart path.held").count() == 2
    assert re.search(r"model evaluations\s+\d+", ann.page.locator(".is-ledger").inner_text())
    assert "imgscale generate --model shapes-turbo" in ann.page.locator(".is-settings").inner_text()
    ann.shot("finished")
    with ann.page.expect_download() as downloading:
        ann.page.click("#is-download")
    picture = tmp_path / "picture.png"
    downloading.value.save_as(picture)
    assert png.read(picture).prompt == PROMPT

    ben = visit()  # another person, with other settings in the form
    ben.page.fill("#is-prompt textarea", "a blue star")
    ben.page.set_input_files("#is-drop input[type=file]", picture)
    assert "Identical: all 4096 pixels are the same." in ben.reaches("done")
    assert ben.page.input_value("#is-prompt textarea") == PROMPT
    assert "your picture" in ben.page.locator(".is-stage").inner_text()
    ben.shot("again")
    assert ann.broken == ben.broken == []
    elsewhere = [url for url in ann.asked + ben.asked if not re.match(r"(http://127\.0\.0\.1:|data:|blob:)", url)]
    assert elsewhere == []


def test_a_bandit_chooses_and_says_why(visit: Any) -> None:
    ann = visit()
    assert not ann.page.locator("#is-mode").is_visible()
    ann.page.click("#is-model input")
    ann.page.locator("[role=option]", has_text="auto").click()
    expect(ann.page.locator("#is-mode")).to_be_visible()
    expect(ann.page.locator("#is-searcher")).to_be_hidden()
    expect(ann.page.locator("#is-verifiers")).to_be_hidden()
    expect(ann.page.locator(".is-estimate")).to_contain_text("At most that many")
    ann.page.locator("#is-mode label", has_text="cost").click()
    ann.search()
    said = ann.reaches("done")
    assert re.search(r"shapes-turbo, [\w-]+, \d+ NFE: expected quality 0\.\d\d ± 0\.\d\d", said)
    assert ann.picture("plain") and ann.picture("best")
    settings = ann.page.locator(".is-settings").inner_text()
    assert "imgscale generate --model shapes-turbo" in settings and "imgscale.load('shapes-turbo'" in settings
    assert "imgscale generate --model auto --mode cost" in settings and "imgscale.load('auto', mode='cost')" in settings
    copied = ann.page.locator(".is-settings button.copy").evaluate_all("all => all.map(each => each.dataset.copy)")
    assert len(copied) == 4 and copied[2].startswith("imgscale generate --model auto --mode cost --budget 100 ")
    ann.shot("auto")
    ann.page.set_viewport_size({"width": 390, "height": 844})
    assert ann.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ann.shot("auto-phone")
    assert ann.broken == []


def test_stop_in_the_middle_shows_the_best_so_far(visit: Any) -> None:
    ann = visit()
    ann.budget(1000)
    ann.search()
    expect(ann.status).to_contain_text("left")  # some of it is spent
    ann.page.click("#is-stop")
    said = ann.reaches("done", 30)
    assert "Stopped: this is the best so far." in said
    spent = int(ann.page.locator(".is-ledger dd").first.inner_text())
    assert 0 < spent < 1000
    assert ann.picture("best")
    expect(ann.page.locator("#is-search")).to_be_enabled()
    expect(ann.page.locator("#is-stop")).to_be_disabled()
    ann.shot("stopped")


def test_who_waits_sees_the_place_and_a_closed_tab_frees_the_device(visit: Any, served: tuple[Runner, str]) -> None:
    ann, ben = visit(), visit()
    ann.budget(1000)
    ann.search()
    ann.reaches("searching")
    ben.budget(20)
    ben.search()
    assert "Next in line" in ben.reaches("waiting")
    ben.shot("waiting")
    (first, second) = list(served[0].desk._line)
    ann.page.close()
    assert "Done" in ben.reaches("done")
    assert first.view.nfe < 1000 and second.view.state == "done"


def test_what_cannot_be_is_a_sentence_and_the_page_goes_on(visit: Any, tmp_path: Path) -> None:
    ann = visit()
    ann.page.fill("#is-prompt textarea", "   ")
    ann.search()
    assert ann.reaches("failed") == "The prompt is empty; write what the image should show."
    ann.page.fill("#is-prompt textarea", PROMPT)
    ann.page.fill("#is-seed input, #is-seed textarea", "seven")
    ann.search()
    expect(ann.status).to_contain_text("The seed can't be 'seven'; give a whole number from 0 to 2**63 - 1.")
    Image.new("RGB", (64, 64)).save(tmp_path / "other.png")
    ann.page.set_input_files("#is-drop input[type=file]", tmp_path / "other.png")
    expect(ann.status).to_contain_text("The picture holds no imgscale settings")
    ann.shot("refused")
    assert ann.broken == []


def test_it_fits_a_phone_and_the_dark(visit: Any) -> None:
    ann = visit(390, 844, color_scheme="dark", device_scale_factor=2)
    ann.budget(20)
    ann.search()
    ann.reaches("done")
    assert ann.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = ann.page.locator(".is-stage").bounding_box()
    assert box and box["width"] <= 390
    background = ann.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background)[:3])) < 150
    ann.shot("phone")
