"""L2: the operation that made the first non-finite number, against a brute-force twin, with its kind and its line."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from finitune.precision.apply import hold_parameters_in
from finitune.precision.certificate import cast_call_inputs
from finitune.precision.origin import classify_fault, find_first_fault_origin, replay_to_first_fault
from finitune.precision.planner import RecordedCall, record_operations
from tests.brute import brute_force
from tests.tiny import cosmos, cosmos_calls


def call_of(*values, **kwargs):
    return RecordedCall(tuple(values), kwargs)


def causal(dtype):
    return torch.zeros(4, 4, dtype=dtype).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)


def line_of(owner, text):
    """The line of `owner`'s source that holds `text`, which is there once."""
    lines, start = inspect.getsourcelines(owner)
    (number,) = [start + i for i, line in enumerate(lines) if text in line]
    return number


def check(root, call, fault, at, owner=None):
    """Everything there is to know of one fault: it equals the twin's, and `at` is in the line that it points at."""
    site, op, kind, value = fault
    origin = find_first_fault_origin(root, call, forward=3)
    assert origin is not None
    assert (origin.site, origin.op, origin.kind) == (site, op, kind)
    assert origin.value == pytest.approx(value, rel=1e-3, nan_ok=True)
    assert (origin.file, origin.line) == ("tests/test_origin.py", line_of(owner or type(root), at))
    assert origin.forward == 3
    assert str(origin).startswith(f"{site or '(root)'}:{op} ({kind})")
    assert str(replay_to_first_fault(root, call)) == str(origin)
    return origin


@pytest.mark.parametrize("exponent", [12, 16, 17])
def test_the_stream_of_a_transformer_in_raw_half(exponent):
    model = cosmos(stream_exponent=exponent)
    (call,) = cast_call_inputs(cosmos_calls(1), torch.float16)
    with hold_parameters_in(model, torch.float16):
        origin, first, expected = (
            find_first_fault_origin(model, call),
            replay_to_first_fault(model, call),
            brute_force(model, call),
        )
    if expected is None:
        assert origin is None and exponent == 12
        return
    assert origin == first
    assert (origin.site, origin.op) == expected
    assert origin.kind in ("product", "add", "multiply") and origin.dtype == "float16"
    assert 65504 < origin.value < math.inf
    assert origin.file.startswith("diffusers/models/") and origin.line > 0


def test_a_weight_that_half_cannot_hold_is_a_bad_weight():
    model = cosmos(stream_exponent=20)
    (call,) = cast_call_inputs(cosmos_calls(1), torch.float16)
    with hold_parameters_in(model, torch.float16):
        origin = find_first_fault_origin(model, call)
    assert (origin.site, origin.op, origin.kind) == ("patch_embed.proj", "mm", "weight")


class Model(nn.Module):
    """A base for models of one fault each: something to run through, and a weight that tells the device."""

    def __init__(self):
        super().__init__()
        self.through = nn.Identity()
        self.weight = nn.Parameter(torch.ones(4, 4).half(), requires_grad=False)


class Gated(Model):
    def forward(self, x):
        return self.through(self.through(x) * x)


class Block(Model):
    def forward(self, x):
        branch = self.through(x) / 2.0
        x = x + branch
        return F.silu(self.through(x))


class InPlace(Model):
    def forward(self, x):
        x = x.clone()
        x += self.through(x)
        return self.through(x).view(-1)


class Cast(Model):
    def forward(self, x):
        return self.through(x).half()


class HandNorm(Model):
    def forward(self, x):
        square = x.pow(2)
        unit = x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6)
        return unit / unit.abs().amax()  # all zero by now


class Epsilon(Model):
    def forward(self, x):
        return x / (x.abs().amax(-1, keepdim=True) + 1e-12)


class InverseRoot(Model):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


class Quotient(Model):
    def forward(self, x):
        return x / 0.001


class Product(Model):
    def forward(self, x):
        return self.through(x @ self.weight)


class Sum(Model):
    def forward(self, x):
        return self.through(x).sum(-1)


class MaskedScores(Model):
    def forward(self, x):
        mask = causal(x.dtype)
        scores = x + x + mask
        return self.through(scores.softmax(-1))


class LateMask(Model):
    def forward(self, x):
        mask = causal(x.dtype)
        scores = torch.add(mask, x, alpha=2)
        return self.through(scores.softmax(-1))


class FullyMasked(Model):
    def forward(self, x):
        mask = torch.full((4, 4), -torch.inf, dtype=x.dtype)
        return (x + mask).softmax(-1)


