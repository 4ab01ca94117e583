"""Where adapters of Flux.1 lie: Black Forest Labs' names with their fused weights, and FluxTransformer2DModel.

Sources: black-forest-labs/flux `src/flux/model.py`, `modules/layers.py`; diffusers `transformer_flux.py`.
"""

from __future__ import annotations

from finitune.files.keymap import expand_templates
from finitune.models.clip import make_clip_l_component, make_t5_xxl_component
from finitune.models.sites import (
    AdapterSites,
    ComponentSites,
    Hallmark,
    ModulePlace,
    list_place_sites,
    make_single_site_places,
)

_DOUBLE_BLOCK, _DOUBLE_BLOCK_SITE = "double_blocks.{i}", "transformer_blocks.{i}"
_SINGLE_BLOCK, _SINGLE_BLOCK_SITE = "single_blocks.{i}", "single_transformer_blocks.{i}"

_EMBEDDER_NAMES = (
    ("time_in", "time_text_embed.timestep_embedder"),
    ("guidance_in", "time_text_embed.guidance_embedder"),
    ("vector_in", "time_text_embed.text_embedder"),
)
_EMBEDDER_LINEARS = (("in_layer", "linear_1"), ("out_layer", "linear_2"))
_DOUBLE_BLOCK_LINEARS = (
    ("img_mod.lin", "norm1.linear"),
    ("txt_mod.lin", "norm1_context.linear"),
    ("img_attn.proj", "attn.to_out.0"),
    ("txt_attn.proj", "attn.to_add_out"),
    ("img_mlp.0", "ff.net.0.proj"),
    ("img_mlp.2", "ff.net.2"),
    ("txt_mlp.0", "ff_context.net.0.proj"),
    ("txt_mlp.2", "ff_context.net.2"),
)
_NORM_NAMES = (
    *expand_templates(
        f"{_DOUBLE_BLOCK}.{{stream}}_attn.norm.{{part}}_norm",
        f"{_DOUBLE_BLOCK_SITE}.attn.norm_{{stream}}{{part}}",
        stream=(("img", ""), ("txt", "added_")),
        part=(("query", "q"), ("key", "k")),
    ),
    *expand_templates(
        f"{_SINGLE_BLOCK}.norm.{{part}}_norm",
        f"{_SINGLE_BLOCK_SITE}.attn.norm_{{part}}",
        part=(("query", "q"), ("key", "k")),
    ),
)

_FLUX_PLACES = (
    *make_single_site_places(
        ("img_in", "x_embedder"),
        ("txt_in", "context_embedder"),
        *expand_templates(
            "{embedder}.{linear}", "{embedder}.{linear}", embedder=_EMBEDDER_NAMES, linear=_EMBEDDER_LINEARS
        ),
        *expand_templates(
            f"{_DOUBLE_BLOCK}.{{linear}}", f"{_DOUBLE_BLOCK_SITE}.{{linear}}", linear=_DOUBLE_BLOCK_LINEARS
        ),
        (f"{_SINGLE_BLOCK}.modulation.lin", f"{_SINGLE_BLOCK_SITE}.norm.linear"),
        (f"{_SINGLE_BLOCK}.linear2", f"{_SINGLE_BLOCK_SITE}.proj_out"),
        ("final_layer.linear", "proj_out"),
    ),
    *(ModulePlace(name, (site,), weight=".scale") for name, site in _NORM_NAMES),
    ModulePlace(f"{_DOUBLE_BLOCK}.img_attn.qkv", tuple(f"{_DOUBLE_BLOCK_SITE}.attn.to_{part}" for part in "qkv")),
    ModulePlace(f"{_DOUBLE_BLOCK}.txt_attn.qkv", tuple(f"{_DOUBLE_BLOCK_SITE}.attn.add_{part}_proj" for part in "qkv")),
    ModulePlace(
        f"{_SINGLE_BLOCK}.linear1",
        (*(f"{_SINGLE_BLOCK_SITE}.attn.to_{part}" for part in "qkv"), f"{_SINGLE_BLOCK_SITE}.proj_mlp"),
        "by-input",
    ),
    ModulePlace("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True),
)

FLUX_SITES = AdapterSites(
    components=(
        ComponentSites(
            "transformer",
            ("unet", "transformer"),
            list_place_sites(_FLUX_PLACES),
            _FLUX_PLACES,
            single_file=("", "model.diffusion_model.", "diffusion_model."),
            kohya_native=True,
        ),
        make_clip_l_component(("te1",)),
        make_t5_xxl_component("text_encoder_2", ("te3", "te2")),
    ),
    hallmarks=(
        *(Hallmark("transformer", f"{_DOUBLE_BLOCK_SITE}.{part}", 3072) for part in ("attn.to_k", "ff.net.0.proj")),
        *(Hallmark("transformer", f"{_SINGLE_BLOCK_SITE}.{part}", 3072) for part in ("attn.to_k", "proj_mlp")),
        Hallmark("transformer", "context_embedder", 4096),
    ),
    base_model_versions=("flux1",),
    architecture="flux-1-dev/lora",
    prediction_type="flow",
    depths={_DOUBLE_BLOCK_SITE: 19, _SINGLE_BLOCK_SITE: 38},
)
