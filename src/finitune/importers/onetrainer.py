"""OneTrainer's JSON, with its concepts and samples, inside it or in files of their own.

Only differences from the defaults need to be written there (its presets are partial), so that defaults matter; keys of
older versions are read as its migrations do. It iterates the names that it knows: an unknown one is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from finitune.config.imported_config import ImportedConfig, KeyStatus
from finitune.importers.conversions import (
    SHARED_CONVERTERS,
    Siblings,
    build_datasets_by_resolution,
    build_name_part_pattern,
    convert_number,
    convert_whole_number,
    format_prompt_line,
    set_lokr_unit_scale,
    wrap_in_list,
)
from finitune.importers.key_tables import ProgramTable, read_program
from finitune.importers.mapping import (
    ConfigFileReader,
    ConvertedValue,
    ImportAccount,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)


def parse_onetrainer_sizes(value: object) -> list[object]:
    """ "768,1024" as numbers; "832x1216" as a pair."""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    pairs = [[int(side) for side in re.split(r"[x*]", part)] for part in parts]
    return [pair[0] if len(pair) == 1 else pair for pair in pairs]


def convert_onetrainer_resolution(value: Any, beside: Siblings) -> ConvertedValue:
    try:
        found = parse_onetrainer_sizes(value)
    except ValueError:
        return take_value(value)
    if len(found) > 1:
        note = f"one [[datasets]] for each of {len(found)} sizes; there each epoch draws one size for each picture"
        return take_changed(found, note)
    return take_value(found or [512])


def convert_epochs(value: Any, beside: Siblings) -> ConvertedValue:
    """Epochs: with n sizes ours are n times as long."""
    answer, times = convert_whole_number(value, beside), len(parse_onetrainer_sizes(beside.get("resolution", "512")))
    if times > 1 and isinstance(answer.value, int):
        note = f"each picture is shown at all {times} sizes in an epoch"
        return take_changed(max(1, round(answer.value / times)), note)
    return answer


def convert_interval(value: Any, beside: Siblings, unit_key: str, place: str) -> ConvertedValue:
    """A number with a unit in the next key: steps or epochs."""
    unit = str(beside.get(unit_key, "NEVER")).upper()
    if unit in ("NEVER", "ALWAYS") or not value:
        return mark_no_effect("never")
    if unit not in ("STEP", "EPOCH"):
        return mark_unsupported(f"every {value} {unit.lower()}s: choose a number of steps, {place}_every_n_steps.")
    return ConvertedValue(convert_whole_number(value, beside).value, place=f"{place}_every_n_{unit.lower()}s")


def convert_balancing(value: Any, beside: Siblings) -> ConvertedValue:
    """Repeats in each epoch, or a number of samples in each epoch."""
    if str(beside.get("balancing_strategy", "REPEATS")).upper() != "REPEATS":
        return mark_unsupported("a number of pictures in each epoch: set num_repeats")
    repeats = float(value)
    if repeats == int(repeats) and repeats >= 1:
        return take_value(int(repeats))
    return take_changed(max(1, round(repeats)), "only whole repeats: every picture is shown so often in each epoch")


def convert_scheduler(value: Any, beside: Siblings) -> ConvertedValue:
    name = str(value).lower()
    if name.startswith("cosine_with"):
        return take_value("cosine_with_restarts")
    if name == "cosine" and float(beside.get("learning_rate_min_factor") or 0) > 0:
        return take_value("cosine_with_min_lr")
    known = name in ("constant", "linear", "cosine")
    return take_value(name) if known else mark_unsupported(f"{value!r}: set lr_scheduler; it stays constant.")


def convert_timestep_distribution(value: Any, beside: Siblings) -> ConvertedValue:
    """How sigmas are drawn: the distribution, its weight and bias, and the shift behind it."""
    name, shift = str(value).upper(), float(beside.get("timestep_shift") or 1)
    weight, bias = float(beside.get("noising_weight") or 0), float(beside.get("noising_bias") or 0)
    if beside.get("dynamic_timestep_shifting"):
        note = "shifted by the size of the picture; draws are by sigmoid here"
        return take_changed("flux_shift", note, objective__sigmoid_scale=weight + 1)
    if name == "LOGIT_NORMAL" and not bias:
        return take_value("sigmoid" if shift == 1 else "shift", objective__sigmoid_scale=weight + 1)
    scheme: dict[str, object] = {}
    if name == "UNIFORM":
        if shift == 1:
            return take_value("uniform")
        scheme = {"weighting_scheme": "none"}
    elif name == "LOGIT_NORMAL":  # kohya draws 1 - u
        scheme = {"weighting_scheme": "logit_normal", "logit_mean": -bias, "logit_std": weight + 1}
    elif name == "HEAVY_TAIL":
        scheme = {"weighting_scheme": "mode", "mode_scale": weight}
    elif name == "COS_MAP" and shift == 1:
        note = "uniform draws, the loss weighted by the same curve: the same in the mean"
        return take_changed("sigma", note, objective__weighting_scheme="cosmap")
    if not scheme:
        return mark_unsupported(f"{value!r}: choose timestep_sampling and weighting_scheme")
    return ConvertedValue("sigma", also={f"objective.{key}": setting for key, setting in scheme.items()})


def convert_onetrainer_ema_decay(value: Any, beside: Siblings) -> ConvertedValue:
    """The decay for each step; there it is applied every few steps only."""
    steps = int(beside.get("ema_update_step_interval") or 5)
    if steps == 1:
        return convert_number(value, beside)
    return take_changed(float(value) ** (1 / steps), f"the same average, updated in each step instead of every {steps}")


def convert_onetrainer_use_ema(value: Any, beside: Siblings) -> ConvertedValue:
    return convert_onetrainer_ema_decay(beside.get("ema_decay", 0.999), beside)


def convert_loss_strength(value: Any, beside: Siblings, key: str) -> ConvertedValue:
    """The weight of one loss among several: the strongest is taken, as the only one."""
    losses: Mapping[str, Any] = read_onetrainer_table().facts["losses"]
    strongest = max(losses, key=lambda name: float(beside.get(name, losses[name][1])))
    if strongest != key:
        return mark_unsupported(f"one loss at a time: {strongest} counts")
    ours = losses[key][0]
    plain = float(value) == 1 and key != "huber_strength"
    return take_value(ours) if plain else take_changed(ours, "with weight 1; huber in kohya's form")


def convert_layer_filter(value: Any, beside: Siblings) -> ConvertedValue:
    """Parts of module names, or regular expressions that are searched for in them."""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    if beside.get("layer_filter_regex"):
        return take_value([f".*(?:{part}).*" for part in parts])
    return take_value([build_name_part_pattern(part) for part in parts])


def convert_rank(value: Any, beside: Siblings) -> ConvertedValue:
    if str(beside.get("peft_type", "")).upper() == "LOKR" and "lokr_dim" in beside:
        return mark_no_effect("lokr_dim counts")
    return convert_whole_number(value, beside)


def convert_model_destination(value: Any, beside: Siblings) -> ConvertedValue:
    """The file's name; its folder is the run's."""
    path = PurePath(str(value).replace("\\", "/"))
    if len(path.parts) > 1:
        return take_changed(path.stem, "the name; the folder is workspace_dir")
    return take_value(path.stem)


def convert_tag_dropout(value: Any, beside: Siblings) -> ConvertedValue:
    """Tags left out: all at once, or each on its own."""
    if str(beside.get("tag_dropout_mode", "FULL")).upper() == "FULL":
        note = "all tags at once, kept ones, too"
        return ConvertedValue(float(value), KeyStatus.CHANGED, note, place="subset.caption_dropout_rate")
    return take_value(float(value))


@cache
def read_onetrainer_table() -> ProgramTable:
    return read_program("onetrainer", (*SHARED_CONVERTERS, *_CONVERTERS))


_CONVERTERS = (
    *(convert_onetrainer_resolution, convert_epochs, convert_interval, convert_balancing, convert_scheduler),
    *(
        convert_timestep_distribution,
        convert_onetrainer_ema_decay,
        convert_onetrainer_use_ema,
        convert_loss_strength,
        convert_layer_filter,
    ),
    *(convert_rank, convert_model_destination, convert_tag_dropout),
)


def import_onetrainer(
    document: Mapping[str, Any], source: Path | str, read: ConfigFileReader | None = None
) -> ImportedConfig:
    """OneTrainer's configuration in our terms; `read` gives the files of concepts and samples that it names."""
    table = read_onetrainer_table()
    account = ImportAccount(table.program, str(source))
    account.walk(document, table.keys)
    if not document.get("concepts"):
        name = document.get("concept_file_name", "training_concepts/concepts.json")
        map_listed_elements(account, account.read_second_file("concept_file_name", name, read), "concepts")
    if not document.get("samples") and read and (name := document.get("sample_definition_file_name")):
        map_listed_elements(account, read(str(name)), "samples")
    family = str(document.get("model_type", "STABLE_DIFFUSION_15"))
    if family != table.facts["trained_family"]:
        account.report_other_family("model_type", family)
    precision = {} if document.get("train_dtype") else {"model.precision": "auto"}
    account.fill({**table.defaults, **precision})
    set_lokr_unit_scale(account)
    collect_onetrainer_prompts(account)
    return account.imported(build_onetrainer_datasets(account))


