"""The last part of preparing a run: pictures and captions encoded, and the run over them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.config.datasets import flattened
from finitune.config.schema import TrainConfig
from finitune.progress import Progress
from finitune.report import Report

if TYPE_CHECKING:
    from finitune.datasets.buckets import Placed
    from finitune.datasets.course import Course
    from finitune.datasets.items import Batch, MicroBatch
    from finitune.datasets.loader import Loader
    from finitune.models.anima.encode import AnimaEncoders, TextLevel
    from finitune.models.anima.load import AnimaParts
    from finitune.training.events import Event, Measured
    from finitune.training.folder import RunFolder
    from finitune.training.learner import Learner
    from finitune.training.manifest import Manifest
    from finitune.training.optimizers import Trained
    from finitune.training.ranks import Ranks
    from finitune.training.run import Hooks, Run
    from finitune.training.sites import Choice
    from finitune.training.validation import Validation

DEFAULT_STEPS = 1600
STATE_COPIES = 3
"""A state holds the adapter, and most optimisers two numbers for each of its own."""


@dataclass(frozen=True)
class Shelf:
    """A loader over a course, without the pictures that its encoders could not stand."""

    loader: Loader
    course: Course
    excluded: frozenset[str]

    def load(self, micro: MicroBatch, excluded: frozenset[str] = frozenset()) -> Batch | None:
        """The tensors of a micro-batch."""
        return self.loader.load(micro, self.excluded | excluded)


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimiser steps of the whole run."""
    epochs = config.training.max_train_epochs
    return epochs * steps_per_epoch if epochs else config.training.max_train_steps or DEFAULT_STEPS


def course_of(config: TrainConfig, placed: Placed, world: int = 1) -> Course:
    """The order in which placed pictures are shown."""
    from finitune.datasets.course import Course

    training = config.training
    course = Course(
        examples=placed.examples,
        placements=placed.placements,
        datasets=flattened(config),
        seed=training.seed,
        batch_size=training.train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        world=world,
    )
    return replace(course, steps=total_steps(config, course.steps_per_epoch))


def text_level(config: TrainConfig) -> TextLevel:
    """How far captions can be encoded before the run: up to what is trained."""
    if config.network.train_text_encoder:
        return "tokens"
    return "states" if config.network.train_llm_adapter else "context"


def encoders_of(config: TrainConfig, parts: AnimaParts) -> AnimaEncoders:
    """The encoders, held and computed in fp32: each picture and caption goes through them once."""
    from finitune.models.anima.encode import AnimaEncoders

    for module in (parts.vae, parts.text_encoder, parts.text_conditioner):
        module.float().requires_grad_(False)
    training = config.training
    return AnimaEncoders.of(parts, text_level(config), training.qwen3_max_token_length, training.t5_max_token_length)


def shelf_of(
    config: TrainConfig, encoders: AnimaEncoders, course: Course, ranks: Ranks, report: Report, progress: Progress
) -> Shelf:
    """Encode all pictures and captions of a course that no cache has yet; what came of it is in the report."""
    from finitune.datasets.entries import Caches
    from finitune.datasets.loader import Loader, LoaderOptions

    options = LoaderOptions(
        prior_loss_weight=config.objective.prior_loss_weight,
        masked_loss=config.objective.masked_loss,
        vae_batch_size=config.training.vae_batch_size,
        quarantine=config.guard.quarantine,
    )
    folder = config.training.cache_dir or config.saving.output_dir / "cache"
    loader = Loader(course, encoders, Caches.beside(folder, encoders), options, ranks.device)
    made = ranks.gathered(loader.prepare(course.steps, progress, ranks.rank, ranks.world))  # all wait for all
    add_figures(report, [one.figures for one in made])
    report.findings.extend(finding for one in made for finding in one.findings)
    return Shelf(loader, course, frozenset(name for one in made for name in one.excluded.reasons))


def add_figures(report: Report, figures: list[dict[str, Any]]) -> None:
    """Add the counts of all processes, and the time of the slowest, to what the report already has."""
    for name in figures[0]:
        together = max if name.endswith("_seconds") else sum
        before: Any = report.figures.get(name, 0)
        report.figures[name] = before + together(one[name] for one in figures)


def validation_of(config: TrainConfig, course: Course) -> Validation:
    """The measurement on pictures kept out: each of them once, with a place of its own for its noise."""
    from finitune.training.validation import Validation

    batches: list[MicroBatch] = []
    first = 0
    for step in course.epoch(0):
        for micro in step.micro_batches:
            batches.append(replace(micro, first=first))
            first += len(micro)
    return Validation(batches, config.validation.validation_sigmas, config.training.seed)


@dataclass(frozen=True)
class Outside:
    """What a run is given besides its configuration."""

    learner: Learner
    choice: Choice
    shelf: Shelf
    held: Shelf | None
    folder: RunFolder
    ranks: Ranks
    hooks: Hooks


