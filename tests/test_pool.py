"""The pool file: every key, and one sentence for everything that can't be."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from imgscale import verification
from imgscale.bandit import Prompts, lessons, poolfile
from imgscale.bandit.actions import Action
from imgscale.bandit.costs import Spent, pruned
from imgscale.bandit.poolfile import Entry, PoolFile, Search, Settings
from imgscale.errors import UserError
from tests.bandits import MODELS

FULL = """
verifier = "clip(model=shapes-clip)"
check = "count>=0"
early_exit = "calibrated(delta=0.1)"
resident = 3
lessons = "lessons.json"
searchers = ["best-of-n", "rbf+dps", "bfs(local, width=4)"]
samples = [1, 2]

[policy]
kind = "thompson"
mode = 0.7
alpha = 0.1
epsilon = 0
discount = 0.999
ridge = 2
products = 3
prior = false
worth = 50
dense = false
correct = 1
score = 0.25
projected = 8
log = false

[[models]]
name = "sdxl"
source = "stabilityai/stable-diffusion-xl-base-1.0"
prior = 0.4
optional = true
device = "cuda:1"
dtype = "float16"
max_batch = 4
steps = 30
guidance = 5
height = 768
width = 512
preview = "tiny"
searchers = ["best-of-n"]
samples = [1, 4]
budgets = [200]

[[models]]
name = "shapes-turbo"
actions = [{searcher = "rbf", nfe = 40}, {searcher = "best-of-n(n=2)", nfe = 8}]
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(FULL)
    pool = poolfile.read(file)
    said = tomllib.loads(FULL)
    assert pool.model_dump(exclude_unset=True) == said  # nothing is dropped, and nothing made up
    fields: dict[str, Any] = {"models": Entry, "policy": Settings}
    known = {**{name: set(kind.model_fields) for name, kind in fields.items()}, "actions": set(Search.model_fields)}
    written: dict[str, set[str]] = {
        **{"models": set().union(*said["models"]), "policy": set(said["policy"])},
        "actions": set(said["models"][1]["actions"][0]),
    }
    assert written == known and set(said) == set(PoolFile.model_fields)  # the example above is whole
    assert pool.lessons_path == tmp_path / "lessons.json"
    assert (pool.models[0].model, pool.models[1].model) == ("stabilityai/stable-diffusion-xl-base-1.0", "shapes-turbo")


