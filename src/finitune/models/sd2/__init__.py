"""Stable Diffusion 2.x: the UNet of 1.x, reading OpenCLIP-H."""

from finitune.models.clip import make_open_clip_component, make_query_width_hallmark
from finitune.models.sites import AdapterSites
from finitune.models.spec import Fp16Hazard, ModelSpec
from finitune.models.unet import SD_LEVELS, make_text_width_hallmarks, make_unet_component

SD2 = ModelSpec(
    name="sd2",
    components=("tokenizer", "text_encoder", "unet", "scheduler", "vae"),
    invariants=(
        ("prediction", "The denoiser predicts v in the 768-pixel checkpoints, the noise in the 512-pixel ones."),
        ("latent-scaling", "Latents are the VAE's times 0.18215."),
        ("text-layer", "The text encoder ends with its 23rd layer, the last but one, and the final norm."),
    ),
    adapters=AdapterSites(
        components=(
            make_unet_component(SD_LEVELS),
            make_open_clip_component("text_encoder", ("te", "te1"), "cond_stage_model.model.", comfy="clip_h"),
        ),
        hallmarks=(*make_text_width_hallmarks(1024), make_query_width_hallmark("text_encoder", 1024)),
        base_model_versions=("sd_v2_v", "sd_v2"),
        architecture="stable-diffusion-v2-768-v/lora",
        prediction_type="v",
    ),
    title="Stable Diffusion 2",
    fp16=Fp16Hazard(
        True,
        "attention logits overflow where they are made in fp16; fused attention does not make them",
        "diffusers issue #1614",
    ),
)
