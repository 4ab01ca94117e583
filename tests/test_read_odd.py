"""Odd but readable: biases, names of adapters, exchanged halves, texts; each taken for what it is, and told."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from finitune.report import Level
from tests.adapter_files import codes, delta, finding, lora, model, noise, read_back

Q = "transformer.a.to_q"
PEFT = "lora_A.weight lora_B.weight"


@pytest.fixture
def read(tmp_path):
    """Write tensors and texts to a file, and read it."""
    return partial(read_back, tmp_path)


def test_a_bias_in_kohyas_words_is_that_of_the_outer_factor(read):
    tensors = lora("lycoris_a_to_q") | {
        "lycoris_a_to_q.lora_up.bias": noise(16),
        "lycoris_a_to_q.alpha": torch.tensor(4.0),
    }
    reading = read(tensors)
    assert not reading.left_out and torch.equal(reading.adapter[Q].tensors["up_bias"], noise(16))


@pytest.mark.parametrize("name", ["default", "my-style_2"])
def test_the_name_of_an_adapter_is_taken_off_and_told(read, name):
    words = f"lora_A.{name}.weight lora_B.{name}.weight"
    reading = read(lora("base_model.model.a.to_q", words=words), config={"r": 2, "lora_alpha": 4})
    said = finding(reading, "ADAPTER-NAMED")
    assert said.level is Level.NOTE and repr(name) in said.message and said.evidence["name"] == name
    assert "ADAPTER-NAMED" not in codes(read(lora("base_model.model.a.to_q", words=PEFT)))


def test_keys_of_no_suffix_have_a_remedy(read):
    said = finding(read(lora("lycoris_a_to_q") | {"what.is.this": noise(2)}), "ADAPTER-UNKNOWN-KEYS")
    assert said.level is Level.ERROR and "--allow-unmatched" in said.remedy


NORM_OUT = "diffusion_model.final_layer.adaLN_modulation.1"


@pytest.mark.parametrize("rows", [2, 3])
def test_a_lokr_whose_rows_have_no_halves_ends_with_an_error_of_reading(read, rows):
    """Scale and shift have changed places: with three blocks of rows the middle one would be torn."""
    kron = {"lokr_w1": noise(rows, 2), "lokr_w2": noise(12 // rows, 4)}
    reading = read({f"{NORM_OUT}.{role}": t for role, t in kron.items()}, family=model("flux"))
    if rows == 2:
        whole = torch.kron(kron["lokr_w1"].double(), kron["lokr_w2"].double())
        torch.testing.assert_close(
            delta(reading, "transformer.norm_out.linear", 12, 8), torch.cat(whole.chunk(2)[::-1])
        )
    else:
        said = finding(reading, "ADAPTER-SWAPPED")
        assert said.level is Level.ERROR and said.remedy and reading.left_out


def test_an_adapter_of_the_inputs_has_no_rows_to_exchange(read):
    factors = {"ia3_l": noise(1, 8)}
    reading = read({f"{NORM_OUT}.{role}": t for role, t in factors.items()}, family=model("flux"))
    assert not codes(reading, Level.ERROR) and torch.equal(
        reading.adapter["transformer.norm_out.linear"].tensors["weight"], (noise(1, 8).double() - 1).float()
    )


@pytest.mark.parametrize(("text", "told"), [("Dynamic", False), ("None", False), ("sixteen", True), ("nan", True)])
def test_what_a_trainer_says_is_read_with_distrust(read, text, told):
    tensors = lora("lycoris_a_to_q") | {"lycoris_a_to_q.alpha": torch.tensor(4.0)}
    assert ("METADATA-UNREADABLE" in codes(read(tensors, {"ss_network_dim": text}))) is told
