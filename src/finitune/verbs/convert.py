"""finitune convert: an adapter file in another spelling, or as another algorithm; read back before it is yours."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from finitune.adapters import find_algorithm
from finitune.adapters.convert import Exactness, convert_adapter_to_lora
from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.errors import AdapterError, UsageError
from finitune.merging.adapterfile import (
    ExpectedAdapter,
    OpenedAdapter,
    open_adapter,
    put_written_adapter,
    require_other_output,
)
from finitune.merging.pairing import TargetModel
from finitune.namings.block_maps import renumber_family_blocks
from finitune.namings.core import ParsedAdapter
from finitune.namings.fused import fold_scale_into_factor
from finitune.namings.metadata import Receipt
from finitune.namings.spellings import WritableSpelling, get_spelling
from finitune.namings.write import AdapterFileContent, write_adapter
from finitune.progress import Progress
from finitune.report import Level, Report
from finitune.verbs.shared.adapters import (
    build_loader_verdict_table,
    collect_loader_verdicts,
    resolve_dtype_option,
    resolve_target_model,
)
from finitune.verbs.shared.model import DEFAULT_OUTPUT_FOLDER
from finitune.verbs.shared.options import AdapterFileDtype, AmbiguityRequest, OutPath


@dataclass(frozen=True)
class Request(AmbiguityRequest):
    """Which adapter file to write in which spelling, and what may change on the way."""

    file: Path
    """An adapter file, or a PEFT folder."""
    _: KW_ONLY
    to: WritableSpelling
    """The spelling to write."""
    out: OutPath = None
    """The file to write; for `peft` a folder."""
    as_algorithm: Annotated[Literal["lora"] | None, Parameter(name="--as")] = None
    """The algorithm to write: a LoRA can say what most others do, at a larger rank or with an error."""
    rank: int | None = None
    """The largest rank to write; the least that is exact if left out."""
    dtype: AdapterFileDtype | None = None
    """The dtype of factors; the file's own if left out. Alpha and magnitudes are fp32 always."""
    blocks: str | None = None
    """A re-numbering of the model's blocks, as "28 to 40"."""
    portable: bool = False
    """Fold the scale into the factors, so that no program can miss it."""
    allow_lossy: bool = False
    """Write it although something is lost; the report says how much."""
    allow_unmatched: bool = False
    """Leave tensors out that have no place."""
    fix_split_scale: bool = False
    """Mend the alpha of modules that were trained in parts and saved as one (see the warning of `check`)."""
    model: str | None = None
    """The model that it is for: its family, `pico-anima`, a file or a folder. Its weights are needed for T-LoRA, and
    for `--as lora` of GLoRA, IA3 and OFT."""

    def target(self) -> Path:
        stem = self.file.name.removesuffix(".safetensors")
        name = f"{stem}-{self.to}" + ("" if self.to == "peft" else ".safetensors")
        return self.out or DEFAULT_OUTPUT_FOLDER / name


