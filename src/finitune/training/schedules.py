"""The course of the learning rate as a pure function of the step: nothing to save, nothing to resume wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

from finitune.config.schema import OptimizerSection
from finitune.errors import UsageError

if TYPE_CHECKING:
    from finitune.training.optimizers import OptimizerHandle

RateFactor = Callable[[int], float]

_POLYNOMIAL_END_RATE = 1e-7
"""Where diffusers' polynomial ends, as a rate."""


def make_rate_factor(settings: OptimizerSection, total_steps: int) -> RateFactor:
    """The share of its learning rate that each group has in the update with `step` updates before it.

    The curves are diffusers' (optimization.py); cosine_with_min_lr is transformers'. Behind `total_steps` the last
    value holds. With a warm-up the first update has rate 0, as there. Raises UsageError (WARMUP-TOO-LONG, ...).
    """
    warmup = compute_warmup_steps(settings, total_steps)
    if settings.lr_scheduler == "cosine_with_min_lr":
        curve = make_cosine_with_floor(warmup, total_steps, settings.lr_scheduler_min_lr_ratio)
    else:
        curve = make_diffusers_curve(settings, warmup, total_steps)

    def factor(step: int) -> float:
        return float(curve(min(step, total_steps)))

    return factor


def compute_warmup_steps(settings: OptimizerSection, total_steps: int) -> int:
    """The steps of warm-up; a number below 1 is a share of all steps, rounded down as by kohya.

    Raises UsageError for a part of a step, and for a warm-up that the run does not outlast.
    """
    asked = settings.lr_warmup_steps
    count = math.floor(asked * total_steps) if asked < 1 else math.floor(asked)
    if asked >= 1 and asked != count:
        raise UsageError(
            f"lr_warmup_steps is {asked}: neither a whole number of steps nor a share below 1.",
            code="WARMUP-FRACTION",
            subject="lr_warmup_steps",
            evidence={"lr_warmup_steps": asked},
            remedy=f"Write {count}, or a share such as 0.05.",
        )
    if count and count >= total_steps:
        raise UsageError(
            f"The warm-up of {count} steps is not over when the run ends after {total_steps}.",
            code="WARMUP-TOO-LONG",
            subject="lr_warmup_steps",
            evidence={"warmup_steps": count, "total_steps": total_steps},
            remedy="Write a share of the run, such as lr_warmup_steps = 0.05.",
        )
    return count


def make_cosine_with_floor(warmup: int, total_steps: int, floor: float) -> RateFactor:
    """Linear warm-up, then half a cosine from 1 to `floor`."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total_steps - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def make_diffusers_curve(settings: OptimizerSection, warmup: int, total_steps: int) -> RateFactor:
    """The function that diffusers' scheduler of the same name multiplies rates by."""
    from diffusers.optimization import get_scheduler

    rate = settings.learning_rate if settings.learning_rate > _POLYNOMIAL_END_RATE else 1.0
    placeholder = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    cycles = settings.lr_scheduler_num_cycles
    scheduler: LambdaLR = get_scheduler(
        settings.lr_scheduler,
        placeholder,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        num_cycles=cycles,  # pyright: ignore[reportArgumentType]
        power=settings.lr_scheduler_power,
    )
    (curve,) = scheduler.lr_lambdas
    return curve


def set_learning_rates(optimizer: OptimizerHandle | torch.optim.Optimizer, factor: float) -> None:
    """Give each group its own rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
