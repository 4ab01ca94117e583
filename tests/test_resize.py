"""A LoRA cut to a smaller rank is the best of that rank, says its true error, and stays where nothing is to be cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.adapters import AdapterSet, Magnitude, SiteAdapter
from finitune.adapters.difference import compute_change_error
from finitune.adapters.weight import compute_adapted_bias, compute_weight_delta
from finitune.errors import AdapterError, NumericsError
from finitune.merging.resize import resize_adapter
from tests.adapters_made import random_adapter
from tests.test_extract_resize import SITE, lora, noise, optimum


@settings(max_examples=20)
@given(rank=st.integers(1, 8), alpha=st.one_of(st.none(), st.floats(0.1, 50), st.just(-3.0)), seed=st.integers(0, 99))
def test_a_resized_lora_is_the_best_of_its_rank(rank: int, alpha: float | None, seed: int):
    adapter = lora(14, 12, 8, alpha, seed)
    done = resize_adapter(AdapterSet({SITE: adapter}), rank=rank)
    small, (row,) = done.adapter[SITE], done.rows
    if rank >= 8:
        assert small is adapter and row.how == "kept"
        return
    best = optimum(compute_weight_delta(torch.zeros(14, 12, dtype=torch.float64), adapter), rank)
    assert (small.alpha, row.rank, small.tensors["down"].shape[0]) == (rank, rank, rank)
    assert row.error == pytest.approx(best, abs=1e-9)
    assert row.energy == pytest.approx(1 - best**2, abs=1e-9)
    assert compute_change_error(small, adapter) == pytest.approx(best, abs=1e-6)
    again = resize_adapter(done.adapter, rank=rank)
    assert again.adapter[SITE] is small


def test_a_core_is_contracted():
    _, adapter = random_adapter("lora", (8, 6, 3, 3), 0, options={"use_tucker": True})
    small = resize_adapter(AdapterSet({SITE: adapter}), rank=2)
    assert small.adapter[SITE].tensors["down"].shape == (2, 6, 3, 3)
    wanted = optimum(compute_weight_delta(torch.zeros(8, 6, 3, 3, dtype=torch.float64), adapter), 2)
    assert small.rows[0].error == pytest.approx(wanted, abs=1e-9)
    assert compute_change_error(small.adapter[SITE], adapter) == pytest.approx(wanted, abs=1e-6)


def test_each_layer_gets_the_rank_that_its_energy_needs():
    flat = lora(16, 16, 8, 8.0)
    steep = flat.with_tensors(up=flat.tensors["up"] * 10.0 ** -torch.arange(8.0))
    done = resize_adapter(AdapterSet({"unet.flat": flat, "unet.steep": steep}), energy=0.95)
    ranks = {row.site: row.rank or 0 for row in done.rows}
    assert ranks["unet.steep"] == 1 < ranks["unet.flat"] <= 8
    assert all(row.energy >= 0.95 for row in done.rows)


def test_biases_and_scales_survive_the_cut():
    adapter = replace(lora(6, 5, 4, 8.0), rank_stabilised=True).with_tensors(
        up_bias=torch.ones(6), diff_b=torch.ones(6)
    )
    small = resize_adapter(AdapterSet({SITE: adapter}), rank=3).adapter[SITE]
    bias = compute_adapted_bias(torch.zeros(6), small)
    assert bias is not None
    torch.testing.assert_close(bias, torch.full((6,), 5.0))  # 8 / sqrt(4) + 1


def test_dora_keeps_its_magnitudes_and_is_named():
    adapter = replace(lora(6, 5, 4, 4.0), magnitude=Magnitude(torch.ones(6)))
    done = resize_adapter(
        AdapterSet({SITE: adapter, "unet.norm": SiteAdapter("norm", {"w_norm": torch.ones(3)})}), rank=2
    )
    assert done.dora == (SITE,) and done.adapter[SITE].magnitude is adapter.magnitude
    assert done.passed == ("unet.norm",)
    assert resize_adapter(AdapterSet({SITE: adapter}), rank=4).dora == ()


@pytest.mark.parametrize(
    ("name", "code"), [("loha", "RESIZE-ALGORITHM"), ("lokr", "RESIZE-ALGORITHM"), ("ia3", "RESIZE-NOTHING")]
)
def test_what_has_no_such_rank_is_refused(name: str, code: str):
    _, adapter = random_adapter(name, (8, 6), 0)
    with pytest.raises(AdapterError) as caught:
        resize_adapter(AdapterSet({SITE: adapter}), rank=2)
    assert caught.value.code == code


def test_a_lora_that_changes_nothing_stays_finite():
    adapter = SiteAdapter("lora", {"up": torch.zeros(6, 4), "down": noise(4, 5)}, 4.0)
    done = resize_adapter(AdapterSet({SITE: adapter}), energy=0.9)
    assert done.rows[0].rank == 1 and done.rows[0].error == 0
    assert not compute_weight_delta(torch.zeros(6, 5), done.adapter[SITE]).any()
    broken = adapter.with_tensors(up=torch.full((6, 4), math.nan))
    with pytest.raises(NumericsError) as caught:
        resize_adapter(AdapterSet({SITE: broken}), rank=2)
    assert caught.value.subject == SITE
