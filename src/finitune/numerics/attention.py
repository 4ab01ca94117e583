"""Scaled half attention: fp16 operands, logits and softmax in fp32, exponents on v and, where asked, on q and k.

Forward keeps what fp16 flash kernels keep: exponentials relative to the row's largest are rounded to fp16 before they
meet v, their sum stays in fp32, the output is written in fp16. |output| <= max|v|, so it fits wherever v16 fits, and
2**kv is undone behind it. 2**(kq + kk) goes into the softmax scale.

Backward is five products, each with its own power of two: the probabilities by the constant 2**15, the gradient and the
logits' gradient each by its own largest magnitude. It goes over blocks of query rows, recomputes the probabilities, and
adds up in fp32, so memory is bounded and small gradients do not flush.

Masked means False in a bool mask, or an additive value that fp16 rounds to -inf; a row with every key masked gives 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from finitune.errors import NumericsError
from finitune.numerics.exponents import (
    Exponent,
    multiply_to_half,
    power_of_two,
    rescale_product,
    scaled_half,
    sum_exponents,
    to_stored_value,
)
from finitune.numerics.formats import FP16
from finitune.numerics.products import half_matmul

_BLOCK_ELEMENTS = 2**25  # of fp32 logits held at once: 128 MiB
# Logits of 2**30 * head size * 2**80 are still finite in fp32, and their softmax is a choice long before.
_STEEPEST = 80
_PROBABILITY_EXPONENT = -15


def half_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    exponent: int | None = 0,
) -> Tensor:
    """softmax(scale * q k^T + mask) v on fp16 operands, as `scaled_dot_product_attention` takes them: (..., L, D).

    fp32 or fp16 in; out in v's dtype. `exponent` is v's planned exponent; None gives q, k and v their own current
    exponents. `mask` is bool (True takes part) or additive, broadcastable to (..., Lq, Lk);
    `is_causal` aligns at the top left and may come with a mask. `scale` is 1 / sqrt(D) by default. Differentiable in
    q, k and v. On CUDA by plan the fused kernels run; with current exponents, logits are taken block by block. Raises
    NumericsError for a mask that asks for a gradient.
    """
    if mask is not None and mask.requires_grad:
        raise NumericsError(
            "Half attention has no gradient for its mask.",
            code="MASK-GRADIENT",
            subject="mask",
            remedy="Detach the mask, or keep this attention in fp32.",
        )
    softmax_scale = q.shape[-1] ** -0.5 if scale is None else scale
    masking = Masking.of(mask, is_causal)
    return _HalfAttention.apply(q, k, v, masking, softmax_scale, exponent)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    exponent: int | None = 0,
) -> Tensor:
    """The slow twin of `half_attention`: fp64 on the same rounded operands, written out; returns fp64."""
    qk_exponent = None if exponent is None else 0
    q64, k64, v64 = to_stored_value(q, qk_exponent), to_stored_value(k, qk_exponent), to_stored_value(v, exponent)
    masking = Masking.of(mask, is_causal)
    logits = q64 @ k64.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = ~masking.hidden(slice(0, q.shape[-2]), k.shape[-2], q.device).expand_as(logits)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.double().clamp(min=-FP16.overflow_at)
    live = allowed.any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(~allowed & live, -math.inf), -1)
    return torch.where(live, weights, 0.0) @ v64


class Masking(NamedTuple):
    """Which keys a query may not see: a mask of at least two dimensions or none, and causality."""

    mask: Tensor | None
    is_causal: bool

    @classmethod
    def of(cls, mask: Tensor | None, is_causal: bool) -> Masking:
        """From a mask of any rank that broadcasts to (..., Lq, Lk)."""
        return cls(mask if mask is None or mask.ndim > 1 else mask.reshape(1, -1), is_causal)

    def rows(self, rows: slice) -> Tensor | None:
        """The mask of these query rows, broadcastable to (..., rows, Lk)."""
        return self.mask if self.mask is None or self.mask.shape[-2] == 1 else self.mask[..., rows, :]

    def hidden(self, rows: slice, keys: int, device: torch.device) -> Tensor:
        """True where a key is masked for these rows; bool, broadcastable to (..., rows, keys)."""
        mask = self.rows(rows)
        hidden = torch.zeros((1, keys), dtype=torch.bool, device=device) if mask is None else _masked_out(mask)
        if self.is_causal:
            square = torch.ones((rows.stop - rows.start, keys), dtype=torch.bool, device=device)
            hidden = hidden | square.triu(1 + rows.start)
        return hidden

    def apply_(self, logits: Tensor, rows: slice) -> None:
        """Mask the fp32 `logits` (..., rows, Lk) in place."""
        mask = self.rows(rows)
        if mask is not None and mask.dtype != torch.bool:
            logits.add_(mask)
        if mask is not None or self.is_causal:
            logits.masked_fill_(self.hidden(rows, logits.shape[-1], logits.device), -math.inf)


class _Operands(NamedTuple):
    """fp16 q (B, Lq, D), k (B, Lk, D), v (B, Lk, Dv), their exponents, and the leading shape that B stands for."""

    q: Tensor
    k: Tensor
    v: Tensor
    exponents: tuple[Exponent, Exponent, Exponent]
    lead: torch.Size

    def blocks(self) -> list[slice]:
        """Query rows in blocks whose logits stay within the memory bound."""
        length = self.q.shape[1]
        step = max(1, _BLOCK_ELEMENTS // max(1, self.q.shape[0] * self.k.shape[1]))
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _HalfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masking: Masking,
        scale: float,
        exponent: int | None,
    ) -> Tensor:
        qk_exponent = None if exponent is None else 0
        (q16, kq), (k16, kk), (v16, kv) = (
            scaled_half(q, qk_exponent),
            scaled_half(k, qk_exponent),
            scaled_half(v, exponent),
        )
        ctx.save_for_backward(q16, k16, v16, masking.mask)
        ctx.exponents, ctx.is_causal, ctx.scale = (kq, kk, kv), masking.is_causal, scale
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        if q16.is_cuda and not isinstance(sum_exponents((kq, kk)), Tensor):
            out = fused_attention(q16, k16, v16, masking, scale)
        else:
            out = blockwise_attention(_flat(q16, k16, v16, (kq, kk, kv)), masking, scale)
        if v.dtype == torch.float16 and not isinstance(kv, Tensor) and kv == 0:
            return out
        return rescale_product(out.float(), kv, dtype=v.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides a name
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        q16, k16, v16, mask = ctx.saved_tensors
        operands = _flat(q16, k16, v16, ctx.exponents)
        of_q, of_k, of_v = _backward_blocks(operands, Masking(mask, ctx.is_causal), ctx.scale, grads[0])
        q_dtype, k_dtype, v_dtype = ctx.dtypes
        of_q = of_q.view(q16.shape).to(q_dtype)
        return of_q, of_k.view(k16.shape).to(k_dtype), of_v.view(v16.shape).to(v_dtype), None, None, None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, masking: Masking, scale: float) -> Tensor:
    """fp16 attention by torch's own kernels, with rows that see no key set to 0; q, k, v fp16 (..., L, D)."""
    mask = masking.mask
    if mask is None:
        return _sdpa(q, k, v, None, masking.is_causal, scale)
    hidden = masking.hidden(slice(0, q.shape[-2]), k.shape[-2], q.device)
    dead = hidden.all(-1, keepdim=True)
    if mask.dtype == torch.bool:
        seen = ~hidden | dead
    else:
        seen = mask.half().masked_fill(hidden, -math.inf).masked_fill(dead, 0.0)
    return _sdpa(q, k, v, seen, False, scale).masked_fill(dead, 0.0)


