"""OFT v2: W(1) = W R^T, with R block-diagonal on the input side, kernel axes included.

Sources: Qiu et al. 2025 (arXiv 2506.19847); peft tuners/oft/layer.py. There R is the Neumann series of the Cayley
transform of Q, or exactly the transform of -Q: the two turn in opposite senses, so a file is read right only with its
`neumann_terms`. OneTrainer's marker `scaled_oft` divides the packed numbers by 2 * sqrt(b - 1) first.
PEFT's forward over a convolution adds overlapping patches and does not even start at the base's output; what it merges
is W R^T over (in * kernel), and that is what is meant here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    get_factor_shapes,
    make_misfit_error,
    make_shapes_error,
)
from finitune.adapters.rotation import (
    choose_block_size,
    compute_cayley_turn,
    compute_neumann_turn,
    infer_packed_block_size,
    list_divisors,
    unpack_skew_matrices,
)

_DEFAULT_NEUMANN_TERMS = 5


class OFTv2(AdapterAlgorithm):
    """`packed` (n, b * (b - 1) / 2), upper triangles of Q; n = 1 turns every block of the inputs alike.

    Options: `neumann_terms` (5 where absent, as in PEFT; 0 for the exact transform of -Q); `scaled`.
    """

    name = "oft_v2"
    title = "OFT v2"
    additive = rowwise = factored = False
    trainable = True
    roles: ClassVar[RolesByName] = {"packed": FactorRole()}
    terms = (frozenset({"packed"}),)
    rank_means, alpha_means = "block size", "nothing"
    options = ("neumann_terms", "scaled")
    suffixes = (
        KeySuffix(".oft_R.weight", "packed", ("peft",), named=True),
        # OneTrainer's mark that packed rotations are divided by 2 sqrt(b - 1).
        KeySuffix(".oft_R.scaled_oft", "scaled", ("peft",), named=True),
    )
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        "PEFT": ALGORITHM_LOADS,
        **dict.fromkeys(
            ("ComfyUI", "Forge", "A1111"),
            ProgramSupport(LoadVerdict.NO, "it does not know PEFT's rotations (oft_R)"),
        ),
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        packed = get_factor_shapes(adapter)["packed"]
        size = infer_packed_block_size(packed[-1])
        if len(packed) != 2 or size < 2 or size * (size - 1) // 2 != packed[1]:
            raise make_shapes_error(self, adapter, f"packed {list(packed)} are not n upper triangles")
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        if shape is None:
            return
        count, length = adapter.tensors["packed"].shape
        inputs, turned = math.prod(shape[1:]), count * infer_packed_block_size(length)
        if turned != inputs and (count > 1 or inputs % turned):
            raise make_misfit_error(f"{self.title} blocks turn inputs of", (turned,), (inputs,))

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """Blocks of the option `block_size`, or of the largest size up to the rank; one for all with `block_share`."""
        inputs = math.prod(target.shape[1:])
        size = choose_block_size(self, target, inputs, list_divisors(inputs), target.rank)
        count = 1 if target.options.get("block_share") else inputs // size
        kept = {name: target.options[name] for name in self.options if name in target.options}
        return SiteAdapter(self.name, {"packed": torch.zeros(count, size * (size - 1) // 2)}, options=kept)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        q = unpack_skew_matrices(adapter.tensors["packed"].to(base.dtype))
        size = q.shape[-1]
        if adapter.options.get("scaled"):
            q = q / (2 * math.sqrt(size - 1))
        terms = int(adapter.options.get("neumann_terms", _DEFAULT_NEUMANN_TERMS))
        step = compute_neumann_turn(q, terms) if terms else compute_cayley_turn(-q)
        columns = base.reshape(base.shape[0], -1, size)
        return torch.einsum("o n k, n c k -> o n c", columns, step.expand(columns.shape[1], -1, -1)).reshape(base.shape)

    def acts_on_inputs(self, adapter: SiteAdapter) -> bool:
        return True

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        packed = shapes.get("packed", ())
        return packed[0] * infer_packed_block_size(packed[-1]) if packed and packed[0] > 1 else None

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        """By PEFT's series unless its configuration asks for the exact transform."""
        options: dict[str, float | bool | str] = {}
        if tensors.pop("scaled", None) is not None:
            options["scaled"] = True
        if facts.config.get("use_cayley_neumann") is False:
            options["neumann_terms"] = 0
        elif isinstance(facts.config.get("num_cayley_neumann_terms"), int):
            options["neumann_terms"] = facts.config["num_cayley_neumann_terms"]
        return SiteAdapter(self.name, tensors, options=options)
