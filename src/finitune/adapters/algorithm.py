"""What every algorithm must say about itself: its arithmetic, and the facts that readers, writers and programs ask for.

One file of this package and one line in ADAPTER_ALGORITHMS are all that an algorithm is; nothing else knows its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from finitune.adapters.core import (
    ALGORITHM_LOADS,
    ALGORITHM_NOT_KNOWN,
    AdapterProgram,
    AlphaMeaning,
    AmbiguityOptions,
    FileFacts,
    KeySuffix,
    ProgramSupport,
    RankMeaning,
    RolesByName,
    Shape,
    SiteAdapter,
    SupportByProgram,
    Target,
    TensorsByRole,
    is_same_weight_shape,
    make_misfit_error,
    make_roles_error,
)
from finitune.adapters.dropout import Dropout
from finitune.adapters.lowrank import TruncatedFactors, decompose_delta
from finitune.errors import AdapterError


class AdapterProducts(Protocol):
    """The products that a layer offers to its adapter: x is fp16 or fp32, results are fp32.

    `channels` is the axis of x that holds the channels: -1 for a Linear, 1 for a convolution.
    """

    groups: int
    channels: int

    def apply_spatial(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer's own map with another weight (n, in, *kernel): for a convolution, its stride and padding.

        Kernel axes of length 1 may be missing from that weight, or be there for a Linear.
        """
        ...

    def apply_pointwise(self, x: Tensor, weight: Tensor) -> Tensor:
        """Channels alone: x (..., c) of a Linear or (N, c, ...) of a convolution by weight (n, c)."""
        ...


class AdapterForm(ABC):
    """What files have at a module: the facts that reading one needs, and how programs treat it.

    An algorithm is one; so is what is read as another algorithm because it cannot be computed with as it stands.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """As the field writes it, for people."""
    suffixes: ClassVar[tuple[KeySuffix, ...]]
    """How files spell its roles, those that only files have among them."""
    programs: ClassVar[SupportByProgram]
    """How programs treat it; of those that are left out it is not known."""
    field_names: ClassVar[tuple[str, ...]] = ()
    """What trainers and their configurations call it: sd-scripts' module, LyCORIS's algo, in lower case."""

    def has_shapes(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether shapes by role can be its, where other forms spell their roles alike."""
        return True

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        """How many inputs a Linear's weight has, as the shapes by role of the file tell; None where they do not."""
        return None

    def support(self, program: AdapterProgram, adapters: Sequence[SiteAdapter], family: str) -> ProgramSupport:
        """What a program makes of adapters of this form, for a model family by name ("" where that is not known)."""
        stated = self.programs.get(program, ALGORITHM_NOT_KNOWN)
        return ALGORITHM_LOADS if family in stated.families else stated


