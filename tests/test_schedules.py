"""The course of the learning rate, beside the schedulers that it is taken from."""

from __future__ import annotations

import pytest
import torch
from diffusers.optimization import get_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from finitune.config.schema import OptimizerSection
from finitune.training.optimizers import compute_warmup_steps, make_rate_factor, set_learning_rates

NAMES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
RATE = 3e-4


def optimizer_at(rate: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rates_of(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int):
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 20), (5, 20)])
def test_parity_with_diffusers(name: str, warmup: int, total: int):
    section = OptimizerSection(
        learning_rate=RATE,
        lr_scheduler=name,
        lr_warmup_steps=warmup,
        lr_scheduler_num_cycles=3,
        lr_scheduler_power=2.0,
    )
    optimizer = optimizer_at(RATE)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total, num_cycles=3, power=2.0
    )
    factor = make_rate_factor(section, total)
    assert [RATE * factor(step) for step in range(total)] == rates_of(optimizer, scheduler, total)


@pytest.mark.parametrize("warmup", [0, 5])
def test_parity_with_transformers(warmup: int):
    section = OptimizerSection(
        lr_scheduler="cosine_with_min_lr", lr_warmup_steps=warmup, lr_scheduler_min_lr_ratio=0.2, learning_rate=RATE
    )
    optimizer = optimizer_at(RATE)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, 20, min_lr_rate=0.2)
    factor = make_rate_factor(section, 20)
    assert [RATE * factor(step) for step in range(20)] == pytest.approx(rates_of(optimizer, scheduler, 20), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([*NAMES, "cosine_with_min_lr"]),
    total=st.integers(2, 200),
    share=st.floats(0, 0.9),
    step=st.integers(0, 1000),
)
def test_a_factor_is_a_share_and_the_same_whenever_it_is_asked(name: str, total: int, share: float, step: int):
    section = OptimizerSection(lr_scheduler=name, lr_warmup_steps=share)
    once, again = make_rate_factor(section, total), make_rate_factor(section, total)
    assert 0 <= once(step) <= 1
    assert again(0) == once(0)  # whatever was asked before
    assert again(step) == once(step)
    assert once(total + step) == once(total)


@pytest.mark.parametrize(("asked", "expected"), [(0, 0), (0.1, 10), (0.055, 5), (1, 1), (99, 99), (0.999, 99)])
def test_warm_up_in_steps_or_as_a_share(asked: float, expected: int):
    assert compute_warmup_steps(OptimizerSection(lr_warmup_steps=asked), 100) == expected


def test_each_group_keeps_its_own_rate():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [p], "lr": rate, "base_lr": rate} for p, rate in zip(parameters, (1e-4, 16e-4), strict=True)]
    optimizer = torch.optim.AdamW(groups)
    for factor in (0.0, 0.5, 1.0):
        set_learning_rates(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-4 * factor, 16e-4 * factor]
