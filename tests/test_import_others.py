"""ai-toolkit, OneTrainer, SimpleTuner and diffusion-pipe: every key accounted for, and meanings that differ."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.datasets import Dataset, DatasetOptions, Subset
from finitune.config.imported_config import ImportedConfig, KeyStatus
from finitune.config.schema import CONFIG_SECTION_NAMES, TrainConfig
from finitune.config.toml_text import format_key_path
from finitune.importers import mapping
from finitune.importers.ai_toolkit import import_ai_toolkit, read_ai_toolkit_table
from finitune.importers.diffusion_pipe import import_diffusion_pipe, read_diffusion_pipe_table
from finitune.importers.foreign_text import parse_foreign_text, parse_foreign_yaml
from finitune.importers.kohya_datasets import read_kohya_keys
from finitune.importers.onetrainer import import_onetrainer, read_onetrainer_table
from finitune.importers.simpletuner import import_simpletuner, read_simpletuner_table
from finitune.report import Level
from tests import foreign_configs as made

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "configs" / "ai-toolkit"
SECOND: Mapping[str, Any] = {
    "concepts.json": made.ONETRAINER_CONCEPTS,
    "config/multidatabackend.json": made.SIMPLETUNER_BACKENDS,
    "moss_dataset.toml": parse_foreign_text(made.DIFFUSION_PIPE_DATASET, Path("d.toml")).document,
    "lycoris.json": {"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 16, "multiplier": 1.0},
}
DOCUMENTS: dict[str, Any] = {
    "ai-toolkit": parse_foreign_yaml(made.AI_TOOLKIT, Path("moss.yaml")),
    "OneTrainer": made.ONETRAINER,
    "SimpleTuner": made.SIMPLETUNER,
    "diffusion-pipe": parse_foreign_text(made.DIFFUSION_PIPE, Path("moss.toml")).document,
}
SECOND_FILES = {"OneTrainer": "concepts.json", "SimpleTuner": "config/multidatabackend.json"}
SECOND_FILES["diffusion-pipe"] = "moss_dataset.toml"
TABLES = {
    "ai-toolkit": read_ai_toolkit_table().keys,
    "OneTrainer": read_onetrainer_table().keys,
    "SimpleTuner": read_simpletuner_table().keys,
    "diffusion-pipe": read_diffusion_pipe_table().keys,
    "sd-scripts": read_kohya_keys(),
}
IMPORT: dict[str, Callable[[Any], ImportedConfig]] = {
    "ai-toolkit": lambda document: import_ai_toolkit(document, "moss.yaml"),
    "OneTrainer": lambda document: import_onetrainer(document, "moss.json", SECOND.get),
    "SimpleTuner": lambda document: import_simpletuner(document, "config.json", SECOND.get),
    "diffusion-pipe": lambda document: import_diffusion_pipe(document, "moss.toml", SECOND.get),
}


def imported(program: str, **changes: Any) -> ImportedConfig:
    """The example of a program, with top-level options changed."""
    return IMPORT[program]({**copy.deepcopy(DOCUMENTS[program]), **changes})


def job(**changes: Any) -> ImportedConfig:
    """ai-toolkit's example with options changed: train__lr=1."""
    document = copy.deepcopy(DOCUMENTS["ai-toolkit"])
    for name, value in changes.items():
        section, _, key = name.partition("__")
        document["config"]["process"][0][section][key] = value
    return IMPORT["ai-toolkit"](document)


def option(account: ImportedConfig, place: str) -> Any:
    section, _, key = place.partition(".")
    options: Any = account.document.get(section, {})
    return options.get(key)


def line(account: ImportedConfig, key: str) -> Any:
    (found,) = [line for line in account.lines if line.key == key]
    return found


@pytest.mark.parametrize("program", DOCUMENTS)
def test_every_leaf_has_one_line(program: str):
    document = DOCUMENTS[program]
    expected = [format_key_path(path) for path, _, _ in mapping.iterate_config_leaves(document)]
    if second := SECOND_FILES.get(program):
        first = {"OneTrainer": "concepts", "SimpleTuner": "data_backend_config"}.get(program, "dataset")
        expected += [
            f"{first}{dotted(format_key_path(path))}" for path, _, _ in mapping.iterate_config_leaves(SECOND[second])
        ]
    assert Counter(line.key for line in imported(program).lines) == Counter(expected)


