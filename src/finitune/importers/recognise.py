"""Whose configuration it is, told by its content, and the importer for it.

Each program is known by option names that no other has. The one with the most of them in the document is taken, with
what it was known by; less than two (or one that leaves no doubt) is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.errors import FileError, UsageError
from finitune.importers.ai_toolkit import import_ai_toolkit
from finitune.importers.diffusion_pipe import import_diffusion_pipe, import_diffusion_pipe_dataset
from finitune.importers.foreign_text import ForeignText, find_command_line, read_foreign_text
from finitune.importers.key_tables import ConfigSignature, read_signatures
from finitune.importers.kohya import import_kohya, import_kohya_flags
from finitune.importers.kohya_datasets import import_kohya_dataset
from finitune.importers.kohya_gui import import_kohya_gui
from finitune.importers.mapping import ConfigFileReader, iterate_config_leaves
from finitune.importers.onetrainer import import_onetrainer, import_onetrainer_concepts
from finitune.importers.simpletuner import import_simpletuner, import_simpletuner_backends

FINITUNE_CONFIG = "finitune"
KOHYA_COMMAND_LINE = "sd-scripts command line"
_PROGRAM_FILES = ("finitune", "kohya", "kohya_gui", "ai_toolkit", "onetrainer", "simpletuner", "diffusion_pipe")
_MIN_MARK_SCORE = 2
_MAX_SOURCE_NAME_LENGTH = 200


@cache
def read_config_signatures() -> dict[str, ConfigSignature]:
    """The sorts of documents that are known, by name."""
    return {kind.name: kind for file in _PROGRAM_FILES for kind in read_signatures(file)}


def recognise_config_kind(document: Any) -> str:
    """The name of the kind that a document is of; '' where too little speaks for any."""
    ranked = rank_config_kinds(document)
    return ranked[0][0] if ranked and score_config_marks(*ranked[0]) >= _MIN_MARK_SCORE else ""


def rank_config_kinds(document: Any) -> list[tuple[str, list[str]]]:
    """The kinds that something speaks for, with what does, the strongest first."""
    names = frozenset(iterate_key_names(document))
    top = frozenset(map(strip_key_dashes, document) if isinstance(document, Mapping) else ())
    found = [(kind.name, kind.found(names, top)) for kind in read_config_signatures().values()]
    return sorted((pair for pair in found if pair[1]), key=lambda pair: -score_config_marks(*pair))


def score_config_marks(kind: str, marks: list[str]) -> int:
    sure = {mark.lstrip("*") for mark in read_config_signatures()[kind].sure}
    return sum(2 if mark in sure else 1 for mark in marks)


def strip_key_dashes(name: object) -> str:
    """A name without the dashes that SimpleTuner allows in front."""
    return str(name).lstrip("-")


def iterate_key_names(value: Any, path: str = "", depth: int = 4) -> Iterator[str]:
    """Every path in a document down to some depth, and the last part of each behind a star."""
    if depth and isinstance(value, Mapping):
        for key, item in value.items():
            here = f"{path}.{strip_key_dashes(key)}".lstrip(".")
            yield here
            yield f"*{strip_key_dashes(key)}"
            yield from iterate_key_names(item, here, depth - 1)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield from iterate_key_names(item, f"{path}[]", depth)


def read_foreign_config(source: str | Path) -> ImportedConfig:
    """The configuration of any program in our terms, from its file or from a command line; `program` says how it was
    known.

    Raises FileError for a file that is not there; UsageError: CONFIG-ENCODING, CONFIG-SYNTAX, CONFIG-UNRECOGNISED, and
    those of the importers.
    """
    path = Path(source)
    if isinstance(source, str) and not is_file(path):
        if line := find_command_line(source) or (source if re.search(r"(^|\s)--\w", source) else None):
            return import_command_line(line, "its flags")
        raise make_missing_source_error(source)
    text = read_foreign_text(path)
    if text.language == "command line":
        return import_command_line(str(text.document), f"a command line in {path.name}")
    ranked = rank_config_kinds(text.document)
    if not ranked or score_config_marks(*ranked[0]) < _MIN_MARK_SCORE:
        raise make_unrecognised_error(path, text, ranked)
    kind, marks = ranked[0]
    try:
        imported = _IMPORTER_BY_KIND[kind](text.document, path)
    except RecursionError:
        raise make_unrecognised_error(path, text, ranked) from None
    known = f"{kind} (known by {', '.join(marks[:4])}{', ...' if len(marks) > 4 else ''})"
    findings = (*text.findings, *imported.findings)
    alone = read_config_signatures()[kind].datasets_only
    return replace(imported, program=known, findings=findings, kind=kind, datasets_only=alone)


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def make_missing_source_error(source: str) -> FileError:
    is_there = len(source) < _MAX_SOURCE_NAME_LENGTH and Path(source).is_dir() and source
    what = "it is a folder, not a file" if is_there else "there is no such file, and it is no command line"
    shown = source if len(source) < _MAX_SOURCE_NAME_LENGTH else f"{source[:_MAX_SOURCE_NAME_LENGTH]}..."
    return FileError(
        f"{shown or '(nothing)'}: {what}",
        code="CONFIG-NO-FILE",
        subject=shown or "--from",
        evidence={"source": source},
        remedy="Give the path of a configuration, or the command line with its --flags in quotes.",
    )


def make_unrecognised_error(path: Path, text: ForeignText, ranked: list[tuple[str, list[str]]]) -> UsageError:
    """The error for a document of no known program: what was tried, and the nearest."""
    tried = [*read_config_signatures(), KOHYA_COMMAND_LINE]
    near = f" The nearest is {ranked[0][0]}, by {', '.join(ranked[0][1])}." if ranked else ""
    return UsageError(
        f"{path} is {text.language}, but the configuration of no program known here.{near}",
        code="CONFIG-UNRECOGNISED",
        subject=str(path),
        evidence={"file": str(path), "language": text.language, "tried": tried, "nearest": dict(ranked)},
        remedy=f"These are known: {', '.join(tried)}. `finitune train --init` writes a configuration to fill in.",
    )


def import_command_line(line: str, known: str) -> ImportedConfig:
    """A command line of sd-scripts."""
    program = f"{KOHYA_COMMAND_LINE} (known by {known})"
    return replace(import_kohya_flags(line), program=program, kind=KOHYA_COMMAND_LINE)


def make_config_file_reader(path: Path) -> ConfigFileReader:
    """Reads the files that a configuration names: from here, from its own folder, or by their names beside it."""

    def read(name: str) -> Any:
        relative = Path(name.replace("\\", "/"))
        for candidate in (relative, path.parent / relative, path.parent / relative.name):
            if is_file(candidate) and candidate.resolve() != path.resolve():
                return read_foreign_text(candidate).document
        return None

    return read


def import_own_config(document: Any, path: Path) -> ImportedConfig:
    """Our own configuration: it is taken as it is."""
    keys = ((format_key_path(where), value) for where, value, _ in iterate_config_leaves(document))
    lines = tuple(ImportedKey(key, value, KeyStatus.TAKEN, key) for key, value in keys)
    return ImportedConfig(FINITUNE_CONFIG, document, lines)


_IMPORTER_BY_KIND: Mapping[str, Callable[[Any, Path], ImportedConfig]] = {
    FINITUNE_CONFIG: import_own_config,
    "sd-scripts training TOML": import_kohya,
    "sd-scripts dataset TOML": import_kohya_dataset,
    "kohya_ss GUI JSON": import_kohya_gui,
    "ai-toolkit": import_ai_toolkit,
    "OneTrainer": lambda document, path: import_onetrainer(document, path, make_config_file_reader(path)),
    "OneTrainer concepts": import_onetrainer_concepts,
    "SimpleTuner": lambda document, path: import_simpletuner(document, path, make_config_file_reader(path)),
    "SimpleTuner data backends": import_simpletuner_backends,
    "diffusion-pipe": lambda document, path: import_diffusion_pipe(document, path, make_config_file_reader(path)),
    "diffusion-pipe dataset": import_diffusion_pipe_dataset,
}
