"""A training's configuration as `finitune check` reads it: ours or another program's, with all of its faults at once.

A fault in one place hides none in another: what is refused is left out, and the rest looked at. The program of a
foreign file does not refuse unknown keys, so that the account of its keys is half of what there is to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomlkit
from rapidfuzz import fuzz

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyReason, KeyStatus
from finitune.config.inspection import ConfigInspection, format_table_header
from finitune.config.option_types import (
    NUMBER_AS_TEXT_CODE,
    SECTION_BY_HEADER,
    list_union_members,
    parse_readable_number,
)
from finitune.config.read import locate_nothing, reject_foreign_config
from finitune.config.schema import TrainConfig
from finitune.config.toml_text import (
    KeyLocator,
    find_key_line,
    format_key_path,
    parse_key_path,
    read_config_text,
    read_toml,
    rename_toml_key,
    unquote_toml_value,
)
from finitune.errors import FinituneError, UsageError
from finitune.files.writer import write_text
from finitune.importers.foreign_text import read_foreign_text
from finitune.importers.mapping import iterate_config_leaves
from finitune.importers.recognise import FINITUNE_CONFIG, read_foreign_config, recognise_config_kind
from finitune.report import Finding, Level, Report, summarize_names
from finitune.verbs.check.request import UNNAMED_PLACEHOLDER, FileFix, Request

_MIN_KEY_SIMILARITY = 90
"""How like an option a misspelled key must be, in percent of their letters, for the right name to be offered."""
_DATASET_TOML_SECTIONS = {"general", "datasets"}
_PLACEHOLDER_OPTIONS = {
    "model": {"pretrained_model_name_or_path": UNNAMED_PLACEHOLDER},
    "saving": {"output_dir": UNNAMED_PLACEHOLDER},
}


@dataclass(frozen=True)
class OpenedConfig:
    """A configuration file: its text, its keys, the configuration (None where too much of it is wrong)."""

    text: str
    lines: tuple[ImportedKey, ...]
    config: TrainConfig | None


def open_checked_config(path: Path, request: Request, report: Report) -> OpenedConfig:
    """The file read strictly, with every fault of it in the report; raises for what cannot be read at all."""
    text = read_config_text(path)
    try:
        written = read_toml(path)
        if written.document.keys() <= _DATASET_TOML_SECTIONS and written.document:
            return open_dataset_toml(path, text, request, report)
        reject_foreign_config(written)
    except UsageError as error:
        if error.code != "CONFIG-FOREIGN" and not is_foreign_config(path):
            raise
        return open_foreign_config(path, text, request, report)
    if is_foreign_config(path):
        return open_foreign_config(path, text, request, report)
    lines = tuple(
        ImportedKey(format_key_path(where), value, KeyStatus.TAKEN)
        for where, value, _ in iterate_config_leaves(written.document)
    )
    config = inspect_config_document(written.document, path, text, request, report, written.locate)
    return OpenedConfig(text, lines, config)


def is_foreign_config(path: Path) -> bool:
    try:
        text = read_foreign_text(path)
    except FinituneError:
        return False
    return text.language == "command line" or recognise_config_kind(text.document) not in ("", FINITUNE_CONFIG)


def open_dataset_toml(path: Path, text: str, request: Request, report: Report) -> OpenedConfig:
    """A dataset TOML alone: each key as strictly as in a configuration, then with sd-scripts' defaults."""
    written = read_toml(path)
    report.figures["program"] = "dataset TOML"
    inspect_config_document(fill_placeholder_options(written.document), path, text, request, report, written.locate)
    imported = read_foreign_config(path)
    report.findings += [one for one in imported.findings if one.code != "CONFIG-UNKNOWN-KEY"]  # told with its line
    return OpenedConfig(
        text, imported.lines, parse_remaining_config(fill_placeholder_options(imported.document), path.parent)
    )


def open_foreign_config(path: Path, text: str, request: Request, report: Report) -> OpenedConfig:
    """The configuration of another program in our terms, with the account of its keys."""
    imported = read_foreign_config(path)
    report.figures.update(program=imported.program, keys=imported.table().as_dicts())
    report.tables.append(imported.table())
    report.findings += [add_line_to_finding(finding, path, text) for finding in imported.findings]
    report.findings += check_imported_keys(imported, path)
    document = fill_placeholder_options(imported.document) if imported.datasets_only else imported.document
    return OpenedConfig(
        text, imported.lines, inspect_config_document(document, path, text, request, report, locate_nothing)
    )


