"""The text encoders that families share: CLIP by OpenAI, CLIP by OpenCLIP, and T5.

Sites are spelled as files spell them, by the names that transformers had until 4: "text_model.encoder.layers...". Since
transformers 5 CLIPTextModel leaves "text_model." out, CLIPTextModelWithProjection does not. Sources: transformers
`modeling_clip.py`, `modeling_t5.py`; mlfoundations/open_clip `transformer.py`.
"""

from __future__ import annotations

from finitune.files.keymap import WordPairs, expand_templates
from finitune.models.sites import ComponentSites, Hallmark, ModulePlace, list_place_sites, make_single_site_places

_TEXT_MODEL_PREFIX = "text_model."
_CLIP_LAYER = "text_model.encoder.layers.{i}"
_OPEN_CLIP_RESBLOCK = "transformer.resblocks.{i}"
_CLIP_QKV_SITES = tuple(f"{_CLIP_LAYER}.self_attn.{part}_proj" for part in "qkv")

_CLIP_LAYER_PARTS: WordPairs = (
    ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
)

_OPEN_CLIP_PLACES = (
    ModulePlace("token_embedding", ("text_model.embeddings.token_embedding",)),
    ModulePlace("positional_embedding", ("text_model.embeddings.position_embedding",), weight=""),
    ModulePlace(f"{_OPEN_CLIP_RESBLOCK}.attn.in_proj", _CLIP_QKV_SITES, weight="_weight", bias="_bias"),
    *make_single_site_places(
        *expand_templates(f"{_OPEN_CLIP_RESBLOCK}.{{part}}", f"{_CLIP_LAYER}.{{part}}", part=_CLIP_LAYER_PARTS)
    ),
    ModulePlace("ln_final", ("text_model.final_layer_norm",)),
)
"""OpenCLIP's text tower, and the modules of transformers' CLIP: q, k and v are one weight there."""

_TEXT_PROJECTION_PLACE = ModulePlace("text_projection", ("text_projection",), weight="", transposed=True)

_T5_SITES = (
    "shared",
    "encoder.embed_tokens",
    *(f"encoder.block.{{i}}.layer.0.SelfAttention.{part}" for part in "qkvo"),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    *(f"encoder.block.{{i}}.layer.1.DenseReluDense.{part}" for part in ("wi_0", "wi_1", "wo")),
    *(f"encoder.block.{{i}}.layer.{n}.layer_norm" for n in (0, 1)),
    "encoder.final_layer_norm",
)
"""T5EncoderModel of version 1.1, whose gate is wi_0; `encoder.embed_tokens` is `shared` again."""


def make_clip_l_component(roles: tuple[str, ...], *prefixes: str) -> ComponentSites:
    """OpenAI's CLIP-L as `text_encoder`, which single files keep under transformers' names behind these prefixes."""
    prefixes = (*prefixes, "text_encoders.clip_l.transformer.", "")
    return ComponentSites(
        "text_encoder",
        roles,
        list_place_sites(_OPEN_CLIP_PLACES),
        comfy="clip_l",
        single_file=prefixes,
        outer=_TEXT_MODEL_PREFIX,
    )


def make_open_clip_component(
    name: str, roles: tuple[str, ...], prefix: str, *, comfy: str, projection: bool = False
) -> ComponentSites:
    """A text tower of OpenCLIP behind this prefix in single files; with the projection of its pooled output or not."""
    places = (*_OPEN_CLIP_PLACES, _TEXT_PROJECTION_PLACE) if projection else _OPEN_CLIP_PLACES
    outer = "" if projection else _TEXT_MODEL_PREFIX
    return ComponentSites(name, roles, list_place_sites(places), places, comfy, single_file=(prefix,), outer=outer)


def make_query_width_hallmark(component: str, inputs: int) -> Hallmark:
    """The hallmark of a text encoder of this width."""
    return Hallmark(component, _CLIP_QKV_SITES[0], inputs)


def make_t5_xxl_component(name: str, roles: tuple[str, ...]) -> ComponentSites:
    """T5-XXL's encoder, which has one naming everywhere."""
    return ComponentSites(name, roles, _T5_SITES, comfy="t5xxl", single_file=("text_encoders.t5xxl.transformer.", ""))
