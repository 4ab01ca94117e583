"""finitune verify-resume: the proof that a run which was stopped and resumed ends with the bits of one that was not.

Both runs are `finitune train` itself, to the last line. The second one is stopped as Ctrl-C stops it, ends, and begins
again from its folder: model, adapters, optimiser and caches are made anew. What is compared is what both leave: their
last states.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finitune.config.read import read_train_config
from finitune.config.schema import TrainConfig
from finitune.errors import FinituneError, UsageError
from finitune.progress import Progress, SilentProgress
from finitune.report import Level, Report
from finitune.training import events
from finitune.training.checkpoint import RunState, encode_state_tree, load_run_state
from finitune.training.history import TrainingHistory
from finitune.training.ranks import ProcessRanks
from finitune.verbs.shared.model import choose_device
from finitune.verbs.shared.options import OutPath
from finitune.verbs.train import iter_train_events
from finitune.verbs.train.prepare import TrainingStopped

_PROGRESS_STAGE = "steps"
_COMPARED_STATE_PARTS = ("adapter", "optimizer", "average", "facts")
"""The parts of a state that must be the same; the generators that programs share are reseeded in each step."""
_MAX_LISTED_NAMES = 5


@dataclass(frozen=True)
class Request:
    """The training to verify, how many steps of it, and where."""

    config: Path
    """A training configuration of ours."""
    _: KW_ONLY
    steps: int = 6
    """How many steps to take; the second run is stopped and resumed in the middle."""
    out: OutPath = None
    """A folder for both runs; a temporary one if left out."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over: where it began, and its last state."""

    first_step: int
    state: Path


@dataclass(frozen=True)
class StateDifference:
    """What two states differ in: how many tensors there are, what differs by name, and the largest difference."""

    compared: int
    names: tuple[str, ...]
    largest: float


def run(request: Request, progress: Progress | None = None) -> Report:
    """Run, stop and resume; an error names the first tensor that differs."""
    report = Report("verify-resume")
    try:
        require_resume_steps(request.steps)
        loaded = read_train_config(request.config)
        report.findings.extend(loaded.findings)
        with (
            open_proof_folder(request.out) as own,  # the outer one: it stays until all processes have read both runs
            ProcessRanks.open_process_group(choose_device(loaded.config.model.device)) as ranks,
        ):
            shown = progress if progress and ranks.main else SilentProgress()
            ResumeProof(loaded.config, request.steps, ranks.broadcast_from_main(own), shown).run(report)
    except TrainingStopped:
        pass
    except FinituneError as error:
        return report.fail(error)
    return report


def require_resume_steps(steps: int) -> None:
    """Raise UsageError (RESUME-STEPS-TOO-FEW) where there is no step to stop after."""
    if steps < 2:
        raise UsageError(
            f"{steps} steps cannot be stopped in the middle",
            code="RESUME-STEPS-TOO-FEW",
            subject="--steps",
            evidence={"steps": steps},
            remedy="Take 2 or more; with accumulation or several epochs, enough to pass the end of an epoch.",
        )


