"""What `finitune check` says of an adapter: what it is, what is wrong with it, and which programs load it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.files.tensorfile import TensorFile
from finitune.journeys.adapters import loads, loads_table, named_model
from finitune.journeys.checks import Request, dtypes_of, tell_names
from finitune.namings.core import tensors_in
from finitune.progress import Progress
from finitune.report import Level, Report, Table

if TYPE_CHECKING:
    from finitune.adapters.core import Shape
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
ALPHAS_SHOWN = 5
"""Of more different alphas only the least and the largest are told."""


def check_adapter(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about an adapter: a file, or PEFT's folder; raises FileError, AdapterError."""
    from finitune.adapters.health import examine
    from finitune.merging.adapterfile import read_for, settled
    from finitune.merging.stream import torch_threads_kept

    file = TensorFile(tensors_in(path))
    tell_names([file], report)
    answers, model = request.answers(), named_model(request.model)
    reading = read_for(file.path, model, answers)
    if answers.scale is not None:  # what is not known is a warning here, and an error where it is needed
        reading = settled(reading, answers.scale)
    report.findings.extend(reading.findings)
    with torch_threads_kept(1):
        report.findings.extend(examine(reading.adapter))
        report.figures.update(adapter_figures(file, reading))
    tell_hashes(file, report)
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
        "alphas": alphas if len(alphas) <= ALPHAS_SHOWN else [alphas[0], alphas[-1]],
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


def tell_hashes(file: TensorFile, report: Report) -> None:
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
