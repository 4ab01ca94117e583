"""pico-anima: Anima's own classes at a small size, really trained, shipped with the package. See CARD.md.

A pre-norm residual network computes the same function when its residual stream is multiplied by a constant: the norms
in front of every branch undo it. The shipped denoiser has its stream multiplied by 2**STREAM_EXPONENT, which puts it
where the big models have theirs, far outside fp16. Dividing it out again gives the unscaled twin.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

STREAM_EXPONENT = 13
STREAM_WRITERS = ("patch_embed.proj.weight", "attn1.to_out.0.weight", "attn2.to_out.0.weight", "ff.net.2.weight")


def get_pico_folder() -> Path:
    """The diffusers folder of the shipped model."""
    return Path(__file__).parent / "weights"


def get_pico_plan_path() -> Path:
    """The shipped precision plan."""
    return get_pico_folder() / "plan.toml"


def scale_stream_(transformer: nn.Module, exponent: int) -> None:
    """Multiply the residual stream of a Cosmos transformer by 2**exponent, in place: the same function."""
    for name, parameter in transformer.named_parameters():
        if name.endswith(STREAM_WRITERS):
            parameter.data.mul_(2.0**exponent)
