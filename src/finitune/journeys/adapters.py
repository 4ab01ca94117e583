"""Adapter files as commands name them, and adapters on a loaded model: attached to its layers, or in its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.errors import AdapterError
from finitune.report import Level, Report

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finitune.adapters.weight import Strong
    from finitune.models.anima.load import AnimaParts
    from finitune.models.spec import ModelSpec
    from finitune.namings.core import Answers, Reading

PEFT_TENSORS = "adapter_model.safetensors"
HOLDING_BITS = 1.0
"""Bits of headroom that a plan must keep when an adapter it was not made for is attached."""


@dataclass(frozen=True, kw_only=True)
class Doubts:
    """Answers to what an adapter file may leave open; the findings that ask for one name its option."""

    dora_side: Literal["out", "in"] | None = None
    glora_order: Literal["new", "old"] | None = None
    zero_alpha: Literal["rank", "zero"] | None = None

    def answers(self) -> Answers:
        """The same for the reader."""
        from finitune.namings.core import Answers

        return Answers(self.dora_side, self.glora_order, self.zero_alpha)


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
        return self.path / PEFT_TENSORS if self.path.is_dir() else self.path


@dataclass(frozen=True)
class Worn:
    """What was put on a model: strengths by site and component, where attached layers went, and what receipts say."""

    adapters: Mapping[str, Mapping[str, list[Strong]]]
    places: Mapping[str, Mapping[str, str]]
    receipts: list[dict[str, object]]


def put_on(parts: AnimaParts, named: list[NamedAdapter], *, merge_first: bool, report: Report) -> Worn:
    """Put adapters on a loaded Anima: attached to its layers, or, to `merge_first`, in its weights, then fp32.

    The findings about the files go to the report. Raises AdapterError where one of them is an error, or where an
    adapter fits no module.
    """
    from finitune.adapters.layer import attach, merge
    from finitune.files.tensorfile import TensorFile
    from finitune.models.anima import ANIMA

    adapters: dict[str, dict[str, list[Strong]]] = {}
    receipts: list[dict[str, object]] = []
    for one in named:
        reading = open_reading(one.file, ANIMA, report, parts)
        for site, adapter in reading.adapter.sites.items():
            component, _, module = site.partition(".")
            adapters.setdefault(component, {}).setdefault(module, []).append((adapter, one.strength))
        fingerprint = TensorFile(one.file).fingerprint()
        receipts.append({"file": one.path.name, "strength": one.strength, "fingerprint": fingerprint})
    places: dict[str, dict[str, str]] = {}
    for component, sites in adapters.items():
        root: nn.Module = getattr(parts, component)
        if merge_first:
            merge(root, sites)
        else:
            attach(root, sites)
            places[component] = {site: f"{site}.base" for site in sites}
    report.figures["adapted_sites"] = sum(map(len, adapters.values()))
    return Worn(adapters, places, receipts)


def open_reading(file: Path, model: ModelSpec | None, report: Report, parts: AnimaParts | None = None) -> Reading:
    """An adapter file of which every tensor is accounted for; its findings go to the report, errors are raised."""
    from finitune.files.tensorfile import TensorFile
    from finitune.namings.read import read_adapter

    weights = {} if parts is None else loaded_weights(parts, model)
    shapes = {site: tuple(weight.shape) for site, weight in weights.items()}
    reading = read_adapter(TensorFile(file), model, shapes=shapes, weight_of=weights.get)
    report.findings.extend(reading.findings)
    errors = [finding for finding in reading.findings if finding.level is Level.ERROR]
    if errors or not len(reading.adapter):
        raise AdapterError(
            f"{file} cannot be used: {len(errors)} errors, {len(reading.left_out)} tensors without use",
            code="ADAPTER-REFUSED",
            subject=str(file),
            evidence={"errors": len(errors), "left_out": len(reading.left_out), "sites": len(reading.adapter)},
            remedy=f"See all that is wrong with it: finitune check {file}",
        )
    return reading


def loaded_weights(parts: AnimaParts, model: ModelSpec | None) -> dict[str, Tensor]:
    """Every weight of a loaded model, by component and module."""
    components = [] if model is None else [component.name for component in model.adapters.components]
    return {
        f"{component}.{name}": weight
        for component in components
        for name, module in getattr(parts, component).named_modules()
        if (weight := getattr(module, "weight", None)) is not None
    }
