"""One operation on one device: is it right, and how fast? Whatever it does, its answer is a row.

Right means near fp64 on a CPU, from the same rounded operands, at small and odd shapes: kernels differ by shape, and
the broken ones are broken at some of them. A distance is the worst element's, in units of the result's root mean
square, so that one wrong element in a million counts. What a sound kernel may be off by is the rounding of its result
(5 root mean squares is about the largest element) and, in attention, of the probabilities inside.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MEASURED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

MAX_OPERATION_ERROR = {"fp32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}
"""Beyond this a result is wrong. For fp32 it leaves room for TF32, which keeps 11 bits and is somebody's choice."""
MIN_REDUCED_FP32_ERROR = 1e-4
"""An fp32 product farther off than this was not computed in fp32: TF32 or bf16 is in it."""

OperationShape = tuple[int, ...]
MAX_TIMING_SAMPLES = 7
NO_KERNEL_PHRASES = ("No viable backend", "No available kernel")  # what torch says of an attention it cannot do alone
MIN_SAMPLE_S = 2e-3  # of calls timed in one go, so that starting them does not count


@dataclass(frozen=True)
class Operation:
    """What to try: the function to check, its twin for fp64 operands on a CPU, and where it is to be tried.

    `compute` and `reference` take the tensors that `operands` makes for a shape and a dtype (on the CPU) and give the
    results to compare, one or several. `shapes` are checked; of `ladder`, rising, one is timed. `work` counts what a
    call does, in units of which `unit` says 10**12 or 10**9 a second.
    """

    name: str
    compute: Callable[..., Tensor | tuple[Tensor, ...]]
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    operands: Callable[[OperationShape, torch.dtype], tuple[Tensor, ...]]
    shapes: tuple[OperationShape, ...]
    ladder: tuple[OperationShape, ...]
    work: Callable[[OperationShape], float]
    variant: str = ""
    slack: float = 1.0  # times MAX_OPERATION_ERROR: results that pass through several roundings
    backend: str = ""  # of an attention


@dataclass(frozen=True)
class WrongResult:
    """A shape at which a result was wrong, and how far off; NaN where it was not finite."""

    shape: OperationShape
    error: float


@dataclass(frozen=True)
class OperationResult:
    """What became of one operation in one dtype: its rate, its worst error, the shapes it fails at, or why it did not
    run."""

    op: str
    variant: str
    dtype: str
    rate: float | None = None  # of the median sample
    best: float | None = None  # of the fastest sample: what the device can, while it is busy with something else
    unit: str = "TFLOP/s"
    shape: OperationShape = ()  # that both were measured at
    error: float | None = None
    wrong: tuple[WrongResult, ...] = ()
    failure: str = ""
    backend: str = ""

    @property
    def right(self) -> bool:
        """Whether it was tried and gave right results everywhere."""
        return self.error is not None and not self.wrong and not self.failure


def compute_rms_deviation(got: Tensor, wanted: Tensor) -> float:
    """The worst element's distance from fp64 `wanted`, in root mean squares of it; NaN where `got` is not finite."""
    if got.shape != wanted.shape:
        return float("nan")
    got = got.detach().to("cpu").double()
    if not bool(got.isfinite().all()):
        return float("nan")
    scale = float(wanted.square().mean().sqrt())
    worst = float((got - wanted).abs().max())
    return worst / scale if scale else worst


def to_tensor_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One result or several, as several."""
    return (result,) if isinstance(result, Tensor) else result


def make_normal_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal numbers on the CPU, the same for the same shape and seed, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def check_operation(operation: Operation, dtype: str, device: torch.device) -> OperationResult:
    """Compare with fp64 at each of the operation's shapes; an exception ends in the row, with the shape it came at."""
    row = OperationResult(operation.name, operation.variant, dtype, backend=operation.backend)
    worst, wrong, shape = 0.0, [], ()
    allowed = MAX_OPERATION_ERROR[dtype] * operation.slack
    try:
        for shape in operation.shapes:
            operands = operation.operands(shape, MEASURED_DTYPES[dtype])
            found = to_tensor_tuple(operation.compute(*(tensor.to(device) for tensor in operands)))
            wanted = to_tensor_tuple(operation.reference(*(tensor.double() for tensor in operands)))
            errors = [compute_rms_deviation(got, want) for got, want in zip(found, wanted, strict=True)]
            error = max(errors, key=lambda one: one if one == one else float("inf"))
            if not error <= allowed:
                wrong.append(WrongResult(shape, error))
            worst = error if error != error else max(worst, error)
    except Exception as error:
        return replace(row, failure=describe_operation_error(error))
    return replace(row, error=worst, wrong=tuple(wrong))


