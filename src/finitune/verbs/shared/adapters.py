"""Adapter files as commands name them, and adapters on a loaded model: attached to its layers, or in its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from finitune.adapters.core import AmbiguityOptions
from finitune.adapters.layer import attach_adapters, merge_into_weights
from finitune.adapters.weight import WeightedAdapter
from finitune.errors import UsageError, suggest_nearest_name
from finitune.merging.adapterfile import open_adapter
from finitune.merging.base_model import MergeBase, open_merge_base
from finitune.merging.pairing import TargetModel
from finitune.models import MODEL_FAMILIES, SHIPPED_MODELS
from finitune.models.loaded import LoadedModel
from finitune.namings.core import PEFT_TENSORS_FILE_NAME, ParsedAdapter, find_adapter_tensor_file
from finitune.namings.loaders import predict_all_loaders
from finitune.report import Report, Table
from finitune.verbs.shared.model import resolve_model_path

_TORCH_NAME_BY_DTYPE = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8-e5m2": "float8_e5m2",
}
"""torch's names of the dtypes that we write, by ours; those of adapter files are Dtype."""
MIN_ADAPTED_HEADROOM_BITS = 1.0
"""Bits of headroom that a plan must keep when an adapter it was not made for is attached."""


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter file and how strongly it acts."""

    path: Path
    strength: float = 1.0

    @classmethod
    def parse(cls, text: str) -> NamedAdapter:
        """FILE or FILE:STRENGTH; a colon that no number follows belongs to the name.

        >>> NamedAdapter.parse("style.safetensors:-0.5").strength
        -0.5
        >>> NamedAdapter.parse("C:/style.safetensors").strength
        1.0
        """
        head, colon, tail = text.rpartition(":")
        try:
            strength = float(tail) if colon and head else None
        except ValueError:
            strength = None
        return cls(Path(text)) if strength is None else cls(Path(head), strength)

    @property
    def file(self) -> Path:
        """The file with the tensors: a folder of PEFT's has it inside."""
        return find_adapter_tensor_file(self.path)


@dataclass(frozen=True)
class AppliedAdapters:
    """What was put on a model: where the attached layers went, by component, and what receipts say."""

    places: Mapping[str, Mapping[str, str]]
    receipts: list[dict[str, object]]


def resolve_dtype_option(name: str | None) -> torch.dtype | None:
    """torch's dtype of our name for it; None for None."""
    return None if name is None else getattr(torch, _TORCH_NAME_BY_DTYPE[name])


def open_model(path: Path) -> MergeBase:
    """What a path names: a file, an index, a PEFT folder, or a model's folder; raises FileError."""
    return open_merge_base(path / PEFT_TENSORS_FILE_NAME if (path / PEFT_TENSORS_FILE_NAME).exists() else path)


def resolve_target_model(name: str | None) -> TargetModel:
    """The model that an adapter is for, of the name of a family or a shipped model, of a file or a folder.

    Raises UsageError (MODEL-UNKNOWN) for a name that is none of these.
    """
    families = {family.name: family for family in MODEL_FAMILIES}
    if name is None or name in families:
        return TargetModel(families.get(name or ""))
    path = resolve_model_path(name)
    if not path.exists():
        raise UsageError(
            f"--model {name}: there is no such family, and no such "
            f"file.{suggest_nearest_name(name, [*families, *SHIPPED_MODELS])}",
            code="MODEL-UNKNOWN",
            subject="--model",
            remedy=f"It is one of {', '.join((*families, *SHIPPED_MODELS))}, or the path of a checkpoint.",
        )
    return TargetModel.of(open_model(path))


def collect_loader_verdicts(reading: ParsedAdapter) -> dict[str, str]:
    """The verdict of each program on a file: whether it loads it as it was meant."""
    return {one.loader: one.verdict.value for one in predict_all_loaders(reading)}


def build_loader_verdict_table(reading: ParsedAdapter) -> Table:
    rows = tuple((one.loader, one.verdict.value, one.reason) for one in predict_all_loaders(reading))
    return Table("loads", ("program", "loads", "why"), rows)


def apply_named_adapters(
    parts: LoadedModel,
    named: list[NamedAdapter],
    *,
    merge_first: bool,
    report: Report,
    answers: AmbiguityOptions | None = None,
) -> AppliedAdapters:
    """Put adapters on a loaded model: attached to its layers, or, to `merge_first`, in its weights, then fp32.

    The findings about the files go to the report; `answers` decide what the files leave open. Raises AdapterError where
    one of them is an error, or where an adapter fits no module.
    """
    model = TargetModel.loaded(parts.family, parts)
    adapters: dict[str, dict[str, list[WeightedAdapter]]] = {}
    receipts: list[dict[str, object]] = []
    for one in named:
        source = open_adapter(one.path, report, model, answers=answers)
        for site, adapter in source.reading.adapter.sites.items():
            component, _, module = site.partition(".")
            adapters.setdefault(component, {}).setdefault(module, []).append((adapter, one.strength))
        name, fingerprint = source.receipt
        receipts.append({"file": name, "strength": one.strength, "fingerprint": fingerprint})
    places: dict[str, dict[str, str]] = {}
    for component, sites in adapters.items():
        root = parts.module(component)
        if merge_first:
            merge_into_weights(root, sites)
        else:
            attach_adapters(root, sites)
            places[component] = {site: f"{site}.base" for site in sites}
    report.figures["adapted_sites"] = sum(map(len, adapters.values()))
    return AppliedAdapters(places, receipts)
