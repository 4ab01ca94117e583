"""Rectified flow: x_t = (1 - sigma) x0 + sigma noise, and the model learns the velocity noise - x0.

Everything here is fp32 whatever the model computes in: half a unit in the last place of a bf16 sigma is a different
noise level. The order of the loss is sd-scripts': the error of each number, times the weight of sigma, times the mask,
mean over all numbers of a sample. The weight of a sample (regularisation) is the caller's.

**Noise levels.** Each way of drawing is written as its quantile function: sigma = Q(p) for a uniform p, rising in p. So
a draw is a pure function of one uniform number (draws can be stratified), and a range is exact truncation: p is drawn
between the share of the distribution below `min_sigma` and the share up to `max_sigma`. Inside of the range the density
keeps its shape; nothing piles up at the ends, and nothing is drawn again. The formulas are those of sd-scripts
(library/flux_train_utils.py), of which three things differ: sigma is fp32 all the way (there it goes through the dtype
of the weights: 745 distinct values in bf16), the range has an effect, and the weight sigma^-2 is bounded.

**Chance by address**: (seed, step, place in the optimiser step, purpose), never by the order of asking. The place of a
sample counts over all devices and micro-batches of a step, so a run gives every sample the same numbers however its
batch is split, and a resumed run needs no state of a generator. Purposes are streams of their own: another noise does
not move the sigmas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from finitune.config.schema import ObjectiveSection
from finitune.datasets.items import TrainingBatch, derive_seed, make_generator
from finitune.errors import NumericsError, UsageError


@dataclass(frozen=True)
class NoisedBatch:
    """What the model is shown, and what it should answer: `x_t`, `target` fp32 (B, C, 1, h, w), `sigma` fp32 (B,)."""

    x_t: Tensor
    sigma: Tensor
    target: Tensor


@dataclass(frozen=True)
class FlowObjective:
    """What is learned from a batch; `patch` is the side of a token in latents, for flux_shift."""

    settings: ObjectiveSection
    patch: int = 2

    def draw(self, batch: TrainingBatch, seed: NoiseSeed, step: int) -> NoisedBatch:
        """The lesson of a batch at a step: sigma and noise by the samples' places, on the device of the latents."""
        latents = batch.latents
        u = draw_addressed_uniform(seed, step, batch.places, NoisePurpose.SIGMA)
        tokens = (latents.shape[-2] // self.patch) * (latents.shape[-1] // self.patch)
        sigma = sample_sigmas(u, self.settings, tokens).to(latents.device)
        noise = self._noise(batch, seed, step, NoisePurpose.NOISE)
        gamma = self.settings.ip_noise_gamma
        extra = gamma * self._noise(batch, seed, step, NoisePurpose.INPUT_NOISE) if gamma else None
        return NoisedBatch(add_noise(latents, noise, sigma, extra), sigma, compute_target_velocity(latents, noise))

    def at(self, batch: TrainingBatch, sigma: float, seed: NoiseSeed) -> NoisedBatch:
        """The lesson of a batch at one sigma, to measure on: the same noise at every time and for every sigma."""
        sigmas = torch.full((len(batch),), sigma, dtype=torch.float32, device=batch.latents.device)
        noise = self._noise(batch, seed, 0, NoisePurpose.VALIDATION)
        return NoisedBatch(
            add_noise(batch.latents, noise, sigmas), sigmas, compute_target_velocity(batch.latents, noise)
        )

    def losses(self, lesson: NoisedBatch, prediction: Tensor, batch: TrainingBatch) -> Tensor:
        """The loss of each sample, fp32 (B,), before the samples' own weights; a batch's mask is always applied."""
        return compute_sample_losses(prediction, lesson.target, lesson.sigma, batch.mask, self.settings)

    def _noise(self, batch: TrainingBatch, seed: NoiseSeed, step: int, purpose: NoisePurpose) -> Tensor:
        return draw_addressed_noise(seed, step, batch.places, batch.latents.shape[1:], purpose).to(batch.latents.device)


OBJECTIVE_BY_NAME = {"flow": FlowObjective}
"""What a family can be trained to answer: see `LoadedModel.objective`."""


def add_noise(latents: Tensor, noise: Tensor, sigma: Tensor, extra: Tensor | None = None) -> Tensor:
    """(1 - sigma) x0 + sigma (noise + extra): fp32 (B, C, ...) of latents and noise, sigma (B,).

    `extra` is noise that the target does not have (sd-scripts' ip_noise_gamma). Raises NumericsError
    (OBJECTIVE-DTYPE) for anything but fp32.
    """
    require_fp32_objective(latents=latents, noise=noise, sigma=sigma)
    sigma = sigma.view(-1, *[1] * (latents.ndim - 1))
    return (1 - sigma) * latents + sigma * (noise if extra is None else noise + extra)


def compute_target_velocity(latents: Tensor, noise: Tensor) -> Tensor:
    return noise - latents


def compute_sample_losses(
    prediction: Tensor, target: Tensor, sigma: Tensor, mask: Tensor | None, objective: ObjectiveSection
) -> Tensor:
    """The loss of each sample, fp32 (B,), from a prediction of any dtype and a target, both (B, C, ...).

    `mask` (B, 1, ..., h, w) in 0 .. 1 multiplies the errors. As in sd-scripts the mean stays over all numbers, so that
    a small mask makes a small loss; with `mask_normalised` it is divided by the mask's area, at least
    `mask_area_floor`. Raises NumericsError (OBJECTIVE-DTYPE) where target, sigma or mask are not fp32.
    """
    require_fp32_objective(target=target, sigma=sigma)
    if prediction.shape != target.shape:
        raise NumericsError(
            f"the model answered {list(prediction.shape)} where {list(target.shape)} was asked for.",
            code="OBJECTIVE-SHAPE",
            evidence={"prediction": list(prediction.shape), "target": list(target.shape)},
            remedy="This model does not predict a velocity of the latents' shape.",
        )
    errors = compute_elementwise_error(prediction.float() - target, objective.loss_type, objective.huber_c)
    if mask is not None:
        require_fp32_objective(mask=mask)
        errors = errors * mask
    losses = compute_loss_weight(sigma, objective.weighting_scheme) * errors.flatten(1).mean(1)
    if mask is not None and objective.mask_normalised:
        losses = losses / mask.flatten(1).mean(1).clamp(min=objective.mask_area_floor)
    return losses


def compute_elementwise_error(difference: Tensor, kind: str, c: float = 0.1) -> Tensor:
    """The error of each number of a `difference` d: d^2 (l2), |d| (l1), or one that turns from square to straight at c.

    huber is 2 c (sqrt(d^2 + c^2) - c), which is d^2 near 0; smooth_l1 is the same over c, which is 2 |d| far away
    (sd-scripts' two). Written as d^2 / (sqrt(d^2 + c^2) + c), the root cancels nothing and d^2 does not overflow.
    """
    match kind:
        case "l2":
            return difference.square()
        case "l1":
            return difference.abs()
    root = torch.hypot(difference, difference.new_tensor(c))
    smooth = 2 * difference * (difference / (root + c))
    return c * smooth if kind == "huber" else smooth


def require_fp32_objective(**tensors: Tensor) -> None:
    """Raise NumericsError (OBJECTIVE-DTYPE) for the first tensor that is not fp32."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32:
            raise NumericsError(
                f"the {name} of the objective is {tensor.dtype}: noising and the loss are computed in fp32.",
                code="OBJECTIVE-DTYPE",
                subject=name,
                evidence={"dtype": str(tensor.dtype)},
                remedy="Cast it to torch.float32 where it is made; only the model's own input may be narrower.",
            )


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


NoiseSeed = int | tuple[int, ...]
"""The seed of a run; with the number of an attempt where a step is tried again with other numbers."""

_UNIFORM_BITS = 52


class NoisePurpose(str, Enum):
    """What random numbers are for; each has a stream of its own."""

    NOISE = "noise"
    SIGMA = "sigma"
    INPUT_NOISE = "ip-noise"
    VALIDATION = "validation"


def draw_addressed_noise(
    seed: NoiseSeed, step: int, places: Sequence[int], shape: Sequence[int], purpose: NoisePurpose
) -> Tensor:
    """Normal numbers, fp32 (B, *shape) on the CPU, one stream for each of the B places; a shape of () is one number."""
    streams = [make_generator(seed, step, place, purpose.value) for place in places]
    drawn = [torch.randn(tuple(shape), generator=stream, dtype=torch.float32) for stream in streams]
    return torch.stack(drawn) if drawn else torch.empty((0, *shape))


def draw_addressed_uniform(seed: NoiseSeed, step: int, places: Sequence[int], purpose: NoisePurpose) -> Tensor:
    """One uniform number for each place, fp64 (B,) on the CPU, strictly between 0 and 1; the same on every machine.

    It is the middle of one of 2**52 equal cells, taken from the hash of the address.
    """
    cells = [derive_seed(seed, step, place, purpose.value) >> (63 - _UNIFORM_BITS) for place in places]
    return torch.tensor([(cell + 0.5) * 2.0**-_UNIFORM_BITS for cell in cells], dtype=torch.float64)
