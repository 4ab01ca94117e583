"""How Anima's tensors are spelled in files, as data: original names on the left, diffusers names on the right.

Sources of the facts: NVIDIA Cosmos-Predict2 and circlestone-labs/Anima checkpoints for the left side; diffusers
`transformer_cosmos.py`, `condition_embedder_anima.py` and `autoencoder_kl_qwenimage.py` for the right; Wan 2.1
`wan/modules/vae.py` for the VAE's left side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from finitune.files.keymap import KeyMap, Pair, same, spell

ATTENTIONS = (("self_attn", "attn1"), ("cross_attn", "attn2"))
SUBLAYERS = (("self_attn", "norm1"), ("cross_attn", "norm2"), ("mlp", "norm3"))
LINEARS = (("1", "linear_1"), ("2", "linear_2"))

TRANSFORMER = KeyMap(
    [
        ("x_embedder.proj.1.weight", "patch_embed.proj.weight"),
        ("t_embedding_norm.weight", "time_embed.norm.weight"),
        ("final_layer.linear.weight", "proj_out.weight"),
        *spell(
            "t_embedder.1.{linear}.weight", "time_embed.t_embedder.{linear}.weight", linear=same("linear_1", "linear_2")
        ),
        *spell("final_layer.adaln_modulation.{linear}.weight", "norm_out.{linear}.weight", linear=LINEARS),
        *spell(
            "blocks.{i}.{attention}.{qkv}_proj.weight",
            "transformer_blocks.{i}.{attention}.to_{qkv}.weight",
            attention=ATTENTIONS,
            qkv=same("q", "k", "v"),
        ),
        *spell(
            "blocks.{i}.{attention}.{qk}_norm.weight",
            "transformer_blocks.{i}.{attention}.norm_{qk}.weight",
            attention=ATTENTIONS,
            qk=same("q", "k"),
        ),
        *spell(
            "blocks.{i}.{attention}.output_proj.weight",
            "transformer_blocks.{i}.{attention}.to_out.0.weight",
            attention=ATTENTIONS,
        ),
        *spell(
            "blocks.{i}.adaln_modulation_{sublayer}.{linear}.weight",
            "transformer_blocks.{i}.{sublayer}.{linear}.weight",
            sublayer=SUBLAYERS,
            linear=LINEARS,
        ),
        ("blocks.{i}.mlp.layer1.weight", "transformer_blocks.{i}.ff.net.0.proj.weight"),
        ("blocks.{i}.mlp.layer2.weight", "transformer_blocks.{i}.ff.net.2.weight"),
    ]
)
"""The denoiser: original names behind their prefix, and CosmosTransformer3DModel."""

ADAPTER_ATTENTIONS = same("self_attn", "cross_attn")
WEIGHT_AND_BIAS = same("weight", "bias")

CONDITIONER = KeyMap(
    [
        ("llm_adapter.embed.weight", "embed.weight"),
        ("llm_adapter.norm.weight", "norm.weight"),
        *spell("llm_adapter.{proj}.{p}", "{proj}.{p}", proj=same("in_proj", "out_proj"), p=WEIGHT_AND_BIAS),
        *spell(
            "llm_adapter.blocks.{i}.norm_{sublayer}.weight",
            "blocks.{i}.norm_{sublayer}.weight",
            sublayer=same("self_attn", "cross_attn", "mlp"),
        ),
        *spell(
            "llm_adapter.blocks.{i}.{attention}.{part}.weight",
            "blocks.{i}.{attention}.{part}.weight",
            attention=ADAPTER_ATTENTIONS,
            part=same("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
        ),
        *spell("llm_adapter.blocks.{i}.mlp.{n}.{p}", "blocks.{i}.mlp.{n}.{p}", n=same("0", "2"), p=WEIGHT_AND_BIAS),
    ]
)
"""The text conditioner: "llm_adapter.*" beside the denoiser, and AnimaTextConditioner."""

PREFIXES = ("net.", "model.diffusion_model.", "diffusion_model.", "")
"""What a file may put before the denoiser's names; the first is the official files', and the one that we write."""

TEXT_ENCODER_PREFIXES = ("model.", "")

TOLERATED = re.compile(r"(.+\.)?(pos_embedder\.(seq|dim_spatial_range|dim_temporal_range)|inv_freq)")
"""Buffers that some programs save and every program computes."""

UNUSED_HEADS = ("lm_head.weight",)
"""What a language model has and a text encoder has not."""

ADAPTER_MARK = re.compile(
    r"(.*\.)?(lora_(down|up|mid|A|B)(\.[^.]+)*\.weight|lora_[AB](\..+)?|hada_w[12]_[ab]|lokr_w[12](_[ab])?"
    r"|dora_scale|lora_magnitude_vector(\..+)?|oft_(blocks|diag|R\..+))"
)
"""Names that only adapters have: LoRA, LoHa, LoKr, DoRA, OFT."""

RESIDUAL = (
    ("residual.0.gamma", "norm1.gamma"),
    ("residual.2.weight", "conv1.weight"),
    ("residual.2.bias", "conv1.bias"),
    ("residual.3.gamma", "norm2.gamma"),
    ("residual.6.weight", "conv2.weight"),
    ("residual.6.bias", "conv2.bias"),
    ("shortcut.weight", "conv_shortcut.weight"),
    ("shortcut.bias", "conv_shortcut.bias"),
)
RESAMPLE = same("resample.1.weight", "resample.1.bias", "time_conv.weight", "time_conv.bias")
ATTENTION = same("norm.gamma", "to_qkv.weight", "to_qkv.bias", "proj.weight", "proj.bias")
HALVES = same("encoder", "decoder")


def vae_keys(num_levels: int, num_res_blocks: int) -> KeyMap:
    """The VAE: Wan names and AutoencoderKLQwenImage, whose decoder is numbered by level and Wan's in one row.

    Each of Wan's decoder levels is num_res_blocks + 1 residual blocks and, but for the last, one upsampler.
    """
    pairs: list[Pair] = [
        *spell("conv1.{p}", "quant_conv.{p}", p=WEIGHT_AND_BIAS),
        *spell("conv2.{p}", "post_quant_conv.{p}", p=WEIGHT_AND_BIAS),
        *spell("{half}.conv1.{p}", "{half}.conv_in.{p}", half=HALVES, p=WEIGHT_AND_BIAS),
        *spell("{half}.head.0.gamma", "{half}.norm_out.gamma", half=HALVES),
        *spell("{half}.head.2.{p}", "{half}.conv_out.{p}", half=HALVES, p=WEIGHT_AND_BIAS),
        *spell(
            "{half}.middle.{n}.{layer}",
            "{half}.mid_block.resnets.{n}.{layer}",
            half=HALVES,
            n=(("0", "0"), ("2", "1")),
            layer=RESIDUAL,
        ),
        *spell("{half}.middle.1.{layer}", "{half}.mid_block.attentions.0.{layer}", half=HALVES, layer=ATTENTION),
        *spell("encoder.downsamples.{i}.{layer}", "encoder.down_blocks.{i}.{layer}", layer=RESIDUAL + RESAMPLE),
    ]
    for level in range(num_levels):
        first = level * (num_res_blocks + 2)
        for block in range(num_res_blocks + 1):
            right = f"decoder.up_blocks.{level}.resnets.{block}"
            pairs += spell(f"decoder.upsamples.{first + block}.{{layer}}", f"{right}.{{layer}}", layer=RESIDUAL)
        if level < num_levels - 1:
            left = f"decoder.upsamples.{first + num_res_blocks + 1}"
            right = f"decoder.up_blocks.{level}.upsamplers.0"
            pairs += spell(f"{left}.{{layer}}", f"{right}.{{layer}}", layer=RESAMPLE)
    return KeyMap(pairs)


def vae_layout(names: Iterable[str]) -> tuple[int, int]:
    """(number of levels, residual blocks per level) of a VAE's encoder, from names in either naming."""
    down = re.compile(r"encoder\.(?:downsamples|down_blocks)\.(\d+)\.(.+)")
    matches = [m for m in map(down.fullmatch, names) if m]
    resamples = {m[1] for m in matches if m[2].startswith("resample.")}
    residuals = {m[1] for m in matches if m[2] in ("residual.2.weight", "conv1.weight")}
    num_levels = len(resamples) + 1
    return num_levels, len(residuals) // num_levels


