"""The operations that a device is measured by, but for attention: products, convolutions, our own product, copies.

Shapes to check are small and odd (one row, one less and one more than a tile, primes): a kernel is chosen by shape, and
one that returns zeros from K = 64 on, or NaN for half convolutions, is right at others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from finitune.machine.measuring.trial import (
    MEASURED_DTYPES,
    Operation,
    OperationResult,
    OperationShape,
    add_operation_rates,
    cut_first_line,
    describe_operation_error,
    make_normal_tensor,
    measure_seconds,
)
from finitune.numerics.half import half_linear

LARGE_OPERAND_SCALE = 2.0**20
"""What the operands of our own product are multiplied by: far beyond fp16, which scaling must take in its stride."""


def _matrices(shape: OperationShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x (M, K) and w (N, K), as a linear layer holds them."""
    rows, summed, columns = shape
    return make_normal_tensor((rows, summed), dtype), make_normal_tensor((columns, summed), dtype, seed=1)


def _picture_and_kernel(shape: OperationShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    batch, channels, out, height, width = shape
    kernel = make_normal_tensor((out, channels, 3, 3), torch.float32, seed=1) / (3 * channels**0.5)
    return make_normal_tensor((batch, channels, height, width), dtype), kernel.to(dtype)


def _large_matrices(shape: OperationShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, w in fp16 and the result's gradient, both others fp32 whatever `dtype` says; x is beyond fp16."""
    rows, _, columns = shape
    x, weight = _matrices(shape, torch.float16)
    return (
        x.float() * LARGE_OPERAND_SCALE,
        weight,
        make_normal_tensor((rows, columns), torch.float32, seed=2) / LARGE_OPERAND_SCALE,
    )


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """A 3 x 3 convolution that keeps height and width."""
    return F.conv2d(x, kernel, padding=1)


def compute_with_gradients(operation: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
    """The result of all operands but the last, and its gradients for them, the last being the result's own."""
    *given, grad = operands
    leaves = [operand.detach().requires_grad_() for operand in given]
    out = operation(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def _squares(*sides: int) -> tuple[OperationShape, ...]:
    return tuple((side, side, side) for side in sides)


PRODUCT_OP = Operation(
    "product",
    F.linear,
    F.linear,
    _matrices,
    shapes=((1, 3, 5), (2, 64, 33), (7, 63, 17), (16, 65, 24), (33, 257, 130), (64, 512, 96), (5, 1031, 66)),
    ladder=_squares(256, 512, 1024, 2048, 4096),
    work=lambda shape: 2 * shape[0] * shape[1] * shape[2],
)

CONVOLUTION_OP = Operation(
    "convolution 3x3",
    convolve,
    convolve,
    _picture_and_kernel,
    shapes=((1, 4, 8, 9, 7), (2, 3, 32, 17, 16), (1, 64, 64, 16, 16), (1, 33, 65, 8, 12)),
    ladder=tuple(
        (1, channels, channels, side, side) for channels, side in ((64, 16), (128, 32), (320, 64), (320, 128))
    ),
    work=lambda shape: 18 * shape[0] * shape[1] * shape[2] * shape[3] * shape[4],
)

SCALED_HALF_OP = Operation(
    "scaled half product",
    functools.partial(compute_with_gradients, functools.partial(half_linear, exponent=None)),
    functools.partial(compute_with_gradients, F.linear),
    _large_matrices,
    shapes=((2, 64, 33), (33, 257, 130), (64, 512, 96)),
    ladder=_squares(256, 512, 1024, 2048, 4096),
    work=lambda shape: 6 * shape[0] * shape[1] * shape[2],
    variant="forward and backward",
    slack=2.0,
)

FP16_SWITCHES = (
    ("accumulating in fp16", "allow_fp16_accumulation"),
    ("partial sums in fp16", "allow_fp16_reduced_precision_reduction"),
)
"""How fp16 products may be made less exact on CUDA, and the switch of `torch.backends.cuda.matmul` that does it,
where torch has it."""


@contextmanager
def hold_fp16_switch(name: str) -> Generator[None]:
    """While open, of FP16_SWITCHES the one of this name is on, and the others are off."""
    place = torch.backends.cuda.matmul
    before = {switch: getattr(place, switch) for _, switch in FP16_SWITCHES if hasattr(place, switch)}
    try:
        for switch in before:
            setattr(place, switch, switch == name)
        yield
    finally:
        for switch, value in before.items():
            setattr(place, switch, value)


def measure_copies(device: torch.device, budget_s: float, size: int) -> list[OperationResult]:
    """How fast `size` bytes go to the device and back, from pageable and pinned memory, and within it."""
    here = torch.zeros(size, dtype=torch.uint8)
    if device.type == "cpu":
        there = torch.zeros_like(here)
        return [_copy("within memory", lambda: there.copy_(here), device, size, budget_s)]
    try:
        there, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    except Exception as error:
        return [OperationResult("copy", "to the device", "", unit="GB/s", failure=describe_operation_error(error))]
    rows = [
        _copy("to the device, pageable", lambda: there.copy_(here), device, size, budget_s),
        _copy("from the device, pageable", lambda: here.copy_(there), device, size, budget_s),
        _copy("within the device", lambda: other.copy_(there), device, size, budget_s),
    ]
    if device.type != "cuda":
        return rows
    try:
        pinned = here.pin_memory()
    except RuntimeError as error:
        return [
            *rows,
            OperationResult("copy", "to the device, pinned", "", unit="GB/s", failure=describe_operation_error(error)),
        ]
    return [
        *rows,
        _copy("to the device, pinned", lambda: there.copy_(pinned, non_blocking=True), device, size, budget_s),
        _copy("from the device, pinned", lambda: pinned.copy_(there, non_blocking=True), device, size, budget_s),
    ]


def _copy(
    variant: str, work: Callable[[], object], device: torch.device, size: int, budget_s: float
) -> OperationResult:
    row = OperationResult("copy", variant, "", unit="GB/s")
    try:
        return add_operation_rates(row, (size,), size / 1e9, measure_seconds(work, device, budget_s))
    except Exception as error:
        return replace(row, failure=describe_operation_error(error))


def _tokens(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones(2, 8, 8, dtype=dtype, device=device)


def _image(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, 4, 8, 8, dtype=dtype, device=device)


NEEDED_OPS: dict[str, Callable[[torch.device, torch.dtype], object]] = {
    "batched product": lambda device, dtype: _tokens(device, dtype) @ _tokens(device, dtype),
    "layer norm": lambda device, dtype: F.layer_norm(_tokens(device, dtype), (8,)),
    "group norm": lambda device, dtype: F.group_norm(_image(device, dtype), 2),
    "softmax": lambda device, dtype: _tokens(device, dtype).softmax(-1),
    "gelu": lambda device, dtype: F.gelu(_tokens(device, dtype), approximate="tanh"),
    "silu": lambda device, dtype: F.silu(_tokens(device, dtype)),
    "convolution 3d": lambda device, dtype: F.conv3d(
        _image(device, dtype)[:, :, None], torch.ones(4, 4, 1, 3, 3, dtype=dtype, device=device)
    ),
    "nearest upsampling": lambda device, dtype: F.interpolate(_image(device, dtype), scale_factor=2.0),
    "mean square error": lambda device, dtype: F.mse_loss(_tokens(device, dtype), _tokens(device, dtype)),
}
"""What diffusion models are made of, beside products, convolutions and attention."""

FP32_ONLY_OPS: dict[str, Callable[[torch.device, torch.dtype], object]] = {
    "svd": lambda device, dtype: torch.linalg.svd(torch.eye(8, dtype=dtype, device=device)),
    "inverse": lambda device, dtype: torch.linalg.inv(torch.eye(8, dtype=dtype, device=device)),
    "qr": lambda device, dtype: torch.linalg.qr(torch.eye(8, dtype=dtype, device=device)),
}
"""What torch has in fp32 at best, and finitune never asks for in half: extract and resize decompose in fp32."""


def find_missing_operations(device: torch.device, dtype: str) -> dict[str, str]:
    """Of NEEDED_OPS and FP32_ONLY_OPS those that raise here in `dtype`, with what they say: tried, since coverage
    varies by version (pytorch #52291)."""
    lacking = {}
    for name, attempt in {**NEEDED_OPS, **FP32_ONLY_OPS}.items():
        try:
            attempt(device, MEASURED_DTYPES[dtype])
        except Exception as error:
            lacking[name] = cut_first_line(str(error))
    return lacking
