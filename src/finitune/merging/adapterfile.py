"""Adapter files in and out: none is taken before all of it is accounted for, none is left that does not read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finitune.adapters import AdapterSet
from finitune.adapters.difference import change_error
from finitune.errors import AdapterError, FileError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors, write_atomically
from finitune.models.spec import ModelSpec
from finitune.namings.core import Answers, Reading
from finitune.namings.metadata import Receipt
from finitune.namings.read import read_adapter
from finitune.namings.resolve import Resolver
from finitune.namings.write import WRITABLE, Written, write_adapter
from finitune.report import Level, Report

AS_WRITTEN = Answers(dora_side="out", glora_order="new", zero_alpha="zero")
"""How we write what shapes alone may leave open."""
PEFT_FILE = "adapter_model.safetensors"
READ_BACK = 1e-6
"""The relative error of a change up to which it reads back as the same: the rounding of fp32 factors."""
MUCH = 1e-2
"""The relative error of a module's change, or the share of numbers that became zero, from which a warning is due."""


@dataclass(frozen=True)
class Source:
    """An adapter file as read, and the facts that a receipt states."""

    path: Path
    reading: Reading
    family: ModelSpec

    @property
    def receipt(self) -> tuple[str, str]:
        """Name and fingerprint."""
        return self.path.name, TensorFile(self.path).fingerprint()


@dataclass(frozen=True)
class Form:
    """How an adapter is to be written: a spelling of WRITABLE, the dtype of factors (None: their own), the texts."""

    spelling: str
    dtype: torch.dtype | None = None
    metadata: Mapping[str, str] | None = None


def demand_other(out: Path, sources: Sequence[Path]) -> None:
    """Raise UsageError (OUT-IS-SOURCE) where a file would be written over one that it is made from."""
    for source in sources:
        if out.resolve() == source.resolve():
            raise UsageError(
                f"--out {out} is one of the sources",
                code="OUT-IS-SOURCE",
                subject="--out",
                remedy="Name another file. Sources are kept as they are.",
            )


def open_adapter(
    path: Path, report: Report, *, allow_unmatched: bool = False, answers: Answers | None = None
) -> Source:
    """An adapter file of which every tensor is accounted for; its findings go to the report.

    Raises AdapterError (ADAPTER-INCOMPLETE) where they hold an error. `allow_unmatched` makes warnings of those about
    tensors that have no place; numbers that are not finite stay errors. `answers` decide what the file leaves open.
    """
    path = path / PEFT_FILE if path.is_dir() else path
    reading = read_adapter(TensorFile(path), answers=answers)
    broken = 0
    for finding in reading.findings:
        if finding.level is Level.ERROR and allow_unmatched and finding.code != "ADAPTER-NONFINITE":
            finding = replace(finding, level=Level.WARNING)
        broken += finding.level is Level.ERROR
        report.findings.append(replace(finding, evidence={**finding.evidence, "file": path.name}))
    if broken or reading.family is None or not len(reading.adapter):
        raise AdapterError(
            f"{path}: {len(reading.unmatched)} of {len(reading.ledger)} tensors have no place, {broken} faults",
            code="ADAPTER-INCOMPLETE",
            subject=str(path),
            evidence={"unmatched": [line.key for line in reading.unmatched[:5]], "sites": len(reading.adapter)},
            remedy="The findings tell which and why. Where a part may be left out: --allow-unmatched.",
        )
    return Source(path, reading, reading.family)


def form_for(source: Source, dtype: torch.dtype | None, report: Report) -> Form:
    """The spelling of a source where we write it, else kohya's, which can say everything; with the source's texts."""
    spelling = source.reading.spelling
    if spelling not in WRITABLE or spelling == "peft":
        report.add(
            Level.NOTE,
            "WRITTEN-AS-KOHYA",
            str(source.path),
            f"the result is spelled as kohya does, not as {spelling or 'the source'}",
            remedy="For another spelling: finitune convert FILE --to ...",
        )
        spelling = "kohya"
    return Form(spelling, dtype, source.reading.metadata)


def put_adapter(
    path: Path, adapter: AdapterSet, family: ModelSpec, form: Form, receipt: Receipt, report: Report
) -> Written:
    """Write an adapter file, whole or not at all, after reading it back and comparing each site's change.

    Figures `file_bytes`, `read_back_error`, `narrowing_error`, `flushed_share`. Raises FileError (READ-BACK).
    """
    written = write_adapter(adapter, family, form.spelling, dtype=form.dtype, metadata=form.metadata, receipt=receipt)
    if written.config is not None:
        raise UsageError(
            "a PEFT adapter is a folder, which this verb does not write",
            code="SPELLING-NOT-WRITTEN",
            subject=form.spelling,
            remedy="Write kohya's spelling, then: finitune convert FILE --to peft.",
        )
    drift = 0.0

    def write(temporary: Path) -> None:
        nonlocal drift
        save_tensors(temporary, written.tensors, written.metadata)
        drift = read_back(temporary, adapter, family, written)

    write_atomically(path, write)
    share = written.flushed / written.nonzero if written.nonzero else 0.0
    report.figures |= {"file_bytes": path.stat().st_size, "read_back_error": drift}
    report.figures |= {"narrowing_error": written.narrowing_error, "flushed_share": share}
    report.findings.extend(written.findings)
    report.artifacts["adapter"] = str(path)
    if written.narrowing_error > MUCH or share > MUCH:
        message = f"in this dtype a module's change is off by {written.narrowing_error:.1%}, {share:.1%} became zero"
        report.add(Level.WARNING, "NARROWED", str(path), message, remedy="Write --dtype bf16 or fp32.")
    if written.embeddings:
        names = sorted(written.embeddings)
        message = f"{len(names)} learned token vectors have no place in this spelling and were left out"
        report.add(Level.WARNING, "EMBEDDINGS-LEFT-OUT", str(path), message, tokens=names)
    return written


def read_back(path: Path, adapter: AdapterSet, family: ModelSpec, written: Written) -> float:
    """The largest relative error of a site's change in the file; raises FileError where it is not the rounding's."""
    reading = read_adapter(TensorFile(path), resolver=Resolver.of_model(family), answers=AS_WRITTEN)
    sites = dict.fromkeys((*adapter, *reading.adapter))
    errors = {site: change_error(reading.adapter.sites.get(site), adapter.sites.get(site)) for site in sites}
    worst = max(errors, key=errors.__getitem__)
    faults = [finding.message for finding in reading.findings if finding.level is Level.ERROR]
    if faults or reading.unmatched or not errors[worst] <= READ_BACK + 2 * written.narrowing_error:
        raise FileError(
            f"the file does not read back as what was written: {worst} is off by {errors[worst]:.1e}",
            code="READ-BACK",
            subject=worst,
            evidence={"error": errors[worst], "unmatched": len(reading.unmatched), "faults": faults[:3]},
            remedy="Nothing was left behind. This is a bug: open an issue with this report.",
        )
    return errors[worst]