@dataclass(frozen=True)
class Sorted:
    """A file's names by component: {component: {diffusers name: name in the file}}, and what belongs to none."""

    names: Mapping[str, Mapping[str, str]]
    unknown: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    unused: tuple[str, ...] = field(default=())


def prefix_of(names: Iterable[str], prefixes: tuple[str, ...], landmark: str) -> str:
    """The prefix with which `landmark` is among the names; "" where none is."""
    present = set(names)
    return next((prefix for prefix in prefixes if prefix + landmark in present), "")


def sort_dit(names: Iterable[str]) -> Sorted:
    """The names of a denoiser file: transformer and text_conditioner."""
    names = list(names)
    prefix = prefix_of(names, PREFIXES, "x_embedder.proj.1.weight")
    parts: dict[str, dict[str, str]] = {"transformer": {}, "text_conditioner": {}}
    unknown: list[str] = []
    tolerated = [name for name in names if TOLERATED.fullmatch(name)]
    for name in names:
        bare = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if (new := TRANSFORMER.forward(bare)) is not None:
            parts["transformer"][new] = name
        elif (new := CONDITIONER.forward(bare)) is not None:
            parts["text_conditioner"][new] = name
        elif not TOLERATED.fullmatch(name):
            unknown.append(name)
    return Sorted(parts, tuple(unknown), tuple(tolerated))


