"""Scales from the field (SCL-01 to SCL-09): each report's own input, and the number that is right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finitune.adapters import SiteAdapter
from finitune.adapters.core import Magnitude
from finitune.adapters.weight import compute_adapted_weight, compute_weight_delta
from finitune.files.tensorfile import TensorFile
from finitune.namings.read import read_adapter
from finitune.verbs import check, convert, merge
from tests.adapter_files import lora, noise
from tests.case_files import by_code, saved, scaled, told

MODULE = "lora_unet_blocks_0_self_attn_q_proj"
SITE = "transformer.transformer_blocks.0.attn1.to_q"
KEY = "net.blocks.0.self_attn.q_proj"
SPELLINGS = ("kohya", "comfy", "diffusers", "peft")


def product(tensors: dict[str, Tensor], module: str = MODULE) -> Tensor:
    up, down = (tensors[f"{module}.lora_{side}.weight"].double() for side in ("up", "down"))
    return up @ down


def change_in(path: Path, *shape: int) -> Tensor:
    """The change of a weight of zeros that a file makes, fp64."""
    path = path / "adapter_model.safetensors" if path.is_dir() else path
    return compute_weight_delta(torch.zeros(shape, dtype=torch.float64), read_adapter(TensorFile(path)).adapter[SITE])


def merged(base: Path, *adapters: object, out: Path, **options) -> merge.Report:
    return merge.run(merge.Request(model=str(base), adapters=tuple(map(str, adapters)), out=out, **options))


# --- SCL-01: no alpha ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", SPELLINGS)
def test_scl_01_a_missing_alpha_is_the_rank_in_every_spelling(tmp_path: Path, to: str):
    tensors = lora(MODULE, 32, 32, 16)
    source, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / "out"
    code, report = told("convert", source, "--to", to, "-o", out)
    assert code == 0 and "ADAPTER-NO-ALPHA" in by_code(report)
    file = TensorFile(out / "adapter_model.safetensors" if to == "peft" else out)
    assert {float(file.read(key)) for key in file if key.endswith("alpha")} <= {16.0}
    assert torch.equal(change_in(out, 32, 32), product(tensors))


def test_scl_01_alpha_at_some_modules_only_is_told_apart(tmp_path: Path):
    other = MODULE.replace("q_proj", "k_proj")
    tensors = lora(MODULE, 32, 32, 16) | scaled(other, 32, 32, 16, alpha=4.0)
    code, report = told("check", saved(tmp_path / "a.safetensors", tensors))
    assert code == 0
    assert by_code(report)["ADAPTER-NO-ALPHA"]["evidence"]["modules"] == 1
    assert by_code(report)["ADAPTER-SCALE-SOURCE"]["evidence"] == {"alpha tensors": 1}


@pytest.mark.parametrize("alpha", [0.0, -4.0, math.nan])
def test_scl_01_an_alpha_that_cannot_be_meant_is_refused_by_every_verb(tmp_path: Path, alpha: float):
    source, out = saved(tmp_path / "a.safetensors", scaled(MODULE, 32, 32, 16, alpha=alpha)), tmp_path / "out"
    base = saved(tmp_path / "m.safetensors", {f"{KEY}.weight": noise(32, 32)})
    for words in (("check", source), ("convert", source, "--to", "comfy", "-o", out)):
        code, report = told(*words)
        said = by_code(report)["ADAPTER-ALPHA"]
        assert code == 1 and said["subject"] == MODULE and said["remedy"] and said["evidence"]["rank"] == 16
    report = merged(base, source, out=out.with_suffix(".safetensors"), allow_unmatched=True)
    assert report.exit_code == 1 and sorted(tmp_path.iterdir()) == [source, base]


def test_scl_01_the_remedy_for_alpha_0_names_its_option(tmp_path: Path):
    source = saved(tmp_path / "a.safetensors", scaled(MODULE, 32, 32, 16, alpha=0.0))
    assert "--zero-alpha" in by_code(told("check", source)[1])["ADAPTER-ALPHA"]["remedy"]


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ({f"{MODULE}.alpha": torch.tensor(0.0)}, {"zero_alpha": "rank"}),
        ({f"{MODULE}.dora_scale": torch.ones(8)}, {"dora_side": "out"}),
    ],
)
def test_scl_01_scl_07_merge_takes_the_answers_that_it_asks_for(tmp_path: Path, more, answer):
    source = saved(tmp_path / "a.safetensors", lora(MODULE, 8, 8) | more)
    base = saved(tmp_path / "m.safetensors", {f"{KEY}.weight": noise(8, 8)})
    assert merged(base, source, out=tmp_path / "out.safetensors", **answer).ok


# --- SCL-03: parts trained apart, saved as one -----------------------------------------------------------------------

QKV = "lora_unet_double_blocks_0_img_attn_qkv"
PARTS = [noise(32, 4, seed=n) for n in range(3)]
NEIGHBOURS = {
    k: t
    for name in ("lora_unet_double_blocks_0_img_attn_proj", "lora_unet_double_blocks_0_img_mlp_0")
    for k, t in scaled(name, 32, 32, 4, alpha=4.0).items()
}


def split_trained(alpha: float) -> dict[str, Tensor]:
    fused = {"lora_up.weight": torch.block_diag(*PARTS), "lora_down.weight": noise(12, 32)}
    return {f"{QKV}.{role}": t for role, t in fused.items()} | {f"{QKV}.alpha": torch.tensor(alpha)} | NEIGHBOURS


def test_scl_03_parts_saved_as_one_are_seen_and_not_mended_unasked(tmp_path: Path):
    source, out = saved(tmp_path / "a.safetensors", split_trained(4.0)), tmp_path / "b.safetensors"
    said = by_code(told("check", source)[1])["ADAPTER-SPLIT-SCALE"]
    assert said["level"] == "warning" and said["subject"] == QKV
    assert (said["evidence"]["right alpha"], said["evidence"]["usual rank"]) == (12.0, 4)
    code, report = told("convert", source, "--to", "kohya", "--model", "flux", "-o", out)
    assert code == 0 and "ADAPTER-SPLIT-SCALE" in by_code(report)
    assert float(TensorFile(out).read(f"{QKV}.alpha")) == 4.0
    fixed = saved(tmp_path / "c.safetensors", split_trained(said["evidence"]["right alpha"]))
    assert "ADAPTER-SPLIT-SCALE" not in by_code(told("check", fixed)[1])
    adapter = read_adapter(TensorFile(fixed)).adapter
    down = noise(12, 32).double().split(4)
    for part, up, factor in zip("qkv", PARTS, down, strict=True):
        site = adapter[f"transformer.transformer_blocks.0.attn.to_{part}"]
        delta = compute_weight_delta(torch.zeros(32, 32, dtype=torch.float64), site)
        torch.testing.assert_close(delta, up.double() @ factor)


def test_scl_03_a_dense_layer_of_that_rank_is_not_blamed(tmp_path: Path):
    dense = scaled(QKV, 96, 32, 12, alpha=4.0) | NEIGHBOURS
    assert "ADAPTER-SPLIT-SCALE" not in by_code(told("check", saved(tmp_path / "a.safetensors", dense))[1])


def test_scl_03_convert_mends_it_when_it_is_asked_to(tmp_path: Path):
    source, out = saved(tmp_path / "a.safetensors", split_trained(4.0)), tmp_path / "b.safetensors"
    assert "--fix-split-scale" in by_code(told("check", source)[1])["ADAPTER-SPLIT-SCALE"]["remedy"]
    words = ("convert", source, "--to", "kohya", "--model", "flux", "-o", out, "--fix-split-scale")
    assert told(*words)[0] == 0
    back = read_adapter(TensorFile(out)).adapter
    for part, up, factor in zip("qkv", PARTS, noise(12, 32).double().split(4), strict=True):
        site = back[f"transformer.transformer_blocks.0.attn.to_{part}"]
        delta = compute_weight_delta(torch.zeros(32, 32, dtype=torch.float64), site)
        torch.testing.assert_close(delta, up.double() @ factor)
    alone = back["transformer.transformer_blocks.0.attn.to_out.0"]
    assert (alone.alpha, alone.tensors["down"].shape[0]) == (4.0, 4)


# --- SCL-04: alpha outside of the tensors ----------------------------------------------------------------------------

PEFT_MODULE = "base_model.model.transformer_blocks.0.attn1.to_q"


def peft_folder(folder: Path, alpha_tensor: float | None = None, **config: object) -> Path:
    folder.mkdir()
    tensors = lora(PEFT_MODULE, 16, 8, 8, words="lora_A.weight lora_B.weight")
    if alpha_tensor is not None:
        tensors[f"{PEFT_MODULE}.alpha"] = torch.tensor(alpha_tensor)
    saved(folder / "adapter_model.safetensors", tensors)
    if config:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return folder


@pytest.mark.parametrize("to", SPELLINGS)
@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 16 / math.sqrt(8))])
def test_scl_04_the_configured_scale_arrives_in_every_spelling(tmp_path: Path, to: str, rslora: bool, scale: float):
    source, out = peft_folder(tmp_path / "p", r=8, lora_alpha=16, use_rslora=rslora), tmp_path / "out"
    code, report = told("convert", source, "--to", to, "--model", "anima", "-o", out)
    assert code == 0 and by_code(report)["ADAPTER-SCALE-SOURCE"]["evidence"]["adapter_config.json"] == 1
    file = TensorFile(source / "adapter_model.safetensors")
    up, down = (file.read(f"{PEFT_MODULE}.lora_{side}.weight").double() for side in "BA")
    torch.testing.assert_close(change_in(out, 16, 8), scale * up @ down, rtol=1e-6, atol=1e-6)


def test_scl_04_a_scale_that_nothing_states_is_said_to_be_unknown(tmp_path: Path):
    """A warning where it is only looked at; where a number depends on it, an error that no leave forgives."""
    source, out = peft_folder(tmp_path / "p"), tmp_path / "out"
    convert = ("convert", source, "--to", "kohya", "--model", "anima", "-o", out, "--allow-unmatched")
    for words, level, wanted in ((("check", source), "warning", 0), (convert, "error", 1)):
        code, report = told(*words)
        said = by_code(report)["ADAPTER-SCALE-UNKNOWN"]
        assert (code, said["level"]) == (wanted, level)
        assert "adapter_config.json" in said["remedy"] and "--scale" in said["remedy"]
    assert not out.exists()


@pytest.mark.parametrize("words", [PEFT_MODULE, "transformer.transformer_blocks.0.attn1.to_q"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_scl_04_a_scale_that_a_person_states_is_written(tmp_path: Path, words: str, scale: float):
    tensors = lora(words, 16, 8, 8, words="lora_A.weight lora_B.weight")
    source = saved(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    request = {"file": source, "to": "kohya", "model": "anima", "out": tmp_path / "b.safetensors"}
    refused = convert.run(convert.Request(**request))
    assert {f.code for f in refused.findings if f.level.value == "error"} == {
        "ADAPTER-SCALE-UNKNOWN",
        "ADAPTER-REFUSED",
    }
    report = convert.run(convert.Request(**request, scale=scale))
    (said,) = [finding for finding in report.findings if finding.code == "ADAPTER-SCALE-UNKNOWN"]
    assert report.ok and said.level.value == "note" and f"{scale:g}" in said.message
    up, down = (tensors[f"{words}.lora_{side}.weight"].double() for side in "BA")
    torch.testing.assert_close(change_in(request["out"], 16, 8), scale * up @ down)
    assert {finding.code for finding in check.run(check.Request(paths=(source,), scale=scale)).findings} >= {said.code}


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_scl_04_a_scale_that_none_can_be_is_wrong_usage(tmp_path: Path, scale: float):
    report = check.run(check.Request(paths=(peft_folder(tmp_path / "p"),), scale=scale))
    assert report.exit_code == 2 and report.findings[-1].code == "SCALE-OUT-OF-RANGE"


def test_scl_04_a_merge_asks_for_the_scale_too(tmp_path: Path):
    name = "transformer.transformer_blocks.0.attn1.to_q"
    tensors, weight = lora(name, 16, 8, 8, words="lora_A.weight lora_B.weight"), noise(16, 8)
    source = saved(tmp_path / "a.safetensors", tensors)
    base, out = saved(tmp_path / "m.safetensors", {f"{KEY}.weight": weight}), tmp_path / "out.safetensors"
    for target in (base, source):
        refused = merged(target, source, out=out, allow_unmatched=True)
        assert refused.exit_code == 1 and {f.code for f in refused.findings} >= {"ADAPTER-SCALE-UNKNOWN"}
    assert not out.exists()
    assert merged(base, source, out=out, scale=0.5).ok
    up, down = (tensors[f"{name}.lora_{side}.weight"] for side in "BA")
    torch.testing.assert_close(TensorFile(out).read(f"{KEY}.weight"), weight + 0.5 * up @ down)


def test_scl_04_a_stated_scale_is_not_overruled(tmp_path: Path):
    source, out = peft_folder(tmp_path / "p", r=8, lora_alpha=16), tmp_path / "out.safetensors"
    assert convert.run(convert.Request(file=source, to="kohya", model="anima", out=out, scale=5.0)).ok
    assert float(TensorFile(out).read(f"{MODULE}.alpha")) == 16


def test_scl_04_two_scales_that_differ_are_both_named(tmp_path: Path):
    source, out = peft_folder(tmp_path / "p", 4.0, r=8, lora_alpha=16), tmp_path / "out"
    for words in (("check", source), ("convert", source, "--to", "kohya", "-o", out)):
        code, report = told(*words)
        said = by_code(report)["ADAPTER-SCALE-CONFLICT"]["evidence"]
        assert code == 1 and (said["alpha tensor"], said["adapter_config.json"]) == (4.0, 16.0)
    assert not out.exists()


# --- SCL-05: small numbers in fp16 -----------------------------------------------------------------------------------


def small(size: float, alpha: float = 2.0) -> dict[str, Tensor]:
    up, down = noise(32, 4) * size, noise(4, 32)
    return {f"{MODULE}.lora_up.weight": up, f"{MODULE}.lora_down.weight": down, f"{MODULE}.alpha": torch.tensor(alpha)}


@pytest.mark.parametrize(("size", "flushed"), [(1e-8, 0.99), (1e-7, 0.2)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_scl_05_factors_are_balanced_before_they_are_narrowed(tmp_path: Path, size: float, flushed: float, dtype: str):
    tensors, out = small(size), tmp_path / "b.safetensors"
    naive = tensors[f"{MODULE}.lora_up.weight"].half()
    assert float((naive == 0).float().mean()) > flushed, "a plain cast loses them"
    source = saved(tmp_path / "a.safetensors", tensors)
    code, report = told("convert", source, "--to", "kohya", "--dtype", dtype, "-o", out)
    assert code == 0 and report["figures"]["flushed_share"] == 0
    bound = 2.0**-9 if dtype == "fp16" else 2.0**-7
    error = (change_in(out, 32, 32) - 0.5 * product(tensors)).norm() / (0.5 * product(tensors)).norm()
    assert float(error) < bound and report["figures"]["narrowing_error"] == pytest.approx(float(error), rel=1e-3)


def test_scl_05_what_cannot_be_balanced_is_counted(tmp_path: Path):
    """2.9e-8 is below half of fp16's least number, 2.99e-8 above."""
    diff = torch.tensor([[2.9e-8], [2.99e-8]]).expand(2, 4).contiguous()
    source, out = saved(tmp_path / "a.safetensors", {f"{MODULE}.diff": diff}), tmp_path / "b.safetensors"
    words = ("convert", source, "--to", "kohya", "--dtype", "fp16", "-o", out)
    code, report = told(*words)
    assert code == 1 and not out.exists()
    said = by_code(report)["CONVERT-LOSSY"]
    assert (said["evidence"]["flushed"], said["evidence"]["nonzero"]) == (4, 8) and "--allow-lossy" in said["remedy"]
    _, report = told(*words, "--allow-lossy")
    assert TensorFile(out).read(f"{MODULE}.diff").float().unique().tolist() == [0.0, 2.0**-24]
    assert report["figures"]["flushed_share"] == 0.5 and by_code(report)["NARROWED"]["level"] == "warning"
    assert report["figures"]["class"] == json.loads(TensorFile(out).metadata["finitune"])["class"] == "lossy"


