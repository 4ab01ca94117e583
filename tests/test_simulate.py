"""The simulated tensor core: fp64 on rounded operands with one rounding, in both profiles, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.numerics import simulate
from tests.tiny import cosmos, cosmos_calls

HALVES = [torch.float16, torch.bfloat16]
MASK = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)

PRODUCTS = {
    "mm": (torch.mm, (5, 33), (33, 7)),
    "addmm": (torch.addmm, (7,), (5, 33), (33, 7)),
    "bmm": (torch.bmm, (3, 5, 33), (3, 33, 7)),
    "baddbmm": (torch.baddbmm, (3, 5, 7), (3, 5, 33), (3, 33, 7)),
    "mv": (torch.mv, (5, 33), (33,)),
    "dot": (torch.dot, (33,), (33,)),
    "linear": (F.linear, (2, 5, 33), (7, 33)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 4, 6, 6), (5, 4, 3, 3), (5,)),
    "conv3d": (F.conv3d, (1, 3, 4, 5, 5), (4, 3, 2, 3, 3)),
    "sdpa": (F.scaled_dot_product_attention, (1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "sdpa, masked": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK.to(q.dtype)),
        (1, 2, 6, 8),
        (1, 2, 6, 8),
        (1, 2, 6, 8),
    ),
}


def operands(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance from the correctly rounded result, in units of the format's spacing at its magnitude."""
    rounded = exact.to(got.dtype).double()
    info = torch.finfo(got.dtype)
    spacing = info.eps * 2.0 ** rounded.abs().clamp(min=info.tiny).log2().floor()
    return (got.double() - rounded).abs() / spacing


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("profile", ["eager", "fused"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_fp64_rounded_once(name, profile, dtype):
    product, *shapes = PRODUCTS[name]
    inputs = operands(shapes, dtype)
    with simulate.half(profile):
        got = product(*inputs)
    assert got.dtype == dtype
    distance = ulps(got, product(*(x.double() for x in inputs)))
    assert distance.max() <= 1
    assert (distance == 0).double().mean() >= 0.9


@pytest.mark.parametrize("name", PRODUCTS)
def test_inference_mode_gives_the_same_bits(name):
    product, *shapes = PRODUCTS[name]
    inputs = operands(shapes, torch.float16)
    with torch.no_grad(), simulate.half():
        expected = product(*inputs)
    with torch.inference_mode(), simulate.half():
        assert torch.equal(product(*inputs), expected)


@given(
    st.lists(st.integers(-250, 250), min_size=8, max_size=8), st.lists(st.integers(-250, 250), min_size=8, max_size=8)
)
@settings(max_examples=60)
def test_overflow_is_where_the_exact_value_rounds_to_infinity(left, right):
    a, b = torch.tensor([left]).half(), torch.tensor([right]).half()  # every partial sum is exact in fp32
    exact = (a.double() @ b.double().T).half()
    with simulate.half():
        assert torch.equal(a @ b.T, exact)


@pytest.mark.parametrize("rest, expected", [(15.0, 65504.0), (16.0, torch.inf)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_overflow_at_the_very_border(rest, expected, sign):
    a, b = torch.tensor([[32752.0, 1.0]]).half(), torch.tensor([[2.0], [rest]]).half()  # 65504 + rest
    with simulate.half():
        assert (a @ (sign * b)).item() == sign * expected


@pytest.mark.parametrize("profile", ["eager", "fused"])
def test_fp32_is_untouched(profile):
    calls = cosmos_calls(1)
    model = cosmos().float()
    expected = calls[0].run(model)[0]
    with simulate.half(profile):
        assert torch.equal(calls[0].run(model)[0], expected)


def test_mixed_dtypes_are_refused_as_torch_refuses_them():
    with simulate.half(), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 2).half(), torch.ones(2, 2))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_fully_masked_row_is_zero(dtype):
    q, k, v = operands([(1, 1, 4, 8)] * 3, dtype)
    mask = torch.zeros(4, 4, dtype=dtype)
    mask[1] = -torch.inf
    with simulate.half():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (out[0, 0, 1] == 0).all() and out.isfinite().all() and (out[0, 0, 0] != 0).all()


def chain(x):
    """x again, unless it overflows on the way."""
    return x * 300.0 / 300.0


def test_eager_rounds_each_operation_and_fused_only_the_chain():
    x = torch.full((4,), 1000.0, dtype=torch.float16)
    with simulate.half():
        assert chain(x).isinf().all()
    with simulate.half("fused"):
        out = chain(x)
    assert out.dtype == torch.float16 and torch.equal(out, x)


@pytest.mark.parametrize("read", [lambda x: x @ torch.ones(4, 4).half(), lambda x: x.sum(1), lambda x: x.cumsum(1)])
def test_fused_rounds_before_a_product_or_a_reduction(read):
    x = torch.full((4, 4), 1000.0, dtype=torch.float16)
    with simulate.half("fused"):
        assert read(x * 300.0).isinf().all()
        assert torch.equal(read(chain(x)), read(x))


def test_fused_computes_a_chain_in_fp32_and_rounds_once():
    x, y = operands([(64,), (64,)], torch.float16)
    with simulate.half("fused"):
        out = F.silu(x) * y + 0.1
    assert torch.equal(out, (F.silu(x.float()) * y.float() + 0.1).half())


def test_fused_keeps_fp32_across_casts_and_views():
    x = torch.full((2, 4), 1000.0, dtype=torch.float16)
    with simulate.half("fused"):
        wide = x * 300.0
        assert (wide.float() == 300000.0).all()
        assert torch.equal(wide.view(8) / 300.0, x.view(8))
        left, right = wide.chunk(2, dim=1)
        assert (left / right == 1.0).all()
        assert torch.equal(wide.t().float(), torch.full((4, 2), 300000.0))


@pytest.mark.parametrize("profile", ["eager", "fused"])
def test_in_place_operations_and_their_aliases(profile):
    with simulate.half(profile):
        x = torch.full((4,), 3.0, dtype=torch.float16) * 2.0
        alias = x.view(2, 2)
        x.add_(1.0)
        assert (x * 1.0 == 7.0).all() and (alias * 1.0 == 7.0).all()
        alias[0].fill_(5.0)
        assert (x * 1.0).tolist() == [5.0, 5.0, 7.0, 7.0]
        x.copy_(torch.arange(4.0))
        assert (alias * 1.0).tolist() == [[0.0, 1.0], [2.0, 3.0]]
        torch.mul(alias, 2.0, out=alias)
        assert (x + 0.0).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_fused_in_place_is_part_of_the_chain():
    x = torch.full((4,), 1000.0, dtype=torch.float16)
    with simulate.half("fused"):
        y = x * 300.0
        y /= 300.0
        assert torch.equal(y + 0.0, x)
    assert torch.equal(y, x)


def test_a_cast_holds_its_own_copy():
    source = torch.full((4,), 3.0)
    with simulate.half("fused"):
        cast = source.half()
        source.zero_()
        assert (cast * 1.0 == 3.0).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("profile", ["eager", "fused"])
def test_promotion_is_torch_s(profile, dtype):
    half, single = torch.ones(2, dtype=dtype), torch.ones(2)
    pairs = [(half, single), (half, single[0]), (half[0], single), (half, 2), (half, torch.ones(2).int())]
    with simulate.half(profile):
        got = [(a * b).dtype for a, b in pairs] + [(half > 0).dtype]
    assert got == [torch.result_type(a, b) for a, b in pairs] + [torch.bool]


@pytest.mark.parametrize("profile", ["eager", "fused"])
@pytest.mark.parametrize("name", ["addmm", "bmm", "conv2d", "sdpa"])
def test_backward_is_fp64_rounded(name, profile):
    product, *shapes = PRODUCTS[name]
    inputs = [x.requires_grad_() for x in operands(shapes, torch.float16)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    with simulate.half(profile):
        out = product(*inputs)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
        grads = torch.autograd.grad(out, inputs, seed)
    exact = torch.autograd.grad(product(*doubles), doubles, seed.double())
    for grad, reference in zip(grads, exact, strict=True):
        assert grad.dtype == torch.float16
        assert torch.linalg.vector_norm(grad.double() - reference) <= 1e-3 * torch.linalg.vector_norm(reference)


@pytest.mark.parametrize("profile", ["eager", "fused"])
def test_a_whole_model_is_as_near_as_half_allows(profile):
    (call,) = cosmos_calls(1)
    model = cosmos()
    expected = call.run(model.float())[0]
    kwargs = {k: v.half() if isinstance(v, torch.Tensor) else v for k, v in call.kwargs.items()}
    with simulate.half(profile):
        out = model.half()(**kwargs)[0]
    assert out.dtype == torch.float16
    assert torch.linalg.vector_norm(out.float() - expected) <= 3e-3 * torch.linalg.vector_norm(expected)
