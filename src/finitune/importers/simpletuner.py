"""SimpleTuner's config.json, with the data backends and the LyCORIS file that it names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig
from finitune.importers.conversions import (
    DEFAULT_IMPORT_RANK,
    SHARED_CONVERTERS,
    Siblings,
    build_datasets_by_resolution,
    convert_storage_dtype,
    convert_whole_number,
    format_prompt_line,
    set_lokr_unit_scale,
    to_whole_number,
)
from finitune.importers.key_tables import ProgramTable, read_program
from finitune.importers.mapping import (
    ConfigFileReader,
    ConvertedValue,
    ImportAccount,
    apply_converter,
    mark_no_effect,
    take_changed,
    take_value,
)

_BACKENDS_KEY = "data_backend_config"


def convert_sampling_switch(value: Any, beside: Siblings) -> ConvertedValue:
    """How sigmas are drawn: sigmoid or uniform draws, then a shift, its own one or by the picture's size."""
    uniform, shift = bool(beside.get("flow_use_uniform_schedule")), beside.get("flow_schedule_shift")
    shift = float(read_simpletuner_table().facts["flow_shift"] if shift is None else shift)
    if beside.get("flow_schedule_auto_shift"):
        return take_changed("flux_shift", "draws are by sigmoid here") if uniform else take_value("flux_shift")
    if shift in (0, 1):
        return take_value("uniform" if uniform else "sigmoid")
    also: dict[str, object] = {"objective.discrete_flow_shift": shift}
    if uniform:
        also["objective.weighting_scheme"] = "none"
    return ConvertedValue("sigma" if uniform else "shift", also=also)


def convert_base_precision(value: Any, beside: Siblings) -> ConvertedValue:
    return convert_storage_dtype(str(value).split("-")[0], beside)


def convert_ema_decay(value: Any, beside: Siblings) -> ConvertedValue:
    decay, every = float(beside.get("ema_decay") or 0.995), to_whole_number(beside.get("ema_update_interval") or 1)
    if every == 1:
        return take_value(decay)
    return take_changed(decay ** (1 / every), f"updated in each step instead of every {every}")


def convert_optimizer_config(value: Any, beside: Siblings) -> ConvertedValue:
    """key=value, separated by commas."""
    pairs = [part.partition("=") for part in str(value).split(",") if part.strip()]
    return take_value({key.strip(): parse_typed_text(text.strip()) for key, _, text in pairs})


