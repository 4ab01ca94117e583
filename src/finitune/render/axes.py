"""Axes with round numbers: the pure arithmetic under a line chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finitune.render import DIGIT_GROUPING_START

_MAX_DRAWABLE = 3.5e38  # a little above what fp32 holds: nothing beyond it is a measurement
_MIN_DRAWABLE = 1e-45  # a little below fp32's least subnormal: nothing below it has a logarithm worth drawing
_FLAT_SHARE = 5e-3  # values that differ by less than this share of themselves are one value to the eye
_TICK_FACTORS = (1, 2, 5)


@dataclass(frozen=True)
class ChartAxis:
    """From `low` to `high`, with its round numbers and their spelling; even in the logarithm where `log`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    texts: tuple[str, ...]
    log: bool = False

    def labels(self) -> Iterator[tuple[float, str]]:
        return zip(self.ticks, self.texts, strict=True)

    def share(self, value: float) -> float:
        """How far along the axis `value` is: 0 at its low end, 1 at its high end, nothing beyond."""
        low, high, value = (
            (math.log10(max(v, _MIN_DRAWABLE)) if self.log else v) for v in (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class TickStep:
    """The distance of round numbers: `factor`, of 1, 2 and 5, times 10^`exponent`."""

    factor: int
    exponent: int

    @classmethod
    def parting(cls, span: float, most: int) -> TickStep:
        """The least step of which at most `most` - 1 fit into `span`."""
        exponent = math.floor(math.log10(span / most))
        steps = (cls(factor, power) for power in (exponent, exponent + 1) for factor in _TICK_FACTORS)
        return next(step for step in steps if span / step.at(1) <= most - 1)

    def at(self, count: int) -> float:
        """The round number at `count` steps from zero, as near to the decimal as a float can be."""
        return float(f"{count * self.factor}e{self.exponent}")

    def below(self, value: float) -> int:
        """The steps to the last round number that is not above `value`."""
        count = math.floor(value / self.at(1)) + 1
        return next(steps for steps in (count, count - 1, count - 2) if self.at(steps) <= value)

    def above(self, value: float) -> int:
        """The steps to the first round number that is not below `value`."""
        return -self.below(-value)


def is_drawable(value: float, log: bool = False) -> bool:
    return math.isfinite(value) and abs(value) <= _MAX_DRAWABLE and (value >= _MIN_DRAWABLE or not log)


def build_enclosing_axis(values: Sequence[float], most: int = 6, log: bool = False) -> ChartAxis:
    """The axis whose first and last of at most `most` + 1 round numbers enclose drawable `values`, at least one."""
    low, high = min(values), max(values)
    if log:
        ticks = _list_fine_ticks(low, high, most) or _list_decades(low, high, most)
        texts = (next(_format_ticks([tick], math.floor(math.log10(tick) + 1e-9))) for tick in ticks)
        return ChartAxis(ticks[0], ticks[-1], tuple(ticks), tuple(texts), log=True)
    if _is_flat(low, high, _FLAT_SHARE):  # shown against zero
        low, high = min(0.0, low), max(0.0, high)
    if high - low < _MIN_DRAWABLE:
        low, high = float(math.floor(low)), float(max(1, math.ceil(high)))
    step = TickStep.parting(high - low, most)
    ticks = [step.at(count) for count in range(step.below(low), step.above(high) + 1)]
    return ChartAxis(ticks[0], ticks[-1], tuple(ticks), tuple(_format_ticks(ticks, step.exponent)))


def build_tight_axis(values: Sequence[float], most: int = 8) -> ChartAxis:
    """The axis that ends where drawable `values` do, with round numbers inside; whole ones where all values are."""
    low, high = float(min(values)), float(max(values))
    if _is_flat(low, high, _FLAT_SHARE * _FLAT_SHARE):
        room = max(0.5, _FLAT_SHARE * abs(low))
        low, high = low - room, high + room
    step = TickStep.parting(high - low, most)
    if step.exponent < 0 and all(value == round(value) for value in values):
        step = TickStep(1, 0)
    ticks = [step.at(count) for count in range(step.above(low), step.below(high) + 1)]
    return ChartAxis(low, high, tuple(ticks), tuple(_format_ticks(ticks, step.exponent)))


def _is_flat(low: float, high: float, share: float) -> bool:
    return high - low <= max(_MIN_DRAWABLE, share * max(abs(low), abs(high)))


def _list_fine_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 times powers of ten around `low` and `high`; none where they are too many."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    if last - first > most + 2:
        return []
    steps = [float(f"{factor}e{exponent}") for exponent in range(first, last + 1) for factor in _TICK_FACTORS]
    begin = max(place for place, step in enumerate(steps) if step <= low)
    end = min(place for place, step in enumerate(steps) if step >= high and place > begin)
    return steps[begin : end + 1] if end - begin <= most else []


def _list_decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten around `low` and `high`, as many left out between them as it takes."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    first = max(exponent for exponent in exponents if float(f"1e{exponent}") <= low)
    last = min(exponent for exponent in exponents if float(f"1e{exponent}") >= high)
    stride = math.ceil((last - first) / most)
    return [float(f"1e{exponent}") for exponent in range(first, last + stride, stride)]


def _format_ticks(ticks: Sequence[float], exponent: int) -> Iterator[str]:
    """Round numbers with as many digits as a step of some tens to the `exponent` needs."""
    largest = max(map(abs, ticks), default=0.0)
    places = max(0, -exponent)
    for tick in ticks:
        if not tick:
            yield "0"
        elif 1e-3 <= largest < 1e6 and places < 6:
            yield (f"{tick:,.{places}f}" if abs(tick) >= DIGIT_GROUPING_START else f"{tick:.{places}f}").replace(
                ",", " "
            )
        else:
            digits = max(0, math.floor(math.log10(abs(tick)) + 1e-9) - exponent)
            mantissa, _, power = f"{tick:.{digits}e}".partition("e")
            yield f"{mantissa.rstrip('0').rstrip('.') if digits else mantissa}e{int(power)}"
