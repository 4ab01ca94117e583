"""What `finitune check` says of a training's configuration: ours, or one of another program.

Everything at once: what the file says that cannot be, what excludes each other, what has no effect, what LyCORIS would
make of it, which modules get an adapter, what is wrong with the pictures by their headers, how long the run is, and
what it will write. The modules are counted on a model without its tensors: headers and shapes are enough.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from finitune.adapters.lokr import split_dimension
from finitune.config.conflicts import NO_EFFECT_CODE, find_config_conflicts
from finitune.config.lycoris import check_lycoris_preset, collect_lycoris_options, find_lycoris_faults
from finitune.config.schema import TrainConfig
from finitune.errors import FileError, FinituneError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.importers.recognise import is_file
from finitune.models.anima import ANIMA
from finitune.models.anima.components import build_anima_component
from finitune.models.anima.configs import CONFIG_READER_BY_COMPONENT, PUBLISHED_ANIMA_SETTINGS, ComponentConfig
from finitune.models.anima.folders import read_anima_config_file
from finitune.models.anima.load import KEY_SORTER_BY_ROLE, require_role
from finitune.models.spec import ModelSpec
from finitune.namings.resolve import Resolver
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table
from finitune.training.checkpoint import iterate_state_folders
from finitune.training.run_folder import RunFolder
from finitune.training.sites import SiteSelection, choose_sites
from finitune.verbs.check.config_file import open_checked_config
from finitune.verbs.check.dataset import check_training_pictures
from finitune.verbs.check.request import UNNAMED_PLACEHOLDER, Request, sort_findings_by_level
from finitune.verbs.shared.model import (
    SHIPPED_MODELS,
    ModelChoice,
    get_default_picture_size,
    resolve_model_path,
)
from finitune.verbs.train import EFFECTIVE_CONFIG_NAME, RUN_PAGE_NAME
from finitune.verbs.train.checks import check_train_options, explain_model_errors
from finitune.verbs.train.export import build_preview_settings
from finitune.verbs.train.prepare import build_model_choice, select_adapted_components

_NO_DATASET_CODES = ("CONFIG-NO-DATASETS", "DATASET-FOLDER-MISSING")
"""Where one of these is told, it is no news that there are no pictures."""
_KERNEL_ONLY_OPTIONS = ("conv_dim", "conv_alpha", "use_tucker")
"""Options that only convolutions with a kernel read."""


def check_config(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a configuration file of ours or of a program that `finitune train` imports, and of its data."""
    begin = len(report.findings)
    report.figures["kind"] = "config"
    try:
        opened = open_checked_config(path, request, report)
        given = collect_lycoris_options(opened.lines, opened.text)
        report.findings.extend(find_lycoris_faults(given))
        if opened.config is not None:
            name = given.algorithm and given.preset
            places = (Path(name), path.parent / name) if name else ()
            preset = next((place for place in places if is_file(place)), None)
            check_planned_run(opened.config, preset, request, report, progress)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
    sort_findings_by_level(report, begin)


def check_planned_run(
    config: TrainConfig, preset: Path | None, request: Request, report: Report, progress: Progress
) -> None:
    """What a run of a configuration would meet: conflicts, the model, the pictures; and what it would write."""
    whole = config.model.pretrained_model_name_or_path != UNNAMED_PLACEHOLDER
    found = [one for one in find_config_conflicts(config) if whole or one.subject.startswith("datasets")]
    known = any(one.code in _NO_DATASET_CODES for one in report.findings)
    report.findings += [one for one in found if not (known and one.code == "DATASET-NONE")]
    looks = [partial(check_sites, preset), report_planned_files, check_planned_options] if whole else []
    for look in looks:
        try:
            look(config, request, report)
        except FinituneError as error:
            report.findings.append(Finding.of(error))
    if any(dataset.subsets for dataset in config.datasets):
        check_training_pictures(config, request, report, progress, decode=False)


def check_planned_options(config: TrainConfig, request: Request, report: Report) -> None:
    """What a training looks at before its data: the optimiser, the folders to write to, the prompts of previews."""
    build_preview_settings(config.preview, get_default_picture_size(build_model_choice(config)))
    report.findings.extend(check_train_options(config))


def report_planned_files(config: TrainConfig, request: Request, report: Report) -> None:
    """The files that the run will write, and a warning of those that are there already."""
    saving = config.saving
    folder = RunFolder(saving.output_dir)
    name, step, epoch = saving.output_name, saving.save_every_n_steps, saving.save_every_n_epochs
    places = {
        "adapter": folder.adapter_path(name),
        "adapter by step": step and folder.adapter_path(name, step=step),
        "adapter by epoch": epoch and folder.adapter_path(name, epoch=epoch),
        "state to resume from": saving.save_state and folder.state_path(name),
        "configuration in force": folder.path / EFFECTIVE_CONFIG_NAME,
        "cached latents and texts": config.training.cache_dir or folder.path / "cache",
        "previews": config.preview.is_scheduled and folder.path / "previews",
        "report": config.logging.report and folder.path / RUN_PAGE_NAME,
    }
    table = Table("files that will be written", ("what", "where"), tuple((k, str(v)) for k, v in places.items() if v))
    report.tables.append(table)
    report.figures["files"] = table.as_dicts()
    if (
        saving.resume == "never"
        and folder.path.is_dir()
        and next(iterate_state_folders(folder.path, saving.output_name), None)
    ):
        report.add(
            Level.WARNING,
            "RUN-BEGINS-ANEW",
            str(folder.path),
            "states of an earlier run are here; this one would begin anew and write over them",
            remedy="To go on from them: finitune train CONFIG --resume",
        )


