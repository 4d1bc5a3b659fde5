"""The distribution: what lands in site-packages, what stays out, and that importing it stays light."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import imgscale
from imgscale import models

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("searchers", "verifiers", "app", "assets")
HEAVY = ("diffusers", "transformers", "open_clip", "gradio", "matplotlib")
MAX_WHEEL_MB = 90  # the package index takes 100
DATA_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".bib")  # weights, configurations, tokenizers, papers
# Never shipped: what training leaves behind, and pickles, which can run code when loaded.
UNSHIPPED = (".log", ".pt", ".pth", ".ckpt", ".bin", ".pkl", ".npz", ".pyc")


def run(*command: str, cwd: Path | str = "/", **env: str) -> str:
    """Runs a command and returns its output; a failure shows what the command printed."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Builds one distribution of `source` (kind `wheel` or `sdist`) and returns its path.

    It calls the build backend in this environment: no isolation, so no network.
    """
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, since a build leaves folders behind that would leak into the next one."""
    target = tmp_path_factory.mktemp("checkout") / "imgscale"
    unwanted = (
        ".git",
        ".venv",
        ".*_cache",
        "__pycache__",
        "build",
        "dist",
        "*.egg-info",
        "checkpoints",
        "runs",
    )
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*unwanted))
    return target


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder that holds the wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def names(archive: Path) -> set[str]:
    """The files of a wheel, or of an sdist without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if not member.isdir()}


def modules(folder: Path) -> set[str]:
    """The Python files under a source folder, relative to it; rglob does not go through the symlinks."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


def data_files() -> set[str]:
    """What is read at run time, relative to assets/."""
    found = {path.relative_to(ROOT / "assets") for path in (ROOT / "assets").rglob("*") if path.suffix in DATA_SUFFIXES}
    return {path.as_posix() for path in found if not {"checkpoints", "logs"} & set(path.parts)}


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    expected = {f"imgscale/{name}" for name in modules(ROOT / "imgscale")}
    for folder in FOLDERS:
        expected |= {f"imgscale/{folder}/{name}" for name in modules(ROOT / folder)}
    assert {name for name in names(wheel) if name.endswith(".py")} == expected


def test_wheel_claims_no_other_top_level_name(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {"imgscale", f"imgscale-{imgscale.__version__}.dist-info"}
    assert "imgscale/py.typed" in names(wheel)


def test_wheel_carries_the_bundled_models_and_nothing_of_their_training(wheel: Path) -> None:
    shipped = names(wheel)
    assert {f"imgscale/assets/{name}" for name in data_files()} <= shipped
    assert [name for name in shipped if name.endswith(UNSHIPPED) or "/checkpoints/" in name] == []
    assert wheel.stat().st_size < MAX_WHEEL_MB * 1e6


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    assert names(build("wheel", next(tmp_path.iterdir()), tmp_path)) == names(wheel)


def test_sdist_holds_each_file_once_and_what_a_packager_needs(sdist: Path) -> None:
    inside = names(sdist)
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/conftest.py"}
    assert needed <= inside
    twice = {f"imgscale/{folder}/" for folder in FOLDERS}
    assert [name for name in inside if name.startswith(tuple(twice))] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_lead_to_the_top_level_folders(folder: str) -> None:
    link = ROOT / "imgscale" / folder
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked sdist has no links and needs none")
    assert os.readlink(link) == f"../{folder}"


PROBE = """
import importlib, importlib.metadata, json, pkgutil, sys
import imgscale
light = sorted(sys.modules)
for package in {packages!r}:
    module = importlib.import_module(package)
    for found in pkgutil.iter_modules(module.__path__, package + "."):
        if {submodules} and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(json.dumps(dict(file=imgscale.__file__, light=light, all=sorted(sys.modules))))
"""


def probe(site: Path, *packages: str, submodules: bool = True) -> dict[str, Any]:
    """Imports packages from the unpacked wheel, away from the checkout; returns what that loaded."""
    code = PROBE.format(packages=packages, submodules=submodules)
    output = run(sys.executable, "-c", code, PYTHONPATH=str(site), PYTHONWARNINGS="ignore")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(site)
    return found


def test_importing_imgscale_is_light(site: Path) -> None:
    loaded = {name.partition(".")[0] for name in probe(site)["light"]}
    assert loaded.isdisjoint(HEAVY)


def test_no_module_is_imported_under_a_top_level_twin(site: Path) -> None:
    packages = ("imgscale.searchers", "imgscale.verifiers", "imgscale.app", "imgscale.assets")
    loaded = set(probe(site, *packages)["all"])
    assert loaded.issuperset(packages)
    assert loaded.isdisjoint(FOLDERS)


def test_this_installation_offers_no_top_level_twin() -> None:
    code = f"""if True:
        import importlib.util, imgscale
        specs = [importlib.util.find_spec(name) for name in {FOLDERS!r}]
        print([spec.origin for spec in specs if spec])"""
    assert str(ROOT) not in run(sys.executable, "-c", code)


@pytest.mark.weights
def test_bundled_models_load_from_the_wheel(site: Path) -> None:
    code = (
        "import imgscale, json; from imgscale import models\n"
        "for name in models.bundled(): imgscale.load(name, device='cpu')\n"
        "print(json.dumps(list(models.bundled())))"
    )
    loaded = json.loads(run(sys.executable, "-c", code, PYTHONPATH=str(site)).splitlines()[-1])
    assert loaded
    assert loaded == list(models.bundled())


def test_help_answers_without_loading_models(site: Path) -> None:
    code = (
        "import sys; from imgscale.app.main import main\n"
        "sys.argv = ['imgscale', '--help']\n"
        "try: main()\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    output = run(sys.executable, "-c", code, PYTHONPATH=str(site))
    assert "generate" in output
    assert output.splitlines()[-1] == "[]"


def test_versions_agree() -> None:
    version = imgscale.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    assert all("==" in line for line in lines if not line.startswith("#"))
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {normal(name.partition(">=")[0]) for name in wanted} <= pinned


def normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")
