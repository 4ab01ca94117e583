"""LoRA and LoCon: dW = s * up @ down; with a core (Tucker) for kernels, s * up @ mid @ down.

Sources: Hu et al. 2021 (arXiv 2106.09685), equation 3; for the axes of the core, LyCORIS functional/locon.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from finitune.adapters.core import (
    AdapterAlgorithm,
    AdapterProducts,
    Shape,
    SiteAdapter,
    Target,
    get_factor_shapes,
    make_shapes_error,
)
from finitune.adapters.dropout import Dropout


class LoRA(AdapterAlgorithm):
    """`down` (r, in[, *k]), `up` (out, r[, 1, 1]); `mid` (r, r, *k) with a 1x1 `down`; `up_bias` (out), scaled, too."""

    name = "lora"
    title = "LoRA"
    required = frozenset({"down", "up"})
    optional = frozenset({"mid", "up_bias"})
    drops_inside = True

    def rank(self, adapter: SiteAdapter) -> int:
        return adapter.tensors["down"].shape[0]

    def shape(self, adapter: SiteAdapter) -> Shape:
        shapes = get_factor_shapes(adapter)
        up, down, mid = shapes["up"], shapes["down"], shapes.get("mid")
        if len(up) < 2 or len(down) < 2 or math.prod(up[2:]) != 1:
            raise make_shapes_error(self, adapter, f"up {list(up)} and down {list(down)} are not two matrices")
        inner = (down[0], down[0]) if mid is None else mid[:2]
        if (up[1], down[0]) != inner or (mid is not None and math.prod(down[2:]) != 1):
            raise make_shapes_error(
                self, adapter, f"up {list(up)}, mid {list(mid or ())} and down {list(down)} do not chain"
            )
        if shapes.get("up_bias", up[:1]) != up[:1]:
            raise make_shapes_error(self, adapter, f"a bias {list(shapes['up_bias'])} for {up[0]} outputs")
        return (up[0], down[1], *(down[2:] if mid is None else mid[2:]))

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        out, into, *kernel = target.shape
        down, up = torch.empty(target.rank, into, *kernel), torch.zeros(out, target.rank, *[1] * len(kernel))
        tensors = {"down": down, "up": up}
        if kernel and target.options.get("use_tucker"):
            tensors["down"] = torch.empty(target.rank, into, *[1] * len(kernel))
            tensors["mid"] = torch.empty(target.rank, target.rank, *kernel)
        for role in tensors:  # in their order: a set's would change the numbers drawn from run to run
            if role != "up":
                torch.nn.init.kaiming_uniform_(tensors[role], a=math.sqrt(5), generator=generator)
        return SiteAdapter(self.name, tensors, target.alpha)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        up, down = (adapter.tensors[role].to(base.dtype) for role in ("up", "down"))
        if "mid" in adapter.tensors:
            mid = adapter.tensors["mid"].to(base.dtype)
            return (self.scale(adapter) * rebuild_tucker_weight(mid, up.flatten(1), down.flatten(1))).view(base.shape)
        return (self.scale(adapter) * (up.flatten(1) @ down.flatten(1))).view(base.shape)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        plain, scaled = adapter.tensors.get("diff_b"), adapter.tensors.get("up_bias")
        if scaled is None:
            return plain
        scaled = self.scale(adapter) * (scaled.double() if bias is None else scaled.to(bias.dtype))
        return scaled if plain is None else scaled + plain

    def forward(
        self,
        adapter: SiteAdapter,
        x: Tensor,
        products: AdapterProducts,
        factor: float = 1.0,
        dropping: Dropout | None = None,
    ) -> Tensor | None:
        if products.groups != 1:
            return None
        up, down = adapter.tensors["up"].flatten(1), adapter.tensors["down"]
        if "mid" in adapter.tensors:
            inner = products.walk(products.mix(x, down.flatten(1)), adapter.tensors["mid"])
        else:
            inner = products.walk(x, down)
        if dropping:
            inner = dropping.inside(inner, products.channels)
        return products.mix(inner * (self.scale(adapter) * factor), up)

    def onto(self, adapter: SiteAdapter, base: Tensor, factor: float) -> Tensor:
        if "mid" in adapter.tensors:
            return super().onto(adapter, base, factor)
        up, down = (adapter.tensors[role].flatten(1) for role in ("up", "down"))
        return torch.addmm(base, up, down, alpha=factor * self.scale(adapter))

    def pull(self, adapter: SiteAdapter, x: Tensor, grad: Tensor) -> Mapping[str, Tensor] | None:
        """d up = s * ((x down^T)^T grad)^T, which is the faster side to read grad from; d down = s * (grad up)^T x."""
        if "mid" in adapter.tensors:
            return None
        up, down, scale = adapter.tensors["up"], adapter.tensors["down"], self.scale(adapter)
        inner, back = x @ down.flatten(1).t(), grad @ up.flatten(1)
        of_up, of_down = inner.t() @ grad, back.t() @ x
        return {"up": (scale * of_up).t().reshape(up.shape), "down": (scale * of_down).view_as(down)}

    def row_norms(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        """|w + s u D|^2 = |w|^2 + (2 s w D^T + s^2 u D D^T) . u for rows w of W and u of up, D being down.

        Exact where u is zero: the square root of a rounded square is the number itself.
        """
        if "mid" in adapter.tensors:
            return super().row_norms(adapter, base)
        up, down = (adapter.tensors[role].to(base.dtype).flatten(1) for role in ("up", "down"))
        scale, rows = self.scale(adapter), base.flatten(1)
        across = rows @ down.t() * (2 * scale) + up @ (down @ down.t()) * scale**2
        square = torch.linalg.vector_norm(rows, dim=1).square() + (across * up).sum(1)
        empty = square <= 0
        return torch.where(empty, 0, torch.where(empty, 1, square).sqrt())


def rebuild_tucker_weight(core: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The weight (out, in, *k) of a Tucker core (p, q, *k) between up (out, p) and down (q, in)."""
    return torch.einsum("o p, p q ..., q i -> o i ...", up, core, down)