def check_sites(preset: Path | None, config: TrainConfig, request: Request, report: Report) -> None:
    """How many modules get an adapter, and the options that none of them reads; `preset` is a file of LyCORIS's.

    `request.model`, where it is a file or a folder, stands in place of the configuration's. Raises FileError and
    ModelError for a model that is not there or is another one, UsageError (SITES-NONE) where no module is left.
    """
    choice = build_model_choice(config)
    if request.model and (request.model in SHIPPED_MODELS or Path(request.model).exists()):
        choice = replace(choice, model=request.model)
    with explain_model_errors(choice):
        roots = build_meta_components(choice, config)
    sites = choose_sites(roots, ANIMA, config.network)
    report.findings.extend(sites.findings)
    report.tables.append(sites.table())
    report.figures["sites"] = len(sites.chosen)
    check_kernel_options(config, sites, report)
    check_lokr_factor(config, sites, report)
    if preset is not None:
        report.findings += check_lycoris_preset(preset, list_adaptable_names(sites, ANIMA))


def list_adaptable_names(sites: SiteSelection, family: ModelSpec) -> list[str]:
    """The original names of all modules that could have an adapter."""
    resolver = Resolver.of_model(family)
    others = (site.partition(".") for site in sites.left_out)
    return [one.original for one in sites.chosen] + [resolver.native_name(c, name) or name for c, _, name in others]


def build_meta_components(choice: ModelChoice, config: TrainConfig) -> dict[str, nn.Module]:
    """The components that a configuration adapts, on the meta device: by the settings of a folder, or by headers."""
    path = resolve_model_path(choice.model)
    known = {name: name for name in ("transformer", "text_conditioner", "text_encoder")}
    names = select_adapted_components(cast("Any", SimpleNamespace(**known)), config)
    if not path.exists():
        raise FileError(f"{choice.model}: no such model, folder or file", code="MODEL-NOT-FOUND", subject=choice.model)
    if path.is_dir():
        return {
            name: build_anima_component(name, read_anima_config_file(path / name / "config.json")) for name in names
        }
    settings = infer_component_settings(choice)
    return {name: build_anima_component(name, settings[name]) for name in names if name in settings}


def infer_component_settings(choice: ModelChoice) -> dict[str, ComponentConfig]:
    """The settings of the components in the files of a model, by the shapes in their headers; each is looked at."""
    files = {"dit": Path(choice.model), "qwen3": choice.qwen3, "vae": choice.vae}
    settings: dict[str, ComponentConfig] = {}
    for role, path in files.items():
        if path is None:
            message = f"{choice.model} is one file of three: {role} is missing"
            raise UsageError(message, code="MODEL-FILES-MISSING", subject=choice.model)
        file = TensorFile(path)
        require_role(file, role)
        for name, key_of in KEY_SORTER_BY_ROLE[role](file).names.items():
            shapes = {new: file.entries[old].shape for new, old in key_of.items()}
            settings[name] = CONFIG_READER_BY_COMPONENT[name](shapes, PUBLISHED_ANIMA_SETTINGS[name])
    return settings


def check_kernel_options(config: TrainConfig, sites: SiteSelection, report: Report) -> None:
    """A warning of what is for convolutions with a kernel, where no module is one."""
    if any(side > 1 for one in sites.chosen for side in one.shape[2:]):
        return
    for name in _KERNEL_ONLY_OPTIONS:
        if getattr(config.network, name):
            message = f"{name} has no effect: none of the {len(sites.chosen)} modules is a convolution with a kernel"
            report.add(Level.WARNING, NO_EFFECT_CODE, f"network.{name}", message, remedy=f"Leave {name} out.")


def check_lokr_factor(config: TrainConfig, sites: SiteSelection, report: Report) -> None:
    """A note where LoKr's factor divides no side of a module, so that another one is taken there."""
    factor = config.network.factor
    if config.network.algorithm != "lokr" or factor < 1:
        return
    taken = [split_dimension(side, factor) for one in sites.chosen for side in one.shape[:2]]
    other = sorted({small for small, large in taken if factor not in (small, large)})
    if other:
        message = f"factor = {factor} does not divide every side: there {', '.join(map(str, other))} is taken"
        report.add(Level.NOTE, "LOKR-FACTOR", "network.factor", message, factor=factor, taken=other)
