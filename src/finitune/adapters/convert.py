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

from finitune.adapters import algorithm_of
from finitune.adapters.core import Shape, SiteAdapter, Tensors
from finitune.adapters.loha import HALVES
from finitune.adapters.lokr import factor, stretch_of, trimmed
from finitune.adapters.lowrank import Factors, Spectrum, demand_finite, svd_delta, truncate
from finitune.adapters.weight import weight_delta
from finitune.errors import AdapterError

ROUNDING = 2.0**-22
"""The relative error that fp32 factors make anyway: below it a conversion counts as exact."""
NOISE = 2.0**-45
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
class Converted:
    """A converted adapter, what kind of conversion it was, and the relative Frobenius error of its change."""

    adapter: SiteAdapter
    klass: Exactness
    error: float = 0.0


def as_lora(
    adapter: SiteAdapter,
    base_shape: Shape | None = None,
    rank: int | None = None,
    base: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    without_magnitude: bool = False,
) -> Converted:
    """The adapter as a LoRA of at most `rank`, or of the least rank that is exact; a magnitude (DoRA) goes with it.

    `base_shape` is (out, in, *kernel), needed where the tensors do not tell a kernel. New factors are fp32, balanced,
    with scale 1. Algorithms that are not additive need `base` (fp32 or fp64), and its `bias` where it has one; and so
    does a DoRA `without_magnitude`, a LoRA of all that it changes. Raises AdapterError (CONVERT-IMPOSSIBLE) without it,
    and for what is no change of a matrix.
    """
    algorithm = algorithm_of(adapter.algorithm)
    folded = without_magnitude and adapter.magnitude is not None
    if not folded and adapter.algorithm == "lora" and "mid" not in adapter.tensors and holds(adapter, rank):
        return Converted(adapter, Exactness.LOSSLESS)
    shape = tuple(base.shape) if base is not None else base_shape or algorithm.shape(adapter)
    if adapter.algorithm == "full" and "diff" not in adapter.tensors:
        return Converted(adapter, Exactness.LOSSLESS)  # a bias alone: spelled the same beside every algorithm
    on_base = folded or not algorithm.additive
    if on_base and base is None and (shape is None or len(shape) > 1):
        raise without_base(adapter)
    if shape is None or len(shape) < 2:
        raise impossible(adapter, "it does not change a matrix", "Keep its algorithm: leave out --as.")
    if on_base and base is not None:
        up, down, cut = svd_delta(weight_delta(base, adapter).flatten(1), rank=rank)
    else:
        up, down, cut = factors(adapter, shape, rank)
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
    return Converted(lora, exact if cut.error <= ROUNDING else Exactness.LOSSY, cut.error)


def holds(adapter: SiteAdapter, rank: int | None) -> bool:
    """Whether a LoRA of `rank` (None: any) is as large as this one."""
    own = algorithm_of(adapter.algorithm).rank(adapter)
    return rank is None or own is None or rank >= own


def factors(adapter: SiteAdapter, shape: Shape, rank: int | None) -> Factors:
    """Balanced fp32 factors (out, r) and (r, in * kernel) of an additive change, magnitude left out."""
    algorithm = algorithm_of(adapter.algorithm)
    scale = algorithm.scale(adapter)
    if adapter.algorithm == "lokr":
        return kron_factors(adapter, scale, rank)
    if adapter.algorithm in THIN:
        up, down = THIN[adapter.algorithm](adapter)
        return truncate(scale * up, down, rank=rank)
    dense = algorithm.delta(replace(adapter, magnitude=None), torch.zeros(shape, dtype=torch.float64))
    return svd_delta(dense.flatten(1), rank=rank)


def thin_lora(adapter: SiteAdapter) -> tuple[Tensor, Tensor]:
    """fp64 (out, r) and (r, in * kernel) of a LoRA; a core goes into the second."""
    up, down = (adapter.tensors[role].double().flatten(1) for role in ("up", "down"))
    if "mid" in adapter.tensors:
        down = torch.einsum("p q ..., q i -> p i ...", adapter.tensors["mid"].double(), down).flatten(1)
    return up, down


