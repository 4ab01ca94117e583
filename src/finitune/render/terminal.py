"""A report, and the way to it, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from finitune.render import (
    describe_report_verdict,
    escape_control_characters,
    format_evidence,
    format_figure_name,
    format_value,
    sort_findings,
)
from finitune.report import Finding, Level, Report, Table

_STYLE_BY_LEVEL = {Level.ERROR: "bold red", Level.WARNING: "bold yellow", Level.NOTE: "bold blue"}
_STYLE_BY_VERDICT = {"OK": "bold green", "FAILED": "bold red", "REFUSED": "bold red"}
_INDENT = 2
_STATUS_INTERVAL_SECONDS = 10.0


def print_report(report: Report, console: Console) -> None:
    """Print the verdict, then the findings by level, the figures, the tables and the files written.

    A figure that a table tells in more words is left to the table, whose title is its name.
    """
    word, sentence = describe_report_verdict(report)
    told = {table.title for table in report.tables}
    figures = {name: value for name, value in report.figures.items() if name not in told}
    console.print(Text.assemble((word, _STYLE_BY_VERDICT[word]), "  ", escape_control_characters(sentence)))
    sections = [
        *(_show_finding(finding) for finding in sort_findings(report.findings)),
        *([_show_pairs("Figures", figures)] if figures else []),
        *(_show_table(table) for table in report.tables),
        *([_show_pairs("Files", report.artifacts)] if report.artifacts else []),
    ]
    errors = [finding.code for finding in report.findings if finding.level is Level.ERROR]
    if errors:
        sections.append(
            Text(f"More about a code: finitune explain {escape_control_characters(errors[0])}", style="dim")
        )
    for section in sections:
        console.print()
        console.print(section)


def _show_finding(finding: Finding) -> RenderableType:
    """LEVEL  CODE  place, and below it what was found, the numbers, and what to do."""
    heading = Text.assemble(
        (finding.level.value.upper(), _STYLE_BY_LEVEL[finding.level]),
        "  ",
        (finding.code, "bold"),
        "  ",
        escape_control_characters(finding.subject),
        overflow="fold",
    )
    lines = [Text(escape_control_characters(finding.message), overflow="fold")]
    if finding.evidence:
        lines.append(Text(format_evidence(finding.evidence), style="dim", overflow="fold"))
    if finding.remedy:
        lines.append(Text.assemble(("Remedy  ", "green"), escape_control_characters(finding.remedy), overflow="fold"))
    return Group(heading, Padding(Group(*lines), (0, 0, 0, _INDENT), expand=False))


def _show_pairs(title: str, pairs: Mapping[str, object]) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim", overflow="fold")
    grid.add_column(overflow="fold")
    for key, value in pairs.items():
        grid.add_row(Text(format_figure_name(key)), Text(format_value(value)))
    return Group(Text(title, style="bold"), Padding(grid, (0, 0, 0, _INDENT), expand=False))


def _show_table(table: Table) -> RenderableType:
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index, column in enumerate(table.columns):
        numeric = bool(table.rows) and all(_is_number(row[index]) for row in table.rows)
        grid.add_column(
            Text(escape_control_characters(column)), justify="right" if numeric else "left", overflow="fold"
        )
    for row in table.rows:
        grid.add_row(*(Text(escape_control_characters(cell)) for cell in row))
    return Group(
        Text(escape_control_characters(table.title), style="bold"), Padding(grid, (0, 0, 0, _INDENT), expand=False)
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(" ", "").rstrip("%x"))
    except ValueError:
        return False
    return True


class TerminalProgress:
    """Progress bars; gone when the work is. Where there is no terminal (a pipe, a log, a notebook) there are none, and
    what a stage says of itself is a line now and then.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock, self._said = console, clock, -_STATUS_INTERVAL_SECONDS
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def start(self, name: str, total: int | None) -> None:
        """Show a bar for stage `name`; one of unknown length where `total` is None."""
        self._tasks[name] = self._progress.add_task(escape_control_characters(name), total=total, said="")

    def advance(self, name: str, count: int = 1) -> None:
        self._progress.update(
            self._tasks[name], advance=count
        )  # rich's own `advance` makes a negative speed of one back

    def say(self, name: str, text: str) -> None:
        """Show how stage `name` stands: beside its bar, or as a line where there are no bars, every ten seconds."""
        if self._console.is_terminal:
            self._progress.update(self._tasks[name], said=escape_control_characters(text))
        elif self._clock() - self._said >= _STATUS_INTERVAL_SECONDS:
            self._said = self._clock()
            self.tell(f"{name}: {text}")

    def tell(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(escape_control_characters(text), markup=False, highlight=False, soft_wrap=True)

    def finish(self, name: str) -> None:
        self._progress.remove_task(self._tasks.pop(name))
