"""One adapter of a weight that the original model keeps fused, as one adapter for each of the modules that it is.

Only what holds rows is cut, and every part keeps the rest as it is: all parts of a LoRA share one `down`. A file with
rank 16 whose linear1 is divided in four has four ups and the whole of down each, never a quarter of its rank. A LoKr
whose blocks of rows begin and end elsewhere than the parts is not cut: each part is a stretch of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.core import Magnitude, Shape, SiteAdapter
from finitune.adapters.lokr import count_block_rows, restrict_to_rows
from finitune.adapters.oft import count_turned_outputs
from finitune.errors import AdapterError
from finitune.namings.core import SiteTarget
from finitune.namings.fuse import ROW_AXES_BY_ALGORITHM, find_row_roles, infer_weight_rows, swap_site_adapter_halves
from finitune.namings.tensor_reader import DeferredTensors, to_meta_adapter

RowRange = tuple[int, int]
"""First row and number of rows."""


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
    if is_shared_by_all_parts(adapter):
        return dict.fromkeys(landing.sites, adapter)
    rows = count_adapted_rows(adapter)
    if rows is None or (adapter.algorithm not in ROW_AXES_BY_ALGORITHM and adapter.algorithm not in ("oft", "ia3")):
        raise make_indivisible_error(adapter, landing, "its tensors do not divide into rows")
    if adapter.algorithm == "oft" and adapter.options.get("constraint"):
        raise make_indivisible_error(adapter, landing, "its constraint holds for all blocks together")
    if adapter.magnitude is not None and adapter.magnitude.side == "in":
        raise make_indivisible_error(
            adapter, landing, "its magnitudes are of the inputs, and their norms mix the parts' rows"
        )
    stretches = find_row_ranges(adapter, landing, rows, shapes or {})
    if adapter.algorithm == "lokr" and any(
        n % count_block_rows(adapter) for stretch in stretches.values() for n in stretch
    ):
        return {site: slice_lokr_rows(adapter, stretch) for site, stretch in stretches.items() if stretch[1]}
    return {
        site: slice_fused_adapter_rows(adapter, landing, stretch, rows)
        for site, stretch in stretches.items()
        if stretch[1]
    }


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


def is_shared_by_all_parts(adapter: SiteAdapter) -> bool:
    """Whether the adapter acts on the inputs alone, so that every part has it whole."""
    on_input = adapter.algorithm == "oft_v2" or (adapter.algorithm == "ia3" and bool(adapter.options.get("on_input")))
    return on_input and "diff_b" not in adapter.tensors and adapter.magnitude is None


def count_adapted_rows(adapter: SiteAdapter) -> int | None:
    """How many rows the adapted weight has, or None where the tensors do not tell."""
    if adapter.algorithm == "oft":
        return count_turned_outputs(adapter)
    if adapter.algorithm == "ia3" and not adapter.options.get("on_input"):
        return adapter.tensors["weight"].numel()
    return infer_weight_rows(to_meta_adapter(adapter))


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
    """The adapter of some rows of the weight."""
    start, length = stretch

    def cut(size: int, role: str) -> RowRange:
        """The stretch of a tensor's axis, which may count blocks of rows."""
        if start * size % rows or length * size % rows:
            why = f"rows {start} to {start + length} do not begin and end with its blocks of {rows // size} rows"
            raise make_indivisible_error(adapter, landing, f"{why} ({role})")
        return start * size // rows, length * size // rows

    axes = find_row_axes(adapter)
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


def find_row_axes(adapter: SiteAdapter) -> dict[str, int]:
    """The roles that hold rows, or blocks of rows, and along which axis."""
    if adapter.algorithm == "oft":
        return dict.fromkeys(adapter.tensors, 0)
    if adapter.algorithm == "ia3":
        axes = dict.fromkeys(adapter.tensors, 0)
        weight = adapter.tensors["weight"]
        if adapter.options.get("on_input"):
            axes.pop("weight")
        else:
            axes["weight"] = max(range(weight.ndim), key=lambda axis: weight.shape[axis])
        return axes
    return find_row_roles([adapter], "")


def slice_magnitude_rows(magnitude: Magnitude, stretch: RowRange) -> Magnitude:
    """The magnitudes of some rows."""
    tensor = magnitude.tensor
    axis = max(range(tensor.ndim), key=lambda n: tensor.shape[n])
    return replace(magnitude, tensor=tensor.narrow(axis, *stretch))


def make_indivisible_error(adapter: SiteAdapter, landing: SiteTarget, why: str) -> AdapterError:
    """The error for an adapter of a fused weight that has no exact parts."""
    title = find_algorithm(adapter.algorithm).title
    return AdapterError(
        f"the {title} of a fused weight cannot be divided into {', '.join(landing.sites)}: {why}",
        code="ADAPTER-FUSED",
        subject=landing.sites[0],
        evidence={"algorithm": adapter.algorithm, "sites": list(landing.sites), "division": landing.division},
        remedy="Extract a LoRA from its full difference first, or apply it with a program that keeps the fused weight.",
    )
