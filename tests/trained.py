"""Adapters that were really trained for a few steps on pico-anima: its apples learn to be hearts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from finitune.adapters import AdapterSet, SiteAdapter, Target, find_algorithm
from finitune.adapters.layer import attach_adapters
from finitune.files.writer import save_tensors
from finitune.generation.draw import draw_picture_batch, record_component_calls
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.anima import ANIMA
from finitune.models.anima.load import AnimaParts
from finitune.namings.write import write_adapter

SITES = ("attn1.to_q", "attn1.to_v", "attn1.to_out.0", "attn2.to_k", "attn2.to_v", "ff.net.0.proj", "ff.net.2")
OPTIONS = {"lokr": {"factor": 8}}
RANK, ALPHA = 4, 3.0
FROM, TO = "red apple", "smiling cat face with heart-shaped eyes"


def trained_adapter(parts: AnimaParts, algorithm: str, steps: int = 6, rate: float = 2e-2) -> AdapterSet:
    """An adapter of the denoiser after a few steps towards what the model does for another prompt."""
    calls, wanted = lesson(parts)
    root: nn.Module = parts.transformer.float().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    sites = {
        name: find_algorithm(algorithm).init(
            Target(module.weight, RANK, ALPHA, OPTIONS.get(algorithm, {})),
            generator,  # type: ignore[arg-type]
        )
        for name, module in root.named_modules()
        if name.startswith("transformer_blocks.") and name.endswith(SITES)
    }
    with torch.enable_grad():
        attached = attach_adapters(root, sites, trainable=True)
        optimiser = torch.optim.AdamW(attached.parameters(), lr=rate)
        for step in range(steps):
            call, velocity = calls[step % len(calls)], wanted[step % len(calls)]
            optimiser.zero_grad()
            found = root(*call.args, **{**call.kwargs, "return_dict": False})[0]
            nn.functional.mse_loss(found, velocity).backward()
            optimiser.step()
        learned = {name: detached(layer.adapter) for name, layer in attached.layers.items()}
        attached.detach()
    parts.transformer.bfloat16()
    return AdapterSet({f"transformer.{name}": adapter for name, adapter in learned.items()})


def lesson(parts: AnimaParts):
    """The denoiser's calls for one prompt, and its answers for another."""
    recordings = []
    for prompt in (FROM, TO):
        with open_in_precision(parts, "fp32") as running, record_component_calls(running) as recording:
            draw_picture_batch(running, [PictureSettings(prompt=prompt, steps=3, cfg=1.0, width=64, height=64)])
        recordings.append(recording)
    return recordings[0].calls["transformer"], recordings[1].outputs["transformer"]


def detached(adapter: SiteAdapter) -> SiteAdapter:
    """The adapter with its tensors out of the graph, cut loose from the layer."""
    return adapter.with_tensors(**{role: tensor.detach().clone() for role, tensor in adapter.tensors.items()})


def saved(adapter: AdapterSet, path: Path, spelling: str = "kohya") -> Path:
    """An adapter file in a spelling."""
    written = write_adapter(adapter, ANIMA, spelling)
    save_tensors(path, written.tensors, written.metadata)
    return path
