"""Trains the autoencoder of the shapes models: 64x64 RGB <-> 16x16 latents of 4 channels.

    python -m imgscale.assets.shapes.train_vae --steps 1400 --squared 0
    python -m imgscale.assets.shapes.train_vae --steps 2200

L1 on pixels and on their finite differences (crisp edges), a small KL term. With these alone the first stage draws
green and red alike as brown, since few pixels have a colour; the second resumes it with a squared error.
Writes `checkpoints/vae/`, from where the generators copy it.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from imgscale.assets.shapes.training import HERE, arguments, batch, run


def build() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        shift_factor=0.0,
        scaling_factor=1.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def differences(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]


def main() -> None:
    args = arguments(__doc__, steps=2200, batch=16, lr=2e-3, squared=10.0, log_every=50, save_every=200)
    vae = build().to(memory_format=torch.channels_last)  # several times faster on a CPU

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        x = (batch(args.seed, step, args.batch)[1].to(args.device) * 2 - 1).contiguous(
            memory_format=torch.channels_last
        )
        posterior = vae.encode(x).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(args.seed * 10**6 + step))
        y = vae.decode(posterior.mean + posterior.std * noise.to(x.device)).sample
        pixel = (y - x).abs().mean()
        edge = torch.stack([(a - b).abs().mean() for a, b in zip(differences(y), differences(x), strict=True)]).sum()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        squared = (y - x).square().mean()
        value = pixel + edge + args.squared * squared + 1e-4 * kl
        return value, {"l2": squared.item(), "l1": pixel.item(), "edge": edge.item(), "kl": kl.item()}

    def finish() -> None:
        with torch.no_grad():
            x = batch(args.seed + 1, 0, 512)[1].to(args.device) * 2 - 1
            z = torch.cat([vae.encode(part).latent_dist.mean for part in x.split(64)])
            y = torch.cat([vae.decode(part).sample for part in z.split(64)]).clamp(-1, 1)
        vae.register_to_config(scaling_factor=round(1 / z.std().item(), 4), shift_factor=round(z.mean().item(), 4))
        psnr = -10 * torch.log10(((y - x) / 2).square().mean())
        print(
            f"PSNR {psnr:.2f} dB, latent mean {z.mean():.3f}, std {z.std():.3f}, by channel {z.std((0, 2, 3)).tolist()}"
        )
        vae.save_pretrained(HERE / "checkpoints" / "vae")

    run(args, "vae", vae, loss, finish)


if __name__ == "__main__":
    main()
