"""From the folders of a configuration to Examples, with everything that is wrong with them found at once.

A file that cannot be read becomes a finding and is left out; nothing here raises for the state of a data set. Only
headers are read by `scan`; `verify_pictures` decodes every picture, which alone finds one that is cut off.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image

from finitune.config.datasets import ResolvedDataset, ResolvedSubset
from finitune.datasets.caption_files import CaptionText, read_caption
from finitune.datasets.folder_listing import (
    FolderListing,
    build_folder_labels,
    build_picture_names,
    describe_empty_folder,
    list_folder,
    report_nested_folders,
)
from finitune.datasets.items import TrainingExample, derive_seed
from finitune.datasets.picture_files import TURNED_NOTE, PictureHeader, read_picture_header, read_pillow_picture
from finitune.datasets.pixels import PictureNote
from finitune.datasets.sidecars import find_caption_files, find_mask_files, match_metadata_pictures
from finitune.errors import FileError, FinituneError
from finitune.progress import Progress
from finitune.report import Finding, Level, Table, format_count, limit_findings, summarize_names

_T = TypeVar("_T")

DecodedImageCallback = Callable[[Path, Image, tuple[PictureNote, ...]], None]

_MAX_MASK_ASPECT_ERROR = 0.02
MAX_DECODER_THREADS = 4


@dataclass(frozen=True)
class DatasetScan:
    """The examples of each data set, in the order of its subsets and then of names; and all that was found.

    `captions` are the files that captions were read from, by picture.
    """

    examples: tuple[tuple[TrainingExample, ...], ...] = ()
    findings: tuple[Finding, ...] = ()
    captions: Mapping[Path, Path] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, object]:
        """Pictures, appearances in an epoch, captions, masks, the range of sizes; over all data sets."""
        every = [example for examples in self.examples for example in examples]
        by_area = sorted((example.size for example in every), key=lambda size: size[0] * size[1])
        return {
            "pictures": len(every),
            "appearances": sum(example.repeats for example in every),
            "captions": sum(bool(example.caption) for example in every),
            "masks": sum(example.mask is not None for example in every),
            "smallest": "x".join(map(str, by_area[0])) if by_area else "",
            "largest": "x".join(map(str, by_area[-1])) if by_area else "",
        }


@dataclass(frozen=True)
class SubsetFiles:
    """What the files of a subset are: pictures by name, the file or the text of captions, masks."""

    subset: ResolvedSubset
    pictures: tuple[Path, ...] = ()
    captions: Mapping[Path, Path | str] = field(default_factory=dict)
    masks: Mapping[Path, Path] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass
class DatasetFileReader:
    """Reads each header and each caption once, however many subsets use it."""

    headers: dict[Path, PictureHeader | FileError] = field(default_factory=dict)
    texts: dict[Path, CaptionText | FileError] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def header(self, path: Path) -> PictureHeader | None:
        """What a picture's header says, None where it cannot be read."""
        return self.read_once(self.headers, read_picture_header, path)

    def caption(self, path: Path) -> str:
        """The text of a caption file, "" where it cannot be read."""
        text = self.read_once(self.texts, read_caption, path)
        self.findings += text.findings if text else ()
        return text.text if text else ""

    def read_once(self, known: dict[Path, _T | FileError], read: Callable[[Path], _T], path: Path) -> _T | None:
        if path not in known:
            try:
                known[path] = read(path)
            except FileError as error:
                known[path] = error
        found = known[path]
        if isinstance(found, FileError):
            self.findings.append(Finding.of(found))
            return None
        return found


