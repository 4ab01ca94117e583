"""finitune check: what each path is, what is wrong with it, and, where it is safe, mended.

One command for everything that a person can hold in hand. The kind of a path is found by looking (`kinds`), each kind
has its own file, and each path its own section of the report. A run's folder is several: its states, its configuration,
its adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from finitune.errors import FinituneError, UsageError
from finitune.files.sniff import make_unreadable_file_error
from finitune.files.writer import write_text
from finitune.machine.cards import find_gpu_model
from finitune.models import MODEL_FAMILIES, SHIPPED_MODELS
from finitune.progress import Progress, SilentProgress
from finitune.report import Finding, Report, Table
from finitune.verbs.check.kinds import PathKind, detect_path_kind
from finitune.verbs.check.precision_forecast import add_gpu_forecast
from finitune.verbs.check.request import FileFix, Request, apply_fixes, list_available_fixes
from finitune.verbs.shared.model import resolve_model_path

_EFFECTIVE_CONFIG_NAME = "config.toml"
"""A run's folder keeps the configuration that was in force under this name."""
_GPU_FINDING_CODES = ("BF16-EMULATED", "GPU-PRECISION")
"""Findings of these codes are the same for every path."""
_KINDS_WITH_FORECAST = (PathKind.MODEL, PathKind.ADAPTER, PathKind.FAMILY)
"""The kinds for which a card's precisions can be told."""


@dataclass(frozen=True)
class CheckSection:
    """What was found of one path: its kind (None where it is of none), the findings, and what can be mended."""

    path: Path
    kind: PathKind | None
    report: Report
    mendings: tuple[FileFix, ...] = ()


PathChecker = Callable[[Path, Request, Report, Progress], None]
CheckPageRenderer = Callable[[Sequence[CheckSection], Report], str]
"""Makes the page that --html writes, of the sections and the whole."""


def run(request: Request, progress: Progress | None = None, page: CheckPageRenderer | None = None) -> Report:
    """Look at every path; the report says what each is and what is wrong with it, worst first.

    With `fix`, what is safe is mended, and looked at again. The exit code is that of the worst section.
    """
    progress = progress or SilentProgress()
    with Report("check") as report:
        require_valid_check(request)
        sections = [section for path in request.paths for section in iter_check_sections(path, request, progress)]
        offered = (one for section in sections for one in section.mendings)
        # each once: a picture is of its folder, and of each configuration that names the folder
        mendings = list({(one.code, one.path, one.what): one for one in offered}.values())
        done = apply_fixes(mendings, request) if request.fix else list_available_fixes(mendings)
        if any(finding.code == "FIX-DONE" for finding in done):
            sections = [recheck_section(section, request, progress) for section in sections]
        join_check_sections(sections, report)
        report.findings += done
        report.findings.sort(key=lambda finding: finding.level.rank)
        request.mendings.extend(mendings)
        if request.html is not None and page is not None:
            write_text(request.html, page(sections, report))
            report.artifacts["html"] = str(request.html)
    return report


def require_valid_check(request: Request) -> None:
    """Raise UsageError where the request itself is wrong, before anything is read."""
    if not request.paths:
        raise UsageError(
            "name what is to be checked",
            code="CHECK-NOTHING-NAMED",
            subject="PATH",
            remedy="A file or a folder: finitune check PATH",
        )
    request.answers()
    if request.gpu is not None:
        find_gpu_model(request.gpu)


def iter_check_sections(path: Path, request: Request, progress: Progress) -> Iterator[CheckSection]:
    """The section of a path, and those of the parts of a folder that is made of several things."""
    section = check_path(path, request, progress)
    if section.kind is not PathKind.FILES:
        yield section
    if section.kind in (PathKind.RUN, PathKind.FILES):
        config = path / _EFFECTIVE_CONFIG_NAME
        inside = [config] if section.kind is PathKind.RUN and config.is_file() else []
        adapters = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))
        for part in (*inside, *adapters):
            yield check_path(part, request, progress)


