"""Weights that a naming keeps fused, rows below rows: several modules' adapters as one, and one as several.

Fusing: where the parts share all that is not rows (one down for q, k and v), the rows are stacked and nothing else
changes: bit for bit, whatever the algorithm. Parts of one LoKr that are stretches of its rows are that LoKr again. Else
LoRA and LoHa put their factors into the corners of larger ones, at the sum of the ranks, which is exact as well. There
is no further way that is both exact and of the same algorithm.

Splitting: only what holds rows is cut, and every part keeps the rest as it is: all parts of a LoRA share one `down`. A
file with rank 16 whose linear1 is divided in four has four ups and the whole of down each, never a quarter of its rank.
A LoKr whose blocks of rows begin and end elsewhere than the parts is not cut: each part is a stretch of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.convert import Exactness
from finitune.adapters.core import Magnitude, Shape, SiteAdapter
from finitune.adapters.lokr import ROW_RANGE_OPTIONS, LoKr, count_block_rows, get_row_range, restrict_to_rows
from finitune.errors import AdapterError
from finitune.namings.core import SiteTarget
from finitune.namings.tensor_reader import DeferredTensors, to_meta_adapter

RowRange = tuple[int, int]
"""First row and number of rows."""


@dataclass(frozen=True)
class FusedAdapter:
    """An adapter of a fused weight, and what kind of conversion made it."""

    adapter: SiteAdapter
    exactness: Exactness


def infer_weight_rows(adapter: SiteAdapter) -> int | None:
    """How many rows the adapter's weight has, or None where the tensors cannot tell."""
    return find_algorithm(adapter.algorithm).count_rows(to_meta_adapter(adapter))


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
    algorithm = find_algorithm(first.algorithm)
    whole = not any(map(get_row_range, present))
    if (whole and not all(map(algorithm.can_cut, present))) or not algorithm.can_stack(parts):
        raise make_cannot_fuse_error(site, present, "its tensors do not divide into rows")
    one_scale = len({algorithm.scale(part) for part in present}) == 1
    ready = [part if one_scale else part and fold_scale_into_factor(part) for part in parts]
    if not has_same_shared_tensors([part for part in ready if part is not None]):
        return FusedAdapter(fuse_block_diagonal(parts, rows, site), Exactness.GROWING)
    template = next(part for part in ready if part is not None)
    tensors = dict(template.tensors)
    for role, axis in find_row_roles(present).items():
        pieces = [
            get_row_piece(part, template, role, axis, count, site) for part, count in zip(ready, rows, strict=True)
        ]
        tensors[role] = torch.cat(pieces, dim=axis)
    options = drop_stretch_options(template)
    fused = replace(template, tensors=tensors, magnitude=stack_magnitudes(parts, site), options=options)
    lossless = one_scale and len(present) == len(parts)
    return FusedAdapter(fused, Exactness.LOSSLESS if lossless else Exactness.EXACT)


def drop_stretch_options(adapter: SiteAdapter) -> dict[str, float | bool | str]:
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
    own = find_algorithm(adapter.algorithm).acts_on_inputs(adapter)
    return own and "diff_b" not in adapter.tensors and adapter.magnitude is None


def has_same_tensors(adapter: SiteAdapter, other: SiteAdapter) -> bool:
    a, b = adapter.tensors, other.tensors
    return a.keys() == b.keys() and all(is_same_tensor(a[role], b[role]) for role in a)


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

    if not find_algorithm(adapter.algorithm).can_cut(adapter) or get_row_range(adapter) is not None:
        raise make_cannot_fuse_error(site, [adapter], "its tensors do not divide into rows")
    tensors = {role: swap(adapter.tensors[role], axis) for role, axis in find_row_roles([adapter]).items()}
    magnitude = adapter.magnitude
    if magnitude is not None and magnitude.side == "out":
        magnitude = replace(magnitude, tensor=swap(magnitude.tensor.flatten(), 0).view(magnitude.tensor.shape))
    return replace(adapter, tensors={**adapter.tensors, **tensors}, magnitude=magnitude)


def find_row_roles(parts: Sequence[SiteAdapter]) -> dict[str, int]:
    """The roles that hold rows in any of the parts (which are of one algorithm), and along which axis."""
    axes: dict[str, int] = {}
    for part in parts:
        axes |= find_algorithm(part.algorithm).row_axes(part)
        axes |= {"diff_b": 0} if "diff_b" in part.tensors else {}
    return axes


