"""Tiny pipelines of random weights, one for every diffusers text-to-image class that imgscale carries.

`build(name)` makes one in well under a second, seeded, without a network connection: tokenizers are made
here, byte by byte. What each needs to be called with stands beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["NAMES", "ZOO", "Species", "build"]


@dataclass(frozen=True)
class Species:
    """How one pipeline class is made and called.

    Attributes:
        make: Builds it.
        size: Height and width of its images.
        defaults: Arguments for every call.
        guided: Arguments of `Denoiser.encode` for a call with guidance, or None where there is none.
        plain: The same without.
    """

    make: Callable[[], Any]
    size: tuple[int, int] = (16, 16)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    guided: Mapping[str, Any] | None = field(default_factory=lambda: {"guidance_scale": 3.0})
    plain: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})


ZOO: dict[str, Species] = {}


def species(**settings: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a builder under the name of the class that it makes."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        ZOO[make.__name__] = Species(make, **settings)
        return make

    return register


def build(name: str) -> Any:
    """The pipeline, with the same weights whenever and wherever it is built."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        pipe = ZOO[name].make()
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
        network: Any = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)
        _wake(network)
        pipe.set_progress_bar_config(disable=True)
        return pipe
    finally:
        torch.set_rng_state(state)


def _wake(network: torch.nn.Module) -> None:
    """Weights where training starts from zeros: a network that ignores its inputs would pass any test."""
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.2)


# Parts


def tokenizer(
    length: int = 16, *, template: str | None = None, bos: bool = False, side: str = "right"
) -> Any:
    """A byte-level tokenizer: pad 0, beginning 1, end 2, then the 256 bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if template is None:
        single = "<s> $A </s>" if bos else "$A </s>"
        core.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=length,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=side,
    )
    if template is not None:
        made.chat_template = template
    return made


VOCABULARY = 259
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}:"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{{ m['content'][0]['text'] }}{% endif %}</s>"
    "{% endfor %}"
)


def clip(width: int = 32, *, projection: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_act="gelu",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5(width: int = 32) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=4, eos_token_id=2
        )
    )


def vae(channels: int = 4, *, shift: float | None = None, **settings: Any) -> Any:
    """A variational autoencoder that halves height and width."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=0.8,
        shift_factor=shift,
        **settings,
    )


def ddim(**settings: Any) -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        **{"set_alpha_to_one": True, **settings},
    )


def euler(**settings: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**settings)


def unet(**settings: Any) -> Any:
    from diffusers import UNet2DConditionModel

    base: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "cross_attention_dim": 32,
    }
    return UNet2DConditionModel(**{**base, **settings})


# Species


@species()
def StableDiffusionPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(bos=True),
        unet=unet(),
        scheduler=ddim(steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl_unet() -> Any:
    return unet(
        cross_attention_dim=64,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
    )


@species()
def StableDiffusionXLPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=clip(),
        text_encoder_2=clip(projection=True),
        tokenizer=tokenizer(bos=True),
        tokenizer_2=tokenizer(bos=True),
        unet=_sdxl_unet(),
        scheduler=ddim(timestep_spacing="trailing", prediction_type="v_prediction"),
    )


def _sd3_parts() -> dict[str, Any]:
    from diffusers import SD3Transformer2DModel

    return {
        "transformer": SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        "scheduler": euler(shift=3.0),
        "vae": vae(shift=0.1),
        "text_encoder": clip(projection=True),
        "tokenizer": tokenizer(bos=True),
        "text_encoder_2": clip(projection=True),
        "tokenizer_2": tokenizer(bos=True),
        "text_encoder_3": t5(64),
        "tokenizer_3": tokenizer(),
    }


@species(defaults={"max_sequence_length": 16})
def StableDiffusion3Pipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusion3Pipeline(**_sd3_parts())


def flux_transformer(**settings: Any) -> Any:
    from diffusers import FluxTransformer2DModel

    base: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": False,
        "axes_dims_rope": (4, 4, 8),
    }
    return FluxTransformer2DModel(**{**base, **settings})


def _flux_parts(**settings: Any) -> dict[str, Any]:
    return {
        "scheduler": euler(use_dynamic_shifting=True),
        "vae": vae(shift=0.1),
        "text_encoder": clip(),
        "tokenizer": tokenizer(bos=True),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(),
        "transformer": flux_transformer(**settings),
    }


@species(defaults={"max_sequence_length": 16})
def FluxPipeline() -> Any:
    import diffusers

    return diffusers.FluxPipeline(**_flux_parts())


NAMES = tuple(ZOO)
