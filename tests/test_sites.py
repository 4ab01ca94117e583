"""The site tables are the modules of the real classes, and their original names are those that diffusers reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn

from finitune.files.keymap import match_template
from finitune.models import MODEL_FAMILIES
from finitune.models.sites import ComponentSites, ModulePlace, list_place_sites

COMPONENTS = {(model.name, part.name): part for model in MODEL_FAMILIES for part in model.adapters.components}
MANY_BLOCKS = 64
"""More than any published model has."""


def sd_unet(text_width: int, **config) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=text_width, **config)


def sdxl_unet() -> nn.Module:
    return sd_unet(
        2048,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def clip(width: int, projection: int = 0) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 64, num_hidden_layers=2
    )
    if not projection:
        return CLIPTextModel(config)
    config.projection_dim = projection
    return CLIPTextModelWithProjection(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=2, feed_forward_proj="gated-gelu")
    )


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(vocab_size=300, hidden_size=1024, intermediate_size=3072, num_hidden_layers=2))


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(num_layers=2, num_single_layers=3, guidance_embeds=True)


def qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=2)


def anima() -> nn.Module:
    from diffusers import CosmosTransformer3DModel

    return CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=16,
        attention_head_dim=128,
        num_layers=2,
        text_embed_dim=1024,
        adaln_lora_dim=256,
        extra_pos_embed_type=None,
    )


def anima_conditioner() -> nn.Module:
    from diffusers import AnimaTextConditioner

    return AnimaTextConditioner(model_dim=512, num_layers=2)  # not as wide as its target, so that it has an in_proj


BUILD: dict[tuple[str, str], Callable[[], nn.Module]] = {
    ("anima", "transformer"): anima,
    ("anima", "text_conditioner"): anima_conditioner,
    ("anima", "text_encoder"): qwen3,
    ("flux", "transformer"): flux,
    ("flux", "text_encoder"): lambda: clip(768),
    ("flux", "text_encoder_2"): t5,
    ("qwen-image", "transformer"): qwen_image,
    ("sd15", "unet"): lambda: sd_unet(768, attention_head_dim=8),
    ("sd15", "text_encoder"): lambda: clip(768),
    ("sd2", "unet"): lambda: sd_unet(1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True),
    ("sd2", "text_encoder"): lambda: clip(1024),
    ("sdxl", "unet"): sdxl_unet,
    ("sdxl", "text_encoder"): lambda: clip(768),
    ("sdxl", "text_encoder_2"): lambda: clip(1280, projection=1280),
}
"""Every component of every family by the published settings that decide about names and text widths, few blocks."""


def built(key: tuple[str, str]) -> dict[str, nn.Module]:
    """The modules that own parameters, under the names that files give them; without memory."""
    with torch.device("meta"):
        root = BUILD[key]()
    modules = {name: module for name, module in root.named_modules() if list(module.parameters(recurse=False))}
    outer = COMPONENTS[key].outer
    left_out = not any(name.startswith(outer) for name in modules)
    return {outer + name if left_out else name: module for name, module in modules.items()}


def spread(template: str, numbers: Iterable[int | str]) -> list[str]:
    """A template with each of these numbers in its field."""
    return [template.replace("{i}", str(n)) for n in numbers] if "{i}" in template else [template]


def numbers_behind(head: str, names: Iterable[str]) -> set[str]:
    return {name.removeprefix(head).partition(".")[0] for name in names if name.startswith(head)}


@pytest.mark.parametrize("key", COMPONENTS, ids="-".join)
def test_sites_are_the_modules_of_the_class(key: tuple[str, str]):
    names = list(built(key))
    sites = COMPONENTS[key].sites
    expected = [name for site in sites for name in spread(site, numbers_behind(site.partition("{i}")[0], names))]
    assert Counter(expected) == Counter(names)


@pytest.mark.parametrize("model", MODEL_FAMILIES, ids=lambda model: model.name)
def test_hallmarks_are_the_widths_of_the_class(model):
    for mark in model.adapters.hallmarks:
        modules = built((model.name, mark.component))
        marked = [module for name, module in modules.items() if match_template(name, mark.site) is not None]
        assert {module.get_parameter("weight").shape[1] for module in marked} == {mark.inputs}, mark


def test_families_have_different_hallmarks():
    hallmarks = {model.name: set(model.adapters.hallmarks) for model in MODEL_FAMILIES}
    assert all(hallmarks.values())
    for name, marks in hallmarks.items():
        assert not any(marks <= others for other, others in hallmarks.items() if other != name), name


@pytest.mark.parametrize("model", MODEL_FAMILIES, ids=lambda model: model.name)
def test_a_family_is_told_whole(model):
    sites = model.adapters
    assert {part.name for part in sites.components} <= set(model.components)
    assert sites.base_model_versions and sites.architecture.endswith("/lora")
    templates = [site for part in sites.components for site in part.sites]
    for block in (*sites.depths, *(template for template, _ in sites.block_maps.values())):
        assert any(template.startswith(f"{block}.") for template in templates), block


def test_families_say_who_they_are_in_different_words():
    words = [word for model in MODEL_FAMILIES for word in {model.name, *model.adapters.base_model_versions}]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("key", [key for key, part in COMPONENTS.items() if part.places], ids="-".join)
def test_each_site_has_one_place(key: tuple[str, str]):
    component = COMPONENTS[key]
    assert Counter(list_place_sites(component.places)) == Counter(component.sites)
    assert max(Counter(place.name for place in component.places).values()) == 1
    for place in component.places:
        assert {"{i}" in name for name in (place.name, *place.sites)} == {"{i}" in place.name}


@pytest.mark.parametrize("key", COMPONENTS, ids="-".join)
def test_flat_names_do_not_collide(key: tuple[str, str]):
    component = COMPONENTS[key]
    for templates in (component.sites, [place.name for place in component.places]):
        flat = [name.replace(".", "_") for template in templates for name in spread(template, range(MANY_BLOCKS))]
        assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("model", MODEL_FAMILIES, ids=lambda model: model.name)
def test_components_of_one_role_do_not_collide(model):
    def role(part: ComponentSites) -> str:
        return part.roles[0]

    for _, parts in groupby(sorted(model.adapters.components, key=role), key=role):
        flat = [name.replace(".", "_") for part in parts for name in kohya_templates(part)]
        assert len(set(flat)) == len(flat)


def kohya_templates(part: ComponentSites) -> tuple[str, ...]:
    return tuple(place.name for place in part.places) if part.kohya_native else part.sites


@pytest.mark.parametrize(
    ("family", "component", "flat", "sites"),
    [
        ("anima", "transformer", "blocks_3_cross_attn_q_proj", ["transformer_blocks.3.attn2.to_q"]),
        ("anima", "transformer", "blocks_3_mlp_layer1", ["transformer_blocks.3.ff.net.0.proj"]),
        ("anima", "text_conditioner", "llm_adapter_blocks_1_self_attn_o_proj", ["blocks.1.self_attn.o_proj"]),
        ("anima", "text_encoder", "layers_9_mlp_gate_proj", ["layers.9.mlp.gate_proj"]),
        ("flux", "transformer", "double_blocks_0_img_attn_qkv", [f"transformer_blocks.0.attn.to_{p}" for p in "qkv"]),
        ("flux", "transformer", "single_blocks_37_linear2", ["single_transformer_blocks.37.proj_out"]),
        ("flux", "text_encoder_2", "encoder_block_23_layer_0_SelfAttention_q", None),
        ("sd15", "unet", "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", None),
        ("sd15", "text_encoder", "text_model_encoder_layers_0_self_attn_q_proj", None),
        ("sd2", "text_encoder", "text_model_encoder_layers_22_mlp_fc1", None),
        (
            "sdxl",
            "unet",
            "input_blocks_4_1_transformer_blocks_0_attn1_to_q",
            ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"],
        ),
        ("sdxl", "unet", "output_blocks_2_2_conv", ["up_blocks.0.upsamplers.0.conv"]),
        ("sdxl", "unet", "label_emb_0_0", ["add_embedding.linear_1"]),
        ("sdxl", "text_encoder_2", "text_projection", ["text_projection"]),
    ],
)
def test_kohya_names_of_real_files(family: str, component: str, flat: str, sites: list[str] | None):
    part = COMPONENTS[family, component]
    landings = [
        [spread(site, [n])[0] for site in place.sites]
        for place in (part.places if part.kohya_native else [ModulePlace(site, (site,)) for site in part.sites])
        for n in range(MANY_BLOCKS if "{i}" in place.name else 1)
        if spread(place.name, [n])[0].replace(".", "_") == flat
    ]
    assert len(landings) == 1
    assert sites in (None, landings[0])


@pytest.mark.parametrize(
    ("original", "block"), [("output_blocks.2.1.conv", 0), ("output_blocks.5.2.conv", 1), ("output_blocks.8.2.conv", 2)]
)
def test_an_upsampler_follows_the_attention_if_there_is_one(original: str, block: int):
    """A test of its own, as diffusers reads either name."""
    sites = {place.name: place.sites for place in COMPONENTS["sd15", "unet"].places}
    assert sites[original] == (f"up_blocks.{block}.upsamplers.0.conv",)


def divided(place: ModulePlace, tensor: Tensor, width: int) -> list[Tensor]:
    """The sites' tensors of a stored one, the slow way; `width` is the number of inputs that the model has."""
    if place.transposed and tensor.ndim == 2:
        return [tensor.T]
    if place.swapped:
        first, second = tensor.chunk(2)
        return [torch.cat((second, first))]
    if place.division == "by-input":
        edges = [n * width for n in range(len(place.sites))]
        return [tensor[a:b] for a, b in zip(edges, [*edges[1:], len(tensor)], strict=True)]
    return list(tensor.chunk(len(place.sites)))


