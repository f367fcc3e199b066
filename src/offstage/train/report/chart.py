# SPDX-License-Identifier: Apache-2.0
"""`Chart`: axes with units, and lines, areas and bars between them, as SVG.

Colours are CSS variables of the page (`style.py`), so that a figure follows the reader's theme. Text is never placed on
data; its width is estimated generously, because the font is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

Point = tuple[float, float]

_CHARACTER = 6.9
"""Width of a character of the figures' text, on average and rounded up."""
_LINE = 16.0
_RIGHT = 18.0


@dataclass(frozen=True)
class Axis:
    """One dimension of a chart: its label and range."""

    label: str
    """With the unit."""
    low: float
    high: float
    scale: float = 1.0
    """Values are divided by this before they are shown: the unit."""
    whole: bool = False
    """Ticks at whole numbers only."""
    parts: int = 0
    """Number of intervals, if known."""

    def ticks(self, most: int) -> list[float]:
        """At most `most` round values between the ends, in the axis's unit."""
        low, high = self.low / self.scale, self.high / self.scale
        step = _round_step((high - low) / max(1, most - 1), whole=self.whole)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def value_axis(label: str, values: Sequence[float], *, zero: bool = False, scale: float = 1.0, parts: int = 5) -> Axis:
    """From one round number to another, with all of `values` between, in about `parts`; `zero`: from 0 on."""
    low = 0.0 if zero else min(values) / scale
    high = max(low, max(values) / scale)
    if high - low < 1e-9 * max(1e-9, abs(high)):
        half = max(0.5, 1e-9 * abs(high))  # of a large number, as much as can be told apart
        low, high = (0.0, 1.0) if not high else (low if zero else low - half, high + half)
    step = _round_step((high - low) / parts, whole=False)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(label, first * step * scale, last * step * scale, scale, parts=last - first)


def steps_axis(steps: Sequence[float]) -> Axis:
    """From the first step to the last."""
    low, high = min(steps), max(steps)
    return Axis("step", low - (low == high), high + (low == high), whole=True)


def bytes_axis(label: str, values: Sequence[float], *, parts: int = 5) -> Axis:
    """From 0, in the unit that fits the largest."""
    high = max(values, default=0.0)
    unit, scale = next((found for found in _SIZES if high < 1024 * found[1]), _SIZES[-1])
    return value_axis(f"{label}, {unit}", [high], zero=True, scale=scale, parts=parts)


def time_axis(label: str, end_ms: float) -> Axis:
    """From 0, in milliseconds or seconds."""
    unit, scale = ("ms", 1.0) if end_ms < 10_000 else ("s", 1e3)
    return Axis(f"{label}, {unit}", 0.0, max(end_ms, 1e-6), scale)


_SIZES = [("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30)]


def _round_step(least: float, *, whole: bool) -> float:
    """The smallest of 1, 2, 2.5, 5, 10, … that is at least `least`."""
    least = max(least, 1e-12)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))
    return max(1.0, float(math.ceil(step))) if whole else step


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """As few decimals as show all ticks as they are; powers of ten where digits would fill the figure."""
    if max(abs(ticks[0]), abs(ticks[-1])) >= 1e15:
        return f"{value:.3g}"
    smallest = min((b - a for a, b in pairwise(ticks)), default=1.0)
    decimals = next((n for n in range(9) if all(abs(round(t, n) - t) < 1e-6 * smallest for t in ticks)), 9)
    return f"{value:,.{decimals}f}"


