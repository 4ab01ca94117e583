"""LoRA and LoCon: dW = s * up @ down; with a core (Tucker) for kernels, s * up @ mid @ down.

Sources: Hu et al. 2021 (arXiv 2106.09685), equation 3; for the axes of the core, LyCORIS functional/locon.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm, AdapterProducts
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    FactorRole,
    FileFacts,
    KeySuffix,
    RolesByName,
    Shape,
    SiteAdapter,
    SuffixDialect,
    SupportByProgram,
    Target,
    TensorsByRole,
    get_factor_shapes,
    make_damaged_adapter_error,
    make_shapes_error,
)
from finitune.adapters.dropout import Dropout
from finitune.adapters.full import make_difference
from finitune.adapters.lowrank import TruncatedFactors, bound_product, truncate_factors

_ATTENTION_PROCESSOR_WORDS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_XLABS_PROCESSOR_LAYERS = (
    ("processor.qkv_lora1", ".img_attn.qkv"),
    ("processor.qkv_lora2", ".txt_attn.qkv"),
    ("processor.proj_lora1", ".img_attn.proj"),
    ("processor.proj_lora2", ".txt_attn.proj"),
    ("processor.qkv_lora", ".linear1"),
    ("processor.proj_lora", ".linear2"),
)
"""Attention processors know the layers of their attention by words of their own."""
_RESIDUAL_PARTS = ("indices", "values", "size")


def _spell_factors(
    down: str, up: str, dialect: SuffixDialect, inner: str = "", named: bool = False
) -> Iterator[KeySuffix]:
    yield KeySuffix(down, "down", (dialect,), inner, named)
    yield KeySuffix(up, "up", (dialect,), inner, named)


def _spell_processor(word: str, inner: str, dialect: SuffixDialect) -> Iterator[KeySuffix]:
    yield from _spell_factors(f".{word}.down.weight", f".{word}.up.weight", dialect, inner)


class LoRA(AdapterAlgorithm):
    """`down` (r, in[, *k]), `up` (out, r[, 1, 1]); `mid` (r, r, *k) with a 1x1 `down`; `up_bias` (out), scaled, too."""

    name = "lora"
    title = "LoRA"
    additive = True
    roles: ClassVar[RolesByName] = {
        "down": FactorRole(),
        "up": FactorRole(row_axis=0, scaled=True, up=True),
        "mid": FactorRole(optional=True, core=True),
        "up_bias": FactorRole(optional=True, row_axis=0, scaled=True),
    }
    terms = (frozenset({"up", "mid", "down"}), frozenset({"up_bias"}))
    pairs = (("up", "down"),)
    rowwise = factored = drops_inside = trainable = True
    rank_means, alpha_means = "factors", "scale"
    options = ("use_tucker",)
    kohya_network, lycoris_algo, peft_type = "networks.lora", "locon", "LORA"
    field_names = ("lora", "locon")
    programs: ClassVar[SupportByProgram] = dict.fromkeys(
        ("diffusers", "PEFT", "ComfyUI", "A1111", "Forge", "sd-scripts"), ALGORITHM_LOADS
    )
    suffixes = (
        *_spell_factors(".lora_down.weight", ".lora_up.weight", "kohya"),
        KeySuffix(".lora_mid.weight", "mid", ("kohya",)),
        KeySuffix(".lora_up.bias", "up_bias", ("kohya",), written=False),
        # What an extracted LoRA left over, as a sparse matrix.
        *(KeySuffix(f".bias_{part}", f"residual_{part}", ("kohya",)) for part in _RESIDUAL_PARTS),
        *_spell_factors(".lora_A.weight", ".lora_B.weight", "peft", named=True),
        KeySuffix(".lora_B.bias", "up_bias", ("peft",), named=True),
        # LoRA of an embedding, whose weight is transposed.
        KeySuffix(".lora_embedding_A", "embedding_down", ("peft",), named=True),
        KeySuffix(".lora_embedding_B", "embedding_up", ("peft",), named=True),
        *_spell_factors(".lora_A", ".lora_B", "genmo"),
        *_spell_factors("_lora.down.weight", "_lora.up.weight", "diffusers-old"),
        *_spell_factors(".lora.down.weight", ".lora.up.weight", "diffusers-old"),
        *_spell_factors(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", "diffusers-old"),
        *(
            suffix
            for word in _ATTENTION_PROCESSOR_WORDS
            for suffix in _spell_processor(f"processor.{word}_lora", f".{word}", "diffusers-old")
        ),
        *_spell_processor("processor.to_out_lora", ".to_out.0", "diffusers-old"),
        *_spell_processor("to_out_lora", ".to_out.0", "diffusers-old"),
        *(suffix for word, inner in _XLABS_PROCESSOR_LAYERS for suffix in _spell_processor(word, inner, "xlabs")),
        *_spell_factors(":down", ":up", "cloneofsimo"),
    )

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
            inner = products.apply_spatial(products.apply_pointwise(x, down.flatten(1)), adapter.tensors["mid"])
        else:
            inner = products.apply_spatial(x, down)
        if dropping:
            inner = dropping.inside(inner, products.channels)
        return products.apply_pointwise(inner * (self.scale(adapter) * factor), up)

    def merged_weight(self, adapter: SiteAdapter, base: Tensor, factor: float) -> Tensor:
        if "mid" in adapter.tensors:
            return super().merged_weight(adapter, base, factor)
        up, down = (adapter.tensors[role].flatten(1) for role in ("up", "down"))
        return torch.addmm(base, up, down, alpha=factor * self.scale(adapter))

    def factor_gradients(self, adapter: SiteAdapter, x: Tensor, grad: Tensor) -> Mapping[str, Tensor] | None:
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

    def factorize(self, adapter: SiteAdapter, shape: Shape, rank: int | None) -> TruncatedFactors:
        up, down = to_lora_matrices(adapter)
        return truncate_factors(self.scale(adapter) * up, down, rank=rank)

    def product_bound(self, tensors: TensorsByRole) -> float | None:
        inner = bound_product(tensors["up"], tensors["down"])
        return inner * float(torch.linalg.vector_norm(tensors["mid"].float())) if "mid" in tensors else inner

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        down, transposed = shapes.get("down", ()), shapes.get("embedding_up", ())
        return down[1] if len(down) >= 2 else transposed[0] if len(transposed) >= 2 else None

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        """Also of the forms of its own that embeddings, extraction and control adapters have."""
        reshape = tensors.pop("reshape", None)
        if {"embedding_down", "embedding_up"} <= tensors.keys():  # PEFT adds (up @ down) to the transposed weight
            for role, source in (("up", "embedding_down"), ("down", "embedding_up")):
                if tensors[source].ndim != 2:
                    raise make_damaged_adapter_error(f"{source} is no matrix", shape=list(tensors[source].shape))
                tensors[role] = tensors.pop(source).t().contiguous()
        residual = {part: tensors.pop(f"residual_{part}", None) for part in _RESIDUAL_PARTS}
        adapter = SiteAdapter(self.name, tensors, options={} if reshape is None else {"reshape": True})
        if any(part is not None for part in residual.values()):
            self.check(adapter)
            adapter = self.add_sparse_residual(adapter, residual)
        if reshape is not None:
            self.check(adapter)
            implied, stated = self.shape(adapter), tuple(int(n) for n in reshape.flatten())
            if implied != stated:
                why = f"it widens the weight to {list(stated)} and adds {list(implied)}"
                raise make_damaged_adapter_error(why, reshape=list(stated), adapter=list(implied))
        return adapter

    def peft_config(self, adapters: Mapping[str, SiteAdapter]) -> dict[str, Any]:
        """One rule for all scales: alpha / rank, unless every module is rsLoRA."""
        stabilised = all(adapter.rank_stabilised for adapter in adapters.values())
        ranks = {name: self.rank(adapter) for name, adapter in adapters.items()}
        alphas = {name: self.alpha_for(adapter, stabilised) for name, adapter in adapters.items()}
        rank, alpha = find_most_common(ranks), find_most_common(alphas)
        return {
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": {make_exact_module_pattern(name): own for name, own in ranks.items() if own != rank},
            "alpha_pattern": {make_exact_module_pattern(name): own for name, own in alphas.items() if own != alpha},
            "use_rslora": stabilised,
            "use_dora": any(adapter.magnitude is not None for adapter in adapters.values()),
            "lora_bias": any("up_bias" in adapter.tensors for adapter in adapters.values()),
        }

    def alpha_for(self, adapter: SiteAdapter, stabilised: bool) -> float:
        """The alpha that gives the adapter's scale when it is divided by the rank or, if `stabilised`, by its root."""
        if adapter.alpha is not None and adapter.rank_stabilised == stabilised:
            return adapter.alpha
        return self.scale(adapter) * (math.sqrt(self.rank(adapter)) if stabilised else self.rank(adapter))

    def add_sparse_residual(self, adapter: SiteAdapter, residual: Mapping[str, Tensor | None]) -> SiteAdapter:
        """A LoRA and the sparse rest that its extraction left, which lies in a matrix or in the bias."""
        indices, values, size = (residual[part] for part in _RESIDUAL_PARTS)
        if indices is None or values is None or size is None:
            present = [part for part, tensor in residual.items() if tensor is not None]
            why = "a sparse rest lacks its indices, its values or its size"
            raise make_damaged_adapter_error(why, present=present)
        shape = [int(n) for n in size.flatten()]
        matching = min(shape, default=0) > 0 and indices.shape == (len(shape), values.numel())
        if not matching or bool(((indices < 0) | (indices.long() >= torch.tensor(shape)[:, None])).any()):
            raise make_damaged_adapter_error(
                f"a sparse rest of {shape} has entries beyond that, or not as many values as indices",
                rest=shape,
                indices=list(indices.shape),
                values=list(values.shape),
            )
        dense = torch.zeros(shape).index_put_(tuple(indices.long()), values.float().flatten())
        if len(shape) == 1:
            return adapter.with_tensors(diff_b=dense)
        weight = self.shape(adapter)
        if math.prod(weight) != dense.numel():
            why = f"a sparse rest of {shape} beside a LoRA of {list(weight)}"
            raise make_damaged_adapter_error(why, rest=shape, adapter=list(weight))
        diff = self.delta(adapter, torch.zeros(weight)) + dense.view(weight)
        return make_difference(diff, adapter.tensors.get("diff_b"))


