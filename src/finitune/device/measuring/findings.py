"""What measured rows mean: a pure function of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from finitune.device.measuring.operations import CONVOLUTION, PRODUCT, SCALED, SWITCHES
from finitune.device.measuring.trial import ALLOWED, REDUCED_FROM, Row, spelled
from finitune.report import Finding, Level

MASKED_ROW = "fully masked row"
CORE = (PRODUCT.name, CONVOLUTION.name, SCALED.name)
NOISE = 0.9
"""Two rates nearer to each other than this are the same: machines are busy."""
WORTH = 1.2
"""A gain that is worth a note."""
BUSY = 1.5
"""How much faster the fastest sample is than the median one, typically, where something else is running; and how many
programs want each core of a CPU there."""
INSTEAD = {
    "fp32": "Compute on another device (--device cpu): fp32 is what everything else is compared with.",
    "bf16": "Until then compute by plan or in fp32 (--precision planned-half, --precision fp32).",
    "fp16": "Until then compute in fp32, or in bf16 where that is right (--precision fp32, --precision bf16).",
}
NAMES = {"bf16": "BF16-SLOW", "fp16": "FP16-SLOW"}
WHY_SLOW = {
    "bf16": "it is emulated here, whatever torch.cuda.is_bf16_supported() says",
    "fp16": "there are no units for it here",
}


def findings_of(
    rows: Sequence[Row], lacking: Mapping[str, Mapping[str, str]], *, on_cpu: bool, load: float = 0.0
) -> list[Finding]:
    """Errors for wrong results, warnings for what is slow, missing or fragile, notes for what is worth knowing.

    `lacking` has, by dtype, the operations of diffusion models that raise here, with what they say. On a CPU a slow
    dtype is no more than a note: nobody expects speed of it. `load`: what else wanted to run there, for each core.
    """
    return [
        *(_wrong(row) for row in rows if row.wrong),
        *(_failed(row) for row in rows if row.failure and row.op in CORE and not _is_sloppy(row)),
        *_masked_rows(rows),
        *_lacking(lacking),
        *_slow(rows, Level.NOTE if on_cpu else Level.WARNING),
        *_reduced(rows),
        *_sloppy(rows),
        *_busy(rows, load),
    ]


def _is_sloppy(row: Row) -> bool:
    return any(row.variant == variant for variant, _ in SWITCHES)


def _wrong(row: Row) -> Finding:
    first, others = row.wrong[0], len(row.wrong) - 1
    off = "not finite" if math.isnan(first.error) else f"off by {first.error:.2g} of its root mean square"
    what = f"{row.op}{f' ({row.variant})' if row.variant else ''} in {row.dtype}"
    more = f", and wrong at {others} more shape{'s' if others > 1 else ''}" if others else ""
    return Finding(
        Level.ERROR,
        "DEVICE-WRONG-RESULTS",
        what,
        f"{what} is {off} at {spelled(first.shape)}, against fp64{more}: no exception is raised, the numbers are wrong",
        {
            "op": row.op,
            "variant": row.variant,
            "dtype": row.dtype,
            "shape": spelled(first.shape),
            "error": first.error,
            "wrong_shapes": [spelled(one.shape) for one in row.wrong],
        },
        f"Update the driver, then torch, and measure again. {_instead(row)}",
    )


def _instead(row: Row) -> str:
    return INSTEAD[row.dtype] if row.op in CORE else f"Until then do not use {row.variant.partition(', head')[0]}."


def _failed(row: Row) -> Finding:
    return Finding(
        Level.ERROR if row.dtype == "fp32" else Level.WARNING,
        "DEVICE-OP-FAILED",
        f"{row.op} in {row.dtype}",
        f"{row.op} in {row.dtype} does not run here: {row.failure}",
        {"op": row.op, "dtype": row.dtype},
        f"See whether this torch is built for this device, and whether its memory is free. {INSTEAD[row.dtype]}",
    )


def _masked_rows(rows: Sequence[Row]) -> list[Finding]:
    fragile: dict[str, list[str]] = {}
    for row in rows:
        if row.op == MASKED_ROW and row.error is not None and math.isnan(row.error):
            fragile.setdefault(row.variant, []).append(row.dtype)
    return [
        Finding(
            Level.WARNING,
            "SDPA-MASKED-ROWS",
            backend,
            f"{backend} gives NaN for a row whose keys are all masked ({', '.join(dtypes)}): softmax over nothing",
            {"dtypes": dtypes},
            "An empty caption in a padded batch is such a row. Give it one token that is attended to, use another back "
            "end, or install torch 2.5 or later, which gives zeros.",
        )
        for backend, dtypes in fragile.items()
    ]


def _lacking(lacking: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    return [
        Finding(
            Level.WARNING,
            "DEVICE-OP-MISSING",
            dtype,
            f"{', '.join(sorted(names))}: not to be had in {dtype} here",
            {"said": dict(names)},
            f"A later torch may have them. {INSTEAD[dtype]}",
        )
        for dtype, names in lacking.items()
        if names
    ]


def _slow(rows: Sequence[Row], level: Level) -> list[Finding]:
    rates = {row.dtype: row.best for row in rows if row.op == PRODUCT.name and row.variant == "" and row.best}
    single = rates.get("fp32")
    found = []
    for dtype, code in NAMES.items():
        rate = rates.get(dtype)
        if single and rate and rate < NOISE * single:
            found.append(
                Finding(
                    level,
                    code,
                    dtype,
                    f"{dtype} products take {single / rate:.1f} times as long as fp32 ones: {WHY_SLOW[dtype]}",
                    {f"{dtype}_tflops": float(f"{rate:.3g}"), "fp32_tflops": float(f"{single:.3g}")},
                    f"Compute in another precision: {dtype} saves memory here, and costs time.",
                )
            )
    return found


def _reduced(rows: Sequence[Row]) -> list[Finding]:
    """fp32 results that are off by more than fp32 and less than wrong: somebody has allowed TF32, or less."""
    return [
        Finding(
            Level.NOTE,
            "FP32-REDUCED",
            row.op,
            f"fp32 {row.op} is off by {row.error:.1e}: its operands are rounded to TF32 or bf16 on the way",
            {"error": row.error, "fp32_has": REDUCED_FROM},
            "torch.set_float32_matmul_precision('highest'), and torch.backends.cudnn.allow_tf32 = False, if fp32 is "
            "what you compare with.",
        )
        for row in rows
        if row.dtype == "fp32" and row.op in CORE and row.error and REDUCED_FROM < row.error <= ALLOWED["fp32"]
    ]


def _sloppy(rows: Sequence[Row]) -> list[Finding]:
    plain = next((row for row in rows if row.op == PRODUCT.name and row.dtype == "fp16" and not row.variant), None)
    if plain is None or not plain.rate or plain.error is None:
        return []
    return [
        Finding(
            Level.NOTE,
            "FP16-ACCUMULATION",
            row.variant,
            f"{row.variant}, fp16 products are {row.rate / plain.rate:.1f} times as fast, and off by {row.error:.1e} "
            f"in long sums where they else are by {plain.error:.1e}",
            {"tflops": float(f"{row.rate:.3g}"), "plain_tflops": float(f"{plain.rate:.3g}"), "error": row.error},
            "finitune leaves it off: a partial sum can overflow where the whole fits.",
        )
        for row in rows
        if _is_sloppy(row) and row.rate and row.error is not None and row.rate > WORTH * plain.rate
    ]


def _busy(rows: Sequence[Row], load: float) -> list[Finding]:
    spreads = [row.best / row.rate for row in rows if row.best and row.rate]
    spread = statistics.median(spreads) if spreads else 1.0
    if max(spread, load) < BUSY:
        return []
    signs = [
        *([f"the fastest of a few runs is typically {spread:.1f} times as fast as the median one"] * (spread >= BUSY)),
        *([f"{load:.1f} programs wanted each core in the last minute"] * (load >= BUSY)),
    ]
    return [
        Finding(
            Level.NOTE,
            "DEVICE-BUSY",
            "rates",
            f"something else is running here: {', and '.join(signs)}",
            {"fastest_to_median": round(spread, 2), "load_per_core": round(load, 2)},
            "The rates are what was left over, at worst a hundredth of a CPU's. Measure again when it is idle.",
        )
    ]
