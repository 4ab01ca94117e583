"""Line charts as inline SVG, for runs of any length: axes of round numbers, a legend above, never a NaN in the text.

Colours are the page's own variables, so that one chart reads on light and dark. Colour is never the only sign: lines
differ by their dashes, too, and signs on the axis have a lane each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from finitune.render import escaped, printable, spelled
from finitune.render.axes import Axis, covering, drawable, within
from finitune.render.svg import opening

WIDE, NARROW = 730.0, 350.0
LEFT, RIGHT, HEIGHT, BELOW = 58.0, 22.0, 170.0, 40.0
TITLE, LEGEND_ROW, ABOVE_PLOT = 18.0, 17.0, 10.0
CHARACTER, SWATCH, GAP = 6.6, 26.0, 12.0  # a generous width of a character at this size: no font overlaps
MOST_LABEL = 46
LANE = 9.0
MOST_POINTS = 600
MOST_DOTS = 40
MOST_MEDIANS = 60
COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3")

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Values by place. A faint one lies under the next line and has its colour: what that one is a smoothing of."""

    label: str
    points: Sequence[Point]
    faint: bool = False


@dataclass(frozen=True)
class Places:
    """Signs along the lower axis, in the colour of the page's variable of that name."""

    label: str
    at: Sequence[float]
    tone: str = "error"


@dataclass(frozen=True)
class Rule:
    """A line across at a value that matters."""

    label: str
    value: float


Mark = Places | Rule


@dataclass(frozen=True)
class Frame:
    """The plot's box in the picture, and the axes along it."""

    across: Axis
    up: Axis
    top: float
    width: float
    lanes: int = 0

    @property
    def right(self) -> float:
        """The right edge of the plot."""
        return self.width - RIGHT

    @property
    def floor(self) -> float:
        """The lower edge of the plot."""
        return self.top + HEIGHT

    @property
    def foot(self) -> float:
        """Where the numbers of the lower axis begin: below its lanes."""
        return self.floor + LANE * self.lanes

    def x(self, value: float) -> float:
        """The horizontal place of a value."""
        return LEFT + (self.right - LEFT) * self.across.share(value)

    def y(self, value: float) -> float:
        """The vertical place of a value."""
        return self.floor - HEIGHT * self.up.share(value)


def line_chart(
    series: Sequence[Line],
    title: str,
    x_label: str,
    *,
    log: bool = False,
    marks: Sequence[Mark] = (),
    width: float = WIDE,
) -> str:
    """An SVG of `series` over `x_label`; what is not finite (or, on a `log` axis, not above zero) leaves a gap.

    Raises ValueError where there is nothing to draw; `worth_drawing` tells before.
    """
    if not worth_drawing(series, log):
        raise ValueError(f"{title}: there is no finite value to draw")
    values = [value for line in series for _, value in line.points if drawable(value, log)]
    values += [mark.value for mark in marks if isinstance(mark, Rule) and drawable(mark.value, log)]
    places = [place for line in series for place, _ in line.points]
    places += [place for mark in marks if isinstance(mark, Places) for place in mark.at]
    across = within([place for place in places if drawable(place)], 8 if width == WIDE else 6)
    key, rows = _legend(series, marks, width)
    lanes = sum(isinstance(mark, Places) for mark in marks)
    frame = Frame(across, covering(values, log=log), TITLE + LEGEND_ROW * rows + ABOVE_PLOT, width, lanes)
    lines = [
        *opening(width, frame.foot + BELOW, title, told(series, log)),
        f'<text x="0" y="12" font-size="12" font-weight="600">{escaped(title)}</text>',
        *key,
        *_grid(frame, x_label),
        *_marked(frame, marks),
        *(part for line, style in _styled(series) for part in _drawn(line, style, frame)),
        "</svg>",
    ]
    return "\n".join(lines)


def worth_drawing(series: Sequence[Line], log: bool = False) -> bool:
    """Whether any point has a place on the axes."""
    return any(drawable(value, log) and drawable(place) for line in series for place, value in line.points)


def told(series: Sequence[Line], log: bool = False) -> str:
    """The chart in words."""
    said = []
    for line in series:
        values = [value for _, value in line.points if drawable(value, log)]
        left_out = len(line.points) - len(values)
        text = f"{line.label}: {len(line.points)} points"
        if values:
            first, last, least, most = map(spelled, (values[0], values[-1], min(values), max(values)))
            text += f", first {first}, last {last}, least {least}, largest {most}"
        said.append(f"{text}; {left_out} cannot be drawn" if left_out else text)
    return ". ".join(said) + "."


