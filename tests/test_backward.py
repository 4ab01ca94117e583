"""Gradients of a whole transformer in current half, whatever the magnitude of its residual stream, beside bf16's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from finitune.models.anima.attention import apply_attention_function
from finitune.numerics import simulate
from finitune.numerics.attention import half_attention
from finitune.numerics.compare import relative_l2
from finitune.precision.apply import apply_current_scaling
from tests.tiny import cosmos, cosmos_calls


def gradients(model, dtype):
    """The gradient of a squared error for every weight, each in fp64."""
    model.requires_grad_(True)
    given = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in cosmos_calls(1)[0].kwargs.items()}
    target = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(7)).double()
    (model(**given)[0].double() - target).square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def error(found, wanted):
    """Relative L2 over all weights, each weight's gradient taken at unit norm."""
    assert found.keys() == wanted.keys()
    ours, theirs = (torch.cat([(g[n] / wanted[n].norm()).flatten() for n in wanted]) for g in (found, wanted))
    return relative_l2(ours, theirs)


@pytest.mark.parametrize("exponent", [0, 8, 16, 24, 30])
def test_gradients_are_at_least_four_times_closer_to_fp64_than_those_of_bf16(exponent):
    model = cosmos(exponent).float()
    wanted = gradients(copy.deepcopy(model).double(), torch.float64)
    with simulate.half():
        bf16 = gradients(copy.deepcopy(model).bfloat16(), torch.bfloat16)
    current = apply_current_scaling(copy.deepcopy(model), masters=True).module
    with apply_attention_function(current, partial(half_attention, exponent=None)):
        half = gradients(current, torch.float32)
    assert error(half, wanted) <= error(bf16, wanted) / 4
