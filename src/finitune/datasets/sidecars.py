"""Which caption and which mask belong to each picture: by the same stem beside it, or by a JSON file of captions.

A stem is all of a name before its last dot, and is matched exactly; where only its Unicode form differs, as between
macOS and others, it matches, too. Endings match in any case. The JSON is sd-scripts' metadata of "fine-tuning"
subsets, {picture: {"caption": ..., "tags": ...}}: it names a picture by its path (from here, from image_dir, or from
the file), its name, or its stem, and only pictures that are named are used.
Source: sd-scripts library/train_util.py, FineTuningDataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from finitune.config.datasets import ResolvedSubset
from finitune.datasets.folder_listing import FolderListing, compute_name_sort_key, list_folder
from finitune.datasets.picture_formats import PICTURE_FORMAT_BY_EXTENSION
from finitune.errors import FileError
from finitune.files.sniff import read_utf8_text
from finitune.report import Finding, Level, format_first_names, summarize_names

DEFAULT_CAPTION_EXTENSIONS = (".txt", ".caption")
"""Where a subset names none; the first that is there counts. kohya's default is .caption alone."""

NON_CAPTION_EXTENSIONS = frozenset({".npz", ".safetensors", ".pt", ".zip", ".db"})


@dataclass(frozen=True)
class SidecarFiles:
    """The file beside each picture that has one, and what is missing or left over."""

    files: Mapping[Path, Path]
    findings: tuple[Finding, ...] = ()


def find_caption_files(subset: ResolvedSubset, listing: FolderListing) -> SidecarFiles:
    """The caption file of each picture of a folder."""
    own = subset.caption_extension
    extensions = (own if own.startswith(".") else f".{own}",) if own else DEFAULT_CAPTION_EXTENSIONS
    by_extension = [index_by_stem(listing.others, extension) for extension in extensions]
    files: dict[Path, Path] = {}
    for found in reversed(by_extension):
        files |= match_stems(listing.pictures, found)
    folder = listing.folder
    both = [path.name for path in files if sum(path.stem in stems for stems in by_extension) > 1]
    stems = {normalize("NFC", picture.stem) for picture in listing.pictures}
    strays = {
        file.name: None for found in by_extension for stem, file in found.items() if normalize("NFC", stem) not in stems
    }
    missing = [path.name for path in listing.pictures if path not in files]
    twice = summarize_names(
        Level.WARNING,
        "CAPTION-TWICE",
        str(folder),
        f"pictures in {folder} have both a {' and a '.join(extensions)} file; the first is used ({len(both)})",
        both,
        "Say which with caption_extension.",
    )
    left_over = summarize_names(
        Level.WARNING,
        "CAPTION-WITHOUT-PICTURE",
        str(folder),
        f"captions in {folder} are of no picture ({len(strays)})",
        [*strays],
        "A caption is named as its picture, up to the ending.",
    )
    return SidecarFiles(files, (*twice, *left_over, *report_missing_captions(subset, listing, missing, extensions)))


def find_mask_files(folder: Path, pictures: Sequence[Path]) -> SidecarFiles:
    """The mask of each picture, out of a conditioning_data_dir."""
    masks = list_folder(folder, "conditioning_data_dir")
    if any(finding.level is Level.ERROR for finding in masks.findings):
        return SidecarFiles({}, masks.findings)
    files = match_stems(pictures, add_nfc_stems({path.stem: path for path in reversed(masks.pictures)}))
    missing = [path.name for path in pictures if path not in files]
    stems = {normalize("NFC", path.stem) for path in pictures}
    extra = [path.name for path in masks.pictures if normalize("NFC", path.stem) not in stems]
    level = Level.WARNING if files else Level.ERROR
    what = f"pictures without a mask in {folder} count with all of their area ({len(missing)})"
    remedy = "A mask is named as its picture, with any picture's ending."
    findings = summarize_names(level, "MASK-MISSING", str(folder), what, missing, remedy)
    what = f"masks in {folder} are of no picture ({len(extra)})"
    findings += summarize_names(Level.WARNING, "MASK-WITHOUT-PICTURE", str(folder), what, extra, remedy)
    return SidecarFiles(files, tuple(findings))


def index_by_stem(files: Iterable[Path], extension: str) -> dict[str, Path]:
    """The files with an ending, by what stands before it: as it is spelled, and in NFC."""
    stems: dict[str, Path] = {}
    for file in files:
        if file.name.lower().endswith(extension.lower()):
            stems.setdefault(file.name[: -len(extension)], file)
    return add_nfc_stems(stems)


def add_nfc_stems(stems: Mapping[str, Path]) -> dict[str, Path]:
    """The same files, by their stems in NFC, too."""
    return {normalize("NFC", stem): file for stem, file in stems.items()} | dict(stems)


def match_stems(pictures: Iterable[Path], stems: Mapping[str, Path]) -> dict[Path, Path]:
    """The file of the same stem for each picture that has one; of the same stem in NFC, where it has none."""
    found = {path: stems.get(path.stem) or stems.get(normalize("NFC", path.stem)) for path in pictures}
    return {picture: file for picture, file in found.items() if file is not None}


