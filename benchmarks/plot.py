# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documentation from the rows in results/.

python -m benchmarks.plot        (needs matplotlib: pip install '.[bench]')
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import RESULTS

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
COLORS = {"fetch": "#3b6fb5", "update": "#c4572e", "store": "#4a8f5b", "compute": "#6b6b6b"}
LABELS = {"fetch": "fetch\nhost → device", "update": "update", "store": "store\ndevice → host"}
ONE_LINE = {"compute": "model's kernels", "fetch": "fetch", "update": "update", "store": "store"}
PHASE_SHADES = {"backward": "#efe9f7", "step": "#fbeedd", "forward": "#e9f4ea"}
PHASE_TEXT: dict[str, Any] = {"fontsize": 8, "color": "#444444", "va": "bottom"}
CURVES = {
    "overlap_forward": ("overlap_forward, clipping outside", "#3b6fb5", "o"),
    "in_backward": ("update_in_backward, no clipping", "#c4572e", "s"),
}
SHOWN_MS = 12.0


def rows(question: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{question}.jsonl").read_text().splitlines()]


def where(row: dict[str, Any]) -> str:
    """The machine and version a row was measured on, for titles."""
    return f"{row['machine']['device']}, torch {row['versions']['torch']}"


def save(figure: Figure, name: str) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.svg")


# One streamed step


def streamed_step() -> None:
    """The lanes of one streamed step: its first milliseconds."""
    row = [row for row in rows("trace") if "spans_us" in row][-1]
    figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
    for height, lane in enumerate(("store", "update", "fetch")):
        bars = [(a / 1e3, (b - a) / 1e3) for a, b in row["spans_us"][lane] if a / 1e3 < SHOWN_MS]
        axes.broken_barh(bars, (height - 0.36, 0.72), facecolors=COLORS[lane], edgecolor="white", linewidth=0.6)
    axes.set_yticks(range(3), [LABELS[lane] for lane in ("store", "update", "fetch")])
    axes.set_xlim(0, SHOWN_MS)
    axes.set_xlabel("milliseconds since the first copy")
    axes.set_title(f"One streamed step, first {SHOWN_MS:.0f} ms ({where(row)})", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "streamed_step")


# One iteration, three settings


def overlap_timeline() -> None:
    """What ran when from backward to the end of the next forward, one panel per setting."""
    row = [row for row in rows("trace") if "settings" in row][-1]
    settings = row["settings"]
    figure, panels = plt.subplots(
        len(settings), figsize=(9, 1.95 * len(settings)), sharex=True, squeeze=False, layout="constrained"
    )
    last = max(b for found in settings.values() for spans in found["spans_us"].values() for _, b in spans)
    panels[-1, 0].set_xlim(0, last / 1e3 * 1.01)
    for axes, (name, found) in zip(panels[:, 0], settings.items(), strict=True):
        draw_panel(axes, name, found)
    panels[-1, 0].set_xlabel("milliseconds since backward began")
    figure.suptitle(f"{row['case'].capitalize()}\n({where(row)})", fontsize=10, x=0.01, ha="left")
    save(figure, "overlap_timeline")


def draw_panel(axes: Axes, name: str, found: dict[str, Any]) -> None:
    lanes = ("store", "update", "fetch", "compute")  # from below
    end = max(b for _, b in found["spans_us"]["compute"]) / 1e3
    shade_phases(axes, {phase: at / 1e3 for phase, at in found["begins_us"].items() if at is not None}, end)
    for height, lane in enumerate(lanes):
        bars = [(a / 1e3, (b - a) / 1e3) for a, b in found["spans_us"][lane]]
        # An edge of the bar's own colour keeps bars narrower than a pixel visible.
        axes.broken_barh(bars, (height - 0.36, 0.72), facecolors=COLORS[lane], edgecolor=COLORS[lane], linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [ONE_LINE[lane] for lane in lanes])
    axes.set_ylim(-0.55, len(lanes) + 0.25)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{name}: {end:.0f} ms", fontsize=9.5, loc="left", fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)


def shade_phases(axes: Axes, begins: dict[str, float], end: float) -> None:
    """A phase lasts until the next one has something to run: waiting for weights after step() is in the step's."""
    ordered = sorted(begins.items(), key=lambda item: item[1])
    for (phase, start), (_, stop) in pairwise([*ordered, ("", end)]):
        axes.axvspan(start, stop, color=PHASE_SHADES[phase], linewidth=0, zorder=0)
        axes.axvline(start, color="#999999", linewidth=0.7, zorder=0.5)
        narrow = stop - start < 0.06 * axes.get_xlim()[1]  # its name goes to the left, out of the next one's way
        axes.text(start, 3.55, f" {phase} ", ha="right" if narrow else "left", **PHASE_TEXT)


# Time and peak over fractions


def overlap_fractions() -> None:
    """What an iteration costs and the memory it needs, by the share of the state that is on the host."""
    newest = {
        (row["setting"], row["fraction"]): row
        for row in rows("overlap")
        if row["size"] == "full" and row["micro_batches"] == 1
    }
    figure, (ratio, peak) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    for setting, (label, color, marker) in CURVES.items():
        points = [row for (name, _), row in newest.items() if name in (setting, "resident_split")]
        points.sort(key=lambda row: row["fraction"])
        fractions = [row["fraction"] for row in points]
        style: dict[str, Any] = {"label": label, "color": color, "marker": marker, "markersize": 5}
        ratio.plot(fractions, [row["ratio"] for row in points], **style)
        peak.plot(fractions, [row["peak_gib"] for row in points], **style)
    if (in_step := newest.get(("in_step", 1.0))) is not None:
        style = {"label": "streamed in step()", "color": "#6b6b6b", "marker": "D", "markersize": 5, "linestyle": "none"}
        ratio.plot([1.0], [in_step["ratio"]], **style)
        peak.plot([1.0], [in_step["peak_gib"]], **style)
    ratio.axhline(1.0, color="#999999", linewidth=0.7, linestyle="--", zorder=0)
    for axes, title in ((ratio, "iteration, × resident with fp32 masters"), (peak, "peak device memory, GiB")):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("fraction of the state on the host")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.spines[["top", "right"]].set_visible(False)
    peak.set_ylim(bottom=0)
    ratio.legend(frameon=False, fontsize=8.5, loc="upper left")
    title = f"2.70B workload, split masters ({where(next(iter(newest.values())))})"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    save(figure, "overlap_fractions")


if __name__ == "__main__":
    streamed_step()
    overlap_timeline()
    overlap_fractions()
