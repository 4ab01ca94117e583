"""Where training starts: an adapter that changes nothing yet.

A DoRA begins with the norms of the base's rows as its magnitudes. In fp32, on the kind of device where the norms were
taken, c = magnitude / |W + dW| is then 1 to the bit: both norms are summed in one way, and the square root of a rounded
square is the number itself. So the layer's result is the base's to the bit where it has no bias; a bias is added after
the product and not within it, which may round the last bit differently.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from finitune.adapters import find_algorithm
from finitune.adapters.core import Magnitude, SiteAdapter, Target, make_not_additive_error
from finitune.adapters.dora import compute_weight_norms


def create_adapter(target: Target, algorithm: str, generator: torch.Generator, dora: bool = False) -> SiteAdapter:
    """A new adapter by the name of its algorithm, fp32; with `dora`, magnitudes (out, 1[, 1...]) on the output side.

    Raises AdapterError: ADAPTER-ALGORITHM for an unknown name, ADAPTER-DORA for a magnitude over what is not additive
    or no matrix, and what the algorithm's `init` does.
    """
    found = find_algorithm(algorithm)
    if dora and (not found.additive or target.weight.ndim < 2):
        raise make_not_additive_error(found)
    adapter = found.init(target, generator)
    return (
        replace(adapter, magnitude=Magnitude(compute_weight_norms(target.weight.detach().float(), "out")))
        if dora
        else adapter
    )
