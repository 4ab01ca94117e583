"""Find the smallest plan: measure, cure what does not fit, measure again, drop what is not needed.

The measuring run keeps the exact flow of dtypes that the fp16 run will have but puts bfloat16 where fp16 will be.
bfloat16 promotes as fp16 does and has the range of fp32, so one run shows the magnitude of every tensor that fp16
would have to hold, also behind the first one that does not fit.

A tensor that does not fit is cured at the nearest product upstream, by letting it write fp32: promotion carries fp32
through sums and products of activations, so that a residual stream follows from its first product alone. Where no
such product is left, or the model refuses mixed dtypes, the module becomes an fp32 island. Nothing is ever clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finitune.errors import NumericsError
from finitune.numerics import simulate
from finitune.numerics.formats import FP16, exponent_for
from finitune.precision.apply import apply_plan, choose_weight_exponent, hold_parameters_in
from finitune.precision.dataflow import find_upstream_product, find_value_reader
from finitune.precision.plan import ComponentPlan, PlanLine
from finitune.precision.sites import find_leaf_norms, find_product_sites
from finitune.precision.trace import OpRecord, OpRecorder, OpTrace

_HALF_STAND_IN = torch.bfloat16
_MAX_PLANNING_ROUNDS = 200
_PLANNING_CALL_COUNT = 6


@dataclass(frozen=True)
class RecordedCall:
    """One recorded call of a component, to be repeated: `method` of the module on these inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    method: str = "forward"

    def run(self, module: nn.Module) -> Any:
        """Repeat the call, with floating inputs in the module's border dtype."""
        from torch.utils._pytree import tree_map

        dtype = getattr(module, "border", None)

        def border(value: Any) -> Any:
            return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value

        entry = module if self.method == "forward" else getattr(module, self.method)
        return entry(*tree_map(border, self.args), **tree_map(border, self.kwargs))


def apply_tensor_core_rounding(root: nn.Module) -> AbstractContextManager[Any]:
    """The meaning of half products on this module's device: native on an accelerator, simulated on a CPU."""
    device = next(root.parameters()).device
    return simulate.half() if device.type == "cpu" else nullcontext()


def sample_calls_evenly(calls: Sequence[RecordedCall], count: int = _PLANNING_CALL_COUNT) -> list[RecordedCall]:
    """`count` calls spread evenly over all of them, the first and the last among them."""
    if len(calls) <= count:
        return list(calls)
    return [calls[round(i * (len(calls) - 1) / (count - 1))] for i in range(count)]


@torch.no_grad()
def record_operations(
    module: nn.Module, calls: Sequence[RecordedCall], half: torch.dtype = torch.float16
) -> OpRecorder:
    """Run the calls under a recorder and return it."""
    recorder = OpRecorder(module, half)
    with apply_tensor_core_rounding(module), recorder:
        for call in calls:
            try:
                call.run(module)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError) as error:
                raise MixedDtypesError(recorder.failed_at, error) from error
    return recorder


class MixedDtypesError(NumericsError):
    """An operation inside the module `site` ('' is the root) stopped in a run whose tensors have several dtypes.

    What such errors say differs from one operation to the next, and an extension may say anything. So nothing is read
    from the text: whether the dtypes are the cause is seen by running the same call in fp32 alone.
    """

    def __init__(self, site: str, error: Exception):
        self.site, self.why = site, (str(error).splitlines() or [type(error).__name__])[0]
        super().__init__(
            f"{site or 'the model itself'} refuses mixed dtypes: {self.why}",
            code="PLAN-NOT-FOUND",
            subject=site,
            evidence={"error": type(error).__name__},
            remedy="Run with --precision current-half, which needs no plan, and report this model.",
        )


@dataclass(frozen=True)
class HalfRangeMisfit:
    """A tensor that fp16 cannot hold with the asked headroom."""

    row: OpRecord
    amax: float


