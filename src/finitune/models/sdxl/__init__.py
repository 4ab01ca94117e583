"""Stable Diffusion XL: a UNet of three levels that reads CLIP-L and OpenCLIP-G side by side."""

from finitune.machine.measuring.attention_bench import BenchLayer
from finitune.models.clip import make_clip_l_component, make_open_clip_component, make_query_width_hallmark
from finitune.models.sites import AdapterSites, Hallmark
from finitune.models.spec import Fp16Hazard, ModelSpec
from finitune.models.unet import SDXL_LEVELS, make_text_width_hallmarks, make_unet_component


def list_sdxl_attention(tokens: int) -> list[BenchLayer]:
    """Heads of 64: 10 transformer layers of 10 heads at 1/16 of the picture's side, 60 of 20 heads at 1/32; 77 text
    tokens (diffusers' UNet2DConditionModel)."""
    return [
        BenchLayer("self, 1/16", 10, 10, tokens, tokens, 64),
        BenchLayer("self, 1/32", 60, 20, tokens // 4, tokens // 4, 64),
        BenchLayer("cross, 1/16", 10, 10, tokens, 77, 64),
        BenchLayer("cross, 1/32", 60, 20, tokens // 4, 77, 64),
    ]


SDXL = ModelSpec(
    name="sdxl",
    components=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "unet", "scheduler", "vae"),
    invariants=(
        ("prediction", "The denoiser predicts the noise, or v in checkpoints that were tuned for it."),
        ("latent-scaling", "Latents are the VAE's times 0.13025."),
        ("text-layer", "Both text encoders give the state before their last layer, without the final norm."),
    ),
    adapters=AdapterSites(
        components=(
            make_unet_component(SDXL_LEVELS, sized=True, kohya_native=True),
            make_clip_l_component(("te1",), "conditioner.embedders.0.transformer."),
            make_open_clip_component(
                "text_encoder_2", ("te2",), "conditioner.embedders.1.model.", comfy="clip_g", projection=True
            ),
        ),
        hallmarks=(
            *make_text_width_hallmarks(2048),
            Hallmark("unet", "add_embedding.linear_1", 2816),
            make_query_width_hallmark("text_encoder_2", 1280),
        ),
        base_model_versions=("sdxl_base_v1-0", "sdxl_base_v0-9"),
        architecture="stable-diffusion-xl-v1-base/lora",
        prediction_type="epsilon",
    ),
    title="Stable Diffusion XL",
    fp16=Fp16Hazard(
        True,
        "the UNet works, but its VAE overflows unless it is the mended one (fp16-fix) or fp32",
        "madebyollin/sdxl-vae-fp16-fix; force_upcast in the VAE's configuration",
    ),
    attention=list_sdxl_attention,
)
