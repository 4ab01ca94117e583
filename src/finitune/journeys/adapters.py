"""Adapter files as commands name them, and adapters on a loaded model: attached to its layers, or in its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.errors import UsageError, did_you_mean
from finitune.journeys.model import SHIPPED, model_path
from finitune.namings.core import PEFT_TENSORS, tensors_in
from finitune.report import Report, Table

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finitune.adapters.weight import Strong
    from finitune.merging.adapterfile import Model
    from finitune.merging.bases import Base
    from finitune.models.anima.load import AnimaParts
    from finitune.namings.core import Answers, Reading

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2"}
"""torch's names of the dtypes that we write, by ours; those of adapter files are Dtype."""
HOLDING_BITS = 1.0
"""Bits of headroom that a plan must keep when an adapter it was not made for is attached."""


@dataclass(frozen=True, kw_only=True)
class Doubts:
    """Answers to what an adapter file may leave open; the findings that ask for one name its option."""

    dora_side: Literal["out", "in"] | None = None
    glora_order: Literal["new", "old"] | None = None
    zero_alpha: Literal["rank", "zero"] | None = None
    scale: float | None = None

    def answers(self) -> Answers:
        """The same for the reader; raises UsageError for a scale that none can be."""
        from finitune.namings.core import Answers

        if self.scale is not None and not (math.isfinite(self.scale) and self.scale):
            raise UsageError(
                f"--scale {self.scale:g} is no scale",
                code="SCALE-OUT-OF-RANGE",
                subject="--scale",
                remedy="It is alpha / rank: 1 where they are equal, 2 for alpha 32 at rank 16.",
            )
        return Answers(self.dora_side, self.glora_order, self.zero_alpha, self.scale)


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
        return tensors_in(self.path)


@dataclass(frozen=True)
class Worn:
    """What was put on a model: where the attached layers went, by component, and what receipts say."""

    places: Mapping[str, Mapping[str, str]]
    receipts: list[dict[str, object]]


def torch_dtype(name: str | None) -> torch.dtype | None:
    """torch's dtype of our name for it; None for None."""
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def open_model(path: Path) -> Base:
    """What a path names: a file, an index, a PEFT folder, or a model's folder; raises FileError."""
    from finitune.merging.bases import open_base

    return open_base(path / PEFT_TENSORS if (path / PEFT_TENSORS).exists() else path)


def named_model(name: str | None) -> Model:
    """The model that an adapter is for, of the name of a family or a shipped model, of a file or a folder.

    Raises UsageError (MODEL-UNKNOWN) for a name that is none of these.
    """
    from finitune.merging.adapterfile import Model
    from finitune.models import MODELS

    families = {family.name: family for family in MODELS}
    if name is None or name in families:
        return Model(families.get(name or ""))
    path = model_path(name)
    if not path.exists():
        raise UsageError(
            f"--model {name}: there is no such family, and no such file.{did_you_mean(name, [*families, *SHIPPED])}",
            code="MODEL-UNKNOWN",
            subject="--model",
            remedy=f"It is one of {', '.join((*families, *SHIPPED))}, or the path of a checkpoint.",
        )
    return Model.of(open_model(path))


def loads(reading: Reading) -> dict[str, str]:
    """The verdict of each program on a file: whether it loads it as it was meant."""
    from finitune.namings.loaders import where_it_loads

    return {one.loader: one.verdict.value for one in where_it_loads(reading)}


def loads_table(reading: Reading) -> Table:
    """The same for a person, with the reasons."""
    from finitune.namings.loaders import where_it_loads

    rows = tuple((one.loader, one.verdict.value, one.reason) for one in where_it_loads(reading))
    return Table("loads", ("program", "loads", "why"), rows)


def put_on(
    parts: AnimaParts,
    named: list[NamedAdapter],
    *,
    merge_first: bool,
    report: Report,
    answers: Answers | None = None,
) -> Worn:
    """Put adapters on a loaded Anima: attached to its layers, or, to `merge_first`, in its weights, then fp32.

    The findings about the files go to the report; `answers` decide what the files leave open. Raises AdapterError where
    one of them is an error, or where an adapter fits no module.
    """
    from finitune.adapters.layer import attach, merge
    from finitune.merging.adapterfile import Model, open_adapter
    from finitune.models.anima import ANIMA

    model = Model.loaded(ANIMA, parts)
    adapters: dict[str, dict[str, list[Strong]]] = {}
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
        root: nn.Module = getattr(parts, component)
        if merge_first:
            merge(root, sites)
        else:
            attach(root, sites)
            places[component] = {site: f"{site}.base" for site in sites}
    report.figures["adapted_sites"] = sum(map(len, adapters.values()))
    return Worn(places, receipts)