def plan_component(
    root: nn.Module,
    calls: Sequence[RecordedCall],
    headroom_bits: float = 2,
    border: Any = "fp16",
) -> ComponentPlan:
    """The smallest plan that keeps `headroom_bits` over the ranges of `calls`.

    `root` is the component as loaded (fp32 or bf16); it is left as it was. Raises NumericsError where the model is
    non-finite without any half in it (precision is not the cause then), and where its own operations refuse mixed
    dtypes outside of any module that could be an fp32 block.
    """
    plan = ComponentPlan(border=border)
    for some in (
        sample_calls_evenly(calls),
        calls,
    ):  # most lines show on a few calls; all of them are held against every call
        plan, tape = _cured(root, plan, some, headroom_bits)
    return _minimal(root, _explained(plan, tape), calls, headroom_bits)


def _cured(
    root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall], headroom_bits: float
) -> tuple[ComponentPlan, OpTrace]:
    """Measure and add lines until everything fits on `calls`; the plan and the last measurement."""
    for _ in range(_MAX_PLANNING_ROUNDS):
        try:
            tape, plan = measure_plan_ranges(root, plan, calls)
        except MixedDtypesError as refused:
            plan = _widen_refusing_module(root, plan, refused, calls)
            continue
        lines = find_next_plan_lines(root, plan, tape, headroom_bits)
        if not lines:
            return plan, tape
        for line in lines:
            plan = plan.with_line(line)
    raise NumericsError(
        f"no plan found in {_MAX_PLANNING_ROUNDS} rounds",
        code="PLAN-NOT-FOUND",
        subject=type(root).__name__,
        evidence={"lines": len(plan.lines)},
        remedy="Run with --precision current-half, which needs no plan, and report this model.",
    )


def _widen_refusing_module(
    root: nn.Module, plan: ComponentPlan, refused: MixedDtypesError, calls: Sequence[RecordedCall]
) -> ComponentPlan:
    """The plan with the module that refuses as an fp32 block, or the next around it that is none yet.

    Raises what the call raises in fp32 alone, and `refused` where only the whole model is left.
    """
    with hold_parameters_in(root, torch.float32), torch.no_grad():
        calls[0].run(root)
    site = refused.site
    while site and plan.in_island(site):
        site = site.rpartition(".")[0]
    if not site:
        raise refused
    return plan.with_line(_island(site, f"it refuses mixed dtypes: {refused.why}"))


def measure_plan_ranges(
    root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall]
) -> tuple[OpTrace, ComponentPlan]:
    """The ranges of `plan`'s flow of dtypes, and the plan with its casts: the norms that read fp32."""
    everywhere = replace(plan, casts=tuple(find_leaf_norms(root)))
    with apply_plan(root, everywhere, _HALF_STAND_IN) as measured:
        recorder = record_operations(measured, calls, _HALF_STAND_IN)
    casts = tuple(site for site, dtype in recorder.norm_inputs.items() if dtype == torch.float32)
    tape = recorder.build_trace()
    broken = tape.nonfinite()
    if broken:
        raise NumericsError(
            f"{broken[0].name} is not finite even with the range of fp32",
            code="NONFINITE-WITHOUT-HALF",
            subject=broken[0].site,
            evidence={"operation": broken[0].name, "value": broken[0].amax},
            remedy="Precision is not the cause. Check the weights: finitune diagnose MODEL",
        )
    return tape, replace(plan, casts=casts)


def find_half_range_misfits(
    plan: ComponentPlan, tape: OpTrace, headroom_bits: float, half: torch.dtype = _HALF_STAND_IN
) -> list[HalfRangeMisfit]:
    """What fp16 would have to hold and cannot, with `headroom_bits` to spare, in order of execution."""
    limit = FP16.max * 2.0**-headroom_bits
    lines = {line.site: line for line in plan.lines}
    found: list[HalfRangeMisfit] = []
    meant = tape.find_intended_infinities()
    for number, row in enumerate(tape.rows):
        amax = compute_held_amax(row, lines.get(row.site), half)
        if amax > limit and number not in meant:
            found.append(HalfRangeMisfit(row, amax))
    return found


def compute_held_amax(row: OpRecord, line: PlanLine | None, half: torch.dtype) -> float:
    """The largest magnitude that fp16 must hold for this row: scaled input and result of a product, or the result."""
    if not row.is_product:
        return row.amax if row.dtype == half else 0.0
    if not row.half_operands or (line and line.exponent is None):
        return 0.0
    exponent = line.exponent or 0 if line else 0
    scaled = max(row.input_amax, row.amax if row.dtype != half else 0.0) * 2.0**-exponent
    return max(scaled, row.amax if row.dtype == half else 0.0)


