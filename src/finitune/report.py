"""What every verb returns: findings and figures. Data only; nothing here prints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from finitune.errors import FinituneError

_MAX_NAMES_LISTED = 5
_MAX_ERRORS_LISTED = 20


class Level(str, Enum):
    """How much a finding matters; an error makes the command exit 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """The place in a list that begins with the worst."""
        return list(Level).index(self)


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

    def describe_counts(self) -> str:
        """How many findings there are of each level: "2 errors, 1 note"; "" where there are none."""
        counts = {level: sum(finding.level is level for finding in self.findings) for level in Level}
        return ", ".join(f"{count} {level.value}{'s' * (count > 1)}" for level, count in counts.items() if count)

    def fail(self, error: FinituneError) -> Report:
        """Record an error that ended the verb, and return the report."""
        self.findings.append(Finding.of(error))
        self.exit_code_override = error.exit_code
        return self

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        """An error of ours ends the block, and is the report's last finding."""
        if isinstance(error, FinituneError):
            self.fail(error)
        return isinstance(error, FinituneError)

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


def summarize_names(
    level: Level, code: str, subject: str, what: str, names: Sequence[str], remedy: str = ""
) -> list[Finding]:
    """One finding about all `names`: `what`, the first five, and how many more; none where there are no names."""
    if not names:
        return []
    message = f"{what}: {format_first_names(names)}"
    return [
        Finding(level, code, subject, message, {"count": len(names), "first": list(names[:_MAX_NAMES_LISTED])}, remedy)
    ]


def format_first_names(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    return ", ".join(names[:_MAX_NAMES_LISTED]) + more


def format_count(count: int, noun: str) -> str:
    """'1 picture', '2 pictures'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def limit_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each once; of one code no more than twenty errors or five others, and a count of the rest."""
    by_code: dict[tuple[str, Level], list[Finding]] = defaultdict(list)
    seen: set[tuple[str, str, str]] = set()
    for finding in findings:
        key = (finding.code, finding.subject, finding.message)
        if key not in seen:
            seen.add(key)
            by_code[finding.code, finding.level].append(finding)
    told: list[Finding] = []
    for (code, level), group in by_code.items():
        limit = _MAX_ERRORS_LISTED if level is Level.ERROR else _MAX_NAMES_LISTED
        told += group[:limit]
        if rest := [finding.subject for finding in group[limit:]]:
            evidence: dict[str, object] = {"count": len(group), "more": len(rest), "first": rest[:_MAX_NAMES_LISTED]}
            message = (
                f"{format_count(len(rest), 'more file')} of {len(group)} with the same fault: "
                f"{format_first_names(rest)}"
            )
            told.append(Finding(level, code, "", message, evidence, group[0].remedy))
    return told
