"""What lies beside a picture under the same stem: its caption and its mask.

A stem is all of a name before its last dot, and is matched exactly; where only its Unicode form differs, as between
macOS and others, it matches, too. Endings match in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from finitune.config.datasets import ResolvedSubset
from finitune.datasets.finding_summaries import format_first_names, summarize_names
from finitune.datasets.folder_listing import FolderListing, list_folder
from finitune.report import Finding, Level

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
    by_extension = [_by_stem(listing.others, extension) for extension in extensions]
    files: dict[Path, Path] = {}
    for found in reversed(by_extension):
        files |= _same_stem(listing.pictures, found)
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
    return SidecarFiles(
        files, (*twice, *_left_over(folder, [*strays]), *_without(subset, listing, missing, extensions))
    )


def find_mask_files(folder: Path, pictures: Sequence[Path]) -> SidecarFiles:
    """The mask of each picture, out of a conditioning_data_dir."""
    masks = list_folder(folder, "conditioning_data_dir")
    if any(finding.level is Level.ERROR for finding in masks.findings):
        return SidecarFiles({}, masks.findings)
    files = _same_stem(pictures, _spelled({path.stem: path for path in reversed(masks.pictures)}))
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


def _by_stem(files: Iterable[Path], extension: str) -> dict[str, Path]:
    """The files with an ending, by what stands before it: as it is spelled, and in NFC."""
    stems: dict[str, Path] = {}
    for file in files:
        if file.name.lower().endswith(extension.lower()):
            stems.setdefault(file.name[: -len(extension)], file)
    return _spelled(stems)


def _spelled(stems: Mapping[str, Path]) -> dict[str, Path]:
    """The same files, by their stems in NFC, too."""
    return {normalize("NFC", stem): file for stem, file in stems.items()} | dict(stems)


def _same_stem(pictures: Iterable[Path], stems: Mapping[str, Path]) -> dict[Path, Path]:
    """The file of the same stem for each picture that has one; of the same stem in NFC, where it has none."""
    found = {path: stems.get(path.stem) or stems.get(normalize("NFC", path.stem)) for path in pictures}
    return {picture: file for picture, file in found.items() if file is not None}


def _left_over(folder: Path, strays: Sequence[str]) -> list[Finding]:
    what = f"captions in {folder} are of no picture ({len(strays)})"
    remedy = "A caption is named as its picture, up to the ending."
    return summarize_names(Level.WARNING, "CAPTION-WITHOUT-PICTURE", str(folder), what, strays, remedy)


def _without(
    subset: ResolvedSubset, listing: FolderListing, missing: Sequence[str], extensions: Sequence[str]
) -> list[Finding]:
    """What is told of pictures without a caption: nothing is odd where class tokens stand for all captions."""
    stand_in = f"{subset.class_tokens!r}" if subset.class_tokens else "no text"
    what = f"pictures in {listing.folder} have no caption and get {stand_in} ({len(missing)})"
    everything = len(missing) == len(listing.pictures)
    other = _other_ending(listing) if everything else None
    level = Level.NOTE if everything and subset.class_tokens and other is None else Level.WARNING
    looked = format_first_names(extensions)
    if other is not None:
        remedy = f"Looked for {looked}, but there are files that end with {other}: set caption_extension = {other!r}."
    else:
        remedy = f"Write captions into files that end with {looked}." if level is Level.WARNING else ""
    return summarize_names(level, "CAPTION-MISSING", str(listing.folder), what, missing, remedy)


def _other_ending(listing: FolderListing) -> str | None:
    """The commonest ending of files that are named as pictures are, beside those that hold no text."""
    stems = {path.stem for path in listing.pictures}
    endings: dict[str, int] = {}
    for file in listing.others:
        cuts = [place for place, letter in enumerate(file.name) if letter == "." and file.name[:place] in stems]
        if cuts and file.suffix.lower() not in NON_CAPTION_EXTENSIONS:
            ending = file.name[cuts[0] :]
            endings[ending] = endings.get(ending, 0) + 1
    return max(endings, key=lambda ending: endings[ending], default=None)
