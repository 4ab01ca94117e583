"""The laws of half attention: masks, magnitudes, gradients.

Its chain has five roundings on the longest way (q and k, the probabilities, v, the output; or the gradient and the
logits' gradient in place of the last two), each at most U / sqrt(3) in the root mean square. With logits of order one,
where a relative error of a logit is one of its probability, they add up to sqrt(5 / 3) * U; the bound is 2 * U.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.errors import NumericsError
from finitune.numerics import attention
from finitune.numerics.attention import half_attention, reference_attention
from finitune.numerics.compare import relative_l2

U = 2.0**-11
few = settings(max_examples=10)
Case = tuple[list[Tensor], Tensor | None, bool]


def operands(queries: int, keys: int, heads: tuple[int, ...] = (2, 3), width: int = 16) -> list[Tensor]:
    return [torch.randn(*heads, length, width) for length in (queries, keys, keys)]


def self_attention() -> Case:
    return operands(33, 33), None, False


def causal() -> Case:
    return operands(33, 33, heads=(4,)), None, True


def cross_padded() -> Case:
    """Text padding: every row of a sample sees the same keys."""
    mask = torch.arange(20)[None, None, None, :] < torch.tensor([7, 20])[:, None, None, None]
    return operands(33, 20), mask, False


def additive() -> Case:
    bias = torch.randn(3, 33, 20)
    bias[:, :, 15:] = -math.inf
    return operands(33, 20), bias, False


def causal_and_masked() -> Case:
    mask = torch.rand(2, 1, 33, 33) > 0.3
    mask[..., 0] = True
    return operands(33, 33), mask, True


every_case = pytest.mark.parametrize("case", [self_attention, causal, cross_padded, additive, causal_and_masked])


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, **options: object) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """torch's own attention, with the two kinds of mask merged as it wants them."""
    if mask is not None and is_causal:
        mask, is_causal = mask & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(), False
    cast = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, cast, is_causal=is_causal)


@every_case
def test_the_twin_is_torchs_attention(case: Callable[[], Case]) -> None:
    inputs, mask, is_causal = case()
    rounded = [x.half() for x in inputs]
    wanted = by_torch(*[x.double() for x in rounded], mask, is_causal)
    assert relative_l2(reference_attention(*rounded, mask, is_causal=is_causal), wanted) < 1e-12


@every_case
@pytest.mark.parametrize("exponent", [0, None])
def test_forward_equals_the_twin_within_two_roundings(case: Callable[[], Case], exponent: int | None) -> None:
    inputs, mask, is_causal = case()
    options = {"is_causal": is_causal, "exponent": exponent}
    out = half_attention(*inputs, mask, **options)
    assert out.dtype == torch.float32
    assert relative_l2(out, reference_attention(*inputs, mask, **options)) < math.sqrt(2 / 3) * U
    scaled = half_attention(*inputs, mask, scale=0.5, **options)
    assert relative_l2(scaled, reference_attention(*inputs, mask, scale=0.5, **options)) < math.sqrt(2 / 3) * U


@every_case
@pytest.mark.parametrize("binades", [(0, 0, 0), (30, -30, -60), (-70, 70, 60), (0, 0, 100), (0, 0, -100)])
def test_forward_and_gradients_are_accurate_at_every_magnitude_and_four_times_better_than_bf16(
    case: Callable[[], Case], binades: tuple[int, int, int]
) -> None:
    inputs, mask, is_causal = case()
    inputs = [x * 2.0**binade for x, binade in zip(inputs, binades, strict=True)]
    grad = torch.randn(*inputs[0].shape) * 2.0 ** (-binades[2] / 2)
    exact_inputs = [x.double() for x in inputs]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_torch(q, k, v, mask, is_causal)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return half_attention(q, k, v, mask, is_causal=is_causal, exponent=None)

    brain = [x.bfloat16() for x in inputs]
    results = [(ours(*inputs), plain(*brain), plain(*exact_inputs))]
    results += zip(
        gradients(ours, inputs, grad), gradients(plain, brain, grad), gradients(plain, exact_inputs, grad), strict=True
    )
    for name, (mine, theirs, wanted) in zip(["out", "q", "k", "v"], results, strict=True):
        assert mine.dtype == torch.float32
        error = relative_l2(mine, wanted)
        assert error < 2 * U, name
        assert error <= relative_l2(theirs, wanted) / 4, name


@few
@given(st.integers(-40, 40), st.integers(-40, 40))
def test_a_power_of_two_of_v_commutes_and_one_of_q_moves_to_k(a: int, b: int) -> None:
    (q, k, v), mask, _ = cross_padded()
    out = half_attention(q, k, v, mask, exponent=None)
    moved = half_attention(q * 2.0**a, k * 2.0**-a, v * 2.0**b, mask, exponent=None)
    assert torch.equal(moved, out * 2.0**b)


@few
@given(st.tuples(*[st.integers(-100, 100)] * 3))
def test_current_scaling_is_finite_at_any_magnitude(binades: tuple[int, int, int]) -> None:
    (q, k, v), mask, _ = cross_padded()
    q, k, v = (x * 2.0**binade for x, binade in zip((q, k, v), binades, strict=True))
    out = half_attention(q, k, v, mask, exponent=None)
    assert torch.isfinite(out).all() and out.abs().max() > 0


