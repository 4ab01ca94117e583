"""Whose configuration it is, told by its content, and the importer for it.

Each program is known by option names that no other has. The one with the most of them in the document is taken, with
what it was known by; less than two (or one that leaves no doubt) is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.errors import FileError, UsageError
from finitune.importers.config_signatures import (
    AI_TOOLKIT_CONFIG,
    CONFIG_SIGNATURES,
    DIFFUSION_PIPE_CONFIG,
    DIFFUSION_PIPE_DATASET,
    FINITUNE_CONFIG,
    KOHYA_COMMAND_LINE,
    KOHYA_DATASET_TOML,
    KOHYA_GUI_JSON,
    KOHYA_TRAINING_TOML,
    ONETRAINER_CONCEPTS,
    ONETRAINER_CONFIG,
    SIMPLETUNER_BACKENDS,
    SIMPLETUNER_CONFIG,
)
from finitune.importers.foreign_text import ForeignText, find_command_line, read_foreign_text
from finitune.importers.mapping import ConfigFileReader, iterate_config_leaves

_MIN_MARK_SCORE = 2
_MAX_SOURCE_NAME_LENGTH = 200


def recognise_config_kind(document: Any) -> str:
    """The name of the kind that a document is of (see KINDS); '' where too little speaks for any."""
    ranked = rank_config_kinds(document)
    return ranked[0][0] if ranked and has_enough_marks(*ranked[0]) else ""


def rank_config_kinds(document: Any) -> list[tuple[str, list[str]]]:
    """The kinds that something speaks for, with what does, the strongest first."""
    names, top = (
        frozenset(iterate_key_names(document)),
        frozenset(map(strip_key_dashes, document) if isinstance(document, Mapping) else ()),
    )
    found = [(kind.name, kind.found(names, top)) for kind in CONFIG_SIGNATURES]
    return sorted((pair for pair in found if pair[1]), key=lambda pair: -score_config_marks(*pair))


def score_config_marks(kind: str, marks: list[str]) -> int:
    """The number of marks, those that leave no doubt counted twice."""
    sure = {mark.lstrip("*") for known in CONFIG_SIGNATURES if known.name == kind for mark in known.sure}
    return sum(2 if mark in sure else 1 for mark in marks)


def has_enough_marks(kind: str, marks: list[str]) -> bool:
    """Whether the marks are enough to say whose it is."""
    return score_config_marks(kind, marks) >= _MIN_MARK_SCORE


def strip_key_dashes(name: object) -> str:
    """A name without the dashes that SimpleTuner allows in front."""
    return str(name).lstrip("-")


def iterate_key_names(value: Any, path: str = "", depth: int = 4) -> Iterator[str]:
    """Every path in a document down to some depth, and the last part of each behind a star."""
    if depth and isinstance(value, Mapping):
        for key, item in value.items():
            here = f"{path}.{strip_key_dashes(key)}" if path else strip_key_dashes(key)
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
    if not ranked or not has_enough_marks(*ranked[0]):
        raise make_unrecognised_error(path, text, ranked)
    kind, marks = ranked[0]
    try:
        imported = _IMPORTER_BY_KIND[kind](text.document, path)
    except RecursionError:
        raise make_unrecognised_error(path, text, ranked) from None
    known = f"{kind} (known by {', '.join(marks[:4])}{', ...' if len(marks) > 4 else ''})"
    return replace(imported, program=known, findings=(*text.findings, *imported.findings))


def is_file(path: Path) -> bool:
    """Whether there is such a file; a command line may be no possible name at all."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def make_missing_source_error(source: str) -> FileError:
    """The error for what is neither a file nor a command line."""
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
    tried = [kind.name for kind in CONFIG_SIGNATURES] + [KOHYA_COMMAND_LINE]
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
    from finitune.importers.kohya import import_kohya_flags

    return replace(import_kohya_flags(line), program=f"{KOHYA_COMMAND_LINE} (known by {known})")


def make_config_file_reader(path: Path) -> ConfigFileReader:
    """Reads the files that a configuration names: from here, from its own folder, or by their names beside it."""

    def read(name: str) -> Any:
        relative = Path(name.replace("\\", "/"))
        for candidate in (relative, path.parent / relative, path.parent / relative.name):
            if is_file(candidate) and candidate.resolve() != path.resolve():
                return read_foreign_text(candidate).document
        return None

    return read


def _import_own_config(document: Any, path: Path) -> ImportedConfig:
    keys = ((format_key_path(where), value) for where, value, _ in iterate_config_leaves(document))
    return ImportedConfig(
        FINITUNE_CONFIG, document, tuple(ImportedKey(key, value, KeyStatus.TAKEN, key) for key, value in keys)
    )


def _import_kohya_training(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.kohya import import_kohya

    return import_kohya(document, path)


def _import_kohya_dataset(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.kohya_datasets import import_kohya_dataset

    return import_kohya_dataset(document, path)


def _import_kohya_gui(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.kohya_gui import import_kohya_gui

    return import_kohya_gui(document, path)


def _import_ai_toolkit(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.ai_toolkit import import_ai_toolkit

    return import_ai_toolkit(document, path)


def _import_onetrainer(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.onetrainer import import_onetrainer

    return import_onetrainer(document, path, make_config_file_reader(path))


def _import_onetrainer_concepts(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.onetrainer import import_onetrainer_concepts

    return import_onetrainer_concepts(document, path)


def _import_simpletuner(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.simpletuner import import_simpletuner

    return import_simpletuner(document, path, make_config_file_reader(path))


def _import_simpletuner_backends(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.simpletuner import import_simpletuner_backends

    return import_simpletuner_backends(document, path)


def _import_diffusion_pipe(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.diffusion_pipe import import_diffusion_pipe

    return import_diffusion_pipe(document, path, make_config_file_reader(path))


def _import_diffusion_pipe_dataset(document: Any, path: Path) -> ImportedConfig:
    from finitune.importers.diffusion_pipe import import_diffusion_pipe_dataset

    return import_diffusion_pipe_dataset(document, path)


_IMPORTER_BY_KIND: Mapping[str, Callable[[Any, Path], ImportedConfig]] = {
    FINITUNE_CONFIG: _import_own_config,
    KOHYA_TRAINING_TOML: _import_kohya_training,
    KOHYA_DATASET_TOML: _import_kohya_dataset,
    KOHYA_GUI_JSON: _import_kohya_gui,
    AI_TOOLKIT_CONFIG: _import_ai_toolkit,
    ONETRAINER_CONFIG: _import_onetrainer,
    ONETRAINER_CONCEPTS: _import_onetrainer_concepts,
    SIMPLETUNER_CONFIG: _import_simpletuner,
    SIMPLETUNER_BACKENDS: _import_simpletuner_backends,
    DIFFUSION_PIPE_CONFIG: _import_diffusion_pipe,
    DIFFUSION_PIPE_DATASET: _import_diffusion_pipe_dataset,
}
