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


def tokenizer(length: int = 16, *, template: str | None = None, bos: bool = False, side: str = "right") -> Any:
    """A byte-level tokenizer: pad 0, beginning 1, end 2, then the 256 bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if template is None:
        single = "<s> $A </s>" if bos else "$A </s>"
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=length,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=side,
        model_input_names=["input_ids", "attention_mask"],
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
        T5Config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=4, eos_token_id=2)
    )


def vae(channels: int = 4, *, shift: float | None = None, levels: int = 2) -> Any:
    """A variational autoencoder that makes height and width 2 ** (levels - 1) times smaller."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8,) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=0.8,
        shift_factor=shift,
    )


def llm(width: int = 32, layers: int = 3) -> Any:
    """A decoder-only language model: the pipelines read its hidden states, whichever family they come from."""
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def vision_llm(width: int = 32, layers: int = 3) -> Any:
    """The same with a vision tower beside it, for pipelines that reach into its parts."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))


def video_vae(channels: int = 4) -> Any:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=channels,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * channels,
        latents_std=[1.5] * channels,
    )


def flux2_vae() -> Any:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )


def ddim(**settings: Any) -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        **{"steps_offset": 1, **settings},
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
        scheduler=ddim(),
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


UNBINNED = {"use_resolution_binning": False}


def _pixart_parts() -> dict[str, Any]:
    from diffusers import PixArtTransformer2DModel

    return {
        "tokenizer": tokenizer(),
        "text_encoder": t5(),
        "vae": vae(),
        "transformer": PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=32,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=32,
            use_additional_conditions=False,
        ),
        "scheduler": ddim(),
    }


@species(defaults=UNBINNED | {"max_sequence_length": 16, "clean_caption": False})
def PixArtSigmaPipeline() -> Any:
    import diffusers

    return diffusers.PixArtSigmaPipeline(**_pixart_parts())


@species(defaults=UNBINNED | {"max_sequence_length": 16, "clean_caption": False})
def PixArtAlphaPipeline() -> Any:
    import diffusers

    return diffusers.PixArtAlphaPipeline(**_pixart_parts())


def _sana_parts() -> dict[str, Any]:
    from diffusers import AutoencoderDC, SanaTransformer2DModel

    return {
        "tokenizer": tokenizer(),
        "text_encoder": llm(),
        "vae": AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types="ResBlock",
            decoder_block_types="ResBlock",
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), ()),
            scaling_factor=0.41,
        ),
        "transformer": SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=4,
            attention_head_dim=8,
            num_cross_attention_heads=4,
            cross_attention_head_dim=8,
            cross_attention_dim=32,
            caption_channels=32,
            sample_size=8,
        ),
        "scheduler": euler(shift=3.0),
    }


_SANA = UNBINNED | {"max_sequence_length": 16, "complex_human_instruction": None}


@species(size=(32, 32), defaults=_SANA)
def SanaPipeline() -> Any:
    import diffusers

    return diffusers.SanaPipeline(**_sana_parts())


@species(defaults={"max_sequence_length": 16})
def AuraFlowPipeline() -> Any:
    import diffusers

    return diffusers.AuraFlowPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=vae(),
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        scheduler=euler(shift=1.73),
    )


@species(size=(48, 48), defaults={"max_sequence_length": 40, "system_prompt": "Draw."})
def Lumina2Pipeline() -> Any:
    import diffusers

    return diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=2,
            ffn_dim_multiplier=None,
            scaling_factor=1.0,
            axes_dim_rope=(4, 4, 4),
            cap_feat_dim=32,
        ),
        scheduler=euler(shift=6.0),
        vae=vae(shift=0.1, levels=4),
        text_encoder=llm(),
        tokenizer=tokenizer(),
    )


@species(
    defaults={"max_sequence_length": 16, "max_area": 16 * 16},
    guided={"true_cfg_scale": 3.0, "negative_prompt": "blur", "guidance_scale": 2.5},
    plain={"guidance_scale": 2.5},
)
def FluxKontextPipeline() -> Any:
    import diffusers

    return diffusers.FluxKontextPipeline(**_flux_parts(guidance_embeds=True))


@species()
def QwenImagePipeline() -> Any:
    import diffusers

    return diffusers.QwenImagePipeline(
        scheduler=euler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=video_vae(),
        text_encoder=llm(),
        tokenizer=tokenizer(1024),
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(8, 4, 4),
        ),
    )


@species(defaults={"max_sequence_length": 40}, plain={"guidance_scale": 0.0})
def ZImagePipeline() -> Any:
    import diffusers

    return diffusers.ZImagePipeline(
        scheduler=euler(shift=3.0),
        vae=vae(shift=0.1),
        text_encoder=llm(),
        tokenizer=tokenizer(template=CHAT),
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[8, 4, 4],
            axes_lens=[128, 32, 32],
        ),
    )


@species(defaults={"max_sequence_length": 16})
def ChromaPipeline() -> Any:
    import diffusers

    return diffusers.ChromaPipeline(
        scheduler=euler(shift=1.5),
        vae=vae(shift=0.1),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.ChromaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
            approximator_num_channels=8,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
    )


@species(size=(32, 32), defaults={"max_sequence_length": 16})
def CogView3PlusPipeline() -> Any:
    import diffusers

    return diffusers.CogView3PlusPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=vae(),
        transformer=diffusers.CogView3PlusTransformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=8,
            pos_embed_max_size=16,
            sample_size=8,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            set_alpha_to_one=True,
            snr_shift_scale=4.0,
            timestep_spacing="trailing",
        ),
    )


@species(size=(32, 32), defaults={"max_sequence_length": 16})
def CogView4Pipeline() -> Any:
    import diffusers

    return diffusers.CogView4Pipeline(
        tokenizer=tokenizer(side="left"),
        text_encoder=llm(),
        vae=vae(),
        transformer=diffusers.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=8,
            pos_embed_max_size=16,
            sample_size=8,
            rope_axes_dim=(8, 8),
        ),
        scheduler=euler(
            base_shift=0.25,
            max_shift=0.75,
            base_image_seq_len=256,
            use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
    )


def _hunyuan_parts() -> dict[str, Any]:
    from diffusers import HunyuanDiT2DModel
    from transformers import BertConfig, BertModel

    return {
        "vae": vae(levels=4),
        "text_encoder": BertModel(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=32,
                max_position_embeddings=80,
            )
        ),
        "tokenizer": tokenizer(77),
        "transformer": HunyuanDiT2DModel(
            sample_size=16,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            in_channels=4,
            hidden_size=32,
            cross_attention_dim=32,
            cross_attention_dim_t5=32,
            pooled_projection_dim=16,
            activation_fn="gelu-approximate",
        ),
        "scheduler": ddim(prediction_type="v_prediction"),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(256),
    }


@species(size=(64, 64), defaults=UNBINNED)
def HunyuanDiTPipeline() -> Any:
    import diffusers

    return diffusers.HunyuanDiTPipeline(**_hunyuan_parts())


@species(size=(48, 48), defaults={"max_sequence_length": 16, "clean_caption": False})
def LuminaPipeline() -> Any:
    import diffusers

    return diffusers.LuminaPipeline(
        transformer=diffusers.LuminaNextDiT2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            multiple_of=16,
            learn_sigma=True,
            cross_attention_dim=32,
        ),
        scheduler=euler(),
        vae=vae(levels=4),
        text_encoder=llm(),
        tokenizer=tokenizer(),
    )


@species(guided={"guidance_scale": 5.0}, plain={"guidance_scale": 1.5})
def LatentConsistencyModelPipeline() -> Any:
    import diffusers

    return diffusers.LatentConsistencyModelPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(bos=True),
        unet=unet(time_cond_proj_dim=16),
        scheduler=diffusers.LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@species(size=(64, 64))
def Kandinsky3Pipeline() -> Any:
    import diffusers

    return diffusers.Kandinsky3Pipeline(
        tokenizer=tokenizer(128),
        text_encoder=t5(),
        unet=diffusers.Kandinsky3UNet(
            in_channels=4,
            time_embedding_dim=8,
            groups=2,
            attention_head_dim=4,
            layers_per_block=2,
            block_out_channels=(8, 16),
            cross_attention_dim=8,
            encoder_hid_dim=32,
        ),
        scheduler=ddim(),
        movq=diffusers.VQModel(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            num_vq_embeddings=12,
            norm_num_groups=4,
            vq_embed_dim=4,
        ),
    )


def _flux2_transformer(text: int, **settings: Any) -> Any:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        **settings,
    )


@species(defaults={"max_sequence_length": 48, "text_encoder_out_layers": (1, 2)})
def Flux2KleinPipeline() -> Any:
    import diffusers

    return diffusers.Flux2KleinPipeline(
        scheduler=euler(use_dynamic_shifting=True),
        vae=flux2_vae(),
        text_encoder=llm(),
        tokenizer=tokenizer(template=CHAT),
        transformer=_flux2_transformer(64, guidance_embeds=False),
    )


@species(defaults={"max_sequence_length": 512, "text_encoder_out_layers": (1, 2)}, guided=None, plain={})
def Flux2Pipeline() -> Any:
    import diffusers

    return diffusers.Flux2Pipeline(
        scheduler=euler(use_dynamic_shifting=True),
        vae=flux2_vae(),
        text_encoder=llm(),
        tokenizer=tokenizer(template=CHAT),
        transformer=_flux2_transformer(64, guidance_embeds=True),
    )


@species(defaults={"max_sequence_length": 256})
def OvisImagePipeline() -> Any:
    import diffusers

    return diffusers.OvisImagePipeline(
        scheduler=euler(use_dynamic_shifting=True),
        vae=vae(shift=0.1),
        text_encoder=llm(),
        tokenizer=tokenizer(template=CHAT),
        transformer=diffusers.OvisImageTransformer2DModel(
            patch_size=1,
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
    )


@species(defaults=UNBINNED | {"skip_text_cleaning": True})
def PRXPipeline() -> Any:
    import diffusers

    return diffusers.PRXPipeline(
        transformer=diffusers.PRXTransformer2DModel(
            in_channels=4,
            patch_size=2,
            context_in_dim=32,
            hidden_size=32,
            mlp_ratio=2.0,
            num_heads=2,
            depth=2,
            axes_dim=[8, 8],
        ),
        scheduler=euler(shift=3.0),
        text_encoder=llm(),
        tokenizer=tokenizer(),
        vae=vae(shift=0.1),
        default_sample_size=16,
    )


@species(defaults={"max_sequence_length": 64}, guided={"guidance_scale": 3.0}, plain={"guidance_scale": 1.0})
def Ideogram4Pipeline() -> Any:
    import diffusers

    def transformer() -> Any:
        return diffusers.Ideogram4Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=2,
            intermediate_size=32,
            adaln_dim=16,
            llm_features_dim=13 * 32,
            mrope_section=(2, 2, 2),
        )

    return diffusers.Ideogram4Pipeline(
        scheduler=euler(),
        vae=flux2_vae(),
        text_encoder=vision_llm(layers=36),
        tokenizer=tokenizer(template=CHAT),
        transformer=transformer(),
        unconditional_transformer=transformer(),
    )


@species(defaults={"return_index": -2})
def NucleusMoEImagePipeline() -> Any:
    import diffusers

    return diffusers.NucleusMoEImagePipeline(
        transformer=diffusers.NucleusMoEImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(8, 4, 4),
            moe_enabled=False,
            capacity_factors=[8.0] * 2,
        ),
        scheduler=euler(use_dynamic_shifting=True),
        vae=video_vae(),
        text_encoder=vision_llm(),
        processor=tokenizer(1024, template=CHAT),
    )


class _Processor:
    """The little of a vision-language processor that text alone needs."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer(1024, template=CHAT)
        self.tokenizer.add_tokens(["<|image_pad|>"], special_tokens=True)

    def apply_chat_template(self, messages: Any, **settings: Any) -> Any:
        return [self.tokenizer.apply_chat_template(messages, **settings)]

    def __call__(self, text: list[str], padding_side: str = "right", **settings: Any) -> Any:
        return self.tokenizer(text, padding_side=padding_side, **settings)


