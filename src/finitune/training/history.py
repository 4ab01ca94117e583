"""What a run has told so far, kept for curves, tables, the last report, and TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from finitune.errors import UsageError
from finitune.files.writer import write_text
from finitune.report import Finding, to_json_value
from finitune.training import events

_ReplaceableEvent = TypeVar("_ReplaceableEvent", events.PreviewsDrawn, events.ValidationMeasured, events.RangesMeasured)
_LoggedEvent = events.StepTaken | events.ValidationMeasured | events.RangesMeasured


_LOGGED_EVENTS: dict[str, tuple[type[_LoggedEvent], dict[str, Callable[[Any], object]]]] = {
    "steps": (events.StepTaken, dict.fromkeys(("loss", "smoothed", "rate", "grad_norm"), float)),
    "validations": (
        events.ValidationMeasured,
        {"loss": float, "by_sigma": lambda losses: {float(sigma): float(loss) for sigma, loss in losses.items()}},
    ),
    "ranges": (events.RangesMeasured, {"amax": lambda amax: {name: float(value) for name, value in amax.items()}}),
}
"""What of a history is in the log, and what makes its fields of JSON's: keys, and numbers that are not finite, are
texts there."""


def read_logged_event(name: str, line: str) -> _LoggedEvent | None:
    """An event from its line in the log of `name`; None where the line is of nothing like it."""
    kind, made = _LOGGED_EVENTS[name]
    try:
        values = json.loads(line)
        event = kind(**(values | {field: make(values[field]) for field, make in made.items()}))
        return event if isinstance(event.step, int) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def replace_event_of_step(told: Sequence[_ReplaceableEvent], event: _ReplaceableEvent) -> list[_ReplaceableEvent]:
    """Events with one more, in the place of those of its step: a step can be reached again."""
    return [*(one for one in told if one.step != event.step), event]


def keep_events_until(told: Sequence[Any], step: int) -> list[Any]:
    """Events up to the last one of step `step`, where it was reached more than once; without it, those before it."""
    ends = [place for place, event in enumerate(told, 1) if event.step == step]
    return list(told[: ends[-1]]) if ends else [event for event in told if event.step < step]


@dataclass
class TrainingHistory:
    """The events of a run by kind, in their order."""

    measured: events.TrialStepMeasured | None = None
    started: events.TrainingStarted | None = None
    finished: events.TrainingFinished | None = None
    steps: list[events.StepTaken] = field(default_factory=list)
    told: list[events.FindingRaised] = field(default_factory=list)
    saved: list[events.CheckpointSaved] = field(default_factory=list)
    previews: list[events.PreviewsDrawn] = field(default_factory=list)
    validations: list[events.ValidationMeasured] = field(default_factory=list)
    ranges: list[events.RangesMeasured] = field(default_factory=list)
    returns: list[events.StepsRolledBack] = field(default_factory=list)

    def add(self, event: events.TrainingEvent) -> None:
        match event:
            case events.TrialStepMeasured():
                self.measured = event
            case events.TrainingStarted():
                self.started = event
            case events.TrainingFinished():
                self.finished = event
            case events.StepTaken():
                self.steps.append(event)
            case events.FindingRaised():
                self.told.append(event)
            case events.CheckpointSaved():
                self.saved.append(event)
            case events.PreviewsDrawn():
                self.previews = replace_event_of_step(self.previews, event)
            case events.ValidationMeasured():
                self.validations = replace_event_of_step(self.validations, event)
            case events.RangesMeasured():
                self.ranges = replace_event_of_step(self.ranges, event)
            case events.StepsRolledBack():
                self.returns.append(event)

    def findings(self, summed_up: Sequence[Finding] = ()) -> Iterator[Finding]:
        """`summed_up`, and what else was told, each kind of thing about one subject once."""
        yield from summed_up
        over = {finding.code for finding in summed_up}
        seen: set[tuple[str, str]] = set()
        for told in self.told:
            key = (told.finding.code, told.finding.subject)
            if key not in seen and told.finding.code not in over:
                seen.add(key)
                yield told.finding

    def figures(self) -> dict[str, object]:
        figures: dict[str, object] = {}
        if self.measured:
            figures |= {f"measured_{name}": value for name, value in asdict(self.measured).items() if value is not None}
        if self.started:
            figures |= {"effective_batch": self.started.effective_batch, "trained_parameters": self.started.parameters}
        if self.steps:
            last = self.steps[-1]
            taken = [step.seconds for step in self.steps]
            figures |= {
                "steps": last.step,
                "loss": last.smoothed,
                "seconds_per_step": sum(taken) / len(taken),
                "non_finite_steps": sum(not step.taken for step in self.steps),
                **{f"guard_{name}": count for name, count in last.counts.items()},
            }
        if self.validations:
            figures |= {"validation_loss_first": self.validations[0].loss, "validation_loss": self.validations[-1].loss}
        return figures

    def log(self, folder: Path) -> dict[str, Path]:
        """Write steps, validations and ranges as one JSON object a line each, non-finite numbers as text; the files by
        name. A run without a step leaves what an earlier one wrote.
        """
        written: dict[str, Path] = {}
        for name in _LOGGED_EVENTS if self.steps else ():
            path, told = folder / f"{name}.jsonl", getattr(self, name)
            if told:
                write_text(path, "".join(json.dumps(to_json_value(asdict(event))) + "\n" for event in told))
                written[name] = path
            else:
                path.unlink(missing_ok=True)  # of an earlier run
        return written

    def load_log(self, folder: Path, step: int) -> None:
        """Take over what the lives before have logged, up to the state of step `step` that is gone on from.

        Lines that cannot be read are left out: the log is there to be looked at, and no run ends for it.
        """
        for name in _LOGGED_EVENTS:
            path = folder / f"{name}.jsonl"
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
            getattr(self, name)[:0] = keep_events_until(
                [event for line in lines if (event := read_logged_event(name, line))], step
            )


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
