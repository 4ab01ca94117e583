"""finitune extract: what a tuned model has learned over its base, as an adapter file."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from finitune.errors import ModelError, UsageError
from finitune.merging.adapterfile import (
    OutputFormat,
    build_site_receipt,
    build_site_table,
    compute_site_figures,
    put_adapter,
    require_other_output,
)
from finitune.merging.base_model import open_merge_base
from finitune.merging.combine import RankLimit
from finitune.merging.extract import ExtractionOptions, ExtractionResult, extract_adapter, list_unpaired_tensors
from finitune.merging.pairing import PairableCheckpoint, assign_family, find_model_spec, open_pairable_checkpoint
from finitune.namings.spellings import SingleFileSpelling
from finitune.progress import Progress
from finitune.report import Level, Report
from finitune.verbs.resize import require_rank_cut
from finitune.verbs.shared.adapters import resolve_dtype_option
from finitune.verbs.shared.model import DEFAULT_OUTPUT_FOLDER
from finitune.verbs.shared.options import AdapterFileDtype, OutPath, RankOptions

_MAX_LISTED_NAMES = 5
"""How many names a finding gives."""


@dataclass(frozen=True)
class Request(RankOptions):
    """Which two checkpoints to compare, and how far their difference is cut."""

    base: Path
    """The model before: a file, the index of a sharded one, or a folder."""
    tuned: Path
    """The model after."""
    _: KW_ONLY
    out: OutPath = None
    """The file to write."""
    to: SingleFileSpelling = "kohya"
    """The spelling to write."""
    dtype: AdapterFileDtype | None = None
    """The dtype of factors; fp32 if left out."""
    include: tuple[str, ...] = ()
    """Patterns of the modules to extract (`*attn*`); all if left out."""
    min_change: float = 0.0
    """Leave out tensors that changed by less than this share of their norm."""
    full: bool = False
    """Store whole what no LoRA can hold (embeddings and the like)."""

    def target(self) -> Path:
        wish = f"rank{self.rank}" if self.rank is not None else f"energy{self.energy:g}"
        return self.out or DEFAULT_OUTPUT_FOLDER / f"{self.tuned.name.split('.safetensors')[0]}-{wish}.safetensors"

    def to_extract_options(self, cut: RankLimit) -> ExtractionOptions:
        """What to extract; raises UsageError where it cannot be meant."""
        if not 0 <= self.min_change < 1:
            raise UsageError(
                f"--min-change: {self.min_change} is not in [0, 1)",
                code="MIN-CHANGE-OUT-OF-RANGE",
                subject="--min-change",
                remedy="It is the norm of a tensor's change over that of the tensor; 0.001 leaves out rounding.",
            )
        return ExtractionOptions(cut.rank, cut.energy, tuple(self.include), self.min_change, self.full)


def run(request: Request, progress: Progress | None = None) -> Report:
    """Compare, decompose, write, read back; figures of the ranks and errors, and of all that was left out."""
    with Report("extract") as report:
        cut = require_rank_cut(request.rank, request.energy, "extract BASE TUNED")
        extract_adapter_file(request, request.to_extract_options(cut), report, progress)
    return report


def extract_adapter_file(request: Request, wish: ExtractionOptions, report: Report, progress: Progress | None) -> None:
    """One adapter file from two checkpoints; raises FinituneError."""
    target = request.target()
    require_other_output(target, [request.base, request.tuned])
    models = [open_merge_base(path) for path in (request.base, request.tuned)]
    family = find_model_spec(models[1])
    base, tuned = (open_pairable_checkpoint(assign_family(model, family)) for model in models)
    report_unpaired_tensors(base, tuned, report)
    done = extract_adapter(base, tuned, wish, progress)
    adapter = done.adapter()
    report.figures |= {**compute_site_figures(done.rows), "sites": len(adapter), **count_left_out_tensors(done)}
    report_extraction(done, wish, report)
    if not len(adapter):
        raise ModelError(
            "nothing that differs between the models fits into an adapter",
            code="EXTRACT-NOTHING",
            subject=str(request.tuned),
            evidence={"left_out": len(done.left_out)},
            remedy="The findings name what differs. --full keeps embeddings as whole differences.",
        )
    report.tables.append(build_site_table(done.rows, "extracted"))
    sources = [(model.path.name, model.compute_sampled_digest()) for model in models]
    form = OutputFormat(request.to, resolve_dtype_option(request.dtype))
    put_adapter(target, adapter, family, form, build_site_receipt("extract", done.rows, sources), report)


def count_left_out_tensors(done: ExtractionResult) -> dict[str, object]:
    """How many tensors were the same, too little changed, not asked for, or without a place, and the share of these."""
    return {
        "identical": done.identical,
        "below_min_change": done.small,
        "excluded": done.excluded,
        "left_out": len(done.left_out),
        "left_out_share": done.left_out_share,
    }


def report_unpaired_tensors(base: PairableCheckpoint, tuned: PairableCheckpoint, report: Report) -> None:
    """Warn of tensors that only one of the models has, or has twice."""
    doubled = [*base.doubled, *tuned.doubled]
    if doubled:
        message = f"modules that a file has twice, of which the first was taken: {len(doubled)}"
        report.add(Level.WARNING, "EXTRACT-DOUBLED", doubled[0], message, first=doubled[:_MAX_LISTED_NAMES])
    for names, which in zip(list_unpaired_tensors(base, tuned), ("base", "tuned model"), strict=True):
        if names:
            report.add(
                Level.WARNING,
                "EXTRACT-UNPAIRED",
                names[0],
                f"in the {which} only, and so not compared: {len(names)} of its tensors",
                remedy="Give both models as the same kind of file or folder, so that both have all components.",
                tensors=len(names),
                first=names[:_MAX_LISTED_NAMES],
            )


def report_extraction(done: ExtractionResult, wish: ExtractionOptions, report: Report) -> None:
    """What has changed and is not in the adapter, and what else puts the difference in doubt."""
    reasons = Counter(one.why for one in done.left_out)
    for why, count in reasons.items():
        here = [one for one in done.left_out if one.why == why]
        names = [one.name for one in here]
        remedy = "" if wish.full else "--full keeps differences of whole modules, at their full size."
        report.add(
            Level.WARNING,
            "EXTRACT-LEFT-OUT",
            names[0],
            f"changed, but not in the adapter, because {why}: {count} of the tensors",
            remedy=remedy,
            tensors=count,
            change_max=max(one.change for one in here),
            first=names[:_MAX_LISTED_NAMES],
            left_out_share=done.left_out_share,
        )
    mixed = sorted({f"{before} and {after}" for before, after in done.dtypes if before != after})
    if mixed:
        report.add(
            Level.WARNING,
            "EXTRACT-DTYPES",
            "",
            f"the models are stored in different dtypes ({mixed[0]}): their rounding is part of the difference",
            remedy="Compare releases of one dtype, or leave out what is rounding: --min-change 0.001.",
            pairs=mixed,
        )
