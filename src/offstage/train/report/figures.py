# SPDX-License-Identifier: Apache-2.0
"""The report's figures; `None` for one without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offstage.config import format_size
from offstage.train.memory_by_owner import OWNERS
from offstage.train.report.chart import (
    Axis,
    Chart,
    Point,
    bytes_axis,
    steps_axis,
    text_width,
    thinned,
    time_axis,
    value_axis,
)
from offstage.train.report.recorded import Recorded
from offstage.train.timeline import COLLECTIVES, COMPUTE, MOST_SPANS, OTHER, merged

LANES = {
    COMPUTE: ("model", "model"),
    "fetch": ("fetch: host → device", "fetch"),
    "update": ("update", "update"),
    "store": ("store: device → host", "store"),
    "lower": ("lower: gradients → host", "lower"),
    "host": ("updates on the host", "host"),
    "raise": ("raise: weights → device", "raise"),
    COLLECTIVES: ("collectives", "collectives"),
    OTHER: ("other streams", "other"),
}
"""Label and colour of each lane, in the order of rows."""
_SMALL: dict[str, Any] = {"width": 400.0, "height": 190.0}
_MOST_BUSY_BINS = 40
_MOST_PHASES = 300
_MOST_POINTS = 800
"""Of the memory and link figures: about one for each unit of their width."""


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    color: str
    text: str
    value: str = ""
    kind: str = ""
    """Empty for an area, ``"line"``, or ``"line dashed"``."""


@dataclass(frozen=True)
class Figure:
    """A figure with its legend and caption."""

    svg: str
    keys: Sequence[Key] = ()
    caption: str = ""


# Over the run #


def loss(run: Recorded) -> Figure | None:
    """Training and evaluation, over steps."""
    train, evaluated = run.series("loss"), run.series("eval_loss")
    if not train and not evaluated:
        return None
    steps = [x for x, _ in (*train, *evaluated)]
    values = [y for _, y in (*train, *evaluated)]
    chart = Chart(steps_axis(steps), value_axis("loss: mean cross-entropy, nats per token", values), height=300)
    keys = []
    if train:
        thin = thinned(train)
        if len(thin) < len(train):
            chart.area([(x, a) for x, _, a, _ in thin], [(x, b) for x, _, _, b in thin], "train", opacity=0.22)
        chart.line([(x, mean) for x, mean, _, _ in thin], "train")
        each = -(-len(train) // len(thin))
        what = f"training (mean and range of {each} steps)" if each > 1 else "training"
        keys.append(Key("train", what, f"{train[-1][1]:.4f}", "line"))
    if evaluated:
        points = [(x, mean) for x, mean, _, _ in thinned(evaluated)]
        chart.line(points, "eval")
        chart.dots(points, "eval")
        keys.append(Key("eval", "evaluation", f"{evaluated[-1][1]:.4f}", "line"))
    skipped = [row["step"] for row in run.rows if row.get("skipped")]
    caption = "Values beside the names are the last ones."
    if skipped:
        caption += f" {len(skipped)} steps were skipped, because a gradient was not finite (first: {skipped[0]})."
    return Figure(chart.svg("Loss over steps"), keys, caption)


def over_the_run(run: Recorded) -> list[tuple[str, Figure]]:
    """Speed, waiting, memory and the gradients' norm: small ones, side by side."""
    waits = {"exposed_ms": ("waited for", "update"), "hidden_ms": ("hidden", "store")}
    memory = {
        "device_peak_bytes": ("device, peak so far", "activations"),
        "device_bytes": ("device, after the step", "weights"),
        "host_rss_bytes": ("host, this process", "state"),
    }
    found = [
        ("Speed", _series(run, "tokens per second", {"tokens_per_s": ("tokens/s", "train")})),
        ("Updates: waited for and hidden", _series(run, "per step, ms", waits, unit=" ms")),
        ("Memory", _series(run, "memory", memory, sizes=True)),
        ("Norm of the gradients", _series(run, "L2 norm before clipping", {"grad_norm": ("norm", "gradients")})),
    ]
    return [(title, figure) for title, figure in found if figure is not None]


def _series(
    run: Recorded, label: str, names: dict[str, tuple[str, str]], *, sizes: bool = False, unit: str = ""
) -> Figure | None:
    series = {name: points for name in names if (points := run.series(name))}
    if not series:
        return None
    steps = [x for points in series.values() for x, _ in points]
    values = [y for points in series.values() for _, y in points]
    y = bytes_axis(label, values, parts=4) if sizes else value_axis(label, values, zero=True, parts=4)
    chart = Chart(steps_axis(steps), y, **_SMALL)
    keys = []
    for name, points in series.items():
        text, color = names[name]
        thin = thinned(points, 160)
        if len(thin) < len(points):
            chart.area([(x, a) for x, _, a, _ in thin], [(x, b) for x, _, _, b in thin], color, opacity=0.22)
        chart.line([(x, mean) for x, mean, _, _ in thin], color)
        usual = run.usual(name) or 0.0
        keys.append(Key(color, text, format_size(usual) if sizes else f"{_number(usual)}{unit}", "line"))
    return Figure(chart.svg(f"{label} over steps"), keys)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# One iteration #


