"""What `finitune check --fix` changes: asked for first, with a copy beside it, and told."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from finitune.errors import FinituneError
from finitune.files.sniff import make_unreadable_file_error
from finitune.report import Finding, Level
from finitune.verbs.check.request import BACKUP_SUFFIX, FileFix, Request

_MAX_LISTED_FIXES = 10


def apply_fixes(mendings: Sequence[FileFix], request: Request) -> list[Finding]:
    """Make the changes if they are wanted; what was done, or would be."""
    if not mendings:
        return []
    if not request.yes and not (request.ask is not None and request.ask(mendings)):
        return list_available_fixes(mendings, asked=True)
    told: list[Finding] = []
    copies: dict[Path, Path] = {}
    for mending in mendings:
        try:
            if mending.path not in copies:
                copies[mending.path] = back_up_file(mending.path)
            mending.apply()
        except (FinituneError, OSError) as error:
            told.append(make_fix_failed_error(mending, error))
        else:
            told.append(make_fix_done_note(mending, copies[mending.path]))
    return told


def back_up_file(path: Path) -> Path:
    """A copy of a file as NAME.orig; one that is there already is never written over."""
    names = (path.with_name(f"{path.name}{BACKUP_SUFFIX}{n or ''}") for n in count())
    copy = next(name for name in names if not name.exists())
    shutil.copy2(path, copy)
    return copy


def make_fix_done_note(mending: FileFix, copy: Path) -> Finding:
    """The note of a change that was made."""
    message = f"{mending.what}: done; the file as it was is {copy.name}"
    evidence: dict[str, object] = {"mends": mending.code, "copy": str(copy)}
    return Finding(Level.NOTE, "FIX-DONE", str(mending.path), message, evidence)


def make_fix_failed_error(mending: FileFix, error: FinituneError | OSError) -> Finding:
    """The error of a change that could not be made; the file is as it was."""
    cause = error if isinstance(error, FinituneError) else make_unreadable_file_error(mending.path, error)
    message = f"{mending.what}: not done. {cause.message}"
    return Finding(Level.ERROR, "FIX-FAILED", str(mending.path), message, {"mends": mending.code}, cause.remedy)


def list_available_fixes(mendings: Sequence[FileFix], asked: bool = False) -> list[Finding]:
    """A note of what could be mended; `asked` is whether --fix was given, and nobody agreed."""
    if not mendings:
        return []
    lines = [f"{one.path}: {one.what}" for one in mendings[:_MAX_LISTED_FIXES]]
    more = len(mendings) - len(lines)
    listed = "\n".join([*lines, *([f"and {more} more"] if more else [])])
    remedy = "Nothing was changed. --fix --yes makes these changes; a copy of each file stays as NAME.orig."
    return [
        Finding(
            Level.NOTE,
            "FIX-NOT-DONE" if asked else "FIX-AVAILABLE",
            str(mendings[0].path),
            f"{len(mendings)} changes can be made that lose nothing:\n{listed}",
            {"changes": len(mendings)},
            remedy if asked else "--fix makes them, and asks first; a copy of each file stays as NAME.orig.",
        )
    ]
