"""Rounding once: against exact fractions, near every tie, and where torch's own cast rounds twice."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.numerics.narrow import (
    compute_overflow_threshold,
    compute_spacing,
    round_carrying,
    round_once,
    round_randomly,
)

NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
dtypes = pytest.mark.parametrize("dtype", NARROW, ids=lambda d: str(d).removeprefix("torch."))


def finite_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of a format of 8 or 16 bits, in fp64, rising; one zero."""
    bits = 8 * dtype.itemsize
    patterns = torch.arange(2**bits, dtype=torch.int64)
    patterns = torch.where(patterns >= 2 ** (bits - 1), patterns - 2**bits, patterns)
    numbers = patterns.to(torch.int8 if bits == 8 else torch.int16).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def nearest_even(x: float, dtype: torch.dtype) -> float:
    """The slow, obvious twin: the number with the least exact distance, the even one of two."""
    fmt = torch.finfo(dtype)
    if abs(x) > compute_overflow_threshold(dtype) or (
        abs(x) == compute_overflow_threshold(dtype) and dtype != torch.float8_e4m3fn
    ):
        return math.nan if dtype == torch.float8_e4m3fn else math.copysign(math.inf, x)
    step = Fraction(float(compute_spacing(torch.tensor([x], dtype=torch.float64), dtype)))
    count = Fraction(x) / step
    return min(fmt.max, float(round(abs(count)) * step)) * (1 if x >= 0 else -1)  # Python rounds a half to even


def around(numbers: torch.Tensor) -> torch.Tensor:
    """Each number and each midpoint of two, with their nearest fp64 neighbours and some further off."""
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    nudges = torch.tensor([0.0, 2.0**-52, -(2.0**-52), 2.0**-40, -(2.0**-40), 2.0**-25, -(2.0**-25), 2.0**-24])
    return (points[:, None] * (1 + nudges.double())).flatten()


@dtypes
def test_around_every_tie(dtype: torch.dtype):
    numbers = finite_numbers(dtype)
    tested = around(numbers if len(numbers) < 1000 else numbers[:: 97 if dtype == torch.bfloat16 else 31])
    wanted = torch.tensor([nearest_even(float(x), dtype) for x in tested], dtype=torch.float64)
    torch.testing.assert_close(round_once(tested, dtype).double(), wanted, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_every_tie_by_its_neighbours(dtype: torch.dtype):
    numbers = finite_numbers(dtype)
    low, high = numbers[:-1], numbers[1:]
    middle = (low + high) / 2
    for beside, wanted in ((-math.inf, low), (math.inf, high)):
        nudged = torch.nextafter(middle, torch.tensor(beside, dtype=torch.float64))
        assert torch.equal(round_once(nudged, dtype).double(), wanted)
    assert torch.equal(round_once(numbers, dtype).double(), numbers)


def test_torch_rounds_twice_and_this_does_not():
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert x.to(torch.bfloat16).item() == 1.0
    assert round_once(x, torch.bfloat16).item() == 1 + 2.0**-7
    random = torch.randn(300_000, dtype=torch.float64).float().double() * (1 + 2.0**-60)
    ties = (random.bfloat16().double() + compute_spacing(random, torch.bfloat16) / 2) * (1 + 2.0**-45)
    assert (round_once(ties, torch.bfloat16) != ties.bfloat16()).float().mean() > 0.2


@settings(max_examples=200)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(NARROW))
def test_any_number(x: float, dtype: torch.dtype):
    (rounded,) = round_once(torch.tensor([x], dtype=torch.float64), dtype).double().tolist()
    wanted = nearest_even(x, dtype)
    assert rounded == wanted or (math.isnan(rounded) and math.isnan(wanted))


@dtypes
def test_what_is_not_finite_stays_so(dtype: torch.dtype):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e300, -1e300], dtype=torch.float64)
    rounded = round_once(x, dtype).double()
    assert rounded[0].isnan()
    assert not rounded.isfinite().any()
    assert dtype == torch.float8_e4m3fn or rounded[1:].tolist() == [math.inf, -math.inf] * 2


def test_wide_formats_and_signs_of_zero():
    x = torch.randn(50, 3, dtype=torch.float64)
    assert torch.equal(round_once(x, torch.float64), x)
    assert torch.equal(round_once(x, torch.float32), x.float())
    for dtype in NARROW:
        assert round_once(torch.tensor([-0.0, -1e-300]).double(), dtype).double().signbit().all()
    x32 = torch.randn(1000)
    assert torch.equal(round_once(x32, torch.bfloat16), x32.bfloat16())


@dtypes
def test_random_rounding_is_unbiased_and_leaves_what_fits(dtype: torch.dtype):
    numbers = finite_numbers(dtype)
    numbers = numbers[:: max(1, len(numbers) // 2000)]
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(round_randomly(numbers, dtype, generator).double(), numbers)
    low = numbers[len(numbers) // 3]
    step = compute_spacing(low[None], dtype)[0]
    for share in (0.1, 0.5, 0.9):
        x = (low + share * step * low.sign()).expand(40_000).contiguous()
        drawn = round_randomly(x, dtype, generator).double()
        assert len(drawn.unique()) == 2
        assert abs((drawn.mean() - x[0]) / step) < 4 * 0.5 / math.sqrt(40_000)


def test_random_rounding_is_repeatable():
    x = torch.randn(20, 20, dtype=torch.float64)
    first, second, other = (
        round_randomly(x, torch.bfloat16, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_carried_errors_keep_every_partial_sum():
    x = torch.rand(5, 400, dtype=torch.float64) * 0.01 + 1
    rounded = round_carrying(x, torch.bfloat16).double()
    lost = (rounded - x).cumsum(1).abs()
    assert lost.max() <= 2.0**-8 * 1.01
    plain = (round_once(x, torch.bfloat16).double() - x).cumsum(1).abs()
    assert plain.max() > 10 * lost.max()
    row, error = [], 0.0
    for element in x[2].tolist():
        wanted = element + error
        row.append(nearest_even(wanted, torch.bfloat16))
        error = wanted - row[-1]
    assert rounded[2].tolist() == row


def test_carrying_survives_an_overflow():
    x = torch.tensor([[1e6, 1.0, 2.0]], dtype=torch.float64)
    assert round_carrying(x, torch.float16).tolist() == [[math.inf, 1.0, 2.0]]