def check_path(path: Path, request: Request, progress: Progress) -> CheckSection:
    """One path, whatever it is; what raises is its finding."""
    report, own = Report("check"), replace(request, mendings=[])
    kind, named = None, path
    path = resolve_model_path(str(path)) if str(path) in SHIPPED_MODELS and not path.exists() else path
    try:
        kind = detect_path_kind(path)
        if kind is PathKind.FILES:
            return CheckSection(named, kind, report)
        find_checker(kind)(path, own, report, progress)
        report.figures.setdefault("kind", kind.value)
        if request.gpu is not None and kind in _KINDS_WITH_FORECAST:
            add_gpu_forecast(report, request.gpu, str(named))
    except OSError as error:
        report.findings.append(Finding.of(make_unreadable_file_error(path, error)))
    except FinituneError as error:
        if isinstance(error, UsageError) and error.subject.startswith("--"):
            report.fail(error)  # an option: it is the request that is wrong
        else:
            report.findings.append(Finding.of(error))
    return CheckSection(named, kind, report, tuple(own.mendings))


def recheck_section(section: CheckSection, request: Request, progress: Progress) -> CheckSection:
    if not section.mendings:
        return section
    if section.path.exists():
        return check_path(section.path, request, progress)
    return CheckSection(section.path, section.kind, Report("check", figures={"kind": "taken away"}))


def join_check_sections(sections: Sequence[CheckSection], report: Report) -> None:
    """All sections in one report; of several, each finding, figure and table says which path it is of."""
    report.exit_code_override = max((one.report.exit_code for one in sections), default=0) or None
    if len(sections) == 1:
        (only,) = sections
        report.findings += only.report.findings
        report.figures.update(only.report.figures)
        report.tables += only.report.tables
        return
    paths: dict[str, object] = {}
    seen: list[Finding] = []  # whichever path leads to it, a finding about a file that it names is told once
    rows = []
    for one in sections:
        name, findings = str(one.path), one.report.findings
        report.findings += [add_path_to_finding(finding, name) for finding in findings if finding not in seen]
        seen += [
            finding
            for finding in findings
            if finding.code in _GPU_FINDING_CODES
            or (Path(finding.subject).is_absolute() and Path(finding.subject).exists())
        ]
        report.tables += [
            Table(f"{one.path.name}: {table.title}", table.columns, table.rows) for table in one.report.tables
        ]
        paths[name] = {"ok": one.report.ok, **one.report.figures}
        rows.append((name, one.kind.value if one.kind else "-", one.report.describe_counts() or "good"))
    report.figures["checked"] = paths
    report.tables.insert(0, Table("checked", ("path", "what it is", "found"), tuple(rows)))


def add_path_to_finding(finding: Finding, path: str) -> Finding:
    """A finding whose subject says in which file it is, if it is of one."""
    if path in finding.subject or finding.code in _GPU_FINDING_CODES:
        return finding
    return replace(finding, subject=f"{path}: {finding.subject}" if finding.subject else path)


def check_model_family(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """What is known of a model family that is named instead of a file."""
    family = next(model for model in MODEL_FAMILIES if model.name == str(path))
    report.figures.update(family=family.name, title=family.title, components=list(family.components))
    report.tables.append(Table("what every host keeps to", ("invariant", "rule"), family.invariants))


CHECKERS_BY_KIND = {
    PathKind.ADAPTER: ("adapter", "check_adapter"),
    PathKind.CACHE: ("cache", "check_cache"),
    PathKind.CONFIG: ("config", "check_config"),
    PathKind.DATASET: ("dataset", "check_dataset"),
    PathKind.MODEL: ("model", "check_model"),
    PathKind.PICTURE: ("picture", "check_picture"),
    PathKind.PLAN: ("run_folder", "check_plan"),
    PathKind.RUN: ("run_folder", "check_run"),
    PathKind.WORKFLOW: ("picture", "check_workflow"),
}
"""The file in which a kind is checked, and the function there."""


def find_checker(kind: PathKind) -> PathChecker:
    """The function for a kind; its file is imported now: who checks an adapter does not wait for what trains."""
    if kind is PathKind.FAMILY:
        return check_model_family
    module, function = CHECKERS_BY_KIND[kind]
    return getattr(import_module(f"finitune.verbs.check.{module}"), function)
