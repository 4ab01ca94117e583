"""finitune check of a cache: whether each entry is what was written, what made it, and what is left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finitune.datasets.cache import CacheSource, EncoderCache, EncoderCaches
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.models.anima.encode import AnimaEncoders
from finitune.models.anima.load import load_folder
from finitune.models.pico import get_pico_folder
from finitune.report import Finding, Level, Report
from finitune.verbs import check
from finitune.verbs.check.request import Request

IDENTITY = {"encoder": "e" * 64, "level": "context"}


def filled(place: Path, count: int = 3, identity: dict[str, str] | None = None) -> EncoderCache:
    cache = EncoderCache(place, "texts", identity or IDENTITY)
    for number in range(count):
        cache.put(CacheSource.of(f"caption {number}", number), {"context": torch.randn(2, 3)})
    return cache


def checked(place: Path, **options) -> Report:
    return check.run(Request(paths=(place,), **options))


def by_code(report: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def test_a_good_cache_is_counted(tmp_path: Path):
    filled(tmp_path)
    save_tensors(EncoderCache(tmp_path, "latents", IDENTITY).folder / "x.safetensors", {"x": torch.ones(1)})
    report = checked(tmp_path)
    assert report.ok and not report.findings, "a file of another name is no entry"
    assert report.figures["entries"] == {"texts": 3} and report.figures["damaged"] == 0
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert report.figures["bytes"] == size
    (row,) = report.tables[0].rows
    assert row[0] == "texts" and "encoder eeeeeeeeeeee" in row[3]


def spoil(path: Path, how: str) -> None:
    """Damage one entry."""
    content = path.read_bytes()
    if how == "cut off":
        path.write_bytes(content[:-3])
    elif how == "a changed number":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    elif how == "not finite":
        file = TensorFile(path)
        save_tensors(path, {"context": torch.full((2, 3), float("nan"))}, file.metadata)
    elif how == "another's name":
        path.rename(path.with_name(f"{'0' * 32}{path.name[32:]}"))
    elif how == "another maker":
        path.rename(path.with_name(f"{path.name[:33]}{'0' * 16}.safetensors"))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "how", ["cut off", "a changed number", "not finite", "another's name", "another maker", "empty"]
)
def test_an_entry_that_cannot_be_used_is_an_error(tmp_path: Path, how: str):
    cache = filled(tmp_path)
    spoil(sorted(cache.folder.iterdir())[1], how)
    report = checked(tmp_path)
    found = by_code(report)["CACHE-DAMAGED"]
    assert report.exit_code == 1 and found.evidence["count"] == 1 and report.figures["damaged"] == 1
    assert checked(tmp_path, fix=True, yes=True).ok and len(list(cache.folder.glob("*.safetensors"))) == 2


def test_entries_of_several_makers_are_told_apart(tmp_path: Path):
    filled(tmp_path)
    filled(tmp_path, 2, {**IDENTITY, "encoder": "f" * 64})
    report = checked(tmp_path)
    found = by_code(report)["CACHE-SEVERAL-MAKERS"]
    assert report.ok and found.level is Level.NOTE and "encoder was" in found.message
    assert [row[1] for row in report.tables[0].rows] in (["3", "2"], ["2", "3"])


def test_what_a_killed_program_left_is_told_and_taken_away(tmp_path: Path):
    cache = filled(tmp_path)
    (cache.folder / ".partial-0123abcd-x.safetensors").write_bytes(b"half")
    report = checked(tmp_path)
    assert report.ok and report.figures["left_over"] == 1 and by_code(report)["CACHE-LEFT-OVER"].evidence["bytes"] == 4
    report = checked(tmp_path, fix=True, yes=True)
    assert report.figures["left_over"] == 0 and "FIX-DONE" in by_code(report)


def test_entries_are_compared_with_the_model_that_is_named(tmp_path: Path):
    parts = load_folder(get_pico_folder())
    for module in (parts.vae, parts.text_encoder, parts.text_conditioner):
        module.float()
    own = EncoderCaches.beside(tmp_path, AnimaEncoders.of(parts, "states"))
    own.texts.put(CacheSource.of("a caption", 1), {"states": torch.randn(2, 3)})
    own.latents.put(CacheSource.of("a picture", 2), {"latents": torch.randn(1, 1, 2, 2)})
    report = checked(tmp_path, model="pico-anima")
    assert report.ok and report.figures["stale"] == 0 and not report.findings
    filled(tmp_path, 1)
    report = checked(tmp_path, model="pico-anima")
    found = by_code(report)["CACHE-STALE"]
    assert report.figures["stale"] == 1 and found.level is Level.WARNING and "encoder was eee" in found.message