def dotted(path: str) -> str:
    return path if path.startswith("[") else f".{path}"


@pytest.mark.parametrize("program", DOCUMENTS)
def test_lines_are_complete(program: str):
    account = imported(program)
    for entry in account.lines:
        assert entry.note or entry.fate is KeyStatus.TAKEN, entry
        assert not entry.ours or entry.fate in (KeyStatus.TAKEN, KeyStatus.CHANGED), entry
    assert {KeyStatus.TAKEN, KeyStatus.CHANGED, KeyStatus.NO_EFFECT} <= {entry.fate for entry in account.lines}
    assert len(account.table().rows) == len(account.lines)


@pytest.mark.parametrize("program", TABLES)
def test_tables_name_options_that_exist(program: str):
    sections: dict[str, Any] = {name: TrainConfig.model_fields[name].annotation for name in CONFIG_SECTION_NAMES}
    sections |= {"general": DatasetOptions, "dataset": Dataset, "subset": Subset}
    known = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    for their, row in TABLES[program].items():
        if row.section in sections:
            assert ".".join(f"{row.section}.{row.key}".split(".")[:2]) in known, their
        else:
            assert row.section in ("", "listed", "sample", "datasets"), their


@pytest.mark.skipif(importlib.util.find_spec("finitune.config.read") is None, reason="config.read is not written yet")
@pytest.mark.parametrize("program", DOCUMENTS)
def test_documents_are_valid(program: str):
    from finitune.config.read import validate_config

    config, findings = validate_config(dict(imported(program).document), program)
    assert config.model.pretrained_model_name_or_path.startswith("models/anima")
    assert not [finding for finding in findings if finding.level is Level.ERROR]


@pytest.mark.parametrize("program", DOCUMENTS)
def test_an_anima_example_has_no_errors(program: str):
    findings = imported(program).findings
    assert [finding.code for finding in findings] == ["CONFIG-DEFAULTS"] * len(findings)


@pytest.mark.parametrize(
    ("program", "change", "key"),
    [
        ("ai-toolkit", {"jop": "extension"}, "jop"),
        ("OneTrainer", {"learning_rat": 1}, "learning_rat"),
        ("SimpleTuner", {"--max_train_step": 1}, "max_train_step"),
        ("diffusion-pipe", {"gradient_cliping": 1.0}, "gradient_cliping"),
    ],
)
def test_unknown_keys_are_found(program: str, change: dict[str, Any], key: str):
    account = imported(program, **change)
    (finding,) = [finding for finding in account.findings if finding.code == "CONFIG-UNKNOWN-KEY"]
    assert finding.level is Level.WARNING and key in finding.subject and "Did you mean" in finding.message
    assert sum(entry.key.lstrip("-") == key and entry.fate is KeyStatus.UNSUPPORTED for entry in account.lines) == 1


@pytest.mark.parametrize(
    ("account", "family"),
    [
        (lambda: job(model__arch="flux"), "flux"),
        (lambda: imported("OneTrainer", model_type="FLUX_DEV_1"), "FLUX_DEV_1"),
        (lambda: imported("SimpleTuner", **{"--model_family": "sd3"}), "sd3"),
        (lambda: imported("diffusion-pipe", model={"type": "wan"}), "wan"),
    ],
)
def test_other_families_are_errors(account: Callable[[], ImportedConfig], family: str):
    made_of = account()
    (finding,) = [finding for finding in made_of.findings if finding.code == "CONFIG-OTHER-FAMILY"]
    assert finding.level is Level.ERROR and finding.evidence == {"family": family}
    assert len(made_of.lines) > 30


