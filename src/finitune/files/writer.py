"""Files that are whole or not there: written under another name in the same folder, flushed to disk, renamed."""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FileError
from finitune.files.tensorfile import content_of, dtype_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT_BYTES = 8


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in its place; on any error nothing is left.

    The temporary name keeps the suffix of `path`. Raises FileError (FILE-NOT-WRITTEN) where the system refuses;
    other errors of `write` pass through.
    """
    path = Path(path)
    temporary = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        flush(temporary)
        temporary.replace(path)
        if os.name == "posix":
            flush(path.parent)  # the rename itself must survive a power cut
    except OSError as error:
        raise FileError(
            f"{path} could not be written: {error.strerror or error}",
            code="FILE-NOT-WRITTEN",
            subject=str(path),
            evidence={"errno": error.errno},
            remedy="Check the free space and the permissions of the folder. Nothing was left behind.",
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()


def flush(path: Path) -> None:
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
    save_stream(path, entries, tensors.__getitem__, metadata)


def save_stream(
    path: str | Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically, asking for one tensor at a time: no more than one is in memory.

    `entries` promises the dtype and shape of each name; raises ValueError where `tensor_of` breaks the promise.
    """
    # Wide elements first, so that each tensor begins at a multiple of its element size.
    names = sorted(entries, key=lambda name: (-entries[name][0].itemsize, name))
    header = encode_header({name: entries[name] for name in names}, metadata)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(header)
            for name in names:
                tensor = tensor_of(name)
                if (tensor.dtype, tuple(tensor.shape)) != entries[name]:
                    raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, promised {entries[name]}")
                stream.write(content_of(tensor))

    write_atomically(path, write)


def encode_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """The length field and the JSON header of a safetensors file whose tensors follow in the order of `entries`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text
