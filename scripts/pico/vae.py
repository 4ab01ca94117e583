"""The VAE of pico-anima: trained as the 2-D network that a still picture meets, then inflated to causal 3-D."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from pico.training import average, cosine, load_state, save_state

VAE_CONFIG = {"base_dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}


class StillConv(nn.Conv2d):
    """What a causal 3-D convolution does to a single frame: its last temporal slice, as a 2-D convolution."""

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        return super().forward(x.squeeze(2)).unsqueeze(2)


def flatten_vae(vae: nn.Module) -> nn.Module:
    """Replace each causal 3-D convolution of a VAE by its still equivalent, in place."""
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    for parent in list(vae.modules()):
        for name, conv in list(parent.named_children()):
            if isinstance(conv, QwenImageCausalConv3d):
                _, height, width = conv.kernel_size
                padding = (height // 2, width // 2)
                setattr(parent, name, StillConv(conv.in_channels, conv.out_channels, (height, width), padding=padding))
    return vae


def inflate_vae(still: nn.Module):
    """The 3-D VAE that shows a single frame what `still` shows it."""
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage(**VAE_CONFIG)
    flat = still.state_dict()
    inflated = {}
    for key, tensor in vae.state_dict().items():
        if tensor.shape == flat[key].shape:
            inflated[key] = flat[key]
        else:
            inflated[key] = torch.zeros_like(tensor)
            if "time_conv" not in key:
                inflated[key][:, :, -1] = flat[key]
    vae.load_state_dict(inflated)
    return vae


def to_unit(pictures: Tensor) -> Tensor:
    """uint8 (N, 3, H, W) to fp32 (N, 3, 1, H, W) in -1 .. 1."""
    return (pictures.float() / 127.5 - 1).unsqueeze(2)


def edges(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.diff(dim=-1), x.diff(dim=-2)


def train_vae(pictures: Tensor, work: Path, budget_s: float, batch: int = 32):
    """The still VAE, trained for `budget_s` seconds on L1, squared, edge and a light KL loss."""
    from diffusers import AutoencoderKLQwenImage

    torch.manual_seed(0)
    vae = flatten_vae(AutoencoderKLQwenImage(**VAE_CONFIG))
    for parameter in vae.parameters():
        parameter.data = parameter.data.contiguous()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    averaged = average(vae, 0.995)
    path, saved = work / "vae.pt", {"vae": vae, "averaged": averaged, "optimizer": optimizer}
    clock, step = load_state(path, saved, budget_s)
    generator = torch.Generator().manual_seed(step)
    while (fraction := clock.fraction()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = cosine(int(fraction * 10_000), 10_000, 1.5e-3, 200)
        x = to_unit(pictures[torch.randint(len(pictures), (batch,), generator=generator)])
        if step % 2:
            x = x.flip(-1)
        with torch.autocast("cpu", torch.bfloat16):
            moments = vae.quant_conv(vae.encoder(x))
            mean, logvar = moments.float().chunk(2, dim=1)
            logvar = logvar.clamp(-30, 20)
            z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
            y = vae.decoder(vae.post_quant_conv(z)).float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        gradient = sum((a - b).abs().mean() for a, b in zip(edges(x), edges(y), strict=True))
        loss = (x - y).abs().mean() + 2 * (x - y).square().mean() + gradient + 1e-3 * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(vae)
        step += 1
        if step % 100 == 0:
            l1 = (x - y).abs().mean().item()
            print(f"vae step {step} {fraction:.1%} l1 {l1:.4f} kl {kl.item():.2f}", flush=True)
        if step % 500 == 0 or clock.fraction() >= 1:
            save_state(path, saved, clock, step)
    return inflate_vae(averaged.module)


@torch.no_grad()
def encode(vae, pictures: Tensor) -> Tensor:
    """Posterior modes: fp32 (N, 16, 8, 8), not normalised."""
    modes = [vae.encode(to_unit(chunk)).latent_dist.mode() for chunk in pictures.split(64)]
    return torch.cat(modes).squeeze(2)
