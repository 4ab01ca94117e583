"""A checkpoint's tensors by their sites, whatever it calls its modules and however it cuts them into files.

A tensor that the family's tables know is found by its site, so that the original naming meets diffusers'; a weight
that one of them keeps fused (q, k and v) is met part by part. Any other tensor is found by its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from finitune.adapters.core import Shape
from finitune.errors import ModelError
from finitune.files.tensorfile import TensorFile
from finitune.merging.base_model import BaseTensorKey, MergeBase, build_unknown_model
from finitune.models import ModelSpec
from finitune.namings.core import SiteTarget
from finitune.namings.resolve import ModuleParameter, Resolver

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class CheckpointTensorSource:
    """Where a tensor lies: the file, its key there, and which part of it; `inputs` of the weight where it is fused.

    `folder` is the component whose folder the file lies in, '' for a file of its own.
    """

    file: TensorFile
    key: str
    landing: SiteTarget | None = None
    part: int = 0
    inputs: int = 0
    parameter: ModuleParameter | None = None
    folder: str = ""

    @property
    def component(self) -> str:
        """The component, or '' for a tensor that no table knows."""
        return self.landing.component if self.landing else ""

    @property
    def site(self) -> str:
        """Component and module, or '' for a tensor that no table knows."""
        return f"{self.landing.component}.{self.landing.sites[self.part]}" if self.landing else ""

    @property
    def name(self) -> str:
        """What the tensor is called in either naming; its folder and key where no table knows it."""
        if self.landing is None:
            return f"{self.folder}.{self.key}" if self.folder else self.key
        return f"{self.site}.{self.parameter}"


@dataclass
class PairableCheckpoint:
    """The tensors of one or several files by name; holds the last one read, for the parts that follow.

    `doubled` are the keys of tensors whose name another one had before.
    """

    sources: dict[str, CheckpointTensorSource]
    doubled: list[str]
    last: tuple[str, Tensor] | None = field(default=None, repr=False)

    def read(self, name: str) -> Tensor:
        """One tensor as diffusers has it: a part of a fused one, halves put right, inputs last."""
        source = self.sources[name]
        place = f"{source.file.path}:{source.key}"
        if self.last is None or self.last[0] != place:
            self.last = None  # before the next one is read: one at a time
            self.last = place, source.file.read(source.key)
        return select_source_part(self.last[1], source)


def select_source_part(tensor: Tensor, source: CheckpointTensorSource) -> Tensor:
    """The part of a checkpoint's tensor that a source is."""
    landing = source.landing
    if landing is None:
        return tensor
    if landing.transposed:
        tensor = tensor.t()
    if landing.swapped:
        tensor = torch.cat(tensor.chunk(2)[::-1])
    if len(landing.sites) == 1:
        return tensor
    return tensor.split(count_rows_by_site(landing, len(tensor), source.inputs))[source.part]


def count_rows_by_site(landing: SiteTarget, rows: int, inputs: int) -> list[int]:
    """How many of the rows of a tensor each of its sites has; `inputs` are those of the weight.

    Raises ModelError where they do not come out.
    """
    count = len(landing.sites)
    each = inputs if landing.division == "by-input" else rows // count
    counts = [each] * (count - 1)
    counts.append(rows - sum(counts))
    if count == 1 or (min(counts) > 0 and (landing.division == "by-input" or rows % count == 0)):
        return counts
    raise ModelError(
        f"the {rows} rows of a fused tensor are not those of {', '.join(landing.sites)}",
        code="MODEL-SHAPES",
        subject=landing.sites[0],
        evidence={"rows": rows, "inputs": inputs, "division": landing.division},
        remedy="The checkpoint is of another model, or this bias cannot be divided: use the unfused model.",
    )


def open_pairable_checkpoint(base: MergeBase) -> PairableCheckpoint:
    """The tensors of a model by the names that its resolver finds; of two that claim one name, the first."""
    sources: dict[str, CheckpointTensorSource] = {}
    doubled: list[str] = []
    for source in iterate_tensor_sources(base):
        if sources.setdefault(source.name, source) is not source:
            doubled.append(source.key)
    return PairableCheckpoint(sources, doubled)


def iterate_tensor_sources(base: MergeBase) -> Iterator[CheckpointTensorSource]:
    """What each tensor of a model is."""
    found = base.find_all_targets()
    widths = map_module_inputs(base, found)
    for key in base:
        file = base.files[key.file]
        if key not in found:
            yield CheckpointTensorSource(file, key.name, folder=key.file)
            continue
        landing, parameter = found[key]
        inputs = widths.get(identify_fused_module(landing), 0)
        for part in range(len(landing.sites)):
            yield CheckpointTensorSource(file, key.name, landing, part, inputs, parameter, key.file)


def map_module_inputs(
    base: MergeBase, found: Mapping[BaseTensorKey, tuple[SiteTarget, ModuleParameter]]
) -> dict[tuple[str, ...], int]:
    """{module: inputs of its weight}: a fused bias is divided by these too, and has none itself."""
    return {
        identify_fused_module(landing): base.shape(key)[0 if landing.transposed else 1]
        for key, (landing, parameter) in found.items()
        if parameter == "weight" and len(base.shape(key)) > 1
    }


def identify_fused_module(landing: SiteTarget) -> tuple[str, ...]:
    """A module of a checkpoint, by its component and sites."""
    return landing.component, *landing.sites


def read_weight_shapes(base: MergeBase) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a model by component and module, parts of fused ones apart; reads headers alone."""
    return {
        source.site: tuple(select_source_part(torch.empty(source.file.shapes[source.key], device="meta"), source).shape)
        for source in iterate_tensor_sources(base)
        if source.parameter == "weight"
    }


def find_model_spec(base: MergeBase) -> ModelSpec:
    """The family of a model; for one that no table knows, the modules that its own tensors name."""
    return base.family or build_unknown_model(base)


def assign_family(base: MergeBase, family: ModelSpec) -> MergeBase:
    """The same model, its tensors taken for those of `family`."""
    return base if family is base.family else replace(base, family=family, resolver=Resolver.of_model(family))


@dataclass(frozen=True)
class TargetModel:
    """The model that an adapter is for, as far as it is known: its family, its weights' shapes by component and site.

    `tensor` reads one of its tensors by site and parameter ("transformer.proj_out.weight"), any float dtype; None where
    it has none.
    """

    family: ModelSpec | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    tensor: Callable[[str], Tensor | None] = lambda name: None

    @classmethod
    def of(cls, base: MergeBase) -> TargetModel:
        """A model on disk, of its family or of its own modules; headers alone are read until a tensor is asked for."""
        family = find_model_spec(base)
        base = assign_family(base, family)
        checkpoint = open_pairable_checkpoint(base)

        def tensor(name: str) -> Tensor | None:
            return checkpoint.read(name) if name in checkpoint.sources else None

        return cls(family, read_weight_shapes(base), tensor)

    @classmethod
    def loaded(cls, family: ModelSpec, holder: object) -> TargetModel:
        """A model in memory, whose components are attributes of `holder`, a pipeline say."""
        tensors = {
            f"{component.name}.{name}": parameter
            for component in family.adapters.components
            for name, parameter in getattr(holder, component.name).named_parameters(remove_duplicate=False)
        }
        weights = {name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith(".weight")}
        return cls(family, {site: tuple(weight.shape) for site, weight in weights.items()}, tensors.get)

    def weight(self, site: str) -> Tensor | None:
        """The weight at a site."""
        return self.tensor(f"{site}.weight")

    def bias(self, site: str) -> Tensor | None:
        """The bias at a site."""
        return self.tensor(f"{site}.bias")