@pytest.mark.skipif(not REAL.is_dir(), reason="the real configurations are not here")
@pytest.mark.parametrize("name", ["flux_24gb", "lumina", "qwen_image_24gb"])
def test_real_ai_toolkit_files(name: str):
    path = REAL / f"train_lora_{name}.yaml"
    document = parse_foreign_yaml(path.read_text(encoding="utf-8"), path)
    account = import_ai_toolkit(document, path)
    keys = [format_key_path(where) for where, _, _ in mapping.iterate_config_leaves(document)]
    assert Counter(line.key for line in account.lines) == Counter(keys)
    assert {f.code for f in account.findings} == {"CONFIG-OTHER-FAMILY", "CONFIG-DEFAULTS"}
    assert option(account, "optimizer.learning_rate") == 1e-4
    assert [made["resolution"] for made in account.document["datasets"]] == [512, 768, 1024]  # type: ignore[attr-defined,index]


def test_ai_toolkit_meanings():
    account = imported("ai-toolkit")
    assert option(account, "training.max_train_steps") == 300, "micro-batches are counted there"
    assert option(account, "saving.save_every_n_steps") == 50
    assert option(account, "network.network_alpha") == option(account, "network.network_dim") == 16
    assert option(account, "network.only_patterns") == [".*attn1.*", r".*ff\.net.*"]
    assert option(account, "optimizer.learning_rate") == 1.0
    assert option(account, "optimizer.optimizer_args") == {"weight_decay": 0.02, "d_coef": 0.1}
    assert option(account, "preview.sample_prompts") == ["mosskin in rain --d 11 --n blurry", "moss_v1 at night"]
    assert option(account, "saving.output_dir") == "runs/moss_v1"
    proper = job(train__gradient_accumulation=4)
    assert option(proper, "training.max_train_steps") == 1200


@pytest.mark.parametrize(
    ("kind", "expected", "fate"),
    [
        ("sigmoid", ("sigmoid", None, None), KeyStatus.TAKEN),
        ("linear", ("uniform", None, None), KeyStatus.TAKEN),
        ("shift", ("sigma", "none", 3.0), KeyStatus.CHANGED),
        ("flux_shift", ("flux_shift", None, None), KeyStatus.CHANGED),
        ("weighted", (None, None, None), KeyStatus.UNSUPPORTED),
    ],
)
def test_ai_toolkit_timesteps(kind: str, expected: tuple[object, ...], fate: KeyStatus):
    account = job(train__timestep_type=kind)
    places = ("timestep_sampling", "weighting_scheme", "discrete_flow_shift")
    assert tuple(option(account, f"objective.{place}") for place in places) == expected
    assert line(account, "config.process[0].train.timestep_type").fate is fate


def test_onetrainer_meanings():
    account = imported("OneTrainer")
    assert option(account, "training.max_train_epochs") == 10, "two sizes, each picture at both"
    assert option(account, "optimizer.ema_decay") == pytest.approx(0.99**0.5)
    assert option(account, "optimizer.max_grad_norm") == 0.0, "null is no clipping"
    assert option(account, "objective.sigmoid_scale") == 1.5
    assert (option(account, "preview.sample_every_n_epochs"), option(account, "saving.save_every_n_steps")) == (2, 500)
    folders = [made["subsets"][0]["image_dir"] for made in account.document["datasets"]]  # type: ignore[attr-defined,index]
    assert folders == ["data/moss", "data/moss", "data/others", "data/others"]
    absent = import_onetrainer({"model_type": "ANIMA"}, "x.json")
    assert option(absent, "network.network_alpha") == 1.0
    assert option(absent, "objective.timestep_sampling") == "uniform"
    assert "CONFIG-SECOND-FILE" in {finding.code for finding in absent.findings}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("LOKR", ("lokr", 4, 8)), ("LORA", ("lora", 16, None)), ("OFT_2", ("oft", 32, None))],
)
def test_onetrainer_options_of_one_kind_of_adapter(kind: str, expected: tuple[object, ...]):
    own = {"peft_type": kind, "lora_rank": 16, "lokr_dim": 4, "lokr_decompose_factor": 8, "oft_block_size": 32}
    account = imported("OneTrainer", **own)
    assert tuple(option(account, f"network.{key}") for key in ("algorithm", "network_dim", "factor")) == expected
    idle = line(account, "lokr_dim" if kind != "LOKR" else "oft_block_size")
    assert idle.fate is KeyStatus.NO_EFFECT and idle.note == ("for LOKR" if kind != "LOKR" else "for OFT_2")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"timestep_distribution": "UNIFORM", "timestep_shift": 1.0}, {"timestep_sampling": "uniform"}),
        ({"timestep_distribution": "UNIFORM"}, {"timestep_sampling": "sigma", "weighting_scheme": "none"}),
        ({"noising_bias": 0.4}, {"timestep_sampling": "sigma", "logit_mean": -0.4, "logit_std": 1.5}),
        ({"timestep_distribution": "HEAVY_TAIL"}, {"weighting_scheme": "mode", "mode_scale": 0.5}),
        ({"timestep_distribution": "INVERTED_PARABOLA"}, {"timestep_sampling": "uniform"}),
    ],
)
def test_onetrainer_timesteps(options: dict[str, Any], expected: dict[str, Any]):
    objective: Any = imported("OneTrainer", **options).document["objective"]
    assert {key: objective[key] for key in expected} == expected


