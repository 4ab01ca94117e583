"""Attention at a model's own sizes: how long each back end takes for a pass, how much memory, how far from fp64.

A pass is every attention of the model once. The output's gradient is zero but for a few query rows of the first and the
last head: every gradient that these rows have a part in can then be compared with fp64, which takes a moment instead of
minutes, while the kernels do all of their work.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from finitune.machine.measuring.attention_backends import (
    AttentionBackend,
    AttentionCallable,
    compute_reference_attention,
    make_attention_inputs,
)
from finitune.machine.measuring.operations import compute_with_gradients
from finitune.machine.measuring.trial import (
    MEASURED_DTYPES,
    OperationShape,
    cut_first_line,
    describe_operation_error,
    lacks_kernel,
    make_normal_tensor,
    measure_seconds,
)
from finitune.numerics.compare import relative_l2

MAX_COMPARED_ROWS = 128  # query rows whose gradients are compared
MIN_BENCH_TOKENS = 32
OUT_OF_TIME = "not measured: out of time"
MAX_TOKEN_DIVISOR = 128  # the divisor that a CPU begins with
MAX_ATTENTION_ERROR = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 4e-3}
"""The relative error beyond which an attention is wrong, or computes in fewer bits; twice that for gradients."""


@dataclass(frozen=True)
class BenchLayer:
    """One kind of attention of a model: its shape, and how many of it a pass has."""

    name: str
    number: int
    heads: int
    queries: int
    keys: int
    head_size: int

    @property
    def shape(self) -> OperationShape:
        """(heads, queries, keys, head size)."""
        return self.heads, self.queries, self.keys, self.head_size

    def cut(self, divisor: int) -> BenchLayer:
        """With so many times fewer tokens, but a few."""
        queries, keys = (max(MIN_BENCH_TOKENS, tokens // divisor) for tokens in (self.queries, self.keys))
        return replace(self, queries=min(queries, self.queries), keys=min(keys, self.keys))


@dataclass(frozen=True)
class BackendResult:
    """One back end in one dtype over a pass: seconds, peak bytes beside the operands, relative errors, or why none.

    None where it was not measured: gradients that a back end has none of, memory on a device that does not count it.
    """

    backend: str
    dtype: str
    forward_s: float | None = None
    both_s: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    gradient_error: float | None = None
    failure: str = ""
    gradient_failure: str = ""
    has_kernel: bool = True
    """Whether the back end is for this device and dtype at all."""

    @property
    def right(self) -> bool:
        """Whether it ran, and the output is as near to fp64 as its dtype allows."""
        return not self.failure and self.error is not None and self.error <= MAX_ATTENTION_ERROR[self.dtype]

    @property
    def trains(self) -> bool:
        """Whether the gradients are right, too."""
        near = self.gradient_error is not None and self.gradient_error <= 2 * MAX_ATTENTION_ERROR[self.dtype]
        return self.right and near and not self.gradient_failure


def measure_attention(
    backends: Sequence[AttentionBackend],
    layers: Sequence[BenchLayer],
    device: torch.device,
    within_s: float,
    heard: Callable[[BackendResult], object],
) -> tuple[int, list[BackendResult]]:
    """By how much the tokens were cut, and every pass at that size; `heard` is told of each as it comes.

    A GPU takes all tokens. A CPU begins with few, and doubles them for as long as the time lets: twice as long as the
    last round is what the next one may take. A round that the time has cut short counts only where there is no other.
    """
    begin = time.perf_counter()
    divisor, kept = (1 if device.type != "cpu" else MAX_TOKEN_DIVISOR), None
    while True:
        begun = time.perf_counter()
        cut = [layer.cut(divisor) for layer in layers]
        done = []
        for one in measure_backends(backends, cut, device, begin + within_s - begun):
            heard(one)
            done.append(one)
        if kept and any(one.failure == OUT_OF_TIME for one in done):
            return kept
        now = time.perf_counter()
        kept = divisor, done
        if divisor == 1 or now - begin + 2 * (now - begun) > within_s:
            return kept
        divisor //= 2


def measure_backends(
    backends: Sequence[AttentionBackend], layers: Sequence[BenchLayer], device: torch.device, within_s: float
) -> Iterator[BackendResult]:
    """Each back end in each of its dtypes; those that come after the time is up are not measured, and say so."""
    deadline = time.perf_counter() + within_s
    for dtype in reversed(MEASURED_DTYPES):  # half precision is what is asked about
        trials = None
        for backend in backends:
            if dtype not in backend.dtypes:
                continue
            if backend.attend is None:
                yield BackendResult(backend.name, dtype, failure=backend.absent)
            elif time.perf_counter() > deadline:
                yield BackendResult(backend.name, dtype, failure=OUT_OF_TIME)
            else:
                trials = trials or [_Trial.of(layer, dtype, device) for layer in layers]
                with warnings.catch_warnings():  # of torch's, why a kernel will not do; the error says it, too
                    warnings.simplefilter("ignore")
                    done = _passed(backend.name, backend.attend, backend.has_gradients, trials)
                yield done


@dataclass(frozen=True)
class _Trial:
    """A layer's operands on the device (q, k, v and the output's gradient), and the fp64 results for the heads and rows
    that are compared: output, and gradients of q, k, v."""

    layer: BenchLayer
    dtype: str
    device: torch.device
    operands: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: BenchLayer, dtype: str, device: torch.device) -> _Trial:
        q, k, v = make_attention_inputs(layer.shape, MEASURED_DTYPES[dtype])
        grad = torch.zeros_like(q)
        rows = min(MAX_COMPARED_ROWS, layer.queries)
        grad[:, _ENDS, :rows] = make_normal_tensor(
            (1, len(_ENDS), rows, layer.head_size), MEASURED_DTYPES[dtype], seed=3
        )
        compared = q[:, _ENDS, :rows], k[:, _ENDS], v[:, _ENDS], grad[:, _ENDS, :rows]
        wanted = compute_with_gradients(compute_reference_attention, *(operand.double() for operand in compared))
        return cls(layer, dtype, device, tuple(operand.to(device) for operand in (q, k, v, grad)), wanted)

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """The relative errors of the output, and of whatever gradients there are."""
        rows = self.wanted[0].shape[2]
        found = [result[:, _ENDS, :rows] if i < 2 else result[:, _ENDS] for i, result in enumerate(results)]
        return [relative_l2(got.cpu(), want) for got, want in zip(found, self.wanted, strict=False)]


_ENDS = [0, -1]
"""The heads that are compared."""


def _passed(name: str, attend: AttentionCallable, has_gradients: bool, trials: Sequence[_Trial]) -> BackendResult:
    """One back end over all layers; whatever it raises is told."""
    done = BackendResult(name, trials[0].dtype)
    try:
        done = _forward(done, attend, trials)
    except Exception as error:
        return replace(done, failure=describe_operation_error(error), has_kernel=not lacks_kernel(error))
    if not has_gradients:
        return replace(done, gradient_failure="has no gradients")
    try:
        return _both(done, attend, trials)
    except Exception as error:
        return replace(done, gradient_failure=cut_first_line(describe_operation_error(error)))


@torch.no_grad()
def _forward(done: BackendResult, attend: AttentionCallable, trials: Sequence[_Trial]) -> BackendResult:
    errors, seconds = [], 0.0
    for trial in trials:
        q, k, v, _ = trial.operands
        errors += trial.errors([attend(q, k, v)])
        once, _ = measure_seconds(lambda held=(q, k, v): attend(*held), trial.device, 0.1)
        seconds += trial.layer.number * once
    return replace(done, forward_s=seconds, error=_largest(errors))


def _both(done: BackendResult, attend: AttentionCallable, trials: Sequence[_Trial]) -> BackendResult:
    errors, seconds, peaks = [], 0.0, []
    for trial in trials:
        before = _reset_peak(trial.device)
        results = compute_with_gradients(attend, *trial.operands)
        if before is not None:
            peaks.append(torch.cuda.max_memory_allocated(trial.device) - before)
        errors += trial.errors(results)[1:]
        del results
        once, _ = measure_seconds(lambda held=trial.operands: compute_with_gradients(attend, *held), trial.device, 0.1)
        seconds += trial.layer.number * once
    peak = max(peaks, default=None)
    return replace(done, both_s=seconds, gradient_error=_largest(errors), peak_bytes=peak)


def _reset_peak(device: torch.device) -> int | None:
    """Bytes taken now, from where the peak counts; None on a device that does not tell."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if there is one."""
    return next((error for error in errors if error != error), max(errors))
