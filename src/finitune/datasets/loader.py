"""From a schedule to batches: all that can be encoded beforehand is, the rest while the step before computes.

A picture's mask goes the way of its latents: it lies in the same entry of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from finitune.datasets.batch_schedule import (
    BatchSchedule,
    LatentVariant,
    exclude_examples,
    has_fixed_latents,
    to_latent_variant,
)
from finitune.datasets.cache import (
    CacheSource,
    EncodedTensors,
    EncoderCaches,
    EntryStore,
    FileDigestCache,
    LruTensorCache,
)
from finitune.datasets.items import (
    ExcludedExamples,
    MicroBatch,
    PixelSize,
    TrainingBatch,
    TrainingExample,
)
from finitune.datasets.picture_files import DecodedPicture, read_picture
from finitune.datasets.pixels import Float32Array
from finitune.datasets.transforms import transform_mask, transform_pixels
from finitune.errors import FileError, FinituneError, NumericsError
from finitune.models.loaded import FamilyEncoders
from finitune.progress import Progress
from finitune.report import Finding, Level

_Item = TypeVar("_Item")

_TEXT_BATCH_SIZE = 8
_MAX_SUBJECT_CHARACTERS = 60
_MAX_NONFINITE_SHARE = 0.5
_MIN_NONFINITE_FAILURES = 8
"""An encoder that has failed so often, and mostly, need not be tried on the rest."""


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader works; the names are those of the training's options.

    `memory_bytes` bounds what is kept in memory of the caches. With `quarantine`, pictures of which an encoder makes
    non-finite numbers are left out.
    """

    prior_loss_weight: float = 1.0
    masked_loss: bool = False
    vae_batch_size: int = 1
    quarantine: bool = True
    memory_bytes: int = 2 << 30


@dataclass(frozen=True)
class CachePreparation:
    """What preparing came to.

    Pictures that cannot be read are findings at level error. `excluded` are those, and those of which an encoder made
    non-finite numbers; with several processes, all must leave out what any of them has found.
    """

    figures: dict[str, object]
    findings: list[Finding]
    excluded: ExcludedExamples


@dataclass
class EncodingFailures:
    """What was tried by name, and what went wrong."""

    tried: set[str] = field(default_factory=set)
    unread: dict[str, FileError] = field(default_factory=dict)
    nonfinite: dict[str, NumericsError] = field(default_factory=dict)


class LatentEncoder:
    """Makes latents (C, 1, h, w), and masks (h, w), of pictures."""

    def __init__(self, schedule: BatchSchedule, encoders: FamilyEncoders, at_once: int, masked: bool):
        self.schedule = schedule
        self.encoders = encoders
        self.at_once = at_once
        self.masked = masked
        self.digests = FileDigestCache()
        self._of_example: dict[int, tuple[str, ...]] = {}

    def source_of(self, item: LatentVariant) -> CacheSource:
        """The picture's bytes, its cut, and where its mask comes from."""
        example, placement = self.schedule.examples[item.example], self.schedule.placements[item.example]
        cut = (placement.bucket, placement.scaled, item.crop, item.flipped, item.color)
        return CacheSource.of(example.name, "latents", *self.content_of(item.example), *cut)

    def content_of(self, number: int) -> tuple[str, ...]:
        """What an example consists of; files are looked at once, so that they may go away once all is in the cache."""
        if number not in self._of_example:
            example = self.schedule.examples[number]
            way = find_mask_source(example, self.masked)
            mask = self.digests.of(example.mask) if way == "file" and example.mask else way
            options = (example.subset.resize_interpolation or "", example.subset.background)
            self._of_example[number] = (self.digests.of(example.path), mask, *options)
        return self._of_example[number]

    def keeps(self, item: LatentVariant) -> bool:
        """Whether the picture is cut and coloured alike each time."""
        return has_fixed_latents(self.schedule.examples[item.example])

    def fault(self, item: LatentVariant, entry: Mapping[str, Tensor]) -> str:
        """What is wrong with the shapes and dtypes."""
        latents, mask = entry.get("latents"), entry.get("mask")
        width, height = self.schedule.placements[item.example].bucket
        if latents is None or latents.dim() != 4 or latents.shape[-1] * height != latents.shape[-2] * width:
            return f"its latents do not fit a picture of {width} x {height}"
        if narrow := describe_reduced_dtype(entry):
            return narrow
        if (mask is not None) != bool(find_mask_source(self.schedule.examples[item.example], self.masked)):
            return "it has a mask and should not, or the other way round"
        return "" if mask is None or mask.shape == latents.shape[-2:] else "its mask does not fit its latents"

    def make(self, items: Sequence[LatentVariant]) -> list[EncodedTensors]:
        """The entries of pictures of one bucket."""
        pictures, pixels = [], []
        for item in items:
            example, placement = self.schedule.examples[item.example], self.schedule.placements[item.example]
            picture = read_picture(example.path, example.subset.background)
            way = example.subset.resize_interpolation
            pictures.append(picture)
            pixels.append(transform_pixels(picture.pixels, placement, item.crop, item.flipped, way, item.color))
        latents = self.encoders.latents(torch.from_numpy(np.stack(pixels))).float().cpu()
        entries: list[EncodedTensors] = []
        for item, picture, latent in zip(items, pictures, latents, strict=True):
            mask = self.mask(item, picture, (latent.shape[-1], latent.shape[-2]))
            entries.append({"latents": latent.clone()} if mask is None else {"latents": latent.clone(), "mask": mask})
        return entries

    def mask(self, item: LatentVariant, picture: DecodedPicture, latent: PixelSize) -> Tensor | None:
        """The mask over the latents: red of its own picture, or the picture's alpha; None where none is wanted."""
        example = self.schedule.examples[item.example]
        way = find_mask_source(example, self.masked)
        if not way:
            return None
        values: Float32Array | None = picture.alpha
        if way == "file" and example.mask:
            values = self.read_mask_file(example, example.mask, picture.size)
        if values is None:
            return torch.ones(latent[1], latent[0])
        placement = self.schedule.placements[item.example]
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


