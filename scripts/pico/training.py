"""What both trainings share: a budget of seconds that survives restarts, the learning rate, averages, saved states."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def cosine(step: int, total: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a half cosine down to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


class Clock:
    """Spends a budget of seconds across restarts: `fraction` of it that is used up, saved with each checkpoint."""

    def __init__(self, budget_s: float, used_s: float = 0.0):
        self.budget_s, self.used_s, self.last = budget_s, used_s, time.monotonic()

    def fraction(self) -> float:
        now = time.monotonic()
        self.used_s += now - self.last
        self.last = now
        return min(1.0, self.used_s / self.budget_s)


def average(model: nn.Module, decay: float) -> torch.optim.swa_utils.AveragedModel:
    """An exponential moving average of a model's weights."""
    swa = torch.optim.swa_utils
    return swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(decay))


def save_state(path: Path, parts: dict[str, Any], clock: Clock, step: int) -> None:
    """Everything needed to go on, written whole or not at all."""
    temporary = path.with_suffix(".tmp")
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "used_s": clock.used_s, "step": step}, temporary)
    temporary.replace(path)


def load_state(path: Path, parts: dict[str, Any], budget_s: float) -> tuple[Clock, int]:
    """Go on from `path` where it exists: the clock and the step reached."""
    if not path.exists():
        return Clock(budget_s), 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return Clock(budget_s, state["used_s"]), state["step"]