def fill_placeholder_options(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with a model and a folder, where it names none: datasets can be looked at without."""
    filled = dict(document)
    for name, options in _PLACEHOLDER_OPTIONS.items():
        given = document.get(name)
        filled[name] = {**options, **given} if isinstance(given, Mapping) else options
    return filled


def inspect_config_document(
    document: Mapping[str, Any], path: Path, text: str, request: Request, report: Report, locate: KeyLocator
) -> TrainConfig | None:
    """The configuration of a document; where there are faults, of what is left without them."""
    ours = locate is not locate_nothing
    beside = path.parent if ours else None  # as `finitune train` reads it
    inspection = ConfigInspection(str(path), locate, document, beside)
    config = inspection.config()
    report.findings.extend(inspection.findings)
    if ours:
        request.mendings.extend(build_config_fixes(inspection.findings, path, text))
    if config is not None:
        return config
    return parse_remaining_config(
        remove_refused_paths(document, {inspection.shown(place) for place in inspection.refused}), beside
    )


def parse_remaining_config(document: Mapping[str, Any], beside: Path | None) -> TrainConfig | None:
    """The configuration of a document whose faults were told; None where it still has some."""
    return ConfigInspection("", locate_nothing, fill_placeholder_options(document), beside).config()


def remove_refused_paths(value: Any, without: Iterable[tuple[str | int, ...]], path: tuple[str | int, ...] = ()) -> Any:
    """A document without what stands at some paths."""
    refused = set(without)
    if isinstance(value, Mapping):
        return {
            name: remove_refused_paths(item, refused, (*path, str(name)))
            for name, item in value.items()
            if (*path, str(name)) not in refused
        }
    if isinstance(value, (list, tuple)):
        return [
            remove_refused_paths(item, refused, (*path, n)) for n, item in enumerate(value) if (*path, n) not in refused
        ]
    return value


def add_line_to_finding(finding: Finding, path: Path, text: str) -> Finding:
    """A finding about a key of a foreign configuration, with the line on which the key stands."""
    source, _, key = finding.subject.partition(": ")
    line = find_key_line(text, key) if key and source == str(path) else None
    if line is None:
        return finding
    evidence = {"file": str(path), "line": line, "key": key, **finding.evidence}
    return replace(finding, subject=f"{path}:{line}: {key}", evidence=evidence)


def check_imported_keys(imported: ImportedConfig, path: Path) -> list[Finding]:
    """What the account of the keys says beside its table: numbers as text, keys without effect."""
    texts = [f"{line.key} = {line.value!r}" for line in imported.lines if is_number_as_text(line)]
    what = f"numbers or truth values are written as text, and taken as what they look like ({len(texts)})"
    found = summarize_names(Level.WARNING, NUMBER_AS_TEXT_CODE, str(path), what, texts, "Write them without quotes.")
    idle = [
        f"{line.key} ({line.note})"
        for line in imported.lines
        if line.fate is KeyStatus.NO_EFFECT
        and line.value not in (None, "", [], {}, False, 0)  # being off is no slip
        and line.reason is not KeyReason.OFF
    ]
    what = f"keys have no effect in {imported.kind} either ({len(idle)})"
    return found + summarize_names(Level.NOTE, "CONFIG-KEYS-IDLE", str(path), what, idle)


def is_number_as_text(line: ImportedKey) -> bool:
    """Whether a key of a file, not of a command line, has a number in quotes; YAML 1.1 reads 1e-4 as text, too."""
    if line.reason is KeyReason.READ_FROM_TEXT:
        return True
    name, _, key = line.ours.partition(".")
    section = TrainConfig.model_fields.get(name)
    known = getattr(section.annotation, "model_fields", {}) if section else {}
    kinds = list_union_members(known[key].annotation) if key in known else []
    written = isinstance(line.value, str) and not line.key.rpartition(".")[2].startswith("-")
    return written and parse_readable_number(str(line.value)) is not None and bool({int, float} & {*kinds})


def build_config_fixes(findings: Iterable[Finding], path: Path, text: str) -> list[FileFix]:
    """What can be mended in the text of a configuration of ours: numbers out of their quotes, misspelled keys.

    A misspelled key is a guess: it is offered where one option alone is near, its place is free, and its value fits.
    """
    offered: list[FileFix] = []
    for finding in findings:
        line, key = finding.evidence.get("line"), finding.evidence.get("key")
        if not isinstance(line, int) or not isinstance(key, str):
            continue
        where = parse_key_path(key)
        if finding.code == NUMBER_AS_TEXT_CODE and unquote_toml_value(text, line, where):
            what = f"Write the value of {key} without quotes (line {line})"
            amend = partial(unquote_toml_value, line=line, key=where)
        elif finding.code == "CONFIG-UNKNOWN-KEY" and (name := find_nearest_option(where, text)):
            what = f"Write {name} in place of {where[-1]} (line {line})"
            amend = partial(rename_toml_key, line=line, key=where, name=name)
        else:
            continue
        offered.append(FileFix(finding.code, path, what, partial(amend_config, path, amend)))
    return offered


def amend_config(path: Path, amend: Callable[[str], str | None]) -> None:
    """Rewrite a file as `amend` says, which returns None where the fault is there no more."""
    text = amend(read_config_text(path))
    if text is not None:
        write_text(path, text)


def find_nearest_option(where: tuple[str | int, ...], text: str) -> str | None:
    """The only option of its table that an unknown key is near to, if it is free there; None elsewhere."""
    level = SECTION_BY_HEADER.get(format_table_header(where[:-1]))
    name = str(where[-1])
    if level is None:
        return None
    near = [option for option in level.model_fields if fuzz.ratio(name.casefold(), option) >= _MIN_KEY_SIMILARITY]
    if len(near) != 1:
        return None
    line = find_key_line(text, name)
    mended = rename_toml_key(text, line, where, near[0]) if line else None
    if not mended:
        return None
    inspection = ConfigInspection("", locate_nothing, tomlkit.parse(mended).unwrap())
    inspection.config()
    return None if (*where[:-1], near[0]) in inspection.refused else near[0]
