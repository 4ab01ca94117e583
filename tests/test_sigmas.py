"""Drawing sigmas: each way against sd-scripts' formula written out slowly, and truncation that keeps the density."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.config.schema import ObjectiveSection
from finitune.errors import UsageError
from finitune.training.objective import (
    NoisePurpose,
    compute_flux_shift,
    compute_loss_weight,
    compute_range_shares,
    compute_sigma_quantile,
    draw_addressed_uniform,
    sample_sigmas,
)

COUNT = 20_000
TOKENS = 1024

WAYS = (
    {"timestep_sampling": "sigmoid", "sigmoid_scale": 1.4},
    {"timestep_sampling": "uniform"},
    {"timestep_sampling": "shift", "discrete_flow_shift": 3.0, "sigmoid_scale": 0.8},
    {"timestep_sampling": "flux_shift"},
    {"timestep_sampling": "sigma", "discrete_flow_shift": 3.0},
    {"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 0.7},
    {"timestep_sampling": "sigma", "weighting_scheme": "mode", "discrete_flow_shift": 2.0},
)
RANGES = ((0.0, 1.0), (0.3, 0.62), (0.0, 0.35), (0.7, 1.0))


def name_of(way: dict[str, object]) -> str:
    return f"{way['timestep_sampling']}-{way.get('weighting_scheme', '')}"


def obvious_sigmas(objective: ObjectiveSection, tokens: int, count: int) -> Tensor:
    """The table of sd-scripts' formulas, drawn with generators as it draws them."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(count, generator=generator)
    uniform = torch.rand(count, generator=generator)
    k, s = objective.discrete_flow_shift, objective.sigmoid_scale
    match objective.timestep_sampling:
        case "sigmoid":
            return torch.sigmoid(s * normal)
        case "uniform":
            return uniform
        case "shift":
            u = torch.sigmoid(s * normal)
            return (u * k) / (1 + (k - 1) * u)
        case "flux_shift":
            slope = (1.15 - 0.5) / (4096 - 256)
            mu = slope * tokens + (0.5 - slope * 256)
            return math.exp(mu) / (math.exp(mu) + (1 / torch.sigmoid(s * normal) - 1) ** 1.0)
    match objective.weighting_scheme:
        case "logit_normal":
            u = torch.sigmoid(objective.logit_mean + objective.logit_std * normal)
        case "mode":
            u = 1 - uniform - objective.mode_scale * (torch.cos(math.pi * uniform / 2) ** 2 - 1 + uniform)
        case _:
            u = uniform
    table = [k * i / 1000 / (1 + (k - 1) * i / 1000) for i in range(1000, 0, -1)]
    return torch.tensor(table)[(u * 1000).long().clamp(max=999)]


def distance(a: Tensor, b: Tensor) -> float:
    """The Kolmogorov-Smirnov distance of two samples: the largest gap between their distribution functions."""
    at = torch.cat([a, b]).unique()
    shares_of = [torch.searchsorted(x.sort().values, at, right=True) / len(x) for x in (a, b)]
    return float((shares_of[0] - shares_of[1]).abs().max())


def critical(a: Tensor, b: Tensor) -> float:
    """The distance that one pair of equal distributions in a thousand exceeds."""
    return 1.95 * math.sqrt((len(a) + len(b)) / (len(a) * len(b)))


def uniform(count: int = COUNT) -> Tensor:
    return draw_addressed_uniform(7, 0, range(count), NoisePurpose.SIGMA)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_draws_are_distributed_as_the_obvious_ones_that_fall_into_the_range(way, low: float, high: float):
    objective = ObjectiveSection(**way, min_sigma=low, max_sigma=high)
    drawn = sample_sigmas(uniform(), objective, TOKENS)
    expected = obvious_sigmas(objective, TOKENS, 10 * COUNT)
    expected = expected[(expected >= low) & (expected <= high)]
    assert len(expected) > 500
    assert distance(drawn, expected) < critical(drawn, expected)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_the_distance_tells_other_distributions_apart(way):
    other = {**way, "discrete_flow_shift": 1.3, "sigmoid_scale": 1.15, "logit_mean": 0.1, "mode_scale": 0.9}
    if way["timestep_sampling"] == "uniform":
        other = {"timestep_sampling": "sigmoid", "sigmoid_scale": 1.4}
    drawn = sample_sigmas(uniform(), ObjectiveSection(**other), TOKENS)
    expected = obvious_sigmas(ObjectiveSection(**way), TOKENS, 10 * COUNT)
    assert distance(drawn, expected) > critical(drawn, expected)


def test_the_table_is_that_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    objective = ObjectiveSection(timestep_sampling="sigma", discrete_flow_shift=3.0)
    centres = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    table = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas[:1000]
    torch.testing.assert_close(sample_sigmas(centres, objective, 0).flip(0), table, rtol=3e-7, atol=0)


def test_a_positive_logit_mean_asks_for_small_sigmas_in_the_table():
    objective = ObjectiveSection(timestep_sampling="sigma", weighting_scheme="logit_normal", logit_mean=1.0)
    assert sample_sigmas(uniform(), objective, TOKENS).mean() < 0.35


