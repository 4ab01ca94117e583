"""Conditions of rules: read from data, asked of facts; `finitune.rules` says how they are written."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, cast

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

Fields = Mapping[str, object]
Condition = Callable[[Any], Iterable[Fields]]
"""Facts in, the fields of each match out: none where it does not hold."""
Predicate = Callable[..., object]
"""Facts and arguments in; out comes whether it holds, the fields of a match, or those of several."""


def parse_condition(data: str | Mapping[str, Any], predicates: Mapping[str, Predicate]) -> Condition:
    """A condition that is data, as a function; raises ValueError for a predicate or a test that is not known."""
    if isinstance(data, str):
        data = {"call": data}
    if "call" in data:
        arguments = {name: value for name, value in data.items() if name != "call"}
        if data["call"] not in predicates:
            raise ValueError(f"no predicate {data['call']!r}")
        predicate = predicates[data["call"]]
        return lambda facts: iterate_matches(predicate(facts, **arguments))
    parts = [parse_entry(key, value, predicates) for key, value in data.items()]
    return parts[0] if len(parts) == 1 else lambda facts: match_all(parts, facts)


def parse_entry(key: str, value: Any, predicates: Mapping[str, Predicate]) -> Condition:
    """One key of a condition: `all`, `any`, `not`, or the path of a fact with its tests."""
    if key in ("all", "any"):
        parts = [parse_condition(part, predicates) for part in value]
        if key == "all":
            return lambda facts: match_all(parts, facts)
        return lambda facts: next(filter(None, (list(part(facts)) for part in parts)), [])
    if key == "not":
        inner = parse_condition(value, predicates)
        return lambda facts: iterate_matches(not list(inner(facts)))
    tests = value if isinstance(value, Mapping) else {"is": value}
    if unknown := set(tests) - set(TESTS):
        raise ValueError(f"{key}: no test {', '.join(map(repr, sorted(unknown)))}")
    operands = {name: tuple(operand) if isinstance(operand, list) else operand for name, operand in tests.items()}

    def holds(facts: Any) -> bool:
        value = read_fact(facts, key)
        given = {n: read_fact(facts, o["field"]) if isinstance(o, Mapping) else o for n, o in operands.items()}
        return all(TESTS[name](value, operand) for name, operand in given.items())

    return lambda facts: iterate_matches(holds(facts))


def match_all(parts: Iterable[Condition], facts: Any) -> Iterator[Fields]:
    """Each choice of one match from every part, with the fields of all."""
    for choice in product(*(list(part(facts)) for part in parts)):
        yield {name: value for match in choice for name, value in match.items()}


def iterate_matches(answer: object) -> Iterator[Fields]:
    """What a predicate says, in one form: the fields of each match."""
    if isinstance(answer, Mapping):
        answer = [answer] if answer else []
    if isinstance(answer, Iterable) and not isinstance(answer, str):
        yield from cast("Iterable[Fields]", answer)
    elif answer:
        yield {}


def read_fact(facts: Any, path: str) -> Any:
    """The value at a dotted path; None below a None, and for a key that a mapping does not have."""
    value = facts
    for name in path.split("."):
        if value is not None:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def compare_known(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """A comparison that nothing unknown passes."""
    return lambda value, limit: value is not None and limit is not None and compare(value, limit)


def has_any(value: Collection[Any] | None, wanted: Any) -> bool:
    """Whether a collection (or a text) has one of the wanted."""
    return any(item in (value or ()) for item in (wanted if isinstance(wanted, tuple) else [wanted]))


def is_version_in(version: str | None, specifier: str) -> bool:
    """Whether a version is one of a range, pre-releases too; what is no version is in none."""
    try:
        return Version(version or "") in SpecifierSet(specifier, prereleases=True)
    except InvalidVersion:
        return False


TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is_not": operator.ne,
    "below": compare_known(operator.lt),
    "above": compare_known(operator.gt),
    "at_least": compare_known(operator.ge),
    "at_most": compare_known(operator.le),
    "in": lambda value, known: value in known,
    "not_in": lambda value, known: value not in known,
    "has": has_any,
    "lacks": lambda value, wanted: not has_any(value, wanted),
    "matches": lambda value, pattern: value is not None and bool(re.search(pattern, str(value))),
    "version": is_version_in,
    "holds": lambda value, wanted: bool(value) is wanted,
    "known": lambda value, wanted: (value is not None) is wanted,
}
"""Each test by its name: the value of the fact, and what it is compared with."""
