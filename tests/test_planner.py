"""The planner, its certificate and undo, on a Cosmos transformer whose stream leaves fp16's range."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from finitune.errors import NumericsError, PlanError
from finitune.numerics.compare import relative_l2
from finitune.precision.apply import apply_current_scaling, apply_plan, hold_parameters_in
from finitune.precision.certificate import collect_call_outputs, prove_component_plan
from finitune.precision.guard import PrecisionGuard
from finitune.precision.plan import ComponentPlan, PlanLine, PrecisionPlan
from finitune.precision.planner import RecordedCall, plan_component
from tests.tiny import cosmos, cosmos_calls


@pytest.fixture(scope="module")
def planned():
    model, calls = cosmos(stream_exponent=17), cosmos_calls()
    return model, calls, plan_component(model, calls, 2, "fp32")


def test_a_model_that_fits_has_an_empty_plan():
    plan = plan_component(cosmos(), cosmos_calls(), 2, "fp32")
    assert plan.lines == () and plan.casts == ()


def test_certificate_keeps_every_promise(planned):
    model, calls, plan = planned
    certificate = prove_component_plan(model, plan, calls, 2)
    assert certificate.exact_rel_l2 == 0.0
    assert certificate.finite
    assert certificate.headroom_bits_min >= 2
    assert certificate.step_rel_l2 <= certificate.bf16_step_rel_l2 / 2
    assert certificate.site_sqnr_db_median >= certificate.bf16_site_sqnr_db_median + 6
    assert certificate.half_flops_share >= 0.99
    assert certificate.lines > 0 and certificate.droppable_lines == 0


def test_raw_half_is_not_finite_where_the_plan_is(planned):
    model, calls, plan = planned
    with hold_parameters_in(model, torch.float16):
        cast = [dataclasses.replace(c, kwargs=_halved(c.kwargs)) for c in calls]
        assert not any(y.isfinite().all() for y in collect_call_outputs(model, cast))
    with apply_plan(model, plan) as planned_model:
        assert all(y.isfinite().all() for y in collect_call_outputs(planned_model, calls))


def test_each_dropped_line_leaves_something_that_does_not_fit(planned):
    model, calls, plan = planned
    for line in plan.lines:
        assert prove_component_plan(model, plan.without(line), calls, 2).headroom_bits_min < 2


@pytest.mark.parametrize("arithmetic", [torch.float16, torch.bfloat16, torch.float32])
def test_undo_restores_modules_and_bits(planned, arithmetic):
    model, _, plan = planned
    modules = dict(model.named_modules())
    bits = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_plan(model, plan, arithmetic).undo()
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(bits[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_are_stored_once_in_half(planned):
    model, _, plan = planned
    applied = apply_plan(model, plan)
    products = [m for m in applied.module.modules() if isinstance(m, nn.Linear)]
    assert products and all(m.weight.dtype == torch.float16 for m in products)
    assert set(applied.module.state_dict()) >= {"patch_embed.proj.weight", "transformer_blocks.1.ff.net.2.weight"}
    applied.undo()


def test_weights_beyond_half_get_an_exponent_of_their_own():
    model = cosmos(stream_exponent=30)
    calls = cosmos_calls()
    plan = plan_component(model, calls, 2, "fp32")
    assert any(line.weight_exponent > 0 for line in plan.lines)
    certificate = prove_component_plan(model, plan, calls, 2)
    assert certificate.exact_rel_l2 == 0.0 and certificate.finite
    assert certificate.step_rel_l2 <= certificate.bf16_step_rel_l2 / 2


@pytest.mark.parametrize("stream_exponent", [0, 17, 30])
def test_current_scaling_needs_no_plan(stream_exponent):
    model, calls = cosmos(stream_exponent), cosmos_calls()
    with hold_parameters_in(model, torch.float32):
        reference = collect_call_outputs(model, calls)
    with apply_current_scaling(model) as current:
        ours = collect_call_outputs(current, calls)
    assert max(relative_l2(a, b) for a, b in zip(ours, reference, strict=True)) < 2e-3


class SharedValue(nn.Module):
    """Attention whose values alone leave fp16's range, next to a gated product that does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.up.weight.data *= 2.0**14

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x) * 4.0)


def test_a_gated_product_is_cured_upstream():
    model = SharedValue().bfloat16().requires_grad_(False)
    calls = [RecordedCall((torch.randn(4, 16, generator=torch.Generator().manual_seed(1)),), {})]
    plan = plan_component(model, calls, 2, "fp32")
    assert "up" in {line.site for line in plan.lines}
    certificate = prove_component_plan(model, plan, calls, 2)
    assert certificate.finite and certificate.exact_rel_l2 == 0.0 and certificate.droppable_lines == 0