def test_scl_05_the_rounding_of_the_dtype_is_exact_and_no_rounding_is_lossless(tmp_path: Path):
    source = saved(tmp_path / "a.safetensors", small(1.0) | {f"{MODULE}.diff_b": torch.ones(32)})
    for dtype, klass in (("fp16", "exact"), ("bf16", "exact"), ("fp32", "lossless")):
        out = tmp_path / f"{dtype}.safetensors"
        code, report = told("convert", source, "--to", "kohya", "--dtype", dtype, "-o", out)
        assert code == 0 and report["figures"]["class"] == klass


@pytest.mark.parametrize("flushed", [1, 2])
def test_scl_05_one_number_in_a_hundred_may_sink(tmp_path: Path, flushed: int):
    diff = torch.ones(10, 10)
    diff[0, :flushed] = 1e-8
    source = saved(tmp_path / "a.safetensors", {f"{MODULE}.diff": diff})
    words = ("convert", source, "--to", "kohya", "--dtype", "fp16", "-o", tmp_path / "b.safetensors")
    code, report = told(*words)
    assert (code, report["figures"]["class"]) == ((0, "exact") if flushed == 1 else (1, "lossy"))


def test_scl_05_factors_among_the_subnormals_are_balanced_too(tmp_path: Path):
    """Nothing sinks to zero at 1e-6, but a plain cast keeps four bits of each number."""
    source = saved(tmp_path / "a.safetensors", small(1e-6))
    words = ("convert", source, "--to", "kohya", "--dtype", "fp16", "-o", tmp_path / "b.safetensors")
    code, report = told(*words)
    assert code == 0 and report["figures"]["narrowing_error"] < 2.0**-10


