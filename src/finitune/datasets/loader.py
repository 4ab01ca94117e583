"""From a course to batches: everything that can be made beforehand is, and the rest while the step before computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from finitune.datasets.batch_schedule import BatchSchedule, LatentVariant, exclude_examples, to_latent_variant
from finitune.datasets.items import ExcludedExamples, FamilyEncoders, MicroBatch, TrainingBatch, TrainingExample
from finitune.datasets.latent_store import (
    EncodedTensors,
    EncoderCaches,
    LatentEncoder,
    LatentStore,
    LruTensorCache,
    TextEntryEncoder,
)
from finitune.errors import FileError, FinituneError, NumericsError
from finitune.progress import Progress
from finitune.report import Finding, Level

_Item = TypeVar("_Item")

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


class BatchLoader:
    """Makes batches of micro-batches of `course`, on `device`."""

    def __init__(
        self,
        course: BatchSchedule,
        encoders: FamilyEncoders,
        caches: EncoderCaches,
        options: LoaderOptions = LoaderOptions(),
        device: torch.device | str = "cpu",
    ):
        self.course = course
        self.encoders = encoders
        self.options = options
        self.device = torch.device(device)
        recent = LruTensorCache(options.memory_bytes)
        maker = LatentEncoder(course, encoders, options.vae_batch_size, options.masked_loss)
        self.latents: LatentStore[LatentVariant] = LatentStore(maker, caches.latents, recent)
        self.captions = TextEntryEncoder(encoders)
        self.texts: LatentStore[str] = LatentStore(self.captions, caches.texts, recent)

    def prepare(self, steps: int, progress: Progress, rank: int = 0, world: int = 1) -> CachePreparation:
        """Make this process's share of all entries that the first `steps` steps need and that are not there yet.

        A fault does not end it, so that all are told at once. Raises NumericsError (CACHE-NONFINITE) where an encoder
        fails on the empty caption, on more than half of the entries, or on any without quarantine; FileError
        (FILE-NOT-WRITTEN).
        """
        begin = time.monotonic()
        self.captions.names = self.course.captions(steps)
        latents = self.group_latent_variants(steps)[rank::world]
        texts = split_into_chunks(list(self.captions.names), self.captions.at_once)[rank::world]
        pictures = self.fill(self.latents, latents, lambda item: self.course.examples[item.example].name, progress)
        words = self.fill(self.texts, texts, str, progress)
        excluded = self.excluded(pictures, words, steps)
        return CachePreparation(self.figures(time.monotonic() - begin), self.findings(pictures, excluded), excluded)

    def fill(
        self, shelf: LatentStore[_Item], parts: list[list[_Item]], name_of: Callable[[_Item], str], progress: Progress
    ) -> EncodingFailures:
        """See to it that all entries are there; what went wrong."""
        kind, faults = shelf.cache.kind, EncodingFailures()
        progress.start(kind, sum(map(len, parts)))
        for chunk in parts:
            ensure_entries(shelf, chunk, name_of, faults)
            if len(faults.nonfinite) >= _MIN_NONFINITE_FAILURES or not self.options.quarantine:
                self.judge(faults)
            progress.advance(kind, len(chunk))
        progress.finish(kind)
        self.judge(faults)
        return faults

    def group_latent_variants(self, steps: int) -> list[list[LatentVariant]]:
        """The pictures to encode, in groups of one bucket that are encoded at once, whoever does it."""
        by_bucket: dict[tuple[int, int], list[LatentVariant]] = {}
        for item in self.course.latent_variants(steps):
            by_bucket.setdefault(self.course.placements[item.example].bucket, []).append(item)
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
            for number, caption in self.course.iterate_captions(steps):
                if caption in words.nonfinite:
                    errors.setdefault(self.course.examples[number].name, words.nonfinite[caption])
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
        left = exclude_examples(micro, self.course, excluded)
        if not left:
            return None
        shown = [appearance for _, appearance in left]
        entries = self.latents.of([to_latent_variant(appearance) for appearance in shown])
        texts: list[Mapping[str, Tensor]] = [*self.texts.of([appearance.caption for appearance in shown])]
        examples = [self.course.examples[appearance.example] for appearance in shown]
        mask = stack_masks(entries)
        return TrainingBatch(
            latents=torch.stack([entry["latents"] for entry in entries]).to(self.device),
            conditioning={name: value.to(self.device) for name, value in self.encoders.collate(texts).items()},
            weights=torch.tensor([self.weight(example) for example in examples], device=self.device),
            mask=None if mask is None else mask.to(self.device),
            names=tuple(example.name for example in examples),
            places=tuple(place for place, _ in left),
            multiplier=self.course.datasets[examples[0].subset.dataset].network_multiplier,
        )

    def weight(self, example: TrainingExample) -> float:
        """The weight of an example's loss."""
        return self.options.prior_loss_weight if example.subset.is_reg else 1.0


def stack_masks(entries: Sequence[EncodedTensors]) -> Tensor | None:
    """The masks (B, 1, 1, h, w), all ones where an entry has none; None where none has one."""
    if not any("mask" in entry for entry in entries):
        return None
    masks = [entry.get("mask", torch.ones(entry["latents"].shape[-2:])) for entry in entries]
    return torch.stack(masks)[:, None, None]


def ensure_entries(
    shelf: LatentStore[_Item], chunk: Sequence[_Item], name_of: Callable[[_Item], str], faults: EncodingFailures
) -> None:
    """See to it that the entries of a chunk are there; where it fails, one by one, so that others do not suffer.

    Raises FileError (FILE-NOT-WRITTEN): the disk, not an item, is at fault.
    """
    faults.tried.update(map(name_of, chunk))
    try:
        shelf.of(chunk)
    except (NumericsError, FileError) as error:
        if isinstance(error, FileError) and error.code == "FILE-NOT-WRITTEN":
            raise
        if len(chunk) > 1:
            for item in chunk:
                ensure_entries(shelf, [item], name_of, faults)
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
