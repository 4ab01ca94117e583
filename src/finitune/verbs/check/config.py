"""The part of `finitune check` that looks at a training's configuration: ours, or one of another program.

Everything at once: what the file says that cannot be, what excludes each other, what has no effect, what LyCORIS would
make of it, which modules get an adapter, what is wrong with the pictures by their headers, how long the run is, and
what it will write. A fault in one place hides none in another: what is refused is left out, and the rest looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.config.conflicts import find_config_conflicts
from finitune.config.conflicts_run import has_scheduled_previews
from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.inspection import ConfigInspection
from finitune.config.lycoris import find_lycoris_faults
from finitune.config.lycoris_options import LycorisOptions, collect_lycoris_options
from finitune.config.option_types import NUMBER_AS_TEXT_CODE, list_union_members, parse_readable_number
from finitune.config.read import locate_nothing, reject_foreign_config
from finitune.config.schema import TrainConfig
from finitune.config.toml_edit import find_key_line, parse_key_path, rename_toml_key, unquote_toml_value
from finitune.config.toml_text import format_key_path, read_config_text, read_toml
from finitune.errors import FinituneError, UsageError
from finitune.importers.config_signatures import (
    DIFFUSION_PIPE_DATASET,
    KOHYA_DATASET_TOML,
    ONETRAINER_CONCEPTS,
    SIMPLETUNER_BACKENDS,
)
from finitune.importers.mapping import iterate_config_leaves
from finitune.importers.recognise import is_file
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table
from finitune.verbs.check.dataset_pictures import check_training_pictures
from finitune.verbs.check.request import UNNAMED_PLACEHOLDER, FileFix, Request, sort_findings_by_level
from finitune.verbs.check.sites import check_sites

if TYPE_CHECKING:
    from finitune.config.toml_text import KeyLocator

_TEXT_READ_AS_NOTE = "text in the file; read as"
"""How the account of a foreign configuration tells of a number in quotes."""
_NO_DATASET_CODES = ("CONFIG-NO-DATASETS", "DATASET-FOLDER-MISSING")
"""Where one of these is told, it is no news that there are no pictures."""
_MIN_KEY_SIMILARITY = 90
"""How like an option a misspelled key must be, in percent of their letters, for the right name to be offered."""
_DATASET_TOML_SECTIONS = {"general", "datasets"}
_DATASET_ONLY_PROGRAMS = (SIMPLETUNER_BACKENDS, ONETRAINER_CONCEPTS, DIFFUSION_PIPE_DATASET, KOHYA_DATASET_TOML)
"""The files of other programs that name pictures only."""
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


def check_config(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a configuration file of ours or of a program that `finitune train` imports, and of its data."""
    begin = len(report.findings)
    report.figures["kind"] = "config"
    try:
        opened = open_checked_config(path, request, report)
        given = collect_lycoris_options(opened.lines, opened.text)
        report.findings.extend(find_lycoris_faults(given))
        if opened.config is not None:
            check_planned_run(opened.config, find_lycoris_preset(given, path), request, report, progress)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
    sort_findings_by_level(report, begin)


def read_dataset_config(path: Path, request: Request, report: Report) -> TrainConfig | None:
    """The configuration in a file, for its datasets alone; what is wrong with it is in the report."""
    return open_checked_config(path, request, report).config


def find_lycoris_preset(given: LycorisOptions, path: Path) -> Path | None:
    """The preset file that a configuration of LyCORIS names, from here or beside the configuration."""
    name = given.algorithm and (given["preset"] or given["LyCORIS_preset"])
    places = (Path(str(name)), path.parent / str(name)) if name else ()
    return next((place for place in places if is_file(place)), None)


def check_planned_run(
    config: TrainConfig, preset: Path | None, request: Request, report: Report, progress: Progress
) -> None:
    """What a run of a configuration would meet: conflicts, the model, the pictures; and what it would write."""
    whole = config.model.pretrained_model_name_or_path != UNNAMED_PLACEHOLDER
    found = [one for one in find_config_conflicts(config) if whole or one.subject.startswith("datasets")]
    known = any(one.code in _NO_DATASET_CODES for one in report.findings)
    report.findings += [one for one in found if not (known and one.code == "DATASET-NONE")]
    looks = [partial(check_sites, preset), report_planned_files, check_planned_options] if whole else []
    for look in looks:
        try:
            look(config, request, report)
        except FinituneError as error:
            report.findings.append(Finding.of(error))
    if any(dataset.subsets for dataset in config.datasets):
        check_training_pictures(config, request, report, progress, decode=False)


