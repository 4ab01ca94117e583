"""What is left of a change behind the rounding, estimated on evenly spaced rows of each tensor.

survival = <rounded(W') - W, W' - W> / <W' - W, W' - W>: the part of the change that the model feels, as a share of it.
1: nothing is lost; 0: the change fell below half of the format's spacing everywhere. It can exceed 1 a little. A bf16
weight of 0.03 has neighbours 1.2e-4 away, so a change of 1e-5 is mostly rounded off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from finitune.report import Level, Report

MAX_SURVIVAL_SAMPLE = 2**15
"""At most this many elements of a tensor are looked at: all of a smaller one, else whole rows at equal distances."""


@dataclass(frozen=True)
class DeltaSurvival:
    """Of the sampled elements: how many they are, were moved, are subnormal; and the share of the change kept."""

    sampled: int
    changed: int
    subnormal: int
    kept: float
    error: float = 0.0
    """|stored change - change| / |change|."""

    @property
    def changed_share(self) -> float:
        return self.changed / max(1, self.sampled)


def choose_sampled_rows(rows: int, columns: int) -> slice:
    """Rows at equal distances that hold at most SAMPLE elements together; one row at least, all where they fit."""
    most = max(1, MAX_SURVIVAL_SAMPLE // max(1, columns))
    step = max(1, math.ceil(rows / most))
    return slice((step - 1) // 2, rows, step)


def compute_delta_survival(before: Tensor, after: Tensor, rounded: Tensor) -> DeltaSurvival:
    """The survival of a change from fp64 `before` to fp64 `after`, stored as `rounded`; 1 where nothing changes."""
    stored = rounded.double()
    small = stored.abs() < torch.finfo(rounded.dtype).tiny
    subnormal = int(small.sum()) - (stored.numel() - int(stored.count_nonzero()))
    change, moved = (after - before).view(-1), (stored - before).view(-1)
    finite = (before + after).view(-1).isfinite()
    if not bool(finite.all()):  # what the base itself holds is told elsewhere
        change, moved = change[finite], moved[finite]
    wanted = float(torch.dot(change, change))
    kept = float(torch.dot(moved, change)) / wanted if wanted else 1.0
    error = float((moved - change).norm()) / math.sqrt(wanted) if wanted else 0.0
    return DeltaSurvival(before.numel(), int(moved.count_nonzero()), subnormal, kept, error)


def report_delta_survival(report: Report, found: Mapping[str, DeltaSurvival], least: float, remedy: str) -> None:
    """The figures over all adapted tensors, and a warning that names the worst where less than `least` (0 to 1) is
    left of a change."""
    kept = {key: one.kept for key, one in found.items()}
    if not kept:
        return
    sampled = sum(one.sampled for one in found.values())
    report.figures["survival_min"] = min(kept.values())
    report.figures["survival_median"] = median(kept.values())
    report.figures["delta_error_max"] = max(one.error for one in found.values())
    report.figures["changed_share"] = sum(one.changed for one in found.values()) / max(1, sampled)
    report.figures["subnormal_share"] = sum(one.subnormal for one in found.values()) / max(1, sampled)
    faint = sorted((share, key) for key, share in kept.items() if share < least)
    if faint:
        worst = ", ".join(f"{key} {share:.0%}" for share, key in faint[:3])
        report.add(
            Level.WARNING,
            "MERGE-DELTA-LOST",
            faint[0][1],
            f"rounding leaves less than {least:.0%} of the change in {len(faint)} of {len(kept)} tensors: {worst}",
            remedy=remedy,
            tensors=len(faint),
            worst=faint[0][0],
            limit=least,
        )
