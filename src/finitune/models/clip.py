"""The text encoders that families share: CLIP by OpenAI, CLIP by OpenCLIP, and T5.

Sites are spelled as files spell them, by the names that transformers had until 4: "text_model.encoder.layers...". Since
transformers 5 CLIPTextModel leaves "text_model." out, CLIPTextModelWithProjection does not. Sources: transformers
`modeling_clip.py`, `modeling_t5.py`; mlfoundations/open_clip `transformer.py`.
"""

from __future__ import annotations

from finitune.files.keymap import Choice, spell
from finitune.models.sites import ComponentSites, Hallmark, Place, single, sites_of

OUTER = "text_model."
LAYER = "text_model.encoder.layers.{i}"
RESBLOCK = "transformer.resblocks.{i}"
QKV = tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")

LAYER_PARTS: Choice = (
    ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
)

OPEN_CLIP = (
    Place("token_embedding", ("text_model.embeddings.token_embedding",)),
    Place("positional_embedding", ("text_model.embeddings.position_embedding",), weight=""),
    Place(f"{RESBLOCK}.attn.in_proj", QKV, weight="_weight", bias="_bias"),
    *single(*spell(f"{RESBLOCK}.{{part}}", f"{LAYER}.{{part}}", part=LAYER_PARTS)),
    Place("ln_final", ("text_model.final_layer_norm",)),
)
"""OpenCLIP's text tower, and the modules of transformers' CLIP: q, k and v are one weight there."""

PROJECTION = Place("text_projection", ("text_projection",), weight="", transposed=True)

T5 = (
    "shared",
    "encoder.embed_tokens",
    *(f"encoder.block.{{i}}.layer.0.SelfAttention.{part}" for part in "qkvo"),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    *(f"encoder.block.{{i}}.layer.1.DenseReluDense.{part}" for part in ("wi_0", "wi_1", "wo")),
    *(f"encoder.block.{{i}}.layer.{n}.layer_norm" for n in (0, 1)),
    "encoder.final_layer_norm",
)
"""T5EncoderModel of version 1.1, whose gate is wi_0; `encoder.embed_tokens` is `shared` again."""


def clip_l(roles: tuple[str, ...], *prefixes: str) -> ComponentSites:
    """OpenAI's CLIP-L as `text_encoder`, which single files keep under transformers' names behind these prefixes."""
    prefixes = (*prefixes, "text_encoders.clip_l.transformer.", "")
    return ComponentSites("text_encoder", roles, sites_of(OPEN_CLIP), comfy="clip_l", single_file=prefixes, outer=OUTER)


def open_clip(
    name: str, roles: tuple[str, ...], prefix: str, *, comfy: str, projection: bool = False
) -> ComponentSites:
    """A text tower of OpenCLIP behind this prefix in single files; with the projection of its pooled output or not."""
    places = (*OPEN_CLIP, PROJECTION) if projection else OPEN_CLIP
    outer = "" if projection else OUTER
    return ComponentSites(name, roles, sites_of(places), places, comfy, single_file=(prefix,), outer=outer)


def query_width(component: str, inputs: int) -> Hallmark:
    """The hallmark of a text encoder of this width."""
    return Hallmark(component, QKV[0], inputs)


def t5_xxl(name: str, roles: tuple[str, ...]) -> ComponentSites:
    """T5-XXL's encoder, which has one naming everywhere."""
    return ComponentSites(name, roles, T5, comfy="t5xxl", single_file=("text_encoders.t5xxl.transformer.", ""))