def memory(run: Recorded) -> Figure | None:
    """Device memory through one iteration, stacked by owner."""
    seen = run.observed.get("memory") or {}
    times, sizes = seen.get("ms") or [], seen.get("bytes") or {}
    owners = [owner for owner in OWNERS if any(sizes.get(owner, ()))]
    if len(times) < 2 or not owners:
        return None
    total = [sum(sizes[owner][i] for owner in owners) for i in range(len(times))]
    peak = run.most("device_peak_bytes")
    high = max(max(total), peak or 0.0)
    chart = Chart(_iteration_axis(run, times[-1]), bytes_axis("device memory", [high]), height=330, names=_phases(run))
    _shade_phases(chart, run)
    drawn = _highest_of_neighbours(total)
    below = [0.0] * len(drawn)
    for owner in owners:
        above = [a + sizes[owner][i] for a, i in zip(below, drawn, strict=True)]
        lower, upper = ([(times[i], y) for i, y in zip(drawn, ys, strict=True)] for ys in (below, above))
        chart.area(lower, upper, owner)
        below = above
    highest = total.index(max(total))
    keys = [Key(owner, owner, format_size(sizes[owner][highest])) for owner in reversed(owners)]
    if peak is not None:
        chart.level(peak, "ink")
        keys.append(Key("ink", "peak of the whole run", format_size(peak), "line dashed"))
    where = seen["where"][highest]
    caption = (
        f"Most at once: {format_size(total[highest])}, seen at “{where}”. Sizes beside the names are those at that "
        f"moment. {_what_activations_are(run)}"
    )
    return Figure(chart.svg("Device memory by owner over one iteration"), keys, caption)


