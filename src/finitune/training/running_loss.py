"""A running loss that one NaN cannot spoil: what is not finite is counted, and left out of every mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class RunningLoss:
    """Statistics of a value over a run, all of them of finite values; `nonfinite` counts the others.

    `last` is the last finite value. State is plain JSON, and a restored meter goes on to the same bits.
    """

    decay: float = 0.98
    last: float | None = None
    count: int = 0
    nonfinite: int = 0
    ema: float = 0.0
    ema_weight: float = 0.0
    epoch_sum: float = 0.0
    epoch_count: int = 0

    def add(self, value: float) -> None:
        """Count a value."""
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        self.last = value
        self.count += 1
        self.ema = self.decay * self.ema + (1 - self.decay) * value
        self.ema_weight = self.decay * self.ema_weight + (1 - self.decay)
        self.epoch_sum += value
        self.epoch_count += 1

    @property
    def smoothed(self) -> float | None:
        """The moving average with weights decay^age that sum to one from the first value on; None before it."""
        return self.ema / self.ema_weight if self.count else None

    @property
    def mean(self) -> float | None:
        """The mean of the epoch so far; None where it has no finite value yet."""
        return self.epoch_sum / self.epoch_count if self.epoch_count else None

    def start_epoch(self) -> None:
        """Begin the mean anew."""
        self.epoch_sum, self.epoch_count = 0.0, 0

    def state_dict(self) -> dict[str, float | int | None]:
        """Everything, as JSON holds it."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        """Go on where `state` was taken."""
        for name in asdict(self):
            setattr(self, name, state[name])