def has_same_shared_tensors(parts: Sequence[SiteAdapter]) -> bool:
    """Whether all that is not rows is the same in every part, to the bit."""
    rows = find_row_roles(parts)
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
    algorithm = find_algorithm(first.algorithm)
    cores = set(algorithm.roles_where(core=True))
    if not algorithm.pairs or any(cores & set(part.tensors) for part in present):
        raise make_cannot_fuse_error(site, present, "the parts differ in more than their rows")
    scales = {algorithm.scale(part) for part in present}
    ready = [part if len(scales) == 1 else part and fold_scale_into_factor(part) for part in parts]
    kept = [part for part in ready if part is not None]
    ranks = [algorithm.rank(part) or 0 for part in kept]
    tensors: dict[str, Tensor] = {}
    for left, right in algorithm.pairs:
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
        sum(rows), columns, *known[0].shape[2:], dtype=reduce(torch.promote_types, (block.dtype for block in known))
    )
    top = left = 0
    for block, count in zip(blocks, rows, strict=True):
        if block is not None:
            whole[top : top + count, left : left + block.shape[1]] = block
            left += block.shape[1]
        top += count
    return whole


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
    return replace(multiply_change(adapter, scale), alpha=float(rank), rank_stabilised=False)


def multiply_change(adapter: SiteAdapter, factor: float) -> SiteAdapter:
    """The adapter whose change of the weight is `factor` times as large, alpha as it was stated."""
    scaled = find_algorithm(adapter.algorithm).roles_where(scaled=True) if factor != 1 else ()
    tensors = {role: multiply_exactly(adapter.tensors[role], factor) for role in scaled if role in adapter.tensors}
    return adapter.with_tensors(**tensors)


def multiply_exactly(tensor: Tensor, factor: float) -> Tensor:
    """`factor * tensor`: in its own dtype where that is exact, else in fp32."""
    product = tensor * factor
    if math.frexp(factor)[0] in (0.5, -0.5) and torch.equal(product / factor, tensor):
        return product
    return (tensor.double() * factor).float()


def make_cannot_fuse_error(site: str, parts: Sequence[SiteAdapter], why: str) -> AdapterError:
    titles = sorted({find_algorithm(part.algorithm).title for part in parts})
    return AdapterError(
        f"{site or 'these modules'}: {' and '.join(titles)} cannot be written as one fused module: {why}",
        code="FUSE-IMPOSSIBLE",
        subject=site,
        evidence={"algorithms": sorted({part.algorithm for part in parts}), "parts": len(parts)},
        remedy="Write LoRA, which always fuses: --as lora (with --rank N if it may be approximate).",
    )


def split_fused_adapter(
    adapter: SiteAdapter, landing: SiteTarget, shapes: Mapping[str, Shape] | None = None
) -> dict[str, SiteAdapter]:
    """The adapter of each site that a module's rows are; the very adapter where it is one site.

    `shapes` are the model's own weights by component and site, where they are known. Raises AdapterError
    (ADAPTER-FUSED) where the adapter cannot be divided exactly, and (ADAPTER-SWAPPED) where its rows have no halves.
    """
    if landing.swapped:
        adapter = restore_half_order(adapter, landing)
    if len(landing.sites) == 1:
        return {landing.sites[0]: adapter}
    if is_input_side_only(adapter):
        return dict.fromkeys(landing.sites, adapter)
    rows, algorithm = infer_weight_rows(adapter), find_algorithm(adapter.algorithm)
    if rows is None or not algorithm.can_cut(to_meta_adapter(adapter)):
        raise make_indivisible_error(adapter, landing, "its tensors do not divide into rows")
    if algorithm.alpha_means == "constraint" and adapter.options.get("constraint"):
        raise make_indivisible_error(adapter, landing, "its constraint holds for all blocks together")
    if adapter.magnitude is not None and adapter.magnitude.side == "in":
        raise make_indivisible_error(
            adapter, landing, "its magnitudes are of the inputs, and their norms mix the parts' rows"
        )
    stretches = find_row_ranges(adapter, landing, rows, shapes or {})
    kept = {site: stretch for site, stretch in stretches.items() if stretch[1]}
    if adapter.algorithm == LoKr.name and any(n % count_block_rows(adapter) for s in stretches.values() for n in s):
        return {site: slice_lokr_rows(adapter, stretch) for site, stretch in kept.items()}
    return {site: slice_fused_adapter_rows(adapter, landing, stretch, rows) for site, stretch in kept.items()}


