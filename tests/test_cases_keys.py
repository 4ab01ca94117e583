"""Names from the field (KEY-01 to KEY-11): each report's own input, through the command line, to its right end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finitune.adapters.weight import compute_weight_delta
from finitune.files.tensorfile import TensorFile
from finitune.namings.read import read_adapter
from finitune.verbs import convert
from tests.adapter_files import delta, lora, noise
from tests.case_files import by_code, own_model, read_for, saved, scaled, told

PEFT = "lora_A.weight lora_B.weight"


def same_tensors(a: Path, b: Path) -> bool:
    one, other = TensorFile(a), TensorFile(b)
    return set(one) == set(other) and all(torch.equal(one.read(key), other.read(key)) for key in one)


# --- KEY-01: a trainer's flat names ----------------------------------------------------------------------------------


def test_key_01_flat_names_go_to_both_targets_and_back_bit_for_bit(tmp_path: Path):
    flat = "lora_unet_double_blocks_0_img_mlp_0", "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = scaled(flat[0], 128, 32, 4, alpha=2.0) | scaled(flat[1], 96, 32, 4, alpha=2.0)
    source = saved(tmp_path / "a.safetensors", tensors)
    expected = {
        "comfy": "diffusion_model.double_blocks.0.img_mlp.0.lora_A.weight",
        "diffusers": "transformer.transformer_blocks.0.ff.net.0.proj.lora_A.weight",
    }
    for to, key in expected.items():
        there, back = tmp_path / f"{to}.safetensors", tmp_path / f"{to}-back.safetensors"
        code, report = told("convert", source, "--to", to, "--model", "flux", "-o", there)
        assert code == 0 and report["figures"]["class"] == "lossless" and report["figures"]["unmatched"] == 0
        assert torch.equal(TensorFile(there).read(key), tensors[f"{flat[0]}.lora_down.weight"])
        assert told("convert", there, "--to", "kohya", "--model", "flux", "-o", back)[0] == 0
        assert same_tensors(source, back)


def test_key_01_a_part_that_matches_nothing_fails_with_its_share(tmp_path: Path):
    tensors = lora("lora_unet_double_blocks_0_img_mlp_0") | lora("lora_unet_double_blocks_0_img_mlp_fc1")
    code, report = told("check", saved(tmp_path / "a.safetensors", tensors), "--model", "flux")
    figures = report["figures"]
    assert code == 1 and (figures["matched"], figures["unmatched"], figures["tensors"]) == (2, 2, 4)
    assert "1 of 2 modules behind 'lora_unet_'" in by_code(report)["ADAPTER-UNMATCHED"]["message"]
    assert by_code(report)["ADAPTER-UNMATCHED"]["subject"] == "lora_unet_double_blocks_0_img_mlp_fc1"


def test_key_01_the_modules_are_those_of_the_checkpoint(tmp_path: Path):
    names = "double_blocks.0.img_mlp.fc1", "double_blocks.0.img_attn.qkv"
    base = own_model(tmp_path / "m.safetensors", *names, shape=(96, 32))
    tensors = {k: t for name in names for k, t in lora(f"lora_unet_{name.replace('.', '_')}", 96, 32, 4).items()}
    code, report = told("check", saved(tmp_path / "a.safetensors", tensors), "--model", base)
    assert code == 0 and (report["figures"]["sites"], report["figures"]["unmatched"]) == (2, 0)


@pytest.mark.parametrize(("to", "prefix"), [("comfy", "diffusion_model."), ("diffusers", "transformer.")])
def test_key_01_convert_takes_the_module_list_of_any_model(tmp_path: Path, to: str, prefix: str):
    name = "blocks.0.img_mlp.fc1"
    base = own_model(tmp_path / "m.safetensors", name, shape=(96, 32))
    source = saved(tmp_path / "a.safetensors", scaled("lora_unet_blocks_0_img_mlp_fc1", 96, 32, 4, alpha=2.0))
    out = tmp_path / "b.safetensors"
    assert told("convert", source, "--to", to, "--model", base, "-o", out)[0] == 0
    assert f"{prefix}{name}.lora_A.weight" in TensorFile(out)


# --- KEY-03: names that contain the sign which flattens them ---------------------------------------------------------

MODULES = ("layers.0.adaLN_modulation.1", "context_refiner.0.attention.to_q", "all_final_layer.2-1.linear")


def flattened(*names: str) -> dict[str, torch.Tensor]:
    return {k: t for name in names for k, t in lora(f"lora_unet_{name.replace('.', '_')}").items()}


def test_key_03_flat_names_are_found_in_the_models_own_list(tmp_path: Path):
    base = own_model(tmp_path / "m.safetensors", *MODULES)
    file = saved(tmp_path / "a.safetensors", flattened(*MODULES))
    assert told("check", file, "--model", base)[0] == 0
    assert sorted(read_for(file, base).adapter) == sorted(f"transformer.{name}" for name in MODULES)


def test_key_03_two_modules_of_one_flat_name_stop_it_and_are_both_named(tmp_path: Path):
    base = own_model(tmp_path / "m.safetensors", *MODULES, "a.b_c", "a_b.c")
    code, report = told("check", saved(tmp_path / "a.safetensors", flattened("a.b_c")), "--model", base)
    assert code == 1 and by_code(report)["MODEL-FLAT-NAMES"]["evidence"]["modules"] == ["a.b_c", "a_b.c"]
    assert by_code(report)["MODEL-FLAT-NAMES"]["remedy"]


@pytest.mark.parametrize("dotted", [False, True])
def test_key_03_only_what_is_ambiguous_is_refused(tmp_path: Path, dotted: bool):
    """Three modules are found beside a collision that the file does not touch; and the dotted name, which is clear."""
    base = own_model(tmp_path / "m.safetensors", *MODULES, "a.b_c", "a_b.c")
    tensors = lora("transformer.a.b_c") if dotted else flattened(*MODULES)
    reading = read_for(saved(tmp_path / "a.safetensors", tensors), base)
    assert sorted(reading.adapter) == (["transformer.a.b_c"] if dotted else sorted(f"transformer.{m}" for m in MODULES))


def test_key_03_without_a_module_list_nothing_is_guessed(tmp_path: Path):
    code, report = told("check", saved(tmp_path / "a.safetensors", flattened(*MODULES)))
    said = by_code(report)["ADAPTER-UNMATCHED"]
    assert code == 1 and report["figures"]["unmatched"] == 6 and "its own modules" in said["remedy"]
    assert said["evidence"]["modules"] == 3


# --- KEY-04: layers that are no attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["kohya", "comfy", "diffusers"])
def test_key_04_six_rare_layers_in_six_out(tmp_path: Path, to: str):
    tensors = {
        "lora_unet_conv_in.lora_down.weight": noise(4, 4, 3, 3),
        "lora_unet_conv_in.lora_up.weight": noise(320, 4, 1, 1),
        "lora_unet_conv_out.lora_down.weight": noise(4, 320, 3, 3),
        "lora_unet_conv_out.lora_up.weight": noise(4, 4, 1, 1),
    } | {f"lora_unet_{name}.alpha": torch.tensor(2.0) for name in ("conv_in", "conv_out")}
    for name, out, into in (
        ("lora_unet_time_embedding_linear_1", 1280, 320),
        ("lora_unet_add_embedding_linear_2", 1280, 1280),
        ("lora_te2_text_projection", 1280, 1280),
        ("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k", 640, 2048),
    ):
        tensors |= scaled(name, out, into, 4, alpha=2.0)
    out_file = tmp_path / "b.safetensors"
    code, report = told("convert", saved(tmp_path / "a.safetensors", tensors), "--to", to, "-o", out_file)
    assert code == 0 and (report["figures"]["matched"], report["figures"]["unmatched"]) == (18, 0)
    assert report["figures"]["max_delta_error"] == 0
    sites = read_adapter(TensorFile(out_file)).adapter.sites
    assert sorted(sites) == [
        "text_encoder_2.text_projection",
        "unet.add_embedding.linear_2",
        "unet.conv_in",
        "unet.conv_out",
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
        "unet.time_embedding.linear_1",
    ]


# --- KEY-05: optional layers and leftovers ---------------------------------------------------------------------------

BLOCKS = ("lora_unet_double_blocks_0_img_mlp_0", "lora_unet_double_blocks_1_img_mlp_0")
FINAL, ADALN = "lora_unet_final_layer_linear", "lora_unet_final_layer_adaLN_modulation_1"
LEFTOVERS = {
    "a": ({}, 0, None),
    "b": (scaled(FINAL, alpha=1.0), 0, None),
    "c": ({f"{ADALN}.alpha": torch.tensor(1.0)}, 0, ("warning", "ADAPTER-ORPHAN-ALPHA")),
    "d": ({"lora_unet_single_blocks_0_linear2.lora_down.weight": noise(2, 8)}, 1, ("error", "ADAPTER-ROLES")),
    "e": (scaled("transformer.transformer_blocks.0", alpha=1.0), 1, ("error", "ADAPTER-CONTAINER")),
}


@pytest.mark.parametrize("case", LEFTOVERS)
def test_key_05_layers_are_optional_and_leftovers_are_judged(tmp_path: Path, case: str):
    more, wanted, said = LEFTOVERS[case]
    tensors = {k: t for name in BLOCKS for k, t in scaled(name, alpha=1.0).items()} | more
    source, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / "b.safetensors"
    for words in (("check", source, "--model", "flux"), ("convert", source, "--to", "diffusers", "-o", out)):
        code, report = told(*words)
        assert code == wanted
        if said is not None:
            finding = by_code(report)[said[1]]
            assert finding["level"] == said[0]
            assert all(key.startswith(finding["subject"]) for key in more)
    assert out.exists() == (wanted == 0)


def test_key_05_a_container_is_called_one(tmp_path: Path):
    file = saved(tmp_path / "a.safetensors", lora(BLOCKS[0]) | lora("transformer.transformer_blocks.0"))
    said = by_code(told("check", file, "--model", "flux")[1])["ADAPTER-CONTAINER"]
    assert "container" in said["message"] and "Name the model" not in said["remedy"]


# --- KEY-07: the prefixes of Anima's text encoder --------------------------------------------------------------------

TE = ("lora_te_", "lora_te1_", "text_encoders.qwen3_06b.transformer.model.", "text_encoder.")
LAYERS = {"layers.25.mlp.down_proj": (8, 16), "layers.0.self_attn.q_proj": (16, 8)}


def with_text_encoder(prefix: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in ("lora_unet_blocks_0_mlp_layer1", "lora_unet_blocks_1_mlp_layer2"):
        tensors |= scaled(name, alpha=1.0)
    for name, (out, into) in LAYERS.items():
        tensors |= scaled(prefix + (name.replace(".", "_") if prefix.endswith("_") else name), out, into, alpha=1.0)
    return tensors


@pytest.mark.parametrize(("to", "first"), [("kohya", "lora_te_layers_0_"), ("comfy", TE[2]), ("diffusers", TE[3])])
def test_key_07_four_prefixes_of_the_text_encoder_are_one_file(tmp_path: Path, to: str, first: str):
    files = []
    for number, prefix in enumerate(TE):
        source = saved(tmp_path / f"{number}.safetensors", with_text_encoder(prefix))
        files.append(tmp_path / f"{number}-out.safetensors")
        code, report = told("convert", source, "--to", to, "-o", files[-1])
        assert code == 0 and (report["figures"]["matched"], report["figures"]["unmatched"]) == (12, 0)
    assert all(same_tensors(files[0], file) for file in files[1:])
    assert any(key.startswith(first) for key in TensorFile(files[0]))


def test_key_07_a_text_encoder_without_a_match_is_not_averaged_away(tmp_path: Path):
    tensors = with_text_encoder("lora_te1_")
    lost = {key.replace("_mlp_down_proj", "_down").replace("_self_attn_q", "_q"): t for key, t in tensors.items()}
    code, report = told("check", saved(tmp_path / "a.safetensors", lost))
    assert code == 1 and report["figures"]["family"] == "anima"
    assert "2 of 2 modules behind 'lora_te1_' are none of Anima" in by_code(report)["ADAPTER-UNMATCHED"]["message"]
    assert "lora_unet_" not in json.dumps(report["findings"])


# --- KEY-09: wrappers ------------------------------------------------------------------------------------------------

CORE = "blocks.0.attn.to_q"
SPELLED = (
    ("base_model.model.", PEFT),
    ("transformer.base_model.model.", PEFT),
    ("module.", PEFT),
    ("_orig_mod.", PEFT),
    ("module._orig_mod.", PEFT),
    ("_orig_mod.module.", PEFT),
    ("", "lora_A.default.weight lora_B.default.weight"),
    ("", "lora_A.default_0.weight lora_B.default_0.weight"),
    ("", "lora.down.weight lora.up.weight"),
    ("", "lora_linear_layer.down.weight lora_linear_layer.up.weight"),
)


@pytest.mark.parametrize(("prefix", "words"), SPELLED)
def test_key_09_wrappers_in_any_order_are_taken_off_and_told(tmp_path: Path, prefix: str, words: str):
    base = own_model(tmp_path / "m.safetensors", CORE)
    file = saved(tmp_path / "a.safetensors", lora(prefix + CORE, words=words))
    code, report = told("check", file, "--model", base)
    assert code == 0 and report["figures"]["matched"] == 2
    reading = read_for(file, base)
    assert list(reading.adapter) == [f"transformer.{CORE}"]
    plain = read_for(saved(tmp_path / "b.safetensors", lora(CORE)), base)
    wanted = delta(plain, f"transformer.{CORE}", 16, 8)
    assert torch.equal(delta(reading, f"transformer.{CORE}", 16, 8), wanted)
    said = by_code(report).get("ADAPTER-WRAPPED", {"message": ""})["message"]
    assert all(wrapper in said for wrapper in ("module.", "_orig_mod.") if wrapper in prefix)


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "transformer.", "module."])
def test_key_09_a_real_child_called_module_is_never_stripped(tmp_path: Path, prefix: str):
    base = own_model(tmp_path / "m.safetensors", "module.attn.to_q", "attn.to_q")
    reading = read_for(saved(tmp_path / "a.safetensors", lora(f"{prefix}module.attn.to_q", words=PEFT)), base)
    assert list(reading.adapter) == ["transformer.module.attn.to_q"]


@pytest.mark.parametrize("module", ["blocks.0.self_attn.q_proj", "transformer_blocks.0.attn1.to_q"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_key_09_bare_names_are_a_plain_lora_of_unknown_scale(tmp_path: Path, prefix: str, module: str):
    """Not a control adapter of Black Forest Labs, which may widen the weight and has alpha = rank."""
    file = saved(tmp_path / "a.safetensors", lora(prefix + module, words=PEFT))
    (adapter,) = read_adapter(TensorFile(file)).adapter.sites.values()
    assert not adapter.options
    assert "ADAPTER-SCALE-UNKNOWN" in by_code(told("check", file)[1])
    out = tmp_path / "b.safetensors"
    assert "ADAPTER-SCALE-UNKNOWN" in by_code(told("convert", file, "--to", "kohya", "-o", out)[1]) and not out.exists()
    assert convert.run(convert.Request(file=file, to="kohya", out=out, scale=0.5)).ok
    (answered,) = read_adapter(TensorFile(out)).adapter.sites.values()
    assert answered.alpha == 0.5 * adapter.tensors["down"].shape[0]


# --- KEY-11: a shared down -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [4, 3, 6, 64])
def test_key_11_a_fused_up_is_cut_by_rows_and_down_never(tmp_path: Path, rank: int):
    name, out = "lora_unet_single_blocks_0_linear1", tmp_path / "b.safetensors"
    tensors = scaled(name, 56, 8, rank, alpha=2.0)
    source = saved(tmp_path / "a.safetensors", tensors)
    assert told("convert", source, "--to", "diffusers", "--model", "flux", "-o", out)[0] == 0
    parts, file = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), TensorFile(out)
    stems = [f"transformer.single_transformer_blocks.0.{part}" for part in parts]
    assert [file.shapes[f"{stem}.lora_B.weight"] for stem in stems] == [(8, rank)] * 3 + [(32, rank)]
    assert [file.shapes[f"{stem}.lora_A.weight"] for stem in stems] == [(rank, 8)] * 4
    adapter = read_adapter(file).adapter
    zeros = torch.zeros(56, 8, dtype=torch.float64).split((8, 8, 8, 32))
    rows = [compute_weight_delta(zero, adapter[stem]) for zero, stem in zip(zeros, stems, strict=True)]
    up, down = (tensors[f"{name}.lora_{side}.weight"].double() for side in ("up", "down"))
    torch.testing.assert_close(torch.cat(rows), 2 / rank * up @ down)
