"""A smaller variant's adapter on the larger one is asked about, not taken as it is."""

from __future__ import annotations

import pytest
import torch

from finitune.adapters import AdapterSet, SiteAdapter
from finitune.files.writer import save_tensors
from finitune.merging.adapterfile import read_adapter_for_model
from finitune.merging.pairing import TargetModel
from finitune.models import MODEL_FAMILIES
from finitune.namings.block_maps import find_doubtful_blocks
from finitune.namings.metadata import RECEIPT_METADATA_KEY, Receipt
from finitune.namings.write import write_adapter
from finitune.verbs.convert import Request, run

DOUBT = "BLOCKS-OF-SMALLER-MODEL"
ANIMA = next(model for model in MODEL_FAMILIES if model.name == "anima")


def blocks(count: int) -> list[str]:
    return [f"transformer.transformer_blocks.{n}.attn1.to_q" for n in range(count)] + ["transformer.proj_out"]


@pytest.mark.parametrize(
    ("adapter", "model", "asked"), [(28, 40, True), (28, 28, False), (40, 40, False), (20, 40, False), (0, 40, False)]
)
def test_only_an_adapter_that_ends_where_the_smaller_model_does_is_doubtful(adapter: int, model: int, asked: bool):
    found = find_doubtful_blocks(blocks(adapter), blocks(model), ANIMA, {})
    assert bool(found) is asked
    if found:
        assert found[0].code == DOUBT and '--blocks "28 to 40"' in found[0].remedy


def test_a_file_that_was_renumbered_is_believed():
    receipt = Receipt("convert", block_maps=("28 to 40",)).text()
    assert not find_doubtful_blocks(blocks(28), blocks(40), ANIMA, {RECEIPT_METADATA_KEY: receipt})


def test_whoever_names_the_larger_model_is_asked(tmp_path):
    adapter = AdapterSet({site: SiteAdapter("lora", {"up": torch.ones(4, 1), "down": torch.ones(1, 4)}, 1.0)
                          for site in blocks(28)[:-1]})  # fmt: skip
    written = write_adapter(adapter, ANIMA, "kohya")
    save_tensors(tmp_path / "small.safetensors", written.tensors, written.metadata)
    larger = TargetModel(ANIMA, dict.fromkeys(blocks(40), (4, 4)))
    assert DOUBT in [
        finding.code for finding in read_adapter_for_model(tmp_path / "small.safetensors", larger).findings
    ]
    request = Request(
        file=tmp_path / "small.safetensors", to="kohya", blocks="28 to 40", out=tmp_path / "large.safetensors"
    )
    assert run(request).ok
    assert not [f for f in read_adapter_for_model(tmp_path / "large.safetensors", larger).findings if f.code == DOUBT]