@species(size=(64, 64))
def QwenImage21Pipeline() -> Any:
    import diffusers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return diffusers.QwenImage21Pipeline(
        scheduler=euler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=16,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, False, False, False],
            latents_mean=[0.1] * 16,
            latents_std=[1.5] * 16,
        ),
        text_encoder=Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            )
        ),
        processor=_Processor(),
        transformer=diffusers.QwenImage21Transformer2DModel(
            patch_size=1,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=32,
            axes_dims_rope=(8, 4, 4),
        ),
    )


@species(defaults={"max_sequence_length": 256}, plain={"guidance_scale": 0.0})
def Krea2Pipeline() -> Any:
    import diffusers

    return diffusers.Krea2Pipeline(
        scheduler=euler(use_dynamic_shifting=True),
        vae=video_vae(),
        text_encoder=vision_llm(),
        tokenizer=tokenizer(),
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=32,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(8, 4, 4),
        ),
        text_encoder_select_layers=(1, 2),
    )


def _glm() -> Any:
    """Kolors' text encoder puts the sequence first."""
    from transformers import Qwen3Model

    class Glm(Qwen3Model):  # type: ignore[misc]
        def forward(self, position_ids: Any, **settings: Any) -> Any:
            output = super().forward(**settings)
            output.hidden_states = [state.permute(1, 0, 2) for state in output.hidden_states]
            return output

    return Glm(llm().config)


