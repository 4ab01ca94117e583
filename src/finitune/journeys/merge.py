"""finitune merge: adapters into a model, or into one another, with one rounding and nothing left to hope."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.errors import AdapterError, FileError, FinituneError, UsageError
from finitune.journeys.adapters import Doubts, NamedAdapter
from finitune.journeys.model import model_path
from finitune.progress import Progress, Silent
from finitune.report import Level, Report

if TYPE_CHECKING:
    import torch

    from finitune.files.tensorfile import TensorEntry
    from finitune.merging.bases import Base
    from finitune.merging.plan import Plan, Source
    from finitune.merging.readback import Checked
    from finitune.merging.survival import Survival
    from finitune.merging.work import Manner, Outcome

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2"}
LOOKED_AT = 100
"""How many keys, evenly spaced, tell an adapter from a model."""

PRECISE = "Store those tensors in fp32 (--keep-precise), write fp16 or fp32 (--dtype), or attach the adapter instead."


@dataclass(frozen=True, kw_only=True)
class Request(Doubts):
    """What to merge into what, how it is rounded, and where it goes.

    `model` is a safetensors file, its index, or a diffusers folder; or an adapter file, to which the others are added,
    cut to `rank` or `energy` if asked. `adapters` are FILE or FILE:STRENGTH. `dtype` None keeps each tensor's own.
    `shard_size` is in bytes.
    """

    model: str
    adapters: tuple[str, ...]
    out: Path
    dtype: Literal["fp32", "fp16", "bf16", "fp8", "fp8-e5m2"] | None = None
    rounding: str = "nearest"
    allow_unmatched: bool = False
    dry_run: bool = False
    keep_precise: bool = False
    seed: int = 0
    shard_size: int | None = None
    map: Path | None = None
    rank: int | None = None
    energy: float | None = None

    def named(self) -> list[NamedAdapter]:
        """The adapters with their strengths; raises UsageError for none, or for a strength that is no number."""
        named = [NamedAdapter.parse(text) for text in self.adapters]
        wrong = [text for text, one in zip(self.adapters, named, strict=True) if not math.isfinite(one.strength)]
        if wrong or not named:
            raise UsageError(
                f"{wrong[0]}: its strength is no number" if wrong else "there is no adapter to merge",
                code="MERGE-STRENGTH",
                subject="ADAPTER",
                remedy="finitune merge MODEL style.safetensors:0.8 -o OUT",
            )
        return named

    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of the output, None to keep each tensor's own."""
        import torch

        return getattr(torch, DTYPES[self.dtype]) if self.dtype else None

    def manner(self) -> Manner:
        """How numbers are rounded; raises UsageError for a rounding that we do not have."""
        from finitune.merging.rounding import rounding_of
        from finitune.merging.work import Manner

        return Manner(rounding_of(self.rounding), self.seed)


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read all headers, plan, stream, read back, put in place."""
    report = Report("merge")
    start = time.perf_counter()
    try:
        if is_adapter(NamedAdapter.parse(request.model).file):
            return onto_adapter(request, report)
        demand_no_cut(request)
        merge(request, report, progress or Silent())
    except FinituneError as error:
        return report.fail(error)
    report.figures["wall_s"] = round(time.perf_counter() - start, 3)
    return report


def merge(request: Request, report: Report, progress: Progress) -> None:
    """The merge into a model; findings, figures and artifacts go to the report. Raises FinituneError."""
    from finitune.merging.bases import open_base, read_renames
    from finitune.merging.output import demand_disk, demand_place, filled, lay_out, remove_strays
    from finitune.merging.plan import tables
    from finitune.merging.readback import demand_good, read_back

    manner, named = request.manner(), request.named()
    base = open_base(model_path(request.model), read_renames(request.map) if request.map else None)
    demand_place(base, [one.file for one in named], request.out)
    state = base.state()
    note_left_out(base, report)
    sources = [open_source(one, base, request, report) for one in named]
    plan = plan_checked(base, sources, request, report)
    plan, known = surveyed(plan, request, manner, report)
    report.tables.extend(tables(plan, base, sources))
    metadata = receipt(base, named, plan)
    files = lay_out(base, plan, request.out, request.shard_size, metadata)
    report.figures["bytes"] = demand_disk(files, request.out)
    if request.dry_run:
        tell_survival(report, {str(one.key): found for one in plan.adapted if (found := known.get(one.entry))})
        report.add(Level.NOTE, "MERGE-DRY-RUN", str(request.out), "nothing was written")
        return
    remove_strays(files, report)
    with filled(files, manner, known, progress) as (fillings, outcomes):
        checked = read_back(fillings, manner)
        demand_good(checked)
        demand_unchanged(base, state)
    told(report, outcomes, checked)
    report.artifacts["model"] = str(files[-1].path if not base.is_folder else request.out)


def open_source(one: NamedAdapter, base: Base, request: Request, report: Report) -> Source:
    """An adapter file, read as one of the base's family; its findings go to the report. Raises AdapterError."""
    from finitune.files.tensorfile import TensorFile
    from finitune.merging.pairing import weight_shapes, weights_of
    from finitune.merging.plan import Source
    from finitune.merging.stream import torch_threads_kept
    from finitune.namings.read import read_adapter

    with torch_threads_kept(1):  # its tensors are small: waking threads for each costs more than it saves
        reading = read_adapter(
            TensorFile(one.file),
            base.family,
            shapes=weight_shapes(base),
            weight_of=weights_of(base),
            answers=request.answers(),
        )
    errors = [finding for finding in reading.findings if finding.level is Level.ERROR]
    unusable = [finding for finding in errors if finding.code == "ADAPTER-NONFINITE"]
    report.findings.extend(finding for finding in reading.findings if finding not in errors)
    left_out = len(reading.left_out)
    if unusable or (errors and not request.allow_unmatched) or not len(reading.adapter):
        report.findings.extend(errors)
        first = (unusable or errors or [None])[0]
        raise AdapterError(
            f"{one.path.name} cannot be merged: " + (first.message if first else "it holds no module's change"),
            code=first.code if first else "MERGE-NOTHING",
            subject=str(one.path),
            evidence={"errors": len(errors), "unmatched": left_out, "sites": len(reading.adapter)},
            remedy=f"See all that is wrong: finitune check {one.path}"
            + (". Or merge the rest: --allow-unmatched" if left_out and not unusable and len(reading.adapter) else ""),
        )
    if errors:
        message = (
            f"{left_out} tensors of {one.path.name} have no place in the base, and are left out: {errors[0].message}"
        )
        report.add(Level.WARNING, "MERGE-UNMATCHED", errors[0].subject, message, tensors=left_out)
    if reading.adapter.embeddings:
        message = (
            f"{len(reading.adapter.embeddings)} learned token vectors are in {one.path.name}; a model has no place"
        )
        report.add(Level.NOTE, "MERGE-EMBEDDINGS", next(iter(reading.adapter.embeddings)), message)
    return Source(one.path.name, reading.adapter, one.strength)


