"""Importing by table: a row for each key that a program knows, one line of account for each key of a file.

A row says where a value goes ("section", "key") and how it is converted. A conversion sees the value and its siblings,
because the meaning of a number often stands in the key next to it (a unit, a switch). What no row knows is reported:
the programs imported here ignore unknown keys silently, so that a slip of the pen can have trained for weeks.

The rows of each program are data: `key_tables` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyReason, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.errors import suggest_nearest_name
from finitune.report import Finding, Level

_LIST_SECTION_NAMES = {
    "dataset": "datasets.",
    "subset": "datasets.subsets.",
    "listed": "datasets",
    "sample": "preview.sample_prompts",
}
"""Sections that exist once for each element of a list, as the account calls them; the others exist once."""

_SECRET_KEY_PATTERN = re.compile(
    r"(?:^|[._])(?:secrets|secret|password|api_?key|access_key|(?:hf|hub|huggingface)_token)(?:[._]|$)"
)
EMPTY_VALUES = (None, "", [], {})

ForeignKeyPath = tuple[str | int, ...]
ConfigFileReader = Callable[[str], Any]
"""The content of another file that a configuration names; None where it is not there."""


@dataclass(frozen=True)
class ConvertedValue:
    """What becomes of a value: ours, its fate, why, more of ours by "section.key", and the place if not the row's."""

    value: object = None
    fate: KeyStatus = KeyStatus.TAKEN
    note: str = ""
    also: Mapping[str, object] = field(default_factory=dict)
    place: str = ""
    reason: KeyReason | None = None


UNREADABLE_VALUE = ConvertedValue(
    None, KeyStatus.UNSUPPORTED, "it cannot be read; correct it in the original", reason=KeyReason.UNREADABLE
)
ValueConverter = Callable[[Any, Mapping[str, Any]], ConvertedValue]


class KeyMapping(NamedTuple):
    """Our section and key for one of theirs, the conversion, what is different about the meaning, and whether an empty
    value says something (else it is as good as absent)."""

    section: str
    key: str
    convert: ValueConverter
    note: str = ""
    empty: bool = False


KeyTable = Mapping[str, KeyMapping]


def take_value(value: object, **also: object) -> ConvertedValue:
    """The same thing here; `also` spells the dot of "section.key" as two underscores."""
    return ConvertedValue(value, also=_restore_dots(also))


def take_changed(value: object, note: str, **also: object) -> ConvertedValue:
    """Something near to it; `note` says how it differs."""
    return ConvertedValue(value, KeyStatus.CHANGED, note, _restore_dots(also))


def _restore_dots(also: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("__", ".", 1): value for name, value in also.items()}


def mark_unsupported(todo: str) -> ConvertedValue:
    """Nothing here; `todo` says what to do."""
    return ConvertedValue(None, KeyStatus.UNSUPPORTED, todo)


def mark_no_effect(why: str = "off") -> ConvertedValue:
    """Nothing there either."""
    return ConvertedValue(None, KeyStatus.NO_EFFECT, why, reason=KeyReason.OFF if why in ("off", "never") else None)


