"""Distances between tensors, against hand-made cases and the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.numerics.compare import UNCOMPARABLE, psnr_db, relative_l2, sqnr_db, ulp_distance, ulp_histogram

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def test_relative_l2_of_known_vectors() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_l2(reference + torch.tensor([0.3, 0.4]), reference) == pytest.approx(0.1)
    assert relative_l2(reference, reference) == 0
    assert relative_l2(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_l2(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_l2(torch.tensor([math.nan]), torch.zeros(1)))
    assert relative_l2(torch.tensor([1e38, 1e38]), torch.tensor([2e38, 2e38])) == pytest.approx(0.5)


def test_decibels() -> None:
    reference = torch.ones(100)
    assert sqnr_db(reference * 1.01, reference) == pytest.approx(40, abs=1e-3)
    assert sqnr_db(reference, reference) == psnr_db(reference, reference, 1.0) == math.inf
    assert psnr_db(reference + 0.1, reference, 1.0) == pytest.approx(20, abs=1e-4)
    assert psnr_db(reference + 0.1, reference, 2.0) == pytest.approx(20 + 20 * math.log10(2), abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30)
@given(st.floats(min_value=-60000, max_value=60000), st.integers(0, 40))
def test_ulps_count_the_steps_of_nextafter(dtype: torch.dtype, start: float, steps: int) -> None:
    x = torch.tensor([start]).to(dtype)
    y, up = x.clone(), torch.full_like(x, math.inf)
    for _ in range(steps):
        y = torch.nextafter(y, up)
    assert ulp_distance(x, y, dtype).tolist() == [steps] == ulp_distance(y, x, dtype).tolist()


def test_ulps_at_the_corners() -> None:
    x = torch.tensor([0.0, 65504.0, -(2.0**-24), math.nan, math.nan, 1.0])
    y = torch.tensor([-0.0, math.inf, 2.0**-24, math.nan, 0.0, 1.0 + 2.0**-13])
    assert ulp_distance(x, y, torch.float16).tolist() == [0, 1, 2, 0, UNCOMPARABLE, 0]
    assert ulp_histogram(x, y, torch.float16) == {0: 3, 1: 1, 2: 1, UNCOMPARABLE: 1}
    assert list(ulp_histogram(x, y, torch.float16)) == [0, 1, 2, UNCOMPARABLE]


def test_ulp_distance_keeps_the_shape_whatever_the_layout() -> None:
    x = torch.randn(3, 5).t()
    distance = ulp_distance(x, x + 1e-3, torch.bfloat16)
    assert distance.shape == (5, 3) and distance.dtype == torch.int64
