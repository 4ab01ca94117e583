"""The moving average: what it is the average of, and that looking at it changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.training.optimizers import Ema


@settings(deadline=None, max_examples=30)
@given(decay=st.floats(0.01, 0.999), count=st.integers(1, 20), seed=st.integers(0, 9))
def test_it_is_the_weighted_mean_of_all_steps(decay: float, count: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randn(count, 3, generator=draw)
    parameter = torch.nn.Parameter(torch.zeros(3))
    average = Ema([("a", parameter)], decay)
    for step in steps:
        parameter.data.copy_(step)
        average.update()
    weights = torch.tensor([decay ** (count - 1 - i) for i in range(count)], dtype=torch.float64)
    expected = (steps.double() * weights[:, None]).sum(0) / weights.sum()
    torch.testing.assert_close(average.values()["a"].double(), expected, rtol=1e-4, atol=1e-4)


def test_the_first_average_is_the_first_step():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    average = Ema([("a", parameter)], 0.5)
    assert torch.equal(average.values()["a"], parameter)
    average.update()
    assert torch.equal(average.values()["a"], parameter)


def test_swapping_gives_back_the_same_bits_even_on_an_error():
    parameter = torch.nn.Parameter(torch.tensor([0.1]))
    average = Ema([("a", parameter)], 0.9)
    average.update()
    parameter.data.fill_(0.3)
    average.update()
    before = parameter.detach().clone()
    with pytest.raises(RuntimeError, match="preview"), average.swapped():
        assert torch.equal(parameter, average.values()["a"])
        assert not torch.equal(parameter, before)
        raise RuntimeError("preview")
    assert torch.equal(parameter, before)


def test_a_state_goes_on_to_the_same_bits():
    parameter = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(0)))
    one, two = Ema([("a", parameter)], 0.9), Ema([("a", parameter)], 0.9)
    for _ in range(3):
        one.update()
    two.load_state_dict(one.state_dict())
    for average in (one, two):
        average.update()
    assert torch.equal(one.values()["a"], two.values()["a"])
    assert one.count == two.count == 4
