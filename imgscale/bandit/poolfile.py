"""The pool file: which models the bandit may choose from, with which searches, and how it learns. TOML."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from imgscale.bandit.policy import MODES
from imgscale.errors import UnknownName, UserError

Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Counts = Annotated[list[Annotated[int, Field(ge=1, le=100_000)]], Field(min_length=1, max_length=100)]
Searchers = Annotated[list[Name], Field(min_length=1, max_length=100)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Search(_Strict):
    """One search of a model's own list, in the place of searchers x budgets.

    Args:
        searcher: Its name and options, with a guide if wanted.
        nfe: Its budget in model evaluations.
    """

    searcher: Name
    nfe: Annotated[int, Field(ge=1)]


class Entry(_Strict):
    """A model of the pool.

    Args:
        name: What the pool calls it; also what is loaded, unless ``source`` says so.
        source: Bundled name, folder or hub id.
        prior: The mean quality that its plain samples are expected to have, in [0, 1]; 0.5 says nothing.
        optional: Left out silently where it isn't on this machine.
        device: Where it runs.
        dtype: Of its weights.
        max_batch: Images per call of the network.
        steps: Of an ordinary sample; the model's default for None.
        guidance: Guidance scale; the model's default for None.
        height: In pixels; the model's default for None.
        width: In pixels; the model's default for None.
        preview: What decodes previews; the model's default for None.
        searchers: The pool's for None.
        samples: The pool's for None.
        budgets: In model evaluations, besides those in samples.
        actions: If given, these searches and no others.
    """

    name: Name
    source: Name | None = None
    prior: Share = 0.5
    optional: bool = False
    device: Name | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 32
    steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    guidance: Annotated[float, Field(ge=0)] | None = None
    height: Annotated[int, Field(ge=1, le=16384)] | None = None
    width: Annotated[int, Field(ge=1, le=16384)] | None = None
    preview: Name | None = None
    searchers: Searchers | None = None
    samples: Counts | None = None
    budgets: Counts | None = None
    actions: Annotated[list[Search], Field(min_length=1, max_length=200)] | None = None

    @property
    def model(self) -> str:
        """What is loaded."""
        return self.source or self.name


class Settings(_Strict):
    """How the policy chooses and learns.

    Args:
        kind: "linucb" or "thompson": those that can be saved.
        mode: "cost", "balanced", "quality", or the weight of quality, in [0, 1].
        alpha: Optimism, as for `LinUCB`; for "thompson" the spread of the draws.
        epsilon: Share of even draws, which makes the log of decisions usable for other policies.
        discount: What an observation counts after the next one; 1 never forgets.
        ridge: How firmly what is expected beforehand holds against evidence, as for `LinUCB`. A policy keeps that it
            began with.
        products: How much more firmly it does where prompts differ, as for `LinUCB`. The same holds.
        worth: How many of a new policy's own observations the lessons count for.
        prior: Whether models' priors, and what is known of searches, say what is expected beforehand; else 0.5 is.
        dense: Whether the verifier's score is learned from where there is a check, too, or the check alone.
        correct: Weight of the check's verdict in the quality.
        score: Weight of the verifier's score in it.
        projected: Directions of the prompt's embedding that the policy sees, where the verifier has embeddings.
        log: Whether decisions are logged beside the policy, prompts included.
    """

    kind: Literal["linucb", "thompson"] = "linucb"
    mode: Literal["cost", "balanced", "quality"] | Share = "balanced"
    alpha: Annotated[float, Field(ge=0)] = 0.2
    epsilon: Share = 0.05
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    ridge: Annotated[float, Field(gt=0)] = 10.0
    products: Annotated[float, Field(gt=0)] = 4.0
    prior: bool = True
    worth: Annotated[float, Field(ge=0)] = 30.0
    dense: bool = True
    correct: Annotated[float, Field(ge=0)] = 0.5
    score: Annotated[float, Field(gt=0)] = 0.5
    projected: Annotated[int, Field(ge=0, le=64)] = 16
    log: bool = True


class PoolFile(_Strict):
    """A pool as its file says it.

    Args:
        models: At least one, no two of one name.
        verifier: What steers all searches, and whose score is learned from. No ensemble: its scores only compare the
            images of one search.
        check: What says whether an image is right: "auto" (the shapes oracle, for bundled models and prompts that it
            can read), "none", or a verifier and a threshold such as "count>=0" or "vqa>=0.5".
        early_exit: Of all searches: "off", "calibrated", "paper", or one with options (docs/early-exit.md). Costs are
            reckoned without it.
        resident: How many models stay loaded; the least recently used leaves.
        searchers: Whose searches may be chosen, on each model that doesn't say otherwise.
        samples: Budgets in ordinary samples' worth of model evaluations.
        lessons: A file beside the pool file with what other prompts taught (`imgscale.bandit.lessons`): a new policy
            learns it at once, if it has the same verifier and features of prompts.
        policy: See `Settings`.
    """

    models: list[Entry]
    verifier: Name = "clip"
    check: Name = "auto"
    early_exit: Name = "off"
    resident: Annotated[int, Field(ge=1, le=1000)] = 2
    searchers: Searchers = ["best-of-n", "rbf"]
    samples: Counts = [1, 2, 4, 8, 16]
    lessons: Name | None = None
    policy: Settings = Settings()
    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def lessons_path(self) -> Path | None:
        """Where the lessons are."""
        return None if self.lessons is None else self._folder / self.lessons

    def checked(self, name: str) -> PoolFile:
        """The pool itself, once all that needs no model has been looked at.

        Raises:
            UserError: Names that don't exist, an empty pool, two models of one name, or a check that can't be.
        """
        from imgscale import early_exit, registry

        if not self.models:
            raise UserError(f"The pool {name} is empty; list at least one model under [[models]].")
        seen: set[str] = set()
        for entry in self.models:
            if entry.name in seen:
                raise UserError(f"The pool {name} lists the model {entry.name!r} twice; name one of them differently.")
            seen.add(entry.name)
            own = [action.searcher for action in entry.actions or ()]
            for spec in own or entry.searchers or self.searchers:
                searcher, guide = registry.compose(spec)
                registry.searcher.resolve(searcher)
                if guide is not None:
                    registry.guide.resolve(guide)
        if len(registry.members(self.verifier)) > 1 or registry.parse(self.verifier)[0] == "ensemble":
            raise UserError(
                f"The pool {name} can't be steered by {self.verifier!r}: an ensemble's scores only compare the images"
                " of one search; give one verifier."
            )
        registry.judges(self.verifier)
        threshold(self.check)
        early_exit.chosen(self.early_exit)
        return self


_KEYS = {kind.__name__: list(kind.model_fields) for kind in (Search, Entry, Settings, PoolFile)}


def read(path: str | Path | None = None) -> PoolFile:
    """A pool file, checked; the bundled pool for None.

    Raises:
        UserError: It can't be read, isn't TOML, or says something that can't be.
    """
    name = "default" if path is None else repr(str(path))
    place = resources.files("imgscale.bandit") / "default.toml" if path is None else Path(path).expanduser()
    try:
        values = tomllib.loads(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"The pool file {name} can't be read ({reason}); give a TOML file (docs/auto.md).") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The pool file {name} is no TOML ({error}); mend it.") from error
    made = of(values, name)
    made._folder = Path(str(place)).parent
    return made


def of(values: dict[str, Any], name: str = "given") -> PoolFile:
    """The pool of a pool file's values.

    Raises:
        UserError: A key or value that can't be, an empty pool.
    """
    try:
        return PoolFile.model_validate({"models": [], **values}).checked(name)
    except ValidationError as error:
        raise _sentence(error, name) from error


def threshold(check: str) -> tuple[str, float] | None:
    """The verifier of a check and the score from which on an image is right; None for "auto" and "none".

    Raises:
        UserError: It has another form, or there is no such verifier.
    """
    from imgscale import registry

    if check in ("auto", "none"):
        return None
    spec, sign, value = check.rpartition(">=")
    try:
        least = float(value)
    except ValueError:
        sign = ""
    if not sign or not spec.strip():
        raise UserError(f"The check can't be {check!r}; give auto, none, or a verifier and a score, such as shapes>=1.")
    registry.judges(spec.strip())
    return spec.strip(), least


def _sentence(error: ValidationError, name: str) -> UserError:
    """The first thing that is wrong, where it stands, and what to do."""
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # a key may be missing by a slip
    place = [str(part) for part in first["loc"] if not str(part).startswith(("literal[", "constrained", "float"))]
    where = ".".join(place) or "the file"
    if first["type"] == "extra_forbidden":
        owner = {"models": "Entry", "policy": "Settings"}.get(place[0] if len(place) > 1 else "", "PoolFile")
        known = _KEYS["Search" if "actions" in place[:-1] else owner]
        return UnknownName(f"key of the pool {name}", where.rpartition(".")[2], known)
    if first["type"] == "missing":
        return UserError(f"The pool {name} lacks {where}; give it.")
    what = f"{first['msg'][0].lower()}{first['msg'][1:]}"
    if where == "policy.mode":
        what = f"give {', '.join(MODES)}, or the weight of quality, a number from 0 to 1"
    return UserError(f"{where} of the pool {name} can't be {first['input']!r}: {what}.")
