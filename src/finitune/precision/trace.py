"""One run of a model as a list of operations, each with its place, dtype, range, operands, FLOPs and bytes.

The tape is what planner, certificate and diagnosis read. It sees operations, not only modules: a residual add is an
operation that no hook can see. A product site is one row, whatever happens inside it; a module that scales itself
(an attached adapter) is none. Ranges go to one preallocated
device buffer, one fused reduction each; nothing is read back before the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from finitune.numerics.stats import amax_into
from finitune.precision.half_modules import Fp32Norm
from finitune.precision.sites import (
    ModulePath,
    is_leaf_norm,
    is_product_module,
    is_self_scaling,
    iterate_nested_tensors,
)

#: Operations whose infinities are meant: they write constants (attention masks above all).
CONSTANT_OPS = frozenset(
    {"full", "full_like", "fill_", "masked_fill", "masked_fill_", "where", "scalar_tensor", "zeros"}
)

#: Operations whose result is whatever the memory held.
UNWRITTEN_OPS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


@dataclass
class OpRecord:
    """One operation of the run; `operands` are the rows (by number) that made its inputs."""

    site: str
    op: str
    occurrence: int
    dtype: torch.dtype
    operands: tuple[int, ...] = ()
    is_product: bool = False
    ends_norm: bool = False
    half_operands: bool = False
    flops: int = 0
    bytes_moved: int = 0
    input_amax: float = 0.0
    amax: float = 0.0

    @property
    def name(self) -> str:
        """site:op, with the occurrence where the same operation comes more than once."""
        return f"{self.site or '(root)'}:{self.op}" + (f"#{self.occurrence + 1}" if self.occurrence else "")


@dataclass
class OpTrace:
    """The rows of one or more runs of the same model, ranges merged by maximum."""

    rows: list[OpRecord] = field(default_factory=list[OpRecord])

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    @property
    def half_flops(self) -> int:
        """FLOPs of products whose operands were half."""
        return sum(row.flops for row in self.rows if row.half_operands)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by all operations, each counted as one kernel."""
        return sum(row.bytes_moved for row in self.rows)

    def find_intended_infinities(self) -> set[int]:
        """Numbers of the rows whose infinity was written on purpose (an attention mask), or comes from such a row."""
        meant: set[int] = set()
        for number, row in enumerate(self.rows):
            written = row.op in CONSTANT_OPS or any(operand in meant for operand in row.operands)
            if row.amax == math.inf and written:
                meant.add(number)
        return meant

    def nonfinite(self) -> list[OpRecord]:
        """Rows that held a NaN, or an infinity that nobody wrote there on purpose, in order."""
        meant = self.find_intended_infinities()
        return [row for n, row in enumerate(self.rows) if not math.isfinite(row.amax) and n not in meant]


