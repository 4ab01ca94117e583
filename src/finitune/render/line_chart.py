"""Line charts as inline SVG, for runs of any length: axes of round numbers, a legend above, never a NaN in the text.

Colours are the page's own variables, so that one chart reads on light and dark. Colour is never the only sign: lines
differ by their dashes, too, and signs on the axis have a lane each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from finitune.render import escape_control_characters, format_value
from finitune.render.axes import ChartAxis, build_enclosing_axis, build_tight_axis, is_drawable
from finitune.render.html import render_template

WIDE_CHART_WIDTH, NARROW_CHART_WIDTH = 730.0, 350.0
PLOT_LEFT_MARGIN, PLOT_RIGHT_MARGIN, PLOT_HEIGHT, _PLOT_BOTTOM_MARGIN = 58.0, 22.0, 170.0, 40.0
_TITLE_HEIGHT, _LEGEND_ROW_HEIGHT, _PLOT_TOP_MARGIN = 18.0, 17.0, 10.0
LEGEND_CHARACTER_WIDTH, _SWATCH_WIDTH, _LEGEND_GAP = 6.6, 26.0, 12.0  # generous at this size: no font overlaps
_MAX_LEGEND_CHARACTERS = 46
_MARKER_LANE_HEIGHT = 9.0
MAX_CURVE_POINTS = 600
_MAX_CURVE_DOTS = 40
MAX_CURVE_MEDIANS = 60
_CURVE_COLOR_COUNT = 8
_CURVE_DASHES = ("", "7 3", "2 3", "9 3 2 3")

CurvePoint = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Values by place. A faint one lies under the next line and has its colour: what that one is a smoothing of."""

    label: str
    points: Sequence[CurvePoint]
    faint: bool = False


@dataclass(frozen=True)
class AxisMarkers:
    """Signs along the lower axis, in the colour of the page's variable of that name."""

    label: str
    at: Sequence[float]
    tone: str = "error"


@dataclass(frozen=True)
class ReferenceLine:
    """A line across at a value that matters."""

    label: str
    value: float


ChartMark = AxisMarkers | ReferenceLine


@dataclass(frozen=True)
class PlotFrame:
    """The plot's box in the picture, and the axes along it."""

    across: ChartAxis
    up: ChartAxis
    top: float
    width: float
    lanes: int = 0
    left: float = PLOT_LEFT_MARGIN

    @property
    def right(self) -> float:
        return self.width - PLOT_RIGHT_MARGIN

    @property
    def floor(self) -> float:
        return self.top + PLOT_HEIGHT

    @property
    def foot(self) -> float:
        """Where the numbers of the lower axis begin: below its lanes."""
        return self.floor + _MARKER_LANE_HEIGHT * self.lanes

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.across.share(value)

    def y(self, value: float) -> float:
        return self.floor - PLOT_HEIGHT * self.up.share(value)


def render_line_chart(
    series: Sequence[Curve],
    title: str,
    x_label: str,
    *,
    log: bool = False,
    marks: Sequence[ChartMark] = (),
    width: float = WIDE_CHART_WIDTH,
) -> str:
    """An SVG of `series` over `x_label`; what is not finite (or, on a `log` axis, not above zero) leaves a gap.

    Raises ValueError where there is nothing to draw; `has_drawable_points` tells before.
    """
    if not has_drawable_points(series, log):
        raise ValueError(f"{title}: there is no finite value to draw")
    values = [value for line in series for _, value in line.points if is_drawable(value, log)]
    values += [mark.value for mark in marks if isinstance(mark, ReferenceLine) and is_drawable(mark.value, log)]
    places = [place for line in series for place, _ in line.points]
    places += [place for mark in marks if isinstance(mark, AxisMarkers) for place in mark.at]
    across = build_tight_axis([place for place in places if is_drawable(place)], 8 if width == WIDE_CHART_WIDTH else 6)
    entries = [(line.label, style) for line, style in _style_curves(series)]
    entries += [(mark.label, _style_mark(mark)) for mark in marks]
    legend, rows = _lay_out_legend(entries, width)
    frame = PlotFrame(
        across,
        build_enclosing_axis(values, log=log),
        _TITLE_HEIGHT + _LEGEND_ROW_HEIGHT * rows + _PLOT_TOP_MARGIN,
        width,
        lanes=sum(isinstance(mark, AxisMarkers) for mark in marks),
    )
    return render_template(
        "line_chart.svg",
        width=width,
        height=frame.foot + _PLOT_BOTTOM_MARGIN,
        title=title,
        told=describe_curves(series, log),
        x_label=x_label,
        frame=frame,
        legend=legend,
        swatch=_SWATCH_WIDTH,
        marks=list(_draw_marks(frame, marks)),
        lines=[_draw_curve(line, style, frame) for line, style in _style_curves(series)],
    )


def has_drawable_points(series: Sequence[Curve], log: bool = False) -> bool:
    return any(is_drawable(value, log) and is_drawable(place) for line in series for place, value in line.points)


def describe_curves(series: Sequence[Curve], log: bool = False) -> str:
    said = []
    for line in series:
        values = [value for _, value in line.points if is_drawable(value, log)]
        left_out = len(line.points) - len(values)
        text = f"{line.label}: {len(line.points)} points"
        if values:
            first, last, least, most = map(format_value, (values[0], values[-1], min(values), max(values)))
            text += f", first {first}, last {last}, least {least}, largest {most}"
        said.append(f"{text}; {left_out} cannot be drawn" if left_out else text)
    return ". ".join(said) + "."


