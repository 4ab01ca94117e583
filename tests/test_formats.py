"""Formats, exponents, rounding and ranges: each against the definition, computed the slow way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finitune.errors import NumericsError
from finitune.numerics.formats import BF16, FP16, FP32, FloatFormat, exponent_for, find_float_format, headroom_bits
from finitune.numerics.rounding import round_significand, round_to, round_to_
from finitune.numerics.stats import amax, amax_into, audit_weight, range_stats

FORMATS = [FP16, BF16, FP32]
magnitudes = st.floats(min_value=0, max_value=2.0**120, allow_nan=False)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_format_states_what_torch_does(fmt: FloatFormat) -> None:
    edge = torch.tensor([fmt.max, fmt.least, fmt.least / 2, fmt.overflow_at], dtype=torch.float64).to(fmt.dtype)
    assert edge[0] == fmt.max and edge[1] == fmt.least and edge[2] == 0 and edge[3].isinf()
    if fmt is not FP32:  # torch narrows fp64 by way of fp32, so the last number below the edge is an fp32 one
        edge_in_single = torch.tensor(fmt.overflow_at)
        assert edge_in_single.to(fmt.dtype).isinf()
        assert torch.nextafter(edge_in_single, torch.tensor(0.0)).to(fmt.dtype) == fmt.max
    assert torch.nextafter(torch.tensor(1.0, dtype=fmt.dtype), edge[0]) - 1 == 2.0 ** (1 - fmt.significand_bits)
    assert fmt.tiny == torch.finfo(fmt.dtype).tiny
    assert find_float_format(fmt.dtype) is fmt


def test_fp16_in_numbers() -> None:
    assert (FP16.max, FP16.overflow_at, FP16.tiny, FP16.least) == (65504, 65520, 2.0**-14, 2.0**-24)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(NumericsError, match="int8") as refused:
        find_float_format(torch.int8)
    assert refused.value.code == "DTYPE-UNKNOWN"


@given(magnitudes, st.floats(min_value=0, max_value=8))
def test_the_exponent_is_the_smallest_that_keeps_the_headroom(magnitude: float, headroom: float) -> None:
    k = exponent_for(magnitude, headroom)
    limit = FP16.max * 2.0**-headroom
    assert k >= 0 and magnitude * 2.0**-k <= limit
    assert k == 0 or magnitude * 2.0 ** -(k - 1) > limit


@given(st.floats(min_value=0, max_value=3e38))
def test_a_planned_exponent_never_overflows(magnitude: float) -> None:
    x = torch.tensor([magnitude, -magnitude], dtype=torch.float32)
    scaled = x * 2.0 ** -exponent_for(float(x[0]), 0)
    assert torch.isfinite(scaled.half()).all()


def test_headroom_counts_doublings() -> None:
    assert headroom_bits(FP16.max / 4) == 2
    assert headroom_bits(FP16.max * 8) == -3
    assert headroom_bits(0) == math.inf
    assert exponent_for(0) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan, -1.0])
def test_a_range_that_is_no_magnitude_is_refused(bad: float) -> None:
    for ask in (headroom_bits, exponent_for):
        with pytest.raises(NumericsError) as refused:
            ask(bad)
        assert refused.value.code == "RANGE-NOT-FINITE"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_in_place_equals_rounding_out_of_place(dtype: torch.dtype) -> None:
    x = torch.randn(1000) * torch.logspace(-9, 6, 1000)
    expected = round_to(x, dtype)
    scratch = torch.empty(1000, dtype=dtype)
    assert torch.equal(round_to_(x.clone(), dtype), expected)
    assert torch.equal(round_to_(x.clone(), dtype, scratch), expected)
    assert expected.dtype == torch.float32 and torch.equal(round_to(expected, dtype), expected)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(2, 24))
def test_significand_rounding_equals_its_definition(value: float, bits: int) -> None:
    m, e = math.frexp(value)
    assume(abs(value) >= FP32.tiny or value == 0)  # below, the definition would have to count fewer bits
    expected = torch.tensor(math.ldexp(round(math.ldexp(m, bits)), e - bits), dtype=torch.float64).float()
    assert torch.equal(round_significand(torch.tensor(value), bits), expected)


def test_significand_rounding_equals_veltkamp_and_passes_what_is_not_finite() -> None:
    x = torch.randn(10_000) * torch.logspace(-20, 20, 10_000)
    product = x * (2.0**13 + 1)
    assert torch.equal(round_significand(x), product - (product - x))
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(round_significand(odd).nan_to_num(7.0), odd.nan_to_num(7.0))


def test_within_fp16_normals_significand_rounding_is_fp16() -> None:
    x = torch.empty(10_000).uniform_(2.0**-14, 60000)
    assert torch.equal(round_significand(x, 11), round_to(x, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_amax_equals_its_definition(dtype: torch.dtype) -> None:
    x = torch.randn(7, 13).to(dtype)
    assert amax(x) == x.abs().max() and amax(x).dtype == torch.float32 and amax(x).shape == ()
    assert amax(x[:0]) == 0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_slot_keeps_the_largest_and_never_loses_a_fault(shape: tuple[int, ...]) -> None:
    buffer = torch.zeros(3, *shape)
    slot = buffer[1]
    for step, expected in [([-3.0, 2.0], 3.0), ([1.0], 3.0), ([], 3.0), ([-math.inf], math.inf), ([5.0], math.inf)]:
        amax_into(slot, torch.tensor(step))
        assert slot.item() == expected
    amax_into(slot, torch.tensor([math.nan]))
    amax_into(slot, torch.tensor([1.0]))
    assert slot.isnan().all() and buffer[0].item() == buffer[2].item() == 0


def test_range_stats_of_a_known_tensor() -> None:
    stats = range_stats(torch.tensor([0.0, 1e-6, -2.0, 65520.0, 1e9, math.inf, math.nan, 3e-5]))
    assert stats.amax == 1e9 and stats.least_nonzero == pytest.approx(1e-6)
    assert (stats.nonfinite, stats.subnormal_share, stats.over_share, stats.numel) == (2, 0.25, 0.25, 8)
    empty = range_stats(torch.zeros(0))
    assert (empty.amax, empty.numel, empty.over_share) == (0, 0, 0)


@settings(max_examples=10)
@given(st.integers(-30, 20))
def test_a_weight_audit_counts_what_fp16_changes(binade: int) -> None:
    w = (torch.randn(5000) * 2.0**binade).bfloat16()
    audit = audit_weight(w)
    exact, half = w.double(), w.half().double()
    assert audit["overflow"] == int((half.isinf()).sum())
    assert audit["flushed"] == int(((half == 0) & (exact != 0)).sum())
    changed = int((half != exact).sum())
    assert audit["overflow"] + audit["flushed"] + audit["inexact"] == changed


def test_a_weight_audit_of_known_elements() -> None:
    audit = audit_weight(torch.tensor([1.0, 1e6, 1e-9, 1.0 + 2.0**-20, math.nan]))
    assert {k: v for k, v in audit.items() if k != "relative_rms"} == {
        "numel": 5,
        "nonfinite": 1,
        "overflow": 1,
        "flushed": 1,
        "inexact": 1,
    }
    assert audit["relative_rms"] == pytest.approx(2.0**-20 / math.sqrt(2), rel=1e-2)
