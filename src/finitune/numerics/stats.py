"""Ranges of tensors: one fused reduction for the hot path, a fuller account for weights and tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from finitune.numerics.formats import FP16


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` as a 0-d fp32 tensor on its device, NaN where x holds one; no synchronisation."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def amax_into(slot: Tensor, x: Tensor) -> None:
    """Merge the largest magnitude of `x` into `slot`, an fp32 tensor of one element on the same device.

    One fused reduction and no synchronisation. A NaN or an infinity in either stays visible in the slot.
    """
    if x.numel():
        slot.copy_(torch.maximum(slot, amax(x)))


def least_into(slot: Tensor, x: Tensor) -> None:
    """Merge the least nonzero magnitude of `x` into `slot`, an fp32 tensor of one element that starts at infinity.

    Two passes over x and no synchronisation; a tensor of zeros leaves the slot as it was.
    """
    if x.numel():
        magnitude = x.detach().abs().float()
        slot.copy_(torch.minimum(slot, magnitude.masked_fill_(magnitude == 0, math.inf).amin()))


@dataclass(frozen=True)
class RangeStats:
    """A tensor's finite range, seen from fp16: shares are of all elements; 0 counts as neither."""

    amax: float
    least_nonzero: float
    nonfinite: int
    subnormal_share: float
    over_share: float
    numel: int


def range_stats(x: Tensor) -> RangeStats:
    """The range of a float tensor: `subnormal_share` is below fp16's normals, `over_share` rounds to inf in fp16."""
    magnitude = x.detach().float().abs()
    finite = magnitude[torch.isfinite(magnitude)]
    nonzero = finite[finite > 0]
    numel = magnitude.numel()
    return RangeStats(
        amax=finite.max().item() if finite.numel() else 0.0,
        least_nonzero=nonzero.min().item() if nonzero.numel() else 0.0,
        nonfinite=numel - finite.numel(),
        subnormal_share=int((nonzero < FP16.tiny).sum()) / max(numel, 1),
        over_share=int((finite >= FP16.overflow_at).sum()) / max(numel, 1),
        numel=numel,
    )


def audit_weight(w: Tensor) -> dict[str, int | float]:
    """What storing the weight `w` (bf16 or fp32) in fp16 changes: counts of elements, and the relative RMS error.

    `overflow`: finite but inf in fp16; `flushed`: nonzero but 0; `inexact`: any other change; `nonfinite`: already
    not finite. `relative_rms` leaves non-finite and overflowing elements out.
    """
    exact = w.detach().float()
    half = exact.half().float()
    finite = torch.isfinite(exact)
    overflow = finite & ~torch.isfinite(half)
    flushed = (exact != 0) & (half == 0)
    error = torch.where(finite & ~overflow, half - exact, 0.0).double()
    kept = torch.where(finite & ~overflow, exact, 0.0).double()
    norm = kept.square().sum().sqrt().item()
    return {
        "numel": exact.numel(),
        "nonfinite": int((~finite).sum()),
        "overflow": int(overflow.sum()),
        "flushed": int(flushed.sum()),
        "inexact": int(((error != 0) & ~flushed).sum()),
        "relative_rms": error.square().sum().sqrt().item() / norm if norm else 0.0,
    }
