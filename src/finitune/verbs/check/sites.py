"""Which modules a configuration adapts, counted on a model without its tensors: headers and shapes are enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from finitune.config.config_rule import NO_EFFECT_CODE
from finitune.config.lycoris_preset import check_lycoris_preset
from finitune.config.schema import TrainConfig
from finitune.errors import FileError, UsageError
from finitune.report import Level, Report
from finitune.verbs.check.request import Request

if TYPE_CHECKING:
    from torch import nn

    from finitune.models.anima.configs import ComponentConfig
    from finitune.models.spec import ModelSpec
    from finitune.training.sites import SiteSelection
    from finitune.verbs.shared.model import ModelChoice

_KERNEL_ONLY_OPTIONS = ("conv_dim", "conv_alpha", "use_tucker")
"""Options that only convolutions with a kernel read."""


def check_sites(preset: Path | None, config: TrainConfig, request: Request, report: Report) -> None:
    """How many modules get an adapter, and the options that none of them reads; `preset` is a file of LyCORIS's.

    `request.model`, where it is a file or a folder, stands in place of the configuration's. Raises FileError and
    ModelError for a model that is not there or is another one, UsageError (SITES-NONE) where no module is left.
    """
    from finitune.models.anima import ANIMA
    from finitune.training.sites import choose_sites
    from finitune.verbs.shared.model import SHIPPED_MODELS
    from finitune.verbs.train.checks import explain_model_errors
    from finitune.verbs.train.prepare import build_model_choice

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
    from finitune.namings.resolve import Resolver

    resolver = Resolver.of_model(family)
    others = (site.partition(".") for site in sites.left_out)
    return [one.original for one in sites.chosen] + [resolver.native_name(c, name) or name for c, _, name in others]


def build_meta_components(choice: ModelChoice, config: TrainConfig) -> dict[str, nn.Module]:
    """The components that a configuration adapts, on the meta device: by the settings of a folder, or by headers."""
    from finitune.models.anima.components import build_anima_component
    from finitune.models.anima.folders import read_anima_config_file
    from finitune.verbs.shared.model import resolve_model_path

    path, names = resolve_model_path(choice.model), list_adapted_components(config)
    if not path.exists():
        raise FileError(f"{choice.model}: no such model, folder or file", code="MODEL-NOT-FOUND", subject=choice.model)
    if path.is_dir():
        return {
            name: build_anima_component(name, read_anima_config_file(path / name / "config.json")) for name in names
        }
    settings = infer_component_settings(choice)
    return {name: build_anima_component(name, settings[name]) for name in names if name in settings}


def list_adapted_components(config: TrainConfig) -> list[str]:
    """The names of the components that a configuration adapts."""
    from finitune.verbs.train.prepare import select_adapted_components

    named = {name: name for name in ("transformer", "text_conditioner", "text_encoder")}
    return list(select_adapted_components(cast("Any", SimpleNamespace(**named)), config))


def infer_component_settings(choice: ModelChoice) -> dict[str, ComponentConfig]:
    """The settings of the components in the files of a model, by the shapes in their headers; each is looked at."""
    from finitune.files.tensorfile import TensorFile
    from finitune.models.anima.configs import CONFIG_READER_BY_COMPONENT, PUBLISHED_ANIMA_SETTINGS
    from finitune.models.anima.load import KEY_SORTER_BY_ROLE, require_role

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
    given = [name for name in _KERNEL_ONLY_OPTIONS if getattr(config.network, name)]
    for name in given:
        message = f"{name} has no effect: none of the {len(sites.chosen)} modules is a convolution with a kernel"
        report.add(Level.WARNING, NO_EFFECT_CODE, f"network.{name}", message, remedy=f"Leave {name} out.")


def check_lokr_factor(config: TrainConfig, sites: SiteSelection, report: Report) -> None:
    """A note where LoKr's factor divides no side of a module, so that another one is taken there."""
    from finitune.adapters.lokr import split_dimension

    factor = config.network.factor
    if config.network.algorithm != "lokr" or factor < 1:
        return
    taken = [split_dimension(side, factor) for one in sites.chosen for side in one.shape[:2]]
    other = sorted({small for small, large in taken if factor not in (small, large)})
    if other:
        message = f"factor = {factor} does not divide every side: there {', '.join(map(str, other))} is taken"
        report.add(Level.NOTE, "LOKR-FACTOR", "network.factor", message, factor=factor, taken=other)
