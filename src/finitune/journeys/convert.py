"""finitune convert: an adapter file in another spelling, or as another algorithm; read back before it is yours."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.errors import AdapterError, FileError, FinituneError, UsageError, did_you_mean
from finitune.journeys.model import OUTPUT
from finitune.report import Finding, Level, Report, Table

if TYPE_CHECKING:
    import torch

    from finitune.adapters.convert import Exactness
    from finitune.adapters.core import AdapterSet
    from finitune.models.spec import ModelSpec
    from finitune.namings.core import Reading
    from finitune.namings.write import Written
    from finitune.progress import Progress

To = Literal["kohya", "comfy", "diffusers", "peft"]
Dtype = Literal["fp32", "bf16", "fp16"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PEFT_TENSORS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROUNDING = 1e-6
"""The relative error of a change, up to which it counts as the same."""
MUCH_LOST = 1e-2
"""The share of numbers that may become zero, and the relative error, up to which half precision goes unremarked."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which adapter file to write in which spelling; `out` is a file, or for PEFT a folder.

    `model` names the family where the file does not tell it; `dora_side`, `glora_order` and `zero_alpha` answer what
    else a file may leave open.
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
    dora_side: Literal["out", "in"] | None = None
    glora_order: Literal["new", "old"] | None = None
    zero_alpha: Literal["rank", "zero"] | None = None

    def source(self) -> Path:
        """The file with the tensors: a folder of PEFT's has it inside."""
        return self.file / PEFT_TENSORS if self.file.is_dir() else self.file

    def target(self) -> Path:
        """Where to write; raises UsageError where that is the source."""
        stem = self.file.name.removesuffix(".safetensors")
        name = f"{stem}-{self.to}" + ("" if self.to == "peft" else ".safetensors")
        target = self.out or OUTPUT / name
        if target.resolve() == self.file.resolve():
            raise UsageError(
                f"--out {target} is the file to convert",
                code="CONVERT-ONTO-ITSELF",
                subject="--out",
                remedy="Name another file. The source is kept as it is.",
            )
        return target


@dataclass(frozen=True)
class Change:
    """An adapter on its way: what it is now, the costliest step so far, the largest relative error, and the notes."""

    adapter: AdapterSet
    klass: Exactness
    error: float = 0.0


