"""VeRA: dW = diag(lambda_b) B diag(lambda_d) A: two trained vectors on random matrices that all modules share.

A (r, widest in) and B (tallest out, r) are drawn once and never trained; a module has their first columns and rows.
Sources: Kopiczko et al. 2023 (arXiv 2310.11454), equation 2; peft tuners/vera for the files, the initial values, and
how the matrices are drawn from `projection_prng_key`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm, AdapterProducts
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    SD_SCRIPTS_LACKS_ALGORITHM,
    AmbiguityOptions,
    FactorRole,
    FileFacts,
    KeySuffix,
    RolesByName,
    Shape,
    SiteAdapter,
    SupportByProgram,
    Target,
    TensorsByRole,
    get_factor_shapes,
    make_misfit_error,
    make_shapes_error,
)
from finitune.adapters.dropout import Dropout
from finitune.adapters.lowrank import TruncatedFactors, truncate_factors
from finitune.errors import AdapterError

_INITIAL_D = 0.1
_DEFAULT_KEY = 0


class VeRA(AdapterAlgorithm):
    """`lambda_b` (out), `lambda_d` (r); of all modules `projection_a` (r, >= in) and `projection_b` (>= out, r).

    Options: `projection_prng_key`, from which the projections are drawn.
    """

    name = "vera"
    title = "VeRA"
    additive = factored = trainable = drops_inside = True
    rowwise = False
    roles: ClassVar[RolesByName] = {
        "lambda_b": FactorRole(scaled=True),
        "lambda_d": FactorRole(),
        "projection_a": FactorRole(trained=False, shared_key="base_model.vera_A"),
        "projection_b": FactorRole(trained=False, shared_key="base_model.vera_B"),
    }
    terms = (frozenset(roles),)
    rank_means, alpha_means = "factors", "nothing"
    options = ("projection_prng_key",)
    peft_type = "VERA"
    suffixes = tuple(KeySuffix(f".vera_{role}", role, ("peft",), named=True) for role in ("lambda_b", "lambda_d"))
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        "PEFT": ALGORITHM_LOADS,
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        shapes = get_factor_shapes(adapter)
        (rank, *_), a, b, outputs = (shapes[r] for r in ("lambda_d", "projection_a", "projection_b", "lambda_b"))
        if len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank or len(outputs) != 1 or outputs[0] > b[0]:
            raise make_shapes_error(self, adapter, "the vectors are not those of the shared matrices")
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        widest, outputs = adapter.tensors["projection_a"].shape[1], adapter.tensors["lambda_b"].shape[0]
        if shape is not None and (outputs != shape[0] or math.prod(shape[1:]) > widest):
            raise make_misfit_error(f"{self.title} vectors and matrices are for", (outputs, widest), shape)

    def draw_shared(self, shapes: Sequence[Shape], target: Target) -> dict[str, Tensor]:
        key = int(target.options.get("projection_prng_key", _DEFAULT_KEY))
        a, b = draw_projections(key, target.rank, max(s[0] for s in shapes), max(math.prod(s[1:]) for s in shapes))
        return {"projection_a": a, "projection_b": b}

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """The projections are those of `target.shared`, or the module's own where it is alone."""
        shared = target.shared or self.draw_shared([target.shape], target)
        own = {"lambda_b": torch.zeros(target.shape[0]), "lambda_d": torch.full((target.rank,), _INITIAL_D)}
        kept = {name: target.options[name] for name in self.options if target.options.get(name)}
        return SiteAdapter(self.name, {**own, **shared}, options=kept)

    def count_rows(self, adapter: SiteAdapter) -> int | None:
        return adapter.tensors["lambda_b"].shape[0]

    def can_cut(self, adapter: SiteAdapter) -> bool:
        """Rows from below the first would need other rows of the shared matrix than it gives them."""
        return False

    def matrices(self, tensors: TensorsByRole, inputs: int) -> tuple[Tensor, Tensor]:
        """diag(lambda_b) B (out, r) and diag(lambda_d) A (r, inputs)."""
        b, d = (tensors[role][:, None] for role in ("lambda_b", "lambda_d"))
        return b * tensors["projection_b"][: len(b)], d * tensors["projection_a"][:, :inputs]

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        tensors = {role: tensor.to(base.dtype) for role, tensor in adapter.tensors.items()}
        up, down = self.matrices(tensors, math.prod(base.shape[1:]))
        return (up @ down).view(base.shape)

    def factorize(self, adapter: SiteAdapter, shape: Shape, rank: int | None) -> TruncatedFactors:
        tensors = {role: tensor.double() for role, tensor in adapter.tensors.items()}
        return truncate_factors(*self.matrices(tensors, math.prod(shape[1:])), rank=rank)

    def forward(
        self,
        adapter: SiteAdapter,
        x: Tensor,
        products: AdapterProducts,
        factor: float = 1.0,
        dropping: Dropout | None = None,
    ) -> Tensor | None:
        if products.channels != -1:  # a kernel's shape is not the adapter's to know
            return None
        b, d, projection_a, projection_b = (adapter.tensors[role] for role in self.roles)
        inner = products.apply_pointwise(x, projection_a[:, : x.shape[-1]])
        if dropping:
            inner = dropping.inside(inner, products.channels)
        return products.apply_pointwise(inner * (factor * d), projection_b[: len(b)]) * b

    def factor_gradients(self, adapter: SiteAdapter, x: Tensor, grad: Tensor) -> Mapping[str, Tensor] | None:
        """The trained vectors' alone: with y = A x, d lambda_d = y . (B^T diag(lambda_b) grad), and likewise above."""
        b, d = adapter.tensors["lambda_b"], adapter.tensors["lambda_d"]
        a = adapter.tensors["projection_a"][:, : x.shape[1]]
        projection_b = adapter.tensors["projection_b"][: len(b)]
        inner = x @ a.t()
        of_d = (inner * ((grad * b) @ projection_b)).sum(0)
        return {"lambda_d": of_d, "lambda_b": (grad * ((inner * d) @ projection_b.t())).sum(0)}

    def detect_convention(
        self, modules: Sequence[tuple[Mapping[str, Shape], Shape | None]], options: AmbiguityOptions
    ) -> str:
        """The extent of the projections, "out in", where every weight is known: that of the largest of each."""
        known = [shape for shapes, shape in modules if "lambda_b" in shapes]
        weights = [shape for shape in known if shape is not None and len(shape) > 1]
        if not known or len(weights) < len(known):
            return ""
        return f"{max(shape[0] for shape in weights)} {max(math.prod(shape[1:]) for shape in weights)}"

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        """A file without the projections (PEFT's save_projection=False) has them drawn again from its key."""
        key = int(facts.config.get("projection_prng_key", _DEFAULT_KEY))
        options = {"projection_prng_key": key} if key != _DEFAULT_KEY else {}
        if {"projection_a", "projection_b"} & tensors.keys() or "lambda_d" not in tensors:
            return SiteAdapter(self.name, tensors, options=options)
        if not facts.convention:
            raise AdapterError(
                "the file has VeRA's vectors without the matrices that they are for, and the model tells their extent",
                code="ADAPTER-PROJECTION",
                evidence={"roles": sorted(tensors)},
                remedy="Name a checkpoint of the model (--model FILE), or save it again with save_projection=True.",
            )
        outputs, inputs = (int(number) for number in facts.convention.split())
        a, b = draw_projections(key, tensors["lambda_d"].shape[0], outputs, inputs)
        return SiteAdapter(self.name, {**tensors, "projection_a": a, "projection_b": b}, options=options)

    def peft_config(self, adapters: Mapping[str, SiteAdapter]) -> dict[str, Any]:
        one = next(iter(adapters.values()))
        key = int(one.options.get("projection_prng_key", _DEFAULT_KEY))
        return {"r": one.tensors["lambda_d"].shape[0], "projection_prng_key": key, "save_projection": True}


@lru_cache(maxsize=1)
def draw_projections(key: int, rank: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A (rank, inputs) and B (outputs, rank) in fp32, as PEFT draws them; not to be written to."""
    generator = torch.Generator().manual_seed(key)
    a, b = torch.empty(rank, inputs), torch.empty(outputs, rank)
    torch.nn.init.kaiming_uniform_(a, generator=generator)
    torch.nn.init.kaiming_uniform_(b, generator=generator)
    return a, b
