"""From a configuration to a run that is ready to go: the cheapest checks first, the model after the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finitune.config.conflicts import conflicts
from finitune.config.conflicts_run import previews_wanted
from finitune.config.datasets import flattened
from finitune.config.schema import TrainConfig
from finitune.errors import UsageError
from finitune.journeys.model import ModelChoice, default_size, display_name, load_model
from finitune.journeys.train_checks import device_of, held, look_at_options, model_at_fault
from finitune.journeys.train_files import PREVIEWS, Exporter, Preview, preview_pictures
from finitune.journeys.train_run import Outside, course_of, encoders_of, run_of, shelf_of
from finitune.progress import Progress, Silent
from finitune.report import Level, Report

if TYPE_CHECKING:
    from torch import nn

    from finitune.adapters import SiteAdapter
    from finitune.datasets.buckets import Placed
    from finitune.datasets.folders import Scan
    from finitune.datasets.items import Example
    from finitune.generation.settings import Settings
    from finitune.models.anima.load import AnimaParts
    from finitune.precision.plan import PrecisionPlan
    from finitune.training.learner import Learner
    from finitune.training.run import Run
    from finitune.training.sites import Choice


@dataclass(frozen=True)
class Data:
    """The pictures of a run: those to learn from and those kept out, each placed in its bucket."""

    scan: Scan
    learned: Placed
    kept_out: Placed | None
    pictures: tuple[Settings, ...]


@dataclass
class Prepared:
    """A prepared run, with what its report needs."""

    run: Run
    data: Data
    choice: Choice
    exporter: Exporter
    precision: str


class Stopped(Exception):
    """The preparation ended early: with errors in the report, or because no more was asked for."""


def choice_of(config: TrainConfig) -> ModelChoice:
    """The base model of a configuration, as other verbs name it."""
    model = config.model
    return ModelChoice(
        model=model.pretrained_model_name_or_path,
        qwen3=model.qwen3,
        vae=model.vae,
        tokenizers=model.tokenizers,
        device=model.device,
    )


def stop_on_errors(report: Report) -> None:
    """Raise Stopped where the report holds an error."""
    if report.exit_code:
        raise Stopped


def look_at_data(config: TrainConfig, report: Report, progress: Progress) -> Data:
    """Scan the folders and place every picture; all faults of the data are in the report together."""
    from finitune.datasets.buckets import bucket_table, place_all
    from finitune.datasets.folders import scan, split, summary, verify_pictures

    report.findings.extend(conflicts(config))
    stop_on_errors(report)
    report.findings.extend(look_at_options(config))
    stop_on_errors(report)
    pictures = preview_pictures(config.preview, default_size(choice_of(config)))
    datasets = flattened(config)
    found = scan(datasets, progress)
    report.findings.extend(found.findings)
    stop_on_errors(report)
    learned: list[Example] = []
    held: list[Example] = []
    for options, examples in zip(datasets, found.examples, strict=True):
        seed = config.training.seed if options.validation_seed is None else options.validation_seed
        kept, out = split(examples, options.validation_split, seed)
        learned += kept
        held += out
    report.findings.extend(verify_pictures([*learned, *held], progress))
    placed = place_all(learned, datasets, config.training.train_batch_size)
    report.findings.extend(placed.findings)
    report.tables += [summary(found), bucket_table(placed, datasets, config.training.train_batch_size)]
    report.figures.update(pictures=len(placed.examples), held_out=len(held))
    stop_on_errors(report)
    return Data(found, placed, still(held, config) if held else None, pictures)


def still(held: list[Example], config: TrainConfig) -> Placed:
    """Pictures kept out, as they are measured on: unvaried."""
    from finitune.datasets.buckets import place_all
    from finitune.datasets.course import unvaried

    limit = config.validation.max_validation_steps or len(held)
    return place_all([unvaried(one) for one in held[:limit]], flattened(config), config.training.train_batch_size)


def roots_of(parts: AnimaParts, config: TrainConfig) -> dict[str, nn.Module]:
    """The components that get adapters, by name."""
    wanted = {
        "transformer": True,
        "text_conditioner": config.network.train_llm_adapter,
        "text_encoder": config.network.train_text_encoder,
    }
    return {name: getattr(parts, name) for name, on in wanted.items() if on}


def choose_training_precision(config: TrainConfig, device: str, report: Report) -> str:
    """The precision asked for, or the one for this machine, with its reason in the report."""
    asked = config.model.precision
    if asked != "auto":
        return asked
    if config.model.plan:
        chosen, reason = "planned-half", "a plan is named"
    elif device == "cpu":
        chosen, reason = "fp32", "a CPU has no faster one that is as accurate"
    else:
        from finitune.device.hardware import advise, read_facts

        advice = advise(read_facts(int(device.partition(":")[2] or 0)))
        chosen = "current-half" if advice.compute == "planned-half" else advice.compute
        reason = "; ".join(advice.reasons)
        if chosen == "current-half":
            reason += "; measured scales need no plan"
    report.add(Level.NOTE, "PRECISION-CHOSEN", device, f"{chosen}: {reason}")
    return chosen


def plan_of(config: TrainConfig, parts: AnimaParts, precision: str, report: Report) -> PrecisionPlan | None:
    """The plan to train with, named or shipped; raises UsageError (PLAN-MISSING) where there is none."""
    from finitune.journeys.model import SHIPPED, default_plan
    from finitune.models.pico import plan_file
    from finitune.precision.plan import PrecisionPlan

    if precision != "planned-half":
        return None
    choice = choice_of(config)
    own = default_plan(choice)
    path = config.model.plan or (plan_file() if choice.model in SHIPPED else own)
    if not path.exists():
        raise UsageError(
            f"planned-half needs a plan of {display_name(choice)}",
            code="PLAN-MISSING",
            subject="model.plan",
            remedy=f"finitune plan {choice.typed()} --out {own}; or precision = 'current-half', which needs none.",
        )
    plan = PrecisionPlan.load(path)
    plan.check_fingerprint(parts.fingerprint, str(path))
    report.add(Level.NOTE, "PLAN-LOADED", path.name, plan.calibration)
    return plan


@contextmanager
def learning(
    parts: AnimaParts,
    config: TrainConfig,
    adapters: dict[str, dict[str, SiteAdapter]],
    precision: str,
    plan: PrecisionPlan | None,
) -> Iterator[Learner]:
    """The model with adapters by component, computing in its precision; as it was at the end."""
    from finitune.models.anima.encode import AnimaDenoiser
    from finitune.precision.plan import ComponentPlan
    from finitune.training import arithmetic
    from finitune.training.learner import Learner, attached_to

    components = ("text_encoder", "text_conditioner", "transformer")
    with ExitStack() as stack:
        precisions: dict[str, arithmetic.InPrecision] = {}
        for name in components:
            root = getattr(parts, name).requires_grad_(False)
            if name in adapters and config.training.gradient_checkpointing:
                arithmetic.checkpoint(root)
            own = (plan.components.get(name) or ComponentPlan()) if plan else None
            attends = name != "text_encoder"
            used = precision if name == "transformer" or name in adapters else "fp32"
            in_force = arithmetic.in_training_precision(root, used, own, attends=attends)
            precisions[name] = stack.enter_context(in_force)
        modules = {name: one.module for name, one in precisions.items()}
        attached = dict(attached_to(modules, adapters, config.network))
        for one in attached.values():
            stack.enter_context(one)
        settle(modules["transformer"], config, precision)
        yield Learner(AnimaDenoiser(**{name: modules[name] for name in components}), attached, precisions)


def settle(transformer: nn.Module, config: TrainConfig, precision: str) -> None:
    """How the frozen denoiser is held and run: a narrower storage, blocks in main memory, compiled blocks."""
    import torch

    from finitune.training import arithmetic

    storage = config.model.storage
    if storage != "auto" and arithmetic.STORAGE[storage] != arithmetic.COMPUTE[precision]:
        arithmetic.store_narrow(transformer, storage, arithmetic.COMPUTE[precision])
    if config.training.offload_blocks:
        arithmetic.offload(transformer, torch.device(device_of(config)))
    if config.training.torch_compile:
        arithmetic.compile_blocks(transformer)


def starting_adapters(parts: AnimaParts, config: TrainConfig, choice: Choice) -> dict[str, dict[str, SiteAdapter]]:
    """New adapters, or those of network_weights."""
    from finitune.merging.adapterfile import Model, open_adapter
    from finitune.models.anima import ANIMA
    from finitune.training.learner import new_adapters, started_from

    fresh = new_adapters(roots_of(parts, config), choice, config.network, config.training.seed)
    if config.network.network_weights is None:
        return fresh
    source = open_adapter(config.network.network_weights, Report("train"), Model.loaded(ANIMA, parts))
    return started_from(fresh, source.reading.adapter)


@contextmanager
def prepared(
    config: TrainConfig,
    report: Report,
    progress: Progress | None = None,
    *,
    explain: bool = False,
    stop: Callable[[], bool] = bool,
) -> Iterator[Prepared]:
    """The run of a configuration, its folder locked and its caches made.

    Raises Stopped where the report holds errors, or, to `explain`, when the sites are in it.
    """
    from finitune.models.anima import ANIMA
    from finitune.training.folder import RunFolder
    from finitune.training.ranks import Ranks
    from finitune.training.run import Hooks
    from finitune.training.sites import choose_sites

    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks.joined(device_of(config)))
        progress = progress if progress and ranks.main else Silent()
        data = look_at_data(config, report, progress)
        folder = RunFolder(config.saving.output_dir)
        if ranks.main and not explain:
            stack.enter_context(held(folder))
        choice = replace(choice_of(config), device=str(ranks.device))
        with model_at_fault(choice):
            parts = load_model(choice)
        report.findings.extend(parts.notes)
        sites = choose_sites(roots_of(parts, config), ANIMA, config.network)
        report.findings.extend(sites.findings)
        report.tables.append(sites.table())
        report.figures["sites"] = len(sites.chosen)
        stop_on_errors(report)
        precision = ranks.of_main(choose_training_precision(config, str(ranks.device), report))
        report.figures["precision"] = precision
        if explain:
            raise Stopped
        plan = plan_of(config, parts, precision, report)
        encoders = encoders_of(config, parts)
        adapters = starting_adapters(parts, config, sites)
        shelf, kept = (
            placed and shelf_of(config, encoders, course_of(config, placed, ranks.world), ranks, report, progress)
            for placed in (data.learned, data.kept_out)
        )
        assert shelf is not None  # look_at_data has found pictures
        learner = stack.enter_context(learning(parts, config, adapters, precision, plan))
        exporter = Exporter(config, parts.fingerprint, display_name(choice))
        wanted = data.pictures if previews_wanted(config) else ()
        preview = Preview(parts, learner, wanted, folder.path / PREVIEWS) if wanted else None
        hooks = Hooks(exporter, preview, stop)
        run = run_of(config, Outside(learner, sites, shelf, kept, folder, ranks, hooks))
        yield Prepared(run, data, sites, exporter, precision)
