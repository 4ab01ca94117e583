"""Stable Diffusion 1.x: a UNet of four levels that reads CLIP-L."""

from finitune.models.clip import make_clip_l_component, make_query_width_hallmark
from finitune.models.sites import AdapterSites
from finitune.models.spec import Fp16Hazard, ModelSpec
from finitune.models.unet import SD_LEVELS, make_text_width_hallmarks, make_unet_component

SD15 = ModelSpec(
    name="sd15",
    components=("tokenizer", "text_encoder", "unet", "scheduler", "vae"),
    invariants=(
        ("prediction", "The denoiser predicts the noise."),
        ("latent-scaling", "Latents are the VAE's times 0.18215."),
    ),
    adapters=AdapterSites(
        components=(
            make_unet_component(SD_LEVELS),
            make_clip_l_component(("te", "te1"), "cond_stage_model.transformer."),
        ),
        hallmarks=(*make_text_width_hallmarks(768), make_query_width_hallmark("text_encoder", 768)),
        base_model_versions=("sd_v1", "sd_v1_v"),
        architecture="stable-diffusion-v1/lora",
        prediction_type="epsilon",
    ),
    title="Stable Diffusion 1.5",
    fp16=Fp16Hazard(
        False, "it was trained and released in fp16; a VAE can still overflow on bright pictures", "its release"
    ),
)
