"""ai-toolkit's YAML or JSON: a job with processes, of which the first one is imported.

It reads each key with `kwargs.get`, so that an unknown one is ignored there. `[name]` in any text stands for the job's
name. Source: ostris/ai-toolkit toolkit/config.py and toolkit/config_modules.py (MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.importers.ai_toolkit_keys import AI_TOOLKIT_KEYS
from finitune.importers.conversions import (
    build_datasets_by_resolution,
    format_prompt_line,
    set_lokr_unit_scale,
    to_whole_number,
    wrap_in_list,
)
from finitune.importers.mapping import ImportAccount, get_nested_mapping, iterate_config_leaves

_PROGRAM_NAME = "ai-toolkit"
_TRAINED_FAMILIES = ("anima",)
_FAMILY_FLAGS = ("flux", "lumina2", "xl", "v2", "v3", "pixart", "pixart_sigma", "auraflow")
_DEFAULTS: Mapping[str, object] = {
    "network.network_alpha": 1.0,
    "optimizer.learning_rate": 1e-6,
    "training.max_train_steps": 1000,
    "training.gradient_checkpointing": True,
    "model.precision": "fp32",
    "saving.save_every_n_steps": 1000,
    "saving.save_last_n": 5,
    "saving.save_precision": "fp16",
    "preview.sample_every_n_steps": 100,
    "preview.sample_at_first": True,
    "preview.sample_steps": 20,
    "preview.sample_cfg": 7.0,
    "preview.sample_size": "512x512",
}
_STEP_COUNT_OPTIONS = ("training.max_train_steps", "saving.save_every_n_steps", "preview.sample_every_n_steps")


def import_ai_toolkit(document: Mapping[str, Any], source: Path | str) -> ImportedConfig:
    """ai-toolkit's job in our terms; `document` is the file's content, `source` names it in findings."""
    document = substitute_job_name(document, str(get_nested_mapping(document, "config").get("name", "")))
    processes = wrap_in_list(get_nested_mapping(document, "config").get("process", []))
    account = ImportAccount(_PROGRAM_NAME, str(source))
    account.walk(keep_first_process(document), AI_TOOLKIT_KEYS)
    for place, process in enumerate(processes[1:], start=1):
        account.lines += [
            ImportedKey(
                format_key_path(("config", "process", place, *path)),
                value,
                KeyStatus.UNSUPPORTED,
                "",
                "one process is imported",
            )
            for path, value, _ in iterate_config_leaves(process)
        ]
    process = processes[0] if processes else {}
    check_ai_toolkit_family(account, get_nested_mapping(process, "model"))
    account.fill(_DEFAULTS)
    convert_accumulation(account, get_nested_mapping(process, "train"))
    amend_run_folder(account)
    if account.get("network.algorithm") == "lokr":
        account.fill({"network.full_matrix": True})
    set_lokr_unit_scale(account)
    collect_ai_toolkit_prompts(account, process)
    return account.imported(build_ai_toolkit_datasets(account))


def substitute_job_name(value: Any, name: str) -> Any:
    """`value` with [name] replaced in every text."""
    if isinstance(value, Mapping):
        return {key: substitute_job_name(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [substitute_job_name(item, name) for item in value]
    return value.replace("[name]", name) if isinstance(value, str) else value


def keep_first_process(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without its second and later processes."""
    config = get_nested_mapping(document, "config")
    if not isinstance(config.get("process"), list):
        return dict(document)
    return {**document, "config": {**config, "process": config["process"][:1]}}


def check_ai_toolkit_family(account: ImportAccount, model: Mapping[str, Any]) -> None:
    """An error if the model's arch, or an old is_... flag, is not Anima's; its default is Stable Diffusion 1."""
    arch = str(model.get("arch") or "").partition(":")[0]
    if not arch:
        arch = next((flag for flag in _FAMILY_FLAGS if model.get(f"is_{flag}")), "")
    if arch and arch not in _TRAINED_FAMILIES:
        key = "arch" if model.get("arch") else f"is_{arch}"
        account.report_other_family(f"config.process[0].model.{key}", arch)


def convert_accumulation(account: ImportAccount, train: Mapping[str, Any]) -> None:
    """gradient_accumulation counts optimiser steps, as we do; gradient_accumulation_steps, older, counts micro-batches
    as steps, so that all numbers of steps are so many times too large."""
    micro = to_whole_number(train.get("gradient_accumulation_steps", 1))
    if not isinstance(micro, int) or micro == 1 or "gradient_accumulation" in train:
        return
    key = "config.process[0].train.gradient_accumulation_steps"
    if micro < 1:
        account.amend(key, "training.gradient_accumulation_steps", 1, "-1 is a whole epoch; choose a number of batches")
        return
    note = f"counts each micro-batch as a step: numbers of steps are divided by {micro}"
    account.amend(key, "training.gradient_accumulation_steps", micro, note)
    for place in _STEP_COUNT_OPTIONS:
        if isinstance(steps := account.get(place), int):
            account.set(place, max(1, steps // micro))


def amend_run_folder(account: ImportAccount) -> None:
    """The run's folder is training_folder/name."""
    folder, name = account.get("saving.output_dir"), account.get("saving.output_name")
    if folder and name:
        note = f"the folder of the run is {folder}/{name}"
        account.amend(
            "config.process[0].training_folder", "saving.output_dir", str(PurePosixPath(str(folder)) / str(name)), note
        )


def collect_ai_toolkit_prompts(account: ImportAccount, process: object) -> None:
    """The prompts of `samples`, each with what it sets itself; and no previews where there are none."""
    samples = account.scoped["sample"].values()
    lines = [format_prompt_line(str(sample.pop("prompt", "")), sample) for sample in map(dict, samples)]
    lines = lines or account.get("preview.sample_prompts") or []
    if trigger := get_nested_mapping(process).get("trigger_word"):
        lines = [line.replace("[trigger]", str(trigger)) for line in lines]
    account.set("preview.sample_prompts", lines)
    if not account.get("preview.sample_prompts"):
        account.sections.get("preview", {}).clear()


def build_ai_toolkit_datasets(account: ImportAccount) -> list[dict[str, object]]:
    """One [[datasets]] for each folder at each of its resolutions."""
    made: list[dict[str, object]] = []
    places = sorted(account.scoped["dataset"].keys() | account.scoped["subset"].keys())
    for place in places:
        options = {**account.scoped["dataset"].get(place, {})}
        subset = {"caption_extension": ".txt", **account.scoped["subset"].get(place, {})}
        made += build_datasets_by_resolution(options, [subset], wrap_in_list(options.pop("resolution", 512)))
    return made
