# SPDX-License-Identifier: Apache-2.0
"""Draws time against device memory from rows in results/: the curve of `fit`, settings made by hand, other systems.

    python -m benchmarks.plot_memory        writes docs/figures/time_over_memory.svg; needs nothing but the rows

The SVG is written here and follows the reader's theme. Every point is relative to resident state with every block
checkpointed in its own run. Memory is the peak: since the start for `fit` and settings made by hand, of the timed
iterations for other systems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from offstage.train.report.style import DARK, LIGHT

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
NAME = "time_over_memory"
WIDTH, HEIGHT = 780.0, 440.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 22.0, 74.0, 44.0
CHARACTER, LINE = 6.7, 15.0
"""Of a label: the width of a character, rounded up, and the height."""
MEMORY_TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TIME_TICKS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
PEERS = (
    ("peers", "torchao_offload_gradients", "torchao, bf16 moments, no clipping"),
    ("peers", "deepspeed", "DeepSpeed ZeRO-2 offload"),
    ("host_weights", "zero3", "DeepSpeed ZeRO-3 offload"),
    ("host_weights", "fsdp2", "FSDP2 CPUOffloadPolicy"),
)
"""Question, case, label. Each has `ratio`, to resident state of its run."""

Row = dict[str, Any]


class MissingRowsError(LookupError):
    """There is nothing to draw."""


@dataclass(frozen=True)
class Point:
    gib: float
    ratio: float
    label: str = ""


# Rows


def newest(question: str, results: Path) -> dict[str, Row]:
    """The newest row of each case that was measured on the whole workload."""
    path = results / f"{question}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["case"]: row for row in rows if row.get("size") == "full" and "iteration_ms" in row}


def fit_rows(results: Path) -> tuple[Row, list[Row], list[Row]]:
    """Resident state, fit at each limit, and settings made by hand."""
    rows = {name: row for name, row in newest("fit", results).items() if row["job"] == "gpt"}
    resident = rows.get("gpt_resident_checkpointed")
    fits = [row for name, row in rows.items() if name.removeprefix("gpt_fit_").isdigit()]
    if resident is None or not fits:
        raise MissingRowsError(
            f"The figure expects rows gpt_resident_checkpointed and gpt_fit_1 to gpt_fit_4 of size full in "
            f"{results / 'fit.jsonl'}; found {', '.join(sorted(rows)) or 'none'}. Run python -m benchmarks.fit gpt "
            "on a machine with a GPU."
        )
    by_hand = [row for row in rows.values() if "config" in row and row is not resident]
    return resident, sorted(fits, key=lambda row: float(row["peak_gib"])), by_hand


def peers(results: Path) -> Iterator[Point]:
    for question, case, label in PEERS:
        row = newest(question, results).get(case)
        if row is not None and row.get("ratio"):
            yield Point(row["peak_gib"], row["ratio"], label)
    yield from defaults(results)


def defaults(results: Path) -> Iterator[Point]:
    """`offload()` with nothing said, from the rows at a cap on memory."""
    path = results / "memory_cap.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    timed = {(row["state"], row["batch"]): row for row in rows if row["iteration_ms"]}
    resident, ours = timed.get(("resident", 8)), timed.get(("offloaded", 8))
    if resident is not None and ours is not None:
        yield Point(ours["peak_gib"], ours["iteration_ms"] / resident["iteration_ms"], "offload(), nothing chosen")


# The figure


def draw(results: Path = RESULTS, figures: Path = FIGURES) -> Path:
    resident, fits, by_hand = fit_rows(results)
    over = float(resident["iteration_ms"])
    curve = [Point(row["peak_gib"], row["iteration_ms"] / over) for row in fits]
    hand = [Point(row["peak_gib"], row["iteration_ms"] / over) for row in by_hand]
    named = [Point(resident["peak_gib"], 1.0, "resident, checkpointed"), *peers(results)]
    machine = f"{resident['machine']['device']}, torch {resident['versions']['torch']}"
    figures.mkdir(parents=True, exist_ok=True)
    path = figures / f"{NAME}.svg"
    path.write_text(svg(curve, hand, named, machine))
    return path


def svg(curve: Sequence[Point], hand: Sequence[Point], named: Sequence[Point], machine: str) -> str:
    plane = Plane.around([*curve, *hand, *named])
    parts = [*plane.axes(), *(dot(plane, point, "hand", 2.6) for point in hand)]
    parts.append(
        f'<path class="curve" d="M{" L".join(f"{plane.x(p.gib):.1f} {plane.y(p.ratio):.1f}" for p in curve)}"/>'
    )
    parts += [dot(plane, point, "fit", 4.6) for point in curve]
    parts += [dot(plane, point, "peer", 4.2) for point in named]
    taken = [plane.box(point, 6.0) for point in (*curve, *named)]
    taken += [plane.box(point, 6.0) for point in between(curve)]
    taken.append((LEFT, plane.y(1.0) - 3, WIDTH - RIGHT, plane.y(1.0) + 3))
    for point in named:
        parts.append(placed(plane, point, taken))
    text = "Time of an iteration against device memory: the curve of fit, settings made by hand, and other systems"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-label="{text}"><style>{style()}</style><rect class="ground" width="100%" height="100%"/>'
        f"{''.join(title(machine))}{''.join(parts)}</svg>\n"
    )


def style() -> str:
    """Colours by class, for both themes. The ground is the figure's own: it can be read on any page."""
    return f"{_colours(LIGHT)} @media (prefers-color-scheme: dark) {{ {_colours(DARK)} }} {_RULES}"


