"""How well does pico-anima draw what it was asked? Retrieval over its training pictures, and a contact sheet.

For 100 training captions (every 13th glyph, seeds 0 to 99, 28 steps, guidance 4) a picture is drawn and encoded by the
VAE; it counts when the captioned picture is among the five nearest of all training pictures in normalised latents.

    python scripts/evaluate_pico_anima.py --sheet docs/pico-anima.png
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from finitune.generation.planning import draw_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.anima.load import AnimaParts, load_folder
from finitune.models.pico import get_pico_folder, get_pico_plan_path
from finitune.precision.plan import PrecisionPlan
from pico.pictures import draw_pictures
from pico.vae import encode

PROMPTS = 100
STRIDE = 13
SHEET = 8


def draw_all(parts: AnimaParts, prompts: list[str], precision: str) -> Tensor:
    """One picture per prompt, seeds counted from 0: uint8 (N, 64, 64, 3)."""
    plan = PrecisionPlan.load(get_pico_plan_path()) if precision == "planned-half" else None
    pictures = [PictureSettings(prompt=prompt, seed=seed) for seed, prompt in enumerate(prompts)]
    return draw_in_precision(parts, precision, pictures, plan).pixels


def ranks(drawn: Tensor, training: Tensor, right: Tensor) -> Tensor:
    """How many training latents (M, ...) are nearer to each drawn latent (N, ...) than the right one is."""
    distances = torch.cdist(drawn.flatten(1), training.flatten(1))
    return (distances < distances.gather(1, right.unsqueeze(1))).sum(1)


def contact_sheet(pixels: Tensor, path: Path) -> None:
    """The first 64 pictures as a sheet of 8 by 8."""
    from PIL import Image

    rows = pixels[: SHEET * SHEET].unflatten(0, (SHEET, SHEET))
    sheet = rows.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet.numpy()).save(path, optimize=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--model", type=Path, default=get_pico_folder())
    options = parser.parse_args()
    parts = load_folder(options.model)
    with tempfile.TemporaryDirectory() as work:
        pictures, names = draw_pictures(Path(work))
    chosen = torch.arange(PROMPTS) * STRIDE
    pixels = draw_all(parts, [names[i] for i in chosen], options.precision)
    vae = parts.vae.float()
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)
    training, drawn = (encode(vae, p) / std for p in (pictures, pixels.permute(0, 3, 1, 2)))
    found = ranks(drawn, training, chosen)
    if options.sheet:
        contact_sheet(pixels, options.sheet)
    figures = {f"retrieval_top{k}": (found < k).float().mean().item() for k in (1, 5)}
    print(json.dumps({"precision": options.precision, "pictures": len(pictures), **figures}))


if __name__ == "__main__":
    main()
