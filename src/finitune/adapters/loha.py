"""LoHa: dW = s * (w1_a @ w1_b) o (w2_a @ w2_b), the entrywise product of two low-rank matrices: rank r * r.

Sources: Hyeon-Woo et al. 2021 (arXiv 2108.06098), equation 3; for kernels and initial values, LyCORIS modules/loha.py.
A product with the factors alone would go through all r * r pairs of them, so there is no cheaper forward.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    FactorRole,
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
from finitune.adapters.lora import rebuild_tucker_weight
from finitune.adapters.lowrank import TruncatedFactors, bound_product, truncate_factors

FACTOR_NUMBERS = ("1", "2")


class LoHa(AdapterAlgorithm):
    """For either half, `w_a` (out, r) and `w_b` (r, in * kernel); or with a core `t` (r, r, *kernel), `w_a` (r, out)
    and `w_b` (r, in).
    """

    name = "loha"
    title = "LoHa"
    additive = rowwise = factored = trainable = flat_kernel = True
    roles: ClassVar[RolesByName] = {
        "w1_a": FactorRole(row_axis=0, scaled=True),
        "w1_b": FactorRole(),
        "w2_a": FactorRole(row_axis=0, up=True),
        "w2_b": FactorRole(),
        "t1": FactorRole(optional=True, core=True),
        "t2": FactorRole(optional=True, core=True),
    }
    terms = (frozenset(roles),)
    pairs = (("w1_a", "w1_b"), ("w2_a", "w2_b"))
    rank_means, alpha_means = "factors", "scale"
    options = ("use_tucker",)
    kohya_network, lycoris_algo = "networks.loha", "loha"
    field_names = ("loha",)
    suffixes = tuple(spell_in_kohya_and_peft("hada", *roles))
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        **dict.fromkeys(("PEFT", "ComfyUI", "A1111", "Forge", "sd-scripts"), ALGORITHM_LOADS),
    }

    def missing(self, present: Set[str]) -> Set[str]:
        cores = {"t1", "t2"}
        return super().missing(present) | (cores - present if present & cores else set())

    def rank(self, adapter: SiteAdapter) -> int:
        return adapter.tensors["w1_b"].shape[0]

    def shape(self, adapter: SiteAdapter) -> Shape:
        shapes = get_factor_shapes(adapter)
        first, second = (infer_low_rank_shape(shapes, half) for half in FACTOR_NUMBERS)
        if first is None or first != second or shapes["w1_b"][0] != shapes["w2_b"][0]:
            raise make_shapes_error(self, adapter, "the halves are not two weights of one shape and rank")
        return first

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        (out, into, *kernel), rank = target.shape, target.rank
        tucker = bool(kernel and target.options.get("use_tucker"))
        a = (rank, out) if tucker else (out, rank)
        b = (rank, into) if tucker else (rank, into * math.prod(kernel))
        tensors = {"w1_a": draw_normal_noise(a, 0.1, generator), "w1_b": draw_normal_noise(b, 1.0, generator)}
        tensors |= {"w2_a": torch.zeros(a), "w2_b": draw_normal_noise(b, 1.0, generator)}
        if tucker:
            tensors |= {role: draw_normal_noise((rank, rank, *kernel), 0.1, generator) for role in ("t1", "t2")}
        return SiteAdapter(self.name, tensors, target.alpha)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        tensors = {role: tensor.to(base.dtype) for role, tensor in adapter.tensors.items()}
        first, second = (compute_low_rank_weight(tensors, half).reshape(base.shape) for half in FACTOR_NUMBERS)
        return self.scale(adapter) * (first * second)

    def row_axes(self, adapter: SiteAdapter) -> dict[str, int]:
        cored = bool({"t1", "t2"} & adapter.tensors.keys())
        return dict.fromkeys(super().row_axes(adapter), int(cored))

    def factorize(self, adapter: SiteAdapter, shape: Shape, rank: int | None) -> TruncatedFactors:
        """By the row-wise product of the two left factors, and the column-wise product of the right ones.

        (sum_a p_oa q_ai) (sum_b u_ob v_bi) = sum_ab (p_oa u_ob) (q_ai v_bi).
        """
        (p, q), (u, v) = (split_half(adapter.tensors, half) for half in FACTOR_NUMBERS)
        up = torch.einsum("o a, o b -> o a b", p, u).flatten(1)
        down = torch.einsum("a i, b i -> a b i", q, v).flatten(0, 1)
        return truncate_factors(self.scale(adapter) * up, down, rank=rank)

    def product_bound(self, tensors: TensorsByRole) -> float | None:
        if "t1" in tensors:
            return math.inf
        return bound_product(tensors["w1_a"], tensors["w1_b"]) * bound_product(tensors["w2_a"], tensors["w2_b"])


def split_half(tensors: TensorsByRole, half: str) -> tuple[Tensor, Tensor]:
    """fp64 (out, r) and (r, in * kernel) of one half; a core goes into the second."""
    a, b = (tensors[f"w{half}_{side}"].double() for side in "ab")
    core = tensors.get(f"t{half}")
    if core is None:
        return a, b.flatten(1)
    return a.t(), torch.einsum("p q ..., q i -> p i ...", core.double(), b).flatten(1)


def compute_low_rank_weight(tensors: TensorsByRole, which: str) -> Tensor:
    """The weight of the factors w1_a, w1_b and t1, or w2_a, w2_b and t2: (out, in, *kernel), or (out, in * kernel)."""
    a, b, core = tensors[f"w{which}_a"], tensors[f"w{which}_b"], tensors.get(f"t{which}")
    return a @ b.flatten(1) if core is None else rebuild_tucker_weight(core, a.t(), b)


def infer_low_rank_shape(shapes: dict[str, Shape], which: str) -> Shape | None:
    """The shape of that weight, or None where its factors do not chain."""
    a, b, core = shapes[f"w{which}_a"], shapes[f"w{which}_b"], shapes.get(f"t{which}")
    if len(a) != 2 or len(b) < 2:
        return None
    if core is None:
        return (a[0], *b[1:]) if a[1] == b[0] else None
    return (a[1], b[1], *core[2:]) if core[:2] == (a[0], b[0]) and len(b) == 2 else None


def draw_normal_noise(shape: Shape, std: float, generator: torch.Generator) -> Tensor:
    """fp32 normal noise around zero."""
    return std * torch.randn(shape, generator=generator)
