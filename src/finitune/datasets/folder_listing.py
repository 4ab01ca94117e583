"""What lies in a folder, in the same order on every system, and what its names will do to other systems.

Order is that of the code points of the names in NFC, whatever the file system's own order and spelling. Hidden files
count as absent. Folders inside are not entered: they are subsets of their own, and where the wrong
level of a tree was given, the pictures lie one level further down, which is told.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from finitune.config.datasets import parse_numbered_folder
from finitune.datasets.picture_formats import PICTURE_FORMAT_BY_EXTENSION, UNSUPPORTED_PICTURE_EXTENSIONS
from finitune.errors import suggest_nearest_name
from finitune.report import Finding, Level, format_count, format_first_names, summarize_names

_MAX_NAME_BYTES = 240
_RESERVED_NAME_PATTERN = re.compile(r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?", re.IGNORECASE)
"""Names that Windows keeps for devices. Source: Microsoft, "Naming Files, Paths, and Namespaces"."""

_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini"})


@dataclass(frozen=True)
class FolderListing:
    """The visible files of a folder, sorted by name: pictures (by ending) and others; its visible folders."""

    folder: Path
    pictures: tuple[Path, ...] = ()
    others: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    findings: tuple[Finding, ...] = ()


def list_folder(folder: Path, option: str = "image_dir") -> FolderListing:
    """The files of a folder, with findings about their names; where there is none, an error that names the option."""
    if missing := describe_missing_folder(folder, option):
        return FolderListing(folder, findings=(missing,))
    visible = sorted(
        (path for path in folder.iterdir() if not is_hidden_name(path.name)),
        key=lambda path: compute_name_sort_key(path.name),
    )
    named = [path for path in visible if is_printable_name(path.name)]
    folders = tuple(path for path in named if is_listable_folder(path))
    inside = set(folders)
    files = [path for path in named if path not in inside]
    pictures = tuple(path for path in files if path.suffix.lower() in PICTURE_FORMAT_BY_EXTENSION)
    others = tuple(path for path in files if path.suffix.lower() not in PICTURE_FORMAT_BY_EXTENSION)
    unsayable = [ascii(path.name) for path in visible if not is_printable_name(path.name)]
    what = f"{format_count(len(unsayable), 'name')} in {folder} cannot be read as text, so the files are left out"
    findings = summarize_names(Level.ERROR, "NAME-NOT-TEXT", str(folder), what, unsayable, "Rename them.")
    return FolderListing(folder, pictures, others, folders, (*findings, *check_file_names(folder, pictures, others)))


def describe_missing_folder(folder: Path, option: str) -> Finding | None:
    """The error that there is no such folder, and what is there instead; None where there is one."""
    if is_listable_folder(folder):
        return None
    if folder.is_dir():
        message = f"{option} {folder} cannot be listed"
        return Finding(Level.ERROR, "DATASET-FOLDER-MISSING", str(folder), message, {}, "Check its permissions.")
    if folder.exists():
        remedy = f"Give the folder that it lies in: {option} = {str(folder.parent)!r}."
        return Finding(Level.ERROR, "DATASET-FOLDER-MISSING", str(folder), f"{option} {folder} is a file", {}, remedy)
    missing = folder.absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    beside = [path.name for path in missing.parent.iterdir() if is_listable_folder(path)]
    remedy = f"There is no {missing.name!r} in {missing.parent}.{suggest_nearest_name(missing.name, beside)}"
    evidence: dict[str, object] = {"nearest": str(missing.parent), "beside": sorted(beside)[:5]}
    message = f"{option} {folder} does not exist"
    return Finding(Level.ERROR, "DATASET-FOLDER-MISSING", str(folder), message, evidence, remedy)


def is_listable_folder(path: Path) -> bool:
    """Whether it is a folder that can be listed; a link that leads round to itself is none."""
    try:
        return path.is_dir() and os.access(path, os.R_OK)
    except OSError:
        return False


def count_pictures(folder: Path) -> int:
    """How many visible files directly in a folder are pictures by their endings."""
    return sum(
        path.suffix.lower() in PICTURE_FORMAT_BY_EXTENSION and not is_hidden_name(path.name)
        for path in folder.iterdir()
    )


def compute_name_sort_key(name: str) -> tuple[str, str]:
    """The key to sort names by, the same on every system."""
    return normalize("NFC", name), name


def is_hidden_name(name: str) -> bool:
    """Whether a file is none of the user's: dot files (macOS's ._ doubles with them) and those of file browsers."""
    return name.startswith(".") or name.lower() in _SYSTEM_FILES or name == "__MACOSX"


def is_printable_name(name: str) -> bool:
    """Whether a name is text that can be printed: bytes that are not UTF-8 come as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def build_folder_labels(folders: Iterable[Path]) -> dict[Path, str]:
    """A name for each folder: as few of its last parts as make it differ from all others, joined by slashes."""
    parts = {folder: folder.absolute().parts for folder in folders}
    apart = set(parts.values())
    labels: dict[Path, str] = {}
    for folder, own in parts.items():
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in apart) > 1:
            length += 1
        labels[folder] = normalize("NFC", "/".join(part.strip("/\\") for part in own[-length:]))
    return labels


