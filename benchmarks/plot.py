# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documentation from the rows in results/.

python -m benchmarks.plot        (needs matplotlib: pip install '.[bench]')
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import plot_memory
from benchmarks.common import RESULTS
from benchmarks.workload import GPT, Size
from offstage import Machine, OffloadConfig, Workload, make_plan
from offstage.planning.plan import plan_placements
from offstage.planning.sizes import ParamSize, param_sizes

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
KINDS = {False: ("updated on the device", "#3b6fb5", "o"), True: ("CPU takes part", "#c4572e", "s")}
BUDGET_COLORS = {"3GiB": "#8c3f8c", "8GiB": "#3b6fb5", "16GiB": "#4a8f5b"}
WINDOWS_ARE_OPEN_SINCE = "2026-11-15T09:41"  # rows before have windows that were still opening
LIMIT = 0.15


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


# Plans, predicted and measured


def plans() -> None:
    """Every plan that was measured, and what the planner's arithmetic, as it is now, says of it."""
    newest = list({(row["plan_name"], row.get("device_budget")): row for row in rows("plans")}.values())
    sizes = param_sizes(meta_model(), OffloadConfig(master_weights="split"))
    figure, (scatter, shares) = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    draw_predictions(scatter, newest, sizes)
    draw_shares(shares, newest, sizes)
    for axes in (scatter, shares):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"2.70B workload ({where(newest[0])})", fontsize=10, x=0.01, ha="left")
    save(figure, "plans")


def meta_model() -> GPT:
    with torch.device("meta"):
        return GPT(Size()).bfloat16()


def as_it_ran(row: dict[str, Any], sizes: Sequence[ParamSize]) -> OffloadConfig:
    """The row's configuration. Where it leaves the CPU's share open, with the share that gives the row's plan."""
    config = OffloadConfig(**row["config"])
    if config.update_on != "auto" or config.host_fraction is not None:
        return config
    shares = (dataclasses.replace(config, host_fraction=percent / 100) for percent in range(101))
    return next(one for one in shares if plan_placements(sizes, one).summary() == row["plan"])


def predicted_ms(row: dict[str, Any], config: OffloadConfig) -> float:
    """From the machine and the workload that were measured in the row's run."""
    machine, workload = Machine.from_json(json.dumps(row["measured_machine"])), Workload(**row["workload"])
    prediction = make_plan(meta_model(), machine, config, workload=workload).prediction
    assert prediction is not None
    assert prediction.iteration_ms is not None
    return prediction.iteration_ms


def draw_predictions(axes: Axes, found: list[dict[str, Any]], sizes: Sequence[ParamSize]) -> None:
    ends = [600.0, 1350.0]
    below, above = ([factor * end for end in ends] for factor in (1 / (1 + LIMIT), 1 / (1 - LIMIT)))
    axes.fill_betweenx(ends, below, above, color="#eeeeee", linewidth=0, zorder=0, label=f"within {LIMIT:.0%}")
    axes.plot(ends, ends, color="#999999", linewidth=0.8, zorder=0.5)
    for by_cpu, (label, color, marker) in KINDS.items():
        points = [(row, config) for row in found if by_cpu == uses_cpu(config := as_it_ran(row, sizes))]
        for settled, face, suffix in ((True, color, ""), (False, "none", ", window opening")):
            shown = [(row["measured_ms"], predicted_ms(row, one)) for row, one in points if is_settled(row) == settled]
            style: dict[str, Any] = {"s": 22, "marker": marker, "edgecolor": color, "facecolor": face}
            if shown:
                axes.scatter(*zip(*shown, strict=True), label=label + suffix, **style)
    axes.set(xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title("an iteration of every plan", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left", borderpad=0, handletextpad=0.3)


def uses_cpu(config: OffloadConfig) -> bool:
    return config.update_on == "host" or bool(config.host_fraction)


def is_settled(row: dict[str, Any]) -> bool:
    return "window" not in row["config"] or row["date"] >= WINDOWS_ARE_OPEN_SINCE


def draw_shares(axes: Axes, found: list[dict[str, Any]], sizes: Sequence[ParamSize]) -> None:
    """Iterations over the CPU's share: points were measured, lines are predicted."""
    for budget, color in BUDGET_COLORS.items():
        by_hand = [row for row in found if row.get("device_budget") == budget and row["plan_name"].endswith("CPU")]
        by_hand = [row for row in by_hand if "window" not in row["config"]]
        (chosen,) = [row for row in found if row.get("device_budget") == budget and row["plan_name"] == "chosen"]
        config = as_it_ran(chosen, sizes)
        percents = range(0, 101, 2)
        grid = [dataclasses.replace(config, host_fraction=percent / 100) for percent in percents]
        axes.plot(percents, [predicted_ms(chosen, one) for one in grid], color=color, linewidth=1)
        percent = [100 * row["config"]["host_fraction"] for row in by_hand]
        label = f"device_budget of {budget.removesuffix('GiB')} GiB"
        axes.scatter(percent, [row["measured_ms"] for row in by_hand], s=22, color=color, label=label)
        assert config.host_fraction is not None
        axes.scatter([100 * config.host_fraction], [chosen["measured_ms"]], s=55, marker="*", color=color)
    axes.scatter([], [], s=55, marker="*", color="#6b6b6b", label='chosen by update_on="auto"')
    axes.set(ylim=(600, 1250), xlabel="share of what left the device that the CPU updates, %", ylabel="ms")
    axes.set_title("points measured, lines predicted", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2, borderpad=0, handletextpad=0.3)


if __name__ == "__main__":
    streamed_step()
    overlap_timeline()
    overlap_fractions()
    plans()
    try:
        plot_memory.draw()
    except plot_memory.MissingRowsError as error:  # the others are drawn
        print(error)
