"""One algorithm as another, with what that costs said beforehand.

Every additive change is a product of two thin matrices: of LoHa, the row-wise products of the two halves' factors
(rank r * r); of LoKr, the Kronecker product of the two factors' own. Where the asked rank holds that product the
conversion is exact; where it does not, the largest singular values are kept and the error is stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.core import Shape, SiteAdapter, TensorsByRole
from finitune.adapters.loha import FACTOR_NUMBERS
from finitune.adapters.lokr import compute_lokr_factor, get_row_range, trim_to_row_range
from finitune.adapters.lowrank import (
    Spectrum,
    TruncatedFactors,
    decompose_delta,
    require_finite_matrices,
    truncate_factors,
)
from finitune.adapters.weight import compute_weight_delta
from finitune.errors import AdapterError

EXACT_CONVERSION_TOLERANCE = 2.0**-22
"""The relative error that fp32 factors make anyway: below it a conversion counts as exact."""
_SINGULAR_VALUE_NOISE = 2.0**-45
"""Singular values under this share of the largest are the rounding of fp64: of a factor of low rank, most are."""


class Exactness(str, Enum):
    """What a conversion costs, from nothing to too much."""

    LOSSLESS = "lossless"
    """Names alone change: tensors stay bit for bit."""
    EXACT = "exact"
    """The same change up to the rounding of the dtype: a scale was folded in, a product written out."""
    GROWING = "growing"
    """The same change up to rounding, at a higher rank."""
    LOSSY = "lossy"
    """A change of lower rank than the true one."""
    IMPOSSIBLE = "impossible"
    """The target cannot say it, or not without the base weight."""

    @property
    def cost(self) -> int:
        """0 for LOSSLESS, growing with what is lost."""
        return list(Exactness).index(self)


@dataclass(frozen=True)
class ConvertedAdapter:
    """A converted adapter, what kind of conversion it was, and the relative Frobenius error of its change."""

    adapter: SiteAdapter
    klass: Exactness
    error: float = 0.0


def convert_adapter_to_lora(
    adapter: SiteAdapter,
    base_shape: Shape | None = None,
    rank: int | None = None,
    base: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    without_magnitude: bool = False,
) -> ConvertedAdapter:
    """The adapter as a LoRA of at most `rank`, or of the least rank that is exact; a magnitude (DoRA) goes with it.

    `base_shape` is (out, in, *kernel), needed where the tensors do not tell a kernel. New factors are fp32, balanced,
    with scale 1. Algorithms that are not additive need `base` (fp32 or fp64), and its `bias` where it has one; and so
    does a DoRA `without_magnitude`, a LoRA of all that it changes. Raises AdapterError (CONVERT-IMPOSSIBLE) without it,
    and for what is no change of a matrix.
    """
    algorithm = find_algorithm(adapter.algorithm)
    folded = without_magnitude and adapter.magnitude is not None
    if (
        not folded
        and adapter.algorithm == "lora"
        and "mid" not in adapter.tensors
        and is_rank_sufficient(adapter, rank)
    ):
        return ConvertedAdapter(adapter, Exactness.LOSSLESS)
    shape = tuple(base.shape) if base is not None else base_shape or algorithm.shape(adapter)
    if adapter.algorithm == "full" and "diff" not in adapter.tensors:
        return ConvertedAdapter(adapter, Exactness.LOSSLESS)  # a bias alone: spelled the same beside every algorithm
    on_base = folded or not algorithm.additive
    if on_base and base is None and (shape is None or len(shape) > 1):
        raise make_base_needed_error(adapter)
    if shape is None or len(shape) < 2:
        raise make_no_lora_error(adapter, "it does not change a matrix", "Keep its algorithm: leave out --as.")
    if on_base and base is not None:
        up, down, cut = decompose_delta(compute_weight_delta(base, adapter).flatten(1), rank=rank)
    else:
        up, down, cut = compute_lora_factors(adapter, shape, rank)
    tensors = {"up": up.reshape(*up.shape, *[1] * len(shape[2:])), "down": down.reshape(-1, *shape[1:])}
    change = None if bias is None or algorithm.additive else algorithm.bias_delta(adapter, bias)
    if change is not None:
        tensors["diff_b"] = change.float()
    elif "diff_b" in adapter.tensors:
        tensors["diff_b"] = adapter.tensors["diff_b"]
    if "up_bias" in adapter.tensors:
        tensors["up_bias"] = adapter.tensors["up_bias"].float() * algorithm.scale(adapter)
    lora = SiteAdapter("lora", tensors, float(cut.rank), magnitude=None if folded else adapter.magnitude)
    exact = Exactness.EXACT if adapter.algorithm == "lora" and not folded else Exactness.GROWING
    return ConvertedAdapter(lora, exact if cut.error <= EXACT_CONVERSION_TOLERANCE else Exactness.LOSSY, cut.error)


def is_rank_sufficient(adapter: SiteAdapter, rank: int | None) -> bool:
    """Whether a LoRA of `rank` (None: any) is as large as this one."""
    own = find_algorithm(adapter.algorithm).rank(adapter)
    return rank is None or own is None or rank >= own


def compute_lora_factors(adapter: SiteAdapter, shape: Shape, rank: int | None) -> TruncatedFactors:
    """Balanced fp32 factors (out, r) and (r, in * kernel) of an additive change, magnitude left out."""
    algorithm = find_algorithm(adapter.algorithm)
    scale = algorithm.scale(adapter)
    if adapter.algorithm == "lokr":
        return compute_lokr_lora_factors(adapter, scale, rank)
    if adapter.algorithm in _MATRICES_BY_ALGORITHM:
        up, down = _MATRICES_BY_ALGORITHM[adapter.algorithm](adapter)
        return truncate_factors(scale * up, down, rank=rank)
    dense = algorithm.delta(replace(adapter, magnitude=None), torch.zeros(shape, dtype=torch.float64))
    return decompose_delta(dense.flatten(1), rank=rank)


def to_lora_matrices(adapter: SiteAdapter) -> tuple[Tensor, Tensor]:
    """fp64 (out, r) and (r, in * kernel) of a LoRA; a core goes into the second."""
    up, down = (adapter.tensors[role].double().flatten(1) for role in ("up", "down"))
    if "mid" in adapter.tensors:
        down = torch.einsum("p q ..., q i -> p i ...", adapter.tensors["mid"].double(), down).flatten(1)
    return up, down


def to_loha_matrices(adapter: SiteAdapter) -> tuple[Tensor, Tensor]:
    """fp64 (out, r * r) and (r * r, in * kernel) of a LoHa.

    The row-wise product of the two left factors, and the column-wise product of the right ones:
    (sum_a p_oa q_ai) (sum_b u_ob v_bi) = sum_ab (p_oa u_ob) (q_ai v_bi).
    """
    (p, q), (u, v) = (to_loha_half_matrices(adapter, half) for half in FACTOR_NUMBERS)
    up = torch.einsum("o a, o b -> o a b", p, u).flatten(1)
    return up, torch.einsum("a i, b i -> a b i", q, v).flatten(0, 1)


def to_loha_half_matrices(adapter: SiteAdapter, half: str) -> tuple[Tensor, Tensor]:
    """fp64 (out, r) and (r, in * kernel) of one half of a LoHa; a core goes into the second."""
    a, b = (adapter.tensors[f"w{half}_{side}"].double() for side in "ab")
    core = adapter.tensors.get(f"t{half}")
    if core is None:
        return a, b.flatten(1)
    return a.t(), torch.einsum("p q ..., q i -> p i ...", core.double(), b).flatten(1)


_MATRICES_BY_ALGORITHM = {"lora": to_lora_matrices, "loha": to_loha_matrices}
"""Algorithms whose change is a product of thin matrices, and how to get these."""


def compute_lokr_lora_factors(adapter: SiteAdapter, scale: float, rank: int | None) -> TruncatedFactors:
    """Balanced fp32 factors of a LoKr's change; of some rows of it, by those rows of the vectors on the left."""
    tensors, rows = trim_to_row_range(adapter)
    if get_row_range(adapter) is None:
        return compute_kronecker_svd(tensors, scale, rank).factors(rank, None)
    whole = compute_kronecker_svd(tensors, scale, None)  # what is largest in some rows need not be in all of them
    kept = max(1, int((whole.values > _SINGULAR_VALUE_NOISE * whole.values[0]).sum()))
    return truncate_factors((whole.u[:, :kept] * whole.values[:kept])[rows], whole.vh[:kept], rank=rank)


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


def make_base_needed_error(adapter: SiteAdapter) -> AdapterError:
    """The error for a change that depends on the base weight, where that is not known."""
    return make_no_lora_error(
        adapter,
        "its change depends on the base weight, which is not at hand",
        "Give the model: --model FILE. Or keep its algorithm: leave out --as. Or merge it into the model and extract a "
        "LoRA from the result.",
    )


def make_no_lora_error(adapter: SiteAdapter, why: str, remedy: str) -> AdapterError:
    """The error for an adapter that has no LoRA."""
    return AdapterError(
        f"a {find_algorithm(adapter.algorithm).title} cannot become a LoRA: {why}",
        code="CONVERT-IMPOSSIBLE",
        evidence={"algorithm": adapter.algorithm, "class": Exactness.IMPOSSIBLE.value},
        remedy=remedy,
    )
