"""What `finitune check` says of pictures and captions: of a folder, of folders N_name, of whatever a TOML names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from finitune.config.datasets import parse_numbered_folder, resolve_datasets
from finitune.config.read import validate_config
from finitune.config.schema import TrainConfig
from finitune.datasets.buckets import (
    BucketPlacements,
    build_bucket_table,
    compute_cropped_share,
    compute_enlargement,
    place_examples,
)
from finitune.datasets.caption_files import (
    UTF8_BOM,
    convert_to_utf8,
    ensure_utf8,
    normalize_line_ends,
    remove_bom,
    rewrite_file,
    shorten_text,
)
from finitune.datasets.captions_check import (
    CaptionTruncator,
    check_caption_bytes,
    check_caption_lengths,
    check_captions,
)
from finitune.datasets.dataset_scan import (
    build_dataset_summary,
    scan_datasets,
    split_held_out,
    verify_pictures,
)
from finitune.datasets.folder_listing import count_pictures
from finitune.datasets.items import TrainingExample
from finitune.datasets.near_duplicates import NearDuplicateFinder
from finitune.datasets.picture_files import WRONG_EXTENSION_NOTE
from finitune.datasets.picture_formats import find_matching_name, rename_to_format
from finitune.errors import FinituneError
from finitune.importers.kohya_folders import build_subset_options, scan_kohya_folder
from finitune.models.loaded import find_loaded_class
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table, summarize_names
from finitune.verbs.check.config_file import open_checked_config
from finitune.verbs.check.request import UNNAMED_PLACEHOLDER, FileFix, Request, sort_findings_by_level
from finitune.verbs.shared.model import resolve_model_path
from finitune.verbs.train.inputs import build_batch_schedule

_MAX_LISTED_PICTURES = 10
_MAX_ASPECT_RATIO = 4.0
"""The ratio of sides from which on a picture is a stripe."""
_MIN_SIDE_PIXELS = 64


def check_dataset(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about the pictures and captions of a folder, of folders N_name, or of a dataset or training TOML."""
    begin = len(report.findings)
    report.figures["kind"] = "dataset"
    try:
        if path.is_dir():
            config = build_folder_config(path, request, report)
        else:
            config = open_checked_config(path, request, report).config
        if config is not None:
            check_training_pictures(config, request, report, progress, decode=True)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
    sort_findings_by_level(report, begin)


def build_folder_config(folder: Path, request: Request, report: Report) -> TrainConfig | None:
    """The configuration that trains on a folder's own pictures, or on those of the folders N_name inside.

    None where it has errors, which are in the report.
    """
    named = parse_numbered_folder(folder.resolve().name)
    inside = [entry for entry in folder.iterdir() if parse_numbered_folder(entry.name) and entry.is_dir()]
    if inside and not count_pictures(folder):
        datasets, findings = scan_kohya_folder(folder, {})
        report.findings.extend(findings)
    else:
        repeats = named if named and named[0] > 0 and "_" in folder.resolve().name else (1, "")
        datasets = {"datasets": [{"subsets": [build_subset_options(folder, *repeats, is_reg=False)]}]}
    config, findings = validate_config(
        {
            "model": {"pretrained_model_name_or_path": request.model or UNNAMED_PLACEHOLDER},
            "saving": {"output_dir": UNNAMED_PLACEHOLDER},
            **datasets,
        }
    )
    report.findings.extend(findings)
    return config


