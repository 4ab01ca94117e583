"""The proof of a plan: what it was checked against, and the numbers, beside those of bf16.

(a) the transformed model in fp32 equals the original; (b) finite on every calibration call, with the least headroom;
(c) signal to noise at each product against fp32, fed with the same inputs; (d) the whole output against fp32;
(e) share of matrix FLOPs on half operands, and bytes moved against plain fp16; (f) each line is needed.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finitune.numerics.compare import relative_l2, sqnr_db
from finitune.numerics.formats import headroom_bits
from finitune.precision.apply import apply_plan, hold_parameters_in, list_product_lines
from finitune.precision.half_modules import make_half_product
from finitune.precision.plan import ComponentPlan, PlanLine
from finitune.precision.planner import (
    RecordedCall,
    apply_tensor_core_rounding,
    compute_held_amax,
    is_plan_line_needed,
    record_operations,
    sample_calls_evenly,
)
from finitune.precision.sites import iterate_nested_tensors
from finitune.precision.trace import OpTrace


@dataclass(frozen=True)
class PlanCertificate:
    """What was proved of one component's plan; errors are relative L2, worst call, against fp32."""

    calls: int
    lines: int
    casts: int
    exact_rel_l2: float
    finite: bool
    headroom_bits_min: float
    site_sqnr_db_median: float
    site_sqnr_db_min: float
    bf16_site_sqnr_db_median: float
    bf16_site_sqnr_db_min: float
    step_rel_l2: float
    bf16_step_rel_l2: float
    half_flops_share: float
    bytes_over_raw_half: float
    droppable_lines: int
    rounded_weights: int

    def figures(self) -> dict[str, object]:
        """The certificate as named figures."""
        return asdict(self)


@torch.no_grad()
def collect_call_outputs(module: nn.Module, calls: Sequence[RecordedCall]) -> list[Tensor]:
    """The first output tensor of each call, in fp32."""
    with apply_tensor_core_rounding(module):
        return [next(iterate_nested_tensors(call.run(module))).float() for call in calls]


@dataclass(frozen=True)
class PlanCheck:
    """How a plan holds on some calls: errors are relative L2, worst call, against fp32."""

    finite: bool
    headroom_bits: float
    step_rel_l2: float
    bf16_step_rel_l2: float

    def holds(self, asked_bits: float) -> bool:
        """Whether the planned run is finite, has the headroom that was asked for, and is closer to fp32 than bf16."""
        return self.finite and self.headroom_bits >= asked_bits and self.step_rel_l2 <= self.bf16_step_rel_l2


def check_component_plan(root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall]) -> PlanCheck:
    """Certify `plan` again, on calls it was not made for or on a changed model: (b) and (d) of the proof."""
    with hold_parameters_in(root, torch.float32):
        reference = collect_call_outputs(root, calls)
    with hold_parameters_in(root, torch.bfloat16):
        bf16 = _worst(collect_call_outputs(root, cast_call_inputs(calls, torch.bfloat16)), reference)
    with apply_plan(root, plan) as planned:
        ours = collect_call_outputs(planned, calls)
        tape = record_operations(planned, calls).build_trace()
    return PlanCheck(is_run_finite(ours, tape), compute_least_headroom(plan, tape), _worst(ours, reference), bf16)


def is_run_finite(results: Sequence[Tensor], tape: OpTrace) -> bool:
    """Whether neither the results nor anything on the way to them was NaN or infinite."""
    return all(bool(t.isfinite().all()) for t in results) and not tape.nonfinite()


