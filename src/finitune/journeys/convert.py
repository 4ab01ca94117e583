"""finitune convert: an adapter file in another spelling, or as another algorithm; read back before it is yours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.errors import AdapterError, FinituneError, UsageError
from finitune.journeys.adapters import Doubts, Dtype, loads, loads_table, named_model, torch_dtype
from finitune.journeys.model import OUTPUT
from finitune.report import Level, Report

if TYPE_CHECKING:
    from finitune.adapters.convert import Converted, Exactness
    from finitune.adapters.core import AdapterSet, SiteAdapter
    from finitune.merging.adapterfile import Model, Source
    from finitune.namings.core import Reading
    from finitune.namings.write import Written
    from finitune.progress import Progress

To = Literal["kohya", "comfy", "diffusers", "peft"]


@dataclass(frozen=True, kw_only=True)
class Request(Doubts):
    """Which adapter file to write in which spelling; `out` is a file, or for PEFT a folder.

    `model` names the family where the file does not tell it, or is the model itself (a file, a folder), whose own
    modules the adapter is for then, and whose weights a change may depend on.
    `as_algorithm` is "lora", of at most `rank`; `blocks` names a re-numbering of the model's blocks, as "28 to 40".
    `portable` folds the scale into the factors, so that no program can miss it. `fix_split_scale` multiplies alpha
    where LoRA were trained in parts and saved as one with the alpha of a part: see ADAPTER-SPLIT-SCALE.
    """

    file: Path
    to: To
    out: Path | None = None
    as_algorithm: Literal["lora"] | None = None
    rank: int | None = None
    dtype: Dtype | None = None
    blocks: str | None = None
    portable: bool = False
    fix_split_scale: bool = False
    allow_lossy: bool = False
    allow_unmatched: bool = False
    model: str | None = None

    def target(self) -> Path:
        """Where to write."""
        stem = self.file.name.removesuffix(".safetensors")
        name = f"{stem}-{self.to}" + ("" if self.to == "peft" else ".safetensors")
        return self.out or OUTPUT / name


@dataclass(frozen=True)
class Change:
    """An adapter on its way: what it is now, what it has to read back as, the costliest step, and the largest error.

    The two differ where an algorithm was changed: of what does not depend on the base weight, the source is compared.
    """

    adapter: AdapterSet
    reference: AdapterSet
    klass: Exactness
    error: float = 0.0


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read, convert, write, read back, compare; the report has the class of the conversion and its errors."""
    report = Report("convert")
    try:
        convert_file(request, report)
    except FinituneError as error:
        return report.fail(error)
    return report


def convert_file(request: Request, report: Report) -> None:
    """One file from source to target; raises FinituneError."""
    from finitune.merging.adapterfile import Expected, demand_other, open_adapter, put_written

    target = request.target()
    demand_other(target, [request.file])
    demand_rank(request)
    model = named_model(request.model)
    source = open_adapter(
        request.file, report, model, allow_unmatched=request.allow_unmatched, answers=request.answers()
    )
    adapter = mended(source.reading, report) if request.fix_split_scale else source.reading.adapter
    change = converted(adapter, model, request)
    report.figures |= {"class": change.klass.value, "relative_delta_error": change.error}
    demand_allowed(change, request)
    if request.blocks is not None:
        change = moved(change, source, request.blocks)
    written = written_adapter(change, source, request)
    report.figures["class"] = max(change.klass, written.klass, key=lambda klass: klass.cost).value
    demand_kept(written, request, report)
    back = put_written(target, written, Expected(change.reference, source.family, change.error), report)
    report.figures["loads"] = loads(back)
    report.tables.append(loads_table(back))


def mended(reading: Reading, report: Report) -> AdapterSet:
    """The adapter with alpha multiplied by n where LoRA were trained as n parts; what it mends is found no more."""
    from finitune.adapters.core import AdapterSet

    times, sites = reading.split_scale, reading.adapter.sites
    report.findings[:] = [finding for finding in report.findings if finding.code != "ADAPTER-SPLIT-SCALE"]
    factors = " or ".join(map(str, sorted(set(times.values()))))
    message = f"alpha is multiplied by {factors} at {len(times)} sites, whose LoRA were trained in parts, and too weak"
    if not times:
        message = "no LoRA here was trained in parts and saved with the alpha of one: nothing was multiplied"
    report.add(Level.NOTE, "CONVERT-SPLIT-SCALE", next(iter(times), ""), message, sites=len(times))
    stronger = {site: replace(sites[site], alpha=(sites[site].alpha or 0) * n) for site, n in times.items()}
    return AdapterSet({**sites, **stronger}, reading.adapter.embeddings)


