"""The pages say what is so: their examples run, and the references hold every command, option and public name."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import typer

import imgscale
from imgscale import registry
from imgscale.app.main import app
from imgscale.budget import Budget
from scripts import api_page
from tests import zoo
from tests.doubles import Watched, new, run

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "search.md"


def test_the_page_s_own_searcher_runs_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "@imgscale.searcher" in b
    ]
    list(registry.searcher)  # discovered before the example adds its own, which is taken back afterwards
    monkeypatch.setattr(registry.searcher, "_entries", dict(registry.searcher._entries))
    exec(compile(example, str(PAGE), "exec"), {})
    world = Watched()
    search = run(world, new(world, "two-stage", budget=Budget(nfe=60)))
    assert search.best is not None and search.best.finished
    assert search.stopped == "complete" and 0 < search.meter.ledger.nfe == world.evaluations <= 60


# The command reference


def commands(group: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command, such as "policy show", and its options as they are typed; those of a group are its commands'."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{word} ")
        elif not command.hidden:
            shown = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
            yield name + word, {o for p in shown for o in [*p.opts, *p.secondary_opts]} - {"-h", "--help"}


def sections(page: str) -> dict[str, str]:
    """The text under each heading "## word" or "### word word"; what stands below a deeper one isn't in it."""
    parts = re.split(r"^##+ (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("command", "options"), list(commands(typer.main.get_command(app))))
def test_the_command_reference_holds_every_command_and_option(command: str, options: set[str]) -> None:
    page = (DOCS / "cli.md").read_text()
    assert re.search(rf"^    imgscale {command.split()[0]}\b", page.partition("\n## ")[0], re.MULTILINE), (
        f"docs/cli.md doesn't list {command} at its top"
    )
    text = sections(page)[command]
    missing = {option for option in options if not re.search(rf"`{option}[` ]", text)}
    assert not missing, f"docs/cli.md lacks these options of {command}: {', '.join(sorted(missing))}"
    rows = re.findall(r"^\| (`-[^|]*)\|", text, re.MULTILINE)
    gone = {option for row in rows for option in re.findall(r"`(--?[\w-]+)", row)} - options
    assert not gone, f"docs/cli.md has options that {command} doesn't: {', '.join(sorted(gone))}"


# The reference of the Python API


def test_the_reference_of_the_api_is_up_to_date() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "run: python scripts/api_page.py"


def test_the_reference_of_the_api_holds_every_public_name() -> None:
    names = {name for full in api_page.public() for name in [full.partition(":")[2]]}
    assert set(imgscale.__all__) <= names and set(importlib.import_module("imgscale.bandit").__all__) <= names
    assert {"Problem", "Guide", "Verifier", "Particles"} <= names


# Examples


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder, and registries that forget what examples add."""
    for each in (registry.searcher, registry.guide, registry.verifier):
        list(each)
        monkeypatch.setattr(each, "_entries", dict(each._entries))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: str, kind: str = "python") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def execute(source: str, page: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, page, "exec", dont_inherit=True), names)  # whose annotations are the example's own
    return names


@pytest.mark.weights
@pytest.mark.parametrize("page", ["quickstart.md", "extending.md", "faq.md"])
def test_the_examples_of_a_page_run_in_their_order(page: str, restored: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page):
        execute(block, page, names)
    out = names["out"]
    assert out.finished and len(out.images) >= 1 and not out.events


@pytest.mark.weights
def test_the_examples_of_extending_do_what_they_are_said_to(restored: Path) -> None:
    names: dict[str, Any] = {}
    seen = {}
    for block in blocks("extending.md"):
        names.pop("out", None)
        execute(block, "extending.md", names)
        if "out" in names:
            seen[names["out"].searcher, names["out"].verifier] = names["out"]
    halved = seen["halving", "clip"]
    # 8 to step 1 (2 evaluations each), … : more images are begun than whole samples would fit into what was spent
    assert halved.nfe <= 48 and halved.ledger.verifier_calls > 12
    white = seen["best-of-n", "mostly_white"]
    assert white.stopped == "ceiling" and white.nfe < 400
    assert 0 <= seen["best-of-n", "palette(near=0.4)"].scores["palette(near=0.4)"] <= 1
    assert "rbf+calm(pull=0.2)" in {searcher for searcher, _ in seen}
    with pytest.raises(imgscale.UserError, match="palette knows no colour"):
        names["scaler"]("a circle", verifier="palette", searcher="best-of-n", budget=8)


@pytest.mark.slow
@pytest.mark.weights
def test_a_plugin_brings_its_searcher_to_the_command_line(tmp_path: Path) -> None:
    """The page's own searcher, metadata and command, as pip would have laid them out."""
    (toml,) = blocks("extending.md", "toml")
    (entry,) = re.findall(r'^(halving = )"(.+)"$', toml, re.MULTILINE)
    about = tmp_path / "imgscale_halving-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: imgscale-halving\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[imgscale.plugins]\n{entry[0]}{entry[1]}\n")
    (tmp_path / f"{entry[1]}.py").write_text(blocks("extending.md")[0])
    (command,) = re.findall(r"^    imgscale (generate .*)$", (DOCS / "extending.md").read_text(), re.MULTILINE)
    run = subprocess.run(
        [sys.executable, "-m", "imgscale.app", *shlex.split(command), "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{DOCS.parent}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["searcher"] == "halving" and int(told["options"]["begin"]) == 4 and told["nfe"] <= 24

    (tmp_path / f"{entry[1]}.py").write_text("import nothing_of_this_name")
    broken = subprocess.run(
        [sys.executable, "-m", "imgscale.app", "list", "searchers"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{DOCS.parent}"},
        capture_output=True,
        text=True,
    )
    assert broken.returncode == 2 and "The plugin 'halving' of the package 'imgscale-halving'" in broken.stderr


MODELS = blocks("own-models.md")
SMALLER = {
    r'verifier="clip"': 'verifier="sharpness"',
    r'preview="tiny"': 'preview="linear"',
    r"budget=\d+": "budget=12",
    r"num_inference_steps=\d+": "num_inference_steps=4",
    r"(height|width)=1024": r"\1=16",
}


@pytest.mark.parametrize("block", MODELS, ids=lambda block: " ".join(re.findall(r'"([\w.-]+/[\w.-]+)"', block)))
def test_the_code_for_a_model_of_one_s_own_runs(block: str, monkeypatch: pytest.MonkeyPatch, restored: Path) -> None:
    compile(block, "own-models.md", "exec")
    for name in re.findall(r"^from diffusers import (.+)$", block, re.MULTILINE):
        assert all(hasattr(diffusers, each.strip()) for each in name.split(","))
    if "torchao" in block:
        return  # tests/test_quantised.py runs it where it is installed
    (name,) = re.findall(r"(\w+Pipeline)\.from_pretrained", block)
    cls = getattr(diffusers, name)
    for method in ("enable_model_cpu_offload", "load_lora_weights", "fuse_lora"):
        assert method not in block or callable(getattr(cls, method))
        monkeypatch.setattr(cls, method, lambda self, *args, **kwargs: None, raising=False)
    monkeypatch.setattr(cls, "from_pretrained", lambda *args, **kwargs: zoo.build(name))
    for pattern, smaller in SMALLER.items():
        block = re.sub(pattern, smaller, block)
    out = execute(block, "own-models.md", {})["out"]
    assert out.finished and 4 <= out.nfe <= 12


# The index


def test_the_index_names_every_page_once() -> None:
    named = re.findall(r"^- \[[^]]+\]\(([\w.-]+\.md)[#)]", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_within_the_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        file, _, anchor = link.partition("#")
        if ":" in link:
            continue
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {link}"
