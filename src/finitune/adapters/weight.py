"""What an adapter makes of a weight and of a bias: the one place where strength, magnitude and padding meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from finitune.adapters import algorithm_of, dora
from finitune.adapters.core import SiteAdapter, not_additive

Strong = tuple[SiteAdapter, float]


def adapted_weight(base: Tensor, adapter: SiteAdapter, strength: float = 1.0) -> Tensor:
    """W + m * (W(1) - W) for `base` (out, in, *kernel) in fp32 or fp64, in its dtype; the base itself at strength 0.

    Where the adapter reshapes, W is the base widened by inputs of weight zero, and so is the result. Raises
    AdapterError where the adapter does not fit the base.
    """
    return combined_weight(base, [(adapter, strength)])


def combined_weight(base: Tensor, adapters: list[Strong]) -> Tensor:
    """W + sum of m * (W(1) - W) over several adapters, each on the stated base, in the dtype of `base`.

    Every adapter was trained against the base, so each change is taken from the base and not from what the adapter
    before it left: the order does not matter, for multiplicative algorithms too.
    """
    acting = [(adapter, strength) for adapter, strength in adapters if strength != 0]
    if not acting:
        return base
    total = base.clone()
    for adapter, strength in acting:
        change = strength * weight_delta(base, adapter)
        total = widened(total, change.shape)
        total += widened(change, total.shape)
    return total


def weight_delta(base: Tensor, adapter: SiteAdapter) -> Tensor:
    """W(1) - W in the dtype of `base` and its shape (widened where the adapter reshapes), magnitude included.

    Zeros where only the bias is adapted. Raises AdapterError where the adapter does not fit the base.
    """
    algorithm = algorithm_of(adapter.algorithm)
    algorithm.check(adapter, tuple(base.shape))
    if algorithm.widens(adapter):
        base = widened(base, algorithm.shape(adapter) or base.shape)
    delta = algorithm.delta(adapter, base)
    if adapter.magnitude is None:
        return delta
    if not algorithm.additive:
        raise not_additive(algorithm)
    return dora.delta(base, delta, adapter.magnitude)


def widened(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """`weight` (out, in, *kernel) with inputs of weight zero behind its own, as many as `shape` has more."""
    missing = shape[1] - weight.shape[1] if weight.ndim > 1 else 0
    return F.pad(weight, [*[0, 0] * (weight.ndim - 2), 0, missing]) if missing > 0 else weight


def adapted_bias(bias: Tensor | None, adapter: SiteAdapter, strength: float = 1.0) -> Tensor | None:
    """b + m * (b(1) - b) in the dtype of `bias`; None where there is no bias and the adapter brings none."""
    delta = None if strength == 0 else algorithm_of(adapter.algorithm).bias_delta(adapter, bias)
    if delta is None:
        return bias
    return strength * delta if bias is None else bias + strength * delta.to(bias.dtype)
