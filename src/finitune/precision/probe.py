"""Ranges at every module border of a running model: one fused reduction each, read back once per forward.

L0 is one finite flag of the final output (`is_output_finite`). L1 is `probe`: the largest magnitude that leaves each
module, non-finite values staying visible, written into one preallocated device buffer. L2, the replay of the first bad
module operation by operation, is in `origin`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from finitune.errors import FileError
from finitune.numerics.formats import FP16, FP32, headroom_bits
from finitune.numerics.stats import amax_into, least_into
from finitune.precision.sites import ModulePath, iterate_nested_tensors

_RANGES_FORMAT = 1
_MAX_FP32 = FP32.max


def is_output_finite(output: Any) -> bool:
    """L0: True where every floating tensor of `output` is finite."""
    return all(bool(t.isfinite().all()) for t in iterate_nested_tensors(output) if t.is_floating_point())


@dataclass
class Ranges:
    """The largest magnitude seen at each site, over all forwards; `forwards` keeps one row per forward.

    A NaN or an infinity in a site's output makes its range NaN or infinite. `least`, where it was asked for, has the
    least nonzero magnitude of each site.
    """

    sites: list[str] = field(default_factory=list[str])
    forwards: list[list[float]] = field(default_factory=list[list[float]])
    checkpoint: str = ""
    least: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def amax(self) -> dict[str, float]:
        """Site -> largest magnitude over all forwards."""
        if not self.forwards:
            return {}
        return dict(zip(self.sites, _largest(self.forwards), strict=True))

    @property
    def headroom_bits(self) -> dict[str, float]:
        """Site -> log2(65504 / amax); negative where fp16 cannot hold it."""
        return {site: headroom_bits(amax) if amax <= _MAX_FP32 else -math.inf for site, amax in self.amax.items()}

    def first_nonfinite(self) -> tuple[int, str] | None:
        """The first forward, and the first site in it (in order of completion), with a non-finite output."""
        for number, row in enumerate(self.forwards):
            for site, amax in zip(self.sites, row, strict=True):
                if not amax <= _MAX_FP32:
                    return number, site
        return None

    def over_half(self) -> dict[str, float]:
        """The sites whose output fp16 could not hold, with their range."""
        return {site: amax for site, amax in self.amax.items() if not amax <= FP16.max}

    def merge(self, other: Ranges) -> Ranges:
        """Both measurements of one checkpoint as one: the larger range of each site."""
        if self.checkpoint != other.checkpoint:
            raise FileError(
                "ranges of two checkpoints cannot be merged",
                code="RANGES-OTHER-CHECKPOINT",
                evidence={"this": self.checkpoint, "other": other.checkpoint},
                remedy="Measure the same checkpoint twice, or keep the files apart.",
            )
        mine, theirs = self.amax, other.amax
        sites = list(dict.fromkeys([*mine, *theirs]))
        peaks = _largest([[ranges.get(site, 0.0) for site in sites] for ranges in (mine, theirs)])
        least = {**self.least, **other.least}
        least |= {s: min(self.least[s], other.least[s]) for s in self.least.keys() & other.least.keys()}
        return Ranges(sites, [peaks], self.checkpoint, least)

    def save(self, path: Path) -> None:
        """Write the ranges file (JSON), whole or not at all."""
        from finitune.files.writer import write_text

        data = {
            "format": _RANGES_FORMAT,
            "checkpoint": self.checkpoint,
            "torch": torch.__version__,
            "amax": self.amax,
            "least": self.least,
        }
        write_text(path, json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: Path) -> Ranges:
        """Read a ranges file; raises FileError where it is not one."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _RANGES_FORMAT:
                raise ValueError(f"format {data['format']} is not {_RANGES_FORMAT}")
            amax: Mapping[str, float] = data["amax"]
            least = {site: float(value) for site, value in data.get("least", {}).items()}
            return cls(list(amax), [[float(value) for value in amax.values()]], str(data["checkpoint"]), least)
        except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{path}: not a ranges file ({type(error).__name__}: {error})",
                code="RANGES-UNREADABLE",
                subject=str(path),
                remedy="Measure again: with finitune.probe(module) as ranges: ...; ranges.save(path)",
            ) from error


@contextmanager
def probe(root: nn.Module, checkpoint: str = "", *, least: bool = False) -> Generator[Ranges, None, None]:
    """L1: measure the range of every module's output while the context is open.

    `least` asks for the least nonzero magnitudes too, which costs two more passes over each output.

    >>> import torch
    >>> from finitune import probe
    >>> with probe(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())) as ranges:
    ...     pass
    >>> ranges.amax
    {}
    """
    ranges = Ranges(checkpoint=checkpoint)
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    buffer = torch.zeros(sum(1 for _ in root.modules()), device=device)
    slots: dict[str, int] = {}
    snapshots: list[Tensor] = []
    depths = torch.full_like(buffer, math.inf)

    def leave(site: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        slot = slots.setdefault(site, len(slots))
        for tensor in iterate_nested_tensors(output):
            if tensor.is_floating_point() and tensor.numel():
                amax_into(buffer[slot], tensor)
                if least:
                    least_into(depths[slot], tensor)
        if path.depth == 1:
            snapshots.append(buffer.clone())
            buffer.zero_()

    path = ModulePath(root, on_leave=leave)
    try:
        with path:
            yield ranges
    finally:
        ranges.sites = [site or "(root)" for site in slots]
        ranges.forwards = [_floats(snapshot[: len(slots)]) for snapshot in snapshots]
        if least:
            ranges.least = dict(zip(ranges.sites, _floats(depths[: len(slots)]), strict=True))


def _largest(rows: list[list[float]]) -> list[float]:
    """The largest of each column; a NaN wins."""
    return _floats(torch.tensor(rows, dtype=torch.float64).amax(0))


def _floats(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