def find_next_plan_lines(root: nn.Module, plan: ComponentPlan, tape: OpTrace, headroom_bits: float) -> list[PlanLine]:
    """The next lines: every product that does not fit, or else the source of the first sum or gate that does not."""
    found = find_half_range_misfits(plan, tape, headroom_bits)
    own = [build_plan_line(root, tape, m.row, headroom_bits) for m in found if m.row.is_product]
    if own or not found:
        return own
    row = found[0].row
    source = find_upstream_product(tape, row, _HALF_STAND_IN)
    if source is None:
        return [_island(row.site, f"{row.name} reaches {row.amax:.3g}, no product upstream can be widened", row.amax)]
    line = build_plan_line(root, tape, source, headroom_bits, wide=True)
    return [replace(line, reason=f"{row.name} reaches {row.amax:.3g}; fp32 here makes it fp32")]


def build_plan_line(
    root: nn.Module, tape: OpTrace, row: OpRecord, headroom_bits: float, *, wide: bool = False
) -> PlanLine:
    """The line that makes a product fit: an fp32 result where its range (or `wide`) asks for it, and powers of two."""
    limit = FP16.max * 2.0**-headroom_bits
    line = PlanLine(
        row.site,
        out="fp16",
        exponent=exponent_for(row.input_amax, headroom_bits),
        weight_exponent=choose_weight_exponent(row.site, find_product_sites(root)[row.site]),
        reason=f"input reaches {row.input_amax:.3g}, limit {limit:.5g}",
        input_amax=row.input_amax,
        output_amax=row.amax,
    )
    if not (wide or row.dtype != _HALF_STAND_IN or row.amax > limit):
        return line
    reached = f"result reaches {row.amax:.3g}, limit {limit:.5g}"
    reader = None if wide else find_value_reader(tape, row)
    if reader and row.dtype == _HALF_STAND_IN:
        carry = exponent_for(row.amax, headroom_bits)
        return replace(line, carry=carry, carried_to=reader, reason=f"{reached}; an attention's values")
    exponent = exponent_for(max(row.input_amax, row.amax), headroom_bits)
    return replace(line, out="fp32", exponent=exponent, reason=reached)


def _island(site: str, why: str, amax: float = 0.0) -> PlanLine:
    return PlanLine(site, kind="island", reason=why, output_amax=amax)


def _minimal(
    root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall], headroom_bits: float
) -> ComponentPlan:
    """Drop each line in turn, for good where everything still fits without it.

    A product whose own input or result is out of range needs its line whatever the others do; only a line that is
    there for somebody else's sake has to be tried.
    """
    limit = FP16.max * 2.0**-headroom_bits
    for line in plan.lines:
        own = line.kind == "product" and max(line.input_amax, line.output_amax) > limit
        if not own and not is_plan_line_needed(root, plan, line, calls, headroom_bits):
            plan = plan.without(line)
    return measure_plan_ranges(root, plan, calls)[1]


def is_plan_line_needed(
    root: nn.Module, plan: ComponentPlan, line: PlanLine, calls: Sequence[RecordedCall], headroom_bits: float
) -> bool:
    """True where the plan without `line` leaves a tensor that fp16 cannot hold, or does not run at all."""
    dropped = plan.without(line)
    try:
        tape, _ = measure_plan_ranges(root, dropped, calls)
    except MixedDtypesError:
        return True
    return bool(find_half_range_misfits(dropped, tape, headroom_bits))


def _explained(plan: ComponentPlan, tape: OpTrace) -> ComponentPlan:
    """The plan in order of execution, each line with the range that was measured last."""
    rows = {row.site: (number, row) for number, row in enumerate(tape.rows) if row.is_product}
    lines = [
        replace(line, input_amax=rows[line.site][1].input_amax, output_amax=rows[line.site][1].amax)
        if line.site in rows
        else line
        for line in plan.lines
    ]
    lines.sort(key=lambda line: rows.get(line.site, (len(rows), None))[0])
    return replace(plan, lines=tuple(lines))
