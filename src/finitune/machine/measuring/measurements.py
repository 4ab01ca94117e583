"""What a device does, measured in seconds instead of believed: is each product right, and how fast is it?

A table of cards knows names. A measurement knows the machine: a driver whose half products are zero, a card whose half
convolutions are NaN, bf16 that is emulated, an attention kernel that cannot bear a masked row. Every operation is tried
by itself; one that raises is a row of the result. Sizes follow the rate measured first, so that a laptop's CPU and a
data centre's GPU take the same few seconds; on a CPU they are small, and the result says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from finitune.machine.measuring.attention_backends import (
    ATTENTION_GRADIENTS_OP,
    ATTENTION_OP,
    MASKED_ROW_OP,
    AttentionBackend,
    AttentionCallable,
    check_masked_row,
    list_sdpa_backends,
    make_forward_operation,
    make_gradient_operation,
)
from finitune.machine.measuring.findings import judge_operation_results
from finitune.machine.measuring.operations import (
    CONVOLUTION_OP,
    FP16_SWITCHES,
    FP32_ONLY_OPS,
    PRODUCT_OP,
    SCALED_HALF_OP,
    find_missing_operations,
    hold_fp16_switch,
    measure_copies,
)
from finitune.machine.measuring.trial import (
    MEASURED_DTYPES,
    Operation,
    OperationResult,
    check_operation,
    format_operation_rate,
    format_operation_shape,
    run_keeping_warnings,
    time_operation,
)
from finitune.progress import Progress
from finitune.report import Finding, Table

_MEASURING_STAGE = "measuring"
HEAD_SIZES = (64, 128)
ATTENTION_LADDER = ((2, 256), (4, 512), (8, 1024), (16, 4096))  # heads and tokens
ODD_ATTENTION_SHAPES = ((2, 33, 40), (1, 64, 77), (2, 65, 129))  # heads, queries, keys
COPY_BYTES_BY_DEVICE = {"cpu": 2**25}
DEFAULT_COPY_BYTES = 2**28


@dataclass(frozen=True)
class Measurements:
    """Every row measured on one device; `small`: at a CPU's sizes. `lacking`: by dtype, the operations that it lacks
    beyond the usual, and all that it lacks."""

    device: str
    small: bool
    seconds: float
    rows: tuple[OperationResult, ...]
    lacking: dict[str, dict[str, str]]
    load: float = 0.0  # of a CPU before: programs that wanted to run, for each core

    def rate(self, op: str, dtype: str, variant: str = "") -> float | None:
        """TFLOP/s (GB/s of a copy) of an operation; None where it was not measured."""
        found = (row.rate for row in self.rows if (row.op, row.dtype, row.variant) == (op, dtype, variant))
        return next(found, None)

    def right(self, dtype: str) -> bool:
        """Whether products and convolutions in `dtype` ran and were right; what a dtype is chosen by."""
        judged = [row for row in self.rows if row.dtype == dtype and row.op in (PRODUCT_OP.name, CONVOLUTION_OP.name)]
        return bool(judged) and all(row.right for row in judged if row.variant == "")

    @property
    def title(self) -> str:
        """The name of the table, and of the figure that holds it."""
        return "measured at small size" if self.small else "measured"

    def table(self) -> Table:
        """A line for each operation, a column for each dtype: the rate and the worst error, or what is wrong. What
        cannot be had in any dtype is left out, and so are copies: `figures` names both."""
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for row in self.rows:
            if row.op != "copy" and (row.backend not in self.absent() or row.right):
                lines.setdefault((row.op, row.variant), {})[row.dtype] = _cell(row)
        rows = ((*names, *(cells.get(dtype, "") for dtype in MEASURED_DTYPES)) for names, cells in lines.items())
        return Table(self.title, ("operation", "how", *MEASURED_DTYPES), tuple(rows))

    def absent(self) -> dict[str, str]:
        """The attention back ends that run here in no dtype, and why not, where torch says why."""
        said: dict[str, list[OperationResult]] = {}
        for row in self.rows:
            if row.op == ATTENTION_OP:
                said.setdefault(row.backend, []).append(row)
        return {name: rows[-1].failure for name, rows in said.items() if all(row.failure for row in rows)}

    def figures(self) -> dict[str, object]:
        """The rates by name, the fastest right attention, what is lacking, how long it took; and the table."""
        figures: dict[str, object] = {"measured_on": self.device, "measured_seconds": round(self.seconds, 2)}
        for row in self.rows:
            if row.rate is not None and (
                row.op == "copy" or (row.op in RATED_OPS and row.variant in ("", SCALED_HALF_OP.variant))
            ):
                words = (row.op, row.variant, "gb_per_s") if row.op == "copy" else (row.op, row.dtype, "tflops")
                figures["_".join(words).replace(",", "").replace(" ", "_")] = float(f"{row.rate:.4g}")
        for dtype in MEASURED_DTYPES:
            if fastest := self.fastest_attention(dtype):
                figures[f"attention_{dtype}_fastest"] = fastest
        if absent := self.absent():
            figures["attention_not_here"] = absent
        figures |= {f"lacking_in_{dtype}": sorted(names) for dtype, names in self.lacking.items() if names}
        return {**figures, self.title: self.table().as_dicts()}

    def fastest_attention(self, dtype: str) -> str | None:
        """The attention that is right, and fastest with its gradients over both head sizes; None where none is."""
        spent: dict[str, float] = {}
        for row in self.rows:
            if row.op == ATTENTION_GRADIENTS_OP and row.dtype == dtype:
                seconds = 1 / row.rate if row.right and row.rate else float("inf")
                spent[row.backend] = spent.get(row.backend, 0.0) + seconds
        name = min(spent, key=spent.__getitem__, default=None)
        return name if name is not None and spent[name] < float("inf") else None

    def findings(self) -> list[Finding]:
        """What is wrong, slow or missing here."""
        needed = {d: {n: t for n, t in lacks.items() if n not in FP32_ONLY_OPS} for d, lacks in self.lacking.items()}
        return judge_operation_results(self.rows, needed, on_cpu=self.small, load=self.load)


RATED_OPS = (PRODUCT_OP.name, CONVOLUTION_OP.name, SCALED_HALF_OP.name)


def measure_device(
    device: torch.device,
    progress: Progress,
    *,
    within_s: float = 5.0,
    product: Operation = PRODUCT_OP,
    convolution: Operation = CONVOLUTION_OP,
    backends: Sequence[AttentionBackend] | None = None,
) -> Measurements:
    """Measure a device; some 5 s on a CPU, less on a GPU. After `within_s` results are still checked, and rates
    left out. The operations can be replaced, to see that it notices.
    """
    begin, load = time.perf_counter(), _load() if device.type == "cpu" else 0.0
    tried = partial(_tried, device=device, deadline=begin + within_s)
    chosen = list_sdpa_backends(device)[1:] if backends is None else backends
    progress.start(_MEASURING_STAGE, None)
    rows = []
    try:
        for row in _rows(device, tried, (product, convolution), chosen):
            rows.append(row)
            progress.say(_MEASURING_STAGE, f"{row.op} {row.dtype}")
            progress.advance(_MEASURING_STAGE)
        lacking = {dtype: find_missing_operations(device, dtype) for dtype in MEASURED_DTYPES}
    finally:
        progress.finish(_MEASURING_STAGE)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    seconds = time.perf_counter() - begin
    return Measurements(str(device), device.type == "cpu", seconds, tuple(rows), lacking, load)


def _load() -> float:
    """Programs that wanted to run in the last minute, for each core; 0 where the system does not tell."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def _rows(
    device: torch.device,
    tried: Callable[..., OperationResult],
    operations: Sequence[Operation],
    backends: Sequence[AttentionBackend],
) -> Iterator[OperationResult]:
    for operation in operations:
        for dtype in MEASURED_DTYPES:
            yield tried(operation, dtype, 0.3)
    switches = FP16_SWITCHES if device.type == "cuda" else ()
    for variant, name in switches:
        if hasattr(torch.backends.cuda.matmul, name):
            # Long sums, and an error that is told, not judged.
            inexact = replace(PRODUCT_OP, variant=variant, shapes=((64, 4096, 64),), slack=1e3)
            with hold_fp16_switch(name):
                yield tried(inexact, "fp16", 0.15)
    yield tried(SCALED_HALF_OP, "fp16", 0.3)
    for backend in backends:
        if backend.attend is not None:
            yield from _attention(backend.name, backend.attend, tried)
    yield from measure_copies(device, 0.1, COPY_BYTES_BY_DEVICE.get(device.type, DEFAULT_COPY_BYTES))
    for backend in backends:
        if backend.takes_mask:
            yield from (
                run_keeping_warnings(partial(check_masked_row, backend, dtype, device)) for dtype in MEASURED_DTYPES
            )