def thin_loha(adapter: SiteAdapter) -> tuple[Tensor, Tensor]:
    """fp64 (out, r * r) and (r * r, in * kernel) of a LoHa.

    The row-wise product of the two left factors, and the column-wise product of the right ones:
    (sum_a p_oa q_ai) (sum_b u_ob v_bi) = sum_ab (p_oa u_ob) (q_ai v_bi).
    """
    (p, q), (u, v) = (half_factors(adapter, half) for half in HALVES)
    up = torch.einsum("o a, o b -> o a b", p, u).flatten(1)
    return up, torch.einsum("a i, b i -> a b i", q, v).flatten(0, 1)


def half_factors(adapter: SiteAdapter, half: str) -> tuple[Tensor, Tensor]:
    """fp64 (out, r) and (r, in * kernel) of one half of a LoHa; a core goes into the second."""
    a, b = (adapter.tensors[f"w{half}_{side}"].double() for side in "ab")
    core = adapter.tensors.get(f"t{half}")
    if core is None:
        return a, b.flatten(1)
    return a.t(), torch.einsum("p q ..., q i -> p i ...", core.double(), b).flatten(1)


THIN = {"lora": thin_lora, "loha": thin_loha}
"""Algorithms whose change is a product of thin matrices, and how to get these."""


def kron_factors(adapter: SiteAdapter, scale: float, rank: int | None) -> Factors:
    """Balanced fp32 factors of a LoKr's change; of some rows of it, by those rows of the vectors on the left."""
    tensors, rows = trimmed(adapter)
    if stretch_of(adapter) is None:
        return kron_spectrum(tensors, scale, rank).factors(rank, None)
    whole = kron_spectrum(tensors, scale, None)  # what is largest in some rows need not be in all of them
    kept = max(1, int((whole.values > NOISE * whole.values[0]).sum()))
    return truncate((whole.u[:, :kept] * whole.values[:kept])[rows], whole.vh[:kept], rank=rank)


def kron_spectrum(tensors: Tensors, scale: float, rank: int | None) -> Spectrum:
    """The largest `rank` singular values of a LoKr's change with their vectors, in fp64, from those of its factors.

    The singular values of a Kronecker product are the products of those of the factors, and so are the vectors: no
    matrix larger than a factor is decomposed.
    """
    tensors = {role: tensor.double() for role, tensor in tensors.items()}
    first, second = (factor(tensors, which).flatten(1) for which in HALVES)
    demand_finite(first, second)
    (u1, s1, vh1), (u2, s2, vh2) = (torch.linalg.svd(m, full_matrices=False) for m in (first, second))
    values, order = torch.sort(abs(scale) * torch.outer(s1, s2).flatten(), descending=True)
    kept = order if rank is None else order[:rank]
    a, b = kept // len(s2), kept % len(s2)
    u = torch.einsum("l r, k r -> l k r", u1[:, a], u2[:, b]).flatten(0, 1) * math.copysign(1, scale)
    vh = torch.einsum("r m, r n -> r m n", vh1[a], vh2[b]).flatten(1)
    return Spectrum(u, values[: len(kept)], vh, float(values[len(kept) :].square().sum()))


def without_base(adapter: SiteAdapter) -> AdapterError:
    """The error for a change that depends on the base weight, where that is not known."""
    return impossible(
        adapter,
        "its change depends on the base weight, which is not at hand",
        "Give the model: --model FILE. Or keep its algorithm: leave out --as. Or merge it into the model and extract a "
        "LoRA from the result.",
    )


def impossible(adapter: SiteAdapter, why: str, remedy: str) -> AdapterError:
    """The error for an adapter that has no LoRA."""
    return AdapterError(
        f"a {algorithm_of(adapter.algorithm).title} cannot become a LoRA: {why}",
        code="CONVERT-IMPOSSIBLE",
        evidence={"algorithm": adapter.algorithm, "class": Exactness.IMPOSSIBLE.value},
        remedy=remedy,
    )