def check_training_pictures(
    config: TrainConfig, request: Request, report: Report, progress: Progress, *, decode: bool
) -> None:
    """Scan the folders of a configuration, place the pictures, read the captions; with `decode`, all of each picture.

    What is found goes to the report, and what can be mended to the request. Raises UsageError (SIDE-NOT-MULTIPLE).
    """
    datasets = resolve_datasets(config)
    found = scan_datasets(datasets, progress)
    report.findings.extend(found.findings)
    every = [example for examples in found.examples for example in examples]
    if decode:
        check_decoded_pictures(every, request, report, progress)
    files = read_readable_files(found.captions[one.path] for one in every if one.path in found.captions)
    report.findings += [
        *check_caption_bytes(files),
        *check_captions(every, config.saving.trigger_phrase),
        *check_picture_shapes(every),
    ]
    if cut := make_overflow_measure(config, request, report):
        report.findings += check_caption_lengths(every, cut)
    offer_caption_fixes(files, request)
    report.figures.update(found.figures)
    if not every:
        return
    learned, held = split_held_out(found, datasets, config.training.seed)
    placed = place_examples(learned, datasets, config.training.train_batch_size)
    report.findings.extend(placed.findings)
    buckets = build_bucket_table(placed, datasets, config.training.train_batch_size)
    report.tables += [build_dataset_summary(found), buckets, build_worst_crop_table(placed)]
    report.figures["buckets"] = buckets.as_dicts()
    report_run_length(config, placed, len(held), report)


def report_run_length(config: TrainConfig, placed: BucketPlacements, kept_out: int, report: Report) -> None:
    pairs = list(zip(placed.examples, placed.placements, strict=True))
    factors = [compute_enlargement(example.size, placement) for example, placement in pairs]
    losses = [compute_cropped_share(placement) for _, placement in pairs]
    report.figures.update(
        placed=len(pairs),
        held_out=kept_out,
        enlarged=sum(factor > 1 for factor in factors),
        largest_enlargement=max(factors, default=0.0),
        mean_loss=sum(losses) / max(len(losses), 1),
        largest_loss=max(losses, default=0.0),
    )
    if not pairs:
        return
    schedule, accumulation = build_batch_schedule(config, placed), config.training.gradient_accumulation_steps
    batch = max(schedule.room(dataset) for dataset, _ in schedule.groups)
    report.figures.update(
        batch=batch,
        accumulation=accumulation,
        effective_batch=batch * accumulation,
        samples_per_epoch=schedule.samples_per_epoch,
        micro_batches_per_epoch=schedule.micro_batches_per_epoch,
        steps_per_epoch=schedule.steps_per_epoch,
        steps=schedule.steps,
        epochs=schedule.steps / schedule.steps_per_epoch,
    )


def build_worst_crop_table(placed: BucketPlacements) -> Table:
    """The pictures that lose most by their bucket: by the crop, then by being enlarged."""
    told = sorted(
        (-compute_cropped_share(place), -compute_enlargement(one.size, place), one.name, one.size, place.bucket)
        for one, place in zip(placed.examples, placed.placements, strict=True)
    )
    rows = tuple(
        (name, f"{width} x {height}", f"{wide} x {high}", f"{-factor:.2f}", f"{-loss:.1%}")
        for loss, factor, name, (width, height), (wide, high) in told[:_MAX_LISTED_PICTURES]
    )
    return Table("pictures that lose most", ("picture", "size", "bucket", "scaled by", "lost"), rows)


def check_decoded_pictures(
    examples: list[TrainingExample], request: Request, report: Report, progress: Progress
) -> None:
    """Decode every picture once: what is damaged or odd, what looks the same, what has another's ending."""
    looks = NearDuplicateFinder()
    found = verify_pictures(examples, progress, look=looks)
    names = {example.path: example.name for example in examples}
    report.findings += [one for one in found if one.subject != WRONG_EXTENSION_NOTE]
    report.findings += looks.findings(names)
    by_metadata = {example.path for example in examples if example.subset.metadata_file}
    told = [f"{names.get(path, path.name)} ({kind})" for path, kind in sorted(looks.misnamed.items())]
    what = f"pictures are of another kind than their names say ({len(told)})"
    remedy = "They are read all the same here; other programs may not. Name them by what they are."
    report.findings += summarize_names(Level.WARNING, "PICTURE-EXTENSION", "datasets", what, told, remedy)
    for path, kind in sorted(looks.misnamed.items()):
        name = find_matching_name(path, kind)
        if name is not None and path not in by_metadata:
            what = f"Rename it to {name.name}, as it is {kind}"
            request.mendings.append(FileFix("PICTURE-EXTENSION", path, what, partial(rename_to_format, path, kind)))


