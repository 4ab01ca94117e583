"""Small real datasets for tests: pictures as files, examples of them, and encoders that are quick and repeatable."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from finitune.config.datasets import ResolvedDataset, ResolvedSubset
from finitune.datasets.batch_schedule import BatchSchedule
from finitune.datasets.buckets import place_examples
from finitune.datasets.items import PixelSize, TrainingExample

SHAPES: tuple[PixelSize, ...] = ((64, 64), (96, 48), (48, 96), (64, 64), (80, 60), (64, 64), (64, 64))

IDENTITY = {"latents.vae": "a", "texts.encoder": "b", "dtype": "fp32"}


def subset_of(dataset: int = 0, **options: object) -> ResolvedSubset:
    return ResolvedSubset.model_validate({"dataset": dataset, **options})


def dataset_of(**options: object) -> ResolvedDataset:
    """A dataset of small pictures: 64 x 64 and the like, in steps of 16."""
    named = {"resolution": 64, "min_bucket_reso": 32, "max_bucket_reso": 128, "bucket_reso_steps": 16}
    return ResolvedDataset.model_validate({**named, **options})


def examples_of(folder: Path, subset: ResolvedSubset, repeats: int = 1, shapes: tuple[PixelSize, ...] = SHAPES):
    """An example for each shape, that of no file yet."""
    return [
        TrainingExample(folder / f"{i}.png", f"{folder.name}/{i}.png", size, f"tag{i}, a, b, c", subset, repeats)
        for i, size in enumerate(shapes)
    ]


def write_pictures(examples: list[TrainingExample], alpha: bool = False) -> None:
    """Draw noise into the files of the examples; with `alpha`, the left half is transparent."""
    for seed, example in enumerate(examples):
        width, height = example.size
        channels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
        channels[..., 3] = np.where(np.arange(width) < width // 2, 0, 255) if alpha else 255
        example.path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(channels if alpha else channels[..., :3]).save(example.path)


def course_of(
    examples: list[TrainingExample], datasets: list[ResolvedDataset] | None = None, **options: int
) -> BatchSchedule:
    datasets = datasets or [dataset_of()]
    placed = place_examples(examples, datasets, options.get("batch_size", 1))
    return BatchSchedule(placed.examples, placed.placements, tuple(datasets), **{"seed": 5, **options})


@dataclass
class QuickEncoders:
    """Latents are the means of 8 x 8 pixels; texts are vectors drawn by the caption. Both count their calls."""

    identity: Mapping[str, str] = field(
        default_factory=lambda: {"latents.vae": "a", "texts.encoder": "b", "dtype": "fp32"}
    )
    poison: str = ""
    seen: list[int] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    scale: float = 1.0

    def latents(self, pixels: Tensor) -> Tensor:
        assert pixels.dtype == torch.uint8
        self.seen.append(len(pixels))
        values = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        return (F.avg_pool2d(values, 8) * self.scale)[:, :, None]

    def texts(self, captions: list[str]) -> list[dict[str, Tensor]]:
        self.read += captions
        return [{"states": self.states(caption), "ids": torch.arange(len(caption) + 1)} for caption in captions]

    def states(self, caption: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(caption.encode()).digest()[:4], "big")
        states = torch.randn(len(caption) + 1, 4, generator=torch.Generator().manual_seed(seed))
        return states * float("nan") if self.poison and self.poison in caption else states

    def collate(self, texts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        length = max(len(text["states"]) for text in texts)
        pads = [length - len(text["states"]) for text in texts]
        states = [F.pad(text["states"], (0, 0, 0, pad)) for text, pad in zip(texts, pads, strict=True)]
        return {"states": torch.stack(states), "length": torch.tensor([len(text["states"]) for text in texts])}
