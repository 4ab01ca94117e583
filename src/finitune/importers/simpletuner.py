"""SimpleTuner's config.json, with the data backends and the LyCORIS file that it names.

Source of names, defaults and meanings (facts only, it is AGPL): bghira/SimpleTuner documentation/OPTIONS.md and
DATALOADER.md, and its field registry. Keys may begin with two dashes; unknown ones are errors there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig
from finitune.importers import simpletuner_backends as data
from finitune.importers import simpletuner_keys as rows
from finitune.importers.conversions import (
    DEFAULT_IMPORT_RANK,
    build_datasets_by_resolution,
    format_prompt_line,
    set_lokr_unit_scale,
)
from finitune.importers.mapping import ConfigFileReader, ImportAccount, apply_converter, prefix_keys

_PROGRAM_NAME = "SimpleTuner"
_TRAINED_FAMILY = "anima"
_BACKENDS_KEY = "data_backend_config"
_DEFAULTS: Mapping[str, object] = {
    "optimizer.learning_rate": 4e-7,
    "optimizer.lr_scheduler": "constant_with_warmup",
    "optimizer.max_grad_norm": 2.0,
    "training.train_batch_size": 4,
    "training.gradient_checkpointing": True,
    "saving.save_last_n": 5,
    "model.precision": "bf16",
}
SIMPLETUNER_KEYS = {
    **rows.SIMPLETUNER_MAIN_KEYS,
    **prefix_keys("lycoris_config", data.SIMPLETUNER_LYCORIS_KEYS),
    **prefix_keys(f"{_BACKENDS_KEY}[]", data.SIMPLETUNER_BACKEND_KEYS),
}
_CACHE_BACKEND_KEYS = {f"{_BACKENDS_KEY}[].*": data.SIMPLETUNER_CACHE_MAPPING}


def import_simpletuner(
    document: Mapping[str, Any], source: Path | str, read: ConfigFileReader | None = None
) -> ImportedConfig:
    """SimpleTuner's run in our terms; `read` gives the files of backends and of LyCORIS that it names."""
    account = ImportAccount(_PROGRAM_NAME, str(source))
    names = {strip_option_dashes(key): key for key in document}
    options = {strip_option_dashes(key): parse_text_boolean(value) for key, value in document.items()}
    account.walk(options, SIMPLETUNER_KEYS)
    account.lines = [replace(line, key=names.get(line.key, line.key)) for line in account.lines]
    if options.get("lora_type") == "lycoris":
        lycoris = account.read_second_file(
            "lycoris_config", options.get("lycoris_config", "config/lycoris_config.json"), read
        )
        account.walk(lycoris or {}, SIMPLETUNER_KEYS, ("lycoris_config",))
    map_simpletuner_backends(
        account, account.read_second_file(_BACKENDS_KEY, options.get(_BACKENDS_KEY), read) or (), options
    )
    if (family := options.get("model_family")) != _TRAINED_FAMILY:
        account.report_other_family("model_family", family)
    complete_simpletuner_options(account, options)
    return account.imported(build_simpletuner_datasets(account))


def import_simpletuner_backends(document: Sequence[Mapping[str, Any]], source: Path | str) -> ImportedConfig:
    """A file of data backends alone: the datasets."""
    account = ImportAccount(_PROGRAM_NAME, str(source))
    map_simpletuner_backends(account, document, {})
    return account.imported(build_simpletuner_datasets(account))


def strip_option_dashes(key: str) -> str:
    """An option's name without its dashes."""
    return key.lstrip("-")


def parse_text_boolean(value: Any) -> Any:
    """Its parser takes "true" and "false" as text, too."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def map_simpletuner_backends(account: ImportAccount, elements: Any, options: Mapping[str, Any]) -> None:
    """The backends: those of pictures are datasets, those of embeddings are caches, those of masks belong to others."""
    usual = {key: options[key] for key in ("resolution", "resolution_type") if key in options}
    listed = [(place, backend) for place, backend in enumerate(elements) if isinstance(backend, Mapping)]
    folders = {str(backend.get("id")): backend.get("instance_data_dir") for _, backend in listed}
    for place, backend in listed:
        path = (_BACKENDS_KEY, place)
        if backend.get("dataset_type", "image") in ("text_embeds", "image_embeds", "conditioning"):
            account.walk(backend, _CACHE_BACKEND_KEYS, path)
            continue
        if masks := folders.get(str(backend.get("conditioning_data"))):
            account.set("subset.conditioning_data_dir", masks, (place,))
            account.set("objective.masked_loss", True)
        if "resolution" not in backend:
            size = apply_converter(data.convert_backend_resolution, usual.get("resolution", 1024), {**backend, **usual})
            account.set("dataset.resolution", size.value or 1024, (place,))
        if not backend.get("crop_aspect"):
            account.set("dataset.enable_bucket", not backend.get("crop"), (place,))
        account.walk(backend, SIMPLETUNER_KEYS, path)


def complete_simpletuner_options(account: ImportAccount, options: Mapping[str, Any]) -> None:
    """What is absent, what follows from several options, and the prompts."""
    saves = {} if account.get("saving.save_every_n_epochs") else {"saving.save_every_n_steps": 500}
    rank = account.get("network.network_dim") or DEFAULT_IMPORT_RANK
    lycoris = options.get("lora_type") == "lycoris"
    sampling = apply_converter(rows.convert_sampling_switch, True, options)
    ends = {} if options.get("max_train_steps") or options.get("num_train_epochs") else {"training.max_train_epochs": 1}
    account.fill(
        {
            **_DEFAULTS,
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
            made += build_datasets_by_resolution(options, [subset], [options.pop("resolution", 1024)])
    return made
