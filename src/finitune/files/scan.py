"""The range of every tensor of a checkpoint, at about the speed of reading it.

One pass that finds the least and the largest element says all: either is NaN where the tensor holds a NaN, and
infinite where it holds an infinity. Only a tensor that is not finite is read a second time, to be counted. Pieces are
read into one small buffer per thread and are looked at while they lie in the processor's cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finitune.files.tensorfile import (
    NonfiniteElements,
    TensorEntry,
    TensorFile,
    count_nonfinite,
    make_truncated_file_error,
)

SCAN_PIECE_BYTES = 1 << 20
_SCAN_THREADS = min(os.cpu_count() or 1, 4)


@dataclass(frozen=True)
class TensorRange:
    """The least and the largest element of a tensor (NaN where it holds one); what is not finite, and where first."""

    low: float
    high: float
    nonfinite: NonfiniteElements | None = None
    first: tuple[int, ...] = ()

    @property
    def amax(self) -> float:
        """The largest magnitude; NaN where the tensor holds one."""
        return math.nan if math.isnan(self.low) or math.isnan(self.high) else max(-self.low, self.high)


PieceObserver = Callable[[str, Tensor], None]
"""Is shown each piece of a tensor by name, flat, in the file's dtype, in its order; the piece is gone afterwards."""


def scan_ranges(
    file: TensorFile, done: Callable[[int], None] | None = None, look: PieceObserver | None = None
) -> dict[str, TensorRange]:
    """The range of every floating tensor that is not empty, by name; `done` is told of the bytes as they pass.

    `look` sees the same bytes: those of one tensor in their order, of several tensors at once. Raises FileError where
    the file has shrunk since its header was read.
    """
    floating = [(name, e) for name, e in file.entries.items() if e.torch_dtype.is_floating_point and e.size_bytes]
    order = sorted(floating, key=lambda item: -item[1].size_bytes)  # large ones first: no thread is left with one
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        results = pool.map(lambda item: _range(item[0], item[1], done, look), order)
        found = {name: low_high for (name, _), low_high in zip(order, results, strict=True)}
    return {name: _with_counts(file, name, *found[name]) for name, _ in floating}


def scan_ranges_slowly(file: TensorFile) -> dict[str, TensorRange]:
    """The obvious twin of `scan`: whole tensors, in fp32."""
    wide = ((name, tensor.float()) for name, tensor in file.tensors() if tensor.is_floating_point() and tensor.numel())
    return {name: _with_counts(file, name, float(t.amin()), float(t.amax())) for name, t in wide}


def _with_counts(file: TensorFile, name: str, low: float, high: float) -> TensorRange:
    if math.isfinite(low) and math.isfinite(high):
        return TensorRange(low, high)
    tensor = file.read(name)
    return TensorRange(low, high, count_nonfinite(tensor), locate_first_nonfinite(tensor))


def locate_first_nonfinite(tensor: Tensor) -> tuple[int, ...]:
    """The place of the first element that is NaN or infinite, in a tensor that has one."""
    first = (~torch.isfinite(_comparable(tensor))).flatten().byte().argmax()
    return tuple(int(n) for n in torch.unravel_index(first, tensor.shape)) if tensor.ndim else ()


def _range(
    name: str, entry: TensorEntry, done: Callable[[int], None] | None, look: PieceObserver | None
) -> tuple[float, float]:
    """(least, largest) of one tensor."""
    low, high = math.inf, -math.inf
    for piece in _pieces(entry):
        least, largest = (float(extreme) for extreme in torch.aminmax(_comparable(piece)))
        low, high = _least(low, least), -_least(-high, -largest)
        if look is not None:
            look(name, piece)
        if done is not None:
            done(piece.numel() * piece.element_size())
    return low, high


def _pieces(entry: TensorEntry) -> Iterator[Tensor]:
    """The elements of a tensor in pieces of one reused buffer."""
    buffer = torch.empty(min(SCAN_PIECE_BYTES, entry.size_bytes), dtype=torch.uint8)
    content: Any = buffer.numpy()
    end = entry.begin + entry.size_bytes
    with entry.path.open("rb", buffering=0) as stream:
        stream.seek(entry.begin)
        place = entry.begin
        while place < end:
            wanted = min(len(content), end - place)
            got = _fill(stream, content[:wanted])
            place += got
            if got < wanted:
                raise make_truncated_file_error(entry.path, place, end)
            yield buffer[:wanted].view(entry.torch_dtype)


def _fill(stream: Any, content: Any) -> int:
    """Read until the buffer is full or the file ends; a raw stream may hand over less than it was asked for."""
    got = 0
    while got < len(content) and (more := stream.readinto(content[got:])):
        got += more
    return got


def _comparable(piece: Tensor) -> Tensor:
    """The piece in a dtype that torch can compare: 8-bit floats are widened, exactly."""
    return piece.half() if piece.dtype.itemsize == 1 else piece


def _least(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)
