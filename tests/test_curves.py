"""Line charts: whatever the numbers, the drawing is well-formed, inside its box, and tells no untruth."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finitune.render import escape_control_characters
from finitune.render.axes import ChartAxis, build_enclosing_axis, build_tight_axis, is_drawable
from finitune.render.html import TEMPLATE_FOLDER
from finitune.render.line_chart import (
    LEGEND_CHARACTER_WIDTH,
    MAX_CURVE_POINTS,
    NARROW_CHART_WIDTH,
    PLOT_HEIGHT,
    PLOT_LEFT_MARGIN,
    PLOT_RIGHT_MARGIN,
    WIDE_CHART_WIDTH,
    AxisMarkers,
    ChartMark,
    Curve,
    ReferenceLine,
    compute_stretch_medians,
    decimate_points,
    describe_curves,
    has_drawable_points,
    render_line_chart,
)

SVG = "{http://www.w3.org/2000/svg}"
few = settings(max_examples=60, deadline=None)
ANY = st.floats() | st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf, 1e300, 5e-324])
DRAWABLE = st.floats(min_value=-3e38, max_value=3e38)
POSITIVE = st.floats(min_value=1e-45, max_value=3e38)
POINTS = st.lists(st.tuples(st.integers(0, 10_000).map(float) | st.just(math.nan), ANY), max_size=30)
LINES = st.lists(st.builds(Curve, st.text(max_size=80), POINTS, st.booleans()), max_size=5)
PLACES = st.builds(AxisMarkers, st.text(max_size=60), st.lists(st.integers(0, 10_000).map(float) | ANY, max_size=20))
MARKS = st.lists(PLACES | st.builds(ReferenceLine, st.text(max_size=60), ANY), max_size=4)


def numbers_in(path: str) -> list[list[tuple[float, float]]]:
    """The points of each run of a drawn line."""
    runs = []
    for run in path.split("M")[1:]:
        plain = [float(number) for number in re.split(r"[L ]", run) if number]
        runs.append(list(zip(plain[::2], plain[1::2], strict=True)))
    return runs


def lines_of(chart: ElementTree.Element) -> list[list[list[tuple[float, float]]]]:
    return [numbers_in(path.attrib["d"]) for path in chart.findall(f"{SVG}path") if path.get("class") == "line"]


def is_round(tick: float) -> bool:
    digits = "".join(map(str, Decimal(repr(tick)).normalize().as_tuple().digits))
    return len(digits) <= 6  # the eye sees no tails


def check_ticks(axis: ChartAxis, most: int):
    assert list(axis.ticks) == sorted(set(axis.ticks)) and len(axis.ticks) <= most + 1
    assert all(map(is_round, axis.ticks))
    assert len(set(axis.texts)) == len(axis.texts) == len(axis.ticks)
    for tick, text in zip(axis.ticks, axis.texts, strict=True):
        assert math.isclose(float(text.replace(" ", "")), tick, rel_tol=1e-9, abs_tol=0.0)


@few
@given(st.lists(DRAWABLE, min_size=1, max_size=9), st.integers(4, 9))
@example([0.3, 0.7], 6)
@example([1e-4], 6)
@example([0.0], 6)
@example([0.4, 0.40001], 6)
@example([-3e38, 3e38], 6)
@example([1e-320, 0.0], 6)
@example([-1e-165], 4)
def test_a_linear_axis_covers_its_values_with_round_numbers(values: list[float], most: int):
    axis = build_enclosing_axis(values, most)
    check_ticks(axis, most)
    assert axis.low == axis.ticks[0] <= min(values) and max(values) <= axis.ticks[-1] == axis.high
    steps = [later - earlier for earlier, later in pairwise(axis.ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert all(len(text) * LEGEND_CHARACTER_WIDTH <= PLOT_LEFT_MARGIN + 8 for text in axis.texts)


@few
@given(st.lists(POSITIVE, min_size=1, max_size=9), st.integers(4, 9))
@example([1.0], 6)
@example([5.0, 5.0], 6)
@example([0.001, 1000.0], 6)
@example([1e-45, 3e38], 6)
def test_a_log_axis_covers_its_values_with_round_numbers(values: list[float], most: int):
    axis = build_enclosing_axis(values, most, log=True)
    check_ticks(axis, most)
    assert axis.low == axis.ticks[0] <= min(values) and max(values) <= axis.ticks[-1] == axis.high
    shares = [axis.share(value) for value in sorted(values)]
    assert shares == sorted(shares) and axis.share(axis.low) == 0 and axis.share(axis.high) == 1


@few
@given(st.lists(DRAWABLE | st.integers(0, 20_000).map(float), min_size=1, max_size=9))
@example([1.0])
@example([0.0])
@example([1.0, 3.0])
@example([1.0, 300.0])
@example([0.1, 0.95])
@example([3e38])
def test_an_inner_axis_ends_where_its_values_do(values: list[float]):
    axis = build_tight_axis(values)
    assert axis.low <= min(values) and max(values) <= axis.high and axis.low < axis.high
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks) and len(axis.ticks) <= 9
    assert len(set(axis.texts)) == len(axis.texts)
    if len(set(values)) > 1 and all(value == round(value) for value in values):
        assert all(tick == round(tick) for tick in axis.ticks)


def test_numbers_are_spelled_for_people():
    assert build_enclosing_axis([0.0, 1e-3]).texts == ("0", "0.0002", "0.0004", "0.0006", "0.0008", "0.0010")
    assert build_enclosing_axis([1e-4]).texts == ("0", "2e-5", "4e-5", "6e-5", "8e-5", "1e-4")
    assert build_enclosing_axis([-3.5, 12.0]).texts == ("-5", "0", "5", "10", "15")
    assert build_enclosing_axis([1e-4, 1e4], log=True).texts == ("1e-4", "0.01", "1", "100", "10 000")
    assert build_tight_axis([1.0, 10_000.0]).texts == ("2000", "4000", "6000", "8000", "10 000")


@few
@given(st.lists(st.tuples(st.integers(0, 99_999).map(float), ANY), max_size=60), st.integers(1, 50), st.booleans())
def test_decimation_keeps_ends_and_extremes(points: list[tuple[float, float]], times: int, log: bool):
    points = sorted(points * times, key=lambda point: point[0])
    runs = decimate_points(points, log, most=40)
    kept = [point for run in runs for point in run]
    good = [point for point in points if is_drawable(point[1], log)]
    assert all(runs) and len(kept) <= 40 and set(kept) <= set(good) and bool(kept) == bool(good)
    assert kept == sorted(kept, key=lambda point: point[0])
    if good:
        values, all_values = [value for _, value in kept], [value for _, value in good]
        assert (min(values), max(values)) == (min(all_values), max(all_values))
    for end in (0, -1):
        assert not points or not is_drawable(points[end][1], log) or kept[end] == points[end]
    assert len(points) > 40 or kept == good


def test_decimation_keeps_every_stretch_s_extremes_and_shows_a_gap():
    points = [(float(step), math.sin(step) * (1 + (step == 4321) * 99)) for step in range(10_000)]
    kept = decimate_points(points)
    assert len(kept) == 1 and len(kept[0]) <= MAX_CURVE_POINTS and (4321.0, points[4321][1]) in kept[0]
    gone = [(place, math.nan if 3000 <= place < 4000 or place % 7 == 0 else value) for place, value in points]
    before, after = decimate_points(gone)
    assert before[-1][0] < 3000 and after[0][0] >= 4000
    assert [len(run) for run in decimate_points([(0.0, 1.0), (1.0, math.nan), (2.0, 1.0), (3.0, 2.0)])] == [1, 2]


@few
@given(st.lists(ANY, min_size=1, max_size=200))
def test_medians_are_within_their_values_and_in_order(values: list[float]):
    points = [(float(place), value) for place, value in enumerate(values)]
    middle, length = compute_stretch_medians(points, 20)
    assert len(middle) <= 20 and middle == sorted(middle, key=lambda point: point[0])
    for place, value in middle:
        first = int(place) // length * length
        stretch = [one for one in values[first : first + length] if is_drawable(one)]
        assert min(stretch) <= value <= max(stretch)
        assert 2 * sum(one < value for one in stretch) <= len(stretch) >= 2 * sum(one > value for one in stretch)


@few
@given(LINES, MARKS, st.booleans(), st.sampled_from([WIDE_CHART_WIDTH, NARROW_CHART_WIDTH]), st.text())
@example(
    [Curve("a", [(1.0, 2.0)])],
    [AxisMarkers("p", [math.nan, 5.0]), ReferenceLine("r", math.inf)],
    False,
    NARROW_CHART_WIDTH,
    "</svg>",
)
def test_a_chart_is_well_formed_and_inside_its_box(
    series: list[Curve], marks: list[ChartMark], log: bool, width: float, title: str
):
    if not has_drawable_points(series, log):
        with pytest.raises(ValueError, match="no finite value"):
            render_line_chart(series, title, "step", log=log, marks=marks, width=width)
        return
    text = render_line_chart(series, title, "step", log=log, marks=marks, width=width)
    chart = ElementTree.fromstring(text)
    assert chart.attrib["role"] == "img" and chart.find(f"{SVG}title") is not None
    assert (chart.findtext(f"{SVG}desc") or "").replace("\n", " ").split() == escape_control_characters(
        describe_curves(series, log)
    ).split()
    height = float(chart.attrib["viewBox"].split()[3])
    tick_rows = [float(t.attrib["y"]) for t in chart.iter(f"{SVG}text")]
    assert max(tick_rows) <= height
    drawn = lines_of(chart)
    assert len(drawn) == sum(has_drawable_points([line], log) for line in series)
    for line in drawn:
        places = [x for run in line for x, _ in run]
        assert places == sorted(places) and len(places) <= 2 * MAX_CURVE_POINTS
        assert all(PLOT_LEFT_MARGIN <= x <= width - PLOT_RIGHT_MARGIN for x in places)
        ys = [y for run in line for _, y in run]
        assert max(ys) - min(ys) <= PLOT_HEIGHT and all(0 < y < height for y in ys)


@few
@given(LINES, MARKS, st.sampled_from([WIDE_CHART_WIDTH, NARROW_CHART_WIDTH]))
def test_legend_entries_never_overlap_each_other_nor_the_plot(
    series: list[Curve], marks: list[ChartMark], width: float
):
    series = [Curve("always", [(0.0, 1.0)]), *series]
    chart = ElementTree.fromstring(render_line_chart(series, "t", "step", marks=marks, width=width))
    keys = [text for text in chart.findall(f"{SVG}text") if text.get("class") == "key"]
    boxes = [(float(k.attrib["y"]), float(k.attrib["x"]), LEGEND_CHARACTER_WIDTH * len(k.text or "")) for k in keys]
    assert len(boxes) == (len(series) + len(marks) if len(series) + len(marks) > 1 else 0)
    for (row, left, length), (next_row, next_left, _) in pairwise(boxes):
        assert next_row > row or next_left >= left + length
    assert all(left + length <= width for _, left, length in boxes)
    plot_top = min(y for line in lines_of(chart) for run in line for _, y in run)
    assert all(row < plot_top for row, _, _ in boxes)


def test_nothing_that_is_not_finite_reaches_the_drawing():
    points = [(1.0, math.nan), (2.0, math.inf), (3.0, 0.5), (4.0, -math.inf), (5.0, 0.25)]
    marks = [AxisMarkers("not finite", [1.0, 2.0, 4.0]), ReferenceLine("nowhere", math.nan)]
    text = render_line_chart([Curve("loss", points)], "Loss", "step", marks=marks)
    assert not re.search(r"(?<![a-z])(nan|inf)(?![a-z])", text, re.IGNORECASE)
    assert "loss: 5 points, first 0.5, last 0.25, least 0.25, largest 0.5; 3 cannot be drawn." in text
    signs = next(path for path in ElementTree.fromstring(text) if path.get("class") == "places")
    assert signs.attrib["d"].count("M") == 3


def test_a_faint_line_has_the_colour_of_the_line_over_it_and_others_differ_without_colour():
    series = [Curve("raw", [(0.0, 1.0), (1.0, 2.0)], faint=True), Curve("smoothed", [(0.0, 1.0), (1.0, 2.0)])]
    series += [Curve("other", [(0.0, 1.0), (1.0, 2.0)])]
    chart = ElementTree.fromstring(render_line_chart(series, "Loss", "step"))
    raw, smoothed, other = (path for path in chart.findall(f"{SVG}path") if path.get("class") == "line")
    assert raw.get("style") == smoothed.get("style") != other.get("style")
    assert float(raw.attrib["stroke-width"]) < float(smoothed.attrib["stroke-width"])
    assert smoothed.get("stroke-dasharray") is None and other.get("stroke-dasharray")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 has it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1])
def test_every_curve_stands_out_from_the_paper(scheme: int):
    colours = re.findall(r"--curve-\d: (#\w{6})", (TEMPLATE_FOLDER / "page.css").read_text(encoding="utf-8"))
    assert len(colours) == 16 and len(set(colours)) == 16
    paper = luminance(("#ffffff", "#16181b")[scheme])
    for colour in colours[8 * scheme : 8 * scheme + 8]:
        low, high = sorted((luminance(colour), paper))
        assert (high + 0.05) / (low + 0.05) >= 3
