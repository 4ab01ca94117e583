"""What can be wrong with an adapter that reads well: it changes nothing, or half-precision programs cannot multiply it.

Programs that merge in fp16 multiply the factors first and scale afterwards, so the unscaled product must fit, too. A
bound decides for nearly all sites; only where it does not is the product made.
"""

from __future__ import annotations

import math

import torch

from finitune.adapters import find_algorithm
from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.numerics.formats import FP16
from finitune.report import Finding, Level

_MAX_SITES_SHOWN = 5
_SAMPLED_ELEMENTS = 64


def check_adapter_health(adapters: AdapterSet) -> list[Finding]:
    """Warnings for deltas that are zero, and for factors whose product an fp16 program cannot hold."""
    silent = [site for site in adapters if is_zero_adapter(adapters[site])]
    peaks = {site: compute_product_peak(adapters[site]) for site in adapters}
    loud = {site: peak for site, peak in peaks.items() if FP16.overflow_at <= peak < math.inf}
    findings: list[Finding] = []
    if silent:
        more = f" and {len(silent) - _MAX_SITES_SHOWN} more" if len(silent) > _MAX_SITES_SHOWN else ""
        findings.append(
            Finding(
                Level.WARNING,
                "ADAPTER-ZERO-DELTA",
                silent[0],
                f"{len(silent)} of {len(adapters)} sites change nothing: {', '.join(silent[:_MAX_SITES_SHOWN])}{more}",
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
    if adapter.magnitude is not None:
        return False
    zero: set[str] = set()
    for role, tensor in adapter.tensors.items():
        flat = tensor.flatten()
        if not (flat[:_SAMPLED_ELEMENTS].float().any() or flat.float().any()):  # a few nearly always tell
            zero.add(role)
    return bool(zero) and find_algorithm(adapter.algorithm).is_zero(adapter, zero)


def compute_product_peak(adapter: SiteAdapter) -> float:
    """The largest magnitude of the unscaled product of the factors, or a bound on it that fits fp16; 0 without one."""
    algorithm = find_algorithm(adapter.algorithm)
    bound, shape = algorithm.product_bound(adapter.tensors), algorithm.shape(adapter)
    if bound is None or bound < FP16.overflow_at or shape is None:
        return bound or 0.0
    product = algorithm.delta(adapter, torch.zeros(shape)) / (algorithm.scale(adapter) or 1.0)
    return float(product.abs().max())
