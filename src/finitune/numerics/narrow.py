"""fp64 made narrower by exactly one rounding, in three ways: to nearest, at random without bias, and with the errors
carried along.

torch casts fp64 to a half format by way of fp32, and that rounds twice: 1 + 2**-8 + 2**-40 becomes the tie 1 + 2**-8 in
fp32 and then 1.0 in bf16, where 1 + 2**-7 is nearer. Only a number whose fp32 form lies on a tie of the narrow format,
or beside one, can go wrong in this way. So everything is cast, the few ties are found by their bits, and these are cast
again from their fp64 form by way of fp32 rounded to odd, which never makes a tie of what was none.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.intp]

_LOWER_HALF_INDEX = 0 if sys.byteorder == "little" else 1
_MAX_INDICES_SEARCHED = 256
"""Up to so many ties are looked for one by one."""

WIDE_DTYPES = (torch.float64, torch.float32)
_RANGE_EXPONENT_BY_DTYPE = {torch.float8_e4m3fn: 9}
"""2**e that no number reaches; where it is not stated, the format has infinities and torch's rounding reaches them."""


class RoundingScratch:
    """Reusable memory for rounding up to `size` elements at a time, so that a loop allocates nothing."""

    def __init__(self, size: int):
        self.single = torch.empty(size)
        self.bits = torch.empty(size, dtype=torch.int32)
        self.found = torch.empty(2 * size, dtype=torch.bool)
        self.other = torch.empty(size, dtype=torch.int16)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 (or fp32) `x` rounded to nearest-even in `dtype`, any float format down to 8 bits, by one rounding.

    Beyond the range: inf, or NaN in float8_e4m3fn, which has no inf.
    """
    narrow = torch.empty(x.shape, dtype=dtype)
    round_once_into(x.contiguous().view(-1), narrow.view(-1), RoundingScratch(x.numel()))
    return narrow


def round_once_into(x: Tensor, narrow: Tensor, scratch: RoundingScratch) -> Tensor:
    """`round_once` of flat `x` into flat `narrow` without allocating; returns x in fp32, in the scratch memory."""
    single = scratch.single[: x.numel()].copy_(x)
    cast_into(single, narrow)
    if x.dtype == torch.float64 and narrow.dtype not in WIDE_DTYPES:
        ties = find_near_ties(single, narrow.dtype, scratch)
        if len(ties):
            memory: Any = narrow.view(get_storage_dtype(narrow.dtype)).numpy()
            memory[ties] = round_by_odd(x, single, narrow.dtype, ties).numpy()
    elif narrow.dtype == torch.float64:
        narrow.copy_(x)
    return single


def cast_into(single: Tensor, narrow: Tensor) -> Tensor:
    """fp32 rounded to nearest-even into `narrow`; torch saturates float8_e4m3fn, or not, as its version has it."""
    narrow.copy_(single)
    if narrow.dtype in _RANGE_EXPONENT_BY_DTYPE:
        fmt = torch.finfo(narrow.dtype)
        over = (single.abs() > fmt.max + compute_overflow_margin(narrow.dtype)) | single.isnan()
        if bool(over.any()):
            narrow.copy_(torch.where(over, math.nan, single))
    return narrow


def compute_overflow_margin(dtype: torch.dtype) -> float:
    """Half of the spacing at the largest number: what is further out than that rounds beyond the range."""
    fmt = torch.finfo(dtype)
    return math.ldexp(fmt.eps, math.frexp(fmt.max)[1] - 2)


def compute_overflow_threshold(dtype: torch.dtype) -> float:
    """The least magnitude that rounds to inf (in float8_e4m3fn, where its even neighbour is 448: the greatest that
    does not)."""
    return torch.finfo(dtype).max + compute_overflow_margin(dtype)


def find_near_ties(single: Tensor, dtype: torch.dtype, scratch: RoundingScratch) -> Indices:
    """The indices of all fp32 numbers that lie on a tie of `dtype`, and of some others.

    A number is on a tie, or beside it, where the two fp32 numbers around it round differently. For bf16 it is simpler:
    the lower half of the number is a one and then zeros.
    """
    size = single.numel()
    if dtype == torch.bfloat16:
        memory: Any = single.numpy()
        halves = memory.view(np.uint16)
        found = scratch.found[: 2 * size].numpy()
        np.equal(halves, 0x8000, out=found)
        places = find_true_indices(found)
        return places[places % 2 == _LOWER_HALF_INDEX] // 2
    pattern, bits = single.view(torch.int32), scratch.bits[:size]
    rounded = scratch.other[:size].view(get_storage_dtype(dtype))[:size]
    torch.sub(pattern, 1, out=bits)
    below: Any = rounded.view(dtype).copy_(bits.view(torch.float32)).view(rounded.dtype).clone().numpy()
    torch.add(pattern, 1, out=bits)
    rounded.view(dtype).copy_(bits.view(torch.float32))
    found = scratch.found[:size].numpy()
    np.not_equal(below, rounded.numpy(), out=found)
    return find_true_indices(found)


def find_true_indices(found: Any) -> Indices:
    """The indices of what is true: few are found by a search for bytes, which is faster than an index of them all."""
    content: bytes = found.tobytes()
    places: list[int] = []
    place = content.find(1)
    while place >= 0:
        places.append(place)
        if len(places) > _MAX_INDICES_SEARCHED:
            return np.flatnonzero(found)
        place = content.find(1, place + 1)
    return np.array(places, dtype=np.intp)


def round_by_odd(x: Tensor, single: Tensor, dtype: torch.dtype, places: Indices) -> Tensor:
    """The bit patterns in `dtype` of a few numbers of fp64 `x`, from `single`, their fp32 forms, by rounding to odd.

    Cut towards zero, with the last bit set where anything was cut, a number is on a tie only where it was on it before.
    Source: Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums", theorem on double rounding.
    """
    wide: Any = x.numpy()[places]
    near: Any = single.numpy()[places]
    cut = near.view(np.int32) - (np.abs(wide) < np.abs(near))
    odd = (cut | (cut.view(np.float32) != wide)).astype(np.int32)
    moved = torch.as_tensor(odd).view(torch.float32)
    return cast_into(moved, torch.empty(moved.shape, dtype=dtype)).view(get_storage_dtype(dtype))


def get_storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype of the same size, through which 8-bit formats can be indexed."""
    return torch.int8 if dtype.itemsize == 1 else torch.int16