def plan_checked(base: Base, sources: Sequence[Source], request: Request, report: Report) -> Plan:
    """The plan, of which every module is accounted for; raises AdapterError where none matches, or one does not."""
    from finitune.merging.plan import make_plan

    plan = make_plan(base, sources, request.torch_dtype())
    figures = {
        "tensors_total": len(plan.tensors) + len(plan.scales),
        "tensors_adapted": len(plan.adapted),
        "matched": plan.matched,
        "unmatched": len(plan.unmatched),
    }
    report.figures |= figures
    if not plan.matched:
        raise AdapterError(
            "no module of the adapters is in the base",
            code="MERGE-NOTHING",
            subject=request.model,
            evidence={
                "modules": sum(len(s.adapter) for s in sources),
                "first": [site for _, site in plan.unmatched[:3]],
            },
            remedy="Give the part of the model that the adapter is for; for a base with names of its own, --map FILE.",
        )
    if plan.unmatched:
        name, site = plan.unmatched[0]
        what = f"{len(plan.unmatched)} modules of the adapters are not in the base, such as {site} of {name}"
        if not request.allow_unmatched:
            raise AdapterError(
                what,
                code="MERGE-UNMATCHED",
                subject=site,
                evidence=figures,
                remedy="Merge into the whole model (a folder, for text encoders too), or leave them out: "
                "--allow-unmatched.",
            )
        report.add(Level.WARNING, "MERGE-UNMATCHED", site, f"{what}; they are left out", modules=len(plan.unmatched))
    if not plan.adapted:
        report.add(Level.WARNING, "MERGE-SILENT", request.model, "every adapter has strength 0: the base is copied")
    return plan


def surveyed(
    plan: Plan, request: Request, manner: Manner, report: Report
) -> tuple[Plan, dict[TensorEntry, Survival | None]]:
    """Survivals estimated before anything is written, where that is asked for; weak tensors then become fp32."""
    from finitune.merging.plan import with_precise
    from finitune.merging.stream import in_lanes
    from finitune.merging.survival import FAINT
    from finitune.merging.work import Job, survey

    if not (request.dry_run or request.keep_precise):
        return plan, {}
    adapted = plan.adapted
    nowhere = Path()
    jobs = [Job(str(p.key), p.key.name, p.entry, nowhere, 0, p.dtype, p.change, p.scale, 0) for p in adapted]
    longest = max((math.prod(p.shape[1:]) if len(p.shape) > 1 else math.prod(p.shape) for p in adapted), default=1)
    found = in_lanes(jobs, lambda lane, job: survey(lane, job, manner), longest)
    known = {p.entry: survival for p, survival in zip(adapted, found, strict=True)}
    if not request.keep_precise:
        return plan, known
    faint = {p.key for p in adapted if (survival := known[p.entry]) and not survival.kept >= FAINT}
    if faint:
        message = (
            f"{len(faint)} tensors are stored in fp32: in their own format less than {FAINT:.0%} of the change is left"
        )
        report.add(Level.NOTE, "MERGE-KEPT-PRECISE", str(min(faint, key=str)), message, tensors=len(faint))
    return with_precise(plan, faint), {p.entry: known[p.entry] for p in adapted if p.key not in faint}