def run_of(config: TrainConfig, outside: Outside) -> Run:
    """The run: optimiser, schedule, objective and manifest over what was prepared."""
    from finitune.training.objective import Objective
    from finitune.training.run import Run
    from finitune.training.schedules import rate_factor
    from finitune.training.step import Differentiator

    learner, course = outside.learner, outside.shelf.course
    objective = Objective(config.objective)
    held = outside.held
    make_optimizer = optimizer_maker(config, learner, outside.choice)
    outside.folder.demand_space(bytes_needed(config, learner))
    return Run(
        config=config,
        learner=learner,
        differentiator=Differentiator(learner, objective, outside.ranks, config.training.seed),
        make_optimizer=make_optimizer,
        rate_of=rate_factor(config.optimizer, course.steps),
        course=course,
        load=outside.shelf.load,
        folder=outside.folder,
        manifest=manifest_of(config, outside, make_optimizer()),
        total_steps=course.steps,
        examples=len(course.examples),
        hooks=outside.hooks,
        ranks=outside.ranks,
        validation=validation_of(config, held.course) if held else None,
        load_held=held.load if held else outside.shelf.load,
        base_nonfinite=lambda: first_bad_weight(learner),
    )


def bytes_needed(config: TrainConfig, learner: Learner) -> int:
    """Bytes of one adapter file and one state, as much as a run writes at once."""
    adapter = sum(4 * parameter.numel() for _, parameter in learner.named_parameters())
    return adapter * (len(config.saving.save_as) + (STATE_COPIES if config.saving.save_state else 0))


def first_bad_weight(learner: Learner) -> str:
    """The first weight of the frozen model that is not finite, '' where all are."""
    from finitune.training.guard import first_nonfinite

    named = (
        (f"{component}.{name}", parameter)
        for component, one in learner.precisions.items()
        for name, parameter in one.module.named_parameters()
        if not parameter.requires_grad
    )
    return str(first_nonfinite(named) or "")


def optimizer_maker(config: TrainConfig, learner: Learner, choice: Choice) -> Callable[[], Trained]:
    """Makes the optimiser anew: over all that is trained, each at the rate of its pattern or component."""
    from finitune.training.optimizers import make_optimizer, param_groups

    rates = config.optimizer
    by_component = {"text_encoder": rates.text_encoder_lr, "text_conditioner": rates.llm_adapter_lr}
    own = {one.site: by_component.get(one.component) if one.rate is None else one.rate for one in choice.chosen}

    def make() -> Trained:
        named = learner.named_parameters()
        rate_of = {name: own[name.rpartition(".")[0]] for name, _ in named}
        return make_optimizer(rates, param_groups(named, rates, rate_of.__getitem__, config.network.algorithm))

    return make


def manifest_of(config: TrainConfig, outside: Outside, optimizer: Trained) -> Manifest:
    """What a saved state has to belong to."""
    from finitune.datasets.items import seed_of
    from finitune.training.manifest import Manifest

    apart = {"general": True, "datasets": True, "saving": {"resume"}}  # how a run is gone on with is no part of it
    dumped = config.model_dump(mode="json", exclude=apart)
    examples = outside.shelf.course.examples
    data = [(one.name, one.caption, one.repeats, one.size, one.path.stat().st_size) for one in examples]
    return Manifest(
        algorithm=config.network.algorithm,
        shapes={name: tuple(parameter.shape) for name, parameter in outside.learner.named_parameters()},
        optimizer=optimizer.name,
        optimizer_args=optimizer.arguments,
        sites={one.site: {"rank": one.rank, "alpha": one.alpha} for one in outside.choice.chosen},
        config={
            "processes": outside.ranks.world,
            **{f"{section}.{name}": value for section, options in dumped.items() for name, value in options.items()},
        },
        dataset=f"{seed_of(data):016x}",
    )


def seconds_left(run: Run, step: int, measurement: Measured) -> float:
    """How long the run takes from a step on, by one measured step, save and preview."""
    steps, saving, preview = run.total_steps - step, run.config.saving, run.config.preview
    saves = 1 + times(run, steps, saving.save_every_n_steps, saving.save_every_n_epochs)
    previews = times(run, steps, preview.sample_every_n_steps, preview.sample_every_n_epochs)
    drawing = (measurement.preview_seconds or 0.0) * previews
    return max(steps, 0) * measurement.step_seconds + saves * measurement.save_seconds + drawing


def times(run: Run, steps: int, every_steps: int | None, every_epochs: int | None) -> int:
    """How often something happens in so many steps that is due every so many steps or epochs."""
    per_epoch = run.course.steps_per_epoch
    return sum(steps // every for every in (every_steps, every_epochs and every_epochs * per_epoch) if every)


def measured(run: Run, step: int) -> Iterator[Event]:
    """One real step at the largest bucket, a save and a preview, with everything put back; the preview is kept."""
    from finitune.training.events import Previewed, Told
    from finitune.training.loop import preview_failed
    from finitune.training.measure import measure

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
            failed.append(Told(step, preview_failed(error)))

    with tempfile.TemporaryDirectory(dir=run.folder.path, prefix=".discarded-measured-") as place:
        target = Path(place) / "adapter.safetensors"
        measurement = measure(
            run.differentiator,
            run.make_optimizer,
            batches,
            save=lambda: run.hooks.export(run.learner.adapter(), target, {"step": 0, "epoch": 0, "taken": 0}),
            preview=preview if draw else None,
        )
    yield replace(measurement, left_seconds=seconds_left(run, step, measurement))
    yield from failed
    if paths:
        yield Previewed(step, tuple(paths), measurement.preview_seconds or 0.0)
