"""The run that trains nothing: found in its first 20 updates, not after a night.

The causes seen in the field: gradient checkpointing over inputs that need no gradient, a detached graph, an optimiser
over copies of the parameters, a learning rate of 0. All of them look like training: the loss moves, by its noise.

An adapter that changes nothing at first has one factor of zeros in each site (up, w1 ...): where that one is still zero
the whole site is without effect, whatever its other factors have learned. So nothing here needs to know of algorithms.
Parameters are told apart by fingerprints, so that no copy of them is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from finitune.report import Finding, Level

NO_TRAINING_CHECK_UPDATES = (1, 2, 20)
"""The updates after which one looks."""

_MAX_NAMES_SHOWN = 5
_TRAINS_NOTHING_CODE = "TRAINS-NOTHING"

_FINGERPRINT_CHUNK_ELEMENTS = 1 << 22
_INTEGER_DTYPE_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class NoTrainingDetector:
    """Watches `parameters`, as they are before the first update, by name ("site.role")."""

    parameters: Mapping[str, Tensor]
    _before: list[int] = field(default_factory=list)
    _over: bool = False

    def __post_init__(self) -> None:
        self._before = compute_fingerprints(self.parameters.values())

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
        now = compute_fingerprints(tensors)
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


def compute_fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each tensor's bits: another one for certain where one element differs, and but for bad luck else.

    It is the sum of the bit patterns times odd numbers that tell the places, modulo 2^64; one wait for the device.
    Processes that should hold the same weights can compare it.
    """
    return fetch_scalars([compute_fingerprint(tensor) for tensor in tensors])


def compute_fingerprint(tensor: Tensor) -> Tensor:
    """The fingerprint of a tensor's bits, 0-d int64 on its device, in pieces of bounded size."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_DTYPE_BY_BYTES[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _FINGERPRINT_CHUNK_ELEMENTS):
        piece = bits[start : start + _FINGERPRINT_CHUNK_ELEMENTS].long()
        places = torch.arange(start, start + len(piece), device=tensor.device)
        total += (piece * (2 * places + 1)).sum()
    return total


def find_zero_tensors(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each tensor is zero all over; NaN is not. One wait for the device."""
    return [not found for found in fetch_scalars([tensor.detach().any() for tensor in tensors])]


def fetch_scalars(numbers: Sequence[Tensor]) -> list[Any]:
    """0-d tensors of one dtype as plain values."""
    return torch.stack(list(numbers)).tolist() if numbers else []
