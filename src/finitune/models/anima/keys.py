"""How Anima's tensors are spelled in files, as data: original names on the left, diffusers names on the right.

Sources of the facts: NVIDIA Cosmos-Predict2 and circlestone-labs/Anima checkpoints for the left side; diffusers
`transformer_cosmos.py`, `condition_embedder_anima.py` and `autoencoder_kl_qwenimage.py` for the right; Wan 2.1
`wan/modules/vae.py` for the VAE's left side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finitune.files.keymap import KeyMap, TemplatePair, expand_templates, pair_same_words
from finitune.models.spec import FilePart

_DIT_ATTENTIONS = (("self_attn", "attn1"), ("cross_attn", "attn2"))
_DIT_SUBLAYERS = (("self_attn", "norm1"), ("cross_attn", "norm2"), ("mlp", "norm3"))
_DIT_LINEARS = (("1", "linear_1"), ("2", "linear_2"))

ANIMA_TRANSFORMER_KEYS = KeyMap(
    [
        ("x_embedder.proj.1.weight", "patch_embed.proj.weight"),
        ("t_embedding_norm.weight", "time_embed.norm.weight"),
        ("final_layer.linear.weight", "proj_out.weight"),
        *expand_templates(
            "t_embedder.1.{linear}.weight",
            "time_embed.t_embedder.{linear}.weight",
            linear=pair_same_words("linear_1", "linear_2"),
        ),
        *expand_templates(
            "final_layer.adaln_modulation.{linear}.weight", "norm_out.{linear}.weight", linear=_DIT_LINEARS
        ),
        *expand_templates(
            "blocks.{i}.{attention}.{qkv}_proj.weight",
            "transformer_blocks.{i}.{attention}.to_{qkv}.weight",
            attention=_DIT_ATTENTIONS,
            qkv=pair_same_words("q", "k", "v"),
        ),
        *expand_templates(
            "blocks.{i}.{attention}.{qk}_norm.weight",
            "transformer_blocks.{i}.{attention}.norm_{qk}.weight",
            attention=_DIT_ATTENTIONS,
            qk=pair_same_words("q", "k"),
        ),
        *expand_templates(
            "blocks.{i}.{attention}.output_proj.weight",
            "transformer_blocks.{i}.{attention}.to_out.0.weight",
            attention=_DIT_ATTENTIONS,
        ),
        *expand_templates(
            "blocks.{i}.adaln_modulation_{sublayer}.{linear}.weight",
            "transformer_blocks.{i}.{sublayer}.{linear}.weight",
            sublayer=_DIT_SUBLAYERS,
            linear=_DIT_LINEARS,
        ),
        ("blocks.{i}.mlp.layer1.weight", "transformer_blocks.{i}.ff.net.0.proj.weight"),
        ("blocks.{i}.mlp.layer2.weight", "transformer_blocks.{i}.ff.net.2.weight"),
    ]
)
"""The denoiser: original names behind their prefix, and CosmosTransformer3DModel."""

_CONDITIONER_ATTENTIONS = pair_same_words("self_attn", "cross_attn")
_WEIGHT_AND_BIAS = pair_same_words("weight", "bias")

ANIMA_CONDITIONER_KEYS = KeyMap(
    [
        ("llm_adapter.embed.weight", "embed.weight"),
        ("llm_adapter.norm.weight", "norm.weight"),
        *expand_templates(
            "llm_adapter.{proj}.{p}", "{proj}.{p}", proj=pair_same_words("in_proj", "out_proj"), p=_WEIGHT_AND_BIAS
        ),
        *expand_templates(
            "llm_adapter.blocks.{i}.norm_{sublayer}.weight",
            "blocks.{i}.norm_{sublayer}.weight",
            sublayer=pair_same_words("self_attn", "cross_attn", "mlp"),
        ),
        *expand_templates(
            "llm_adapter.blocks.{i}.{attention}.{part}.weight",
            "blocks.{i}.{attention}.{part}.weight",
            attention=_CONDITIONER_ATTENTIONS,
            part=pair_same_words("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
        ),
        *expand_templates(
            "llm_adapter.blocks.{i}.mlp.{n}.{p}",
            "blocks.{i}.mlp.{n}.{p}",
            n=pair_same_words("0", "2"),
            p=_WEIGHT_AND_BIAS,
        ),
    ]
)
"""The text conditioner: "llm_adapter.*" beside the denoiser, and AnimaTextConditioner."""

ANIMA_DENOISER_PREFIXES = ("net.", "model.diffusion_model.", "diffusion_model.", "")
"""What a file may put before the denoiser's names; the first is the official files', and the one that we write."""

_QWEN3_PREFIXES = ("model.", "")

_TOLERATED_BUFFER_PATTERN = re.compile(r"(.+\.)?(pos_embedder\.(seq|dim_spatial_range|dim_temporal_range)|inv_freq)")
"""Buffers that some programs save and every program computes."""

_UNUSED_HEAD_KEYS = ("lm_head.weight",)
"""What a language model has and a text encoder has not."""

_VAE_RESIDUAL_LAYERS = (
    ("residual.0.gamma", "norm1.gamma"),
    ("residual.2.weight", "conv1.weight"),
    ("residual.2.bias", "conv1.bias"),
    ("residual.3.gamma", "norm2.gamma"),
    ("residual.6.weight", "conv2.weight"),
    ("residual.6.bias", "conv2.bias"),
    ("shortcut.weight", "conv_shortcut.weight"),
    ("shortcut.bias", "conv_shortcut.bias"),
)
_VAE_RESAMPLE_LAYERS = pair_same_words("resample.1.weight", "resample.1.bias", "time_conv.weight", "time_conv.bias")
_VAE_ATTENTION_LAYERS = pair_same_words("norm.gamma", "to_qkv.weight", "to_qkv.bias", "proj.weight", "proj.bias")
_VAE_HALVES = pair_same_words("encoder", "decoder")


def build_vae_keymap(num_levels: int, num_res_blocks: int) -> KeyMap:
    """The VAE: Wan names and AutoencoderKLQwenImage, whose decoder is numbered by level and Wan's in one row.

    Each of Wan's decoder levels is num_res_blocks + 1 residual blocks and, but for the last, one upsampler.
    """
    pairs: list[TemplatePair] = [
        *expand_templates("conv1.{p}", "quant_conv.{p}", p=_WEIGHT_AND_BIAS),
        *expand_templates("conv2.{p}", "post_quant_conv.{p}", p=_WEIGHT_AND_BIAS),
        *expand_templates("{half}.conv1.{p}", "{half}.conv_in.{p}", half=_VAE_HALVES, p=_WEIGHT_AND_BIAS),
        *expand_templates("{half}.head.0.gamma", "{half}.norm_out.gamma", half=_VAE_HALVES),
        *expand_templates("{half}.head.2.{p}", "{half}.conv_out.{p}", half=_VAE_HALVES, p=_WEIGHT_AND_BIAS),
        *expand_templates(
            "{half}.middle.{n}.{layer}",
            "{half}.mid_block.resnets.{n}.{layer}",
            half=_VAE_HALVES,
            n=(("0", "0"), ("2", "1")),
            layer=_VAE_RESIDUAL_LAYERS,
        ),
        *expand_templates(
            "{half}.middle.1.{layer}",
            "{half}.mid_block.attentions.0.{layer}",
            half=_VAE_HALVES,
            layer=_VAE_ATTENTION_LAYERS,
        ),
        *expand_templates(
            "encoder.downsamples.{i}.{layer}",
            "encoder.down_blocks.{i}.{layer}",
            layer=_VAE_RESIDUAL_LAYERS + _VAE_RESAMPLE_LAYERS,
        ),
    ]
    for level in range(num_levels):
        first = level * (num_res_blocks + 2)
        for block in range(num_res_blocks + 1):
            right = f"decoder.up_blocks.{level}.resnets.{block}"
            pairs += expand_templates(
                f"decoder.upsamples.{first + block}.{{layer}}", f"{right}.{{layer}}", layer=_VAE_RESIDUAL_LAYERS
            )
        if level < num_levels - 1:
            left = f"decoder.upsamples.{first + num_res_blocks + 1}"
            right = f"decoder.up_blocks.{level}.upsamplers.0"
            pairs += expand_templates(f"{left}.{{layer}}", f"{right}.{{layer}}", layer=_VAE_RESAMPLE_LAYERS)
    return KeyMap(pairs)


def infer_vae_layout(names: Iterable[str]) -> tuple[int, int]:
    """(number of levels, residual blocks per level) of a VAE's encoder, from names in either naming."""
    down = re.compile(r"encoder\.(?:downsamples|down_blocks)\.(\d+)\.(.+)")
    matches = [m for m in map(down.fullmatch, names) if m]
    resamples = {m[1] for m in matches if m[2].startswith("resample.")}
    residuals = {m[1] for m in matches if m[2] in ("residual.2.weight", "conv1.weight")}
    num_levels = len(resamples) + 1
    return num_levels, len(residuals) // num_levels