def _attention(
    name: str, attend: AttentionCallable, tried: Callable[..., OperationResult]
) -> Iterator[OperationResult]:
    """Forward, then with gradients, at both head sizes; the first row alone where the back end does not run."""
    for dtype in MEASURED_DTYPES:
        for size in HEAD_SIZES:
            ladder = tuple((heads, tokens, tokens, size) for heads, tokens in ATTENTION_LADDER)
            shapes = tuple((heads, queries, keys, size) for heads, queries, keys in ODD_ATTENTION_SHAPES)
            how = {"backend": name, "variant": f"{name}, head {size}"}
            row = tried(replace(make_forward_operation(attend, name, ladder, shapes), **how), dtype, 0.05)
            yield row
            if row.failure:
                break
            yield tried(replace(make_gradient_operation(attend, name, ladder, shapes), **how), dtype, 0.05)


def _tried(
    operation: Operation, dtype: str, budget_s: float, *, device: torch.device, deadline: float
) -> OperationResult:
    """Checked, and timed if it ran, right or wrong, and there is time."""
    row = run_keeping_warnings(partial(check_operation, operation, dtype, device))
    if row.failure or time.perf_counter() > deadline:
        return row
    return run_keeping_warnings(partial(time_operation, row, operation, device, budget_s))


def _cell(row: OperationResult) -> str:
    """'85 GFLOP/s, 1.5e-06', 'WRONG at 1 x 3 x 5', or why it did not run."""
    if row.failure:
        return row.failure.partition(";")[0]
    if row.op == MASKED_ROW_OP:
        return "NaN" if row.error != row.error else "finite"
    if row.wrong:
        return f"WRONG at {', '.join(format_operation_shape(one.shape) for one in row.wrong)}"
    return ", ".join([*([format_operation_rate(row)] if row.rate is not None else []), f"{row.error:.1e}"])
