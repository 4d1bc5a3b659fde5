"""Costs that a model's searches were found to have: counted once each, and only where somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from imgscale.budget import Budget, Price
from imgscale.conditions import freeze

if TYPE_CHECKING:
    from imgscale.cost import Cost
    from imgscale.denoiser import Denoiser
    from imgscale.models import ModelSettings
    from imgscale.rewards import Verifier


class Prices:
    """What searches with one model cost.

    Args:
        denoiser: The model.
        name: Its name.
        settings: Its defaults.
    """

    def __init__(self, denoiser: Denoiser, name: str, settings: ModelSettings) -> None:
        self._denoiser, self._name, self._settings = denoiser, name, settings
        self._counted: dict[Any, tuple[Cost, Any]] = {}

    def cost(self, judge: Verifier | None, decoder: Any, arguments: Mapping[str, Any]) -> Cost:
        """What each part costs; see `imgscale.cost`.

        Args:
            judge: What scores; nothing for None.
            decoder: What decodes previews.
            arguments: Of the pipeline's call: height, width, guidance_scale, …

        Raises:
            UserError: It can't be counted.
        """
        from imgscale import cost, hardware

        key, denoiser = _key(judge, decoder, arguments), self._denoiser
        if key not in self._counted:
            given = dict(arguments)
            if given["guidance_scale"] is None:
                given["guidance_scale"] = self._settings.guidance_scale
            found = cost.measure(
                denoiser.pipe,
                self._name,
                hardware.of(denoiser.device, denoiser.dtype),
                defaults=denoiser.defaults,
                steps=self._settings.steps,
                preview=decoder,
                verifier=judge,
                **given,
            )
            self._counted[key] = found, (judge, decoder)  # alive, or another might get its id
        return self._counted[key][0]

    def price(self, limits: Budget, judge: Verifier, decoder: Any, arguments: Mapping[str, Any]) -> Price | None:
        """What a search reckons with: where eFLOPs are limited, or have been counted already; None elsewhere."""
        if limits.eflops is None and _key(judge, decoder, arguments) not in self._counted:
            return None
        return self.cost(judge, decoder, arguments).price


def _key(judge: Verifier | None, decoder: Any, arguments: Mapping[str, Any]) -> Any:
    """What costs depend on; objects that are alive here are told apart by their ids."""
    return id(getattr(judge, "function", judge)), id(decoder), freeze(arguments)