def scan_datasets(datasets: Sequence[ResolvedDataset], progress: Progress) -> DatasetScan:
    """The examples of all data sets: files matched, headers and captions read, repeats of regularisation settled."""
    contents = [[list_subset_files(subset) for subset in dataset.subsets] for dataset in datasets]
    every = [content for dataset in contents for content in dataset]
    labels = build_folder_labels(sorted({path.parent for content in every for path in content.pictures}))
    reader = DatasetFileReader(findings=[finding for content in every for finding in content.findings])
    lacking = [f"data set {number} has no subset" for number, dataset in enumerate(contents, start=1) if not dataset]
    for message in lacking if contents else ["there is no data set"]:
        reader.findings.append(make_empty_finding(message, "Give it a folder: [[datasets.subsets]] with image_dir."))
    progress.start("pictures", sum(len(content.pictures) for content in every))
    examples: list[tuple[TrainingExample, ...]] = []
    for number, dataset in enumerate(contents, start=1):
        found = [example for content in dataset for example in build_examples(content, reader, labels, progress)]
        matched, about_repeats = balance_regularisation(found, f"data set {number}")
        examples.append(tuple(matched))
        reader.findings += [*about_repeats, *find_repeated_folders(dataset), *find_identical_pictures(found)]
    progress.finish("pictures")
    captions = {path: file for content in every for path, file in content.captions.items() if isinstance(file, Path)}
    return DatasetScan(tuple(examples), tuple(limit_findings(reader.findings)), captions)


def list_subset_files(subset: ResolvedSubset) -> SubsetFiles:
    """What lies in the folders of a subset, by names alone."""
    listing = FolderListing(Path())
    if subset.image_dir is not None:
        listing = list_folder(subset.image_dir)
    elif subset.metadata_file is None:
        finding = Finding(
            Level.ERROR, "SUBSET-WITHOUT-FOLDER", "image_dir", "a subset names no folder", {}, "Give it an image_dir."
        )
        return SubsetFiles(subset, findings=(finding,))
    findings = [*listing.findings]
    if any(finding.code == "DATASET-FOLDER-MISSING" for finding in findings):
        return SubsetFiles(subset, findings=tuple(findings))
    captions: Mapping[Path, Path | str]
    if subset.metadata_file is not None:
        try:
            named = match_metadata_pictures(subset, listing.pictures)
        except FileError as error:
            return SubsetFiles(subset, findings=(*findings, Finding.of(error)))
        captions, pictures = named.captions, tuple(named.captions)
        findings += named.findings
        if not pictures:
            findings.append(
                make_empty_finding(f"{subset.metadata_file} names no picture that is there", "Check its keys.")
            )
    else:
        matched = find_caption_files(subset, listing)
        captions, pictures = matched.files, listing.pictures
        findings += (
            [*matched.findings, *report_nested_folders(listing)] if pictures else [describe_empty_folder(listing)]
        )
    masks: Mapping[Path, Path] = {}
    if subset.conditioning_data_dir is not None and pictures:
        found = find_mask_files(subset.conditioning_data_dir, pictures)
        masks, findings = found.files, [*findings, *found.findings]
    return SubsetFiles(subset, pictures, captions, masks, tuple(findings))


def build_examples(
    content: SubsetFiles, reader: DatasetFileReader, labels: Mapping[Path, str], progress: Progress
) -> list[TrainingExample]:
    """The examples of a subset, without pictures whose headers cannot be read; what is wrong goes to the reader."""
    names = build_picture_names(content.pictures, labels)
    examples: list[TrainingExample] = []
    turned: list[str] = []
    for path in content.pictures:
        progress.advance("pictures")
        caption = content.captions.get(path, content.subset.class_tokens or "")
        text = reader.caption(caption) if isinstance(caption, Path) else caption
        mask = content.masks.get(path)
        seen = None if mask is None else reader.header(mask)
        if (found := reader.header(path)) is None:
            continue
        if found.orientation != 1:
            turned.append(names[path])
        repeats = content.subset.num_repeats
        example = TrainingExample(path, names[path], found.size, text, content.subset, repeats, mask if seen else None)
        examples.append(example)
        if seen is not None:
            reader.findings += check_mask_shape(example, seen)
    what = f"pictures are turned, as their EXIF says ({len(turned)})"
    reader.findings += summarize_names(Level.NOTE, "PICTURE-TURNED", str(content.subset.image_dir or ""), what, turned)
    return examples


