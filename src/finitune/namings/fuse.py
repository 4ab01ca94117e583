"""Several modules' adapters as one of the weight that a naming keeps fused: rows below rows.

Where the parts share all that is not rows (one down for q, k and v), the rows are stacked and nothing else changes:
bit for bit, whatever the algorithm. Parts of one LoKr that are stretches of its rows are that LoKr again. Else LoRA and
LoHa put their factors into the corners of larger ones, at the sum of the ranks, which is exact as well. There is no
further way that is both exact and of the same algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.convert import Exactness
from finitune.adapters.core import Magnitude, SiteAdapter
from finitune.adapters.lokr import ROW_RANGE_OPTIONS, get_row_range
from finitune.adapters.oft import count_turned_outputs
from finitune.errors import AdapterError

ROW_AXES_BY_ALGORITHM: Mapping[str, Mapping[str, int]] = {
    "lora": {"up": 0, "up_bias": 0},
    "loha": {"w1_a": 0, "w2_a": 0},
    "lokr": {"w1": 0, "w1_a": 0},
    "glora": {"b1": 0},
    "oft": {"blocks": 0, "rescale": 0},
    "full": {"diff": 0},
    "norm": {"w_norm": 0, "b_norm": 0},
    "set": {"weight": 0},
}
"""For each algorithm the roles that hold the rows of the weight, and along which axis; `diff_b` does so for all."""

SCALE_ROLES_BY_ALGORITHM = {"lora": ("up", "up_bias"), "loha": ("w1_a",), "lokr": ("w1", "w1_a"), "glora": ("b1",)}
"""Roles of which each term of the change has one, so that a scale can go into them."""


@dataclass(frozen=True)
class FusedAdapter:
    """An adapter of a fused weight, and what kind of conversion made it."""

    adapter: SiteAdapter
    exactness: Exactness


def infer_weight_rows(adapter: SiteAdapter) -> int | None:
    """How many rows the adapter's weight has, or None where the tensors cannot tell."""
    if adapter.algorithm == "oft":
        return count_turned_outputs(adapter)
    shape = find_algorithm(adapter.algorithm).shape(adapter)
    if shape is not None:
        return shape[0]
    bias = adapter.tensors.get("diff_b")
    return None if bias is None else bias.shape[0]


def fuse_site_adapters(parts: Sequence[SiteAdapter | None], rows: Sequence[int], site: str = "") -> FusedAdapter:
    """One adapter for the weight whose rows are those of the parts, from top to bottom; None is a part left alone.

    `rows` says how many rows each part has. Raises AdapterError (FUSE-IMPOSSIBLE) where no exact way exists.
    """
    present = [part for part in parts if part is not None]
    first = present[0]
    if any(
        part.algorithm != first.algorithm or drop_stretch_options(part) != drop_stretch_options(first)
        for part in present
    ):
        raise make_cannot_fuse_error(site, present, "the parts are of different algorithms")
    if any(map(get_row_range, present)) and not is_one_kronecker_product(parts):
        raise make_cannot_fuse_error(
            site, present, "they are not all the rows of one Kronecker product, from top to bottom"
        )
    if (
        is_input_side_only(first)
        and len(present) == len(parts)
        and all(has_same_tensors(part, first) for part in present)
    ):
        return FusedAdapter(first, Exactness.LOSSLESS)
    if first.algorithm not in ROW_AXES_BY_ALGORITHM or not can_fuse_parts(parts):
        raise make_cannot_fuse_error(site, present, "its tensors do not divide into rows")
    if not has_same_shared_tensors(present):
        return FusedAdapter(fuse_block_diagonal(parts, rows, site), Exactness.GROWING)
    one_scale = len({find_algorithm(part.algorithm).scale(part) for part in present}) == 1
    ready = [part if one_scale else part and fold_scale_into_factor(part) for part in parts]
    template = next(part for part in ready if part is not None)
    tensors = dict(template.tensors)
    for role, axis in find_row_roles(present, site).items():
        pieces = [
            get_row_piece(part, template, role, axis, count, site) for part, count in zip(ready, rows, strict=True)
        ]
        tensors[role] = torch.cat(pieces, dim=axis)
    options = drop_stretch_options(template)
    fused = replace(template, tensors=tensors, magnitude=stack_magnitudes(parts, site), options=options)
    lossless = one_scale and len(present) == len(parts)
    return FusedAdapter(fused, Exactness.LOSSLESS if lossless else Exactness.EXACT)


def drop_stretch_options(adapter: SiteAdapter) -> dict[str, float | bool | str]:
    """The options without those that say which rows of a Kronecker product are meant."""
    return {name: value for name, value in adapter.options.items() if name not in ROW_RANGE_OPTIONS}