def _colours(theme: Mapping[str, str]) -> str:
    ink, quiet, rule, panel = (theme[name] for name in ("ink", "quiet", "rule", "panel"))
    return (
        f".ground {{ fill: {panel} }} text {{ fill: {ink} }} .quiet {{ fill: {quiet} }} .rule {{ stroke: {rule} }} "
        f".one {{ stroke: {quiet} }} .fit {{ fill: {theme['train']} }} .curve {{ stroke: {theme['train']} }} "
        f".peer {{ fill: {theme['update']} }} .hand {{ fill: {theme['other']} }} .dot, .label {{ stroke: {panel} }}"
    )


_RULES = (
    'text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif } '
    ".head { font-weight: 600; font-size: 13.5px } .rule { stroke-width: 1 } .one { stroke-dasharray: 5 4 } "
    ".curve { fill: none; stroke-width: 2.2; stroke-linejoin: round } .dot { stroke-width: 1.2 } "
    ".label { stroke-width: 4; paint-order: stroke; stroke-linejoin: round }"
)


def title(machine: str) -> Iterator[str]:
    yield f'<text class="head" x="12" y="20">One iteration of a 2.70B GPT, 8 × 2048 tokens ({escape(machine)})</text>'
    x = 12.0
    for kind, words in (
        ("fit", "offstage.fit(device_peak=…)"),
        ("hand", "offstage, settings by hand"),
        ("peer", "others, by name"),
    ):
        yield f'<circle class="dot {kind}" cx="{x + 5:.1f}" cy="36" r="4.4"/>'
        yield f'<text x="{x + 14:.1f}" y="40">{words}</text>'
        x += 34 + CHARACTER * len(words)


def dot(plane: Plane, point: Point, kind: str, radius: float) -> str:
    where = f'cx="{plane.x(point.gib):.1f}" cy="{plane.y(point.ratio):.1f}"'
    return f'<circle class="dot {kind}" {where} r="{radius}"/>'


Box = tuple[float, float, float, float]