class AdapterAlgorithm(AdapterForm):
    """One way to adapt a weight. `base` is fp32 or fp64 and decides the arithmetic; results have its dtype and shape.

    Implementations hold no state: everything is in the SiteAdapter.
    """

    additive: ClassVar[bool]
    """Whether W(1) - W does not depend on W."""
    roles: ClassVar[RolesByName]
    """Its tensors by role. Beside them every algorithm may have `diff_b`, a change of the bias as it is."""
    terms: ClassVar[tuple[frozenset[str], ...]]
    """What the change is a sum of: each term is a product, and vanishes with any of its tensors; empty where zeros do
    not tell that nothing changes."""
    rowwise: ClassVar[bool]
    """Whether each row of the change depends on the same row of the weight and of the row roles alone, one for one."""
    factored: ClassVar[bool]
    """Whether its change is known as a product of two thin matrices without being formed: see `factorize`."""
    rank_means: ClassVar[RankMeaning]
    alpha_means: ClassVar[AlphaMeaning]
    trainable: ClassVar[bool]
    """Whether training offers it."""
    options: ClassVar[tuple[str, ...]]
    """The options that a new one takes, by the names that the configuration has for them."""
    bias_role: ClassVar[str] = "diff_b"
    """The role of a change of the bias."""
    pairs: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Left and right factors that may be put beside and below each other, for a sum of the ranks."""
    flat_kernel: ClassVar[bool] = False
    """Whether the shape's second axis may hold the kernel, too."""
    drops_inside: ClassVar[bool] = False
    """Whether dropout falls on what is between its factors, and not on the input and the outputs of its change."""
    weight_sized: ClassVar[bool] = False
    """Whether its tensors are as large as the weight, so that they are read from a file when they are needed."""
    kohya_network: ClassVar[str] = ""
    """sd-scripts' network module that trains it."""
    lycoris_algo: ClassVar[str] = ""
    """LyCORIS's name of it, where it has it."""
    companion: ClassVar[bool] = False
    """Whether files have it beside another algorithm, which names the file's network then."""
    peft_type: ClassVar[str] = ""
    """PEFT's name of it, where we write PEFT's files of it."""

    @property
    def required(self) -> frozenset[str]:
        return frozenset(name for name, role in self.roles.items() if not role.optional)

    def roles_where(self, **traits: object) -> tuple[str, ...]:
        return tuple(
            name for name, role in self.roles.items() if all(getattr(role, t) == value for t, value in traits.items())
        )

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

    def draw_shared(self, shapes: Sequence[Shape], target: Target) -> dict[str, Tensor]:
        """The tensors that new adapters of weights of these shapes have in common, by role."""
        return {}

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

    def merged_weight(self, adapter: SiteAdapter, base: Tensor, factor: float) -> Tensor:
        """W + factor * (W(1) - W), magnitude left out, for a Linear's weight that it is known to fit; a new tensor."""
        return torch.add(base, self.delta(adapter, base), alpha=factor)

    def factor_gradients(self, adapter: SiteAdapter, x: Tensor, grad: Tensor) -> Mapping[str, Tensor] | None:
        """The gradients, by role, of the sum of grad * (x through W(1) - W), magnitude left out, by the factors alone.

        `x` is (rows, in) and `grad` (rows, out) of a Linear, in fp32 or fp64. None where grad.T @ x is no dearer.
        """
        return None

    def factorize(self, adapter: SiteAdapter, shape: Shape, rank: int | None) -> TruncatedFactors:
        """Balanced fp32 factors (out, r) and (r, in * kernel) of an additive change, scale in, magnitude left out.

        r is at most `rank`; None keeps all that is more than rounding.
        """
        return decompose_delta(self.delta(adapter, torch.zeros(shape, dtype=torch.float64)).flatten(1), rank=rank)

    def product_bound(self, tensors: TensorsByRole) -> float | None:
        """A bound on the numbers of the product of the factors before it is scaled, as programs in fp16 form it.

        None where they form none; inf where only the product itself tells.
        """
        return None

    def row_norms(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        """The Euclidean norms (out) of the rows of W + dW, kernels included, in the dtype of `base`."""
        return torch.linalg.vector_norm((base + self.delta(adapter, base)).flatten(1), dim=1)

    def is_zero(self, adapter: SiteAdapter, zero: Set[str]) -> bool:
        """Whether it leaves every weight as it is, for the roles that are all zeros; False where that is not known."""
        present = [term & adapter.tensors.keys() for term in (*self.terms, frozenset({"diff_b"}))]
        return bool(self.terms) and all(term & zero for term in present if term)

    def row_axes(self, adapter: SiteAdapter) -> dict[str, int]:
        """The roles that hold rows of the weight, or blocks of them, and along which axis; `diff_b` left out."""
        axes = {name: role.row_axis for name, role in self.roles.items()}
        return {name: axis for name, axis in axes.items() if axis is not None and name in adapter.tensors}

    def count_rows(self, adapter: SiteAdapter) -> int | None:
        """How many rows the weight has; None where the tensors cannot tell."""
        shape = self.shape(adapter)
        bias = adapter.tensors.get("diff_b")
        return shape[0] if shape is not None else None if bias is None else bias.shape[0]

    def acts_on_inputs(self, adapter: SiteAdapter) -> bool:
        """Whether it turns or scales the inputs alone, so that all parts of a fused weight have the same one."""
        return False

    def can_stack(self, parts: Sequence[SiteAdapter | None]) -> bool:
        """Whether parts, one below the other, are one adapter: no number holds for all rows together, and zeros change
        nothing in the rows of a part that has none (None)."""
        return True

    def can_cut(self, adapter: SiteAdapter) -> bool:
        """Whether rows of it are an adapter of the same algorithm."""
        return bool(self.row_axes(adapter)) or not adapter.tensors.keys() - {"diff_b"}

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        """The second axis of the weight, where all roles are there."""
        if not self.required or not self.required <= shapes.keys():
            return None
        own = {role: torch.empty(shape, device="meta") for role, shape in shapes.items() if role in self.roles}
        try:
            implied = self.shape(SiteAdapter(self.name, own))
        except (AdapterError, IndexError):
            return None
        return implied[1] if implied is not None and len(implied) > 1 else None

    def detect_convention(
        self, modules: Sequence[tuple[Mapping[str, Shape], Shape | None]], options: AmbiguityOptions
    ) -> str:
        """What holds for all modules of a file: of each the shapes by role are given, and the weight's where known."""
        return ""

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        """The adapter of a module's tensors, by the roles that files have; without alpha and magnitude.

        Raises AdapterError where they cannot be meant.
        """
        return SiteAdapter(self.name, tensors)

    def to_file(self, adapter: SiteAdapter) -> dict[str, Tensor]:
        """What a file that keeps alpha in tensors has beside the factors and their alpha, by the roles of files."""
        return {}

    def stored_alpha(self, adapter: SiteAdapter) -> float | None:
        """What the alpha tensor says; where none was stated the rank: left out, some programs would take 1."""
        return self.rank(adapter) if adapter.alpha is None else adapter.alpha

    def peft_config(self, adapters: Mapping[str, SiteAdapter]) -> dict[str, Any]:
        """PEFT's configuration of these modules of one model but for their names; asked of those with a `peft_type`."""
        raise NotImplementedError

    def missing(self, present: Set[str]) -> Set[str]:
        """The roles that must join those present."""
        return self.required - present

    def extra(self, present: Set[str]) -> Set[str]:
        """The roles that must not be among those present."""
        return present - self.roles.keys() - {"diff_b"}

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
