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
from finitune.files.writer import demand_room, encode_header, staged
from finitune.merging.bases import ENDING, Base
from finitune.merging.plan import Plan, Planned
from finitune.merging.stream import Lane, flushed_meanwhile, in_lanes, reserve
from finitune.merging.survival import Survival
from finitune.merging.work import Job, Manner, Outcome, copy_file, copy_or_merge
from finitune.progress import Progress

DEFAULT_SHARD = 5_000_000_000
"""The Hub's and diffusers' own size of a shard, in bytes."""


@dataclass(frozen=True)
class OutFile:
    """One file to be written: a header and tensors, or the bytes of another file (`copy_of`), or a few bytes as such.

    The jobs' places are in this file; their `path` is not known before it is begun. `tensors` are those in `copy_of`.
    """

    path: Path
    size: int
    header: bytes = b""
    jobs: tuple[Job, ...] = ()
    copy_of: Path | None = None
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class Filling:
    """A file that is being filled under a temporary name."""

    file: OutFile
    place: Path

    def units(self) -> list[Job | Filling]:
        """The pieces of work: its tensors, or itself where it is a copy."""
        return [self] if self.file.copy_of else [replace(job, path=self.place) for job in self.file.jobs]


def lay_out(base: Base, plan: Plan, out: Path, shard_size: int | None, metadata: Mapping[str, str]) -> list[OutFile]:
    """The files of the output, indices last. `metadata` is added to the base's own. Raises UsageError."""
    if not base.is_folder:
        wanted = shard_size or (DEFAULT_SHARD if out.name.endswith(INDEX_SUFFIX) else None)
        return shards_of(out, base.files[""], [*plan.tensors], wanted, metadata)
    files: list[OutFile] = []
    for component, file in base.files.items():
        mine = [one for one in plan.tensors if one.key.file == component]
        where = out / file.path.relative_to(base.path)
        touched = any(one.change or one.dtype != one.entry.torch_dtype for one in mine)
        if touched:
            largest = max(path.stat().st_size for path in {entry.path for entry in file.entries.values()})
            sharded = largest if file.path.name.endswith(INDEX_SUFFIX) else None
            files += shards_of(where, file, mine, shard_size or sharded, metadata)
        else:
            lying: dict[Path, dict[str, TensorEntry]] = {file.path: {}}
            for one in mine:
                lying.setdefault(one.entry.path, {})[str(one.key)] = one.entry
            files += [copied(path, base.path, out, tensors) for path, tensors in sorted(lying.items())]
    files += [copied(path, base.path, out) for path in base.others]
    return sorted(files, key=lambda one: one.path.name.endswith(INDEX_SUFFIX))


def copied(path: Path, folder: Path, out: Path, tensors: Mapping[str, TensorEntry] | None = None) -> OutFile:
    """A file of a folder, with the tensors in it, at the same place in another."""
    return OutFile(out / path.relative_to(folder), path.stat().st_size, copy_of=path, tensors=tensors or {})


def shards_of(
    path: Path, file: TensorFile, tensors: Sequence[Planned], limit: int | None, metadata: Mapping[str, str]
) -> list[OutFile]:
    """One safetensors file at `path`, or several of at most `limit` bytes (one tensor at least) and their index."""
    stem = path.name.removesuffix(INDEX_SUFFIX).removesuffix(ENDING)
    texts = {**file.metadata, **metadata}
    groups = divided(tensors, limit)
    if len(groups) == 1 and not path.name.endswith(INDEX_SUFFIX):
        return [tensor_file(path, groups[0], texts)]
    names = [f"{stem}-{n:05d}-of-{len(groups):05d}{ENDING}" for n in range(1, len(groups) + 1)]
    shards = [tensor_file(path.with_name(n), group, texts) for n, group in zip(names, groups, strict=True)]
    weight_map = {name: shard.path.name for shard in shards for name in entries_of(shard.jobs)}
    total = sum(shard.size - len(shard.header) for shard in shards)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
    return [*shards, OutFile(path.with_name(stem + ENDING + INDEX_SUFFIX), len(index), index)]


def divided(tensors: Sequence[Planned], limit: int | None) -> list[list[Planned]]:
    """Tensors in their order, in groups of at most `limit` bytes."""
    groups: list[list[Planned]] = [[]]
    filled = 0
    for one in tensors:
        if limit and groups[-1] and filled + one.size_bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += one.size_bytes
    return groups