class Chart:
    """One figure. Draw from the back to the front, then `svg()`."""

    def __init__(
        self,
        x: Axis,
        y: Axis | None,
        *,
        width: float = 760.0,
        height: float = 270.0,
        left: float | None = None,
        right: float = _RIGHT,
        names: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        """`y`: `None` for a chart of rows. `left`: room there; by default what the ticks of `y` need.

        `names`: spans of `x`, with names to write above them.
        """
        self.x, self.y, self.width, self.height = x, y, width, height
        self._y_ticks = y.ticks(y.parts + 1) if y is not None else []
        widest = max((len(tick_text(tick, self._y_ticks)) for tick in self._y_ticks), default=0)
        self.left = left if left is not None else 14.0 + _CHARACTER * widest
        self.right = width - right
        placed = self._placed(names)
        lines = 1 + max((line for _, line, _ in placed), default=-1)
        self.top = 11.0 + _LINE * (lines + (y is not None))
        self.bottom = height - 2 * _LINE - 8.0
        self._ground: list[str] = []
        self._parts: list[str] = []
        for x_at, line, name in placed:
            self.text(x_at, self.top - 5.0 - _LINE * line, name, kind="quiet")

    # Coordinates #

    def at_x(self, value: float) -> float:
        share = (value - self.x.low) / (self.x.high - self.x.low)
        return self.left + min(1.0, max(0.0, share)) * (self.right - self.left)

    def at_y(self, value: float) -> float:
        assert self.y is not None
        share = (value - self.y.low) / (self.y.high - self.y.low)
        return self.bottom - min(1.0, max(0.0, share)) * (self.bottom - self.top)

    # Drawing #

    def line(self, points: Sequence[Point], color: str, *, dashed: bool = False, width: float = 1.8) -> None:
        """Through all points; a single one is a dot."""
        if len(points) == 1:
            self.dots(points, color)
            return
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{self._path(points)}" fill="none" style="stroke:var(--{color})" stroke-width="{width}"'
            f' stroke-linejoin="round"{dashes}/>'
        )

    def dots(self, points: Sequence[Point], color: str) -> None:
        for x, y in points:
            self._parts.append(
                f'<circle cx="{self.at_x(x):.1f}" cy="{self.at_y(y):.1f}" r="3.2" style="fill:var(--{color})"/>'
            )

    def area(self, lower: Sequence[Point], upper: Sequence[Point], color: str, *, opacity: float = 1.0) -> None:
        """Between two lines over the same points."""
        path = f"{self._path(upper)} L{self._path(list(reversed(lower)))[1:]} Z"
        self._parts.append(f'<path d="{path}" style="fill:var(--{color})" fill-opacity="{opacity}" stroke="none"/>')

    def level(self, value: float, color: str, *, dashed: bool = True, over_areas: bool = False) -> None:
        """A line across; `over_areas` of any colour it has a ground of its own."""
        ends = [(self.x.low, value), (self.x.high, value)]
        if over_areas:
            self.line(ends, "panel", width=4.0)
        self.line(ends, color, dashed=dashed, width=1.6)

    def band(self, start: float, stop: float, color: str) -> None:
        """A part of the background."""
        left, right = self.at_x(start), self.at_x(stop)
        self._ground.append(
            f'<rect x="{left:.1f}" y="{self.top:.1f}" width="{right - left:.1f}" '
            f'height="{self.bottom - self.top:.1f}" style="fill:var(--{color})"/>'
        )

    def bars(self, spans: Sequence[tuple[float, float]], top: float, height: float, color: str) -> None:
        """One row of a timeline; bars narrower than a pixel stay visible."""
        path = "".join(
            f"M{self.at_x(start):.1f} {top:.1f}h{max(0.7, self.at_x(stop) - self.at_x(start)):.1f}v{height:.1f}"
            f"H{self.at_x(start):.1f}z"
            for start, stop in spans
        )
        self._parts.append(f'<path d="{path}" style="fill:var(--{color})"/>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> None:
        """At a place of the figure, not of the data."""
        css = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>')

    def _placed(self, names: Sequence[tuple[str, float, float]]) -> list[tuple[float, int, str]]:
        """Place each name above the beginning of its span, in the lowest of two lines that is free there."""
        found, taken = [], [0.0, 0.0]
        for name, start, _ in names:
            left = min(self.at_x(start) + 2.0, self.width - text_width(name))
            free = [line for line, end in enumerate(taken) if end <= left]
            if free:
                found.append((left, free[0], name))
                taken[free[0]] = left + text_width(name) + 8.0
        return found

    def _path(self, points: Sequence[Point]) -> str:
        return "M" + " L".join(f"{self.at_x(x):.1f} {self.at_y(y):.1f}" for x, y in points)

    # The figure #

    def svg(self, description: str) -> str:
        """The figure, with its axes; `description` is its text alternative."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" aria-label="{escape(description)}">'
            f"{''.join(self._ground)}{self._grid()}{''.join(self._parts)}{self._x_axis()}{self._y_label()}</svg>"
        )

    def _grid(self) -> str:
        found = []
        for tick in self._y_ticks:
            assert self.y is not None
            y = self.at_y(tick * self.y.scale)
            text = tick_text(tick, self._y_ticks)
            found.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>')
            found.append(f'<text x="{self.left - 7:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        return "".join(found)

    def _x_axis(self) -> str:
        ticks = self.x.ticks(max(2, int((self.right - self.left) / 58)))
        found = [f'<path class="axis" d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"/>']
        for tick in ticks:
            x = self.at_x(tick * self.x.scale)
            text = tick_text(tick, ticks)
            half = text_width(text) / 2
            anchor = "end" if x + half > self.width else "start" if x - half < 0 else "middle"
            found.append(f'<path class="axis" d="M{x:.1f} {self.bottom:.1f}v4"/>')
            found.append(f'<text x="{x:.1f}" y="{self.bottom + _LINE + 2:.1f}" text-anchor="{anchor}">{text}</text>')
        middle = (self.left + self.right) / 2
        label = escape(self.x.label)
        found.append(
            f'<text class="label" x="{middle:.1f}" y="{self.height - 6:.1f}" text-anchor="middle">{label}</text>'
        )
        return "".join(found)

    def _y_label(self) -> str:
        return "" if self.y is None else f'<text class="label" x="2" y="14">{escape(self.y.label)}</text>'


def text_width(text: str) -> float:
    """An upper estimate of the width of `text` in a figure."""
    return _CHARACTER * len(text)


def thinned(points: Sequence[Point], most: int = 260) -> list[tuple[float, float, float, float]]:
    """At most `most` points: (x, mean, least, greatest) of neighbours. Fewer stay as they are."""
    size = -(-len(points) // most) if points else 1
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [y for _, y in part]
        mean = sum(values) / len(values)
        found.append((sum(x for x, _ in part) / len(part), mean, min(values), max(values)))
    return found
