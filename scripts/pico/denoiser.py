"""Text encoder, conditioner and denoiser of pico-anima, trained together by rectified flow."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pico.pictures import CONTEXT_TOKENS, PICTURE_SIZE, VOCABULARY, Captions
from pico.training import average, cosine, load_state, save_state

DENOISER_CONFIG = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 4,
    "attention_head_dim": 48,
    "num_layers": 6,
    "text_embed_dim": 128,
    "adaln_lora_dim": 32,
    "rope_scale": (1.0, 4.0, 4.0),
    "extra_pos_embed_type": None,
}
CONDITIONER_CONFIG = {
    "source_dim": 128,
    "target_dim": 128,
    "model_dim": 128,
    "num_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2.0,
    "target_vocab_size": VOCABULARY,
    "min_sequence_length": CONTEXT_TOKENS,
}
ENCODER_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class TextToLatent(nn.Module):
    """Caption tokens and a noisy latent in, velocity out: all parts as the pipeline joins them."""

    def __init__(self):
        from diffusers import AnimaTextConditioner, CosmosTransformer3DModel
        from transformers import Qwen3Config, Qwen3Model

        super().__init__()
        self.text_encoder = Qwen3Model(Qwen3Config(**ENCODER_CONFIG))
        self.text_conditioner = AnimaTextConditioner(**CONDITIONER_CONFIG)
        self.transformer = CosmosTransformer3DModel(**DENOISER_CONFIG)
        nn.init.normal_(self.text_conditioner.embed.weight, std=0.5)
        for name, parameter in self.transformer.named_parameters():
            if name.endswith("linear_2.weight") and ".norm" in name:
                nn.init.zeros_(parameter)

    def forward(self, qwen_ids: Tensor, qwen_mask: Tensor, t5_ids: Tensor, t5_mask: Tensor, x: Tensor, sigma: Tensor):
        states = self.text_encoder(input_ids=qwen_ids, attention_mask=qwen_mask).last_hidden_state
        states = states * qwen_mask.to(states).unsqueeze(-1)
        context = self.text_conditioner(states, t5_ids, t5_mask, qwen_mask)
        mask = x.new_zeros(1, 1, PICTURE_SIZE, PICTURE_SIZE)
        velocity = self.transformer(x.unsqueeze(2), sigma, context, padding_mask=mask, return_dict=False)[0]
        return velocity.squeeze(2)


def train_denoiser(latents: Tensor, captions: Captions, work: Path, budget_s: float, batch: int = 128) -> TextToLatent:
    """Rectified flow for `budget_s` seconds: x = (1 - s) x0 + s e, target e - x0; s logit-normal, shifted by 3."""
    torch.manual_seed(1)
    model = TextToLatent()
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim > 1 and "embed" not in n)]
    groups = [{"params": decay, "weight_decay": 0.02}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    averaged = average(model, 0.998)
    path, saved = work / "denoiser.pt", {"model": model, "averaged": averaged, "optimizer": optimizer}
    clock, step = load_state(path, saved, budget_s)
    generator = torch.Generator().manual_seed(step)
    running = 1.0
    while (fraction := clock.fraction()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = cosine(int(fraction * 10_000), 10_000, 1.5e-3, 100)
        index = torch.randint(len(latents), (batch,), generator=generator)
        x0 = latents[index]
        noise = torch.randn(x0.shape, generator=generator)
        u = torch.sigmoid(torch.randn(batch, generator=generator))
        sigma = 3 * u / (1 + 2 * u)
        s = sigma.view(-1, 1, 1, 1)
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):  # its backward is the fast one here
            velocity = model(*captions.draw(index, 0.1, generator), (1 - s) * x0 + s * noise, sigma)
        loss = (velocity.float() - (noise - x0)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        averaged.update_parameters(model)
        step += 1
        running = 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0:
            print(f"denoiser step {step} {fraction:.1%} loss {running:.4f}", flush=True)
        if step % 200 == 0 or clock.fraction() >= 1:
            save_state(path, saved, clock, step)
    return averaged.module
