# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documentation from the rows in results/.

python -m benchmarks.plot        (needs matplotlib: pip install '.[bench]')
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.common import RESULTS

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
COLORS = {"fetch": "#3b6fb5", "update": "#c4572e", "store": "#4a8f5b"}
LABELS = {"fetch": "fetch\nhost → device", "update": "update", "store": "store\ndevice → host"}
SHOWN_MS = 12.0


def rows(question: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{question}.jsonl").read_text().splitlines()]


def streamed_step() -> None:
    """The lanes of one streamed step: its first milliseconds."""
    row = rows("trace")[-1]
    figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
    for height, lane in enumerate(("store", "update", "fetch")):
        bars = [(a / 1e3, (b - a) / 1e3) for a, b in row["spans_us"][lane] if a / 1e3 < SHOWN_MS]
        axes.broken_barh(bars, (height - 0.36, 0.72), facecolors=COLORS[lane], edgecolor="white", linewidth=0.6)
    axes.set_yticks(range(3), [LABELS[lane] for lane in ("store", "update", "fetch")])
    axes.set_xlim(0, SHOWN_MS)
    axes.set_xlabel("milliseconds since the first copy")
    machine, versions = row["machine"]["device"], row["versions"]["torch"]
    axes.set_title(f"One streamed step, first {SHOWN_MS:.0f} ms ({machine}, torch {versions})", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / "streamed_step.svg")


if __name__ == "__main__":
    streamed_step()
