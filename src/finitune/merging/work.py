"""One tensor's way from the base to the merged file: copied, or read, changed, rounded once and written.

What is left of a change behind the rounding is estimated on evenly spaced rows of each tensor:
survival = <rounded(W') - W, W' - W> / <W' - W, W' - W>, the part of the change that the model feels, as a share of it.
1: nothing is lost; 0: the change fell below half of the format's spacing everywhere. It can exceed 1 a little. A bf16
weight of 0.03 has neighbours 1.2e-4 away, so a change of 1e-5 is mostly rounded off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from finitune.errors import NumericsError
from finitune.files.tensorfile import TensorEntry
from finitune.merging.merge_plan import PlannedTensor, requantise_to_fp8
from finitune.merging.rows import (
    IdentityMerger,
    RowMerger,
    RowRounder,
    choose_row_merger,
    to_matrix,
    to_matrix_shape,
)
from finitune.merging.stream import CopyWorker, NonfiniteCount, read_whole_tensor
from finitune.numerics.narrow import WIDE_DTYPES, RoundingScratch, compute_overflow_threshold, round_once
from finitune.report import Level, Report

_MAX_SQUARABLE_FP32 = 1e18
"""A magnitude whose square fp32 holds."""


@dataclass(frozen=True)
class TensorOutcome:
    """What happened to one tensor: its survival where it was adapted, and what was not finite in it before.

    `copied` and `watched` are the bytes that were copied as they are, and those of them that were looked at.
    """

    key: str
    survival: DeltaSurvival | None = None
    nonfinite: int = 0
    place: tuple[int, ...] = ()
    """The index of the first element that was not finite."""
    copied: int = 0
    watched: int = 0


@dataclass(frozen=True)
class RoundingOptions:
    """How all tensors are rounded, by which class of `rounding`, and from which seed."""

    rounding: type
    seed: int = 0

    def rounder(self, key: str, scratch: RoundingScratch) -> RowRounder:
        """The rounding of one tensor, at its first row."""
        return self.rounding(scratch, key, self.seed)


def copy_or_merge_tensor(
    lane: CopyWorker, job: PlannedTensor, manner: RoundingOptions, known: DeltaSurvival | None = None
) -> TensorOutcome:
    """Write one tensor; raises NumericsError (MERGE-OVERFLOW) where the new format cannot hold it.

    `known` is its survival where that was found before.
    """
    if job.is_copy:
        copied = copy_and_check_tensor(lane, str(job.key), job.entry, job.path, job.at)
        if job.scale is None:
            return copied
        holes = lane.copy_tensor(job.scale.entry, job.path, job.scale_at)
        return replace(copied, nonfinite=copied.nonfinite + holes.count)
    with ExitStack() as stack:

        def whole() -> Tensor:
            stack.enter_context(lane.heavy)
            return read_whole_tensor(job.entry)

        if job.scale:
            return merge_scaled_tensor(lane, job, whole(), manner)
        recipe = choose_row_merger(job.change, whole) if job.change else IdentityMerger()
        if known is None and job.change:
            known = survey_sampled_rows(lane, job, recipe, manner)
        holes = merge_tensor_rows(lane, job, recipe, manner.rounder(str(job.key), lane.scratch))
        return TensorOutcome(str(job.key), known, holes.count, find_first_nonfinite_index(job.shape, holes))


def copy_and_check_tensor(lane: CopyWorker, key: str, source: TensorEntry, path: Path, at: int) -> TensorOutcome:
    """Copy one tensor as it is, and look whether it is finite; no integer is anything else."""
    holes = lane.copy_tensor(source, path, at)
    watched = source.size_bytes if source.torch_dtype.is_floating_point else 0
    return TensorOutcome(
        key, None, holes.count, find_first_nonfinite_index(source.shape, holes), source.size_bytes, watched
    )


def copy_and_check_file(
    lane: CopyWorker, source: Path, path: Path, tensors: Mapping[str, TensorEntry]
) -> list[TensorOutcome]:
    """Copy a whole file as it is, and look at the `tensors` in it, {key: where it lies}."""
    outcomes: list[TensorOutcome] = []
    done = 0
    for key, entry in sorted(tensors.items(), key=lambda item: item[1].begin):
        lane.copy(source, done, path, done, entry.begin - done)
        outcomes.append(copy_and_check_tensor(lane, key, entry, path, entry.begin))
        done = entry.begin + entry.size_bytes
    lane.copy(source, done, path, done, source.stat().st_size - done)
    return outcomes


def find_first_nonfinite_index(shape: tuple[int, ...], holes: NonfiniteCount) -> tuple[int, ...]:
    """The index of the first element that is not finite; empty where all are, and for a single number."""
    return () if holes.first is None else tuple(int(i) for i in np.unravel_index(holes.first, shape))


def merge_tensor_rows(lane: CopyWorker, job: PlannedTensor, recipe: RowMerger, rounder: RowRounder) -> NonfiniteCount:
    """Block after block of rows; returns what was not finite in the base itself."""
    rows, columns = to_matrix_shape(job.shape)
    at_a_time = max(1, lane.block // max(1, columns))
    holes = NonfiniteCount()
    for begin in range(0, rows, at_a_time):
        lane.check()
        end = min(rows, begin + at_a_time)
        wide = read_base_rows(lane, job, slice(begin, end))
        recipe.apply(wide, slice(begin, end))
        narrow = lane.get_output_buffer(job.dtype, wide.numel()).view(wide.shape)
        finite = require_dtype_range(str(job.key), wide, narrow, rounder(wide, narrow))
        lane.write(job.path, job.at + begin * columns * job.dtype.itemsize, narrow)
        if not finite:  # one bad element can spoil its whole row: the base's own are told
            same = job.shape == job.entry.shape
            base = lane.read(job.entry, begin * columns, wide.numel()) if same else wide
            holes.count_in(base.double(), begin * columns)
    return holes


def read_base_rows(lane: CopyWorker, job: PlannedTensor, rows: slice) -> Tensor:
    """Some rows of the base in fp64, in the lane's memory; not filled where the new tensor has another shape."""
    _, columns = to_matrix_shape(job.shape)
    numbers = range(rows.start, rows.stop, rows.step or 1)
    wide = lane.wide[: len(numbers) * columns].view(len(numbers), columns)
    if job.shape != job.entry.shape:
        return wide  # such a change was made as a whole: nothing is read twice
    if numbers.step == 1:
        wide.view(-1).copy_(lane.read(job.entry, rows.start * columns, wide.numel()))
    else:
        for row, number in zip(wide, numbers, strict=True):
            row.copy_(lane.read(job.entry, number * columns, columns))
    return wide


