# SPDX-License-Identifier: Apache-2.0
"""Values at the pointer, without scripts: strips over a figure, each of which shows its own values.

A strip is the label of a radio button. Style rules show its values while the pointer is over it, after a tap, or while
the button has the focus; a figure is one stop of the Tab key, and the arrow keys move from strip to strip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

from offstage.train.report.chart import Chart, Point

_MOST_TITLE = 60
"""Characters: names of moments come from the run."""


class Value(NamedTuple):
    """One line of what a strip shows."""

    color: str
    name: str
    text: str


@dataclass(frozen=True)
class Moment:
    """What is known at one place of the horizontal axis."""

    x: float
    title: str
    values: Sequence[Value]


@dataclass(frozen=True)
class Series:
    """Values over steps, and how they are written."""

    color: str
    name: str
    points: Sequence[Point]
    show: Callable[[float], str]
    dashed: bool = False


@dataclass(frozen=True)
class Size:
    """One drawing of a figure: for wide windows, for phones, or small enough for both."""

    kind: str
    width: float
    moments: int
    """The most strips over it."""


WIDE, NARROW, SMALL = Size("wide", 760.0, 96), Size("narrow", 360.0, 48), Size("small", 380.0, 48)
Drawing = tuple[Chart, Sequence[Moment]]


def plots(draw: Callable[[Size], Drawing], description: str, sizes: Sequence[Size] = (WIDE, NARROW)) -> str:
    """The figure in each of `sizes`, of which the style sheet shows one. `description`: its text alternative."""
    return "".join(_plot(*draw(size), description, size) for size in sizes)


def _plot(chart: Chart, moments: Sequence[Moment], description: str, size: Size) -> str:
    return f'<div class="plot {size.kind}">{chart.svg(description)}{_strips(chart, moments, description, size)}</div>'


def _strips(chart: Chart, moments: Sequence[Moment], description: str, size: Size) -> str:
    """From the middle between two moments to the next; the places of strips are shares of the figure's."""
    places = [chart.at_x(moment.x) for moment in moments]
    order = sorted(range(len(moments)), key=places.__getitem__)
    if not order:
        return ""
    middles = [(places[a] + places[b]) / 2 for a, b in pairwise(order)]
    edges = [chart.left, *middles, chart.right]
    group = f"{size.kind}-{re.sub('[^a-z]+', '-', description.lower())}"
    wide = chart.right - chart.left
    strips = "".join(
        _strip(moments[i], (places[i] - chart.left) / wide, stop - start, group)
        for i, (start, stop) in zip(order, pairwise(edges), strict=True)
    )
    inset = " ".join(
        f"{100 * share:.2f}%"
        for share in (
            chart.top / chart.height,
            1 - chart.right / chart.width,
            1 - chart.bottom / chart.height,
            chart.left / chart.width,
        )
    )
    label = escape(f"Values: {description}")
    return f'<div class="hover" role="radiogroup" aria-label="{label}" style="inset:{inset}">{strips}</div>'


def _strip(moment: Moment, share: float, width: float, group: str) -> str:
    side = ' class="left"' if share > 0.5 else ""
    title = moment.title if len(moment.title) <= _MOST_TITLE else f"{moment.title[:_MOST_TITLE]}…"
    lines = "".join(
        f'<em class="{one.color}">{escape(one.name)}</em><b>{escape(one.text)}</b>' for one in moment.values
    )
    return (
        f'<label{side} style="--x:{100 * share:.1f}%;flex:{width:.1f}"><input type="radio" name="{group}"><i></i>'
        f"<span><strong>{escape(title)}</strong>{lines}</span></label>"
    )


# Moments #


def over_steps(series: Sequence[Series], most: int) -> list[Moment]:
    """At most `most` moments of values over steps: neighbouring steps together, with the mean and the range of each."""
    known = [dict(one.points) for one in series]
    steps = sorted({x for points in known for x in points})
    size = max(1, math.ceil(len(steps) / most))
    found = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        title = f"step {part[0]:,.0f}" if len(part) == 1 else f"steps {part[0]:,.0f} to {part[-1]:,.0f}"
        values = []
        for one, points in zip(series, known, strict=True):
            here = [points[x] for x in part if x in points]
            if here:
                values.append(Value(one.color, one.name, _mean_and_range(here, one.show)))
        found.append(Moment(sum(part) / len(part), title, values))
    return found


def _mean_and_range(values: Sequence[float], show: Callable[[float], str]) -> str:
    mean = show(sum(values) / len(values))
    return mean if min(values) == max(values) else f"{mean} ({show(min(values))} to {show(max(values))})"
