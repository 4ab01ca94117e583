"""What a run has told so far, kept for curves, tables and the last report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from finitune.report import Finding, plain
from finitune.training import events


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
                self.previews.append(event)
            case events.Validated():
                self.validations.append(event)
            case events.Ranged():
                self.ranges.append(event)
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

    def log(self, folder: Path) -> Path:
        """Write the steps as one JSON object a line, non-finite numbers as text; returns the file."""
        from finitune.files.writer import write_text

        path = folder / "steps.jsonl"
        write_text(path, "".join(json.dumps(plain(asdict(step))) + "\n" for step in self.steps))
        return path
