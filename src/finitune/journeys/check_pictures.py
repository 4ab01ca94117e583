"""What `finitune check` sees of pictures and captions: the folders of a configuration, whoever has named them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from finitune.config.datasets import flattened
from finitune.config.schema import TrainConfig
from finitune.errors import FinituneError
from finitune.journeys.checks import Mending, Request
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table

if TYPE_CHECKING:
    from finitune.datasets.buckets import Placed
    from finitune.datasets.captions_check import Cut
    from finitune.datasets.course import Course
    from finitune.datasets.folders import Scan
    from finitune.datasets.items import Example
    from finitune.models.anima.load import AnimaParts

WORST = 10
"""How many pictures are shown that lose most by their bucket."""
EXTREME = 4.0
"""The ratio of sides from which on a picture is a stripe."""
TINY = 64
"""A side below this many pixels."""


@dataclass(frozen=True)
class Parted:
    """The pictures to learn from, placed in their buckets, and how many are kept out."""

    placed: Placed
    kept_out: int
    course: Course | None


def look_at_data(config: TrainConfig, request: Request, report: Report, progress: Progress, *, decode: bool) -> None:
    """Scan the folders of a configuration, place the pictures, read the captions; with `decode`, all of each picture.

    What is found goes to the report, and what can be mended to the request.
    """
    from finitune.datasets.buckets import bucket_table
    from finitune.datasets.captions_check import check_bytes, check_captions, check_lengths
    from finitune.datasets.folders import scan, summary

    datasets = flattened(config)
    found = scan(datasets, progress)
    report.findings.extend(found.findings)
    every = [example for examples in found.examples for example in examples]
    if decode:
        decode_all(every, request, report, progress)
    files = bytes_of(found.captions[one.path] for one in every if one.path in found.captions)
    report.findings += [*check_bytes(files), *check_captions(every, config.saving.trigger_phrase), *shapes(every)]
    if cut := cut_of(config, request, report):
        report.findings += check_lengths(every, cut)
    mend_captions(files, request)
    report.figures.update(found.figures)
    if not every:
        return
    parted = part(config, found)
    report.findings.extend(parted.placed.findings)
    buckets = bucket_table(parted.placed, datasets, config.training.train_batch_size)
    report.tables += [summary(found), buckets, worst_placed(parted.placed)]
    report.figures["buckets"] = buckets.as_dicts()
    tell_steps(config, parted, report)


def part(config: TrainConfig, found: Scan) -> Parted:
    """The pictures as a run would divide and place them; raises UsageError (SIDE-NOT-MULTIPLE)."""
    from finitune.datasets.buckets import place_all
    from finitune.datasets.folders import split
    from finitune.journeys.train_run import course_of

    datasets = flattened(config)
    learned: list[Example] = []
    kept_out = 0
    for options, examples in zip(datasets, found.examples, strict=True):
        seed = config.training.seed if options.validation_seed is None else options.validation_seed
        kept, out = split(examples, options.validation_split, seed)
        learned += kept
        kept_out += len(out)
    placed = place_all(learned, datasets, config.training.train_batch_size)
    return Parted(placed, kept_out, course_of(config, placed) if placed.examples else None)


def tell_steps(config: TrainConfig, parted: Parted, report: Report) -> None:
    """How long a run over these pictures is, as figures."""
    from finitune.datasets.buckets import cut, enlarged

    pairs = list(zip(parted.placed.examples, parted.placed.placements, strict=True))
    factors = [enlarged(example.size, placement) for example, placement in pairs]
    losses = [cut(placement) for _, placement in pairs]
    report.figures.update(
        placed=len(pairs),
        held_out=parted.kept_out,
        enlarged=sum(factor > 1 for factor in factors),
        largest_enlargement=max(factors, default=0.0),
        mean_loss=sum(losses) / max(len(losses), 1),
        largest_loss=max(losses, default=0.0),
    )
    if parted.course is None:
        return
    course, accumulation = parted.course, config.training.gradient_accumulation_steps
    rooms = sorted({course.room(dataset) for dataset, _ in course.groups})
    report.figures.update(
        batch=rooms[-1],
        accumulation=accumulation,
        effective_batch=rooms[-1] * accumulation,
        samples_per_epoch=course.samples_per_epoch,
        micro_batches_per_epoch=course.micro_batches_per_epoch,
        steps_per_epoch=course.steps_per_epoch,
        steps=course.steps,
        epochs=course.steps / course.steps_per_epoch,
    )


def worst_placed(placed: Placed) -> Table:
    """The pictures that lose most by their bucket: by the crop, then by being enlarged."""
    from finitune.datasets.buckets import cut, enlarged

    told = sorted(
        (-cut(place), -enlarged(one.size, place), one.name, one.size, place.bucket)
        for one, place in zip(placed.examples, placed.placements, strict=True)
    )
    rows = tuple(
        (name, f"{width} x {height}", f"{wide} x {high}", f"{-factor:.2f}", f"{-loss:.1%}")
        for loss, factor, name, (width, height), (wide, high) in told[:WORST]
    )
    return Table("pictures that lose most", ("picture", "size", "bucket", "scaled by", "lost"), rows)


def decode_all(examples: list[Example], request: Request, report: Report, progress: Progress) -> None:
    """Decode every picture once: what is damaged or odd, what looks the same, what has another's ending."""
    from finitune.datasets.folders import verify_pictures
    from finitune.datasets.look_alikes import Looks
    from finitune.datasets.mend import rename, rightly_named
    from finitune.datasets.pictures import OTHER_KIND
    from finitune.datasets.telling import several

    looks = Looks()
    found = verify_pictures(examples, progress, look=looks)
    names = {example.path: example.name for example in examples}
    report.findings += [one for one in found if one.subject != OTHER_KIND]
    report.findings += looks.findings(names)
    by_metadata = {example.path for example in examples if example.subset.metadata_file}
    told = [f"{names.get(path, path.name)} ({kind})" for path, kind in sorted(looks.misnamed.items())]
    what = f"pictures are of another kind than their names say ({len(told)})"
    remedy = "They are read all the same here; other programs may not. Name them by what they are."
    report.findings += several(Level.WARNING, "PICTURE-EXTENSION", "datasets", what, told, remedy)
    for path, kind in sorted(looks.misnamed.items()):
        name = rightly_named(path, kind)
        if name is not None and path not in by_metadata:
            what = f"Rename it to {name.name}, as it is {kind}"
            request.mendings.append(Mending("PICTURE-EXTENSION", path, what, partial(rename, path, kind)))


