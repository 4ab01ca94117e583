"""Draw pictures with a model, and record what its components were asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from finitune.generation.precisions import RunningModel
from finitune.generation.settings import PictureSettings
from finitune.models.loaded import LoadedModel, ModelModule
from finitune.precision.planner import RecordedCall
from finitune.precision.sites import iterate_nested_tensors
from finitune.progress import Progress, SilentProgress


@dataclass(frozen=True)
class DrawnPictures:
    """Final latents, fp32 (N, C, 1, h, w), and the pictures, uint8 (N, H, W, 3)."""

    latents: Tensor
    pixels: Tensor


@dataclass
class CallRecording:
    """The calls that one drawing made of each component, in order, with their outputs."""

    calls: dict[str, list[RecordedCall]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)


@torch.no_grad()
def draw_picture_batch(
    running: RunningModel, pictures: Sequence[PictureSettings], progress: Progress | None = None
) -> DrawnPictures:
    """The pictures as one batch; they may differ in prompt, negative prompt and seed alone.

    Noise comes from a CPU generator per picture, in fp32, so that every precision starts from the same.
    """
    progress = progress or SilentProgress()
    first, model = require_one_picture_shape(pictures), running.model
    name = f"drawing in {running.precision}"
    progress.start(name, model.count_denoiser_calls(first.steps, first.cfg))
    handle = model.module(model.denoiser).register_forward_hook(lambda *_: progress.advance(name))
    try:
        latents, images = model.draw(
            [picture.prompt for picture in pictures],
            [picture.negative for picture in pictures],
            [torch.Generator("cpu").manual_seed(picture.seed) for picture in pictures],
            steps=first.steps,
            guidance=first.cfg,
            size=(first.width, first.height),
        )
    finally:
        handle.remove()
        progress.finish(name)
    pixels = (images.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
    return DrawnPictures(latents, pixels)


def require_one_picture_shape(pictures: Sequence[PictureSettings]) -> PictureSettings:
    """The first of the pictures; raises ValueError where they cannot be one batch."""
    shapes = {(p.steps, p.cfg, p.width, p.height) for p in pictures}
    if len(shapes) != 1:
        raise ValueError(f"pictures of one batch differ in steps, guidance or size: {sorted(shapes)}")
    return pictures[0]


@contextmanager
def record_component_calls(running: RunningModel) -> Iterator[CallRecording]:
    """Keep every call of the running model's modules while the context is open."""
    recording = CallRecording()
    with ExitStack() as stack:
        for one in running.model.modules:
            module = running.model.module(one.name)
            entry = module.get_submodule(one.decoder) if one.decoder else module
            handle = entry.register_forward_hook(_keep(recording, one), with_kwargs=True)
            stack.callback(handle.remove)
        yield recording


def _keep(recording: CallRecording, one: ModelModule) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not one.decoder:  # a decoder's own arguments hold its running caches; `build_decode_call` makes the VAE's
            recording.calls.setdefault(one.name, []).append(RecordedCall(args, kwargs))
        result = next(iterate_nested_tensors(output))
        recording.outputs.setdefault(one.name, []).append(result.detach().clone())

    return hook


def build_decode_call(model: LoadedModel, latents: Tensor) -> RecordedCall:
    """The call that a drawing makes of the VAE for these final latents."""
    return RecordedCall((model.unscale_latents(latents),), {"return_dict": False}, method="decode")
