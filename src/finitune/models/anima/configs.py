"""A component's configuration, read off the shapes of its tensors in diffusers' naming.

Shapes tell every width and count. What they cannot tell is in PUBLISHED: Anima's own values, used where the file
does not carry others in its metadata.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from finitune.errors import ModelError

HeaderShape = tuple[int, ...]
HeaderShapes = Mapping[str, HeaderShape]
ComponentConfig = dict[str, object]

PUBLISHED_ANIMA_SETTINGS: dict[str, ComponentConfig] = {
    "transformer": {
        "max_size": (128, 240, 240),
        "patch_size": (1, 2, 2),
        "rope_scale": (1.0, 4.0, 4.0),
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
    },
    "text_conditioner": {"min_sequence_length": 512},
    "text_encoder": {
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "vae": {
        "latents_mean": [
            *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
            *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
        ],
        "latents_std": [
            *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
            *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
        ],
    },
    "scheduler": {"shift": 3.0},
}
"""What no shape tells, by component. Sources: circlestone-labs/Anima, Qwen/Qwen3-0.6B, Wan 2.1 VAE."""


def infer_transformer_config(shapes: HeaderShapes, given: ComponentConfig) -> ComponentConfig:
    """The arguments of CosmosTransformer3DModel; `given` is what no shape tells. Raises ModelError."""
    block = "transformer_blocks.0"
    width, patch_in = require_tensor_shape(shapes, "patch_embed.proj.weight", 2)
    (patch_out, _) = require_tensor_shape(shapes, "proj_out.weight", 2)
    (head_dim,) = require_tensor_shape(shapes, f"{block}.attn1.norm_q.weight", 1)
    (mlp_width, _) = require_tensor_shape(shapes, f"{block}.ff.net.0.proj.weight", 2)
    patch = math.prod(given["patch_size"])  # type: ignore[arg-type]
    return {
        **given,
        "in_channels": patch_in // patch - bool(given["concat_padding_mask"]),
        "out_channels": patch_out // patch,
        "num_attention_heads": width // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": count_numbered_parts(shapes, "transformer_blocks"),
        "mlp_ratio": compute_exact_ratio(mlp_width, width),
        "text_embed_dim": require_tensor_shape(shapes, f"{block}.attn2.to_k.weight", 2)[1],
        "adaln_lora_dim": require_tensor_shape(shapes, f"{block}.norm1.linear_1.weight", 2)[0],
    }


def infer_conditioner_config(shapes: HeaderShapes, given: ComponentConfig) -> ComponentConfig:
    """The arguments of AnimaTextConditioner; `given` is what no shape tells. Raises ModelError."""
    vocabulary, target_dim = require_tensor_shape(shapes, "embed.weight", 2)
    (_, model_dim) = require_tensor_shape(shapes, "out_proj.weight", 2)
    (head_dim,) = require_tensor_shape(shapes, "blocks.0.cross_attn.q_norm.weight", 1)
    (mlp_width, _) = require_tensor_shape(shapes, "blocks.0.mlp.0.weight", 2)
    return {
        **given,
        "source_dim": require_tensor_shape(shapes, "blocks.0.cross_attn.k_proj.weight", 2)[1],
        "target_dim": target_dim,
        "model_dim": model_dim,
        "num_layers": count_numbered_parts(shapes, "blocks"),
        "num_attention_heads": model_dim // head_dim,
        "mlp_ratio": compute_exact_ratio(mlp_width, model_dim),
        "target_vocab_size": vocabulary,
        "use_self_attention": "blocks.0.self_attn.q_proj.weight" in shapes,
    }


def infer_text_encoder_config(shapes: HeaderShapes, given: ComponentConfig) -> ComponentConfig:
    """The arguments of Qwen3Config; `given` is what no shape tells. Raises ModelError."""
    attention = "layers.0.self_attn"
    vocabulary, width = require_tensor_shape(shapes, "embed_tokens.weight", 2)
    (head_dim,) = require_tensor_shape(shapes, f"{attention}.q_norm.weight", 1)
    return {
        **given,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": require_tensor_shape(shapes, "layers.0.mlp.gate_proj.weight", 2)[0],
        "num_hidden_layers": count_numbered_parts(shapes, "layers"),
        "num_attention_heads": require_tensor_shape(shapes, f"{attention}.q_proj.weight", 2)[0] // head_dim,
        "num_key_value_heads": require_tensor_shape(shapes, f"{attention}.k_proj.weight", 2)[0] // head_dim,
        "head_dim": head_dim,
        "attention_bias": f"{attention}.q_proj.bias" in shapes,
    }


def infer_vae_config(shapes: HeaderShapes, given: ComponentConfig) -> ComponentConfig:
    """The arguments of AutoencoderKLQwenImage; `given` is what no shape tells. Raises ModelError.

    The encoder is one row of residual blocks; each level but the last ends with a resampler, which also halves the
    frames where it has a time_conv.
    """
    (base, channels, *_) = require_tensor_shape(shapes, "encoder.conv_in.weight", 5)
    (z_dim, *_) = require_tensor_shape(shapes, "post_quant_conv.weight", 5)
    widths: list[list[int]] = [[]]
    temporal: list[bool] = []
    for n in range(count_numbered_parts(shapes, "encoder.down_blocks")):
        block = f"encoder.down_blocks.{n}"
        if f"{block}.resample.1.weight" in shapes:
            temporal.append(f"{block}.time_conv.weight" in shapes)
            widths.append([])
        else:
            widths[-1].append(require_tensor_shape(shapes, f"{block}.conv2.weight", 5)[0])
    if len({len(level) for level in widths}) != 1 or not widths[0]:
        raise ModelError(
            f"the VAE has {', '.join(str(len(level)) for level in widths)} residual blocks in its levels",
            code="MODEL-KEYS-MISSING",
            subject="vae",
            evidence={"blocks_by_level": [len(level) for level in widths]},
            remedy="The levels of a VAE are equally deep: tensors are missing. Fetch the file again.",
        )
    return {
        **given,
        "base_dim": base,
        "z_dim": z_dim,
        "input_channels": channels,
        "dim_mult": [level[-1] // base for level in widths],
        "num_res_blocks": len(widths[0]),
        "temperal_downsample": temporal,
    }


CONFIG_READER_BY_COMPONENT = {
    "transformer": infer_transformer_config,
    "text_conditioner": infer_conditioner_config,
    "text_encoder": infer_text_encoder_config,
    "vae": infer_vae_config,
}


def require_tensor_shape(shapes: HeaderShapes, name: str, dims: int) -> HeaderShape:
    """The shape of a tensor that every model of the family has, with `dims` dimensions; raises ModelError."""
    shape = shapes.get(name)
    if shape is None:
        raise ModelError(
            f"{name} is missing, and without it the size of the model is unknown",
            code="MODEL-KEYS-MISSING",
            subject=name,
            evidence={"tensors": len(shapes)},
            remedy="The file is incomplete, or is of another model. Fetch the whole checkpoint.",
        )
    if len(shape) != dims or 0 in shape:
        raise ModelError(
            f"{name} has the shape {list(shape)}; {dims} dimensions are needed",
            code="MODEL-SHAPES",
            subject=name,
            evidence={"shape": list(shape)},
            remedy="The checkpoint is of another model, or is packed for another program.",
        )
    return shape


def count_numbered_parts(shapes: HeaderShapes, stem: str) -> int:
    """How many numbered parts `stem` has: one more than the largest number, so that a gap shows as missing keys.

    Raises ModelError where the number is larger than the number of tensors: nobody could want that model built.
    """
    numbered = re.compile(re.escape(stem) + r"\.(\d+)\..+")
    number = max((int(m[1]) + 1 for m in map(numbered.fullmatch, shapes) if m), default=0)
    if number > len(shapes):
        raise ModelError(
            f"{stem} are numbered up to {number - 1} in {len(shapes)} tensors",
            code="MODEL-KEYS-MISSING",
            subject=stem,
            evidence={"numbered_to": number - 1, "tensors": len(shapes)},
            remedy="Nearly all blocks are missing. Fetch the whole checkpoint.",
        )
    return number


def compute_exact_ratio(part: int, whole: int) -> float:
    """part / whole, such that int(whole * ratio) is `part` again in spite of rounding."""
    quotient = part / whole
    return quotient if int(whole * quotient) == part else math.nextafter(quotient, math.inf)
