"""The JSON of the kohya_ss GUI: its fields by what the GUI makes of them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.imported_config import ImportedConfig, KeyStatus
from finitune.importers.key_tables import read_facts
from finitune.importers.kohya_datasets import read_kohya_keys
from finitune.importers.kohya_gui import KOHYA_GUI_TRANSLATORS, import_kohya_gui, read_unused_fields
from finitune.report import Level
from tests.test_import_kohya import MISSING, SHARED, VALUES, codes, config_of, line, ours

FILES = SHARED / "data" / "configs" / "kohya_gui"
NAMES = (
    "Diag-OFT-AdamW8bit-toml",
    "LoKR-AdamW8bit-toml",
    "SDXL-Standard-AdamW8bit",
    "locon-AdamW",
    "loha-Prodigy",
    "preset-SDXL_-_LoKR_v1.0",
    "preset-flux1D_-_adamw8bit_fp8",
    "preset-iA3-Prodigy-sd15",
    "preset-loha-sd15",
)
ANIMA = {
    "anima_checkbox": True,
    "LoRA_type": "Anima",
    "pretrained_model_name_or_path": "anima.safetensors",
    "anima_qwen3": "qwen3.safetensors",
    "anima_vae": "vae.safetensors",
    "vae": "",
    "output_dir": "out",
    "network_dim": 16,
    "unet_lr": 1e-4,
    "text_encoder_lr": 0,
    "learning_rate": 1e-4,
    "max_resolution": "1024,1024",
    "epoch": 10,
}


def form(**fields: Any) -> ImportedConfig:
    return import_kohya_gui({**ANIMA, **fields}, Path("gui.json"))


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_real_files_has_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = FILES / f"{name}.json"
    if not file.exists():
        pytest.skip("the files are not here")
    (tmp_path / "test" / "config").mkdir(parents=True)
    shutil.copy(SHARED / "data" / "configs" / "kohya" / "dataset.toml", tmp_path / "test" / "config" / "dataset.toml")
    monkeypatch.chdir(tmp_path)
    document = json.loads(file.read_text(encoding="utf-8"))
    account = import_kohya_gui(document, file)
    counted = Counter(line.key for line in account.lines)
    assert {key: counted[key] for key in document} == dict.fromkeys(document, 1)
    assert [line.key for line in account.lines][: len(document)] == list(document)
    assert "CONFIG-UNKNOWN-KEY" not in codes(account)
    assert {"CONFIG-OTHER-FAMILY", "CONFIG-FAMILY-UNSAID"} & set(codes(account))
    model = ours(account, "model.pretrained_model_name_or_path")
    if model is not MISSING:
        assert config_of(account).model.pretrained_model_name_or_path == document["pretrained_model_name_or_path"]


def test_an_anima_form_is_a_training_for_anima():
    account = form()
    config = config_of(account)
    assert (str(config.model.qwen3), str(config.model.vae)) == ("qwen3.safetensors", "vae.safetensors")
    assert (config.network.algorithm, config.network.network_dim) == ("lora", 16)
    assert (config.optimizer.learning_rate, config.network.train_text_encoder) == (1e-4, False)
    assert (config.general.resolution, config.training.max_train_epochs) == ((1024, 1024), 10)
    assert not any(finding.level is Level.ERROR for finding in account.findings)
    assert set(ANIMA) == {line.key for line in account.lines}


@pytest.mark.parametrize(
    ("fields", "place", "expected"),
    [
        ({"lr_warmup": 10}, "optimizer.lr_warmup_steps", 0.1),
        ({"lr_warmup": "5", "lr_warmup_steps": 0}, "optimizer.lr_warmup_steps", 0.05),
        ({"lr_warmup": 10, "lr_warmup_steps": 200}, "optimizer.lr_warmup_steps", 200),
        ({"max_train_steps": 900}, "training.max_train_steps", 900),
        ({"max_train_steps": 900}, "training.max_train_epochs", MISSING),
        ({"max_train_epochs": "4"}, "training.max_train_epochs", 4),
        ({"optimizer": "Prodigy"}, "optimizer.optimizer_type", "Prodigy"),
        (
            {"optimizer_args": '"decouple=True" "d_coef=2.0"'},
            "optimizer.optimizer_args",
            {"decouple": True, "d_coef": 2.0},
        ),
        ({"unet_lr": 0, "text_encoder_lr": 0}, "network.train_text_encoder", True),
        ({"text_encoder_lr": 5e-5}, "optimizer.text_encoder_lr", 5e-5),
        ({"seed": 0}, "training.seed", MISSING),
        ({"seed": "1234"}, "training.seed", 1234),
        ({"vae_batch_size": 0}, "training.vae_batch_size", MISSING),
        ({"sample_prompts": "a cat\n# not this\nb --w 512\n"}, "preview.sample_prompts", ["a cat", "b --w 512"]),
        ({"use_wandb": True}, "logging.log_with", MISSING),
        ({"anima_discrete_flow_shift": 3.0}, "objective.discrete_flow_shift", 3.0),
        ({"lora_network_weights": "a.safetensors", "network_weights": ""}, "network.network_weights", "a.safetensors"),
        ({"conv_dim": 8}, "network.conv_dim", 0),
        ({"LoRA_type": "LyCORIS/LoKr", "factor": 8, "conv_dim": 4}, "network.factor", 8),
        ({"LoRA_type": "LyCORIS/LoKr", "conv_dim": 4}, "network.conv_dim", 4),
        ({"LoRA_type": "LyCORIS/LoKr"}, "network.algorithm", "lokr"),
        ({"LoRA_type": "LyCORIS/BOFT", "constrain": 0.5}, "network.constraint", 0.5),
        ({"LoRA_type": "Kohya LoKr", "factor": 4}, "network.factor", 4),
        ({"LoRA_type": "Kohya LoHa"}, "network.algorithm", "loha"),
        ({"LoRA_type": "LyCORIS/Native Fine-Tuning"}, "network.algorithm", "full"),
        ({"additional_parameters": "--network_dim 64 --loss_type=l1"}, "network.network_dim", 64),
    ],
)
def test_fields_by_what_the_form_makes_of_them(fields: dict[str, Any], place: str, expected: object):
    account = form(**fields)
    assert ours(account, place) == expected
    assert len({line.key for line in account.lines}) == len(account.lines)
    config_of(account)


def test_flags_in_additional_parameters_have_lines_of_their_own():
    account = form(additional_parameters="--network_dim 64")
    assert line(account, "network_dim").fate is KeyStatus.NO_EFFECT
    assert line(account, "additional_parameters: --network_dim").ours == "network.network_dim"


def test_what_a_preset_leaves_out_has_the_default_of_the_form():
    account = import_kohya_gui({"LoRA_type": "Standard", "network_dim": 4}, Path("preset.json"))
    assert ours(account, "network.network_dim") == 4
    assert ours(account, "optimizer.learning_rate") == 1e-4
    assert ours(account, "optimizer.optimizer_type") == "AdamW8bit"
    assert ours(account, "general.enable_bucket") is True
    assert ours(account, "training.max_train_epochs") == 1
    assert "CONFIG-FAMILY-UNSAID" in codes(account)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({"sdxl": True}, "Stable Diffusion XL"),
        ({"flux1_checkbox": True, "LoRA_type": "Flux1"}, "FLUX.1"),
        ({"v2": True}, "Stable Diffusion 2"),
        ({}, "Stable Diffusion 1.5 or 2"),
    ],
)
def test_forms_of_other_families_are_an_error(fields: dict[str, Any], family: str):
    document = {"pretrained_model_name_or_path": "m", "LoRA_type": "Standard", **fields}
    account = import_kohya_gui(document, Path("gui.json"))
    (finding,) = [finding for finding in account.findings if finding.code == "CONFIG-OTHER-FAMILY"]
    assert finding.level is Level.ERROR
    assert finding.evidence["family"] == family


def test_an_unknown_field_is_reported():
    account = form(netwrk_dim=8)
    assert line(account, "netwrk_dim").fate is KeyStatus.UNSUPPORTED
    assert "'network_dim'" in line(account, "netwrk_dim").note
    assert codes(account).count("CONFIG-UNKNOWN-KEY") == 1


FACTS = read_facts("kohya_gui")
KNOWN = sorted(
    {
        *FACTS["name_by_field"],
        *FACTS["family_by_checkbox"],
        *read_unused_fields(),
        *FACTS["lycoris_argument_by_field"],
        *FACTS["shared_network_fields"].split(),
        *KOHYA_GUI_TRANSLATORS,
        *ANIMA,
    }
    | {name for name in read_kohya_keys() if name.isidentifier()}
)


def test_about_as_many_fields_are_known_as_the_form_has():
    assert len(KNOWN) >= 250


@given(st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=25))
@settings(deadline=None, max_examples=60)
def test_every_field_has_exactly_one_line_whatever_its_value(document: dict[str, Any]):
    document = {name: value for name, value in document.items() if name != "dataset_config"}
    account = import_kohya_gui(document, Path("gui.json"))
    counted = Counter(line.key for line in account.lines)
    assert {key: counted[key] for key in document} == dict.fromkeys(document, 1)
