"""Draw the pictures of examples/emoji_style: 24 emoji in blue ink, each with its caption.

    apt-get install fonts-noto-color-emoji
    python scripts/make_emoji_style.py

Brightness becomes a shade between navy and white, and edges are drawn dark: a style that pico-anima has never seen, of
things that it knows. Licence of the pictures: Noto Color Emoji, SIL Open Font License 1.1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageChops, ImageFilter, ImageOps

from pico.pictures import draw_glyph, named_glyphs

FOLDER = Path(__file__).parents[1] / "examples" / "emoji_style" / "pictures"
TRIGGER = "blue ink"
NAVY, WHITE = (14, 32, 120), (255, 255, 255)
NAMES = (
    *("red apple", "banana", "strawberry", "pear", "mushroom", "hot beverage"),
    *("slice of pizza", "hamburger", "ice cream", "birthday cake", "cat face", "dog face"),
    *("bear face", "rabbit face", "octopus", "bird", "fish", "turtle"),
    *("automobile", "rocket", "sailboat", "alarm clock", "key", "crown"),
)


def in_ink(picture: torch.Tensor) -> Image.Image:
    """uint8 (3, H, W) on white as a drawing in blue ink."""
    grey = ImageOps.grayscale(Image.fromarray(picture.permute(1, 2, 0).numpy()))
    edges = ImageOps.expand(grey.filter(ImageFilter.FIND_EDGES).crop((1, 1, 63, 63)), border=1, fill=0)
    washed = ImageChops.subtract(ImageOps.autocontrast(grey, cutoff=1), edges)
    return ImageOps.colorize(washed, NAVY, WHITE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    points = {name: point for point, name in named_glyphs()}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        stem = options.out / name.replace(" ", "_")
        in_ink(draw_glyph(points[name])).save(stem.with_suffix(".png"), optimize=True)
        stem.with_suffix(".txt").write_text(f"{TRIGGER} {name}\n", encoding="utf-8")
    print(f"{len(NAMES)} pictures in {options.out}")


if __name__ == "__main__":
    main()
