"""What `finitune check` says of an adapter: what it is, what is wrong with it, and which programs load it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from finitune.adapters import find_algorithm
from finitune.adapters.core import Shape
from finitune.adapters.health import check_adapter_health, is_zero_adapter
from finitune.files.tensorfile import TensorFile
from finitune.merging.adapterfile import read_adapter_for_model, resolve_unknown_scale
from finitune.merging.stream import keep_torch_threads
from finitune.namings.core import ParsedAdapter, find_adapter_tensor_file
from finitune.namings.metadata import compute_kohya_file_hash
from finitune.progress import Progress
from finitune.report import Level, Report, Table
from finitune.verbs.check.request import Request, check_safetensors_names
from finitune.verbs.shared.adapters import build_loader_verdict_table, collect_loader_verdicts, resolve_target_model

_SHOWN_METADATA_KEYS = (
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
_MAX_LISTED_ALPHAS = 5
"""Of more different alphas only the least and the largest are told."""


def check_adapter(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about an adapter: a file, or PEFT's folder; raises FileError, AdapterError."""
    file = TensorFile(find_adapter_tensor_file(path))
    check_safetensors_names([file], report)
    answers, model = request.answers(), resolve_target_model(request.model)
    reading = read_adapter_for_model(file.path, model, answers)
    if answers.scale is not None:  # what is not known is a warning here, and an error where it is needed
        reading = resolve_unknown_scale(reading, answers.scale)
    report.findings.extend(reading.findings)
    with keep_torch_threads(1):
        report.findings.extend(check_adapter_health(reading.adapter))
        report.figures.update(compute_adapter_figures(file, reading))
    check_metadata_hash(file, report)
    report_adapted_modules(reading, model.shapes, report)
    report_magnitudes(reading, report)
    report.figures["loads"] = collect_loader_verdicts(reading)
    if said := [(key, file.metadata[key]) for key in _SHOWN_METADATA_KEYS if key in file.metadata]:
        report.tables.append(Table("what it says of itself", ("key", "value"), tuple(said)))
    report.tables.append(build_loader_verdict_table(reading))


def compute_adapter_figures(file: TensorFile, reading: ParsedAdapter) -> dict[str, object]:
    sites = reading.adapter.sites
    ranks = [rank for one in sites.values() if (rank := find_algorithm(one.algorithm).rank(one)) is not None]
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
        "alphas": alphas if len(alphas) <= _MAX_LISTED_ALPHAS else [alphas[0], alphas[-1]],
        "dtypes": dict(Counter(entry.dtype for entry in file.entries.values())),
        "tensors": len(file),
        "matched": reading.matched,
        "explained": sum(line.fate == "explained" for line in reading.ledger),
        "unmatched": len(reading.unmatched),
        "nonfinite_tensors": sum(finding.code == "ADAPTER-NONFINITE" for finding in reading.findings),
        "zero_deltas": sum(is_zero_adapter(one) for one in sites.values()),
        "embeddings": len(reading.adapter.embeddings),
        "bytes": file.size_bytes,
        "metadata_keys": len(file.metadata),
    }


def report_adapted_modules(reading: ParsedAdapter, shapes: Mapping[str, Shape], report: Report) -> None:
    """How many modules are adapted in each component, of how many that the model has, where that is known."""
    adapted = Counter(site.partition(".")[0] for site in reading.adapter)
    known = Counter(site.partition(".")[0] for site, shape in shapes.items() if len(shape) > 1)
    report.figures["components"] = {name: {"sites": n, "of": known[name] or None} for name, n in adapted.items()}
    rows = [(name, str(count), str(known[name] or "")) for name, count in adapted.items()]
    if reading.unmatched:
        rows.append(("(no place)", str(len(reading.unmatched)), ""))
    report.tables.append(Table("components", ("component", "adapted modules", "of the model's"), tuple(rows)))


def report_magnitudes(reading: ParsedAdapter, report: Report) -> None:
    """The conventions of DoRA's magnitudes, and how many modules have each: see `adapters.core.Magnitude`."""
    found = (one.magnitude for one in reading.adapter.sites.values() if one.magnitude is not None)
    counts = Counter((magnitude.side, magnitude.norm_of) for magnitude in found)
    report.figures["dora"] = [{"side": side, "norm_of": of, "sites": n} for (side, of), n in counts.items()]
    sides = {"out": "one per output", "in": "one per input"}
    norms = {"adapted": "of the adapted weight", "base": "of the base weight"}
    rows = tuple((sides[side], norms[norm_of], str(count)) for (side, norm_of), count in counts.items())
    if rows:
        report.tables.append(Table("dora", ("magnitudes", "norms", "modules"), rows))


def check_metadata_hash(file: TensorFile, report: Report) -> None:
    """Warn of a hash in the metadata that is not that of the tensors: programs would take the file for another."""
    stated = file.metadata.get("sshs_model_hash")
    if stated is None:
        return
    if (found := compute_kohya_file_hash(file)) != stated.removeprefix("0x"):
        report.add(
            Level.WARNING,
            "METADATA-STALE-HASH",
            "sshs_model_hash",
            "the hash in the metadata is of other tensors: it was copied when the file was converted",
            remedy="finitune convert writes the right one.",
            stated=stated,
            found=found,
        )
