"""The scaled half convolution, 2-D and 3-D: the same three moves as the linear map, around a convolution.

Its bound is that of the linear map over a filter: |out| <= max|x| * max over filters of sum|w|. cuDNN writes fp16, so
on CUDA the product is `fitted` (see products) unless the plan says that an fp16 result fits. The weight gradient sums
over every position of every sample, where such a bound says nothing; it is taken in fp32 on the rounded operands. fp16
operands are exact in TF32 too, so where TF32 is allowed the tensor cores do that as well, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from finitune.errors import NumericsError
from finitune.numerics.exponents import Exponent, rescale_product, scaled_half, sum_exponents, to_stored_value
from finitune.numerics.products import check_out_dtype, fit_half_product

Extent = int | Sequence[int]


class ConvGeometry(NamedTuple):
    """How a filter walks: an int, or one per spatial dimension, and the number of channel groups; torch's order."""

    stride: Extent = 1
    padding: Extent = 0
    dilation: Extent = 1
    groups: int = 1

    def over(self, rank: int) -> ConvGeometry:
        """The same with one int per spatial dimension; raises NumericsError for what is not 2-D or 3-D, or named."""
        if rank not in (2, 3):
            raise NumericsError(
                f"A half convolution is 2-D or 3-D, this weight is {rank}-D.",
                code="CONV-RANK",
                evidence={"spatial_dimensions": rank},
                remedy="Add a spatial dimension of length 1, or keep this convolution in fp32.",
            )
        if isinstance(self.padding, str):
            raise NumericsError(
                f"A half convolution takes its padding as numbers, not as {self.padding!r}.",
                code="CONV-PADDING",
                remedy="Give the number of zeros per side, or pad in front of the convolution.",
            )

        def per_dimension(extent: Extent) -> tuple[int, ...]:
            return (extent,) * rank if isinstance(extent, int) else tuple(extent)

        stride, padding, dilation = map(per_dimension, (self.stride, self.padding, self.dilation))
        return ConvGeometry(stride, padding, dilation, self.groups)


UNIT_GEOMETRY = ConvGeometry()


def half_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    geometry: ConvGeometry = UNIT_GEOMETRY,
    *,
    exponent: int | None = 0,
    out_dtype: torch.dtype = torch.float32,
    weight_exponent: int = 0,
) -> Tensor:
    """2**(k + kw) * conv(fp16(x * 2**-k), w16) + bias, accumulated in fp32; 2-D or 3-D by weight.ndim.

    `x` (N, C, [T,] H, W) is fp32 or fp16; `weight` is fp16, or an fp32 master rounded here with its own current
    exponent; the exponents, `out_dtype` and gradients are as in `half_linear`. Padding is zeros, given as numbers. On
    CUDA the product passes through fp16 once, scaled so that it fits. Raises NumericsError for another rank, a named
    padding, or an `out_dtype` other than fp16 and fp32.
    """
    check_out_dtype(out_dtype)
    return _HalfConv.apply(x, weight, bias, geometry.over(weight.ndim - 2), exponent, out_dtype, weight_exponent)


def reference_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    geometry: ConvGeometry = UNIT_GEOMETRY,
    *,
    exponent: int | None = 0,
    out_dtype: torch.dtype = torch.float32,
    weight_exponent: int = 0,
) -> Tensor:
    """The slow twin of `half_conv`: fp64 on the same rounded operands, one rounding; fp64 all through if asked."""
    stored = to_stored_value(weight, None) * 2.0**weight_exponent
    wide_bias = None if bias is None else bias.double()
    return _convolution(to_stored_value(x, exponent), stored, wide_bias, geometry.over(weight.ndim - 2)).to(out_dtype)


class _HalfConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: ConvGeometry,
        exponent: int | None,
        out_dtype: torch.dtype,
        weight_exponent: int,
    ) -> Tensor:
        x16, kx = scaled_half(x, exponent)
        weight16, kw = scaled_half(weight, None)
        ctx.save_for_backward(
            x16 if ctx.needs_input_grad[1] else None,
            weight16 if ctx.needs_input_grad[0] else None,
        )
        ctx.geometry, ctx.exponents = geometry, (kx, kw, weight_exponent)
        ctx.shapes = x.shape, weight.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return _conv_product(x16, weight16, bias, geometry, ctx.exponents, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides a name
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x16, weight16 = ctx.saved_tensors
        kx, kw, weight_exponent = ctx.exponents
        x_shape, weight_shape = ctx.shapes
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        (grad,) = grads
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad16, kg = scaled_half(grad, None)
            if ctx.needs_input_grad[0]:
                of_x = rescale_product(
                    _input_gradient(x_shape, weight16, grad16, ctx.geometry), kg, kw, weight_exponent, dtype=x_dtype
                )
            if ctx.needs_input_grad[1]:
                of_weight = _weight_gradient(x16.float(), weight_shape, grad16.float(), ctx.geometry)
                of_weight = rescale_product(of_weight, kg, kx, weight_exponent, dtype=weight_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum((0, *range(2, grad.ndim)), dtype=torch.float32).to(bias_dtype)
        return of_x, of_weight, of_bias, None, None, None, None


def _conv_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    exponents: tuple[Exponent, ...],
    dtype: torch.dtype,
) -> Tensor:
    def convolve(a: Tensor, b: Tensor) -> Tensor:
        return _convolution(a, b, None, geometry)

    planned = not isinstance(sum_exponents(exponents), Tensor)
    if not x.is_cuda:
        out = convolve(x.float(), weight.float())
    elif planned and dtype == torch.float16:
        if not any(exponents) and (bias is None or bias.dtype == torch.float16):
            return _convolution(x, weight, bias, geometry)
        out = convolve(x, weight).float()
    else:
        out = fit_half_product(convolve, x, weight, summed=tuple(range(1, weight.ndim)))
    per_channel = None if bias is None else bias.view(-1, *[1] * (weight.ndim - 2))
    return rescale_product(out, *exponents, bias=per_channel, dtype=dtype)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
    convolve = F.conv2d if weight.ndim == 4 else F.conv3d
    return convolve(x, weight, bias, *geometry)


def _input_gradient(x_shape: torch.Size, weight: Tensor, grad: Tensor, geometry: ConvGeometry) -> Tensor:
    def spread(a: Tensor, b: Tensor) -> Tensor:
        return _convolution_backward(a, a.new_empty(1).expand(x_shape), b, geometry, (True, False, False))[0]

    if not grad.is_cuda:
        return spread(grad.float(), weight.float())
    return fit_half_product(spread, grad, weight, summed=(0, *range(2, weight.ndim)))


def _weight_gradient(x: Tensor, weight_shape: torch.Size, grad: Tensor, geometry: ConvGeometry) -> Tensor:
    weight = grad.new_empty(1).expand(weight_shape)
    return _convolution_backward(grad, x, weight, geometry, (False, True, False))[1]


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias as `wanted`; an operand that only lends its shape may be an expanded one."""
    stride, padding, dilation, groups = geometry
    transposed, output_padding = False, (0,) * (weight.ndim - 2)
    return torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, stride, padding, dilation, transposed, output_padding, groups, wanted
    )