def test_small_gradients_do_not_flush() -> None:
    inputs, mask, _ = cross_padded()
    grad = torch.randn(*inputs[0].shape)
    at_one = gradients(half_attention, inputs, grad, mask=mask)
    far_below = gradients(half_attention, inputs, grad * 2.0**-60, mask=mask)
    assert all(torch.equal(b, a * 2.0**-60) for a, b in zip(at_one, far_below, strict=True))


@pytest.mark.parametrize("additive_mask", [False, True])
@pytest.mark.parametrize("exponent", [0, None])
def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient(additive_mask: bool, exponent: int | None) -> None:
    inputs = operands(8, 8)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    given_mask = torch.zeros(8, 8).masked_fill(~mask, -math.inf) if additive_mask else mask
    out = half_attention(*inputs, given_mask, exponent=exponent)
    assert (out[..., 3, :] == 0).all() and torch.isfinite(out).all()
    grad = torch.zeros_like(out)
    grad[..., 3, :] = 1
    assert all((g == 0).all() for g in gradients(half_attention, inputs, grad, mask=given_mask, exponent=exponent))
    assert relative_l2(out, reference_attention(*inputs, given_mask, exponent=exponent)) < U


def test_the_smallest_number_as_a_mask_masks() -> None:
    inputs = operands(8, 8)
    hidden = torch.rand(8, 8) > 0.5
    hidden[:, 0] = False
    wanted = half_attention(*inputs, ~hidden)
    for dtype in (torch.float16, torch.float32):
        bias = torch.zeros(8, 8, dtype=dtype).masked_fill(hidden, -math.inf)
        assert torch.equal(half_attention(*inputs, bias), wanted)
    least = torch.zeros(8, 8).masked_fill(hidden, torch.finfo(torch.float32).min)
    assert torch.equal(half_attention(*inputs, least), wanted)


@every_case
def test_blocks_change_nothing(case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask, is_causal = case()
    grad = torch.randn(*inputs[0].shape)
    options = {"mask": mask, "is_causal": is_causal}
    whole = [half_attention(*inputs, **options), *gradients(half_attention, inputs, grad, **options)]
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 7 * 6 * 33)
    blocked = [half_attention(*inputs, **options), *gradients(half_attention, inputs, grad, **options)]
    for a, b in zip(whole, blocked, strict=True):
        assert relative_l2(b, a) < U / 2


@every_case
def test_the_fused_kernel_means_the_same(case: Callable[[], Case]) -> None:
    inputs, mask, is_causal = case()
    if mask is not None:
        mask = mask.clone()
        mask[..., :1] = False if mask.dtype == torch.bool else -math.inf
    q, k, v = (x.half() for x in inputs)
    masking = attention.Masking.of(mask, is_causal)
    fused = attention.fused_attention(q, k, v, masking, 0.25)
    assert fused.dtype == torch.float16 and fused.shape == q.shape
    written_out = attention.blockwise_attention(attention._flat(q, k, v, (0, 0, 0)), masking, 0.25)
    assert torch.isfinite(fused).all()
    assert relative_l2(fused, written_out) < 2 * U


def test_half_in_half_out_and_backward_keeps_half_tensors() -> None:
    inputs = [x.half() for x in operands(8, 8)]
    assert half_attention(*inputs).dtype == torch.float16
    assert all(
        g.dtype == torch.float16 for g in gradients(half_attention, inputs, torch.ones(8, 16).expand(2, 3, 8, 16))
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        half_attention(*[x.requires_grad_() for x in operands(8, 8)], exponent=None)
    assert len(saved) == 3 and all(tensor.dtype == torch.float16 for tensor in saved)


def test_a_planned_exponent_of_v_is_undone() -> None:
    q, k, v = operands(8, 8)
    assert torch.isfinite(half_attention(q, k, v * 2.0**20, exponent=8)).all()
    assert torch.equal(half_attention(q, k, v * 2.0**20, exponent=20), half_attention(q, k, v) * 2.0**20)
    assert not torch.isfinite(half_attention(q, k, v * 2.0**20)).all()


def test_a_mask_that_asks_for_a_gradient_is_refused() -> None:
    with pytest.raises(NumericsError) as refused:
        half_attention(*operands(4, 4), torch.zeros(4, 4, requires_grad=True))
    assert refused.value.code == "MASK-GRADIENT"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_case
@pytest.mark.parametrize("exponent", [0, None])
def test_cuda_means_what_the_cpu_means(case: Callable[[], Case], exponent: int | None) -> None:
    inputs, mask, is_causal = case()
    grad = torch.randn(*inputs[0].shape)
    options = {"is_causal": is_causal, "exponent": exponent}
    on_cuda = [x.cuda() for x in inputs]
    cuda_mask = None if mask is None else mask.cuda()
    assert (
        relative_l2(half_attention(*on_cuda, cuda_mask, **options).cpu(), half_attention(*inputs, mask, **options)) < U
    )
    ours = gradients(half_attention, on_cuda, grad.cuda(), mask=cuda_mask, **options)
    for mine, wanted in zip(ours, gradients(half_attention, inputs, grad, mask=mask, **options), strict=True):
        assert relative_l2(mine.cpu(), wanted) < 2 * U
