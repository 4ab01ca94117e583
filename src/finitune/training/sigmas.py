"""Which noise levels are drawn, and what each counts.

Each way of drawing is written as its quantile function: sigma = Q(p) for a uniform p, rising in p. So a draw is a pure
function of one uniform number (draws can be stratified), and a range is exact truncation: p is drawn between the share
of the distribution below `min_sigma` and the share up to `max_sigma`. Inside of the range the density keeps its shape;
nothing piles up at the ends, and nothing is drawn again.

The formulas are those of sd-scripts (library/flux_train_utils.py), of which three things differ: sigma is fp32 all the
way (there it goes through the dtype of the weights: 745 distinct values in bf16), the range has an effect, and the
weight sigma^-2 is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from finitune.config.schema import ObjectiveSection
from finitune.errors import UsageError

_SIGMA_TABLE_ENTRIES = 1000
"""Entries of the table that `sigma` draws from: 1/1000 to 1, shifted."""

_MIN_WEIGHTED_SIGMA = 1e-3
"""Below it the weight 1 / sigma^2 does not grow any more: the least entry of the table, where it is 10^6."""

_MIN_SIGMA_RANGE_SHARE = 1e-9
"""A range that holds less of the distribution is refused: fp64 could not tell the draws in it apart."""


def sample_sigmas(u: Tensor, objective: ObjectiveSection, tokens: int) -> Tensor:
    """Noise levels, fp32 (B,) in [min_sigma, max_sigma], for uniform numbers u (B,) in [0, 1]; rising in u.

    `tokens` is the number of patches of a sample, which `flux_shift` asks for. Raises UsageError (SIGMA-RANGE-EMPTY).
    """
    below, up_to = compute_range_shares(objective, tokens)  # pyright: ignore[reportArgumentType]  # frozen, so it can be hashed
    sigma = compute_sigma_quantile(below + u.double() * (up_to - below), objective, tokens)
    return sigma.float().clamp(objective.min_sigma, objective.max_sigma)


def compute_sigma_quantile(p: Tensor, objective: ObjectiveSection, tokens: int) -> Tensor:
    """The sigma below which a share p, fp64 in [0, 1], of the untruncated draws lies; fp64 of p's shape."""
    scale = objective.sigmoid_scale
    match objective.timestep_sampling:
        case "uniform":
            return p
        case "sigmoid":
            return compute_logit_normal_quantile(p, 0.0, scale)
        case "shift":
            return shift_sigma(compute_logit_normal_quantile(p, 0.0, scale), objective.discrete_flow_shift)
        case "flux_shift":
            return shift_sigma(compute_logit_normal_quantile(p, 0.0, scale), compute_flux_shift(tokens))
        case "sigma":
            return shift_sigma(
                1 - compute_sigma_table_index(p, objective) / _SIGMA_TABLE_ENTRIES, objective.discrete_flow_shift
            )


def compute_logit_normal_quantile(p: Tensor, mean: float, std: float) -> Tensor:
    """The quantile at p of sigmoid(mean + std * N(0, 1))."""
    return torch.sigmoid(mean + std * torch.special.ndtri(p))


def shift_sigma(u: Tensor, k: float) -> Tensor:
    """k u / (1 + (k - 1) u): the odds u : (1 - u) times k."""
    return k * u / (1 + (k - 1) * u)


def compute_flux_shift(tokens: int) -> float:
    """exp(mu), where mu goes straight from 0.5 at 256 tokens to 1.15 at 4096 (Flux; e^mu / (e^mu + 1/u - 1))."""
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))


def compute_sigma_table_index(p: Tensor, objective: ObjectiveSection) -> Tensor:
    """The place in the table, 0 (sigma 1) to 999, falling in p.

    sd-scripts draws u by the density and takes entry floor(1000 u) of a table that *falls*: a positive logit_mean asks
    for small sigmas.
    """
    match objective.weighting_scheme:
        case "logit_normal":
            u = compute_logit_normal_quantile(1 - p, objective.logit_mean, objective.logit_std)
        case "mode":
            u = 1 - p - objective.mode_scale * (torch.cos(math.pi * p / 2).square() - 1 + p)
        case _:
            u = 1 - p
    return (_SIGMA_TABLE_ENTRIES * u).floor().clamp(0, _SIGMA_TABLE_ENTRIES - 1)


@cache
def compute_range_shares(objective: ObjectiveSection, tokens: int) -> tuple[float, float]:
    """The share of the untruncated draws below min_sigma, and the share up to max_sigma.

    Raises UsageError (SIGMA-RANGE-EMPTY) where next to nothing lies between.
    """
    below, up_to = 0.0, 1.0
    if objective.min_sigma > 0:
        _, below = find_crossing(lambda p: compute_sigma_quantile(p, objective, tokens) >= objective.min_sigma)
    if objective.max_sigma < 1:
        up_to, _ = find_crossing(lambda p: compute_sigma_quantile(p, objective, tokens) > objective.max_sigma)
    if up_to - below < _MIN_SIGMA_RANGE_SHARE:
        raise UsageError(
            f"next to no sigma between {objective.min_sigma:g} and {objective.max_sigma:g} is ever drawn by "
            f"{objective.timestep_sampling}.",
            code="SIGMA-RANGE-EMPTY",
            subject="objective.min_sigma",
            evidence={"min_sigma": objective.min_sigma, "max_sigma": objective.max_sigma, "share": up_to - below},
            remedy="Widen the range, or take timestep_sampling = 'uniform', which draws evenly in any range.",
        )
    return below, up_to


def find_crossing(reached: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Neighbours in [0, 1] between which a rising condition becomes true; (0, 0) or (1, 1) where it does not change."""

    def holds(p: float) -> bool:
        return bool(reached(torch.tensor(p, dtype=torch.float64)))

    if holds(0.0):
        return 0.0, 0.0
    if not holds(1.0):
        return 1.0, 1.0
    before, behind = 0.0, 1.0
    for _ in range(128):  # as fine as fp64 near 1, and down to 1e-38 near 0
        middle = (before + behind) / 2
        before, behind = (before, middle) if holds(middle) else (middle, behind)
    return before, behind


def compute_loss_weight(sigma: Tensor, scheme: str) -> Tensor:
    """What the loss at `sigma`, fp32 (B,), is multiplied by: fp32 (B,), finite for every sigma in [0, 1].

    `sigma_sqrt` is 1 / sigma^2 with sigma at least LEAST_SIGMA; `cosmap` is 2 / (pi (1 - 2 sigma + 2 sigma^2)), which
    lies between 0.64 and 1.27 by itself; all other schemes weigh everything alike (SD3, as in diffusers).
    """
    match scheme:
        case "sigma_sqrt":
            return sigma.clamp(min=_MIN_WEIGHTED_SIGMA) ** -2
        case "cosmap":
            return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma.square()))
        case _:
            return torch.ones_like(sigma)
