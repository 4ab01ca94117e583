"""Flux.1: a transformer of double and single blocks that reads T5-XXL and CLIP-L's pooled output."""

from finitune.machine.measuring.attention_bench import BenchLayer
from finitune.models.flux.sites import FLUX_SITES
from finitune.models.spec import Fp16Hazard, ModelSpec


def list_flux_attention(tokens: int) -> list[BenchLayer]:
    """19 double and 38 single blocks of 24 heads of 128, over picture and 512 text tokens together."""
    return [BenchLayer("joint", 57, 24, tokens + 512, tokens + 512, 128)]


FLUX = ModelSpec(
    name="flux",
    components=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "transformer", "scheduler", "vae"),
    invariants=(
        ("prediction", "The denoiser predicts the velocity, noise minus data."),
        ("latent-scaling", "Latents are (z - 0.1159) * 0.3611."),
    ),
    adapters=FLUX_SITES,
    title="Flux.1",
    fp16=Fp16Hazard(
        True,
        "two places of its residual streams overflow, and clamping changes the picture",
        "diffusers issue #9096, PR #9097",
    ),
    attention=list_flux_attention,
)
