"""finitune extract: what a tuned model has learned over its base, as an adapter file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.errors import FinituneError, ModelError, UsageError
from finitune.journeys.adapters import Dtype, torch_dtype
from finitune.journeys.model import OUTPUT
from finitune.journeys.resize import demand_cut
from finitune.report import Level, Report

if TYPE_CHECKING:
    from finitune.merging.combine import Cut
    from finitune.merging.extract import Extracted, Wish
    from finitune.merging.pairing import Checkpoint
    from finitune.progress import Progress

FIRST = 5
"""How many names a finding gives."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which two checkpoints to compare, and how far their difference is cut: see `merging.extract.Wish`.

    Each is a safetensors file, an index of shards, or a folder as diffusers saves it. Without `dtype`: fp32.
    """

    base: Path
    tuned: Path
    rank: int | None = None
    energy: float | None = None
    out: Path | None = None
    to: Literal["kohya", "comfy", "diffusers"] = "kohya"
    dtype: Dtype | None = None
    include: tuple[str, ...] = ()
    min_change: float = 0.0
    full: bool = False

    def target(self) -> Path:
        """Where to write."""
        wish = f"rank{self.rank}" if self.rank is not None else f"energy{self.energy:g}"
        return self.out or OUTPUT / f"{self.tuned.name.split('.safetensors')[0]}-{wish}.safetensors"

    def wish(self, cut: Cut) -> Wish:
        """What to extract; raises UsageError where it cannot be meant."""
        from finitune.merging.extract import Wish

        if not 0 <= self.min_change < 1:
            raise UsageError(
                f"--min-change: {self.min_change} is not in [0, 1)",
                code="MIN-CHANGE-OUT-OF-RANGE",
                subject="--min-change",
                remedy="It is the norm of a tensor's change over that of the tensor; 0.001 leaves out rounding.",
            )
        return Wish(cut.rank, cut.energy, tuple(self.include), self.min_change, self.full)


def run(request: Request, progress: Progress | None = None) -> Report:
    """Compare, decompose, write, read back; figures of the ranks and errors, and of all that was left out."""
    report = Report("extract")
    try:
        cut = demand_cut(request.rank, request.energy, "extract BASE TUNED")
        extract_file(request, request.wish(cut), report, progress)
    except FinituneError as error:
        return report.fail(error)
    return report


def extract_file(request: Request, wish: Wish, report: Report, progress: Progress | None) -> None:
    """One adapter file from two checkpoints; raises FinituneError."""
    from finitune.merging.adapterfile import Form, demand_other, put_adapter
    from finitune.merging.bases import open_base
    from finitune.merging.extract import extract
    from finitune.merging.pairing import as_family, model_of, open_checkpoint
    from finitune.merging.rows import figures_of, receipt_for, table_of

    target = request.target()
    demand_other(target, [request.base, request.tuned])
    models = [open_base(path) for path in (request.base, request.tuned)]
    family = model_of(models[1])
    base, tuned = (open_checkpoint(as_family(model, family)) for model in models)
    tell_unpaired(base, tuned, report)
    done = extract(base, tuned, wish, progress)
    adapter = done.adapter()
    report.figures |= {**figures_of(done.rows), "sites": len(adapter), **figures_of_the_rest(done)}
    tell(done, wish, report)
    if not len(adapter):
        raise ModelError(
            "nothing that differs between the models fits into an adapter",
            code="EXTRACT-NOTHING",
            subject=str(request.tuned),
            evidence={"left_out": len(done.left_out)},
            remedy="The findings name what differs. --full keeps embeddings as whole differences.",
        )
    report.tables.append(table_of(done.rows, "extracted"))
    sources = [(model.path.name, model.fingerprint()) for model in models]
    form = Form(request.to, torch_dtype(request.dtype))
    put_adapter(target, adapter, family, form, receipt_for("extract", done.rows, sources), report)


def figures_of_the_rest(done: Extracted) -> dict[str, object]:
    """How many tensors were the same, too little changed, not asked for, or without a place, and the share of these."""
    return {
        "identical": done.identical,
        "below_min_change": done.small,
        "excluded": done.excluded,
        "left_out": len(done.left_out),
        "left_out_share": done.left_out_share,
    }


def tell_unpaired(base: Checkpoint, tuned: Checkpoint, report: Report) -> None:
    """Warn of tensors that only one of the models has, or has twice."""
    from finitune.merging.extract import unpaired

    doubled = [*base.doubled, *tuned.doubled]
    if doubled:
        message = f"modules that a file has twice, of which the first was taken: {len(doubled)}"
        report.add(Level.WARNING, "EXTRACT-DOUBLED", doubled[0], message, first=doubled[:FIRST])
    for names, which in zip(unpaired(base, tuned), ("base", "tuned model"), strict=True):
        if names:
            report.add(
                Level.WARNING,
                "EXTRACT-UNPAIRED",
                names[0],
                f"in the {which} only, and so not compared: {len(names)} of its tensors",
                remedy="Give both models as the same kind of file or folder, so that both have all components.",
                tensors=len(names),
                first=names[:FIRST],
            )


def tell(done: Extracted, wish: Wish, report: Report) -> None:
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
            first=names[:FIRST],
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
