"""How far one tensor is from another: relative error, decibels, and units in the last place."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

UNCOMPARABLE = torch.iinfo(torch.int64).max
_PATTERN = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def relative_l2(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| in fp64 over all elements; 0 where both are zero, NaN where either holds one."""
    wanted = reference.detach().double()
    error = _norm(x.detach().double() - wanted)
    norm = _norm(wanted)
    if norm == 0:
        return 0.0 if error == 0 else (error if math.isnan(error) else math.inf)
    return error / norm


def sqnr_db(x: Tensor, reference: Tensor) -> float:
    """Signal to quantisation noise ratio in decibels; inf for equal tensors."""
    error = relative_l2(x, reference)
    return math.inf if error == 0 else -20 * math.log10(error)


def psnr_db(x: Tensor, reference: Tensor, peak: float) -> float:
    """Peak signal to noise ratio in decibels for signals that span `peak`; inf for equal tensors."""
    mean_square = float((x.detach().double() - reference.detach().double()).square().mean())
    return math.inf if mean_square == 0 else 10 * math.log10(peak**2 / mean_square)


def ulp_distance(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Steps between neighbouring numbers of `dtype` from x to y, both rounded to it first; int64, of x's shape.

    inf is one step past the largest number and -0 is 0. Two NaNs are 0 apart; a NaN and a number, UNCOMPARABLE.
    """
    a, b = x.detach().to(dtype), y.detach().to(dtype)
    distance = (_rank(a) - _rank(b)).abs()
    nan_a, nan_b = torch.isnan(a), torch.isnan(b)
    return distance.masked_fill(nan_a ^ nan_b, UNCOMPARABLE).masked_fill(nan_a & nan_b, 0)


def ulp_histogram(x: Tensor, y: Tensor, dtype: torch.dtype) -> dict[int, int]:
    """How many elements lie how many ulps of `dtype` apart: {distance: count}, by rising distance."""
    distances, counts = np.unique(ulp_distance(x, y, dtype).cpu().numpy(), return_counts=True)
    return {int(distance): int(count) for distance, count in zip(distances, counts, strict=True)}


def _norm(x: Tensor) -> float:
    return x.square().sum().sqrt().item()


def _rank(x: Tensor) -> Tensor:
    """Each number's place on the format's own line: consecutive integers for neighbouring numbers, 0 for +-0."""
    pattern = x.contiguous().view(_PATTERN[x.dtype])
    magnitude = (pattern & torch.iinfo(pattern.dtype).max).long()
    return torch.where(pattern < 0, -magnitude, magnitude)
