"""One look through a document that should be a TrainConfig: every fault at once, each with its place and its remedy.

The walk goes down the schema and the document together. It answers for names (unknown, misplaced, misspelled) and for
kinds of values; what is left, the bounds and what is missing, pydantic tells, and is told here in the same words.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from finitune.config.arguments import parse_arguments
from finitune.config.datasets import Section, stated
from finitune.config.homes import home_of, meant_by, nearest
from finitune.config.importers.mapping import spelled
from finitune.config.kinds import AS_TEXT, Unfit, alternatives, kind_of, taken
from finitune.config.schema import TrainConfig
from finitune.config.text import KeyPath, Locate
from finitune.errors import UsageError
from finitune.report import Finding, Level

WRITTEN_TO = ("output_dir", "logging_dir", "cache_dir")
"""Folders that a run makes: never looked for beside the configuration."""
FREE_TEXT = (
    "caption_prefix",
    "caption_separator",
    "caption_suffix",
    "custom_attributes",
    "keep_tokens_separator",
    "optimizer_args",
    "secondary_separator",
    "training_comment",
)
"""Options that may hold tabs and line ends."""
ESCAPES = {"\t": r"\t", "\n": r"\n", "\r": r"\r", "\b": r"\b", "\f": r"\f", "\x1b": r"\e"}
CODES = {
    "missing": "CONFIG-MISSING",
    "greater_than": "CONFIG-RANGE",
    "greater_than_equal": "CONFIG-RANGE",
    "less_than": "CONFIG-RANGE",
    "less_than_equal": "CONFIG-RANGE",
}
PIECES: dict[KeyPath, str] = {
    ("model",): '[model] with pretrained_model_name_or_path = "pico-anima", a folder or a file',
    ("model", "pretrained_model_name_or_path"): 'pretrained_model_name_or_path = "pico-anima", a folder or a file',
    ("saving",): '[saving] with output_dir = "runs/first"',
    ("saving", "output_dir"): 'output_dir = "runs/first"',
}
SHOWN = 60


@dataclass
class Inspection:
    """What is found on the way; `beside` is a folder in which relative paths may be meant, too."""

    source: str
    locate: Locate
    document: Mapping[str, Any]
    beside: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    refused: set[KeyPath] = field(default_factory=set)
    written: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Paths in the document by our paths, where a name is misspelled."""

    def config(self) -> TrainConfig | None:
        """The configuration; None where an error was found."""
        kept = self.section(TrainConfig, self.document, ())
        config = None
        try:
            config = TrainConfig.model_validate(kept)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                self.bound(fault["loc"], fault["type"], fault["input"])
        wrong = any(finding.level is Level.ERROR for finding in self.findings)
        return None if wrong else config

    def section(self, kind: type[Section], given: Any, path: KeyPath) -> dict[str, Any]:
        """The options of a table under their right names, each taken as its kind."""
        given = stated(given) if isinstance(given, Section) else given
        if not isinstance(given, Mapping):
            self.refuse(
                "CONFIG-TYPE", path, given, f"{header(path)} must be a table", f"Write {header(path)} and its options."
            )
            return {}
        fields, given = kind.model_fields, {str(name): value for name, value in given.items()}
        kept: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            option = name if name in fields else self.stray(fields, name, given, path)
            if option is not None:
                kept[option] = self.option(fields[option], value, (*path, option))
        return kept

    def stray(self, fields: Mapping[str, FieldInfo], name: str, given: Mapping[str, Any], path: KeyPath) -> str | None:
        """Refuse a name that has no place here; the sibling that it is a misspelling of, if that is not there."""
        home, here, value = home_of(name), header(path) or "the file outside of its tables", given[name]
        self.written[(*path, name)] = place = (*self.shown(path), name)
        if home is not None:
            again = self.elsewhere(name, home.levels[0])
            message = f"{name} belongs in {home}{again}, not in {here}"
            self.refuse("CONFIG-MISPLACED-KEY", place, value, message, f"Move it to {home}.", belongs=str(home))
            return None
        if not path and isinstance(value, (Mapping, list)):
            sibling = nearest(name, fields)
            message = f"there is no table {header((name, 0) if isinstance(value, list) else (name,))}"
            guess = header((sibling, 0) if sibling == "datasets" else (sibling,)) if sibling else ""
        else:
            sibling, meant = nearest(name, fields), meant_by(name, fields)
            message = f"{here} has no option {name!r}"
            elsewhere = "" if meant is None or meant.option in fields else f" in {meant}"
            guess = f"{meant.option!r}{elsewhere}" if meant else ""
        message += f". Did you mean {guess}?" if guess else ""
        remedy = "" if guess else "`finitune train --init` writes every option with its meaning."
        self.refuse("CONFIG-UNKNOWN-KEY", place, value, message, remedy)
        if sibling is None or sibling in given:
            return None
        self.written[(*path, sibling)] = place
        return sibling

    def elsewhere(self, name: str, level: str) -> str:
        """What to add where a misplaced option stands in its right place, too."""
        section = level.strip("[]")
        table = self.document.get(section)
        if not isinstance(table, Mapping) or name not in table:
            return ""
        line = self.locate((section, name))
        return ", where it is already" + (f" (line {line})" if line else "")

    def option(self, field: FieldInfo, value: Any, path: KeyPath) -> Any:
        """An option as its kind: a table, a list of tables, or a value."""
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            return self.section(kind, value, path)
        each = get_args(kind)[0] if get_origin(kind) is tuple else None
        if isinstance(each, type) and issubclass(each, Section):
            if isinstance(value, (list, tuple)):
                return tuple(self.section(each, item, (*path, place)) for place, item in enumerate(value))
            many = header((*path, 0))
            self.refuse(
                "CONFIG-TYPE", path, value, f"{many} must be a list of tables", f"Write {many}, in two brackets."
            )
            return ()
        return self.value(field, value, path)

    def value(self, field: FieldInfo, value: Any, path: KeyPath) -> Any:
        """A value as its kind, with what was put right said."""
        name = path[-1]
        try:
            if isinstance(value, str) and is_path(field, path):
                value = at_home(value)
            if name == "optimizer_args" and isinstance(value, (str, list, tuple, Mapping)):
                arguments, findings = parse_arguments(value, self.named(path))
                self.findings += findings
                return arguments
            kept, code = taken(field.annotation, value)
        except UsageError as error:
            self.refuse(error.code, path, value, error.message, error.remedy)
            return value
        except Unfit as unfit:
            self.misfit(unfit.code, field, value, path, unfit.hint)
            return value
        if code:
            level = Level.WARNING if code == AS_TEXT else Level.NOTE
            what = "is in quotes" if code == AS_TEXT else "has a fraction of zero"
            remedy = "Leave the quotes out." if code == AS_TEXT else ""
            message = f"{self.named(path)} = {brief(value)} {what}; it is taken as {brief(kept)}"
            self.say(level, code, path, value, message, remedy)
        if name not in FREE_TEXT:
            self.escapes(field, kept, path)
        return self.path_beside(field, kept, path) if self.beside else kept

    def escapes(self, field: FieldInfo, value: Any, path: KeyPath) -> None:
        """Refuse a path or a prompt with a control character: an escape that was not meant."""
        texts = [value] if isinstance(value, str) else list(value) if isinstance(value, (tuple, dict)) else []
        for text in texts:
            signs = [sign for sign in str(text) if unicodedata.category(sign) == "Cc"]
            if signs:
                meant = "".join(ESCAPES.get(sign, sign) for sign in text)
                slashes = ", or / for each backslash" if is_path(field, path) and isinstance(value, str) else ""
                self.refuse(
                    "CONFIG-ESCAPE",
                    path,
                    text,
                    f"{self.named(path)} holds a control character, U+{ord(signs[0]):04X}: "
                    f"{ESCAPES.get(signs[0], 'it')} in double quotes is an escape",
                    f"Write '{meant}' in single quotes{slashes}.",
                )

    def path_beside(self, field: FieldInfo, value: Any, path: KeyPath) -> Any:
        """A relative path that leads nowhere from the current folder, from the configuration's where it does there."""
        name = path[-1]
        bare = name == "pretrained_model_name_or_path" and isinstance(value, str) and Path(value).name == value
        if not is_path(field, path) or name in WRITTEN_TO or not isinstance(value, (str, Path)):
            return value
        if bare and not Path(value).suffix:
            return value
        assert self.beside is not None
        there = self.beside / value
        if value in ("never", "auto") or exists(Path(value)) or not exists(there):
            return value
        message = f"{self.named(path)} = {brief(value)} is not in the current folder; beside the configuration it is"
        self.say(Level.NOTE, "CONFIG-PATH-BESIDE", path, value, message, taken=str(there))
        return str(there)

    def bound(self, location: Sequence[int | str], kind: str, value: Any) -> None:
        """What pydantic found, unless that place was refused before."""
        field, path = resolved(location)
        if any(path[:n] in self.refused for n in range(len(path) + 1)):
            return
        if kind == "missing":
            where = header(path[:-1]) or "the file"
            piece = PIECES.get(path, f"{path[-1]} = ..., {kind_of(field)}" if field else self.named(path))
            message = f"{header(path) if len(path) == 1 else path[-1]} is missing in {where}"
            self.refuse("CONFIG-MISSING", path, None, message, f"Add {piece}.")
        elif field is not None:
            self.misfit(CODES.get(kind, "CONFIG-TYPE"), field, value, path)

    def misfit(self, code: str, field: FieldInfo, value: Any, path: KeyPath, hint: str = "") -> None:
        """Refuse a value, saying what would fit."""
        expected = kind_of(field)
        message = f"{self.named(path)} = {brief(value)} is not {expected}." + (f" {hint}" if hint else "")
        remedy = f"{path[-1]}: {' '.join(field.description.split())}" if field.description else ""
        self.refuse(code, path, value, message, remedy, expected=expected)

    def refuse(self, code: str, path: KeyPath, value: Any, message: str, remedy: str = "", **evidence: object) -> None:
        """An error at a path."""
        self.refused.add(path)
        self.say(Level.ERROR, code, path, value, message, remedy, **evidence)

    def say(
        self, level: Level, code: str, path: KeyPath, value: Any, message: str, remedy: str = "", **evidence: object
    ) -> None:
        """A finding at a path of ours, told with the place in the document."""
        shown = self.shown(path)
        line, key = self.locate(shown), spelled(shown)
        place = f"{self.source}:{line}" if line else self.source
        facts = {"file": self.source, "line": line, "key": key, "value": value, **evidence}
        facts = {name: fact for name, fact in facts.items() if fact not in (None, "")}
        subject = ": ".join(part for part in (place, key) if part)
        self.findings.append(Finding(level, code, subject, message, facts, remedy))

    def named(self, path: KeyPath) -> str:
        """A path as people write it: datasets[0].resolution."""
        return spelled(self.shown(path))

    def shown(self, path: KeyPath) -> KeyPath:
        """A path as it is written in the document."""
        known = (n for n in range(len(path), 0, -1) if path[:n] in self.written)
        return next((self.written[path[:n]] + path[n:] for n in known), path)


