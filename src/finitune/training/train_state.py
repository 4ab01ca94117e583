"""Everything that a run consists of, and its state as it is saved and taken up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from finitune.adapters import AdapterSet
from finitune.config.schema import TrainConfig
from finitune.datasets.batch_schedule import BatchSchedule
from finitune.datasets.items import MicroBatch, TrainingBatch
from finitune.training.adapted_model import AdaptedModel
from finitune.training.checkpoint import RunState, restore_random_states
from finitune.training.guard import TrainingGuard
from finitune.training.manifest import TrainingManifest
from finitune.training.measurements import HeldOutValidation
from finitune.training.optimizers import Ema, OptimizerHandle
from finitune.training.ranks import ProcessRanks
from finitune.training.run_folder import RunFolder
from finitune.training.step import GradientAccumulator
from finitune.training.telemetry import NoTrainingDetector, RunningLoss, SpikeDetector


class MicroBatchLoader(Protocol):
    """Makes tensors of a micro-batch, without the examples that are named; None where nothing is left of it."""

    def __call__(self, micro: MicroBatch, excluded: frozenset[str] = frozenset()) -> TrainingBatch | None: ...


@dataclass(frozen=True)
class RunHooks:
    """What a run leaves to others: to write an adapter file (and check it), to draw previews, to know when to stop.

    `export(adapter, path, facts)` returns the files by spelling; `preview(step)` the pictures. `stop` is asked after
    each step.
    """

    export: Callable[[AdapterSet, Path, Mapping[str, object]], Mapping[str, Path]]
    preview: Callable[[int], tuple[Path, ...]] | None = None
    stop: Callable[[], bool] = bool


@dataclass
class TrainingRun:
    """A training that is ready to go."""

    config: TrainConfig
    learner: AdaptedModel
    differentiator: GradientAccumulator
    make_optimizer: Callable[[], OptimizerHandle]
    rate_of: Callable[[int], float]
    course: BatchSchedule
    load: MicroBatchLoader
    folder: RunFolder
    manifest: TrainingManifest
    total_steps: int
    examples: int
    hooks: RunHooks
    ranks: ProcessRanks = field(default_factory=ProcessRanks)
    validation: HeldOutValidation | None = None
    load_held: MicroBatchLoader | None = None
    base_nonfinite: Callable[[], str] = str


@dataclass
class TrainState:
    """What changes while a run runs; `taken` counts the steps that reached the adapter."""

    optimizer: OptimizerHandle
    guard: TrainingGuard
    meter: RunningLoss
    spikes: SpikeDetector
    silence: NoTrainingDetector
    average: Ema | None
    step: int = 0
    taken: int = 0
    attempt: int = 0
    planned: bool = True

    @classmethod
    def create(cls, run: TrainingRun) -> TrainState:
        decay = run.config.optimizer.ema_decay
        named = run.learner.named_parameters()
        return cls(
            optimizer=run.make_optimizer(),
            guard=TrainingGuard(run.config.guard, run.examples),
            meter=RunningLoss(),
            spikes=SpikeDetector(run.config.guard.spike_zscore),
            silence=NoTrainingDetector(dict(named)),
            average=Ema(named, decay) if decay else None,
        )

    def facts(self, run: TrainingRun) -> dict[str, Any]:
        return {
            "guard": self.guard.state_dict(),
            "meter": self.meter.state_dict(),
            "spikes": self.spikes.state_dict(),
            "taken": self.taken,
            "attempt": self.attempt,
            "planned": self.planned,
            "split": run.differentiator.split,
        }

    def state(self, run: TrainingRun) -> RunState:
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

    def load(self, run: TrainingRun, state: RunState) -> None:
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