def compute_spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of the two numbers of `dtype` around each fp64 `x`, in fp64: the subnormals' below the normals."""
    fmt = torch.finfo(dtype)
    significand_bits = 1 - round(math.log2(fmt.eps))
    lowest = round(math.log2(fmt.tiny))
    exponent = torch.frexp(x)[1] - 1
    exponent = torch.where(x == 0, lowest, exponent).clamp(min=lowest)
    return torch.ldexp(torch.ones_like(x), exponent + 1 - significand_bits)


def round_randomly(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """fp64 `x` to one of its two neighbours in `dtype`, each with the probability that makes the mean `x`.

    What `dtype` holds stays as it is. Beyond the largest number there is no upper neighbour: as in `round_once`.
    """
    step = compute_spacing(x, dtype)
    noise = torch.rand(x.shape, dtype=torch.float64, generator=generator)
    drawn = torch.floor(x / step + noise) * step
    return round_once(torch.where(torch.isfinite(x), drawn, x), dtype)


def round_carrying(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 `x` (rows, columns) to nearest, each element with the rounding error of the one before it in its row added.

    So the sum of a row's beginning is never further off than half of a spacing. Same input, same output.
    """
    columns = x.T.contiguous()
    narrow = torch.empty(columns.shape, dtype=dtype)
    error = torch.zeros(columns.shape[1], dtype=torch.float64)
    for column, rounded in zip(columns, narrow, strict=True):
        wanted = column + error
        rounded.copy_(round_once(wanted, dtype))
        error = wanted - rounded.double()
        error = torch.where(torch.isfinite(error), error, 0.0)
    return narrow.T.contiguous()