def stored(part: ComponentSites, prefix: str, width: int = 4) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(a checkpoint in the original naming, what it is in diffusers'): two of each block, every number another."""
    checkpoint: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for place in part.places or [ModulePlace(site, (site,)) for site in part.sites]:
        rows = 7 * width if place.division == "by-input" else 4 * len(place.sites)
        has_bias = place.weight in (".weight", "_weight") and not place.sites[0].endswith("_embedding")
        endings = [(place.weight, ".weight", (rows, 4)), *([(place.bias, ".bias", (rows,))] if has_bias else [])]
        for n in range(2 if "{i}" in place.name else 1):
            for old, new, shape in endings:
                tensor = torch.rand(shape)
                checkpoint[prefix + spread(place.name, [n])[0] + old] = tensor
                for site, rows_of_site in zip(place.sites, divided(place, tensor, width), strict=True):
                    expected[spread(site, [n])[0] + new] = rows_of_site
    return checkpoint, expected


def same_tensors(converted: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert converted.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(converted[name], tensor)]


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
def test_unet_names_are_those_that_diffusers_reads(family: str):
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    part = COMPONENTS[family, "unet"]
    checkpoint, expected = stored(part, part.single_file[0])
    config = {"layers_per_block": 2, "addition_embed_type": "text_time" if family == "sdxl" else None}
    same_tensors(convert_ldm_unet_checkpoint(checkpoint, config), expected)


@pytest.mark.parametrize("prefix", COMPONENTS["flux", "transformer"].single_file[:2])
def test_flux_names_and_rows_are_those_that_diffusers_reads(prefix: str):
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    checkpoint, expected = stored(COMPONENTS["flux", "transformer"], prefix, width=3072)
    same_tensors(convert_flux_transformer_checkpoint_to_diffusers(checkpoint), expected)
    assert not checkpoint


def test_cosmos_names_are_those_that_diffusers_reads():
    from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers

    part = COMPONENTS["anima", "transformer"]
    checkpoint, expected = stored(part, part.single_file[0])
    same_tensors(convert_cosmos_transformer_checkpoint_to_diffusers(checkpoint), expected)


@pytest.mark.parametrize("key", [("sd2", "text_encoder"), ("sdxl", "text_encoder_2")], ids="-".join)
def test_open_clip_names_and_rows_are_those_that_diffusers_reads(key: tuple[str, str]):
    from types import SimpleNamespace

    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    part = COMPONENTS[key]
    checkpoint, expected = stored(part, part.single_file[0])
    text_model = SimpleNamespace(config=SimpleNamespace(hidden_size=4))
    same_tensors(convert_open_clip_checkpoint(text_model, checkpoint, part.single_file[0]), expected)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_clip_names_are_those_that_diffusers_reads(family: str):
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint

    part = COMPONENTS[family, "text_encoder"]
    checkpoint, expected = stored(part, part.single_file[0])
    same_tensors(convert_ldm_clip_checkpoint(checkpoint), expected)
