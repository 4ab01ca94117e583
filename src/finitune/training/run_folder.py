"""The folder of a run: one run at a time, names for its files, room on the disk, and how much of it is kept.

Folders within it are whole or not there: filled under another name in the same place, flushed to disk, renamed. A lock
beside the folder being filled tells it from what a killed program left. A folder that is replaced is set aside first,
since no rename replaces one that is not empty; the next `clean_run_folder` puts it back if the new one never came.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import psutil

from finitune.errors import UsageError
from finitune.files.writer import (
    flush_to_disk,
    get_scratch_folder,
    hold_locked_file,
    is_abandoned_file,
    make_not_written_error,
    remove_partial_files,
    require_free_disk_bytes,
    try_lock_file,
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
            for file in sorted(place.iterdir()):
                flush_to_disk(file)
            flush_folder(place)
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


RUN_LOCK_NAME = ".finitune-run"
STATE_FOLDER_SUFFIX = "-state"
_SPELLING_SUFFIX_PATTERN = r"([._-](kohya|comfy|diffusers|peft))?"
_STEP_OR_EPOCH_PATTERN = r"-(?:step\d{8,}|\d{6,})"


class RunFolder:
    """The output folder, held by this program from `with` to its end.

    What killed runs left half-written is removed at the beginning. Raises UsageError (RUN-FOLDER-LOCKED) where another
    run holds it, FileError (FILE-NOT-WRITTEN) where it cannot be made.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir)
        self.names: set[str] = set()
        self.lock: BinaryIO | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.take()
            clean_run_folder(self.path)
        except OSError as error:
            self.release()
            raise make_not_written_error(self.path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def take(self) -> None:
        """Take the lock: the system's, which ends with the program; elsewhere a file with the number of a process."""
        file = (self.path / RUN_LOCK_NAME).open("a+b")
        held = try_lock_file(file)
        file.seek(0)
        holder = parse_lock_holder(file.read())
        if held is None and holder:  # a system without locks: does the process that wrote this still run
            held = holder["pid"] == os.getpid() or not psutil.pid_exists(int(holder["pid"]))
        if held is False:
            file.close()
            raise self.make_locked_error(holder)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())
        file.flush()
        self.lock = file

    def release(self) -> None:
        """Give the lock back; its file stays, but says nothing any more."""
        if self.lock is not None:
            self.lock.truncate(0)
            self.lock.close()
            self.lock = None

    def make_locked_error(self, holder: dict[str, Any]) -> UsageError:
        who = f"by process {holder['pid']} since {holder['since']}" if holder else "by another program"
        return UsageError(
            f"{self.path} is in use by another run: it is held {who}.",
            code="RUN-FOLDER-LOCKED",
            subject=str(self.path),
            evidence=holder,
            remedy="Wait for it, stop it, or choose another output_dir.",
        )

    def adapter_path(self, name: str, *, step: int | None = None, epoch: int | None = None) -> Path:
        """Where the adapter of a step, of an epoch, or of the end goes; kohya's names."""
        self.names.add(name)
        return self.path / f"{name}{format_step_or_epoch(step, epoch)}.safetensors"

    def state_path(self, name: str, step: int | None = None) -> Path:
        """Where the state of a step, or of the end, goes."""
        self.names.add(name)
        return self.path / f"{name}{format_step_or_epoch(step, None)}{STATE_FOLDER_SUFFIX}"

    def prune(self, keep: int) -> list[Path]:
        """Remove all but the `keep` adapters and the `keep` states written last; what was removed.

        Only files of names that a path was asked for here, and never those of the end, which have no number.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: the last one is always kept")
        names = "|".join(map(re.escape, sorted(self.names)))
        removed = self.oldest(
            keep,
            re.compile(rf"((?:{names}){_STEP_OR_EPOCH_PATTERN}){_SPELLING_SUFFIX_PATTERN}\.safetensors"),
            Path.is_file,
        )
        removed += self.oldest(
            keep, re.compile(rf"((?:{names}){_STEP_OR_EPOCH_PATTERN}){STATE_FOLDER_SUFFIX}"), Path.is_dir
        )
        for path in removed:
            discard_path(path)
        return removed

    def oldest(self, keep: int, own: re.Pattern[str], kind: Callable[[Path], bool]) -> list[Path]:
        """All paths but those of the last `keep` points; the spellings of one adapter are one point."""
        points: dict[str, list[Path]] = {}
        for path in self.path.iterdir() if self.names else ():
            match = own.fullmatch(path.name)
            if match and kind(path):
                points.setdefault(match[1], []).append(path)
        newest = {name: max(path.stat().st_mtime_ns for path in paths) for name, paths in points.items()}
        ordered = sorted(points, key=lambda name: (newest[name], name))
        return [path for name in ordered[:-keep] for path in sorted(points[name])]

    def require_space(self, size_bytes: int) -> None:
        """Raise FileError (DISK-FULL) where the disk has no room for so many bytes."""
        remedy = "Make room, write to another disk, or keep fewer files: save_last_n, save_state = false."
        require_free_disk_bytes(self.path, size_bytes, remedy)


def format_step_or_epoch(step: int | None, epoch: int | None) -> str:
    """The part of a name that says when: kohya's `-000010` for epochs and `-step00000010` for steps."""
    if step is not None:
        return f"-step{step:08d}"
    return "" if epoch is None else f"-{epoch:06d}"


def parse_lock_holder(content: bytes) -> dict[str, Any]:
    """Who holds a lock, as its file says; nothing where it says nothing."""
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and {"pid", "since"} <= set(holder) else {}
