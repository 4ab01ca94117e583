"""The products that a layer offers to its adapters: scaled half products where it computes in half, else fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finitune.numerics.conv import UNIT_GEOMETRY, ConvGeometry, half_conv
from finitune.numerics.half import half_linear


class LayerProducts:
    """The products of one layer for its adapters: half where the layer computes in half, else fp32."""

    def __init__(self, layer: nn.Module):
        weight: Any = layer.weight
        self.layer: Any = layer
        self.axes = weight.ndim - 2
        self.half = getattr(layer, "arithmetic", weight.dtype) is torch.float16 and self.axes != 1
        self.groups: int = getattr(layer, "groups", 1)
        self.channels = 1 if self.axes else -1

    def apply_spatial(self, x: Tensor, weight: Tensor) -> Tensor:
        """x by `weight` (n, in / groups[, *kernel]) as the layer walks: its padding, stride, dilation and groups."""
        if not self.axes:
            return self.linear(x, weight.flatten(1))
        layer, padding = self.layer, self.layer.padding
        if layer.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
        geometry = ConvGeometry(layer.stride, padding, layer.dilation, layer.groups)
        return self.convolve(x, weight if weight.ndim > 2 else self.pointwise(weight), geometry)

    def apply_pointwise(self, x: Tensor, weight: Tensor) -> Tensor:
        """x by `weight` (n, c) over the channels alone."""
        return self.convolve(x, self.pointwise(weight), UNIT_GEOMETRY) if self.axes else self.linear(x, weight)

    def pointwise(self, weight: Tensor) -> Tensor:
        """`weight` (n, c) with a kernel of length 1 along every axis."""
        return weight.reshape(*weight.shape, *[1] * self.axes)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return half_linear(x, weight, exponent=None) if self.half else F.linear(x.float(), weight.float())

    def convolve(self, x: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
        if self.half:
            return half_conv(x, weight, None, geometry, exponent=None)
        convolve = getattr(F, f"conv{self.axes}d")
        return convolve(x.float(), weight.float(), None, *geometry)
