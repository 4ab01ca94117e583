"""What every rendering of a report shares: its verdict, the order of its findings, the spelling of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from finitune.report import Finding, Report

DIGIT_GROUPING_START = 10_000  # below this a number reads well without gaps
_VERDICT_CODE = "VERDICT"  # of the finding that answers the question as a whole
_PLAIN_FLOAT_LIMIT = 10_000_000  # from here on a float is shorter with its exponent


def describe_report_verdict(report: Report) -> tuple[str, str]:
    """One word for the outcome, and the sentence behind it."""
    found = report.describe_counts() or "nothing to report"
    if report.ok:
        return "OK", f"{report.verb}: {found}"
    return ("FAILED" if report.exit_code == 1 else "REFUSED"), f"{report.verb}: {found}"


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The verdict first, if there is one; then errors, warnings and notes; within a level as they were found."""
    return sorted(findings, key=lambda finding: (finding.code != _VERDICT_CODE, finding.level.rank))


def format_value(value: object) -> str:
    """`value` as a person reads it.

    >>> [format_value(value) for value in (81920.0, 0.0130001, 28, True, [1, 2], None)]
    ['81 920', '0.013', '28', 'yes', '1, 2', '-']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ") if abs(value) >= DIGIT_GROUPING_START else str(value)
    if isinstance(value, float):
        return format_value(round(value)) if DIGIT_GROUPING_START <= abs(value) < _PLAIN_FLOAT_LIMIT else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{format_value(key)} {format_value(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(format_value(item) for item in value) or "-"
    return escape_control_characters(str(value))


def escape_control_characters(text: str) -> str:
    r"""`text` without control characters: names come out of files, and must not steer a terminal.

    >>> escape_control_characters("block\x1b[31m")
    'block\\x1b[31m'
    """
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def format_figure_name(key: str) -> str:
    """A figure's key as words: 'share_fp16' reads 'share fp16'."""
    return escape_control_characters(key.replace("_", " "))


def format_evidence(evidence: Mapping[str, object]) -> str:
    """The evidence of a finding on one line, without lists of records: these are for JSON, and told in the message."""
    return ", ".join(
        f"{format_figure_name(key)} {format_value(value)}"
        for key, value in evidence.items()
        if not (isinstance(value, (list, tuple)) and any(isinstance(one, Mapping) for one in value))
    )