@dataclass
class ImportAccount:
    """The lines so far, and what they amount to: options by section, and by section and place for those of lists."""

    program: str
    source: str
    lines: list[ImportedKey] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    scoped: dict[str, dict[tuple[int, ...], dict[str, Any]]] = field(
        default_factory=lambda: {s: {} for s in _LIST_SECTION_NAMES}
    )
    unknown_note: str = ""
    """What is said of an unknown key, if not that we know no such option."""

    def walk(self, document: Mapping[str, Any], rows: KeyTable, prefix: ForeignKeyPath = ()) -> None:
        """Give each leaf of `document` its line."""
        for path, value, beside in iterate_config_leaves(document):
            self.answer((*prefix, *path), value, beside, rows)

    def answer(self, path: ForeignKeyPath, value: object, beside: Mapping[str, Any], rows: KeyTable) -> None:
        row = find_key_mapping(format_key_pattern(path), rows)
        if row is None:
            self.unknown(path, value, rows)
            return
        if value in EMPTY_VALUES and not row.empty:
            answer = mark_no_effect("empty: the default counts")
        else:
            answer = apply_converter(row.convert, value, beside)
        if answer.reason is KeyReason.UNREADABLE:
            self.report_unreadable_value(path, value)
        if row.note and answer.reason is KeyReason.READ_FROM_TEXT:
            answer = replace(answer, note=row.note, reason=None)
        elif row.note and answer.fate is KeyStatus.TAKEN:
            answer = replace(answer, fate=KeyStatus.CHANGED, note=answer.note or row.note)
        place = answer.place or f"{row.section}.{row.key}".replace("*", str(path[-1])).strip(".")
        ours = "" if answer.fate in (KeyStatus.UNSUPPORTED, KeyStatus.NO_EFFECT) else place
        shown, called = mask_secret_value(path, value), format_target_option(ours)
        self.lines.append(ImportedKey(format_key_path(path), shown, answer.fate, called, answer.note, answer.reason))
        indices = tuple(part for part in path if isinstance(part, int))
        if ours and answer.value is not None:
            self.set(place, answer.value, indices)
        for another, extra in answer.also.items():
            self.set(another, extra, indices)

    def set(self, place: str, value: object, indices: tuple[int, ...] = ()) -> None:
        """Write our option; one of a list belongs to the element with these indices."""
        section, *keys = place.split(".")
        if section in _LIST_SECTION_NAMES:
            options = self.scoped[section].setdefault(indices, {})
        else:
            options = self.sections.setdefault(section, {})
        for key in keys[:-1]:
            options = options.setdefault(key, {})
        options[keys[-1]] = value

    def get(self, place: str) -> Any:
        section, _, key = place.partition(".")
        return self.sections.get(section, {}).get(key)

    def unknown(self, path: ForeignKeyPath, value: object, rows: KeyTable) -> None:
        """A key that the program does not know, or that we do not: it counts for nothing, and that is said."""
        key, value = format_key_path(path), mask_secret_value(path, value)
        guess = suggest_nearest_key(format_key_pattern(path), rows)
        why = self.unknown_note or f"no option of {self.program} that is known here"
        note = f"{why}.{guess}" if guess else why
        self.lines.append(ImportedKey(key, value, KeyStatus.UNSUPPORTED, "", note, KeyReason.UNKNOWN))
        message = f"{self.program} has no option {key!r} that is known here.{guess}"
        remedy = "Correct its spelling in the original, or leave it out if it is of no importance."
        self.report(Level.WARNING, "CONFIG-UNKNOWN-KEY", key, message, {"value": value}, remedy)

    def report(self, level: Level, code: str, key: str, message: str, evidence: dict[str, object], remedy: str) -> None:
        self.findings.append(Finding(level, code, f"{self.source}: {key}", message, evidence, remedy))

    def report_unreadable_value(self, path: ForeignKeyPath, value: object) -> None:
        """A value that its conversion cannot read: leaving it out would train something else."""
        key = format_key_path(path)
        message = f"{key}: {value!r} is no value that {self.program} could mean"
        self.report(Level.ERROR, "CONFIG-VALUE", key, message, {"value": value}, "Correct it in the original.")

    def report_other_family(self, key: str, family: object) -> None:
        message = f"this configuration of {self.program} trains {str(family)!r}; only Anima is trained here"
        remedy = "Give an Anima base model: the account shows what the other options would become."
        self.report(Level.ERROR, "CONFIG-OTHER-FAMILY", key, message, {"family": family}, remedy)

    def amend(self, key: str, place: str, value: object, note: str) -> None:
        """Change what became of their `key`: our option `place` has another value, and the line says why."""
        self.set(place, value)
        self.lines = [
            ImportedKey(line.key, line.value, KeyStatus.CHANGED, place, note) if line.key == key else line
            for line in self.lines
        ]

    def read_second_file(self, key: str, name: object, read: ConfigFileReader | None) -> Any:
        """The content of the file that `key` names; a warning, and None, where it cannot be read."""
        content = read(str(name)) if read and name else None
        if content is None:
            message = f"the file that {key} names, {str(name or '')!r}, is not there: its options are not imported"
            remedy = "Put it next to the configuration, or write [[datasets]] yourself."
            self.report(Level.WARNING, "CONFIG-SECOND-FILE", key, message, {"file": name}, remedy)
        return content

    def fill(self, defaults: Mapping[str, object]) -> None:
        """Write the original's defaults of absent keys where they are not ours, and say so once."""
        absent = {place: value for place, value in defaults.items() if self.get(place) is None}
        for place, value in absent.items():
            self.set(place, value)
        if absent:
            told = ", ".join(f"{place} = {value}" for place, value in absent.items())
            message = f"what is absent has {self.program}'s default: {told}"
            self.findings.append(Finding(Level.NOTE, "CONFIG-DEFAULTS", self.source, message, dict(absent)))

    def imported(self, datasets: Sequence[Mapping[str, object]]) -> ImportedConfig:
        document: dict[str, object] = {name: options for name, options in self.sections.items() if options}
        if datasets:
            document["datasets"] = list(datasets)
        return ImportedConfig(self.program, document, tuple(self.lines), tuple(self.findings))


