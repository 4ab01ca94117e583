"""Whether the files are what they should be: headers whole, copies alike, and merged numbers the same as made slowly.

The slow way shares nothing with the fast one but the algebra: `combine_adapted_weight` on rows of the base, in fp64,
and a rounding by arithmetic, round(x / spacing) * spacing, in place of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from finitune.adapters.weight import combine_adapted_weight
from finitune.errors import FileError
from finitune.files.tensorfile import TensorEntry, TensorFile
from finitune.merging.output import PendingFile, build_output_entries
from finitune.merging.rows import (
    CompensatedRounder,
    StochasticRounder,
    is_rowwise_adapter,
    merge_whole_bias,
    merge_whole_weight,
    slice_adapter_rows,
    to_matrix,
    to_matrix_shape,
)
from finitune.merging.stream import read_whole_tensor
from finitune.merging.work import PlannedTensor, RoundingOptions, choose_sampled_rows
from finitune.numerics.narrow import compute_spacing, round_carrying

_MAX_EXHAUSTIVE_ELEMENTS = 2**22
"""Adapted elements up to which every one is made again; of larger models, MOST tensors at equal distances."""

_MAX_SAMPLED_TENSORS = 24
_COMPARED_BYTES = 2**16
_TIE_TOLERANCE = 2.0**-30
"""How near to a tie, in spacings, two sums in fp64 may fall on either side of it."""


@dataclass(frozen=True)
class ReadBackResult:
    """How many tensors were looked at, which were wrong, and how many of the compared numbers are as made slowly."""

    tensors: int
    mismatches: tuple[str, ...]
    compared: int
    equal: int

    @property
    def correctly_rounded(self) -> float:
        return self.equal / self.compared if self.compared else 1.0


def check_pending_files(fillings: Sequence[PendingFile], manner: RoundingOptions) -> ReadBackResult:
    """Check files before they are put in place; raises FileError where one is not what it should be at all."""
    jobs: list[PlannedTensor] = []
    entries: dict[tuple[Path, str], TensorEntry] = {}
    for filling in fillings:
        if filling.file.jobs:
            read = TensorFile(filling.place)
            found = {name: (entry.torch_dtype, entry.shape) for name, entry in read.entries.items()}
            if found != build_output_entries(filling.file.jobs):
                raise build_read_back_error(str(filling.file.path), "its header is not the one that was written")
            entries |= {(filling.place, name): entry for name, entry in read.entries.items()}
            jobs += [replace(job, path=filling.place) for job in filling.file.jobs]
        elif filling.place.stat().st_size != filling.file.size:
            raise build_read_back_error(str(filling.file.path), "its size is not that of its source")
    adapted = [job for job in jobs if not job.is_copy]
    whole = sum(torch.Size(job.shape).numel() for job in adapted) <= _MAX_EXHAUSTIVE_ELEMENTS
    results = [
        compare_merged_tensor(job, entries, manner, whole)
        for job in sample_jobs_evenly(adapted, None if whole else _MAX_SAMPLED_TENSORS)
    ]
    copies = sample_jobs_evenly([job for job in jobs if job.is_copy], None if whole else _MAX_SAMPLED_TENSORS)
    wrong = [str(job.key) for job in copies if not has_same_end_bytes(job.entry, entries[job.path, job.key.name])]
    wrong += [key for key, compared, equal in results if equal != compared]
    compared, equal = sum(one[1] for one in results), sum(one[2] for one in results)
    return ReadBackResult(len(results) + len(copies), tuple(wrong), compared, equal)


def sample_jobs_evenly(jobs: Sequence[PlannedTensor], most: int | None) -> list[PlannedTensor]:
    """At most so many of the jobs, at equal distances."""
    if most is None or len(jobs) <= most:
        return list(jobs)
    return [jobs[n * len(jobs) // most] for n in range(most)]


def has_same_end_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors begin, and end, with the same bytes."""
    size = min(_COMPARED_BYTES, a.size_bytes)
    return a.size_bytes == b.size_bytes and all(
        read_tensor_bytes(a, offset, size) == read_tensor_bytes(b, offset, size) for offset in (0, a.size_bytes - size)
    )


def read_tensor_bytes(entry: TensorEntry, offset: int, size: int) -> bytes:
    """Some bytes of a tensor."""
    with entry.path.open("rb") as file:
        file.seek(entry.begin + offset)
        return file.read(size)


