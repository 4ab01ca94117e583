"""L2: which operation made the first non-finite number, where in whose source, and of what kind the fault is.

A fault is an operation whose inputs are finite and whose output is not. Modules alone cannot name it: the sum of a
residual stream belongs to no module. So the first bad module of an L1 run is run once more, operation by operation,
and where its inputs are already bad the search widens to the module around it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from finitune.precision.planner import Call, tensor_core
from finitune.precision.probe import is_finite, probe
from finitune.precision.sites import ModulePath, tensors_in
from finitune.precision.tape import CONSTANT_OPS

Kind = Literal["cast", "product", "add", "multiply", "accumulation", "epsilon", "weight", "input", "scheduler", "other"]

_KINDS: dict[Kind, frozenset[str]] = {
    "cast": frozenset({"_to_copy", "copy_", "to"}),
    "product": frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "matmul", "convolution"}),
    "add": frozenset({"add", "add_", "sub", "sub_", "rsub", "addcmul", "lerp"}),
    "multiply": frozenset({"mul", "mul_", "pow", "square", "exp", "addcdiv"}),
    "accumulation": frozenset({"sum", "mean", "norm", "linalg_vector_norm", "var", "var_mean", "cumsum", "prod"}),
    "epsilon": frozenset({"div", "div_", "rsqrt", "reciprocal", "log", "native_layer_norm"}),
}


@dataclass(frozen=True)
class Origin:
    """The first fault: the operation, its place in the model and in the source, and the number it should have held."""

    site: str
    op: str
    kind: Kind
    value: float
    dtype: str
    file: str
    line: int
    forward: int = 0

    def __str__(self) -> str:
        place = f"{self.site or '(root)'}:{self.op}"
        return (
            f"{place} ({self.kind}) made {self.value:.4g}, which {self.dtype} cannot hold, at {self.file}:{self.line}"
        )


class _Found(Exception):
    def __init__(self, origin: Origin):
        super().__init__(str(origin))
        self.origin = origin


class FirstFault(TorchDispatchMode):
    """Stop at the first operation, inside `within`, that makes a non-finite number from finite ones."""

    def __init__(self, path: ModulePath, within: str = "", forward: int = 0):
        super().__init__()
        self._path, self._within, self._forward = path, within, forward

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        site = self._path.here
        inside = not self._within or site == self._within or site.startswith(self._within + ".")
        if not inside or name in CONSTANT_OPS or func.is_view or is_finite(result):
            return result
        bad = [t for t in tensors_in((args, kwargs)) if t.is_floating_point() and not is_finite(t)]
        weights = [t for t in bad if isinstance(t, nn.Parameter)]
        if bad and not weights:
            return result
        raise _Found(self._origin(func, name, args, kwargs, bool(weights)))

    def _origin(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], bad_weight: bool) -> Origin:
        kind: Kind = "weight" if bad_weight else kind_of(name)
        half = next((t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), torch.float32)
        dtype = kwargs.get("dtype") or half
        value = float("nan") if bad_weight else _true_magnitude(func, args, kwargs)
        file, line = _source()
        return Origin(self._path.here, name, kind, value, str(dtype).removeprefix("torch."), file, line, self._forward)


def kind_of(op: str) -> Kind:
    """The class of fault that a non-finite result of this operation is."""
    if "attention" in op:
        return "product"
    return next((kind for kind, names in _KINDS.items() if op in names), "other")


@torch.no_grad()
def first_origin(root: nn.Module, call: Call, forward: int = 0) -> Origin | None:
    """The first fault of one call of `root` as it is now, or None where the call is finite.

    Deterministic models only: the call is run once to find the first bad module and again to find the operation.
    """
    if not is_finite((call.args, call.kwargs)):
        return Origin("", "input", "input", float("nan"), "", "", 0, forward)
    with tensor_core(root), probe(root) as ranges:
        call.run(root)
    bad = ranges.first_nonfinite()
    if bad is None:
        return None
    within = "" if bad[1] == "(root)" else bad[1]
    while True:
        origin = replay(root, call, within, forward)
        if origin is not None or not within:
            return origin
        within = within.rpartition(".")[0]


@torch.no_grad()
def replay(root: nn.Module, call: Call, within: str = "", forward: int = 0) -> Origin | None:
    """The first fault inside the module `within` ('' is all of it: the brute-force twin), or None."""
    path = ModulePath(root)
    try:
        with path, tensor_core(root), FirstFault(path, within, forward):
            call.run(root)
    except _Found as found:
        return found.origin
    return None


def _true_magnitude(func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    """What the operation gives in fp64: the number that the half format could not hold."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    if func._schema.is_mutable:
        args = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, args)
    try:
        result = func(*tree_map(widen, args), **tree_map(widen, kwargs))
    except RuntimeError:
        return float("inf")
    values = next(iter(tensors_in(result)))
    return float(values.abs().max())


def _source() -> tuple[str, int]:
    """File and line of the innermost frame outside of torch and of this package's machinery."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.", "finitune.precision", "finitune.numerics")) and module != "torch":
            parts = frame.f_code.co_filename.split("/")
            package = module.split(".")[0]
            start = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
            return "/".join(parts[start:]), frame.f_lineno
        frame = frame.f_back
    return "", 0