def test_the_bundled_pool_is_of_the_bundled_models() -> None:
    pool = poolfile.read()
    assert [entry.name for entry in pool.models] == ["shapes-turbo", "shapes-flow", "shapes-flow-large", "shapes-ddpm"]
    assert [entry.optional for entry in pool.models] == [False, False, True, False] or not pool.models[2].optional
    assert (resources.files("imgscale.bandit") / "default.toml").is_file()
    assert pool.lessons_path is not None
    taught = lessons.read(pool.lessons_path)
    assert {action.model.name for action in taught.actions} <= {entry.name for entry in pool.models}
    clip = verification.make("clip", clip="shapes-clip", device="cpu")
    assert taught.fits(Prompts(256, pool.policy.projected).names, clip.identity())  # or a new policy would lack them


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = ", "The pool file .* is no TOML .*; mend it"),
        ("", "is empty; list at least one model under \\[\\[models\\]\\]"),
        (
            "[[models]]\nname = 'a/b'\n[[models]]\nname = 'a/b'",
            "lists the model 'a/b' twice; name one of them differently",
        ),
        ("[[models]]\nsource = 'a/b'", "lacks models.0.name; give it"),
        ("modell = 1", "Unknown key of the pool .* 'modell'; choose one of: .*models.* Did you mean 'models'"),
        ("[[models]]\nname = 'a/b'\nstep = 4", "Unknown key of the pool .* 'step'; choose one of: .*steps"),
        ("[policy]\nalfa = 1\n", "Unknown key of the pool .* 'alfa'; choose one of: alpha"),
        (
            "[[models]]\nname = 'a/b'\nactions = [{searcher = 'rbf', budget = 4}]",
            "'budget'; choose one of: nfe, searcher",
        ),
        ("[[models]]\nname = 'a/b'\nsteps = 0", "models.0.steps of the pool .* can't be 0: input should be greater"),
        ("[[models]]\nname = 'a/b'\nprior = 2", "models.0.prior of the pool .* can't be 2"),
        ("[[models]]\nname = 'a/b'\ndtype = 'int8'", "models.0.dtype of the pool .* can't be 'int8': .*'bfloat16'"),
        (
            "[policy]\nmode = 'best'\n",
            "policy.mode of the pool .* can't be 'best': give cost, balanced, quality, or the w",
        ),
        ("[policy]\nscore = 0\n", "policy.score of the pool .* can't be 0: input should be greater than 0"),
        ("samples = []", "samples of the pool .* can't be \\[\\]"),
        ("resident = 0", "resident of the pool .* can't be 0"),
        ("searchers = ['rfb']\n[[models]]\nname = 'a/b'", "Unknown searcher 'rfb'.* Did you mean 'rbf'"),
        ("[[models]]\nname = 'a/b'\nsearchers = ['rbf(x=1)']", "x"),
        ("[[models]]\nname = 'a/b'\nactions = [{searcher = 'rbf+nope', nfe = 4}]", "Unknown guide 'nope'"),
        ("verifier = 'clpi'\n[[models]]\nname = 'a/b'", "Unknown verifier 'clpi'"),
        ("verifier = 'clip+aesthetic'\n[[models]]\nname = 'a/b'", "can't be steered by .*give one verifier"),
        (
            "check = 'shapes'\n[[models]]\nname = 'a/b'",
            "The check can't be 'shapes'; give auto, none, or a verifier and a",
        ),
        ("check = 'nope>=1'\n[[models]]\nname = 'a/b'", "Unknown verifier 'nope'"),
        ("check = 'shapes>=much'\n[[models]]\nname = 'a/b'", "The check can't be 'shapes>=much'"),
        ("early_exit = 'always'\n[[models]]\nname = 'a/b'", "always"),
    ],
)
def test_what_cannot_be_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence) as caught:
        poolfile.read(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"can't be read \(No such file or directory\); give a TOML file \(docs/auto.md\)"
    ):
        poolfile.read(tmp_path / "nope.toml")
    (tmp_path / "latin.toml").write_bytes(b"check = '\xe9'")
    with pytest.raises(UserError, match="latin.toml.* can't be read"):
        poolfile.read(tmp_path / "latin.toml")


def test_a_check_is_a_verifier_and_a_score() -> None:
    assert poolfile.threshold("vqa(model=a>=b)>=0.5") == ("vqa(model=a>=b)", 0.5)
    assert poolfile.threshold("auto") is None and poolfile.threshold("none") is None


def test_searches_that_no_policy_needs_are_left_out() -> None:
    def made(searcher: str, nfe: int, spent: int, eflops: int) -> tuple[Any, Spent]:
        done = Spent(spent, 1, 1, eflops)
        return Action(MODELS[0], searcher, nfe, float(eflops)), done

    kept = pruned(
        [
            *(made("best-of-n", 4, 4, 40), made("best-of-n", 8, 8, 80)),
            made("rbf", 4, 4, 40),  # does what best-of-n does
            made("rbf", 8, 8, 70),  # another searcher is another matter
            made("rbf", 12, 8, 75),  # the same evaluations, dearer
            made("rbf", 16, 12, 70),  # more for the same
        ]
    )
    assert [action.name.partition(", ")[2] for action in kept] == [
        *("best-of-n, 4 NFE", "best-of-n, 8 NFE", "rbf, 16 NFE"),
    ]


# The page

PAGE = Path(__file__).parents[1] / "docs" / "auto.md"


def test_the_pool_files_of_the_page_are_right() -> None:
    examples = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    bundled, own = [poolfile.of(values) for values in examples]
    default = poolfile.read()
    assert (bundled.searchers, bundled.samples, bundled.models) == (
        *(default.searchers, default.samples, default.models[:2]),
    )
    assert [entry.name for entry in own.models] == ["flux-schnell", "sdxl", "flux-dev"]


def test_the_page_names_every_key_with_its_default() -> None:
    tables = re.findall(r"^\| (`[^|]*) \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    said = {key: default.strip().split(", ") for keys, default in tables for key in re.findall(r"`(\w+)`", keys)}
    kinds: list[Any] = [PoolFile, Entry, Settings]
    for kind in kinds:
        assert set(kind.model_fields) <= {*said, "policy"}
    for name in ("alpha", "epsilon", "projected"):
        assert float(said[name][0]) == Settings.model_fields[name].default
    assert [float(x) for x in said["ridge"]] == [Settings().ridge, Settings().products]
    assert [float(x) for x in said["correct"]] == [Settings().correct, Settings().score]
