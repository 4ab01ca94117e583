"""The part of `finitune check` that looks at pictures and captions: a folder, folders N_name, a dataset TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finitune.config.schema import TrainConfig
from finitune.errors import FinituneError
from finitune.journeys.check_config import config_in
from finitune.journeys.check_pictures import look_at_data
from finitune.journeys.checks import UNNAMED, Request, sort_by_harm
from finitune.progress import Progress
from finitune.report import Finding, Report


def check_dataset(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about the pictures and captions of a folder, of folders N_name, or of a dataset or training TOML."""
    begin = len(report.findings)
    report.figures["kind"] = "dataset"
    try:
        config = config_of(path, request, report)
        if config is not None:
            look_at_data(config, request, report, progress, decode=True)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
    sort_by_harm(report, begin)


def config_of(path: Path, request: Request, report: Report) -> TrainConfig | None:
    """The configuration that trains on the pictures at a path; None where it has errors, which are in the report."""
    from finitune.config.read import validate

    if not path.is_dir():
        return config_in(path, request, report)
    config, findings = validate(
        {
            "model": {"pretrained_model_name_or_path": request.model or UNNAMED},
            "saving": {"output_dir": UNNAMED},
            **datasets_in(path, report),
        }
    )
    report.findings.extend(findings)
    return config


def datasets_in(folder: Path, report: Report) -> dict[str, Any]:
    """The datasets that a folder holds: its own pictures, or those of the folders N_name inside."""
    from finitune.config.importers.kohya_folders import datasets_of_folder, described, numbered
    from finitune.datasets.listing import pictures_inside

    named = numbered(folder.resolve().name)
    inside = [entry for entry in folder.iterdir() if numbered(entry.name) and entry.is_dir()]
    if inside and not pictures_inside(folder):
        part, findings = datasets_of_folder(folder, {})
        report.findings.extend(findings)
        return part
    repeats = named if named and named[0] > 0 and "_" in folder.resolve().name else (1, "")
    return {"datasets": [{"subsets": [described(folder, *repeats, is_reg=False)]}]}
