"""Charts as inline SVG: readable by eye on light and dark pages, and by a screen reader through title and desc.

Text and rules take the page's own colour (`currentColor`), so the chart needs to know nothing of the page. Colour
is never the only sign: a bar beyond the limit also crosses the marked line and carries its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finitune.render import escape_markup, format_value

FP16_MAX = 65504.0  # the largest finite fp16 number
RANGE_BAR_COLOR, OVERFLOW_BAR_COLOR, _FP16_LIMIT_COLOR = "#3b82c4", "#e07a1f", "#e5484d"

_LABEL_WIDTH, _PLOT_WIDTH, _VALUE_WIDTH = 240.0, 420.0, 70.0
_RANGE_CHART_WIDTH = _LABEL_WIDTH + _PLOT_WIDTH + _VALUE_WIDTH
_ROW_HEIGHT, _BAR_HEIGHT, _TOP_MARGIN, _BOTTOM_MARGIN = 18.0, 10.0, 26.0, 40.0
_MAX_LABEL_CHARACTERS = 38
_MAX_TICKS = 8


@dataclass(frozen=True)
class RangeBar:
    """The measured magnitudes of one site: the largest (inf or NaN where it overflowed), and the least where known."""

    site: str
    amax: float
    least: float = 0.0


@dataclass(frozen=True)
class LogAxis:
    """A base-2 logarithmic axis over whole powers of two, `low` to `high`, as exponents."""

    low: int
    high: int

    @classmethod
    def over(cls, values: Sequence[float]) -> LogAxis:
        """The tightest axis that holds the finite positive `values`."""
        exponents = [math.log2(value) for value in values if value > 0 and math.isfinite(value)]
        return cls(math.floor(min(exponents)), math.ceil(max(exponents)) + 1)

    def x(self, value: float) -> float:
        """The horizontal place of `value` in the picture; what is outside the axis is put on its edge."""
        if math.isnan(value) or value == math.inf:
            exponent = float(self.high)
        else:
            exponent = math.log2(value) if value > 0 else float(self.low)
        share = (exponent - self.low) / (self.high - self.low)
        return _LABEL_WIDTH + _PLOT_WIDTH * min(1.0, max(0.0, share))

    def decades(self) -> list[int]:
        """The powers of ten on the axis, thinned until they can be read."""
        first, last = math.ceil(self.low * math.log10(2)), math.floor(self.high * math.log10(2))
        return list(range(first, last + 1, max(1, math.ceil((last - first + 1) / _MAX_TICKS))))


def render_range_chart(series: Sequence[RangeBar], title: str = "Largest magnitude at each site") -> str:
    """An SVG with one bar per site from its least to its largest magnitude, and fp16's limit as a line."""
    axis = LogAxis.over([FP16_MAX, 1.0, *(value for bar in series for value in (bar.least, bar.amax))])
    floor = _TOP_MARGIN + _ROW_HEIGHT * len(series)
    rows = [line for index, bar in enumerate(series) for line in _row(bar, axis, _TOP_MARGIN + _ROW_HEIGHT * index)]
    lines = [
        *build_svg_header(_RANGE_CHART_WIDTH, floor + _BOTTOM_MARGIN, title, _told(series)),
        *_grid(axis, floor),
        *rows,
        *_limit(axis, floor),
        "</svg>",
    ]
    return "\n".join(lines)


def build_svg_header(width: float, height: float, title: str, told: str) -> list[str]:
    """How each chart begins: its size, its title, and what it shows `told` in words."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        f"<title>{escape_markup(title)}</title>",
        f"<desc>{escape_markup(told)}</desc>",
    ]


def _row(bar: RangeBar, axis: LogAxis, top: float) -> Iterator[str]:
    left, right = axis.x(bar.least), axis.x(bar.amax)
    colour = OVERFLOW_BAR_COLOR if _is_beyond(bar) else RANGE_BAR_COLOR
    middle = top + _ROW_HEIGHT / 2
    yield "<g>"
    yield f"<title>{escape_markup(f'{bar.site}: {format_value(bar.least)} .. {format_value(bar.amax)}')}</title>"
    label = escape_markup(_shortened(bar.site))
    yield f'<text x="{_LABEL_WIDTH - 8:g}" y="{middle + 4:g}" text-anchor="end">{label}</text>'
    yield (
        f'<rect x="{left:.1f}" y="{middle - _BAR_HEIGHT / 2:g}" width="{max(1.0, right - left):.1f}" '
        f'height="{_BAR_HEIGHT:g}" rx="2" '
        f'fill="{colour}"/>'
    )
    amax = escape_markup(format_value(bar.amax))
    yield f'<text x="{_RANGE_CHART_WIDTH:g}" y="{middle + 4:g}" text-anchor="end">{amax}</text>'
    yield "</g>"


def _grid(axis: LogAxis, floor: float) -> Iterator[str]:
    for decade in axis.decades():
        x = axis.x(10.0**decade)
        yield f'<path d="M{x:.1f} {_TOP_MARGIN:g}V{floor:g}" stroke="currentColor" stroke-opacity="0.15"/>'
        yield (
            f'<text x="{x:.1f}" y="{floor + 16:g}" text-anchor="middle">'
            f'10<tspan dy="-4" font-size="8">{decade}</tspan></text>'
        )
    middle = _LABEL_WIDTH + _PLOT_WIDTH / 2
    yield f'<text x="{middle:g}" y="{floor + 34:g}" text-anchor="middle" opacity="0.7">magnitude</text>'


def _limit(axis: LogAxis, floor: float) -> Iterator[str]:
    x = axis.x(FP16_MAX)
    yield f'<path d="M{x:.1f} {_TOP_MARGIN - 6:g}V{floor:g}" stroke="{_FP16_LIMIT_COLOR}" stroke-width="1.5"/>'
    yield (
        f'<text x="{x:.1f}" y="{_TOP_MARGIN - 11:g}" text-anchor="middle" fill="{_FP16_LIMIT_COLOR}" font-weight="600">'
        f"fp16 ends at {FP16_MAX:.0f}</text>"
    )


def _told(series: Sequence[RangeBar]) -> str:
    """The chart in words."""
    if not series:
        return "No site was measured."
    worst = max(series, key=lambda bar: math.inf if math.isnan(bar.amax) else bar.amax)
    beyond = sum(map(_is_beyond, series))
    return (
        f"{beyond} of {len(series)} sites exceed {FP16_MAX:.0f}, the largest fp16 number. "
        f"The largest magnitude is {format_value(worst.amax)}, at {worst.site}."
    )


def _is_beyond(bar: RangeBar) -> bool:
    return not bar.amax <= FP16_MAX  # so that NaN is beyond, too


def _shortened(site: str) -> str:
    """The end of a long name: the blocks of a model differ there."""
    return site if len(site) <= _MAX_LABEL_CHARACTERS else "..." + site[3 - _MAX_LABEL_CHARACTERS :]
