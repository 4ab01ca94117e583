"""What `finitune check` says of a training's configuration: ours, or one of another program.

Everything at once: what the file says that cannot be, what excludes each other, what has no effect, what LyCORIS would
make of it, which modules get an adapter, what is wrong with the pictures by their headers, how long the run is, and
what it will write. The modules are counted on a model without its tensors: headers and shapes are enough.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from finitune.adapters.lokr import split_dimension
from finitune.config.conflicts import NO_EFFECT_CODE, find_config_conflicts
from finitune.config.lycoris import check_lycoris_preset, collect_lycoris_options, find_lycoris_faults
from finitune.config.schema import TrainConfig
from finitune.errors import FileError, FinituneError
from finitune.importers.recognise import is_file
from finitune.models import SHIPPED_MODELS
from finitune.models.loaded import find_loaded_class
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
    get_default_picture_size,
    resolve_model_path,
)
from finitune.verbs.train import EFFECTIVE_CONFIG_NAME, RUN_PAGE_NAME
from finitune.verbs.train.checks import check_train_options, explain_model_errors
from finitune.verbs.train.export import build_preview_settings
from finitune.verbs.train.prepare import build_model_choice, list_adapted_components

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
        path = resolve_model_path(choice.model)
        if not path.exists():
            message = f"{choice.model}: no such model, folder or file"
            raise FileError(message, code="MODEL-NOT-FOUND", subject=choice.model)
        loaded = find_loaded_class(path)
        family = loaded.family
        roots = loaded.build_on_meta(path, choice.files, list_adapted_components(family, config))
    sites = choose_sites(roots, family, config.network)
    report.findings.extend(sites.findings)
    report.tables.append(sites.table())
    report.figures["sites"] = len(sites.chosen)
    check_kernel_options(config, sites, report)
    check_lokr_factor(config, sites, report)
    if preset is not None:
        resolver = Resolver.of_model(family)
        others = (site.partition(".") for site in sites.left_out)
        names = [one.original for one in sites.chosen]
        names += [resolver.native_name(component, name) or name for component, _, name in others]
        report.findings += check_lycoris_preset(preset, names, family)


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