class Attention(Model):
    def forward(self, x, mask=None):
        q = x.view(1, 1, 4, 4)
        attended = F.scaled_dot_product_attention(q, q, q * 0.0, attn_mask=mask)
        return self.through(attended @ (q * 4.0))


FULL = 40000.0
ONE_FAULT = [
    (Gated, 300.0, ("mul", "multiply", 90000.0), "self.through(x) * x"),
    (Block, 50000.0, ("add", "add", 75000.0), "x = x + branch"),
    (InPlace, FULL, ("add_", "add", 80000.0), "x += "),
    (HandNorm, 300.0, ("pow", "multiply", 90000.0), "x.pow(2)"),
    (Epsilon, 0.0, ("div", "epsilon", math.nan), "+ 1e-12"),
    (InverseRoot, 1e-5, ("rsqrt", "epsilon", math.inf), "torch.rsqrt"),
    (Quotient, 300.0, ("div", "multiply", 300000.0), "x / 0.001"),
    (Product, FULL, ("mm", "product", 160000.0), "x @ self.weight"),
    (Sum, FULL, ("sum", "accumulation", 160000.0), ".sum(-1)"),
    (MaskedScores, FULL, ("add", "add", 80000.0), "scores = x + x + mask"),
]


class Nested(nn.Module):
    """The same faults, inside containers."""

    def __init__(self, inner):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Sequential(inner, nn.SiLU())])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"sample": (x * 0.5,)}


@pytest.mark.parametrize("wrap, site", [(lambda model: model, ""), (Nested, "blocks.1.0")], ids=["alone", "nested"])
@pytest.mark.parametrize("model, fill, fault, at", ONE_FAULT)
def test_one_fault(model, fill, fault, at, wrap, site):
    root, call = wrap(model()), call_of(torch.full((4, 4), fill).half())
    assert check(root, call, (site, *fault), at, owner=model).dtype == "float16"
    assert brute_force(root, call) == (site, fault[0])


def test_a_cast_to_half():
    x = torch.full((4, 4), 1e5)
    assert check(Cast(), call_of(x), ("", "_to_copy", "cast", 1e5), ".half()").dtype == "float16"
    assert brute_force(Cast(), call_of(x)) == ("", "_to_copy")


def test_a_linear_layer_points_at_the_caller_s_line():
    root = Nested(nn.Linear(4, 4, bias=False).half().requires_grad_(False))
    root.blocks[1][0].weight.fill_(1.0)
    origin = find_first_fault_origin(root, call_of(torch.full((4, 4), FULL).half()))
    assert (origin.site, origin.op, origin.kind) == ("blocks.1.0", "mm", "product")
    assert origin.line == line_of(Nested, "x = block(x)")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_weight(bias, bad):
    root = Nested(nn.Linear(4, 4, bias=bias).half().requires_grad_(False))
    root.blocks[1][0].weight[2, 1] = bad
    origin = find_first_fault_origin(root, call_of(torch.ones(2, 4).half()))
    assert (origin.site, origin.op, origin.kind) == ("blocks.1.0", "addmm" if bias else "mm", "weight")
    assert math.isnan(origin.value) and "read a NaN" in str(origin)


def test_a_bad_buffer_is_a_bad_weight():
    root = nn.BatchNorm1d(4).eval().half()
    root.running_mean[0] = math.nan
    assert find_first_fault_origin(root, call_of(torch.ones(2, 4).half())).kind == "weight"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("keyword", [True, False])
def test_a_bad_input(bad, keyword):
    x = torch.ones(4, 4).half()
    x[1, 2] = bad
    call = call_of(x=x) if keyword else call_of(x)
    origin = find_first_fault_origin(Block(), call)
    assert (origin.site, origin.op, origin.kind) == ("", "input", "input")


def test_an_overflow_where_the_mask_is_added():
    call = call_of(torch.full((4, 4), FULL).half())
    check(LateMask(), call, ("", "add", "add", 80000.0), "torch.add(mask, x, alpha=2)")


def test_a_fully_masked_row_is_the_mask_s_fault():
    check(FullyMasked(), call_of(torch.ones(4, 4).half()), ("", "_softmax", "mask", math.nan), ".softmax(-1)")


def test_an_overflow_beside_a_mask_that_was_handed_in():
    mask = causal(torch.float16)
    x = torch.full((4, 4), 20000.0).half()
    check(Attention(), call_of(x, mask=mask), ("", "mul", "multiply", 80000.0), "q * 4.0")


class MaskedAttention(Model):
    def forward(self, q, v, mask):
        return F.scaled_dot_product_attention(q, q, v, attn_mask=mask)


