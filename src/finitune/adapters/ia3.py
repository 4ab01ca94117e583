"""(IA)^3: W(1) = W * (1 + w), one factor per output, or per input with `on_input`.

Sources: Liu et al. 2022 (arXiv 2205.05638); LyCORIS modules/ia3.py. PEFT stores 1 + w. On the output side the factor
is on the finished output, so the bias is scaled too, as in PEFT and in LyCORIS's bypass; LyCORIS's rebuilt weight
leaves the bias alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    SD_SCRIPTS_LACKS_ALGORITHM,
    FactorRole,
    FileFacts,
    KeySuffix,
    LoadVerdict,
    ProgramSupport,
    RolesByName,
    Shape,
    SiteAdapter,
    SupportByProgram,
    Target,
    make_misfit_error,
    make_no_adapter_error,
    make_undecided_shape_error,
    read_single_number,
)


class IA3(AdapterAlgorithm):
    """`weight`: w, of any shape with one element per channel.

    Options: `on_input`; `groups`, those of the convolution.
    """

    name = "ia3"
    title = "IA3"
    additive = rowwise = factored = False
    trainable = True
    roles: ClassVar[RolesByName] = {"weight": FactorRole()}
    terms = (frozenset({"weight"}),)
    rank_means, alpha_means = "nothing", "nothing"
    options = ("on_input", "groups")
    lycoris_algo = "ia3"
    field_names = ("ia3",)
    suffixes = (
        KeySuffix(".weight", "weight", ("kohya",)),
        KeySuffix(".on_input", "on_input", ("kohya",)),
        KeySuffix(".ia3_l", "factor", ("peft",), named=True),  # 1 + w
    )
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        **dict.fromkeys(("PEFT", "A1111"), ALGORITHM_LOADS),
        "ComfyUI": ProgramSupport(LoadVerdict.NO, "it has no such adapter; only its log says so (#6381)"),
        "Forge": ProgramSupport(LoadVerdict.NO, "it has no such adapter (#1395)"),
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        if shape is None:
            return
        on_input, found = bool(adapter.options.get("on_input")), adapter.tensors["weight"].numel()
        wanted = shape[1] * get_conv_groups(adapter) if on_input else shape[0]
        if found != wanted:
            raise make_misfit_error(f"IA3 factors on the {'in' if on_input else 'out'}put side of", (found,), (wanted,))

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        out, into, *kernel = target.shape
        kept = {name: target.options[name] for name in ("on_input", "groups") if name in target.options}
        adapter = SiteAdapter(self.name, {}, options=kept)
        count = into * get_conv_groups(adapter) if kept.get("on_input") else out
        return adapter.with_tensors(weight=torch.zeros((1, count, *[1] * len(kernel)) if kernel else count))

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        weight, kernel = adapter.tensors["weight"].to(base.dtype).flatten(), [1] * (base.ndim - 2)
        if not adapter.options.get("on_input"):
            return base * weight.view(-1, 1, *kernel)
        by_group = base.unflatten(0, (get_conv_groups(adapter), -1))  # every group of outputs reads inputs of its own
        return (by_group * weight.view(get_conv_groups(adapter), 1, -1, *kernel)).flatten(0, 1)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        plain = super().bias_delta(adapter, bias)
        if bias is None or adapter.options.get("on_input"):
            return plain
        change = bias * adapter.tensors["weight"].to(bias.dtype).flatten()
        return change if plain is None else change + plain

    def acts_on_inputs(self, adapter: SiteAdapter) -> bool:
        return bool(adapter.options.get("on_input"))

    def count_rows(self, adapter: SiteAdapter) -> int | None:
        return super().count_rows(adapter) if self.acts_on_inputs(adapter) else adapter.tensors["weight"].numel()

    def row_axes(self, adapter: SiteAdapter) -> dict[str, int]:
        weight = adapter.tensors["weight"]
        if self.acts_on_inputs(adapter):
            return {}
        return {"weight": max(range(weight.ndim), key=lambda axis: weight.shape[axis])}

    def can_stack(self, parts: Sequence[SiteAdapter | None]) -> bool:
        return False

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        return None

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        """As LyCORIS has it, 1 + w, and as PEFT, which stores the factor itself, (out, 1) or (1, in)."""
        factor = tensors.get("factor")
        if factor is None and "on_input" not in tensors:
            raise make_no_adapter_error(tensors.keys(), "it is a whole weight, as models have, and no change of one")
        if factor is None:
            on_input = bool(read_single_number(tensors.pop("on_input"), "on_input"))
            return SiteAdapter(self.name, tensors, options={"on_input": on_input})
        axes = (("out", 0), ("in", 1))
        sides = {side for side, axis in axes if facts.shape and factor.numel() == facts.shape[axis]}
        if factor.ndim == 2:
            sides = {"out"} if factor.shape[1] == 1 else {"in"}
        if len(sides) != 1:
            raise make_undecided_shape_error(
                "whether it is on the inputs or the outputs", "IA3 factors", tuple(factor.shape), "Name the model."
            )
        return SiteAdapter(self.name, {"weight": (factor.double() - 1).float()}, options={"on_input": sides == {"in"}})

    def to_file(self, adapter: SiteAdapter) -> dict[str, Tensor]:
        return {"on_input": torch.tensor(self.acts_on_inputs(adapter))}


def get_conv_groups(adapter: SiteAdapter) -> int:
    """The groups of the convolution that is adapted; 1 where none were stated."""
    return int(adapter.options.get("groups", 1))
