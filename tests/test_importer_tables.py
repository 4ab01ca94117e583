"""The files that say what becomes of other programs' keys are read strictly: what means nothing is an error."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from finitune import importers
from finitune.config.imported_config import KeyStatus
from finitune.importers.ai_toolkit import read_ai_toolkit_table
from finitune.importers.conversions import SHARED_CONVERTERS
from finitune.importers.diffusion_pipe import read_diffusion_pipe_table
from finitune.importers.key_tables import ProgramTable, parse_program, read_facts, read_shared_choices
from finitune.importers.kohya_conversions import read_kohya_table
from finitune.importers.onetrainer import read_onetrainer_table
from finitune.importers.recognise import read_config_signatures
from finitune.importers.simpletuner import read_simpletuner_table

FOLDER = Path(importers.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("*.toml"))
TABLES = {
    "ai_toolkit": read_ai_toolkit_table,
    "diffusion_pipe": read_diffusion_pipe_table,
    "kohya": read_kohya_table,
    "onetrainer": read_onetrainer_table,
    "simpletuner": read_simpletuner_table,
}
MINIMAL: dict[str, Any] = {
    "program": "toy",
    "keys": {
        "": {"steps stairs": {"to": "training.max_train_steps", "convert": "whole_number"}},
        "net": {"kind": {"to": "network.algorithm", "choices": "kinds", "todo": "choose one."}},
    },
    "alike": [{"in": "net", "keys": "a b", "unsupported": "leave it out", "idle_at": [False]}],
    "inherits": {"other_net": "net"},
    "choices": {"kinds": {"plain simple": "lora", "odd": {"value": "lora", "note": "nearly"}}},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """The small file with one entry added or replaced."""
    document = copy.deepcopy(MINIMAL)
    *groups, name = path.split("/")
    inner: Any = document
    for group in groups:
        inner = inner[int(group) if isinstance(inner, list) else group]
    inner[name] = value
    return document


def answer(table: ProgramTable, key: str, value: object, **beside: object) -> tuple[object, KeyStatus, str]:
    found = table.keys[key].convert(value, beside)
    return found.value, found.fate, found.note


def test_every_file_has_its_reader():
    assert set(FILES) == {*TABLES, "conversions", "finitune", "kohya_gui"}
    assert read_shared_choices() and read_config_signatures() and read_facts("kohya_gui")


@pytest.mark.parametrize("name", TABLES)
def test_every_file_is_read(name: str):
    """Reading it checks every field, function, number of arguments and table that it names."""
    table = TABLES[name]()
    assert len(table.keys) > 100
    assert all(row.section or not row.key for row in table.keys.values())


@pytest.mark.parametrize("name", TABLES)
def test_every_function_fact_and_table_of_answers_is_used(name: str):
    table, text = TABLES[name](), (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    shared = {converter.__name__.removeprefix("convert_") for converter in SHARED_CONVERTERS}
    asked = {*re.findall(r'convert = "(\w+)"', text)}
    assert set(table.reader.converters) - shared <= asked
    named = {*re.findall(r'choices = "(\w+)"', text)}
    python = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    assert all(choice in named or f'choices["{choice}"]' in python for choice in table.reader.choices)
    assert all(f'facts["{fact}"]' in python for fact in table.facts)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("kinks", [], "kinks"),
        ("keys//steps stairs", {"to": "a.b", "noted": "x"}, "noted"),
        ("keys//steps stairs", {"to": "a.b", "convert": "hole_number"}, "hole_number"),
        ("keys//steps stairs", {"to": "a.b", "convert": "betas", "with": ["one"]}, "second"),
        ("keys//steps stairs", {"to": "a.b", "convert": "number", "with": [1]}, "argument"),
        ("keys//steps stairs", {}, "nothing"),
        ("keys//stairs", {"to": "a.b"}, "twice"),
        ("keys/net/kind", {"to": "a.b", "choices": "kind"}, "kind"),
        ("keys/net/kind", {"to": "a.b", "on": {"valeu": 1}}, "valeu"),
        ("keys/net/kind", {"to": "a.b", "if": {"kind": "one"}}, "list"),
        ("keys/net/a", {"to": "a.b"}, "twice"),
        ("keys/net/size", {"option_of": "network"}, "size"),
        ("inherits/third", "nett", "nett"),
        ("alike/0/off_at", [1], "off_at"),
        ("choices/kinds/wide", {"values": 1}, "values"),
    ],
)
def test_what_means_nothing_is_an_error(path: str, value: object, said: str):
    with pytest.raises((KeyError, ValueError), match=said):
        parse_program(changed(path, value), SHARED_CONVERTERS)


def test_rows_by_their_fields():
    table = parse_program(MINIMAL, SHARED_CONVERTERS)
    groups = {f"{group}.{name}" for group in ("net", "other_net") for name in ("kind", "a", "b")}
    assert {*table.keys} == {"steps", "stairs", *groups}
    assert answer(table, "stairs", "8")[0] == 8
    assert answer(table, "net.kind", "SIMPLE") == ("lora", KeyStatus.TAKEN, "")
    assert answer(table, "other_net.kind", "odd") == ("lora", KeyStatus.CHANGED, "nearly")
    assert answer(table, "net.kind", "x") == (None, KeyStatus.UNSUPPORTED, "'x': choose one.")
    assert answer(table, "net.b", False)[1] is KeyStatus.NO_EFFECT
    assert answer(table, "net.b", 0) == (None, KeyStatus.UNSUPPORTED, "leave it out")


def test_switches_and_keys_beside():
    row = {
        "to": "a.b",
        "off": {"no_effect": "none"},
        "if": {"kind": ["x"]},
        "otherwise": "{kind} does not read it",
        "on": 1,
    }
    document: dict[str, Any] = {**changed("keys//steps stairs", row), "neutral": ["nil"]}
    document["keys"][""]["plain"] = {"to": "a.c", "unless": "steps", "convert": "number", "also": {"a.d": True}}
    table = parse_program(document, SHARED_CONVERTERS)
    assert answer(table, "steps", "nil", kind="x") == (None, KeyStatus.NO_EFFECT, "none")
    assert answer(table, "steps", 5, kind="y") == (None, KeyStatus.NO_EFFECT, "y does not read it")
    assert answer(table, "steps", 5, kind="X") == (1, KeyStatus.TAKEN, "")
    assert answer(table, "plain", 5, steps=3)[1] is KeyStatus.NO_EFFECT
    assert table.keys["plain"].convert(5, {"steps": "nil"}).also == {"a.d": True}
