"""kohya's training TOML, command line and dataset TOML: every key accounted for, every meaning kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.read import validate_config
from finitune.errors import UsageError
from finitune.importers.kohya import import_kohya, import_kohya_flags
from finitune.importers.kohya_datasets import read_kohya_keys

SHARED = Path(__file__).parents[2] / "shared"
BASE = {
    "pretrained_model_name_or_path": "anima.safetensors",
    "output_dir": "out",
    "network_module": "networks.lora_anima",
    "network_train_unet_only": True,
}
LYCORIS = {"network_module": "lycoris.kohya"}
MISSING = object()


def imported(**keys: Any) -> ImportedConfig:
    return import_kohya({**BASE, **keys}, Path("train.toml"))


def line(account: ImportedConfig, key: str) -> ImportedKey:
    (found,) = [line for line in account.lines if line.key == key]
    return found


def ours(account: ImportedConfig, place: str) -> Any:
    section, _, key = place.partition(".")
    options: Any = account.document.get(section, {})
    return options.get(key, MISSING)


def codes(account: ImportedConfig) -> list[str]:
    return [finding.code for finding in account.findings]


def config_of(account: ImportedConfig) -> Any:
    return validate_config(account.document)[0]


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("qwen3", "q.safetensors", "model.qwen3"),
        ("network_dim", 32, "network.network_dim"),
        ("timestep_sampling", "shift", "objective.timestep_sampling"),
        ("discrete_flow_shift", 3.0, "objective.discrete_flow_shift"),
        ("max_grad_norm", 0.5, "optimizer.max_grad_norm"),
        ("unet_lr", 1e-4, "optimizer.learning_rate"),
        ("lr_scheduler", "cosine", "optimizer.lr_scheduler"),
        ("lr_warmup_steps", 100, "optimizer.lr_warmup_steps"),
        ("lr_warmup_steps", 0.05, "optimizer.lr_warmup_steps"),
        ("max_train_steps", 900, "training.max_train_steps"),
        ("gradient_checkpointing", True, "training.gradient_checkpointing"),
        ("save_every_n_epochs", 2, "saving.save_every_n_epochs"),
        ("metadata_trigger_phrase", "sks", "saving.trigger_phrase"),
        ("sample_every_n_steps", 50, "preview.sample_every_n_steps"),
        ("sample_prompts", "prompts.txt", "preview.sample_prompts"),
        ("validation_split", 0.1, "general.validation_split"),
        ("shuffle_caption", True, "general.shuffle_caption"),
        ("enable_bucket", True, "general.enable_bucket"),
        ("optimizer_type", "Prodigy", "optimizer.optimizer_type"),
    ],
)
def test_keys_of_the_same_meaning_are_taken(key: str, value: object, place: str):
    account = imported(**{key: value})
    assert line(account, key).fate is KeyStatus.TAKEN
    assert line(account, key).ours == place
    assert ours(account, place) == value
    config_of(account)


@pytest.mark.parametrize(
    ("keys", "place", "expected", "fate"),
    [
        ({"mixed_precision": "fp16"}, "model.precision", "auto", KeyStatus.CHANGED),
        ({"mixed_precision": "bf16"}, "model.precision", "bf16", KeyStatus.TAKEN),
        ({"mixed_precision": "no"}, "model.precision", "fp32", KeyStatus.TAKEN),
        ({"fp8_base": True}, "model.storage", "fp8", KeyStatus.CHANGED),
        ({"save_precision": "float"}, "saving.save_precision", "fp32", KeyStatus.TAKEN),
        ({"network_train_unet_only": False}, "network.train_text_encoder", True, KeyStatus.TAKEN),
        (
            {"network_train_unet_only": False, "cache_text_encoder_outputs": True},
            "network.train_text_encoder",
            False,
            None,
        ),
        ({"blocks_to_swap": 8}, "training.offload_blocks", 8, KeyStatus.CHANGED),
        ({"learning_rate": 1e-3, "unet_lr": 1e-4}, "optimizer.learning_rate", 1e-4, KeyStatus.CHANGED),
        ({"resolution": "512,768"}, "general.resolution", [512, 768], KeyStatus.TAKEN),
        ({"resolution": "1024"}, "general.resolution", 1024, KeyStatus.TAKEN),
        ({"bucket_reso_steps": 8}, "general.bucket_reso_steps", 16, KeyStatus.CHANGED),
        ({"save_last_n_epochs": 3}, "saving.save_last_n", 3, KeyStatus.CHANGED),
        ({"save_last_n_steps": 200, "save_every_n_steps": 100}, "saving.save_last_n", 3, KeyStatus.CHANGED),
        ({"save_last_n_steps": 150, "save_every_n_steps": 100}, "saving.save_last_n", 2, KeyStatus.CHANGED),
        ({"max_train_steps": 500, "max_train_epochs": 4}, "training.max_train_steps", MISSING, KeyStatus.NO_EFFECT),
        ({"lr_warmup_steps": "10%"}, "optimizer.lr_warmup_steps", 0.1, KeyStatus.CHANGED),
        ({"lr_warmup_steps": 100.0}, "optimizer.lr_warmup_steps", 100, KeyStatus.CHANGED),
        (
            {"lr_scheduler": "warmup_stable_decay"},
            "optimizer.lr_scheduler",
            "constant_with_warmup",
            KeyStatus.UNSUPPORTED,
        ),
        ({"lr_scheduler_type": "CosineAnnealingLR"}, "optimizer.lr_scheduler", "cosine", KeyStatus.UNSUPPORTED),
        (
            {"optimizer_type": "bitsandbytes.optim.AdEMAMix8bit"},
            "optimizer.optimizer_type",
            "AdEMAMix8bit",
            KeyStatus.TAKEN,
        ),
        ({"optimizer_type": "AdamWScheduleFree"}, "optimizer.optimizer_type", "ScheduleFreeAdamW", KeyStatus.TAKEN),
        ({"optimizer_type": ""}, "optimizer.optimizer_type", MISSING, KeyStatus.NO_EFFECT),
        ({"use_8bit_adam": True}, "optimizer.optimizer_type", "AdamW8bit", KeyStatus.CHANGED),
        (
            {"text_encoder_lr": [1e-5], "network_train_unet_only": False},
            "optimizer.text_encoder_lr",
            1e-5,
            KeyStatus.TAKEN,
        ),
        ({"text_encoder_lr": 1e-5}, "optimizer.text_encoder_lr", MISSING, KeyStatus.NO_EFFECT),
        ({"scale_weight_norms": 0}, "network.scale_weight_norms", MISSING, KeyStatus.NO_EFFECT),
        ({"logging_dir": "logs"}, "logging.log_with", "tensorboard", KeyStatus.CHANGED),
        ({"log_with": "wandb"}, "logging.log_with", MISSING, KeyStatus.UNSUPPORTED),
        ({"save_state_on_train_end": True}, "saving.save_state", True, KeyStatus.CHANGED),
        ({"save_state_on_train_end": False, "save_state": True}, "saving.save_state", True, KeyStatus.NO_EFFECT),
        ({"caption_extention": ".cap"}, "general.caption_extension", ".cap", KeyStatus.TAKEN),
        (
            {"positive_prompts": "a cat", "negative_prompts": "dog"},
            "preview.sample_prompts",
            ["a cat --n dog"],
            KeyStatus.TAKEN,
        ),
    ],
)
def test_conversions(keys: dict[str, Any], place: str, expected: object, fate: KeyStatus | None):
    account = imported(**keys)
    assert ours(account, place) == expected
    if fate is not None:
        found = line(account, next(iter(keys)))
        assert found.fate is fate
        assert found.note or fate is KeyStatus.TAKEN
    config_of(account)


@pytest.mark.parametrize("key", ["full_fp16", "full_bf16", "dim_from_weights", "deepspeed", "debug_dataset"])
def test_what_we_do_not_have_says_what_to_do_and_is_quiet_when_off(key: str):
    account = imported(**{key: True})
    assert line(account, key).fate is KeyStatus.UNSUPPORTED
    assert "CONFIG-UNSUPPORTED-KEY" in codes(account)
    assert line(account, key).note
    off = imported(**{key: False})
    assert line(off, key).fate is KeyStatus.NO_EFFECT
    assert "CONFIG-UNSUPPORTED-KEY" not in codes(off)


def test_full_fp16_says_why():
    assert "NaN" in line(imported(full_fp16=True), "full_fp16").note


@pytest.mark.parametrize("key", ["min_timestep", "noise_offset", "clip_skip", "min_snr_gamma", "sample_sampler"])
def test_what_sd_scripts_ignores_for_anima_has_no_effect(key: str):
    account = imported(**{key: 1})
    assert line(account, key).fate is KeyStatus.NO_EFFECT
    assert "CONFIG-UNSUPPORTED-KEY" not in codes(account)


@pytest.mark.parametrize("key", ["xformers", "sdpa", "lowram", "max_data_loader_n_workers", "no_half_vae"])
def test_what_is_not_needed_does_not_warn(key: str):
    account = imported(**{key: 8})
    assert line(account, key).note.startswith("not needed here")
    assert "CONFIG-UNSUPPORTED-KEY" not in codes(account)


def test_absent_keys_have_sd_scripts_defaults_not_ours():
    account = import_kohya({"pretrained_model_name_or_path": "a", "output_dir": "o"}, Path("t.toml"))
    config = config_of(account)
    assert (config.network.network_dim, config.network.network_alpha) == (4, 1.0)
    assert (config.optimizer.learning_rate, config.training.max_train_steps) == (2e-6, 1600)
    assert config.network.train_text_encoder
    assert not config.saving.save_state
    assert not config.general.enable_bucket
    assert (config.model.precision, config.saving.output_name) == ("fp32", "last")
    assert [line.key for line in account.lines] == ["pretrained_model_name_or_path", "output_dir"]
    assert "CONFIG-DEFAULTS" in codes(account)


def test_an_unknown_key_is_reported_with_the_nearest():
    account = imported(netwrok_alpha=8)
    found = line(account, "netwrok_alpha")
    assert found.fate is KeyStatus.UNSUPPORTED
    assert "no such key in sd-scripts" in found.note
    assert "'network_alpha'" in found.note
    assert codes(account).count("CONFIG-UNKNOWN-KEY") == 1


def test_sections_count_for_nothing_and_a_later_key_wins():
    account = import_kohya({"one": {**BASE, "network_dim": 8}, "two": {"network_dim": 16}}, Path("t.toml"))
    assert ours(account, "network.network_dim") == 16
    assert line(account, "one.network_dim").fate is KeyStatus.NO_EFFECT
    assert "CONFIG-KEY-TWICE" in codes(account)
    same = import_kohya({"one": {**BASE, "network_dim": 8}, "two": {"network_dim": 8}}, Path("t.toml"))
    assert "CONFIG-KEY-TWICE" not in codes(same)


@pytest.mark.parametrize(
    ("key", "text", "place", "value"),
    [
        ("network_dim", "8", "network.network_dim", 8),
        ("learning_rate", "1e-4", "optimizer.learning_rate", 1e-4),
        ("gradient_checkpointing", "True", "training.gradient_checkpointing", True),
        ("seed", "42", "training.seed", 42),
    ],
)
def test_values_as_text_are_read_and_said(key: str, text: str, place: str, value: object):
    account = imported(**{key: text})
    assert ours(account, place) == value
    assert line(account, key).fate is KeyStatus.CHANGED
    assert "text" in line(account, key).note
    config_of(account)


@pytest.mark.parametrize(
    ("network", "arguments", "place", "expected"),
    [
        (LYCORIS, ["algo=lokr", "factor=8"], "network.factor", 8),
        (LYCORIS, ["algo=lokr"], "network.algorithm", "lokr"),
        (LYCORIS, ["algo=diag-oft", "constraint=0.1"], "network.constraint", 0.1),
        (LYCORIS, ["algo=boft"], "network.algorithm", "boft"),
        (LYCORIS, ["algo=full"], "network.algorithm", "full"),
        (LYCORIS, ["algo=dylora"], "network.algorithm", "lora"),
        (LYCORIS, ["algo=lora", "dora_wd=True"], "network.dora", True),
        (LYCORIS, ["algo=loha", "factor=8"], "network.factor", MISSING),
        (LYCORIS, ["algo=loha", "conv_dim=4", "conv_alpha=2"], "network.conv_dim", 4),
        (LYCORIS, ["algo=loha", "conv_dim=undefined"], "network.conv_dim", MISSING),
        (LYCORIS, ["algo=locon", "use_cp=True", "use_tucker=False"], "network.use_tucker", True),
        (LYCORIS, ["preset=attn-only"], "network.only_patterns", [".*_attn.*"]),
        (LYCORIS, ["algo=lokr", "unbalanced_factorization=True"], "network.unbalanced", True),
        ({"network_module": "networks.loha"}, [], "network.algorithm", "loha"),
        ({"network_module": "networks.lokr"}, ["factor=4"], "network.factor", 4),
        ({}, ["train_llm_adapter=True"], "network.train_llm_adapter", True),
        ({}, ["exclude_patterns=['.*mlp.*', '.*q,k.*']"], "network.exclude_patterns", [".*mlp.*", ".*q,k.*"]),
        ({}, ["network_reg_dims=.*mlp.*=8,.*attn.*=16"], "network.network_reg_dims", {".*mlp.*": 8, ".*attn.*": 16}),
        ({}, ["network_reg_lrs=.*mlp.*=1e-4"], "network.network_reg_lrs", {".*mlp.*": 1e-4}),
        ({}, ["rank_dropout=0.1", "module_dropout=0.2"], "network.module_dropout", 0.2),
        ({}, ["loraplus_lr_ratio=4", "loraplus_unet_lr_ratio=8"], "optimizer.loraplus_lr_ratio", 8),
        ({}, ["loraplus_lr_ratio=0"], "optimizer.loraplus_lr_ratio", MISSING),
        ({}, [], "network.conv_dim", 0),
    ],
)
def test_network_arguments(network: dict[str, Any], arguments: list[str], place: str, expected: object):
    account = imported(**network, network_args=arguments)
    assert ours(account, place) == expected
    config_of(account)
    names = [f"network_args.{item.partition('=')[0]}" for item in arguments]
    assert all(line(account, name) for name in ["network_args", *names])


def test_network_arguments_that_cannot_be_read_are_an_error_and_the_account_goes_on():
    account = imported(network_args=["8", "conv_dim=4"], seed=1)
    assert line(account, "network_args").fate is KeyStatus.UNSUPPORTED
    assert any(code.startswith("ARGUMENT") for code in codes(account))
    assert ours(account, "training.seed") == 1
    unknown = imported(network_args=["facter=8"])
    assert "'factor'" in line(unknown, "network_args.facter").note


def test_optimizer_arguments():
    account = imported(optimizer_type="SGDNesterov", optimizer_args=["weight_decay=0.01", "betas=0.9,0.98"])
    assert ours(account, "optimizer.optimizer_type") == "SGD"
    arguments = {"nesterov": True, "momentum": 0.9, "weight_decay": 0.01, "betas": (0.9, 0.98)}
    assert ours(account, "optimizer.optimizer_args") == arguments
    assert line(account, "optimizer_args").value == ["weight_decay=0.01", "betas=0.9,0.98"]


@pytest.mark.parametrize(
    "keys",
    [
        {"network_module": "networks.lora_flux"},
        {"network_module": "networks.lora_sd3"},
        {"v2": True},
        {"clip_l": "clip.safetensors"},
        {"model_train_type": "sdxl-lora"},
    ],
)
def test_other_families_are_an_error_with_a_complete_account(keys: dict[str, Any]):
    account = imported(**keys)
    assert codes(account).count("CONFIG-OTHER-FAMILY") == 1
    assert {line.key for line in account.lines} == {*BASE, *keys}
    assert "CONFIG-OTHER-FAMILY" not in codes(imported(model_train_type="anima-lora"))


def test_a_form_of_lora_scripts_is_read_with_its_sections():
    data = {**BASE, "model_train_type": "anima-lora", "lora_type": "lokr", "network_module": "lycoris.kohya"}
    data |= {"lycoris_algo": "lokr", "lokr_factor": 8, "conv_dim": "undefined", "resolution": "1024,1024"}
    data |= {"sample_width": 512, "sample_height": 768, "prefer_json_caption": False}
    document = {"metadata": {"name": "mine", "author": "me", "train_type": "anima-lora"}, "data": data}
    account = import_kohya(document, Path("preset.toml"))
    config = config_of(account)
    assert (config.network.algorithm, config.network.factor, config.network.conv_dim) == ("lokr", 8, None)
    assert config.preview.sample_size == "512x768"
    assert "CONFIG-UNKNOWN-KEY" not in codes(account)
    assert line(account, "metadata.name").fate is KeyStatus.NO_EFFECT


def test_the_default_ending_of_captions_means_that_text_files_count_too():
    account = imported(caption_extension=".caption")
    assert line(account, "caption_extension").fate is KeyStatus.CHANGED
    assert ours(account, "general.caption_extension") is MISSING


def test_a_value_of_another_kind_is_an_error():
    account = imported(lr_warmup_steps=["a"], resolution="wide")
    with pytest.raises(UsageError, match="resolution"):
        config_of(account)


def test_secrets_are_not_shown():
    account = imported(wandb_api_key="abc123", huggingface_token="hf_x")
    assert "abc123" not in repr(account)
    assert "hf_x" not in repr(account)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(0, 2), st.sampled_from(["", "8", "x", "a=1"])
)


@given(
    st.dictionaries(st.sampled_from([name for name in read_kohya_keys() if name.isidentifier()]), VALUES, max_size=25)
)
@settings(deadline=None, max_examples=60)
def test_every_key_has_exactly_one_line_whatever_its_value(document: dict[str, Any]):
    document = {name: value for name, value in document.items() if name not in ("dataset_config", "in_json")}
    account = import_kohya(document, Path("t.toml"))
    top = [line.key for line in account.lines if not line.key.startswith("network_args.")]
    assert sorted(top) == sorted(document)


def flags_of(text: str) -> set[str]:
    """The flags that section 3 of the facts names, their short forms written out."""
    text = re.sub(r"Per-prompt flags.*?ignored\.", "", text, flags=re.DOTALL)
    found: set[str] = set()
    for stem, choices, tail in re.findall(r"--(\w+)(?:\{([\w,]+)\})?((?:\(_\w+\))*)", text):
        names = [f"{stem}{choice}" for choice in choices.split(",")] if choices else [stem]
        found |= {name + ending for name in names for ending in ("", *re.findall(r"\((\w+)\)", tail))}
    return {name for name in found if not name.endswith("_")}


def test_every_flag_of_anima_train_network_is_in_the_table():
    facts = SHARED / "reference" / "anima.md"
    if not facts.exists():
        pytest.skip("the facts are not here")
    section = facts.read_text(encoding="utf-8").partition("\n## 3.")[2].partition("\n## 4.")[0]
    names = flags_of(section)
    assert len(names) > 200
    assert sorted(names - read_kohya_keys().keys()) == []
    for name in names - {"config_file", "dataset_config"}:
        account = import_kohya_flags(f"anima_train_network.py --{name} 1")
        assert line(account, f"--{name}").note or line(account, f"--{name}").ours
