"""What a floating-point format can hold, and the power of two that makes a range fit into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from finitune.errors import NumericsError


@dataclass(frozen=True)
class FloatFormat:
    """A binary format: its largest number, least normal (`tiny`) and subnormal, and what first rounds to inf."""

    name: str
    dtype: torch.dtype
    significand_bits: int
    max: float
    tiny: float
    least: float
    overflow_at: float


def _format(name: str, dtype: torch.dtype, significand_bits: int) -> FloatFormat:
    info = torch.finfo(dtype)
    _, binade_end = math.frexp(info.max)
    half_ulp = math.ldexp(1.0, binade_end - significand_bits - 1)
    return FloatFormat(
        name=name,
        dtype=dtype,
        significand_bits=significand_bits,
        max=info.max,
        tiny=info.tiny,
        least=info.tiny * 2.0 ** (1 - significand_bits),
        overflow_at=info.max + half_ulp,
    )


FP16 = _format("fp16", torch.float16, 11)
BF16 = _format("bf16", torch.bfloat16, 8)
FP32 = _format("fp32", torch.float32, 24)


def find_float_format(dtype: torch.dtype) -> FloatFormat:
    """The format of a dtype; raises NumericsError for one that is not fp16, bf16 or fp32."""
    for known in (FP16, BF16, FP32):
        if known.dtype is dtype:
            return known
    raise NumericsError(
        f"{dtype} is not a format that half-precision planning knows.",
        code="DTYPE-UNKNOWN",
        subject=str(dtype),
        remedy="Use float16, bfloat16 or float32.",
    )


def headroom_bits(amax: float, fmt: FloatFormat = FP16) -> float:
    """How many doublings fit between `amax` and the format's largest number: log2(max / amax), inf for 0."""
    magnitude = _finite_magnitude(amax)
    return math.log2(fmt.max / magnitude) if magnitude else math.inf


def exponent_for(amax: float, headroom_bits: float = 2, fmt: FloatFormat = FP16) -> int:
    """Smallest k >= 0 with amax * 2**-k <= fmt.max * 2**-headroom_bits; raises NumericsError for a non-finite amax."""
    magnitude = _finite_magnitude(amax)
    limit = fmt.max * 2.0**-headroom_bits
    if magnitude <= limit:
        return 0
    k = max(0, math.frexp(magnitude)[1] - math.frexp(limit)[1])
    return k if math.ldexp(magnitude, -k) <= limit else k + 1


def _finite_magnitude(amax: float) -> float:
    if math.isfinite(amax) and amax >= 0:
        return float(amax)
    raise NumericsError(
        f"A range must be a finite magnitude, got {amax}.",
        code="RANGE-NOT-FINITE",
        evidence={"amax": amax},
        remedy="Measure the range again in fp32; where fp32 itself is not finite, the fault is not the precision.",
    )
