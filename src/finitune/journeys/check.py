"""finitune check: what a file is, what is wrong with it, and where it will load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FinituneError
from finitune.journeys.adapters import Doubts, loads, loads_table, named_model, open_model
from finitune.progress import Progress, Silent
from finitune.report import Level, Report, Table

if TYPE_CHECKING:
    from finitune.adapters.core import Shape
    from finitune.files.scan import Range
    from finitune.files.tensorfile import TensorFile
    from finitune.merging.bases import Base
    from finitune.namings.core import Reading

SAID = (
    "ss_base_model_version",
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_output_name",
    "modelspec.architecture",
    "modelspec.prediction_type",
    "modelspec.title",
)
"""The texts that a person wants to see; the rest is counted."""
LOUDEST = 5
"""How many tensors of a model are shown, the largest first."""


@dataclass(frozen=True, kw_only=True)
class Request(Doubts):
    """Which file to check: an adapter (against the model it is for, where `model` names one), or a model."""

    file: Path
    model: str | None = None


def run(request: Request, progress: Progress | None = None) -> Report:
    """Look at every tensor; the report says what the file is, what is wrong, and who loads it."""
    report = Report("check")
    try:
        opened = open_model(request.file)
        tell_names(opened, report)
        if holds_adapter(key.name for key in opened):
            check_adapter(opened.files[""], request, report)
        else:
            check_model(opened, report, progress or Silent())
    except FinituneError as error:
        return report.fail(error)
    return report


def tell_names(opened: Base, report: Report) -> None:
    """A note where a safetensors file is called as if it were another kind, which programs go by."""
    for file in opened.files.values():
        if not file.path.name.endswith((".safetensors", ".safetensors.index.json")):
            report.add(
                Level.NOTE,
                "FILE-NAME-MISLEADS",
                str(file.path),
                f"it is a safetensors file, and its name ends in {file.path.suffix or 'nothing'!r}",
                remedy="Name it .safetensors: many programs take a file for what its name says.",
            )


def holds_adapter(names: Iterable[str]) -> bool:
    """Whether tensor names are an adapter's: some end as only adapters' do."""
    from finitune.namings.oldest import is_oldest
    from finitune.namings.suffixes import split

    plain = {"weight", "bias"}
    return any(is_oldest(name) or ((found := split(name)) and found[1].role not in plain) for name in names)


def check_adapter(file: TensorFile, request: Request, report: Report) -> None:
    """Everything about an adapter file."""
    from finitune.adapters.health import examine
    from finitune.merging.adapterfile import read_for, settled
    from finitune.merging.stream import torch_threads_kept

    answers, model = request.answers(), named_model(request.model)
    reading = read_for(file.path, model, answers)
    if answers.scale is not None:  # what is not known is a warning here, and an error where it is needed
        reading = settled(reading, answers.scale)
    report.findings.extend(reading.findings)
    with torch_threads_kept(1):
        report.findings.extend(examine(reading.adapter))
        report.figures.update(adapter_figures(file, reading))
    check_hashes(file, report)
    components, magnitudes = components_of(reading, model.shapes), magnitudes_of(reading)
    report.figures.update(components=components, dora=magnitudes, loads=loads(reading))
    report.tables.append(component_table(components, len(reading.unmatched)))
    if magnitudes:
        report.tables.append(magnitude_table(magnitudes))
    if said := [(key, file.metadata[key]) for key in SAID if key in file.metadata]:
        report.tables.append(Table("what it says of itself", ("key", "value"), tuple(said)))
    report.tables.append(loads_table(reading))


def adapter_figures(file: TensorFile, reading: Reading) -> dict[str, object]:
    """What the file is, as named figures."""
    from finitune.adapters import algorithm_of
    from finitune.adapters.health import is_zero

    sites = reading.adapter.sites
    ranks = [rank for one in sites.values() if (rank := algorithm_of(one.algorithm).rank(one)) is not None]
    alphas = sorted({one.alpha for one in sites.values() if one.alpha is not None})
    algorithms = Counter(f"DoRA over {one.algorithm}" if one.magnitude else one.algorithm for one in sites.values())
    return {
        "kind": "adapter",
        "spelling": reading.spelling,
        "family": None if reading.family is None else reading.family.name,
        "algorithms": dict(algorithms),
        "sites": len(sites),
        "rank_min": min(ranks, default=None),
        "rank_max": max(ranks, default=None),
        "alphas": alphas if len(alphas) <= LOUDEST else [alphas[0], alphas[-1]],
        "dtypes": dtypes_of(file),
        "tensors": len(file),
        "matched": reading.matched,
        "explained": sum(line.fate == "explained" for line in reading.ledger),
        "unmatched": len(reading.unmatched),
        "nonfinite_tensors": sum(finding.code == "ADAPTER-NONFINITE" for finding in reading.findings),
        "zero_deltas": sum(is_zero(one) for one in sites.values()),
        "embeddings": len(reading.adapter.embeddings),
        "bytes": file.size_bytes,
        "metadata_keys": len(file.metadata),
    }


def dtypes_of(file: TensorFile) -> dict[str, int]:
    """How many tensors there are of each dtype, as the file names it."""
    return dict(Counter(entry.dtype for entry in file.entries.values()))


def components_of(reading: Reading, shapes: Mapping[str, Shape]) -> dict[str, dict[str, int | None]]:
    """Component by component: how many modules are adapted, of how many that the model has, where that is known."""
    adapted = Counter(site.partition(".")[0] for site in reading.adapter)
    known = Counter(site.partition(".")[0] for site, shape in shapes.items() if len(shape) > 1)
    return {name: {"sites": count, "of": known[name] or None} for name, count in adapted.items()}


def component_table(components: Mapping[str, Mapping[str, int | None]], homeless: int) -> Table:
    """The same for a person, and how many tensors have no place."""
    rows = [(name, str(found["sites"]), str(found["of"] or "")) for name, found in components.items()]
    if homeless:
        rows.append(("(no place)", str(homeless), ""))
    return Table("components", ("component", "adapted modules", "of the model's"), tuple(rows))


def magnitudes_of(reading: Reading) -> list[dict[str, object]]:
    """The conventions of DoRA's magnitudes, and how many modules have each: see `adapters.core.Magnitude`."""
    found = (one.magnitude for one in reading.adapter.sites.values() if one.magnitude is not None)
    counts = Counter((magnitude.side, magnitude.norm_of) for magnitude in found)
    return [{"side": side, "norm_of": norm_of, "sites": count} for (side, norm_of), count in counts.items()]


