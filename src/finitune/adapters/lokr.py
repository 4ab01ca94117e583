"""LoKr: dW = s * kron(w1, w2), either factor full or of low rank; a kernel belongs to w2.

Sources: Yeh et al. 2023 (arXiv 2309.14859), section 3.3; for the split of the axes, the rank that divides alpha, and
initial values, LyCORIS modules/lokr.py. There alpha counts only where a factor is decomposed. PEFT divides it by its
configured rank in any case: state that rank as options={"rank": r}.

A stretch of the rows of a Kronecker product is no Kronecker product, unless it begins and ends with rows of w1. So a
module that is a part of a fused weight has the factors of the whole and the options {"first_row": a, "rows": n}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm, AdapterProducts
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    FactorRole,
    LoadVerdict,
    ProgramSupport,
    RolesByName,
    Shape,
    SiteAdapter,
    SupportByProgram,
    Target,
    TensorsByRole,
    get_factor_shapes,
    make_shapes_error,
    spell_in_kohya_and_peft,
)
from finitune.adapters.dropout import Dropout
from finitune.adapters.loha import FACTOR_NUMBERS, compute_low_rank_weight, infer_low_rank_shape
from finitune.adapters.lowrank import (
    Spectrum,
    TruncatedFactors,
    bound_product,
    require_finite_matrices,
    truncate_factors,
)

_SINGULAR_VALUE_NOISE = 2.0**-45
"""Singular values under this share of the largest are the rounding of fp64: of a factor of low rank, most are."""

ROW_RANGE_OPTIONS = frozenset({"first_row", "rows"})
"""The options by which an adapter is only some rows of its Kronecker product."""


class LoKr(AdapterAlgorithm):
    """`w1` (j, m), or `w1_a` (j, r) and `w1_b` (r, m), by `w2` (k, n, *kernel), or `w2_a` (k, r) and
    `w2_b` (r, n * kernel), or `t2` (r, r, *kernel), `w2_a` (r, k) and `w2_b` (r, n): a weight (j * k, m * n, *kernel).

    How far the axes are split, and which factor is the larger, follows from the shapes alone. A new one takes the
    options `factor`, `decompose_both`, `full_matrix`, `unbalanced` and `use_tucker`, as LyCORIS means them. With the
    options `first_row` and `rows` it is those rows of the product alone.
    """

    name = "lokr"
    title = "LoKr"
    additive = factored = trainable = flat_kernel = True
    rowwise = False
    roles: ClassVar[RolesByName] = {
        "w1": FactorRole(optional=True, row_axis=0, scaled=True, up=True),
        "w1_a": FactorRole(optional=True, row_axis=0, scaled=True, up=True),
        **dict.fromkeys(("w1_b", "w2", "w2_a", "w2_b"), FactorRole(optional=True)),
        "t2": FactorRole(optional=True, core=True),
    }
    terms = (frozenset(roles),)
    rank_means, alpha_means = "at most", "scale"
    options = ("factor", "full_matrix", "decompose_both", "unbalanced", "use_tucker")
    kohya_network, lycoris_algo = "networks.lokr", "lokr"
    field_names = ("lokr",)
    suffixes = tuple(spell_in_kohya_and_peft("lokr", *roles))
    programs: ClassVar[SupportByProgram] = {
        "diffusers": ProgramSupport(
            LoadVerdict.NO,
            "for this model its converter knows LoRA alone: convert with --as lora",
            families=("flux2", "z_image"),
        ),
        **dict.fromkeys(("PEFT", "ComfyUI", "A1111", "Forge", "sd-scripts"), ALGORITHM_LOADS),
    }

    def missing(self, present: Set[str]) -> Set[str]:
        lacking: set[str] = set()
        for full, *factors in (("w1", "w1_a", "w1_b"), ("w2", "w2_a", "w2_b")):
            if full not in present:
                lacking |= set(factors) - present if present & {*factors} else {full}
        return lacking

    def extra(self, present: Set[str]) -> Set[str]:
        surplus = set(super().extra(present))
        for full, *factors in (("w1", "w1_a", "w1_b"), ("w2", "w2_a", "w2_b", "t2")):
            if full in present:
                surplus |= present & {*factors}
        return surplus

    def rank(self, adapter: SiteAdapter) -> int | None:
        for role in ("w2_b", "w1_b"):
            if role in adapter.tensors:
                return adapter.tensors[role].shape[0]
        stated = adapter.options.get("rank")
        return None if stated is None else int(stated)

    def shape(self, adapter: SiteAdapter) -> Shape:
        shapes = get_factor_shapes(adapter)
        first, second = infer_factor_shape(shapes, "1"), infer_factor_shape(shapes, "2")
        if first is None or second is None or math.prod(first[2:]) != 1:
            raise make_shapes_error(self, adapter, "they do not chain to two factors")
        rows = first[0] * second[0]
        begin, end = get_row_range(adapter) or (0, rows)
        if not 0 <= begin < end <= rows:
            raise make_shapes_error(self, adapter, f"rows {begin} to {end} are not among the {rows} of their product")
        return (end - begin, first[1] * second[1], *second[2:])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        tensors = {role: torch.zeros(shape) for role, shape in choose_factor_shapes(target).items()}
        zero = "w2" if "w2" in tensors else "w2_b"
        for role, tensor in tensors.items():
            if role != zero:
                torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        return SiteAdapter(self.name, tensors, target.alpha)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        needed, rows = trim_to_row_range(adapter)
        tensors = {role: tensor.to(base.dtype) for role, tensor in needed.items()}
        first, second = compute_lokr_factor(tensors, "1"), compute_lokr_factor(tensors, "2")
        second = second.reshape(second.shape[0], -1, *base.shape[2:])
        kron = torch.einsum("j m, k n ... -> j k m n ...", first.flatten(1), second)
        return self.scale(adapter) * kron.flatten(0, 1)[rows].reshape(base.shape)

    def forward(
        self,
        adapter: SiteAdapter,
        x: Tensor,
        products: AdapterProducts,
        factor: float = 1.0,
        dropping: Dropout | None = None,
    ) -> Tensor | None:
        """For a Linear, with x seen as (..., m, n): w2 along n and w1 along m, the cheaper order; no kron is made."""
        if products.channels != -1:
            return None
        tensors, rows = trim_to_row_range(adapter)
        along_m, along_n = list_factor_matrices(tensors, "1"), list_factor_matrices(tensors, "2")
        (j, m), (k, n) = ((weights[-1].shape[0], weights[0].shape[1]) for weights in (along_m, along_n))
        factor *= self.scale(adapter)
        y = x.unflatten(-1, (m, n))
        m_first = j * n * (m + k) < m * k * (n + j)
        for axis in (-2, -1) if m_first else (-1, -2):
            y = y.transpose(-1, axis)
            for weight in along_m if axis == -2 else along_n:
                y = products.apply_pointwise(y, weight)
            y = y.transpose(-1, axis)
        y = y.flatten(-2)[..., rows]
        return y if factor == 1 else y * factor

    def factor_gradients(self, adapter: SiteAdapter, x: Tensor, grad: Tensor) -> Mapping[str, Tensor] | None:
        """With x as (m, rows * n) and grad as (j, rows * k): d w1 = s * (grad w2) x^T, d w2 = s * grad^T (w1 x)."""
        tensors = adapter.tensors
        if "t2" in tensors or get_row_range(adapter) is not None:
            return None
        first, second = (compute_lokr_factor(tensors, which).flatten(1) for which in ("1", "2"))
        (j, m), (k, n) = first.shape, second.shape
        x, grad = (t.view(len(t), a, -1).transpose(0, 1).reshape(a, -1) for t, a in ((x, m), (grad, j)))
        of_first = (grad.view(-1, k) @ second).view(j, -1) @ x.t()
        of_second = grad.view(-1, k).t() @ (first @ x).view(-1, n)
        scale = self.scale(adapter)
        return {
            **split_factor_gradient(tensors, "1", scale * of_first),
            **split_factor_gradient(tensors, "2", scale * of_second),
        }

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        factors: list[Shape] = [shapes.get(f"w{n}") or shapes.get(f"w{n}_b") or () for n in FACTOR_NUMBERS]
        known = "t2" not in shapes and all(len(factor) >= 2 for factor in factors)
        return math.prod(factor[1] for factor in factors) if known else None

    def row_axes(self, adapter: SiteAdapter) -> dict[str, int]:
        """None of a stretch of rows, which has the factors of the whole."""
        return super().row_axes(adapter) if get_row_range(adapter) is None else {}

    def stored_alpha(self, adapter: SiteAdapter) -> float | None:
        """1 without a rank: LyCORIS cannot load without an alpha, and nothing is changed by it."""
        alpha = super().stored_alpha(adapter)
        return 1.0 if alpha is None else alpha

    def factorize(self, adapter: SiteAdapter, shape: Shape, rank: int | None) -> TruncatedFactors:
        """By the factors' own; of some rows, by those rows of the vectors on the left."""
        (tensors, rows), scale = trim_to_row_range(adapter), self.scale(adapter)
        if get_row_range(adapter) is None:
            return compute_kronecker_svd(tensors, scale, rank).factors(rank, None)
        whole = compute_kronecker_svd(tensors, scale, None)  # what is largest in some rows need not be in all of them
        kept = max(1, int((whole.values > _SINGULAR_VALUE_NOISE * whole.values[0]).sum()))
        return truncate_factors((whole.u[:, :kept] * whole.values[:kept])[rows], whole.vh[:kept], rank=rank)

    def product_bound(self, tensors: TensorsByRole) -> float | None:
        if "t2" in tensors:
            return math.inf
        halves = (f"w{which}" for which in FACTOR_NUMBERS)
        return math.prod(
            float(tensors[half].float().abs().max())
            if half in tensors
            else bound_product(tensors[f"{half}_a"], tensors[f"{half}_b"])
            for half in halves
        )


