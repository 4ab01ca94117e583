"""What a verb that makes an adapter says about each of its sites, and about all of them together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from finitune.adapters.convert import EXACT_CONVERSION_TOLERANCE, Exactness
from finitune.namings.metadata import Receipt
from finitune.report import Table

_MAX_SITE_ROWS_SHOWN = 40
"""Rows of a table for a person; the rest is in the figures."""


@dataclass(frozen=True)
class SiteRecord:
    """What became of one site: how it was made, its rank where it has one, and what that cost.

    `error` is relative to the true change (Frobenius), `energy` the share of its squared norm that was kept. `parts`
    are the adapters that act on the site, `change` is the norm of the change over that of the weight: where known.
    """

    site: str
    how: str
    rank: int | None
    error: float = 0.0
    energy: float = 1.0
    parts: tuple[int, ...] = ()
    change: float | None = None


def compute_site_figures(rows: Sequence[SiteRecord]) -> dict[str, object]:
    """`sites`; and of those that have a rank: `rank_min`, `rank_max`, the errors (largest, median), least energy."""
    ranked = [row for row in rows if row.rank is not None]
    ranks, errors = [row.rank or 0 for row in ranked], [row.error for row in ranked]
    return {
        "sites": len(rows),
        "rank_min": min(ranks, default=0),
        "rank_max": max(ranks, default=0),
        "relative_error_max": max(errors, default=0.0),
        "relative_error_median": statistics.median(errors) if errors else 0.0,
        "energy_min": min((row.energy for row in ranked), default=1.0),
    }


def build_site_receipt(verb: str, rows: Sequence[SiteRecord], sources: Sequence[tuple[str, str]]) -> Receipt:
    """What the file says about how it was made: lossy where more than rounding was cut."""
    error = max((row.error for row in rows), default=0.0)
    klass = Exactness.LOSSY if error > EXACT_CONVERSION_TOLERANCE else Exactness.EXACT
    return Receipt(verb, tuple(sources), klass.value, {"relative_error_max": error})


def build_site_table(rows: Sequence[SiteRecord], title: str) -> Table:
    """The rows for a person, the largest error first; at most SHOWN of them."""
    worst = sorted(rows, key=lambda row: -row.error)[:_MAX_SITE_ROWS_SHOWN]
    more = (
        f", the {_MAX_SITE_ROWS_SHOWN} with the largest error of {len(rows)}"
        if len(rows) > _MAX_SITE_ROWS_SHOWN
        else ""
    )
    sized = any(row.change is not None for row in rows)
    columns = ("site", "how", "rank", "relative error", "energy kept", *(("change of the weight",) if sized else ()))
    lines = [
        (
            row.site,
            row.how,
            "" if row.rank is None else str(row.rank),
            f"{row.error:.1e}",
            f"{row.energy:.2%}",
            *(("" if row.change is None else f"{row.change:.1e}",) if sized else ()),
        )
        for row in worst
    ]
    return Table(title + more, columns, tuple(lines))