class _GlmTokenizer:
    """Kolors' tokenizer counts positions."""

    def __init__(self) -> None:
        self.inner = tokenizer()

    def __call__(self, prompt: list[str], **settings: Any) -> Any:
        encoded = self.inner(prompt, **settings)
        encoded["position_ids"] = encoded["attention_mask"].cumsum(-1)
        return encoded


def _kolors_parts() -> dict[str, Any]:
    return {
        "vae": vae(),
        "text_encoder": _glm(),
        "tokenizer": _GlmTokenizer(),
        "unet": unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=32 + 6 * 8,
        ),
        "scheduler": ddim(),
    }


@species(defaults={"max_sequence_length": 16})
def KolorsPipeline() -> Any:
    import diffusers

    return diffusers.KolorsPipeline(**_kolors_parts())


# Perturbed-attention guidance: one more forward pass, through changed attention processors.

PAG = {
    "guided": {"guidance_scale": 3.0, "pag_scale": 2.0},
    "plain": {"guidance_scale": 1.0, "pag_scale": 2.0},
}


@species(**PAG)
def StableDiffusionPAGPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionPAGPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(bos=True),
        unet=unet(),
        scheduler=ddim(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        pag_applied_layers=["mid"],
    )


@species(**PAG)
def StableDiffusionXLPAGPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionXLPAGPipeline(
        vae=vae(),
        text_encoder=clip(),
        text_encoder_2=clip(projection=True),
        tokenizer=tokenizer(bos=True),
        tokenizer_2=tokenizer(bos=True),
        unet=_sdxl_unet(),
        scheduler=ddim(timestep_spacing="trailing"),
        pag_applied_layers=["mid"],
    )


