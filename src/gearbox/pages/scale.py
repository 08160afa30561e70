"""Choose ranges, ticks and labels of a chart's axes, and thin out long lines. Nothing here draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

MAX_POINTS = 600  # of one drawn line; a longer one shows the extremes of each bucket of steps
LOG_RATIO = 30.0  # a scale becomes logarithmic if its largest number is this many times the smallest
MEAN_SHARE = 50  # a moving mean covers this part of the steps
LEAST_MEAN = 5  # steps
FRACTION = 2**100  # the smallest difference that a moving mean keeps is 1 divided by this
EXPONENT_FROM = 1e15  # larger numbers are written with an exponent

Points = list[tuple[float, float]]
BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
COUNT_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = MAX_POINTS) -> Points:
    """Return at most about `most` points: of each bucket of neighbours the lowest and the highest, so that peaks stay.

    A value that is not finite stays as a gap if nothing is thinned out, and is left out otherwise.
    """
    if len(xs) <= most:
        return list(zip(xs, ys, strict=True))
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    size = -(-2 * len(pairs) // most) or 1
    points: Points = []
    for first in range(0, len(pairs), size):
        bucket = pairs[first : first + size]
        heights = [y for _, y in bucket]
        places = {heights.index(min(heights)), heights.index(max(heights))}
        points += [bucket[place] for place in sorted(places)]
    return points + pairs[-1:] if points and points[-1] != pairs[-1] else points


def moving_mean(ys: Sequence[float]) -> tuple[list[float], int]:
    """Return the mean of each value and its neighbours, and the number of values in each mean. Gaps do not count."""
    size = max(LEAST_MEAN, len(ys) // MEAN_SHARE) | 1
    finite = [math.isfinite(y) for y in ys]
    # Whole numbers, because one huge value would take the digits of all floats after it.
    whole = (int(y * FRACTION) if is_finite else 0 for y, is_finite in zip(ys, finite, strict=True))
    sums = [0, *accumulate(whole)]
    counts = [0, *accumulate(finite)]
    means = []
    for place in range(len(ys)):
        reach = min(size // 2, place)  # symmetric at the steep start; the last mean is that of several steps
        first, end = place - reach, min(place + reach + 1, len(ys))
        count = counts[end] - counts[first]
        means.append((sums[end] - sums[first]) / (count * FRACTION) if count else math.nan)
    return means, size


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], from_zero: bool = False, log: bool | None = None) -> Scale:
        """Return a scale that shows all finite values. With `log` None it is logarithmic if the values need it."""
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if log or (log is None and low > 0 and high / low > LOG_RATIO):
            low = min((value for value in finite if value > 0), default=1e-9)
            high = max(high, low)
            spread = math.log10(high / low) or 1.0
            return cls(low / 10 ** (0.05 * spread), high * 10 ** (0.05 * spread), is_log=True)
        if from_zero and low >= 0:
            return cls(0.0, high * 1.06 or 1.0)
        margin = 0.05 * (high - low) or abs(high) / 10 or 1.0
        return cls(low - margin, high + margin)

    def place(self, value: float) -> float:
        """Return the place of a value on the axis, from 0 to 1. A logarithmic axis shows what is below it at 0."""
        if self.is_log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6, unit: str = "") -> list[float]:
        """Return at most `most` round numbers within the scale, and at least two where there is room."""
        if unit == "bytes":  # round in MiB or GiB
            size = _byte_unit(self.high)[1]
            return [tick * size for tick in Scale(self.low / size, self.high / size, self.is_log).ticks(most)]
        if self.is_log:
            found = list(self._log_ticks(most))
            if len(found) > 1:
                return found
        for step in _round_steps((self.high - self.low) / most):
            first = math.ceil(self.low / step - 1e-9)
            ticks = [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
            if len(ticks) <= most:
                return ticks
        return []

    def _log_ticks(self, most: int) -> Iterator[float]:
        """Yield powers of ten, with 2 and 5 between them where there is room."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) <= most:
                yield from found
                return
        yield from found[:: -(-len(found) // most)]


def _round_steps(least: float) -> Iterator[float]:
    """Yield 1, 2 and 5 times a power of ten, from `least` on."""
    power = math.floor(math.log10(least)) if least > 0 else 0
    for exponent in range(power, power + 4):
        for factor in (1, 2, 5):
            if (step := factor * 10.0**exponent) >= least * (1 - 1e-9):
                yield step


def tick_labels(ticks: list[float], unit: str = "") -> list[str]:
    """Return the ticks' labels in one unit and with the digits that tell neighbours apart."""
    if not ticks:
        return []
    largest = max(map(abs, ticks))
    if unit == "bytes":
        name, factor = _byte_unit(largest)
        return [_plain(tick / factor) + (f" {name}" if tick else "") for tick in ticks]
    if unit == "percent":
        return [f"{_plain(100 * tick)} %" for tick in ticks]
    if 1e-3 <= largest < 10_000 and min(map(abs, filter(None, ticks)), default=1) >= 1e-5:
        return [f"{tick:,.0f}" if tick >= 1000 else f"{tick:.6g}" for tick in ticks]
    return [compact(tick) for tick in ticks]


def _byte_unit(largest: float) -> tuple[str, int]:
    """Return the name and the size of the unit for bytes up to this number."""
    return next(((name, size) for name, size in BYTE_UNITS if largest >= size), ("B", 1))


def compact(number: float) -> str:
    """Return a short form of a number, such as 20k, 0.05 or 2e-6."""
    if abs(number) >= EXPONENT_FROM:
        return f"{number:.3g}"
    for name, size in COUNT_UNITS if abs(number) >= 10_000 else ():
        if abs(number) >= size:
            return _plain(number / size) + name
    if number and abs(number) < 1e-3:
        exponent = math.floor(math.log10(abs(number)) + 1e-9)
        return f"{_plain(number / 10.0**exponent)}e{exponent}"
    return f"{number:,.0f}" if abs(number) >= 1000 else _plain(number)


def _plain(number: float) -> str:
    """Return a number with at most four significant digits, without zeros at its end."""
    text = f"{number:.4g}"
    return f"{number:.0f}" if "e" in text else text


def value_label(value: float, unit: str = "") -> str:
    """Return one measured value for a legend or a tile."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "bytes":
        name, size = _byte_unit(abs(value))
        return f"{_digits(value / size)} {name}"
    if unit == "percent":
        return f"{100 * value:.1f} %"
    if unit == "s":
        return f"{_digits(value)} s"
    return _digits(value) if abs(value) >= 1e-3 or not value else f"{value:.2e}"


def _digits(value: float) -> str:
    """Return a number with three digits, or all whole ones."""
    if abs(value) >= EXPONENT_FROM:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{3 if abs(value) < 999.5 else 4}g}"
