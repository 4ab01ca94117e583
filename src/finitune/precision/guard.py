"""When a planned run trips all the same: run the step again with measured scales where it tripped, and say so.

A plan is measured on some prompts; another prompt may exceed a constant. The guard sees it in the one finite flag of
the final output, finds the operation, lets the product behind it measure its own scale in each call from then on
(current scaling, fp32 result), and repeats the step from the same latents. What it cannot repair is left for the
verdict to find.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from finitune.precision.dataflow import find_upstream_product
from finitune.precision.half_modules import HalfProduct
from finitune.precision.plan import ComponentPlan, PlanLine
from finitune.precision.planner import RecordedCall, record_operations
from finitune.precision.probe import is_output_finite
from finitune.precision.sites import find_product_sites
from finitune.precision.trace import OpRecord

_MAX_GUARD_REPAIRS = 64


@dataclass(frozen=True)
class GuardTrip:
    """One event: the operation that was not finite, and the site that measures its own scale from now on."""

    operation: str
    site: str
    amax: float
    weight_exponent: int = 0


@dataclass
class PrecisionGuard:
    """Repairs a planned component in place when its output is not finite; `trips` tells what was done."""

    trips: list[GuardTrip] = field(default_factory=list[GuardTrip])
    _before: tuple[int | None, str] = (0, "fp16")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call again until it is finite, with one more measured site each time.

        Where nothing can be repaired (a non-finite input, a model that refuses the fp32 result) the non-finite output
        is returned, for the verdict to report.
        """
        call = RecordedCall(args, kwargs)
        guard, module.guard = module.guard, None  # type: ignore[assignment]
        try:
            output = module(*args, **kwargs)
            for _ in range(_MAX_GUARD_REPAIRS):
                if (
                    is_output_finite(output)
                    or not is_output_finite((args, kwargs))
                    or not self._repair_one(module, call)
                ):
                    break
                try:
                    output = module(*args, **kwargs)
                except RuntimeError:  # the model refuses an fp32 result at this place
                    self._take_back(module)
                    break
            return output
        finally:
            module.guard = guard  # type: ignore[assignment]

    def amend_plan(self, plan: ComponentPlan) -> ComponentPlan:
        """`plan` with the tripped sites measuring their own scale."""
        lines = {line.site: line for line in plan.lines}
        for trip in self.trips:
            line = lines.get(trip.site) or PlanLine(trip.site, weight_exponent=trip.weight_exponent)
            reason = f"tripped: {trip.operation} was not finite on a planned constant"
            plan = plan.with_line(replace(line, exponent=None, out="fp32", reason=reason, input_amax=trip.amax))
        return plan

    def _repair_one(self, module: nn.Module, call: RecordedCall) -> bool:
        tape = record_operations(module, [call]).build_trace()
        bad = tape.nonfinite()
        if not bad:
            return False
        row = bad[0]
        source = row if row.is_product else find_upstream_product(tape, row, torch.float16)
        return source is not None and self._measure_in_each_call(module, source, row)

    def _measure_in_each_call(self, module: nn.Module, source: OpRecord, row: OpRecord) -> bool:
        twin = find_product_sites(module)[source.site]
        if not isinstance(twin, HalfProduct) or twin.exponent is None:
            return False
        self._before = (twin.exponent, twin.out)
        twin.exponent, twin.out = None, "fp32"
        self.trips.append(GuardTrip(row.name, source.site, row.input_amax, twin.weight_exponent))
        return True

    def _take_back(self, module: nn.Module) -> None:
        twin: Any = find_product_sites(module)[self.trips.pop().site]
        twin.exponent, twin.out = self._before
