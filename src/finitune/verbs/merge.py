"""finitune merge: adapters into a model, or into one another, with one rounding and nothing left to hope."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from finitune.errors import AdapterError, FileError, UsageError
from finitune.files.tensorfile import TensorEntry, TensorFile
from finitune.files.writer import clear_stale_files, require_free_disk_bytes
from finitune.merging.adapterfile import open_adapter
from finitune.merging.base_model import MergeBase, open_merge_base, read_key_renames
from finitune.merging.combine import CombineRequest, combine_adapter_files
from finitune.merging.merge_plan import (
    MergeInput,
    MergePlan,
    build_merge_plan_tables,
    make_merge_plan,
)
from finitune.merging.output import fill_output_files, plan_output_files, require_usable_output
from finitune.merging.pairing import TargetModel
from finitune.merging.readback import ReadBackResult, check_pending_files, require_read_back_match
from finitune.merging.rows import find_rounder_class, to_matrix_shape
from finitune.merging.stream import run_in_copy_workers
from finitune.merging.work import DeltaSurvival, RoundingOptions, TensorOutcome, report_delta_survival, survey_tensor
from finitune.namings.keys import split_adapter_key
from finitune.namings.metadata import RECEIPT_METADATA_KEY, Receipt
from finitune.progress import Progress, SilentProgress
from finitune.report import Level, Report
from finitune.verbs.shared.adapters import NamedAdapter, resolve_dtype_option
from finitune.verbs.shared.model import resolve_model_path
from finitune.verbs.shared.options import AmbiguityRequest, RankOptions

_MAX_SAMPLED_KEYS = 100
"""How many keys, evenly spaced, tell an adapter from a model."""

_PRECISION_REMEDY = (
    "Store those tensors in fp32 (--keep-precise), write all in fp32 (--dtype fp32; fp16 is 8 times as fine as bf16), "
    "or attach the adapter instead."
)


@dataclass(frozen=True)
class Request(RankOptions, AmbiguityRequest):
    """What to merge into what, how it is rounded, and where it goes."""

    model: str
    """`pico-anima`, a file, the index of a sharded one, or a folder; or an adapter, to which the others are added, cut
    to `--rank` or `--energy` if asked."""
    adapters: Annotated[tuple[str, ...], Parameter(name="ADAPTER", required=True)]
    """Adapter files, as FILE or FILE:STRENGTH."""
    _: KW_ONLY
    out: Annotated[Path, Parameter(alias="-o")]
    """The file to write, or the folder where MODEL is one."""
    dtype: Literal["fp32", "fp16", "bf16", "fp8", "fp8-e5m2"] | None = None
    """The dtype of the result; each tensor's own if left out."""
    rounding: Literal["nearest", "stochastic", "compensated"] = "nearest"
    """How the one rounding is done."""
    allow_unmatched: bool = False
    """Leave modules out that MODEL does not have."""
    dry_run: bool = False
    """Say what would be done, and write nothing."""
    keep_precise: bool = False
    """Store the tensors in fp32 whose change the dtype would lose."""
    min_survival: float = 0.9
    """The share of a tensor's change below which it is lost: to be warned of, or kept precise."""
    seed: int = 0
    """Seed of stochastic rounding."""
    shard_size: int | None = None
    """Write shards of at most so many bytes."""
    map: Path | None = None
    """A TOML file that names the keys of an odd checkpoint."""

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

    def least_survival(self) -> float:
        """The share of a change that must be left; raises UsageError where it is none."""
        if 0 < self.min_survival <= 1:
            return self.min_survival
        raise UsageError(
            f"--min-survival {self.min_survival:g} is no share of a change: it is above 0, and 1 at most",
            code="MERGE-MIN-SURVIVAL",
            subject="--min-survival",
            remedy="0.9, the default, warns where rounding takes more than a tenth of the change.",
        )


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read all headers, plan, stream, read back, put in place."""
    start = time.perf_counter()
    with Report("merge") as report:
        if is_adapter_file(NamedAdapter.parse(request.model).file):
            merge_into_adapter(request, report)
        else:
            require_no_rank_cut(request)
            merge_into_model(request, report, progress or SilentProgress())
            report.figures["wall_s"] = round(time.perf_counter() - start, 3)
    return report


def merge_into_model(request: Request, report: Report, progress: Progress) -> None:
    """The merge into a model; findings, figures and artifacts go to the report. Raises FinituneError."""
    named, least = request.named(), request.least_survival()
    manner = RoundingOptions(find_rounder_class(request.rounding), request.seed)
    base = open_merge_base(resolve_model_path(request.model), read_key_renames(request.map) if request.map else None)
    require_usable_output(base, [one.file for one in named], request.out)
    state = base.state()
    if base.left_out:
        names = ", ".join(str(path.relative_to(base.path)) for path in base.left_out[:3])
        message = f"{len(base.left_out)} other forms of the weights are not copied: {names}"
        report.add(Level.NOTE, "MERGE-LEFT-OUT", str(base.path), message, files=len(base.left_out))
    model = TargetModel.of(base)
    sources = [open_merge_source(one, model, request, report) for one in named]
    plan = make_checked_merge_plan(base, sources, request, report)
    plan, known = estimate_merge_survival(plan, request, manner, report)
    report.tables.extend(build_merge_plan_tables(plan, base, sources))
    receipts = [(base.path.name, base.compute_sampled_digest())]
    receipts += [(f"{one.path.name}:{one.strength:g}", TensorFile(one.file).fingerprint()) for one in named]
    metadata = {RECEIPT_METADATA_KEY: Receipt("merge", tuple(receipts), "one rounding").text()}
    files = plan_output_files(base, plan, request.out, request.shard_size, metadata)
    report.figures["bytes"] = size = sum(file.size for file in files)
    require_free_disk_bytes(request.out, size, "Free some space, or write to another disk. Nothing was written.")
    if request.dry_run:
        survivals = {str(one.key): found for one in plan.adapted if (found := known.get(one.entry))}
        report_delta_survival(report, survivals, least, _PRECISION_REMEDY)
        report.figures |= {table.title: table.as_dicts() for table in report.tables}
        report.add(Level.NOTE, "MERGE-DRY-RUN", str(request.out), "nothing was written")
        return
    clear_stale_files([file.path for file in files], report)
    with fill_output_files(files, manner, known, progress) as (fillings, outcomes):
        checked = check_pending_files(fillings, manner)
        require_read_back_match(checked)
        require_base_unchanged(base, state)
    report_delta_survival(report, {one.key: one.survival for one in outcomes if one.survival}, least, _PRECISION_REMEDY)
    report_merge_outcome(report, outcomes, checked)
    report.artifacts["model"] = str(files[-1].path if not base.is_folder else request.out)


def open_merge_source(one: NamedAdapter, model: TargetModel, request: Request, report: Report) -> MergeInput:
    """An adapter file, read as one of the base; its findings go to the report. Raises AdapterError."""
    name, leave, answers = one.path.name, request.allow_unmatched, request.answers()
    counted = Report(report.verb, report.findings)  # what matches is counted by the plan, over all files
    reading = open_adapter(one.path, counted, model, allow_unmatched=leave, answers=answers).reading
    if reading.errors:
        count = len(reading.left_out)
        message = f"{count} tensors of {name} are left out, as allowed; the warnings tell which and why"
        report.add(Level.WARNING, "MERGE-UNREAD", reading.errors[0].subject, message, tensors=count, file=name)
    if reading.adapter.embeddings:
        message = f"{len(reading.adapter.embeddings)} learned token vectors are in {name}; a model has no place for any"
        report.add(Level.NOTE, "MERGE-EMBEDDINGS", next(iter(reading.adapter.embeddings)), message)
    return MergeInput(name, reading.adapter, one.strength)


def make_checked_merge_plan(
    base: MergeBase, sources: Sequence[MergeInput], request: Request, report: Report
) -> MergePlan:
    """The plan, of which every module is accounted for; raises AdapterError where none matches, or one does not."""
    plan = make_merge_plan(base, sources, resolve_dtype_option(request.dtype))
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
        what = f"modules of the adapters that are not in the base: {len(plan.unmatched)}, such as {site} of {name}"
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


def estimate_merge_survival(
    plan: MergePlan, request: Request, manner: RoundingOptions, report: Report
) -> tuple[MergePlan, dict[TensorEntry, DeltaSurvival | None]]:
    """Survivals estimated before anything is written, where that is asked for; weak tensors then become fp32."""
    if not (request.dry_run or request.keep_precise):
        return plan, {}
    adapted = plan.adapted
    longest = max((to_matrix_shape(one.shape)[1] for one in adapted), default=1)
    found = run_in_copy_workers(adapted, lambda lane, job: survey_tensor(lane, job, manner), longest)
    known = {p.entry: survival for p, survival in zip(adapted, found, strict=True)}
    if not request.keep_precise:
        return plan, known
    least = request.least_survival()
    faint = {p.key for p in adapted if (survival := known[p.entry]) and survival.kept < least}
    if faint:
        message = (
            f"{len(faint)} tensors are stored in fp32: in their own format less than {least:.0%} of the change is left"
        )
        report.add(Level.NOTE, "MERGE-KEPT-PRECISE", str(min(faint, key=str)), message, tensors=len(faint))
    tensors = tuple(replace(one, dtype=torch.float32) if one.key in faint else one for one in plan.tensors)
    return replace(plan, tensors=tensors), {p.entry: known[p.entry] for p in adapted if p.key not in faint}


def require_base_unchanged(base: MergeBase, state: dict[Path, tuple[int, int]]) -> None:
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


def report_merge_outcome(report: Report, outcomes: Sequence[TensorOutcome], checked: ReadBackResult) -> None:
    """The figures of what was done and of what was read back, and a warning where the base itself is not finite."""
    report.figures["overflow"] = 0  # one would have ended the merge
    report.figures["readback_checked"] = checked.tensors
    report.figures["readback_mismatches"] = len(checked.mismatches)
    report.figures["readback_compared"] = checked.compared
    report.figures["correctly_rounded"] = checked.correctly_rounded
    if copied := sum(outcome.copied for outcome in outcomes):
        report.figures["copied_scanned_share"] = sum(outcome.watched for outcome in outcomes) / copied
    broken = [outcome for outcome in outcomes if outcome.nonfinite]
    if broken:
        count = sum(outcome.nonfinite for outcome in broken)
        first = f"{broken[0].key}{list(broken[0].place)}"
        report.add(
            Level.WARNING,
            "MERGE-BASE-NONFINITE",
            broken[0].key,
            f"the base itself holds {count} numbers that are not finite, in {len(broken)} tensors, first at {first}",
            remedy="The output has them too. The base is damaged, or was saved after a run that went wrong: get it "
            "again, and see all that is wrong: finitune check MODEL",
            numbers=count,
            tensors=len(broken),
            first=list(broken[0].place),
        )


def is_adapter_file(path: Path) -> bool:
    """Whether MODEL is an adapter: a file most of whose tensors have an adapter's role."""
    if not path.is_file():
        return False
    names = list(TensorFile(path))
    names = names[:: max(1, len(names) // _MAX_SAMPLED_KEYS)]
    roles = [found[1].role for name in names if (found := split_adapter_key(name)) is not None]
    return 2 * sum(role not in ("weight", "alpha", "scalar") for role in roles) > len(names)


def merge_into_adapter(request: Request, report: Report) -> None:
    first = NamedAdapter.parse(request.model)
    files = tuple((one.file, one.strength) for one in [first, *request.named()])
    combination = CombineRequest(
        files=files,
        out=request.out,
        rank=request.rank,
        energy=request.energy,
        dtype=resolve_dtype_option(request.dtype),
        allow_unmatched=request.allow_unmatched,
        answers=request.answers(),
    )
    combine_adapter_files(combination, report)


def require_no_rank_cut(request: Request) -> None:
    """Raise UsageError where a rank was asked of a model."""
    if request.rank is not None or request.energy is not None:
        raise UsageError(
            f"{request.model} is a model, which has no rank to cut to",
            code="MERGE-RANK",
            subject="--rank" if request.rank is not None else "--energy",
            remedy="Leave it out; or name an adapter in place of MODEL, to add the others to it.",
        )
