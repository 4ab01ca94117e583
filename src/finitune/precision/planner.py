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
from finitune.numerics.formats import HALF, exponent_for
from finitune.precision.apply import apply_plan, weight_exponent
from finitune.precision.plan import ComponentPlan, Line
from finitune.precision.sites import leaf_norms, product_sites
from finitune.precision.tape import Recorder, Row, Tape

MAX_ROUNDS = 200


@dataclass(frozen=True)
class Call:
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


def tensor_core(root: nn.Module) -> AbstractContextManager[Any]:
    """The meaning of half products on this module's device: native on an accelerator, simulated on a CPU."""
    device = next(root.parameters()).device
    return simulate.half() if device.type == "cpu" else nullcontext()


@torch.no_grad()
def record(module: nn.Module, calls: Sequence[Call], half: torch.dtype = torch.float16) -> Recorder:
    """Run the calls under a recorder and return it."""
    recorder = Recorder(module, half)
    with tensor_core(module), recorder:
        for call in calls:
            call.run(module)
    return recorder


@dataclass(frozen=True)
class Misfit:
    """A tensor that fp16 cannot hold with the asked headroom."""

    row: Row
    amax: float


def plan_component(
    root: nn.Module,
    calls: Sequence[Call],
    headroom_bits: float = 2,
    border: Any = "fp16",
) -> ComponentPlan:
    """The smallest plan that keeps `headroom_bits` over the ranges of `calls`.

    `root` is the component as loaded (fp32 or bf16); it is left as it was. Raises NumericsError where the model is
    non-finite without any half in it: precision is not the cause then.
    """
    plan = ComponentPlan(border=border)
    for _ in range(MAX_ROUNDS):
        tape, plan = measure(root, plan, calls)
        lines = cures(root, plan, tape, headroom_bits)
        if not lines:
            return _explained(_minimal(root, plan, calls, headroom_bits), tape)
        for line in lines:
            plan = plan.with_line(line)
    raise NumericsError(
        f"no plan found in {MAX_ROUNDS} rounds",
        code="PLAN-NOT-FOUND",
        subject=type(root).__name__,
        evidence={"lines": len(plan.lines)},
        remedy="Run with --precision current-half, which needs no plan, and report this model.",
    )


def measure(root: nn.Module, plan: ComponentPlan, calls: Sequence[Call]) -> tuple[Tape, ComponentPlan]:
    """The ranges of `plan`'s flow of dtypes, and the plan with its casts: the norms that read fp32."""
    everywhere = replace(plan, casts=tuple(leaf_norms(root)))
    applied = apply_plan(root, everywhere, torch.bfloat16)
    try:
        recorder = record(applied.module, calls, torch.bfloat16)
    finally:
        applied.undo()
    casts = tuple(site for site, dtype in recorder.norm_inputs.items() if dtype == torch.float32)
    tape = recorder.tape()
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


def misfits(plan: ComponentPlan, tape: Tape, headroom_bits: float, half: torch.dtype = torch.bfloat16) -> list[Misfit]:
    """What fp16 would have to hold and cannot, with `headroom_bits` to spare, in order of execution."""
    limit = HALF.max * 2.0**-headroom_bits
    lines = {line.site: line for line in plan.lines}
    found = []
    meant = tape.meant()
    for number, row in enumerate(tape.rows):
        amax = held_amax(row, lines.get(row.site), half)
        if amax > limit and number not in meant:
            found.append(Misfit(row, amax))
    return found


def held_amax(row: Row, line: Line | None, half: torch.dtype) -> float:
    """The largest magnitude that fp16 must hold for this row: scaled input and result of a product, or the result."""
    if not row.is_product:
        return row.amax if row.dtype == half else 0.0
    if not row.half_operands or (line and line.exponent is None):
        return 0.0
    exponent = line.exponent or 0 if line else 0
    scaled = max(row.input_amax, row.amax if row.dtype != half else 0.0) * 2.0**-exponent
    return max(scaled, row.amax if row.dtype == half else 0.0)


def cures(root: nn.Module, plan: ComponentPlan, tape: Tape, headroom_bits: float) -> list[Line]:
    """The next lines: every product that does not fit, or else the source of the first sum or gate that does not."""
    found = misfits(plan, tape, headroom_bits)
    own = [line_for(root, m.row, headroom_bits, half=torch.bfloat16) for m in found if m.row.is_product]
    if own or not found:
        return own
    row = found[0].row
    source = source_of(tape, row, torch.bfloat16)
    if source is None:
        return [_island(row)]
    line = line_for(root, source, headroom_bits, wide=True, half=torch.bfloat16)
    return [replace(line, reason=f"{row.name} reaches {row.amax:.3g}; fp32 here makes it fp32")]


def line_for(root: nn.Module, row: Row, headroom_bits: float, *, wide: bool = False, half: torch.dtype) -> Line:
    """The line that makes a product fit: fp32 result where that (or `wide`) asks for it, and the powers of two."""
    wide = wide or row.dtype != half or row.amax > HALF.max * 2.0**-headroom_bits
    exponent = exponent_for(max(row.input_amax, row.amax if wide else 0.0), headroom_bits)
    reached = f"result reaches {row.amax:.3g}" if wide else f"input reaches {row.input_amax:.3g}"
    limit = HALF.max * 2.0**-headroom_bits
    return Line(
        row.site,
        out="fp32" if wide else "fp16",
        exponent=exponent,
        weight_exponent=weight_exponent(row.site, product_sites(root)[row.site]),
        reason=f"{reached}; with {headroom_bits:g} bits to spare fp16 holds {limit:.5g}",
        input_amax=row.input_amax,
        output_amax=row.amax,
    )


def source_of(tape: Tape, row: Row, half: torch.dtype) -> Row | None:
    """The nearest product upstream of `row` that writes half, along the largest operands first."""
    seen: set[int] = set()

    def search(candidate: Row) -> Row | None:
        if candidate.is_product:
            return candidate if candidate.dtype == half else None
        if candidate.ends_norm:
            return None
        operands = [n for n in candidate.operands if n not in seen]
        seen.update(operands)
        ranked = sorted((tape.rows[n] for n in operands), key=lambda r: -r.amax)
        return next((found for found in map(search, ranked) if found), None)

    return search(row)


def _island(row: Row) -> Line:
    return Line(
        row.site,
        kind="island",
        reason=f"{row.name} reaches {row.amax:.3g} and no product upstream can be widened",
        output_amax=row.amax,
    )


def _minimal(root: nn.Module, plan: ComponentPlan, calls: Sequence[Call], headroom_bits: float) -> ComponentPlan:
    """Drop each line in turn, for good where nothing then fails to fit."""
    for line in plan.lines:
        if not is_needed(root, plan, line, calls, headroom_bits):
            plan = plan.without(line)
    return measure(root, plan, calls)[1]


def is_needed(root: nn.Module, plan: ComponentPlan, line: Line, calls: Sequence[Call], headroom_bits: float) -> bool:
    """True where the plan without `line` leaves a tensor that fp16 cannot hold."""
    dropped = plan.without(line)
    tape, _ = measure(root, dropped, calls)
    return bool(misfits(dropped, tape, headroom_bits))


def _explained(plan: ComponentPlan, tape: Tape) -> ComponentPlan:
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
