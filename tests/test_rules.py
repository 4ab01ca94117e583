"""The engine for rules: conditions that are data, predicates by name, and the findings that come of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finitune.report import Finding, Level
from finitune.rules import Rule, evaluate_rules, parse_rule, read_rules
from finitune.rules.conditions import TESTS, parse_condition, read_fact


@dataclass(frozen=True)
class Part:
    name: str
    version: str = "1.0"


@dataclass(frozen=True)
class Facts:
    room: float | None = 8.0
    need: float = 12.0
    system: str = "Linux"
    size: tuple[int, int] = (1, 2)
    names: frozenset[str] = frozenset({"lora", "lokr"})
    part: Part | None = Part("torch", "2.9.1+cu130")
    variables: dict[str, str] = field(default_factory=lambda: {"A": "1"})


FACTS = Facts()
PREDICATES: dict[str, Any] = {
    "always": lambda facts: True,
    "never": lambda facts: None,
    "names": lambda facts: [{"name": name} for name in sorted(facts.names)],
    "named": lambda facts, name: {"name": name} if name in facts.names else {},
}


def matches(condition: Any, facts: Any = FACTS) -> list[dict[str, object]]:
    return [dict(match) for match in parse_condition(condition, PREDICATES)(facts)]


@pytest.mark.parametrize(
    "condition",
    [
        {"system": "Linux"},
        {"system": {"in": ["Linux", "Darwin"]}},
        {"system": {"not_in": ["Windows"], "is_not": "Java"}},
        {"system": {"matches": "^L.*x$"}},
        {"room": {"below": 9, "above": 7, "at_least": 8, "at_most": 8}},
        {"room": {"below": {"field": "need"}}},
        {"names": {"has": "lora"}},
        {"names": {"has": ["loha", "lokr"], "lacks": ["oft", "boft"]}},
        {"size": [1, 2]},
        {"size": {"below": [1, 3]}},
        {"part.version": {"version": ">=2.9,<2.10"}},
        {"variables.A": "1", "variables.B": {"holds": False}},
        {"all": [{"system": "Linux"}, {"not": {"room": 1}}]},
        {"any": [{"system": "Windows"}, "always"]},
        {"not": "never"},
        {},
    ],
)
def test_conditions_that_hold(condition: dict[str, Any]):
    assert matches(condition) == [{}]
    assert matches({"not": condition}) == []


@pytest.mark.parametrize("test", ["below", "above", "at_least", "at_most", "matches", "version", "has"])
def test_nothing_unknown_passes_a_comparison(test: str):
    operand: Any = {"matches": "", "version": ">=0", "has": "a"}.get(test, 0)
    assert not matches({"room": {test: operand}}, Facts(room=None))
    if test in ("below", "above", "at_least", "at_most"):
        assert not matches({"need": {test: {"field": "room"}}}, Facts(room=None))


def test_what_is_below_nothing_is_nothing():
    assert read_fact(Facts(part=None), "part.version") is None
    assert read_fact(FACTS, "variables.B") is None
    with pytest.raises(AttributeError):
        read_fact(FACTS, "part.colour")


def test_predicates_give_fields_and_take_arguments():
    assert matches("names") == [{"name": "lokr"}, {"name": "lora"}]
    assert matches({"call": "named", "name": "lora"}) == [{"name": "lora"}]
    assert matches({"call": "named", "name": "oft"}) == []
    assert matches({"all": ["names", {"system": "Linux"}]}) == matches("names")
    assert matches({"all": ["names", "never"]}) == []


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_comparisons_are_each_other_s_opposite(value: float, limit: float):
    assert TESTS["below"](value, limit) is not TESTS["at_least"](value, limit)
    assert TESTS["above"](value, limit) is not TESTS["at_most"](value, limit)


def test_a_rule_tells_its_fields_and_keeps_words_out_of_the_evidence():
    rule = Rule(
        level=Level.NOTE,
        code="X-Y",
        subject="{name}",
        when=lambda facts: [{"name": "a", "what": "big"}, {"name": "b", "what": "odd", "source": "there"}],
        text="{name} is {what} on {system}",
        remedy="Leave {name}.",
        source="here",
        fields={"system": "system"},
    )
    assert evaluate_rules([rule], FACTS) == [
        Finding(Level.NOTE, "X-Y", name, text, {"system": "Linux", "name": name, "source": source}, f"Leave {name}.")
        for name, text, source in [("a", "a is big on Linux", "here"), ("b", "b is odd on Linux", "there")]
    ]


def test_a_rule_is_asked_of_each_item():
    entry = {"level": "note", "code": "X", "subject": "{name}", "each": "parts", "text": "", "fields": {"name": "name"}}
    rule = parse_rule({**entry, "when": {"version": {"version": "<2"}}}, {})
    facts = {"parts": [Part("a"), Part("b", "2.1"), Part("c")]}
    assert [finding.subject for finding in evaluate_rules([rule], facts)] == ["a", "c"]


def test_errors_come_first_and_rules_keep_their_order():
    levels = [Level.NOTE, Level.ERROR, Level.WARNING, Level.ERROR]
    rules = [
        Rule(level=level, code=f"C-{number}", subject="", when=lambda _: True, text="")
        for number, level in enumerate(levels)
    ]
    assert [finding.code for finding in evaluate_rules(rules, None)] == ["C-1", "C-3", "C-2", "C-0"]


FILE = """
[[rule]]
code = "ROOM-SMALL"
level = "warning"
subject = "memory"
when = {room = {below = {field = "need"}}}
fields = {room = "room"}
text = "only {room} GiB"
source = "here"

[[rule]]
code = "NAMED"
level = "note"
subject = "{name}"
when = "names"
text = "there is {name}"
"""


def test_rules_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "rules.toml"
    path.write_text(FILE, encoding="utf-8")
    found = evaluate_rules(read_rules(path, PREDICATES), FACTS)
    assert [(finding.code, finding.message) for finding in found] == [
        ("ROOM-SMALL", "only 8.0 GiB"),
        ("NAMED", "there is lokr"),
        ("NAMED", "there is lora"),
    ]
    assert found[0].evidence == {"room": 8.0, "source": "here"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"level": "bad"}, "bad"),
        ({"when": "nobody"}, "no predicate 'nobody'"),
        ({"when": {"all": [{"room": {"under": 1}}]}}, "no test 'under'"),
        ({"colour": "red"}, "colour"),
        ({"when": None}, "X-Y"),
    ],
)
def test_a_fault_in_a_file_is_told_when_it_is_read(change: dict[str, Any], told: str):
    entry = {"level": "note", "code": "X-Y", "subject": "", "when": {}, "text": ""} | change
    with pytest.raises(ValueError, match=told):
        parse_rule(entry, PREDICATES)
