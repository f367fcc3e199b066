# SPDX-License-Identifier: Apache-2.0
"""Values at the pointer, without scripts: strips over a figure, each of which shows its own values.

A strip is the label of a radio button. Style rules show its values while the pointer is over it, after a tap, or while
the button has the focus; a figure is one stop of the Tab key, and the arrow keys move from strip to strip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
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
    width: float = 1.8


@dataclass(frozen=True)
class Size:
    """One drawing of a figure: for wide windows, for phones, or small enough for both."""

    kind: str
    width: float


WIDE, NARROW, SMALL = Size("wide", 760.0), Size("narrow", 360.0), Size("small", 380.0)
MOST_MOMENTS, MOST_SMALL_MOMENTS = 72, 48
"""The most strips over a figure, and over a small one."""


def plot(
    draw: Callable[[Size], Chart], description: str, moments: Sequence[Moment], sizes: Sequence[Size] = (WIDE, NARROW)
) -> str:
    """The figure in each of `sizes`, of which the style sheet shows one, and the strips over it.

    `description`: its text alternative.
    """
    charts = {size.kind: draw(size) for size in sizes}
    svgs = "".join(f'<div class="{kind}">{chart.svg(description)}</div>' for kind, chart in charts.items())
    return f'<div class="plot">{svgs}{_strips(charts, moments, description)}</div>'


def _strips(charts: Mapping[str, Chart], moments: Sequence[Moment], description: str) -> str:
    """From the middle between two moments to the next, as shares of the axis, which are those of every drawing."""
    if not moments:
        return ""
    chart = next(iter(charts.values()))
    wide = chart.right - chart.left
    shares = [(chart.at_x(moment.x) - chart.left) / wide for moment in moments]
    order = sorted(range(len(moments)), key=shares.__getitem__)
    edges = [0.0, *((shares[a] + shares[b]) / 2 for a, b in pairwise(order)), 1.0]
    group = re.sub("[^a-z]+", "-", description.lower())
    strips = "".join(
        _strip(moments[i], shares[i], stop - start, group)
        for i, (start, stop) in zip(order, pairwise(edges), strict=True)
    )
    places = ";".join(f"--{kind}:{_inset(chart)}" for kind, chart in charts.items())
    label = escape(f"Values: {description}")
    return f'<div class="hover" role="radiogroup" aria-label="{label}" style="{places}">{strips}</div>'


def _inset(chart: Chart) -> str:
    """Where the axes begin and end, from the edges of the figure."""
    top, right = chart.top / chart.height, 1 - chart.right / chart.width
    bottom, left = 1 - chart.bottom / chart.height, chart.left / chart.width
    return " ".join(f"{100 * share:.2f}%" for share in (top, right, bottom, left))


def _strip(moment: Moment, share: float, width: float, group: str) -> str:
    side = ' class="left"' if share > 0.5 else ""
    title = moment.title if len(moment.title) <= _MOST_TITLE else f"{moment.title[:_MOST_TITLE]}…"
    lines = "".join(
        f'<em class="{one.color}">{escape(one.name)}</em><b>{escape(one.text)}</b>' for one in moment.values
    )
    return (
        f'<label{side} style="--x:{100 * share:.1f}%;flex:{100 * width:.2f}"><input type="radio" name="{group}">'
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
