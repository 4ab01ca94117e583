"""The nouns of a dataset: a picture with its texts, where it lies in a bucket, and one appearance of it in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from finitune.config.datasets import ResolvedSubset

PixelSize = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class TrainingExample:
    """A picture of the training: its file, its size as seen (EXIF turned), its caption as written, its subset.

    `name` tells it to people: the path below the subset's folder, with the folder. `caption` holds the lines of the
    caption file, or the class tokens, or "". `mask` is the file of its mask. `repeats` are the appearances in an epoch.
    """

    path: Path
    name: str
    size: PixelSize
    caption: str
    subset: ResolvedSubset
    repeats: int = 1
    mask: Path | None = None


@dataclass(frozen=True)
class BucketPlacement:
    """Where a picture lies in its bucket: scaled to `scaled`, of which `bucket` is cut out."""

    bucket: PixelSize
    scaled: PixelSize


@dataclass(frozen=True)
class ExampleAppearance:
    """One time that a picture is shown: which example, in which epoch, and what chance has made of it.

    `crop` is the (left, top) corner in the scaled picture; `caption` the final text. `color` seeds a change of colours,
    None where there is none.
    """

    example: int
    epoch: int
    crop: tuple[int, int]
    flipped: bool
    caption: str
    color: int | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Appearances of one bucket that go through the model at once.

    `first` is the place of the first one among all samples of the optimiser step, over all devices: noise is drawn by
    place, so that it depends on neither the number of devices nor the size of a micro-batch.
    """

    bucket: PixelSize
    appearances: tuple[ExampleAppearance, ...]
    first: int = 0

    def __len__(self) -> int:
        return len(self.appearances)


@dataclass(frozen=True)
class TrainingBatch:
    """A micro-batch as tensors on the device.

    `latents` fp32 (B, C, 1, h, w), normalised; `conditioning` what the denoiser is told, by name, padded to one length;
    `weights` fp32 (B,), 1 or the weight of regularisation; `mask` fp32 (B, 1, 1, h, w) in 0 .. 1 or None; `names` of
    the examples, `places` in the optimiser step; `multiplier` is the adapter's strength (network_multiplier).
    """

    latents: Tensor
    conditioning: Mapping[str, Tensor]
    weights: Tensor
    mask: Tensor | None
    names: tuple[str, ...]
    places: tuple[int, ...]
    multiplier: float = 1.0

    def __len__(self) -> int:
        return len(self.names)

    def part(self, begin: int, end: int) -> TrainingBatch:
        """The samples [begin, end)."""
        return TrainingBatch(
            self.latents[begin:end],
            {name: tensor[begin:end] for name, tensor in self.conditioning.items()},
            self.weights[begin:end],
            None if self.mask is None else self.mask[begin:end],
            self.names[begin:end],
            self.places[begin:end],
            self.multiplier,
        )


def make_generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a key of plain values, as (seed, epoch, "crop", name): the same on every machine."""
    return torch.Generator().manual_seed(derive_seed(*key))


def derive_seed(*key: object) -> int:
    """A 63-bit seed from a key of plain values."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class ExcludedExamples:
    """Examples that are not shown any more, by name, with the reason."""

    reasons: Mapping[str, str] = field(default_factory=dict)
