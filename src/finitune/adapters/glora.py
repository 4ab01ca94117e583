"""GLoRA: dW = s * (W @ a1 @ a2 + b1 @ b2): a low-rank map in front of the base weight, and one beside it.

Sources: Chavan et al. 2023 (arXiv 2306.07967), the weight part of equation 3; the order of the factors is that of
LyCORIS modules/glora.py since 2.0. A file of 2023 has `a1` and `a2` the other way round, and `b1` and `b2`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    SD_SCRIPTS_LACKS_ALGORITHM,
    AmbiguityOptions,
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
    get_factor_shapes,
    make_shapes_error,
    make_undecided_shape_error,
)

_OTHER_ORDER = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}


class GLoRA(AdapterAlgorithm):
    """`a1` (in, r), `a2` (r, in), `b1` (out, r), all perhaps with kernels of 1; `b2` (r, in, *kernel)."""

    name = "glora"
    title = "GLoRA"
    additive = rowwise = factored = False
    trainable = True
    roles: ClassVar[RolesByName] = {
        "a1": FactorRole(scaled=True),
        "a2": FactorRole(),
        "b1": FactorRole(row_axis=0, scaled=True),
        "b2": FactorRole(),
    }
    terms = (frozenset({"a1", "a2"}), frozenset({"b1", "b2"}))
    rank_means, alpha_means = "factors", "scale"
    options = ()
    lycoris_algo = "glora"
    field_names = ("glora",)
    suffixes = tuple(KeySuffix(f".{role}.weight", role, ("kohya",)) for role in roles)
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        **dict.fromkeys(("ComfyUI", "Forge"), ALGORITHM_LOADS),
        "A1111": ProgramSupport(LoadVerdict.WRONG, "it knows only the order of the factors of 2023"),
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def rank(self, adapter: SiteAdapter) -> int:
        return adapter.tensors["a2"].shape[0]

    def shape(self, adapter: SiteAdapter) -> Shape:
        shapes = get_factor_shapes(adapter)
        a1, a2, b1, b2 = (shapes[role] for role in ("a1", "a2", "b1", "b2"))
        matrices = all(len(s) >= 2 for s in (a1, a2, b1, b2)) and math.prod(a1[2:] + a2[2:] + b1[2:]) == 1
        if not matrices or not a1[1] == a2[0] == b1[1] == b2[0] or not a1[0] == a2[1] == b2[1]:
            raise make_shapes_error(self, adapter, "a1 @ a2 is not (in, in), or b1 @ b2 not (out, in), of one rank")
        return (b1[0], *b2[1:])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        (out, into, *kernel), rank = target.shape, target.rank
        ones = [1] * len(kernel)
        tensors = {"a1": torch.empty(into, rank, *ones), "a2": torch.zeros(rank, into, *ones)}
        tensors |= {"b1": torch.empty(out, rank, *ones), "b2": torch.zeros(rank, into, *kernel)}
        for role in ("a1", "b1"):
            torch.nn.init.kaiming_uniform_(tensors[role], a=math.sqrt(5), generator=generator)
        return SiteAdapter(self.name, tensors, target.alpha)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        a1, a2, b1, b2 = (adapter.tensors[role].to(base.dtype).flatten(1) for role in ("a1", "a2", "b1", "b2"))
        before = torch.einsum("o i ..., i r, r j -> o j ...", base, a1, a2)
        return self.scale(adapter) * (before + (b1 @ b2).view(base.shape))

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        """Not told: a file of 2023 has its factors in another order."""
        return None

    def detect_convention(
        self, modules: Sequence[tuple[Mapping[str, Shape], Shape | None]], options: AmbiguityOptions
    ) -> str:
        """The order that the factors of all modules of a file fit: "new", "old", or "" where both fit.

        A program writes all modules alike, so one weight that is not square decides for them all.
        """
        possible = {"new", "old"}
        for shapes, known in modules:
            if not all(len(shapes.get(role, ())) >= 2 for role in self.roles):
                continue
            a1, a2, b1, b2 = (shapes[role] for role in self.roles)
            new, old = is_consistent_glora(a1, a2, b1, b2, known), is_consistent_glora(a2, a1, b2, b1, known)
            possible &= {name for name, fits in (("new", new), ("old", old)) if fits} or {"new", "old"}
        return possible.pop() if len(possible) == 1 else options.glora_order or ""

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        if not facts.convention:
            raise make_undecided_shape_error(
                "in which order its factors are, that of 2023 or today's",
                "GLoRA of a square weight",
                tuple(tensors["a1"].shape) if "a1" in tensors else (),
                "Name the model (--model), or say the order: --glora-order new, or old.",
            )
        if facts.convention == "old":
            tensors = {_OTHER_ORDER.get(role, role): tensor for role, tensor in tensors.items()}
        return SiteAdapter(self.name, tensors)


def is_consistent_glora(a1: Shape, a2: Shape, b1: Shape, b2: Shape, known: Shape | None) -> bool:
    """Whether a1 (in, r), a2 (r, in), b1 (out, r), b2 (r, in) are of one weight, which is of the known shape if any."""
    fits = a1[1] == a2[0] == b1[1] == b2[0] and a1[0] == a2[1] == b2[1]
    return fits and (known is None or (b1[0], a1[0]) == known[:2])
