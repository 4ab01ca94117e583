"""Line charts as inline SVG, for runs of any length: axes of round numbers, a legend above, never a NaN in the text.

Colours are the page's own variables, so that one chart reads on light and dark. Colour is never the only sign: lines
differ by their dashes, too, and signs on the axis have a lane each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from finitune.render import escape_control_characters, escape_markup, format_value
from finitune.render.axes import ChartAxis, build_enclosing_axis, build_tight_axis, is_drawable
from finitune.render.range_chart import build_svg_header

WIDE_CHART_WIDTH, NARROW_CHART_WIDTH = 730.0, 350.0
PLOT_LEFT_MARGIN, PLOT_RIGHT_MARGIN, PLOT_HEIGHT, _PLOT_BOTTOM_MARGIN = 58.0, 22.0, 170.0, 40.0
_TITLE_HEIGHT, _LEGEND_ROW_HEIGHT, _PLOT_TOP_MARGIN = 18.0, 17.0, 10.0
LEGEND_CHARACTER_WIDTH, _SWATCH_WIDTH, _LEGEND_GAP = (
    6.6,
    26.0,
    12.0,
)  # a generous width of a character at this size: no font overlaps
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

    @property
    def right(self) -> float:
        """The right edge of the plot."""
        return self.width - PLOT_RIGHT_MARGIN

    @property
    def floor(self) -> float:
        """The lower edge of the plot."""
        return self.top + PLOT_HEIGHT

    @property
    def foot(self) -> float:
        """Where the numbers of the lower axis begin: below its lanes."""
        return self.floor + _MARKER_LANE_HEIGHT * self.lanes

    def x(self, value: float) -> float:
        """The horizontal place of a value."""
        return PLOT_LEFT_MARGIN + (self.right - PLOT_LEFT_MARGIN) * self.across.share(value)

    def y(self, value: float) -> float:
        """The vertical place of a value."""
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
    key, rows = _legend(series, marks, width)
    lanes = sum(isinstance(mark, AxisMarkers) for mark in marks)
    frame = PlotFrame(
        across,
        build_enclosing_axis(values, log=log),
        _TITLE_HEIGHT + _LEGEND_ROW_HEIGHT * rows + _PLOT_TOP_MARGIN,
        width,
        lanes,
    )
    lines = [
        *build_svg_header(width, frame.foot + _PLOT_BOTTOM_MARGIN, title, describe_curves(series, log)),
        f'<text x="0" y="12" font-size="12" font-weight="600">{escape_markup(title)}</text>',
        *key,
        *_grid(frame, x_label),
        *_marked(frame, marks),
        *(part for line, style in _styled(series) for part in _drawn(line, style, frame)),
        "</svg>",
    ]
    return "\n".join(lines)


def has_drawable_points(series: Sequence[Curve], log: bool = False) -> bool:
    """Whether any point has a place on the axes."""
    return any(is_drawable(value, log) and is_drawable(place) for line in series for place, value in line.points)


def describe_curves(series: Sequence[Curve], log: bool = False) -> str:
    """The chart in words."""
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
    dash: str
    width: float
    opacity: float

    def attributes(self) -> str:
        """The same as SVG has it."""
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return (
            f'style="stroke:{self.colour}" fill="none" stroke-width="{self.width:g}" stroke-opacity="{self.opacity:g}"'
            f' stroke-linejoin="round" stroke-linecap="{"butt" if self.dash else "round"}"{dash}'
        )


_REFERENCE_LINE_STYLE = StrokeStyle("var(--error, currentColor)", "5 4", 1.5, 1.0)


def _styled(series: Sequence[Curve]) -> Iterator[tuple[Curve, StrokeStyle]]:
    """Each line with its own colour and dashes; a faint one has the next one's colour."""
    number = 0
    for line in series:
        colour = f"var(--curve-{number % _CURVE_COLOR_COUNT + 1}, currentColor)"
        if line.faint:
            yield line, StrokeStyle(colour, "", 1.0, 0.4)
        else:
            yield line, StrokeStyle(colour, _CURVE_DASHES[number % len(_CURVE_DASHES)], 2.0, 1.0)
            number += 1


def _drawn(line: Curve, style: StrokeStyle, frame: PlotFrame) -> Iterator[str]:
    """A line, and, where its points are few, each of them with its numbers."""
    points = sorted((point for point in line.points if is_drawable(point[0])), key=lambda point: point[0])
    runs = decimate_points(points, frame.up.log)
    few = len(points) <= _MAX_CURVE_DOTS and not line.faint
    if runs:
        yield f'<path class="line" d="{"".join(_path(run, frame) for run in runs)}" {style.attributes()}/>'
    for place, value in (point for run in runs for point in run if few):
        text = escape_markup(f"{line.label}: {format_value(value)} at {format_value(place)}")
        yield (
            f'<circle cx="{frame.x(place):.1f}" cy="{frame.y(value):.1f}" r="2.5" style="fill:{style.colour}">'
            f"<title>{text}</title></circle>"
        )