def test_scl_05_a_conversion_that_loses_numbers_is_not_called_lossless(tmp_path: Path):
    source = saved(tmp_path / "a.safetensors", {f"{MODULE}.diff": torch.full((2, 4), 2.9e-8)})
    out = tmp_path / "b.safetensors"
    assert told("convert", source, "--to", "kohya", "--dtype", "fp16", "-o", out)[1]["figures"]["class"] != "lossless"


def test_scl_05_the_overflowing_twin(tmp_path: Path):
    source, out = saved(tmp_path / "a.safetensors", small(1.0, alpha=1e5)), tmp_path / "b.safetensors"
    assert told("convert", source, "--to", "kohya", "--dtype", "fp16", "-o", out)[0] == 0
    assert float(TensorFile(out).read(f"{MODULE}.alpha")) == 1e5
    saved(source, {f"{MODULE}.diff": torch.full((2, 4), 1e5)})
    code, report = told("convert", source, "--to", "kohya", "--dtype", "fp16", "-o", tmp_path / "c.safetensors")
    assert code == 1 and by_code(report)["NARROW-OVERFLOW"]["evidence"]["largest"] == 1e5
    assert sorted(tmp_path.iterdir()) == [source, out]


# --- SCL-07: DoRA ----------------------------------------------------------------------------------------------------


