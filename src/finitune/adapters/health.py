"""What can be wrong with an adapter that reads well: it changes nothing, or half-precision programs cannot multiply it.

Programs that merge in fp16 multiply the factors first and scale afterwards, so the unscaled product must fit, too. A
bound decides for nearly all sites; only where it does not is the product made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.core import AdapterSet, SiteAdapter, TensorsByRole
from finitune.numerics.formats import FP16
from finitune.report import Finding, Level

_MAX_SITES_SHOWN = 5
_SAMPLED_ELEMENTS = 64
DELTA_TERMS_BY_ALGORITHM: dict[str, tuple[frozenset[str], ...]] = {
    "lora": (frozenset({"up", "mid", "down"}),),
    "loha": (frozenset({"w1_a", "w1_b", "t1", "w2_a", "w2_b", "t2"}),),
    "lokr": (frozenset({"w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"}),),
    "glora": (frozenset({"a1", "a2"}), frozenset({"b1", "b2"})),
    "full": (frozenset({"diff"}),),
    "norm": (frozenset({"w_norm"}), frozenset({"b_norm"})),
    "ia3": (frozenset({"weight"}),),
    "oft_v2": (frozenset({"packed"}),),
}
"""What a delta is a sum of: each term is a product, and vanishes with any of its tensors."""

_BIAS_TERMS = (frozenset({"diff_b"}), frozenset({"up_bias"}))


def check_adapter_health(adapters: AdapterSet) -> list[Finding]:
    """Warnings for deltas that are zero, and for factors whose product an fp16 program cannot hold."""
    silent = [site for site in adapters if is_zero_adapter(adapters[site])]
    peaks = {site: compute_product_peak(adapters[site]) for site in adapters}
    loud = {site: peak for site, peak in peaks.items() if FP16.overflow_at <= peak < math.inf}
    findings: list[Finding] = []
    if silent:
        findings.append(
            Finding(
                Level.WARNING,
                "ADAPTER-ZERO-DELTA",
                silent[0],
                f"{len(silent)} of {len(adapters)} sites change nothing: {_format_sites(silent)}",
                {"sites": len(silent), "of": len(adapters)},
                "The training never reached them, or half precision flushed them to zero when the file was saved.",
            )
        )
    if loud:
        worst = max(loud, key=loud.__getitem__)
        findings.append(
            Finding(
                Level.WARNING,
                "ADAPTER-PRODUCT-OVERFLOWS",
                worst,
                f"the product of the factors reaches {loud[worst]:.6g} before it is scaled, at {len(loud)} sites; "
                f"fp16 ends at {FP16.max:.0f}",
                {"peak": loud[worst], "sites": len(loud)},
                "Programs that multiply in fp16 draw black with it. finitune multiplies in fp32: merge it here, or "
                "convert it, which balances the factors.",
            )
        )
    return findings


def is_zero_adapter(adapter: SiteAdapter) -> bool:
    """Whether the adapter leaves every weight as it is, told from its tensors alone."""
    terms = DELTA_TERMS_BY_ALGORITHM.get(adapter.algorithm)
    if terms is None or adapter.magnitude is not None:
        return False
    zero = {role for role, tensor in adapter.tensors.items() if not has_nonzero_element(tensor)}
    present = (term & adapter.tensors.keys() for term in (*terms, *_BIAS_TERMS))
    return all(term & zero for term in present if term)


def has_nonzero_element(tensor: Tensor) -> bool:
    """Whether any element is not zero; a few of them nearly always tell."""
    flat = tensor.flatten()
    return bool(flat[:_SAMPLED_ELEMENTS].float().any()) or bool(flat.float().any())


def compute_product_peak(adapter: SiteAdapter) -> float:
    """The largest magnitude of the unscaled product of the factors, or a bound on it that fits fp16; 0 without one."""
    found = FACTOR_PRODUCT_BY_ALGORITHM.get(adapter.algorithm)
    if found is None:
        return 0.0
    bound, product = found
    limit = bound(adapter.tensors)
    if limit < FP16.overflow_at:
        return limit
    return float(product(adapter).abs().max())


def bound_low_rank_product(up: Tensor, down: Tensor) -> float:
    """A bound on the elements of up (n, r, ...) @ down (r, ...): the cheapest that shows that fp16 holds them.

    r times the largest magnitudes, or by Cauchy and Schwarz the longest row times the longest column.
    """
    simple = down.shape[0] * find_largest_magnitude(up) * find_largest_magnitude(down)
    if simple < FP16.overflow_at:
        return simple
    rows = torch.linalg.vector_norm(up.float().flatten(1), dim=1)
    columns = torch.linalg.vector_norm(down.float().flatten(1), dim=0)
    return float(rows.max() * columns.max())


def find_largest_magnitude(tensor: Tensor) -> float:
    """The largest magnitude; NaN where the tensor holds one."""
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    return max(-float(low), float(high))


def _format_sites(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MAX_SITES_SHOWN} more" if len(names) > _MAX_SITES_SHOWN else ""
    return ", ".join(names[:_MAX_SITES_SHOWN]) + more


def _lora_bound(t: TensorsByRole) -> float:
    inner = bound_low_rank_product(t["up"], t["down"])
    return inner if "mid" not in t else inner * float(torch.linalg.vector_norm(t["mid"].float()))


def _loha_bound(t: TensorsByRole) -> float:
    if "t1" in t:
        return float("inf")
    return bound_low_rank_product(t["w1_a"], t["w1_b"]) * bound_low_rank_product(t["w2_a"], t["w2_b"])


def _lokr_bound(t: TensorsByRole) -> float:
    if "t2" in t:
        return float("inf")
    bound = 1.0
    for half in ("w1", "w2"):
        whole = t.get(half)
        bound *= (
            bound_low_rank_product(t[f"{half}_a"], t[f"{half}_b"])
            if whole is None
            else float(whole.float().abs().max())
        )
    return bound


def _unscaled(adapter: SiteAdapter) -> Tensor:
    algorithm = find_algorithm(adapter.algorithm)
    shape = algorithm.shape(adapter)
    assert shape is not None  # the algorithms of PRODUCTS all know it
    return algorithm.delta(adapter, torch.zeros(shape)) / (algorithm.scale(adapter) or 1.0)


FACTOR_PRODUCT_BY_ALGORITHM: dict[str, tuple[Callable[[TensorsByRole], float], Callable[[SiteAdapter], Tensor]]] = {
    "lora": (_lora_bound, _unscaled),
    "loha": (_loha_bound, _unscaled),
    "lokr": (_lokr_bound, _unscaled),
}