def check_planned_options(config: TrainConfig, request: Request, report: Report) -> None:
    """What a training looks at before its data: the optimiser, the folders to write to, the prompts of previews."""
    from finitune.verbs.shared.model import get_default_picture_size
    from finitune.verbs.train.checks import check_train_options
    from finitune.verbs.train.export import build_preview_settings
    from finitune.verbs.train.prepare import build_model_choice

    build_preview_settings(config.preview, get_default_picture_size(build_model_choice(config)))
    report.findings.extend(check_train_options(config))


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
    """Whether a file is the configuration of another program, for sure."""
    from finitune.importers.config_signatures import FINITUNE_CONFIG
    from finitune.importers.foreign_text import read_foreign_text
    from finitune.importers.recognise import recognise_config_kind

    try:
        text = read_foreign_text(path)
    except FinituneError:
        return False
    return text.language == "command line" or recognise_config_kind(text.document) not in ("", FINITUNE_CONFIG)


def open_dataset_toml(path: Path, text: str, request: Request, report: Report) -> OpenedConfig:
    """A dataset TOML alone: each key as strictly as in a configuration, then with sd-scripts' defaults."""
    from finitune.importers.recognise import read_foreign_config

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
    from finitune.importers.recognise import read_foreign_config

    imported = read_foreign_config(path)
    report.figures.update(program=imported.program, keys=imported.table().as_dicts())
    report.tables.append(imported.table())
    report.findings += [add_line_to_finding(finding, path, text) for finding in imported.findings]
    report.findings += check_imported_keys(imported, path)
    alone = imported.program.startswith(_DATASET_ONLY_PROGRAMS)
    document = fill_placeholder_options(imported.document) if alone else imported.document
    return OpenedConfig(
        text, imported.lines, inspect_config_document(document, path, text, request, report, locate_nothing)
    )


