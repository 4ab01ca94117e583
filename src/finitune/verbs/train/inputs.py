"""The last part of preparing a run: pictures and captions encoded, and the run over them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.config.datasets import resolve_datasets
from finitune.config.schema import TrainConfig
from finitune.datasets.batch_schedule import BatchSchedule
from finitune.datasets.buckets import BucketPlacements
from finitune.datasets.cache import EncoderCaches
from finitune.datasets.items import MicroBatch, TrainingBatch, derive_seed
from finitune.datasets.loader import BatchLoader, LoaderOptions
from finitune.models.loaded import FamilyEncoders, LoadedModel
from finitune.models.spec import ModelSpec
from finitune.progress import Progress
from finitune.report import Report
from finitune.training.adapted_model import AdaptedModel
from finitune.training.events import FindingRaised, PreviewsDrawn, TrainingEvent, TrialStepMeasured
from finitune.training.guard import find_first_nonfinite, make_preview_failed_finding
from finitune.training.manifest import TrainingManifest
from finitune.training.measurements import HeldOutValidation, measure_trial_step
from finitune.training.objective import OBJECTIVE_BY_NAME
from finitune.training.optimizers import OptimizerHandle, build_param_groups, make_optimizer, make_rate_factor
from finitune.training.ranks import ProcessRanks
from finitune.training.run_folder import RunFolder
from finitune.training.sites import SiteSelection
from finitune.training.step import GradientAccumulator
from finitune.training.train_state import RunHooks, TrainingRun

_STATE_SIZE_FACTOR = 3
"""A state holds the adapter, and most optimisers two numbers for each of its own."""


@dataclass(frozen=True)
class ScheduledLoader:
    """A loader over a course, without the pictures that its encoders could not stand."""

    loader: BatchLoader
    course: BatchSchedule
    excluded: frozenset[str]

    def load(self, micro: MicroBatch, excluded: frozenset[str] = frozenset()) -> TrainingBatch | None:
        """The tensors of a micro-batch."""
        return self.loader.load(micro, self.excluded | excluded)


def build_batch_schedule(config: TrainConfig, placed: BucketPlacements, world: int = 1) -> BatchSchedule:
    """The order in which placed pictures are shown."""
    training = config.training
    course = BatchSchedule(
        examples=placed.examples,
        placements=placed.placements,
        datasets=resolve_datasets(config),
        seed=training.seed,
        batch_size=training.train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        world=world,
    )
    return replace(course, steps=training.count_steps(course.steps_per_epoch))


def prepare_encoders(parts: LoadedModel, config: TrainConfig, trained: Collection[str]) -> FamilyEncoders:
    """The encoders, held and computed in fp32: each picture and caption goes through them once."""
    parts.prepare_for_encoding()
    limits = {name: getattr(config.training, option) for name, (_, option) in parts.tokenizers.items()}
    return parts.make_encoders(trained, limits)


def build_encoded_loader(
    config: TrainConfig,
    encoders: FamilyEncoders,
    course: BatchSchedule,
    ranks: ProcessRanks,
    report: Report,
    progress: Progress,
) -> ScheduledLoader:
    """Encode all pictures and captions of a course that no cache has yet; what came of it is in the report."""
    options = LoaderOptions(
        prior_loss_weight=config.objective.prior_loss_weight,
        masked_loss=config.objective.masked_loss,
        vae_batch_size=config.training.vae_batch_size,
        quarantine=config.guard.quarantine,
    )
    folder = config.training.cache_dir or config.saving.output_dir / "cache"
    loader = BatchLoader(course, encoders, EncoderCaches.beside(folder, encoders), options, ranks.device)
    made = ranks.gathered(loader.prepare(course.steps, progress, ranks.rank, ranks.world))  # all wait for all
    sum_process_figures(report, [one.figures for one in made])
    report.findings.extend(finding for one in made for finding in one.findings)
    return ScheduledLoader(loader, course, frozenset(name for one in made for name in one.excluded.reasons))


def sum_process_figures(report: Report, figures: list[dict[str, Any]]) -> None:
    """Add the counts of all processes, and the time of the slowest, to what the report already has."""
    for name in figures[0]:
        together = max if name.endswith("_seconds") else sum
        before: Any = report.figures.get(name, 0)
        report.figures[name] = before + together(one[name] for one in figures)


def build_validation(config: TrainConfig, course: BatchSchedule) -> HeldOutValidation:
    """The measurement on pictures kept out: each of them once, with a place of its own for its noise."""
    batches: list[MicroBatch] = []
    first = 0
    for step in course.epoch(0):
        for micro in step.micro_batches:
            batches.append(replace(micro, first=first))
            first += len(micro)
    return HeldOutValidation(batches, config.validation.validation_sigmas, config.training.seed)


@dataclass(frozen=True)
class RunInputs:
    """What a run is given besides its configuration."""

    parts: LoadedModel
    learner: AdaptedModel
    choice: SiteSelection
    shelf: ScheduledLoader
    held: ScheduledLoader | None
    folder: RunFolder
    ranks: ProcessRanks
    hooks: RunHooks


def build_run(config: TrainConfig, outside: RunInputs) -> TrainingRun:
    """The run: optimiser, schedule, objective and manifest over what was prepared."""
    learner, course = outside.learner, outside.shelf.course
    objective = OBJECTIVE_BY_NAME[outside.parts.objective](config.objective, outside.parts.patch)
    held = outside.held
    make_optimizer = make_optimizer_factory(config, learner, outside.choice, outside.parts.family)
    adapter_bytes = sum(4 * parameter.numel() for _, parameter in learner.named_parameters())
    written_at_once = len(config.saving.save_as) + (_STATE_SIZE_FACTOR if config.saving.save_state else 0)
    outside.folder.require_space(adapter_bytes * written_at_once)
    return TrainingRun(
        config=config,
        learner=learner,
        differentiator=GradientAccumulator(learner, objective, outside.ranks, config.training.seed),
        make_optimizer=make_optimizer,
        rate_of=make_rate_factor(config.optimizer, course.steps),
        course=course,
        load=outside.shelf.load,
        folder=outside.folder,
        manifest=build_run_manifest(config, outside, make_optimizer()),
        total_steps=course.steps,
        examples=len(course.examples),
        hooks=outside.hooks,
        ranks=outside.ranks,
        validation=build_validation(config, held.course) if held else None,
        load_held=held.load if held else outside.shelf.load,
        base_nonfinite=lambda: find_nonfinite_weight(learner),
    )


def find_nonfinite_weight(learner: AdaptedModel) -> str:
    """The first weight of the frozen model that is not finite, '' where all are."""
    named = (
        (f"{component}.{name}", parameter)
        for component, one in learner.precisions.items()
        for name, parameter in one.module.named_parameters()
        if not parameter.requires_grad
    )
    return str(find_first_nonfinite(named) or "")


def make_optimizer_factory(
    config: TrainConfig, learner: AdaptedModel, choice: SiteSelection, family: ModelSpec
) -> Callable[[], OptimizerHandle]:
    """Makes the optimiser anew: over all that is trained, each at the rate of its pattern or component."""
    rates = config.optimizer
    by_component = {component: getattr(rates, option) for component, option in family.adapters.rates.items()}
    own = {one.site: by_component.get(one.component) if one.rate is None else one.rate for one in choice.chosen}

    def make() -> OptimizerHandle:
        named = learner.named_parameters()
        rate_of = {name: own[name.rpartition(".")[0]] for name, _ in named}
        return make_optimizer(rates, build_param_groups(named, rates, rate_of.__getitem__, config.network.algorithm))

    return make


def build_run_manifest(config: TrainConfig, outside: RunInputs, optimizer: OptimizerHandle) -> TrainingManifest:
    """What a saved state has to belong to."""
    apart = {"general": True, "datasets": True, "saving": {"resume"}}  # how a run is gone on with is no part of it
    dumped = config.model_dump(mode="json", exclude=apart)
    examples = outside.shelf.course.examples
    data = [(one.name, one.caption, one.repeats, one.size, one.path.stat().st_size) for one in examples]
    return TrainingManifest(
        algorithm=config.network.algorithm,
        shapes={name: tuple(parameter.shape) for name, parameter in outside.learner.named_parameters()},
        optimizer=optimizer.name,
        optimizer_args=optimizer.arguments,
        sites={one.site: {"rank": one.rank, "alpha": one.alpha} for one in outside.choice.chosen},
        config={
            "processes": outside.ranks.world,
            **{f"{section}.{name}": value for section, options in dumped.items() for name, value in options.items()},
        },
        dataset=f"{derive_seed(data):016x}",
    )


def estimate_seconds_left(run: TrainingRun, step: int, measurement: TrialStepMeasured) -> float:
    """How long the run takes from a step on, by one measured step, save and preview."""
    steps, saving, preview = run.total_steps - step, run.config.saving, run.config.preview
    saves = 1 + count_due_times(run, steps, saving.save_every_n_steps, saving.save_every_n_epochs)
    previews = count_due_times(run, steps, preview.sample_every_n_steps, preview.sample_every_n_epochs)
    drawing = (measurement.preview_seconds or 0.0) * previews
    return max(steps, 0) * measurement.step_seconds + saves * measurement.save_seconds + drawing


def count_due_times(run: TrainingRun, steps: int, every_steps: int | None, every_epochs: int | None) -> int:
    """How often something happens in so many steps that is due every so many steps or epochs."""
    per_epoch = run.course.steps_per_epoch
    return sum(steps // every for every in (every_steps, every_epochs and every_epochs * per_epoch) if every)


def iter_measurement_events(run: TrainingRun, step: int) -> Iterator[TrainingEvent]:
    """One real step at the largest bucket, a save and a preview, with everything put back; the preview is kept."""
    micros = [micro for one in run.course.epoch(0) for micro in one.micro_batches]
    micros.sort(key=lambda micro: micro.bucket[0] * micro.bucket[1] * len(micro), reverse=True)
    loaded = (run.load(micro) for micro in micros)
    largest = next(batch for batch in loaded if batch)  # of the others every picture is left out
    batches = [largest] * run.config.training.gradient_accumulation_steps
    draw, paths, failed = run.hooks.preview, [], []

    def preview() -> None:
        try:
            paths.extend(draw(step) if draw else ())
        except Exception as error:
            failed.append(FindingRaised(step, make_preview_failed_finding(error)))

    with tempfile.TemporaryDirectory(dir=run.folder.path, prefix=".discarded-measured-") as place:
        target = Path(place) / "adapter.safetensors"
        measurement = measure_trial_step(
            run.differentiator,
            run.make_optimizer,
            batches,
            save=lambda: run.hooks.export(run.learner.adapter(), target, {"step": 0, "epoch": 0, "taken": 0}),
            preview=preview if draw else None,
        )
    yield replace(measurement, left_seconds=estimate_seconds_left(run, step, measurement))
    yield from failed
    if paths:
        yield PreviewsDrawn(step, tuple(paths), measurement.preview_seconds or 0.0)