def report_missing_captions(
    subset: ResolvedSubset, listing: FolderListing, missing: Sequence[str], extensions: Sequence[str]
) -> list[Finding]:
    """What is told of pictures without a caption: nothing is odd where class tokens stand for all captions."""
    stand_in = f"{subset.class_tokens!r}" if subset.class_tokens else "no text"
    what = f"pictures in {listing.folder} have no caption and get {stand_in} ({len(missing)})"
    everything = len(missing) == len(listing.pictures)
    other = find_other_extension(listing) if everything else None
    level = Level.NOTE if everything and subset.class_tokens and other is None else Level.WARNING
    looked = format_first_names(extensions)
    if other is not None:
        remedy = f"Looked for {looked}, but there are files that end with {other}: set caption_extension = {other!r}."
    else:
        remedy = f"Write captions into files that end with {looked}." if level is Level.WARNING else ""
    return summarize_names(level, "CAPTION-MISSING", str(listing.folder), what, missing, remedy)


def find_other_extension(listing: FolderListing) -> str | None:
    """The commonest ending of files that are named as pictures are, beside those that hold no text."""
    stems = {path.stem for path in listing.pictures}
    endings: dict[str, int] = {}
    for file in listing.others:
        cuts = [place for place, letter in enumerate(file.name) if letter == "." and file.name[:place] in stems]
        if cuts and file.suffix.lower() not in NON_CAPTION_EXTENSIONS:
            ending = file.name[cuts[0] :]
            endings[ending] = endings.get(ending, 0) + 1
    return max(endings, key=lambda ending: endings[ending], default=None)


@dataclass(frozen=True)
class MetadataCaptions:
    """The pictures that a metadata file names, sorted by name, with their captions."""

    captions: Mapping[Path, str]
    findings: tuple[Finding, ...] = ()


def read_caption_metadata(path: Path, separator: str = ",") -> dict[str, str]:
    """The caption of each key: "caption" and "tags", joined by the separator where both are there.

    Raises FileError: METADATA-JSON, METADATA-ENTRY, and those of reading a text.
    """
    text = read_utf8_text(path)
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FileError(
            f"{path} is not JSON: {error.msg} in {where}",
            code="METADATA-JSON",
            subject=str(path),
            evidence={"line": error.lineno, "column": error.colno},
            remedy="Mend it there.",
        ) from error
    if not isinstance(entries, dict):
        raise make_metadata_error(path, f"is a {type(entries).__name__}, not an object of pictures", "")
    return {key: parse_metadata_caption(path, key, entry, separator) for key, entry in entries.items()}


def match_metadata_pictures(subset: ResolvedSubset, listed: Sequence[Path]) -> MetadataCaptions:
    """The pictures and captions of a subset that has a metadata file; `listed` are those in its image_dir, if any."""
    assert subset.metadata_file is not None
    file = subset.metadata_file
    entries = read_caption_metadata(file, subset.caption_separator)
    bases = [base for base in (Path(), subset.image_dir, file.parent) if base is not None]
    by_name = {path.stem: path for path in reversed(listed)} | {path.name: path for path in listed}
    by_place = {path.resolve(): path for path in listed}
    captions: dict[Path, str] = {}
    lost, twice = [], []
    for key, caption in entries.items():
        picture = find_named_picture(key, bases) or by_name.get(key.replace("\\", "/").rpartition("/")[2])
        picture = picture and by_place.get(picture.resolve(), picture)
        if picture is None:
            lost.append(key)
        elif picture in captions:
            twice.append(key)
        else:
            captions[picture] = caption
    unnamed = [path.name for path in listed if path not in captions]
    empty = [path.name for path, caption in captions.items() if not caption]
    told = (
        ("CAPTION-EMPTY", f"pictures in {file} have neither caption nor tags", empty),
        ("METADATA-WITHOUT-PICTURE", f"{file} names pictures that are not there", lost),
        ("METADATA-TWICE", f"{file} names pictures twice; the first counts", twice),
        ("METADATA-LEFT-OUT", f"pictures not in {file} are left out", unnamed),
    )
    findings = [
        one for code, what, names in told for one in summarize_names(Level.WARNING, code, str(file), what, names)
    ]
    ordered = sorted(captions, key=lambda path: compute_name_sort_key(path.name))
    return MetadataCaptions({path: captions[path] for path in ordered}, tuple(findings))


def find_named_picture(key: str, bases: Sequence[Path]) -> Path | None:
    """The picture at the path that a key is, below one of the bases; a path of another machine leads nowhere."""
    if Path(key).suffix.lower() not in PICTURE_FORMAT_BY_EXTENSION:
        return None
    try:
        return next((base / key for base in bases if (base / key).is_file()), None)
    except (OSError, ValueError):  # longer than a path may be, or with a zero in it
        return None


def parse_metadata_caption(path: Path, key: str, entry: object, separator: str) -> str:
    if not isinstance(entry, dict):
        raise make_metadata_error(path, f"gives {key!r} a {type(entry).__name__}, not an object", key)
    texts = []
    for name in ("caption", "tags"):
        value = entry.get(name)
        if isinstance(value, list) and all(isinstance(tag, str) for tag in value):
            value = f"{separator} ".join(value)
        if value is not None and not isinstance(value, str):
            raise make_metadata_error(path, f"gives {key!r} a {name} that is no text but {value!r:.40}", key)
        texts += [value.strip()] if value else []
    return f"{separator} ".join(texts)


def make_metadata_error(path: Path, what: str, key: str) -> FileError:
    return FileError(
        f"{path} {what}",
        code="METADATA-ENTRY",
        subject=str(path),
        evidence={"key": key} if key else {},
        remedy='It should read {"picture.png": {"caption": "..."}, ...}.',
    )
