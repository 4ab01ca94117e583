"""Which shape each picture is trained in: sizes of one area and of many shapes, as sd-scripts chooses them.

Sources: sd-scripts, library/model_util.py (make_bucket_resolutions) and library/train_util.py (BucketManager).
Sizes are (width, height) in pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from finitune.config.datasets import SIDE_MULTIPLE, DatasetOptions, ResolvedDataset, round_to_side, to_width_height
from finitune.datasets.items import BucketPlacement, PixelSize, TrainingExample
from finitune.errors import UsageError
from finitune.report import Finding, Level, Table

_MAX_ENLARGEMENT = 2.0
_MAX_CROPPED_SHARE = 0.5
_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True)
class BucketPlacements:
    """The examples that have a place, their placements in the same order, and what is to be said of them."""

    examples: tuple[TrainingExample, ...]
    placements: tuple[BucketPlacement, ...]
    findings: tuple[Finding, ...]


@lru_cache
def compute_bucket_sizes(resolution: PixelSize, minimum: int, maximum: int, step: int) -> tuple[PixelSize, ...]:
    """All sizes, sorted, with sides of `step` multiples in minimum .. maximum and up to the area of `resolution`.

    The bounds are widened to hold the sides of `resolution`, and to multiples of `step`.
    """
    area = resolution[0] * resolution[1]
    lowest = max(step, min(minimum, *resolution) // step * step)
    highest = -(-max(maximum, *resolution) // step) * step
    square = max(step, math.isqrt(area) // step * step)
    sizes = {(square, square)}
    for width in range(lowest, highest + 1, step):
        height = min(highest, area // width // step * step)
        if height >= lowest:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def check_bucket_sides(options: DatasetOptions) -> None:
    """Raises UsageError where sides would not be multiples of 16."""
    step, resolution = options.bucket_reso_steps, to_width_height(options.resolution)
    if options.enable_bucket and step % SIDE_MULTIPLE:
        raise build_side_error("bucket_reso_steps", step)
    for side in resolution:
        if side < SIDE_MULTIPLE or (not options.enable_bucket and side % SIDE_MULTIPLE):
            raise build_side_error("resolution", side)


def build_side_error(option: str, value: int) -> UsageError:
    """The error for a side that the model cannot take."""
    other = ", or enable_bucket = true" if option == "resolution" else ""
    return UsageError(
        f"{option} is {value}, and sides of pictures must be multiples of {SIDE_MULTIPLE}",
        code="SIDE-NOT-MULTIPLE",
        subject=option,
        evidence={option: value, "multiple": SIDE_MULTIPLE},
        remedy=f"Take {option} = {round_to_side(value)}{other}.",
    )


def place_in_bucket(size: PixelSize, options: DatasetOptions) -> BucketPlacement | None:
    """Where a picture of this size lies; None where it is too small to be in any bucket."""
    resolution = to_width_height(options.resolution)
    if not options.enable_bucket:
        return scale_to_cover(size, resolution)
    if options.bucket_no_upscale:
        return place_without_upscaling(size, resolution[0] * resolution[1], options.bucket_reso_steps)
    sizes = compute_bucket_sizes(
        resolution, options.min_bucket_reso, options.max_bucket_reso, options.bucket_reso_steps
    )
    aspect = size[0] / size[1]
    return scale_to_cover(size, size if size in sizes else min(sizes, key=lambda s: abs(s[0] / s[1] - aspect)))


def scale_to_cover(size: PixelSize, bucket: PixelSize) -> BucketPlacement:
    """The picture scaled so that it just covers the bucket."""
    (width, height), (wide, high) = size, bucket
    if width * high > wide * height:  # wider than the bucket: the heights meet
        return BucketPlacement(bucket, (round_half_up(width * high, height), high))
    return BucketPlacement(bucket, (wide, round_half_up(height * wide, width)))


def round_half_up(numerator: int, denominator: int) -> int:
    """The fraction rounded to the nearest whole number, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)