@dataclass(frozen=True)
class Source:
    """What a written file has to read back as: the adapter, its family, and how far a change may be off."""

    adapter: AdapterSet
    family: ModelSpec
    allowed: float


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read, convert, write, read back, compare; the report has the class of the conversion and its errors."""
    from finitune.namings.blocks import renumbered

    report = Report("convert")
    try:
        target = request.target()
        reading = read(request, report)
        if reading is None:
            return report
        family = known_family(reading, request.file)
        source = mended(reading, report) if request.fix_split_scale else reading.adapter
        if request.blocks is not None:
            source = renumbered(source, family, request.blocks, reading.metadata)
        change = converted(source, request)
        report.figures.update({"class": change.klass.value, "relative_delta_error": change.error})
        demand_allowed(change, request)
        written = written_adapter(change, reading, family, request)
        tell_narrowing(report, written, request.dtype)
        put_in_place(written, target, Source(source, family, allowed_error(written, change)), report)
    except FinituneError as error:
        return report.fail(error)
    return report


def read(request: Request, report: Report) -> Reading | None:
    """The file as read, its findings passed on; None where something in it has no place or is wrong, without leave."""
    from finitune.files.tensorfile import TensorFile
    from finitune.namings.core import Answers
    from finitune.namings.read import read_adapter

    answers = Answers(request.dora_side, request.glora_order, request.zero_alpha)
    reading = read_adapter(TensorFile(request.source()), family_of(request.model), answers=answers)
    report.findings.extend(reading.findings)
    report.figures.update({"matched": reading.matched, "unmatched": len(reading.unmatched)})
    report.figures["left_out"] = len(reading.left_out)
    if request.allow_unmatched and len(reading.adapter):
        report.findings[:] = [forgiven(finding) for finding in report.findings]
    return reading if report.ok else None


def forgiven(finding: Finding) -> Finding:
    """A finding about tensors that may be left out as a warning; those about numbers stay what they are."""
    forgivable = finding.level is Level.ERROR and finding.code != "ADAPTER-NONFINITE"
    return replace(finding, level=Level.WARNING) if forgivable else finding


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


def family_of(name: str | None) -> ModelSpec | None:
    """The model family of a name; raises UsageError for one that we do not know."""
    from finitune.models import MODELS

    families = {family.name: family for family in MODELS}
    if name is None or name in families:
        return families.get(name or "")
    raise UsageError(
        f"--model {name}: there is no such family.{did_you_mean(name, families)}",
        code="MODEL-FAMILY-UNKNOWN",
        subject="--model",
        remedy=f"It is one of {', '.join(families)}.",
    )


def known_family(reading: Reading, file: Path) -> ModelSpec:
    """The model family of an adapter; raises AdapterError where no table knows its modules."""
    if reading.family is not None:
        return reading.family
    raise AdapterError(
        f"{file}: no model that we know has these modules, so that they have no other names",
        code="CONVERT-NO-FAMILY",
        subject=str(file),
        evidence={"sites": len(reading.adapter), "spelling": reading.spelling},
        remedy="Name the model with --model, or open an issue with the names of the modules.",
    )


def converted(adapter: AdapterSet, request: Request) -> Change:
    """The adapter as the asked algorithm; raises AdapterError with the site where that is impossible."""
    from finitune.adapters.convert import Exactness, as_lora
    from finitune.adapters.core import AdapterSet

    if request.rank is not None and (request.as_algorithm is None or request.rank < 1):
        raise UsageError(
            f"--rank {request.rank} goes with --as lora, and is at least 1",
            code="CONVERT-RANK",
            subject="--rank",
            remedy=f"finitune convert {request.file.name} --to {request.to} --as lora --rank 16",
        )
    if request.as_algorithm is None:
        return Change(adapter, Exactness.LOSSLESS)
    sites, klass, error = {}, Exactness.LOSSLESS, 0.0
    for site, one in adapter.sites.items():
        try:
            lora = as_lora(one, rank=request.rank)
        except AdapterError as failure:
            failure.subject = failure.subject or site
            raise
        sites[site] = lora.adapter
        klass, error = max(klass, lora.klass, key=lambda k: k.cost), max(error, lora.error)
    return Change(AdapterSet(sites, adapter.embeddings), klass, error)


def demand_allowed(change: Change, request: Request) -> None:
    """Raise AdapterError (CONVERT-LOSSY), with the error that it would have, for a loss that was not allowed."""
    from finitune.adapters.convert import Exactness

    if change.klass is Exactness.LOSSY and not request.allow_lossy:
        raise AdapterError(
            f"a LoRA of rank {request.rank} cannot hold this adapter: its change would be off by {change.error:.2%}",
            code="CONVERT-LOSSY",
            subject="--rank",
            evidence={"relative_delta_error": change.error, "rank": request.rank},
            remedy="Leave out --rank for the least rank that is exact, or accept the error: --allow-lossy.",
        )


def written_adapter(change: Change, reading: Reading, family: ModelSpec, request: Request) -> Written:
    """The content of the new file."""
    from finitune.adapters.core import AdapterSet
    from finitune.files.tensorfile import TensorFile
    from finitune.namings.fuse import unscaled
    from finitune.namings.metadata import Receipt
    from finitune.namings.write import write_adapter

    adapter = change.adapter
    if request.portable:
        sites = {site: unscaled(one) for site, one in adapter.sites.items()}
        adapter = AdapterSet(sites, adapter.embeddings)
    receipt = Receipt(
        "convert",
        ((request.file.name, TensorFile(request.source()).fingerprint()),),
        change.klass.value,
        {"relative_delta_error": change.error},
        () if request.blocks is None else (request.blocks,),
        reading.split_scale if request.fix_split_scale else {},
    )
    dtype = torch_dtype(request.dtype)
    return write_adapter(adapter, family, request.to, dtype=dtype, metadata=reading.metadata, receipt=receipt)


def torch_dtype(name: Dtype | None) -> torch.dtype | None:
    """torch's dtype of our name for it."""
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def tell_narrowing(report: Report, written: Written, dtype: Dtype | None) -> None:
    """The figures of what was written, and a warning where a narrower dtype lost much."""
    share = written.flushed / written.nonzero if written.nonzero else 0.0
    klass = max(str(report.figures["class"]), written.klass.value, key=cost_of)
    report.figures.update({"class": klass, "flushed_share": share, "narrowing_error": written.narrowing_error})
    report.figures.update({"tensors": len(written.tensors)})
    report.findings.extend(written.findings)
    if written.embeddings:
        report.add(
            Level.NOTE,
            "CONVERT-EMBEDDINGS-APART",
            ", ".join(written.embeddings),
            "the learned token embeddings are in a file of their own: this spelling has no place for them",
        )
    if share > MUCH_LOST or written.narrowing_error > MUCH_LOST:
        report.add(
            Level.WARNING,
            "CONVERT-NARROWED",
            f"--dtype {dtype}",
            f"{share:.1%} of the numbers became zero, and a module's change is off by {written.narrowing_error:.1%}",
            remedy="Write --dtype bf16, which has fp32's range, or fp32.",
            flushed=written.flushed,
            nonzero=written.nonzero,
        )


