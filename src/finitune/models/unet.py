"""The modules of a Stable Diffusion UNet: as CompVis's and Stability's code numbers them, and as diffusers does.

The original is one row of input blocks, a middle and one row of output blocks; diffusers folds each row by level. Both
are walked here at once, level by level, so that the numbers need no formula. Sources: Stability-AI/generative-models
`sgm/modules/diffusionmodules/openaimodel.py`; diffusers `unet_2d_condition.py`, `unet_2d_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finitune.files.keymap import Pair
from finitune.models.sites import ComponentSites, Hallmark, single, sites_of

RESNET = (
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
)
TRANSFORMER_BLOCK = (
    *(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"norm{n}" for n in (1, 2, 3)),
    "ff.net.0.proj",
    "ff.net.2",
)
"""Both namings agree inside of an attention."""


@dataclass(frozen=True)
class Level:
    """One resolution of a UNet: its width as a multiple of the first, the transformer blocks of each attention."""

    width: int
    depth: int = 0


SD_LEVELS = (Level(1, 1), Level(2, 1), Level(4, 1), Level(4))
SDXL_LEVELS = (Level(1), Level(2, 2), Level(4, 10))

NUM_RESNETS = 2
"""Residual blocks per level on the way down; one more on the way up. All Stable Diffusion UNets have two."""


def resnet(original: str, name: str, shortcut: bool = False) -> Iterator[Pair]:
    """A residual block; with a shortcut where it changes the width."""
    for old, new in (*RESNET, *([("skip_connection", "conv_shortcut")] if shortcut else [])):
        yield f"{original}.{old}", f"{name}.{new}"


def attention(original: str, name: str, depth: int) -> Iterator[Pair]:
    """A stack of `depth` transformer blocks; nothing where it is 0."""
    blocks = (f"transformer_blocks.{n}.{part}" for n in range(depth) for part in TRANSFORMER_BLOCK)
    for part in ("norm", "proj_in", *blocks, "proj_out") if depth else ():
        yield f"{original}.{part}", f"{name}.{part}"


def down(levels: tuple[Level, ...]) -> Iterator[Pair]:
    """The input blocks behind the first convolution."""
    number, width = 1, levels[0].width
    for n, level in enumerate(levels):
        for k in range(NUM_RESNETS):
            yield from resnet(f"input_blocks.{number}.0", f"down_blocks.{n}.resnets.{k}", level.width != width)
            yield from attention(f"input_blocks.{number}.1", f"down_blocks.{n}.attentions.{k}", level.depth)
            number, width = number + 1, level.width
        if level is not levels[-1]:
            yield f"input_blocks.{number}.0.op", f"down_blocks.{n}.downsamplers.0.conv"
            number += 1


def middle(depth: int) -> Iterator[Pair]:
    """The middle block: an attention between two residual blocks."""
    yield from resnet("middle_block.0", "mid_block.resnets.0")
    yield from attention("middle_block.1", "mid_block.attentions.0", depth)
    yield from resnet("middle_block.2", "mid_block.resnets.1")


def up(levels: tuple[Level, ...]) -> Iterator[Pair]:
    """The output blocks, each of which takes in a skip and so changes the width."""
    number = 0
    for n, level in enumerate(reversed(levels)):
        for k in range(NUM_RESNETS + 1):
            yield from resnet(f"output_blocks.{number}.0", f"up_blocks.{n}.resnets.{k}", shortcut=True)
            yield from attention(f"output_blocks.{number}.1", f"up_blocks.{n}.attentions.{k}", level.depth)
            number += 1
        if level is not levels[0]:  # the upsampler ends the last output block of its level
            yield f"output_blocks.{number - 1}.{2 if level.depth else 1}.conv", f"up_blocks.{n}.upsamplers.0.conv"


def unet(levels: tuple[Level, ...], *, sized: bool = False, kohya_native: bool = False) -> ComponentSites:
    """A UNet2DConditionModel of these levels; `sized`: conditioned on sizes and pooled text, as SDXL is."""
    depth = max(level.depth for level in levels)
    places = single(
        ("input_blocks.0.0", "conv_in"),
        *((f"time_embed.{old}", f"time_embedding.linear_{new}") for old, new in ((0, 1), (2, 2))),
        *((f"label_emb.0.{old}", f"add_embedding.linear_{new}") for old, new in ((0, 1), (2, 2)) if sized),
        *down(levels),
        *middle(depth),
        *up(levels),
        ("out.0", "conv_norm_out"),
        ("out.2", "conv_out"),
    )
    return ComponentSites(
        "unet",
        ("unet",),
        sites_of(places),
        places,
        single_file=("model.diffusion_model.", "diffusion_model.", ""),
        kohya_native=kohya_native,
    )


def text_width(inputs: int) -> tuple[Hallmark, ...]:
    """The hallmarks of a UNet whose cross attention reads text of this width."""
    part = "attentions.{j}.transformer_blocks.{k}.attn2"
    blocks = ("down_blocks.{i}", "mid_block", "up_blocks.{i}")
    return tuple(Hallmark("unet", f"{block}.{part}.{to}", inputs) for block in blocks for to in ("to_k", "to_v"))
