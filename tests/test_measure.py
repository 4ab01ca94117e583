"""The measured facts of a device: faults that are put in are found, what raises is a row, and the rest is right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.machine.measuring.attention_backends import (
    ATTENTION_GRADIENTS_OP,
    MASKED_ROW_OP,
    AttentionBackend,
    check_masked_row,
    compute_reference_attention,
    list_half_backends,
    list_sdpa_backends,
    make_forward_operation,
    make_gradient_operation,
)
from finitune.machine.measuring.findings import judge_operation_results
from finitune.machine.measuring.measurements import Measurements, measure_device
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
    MAX_OPERATION_ERROR,
    MEASURED_DTYPES,
    OperationResult,
    check_operation,
    compute_rms_deviation,
    measure_seconds,
    run_keeping_warnings,
    time_operation,
)
from finitune.numerics.half import half_linear
from finitune.progress import SilentProgress
from finitune.report import Finding, Level, to_json_value

CPU = torch.device("cpu")
SMALL = ((2, 33, 40, 64),)


def codes(found: list[Finding]) -> list[str]:
    return [one.code for one in found]


def found_in(*rows: OperationResult, on_cpu: bool = False) -> list[Finding]:
    return judge_operation_results(rows, {}, on_cpu=on_cpu)


def rated(dtype: str, rate: float, best: float | None = None, **other) -> OperationResult:
    return OperationResult(
        PRODUCT_OP.name, other.pop("variant", ""), dtype, rate=rate, best=best or rate, error=1e-6, **other
    )


# --- BLK-03: a back end that silently returns zeros, and its kin ----------------------------------------------------


def zeros_from_64_on(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) * (x.shape[1] < 64)


def off_by_3_percent(x: Tensor, weight: Tensor) -> Tensor:
    return (F.linear(x.double(), weight.double()) * 1.03).to(x.dtype)


def one_wrong_element(x: Tensor, weight: Tensor) -> Tensor:
    out = F.linear(x, weight)
    out[-1, -1] += 1
    return out


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_blk_03_zeros_are_found_with_operation_dtype_and_shapes(dtype: str):
    row = check_operation(replace(PRODUCT_OP, compute=zeros_from_64_on), dtype, CPU)
    assert [one.shape for one in row.wrong] == [shape for shape in PRODUCT_OP.shapes if shape[1] >= 64]
    (finding,) = found_in(row)
    assert (finding.code, finding.level) == ("DEVICE-WRONG-RESULTS", Level.ERROR)
    assert finding.evidence["op"] == "product" and finding.evidence["dtype"] == dtype
    assert finding.evidence["shape"] == "2 x 64 x 33" and finding.evidence["error"] >= 1
    assert "--precision" in finding.remedy or dtype == "fp32"


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("fault", [off_by_3_percent, one_wrong_element])
def test_blk_03_small_errors_are_found_at_every_shape(dtype: str, fault: Callable[..., Tensor]):
    row = check_operation(replace(PRODUCT_OP, compute=fault), dtype, CPU)
    assert [one.shape for one in row.wrong] == list(PRODUCT_OP.shapes)


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("operation", [PRODUCT_OP, CONVOLUTION_OP], ids=lambda operation: operation.name)
def test_blk_03_right_results_pass_with_room_to_spare(dtype: str, operation):
    row = check_operation(operation, dtype, CPU)
    assert row.right and not found_in(row)
    assert row.error is not None and row.error < 0.7 * MAX_OPERATION_ERROR[dtype]


def test_half_convolutions_that_are_nan_are_found():
    """GTX 16xx (pytorch #58123, #77955)."""
    broken = replace(CONVOLUTION_OP, compute=lambda x, kernel: F.conv2d(x, kernel, padding=1) * math.nan)
    (finding,) = found_in(check_operation(broken, "fp16", CPU))
    assert finding.code == "DEVICE-WRONG-RESULTS" and "not finite" in finding.message
    assert to_json_value(finding.evidence)["error"] == "nan"


def test_a_result_of_another_shape_is_wrong():
    row = check_operation(replace(PRODUCT_OP, compute=lambda x, weight: F.linear(weight, x)), "fp32", CPU)
    assert len(row.wrong) == len([shape for shape in PRODUCT_OP.shapes if shape[0] != shape[2]])


@given(index=st.integers(0, 999), size=st.floats(0.2, 1e3))
@settings(max_examples=20)
def test_one_wrong_element_counts_wherever_it_is(index: int, size: float):
    wanted = torch.randn(1000, dtype=torch.float64)
    got = wanted.clone()
    got[index] += size
    assert compute_rms_deviation(wanted, wanted) == 0
    assert compute_rms_deviation(got, wanted) == pytest.approx(size / float(wanted.square().mean().sqrt()))


# --- what raises ----------------------------------------------------------------------------------------------------


def refusing(*operands: Tensor) -> Tensor:
    if operands[0].dtype == torch.float16:
        raise NotImplementedError("\"addmm\" not implemented for 'Half'\nand more")
    return F.linear(*operands)


def test_an_operation_that_raises_is_a_row():
    row = check_operation(replace(PRODUCT_OP, compute=refusing), "fp16", CPU)
    assert row.failure == "NotImplementedError: \"addmm\" not implemented for 'Half'" and not row.right
    (finding,) = found_in(row)
    assert (finding.code, finding.level) == ("DEVICE-OP-FAILED", Level.WARNING)
    assert found_in(replace(row, dtype="fp32"))[0].level is Level.ERROR


def test_an_operation_may_raise_at_the_sizes_that_are_timed():
    def too_large(x: Tensor, weight: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    row = time_operation(
        OperationResult("product", "", "fp16", error=0.0), replace(PRODUCT_OP, compute=too_large), CPU, 0.1
    )
    assert row.failure == "OutOfMemoryError: CUDA out of memory" and row.rate is None


def test_warnings_are_kept_where_it_did_not_run():
    import warnings

    def warned(failure: str) -> OperationResult:
        warnings.warn("needs sm80", stacklevel=1)
        return OperationResult("attention", "sdpa flash", "fp16", failure=failure)

    assert run_keeping_warnings(lambda: warned("not for this device and dtype")).failure.endswith("; needs sm80")
    assert run_keeping_warnings(lambda: warned("")).failure == ""


def test_dty_05_coverage_is_tried_and_not_believed():
    assert find_missing_operations(CPU, "fp32") == {}
    for dtype in ("fp16", "bf16"):
        lacking = find_missing_operations(CPU, dtype)
        assert {"svd", "inverse"} <= set(lacking) <= set(FP32_ONLY_OPS)
        assert all(lacking.values())
    found = judge_operation_results([], {"fp16": {"silu": "not implemented for 'Half'"}}, on_cpu=True)
    assert codes(found) == ["DEVICE-OP-MISSING"] and found[0].level is Level.WARNING


# --- time -----------------------------------------------------------------------------------------------------------


def test_what_spends_the_budget_at_once_is_called_once():
    calls = []
    median, fastest = measure_seconds(lambda: calls.append(1), CPU, 0.0)
    assert len(calls) == 1 and median == fastest > 0


def test_the_ladder_is_climbed_as_far_as_the_budget_lets():
    seen: list[int] = []

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(len(x))
        return x

    ladder = replace(PRODUCT_OP, compute=counted, ladder=((1, 2, 3), (2, 2, 3), (10**9, 10**9, 10**9)))
    row = time_operation(OperationResult("product", "", "fp16", error=0.0), ladder, CPU, 0.01)
    assert row.shape == (2, 2, 3) and set(seen) == {1, 2}
    assert row.rate and row.best and row.best >= row.rate > 0


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_attention_is_compared_with_the_formula_both_ways(dtype: str):
    for backend in (*list_sdpa_backends(CPU)[:2], *list_half_backends()):
        if backend.attend and dtype in backend.dtypes:
            assert check_operation(make_forward_operation(backend.attend, backend.name, SMALL), dtype, CPU).right
            assert check_operation(make_gradient_operation(backend.attend, backend.name, SMALL), dtype, CPU).right


def test_wrong_gradients_are_found_though_the_output_is_right():
    def detached_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compute_reference_attention(q, k.detach() + 0 * k, v)

    assert check_operation(make_forward_operation(detached_key, "broken", SMALL), "fp32", CPU).right
    row = check_operation(make_gradient_operation(detached_key, "broken", SMALL), "fp32", CPU)
    (finding,) = found_in(row)
    assert finding.evidence["variant"] == "broken" and finding.remedy.endswith("Until then do not use broken.")


def test_blk_05_a_masked_row_is_nan_where_attention_is_written_by_hand():
    def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return (logits + mask if mask.dtype != torch.bool else logits.masked_fill(~mask, -math.inf)).softmax(-1) @ v

    ways = (by_hand, F.scaled_dot_product_attention, compute_reference_attention)
    nan, finite, none = (check_masked_row(AttentionBackend("", way), "fp32", CPU) for way in ways)
    assert math.isnan(nan.error or 0.0) and finite.error == 0.0
    assert none.error is None and none.failure == "takes no mask here"
    found = found_in(*(OperationResult(MASKED_ROW_OP, "by hand", dtype, error=math.nan) for dtype in ("bf16", "fp16")))
    assert codes(found) == ["SDPA-MASKED-ROWS"] and found[0].evidence == {"dtypes": ["bf16", "fp16"]}
    assert not found_in(OperationResult(MASKED_ROW_OP, "sdpa math", "fp16", error=0.0))


# --- our own product ------------------------------------------------------------------------------------------------


def test_the_scaled_product_takes_what_fp16_cannot_hold():
    assert check_operation(SCALED_HALF_OP, "fp16", CPU).right

    def unscaled(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = half_linear(x, weight, exponent=0)
        return out, x, weight

    (finding,) = found_in(check_operation(replace(SCALED_HALF_OP, compute=unscaled), "fp16", CPU))
    assert "not finite" in finding.message


# --- what rates mean ------------------------------------------------------------------------------------------------


def test_emulated_bf16_is_told_by_its_rate():
    found = found_in(rated("fp32", 6.76), rated("bf16", 3.64), rated("fp16", 6.86))  # a GTX 1080
    assert codes(found) == ["BF16-SLOW"] and found[0].level is Level.WARNING
    assert "1.9 times as long" in found[0].message and found[0].evidence == {"bf16_tflops": 3.64, "fp32_tflops": 6.76}


def test_slow_fp16_is_a_warning_on_a_gpu_and_a_note_on_a_cpu():
    rows = rated("fp32", 3.0), rated("fp16", 0.13)  # a GTX 1650
    assert [(one.code, one.level) for one in found_in(*rows)] == [("FP16-SLOW", Level.WARNING)]
    assert found_in(*rows, on_cpu=True)[0].level is Level.NOTE


def test_the_fastest_sample_decides_where_the_machine_is_busy():
    rows = rated("fp32", 1.0, best=1.0), rated("bf16", 0.1, best=2.0), rated("fp16", 0.5, best=2.0)
    assert codes(found_in(*rows)) == ["DEVICE-BUSY"]


def test_a_cpu_that_others_want_is_told_though_all_samples_are_alike():
    (finding,) = judge_operation_results([rated("fp32", 1.0)], {}, on_cpu=True, load=3.0)
    assert finding.code == "DEVICE-BUSY" and finding.evidence == {"fastest_to_median": 1.0, "load_per_core": 3.0}
    assert not judge_operation_results([rated("fp32", 1.0)], {}, on_cpu=True, load=1.0)


def test_tf32_is_noticed_and_is_no_fault():
    row = OperationResult(PRODUCT_OP.name, "", "fp32", error=1e-3)
    assert [(one.code, one.level) for one in found_in(row)] == [("FP32-REDUCED", Level.NOTE)]
    assert not found_in(replace(row, dtype="fp16"))


def test_what_accumulating_in_fp16_would_bring_is_a_note():
    plain_row, sloppy = rated("fp16", 70.0), rated("fp16", 140.0, variant=FP16_SWITCHES[0][0])
    (finding,) = found_in(plain_row, sloppy)
    assert finding.code == "FP16-ACCUMULATION" and "2.0 times as fast" in finding.message
    assert not found_in(plain_row, replace(sloppy, rate=71.0, best=71.0))
    assert not found_in(plain_row, replace(sloppy, rate=None, best=None, failure="RuntimeError"))


def test_switches_are_put_back():
    place = torch.backends.cuda.matmul
    name = FP16_SWITCHES[1][1]
    before = getattr(place, name)
    with pytest.raises(ZeroDivisionError), hold_fp16_switch(FP16_SWITCHES[0][1]):
        assert not getattr(place, name)
        raise ZeroDivisionError
    assert getattr(place, name) == before


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure_device(CPU, SilentProgress(), within_s=1.5)


def test_this_machine_is_right_and_every_dtype_is_rated(measured: Measurements):
    assert not [one for one in measured.findings() if one.level is Level.ERROR]
    for dtype in MEASURED_DTYPES:
        assert measured.right(dtype)
        assert measured.rate("product", dtype)
        assert {
            row.variant.partition(",")[0]
            for row in measured.rows
            if row.op == ATTENTION_GRADIENTS_OP and row.dtype == dtype
        }
    assert measured.small and "small" in measured.title


def test_the_table_has_a_column_for_each_dtype_and_the_figures_hold_it(measured: Measurements):
    table, figures = measured.table(), measured.figures()
    assert table.columns == ("operation", "how", "fp32", "bf16", "fp16")
    assert ("product", "") in [row[:2] for row in table.rows] and figures[table.title] == table.as_dicts()
    assert {"product_fp16_tflops", "copy_within_memory_gb_per_s", "attention_not_here"} <= set(figures)
    assert json.loads(json.dumps(to_json_value(figures), allow_nan=False))


def test_faults_are_found_through_the_whole_and_what_is_sound_stays_so():
    def nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * math.nan

    broken = (
        AttentionBackend("broken", nan),
        AttentionBackend("refusing", refusing),
        AttentionBackend("absent", None, absent="not here"),
    )
    product = replace(PRODUCT_OP, compute=zeros_from_64_on)
    measured = measure_device(CPU, SilentProgress(), within_s=0, product=product, backends=broken)
    wrong = {(one.evidence["op"], one.evidence["dtype"]) for one in measured.findings() if one.level is Level.ERROR}
    assert {("product", dtype) for dtype in MEASURED_DTYPES} | {
        ("attention", dtype) for dtype in MEASURED_DTYPES
    } <= wrong
    assert not measured.right("fp16") and measured.rate("product", "fp16") is None  # no time was given
    assert not [op for op, _ in wrong if op.startswith("conv")]
    assert "WRONG at 2 x 64 x 33" in str(measured.table().rows)


def test_nothing_is_left_out_where_a_gpu_cannot_be_reached():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    rows = measure_copies(torch.device("cuda"), 0.1, 1 << 20)
    assert len(rows) == 1 and rows[0].failure
