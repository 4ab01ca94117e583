"""The sizes of a model are read off the shapes of its tensors."""

from __future__ import annotations

import pytest
import torch

from finitune.models.anima.components import build_anima_component
from finitune.models.anima.configs import CONFIG_READER_BY_COMPONENT, PUBLISHED_ANIMA_SETTINGS, compute_exact_ratio


def published_shapes(num_blocks: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of a model with the published block count and tiny widths, by component."""
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    with torch.device("meta"):
        modules = {
            "transformer": CosmosTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                num_layers=num_blocks,
                text_embed_dim=8,
                adaln_lora_dim=4,
                extra_pos_embed_type=None,
            ),
            "text_conditioner": AnimaTextConditioner(16, 8, 8, 6, 2, 4.0, 50),
        }
    return {name: {k: tuple(v.shape) for k, v in module.state_dict().items()} for name, module in modules.items()}


@pytest.mark.parametrize("num_blocks", [1, 28, 40, 52])
def test_sizes_are_read_off_the_header(num_blocks):
    shapes = published_shapes(num_blocks)
    config = CONFIG_READER_BY_COMPONENT["transformer"](shapes["transformer"], PUBLISHED_ANIMA_SETTINGS["transformer"])
    told = {key: value for key, value in config.items() if key not in PUBLISHED_ANIMA_SETTINGS["transformer"]}
    assert told == {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": num_blocks,
        "mlp_ratio": 4.0,
        "text_embed_dim": 8,
        "adaln_lora_dim": 4,
    }
    config = CONFIG_READER_BY_COMPONENT["text_conditioner"](
        shapes["text_conditioner"], PUBLISHED_ANIMA_SETTINGS["text_conditioner"]
    )
    assert (config["source_dim"], config["target_dim"], config["model_dim"]) == (16, 8, 8)
    assert (config["num_layers"], config["num_attention_heads"], config["mlp_ratio"]) == (6, 2, 4.0)
    assert (config["target_vocab_size"], config["min_sequence_length"]) == (50, 512)


def table_of_shapes(num_blocks: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The published model's shapes, by component, in diffusers naming: what decides the sizes."""
    last = f"transformer_blocks.{num_blocks - 1}"
    transformer = {
        "patch_embed.proj.weight": (2048, 68),
        "proj_out.weight": (64, 2048),
        "transformer_blocks.0.attn1.norm_q.weight": (128,),
        "transformer_blocks.0.attn2.to_k.weight": (2048, 1024),
        "transformer_blocks.0.ff.net.0.proj.weight": (8192, 2048),
        "transformer_blocks.0.norm1.linear_1.weight": (256, 2048),
        **{f"{last}.{n}.weight": (1,) for n in range(2 * num_blocks)},  # as many tensors as blocks, at least
    }
    conditioner = {
        "embed.weight": (32128, 1024),
        "out_proj.weight": (1024, 1024),
        "blocks.0.self_attn.q_proj.weight": (1024, 1024),
        "blocks.0.cross_attn.q_norm.weight": (64,),
        "blocks.0.cross_attn.k_proj.weight": (1024, 1024),
        "blocks.0.mlp.0.weight": (4096, 1024),
        "blocks.5.mlp.0.weight": (4096, 1024),
    }
    return {"transformer": transformer, "text_conditioner": conditioner}


@pytest.mark.parametrize(("num_blocks", "parameters"), [(28, 2_091_068_928), (40, 2_921_547_264)])
def test_the_published_sizes_make_the_published_models(num_blocks, parameters):
    shapes = table_of_shapes(num_blocks)
    modules = [
        build_anima_component(name, CONFIG_READER_BY_COMPONENT[name](shapes[name], PUBLISHED_ANIMA_SETTINGS[name]))
        for name in shapes
    ]
    assert sum(p.numel() for module in modules for p in module.parameters()) == parameters
    assert all(p.is_meta for module in modules for p in module.parameters())


@pytest.mark.parametrize("temporal", [[], [True], [False, True, True], [True, False, True, False]])
@pytest.mark.parametrize("num_res_blocks", [1, 3])
def test_any_vae_is_read_off_its_header(temporal, num_res_blocks):
    from diffusers import AutoencoderKLQwenImage

    settings = {
        "base_dim": 4,
        "z_dim": 6,
        "dim_mult": [1, 2, 2, 4, 8][: len(temporal) + 1],
        "num_res_blocks": num_res_blocks,
        "temperal_downsample": temporal,
        "input_channels": 3,
    }
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage(**settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    assert CONFIG_READER_BY_COMPONENT["vae"](shapes, {}) == settings


def test_a_ratio_gives_its_width_back():
    assert all(
        int(whole * compute_exact_ratio(part, whole)) == part for whole in range(1, 130) for part in range(1, 400, 7)
    )
