"""Training calls Anima as the pipeline does: the same latents, contexts and velocities."""

from __future__ import annotations

import pytest
import torch

from finitune.generation.draw import draw_picture_batch, record_component_calls
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.anima.encode import AnimaDenoiser, AnimaEncoders, TextLevel
from finitune.models.anima.load import AnimaParts, load_folder
from finitune.models.pico import get_pico_folder
from finitune.verbs.check.dataset import measure_caption_overflow

PROMPTS = ("red apple", "", "a picture of smiling cat face with heart-shaped eyes")


@pytest.fixture(scope="module")
def parts() -> AnimaParts:
    parts = load_folder(get_pico_folder())
    for name in ("text_encoder", "text_conditioner", "transformer", "vae"):
        getattr(parts, name).float()
    return parts


@pytest.mark.parametrize("level", ["context", "states", "tokens"])
def test_a_call_is_the_pipelines_own(parts: AnimaParts, level: TextLevel):
    settings = [PictureSettings(prompt=prompt, steps=2, cfg=1.0, width=64, height=64) for prompt in PROMPTS[:1]]
    with open_in_precision(parts, "fp32") as running, record_component_calls(running) as recording:
        draw_picture_batch(running, settings)
    call, answer = recording.calls["transformer"][0], recording.outputs["transformer"][0]
    encoders = AnimaEncoders.of(parts, level)
    told = encoders.collate(list(encoders.texts([PROMPTS[0]])))
    if level == "context":
        torch.testing.assert_close(told["context"], call.kwargs["encoder_hidden_states"], rtol=0, atol=1e-5)
    denoiser = AnimaDenoiser(parts.transformer, parts.text_conditioner, parts.text_encoder)
    with torch.no_grad():
        velocity = denoiser(call.kwargs["hidden_states"], call.kwargs["timestep"], told)
    torch.testing.assert_close(velocity, answer, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", ["states", "tokens"])
@torch.no_grad()
def test_a_batch_of_captions_is_each_alone(parts: AnimaParts, level: TextLevel):
    x, sigma = torch.randn(3, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.5, 0.9])
    denoiser = AnimaDenoiser(parts.transformer, parts.text_conditioner, parts.text_encoder)
    encoders, whole = AnimaEncoders.of(parts, level), AnimaEncoders.of(parts, "context")
    together = denoiser(x, sigma, encoders.collate(list(encoders.texts(list(PROMPTS)))))
    for i, prompt in enumerate(PROMPTS):
        alone = denoiser(x[i : i + 1], sigma[i : i + 1], whole.collate(list(whole.texts([prompt]))))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-3, atol=1e-3)


def test_latents_decode_to_the_picture(parts: AnimaParts):
    with open_in_precision(parts, "fp32") as running:
        drawing = draw_picture_batch(running, [PictureSettings(prompt="red apple", steps=8, width=64, height=64)])
    latents = AnimaEncoders.of(parts, "context").latents(drawing.pixels)
    assert latents.shape == drawing.latents.shape
    assert latents.mean().abs() < 1
    error = (latents - drawing.latents).norm() / drawing.latents.norm()
    assert error < 0.3, "a picture's latents are those that it was decoded from, up to what the VAE loses"


def test_identity_tells_what_makes_a_difference(parts: AnimaParts):
    first, longer = AnimaEncoders.of(parts, "context"), AnimaEncoders.of(parts, "context", 256)
    assert first.identity == AnimaEncoders.of(parts, "context").identity
    assert first.identity != longer.identity


def test_tokens_beyond_the_limit_are_counted(parts: AnimaParts):
    limits = {"qwen3": (parts.tokenizer, 2), "t5": (parts.t5_tokenizer, 512)}
    long = measure_caption_overflow(limits, "a picture of red apple")
    assert long.keys() == {"qwen3"} and long["qwen3"][0] > 0
    assert measure_caption_overflow(limits, "") == {}
