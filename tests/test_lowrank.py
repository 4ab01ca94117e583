"""Cutting a product of factors is as good as it can be, and says what it cost. The slow twin is the dense SVD."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.adapters.lowrank import (
    FACTOR_ROUNDING_ERROR,
    balance_factors,
    compute_randomised_svd,
    decompose_delta,
    truncate_factors,
)
from finitune.errors import NumericsError

FP32 = 2.0**-22  # the rounding of both factors to fp32, with room for their product

sizes = st.integers(1, 24)
seeds = st.integers(0, 2**16)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimum(matrix: Tensor, rank: int) -> float:
    """The relative error of the best approximation of `rank`, by Eckart and Young."""
    values = torch.linalg.svdvals(matrix.double())
    return float(values[rank:].norm() / values.norm())


def error_of(up: Tensor, down: Tensor, matrix: Tensor) -> float:
    return float((up.double() @ down.double() - matrix.double()).norm() / matrix.double().norm())


@settings(max_examples=40)
@given(out=sizes, rank=sizes, into=sizes, kept=sizes, seed=seeds)
def test_a_cut_is_the_best_of_its_rank(out: int, rank: int, into: int, kept: int, seed: int):
    up, down = noise(out, rank, seed=seed), noise(rank, into, seed=seed + 1)
    product = up.double() @ down.double()
    small_up, small_down, books = truncate_factors(up, down, rank=kept)
    assert small_up.shape == (out, books.rank) and small_down.shape == (books.rank, into)
    assert books.rank == min(kept, out, rank, into)
    assert books.error == pytest.approx(optimum(product, books.rank), abs=1e-12)
    assert error_of(small_up, small_down, product) == pytest.approx(books.error, abs=FP32)
    assert books.energy == pytest.approx(1 - books.error**2, abs=1e-12)
    assert books.norm == pytest.approx(float(product.norm()), rel=1e-12)


@settings(max_examples=25)
@given(energy=st.floats(0.01, 1.0), seed=seeds)
def test_an_energy_takes_the_least_rank_that_keeps_it(energy: float, seed: int):
    up, down = noise(20, 12, seed=seed), noise(12, 16, seed=seed + 1)
    _, _, books = truncate_factors(up, down, energy=energy)
    assert books.energy >= energy - FACTOR_ROUNDING_ERROR
    if books.rank > 1:
        assert 1 - optimum(up @ down, books.rank - 1) ** 2 < energy


def test_of_rank_and_energy_the_smaller_rank_wins():
    up, down = noise(20, 12), noise(12, 16, seed=1)
    assert truncate_factors(up, down, rank=2, energy=0.999)[2].rank == 2
    assert truncate_factors(up, down, rank=12, energy=0.3)[2].rank < 4


def test_without_a_wish_only_what_is_redundant_goes():
    up, down = noise(20, 4), noise(4, 16, seed=1)
    doubled = torch.cat([up, up], dim=1), torch.cat([down, -0.25 * down])
    small_up, small_down, books = truncate_factors(*doubled)
    assert books.rank == 4
    assert error_of(small_up, small_down, 0.75 * up.double() @ down.double()) < FP32


def test_nothing_is_clamped():
    up, down = noise(64, 8), noise(8, 64, seed=1)
    up[3, 2] = 1000.0  # an outlier, which a quantile would cut off
    small_up, small_down, _ = truncate_factors(up, down, rank=8)
    assert error_of(small_up, small_down, up.double() @ down.double()) < FP32


def test_a_product_of_zeros_stays_one():
    up, down, books = truncate_factors(torch.zeros(6, 4), noise(4, 5), energy=0.9)
    assert (books.rank, books.error, books.energy, books.norm) == (1, 0.0, 1.0, 0.0)
    assert not up.any() and not down.any()
    up, down, books = decompose_delta(torch.zeros(6, 5), rank=2)
    assert books.rank == 2 and not (up @ down).any()


def test_the_halves_weigh_the_same():
    up, down, _ = truncate_factors(1e-4 * noise(30, 6), 1e4 * noise(6, 40, seed=1), rank=3)
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1), rtol=1e-5, atol=0)


@settings(max_examples=30)
@given(left=st.integers(-18, 18), right=st.integers(-18, 18), seed=seeds)
def test_balancing_leaves_the_product_bit_for_bit(left: int, right: int, seed: int):
    up, down = noise(6, 3, seed=seed) * 2.0**left, noise(3, 5, seed=seed + 1) * 2.0**right
    down[2] = 0
    new_up, new_down = balance_factors(up, down)
    torch.testing.assert_close(new_up[:, :, None] * new_down[None], up[:, :, None] * down[None], rtol=0, atol=0)
    ratio = new_up[:, :2].norm(dim=0) / new_down[:2].norm(dim=1)
    assert ((ratio > 0.49) & (ratio < 2.01)).all()


def test_balancing_saves_small_factors_from_fp16():
    up, down = 1e-8 * noise(32, 4), noise(4, 32, seed=1)
    product = up.double() @ down.double()
    assert error_of(up.half(), down.half(), product) > 0.5
    assert error_of(*(factor.half() for factor in balance_factors(up, down)), product) < 1e-3


def test_a_small_change_is_decomposed_exactly():
    delta = noise(40, 30)
    up, down, books = decompose_delta(delta, rank=7)
    assert books.error == pytest.approx(optimum(delta, 7), abs=1e-12)
    assert error_of(up, down, delta) == pytest.approx(books.error, abs=FP32)
    assert decompose_delta(delta)[2].rank == 30


@pytest.mark.parametrize("spectrum", ["falling", "flat"])
def test_the_randomised_decomposition_is_nearly_as_good_and_honest(spectrum: str):
    delta = noise(512, 600)
    if spectrum == "falling":
        delta = 0.05 * delta + noise(512, 40, seed=1) @ noise(40, 600, seed=2)
    up, down, books = decompose_delta(delta, rank=24, exact=False)
    best = optimum(delta, 24)
    assert best - 1e-9 <= books.error <= 1.01 * best
    assert error_of(up, down, delta) == pytest.approx(books.error, abs=1e-6)
    assert books.norm == pytest.approx(float(delta.double().norm()), rel=1e-9)


def test_the_randomised_decomposition_searches_for_an_energy():
    delta = 0.01 * noise(600, 512) + noise(600, 50, seed=1) @ noise(50, 512, seed=2)
    exact, random = (decompose_delta(delta, energy=0.98, exact=exact)[2] for exact in (True, False))
    assert 32 < random.rank <= exact.rank + 1
    assert random.energy >= 0.98


def test_where_a_sketch_does_not_pay_the_whole_is_decomposed():
    delta = noise(60, 50)
    books = decompose_delta(delta, energy=0.999, exact=False)[2]
    assert len(books.values) == 50
    assert books.rank == decompose_delta(delta, energy=0.999, exact=True)[2].rank


def test_the_sketch_is_the_same_every_time():
    delta = noise(300, 200)
    torch.randn(5)
    first, second = compute_randomised_svd(delta, 20), compute_randomised_svd(delta, 20)
    assert torch.equal(first.values, second.values) and torch.equal(first.u, second.u)


def test_a_low_rank_change_is_found_whole():
    up, down = noise(512, 6), noise(6, 480, seed=1)
    delta = up @ down
    small_up, small_down, books = decompose_delta(delta, rank=6)
    assert books.error < 1e-6
    assert error_of(small_up, small_down, delta) < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused(bad: float):
    up = noise(6, 2)
    up[0, 0] = bad
    with pytest.raises(NumericsError) as caught:
        truncate_factors(up, noise(2, 6))
    assert caught.value.code == "FACTORS-NOT-FINITE"
    with pytest.raises(NumericsError):
        decompose_delta(up)