class BatchLoader:
    """Makes batches of micro-batches of `schedule`, on `device`."""

    def __init__(
        self,
        schedule: BatchSchedule,
        encoders: FamilyEncoders,
        caches: EncoderCaches,
        options: LoaderOptions = LoaderOptions(),
        device: torch.device | str = "cpu",
    ):
        self.schedule = schedule
        self.encoders = encoders
        self.options = options
        self.device = torch.device(device)
        recent = LruTensorCache(options.memory_bytes)
        maker = LatentEncoder(schedule, encoders, options.vae_batch_size, options.masked_loss)
        self.latents: EntryStore[LatentVariant] = EntryStore(maker, caches.latents, recent)
        self.captions = TextEntryEncoder(encoders)
        self.texts: EntryStore[str] = EntryStore(self.captions, caches.texts, recent)

    def prepare(self, steps: int, progress: Progress, rank: int = 0, world: int = 1) -> CachePreparation:
        """Make this process's share of all entries that the first `steps` steps need and that are not there yet.

        A fault does not end it, so that all are told at once. Raises NumericsError (CACHE-NONFINITE) where an encoder
        fails on the empty caption, on more than half of the entries, or on any without quarantine; FileError
        (FILE-NOT-WRITTEN).
        """
        begin = time.monotonic()
        self.captions.names = self.schedule.captions(steps)
        latents = self.group_latent_variants(steps)[rank::world]
        texts = split_into_chunks(list(self.captions.names), self.captions.at_once)[rank::world]
        pictures = self.fill(self.latents, latents, lambda item: self.schedule.examples[item.example].name, progress)
        words = self.fill(self.texts, texts, str, progress)
        excluded = self.excluded(pictures, words, steps)
        return CachePreparation(self.figures(time.monotonic() - begin), self.findings(pictures, excluded), excluded)

    def fill(
        self, store: EntryStore[_Item], parts: list[list[_Item]], name_of: Callable[[_Item], str], progress: Progress
    ) -> EncodingFailures:
        """See to it that all entries are there; what went wrong."""
        kind, faults = store.cache.kind, EncodingFailures()
        progress.start(kind, sum(map(len, parts)))
        for chunk in parts:
            ensure_entries(store, chunk, name_of, faults)
            if len(faults.nonfinite) >= _MIN_NONFINITE_FAILURES or not self.options.quarantine:
                self.judge(faults)
            progress.advance(kind, len(chunk))
        progress.finish(kind)
        self.judge(faults)
        return faults

    def group_latent_variants(self, steps: int) -> list[list[LatentVariant]]:
        """The pictures to encode, in groups of one bucket that are encoded at once, whoever does it."""
        by_bucket: dict[tuple[int, int], list[LatentVariant]] = {}
        for item in self.schedule.latent_variants(steps):
            by_bucket.setdefault(self.schedule.placements[item.example].bucket, []).append(item)
        return [
            chunk for items in by_bucket.values() for chunk in split_into_chunks(items, self.options.vae_batch_size)
        ]

    def judge(self, faults: EncodingFailures) -> None:
        """Raises the first error where the encoder must be at fault, not a picture or two."""
        bad = faults.nonfinite
        if bad and (not self.options.quarantine or "" in bad or len(bad) > _MAX_NONFINITE_SHARE * len(faults.tried)):
            raise bad.get("", next(iter(bad.values())))

    def excluded(self, pictures: EncodingFailures, words: EncodingFailures, steps: int) -> ExcludedExamples:
        """The examples that cannot be used, with the reasons; a bad caption takes all pictures shown with it."""
        errors: dict[str, FinituneError] = {**pictures.nonfinite, **pictures.unread}
        if words.nonfinite:
            for number, caption in self.schedule.iterate_captions(steps):
                if caption in words.nonfinite:
                    errors.setdefault(self.schedule.examples[number].name, words.nonfinite[caption])
        return ExcludedExamples({name: error.message for name, error in errors.items()})

    def figures(self, seconds: float) -> dict[str, object]:
        """What was made, found, made again and left aside, and how long it took."""
        accounts = (self.latents.cache, self.texts.cache)
        counts = {name: count for cache in accounts for name, count in cache.account.figures(cache.kind).items()}
        return {**counts, "cache_seconds": round(seconds, 3)}

    def findings(self, pictures: EncodingFailures, excluded: ExcludedExamples) -> list[Finding]:
        """What is to be said of the caches, of pictures that cannot be read, and of those that are left out."""
        caches = (self.latents.cache, self.texts.cache)
        found = [finding for cache in caches for finding in cache.account.findings(cache.kind)]
        found += [Finding.of(error) for error in pictures.unread.values()]
        for name, reason in excluded.reasons.items():
            if name not in pictures.unread:
                found.append(Finding(Level.WARNING, "PICTURE-QUARANTINED", name, f"{name} is left out: {reason}"))
        return found

    def load(self, micro: MicroBatch, excluded: Collection[str] = frozenset()) -> TrainingBatch | None:
        """The micro-batch as tensors, without the examples named in `excluded`; None if nothing is left.

        Raises NumericsError (CACHE-NONFINITE), FileError where a picture cannot be read.
        """
        left = exclude_examples(micro, self.schedule, excluded)
        if not left:
            return None
        shown = [appearance for _, appearance in left]
        entries = self.latents.of([to_latent_variant(appearance) for appearance in shown])
        texts: list[Mapping[str, Tensor]] = [*self.texts.of([appearance.caption for appearance in shown])]
        examples = [self.schedule.examples[appearance.example] for appearance in shown]
        mask = None
        if any("mask" in entry for entry in entries):
            masks = [entry.get("mask", torch.ones(entry["latents"].shape[-2:])) for entry in entries]
            mask = torch.stack(masks)[:, None, None].to(self.device)
        return TrainingBatch(
            latents=torch.stack([entry["latents"] for entry in entries]).to(self.device),
            conditioning={name: value.to(self.device) for name, value in self.encoders.collate(texts).items()},
            weights=torch.tensor(
                [self.options.prior_loss_weight if example.subset.is_reg else 1.0 for example in examples],
                device=self.device,
            ),
            mask=mask,
            names=tuple(example.name for example in examples),
            places=tuple(place for place, _ in left),
            multiplier=self.schedule.datasets[examples[0].subset.dataset].network_multiplier,
        )


