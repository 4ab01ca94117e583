"""Anima: a Cosmos-Predict2 denoiser, a Qwen3 text encoder, a text conditioner between them, and the Wan 2.1 VAE."""

from finitune.models.anima.sites import ANIMA_SITES
from finitune.models.spec import ModelSpec

ANIMA = ModelSpec(
    name="anima",
    components=(
        "tokenizer",
        "t5_tokenizer",
        "text_encoder",
        "text_conditioner",
        "transformer",
        "scheduler",
        "vae",
    ),
    invariants=(
        ("text-padding", "The text is padded with zeros to min_sequence_length and never masked in cross attention."),
        ("text-source", "The text encoder gives its last hidden state after the final norm, zero at masked positions."),
        ("no-chat-template", "Prompts reach both tokenizers as they are: no chat template, no system prompt."),
        ("latent-scaling", "Latents are (z - mean) / std of the VAE's posterior mode, channel by channel."),
        ("timestep-range", "The denoiser is given sigma itself, in 0 .. 1, not multiplied by 1000."),
        ("scheduler-shift", "Sigmas are shifted by 3: sigma = 3u / (1 + 2u)."),
        ("prediction", "The denoiser predicts the velocity, noise minus data."),
        ("picture-size", "Height and width are multiples of 16: 8 by the VAE, 2 by the patches."),
    ),
    adapters=ANIMA_SITES,
    title="Anima",
)

__all__ = ["ANIMA"]
