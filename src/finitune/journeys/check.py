"""finitune check: what each path is, what is wrong with it, and, where it is safe, mended.

One command for everything that a person can hold in hand. The kind of a path is found by looking (`kinds`), each kind
has its own file (check_adapter, check_cache, check_config, check_dataset, check_model, check_picture, check_run), and
each path its own section of the report. A run's folder is several: its states, its configuration, its adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finitune.errors import FinituneError, UsageError
from finitune.files.sniff import unreadable
from finitune.journeys.checks import Mending, Request
from finitune.journeys.kinds import Kind, files_in, kind_of
from finitune.journeys.mending import mend, tell_listed
from finitune.journeys.model import SHIPPED, model_path
from finitune.progress import Progress, Silent
from finitune.report import Finding, Level, Report, Table

EFFECTIVE = "config.toml"
"""A run's folder keeps the configuration that was in force under this name."""
OF_THE_CARD = ("BF16-EMULATED", "GPU-PRECISION")
"""Findings of these codes are the same for every path."""
WITH_STORY = (Kind.MODEL, Kind.ADAPTER, Kind.FAMILY)
"""The kinds for which a card's precisions can be told."""


@dataclass(frozen=True)
class Section:
    """What was found of one path: its kind (None where it is of none), the findings, and what can be mended."""

    path: Path
    kind: Kind | None
    report: Report
    mendings: tuple[Mending, ...] = ()


Check = Callable[[Path, Request, Report, Progress], None]
Page = Callable[[Sequence[Section], Report], str]
"""Makes the page that --html writes, of the sections and the whole."""


def run(request: Request, progress: Progress | None = None, page: Page | None = None) -> Report:
    """Look at every path; the report says what each is and what is wrong with it, worst first.

    With `fix`, what is safe is mended, and looked at again. The exit code is that of the worst section.
    """
    report, progress = Report("check"), progress or Silent()
    try:
        demand_sense(request)
        sections = [section for path in request.paths for section in sections_of(path, request, progress)]
        mendings = distinct(one for section in sections for one in section.mendings)
        done = mend(mendings, request) if request.fix else tell_listed(mendings)
        if any(finding.code == "FIX-DONE" for finding in done):
            sections = [again(section, request, progress) for section in sections]
        join(sections, report)
        report.findings += done
        report.findings.sort(key=lambda finding: list(Level).index(finding.level))
        request.mendings.extend(mendings)
        if request.html is not None and page is not None:
            write_page(request.html, page(sections, report), report)
    except FinituneError as error:
        return report.fail(error)
    return report


def distinct(mendings: Iterable[Mending]) -> list[Mending]:
    """The changes, each once: a picture is of its folder, and of each configuration that names the folder."""
    return list({(one.code, one.path, one.what): one for one in mendings}.values())


def demand_sense(request: Request) -> None:
    """Raise UsageError where the request itself is wrong, before anything is read."""
    from finitune.device.cards import card_named

    if not request.paths:
        raise UsageError(
            "name what is to be checked",
            code="CHECK-NOTHING-NAMED",
            subject="PATH",
            remedy="A file or a folder: finitune check PATH",
        )
    request.answers()
    if request.gpu is not None:
        card_named(request.gpu)


def sections_of(path: Path, request: Request, progress: Progress) -> Iterator[Section]:
    """The section of a path, and those of the parts of a folder that is made of several things."""
    section = looked_at(path, request, progress)
    if section.kind is not Kind.FILES:
        yield section
    if section.kind in (Kind.RUN, Kind.FILES):
        inside = [path / EFFECTIVE] if section.kind is Kind.RUN and (path / EFFECTIVE).is_file() else []
        for part in (*inside, *files_in(path)):
            yield looked_at(part, request, progress)


def looked_at(path: Path, request: Request, progress: Progress) -> Section:
    """One path, whatever it is; what raises is its finding."""
    report, own = Report("check"), replace(request, mendings=[])
    kind, named = None, path
    path = model_path(str(path)) if str(path) in SHIPPED and not path.exists() else path
    try:
        kind = kind_of(path)
        if kind is Kind.FILES:
            return Section(named, kind, report)
        check_by(kind)(path, own, report, progress)
        report.figures.setdefault("kind", kind.value)
        if request.gpu is not None and kind in WITH_STORY:
            tell_story(named, request.gpu, report)
    except OSError as error:
        report.findings.append(Finding.of(unreadable(path, error)))
    except FinituneError as error:
        if isinstance(error, UsageError) and error.subject.startswith("--"):
            report.fail(error)  # it is the request that is wrong
        else:
            report.findings.append(Finding.of(error))
    return Section(named, kind, report, tuple(own.mendings))


