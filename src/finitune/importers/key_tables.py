"""The files beside this one, one for each program: by what its documents are known, and what becomes of each key.

    program = "OneTrainer"                    # its name in the account
    neutral = ["undefined"]                   # what says nothing, besides nothing itself, false, and 0: any switch
                                              # of what we do not have is off at it

    [[kinds]]                                 # a sort of document, recognised by option names
    name = "OneTrainer"
    sure = ["peft_type"]                      # leaves no doubt; `marks` are others of its own, `top` all there may be

    [keys."text_encoder"]                     # the keys in that group; "" is the top, `*` any other key of the group
    "train_a train_b" = { to = "network.train_text_encoder", convert = "boolean" }

    [[alike]]                                 # many keys of one fate, below `in`
    keys = "caching_threads dataloader_threads"
    no_effect = "no result depends on it"

    [inherits]                                # a group that has the keys of another, but for those of its own
    "vae" = "transformer"

    [choices.algorithm]                       # answers by the value in lower case; "*" for any other value
    [defaults]                                # what the program takes for absent keys, where our default is another
    [facts]                                   # whatever else its Python file needs to know

A row is answered by the first of its fields that applies, in this order:
- `off`: the answer where the value says nothing;
- `if`, `unless`: a key beside it that must, or must not, say something, or {key = [values]}; else `otherwise`, which is
  "off" if not given, a reason for having no effect, or any answer; {key} in it is the value of that key;
- `on`: the answer where the value says something;
- `choices`: a table of answers or its name; `todo` says what to do about a value that it lacks;
- `unsupported`, at the values of `idle_at` without effect, at those of `same_at` as here;
- `convert`: a function of the program's Python file or of `conversions`, with further arguments in `with`; `also`: more
  of ours by "section.key"; `note`: how the meaning differs. `option_of`: our section with an option of that name, whose
  type says how it is read;
- or any answer. `to` alone takes the value as it is.

An answer is our value, or a table: `value` (changed, where there is a `note`), with `to` for another place than the
row's; `taken`, `implicit`, `unneeded`, `no_effect` or `unsupported` with the note for the account.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from finitune.config.datasets import ConfigSection
from finitune.config.imported_config import KeyReason, KeyStatus
from finitune.config.schema import TrainConfig
from finitune.importers.mapping import (
    EMPTY_VALUES,
    ConvertedValue,
    KeyMapping,
    KeyTable,
    ValueConverter,
    mark_no_effect,
    take_value,
)
from finitune.package_data import read_package_toml

Answers = Mapping[str, ConvertedValue]
_FATE_FIELDS = ("taken", "implicit", "unneeded", "no_effect", "unsupported")
_ANSWER_FIELDS = {"value", "note", "also", "to", *_FATE_FIELDS}
_ROW_FIELDS = {
    *("to", "note", "empty", "also", "off", "on", "if", "unless", "otherwise", "choices", "todo", "convert", "with"),
    *("idle_at", "same_at", "option_of", *_FATE_FIELDS),
}
_DOCUMENT_FIELDS = {"program", "neutral", "kinds", "keys", "alike", "inherits", "choices", "defaults", "facts"}


@dataclass(frozen=True, kw_only=True)
class ConfigSignature:
    """A sort of document: names of options that leave no doubt, others of its own, and all there may be on top.

    A name is a path (`config.process`), or with a star in front the last part of one (`*network_module`).
    """

    name: str
    sure: Sequence[str]
    marks: Sequence[str]
    top: Sequence[str] = ()
    datasets_only: bool = False

    def found(self, names: frozenset[str], top: frozenset[str]) -> list[str]:
        """The marks that the document has, the sure ones first; none where there is more than there may be."""
        if self.top and not top <= {*self.top}:
            return []
        return [mark.lstrip("*") for mark in (*self.sure, *self.marks) if mark in names]


@dataclass(frozen=True, kw_only=True)
class ProgramTable:
    """All that a program's file says."""

    program: str
    keys: KeyTable
    reader: RowReader
    defaults: Mapping[str, Any]
    facts: Mapping[str, Any]


def read_signatures(file: str) -> list[ConfigSignature]:
    """The sorts of documents of a program."""
    return [ConfigSignature(**kind) for kind in read_package_toml(get_table_path(file))["kinds"]]


def read_program(file: str, converters: Iterable[Callable[..., ConvertedValue]]) -> ProgramTable:
    return parse_program(read_package_toml(get_table_path(file)), converters)


def read_facts(file: str) -> Mapping[str, Any]:
    return read_package_toml(get_table_path(file))["facts"]