@given(
    way=st.sampled_from(WAYS),
    low=st.floats(0, 0.98),
    width=st.floats(0.05, 1),
    u=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    tokens=st.integers(1, 20_000),
)
@settings(max_examples=60)
def test_draws_stay_in_the_range_and_rise_with_u(way, low: float, width: float, u: list[float], tokens: int):
    objective = ObjectiveSection(**way, min_sigma=low, max_sigma=min(1.0, low + width))
    try:
        sigma = sample_sigmas(torch.tensor(sorted(u), dtype=torch.float64), objective, tokens)
    except UsageError as error:  # a range in which next to nothing is ever drawn
        assert error.code == "SIGMA-RANGE-EMPTY" and objective.max_sigma - low < 0.2
        return
    assert sigma.dtype is torch.float32
    assert (sigma.diff() >= 0).all()
    assert (sigma >= torch.tensor(objective.min_sigma)).all()
    assert (sigma <= torch.tensor(objective.max_sigma)).all()


@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_a_range_is_used_from_end_to_end_and_nothing_piles_up(way, low: float, high: float):
    objective = ObjectiveSection(**way, min_sigma=low, max_sigma=high)
    sigma = sample_sigmas(uniform(), objective, TOKENS)
    spread = high - low
    if low > 0 or high < 1:  # the tails of the whole range are thin
        assert sigma.min() < low + 0.2 * spread
        assert sigma.max() > high - 0.2 * spread
    _, counts = sigma.unique(return_counts=True)
    discrete = objective.timestep_sampling == "sigma"
    assert counts.max() < COUNT * (0.06 if discrete else 0.001)


@pytest.mark.parametrize("way", WAYS[:4], ids=name_of)
def test_the_shares_are_those_of_the_closed_distribution_function(way):
    objective = ObjectiveSection(**way, min_sigma=0.2, max_sigma=0.7)
    k = {"shift": objective.discrete_flow_shift, "flux_shift": compute_flux_shift(TOKENS)}.get(
        objective.timestep_sampling, 1.0
    )

    def share(sigma: float) -> float:
        if objective.timestep_sampling == "uniform":
            return sigma
        logit = math.log(sigma / (1 - sigma)) - math.log(k)
        return 0.5 * (1 + math.erf(logit / objective.sigmoid_scale / math.sqrt(2)))

    assert compute_range_shares(objective, TOKENS) == pytest.approx((share(0.2), share(0.7)), rel=1e-12)


def test_without_a_range_a_draw_is_the_plain_quantile():
    objective = ObjectiveSection(timestep_sampling="uniform")
    u = uniform(50)
    assert torch.equal(sample_sigmas(u, objective, TOKENS), u.float())
    assert compute_range_shares(objective, TOKENS) == (0.0, 1.0)


def test_strata_of_u_are_strata_of_the_distribution():
    objective = ObjectiveSection(sigmoid_scale=1.2, min_sigma=0.1)
    u = (torch.arange(8, dtype=torch.float64) + uniform(8)) / 8
    edges = sample_sigmas(torch.arange(9, dtype=torch.float64) / 8, objective, TOKENS)
    sigma = sample_sigmas(u, objective, TOKENS)
    assert ((edges[:-1] <= sigma) & (sigma <= edges[1:])).all()


def test_flux_shift_goes_through_its_two_points():
    assert math.log(compute_flux_shift(256)) == pytest.approx(0.5)
    assert math.log(compute_flux_shift(4096)) == pytest.approx(1.15)


@pytest.mark.parametrize(
    "options",
    [
        {"min_sigma": 0.7, "max_sigma": 0.3},
        {"min_sigma": 0.5, "max_sigma": 0.5},
        {"min_sigma": 0.0001, "max_sigma": 0.0005, "timestep_sampling": "sigma"},
        {"max_sigma": 1e-6},
        {"min_sigma": 0.9999999},
    ],
)
def test_a_range_without_sigmas_is_refused(options):
    with pytest.raises(UsageError) as caught:
        sample_sigmas(uniform(2), ObjectiveSection(**options), TOKENS)
    assert caught.value.code == "SIGMA-RANGE-EMPTY"
    assert caught.value.remedy


@pytest.mark.parametrize("scale", [-1.01, 1.76])
def test_a_mode_that_folds_back_is_refused(scale: float):
    with pytest.raises(ValueError, match="mode_scale"):
        ObjectiveSection(timestep_sampling="sigma", weighting_scheme="mode", mode_scale=scale)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.29, 1.75])
def test_a_mode_within_its_bounds_covers_the_table(scale: float):
    objective = ObjectiveSection(timestep_sampling="sigma", weighting_scheme="mode", mode_scale=scale)
    sigma = compute_sigma_quantile(torch.linspace(0, 1, 50_001, dtype=torch.float64), objective, TOKENS)
    assert (sigma.diff() >= 0).all()
    assert sigma.unique().numel() > 990


# --- what each counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["uniform", "none", "sigma_sqrt", "logit_normal", "mode", "cosmap"])
def test_weights_are_those_of_diffusers_and_finite_everywhere(scheme: str):
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    sigma = torch.linspace(0, 1, 1001)
    weight = compute_loss_weight(sigma, scheme)
    assert weight.dtype is torch.float32
    assert weight.isfinite().all()
    torch.testing.assert_close(weight[1:], compute_loss_weighting_for_sd3(scheme, sigma[1:]), rtol=1e-6, atol=0)


def test_the_weight_of_sigma_sqrt_ends_at_the_least_entry_of_the_table():
    assert compute_loss_weight(torch.tensor([0.0, 1e-5, 1e-3]), "sigma_sqrt").tolist() == pytest.approx([1e6] * 3)
