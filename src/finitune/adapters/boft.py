"""BOFT: W(1) = s * R_m ... R_1 W; each stage is block-diagonal after a butterfly permutation of the outputs.

Sources: Liu et al. 2023 (arXiv 2311.06243); LyCORIS functional/boft.py for the permutation of stage i, which brings
together what is 2**i * b / 2 apart. Unlike in its Diag-OFT, R itself is applied there, not its transpose.
Strength is ours, W + m * (W(1) - W): LyCORIS blends every stage with I, which is another path between the same ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finitune.adapters.core import Algorithm, Shape, SiteAdapter, Target, does_not_fit, shapes_of, wrong_shapes
from finitune.adapters.oft import turned
from finitune.adapters.rotation import block_size, demand_rescale, generators, turn, with_rescale


class BOFT(Algorithm):
    """`blocks` (m, n, b, b), raw: Q = B - B^T, b even and n a multiple of 2**(m-1); `rescale` (out[, 1...]).

    Option: `constraint`, the largest norm of Q over all blocks and stages, absolute, 0 for none.
    """

    name = "boft"
    title = "BOFT"
    additive = False
    required = frozenset({"blocks"})
    optional = frozenset({"rescale"})

    def shape(self, adapter: SiteAdapter) -> Shape | None:
        blocks = shapes_of(adapter)["blocks"]
        if len(blocks) != 4 or blocks[2] != blocks[3] or blocks[2] % 2 or blocks[1] % 2 ** (blocks[0] - 1):
            raise wrong_shapes(self, adapter, f"blocks {list(blocks)} are not m stages of a butterfly")
        demand_rescale(self, adapter, turned(adapter))
        return None

    def check(self, adapter: SiteAdapter, shape: Shape | None = None) -> None:
        super().check(adapter, shape)
        if shape is not None and turned(adapter) != shape[0]:
            raise does_not_fit(f"{self.title} blocks turn outputs of", (turned(adapter),), shape[:1])

    def init(self, target: Target, generator: torch.Generator) -> SiteAdapter:
        """All stages over blocks of the option `block_size`, or of the largest even size up to the rank.

        Only sizes that leave a power of two of blocks are possible: 10, 20, 40 ... for 320 outputs.
        """
        out = target.shape[0]
        sizes = [out >> k for k in range(out.bit_length()) if out % 2 ** (k + 1) == 0]
        size = block_size(self, target, out, sorted(sizes), target.rank)
        count = out // size
        tensors = {"blocks": torch.zeros(count.bit_length(), count, size, size)}
        if target.options.get("rescaled"):
            tensors["rescale"] = torch.ones(out, *[1] * (len(target.shape) - 1))
        kept = {name: target.options[name] for name in ("constraint",) if name in target.options}
        return SiteAdapter(self.name, tensors, options=kept)

    def delta(self, adapter: SiteAdapter, base: Tensor) -> Tensor:
        steps = turn(generators(adapter, base.dtype))
        rows = base.flatten(1)
        change = torch.zeros_like(rows)
        for stage, step in enumerate(steps):
            change = change + stirred(step, rows + change, 2**stage * step.shape[-1] // 2)
        return with_rescale(adapter, change.view(base.shape), base)


def stirred(blocks: Tensor, rows: Tensor, apart: int) -> Tensor:
    """`blocks` (n, b, b) over `rows` (n * b, c), each block over pairs of rows that lie `apart` from each other."""
    count, size, _ = blocks.shape
    paired = rows.view(-1, 2, apart, rows.shape[1]).transpose(1, 2).reshape(count, size, -1)
    return (blocks @ paired).view(-1, apart, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
