"""finitune merge, from files to files: right to the last bit, or refused with nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from finitune.files.tensorfile import TensorFile
from finitune.models.pico import get_pico_folder as pico_folder
from finitune.numerics.narrow import round_carrying, round_once
from finitune.verbs.merge import Request, run
from tests.merge_made import (
    a_base,
    a_lora,
    base_tensors,
    expected,
    finding,
    lora_tensors,
    merged,
    refused,
    same_bits,
    write_base,
    write_lora,
)

__all__ = ["a_base", "a_lora"]  # fixtures


def test_every_element_is_the_fp64_sum_rounded_once(base, lora):
    report, tensors = merged(base, f"{lora}:0.7")
    source = load_file(base)
    wanted = expected(source, (load_file(lora), 0.7))
    assert list(TensorFile(base)) and set(tensors) == set(source)
    for name, tensor in tensors.items():
        assert same_bits(tensor, round_once(wanted[name], torch.bfloat16)), name
    figures = report.figures
    assert figures["tensors_adapted"] == 8 and figures["matched"] == 8 and figures["unmatched"] == 0
    assert figures["readback_mismatches"] == 0 and figures["readback_checked"] == len(source)
    assert figures["correctly_rounded"] == 1.0 and figures["readback_compared"] > 10_000
    assert figures["bytes"] == base.with_name("out.safetensors").stat().st_size


def test_metadata_is_kept_and_a_receipt_added(base, lora):
    merged(base, f"{lora}:0.5")
    metadata = TensorFile(base.with_name("out.safetensors")).metadata
    receipt = json.loads(metadata["finitune"])
    assert metadata["note"] == "kept" and receipt["verb"] == "merge"
    assert [source["name"] for source in receipt["sources"]] == ["base.safetensors", "lora.safetensors:0.5"]
    assert receipt["sources"][1]["fingerprint"] == TensorFile(lora).fingerprint()


@pytest.mark.parametrize("strengths", [(0.7, 0.5), (1.0, -0.5), (0.0, 1.0)])
def test_several_adapters_of_other_ranks_and_layers_are_one_sum(tmp_path, base, strengths):
    sites = ("self_attn.q_proj", "mlp.layer2")
    first = write_lora(tmp_path / "a.safetensors", rank=4)
    second = write_lora(tmp_path / "b.safetensors", rank=2, sites=sites, seed=9)
    _, tensors = merged(base, *(f"{p}:{m}" for p, m in zip((first, second), strengths, strict=True)))
    pairs = zip((first, second), strengths, strict=True)
    wanted = expected(load_file(base), *((load_file(path), strength) for path, strength in pairs))
    assert all(same_bits(tensors[name], round_once(wanted[name], torch.bfloat16)) for name in tensors)


def test_findings_name_the_file_that_they_are_about(tmp_path, base):
    files = [write_lora(tmp_path / f"{name}.safetensors") for name in ("a", "b")]
    report, _ = merged(base, *files)
    stated = [f for f in report.findings if f.code == "ADAPTER-SCALE-SOURCE"]
    assert [f.subject for f in stated] == [f.evidence["file"] for f in stated] == ["a.safetensors", "b.safetensors"]
    spoilt = lora_tensors()
    spoilt["lora_unet_blocks_0_mlp_layer1.lora_up.weight"][0, 0] = float("nan")
    save_file(spoilt, tmp_path / "c.safetensors")
    report = refused("ADAPTER-REFUSED", base, files[0], tmp_path / "c.safetensors", out=tmp_path / "new.safetensors")
    assert finding(report, "ADAPTER-NONFINITE").evidence["file"] == "c.safetensors"


def test_strength_zero_is_the_base_bit_for_bit(base, lora):
    report, tensors = merged(base, f"{lora}:0")
    assert finding(report, "MERGE-SILENT")
    assert all(same_bits(tensors[name], tensor) for name, tensor in load_file(base).items())


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_another_dtype_for_every_tensor(base, lora, dtype, wanted):
    _, tensors = merged(base, lora, dtype=dtype)
    sums = expected(load_file(base), (load_file(lora), 1.0))
    assert all(same_bits(tensors[name], round_once(sums[name], wanted)) for name in tensors)


def test_compensated_and_stochastic(base, lora):
    sums = expected(load_file(base), (load_file(lora), 1.0))
    name = "net.blocks.0.mlp.layer1.weight"
    _, tensors = merged(base, lora, rounding="compensated")
    assert same_bits(tensors[name], round_carrying(sums[name], torch.bfloat16))
    first, second, other = (merged(base, lora, rounding="stochastic", seed=seed)[1] for seed in (1, 1, 2))
    assert same_bits(first[name], second[name]) and not same_bits(first[name], other[name])
    untouched = "net.final_layer.linear.weight"
    assert same_bits(other[untouched], load_file(base)[untouched])
    refused("MERGE-ROUNDING", base, lora, rounding="up", out=base.with_name("new.safetensors"))


def test_weak_changes_are_named_and_can_be_kept(tmp_path, base):
    weak = write_lora(tmp_path / "weak.safetensors", size=0.002)
    report, _ = merged(base, weak)
    lost = finding(report, "MERGE-DELTA-LOST")
    assert lost.level.value == "warning" and lost.evidence["tensors"] == 8 and "keep-precise" in lost.remedy
    assert report.figures["survival_min"] < 0.5
    report, tensors = merged(base, weak, keep_precise=True)
    assert finding(report, "MERGE-KEPT-PRECISE").evidence["tensors"] == 8
    assert report.figures["survival_min"] > 0.99
    sums = expected(load_file(base), (load_file(weak), 1.0))
    name = "net.blocks.1.mlp.layer1.weight"
    assert same_bits(tensors[name], sums[name].float())
    assert tensors["net.final_layer.linear.weight"].dtype == torch.bfloat16


def test_how_much_must_survive_is_the_users_choice(base, lora):
    report, _ = merged(base, lora)
    kept = report.figures["survival_min"]
    assert 0.9 < kept < 1 and not [f for f in report.findings if f.code == "MERGE-DELTA-LOST"]
    report, tensors = merged(base, lora, min_survival=1.0)
    lost = finding(report, "MERGE-DELTA-LOST")
    assert lost.evidence["limit"] == 1.0 and "less than 100%" in lost.message
    report, tensors = merged(base, lora, min_survival=1.0, keep_precise=True)
    assert "less than 100%" in finding(report, "MERGE-KEPT-PRECISE").message
    assert sum(tensor.dtype == torch.float32 for tensor in tensors.values()) == lost.evidence["tensors"]
    for wrong in (0.0, -1.0, 1.5, float("nan")):
        report = refused("MERGE-MIN-SURVIVAL", base, lora, min_survival=wrong)
        assert report.exit_code == 2


def test_a_dry_run_writes_nothing_and_foretells(base, lora):
    out = base.with_name("out.safetensors")
    report = run(Request(model=str(base), adapters=(str(lora),), out=out, dry_run=True))
    assert report.ok and not out.exists() and finding(report, "MERGE-DRY-RUN")
    assert [row["algorithm"] for row in report.as_json()["figures"]["merge"]].count("LoRA") > 0
    real, _ = merged(base, lora)
    for figure in ("tensors_adapted", "bytes", "survival_min", "changed_share"):
        assert report.figures[figure] == real.figures[figure]
    (table,) = report.tables
    assert ("net.blocks.*.mlp.layer1.weight", "2", "LoRA", "1", "bfloat16", "0.0 MB") in table.rows
    assert len(table.rows) == 5 and table.rows[-1][0] == "all others"


CODED, CODES_SCALE = "net.blocks.0.mlp.layer1.weight", "net.blocks.0.mlp.layer1.scale_weight"


def coded_tensors() -> dict[str, torch.Tensor]:
    """A base of bf16 with one weight in codes of fp8."""
    plain = base_tensors(torch.float32)
    scale = plain[CODED].abs().max() / 448
    tensors = {name: tensor.bfloat16() for name, tensor in plain.items()}
    return tensors | {CODED: (plain[CODED] / scale).to(torch.float8_e4m3fn), CODES_SCALE: scale.reshape(1)}


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_dry_run_foretells_what_becomes_of_codes(dtype, tmp_path, lora):
    base = write_base(tmp_path / "base.safetensors", coded_tensors())
    request = Request(model=str(base), adapters=(str(lora),), out=base.with_name("out.safetensors"), dtype=dtype)
    foretold, real = run(replace(request, dry_run=True)), run(request)
    assert foretold.ok and real.ok
    for figure in ("bytes", "survival_min", "survival_median", "changed_share"):
        assert foretold.figures[figure] == real.figures[figure], figure
    assert (CODES_SCALE in TensorFile(request.out)) == (dtype is None)


def test_fp8_with_a_scale_gets_a_new_scale(tmp_path, lora):
    tensors, name, scale_key = coded_tensors(), CODED, CODES_SCALE
    scale = tensors[scale_key].reshape(())
    base = write_base(tmp_path / "base.safetensors", tensors)
    _, results = merged(base, lora)
    source = dict(tensors)
    source[name] = (tensors[name].double() * scale.double()).to(torch.float64)
    wanted = expected(source, (load_file(lora), 1.0))[name]
    new = results[scale_key]
    assert new.shape == (1,) and new.item() == pytest.approx(wanted.abs().max().item() / 448, rel=1e-6)
    assert same_bits(results[name], round_once(wanted / new.double(), torch.float8_e4m3fn))
    _, results = merged(base, lora, dtype="bf16")
    assert scale_key not in results and same_bits(results[name], round_once(wanted, torch.bfloat16))
    broken = {**tensors, name: tensors[name].clone()}
    broken[name].view(torch.uint8)[3, 4] = 0x7F  # a NaN
    report, results = merged(write_base(tmp_path / "broken.safetensors", broken), lora)
    assert finding(report, "MERGE-BASE-NONFINITE").evidence == {"numbers": 1, "tensors": 1, "first": [3, 4]}
    assert int(results[name].float().isnan().sum()) == 1 and results[scale_key].isfinite().all()
    tensors[scale_key] = torch.ones(128, 1)
    refused("MERGE-FP8-SCALE", write_base(base, tensors), lora, out=tmp_path / "new.safetensors")


def test_shards_in_and_out(tmp_path, lora):
    whole = base_tensors()
    names = sorted(whole)
    shards = {"m-1.safetensors": names[::2], "m-2.safetensors": names[1::2]}
    for shard, mine in shards.items():
        save_file({name: whole[name] for name in mine}, tmp_path / shard, {"note": "kept"})
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: s for s, mine in shards.items() for n in mine}}))
    out = tmp_path / "made" / "x.safetensors"
    report = run(Request(model=str(index), adapters=(str(lora),), out=out, shard_size=100_000))
    assert report.ok, report.findings
    made = TensorFile(report.artifacts["model"])
    assert made.path.name == "x.safetensors.index.json" and set(made) == set(whole)
    assert len(list(out.parent.glob("x-*.safetensors"))) > 2
    sums = expected(whole, (load_file(lora), 1.0))
    assert all(same_bits(made.read(name), round_once(sums[name], torch.bfloat16)) for name in whole)


def test_a_folder_keeps_everything_else(tmp_path):
    component = pico_folder() / "transformer" / "diffusion_pytorch_model.safetensors"
    shapes = TensorFile(component).shapes
    tensors, sites = {}, [n for n in shapes if re.search(r"attn1\.to_[qk]\.weight|conditioner", n)]
    for name in sites:
        module = f"transformer.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = 0.05 * torch.randn(2, shapes[name][1])
        tensors[f"{module}.lora_B.weight"] = 0.05 * torch.randn(shapes[name][0], 2)
    save_file(tensors, tmp_path / "a.safetensors")
    out = tmp_path / "out"
    adapters = (str(tmp_path / "a.safetensors"),)
    report = run(Request(model=str(pico_folder()), adapters=adapters, out=out, scale=1.0))
    assert report.ok, report.findings
    relative = {p.relative_to(pico_folder()) for p in pico_folder().rglob("*") if p.is_file()}
    assert {p.relative_to(out) for p in out.rglob("*") if p.is_file()} == relative
    same = {path for path in relative if (out / path).read_bytes() == (pico_folder() / path).read_bytes()}
    assert relative - same == {component.relative_to(pico_folder())}
    before, after = load_file(component), load_file(out / component.relative_to(pico_folder()))
    for name in before:
        change = 0.0
        if name in sites:
            up, down = (tensors[f"transformer.{name[:-7]}.lora_{part}.weight"].double() for part in "BA")
            change = up @ down
        assert same_bits(after[name], round_once(before[name].double() + change, before[name].dtype))
    refused("MERGE-OUT", pico_folder(), tmp_path / "a.safetensors", out=out)


def test_what_cannot_be_meant_is_refused(tmp_path, base, lora):
    refused("MERGE-OUT", base, lora, out=base)
    refused("MERGE-OUT", base, lora, out=lora)
    refused("MERGE-OUT", base, lora, out=tmp_path / "x.ckpt")
    refused("MERGE-STRENGTH", base, f"{lora}:nan")
    refused("MERGE-STRENGTH", base)
    refused("FILE-MISSING", base, tmp_path / "absent.safetensors")
    refused("ADAPTER-NONE", base, write_base(tmp_path / "other.safetensors"))
    base.write_bytes(base.read_bytes()[:-1])
    refused("FILE-TRUNCATED", base, lora)


def test_unmatched_modules_are_an_error_unless_allowed(tmp_path, base):
    extra = write_lora(tmp_path / "extra.safetensors", blocks=3)
    report = refused("MERGE-UNMATCHED", base, extra)
    assert report.figures["matched"] == 8 and report.figures["unmatched"] == 4
    assert "transformer_blocks.2" in report.findings[-1].message
    report, _ = merged(base, extra, allow_unmatched=True)
    assert finding(report, "MERGE-UNMATCHED").level.value == "warning"
    nothing = {k.replace("blocks_0", "blocks_7"): v for k, v in lora_tensors(blocks=1).items()}
    save_file(nothing, tmp_path / "nothing.safetensors")
    new = tmp_path / "new.safetensors"
    refused("MERGE-NOTHING", base, tmp_path / "nothing.safetensors", allow_unmatched=True, out=new)
    unknown = {**lora_tensors(), "lora_unet_blocks_0_nowhere.lora_down.weight": torch.ones(4, 32)}
    save_file(unknown, tmp_path / "unknown.safetensors")
    assert not run(Request(model=str(base), adapters=(str(tmp_path / "unknown.safetensors"),), out=new)).ok


def test_a_wrong_size_or_family_is_told_in_one_sentence(tmp_path, base):
    tensors = lora_tensors()
    tensors["lora_unet_blocks_0_mlp_layer1.lora_down.weight"] = torch.ones(4, 48)
    save_file(tensors, tmp_path / "size.safetensors")
    said = finding(refused("ADAPTER-REFUSED", base, tmp_path / "size.safetensors"), "ADAPTER-DOES-NOT-FIT")
    assert "[128, 48]" in said.message and "[128, 32]" in said.message
    module = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
    other = {f"{module}.lora_down.weight": torch.ones(4, 768), f"{module}.lora_up.weight": torch.ones(320, 4)}
    save_file(other, tmp_path / "sd15.safetensors", {"ss_base_model_version": "anima"})
    report = refused("ADAPTER-OTHER-FAMILY", base, tmp_path / "sd15.safetensors")
    assert re.search("adapter of Stable Diffusion 1.5; the model is Anima", report.findings[-1].message)


def test_inpainting_inputs_are_named(tmp_path):
    unet = {
        "conv_in.weight": torch.zeros(320, 9, 3, 3),
        "conv_in.bias": torch.zeros(320),
        "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight": torch.zeros(320, 768),
    }
    save_file(unet, tmp_path / "unet.safetensors")
    lora = {
        "unet.conv_in.lora_A.weight": torch.ones(4, 4, 3, 3),
        "unet.conv_in.lora_B.weight": torch.ones(320, 4, 1, 1),
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight": torch.ones(4, 768),
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.lora_B.weight": torch.ones(320, 4),
    }
    save_file(lora, tmp_path / "lora.safetensors")
    report = refused("ADAPTER-REFUSED", tmp_path / "unet.safetensors", tmp_path / "lora.safetensors", scale=1.0)
    assert "inpainting" in finding(report, "ADAPTER-DOES-NOT-FIT").remedy


def test_a_bias_that_the_base_lacks_is_refused(tmp_path, base):
    tensors = lora_tensors()
    tensors["lora_unet_blocks_0_mlp_layer1.diff_b"] = torch.ones(128)
    save_file(tensors, tmp_path / "bias.safetensors")
    refused("ADAPTER-BIAS", base, tmp_path / "bias.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_adapters_that_are_not_finite_are_refused(tmp_path, base, value):
    tensors = lora_tensors()
    tensors["lora_unet_blocks_0_mlp_layer1.lora_up.weight"][3, 2] = value
    save_file(tensors, tmp_path / "nan.safetensors")
    report = refused("ADAPTER-REFUSED", base, tmp_path / "nan.safetensors", allow_unmatched=True)
    assert "mlp_layer1" in finding(report, "ADAPTER-NONFINITE").subject


ADAPTED, COPIED = "net.blocks.0.mlp.layer1.weight", "net.final_layer.linear.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", [ADAPTED, COPIED])
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_base_that_is_not_finite_is_told_with_the_place(tmp_path, lora, key, value, dtype):
    tensors = base_tensors()
    tensors[key][5, 7] = tensors[key][9, 3] = value
    report, written = merged(write_base(tmp_path / "base.safetensors", tensors), lora, dtype=dtype)
    said = finding(report, "MERGE-BASE-NONFINITE")
    assert said.level.value == "warning" and said.subject == key and f"{key}[5, 7]" in said.message
    assert said.evidence == {"numbers": 2, "tensors": 1, "first": [5, 7]}
    assert int((~written[key].isfinite()).sum()) == 2
    assert report.figures.get("copied_scanned_share", 1.0) == 1.0 and report.figures["survival_min"] > 0.9


def test_a_nan_in_a_part_that_is_copied_as_a_file_is_told(tmp_path):
    shutil.copytree(pico_folder(), tmp_path / "model")
    vae = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(vae)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 5)
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, vae)
    wide = TensorFile(tmp_path / "model" / "transformer" / vae.name).shapes["transformer_blocks.0.attn1.to_q.weight"]
    lora = {
        "lora_unet_blocks_0_self_attn_q_proj.lora_up.weight": torch.ones(wide[0], 2),
        "lora_unet_blocks_0_self_attn_q_proj.lora_down.weight": torch.ones(2, wide[1]),
    }
    save_file(lora, tmp_path / "lora.safetensors")
    out = tmp_path / "out"
    report = run(Request(model=str(tmp_path / "model"), adapters=(str(tmp_path / "lora.safetensors"),), out=out))
    said = finding(report, "MERGE-BASE-NONFINITE")
    assert report.ok and said.subject == f"vae/{name}"
    assert said.evidence["first"] == [size - 1 for size in tensors[name].shape]
    assert (out / "vae" / vae.name).read_bytes() == vae.read_bytes()


def test_overflow_leaves_nothing(tmp_path, base):
    strong = write_lora(tmp_path / "strong.safetensors", size=300.0)
    report = refused("MERGE-OVERFLOW", base, strong, dtype="fp16")
    assert report.findings[-1].evidence["limit"] == 65504.0


def test_odd_names_by_a_map(tmp_path, lora):
    odd = {re.sub(r"^net\.blocks\.(\d+)\.mlp\.layer1", r"blk.\1.ffn_up", k): v for k, v in base_tensors().items()}
    base = write_base(tmp_path / "odd.safetensors", odd)
    refused("MERGE-UNMATCHED", base, lora)
    way = tmp_path / "map.toml"
    way.write_text('[[map]]\nfrom = "blk.{i}.ffn_up.weight"\nto = "net.blocks.{i}.mlp.layer1.weight"\n')
    report, tensors = merged(base, lora, map=way)
    assert report.figures["tensors_adapted"] == 8
    wanted = expected(base_tensors(), (load_file(lora), 1.0))["net.blocks.1.mlp.layer1.weight"]
    assert same_bits(tensors["blk.1.ffn_up.weight"], round_once(wanted, torch.bfloat16))
    rows = {row[0]: row[1:] for row in report.tables[1].rows}
    assert rows["blk.0.ffn_up.weight"][0] == "net.blocks.0.mlp.layer1.weight"
    assert "transformer_blocks.0.ff.net.0.proj" in rows["blk.0.ffn_up.weight"][1]
    for text in ("[[map]]\nfrom = 'a.{i}'\nto = 'b'\n", "map = 3", "[[map]]\nfrom = 1\nto = 'x'", "[["):
        way.write_text(text)
        refused("MAP-FILE", base, lora, map=way, out=tmp_path / "new.safetensors")


def test_adapters_onto_an_adapter(tmp_path):
    first, second = (write_lora(tmp_path / f"{n}.safetensors", seed=n) for n in (1, 2))
    out = tmp_path / "sum.safetensors"
    report = run(Request(model=f"{first}", adapters=(f"{second}:0.5",), out=out))
    assert report.ok, report.findings
    base = write_base(tmp_path / "base.safetensors")
    _, by_sum = merged(base, out, dtype="fp32")
    _, by_both = merged(base, first, f"{second}:0.5", dtype="fp32")
    for name in by_both:
        torch.testing.assert_close(by_sum[name], by_both[name], rtol=1e-6, atol=1e-9)