@contextmanager
def open_proof_folder(out: Path | None) -> Iterator[Path]:
    """The folder of both runs, a temporary one where none is named."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="finitune-verify-resume-") as place:
        yield Path(place)


@dataclass(frozen=True)
class ResumeProof:
    """Two runs of a configuration in `place`."""

    config: TrainConfig
    steps: int
    place: Path
    progress: Progress

    @property
    def middle(self) -> int:
        """The step after which the second run is stopped."""
        return self.steps // 2

    def run(self, report: Report) -> None:
        """Run, stop, resume and compare; raises Stopped where one of the runs fails, with its errors in the report."""
        self.progress.start(_PROGRESS_STAGE, 2 * self.steps)
        whole = self.ended(report, "whole")
        halfway = self.ended(report, "resumed", end=self.middle)
        resumed = self.ended(report, "resumed", resume=halfway.state)
        self.progress.finish(_PROGRESS_STAGE)
        found = compare_states(whole.state, resumed.state)
        if resumed.first_step != self.middle:  # it took all steps again, and proves nothing
            found = replace(found, names=("first step", *found.names))
        report.figures.update(steps=self.steps, resumed_at=resumed.first_step)
        judge_resume(report, found)

    def ended(self, report: Report, name: str, end: int | None = None, resume: Path | None = None) -> FinishedRun:
        """A run in a folder of its own: from the beginning or a state, to its end or until it is stopped."""
        own, history = Report("train"), TrainingHistory()
        config = shorten_train_config(self.config, self.steps, self.place / name, resume)
        try:
            for event in iter_train_events(
                config, own, stop=lambda: bool(history.steps) and history.steps[-1].step == end
            ):
                history.add(event)
                self.progress.advance(_PROGRESS_STAGE, isinstance(event, events.StepTaken))
        finally:
            report.findings += [finding for finding in own.findings if finding.level is Level.ERROR]
            report.figures["precision"] = own.figures.get("precision")
        if report.exit_code or not history.started or not history.finished:
            raise TrainingStopped
        return FinishedRun(history.started.first_step, history.finished.paths["state"])


def shorten_train_config(config: TrainConfig, steps: int, folder: Path, resume: Path | None) -> TrainConfig:
    """The configuration with so many steps in all, into a folder of its own, with the run's caches, and without what
    only shows how the run goes.
    """
    changes: dict[str, dict[str, Any]] = {
        "training": {
            "max_train_steps": steps,
            "max_train_epochs": None,
            "cache_dir": config.training.cache_dir or config.saving.output_dir / "cache",
        },
        "saving": {
            "output_dir": folder,
            "save_every_n_steps": None,
            "save_every_n_epochs": None,
            "save_state": True,
            "resume": resume or "never",
        },
        "preview": {
            "sample_prompts": (),
            "sample_every_n_steps": None,
            "sample_every_n_epochs": None,
            "sample_at_first": False,
        },
        "logging": {"log_with": "none", "report": False},
    }
    sections = {name: getattr(config, name).model_copy(update=own) for name, own in changes.items()}
    nothing_kept_out = {"validation_split": 0.0}
    datasets = tuple(dataset.model_copy(update=nothing_kept_out) for dataset in config.datasets)
    return config.model_copy(update={**sections, "datasets": datasets})


def compare_states(first: Path, second: Path) -> StateDifference:
    """How two states differ, bit for bit."""
    (ours, our_facts), (theirs, their_facts) = (flatten_run_state(load_run_state(path)[0]) for path in (first, second))
    names = [name for name in {**ours, **theirs} if not has_same_bits(ours.get(name), theirs.get(name))]
    largest = max(
        (
            measure_largest_difference(ours[name], theirs[name])
            for name in names
            if {name} <= ours.keys() & theirs.keys()
        ),
        default=0.0,
    )
    names += [name for name in {**our_facts, **their_facts} if our_facts.get(name) != their_facts.get(name)]
    return StateDifference(len(ours), tuple(names), largest)


def flatten_run_state(state: RunState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    parts = {part: encode_state_tree(getattr(state, part), part, tensors) for part in _COMPARED_STATE_PARTS}
    facts = {f"{part}/{key}": value for part, facts in parts.items() for key, value in (facts or {}).items()}
    return tensors, {**facts, "step": state.step}


def has_same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (ours, theirs)))


def measure_largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two numbers; infinite for tensors of different shapes."""
    if ours.shape != theirs.shape:
        return math.inf
    return float((ours.double() - theirs.double()).abs().max())


def judge_resume(report: Report, difference: StateDifference) -> None:
    """Put the figures into the report, and an error where there is a difference."""
    report.figures.update(max_difference=difference.largest, compared_tensors=difference.compared)
    if difference.names:
        report.add(
            Level.ERROR,
            "RESUME-DIFFERS",
            difference.names[0],
            f"the resumed run ended with other bits in {len(difference.names)} places, the first is "
            f"{difference.names[0]}",
            remedy="Computed twice, the same step must give the same bits: try it on the CPU, without torch_compile, "
            "and with another optimiser; then open an issue with this report.",
            differing=len(difference.names),
            first=list(difference.names[:_MAX_LISTED_NAMES]),
            max_difference=difference.largest,
        )
