"""What measured rows mean: a pure function of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from finitune.machine.measuring.attention_backends import MASKED_ROW_OP
from finitune.machine.measuring.operations import CONVOLUTION_OP, FP16_SWITCHES, PRODUCT_OP, SCALED_HALF_OP
from finitune.machine.measuring.trial import (
    MAX_OPERATION_ERROR,
    MIN_REDUCED_FP32_ERROR,
    OperationResult,
    format_operation_shape,
)
from finitune.report import Finding, Level

CORE_OPS = (PRODUCT_OP.name, CONVOLUTION_OP.name, SCALED_HALF_OP.name)
RATE_NOISE_RATIO = 0.9
"""Two rates nearer to each other than this are the same: machines are busy."""
MIN_NOTABLE_SPEEDUP = 1.2
"""A gain that is worth a note."""
MIN_BUSY_RATIO = 1.5
"""How much faster the fastest sample is than the median one, typically, where something else is running; and how many
programs want each core of a CPU there."""
REMEDY_BY_DTYPE = {
    "fp32": "Compute on another device (--device cpu): fp32 is what everything else is compared with.",
    "bf16": "Until then compute by plan or in fp32 (--precision planned-half, --precision fp32).",
    "fp16": "Until then compute in fp32, or in bf16 where that is right (--precision fp32, --precision bf16).",
}
SLOW_CODE_BY_DTYPE = {"bf16": "BF16-SLOW", "fp16": "FP16-SLOW"}
SLOW_REASON_BY_DTYPE = {
    "bf16": "it is emulated here, whatever torch.cuda.is_bf16_supported() says",
    "fp16": "there are no units for it here",
}


def judge_operation_results(
    rows: Sequence[OperationResult], lacking: Mapping[str, Mapping[str, str]], *, on_cpu: bool, load: float = 0.0
) -> list[Finding]:
    """Errors for wrong results, warnings for what is slow, missing or fragile, notes for what is worth knowing.

    `lacking` has, by dtype, the operations of diffusion models that raise here, with what they say. On a CPU a slow
    dtype is no more than a note: nobody expects speed of it. `load`: what else wanted to run there, for each core.
    """
    inexact = {variant for variant, _ in FP16_SWITCHES}
    failed = [row for row in rows if row.failure and row.op in CORE_OPS and row.variant not in inexact]
    return [
        *(tell_wrong_result(row) for row in rows if row.wrong),
        *(tell_failed_operation(row) for row in failed),
        *find_masked_row_nans(rows),
        *(tell_missing_operations(dtype, names) for dtype, names in lacking.items() if names),
        *find_slow_dtypes(rows, Level.NOTE if on_cpu else Level.WARNING),
        *find_reduced_fp32(rows),
        *find_fast_inexact_products(rows, inexact),
        *find_busy_device(rows, load),
    ]


def tell_wrong_result(row: OperationResult) -> Finding:
    """The error that results of an operation are wrong, with the first shape at which they are."""
    first, others = row.wrong[0], len(row.wrong) - 1
    off = "not finite" if math.isnan(first.error) else f"off by {first.error:.2g} of its root mean square"
    what = f"{row.op}{f' ({row.variant})' if row.variant else ''} in {row.dtype}"
    more = f", and wrong at {others} more shape{'s' if others > 1 else ''}" if others else ""
    shape = format_operation_shape(first.shape)
    message = f"{what} is {off} at {shape}, against fp64{more}: no exception is raised, the numbers are wrong"
    names = {"op": row.op, "variant": row.variant, "dtype": row.dtype, "shape": shape, "error": first.error}
    evidence = {**names, "wrong_shapes": [format_operation_shape(one.shape) for one in row.wrong]}
    avoid = f"Until then do not use {row.backend or row.variant}."
    instead = REMEDY_BY_DTYPE[row.dtype] if row.op in CORE_OPS else avoid
    remedy = f"Update the driver, then torch, and measure again. {instead}"
    return Finding(Level.ERROR, "DEVICE-WRONG-RESULTS", what, message, evidence, remedy)


def tell_failed_operation(row: OperationResult) -> Finding:
    """The finding that an operation raises; an error in fp32, which everything else is compared with."""
    level, what = Level.ERROR if row.dtype == "fp32" else Level.WARNING, f"{row.op} in {row.dtype}"
    remedy = "See whether this torch is built for this device, and whether its memory is free. "
    message = f"{what} does not run here: {row.failure}"
    evidence: dict[str, object] = {"op": row.op, "dtype": row.dtype}
    return Finding(level, "DEVICE-OP-FAILED", what, message, evidence, remedy + REMEDY_BY_DTYPE[row.dtype])


def find_masked_row_nans(rows: Sequence[OperationResult]) -> Iterator[Finding]:
    fragile: dict[str, list[str]] = {}
    for row in rows:
        if row.op == MASKED_ROW_OP and row.error is not None and math.isnan(row.error):
            fragile.setdefault(row.variant, []).append(row.dtype)
    for backend, dtypes in fragile.items():
        yield Finding(
            Level.WARNING,
            "SDPA-MASKED-ROWS",
            backend,
            f"{backend} gives NaN for a row whose keys are all masked ({', '.join(dtypes)}): softmax over nothing",
            {"dtypes": dtypes},
            "An empty caption in a padded batch is such a row. Give it one token that is attended to, use another back "
            "end, or install torch 2.5 or later, which gives zeros.",
        )


def tell_missing_operations(dtype: str, names: Mapping[str, str]) -> Finding:
    """The warning that a dtype lacks operations of diffusion models."""
    message = f"{', '.join(sorted(names))}: not to be had in {dtype} here"
    remedy = f"A later torch may have them. {REMEDY_BY_DTYPE[dtype]}"
    return Finding(Level.WARNING, "DEVICE-OP-MISSING", dtype, message, {"said": dict(names)}, remedy)


def find_slow_dtypes(rows: Sequence[OperationResult], level: Level) -> Iterator[Finding]:
    rates = {row.dtype: row.best for row in rows if row.op == PRODUCT_OP.name and row.variant == "" and row.best}
    single = rates.get("fp32")
    for dtype, code in SLOW_CODE_BY_DTYPE.items():
        rate = rates.get(dtype)
        if single and rate and rate < RATE_NOISE_RATIO * single:
            times = f"{single / rate:.1f} times as long as fp32 ones"
            yield Finding(
                level,
                code,
                dtype,
                f"{dtype} products take {times}: {SLOW_REASON_BY_DTYPE[dtype]}",
                {f"{dtype}_tflops": float(f"{rate:.3g}"), "fp32_tflops": float(f"{single:.3g}")},
                f"Compute in another precision: {dtype} saves memory here, and costs time.",
            )


def find_reduced_fp32(rows: Sequence[OperationResult]) -> Iterator[Finding]:
    """fp32 results that are off by more than fp32 and less than wrong: somebody has allowed TF32, or less."""
    for row in rows:
        core = row.dtype == "fp32" and row.op in CORE_OPS
        if core and row.error and MIN_REDUCED_FP32_ERROR < row.error <= MAX_OPERATION_ERROR["fp32"]:
            yield Finding(
                Level.NOTE,
                "FP32-REDUCED",
                row.op,
                f"fp32 {row.op} is off by {row.error:.1e}: its operands are rounded to TF32 or bf16 on the way",
                {"error": row.error, "fp32_has": MIN_REDUCED_FP32_ERROR},
                "torch.set_float32_matmul_precision('highest'), and torch.backends.cudnn.allow_tf32 = False, if fp32 "
                "is what you compare with.",
            )


def find_fast_inexact_products(rows: Sequence[OperationResult], inexact: Collection[str]) -> Iterator[Finding]:
    plain = next((row for row in rows if row.op == PRODUCT_OP.name and row.dtype == "fp16" and not row.variant), None)
    if plain is None or not plain.rate or plain.error is None:
        return
    for row in rows:
        if (
            row.variant in inexact
            and row.rate
            and row.error is not None
            and row.rate > MIN_NOTABLE_SPEEDUP * plain.rate
        ):
            yield Finding(
                Level.NOTE,
                "FP16-ACCUMULATION",
                row.variant,
                f"{row.variant}, fp16 products are {row.rate / plain.rate:.1f} times as fast, and off by "
                f"{row.error:.1e} in long sums where they else are by {plain.error:.1e}",
                {"tflops": float(f"{row.rate:.3g}"), "plain_tflops": float(f"{plain.rate:.3g}"), "error": row.error},
                "finitune leaves it off: a partial sum can overflow where the whole fits.",
            )


def find_busy_device(rows: Sequence[OperationResult], load: float) -> Iterator[Finding]:
    spreads = [row.best / row.rate for row in rows if row.best and row.rate]
    spread, signs = statistics.median(spreads) if spreads else 1.0, []
    if spread >= MIN_BUSY_RATIO:
        signs.append(f"the fastest of a few runs is typically {spread:.1f} times as fast as the median one")
    if load >= MIN_BUSY_RATIO:
        signs.append(f"{load:.1f} programs wanted each core in the last minute")
    if signs:
        yield Finding(
            Level.NOTE,
            "DEVICE-BUSY",
            "rates",
            f"something else is running here: {', and '.join(signs)}",
            {"fastest_to_median": round(spread, 2), "load_per_core": round(load, 2)},
            "The rates are what was left over, at worst a hundredth of a CPU's. Measure again when it is idle.",
        )