def receipt(base: Base, named: Sequence[NamedAdapter], plan: Plan) -> dict[str, str]:
    """What the output's metadata says of how it came about."""
    from finitune.files.tensorfile import TensorFile
    from finitune.namings.metadata import RECEIPT, Receipt

    sources = [(base.path.name, base.fingerprint())]
    sources += [(f"{one.path.name}:{one.strength:g}", TensorFile(one.file).fingerprint()) for one in named]
    return {RECEIPT: Receipt("merge", tuple(sources), "one rounding").text()}


def note_left_out(base: Base, report: Report) -> None:
    """Say which other forms of the weights a folder holds, and that the output will not."""
    if base.left_out:
        names = ", ".join(str(path.relative_to(base.path)) for path in base.left_out[:3])
        message = f"{len(base.left_out)} other forms of the weights are not copied: {names}"
        report.add(Level.NOTE, "MERGE-LEFT-OUT", str(base.path), message, files=len(base.left_out))


def demand_unchanged(base: Base, state: dict[Path, tuple[int, int]]) -> None:
    """Raise FileError where a source was changed while it was read."""
    changed = [path for path, seen in base.state().items() if state[path] != seen]
    if changed:
        raise FileError(
            f"{changed[0]} was changed during the merge",
            code="MERGE-SOURCE-CHANGED",
            subject=str(changed[0]),
            evidence={"files": len(changed)},
            remedy="Another program wrote to it. Merge again when it is done.",
        )


def told(report: Report, outcomes: Sequence[Outcome], checked: Checked) -> None:
    """The figures of what was done and of what was read back."""
    report.figures["overflow"] = 0  # one would have ended the merge
    report.figures["readback_checked"] = checked.tensors
    report.figures["readback_mismatches"] = len(checked.mismatches)
    report.figures["readback_compared"] = checked.compared
    report.figures["correctly_rounded"] = checked.correctly_rounded
    tell_survival(report, {outcome.key: outcome.survival for outcome in outcomes if outcome.survival})
    broken = [outcome for outcome in outcomes if outcome.nonfinite]
    if broken:
        count = sum(outcome.nonfinite for outcome in broken)
        message = f"the base itself holds {count} numbers that are not finite, in {len(broken)} adapted tensors"
        report.add(Level.WARNING, "MERGE-BASE-NONFINITE", broken[0].key, message, numbers=count, tensors=len(broken))


def tell_survival(report: Report, found: dict[str, Survival]) -> None:
    """How much of the change is left."""
    from finitune.merging.survival import report_survival

    report_survival(report, found, PRECISE)


def is_adapter(path: Path) -> bool:
    """Whether MODEL is an adapter: a file most of whose tensors have an adapter's role."""
    from finitune.files.tensorfile import TensorFile
    from finitune.namings.suffixes import split

    if not path.is_file():
        return False
    names = list(TensorFile(path))
    names = names[:: max(1, len(names) // LOOKED_AT)]
    roles = [found[1].role for name in names if (found := split(name)) is not None]
    return 2 * sum(role not in ("weight", "alpha", "scalar") for role in roles) > len(names)


def onto_adapter(request: Request, report: Report) -> Report:
    """The sum of adapters, as an adapter."""
    from finitune.merging.combine import Combination, combine_files

    first = NamedAdapter.parse(request.model)
    files = tuple((one.file, one.strength) for one in [first, *request.named()])
    combination = Combination(
        files=files,
        out=request.out,
        rank=request.rank,
        energy=request.energy,
        dtype=request.torch_dtype(),
        allow_unmatched=request.allow_unmatched,
        answers=request.answers(),
    )
    combine_files(combination, report)
    return report


def demand_no_cut(request: Request) -> None:
    """Raise UsageError where a rank was asked of a model."""
    if request.rank is not None or request.energy is not None:
        raise UsageError(
            f"{request.model} is a model, which has no rank to cut to",
            code="MERGE-RANK",
            subject="--rank" if request.rank is not None else "--energy",
            remedy="Leave it out; or name an adapter in place of MODEL, to add the others to it.",
        )
