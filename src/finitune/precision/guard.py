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

from finitune.precision.dataflow import source_of
from finitune.precision.plan import ComponentPlan, Line
from finitune.precision.planner import Call, record
from finitune.precision.probe import is_finite
from finitune.precision.sites import product_sites
from finitune.precision.tape import Row
from finitune.precision.twins import HalfProduct

MAX_REPAIRS = 64


@dataclass(frozen=True)
class Trip:
    """One event: the operation that was not finite, and the site that measures its own scale from now on."""

    operation: str
    site: str
    amax: float
    weight_exponent: int = 0


@dataclass
class Guard:
    """Repairs a planned component in place when its output is not finite; `trips` tells what was done."""

    trips: list[Trip] = field(default_factory=list[Trip])
    _before: tuple[int | None, str] = (0, "fp16")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call again until it is finite, with one more measured site each time.

        Where nothing can be repaired (a non-finite input, a model that refuses the fp32 result) the non-finite output
        is returned, for the verdict to report.
        """
        call = Call(args, kwargs)
        guard, module.guard = module.guard, None  # type: ignore[assignment]
        try:
            output = module(*args, **kwargs)
            for _ in range(MAX_REPAIRS):
                if is_finite(output) or not is_finite((args, kwargs)) or not self._repair_one(module, call):
                    break
                try:
                    output = module(*args, **kwargs)
                except RuntimeError:  # the model refuses an fp32 result at this place
                    self._take_back(module)
                    break
            return output
        finally:
            module.guard = guard  # type: ignore[assignment]

    def amended(self, plan: ComponentPlan) -> ComponentPlan:
        """`plan` with the tripped sites measuring their own scale."""
        lines = {line.site: line for line in plan.lines}
        for trip in self.trips:
            line = lines.get(trip.site) or Line(trip.site, weight_exponent=trip.weight_exponent)
            reason = f"tripped: {trip.operation} was not finite on a planned constant"
            plan = plan.with_line(replace(line, exponent=None, out="fp32", reason=reason, input_amax=trip.amax))
        return plan

    def _repair_one(self, module: nn.Module, call: Call) -> bool:
        tape = record(module, [call]).tape()
        bad = tape.nonfinite()
        if not bad:
            return False
        row = bad[0]
        source = row if row.is_product else source_of(tape, row, torch.float16)
        return source is not None and self._measure_in_each_call(module, source, row)

    def _measure_in_each_call(self, module: nn.Module, source: Row, row: Row) -> bool:
        twin = product_sites(module)[source.site]
        if not isinstance(twin, HalfProduct) or twin.exponent is None:
            return False
        self._before = (twin.exponent, twin.out)
        twin.exponent, twin.out = None, "fp32"
        self.trips.append(Trip(row.name, source.site, row.input_amax, twin.weight_exponent))
        return True

    def _take_back(self, module: nn.Module) -> None:
        twin: Any = product_sites(module)[self.trips.pop().site]
        twin.exponent, twin.out = self._before
