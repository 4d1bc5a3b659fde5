"""imgscale: better images from a diffusion or flow model, without retraining, by searching at inference time.

    import imgscale
    scaler = imgscale.load("shapes-flow")
    out = scaler("two red circles and a blue square", searcher="rbf", verifier="clip", budget=200, seed=0)
    out.images[0], out.scores, out.trace

Names are resolved on first use, so that importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Ask",
    "Budget",
    "Done",
    "EarlyExit",
    "Noise",
    "Progress",
    "Rollover",
    "Scaler",
    "Scored",
    "SearchOutput",
    "UserError",
    "auto",
    "load",
    "score",
    "searcher",
    "verifier",
]

if TYPE_CHECKING:
    from imgscale.asks import Ask, Done
    from imgscale.automatic import auto
    from imgscale.budget import Budget, Rollover
    from imgscale.callables import verifier
    from imgscale.early_exit import EarlyExit
    from imgscale.errors import UserError
    from imgscale.noise import Noise
    from imgscale.registry import searcher
    from imgscale.result import SearchOutput
    from imgscale.scaler import Scaler, load
    from imgscale.scoring import Scored, score
    from imgscale.watch import Progress

_HOMES = {
    "Ask": "asks",
    "Done": "asks",
    "auto": "automatic",
    "Budget": "budget",
    "Rollover": "budget",
    "verifier": "callables",
    "EarlyExit": "early_exit",
    "UserError": "errors",
    "Noise": "noise",
    "searcher": "registry",
    "SearchOutput": "result",
    "Progress": "watch",
    "Scaler": "scaler",
    "load": "scaler",
    "Scored": "scoring",
    "score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'imgscale' has no attribute {name!r}")
    return getattr(importlib.import_module(f"imgscale.{_HOMES[name]}"), name)