@dataclass(frozen=True)
class SortedKeys:
    """A file's names by component: {component: {diffusers name: name in the file}}, and what belongs to none."""

    names: Mapping[str, Mapping[str, str]]
    unknown: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def find_landmark_prefix(names: Iterable[str], prefixes: tuple[str, ...], landmark: str) -> str:
    """The prefix with which `landmark` is among the names; "" where none is."""
    present = set(names)
    return next((prefix for prefix in prefixes if prefix + landmark in present), "")


def sort_dit(names: Iterable[str]) -> SortedKeys:
    """The names of a denoiser file: transformer and text_conditioner."""
    names = list(names)
    prefix = find_landmark_prefix(names, ANIMA_DENOISER_PREFIXES, "x_embedder.proj.1.weight")
    parts: dict[str, dict[str, str]] = {"transformer": {}, "text_conditioner": {}}
    unknown: list[str] = []
    tolerated = [name for name in names if _TOLERATED_BUFFER_PATTERN.fullmatch(name)]
    for name in names:
        bare = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if (new := ANIMA_TRANSFORMER_KEYS.forward(bare)) is not None:
            parts["transformer"][new] = name
        elif (new := ANIMA_CONDITIONER_KEYS.forward(bare)) is not None:
            parts["text_conditioner"][new] = name
        elif not _TOLERATED_BUFFER_PATTERN.fullmatch(name):
            unknown.append(name)
    return SortedKeys(parts, tuple(unknown), tuple(tolerated))


