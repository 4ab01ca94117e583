"""Folders that are whole or not there: filled under another name in the same place, flushed to disk, renamed.

A lock beside the folder being filled tells it from what a killed program left. A folder that is replaced is set aside
first, since no rename replaces one that is not empty; the next `sweep` puts it back if the new one never came.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finitune.files.writer import (
    flush_to_disk,
    get_scratch_folder,
    hold_locked_file,
    is_abandoned_file,
    make_not_written_error,
    remove_partial_files,
)

_PARTIAL_NAME_PATTERN = re.compile(r"\.partial-(?P<mark>[0-9a-f]{8})-(?P<name>.+)")
_DISCARDED_PREFIX = ".discarded-"
_ASIDE_NAME_PATTERN = re.compile(r"\.aside-(?P<mark>[0-9a-f]{8})-(?P<name>.+)")


@contextmanager
def open_staged_folder(target: Path) -> Iterator[Path]:
    """An empty folder to be filled with files; at the end all are on disk, and the folder is `target`.

    On any error nothing of it is left, and a `target` that was there is as it was. What killed programs left in the
    same place is removed. Raises FileError (FILE-NOT-WRITTEN) where the system refuses, a full disk included; other
    errors pass through.
    """
    mark = secrets.token_hex(4)
    lock = target.with_name(f".partial-{mark}-{target.name}")
    aside = target.with_name(f".aside-{mark}-{target.name}")
    place = get_scratch_folder(lock)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        clean_run_folder(target.parent)
        with hold_locked_file(lock):
            place.mkdir()
            yield place
            flush_folder_files(place)
            if target.exists():
                target.rename(aside)
            place.rename(target)
            flush_folder(target.parent)
    except OSError as error:
        raise make_not_written_error(target, error) from error
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        lock.unlink(missing_ok=True)


def flush_folder_files(folder: Path) -> None:
    """Force the files of a folder, and their names, onto the disk."""
    for file in sorted(folder.iterdir()):
        flush_to_disk(file)
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Force the names in a folder onto the disk, where the system can."""
    if os.name == "posix":
        flush_to_disk(folder)


def clean_run_folder(folder: Path) -> list[Path]:
    """Clear away what killed programs left in a folder, and put back what they had set aside; what was removed."""
    found = {path: path.name for path in folder.iterdir()}
    partial = [
        (path, match)
        for path, name in found.items()
        if path.is_file() and (match := _PARTIAL_NAME_PATTERN.fullmatch(name))
    ]
    working = {match["mark"] for path, match in partial if not is_abandoned_file(path)}
    removed: list[Path] = []
    for path, name in found.items():
        match = _ASIDE_NAME_PATTERN.fullmatch(name)
        if match and match["mark"] in working:
            continue
        if match and not (folder / match["name"]).exists():
            path.rename(folder / match["name"])
        elif match or name.startswith(_DISCARDED_PREFIX):
            shutil.rmtree(path)
            removed.append(path)
    for name in sorted({match["name"] for _, match in partial}):
        removed += remove_partial_files(folder / name)
    return removed


def discard_path(path: Path) -> None:
    """Remove a file, or a folder in such a way that no reader finds half of it."""
    if path.is_dir():
        path = path.rename(path.with_name(f"{_DISCARDED_PREFIX}{path.name}"))
        shutil.rmtree(path)
    else:
        path.unlink()
