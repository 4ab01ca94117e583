"""The scaled half linear map: fp16 operands, fp32 accumulation, powers of two undone in fp32.

Forward: x16 = fp16(x * 2**-k), out = 2**(k + kw) * x16 @ w16.T + bias. Backward: the gradient gets the power of two of
its own largest magnitude, so it neither overflows nor flushes and no loss scale is needed. What it cannot repair is a
border that is fp16 itself: the gradient of an fp16 input or output is an fp16 tensor, and can flush there. A training
path keeps these borders in fp32; the operands inside are fp16 all the same, and so is what is saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from finitune.numerics.conv import half_conv, reference_conv
from finitune.numerics.exponents import rescale_product, scaled_half, to_stored_value
from finitune.numerics.products import check_out_dtype, half_matmul, linear_product

__all__ = ["half_conv", "half_linear", "reference_conv", "reference_linear", "scaled_half"]


def half_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    exponent: int | None = 0,
    out_dtype: torch.dtype = torch.float32,
    weight_exponent: int = 0,
) -> Tensor:
    """2**(k + kw) * fp16(x * 2**-k) @ w16.T + bias, accumulated in fp32 and rounded once to `out_dtype`.

    `x` (..., K) is fp32 or fp16; an fp16 x with exponent 0 or None is used without a copy. `weight` (N, K) is stored
    in fp16, standing for weight * 2**weight_exponent, or is an fp32 master that is rounded here with its own current
    exponent. `exponent` is the planned k, or None for current scaling. Differentiable in x, weight and bias; each
    gradient has its tensor's dtype. Raises NumericsError for an `out_dtype` other than fp16 and fp32.
    """
    check_out_dtype(out_dtype)
    return _HalfLinear.apply(x, weight, bias, exponent, out_dtype, weight_exponent)


def reference_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    exponent: int | None = 0,
    out_dtype: torch.dtype = torch.float32,
    weight_exponent: int = 0,
) -> Tensor:
    """The slow twin of `half_linear`: fp64 on the same rounded operands, one rounding; fp64 all through if asked."""
    stored = to_stored_value(weight, None) * 2.0**weight_exponent
    out = F.linear(to_stored_value(x, exponent), stored, None if bias is None else bias.double())
    return out.to(out_dtype)


class _HalfLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exponent: int | None,
        out_dtype: torch.dtype,
        weight_exponent: int,
    ) -> Tensor:
        rows, kx = scaled_half(x.reshape(-1, x.shape[-1]), exponent)
        weight16, kw = scaled_half(weight, None)
        out = linear_product(rows, weight16, bias, (kx, kw, weight_exponent), out_dtype)
        ctx.save_for_backward(
            rows if ctx.needs_input_grad[1] else None,
            weight16 if ctx.needs_input_grad[0] else None,
        )
        ctx.exponents = kx, kw, weight_exponent
        ctx.input_shape = x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides a name
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows, weight16 = ctx.saved_tensors
        kx, kw, weight_exponent = ctx.exponents
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad16, kg = scaled_half(grad, None)
            if ctx.needs_input_grad[0]:
                of_x = linear_product(grad16, weight16.t(), None, (kg, kw, weight_exponent), x_dtype)
                of_x = of_x.view(ctx.input_shape)
            if ctx.needs_input_grad[1]:
                # The stored weight w16 stands for w16 * 2**weight_exponent, so its gradient carries that factor.
                of_weight = rescale_product(half_matmul(grad16.t(), rows), kg, kx, weight_exponent, dtype=weight_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return of_x, of_weight, of_bias, None, None, None
