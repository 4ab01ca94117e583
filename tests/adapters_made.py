"""Adapters made for tests: of any algorithm, on any shape, with every tensor away from zero and alpha off the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finitune.adapters import Magnitude, SiteAdapter, Target, find_algorithm
from finitune.adapters.core import MagnitudeSide
from finitune.adapters.dora import compute_weight_norms

RANK = 3
ALPHA = 1.7  # neither the rank nor a power of two: a scale that is lost, doubled or rounded shows

Options = Mapping[str, float | bool | str]


def random_base(shape: tuple[int, ...], seed: int) -> Tensor:
    """A weight in fp32, as large as those of a real model."""
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fresh_adapter(
    name: str, base: Tensor, seed: int, *, magnitude: MagnitudeSide | None = None, options: Options | None = None
) -> SiteAdapter:
    """What training starts from, on `base`; with `magnitude`, a DoRA whose magnitudes are the norms of `base`."""
    target = Target(base, rank=RANK, alpha=ALPHA, options=options or {})
    adapter = find_algorithm(name).init(target, torch.Generator().manual_seed(seed))
    if magnitude is None:
        return adapter
    return replace(adapter, magnitude=Magnitude(compute_weight_norms(base, magnitude), side=magnitude))


def random_adapter(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    magnitude: MagnitudeSide | None = None,
    options: Options | None = None,
) -> tuple[Tensor, SiteAdapter]:
    """A base weight in fp32, and an adapter on it whose floating tensors are all noise, magnitudes included."""
    base = random_base(shape, seed)
    adapter = fresh_adapter(name, base, seed, magnitude=magnitude, options=options)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = {
        role: 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for role, tensor in adapter.tensors.items()
    }
    adapter = replace(adapter, tensors=noise)
    if adapter.magnitude is None:
        return base, adapter
    wobble = 1 + 0.2 * torch.rand(adapter.magnitude.tensor.shape, generator=generator)
    return base, replace(adapter, magnitude=replace(adapter.magnitude, tensor=adapter.magnitude.tensor * wobble))


class ExactProducts:
    """The products of a layer in the dtype of what they are given, with no rounding to half: the slow twin."""

    def __init__(self, layer: nn.Linear | nn.Conv2d):
        self.layer = layer
        self.groups = 1 if isinstance(layer, nn.Linear) else layer.groups
        self.channels = -1 if isinstance(layer, nn.Linear) else 1

    def apply_spatial(self, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight.flatten(1).to(x.dtype))
        weight = weight.reshape(*weight.shape[:2], *self.layer.kernel_size)
        return self.layer._conv_forward(x, weight.to(x.dtype), None)

    def apply_pointwise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.movedim(self.channels, -1), weight.to(x.dtype)).movedim(-1, self.channels)
