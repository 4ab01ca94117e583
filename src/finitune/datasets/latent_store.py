"""Latents and texts of a run: from memory, from the cache on disk, or made by the encoders and then kept.

A picture's mask goes the way of its latents: it lies in the same entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from finitune.datasets.batch_schedule import BatchSchedule, LatentVariant, has_fixed_latents
from finitune.datasets.cache import CacheSource, EncoderCache, FileDigestCache, check_entry_finite
from finitune.datasets.items import FamilyEncoders, PixelSize, TrainingExample
from finitune.datasets.picture_files import DecodedPicture, read_picture
from finitune.datasets.pixels import Float32Array
from finitune.datasets.transforms import transform_mask, transform_pixels
from finitune.errors import FileError

EncodedTensors: TypeAlias = dict[str, Tensor]
_Item = TypeVar("_Item")
_Requested = TypeVar("_Requested", contravariant=True)

_TRANSFORM_VERSION = "1"
"""Goes up when `fit` makes other pixels of the same picture."""

_TEXT_BATCH_SIZE = 8
_MAX_SUBJECT_CHARACTERS = 60


@dataclass(frozen=True)
class EncoderCaches:
    """The two caches of a run."""

    latents: EncoderCache
    texts: EncoderCache

    @classmethod
    def beside(cls, folder: str | Path, encoders: FamilyEncoders) -> EncoderCaches:
        """The caches of these encoders in a folder.

        A name in `encoders.identity` that begins with "latents." or "texts." makes entries of that kind stale only.
        """
        latents = {**select_encoder_identity(encoders, "latents", "texts"), "fit": _TRANSFORM_VERSION}
        return cls(
            EncoderCache(folder, "latents", latents),
            EncoderCache(folder, "texts", select_encoder_identity(encoders, "texts", "latents")),
        )


def select_encoder_identity(encoders: FamilyEncoders, kind: str, other: str) -> dict[str, str]:
    """The part of the encoders' identity that is about entries of one kind."""
    named = {name.removeprefix(f"{kind}."): value for name, value in encoders.identity.items()}
    return {name: value for name, value in named.items() if not name.startswith(f"{other}.")}


class LruTensorCache:
    """The entries used last, as many as fit into `limit_bytes`."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[str, EncodedTensors] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> EncodedTensors | None:
        """The entry of a source, if it is still here."""
        if digest in self._entries:
            self._entries.move_to_end(digest)
        return self._entries.get(digest)

    def put(self, digest: str, entry: EncodedTensors) -> None:
        """Keep an entry in place of those that were not used for longest."""
        if digest in self._entries:
            return
        self._entries[digest] = entry
        self.size_bytes += count_entry_bytes(entry)
        while self.size_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.size_bytes -= count_entry_bytes(oldest)


def count_entry_bytes(entry: Mapping[str, Tensor]) -> int:
    """The memory that an entry takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in entry.values())


class EntryEncoder(Protocol[_Requested]):
    """How entries of one kind are made, told apart, and judged."""

    at_once: int
    """How many are made at once."""

    def source_of(self, item: _Requested) -> CacheSource:
        """What the entry of an item is made of."""
        ...

    def keeps(self, item: _Requested) -> bool:
        """Whether the entry will be asked for again."""
        ...

    def fault(self, item: _Requested, entry: Mapping[str, Tensor]) -> str:
        """What is wrong with an entry's tensors, "" if nothing."""
        ...

    def make(self, items: Sequence[_Requested]) -> list[EncodedTensors]:
        """The entries of some items, that can be made at once."""
        ...


