"""The tape of a run: FLOPs as torch counts them, names by occurrence, ranges, and masks that are meant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from finitune.precision.apply import apply_current_scaling, hold_parameters_in
from finitune.precision.certificate import cast_call_inputs
from finitune.precision.planner import RecordedCall, record_operations
from finitune.precision.trace import OpRecord, OpRecorder, OpTrace
from tests.tiny import cosmos, cosmos_calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_flops_are_those_of_torch_s_counter(dtype):
    model, calls = cosmos(), cosmos_calls(1)
    with hold_parameters_in(model, dtype):
        with FlopCounterMode(display=False) as counter:
            cast_call_inputs(calls, dtype)[0].run(model)
        tape = record_operations(model, cast_call_inputs(calls, dtype)).build_trace()
    assert tape.flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert tape.half_flops == (tape.flops if dtype is torch.float16 else 0)


def test_a_planned_model_does_its_flops_on_half_operands():
    model, calls = cosmos(stream_exponent=17), cosmos_calls(1)
    applied = apply_current_scaling(model)
    tape = record_operations(applied.module, calls).build_trace()
    applied.undo()
    products = [row for row in tape.rows if row.is_product]
    assert sum(row.flops for row in products) == sum(row.flops for row in products if row.half_operands) > 0


class Block(nn.Module):
    """Two sums, a product in between, and a masked softmax."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        x = x + 1.0
        x = x + 10.0
        y = self.up(x)
        mask = torch.zeros(8).masked_fill(torch.arange(8) > 3, -math.inf)
        return (y + mask).softmax(-1)


@pytest.fixture
def block():
    return Block().requires_grad_(False)


def test_rows_are_named_by_site_operation_and_occurrence(block):
    tape = record_operations(block, [RecordedCall((torch.zeros(2, 4),), {})]).build_trace()
    names = [row.name for row in tape.rows]
    assert names[:3] == ["(root):add", "(root):add#2", "up:linear"]
    assert "(root):add#3" in names and "up:addmm" not in names
    assert [row.amax for row in tape.rows[:2]] == [1.0, 11.0]
    up = tape.rows[2]
    assert up.is_product and up.input_amax == 11.0 and up.operands == (1,) and up.flops == 2 * 2 * 4 * 8


def test_several_calls_are_the_same_rows_with_the_larger_ranges(block):
    small, large = RecordedCall((torch.zeros(2, 4),), {}), RecordedCall((torch.full((2, 4), 100.0),), {})
    alone = record_operations(block, [small]).build_trace()
    both = record_operations(block, [small, large]).build_trace()
    assert [row.name for row in both.rows] == [row.name for row in alone.rows]
    assert both.rows[0].amax == 101.0 and both.flops == alone.flops


def test_a_mask_is_meant_and_so_is_what_it_is_added_to(block):
    tape = record_operations(block, [RecordedCall((torch.zeros(2, 4),), {})]).build_trace()
    meant = [tape.rows[number].op for number in sorted(tape.find_intended_infinities())]
    assert meant[-2:] == ["masked_fill", "add"]
    assert tape.nonfinite() == []


def test_an_overflow_is_not_meant_and_is_the_first_nonfinite_row(block):
    block.up.weight.data.fill_(1.0)
    half = record_operations(block.half(), [RecordedCall((torch.full((2, 4), 2e4).half(),), {})]).build_trace()
    assert [row.name for row in half.nonfinite()] == ["up:linear", "(root):add#3", "(root):_softmax"]


def test_meant_follows_infinities_only():
    rows = [
        OpRecord("", "full", 0, torch.float16, amax=math.inf),
        OpRecord("", "add", 0, torch.float16, (0,), amax=math.inf),
        OpRecord("", "softmax", 0, torch.float16, (1,), amax=1.0),
        OpRecord("", "mul", 0, torch.float16, (1,), amax=math.nan),
        OpRecord("", "mul", 1, torch.float16, (2,), amax=math.inf),
    ]
    tape = OpTrace(rows)
    assert tape.find_intended_infinities() == {0, 1}
    assert tape.nonfinite() == [rows[3], rows[4]]


def test_recording_changes_no_bit():
    model, calls = cosmos().float(), cosmos_calls(1)
    expected = calls[0].run(model)[0]
    recorder = record_operations(model, calls)
    assert torch.equal(calls[0].run(model)[0], expected) and recorder.build_trace().rows
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_more_operations_than_the_buffer_first_holds():
    model = nn.Sequential(*(nn.ReLU() for _ in range(20)))
    recorder, five = OpRecorder(model, capacity=4), torch.full((2,), 5.0)
    with recorder:
        model(five)
    tape = recorder.build_trace()
    assert [row.site for row in tape.rows] == [str(i) for i in range(20)] and all(row.amax == 5.0 for row in tape.rows)
