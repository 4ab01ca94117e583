"""L2: which operation made the non-finite number that came out, where in whose source, and of what kind the fault is.

A fault is an operation that makes a non-finite number from finite ones. Modules alone cannot name it: the sum of a
residual stream belongs to no module. So the call is run once more, operation by operation, and each tensor carries the
first fault that it comes from, also where it is finite again: an overflow in a norm leaves zeros. Blamed is the fault
behind the output. Two infinities are none: one written on purpose (a mask), and one that an operation takes to its
right limit (the softmax of a mask, the sigmoid of a large number).
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from finitune.precision.planner import RecordedCall, apply_tensor_core_rounding
from finitune.precision.probe import is_output_finite
from finitune.precision.sites import ModulePath, iterate_nested_tensors
from finitune.precision.trace import CONSTANT_OPS, UNWRITTEN_OPS

FaultKind = Literal[
    "cast",
    "product",
    "add",
    "multiply",
    "accumulation",
    "epsilon",
    "mask",
    "weight",
    "input",
    "other",
]

_KINDS: dict[FaultKind, frozenset[str]] = {
    "cast": frozenset({"_to_copy", "copy", "to"}),
    "product": frozenset(
        {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution"}
        | {"linear", "matmul", "conv1d", "conv2d", "conv3d"}  # whole in inference mode
    ),
    "add": frozenset({"add", "sub", "rsub", "addcmul", "lerp"}),
    "multiply": frozenset({"mul", "pow", "square", "exp", "expm1", "addcdiv", "div"}),
    "accumulation": frozenset(
        {"sum", "mean", "norm", "linalg_vector_norm", "var", "var_mean", "std", "cumsum", "prod", "scatter_add"}
    ),
    "epsilon": frozenset({"rsqrt", "reciprocal", "log"}),
}
#: What is wrong where fp64 is not finite either: a division by zero, not a product that is too large.
_DIVIDES = frozenset({"div", "pow", "addcdiv", "native_layer_norm", "native_group_norm", "_fused_rms_norm"})
_NORMS = frozenset({"native_layer_norm", "native_group_norm", "_fused_rms_norm"})
#: These give the right finite number for an infinite one.
_SATURATES = frozenset({"_softmax", "_safe_softmax", "softmax", "sigmoid", "tanh", "erf", "exp", "clamp", "hardtanh"})


@dataclass(frozen=True)
class FaultOrigin:
    """The fault: the operation, its place in the model and in the source, and the number it should have held.

    `value` is the largest magnitude that fp64 gives where the result was not finite; inf or NaN if fp64 fails too.
    """

    site: str
    op: str
    kind: FaultKind
    value: float
    dtype: str
    file: str
    line: int
    forward: int = 0

    def __str__(self) -> str:
        place = f"{self.site or '(root)'}:{self.op} ({self.kind})"
        if self.kind in ("weight", "input"):
            return f"{place} read a NaN or an infinity"
        return f"{place} made {self.value:.4g}, which {self.dtype} cannot hold, at {self.file}:{self.line}"


class FaultTracer(TorchDispatchMode):
    """Find every fault of a run; `found` has them in order, `behind` tells which one a tensor comes from."""

    def __init__(self, root: nn.Module, path: ModulePath, forward: int = 0):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves its argument untyped
        self.found: list[FaultOrigin] = []
        self._path, self._forward = path, forward
        self._weights = {_place(t) for t in (*root.parameters(), *root.buffers())}
        #: Memory of a tensor -> the first fault behind it, None where its infinity was written on purpose.
        self._behind: dict[int, FaultOrigin | None] = {}

    def given(self, inputs: Any) -> None:
        """Take note of the call's inputs: one that is not finite is a fault, unless it is a mask."""
        for tensor in _nonfinite(inputs):
            self._brought("input", tensor)

    def find_cause(self, tensors: Sequence[Tensor]) -> FaultOrigin | None:
        """The first fault that these tensors come from."""
        causes = [self._behind.get(_place(t)) for t in tensors]
        return min((cause for cause in causes if cause), key=self.found.index, default=None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        writes = func._schema.is_mutable
        before: tuple[Any, ...] = tree_map(_copied, args) if writes else args
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        bad = [] if func.overloadpacket.__name__ in UNWRITTEN_OPS else _nonfinite(result)
        if bad:
            cause = self._cause(func, args, before, kwargs, bad[0])
        else:
            cause = None if _saturates(func) else self.find_cause([*iterate_nested_tensors((args, _read(kwargs)))])
        for tensor in iterate_nested_tensors(result):
            if not tensor.numel():
                continue  # all empty tensors share one place
            if bad or cause:
                self._behind[_place(tensor)] = cause
            elif not writes:  # memory that is used again
                self._behind.pop(_place(tensor), None)
        return result

    def _cause(
        self, func: Any, args: tuple[Any, ...], before: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> FaultOrigin | None:
        """The fault behind a non-finite result: that of an operand, None for a mask, or a new one."""
        name = func.overloadpacket.__name__
        read = _read(kwargs)
        operands = list(zip(iterate_nested_tensors((args, read)), iterate_nested_tensors((before, read)), strict=True))
        if "attention" in name:  # a mask is no cause of what goes wrong inside
            operands = [(t, was) for t, was in operands if any(t is x for x in args[:3]) or not _only_negative(was)]
        bad = [t for t, was in operands if not is_output_finite(was)]
        for tensor in bad:
            if _place(tensor) not in self._behind:
                self._brought(name, tensor)
        inherited = self.find_cause([t for t, _ in operands])
        if inherited or name in CONSTANT_OPS or (bad and _only_negative(result)):
            return inherited
        value = _true_magnitude(func, before, kwargs, result)
        masked = math.isnan(value) and not is_output_finite((before, read))
        return self._new(name, "mask" if masked else classify_fault(name, value), value, result.dtype)

    def _brought(self, op: str, tensor: Tensor) -> None:
        """Take note of a non-finite tensor that no operation of this run made; with only -inf in it, it is a mask."""
        kind: FaultKind = "weight" if _place(tensor) in self._weights else "input"
        mask = _only_negative(tensor)
        self._behind[_place(tensor)] = None if mask else self._new(op, kind, math.nan, tensor.dtype)

    def _new(self, op: str, kind: FaultKind, value: float, dtype: torch.dtype) -> FaultOrigin:
        file, line = _source()
        origin = FaultOrigin(
            self._path.here, op, kind, value, str(dtype).removeprefix("torch."), file, line, self._forward
        )
        self.found.append(origin)
        return origin


def classify_fault(op: str, value: float = 0.0) -> FaultKind:
    """The class of fault that a non-finite result of this operation is; `value` is what fp64 gives."""
    op = op.rstrip("_") or op
    if "attention" in op:
        return "product"
    if op in _DIVIDES and not math.isfinite(value):
        return "epsilon"
    if op in _NORMS:
        return "multiply"
    for kind, names in _KINDS.items():
        if op in names:
            return kind
    return "other"


@torch.no_grad()
def find_first_fault_origin(root: nn.Module, call: RecordedCall, forward: int = 0) -> FaultOrigin | None:
    """The first fault that reached the output of one call of `root` as it is now, or None where that is finite."""
    faults, output = _run(root, call, forward)
    return faults.find_cause(_nonfinite(output))


@torch.no_grad()
def replay_to_first_fault(root: nn.Module, call: RecordedCall, forward: int = 0) -> FaultOrigin | None:
    """The first fault of one call, whether or not anything comes of it."""
    faults, _ = _run(root, call, forward)
    return next(iter(faults.found), None)


def _run(root: nn.Module, call: RecordedCall, forward: int) -> tuple[FaultTracer, Any]:
    path = ModulePath(root)
    faults = FaultTracer(root, path, forward)
    faults.given((call.args, call.kwargs))
    with path, apply_tensor_core_rounding(root), faults:
        output = call.run(root)
    return faults, output


def _true_magnitude(func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> float:
    """What fp64 gives where `result` is not finite: the number that the half format could not hold."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        exact = next(iterate_nested_tensors(func(*tree_map(widen, args), **tree_map(widen, kwargs))))
    except RuntimeError:  # an operation without an fp64 kernel
        return math.inf
    lost = exact[~result.isfinite()].abs()
    held = lost[lost.isfinite()]
    return float((held if held.numel() else lost).max())


def _source() -> tuple[str, int]:
    """File and line of the innermost frame outside of torch and of this package's machinery."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(("torch.", "finitune.precision.", "finitune.numerics.")):
            parts = PurePath(frame.f_code.co_filename).parts
            package = module.partition(".")[0]
            start = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
            return "/".join(parts[start:]), line
    return "", 0


def _saturates(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.rstrip("_") in _SATURATES or "attention" in name


def _nonfinite(value: Any) -> list[Tensor]:
    return [t for t in iterate_nested_tensors(value) if not is_output_finite(t)]


def _only_negative(tensor: Tensor) -> bool:
    """True where every non-finite number is -inf, as in an attention mask."""
    return bool((tensor.isfinite() | tensor.isneginf()).all())


def _read(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that an operation reads; `out` is only written."""
    return {key: value for key, value in kwargs.items() if key != "out"}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _place(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage().data_ptr()
