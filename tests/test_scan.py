"""Ranges of whole checkpoints: the fast way finds what the slow one finds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from finitune.errors import FileError
from finitune.files import scan as scanning
from finitune.files.scan import scan_ranges, scan_ranges_slowly
from finitune.files.tensorfile import NonfiniteElements, TensorFile
from finitune.files.writer import save_tensors

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def file_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorFile:
    save_tensors(folder / "x.safetensors", tensors)
    return TensorFile(folder / "x.safetensors")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_the_slow_twin(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scanning, "SCAN_PIECE_BYTES", 64)  # many pieces, the last one short
    tensors = {f"t{n}": (torch.randn(n, 13) * 2**n).to(dtype) for n in range(5)}
    tensors["count"] = torch.arange(3)
    file = file_of(tmp_path, tensors)
    assert set(scan_ranges(file)) == {f"t{n}" for n in range(1, 5)}
    assert scan_ranges(file) == scan_ranges_slowly(file)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 50, 99])
def test_one_nan_anywhere_is_found_and_counted(dtype: torch.dtype, place: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(scanning, "SCAN_PIECE_BYTES", 64)
    values = torch.randn(100)
    values[place] = math.nan
    (found,) = scan_ranges(file_of(tmp_path, {"x": values.to(dtype)})).values()
    assert math.isnan(found.low) and math.isnan(found.amax)
    assert found.nonfinite == NonfiniteElements(nan=1, inf=0, size=100)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_keeps_its_sign(sign: int, tmp_path: Path):
    values = torch.tensor([1.0, sign * math.inf, 2.0]).to(torch.float8_e5m2)
    (found,) = scan_ranges(file_of(tmp_path, {"x": values})).values()
    assert (found.high if sign > 0 else found.low) == sign * math.inf and found.amax == math.inf
    assert found.nonfinite == NonfiniteElements(nan=0, inf=1, size=3)


def test_progress_counts_every_byte(tmp_path: Path):
    file = file_of(tmp_path, {"a": torch.randn(3, 5), "b": torch.randn(7).half()})
    told: list[int] = []
    scan_ranges(file, told.append)
    assert sum(told) == file.size_bytes


def test_a_file_that_shrinks_is_an_error(tmp_path: Path):
    file = file_of(tmp_path, {"a": torch.randn(1000)})
    with file.path.open("r+b") as stream:
        stream.truncate(2000)
    with pytest.raises(FileError) as error:
        scan_ranges(file)
    assert error.value.code == "FILE-TRUNCATED"
