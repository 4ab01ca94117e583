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

from finitune.config.imported import Fate, Imported, KeyLine
from finitune.config.importers.foreign_text import Text, command_line, read_text
from finitune.config.importers.mapping import Reader, leaves, spelled
from finitune.config.importers.program_marks import (
    AI_TOOLKIT,
    BACKENDS,
    COMMAND,
    CONCEPTS,
    DIFFUSION_PIPE,
    DIFFUSION_PIPE_DATASET,
    GUI,
    KINDS,
    KOHYA,
    KOHYA_DATASET,
    ONETRAINER,
    OURS,
    SIMPLETUNER,
)
from finitune.errors import FileError, UsageError

ENOUGH = 2
LONGEST_NAME = 200


def recognise(document: Any) -> str:
    """The name of the kind that a document is of (see KINDS); '' where too little speaks for any."""
    ranked = evidence(document)
    return ranked[0][0] if ranked and sufficient(*ranked[0]) else ""


def evidence(document: Any) -> list[tuple[str, list[str]]]:
    """The kinds that something speaks for, with what does, the strongest first."""
    names, top = frozenset(names_of(document)), frozenset(map(plain, document) if isinstance(document, Mapping) else ())
    found = [(kind.name, kind.found(names, top)) for kind in KINDS]
    return sorted((pair for pair in found if pair[1]), key=lambda pair: -weight(*pair))


def weight(kind: str, marks: list[str]) -> int:
    """The number of marks, those that leave no doubt counted twice."""
    sure = {mark.lstrip("*") for known in KINDS if known.name == kind for mark in known.sure}
    return sum(2 if mark in sure else 1 for mark in marks)


def sufficient(kind: str, marks: list[str]) -> bool:
    """Whether the marks are enough to say whose it is."""
    return weight(kind, marks) >= ENOUGH


def plain(name: object) -> str:
    """A name without the dashes that SimpleTuner allows in front."""
    return str(name).lstrip("-")


def names_of(value: Any, path: str = "", depth: int = 4) -> Iterator[str]:
    """Every path in a document down to some depth, and the last part of each behind a star."""
    if depth and isinstance(value, Mapping):
        for key, item in value.items():
            here = f"{path}.{plain(key)}" if path else plain(key)
            yield here
            yield f"*{plain(key)}"
            yield from names_of(item, here, depth - 1)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield from names_of(item, f"{path}[]", depth)


def read_foreign(source: str | Path) -> Imported:
    """The configuration of any program in our terms, from its file or from a command line; `program` says how it was
    known.

    Raises FileError for a file that is not there; UsageError: CONFIG-ENCODING, CONFIG-SYNTAX, CONFIG-UNRECOGNISED, and
    those of the importers.
    """
    path = Path(source)
    if isinstance(source, str) and not is_file(path):
        if line := command_line(source) or (source if re.search(r"(^|\s)--\w", source) else None):
            return from_command(line, "its flags")
        raise missing(source)
    text = read_text(path)
    if text.language == "command line":
        return from_command(str(text.document), f"a command line in {path.name}")
    ranked = evidence(text.document)
    if not ranked or not sufficient(*ranked[0]):
        raise unrecognised(path, text, ranked)
    kind, marks = ranked[0]
    try:
        imported = IMPORTERS[kind](text.document, path)
    except RecursionError:
        raise unrecognised(path, text, ranked) from None
    known = f"{kind} (known by {', '.join(marks[:4])}{', ...' if len(marks) > 4 else ''})"
    return replace(imported, program=known, findings=(*text.findings, *imported.findings))


