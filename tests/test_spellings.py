"""Files that differ from another spelling by very little are told apart."""

from __future__ import annotations

from functools import partial

import pytest

from finitune.report import Level
from tests.adapter_files import codes, finding, lora, model, noise, read_back

PEFT = "lora_A.weight lora_B.weight"
FLUX_BLOCK = "double_blocks.0.img_attn.proj"


@pytest.fixture
def read(tmp_path):
    return partial(read_back, tmp_path)


@pytest.mark.parametrize(
    ("module", "words", "spelling"),
    [
        ("transformer.transformer_blocks.0.attn.to_q", "lora_down.weight lora_up.weight", "diffusers-dotted"),
        ("transformer.transformer_blocks.0.attn.to_q", PEFT, "diffusers"),
        ("transformer_blocks.0.attn.to_q", PEFT, "diffusers-bare"),
        (FLUX_BLOCK, PEFT, "original-bare"),
        (f"transformer.{FLUX_BLOCK}", "lora_down.weight lora_up.weight", "omi"),
    ],
)
def test_names_and_suffixes_tell_the_spelling(module, words, spelling, read):
    assert read(lora(module, 3072, 3072, 2, words), family=model("flux")).spelling == spelling


def test_only_a_control_file_is_taken_for_one(read):
    plain = lora(FLUX_BLOCK, 3072, 3072, 2, PEFT)
    reading = read(plain, family=model("flux"))
    (adapter,) = reading.adapter.sites.values()
    assert not adapter.options and finding(reading, "ADAPTER-SCALE-UNKNOWN").level is Level.WARNING
    control = {**plain, "double_blocks.0.img_attn.norm.query_norm.scale": noise(128)}
    reading = read(control, family=model("flux"))
    assert reading.spelling == "bfl-control" and "ADAPTER-SCALE-UNKNOWN" not in codes(reading)
