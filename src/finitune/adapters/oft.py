"""Diag-OFT: W(1) = s * R^T W, with R block-diagonal and orthogonal, on the output side; s (`rescale`) is optional.

Sources: Qiu et al. 2023 (arXiv 2306.07280); LyCORIS functional/diag_oft.py, where the sum runs over the first axis of
R, hence the transpose; kohya's networks/oft.py turns the finished output Wx + b by the same R, and so its bias.
Strength is ours, W + m * (W(1) - W): LyCORIS leaves `rescale` at full strength even at m = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    AdapterProgram,
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
    apply_rescale,
    choose_block_size,
    compute_cayley_turn,
    compute_skew_generators,
    list_divisors,
    require_rescale_fit,
)
from finitune.errors import AdapterError

COMFY_ROTATIONS = ProgramSupport(LoadVerdict.WRONG, "it applies the strength twice, and leaves rescale out")
FORGE_LACKS_ROTATIONS = ProgramSupport(LoadVerdict.NO, "it has no such adapter (#1395)")


class OFT(AdapterAlgorithm):
    """`blocks` (n, b, b), raw: Q = B - B^T; `rescale` (out[, 1...]).

    Options: `constraint`, the largest norm of Q over all blocks, absolute, 0 for none; `rotates_bias`.
    """

    name = "oft"
    title = "OFT"
    additive = rowwise = factored = False
    trainable = True
    roles: ClassVar[RolesByName] = {"blocks": FactorRole(row_axis=0), "rescale": FactorRole(optional=True, row_axis=0)}
    terms = (frozenset({"blocks"}),)
    rank_means, alpha_means = "block size", "constraint"
    options = ("constraint", "rotates_bias")
    lycoris_algo = "diag-oft"
    field_names = ("diag-oft", "diag_oft", "oft")
    suffixes = (
        KeySuffix(".oft_blocks", "blocks", ("kohya",)),
        KeySuffix(".oft_diag", "rotation", ("kohya",)),  # R itself, of LyCORIS before 2.0
        KeySuffix(".rescale", "rescale", ("kohya",)),
    )
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        "ComfyUI": COMFY_ROTATIONS,
        "A1111": ALGORITHM_LOADS,
        "Forge": FORGE_LACKS_ROTATIONS,
        "sd-scripts": ALGORITHM_LOADS,
    }

    def support(self, program: AdapterProgram, adapters: Sequence[SiteAdapter], family: str) -> ProgramSupport:
        if program == "sd-scripts" and not all(adapter.options.get("constraint") for adapter in adapters):
            return ProgramSupport(LoadVerdict.WRONG, "it takes alpha 0 as no rotation at all")
        return super().support(program, adapters, family)

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        blocks = get_factor_shapes(adapter)["blocks"]
        if len(blocks) != 3 or blocks[1] != blocks[2]:
            raise make_shapes_error(self, adapter, f"blocks {list(blocks)} are not n square matrices")
        require_rescale_fit(self, adapter, count_turned_outputs(adapter))
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        if shape is not None and count_turned_outputs(adapter) != shape[0]:
            raise make_misfit_error(f"{self.title} blocks turn outputs of", (count_turned_outputs(adapter),), shape[:1])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """Blocks of the option `block_size`, or of the largest size up to the rank and the root of the outputs.

        The root is LyCORIS's rule: it cannot load larger blocks than that.
        """
        out = target.shape[0]
        size = choose_block_size(self, target, out, list_divisors(out), min(target.rank, math.isqrt(out)))
        return self.unturned(target, torch.zeros(out // size, size, size))

    def unturned(self, target: Target, blocks: Tensor) -> SiteAdapter:
        """An adapter of such `blocks`, with the rescaling and the options that were asked for."""
        tensors = {"blocks": blocks}
        if target.options.get("rescaled"):
            tensors["rescale"] = torch.ones(target.shape[0], *[1] * (len(target.shape) - 1))
        kept = {name: target.options[name] for name in self.options if name in target.options}
        return SiteAdapter(self.name, tensors, options=kept)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        step = compute_cayley_turn(compute_skew_generators(adapter, base.dtype))
        change = step.mT @ base.reshape(*step.shape[:2], -1)
        return apply_rescale(adapter, change.reshape(base.shape), base)

    def bias_delta(self, adapter: SiteAdapter, bias: Tensor | None) -> Tensor | None:
        plain = super().bias_delta(adapter, bias)
        if bias is None or not adapter.options.get("rotates_bias"):
            return plain
        change = self.delta(adapter, bias[:, None]).squeeze(1)
        return change if plain is None else change + plain

    def has_shapes(self, shapes: Mapping[str, Shape]) -> bool:
        return len(shapes.get("blocks", ())) != 4

    def is_zero(self, adapter: SiteAdapter, zero: Set[str]) -> bool:
        rescale = adapter.tensors.get("rescale")
        return super().is_zero(adapter, zero) and (rescale is None or bool((rescale == 1).all()))

    def count_rows(self, adapter: SiteAdapter) -> int | None:
        return count_turned_outputs(adapter)

    def can_stack(self, parts: Sequence[SiteAdapter | None]) -> bool:
        """The constraint holds for all blocks together; a rescale of zeros is not one that changes nothing."""
        present = [part for part in parts if part is not None]
        whole = len(present) == len(parts) or not any("rescale" in part.tensors for part in present)
        return whole and not any(part.options.get("constraint") for part in present)

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        return None

    def from_file(self, tensors: dict[str, Tensor], facts: FileFacts) -> SiteAdapter:
        """Also from R itself: Q = (R + I)^-1 (R - I), and Q / 2 is a matrix B with B - B^T = Q."""
        rotation = tensors.pop("rotation", None)
        if rotation is not None:
            self.check(SiteAdapter(self.name, {"blocks": rotation}))
            r = rotation.double()
            eye = torch.eye(r.shape[-1], dtype=r.dtype)
            q = torch.linalg.solve(r + eye, r - eye)
            tensors["blocks"] = ((q - q.mT) / 4).float()
        return SiteAdapter(self.name, tensors)

    def stored_alpha(self, adapter: SiteAdapter) -> float | None:
        """The constraint per output."""
        return float(adapter.options.get("constraint", 0.0)) / count_turned_outputs(adapter)


def constrain_rotation(adapter: SiteAdapter, alpha: float | None, turns_bias: bool) -> SiteAdapter:
    """A rotation with the constraint that its alpha is: alpha * outputs, and none for 0.

    `turns_bias`: kohya's own OFT turns the finished output, its bias with it. Raises AdapterError (ADAPTER-ALPHA) for
    an alpha that is no bound.
    """
    if alpha is not None and not (math.isfinite(alpha) and alpha >= 0):
        raise AdapterError(
            f"alpha, the constraint of a rotation, is {alpha:g}",
            code="ADAPTER-ALPHA",
            evidence={"alpha": str(alpha)},
            remedy="Export the adapter again, with alpha in fp32.",
        )
    options = dict(adapter.options)
    if alpha:
        options["constraint"] = alpha * count_turned_outputs(adapter)
    if turns_bias:
        options["rotates_bias"] = True
    return replace(adapter, options=options)


def count_turned_outputs(adapter: SiteAdapter) -> int:
    """How many outputs the blocks (..., n, b, b) turn."""
    *_, count, size, _ = adapter.tensors["blocks"].shape
    return count * size
