"""Norm: the change of a normalisation's gain, and of its bias, stored as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from finitune.adapters.core import AdapterAlgorithm, Shape, SiteAdapter, Target, make_shapes_error


class Norm(AdapterAlgorithm):
    """`w_norm` (C), and `b_norm` (C) where the norm has a bias; alpha has no meaning. A new one takes option `bias`."""

    name = "norm"
    title = "norm difference"
    required = frozenset({"w_norm"})
    optional = frozenset({"b_norm"})

    def shape(self, adapter: SiteAdapter) -> Shape:
        gain, bias = adapter.tensors["w_norm"], adapter.tensors.get("b_norm")
        if gain.ndim != 1 or (bias is not None and bias.shape != gain.shape):
            raise make_shapes_error(self, adapter, "they are not one number for each channel")
        return tuple(gain.shape)

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        roles = ("w_norm", "b_norm") if target.options.get("bias") else ("w_norm",)
        return SiteAdapter(self.name, {role: torch.zeros(target.shape) for role in roles})

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        return adapter.tensors["w_norm"].to(base.dtype)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        changes = [adapter.tensors[role] for role in ("b_norm", "diff_b") if role in adapter.tensors]
        return sum(changes[1:], changes[0]) if changes else None