def is_plain_lora(adapter: SiteAdapter) -> bool:
    """Whether the change is a product of two matrices as stored."""
    return adapter.algorithm == LoRA.name and "mid" not in adapter.tensors


def to_lora_matrices(adapter: SiteAdapter) -> tuple[Tensor, Tensor]:
    """fp64 (out, r) and (r, in * kernel) of a LoRA, without its scale; a core goes into the second."""
    up, down = (adapter.tensors[role].double().flatten(1) for role in ("up", "down"))
    if "mid" in adapter.tensors:
        down = torch.einsum("p q ..., q i -> p i ...", adapter.tensors["mid"].double(), down).flatten(1)
    return up, down


def rebuild_tucker_weight(core: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The weight (out, in, *k) of a Tucker core (p, q, *k) between up (out, p) and down (q, in)."""
    return torch.einsum("o p, p q ..., q i -> o i ...", up, core, down)


def find_most_common(values: Mapping[str, float]) -> Any:
    """The value that most modules have; the first of them where several are equally common."""
    numbers = list(values.values())
    return max(dict.fromkeys(numbers), key=numbers.count)


def make_exact_module_pattern(name: str) -> str:
    """A pattern that means this module alone: PEFT lets one match the end of any name, and an anchor forbids that.

    Source: peft utils/other.py, get_pattern_key.
    """
    return f"^{re.escape(name)}"
