"""The part of `finitune check` that looks at pictures and captions: a folder, folders N_name, a dataset TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finitune.config.datasets import parse_numbered_folder
from finitune.config.schema import TrainConfig
from finitune.errors import FinituneError
from finitune.progress import Progress
from finitune.report import Finding, Report
from finitune.verbs.check.config import read_dataset_config
from finitune.verbs.check.dataset_pictures import check_training_pictures
from finitune.verbs.check.request import UNNAMED_PLACEHOLDER, Request, sort_findings_by_level


def check_dataset(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about the pictures and captions of a folder, of folders N_name, or of a dataset or training TOML."""
    begin = len(report.findings)
    report.figures["kind"] = "dataset"
    try:
        config = build_dataset_config(path, request, report)
        if config is not None:
            check_training_pictures(config, request, report, progress, decode=True)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
    sort_findings_by_level(report, begin)


def build_dataset_config(path: Path, request: Request, report: Report) -> TrainConfig | None:
    """The configuration that trains on the pictures at a path; None where it has errors, which are in the report."""
    from finitune.config.read import validate_config

    if not path.is_dir():
        return read_dataset_config(path, request, report)
    config, findings = validate_config(
        {
            "model": {"pretrained_model_name_or_path": request.model or UNNAMED_PLACEHOLDER},
            "saving": {"output_dir": UNNAMED_PLACEHOLDER},
            **find_datasets_in_folder(path, report),
        }
    )
    report.findings.extend(findings)
    return config


def find_datasets_in_folder(folder: Path, report: Report) -> dict[str, Any]:
    """The datasets that a folder holds: its own pictures, or those of the folders N_name inside."""
    from finitune.datasets.folder_listing import count_pictures
    from finitune.importers.kohya_folders import build_subset_options, scan_kohya_folder

    named = parse_numbered_folder(folder.resolve().name)
    inside = [entry for entry in folder.iterdir() if parse_numbered_folder(entry.name) and entry.is_dir()]
    if inside and not count_pictures(folder):
        part, findings = scan_kohya_folder(folder, {})
        report.findings.extend(findings)
        return part
    repeats = named if named and named[0] > 0 and "_" in folder.resolve().name else (1, "")
    return {"datasets": [{"subsets": [build_subset_options(folder, *repeats, is_reg=False)]}]}