def get_table_path(file: str) -> Path:
    return Path(__file__).with_name(f"{file}.toml")


@cache
def read_shared_choices() -> Mapping[str, Answers]:
    """What trainers call the same things: dtypes, optimisers, schedules, losses, by the name of the table."""
    return parse_choices(read_package_toml(get_table_path("conversions"))["choices"])


def parse_choices(tables: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Answers]:
    """Tables of answers, the names of one answer separated by spaces."""
    return {
        table: {name: parse_answer(entry) for names, entry in answers.items() for name in names.split()}
        for table, answers in tables.items()
    }


def parse_answer(entry: Any) -> ConvertedValue:
    """One answer; raises ValueError for a field that answers do not have."""
    if not isinstance(entry, Mapping):
        return take_value(entry)
    reject_unknown(entry, _ANSWER_FIELDS)
    answer = ConvertedValue(entry.get("value"), also=entry.get("also", {}), place=entry.get("to", ""))
    if "taken" in entry:
        return replace(answer, note=entry["taken"])
    if "no_effect" in entry:
        return mark_no_effect(entry["no_effect"])
    if "unsupported" in entry:
        return replace(answer, fate=KeyStatus.UNSUPPORTED, note=entry["unsupported"])
    if "unneeded" in entry:
        note = f"not needed here: {entry['unneeded']}"
        return ConvertedValue(None, KeyStatus.UNSUPPORTED, note, reason=KeyReason.UNNEEDED)
    if note := entry.get("implicit", entry.get("note")):
        return replace(answer, fate=KeyStatus.CHANGED, note=note)
    return answer