def compute_kronecker_svd(tensors: TensorsByRole, scale: float, rank: int | None) -> Spectrum:
    """The largest `rank` singular values of a LoKr's change with their vectors, in fp64, from those of its factors.

    The singular values of a Kronecker product are the products of those of the factors, and so are the vectors: no
    matrix larger than a factor is decomposed.
    """
    tensors = {role: tensor.double() for role, tensor in tensors.items()}
    first, second = (compute_lokr_factor(tensors, which).flatten(1) for which in FACTOR_NUMBERS)
    require_finite_matrices(first, second)
    (u1, s1, vh1), (u2, s2, vh2) = (torch.linalg.svd(m, full_matrices=False) for m in (first, second))
    values, order = torch.sort(abs(scale) * torch.outer(s1, s2).flatten(), descending=True)
    kept = order if rank is None else order[:rank]
    a, b = kept // len(s2), kept % len(s2)
    u = torch.einsum("l r, k r -> l k r", u1[:, a], u2[:, b]).flatten(0, 1) * math.copysign(1, scale)
    vh = torch.einsum("r m, r n -> r m n", vh1[a], vh2[b]).flatten(1)
    return Spectrum(u, values[: len(kept)], vh, float(values[len(kept) :].square().sum()))


def get_row_range(adapter: SiteAdapter) -> tuple[int, int] | None:
    """The rows [begin, end) of the Kronecker product that the adapter is; None where it is the whole."""
    if not adapter.options.keys() & ROW_RANGE_OPTIONS:
        return None
    begin, count = (int(adapter.options.get(option, 0)) for option in ("first_row", "rows"))
    return begin, begin + count


