"""Several verifiers as one: their scores, which have no unit in common, are brought to ranks or z-scores first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.rewards import Verifier, is_ensemble
from imgscale.verifiers._network import check

Combine = Literal["rank", "zscore", "min", "product"]


@verifier("ensemble", cite="ma2025inference")
class Ensemble:
    """Several verifiers as one, which scores images among all others of the same search.

    An image gets, for each member, its rank in (0, 1) among all images that the search has scored by then (the share of
    those below it, and half of those like it), or its z-score among them. So its scores tell images of one prompt
    apart and mean nothing across prompts; results also hold what each member says.

    Args:
        of: The members: ``clip+aesthetic``, or verifiers. ``clip+aesthetic`` alone also names such an ensemble.
        combine: "rank": the mean rank (Ma et al. 2025, verifier ensemble); "zscore": the mean z-score; "min": the worst
            rank, so that no member may be ignored; "product": the geometric mean of the ranks, a product of experts.
        weights: Of the members in means and products: ``2:1``, or numbers. Equal for None.

    Raises:
        UserError: There are fewer than two members, or the weights don't fit them.
    """

    range: tuple[float, float] | None = None  # a rank of 1 only says that nothing better has been seen
    differentiable = False

    def __init__(
        self,
        *,
        of: str | Sequence[Verifier] = (),
        combine: Combine = "rank",
        weights: str | Sequence[float] | None = None,
    ) -> None:
        if isinstance(of, str) or len(of) < 2:
            said = of if isinstance(of, str) else " and ".join(part.name for part in of) or "nothing"
            raise UserError(f"An ensemble can't be of {said}; give two verifiers or more, such as clip+aesthetic.")
        self.parts = tuple(of)
        if nested := [part.name for part in self.parts if is_ensemble(part)]:
            raise UserError(f"The ensemble {nested[0]!r} can't be a member of another; name its members instead.")
        names = [part.name for part in self.parts]
        if len({*names}) < len(names):
            raise UserError(f"The members of an ensemble can't be {', '.join(names)}; give each once.")
        self.name = "+".join(names)
        self.reads_prompt = any(part.reads_prompt for part in self.parts)
        self.licence = "; ".join(dict.fromkeys(str(getattr(part, "licence", "unknown")) for part in self.parts))
        if combine not in ("rank", "zscore", "min", "product"):
            raise UserError(f"An ensemble can't combine by {combine!r}; choose rank, zscore, min or product.")
        self._combine = combine
        self._weights = _weights(weights, len(names), combine)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1], each among those of the same prompt: float32 ``(n,)``."""
        check(self.name, images, prompts)
        said = torch.stack([part(images, prompts).detach().double() for part in self.parts], 1)
        scores = torch.zeros(len(images), dtype=torch.float64, device=said.device)
        for prompt in dict.fromkeys(prompts):
            rows = torch.tensor([p == prompt for p in prompts], device=said.device)
            scores[rows] = self.combine(said[rows], said[rows])
        return scores.float().to(images.device)

    def combine(self, rows: Tensor, seen: Tensor) -> Tensor:
        """Scores float64 (n,) of images whose scores by the k members are ``rows`` (n, k), among ``seen`` (m, k), which
        holds them.
        """
        if self._combine == "zscore":
            spread = seen.std(0, correction=0)
            return ((rows - seen.mean(0)) / torch.where(spread > 0, spread, 1.0)) @ self._weights.to(rows.device)
        ranks = torch.stack([_ranks(row, column) for row, column in zip(rows.T, seen.T, strict=True)], 1)
        match self._combine:
            case "rank":
                return ranks @ self._weights.to(rows.device)
            case "min":
                return ranks.amin(1)
        return (ranks.log() @ self._weights.to(rows.device)).exp()

    def identity(self) -> dict[str, Any]:
        """How it combines, and the identity of each member by name."""
        return {
            "name": self.name,
            "combine": self._combine,
            "weights": self._weights.tolist(),
            "of": {part.name: part.identity() for part in self.parts},
        }


def _ranks(values: Tensor, among: Tensor) -> Tensor:
    """Mid-ranks in (0, 1) of ``values`` (n,) among ``among`` (m,), which holds them."""
    ordered = among.sort().values.contiguous()
    values = values.contiguous()
    below = torch.searchsorted(ordered, values)
    return (below + torch.searchsorted(ordered, values, right=True)).double() / (2 * len(among))


def _weights(given: str | Sequence[float] | None, n: int, combine: str) -> Tensor:
    """Weights float64 (n,) that add to 1."""
    try:
        weights = [float(w) for w in (given.split(":") if isinstance(given, str) else given or [1.0] * n)]
    except (TypeError, ValueError):
        weights = []
    if len(weights) != n or not all(math.isfinite(w) and w > 0 for w in weights):
        raise UserError(f"The weights of {n} members can't be {given!r}; give {n} numbers above 0, such as 2:1.")
    if given is not None and combine == "min":
        raise UserError("The worst rank has no weights; leave them out, or combine by rank, zscore or product.")
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)
