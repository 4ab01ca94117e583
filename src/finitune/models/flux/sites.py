"""Where adapters of Flux.1 lie: Black Forest Labs' names with their fused weights, and FluxTransformer2DModel.

Sources: black-forest-labs/flux `src/flux/model.py`, `modules/layers.py`; diffusers `transformer_flux.py`.
"""

from __future__ import annotations

from finitune.files.keymap import spell
from finitune.models.clip import clip_l, t5_xxl
from finitune.models.sites import AdapterSites, ComponentSites, Hallmark, Place, single, sites_of

DOUBLE, DOUBLE_SITE = "double_blocks.{i}", "transformer_blocks.{i}"
SINGLE, SINGLE_SITE = "single_blocks.{i}", "single_transformer_blocks.{i}"

EMBEDDERS = (
    ("time_in", "time_text_embed.timestep_embedder"),
    ("guidance_in", "time_text_embed.guidance_embedder"),
    ("vector_in", "time_text_embed.text_embedder"),
)
LINEARS = (("in_layer", "linear_1"), ("out_layer", "linear_2"))
DOUBLE_LINEARS = (
    ("img_mod.lin", "norm1.linear"),
    ("txt_mod.lin", "norm1_context.linear"),
    ("img_attn.proj", "attn.to_out.0"),
    ("txt_attn.proj", "attn.to_add_out"),
    ("img_mlp.0", "ff.net.0.proj"),
    ("img_mlp.2", "ff.net.2"),
    ("txt_mlp.0", "ff_context.net.0.proj"),
    ("txt_mlp.2", "ff_context.net.2"),
)
NORMS = (
    *spell(
        f"{DOUBLE}.{{stream}}_attn.norm.{{part}}_norm",
        f"{DOUBLE_SITE}.attn.norm_{{stream}}{{part}}",
        stream=(("img", ""), ("txt", "added_")),
        part=(("query", "q"), ("key", "k")),
    ),
    *spell(f"{SINGLE}.norm.{{part}}_norm", f"{SINGLE_SITE}.attn.norm_{{part}}", part=(("query", "q"), ("key", "k"))),
)

PLACES = (
    *single(
        ("img_in", "x_embedder"),
        ("txt_in", "context_embedder"),
        *spell("{embedder}.{linear}", "{embedder}.{linear}", embedder=EMBEDDERS, linear=LINEARS),
        *spell(f"{DOUBLE}.{{linear}}", f"{DOUBLE_SITE}.{{linear}}", linear=DOUBLE_LINEARS),
        (f"{SINGLE}.modulation.lin", f"{SINGLE_SITE}.norm.linear"),
        (f"{SINGLE}.linear2", f"{SINGLE_SITE}.proj_out"),
        ("final_layer.linear", "proj_out"),
    ),
    *(Place(name, (site,), weight=".scale") for name, site in NORMS),
    Place(f"{DOUBLE}.img_attn.qkv", tuple(f"{DOUBLE_SITE}.attn.to_{part}" for part in "qkv")),
    Place(f"{DOUBLE}.txt_attn.qkv", tuple(f"{DOUBLE_SITE}.attn.add_{part}_proj" for part in "qkv")),
    Place(
        f"{SINGLE}.linear1",
        (*(f"{SINGLE_SITE}.attn.to_{part}" for part in "qkv"), f"{SINGLE_SITE}.proj_mlp"),
        "by-input",
    ),
    Place("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped=True),
)

SITES = AdapterSites(
    components=(
        ComponentSites(
            "transformer",
            ("unet", "transformer"),
            sites_of(PLACES),
            PLACES,
            single_file=("", "model.diffusion_model.", "diffusion_model."),
            kohya_native=True,
        ),
        clip_l(("te1",)),
        t5_xxl("text_encoder_2", ("te3", "te2")),
    ),
    hallmarks=(
        *(Hallmark("transformer", f"{DOUBLE_SITE}.{part}", 3072) for part in ("attn.to_k", "ff.net.0.proj")),
        *(Hallmark("transformer", f"{SINGLE_SITE}.{part}", 3072) for part in ("attn.to_k", "proj_mlp")),
        Hallmark("transformer", "context_embedder", 4096),
    ),
    base_model_versions=("flux1",),
    architecture="flux-1-dev/lora",
    prediction_type="flow",
    depths={DOUBLE_SITE: 19, SINGLE_SITE: 38},
)
