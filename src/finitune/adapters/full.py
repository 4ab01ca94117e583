"""Full: dW is stored as it is. So is a change of the bias alone, which every algorithm may have beside its own."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from finitune.adapters.core import AdapterAlgorithm, Shape, SiteAdapter, Target


class Full(AdapterAlgorithm):
    """`diff` (out, in, *kernel), `diff_b` (out), or one of them alone; alpha has no meaning."""

    name = "full"
    title = "full difference"
    required = frozenset()
    optional = frozenset({"diff"})

    def missing(self, present: Set[str]) -> Set[str]:
        return set() if present else {"diff"}

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        diff = adapter.tensors.get("diff")
        return None if diff is None else tuple(diff.shape)

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        return SiteAdapter(self.name, {"diff": torch.zeros(target.shape)})

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        diff = adapter.tensors.get("diff")
        return torch.zeros_like(base) if diff is None else diff.to(base.dtype).view(base.shape)
