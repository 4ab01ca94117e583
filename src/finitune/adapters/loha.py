"""LoHa: dW = s * (w1_a @ w1_b) o (w2_a @ w2_b), the entrywise product of two low-rank matrices: rank r * r.

Sources: Hyeon-Woo et al. 2021 (arXiv 2108.06098), equation 3; for kernels and initial values, LyCORIS modules/loha.py.
A product with the factors alone would go through all r * r pairs of them, so there is no cheaper forward.
"""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import Tensor

from finitune.adapters.core import (
    AdapterAlgorithm,
    Shape,
    SiteAdapter,
    Target,
    TensorsByRole,
    get_factor_shapes,
    make_shapes_error,
)
from finitune.adapters.lora import rebuild_tucker_weight

FACTOR_NUMBERS = ("1", "2")


class LoHa(AdapterAlgorithm):
    """For either half, `w_a` (out, r) and `w_b` (r, in * kernel); or with a core `t` (r, r, *kernel), `w_a` (r, out)
    and `w_b` (r, in).
    """

    name = "loha"
    title = "LoHa"
    required = frozenset({"w1_a", "w1_b", "w2_a", "w2_b"})
    optional = frozenset({"t1", "t2"})
    flat_kernel = True

    def missing(self, present: Set[str]) -> Set[str]:
        cores = {"t1", "t2"}
        return super().missing(present) | (cores - present if present & cores else set())

    def rank(self, adapter: SiteAdapter) -> int:
        return adapter.tensors["w1_b"].shape[0]

    def shape(self, adapter: SiteAdapter) -> Shape:
        shapes = get_factor_shapes(adapter)
        first, second = (infer_low_rank_shape(shapes, half) for half in FACTOR_NUMBERS)
        if first is None or first != second or shapes["w1_b"][0] != shapes["w2_b"][0]:
            raise make_shapes_error(self, adapter, "the halves are not two weights of one shape and rank")
        return first

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        (out, into, *kernel), rank = target.shape, target.rank
        tucker = bool(kernel and target.options.get("use_tucker"))
        a = (rank, out) if tucker else (out, rank)
        b = (rank, into) if tucker else (rank, into * math.prod(kernel))
        tensors = {"w1_a": draw_normal_noise(a, 0.1, generator), "w1_b": draw_normal_noise(b, 1.0, generator)}
        tensors |= {"w2_a": torch.zeros(a), "w2_b": draw_normal_noise(b, 1.0, generator)}
        if tucker:
            tensors |= {role: draw_normal_noise((rank, rank, *kernel), 0.1, generator) for role in ("t1", "t2")}
        return SiteAdapter(self.name, tensors, target.alpha)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        tensors = {role: tensor.to(base.dtype) for role, tensor in adapter.tensors.items()}
        first, second = (compute_low_rank_weight(tensors, half).reshape(base.shape) for half in FACTOR_NUMBERS)
        return self.scale(adapter) * (first * second)


def compute_low_rank_weight(tensors: TensorsByRole, which: str) -> Tensor:
    """The weight of the factors w1_a, w1_b and t1, or w2_a, w2_b and t2: (out, in, *kernel), or (out, in * kernel)."""
    a, b, core = tensors[f"w{which}_a"], tensors[f"w{which}_b"], tensors.get(f"t{which}")
    return a @ b.flatten(1) if core is None else rebuild_tucker_weight(core, a.t(), b)


def infer_low_rank_shape(shapes: dict[str, Shape], which: str) -> Shape | None:
    """The shape of that weight, or None where its factors do not chain."""
    a, b, core = shapes[f"w{which}_a"], shapes[f"w{which}_b"], shapes.get(f"t{which}")
    if len(a) != 2 or len(b) < 2:
        return None
    if core is None:
        return (a[0], *b[1:]) if a[1] == b[0] else None
    return (a[1], b[1], *core[2:]) if core[:2] == (a[0], b[0]) and len(b) == 2 else None


def draw_normal_noise(shape: Shape, std: float, generator: torch.Generator) -> Tensor:
    """fp32 normal noise around zero."""
    return std * torch.randn(shape, generator=generator)
