"""What every verb returns: findings and figures. Data only; nothing here prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from finitune.errors import FinituneError


class Level(str, Enum):
    """How much a finding matters; an error makes the command exit 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing found: a stable `code`, the place, the numbers, and what to do about it."""

    level: Level
    code: str
    subject: str
    message: str
    evidence: dict[str, object] = field(default_factory=dict)
    remedy: str = ""

    @classmethod
    def of(cls, error: FinituneError) -> Finding:
        """The finding that an error amounts to."""
        return cls(Level.ERROR, error.code, error.subject, error.message, error.evidence, error.remedy)


@dataclass
class Report:
    """The result of one verb: what was found, the figures, the files written, and the text tables to show."""

    verb: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    exit_code_override: int | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0: no errors; 1: an error was found; 2: wrong usage."""
        if self.exit_code_override is not None:
            return self.exit_code_override
        return int(any(finding.level is Level.ERROR for finding in self.findings))

    def add(
        self,
        level: Level,
        code: str,
        subject: str,
        message: str,
        *,
        remedy: str = "",
        **evidence: object,
    ) -> None:
        """Append a finding."""
        self.findings.append(Finding(level, code, subject, message, evidence, remedy))

    def fail(self, error: FinituneError) -> Report:
        """Record an error that ended the verb, and return the report."""
        self.findings.append(Finding.of(error))
        self.exit_code_override = error.exit_code
        return self

    def as_json(self) -> dict[str, object]:
        """The stable outside form: verb, ok, findings, figures, artifacts; non-finite numbers as text."""
        findings = [
            {
                "level": f.level.value,
                "code": f.code,
                "subject": f.subject,
                "message": f.message,
                "evidence": to_json_value(f.evidence),
                "remedy": f.remedy,
            }
            for f in self.findings
        ]
        return {
            "verb": self.verb,
            "ok": self.ok,
            "findings": findings,
            "figures": to_json_value(self.figures),
            "artifacts": dict(self.artifacts),
        }


@dataclass(frozen=True)
class Table:
    """A small table for a person: a title, column names, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_dicts(self) -> list[dict[str, str]]:
        """The rows by column name, for a figure of the table's name: what JSON tells in its place."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def to_json_value(value: object) -> object:
    """`value` as JSON can hold it: paths and non-finite numbers become text."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    return value
