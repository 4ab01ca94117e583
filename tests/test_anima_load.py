"""Anima in its two layouts: the same bits from either, whole or not at all."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from finitune.errors import ModelError, NumericsError
from finitune.files.tensorfile import TensorFile
from finitune.models import MODEL_FAMILIES
from finitune.models.anima.configs import PUBLISHED_ANIMA_SETTINGS
from finitune.models.anima.load import (
    ANIMA_MODULES,
    AnimaParts,
    build_anima_pipeline,
    extract_pipeline_parts,
    load_folder,
    load_three_files,
)
from tests.anima_files import save_three_files
from tests.tiny_anima import refused, rewrite, three_files, tiny_modules, two_layouts  # noqa: F401 - fixtures


def states(parts: AnimaParts) -> dict[str, torch.Tensor]:
    return {f"{m}.{name}": tensor for m in ANIMA_MODULES for name, tensor in getattr(parts, m).state_dict().items()}


def assert_same_bits(a: AnimaParts, b: AnimaParts) -> None:
    first, second = states(a), states(b)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype == torch.bfloat16, name
        assert torch.equal(tensor.view(torch.int16), second[name].view(torch.int16)), name


def test_both_layouts_hold_the_same_model(layouts, files):
    a, b = load_folder(layouts[0]), load_three_files(**files)
    assert_same_bits(a, b)
    assert a.fingerprint == b.fingerprint and len(a.fingerprint) == 64
    assert a.notes == b.notes == []
    for module in ANIMA_MODULES:
        first, second = getattr(a, module).config, getattr(b, module).config
        first, second = (c if isinstance(c, dict) else c.to_dict() for c in (first, second))
        ignored = {
            "_name_or_path",
            "_class_name",
            "_diffusers_version",
            "_use_default_values",
            "architectures",
            "dtype",
        }
        differ = {k for k in first if k not in ignored and json.dumps(first[k]) != json.dumps(second.get(k))}
        assert differ == set(), module
    assert a.scheduler.config.shift == b.scheduler.config.shift == 2.5
    assert a.tokenizer("red apple").input_ids == b.tokenizer("red apple").input_ids
    assert a.t5_tokenizer("red apple").input_ids == b.t5_tokenizer("red apple").input_ids


def test_loading_is_what_the_libraries_load(layouts):
    from diffusers import AnimaTextConditioner, AutoencoderKLQwenImage, CosmosTransformer3DModel
    from transformers import Qwen3Model

    parts = load_folder(layouts[0])
    classes = (CosmosTransformer3DModel, AnimaTextConditioner, Qwen3Model, AutoencoderKLQwenImage)
    for name, cls in zip(ANIMA_MODULES, classes, strict=True):
        reference = cls.from_pretrained(layouts[0] / name, torch_dtype=torch.bfloat16)
        ours = getattr(parts, name)
        assert all(torch.equal(tensor, ours.state_dict()[key]) for key, tensor in reference.state_dict().items())
        assert not ours.training and type(ours) is cls


def test_buffers_of_no_file_are_computed(layouts):
    modules = tiny_modules()
    parts = load_folder(layouts[0])
    for name in ("text_conditioner", "text_encoder"):
        made = {key: buffer.float() for key, buffer in getattr(parts, name).named_buffers()}
        assert any(key.endswith("inv_freq") for key in made)
        for key, buffer in modules[name].float().named_buffers():
            assert torch.allclose(made[key], buffer, rtol=2**-8), key  # the reference went through bfloat16
    frequencies = parts.text_encoder.rotary_emb.inv_freq
    assert torch.equal(frequencies, 1 / 5e4 ** (torch.arange(0, 16, 2).float() / 16))


def test_each_layout_draws_a_picture(layouts, files):
    pictures = []
    for parts in (
        load_folder(layouts[0], lambda _: torch.float32),
        load_three_files(**files, dtype_of=lambda _: torch.float32),
    ):
        drawn = build_anima_pipeline(parts)(
            prompt="a red apple",
            height=32,
            width=48,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output="images",
        )
        assert drawn[0].size == (48, 32)
        pictures.append(drawn[0].tobytes())
    assert pictures[0] == pictures[1]
    assert build_anima_pipeline(parts).guider.guidance_scale == 4.0


def test_dtypes_are_chosen_by_component_and_name(layouts):
    asked = []

    def dtype_of(key: str) -> torch.dtype | None:
        asked.append(key)
        return torch.float16 if key.startswith("transformer.") and "norm" not in key else None

    parts = load_folder(layouts[0], dtype_of)
    assert parts.transformer.proj_out.weight.dtype == torch.float16
    assert parts.transformer.time_embed.norm.weight.dtype == torch.bfloat16
    assert parts.vae.quant_conv.weight.dtype == torch.bfloat16
    assert sorted(asked) == sorted(states(parts))
    assert parts.fingerprint == load_folder(layouts[0]).fingerprint


@pytest.mark.parametrize("prefix", ["net.", "model.diffusion_model.", "diffusion_model.", ""])
def test_every_prefix_and_stored_buffer_is_known(layouts, files, prefix):
    buffers = {
        "pos_embedder.seq": torch.arange(256),
        "pos_embedder.dim_spatial_range": torch.ones(4),
        "pos_embedder.dim_temporal_range": torch.ones(4),
        "llm_adapter.rotary_emb.inv_freq": torch.ones(4),
    }
    rewrite(files["dit"], lambda t: {prefix + k.removeprefix("net."): v for k, v in (t | buffers).items()})
    parts = load_three_files(**files)
    assert_same_bits(parts, load_folder(layouts[0]))
    assert [(note.code, note.message.split()[0]) for note in parts.notes] == [("MODEL-BUFFERS-IGNORED", "4")]


def test_a_causal_language_model_will_do_as_encoder(layouts, files):
    rewrite(files["qwen3"], lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    parts = load_three_files(**files)
    assert [note.code for note in parts.notes] == ["MODEL-HEAD-IGNORED"]
    rewrite(files["qwen3"], lambda t: {k.removeprefix("model."): v for k, v in t.items()})
    assert_same_bits(load_three_files(**files), parts)


def test_a_vae_in_diffusers_naming_will_do(layouts, files):
    shutil.copy(layouts[0] / "vae" / "diffusion_pytorch_model.safetensors", files["vae"])
    parts = load_three_files(**files)
    assert_same_bits(parts, load_folder(layouts[0]))
    assert [note.subject for note in parts.notes] == [str(files["vae"])]


def test_without_metadata_the_published_settings_hold(files):
    for role in ("dit", "qwen3", "vae"):
        rewrite(files[role], lambda t: t, {"format": "pt"})
    parts = load_three_files(**files)
    assert parts.text_conditioner.config.min_sequence_length == 512
    assert tuple(parts.transformer.config.rope_scale) == (1.0, 4.0, 4.0)
    assert parts.text_encoder.config.rope_parameters["rope_theta"] == 1e6
    assert parts.vae.config.latents_std == PUBLISHED_ANIMA_SETTINGS["vae"]["latents_std"]
    assert parts.scheduler.config.shift == 3.0
    assert [note.code for note in parts.notes] == ["MODEL-PUBLISHED-SETTINGS"] * 4


def test_a_pipeline_has_the_parts_it_was_made_of(layouts):
    parts = load_folder(layouts[0])
    again = extract_pipeline_parts(build_anima_pipeline(parts))
    assert again.fingerprint == parts.fingerprint
    assert again.vae is parts.vae and again.t5_tokenizer is parts.t5_tokenizer
    pipe = build_anima_pipeline(parts)
    pipe.update_components(text_encoder=None)
    assert refused(ModelError, extract_pipeline_parts, pipe).evidence == {"missing": ["text_encoder"]}


def test_saving_writes_all_or_nothing(layouts, tmp_path):
    parts = load_folder(layouts[0])
    parts.vae.quant_conv.bias.data[0] = float("nan")
    assert refused(NumericsError, save_three_files, parts, tmp_path / "out").code == "WEIGHT-NONFINITE"
    assert not (tmp_path / "out").exists()
    parts.vae.quant_conv.bias.data[0] = 0
    parts.transformer.extra = torch.nn.Linear(2, 2)
    assert refused(ModelError, save_three_files, parts, tmp_path / "out").code == "MODEL-KEYS-UNEXPECTED"
    assert not (tmp_path / "out").exists()


def test_saved_files_carry_the_original_names(layouts):
    names = set(TensorFile(layouts[1] / "anima.safetensors"))
    assert {"net.blocks.2.adaln_modulation_cross_attn.2.weight", "net.llm_adapter.in_proj.bias"} <= names
    assert "decoder.upsamples.3.residual.0.gamma" in TensorFile(layouts[1] / "vae.safetensors")
    assert "model.layers.1.mlp.gate_proj.weight" in TensorFile(layouts[1] / "qwen3.safetensors")


def test_the_family_is_listed_with_its_invariants(layouts):
    anima = next(model for model in MODEL_FAMILIES if model.name == "anima")
    assert anima.name == "anima"
    parts = load_folder(layouts[0])
    assert all(getattr(parts, component) is not None for component in anima.components)
    assert len(dict(anima.invariants)) == len(anima.invariants)
    assert "3u / (1 + 2u)" in dict(anima.invariants)["scheduler-shift"]