def balance_regularisation(
    examples: Sequence[TrainingExample], subject: str
) -> tuple[list[TrainingExample], list[Finding]]:
    """The examples with the repeats of regularisation pictures matched to the appearances of the others.

    Source: sd-scripts library/train_util.py, DreamBoothDataset.
    """
    regular = [example for example in examples if example.subset.is_reg]
    if not regular:
        return list(examples), []
    wanted = sum(example.repeats for example in examples if not example.subset.is_reg)
    if not wanted:
        return [], [
            make_empty_finding(f"{subject} holds regularisation pictures only", "Give it a subset without is_reg.")
        ]
    repeats = iter(compute_matched_repeats(wanted, [example.repeats for example in regular]))
    matched = [replace(one, repeats=next(repeats)) if one.subset.is_reg else one for one in examples]
    unused = [example.name for example in matched if not example.repeats]
    what = f"regularisation pictures of {subject} are not used ({len(unused)}): the others appear {wanted} times"
    findings = summarize_names(
        Level.WARNING, "REGULARISATION-UNUSED", subject, what, unused, "Raise the others' num_repeats."
    )
    shown = len(regular) - len(unused)
    count = sum(example.repeats for example in matched if example.subset.is_reg)
    message = (
        f"{format_count(shown, 'regularisation picture')} of {subject} appear {count} times, the others {wanted} times"
    )
    evidence: dict[str, object] = {"pictures": shown, "appearances": count, "others": wanted}
    findings.append(Finding(Level.NOTE, "REGULARISATION-REPEATS", subject, message, evidence))
    return [example for example in matched if example.repeats], findings


def compute_matched_repeats(wanted: int, repeats: Sequence[int]) -> list[int]:
    """Repeats whose sum reaches `wanted`: whole pictures at first, in order; then one more each, round and round."""
    before = [0, *accumulate(repeats)]
    matched = [own if reached < wanted else 0 for own, reached in zip(repeats, before, strict=False)]
    rounds, rest = divmod(max(0, wanted - before[-1]), len(repeats))
    return [own + rounds + (place < rest) for place, own in enumerate(matched)]


def verify_pictures(
    examples: Iterable[TrainingExample],
    progress: Progress,
    workers: int | None = None,
    look: DecodedImageCallback | None = None,
) -> list[Finding]:
    """Findings of decoding every picture and mask completely: an error for each bad file, notes by kind and number.

    `look` is shown each decoded picture with its notes, from any of the threads.
    """
    jobs = {(one.path, one.subset.background): one.name for one in examples}
    jobs |= {(one.mask, "white"): f"mask of {one.name}" for one in examples if one.mask is not None}
    progress.start("decoding", len(jobs))

    def decode(job: tuple[Path, str]) -> tuple[PictureNote, ...] | FinituneError:
        try:
            picture, notes = read_pillow_picture(*job)
            if look is not None:
                look(job[0], picture, notes)
            return notes
        except FinituneError as error:
            return error
        finally:
            progress.advance("decoding")

    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, MAX_DECODER_THREADS)) as pool:
        results = list(pool.map(decode, jobs))
    progress.finish("decoding")
    errors = [Finding.of(result) for result in results if isinstance(result, FinituneError)]
    noted: dict[str, list[str]] = defaultdict(list)
    for name, result in zip(jobs.values(), results, strict=True):
        for note in () if isinstance(result, FinituneError) else result:
            noted[note.what].append(f"{name} ({note.detail})" if note.detail else name)
    notes = [
        finding
        for kind, names in noted.items()
        if kind != TURNED_NOTE  # the scan has told it
        for finding in summarize_names(Level.NOTE, "PICTURE-NOTE", kind, f"{kind} ({len(names)})", names)
    ]
    return [*limit_findings(errors), *notes]  # a note is about all pictures of its kind already


def split_validation(
    examples: Sequence[TrainingExample], rate: float, seed: int
) -> tuple[tuple[TrainingExample, ...], tuple[TrainingExample, ...]]:
    """(train, held out): the share `rate` in 0 .. 1 of those that are not for regularisation, at least one of two.

    The choice hangs on the seed and the names alone: the same picture is held out at every resolution.
    """
    free = [example for example in examples if not example.subset.is_reg]
    count = min(max(1, round(rate * len(free))), len(free) - 1) if rate > 0 and len(free) > 1 else 0
    drawn = sorted(free, key=lambda example: derive_seed(seed, "validation", example.name))[:count]
    held = {id(example) for example in drawn}
    return (
        tuple(example for example in examples if id(example) not in held),
        tuple(example for example in examples if id(example) in held),
    )