def check_picture_shapes(examples: Iterable[TrainingExample]) -> list[Finding]:
    """Pictures that are stripes, or hardly there."""
    sizes = {f"{one.name} ({one.size[0]} x {one.size[1]})": one.size for one in examples}
    stripes = [name for name, size in sizes.items() if max(size) > _MAX_ASPECT_RATIO * min(size)]
    tiny = [name for name, size in sizes.items() if min(size) < _MIN_SIDE_PIXELS]
    what = f"pictures are more than {_MAX_ASPECT_RATIO:g} times as long as wide ({len(stripes)})"
    remedy = "Cut them into several pictures."
    found = summarize_names(Level.WARNING, "PICTURE-STRIPE", "datasets", what, stripes, remedy)
    what = f"pictures have a side of less than {_MIN_SIDE_PIXELS} pixels ({len(tiny)})"
    return found + summarize_names(Level.WARNING, "PICTURE-TINY", "datasets", what, tiny, "Take larger ones.")


def read_readable_files(files: Iterable[Path]) -> dict[Path, bytes]:
    """The bytes of every file that can be read; of the others the scan has told."""
    found: dict[Path, bytes] = {}
    for file in dict.fromkeys(files):
        with suppress(OSError):
            found[file] = file.read_bytes()
    return found


def offer_caption_fixes(files: Mapping[Path, bytes], request: Request) -> None:
    for path, data in files.items():
        changes = []
        if found := convert_to_utf8(data):
            content, encoding = found
            text = shorten_text(content.decode(), 60)
            changes.append(("CAPTION-ENCODING", f"Write it as UTF-8, read as {encoding}: {text!r}", ensure_utf8))
        if data.startswith(UTF8_BOM) and remove_bom(data) != data:
            changes.append(("CAPTION-BOM", "Take its byte order mark off", remove_bom))
        if b"\r" in data and normalize_line_ends(data) != data:
            changes.append(("CAPTION-CRLF", "Write its line ends as LF", normalize_line_ends))
        for code, what, change in changes:
            request.mendings.append(FileFix(code, path, what, partial(rewrite_file, path, change)))


def make_overflow_measure(config: TrainConfig, request: Request, report: Report) -> CaptionTruncator | None:
    """What tells the tokens of a caption beyond the limits, by the tokenizers alone; None where no model is named."""
    name = request.model or config.model.pretrained_model_name_or_path
    place = resolve_model_path(name)
    folder = config.model.tokenizers or (place if place.is_dir() else place.parent)
    loaded = find_loaded_class(place)
    try:
        tokenizers = loaded.load_tokenizers(folder)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
        return None
    if not tokenizers:
        return None
    for tokenizer in tokenizers.values():
        tokenizer.model_max_length = sys.maxsize  # longer captions are what is looked for
    limits = {
        name: (tokenizers[component], getattr(config.training, option))
        for name, (component, option) in loaded.tokenizers.items()
    }
    return partial(measure_caption_overflow, limits)


def measure_caption_overflow(limits: Mapping[str, tuple[Any, int]], caption: str) -> dict[str, tuple[int, str]]:
    """By tokenizer, the tokens of a caption beyond its limit and the text that is lost.

    Of plain letters a token is at least one: short captions need not be divided.
    """
    if caption.isascii() and len(caption) + 2 <= min(limit for _, limit in limits.values()):
        return {}
    found: dict[str, tuple[int, str]] = {}
    for name, (tokenizer, limit) in limits.items():
        beyond = len(tokenizer(caption).input_ids) - limit
        if beyond > 0:
            kept = tokenizer(caption, max_length=limit, truncation=True, return_offsets_mapping=True)["offset_mapping"]
            found[name] = beyond, caption[max((end for _, end in kept), default=0) :]
    return found
