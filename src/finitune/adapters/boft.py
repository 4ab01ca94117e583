"""BOFT: W(1) = s * R_m ... R_1 W; each stage is block-diagonal after a butterfly permutation of the outputs.

Sources: Liu et al. 2023 (arXiv 2311.06243); LyCORIS functional/boft.py for the permutation of stage i, which brings
together what is 2**i * b / 2 apart. Unlike in its Diag-OFT, R itself is applied there, not its transpose.
Strength is ours, W + m * (W(1) - W): LyCORIS blends every stage with I, which is another path between the same ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterForm
from finitune.adapters.core import (
    ALGORITHM_LOADS,
    LORA_CONVERTER_ONLY,
    SD_SCRIPTS_LACKS_ALGORITHM,
    AdapterProgram,
    FactorRole,
    KeySuffix,
    ProgramSupport,
    RolesByName,
    Shape,
    SiteAdapter,
    SupportByProgram,
    Target,
    get_factor_shapes,
    make_shapes_error,
)
from finitune.adapters.oft import COMFY_ROTATIONS, FORGE_LACKS_ROTATIONS, OFT, count_turned_outputs
from finitune.adapters.rotation import (
    apply_rescale,
    choose_block_size,
    compute_cayley_turn,
    compute_skew_generators,
    require_rescale_fit,
)


class BOFT(OFT):
    """`blocks` (m, n, b, b), raw: Q = B - B^T, b even and n a multiple of 2**(m-1); `rescale` (out[, 1...]).

    Option: `constraint`, the largest norm of Q over all blocks and stages, absolute, 0 for none.
    """

    name = "boft"
    title = "BOFT"
    roles: ClassVar[RolesByName] = {"blocks": FactorRole(), "rescale": FactorRole(optional=True)}
    options = ("constraint",)
    lycoris_algo = "boft"
    field_names = ("boft",)
    suffixes = (KeySuffix(".oft_blocks", "blocks", ("kohya",)), KeySuffix(".rescale", "rescale", ("kohya",)))
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        "ComfyUI": COMFY_ROTATIONS,
        "A1111": ALGORITHM_LOADS,
        "Forge": FORGE_LACKS_ROTATIONS,
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def support(self, program: AdapterProgram, adapters: Sequence[SiteAdapter], family: str) -> ProgramSupport:
        return AdapterForm.support(self, program, adapters, family)

    def has_shapes(self, shapes: Mapping[str, Shape]) -> bool:
        return len(shapes.get("blocks", ())) == 4

    def count_rows(self, adapter: SiteAdapter) -> int | None:
        """Not told: a butterfly mixes rows from far apart, so that no rows of it are an adapter."""
        return None

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        blocks = get_factor_shapes(adapter)["blocks"]
        if len(blocks) != 4 or blocks[2] != blocks[3] or blocks[2] % 2 or blocks[1] % 2 ** (blocks[0] - 1):
            raise make_shapes_error(self, adapter, f"blocks {list(blocks)} are not m stages of a butterfly")
        require_rescale_fit(self, adapter, count_turned_outputs(adapter))
        return None

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """All stages over blocks of the option `block_size`, or of the largest even size up to the rank.

        Only sizes that leave a power of two of blocks are possible: 10, 20, 40 ... for 320 outputs.
        """
        out = target.shape[0]
        sizes = [out >> k for k in range(out.bit_length()) if out % 2 ** (k + 1) == 0]
        size = choose_block_size(self, target, out, sorted(sizes), target.rank)
        count = out // size
        return self.unturned(target, torch.zeros(count.bit_length(), count, size, size))

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        steps = compute_cayley_turn(compute_skew_generators(adapter, base.dtype))
        rows = base.flatten(1)
        change = torch.zeros_like(rows)
        for stage, step in enumerate(steps):
            change = change + apply_butterfly_stage(step, rows + change, 2**stage * step.shape[-1] // 2)
        return apply_rescale(adapter, change.view(base.shape), base)


def apply_butterfly_stage(blocks: Tensor, rows: Tensor, apart: int) -> Tensor:
    """`blocks` (n, b, b) over `rows` (n * b, c), each block over pairs of rows that lie `apart` from each other."""
    count, size, _ = blocks.shape
    paired = rows.view(-1, 2, apart, rows.shape[1]).transpose(1, 2).reshape(count, size, -1)
    return (blocks @ paired).view(-1, apart, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
