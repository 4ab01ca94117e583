"""Rows, blocks and lanes: whatever the way, the same numbers as the algebra makes of the whole weight."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finitune.adapters import ADAPTER_ALGORITHMS
from finitune.adapters.weight import combine_adapted_weight, compute_adapted_bias
from finitune.errors import FileError, NumericsError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.merging import stream, work
from finitune.merging.base_model import BaseTensorKey
from finitune.merging.merge_plan import PlannedTensor
from finitune.merging.rows import (
    ROUNDER_BY_NAME,
    CompensatedRounder,
    LowRankMerger,
    ModuleRows,
    NearestRounder,
    PrecomputedMerger,
    RowwiseMerger,
    StackedMerger,
    StochasticRounder,
    TensorChange,
    choose_row_merger,
    find_rounder_class,
    to_matrix_shape,
)
from finitune.merging.stream import is_tensor_finite, read_whole_tensor, reserve_file_space, run_in_copy_workers
from finitune.merging.work import (
    MAX_SURVIVAL_SAMPLE,
    RoundingOptions,
    choose_sampled_rows,
    compute_delta_survival,
    copy_or_merge_tensor,
    survey_tensor,
)
from finitune.numerics.narrow import round_once
from tests.adapters_made import random_adapter
from tests.merge_made import same_bits

SHAPES = {"norm": (12,), "set": (12, 8)}
NEAREST = RoundingOptions(NearestRounder)


def one_part(shape, *adapters, **options) -> TensorChange:
    return TensorChange("weight", (ModuleRows("site", 0, shape[0], adapters),), shape, shape, **options)


def applied(change: TensorChange, base: torch.Tensor, rows: slice) -> torch.Tensor:
    block = base.reshape(to_matrix_shape(change.shape))[rows].clone()
    choose_row_merger(change, base.clone).apply(block, rows)
    return block


@pytest.mark.parametrize("name", [algorithm.name for algorithm in ADAPTER_ALGORITHMS])
@pytest.mark.parametrize("shape", [(12, 8), (12, 8, 3, 3)])
def test_every_algorithm_by_rows(name: str, shape):
    shape = SHAPES.get(name, shape)
    base, adapter = random_adapter(name, shape, 3)
    base = base.double()
    wanted = combine_adapted_weight(base, [(adapter, 0.7)]).reshape(to_matrix_shape(shape))
    change = one_part(shape, (adapter, 0.7))
    for rows in (slice(0, 12), slice(3, 7), slice(1, 12, 4)):
        rows = rows if len(shape) > 1 else slice(0, 1)
        torch.testing.assert_close(applied(change, base, rows), wanted[rows], rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("side", ["out", "in"])
def test_magnitudes_by_rows(side):
    base, adapter = random_adapter("lora", (12, 8), 5, magnitude=side)
    base = base.double()
    change = one_part((12, 8), (adapter, 0.5), (replace(adapter, magnitude=None), -1.0))
    wanted = combine_adapted_weight(base, [(adapter, 0.5), (replace(adapter, magnitude=None), -1.0)])
    torch.testing.assert_close(applied(change, base, slice(2, 9)), wanted[2:9], rtol=1e-13, atol=1e-15)
    assert isinstance(choose_row_merger(change, base.clone), RowwiseMerger if side == "out" else PrecomputedMerger)


def test_several_loras_are_one_product():
    base, first = random_adapter("lora", (12, 8), 1)
    second = random_adapter("lora", (12, 8), 2)[1]
    change = one_part((12, 8), (first, 0.3), (second, -2.0))
    assert isinstance(choose_row_merger(change, base.clone), LowRankMerger)
    wanted = combine_adapted_weight(base.double(), [(first, 0.3), (second, -2.0)])
    torch.testing.assert_close(applied(change, base.double(), slice(0, 12)), wanted, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("names", [("lora", "loha"), ("lora", "lora"), ("lokr", "full")])
def test_fused_rows_each_have_their_own(names):
    parts = [random_adapter(name, (12, 8), n)[1] for n, name in enumerate(names)]
    base = torch.randn(36, 8).double()
    change = TensorChange(
        "weight",
        (
            ModuleRows("q", 0, 12, ((parts[0], 1.0),)),
            ModuleRows("k", 12, 24),
            ModuleRows("v", 24, 36, ((parts[1], 0.5),)),
        ),
        (36, 8),
        (36, 8),
    )
    wanted = torch.cat(
        [
            combine_adapted_weight(base[:12], [(parts[0], 1.0)]),
            base[12:24],
            combine_adapted_weight(base[24:], [(parts[1], 0.5)]),
        ]
    )
    for rows in (slice(0, 36), slice(10, 26), slice(13, 20), slice(3, 36, 7), slice(25, 36, 5)):
        torch.testing.assert_close(applied(change, base, rows), wanted[rows], rtol=1e-14, atol=1e-16)
    assert isinstance(choose_row_merger(change, base.clone), PrecomputedMerger if "lokr" in names else StackedMerger)


@pytest.mark.parametrize("name", ["lora", "loha"])
def test_swapped_and_transposed_weights(name):
    base, adapter = random_adapter(name, (12, 8), 4)
    merged = combine_adapted_weight(base.double(), [(adapter, 1.0)])
    swapped = one_part((12, 8), (adapter, 1.0), swapped=True)
    halves = torch.cat([base[6:], base[:6]]).double()
    torch.testing.assert_close(applied(swapped, halves, slice(2, 9)), torch.cat([merged[6:], merged[:6]])[2:9])
    turned = TensorChange("weight", (ModuleRows("site", 0, 12, ((adapter, 1.0),)),), (8, 12), (8, 12), transposed=True)
    torch.testing.assert_close(applied(turned, base.T.double(), slice(1, 6)), merged.T[1:6])


def test_biases_and_wider_weights():
    _, adapter = random_adapter("lora", (12, 8), 4)
    adapter = adapter.with_tensors(diff_b=torch.randn(12))
    bias = torch.randn(12).double()
    change = TensorChange("bias", (ModuleRows("site", 0, 12, ((adapter, 0.5), (adapter, 2.0))),), (12,), (12,))
    wanted = bias + 2.5 * (compute_adapted_bias(bias, adapter) - bias)
    torch.testing.assert_close(applied(change, bias, slice(0, 1))[0], wanted)
    wide = replace(random_adapter("lora", (12, 11), 4)[1], options={"reshape": True})
    base = torch.randn(12, 8).double()
    change = TensorChange("weight", (ModuleRows("site", 0, 12, ((wide, 1.0),)),), (12, 8), (12, 11))
    block = torch.empty(12, 11).double()
    choose_row_merger(change, base.clone).apply(block, slice(0, 12))
    torch.testing.assert_close(block, combine_adapted_weight(base, [(wide, 1.0)]))


def job_of(folder: Path, base: torch.Tensor, change: TensorChange | None, dtype: torch.dtype) -> PlannedTensor:
    save_tensors(folder / "base.safetensors", {"w": base})
    entry = TensorFile(folder / "base.safetensors").entries["w"]
    job = PlannedTensor(BaseTensorKey("", "w"), entry, dtype, change, path=folder / "out.bin", at=5)
    (folder / "out.bin").write_bytes(b"12345")
    reserve_file_space(folder / "out.bin", 5 + torch.Size(job.shape).numel() * dtype.itemsize)
    return job


def written(job: PlannedTensor) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(job.path.read_bytes()[5:]), dtype=torch.uint8)
    return raw.view(job.dtype).reshape(job.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("block", [8, 40, 2**18])
def test_blocks_of_any_size_write_the_same(tmp_path, monkeypatch, dtype, block):
    base, adapter = random_adapter("lora", (37, 8), 6)
    job = job_of(tmp_path, base.bfloat16(), one_part((37, 8), (adapter, 0.9)), dtype)
    monkeypatch.setattr(stream, "COPY_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(work, "MAX_SURVIVAL_SAMPLE", block)
    run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST), 8)
    wanted = combine_adapted_weight(base.bfloat16().double(), [(adapter, 0.9)])
    assert same_bits(written(job), round_once(wanted, dtype))
    assert job.path.read_bytes()[:5] == b"12345"


@pytest.mark.parametrize("name", ROUNDER_BY_NAME)
def test_threads_and_blocks_do_not_change_a_rounding(tmp_path, monkeypatch, name):
    results = []
    for lanes, block in ((1, 2**18), (3, 64)):
        monkeypatch.setattr(stream, "COPY_BLOCK_ELEMENTS", block)
        monkeypatch.setattr(work, "MAX_SURVIVAL_SAMPLE", block)
        jobs = []
        for n in range(5):
            (tmp_path / f"{lanes}-{n}").mkdir()
            base, adapter = random_adapter("lora", (24, 16), n)
            jobs.append(job_of(tmp_path / f"{lanes}-{n}", base, one_part((24, 16), (adapter, 1.0)), torch.bfloat16))
        manner = RoundingOptions(find_rounder_class(name), seed=4)
        run_in_copy_workers(jobs, lambda lane, job, manner=manner: copy_or_merge_tensor(lane, job, manner), 16, lanes)
        results.append([written(job) for job in jobs])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_stochastic_rounding_depends_on_key_and_seed():
    x = torch.randn(8, 8).double()

    def drawn(key: str, seed: int) -> torch.Tensor:
        narrow = torch.empty(8, 8, dtype=torch.bfloat16)
        StochasticRounder(None, key, seed)(x, narrow)  # type: ignore[arg-type]
        return narrow

    assert same_bits(drawn("a", 1), drawn("a", 1))
    assert not same_bits(drawn("a", 1), drawn("b", 1)) and not same_bits(drawn("a", 1), drawn("a", 2))
    with pytest.raises(UsageError, match="nearest"):
        find_rounder_class("nearst")
    assert find_rounder_class("compensated") is CompensatedRounder


def test_overflow_is_an_error_and_old_infinities_are_not(tmp_path):
    base, adapter = random_adapter("full", (6, 8), 1)
    base[2, 3] = float("inf")
    job = job_of(tmp_path, base, one_part((6, 8), (adapter, 1.0)), torch.float16)
    (outcome,) = run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST), 8)
    assert outcome.nonfinite == 1 and int((~written(job).isfinite()).sum()) == 1
    huge = adapter.with_tensors(diff=torch.full((6, 8), 7e4))
    job = job_of(tmp_path, base, one_part((6, 8), (huge, 1.0)), torch.float16)
    with pytest.raises(NumericsError) as caught:
        run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST), 8)
    assert caught.value.code == "MERGE-OVERFLOW" and caught.value.evidence["count"] == 47
    job = job_of(tmp_path, base, one_part((6, 8), (huge, 1.0)), torch.bfloat16)
    run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST), 8)
    assert int(written(job).isfinite().sum()) == 47


@pytest.mark.parametrize(
    ("relative", "dtype", "kept"),
    [(1e-2, torch.bfloat16, 1.0), (1e-3, torch.bfloat16, 0.53), (1e-4, torch.bfloat16, 0.06), (1e-3, torch.half, 1.0)],
)
def test_survival_is_what_the_format_leaves(tmp_path, relative, dtype, kept):
    base = (0.03 * torch.randn(256, 256)).to(dtype)
    _, adapter = random_adapter("full", (256, 256), 1)
    adapter = adapter.with_tensors(diff=0.03 * relative * torch.randn(256, 256))
    job = job_of(tmp_path, base, one_part((256, 256), (adapter, 1.0)), dtype)
    (found,) = run_in_copy_workers([job], lambda lane, job: survey_tensor(lane, job, NEAREST), 256)
    assert found.kept == pytest.approx(kept, abs=0.02)
    random = RoundingOptions(StochasticRounder)
    (found,) = run_in_copy_workers([job], lambda lane, job: survey_tensor(lane, job, random), 256)
    assert found.kept == pytest.approx(1.0, abs=0.1)


def test_survival_by_hand():
    before = torch.tensor([[1.0, 1.0, 2.0]]).double()
    after = before + torch.tensor([[0.001, 0.01, 0.0]]).double()
    found = compute_delta_survival(before, after, round_once(after, torch.bfloat16))
    assert found.kept == pytest.approx(0.0078125 * 0.01 / (0.01**2 + 0.001**2))
    assert (found.sampled, found.changed, found.subnormal) == (3, 1, 0)
    assert compute_delta_survival(before, before, before).kept == 1.0
    tiny = torch.tensor([[1e-6, 1.0]]).double()
    assert compute_delta_survival(tiny, tiny, tiny.half()).subnormal == 1


@pytest.mark.parametrize("shape", [(1, 5), (2048, 2048), (8192, 2048), (3, 2**18), (7, 20000), (100, 1)])
def test_a_sample_is_small_and_never_empty(shape):
    rows = range(shape[0])[choose_sampled_rows(*shape)]
    assert len(rows) >= 1
    assert len(rows) == 1 or len(rows) * shape[1] <= MAX_SURVIVAL_SAMPLE
    assert len(rows) == shape[0] or shape[0] * shape[1] > MAX_SURVIVAL_SAMPLE


def test_the_first_failure_stops_the_others_and_threads_come_back():
    number = torch.get_num_threads()
    seen, lock = [], threading.Lock()

    def work(lane, item):
        with lock:
            seen.append(item)
        if item == 3:
            raise ValueError("three")
        lane.stop.wait(0.02)
        return item

    assert run_in_copy_workers([1, 2], work, lanes=2) == [1, 2]
    with pytest.raises(ValueError, match="three"):
        run_in_copy_workers(list(range(1000)), work, lanes=2)
    assert len(seen) < 50 and torch.get_num_threads() == number
    assert run_in_copy_workers([], work) == []


def test_a_source_that_shrinks_is_an_error(tmp_path):
    base, adapter = random_adapter("lora", (24, 16), 1)
    for change in (one_part((24, 16), (adapter, 1.0)), None):
        job = job_of(tmp_path, base, change, torch.float32)
        size = job.entry.path.stat().st_size
        with job.entry.path.open("r+b") as file:
            file.truncate(size - 8)
        with pytest.raises(FileError, match="cut off"):
            run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST), 16)
        with pytest.raises(FileError, match="cut off"):
            read_whole_tensor(job.entry)


FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_bits_tell_what_is_finite(dtype):
    """Every bit pattern of 8 and of 16 bits, each among zeros; of wider formats, those around the last number."""
    size = dtype.itemsize
    if size <= 2:
        patterns = torch.arange(256**size).to(torch.uint8 if size == 1 else torch.int32)
        values = (patterns if size == 1 else patterns.to(torch.int16)).view(dtype)
    else:
        last = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
        values = torch.cat([last, -last, last.nextafter(0 * last), last * 2, -last * 2, last * 2 - last * 2, 0 * last])
    for value in values:
        around = torch.zeros(4, dtype=dtype)
        around[2] = value
        assert is_tensor_finite(around) == bool(around.double().isfinite().all()), value
    assert is_tensor_finite(torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("block", [8, 64, 2**18])
@pytest.mark.parametrize("places", [(), (0,), (5, 90), (90, 99), (99,)])
def test_a_copy_finds_the_first_element_that_is_not_finite(tmp_path, monkeypatch, block, places):
    monkeypatch.setattr(stream, "COPY_BLOCK_ELEMENTS", block)
    base = torch.randn(10, 10).half()
    base.view(-1)[list(places)] = float("-inf")
    job = job_of(tmp_path, base, None, torch.float16)
    (outcome,) = run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST))
    assert same_bits(written(job), base)
    assert outcome.nonfinite == len(places) and outcome.copied == outcome.watched == 200
    assert outcome.place == (divmod(places[0], 10) if places else ())


def test_integers_are_copied_unseen(tmp_path):
    job = job_of(tmp_path, torch.arange(12).to(torch.int32), None, torch.int32)
    (outcome,) = run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST))
    assert (outcome.nonfinite, outcome.copied, outcome.watched) == (0, 48, 0)


def test_the_place_is_the_bases_own_where_a_whole_row_is_spoilt(tmp_path):
    base, adapter = random_adapter("lora", (12, 8), 5, magnitude="out")
    base[3, 6] = float("nan")
    job = job_of(tmp_path, base, one_part((12, 8), (adapter, 0.5)), torch.float32)
    (outcome,) = run_in_copy_workers([job], lambda lane, job: copy_or_merge_tensor(lane, job, NEAREST), 8)
    assert int(written(job).isnan().sum()) == 8, "the row's norm is not a number"
    assert (outcome.nonfinite, outcome.place) == (1, (3, 6))
    assert outcome.survival is not None and outcome.survival.kept == pytest.approx(1.0, abs=1e-3)
