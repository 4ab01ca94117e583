"""The modules of a Stable Diffusion UNet: as CompVis's and Stability's code numbers them, and as diffusers does.

The original is one row of input blocks, a middle and one row of output blocks; diffusers folds each row by level. Both
are walked here at once, level by level, so that the numbers need no formula. Sources: Stability-AI/generative-models
`sgm/modules/diffusionmodules/openaimodel.py`; diffusers `unet_2d_condition.py`, `unet_2d_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finitune.files.keymap import TemplatePair
from finitune.models.sites import ComponentSites, Hallmark, list_place_sites, make_single_site_places

_RESNET_LAYERS = (
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
)
_UNET_TRANSFORMER_PARTS = (
    *(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"norm{n}" for n in (1, 2, 3)),
    "ff.net.0.proj",
    "ff.net.2",
)
"""Both namings agree inside of an attention."""


@dataclass(frozen=True)
class UNetLevel:
    """One resolution of a UNet: its width as a multiple of the first, the transformer blocks of each attention."""

    width: int
    depth: int = 0


SD_LEVELS = (UNetLevel(1, 1), UNetLevel(2, 1), UNetLevel(4, 1), UNetLevel(4))
SDXL_LEVELS = (UNetLevel(1), UNetLevel(2, 2), UNetLevel(4, 10))

_RESNETS_PER_LEVEL = 2
"""Residual blocks per level on the way down; one more on the way up. All Stable Diffusion UNets have two."""


def map_resnet(original: str, name: str, shortcut: bool = False) -> Iterator[TemplatePair]:
    """A residual block; with a shortcut where it changes the width."""
    for old, new in (*_RESNET_LAYERS, *([("skip_connection", "conv_shortcut")] if shortcut else [])):
        yield f"{original}.{old}", f"{name}.{new}"


def map_attention_stack(original: str, name: str, depth: int) -> Iterator[TemplatePair]:
    """A stack of `depth` transformer blocks; nothing where it is 0."""
    blocks = (f"transformer_blocks.{n}.{part}" for n in range(depth) for part in _UNET_TRANSFORMER_PARTS)
    for part in ("norm", "proj_in", *blocks, "proj_out") if depth else ():
        yield f"{original}.{part}", f"{name}.{part}"


def map_input_blocks(levels: tuple[UNetLevel, ...]) -> Iterator[TemplatePair]:
    """The input blocks behind the first convolution."""
    number, width = 1, levels[0].width
    for n, level in enumerate(levels):
        for k in range(_RESNETS_PER_LEVEL):
            yield from map_resnet(f"input_blocks.{number}.0", f"down_blocks.{n}.resnets.{k}", level.width != width)
            yield from map_attention_stack(f"input_blocks.{number}.1", f"down_blocks.{n}.attentions.{k}", level.depth)
            number, width = number + 1, level.width
        if level is not levels[-1]:
            yield f"input_blocks.{number}.0.op", f"down_blocks.{n}.downsamplers.0.conv"
            number += 1


def map_middle_block(depth: int) -> Iterator[TemplatePair]:
    """The middle block: an attention between two residual blocks."""
    yield from map_resnet("middle_block.0", "mid_block.resnets.0")
    yield from map_attention_stack("middle_block.1", "mid_block.attentions.0", depth)
    yield from map_resnet("middle_block.2", "mid_block.resnets.1")


def map_output_blocks(levels: tuple[UNetLevel, ...]) -> Iterator[TemplatePair]:
    """The output blocks, each of which takes in a skip and so changes the width."""
    number = 0
    for n, level in enumerate(reversed(levels)):
        for k in range(_RESNETS_PER_LEVEL + 1):
            yield from map_resnet(f"output_blocks.{number}.0", f"up_blocks.{n}.resnets.{k}", shortcut=True)
            yield from map_attention_stack(f"output_blocks.{number}.1", f"up_blocks.{n}.attentions.{k}", level.depth)
            number += 1
        if level is not levels[0]:  # the upsampler ends the last output block of its level
            yield f"output_blocks.{number - 1}.{2 if level.depth else 1}.conv", f"up_blocks.{n}.upsamplers.0.conv"


def make_unet_component(
    levels: tuple[UNetLevel, ...], *, sized: bool = False, kohya_native: bool = False
) -> ComponentSites:
    """A UNet2DConditionModel of these levels; `sized`: conditioned on sizes and pooled text, as SDXL is."""
    depth = max(level.depth for level in levels)
    places = make_single_site_places(
        ("input_blocks.0.0", "conv_in"),
        *((f"time_embed.{old}", f"time_embedding.linear_{new}") for old, new in ((0, 1), (2, 2))),
        *((f"label_emb.0.{old}", f"add_embedding.linear_{new}") for old, new in ((0, 1), (2, 2)) if sized),
        *map_input_blocks(levels),
        *map_middle_block(depth),
        *map_output_blocks(levels),
        ("out.0", "conv_norm_out"),
        ("out.2", "conv_out"),
    )
    return ComponentSites(
        "unet",
        ("unet",),
        list_place_sites(places),
        places,
        single_file=("model.diffusion_model.", "diffusion_model.", ""),
        kohya_native=kohya_native,
    )


def make_text_width_hallmarks(inputs: int) -> tuple[Hallmark, ...]:
    """The hallmarks of a UNet whose cross attention reads text of this width."""
    part = "attentions.{j}.transformer_blocks.{k}.attn2"
    blocks = ("down_blocks.{i}", "mid_block", "up_blocks.{i}")
    return tuple(Hallmark("unet", f"{block}.{part}.{to}", inputs) for block in blocks for to in ("to_k", "to_v"))