def time_operation(
    row: OperationResult, operation: Operation, device: torch.device, budget_s: float
) -> OperationResult:
    """`row` with the rate at the largest shape of the ladder whose samples fit into the budget, as the smaller ones
    let expect."""
    try:
        fitting = None
        for shape in operation.ladder:
            if (
                fitting
                and fitting[1][1] * operation.work(shape) / operation.work(fitting[0]) * MAX_TIMING_SAMPLES > budget_s
            ):
                break
            operands = tuple(tensor.to(device) for tensor in operation.operands(shape, MEASURED_DTYPES[row.dtype]))
            fitting = shape, measure_seconds(lambda held=operands: operation.compute(*held), device, budget_s)
    except Exception as error:
        return replace(row, failure=describe_operation_error(error))
    return (
        row if fitting is None else add_operation_rates(row, fitting[0], operation.work(fitting[0]) / 1e12, fitting[1])
    )


def add_operation_rates(
    row: OperationResult, shape: OperationShape, work: float, seconds: tuple[float, float]
) -> OperationResult:
    """`row` with its rates: `work` (10**12 or 10**9 of something) in the median and in the fastest sample."""
    median, fastest = seconds
    return replace(row, rate=work / median, best=work / fastest, shape=shape)


def measure_seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> tuple[float, float]:
    """Seconds of one call of `work`, to the end of what it starts on the device: the median of up to SAMPLES samples
    and the fastest one, after a call to warm up; of the first call alone, where that spends twice a CPU's budget."""
    first = time_calls(work, device, 1)
    if first > 2 * budget_s and device.type == "cpu":  # a GPU loads its kernels in the first call
        return first, first
    samples, begin = [time_calls(work, device, 1)], time.perf_counter()
    calls = max(1, round(MIN_SAMPLE_S / max(samples[0], 1e-7)))
    while len(samples) < MAX_TIMING_SAMPLES and time.perf_counter() - begin + samples[-1] * calls < budget_s:
        samples.append(time_calls(work, device, calls))
    return statistics.median(samples), min(samples)


def time_calls(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of one of so many calls in a row."""
    synchronize_device(device)
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize_device(device)
    return (time.perf_counter() - begin) / calls


def synchronize_device(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device.type in ("cuda", "xpu", "mps"):
        module = getattr(torch, device.type)
        module.synchronize() if device.type == "mps" else module.synchronize(device)


def run_keeping_warnings(work: Callable[[], OperationResult]) -> OperationResult:
    """The row that `work` makes, with torch's warnings kept: where it did not run, they often say why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = work()
    reasons = [cut_first_line(str(one.message)) for one in caught]
    if not row.failure or not reasons:
        return row
    return replace(row, failure="; ".join([row.failure, *dict.fromkeys(reasons)]))


def lacks_kernel(error: BaseException) -> bool:
    """Whether torch has no kernel for what was asked; it has no type of its own for that, so its words must tell."""
    return str(error).startswith(NO_KERNEL_PHRASES)


def describe_operation_error(error: BaseException) -> str:
    """An exception in a line."""
    if lacks_kernel(error):
        return "not for this device and dtype"
    return f"{type(error).__name__}: {cut_first_line(str(error))}" if str(error) else type(error).__name__


def cut_first_line(text: str, length: int = 160) -> str:
    """The first line of a text, cut to a length."""
    line = (text.strip().splitlines() or [""])[0]
    return line if len(line) <= length else line[: length - 3] + "..."


def format_operation_shape(shape: OperationShape) -> str:
    """'33 x 257 x 130'."""
    return " x ".join(map(str, shape))


def format_operation_rate(row: OperationResult) -> str:
    """'85.2 GFLOP/s', '312 TFLOP/s', '21.5 GB/s'; '' where nothing was timed."""
    if row.rate is None:
        return ""
    if row.unit == "TFLOP/s" and row.rate < 1:
        return f"{row.rate * 1e3:.3g} GFLOP/s"
    return f"{row.rate:.3g} {row.unit}"
