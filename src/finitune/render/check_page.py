"""The page of `finitune check --html`: what was looked at, the worst first, then each path by itself."""

from __future__ import annotations

from collections.abc import Sequence

from finitune.render import describe_report_verdict
from finitune.render.html import HtmlPage, SummaryCard
from finitune.report import Level, Report
from finitune.verbs.check import CheckSection

_CHECK_PAGE_TITLE = "What finitune check found"


def render_check_page(sections: Sequence[CheckSection], report: Report) -> str:
    page = HtmlPage(_CHECK_PAGE_TITLE).cards(build_check_cards(sections, report))
    urgent = [finding for finding in report.findings if finding.level is not Level.NOTE]
    if urgent:
        page.heading("What to see to").findings(urgent)
    for section in sections:
        if len(sections) == 1:
            add_section(page, section)
        else:
            word, _ = describe_report_verdict(section.report)
            kind = section.kind.value if section.kind else "unknown"
            page.add_folded_page(add_section(HtmlPage(f"{word}: {section.path} ({kind})"), section))
    done = [finding for finding in report.findings if finding.code.startswith("FIX-")]
    if done:
        page.heading("Changes").findings(done)
    return page.render()


def build_check_cards(sections: Sequence[CheckSection], report: Report) -> list[SummaryCard]:
    """The first look: is it good, how much was looked at, how many findings of each level."""
    word, sentence = describe_report_verdict(report)
    kinds = ", ".join(dict.fromkeys(one.kind.value if one.kind else "unknown" for one in sections))
    counted = [(level, sum(finding.level is level for finding in report.findings)) for level in Level]
    return [
        SummaryCard("Is it good?", word, sentence, report.ok),
        SummaryCard("What was looked at?", str(len(sections)), kinds),
        *(
            SummaryCard(f"{level.value.capitalize()}s", str(count), "", None if level is Level.NOTE else not count)
            for level, count in counted
        ),
    ]


def add_section(page: HtmlPage, section: CheckSection) -> HtmlPage:
    titles = {table.title for table in section.report.tables}
    figures = {name: value for name, value in section.report.figures.items() if name not in titles}
    if section.report.findings:
        page.heading("Findings").findings(section.report.findings)
    for table in section.report.tables:
        page.table(table)
    if figures:
        page.figures("Figures", figures)
    return page
