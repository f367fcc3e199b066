# SPDX-License-Identifier: Apache-2.0
"""The report's figures of the observed iteration; `None` for one without data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from offstage.config import format_size
from offstage.train.memory_by_owner import OWNERS
from offstage.train.report.chart import Axis, Chart, Point, bytes_axis, text_width, time_axis, value_axis
from offstage.train.report.figures import SMALL_HEIGHT, Figure, Key, both
from offstage.train.report.headline import Limit, limits_of
from offstage.train.report.hover import MOST_MOMENTS, MOST_SMALL_MOMENTS, NARROW, SMALL, Moment, Size, Value, plot
from offstage.train.report.recorded import Recorded
from offstage.train.timeline import COLLECTIVES, COMPUTE, MOST_SPANS, OTHER, Span, merged

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
_MOST_BUSY_BINS = 40
_MOST_PHASES = 300
_MOST_POINTS = 800
"""Of the memory and link figures: about one for each unit of their width."""


# Memory #


def memory(run: Recorded) -> Figure | None:
    """Device memory through one iteration, stacked by owner, with the budgets that it had to keep."""
    seen = run.observed.get("memory") or {}
    times, sizes = seen.get("ms") or [], seen.get("bytes") or {}
    owners = [owner for owner in OWNERS if any(sizes.get(owner, ()))]
    if len(times) < 2 or not owners:
        return None
    total = [sum(sizes[owner][i] for owner in owners) for i in range(len(times))]
    peak = run.most("device_peak_bytes")
    highest = total.index(max(total))
    limits = limits_of(run, max(total[highest], peak or 0.0))
    high = max(total[highest], peak or 0.0, *(limit.height for limit in limits if limit.is_drawn), 0.0)

    def draw(size: Size) -> Chart:
        axis = _iteration_axis(run, times[-1])
        chart = Chart(axis, bytes_axis("device memory", [high]), width=size.width, height=330, names=_phases(run))
        _shade_phases(chart, run)
        drawn = highest_of_neighbours(total, _MOST_POINTS if size is not NARROW else _MOST_POINTS // 2)
        below = [0.0] * len(drawn)
        for owner in owners:
            above = [a + sizes[owner][i] for a, i in zip(below, drawn, strict=True)]
            lower, upper = ([(times[i], y) for i, y in zip(drawn, ys, strict=True)] for ys in (below, above))
            chart.area(lower, upper, owner)
            below = above
        if peak is not None:
            chart.level(peak, "ink", over_areas=True)
        for limit in limits:
            if limit.is_drawn:
                chart.level(limit.height, limit.color, dashed=limit.dashed, over_areas=True)
        return chart

    def moment(i: int) -> Moment:
        values = [Value(owner, owner, format_size(sizes[owner][i])) for owner in reversed(owners)]
        title = f"{_ms(times[i])}, {seen['where'][i]}"
        return Moment(times[i], title, [*values, Value("none", "together", format_size(total[i]))])

    keys = [Key(owner, owner, format_size(sizes[owner][highest])) for owner in reversed(owners)]
    if peak is not None:
        keys.append(Key("ink", "peak of the whole run", format_size(peak), "line dashed"))
    keys += [_limit_key(limit) for limit in limits]
    caption = (
        f"Most at once: {format_size(total[highest])}, seen at “{seen['where'][highest]}”. Sizes beside the names are "
        f"those at that moment. {_what_activations_are(run)}"
    )
    moments = [moment(i) for i in highest_of_neighbours(total, MOST_MOMENTS)]
    return Figure(plot(draw, "Device memory by owner over one iteration", moments), keys, caption)


def memories(a: Recorded, b: Recorded) -> Figure | None:
    """Device memory of two runs through one iteration of each."""
    found = []
    for run, name, color, width in both(a, b):
        seen = run.observed.get("memory") or {}
        total = [float(sum(at_once)) for at_once in zip(*(seen.get("bytes") or {}).values(), strict=True)]
        if len(total) > 1:
            drawn = highest_of_neighbours(total)
            found.append((name, color, width, [(seen["ms"][i], total[i]) for i in drawn], max(total)))
    if not found:
        return None

    end = max(points[-1][0] for _, _, _, points, _ in found)

    def draw(size: Size) -> Chart:
        axis = bytes_axis("device memory", [high for *_, high in found])
        chart = Chart(time_axis("time since the iteration began", end), axis, width=size.width, height=300.0)
        for _, color, width, points, _ in found:
            chart.line(points, color, width=width)
        return chart

    moments = []
    for i in range(MOST_MOMENTS):
        at = (i + 0.5) * end / MOST_MOMENTS
        values = [
            Value(color, name, format_size(_at(points, at)))
            for name, color, _, points, _ in found
            if at <= points[-1][0]
        ]
        moments.append(Moment(at, _ms(at), values))

    keys = [Key(color, f"{name}, most at once", format_size(high), "line") for name, color, _, _, high in found]
    return Figure(plot(draw, "Device memory of both runs over one iteration", moments), keys)


def _at(points: Sequence[Point], x: float) -> float:
    """The value at `x`, on the line through `points`."""
    after = next((i for i, point in enumerate(points) if point[0] >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[after]
    share = min(1.0, max(0.0, (x - x0) / (x1 - x0))) if x1 > x0 else 1.0
    return y0 + share * (y1 - y0)


def _limit_key(limit: Limit) -> Key:
    text = limit.text if limit.is_drawn else f"{limit.text}, above this figure"
    return Key(limit.color, text, format_size(limit.nbytes), "line dashed" if limit.dashed else "line")


def highest_of_neighbours(values: Sequence[float], most: int = _MOST_POINTS) -> list[int]:
    """Positions of at most `most` values, the highest of all among them. Fewer values all stay."""
    size = -(-len(values) // most)
    parts = (range(start, min(start + size, len(values))) for start in range(0, len(values), size))
    return [max(part, key=values.__getitem__) for part in parts]


def _what_activations_are(run: Recorded) -> str:
    if run.observed.get("device") == "cpu":
        return (
            "This run had no accelerator: its device is the CPU, and arenas with offloaded state are not shown. "
            "Activations are all other tensors of the iteration."
        )
    return "Activations are all other bytes of the allocator, temporary buffers included."


# Lanes #


def lanes(run: Recorded) -> Figure | None:
    """The work of each lane through one iteration."""
    spans: dict[str, Any] = run.observed.get("lanes") or {}
    shown = [lane for lane in LANES if spans.get(lane)]
    if not shown:
        return None
    end = _end_ms(run)
    busy_ms: dict[str, float] = run.observed.get("busy_ms") or {}
    work = {lane: spans[lane] if len(spans[lane]) <= MOST_SPANS else merged(sorted(spans[lane])) for lane in shown}

    def draw(size: Size) -> Chart:
        names = {lane: LANES[lane][0].partition(":")[0] if size is NARROW else LANES[lane][0] for lane in shown}
        busy = {lane: f"{_ms(busy_ms.get(lane, 0.0))}{'' if size is NARROW else ' busy'}" for lane in shown}
        left = 14.0 + max(text_width(name) for name in names.values())
        right = 14.0 + max(text_width(text) for text in busy.values())
        shape: dict[str, Any] = {"width": size.width, "left": left, "right": right, "names": _phases(run)}
        row = 27.0
        above = Chart(_iteration_axis(run, end), None, **shape).top
        chart = Chart(_iteration_axis(run, end), None, height=above + row * len(shown) + 42.0, **shape)
        _shade_phases(chart, run)
        for position, lane in enumerate(shown):
            top = chart.top + row * position + 5.0
            chart.text(left - 8.0, top + 13.0, names[lane], anchor="end")
            chart.bars([(start, stop) for start, stop, _ in work[lane]], top, row - 10.0, LANES[lane][1])
            chart.text(chart.right + 10.0, top + 13.0, busy[lane], kind="quiet")
        return chart

    lengths = ", ".join(f"{name} {_ms(stop - start)}" for name, start, stop in _phases(run))
    said = [f"{lengths[:1].upper()}{lengths[1:]}."] if lengths else []
    said.append("Numbers at the right are the time for which a lane was busy.")
    if [name for name, _, _ in _phases(run)][-2:] == ["step", "forward"]:
        said.append("The last forward is the next iteration’s, under which late updates end.")
    if run.observed.get("device") == "cpu":
        said.append("Without an accelerator one thread does the lanes’ work as it is submitted: nothing overlaps.")
    elif end > float(run.observed.get("end_ms") or 0.0):
        said.append("Work after the last phase overlaps the next forward in steps that are not observed.")
    moments = _busy_moments(run, work, end, MOST_MOMENTS)
    return Figure(plot(draw, "When each lane worked in one iteration", moments), (), " ".join(said))


def _busy_moments(run: Recorded, work: dict[str, Any], end: float, most: int) -> list[Moment]:
    """The share of each of `most` equal parts of the iteration for which each lane was busy."""
    width = max(end, 1e-6) / most
    shares = {lane: _shares(spans, width, most) for lane, spans in work.items()}
    phases = _phases(run)
    found = []
    for i in range(most):
        here = (i + 0.5) * width
        phase = next((name for name, start, stop in phases if start <= here < stop), "")
        values = [
            Value(LANES[lane][1], LANES[lane][0].partition(":")[0], f"{max(1.0, 100 * shares[lane][i]):.0f}% busy")
            for lane in work
            if shares[lane][i] > 0
        ]
        found.append(Moment(here, f"{_ms(i * width)} to {_ms((i + 1) * width)}{phase and f', {phase}'}", values))
    return found


def _shares(spans: Sequence[Span], width: float, num: int) -> list[float]:
    """Of `num` intervals of `width`, the shares that are covered by `spans`, which are made disjoint first."""
    found, reached = [0.0] * num, 0.0
    for start, stop, _ in sorted(spans):
        start, stop = max(start, reached), min(stop, num * width)
        if stop <= start:
            continue
        reached = stop
        for i in range(int(start / width), min(num - 1, int(stop / width)) + 1):
            found[i] += max(0.0, min(stop, (i + 1) * width) - max(start, i * width)) / width
    return [min(1.0, share) for share in found]


# Link and CPU #


def link(run: Recorded) -> Figure | None:
    """Transfer rates in both directions through one iteration."""
    seen = run.observed.get("link") or {}
    width, up, down = float(seen.get("bin_ms") or 0.0), seen.get("up_bytes") or [], seen.get("down_bytes") or []
    if not width or not (any(up) or any(down)):
        return None
    rates = {name: [size / width / 1e6 for size in sizes] for name, sizes in (("fetch", up), ("store", down))}
    ceiling = run.receipt.get("link_measured_gb_per_s")
    top = max([*rates["fetch"], *rates["store"], float(ceiling or 0.0)])
    words = {"fetch": "to the device", "store": "to the host"}

    def draw(size: Size) -> Chart:
        axis, shape = value_axis("GB/s", [top], zero=True, parts=4), {"width": size.width, "height": SMALL_HEIGHT}
        chart = Chart(_iteration_axis(run, width * len(up)), axis, **shape, names=_phases(run))
        _shade_phases(chart, run)
        for name in words:
            chart.line(_stairs(rates[name], width), name, width=1.5)
        if ceiling:
            chart.level(float(ceiling), "ink")
        return chart

    moments = []
    size = -(-len(up) // MOST_SMALL_MOMENTS)
    for start in range(0, len(up), size):
        stop = min(len(up), start + size)
        means = {name: sum(rates[name][start:stop]) / (stop - start) for name in words}
        values = [Value(name, text, f"{means[name]:.1f} GB/s") for name, text in words.items()]
        moments.append(Moment((start + stop) / 2 * width, f"{_ms(start * width)} to {_ms(stop * width)}", values))

    keys = [Key(name, text, format_size(sum(up if name == "fetch" else down)), "line") for name, text in words.items()]
    if ceiling:
        keys.append(Key("ink", "measured, both directions busy", f"{float(ceiling):.1f} GB/s", "line dashed"))
    on_cpu = run.observed.get("device") == "cpu"
    caption = "Copies between arenas and slots, both in the CPU's memory." if on_cpu else "All copies over the link."
    return Figure(plot(draw, "Use of the link over one iteration", moments, (SMALL,)), keys, caption)


def cpu(run: Recorded) -> Figure | None:
    """Busy cores through one iteration."""
    seen = run.observed.get("cpu") or {}
    times, cores = seen.get("ms") or [], seen.get("cores") or []
    if len(times) < 2 or len(cores) != len(times) - 1:
        return None
    edges, means = _in_fewer_bins(times, cores)
    available = float(seen.get("available") or 0)

    def draw(size: Size) -> Chart:
        axis = value_axis("cores busy", [*means, available], zero=True, parts=4)
        chart = Chart(_iteration_axis(run, times[-1], host=True), axis, width=size.width, height=SMALL_HEIGHT)
        points = [(edges[i + side], mean) for i, mean in enumerate(means) for side in (0, 1)]
        chart.area([(x, 0.0) for x, _ in points], points, "host", opacity=0.3)
        chart.line(points, "host", width=1.5)
        if available:
            chart.level(available, "ink")
        return chart

    moments = [
        Moment((start + stop) / 2, f"{_ms(start)} to {_ms(stop)}", [Value("host", "cores busy", f"{mean:.2f}")])
        for (start, stop), mean in zip(pairwise(edges), means, strict=True)
    ]

    seconds = sum(mean * (edges[i + 1] - edges[i]) for i, mean in enumerate(means))
    keys = [Key("host", "this process, on average", f"{seconds / max(times[-1] - times[0], 1e-9):.2f}", "line")]
    if available:
        keys.append(Key("ink", "usable", f"{available:.0f}", "line dashed"))
    html = plot(draw, "Cores busy over one iteration", moments, (SMALL,))
    return Figure(html, keys, "By the process's own CPU time.")


# Time #


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