def _path(run: Sequence[CurvePoint], frame: PlotFrame) -> str:
    """A run as a path; a point alone is a path of no length, which its round ends make a dot."""
    places = [f"{frame.x(place):.1f} {frame.y(value):.1f}" for place, value in run]
    return f"M{places[0]}L{' '.join(places[1:] or places)}"


def _grid(frame: PlotFrame, x_label: str) -> Iterator[str]:
    """Rules and numbers of both axes."""
    for value, text in zip(frame.up.ticks, frame.up.texts, strict=True):
        y = frame.y(value)
        yield f'<path d="M{PLOT_LEFT_MARGIN:g} {y:.1f}H{frame.right:g}" stroke="currentColor" stroke-opacity="0.12"/>'
        yield f'<text x="{PLOT_LEFT_MARGIN - 7:g}" y="{y + 4:.1f}" text-anchor="end" opacity="0.75">{text}</text>'
    axis = f"M{PLOT_LEFT_MARGIN:g} {frame.floor:g}H{frame.right:g}"
    yield f'<path d="{axis}" stroke="currentColor" stroke-opacity="0.5"/>'
    for value, text in zip(frame.across.ticks, frame.across.texts, strict=True):
        x = frame.x(value)
        yield f'<path d="M{x:.1f} {frame.foot:g}v4" stroke="currentColor" stroke-opacity="0.5"/>'
        yield f'<text x="{x:.1f}" y="{frame.foot + 16:g}" text-anchor="middle" opacity="0.75">{text}</text>'
    middle = (PLOT_LEFT_MARGIN + frame.right) / 2
    label = escape_markup(x_label)
    yield f'<text x="{middle:g}" y="{frame.foot + 33:g}" text-anchor="middle" opacity="0.75">{label}</text>'


def _marked(frame: PlotFrame, marks: Sequence[ChartMark]) -> Iterator[str]:
    """Rules across the plot, and below it one lane of signs for each kind of place."""
    lane = frame.floor + 2
    for mark in marks:
        if isinstance(mark, AxisMarkers):
            across = sorted({round(frame.x(place), 1) for place in mark.at if is_drawable(place)})
            signs = "".join(f"M{x:.1f} {lane:g}v{_MARKER_LANE_HEIGHT - 3:g}" for x in across)
            yield f'<path class="places" d="{signs}" {_tone(mark).attributes()}/>' if signs else ""
            lane += _MARKER_LANE_HEIGHT
        elif is_drawable(mark.value, frame.up.log):
            along = f"M{PLOT_LEFT_MARGIN:g} {frame.y(mark.value):.1f}H{frame.right:g}"
            yield f'<path class="rule" d="{along}" {_REFERENCE_LINE_STYLE.attributes()}/>'


def _tone(mark: AxisMarkers) -> StrokeStyle:
    return StrokeStyle(f"var(--{mark.tone}, currentColor)", "", 2.0, 1.0)


def _legend(series: Sequence[Curve], marks: Sequence[ChartMark], width: float) -> tuple[list[str], int]:
    """What each line and each sign means, in rows above the plot, and the number of rows; none for one line alone."""
    entries = [(line.label, style) for line, style in _styled(series)]
    entries += [
        (mark.label, _REFERENCE_LINE_STYLE if isinstance(mark, ReferenceLine) else _tone(mark)) for mark in marks
    ]
    if len(entries) < 2:
        return [], 0
    lines: list[str] = []
    left, row = 0.0, 0
    for label, style in entries:
        text = escape_control_characters(label)
        text = text if len(text) <= _MAX_LEGEND_CHARACTERS else f"{text[: _MAX_LEGEND_CHARACTERS - 3]}..."
        room = _SWATCH_WIDTH + LEGEND_CHARACTER_WIDTH * len(text) + _LEGEND_GAP
        if left and left + room > width + _LEGEND_GAP:
            left, row = 0.0, row + 1
        y = _TITLE_HEIGHT + _LEGEND_ROW_HEIGHT * row + 12
        lines.append(f'<path d="M{left:.1f} {y - 4:g}h{_SWATCH_WIDTH - 6:g}" {style.attributes()}/>')
        lines.append(f'<text class="key" x="{left + _SWATCH_WIDTH:.1f}" y="{y:g}">{escape_markup(text)}</text>')
        left += room
    return lines, row + 1