def test_an_overflow_inside_a_masked_attention_is_not_the_mask_s_fault():
    mask = causal(torch.float32)
    q, v = torch.full((1, 1, 4, 4), 1e25), torch.full((1, 1, 4, 4), 7.0)  # q @ k leaves fp32 itself
    root = MaskedAttention()
    assert find_first_fault_origin(root, call_of(q * 1e-20, v, mask)) is None
    origin = find_first_fault_origin(root, call_of(q, v, mask))
    assert "attention" in origin.op and (origin.kind, origin.value) == ("product", 7.0)
    assert origin.line == line_of(MaskedAttention, "attn_mask=mask")


def test_attention_hands_on_the_fault_of_its_values():
    mask = causal(torch.float16)
    q = torch.ones(1, 1, 4, 4).half()
    origin = find_first_fault_origin(MaskedAttention(), call_of(q, torch.full_like(q, torch.inf), mask))
    assert (origin.op, origin.kind) == ("input", "input")


def test_a_finite_run_has_no_origin_whatever_its_masks():
    x = torch.ones(4, 4).half()
    mask = causal(torch.float16)
    for root, call in [
        (MaskedScores(), call_of(x)),
        (LateMask(), call_of(x)),
        (Attention(), call_of(x, mask=mask)),
        (Block(), call_of(x)),
    ]:
        assert find_first_fault_origin(root, call) is None and replay_to_first_fault(root, call) is None


class Saturated(Model):
    """Infinities that a softmax and a sigmoid take to their limits, before a fault that comes out."""

    def forward(self, x):
        mask = torch.tensor([0.0, torch.finfo(torch.float32).min]).half()
        gate = torch.sigmoid(x * x) * mask.softmax(-1)[0]
        return self.through(gate), gate * x * self.weight[0, 0]


def test_an_infinity_taken_to_its_limit_is_not_blamed():
    root, call = Saturated(), call_of(torch.full((4, 4), 4000.0).half())
    assert replay_to_first_fault(root, call).op == "_to_copy" and find_first_fault_origin(root, call) is None
    root.weight.fill_(100.0)
    origin = find_first_fault_origin(root, call)
    assert (origin.op, origin.kind, origin.value) == ("mul", "multiply", 400000.0)
    assert origin.line == line_of(Saturated, "* self.weight[0, 0]")


def test_a_norm_that_leaves_zeros_is_blamed_only_when_something_comes_of_it():
    class Norm(Model):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))

    call = call_of(torch.full((4, 4), 300.0).half())
    assert find_first_fault_origin(Norm(), call) is None and replay_to_first_fault(Norm(), call).op == "pow"


class Preallocated(Model):
    """Memory that holds anything at first, written piece by piece and by `out`."""

    def forward(self, x):
        rows = torch.empty_like(x)
        rows[:2].copy_(x[:2])
        torch.mul(x[2:], 2.0, out=rows[2:])
        return self.through(rows)


@pytest.fixture
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # also fills what torch.empty gives with NaN
    yield
    torch.use_deterministic_algorithms(False)


def test_unwritten_memory_is_no_fault(unwritten_memory_is_nan):
    root = Preallocated()
    assert torch.empty(2).isnan().all()
    assert find_first_fault_origin(root, call_of(torch.ones(4, 4).half())) is None
    assert replay_to_first_fault(root, call_of(torch.ones(4, 4).half())) is None
    assert record_operations(root, [call_of(torch.ones(4, 4).half())]).build_trace().nonfinite() == []
    check(root, call_of(torch.full((4, 4), FULL).half()), ("", "mul", "multiply", 80000.0), "out=rows[2:]")


def test_the_border_of_a_planned_module_is_a_cast():
    root = Block()
    root.border = torch.float16
    origin = find_first_fault_origin(root, call_of(torch.full((4, 4), 1e6)))
    assert (origin.site, origin.op, origin.kind, origin.value) == ("", "_to_copy", "cast", 1e6)


def test_inference_mode_a_method_other_than_forward_and_no_hook_left():
    root = Block()
    root.decode = root.forward
    call = RecordedCall((torch.full((4, 4), 50000.0).half(),), {}, "decode")
    with torch.inference_mode():
        origin = find_first_fault_origin(root, call)
    assert (origin.op, origin.kind) == ("add", "add")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in root.modules())


@pytest.mark.parametrize(
    "op, value, kind",
    [
        ("copy_", 1e5, "cast"),
        ("linalg_vector_norm", 1e5, "accumulation"),
        ("native_layer_norm", math.nan, "epsilon"),
        ("pow", math.inf, "epsilon"),
        ("upsample_nearest2d", 1e5, "other"),
    ],
)
def test_kinds(op, value, kind):
    assert classify_fault(op, value) == kind
