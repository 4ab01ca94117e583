"""Tensors of a file, read once and looked at for numbers that are none; those as large as a model, only when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finitune.adapters.core import Shape, SiteAdapter
from finitune.files.scan import locate_first_nonfinite
from finitune.files.tensorfile import TensorFile, count_nonfinite
from finitune.report import Finding, Level


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is yet to be read: its shape and how."""

    shape: Shape
    read: Callable[[], Tensor]

    def narrow(self, axis: int, start: int, length: int) -> PendingTensor:
        """A stretch of it along one axis."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return PendingTensor(shape, lambda: self.read().narrow(axis, start, length))


class DeferredTensors(Mapping[str, Tensor]):
    """Tensors by role that are read anew each time they are asked for, so that none stays in memory unasked."""

    def __init__(self, pending: Mapping[str, PendingTensor]):
        self.pending = dict(pending)

    def __getitem__(self, role: str) -> Tensor:
        return self.pending[role].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


class TensorReader:
    """A file's tensors in the dtype of the file; remembers which hold NaN or inf."""

    def __init__(self, file: TensorFile):
        self.file = file
        self.looked_at: set[str] = set()
        self.findings: list[Finding] = []
        self.shared: dict[str, Tensor] = {}

    def read(self, key: str) -> Tensor:
        """One tensor; the first time, its non-finite elements are counted."""
        tensor = self.file.read(key)
        if key not in self.looked_at:
            self.looked_at.add(key)
            self.look_at(key, tensor)
        return tensor

    def read_shared(self, key: str) -> Tensor:
        """One tensor that all modules have: the very one each time."""
        if key not in self.shared:
            self.shared[key] = self.read(key)
        return self.shared[key]

    def pending(self, key: str) -> PendingTensor:
        """One tensor, to be read later; looked at now."""
        self.read(key)
        return PendingTensor(self.file.entries[key].shape, lambda: self.file.read(key))

    def look_at(self, key: str, tensor: Tensor) -> None:
        """Report a tensor that holds NaN or inf, with their counts and the first place."""
        count = count_nonfinite(tensor)
        if not count.nan and not count.inf:
            return
        where, bad = list(locate_first_nonfinite(tensor)), count.nan + count.inf
        self.findings.append(
            Finding(
                Level.ERROR,
                "ADAPTER-NONFINITE",
                key,
                f"{key} is not finite: {bad} of {count.size} elements",
                {"nan": count.nan, "inf": count.inf, "size": count.size, "first": where, "all": bad == count.size},
                "Training diverged, or a cast overflowed: take an earlier checkpoint, or one saved in fp32. No command "
                "mends or skips such numbers; a copy of the file without this module's tensors would be read.",
            )
        )


def to_meta_adapter(adapter: SiteAdapter) -> SiteAdapter:
    """The same adapter with shapes and dtypes alone, for checks that must not read what is deferred."""
    if not isinstance(adapter.tensors, DeferredTensors):
        return adapter
    shapes = {role: pending.shape for role, pending in adapter.tensors.pending.items()}
    return replace(adapter, tensors={role: torch.empty(shape, device="meta") for role, shape in shapes.items()})
