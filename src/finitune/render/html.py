"""One self-contained HTML page: text, tables, charts and pictures in one file that can be mailed.

No script and no outside resource; the page's own content policy forbids both. Everything that comes in is escaped,
charts excepted, which are our own SVG.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from finitune.render import escape_markup, format_evidence, format_figure_name, format_value, sort_findings
from finitune.report import Finding, Table

HTML_PAGE_CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #667; --paper: #fff; --line: #dde; --sheet: #f6f7f9;
  --error: #c62a2f; --warning: #8f5a00; --note: #205ea8; --good: #18794e;
  --curve-1: #2468b4; --curve-2: #c2500a; --curve-3: #1a7f4b; --curve-4: #8250c4; --curve-5: #c03074;
  --curve-6: #0b7b8b; --curve-7: #8a5a1a; --curve-8: #5b6470; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #99a; --paper: #16181b; --line: #333840;
  --sheet: #1f2226; --error: #ff7b80; --warning: #f0b34b; --note: #7ab6ff; --good: #5bc998;
  --curve-1: #6cb0ff; --curve-2: #ff9a4d; --curve-3: #4fc98f; --curve-4: #b999ff; --curve-5: #ff85b5;
  --curve-6: #45c4d6; --curve-7: #d9a860; --curve-8: #a4adba; } }
* { box-sizing: border-box; }
body { max-width: 60rem; margin: 3rem auto; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; } h2 { margin-top: 2.5rem; font-size: 1.25rem; }
p { max-width: 42rem; white-space: pre-line; }
figure { margin: 0; width: 192px; } figcaption { font-size: .85rem; color: var(--dim); overflow-wrap: anywhere; }
figcaption b { display: block; } .good { color: var(--good); } .bad { color: var(--error); }
.row { display: flex; flex-wrap: wrap; gap: 1.25rem; margin: 1.5rem 0; }
.row img { display: block; width: 192px; height: auto; image-rendering: pixelated; border-radius: 4px;
  background: var(--sheet); }
.wide { overflow-x: auto; margin: 1.5rem 0; } .wide svg { width: 100%; min-width: 36rem; height: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; }
pre { overflow-x: auto; padding: 1rem; background: var(--sheet); border-radius: 6px; font-size: .85rem; }
.finding { margin: 1rem 0; padding-left: 1rem; border-left: 3px solid var(--dim); overflow-wrap: anywhere; }
.finding p { margin: .2rem 0; } .finding small { color: var(--dim); }
.error { border-color: var(--error); } .error b { color: var(--error); }
.warning { border-color: var(--warning); } .warning b { color: var(--warning); }
.note { border-color: var(--note); } .note b { color: var(--note); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
.cards div { padding: .8rem 1rem; background: var(--sheet); border-radius: 6px; overflow-wrap: anywhere; }
.cards span, .cards small { display: block; color: var(--dim); font-size: .85rem; }
.cards b { font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1.5rem;
  margin: 1.5rem 0; } .pair svg { width: 100%; height: auto; }
.grid td { border: 0; padding: .2rem .6rem .6rem 0; } .grid th { border: 0; max-width: 12rem; }
.grid img { display: block; width: 100%; min-width: 80px; max-width: 128px; height: auto;
  border-radius: 4px; background: var(--sheet); }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
"""
_CSS_CLASS_BY_GOOD = {None: "", True: "good", False: "bad"}
_CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


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
        self._title = title
        self._sections = [f"<h1>{escape_markup(title)}</h1>"]

    def heading(self, text: str) -> HtmlPage:
        """Add a heading."""
        return self._add(f"<h2>{escape_markup(text)}</h2>")

    def prose(self, text: str) -> HtmlPage:
        """Add paragraphs; a blank line parts them."""
        return self._add(
            "".join(f"<p>{escape_markup(part.strip())}</p>" for part in text.split("\n\n") if part.strip())
        )

    def code(self, text: str) -> HtmlPage:
        """Add text as it stands."""
        return self._add(f"<pre><code>{escape_markup(text)}</code></pre>")

    def chart(self, svg: str) -> HtmlPage:
        """Add an SVG of our own; raises ValueError for anything else, since it is not escaped."""
        return self._add(f'<div class="wide">{_own(svg)}</div>')

    def charts(self, svgs: Iterable[str]) -> HtmlPage:
        """Add narrow charts, side by side where there is room; as `chart` of each."""
        return self._add(f'<div class="pair">{"".join(map(_own, svgs))}</div>')

    def cards(self, cards: Iterable[SummaryCard]) -> HtmlPage:
        """Add what is asked first, each answer large."""
        return self._add(f'<div class="cards">{"".join(map(_card, cards))}</div>')

    def picture_row(self, pictures: Iterable[tuple[str, bytes, str] | HtmlImage]) -> HtmlPage:
        """Add PNG pictures side by side, each pixel shown as a square, with caption and verdict."""
        figures = (_figure(item if isinstance(item, HtmlImage) else HtmlImage(*item)) for item in pictures)
        return self._add(f'<div class="row">{"".join(figures)}</div>')

    def picture_grid(self, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[HtmlImage | None]]]) -> HtmlPage:
        """Add pictures by row and column, those that are not good with their verdict."""
        head = "".join(f'<th scope="col">{escape_markup(column)}</th>' for column in columns)
        body = "".join(
            f'<tr><th scope="row">{escape_markup(name)}</th>{"".join(map(_cell, pictures))}</tr>'
            for name, pictures in rows
        )
        return self._add(f'<div class="wide"><table class="grid"><tr><td></td>{head}</tr>{body}</table></div>')

    def add_folded_page(self, within: HtmlPage) -> HtmlPage:
        """Add the sections of another page behind its title, which opens them."""
        body = "\n".join(within._sections[1:])
        return self._add(f"<details><summary>{escape_markup(within._title)}</summary>\n{body}\n</details>")

    def table(self, table: Table) -> HtmlPage:
        """Add a table."""
        head = "".join(f'<th scope="col">{escape_markup(column)}</th>' for column in table.columns)
        body = "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
        caption = f"<caption>{escape_markup(table.title)}</caption>"
        return self._add(f'<div class="wide"><table>{caption}<tr>{head}</tr>{body}</table></div>')

    def figures(self, title: str, figures: Mapping[str, object]) -> HtmlPage:
        """Add named figures as a table of two columns."""
        rows = tuple((format_figure_name(key), format_value(value)) for key, value in figures.items())
        return self.table(Table(title, ("figure", "value"), rows))

    def findings(self, findings: Iterable[Finding]) -> HtmlPage:
        """Add findings, the worst first."""
        return self._add("".join(_finding(finding) for finding in sort_findings(findings)))

    def render(self) -> str:
        """The whole page."""
        lines = [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape_markup(self._title)}</title>",
            f"<style>{HTML_PAGE_CSS}</style>",
            "</head>",
            "<body>",
            *self._sections,
            "</body>",
            "</html>",
        ]
        return "\n".join(lines) + "\n"

    def _add(self, section: str) -> HtmlPage:
        self._sections.append(section)
        return self