def shapes(examples: Iterable[Example]) -> list[Finding]:
    """Pictures that are stripes, or hardly there."""
    from finitune.datasets.telling import several

    sizes = {f"{one.name} ({one.size[0]} x {one.size[1]})": one.size for one in examples}
    stripes = [name for name, size in sizes.items() if max(size) > EXTREME * min(size)]
    tiny = [name for name, size in sizes.items() if min(size) < TINY]
    what = f"pictures are more than {EXTREME:g} times as long as wide ({len(stripes)})"
    remedy = "Cut them into several pictures."
    found = several(Level.WARNING, "PICTURE-STRIPE", "datasets", what, stripes, remedy)
    what = f"pictures have a side of less than {TINY} pixels ({len(tiny)})"
    return found + several(Level.WARNING, "PICTURE-TINY", "datasets", what, tiny, "Take larger ones.")


def bytes_of(files: Iterable[Path]) -> dict[Path, bytes]:
    """The bytes of every file that can be read; of the others the scan has told."""
    found: dict[Path, bytes] = {}
    for file in dict.fromkeys(files):
        with suppress(OSError):
            found[file] = file.read_bytes()
    return found


def mend_captions(files: Mapping[Path, bytes], request: Request) -> None:
    """Offer what can be mended in how captions are written down."""
    from finitune.datasets.captions_read import shown
    from finitune.datasets.mend import MARK, as_utf8, encoded_plainly, rewrite, with_plain_ends, without_mark

    for path, data in files.items():
        changes = []
        if found := as_utf8(data):
            content, encoding = found
            text = shown(content.decode(), 60)
            changes.append(("CAPTION-ENCODING", f"Write it as UTF-8, read as {encoding}: {text!r}", encoded_plainly))
        if data.startswith(MARK) and without_mark(data) != data:
            changes.append(("CAPTION-BOM", "Take its byte order mark off", without_mark))
        if b"\r" in data and with_plain_ends(data) != data:
            changes.append(("CAPTION-CRLF", "Write its line ends as LF", with_plain_ends))
        for code, what, change in changes:
            request.mendings.append(Mending(code, path, what, partial(rewrite, path, change)))


def cut_of(config: TrainConfig, request: Request, report: Report) -> Cut | None:
    """What tells the tokens of a caption beyond the limits, by the tokenizers alone; None where no model is named."""
    from finitune.journeys.model import model_path
    from finitune.models.anima.encode import AnimaEncoders
    from finitune.models.anima.folders import load_tokenizers

    name = request.model or config.model.pretrained_model_name_or_path
    place = model_path(name)
    folder = config.model.tokenizers or (place if place.is_dir() else place.parent)
    if not (folder / "tokenizer").is_dir():
        return None
    try:
        tokenizers = load_tokenizers(folder)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
        return None
    for tokenizer in tokenizers.values():
        tokenizer.model_max_length = sys.maxsize  # longer captions are what is looked for
    training = config.training
    limits = training.qwen3_max_token_length, training.t5_max_token_length
    parts = cast("AnimaParts", SimpleNamespace(**tokenizers))
    return partial(cut_by, AnimaEncoders(parts, {}, "context", *limits))


def cut_by(encoders: Any, caption: str) -> dict[str, tuple[int, str]]:
    """By tokenizer, the tokens of a caption beyond its limit and the text that is lost.

    Of plain letters a token is at least one: short captions need not be divided.
    """
    if caption.isascii() and len(caption) + 2 <= min(encoders.qwen3_tokens, encoders.t5_tokens):
        return {}
    of = {
        "qwen3": (encoders.parts.tokenizer, encoders.qwen3_tokens),
        "t5": (encoders.parts.t5_tokenizer, encoders.t5_tokens),
    }
    return {name: (beyond, lost_text(caption, *of[name])) for name, beyond in encoders.cut(caption).items()}


def lost_text(caption: str, tokenizer: Any, limit: int) -> str:
    """The end of a caption that a tokenizer leaves out at its limit."""
    kept = tokenizer(caption, max_length=limit, truncation=True, return_offsets_mapping=True)["offset_mapping"]
    return caption[max((end for _, end in kept), default=0) :]