@species(**PAG, defaults={"max_sequence_length": 16})
def KolorsPAGPipeline() -> Any:
    import diffusers

    return diffusers.KolorsPAGPipeline(**_kolors_parts(), pag_applied_layers=["mid"])


@species(**PAG, defaults={"max_sequence_length": 16})
def StableDiffusion3PAGPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusion3PAGPipeline(**_sd3_parts(), pag_applied_layers=["blocks.0"])


@species(**PAG, defaults=UNBINNED | {"max_sequence_length": 16, "clean_caption": False})
def PixArtSigmaPAGPipeline() -> Any:
    import diffusers

    return diffusers.PixArtSigmaPAGPipeline(**_pixart_parts(), pag_applied_layers=["blocks.1"])


@species(**PAG, size=(32, 32), defaults=_SANA)
def SanaPAGPipeline() -> Any:
    import diffusers

    return diffusers.SanaPAGPipeline(**_sana_parts(), pag_applied_layers=["transformer_blocks.1"])


@species(
    guided={"guidance_scale": 3.0, "pag_scale": 2.0},
    plain={"guidance_scale": 1.0, "pag_scale": 0.0},  # perturbed without classifier-free guidance fails upstream
    size=(64, 64),
    defaults=UNBINNED,
)
def HunyuanDiTPAGPipeline() -> Any:
    import diffusers

    return diffusers.HunyuanDiTPAGPipeline(**_hunyuan_parts(), pag_applied_layers=["blocks.1"])


# Control networks: the control image goes through `encode` to every call.


def control_image(size: int = 16) -> Any:
    from PIL import Image

    return Image.linear_gradient("L").resize((size, size)).convert("RGB")


def _controlled(**settings: Any) -> dict[str, Any]:
    image = {"image": control_image()}
    return {
        "guided": {"guidance_scale": 3.0, **image, **settings},
        "plain": {"guidance_scale": 1.0, **image, **settings},
    }


def _controlnet(network: Any) -> Any:
    from diffusers import ControlNetModel

    made = ControlNetModel.from_unet(network, conditioning_embedding_out_channels=(8, 16))
    _wake(made)
    return made


def _sd_control_parts() -> dict[str, Any]:
    network = unet()
    return {
        "vae": vae(),
        "text_encoder": clip(),
        "tokenizer": tokenizer(bos=True),
        "unet": network,
        "controlnet": _controlnet(network),
        "scheduler": ddim(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


@species(**_controlled())
def StableDiffusionControlNetPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionControlNetPipeline(**_sd_control_parts())


@species(**_controlled(pag_scale=2.0))
def StableDiffusionControlNetPAGPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionControlNetPAGPipeline(**_sd_control_parts(), pag_applied_layers=["mid"])


def _sdxl_control_parts() -> dict[str, Any]:
    network = _sdxl_unet()
    return {
        "vae": vae(),
        "text_encoder": clip(),
        "text_encoder_2": clip(projection=True),
        "tokenizer": tokenizer(bos=True),
        "tokenizer_2": tokenizer(bos=True),
        "unet": network,
        "controlnet": _controlnet(network),
        "scheduler": ddim(),
    }


@species(**_controlled())
def StableDiffusionXLControlNetPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionXLControlNetPipeline(**_sdxl_control_parts())


@species(**_controlled(pag_scale=2.0))
def StableDiffusionXLControlNetPAGPipeline() -> Any:
    import diffusers

    return diffusers.StableDiffusionXLControlNetPAGPipeline(**_sdxl_control_parts(), pag_applied_layers=["mid"])


NAMES = tuple(ZOO)
