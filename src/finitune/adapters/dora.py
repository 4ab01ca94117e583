"""DoRA over any additive algorithm: W(1) = magnitude * V / |V|, with V = W + dW.

Source: Liu et al. 2024 (arXiv 2402.09353), equation 5. What implementations disagree about is stated by Magnitude:
the side whose norms are taken (PEFT and LyCORIS since 3.2: "out"; LyCORIS before, and A1111: "in"), and whether the
norm is that of V or of W alone (ComfyUI's and Forge's fault on the output side: only to predict what they draw).
The norm is part of the gradient here; section 4.3 of the paper, and PEFT with it, hold it constant to save memory,
which `held` saves by making it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finitune.adapters.core import KeySuffix, Magnitude, make_magnitude_error

MAGNITUDE_SUFFIXES = (
    KeySuffix(".dora_scale", "magnitude", ("kohya",)),
    KeySuffix(".lora_magnitude_vector.weight", "magnitude", ("peft",), named=True),
    KeySuffix(".lora_magnitude_vector", "magnitude", ("peft",), named=True),
    KeySuffix(".magnitude", "magnitude", ("ai-toolkit",)),
)


def compute_dora_delta(base: Tensor, additive: Tensor, magnitude: Magnitude) -> Tensor:
    """W(1) - W for `base` (out, in, *kernel) and its additive change, in their dtype, fp32 or fp64."""
    direction = base + additive
    norm = compute_weight_norms(direction if magnitude.norm_of == "adapted" else base, magnitude.side)
    return compute_dora_ratio(magnitude, norm, base) * direction - base


def compute_dora_ratio(magnitude: Magnitude, norm: Tensor, base: Tensor) -> Tensor:
    """magnitude / norm, broadcastable to `base`; 1 where the norm is 0: such a row has no direction to scale."""
    empty = norm == 0  # kept out of the division for the gradient's sake
    return torch.where(empty, 1, broadcast_magnitude(magnitude, base) / torch.where(empty, 1, norm + magnitude.eps))


def compute_weight_norms(weight: Tensor, side: str) -> Tensor:
    """The Euclidean norms of the rows ("out") or columns ("in", over the kernel too), broadcastable to `weight`."""
    if side == "out":
        return compute_row_norms(weight).view(-1, *[1] * (weight.ndim - 1))
    return torch.linalg.vector_norm(weight, dim=[d for d in range(weight.ndim) if d != 1], keepdim=True)


def compute_row_norms(weight: Tensor) -> Tensor:
    """The Euclidean norms (out) of the rows: the one way they are summed, so that equal weights have equal norms."""
    return torch.linalg.vector_norm(weight.flatten(1), dim=1)


def broadcast_magnitude(magnitude: Magnitude, base: Tensor) -> Tensor:
    """The magnitudes in the dtype of `base`, broadcastable to it; raises AdapterError where their number is wrong."""
    kept = 0 if magnitude.side == "out" else 1
    if magnitude.tensor.numel() != base.shape[kept]:
        raise make_magnitude_error(magnitude, tuple(base.shape))
    shape = [1] * base.ndim
    shape[kept] = base.shape[kept]
    return magnitude.tensor.to(base.dtype).reshape(shape)
