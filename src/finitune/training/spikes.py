"""Losses and gradients far above what was usual of late: reported, never acted on.

The score is robust and free of scale: (log x - median) / deviation over the recent logs, the deviation being 1.4826
times the median absolute deviation (which is the standard deviation of a normal distribution). The loss of a single
sigma varies tenfold without fault; a plain z-score would be blind after one outlier, and loud without one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from finitune.report import Finding, Level

_SPIKE_WINDOW = 100
MIN_SPIKE_HISTORY = 20
_MIN_SPIKE_DEVIATION = 0.05
"""Values that hardly vary count as varying by 5 %: no spike is smaller than zscore times that."""


def compute_robust_zscore(value: float, history: Iterable[float]) -> float:
    """How many deviations `value` > 0 lies above the median of `history`, all seen as logarithms."""
    logs = [math.log(known) for known in history]
    middle = median(logs)
    deviation = 1.4826 * median(abs(log - middle) for log in logs)
    return (math.log(value) - middle) / max(deviation, _MIN_SPIKE_DEVIATION)


@dataclass
class SpikeDetector:
    """Watches loss and gradient norm; `count` is how many spikes were reported."""

    zscore: float = 6.0
    count: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_SPIKE_WINDOW))
    gradients: deque[float] = field(default_factory=lambda: deque(maxlen=_SPIKE_WINDOW))
    _high: bool = False

    def add(self, step: int, loss: float, grad_norm: float) -> Finding | None:
        """Take a step's numbers; a finding where one is a spike, once for steps in a row.

        What is not finite, or not above 0, is left out: the first is the guard's, the second no spike.
        """
        scores = {
            name: compute_robust_zscore(value, known)
            for name, value, known in (("loss", loss, self.losses), ("gradient norm", grad_norm, self.gradients))
            if has_finite_logarithm(value) and len(known) >= MIN_SPIKE_HISTORY
        }
        medians = {"loss": self.losses, "gradient norm": self.gradients}
        evidence: dict[str, object] = {"step": step, "loss": loss, "grad_norm": grad_norm}
        evidence |= {f"median {name}": median(medians[name]) for name in scores}
        evidence |= {f"zscore {name}": round(score, 2) for name, score in scores.items()}
        for value, known in ((loss, self.losses), (grad_norm, self.gradients)):
            if has_finite_logarithm(value):
                known.append(value)
        spiking = [name for name, score in scores.items() if score > self.zscore]
        was_high, self._high = self._high, bool(spiking)
        if not spiking or was_high:
            return None
        self.count += 1
        return Finding(
            Level.WARNING,
            "TRAINING-SPIKE",
            f"step {step}",
            f"the {' and the '.join(spiking)} jumped far above what was usual",
            evidence,
            "One is no harm. If they come often: a lower learning rate, a smaller max_grad_norm, or a longer warm-up.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings, as JSON holds it."""
        return {
            "count": self.count,
            "high": self._high,
            "losses": list(self.losses),
            "gradients": list(self.gradients),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.count, self._high = state["count"], state["high"]
        self.losses = deque(state["losses"], maxlen=_SPIKE_WINDOW)
        self.gradients = deque(state["gradients"], maxlen=_SPIKE_WINDOW)


def has_finite_logarithm(value: float) -> bool:
    """Whether a value has a finite logarithm."""
    return math.isfinite(value) and value > 0
