"""A moving average of the adapter, to save and to measure in place of the last step's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Ema:
    """The exponential moving average of parameters in fp32, without bias: the weighted mean of all steps so far.

    sums <- decay * sums + (1 - decay) * parameters from zero, and the average is sums / (1 - decay**count), as Adam
    corrects its moments (arXiv 1412.6980, algorithm 1). So the first average is the first step itself, and no warm-up
    of the decay is needed.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], decay: float):
        self.parameters = dict(named)
        self.decay = decay
        self.count = 0
        self.sums = {
            name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are after a step."""
        self.count += 1
        for name, parameter in self.parameters.items():
            self.sums[name].mul_(self.decay).add_(parameter.detach().float(), alpha=1 - self.decay)

    def values(self) -> dict[str, Tensor]:
        """The average by name, fp32; before the first update, the parameters themselves."""
        if not self.count:
            return {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        weight = 1 - self.decay**self.count
        return {name: total / weight for name, total in self.sums.items()}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters are their averages within; behind it they have the bits that they had."""
        with hold_parameter_values(self.parameters.values()):
            with torch.no_grad():
                for name, value in self.values().items():
                    self.parameters[name].copy_(value)
            yield

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: the decay, the number of updates, and the sums."""
        return {"decay": self.decay, "count": self.count, "sums": dict(self.sums)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same parameters; the decay stays this one's. Raises KeyError for others."""
        self.count = state["count"]
        for name, total in self.sums.items():
            total.copy_(state["sums"][name])


@contextmanager
def hold_parameter_values(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Give parameters back the bits that they had, whatever is done to them within."""
    held = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in held:
                parameter.copy_(value)