def import_onetrainer_concepts(document: Sequence[Any], source: Path | str) -> ImportedConfig:
    account = ImportAccount(read_onetrainer_table().program, str(source))
    map_listed_elements(account, document, "concepts")
    return account.imported(build_onetrainer_datasets(account))


def map_listed_elements(account: ImportAccount, elements: Any, name: str) -> None:
    for place, element in enumerate(elements or ()):
        if isinstance(element, Mapping):
            account.walk(element, read_onetrainer_table().keys, (name, place))


def collect_onetrainer_prompts(account: ImportAccount) -> None:
    """The prompts of the samples that are on, each with what it sets itself."""
    lines = []
    for sample in map(dict, account.scoped["sample"].values()):
        if sample.pop("enabled", True):
            lines.append(format_prompt_line(str(sample.pop("prompt", "")), sample))
    if lines:
        account.set("preview.sample_prompts", lines)


def build_onetrainer_datasets(account: ImportAccount) -> list[dict[str, object]]:
    """One [[datasets]] for each concept that is on and for training, at each of the resolutions."""
    general = account.sections.get("general", {})
    usual = wrap_in_list(general.pop("resolution", 512))
    made: list[dict[str, object]] = []
    for place, options in account.scoped["subset"].items():
        subset = {**read_onetrainer_table().facts["concept_defaults"], **options}
        if account.scoped["listed"].get(place, {}).get("enabled", True):
            own = account.scoped["dataset"].get(place, {}).get("resolution")
            made += build_datasets_by_resolution({}, subset, usual if own is None else wrap_in_list(own))
    return made
