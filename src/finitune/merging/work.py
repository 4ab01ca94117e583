"""One tensor's way from the base to the merged file: copied, or read, changed, rounded once and written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from finitune.errors import NumericsError
from finitune.files.tensorfile import TensorEntry
from finitune.merging.recipe import Change, Recipe, Same, as_matrix, matrix_shape, recipe_for
from finitune.merging.rounding import Rounder
from finitune.merging.scaled import Scale, requantised
from finitune.merging.stream import Holes, Lane, read_whole
from finitune.merging.survival import Survival, sampled_rows, survival
from finitune.numerics.narrow import WIDE, Scratch, overflow_at, round_once

SAFE = 1e18
"""A magnitude whose square fp32 holds."""


@dataclass(frozen=True)
class Job:
    """One tensor of the output: where it comes from, what becomes of it, in which dtype, and where its bytes go.

    `key` names it for people and seeds its rounding, `name` is its name in the file. `scale` where the base holds codes
    and a scale; `scale_at` is where the new scale goes, None where there is none.
    """

    key: str
    name: str
    source: TensorEntry
    path: Path
    at: int
    dtype: torch.dtype
    change: Change | None = None
    scale: Scale | None = None
    scale_at: int | None = None

    @property
    def is_copy(self) -> bool:
        same = self.dtype == self.source.torch_dtype
        return self.change is None and same and (self.scale is None or self.scale_at is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.change.new_shape if self.change else self.source.shape


@dataclass(frozen=True)
class Outcome:
    """What happened to one tensor: its survival where it was adapted, and what was not finite in it before.

    `copied` and `watched` are the bytes that were copied as they are, and those of them that were looked at.
    """

    key: str
    survival: Survival | None = None
    nonfinite: int = 0
    place: tuple[int, ...] = ()
    """The index of the first element that was not finite."""
    copied: int = 0
    watched: int = 0


@dataclass(frozen=True)
class Manner:
    """How all tensors are rounded, by which class of `rounding`, and from which seed."""

    rounding: type
    seed: int = 0

    def rounder(self, key: str, scratch: Scratch) -> Rounder:
        """The rounding of one tensor, at its first row."""
        return self.rounding(scratch, key, self.seed)


def copy_or_merge(lane: Lane, job: Job, manner: Manner, known: Survival | None = None) -> Outcome:
    """Write one tensor; raises NumericsError (MERGE-OVERFLOW) where the new format cannot hold it.

    `known` is its survival where that was found before.
    """
    if job.is_copy:
        copied = copy_watched(lane, job.key, job.source, job.path, job.at)
        if job.scale is None or job.scale_at is None:
            return copied
        holes = lane.copy_tensor(job.scale.entry, job.path, job.scale_at)
        return replace(copied, nonfinite=copied.nonfinite + holes.count)
    with ExitStack() as stack:

        def whole() -> Tensor:
            stack.enter_context(lane.heavy)
            return read_whole(job.source)

        if job.scale:
            return merge_scaled(lane, job, whole(), manner)
        recipe = recipe_for(job.change, whole) if job.change else Same()
        if known is None and job.change:
            known = survey_rows(lane, job, recipe, manner)
        holes = merge_rows(lane, job, recipe, manner.rounder(job.key, lane.scratch))
        return Outcome(job.key, known, holes.count, place_in(job.shape, holes))


def copy_watched(lane: Lane, key: str, source: TensorEntry, path: Path, at: int) -> Outcome:
    """Copy one tensor as it is, and look whether it is finite; no integer is anything else."""
    holes = lane.copy_tensor(source, path, at)
    watched = source.size_bytes if source.torch_dtype.is_floating_point else 0
    return Outcome(key, None, holes.count, place_in(source.shape, holes), source.size_bytes, watched)


def copy_file(lane: Lane, source: Path, path: Path, tensors: Mapping[str, TensorEntry]) -> list[Outcome]:
    """Copy a whole file as it is, and look at the `tensors` in it, {key: where it lies}."""
    outcomes: list[Outcome] = []
    done = 0
    for key, entry in sorted(tensors.items(), key=lambda item: item[1].begin):
        lane.copy(source, done, path, done, entry.begin - done)
        outcomes.append(copy_watched(lane, key, entry, path, entry.begin))
        done = entry.begin + entry.size_bytes
    lane.copy(source, done, path, done, source.stat().st_size - done)
    return outcomes


def place_in(shape: tuple[int, ...], holes: Holes) -> tuple[int, ...]:
    """The index of the first element that is not finite; empty where all are, and for a single number."""
    return () if holes.first is None else tuple(int(i) for i in np.unravel_index(holes.first, shape))


def merge_rows(lane: Lane, job: Job, recipe: Recipe, rounder: Rounder) -> Holes:
    """Block after block of rows; returns what was not finite in the base itself."""
    rows, columns = matrix_shape(job.shape)
    at_a_time = max(1, lane.block // max(1, columns))
    holes = Holes()
    for begin in range(0, rows, at_a_time):
        lane.check()
        end = min(rows, begin + at_a_time)
        wide = base_rows(lane, job, slice(begin, end))
        recipe.apply(wide, slice(begin, end))
        narrow = lane.space(job.dtype, wide.numel()).view(wide.shape)
        finite = demand_range(job.key, wide, narrow, rounder(wide, narrow))
        lane.write(job.path, job.at + begin * columns * job.dtype.itemsize, narrow)
        if not finite:  # one bad element can spoil its whole row: the base's own are told
            same = job.shape == job.source.shape
            base = lane.read(job.source, begin * columns, wide.numel()) if same else wide
            holes.look(base.double(), begin * columns)
    return holes


def base_rows(lane: Lane, job: Job, rows: slice) -> Tensor:
    """Some rows of the base in fp64, in the lane's memory; not filled where the new tensor has another shape."""
    _, columns = matrix_shape(job.shape)
    numbers = range(rows.start, rows.stop, rows.step or 1)
    wide = lane.wide[: len(numbers) * columns].view(len(numbers), columns)
    if job.shape != job.source.shape:
        return wide  # such a change was made as a whole: nothing is read twice
    if numbers.step == 1:
        wide.view(-1).copy_(lane.read(job.source, rows.start * columns, wide.numel()))
    else:
        for row, number in zip(wide, numbers, strict=True):
            row.copy_(lane.read(job.source, number * columns, columns))
    return wide