def ensure_entries(
    store: EntryStore[_Item], chunk: Sequence[_Item], name_of: Callable[[_Item], str], faults: EncodingFailures
) -> None:
    """See to it that the entries of a chunk are there; where it fails, one by one, so that others do not suffer.

    Raises FileError (FILE-NOT-WRITTEN): the disk, not an item, is at fault.
    """
    faults.tried.update(map(name_of, chunk))
    try:
        store.of(chunk)
    except (NumericsError, FileError) as error:
        if isinstance(error, FileError) and error.code == "FILE-NOT-WRITTEN":
            raise
        if len(chunk) > 1:
            for item in chunk:
                ensure_entries(store, [item], name_of, faults)
        elif isinstance(error, FileError):
            faults.unread[name_of(chunk[0])] = error
        else:
            faults.nonfinite[name_of(chunk[0])] = error


def split_into_chunks(items: Sequence[_Item], size: int) -> list[list[_Item]]:
    """The items in groups of `size`, the last one smaller."""
    return [list(items[begin : begin + size]) for begin in range(0, len(items), size)]


def prefetch_items(items: Iterable[_Item]) -> Iterator[_Item]:
    """The items, each made in a thread while the one before is used; errors come where the item would have come."""
    end = object()
    source = iter(items)
    with ThreadPoolExecutor(1, "loader") as thread:
        coming = thread.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, source, end)
            yield item  # type: ignore[misc]
