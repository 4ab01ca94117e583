"""LoRAs of a smaller rank, cut in factor space: the best approximation of that rank, at the cost of a small SVD.

The scale goes into the new factors, which are computed in any case, and alpha becomes the new rank: scale 1 for every
program, whatever alpha was. A core (Tucker) is contracted. A site that already has no more than the asked rank stays
as it is, bit for bit, alpha included. What has no rank (full differences, norms, rotations) passes through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from finitune.adapters import AdapterSet, SiteAdapter, algorithm_of
from finitune.adapters.convert import thin_lora
from finitune.adapters.lowrank import truncate
from finitune.errors import AdapterError, NumericsError
from finitune.merging.combine import bias_of, lora_of
from finitune.merging.rows import Row

RANKED = ("loha", "lokr", "glora")
"""Algorithms that have a rank which no cut keeps."""


@dataclass(frozen=True)
class Resized:
    """A resized adapter, a row for each LoRA in it, and the sites that passed through because they have no rank.

    `dora` are the sites that were cut and have magnitudes: their rows' errors are of the additive part alone.
    """

    adapter: AdapterSet
    rows: tuple[Row, ...]
    passed: tuple[str, ...]
    dora: tuple[str, ...]


def resize(adapters: AdapterSet, *, rank: int | None = None, energy: float | None = None) -> Resized:
    """Every LoRA cut to at most `rank`, or to the least rank that keeps the share `energy` of its squared norm.

    New factors are fp32 with scale 1. Raises AdapterError (RESIZE-ALGORITHM) for LoHa, LoKr and GLoRA, and
    (RESIZE-NOTHING) where there is no LoRA at all.
    """
    demand_loras(adapters)
    made: dict[str, SiteAdapter] = {}
    rows: list[Row] = []
    for site, adapter in adapters.sites.items():
        made[site] = adapter
        if adapter.algorithm == "lora":
            try:
                made[site], row = resize_site(site, adapter, rank, energy)
            except NumericsError as error:
                error.subject = site
                raise
            rows.append(row)
    passed = tuple(site for site, adapter in adapters.sites.items() if adapter.algorithm != "lora")
    dora = tuple(row.site for row in rows if row.how == "svd" and made[row.site].magnitude is not None)
    return Resized(replace(adapters, sites=made), tuple(rows), passed, dora)


def resize_site(site: str, adapter: SiteAdapter, rank: int | None, energy: float | None) -> tuple[SiteAdapter, Row]:
    """One LoRA cut, and its row; the very same adapter where nothing is to be cut."""
    lora = algorithm_of("lora")
    old = adapter.tensors["down"].shape[0]
    if energy is None and (rank is None or rank >= old):
        return adapter, Row(site, "kept", old)
    up, down = thin_lora(adapter)
    up, down, books = truncate(lora.scale(adapter) * up, down, rank=rank, energy=energy)
    if books.rank >= old:
        return adapter, Row(site, "kept", old)
    small = lora_of(up, down, lora.shape(adapter) or ())
    bias = bias_of(adapter)
    if bias is not None:
        small = small.with_tensors(diff_b=bias.float())
    small = replace(small, magnitude=adapter.magnitude, options=adapter.options)
    return small, Row(site, "svd", books.rank, books.error, books.energy)


def demand_loras(adapters: AdapterSet) -> None:
    """Raise AdapterError where factors are of a kind that cannot be cut, or where there are none."""
    found = [adapter.algorithm for adapter in adapters.sites.values()]
    for name in RANKED:
        if name in found:
            title = algorithm_of(name).title
            raise AdapterError(
                f"{found.count(name)} of {len(found)} modules have a {title}, whose factors have another rank than it",
                code="RESIZE-ALGORITHM",
                subject=next(site for site, adapter in adapters.sites.items() if adapter.algorithm == name),
                evidence={"algorithm": name, "modules": found.count(name), "of": len(found)},
                remedy="Turn it into a LoRA of the rank that you want: finitune convert FILE --as lora --rank N.",
            )
    if "lora" not in found:
        titles = sorted({algorithm_of(name).title for name in found})
        raise AdapterError(
            f"there is no LoRA in it, only {', '.join(titles) or 'nothing'}",
            code="RESIZE-NOTHING",
            evidence={"algorithms": sorted(set(found))},
            remedy="Only LoRA and LoCon have a rank to cut.",
        )
