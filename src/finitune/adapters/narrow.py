"""An adapter in a narrower dtype, and what that cost: numbers that sank to zero, and the error of the change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finitune.adapters.convert import Exactness
from finitune.adapters.core import SiteAdapter
from finitune.adapters.difference import compute_change_error
from finitune.adapters.lora import is_plain_lora
from finitune.adapters.lowrank import balance_factors
from finitune.errors import NumericsError

_MAX_FLUSHED_SHARE = 1e-2
"""The share of the nonzero numbers of a file that may become zero before a narrower dtype counts as a loss."""
_MAX_ROUNDINGS = 2
"""The error of a module's change, in units of the dtype's epsilon, that counts as its rounding: two factors are rounded
by up to half an epsilon each, and their product may be smaller than they are."""


@dataclass(frozen=True)
class NarrowedAdapter:
    """An adapter in another dtype: how many nonzero numbers became zero, of how many, and the relative error."""

    adapter: SiteAdapter
    flushed: int
    nonzero: int
    error: float


def narrow_adapter(adapter: SiteAdapter, dtype: torch.dtype) -> NarrowedAdapter:
    """The adapter with its factors in `dtype`; magnitudes stay as they are.

    Where numbers of a LoRA would become zero, infinite, or coarser than the dtype's own rounding, powers of two first
    go from one factor to the other, which leaves their product as it was to the bit. Raises NumericsError
    (NARROW-OVERFLOW) where that does not help.
    """
    best, cost = adapter, measure_narrowing_harm(adapter, dtype)
    if is_plain_lora(adapter) and cost > (0, 0, _MAX_ROUNDINGS * torch.finfo(dtype).eps):
        up, down = adapter.tensors["up"], adapter.tensors["down"]
        even = balance_factors(up.flatten(1), down.flatten(1))
        trial = adapter.with_tensors(up=even[0].view(up.shape), down=even[1].view(down.shape))
        trial_cost = measure_narrowing_harm(trial, dtype)
        if trial_cost < cost:
            best, cost = trial, trial_cost
    for role, tensor in best.tensors.items():
        if has_dtype_overflow(tensor, dtype):
            raise make_dtype_overflow_error(role, tensor, dtype)
    nonzero = sum(int(tensor.count_nonzero()) for tensor in best.tensors.values())
    return NarrowedAdapter(cast_adapter(best, dtype), cost[1], nonzero, cost[2])


def cast_adapter(adapter: SiteAdapter, dtype: torch.dtype) -> SiteAdapter:
    """The adapter with its factors rounded to `dtype`."""
    return replace(adapter, tensors={role: tensor.to(dtype) for role, tensor in adapter.tensors.items()})


def classify_narrowing(flushed: int, nonzero: int, error: float, dtype: torch.dtype | None) -> Exactness:
    """What a narrower dtype cost: nothing, its own rounding, or more.

    `flushed` of `nonzero` numbers became zero; `error` is the largest relative one of a module's change. More than
    rounding is a share of zeros above FLUSHED_SHARE, or an error above ROUNDINGS of the dtype's epsilon (fp16 0.2 %,
    bf16 1.6 %).
    """
    if dtype is None or not (flushed or error):
        return Exactness.LOSSLESS
    lossy = flushed > _MAX_FLUSHED_SHARE * nonzero or error > _MAX_ROUNDINGS * torch.finfo(dtype).eps
    return Exactness.LOSSY if lossy else Exactness.EXACT


def measure_narrowing_harm(adapter: SiteAdapter, dtype: torch.dtype) -> tuple[int, int, float]:
    """How many tensors overflow in `dtype`, how many numbers become zero, and the relative error of the change."""
    values = adapter.tensors.values()
    beyond, lost = (
        sum(has_dtype_overflow(tensor, dtype) for tensor in values),
        sum(int(tensor.count_nonzero()) - int(tensor.to(dtype).count_nonzero()) for tensor in values),
    )
    return beyond, lost, math.inf if beyond else compute_change_error(cast_adapter(adapter, dtype), adapter)


def has_dtype_overflow(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite tensor is not finite any more in `dtype`."""
    return not bool(torch.isfinite(tensor.to(dtype)).all())


def make_dtype_overflow_error(role: str, tensor: Tensor, dtype: torch.dtype) -> NumericsError:
    largest = float(tensor.double().abs().nan_to_num(nan=math.inf).max())
    name = str(dtype).removeprefix("torch.")
    return NumericsError(
        f"{role} holds {largest:.3g}, and {name} ends at {torch.finfo(dtype).max:.3g}",
        code="NARROW-OVERFLOW" if math.isfinite(largest) else "FACTORS-NOT-FINITE",
        subject=role,
        evidence={"largest": largest, "dtype": name},
        remedy="Write bf16 or fp32."
        if math.isfinite(largest)
        else "Take an earlier checkpoint: its training diverged.",
    )
