"""The curves of a run for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from finitune.errors import UsageError
from finitune.training import events


class TensorBoardLogger:
    """Writes scalars of events; raises UsageError (TENSORBOARD-MISSING) where the package is not installed."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "log_with = 'tensorboard': the package is not installed",
                code="TENSORBOARD-MISSING",
                subject="logging.log_with",
                remedy="pip install tensorboard; or log_with = 'none': report.html has the curves, too.",
            ) from error
        self.writer: Any = SummaryWriter(str(folder))

    def add(self, event: events.TrainingEvent) -> None:
        """Write what an event has to show."""
        match event:
            case events.StepTaken():
                self.scalars(event.step, loss=event.loss, smoothed=event.smoothed, grad_norm=event.grad_norm)
                self.scalars(event.step, learning_rate=event.rate, seconds_per_step=event.seconds)
                self.scalars(event.step, **{f"guard/{name}": float(count) for name, count in event.counts.items()})
            case events.ValidationMeasured():
                by_sigma = {f"validation/sigma {sigma:g}": loss for sigma, loss in event.by_sigma.items()}
                self.scalars(event.step, **{"validation/loss": event.loss, **by_sigma})
            case events.RangesMeasured():
                self.scalars(event.step, headroom_bits=event.headroom_bits)
            case events.TrainingFinished():
                self.writer.close()

    def scalars(self, step: int, **values: float) -> None:
        """Write the finite ones of some values."""
        for name, value in values.items():
            if math.isfinite(value):
                self.writer.add_scalar(name, value, step)
