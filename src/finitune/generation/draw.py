"""Draw a picture with diffusers' own pipeline, and record what its components were asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from finitune.generation.precisions import RunningPipeline
from finitune.generation.settings import PictureSettings
from finitune.precision.planner import RecordedCall
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
    running: RunningPipeline, pictures: Sequence[PictureSettings], progress: Progress | None = None
) -> DrawnPictures:
    """The pictures as one batch; they may differ in prompt, negative prompt and seed alone.

    Noise comes from a CPU generator per picture, in fp32, so that every precision starts from the same.
    """
    from diffusers import ClassifierFreeGuidance

    progress = progress or SilentProgress()
    first, pipe = require_one_picture_shape(pictures), running.pipe
    _silence(pipe._blocks)
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=first.cfg))
    name = f"drawing in {running.precision}"
    progress.start(name, first.steps * pipe.guider.num_conditions)
    handle = running.modules["transformer"].register_forward_hook(lambda *_: progress.advance(name))
    try:
        state = pipe(
            prompt=[picture.prompt for picture in pictures],
            negative_prompt=[picture.negative for picture in pictures],
            num_inference_steps=first.steps,
            width=first.width,
            height=first.height,
            generator=[torch.Generator("cpu").manual_seed(picture.seed) for picture in pictures],
            output_type="pt",
        )
    finally:
        handle.remove()
        progress.finish(name)
    images = state.get("images").float()
    pixels = (images.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
    return DrawnPictures(state.get("latents").float(), pixels)


def require_one_picture_shape(pictures: Sequence[PictureSettings]) -> PictureSettings:
    """The first of the pictures; raises ValueError where they cannot be one batch."""
    shapes = {(p.steps, p.cfg, p.width, p.height) for p in pictures}
    if len(shapes) != 1:
        raise ValueError(f"pictures of one batch differ in steps, guidance or size: {sorted(shapes)}")
    return pictures[0]


def _silence(block: Any) -> None:
    """Turn off the pipeline's own progress bar, in whichever of its blocks it lies."""
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for inner in getattr(block, "sub_blocks", {}).values():
        _silence(inner)


@contextmanager
def record_component_calls(running: RunningPipeline) -> Iterator[CallRecording]:
    """Keep every call of the running pipeline's components while the context is open."""
    recording = CallRecording()
    with ExitStack() as stack:
        for component, module in running.modules.items():
            entry = module.get_submodule("decoder") if component == "vae" else module
            handle = entry.register_forward_hook(_keep(recording, component), with_kwargs=True)
            stack.callback(handle.remove)
        yield recording


def _keep(recording: CallRecording, component: str) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        from finitune.precision.sites import iterate_nested_tensors

        if component != "vae":  # the decoder's own arguments hold its running caches; `decode_call` makes the VAE's
            recording.calls.setdefault(component, []).append(RecordedCall(args, kwargs))
        result = next(iterate_nested_tensors(output))
        recording.outputs.setdefault(component, []).append(result.detach().clone())

    return hook


def build_decode_call(vae: Any, latents: Tensor) -> RecordedCall:
    """The call that the pipeline makes of the VAE for these final latents."""
    shape = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(v).view(shape) for v in (vae.config.latents_mean, vae.config.latents_std))
    return RecordedCall((latents * std.to(latents) + mean.to(latents),), {"return_dict": False}, method="decode")
