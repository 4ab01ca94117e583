"""The ways to compute attention here: torch's own back ends, other packages where they are installed, and finitune's.

Each takes q, k, v of (B, H, L, D) and, where it can, a mask, whatever layout its package likes. Installed packages are
imported when they are asked for, and one that cannot be imported (built for another torch, most often) says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from finitune.device.measuring.operations import with_gradients
from finitune.device.measuring.trial import Operation, Shape, random, told
from finitune.numerics.attention import half_attention

BY_ITSELF = "torch's choice"
"""`scaled_dot_product_attention` left to itself."""
Attend = Callable[..., Tensor]
ATTENTION, GRADIENTS = "attention", "attention and gradients"


@dataclass(frozen=True)
class Backend:
    """One way: (q, k, v) or (q, k, v, mask) to the output, and what it cannot do; `attend` is None where `absent`."""

    name: str
    attend: Attend | None
    takes_mask: bool = True
    has_gradients: bool = True
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    absent: str = ""
    caution: str = ""


SDPA = (
    ("sdpa math", "MATH", True),
    ("sdpa flash", "FLASH_ATTENTION", False),
    ("sdpa memory-efficient", "EFFICIENT_ATTENTION", True),
    ("sdpa cudnn", "CUDNN_ATTENTION", True),
)
"""torch's back ends: name, member of `torch.nn.attention.SDPBackend`, and whether it takes a mask on a GPU."""


def sdpa_backends(device: torch.device) -> list[Backend]:
    """torch's own, each alone, and what `scaled_dot_product_attention` chooses by itself."""
    from torch.nn.attention import SDPBackend

    chosen = [Backend(BY_ITSELF, F.scaled_dot_product_attention)]
    return chosen + [
        Backend(name, functools.partial(_sdpa, getattr(SDPBackend, member)), masks or device.type == "cpu")
        for name, member, masks in SDPA
        if hasattr(SDPBackend, member)
    ]


def half_backends() -> list[Backend]:
    """finitune's: with the plan's exponents, and with ones measured in the call."""
    return [
        Backend("finitune, by plan", functools.partial(half_attention, exponent=0), dtypes=("fp16",)),
        Backend("finitune, current scaling", functools.partial(half_attention, exponent=None), dtypes=("fp16",)),
    ]


def installed_backends() -> list[Backend]:
    """Those of other packages that are installed, imported now."""
    found = [
        _installed("xformers", "xformers.ops", lambda ops: _heads_inside(ops.memory_efficient_attention)),
        _installed("flash-attn", "flash_attn", lambda package: _heads_inside(package.flash_attn_func)),
        _installed("flash-attn 3", "flash_attn_interface", lambda package: _heads_inside(package.flash_attn_func)),
        _installed("sage", "sageattention", lambda package: functools.partial(package.sageattn, tensor_layout="HND")),
    ]
    return [backend for backend in found if backend is not None]


NO_GRADIENTS = ("sage",)
CAUTIONS = {
    "sage": "it multiplies q and k in 8 bits, and some of its kernels add up in fp16: black pictures were reported "
    "(SageAttention #93, diffusers #12878)"
}


def _installed(name: str, module: str, attend: Callable[[Any], Attend]) -> Backend | None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        found = attend(importlib.import_module(module))
    except Exception as error:
        return Backend(name, None, dtypes=("fp16",), absent=f"installed, but cannot be imported: {told(error)}")
    return Backend(name, found, False, name not in NO_GRADIENTS, ("bf16", "fp16"), caution=CAUTIONS.get(name, ""))


def _heads_inside(function: Callable[..., Any]) -> Attend:
    """A function of (B, L, H, D), as one of (B, H, L, D)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _sdpa(member: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(member):
        return F.scaled_dot_product_attention(q, k, v, mask)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by the formula, in the operands' dtype: the twin that all others are compared with."""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v


def heads(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v for a shape (heads, queries, keys, head size)."""
    number, queries, keys, size = shape
    return (
        random((1, number, queries, size), dtype),
        random((1, number, keys, size), dtype, seed=1),
        random((1, number, keys, size), dtype, seed=2),
    )


def heads_and_gradient(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient for a shape (heads, queries, keys, head size)."""
    number, queries, _, size = shape
    return *heads(shape, dtype), random((1, number, queries, size), dtype, seed=3)


def forward(attend: Attend, name: str, ladder: tuple[Shape, ...], shapes: tuple[Shape, ...] | None = None) -> Operation:
    """Attention as an operation to check at `shapes` and to time along `ladder`; shapes as `heads` takes them."""
    return Operation(
        ATTENTION, attend, written_out, heads, ladder[:1] if shapes is None else shapes, ladder, _flops, name, 2.0
    )


def both_ways(
    attend: Attend, name: str, ladder: tuple[Shape, ...], shapes: tuple[Shape, ...] | None = None
) -> Operation:
    """Like `forward`, with the gradients of q, k and v."""
    return Operation(
        GRADIENTS,
        functools.partial(with_gradients, attend),
        functools.partial(with_gradients, written_out),
        heads_and_gradient,
        ladder[:1] if shapes is None else shapes,
        ladder,
        lambda shape: 3.5 * _flops(shape),  # two products forward, five backward
        name,
        4.0,
    )


def masked_row(attend: Attend, dtype: torch.dtype, device: torch.device) -> str:
    """What a query gives whose keys are all masked, by a bool mask and by one of -inf: 'finite' or 'NaN'; '' where
    no mask is taken.

    Softmax over nothing is 0/0; the empty caption of a padded batch is where it happens (pytorch #103749).
    """
    q, k, v = (tensor.to(device) for tensor in heads((1, 16, 16, 64), dtype))
    seen = torch.ones(16, 16, dtype=torch.bool, device=device)
    seen[3] = False
    hidden = torch.zeros(16, 16, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)
    try:
        outs = [attend(q, k, v, mask) for mask in (seen, hidden)]
    except Exception:
        return ""
    return "finite" if all(bool(out.isfinite().all()) for out in outs) else "NaN"


def _flops(shape: Shape) -> float:
    number, queries, keys, size = shape
    return 4.0 * number * queries * keys * size
