"""Trains `shapes-flow`: a small Stable Diffusion 3 (MMDiT, rectified flow) with its own text encoders and tokenizers.

    python -m imgscale.assets.shapes.train_flow [--device cuda] [--steps 9000] [--compile 1]
    python -m imgscale.assets.shapes.train_flow --name shapes-flow-large --start shapes-flow [--steps 1400] …

The second makes `shapes-flow-large`, which begins as `shapes-flow` grown to 13 blocks: each but the last is followed by
copies of itself whose gates are shut, so that the network computes what it did before and the new blocks learn at once.

Flow matching on the autoencoder's latents (x_t = (1 - t) x0 + t eps, target eps - x0), captions dropped for
classifier-free guidance, transformer and both CLIP text encoders trained together. Most times are drawn around .77:
below .6 the picture is decided, and a model of this size is right there early (docs/shapes.md). Two linear probes speed
up what is slow, and aren't exported: the second block tells at each noun how many of what there are and where, and the
fourth names the object at each patch (after REPA, Yu et al. 2024, with the renderer's truth in the place of a
pretrained encoder). Some steps see the 256 empty T5 tokens that a plain `pipe(prompt)` appends, so that the folder
works with and without them.
Writes a folder that `DiffusionPipeline.from_pretrained` loads, in float16.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from imgscale.assets.shapes.text import ANSWERS, END, LENGTH, START, nouns_of, parsed, parsing_loss, write_tokenizer
from imgscale.assets.shapes.training import HERE, arguments, run, ship, shuffled, to_tensor
from imgscale.assets.shapes.world import KINDS, SIZE, parse, render, training_scene
from imgscale.verifiers.shapes import Object, read

WIDTHS = (128, 64)  # of the two text encoders
HEADS = 6
LAYERS = {"shapes-flow": 6, "shapes-flow-large": 13}
PROBED, PARSED = 3, 1  # shapes-flow's blocks, the first being 0, whose image tokens and whose text tokens are probed
SETTINGS: dict[str, Any] = {
    "steps": 10,
    "guidance_scale": 3.0,
    "clip": "shapes-clip",
    "tiny": "shapes-tiny",
    "defaults": {"max_sequence_length": 1},  # of the empty T5 tokens: as good as 256, and four times faster
    "summary": "flow model with guidance (Stable Diffusion 3 architecture, {} M parameters) of the shapes world, 64x64",
}


def ancestors(layers: int) -> list[int]:
    """Of each block of a network of ``layers``, the block of `shapes-flow` that it grows from.

    The last, which has no text stream, has one descendant only; the others have as equal numbers as can be.
    """
    last = LAYERS["shapes-flow"] - 1
    return [block * last // (layers - 1) for block in range(layers - 1)] + [last]


class Generator(nn.Module):
    """The trained parts of the pipeline as one module."""

    def __init__(self, vocabulary: dict[str, int], layers: int) -> None:
        super().__init__()
        self.texts = nn.ModuleList(
            CLIPTextModelWithProjection(
                CLIPTextConfig(
                    vocab_size=len(vocabulary),
                    hidden_size=width,
                    projection_dim=width,
                    intermediate_size=4 * width,
                    num_hidden_layers=3,
                    num_attention_heads=width // 32,
                    max_position_embeddings=LENGTH,
                    bos_token_id=vocabulary[START],
                    eos_token_id=vocabulary[END],
                    pad_token_id=vocabulary[END],
                )
            )
            for width in WIDTHS
        )
        self.transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            num_attention_heads=HEADS,
            attention_head_dim=32,
            joint_attention_dim=sum(WIDTHS),
            caption_projection_dim=32 * HEADS,
            pooled_projection_dim=sum(WIDTHS),
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        )
        self.probe = nn.Linear(32 * HEADS, 2 * (len(KINDS) + 1))
        self.grammar = nn.Linear(32 * HEADS, sum(ANSWERS))
        self._passed: dict[int, tuple[Tensor, Tensor]] = {}
        grown = ancestors(layers)
        for i in (PROBED, PARSED):  # each gives its text tokens and its image tokens
            hook = partial(lambda i, block, given, out: self._passed.update({i: out}), i)
            last = len(grown) - 1 - grown[::-1].index(i)
            self.transformer.transformer_blocks[last].register_forward_hook(hook)

    def load(self, folder: Path) -> None:
        """Takes, and grows, the weights of a pipeline's folder, or a checkpoint's average, without an optimiser."""
        if folder.suffix == ".pt":
            saved = torch.load(folder, weights_only=True)["average"]
        else:
            names = {"transformer": "transformer", "texts.0": "text_encoder", "texts.1": "text_encoder_2"}
            files = {part: next((folder / name).glob("*.safetensors")) for part, name in names.items()}
            saved = {f"{part}.{k}": v.float() for part, file in files.items() for k, v in load_file(file).items()}
        self.load_state_dict(grow(saved, len(self.transformer.transformer_blocks)), strict=False)

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor, empty: int) -> tuple[Tensor, Tensor, Tensor]:
        """The velocity at ``x`` (n, 4, 16, 16) and ``t`` (n,) for captions ``tokens`` (n, 16), and the probes' answers.

        Of patches, (n, 64, 2, kinds + 1): what covers each, and what is centred there; of tokens, (n, 16, …).
        """
        texts = [text(tokens, output_hidden_states=True) for text in self.texts]
        context = torch.cat([text.hidden_states[-2] for text in texts], -1)
        context = nn.functional.pad(context, (0, 0, 0, empty))
        pooled = torch.cat([text.text_embeds for text in texts], -1)
        velocity: Tensor = self.transformer(x, context, pooled, t * 1000, return_dict=False)[0]
        patches = self.probe(self._passed[PROBED][1]).unflatten(-1, (2, -1))
        return velocity, patches, self.grammar(self._passed[PARSED][0][:, : tokens.shape[1]])


def grow(saved: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """A state with ``layers`` blocks that computes what ``saved``, which may have fewer, does.

    What a block adds to its streams goes through gates that a linear layer of the time and the caption gives: with the
    gates' rows at zero, a copy adds nothing, yet has a gradient.
    """
    head = "transformer.transformer_blocks."
    if f"{head}{layers - 1}.attn.to_q.weight" in saved:
        return saved
    made = {k: v for k, v in saved.items() if not k.startswith(head)}
    grown = ancestors(layers)
    for block, ancestor in enumerate(grown):
        for key, value in saved.items():
            if key.startswith(f"{head}{ancestor}."):
                rest = key.removeprefix(f"{head}{ancestor}.")
                made[f"{head}{block}.{rest}"] = value.clone()
                if ancestor in grown[:block] and rest.startswith(("norm1.linear", "norm1_context.linear")):
                    for gate in (2, 5):  # of shift, scale and gate of the attention, then of the feed-forward layers
                        made[f"{head}{block}.{rest}"].unflatten(0, (6, -1))[gate].zero_()
    return made


@torch.no_grad()
def latents(vae: AutoencoderKL, size: int, seed: int, device: str) -> dict[str, Any]:
    """``size`` training scenes, cached on disk.

    ``x``: normalised latents, float16 (size, 4, 16, 16); ``kinds``: of `labels`; ``captions``.
    """
    file = HERE / "checkpoints" / f"latents-{seed}-{size}.pt"
    if file.exists():
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        return saved
    vae = vae.to(device, memory_format=torch.channels_last)
    rng = np.random.default_rng((seed, 2**20))
    parts: list[Tensor] = []
    kinds: list[Tensor] = []
    captions: list[str] = []
    while len(captions) < size:
        scenes = [training_scene(rng) for _ in range(100)]
        images = to_tensor([render(s, rng) for s in scenes])
        kinds.append(labels(read(images)))
        x = images.to(device, memory_format=torch.channels_last)
        z = vae.encode(x * 2 - 1).latent_dist.mean
        parts.append(((z - vae.config.shift_factor) * vae.config.scaling_factor).half().cpu().contiguous())
        captions += map(str, scenes)
    made = {"x": torch.cat(parts), "kinds": torch.cat(kinds), "captions": captions}
    file.parent.mkdir(exist_ok=True)
    torch.save(made, file)
    return made


def labels(seen: list[list[Object]]) -> Tensor:
    """What the probe should say of each of 8 x 8 patches, uint8 (n, 64, 2): 0 for nothing, or 1 + the kind."""
    made = torch.zeros(len(seen), 8, 8, 2, dtype=torch.uint8)
    centres = (np.arange(8) + 0.5) * SIZE / 8
    for i, image in enumerate(seen):
        for o in image:
            kind = 1 + KINDS.index((o.shape or o.likely[0], o.colour or o.likely[1]))
            covered = np.hypot(centres[:, None] - o.y, centres[None] - o.x) < (o.area / np.pi) ** 0.5 + 2
            made[i, :, :, 0][torch.from_numpy(covered)] = kind
            made[i, min(7, int(o.y * 8 / SIZE)), min(7, int(o.x * 8 / SIZE)), 1] = kind
    return made.flatten(1, 2)


def no_t5() -> dict[str, Any]:
    """A third text encoder that says nothing: zeros, as Stable Diffusion 3 puts where T5 is left out.

    `from_pretrained` wants one in the folder. It has no layers and an output norm of weight 0, and its tokenizer drops
    every character, so that ``max_sequence_length`` alone says how many empty tokens there are (1 will do).
    """
    silent = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    silent.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=silent, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=256
    )
    config = T5Config(vocab_size=3, d_model=sum(WIDTHS), d_kv=8, d_ff=8, num_layers=0, num_heads=1)
    encoder = T5EncoderModel(config).half()
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return {"text_encoder_3": encoder, "tokenizer_3": tokenizer}


def main() -> None:
    args = arguments(
        __doc__,
        steps=9000,
        batch=64,
        lr=1e-3,
        pool=60000,
        log_every=50,
        save_every=250,
        shift=1.0,
        compile=0,
        focus=0.75,  # share of times from a logit-normal around .77; the others are logit-normal around .5
        probe=0.2,  # weight of the patches' probe
        grammar=0.2,  # weight of the nouns'
        name="shapes-flow",  # or shapes-flow-large
        scenes=-1,  # the seed of the training scenes, if not the run's
        start="",  # a folder here, such as shapes-flow, or a checkpoint, whose weights to start from
        long_every=24,  # steps with the empty T5 tokens of a plain call
    )
    trained = HERE / "checkpoints" / "vae"
    vae = AutoencoderKL.from_pretrained(trained if trained.exists() else HERE / "shapes-flow" / "vae").float()
    data = latents(vae, args.pool, args.seed if args.scenes < 0 else args.scenes, args.device)
    tokenizers = HERE / "checkpoints" / "tokenizer"
    write_tokenizer(tokenizers)
    tokenizer = CLIPTokenizer.from_pretrained(tokenizers)
    pad = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
    tokens, nothing = tokenizer(data["captions"], **pad).input_ids, tokenizer("", **pad).input_ids
    vocabulary = json.loads((tokenizers / "vocab.json").read_text())
    nouns = nouns_of(vocabulary)
    model = Generator(vocabulary, LAYERS[args.name])
    print({k: sum(p.numel() for p in m.parameters()) for k, m in model.named_children()}, flush=True)
    if args.start:
        model.load(HERE / args.start)
    if args.compile:
        for block in model.transformer.transformer_blocks:
            block.compile(dynamic=False)
    batches: list[np.ndarray] = []
    order = shuffled(args.seed, args.pool, args.batch)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        while len(batches) <= step:  # a resumed run skips to its place
            batches.append(next(order))
        chance = torch.Generator().manual_seed(args.seed * 10**7 + step)
        empty = 256 if step % args.long_every == args.long_every - 1 else 0
        index = batches[step][: args.batch // 4 if empty else None]
        x0, kinds = data["x"][index].float(), data["kinds"][index].long()
        eps = torch.randn(x0.shape, generator=chance)
        focused = torch.rand(len(x0), generator=chance) < args.focus
        normal = torch.randn(len(x0), generator=chance)
        t = torch.sigmoid(torch.where(focused, 1.2 + 0.8 * normal, 1.1 * normal))
        drop = torch.rand(len(x0), generator=chance) < 0.1
        ids = torch.where(drop[:, None], nothing, tokens[index])
        scenes = [parse(data["captions"][i]) for i in index]
        places, asked = parsed(scenes, tokens[index], nouns)
        told = ~drop[places[:, 0]]
        places, asked = places[told].to(args.device), asked[told].to(args.device)
        x0, eps, t, ids, kinds = (v.to(args.device) for v in (x0, eps, t, ids, kinds))
        s = t[:, None, None, None]
        v, patches, words = model((1 - s) * x0 + s * eps, t, ids, empty)
        value = (v - (eps - x0)).square().mean()
        named = nn.functional.cross_entropy(patches.movedim(-1, 1), kinds)
        grammar = parsing_loss(words[places[:, 0], places[:, 1]], asked)
        parts = {"long" if empty else "loss": value.item(), "probe": named.item(), "grammar": grammar.item()}
        return value + args.probe * named + args.grammar * grammar, parts

    def finish() -> None:
        pipe = StableDiffusion3Pipeline(
            transformer=model.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=args.shift),
            vae=vae,
            text_encoder=model.texts[0],
            tokenizer=tokenizer,
            text_encoder_2=model.texts[1],
            tokenizer_2=tokenizer,
            **no_t5(),
        )
        size = round(sum(p.numel() for p in model.transformer.parameters()) / 1e6)
        ship(pipe, args.name, SETTINGS | {"summary": SETTINGS["summary"].format(size)})

    run(args, args.name, model, loss, finish)


if __name__ == "__main__":
    main()
