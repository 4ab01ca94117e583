"""Changes that are stored as they are: of a weight, of a norm's gain, and a weight in the place of another.

Any algorithm may have a change of the bias beside its own; alone, it is a Full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    PROGRAM_LACKS_ALGORITHM,
    SD_SCRIPTS_LACKS_ALGORITHM,
    AdapterProgram,
    FactorRole,
    KeySuffix,
    LoadVerdict,
    ProgramSupport,
    RolesByName,
    Shape,
    SiteAdapter,
    SupportByProgram,
    Target,
    make_shapes_error,
)


class Full(AdapterAlgorithm):
    """`diff` (out, in, *kernel), `diff_b` (out), or one of them alone; alpha has no meaning."""

    name = "full"
    title = "full difference"
    additive = rowwise = trainable = companion = weight_sized = True
    factored = False
    roles: ClassVar[RolesByName] = {"diff": FactorRole(optional=True, row_axis=0, scaled=True)}
    terms = (frozenset({"diff"}),)
    rank_means, alpha_means = "nothing", "nothing"
    options = ()
    lycoris_algo = "full"
    field_names = ("full", "native")
    suffixes = (KeySuffix(".diff", "diff", ("kohya",)),)
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        "PEFT": PROGRAM_LACKS_ALGORITHM,
        **dict.fromkeys(("ComfyUI", "A1111", "Forge"), ALGORITHM_LOADS),
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def missing(self, present: Set[str]) -> Set[str]:
        return set() if present else {"diff"}

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        diff = adapter.tensors.get("diff")
        return None if diff is None else tuple(diff.shape)

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        diff = shapes.get("diff", ())
        return diff[1] if len(diff) >= 2 else None

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        return SiteAdapter(self.name, {"diff": torch.zeros(target.shape)})

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        diff = adapter.tensors.get("diff")
        return torch.zeros_like(base) if diff is None else diff.to(base.dtype).view(base.shape)


class Norm(AdapterAlgorithm):
    """`w_norm` (C), and `b_norm` (C) where the norm has a bias; alpha has no meaning. A new one takes option `bias`."""

    name = "norm"
    title = "norm difference"
    additive = companion = True
    rowwise = factored = trainable = False
    roles: ClassVar[RolesByName] = {
        "w_norm": FactorRole(row_axis=0, scaled=True),
        "b_norm": FactorRole(optional=True, row_axis=0, scaled=True),
    }
    terms = (frozenset({"w_norm"}), frozenset({"b_norm"}))
    bias_role = "b_norm"
    rank_means, alpha_means = "nothing", "nothing"
    options = ("bias",)
    field_names = ("norms",)
    suffixes = (KeySuffix(".w_norm", "w_norm", ("kohya",)), KeySuffix(".b_norm", "b_norm", ("kohya",)))
    programs = Full.programs

    def support(self, program: AdapterProgram, adapters: Sequence[SiteAdapter], family: str) -> ProgramSupport:
        if program == "A1111" and any("b_norm" not in adapter.tensors for adapter in adapters):
            return ProgramSupport(LoadVerdict.NO, "it wants w_norm and b_norm together")
        return super().support(program, adapters, family)

    def shape(self, adapter: SiteAdapter) -> Shape:
        gain, bias = adapter.tensors["w_norm"], adapter.tensors.get("b_norm")
        if gain.ndim != 1 or (bias is not None and bias.shape != gain.shape):
            raise make_shapes_error(self, adapter, "they are not one number for each channel")
        return tuple(gain.shape)

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        roles = ("w_norm", "b_norm") if target.options.get("bias") else ("w_norm",)
        return SiteAdapter(self.name, {role: torch.zeros(target.shape) for role in roles})

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        return adapter.tensors["w_norm"].to(base.dtype)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        changes = [adapter.tensors[role] for role in ("b_norm", "diff_b") if role in adapter.tensors]
        return sum(changes[1:], changes[0]) if changes else None


class SetWeight(AdapterAlgorithm):
    """`weight` (out, in, *kernel), or (C) for a norm, is what the module has at strength 1; alpha has no meaning.

    Files of control adapters do so with norms (`set_weight`).
    """

    name = "set"
    title = "replaced weight"
    additive = rowwise = factored = trainable = False
    roles: ClassVar[RolesByName] = {"weight": FactorRole(row_axis=0)}
    terms = ()
    rank_means, alpha_means = "nothing", "nothing"
    options = ()
    suffixes = (KeySuffix(".set_weight", "weight", ("comfy",)), KeySuffix(".scale", "weight", ("bfl",)))
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        "PEFT": PROGRAM_LACKS_ALGORITHM,
        "ComfyUI": ALGORITHM_LOADS,
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def shape(self, adapter: SiteAdapter) -> Shape:
        return tuple(adapter.tensors["weight"].shape)

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        return None

    def can_stack(self, parts: Sequence[SiteAdapter | None]) -> bool:
        return all(part is not None for part in parts)

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        return SiteAdapter(self.name, {"weight": target.weight.detach().to(torch.float32, copy=True)})

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        return adapter.tensors["weight"].to(base.dtype).view(base.shape) - base


def make_difference(delta: Tensor, bias: Tensor | None = None) -> SiteAdapter:
    """A change of a weight, or of a norm's gain (C), that is stored as it is, with that of the bias, if any."""
    algorithm, role = (Norm, "w_norm") if delta.ndim == 1 else (Full, "diff")
    tensors = {role: delta} if bias is None else {role: delta, algorithm.bias_role: bias}
    return SiteAdapter(algorithm.name, tensors)