def sort_text_encoder(names: Iterable[str]) -> Sorted:
    """The names of a Qwen3 file, with or without "model."; the unused head of the language model is set aside."""
    names = list(names)
    prefix = prefix_of(names, TEXT_ENCODER_PREFIXES, "embed_tokens.weight")
    sets_aside = [name for name in names if TOLERATED.fullmatch(name) or name in UNUSED_HEADS]
    kept = [name for name in names if name not in sets_aside]
    inside = {name.removeprefix(prefix): name for name in kept if name.startswith(prefix)}
    return Sorted(
        {"text_encoder": inside},
        tuple(name for name in kept if not name.startswith(prefix)),
        tuple(name for name in sets_aside if name not in UNUSED_HEADS),
        tuple(name for name in sets_aside if name in UNUSED_HEADS),
    )


def sort_vae(names: Iterable[str]) -> Sorted:
    """The names of a VAE file, in Wan's naming or in diffusers'."""
    names = list(names)
    if "quant_conv.weight" in names:
        return sort_plain("vae", names)
    renamed = vae_keys(*vae_layout(names)).rename(names)
    return Sorted({"vae": renamed.names}, renamed.unknown)


def sort_plain(component: str, names: Iterable[str]) -> Sorted:
    """The names of a component in diffusers' own naming."""
    names = list(names)
    tolerated = tuple(name for name in names if TOLERATED.fullmatch(name))
    return Sorted({component: {name: name for name in names if name not in tolerated}}, (), tolerated)


LANDMARKS = (
    (
        "the denoiser of Anima",
        re.compile(r"(net\.|model\.diffusion_model\.|diffusion_model\.)?x_embedder\.proj\.1\.weight"),
    ),
    ("a denoiser in diffusers' naming", re.compile(r"transformer_blocks\.0\.attn1\.to_q\.weight")),
    ("the VAE", re.compile(r"decoder\.(conv1|conv_in)\.weight")),
    ("the text encoder", re.compile(r"(model\.)?layers\.0\.self_attn\.q_norm\.weight")),
    ("a text conditioner alone", re.compile(r"(llm_adapter\.)?blocks\.0\.norm_cross_attn\.weight")),
)


def recognise(names: Iterable[str]) -> str:
    """What a file holds, in words: "an adapter", one of LANDMARKS, or "something unknown"."""
    names = list(names)
    if any(ADAPTER_MARK.fullmatch(name) for name in names):
        return "an adapter"
    for what, landmark in LANDMARKS:
        if any(landmark.fullmatch(name) for name in names):
            return what
    return "something unknown"