def iterate_config_leaves(
    value: Any, path: ForeignKeyPath = ()
) -> Iterator[tuple[ForeignKeyPath, Any, Mapping[str, Any]]]:
    """Each leaf with its path and the mapping that it stands in. A list is a leaf unless it holds mappings."""
    named = isinstance(value, Mapping)
    for part, item in ((str(name), item) for name, item in value.items()) if named else enumerate(value):
        if is_config_leaf(item):
            yield (*path, part), item, value if named else {}
        else:
            yield from iterate_config_leaves(item, (*path, part))


def is_config_leaf(value: object) -> bool:
    """Whether nothing inside it has a name."""
    if isinstance(value, list):
        return not any(isinstance(item, Mapping) for item in value)
    return not (isinstance(value, Mapping) and value)


def mask_secret_value(path: ForeignKeyPath, value: object) -> object:
    """The value as the account shows it: not, where it is a secret."""
    return "(secret)" if value not in EMPTY_VALUES and _SECRET_KEY_PATTERN.search(format_key_path(path)) else value


def format_key_pattern(path: ForeignKeyPath) -> str:
    """A path for the table: config.process[].train.lr."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def format_target_option(place: str) -> str:
    """Our option as the account names it: that of a list by the list's name."""
    section, _, key = place.partition(".")
    called = _LIST_SECTION_NAMES.get(section)
    return place if called is None else f"{called}{key}" if called.endswith(".") else called


def find_key_mapping(path: str, rows: KeyTable) -> KeyMapping | None:
    """The row of a path: its own, or that of a group (`group.*`) around it."""
    if path in rows:
        return rows[path]
    groups = (name for name in rows if name.endswith(".*"))
    return next((rows[name] for name in groups if f"{path}.".startswith((name[:-1], f"{name[:-2]}[]"))), None)


def suggest_nearest_key(path: str, rows: KeyTable) -> str:
    """' Did you mean ...?' among the keys of the same group, else among all."""
    group, dot, name = path.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in rows if known.rpartition(".")[0] == group]
    return suggest_nearest_name(name, siblings) or suggest_nearest_name(f"{group}{dot}{name}", rows)


def apply_converter(convert: ValueConverter, value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """The conversion's answer, or UNREADABLE_VALUE where the value is of another kind than it expects."""
    try:
        return convert(value, beside)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return UNREADABLE_VALUE


def get_nested_mapping(document: object, *keys: str) -> Mapping[str, Any]:
    """A mapping inside of mappings; empty where there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}
