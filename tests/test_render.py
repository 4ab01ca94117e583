"""What a person sees: terminal, page and chart say what the report says, whatever the report holds."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from finitune.errors import FileError, UsageError
from finitune.progress import Progress, SilentProgress
from finitune.render import (
    describe_report_verdict,
    escape_control_characters,
    format_evidence,
    format_value,
    sort_findings,
)
from finitune.render.html import HtmlImage, HtmlPage
from finitune.render.range_chart import (
    FP16_MAX,
    OVERFLOW_BAR_COLOR,
    RANGE_BAR_COLOR,
    LogAxis,
    RangeBar,
    render_range_chart,
)
from finitune.render.terminal import TerminalProgress, print_report
from finitune.report import Finding, Level, Report, Table

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\x1b[31m[red]'\"&"
MAGNITUDES = st.floats(min_value=0) | st.just(math.nan)
few = settings(max_examples=40)


def sample() -> Report:
    report = Report("diagnose", figures={"share_fp16": 0.9987, "parameters": 2_000_000})
    report.add(Level.NOTE, "PLAN-WRITTEN", "out/plan.toml", "a plan was written")
    report.add(Level.WARNING, "BF16-LOSSY", "norm_out", "some weights round", count=3)
    report.add(Level.ERROR, "FP16-OVERFLOW", "blocks.27.mlp", "a product left fp16", remedy="Use a plan.", amax=81920.0)
    report.tables.append(Table("Stages", ("stage", "amax"), (("text", "12.5"), ("denoiser", "81 920"))))
    report.artifacts["plan"] = "out/plan.toml"
    return report


def shown(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Seen(HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_terminal_tells_verdict_then_worst_first_then_the_rest():
    text = shown(sample())
    order = ("FAILED", "FP16-OVERFLOW", "BF16-LOSSY", "PLAN-WRITTEN", "Figures", "Stages", "Files")
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    assert text.startswith("FAILED  diagnose: 1 error, 1 warning, 1 note")
    for told in ("blocks.27.mlp", "amax 81 920", "Remedy  Use a plan.", "share fp16", "0.9987", "2 000 000"):
        assert told in text


def test_a_figure_that_has_a_table_of_its_name_is_told_once():
    report = Report("check", figures={"sites": 2, "loads": {"ComfyUI": "yes"}})
    report.tables.append(Table("loads", ("program", "loads", "why"), (("ComfyUI", "yes", "it does"),)))
    text = shown(report)
    assert text.count("ComfyUI") == 1 and "it does" in text and "sites" in text
    assert report.as_json()["figures"]["loads"] == {"ComfyUI": "yes"}


def test_verdicts():
    assert describe_report_verdict(Report("plan")) == ("OK", "plan: nothing to report")
    assert describe_report_verdict(Report("plan").fail(FileError("gone", code="FILE-GONE")))[0] == "FAILED"
    assert describe_report_verdict(Report("plan").fail(UsageError("no", code="NO")))[0] == "REFUSED"


@few
@given(st.lists(st.sampled_from(Level)))
def test_order_is_by_level_and_stable(levels: list[Level]):
    ordered = sort_findings(Finding(level, str(i), "", "") for i, level in enumerate(levels))
    keys = [(list(Level).index(finding.level), int(finding.code)) for finding in ordered]
    assert keys == sorted(keys) and len(keys) == len(levels)


@few
@given(st.text())
@example(HOSTILE)
def test_no_text_steers_the_terminal(text: str):
    report = Report("check", [Finding(Level.ERROR, "X", text, text, {"name": text}, text)], {text: text})
    report.tables.append(Table(text, (text,), ((text,),)))
    assert all(char.isprintable() or char == "\n" for char in shown(report))


@few
@given(st.text())
def test_printable_keeps_what_can_be_printed(text: str):
    clean = escape_control_characters(text)
    assert escape_control_characters(clean) == clean
    assert (clean == text) == all(char.isprintable() or char == "\n" for char in text)


def test_narrow_terminal_loses_nothing():
    letters = shown(sample(), width=30).replace("\n", "").replace(" ", "")
    assert "FP16-OVERFLOW" in letters and "blocks.27.mlp" in letters and "out/plan.toml" in letters


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (65504, "65 504"),
        (65504.0, "65 504"),
        (9.6e-3, "0.0096"),
        (7e-7, "7e-07"),
        (1e30, "1e+30"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (False, "no"),
        ({"step": 3, "amax": 81920.0}, "step 3, amax 81 920"),
        ((), "-"),
        ("a\x00b", "a\\x00b"),
    ],
)
def test_spelling(value: object, text: str):
    assert format_value(value) == text


def test_a_bar_goes_back_and_still_knows_the_time_left():
    with TerminalProgress(Console(file=io.StringIO(), force_terminal=True)) as bars:
        bars.start("training", 10)
        for _ in range(5):
            bars.advance("training")
        bars.advance("training", -3)
        (task,) = bars._progress.tasks
        assert (task.completed, task.remaining) == (2, 8)
        assert task.speed is None or task.speed >= 0


def test_progress_is_silent_where_nobody_watches():
    console = Console(file=io.StringIO(), color_system=None)
    listeners: list[Progress] = [SilentProgress()]
    with TerminalProgress(console) as bars:
        for progress in (*listeners, bars):
            progress.start("steps", 2)
            progress.advance("steps")
            progress.advance("steps", 1)
            progress.finish("steps")
            progress.start("search", None)
            progress.finish("search")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_progress_bars_show_name_and_count():
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    with TerminalProgress(console) as bars:
        bars.start("[steps]", 28)
        bars.advance("[steps]", 7)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[steps]" in text and "7/28" in text


def test_page_holds_everything_and_fetches_nothing():
    page = (
        HtmlPage("Report").heading("Before").prose("One.\n\nTwo.").code("a < b").figures("Figures", {"share_fp16": 1.0})
    )
    page.picture_row([("raw half", b"\x89PNG", "black"), HtmlImage("planned", b"\x89PNG", "a picture", True)])
    page.chart(render_range_chart([RangeBar("blocks.0", 9.0)])).table(sample().tables[0]).findings(sample().findings)
    text = page.render()
    seen = Seen(text)
    assert not {"script", "link", "iframe", "object"} & set(seen.tags)
    assert [value for name, value in seen.attributes if name in ("src", "href")] == [
        "data:image/png;base64,iVBORw=="
    ] * 2
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "image-rendering: pixelated" in text and "192px" in text and "prefers-color-scheme: dark" in text
    for told in ("One.", "Two.", "a < b", "black", "planned", "FP16-OVERFLOW", "amax 81 920", "Stages", "share fp16"):
        assert told in seen.text


@few
@given(st.text())
@example(HOSTILE)
def test_page_escapes_whatever_comes_in(text: str):
    def made(text: str) -> Seen:
        page = HtmlPage(text).heading(text).prose(f"x{text}".replace("\n", "")).code(text)
        page.table(Table(text, (text,), ((text,),))).picture_row([(text, b"", text)]).figures(text, {"a": text})
        page.findings([Finding(Level.NOTE, text, text, text, {"x": text}, f"x{text}")])
        return Seen(page.chart(render_range_chart([RangeBar(text, 1.0)], title=text)).render())

    assert made(text).tags == made("plain").tags


def test_chart_must_be_a_chart():
    for text in ("<img>", "<svg><script>1</script></svg>"):
        with pytest.raises(ValueError, match="svg"):
            HtmlPage("x").chart(text)


@few
@given(st.lists(st.builds(RangeBar, st.text(max_size=60), MAGNITUDES, MAGNITUDES), max_size=12))
@example([RangeBar("a" * 60, math.inf, 1e-30), RangeBar("nan", math.nan), RangeBar("0", 0.0), RangeBar("e", FP16_MAX)])
def test_chart_is_well_formed_and_marks_what_is_beyond(series: list[RangeBar]):
    chart = ElementTree.fromstring(render_range_chart(series))
    width, height = (float(number) for number in chart.attrib["viewBox"].split()[2:])
    bars = chart.findall(f"{SVG}g/{SVG}rect")
    colours = [OVERFLOW_BAR_COLOR if not bar.amax <= FP16_MAX else RANGE_BAR_COLOR for bar in series]
    assert [bar.attrib["fill"] for bar in bars] == colours
    for bar in bars:
        x, y, length = (float(bar.attrib[name]) for name in ("x", "y", "width"))
        assert x >= 0 and x + length <= width and 0 <= y <= height and length >= 1
    told = chart.findtext(f"{SVG}desc") or ""
    assert chart.findtext(f"{SVG}title")
    assert not series or told.startswith(f"{colours.count(OVERFLOW_BAR_COLOR)} of {len(series)} sites exceed 65504")
    assert "fp16 ends at 65504" in "".join(chart.itertext())


@few
@given(st.lists(st.floats(min_value=1e-300, max_value=1e300), min_size=2))
def test_axis_keeps_order_and_powers_of_two_are_even(values: list[float]):
    axis = LogAxis.over(values)
    places = [axis.x(value) for value in sorted(values)]
    assert places == sorted(places)
    assert axis.x(0.0) <= places[0] and places[-1] <= axis.x(math.inf) == axis.x(math.nan)
    middle = 2.0 ** ((axis.low + axis.high) / 2)
    assert axis.x(middle) == pytest.approx((axis.x(0.0) + axis.x(math.inf)) / 2)
    assert len(LogAxis(-2, 17).decades()) >= 2 and len(axis.decades()) <= 9


def test_lists_of_records_are_left_to_the_message():
    assert (
        format_evidence({"step": 3, "faults": [{"code": "A"}, {"code": "B"}], "names": ["a", "b"]})
        == "step 3, names a, b"
    )
