"""An adapter free of any file's naming, and what every algorithm must say about itself.

One rule for strength, for every algorithm: W(m) = W + m * (W(1) - W). So m = 0 is the base bit for bit and m = 1 is
what was trained. For the additive algorithms that is W + m * dW; for the others it is the straight line between the
two weights (as ComfyUI blends DoRA), not a strength applied somewhere inside of a formula.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from finitune.adapters.dropout import Dropout
from finitune.errors import AdapterError

Shape = tuple[int, ...]
TensorsByRole = Mapping[str, Tensor]
MagnitudeSide = Literal["out", "in"]


@dataclass(frozen=True)
class Magnitude:
    """DoRA's magnitudes: one per output or per input of the weight, and the norm that they are divided by.

    `norm_of` "adapted" divides by the norms of W + dW (the paper's rule), "base" by those of W. `eps` is added to
    the norm.
    """

    tensor: Tensor
    side: MagnitudeSide = "out"
    norm_of: Literal["adapted", "base"] = "adapted"
    eps: float = 0.0


@dataclass(frozen=True)
class SiteAdapter:
    """What one module gets: an algorithm, its tensors by role, and the scale as it was stated.

    `alpha` is exact and apart from the rank; None means that none was stated, and the scale is 1. With
    `rank_stabilised` the scale is alpha / sqrt(rank). `options` hold what an algorithm needs beside tensors, such as
    a rotation's constraint; `reshape` lets the weight have more inputs than the model's, which is zero there (a control
    adapter reads a second picture). Roles that every algorithm may have: `diff_b`, added to the bias as it is.
    """

    algorithm: str
    tensors: TensorsByRole
    alpha: float | None = None
    rank_stabilised: bool = False
    magnitude: Magnitude | None = None
    options: Mapping[str, float | bool | str] = field(default_factory=dict)

    def with_tensors(self, **tensors: Tensor) -> SiteAdapter:
        """The same with some tensors exchanged or added."""
        return replace(self, tensors={**self.tensors, **tensors})


@dataclass(frozen=True)
class AdapterSet:
    """{site: adapter}; a site is the component and the dotted module name as diffusers spells it, with a dot between.

    `embeddings` are learned token vectors that came bundled, by their own names: kept, not part of the algebra.
    """

    sites: Mapping[str, SiteAdapter]
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, site: str) -> SiteAdapter:
        return self.sites[site]

    def component(self, name: str) -> dict[str, SiteAdapter]:
        """The adapters of one component, by module name."""
        return {s.partition(".")[2]: a for s, a in self.sites.items() if s.partition(".")[0] == name}


@dataclass(frozen=True)
class Target:
    """What a new adapter is made for: the base weight, and the shape of its work."""

    weight: Tensor
    rank: int = 4
    alpha: float | None = None
    options: Mapping[str, float | bool | str] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return tuple(self.weight.shape)


class AdapterProducts(Protocol):
    """The products that a layer offers to its adapter: x is fp16 or fp32, results are fp32.

    `channels` is the axis of x that holds the channels: -1 for a Linear, 1 for a convolution.
    """

    groups: int
    channels: int

    def walk(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer's own map with another weight (n, in, *kernel): for a convolution, its stride and padding.

        Kernel axes of length 1 may be missing from that weight, or be there for a Linear.
        """
        ...

    def mix(self, x: Tensor, weight: Tensor) -> Tensor:
        """Channels alone: x (..., c) of a Linear or (N, c, ...) of a convolution by weight (n, c)."""
        ...


class AdapterAlgorithm(ABC):
    """One way to adapt a weight. `base` is fp32 or fp64 and decides the arithmetic; results have its dtype and shape.

    Implementations hold no state: everything is in the SiteAdapter.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """As the field writes it, for people."""
    additive: ClassVar[bool] = True
    """Whether W(1) - W does not depend on W."""
    required: ClassVar[frozenset[str]]
    """Roles that must be there."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Roles that may be there, beside `diff_b`."""
    flat_kernel: ClassVar[bool] = False
    """Whether the shape's second axis may hold the kernel, too."""
    drops_inside: ClassVar[bool] = False
    """Whether dropout falls on what is between its factors, and not on the input and the outputs of its change."""

    @abstractmethod
    def shape(self, adapter: SiteAdapter) -> Shape | None:
        """The weight's shape as the tensors imply it (1x1 kernels may be left out), or None where they cannot tell.

        Raises AdapterError (ADAPTER-SHAPES) where the tensors contradict each other.
        """

    @abstractmethod
    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """A new adapter in fp32 that changes nothing yet: weight(base) is the base bit for bit."""

    @abstractmethod
    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        """W(1) - W, scale included, magnitude left out; in the dtype and shape of `base`."""

    def rank(self, adapter: SiteAdapter) -> int | None:
        """The number that alpha is divided by; None where the algorithm has none, and the scale is 1."""
        return None

    def scale(self, adapter: SiteAdapter) -> float:
        """alpha / rank, or alpha / sqrt(rank), in fp64; 1 where no alpha was stated or there is no rank."""
        rank = self.rank(adapter)
        if adapter.alpha is None or rank is None:
            return 1.0
        return adapter.alpha / (math.sqrt(rank) if adapter.rank_stabilised else rank)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        """b(1) - b for the base's bias (None where the base has none), or None where the bias stays."""
        return adapter.tensors.get("diff_b")

    def forward(
        self,
        adapter: SiteAdapter,
        x: Tensor,
        products: AdapterProducts,
        factor: float = 1.0,
        dropping: Dropout | None = None,
    ) -> Tensor | None:
        """factor * (x through W(1) - W) by products with the factors alone, magnitude left out, in fp32.

        None where there is no cheaper way. `dropping` is for those that drop inside.
        """
        return None

    def onto(self, adapter: SiteAdapter, base: Tensor, factor: float) -> Tensor:
        """W + factor * (W(1) - W), magnitude left out, for a Linear's weight that it is known to fit; a new tensor."""
        return torch.add(base, self.delta(adapter, base), alpha=factor)

    def pull(self, adapter: SiteAdapter, x: Tensor, grad: Tensor) -> Mapping[str, Tensor] | None:
        """The gradients, by role, of the sum of grad * (x through W(1) - W), magnitude left out, by the factors alone.

        `x` is (rows, in) and `grad` (rows, out) of a Linear, in fp32 or fp64. None where grad.T @ x is no dearer.
        """
        return None

    def row_norms(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        """The Euclidean norms (out) of the rows of W + dW, kernels included, in the dtype of `base`."""
        return torch.linalg.vector_norm((base + self.delta(adapter, base)).flatten(1), dim=1)

    def missing(self, present: Set[str]) -> Set[str]:
        """The roles that must join those present."""
        return self.required - present

    def extra(self, present: Set[str]) -> Set[str]:
        """The roles that must not be among those present."""
        return present - self.required - self.optional - {"diff_b"}

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        """Raise AdapterError for missing or surplus roles, and for shapes that fit neither each other nor `shape`."""
        present = set(adapter.tensors)
        missing, extra = self.missing(present), self.extra(present)
        if missing or extra:
            raise make_roles_error(self, present, missing, extra)
        implied = self.shape(adapter)
        if implied is not None and shape is not None and not self.fits(adapter, implied, shape):
            raise make_misfit_error(f"{self.title} factors make a weight of", implied, shape)
        bias = adapter.tensors.get("diff_b")
        if bias is not None and shape is not None and tuple(bias.shape) != shape[:1]:
            raise make_misfit_error("there is a change for a bias of", tuple(bias.shape), shape[:1])

    def fits(self, adapter: SiteAdapter, implied: Shape, shape: Shape) -> bool:
        """Whether a weight of the implied shape can be added to one of `shape`."""
        if self.flat_kernel and len(implied) == 2:
            shape = (shape[0], math.prod(shape[1:]))
        elif self.widens(adapter) and len(implied) > 1 and implied[1] >= shape[1]:
            shape = (shape[0], implied[1], *shape[2:])
        return is_same_weight_shape(implied, shape)

    def widens(self, adapter: SiteAdapter) -> bool:
        """Whether its weight may have more inputs than the model's."""
        return bool(adapter.options.get("reshape")) and not self.flat_kernel


def is_same_weight_shape(a: Shape, b: Shape) -> bool:
    """Whether two weight shapes differ only in trailing kernel axes of length 1: Linear and 1x1 convolution."""
    short, long = sorted((a, b), key=len)
    return long[: len(short)] == short and all(n == 1 for n in long[len(short) :])


def get_factor_shapes(adapter: SiteAdapter) -> dict[str, Shape]:
    """The shape of each tensor, by role."""
    return {role: tuple(tensor.shape) for role, tensor in adapter.tensors.items()}


def make_misfit_error(what: str, implied: Shape, shape: Shape) -> AdapterError:
    """The error for an adapter on a module of another size."""
    return AdapterError(
        f"{what} {list(implied)}; the model has {list(shape)} there",
        code="ADAPTER-DOES-NOT-FIT",
        evidence={"adapter": list(implied), "model": list(shape)},
        remedy="The adapter was made for another model, or another size of it. Name that one.",
    )


def make_roles_error(
    algorithm: AdapterAlgorithm, present: Set[str], missing: Set[str], extra: Set[str]
) -> AdapterError:
    """The error for a site whose tensors are not those of its algorithm."""
    parts = [f"{what} {', '.join(sorted(roles))}" for what, roles in (("lacks", missing), ("has also", extra)) if roles]
    return AdapterError(
        f"a {algorithm.title} {' and '.join(parts)}",
        code="ADAPTER-ROLES",
        evidence={"present": sorted(present), "missing": sorted(missing), "extra": sorted(extra)},
        remedy="The file is incomplete, or mixes two algorithms at one module. Export it again.",
    )


def make_shapes_error(algorithm: AdapterAlgorithm, adapter: SiteAdapter, why: str) -> AdapterError:
    """The error for tensors whose shapes contradict each other."""
    shapes = {role: list(shape) for role, shape in get_factor_shapes(adapter).items()}
    return AdapterError(
        f"the tensors of a {algorithm.title} contradict each other: {why}",
        code="ADAPTER-SHAPES",
        evidence={"shapes": shapes},
        remedy="The file is damaged, or was split or renamed by a faulty program. Export it again.",
    )


def make_magnitude_error(magnitude: Magnitude, shape: Shape) -> AdapterError:
    """The error for DoRA magnitudes that are not one per output, or per input, of the weight."""
    return AdapterError(
        f"{magnitude.tensor.numel()} magnitudes on the {magnitude.side}put side of a weight of {list(shape)}",
        code="ADAPTER-DORA",
        evidence={"magnitudes": list(magnitude.tensor.shape), "side": magnitude.side, "weight": list(shape)},
        remedy="The magnitudes are of the other side, or of another module: check the file's convention.",
    )


def make_not_additive_error(algorithm: AdapterAlgorithm) -> AdapterError:
    """The error for DoRA magnitudes over an algorithm that they have no meaning for."""
    return AdapterError(
        f"a magnitude (DoRA) over {algorithm.title}, which is not additive, has no meaning",
        code="ADAPTER-DORA",
        evidence={"algorithm": algorithm.name},
        remedy="Drop the magnitude if it was written by mistake, or export the adapter again.",
    )
