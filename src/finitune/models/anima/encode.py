"""What Anima makes of pictures and texts, and what its denoiser answers: the calls of diffusers' pipeline, one by one.

Source: diffusers modular_pipelines/anima (encoders.py, before_denoise.py, denoise.py). A caption is encoded alone and
without padding, so that what is kept of it does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finitune.files.tensorfile import compute_tensor_digest, hash_tensor

if TYPE_CHECKING:  # it makes these
    from finitune.models.anima.load import AnimaParts

TextLevel = Literal["context", "states", "tokens"]
"""How far a caption is encoded beforehand: all the way, up to the conditioner, or not at all."""


@dataclass(frozen=True)
class AnimaEncoders:
    """Latents and texts of Anima, for a cache; whoever calls sees to it that the parts are in fp32.

    `level` is "context" where the text conditioner is frozen, "states" where it is trained, "tokens" where the text
    encoder is.
    """

    parts: AnimaParts
    identity: Mapping[str, str]
    level: TextLevel = "context"
    qwen3_tokens: int = 512
    t5_tokens: int = 512

    @classmethod
    def of(cls, parts: AnimaParts, level: TextLevel, qwen3_tokens: int = 512, t5_tokens: int = 512) -> AnimaEncoders:
        """Encoders that state what makes their results what they are."""
        identity = {
            "latents.vae": compute_module_digest(parts.vae),
            "texts.encoder": compute_module_digest(parts.text_encoder),
            "texts.conditioner": compute_module_digest(parts.text_conditioner),
            "texts.level": level,
            "texts.tokens": f"{qwen3_tokens}, {t5_tokens}",
            "dtype": "fp32",
        }
        return cls(parts, identity, level, qwen3_tokens, t5_tokens)

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, 3) to fp32 (B, C, 1, h, w): the posterior's mode, normalised channel by channel."""
        vae: Any = self.parts.vae
        unit = pixels.to(vae.device).float().div(127.5).sub(1).permute(0, 3, 1, 2).unsqueeze(2)
        mode = vae.encode(unit.to(vae.dtype)).latent_dist.mode().float()
        shape = (1, -1, 1, 1, 1)
        mean, std = (torch.tensor(v).view(shape).to(mode) for v in (vae.config.latents_mean, vae.config.latents_std))
        return ((mode - mean) / std).cpu()

    @torch.no_grad()
    def texts(self, captions: list[str]) -> list[dict[str, Tensor]]:
        """What the denoiser is told of each caption, at this level; each tensor without padding."""
        encoded: list[dict[str, Tensor]] = []
        for caption in captions:
            tokens = self.tokens(caption)
            if self.level != "tokens":
                tokens = encode_qwen3_states(self.parts.text_encoder, tokens)
            if self.level == "context":
                length = tokens["t5_ids"].shape[1]
                tokens = {"context": compute_text_context(self.parts.text_conditioner, tokens)[:, :length]}
            encoded.append({name: tensor[0].cpu() for name, tensor in tokens.items()})
        return encoded

    def tokens(self, caption: str) -> dict[str, Tensor]:
        """Both tokenizers' ids of a caption, (1, L) each; Qwen3 sees one masked token where there is none."""
        ids = {
            name: tokenizer([text], max_length=limit, truncation=True, return_tensors="pt").input_ids.long()
            for name, tokenizer, text, limit in (
                ("qwen3_ids", self.parts.tokenizer, caption, self.qwen3_tokens),
                ("t5_ids", self.parts.t5_tokenizer, caption, self.t5_tokens),
            )
        }
        real = ids["qwen3_ids"].shape[1] > 0
        if not real:
            ids["qwen3_ids"] = torch.zeros(1, 1, dtype=torch.long)
        ids["qwen3_mask"] = torch.full_like(ids["qwen3_ids"], int(real))
        return {**ids, "t5_mask": torch.ones_like(ids["t5_ids"])}

    def collate(self, texts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The texts of a batch, (B, L, ...), with zeros behind the shorter ones; a context at its least length."""
        conditioner: Any = self.parts.text_conditioner
        least = conditioner.config.min_sequence_length if self.level == "context" else 0
        batch: dict[str, Tensor] = {}
        for name in texts[0]:
            length = max(least, *(text[name].shape[0] for text in texts))
            batch[name] = torch.stack([pad_with_zeros(text[name], length) for text in texts])
        return batch


@dataclass(frozen=True)
class AnimaDenoiser:
    """The denoiser as training calls it, with whichever of the text's modules it has to run each time."""

    transformer: nn.Module
    text_conditioner: nn.Module
    text_encoder: nn.Module

    def __call__(self, noisy: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """The velocity fp32 (B, C, 1, h, w) for `noisy` of that shape, sigma (B,) in 0 .. 1, both fp32."""
        transformer: Any = self.transformer
        told = dict(conditioning)
        if "qwen3_ids" in told:
            told = encode_qwen3_states(self.text_encoder, told)
        context = told["context"] if "context" in told else compute_text_context(self.text_conditioner, told)
        height, width = (8 * side for side in noisy.shape[-2:])
        velocity = transformer(
            hidden_states=noisy.to(transformer.dtype),
            timestep=sigma,
            encoder_hidden_states=context.to(transformer.dtype),
            padding_mask=noisy.new_zeros(1, 1, height, width, dtype=transformer.dtype),
            return_dict=False,
        )[0]
        return velocity.float()


def encode_qwen3_states(text_encoder: nn.Module, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with Qwen3's last hidden states (B, L, C), zero where masked, in place of its ids."""
    rest = {name: tensor for name, tensor in told.items() if name != "qwen3_ids"}
    encoder: Any = text_encoder
    ids, mask = (told[name].to(encoder.device) for name in ("qwen3_ids", "qwen3_mask"))
    states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return {**rest, "states": states * mask.to(states).unsqueeze(-1)}


def compute_text_context(conditioner: nn.Module, told: Mapping[str, Tensor]) -> Tensor:
    """The conditioner's answer to Qwen3's states and T5's ids: (B, L, C), at least as long as the denoiser wants it."""
    asked: Any = conditioner
    device = next(conditioner.parameters()).device
    states, ids, t5_mask, qwen3_mask = (told[n].to(device) for n in ("states", "t5_ids", "t5_mask", "qwen3_mask"))
    return asked(states.to(asked.dtype), ids, t5_mask, qwen3_mask)


def pad_with_zeros(tensor: Tensor, length: int) -> Tensor:
    """`tensor` (L, ...) with zeros behind it up to `length`."""
    return F.pad(tensor, [*[0, 0] * (tensor.ndim - 1), 0, length - tensor.shape[0]])


def compute_module_digest(module: nn.Module) -> str:
    """The digest of a module's tensors as they are in memory."""
    return compute_tensor_digest({name: hash_tensor(tensor) for name, tensor in module.state_dict().items()})
