"""Set: the weight is replaced. Files of control adapters do so with norms (`set_weight`)."""

from __future__ import annotations

import torch
from torch import Tensor

from finitune.adapters.core import AdapterAlgorithm, Shape, SiteAdapter, Target


class SetWeight(AdapterAlgorithm):
    """`weight` (out, in, *kernel), or (C) for a norm, is what the module has at strength 1; alpha has no meaning."""

    name = "set"
    title = "replaced weight"
    additive = False
    required = frozenset({"weight"})

    def shape(self, adapter: SiteAdapter) -> Shape:
        return tuple(adapter.tensors["weight"].shape)

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        return SiteAdapter(self.name, {"weight": target.weight.detach().to(torch.float32, copy=True)})

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        return adapter.tensors["weight"].to(base.dtype).view(base.shape) - base
