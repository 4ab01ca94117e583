"""kohya's folders: train_data_dir holds one folder `N_name` for each subset; N is how often its pictures are shown.

The level counts: the folder that is named holds no pictures itself. Facts: sd-scripts, library/config_util.py
(generate_dreambooth_subsets_config_by_subdirs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finitune.config.datasets import parse_numbered_folder
from finitune.report import Finding, Level

_PICTURE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jxl"}
_SUSPICIOUS_REPEATS = 1000
"""Repeats from here on look like a year or a number in a name."""


def scan_kohya_folder(
    folder: Path, options: Mapping[str, Any], *, is_reg: bool = False
) -> tuple[dict[str, Any], list[Finding]]:
    """The document part ({"datasets": [...]}) for a folder of `N_name` folders, and what is wrong with it.

    `options` are those of the dataset. A folder that is one of the N_name folders itself is an error that tells the
    folder meant; so are a missing folder and one without any N_name folder.
    """
    key = "reg_data_dir" if is_reg else "train_data_dir"
    findings: list[Finding] = []
    inside = list_kohya_folder(folder, key, findings)
    subsets = [
        subset for entry in inside if entry.is_dir() for subset in read_numbered_subset(entry, folder, is_reg, findings)
    ]
    if not subsets and not any(finding.level is Level.ERROR for finding in findings):
        subsets = diagnose_folder_level(folder, inside, key, is_reg, findings)
    datasets = [{**options, "subsets": subsets}] if subsets else []
    return {"datasets": datasets}, findings


def list_kohya_folder(folder: Path, key: str, findings: list[Finding]) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = "does not exist" if missing else f"cannot be read: {error.strerror}"
        remedy = f"Correct the path; a relative one counts from {Path.cwd()}." if missing else "Give a readable folder."
        findings.append(
            Finding(Level.ERROR, "DATASET-FOLDER-MISSING", f"{key}: {folder}", f"{folder} {what}", {}, remedy)
        )
        return []


def read_numbered_subset(entry: Path, folder: Path, is_reg: bool, findings: list[Finding]) -> Iterator[dict[str, Any]]:
    """The subset of one folder, or none with the reason as a finding."""

    def warn(code: str, message: str, remedy: str, level: Level = Level.WARNING) -> None:
        findings.append(Finding(level, code, str(entry), message, {}, remedy))

    named = parse_numbered_folder(entry.name)
    if named is None:
        warn(
            "DATASET-FOLDER-IGNORED",
            f"{entry.name!r} does not begin with a number: its pictures are not used",
            f"Name it '10_{entry.name}' to show each of its pictures 10 times in an epoch.",
        )
        return
    repeats, name = named
    if repeats < 1:
        warn(
            "DATASET-FOLDER-IGNORED",
            f"{entry.name!r} says {repeats} repeats: its pictures are not used",
            f"Name it '1_{name}' to show each picture once in an epoch, or move it away.",
        )
        return
    if entry.is_symlink() and folder.resolve().is_relative_to(entry.resolve()):
        warn("DATASET-FOLDER-LOOP", f"{entry.name!r} is a link to a folder around it", "Remove the link.")
        return
    if repeats >= _SUSPICIOUS_REPEATS:
        warn("DATASET-FOLDER-REPEATS", f"{entry.name!r} shows each picture {repeats} times", "Is the number a year?")
    if not name:
        warn(
            "DATASET-FOLDER-NAMELESS",
            f"{entry.name!r} has no name: pictures without a caption file get an empty caption",
            f"Name it '{repeats}_' and what the pictures show.",
        )
    nested = [
        inner.name for inner in list_readable_entries(entry) if inner.is_dir() and parse_numbered_folder(inner.name)
    ]
    if nested:
        warn(
            "DATASET-FOLDER-NESTED",
            f"{', '.join(map(repr, nested))} inside of {entry.name!r}: only the first level counts",
            f"Move it to {folder}.",
        )
    if not any(is_picture(inner) for inner in list_readable_entries(entry)):
        warn("DATASET-FOLDER-EMPTY", f"{entry.name!r} holds no pictures", "Put pictures into it, or move it away.")
        if nested:
            return
    yield build_subset_options(entry, repeats, name, is_reg)


def build_subset_options(entry: Path, repeats: int, name: str, is_reg: bool) -> dict[str, Any]:
    subset: dict[str, Any] = {"image_dir": str(entry), "num_repeats": repeats}
    if name:
        subset["class_tokens"] = name
    return subset | ({"is_reg": True} if is_reg else {})


def diagnose_folder_level(
    folder: Path, inside: list[Path], key: str, is_reg: bool, findings: list[Finding]
) -> list[dict[str, Any]]:
    """A folder without N_name folders: it is one itself, or a plain one; an error either way."""
    named = parse_numbered_folder(folder.resolve().name)
    pictures = sum(is_picture(entry) for entry in inside)
    if named and named[0] > 0 and "_" in folder.resolve().name:
        parent = folder.parent if folder.name == folder.resolve().name else folder.resolve().parent
        message = f"{folder} is one of the N_name folders itself; {key} is the folder around them"
        remedy = f"Give {key} = '{parent}'."
        subsets = [build_subset_options(folder, *named, is_reg)]
    else:
        message = f"{folder} holds no folder whose name begins with a number" + (
            f", but {pictures} picture{'s' * (pictures != 1)}" if pictures else ""
        )
        name = folder.resolve().name
        remedy = (
            f"Move the pictures to {folder / ('10_' + name)} (10 is how often each is shown in an epoch), or name the "
            "folder as image_dir in [[datasets.subsets]]."
        )
        subsets = []
    evidence: dict[str, object] = {"pictures": pictures}
    findings.append(Finding(Level.ERROR, "DATASET-FOLDER-LEVEL", f"{key}: {folder}", message, evidence, remedy))
    return subsets


def list_readable_entries(folder: Path) -> list[Path]:
    """What stands in a folder; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in _PICTURE_SUFFIXES
