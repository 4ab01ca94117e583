"""One engine for all rules: a condition on facts gives findings, each with the numbers that its text names.

Facts are any object; a path such as "memory.room_bytes" is read from it, attribute by attribute or key by key. A rule
is a table of a TOML file, or a `Rule` made in Python:

    [[rule]]
    code = "RAM-TAKEN"
    level = "warning"
    subject = "memory"
    when = {"memory.free_gib" = {below = 4}, "memory.room_gib" = {at_least = 4}}
    fields = {free = "memory.free_gib", room = "memory.room_gib"}
    text = "only {free} of {room} GiB of memory are free"
    remedy = "Close other programs."
    source = "https://github.com/tdrussell/diffusion-pipe/issues/173"

`when` is one of
- a table of paths, all of which must pass: each to a plain value (equal to it), or to a table of `TESTS`, such as
  {in = ["kohya", "comfy"]}, {has = "lokr"}, {version = ">=2.9,<2.10"}, {below = {field = "memory.total_gib"}};
- {all = [...]}, {any = [...]}, {not = ...} of further conditions;
- the name of a Python predicate, or {call = "name", ...} with arguments for it. A predicate takes the facts and returns
  whether it holds, or the fields for the texts, or several of these: one finding each.

`each = "packages"` asks `when` of every item at that path, and reads `fields` from it.

Subject, text and remedy name fields in braces. Fields are the finding's evidence, except those of `WORD_FIELDS`: words
are told and are no numbers. A field named `source` stands for the rule's own. What is wrong in a file (a key, a test, a
predicate, a level) is a ValueError when it is read; a path that facts do not have is an AttributeError, except that
a key that a mapping lacks is None, as an unknown number is: None passes no comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finitune.package_data import read_package_toml
from finitune.report import Finding, Level
from finitune.rules.conditions import Fields, Predicate, iterate_matches, parse_condition, read_fact

WORD_FIELDS = ("what", "do")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Where `when` holds of the facts, a finding of this level and code. `fields`: more of them, paths or numbers."""

    level: Level
    code: str
    subject: str
    when: Predicate
    text: str
    remedy: str = ""
    source: str = ""
    fields: Mapping[str, str | float] = field(default_factory=dict)
    each: str = ""

    def find(self, facts: Any) -> Iterator[Finding]:
        """A finding for each match."""
        for item in read_fact(facts, self.each) if self.each else [facts]:
            given = {n: read_fact(item, v) if isinstance(v, str) else v for n, v in self.fields.items()}
            yield from (self.tell(given | dict(match)) for match in iterate_matches(self.when(item)))

    def tell(self, fields: Fields) -> Finding:
        """The finding with these fields."""
        subject, text, remedy = (part.format(**fields) for part in (self.subject, self.text, self.remedy))
        evidence = {name: value for name, value in fields.items() if name not in WORD_FIELDS}
        if self.source:
            evidence.setdefault("source", self.source)
        return Finding(self.level, self.code, subject, text, evidence, remedy)


def evaluate_rules(rules: Iterable[Rule], facts: Any) -> list[Finding]:
    """What the rules find: errors first, then warnings, then notes; within a level in the order of the rules."""
    found = [finding for rule in rules for finding in rule.find(facts)]
    return sorted(found, key=lambda finding: finding.level.rank)


def read_rules(path: Path, predicates: Mapping[str, Predicate] | None = None) -> tuple[Rule, ...]:
    """The [[rule]] tables of a file of this package; raises ValueError for what the engine does not know."""
    return tuple(parse_rule(entry, predicates or {}) for entry in read_package_toml(path)["rule"])


def parse_rule(entry: Mapping[str, Any], predicates: Mapping[str, Predicate]) -> Rule:
    """One table of a file; raises ValueError."""
    try:
        when = parse_condition(entry["when"], predicates)
        return Rule(**{**entry, "level": Level(entry["level"]), "when": when})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rule {entry.get('code')}: {error}") from error
