"""Rounding through a narrower format, in the tensor's own dtype: true overflow and subnormals, or unlimited range."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to nearest-even through `dtype` (overflow to inf, subnormals kept); a new tensor of x's dtype."""
    return x.to(dtype).to(x.dtype)


def round_to_(x: Tensor, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
    """`round_to` in place; `scratch`, of x's shape and of `dtype`, saves the allocation in a loop."""
    narrow = torch.empty_like(x, dtype=dtype) if scratch is None else scratch
    narrow.copy_(x)
    return x.copy_(narrow)


def round_significand(x: Tensor, bits: int = 11) -> Tensor:
    """fp32 `x` with its significand rounded to nearest-even at 2 <= `bits` <= 24, over fp32's whole exponent range.

    Not-a-number and infinities pass. It works on the bit pattern; the product of Veltkamp's splitting with
    2**(24 - bits) + 1 (Dekker 1971) is the same number but overflows near the end of the range.
    """
    dropped = 24 - bits
    if dropped == 0:
        return x.clone()
    pattern = x.view(torch.int32)
    last_kept_bit = (pattern >> dropped) & 1
    rounded = (pattern + ((1 << (dropped - 1)) - 1) + last_kept_bit) & -(1 << dropped)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)
