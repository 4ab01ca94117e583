"""Diag-OFT: W(1) = s * R^T W, with R block-diagonal and orthogonal, on the output side; s (`rescale`) is optional.

Sources: Qiu et al. 2023 (arXiv 2306.07280); LyCORIS functional/diag_oft.py, where the sum runs over the first axis of
R, hence the transpose; kohya's networks/oft.py turns the finished output Wx + b by the same R, and so its bias.
Strength is ours, W + m * (W(1) - W): LyCORIS leaves `rescale` at full strength even at m = 0.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.core import Algorithm, Shape, SiteAdapter, Target, does_not_fit, shapes_of, wrong_shapes
from finitune.adapters.rotation import block_size, demand_rescale, divisors, generators, turn, with_rescale


class OFT(Algorithm):
    """`blocks` (n, b, b), raw: Q = B - B^T; `rescale` (out[, 1...]).

    Options: `constraint`, the largest norm of Q over all blocks, absolute, 0 for none; `rotates_bias`.
    """

    name = "oft"
    title = "OFT"
    additive = False
    required = frozenset({"blocks"})
    optional = frozenset({"rescale"})
    settings: ClassVar[tuple[str, ...]] = ("constraint", "rotates_bias")

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        blocks = shapes_of(adapter)["blocks"]
        if len(blocks) != 3 or blocks[1] != blocks[2]:
            raise wrong_shapes(self, adapter, f"blocks {list(blocks)} are not n square matrices")
        demand_rescale(self, adapter, turned(adapter))
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        if shape is not None and turned(adapter) != shape[0]:
            raise does_not_fit(f"{self.title} blocks turn outputs of", (turned(adapter),), shape[:1])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """Blocks of the option `block_size`, or of the largest size up to the rank and the root of the outputs.

        The root is LyCORIS's rule: it cannot load larger blocks than that.
        """
        out = target.shape[0]
        size = block_size(self, target, out, divisors(out), min(target.rank, math.isqrt(out)))
        return self.unturned(target, torch.zeros(out // size, size, size))

    def unturned(self, target: Target, blocks: Tensor) -> SiteAdapter:
        """An adapter of such `blocks`, with the rescaling and the options that were asked for."""
        tensors = {"blocks": blocks}
        if target.options.get("rescaled"):
            tensors["rescale"] = torch.ones(target.shape[0], *[1] * (len(target.shape) - 1))
        kept = {name: target.options[name] for name in self.settings if name in target.options}
        return SiteAdapter(self.name, tensors, options=kept)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        step = turn(generators(adapter, base.dtype))
        change = step.mT @ base.reshape(*step.shape[:2], -1)
        return with_rescale(adapter, change.reshape(base.shape), base)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        plain = super().bias_delta(adapter, bias)
        if bias is None or not adapter.options.get("rotates_bias"):
            return plain
        change = self.delta(adapter, bias[:, None]).squeeze(1)
        return change if plain is None else change + plain


def turned(adapter: SiteAdapter) -> int:
    """How many outputs the blocks (..., n, b, b) turn."""
    *_, count, size, _ = adapter.tensors["blocks"].shape
    return count * size
