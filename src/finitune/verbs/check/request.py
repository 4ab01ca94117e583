"""What `finitune check` is asked, and what its parts hand back beside their findings: changes that are safe to make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from finitune.report import Level, Report
from finitune.verbs.shared.options import AmbiguityRequest

if TYPE_CHECKING:
    from finitune.files.tensorfile import TensorFile


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


def count_tensor_dtypes(file: TensorFile) -> dict[str, int]:
    """How many tensors there are of each dtype, as the file names it."""
    return dict(Counter(entry.dtype for entry in file.entries.values()))


def sort_findings_by_level(report: Report, begin: int) -> None:
    """Put the findings from place `begin` on in order: errors, warnings, notes."""
    report.findings[begin:] = sorted(report.findings[begin:], key=lambda one: one.level.rank)
