"""Put a plan's modules in place of a model's own, and take them out again.

The weights are stored once, in half, in the parameters that the model already has. `undo` restores the modules and
the bits: the few weights whose rounding to half was not exact are kept aside for that, one by one, and counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as dc_replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from finitune.errors import NumericsError, PlanError, suggest_nearest_name
from finitune.numerics.formats import exponent_for
from finitune.precision.half_modules import Fp32Module, Fp32Norm, HalfProduct, make_half_product
from finitune.precision.plan import ComponentPlan, PlanLine
from finitune.precision.sites import (
    find_leaf_norms,
    find_product_sites,
    is_product_module,
    is_self_scaling,
    iterate_named_modules,
    iterate_nested_tensors,
    replace_module,
)

_MAX_ASIDE_SHARE = 1 / 16  # a place and its value take as much memory as several elements
_TINY_WEIGHT = 2.0**-8  # below it, weights of ordinary spread reach into fp16's subnormals

RepairCallback = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class PlannedRoot:
    """The outermost module of a planned component: it states the dtype of its border and asks the guard."""

    border: torch.dtype
    guard: RepairCallback | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which callers hand in activations."""
        return self.border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = super()  # the model's own class, next in line
        output = model.forward(*args, **kwargs)
        if self.guard is None or all(bool(t.isfinite().all()) for t in iterate_nested_tensors(output)):
            return output
        return self.guard(self, args, kwargs)  # type: ignore[arg-type]


@cache
def _root_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Half{original.__name__}", (PlannedRoot, original), {"__module__": original.__module__})


