"""What `finitune check` is asked, and the changes that it makes: those that lose nothing.

They are asked for first and told, and a copy of each file stays beside it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from finitune.errors import FinituneError
from finitune.files.sniff import make_unreadable_file_error
from finitune.files.tensorfile import TensorFile
from finitune.report import Finding, Level, Report
from finitune.verbs.shared.options import AmbiguityRequest

_MAX_LISTED_FIXES = 10


@dataclass(frozen=True)
class FileFix:
    """A change of one file that loses nothing and that a finding of `code` asks for.

    `what` says it in the imperative ("Write the caption as UTF-8"). `apply` makes it at `path`, of which the dispatcher
    has put a copy aside as NAME.orig, and raises FileError where it cannot.
    """

    code: str
    path: Path
    what: str
    apply: Callable[[], None]


UNNAMED_PLACEHOLDER = "unnamed"
"""What stands for a model or a folder that nobody has named."""
BACKUP_SUFFIX = ".orig"
"""What is behind the name of a copy that was put aside; of several, followed by a number."""

FixConfirmation = Callable[[Sequence[FileFix]], bool]
"""Shows the changes to a person, and returns whether they are wanted."""


@dataclass(frozen=True)
class Request(AmbiguityRequest):
    """What to check, against what, and whether to mend it."""

    paths: Annotated[tuple[Path, ...], Parameter(name="PATH", required=True)]
    """A training configuration (ours, or another program's), a dataset folder, a model, an adapter, a cache, a run, a
    ComfyUI workflow, or a picture that was generated."""
    _: KW_ONLY
    model: str | None = None
    """The model that it is for: its family (`anima`, `sdxl` ...), `pico-anima`, a file or a folder."""
    gpu: str | None = None
    """Tell what each dtype will do on a card of this name, such as T4 or 3060."""
    fix: bool = False
    """Make the changes that lose nothing, after asking; a copy of each file stays as NAME.orig."""
    yes: bool = False
    """With `--fix`: do not ask."""
    html: Path | None = None
    """A page to write of all that was found."""
    ask: Annotated[FixConfirmation | None, Parameter(parse=False)] = field(default=None, compare=False, repr=False)
    """Without it and without `yes`, the changes are listed only."""
    mendings: Annotated[list[FileFix], Parameter(parse=False)] = field(default_factory=list, compare=False, repr=False)
    """Where the parts of check put the changes that they know."""


def check_safetensors_names(files: Iterable[TensorFile], report: Report) -> None:
    """A warning where a safetensors file is called as if it were another kind, which programs go by."""
    for file in files:
        if not file.path.name.endswith((".safetensors", ".safetensors.index.json")):
            report.add(
                Level.WARNING,
                "FILE-NAME-MISLEADS",
                str(file.path),
                f"it is a safetensors file, and its name ends in {file.path.suffix or 'nothing'!r}",
                remedy="Name it .safetensors: many programs take a file for what its name says.",
            )


def sort_findings_by_level(report: Report, begin: int) -> None:
    """Put the findings from place `begin` on in order: errors, warnings, notes."""
    report.findings[begin:] = sorted(report.findings[begin:], key=lambda one: one.level.rank)


def apply_fixes(mendings: Sequence[FileFix], request: Request) -> list[Finding]:
    """Make the changes if they are wanted; what was done, or would be."""
    if not mendings:
        return []
    if not request.yes and not (request.ask is not None and request.ask(mendings)):
        return list_available_fixes(mendings, asked=True)
    told: list[Finding] = []
    copies: dict[Path, Path] = {}
    for mending in mendings:
        path, code = str(mending.path), {"mends": mending.code}
        try:
            if mending.path not in copies:
                copies[mending.path] = back_up_file(mending.path)
            mending.apply()
        except (FinituneError, OSError) as error:
            cause = error if isinstance(error, FinituneError) else make_unreadable_file_error(mending.path, error)
            message = f"{mending.what}: not done. {cause.message}"
            told.append(Finding(Level.ERROR, "FIX-FAILED", path, message, {**code}, cause.remedy))
        else:
            copy = copies[mending.path]
            message = f"{mending.what}: done; the file as it was is {copy.name}"
            told.append(Finding(Level.NOTE, "FIX-DONE", path, message, {**code, "copy": str(copy)}))
    return told


def back_up_file(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{BACKUP_SUFFIX}{n or ''}") for n in count())
    copy = next(name for name in names if not name.exists())
    shutil.copy2(path, copy)
    return copy


def list_available_fixes(mendings: Sequence[FileFix], asked: bool = False) -> list[Finding]:
    """A note of what could be mended; `asked` is whether --fix was given, and nobody agreed."""
    if not mendings:
        return []
    lines = [f"{one.path}: {one.what}" for one in mendings[:_MAX_LISTED_FIXES]]
    if more := len(mendings) - len(lines):
        lines.append(f"and {more} more")
    code, remedy = "FIX-AVAILABLE", "--fix makes them, and asks first; a copy of each file stays as NAME.orig."
    if asked:
        code = "FIX-NOT-DONE"
        remedy = "Nothing was changed. --fix --yes makes these changes; a copy of each file stays as NAME.orig."
    message = f"{len(mendings)} changes can be made that lose nothing:\n" + "\n".join(lines)
    return [Finding(Level.NOTE, code, str(mendings[0].path), message, {"changes": len(mendings)}, remedy)]
