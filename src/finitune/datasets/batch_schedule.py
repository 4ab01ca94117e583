"""The course of a run: which pictures are shown in which step, cut how, with which words. A pure function of the seed.

An epoch is one list of micro-batches, each of one dataset and one bucket. It depends on neither the number of devices
nor the accumulation; `accumulation * world` of them in a row make an optimiser step, dealt to the devices in turn. So
two devices see in a step what one sees that accumulates twice, and a run that goes on at step n has no past to restore.

All chance is drawn from a key of plain values (seed, what for, picture, time): nothing depends on what was drawn
before, and one picture more or less leaves the others' chances as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from finitune.config.datasets import ResolvedDataset
from finitune.datasets.captions import (
    CaptionContext,
    build_final_caption,
    compute_token_warmup_steps,
    count_caption_versions,
    draw_uniform,
    find_caption_version,
    is_caption_dropped,
)
from finitune.datasets.items import (
    BucketPlacement,
    ExampleAppearance,
    MicroBatch,
    PixelSize,
    TrainingExample,
    derive_seed,
)
from finitune.errors import UsageError


@dataclass(frozen=True)
class ScheduledStep:
    """An optimiser step: its place in its epoch, and the micro-batches of all devices and accumulations in order."""

    epoch: int
    index: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def samples(self) -> int:
        """Pictures in the step, over all devices."""
        return sum(map(len, self.micro_batches))


@dataclass(frozen=True)
class LatentVariant:
    """A picture as the latents' encoder sees it: which example, cut where, mirrored or not, with which colours."""

    example: int
    crop: tuple[int, int]
    flipped: bool
    color: int | None = None