@dataclass
class RestorableCast:
    """Weights held in another dtype for a while: once, in place. `restore` brings back every bit.

    What the new dtype cannot hold exactly is kept aside: single elements, or the whole tensor where they are many.
    """

    dtypes: list[tuple[nn.Parameter, torch.dtype]] = field(default_factory=list[tuple[nn.Parameter, torch.dtype]])
    elements: list[tuple[nn.Parameter, Tensor, Tensor]] = field(
        default_factory=list[tuple[nn.Parameter, Tensor, Tensor]]
    )
    tensors: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list[tuple[nn.Parameter, Tensor]])
    rounded: int = 0

    def store(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Hold `parameter` in `dtype` from now on."""
        original = parameter.data
        parameter.data = original.to(dtype).contiguous()
        places = (parameter.data.to(original.dtype) != original).flatten().nonzero().squeeze(1)
        self.rounded += places.numel()
        if places.numel() > original.numel() * _MAX_ASIDE_SHARE:
            self.tensors.append((parameter, original))
            return
        self.dtypes.append((parameter, original.dtype))
        if places.numel():
            self.elements.append((parameter, places, original.flatten()[places]))

    def restore(self) -> None:
        """Give every weight its dtype and its bits back."""
        for parameter, dtype in self.dtypes:
            parameter.data = parameter.data.to(dtype)
        for parameter, places, values in self.elements:
            parameter.data.view(-1)[places] = values
        for parameter, original in self.tensors:
            parameter.data = original


@dataclass
class AppliedPlan:
    """A component with a plan in force: `with` it, or use `module` and take everything back with `undo`."""

    module: nn.Module
    original: nn.Module
    replaced: list[tuple[str, nn.Module]] = field(default_factory=list[tuple[str, nn.Module]])
    stored: RestorableCast = field(default_factory=RestorableCast)

    @property
    def rounded_weights(self) -> int:
        """How many weights half could not hold exactly."""
        return self.stored.rounded

    def __enter__(self) -> nn.Module:
        return self.module

    def __exit__(self, *_: object) -> None:
        self.undo()

    def put(self, site: str, module: nn.Module) -> None:
        """Put a module in place, and remember the one that stood there."""
        self.replaced.append((site, replace_module(self.original, site, module)))

    def undo(self) -> nn.Module:
        """Restore the original modules and the bits of every weight; returns the original root."""
        self.stored.restore()
        for site, module in reversed(self.replaced):
            replace_module(self.original, site, module)
        return self.original


def apply_plan(
    root: nn.Module,
    plan: ComponentPlan,
    arithmetic: torch.dtype = torch.float16,
    guard: RepairCallback | None = None,
) -> AppliedPlan:
    """Put `plan` in force on `root`: product twins everywhere, the plan's norms and islands, half storage.

    `arithmetic` float16 is the plan itself; bfloat16 and float32 are its measuring and its algebraic form (see
    `twins`). Raises PlanError for a line whose site the model does not have.
    """
    carried = {line.carried_to: line.carry for line in plan.lines if line.carry}
    _check_sites(root, [*(line.site for line in plan.lines), *carried, *plan.casts])
    _check_products(root, [line.site for line in plan.lines if line.kind == "product"])
    applied = AppliedPlan(root, root)
    lines = list_product_lines(root, plan)
    for site in plan.islands:
        applied.put(site, Fp32Module(root.get_submodule(site)))
    for site, line in lines.items():
        applied.put(site, make_half_product(root.get_submodule(site), line, arithmetic, carried.get(site, 0)))
    for site in plan.casts:
        if not plan.in_island(site):
            applied.put(site, Fp32Norm(root.get_submodule(site), arithmetic))
    for parameter in list_castable_parameters(root):
        applied.stored.store(parameter, arithmetic)
    applied.module = _root_twin(root, arithmetic if plan.border == "fp16" else torch.float32, guard)
    return applied


def apply_training_plan(root: nn.Module, plan: ComponentPlan) -> AppliedPlan:
    """A plan as it is trained with: its powers of two on fp16 operands, its weights stored in fp16, every border fp32.

    A result that the plan writes in fp16 would have an fp16 gradient, in which small numbers flush to zero; what is
    kept for backward is fp16 all the same. Raises as `apply_plan` does.
    """
    wide = {site: dc_replace(line, out="fp32") for site, line in list_product_lines(root, plan).items()}
    islands = (line for line in plan.lines if line.kind == "island")
    applied = apply_plan(root, ComponentPlan((*wide.values(), *islands), tuple(find_leaf_norms(root)), "fp32"))
    for module in root.modules():
        if isinstance(module, Fp32Norm):
            module.out_dtype = torch.float32
    return applied


def enable_measured_scales(root: nn.Module) -> list[str]:
    """Let every planned product of `root` measure its own scale from now on; the sites that had a constant before."""
    measured: list[str] = []
    for site, module in iterate_named_modules(root):
        if isinstance(module, HalfProduct) and module.exponent is not None:
            module.exponent = None
            measured.append(site)
    return measured


def list_product_lines(root: nn.Module, plan: ComponentPlan) -> dict[str, PlanLine]:
    """What holds at every product outside of the islands: the plan's line, or plain fp16."""
    lines = {line.site: line for line in plan.lines}
    return {
        site: lines.get(site) or PlanLine(site, out="fp16", weight_exponent=choose_weight_exponent(site, module))
        for site, module in find_product_sites(root).items()
        if not plan.in_island(site)
    }


def apply_current_scaling(root: nn.Module, *, masters: bool = False) -> AppliedPlan:
    """The reference that needs no calibration: every product scaled by its own measured power of two, all else fp32.

    Weights are stored in fp16; with `masters` they stay fp32, to be trained, and are rounded in each call.
    """
    applied = AppliedPlan(root, root)
    for site, module in find_product_sites(root).items():
        line = PlanLine(site, exponent=None, weight_exponent=0 if masters else choose_weight_exponent(site, module))
        applied.put(site, make_half_product(module, line, torch.float16))
    if not masters:
        for site in find_leaf_norms(root):
            applied.put(site, Fp32Norm(root.get_submodule(site), torch.float32))
        for parameter in list_castable_parameters(root):
            applied.stored.store(parameter, torch.float16)
    applied.module = _root_twin(root, torch.float32, None)
    return applied


@contextmanager
def hold_parameters_in(root: nn.Module, dtype: torch.dtype) -> Generator[nn.Module, None, None]:
    """`root` with its floating parameters held in `dtype`, and its own bits back afterwards."""
    stored = RestorableCast()
    try:
        for parameter in list_castable_parameters(root):
            stored.store(parameter, dtype)
        yield root
    finally:
        stored.restore()


def list_castable_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The floating parameters outside of modules that a plan keeps in fp32 or that scale themselves, each once."""
    kept = (m for m in root.modules() if isinstance(m, (Fp32Norm, Fp32Module)) or is_self_scaling(m))
    exempt = {id(parameter) for module in kept for parameter in module.parameters()}
    return [p for p in dict.fromkeys(root.parameters()) if p.is_floating_point() and id(p) not in exempt]


def choose_weight_exponent(site: str, product: nn.Module) -> int:
    """The power of two that a weight is divided by to be stored in fp16, almost always 0; raises for a non-finite one.

    Positive for a weight beyond fp16; negative for one so small that its bits would be lost in the subnormals.
    """
    weight: Tensor = product.weight  # type: ignore[assignment]
    amax = float(weight.detach().abs().max())
    if not math.isfinite(amax):
        raise NumericsError(
            f"{site}.weight holds a NaN or an infinity",
            code="WEIGHT-NONFINITE",
            subject=f"{site}.weight",
            remedy="The file is damaged, or was saved after a run that went wrong: get it again.",
        )
    return math.frexp(amax)[1] if 0 < amax < _TINY_WEIGHT else exponent_for(amax, 0)


def _root_twin(root: nn.Module, border: torch.dtype, guard: RepairCallback | None) -> nn.Module:
    twin = copy.copy(root)
    twin.__class__ = _root_class(type(root))
    twin.border, twin.guard = border, guard  # type: ignore[assignment]
    return twin


def _check_sites(root: nn.Module, sites: Iterable[str]) -> None:
    known = dict(iterate_named_modules(root))
    for site in sites:
        if site not in known:
            raise PlanError(
                f"the plan names {site!r}, which {type(root).__name__} does not "
                f"have.{suggest_nearest_name(site, known)}",
                code="PLAN-UNKNOWN-SITE",
                subject=site,
                evidence={"modules": len(known)},
                remedy="Make a plan for this model: finitune plan MODEL --out FILE",
            )


def _check_products(root: nn.Module, sites: Iterable[str]) -> None:
    for site in sites:
        module = root.get_submodule(site)
        if not is_product_module(module):
            raise PlanError(
                f"the plan has a line for the product {site!r}, which is a {type(module).__name__}",
                code="PLAN-NOT-A-PRODUCT",
                subject=site,
                remedy="An adapter is attached there: put the plan in force first, or move its line to the base.",
            )
