"""Files that are whole or not there: written under another name in the same folder, flushed to disk, renamed."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from finitune.errors import FileError
from finitune.files.tensorfile import get_tensor_bytes, to_safetensors_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor


from collections.abc import Iterable

from finitune.report import Level, Report

_HEADER_ALIGNMENT_BYTES = 8
_DTYPE_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"),
    *("I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32"),
    *("F64", "I64", "U64"),
)
"""The dtypes as the safetensors library ranks them; the last comes first in its files."""

_ABANDONED_AFTER_SECONDS = 3600


def require_free_disk_bytes(path: Path, size_bytes: int, remedy: str) -> None:
    """Raise FileError (DISK-FULL) where the disk of `path`, which need not be there yet, has fewer bytes free."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < size_bytes:
        raise FileError(
            f"{size_bytes / 1e6:,.0f} MB are to be written to {path}, where {free / 1e6:,.0f} MB are free",
            code="DISK-FULL",
            subject=str(path),
            evidence={"needed_bytes": size_bytes, "free_bytes": free},
            remedy=remedy,
        )


def make_not_written_error(path: Path, error: OSError) -> FileError:
    """The error where the system refuses to write."""
    return FileError(
        f"{path} could not be written: {error.strerror or error}",
        code="FILE-NOT-WRITTEN",
        subject=str(path),
        evidence={"errno": error.errno},
        remedy="Check the free space and the permissions of the folder. Nothing was left behind.",
    )


def make_read_back_error(path: Path, remedy: str) -> FileError:
    """The error for a file that was read again after it was written, and is another one."""
    return FileError(
        f"{path} does not read back as it was written", code="FILE-READ-BACK", subject=str(path), remedy=remedy
    )


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in its place; on any error nothing is left.

    The temporary name keeps the suffix of `path`. Raises FileError (FILE-NOT-WRITTEN) where the system refuses;
    other errors of `write` pass through.
    """
    with stage_files([path]) as (temporary,):
        write(temporary)


@contextmanager
def stage_files(paths: Sequence[str | Path]) -> Iterator[tuple[Path, ...]]:
    """Empty temporary files beside `paths`, to be filled; at the end all are flushed, then renamed in their order.

    On any error none of them is left, nor a folder that was made for them. Raises FileError (FILE-NOT-WRITTEN) where
    the system refuses; other errors pass through. Each file is locked meanwhile, where the system has locks, which
    tells it from what a killed program left: see `strays`.
    """
    targets = [Path(path) for path in paths]
    names = [path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}") for path in targets]
    folders: list[Path] = []
    try:
        with ExitStack() as locks:
            for target, name in zip(targets, names, strict=True):
                folders += make_folder(target.parent)
                locks.enter_context(hold_locked_file(name))
            yield tuple(names)
            for name in names:
                flush_to_disk(name)
        for target, name in zip(targets, names, strict=True):
            name.replace(target)
        if os.name == "posix":
            for folder in dict.fromkeys(path.parent for path in targets):
                flush_to_disk(folder)  # the renames themselves must survive a power cut
        folders.clear()
    except OSError as error:
        raise make_not_written_error(targets[0], error) from error
    finally:
        for name in names:
            if name.exists():
                name.unlink()
        for folder in reversed(folders):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with those above it; those that were not there, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


@contextmanager
def hold_locked_file(path: Path) -> Iterator[None]:
    """Make an empty file and hold a lock on it, where the system has locks that end with the program."""
    with path.open("xb") as file:
        if try_lock_file(file) is not None:
            yield
            return
    yield  # an open file could not be renamed there


def try_lock_file(file: BinaryIO) -> bool | None:
    """Lock a file until it is closed, without waiting: False where another holds it, None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def find_partial_files(path: str | Path) -> list[Path]:
    """The temporary files that a killed program left beside `path` while it was to write it: nobody holds them."""
    path = Path(path)
    pattern = re.compile(rf"\.partial-[0-9a-f]{{8}}-{re.escape(path.name)}")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(found for found in beside if pattern.fullmatch(found.name) and is_abandoned_file(found))


def remove_partial_files(path: str | Path) -> dict[Path, int]:
    """Remove what killed programs left beside `path`; the size in bytes of each by its name."""
    sizes = {stray: stray.stat().st_size for stray in find_partial_files(path)}
    for stray in sizes:
        shutil.rmtree(get_scratch_folder(stray), ignore_errors=True)
        stray.unlink()
    return sizes


@contextmanager
def open_scratch_folder(temporary: Path) -> Iterator[Path]:
    """A folder beside a temporary file, for files that need names of their own meanwhile; gone at the end."""
    place = get_scratch_folder(temporary)
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place)


def get_scratch_folder(temporary: Path) -> Path:
    """Where the workshop of a temporary file is."""
    return temporary.with_name(f"{temporary.name}.d")


def is_abandoned_file(path: Path) -> bool:
    """Whether no program holds the lock of a temporary file; without locks, whether an hour has passed."""
    with path.open("rb") as file:
        free = try_lock_file(file)
    return time.time() - path.stat().st_mtime > _ABANDONED_AFTER_SECONDS if free is None else free


def flush_to_disk(path: Path) -> None:
    """Force what the system still holds of a file or folder onto the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write bytes atomically."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def write_text(path: str | Path, content: str) -> None:
    """Write text atomically: UTF-8, line ends as they are."""
    write_bytes(path, content.encode())


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically; tensors on any device, of any layout."""
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    save_tensor_stream(path, entries, tensors.__getitem__, metadata)


def save_tensor_stream(
    path: str | Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically, asking for one tensor at a time: no more than one is in memory.

    `entries` promises the dtype and shape of each name; raises ValueError where `tensor_of` breaks the promise.
    """
    names = order_like_safetensors({name: dtype for name, (dtype, _) in entries.items()})
    header = encode_header({name: entries[name] for name in names}, metadata)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(header)
            for name in names:
                tensor = tensor_of(name)
                if (tensor.dtype, tuple(tensor.shape)) != entries[name]:
                    raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, promised {entries[name]}")
                stream.write(get_tensor_bytes(tensor))

    write_atomically(path, write)


def order_like_safetensors(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Tensor names in the order in which the safetensors library writes them: by dtype, wide ones first; then by name.

    Each tensor so begins at a multiple of its element size, and hashes of the bytes are those of other programs.
    """
    return sorted(dtypes, key=lambda name: (-_DTYPE_ORDER.index(to_safetensors_dtype(dtypes[name])), name))


def encode_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """The length field and the JSON header of a safetensors file whose tensors follow in the order of `entries`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": to_safetensors_dtype(dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def clear_stale_files(paths: Iterable[Path], report: Report) -> None:
    """Remove, and name, what killed runs left beside the files that are to be written."""
    for path in paths:
        for stray, size in remove_partial_files(path).items():
            message = f"a run that was killed had left {size} bytes; they are removed"
            report.add(Level.NOTE, "FILE-STRAY", str(stray), message, size_bytes=size)