def is_one_kronecker_product(parts: Sequence[SiteAdapter | None]) -> bool:
    """Whether LoKr parts, whose options agree, are all the rows of one product, from top to bottom and at one scale."""
    present = [part for part in parts if part is not None]
    stretches = [stretch for part in present if (stretch := get_row_range(part)) is not None]
    if len(stretches) < len(parts) or not has_same_shared_tensors(present):
        return False
    whole = infer_weight_rows(replace(present[0], options=drop_stretch_options(present[0])))
    edges = [0, *(end for _, end in stretches)]
    one_scale = len({find_algorithm(part.algorithm).scale(part) for part in present}) == 1
    return one_scale and [begin for begin, _ in stretches] == edges[:-1] and edges[-1] == whole


def is_input_side_only(adapter: SiteAdapter) -> bool:
    """Whether the adapter turns or scales the inputs alone, so that parts of a fused weight have the same one."""
    own = adapter.algorithm == "oft_v2" or (adapter.algorithm == "ia3" and bool(adapter.options.get("on_input")))
    return own and "diff_b" not in adapter.tensors and adapter.magnitude is None


def has_same_tensors(adapter: SiteAdapter, other: SiteAdapter) -> bool:
    """Whether two adapters have the same tensors, to the bit."""
    a, b = adapter.tensors, other.tensors
    return a.keys() == b.keys() and all(is_same_tensor(a[role], b[role]) for role in a)


def can_fuse_parts(parts: Sequence[SiteAdapter | None]) -> bool:
    """Whether zeros change nothing where a part is left alone, and no number holds for all rows together."""
    present = [part for part in parts if part is not None]
    if present[0].algorithm == "set":
        return len(present) == len(parts)
    if present[0].algorithm == "oft":
        whole = len(present) == len(parts) or not any("rescale" in part.tensors for part in present)
        return whole and not present[0].options.get("constraint")
    return True


def swap_site_adapter_halves(adapter: SiteAdapter, site: str = "") -> SiteAdapter:
    """The adapter with the upper and the lower half of its weight's rows exchanged; twice is the identity.

    The very adapter where it acts on the inputs alone. Raises AdapterError (FUSE-IMPOSSIBLE) where it has no halves.
    """
    if is_input_side_only(adapter):
        return adapter

    def swap(tensor: Tensor, axis: int) -> Tensor:
        if tensor.shape[axis] % 2:
            raise make_cannot_fuse_error(site, [adapter], f"{tensor.shape[axis]} blocks of rows have no halves")
        return torch.cat(tensor.chunk(2, dim=axis)[::-1], dim=axis)

    if adapter.algorithm not in ROW_AXES_BY_ALGORITHM or get_row_range(adapter) is not None:
        raise make_cannot_fuse_error(site, [adapter], "its tensors do not divide into rows")
    tensors = {role: swap(adapter.tensors[role], axis) for role, axis in find_row_roles([adapter], site).items()}
    magnitude = adapter.magnitude
    if magnitude is not None and magnitude.side == "out":
        magnitude = replace(magnitude, tensor=swap(magnitude.tensor.flatten(), 0).view(magnitude.tensor.shape))
    return replace(adapter, tensors={**adapter.tensors, **tensors}, magnitude=magnitude)


def find_row_roles(parts: Sequence[SiteAdapter], site: str) -> dict[str, int]:
    """The roles that hold rows in any of the parts (which are of one algorithm), and along which axis.

    Parts that are stretches of one Kronecker product have its factors whole.
    """
    present = {role for part in parts for role in part.tensors}
    cored = bool(present & {"t1", "t2"}) and parts[0].algorithm == "loha"
    table = {**({} if any(map(get_row_range, parts)) else ROW_AXES_BY_ALGORITHM[parts[0].algorithm]), "diff_b": 0}
    return {role: 1 if cored and role != "diff_b" else axis for role, axis in table.items() if role in present}


def has_same_shared_tensors(parts: Sequence[SiteAdapter]) -> bool:
    """Whether all that is not rows is the same in every part, to the bit."""
    rows = find_row_roles(parts, "")
    first, *others = ({r: t for r, t in part.tensors.items() if r not in rows} for part in parts)
    return all(
        other.keys() == first.keys() and all(is_same_tensor(other[r], first[r]) for r in first) for other in others
    )


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or have the same dtype, shape and values."""
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))


def get_row_piece(
    part: SiteAdapter | None, template: SiteAdapter, role: str, axis: int, rows: int, site: str
) -> Tensor:
    """A part's share of a row role; zeros where it is left alone or lacks the role."""
    if part is not None and role in part.tensors:
        return part.tensors[role]
    known = template.tensors.get(role)
    if known is None:
        return torch.zeros(rows)
    whole = infer_weight_rows(template) or known.shape[axis]
    if rows * known.shape[axis] % whole:
        raise make_cannot_fuse_error(site, [template], f"{rows} rows are no whole number of its blocks")
    shape = list(known.shape)
    shape[axis] = rows * known.shape[axis] // whole
    return known.new_zeros(shape)


