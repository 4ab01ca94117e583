"""The files of a merge: what each will hold, whether they fit on the disk, and how they are filled and put in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from finitune.errors import UsageError
from finitune.files.tensorfile import INDEX_SUFFIX, TensorEntry, TensorFile
from finitune.files.writer import encode_header, stage_files
from finitune.merging.base_model import SAFETENSORS_EXTENSION, MergeBase
from finitune.merging.merge_plan import MergePlan, PlannedTensor
from finitune.merging.rows import to_matrix_shape
from finitune.merging.stream import CopyWorker, flush_periodically, reserve_file_space, run_in_copy_workers
from finitune.merging.work import (
    DeltaSurvival,
    RoundingOptions,
    TensorOutcome,
    copy_and_check_file,
    copy_or_merge_tensor,
)
from finitune.progress import Progress

_DEFAULT_SHARD_BYTES = 5_000_000_000
"""The Hub's and diffusers' own size of a shard, in bytes."""


@dataclass(frozen=True)
class OutputFile:
    """One file to be written: a header and tensors, or the bytes of another file (`copy_of`), or a few bytes as such.

    The jobs' places are in this file; their `path` is not known before it is begun. `tensors` are those in `copy_of`.
    """

    path: Path
    size: int
    header: bytes = b""
    jobs: tuple[PlannedTensor, ...] = ()
    copy_of: Path | None = None
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingFile:
    """A file that is being filled under a temporary name."""

    file: OutputFile
    place: Path


def plan_output_files(
    base: MergeBase, plan: MergePlan, out: Path, shard_size: int | None, metadata: Mapping[str, str]
) -> list[OutputFile]:
    """The files of the output, indices last. `metadata` is added to the base's own. Raises UsageError."""
    if not base.is_folder:
        wanted = shard_size or (_DEFAULT_SHARD_BYTES if out.name.endswith(INDEX_SUFFIX) else None)
        return plan_shards(out, base.files[""], [*plan.tensors], wanted, metadata)
    files: list[OutputFile] = []
    for component, file in base.files.items():
        mine = [one for one in plan.tensors if one.key.file == component]
        where = out / file.path.relative_to(base.path)
        touched = any(one.change or one.dtype != one.entry.torch_dtype for one in mine)
        if touched:
            largest = max(path.stat().st_size for path in {entry.path for entry in file.entries.values()})
            sharded = largest if file.path.name.endswith(INDEX_SUFFIX) else None
            files += plan_shards(where, file, mine, shard_size or sharded, metadata)
        else:
            lying: dict[Path, dict[str, TensorEntry]] = {file.path: {}}
            for one in mine:
                lying.setdefault(one.entry.path, {})[str(one.key)] = one.entry
            files += [plan_copied_file(path, base.path, out, tensors) for path, tensors in sorted(lying.items())]
    files += [plan_copied_file(path, base.path, out) for path in base.others]
    return sorted(files, key=lambda one: one.path.name.endswith(INDEX_SUFFIX))


def plan_copied_file(
    path: Path, folder: Path, out: Path, tensors: Mapping[str, TensorEntry] | None = None
) -> OutputFile:
    """A file of a folder, with the tensors in it, at the same place in another."""
    return OutputFile(out / path.relative_to(folder), path.stat().st_size, copy_of=path, tensors=tensors or {})


def plan_shards(
    path: Path, file: TensorFile, tensors: Sequence[PlannedTensor], limit: int | None, metadata: Mapping[str, str]
) -> list[OutputFile]:
    """One safetensors file at `path`, or several of at most `limit` bytes (one tensor at least) and their index."""
    stem = path.name.removesuffix(INDEX_SUFFIX).removesuffix(SAFETENSORS_EXTENSION)
    texts = {**file.metadata, **metadata}
    groups = group_by_shard_size(tensors, limit)
    if len(groups) == 1 and not path.name.endswith(INDEX_SUFFIX):
        return [plan_tensor_file(path, groups[0], texts)]
    names = [f"{stem}-{n:05d}-of-{len(groups):05d}{SAFETENSORS_EXTENSION}" for n in range(1, len(groups) + 1)]
    shards = [plan_tensor_file(path.with_name(n), group, texts) for n, group in zip(names, groups, strict=True)]
    weight_map = {name: shard.path.name for shard in shards for name in build_output_entries(shard.jobs)}
    total = sum(shard.size - len(shard.header) for shard in shards)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
    return [*shards, OutputFile(path.with_name(stem + SAFETENSORS_EXTENSION + INDEX_SUFFIX), len(index), index)]


def group_by_shard_size(tensors: Sequence[PlannedTensor], limit: int | None) -> list[list[PlannedTensor]]:
    """Tensors in their order, in groups of at most `limit` bytes."""
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for one in tensors:
        if limit and groups[-1] and filled + one.size_bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += one.size_bytes
    return groups


