"""Rectified flow: x_t = (1 - sigma) x0 + sigma noise, and the model learns the velocity noise - x0.

Everything here is fp32 whatever the model computes in: half a unit in the last place of a bf16 sigma is a different
noise level. The order of the loss is sd-scripts': the error of each number, times the weight of sigma, times the mask,
mean over all numbers of a sample. The weight of a sample (regularisation) is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from finitune.config.schema import ObjectiveSection
from finitune.datasets.items import TrainingBatch
from finitune.errors import NumericsError
from finitune.training.noise import NoisePurpose, NoiseSeed, draw_addressed_noise, draw_addressed_uniform
from finitune.training.sigmas import compute_loss_weight, sample_sigmas


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


def add_noise(latents: Tensor, noise: Tensor, sigma: Tensor, extra: Tensor | None = None) -> Tensor:
    """(1 - sigma) x0 + sigma (noise + extra): fp32 (B, C, ...) of latents and noise, sigma (B,).

    `extra` is noise that the target does not have (sd-scripts' ip_noise_gamma). Raises NumericsError
    (OBJECTIVE-DTYPE) for anything but fp32.
    """
    require_fp32_objective(latents=latents, noise=noise, sigma=sigma)
    sigma = broadcast_per_sample(sigma, latents)
    return (1 - sigma) * latents + sigma * (noise if extra is None else noise + extra)


def compute_target_velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """What the model should answer: noise - x0, of their shape."""
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


def broadcast_per_sample(values: Tensor, like: Tensor) -> Tensor:
    """`values` (B,) as (B, 1, ...), to be multiplied with `like` (B, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))


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