def fuse_block_diagonal(parts: Sequence[SiteAdapter | None], rows: Sequence[int], site: str) -> SiteAdapter:
    """LoRA or LoHa parts as one whose rank is the sum of theirs: left factors on a diagonal, right ones stacked."""
    present = [part for part in parts if part is not None]
    first = present[0]
    if first.algorithm not in ("lora", "loha") or any({"mid", "t1", "t2"} & set(part.tensors) for part in present):
        raise make_cannot_fuse_error(site, present, "the parts differ in more than their rows")
    algorithm = find_algorithm(first.algorithm)
    scales = {algorithm.scale(part) for part in present}
    ready = [part if len(scales) == 1 else part and fold_scale_into_factor(part) for part in parts]
    kept = [part for part in ready if part is not None]
    ranks = [algorithm.rank(part) or 0 for part in kept]
    pairs = (("up", "down"),) if first.algorithm == "lora" else (("w1_a", "w1_b"), ("w2_a", "w2_b"))
    tensors: dict[str, Tensor] = {}
    for left, right in pairs:
        tensors[left] = build_block_diagonal([part and part.tensors[left] for part in ready], rows, sum(ranks))
        tensors[right] = torch.cat([part.tensors[right] for part in kept])
    for role in {"up_bias", "diff_b"} & {role for part in kept for role in part.tensors}:
        shares = ((part.tensors if part else {}, count) for part, count in zip(ready, rows, strict=True))
        tensors[role] = torch.cat([share.get(role, torch.zeros(count)) for share, count in shares])
    alpha = (scales.pop() if len(scales) == 1 else 1.0) * sum(ranks)
    return SiteAdapter(first.algorithm, tensors, alpha, magnitude=stack_magnitudes(parts, site), options=first.options)


def build_block_diagonal(blocks: Sequence[Tensor | None], rows: Sequence[int], columns: int) -> Tensor:
    """Blocks (rows_i, r_i, ...) along the diagonal of zeros (sum of rows, columns, ...); None leaves its rows zero."""
    known = [block for block in blocks if block is not None]
    whole = known[0].new_zeros(
        sum(rows), columns, *known[0].shape[2:], dtype=promote_all_dtypes([block.dtype for block in known])
    )
    top = left = 0
    for block, count in zip(blocks, rows, strict=True):
        if block is not None:
            whole[top : top + count, left : left + block.shape[1]] = block
            left += block.shape[1]
        top += count
    return whole


def promote_all_dtypes(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds the values of all of them."""
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def stack_magnitudes(parts: Sequence[SiteAdapter | None], site: str) -> Magnitude | None:
    """The magnitudes of all parts, one below the other; None where no part has one."""
    magnitudes = [None if part is None else part.magnitude for part in parts]
    known = [magnitude for magnitude in magnitudes if magnitude is not None]
    if not known:
        return None
    present = [part for part in parts if part is not None]
    kinds = {(magnitude.side, magnitude.norm_of, magnitude.eps) for magnitude in known}
    if len(known) < len(parts) or len(kinds) > 1:
        raise make_cannot_fuse_error(
            site, present, "only some of the parts have magnitudes (DoRA), or of different kinds"
        )
    if known[0].side == "in":
        raise make_cannot_fuse_error(
            site, present, "its magnitudes (DoRA) are of the inputs, and the norm would mix the parts"
        )
    return replace(known[0], tensor=torch.cat([magnitude.tensor.flatten() for magnitude in known]))


def fold_scale_into_factor(adapter: SiteAdapter) -> SiteAdapter:
    """The same change at scale 1: the scale goes into one factor; in fp32 unless it is a power of two."""
    algorithm = find_algorithm(adapter.algorithm)
    rank, scale = algorithm.rank(adapter), algorithm.scale(adapter)
    if rank is None:
        return adapter
    roles = [
        role for role in SCALE_ROLES_BY_ALGORITHM.get(adapter.algorithm, ()) if role in adapter.tensors and scale != 1
    ]
    tensors = {role: multiply_exactly(adapter.tensors[role], scale) for role in roles}
    return replace(adapter.with_tensors(**tensors), alpha=float(rank), rank_stabilised=False)


def multiply_exactly(tensor: Tensor, factor: float) -> Tensor:
    """`factor * tensor`: in its own dtype where that is exact, else in fp32."""
    product = tensor * factor
    if math.frexp(factor)[0] in (0.5, -0.5) and torch.equal(product / factor, tensor):
        return product
    return (tensor.double() * factor).float()


def make_cannot_fuse_error(site: str, parts: Sequence[SiteAdapter], why: str) -> AdapterError:
    """The error for parts that no single adapter of theirs can be."""
    titles = sorted({find_algorithm(part.algorithm).title for part in parts})
    return AdapterError(
        f"{site or 'these modules'}: {' and '.join(titles)} cannot be written as one fused module: {why}",
        code="FUSE-IMPOSSIBLE",
        subject=site,
        evidence={"algorithms": sorted({part.algorithm for part in parts}), "parts": len(parts)},
        remedy="Write LoRA, which always fuses: --as lora (with --rank N if it may be approximate).",
    )
