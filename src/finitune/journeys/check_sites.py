"""Which modules a configuration adapts, counted on a model without its tensors: headers and shapes are enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from finitune.config.lycoris_preset import preset_findings
from finitune.config.rule import NO_EFFECT
from finitune.config.schema import TrainConfig
from finitune.errors import FileError, UsageError
from finitune.journeys.checks import Request
from finitune.report import Level, Report

if TYPE_CHECKING:
    from torch import nn

    from finitune.journeys.model import ModelChoice
    from finitune.models.anima.headers import Config
    from finitune.models.spec import ModelSpec
    from finitune.training.sites import Choice

FOR_KERNELS = ("conv_dim", "conv_alpha", "use_tucker")
"""Options that only convolutions with a kernel read."""


def check_sites(preset: Path | None, config: TrainConfig, request: Request, report: Report) -> None:
    """How many modules get an adapter, and the options that none of them reads; `preset` is a file of LyCORIS's.

    `request.model`, where it is a file or a folder, stands in place of the configuration's. Raises FileError and
    ModelError for a model that is not there or is another one, UsageError (SITES-NONE) where no module is left.
    """
    from finitune.journeys.model import SHIPPED
    from finitune.journeys.train_checks import model_at_fault
    from finitune.journeys.training import choice_of
    from finitune.models.anima import ANIMA
    from finitune.training.sites import choose_sites

    choice = choice_of(config)
    if request.model and (request.model in SHIPPED or Path(request.model).exists()):
        choice = replace(choice, model=request.model)
    with model_at_fault(choice):
        roots = meta_roots(choice, config)
    sites = choose_sites(roots, ANIMA, config.network)
    report.findings.extend(sites.findings)
    report.tables.append(sites.table())
    report.figures["sites"] = len(sites.chosen)
    about_kernels(config, sites, report)
    about_factor(config, sites, report)
    if preset is not None:
        report.findings += preset_findings(preset, names_of(sites, ANIMA))


def names_of(sites: Choice, family: ModelSpec) -> list[str]:
    """The original names of all modules that could have an adapter."""
    from finitune.namings.resolve import Resolver

    resolver = Resolver.of_model(family)
    others = (site.partition(".") for site in sites.left_out)
    return [one.original for one in sites.chosen] + [resolver.native_name(c, name) or name for c, _, name in others]


def meta_roots(choice: ModelChoice, config: TrainConfig) -> dict[str, nn.Module]:
    """The components that a configuration adapts, on the meta device: by the settings of a folder, or by headers."""
    from finitune.journeys.model import model_path
    from finitune.models.anima.assemble import build
    from finitune.models.anima.folders import read_config

    path, names = model_path(choice.model), wanted(config)
    if not path.exists():
        raise FileError(f"{choice.model}: no such model, folder or file", code="MODEL-NOT-FOUND", subject=choice.model)
    if path.is_dir():
        return {name: build(name, read_config(path / name / "config.json")) for name in names}
    settings = from_headers(choice)
    return {name: build(name, settings[name]) for name in names if name in settings}


def wanted(config: TrainConfig) -> list[str]:
    """The names of the components that a configuration adapts."""
    from finitune.journeys.training import roots_of

    named = {name: name for name in ("transformer", "text_conditioner", "text_encoder")}
    return list(roots_of(cast("Any", SimpleNamespace(**named)), config))


def from_headers(choice: ModelChoice) -> dict[str, Config]:
    """The settings of the components in the files of a model, by the shapes in their headers; each is looked at."""
    from finitune.files.tensorfile import TensorFile
    from finitune.models.anima.headers import CONFIGS, PUBLISHED
    from finitune.models.anima.load import SORTERS, require_role

    files = {"dit": Path(choice.model), "qwen3": choice.qwen3, "vae": choice.vae}
    settings: dict[str, Config] = {}
    for role, path in files.items():
        if path is None:
            message = f"{choice.model} is one file of three: {role} is missing"
            raise UsageError(message, code="MODEL-FILES-MISSING", subject=choice.model)
        file = TensorFile(path)
        require_role(file, role)
        for name, key_of in SORTERS[role](file).names.items():
            shapes = {new: file.entries[old].shape for new, old in key_of.items()}
            settings[name] = CONFIGS[name](shapes, PUBLISHED[name])
    return settings


def about_kernels(config: TrainConfig, sites: Choice, report: Report) -> None:
    """A warning of what is for convolutions with a kernel, where no module is one."""
    if any(side > 1 for one in sites.chosen for side in one.shape[2:]):
        return
    given = [name for name in FOR_KERNELS if getattr(config.network, name)]
    for name in given:
        message = f"{name} has no effect: none of the {len(sites.chosen)} modules is a convolution with a kernel"
        report.add(Level.WARNING, NO_EFFECT, f"network.{name}", message, remedy=f"Leave {name} out.")


def about_factor(config: TrainConfig, sites: Choice, report: Report) -> None:
    """A note where LoKr's factor divides no side of a module, so that another one is taken there."""
    from finitune.adapters.lokr import factorization

    factor = config.network.factor
    if config.network.algorithm != "lokr" or factor < 1:
        return
    taken = [factorization(side, factor) for one in sites.chosen for side in one.shape[:2]]
    other = sorted({small for small, large in taken if factor not in (small, large)})
    if other:
        message = f"factor = {factor} does not divide every side: there {', '.join(map(str, other))} is taken"
        report.add(Level.NOTE, "LOKR-FACTOR", "network.factor", message, factor=factor, taken=other)
