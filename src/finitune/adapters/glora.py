"""GLoRA: dW = s * (W @ a1 @ a2 + b1 @ b2): a low-rank map in front of the base weight, and one beside it.

Sources: Chavan et al. 2023 (arXiv 2306.07967), the weight part of equation 3; the order of the factors is that of
LyCORIS modules/glora.py since 2.0. A file of 2023 has `a1` and `a2` the other way round, and `b1` and `b2`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finitune.adapters.core import AdapterAlgorithm, Shape, SiteAdapter, Target, get_factor_shapes, make_shapes_error


class GLoRA(AdapterAlgorithm):
    """`a1` (in, r), `a2` (r, in), `b1` (out, r), all perhaps with kernels of 1; `b2` (r, in, *kernel)."""

    name = "glora"
    title = "GLoRA"
    additive = False
    required = frozenset({"a1", "a2", "b1", "b2"})

    def rank(self, adapter: SiteAdapter) -> int:
        return adapter.tensors["a2"].shape[0]

    def shape(self, adapter: SiteAdapter) -> Shape:
        shapes = get_factor_shapes(adapter)
        a1, a2, b1, b2 = (shapes[role] for role in ("a1", "a2", "b1", "b2"))
        matrices = all(len(s) >= 2 for s in (a1, a2, b1, b2)) and math.prod(a1[2:] + a2[2:] + b1[2:]) == 1
        if not matrices or not a1[1] == a2[0] == b1[1] == b2[0] or not a1[0] == a2[1] == b2[1]:
            raise make_shapes_error(self, adapter, "a1 @ a2 is not (in, in), or b1 @ b2 not (out, in), of one rank")
        return (b1[0], *b2[1:])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        (out, into, *kernel), rank = target.shape, target.rank
        ones = [1] * len(kernel)
        tensors = {"a1": torch.empty(into, rank, *ones), "a2": torch.zeros(rank, into, *ones)}
        tensors |= {"b1": torch.empty(out, rank, *ones), "b2": torch.zeros(rank, into, *kernel)}
        for role in ("a1", "b1"):
            torch.nn.init.kaiming_uniform_(tensors[role], a=math.sqrt(5), generator=generator)
        return SiteAdapter(self.name, tensors, target.alpha)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        a1, a2, b1, b2 = (adapter.tensors[role].to(base.dtype).flatten(1) for role in ("a1", "a2", "b1", "b2"))
        before = torch.einsum("o i ..., i r, r j -> o j ...", base, a1, a2)
        return self.scale(adapter) * (before + (b1 @ b2).view(base.shape))