@dataclass(frozen=True)
class AdapterConversion:
    """An adapter on its way: what it is now, what it has to read back as, the costliest step, and the largest error.

    The two differ where an algorithm was changed: of what does not depend on the base weight, the source is compared.
    """

    adapter: AdapterSet
    reference: AdapterSet
    klass: Exactness
    error: float = 0.0


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read, convert, write, read back, compare; the report has the class of the conversion and its errors."""
    with Report("convert") as report:
        convert_adapter_file(request, report)
    return report


def convert_adapter_file(request: Request, report: Report) -> None:
    """One file from source to target; raises FinituneError."""
    target = request.target()
    require_other_output(target, [request.file])
    require_valid_convert_rank(request)
    model = resolve_target_model(request.model)
    source = open_adapter(
        request.file, report, model, allow_unmatched=request.allow_unmatched, answers=request.answers()
    )
    adapter = correct_split_scale(source.reading, report) if request.fix_split_scale else source.reading.adapter
    change = convert_algorithm(adapter, model, request)
    report.figures |= {"class": change.klass.value, "relative_delta_error": change.error}
    require_lossy_allowed(change, request)
    if request.blocks is not None:
        change = renumber_adapter_blocks(change, source, request.blocks)
    written = encode_converted_adapter(change, source, request)
    report.figures["class"] = max(change.klass, written.klass, key=lambda klass: klass.cost).value
    require_dtype_keeps_values(written, request, report)
    back = put_written_adapter(target, written, ExpectedAdapter(change.reference, source.family, change.error), report)
    report.figures["loads"] = collect_loader_verdicts(back)
    report.tables.append(build_loader_verdict_table(back))


def correct_split_scale(reading: ParsedAdapter, report: Report) -> AdapterSet:
    """The adapter with alpha multiplied by n where LoRA were trained as n parts; what it mends is found no more."""
    times, sites = reading.split_scale, reading.adapter.sites
    report.findings[:] = [finding for finding in report.findings if finding.code != "ADAPTER-SPLIT-SCALE"]
    factors = " or ".join(map(str, sorted(set(times.values()))))
    message = f"alpha is multiplied by {factors} at {len(times)} sites, whose LoRA were trained in parts, and too weak"
    if not times:
        message = "no LoRA here was trained in parts and saved with the alpha of one: nothing was multiplied"
    report.add(Level.NOTE, "CONVERT-SPLIT-SCALE", next(iter(times), ""), message, sites=len(times))
    stronger = {site: replace(sites[site], alpha=(sites[site].alpha or 0) * n) for site, n in times.items()}
    return AdapterSet({**sites, **stronger}, reading.adapter.embeddings)


def renumber_adapter_blocks(change: AdapterConversion, source: OpenedAdapter, blocks: str) -> AdapterConversion:
    """The adapter, and what it is compared with, in the blocks of another model."""
    adapter, reference = (
        renumber_family_blocks(one, source.family, blocks, source.reading.metadata)
        for one in (change.adapter, change.reference)
    )
    return replace(change, adapter=adapter, reference=reference)


def require_valid_convert_rank(request: Request) -> None:
    """Raise UsageError where a rank is asked of what has none, or one under 1."""
    if request.rank is not None and (request.as_algorithm is None or request.rank < 1):
        raise UsageError(
            f"--rank {request.rank} goes with --as lora, and is at least 1",
            code="CONVERT-RANK",
            subject="--rank",
            remedy=f"finitune convert {request.file.name} --to {request.to} --as lora --rank 16",
        )


def convert_algorithm(adapter: AdapterSet, model: TargetModel, request: Request) -> AdapterConversion:
    """The adapter as the asked algorithm; raises AdapterError with the site where that is impossible.

    Where a change depends on the base, its LoRA is made of the model's own weight and bias, in fp64.
    """
    if request.as_algorithm is None:
        return AdapterConversion(adapter, adapter, Exactness.LOSSLESS)
    sites, references, klass, error = {}, {}, Exactness.LOSSLESS, 0.0
    for site, one in adapter.sites.items():
        on_base = needs_base_weight(one, request.to)
        weight, bias = (model.weight(site), model.bias(site)) if on_base else (None, None)
        try:
            lora = convert_adapter_to_lora(
                one,
                rank=request.rank,
                base=None if weight is None else weight.double(),
                bias=None if bias is None else bias.double(),
                without_magnitude=on_base,
            )
        except AdapterError as failure:
            failure.subject = failure.subject or site
            raise
        sites[site], references[site] = lora.adapter, lora.adapter if on_base else one
        klass, error = max(klass, lora.klass, key=lambda k: k.cost), max(error, lora.error)
    embeddings = adapter.embeddings
    return AdapterConversion(AdapterSet(sites, embeddings), AdapterSet(references, embeddings), klass, error)


def needs_base_weight(adapter: SiteAdapter, to: WritableSpelling) -> bool:
    """Whether a LoRA of the change can be had from the base weight alone.

    So it is for algorithms that are not additive, and for DoRA magnitudes of the inputs where the target has no place
    for them.
    """
    unsayable = (
        adapter.magnitude is not None and adapter.magnitude.side == "in" and get_spelling(to).alpha == "metadata"
    )
    return unsayable or not find_algorithm(adapter.algorithm).additive


def require_lossy_allowed(change: AdapterConversion, request: Request) -> None:
    """Raise AdapterError (CONVERT-LOSSY), with the error that it would have, for a rank that is too small unasked."""
    if change.klass is Exactness.LOSSY and not request.allow_lossy:
        raise AdapterError(
            f"a LoRA of rank {request.rank} cannot hold this adapter: its change would be off by {change.error:.2%}",
            code="CONVERT-LOSSY",
            subject="--rank",
            evidence={"relative_delta_error": change.error, "rank": request.rank},
            remedy="Leave out --rank for the least rank that is exact, or accept the error: --allow-lossy.",
        )


def require_dtype_keeps_values(written: AdapterFileContent, request: Request, report: Report) -> None:
    """Raise AdapterError (CONVERT-LOSSY) for a dtype that loses more than its rounding, unasked."""
    error, share = written.narrowing_error, written.flushed_share
    report.figures |= {"narrowing_error": error, "flushed_share": share}
    if written.narrowing is Exactness.LOSSY and not request.allow_lossy:
        raise AdapterError(
            f"{request.dtype} cannot hold this adapter: {share:.2%} of its numbers would become zero, and a module's"
            f" change would be off by {error:.2%}",
            code="CONVERT-LOSSY",
            subject="--dtype",
            evidence={"narrowing_error": error, "flushed": written.flushed, "nonzero": written.nonzero},
            remedy="Write --dtype bf16, which has fp32's range, or fp32; or accept the loss: --allow-lossy.",
        )


def encode_converted_adapter(change: AdapterConversion, source: OpenedAdapter, request: Request) -> AdapterFileContent:
    adapter, reading = change.adapter, source.reading
    if request.portable:
        adapter = AdapterSet(
            {site: fold_scale_into_factor(one) for site, one in adapter.sites.items()}, adapter.embeddings
        )
    receipt = Receipt(
        "convert",
        (source.receipt,),
        change.klass.value,
        {"relative_delta_error": change.error},
        () if request.blocks is None else (request.blocks,),
        reading.split_scale if request.fix_split_scale else {},
    )
    dtype = resolve_dtype_option(request.dtype)
    return write_adapter(adapter, source.family, request.to, dtype=dtype, metadata=reading.metadata, receipt=receipt)
