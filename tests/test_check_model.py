"""finitune check of a model: what its header says against what its tensors are, and what fp16 would do to them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.files import scan as scanning
from finitune.files.fp16_loss import Fp16Loss, Fp16LossCounter, count_fp16_loss, count_fp16_loss_slowly
from finitune.files.scan import scan_ranges
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.models.anima.load import load_folder
from finitune.models.pico import get_pico_folder
from finitune.report import Finding, Level, Report
from finitune.verbs import check
from finitune.verbs.check.request import Request
from tests.anima_files import save_three_files

EIGHT = torch.float8_e4m3fn


def checked(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Report:
    save_tensors(path, tensors, metadata)
    return check.run(Request(paths=(path,)))


def by_code(report: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def noise(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("three")
    save_three_files(load_folder(get_pico_folder()), place)
    return place


# --- what fp16 loses --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    binade=st.integers(-40, 20),
    seed=st.integers(0, 999),
)
def test_what_fp16_loses_is_what_the_slow_twin_finds(dtype: torch.dtype, binade: int, seed: int):
    x = (torch.randn(500, generator=torch.Generator().manual_seed(seed)) * 2.0**binade).to(dtype)
    x[::7], x[3], x[4] = 0, math.inf, math.nan
    assert count_fp16_loss(x) == count_fp16_loss_slowly(x)


def test_known_losses():
    values = torch.tensor([1.0, 0.0, 2.0**-14, 2.0**-24, 2.0**-26, 1.5 * 2.0**-24, -(1 + 2.0**-7) * 2.0**-17, 1e6])
    assert count_fp16_loss(values.bfloat16()) == Fp16Loss(size=8, flushed=1, worn=1)
    exact = torch.tensor([-(1 + 2.0**-7) * 2.0**-17, 2.0**-20])
    assert count_fp16_loss(exact.bfloat16()) == Fp16Loss(size=2), "bf16 is kept whole down to 2**-17"


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scanning, "SCAN_PIECE_BYTES", 64)
    tensors = {"a": noise(40, 9, scale=1e-6).bfloat16(), "b": noise(7, 13, scale=1e-7), "c": noise(3, 3).half()}
    save_tensors(tmp_path / "m.safetensors", tensors)
    halving = Fp16LossCounter()
    scan_ranges(TensorFile(tmp_path / "m.safetensors"), look=halving)
    assert halving.losses == {name: count_fp16_loss_slowly(tensors[name]) for name in "ab"}
    assert halving.losses["a"].lost > 0


def test_small_weights_are_counted_and_judged_by_the_worst_tensor(tmp_path: Path):
    tiny, usual = noise(8, 8, scale=1e-7).bfloat16(), noise(64, 64).bfloat16()
    found = by_code(checked(tmp_path / "m.safetensors", {"a.weight": usual, "b.weight": tiny}))["WEIGHTS-LOST-IN-FP16"]
    assert found.level is Level.WARNING and found.subject == "b.weight"
    exact = (tiny.half().float() - tiny.float()).norm() / tiny.float().norm()
    assert found.evidence["relative_error"] == pytest.approx(float(exact), rel=1e-4)
    assert found.evidence["numbers"] == (count_fp16_loss_slowly(usual) + count_fp16_loss_slowly(tiny)).lost
    harmless = by_code(checked(tmp_path / "n.safetensors", {"a.weight": noise(200, 200).bfloat16()}))
    assert harmless["WEIGHTS-LOST-IN-FP16"].level is Level.NOTE


def test_constant_weights_are_told_and_norms_of_ones_are_not(tmp_path: Path):
    tensors = {
        "norm.weight": torch.ones(8),
        "norm2.weight": torch.ones(1, 8),
        "a.weight": torch.full((4, 4), 0.5),
        "b.weight": torch.zeros(4, 4),
        "c.weight": noise(4, 4),
    }
    report = checked(tmp_path / "m.safetensors", tensors)
    found = by_code(report)
    assert found["WEIGHTS-CONSTANT"].evidence["values"] == {"a.weight": 0.5} and report.ok
    assert found["WEIGHTS-ZERO"].evidence["tensors"] == ["b.weight"] and found["WEIGHTS-ZERO"].level is Level.NOTE
    assert report.figures["constant_tensors"] == 2


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_the_family_is_known_by_its_tensors_and_widths(three: Path):
    figures = check.run(Request(paths=(three / "anima.safetensors",))).figures
    evidence = figures["family_evidence"]
    assert figures["family"] == "anima" and figures["prefix"] == "net."
    assert figures["parts"] == ["text_conditioner", "transformer"]
    assert isinstance(evidence, dict) and evidence["widths_of_its_own"] > 0, "pico is smaller than what was published"
    assert figures["dtype_shares"] == {"BF16": 1.0}


@pytest.mark.parametrize(
    ("name", "metadata", "stated"),
    [
        ("m_fp16.safetensors", None, "F16"),
        ("m.safetensors", {"modelspec.dtype": "float16"}, "F16"),
        ("m.safetensors", {"ss_save_precision": "bf16"}, "BF16"),
        ("m-float8_e4m3fn.safetensors", None, "F8_E4M3"),
    ],
)
def test_a_stated_precision_is_compared_with_the_tensors(tmp_path: Path, name: str, metadata, stated: str):
    found = by_code(checked(tmp_path / name, {"a.weight": noise(8, 8)}, metadata))["MODEL-PRECISION-MISSTATED"]
    assert found.evidence["stated"] == stated and found.evidence["shares"] == {"F32": 1.0}
    assert found.level is Level.WARNING


def test_a_true_statement_is_good_and_none_is_told(tmp_path: Path):
    mixed = {"a.weight": noise(64, 64).bfloat16(), "norm.weight": torch.ones(64)}
    assert not {code for code in by_code(checked(tmp_path / "m-bf16.safetensors", mixed)) if "PRECISION" in code}
    silent = by_code(checked(tmp_path / "m.safetensors", mixed))
    assert silent["MODEL-PRECISION-UNSTATED"].level is Level.NOTE


def test_the_settings_beside_a_component_state_it_too(tmp_path: Path):
    place = tmp_path / "m" / "vae"
    place.mkdir(parents=True)
    save_tensors(place / "model.safetensors", {"decoder.conv_in.weight": noise(4, 4)})
    (place / "config.json").write_text(json.dumps({"torch_dtype": "torch.bfloat16"}))
    found = by_code(check.run(Request(paths=(tmp_path / "m",))))["MODEL-PRECISION-MISSTATED"]
    assert found.evidence["stated_by"] == "config.json torch_dtype"


def codes_fp8(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Finding]:
    return {code: f for code, f in by_code(checked(path, tensors)).items() if code.startswith("FP8")}


def test_scales_of_8_bit_weights_are_there_or_missed(tmp_path: Path):
    a, b = noise(8, 8).to(EIGHT), noise(8, 8).to(EIGHT)
    scale = torch.tensor(0.5)
    good = {"a.weight": a, "a.scale_weight": scale, "b.weight": b, "b.weight_scale": scale}
    assert not codes_fp8(tmp_path / "m.safetensors", good)
    half = codes_fp8(tmp_path / "n.safetensors", {name: t for name, t in good.items() if name != "b.weight_scale"})
    assert half["FP8-SCALES-MISSING"].subject == "b.weight" and half["FP8-SCALES-MISSING"].evidence["missing"] == 1
    marked = {"a.weight": a, "scaled_fp8": torch.zeros(2).to(EIGHT)}
    report = checked(tmp_path / "o.safetensors", marked)
    assert by_code(report)["FP8-SCALES-MISSING"].level is Level.ERROR and report.exit_code == 1
    assert list(codes_fp8(tmp_path / "p.safetensors", {"a.weight": a})) == ["FP8-UNSCALED"]


# --- which part it is -------------------------------------------------------------------------------------------------


def test_a_vae_in_the_place_of_the_denoiser_and_the_other_way_round(tmp_path: Path, three: Path):
    shutil.copytree(get_pico_folder(), tmp_path / "m")
    weights = tmp_path / "m" / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(tmp_path / "m" / "vae" / "diffusion_pytorch_model.safetensors", weights)
    found = by_code(check.run(Request(paths=(tmp_path / "m",))))["MODEL-WRONG-PART"]
    assert found.level is Level.ERROR and found.evidence["called"] == "transformer"
    assert found.evidence["holds"] == "the VAE"
    shutil.copy(three / "anima.safetensors", tmp_path / "anima_vae.safetensors")
    found = by_code(check.run(Request(paths=(tmp_path / "anima_vae.safetensors",))))["MODEL-WRONG-PART"]
    assert found.level is Level.WARNING and "denoiser" in found.message
    for name in ("vae", "anima", "qwen3"):
        assert "MODEL-WRONG-PART" not in by_code(check.run(Request(paths=(three / f"{name}.safetensors",))))


def test_parts_that_are_missing_are_named(tmp_path: Path, three: Path):
    shutil.copytree(get_pico_folder(), tmp_path / "m", ignore=shutil.ignore_patterns("vae", "scheduler"))
    found = by_code(check.run(Request(paths=(tmp_path / "m",))))["MODEL-PARTS-MISSING"]
    assert found.evidence["missing"] == ["scheduler", "vae"] and found.level is Level.ERROR
    bare = {name: t for name, t in TensorFile(three / "anima.safetensors").tensors() if "llm_adapter" not in name}
    report = checked(tmp_path / "anima.safetensors", bare)
    assert by_code(report)["MODEL-PARTS-MISSING"].evidence["missing"] == ["text_conditioner"]
    assert "MODEL-PARTS-MISSING" not in by_code(check.run(Request(paths=(get_pico_folder(),))))


def test_a_file_of_two_spellings_is_told(tmp_path: Path, three: Path):
    tensors = dict(TensorFile(three / "anima.safetensors").tensors())
    twice = {**tensors, "x_embedder.proj.1.weight": tensors["net.x_embedder.proj.1.weight"]}
    found = by_code(checked(tmp_path / "m.safetensors", twice))["MODEL-PREFIX-MIXED"]
    assert found.evidence["first"] == ["net.x_embedder.proj.1.weight"]
    mixed = {"net.a.weight": noise(4, 4), "model.diffusion_model.b.weight": noise(4, 4)}
    assert "MODEL-PREFIX-MIXED" in by_code(checked(tmp_path / "n.safetensors", mixed))
    assert "MODEL-PREFIX-MIXED" not in by_code(check.run(Request(paths=(three / "anima.safetensors",))))


def test_a_model_of_no_family_says_what_it_holds(three: Path):
    found = by_code(check.run(Request(paths=(three / "vae.safetensors",))))["MODEL-FAMILY-UNKNOWN"]
    assert "the VAE" in found.message and found.level is Level.NOTE