def test_a_model_that_is_broken_in_fp32_gets_no_plan():
    model = cosmos()
    model.proj_out.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericsError) as caught:
        plan_component(model, cosmos_calls(1), 2, "fp32")
    assert caught.value.code == "WEIGHT-NONFINITE"


def test_guard_repairs_a_constant_that_is_exceeded(planned):
    model, calls, plan = planned
    tight = dataclasses.replace(plan, lines=tuple(dataclasses.replace(line, exponent=0) for line in plan.lines))
    loud = dataclasses.replace(
        calls[0], kwargs={**calls[0].kwargs, "hidden_states": calls[0].kwargs["hidden_states"] * 1e6}
    )
    guard = PrecisionGuard()
    applied = apply_plan(model, tight, guard=guard)
    (repaired,) = collect_call_outputs(applied.module, [loud])
    assert repaired.isfinite().all()
    assert [trip.site for trip in guard.trips] == ["patch_embed.proj"]
    amended = guard.amend_plan(tight)
    assert next(line for line in amended.lines if line.site == "patch_embed.proj").exponent is None
    applied.undo()


def test_an_amended_plan_keeps_what_its_lines_had():
    model, calls = cosmos(stream_exponent=30), cosmos_calls(1)
    plan = plan_component(model, calls, 2, "fp32")
    heavy = next(line for line in plan.lines if line.weight_exponent > 0)
    tight = plan.with_line(dataclasses.replace(heavy, exponent=-60))
    guard = PrecisionGuard()
    with apply_plan(model, tight, guard=guard) as repaired:
        assert collect_call_outputs(repaired, calls)[0].isfinite().all()
    assert [trip.site for trip in guard.trips] == [heavy.site]
    amended = guard.amend_plan(tight)
    with apply_plan(model, amended) as again:
        assert collect_call_outputs(again, calls)[0].isfinite().all()
    assert next(line for line in amended.lines if line.site == heavy.site).weight_exponent == heavy.weight_exponent


def test_plan_text_round_trip(planned, tmp_path):
    _, _, component = planned
    measured = component.with_line(PlanLine("proj_out", exponent=None, reason="tripped"))
    plan = PrecisionPlan("tiny", "sha256:0", 2.0, "3 calls", {"transformer": measured, "vae": ComponentPlan()})
    path = tmp_path / "plan.toml"
    plan.save(path)
    assert PrecisionPlan.load(path) == plan
    assert PrecisionPlan.loads(plan.dumps()).dumps() == plan.dumps()


@pytest.mark.parametrize("text", ["", "format = 2", "{}", "format = 1\nmodel = 3\n[transformer]\n", "\x00"])
def test_what_is_not_a_plan_is_refused(text):
    with pytest.raises(PlanError) as caught:
        PrecisionPlan.loads(text)
    assert caught.value.code == "PLAN-UNREADABLE"


def test_a_plan_of_another_checkpoint_is_refused():
    plan = PrecisionPlan("tiny", "sha256:0", 2.0)
    with pytest.raises(PlanError) as caught:
        plan.check_fingerprint("sha256:1", "plan.toml")
    assert caught.value.code == "PLAN-OTHER-CHECKPOINT"


def test_an_unknown_site_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match="Did you mean 'proj_out'"):
        apply_plan(cosmos(), ComponentPlan(lines=(PlanLine("proj_ouy"),)))


def _halved(kwargs):
    return {k: v.half() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}


class Attending(nn.Module):
    """Attention whose values leave fp16's range; `squashed`, they pass through something that is not linear."""

    def __init__(self, squashed: bool):
        super().__init__()
        torch.manual_seed(0)
        self.squashed = squashed
        self.project = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)
        self.project[2].weight.data *= 2.0**18
        self.out.weight.data *= 2.0**-16

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(-3, -2) for layer in self.project)
        y = nn.functional.scaled_dot_product_attention(q, k, v.relu() if self.squashed else v)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Around(nn.Module):
    def __init__(self, squashed: bool):
        super().__init__()
        self.attention = Attending(squashed)

    def forward(self, x):
        return self.attention(x)


def around(squashed: bool):
    model = Around(squashed).bfloat16().requires_grad_(False)
    return model, [
        RecordedCall((torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i)),), {}) for i in range(3)
    ]