def tensor_file(path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str]) -> OutFile:
    """A safetensors file: wide elements first, so that each tensor is aligned, and else in the base's order."""
    jobs = [
        Job(
            str(one.key),
            one.key.name,
            one.entry,
            path,
            0,
            one.dtype,
            one.change,
            one.scale,
            0 if one.rescaled else None,
        )
        for one in sorted(tensors, key=lambda one: -one.dtype.itemsize)
    ]
    entries = entries_of(jobs)
    header = encode_header(entries, metadata)
    places: dict[str, int] = {}
    end = len(header)
    for name, (dtype, shape) in entries.items():
        places[name] = end
        end += dtype.itemsize * torch.Size(shape).numel()
    placed = [
        replace(
            job,
            at=places[job.name],
            scale_at=places[job.scale.key] if job.scale is not None and job.scale_at is not None else None,
        )
        for job in jobs
    ]
    return OutFile(path, end, header, tuple(placed))


def entries_of(jobs: Sequence[Job]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: dtype and shape} of the tensors of some jobs: scales first, for they are the widest."""
    scales = [job.scale for job in jobs if job.scale is not None and job.scale_at is not None]
    entries = {scale.key: (scale.entry.torch_dtype, scale.entry.shape) for scale in scales}
    wide = {job.name: (job.dtype, job.shape) for job in jobs}
    return dict(sorted((entries | wide).items(), key=lambda item: -item[1][0].itemsize))


def demand_place(base: Base, adapters: Sequence[Path], out: Path) -> None:
    """Raise UsageError where the output would replace an input, or has a name that it cannot have."""
    inputs = [*base.sources(), base.path, *(file.path for file in base.files.values()), *adapters]
    inside = base.is_folder and base.path.resolve() in out.resolve().parents
    if inside or any(same_file(out, path) for path in inputs):
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
    if not base.is_folder and (out.is_dir() or not out.name.endswith((ENDING, ENDING + INDEX_SUFFIX))):
        raise UsageError(
            f"{out} is no name of a model file",
            code="MERGE-OUT",
            subject="--out",
            remedy=f"End it with {ENDING}; the base is one file, and so is the output.",
        )


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths are one file or folder, linked or not."""
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def demand_disk(files: Sequence[OutFile], out: Path) -> int:
    """The bytes that will be written; raises FileError (DISK-FULL) where the disk has fewer free."""
    needed = sum(file.size for file in files)
    demand_room(out, needed, "Free some space, or write to another disk. Nothing was written.")
    return needed


@contextmanager
def filled(
    files: Sequence[OutFile],
    manner: Manner,
    known: Mapping[TensorEntry, Survival | None],
    progress: Progress,
) -> Iterator[tuple[list[Filling], list[Outcome]]]:
    """All files, filled under temporary names; put in place at the end of the block, none of them where it fails.

    `known` are survivals that need not be estimated again. Raises FileError where the system refuses.
    """
    with staged([file.path for file in files]) as places:
        fillings = [Filling(file, place) for file, place in zip(files, places, strict=True)]
        for filling in fillings:
            filling.place.write_bytes(filling.file.header)
            reserve(filling.place, filling.file.size)
        units = [unit for filling in fillings for unit in filling.units()]
        progress.start("merge", sum(file.size for file in files))
        with flushed_meanwhile([filling.place for filling in fillings if filling.file.jobs]):
            outcomes = in_lanes(units, work_on(manner, known, progress), longest_row(units))
        progress.finish("merge")
        yield fillings, [outcome for found in outcomes for outcome in found]


def work_on(
    manner: Manner, known: Mapping[TensorEntry, Survival | None], progress: Progress
) -> Callable[[Lane, Job | Filling], list[Outcome]]:
    """What a lane does with one piece of work."""

    def work(lane: Lane, unit: Job | Filling) -> list[Outcome]:
        if isinstance(unit, Filling):
            source = unit.file.copy_of
            outcomes = [] if source is None else copy_file(lane, source, unit.place, unit.file.tensors)
            progress.advance("merge", unit.file.size)
            return outcomes
        outcome = copy_or_merge(lane, unit, manner, known.get(unit.source))
        progress.advance("merge", unit.dtype.itemsize * torch.Size(unit.shape).numel())
        return [outcome]

    return work


def longest_row(units: Sequence[Job | Filling]) -> int:
    """The most elements that a block must hold: a row is never divided."""
    from finitune.merging.recipe import matrix_shape

    shapes = [matrix_shape(unit.shape) for unit in units if isinstance(unit, Job) and not unit.is_copy]
    return max((columns for _, columns in shapes), default=1)