def resolved(location: Sequence[int | str]) -> tuple[FieldInfo | None, KeyPath]:
    """The option that a place in pydantic's sense belongs to, and its path: what is inside of a value is left off."""
    kind: Any = TrainConfig
    field, path = None, ()
    for part in location:
        if isinstance(part, int) and isinstance(kind, type):
            path = (*path, part)
        elif isinstance(kind, type) and issubclass(kind, Section) and part in kind.model_fields:
            field, path = kind.model_fields[part], (*path, part)
            inner = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else field.annotation
            kind = inner if isinstance(inner, type) and issubclass(inner, Section) else None
        else:
            break
    return field, path


def is_path(field: FieldInfo, path: KeyPath) -> bool:
    """Whether an option may name a file or a folder."""
    return Path in alternatives(field.annotation) or path[-1] == "pretrained_model_name_or_path"


def at_home(text: str) -> str:
    """A path with ~ at its beginning as the home folder, as shells have it."""
    return str(Path(text).expanduser()) if text == "~" or text.startswith(("~/", "~\\")) else text


def header(path: KeyPath) -> str:
    """The header of a table as TOML writes it; "" for the file itself."""
    names = ".".join(part for part in path if isinstance(part, str))
    return f"[[{names}]]" if any(isinstance(part, int) for part in path) else f"[{names}]" if names else ""


def brief(value: Any) -> str:
    """A value as TOML would write it, cut where it is long."""
    text = (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, (str, Path))
        else repr(value)
    )
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; no where the system cannot hold such a name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
