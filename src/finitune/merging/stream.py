"""Moving tensors from file to file through a few buffers that fit a processor's cache, on a few threads.

The time of a merge is memory traffic, so nothing is read or written twice: a block of rows is read from the system's
cache into a buffer, worked on there, and written from another. Matrix products and file calls let go of Python's lock,
so that threads, each on a tensor of its own, run side by side. The buffers are all the memory that a merge needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from finitune.files.sniff import make_unreadable_file_error
from finitune.files.tensorfile import TensorEntry, make_truncated_file_error
from finitune.numerics.narrow import RoundingScratch

COPY_BLOCK_ELEMENTS = 2**18
"""Elements in work at a time: 2 MB in fp64. Smaller ones cost calls, larger ones leave the cache."""

_MAX_COPY_WORKERS = 8
_FLUSH_INTERVAL_SECONDS = 0.25

_T = TypeVar("_T")
_R = TypeVar("_R")


class CopyWorker:
    """One thread's buffers and open files. `block` is the most elements that it holds."""

    def __init__(self, block: int, heavy: threading.Lock, stop: threading.Event):
        self.block = block
        self.wide = torch.empty(block, dtype=torch.float64)
        self.scratch = RoundingScratch(block)
        self.coming = torch.empty(8 * block, dtype=torch.uint8)
        self.going = torch.empty(8 * block, dtype=torch.uint8)
        self.heavy = heavy
        """Held by the lane that has a whole weight in fp64 in memory: there is one at a time."""
        self.stop = stop
        self.files: dict[tuple[Path, str], BinaryIO] = {}

    def read(self, entry: TensorEntry, start: int, count: int) -> Tensor:
        """Elements [start, start + count) of a tensor in its own dtype, in the lane's memory until the next reading."""
        dtype = entry.torch_dtype
        raw = self.coming[: count * dtype.itemsize]
        self.read_bytes(entry.path, entry.begin + start * dtype.itemsize, raw)
        return raw.view(dtype)

    def read_bytes(self, path: Path, begin: int, into: Tensor) -> None:
        """Fill a byte tensor from a place in a file; raises FileError where the file ends before."""
        fill_from_file(self.open(path, "rb"), path, begin, into)

    def get_output_buffer(self, dtype: torch.dtype, count: int) -> Tensor:
        """Room for what is to be written: `count` elements of `dtype`."""
        return self.going[: count * dtype.itemsize].view(dtype)

    def write(self, path: Path, begin: int, tensor: Tensor) -> None:
        """Write a tensor's bytes to a place in a file that is there already."""
        view = memoryview(to_numpy_view(tensor.view(-1).view(torch.uint8)))
        file = self.open(path, "r+b")
        file.seek(begin)
        done = 0
        while done < len(view):
            done += file.write(view[done:])

    def copy(self, source: Path, begin: int, target: Path, at: int, size: int) -> None:
        """Copy bytes from file to file."""
        for _ in self.copied(source, begin, target, at, size):
            pass

    def copied(self, source: Path, begin: int, target: Path, at: int, size: int) -> Iterator[tuple[int, Tensor]]:
        """Copy bytes from file to file; each part as it passes, with the number of bytes before it."""
        for done in range(0, size, len(self.coming)):
            self.check()
            part = self.coming[: min(len(self.coming), size - done)]
            self.read_bytes(source, begin + done, part)
            self.write(target, at + done, part)
            yield done, part

    def copy_tensor(self, entry: TensorEntry, target: Path, at: int) -> NonfiniteCount:
        """Copy a tensor's bytes, looking at each part while it lies in the processor's cache."""
        dtype, holes = entry.torch_dtype, NonfiniteCount()
        for done, part in self.copied(entry.path, entry.begin, target, at, entry.size_bytes):
            if dtype.is_floating_point and not is_tensor_finite(part.view(dtype)):
                holes.count_in(part.view(dtype).double(), done // dtype.itemsize)
        return holes

    def open(self, path: Path, mode: str) -> BinaryIO:
        """The lane's own unbuffered handle of a file."""
        if (path, mode) not in self.files:
            self.files[path, mode] = path.open(mode, buffering=0)  # type: ignore[assignment]
        return self.files[path, mode]

    def check(self) -> None:
        """Raise Stopped where another lane has failed, or the user has had enough."""
        if self.stop.is_set():
            raise WorkerStopped

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self.files.clear()


@dataclass
class NonfiniteCount:
    """The elements of a tensor that are not finite: how many, and the flat index of the first, if any."""

    count: int = 0
    first: int | None = None

    def count_in(self, wide: Tensor, begin: int) -> None:
        """Take in some elements in fp64 or fp32, whose first has the flat index `begin`; the parts come in order."""
        bad = ~wide.reshape(-1).isfinite()
        count = int(bad.sum())
        if count and self.first is None:
            self.first = begin + int(bad.int().argmax())
        self.count += count


def is_tensor_finite(values: Tensor) -> bool:
    """Whether all elements of a contiguous floating tensor are finite, by their bits.

    Of bits without sign, infinities and NaNs are those beyond the largest number. So the largest integer tells for
    positive elements, and, with the sign bit on top, the largest unsigned one for negative ones. Integers are compared
    at the speed of the cache, which no torch function reaches for half precision.
    """
    width = f"{values.dtype.itemsize}"
    bits = to_numpy_view(values.view(-1).view(torch.uint8))
    largest = torch.tensor([torch.finfo(values.dtype).max], dtype=values.dtype).view(torch.uint8)
    limit = int(to_numpy_view(largest).view(f"u{width}")[0])
    sign = 1 << (8 * values.dtype.itemsize - 1)
    return not bits.size or bool(bits.view(f"i{width}").max() <= limit and bits.view(f"u{width}").max() <= limit + sign)


class WorkerStopped(Exception):
    """Work ended because other work failed."""


def to_numpy_view(tensor: Tensor) -> Any:
    """The tensor's memory as numpy sees it."""
    return tensor.numpy()


def run_in_copy_workers(
    items: Sequence[_T], work: Callable[[CopyWorker, _T], _R], longest_row: int = 1, lanes: int | None = None
) -> list[_R]:
    """work(lane, item) for all items, on several threads; results in the order of the items.

    torch's own threads rest meanwhile. The first failure stops the others and is raised; so does an interruption.
    """
    results: list[_R | None] = [None] * len(items)
    failures: list[BaseException] = []
    heavy, lock, stop = threading.Lock(), threading.Lock(), threading.Event()
    numbers = iter(range(len(items)))

    def run() -> None:
        torch.set_num_threads(1)
        lane = CopyWorker(max(COPY_BLOCK_ELEMENTS, longest_row), heavy, stop)
        try:
            while not stop.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                results[number] = work(lane, items[number])
        except BaseException as error:
            if not isinstance(error, WorkerStopped):
                failures.append(error)
            stop.set()
        finally:
            lane.close()

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(len(items), lanes or min(_MAX_COPY_WORKERS, allowed)))
    with keep_torch_threads():
        threads = [threading.Thread(target=run) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]