def survey_rows(lane: Lane, job: Job, recipe: Recipe, manner: Manner) -> Survival:
    """The survival on the sampled rows, rounded as the tensor will be."""
    if job.shape != job.source.shape:
        return Survival(0, 0, 0, 1.0)
    rows = sampled_rows(*matrix_shape(job.shape))
    wide = base_rows(lane, job, rows)
    before = wide.clone()
    recipe.apply(wide, rows)
    narrow = lane.space(job.dtype, wide.numel()).view(wide.shape)
    manner.rounder(f"{job.key}\0survey", lane.scratch)(wide, narrow)
    return survival(before, wide, narrow)


def survey(lane: Lane, job: Job, manner: Manner) -> Survival | None:
    """The survival of one tensor, without writing anything; None where nothing changes."""
    if job.change is None:
        return None
    with ExitStack() as stack:

        def whole() -> Tensor:
            stack.enter_context(lane.heavy)
            return read_whole(job.source)

        if job.scale:
            return scaled_values(lane, job, whole(), manner).survival
        return survey_rows(lane, job, recipe_for(job.change, whole), manner)


def demand_range(key: str, wide: Tensor, narrow: Tensor, flat: Tensor) -> bool:
    """Whether all elements were finite already; raises NumericsError where finite ones became otherwise by rounding.

    The sum of squares of `flat`, fp64 `wide` or its fp32 form, bounds every element. It costs a fraction of looking at
    each, which is done only where the sum is large.
    """
    limit = min(overflow_at(narrow.dtype) if narrow.dtype not in WIDE else SAFE, SAFE)
    if float(torch.dot(flat, flat)) < limit * limit:
        return True
    over = int((wide.isfinite() & ~narrow.double().isfinite()).sum())
    if over:
        largest = float(torch.where(wide.isfinite(), wide, 0.0).abs().max())
        raise overflowed(key, narrow.dtype, over, largest)
    return bool(wide.isfinite().all())


def overflowed(key: str, dtype: torch.dtype, count: int, largest: float) -> NumericsError:
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
class Scaled:
    """A tensor as codes (rows, columns) with a scale; its survival, and what was not finite in the base."""

    codes: Tensor
    scale: float
    survival: Survival | None
    holes: Holes


def scaled_values(lane: Lane, job: Job, codes: Tensor, manner: Manner) -> Scaled:
    """A tensor that the base holds as codes with a scale, changed and rounded; what is not finite stays so."""
    assert job.scale is not None
    scale = job.scale.value()
    base = codes * scale
    recipe = recipe_for(job.change, base.clone) if job.change else Same()
    before, rows = as_matrix(base), matrix_shape(job.shape)[0]
    after = torch.empty(matrix_shape(job.shape), dtype=torch.float64)
    if after.shape == before.shape:
        after.copy_(before)
    recipe.apply(after, slice(0, rows))
    holes = Holes()
    holes.look(base, 0)
    rounder = manner.rounder(job.key, Scratch(after.numel()))
    if job.scale_at is not None:
        narrow, scale = requantised(after.where(after.isfinite(), 0.0), job.scale, rounder, job.dtype)
        if holes.count:  # they are left out of what makes the scale
            lost = ~after.isfinite()
            narrow.view(torch.uint8)[lost] = round_once(after[lost], job.dtype).view(torch.uint8)
    else:
        narrow, scale = torch.empty(after.shape, dtype=job.dtype), 1.0
        demand_range(job.key, after, narrow, rounder(after, narrow))
    found = None
    if job.change and after.shape == before.shape:
        found = survival(before, after, narrow.double() * scale)
    return Scaled(narrow, scale, found, holes)


def merge_scaled(lane: Lane, job: Job, codes: Tensor, manner: Manner) -> Outcome:
    """Write a tensor that the base holds as codes with a scale, and its new scale."""
    made = scaled_values(lane, job, codes, manner)
    lane.write(job.path, job.at, made.codes)
    if job.scale and job.scale_at is not None:
        entry = job.scale.entry
        lane.write(job.path, job.scale_at, torch.full(entry.shape, made.scale, dtype=entry.torch_dtype))
    return Outcome(job.key, made.survival, made.holes.count, place_in(job.source.shape, made.holes))
