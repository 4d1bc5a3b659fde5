"""HPS v2.1, the human preference score of Wu et al. 2023: the cosine of a CLIP ViT-H/14 trained on which image people
chose.

It is computed by open_clip from the published checkpoint. The hpsv2 package fits the longer side of an image into the
square and fills up with black, where CLIP's own preparation cuts the longer side; the same is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from imgscale.registry import verifier
from imgscale.verifiers._network import check, fetch_file
from imgscale.verifiers.clip import Clip


@verifier("hps", cite="wu2023human")
class Hps(Clip):
    """HPS v2.1: how much people would prefer an image for its prompt, as the cosine of a tuned CLIP (0.2 to 0.35).

    The score is the raw cosine, as hpsv2.score gives it; the tables of its benchmark print a hundred times that.

    Args:
        model: The checkpoint: a file, a folder with one, or ``owner/name/file`` of the hub.
        architecture: Which of open_clip's models it fills.
        revision: A branch, tag or commit of the hub.
        device: Where it runs; where the images are, if None.
        dtype: Of both towers: float32, bfloat16 or float16. The embeddings are normalised and compared in float32.
        offload: Leave the device after every call.

    Raises:
        UserError: when there is no such checkpoint, or it doesn't fit the architecture; the message says which and why.
    """

    name = "hps"
    licence = "Apache-2.0"

    def __init__(
        self,
        *,
        model: str = "xswu/HPSv2/HPS_v2.1_compressed.pt",
        architecture: str = "ViT-H-14",
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        file, found = fetch_file("HPS model", model, revision)
        super().__init__(model=architecture, pretrained=str(file), device=device, dtype=dtype, offload=offload)
        self.network.source, self.network.revision = model, found
        self._architecture = architecture

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)`` in [-1, 1].

        Gradients reach the images where autograd is on.
        """
        check("hps", images, prompts)
        return super().__call__(images, prompts)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """That of CLIP, but the whole image is seen: its longer side fits, and the rest is black."""
        return {**super().preprocessing, "resize_mode": "longest", "fill_color": 0}

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: source, revision, hash, architecture, preprocessing, dtype."""
        return {**super().identity(), "architecture": self._architecture}
