"""The laws of the scaled half product: linear and convolution, forward and backward, at every magnitude.

Rounding to fp16 errs by at most U = 2**-11 relative and, over random significands, by U / sqrt(3) or less in the root
mean square. A product of two rounded operands therefore differs from the exact one by less than sqrt(2 / 3) * U in
relative L2, where the signs of its terms are random.
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
from finitune.numerics import products
from finitune.numerics.compare import relative_l2, ulp_distance
from finitune.numerics.conv import UNIT_GEOMETRY, ConvGeometry
from finitune.numerics.exponents import (
    MAX_SCALED_MAGNITUDE,
    current_exponent,
    power_of_two,
    rescale_product,
    to_stored_value,
)
from finitune.numerics.formats import exponent_for
from finitune.numerics.half import half_conv, half_linear, reference_conv, reference_linear, scaled_half
from finitune.numerics.stats import amax

U = 2.0**-11
ONE_PRODUCT = math.sqrt(2 / 3) * U
few = settings(max_examples=12)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def linear_case() -> tuple[Tensor, Tensor, dict[str, object]]:
    return torch.randn(4, 33, 96), torch.randn(64, 96) * 0.1, {}


def conv2d_case() -> tuple[Tensor, Tensor, dict[str, object]]:
    return torch.randn(2, 8, 9, 10), torch.randn(12, 4, 3, 3) * 0.2, {"geometry": ConvGeometry(2, (1, 2), groups=2)}


def causal_conv3d_case() -> tuple[Tensor, Tensor, dict[str, object]]:
    """As video VAEs do it: the front of time is padded before, space on both sides."""
    return F.pad(torch.randn(1, 6, 4, 7, 8), (1, 1, 1, 1, 2, 0)), torch.randn(8, 6, 3, 3, 3) * 0.1, {}


CASES = [linear_case, conv2d_case, causal_conv3d_case]
every_case = pytest.mark.parametrize("case", CASES, ids=["linear", "conv2d", "causal_conv3d"])


def half_of(weight: Tensor) -> Callable[..., Tensor]:
    return half_linear if weight.ndim == 2 else half_conv


def twin_of(weight: Tensor) -> Callable[..., Tensor]:
    return reference_linear if weight.ndim == 2 else reference_conv


def plain_of(weight: Tensor) -> Callable[..., Tensor]:
    """torch's own function, its geometry as ours is given."""
    if weight.ndim == 2:
        return F.linear
    convolve = {4: F.conv2d, 5: F.conv3d}[weight.ndim]
    return lambda x, w, b=None, geometry=UNIT_GEOMETRY: convolve(x, w, b, *geometry.over(weight.ndim - 2))


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, **options: object) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


# Exponents


@given(st.floats(2.0**-120, 2.0**127, width=32))
def test_a_current_exponent_fills_the_last_safe_binade(magnitude: float) -> None:
    x = torch.tensor([magnitude, -magnitude / 3])
    x16, k = scaled_half(x, None)
    assert isinstance(k, Tensor) and k.dtype == torch.int32 and k.shape == ()
    expected = math.frexp(magnitude)[1] - 15
    assert int(k) == max(expected, -126)
    assert x16.abs().max() <= MAX_SCALED_MAGNITUDE and (expected < -126 or x16.abs().max() >= MAX_SCALED_MAGNITUDE / 2)


@given(st.integers(-126, 127))
def test_powers_of_two_are_exact(k: int) -> None:
    assert power_of_two(torch.tensor(k, dtype=torch.int32)).item() == 2.0**k


@given(st.lists(st.integers(-126, 113), min_size=1, max_size=3), st.integers(-40, 40))
def test_a_rescaled_product_is_exact_wherever_the_result_fits(exponents: list[int], planned: int) -> None:
    total = sum(exponents) + planned
    product = torch.tensor([1.5, -1.25]) * 2.0 ** max(-120, min(120, -total))
    expected = torch.ldexp(product.double(), torch.tensor(total))
    if not 2.0**-120 < expected.abs().max() < 2.0**127 or abs(total) > 240:
        return
    on_device = [torch.tensor(k, dtype=torch.int32) for k in exponents]
    assert torch.equal(rescale_product(product.clone(), *on_device, planned).double(), expected)
    assert torch.equal(rescale_product(product.clone(), total).double(), expected)
    bias = torch.tensor([0.0, 1.0])
    assert torch.equal(rescale_product(product.clone(), *on_device, planned, bias=bias), expected.float() + bias)