def sort_text_encoder(names: Iterable[str]) -> SortedKeys:
    """The names of a Qwen3 file, with or without "model."; the unused head of the language model is set aside."""
    names = list(names)
    prefix = find_landmark_prefix(names, _QWEN3_PREFIXES, "embed_tokens.weight")
    sets_aside = [name for name in names if _TOLERATED_BUFFER_PATTERN.fullmatch(name) or name in _UNUSED_HEAD_KEYS]
    kept = [name for name in names if name not in sets_aside]
    inside = {name.removeprefix(prefix): name for name in kept if name.startswith(prefix)}
    return SortedKeys(
        {"text_encoder": inside},
        tuple(name for name in kept if not name.startswith(prefix)),
        tuple(name for name in sets_aside if name not in _UNUSED_HEAD_KEYS),
        tuple(name for name in sets_aside if name in _UNUSED_HEAD_KEYS),
    )


def sort_vae(names: Iterable[str]) -> SortedKeys:
    """The names of a VAE file, in Wan's naming or in diffusers'."""
    names = list(names)
    if "quant_conv.weight" in names:
        return sort_plain("vae", names)
    renamed = build_vae_keymap(*infer_vae_layout(names)).rename(names)
    return SortedKeys({"vae": renamed.names}, renamed.unknown)


def sort_plain(component: str, names: Iterable[str]) -> SortedKeys:
    """The names of a component in diffusers' own naming."""
    names = list(names)
    tolerated = tuple(name for name in names if _TOLERATED_BUFFER_PATTERN.fullmatch(name))
    return SortedKeys({component: {name: name for name in names if name not in tolerated}}, (), tolerated)


ANIMA_FILE_PARTS = (
    FilePart(
        "the denoiser of Anima",
        "transformer",
        r"(net\.|model\.diffusion_model\.|diffusion_model\.)?x_embedder\.proj\.1\.weight",
        "dit",
    ),
    FilePart("a denoiser in diffusers' naming", "transformer", r"transformer_blocks\.0\.attn1\.to_q\.weight"),
    FilePart("the VAE", "vae", r"decoder\.(conv1|conv_in)\.weight", "vae"),
    FilePart("the text encoder", "text_encoder", r"(model\.)?layers\.0\.self_attn\.q_norm\.weight", "qwen3"),
    FilePart("a text conditioner alone", "text_conditioner", r"(llm_adapter\.)?blocks\.0\.norm_cross_attn\.weight"),
)