@contextmanager
def flush_periodically(paths: Sequence[Path]) -> Iterator[None]:
    """Let the disk begin to write while files are being filled, so that the last flush has little left to wait for."""
    done = threading.Event()

    def flush_often() -> None:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("r+b", buffering=0)) for path in paths]
            while not done.wait(_FLUSH_INTERVAL_SECONDS):
                for file in files:
                    with suppress(OSError):  # the flush at the end is the one that counts
                        os.fsync(file.fileno())

    thread = threading.Thread(target=flush_often)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def keep_torch_threads(wanted: int | None = None) -> Iterator[None]:
    """Give torch its number of threads back at the end; meanwhile it has the `wanted` number."""
    number = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def reserve_file_space(path: Path, size: int) -> None:
    """Make a file of `size` bytes whose space is taken from the disk at once, where the system can do that.

    A full disk is then found before any work is done, and blocks written from several threads lie in order. Raises
    OSError.
    """
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def read_whole_tensor(entry: TensorEntry) -> Tensor:
    """One whole tensor in fp64, in its own shape; raises FileError where the file has shrunk."""
    raw = torch.empty(entry.size_bytes, dtype=torch.uint8)
    with entry.path.open("rb", buffering=0) as file:
        fill_from_file(file, entry.path, entry.begin, raw)
    return raw.view(entry.torch_dtype).double().reshape(entry.shape)


def fill_from_file(file: Any, path: Path, begin: int, into: Tensor) -> None:
    """Fill a byte tensor from a place in an unbuffered file; raises FileError where the file ends before."""
    view, got = memoryview(to_numpy_view(into)), 0
    try:
        file.seek(begin)
        while got < len(view):
            count = file.readinto(view[got:])
            if not count:
                raise make_truncated_file_error(path, begin + got, begin + len(view))
            got += count
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error
