"""The back ends of one meaning: an fp16 product, accumulated in fp32, that reaches fp32 without passing infinity.

CPU (and any device but CUDA): fp32 arithmetic on the fp16 operands, which is exact per term and as fast as fp32.
CUDA with an fp32 output of the fp16 product: the tensor core's own accumulator, read out unrounded.
CUDA without it, and convolutions there: an fp16 output, after the operands were made smaller by what the bound
|a b| <= max|a| * max_j sum_i |b_ij| asks for. That result is rounded to fp16 once more, 2**-11 relative.

`exact_accumulation` belongs around any run of these: where a product writes fp16, torch lets partial sums be rounded
to fp16, which may overflow though the whole sum fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from finitune.errors import NumericsError
from finitune.numerics.exponents import (
    Exponent,
    current_exponent,
    multiply_to_half,
    power_of_two,
    rescale_product,
    sum_exponents,
)
from finitune.numerics.stats import amax


def half_matmul(a: Tensor, b: Tensor) -> Tensor:
    """fp32 a @ b of fp16 matrices (M, K) and (K, N), or of batches of them; the sum never overflows on its way."""
    if not a.is_cuda:
        return a.float() @ b.float()
    if can_write_fp32_product(a.device):
        multiply = torch.mm if a.ndim == 2 else torch.bmm
        return multiply(a, b, out_dtype=torch.float32)
    return fit_half_product(torch.matmul, a, b, summed=(-2,))


def linear_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, exponents: tuple[Exponent, ...], dtype: torch.dtype
) -> Tensor:
    """2**(sum of exponents) * x @ weight.T + bias for fp16 x (M, K) and weight (N, K), rounded once to `dtype`.

    On CUDA a planned exponent rides in the product's own epilogue, so that nothing is read or written twice.
    """
    k = sum_exponents(exponents)
    if x.is_cuda and not isinstance(k, Tensor):
        if dtype == torch.float16 and (bias is None or bias.dtype == torch.float16):
            return _half_epilogue(x, weight, bias, k)
        if dtype == torch.float32 and (k or bias is not None) and can_scale_fp32_product(x.device):
            return _single_epilogue(x, weight, bias, 2.0**k)
    return rescale_product(half_matmul(x, weight.t()), *exponents, bias=bias, dtype=dtype)


@contextmanager
def exact_accumulation() -> Generator[None]:
    """While open, CUDA products accumulate in fp32 throughout, and fp32 products are fp32 (no TF32)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = (
        (matmul, "allow_fp16_reduced_precision_reduction"),
        (matmul, "allow_bf16_reduced_precision_reduction"),
        (matmul, "allow_tf32"),
        (cudnn, "allow_tf32"),
    )
    before = [getattr(place, name) for place, name in switches]
    try:
        for place, name in switches:
            setattr(place, name, False)
        yield
    finally:
        for (place, name), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raises NumericsError unless a half product can be written in `dtype`."""
    if dtype not in (torch.float16, torch.float32):
        raise NumericsError(
            f"A half product is written in float16 or float32, not in {dtype}.",
            code="OUT-DTYPE",
            subject=str(dtype),
            remedy="Ask for torch.float32, or torch.float16 where the plan says that the result fits.",
        )


def fit_half_product(
    operation: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, *, summed: tuple[int, ...]
) -> Tensor:
    """fp32 `operation(a, b)` for an operation, linear in both, that accumulates in fp32 but writes fp16.

    `summed` names the dimensions of `b` over which one output element adds up. Each operand gives up half of the
    excess, so that neither is pushed into the subnormals alone.
    """
    bound = amax(a) * b.abs().sum(summed, dtype=torch.float32).amax()
    excess = current_exponent(bound).clamp_(min=0)
    from_a = excess >> 1
    from_b = excess - from_a
    written = operation(multiply_to_half(a, power_of_two(-from_a)), multiply_to_half(b, power_of_two(-from_b)))
    return rescale_product(written.float(), excess)


@functools.cache
def can_write_fp32_product(device: torch.device) -> bool:
    """Whether torch offers fp32 outputs of fp16 products on this device: tried once, on a sum beyond fp16's range.

    The first call waits for the device; make it before a CUDA graph is captured.
    """
    large = torch.full((1, 16, 16), 256.0, dtype=torch.float16, device=device)
    try:
        one = torch.mm(large[0], large[0], out_dtype=torch.float32)
        many = torch.bmm(large, large, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return bool((torch.stack([one, many[0]]) == 2.0**20).all())


@functools.cache
def can_scale_fp32_product(device: torch.device) -> bool:
    """Whether such a product also takes a factor and an fp32 bias along; tried once, like `can_write_fp32_product`."""
    large = torch.full((16, 16), 256.0, dtype=torch.float16, device=device)
    try:
        plain = _single_epilogue(large, large, None, 4.0)
        biased = _single_epilogue(large, large, torch.ones(16, device=device), 4.0)
    except (RuntimeError, TypeError):
        return False
    return bool((plain == 2.0**22).all() and (biased == 2.0**22 + 1).all())


def _single_epilogue(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    addend = x.new_zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.float()
    beta = 0 if bias is None else 1
    return torch.addmm(addend, x, weight.t(), out_dtype=torch.float32, beta=beta, alpha=factor)


def _half_epilogue(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> Tensor:
    if k == 0:
        return F.linear(x, weight, bias)
    addend = x.new_zeros(weight.shape[0]) if bias is None else bias
    return torch.addmm(addend, x, weight.t(), beta=0 if bias is None else 1, alpha=2.0**k)
