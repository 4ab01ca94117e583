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
from finitune.config.datasets import ConfigSection, get_stated_options
from finitune.config.option_types import (
    NUMBER_AS_TEXT_CODE,
    OptionTypeError,
    coerce_option_value,
    describe_option_type,
    find_nearest_name,
    find_option_placement,
    guess_meant_option,
    list_union_members,
)
from finitune.config.schema import TrainConfig
from finitune.config.toml_text import KeyLocator, TomlKeyPath, format_key_path
from finitune.errors import UsageError
from finitune.report import Finding, Level

_OUTPUT_FOLDER_OPTIONS = ("output_dir", "logging_dir", "cache_dir")
"""Folders that a run makes: never looked for beside the configuration."""
_FREE_TEXT_OPTIONS = (
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
_ESCAPE_BY_CONTROL_CHARACTER = {"\t": r"\t", "\n": r"\n", "\r": r"\r", "\b": r"\b", "\f": r"\f", "\x1b": r"\e"}
_CODE_BY_PYDANTIC_ERROR = {
    "missing": "CONFIG-MISSING",
    "greater_than": "CONFIG-RANGE",
    "greater_than_equal": "CONFIG-RANGE",
    "less_than": "CONFIG-RANGE",
    "less_than_equal": "CONFIG-RANGE",
}
_EXAMPLE_BY_MISSING_PATH: dict[TomlKeyPath, str] = {
    ("model",): '[model] with pretrained_model_name_or_path = "pico-anima", a folder or a file',
    ("model", "pretrained_model_name_or_path"): 'pretrained_model_name_or_path = "pico-anima", a folder or a file',
    ("saving",): '[saving] with output_dir = "runs/first"',
    ("saving", "output_dir"): 'output_dir = "runs/first"',
}
_MAX_VALUE_CHARACTERS = 60


@dataclass
class ConfigInspection:
    """What is found on the way; `beside` is a folder in which relative paths may be meant, too."""

    source: str
    locate: KeyLocator
    document: Mapping[str, Any]
    beside: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    refused: set[TomlKeyPath] = field(default_factory=set)
    written: dict[TomlKeyPath, TomlKeyPath] = field(default_factory=dict)
    """Paths in the document by our paths, where a name is misspelled."""

    def config(self) -> TrainConfig | None:
        """The configuration; None where an error was found."""
        kept = self.section(TrainConfig, self.document, ())
        config = None
        try:
            config = TrainConfig.model_validate(kept)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                self.report_pydantic_error(fault["loc"], fault["type"], fault["input"])
        wrong = any(finding.level is Level.ERROR for finding in self.findings)
        return None if wrong else config

    def section(self, kind: type[ConfigSection], given: Any, path: TomlKeyPath) -> dict[str, Any]:
        """The options of a table under their right names, each taken as its kind."""
        given = get_stated_options(given) if isinstance(given, ConfigSection) else given
        if not isinstance(given, Mapping):
            self.refuse(
                "CONFIG-TYPE",
                path,
                given,
                f"{format_table_header(path)} must be a table",
                f"Write {format_table_header(path)} and its options.",
            )
            return {}
        fields, given = kind.model_fields, {str(name): value for name, value in given.items()}
        kept: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            option = name if name in fields else self.resolve_stray_key(fields, name, given, path)
            if option is not None:
                kept[option] = self.option(fields[option], value, (*path, option))
        return kept

    def resolve_stray_key(
        self, fields: Mapping[str, FieldInfo], name: str, given: Mapping[str, Any], path: TomlKeyPath
    ) -> str | None:
        """Refuse a name that has no place here; the sibling that it is a misspelling of, if that is not there."""
        home, here, value = (
            find_option_placement(name),
            format_table_header(path) or "the file outside of its tables",
            given[name],
        )
        self.written[(*path, name)] = place = (*self.shown(path), name)
        if home is not None:
            again = self.describe_existing_place(name, home.levels[0])
            message = f"{name} belongs in {home}{again}, not in {here}"
            self.refuse("CONFIG-MISPLACED-KEY", place, value, message, f"Move it to {home}.", belongs=str(home))
            return None
        if not path and isinstance(value, (Mapping, list)):
            sibling = find_nearest_name(name, fields)
            message = f"there is no table {format_table_header((name, 0) if isinstance(value, list) else (name,))}"
            guess = format_table_header((sibling, 0) if sibling == "datasets" else (sibling,)) if sibling else ""
        else:
            sibling, meant = find_nearest_name(name, fields), guess_meant_option(name, fields)
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

    def describe_existing_place(self, name: str, level: str) -> str:
        """What to add where a misplaced option stands in its right place, too."""
        section = level.strip("[]")
        table = self.document.get(section)
        if not isinstance(table, Mapping) or name not in table:
            return ""
        line = self.locate((section, name))
        return ", where it is already" + (f" (line {line})" if line else "")

    def option(self, field: FieldInfo, value: Any, path: TomlKeyPath) -> Any:
        """An option as its kind: a table, a list of tables, or a value."""
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            return self.section(kind, value, path)
        each = get_args(kind)[0] if get_origin(kind) is tuple else None
        if isinstance(each, type) and issubclass(each, ConfigSection):
            if isinstance(value, (list, tuple)):
                return tuple(self.section(each, item, (*path, place)) for place, item in enumerate(value))
            many = format_table_header((*path, 0))
            self.refuse(
                "CONFIG-TYPE", path, value, f"{many} must be a list of tables", f"Write {many}, in two brackets."
            )
            return ()
        return self.value(field, value, path)

    def value(self, field: FieldInfo, value: Any, path: TomlKeyPath) -> Any:
        """A value as its kind, with what was put right said."""
        name = path[-1]
        try:
            if isinstance(value, str) and is_path_option(field, path):
                value = expand_home_folder(value)
            if name == "optimizer_args" and isinstance(value, (str, list, tuple, Mapping)):
                arguments, findings = parse_arguments(value, self.named(path))
                self.findings += findings
                return arguments
            kept, code = coerce_option_value(field.annotation, value)
        except UsageError as error:
            self.refuse(error.code, path, value, error.message, error.remedy)
            return value
        except OptionTypeError as unfit:
            self.refuse_misfit(unfit.code, field, value, path, unfit.hint)
            return value
        if code:
            level = Level.WARNING if code == NUMBER_AS_TEXT_CODE else Level.NOTE
            what = "is in quotes" if code == NUMBER_AS_TEXT_CODE else "has a fraction of zero"
            remedy = "Leave the quotes out." if code == NUMBER_AS_TEXT_CODE else ""
            message = (
                f"{self.named(path)} = {format_config_value(value)} {what}; it is taken as {format_config_value(kept)}"
            )
            self.say(level, code, path, value, message, remedy)
        if name not in _FREE_TEXT_OPTIONS:
            self.refuse_control_characters(field, kept, path)
        return self.resolve_path_beside(field, kept, path) if self.beside else kept

    def refuse_control_characters(self, field: FieldInfo, value: Any, path: TomlKeyPath) -> None:
        """Refuse a path or a prompt with a control character: an escape that was not meant."""
        texts = [value] if isinstance(value, str) else list(value) if isinstance(value, (tuple, dict)) else []
        for text in texts:
            signs = [sign for sign in str(text) if unicodedata.category(sign) == "Cc"]
            if signs:
                meant = "".join(_ESCAPE_BY_CONTROL_CHARACTER.get(sign, sign) for sign in text)
                slashes = ", or / for each backslash" if is_path_option(field, path) and isinstance(value, str) else ""
                self.refuse(
                    "CONFIG-ESCAPE",
                    path,
                    text,
                    f"{self.named(path)} holds a control character, U+{ord(signs[0]):04X}: "
                    f"{_ESCAPE_BY_CONTROL_CHARACTER.get(signs[0], 'it')} in double quotes is an escape",
                    f"Write '{meant}' in single quotes{slashes}.",
                )

    def resolve_path_beside(self, field: FieldInfo, value: Any, path: TomlKeyPath) -> Any:
        """A relative path that leads nowhere from the current folder, from the configuration's where it does there."""
        name = path[-1]
        bare = name == "pretrained_model_name_or_path" and isinstance(value, str) and Path(value).name == value
        if not is_path_option(field, path) or name in _OUTPUT_FOLDER_OPTIONS or not isinstance(value, (str, Path)):
            return value
        if bare and not Path(value).suffix:
            return value
        assert self.beside is not None
        there = self.beside / value
        if value in ("never", "auto") or does_path_exist(Path(value)) or not does_path_exist(there):
            return value
        message = (
            f"{self.named(path)} = {format_config_value(value)} is not in the current folder; beside the "
            "configuration it is"
        )
        self.say(Level.NOTE, "CONFIG-PATH-BESIDE", path, value, message, taken=str(there))
        return str(there)

    def report_pydantic_error(self, location: Sequence[int | str], kind: str, value: Any) -> None:
        """What pydantic found, unless that place was refused before."""
        field, path = resolve_error_location(location)
        if any(path[:n] in self.refused for n in range(len(path) + 1)):
            return
        if kind == "missing":
            where = format_table_header(path[:-1]) or "the file"
            piece = _EXAMPLE_BY_MISSING_PATH.get(
                path, f"{path[-1]} = ..., {describe_option_type(field)}" if field else self.named(path)
            )
            message = f"{format_table_header(path) if len(path) == 1 else path[-1]} is missing in {where}"
            self.refuse("CONFIG-MISSING", path, None, message, f"Add {piece}.")
        elif field is not None:
            self.refuse_misfit(_CODE_BY_PYDANTIC_ERROR.get(kind, "CONFIG-TYPE"), field, value, path)

    def refuse_misfit(self, code: str, field: FieldInfo, value: Any, path: TomlKeyPath, hint: str = "") -> None:
        """Refuse a value, saying what would fit."""
        expected = describe_option_type(field)
        message = f"{self.named(path)} = {format_config_value(value)} is not {expected}." + (f" {hint}" if hint else "")
        remedy = f"{path[-1]}: {' '.join(field.description.split())}" if field.description else ""
        self.refuse(code, path, value, message, remedy, expected=expected)

    def refuse(
        self, code: str, path: TomlKeyPath, value: Any, message: str, remedy: str = "", **evidence: object
    ) -> None:
        """An error at a path."""
        self.refused.add(path)
        self.say(Level.ERROR, code, path, value, message, remedy, **evidence)

    def say(
        self, level: Level, code: str, path: TomlKeyPath, value: Any, message: str, remedy: str = "", **evidence: object
    ) -> None:
        """A finding at a path of ours, told with the place in the document."""
        shown = self.shown(path)
        line, key = self.locate(shown), format_key_path(shown)
        place = f"{self.source}:{line}" if line else self.source
        facts = {"file": self.source, "line": line, "key": key, "value": value, **evidence}
        facts = {name: fact for name, fact in facts.items() if fact not in (None, "")}
        subject = ": ".join(part for part in (place, key) if part)
        self.findings.append(Finding(level, code, subject, message, facts, remedy))

    def named(self, path: TomlKeyPath) -> str:
        """A path as people write it: datasets[0].resolution."""
        return format_key_path(self.shown(path))

    def shown(self, path: TomlKeyPath) -> TomlKeyPath:
        """A path as it is written in the document."""
        known = (n for n in range(len(path), 0, -1) if path[:n] in self.written)
        return next((self.written[path[:n]] + path[n:] for n in known), path)


def resolve_error_location(location: Sequence[int | str]) -> tuple[FieldInfo | None, TomlKeyPath]:
    """The option that a place in pydantic's sense belongs to, and its path: what is inside of a value is left off."""
    kind: Any = TrainConfig
    field, path = None, ()
    for part in location:
        if isinstance(part, int) and isinstance(kind, type):
            path = (*path, part)
        elif isinstance(kind, type) and issubclass(kind, ConfigSection) and part in kind.model_fields:
            field, path = kind.model_fields[part], (*path, part)
            inner = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else field.annotation
            kind = inner if isinstance(inner, type) and issubclass(inner, ConfigSection) else None
        else:
            break
    return field, path


def is_path_option(field: FieldInfo, path: TomlKeyPath) -> bool:
    """Whether an option may name a file or a folder."""
    return Path in list_union_members(field.annotation) or path[-1] == "pretrained_model_name_or_path"


def expand_home_folder(text: str) -> str:
    """A path with ~ at its beginning as the home folder, as shells have it."""
    return str(Path(text).expanduser()) if text == "~" or text.startswith(("~/", "~\\")) else text


def format_table_header(path: TomlKeyPath) -> str:
    """The header of a table as TOML writes it; "" for the file itself."""
    names = ".".join(part for part in path if isinstance(part, str))
    return f"[[{names}]]" if any(isinstance(part, int) for part in path) else f"[{names}]" if names else ""


def format_config_value(value: Any) -> str:
    """A value as TOML would write it, cut where it is long."""
    text = (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, (str, Path))
        else repr(value)
    )
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def does_path_exist(path: Path) -> bool:
    """Whether there is such a file or folder; no where the system cannot hold such a name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