def prove_component_plan(
    root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall], asked_bits: float
) -> PlanCertificate:
    """Check `plan` on `calls`; `root` is the component as loaded, and is left as it was."""
    with hold_parameters_in(root, torch.float32):
        reference = collect_call_outputs(root, calls)
        sites = measure_site_sqnr(root, plan, calls[:: max(1, len(calls) // 4)])
    with apply_plan(root, plan, torch.float32) as exact:
        algebra = _worst(collect_call_outputs(exact, calls), reference)
    with hold_parameters_in(root, torch.bfloat16):
        bf16 = _worst(collect_call_outputs(root, cast_call_inputs(calls, torch.bfloat16)), reference)
    applied = apply_plan(root, plan)
    with applied as planned:
        ours = collect_call_outputs(planned, calls)
        tape = record_operations(planned, calls).build_trace()
        rounded = applied.rounded_weights
    raw = _raw_half_bytes(root, calls[:1])
    one = _bytes_of(root, plan, calls[:1])
    droppable = [line for line in plan.lines if not _needed_by_any(root, plan, line, calls, asked_bits)]
    ours_db, bf16_db = zip(*sites.values() or [(math.inf, math.inf)], strict=True)  # an island has no error of its own
    return PlanCertificate(
        calls=len(calls),
        lines=len(plan.lines),
        casts=len(plan.casts),
        exact_rel_l2=algebra,
        finite=is_run_finite(ours, tape),
        headroom_bits_min=compute_least_headroom(plan, tape),
        site_sqnr_db_median=statistics.median(ours_db),
        site_sqnr_db_min=min(ours_db),
        bf16_site_sqnr_db_median=statistics.median(bf16_db),
        bf16_site_sqnr_db_min=min(bf16_db),
        step_rel_l2=_worst(ours, reference),
        bf16_step_rel_l2=bf16,
        half_flops_share=tape.half_flops / max(1, tape.flops),
        bytes_over_raw_half=one / raw,
        droppable_lines=len(droppable),
        rounded_weights=rounded,
    )


def _needed_by_any(
    root: nn.Module, plan: ComponentPlan, line: PlanLine, calls: Sequence[RecordedCall], asked_bits: float
) -> bool:
    """Try the drop on one call, on a few, and on all of them only where these did not fail."""
    return any(
        is_plan_line_needed(root, plan, line, some, asked_bits)
        for some in (calls[:1], sample_calls_evenly(calls), calls)
    )


def compute_least_headroom(plan: ComponentPlan, tape: OpTrace) -> float:
    """Bits between the largest magnitude that fp16 had to hold anywhere and 65504; -inf if one was not finite."""
    lines = {line.site: line for line in plan.lines}
    meant = tape.find_intended_infinities()
    rows = [row for number, row in enumerate(tape.rows) if number not in meant]
    held = [compute_held_amax(row, lines.get(row.site), torch.float16) for row in rows]
    if not all(math.isfinite(value) for value in held):
        return -math.inf
    return headroom_bits(max(held, default=0.0))


@torch.no_grad()
def measure_site_sqnr(
    root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall]
) -> dict[str, tuple[float, float]]:
    """Per product site: signal to noise in dB of its planned product and of bf16's, fed with the same fp32 inputs.

    The least over `calls`; `root` computes in fp32.
    """
    worst: dict[str, tuple[float, float]] = {}

    def hook(line: PlanLine) -> Any:
        def compare(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
            ours = _at(module, line, torch.float16, args)
            bf16 = _at(module, PlanLine(line.site, out="fp16"), torch.bfloat16, args)
            pair = (sqnr_db(ours.float(), y), sqnr_db(bf16.float(), y))
            old = worst.get(line.site, pair)
            worst[line.site] = (min(old[0], pair[0]), min(old[1], pair[1]))

        return compare

    handles = [
        root.get_submodule(site).register_forward_hook(hook(line))
        for site, line in _on_true_values(list_product_lines(root, plan), plan).items()
    ]
    try:
        for call in calls:
            call.run(root)
    finally:
        for handle in handles:
            handle.remove()
    return worst


def _on_true_values(lines: dict[str, PlanLine], plan: ComponentPlan) -> dict[str, PlanLine]:
    """The lines as they act on inputs and results that nobody has divided on the way."""
    for line in plan.lines:
        if line.carry:
            lines[line.site] = replace(line, carry=0, carried_to="", out="fp32")
            reader = lines[line.carried_to]
            lines[line.carried_to] = replace(reader, exponent=(reader.exponent or 0) + line.carry)
    return lines


def _at(module: nn.Module, line: PlanLine, arithmetic: torch.dtype, args: tuple[Any, ...]) -> Tensor:
    """One product on the given inputs, in the line's precision."""
    twin = make_half_product(module, line, arithmetic)
    twin.__dict__["_forward_hooks"] = OrderedDict()  # the copy shares those of the original, this comparison among them
    for name, parameter in twin.named_parameters(recurse=False):
        setattr(twin, name, nn.Parameter(parameter.data.to(arithmetic), requires_grad=False))
    return twin(*args)


def cast_call_inputs(calls: Sequence[RecordedCall], dtype: torch.dtype) -> list[RecordedCall]:
    """The calls with floating inputs in `dtype`, as a pipeline hands them to a model of that dtype."""
    from torch.utils._pytree import tree_map

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return [replace(call, args=tree_map(cast, call.args), kwargs=tree_map(cast, call.kwargs)) for call in calls]


def _raw_half_bytes(root: nn.Module, calls: Sequence[RecordedCall]) -> int:
    with hold_parameters_in(root, torch.float16):
        return record_operations(root, cast_call_inputs(calls, torch.float16)).build_trace().bytes_moved


def _bytes_of(root: nn.Module, plan: ComponentPlan, calls: Sequence[RecordedCall]) -> int:
    with apply_plan(root, plan) as planned:
        return record_operations(planned, calls).build_trace().bytes_moved


def _worst(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    return max(relative_l2(a, b) for a, b in zip(ours, reference, strict=True))
