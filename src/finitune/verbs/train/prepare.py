"""From a configuration to a run that is ready to go: the cheapest checks first, the model after the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from finitune.adapters import SiteAdapter
from finitune.config.conflicts import find_config_conflicts
from finitune.config.datasets import resolve_datasets
from finitune.config.schema import TrainConfig
from finitune.datasets.batch_schedule import disable_augmentation
from finitune.datasets.buckets import BucketPlacements, build_bucket_table, place_examples
from finitune.datasets.dataset_scan import (
    DatasetScan,
    build_dataset_summary,
    scan_datasets,
    split_held_out,
    verify_pictures,
)
from finitune.datasets.items import TrainingExample
from finitune.errors import UsageError
from finitune.generation.settings import PictureSettings
from finitune.machine.hardware import advise, read_device_facts
from finitune.merging.adapterfile import open_adapter
from finitune.merging.pairing import TargetModel
from finitune.models import SHIPPED_MODELS
from finitune.models.loaded import LoadedModel
from finitune.models.spec import ModelSpec
from finitune.namings.write import require_spellable
from finitune.precision.plan import ComponentPlan, PrecisionPlan
from finitune.progress import Progress, SilentProgress
from finitune.report import Level, Report
from finitune.training import compute_precision
from finitune.training.adapted_model import (
    AdaptedModel,
    attach_training_adapters,
    make_training_adapters,
    match_initial_adapter,
)
from finitune.training.ranks import ProcessRanks
from finitune.training.run_folder import RunFolder
from finitune.training.sites import SiteSelection, choose_sites
from finitune.training.train_state import RunHooks, TrainingRun
from finitune.verbs.shared.model import format_model_name, get_default_picture_size, get_default_plan_path, load_model
from finitune.verbs.shared.options import ModelChoice
from finitune.verbs.train.checks import (
    check_train_options,
    choose_training_device,
    explain_model_errors,
    hold_run_folder,
)
from finitune.verbs.train.export import PREVIEW_FOLDER_NAME, AdapterExporter, PreviewDrawer, build_preview_settings
from finitune.verbs.train.inputs import (
    RunInputs,
    build_batch_schedule,
    build_encoded_loader,
    build_run,
    prepare_encoders,
)


@dataclass(frozen=True)
class TrainingPictures:
    """The pictures of a run: those to learn from and those kept out, each placed in its bucket."""

    scan: DatasetScan
    learned: BucketPlacements
    kept_out: BucketPlacements | None
    pictures: tuple[PictureSettings, ...]


@dataclass
class PreparedRun:
    """A prepared run, with what its report needs."""

    run: TrainingRun
    data: TrainingPictures
    choice: SiteSelection
    exporter: AdapterExporter
    precision: str


class TrainingStopped(Exception):
    """The preparation ended early: with errors in the report, or because no more was asked for."""


def build_model_choice(config: TrainConfig) -> ModelChoice:
    """The base model of a configuration, as other verbs name it."""
    model = config.model
    return ModelChoice(
        model=model.pretrained_model_name_or_path,
        qwen3=model.qwen3,
        vae=model.vae,
        tokenizers=model.tokenizers,
        device=model.device,
    )


def stop_on_report_errors(report: Report) -> None:
    """Raise Stopped where the report holds an error."""
    if report.exit_code:
        raise TrainingStopped


def scan_training_data(config: TrainConfig, report: Report, progress: Progress) -> TrainingPictures:
    """Scan the folders and place every picture; all faults of the data are in the report together."""
    report.findings.extend(find_config_conflicts(config))
    stop_on_report_errors(report)
    report.findings.extend(check_train_options(config))
    stop_on_report_errors(report)
    pictures = build_preview_settings(config.preview, get_default_picture_size(build_model_choice(config)))
    datasets = resolve_datasets(config)
    found = scan_datasets(datasets, progress)
    report.findings.extend(found.findings)
    stop_on_report_errors(report)
    learned, held = split_held_out(found, datasets, config.training.seed)
    report.findings.extend(verify_pictures([*learned, *held], progress))
    placed = place_examples(learned, datasets, config.training.train_batch_size)
    report.findings.extend(placed.findings)
    report.tables += [
        build_dataset_summary(found),
        build_bucket_table(placed, datasets, config.training.train_batch_size),
    ]
    report.figures.update(pictures=len(placed.examples), held_out=len(held))
    stop_on_report_errors(report)
    return TrainingPictures(found, placed, place_held_out_pictures(held, config) if held else None, pictures)


def place_held_out_pictures(held: list[TrainingExample], config: TrainConfig) -> BucketPlacements:
    """Pictures kept out, as they are measured on: unvaried."""
    limit = config.validation.max_validation_steps or len(held)
    return place_examples(
        [disable_augmentation(one) for one in held[:limit]], resolve_datasets(config), config.training.train_batch_size
    )


def list_adapted_components(family: ModelSpec, config: TrainConfig) -> list[str]:
    """The components that get adapters, by name."""
    switches = family.adapters.switches
    return [name for name in family.adapters.trained if name not in switches or getattr(config.network, switches[name])]


def select_adapted_modules(parts: LoadedModel, config: TrainConfig) -> dict[str, nn.Module]:
    """The same of a model, {name: module}."""
    return {name: parts.module(name) for name in list_adapted_components(parts.family, config)}


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
        advice = advise(read_device_facts(int(device.partition(":")[2] or 0)))
        chosen = "current-half" if advice.compute == "planned-half" else advice.compute
        reason = "; ".join(advice.reasons)
        if chosen == "current-half":
            reason += "; measured scales need no plan"
    report.add(Level.NOTE, "PRECISION-CHOSEN", device, f"{chosen}: {reason}")
    return chosen


def load_training_plan(config: TrainConfig, parts: LoadedModel, precision: str, report: Report) -> PrecisionPlan | None:
    """The plan to train with, named or shipped; raises UsageError (PLAN-MISSING) where there is none."""
    if precision != "planned-half":
        return None
    choice = build_model_choice(config)
    own = get_default_plan_path(choice)
    shipped = SHIPPED_MODELS.get(choice.model)
    path = config.model.plan or (shipped.plan if shipped else own)
    if not path.exists():
        raise UsageError(
            f"planned-half needs a plan of {format_model_name(choice)}",
            code="PLAN-MISSING",
            subject="model.plan",
            remedy=(
                f"finitune plan {choice.to_command_words()} --out {own}; or precision = 'current-half', which "
                "needs none."
            ),
        )
    plan = PrecisionPlan.load(path)
    plan.check_fingerprint(parts.fingerprint, str(path))
    report.add(Level.NOTE, "PLAN-LOADED", path.name, plan.calibration)
    return plan


@contextmanager
def open_adapted_model(
    parts: LoadedModel,
    config: TrainConfig,
    adapters: dict[str, dict[str, SiteAdapter]],
    precision: str,
    plan: PrecisionPlan | None,
) -> Iterator[AdaptedModel]:
    """The model with adapters by component, computing in its precision; as it was at the end."""
    with ExitStack() as stack:
        precisions: dict[str, compute_precision.PrecisionComponent] = {}
        for one in parts.modules:
            if one.decoder:
                continue
            name, root = one.name, parts.module(one.name).requires_grad_(False)
            if name in adapters and config.training.gradient_checkpointing:
                compute_precision.enable_block_checkpointing(root)
            own = (plan.components.get(name) or ComponentPlan()) if plan else None
            used = precision if name == parts.denoiser or name in adapters else "fp32"
            attend = parts.apply_attention if one.attends else None
            in_force = compute_precision.apply_training_precision(root, used, own, attend=attend)
            precisions[name] = stack.enter_context(in_force)
        modules = {name: one.module for name, one in precisions.items()}
        attached = dict(attach_training_adapters(modules, adapters, config.network))
        for one in attached.values():
            stack.enter_context(one)
        stack.enter_context(configure_frozen_denoiser(modules[parts.denoiser], config, precision))
        yield AdaptedModel(parts.make_denoiser(modules), attached, precisions, parts.denoiser)


@contextmanager
def configure_frozen_denoiser(transformer: nn.Module, config: TrainConfig, precision: str) -> Iterator[None]:
    """How the frozen denoiser is held and run: a narrower storage, blocks in main memory, compiled blocks."""
    storage = config.model.storage
    if (
        storage != "auto"
        and compute_precision.STORAGE_DTYPE_BY_OPTION[storage]
        != compute_precision.COMPUTE_DTYPE_BY_PRECISION[precision]
    ):
        compute_precision.store_narrow(transformer, storage, compute_precision.COMPUTE_DTYPE_BY_PRECISION[precision])
    if config.training.torch_compile:
        for block in compute_precision.find_blocks(transformer):
            block.compile()
    with ExitStack() as stack:
        if count := config.training.offload_blocks:
            device = torch.device(choose_training_device(config))
            stack.enter_context(compute_precision.offload_blocks(transformer, count, device))
        yield


def make_starting_adapters(
    parts: LoadedModel, config: TrainConfig, choice: SiteSelection
) -> dict[str, dict[str, SiteAdapter]]:
    """New adapters, or those of network_weights."""
    fresh = make_training_adapters(select_adapted_modules(parts, config), choice, config.network, config.training.seed)
    for spelling in config.saving.save_as:  # not found out at the end of a training
        for component, sites in fresh.items():
            require_spellable({f"{component}.{module}": one for module, one in sites.items()}, spelling)
    if config.network.network_weights is None:
        return fresh
    source = open_adapter(config.network.network_weights, Report("train"), TargetModel.loaded(parts.family, parts))
    return match_initial_adapter(fresh, source.reading.adapter)


@contextmanager
def open_prepared_run(
    config: TrainConfig,
    report: Report,
    progress: Progress | None = None,
    *,
    explain: bool = False,
    stop: Callable[[], bool] = bool,
) -> Iterator[PreparedRun]:
    """The run of a configuration, its folder locked and its caches made.

    Raises Stopped where the report holds errors, or, to `explain`, when the sites are in it.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(ProcessRanks.open_process_group(choose_training_device(config)))
        progress = progress if progress and ranks.main else SilentProgress()
        data = scan_training_data(config, report, progress)
        folder = RunFolder(config.saving.output_dir)
        if ranks.main and not explain:
            stack.enter_context(hold_run_folder(folder))
        choice = replace(build_model_choice(config), device=str(ranks.device))
        with explain_model_errors(choice):
            parts = load_model(choice)
        report.findings.extend(parts.notes)
        sites = choose_sites(select_adapted_modules(parts, config), parts.family, config.network)
        report.findings.extend(sites.findings)
        report.tables.append(sites.table())
        report.figures["sites"] = len(sites.chosen)
        stop_on_report_errors(report)
        precision = ranks.broadcast_from_main(choose_training_precision(config, str(ranks.device), report))
        report.figures["precision"] = precision
        if explain:
            raise TrainingStopped
        plan = load_training_plan(config, parts, precision, report)
        encoders = prepare_encoders(parts, config, list_adapted_components(parts.family, config))
        adapters = make_starting_adapters(parts, config, sites)
        shelf, kept = (
            placed
            and build_encoded_loader(
                config, encoders, build_batch_schedule(config, placed, ranks.world), ranks, report, progress
            )
            for placed in (data.learned, data.kept_out)
        )
        assert shelf is not None  # look_at_data has found pictures
        learner = stack.enter_context(open_adapted_model(parts, config, adapters, precision, plan))
        exporter = AdapterExporter(config, parts.fingerprint, format_model_name(choice), parts.family)
        wanted = data.pictures if config.preview.is_scheduled else ()
        preview = PreviewDrawer(parts, learner, wanted, folder.path / PREVIEW_FOLDER_NAME) if wanted else None
        hooks = RunHooks(exporter, preview, stop)
        run = build_run(config, RunInputs(parts, learner, sites, shelf, kept, folder, ranks, hooks))
        yield PreparedRun(run, data, sites, exporter, precision)