class LatentStore(Generic[_Item]):
    """The entries of one kind."""

    def __init__(self, maker: EntryEncoder[_Item], cache: EncoderCache, recent: LruTensorCache):
        self.maker = maker
        self.cache = cache
        self.recent = recent

    def of(self, items: Sequence[_Item]) -> list[EncodedTensors]:
        """The entries of these items; what is on no shelf is made.

        Raises NumericsError (CACHE-NONFINITE), FileError where a picture cannot be read or an entry not be written.
        """
        found = {item: self.look_up(item) for item in dict.fromkeys(items)}
        missing = [item for item, entry in found.items() if entry is None]
        made: dict[_Item, EncodedTensors] = {}
        for begin in range(0, len(missing), self.maker.at_once):
            some = missing[begin : begin + self.maker.at_once]
            for item, entry in zip(some, self.maker.make(some), strict=True):
                made[item] = self.keep(item, entry)
        return [made[item] if (entry := found[item]) is None else entry for item in items]

    def look_up(self, item: _Item) -> EncodedTensors | None:
        """The entry of an item from memory or from the disk, if it is there and good."""
        if not self.maker.keeps(item):
            return None
        source = self.maker.source_of(item)
        entry = self.recent.get(source.digest)
        if entry is None:
            entry = self.cache.get(source, lambda tensors: self.maker.fault(item, tensors))
            if entry is not None:
                self.recent.put(source.digest, entry)
        return entry

    def keep(self, item: _Item, entry: EncodedTensors) -> EncodedTensors:
        """The entry that was made, checked, and kept where it will be asked for again."""
        source = self.maker.source_of(item)
        if not self.maker.keeps(item):
            check_entry_finite(self.cache.kind, source, entry, self.cache.identity)
            return entry
        self.cache.put(source, entry)
        self.recent.put(source.digest, entry)
        return entry


class LatentEncoder:
    """Makes latents (C, 1, h, w), and masks (h, w), of pictures."""

    def __init__(self, course: BatchSchedule, encoders: FamilyEncoders, at_once: int, masked: bool):
        self.course = course
        self.encoders = encoders
        self.at_once = at_once
        self.masked = masked
        self.digests = FileDigestCache()
        self._of_example: dict[int, tuple[str, ...]] = {}

    def source_of(self, item: LatentVariant) -> CacheSource:
        """The picture's bytes, its cut, and where its mask comes from."""
        example, placement = self.course.examples[item.example], self.course.placements[item.example]
        cut = (placement.bucket, placement.scaled, item.crop, item.flipped, item.color)
        return CacheSource.of(example.name, "latents", *self.content_of(item.example), *cut)

    def content_of(self, number: int) -> tuple[str, ...]:
        """What an example consists of; files are looked at once, so that they may go away once all is in the cache."""
        if number not in self._of_example:
            example = self.course.examples[number]
            way = find_mask_source(example, self.masked)
            mask = self.digests.of(example.mask) if way == "file" and example.mask else way
            options = (example.subset.resize_interpolation or "", example.subset.background)
            self._of_example[number] = (self.digests.of(example.path), mask, *options)
        return self._of_example[number]

    def keeps(self, item: LatentVariant) -> bool:
        """Whether the picture is cut and coloured alike each time."""
        return has_fixed_latents(self.course.examples[item.example])

    def fault(self, item: LatentVariant, entry: Mapping[str, Tensor]) -> str:
        """What is wrong with the shapes and dtypes."""
        latents, mask = entry.get("latents"), entry.get("mask")
        width, height = self.course.placements[item.example].bucket
        if latents is None or latents.dim() != 4 or latents.shape[-1] * height != latents.shape[-2] * width:
            return f"its latents do not fit a picture of {width} x {height}"
        if narrow := describe_reduced_dtype(entry):
            return narrow
        if (mask is not None) != bool(find_mask_source(self.course.examples[item.example], self.masked)):
            return "it has a mask and should not, or the other way round"
        return "" if mask is None or mask.shape == latents.shape[-2:] else "its mask does not fit its latents"

    def make(self, items: Sequence[LatentVariant]) -> list[EncodedTensors]:
        """The entries of pictures of one bucket."""
        pictures = [self.read(item) for item in items]
        pixels = np.stack([self.fitted(item, picture) for item, picture in zip(items, pictures, strict=True)])
        latents = self.encoders.latents(torch.from_numpy(pixels)).float().cpu()
        entries: list[EncodedTensors] = []
        for item, picture, latent in zip(items, pictures, latents, strict=True):
            mask = self.mask(item, picture, (latent.shape[-1], latent.shape[-2]))
            entries.append({"latents": latent.clone()} if mask is None else {"latents": latent.clone(), "mask": mask})
        return entries

    def read(self, item: LatentVariant) -> DecodedPicture:
        """The picture, on the background of its subset."""
        example = self.course.examples[item.example]
        return read_picture(example.path, example.subset.background)

    def fitted(self, item: LatentVariant, picture: DecodedPicture) -> np.ndarray:
        """The pixels as they lie in the bucket."""
        placement = self.course.placements[item.example]
        way = self.course.examples[item.example].subset.resize_interpolation
        return transform_pixels(picture.pixels, placement, item.crop, item.flipped, way, item.color)

    def mask(self, item: LatentVariant, picture: DecodedPicture, latent: PixelSize) -> Tensor | None:
        """The mask over the latents: red of its own picture, or the picture's alpha; None where none is wanted."""
        example = self.course.examples[item.example]
        way = find_mask_source(example, self.masked)
        if not way:
            return None
        values: Float32Array | None = picture.alpha
        if way == "file" and example.mask:
            values = self.read_mask_file(example, example.mask, picture.size)
        if values is None:
            return torch.ones(latent[1], latent[0])
        placement = self.course.placements[item.example]
        return transform_mask(values, placement, item.crop, item.flipped, latent)

    def read_mask_file(self, example: TrainingExample, path: Path, size: PixelSize) -> Float32Array:
        """The red of a mask's file, float32 (H, W) in 0 .. 1; raises FileError (MASK-SHAPE) if it is another shape."""
        picture = read_picture(path)
        (width, height), (wide, high) = size, picture.size
        if abs(width * high - height * wide) > max(width, height, wide, high):
            raise FileError(
                f"the mask {path.name} of {example.name} is {wide} x {high}, the picture {width} x {height}",
                code="MASK-SHAPE",
                subject=str(path),
                evidence={"mask": picture.size, "picture": size},
                remedy="A mask needs the shape of its picture, as seen, at any size. Draw it anew.",
            )
        return (picture.pixels[..., 0] / 255).astype("float32")


