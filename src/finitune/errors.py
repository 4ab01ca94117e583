"""The exception tree. Every error says what failed, where, the numbers, and what to do.

FinituneError
|-- UsageError        a request that cannot be meant (exit 2)
|-- FileError         a file that is not what it should be
|-- ModelError        tensors that do not make the model they claim to be
|-- AdapterError      tensors that do not make an adapter, or one that does not fit
|-- NumericsError     numbers that cannot be used: non-finite, out of range
`-- PlanError         a precision plan that does not fit this checkpoint
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class FinituneError(Exception):
    """A failure told to a user: a stable `code`, the place, the numbers, and the way out."""

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        code: str,
        subject: str = "",
        evidence: Mapping[str, object] | None = None,
        remedy: str = "",
    ):
        super().__init__(message)
        self.message = message
        self.code = code
        self.subject = subject
        self.evidence = dict(evidence or {})
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class UsageError(FinituneError):
    """The request itself is wrong: an option, a name, a pair that excludes each other."""

    exit_code = 2


class FileError(FinituneError):
    """A file is missing, damaged, or of another kind than its name says."""


class ModelError(FinituneError):
    """Tensors do not make the model: keys, shapes or components are missing or left over."""


class AdapterError(FinituneError):
    """Tensors do not make the adapter: roles, shapes, scale or convention are missing, contradictory or undecided."""


class NumericsError(FinituneError):
    """Numbers that nothing can be computed with."""


class PlanError(FinituneError):
    """A precision plan cannot be read, or belongs to another checkpoint."""


def suggest_nearest_name(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' for the known name nearest to `name`, or '' where none is near."""
    from rapidfuzz import process

    match = process.extractOne(name, list(known), score_cutoff=60)
    return f" Did you mean {match[0]!r}?" if match else ""
