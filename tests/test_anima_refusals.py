"""Every wrong file and folder is named for what it is, with its numbers and a way out."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from finitune.errors import FileError, ModelError, NumericsError
from finitune.files.tensorfile import TensorFile
from finitune.models.anima.load import ANIMA_MODULES, load_folder, load_three_files
from tests.tiny_anima import a_folder, refused, rewrite, three_files, two_layouts  # noqa: F401 - fixtures


def gap(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".blocks.1." not in name}


def lora(_):
    return {f"lora_unet_blocks_0_mlp_layer1.lora_{way}.weight": torch.ones(4, 4) for way in ("up", "down")}


DAMAGES = {
    "a gap in the blocks": ("dit", gap, "MODEL-KEYS-MISSING"),
    "a far block": ("dit", lambda t: t | {"net.blocks.99999.mlp.layer1.weight": torch.ones(1)}, "MODEL-KEYS-MISSING"),
    "no adapter": ("dit", lambda t: {k: v for k, v in t.items() if "llm_" not in k}, "MODEL-KEYS-MISSING"),
    "one more": ("dit", lambda t: t | {"net.blocks.0.mlp.layer3.weight": torch.ones(1)}, "MODEL-KEYS-UNEXPECTED"),
    "no prefix on one": ("dit", lambda t: t | {"final_layer.linear.weight": torch.ones(1)}, "MODEL-KEYS-UNEXPECTED"),
    "a shape": ("dit", lambda t: t | {"net.blocks.1.mlp.layer1.weight": torch.ones(3, 48)}, "MODEL-SHAPES"),
    "a flat tensor": ("dit", lambda t: t | {"net.x_embedder.proj.1.weight": torch.ones(9)}, "MODEL-SHAPES"),
    "one head less": (
        "qwen3",
        lambda t: t | {"model.layers.1.self_attn.q_proj.weight": torch.ones(48, 48)},
        "MODEL-SHAPES",
    ),
    "no norm": ("qwen3", lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, "MODEL-KEYS-MISSING"),
    "VAE level": ("vae", lambda t: {k: v for k, v in t.items() if "downsamples.0." not in k}, "MODEL-KEYS-MISSING"),
    "VAE extra": ("vae", lambda t: t | {"decoder.upsamples.99.shortcut.bias": torch.ones(1)}, "MODEL-KEYS-UNEXPECTED"),
    "a LoRA": ("dit", lora, "MODEL-IS-ADAPTER"),
    "a LoRA as VAE": ("vae", lora, "MODEL-IS-ADAPTER"),
    "nothing known": ("dit", lambda t: {"w": torch.ones(1)}, "MODEL-WRONG-PART"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_wrong_keys_are_accounted_for(files, what):
    role, change, code = DAMAGES[what]
    rewrite(files[role], change)
    error = refused(ModelError, load_three_files, **files)
    assert error.code == code
    assert error.evidence


def test_the_account_counts_all_three_ways(files):
    def change(tensors):
        shape = {"net.blocks.0.mlp.layer2.weight": torch.ones(2, 2)}
        return gap(tensors) | shape | {"net.extra": torch.ones(1), "net.more": torch.ones(1)}

    rewrite(files["dit"], change)
    error = refused(ModelError, load_three_files, **files)
    assert (error.evidence["missing"], error.evidence["unexpected"], error.evidence["wrong_shape"]) == (20, 2, 1)
    assert "transformer_blocks.1." in error.message and "net.extra" in error.message


@pytest.mark.parametrize(
    ("one", "other", "held", "right"),
    [
        ("dit", "vae", "holds the VAE", "Give it as vae="),
        ("qwen3", "vae", "holds the VAE", "Give it as vae="),
        ("dit", "qwen3", "holds the text encoder", "Give it as qwen3="),
        ("vae", "dit", "holds the VAE", "Give it as vae="),
    ],
)
def test_parts_in_the_wrong_place_are_named(files, one, other, held, right):
    error = refused(ModelError, load_three_files, **files | {one: files[other], other: files[one]})
    assert error.code == "MODEL-WRONG-PART"
    assert held in error.message and right in error.remedy


def test_a_diffusers_transformer_alone_is_no_dit(layouts, files):
    path = layouts[0] / "transformer" / "diffusion_pytorch_model.safetensors"
    error = refused(ModelError, load_three_files, **files | {"dit": path})
    assert error.code == "MODEL-WRONG-PART" and "whole folder" in error.remedy


def poison(tensors):
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["net.blocks.1.mlp.layer2.weight"][0, :2] = float("nan")
    changed["net.final_layer.linear.weight"][1, 1] = float("inf")
    return changed


def test_nonfinite_weights_are_named(files):
    rewrite(files["dit"], poison)
    error = refused(NumericsError, load_three_files, **files)
    assert error.code == "WEIGHT-NONFINITE"
    assert set(error.evidence["tensors"]) == {"net.blocks.1.mlp.layer2.weight", "net.final_layer.linear.weight"}
    assert (error.evidence["nan"], error.evidence["inf"]) == (2, 1)


def test_a_cast_may_not_overflow(layouts, files):
    rewrite(files["dit"], lambda t: t | {"net.final_layer.linear.weight": torch.full((64, 48), 1e5).bfloat16()})
    assert load_three_files(**files).transformer.proj_out.weight[0, 0] > 65504
    error = refused(NumericsError, load_three_files, **files, dtype_of=lambda _: torch.float16)
    assert error.code == "WEIGHT-OUT-OF-RANGE" and "final_layer" in error.message


def test_parts_must_belong_together(files):
    def wider(tensors):
        return tensors | {"net.llm_adapter.embed.weight": torch.ones(20, 32)}

    rewrite(files["dit"], wider)
    error = refused(ModelError, load_three_files, **files)
    assert error.code == "MODEL-PARTS-MISMATCH" and "t5_tokenizer" in error.message

    for role in ("dit", "vae"):
        state = json.loads(TensorFile(files[role]).metadata["finitune.config"])
        if role == "vae":
            state["vae"]["latents_mean"] = [0.0]
        rewrite(files[role], lambda t: t, {"finitune.config": json.dumps(state)})
    error = refused(ModelError, load_three_files, **files)
    assert error.code == "MODEL-PARTS-MISMATCH" and "latents_mean" in error.message


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"unet": {}}', '{"transformer": {"num_layers": 3}}', '{"transformer": 3}']
)
def test_strange_metadata_is_refused(files, text):
    rewrite(files["dit"], lambda t: t, {"finitune.config": text})
    assert refused(FileError, load_three_files, **files).code == "FILE-METADATA"


@pytest.mark.parametrize("name", [*ANIMA_MODULES, "tokenizer", "t5_tokenizer", "scheduler"])
def test_a_folder_needs_every_subfolder(folder, name):
    shutil.rmtree(folder / name)
    error = refused(FileError, load_folder, folder)
    assert error.code == "FILE-MISSING" and name in error.subject
    assert len(error.evidence["present"]) == 6


def test_folders_with_the_wrong_content(folder):
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    settings_path = folder / "vae" / "config.json"
    text = settings_path.read_text()

    settings_path.write_text(text.replace("base_dim", "bass_dim"))
    error = refused(ModelError, load_folder, folder)
    assert error.code == "MODEL-CONFIG" and "'base_dim'" in error.message
    settings_path.write_text("{")
    assert refused(FileError, load_folder, folder).code == "FILE-METADATA"
    settings_path.unlink()
    assert refused(FileError, load_folder, folder).code == "FILE-MISSING"
    settings_path.write_text(text)

    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert load_folder(folder).fingerprint
    weights.rename(weights.with_name("other.safetensors"))
    assert refused(FileError, load_folder, folder).code == "FILE-AMBIGUOUS"
    for path in (folder / "vae").glob("*.safetensors"):
        path.unlink()
    torch.save({}, folder / "vae" / "diffusion_pytorch_model.bin")
    error = refused(FileError, load_folder, folder)
    assert error.code == "FILE-MISSING" and "pickle" in error.remedy


def test_a_broken_tokenizer_is_named(folder):
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    assert refused(FileError, load_folder, folder).code == "FILE-TOKENIZER"
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert refused(FileError, load_folder, folder).code == "FILE-TOKENIZER"


def test_an_adapter_in_a_folder_is_refused(folder):
    rewrite(folder / "transformer" / "diffusion_pytorch_model.safetensors", lora)
    assert refused(ModelError, load_folder, folder).code == "MODEL-IS-ADAPTER"
