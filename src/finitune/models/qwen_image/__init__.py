"""Qwen-Image: a transformer of double blocks that reads Qwen2.5-VL; its original names are diffusers' own.

Sources: diffusers `transformer_qwenimage.py`; the text encoder has no adapters in the field and is left out.
"""

from finitune.models.sites import AdapterSites, ComponentSites, Hallmark
from finitune.models.spec import Fp16Hazard, ModelSpec

_BLOCK = "transformer_blocks.{i}"
_STREAM_LINEARS = ("{stream}_mod.1", "{stream}_mlp.net.0.proj", "{stream}_mlp.net.2")
_ATTENTION_LAYERS = (
    *(f"to_{part}" for part in ("q", "k", "v", "out.0", "add_out")),
    *(f"add_{part}_proj" for part in "qkv"),
    *(f"norm_{part}" for part in ("q", "k", "added_q", "added_k")),
)
_TRANSFORMER_SITES = (
    "img_in",
    "txt_in",
    "txt_norm",
    *(f"time_text_embed.timestep_embedder.linear_{n}" for n in (1, 2)),
    *(f"{_BLOCK}.attn.{part}" for part in _ATTENTION_LAYERS),
    *(f"{_BLOCK}.{part.format(stream=stream)}" for stream in ("img", "txt") for part in _STREAM_LINEARS),
    "norm_out.linear",
    "proj_out",
)

QWEN_IMAGE = ModelSpec(
    name="qwen-image",
    components=("tokenizer", "text_encoder", "transformer", "scheduler", "vae"),
    invariants=(
        ("prediction", "The denoiser predicts the velocity, noise minus data."),
        ("latent-scaling", "Latents are (z - mean) / std, channel by channel."),
    ),
    adapters=AdapterSites(
        components=(
            ComponentSites(
                "transformer",
                ("unet", "transformer"),
                _TRANSFORMER_SITES,
                single_file=("", "model.diffusion_model.", "diffusion_model."),
            ),
        ),
        hallmarks=(
            *(Hallmark("transformer", f"{_BLOCK}.{part}", 3072) for part in ("attn.to_k", "img_mlp.net.0.proj")),
            Hallmark("transformer", "txt_in", 3584),
        ),
        base_model_versions=("qwen_image", "qwen_image_edit"),
        architecture="Qwen-Image/lora",
        prediction_type="flow",
        depths={_BLOCK: 60},
    ),
    title="Qwen-Image",
    fp16=Fp16Hazard(
        True,
        "its residual stream reaches about 2e7: NaN, and a black picture",
        "ComfyUI issues #10751 and #10668",
    ),
)