def test_a_half_tensor_passes_without_a_copy() -> None:
    x = torch.randn(8).half()
    assert scaled_half(x, 0)[0] is x and scaled_half(x, None)[0] is x
    assert torch.equal(scaled_half(x, 3)[0], x / 8)


def test_zero_and_faults_pass_through_current_scaling() -> None:
    assert torch.equal(scaled_half(torch.zeros(3), None)[0], torch.zeros(3).half())
    assert scaled_half(torch.zeros(0, 3), None)[0].shape == (0, 3)
    x16, _ = scaled_half(torch.tensor([1.0, math.inf, -math.inf, math.nan]), None)
    assert x16.isposinf().tolist() == [False, True, False, False] and x16.isnan().tolist() == [False] * 3 + [True]
    assert half_linear(torch.tensor([[math.inf]]), torch.ones(1, 1), exponent=None).isinf().all()


@pytest.mark.parametrize("limit", [0.0, 2.0**16, math.nan])
def test_an_impossible_limit_is_refused(limit: float) -> None:
    with pytest.raises(NumericsError) as refused:
        scaled_half(torch.ones(1), None, limit)
    assert refused.value.code == "LIMIT-OUT-OF-RANGE"


def test_a_lower_limit_is_kept() -> None:
    x16, k = scaled_half(torch.tensor([3.0, 1.0]), None, 2.0**4)
    assert int(k) == -2 and x16.tolist() == [12.0, 4.0]


# Forward


@every_case
@few
@given(a=st.integers(-40, 40))
def test_a_power_of_two_commutes_bit_for_bit(case: Callable[..., tuple[Tensor, Tensor, dict]], a: int) -> None:
    torch.manual_seed(a)
    x, weight, options = case()
    half = half_of(weight)
    assert torch.equal(
        half(x * 2.0**a, weight, exponent=None, **options), half(x, weight, exponent=None, **options) * 2.0**a
    )


@every_case
@pytest.mark.parametrize("exponent", [0, 3, None])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_forward_equals_the_twin_within_the_accumulation(
    case: Callable[..., tuple[Tensor, Tensor, dict]], exponent: int | None, stored: torch.dtype
) -> None:
    x, weight, options = case()
    bias = torch.randn(weight.shape[0])
    args = (x, weight.to(stored), bias)
    exact = twin_of(weight)(*args, exponent=exponent, out_dtype=torch.float64, **options)
    depth = weight[0].numel()
    magnitudes = twin_of(weight)(x.abs(), weight.abs().to(stored), bias.abs(), exponent=exponent, **options).double()
    single = half_of(weight)(*args, exponent=exponent, **options)
    assert single.dtype == torch.float32
    assert ((single.double() - exact).abs() <= (depth + 2) * 2.0**-24 * magnitudes).all()
    half = half_of(weight)(*args, exponent=exponent, out_dtype=torch.float16, **options)
    assert torch.equal(half, single.half())
    assert ulp_distance(half, exact.float(), torch.float16).max() <= 1


@every_case
def test_a_stored_weight_may_have_its_own_exponent(case: Callable[..., tuple[Tensor, Tensor, dict]]) -> None:
    x, weight, options = case()
    stored, half = weight.half(), half_of(weight)
    out = half(x, stored, exponent=None, **options)
    assert torch.equal(half(x, stored, exponent=None, weight_exponent=5, **options), out * 32)
    grad = torch.randn_like(out)
    plain = gradients(half, [x, weight], grad, exponent=2, **options)
    scaled = gradients(half, [x, weight], grad, exponent=2, weight_exponent=5, **options)
    assert all(torch.equal(b, a * 32) for a, b in zip(plain, scaled, strict=True))


@few
@given(st.integers(-100, 100), st.integers(0, 40), st.integers(0, 10_000))
def test_current_scaling_is_finite_at_any_magnitude(binade: int, spread: int, seed: int) -> None:
    torch.manual_seed(seed)
    for case in CASES:
        x, weight, options = case()
        x = x * torch.exp2((binade + torch.randint(-spread, spread + 1, x.shape)).clamp(-100, 100).float())
        out = half_of(weight)(x, weight, exponent=None, **options)
        assert torch.isfinite(out).all() and out.abs().max() > 0


@few
@given(st.floats(1e-3, 1e9), st.floats(0, 4))
def test_a_planned_exponent_covers_every_input_within_its_range(magnitude: float, headroom: float) -> None:
    x = torch.empty(5, 16).uniform_(-1, 1) * magnitude
    x[0, 0], x[1, 0] = magnitude, -magnitude
    exponent = exponent_for(amax(x).item(), headroom)
    assert torch.isfinite(scaled_half(x, exponent)[0]).all()
    assert torch.isfinite(half_linear(x, torch.randn(3, 16), exponent=exponent)).all()


