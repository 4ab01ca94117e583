"""A smaller variant's adapter on the larger one is asked about, not taken as it is."""

from __future__ import annotations

import pytest

from finitune.models import MODELS
from finitune.namings.blocks import doubtful_blocks
from finitune.namings.metadata import RECEIPT, Receipt

ANIMA = next(model for model in MODELS if model.name == "anima")


def blocks(count: int) -> list[str]:
    return [f"transformer.transformer_blocks.{n}.attn1.to_q" for n in range(count)] + ["transformer.proj_out"]


@pytest.mark.parametrize(
    ("adapter", "model", "asked"), [(28, 40, True), (28, 28, False), (40, 40, False), (20, 40, False), (0, 40, False)]
)
def test_only_an_adapter_that_ends_where_the_smaller_model_does_is_doubtful(adapter: int, model: int, asked: bool):
    found = doubtful_blocks(blocks(adapter), blocks(model), ANIMA, {})
    assert bool(found) is asked
    if found:
        assert found[0].code == "ADAPTER-BLOCKS" and '--blocks "28 to 40"' in found[0].remedy


def test_a_file_that_was_renumbered_is_believed():
    receipt = Receipt("convert", block_maps=("28 to 40",)).text()
    assert not doubtful_blocks(blocks(28), blocks(40), ANIMA, {RECEIPT: receipt})
