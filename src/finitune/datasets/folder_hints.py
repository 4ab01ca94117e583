"""How to tell that the wrong level of a tree of folders was given: the pictures lie one level further down.

kohya's own tree, <train_data_dir>/<N>_<name>/, is read where configurations are (config/kohya_folders.py).
"""

from __future__ import annotations

from pathlib import Path

from finitune.config.datasets import parse_numbered_folder
from finitune.datasets.finding_summaries import format_first_names, summarize_names
from finitune.datasets.folder_listing import FolderListing, count_pictures
from finitune.report import Finding, Level


def describe_empty_folder(listing: FolderListing) -> Finding:
    """The error that a subset's folder holds no pictures, with the level at which they lie."""
    inside = _with_pictures(listing)
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
    names = [folder.name for folder in _with_pictures(listing)]
    what = f"folders with pictures inside {listing.folder} are not entered ({len(names)})"
    remedy = "Give each a subset of its own."
    return summarize_names(Level.WARNING, "DATASET-FOLDER-IGNORED", str(listing.folder), what, names, remedy)


def _with_pictures(listing: FolderListing) -> list[Path]:
    return [folder for folder in listing.folders if count_pictures(folder)]
