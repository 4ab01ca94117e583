"""Anima: a Cosmos-Predict2 denoiser, a Qwen3 text encoder, a text conditioner between them, and the Wan 2.1 VAE."""

from finitune.machine.measuring.attention_bench import BenchLayer
from finitune.models.anima.keys import ANIMA_FILE_PARTS
from finitune.models.anima.sites import ANIMA_SITES
from finitune.models.pico import get_pico_folder, get_pico_plan_path
from finitune.models.spec import Fp16Hazard, ModelSpec, SettingRule, ShippedModel


def list_anima_attention(tokens: int) -> list[BenchLayer]:
    """28 blocks of 16 heads of 128: self-attention, and 512 text tokens."""
    return [BenchLayer("self", 28, 16, tokens, tokens, 128), BenchLayer("cross", 28, 16, tokens, 512, 128)]


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
    runtime="finitune.models.anima.load:AnimaParts",
    fp16=Fp16Hazard(
        True,
        "its residual stream leaves fp16's range: NaN, and a black picture",
        "ComfyUI PR #12249; sd-scripts PR #2277, after which NaN was still reported",
    ),
    attention=list_anima_attention,
    setting_rules=(
        SettingRule("picture-size", ("width", "height"), lambda side: side % 16 == 0),
        SettingRule("scheduler-shift", ("shift",), lambda shift: shift == 3),
        SettingRule(
            "guidance",
            ("cfg",),
            lambda cfg: cfg > 1,
            "Anima is drawn with guidance (4 as released); only distilled versions are drawn without.",
        ),
    ),
    parts=ANIMA_FILE_PARTS,
    beside_denoiser={"text_conditioner": "the text conditioner (llm_adapter.*)"},
    classes={
        "Block": r"blocks\.",
        "PatchEmbed": r"x_embedder\.",
        "TimestepEmbedding": r"t_embedder\.",
        "FinalLayer": r"final_layer\.",
        "LLMAdapterTransformerBlock": r"(llm_adapter\.)?blocks\.",
        "Attention": r".*attn\.",
        "GPT2FeedForward": r".*mlp\.",
    },
    shipped={"pico-anima": ShippedModel(get_pico_folder(), get_pico_plan_path(), picture_side=64)},
)