def split_held_out(
    found: DatasetScan, datasets: Sequence[ResolvedDataset], seed: int
) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """(train, held out) of all data sets of a scan, each with its own share, and its own seed where it names one."""
    learned: list[TrainingExample] = []
    held: list[TrainingExample] = []
    for options, examples in zip(datasets, found.examples, strict=True):
        own = seed if options.validation_seed is None else options.validation_seed
        kept, out = split_validation(examples, options.validation_split, own)
        learned += kept
        held += out
    return learned, held


def build_dataset_summary(found: DatasetScan) -> Table:
    """A row for each folder of each data set: pictures, repeats, appearances, captions, masks and sizes."""
    rows: list[tuple[str, ...]] = []
    for number, examples in enumerate(found.examples, start=1):
        folders: dict[tuple[str, bool], list[TrainingExample]] = defaultdict(list)
        for example in examples:
            folders[example.name.rpartition("/")[0], example.subset.is_reg].append(example)
        for (folder, regular), inside in folders.items():
            figures = DatasetScan((tuple(inside),)).figures
            repeats = sorted({example.repeats for example in inside})
            rows.append(
                (
                    str(number),
                    f"{folder} (regularisation)" if regular else folder,
                    str(len(inside)),
                    format_range(*map(str, (repeats[0], repeats[-1]))),
                    str(figures["appearances"]),
                    str(figures["captions"]),
                    str(figures["masks"]),
                    format_range(str(figures["smallest"]), str(figures["largest"])),
                )
            )
    columns = ("data set", "folder", "pictures", "repeats", "appearances", "captions", "masks", "sizes")
    return Table("pictures", columns, tuple(rows))


def format_range(low: str, high: str) -> str:
    return low if low == high else f"{low} .. {high}"


def make_empty_finding(message: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, "DATASET-EMPTY", "datasets", message, {}, remedy)


def check_mask_shape(example: TrainingExample, mask: PictureHeader) -> list[Finding]:
    """The error that a mask has another shape than its picture, as seen."""
    (width, height), (mask_width, mask_height) = example.size, mask.size
    off = abs(mask_width * height / (mask_height * width) - 1)
    if off <= _MAX_MASK_ASPECT_ERROR:
        return []
    message = f"the mask of {example.name} is {mask_width} x {mask_height}, of another shape than {width} x {height}"
    sideways = abs(mask_height * height / (mask_width * width) - 1) <= _MAX_MASK_ASPECT_ERROR
    remedy = (
        "Turn it: the picture is turned by its EXIF." if sideways else "Make it as wide and as high as the picture."
    )
    evidence: dict[str, object] = {"picture": example.size, "mask": mask.size, "off": off}
    return [Finding(Level.ERROR, "MASK-SHAPE", str(example.mask), message, evidence, remedy)]


def find_repeated_folders(contents: Sequence[SubsetFiles]) -> list[Finding]:
    """The warning that a folder stands in one data set twice."""
    folders = [c.subset.image_dir.resolve() for c in contents if c.subset.image_dir and not c.subset.metadata_file]
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    what = "folders stand in one data set more than once"
    return summarize_names(
        Level.WARNING, "DATASET-FOLDER-TWICE", "image_dir", what, twice, "Raise num_repeats instead."
    )


def find_identical_pictures(examples: Sequence[TrainingExample]) -> list[Finding]:
    """The warning that files of other names have the same bytes."""
    names = {example.path: example.name for example in examples}
    by_size: dict[int, list[Path]] = defaultdict(list)
    for path in names:
        by_size[path.stat().st_size].append(path)
    by_content: dict[bytes, list[Path]] = defaultdict(list)
    for path in (path for group in by_size.values() if len(group) > 1 for path in group):
        by_content[blake2b(path.read_bytes()).digest()].append(path)
    pairs = [" = ".join(names[path] for path in group) for group in by_content.values() if len(group) > 1]
    what = f"pictures are the same file under several names ({len(pairs)})"
    return summarize_names(
        Level.WARNING, "PICTURE-IDENTICAL", "datasets", what, pairs, "Keep one, and raise num_repeats."
    )