def restrict_to_rows(adapter: SiteAdapter, begin: int, end: int) -> SiteAdapter:
    """The rows [begin, end) of a whole LoKr, in the same tensors; what belongs to rows beside them is not touched."""
    return replace(adapter, options={**adapter.options, "first_row": begin, "rows": end - begin})


def trim_to_row_range(adapter: SiteAdapter) -> tuple[TensorsByRole, slice]:
    """The tensors with only those rows of the first factor that the adapter needs, and its rows of their product."""
    stretch, tensors = get_row_range(adapter), adapter.tensors
    if stretch is None:
        return tensors, slice(None)
    (begin, end), height = stretch, count_block_rows(adapter)
    first, last = begin // height, -(-end // height)
    above = first * height
    role = "w1" if "w1" in tensors else "w1_a"
    return {**tensors, role: tensors[role][first:last]}, slice(begin - above, end - above)


def count_block_rows(adapter: SiteAdapter) -> int:
    """How many rows of the weight one row of the first factor makes: the rows of the second."""
    if "w2" in adapter.tensors:
        return adapter.tensors["w2"].shape[0]
    return adapter.tensors["w2_a"].shape[1 if "t2" in adapter.tensors else 0]


def split_dimension(dimension: int, factor: int) -> tuple[int, int]:
    """`dimension` as a product (m, n) with m <= n, m being `factor` where that divides it.

    Else m is the largest divisor up to `factor` that the search for the most square pair passes; -1 sets no limit.
    As LyCORIS functional/general.py splits, so that its files and ours have the same shapes.
    """
    if factor > 0 and dimension % factor == 0:
        return min(factor, dimension // factor), max(factor, dimension // factor)
    limit = math.isqrt(dimension) if factor < 0 else min(factor, math.isqrt(dimension))
    m = max((d for d in range(1, limit + 1) if dimension % d == 0), default=1)
    return m, dimension // m


def choose_factor_shapes(target: Target) -> dict[str, Shape]:
    """The roles and shapes of a new adapter, from the target's options."""
    out, into, *kernel = target.shape
    options, rank = target.options, target.rank
    (j, k), (m, n) = (split_dimension(size, int(options.get("factor", -1))) for size in (out, into))
    if options.get("unbalanced"):
        j, k = k, j
    full = bool(options.get("full_matrix"))
    shapes: dict[str, Shape] = {"w1": (j, m)}
    if options.get("decompose_both") and not full and rank < max(j, m) / 2:
        shapes = {"w1_a": (j, rank), "w1_b": (rank, m)}
    if full or rank >= max(k, n) / 2:
        return {**shapes, "w2": (k, n, *kernel)}
    if options.get("use_tucker") and math.prod(kernel) > 1:
        return {**shapes, "t2": (rank, rank, *kernel), "w2_a": (rank, k), "w2_b": (rank, n)}
    return {**shapes, "w2_a": (k, rank), "w2_b": (rank, n * math.prod(kernel))}


def compute_lokr_factor(tensors: TensorsByRole, which: str) -> Tensor:
    """Factor "1" or "2" in full."""
    full = tensors.get(f"w{which}")
    return compute_low_rank_weight(tensors, which) if full is None else full


def infer_factor_shape(shapes: dict[str, Shape], which: str) -> Shape | None:
    """The shape of factor "1" or "2", or None where it is no matrix, or its own factors do not chain."""
    full = shapes.get(f"w{which}")
    if full is None:
        return infer_low_rank_shape(shapes, which)
    return full if len(full) >= 2 else None


def list_factor_matrices(tensors: TensorsByRole, which: str) -> list[Tensor]:
    """The matrices that a vector goes through, in order, for factor "1" or "2" of a Linear."""
    if f"w{which}" in tensors or f"t{which}" in tensors:
        return [compute_lokr_factor(tensors, which).flatten(1)]
    return [tensors[f"w{which}_b"].flatten(1), tensors[f"w{which}_a"]]


def split_factor_gradient(tensors: TensorsByRole, which: str, grad: Tensor) -> dict[str, Tensor]:
    """The gradients of the tensors of factor "1" or "2", for the gradient of that factor as a matrix."""
    full = f"w{which}"
    if full in tensors:
        return {full: grad.view_as(tensors[full])}
    a, b = tensors[f"{full}_a"], tensors[f"{full}_b"]
    return {f"{full}_a": grad @ b.flatten(1).t(), f"{full}_b": (a.t() @ grad).view_as(b)}
