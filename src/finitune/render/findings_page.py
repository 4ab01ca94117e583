"""The page of `finitune check --html`: what was looked at, the worst first, then each path by itself."""

from __future__ import annotations

from collections.abc import Sequence

from finitune.journeys.check import Section
from finitune.render import verdict
from finitune.render.html import Card, Page
from finitune.report import Level, Report

TITLE = "What finitune check found"


def findings_page(sections: Sequence[Section], report: Report) -> str:
    """The self-contained HTML page of a check."""
    page = Page(TITLE).cards(cards(sections, report))
    urgent = [finding for finding in report.findings if finding.level is not Level.NOTE]
    if urgent:
        page.heading("What to see to").findings(urgent)
    for section in sections:
        page.folded(section_page(section)) if len(sections) > 1 else add(page, section)
    done = [finding for finding in report.findings if finding.code.startswith("FIX-")]
    if done:
        page.heading("Changes").findings(done)
    return page.render()


def cards(sections: Sequence[Section], report: Report) -> list[Card]:
    """The first look: is it good, how much was looked at, how many findings of each level."""
    word, sentence = verdict(report)
    kinds = ", ".join(dict.fromkeys(one.kind.value if one.kind else "unknown" for one in sections))
    counted = [(level, sum(finding.level is level for finding in report.findings)) for level in Level]
    return [
        Card("Is it good?", word, sentence, report.ok),
        Card("What was looked at?", str(len(sections)), kinds),
        *(
            Card(f"{level.value.capitalize()}s", str(count), "", None if level is Level.NOTE else not count)
            for level, count in counted
        ),
    ]


def section_page(section: Section) -> Page:
    """One path, as a page that is folded into the whole."""
    word, _ = verdict(section.report)
    return add(Page(f"{word}: {section.path} ({section.kind.value if section.kind else 'unknown'})"), section)


def add(page: Page, section: Section) -> Page:
    """The findings, figures and tables of one path."""
    titles = {table.title for table in section.report.tables}
    figures = {name: value for name, value in section.report.figures.items() if name not in titles}
    if section.report.findings:
        page.heading("Findings").findings(section.report.findings)
    for table in section.report.tables:
        page.table(table)
    if figures:
        page.figures("Figures", figures)
    return page