def magnitude_table(magnitudes: Iterable[Mapping[str, object]]) -> Table:
    """The same for a person."""
    sides = {"out": "one per output", "in": "one per input"}
    norms = {"adapted": "of the adapted weight", "base": "of the base weight"}
    rows = tuple((sides[str(m["side"])], norms[str(m["norm_of"])], str(m["sites"])) for m in magnitudes)
    return Table("dora", ("magnitudes", "norms", "modules"), rows)


def check_hashes(file: TensorFile, report: Report) -> None:
    """Warn of a hash in the metadata that is not that of the tensors: programs would take the file for another."""
    from finitune.namings.hashes import file_hash

    stated = file.metadata.get("sshs_model_hash")
    if stated is None:
        return
    if (found := file_hash(file)) != stated.removeprefix("0x"):
        report.add(
            Level.WARNING,
            "METADATA-STALE-HASH",
            "sshs_model_hash",
            "the hash in the metadata is of other tensors: it was copied when the file was converted",
            remedy="finitune convert writes the right one.",
            stated=stated,
            found=found,
        )


def check_model(opened: Base, report: Report, progress: Progress) -> None:
    """Everything about a model's file or folder."""
    from finitune.files.scan import scan

    files = opened.files
    ranges: dict[str, Range] = {}
    progress.start("reading", sum(file.size_bytes for file in files.values()) >> 20)
    for component, file in files.items():
        prefix = f"{component}." if component else ""
        ranges |= {prefix + name: found for name, found in scan(file, Megabytes(progress)).items()}
    progress.finish("reading")
    report.figures.update(
        kind="model",
        family=None if opened.family is None else opened.family.name,
        tensors=sum(len(file) for file in files.values()),
        bytes=sum(file.size_bytes for file in files.values()),
        dtypes=dict(sum((Counter(dtypes_of(file)) for file in files.values()), Counter())),
    )
    judge_ranges(ranges, report)


class Megabytes:
    """Turns bytes, as they pass, into steps of a progress bar."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.rest = 0

    def __call__(self, count: int) -> None:
        whole, self.rest = divmod(self.rest + count, 1 << 20)
        if whole:
            self.progress.advance("reading", whole)


def judge_ranges(ranges: dict[str, Range], report: Report) -> None:
    """An error for every tensor that is not finite, a warning for what fp16 cannot hold; the loudest tensors."""
    from finitune.numerics.formats import HALF

    broken = {name: found for name, found in ranges.items() if found.nonfinite}
    for name, found in broken.items():
        count = found.nonfinite
        assert count is not None
        report.add(
            Level.ERROR,
            "MODEL-NONFINITE",
            name,
            f"{count.nan} NaN and {count.inf} infinite of {count.size} elements",
            remedy="The file is damaged, or was saved after a run that went wrong: get it again.",
            nan=count.nan,
            inf=count.inf,
            first=list(found.first),
        )
    loudest = sorted((n for n in ranges if n not in broken), key=lambda name: -ranges[name].amax)
    over = [name for name in loudest if ranges[name].amax >= HALF.overflow_at]
    if over:
        report.add(
            Level.WARNING,
            "WEIGHTS-BEYOND-FP16",
            over[0],
            f"{len(over)} tensors hold weights that fp16 cannot; a plain cast makes them infinite",
            remedy="A precision plan stores them with a power of two: finitune plan MODEL",
            amax=ranges[over[0]].amax,
        )
    silent = [name for name in ranges if ranges[name].amax == 0]
    report.figures.update(
        nonfinite_tensors=len(broken),
        tensors_beyond_fp16=len(over),
        zero_tensors=len(silent),
        amax=ranges[loudest[0]].amax if loudest else math.nan,
    )
    rows = tuple((n, f"{ranges[n].low:.6g}", f"{ranges[n].high:.6g}") for n in loudest[:LOUDEST])
    report.tables.append(Table("the loudest tensors", ("tensor", "least", "largest"), rows))
