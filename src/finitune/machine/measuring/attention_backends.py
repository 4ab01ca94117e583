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
from torch.nn.attention import SDPBackend, sdpa_kernel

from finitune.machine.measuring.operations import compute_with_gradients
from finitune.machine.measuring.trial import (
    MEASURED_DTYPES,
    Operation,
    OperationResult,
    OperationShape,
    describe_operation_error,
    make_normal_tensor,
)
from finitune.numerics.attention import half_attention

DEFAULT_SDPA_NAME = "torch's choice"
"""`scaled_dot_product_attention` left to itself."""
AttentionCallable = Callable[..., Tensor]
ATTENTION_OP, ATTENTION_GRADIENTS_OP, MASKED_ROW_OP = "attention", "attention and gradients", "fully masked row"


@dataclass(frozen=True)
class AttentionBackend:
    """One way: (q, k, v) or (q, k, v, mask) to the output, and what it cannot do; `attend` is None where `absent`."""

    name: str
    attend: AttentionCallable | None
    takes_mask: bool = True
    has_gradients: bool = True
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    absent: str = ""
    caution: str = ""


SDPA_BACKENDS = (
    ("sdpa math", "MATH", True),
    ("sdpa flash", "FLASH_ATTENTION", False),
    ("sdpa memory-efficient", "EFFICIENT_ATTENTION", True),
    ("sdpa cudnn", "CUDNN_ATTENTION", True),
)
"""torch's back ends: name, member of `torch.nn.attention.SDPBackend`, and whether it takes a mask on a GPU."""


def list_sdpa_backends(device: torch.device) -> list[AttentionBackend]:
    """torch's own, each alone, and what `scaled_dot_product_attention` chooses by itself."""
    chosen = [AttentionBackend(DEFAULT_SDPA_NAME, F.scaled_dot_product_attention)]
    return chosen + [
        AttentionBackend(name, functools.partial(_sdpa, getattr(SDPBackend, member)), masks or device.type == "cpu")
        for name, member, masks in SDPA_BACKENDS
        if hasattr(SDPBackend, member)
    ]


def list_half_backends() -> list[AttentionBackend]:
    """finitune's: with the plan's exponents, and with ones measured in the call."""
    return [
        AttentionBackend("finitune, by plan", functools.partial(half_attention, exponent=0), dtypes=("fp16",)),
        AttentionBackend(
            "finitune, current scaling", functools.partial(half_attention, exponent=None), dtypes=("fp16",)
        ),
    ]


def load_installed_backends() -> list[AttentionBackend]:
    """Those of other packages that are installed, imported now."""
    found = [
        _installed("xformers", "xformers.ops", lambda ops: _heads_inside(ops.memory_efficient_attention)),
        _installed("flash-attn", "flash_attn", lambda package: _heads_inside(package.flash_attn_func)),
        _installed("flash-attn 3", "flash_attn_interface", lambda package: _heads_inside(package.flash_attn_func)),
        _installed("sage", "sageattention", lambda package: functools.partial(package.sageattn, tensor_layout="HND")),
    ]
    return [backend for backend in found if backend is not None]


BACKENDS_WITHOUT_GRADIENTS = ("sage",)
CAUTION_BY_BACKEND = {
    "sage": "it multiplies q and k in 8 bits, and some of its kernels add up in fp16: black pictures were reported "
    "(SageAttention #93, diffusers #12878)"
}


def _installed(name: str, module: str, attend: Callable[[Any], AttentionCallable]) -> AttentionBackend | None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        found = attend(importlib.import_module(module))
    except Exception as error:
        return AttentionBackend(
            name, None, dtypes=("fp16",), absent=f"installed, but cannot be imported: {describe_operation_error(error)}"
        )
    return AttentionBackend(
        name,
        found,
        False,
        name not in BACKENDS_WITHOUT_GRADIENTS,
        ("bf16", "fp16"),
        caution=CAUTION_BY_BACKEND.get(name, ""),
    )


def _heads_inside(function: Callable[..., Any]) -> AttentionCallable:
    """A function of (B, L, H, D), as one of (B, H, L, D)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _sdpa(member: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    with sdpa_kernel(member):
        return F.scaled_dot_product_attention(q, k, v, mask)


def compute_reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by the formula, in the operands' dtype: the twin that all others are compared with."""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v


def make_attention_inputs(shape: OperationShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v for a shape (heads, queries, keys, head size)."""
    number, queries, keys, size = shape
    return (
        make_normal_tensor((1, number, queries, size), dtype),
        make_normal_tensor((1, number, keys, size), dtype, seed=1),
        make_normal_tensor((1, number, keys, size), dtype, seed=2),
    )


def make_inputs_and_gradient(shape: OperationShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient for a shape (heads, queries, keys, head size)."""
    number, queries, _, size = shape
    return *make_attention_inputs(shape, dtype), make_normal_tensor((1, number, queries, size), dtype, seed=3)


def make_forward_operation(
    attend: AttentionCallable,
    name: str,
    ladder: tuple[OperationShape, ...],
    shapes: tuple[OperationShape, ...] | None = None,
) -> Operation:
    """Attention as an operation to check at `shapes` and to time along `ladder`; shapes as `heads` takes them."""
    return Operation(
        ATTENTION_OP,
        attend,
        compute_reference_attention,
        make_attention_inputs,
        ladder[:1] if shapes is None else shapes,
        ladder,
        _flops,
        name,
        2.0,
    )


def make_gradient_operation(
    attend: AttentionCallable,
    name: str,
    ladder: tuple[OperationShape, ...],
    shapes: tuple[OperationShape, ...] | None = None,
) -> Operation:
    """Like `forward`, with the gradients of q, k and v."""
    return Operation(
        ATTENTION_GRADIENTS_OP,
        functools.partial(compute_with_gradients, attend),
        functools.partial(compute_with_gradients, compute_reference_attention),
        make_inputs_and_gradient,
        ladder[:1] if shapes is None else shapes,
        ladder,
        lambda shape: 3.5 * _flops(shape),  # two products forward, five backward
        name,
        4.0,
    )


def check_masked_row(backend: AttentionBackend, dtype: str, device: torch.device) -> OperationResult:
    """What a query gives whose keys are all masked, by a bool mask and by one of -inf: an error of 0 if it is finite,
    of NaN if not; a failure where no mask is taken.

    Softmax over nothing is 0/0; the empty caption of a padded batch is where it happens (pytorch #103749).
    """
    number = MEASURED_DTYPES[dtype]
    q, k, v = (tensor.to(device) for tensor in make_attention_inputs((1, 16, 16, 64), number))
    seen = torch.ones(16, 16, dtype=torch.bool, device=device)
    seen[3] = False
    hidden = torch.zeros(16, 16, dtype=number, device=device).masked_fill_(~seen, -math.inf)
    try:
        assert backend.attend is not None
        outs = [backend.attend(q, k, v, mask) for mask in (seen, hidden)]
    except Exception:
        return OperationResult(MASKED_ROW_OP, backend.name, dtype, failure="takes no mask here")
    finite = all(bool(out.isfinite().all()) for out in outs)
    return OperationResult(MASKED_ROW_OP, backend.name, dtype, error=0.0 if finite else math.nan)


def _flops(shape: OperationShape) -> float:
    number, queries, keys, size = shape
    return 4.0 * number * queries * keys * size
