"""What `finitune check` says of a model: what its header tells, and what one pass over all of its numbers does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from finitune.files.fp16_loss import Fp16Loss, Fp16LossCounter, compute_fp16_lost_norm
from finitune.files.scan import TensorRange, scan_ranges
from finitune.merging.base_model import BaseTensorKey, MergeBase
from finitune.numerics.formats import FP16
from finitune.progress import Progress
from finitune.report import Level, Report, Table
from finitune.verbs.check.model_facts import report_model_header
from finitune.verbs.check.request import Request, check_safetensors_names
from finitune.verbs.shared.adapters import open_model

_MAX_LISTED_RANGES = 5
"""How many tensors of a model are shown, the largest first."""
_MAX_NAMED_TENSORS = 5
_SIGNIFICANT_CAST_ERROR = 2.0**-9
"""A change of a whole tensor that is as large as bf16's own rounding: |fp16(W) - W| / |W|."""


def check_model(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a model's file, index or folder; raises FileError, ModelError."""
    opened = open_model(path)
    check_safetensors_names(opened.files.values(), report)
    report.figures.update(compute_model_figures(opened))
    report_model_header(opened, report)
    for file in opened.files.values():
        if not file.entries:
            remedy = "Nothing can be loaded of it: save or download it again."
            report.add(Level.ERROR, "FILE-NO-TENSORS", str(file.path), f"{file.path} holds no tensors", remedy=remedy)
    ranges: dict[str, TensorRange] = {}
    losses: dict[str, Fp16Loss] = {}
    progress.start("reading", sum(file.size_bytes for file in opened.files.values()) >> 20)
    for component, file in opened.files.items():
        prefix, halving = f"{component}." if component else "", Fp16LossCounter()
        found = scan_ranges(file, MegabyteProgress(progress), halving)
        ranges |= {prefix + name: one for name, one in found.items()}
        losses |= {prefix + name: one for name, one in halving.losses.items()}
    progress.finish("reading")
    report_weight_ranges(ranges, report)
    report_constant_weights(ranges, opened, report)
    report_fp16_losses(losses, ranges, opened, report)


def compute_model_figures(opened: MergeBase) -> dict[str, object]:
    files = opened.files.values()
    dtypes: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for entry in (entry for file in files for entry in file.entries.values()):
        dtypes[entry.dtype] += 1
        size[entry.dtype] += entry.size_bytes
    total = sum(size.values())
    return {
        "kind": "model",
        "family": None if opened.family is None else opened.family.name,
        "tensors": sum(len(file) for file in files),
        "numbers": sum(math.prod(entry.shape) for file in files for entry in file.entries.values()),
        "bytes": total,
        "dtypes": dict(dtypes),
        "dtype_shares": {name: round(count / total, 4) for name, count in size.items()} if total else {},
    }


class MegabyteProgress:
    """Turns bytes, as they pass, into steps of a progress bar."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.rest = 0

    def __call__(self, count: int) -> None:
        whole, self.rest = divmod(self.rest + count, 1 << 20)
        if whole:
            self.progress.advance("reading", whole)


def report_weight_ranges(ranges: Mapping[str, TensorRange], report: Report) -> None:
    """An error for every tensor that is not finite, a warning for what fp16 cannot hold; the loudest tensors."""
    broken = {name: found for name, found in ranges.items() if found.nonfinite}
    for name, found in broken.items():
        count = found.nonfinite
        assert count is not None
        report.add(
            Level.ERROR,
            "WEIGHT-NONFINITE",
            name,
            f"{count.nan} NaN and {count.inf} infinite of {count.size} elements",
            remedy="The file is damaged, or was saved after a run that went wrong: get it again.",
            nan=count.nan,
            inf=count.inf,
            first=list(found.first),
        )
    loudest = sorted((n for n in ranges if n not in broken), key=lambda name: -ranges[name].amax)
    over = [name for name in loudest if ranges[name].amax >= FP16.overflow_at]
    if over:
        report.add(
            Level.WARNING,
            "WEIGHTS-BEYOND-FP16",
            over[0],
            f"{len(over)} tensors hold weights that fp16 cannot; a plain cast makes them infinite",
            remedy="A precision plan stores them with a power of two: finitune plan MODEL",
            amax=ranges[over[0]].amax,
            tensors=over[:_MAX_NAMED_TENSORS],
        )
    report.figures.update(
        nonfinite_tensors=len(broken),
        tensors_beyond_fp16=len(over),
        zero_tensors=sum(found.low == found.high == 0 for found in ranges.values()),
        amax=ranges[loudest[0]].amax if loudest else math.nan,
    )
    rows = tuple((n, f"{ranges[n].low:.6g}", f"{ranges[n].high:.6g}") for n in loudest[:_MAX_LISTED_RANGES])
    report.tables.append(Table("the loudest tensors", ("tensor", "least", "largest"), rows))


def report_constant_weights(ranges: Mapping[str, TensorRange], opened: MergeBase, report: Report) -> None:
    """A warning for weight matrices that hold one number throughout, a note where it is zero."""
    shapes = {name: opened.shape(key) for name, key in index_model_tensors(opened).items()}
    # of several inputs and outputs, rather than a bias, a norm or a scale
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and min(shape[:2]) > 1}
    constant = [name for name, found in ranges.items() if found.low == found.high and name in matrices]
    report.figures["constant_tensors"] = len(constant)
    zero = [name for name in constant if ranges[name].low == 0]
    other = [name for name in constant if ranges[name].low != 0]
    if other:
        report.add(
            Level.WARNING,
            "WEIGHTS-CONSTANT",
            other[0],
            f"{len(other)} weight matrices hold one number throughout, as no training leaves them",
            remedy="A faulty conversion or a fill wrote them: get the original.",
            values={name: ranges[name].low for name in other[:_MAX_NAMED_TENSORS]},
        )
    if zero:
        report.add(
            Level.NOTE,
            "WEIGHTS-ZERO",
            zero[0],
            f"{len(zero)} weight matrices are zero throughout",
            remedy="Layers that were added and never trained are. Where there are many, a cast has flushed them: get "
            "the original.",
            tensors=zero[:_MAX_NAMED_TENSORS],
        )


def report_fp16_losses(
    losses: Mapping[str, Fp16Loss], ranges: Mapping[str, TensorRange], opened: MergeBase, report: Report
) -> None:
    """How many numbers are too small for fp16 to keep, and what that does to the tensor that it does most to."""
    lost, size = sum(one.lost for one in losses.values()), sum(one.size for one in losses.values())
    report.figures.update(lost_in_fp16=lost, lost_in_fp16_share=lost / size if size else 0.0)
    touched = [name for name, one in losses.items() if one.lost and not ranges[name].nonfinite]
    if not touched:
        return
    worst = max(touched, key=lambda name: (losses[name].share, losses[name].lost))
    key = index_model_tensors(opened)[worst]
    error = compute_fp16_lost_norm(opened.files[key.file].read(key.name))
    report.figures["lost_in_fp16_error"] = error
    heavy = error > _SIGNIFICANT_CAST_ERROR
    report.add(
        Level.WARNING if heavy else Level.NOTE,
        "WEIGHTS-LOST-IN-FP16",
        worst,
        f"{lost} of {size} numbers are too small for fp16 to keep all of their bits; this tensor changes most, by "
        f"{error:.2g} of its norm" + ("" if heavy else ", which is less than bf16's own rounding"),
        remedy="A plain cast to fp16 damages it. A precision plan stores it with a power of two: finitune plan MODEL"
        if heavy
        else "",
        numbers=lost,
        flushed=sum(one.flushed for one in losses.values()),
        tensors=len(touched),
        share_of_tensor=losses[worst].share,
        relative_error=error,
    )


def index_model_tensors(opened: MergeBase) -> dict[str, BaseTensorKey]:
    return {f"{key.file}.{key.name}" if key.file else key.name: key for key in opened}
