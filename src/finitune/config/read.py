"""Reading a configuration: strictly, so that no option is ignored, and kindly, so that every fault is told at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.config.datasets import Section, stated
from finitune.config.homes import nearest
from finitune.config.imported import Imported
from finitune.config.inspection import Inspection
from finitune.config.schema import SECTIONS, TrainConfig
from finitune.config.text import KeyPath, Locate, Written, foreign, item_of, read_toml
from finitune.errors import UsageError
from finitune.report import Finding, Level

if TYPE_CHECKING:
    from tomlkit.items import Table

OTHER_PROGRAMS = {
    "kohya's scripts": ("pretrained_model_name_or_path", "network_module", "dataset_config", "train_data_dir"),
    "diffusion-pipe": ("micro_batch_size_per_gpu", "pipeline_stages", "transformer_path"),
    "lora-scripts": ("model_train_type",),
    "Easy Training Scripts": ("train_mode",),
}
"""Keys by which a TOML of another program is known, where it is not ours."""


@dataclass(frozen=True)
class Loaded:
    """A configuration with what was said on reading it; `imported` is the account of another program's keys."""

    config: TrainConfig
    findings: tuple[Finding, ...]
    imported: Imported | None
    source: Path


def nowhere(path: KeyPath) -> None:
    """The line of a key in a document without lines."""


def read_config(path: Path) -> Loaded:
    """The configuration in a TOML file of ours; a relative path in it may be beside the file.

    Raises FileError where there is no such file, and UsageError: CONFIG-ENCODING, CONFIG-SYNTAX, CONFIG-FOREIGN for
    the configuration of another program, or CONFIG-INVALID with every fault.
    """
    written = read_toml(path)
    refuse_foreign(written)
    config, findings = validate(written.document, str(path), written.locate, path.parent)
    return Loaded(config, findings, None, path)


def validate(
    document: Mapping[str, Any], source: str = "", locate: Locate = nowhere, beside: Path | None = None
) -> tuple[TrainConfig, tuple[Finding, ...]]:
    """The configuration that a document describes, {section: {option: value}}, and what was put right.

    An option that is None counts as left out. `source` names the document to people, `locate` the lines of its keys;
    relative paths that lead nowhere are looked for in the folder `beside`.
    Raises UsageError (CONFIG-INVALID), whose evidence "faults" lists every one.
    """
    inspection = Inspection(source, locate, document, beside)
    config = inspection.config()
    if config is None:
        raise invalid(source, errors(inspection))
    return config, tuple(inspection.findings)


def faults(document: Mapping[str, Any], source: str = "", locate: Locate = nowhere) -> list[Finding]:
    """Every error in a document, in the order of its lines; the evidence has file, line, key, value and what fits."""
    inspection = Inspection(source, locate, document)
    inspection.config()
    return errors(inspection)


def errors(inspection: Inspection) -> list[Finding]:
    """Its errors in the order of the file."""
    found = [finding for finding in inspection.findings if finding.level is Level.ERROR]
    return sorted(found, key=lambda finding: int(str(finding.evidence.get("line", sys.maxsize))))


def invalid(source: str, found: list[Finding]) -> UsageError:
    """The one error for all faults of a document."""
    told = [(f"line {f.evidence['line']}: " if "line" in f.evidence else "") + f.message for f in found]
    one = len(found) == 1
    lines = told if one else [sentences(text, f.remedy) for text, f in zip(told, found, strict=True)]
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


def sentences(message: str, remedy: str) -> str:
    """A message and its remedy on one line."""
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} {remedy}" if remedy else message


def refuse_foreign(written: Written) -> None:
    """Raise UsageError (CONFIG-FOREIGN) for a TOML of another program."""
    document = written.document
    models = [table for name, table in document.items() if nearest(name, ("model",)) and isinstance(table, Mapping)]
    if any("pretrained_model_name_or_path" in table for table in models):
        return
    inside = [name for table in document.values() if isinstance(table, Mapping) for name in table]
    keys = {*document, *inside}
    for program, known in OTHER_PROGRAMS.items():
        found = [key for key in known if key in keys]
        if found:
            raise foreign(written.source, f"{found[0]} stands there as in one of {program}")


def dump(config: TrainConfig) -> str:
    """The configuration as TOML with every option that is not None; `validate` of it gives an equal one.

    Of datasets and subsets only what was written down: the rest they have from the level above.
    """
    import tomlkit

    document = tomlkit.document()
    for name in (*SECTIONS, "general"):
        document.append(name, table_of(dict(getattr(config, name))))
    if config.datasets:
        tables = tomlkit.aot()
        for dataset in config.datasets:
            subsets = tomlkit.aot()
            for subset in dataset.subsets:
                subsets.append(table_of(written(subset)))
            tables.append(table_of(written(dataset)))
            if subsets:
                tables[-1].append("subsets", subsets)
        document.append("datasets", tables)
    return tomlkit.dumps(document)


def written(section: Section) -> dict[str, Any]:
    """The options that were written down, in the order of the schema, without lists of tables."""
    given = stated(section)
    return {name: given[name] for name in type(section).model_fields if name in given and name != "subsets"}


def table_of(options: Mapping[str, Any]) -> Table:
    """Options as a table of TOML, None left out."""
    import tomlkit

    table = tomlkit.table()
    for name, value in options.items():
        if name == "optimizer_args" and holds_none(value):
            # TOML has no None, which is a value to some optimisers: eps = (None, 1e-3).
            value = [f"{argument}={inner!r}" for argument, inner in value.items()]
        if value is not None:
            table.append(name, item_of(value))
    return table


def holds_none(value: Any) -> bool:
    """Whether there is a None somewhere inside."""
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(holds_none, value.values() if isinstance(value, Mapping) else value))
    return value is None