def find_mask_source(example: TrainingExample, masked: bool) -> str:
    """Where the mask of an example comes from: "file", "alpha", or "" for nowhere; `masked` is masked_loss."""
    if masked and example.mask is not None:
        return "file"
    return "alpha" if example.subset.alpha_mask else ""


def describe_reduced_dtype(entry: Mapping[str, Tensor]) -> str:
    """That an entry was rounded to fewer bits than encoders give, "" if it was not."""
    dtypes = {str(tensor.dtype) for tensor in entry.values() if tensor.is_floating_point()} - {"torch.float32"}
    return f"it was rounded to {', '.join(sorted(dtypes)).replace('torch.', '')}" if dtypes else ""


class TextEntryEncoder:
    """Makes what the denoiser is told of captions; `names` are pictures that captions belong to, for messages."""

    at_once = _TEXT_BATCH_SIZE

    def __init__(self, encoders: FamilyEncoders):
        self.encoders = encoders
        self.names: dict[str, str] = {}

    def source_of(self, item: str) -> CacheSource:
        """The caption."""
        short = item if len(item) <= _MAX_SUBJECT_CHARACTERS else f"{item[:_MAX_SUBJECT_CHARACTERS]}..."
        name = self.names.get(item)
        return CacheSource.of(f"the caption {short!r}" + (f" of {name}" if name else ""), "texts", item)

    def keeps(self, item: str) -> bool:
        """All are kept."""
        return True

    def fault(self, item: str, entry: Mapping[str, Tensor]) -> str:
        """What is wrong with the shapes and dtypes."""
        return (
            describe_reduced_dtype(entry)
            if entry and all(tensor.dim() for tensor in entry.values())
            else "it holds no text"
        )

    def make(self, items: Sequence[str]) -> list[EncodedTensors]:
        """The entries of some captions."""
        texts = self.encoders.texts(list(items))
        return [{name: tensor.cpu().clone() for name, tensor in text.items()} for text in texts]
