"""The ranges of a model's sites as inline SVG: readable by eye on light and dark pages, and by a screen reader.

Text and rules take the page's own colour (`currentColor`), so the chart needs to know nothing of the page. Colour
is never the only sign: a bar beyond the limit also crosses the marked line and carries its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finitune.render import format_value
from finitune.render.html import render_template

FP16_MAX = 65504.0  # the largest finite fp16 number
RANGE_BAR_COLOR, OVERFLOW_BAR_COLOR = "#3b82c4", "#e07a1f"

_LABEL_WIDTH, _PLOT_WIDTH, _VALUE_WIDTH = 240.0, 420.0, 70.0
_ROW_HEIGHT, _TOP_MARGIN, _BOTTOM_MARGIN = 18.0, 26.0, 40.0
_MAX_LABEL_CHARACTERS = 38
_MAX_TICKS = 8


@dataclass(frozen=True)
class RangeBar:
    """The measured magnitudes of one site: the largest (inf or NaN where it overflowed), and the least where known."""

    site: str
    amax: float
    least: float = 0.0

    @property
    def is_beyond(self) -> bool:
        return not self.amax <= FP16_MAX  # so that NaN is beyond, too


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
    rows = []
    for index, bar in enumerate(series):
        # the end of a long name: the blocks of a model differ there
        name = bar.site
        label = name if len(name) <= _MAX_LABEL_CHARACTERS else "..." + name[3 - _MAX_LABEL_CHARACTERS :]
        colour = OVERFLOW_BAR_COLOR if bar.is_beyond else RANGE_BAR_COLOR
        middle = _TOP_MARGIN + _ROW_HEIGHT * index + _ROW_HEIGHT / 2
        rows.append((bar, label, middle, axis.x(bar.least), axis.x(bar.amax), colour))
    return render_template(
        "range_chart.svg",
        width=_LABEL_WIDTH + _PLOT_WIDTH + _VALUE_WIDTH,
        height=floor + _BOTTOM_MARGIN,
        title=title,
        told=describe_ranges(series),
        plot_left=_LABEL_WIDTH,
        middle=_LABEL_WIDTH + _PLOT_WIDTH / 2,
        top=_TOP_MARGIN,
        floor=floor,
        decades=[(decade, axis.x(10.0**decade)) for decade in axis.decades()],
        rows=rows,
        limit=FP16_MAX,
        limit_x=axis.x(FP16_MAX),
    )


def describe_ranges(series: Sequence[RangeBar]) -> str:
    if not series:
        return "No site was measured."
    worst = max(series, key=lambda bar: math.inf if math.isnan(bar.amax) else bar.amax)
    beyond = sum(bar.is_beyond for bar in series)
    return (
        f"{beyond} of {len(series)} sites exceed {FP16_MAX:.0f}, the largest fp16 number. "
        f"The largest magnitude is {format_value(worst.amax)}, at {worst.site}."
    )