def parse_typed_text(text: str) -> object:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return to_whole_number(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def convert_validation_size(value: Any, beside: Siblings) -> ConvertedValue:
    """The first of the sizes of previews, as WIDTHxHEIGHT."""
    first, *more = (part.strip() for part in str(value).split(","))
    told = first if "x" in first else f"{first}x{first}"
    return take_changed(told, "one size: the first") if more else take_value(told)


def compute_square_side(value: Any, beside: Siblings) -> int:
    """The side of the square that a resolution means, in pixels."""
    if beside.get("resolution_type") == "area":
        return max(64, round(math.sqrt(float(value) * 1e6) / 64) * 64)
    return to_whole_number(value)


def convert_min_image_size(value: Any, beside: Siblings) -> ConvertedValue:
    """The area below which pictures are left out."""
    note = "an area; pictures of just this size are left out, too"
    return take_changed(compute_square_side(value, beside), note)


def convert_extra_repeats(value: Any, beside: Siblings) -> ConvertedValue:
    """How often a picture is shown: n times more there, n times in all here."""
    return take_changed(int(float(value)) + 1, "repeats are extra there: one more showing in all")


def convert_instance_prompt(value: Any, beside: Siblings) -> ConvertedValue:
    """One text for all pictures, in front of captions or instead of them."""
    if beside.get("caption_strategy") == "instanceprompt" or beside.get("only_instance_prompt"):
        note = "the caption of pictures without a caption file; take the files away if there are any"
        return take_changed(value, note)
    if beside.get("prepend_instance_prompt"):
        return ConvertedValue(f"{value} ", place="subset.caption_prefix")
    return mark_no_effect("captions come from files")


def convert_resolution(value: Any, beside: Siblings) -> ConvertedValue:
    """The side of a square: by area in pixels or megapixels; or the shorter side."""
    kind = beside.get("resolution_type", "pixel_area")
    if kind == "area":
        return take_changed(compute_square_side(value, beside), "megapixels, as the side of a square")
    if kind == "pixel":
        return take_changed(to_whole_number(value), "the area of that square; there the shorter side")
    return convert_whole_number(value, beside)


@cache
def read_simpletuner_table() -> ProgramTable:
    return read_program("simpletuner", (*SHARED_CONVERTERS, *_CONVERTERS))


_CONVERTERS = (
    *(convert_sampling_switch, convert_base_precision, convert_ema_decay, convert_optimizer_config),
    *(convert_validation_size, convert_min_image_size, convert_extra_repeats, convert_instance_prompt),
    convert_resolution,
)


def import_simpletuner(
    document: Mapping[str, Any], source: Path | str, read: ConfigFileReader | None = None
) -> ImportedConfig:
    """SimpleTuner's run in our terms; `read` gives the files of backends and of LyCORIS that it names."""
    table = read_simpletuner_table()
    account = ImportAccount(table.program, str(source))
    names = {key.lstrip("-"): key for key in document}
    options = {key.lstrip("-"): parse_text_boolean(value) for key, value in document.items()}
    account.walk(options, table.keys)
    account.lines = [replace(line, key=names.get(line.key, line.key)) for line in account.lines]
    if options.get("lora_type") == "lycoris":
        lycoris = account.read_second_file(
            "lycoris_config", options.get("lycoris_config", "config/lycoris_config.json"), read
        )
        account.walk(lycoris or {}, table.keys, ("lycoris_config",))
    map_simpletuner_backends(
        account, account.read_second_file(_BACKENDS_KEY, options.get(_BACKENDS_KEY), read) or (), options
    )
    if (family := options.get("model_family")) != table.facts["trained_family"]:
        account.report_other_family("model_family", family)
    complete_simpletuner_options(account, options)
    return account.imported(build_simpletuner_datasets(account))


def import_simpletuner_backends(document: Sequence[Mapping[str, Any]], source: Path | str) -> ImportedConfig:
    account = ImportAccount(read_simpletuner_table().program, str(source))
    map_simpletuner_backends(account, document, {})
    return account.imported(build_simpletuner_datasets(account))


def parse_text_boolean(value: Any) -> Any:
    """Its parser takes "true" and "false" as text, too."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def map_simpletuner_backends(account: ImportAccount, elements: Any, options: Mapping[str, Any]) -> None:
    """The backends: those of pictures are datasets, those of embeddings are caches, those of masks belong to others."""
    usual = {key: options[key] for key in ("resolution", "resolution_type") if key in options}
    listed = [(place, backend) for place, backend in enumerate(elements) if isinstance(backend, Mapping)]
    table = read_simpletuner_table()
    cache_row = table.reader.parse_row("*", table.facts["cache_backend"])
    folders = {str(backend.get("id")): backend.get("instance_data_dir") for _, backend in listed}
    for place, backend in listed:
        path = (_BACKENDS_KEY, place)
        if backend.get("dataset_type", "image") in ("text_embeds", "image_embeds", "conditioning"):
            account.walk(backend, {f"{_BACKENDS_KEY}[].*": cache_row}, path)
            continue
        if masks := folders.get(str(backend.get("conditioning_data"))):
            account.set("subset.conditioning_data_dir", masks, (place,))
            account.set("objective.masked_loss", True)
        if "resolution" not in backend:
            size = apply_converter(convert_resolution, usual.get("resolution", 1024), {**backend, **usual})
            account.set("dataset.resolution", size.value or 1024, (place,))
        if not backend.get("crop_aspect"):
            account.set("dataset.enable_bucket", not backend.get("crop"), (place,))
        account.walk(backend, table.keys, path)


def complete_simpletuner_options(account: ImportAccount, options: Mapping[str, Any]) -> None:
    """What is absent, what follows from several options, and the prompts."""
    saves = {} if account.get("saving.save_every_n_epochs") else {"saving.save_every_n_steps": 500}
    rank = account.get("network.network_dim") or DEFAULT_IMPORT_RANK
    lycoris = options.get("lora_type") == "lycoris"
    sampling = apply_converter(convert_sampling_switch, True, options)
    ends = {} if options.get("max_train_steps") or options.get("num_train_epochs") else {"training.max_train_epochs": 1}
    account.fill(
        {
            **read_simpletuner_table().defaults,
            **saves,
            **ends,
            "network.network_alpha": 1.0 if lycoris else rank,
            **({} if lycoris else {"network.network_dropout": 0.1}),
            "objective.timestep_sampling": sampling.value or "sigmoid",
            **sampling.also,
        }
    )
    set_lokr_unit_scale(account)
    prompt = options.get("validation_prompt")
    if options.get("validation_disable") or not prompt:
        account.sections.pop("preview", None)
    else:
        account.set(
            "preview.sample_prompts",
            [format_prompt_line(str(prompt), {"n": options.get("validation_negative_prompt")})],
        )


def build_simpletuner_datasets(account: ImportAccount) -> list[dict[str, object]]:
    """One [[datasets]] for each backend of pictures that is not disabled."""
    made: list[dict[str, object]] = []
    for place, subset in account.scoped["subset"].items():
        if account.scoped["listed"].get(place, {}).get("enabled", True):
            options = dict(account.scoped["dataset"].get(place, {}))
            made += build_datasets_by_resolution(options, subset, [options.pop("resolution", 1024)])
    return made
