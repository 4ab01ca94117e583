"""(IA)^3: W(1) = W * (1 + w), one factor per output, or per input with `on_input`.

Sources: Liu et al. 2022 (arXiv 2205.05638); LyCORIS modules/ia3.py. PEFT stores 1 + w. On the output side the factor
is on the finished output, so the bias is scaled too, as in PEFT and in LyCORIS's bypass; LyCORIS's rebuilt weight
leaves the bias alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finitune.adapters.core import AdapterAlgorithm, Shape, SiteAdapter, Target, make_misfit_error


class IA3(AdapterAlgorithm):
    """`weight`: w, of any shape with one element per channel.

    Options: `on_input`; `groups`, those of the convolution.
    """

    name = "ia3"
    title = "IA3"
    additive = False
    required = frozenset({"weight"})

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


def get_conv_groups(adapter: SiteAdapter) -> int:
    """The groups of the convolution that is adapted; 1 where none were stated."""
    return int(adapter.options.get("groups", 1))
