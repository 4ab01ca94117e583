"""What `finitune check` says of a cache of latents and texts: whether each entry is what was written, and of what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finitune.datasets.cache import (
    ENCODER_NAME_BY_CACHE_KIND,
    MAX_CACHE_NAMES_SHOWN,
    CacheSource,
    EncoderCache,
    EncoderCaches,
    describe_identity_change,
    read_cache_identity,
)
from finitune.errors import FileError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import is_abandoned_file
from finitune.progress import Progress
from finitune.report import Level, Report, Table
from finitune.verbs.check.request import BACKUP_SUFFIX, FileFix, Request
from finitune.verbs.shared.model import load_model
from finitune.verbs.shared.options import ModelChoice

_CACHE_FILE_PATTERN = "*-*.safetensors"
_MAX_VALUE_SHOWN, _DIGEST_DIGITS_SHOWN = 40, 12
"""A longer value is a digest, of which so many digits are shown."""


@dataclass(frozen=True)
class CheckedCacheEntry:
    """One entry: its file and size, what made it, and what is wrong with it ("" if nothing)."""

    path: Path
    kind: str
    size_bytes: int
    subject: str
    identity: tuple[tuple[str, str], ...]
    wrong: str


def check_cache(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a cache: its folder, that of one kind of entries, or one entry; raises FileError."""
    files = list(find_cache_files(path))
    progress.start("reading", len(files))
    entries: list[CheckedCacheEntry] = []
    for file in files:
        entries.append(check_cache_entry(file))
        progress.advance("reading")
    progress.finish("reading")
    report.figures.update(
        kind="cache",
        entries=dict(Counter(entry.kind for entry in entries)),
        bytes=sum(entry.size_bytes for entry in entries),
        damaged=sum(bool(entry.wrong) for entry in entries),
    )
    report_damaged_entries(entries, request, report)
    report_cache_makers(entries, report)
    report_abandoned_files(path, request, report)
    if request.model is not None:
        report_stale_entries(entries, request.model, report)


def find_cache_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder in (path, *(path / kind for kind in ENCODER_NAME_BY_CACHE_KIND)):
        if folder.is_dir():
            yield from sorted(file for file in folder.glob(_CACHE_FILE_PATTERN) if not file.name.startswith("."))


def check_cache_entry(path: Path) -> CheckedCacheEntry:
    """An entry, read whole, and compared with what its metadata and its name promise."""
    kind, size = path.parent.name, path.stat().st_size
    try:
        file = TensorFile(path)
        identity = read_cache_identity(file)
        source = CacheSource(path.name.partition("-")[0], file.metadata.get("subject", path.name))
        cache = EncoderCache(path.parent.parent, kind, identity)
        _, wrong = cache.read(path, source)
        if not wrong and cache.path_of(source) != path:
            wrong = "it is of another maker than its name says"
        return CheckedCacheEntry(path, kind, size, source.subject, tuple(sorted(identity.items())), wrong)
    except (FileError, OSError) as error:
        return CheckedCacheEntry(path, kind, size, path.name, (), str(error).partition("\n")[0])


def report_damaged_entries(entries: list[CheckedCacheEntry], request: Request, report: Report) -> None:
    """An error for what cannot be used, with a mending for each: it is made again by the next run."""
    damaged = [entry for entry in entries if entry.wrong]
    if not damaged:
        return
    first = damaged[0]
    report.add(
        Level.ERROR,
        "CACHE-DAMAGED",
        str(first.path),
        f"{len(damaged)} of {len(entries)} entries cannot be used; {first.subject}: {first.wrong}",
        remedy="A run makes them again by itself; --fix moves them away. They come from a full or failing disk.",
        count=len(damaged),
        entries={entry.path.name: entry.wrong for entry in damaged[:MAX_CACHE_NAMES_SHOWN]},
    )
    request.mendings.extend(
        FileFix("CACHE-DAMAGED", entry.path, "Take the entry away", partial(entry.path.unlink, missing_ok=True))
        for entry in damaged
    )


def report_cache_makers(entries: list[CheckedCacheEntry], report: Report) -> None:
    """What made the entries, and a note where several did: the older ones only take room."""
    makers: dict[tuple[str, tuple[tuple[str, str], ...]], list[CheckedCacheEntry]] = {}
    for entry in entries:
        if not entry.wrong:
            makers.setdefault((entry.kind, entry.identity), []).append(entry)
    rows = []
    for (kind, identity), made in makers.items():
        shown = (f"{name} {v[:_DIGEST_DIGITS_SHOWN] if len(v) > _MAX_VALUE_SHOWN else v}" for name, v in identity)
        size = sum(entry.size_bytes for entry in made) / 1e6
        rows.append((kind, str(len(made)), f"{size:.1f} MB", ", ".join(shown)))
    report.tables.append(Table("what made the entries", ("kind", "entries", "size", "maker"), tuple(rows)))
    kinds = Counter(kind for kind, _ in makers)
    for kind, count in kinds.items():
        if count < 2:
            continue
        of_kind = [dict(identity) for (which, identity) in makers if which == kind]
        report.add(
            Level.NOTE,
            "CACHE-SEVERAL-MAKERS",
            kind,
            f"entries of {kind} were made in {count} ways: {describe_identity_change(of_kind[0], of_kind[1])}",
            remedy="A run uses those of its own settings and leaves the others, which only take room.",
            makers=count,
        )


def report_abandoned_files(path: Path, request: Request, report: Report) -> None:
    """A note of what killed programs left half-written, with a mending for each."""
    folders = [path, *(path / kind for kind in ENCODER_NAME_BY_CACHE_KIND)] if path.is_dir() else []
    halves = [file for folder in folders for file in folder.glob(".partial-*") if BACKUP_SUFFIX not in file.name]
    found = [file for file in halves if is_abandoned_file(file)]
    report.figures["left_over"] = len(found)
    if not found:
        return
    report.add(
        Level.NOTE,
        "CACHE-LEFT-OVER",
        str(found[0]),
        f"{len(found)} files were left half-written by a program that was killed",
        remedy="They are never read; --fix moves them away.",
        count=len(found),
        bytes=sum(file.stat().st_size for file in found),
    )
    request.mendings.extend(
        FileFix("CACHE-LEFT-OVER", file, "Take the half-written file away", partial(file.unlink, missing_ok=True))
        for file in found
    )


def report_stale_entries(entries: list[CheckedCacheEntry], model: str, report: Report) -> None:
    """A warning for the entries that another model's encoders made; raises FileError, ModelError of the model."""
    parts = load_model(ModelChoice(model=model))
    parts.prepare_for_encoding()
    encoders = parts.make_encoders((), dict.fromkeys(parts.tokenizers, 1))  # no limit is part of what is compared
    caches = EncoderCaches.beside(Path(), encoders)
    now = {cache.kind: cache.identity for cache in (caches.latents, caches.texts)}
    choices = {"level", "tokens"}  # of the configuration, not of the model
    stale: dict[str, str] = {}
    for entry in entries:
        wanted = {name: value for name, value in now.get(entry.kind, {}).items() if name not in choices}
        made = {name: value for name, value in entry.identity if name not in choices}
        if not entry.wrong and wanted and made != wanted:
            stale[entry.path.name] = describe_identity_change(made, wanted)
    report.figures["stale"] = len(stale)
    if stale:
        name, why = next(iter(stale.items()))
        report.add(
            Level.WARNING,
            "CACHE-STALE",
            name,
            f"{len(stale)} of {len(entries)} entries are not of {model}: {why}",
            remedy="A training of this model makes its own and leaves these; delete the folder to free the room.",
            count=len(stale),
        )
