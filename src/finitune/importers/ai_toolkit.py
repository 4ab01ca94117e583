"""ai-toolkit's YAML or JSON: a job with processes, of which the first one is imported.

`[name]` in any text stands for the job's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.importers.conversions import (
    SHARED_CONVERTERS,
    Siblings,
    build_datasets_by_resolution,
    convert_lokr_rank,
    convert_number,
    convert_storage_dtype,
    format_prompt_line,
    set_lokr_unit_scale,
    to_whole_number,
    wrap_in_list,
)
from finitune.importers.key_tables import ProgramTable, read_program
from finitune.importers.mapping import (
    ConvertedValue,
    ImportAccount,
    get_nested_mapping,
    iterate_config_leaves,
    mark_no_effect,
    take_changed,
    take_value,
)


def convert_linear_rank(value: Any, beside: Siblings, kind_key: str, full: int) -> ConvertedValue:
    """An older name of the rank."""
    if beside.get("rank") not in (None, value):
        return mark_no_effect("rank is given, too, and counts")
    return convert_lokr_rank(value, beside, kind_key, full)


def convert_linear_alpha(value: Any, beside: Siblings) -> ConvertedValue:
    if beside.get("type") == "lokr" and beside.get("lokr_full_rank", True):
        return mark_no_effect("a full second factor has the scale 1")
    return convert_number(value, beside)


def convert_use_ema(value: Any, beside: Siblings) -> ConvertedValue:
    return take_changed(0.999 if beside.get("ema_decay") is None else beside["ema_decay"], "the decay switches it on")


def convert_self_tuned_rate(value: Any, beside: Siblings) -> ConvertedValue:
    answer = convert_number(value, beside)
    finds_itself = str(beside.get("optimizer", "")).lower().startswith(("prodigy", "dadaptation"))
    if finds_itself and isinstance(answer.value, (int, float)) and answer.value < 0.1:
        return take_changed(1.0, "below 0.1 ai-toolkit takes 1 for an optimiser that finds the rate itself")
    return answer


def convert_quantize(value: Any, beside: Siblings) -> ConvertedValue:
    return convert_storage_dtype(beside.get("qtype") or "qfloat8", beside)


def convert_caption_extension(value: Any, beside: Siblings) -> ConvertedValue:
    return take_value("." + str(value).lstrip("."))


def convert_trigger(value: Any, beside: Siblings, place: str = "") -> ConvertedValue:
    """A trigger word; `place` is our option for it, besides the captions."""
    note = "put in front of every caption, whether it is there already or not"
    return ConvertedValue(f"{value} ", KeyStatus.CHANGED, note, {place: value} if place else {})


def convert_denoising_step(value: Any, beside: Siblings) -> ConvertedValue:
    """One of 1000 steps as sigma."""
    return take_value(float(value) / 1000) if float(value) < 999 else mark_no_effect("all of them")


def convert_ai_toolkit_preview_size(value: Any, beside: Siblings) -> ConvertedValue:
    return take_value(f"{beside.get('width', 512)}x{beside.get('height', 512)}")


def convert_prompts(value: Any, beside: Siblings) -> ConvertedValue:
    return take_value([format_prompt_line(str(prompt), {"n": beside.get("neg")}) for prompt in value])


@cache
def read_ai_toolkit_table() -> ProgramTable:
    return read_program("ai_toolkit", (*SHARED_CONVERTERS, *_CONVERTERS))


_CONVERTERS = (
    *(convert_linear_rank, convert_linear_alpha, convert_use_ema, convert_self_tuned_rate, convert_quantize),
    *(
        convert_caption_extension,
        convert_trigger,
        convert_denoising_step,
        convert_ai_toolkit_preview_size,
        convert_prompts,
    ),
)


def import_ai_toolkit(document: Mapping[str, Any], source: Path | str) -> ImportedConfig:
    """ai-toolkit's job in our terms; `document` is the file's content, `source` names it in findings."""
    table = read_ai_toolkit_table()
    document = substitute_job_name(document, str(get_nested_mapping(document, "config").get("name", "")))
    config = get_nested_mapping(document, "config")
    processes = wrap_in_list(config.get("process", []))
    account = ImportAccount(table.program, str(source))
    if isinstance(config.get("process"), list):
        document = {**document, "config": {**config, "process": processes[:1]}}
    account.walk(document, table.keys)
    for place, process in enumerate(processes[1:], start=1):
        for path, value, _ in iterate_config_leaves(process):
            key = format_key_path(("config", "process", place, *path))
            account.lines.append(ImportedKey(key, value, KeyStatus.UNSUPPORTED, "", "one process is imported"))
    process = processes[0] if processes else {}
    check_ai_toolkit_family(account, get_nested_mapping(process, "model"))
    account.fill(table.defaults)
    convert_accumulation(account, get_nested_mapping(process, "train"))
    folder, name = account.get("saving.output_dir"), account.get("saving.output_name")
    if folder and name:
        run = str(PurePosixPath(str(folder)) / str(name))
        note = f"the folder of the run is {folder}/{name}"
        account.amend("config.process[0].training_folder", "saving.output_dir", run, note)
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


def check_ai_toolkit_family(account: ImportAccount, model: Mapping[str, Any]) -> None:
    """An error if the model's arch, or an old is_... flag, is not Anima's; its default is Stable Diffusion 1."""
    facts = read_ai_toolkit_table().facts
    key, arch = "arch", str(model.get("arch") or "").partition(":")[0]
    if not arch:
        arch = next((flag for flag in facts["family_flags"] if model.get(f"is_{flag}")), "")
        key = f"is_{arch}"
    if arch and arch not in facts["trained_families"]:
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
    for place in read_ai_toolkit_table().facts["step_count_options"]:
        if isinstance(steps := account.get(place), int):
            account.set(place, max(1, steps // micro))


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
    for place in sorted(account.scoped["dataset"].keys() | account.scoped["subset"].keys()):
        options = {**account.scoped["dataset"].get(place, {})}
        subset = {"caption_extension": ".txt", **account.scoped["subset"].get(place, {})}
        made += build_datasets_by_resolution(options, subset, wrap_in_list(options.pop("resolution", 512)))
    return made