def compare_merged_tensor(
    job: PlannedTensor, entries: dict[tuple[Path, str], TensorEntry], manner: RoundingOptions, whole: bool
) -> tuple[str, int, int]:
    """(key, elements compared, elements that are as they should be) of one merged tensor."""
    written = entries[job.path, job.key.name]
    rows, columns = to_matrix_shape(job.shape)
    cut = slice(0, rows, 1) if whole else choose_sampled_rows(rows, columns)
    if not whole and not can_merge_rows_alone(job):
        if rows * columns > _MAX_EXHAUSTIVE_ELEMENTS:
            return str(job.key), 0, 0
        cut = slice(0, rows, 1)
    scale = float(read_whole_tensor(entries[job.path, job.new_scale.key])) if job.new_scale else 1.0
    wanted = recompute_merged_rows(job, cut) / scale
    stored = read_tensor_rows(written, cut, columns).view(wanted.shape)
    right = find_correctly_rounded(stored, wanted, written.torch_dtype, manner)
    return str(job.key), right.numel(), int(right.sum())


def can_merge_rows_alone(job: PlannedTensor) -> bool:
    """Whether some rows of the tensor can be made without the others."""
    change = job.change
    if change is None:
        return True
    if change.parameter == "bias" or change.swapped or change.transposed or change.new_shape != change.shape:
        return False
    return len(change.parts) == 1 and all(
        is_rowwise_adapter(adapter, change.shape[0]) for part in change.parts for adapter, _ in part.adapters
    )


def recompute_merged_rows(job: PlannedTensor, rows: slice) -> Tensor:
    """Some rows of the merged tensor in fp64, unrounded, by the algebra itself."""
    scale = job.scale.value() if job.scale else 1.0
    change = job.change
    _, columns = to_matrix_shape(job.entry.shape)
    if change is None:
        return read_tensor_rows(job.entry, rows, columns) * scale
    if not can_merge_rows_alone(job):
        make = merge_whole_bias if change.parameter == "bias" else merge_whole_weight
        return to_matrix(make(change, read_whole_tensor(job.entry) * scale))[rows]
    base = read_tensor_rows(job.entry, rows, columns) * scale
    adapters = [(slice_adapter_rows(adapter, rows), strength) for adapter, strength in change.parts[0].adapters]
    return to_matrix(combine_adapted_weight(base.view(-1, *change.shape[1:]), adapters))


def read_tensor_rows(entry: TensorEntry, rows: slice, columns: int) -> Tensor:
    """Some rows of a tensor in fp64 (rows, columns)."""
    size = columns * entry.torch_dtype.itemsize
    if rows.step in (None, 1):
        raw = read_tensor_bytes(entry, rows.start * size, (rows.stop - rows.start) * size)
    else:
        raw = b"".join(read_tensor_bytes(entry, n * size, size) for n in range(rows.start, rows.stop, rows.step))
    if not raw:
        return torch.empty(0, columns, dtype=torch.float64)
    return torch.frombuffer(bytearray(raw), dtype=entry.torch_dtype).double().view(-1, columns)


def find_correctly_rounded(stored: Tensor, wanted: Tensor, dtype: torch.dtype, manner: RoundingOptions) -> Tensor:
    """Where fp64 `stored` is the rounding of fp64 `wanted` in `dtype`; of the random one, where it is a neighbour."""
    nothing = ~wanted.isfinite()
    if dtype == torch.float64:
        return (stored - wanted).abs() <= wanted.abs() * _TIE_TOLERANCE
    if manner.rounding is CompensatedRounder:
        return (stored == round_carrying(wanted, dtype).double()) | nothing
    step = compute_spacing(wanted, dtype)
    counted = wanted / step
    if manner.rounding is StochasticRounder:
        return ((stored / step - counted).abs() < 1 + _TIE_TOLERANCE) | nothing
    nearest = torch.round(counted)
    doubtful = ((counted - counted.floor() - 0.5).abs() < _TIE_TOLERANCE) & (
        (stored / step - counted).abs() <= 0.5 + _TIE_TOLERANCE
    )
    return (stored == nearest * step) | doubtful | nothing


def require_read_back_match(checked: ReadBackResult) -> None:
    """Raise FileError where a tensor does not come back as it should be."""
    if checked.mismatches:
        first, *_ = checked.mismatches
        raise build_read_back_error(
            first, f"{len(checked.mismatches)} of {checked.tensors} tensors are not as made slowly"
        )


def build_read_back_error(path: str, why: str) -> FileError:
    """The error for a file that does not come back as it was written."""
    return FileError(
        f"{path} was read back, and is wrong: {why}",
        code="FILE-READ-BACK",
        subject=path,
        evidence={},
        remedy="The disk or the memory is faulty, or another program wrote to it. Nothing was left behind.",
    )
