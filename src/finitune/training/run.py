"""Everything that a run consists of, and its state as it is saved and taken up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from finitune.adapters import AdapterSet
from finitune.config.schema import TrainConfig
from finitune.datasets.course import Course
from finitune.datasets.items import Batch, MicroBatch
from finitune.training.average import Average
from finitune.training.folder import RunFolder
from finitune.training.guard import Guard
from finitune.training.learner import Learner
from finitune.training.manifest import Manifest
from finitune.training.meters import Meter
from finitune.training.optimizers import Trained
from finitune.training.ranks import Ranks
from finitune.training.silence import Silence
from finitune.training.spikes import Spikes
from finitune.training.state import RunState, restore_random_states
from finitune.training.step import Differentiator
from finitune.training.validation import Validation


class Load(Protocol):
    """Makes tensors of a micro-batch, without the examples that are named; None where nothing is left of it."""

    def __call__(self, micro: MicroBatch, excluded: frozenset[str] = frozenset()) -> Batch | None: ...


@dataclass(frozen=True)
class Hooks:
    """What a run leaves to others: to write an adapter file (and check it), to draw previews, to know when to stop.

    `export(adapter, path, facts)` returns the files by spelling; `preview(step)` the pictures. `stop` is asked after
    each step.
    """

    export: Callable[[AdapterSet, Path, Mapping[str, object]], Mapping[str, Path]]
    preview: Callable[[int], tuple[Path, ...]] | None = None
    stop: Callable[[], bool] = bool


@dataclass
class Run:
    """A training that is ready to go."""

    config: TrainConfig
    learner: Learner
    differentiator: Differentiator
    make_optimizer: Callable[[], Trained]
    rate_of: Callable[[int], float]
    course: Course
    load: Load
    folder: RunFolder
    manifest: Manifest
    total_steps: int
    examples: int
    hooks: Hooks
    ranks: Ranks = field(default_factory=Ranks)
    validation: Validation | None = None
    load_held: Load | None = None
    base_nonfinite: Callable[[], str] = str


@dataclass
class Progressing:
    """What changes while a run runs; `taken` counts the steps that reached the adapter."""

    optimizer: Trained
    guard: Guard
    meter: Meter
    spikes: Spikes
    silence: Silence
    average: Average | None
    step: int = 0
    taken: int = 0
    attempt: int = 0
    planned: bool = True

    @classmethod
    def fresh(cls, run: Run) -> Progressing:
        """At the first step."""
        decay = run.config.optimizer.ema_decay
        named = run.learner.named_parameters()
        return cls(
            optimizer=run.make_optimizer(),
            guard=Guard(run.config.guard, run.examples),
            meter=Meter(),
            spikes=Spikes(run.config.guard.spike_zscore),
            silence=Silence(dict(named)),
            average=Average(named, decay) if decay else None,
        )

    def facts(self, run: Run) -> dict[str, Any]:
        """What is plain of the state."""
        return {
            "guard": self.guard.state_dict(),
            "meter": self.meter.state_dict(),
            "spikes": self.spikes.state_dict(),
            "taken": self.taken,
            "attempt": self.attempt,
            "planned": self.planned,
            "split": run.differentiator.split,
        }

    def state(self, run: Run) -> RunState:
        """Everything that is needed to go on to the same bits. Chance needs nothing: it is drawn by address."""
        tensors: dict[str, Tensor] = run.learner.tensors()
        return RunState(
            step=self.step,
            epoch=self.step // run.course.steps_per_epoch,
            adapter=tensors,
            optimizer=self.optimizer.state_dict(),
            average=self.average.state_dict() if self.average else None,
            facts=self.facts(run),
        )

    def load(self, run: Run, state: RunState) -> None:
        """Go on where `state` was taken."""
        run.learner.restore(state.adapter)
        restore_random_states(state.rng)  # some optimisers draw from the shared generators
        self.optimizer.load_state_dict(state.optimizer)
        if self.average and state.average:
            self.average.load_state_dict(state.average)
        self.step = state.step
        self.guard.load_state_dict(state.facts["guard"])
        self.meter.load_state_dict(state.facts["meter"])
        self.spikes.load_state_dict(state.facts["spikes"])
        self.taken, self.attempt = int(state.facts["taken"]), int(state.facts["attempt"])
        run.differentiator.split = int(state.facts["split"])
        self.planned = bool(state.facts["planned"])
        if not self.planned:
            run.learner.give_up_plans()
