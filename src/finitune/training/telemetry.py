"""What is watched on the way: a running loss, spikes, and whether anything is trained at all.

**The running loss** cannot be spoiled by one NaN: what is not finite is counted, and left out of every mean.

**Spikes** are losses and gradients far above what was usual of late: reported, never acted on. The score is robust and
free of scale: (log x - median) / deviation over the recent logs, the deviation being 1.4826 times the median absolute
deviation (which is the standard deviation of a normal distribution). The loss of a single sigma varies tenfold without
fault; a plain z-score would be blind after one outlier, and loud without one.

**The run that trains nothing** is found in its first 20 updates, not after a night. The causes seen in the field:
gradient checkpointing over inputs that need no gradient, a detached graph, an optimiser over copies of the parameters,
a learning rate of 0. All of them look like training: the loss moves, by its noise. An adapter that changes nothing at
first has one factor of zeros in each site (up, w1 ...): where that one is still zero the whole site is without effect,
whatever its other factors have learned. So nothing here needs to know of algorithms. Parameters are told apart by
digests, so that no copy of them is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from finitune.report import Finding, Level


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
        self.epoch_sum, self.epoch_count = 0.0, 0

    def state_dict(self) -> dict[str, float | int | None]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])


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
        return {
            "count": self.count,
            "high": self._high,
            "losses": list(self.losses),
            "gradients": list(self.gradients),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._high = state["count"], state["high"]
        self.losses = deque(state["losses"], maxlen=_SPIKE_WINDOW)
        self.gradients = deque(state["gradients"], maxlen=_SPIKE_WINDOW)


def has_finite_logarithm(value: float) -> bool:
    return math.isfinite(value) and value > 0


NO_TRAINING_CHECK_UPDATES = (1, 2, 20)
"""The updates after which one looks."""

_MAX_NAMES_SHOWN = 5
_TRAINS_NOTHING_CODE = "TRAINS-NOTHING"

_DIGEST_CHUNK_ELEMENTS = 1 << 22
_INTEGER_DTYPE_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class NoTrainingDetector:
    """Watches `parameters`, as they are before the first update, by name ("site.role")."""

    parameters: Mapping[str, Tensor]
    _before: list[int] = field(default_factory=list)
    _over: bool = False

    def __post_init__(self) -> None:
        self._before = digest_tensors(self.parameters.values())

    def watch(
        self, update: int, gradients: Mapping[str, Tensor | None], learning_rates: Sequence[float] = ()
    ) -> Finding | None:
        """What is silent after the `update`-th update that was made (from 1; skipped steps do not count).

        After 1: an error where no gradient arrived at all. After 2: an error where no parameter has changed. After 20:
        the same, or a warning that names the parameters that are still the same bits and the sites that still have no
        effect. At other updates it costs nothing; after an error it says no more.
        """
        if update not in NO_TRAINING_CHECK_UPDATES or self._over:
            return None
        finding = self._without_gradient(gradients) if update == 1 else self._unchanged(update, gradients)
        self._over = finding is not None and finding.level is Level.ERROR
        if finding and self._over and update > 1 and learning_rates and not any(learning_rates):
            return replace(
                finding,
                subject="optimizer.learning_rate",
                message=f"{finding.message}: the learning rate is 0",
                remedy="Set a learning_rate above 0; a warm-up must have left 0 by the second update.",
            )
        return finding

    def _without_gradient(self, gradients: Mapping[str, Tensor | None]) -> Finding | None:
        deaf = self._deaf(gradients)
        if len(deaf) < len(self.parameters):
            return None
        missing = sum(gradients.get(name) is None for name in deaf)
        return Finding(
            Level.ERROR,
            _TRAINS_NOTHING_CODE,
            "training",
            "no gradient reached any trained tensor",
            {"parameters": len(deaf), "without gradient": missing, "first": sorted(deaf)[:_MAX_NAMES_SHOWN]},
            "The graph is cut between loss and adapter: checkpointing must be the non-reentrant kind, and the adapted "
            "modules must be among those that the model calls.",
        )

    def _unchanged(self, update: int, gradients: Mapping[str, Tensor | None]) -> Finding | None:
        tensors = self.parameters.values()
        now = digest_tensors(tensors)
        same = {n for n, before, after in zip(self.parameters, self._before, now, strict=True) if before == after}
        everything = len(same) == len(self.parameters)
        if not same or (not everything and update < NO_TRAINING_CHECK_UPDATES[-1]):
            return None
        deaf = self._deaf(gradients) & same
        zero = {name for name, is_zero in zip(self.parameters, find_zero_tensors(tensors), strict=True) if is_zero}
        sites = sorted({name.rpartition(".")[0] for name in zero & same})
        number = "none" if everything else f"only {len(self.parameters) - len(same)}"
        return Finding(
            Level.ERROR if everything else Level.WARNING,
            _TRAINS_NOTHING_CODE,
            "training",
            f"{number} of {len(self.parameters)} trained tensors changed in {update} updates",
            {
                "parameters": len(self.parameters),
                "unchanged": len(same),
                "first": sorted(same)[:_MAX_NAMES_SHOWN],
                "without gradient": len(deaf),
                "sites without effect": len(sites),
                "first sites": sites[:_MAX_NAMES_SHOWN],
            },
            "They have gradients, so the optimiser does not hold them, or its rate is 0 or too small for fp32."
            if len(deaf) < len(same)
            else "No gradient reaches them: the model does not call these modules, or the graph is cut before them.",
        )

    def _deaf(self, gradients: Mapping[str, Tensor | None]) -> set[str]:
        """The parameters whose gradient is missing or all zero."""
        present = {name: grad for name in self.parameters if (grad := gradients.get(name)) is not None}
        zero = {name for name, silent in zip(present, find_zero_tensors(present.values()), strict=True) if silent}
        return set(self.parameters) - set(present) | zero


def digest_tensors(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each tensor's bits: another one for certain where one element differs, and but for bad luck else.

    It is the sum of the bit patterns times odd numbers that tell the places, modulo 2^64; one wait for the device.
    Processes that should hold the same weights can compare it.
    """
    return fetch_scalars([_digest_tensor(tensor) for tensor in tensors])


def _digest_tensor(tensor: Tensor) -> Tensor:
    """The digest of a tensor's bits, 0-d int64 on its device, in pieces of bounded size."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_DTYPE_BY_BYTES[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _DIGEST_CHUNK_ELEMENTS):
        piece = bits[start : start + _DIGEST_CHUNK_ELEMENTS].long()
        places = torch.arange(start, start + len(piece), device=tensor.device)
        total += (piece * (2 * places + 1)).sum()
    return total


def find_zero_tensors(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each tensor is zero all over; NaN is not. One wait for the device."""
    return [not found for found in fetch_scalars([tensor.detach().any() for tensor in tensors])]


def fetch_scalars(numbers: Sequence[Tensor]) -> list[Any]:
    return torch.stack(list(numbers)).tolist() if numbers else []
