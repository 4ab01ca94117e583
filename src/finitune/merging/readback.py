"""Whether the files are what they should be: headers whole, copies alike, and merged numbers the same as made slowly.

The slow way shares nothing with the fast one but the algebra: `combined_weight` on rows of the base, in fp64, and a
rounding by arithmetic, round(x / spacing) * spacing, in place of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from finitune.adapters.weight import combined_weight
from finitune.errors import FileError
from finitune.files.tensorfile import TensorEntry, TensorFile
from finitune.merging.output import Filling, entries_of
from finitune.merging.recipe import as_matrix, cut_rows, is_rowwise, matrix_shape, merged_bias, merged_whole
from finitune.merging.rounding import Compensated, Stochastic
from finitune.merging.stream import read_whole
from finitune.merging.survival import sampled_rows
from finitune.merging.work import Job, Manner
from finitune.numerics.narrow import round_carrying, spacing

ALL_UP_TO = 2**22
"""Adapted elements up to which every one is made again; of larger models, MOST tensors at equal distances."""

MOST = 24
COMPARED_BYTES = 2**16
DOUBT = 2.0**-30
"""How near to a tie, in spacings, two sums in fp64 may fall on either side of it."""


@dataclass(frozen=True)
class Checked:
    """How many tensors were looked at, which were wrong, and how many of the compared numbers are as made slowly."""

    tensors: int
    mismatches: tuple[str, ...]
    compared: int
    equal: int

    @property
    def correctly_rounded(self) -> float:
        return self.equal / self.compared if self.compared else 1.0


def read_back(fillings: Sequence[Filling], manner: Manner) -> Checked:
    """Check files before they are put in place; raises FileError where one is not what it should be at all."""
    jobs: list[Job] = []
    entries: dict[tuple[Path, str], TensorEntry] = {}
    for filling in fillings:
        if filling.file.jobs:
            read = TensorFile(filling.place)
            demand_entries(read, filling)
            entries |= {(filling.place, name): entry for name, entry in read.entries.items()}
            jobs += [replace(job, path=filling.place) for job in filling.file.jobs]
        elif filling.place.stat().st_size != filling.file.size:
            raise written_wrong(str(filling.file.path), "its size is not that of its source")
    adapted = [job for job in jobs if not job.is_copy]
    whole = sum(torch.Size(job.shape).numel() for job in adapted) <= ALL_UP_TO
    results = [compare(job, entries, manner, whole) for job in spread(adapted, None if whole else MOST)]
    copies = spread([job for job in jobs if job.is_copy], None if whole else MOST)
    wrong = [job.key for job in copies if not same_bytes(job.source, entries[job.path, job.name])]
    wrong += [key for key, compared, equal in results if equal != compared]
    compared, equal = sum(one[1] for one in results), sum(one[2] for one in results)
    return Checked(len(results) + len(copies), tuple(wrong), compared, equal)


def spread(jobs: Sequence[Job], most: int | None) -> list[Job]:
    """At most so many of the jobs, at equal distances."""
    if most is None or len(jobs) <= most:
        return list(jobs)
    return [jobs[n * len(jobs) // most] for n in range(most)]


def demand_entries(read: TensorFile, filling: Filling) -> None:
    """Raise FileError where a file does not hold the promised names, dtypes and shapes."""
    wanted = entries_of(filling.file.jobs)
    found = {name: (entry.torch_dtype, entry.shape) for name, entry in read.entries.items()}
    if found != wanted:
        raise written_wrong(str(filling.file.path), "its header is not the one that was written")


def same_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors begin, and end, with the same bytes."""
    size = min(COMPARED_BYTES, a.size_bytes)
    return a.size_bytes == b.size_bytes and all(
        stretch(a, offset, size) == stretch(b, offset, size) for offset in (0, a.size_bytes - size)
    )


def stretch(entry: TensorEntry, offset: int, size: int) -> bytes:
    """Some bytes of a tensor."""
    with entry.path.open("rb") as file:
        file.seek(entry.begin + offset)
        return file.read(size)


