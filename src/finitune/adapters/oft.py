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

from finitune.adapters.core import (
    AdapterAlgorithm,
    Shape,
    SiteAdapter,
    Target,
    get_factor_shapes,
    make_misfit_error,
    make_shapes_error,
)
from finitune.adapters.rotation import (
    apply_rescale,
    choose_block_size,
    compute_cayley_turn,
    compute_skew_generators,
    list_divisors,
    require_rescale_fit,
)


class OFT(AdapterAlgorithm):
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
        blocks = get_factor_shapes(adapter)["blocks"]
        if len(blocks) != 3 or blocks[1] != blocks[2]:
            raise make_shapes_error(self, adapter, f"blocks {list(blocks)} are not n square matrices")
        require_rescale_fit(self, adapter, count_turned_outputs(adapter))
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        if shape is not None and count_turned_outputs(adapter) != shape[0]:
            raise make_misfit_error(f"{self.title} blocks turn outputs of", (count_turned_outputs(adapter),), shape[:1])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """Blocks of the option `block_size`, or of the largest size up to the rank and the root of the outputs.

        The root is LyCORIS's rule: it cannot load larger blocks than that.
        """
        out = target.shape[0]
        size = choose_block_size(self, target, out, list_divisors(out), min(target.rank, math.isqrt(out)))
        return self.unturned(target, torch.zeros(out // size, size, size))

    def unturned(self, target: Target, blocks: Tensor) -> SiteAdapter:
        """An adapter of such `blocks`, with the rescaling and the options that were asked for."""
        tensors = {"blocks": blocks}
        if target.options.get("rescaled"):
            tensors["rescale"] = torch.ones(target.shape[0], *[1] * (len(target.shape) - 1))
        kept = {name: target.options[name] for name in self.settings if name in target.options}
        return SiteAdapter(self.name, tensors, options=kept)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        step = compute_cayley_turn(compute_skew_generators(adapter, base.dtype))
        change = step.mT @ base.reshape(*step.shape[:2], -1)
        return apply_rescale(adapter, change.reshape(base.shape), base)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        plain = super().bias_delta(adapter, bias)
        if bias is None or not adapter.options.get("rotates_bias"):
            return plain
        change = self.delta(adapter, bias[:, None]).squeeze(1)
        return change if plain is None else change + plain


def count_turned_outputs(adapter: SiteAdapter) -> int:
    """How many outputs the blocks (..., n, b, b) turn."""
    *_, count, size, _ = adapter.tensors["blocks"].shape
    return count * size
