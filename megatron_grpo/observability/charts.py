"""SVG curves over training steps for the report: drawn here, so that the report needs no network.

Every function returns an HTML ``<figure>``. Colours are the CSS variables ``--c0`` to ``--c4``; text is
escaped here. The pages that hold the figures bring their style (``report.py``).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import NamedTuple

MAX_BINS = 200  # columns of a chart; those of a longer run show mean and range of several steps
MAX_DOTS = 60  # points are marked one by one up to this number
WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 12, 30


class Bin(NamedTuple):
    """Mean and range of the finite values of one bin; NaN where it has none."""

    mean: float
    low: float
    high: float


_EMPTY = Bin(math.nan, math.nan, math.nan)
type _Bins = dict[int, Bin]
type _Binned = Sequence[tuple[str, _Bins]]


@dataclass
class Series:
    """One metric: ``values[i]`` at ``steps[i]``, increasing steps. NaN is a gap in the curve; a step that is
    left out (an evaluation every 10 steps) is not: the curve goes straight to the next value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class Axis:
    """The step axis, common to all charts of a report: bins of ``width`` steps from ``first`` to ``last``."""

    first: int
    last: int

    @property
    def width(self) -> int:
        return math.ceil((self.last - self.first + 1) / MAX_BINS)

    def x(self, step: float) -> float:
        """Horizontal position of a step; half a step of room on both sides, so a single step is a place."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first + 0.5) / (self.last - self.first + 1)

    def edges(self, index: int) -> tuple[int, int]:
        """First and last step of bin ``index``."""
        start = self.first + index * self.width
        return start, min(start + self.width - 1, self.last)

    def center(self, index: int) -> float:
        start, end = self.edges(index)
        return self.x((start + end) / 2)

    def bins(self, series: Series) -> _Bins:
        """What each bin shows. A bin without any value of the series, NaN or not, is left out."""
        members: dict[int, list[float]] = {}
        for step, value in zip(series.steps, series.values, strict=True):
            finite = members.setdefault((step - self.first) // self.width, [])
            if math.isfinite(value):
                finite.append(value)
        return {
            index: Bin(sum(finite) / len(finite), min(finite), max(finite)) if finite else _EMPTY
            for index, finite in members.items()
        }


def line_chart(title: str, axis: Axis, series: Sequence[tuple[str, Series]], *, smooth: bool = False) -> str:
    """Curves over steps.

    Args:
        title: heading of the figure.
        axis: the step axis.
        series: (label, values) of each curve, at most five.
        smooth: draw the curve faint and its moving average above it.
    """
    binned = [(label, axis.bins(values)) for label, values in series]
    shown = [bin for _, bins in binned for bin in bins.values() if math.isfinite(bin.mean)]
    if not shown:
        return _figure(title, axis, binned, [])
    scale = _Scale.around(min(bin.low for bin in shown), max(bin.high for bin in shown))
    body = [_grid(axis, scale)]
    for number, (_, bins) in enumerate(binned):
        colour = f"var(--c{number})"
        smoothed = smooth and len(bins) > MAX_DOTS and axis.width == 1
        if axis.width > 1:
            body.append(_range(axis, scale, bins, colour))
        body.append(_curve(axis, scale, bins, colour, "raw" if smoothed else "curve"))
        if smoothed:
            body.append(_curve(axis, scale, _moving_average(bins), colour, "curve"))
    return _figure(title, axis, binned, body)


def stacked_chart(title: str, axis: Axis, series: Sequence[tuple[str, Series]]) -> str:
    """The parts of a whole (seconds of each phase) over steps, the first at the bottom; NaN counts as 0."""
    binned = [(label, axis.bins(values)) for label, values in series]
    indices = sorted({index for _, bins in binned for index in bins})
    parts = [[_or_zero(bins.get(index, _EMPTY).mean) for index in indices] for _, bins in binned]
    totals = [sum(column) for column in zip(*parts, strict=True)]
    if not any(totals):
        return _figure(title, axis, binned, [])
    scale = _Scale.around(0.0, max(totals))
    body = [_grid(axis, scale)]
    floor = [0.0] * len(indices)
    for number, part in enumerate(parts):
        top = [below + value for below, value in zip(floor, part, strict=True)]
        boxes = (
            f"M{axis.x(start - 0.5):.1f} {scale.y(low):.1f}V{scale.y(high):.1f}"
            f"H{axis.x(end + 0.5):.1f}V{scale.y(low):.1f}Z"
            for (start, end), low, high in zip(map(axis.edges, indices), floor, top, strict=True)
            if high > low
        )
        body.append(f'<path class="area" fill="var(--c{number})" d="{"".join(boxes)}"/>')
        floor = top
    return _figure(title, axis, binned, body)


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, low: float, high: float) -> _Scale:
        """Round limits and about four ticks around the values."""
        if low == high:
            margin = abs(low) * 0.1 or 1.0
            low, high = (min(low, 0.0) if low == 0 else low - margin), high + margin
        step = _nice_step((high - low) / 4)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, tuple(n * step for n in range(first, last + 1)))

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low)


def _nice_step(rough: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _tick_label(value: float, step: float) -> str:
    if abs(value) < step / 2:
        return "0"
    if (step < 1e-4 and abs(value) < 0.1) or abs(value) >= 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if step >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _grid(axis: Axis, scale: _Scale) -> str:
    parts = []
    step = scale.ticks[1] - scale.ticks[0]
    for value in scale.ticks:
        y, label = scale.y(value), _tick_label(value, step)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" dy=".35em" text-anchor="end">{label}</text>')
    spacing = max(1, round(_nice_step((axis.last - axis.first + 1) / 5)))
    for value in range(-(-axis.first // spacing) * spacing, axis.last + 1, spacing):
        x = axis.x(value)
        label = _tick_label(value, spacing)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _curve(axis: Axis, scale: _Scale, bins: _Bins, colour: str, css: str) -> str:
    """The curve with a gap at every NaN; a dot where a point stands alone, or everywhere if there are few."""
    segments: list[list[str]] = [[]]
    for index in sorted(bins):
        if math.isfinite(bins[index].mean):
            segments[-1].append(f"{axis.center(index):.1f} {scale.y(bins[index].mean):.1f}")
        else:
            segments.append([])
    path = "".join(f"M{'L'.join(points)}" for points in segments if len(points) > 1)
    dotted = segments if len(bins) <= MAX_DOTS else [points for points in segments if len(points) == 1]
    dots = "".join(f"M{point}h0" for points in dotted for point in points)
    out = f'<path class="{css}" stroke="{colour}" d="{path}"/>' if path else ""
    return out + (f'<path class="dots" stroke="{colour}" d="{dots}"/>' if dots else "")


def _range(axis: Axis, scale: _Scale, bins: _Bins, colour: str) -> str:
    """A bar from the least to the greatest value of each bin, so that averaging hides no spike."""
    bars = "".join(
        f"M{axis.center(index):.1f} {scale.y(bin.low):.1f}V{scale.y(bin.high):.1f}"
        for index, bin in bins.items()
        if bin.high > bin.low
    )
    return f'<path class="range" stroke="{colour}" d="{bars}"/>' if bars else ""


def _moving_average(bins: _Bins) -> _Bins:
    """Centred mean over about a tenth of the bins; gaps stay gaps."""
    indices = sorted(bins)
    reach = max(1, len(indices) // 20)
    averages = {}
    for place, index in enumerate(indices):
        near = [bins[i].mean for i in indices[max(0, place - reach) : place + reach + 1]]
        finite = [value for value in near if math.isfinite(value)]
        mean = sum(finite) / len(finite) if math.isfinite(bins[index].mean) else math.nan
        averages[index] = Bin(mean, mean, mean)
    return averages


def _hits(axis: Axis, binned: _Binned) -> str:
    """Invisible columns that show a hair line and the values of the nearest step under the pointer."""
    indices = sorted({index for _, bins in binned for index in bins})
    centers = [axis.center(index) for index in indices]
    middles = [(left + right) / 2 for left, right in pairwise(centers)]
    parts = []
    for index, x, left, right in zip(
        indices, centers, [float(LEFT), *middles], [*middles, float(WIDTH - RIGHT)], strict=True
    ):
        text = "\n".join(_values_at(binned, axis, index))
        parts.append(
            f'<g class="hit"><title>{escape(text)}</title>'
            f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
            f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/></g>'
        )
    return "".join(parts)


def _values_at(binned: _Binned, axis: Axis, index: int) -> list[str]:
    """The steps of a bin, then one text for each series."""
    start, end = axis.edges(index)
    where = f"step {start}" if start == end else f"steps {start} to {end}"
    values = (f"{bins[index].mean:.4g}" if index in bins else "-" for _, bins in binned)
    named = len(binned) > 1
    return [
        where,
        *(f"{label} {value}" if named else value for (label, _), value in zip(binned, values, strict=True)),
    ]


def _figure(title: str, axis: Axis, binned: _Binned, body: Sequence[str]) -> str:
    """Heading, the values under the pointer (at first the last ones), and the drawing.

    With several series their values stand in the legend; the script of the page keeps to that.
    """
    head = f"<h3>{escape(title)}</h3>"
    if not body:
        return f"<figure><figcaption>{head}<output>not recorded</output></figcaption></figure>"
    where, *values = _values_at(binned, axis, max(index for _, bins in binned for index in bins))
    legend = ""
    if len(binned) > 1:
        keys = (f'<li style="--key:var(--c{n})"><span>{escape(v)}</span></li>' for n, v in enumerate(values))
        legend = f'<ul class="legend">{"".join(keys)}</ul>'
    readout = where if legend else f"{where} · {values[0]}"
    label = escape(f"{title}, {where}: {', '.join(values)}")
    return (
        f"<figure><figcaption>{head}<output>{escape(readout)}</output></figcaption>{legend}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(body)}{_hits(axis, binned)}</svg></figure>"
    )


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