def compare(
    job: Job, entries: dict[tuple[Path, str], TensorEntry], manner: Manner, whole: bool
) -> tuple[str, int, int]:
    """(key, elements compared, elements that are as they should be) of one merged tensor."""
    written = entries[job.path, job.name]
    rows, columns = matrix_shape(job.shape)
    cut = slice(0, rows, 1) if whole else sampled_rows(rows, columns)
    if not whole and not can_cut(job):
        if rows * columns > ALL_UP_TO:
            return job.key, 0, 0
        cut = slice(0, rows, 1)
    scale = float(read_whole(entries[job.path, job.scale.key])) if job.scale and job.scale_at is not None else 1.0
    wanted = made_slowly(job, cut) / scale
    stored = rows_of_file(written, cut, columns).view(wanted.shape)
    right = as_wanted(stored, wanted, written.torch_dtype, manner)
    return job.key, right.numel(), int(right.sum())


def can_cut(job: Job) -> bool:
    """Whether some rows of the tensor can be made without the others."""
    change = job.change
    if change is None:
        return True
    if change.parameter == "bias" or change.swapped or change.transposed or change.new_shape != change.shape:
        return False
    return len(change.parts) == 1 and all(
        is_rowwise(adapter, change.shape[0]) for part in change.parts for adapter, _ in part.adapters
    )


def made_slowly(job: Job, rows: slice) -> Tensor:
    """Some rows of the merged tensor in fp64, unrounded, by the algebra itself."""
    scale = job.scale.value() if job.scale else 1.0
    change = job.change
    _, columns = matrix_shape(job.source.shape)
    if change is None:
        return rows_of_file(job.source, rows, columns) * scale
    if not can_cut(job):
        make = merged_bias if change.parameter == "bias" else merged_whole
        return as_matrix(make(change, read_whole(job.source) * scale))[rows]
    base = rows_of_file(job.source, rows, columns) * scale
    adapters = [(cut_rows(adapter, rows), strength) for adapter, strength in change.parts[0].adapters]
    return as_matrix(combined_weight(base.view(-1, *change.shape[1:]), adapters))


def rows_of_file(entry: TensorEntry, rows: slice, columns: int) -> Tensor:
    """Some rows of a tensor in fp64 (rows, columns)."""
    size = columns * entry.torch_dtype.itemsize
    if rows.step in (None, 1):
        raw = stretch(entry, rows.start * size, (rows.stop - rows.start) * size)
    else:
        raw = b"".join(stretch(entry, n * size, size) for n in range(rows.start, rows.stop, rows.step))
    if not raw:
        return torch.empty(0, columns, dtype=torch.float64)
    return torch.frombuffer(bytearray(raw), dtype=entry.torch_dtype).double().view(-1, columns)


def as_wanted(stored: Tensor, wanted: Tensor, dtype: torch.dtype, manner: Manner) -> Tensor:
    """Where fp64 `stored` is the rounding of fp64 `wanted` in `dtype`; of the random one, where it is a neighbour."""
    nothing = ~wanted.isfinite()
    if dtype == torch.float64:
        return (stored - wanted).abs() <= wanted.abs() * DOUBT
    if manner.rounding is Compensated:
        return (stored == round_carrying(wanted, dtype).double()) | nothing
    step = spacing(wanted, dtype)
    counted = wanted / step
    if manner.rounding is Stochastic:
        return ((stored / step - counted).abs() < 1 + DOUBT) | nothing
    nearest = torch.round(counted)
    doubtful = ((counted - counted.floor() - 0.5).abs() < DOUBT) & ((stored / step - counted).abs() <= 0.5 + DOUBT)
    return (stored == nearest * step) | doubtful | nothing


def demand_good(checked: Checked) -> None:
    """Raise FileError where a tensor does not come back as it should be."""
    if checked.mismatches:
        first, *_ = checked.mismatches
        raise written_wrong(first, f"{len(checked.mismatches)} of {checked.tensors} tensors are not as made slowly")


def written_wrong(path: str, why: str) -> FileError:
    """The error for a file that does not come back as it was written."""
    return FileError(
        f"{path} was read back, and is wrong: {why}",
        code="FILE-READ-BACK",
        subject=path,
        evidence={},
        remedy="The disk or the memory is faulty, or another program wrote to it. Nothing was left behind.",
    )
