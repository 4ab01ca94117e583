"""Flux.1: a transformer of double and single blocks that reads T5-XXL and CLIP-L's pooled output."""

from finitune.models.flux.sites import FLUX_SITES
from finitune.models.spec import ModelSpec

FLUX = ModelSpec(
    name="flux",
    components=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "transformer", "scheduler", "vae"),
    invariants=(
        ("prediction", "The denoiser predicts the velocity, noise minus data."),
        ("latent-scaling", "Latents are (z - 0.1159) * 0.3611."),
    ),
    adapters=FLUX_SITES,
    title="Flux.1",
)

__all__ = ["FLUX"]