def blockwise_attention(operands: _Operands, masking: Masking, scale: float) -> Tensor:
    """fp16 attention written out over blocks of query rows, for any exponents of q and k; fp16 (..., Lq, Dv)."""
    q, v = operands.q, operands.v
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    for rows in operands.blocks():
        weights, sums = _exponentials(operands, masking, scale, rows)
        out[:, rows] = half_matmul(weights.half(), v).div_(sums)
    return out.view(*operands.lead, *out.shape[1:])


def _exponentials(operands: _Operands, masking: Masking, scale: float, rows: slice) -> tuple[Tensor, Tensor]:
    """exp(logit - row's largest) in fp32 (B, rows, Lk), and its row sums; a dead row has zeros and, to divide by, 1."""
    q, k = operands.q[:, rows], operands.k
    slope = sum_exponents(operands.exponents[:2])
    factor = power_of_two(slope.clamp(max=_STEEPEST)) * scale if isinstance(slope, Tensor) else 2.0**slope * scale
    logits = half_matmul(q, k.transpose(1, 2)).mul_(factor)
    masking.apply_(logits.view(*operands.lead, *logits.shape[1:]), rows)
    largest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(largest.masked_fill_(largest == -math.inf, 0.0)).exp_()
    return weights, weights.sum(-1, keepdim=True).clamp_(min=1.0)


def _backward_blocks(
    operands: _Operands, masking: Masking, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 gradients of q, k and v, flat like the operands; see the module's note for the powers of two."""
    q, k, v, (kq, kk, kv), _ = operands
    grad16, kg = scaled_half(grad.reshape(*q.shape[:2], v.shape[2]), None)
    of_q = torch.empty_like(q, dtype=torch.float32)
    of_k = torch.zeros_like(k, dtype=torch.float32)
    of_v = torch.zeros_like(v, dtype=torch.float32)
    for rows in operands.blocks():
        weights, sums = _exponentials(operands, masking, scale, rows)
        weights.div_(sums)
        lifted = multiply_to_half(weights, 2.0**-_PROBABILITY_EXPONENT)
        of_v += half_matmul(lifted.transpose(1, 2), grad16[:, rows])
        of_weights = half_matmul(grad16[:, rows], v.transpose(1, 2))
        of_weights -= (weights * of_weights).sum(-1, keepdim=True)
        of_logits, ks = scaled_half(weights.mul_(of_weights), None)
        of_q[:, rows] = rescale_product(half_matmul(of_logits, k), ks, kg, kv, kk)
        of_k += rescale_product(half_matmul(of_logits.transpose(1, 2), q[:, rows]), ks, kg, kv, kq)
    return of_q.mul_(scale), of_k.mul_(scale), rescale_product(of_v, kg, _PROBABILITY_EXPONENT)


def _flat(q: Tensor, k: Tensor, v: Tensor, exponents: tuple[Exponent, Exponent, Exponent]) -> _Operands:
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    return _Operands(*flat, exponents=exponents, lead=q.shape[:-2])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    if q.ndim != 3:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    # The memory-efficient kernels want a head dimension.
    headed = mask if mask is None or mask.ndim < 3 else mask.unsqueeze(-3)
    q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, headed, is_causal=is_causal, scale=scale).squeeze(1)


def _masked_out(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= -FP16.overflow_at