def _own(svg: str) -> str:
    """`svg` where it is a chart of ours; raises ValueError otherwise."""
    if not svg.startswith("<svg") or "<script" in svg.lower():
        raise ValueError("a chart is an <svg> element without script")
    return svg


def _image(picture: HtmlImage) -> str:
    source = f"data:image/png;base64,{b64encode(picture.png).decode('ascii')}"
    return f'<img src="{source}" alt="{escape_markup(f"{picture.caption}: {picture.verdict}")}">'


def _figure(picture: HtmlImage) -> str:
    verdict = f'<b class="{_CSS_CLASS_BY_GOOD[picture.good]}">{escape_markup(picture.verdict)}</b>'
    return f"<figure>{_image(picture)}<figcaption>{verdict}{escape_markup(picture.caption)}</figcaption></figure>"


def _cell(picture: HtmlImage | None) -> str:
    if picture is None:
        return "<td>-</td>"
    verdict = f'<b class="bad">{escape_markup(picture.verdict)}</b>' if picture.good is False else ""
    return f"<td>{_image(picture)}{verdict}</td>"


def _card(card: SummaryCard) -> str:
    answer = f'<b class="{_CSS_CLASS_BY_GOOD[card.good]}">{escape_markup(card.answer)}</b>'
    return f"<div><span>{escape_markup(card.question)}</span>{answer}<small>{escape_markup(card.detail)}</small></div>"


def _finding(finding: Finding) -> str:
    evidence = format_evidence(finding.evidence)
    parts = [
        f"<p><b>{finding.level.value.upper()} {escape_markup(finding.code)}</b> {escape_markup(finding.subject)}</p>",
        f"<p>{escape_markup(finding.message)}</p>",
        f"<p><small>{escape_markup(evidence)}</small></p>" if evidence else "",
        f"<p>{escape_markup(finding.remedy)}</p>" if finding.remedy else "",
    ]
    return f'<div class="finding {finding.level.value}">{"".join(parts)}</div>'


def _cells(row: Iterable[str]) -> str:
    return "".join(f"<td>{escape_markup(cell)}</td>" for cell in row)
