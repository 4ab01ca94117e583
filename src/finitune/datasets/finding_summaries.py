"""How much is told of many files: all are counted, a few are named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from finitune.report import Finding, Level

_MAX_NAMES_LISTED = 5
_MAX_ERRORS_LISTED = 20


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
