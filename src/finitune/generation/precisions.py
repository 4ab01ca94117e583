"""The precisions a picture can be drawn in, each as a context that leaves the model's parts as it found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finitune.errors import UsageError, suggest_nearest_name
from finitune.models.loaded import LoadedModel
from finitune.numerics.attention import half_attention
from finitune.numerics.products import exact_accumulation
from finitune.precision.apply import apply_current_scaling, apply_plan, hold_parameters_in
from finitune.precision.guard import PrecisionGuard
from finitune.precision.plan import ComponentPlan, PrecisionPlan
from finitune.precision.planner import apply_tensor_core_rounding

DRAWING_PRECISIONS: dict[str, str] = {
    "planned-half": "fp16 by the plan: fp32 where the plan says so, power-of-two scales, guarded",
    "current-half": "fp16 products, each scaled by its own measured power of two; everything else fp32; needs no plan",
    "bf16": "the model in bfloat16",
    "fp32": "the model in fp32: the reference",
    "raw-half": "the model in fp16 as it is, without protection",
}
_PLAIN_PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "raw-half": torch.float16}


def check_drawing_precision(name: str) -> None:
    """Raises UsageError for a precision that does not exist."""
    if name not in DRAWING_PRECISIONS and name != "auto":
        raise UsageError(
            f"--precision: there is no {name!r}.{suggest_nearest_name(name, DRAWING_PRECISIONS)}",
            code="PRECISION-UNKNOWN",
            subject="--precision",
            remedy=f"One of: auto, {', '.join(DRAWING_PRECISIONS)}",
        )


@dataclass
class RunningModel:
    """A model whose modules compute in one precision right now, and its guard."""

    precision: str
    model: LoadedModel
    guard: PrecisionGuard

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by name, in the order in which a drawing runs them."""
        return self.model.named_modules()


@contextmanager
def open_in_precision(parts: LoadedModel, precision: str, plan: PrecisionPlan | None = None) -> Iterator[RunningModel]:
    """The model in `precision`; products have the tensor core's meaning on a CPU, too.

    planned-half needs a `plan`; a component that it does not name runs in plain fp16.
    """
    guard = PrecisionGuard()
    originals = parts.named_modules()
    with ExitStack() as stack:
        stack.enter_context(exact_accumulation())
        if precision in _PLAIN_PRECISION_DTYPES:
            modules = {
                name: stack.enter_context(hold_parameters_in(m, _PLAIN_PRECISION_DTYPES[precision]))
                for name, m in originals.items()
            }
        elif precision == "current-half":
            modules = {name: stack.enter_context(apply_current_scaling(m)) for name, m in originals.items()}
            for one in parts.modules:
                if one.attends:
                    stack.enter_context(parts.apply_attention(modules[one.name], _current_attention))
        else:
            if plan is None:
                raise ValueError("planned-half needs a plan")
            modules = {}
            for name, module in originals.items():
                component = plan.components.get(name, ComponentPlan())
                guarded = guard if name == parts.denoiser else None
                modules[name] = stack.enter_context(apply_plan(module, component, guard=guarded))
        if precision != "fp32":
            stack.enter_context(apply_tensor_core_rounding(parts.module(parts.denoiser)))
        yield RunningModel(precision, parts.with_modules(modules), guard)


def _current_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    return half_attention(*args, **kwargs, exponent=None)
