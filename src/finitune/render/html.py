"""One self-contained HTML page: text, tables, charts and pictures in one file that can be mailed.

No script and no outside resource; the page's own content policy forbids both. Everything that comes in is escaped,
charts excepted, which are our own SVG. What a section looks like stands in templates/page.html.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finitune.render import (
    escape_control_characters,
    format_evidence,
    format_figure_name,
    format_value,
    sort_findings,
)
from finitune.report import Finding, Table

TEMPLATE_FOLDER = Path(__file__).parent / "templates"


@cache
def get_template_environment() -> Environment:
    """Where templates are found and what they can say; all text is escaped, and without control characters."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escape_control_characters(value) if type(value) is str else value,
    )
    environment.filters.update(
        base64=lambda data: Markup(b64encode(data).decode("ascii")),
        evidence=format_evidence,
        value=format_value,
        g="{:g}".format,
        px="{:.1f}".format,
    )
    return environment


def render_template(name: str, **values: object) -> str:
    return get_template_environment().get_template(name).render(values)


class HtmlImage(NamedTuple):
    """A PNG with what it shows and what was found of it."""

    caption: str
    png: bytes
    verdict: str
    good: bool | None = None


class SummaryCard(NamedTuple):
    """A question, its answer in a word or a number, and what stands behind it."""

    question: str
    answer: str
    detail: str = ""
    good: bool | None = None


class HtmlPage:
    """A page made from top to bottom; each method adds one section and returns the page."""

    def __init__(self, title: str):
        self.title = title
        self.sections: list[tuple[str, object]] = []

    def heading(self, text: str) -> HtmlPage:
        return self._add("heading", text)

    def prose(self, text: str) -> HtmlPage:
        """Add paragraphs; a blank line parts them."""
        return self._add("prose", [part.strip() for part in text.split("\n\n") if part.strip()])

    def code(self, text: str) -> HtmlPage:
        return self._add("code", text)

    def chart(self, svg: str) -> HtmlPage:
        """Add an SVG of our own; raises ValueError for anything else, since it is not escaped."""
        return self._add("chart", trust_svg(svg))

    def charts(self, svgs: Iterable[str]) -> HtmlPage:
        """Add narrow charts, side by side where there is room; as `chart` of each."""
        return self._add("charts", [trust_svg(svg) for svg in svgs])

    def cards(self, cards: Iterable[SummaryCard]) -> HtmlPage:
        """Add what is asked first, each answer large."""
        return self._add("cards", list(cards))

    def picture_row(self, pictures: Iterable[tuple[str, bytes, str] | HtmlImage]) -> HtmlPage:
        """Add PNG pictures side by side, each pixel shown as a square, with caption and verdict."""
        return self._add("picture row", [one if isinstance(one, HtmlImage) else HtmlImage(*one) for one in pictures])

    def picture_grid(self, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[HtmlImage | None]]]) -> HtmlPage:
        """Add pictures by row and column, those that are not good with their verdict."""
        return self._add("picture grid", {"columns": columns, "rows": list(rows)})

    def add_folded_page(self, within: HtmlPage) -> HtmlPage:
        """Add the sections of another page behind its title, which opens them."""
        return self._add("page", within)

    def table(self, table: Table) -> HtmlPage:
        return self._add("table", table)

    def figures(self, title: str, figures: Mapping[str, object]) -> HtmlPage:
        rows = tuple((format_figure_name(key), format_value(value)) for key, value in figures.items())
        return self.table(Table(title, ("figure", "value"), rows))

    def findings(self, findings: Iterable[Finding]) -> HtmlPage:
        """Add findings, the worst first."""
        return self._add("findings", sort_findings(findings))

    def render(self) -> str:
        return render_template("page.html", page=self)

    def _add(self, kind: str, content: object) -> HtmlPage:
        self.sections.append((kind, content))
        return self


def trust_svg(svg: str) -> Markup:
    """`svg` as it stands, where it is a chart of ours; raises ValueError otherwise."""
    if not svg.startswith("<svg") or "<script" in svg.lower():
        raise ValueError("a chart is an <svg> element without script")
    return Markup(svg)
