"""Adapters that read well and are no good: silent ones, and ones that fp16 programs cannot multiply."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.adapters import ADAPTER_ALGORITHMS, AdapterSet, SiteAdapter, Target, find_algorithm
from finitune.adapters.health import check_adapter_health, compute_product_peak, is_zero_adapter
from finitune.adapters.weight import compute_weight_delta
from tests.adapters_made import random_adapter


@pytest.mark.parametrize("name", sorted(one.name for one in ADAPTER_ALGORITHMS if one.terms))
def test_what_changes_nothing_is_told_from_the_tensors(name: str):
    if name == "full":
        fresh = SiteAdapter("full", {"diff": torch.zeros(6, 4)})
    else:
        base = torch.randn(6) if name == "norm" else torch.randn(6, 4)
        fresh = find_algorithm(name).init(Target(base, rank=2, alpha=3.0), torch.Generator().manual_seed(0))
    assert is_zero_adapter(fresh)
    with_bias = fresh.with_tensors(diff_b=torch.ones(6))
    assert not is_zero_adapter(with_bias)


@pytest.mark.parametrize("algorithm", ADAPTER_ALGORITHMS, ids=lambda a: a.name)
def test_what_changes_something_is_not_called_silent(algorithm):
    shape = (8,) if algorithm.name == "norm" else (8, 12)
    base, adapter = random_adapter(algorithm.name, shape, seed=1)
    assert compute_weight_delta(base, adapter).abs().max() > 0
    assert not is_zero_adapter(adapter)


@settings(max_examples=20)
@given(name=st.sampled_from(["lora", "loha", "lokr"]), power=st.integers(-3, 12), seed=st.integers(0, 99))
def test_the_peak_is_never_below_the_truth(name: str, power: int, seed: int):
    base, adapter = random_adapter(name, (8, 12), seed=seed)
    role = next(role for role in ("up", "w1_a", "w1") if role in adapter.tensors)
    adapter = adapter.with_tensors(**{role: adapter.tensors[role] * 2.0**power})
    scale = find_algorithm(name).scale(adapter)
    truth = float((compute_weight_delta(torch.zeros_like(base), adapter) / scale).abs().max())
    assert compute_product_peak(adapter) >= truth * (1 - 1e-5)
    if truth >= 65520:
        assert compute_product_peak(adapter) == pytest.approx(truth, rel=1e-5)


def test_findings_name_the_worst_site_and_count():
    good = SiteAdapter("lora", {"up": torch.ones(4, 1), "down": torch.ones(1, 4)})
    silent = SiteAdapter("lora", {"up": torch.zeros(4, 1), "down": torch.ones(1, 4)})
    loud = SiteAdapter("lora", {"up": torch.full((4, 1), 300.0), "down": torch.full((1, 4), 300.0)}, alpha=0.001)
    found = {f.code: f for f in check_adapter_health(AdapterSet({"t.a": good, "t.b": silent, "t.c": loud}))}
    assert found["ADAPTER-ZERO-DELTA"].subject == "t.b"
    assert found["ADAPTER-PRODUCT-OVERFLOWS"].evidence == {"peak": 90000.0, "sites": 1}
    assert not check_adapter_health(AdapterSet({"t.a": good}))