def test_simpletuner_meanings():
    account = imported("SimpleTuner")
    first, second = account.document["datasets"]  # type: ignore[misc]
    assert first["subsets"][0]["num_repeats"] == 5, "n extra there, n + 1 in all"
    assert first["resolution"] == 1024 and first["subsets"][0]["conditioning_data_dir"] == "data/masks"
    assert second["subsets"][0]["class_tokens"] == "a stone"
    assert option(account, "network.network_alpha") == 32
    assert option(account, "optimizer.optimizer_args") == {"weight_decay": 0.05, "eps": 1e-7}
    uniform = imported("SimpleTuner", **{"--flow_use_uniform_schedule": True})
    assert option(uniform, "objective.timestep_sampling") == "sigma"
    lycoris = imported("SimpleTuner", **{"--lora_type": "lycoris", "--lycoris_config": "lycoris.json"})
    assert (option(lycoris, "network.algorithm"), option(lycoris, "network.full_matrix")) == ("lokr", True)
    assert option(lycoris, "network.factor") == 16


def test_diffusion_pipe_meanings():
    account = imported("diffusion-pipe")
    assert option(account, "network.network_alpha") == 24, "alpha is the rank there"
    assert option(account, "network.train_llm_adapter") is False, "a rate of 0 switches the conditioner off"
    assert option(account, "objective.timestep_sampling") == "shift"
    sizes = [(made["resolution"], made.get("batch_size")) for made in account.document["datasets"]]  # type: ignore[attr-defined]
    assert sizes == [(512, 4), (1024, 1), (768, None)]
    adapter = {"type": "lokr", "rank": 1_000_000, "decompose_factor": 4, "alpha": 3}
    full = imported("diffusion-pipe", adapter=adapter)
    assert option(full, "network.full_matrix") is True
    assert line(full, "adapter.alpha").fate is KeyStatus.UNSUPPORTED


@pytest.mark.parametrize("program", DOCUMENTS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_no_value_breaks_the_account(program: str, data: st.DataObject):
    """Whatever stands at a key, it has its line; nothing raises."""
    document = copy.deepcopy(DOCUMENTS[program])
    paths = [path for path, _, _ in mapping.iterate_config_leaves(document)]
    junk = st.one_of(st.none(), st.text(max_size=5), st.integers(), st.floats(), st.booleans(), st.lists(st.integers()))
    path = data.draw(st.sampled_from(paths))
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = data.draw(junk)
    account = IMPORT[program](document)
    assert sum(line.key == format_key_path(path) for line in account.lines) == 1
    json.dumps(account.document)


def test_secrets_are_not_told():
    secrets = {"secrets": {"huggingface_token": "hf_abc"}, "wandb_api_key": "k"}
    account = imported("OneTrainer", **secrets)
    assert {line(account, key).value for key in ("secrets.huggingface_token", "wandb_api_key")} == {"(secret)"}
    assert "hf_abc" not in repr(account) and line(account, "concepts[0].text.keep_tags_count").value == 2
