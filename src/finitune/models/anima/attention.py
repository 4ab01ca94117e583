"""Attention of the Anima transformer and conditioner with the products handed to a function of ours.

diffusers lets a processor object stand for the arithmetic of an attention module; these two differ from the stock ones
only in who computes softmax(q k^T) v.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models import embeddings
from diffusers.models.attention_processor import Attention
from diffusers.models.condition_embedders.condition_embedder_anima import AnimaTextConditionerAttention
from torch import Tensor, nn

from finitune.models.loaded import AttentionFunction


class CosmosProcessor:
    """Self and cross attention of CosmosTransformer3DModel: hidden states (B, L, C) in and out."""

    def __init__(self, attention: AttentionFunction):
        self.attention = attention

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        apply_rotary_emb: Any = embeddings.apply_rotary_emb  # its annotation knows tuples of one tensor only
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projected = (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        query, key, value = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in projected)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = (
                apply_rotary_emb(x, image_rotary_emb, use_real=True, use_real_unbind_dim=-2) for x in (query, key)
            )
        output = self.attention(query, key, value, attention_mask).transpose(1, 2).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](output))


class ConditionerProcessor:
    """Self and cross attention of AnimaTextConditioner: hidden states (B, L, C) in and out."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, attention: AttentionFunction):
        self.attention = attention

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        encoder_position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = (attn.num_attention_heads, attn.attention_head_dim)
        query = attn.q_norm(attn.q_proj(hidden_states).unflatten(-1, heads))
        key = attn.k_norm(attn.k_proj(context).unflatten(-1, heads))
        value = attn.v_proj(context).unflatten(-1, heads)
        if position_embeddings is not None and encoder_position_embeddings is not None:
            query, key = (
                apply_rotary_embedding(query, position_embeddings),
                apply_rotary_embedding(key, encoder_position_embeddings),
            )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attn.o_proj(self.attention(query, key, value, attention_mask).transpose(1, 2).flatten(2, 3))


def apply_rotary_embedding(x: Tensor, embedding: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x (B, L, H, D) by (cos, sin), each (B, L, D), halves rotated against each other."""
    cos, sin = (part.unsqueeze(2) for part in embedding)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@contextmanager
def apply_attention_function(root: nn.Module, attention: AttentionFunction) -> Generator[nn.Module]:
    """Let `attention` compute every attention of a transformer or conditioner while the context is open."""
    previous: list[tuple[Any, Any]] = []
    for module in root.modules():
        if isinstance(module, (Attention, AnimaTextConditionerAttention)):
            attends: Any = module
            previous.append((attends, attends.processor))
            ours = CosmosProcessor if isinstance(module, Attention) else ConditionerProcessor
            attends.processor = ours(attention)
    try:
        yield root
    finally:
        for module, processor in previous:
            module.processor = processor