def test_a_planned_exponent_that_is_too_small_shows() -> None:
    assert not torch.isfinite(half_linear(torch.tensor([[70000.0]]), torch.ones(1, 1))).any()


def test_current_scaling_keeps_what_a_plain_half_product_loses() -> None:
    weight = torch.randn(8, 32)
    for binade in (-40, 20):
        x = torch.randn(4, 32) * 2.0**binade
        exact = x.double() @ weight.double().t()
        assert relative_l2(half_linear(x, weight, exponent=None), exact) < ONE_PRODUCT
        assert not relative_l2(half_linear(x, weight), exact) < 0.5


@pytest.mark.parametrize("function", [half_linear, half_conv])
def test_another_output_format_is_refused(function: Callable[..., Tensor]) -> None:
    weight = torch.ones(1, 1) if function is half_linear else torch.ones(1, 1, 1, 1)
    with pytest.raises(NumericsError) as refused:
        function(weight, weight, out_dtype=torch.bfloat16)
    assert refused.value.code == "OUT-DTYPE"


def test_another_convolution_is_refused() -> None:
    with pytest.raises(NumericsError) as refused:
        half_conv(torch.ones(1, 1, 4), torch.ones(1, 1, 3))
    assert refused.value.code == "CONV-RANK"
    with pytest.raises(NumericsError) as refused:
        half_conv(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), geometry=ConvGeometry(padding="same"))  # type: ignore[arg-type]
    assert refused.value.code == "CONV-PADDING"


# Backward


@every_case
@pytest.mark.parametrize("binades", [(0, 0), (-60, 20), (40, -60), (60, 20), (0, -80), (0, 60)])
def test_gradients_are_accurate_at_every_magnitude_and_four_times_better_than_bf16(
    case: Callable[..., tuple[Tensor, Tensor, dict]], binades: tuple[int, int]
) -> None:
    x, weight, options = case()
    x = x * 2.0 ** binades[0]
    bias = torch.randn(weight.shape[0])
    grad = torch.randn_like(plain_of(weight)(x, weight, **options)) * 2.0 ** binades[1]
    ours = gradients(half_of(weight), [x, weight, bias], grad, exponent=None, **options)
    exact = gradients(plain_of(weight), [x.double(), weight.double(), bias.double()], grad, **options)
    brain = gradients(plain_of(weight), [x.bfloat16(), weight.bfloat16(), bias.bfloat16()], grad, **options)
    for name, mine, theirs, wanted in zip("xwb", ours, brain, exact, strict=True):
        assert mine.dtype == torch.float32
        error = relative_l2(mine, wanted)
        assert error < ONE_PRODUCT, name
        assert error <= relative_l2(theirs, wanted) / 4, name


@every_case
@pytest.mark.parametrize("exponent", [0, 4, None])
def test_gradients_equal_the_twins(case: Callable[..., tuple[Tensor, Tensor, dict]], exponent: int | None) -> None:
    """The twin's fp64 backward sees the same rounded operands: only the gradient's rounding, U / sqrt(3), is left."""
    x, weight, options = case()
    grad = torch.randn_like(plain_of(weight)(x, weight, **options))
    ours = gradients(half_of(weight), [x, weight], grad, exponent=exponent, **options)
    twins = gradients(twin_of(weight), [x, weight], grad, exponent=exponent, out_dtype=torch.float64, **options)
    for mine, wanted in zip(ours, twins, strict=True):
        assert relative_l2(mine, wanted) < U / math.sqrt(3)
    stored = to_stored_value(grad, None).float()
    ours = gradients(half_of(weight), [x, weight], stored, exponent=exponent, **options)
    twins = gradients(twin_of(weight), [x, weight], stored, exponent=exponent, out_dtype=torch.float64, **options)
    for mine, wanted in zip(ours, twins, strict=True):
        assert relative_l2(mine, wanted) < grad.numel() * 2.0**-24


@every_case
def test_backward_keeps_half_tensors_only_and_only_those_it_needs(
    case: Callable[..., tuple[Tensor, Tensor, dict]],
) -> None:
    x, weight, options = case()
    for needs_x, needs_weight in [(True, False), (False, True), (True, True)]:
        saved: list[Tensor] = []

        def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = half_of(weight)(
                x.clone().requires_grad_(needs_x), weight.clone().requires_grad_(needs_weight), exponent=None, **options
            )
        assert out.requires_grad and all(tensor.dtype == torch.float16 for tensor in saved)
        assert len(saved) == needs_x + needs_weight


