"""finitune resize: a LoRA file of a smaller rank, with the true error of every layer."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from finitune.adapters import AdapterSet
from finitune.errors import UsageError
from finitune.merging.adapterfile import (
    build_site_receipt,
    build_site_table,
    choose_output_format,
    compute_site_figures,
    open_adapter,
    put_adapter,
    require_other_output,
)
from finitune.merging.combine import RankLimit
from finitune.merging.resize import ResizedAdapter, resize_adapter
from finitune.progress import Progress
from finitune.report import Level, Report
from finitune.verbs.shared.adapters import resolve_dtype_option
from finitune.verbs.shared.model import DEFAULT_OUTPUT_FOLDER
from finitune.verbs.shared.options import AdapterFileDtype, AmbiguityRequest, OutPath, RankOptions


@dataclass(frozen=True)
class Request(RankOptions, AmbiguityRequest):
    """Which adapter file to cut, and to which rank."""

    file: Path
    """An adapter file."""
    _: KW_ONLY
    out: OutPath = None
    """The file to write."""
    dtype: AdapterFileDtype | None = None
    """The dtype of factors; the file's own if left out."""
    allow_unmatched: bool = False
    """Leave tensors out that have no place."""

    def target(self) -> Path:
        wish = f"rank{self.rank}" if self.rank is not None else f"energy{self.energy:g}"
        return self.out or DEFAULT_OUTPUT_FOLDER / f"{self.file.name.removesuffix('.safetensors')}-{wish}.safetensors"


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read, cut in factor space, write, read back, compare; figures of the ranks and errors."""
    with Report("resize") as report:
        resize_adapter_file(request, require_rank_cut(request.rank, request.energy, "resize FILE"), report)
    return report


def require_rank_cut(rank: int | None, energy: float | None, usage: str) -> RankLimit:
    """The cut that was asked for; raises UsageError where there is none, or one that cannot be meant."""
    if rank is None and energy is None:
        raise UsageError(
            "neither a rank nor an energy was given",
            code="CUT-MISSING",
            subject="--rank",
            remedy=f"finitune {usage} --rank 16, or --energy 0.99 to keep 99 % of each layer's squared norm.",
        )
    return RankLimit(rank, energy)


def resize_adapter_file(request: Request, cut: RankLimit, report: Report) -> None:
    """One file from source to target; raises FinituneError."""
    target = request.target()
    require_other_output(target, [request.file])
    source = open_adapter(request.file, report, allow_unmatched=request.allow_unmatched, answers=request.answers())
    resized = resize_adapter(source.reading.adapter, rank=cut.rank, energy=cut.energy)
    report.figures |= compute_site_figures(resized.rows)
    report.figures["sites_cut"] = sum(row.how == "svd" for row in resized.rows)
    report.figures["sites_passed"] = len(resized.passed)
    report.tables.append(build_site_table(resized.rows, "resized"))
    report_resize(resized, report)
    dtype = resolve_dtype_option(request.dtype) or find_widest_factor_dtype(source.reading.adapter)
    receipt = build_site_receipt("resize", resized.rows, [source.receipt])
    put_adapter(target, resized.adapter, source.family, choose_output_format(source, dtype, report), receipt, report)


def find_widest_factor_dtype(adapter: AdapterSet) -> torch.dtype:
    """The dtype that holds the LoRA factors of all sites."""
    dtypes = {t.dtype for one in adapter.sites.values() if one.algorithm == "lora" for t in one.tensors.values()}
    wide, *others = dtypes
    for dtype in others:
        wide = torch.promote_types(wide, dtype)
    return wide if wide.itemsize > 1 else torch.bfloat16


def report_resize(resized: ResizedAdapter, report: Report) -> None:
    """What a cut does not say by its error."""
    if resized.dora:
        message = (
            f"{len(resized.dora)} layers are DoRA: the errors are those of the additive part, the magnitudes were"
            " kept, and the norms that they are divided by have changed with the cut"
        )
        remedy = "Compare pictures. For a true error, merge it into the model and extract a LoRA of the result."
        report.add(Level.WARNING, "RESIZE-DORA", resized.dora[0], message, remedy=remedy, layers=len(resized.dora))
    if resized.passed:
        message = f"{len(resized.passed)} layers have no rank (differences, norms, rotations) and stay as they are"
        report.add(Level.NOTE, "RESIZE-PASSED", resized.passed[0], message, layers=len(resized.passed))
    if all(row.how == "kept" for row in resized.rows):
        message = "every layer has no more than the asked rank: nothing was cut"
        report.add(Level.NOTE, "RESIZE-KEPT", resized.rows[0].site, message, layers=len(resized.rows))