def is_file(path: Path) -> bool:
    """Whether there is such a file; a command line may be no possible name at all."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def missing(source: str) -> FileError:
    """The error for what is neither a file nor a command line."""
    is_there = len(source) < LONGEST_NAME and Path(source).is_dir() and source
    what = "it is a folder, not a file" if is_there else "there is no such file, and it is no command line"
    shown = source if len(source) < LONGEST_NAME else f"{source[:LONGEST_NAME]}..."
    return FileError(
        f"{shown or '(nothing)'}: {what}",
        code="CONFIG-NO-FILE",
        subject=shown or "--from",
        evidence={"source": source},
        remedy="Give the path of a configuration, or the command line with its --flags in quotes.",
    )


def unrecognised(path: Path, text: Text, ranked: list[tuple[str, list[str]]]) -> UsageError:
    """The error for a document of no known program: what was tried, and the nearest."""
    tried = [kind.name for kind in KINDS] + [COMMAND]
    near = f" The nearest is {ranked[0][0]}, by {', '.join(ranked[0][1])}." if ranked else ""
    return UsageError(
        f"{path} is {text.language}, but the configuration of no program known here.{near}",
        code="CONFIG-UNRECOGNISED",
        subject=str(path),
        evidence={"file": str(path), "language": text.language, "tried": tried, "nearest": dict(ranked)},
        remedy=f"These are known: {', '.join(tried)}. `finitune train --init` writes a configuration to fill in.",
    )


def from_command(line: str, known: str) -> Imported:
    """A command line of sd-scripts."""
    from finitune.config.importers.kohya import import_flags

    return replace(import_flags(line), program=f"{COMMAND} (known by {known})")


def reader_of(path: Path) -> Reader:
    """Reads the files that a configuration names: from here, from its own folder, or by their names beside it."""

    def read(name: str) -> Any:
        relative = Path(name.replace("\\", "/"))
        for candidate in (relative, path.parent / relative, path.parent / relative.name):
            if is_file(candidate) and candidate.resolve() != path.resolve():
                return read_text(candidate).document
        return None

    return read


def _ours(document: Any, path: Path) -> Imported:
    keys = ((spelled(where), value) for where, value, _ in leaves(document))
    return Imported(OURS, document, tuple(KeyLine(key, value, Fate.TAKEN, key) for key, value in keys))


def _kohya(document: Any, path: Path) -> Imported:
    from finitune.config.importers.kohya import import_kohya

    return import_kohya(document, path)


def _kohya_dataset(document: Any, path: Path) -> Imported:
    from finitune.config.importers.kohya_datasets import import_dataset_toml

    return import_dataset_toml(document, path)


def _gui(document: Any, path: Path) -> Imported:
    from finitune.config.importers.kohya_gui import import_gui

    return import_gui(document, path)


def _ai_toolkit(document: Any, path: Path) -> Imported:
    from finitune.config.importers.ai_toolkit import import_ai_toolkit

    return import_ai_toolkit(document, path)


def _onetrainer(document: Any, path: Path) -> Imported:
    from finitune.config.importers.onetrainer import import_onetrainer

    return import_onetrainer(document, path, reader_of(path))


def _concepts(document: Any, path: Path) -> Imported:
    from finitune.config.importers.onetrainer import import_onetrainer_concepts

    return import_onetrainer_concepts(document, path)


def _simpletuner(document: Any, path: Path) -> Imported:
    from finitune.config.importers.simpletuner import import_simpletuner

    return import_simpletuner(document, path, reader_of(path))


def _backends(document: Any, path: Path) -> Imported:
    from finitune.config.importers.simpletuner import import_simpletuner_backends

    return import_simpletuner_backends(document, path)


def _diffusion_pipe(document: Any, path: Path) -> Imported:
    from finitune.config.importers.diffusion_pipe import import_diffusion_pipe

    return import_diffusion_pipe(document, path, reader_of(path))


def _diffusion_pipe_dataset(document: Any, path: Path) -> Imported:
    from finitune.config.importers.diffusion_pipe import import_diffusion_pipe_dataset

    return import_diffusion_pipe_dataset(document, path)


IMPORTERS: Mapping[str, Callable[[Any, Path], Imported]] = {
    OURS: _ours,
    KOHYA: _kohya,
    KOHYA_DATASET: _kohya_dataset,
    GUI: _gui,
    AI_TOOLKIT: _ai_toolkit,
    ONETRAINER: _onetrainer,
    CONCEPTS: _concepts,
    SIMPLETUNER: _simpletuner,
    BACKENDS: _backends,
    DIFFUSION_PIPE: _diffusion_pipe,
    DIFFUSION_PIPE_DATASET: _diffusion_pipe_dataset,
}