def survey_sampled_rows(
    lane: CopyWorker, job: PlannedTensor, recipe: RowMerger, manner: RoundingOptions
) -> DeltaSurvival:
    """The survival on the sampled rows, rounded as the tensor will be."""
    if job.shape != job.entry.shape:
        return DeltaSurvival(0, 0, 0, 1.0)
    rows = choose_sampled_rows(*to_matrix_shape(job.shape))
    wide = read_base_rows(lane, job, rows)
    before = wide.clone()
    recipe.apply(wide, rows)
    narrow = lane.get_output_buffer(job.dtype, wide.numel()).view(wide.shape)
    manner.rounder(f"{job.key}\0survey", lane.scratch)(wide, narrow)
    return compute_delta_survival(before, wide, narrow)


def survey_tensor(lane: CopyWorker, job: PlannedTensor, manner: RoundingOptions) -> DeltaSurvival | None:
    """The survival of one tensor, without writing anything; None where nothing changes."""
    if job.change is None:
        return None
    with ExitStack() as stack:

        def whole() -> Tensor:
            stack.enter_context(lane.heavy)
            return read_whole_tensor(job.entry)

        if job.scale:
            return merge_scaled_values(lane, job, whole(), manner).survival
        return survey_sampled_rows(lane, job, choose_row_merger(job.change, whole), manner)


