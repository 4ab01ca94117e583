"""An adapter in a narrower dtype, and what that cost: numbers that sank to zero, and the error of the change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finitune.adapters.core import SiteAdapter
from finitune.adapters.difference import change_error, plain_lora
from finitune.adapters.lowrank import balance
from finitune.errors import NumericsError


@dataclass(frozen=True)
class Narrowed:
    """An adapter in another dtype: how many nonzero numbers became zero, of how many, and the relative error."""

    adapter: SiteAdapter
    flushed: int
    nonzero: int
    error: float


def narrowed(adapter: SiteAdapter, dtype: torch.dtype) -> Narrowed:
    """The adapter with its factors in `dtype`; magnitudes stay as they are.

    Where numbers of a LoRA would become zero or infinite, powers of two first go from one factor to the other, which
    leaves their product as it was to the bit. Raises NumericsError (NARROW-OVERFLOW) where that does not help.
    """
    best = adapter.tensors
    if plain_lora(adapter) and any(flushed(t, dtype) or overflows(t, dtype) for t in best.values()):
        up, down = best["up"], best["down"]
        even = balance(up.flatten(1), down.flatten(1))
        trial = {**best, "up": even[0].view(up.shape), "down": even[1].view(down.shape)}
        if harm(trial, dtype) < harm(best, dtype):
            best = trial
    for role, tensor in best.items():
        if overflows(tensor, dtype):
            raise too_large(role, tensor, dtype)
    lost = sum(flushed(tensor, dtype) for tensor in best.values())
    result = replace(adapter, tensors={role: tensor.to(dtype) for role, tensor in best.items()})
    nonzero = sum(int(tensor.count_nonzero()) for tensor in best.values())
    return Narrowed(result, lost, nonzero, change_error(result, adapter))


def harm(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[int, int]:
    """How many tensors overflow in `dtype`, and how many numbers become zero."""
    values = tensors.values()
    return sum(overflows(tensor, dtype) for tensor in values), sum(flushed(tensor, dtype) for tensor in values)


def flushed(tensor: Tensor, dtype: torch.dtype) -> int:
    """How many nonzero numbers become zero in `dtype`."""
    return int(tensor.count_nonzero()) - int(tensor.to(dtype).count_nonzero())


def overflows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite tensor is not finite any more in `dtype`."""
    return not bool(torch.isfinite(tensor.to(dtype)).all())


def too_large(role: str, tensor: Tensor, dtype: torch.dtype) -> NumericsError:
    """The error for numbers beyond a dtype, or not finite at all."""
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