def decimate_points(
    points: Sequence[CurvePoint], log: bool = False, most: int = MAX_CURVE_POINTS
) -> list[list[CurvePoint]]:
    """`points`, in order, as runs of at most `most` points in all: the first, the last, and the least and the largest
    of each of equal stretches. A stretch without a drawable value parts two runs.
    """
    columns = len(points) if len(points) <= most else max(1, (most - 2) // 2)
    runs: list[list[CurvePoint]] = [[]]
    for column in range(columns):
        stretch = points[len(points) * column // columns : len(points) * (column + 1) // columns]
        kept = [point for point in stretch if is_drawable(point[0]) and is_drawable(point[1], log)]
        if not kept:
            runs.append([])
            continue
        ends = {0} if column == 0 else {len(kept) - 1} if column == columns - 1 else set()
        order = range(len(kept))
        extremes = {min(order, key=lambda i: kept[i][1]), max(order, key=lambda i: kept[i][1])}
        runs[-1] += [kept[place] for place in sorted(ends | extremes)]
    return [run for run in runs if run]


def compute_stretch_medians(
    points: Sequence[CurvePoint], most: int = MAX_CURVE_MEDIANS
) -> tuple[list[CurvePoint], int]:
    """The median of each of at most `most` equal stretches of `points`, at its middle, and the points in a stretch."""
    length = max(1, math.ceil(len(points) / most))
    stretches = [points[first : first + length] for first in range(0, len(points), length)]
    finite = [[point for point in stretch if is_drawable(point[1])] for stretch in stretches]
    return [(one[len(one) // 2][0], median(value for _, value in one)) for one in finite if one], length


@dataclass(frozen=True)
class StrokeStyle:
    """How a line is drawn."""

    colour: str
    dash: str = ""
    width: float = 2.0
    opacity: float = 1.0


@dataclass(frozen=True)
class DrawnCurve:
    """A curve as a path in its style; `dots` are its points where they are few, each to be shown with its numbers."""

    label: str
    style: StrokeStyle
    path: str
    dots: Sequence[CurvePoint]


def _style_curves(series: Sequence[Curve]) -> Iterator[tuple[Curve, StrokeStyle]]:
    """Each line with its own colour and dashes; a faint one has the next one's colour."""
    number = 0
    for line in series:
        colour = f"var(--curve-{number % _CURVE_COLOR_COUNT + 1}, currentColor)"
        if line.faint:
            yield line, StrokeStyle(colour, width=1.0, opacity=0.4)
        else:
            yield line, StrokeStyle(colour, _CURVE_DASHES[number % len(_CURVE_DASHES)])
            number += 1


def _style_mark(mark: ChartMark) -> StrokeStyle:
    if isinstance(mark, ReferenceLine):
        return StrokeStyle("var(--error, currentColor)", "5 4", 1.5)
    return StrokeStyle(f"var(--{mark.tone}, currentColor)")


def _draw_curve(line: Curve, style: StrokeStyle, frame: PlotFrame) -> DrawnCurve:
    """The line; a point alone is a path of no length, which its round ends make a dot."""
    points = sorted((point for point in line.points if is_drawable(point[0])), key=lambda point: point[0])
    runs = decimate_points(points, frame.up.log)
    path = ""
    for run in runs:
        places = [f"{frame.x(place):.1f} {frame.y(value):.1f}" for place, value in run]
        path += f"M{places[0]}L{' '.join(places[1:] or places)}"
    few = len(points) <= _MAX_CURVE_DOTS and not line.faint
    return DrawnCurve(line.label, style, path, [point for run in runs for point in run if few])


def _draw_marks(frame: PlotFrame, marks: Sequence[ChartMark]) -> Iterator[tuple[str, str, StrokeStyle]]:
    """Rules across the plot, and below it one lane of signs for each kind of place, as (class, path, style)."""
    lane = frame.floor + 2
    for mark in marks:
        if isinstance(mark, AxisMarkers):
            across = sorted({round(frame.x(place), 1) for place in mark.at if is_drawable(place)})
            signs = "".join(f"M{x:.1f} {lane:g}v{_MARKER_LANE_HEIGHT - 3:g}" for x in across)
            if signs:
                yield "places", signs, _style_mark(mark)
            lane += _MARKER_LANE_HEIGHT
        elif is_drawable(mark.value, frame.up.log):
            yield "rule", f"M{frame.left:g} {frame.y(mark.value):.1f}H{frame.right:g}", _style_mark(mark)


def _lay_out_legend(
    entries: Sequence[tuple[str, StrokeStyle]], width: float
) -> tuple[list[tuple[str, StrokeStyle, float, float]], int]:
    """What each line and each sign means, as (text, style, x, y) in rows above the plot, and the number of rows; none
    for one line alone.
    """
    if len(entries) < 2:
        return [], 0
    placed = []
    left, row = 0.0, 0
    for label, style in entries:
        text = escape_control_characters(label)
        text = text if len(text) <= _MAX_LEGEND_CHARACTERS else f"{text[: _MAX_LEGEND_CHARACTERS - 3]}..."
        room = _SWATCH_WIDTH + LEGEND_CHARACTER_WIDTH * len(text) + _LEGEND_GAP
        if left and left + room > width + _LEGEND_GAP:
            left, row = 0.0, row + 1
        placed.append((text, style, left, _TITLE_HEIGHT + _LEGEND_ROW_HEIGHT * row + 12))
        left += room
    return placed, row + 1