@dataclass(frozen=True)
class BatchSlot:
    """The place of a micro-batch in an epoch: its bucket, and the (example, repeat) that are in it."""

    bucket: PixelSize
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BatchSchedule:
    """The order of a run over `examples` with their `placements`, each in one of `datasets`.

    `batch_size` counts for datasets without one of their own. `steps` are those of the whole run, where known: a token
    warm-up may be a share of them. An example is shown `repeats` times in an epoch.
    """

    examples: tuple[TrainingExample, ...]
    placements: tuple[BucketPlacement, ...]
    datasets: tuple[ResolvedDataset, ...]
    seed: int
    batch_size: int = 1
    accumulation: int = 1
    world: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        if not self.examples:
            raise UsageError(
                "there is no picture to show",
                code="COURSE-EMPTY",
                subject="datasets",
                remedy="Every picture was left out; the findings before this one say why.",
            )

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What tells the examples apart to chance: their datasets and names, and nothing of where the files lie."""
        return tuple(f"{example.subset.dataset}/{example.name}" for example in self.examples)

    @cached_property
    def groups(self) -> dict[tuple[int, PixelSize], list[tuple[int, int]]]:
        """The (example, repeat) of an epoch by dataset and bucket."""
        groups: dict[tuple[int, PixelSize], list[tuple[int, int]]] = {}
        for number, (example, placement) in enumerate(zip(self.examples, self.placements, strict=True)):
            entries = groups.setdefault((example.subset.dataset, placement.bucket), [])
            entries += [(number, repeat) for repeat in range(example.repeats)]
        return groups

    def room(self, dataset: int) -> int:
        """Pictures in a full micro-batch of a dataset."""
        return self.datasets[dataset].batch_size or self.batch_size

    @cached_property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches in an epoch, over all devices."""
        return sum(-(-len(entries) // self.room(dataset)) for (dataset, _), entries in self.groups.items())

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in an epoch; the last one may have fewer micro-batches."""
        return -(-self.micro_batches_per_epoch // (self.accumulation * self.world))

    @property
    def samples_per_epoch(self) -> int:
        """Pictures shown in an epoch."""
        return sum(example.repeats for example in self.examples)

    def slots(self, epoch: int) -> tuple[BatchSlot, ...]:
        """All micro-batches of an epoch in order, whatever the number of devices."""
        slots: list[BatchSlot] = []
        for (dataset, bucket), entries in self.groups.items():
            room = self.room(dataset)
            order = sorted(entries, key=lambda entry: derive_seed(self.seed, epoch, self.labels[entry[0]], entry[1]))
            slots += [BatchSlot(bucket, tuple(order[begin : begin + room])) for begin in range(0, len(order), room)]
        numbers = sorted(range(len(slots)), key=lambda number: derive_seed(self.seed, epoch, "micro-batch", number))
        return tuple(slots[number] for number in numbers)

    @cached_property
    def recent_slots(self) -> Callable[[int], tuple[BatchSlot, ...]]:
        """`slots`, with the last epochs remembered."""
        return lru_cache(maxsize=2)(self.slots)

    def step(self, epoch: int, index: int) -> ScheduledStep:
        """One step of an epoch."""
        size = self.accumulation * self.world
        micro_batches: list[MicroBatch] = []
        first = 0
        for slot in self.recent_slots(epoch)[index * size : (index + 1) * size]:
            step = epoch * self.steps_per_epoch + index
            shown = tuple(self.appearance(*self.timed(entry, epoch), epoch, step) for entry in slot.entries)
            micro_batches.append(MicroBatch(slot.bucket, shown, first))
            first += len(shown)
        return ScheduledStep(epoch, index, tuple(micro_batches))

    def epoch(self, epoch: int) -> tuple[ScheduledStep, ...]:
        """All steps of an epoch, counted from 0."""
        return tuple(self.step(epoch, index) for index in range(self.steps_per_epoch))

    def at(self, step: int) -> ScheduledStep:
        """The optimiser step `step` of the run, counted from 0."""
        return self.step(*divmod(step, self.steps_per_epoch))

    def select_micro_batches(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one device in a step of the run, in the order of its accumulation.

        There may be none where the last step of an epoch is short.
        """
        return self.at(step).micro_batches[rank :: self.world]

    def iterate_steps(self, first: int, end: int) -> Iterator[ScheduledStep]:
        """The optimiser steps first .. end - 1 of the run."""
        return map(self.at, range(first, end))

    def timed(self, entry: tuple[int, int], epoch: int) -> tuple[int, int]:
        """(example, how often it was shown before in the run) of an (example, repeat) of an epoch."""
        number, repeat = entry
        return number, epoch * self.examples[number].repeats + repeat

    def appearance(self, number: int, time: int, epoch: int, step: int) -> ExampleAppearance:
        """What an example is when it is shown for the `time`-th time, from 0, in step `step` of the run."""
        subset, label = self.examples[number].subset, self.labels[number]
        color = derive_seed(self.seed, "color", label, time) if subset.color_aug else None
        caption = build_final_caption(
            self.examples[number].caption, subset, self.build_caption_context(number, time, epoch, step)
        )
        return ExampleAppearance(number, epoch, self.crop(number, time), self.flipped(number, time), caption, color)

    def build_caption_context(self, number: int, time: int, epoch: int, step: int) -> CaptionContext:
        """What the caption of an example depends on."""
        return CaptionContext(self.seed, self.labels[number], epoch, time, step, self.steps)

    def flipped(self, number: int, time: int) -> bool:
        """Whether an example is mirrored."""
        flips = self.examples[number].subset.flip_aug
        return flips and draw_uniform(self.seed, "flip", self.labels[number], time) < 0.5

    def crop(self, number: int, time: int) -> tuple[int, int]:
        """The corner of an example's bucket in the scaled picture: in the middle, or anywhere with random_crop."""
        placement = self.placements[number]
        (wide, high), (width, height) = placement.scaled, placement.bucket
        left, top = wide - width, high - height
        if not self.examples[number].subset.random_crop:
            return left // 2, top // 2
        draws = (derive_seed(self.seed, axis, self.labels[number], time) for axis in ("left", "top"))
        return next(draws) % (left + 1), next(draws) % (top + 1)

    def captions(self, steps: int) -> dict[str, str]:
        """The different captions of the first `steps` steps, "" among them: {caption: a picture that it belongs to}."""
        found = {"": ""}
        for number, caption in self.iterate_captions(steps):
            found.setdefault(caption, self.examples[number].name)
        return found

    def iterate_captions(self, steps: int) -> Iterator[tuple[int, str]]:
        """Each (example, caption) of the first `steps` steps but for dropped ones; it ends where no other can come."""
        warm_up = [compute_token_warmup_steps(example.subset, self.steps) for example in self.examples]
        left = sum(count_caption_versions(example.subset) for example in self.examples)
        settled: set[tuple[int, int]] = set()
        for number, time, step in self.shown(steps) if left else ():
            subset = self.examples[number].subset
            way = number, find_caption_version(subset, time)
            showing = self.build_caption_context(number, time, step // self.steps_per_epoch, step)
            if way in settled or is_caption_dropped(subset, showing):
                continue
            yield number, build_final_caption(self.examples[number].caption, subset, showing)
            if step >= warm_up[number]:
                settled.add(way)
            if len(settled) == left:
                return

    def latent_variants(self, steps: int) -> tuple[LatentVariant, ...]:
        """The different pictures of the first `steps` steps whose latents can be made beforehand."""
        fixed = [has_fixed_latents(example) for example in self.examples]
        left = sum(1 + example.subset.flip_aug for example, one in zip(self.examples, fixed, strict=True) if one)
        found: dict[LatentVariant, None] = {}
        for number, time, _ in self.shown(steps) if left else ():
            if fixed[number]:
                found[LatentVariant(number, self.crop(number, time), self.flipped(number, time))] = None
            if len(found) == left:
                break
        return tuple(found)

    def shown(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """(example, how often it was shown before, step) of all that is shown in the first `steps` steps."""
        size = self.accumulation * self.world
        for step in range(steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            for slot in self.recent_slots(epoch)[index * size : (index + 1) * size]:
                yield from ((*self.timed(entry, epoch), step) for entry in slot.entries)


def exclude_examples(
    micro: MicroBatch, course: BatchSchedule, names: Collection[str]
) -> list[tuple[int, ExampleAppearance]]:
    """What is left of a micro-batch without the examples of these names: (place in the step, appearance).

    The others keep their places, and so their noise.
    """
    placed = enumerate(micro.appearances, micro.first)
    return [(place, shown) for place, shown in placed if course.examples[shown.example].name not in names]


def has_fixed_latents(example: TrainingExample) -> bool:
    """Whether an example has the same latents whenever it is shown, but for a mirroring."""
    return not (example.subset.random_crop or example.subset.color_aug)


def to_latent_variant(appearance: ExampleAppearance) -> LatentVariant:
    """What the latents' encoder sees of an appearance."""
    return LatentVariant(appearance.example, appearance.crop, appearance.flipped, appearance.color)


def disable_augmentation(example: TrainingExample) -> TrainingExample:
    """The example as it is to be measured on: shown once, in the middle, with its whole caption."""
    still: dict[str, object] = {
        "flip_aug": False,
        "color_aug": False,
        "random_crop": False,
        "shuffle_caption": False,
        "caption_dropout_rate": 0.0,
        "caption_dropout_every_n_epochs": 0,
        "caption_tag_dropout_rate": 0.0,
        "token_warmup_step": 0,
        "caption_variants": 1,
    }
    return replace(example, subset=example.subset.model_copy(update=still), repeats=1)
