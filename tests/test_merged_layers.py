"""Adapters in the weights of a model in memory, where they cannot be attached."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finitune.adapters import SiteAdapter
from finitune.adapters.layer import attach_adapters, merge_into_weights
from finitune.errors import AdapterError


def test_norms_are_merged_though_they_cannot_be_attached():
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False))
    norm = SiteAdapter("norm", {"w_norm": torch.randn(6), "b_norm": torch.randn(6)})
    wanted = model[0].weight + 0.5 * norm.tensors["w_norm"], model[0].bias + 0.5 * norm.tensors["b_norm"]
    with pytest.raises(AdapterError) as caught:
        attach_adapters(model, {"0": norm})
    assert caught.value.code == "ADAPTER-LAYER" and "Merge" in caught.value.remedy
    merge_into_weights(model, {"0": [(norm, 0.5)]})
    torch.testing.assert_close((model[0].weight.data, model[0].bias.data), tuple(t.detach() for t in wanted))
    before = model[0].weight.clone()
    with pytest.raises(AdapterError, match="1 is a LayerNorm without a weight"):
        merge_into_weights(model, {"0": [(norm, 1.0)], "1": [(norm, 1.0)]})
    assert torch.equal(model[0].weight, before), "nothing is written where one does not fit"