def test_gradients_come_in_the_dtype_of_their_input() -> None:
    x, weight = torch.randn(4, 8).half().requires_grad_(), torch.randn(3, 8).half().requires_grad_()
    bias = torch.randn(3).half().requires_grad_()
    half_linear(x, weight, bias, out_dtype=torch.float16).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float16
    assert torch.equal(bias.grad, torch.full((3,), 4.0).half())


# Back ends


@few
@given(st.integers(-8, 8), st.integers(-8, 6), st.sampled_from([(24, 512, 16), (3, 24, 512, 16)]))
def test_a_product_written_in_fp16_is_made_to_fit(a: int, b: int, shape: tuple[int, ...]) -> None:
    *lead, depth, columns = shape
    left = (torch.rand(*lead, depth) * 2.0**a * 100).half()
    right = (torch.randn(*shape[:-3], depth, columns) * 2.0**b * 100).half()
    exact = left.double() @ right.double()
    fitted = products.fit_half_product(torch.matmul, left, right, summed=(-2,))
    assert fitted.dtype == torch.float32 and torch.isfinite(fitted).all()
    assert relative_l2(fitted, exact) < 2 * U
    assert relative_l2(products.half_matmul(left, right), exact) < depth * 2.0**-24


def test_fp16_convolutions_are_made_to_fit_in_both_directions() -> None:
    from finitune.numerics import conv

    x, weight, options = conv2d_case()
    geometry = options["geometry"].over(2)
    x16, weight16 = (x * 8000).half(), (weight * 50).half()

    def forward(a: Tensor, b: Tensor) -> Tensor:
        return conv._convolution(a.float(), b.float(), None, geometry).half()

    exact = conv._convolution(x16.double(), weight16.double(), None, geometry)
    assert exact.abs().max() > 65520
    assert relative_l2(products.fit_half_product(forward, x16, weight16, summed=(1, 2, 3)), exact) < 2 * U
    grad16 = (torch.randn_like(exact) * 8000).half()

    def backward(a: Tensor, b: Tensor) -> Tensor:
        return conv._input_gradient(x.shape, b, a, geometry).half()

    wanted = conv._input_gradient(x.shape, weight16, grad16, geometry)
    assert wanted.abs().max() > 65520
    assert relative_l2(products.fit_half_product(backward, grad16, weight16, summed=(0, 2, 3)), wanted) < 2 * U


@pytest.mark.parametrize("k", [0, 3, -5])
@pytest.mark.parametrize("biased", [False, True])
def test_the_fp16_epilogue_means_the_same(k: int, biased: bool) -> None:
    x, weight = torch.randn(5, 32).half(), torch.randn(7, 32).half()
    bias = torch.randn(7).half() if biased else None
    wanted = rescale_product(products.half_matmul(x, weight.t()), k, bias=bias, dtype=torch.float16)
    assert ulp_distance(products._half_epilogue(x, weight, bias, k), wanted, torch.float16).max() <= 1


def test_a_back_end_is_tried_not_assumed() -> None:
    cpu = torch.device("cpu")
    assert products.can_write_fp32_product(cpu) is False and products.can_scale_fp32_product(cpu) is False


@needs_cuda
@every_case
@pytest.mark.parametrize("exponent", [0, 2, None])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_cuda_means_what_the_cpu_means(
    case: Callable[..., tuple[Tensor, Tensor, dict]], exponent: int | None, out_dtype: torch.dtype
) -> None:
    x, weight, options = case()
    args = [x * 300, weight.half(), torch.randn(weight.shape[0]).half()]
    options = {**options, "exponent": exponent, "out_dtype": out_dtype}
    on_cpu = half_of(weight)(*args, **options)
    on_cuda = half_of(weight)(*[a.cuda() for a in args], **options)
    assert torch.equal(torch.isfinite(on_cuda.cpu()), torch.isfinite(on_cpu))
    assert relative_l2(on_cuda.cpu(), on_cpu) < 2 * U
    grad = torch.randn_like(on_cpu)
    cpu_gradients = gradients(half_of(weight), args, grad, **options)
    cuda_gradients = gradients(half_of(weight), [a.cuda() for a in args], grad.cuda(), **options)
    for mine, wanted in zip(cuda_gradients, cpu_gradients, strict=True):
        assert relative_l2(mine.cpu(), wanted) < 2 * U


def test_current_exponents_of_the_extremes_are_usable() -> None:
    for value in (0.0, math.inf, math.nan, 2.0**-149):
        k = current_exponent(torch.tensor(value))
        assert -126 <= int(k) <= 127 and math.isfinite(power_of_two(-k).item())