def tell_story(path: Path, gpu: str, report: Report) -> None:
    """What this model, or the one that this adapter is for, does on a card in each precision."""
    from finitune.journeys.precision_story import story_into
    from finitune.models import MODELS

    figures = report.figures
    family = next((model for model in MODELS if model.name == figures.get("family")), None)
    numbers, over = figures.get("numbers"), figures.get("tensors_beyond_fp16")
    story_into(
        report,
        gpu,
        str(path),
        family,
        numbers if isinstance(numbers, int) else None,
        over if isinstance(over, int) else 0,
    )


def again(section: Section, request: Request, progress: Progress) -> Section:
    """The section as it is after the changes."""
    if not section.mendings:
        return section
    if section.path.exists():
        return looked_at(section.path, request, progress)
    return Section(section.path, section.kind, Report("check", figures={"kind": "taken away"}))


def join(sections: Sequence[Section], report: Report) -> None:
    """All sections in one report; of several, each finding, figure and table says which path it is of."""
    report.exit_code_override = max((one.report.exit_code for one in sections), default=0) or None
    if len(sections) == 1:
        (only,) = sections
        report.findings += only.report.findings
        report.figures.update(only.report.figures)
        report.tables += only.report.tables
        return
    paths: dict[str, object] = {}
    seen: list[Finding] = []
    for one in sections:
        name = str(one.path)
        report.findings += [of_path(finding, name) for finding in one.report.findings if finding not in seen]
        seen += [finding for finding in one.report.findings if finding.code in OF_THE_CARD or of_a_file(finding)]
        report.tables += [
            Table(f"{one.path.name}: {table.title}", table.columns, table.rows) for table in one.report.tables
        ]
        paths[name] = {"ok": one.report.ok, **one.report.figures}
    report.figures["checked"] = paths
    rows = tuple((str(one.path), one.kind.value if one.kind else "-", verdict(one.report)) for one in sections)
    report.tables.insert(0, Table("checked", ("path", "what it is", "found"), rows))


def of_path(finding: Finding, path: str) -> Finding:
    """A finding whose subject says in which file it is, if it is of one."""
    if path in finding.subject or finding.code in OF_THE_CARD:
        return finding
    return replace(finding, subject=f"{path}: {finding.subject}" if finding.subject else path)


def of_a_file(finding: Finding) -> bool:
    """Whether a finding is about a file that it names itself: such a one is told once, whichever path leads to it."""
    return Path(finding.subject).is_absolute() and Path(finding.subject).exists()


def verdict(report: Report) -> str:
    """How many findings there are of each level, in words."""
    counts = {level: sum(finding.level is level for finding in report.findings) for level in Level}
    return ", ".join(f"{count} {level.value}{'s' * (count > 1)}" for level, count in counts.items() if count) or "good"


def write_page(path: Path, text: str, report: Report) -> None:
    """Write the page and name it in the report; raises FileError."""
    from finitune.files.writer import write_text

    write_text(path, text)
    report.artifacts["html"] = str(path)


def check_family(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """What is known of a model family that is named instead of a file."""
    from finitune.models import MODELS

    family = next(model for model in MODELS if model.name == str(path))
    report.figures.update(family=family.name, title=family.title, components=list(family.components))
    report.tables.append(Table("what every host keeps to", ("invariant", "rule"), family.invariants))


def check_by(kind: Kind) -> Check:
    """The function for a kind; its file is imported when it is needed first."""
    from importlib import import_module

    if kind is Kind.FAMILY:
        return check_family
    module, function = CHECKS[kind]
    return getattr(import_module(f"finitune.journeys.{module}"), function)


CHECKS = {
    Kind.ADAPTER: ("check_adapter", "check_adapter"),
    Kind.CACHE: ("check_cache", "check_cache"),
    Kind.CONFIG: ("check_config", "check_config"),
    Kind.DATASET: ("check_dataset", "check_dataset"),
    Kind.MODEL: ("check_model", "check_model"),
    Kind.PICTURE: ("check_picture", "check_picture"),
    Kind.PLAN: ("check_run", "check_plan"),
    Kind.RUN: ("check_run", "check_run"),
    Kind.WORKFLOW: ("check_picture", "check_workflow"),
}
"""The file in which a kind is checked, and the function there."""