def require_dtype_range(key: str, wide: Tensor, narrow: Tensor, flat: Tensor) -> bool:
    """Whether all elements were finite already; raises NumericsError where finite ones became otherwise by rounding.

    The sum of squares of `flat`, fp64 `wide` or its fp32 form, bounds every element. It costs a fraction of looking at
    each, which is done only where the sum is large.
    """
    limit = min(
        compute_overflow_threshold(narrow.dtype) if narrow.dtype not in WIDE_DTYPES else _MAX_SQUARABLE_FP32,
        _MAX_SQUARABLE_FP32,
    )
    if float(torch.dot(flat, flat)) < limit * limit:
        return True
    over = int((wide.isfinite() & ~narrow.double().isfinite()).sum())
    if over:
        largest = float(torch.where(wide.isfinite(), wide, 0.0).abs().max())
        raise build_overflow_error(key, narrow.dtype, over, largest)
    return bool(wide.isfinite().all())


def build_overflow_error(key: str, dtype: torch.dtype, count: int, largest: float) -> NumericsError:
    """The error for numbers that the format of the output cannot hold."""
    name = str(dtype).removeprefix("torch.")
    return NumericsError(
        f"{key}: {count} merged numbers, up to {largest:.3g}, are beyond {name}",
        code="MERGE-OVERFLOW",
        subject=key,
        evidence={"count": count, "largest": largest, "dtype": name, "limit": torch.finfo(dtype).max},
        remedy="Write another format (--dtype bf16 or fp32), or give the adapter less strength. Nothing was written.",
    )


@dataclass(frozen=True)
class RequantisedTensor:
    """A tensor as codes (rows, columns) with a scale; its survival, and what was not finite in the base."""

    codes: Tensor
    scale: float
    survival: DeltaSurvival | None
    holes: NonfiniteCount


def merge_scaled_values(
    lane: CopyWorker, job: PlannedTensor, codes: Tensor, manner: RoundingOptions
) -> RequantisedTensor:
    """A tensor that the base holds as codes with a scale, changed and rounded; what is not finite stays so."""
    assert job.scale is not None
    scale = job.scale.value()
    base = codes * scale
    recipe = choose_row_merger(job.change, base.clone) if job.change else IdentityMerger()
    before, rows = to_matrix(base), to_matrix_shape(job.shape)[0]
    after = torch.empty(to_matrix_shape(job.shape), dtype=torch.float64)
    if after.shape == before.shape:
        after.copy_(before)
    recipe.apply(after, slice(0, rows))
    holes = NonfiniteCount()
    holes.count_in(base, 0)
    rounder = manner.rounder(str(job.key), RoundingScratch(after.numel()))
    if job.new_scale:
        narrow, scale = requantise_to_fp8(after.where(after.isfinite(), 0.0), job.new_scale, rounder, job.dtype)
        if holes.count:  # they are left out of what makes the scale
            lost = ~after.isfinite()
            narrow.view(torch.uint8)[lost] = round_once(after[lost], job.dtype).view(torch.uint8)
    else:
        narrow, scale = torch.empty(after.shape, dtype=job.dtype), 1.0
        require_dtype_range(str(job.key), after, narrow, rounder(after, narrow))
    found = None
    if job.change and after.shape == before.shape:
        found = compute_delta_survival(before, after, narrow.double() * scale)
    return RequantisedTensor(narrow, scale, found, holes)


def merge_scaled_tensor(lane: CopyWorker, job: PlannedTensor, codes: Tensor, manner: RoundingOptions) -> TensorOutcome:
    """Write a tensor that the base holds as codes with a scale, and its new scale."""
    made = merge_scaled_values(lane, job, codes, manner)
    lane.write(job.path, job.at, made.codes)
    if job.new_scale:
        entry = job.new_scale.entry
        lane.write(job.path, job.scale_at, torch.full(entry.shape, made.scale, dtype=entry.torch_dtype))
    return TensorOutcome(
        str(job.key), made.survival, made.holes.count, find_first_nonfinite_index(job.entry.shape, made.holes)
    )


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
