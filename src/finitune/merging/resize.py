"""LoRAs of a smaller rank, cut in factor space: the best approximation of that rank, at the cost of a small SVD.

The scale goes into the new factors, which are computed in any case, and alpha becomes the new rank: scale 1 for every
program, whatever alpha was. A core (Tucker) is contracted. A site that already has no more than the asked rank stays
as it is, bit for bit, alpha included. What has no rank (full differences, norms, rotations) passes through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from finitune.adapters import AdapterSet, SiteAdapter, find_algorithm
from finitune.adapters.lora import LoRA, to_lora_matrices
from finitune.adapters.lowrank import truncate_factors
from finitune.errors import AdapterError, NumericsError
from finitune.merging.adapterfile import SiteRecord
from finitune.merging.combine import build_unit_scale_lora, compute_bias_change


@dataclass(frozen=True)
class ResizedAdapter:
    """A resized adapter, a row for each LoRA in it, and the sites that passed through because they have no rank.

    `dora` are the sites that were cut and have magnitudes: their rows' errors are of the additive part alone.
    """

    adapter: AdapterSet
    rows: tuple[SiteRecord, ...]
    passed: tuple[str, ...]
    dora: tuple[str, ...]


def resize_adapter(adapters: AdapterSet, *, rank: int | None = None, energy: float | None = None) -> ResizedAdapter:
    """Every LoRA cut to at most `rank`, or to the least rank that keeps the share `energy` of its squared norm.

    New factors are fp32 with scale 1. Raises AdapterError (RESIZE-ALGORITHM) for LoHa, LoKr and GLoRA, and
    (RESIZE-NOTHING) where there is no LoRA at all.
    """
    require_resizable_loras(adapters)
    made: dict[str, SiteAdapter] = {}
    rows: list[SiteRecord] = []
    for site, adapter in adapters.sites.items():
        made[site] = adapter
        if adapter.algorithm == LoRA.name:
            try:
                made[site], row = resize_lora_site(site, adapter, rank, energy)
            except NumericsError as error:
                error.subject = site
                raise
            rows.append(row)
    passed = tuple(site for site, adapter in adapters.sites.items() if adapter.algorithm != LoRA.name)
    dora = tuple(row.site for row in rows if row.how == "svd" and made[row.site].magnitude is not None)
    return ResizedAdapter(replace(adapters, sites=made), tuple(rows), passed, dora)


def resize_lora_site(
    site: str, adapter: SiteAdapter, rank: int | None, energy: float | None
) -> tuple[SiteAdapter, SiteRecord]:
    """One LoRA cut, and its row; the very same adapter where nothing is to be cut."""
    lora = LoRA()
    old = adapter.tensors["down"].shape[0]
    if energy is None and (rank is None or rank >= old):
        return adapter, SiteRecord(site, "kept", old)
    up, down = to_lora_matrices(adapter)
    up, down, books = truncate_factors(lora.scale(adapter) * up, down, rank=rank, energy=energy)
    if books.rank >= old:
        return adapter, SiteRecord(site, "kept", old)
    small = build_unit_scale_lora(up, down, lora.shape(adapter) or ())
    bias = compute_bias_change(adapter)
    if bias is not None:
        small = small.with_tensors(diff_b=bias.float())
    small = replace(small, magnitude=adapter.magnitude, options=adapter.options)
    return small, SiteRecord(site, "svd", books.rank, books.error, books.energy)


def require_resizable_loras(adapters: AdapterSet) -> None:
    """Raise AdapterError where factors are of a kind that cannot be cut, or where there are none."""
    found = [adapter.algorithm for adapter in adapters.sites.values()]
    for name in dict.fromkeys(found):
        if name != LoRA.name and find_algorithm(name).rank_means in ("factors", "at most"):  # and no cut keeps it
            title = find_algorithm(name).title
            raise AdapterError(
                f"{found.count(name)} of {len(found)} modules have a {title}, whose factors have another rank than it",
                code="RESIZE-ALGORITHM",
                subject=next(site for site, adapter in adapters.sites.items() if adapter.algorithm == name),
                evidence={"algorithm": name, "modules": found.count(name), "of": len(found)},
                remedy="Turn it into a LoRA of the rank that you want: finitune convert FILE --as lora --rank N.",
            )
    if LoRA.name not in found:
        titles = sorted({find_algorithm(name).title for name in found})
        raise AdapterError(
            f"there is no LoRA in it, only {', '.join(titles) or 'nothing'}",
            code="RESIZE-NOTHING",
            evidence={"algorithms": sorted(set(found))},
            remedy="Only LoRA and LoCon have a rank to cut.",
        )
