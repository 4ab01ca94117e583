"""What a training tells while it runs: one dataclass for each thing that can happen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finitune.numerics.formats import FP16
from finitune.report import Finding


@dataclass(frozen=True)
class TrialStepMeasured:
    """One real step at the largest bucket, before the first: what the run will need.

    Memory in bytes; `memory_total` None where it is not known; seconds for one optimiser step, of all micro-batches;
    `left_seconds` to the end of the run, with its saves and previews.
    """

    step_seconds: float
    save_seconds: float
    preview_seconds: float | None
    memory_peak: int
    memory_total: int | None
    bucket: tuple[int, int]
    batch: int
    split: int = 1
    left_seconds: float = 0.0


@dataclass(frozen=True)
class TrainingStarted:
    """The arithmetic of the run: where it begins, where it ends, and what a step is made of."""

    first_step: int
    steps: int
    steps_per_epoch: int
    batch: int
    accumulation: int
    devices: int
    parameters: int

    @property
    def effective_batch(self) -> int:
        """Pictures in a full optimiser step: per device x accumulation x devices."""
        return self.batch * self.accumulation * self.devices


@dataclass(frozen=True)
class StepTaken:
    """An optimiser step is over; `taken` says whether it reached the adapter. `loss` may be non-finite where not."""

    step: int
    epoch: int
    loss: float
    smoothed: float
    rate: float
    grad_norm: float
    seconds: float
    taken: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    memory: int = 0


@dataclass(frozen=True)
class FindingRaised:
    """Something that should be known, at a step."""

    step: int
    finding: Finding


@dataclass(frozen=True)
class CheckpointSaved:
    """Files that were written, read back and checked."""

    step: int
    epoch: int
    paths: Mapping[str, Path]
    seconds: float


@dataclass(frozen=True)
class PreviewsDrawn:
    """Pictures that were drawn with the adapter as it is."""

    step: int
    paths: tuple[Path, ...]
    seconds: float


@dataclass(frozen=True)
class ValidationMeasured:
    """The loss on the pictures kept out: its mean, and by sigma."""

    step: int
    loss: float
    by_sigma: Mapping[float, float]


@dataclass(frozen=True)
class RangesMeasured:
    """The largest magnitude that left each block of the denoiser on one batch, and with it the room below 65504."""

    step: int
    amax: Mapping[str, float]

    @property
    def headroom_bits(self) -> float:
        """Powers of two from the largest magnitude to the end of fp16; negative beyond it, -inf where not finite."""
        if not all(map(math.isfinite, self.amax.values())):
            return -math.inf
        largest = max(self.amax.values(), default=0.0)
        return math.log2(FP16.max / largest) if largest > 0 else math.inf


@dataclass(frozen=True)
class StepsRolledBack:
    """The run has gone back to a good state."""

    step: int
    to_step: int
    reason: str


@dataclass(frozen=True)
class TrainingFinished:
    """The end: `reason` is "done", "stopped" (as asked) or "given up" (by the guard)."""

    step: int
    epoch: int
    reason: str
    paths: Mapping[str, Path] = field(default_factory=dict)


TrainingEvent = (
    TrialStepMeasured
    | TrainingStarted
    | StepTaken
    | FindingRaised
    | CheckpointSaved
    | PreviewsDrawn
    | ValidationMeasured
    | RangesMeasured
    | StepsRolledBack
    | TrainingFinished
)
