"""Adapter files in and out: none is taken before all of it is accounted for, none is left that does not read back.

Every verb that takes an adapter file opens it here, and every verb that makes one puts it in place here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finitune.adapters import AdapterSet, find_algorithm
from finitune.adapters.convert import EXACT_CONVERSION_TOLERANCE, Exactness
from finitune.adapters.core import AmbiguityOptions
from finitune.adapters.difference import compute_change_error
from finitune.errors import AdapterError, FileError, FinituneError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import clear_stale_files, open_scratch_folder, save_tensors, stage_files, write_text
from finitune.merging.pairing import TargetModel
from finitune.merging.stream import keep_torch_threads
from finitune.models.spec import ModelSpec
from finitune.namings.block_maps import find_doubtful_blocks
from finitune.namings.core import (
    PEFT_CONFIG_FILE_NAME,
    PEFT_TENSORS_FILE_NAME,
    SCALE_UNKNOWN_CODE,
    ParsedAdapter,
    find_adapter_tensor_file,
)
from finitune.namings.metadata import Receipt
from finitune.namings.read import read_adapter
from finitune.namings.resolve import Resolver
from finitune.namings.spellings import WRITABLE_SPELLINGS
from finitune.namings.write import AdapterFileContent, write_adapter
from finitune.report import Finding, Level, Report, Table

_MAX_SITE_ROWS_SHOWN = 40
"""Rows of a table for a person; the rest is in the figures."""


@dataclass(frozen=True)
class SiteRecord:
    """What became of one site: how it was made, its rank where it has one, and what that cost.

    `error` is relative to the true change (Frobenius), `energy` the share of its squared norm that was kept. `parts`
    are the adapters that act on the site, `change` is the norm of the change over that of the weight: where known.
    """

    site: str
    how: str
    rank: int | None
    error: float = 0.0
    energy: float = 1.0
    parts: tuple[int, ...] = ()
    change: float | None = None


def compute_site_figures(rows: Sequence[SiteRecord]) -> dict[str, object]:
    """`sites`; and of those that have a rank: `rank_min`, `rank_max`, the errors (largest, median), least energy."""
    ranked = [row for row in rows if row.rank is not None]
    ranks, errors = [row.rank or 0 for row in ranked], [row.error for row in ranked]
    return {
        "sites": len(rows),
        "rank_min": min(ranks, default=0),
        "rank_max": max(ranks, default=0),
        "relative_error_max": max(errors, default=0.0),
        "relative_error_median": statistics.median(errors) if errors else 0.0,
        "energy_min": min((row.energy for row in ranked), default=1.0),
    }


def build_site_receipt(verb: str, rows: Sequence[SiteRecord], sources: Sequence[tuple[str, str]]) -> Receipt:
    """What the file says about how it was made: lossy where more than rounding was cut."""
    error = max((row.error for row in rows), default=0.0)
    klass = Exactness.LOSSY if error > EXACT_CONVERSION_TOLERANCE else Exactness.EXACT
    return Receipt(verb, tuple(sources), klass.value, {"relative_error_max": error})


def build_site_table(rows: Sequence[SiteRecord], title: str) -> Table:
    """The rows for a person, the largest error first; at most SHOWN of them."""
    worst = sorted(rows, key=lambda row: -row.error)[:_MAX_SITE_ROWS_SHOWN]
    more = (
        f", the {_MAX_SITE_ROWS_SHOWN} with the largest error of {len(rows)}"
        if len(rows) > _MAX_SITE_ROWS_SHOWN
        else ""
    )
    sized = any(row.change is not None for row in rows)
    columns = ("site", "how", "rank", "relative error", "energy kept", *(("change of the weight",) if sized else ()))
    lines = [
        (
            row.site,
            row.how,
            "" if row.rank is None else str(row.rank),
            f"{row.error:.1e}",
            f"{row.energy:.2%}",
            *(("" if row.change is None else f"{row.change:.1e}",) if sized else ()),
        )
        for row in worst
    ]
    return Table(title + more, columns, tuple(lines))


WRITTEN_AMBIGUITY_ANSWERS = AmbiguityOptions(dora_side="out", glora_order="new", zero_alpha="zero")
"""How we write what shapes alone may leave open."""
_UNFORGIVABLE_CODES = frozenset({"ADAPTER-NONFINITE", SCALE_UNKNOWN_CODE})
"""Errors about numbers: no leave to leave tensors out makes warnings of them."""
_MAX_READ_BACK_ERROR = 1e-6
"""The relative error of a change up to which it reads back as the same: the rounding of fp32 factors."""
_MAX_NARROWING_LOSS = 1e-2
"""The relative error of a module's change, or the share of numbers that became zero, from which a warning is due."""


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter file as read, and the facts that a receipt states."""

    path: Path
    reading: ParsedAdapter
    family: ModelSpec

    @property
    def receipt(self) -> tuple[str, str]:
        """Name and fingerprint."""
        return self.path.name, TensorFile(find_adapter_tensor_file(self.path)).fingerprint()


@dataclass(frozen=True)
class OutputFormat:
    """How an adapter is to be written: a spelling of WRITABLE, the dtype of factors (None: their own), the texts."""

    spelling: str
    dtype: torch.dtype | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ExpectedAdapter:
    """What a written file has to read back as: an adapter of a family, whose change may be off by `error` already."""

    adapter: AdapterSet
    family: ModelSpec
    error: float = 0.0


def require_other_output(out: Path, sources: Sequence[Path]) -> None:
    """Raise UsageError (OUT-IS-SOURCE) where a file would be written over one that it is made from."""
    for source in sources:
        if out.resolve() == source.resolve():
            raise UsageError(
                f"--out {out} is one of the sources",
                code="OUT-IS-SOURCE",
                subject="--out",
                remedy="Name another file. Sources are kept as they are.",
            )


def read_adapter_for_model(path: Path, model: TargetModel, answers: AmbiguityOptions | None = None) -> ParsedAdapter:
    """An adapter file, or PEFT folder, read as one for a model; raises as `read_adapter` does."""
    with keep_torch_threads(1):  # the tensors are small: waking threads for each costs more than it saves
        file = TensorFile(find_adapter_tensor_file(path))
        reading = read_adapter(file, model.family, shapes=model.shapes, weight_of=model.weight, answers=answers)
    if model.family is None or not model.shapes:
        return reading
    doubts = find_doubtful_blocks(reading.adapter, model.shapes, model.family, reading.metadata)
    return replace(reading, findings=(*reading.findings, *doubts))


def resolve_unknown_scale(reading: ParsedAdapter, scale: float | None) -> ParsedAdapter:
    """The reading as it may be used, where nothing in the file states a scale (ADAPTER-SCALE-UNKNOWN).

    With a `scale` (alpha / rank) the modules have it, and the finding says so at level note; without one, the finding
    is an error. Any other reading stays as it is.
    """
    if all(finding.code != SCALE_UNKNOWN_CODE for finding in reading.findings):
        return reading
    told = {"level": Level.NOTE, "message": f"nothing states the scale: {scale or 0:g}, as asked", "remedy": ""}
    if scale is None:
        message = "the scale is stated nowhere: PEFT keeps alpha outside of the tensors, and that is missing"
        told = {"level": Level.ERROR, "message": message}
    findings = tuple(replace(one, **told) if one.code == SCALE_UNKNOWN_CODE else one for one in reading.findings)
    sites = dict(reading.adapter.sites)
    for site, adapter in sites.items():
        rank = find_algorithm(adapter.algorithm).rank(adapter)
        if scale is not None and rank is not None and adapter.alpha is None:
            sites[site] = replace(adapter, alpha=scale * rank, rank_stabilised=False)
    return replace(reading, adapter=replace(reading.adapter, sites=sites), findings=findings)


def open_adapter(
    path: Path,
    report: Report,
    model: TargetModel | None = None,
    *,
    allow_unmatched: bool = False,
    answers: AmbiguityOptions | None = None,
) -> OpenedAdapter:
    """An adapter file, or PEFT folder, of which every tensor is accounted for; its findings go to the report.

    Raises AdapterError where they hold an error (ADAPTER-REFUSED), and where no table knows its modules
    (ADAPTER-FAMILY-UNKNOWN). `allow_unmatched` makes warnings of errors but those of UNFORGIVABLE. `answers` decide
    what the file leaves open. Adds to the figures `matched`, `unmatched` and `left_out`.
    """
    try:
        reading = read_adapter_for_model(path, model or TargetModel(), answers)
        reading = resolve_unknown_scale(reading, answers and answers.scale)
    except FinituneError as error:
        error.evidence["file"] = path.name
        raise
    findings = [
        replace(one, level=Level.WARNING) if allow_unmatched and is_forgivable_error(one) else one
        for one in reading.findings
    ]
    report.findings.extend(
        replace(one, subject=one.subject or path.name, evidence={**one.evidence, "file": path.name}) for one in findings
    )
    counts = {"matched": reading.matched, "unmatched": len(reading.unmatched), "left_out": len(reading.left_out)}
    for name, count in counts.items():
        before = report.figures.get(name, 0)
        report.figures[name] = count + (before if isinstance(before, int) else 0)
    errors = [finding for finding in findings if finding.level is Level.ERROR]
    if errors or not len(reading.adapter):
        raise build_refusal_error(path, reading, errors)
    if reading.family is None:
        raise AdapterError(
            f"{path}: no model that we know has these modules",
            code="ADAPTER-FAMILY-UNKNOWN",
            subject=str(path),
            evidence={"sites": len(reading.adapter), "spelling": reading.spelling},
            remedy="Name the model, or a checkpoint of it, whose own modules are taken then: --model.",
        )
    return OpenedAdapter(path, reading, reading.family)


def is_forgivable_error(finding: Finding) -> bool:
    """Whether an error is about tensors that may be left out, and not about numbers."""
    return finding.level is Level.ERROR and finding.code not in _UNFORGIVABLE_CODES


def build_refusal_error(path: Path, reading: ParsedAdapter, errors: Sequence[Finding]) -> AdapterError:
    """The error for a file that cannot be used; the findings have said why."""
    lost, usable = len(reading.left_out), len(reading.adapter)
    forgivable = usable and lost and all(map(is_forgivable_error, errors))
    leave = " Where a part may be left out: --allow-unmatched." if forgivable else ""
    return AdapterError(
        f"{path} cannot be used: {len(errors)} errors, {lost} of {len(reading.ledger)} tensors without use",
        code="ADAPTER-REFUSED",
        subject=str(path),
        evidence={"errors": len(errors), "left_out": [line.key for line in reading.left_out[:5]], "sites": usable},
        remedy=f"The findings tell what is wrong; so does finitune check {path}.{leave}",
    )


def choose_output_format(source: OpenedAdapter, dtype: torch.dtype | None, report: Report) -> OutputFormat:
    """The spelling of a source where we write it, else kohya's, which can say everything; with the source's texts."""
    spelling = source.reading.spelling
    if spelling not in WRITABLE_SPELLINGS or spelling == "peft":
        report.add(
            Level.NOTE,
            "WRITTEN-AS-KOHYA",
            str(source.path),
            f"the result is spelled as kohya does, not as {spelling or 'the source'}",
            remedy="For another spelling: finitune convert FILE --to ...",
        )
        spelling = "kohya"
    return OutputFormat(spelling, dtype, source.reading.metadata)


def put_adapter(
    path: Path, adapter: AdapterSet, family: ModelSpec, form: OutputFormat, receipt: Receipt, report: Report
) -> ParsedAdapter:
    """Write an adapter file as `put_written_adapter` does; the adapter is what has to read back."""
    written = write_adapter(adapter, family, form.spelling, dtype=form.dtype, metadata=form.metadata, receipt=receipt)
    return put_written_adapter(path, written, ExpectedAdapter(adapter, family), report)


def put_written_adapter(
    path: Path, written: AdapterFileContent, expected: ExpectedAdapter, report: Report
) -> ParsedAdapter:
    """Put the files of an adapter in place, whole or not at all, after reading them back and comparing each change.

    `path` is a file, or for PEFT a folder. Figures `bytes`, `tensors`, `max_delta_error`, `narrowing_error`,
    `flushed_share`; artifacts `adapter`, and where there are such `config` and `embeddings`. Returns what was read
    back. Raises FileError (FILE-READ-BACK, FILE-NOT-WRITTEN).
    """
    folder = path.parent if written.config is None else path
    names = name_adapter_files(written, path)
    targets = [folder / name for name in names.values()]
    clear_stale_files(targets, report)
    with stage_files(targets) as temporaries, open_scratch_folder(temporaries[0]) as place:
        save_adapter_files(
            written, place, names
        )  # under their own names: PEFT's tensors need the other file beside them
        back = read_back_adapter(place / names["adapter"], written, expected, report)
        for name, temporary in zip(names.values(), temporaries, strict=True):
            (place / name).replace(temporary)
    report.artifacts |= {what: str(folder / name) for what, name in names.items()}
    report.figures["bytes"] = (folder / names["adapter"]).stat().st_size
    report_written_adapter(written, names, report)
    return back


def name_adapter_files(written: AdapterFileContent, path: Path) -> dict[str, str]:
    """The files of an adapter, by what they are."""
    names = {"adapter": path.name if written.config is None else PEFT_TENSORS_FILE_NAME}
    if written.config is not None:
        names["config"] = PEFT_CONFIG_FILE_NAME
    if written.embeddings:
        names["embeddings"] = f"{Path(names['adapter']).stem}-embeddings.safetensors"
    return names


def save_adapter_files(written: AdapterFileContent, folder: Path, names: Mapping[str, str]) -> None:
    """Write the files of an adapter into a folder."""
    save_tensors(folder / names["adapter"], written.tensors, written.metadata)
    if written.config is not None:
        write_text(folder / names["config"], json.dumps(written.config, indent=2))
    if written.embeddings:
        save_tensors(folder / names["embeddings"], written.embeddings, {"format": "pt"})


def report_written_adapter(written: AdapterFileContent, names: Mapping[str, str], report: Report) -> None:
    """What was written, and what of it should be known."""
    error, share = written.narrowing_error, written.flushed_share
    report.figures |= {"tensors": len(written.tensors), "narrowing_error": error, "flushed_share": share}
    report.findings.extend(written.findings)
    if error > _MAX_NARROWING_LOSS or share > _MAX_NARROWING_LOSS:
        report.add(
            Level.WARNING,
            "NARROWED",
            names["adapter"],
            f"in this dtype a module's change is off by {error:.1%}, and {share:.1%} of the numbers became zero",
            remedy="Write --dtype bf16, which has fp32's range, or fp32.",
            flushed=written.flushed,
            nonzero=written.nonzero,
        )
    if written.embeddings:
        tokens = sorted(written.embeddings)
        message = f"{len(tokens)} learned token vectors are in a file of their own: this spelling has no place for them"
        report.add(Level.NOTE, "EMBEDDINGS-APART", names["embeddings"], message, tokens=tokens)


def read_back_adapter(
    path: Path, written: AdapterFileContent, expected: ExpectedAdapter, report: Report
) -> ParsedAdapter:
    """The file as it reads back; raises FileError (FILE-READ-BACK) where a site's change is further off than it may be.

    Of a site whose numbers became zero nothing may be left, which is told by other means.
    """
    source, family = expected.adapter, expected.family
    back = read_adapter(TensorFile(path), resolver=Resolver.of_model(family), answers=WRITTEN_AMBIGUITY_ANSWERS)
    sites = dict.fromkeys((*source, *back.adapter))
    errors = {site: compute_change_error(back.adapter.sites.get(site), source.sites.get(site)) for site in sites}
    worst = max(errors, key=errors.__getitem__)
    allowed = 1.0 if written.flushed else _MAX_READ_BACK_ERROR + 4 * (written.narrowing_error + expected.error)
    report.figures["max_delta_error"] = errors[worst]
    faults = [finding.message for finding in back.errors]
    if faults or back.unmatched or not errors[worst] <= allowed:
        raise FileError(
            f"the file does not read back as what was written: {worst} is off by {errors[worst]:.1e}",
            code="FILE-READ-BACK",
            subject=worst,
            evidence={
                "error": errors[worst],
                "allowed": allowed,
                "unmatched": len(back.unmatched),
                "faults": faults[:3],
            },
            remedy="Nothing was left behind. This is a bug: open an issue with this report.",
        )
    return replace(back, family=family)
