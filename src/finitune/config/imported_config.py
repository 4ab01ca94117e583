"""What became of every key of another program's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from finitune.report import Finding, Table


class KeyStatus(str, Enum):
    """What an importer did with a key."""

    TAKEN = "taken"
    CHANGED = "taken with another meaning"
    UNSUPPORTED = "not supported"
    NO_EFFECT = "has no effect in the original either"


class KeyReason(str, Enum):
    """Why a key fared as it did, where whoever reads the account decides by it; the note says it to people."""

    OFF = "off"
    """It is switched off: that it does nothing is no news."""
    READ_FROM_TEXT = "read from text"
    """A number or a truth value that stood in quotes."""
    UNNEEDED = "not needed"
    """It changed how the original works, not what it learns: nothing is lost."""
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ImportedKey:
    """One key of the original: its path there, its value, its fate, our key ("optimizer.learning_rate"), and why."""

    key: str
    value: object
    fate: KeyStatus
    ours: str = ""
    note: str = ""
    reason: KeyReason | None = None


@dataclass(frozen=True)
class ImportedConfig:
    """A configuration in our own terms: the document that our TOML would hold, the account of every key, findings.

    `document` is {section: {key: value}}, with "general" and "datasets" as in a dataset TOML. Every leaf key of the
    original has exactly one line. `program` is its name, with what it was known by; `kind` the sort of document alone.
    """

    program: str
    document: Mapping[str, object]
    lines: tuple[ImportedKey, ...]
    findings: tuple[Finding, ...] = field(default=())
    kind: str = ""
    datasets_only: bool = False
    """Whether such a document names pictures, and no training."""

    def table(self) -> Table:
        """The account for a person."""
        rows = tuple((line.key, str(line.value), line.fate.value, line.ours, line.note) for line in self.lines)
        return Table("keys", ("key", "value", "fate", "ours", "note"), rows)
