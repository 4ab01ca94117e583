"""Reading a configuration: strictly, so that no option is ignored, and kindly, so that every fault is told at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from finitune.config.datasets import ConfigSection, get_stated_options
from finitune.config.imported_config import ImportedConfig
from finitune.config.inspection import ConfigInspection
from finitune.config.option_types import find_nearest_name
from finitune.config.schema import CONFIG_SECTION_NAMES, TrainConfig
from finitune.config.toml_text import (
    KeyLocator,
    TomlDocument,
    TomlKeyPath,
    make_foreign_config_error,
    make_toml_item,
    read_toml,
)
from finitune.errors import UsageError
from finitune.report import Finding, Level

_MARKER_KEYS_BY_PROGRAM = {
    "kohya's scripts": ("pretrained_model_name_or_path", "network_module", "dataset_config", "train_data_dir"),
    "diffusion-pipe": ("micro_batch_size_per_gpu", "pipeline_stages", "transformer_path"),
    "lora-scripts": ("model_train_type",),
    "Easy Training Scripts": ("train_mode",),
}
"""Keys by which a TOML of another program is known, where it is not ours."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with what was said on reading it; `imported` is the account of another program's keys."""

    config: TrainConfig
    findings: tuple[Finding, ...]
    imported: ImportedConfig | None
    source: Path


def locate_nothing(path: TomlKeyPath) -> None:
    """The line of a key in a document without lines."""


def read_train_config(path: Path) -> LoadedConfig:
    """The configuration in a TOML file of ours; a relative path in it may be beside the file.

    Raises FileError where there is no such file, and UsageError: CONFIG-ENCODING, CONFIG-SYNTAX, CONFIG-FOREIGN for
    the configuration of another program, or CONFIG-INVALID with every fault.
    """
    written = read_toml(path)
    reject_foreign_config(written)
    config, findings = validate_config(written.document, str(path), written.locate, path.parent)
    return LoadedConfig(config, findings, None, path)


def validate_config(
    document: Mapping[str, Any], source: str = "", locate: KeyLocator = locate_nothing, beside: Path | None = None
) -> tuple[TrainConfig, tuple[Finding, ...]]:
    """The configuration that a document describes, {section: {option: value}}, and what was put right.

    An option that is None counts as left out. `source` names the document to people, `locate` the lines of its keys;
    relative paths that lead nowhere are looked for in the folder `beside`.
    Raises UsageError (CONFIG-INVALID), whose evidence "faults" lists every one.
    """
    inspection = ConfigInspection(source, locate, document, beside)
    config = inspection.config()
    if config is None:
        raise make_invalid_config_error(source, list_inspection_errors(inspection))
    return config, tuple(inspection.findings)


def find_config_faults(
    document: Mapping[str, Any], source: str = "", locate: KeyLocator = locate_nothing
) -> list[Finding]:
    """Every error in a document, in the order of its lines; the evidence has file, line, key, value and what fits."""
    inspection = ConfigInspection(source, locate, document)
    inspection.config()
    return list_inspection_errors(inspection)


def list_inspection_errors(inspection: ConfigInspection) -> list[Finding]:
    """Its errors in the order of the file."""
    found = [finding for finding in inspection.findings if finding.level is Level.ERROR]
    return sorted(found, key=lambda finding: int(str(finding.evidence.get("line", sys.maxsize))))


def make_invalid_config_error(source: str, found: list[Finding]) -> UsageError:
    """The one error for all faults of a document."""
    told = [(f"line {f.evidence['line']}: " if "line" in f.evidence else "") + f.message for f in found]
    one = len(found) == 1
    lines = told if one else [join_message_and_remedy(text, f.remedy) for text, f in zip(told, found, strict=True)]
    opening = f"{source or 'the configuration'}" + (", " if one else f" has {len(found)} faults:\n  ")
    return UsageError(
        opening + "\n  ".join(lines),
        code="CONFIG-INVALID",
        subject=source,
        evidence={
            "faults": [
                {"code": f.code, "subject": f.subject, "message": f.message, "remedy": f.remedy, **f.evidence}
                for f in found
            ]
        },
        remedy=found[0].remedy if one else "Correct each of them: all are listed.",
    )


def join_message_and_remedy(message: str, remedy: str) -> str:
    """A message and its remedy on one line."""
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} {remedy}" if remedy else message


def reject_foreign_config(written: TomlDocument) -> None:
    """Raise UsageError (CONFIG-FOREIGN) for a TOML of another program."""
    document = written.document
    models = [
        table for name, table in document.items() if find_nearest_name(name, ("model",)) and isinstance(table, Mapping)
    ]
    if any("pretrained_model_name_or_path" in table for table in models):
        return
    inside = [name for table in document.values() if isinstance(table, Mapping) for name in table]
    keys = {*document, *inside}
    for program, known in _MARKER_KEYS_BY_PROGRAM.items():
        found = [key for key in known if key in keys]
        if found:
            raise make_foreign_config_error(written.source, f"{found[0]} stands there as in one of {program}")


def dump_config(config: TrainConfig) -> str:
    """The configuration as TOML with every option that is not None; `validate` of it gives an equal one.

    Of datasets and subsets only what was written down: the rest they have from the level above.
    """
    document = tomlkit.document()
    for name in (*CONFIG_SECTION_NAMES, "general"):
        document.append(name, build_toml_table(dict(getattr(config, name))))
    if config.datasets:
        tables = tomlkit.aot()
        for dataset in config.datasets:
            subsets = tomlkit.aot()
            for subset in dataset.subsets:
                subsets.append(build_toml_table(get_stated_option_values(subset)))
            tables.append(build_toml_table(get_stated_option_values(dataset)))
            if subsets:
                tables[-1].append("subsets", subsets)
        document.append("datasets", tables)
    return tomlkit.dumps(document)


def get_stated_option_values(section: ConfigSection) -> dict[str, Any]:
    """The options that were written down, in the order of the schema, without lists of tables."""
    given = get_stated_options(section)
    return {name: given[name] for name in type(section).model_fields if name in given and name != "subsets"}


def build_toml_table(options: Mapping[str, Any]) -> Table:
    """Options as a table of TOML, None left out."""
    table = tomlkit.table()
    for name, value in options.items():
        if name == "optimizer_args" and has_none_inside(value):
            # TOML has no None, which is a value to some optimisers: eps = (None, 1e-3).
            value = [f"{argument}={inner!r}" for argument, inner in value.items()]
        if value is not None:
            table.append(name, make_toml_item(value))
    return table


def has_none_inside(value: Any) -> bool:
    """Whether there is a None somewhere inside."""
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(has_none_inside, value.values() if isinstance(value, Mapping) else value))
    return value is None
