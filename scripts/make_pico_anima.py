"""Make pico-anima again from nothing: a real, trained text-to-image model small enough to ship.

Pictures: every named glyph of the Noto Color Emoji font, drawn at 64 by 64 on white. Captions: their Unicode names, in
several wordings. Model: Anima's own classes at a small size. Stages, each saved as it goes and taken up again where it
stopped: glyphs, tokenizers, VAE, latents, denoiser, package.

    apt-get install fonts-noto-color-emoji
    python scripts/make_pico_anima.py --work build/pico

Three choices worth knowing:

* A still picture meets only the last temporal slice of a causal 3-D kernel, so the VAE is trained as its 2-D
  equivalent and inflated afterwards: the same function, three times cheaper.
* The text encoder and the text conditioner learn together with the denoiser; there is no pretrained anything.
* The shipped denoiser has its residual stream multiplied by a power of two: the same function, at the magnitudes of
  the big models (see finitune.models.pico).

Licence of the pictures: Noto Color Emoji, SIL Open Font License 1.1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from finitune.models.pico import STREAM_EXPONENT, get_pico_folder, scale_stream_
from pico.denoiser import TextToLatent, train_denoiser
from pico.pictures import Captions, draw_pictures, train_tokenizers
from pico.vae import encode, train_vae

SIZE_LIMIT_BYTES = 16_000_000


def bf16_(module: nn.Module) -> nn.Module:
    """Round every parameter to bf16, in place, in fp32 storage."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return module.eval()


def normalise_(vae: nn.Module, pictures: Tensor) -> Tensor:
    """Put the latents' mean and deviation into the VAE's config; returns the normalised latents (N, 16, 8, 8)."""
    latents = encode(vae, pictures)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def package(model: TextToLatent, vae: nn.Module, tokenizers: dict[str, object], out: Path) -> int:
    """Write the diffusers folder in bf16, the stream scaled; returns its size in bytes."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scale_stream_(model.transformer, STREAM_EXPONENT)
    modules = {name: getattr(model, name) for name in ("text_encoder", "text_conditioner", "transformer")}
    for name, module in {**modules, "vae": vae}.items():
        module.to(torch.bfloat16).save_pretrained(out / name)
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(out / name)
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(out / "scheduler")
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/pico"))
    parser.add_argument("--out", type=Path, default=get_pico_folder())
    parser.add_argument("--vae-minutes", type=float, default=24)
    parser.add_argument("--denoiser-minutes", type=float, default=62)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    pictures, names = draw_pictures(options.work)
    print(f"{len(pictures)} pictures", flush=True)
    qwen, t5 = train_tokenizers(names, options.work)
    vae = bf16_(train_vae(pictures, options.work, options.vae_minutes * 60))
    latents = normalise_(vae, pictures)
    model = train_denoiser(latents, Captions(names, qwen, t5), options.work, options.denoiser_minutes * 60)
    size = package(bf16_(model), vae, {"tokenizer": qwen, "t5_tokenizer": t5}, options.out)
    print(f"{size} bytes in {(time.monotonic() - started) / 60:.0f} min (this run)", flush=True)
    if size > SIZE_LIMIT_BYTES:
        raise SystemExit(f"the package is over {SIZE_LIMIT_BYTES} bytes")


if __name__ == "__main__":
    main()