def test_an_attention_s_values_carry_a_power_of_two_to_the_product_behind_it():
    model, calls = around(squashed=False)
    plan = plan_component(model, calls, 2, "fp32")
    (line,) = (line for line in plan.lines if line.site == "attention.project.2")
    assert line.carry > 0 and line.carried_to == "attention.out" and not plan.islands
    certificate = prove_component_plan(model, plan, calls, 2)
    assert certificate.finite and certificate.exact_rel_l2 == 0.0 and certificate.droppable_lines == 0
    assert certificate.half_flops_share == 1.0 and certificate.headroom_bits_min >= 2
    assert certificate.step_rel_l2 <= certificate.bf16_step_rel_l2 / 2
    text = PrecisionPlan("carry", "0", 2.0, "", {"model": plan}).dumps()
    assert PrecisionPlan.loads(text).components["model"] == plan


def test_what_refuses_mixed_dtypes_becomes_an_island():
    model, calls = around(squashed=True)
    plan = plan_component(model, calls, 2, "fp32")
    assert plan.islands == ("attention",) and len(plan.lines) == 1
    certificate = prove_component_plan(model, plan, calls, 2)
    assert certificate.finite and certificate.exact_rel_l2 == 0.0 and certificate.droppable_lines == 0


class SameDtype(torch.autograd.Function):
    """An operation as extensions have them: it speaks of nothing that a reader could look for."""

    @staticmethod
    def forward(ctx, a, b):
        if a.dtype != b.dtype:
            raise RuntimeError("operands are not alike")
        return a * b


REFUSING = {
    "bmm": torch.bmm,
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "baddbmm": lambda a, b: torch.baddbmm(b, a, b),
    "conv": lambda a, b: torch.nn.functional.conv1d(a, b[..., :1]),
    "extension": SameDtype.apply,
}


class Meeting(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, a, b):
        return self.operation(a, b)


class LoudAndQuiet(nn.Module):
    """A result beyond fp16 meets one within it, in a module or in the model's own forward."""

    def __init__(self, operation, *, inside: bool):
        super().__init__()
        self.loud, self.quiet, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.loud.weight.data.copy_(1e6 * torch.eye(8))
        self.meeting = Meeting(operation) if inside else None
        self.operation = operation

    def forward(self, x):
        meet = self.meeting or self.operation
        return self.last(meet(self.loud(x), self.quiet(x)) * 1e-7)


@pytest.mark.parametrize("operation", REFUSING)
def test_an_operation_that_refuses_mixed_dtypes_makes_an_fp32_block_whatever_it_says(operation):
    torch.manual_seed(0)
    calls = [RecordedCall((torch.randn(8, 8, 8),), {})]
    model = LoudAndQuiet(REFUSING[operation], inside=True)
    plan = plan_component(model, calls, 2, "fp32")
    assert plan.islands == ("meeting",)
    assert prove_component_plan(model, plan, calls, 2).finite


def test_a_model_whose_own_forward_refuses_is_told_so():
    torch.manual_seed(0)
    calls = [RecordedCall((torch.randn(8, 8, 8),), {})]
    with pytest.raises(NumericsError) as caught:
        plan_component(LoudAndQuiet(SameDtype.apply, inside=False), calls, 2, "fp32")
    assert caught.value.code == "PLAN-NOT-FOUND" and caught.value.remedy
    broken = LoudAndQuiet(lambda a, b: a @ b[:1, :3], inside=True)
    with pytest.raises(RuntimeError):  # no question of precision: fp32 alone stops, too
        plan_component(broken, calls, 2, "fp32")


@pytest.mark.parametrize("stored, held", [("bfloat16", "float16"), ("float32", "float16"), ("float32", "bfloat16")])
def test_weights_come_back_bit_for_bit_from_any_dtype(stored, held):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(getattr(torch, stored))
    model[1].weight.data *= 1e-6
    bits = [p.clone() for p in model.parameters()]
    with hold_parameters_in(model, getattr(torch, held)):
        assert {p.dtype for p in model.parameters()} == {getattr(torch, held)}
    assert all(torch.equal(p, b) and p.dtype == b.dtype for p, b in zip(model.parameters(), bits, strict=True))


@torch.no_grad()
def test_a_planned_model_is_one_graph_for_a_compiler(planned):
    model, calls, plan = planned
    with apply_plan(model, plan) as planned_model:
        (reference,) = collect_call_outputs(planned_model, calls[:1])
        compiled = torch.compile(planned_model, backend="eager", fullgraph=True)
        assert relative_l2(compiled(**calls[0].kwargs)[0], reference) < 1e-3