def cost_of(klass: str) -> int:
    """How costly a class of conversion is, by its name."""
    from finitune.adapters.convert import Exactness

    return Exactness(klass).cost


def allowed_error(written: Written, change: Change) -> float:
    """How far a site's change may be off after all that was done: what was measured for whole modules, with room.

    Of a site whose numbers became zero nothing may be left, which is told by other means.
    """
    return 1.0 if written.flushed else ROUNDING + 4 * (written.narrowing_error + change.error)


def put_in_place(written: Written, target: Path, source: Source, report: Report) -> None:
    """Write beside the target, read back, compare with the source, and only then move it there."""
    from finitune.files.tensorfile import TensorFile
    from finitune.namings.core import Answers
    from finitune.namings.loaders import where_it_loads
    from finitune.namings.read import read_adapter

    folder = target if written.config is not None else target.parent
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as place:
        names = save(written, Path(place), target)
        file = TensorFile(Path(place) / names["adapter"])
        back = read_adapter(file, source.family, answers=Answers(glora_order="new"))
        demand_same(back, source, report)
        rows = tuple((one.loader, one.verdict.value, one.reason) for one in where_it_loads(back))
        for name in names.values():
            (Path(place) / name).replace(folder / name)
    for what, name in names.items():
        report.artifacts[what] = str(folder / name)
    report.figures["bytes"] = (folder / names["adapter"]).stat().st_size
    report.tables.append(Table("who loads it", ("program", "loads", "why"), rows))


def make_folder(folder: Path) -> None:
    """Make a folder with its parents; raises FileError where the system refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{folder} cannot be made: {error.strerror}",
            code="FILE-NOT-WRITTEN",
            subject=str(folder),
            evidence={"errno": error.errno},
            remedy="Check the path and the permissions, or name another place: --out PATH.",
        ) from error


def save(written: Written, folder: Path, target: Path) -> dict[str, str]:
    """Write the files of an adapter into a folder; their names by what they are."""
    from finitune.files.writer import save_tensors, write_text

    names = {"adapter": target.name if written.config is None else PEFT_TENSORS}
    save_tensors(folder / names["adapter"], written.tensors, written.metadata)
    if written.config is not None:
        names["config"] = PEFT_CONFIG
        write_text(folder / names["config"], json.dumps(written.config, indent=2))
    if written.embeddings:
        names["embeddings"] = f"{Path(names['adapter']).stem}-embeddings.safetensors"
        save_tensors(folder / names["embeddings"], written.embeddings, {"format": "pt"})
    return names


def demand_same(back: Reading, source: Source, report: Report) -> None:
    """Compare every site's change in fp64 with the source's; raises AdapterError where they differ without leave."""
    from finitune.adapters.difference import change_error

    sites = dict.fromkeys((*source.adapter, *back.adapter))
    errors = {site: change_error(back.adapter.sites.get(site), source.adapter.sites.get(site)) for site in sites}
    worst = max(errors, key=errors.__getitem__)
    report.figures["max_delta_error"] = errors[worst]
    if (
        back.unmatched
        or any(finding.level is Level.ERROR for finding in back.findings)
        or errors[worst] > source.allowed
    ):
        raise AdapterError(
            f"what was written does not read back as the same adapter: {worst} is off by {errors[worst]:.3g}",
            code="CONVERT-READ-BACK",
            subject=worst,
            evidence={"error": errors[worst], "allowed": source.allowed, "unmatched": len(back.unmatched)},
            remedy="This is a bug; nothing was written. Open an issue with this report.",
        )