def decimated(points: Sequence[Point], log: bool = False, most: int = MOST_POINTS) -> list[list[Point]]:
    """`points`, in order, as runs of at most `most` points in all: the first, the last, and the least and the largest
    of each of equal stretches. A stretch without a drawable value parts two runs.
    """
    columns = len(points) if len(points) <= most else max(1, (most - 2) // 2)
    runs: list[list[Point]] = [[]]
    for column in range(columns):
        stretch = points[len(points) * column // columns : len(points) * (column + 1) // columns]
        kept = [point for point in stretch if drawable(point[0]) and drawable(point[1], log)]
        if not kept:
            runs.append([])
            continue
        ends = {0} if column == 0 else {len(kept) - 1} if column == columns - 1 else set()
        order = range(len(kept))
        extremes = {min(order, key=lambda i: kept[i][1]), max(order, key=lambda i: kept[i][1])}
        runs[-1] += [kept[place] for place in sorted(ends | extremes)]
    return [run for run in runs if run]


def medians(points: Sequence[Point], most: int = MOST_MEDIANS) -> tuple[list[Point], int]:
    """The median of each of at most `most` equal stretches of `points`, at its middle, and the points in a stretch."""
    length = max(1, math.ceil(len(points) / most))
    stretches = [points[first : first + length] for first in range(0, len(points), length)]
    finite = [[point for point in stretch if drawable(point[1])] for stretch in stretches]
    return [(one[len(one) // 2][0], median(value for _, value in one)) for one in finite if one], length


@dataclass(frozen=True)
class Style:
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


RULE = Style("var(--error, currentColor)", "5 4", 1.5, 1.0)


def _styled(series: Sequence[Line]) -> Iterator[tuple[Line, Style]]:
    """Each line with its own colour and dashes; a faint one has the next one's colour."""
    number = 0
    for line in series:
        colour = f"var(--curve-{number % COLOURS + 1}, currentColor)"
        if line.faint:
            yield line, Style(colour, "", 1.0, 0.4)
        else:
            yield line, Style(colour, DASHES[number % len(DASHES)], 2.0, 1.0)
            number += 1


def _drawn(line: Line, style: Style, frame: Frame) -> Iterator[str]:
    """A line, and, where its points are few, each of them with its numbers."""
    points = sorted((point for point in line.points if drawable(point[0])), key=lambda point: point[0])
    runs = decimated(points, frame.up.log)
    few = len(points) <= MOST_DOTS and not line.faint
    if runs:
        yield f'<path class="line" d="{"".join(_path(run, frame) for run in runs)}" {style.attributes()}/>'
    for place, value in (point for run in runs for point in run if few):
        text = escaped(f"{line.label}: {spelled(value)} at {spelled(place)}")
        yield (
            f'<circle cx="{frame.x(place):.1f}" cy="{frame.y(value):.1f}" r="2.5" style="fill:{style.colour}">'
            f"<title>{text}</title></circle>"
        )


def _path(run: Sequence[Point], frame: Frame) -> str:
    """A run as a path; a point alone is a path of no length, which its round ends make a dot."""
    places = [f"{frame.x(place):.1f} {frame.y(value):.1f}" for place, value in run]
    return f"M{places[0]}L{' '.join(places[1:] or places)}"


def _grid(frame: Frame, x_label: str) -> Iterator[str]:
    """Rules and numbers of both axes."""
    for value, text in zip(frame.up.ticks, frame.up.texts, strict=True):
        y = frame.y(value)
        yield f'<path d="M{LEFT:g} {y:.1f}H{frame.right:g}" stroke="currentColor" stroke-opacity="0.12"/>'
        yield f'<text x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end" opacity="0.75">{text}</text>'
    yield f'<path d="M{LEFT:g} {frame.floor:g}H{frame.right:g}" stroke="currentColor" stroke-opacity="0.5"/>'
    for value, text in zip(frame.across.ticks, frame.across.texts, strict=True):
        x = frame.x(value)
        yield f'<path d="M{x:.1f} {frame.foot:g}v4" stroke="currentColor" stroke-opacity="0.5"/>'
        yield f'<text x="{x:.1f}" y="{frame.foot + 16:g}" text-anchor="middle" opacity="0.75">{text}</text>'
    middle = (LEFT + frame.right) / 2
    yield f'<text x="{middle:g}" y="{frame.foot + 33:g}" text-anchor="middle" opacity="0.75">{escaped(x_label)}</text>'


def _marked(frame: Frame, marks: Sequence[Mark]) -> Iterator[str]:
    """Rules across the plot, and below it one lane of signs for each kind of place."""
    lane = frame.floor + 2
    for mark in marks:
        if isinstance(mark, Places):
            across = sorted({round(frame.x(place), 1) for place in mark.at if drawable(place)})
            signs = "".join(f"M{x:.1f} {lane:g}v{LANE - 3:g}" for x in across)
            yield f'<path class="places" d="{signs}" {_tone(mark).attributes()}/>' if signs else ""
            lane += LANE
        elif drawable(mark.value, frame.up.log):
            along = f"M{LEFT:g} {frame.y(mark.value):.1f}H{frame.right:g}"
            yield f'<path class="rule" d="{along}" {RULE.attributes()}/>'


def _tone(mark: Places) -> Style:
    return Style(f"var(--{mark.tone}, currentColor)", "", 2.0, 1.0)


def _legend(series: Sequence[Line], marks: Sequence[Mark], width: float) -> tuple[list[str], int]:
    """What each line and each sign means, in rows above the plot, and the number of rows; none for one line alone."""
    entries = [(line.label, style) for line, style in _styled(series)]
    entries += [(mark.label, RULE if isinstance(mark, Rule) else _tone(mark)) for mark in marks]
    if len(entries) < 2:
        return [], 0
    lines: list[str] = []
    left, row = 0.0, 0
    for label, style in entries:
        text = printable(label)
        text = text if len(text) <= MOST_LABEL else f"{text[: MOST_LABEL - 3]}..."
        room = SWATCH + CHARACTER * len(text) + GAP
        if left and left + room > width + GAP:
            left, row = 0.0, row + 1
        y = TITLE + LEGEND_ROW * row + 12
        lines.append(f'<path d="M{left:.1f} {y - 4:g}h{SWATCH - 6:g}" {style.attributes()}/>')
        lines.append(f'<text class="key" x="{left + SWATCH:.1f}" y="{y:g}">{escaped(text)}</text>')
        left += room
    return lines, row + 1