def reject_unknown(entry: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for a field of a table that means nothing."""
    if unknown := entry.keys() - {*known}:
        raise ValueError(f"no such field: {', '.join(sorted(unknown))}")


def parse_program(document: Mapping[str, Any], converters: Iterable[Callable[..., ConvertedValue]]) -> ProgramTable:
    """A program's file; raises ValueError, with the key, for whatever means nothing there."""
    reject_unknown(document, _DOCUMENT_FIELDS)
    named = {converter.__name__.removeprefix("convert_"): converter for converter in converters}
    reader = RowReader(named, parse_choices(document.get("choices", {})), document.get("neutral", ()))
    groups: dict[str, dict[str, KeyMapping]] = {}
    for group, name, entry in iterate_entries(document):
        rows = groups.setdefault(group, {})
        try:
            if name in rows:
                raise ValueError("it stands twice")
            rows[name] = reader.parse_row(name, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{document['program']}: {group} {name}: {error}") from error
    for heir, source in document.get("inherits", {}).items():
        groups[heir] = groups[source] | groups.get(heir, {})
    return ProgramTable(
        program=document["program"],
        keys={f"{group}.{name}".strip("."): row for group, rows in groups.items() for name, row in rows.items()},
        reader=reader,
        defaults=document.get("defaults", {}),
        facts=document.get("facts", {}),
    )


def iterate_entries(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for alike in document.get("alike", ()):
        entry = {name: value for name, value in alike.items() if name not in ("in", "keys")}
        yield from ((alike.get("in", ""), name, entry) for name in alike["keys"].split())
    for group, rows in document["keys"].items():
        for names, entry in rows.items():
            yield from ((group, name, entry) for name in names.split())


@dataclass(frozen=True)
class RowReader:
    """Rows of a file as mappings, with the functions and the tables that they may name."""

    converters: Mapping[str, Callable[..., ConvertedValue]]
    choices: Mapping[str, Answers]
    neutral: Sequence[object] = field(default=())

    def parse_row(self, name: str, entry: Mapping[str, Any]) -> KeyMapping:
        """One row; raises KeyError, TypeError or ValueError for what means nothing."""
        reject_unknown(entry, _ROW_FIELDS)
        if "option_of" in entry:
            entry = {**entry, **describe_option(entry["option_of"], name)}
        section, _, key = entry.get("to", "").partition(".")
        steps = [step for step in self.iterate_steps(entry) if step]

        def convert(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
            return next(answer for step in steps if (answer := step(value, beside)))

        return KeyMapping(section, key, convert, entry.get("note", ""), entry.get("empty", False))

    def says(self, value: object) -> bool:
        """Whether a value says anything: it is not absent, off, or zero."""
        return value not in (*EMPTY_VALUES, False, 0, *self.neutral)

    def iterate_steps(self, entry: Mapping[str, Any]) -> Iterator[Callable[[Any, Any], ConvertedValue | None]]:
        """The steps of a row's conversion, in their order: the first that answers counts. The last one always does."""
        if "off" in entry:
            off = parse_answer(entry["off"])
            yield lambda value, _: None if self.says(value) else off
        for field_name in ("if", "unless"):
            if field_name in entry:
                yield self.build_guard(entry[field_name], field_name == "if", entry.get("otherwise", "off"))
        if "on" in entry:
            on = parse_answer(entry["on"])
            yield lambda value, _: on if self.says(value) else None
        if "choices" in entry:
            yield self.build_choice(entry["choices"], entry.get("todo"))
        yield self.build_last_step(entry)

    def build_guard(self, condition: Any, wanted: bool, otherwise: Any) -> Callable[[Any, Any], ConvertedValue | None]:
        """The answer where the keys beside are not as they must be."""
        answer = mark_no_effect(otherwise) if isinstance(otherwise, str) else parse_answer(otherwise)
        expected: dict[str, list[str]] = {}
        for key, values in () if isinstance(condition, str) else condition.items():
            if not isinstance(values, list):
                raise ValueError(f"the values of {key} are no list")
            expected[key] = [value.lower() for value in values]

        def check(value: Any, beside: Mapping[str, Any]) -> ConvertedValue | None:
            if isinstance(condition, str):
                holds = self.says(beside.get(condition))
            else:
                holds = all(str(beside.get(key)).lower() in values for key, values in expected.items())
            if holds is wanted:
                return None
            note = answer.note
            for key in expected:
                note = note.replace(f"{{{key}}}", str(beside.get(key)))
            return replace(answer, note=note)

        return check

    def build_choice(self, named: Any, todo: str | None) -> Callable[[Any, Any], ConvertedValue | None]:
        """The answer of a table, by the value in lower case."""
        tables = {**read_shared_choices(), **self.choices}
        answers = tables[named] if isinstance(named, str) else parse_choices({"": named})[""]

        def choose(value: Any, beside: Mapping[str, Any]) -> ConvertedValue | None:
            answer = answers.get(str(value).lower()) or answers.get("*")
            if answer is None and todo is not None:
                return ConvertedValue(None, KeyStatus.UNSUPPORTED, f"{value!r}: {todo}")
            return answer

        return choose

    def build_last_step(self, entry: Mapping[str, Any]) -> ValueConverter:
        if "unsupported" in entry:
            return self.build_unsupported(entry)
        if fate := next((name for name in _FATE_FIELDS if name in entry), ""):
            answer = parse_answer({fate: entry[fate], "also": entry.get("also", {})})
            return lambda value, _: answer
        if "convert" not in entry and "to" not in entry and not {"on", "choices"} & entry.keys():
            raise ValueError("it says nothing")
        converter, arguments = self.converters[entry.get("convert", "as_is")], entry.get("with", [])
        inspect.signature(converter).bind(None, {}, *arguments)
        also = entry.get("also", {})

        def convert(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
            answer = converter(value, beside, *arguments)
            taken = answer.fate in (KeyStatus.TAKEN, KeyStatus.CHANGED)
            return replace(answer, also={**also, **answer.also}) if also and taken else answer

        return convert

    def build_unsupported(self, entry: Mapping[str, Any]) -> ValueConverter:
        """The step of what we do not have, which may be off, or as it is here."""
        answer = parse_answer({"unsupported": entry["unsupported"]})
        nothing = (None, [], False, 0, *self.neutral) if self.neutral else ()
        idle, same = (*entry.get("idle_at", ()), *nothing), entry.get("same_at", ())

        def convert(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
            if is_one_of(value, same):
                return ConvertedValue()
            return mark_no_effect() if is_one_of(value, idle) else answer

        return convert


def is_one_of(value: object, values: Iterable[object]) -> bool:
    """Equality, but True is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def describe_option(section: str, name: str, model: type[ConfigSection] | None = None) -> Mapping[str, Any]:
    """The row of a key with our name and meaning, by the type of our option: `model` has it, or our section of that
    name. Where nothing is our default, 0 is nothing there."""
    fields = (model or TrainConfig.model_fields[section].annotation).model_fields  # type: ignore[union-attr]
    option = fields[name]
    kinds = set(get_args(option.annotation)) or {option.annotation}
    row: dict[str, Any] = {"to": f"{section}.{name}"}
    if bool in kinds:
        return {**row, "convert": "boolean"}
    if not kinds & {int, float}:
        return row
    none_at_zero = option.default is None and name != "validation_seed"
    if none_at_zero and int in kinds:
        return {**row, "convert": "positive"}
    convert = "number" if float in kinds else "whole_number"
    return {**row, "convert": convert, **({"off": {"no_effect": "off"}} if none_at_zero else {})}