def fill_placeholder_options(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with a model and a folder, where it names none: datasets can be looked at without."""
    return {
        **document,
        **{name: {**options, **get_document_section(document, name)} for name, options in _PLACEHOLDER_OPTIONS.items()},
    }


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


def get_document_section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a document; empty where there is none."""
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


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
    from finitune.datasets.finding_summaries import summarize_names

    texts = [f"{line.key} = {line.value!r}" for line in imported.lines if is_number_as_text(line)]
    what = f"numbers or truth values are written as text, and taken as what they look like ({len(texts)})"
    found = summarize_names(Level.WARNING, NUMBER_AS_TEXT_CODE, str(path), what, texts, "Write them without quotes.")
    idle = [
        f"{line.key} ({line.note})"
        for line in imported.lines
        if line.fate is KeyStatus.NO_EFFECT and has_meaningful_value(line)
    ]
    what = f"keys have no effect in {imported.program.partition(' (')[0]} either ({len(idle)})"
    return found + summarize_names(Level.NOTE, "CONFIG-KEYS-IDLE", str(path), what, idle)


def is_number_as_text(line: ImportedKey) -> bool:
    """Whether a key of a file, not of a command line, has a number in quotes; YAML 1.1 reads 1e-4 as text, too."""
    if _TEXT_READ_AS_NOTE in line.note:
        return True
    name, _, key = line.ours.partition(".")
    known = get_section_fields(name)
    kinds = list_union_members(known[key].annotation) if key in known else []
    written = isinstance(line.value, str) and not line.key.rpartition(".")[2].startswith("-")
    return written and parse_readable_number(str(line.value)) is not None and bool({int, float} & {*kinds})


def get_section_fields(name: str) -> Mapping[str, Any]:
    """The options of one of our sections; none where there is no such section."""
    field = TrainConfig.model_fields.get(name)
    return getattr(field.annotation, "model_fields", {}) if field else {}


def has_meaningful_value(line: ImportedKey) -> bool:
    """Whether a key was given for something: being off is no slip."""
    return line.value not in (None, "", [], {}, False, 0) and line.note not in ("off", "never")


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
            offered.append(FileFix(NUMBER_AS_TEXT_CODE, path, what, partial(remove_value_quotes, path, line, key)))
        if finding.code == "CONFIG-UNKNOWN-KEY" and (name := find_nearest_option(where, text)):
            what = f"Write {name} in place of {where[-1]} (line {line})"
            offered.append(
                FileFix("CONFIG-UNKNOWN-KEY", path, what, partial(rename_misspelled_key, path, line, key, name))
            )
    return offered


def find_nearest_option(where: tuple[str | int, ...], text: str) -> str | None:
    """The only option of its table that an unknown key is near to, if it is free there; None elsewhere."""
    from rapidfuzz import fuzz

    from finitune.config.inspection import format_table_header
    from finitune.config.option_placement import SECTION_BY_HEADER

    level = SECTION_BY_HEADER.get(format_table_header(where[:-1]))
    name = str(where[-1])
    if level is None:
        return None
    near = [option for option in level.model_fields if fuzz.ratio(name.casefold(), option) >= _MIN_KEY_SIMILARITY]
    if len(near) != 1:
        return None
    line = find_key_line(text, name)
    mended = rename_toml_key(text, line, where, near[0]) if line else None
    return near[0] if mended and is_valid_option_value(mended, (*where[:-1], near[0])) else None


def is_valid_option_value(text: str, where: tuple[str | int, ...]) -> bool:
    """Whether what stands at a path of a TOML of ours is a value for that option."""
    import tomlkit

    inspection = ConfigInspection("", locate_nothing, tomlkit.parse(text).unwrap())
    inspection.config()
    return where not in inspection.refused


def remove_value_quotes(path: Path, line: int, key: str) -> None:
    """Write the value of a key without its quotes; nothing where it has none."""
    write_amended_config(path, unquote_toml_value(read_config_text(path), line, parse_key_path(key)))


def rename_misspelled_key(path: Path, line: int, key: str, name: str) -> None:
    """Give a key its right name; nothing where it is there no more."""
    write_amended_config(path, rename_toml_key(read_config_text(path), line, parse_key_path(key), name))


def write_amended_config(path: Path, text: str | None) -> None:
    """Write a configuration's changed text."""
    from finitune.files.writer import write_text

    if text is not None:
        write_text(path, text)


def report_planned_files(config: TrainConfig, request: Request, report: Report) -> None:
    """The files that the run will write, and a warning of those that are there already."""
    from finitune.training.checkpoint import iterate_state_folders
    from finitune.training.run_folder import RunFolder
    from finitune.verbs.train import EFFECTIVE_CONFIG_NAME, RUN_PAGE_NAME

    saving = config.saving
    folder = RunFolder(saving.output_dir)
    name, step, epoch = saving.output_name, saving.save_every_n_steps, saving.save_every_n_epochs
    places = {
        "adapter": folder.adapter_path(name),
        "adapter by step": step and folder.adapter_path(name, step=step),
        "adapter by epoch": epoch and folder.adapter_path(name, epoch=epoch),
        "state to resume from": saving.save_state and folder.state_path(name),
        "configuration in force": folder.path / EFFECTIVE_CONFIG_NAME,
        "cached latents and texts": config.training.cache_dir or folder.path / "cache",
        "previews": has_scheduled_previews(config) and folder.path / "previews",
        "report": config.logging.report and folder.path / RUN_PAGE_NAME,
    }
    table = Table("files that will be written", ("what", "where"), tuple((k, str(v)) for k, v in places.items() if v))
    report.tables.append(table)
    report.figures["files"] = table.as_dicts()
    if (
        saving.resume == "never"
        and folder.path.is_dir()
        and next(iterate_state_folders(folder.path, saving.output_name), None)
    ):
        report.add(
            Level.WARNING,
            "RUN-BEGINS-ANEW",
            str(folder.path),
            "states of an earlier run are here; this one would begin anew and write over them",
            remedy="To go on from them: finitune train CONFIG --resume",
        )