def build_picture_names(pictures: Sequence[Path], labels: Mapping[Path, str]) -> dict[Path, str]:
    """What people are told for each picture: label/name in NFC, or as it is spelled where two would be the same."""
    plain = Counter((path.parent, normalize("NFC", path.name)) for path in pictures)
    return {
        path: f"{labels[path.parent]}/{path.name if plain[path.parent, name] > 1 else name}"
        for path in pictures
        for name in [normalize("NFC", path.name)]
    }


def group_equal_names(paths: Iterable[Path], key: Callable[[Path], object]) -> list[str]:
    """Groups of two or more files with an equal key, each as 'a.png = a.jpg'."""
    groups: dict[object, list[str]] = defaultdict(list)
    for path in paths:
        groups[key(path)].append(path.name)
    return [" = ".join(group) for group in groups.values() if len(group) > 1]


def check_file_names(folder: Path, pictures: Sequence[Path], others: Sequence[Path]) -> list[Finding]:
    """Warnings about names that are alike, or that some system does not take."""
    names = [path.name for path in pictures]
    stems = list({path.stem: path for path in pictures}.values())
    plain = [path for path in stems if path.stem == normalize("NFC", path.stem)]
    ending = [
        path.name for path in others if Path(path.name.rstrip(". ")).suffix.lower() in PICTURE_FORMAT_BY_EXTENSION
    ]
    unread = [path.name for path in others if path.suffix.lower() in UNSUPPORTED_PICTURE_EXTENSIONS]
    rules = (
        (
            "PICTURE-SAME-STEM",
            "pictures differ in their ending alone, so they share a caption",
            group_equal_names(pictures, lambda path: path.stem),
        ),
        (
            "NAME-TWINS",
            "names look the same (Unicode NFC and NFD)",
            group_equal_names(stems, lambda p: normalize("NFC", p.stem)),
        ),
        (
            "NAME-CASE",
            "names are one on Windows and macOS",
            group_equal_names(plain, lambda path: path.stem.casefold()),
        ),
        (
            "NAME-RESERVED",
            "names are reserved on Windows",
            [name for name in names if _RESERVED_NAME_PATTERN.fullmatch(name)],
        ),
        ("NAME-END", "names end with a dot or a blank, so they are no pictures", ending),
        (
            "NAME-STEM-END",
            "names have a dot or a blank before the ending",
            [p.name for p in stems if p.stem[-1:] in ". "],
        ),
        ("NAME-LONG", "names are longer than 240 bytes", [n for n in names if len(n.encode()) > _MAX_NAME_BYTES]),
        ("PICTURE-UNREAD", "pictures are of a kind that is not read here; save them as PNG or JPEG", unread),
    )
    told = [
        summarize_names(
            Level.WARNING, code, str(folder), f"{what} ({len(found)} in {folder})", found, "Rename or convert them."
        )
        for code, what, found in rules
    ]
    return [finding for some in told for finding in some]


def describe_empty_folder(listing: FolderListing) -> Finding:
    """The error that a subset's folder holds no pictures, with the level at which they lie."""
    inside = list_picture_folders(listing)
    subject = str(listing.folder)
    if not inside:
        endings = sorted({path.suffix.lower() or path.name for path in listing.others})
        remedy = f"Its files end with {format_first_names(endings)}." if endings else "Put pictures into it."
        return Finding(Level.ERROR, "DATASET-EMPTY", subject, f"{subject} holds no pictures", {}, remedy)
    names = [folder.name for folder in inside]
    evidence: dict[str, object] = {"count": len(names), "first": names[:5]}
    message = f"{subject} holds no pictures itself, but folders with pictures: {format_first_names(names)}"
    repeats = parse_numbered_folder(names[0])
    each = f"image_dir = {str(inside[0])!r}" + (f", num_repeats = {repeats[0]}" if repeats else "")
    remedy = f"Give each a subset of its own ({each})"
    remedy += f", or give the folder as train_data_dir = {subject!r}." if repeats else "."
    return Finding(Level.ERROR, "DATASET-EMPTY", subject, message, evidence, remedy)


def report_nested_folders(listing: FolderListing) -> list[Finding]:
    """The warning that pictures in folders inside a subset's folder are not used."""
    names = [folder.name for folder in list_picture_folders(listing)]
    what = f"folders with pictures inside {listing.folder} are not entered ({len(names)})"
    remedy = "Give each a subset of its own."
    return summarize_names(Level.WARNING, "DATASET-FOLDER-IGNORED", str(listing.folder), what, names, remedy)


def list_picture_folders(listing: FolderListing) -> list[Path]:
    return [folder for folder in listing.folders if count_pictures(folder)]