def plan_tensor_file(path: Path, tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> OutputFile:
    """A safetensors file: wide elements first, so that each tensor is aligned, and else in the base's order."""
    entries = build_output_entries(tensors)
    header = encode_header(entries, metadata)
    places: dict[str, int] = {}
    end = len(header)
    for name, (dtype, shape) in entries.items():
        places[name] = end
        end += dtype.itemsize * torch.Size(shape).numel()
    placed = [
        replace(one, at=places[one.key.name], scale_at=places[one.new_scale.key] if one.new_scale else 0)
        for one in sorted(tensors, key=lambda one: -one.dtype.itemsize)
    ]
    return OutputFile(path, end, header, tuple(placed))


def build_output_entries(tensors: Sequence[PlannedTensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: dtype and shape} of some tensors in the order of their places, wide elements first, scales before all."""
    scales = [one.new_scale for one in tensors if one.new_scale]
    entries = {scale.key: (scale.entry.torch_dtype, scale.entry.shape) for scale in scales}
    own = {one.key.name: (one.dtype, one.shape) for one in sorted(tensors, key=lambda one: -one.dtype.itemsize)}
    return dict(sorted((entries | own).items(), key=lambda item: -item[1][0].itemsize))


def require_usable_output(base: MergeBase, adapters: Sequence[Path], out: Path) -> None:
    """Raise UsageError where the output would replace an input, or has a name that it cannot have."""
    inputs = [*base.sources(), base.path, *(file.path for file in base.files.values()), *adapters]
    inside = base.is_folder and base.path.resolve() in out.resolve().parents
    linked = any(out.exists() and path.exists() and out.samefile(path) for path in inputs)
    if inside or linked or out.resolve() in [path.resolve() for path in inputs]:
        raise UsageError(
            f"{out} is one of the inputs, or lies inside of one",
            code="MERGE-OUT",
            subject="--out",
            remedy="Nothing is written in place: a merge cannot be taken back. Give another name.",
        )
    if base.is_folder and out.is_dir() and any(p for p in out.iterdir() if not p.name.startswith(".partial-")):
        raise UsageError(
            f"{out} is a folder that is not empty",
            code="MERGE-OUT",
            subject="--out",
            remedy="A model among other files could not be told from them. Give a new folder.",
        )
    if not base.is_folder and (
        out.is_dir() or not out.name.endswith((SAFETENSORS_EXTENSION, SAFETENSORS_EXTENSION + INDEX_SUFFIX))
    ):
        raise UsageError(
            f"{out} is no name of a model file",
            code="MERGE-OUT",
            subject="--out",
            remedy=f"End it with {SAFETENSORS_EXTENSION}; the base is one file, and so is the output.",
        )


@contextmanager
def fill_output_files(
    files: Sequence[OutputFile],
    manner: RoundingOptions,
    known: Mapping[TensorEntry, DeltaSurvival | None],
    progress: Progress,
) -> Iterator[tuple[list[PendingFile], list[TensorOutcome]]]:
    """All files, filled under temporary names; put in place at the end of the block, none of them where it fails.

    `known` are survivals that need not be estimated again. Raises FileError where the system refuses.
    """
    with stage_files([file.path for file in files]) as places:
        fillings = [PendingFile(file, place) for file, place in zip(files, places, strict=True)]
        for filling in fillings:
            filling.place.write_bytes(filling.file.header)
            reserve_file_space(filling.place, filling.file.size)
        units: list[PlannedTensor | PendingFile] = [one for one in fillings if one.file.copy_of]
        units += [replace(job, path=one.place) for one in fillings for job in one.file.jobs]
        progress.start("merge", sum(file.size for file in files))
        with flush_periodically([filling.place for filling in fillings if filling.file.jobs]):
            changing = [unit for unit in units if isinstance(unit, PlannedTensor) and not unit.is_copy]
            longest = max((to_matrix_shape(unit.shape)[1] for unit in changing), default=1)  # a row is never divided
            outcomes = run_in_copy_workers(units, make_file_worker(manner, known, progress), longest)
        progress.finish("merge")
        yield fillings, [outcome for found in outcomes for outcome in found]


def make_file_worker(
    manner: RoundingOptions, known: Mapping[TensorEntry, DeltaSurvival | None], progress: Progress
) -> Callable[[CopyWorker, PlannedTensor | PendingFile], list[TensorOutcome]]:
    """What a lane does with one piece of work."""

    def work(lane: CopyWorker, unit: PlannedTensor | PendingFile) -> list[TensorOutcome]:
        if isinstance(unit, PendingFile):
            source = unit.file.copy_of
            outcomes = [] if source is None else copy_and_check_file(lane, source, unit.place, unit.file.tensors)
            progress.advance("merge", unit.file.size)
            return outcomes
        outcome = copy_or_merge_tensor(lane, unit, manner, known.get(unit.entry))
        progress.advance("merge", unit.size_bytes)
        return [outcome]

    return work
