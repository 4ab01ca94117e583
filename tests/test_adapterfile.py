"""Adapter files put in place: all of their files or none, with what each verb has to say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finitune.adapters import AdapterSet, SiteAdapter
from finitune.adapters.core import AmbiguityOptions
from finitune.errors import AdapterError, FileError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import get_scratch_folder
from finitune.merging.adapterfile import (
    ExpectedAdapter,
    OutputFormat,
    open_adapter,
    put_adapter,
    put_written_adapter,
    resolve_unknown_scale,
)
from finitune.namings.metadata import Receipt
from finitune.namings.write import write_adapter
from finitune.report import Level, Report
from finitune.verbs import resize
from tests.adapter_files import lora, noise
from tests.case_files import saved
from tests.test_convert import ANIMA, Q

TOKEN = {"<cat>": noise(3, 4)}


def adapter(**embeddings: torch.Tensor) -> AdapterSet:
    tensors = {"up": noise(12, 2), "down": noise(2, 8)}
    return AdapterSet({Q: SiteAdapter("lora", tensors, 3.0)}, embeddings)


def put(path: Path, spelling: str, one: AdapterSet) -> Report:
    report = Report("test")
    put_adapter(path, one, ANIMA, OutputFormat(spelling), Receipt("test"), report)
    return report


@pytest.mark.parametrize("spelling", ["kohya", "diffusers", "peft"])
def test_every_spelling_is_put_with_all_of_its_files(tmp_path: Path, spelling: str):
    target = tmp_path / "new" / ("folder" if spelling == "peft" else "a.safetensors")
    report = put(target, spelling, adapter(**TOKEN))
    wanted = {"kohya": {"adapter"}, "diffusers": {"adapter", "embeddings"}, "peft": {"adapter", "config", "embeddings"}}
    assert set(report.artifacts) == wanted[spelling]
    assert sorted(map(str, (p for p in (tmp_path / "new").rglob("*") if p.is_file()))) == sorted(
        report.artifacts.values()
    )
    assert report.figures["max_delta_error"] == 0
    assert report.figures["bytes"] == Path(report.artifacts["adapter"]).stat().st_size
    again = Report("test")
    source = open_adapter(target, again)
    assert source.reading.adapter[Q].alpha == 3.0 and source.path == target
    assert source.receipt == (target.name, TensorFile(report.artifacts["adapter"]).fingerprint())
    if "embeddings" in report.artifacts:
        assert torch.equal(TensorFile(report.artifacts["embeddings"]).read("<cat>"), TOKEN["<cat>"])
        assert [finding.code for finding in report.findings] == ["EMBEDDINGS-APART"]


@pytest.mark.parametrize("spelling", ["kohya", "peft"])
def test_nothing_is_left_of_what_does_not_read_back(tmp_path: Path, spelling: str):
    one = adapter()
    other = AdapterSet({Q: replace(one[Q], alpha=6.0)})
    written = write_adapter(one, ANIMA, spelling)
    with pytest.raises(FileError) as caught:
        put_written_adapter(tmp_path / "new" / "a", written, ExpectedAdapter(other, ANIMA), Report("test"))
    assert caught.value.code == "FILE-READ-BACK" and caught.value.evidence["error"] == pytest.approx(0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_keeps_what_else_it_holds(tmp_path: Path):
    (tmp_path / "README.md").write_text("mine")
    put(tmp_path, "peft", adapter())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_tokens_come_along_when_a_file_is_resized(tmp_path: Path):
    put(tmp_path / "a.safetensors", "diffusers", adapter())
    file = TensorFile(tmp_path / "a.safetensors")
    saved(tmp_path / "b.safetensors", dict(file.tensors()) | TOKEN, file.metadata)
    report = resize.run(resize.Request(file=tmp_path / "b.safetensors", rank=1, out=tmp_path / "c.safetensors"))
    assert report.ok and torch.equal(TensorFile(report.artifacts["embeddings"]).read("<cat>"), TOKEN["<cat>"])


def test_a_reading_is_settled_only_where_its_scale_is_open(tmp_path: Path):
    put(tmp_path / "a.safetensors", "kohya", adapter())
    reading = open_adapter(tmp_path / "a.safetensors", Report("test")).reading
    assert resolve_unknown_scale(reading, 7.0) is reading and resolve_unknown_scale(reading, None) is reading


def test_what_is_stated_stays_beside_what_is_not(tmp_path: Path):
    words = "lora_A.weight lora_B.weight"
    one, other = "transformer.transformer_blocks.0.attn1.to_q", "transformer.transformer_blocks.0.attn1.to_k"
    config = {"transformer.r": 2, "transformer.alpha_pattern": {"attn1.to_q": 5.0}}
    tensors = lora(one, words=words) | lora(other, words=words)
    path = saved(tmp_path / "a.safetensors", tensors, {"lora_adapter_metadata": json.dumps(config)})
    report = Report("test")
    with pytest.raises(AdapterError, match="cannot be used"):
        open_adapter(path, report)
    found = open_adapter(path, Report("test"), answers=AmbiguityOptions(scale=0.5)).reading
    assert (found.adapter[one].alpha, found.adapter[other].alpha) == (5.0, 1.0)
    assert [f.level for f in report.findings if f.code == "ADAPTER-SCALE-UNKNOWN"] == [Level.ERROR]


def test_what_a_killed_run_left_is_named_and_removed(tmp_path: Path):
    left = tmp_path / ".partial-0123abcd-x.safetensors"
    left.write_bytes(b"half")
    get_scratch_folder(left).mkdir()
    (get_scratch_folder(left) / "x.safetensors").write_bytes(b"more")
    others = tmp_path / ".partial-0123abcd-y.safetensors"
    others.write_bytes(b"another file's")
    report = put(tmp_path / "x.safetensors", "kohya", adapter())
    (finding,) = [one for one in report.findings if one.code == "FILE-STRAY"]
    assert finding.subject == str(left) and finding.evidence == {"size_bytes": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, "x.safetensors"]
