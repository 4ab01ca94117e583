"""Tiny random models for tests: a Cosmos transformer whose stream overflows fp16, and calls to feed it."""

from __future__ import annotations

import torch

from finitune.models.pico import scale_stream_
from finitune.precision.planner import RecordedCall


def cosmos(stream_exponent: int = 0, layers: int = 2):
    """A bf16 CosmosTransformer3DModel of width 48 with its residual stream multiplied by 2**stream_exponent."""
    from diffusers import CosmosTransformer3DModel

    torch.manual_seed(0)
    model = CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=layers,
        text_embed_dim=32,
        adaln_lora_dim=8,
        extra_pos_embed_type=None,
        rope_scale=(1.0, 4.0, 4.0),
    )
    scale_stream_(model, stream_exponent)
    return model.bfloat16().eval().requires_grad_(False)


def cosmos_calls(count: int = 3) -> list[RecordedCall]:
    """Calls of `cosmos` with fixed noise at `count` times."""
    generator = torch.Generator().manual_seed(0)
    return [
        RecordedCall(
            (),
            {
                "hidden_states": torch.randn(1, 16, 1, 8, 8, generator=generator),
                "timestep": torch.tensor([(i + 0.5) / count]),
                "encoder_hidden_states": torch.randn(1, 8, 32, generator=generator),
                "padding_mask": torch.zeros(1, 1, 64, 64),
                "return_dict": False,
            },
        )
        for i in range(count)
    ]