def placed(plane: Plane, point: Point, taken: list[Box]) -> str:
    """The label at the first side of its point where nothing else is; `taken` grows by it."""
    x, y, width = plane.x(point.gib), plane.y(point.ratio), CHARACTER * len(point.label)
    sides = [(x + 9, y + 4), (x - 9 - width, y + 4)]
    sides += [
        (x - width / 2, y - 11),
        (x - width / 2, y + 20),
        (x + 9, y + 19),
        (x + 9, y - 9),
        (x - 9 - width, y + 19),
    ]
    sides += [(x - 9 - width, y - 9), (x - width / 2, y - 27), (x - width / 2, y + 36)]
    boxes = [(left, base - LINE + 3, left + width, base + 3) for left, base in sides]
    inside = [
        box for box in boxes if box[0] >= LEFT + 4 and box[2] <= WIDTH - 4 and TOP <= box[1] <= plane.floor - LINE
    ]
    chosen = min(inside or boxes, key=lambda box: sum(overlap(box, other) for other in taken))
    taken.append(chosen)
    return f'<text class="label" x="{chosen[0]:.1f}" y="{chosen[3] - 3:.1f}">{escape(point.label)}</text>'


def overlap(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def between(curve: Sequence[Point], parts: int = 24) -> Iterator[Point]:
    """Points on the drawn curve, for labels to avoid."""
    for one, other in pairwise(curve):
        for share in (part / parts for part in range(parts)):  # straight, because both axes are logarithms
            gib = one.gib ** (1 - share) * other.gib**share
            yield Point(gib, one.ratio ** (1 - share) * other.ratio**share)


@dataclass(frozen=True)
class Plane:
    """Logarithmic axes: twice the memory, or the time, is the same distance everywhere."""

    least_gib: float
    most_gib: float
    least: float
    most: float

    @classmethod
    def around(cls, points: Sequence[Point]) -> Plane:
        memory, time = [point.gib for point in points], [point.ratio for point in points]
        low = max((tick for tick in TIME_TICKS if tick <= min(time)), default=TIME_TICKS[0])
        return cls(min(memory) / 1.15, max(memory) * 1.15, low, max(time) * 1.18)

    @property
    def floor(self) -> float:
        return HEIGHT - BOTTOM

    def x(self, gib: float) -> float:
        share = math.log(gib / self.least_gib) / math.log(self.most_gib / self.least_gib)
        return LEFT + share * (WIDTH - RIGHT - LEFT)

    def y(self, ratio: float) -> float:
        return self.floor - math.log(ratio / self.least) / math.log(self.most / self.least) * (self.floor - TOP)

    def box(self, point: Point, around: float) -> Box:
        x, y = self.x(point.gib), self.y(point.ratio)
        return x - around, y - around, x + around, y + around

    def axes(self) -> Iterator[str]:
        for tick in TIME_TICKS:
            if self.least <= tick <= self.most:
                y = self.y(tick)
                kind = "one" if tick == 1.0 else "rule"
                yield f'<path class="{kind}" d="M{LEFT:.1f} {y:.1f}H{WIDTH - RIGHT:.1f}"/>'
                yield f'<text class="quiet" x="{LEFT - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}×</text>'
        yield f'<path class="one" style="stroke-dasharray:none" d="M{LEFT:.1f} {self.floor:.1f}H{WIDTH - RIGHT:.1f}"/>'
        for memory in MEMORY_TICKS:
            if self.least_gib <= memory <= self.most_gib:
                x = self.x(memory)
                yield f'<path class="rule" d="M{x:.1f} {self.floor:.1f}V{TOP + 4:.1f}"/>'
                yield f'<text class="quiet" x="{x:.1f}" y="{self.floor + 17:.1f}" text-anchor="middle">{memory}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle:.1f}" y="{HEIGHT - 10:.1f}" text-anchor="middle">most device memory, GiB</text>'
        words = "time, relative to resident state with every block checkpointed"
        yield f'<text x="12" y="{TOP - 4:.1f}">{words}</text>'


if __name__ == "__main__":
    print(draw())
