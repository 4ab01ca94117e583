"""diffusion-pipe's two TOMLs: the run, and the dataset that it names.

Its adapter has alpha = rank, and covers every linear layer of a block, the modulation's included, and the text
conditioner.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig
from finitune.importers.conversions import (
    DEFAULT_IMPORT_RANK,
    SHARED_CONVERTERS,
    Siblings,
    build_datasets_by_resolution,
    convert_whole_number,
    wrap_in_list,
)
from finitune.importers.key_tables import ProgramTable, read_program
from finitune.importers.mapping import (
    ConfigFileReader,
    ConvertedValue,
    ImportAccount,
    apply_converter,
    get_nested_mapping,
    mark_unsupported,
    take_changed,
    take_value,
)
from finitune.report import Finding, Level


def convert_batch_size(value: Any, beside: Siblings) -> ConvertedValue:
    if isinstance(value, list):
        return take_changed(int(value[0][1]), "each size's own stands in its [[datasets]]")
    return convert_whole_number(value, beside)


def convert_sample_method(value: Any, beside: Siblings) -> ConvertedValue:
    """logit_normal or uniform, then one of two shifts."""
    uniform, shift = value == "uniform", beside.get("shift")
    if value not in ("logit_normal", "uniform"):
        return mark_unsupported(f"{value!r}: choose timestep_sampling")
    if shift:
        return take_value("sigma", objective__weighting_scheme="none") if uniform else take_value("shift")
    if beside.get("flux_shift"):
        return take_changed("flux_shift", "draws are by sigmoid here") if uniform else take_value("flux_shift")
    return take_value("uniform" if uniform else "sigmoid")


def convert_repeats(value: Any, beside: Siblings) -> ConvertedValue:
    answer = convert_whole_number(value, beside)
    if isinstance(answer.value, float):
        return take_changed(max(1, round(answer.value)), "only whole repeats")
    return answer


def convert_delimiter(value: Any, beside: Siblings) -> ConvertedValue:
    return take_value(value.strip() or value)


@cache
def read_diffusion_pipe_table() -> ProgramTable:
    own = (convert_batch_size, convert_sample_method, convert_repeats, convert_delimiter)
    return read_program("diffusion_pipe", (*SHARED_CONVERTERS, *own))


def import_diffusion_pipe(
    document: Mapping[str, Any], source: Path | str, read: ConfigFileReader | None = None
) -> ImportedConfig:
    """diffusion-pipe's run in our terms; `read` gives the dataset that it names."""
    table = read_diffusion_pipe_table()
    account = ImportAccount(table.program, str(source))
    account.walk(document, table.keys)
    folders = account.read_second_file("dataset", document.get("dataset"), read) or {}
    account.walk(folders, table.keys, ("dataset",))
    model = get_nested_mapping(document, "model")
    if (family := model.get("type")) != table.facts["trained_family"]:
        account.report_other_family("model.type", family)
    if "adapter" not in document:
        message = "there is no [adapter]: the original trains the whole model, here an adapter is trained"
        remedy = "Set the network section as you like."
        account.findings.append(Finding(Level.WARNING, "CONFIG-WHOLE-MODEL", str(source), message, {}, remedy))
    sampling = apply_converter(convert_sample_method, model.get("timestep_sample_method", "logit_normal"), model)
    account.fill(
        {
            "objective.timestep_sampling": sampling.value or "sigmoid",
            **sampling.also,
            "network.network_alpha": account.get("network.network_dim") or DEFAULT_IMPORT_RANK,
            "network.train_llm_adapter": True,
            "network.include_patterns": [table.facts["modulation_pattern"]],
        }
    )
    if rate := document.get("force_constant_lr"):
        account.set("optimizer.learning_rate", rate)
        account.set("optimizer.lr_scheduler", "constant")
        account.set("optimizer.lr_warmup_steps", 0)
    return account.imported(build_diffusion_pipe_datasets(account, document.get("micro_batch_size_per_gpu")))


def import_diffusion_pipe_dataset(document: Mapping[str, Any], source: Path | str) -> ImportedConfig:
    table = read_diffusion_pipe_table()
    account = ImportAccount(table.program, str(source))
    rows = table.keys.items()
    account.walk(document, {key.removeprefix("dataset."): row for key, row in rows if key.startswith("dataset.")})
    return account.imported(build_diffusion_pipe_datasets(account, None))


def build_diffusion_pipe_datasets(account: ImportAccount, batches: object) -> list[dict[str, object]]:
    """One [[datasets]] for each directory at each of its resolutions, with the batch size of each."""
    pairs = [entry for entry in wrap_in_list(batches) if isinstance(entry, list) and len(entry) == 2]
    by_size = {str(size): batch for size, batch in pairs}
    dataset, subset = account.scoped["dataset"], account.scoped["subset"]
    made: list[dict[str, object]] = []
    for place in sorted(place for place in subset if place):
        options = {"enable_bucket": False, **dataset.get((), {}), **dataset.get(place, {})}
        folder = {"caption_extension": ".txt", **subset.get((), {}), **subset[place]}
        made += build_datasets_by_resolution(options, folder, wrap_in_list(options.pop("resolution", 512)))
    for options in made:
        if (size := str(options["resolution"])) in by_size:
            options["batch_size"] = by_size[size]
    return made
