"""What a rule about a machine is: where it applies, how bad that is, what is told, and where that was learnt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from finitune.machine.environment import Environment
from finitune.report import Finding, Level

DEVICE_ERROR, DEVICE_WARNING, DEVICE_NOTE = Level.ERROR, Level.WARNING, Level.NOTE
MatchFields = Mapping[str, object]
_TEXT_FIELDS = ("what", "do")
"""Numbers that are words: told in the message or the remedy, and no evidence."""


@dataclass(frozen=True)
class MachineRule:
    """One line of a table. `subject`, `message` and `remedy` may name the numbers that `when` gives, in braces.

    A `source` among the numbers stands for the rule's own, where one rule tells of many rows of another table.
    """

    code: str
    level: Level
    subject: str
    when: Callable[[Environment], Iterable[MatchFields]]
    message: str
    remedy: str
    source: str

    def findings(self, environment: Environment) -> Iterator[Finding]:
        """What there is to say of a machine: nothing, or a finding for each of the numbers."""
        for numbers in self.when(environment):
            subject, message, remedy = (text.format(**numbers) for text in (self.subject, self.message, self.remedy))
            evidence = {name: number for name, number in numbers.items() if name not in _TEXT_FIELDS}
            evidence.setdefault("source", self.source)
            yield Finding(self.level, self.code, subject, message, evidence, remedy)


def report_if(holds: object, **numbers: object) -> list[MatchFields]:
    """The numbers, if something holds."""
    return [numbers] if holds else []


def parse_version_parts(version: str, parts: int = 2) -> tuple[int, ...]:
    """The first numbers of a version.

    >>> leading("2.14.1+cu130"), leading("580.65.06", 1), leading("unknown")
    ((2, 14), (580,), ())
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")[:parts]) if found else ()


def to_gib(size_bytes: float) -> float:
    """Bytes as GiB, to a tenth."""
    return round(size_bytes / (1 << 30), 1)