def moved(change: Change, source: Source, blocks: str) -> Change:
    """The adapter, and what it is compared with, in the blocks of another model."""
    from finitune.namings.blocks import renumbered

    adapter, reference = (
        renumbered(one, source.family, blocks, source.reading.metadata) for one in (change.adapter, change.reference)
    )
    return replace(change, adapter=adapter, reference=reference)


def demand_rank(request: Request) -> None:
    """Raise UsageError where a rank is asked of what has none, or one under 1."""
    if request.rank is not None and (request.as_algorithm is None or request.rank < 1):
        raise UsageError(
            f"--rank {request.rank} goes with --as lora, and is at least 1",
            code="CONVERT-RANK",
            subject="--rank",
            remedy=f"finitune convert {request.file.name} --to {request.to} --as lora --rank 16",
        )


def converted(adapter: AdapterSet, model: Model, request: Request) -> Change:
    """The adapter as the asked algorithm; raises AdapterError with the site where that is impossible."""
    from finitune.adapters.convert import Exactness
    from finitune.adapters.core import AdapterSet

    if request.as_algorithm is None:
        return Change(adapter, adapter, Exactness.LOSSLESS)
    sites, references, klass, error = {}, {}, Exactness.LOSSLESS, 0.0
    for site, one in adapter.sites.items():
        on_base = depends_on_base(one, request.to)
        try:
            lora = lora_at(site, one, model, request.rank) if on_base else lora_of(one, request.rank)
        except AdapterError as failure:
            failure.subject = failure.subject or site
            raise
        sites[site], references[site] = lora.adapter, lora.adapter if on_base else one
        klass, error = max(klass, lora.klass, key=lambda k: k.cost), max(error, lora.error)
    embeddings = adapter.embeddings
    return Change(AdapterSet(sites, embeddings), AdapterSet(references, embeddings), klass, error)


def depends_on_base(adapter: SiteAdapter, to: To) -> bool:
    """Whether a LoRA of the change can be had from the base weight alone.

    So it is for algorithms that are not additive, and for DoRA magnitudes of the inputs where the target has no place
    for them.
    """
    from finitune.adapters import algorithm_of

    unsayable = adapter.magnitude is not None and adapter.magnitude.side == "in" and to in ("diffusers", "peft")
    return unsayable or not algorithm_of(adapter.algorithm).additive


def lora_of(adapter: SiteAdapter, rank: int | None) -> Converted:
    """The LoRA of a change that depends on no weight."""
    from finitune.adapters.convert import as_lora

    return as_lora(adapter, rank=rank)


def lora_at(site: str, adapter: SiteAdapter, model: Model, rank: int | None) -> Converted:
    """The LoRA of what an adapter changes of the model's own weight and bias, in fp64."""
    from finitune.adapters.convert import as_lora

    weight, bias = model.weight(site), model.bias(site)
    return as_lora(
        adapter,
        rank=rank,
        base=None if weight is None else weight.double(),
        bias=None if bias is None else bias.double(),
        without_magnitude=True,
    )


def demand_allowed(change: Change, request: Request) -> None:
    """Raise AdapterError (CONVERT-LOSSY), with the error that it would have, for a rank that is too small unasked."""
    from finitune.adapters.convert import Exactness

    if change.klass is Exactness.LOSSY and not request.allow_lossy:
        raise AdapterError(
            f"a LoRA of rank {request.rank} cannot hold this adapter: its change would be off by {change.error:.2%}",
            code="CONVERT-LOSSY",
            subject="--rank",
            evidence={"relative_delta_error": change.error, "rank": request.rank},
            remedy="Leave out --rank for the least rank that is exact, or accept the error: --allow-lossy.",
        )


def demand_kept(written: Written, request: Request, report: Report) -> None:
    """Raise AdapterError (CONVERT-LOSSY) for a dtype that loses more than its rounding, unasked."""
    from finitune.adapters.convert import Exactness

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


def written_adapter(change: Change, source: Source, request: Request) -> Written:
    """The content of the new file."""
    from finitune.adapters.core import AdapterSet
    from finitune.namings.fuse import unscaled
    from finitune.namings.metadata import Receipt
    from finitune.namings.write import write_adapter

    adapter, reading = change.adapter, source.reading
    if request.portable:
        adapter = AdapterSet({site: unscaled(one) for site, one in adapter.sites.items()}, adapter.embeddings)
    receipt = Receipt(
        "convert",
        (source.receipt,),
        change.klass.value,
        {"relative_delta_error": change.error},
        () if request.blocks is None else (request.blocks,),
        reading.split_scale if request.fix_split_scale else {},
    )
    dtype = torch_dtype(request.dtype)
    return write_adapter(adapter, source.family, request.to, dtype=dtype, metadata=reading.metadata, receipt=receipt)