def restore_half_order(adapter: SiteAdapter, landing: SiteTarget) -> SiteAdapter:
    """The adapter with the halves of its rows in diffusers' order (shift and scale have changed places)."""
    try:
        return swap_site_adapter_halves(adapter, landing.sites[0])
    except AdapterError as error:
        title = find_algorithm(adapter.algorithm).title
        raise AdapterError(
            f"the {title} of {landing.sites[0]} cannot be read: the halves of its rows change places there, and its "
            "tensors have no halves",
            code="ADAPTER-SWAPPED",
            subject=landing.sites[0],
            evidence={"algorithm": adapter.algorithm},
            remedy="Export it as a plain LoRA, or apply it with a program that keeps the model's original weights.",
        ) from error


def find_row_ranges(
    adapter: SiteAdapter, landing: SiteTarget, rows: int, shapes: Mapping[str, Shape]
) -> dict[str, RowRange]:
    """The rows of each site: as the model's weights have them where known, else by the place's rule."""
    known = [shapes.get(f"{landing.component}.{site}", (None,))[0] for site in landing.sites]
    count = len(known)
    if all(size is not None for size in known):
        sizes = [size or 0 for size in known]
        while sizes and sum(sizes) > rows:
            sizes.pop()  # XLabs adapts q, k and v of a weight that holds more
    elif landing.division == "equal":
        sizes = [rows // count] * count
    else:
        shape = find_algorithm(adapter.algorithm).shape(to_meta_adapter(adapter))
        if shape is None or len(shape) < 2:
            raise make_indivisible_error(
                adapter, landing, "where its parts begin does not follow from its shapes: name the model"
            )
        sizes = [shape[1]] * (count - 1)
        sizes.append(rows - sum(sizes))
    if sum(sizes) != rows or min(sizes, default=0) < 0:
        raise make_indivisible_error(adapter, landing, f"its {rows} rows are not those of {count} parts")
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return dict(zip(landing.sites, zip(starts, sizes, strict=True), strict=False))


def slice_lokr_rows(adapter: SiteAdapter, stretch: RowRange) -> SiteAdapter:
    """Some rows of a LoKr, in its very tensors; of the bias and the magnitudes the same rows."""
    start, length = stretch
    tensors = {role: t.narrow(0, *stretch) if role == "diff_b" else t for role, t in adapter.tensors.items()}
    magnitude = adapter.magnitude and slice_magnitude_rows(adapter.magnitude, stretch)
    return restrict_to_rows(replace(adapter, tensors=tensors, magnitude=magnitude), start, start + length)


def slice_fused_adapter_rows(adapter: SiteAdapter, landing: SiteTarget, stretch: RowRange, rows: int) -> SiteAdapter:
    start, length = stretch

    def cut(size: int, role: str) -> RowRange:
        """The stretch of a tensor's axis, which may count blocks of rows."""
        if start * size % rows or length * size % rows:
            why = f"rows {start} to {start + length} do not begin and end with its blocks of {rows // size} rows"
            raise make_indivisible_error(adapter, landing, f"{why} ({role})")
        return start * size // rows, length * size // rows

    axes = find_row_roles([to_meta_adapter(adapter)])
    magnitude = adapter.magnitude and slice_magnitude_rows(adapter.magnitude, stretch)
    if isinstance(adapter.tensors, DeferredTensors):
        pending = dict(adapter.tensors.pending)
        for role, axis in axes.items():
            pending[role] = pending[role].narrow(axis, *cut(pending[role].shape[axis], role))
        return replace(adapter, tensors=DeferredTensors(pending), magnitude=magnitude)
    tensors: dict[str, Tensor] = dict(adapter.tensors)
    for role, axis in axes.items():
        tensors[role] = tensors[role].narrow(axis, *cut(tensors[role].shape[axis], role))
    return replace(adapter, tensors=tensors, magnitude=magnitude)


def slice_magnitude_rows(magnitude: Magnitude, stretch: RowRange) -> Magnitude:
    tensor = magnitude.tensor
    axis = max(range(tensor.ndim), key=lambda n: tensor.shape[n])
    return replace(magnitude, tensor=tensor.narrow(axis, *stretch))


def make_indivisible_error(adapter: SiteAdapter, landing: SiteTarget, why: str) -> AdapterError:
    title = find_algorithm(adapter.algorithm).title
    return AdapterError(
        f"the {title} of a fused weight cannot be divided into {', '.join(landing.sites)}: {why}",
        code="ADAPTER-FUSED",
        subject=landing.sites[0],
        evidence={"algorithm": adapter.algorithm, "sites": list(landing.sites), "division": landing.division},
        remedy="Extract a LoRA from its full difference first, or apply it with a program that keeps the fused weight.",
    )
