"""What a run has told so far, kept for curves, tables and the last report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from finitune.report import Finding, plain
from finitune.training import events

Shown = TypeVar("Shown", events.Previewed, events.Validated, events.Ranged)
Logged = TypeVar("Logged", events.Stepped, events.Validated, events.Ranged)


def stepped(line: str) -> events.Stepped | None:
    """A step from its line in the log; None where it is none."""
    return read(line, events.Stepped, loss=float, smoothed=float, rate=float, grad_norm=float)


def validated(line: str) -> events.Validated | None:
    """A validation from its line in the log."""
    return read(line, events.Validated, loss=float, by_sigma=by_number)


def ranged(line: str) -> events.Ranged | None:
    """Ranges from their line in the log."""
    return read(line, events.Ranged, amax=lambda amax: {name: float(value) for name, value in amax.items()})


def by_number(losses: Mapping[str, Any]) -> dict[float, float]:
    """Losses by sigma: JSON has texts for both where they are not finite, and for every key."""
    return {float(sigma): float(loss) for sigma, loss in losses.items()}


def read(line: str, kind: type[Logged], **made: Callable[[Any], object]) -> Logged | None:
    """An event from its line in a log, its fields as `made` makes them; None where the line is of nothing like it."""
    try:
        values = json.loads(line)
        event = kind(**(values | {name: make(values[name]) for name, make in made.items()}))
        return event if isinstance(event.step, int) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


LOGGED: dict[str, Callable[[str], Any]] = {"steps": stepped, "validations": validated, "ranges": ranged}
"""What of a history is in the log, and how it is read back."""


def renewed(told: Sequence[Shown], event: Shown) -> list[Shown]:
    """Events with one more, in the place of those of its step: a step can be reached again."""
    return [*(one for one in told if one.step != event.step), event]


def until(told: Sequence[Any], step: int) -> list[Any]:
    """Events up to the last one of step `step`, where it was reached more than once; without it, those before it."""
    ends = [place for place, event in enumerate(told, 1) if event.step == step]
    return list(told[: ends[-1]]) if ends else [event for event in told if event.step < step]


@dataclass
class History:
    """The events of a run by kind, in their order."""

    measured: events.Measured | None = None
    started: events.Started | None = None
    finished: events.Finished | None = None
    steps: list[events.Stepped] = field(default_factory=list)
    told: list[events.Told] = field(default_factory=list)
    saved: list[events.Saved] = field(default_factory=list)
    previews: list[events.Previewed] = field(default_factory=list)
    validations: list[events.Validated] = field(default_factory=list)
    ranges: list[events.Ranged] = field(default_factory=list)
    returns: list[events.RolledBack] = field(default_factory=list)

    def add(self, event: events.Event) -> None:
        """Keep an event."""
        match event:
            case events.Measured():
                self.measured = event
            case events.Started():
                self.started = event
            case events.Finished():
                self.finished = event
            case events.Stepped():
                self.steps.append(event)
            case events.Told():
                self.told.append(event)
            case events.Saved():
                self.saved.append(event)
            case events.Previewed():
                self.previews = renewed(self.previews, event)
            case events.Validated():
                self.validations = renewed(self.validations, event)
            case events.Ranged():
                self.ranges = renewed(self.ranges, event)
            case events.RolledBack():
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
        """The numbers of the run as a whole."""
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
        from finitune.files.writer import write_text

        written: dict[str, Path] = {}
        for name in LOGGED if self.steps else ():
            path, told = folder / f"{name}.jsonl", getattr(self, name)
            if told:
                write_text(path, "".join(json.dumps(plain(asdict(event))) + "\n" for event in told))
                written[name] = path
            else:
                path.unlink(missing_ok=True)  # of an earlier run
        return written

    def recall(self, folder: Path, step: int) -> None:
        """Take over what the lives before have logged, up to the state of step `step` that is gone on from.

        Lines that cannot be read are left out: the log is there to be looked at, and no run ends for it.
        """
        for name, kind in LOGGED.items():
            path = folder / f"{name}.jsonl"
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
            getattr(self, name)[:0] = until([event for line in lines if (event := kind(line))], step)