def place_without_upscaling(size: PixelSize, area: int, step: int) -> BucketPlacement | None:
    """The picture at its own size, or shrunk to the area; its bucket is what is left of it in whole steps."""
    width, height = size
    scaled = size
    if width * height > area:
        # One side is put on a step; of the two ways, the one whose bucket has the more similar shape.
        aspect = width / height
        ideal = math.sqrt(area * aspect)
        wide, high = round_to_step(ideal, step), round_to_step(area / ideal, step)
        ways = [
            ((wide, int(wide / aspect + 0.5)), (wide, round_to_step(wide / aspect, step))),
            ((int(high * aspect + 0.5), high), (round_to_step(high * aspect, step), high)),
        ]
        by_width, by_height = (abs(w / h - aspect) if w and h else math.inf for _, (w, h) in ways)
        scaled = ways[0 if by_width < by_height else 1][0]
    bucket = (scaled[0] // step * step, scaled[1] // step * step)
    return BucketPlacement(bucket, scaled) if all(bucket) else None


def round_to_step(side: float, step: int) -> int:
    """The side rounded to a whole number, then down to a multiple of `step`."""
    return int(side + 0.5) // step * step


def compute_enlargement(size: PixelSize, placement: BucketPlacement) -> float:
    """The factor by which a picture is scaled."""
    return max(placement.scaled[0] / size[0], placement.scaled[1] / size[1])


def compute_cropped_share(placement: BucketPlacement) -> float:
    """The share of a picture that lies outside of its bucket."""
    return 1 - math.prod(placement.bucket) / math.prod(placement.scaled)


def place_examples(
    examples: Sequence[TrainingExample], datasets: Sequence[ResolvedDataset], batch_size: int
) -> BucketPlacements:
    """The place of every example; those without one, or skipped for their size, are left out and told.

    `batch_size` counts for datasets without one of their own. Raises UsageError (SIDE-NOT-MULTIPLE).
    """
    for dataset in datasets:
        check_bucket_sides(dataset)
    kept: list[tuple[TrainingExample, BucketPlacement]] = []
    small: list[tuple[float, TrainingExample]] = []
    skipped: list[tuple[float, TrainingExample]] = []
    for example in examples:
        options = datasets[example.subset.dataset]
        limit = options.skip_image_resolution
        placement = place_in_bucket(example.size, options)
        if limit is not None and math.prod(example.size) <= math.prod(to_width_height(limit)):
            skipped.append((math.prod(example.size), example))
        elif placement is None:
            small.append((min(example.size), example))
        else:
            kept.append((example, placement))
    large = [(factor, e) for e, p in kept if (factor := compute_enlargement(e.size, p)) > _MAX_ENLARGEMENT]
    lost = [(share, e) for e, p in kept if (share := compute_cropped_share(p)) > _MAX_CROPPED_SHARE]
    findings = [
        *summarize_worst_examples(
            small,
            "PICTURE-TOO-SMALL",
            "left out, as a side is shorter than bucket_reso_steps",
            "Take larger pictures, smaller bucket_reso_steps, or bucket_no_upscale = false.",
        ),
        *summarize_worst_examples(skipped, "PICTURE-SKIPPED", "left out by skip_image_resolution", "", Level.NOTE),
        *summarize_worst_examples(
            sorted(large, key=lambda pair: -pair[0]),
            "PICTURE-ENLARGED",
            "enlarged more than twice ({worst:.1f} times), so that blur is learned",
            "Take larger pictures, a smaller resolution, or bucket_no_upscale = true.",
        ),
        *summarize_worst_examples(
            sorted(lost, key=lambda pair: -pair[0]),
            "PICTURE-CUT",
            "more than half is lost to the crop ({worst:.0%})",
            "Crop by hand to what matters, or cut into several pictures; a larger max_bucket_reso has longer buckets.",
        ),
        *report_short_batches(kept, datasets, batch_size),
    ]
    return BucketPlacements(tuple(e for e, _ in kept), tuple(p for _, p in kept), tuple(findings))


def summarize_worst_examples(
    found: list[tuple[float, TrainingExample]], code: str, what: str, remedy: str, level: Level = Level.WARNING
) -> list[Finding]:
    """One finding about all of them, that names the first, the worst one."""
    if not found:
        return []
    worst, first = found[0]
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    message = f"{first.name} ({first.size[0]} x {first.size[1]}){others}: {what.format(worst=worst)}"
    names = [example.name for _, example in found[:_MAX_NAMES_SHOWN]]
    return [Finding(level, code, first.name, message, {"count": len(found), "pictures": names}, remedy)]


def count_bucket_examples(
    pairs: Sequence[tuple[TrainingExample, BucketPlacement]],
) -> dict[tuple[int, PixelSize], tuple[int, int]]:
    """For each dataset and bucket the number of pictures, and of their appearances in an epoch."""
    pictures: Counter[tuple[int, PixelSize]] = Counter()
    appearances: Counter[tuple[int, PixelSize]] = Counter()
    for example, placement in pairs:
        key = (example.subset.dataset, placement.bucket)
        pictures[key] += 1
        appearances[key] += example.repeats
    return {key: (pictures[key], appearances[key]) for key in sorted(pictures)}


def report_short_batches(
    pairs: Sequence[tuple[TrainingExample, BucketPlacement]], datasets: Sequence[ResolvedDataset], batch_size: int
) -> list[Finding]:
    """Buckets with fewer appearances than a micro-batch has room for."""
    short: list[tuple[int, int, PixelSize]] = []
    counts = count_bucket_examples(pairs)
    for (dataset, bucket), (_, appearances) in counts.items():
        room = datasets[dataset].batch_size or batch_size
        if appearances < room:
            short.append((appearances, room, bucket))
    if not short:
        return []
    appearances, room, bucket = min(short)
    message = (
        f"{len(short)} of {len(counts)} buckets hold fewer pictures than a batch: {bucket[0]} x {bucket[1]} has "
        f"{appearances} for {room}. Such batches are smaller, and each of their pictures counts as much as any other"
    )
    alone = sum(appearances == 1 for appearances, _, _ in short)
    evidence: dict[str, object] = {"buckets": len(counts), "short": len(short), "of_one": alone}
    remedy = "Fewer shapes fill batches better: larger bucket_reso_steps, or pictures cropped to a few shapes."
    return [Finding(Level.NOTE, "BUCKET-SHORT", f"{bucket[0]} x {bucket[1]}", message, evidence, remedy)]


def build_bucket_table(placed: BucketPlacements, datasets: Sequence[ResolvedDataset], batch_size: int) -> Table:
    """The buckets for a person: pictures, appearances in an epoch, and the sizes of their micro-batches."""
    rows = []
    counts = count_bucket_examples(list(zip(placed.examples, placed.placements, strict=True)))
    for (dataset, (width, height)), (pictures, appearances) in counts.items():
        room = datasets[dataset].batch_size or batch_size
        full, rest = divmod(appearances, room)
        batches = " + ".join([f"{full} x {room}"] * bool(full) + [f"1 x {rest}"] * bool(rest))
        rows.append((str(dataset + 1), f"{width} x {height}", str(pictures), str(appearances), batches))
    return Table("buckets", ("dataset", "size", "pictures", "in an epoch", "micro-batches"), tuple(rows))
