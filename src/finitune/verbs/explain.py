"""finitune explain: what a code of a report means, how it was found, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from finitune.codes import CodePage, normalise_code, read_code_pages
from finitune.errors import UsageError, suggest_nearest_name
from finitune.progress import Progress
from finitune.report import Report, Table


@dataclass(frozen=True)
class Request:
    """A code, or the beginning of several, in any case, with blanks or underscores for dashes; nothing asks for all."""

    code: str = ""
    """A code, such as DRIVER-OLD, or the beginning of several; all are listed if left out."""


def run(request: Request, progress: Progress | None = None) -> Report:
    """Tell the page of a code, or list the codes that begin with these words."""
    with Report("explain") as report:
        known, wanted = read_code_pages(), normalise_code(request.code)
        if wanted in known:
            page = asdict(known[wanted])  # without what it does not have
            report.figures |= {k: list(v) if isinstance(v, tuple) else v for k, v in page.items() if v}
        else:
            found = find_codes_by_prefix(wanted, known)
            rows = tuple((page.code, ", ".join(page.level), page.title) for page in found)
            table = Table("codes", ("code", "level", "title"), rows)
            report.figures[table.title] = table.as_dicts()
            report.tables.append(table)
    return report


def find_codes_by_prefix(wanted: str, known: Mapping[str, CodePage]) -> list[CodePage]:
    """The pages whose codes begin with whole words; raises UsageError (CODE-UNKNOWN) where there are none."""
    found = [page for code, page in known.items() if f"{code}-".startswith(f"{wanted}-") or not wanted]
    if not found:
        words = dict.fromkeys(code.partition("-")[0] for code in known)
        raise UsageError(
            f"there is no code {wanted}.{suggest_nearest_name(wanted, [*known, *words])}",
            code="CODE-UNKNOWN",
            subject=wanted,
            remedy="Copy it from the report, or give its first word alone: finitune explain PICTURE",
        )
    return found