def dora_file(path: Path, shape: tuple[int, ...], module: str = MODULE) -> Path:
    return saved(path, scaled(module, 8, 8, 2, alpha=1.0) | {f"{module}.dora_scale": torch.rand(shape) + 0.5})


@pytest.mark.parametrize(("shape", "side"), [((8, 1), "out"), ((1, 8), "in")])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_scl_07_merge_gives_the_weight_its_magnitudes(tmp_path: Path, shape, side: str, strength: float):
    source, weight = dora_file(tmp_path / "a.safetensors", shape), noise(8, 8)
    base, out = saved(tmp_path / "m.safetensors", {f"{KEY}.weight": weight}), tmp_path / "out.safetensors"
    report = merged(base, f"{source}:{strength}", out=out)
    assert report.ok, report.findings
    adapter = TensorFile(source)
    low = {role: adapter.read(f"{MODULE}.lora_{role}.weight") for role in ("up", "down")}
    direction = weight.double() + 0.5 * low["up"].double() @ low["down"].double()
    norm = direction.norm(dim=1 if side == "out" else 0, keepdim=True)
    trained = adapter.read(f"{MODULE}.dora_scale").double().reshape(norm.shape) * direction / norm
    wanted = weight + strength * (trained - weight)
    found = TensorFile(out).read(f"{KEY}.weight")
    torch.testing.assert_close(found, wanted.float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(found, weight) or strength != 0


def test_scl_07_the_conventions_are_far_apart():
    """m = 1.1 * |V| along a side: the right convention gives 1.1 * V, the others a visibly different weight."""
    weight, low = noise(8, 8).double(), {"up": 0.3 * noise(8, 2), "down": noise(2, 8, seed=3)}
    direction = weight + low["up"].double() @ low["down"].double()
    changes = {}
    for side, axis in (("out", 1), ("in", 0)):
        for norm_of in ("adapted", "base"):
            magnitude = Magnitude(1.1 * direction.norm(dim=axis), "out" if side == "out" else "in", norm_of=norm_of)
            changes[side, norm_of] = compute_adapted_weight(weight, SiteAdapter("lora", low, magnitude=magnitude))
        torch.testing.assert_close(changes[side, "adapted"], 1.1 * direction)
        assert float((changes[side, "base"] - 1.1 * direction).norm() / direction.norm()) > 0.05


def test_scl_07_a_target_without_the_convention_refuses(tmp_path: Path):
    source, out = dora_file(tmp_path / "a.safetensors", (1, 8)), tmp_path / "out"
    for to in ("diffusers", "peft"):
        code, report = told("convert", source, "--to", to, "-o", out)
        assert code == 1 and "magnitudes (DoRA) are of the inputs" in by_code(report)["WRITE-CANNOT-SAY"]["message"]
    assert not out.exists()
    assert told("convert", source, "--to", "kohya", "-o", out)[0] == 0
    assert torch.equal(TensorFile(out).read(f"{MODULE}.dora_scale"), TensorFile(source).read(f"{MODULE}.dora_scale"))


def test_scl_07_magnitudes_of_either_side_are_asked_about(tmp_path: Path):
    source = dora_file(tmp_path / "a.safetensors", (8,))
    code, report = told("check", source)
    assert code == 1 and "LyCORIS" in by_code(report)["ADAPTER-UNDECIDED"]["remedy"]
    assert told("check", source, "--dora-side", "in")[0] == 0


def test_scl_07_check_reports_the_convention(tmp_path: Path):
    _, report = told("check", dora_file(tmp_path / "a.safetensors", (1, 8)))
    assert "of the inputs" in json.dumps(report) or '"in"' in json.dumps(report)


# --- SCL-09: the bias of an outer factor -----------------------------------------------------------------------------


def test_scl_09_the_bias_of_a_lora_is_scaled_when_it_is_merged(tmp_path: Path):
    name = "diffusion_model.blocks.0.self_attn.q_proj"
    up, down, up_bias, weight, bias = noise(5, 2), noise(2, 6), noise(5, seed=3), noise(5, 6), noise(5)
    factors = {"lora_A.weight": down, "lora_B.weight": up, "lora_B.bias": up_bias, "alpha": torch.tensor(32.0)}
    source = saved(tmp_path / "a.safetensors", {f"{name}.{role}": t for role, t in factors.items()})
    base = saved(tmp_path / "m.safetensors", {f"{KEY}.weight": weight, f"{KEY}.bias": bias})
    out = tmp_path / "out.safetensors"
    assert merged(base, f"{source}:0.5", out=out).ok
    file = TensorFile(out)
    for x in (noise(3, 6), noise(1, 6, seed=9), torch.zeros(1, 6)):
        apart = x @ weight.T + bias + 0.5 * 16 * (x @ down.T @ up.T + up_bias)
        torch.testing.assert_close(x @ file.read(f"{KEY}.weight").T + file.read(f"{KEY}.bias"), apart)
    out.unlink()
    saved(base, {f"{KEY}.weight": weight})
    report = merged(base, source, out=out)
    assert report.exit_code == 1 and {f.code for f in report.findings} >= {"ADAPTER-BIAS"} and not out.exists()
