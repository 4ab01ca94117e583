"""Power-of-two exponents: stored value = true value * 2**-k.

A planned exponent is an int. A current one is a 0-d int32 tensor that stays on the device: it is read out of the bit
pattern of the tensor's largest magnitude, so finding and applying it needs no logarithm, no rounding and no
synchronisation. Exponents add up as integers and turn into a factor at the very end; a sum that is out of fp32's
exponent range becomes two factors, so nothing overflows on the way to a result that fits.

Current scaling puts the largest magnitude into [2**14, 2**15): the highest binade that rounding cannot push into
infinity. It works both ways. Every binade of lift spares the small end: elements down to 2**-29 of the largest keep all
11 bits, and only those under 2**-40 of it flush to zero. That is why small gradients survive without a loss scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finitune.errors import NumericsError
from finitune.numerics.stats import amax

Exponent = int | Tensor

MAX_SCALED_MAGNITUDE = 2.0**15
_LEAST, _MOST = -126, 127  # exponents of fp32's normal numbers
_BIAS, _FRACTION_BITS = 127, 23


@torch.no_grad()
def scaled_half(x: Tensor, exponent: int | None, limit: float = MAX_SCALED_MAGNITUDE) -> tuple[Tensor, Exponent]:
    """fp16(x * 2**-k) of x's shape, and k: the given exponent, or with None the current one (0-d int32, on device).

    Current scaling brings the largest magnitude into [limit / 2, limit), for a `limit` of at most 2**15. An fp16 `x`
    with exponent None or 0 is returned as it is: what it holds fits already, and what it lost is gone. A planned
    exponent that is too small gives infinities, as the hardware would. Raises NumericsError for an impossible `limit`.
    Not differentiable.
    """
    if exponent is None:
        return (x, 0) if x.dtype == torch.float16 else _currently_scaled(x, _ceiling(limit))
    if exponent == 0:
        return x.half(), 0
    return multiply_to_half(x, 2.0**-exponent), exponent


def current_exponent(magnitude: Tensor, ceiling: int = 15) -> Tensor:
    """The k (0-d int32) that brings the fp32 0-d `magnitude` into [2**(ceiling-1), 2**ceiling), at least -126.

    Zero gives the lowest k; an infinity or a NaN gives a finite k and stays visible in the scaled tensor.
    """
    binade = (magnitude.view(torch.int32) >> _FRACTION_BITS) & 0xFF
    return (binade - (_BIAS - 1 + ceiling)).clamp_(min=_LEAST)


def power_of_two(k: Tensor) -> Tensor:
    """2**k as fp32, exactly, for an int32 tensor; k is held within [-126, 127]."""
    return ((k.clamp(_LEAST, _MOST) + _BIAS) << _FRACTION_BITS).view(torch.float32)


def rescale_product(
    product: Tensor, *exponents: Exponent, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """product * 2**(sum of exponents) + bias, rounded once to `dtype`; uses up the fp32 `product`."""
    *early, last = _factors(exponents)
    for factor in early:
        product.mul_(factor)
    if bias is not None:
        addend = bias.float()
        if isinstance(last, Tensor):
            product = torch.addcmul(addend, product, last)
        else:
            product = torch.add(addend, product, alpha=last)
    elif isinstance(last, Tensor) or last != 1.0:
        product.mul_(last)
    return product.to(dtype)


def sum_exponents(exponents: tuple[Exponent, ...]) -> Exponent:
    """The sum: an int where all are planned, else a 0-d int32 tensor; with ints of sum 0, that of the tensors alone."""
    planned = sum(k for k in exponents if not isinstance(k, Tensor))
    current = [k for k in exponents if isinstance(k, Tensor)]
    if not current:
        return planned
    summed = sum(current[1:], start=current[0])
    return summed + planned if planned else summed


def to_stored_value(x: Tensor, exponent: int | None) -> Tensor:
    """The value, in fp64, that `scaled_half(x, exponent)` stands for; gradients pass straight through the rounding.

    For the slow twins: it reads the exponent on the host.
    """
    half, k = scaled_half(x, exponent)
    stored = half.double() * 2.0 ** int(k)
    wide = x.double()
    return wide + (stored - wide.detach()) if x.requires_grad else stored


def _factors(exponents: tuple[Exponent, ...]) -> list[float | Tensor]:
    """2**(sum of exponents) as one factor where it surely fits fp32, else as two of about the same size."""
    k = sum_exponents(exponents)
    if not isinstance(k, Tensor):
        return [2.0**k] if _LEAST <= k <= _MOST else [2.0 ** (k // 2), 2.0 ** (k - k // 2)]
    if any(k is exponent for exponent in exponents):
        return [power_of_two(k)]
    low = k >> 1
    return [power_of_two(low), power_of_two(k - low)]


def _currently_scaled(x: Tensor, ceiling: int) -> tuple[Tensor, Tensor]:
    k = current_exponent(amax(x), ceiling)
    return multiply_to_half(x, power_of_two(-k)), k


def multiply_to_half(x: Tensor, factor: float | Tensor) -> Tensor:
    """fp16(x * factor), multiplied in fp32 whatever x's dtype; one pass over memory for an fp32 x on a GPU."""
    wide = x if x.dtype == torch.float32 else x.float()
    return torch.mul(wide, factor, out=torch.empty_like(wide, dtype=torch.float16))


def _ceiling(limit: float) -> int:
    if not 0 < limit <= MAX_SCALED_MAGNITUDE:
        raise NumericsError(
            f"Scaling to magnitudes of {limit} is impossible in fp16.",
            code="LIMIT-OUT-OF-RANGE",
            evidence={"limit": limit, "allowed": MAX_SCALED_MAGNITUDE},
            remedy="Give a limit above 0 and of at most 2**15.",
        )
    return math.frexp(limit)[1] - 1
