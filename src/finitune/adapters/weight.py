"""What an adapter makes of a weight and of a bias: the one place where strength, magnitude and padding meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from finitune.adapters import dora, find_algorithm
from finitune.adapters.core import SiteAdapter, make_not_additive_error

WeightedAdapter = tuple[SiteAdapter, float]


def compute_adapted_weight(base: Tensor, adapter: SiteAdapter, strength: float = 1.0) -> Tensor:
    """W + m * (W(1) - W) for `base` (out, in, *kernel) in fp32 or fp64, in its dtype; the base itself at strength 0.

    Where the adapter reshapes, W is the base widened by inputs of weight zero, and so is the result. Raises
    AdapterError where the adapter does not fit the base.
    """
    return combine_adapted_weight(base, [(adapter, strength)])


def combine_adapted_weight(base: Tensor, adapters: list[WeightedAdapter]) -> Tensor:
    """W + sum of m * (W(1) - W) over several adapters, each on the stated base, in the dtype of `base`.

    Every adapter was trained against the base, so each change is taken from the base and not from what the adapter
    before it left: the order does not matter, for multiplicative algorithms too.
    """
    acting = [(adapter, strength) for adapter, strength in adapters if strength != 0]
    if not acting:
        return base
    total = base.clone()
    for adapter, strength in acting:
        change = strength * compute_weight_delta(base, adapter)
        total = widen_inputs(total, change.shape)
        total += widen_inputs(change, total.shape)
    return total


def compute_weight_delta(base: Tensor, adapter: SiteAdapter) -> Tensor:
    """W(1) - W in the dtype of `base` and its shape (widened where the adapter reshapes), magnitude included.

    Zeros where only the bias is adapted. Raises AdapterError where the adapter does not fit the base.
    """
    algorithm = find_algorithm(adapter.algorithm)
    algorithm.check(adapter, tuple(base.shape))
    if algorithm.widens(adapter):
        base = widen_inputs(base, algorithm.shape(adapter) or base.shape)
    delta = algorithm.delta(adapter, base)
    if adapter.magnitude is None:
        return delta
    if not algorithm.additive:
        raise make_not_additive_error(algorithm)
    return dora.compute_dora_delta(base, delta, adapter.magnitude)


def widen_inputs(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """`weight` (out, in, *kernel) with inputs of weight zero behind its own, as many as `shape` has more."""
    missing = shape[1] - weight.shape[1] if weight.ndim > 1 else 0
    return F.pad(weight, [*[0, 0] * (weight.ndim - 2), 0, missing]) if missing > 0 else weight


def compute_adapted_bias(bias: Tensor | None, adapter: SiteAdapter, strength: float = 1.0) -> Tensor | None:
    """b + m * (b(1) - b) in the dtype of `bias`; None where there is no bias and the adapter brings none."""
    delta = None if strength == 0 else find_algorithm(adapter.algorithm).bias_delta(adapter, bias)
    if delta is None:
        return bias
    return strength * delta if bias is None else bias + strength * delta.to(bias.dtype)
