"""ImageReward-v1.0 (Xu et al. 2023): BLIP reads the prompt while it looks at the image, and a small head rates that.

The published checkpoint names its tensors as BLIP's own code did. They are put into transformers' BLIP, whose parts
compute the same; the image-reward package, which doesn't run with present releases of transformers, isn't needed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from imgscale.errors import UserError
from imgscale.registry import verifier
from imgscale.verifiers._network import Network, check, fetch_file, plain_tensors, read_state, why_not
from imgscale.verifiers.aesthetic import Head
from imgscale.verifiers.clip import preprocess

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output on the authors' images
ROOM = 35  # tokens of a prompt
PER_HEAD = 64  # channels of an attention head, in every BLIP and BERT
VISION = "blip.visual_encoder."
TEXT = "blip.text_encoder."
HEAD = "mlp."
WORDS = TEXT + "embeddings.word_embeddings.weight"
# BLIP's names for the parts of its vision transformer, and transformers'. In the text encoder they agree.
NAMES = {
    r"^cls_token$": "embeddings.class_embedding",
    r"^pos_embed$": "embeddings.position_embedding",
    r"^patch_embed\.proj\.": "embeddings.patch_embedding.",
    r"^norm\.": "post_layernorm.",
    r"^blocks\.(\d+)\.norm([12])\.": r"encoder.layers.\1.layer_norm\2.",
    r"^blocks\.(\d+)\.attn\.qkv\.": r"encoder.layers.\1.self_attn.qkv.",
    r"^blocks\.(\d+)\.attn\.proj\.": r"encoder.layers.\1.self_attn.projection.",
    r"^blocks\.(\d+)\.mlp\.": r"encoder.layers.\1.mlp.",
}


class Blip(nn.Module):
    """The two towers of BLIP: what the first token has come to, having looked at the image.

    Args:
        vision: transformers' BlipVisionModel.
        text: transformers' BlipTextModel with cross-attention.
    """

    def __init__(self, vision: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.vision, self.text = vision, text

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """``(n, d)`` of prepared images ``(n, 3, s, s)`` and token ids and masks ``(n, length)``."""
        seen = self.vision(pixels).last_hidden_state
        read: Tensor = self.text(ids, attention_mask=mask, encoder_hidden_states=seen).last_hidden_state
        return read[:, 0]


@verifier("imagereward", cite="xu2023imagereward")
class ImageReward:
    """ImageReward-v1.0: how much people would prefer an image for its prompt, about −2 to 2, with mean 0 and spread 1.

    Args:
        model: The checkpoint: a file, a folder with one, or ``owner/name/file`` of the hub.
        tokenizer: A folder or hub id with the tokenizer of BERT, uncased.
        revision: A branch, tag or commit of the checkpoint on the hub.
        device: Where it runs; where the images are, if None.
        dtype: Of BLIP: float32, bfloat16 or float16. The head is computed in float32.
        offload: Leave the device after every call.

    Raises:
        UserError: when the checkpoint or the tokenizer can't be loaded; the message says which and why.
    """

    name = "imagereward"
    range = None
    reads_prompt = True
    differentiable = True
    licence = "Apache-2.0"

    def __init__(
        self,
        *,
        model: str = "THUDM/ImageReward/ImageReward.pt",
        tokenizer: str = "google-bert/bert-base-uncased",
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        file, found = fetch_file("ImageReward model", model, revision)
        state = read_state("ImageReward model", model, file)
        try:
            with plain_tensors():
                blip, head = _blip(state), Head(_under(state, HEAD))
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(why_not("ImageReward model", model, error)) from error
        self._tokenise = _tokenizer(tokenizer, len(state[WORDS]))
        self._head = Network(head, [file], model, device=device)
        self.network = Network(blip, [file], model, revision=found, device=device, dtype=dtype, offload=offload)
        self._tokenizer = tokenizer
        self._warned = False

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores ``images`` ``(n, 3, h, w)`` in [0, 1] for their ``n`` prompts: float32 ``(n,)``.

        Gradients reach the images where autograd is on.
        """
        check("imagereward", images, prompts)
        if not len(images):
            return torch.zeros(0, device=images.device)
        with plain_tensors():
            self._warn_of_length(prompts)
            told = self._tokenise(
                list(prompts), padding="max_length", truncation=True, max_length=ROOM, return_tensors="pt"
            )
        with self.network.on(images.device) as device:
            pixels = preprocess(images.to(device, torch.float32), self.preprocessing).to(self.network.dtype)
            read = self.network.module(pixels, told.input_ids.to(device), told.attention_mask.to(device))
        with self._head.on(read.device):
            scores: Tensor = (self._head.module(read.float()) - MEAN) / STD
        return scores.to(images.device)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """That of CLIP, in open_clip's words: the shorter side is fitted, the longer one cut."""
        return {
            "size": self.network.module.vision.config.image_size,
            "mean": [0.48145466, 0.4578275, 0.40821073],
            "std": [0.26862954, 0.26130258, 0.27577711],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
            "fill_color": 0,
        }

    def identity(self) -> dict[str, Any]:
        """What a record needs to name this verifier: source, revision, hash, tokenizer, preprocessing, dtype."""
        about = {"name": self.name, **self.network.identity(), "preprocessing": self.preprocessing}
        return {**about, "tokenizer": self._tokenizer, "context_length": ROOM}

    def _warn_of_length(self, prompts: Sequence[str]) -> None:
        """Says once that a prompt is cut."""
        if self._warned:
            return
        for prompt in dict.fromkeys(prompts):
            if len(self._tokenise(prompt, verbose=False).input_ids) > ROOM:
                self._warned = True
                warnings.warn(
                    f"ImageReward reads {ROOM} tokens of a prompt; {prompt[:60]!r}… is longer and its rest doesn't"
                    " count. Shorten it, or use the verifier vqa, which reads all.",
                    UserWarning,
                    stacklevel=3,
                )
                return


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _blip(state: Mapping[str, Tensor]) -> Blip:
    """transformers' BLIP with the tensors of a checkpoint in BLIP's own naming; the sizes are read off these.

    Raises:
        KeyError, RuntimeError: Tensors are missing, or have other shapes.
    """
    from transformers import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    seen, read = _under(state, VISION), _under(state, TEXT)
    read.pop("embeddings.position_ids", None)  # a constant
    patches, width = seen["pos_embed"].shape[1:]
    patch = seen["patch_embed.proj.weight"].shape[-1]
    vision = BlipVisionModel(
        BlipVisionConfig(
            hidden_size=width,
            intermediate_size=len(seen["blocks.0.mlp.fc1.weight"]),
            num_hidden_layers=_depth(seen, "blocks."),
            num_attention_heads=width // PER_HEAD,
            image_size=round((patches - 1) ** 0.5) * patch,
            patch_size=patch,
            hidden_act="gelu",
            layer_norm_eps=1e-6,
        )
    )
    vision.load_state_dict({_renamed(k): v for k, v in seen.items()})
    vocabulary, channels = read["embeddings.word_embeddings.weight"].shape
    text = BlipTextModel(
        BlipTextConfig(
            vocab_size=vocabulary,
            hidden_size=channels,
            encoder_hidden_size=width,
            intermediate_size=len(read["encoder.layer.0.intermediate.dense.weight"]),
            num_hidden_layers=_depth(read, "encoder.layer."),
            num_attention_heads=channels // PER_HEAD,
            max_position_embeddings=len(read["embeddings.position_embeddings.weight"]),
            hidden_act="gelu",
            layer_norm_eps=1e-12,
            is_decoder=True,  # gives it cross-attention; it attends in both directions all the same
        ),
        add_pooling_layer=False,
    )
    text.load_state_dict(read)
    return Blip(vision, text)


def _renamed(name: str) -> str:
    for old, new in NAMES.items():
        name, found = re.subn(old, new, name)
        if found:
            return name
    return name


def _depth(state: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(k.removeprefix(prefix).partition(".")[0]) for k in state if k.startswith(prefix))


def _tokenizer(source: str, vocabulary: int) -> Any:
    """BERT's tokenizer with BLIP's two tokens, the last of the vocabulary.

    Raises:
        UserError: It can't be loaded, or has other tokens than the checkpoint.
    """
    from transformers import BertTokenizer

    try:
        tokenise = BertTokenizer.from_pretrained(source)
        tokenise.add_special_tokens({"bos_token": "[DEC]", "extra_special_tokens": ["[ENC]"]})
        if len(tokenise) != vocabulary:
            raise ValueError(f"it has {len(tokenise)} tokens with BLIP's two, and the checkpoint {vocabulary}")
    except Exception as error:  # transformers, the hub and json each raise their own
        raise UserError(why_not("tokenizer", source, error)) from error
    return tokenise