def _highest_of_neighbours(values: Sequence[float]) -> list[int]:
    """Positions of at most `_MOST_POINTS` values, the highest of all among them. Fewer values all stay."""
    size = -(-len(values) // _MOST_POINTS)
    parts = (range(start, min(start + size, len(values))) for start in range(0, len(values), size))
    return [max(part, key=values.__getitem__) for part in parts]


def _what_activations_are(run: Recorded) -> str:
    if run.observed.get("device") == "cpu":
        return (
            "This run had no accelerator: its device is the CPU, and arenas with offloaded state are not shown. "
            "Activations are all other tensors of the iteration."
        )
    return "Activations are all other bytes of the allocator, temporary buffers included."


def lanes(run: Recorded) -> Figure | None:
    """The work of each lane through one iteration."""
    spans: dict[str, Any] = run.observed.get("lanes") or {}
    shown = [lane for lane in LANES if spans.get(lane)]
    if not shown:
        return None
    end = _end_ms(run)
    busy_ms: dict[str, float] = run.observed.get("busy_ms") or {}
    busy = {lane: f"{_ms(busy_ms.get(lane, 0.0))} busy" for lane in shown}
    left = 14.0 + max(text_width(LANES[lane][0]) for lane in shown)
    row = 27.0
    right = 14.0 + max(text_width(text) for text in busy.values())
    shape: dict[str, Any] = {"left": left, "right": right, "names": _phases(run)}
    above = Chart(_iteration_axis(run, end), None, **shape).top
    chart = Chart(_iteration_axis(run, end), None, height=above + row * len(shown) + 42.0, **shape)
    _shade_phases(chart, run)
    for number, lane in enumerate(shown):
        name, color = LANES[lane]
        top = chart.top + row * number + 5.0
        chart.text(left - 8.0, top + 13.0, name, anchor="end")
        work = spans[lane] if len(spans[lane]) <= MOST_SPANS else merged(sorted(spans[lane]))
        chart.bars([(start, stop) for start, stop, _ in work], top, row - 10.0, color)
        chart.text(chart.right + 10.0, top + 13.0, busy[lane], kind="quiet")
    lengths = ", ".join(f"{name} {_ms(stop - start)}" for name, start, stop in _phases(run))
    said = [f"{lengths[:1].upper()}{lengths[1:]}."] if lengths else []
    if [name for name, _, _ in _phases(run)][-2:] == ["step", "forward"]:
        said.append("The last forward is the next iteration’s, under which late updates end.")
    if run.observed.get("device") == "cpu":
        said.append("Without an accelerator one thread does the lanes’ work as it is submitted: nothing overlaps.")
    elif end > float(run.observed.get("end_ms") or 0.0):
        said.append("Work after the last phase overlaps the next forward in steps that are not observed.")
    return Figure(chart.svg("When each lane worked in one iteration"), (), " ".join(said))


def link(run: Recorded) -> Figure | None:
    """Transfer rates in both directions through one iteration."""
    seen = run.observed.get("link") or {}
    width, up, down = float(seen.get("bin_ms") or 0.0), seen.get("up_bytes") or [], seen.get("down_bytes") or []
    if not width or not (any(up) or any(down)):
        return None
    rates = {name: [size / width / 1e6 for size in sizes] for name, sizes in (("fetch", up), ("store", down))}
    ceiling = run.receipt.get("link_measured_gb_per_s")
    top = max([*rates["fetch"], *rates["store"], float(ceiling or 0.0)])
    chart = Chart(
        _iteration_axis(run, width * len(up)),
        value_axis("GB/s", [top], zero=True, parts=4),
        **_SMALL,
        names=_phases(run),
    )
    _shade_phases(chart, run)
    keys = []
    for name, text in (("fetch", "to the device"), ("store", "to the host")):
        chart.line(_stairs(rates[name], width), name, width=1.5)
        keys.append(Key(name, text, format_size(sum(up if name == "fetch" else down)), "line"))
    if ceiling:
        chart.level(float(ceiling), "ink")
        keys.append(Key("ink", "measured, both directions busy", f"{float(ceiling):.1f} GB/s", "line dashed"))
    cpu = run.observed.get("device") == "cpu"
    caption = "Copies between arenas and slots, both in the CPU's memory." if cpu else "All copies over the link."
    return Figure(chart.svg("Use of the link over one iteration"), keys, caption)


def cpu(run: Recorded) -> Figure | None:
    """Busy cores through one iteration."""
    seen = run.observed.get("cpu") or {}
    times, cores = seen.get("ms") or [], seen.get("cores") or []
    if len(times) < 2 or len(cores) != len(times) - 1:
        return None
    edges, means = _in_fewer_bins(times, cores)
    available = float(seen.get("available") or 0)
    chart = Chart(
        _iteration_axis(run, times[-1], host=True),
        value_axis("cores busy", [*means, available], zero=True, parts=4),
        **_SMALL,
    )
    points = [(edges[i + side], mean) for i, mean in enumerate(means) for side in (0, 1)]
    chart.area([(x, 0.0) for x, _ in points], points, "host", opacity=0.3)
    chart.line(points, "host", width=1.5)
    seconds = sum(mean * (edges[i + 1] - edges[i]) for i, mean in enumerate(means))
    keys = [Key("host", "this process, on average", f"{seconds / max(times[-1] - times[0], 1e-9):.2f}", "line")]
    if available:
        chart.level(available, "ink")
        keys.append(Key("ink", "usable", f"{available:.0f}", "line dashed"))
    return Figure(chart.svg("Cores busy over one iteration"), keys, "By the process's own CPU time.")


def _iteration_axis(run: Recorded, last_ms: float, *, host: bool = False) -> Axis:
    accelerator = run.observed.get("device") != "cpu"
    clock = "time on the host" if host and accelerator else "time since the iteration began"
    return time_axis(clock, last_ms if host else max(last_ms, _end_ms(run)))


def _end_ms(run: Recorded) -> float:
    spans: dict[str, Any] = run.observed.get("lanes") or {}
    ends = [float(span[1]) for found in spans.values() for span in found[-1:]]
    return max([float(run.observed.get("end_ms") or 0.0), *ends])


def _phases(run: Recorded) -> list[tuple[str, float, float]]:
    return [(one["name"], one["start_ms"], one["stop_ms"]) for one in (run.observed.get("phases") or [])[:_MOST_PHASES]]


def _shade_phases(chart: Chart, run: Recorded) -> None:
    for name, start, stop in _phases(run):
        if name in ("forward", "backward", "step"):
            chart.band(start, stop, f"phase-{name}")


def _stairs(values: Sequence[float], width: float) -> list[Point]:
    return [((i + side) * width, value) for i, value in enumerate(values) for side in (0, 1)]


def _in_fewer_bins(edges: Sequence[float], means: Sequence[float]) -> tuple[list[float], list[float]]:
    """Join neighbouring intervals until each is wide enough to see: single ones of a few milliseconds jitter."""
    least = (edges[-1] - edges[0]) / _MOST_BUSY_BINS
    joined, found, amount = [edges[0]], [], 0.0
    for i, mean in enumerate(means):
        amount += mean * (edges[i + 1] - edges[i])
        if edges[i + 1] - joined[-1] >= least or i == len(means) - 1:
            found.append(amount / max(edges[i + 1] - joined[-1], 1e-9))
            joined.append(edges[i + 1])
            amount = 0.0
    return joined, found


def _ms(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