class OpRecorder(TorchDispatchMode):
    """Record every operation of `root` while the context is open; `tape()` afterwards gives the rows.

    Several forwards merge: the same operation at the same place of a forward is the same row.
    """

    def __init__(self, root: nn.Module, half: torch.dtype = torch.float16, capacity: int = 1 << 15):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves its argument untyped
        self._half = half
        self._rows: list[OpRecord] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._occurrences: dict[tuple[str, str], int] = {}
        self._made_by: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        self._numels: dict[int, int] = {}
        self._path = ModulePath(root, self._enter, self._leave)
        self._inside_product = 0
        self.norm_inputs: dict[str, torch.dtype] = {}
        device = next((p.device for p in root.parameters()), torch.device("cpu"))
        self._slots = torch.zeros(capacity, 2, device=device)

    def __enter__(self) -> OpRecorder:
        self._path.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self._path.__exit__()

    @property
    def failed_at(self) -> str:
        """The innermost module that an exception left; '' where there was none."""
        return self._path.failed_at

    def build_trace(self) -> OpTrace:
        """The rows so far, with their ranges read back from the device."""
        ranges = cast("list[list[float]]", self._slots.tolist())  # pyright: ignore[reportUnknownMemberType]  # untyped
        for row, (input_amax, amax) in zip(self._rows, ranges, strict=False):
            row.input_amax, row.amax = input_amax, amax
        return OpTrace(self._rows)

    def _enter(self, site: str, module: nn.Module, _inputs: Any) -> None:
        if self._path.depth == 1:
            self._occurrences.clear()
        if is_product_module(module) or is_self_scaling(module):
            self._inside_product += 1

    def _leave(self, site: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_product_module(module):
            if self._inside_product == 1 and isinstance(output, Tensor):
                self._record_site(site, module, next(iterate_nested_tensors(inputs)), output)
            self._inside_product -= 1  # last: the measuring itself is no operation of the model
        elif is_self_scaling(module):
            self._inside_product -= 1
        elif isinstance(module, Fp32Norm) or is_leaf_norm(module):
            if isinstance(module, Fp32Norm):
                self.norm_inputs.setdefault(site, next(iterate_nested_tensors(inputs)).dtype)
            if isinstance(output, Tensor) and output in self._made_by:
                self._rows[self._made_by[output]].ends_norm = True

    def _record_site(self, site: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        weight: Tensor = module.weight  # type: ignore[assignment]
        op = "linear" if isinstance(module, nn.Linear) else "convolution"
        number = self._row(site, op, y.dtype, [x])
        row = self._rows[number]
        row.is_product = True
        row.half_operands = weight.dtype == self._half
        row.flops = 2 * y.numel() * weight[0].numel()
        casts = x.numel() * (x.element_size() + 2) if row.half_operands and x.dtype != self._half else 0
        row.bytes_moved = casts + _bytes(weight) + _bytes(y) + x.numel() * weight.element_size()
        self._range_of_input(number, x)
        amax_into(self._slots[number, 1], y)
        self._remember(y, number)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        if self._inside_product or func.overloadpacket.__name__ in UNWRITTEN_OPS:
            return result
        inputs = [t for t in iterate_nested_tensors(args) if t.is_floating_point()]
        if func.is_view:
            if inputs and inputs[0] in self._made_by:
                for view in iterate_nested_tensors(result):
                    self._made_by[view] = self._made_by[inputs[0]]
            return result
        for output in iterate_nested_tensors(result):
            if output.is_floating_point() and output.numel():
                self._record_op(func, inputs, output, args, kwargs or {}, result)
            break
        return result

    def _record_op(self, func: Any, inputs: list[Tensor], output: Tensor, *call: Any) -> None:
        number = self._row(self._path.here, func.overloadpacket.__name__, output.dtype, inputs)
        row = self._rows[number]
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if formula is not None and not row.flops:
            args, kwargs, result = call
            row.flops = int(formula(*args, **kwargs, out_val=result))
            row.half_operands = all(t.dtype == self._half for t in inputs)
        row.bytes_moved = _bytes(output) + sum(_bytes(t) for t in inputs)
        amax_into(self._slots[number, 1], output)
        self._remember(output, number)

    def _remember(self, output: Tensor, number: int) -> None:
        self._made_by[output] = number
        self._numels[number] = output.numel()

    def _range_of_input(self, number: int, x: Tensor) -> None:
        """The range of a product's input: that of the row that made it, where it is the whole of its result."""
        maker = self._made_by.get(x)
        if maker is not None and self._numels[maker] == x.numel():
            self._slots[number, 0].copy_(torch.maximum(self._slots[number, 0], self._slots[maker, 1]))
        else:
            amax_into(self._slots[number, 0], x)

    def _row(self, site: str, op: str, dtype: torch.dtype, inputs: Sequence[Tensor]) -> int:
        occurrence = self._occurrences.get((site, op), 0)
        self._occurrences[site, op] = occurrence + 1
        number = self._numbers.setdefault((site, op, occurrence), len(self._rows))
        if number == len(self._rows):
            operands = tuple(self._made_by[t] for t in inputs if t in self._made_by)
            self._rows.append(OpRecord(site, op, occurrence, dtype, operands))
            if number >= len(self._slots):
                self._slots = torch.cat([self._slots, torch.zeros_like(self._slots)])
        return number


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
