# SPDX-License-Identifier: Apache-2.0
"""The report's figures over the steps of one or two runs; `None` for one without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offstage.config import format_size
from offstage.train.report.chart import Axis, Chart, bytes_axis, steps_axis, thinned, value_axis
from offstage.train.report.hover import (
    MOST_MOMENTS,
    MOST_SMALL_MOMENTS,
    NARROW,
    SMALL,
    WIDE,
    Series,
    Size,
    over_steps,
    plot,
)
from offstage.train.report.recorded import Recorded

SMALL_HEIGHT = 190.0
_LOSS = "loss: mean cross-entropy, nats per token"
_WAITS = "per step, ms"
_MEMORY = "memory"


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

    html: str
    keys: Sequence[Key] = ()
    caption: str = ""


def decimals(value: float) -> str:
    return f"{value:.4f}"


def number(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def in_ms(value: float) -> str:
    return f"{number(value)} ms"


# One run #


def loss(run: Recorded) -> Figure | None:
    """Training and evaluation, over steps."""
    train = Series("train", "training", run.series("loss"), decimals)
    evaluated = Series("eval", "evaluation", run.series("eval_loss"), decimals)
    found = lines("Loss over steps", _LOSS, [train, evaluated], dotted=(evaluated,))
    if found is None:
        return None
    each = -(-len(train.points) // len(thinned(train.points))) if train.points else 1
    what = f"training (mean and range of {each} steps)" if each > 1 else "training"
    keys = [Key("train", what, decimals(train.points[-1][1]), "line")] if train.points else []
    if evaluated.points:
        keys.append(Key("eval", "evaluation", decimals(evaluated.points[-1][1]), "line"))
    skipped = [row["step"] for row in run.rows if row.get("skipped")]
    caption = "Values beside the names are the last ones."
    if skipped:
        caption += f" {len(skipped)} steps were skipped, because a gradient was not finite (first: {skipped[0]})."
    return Figure(found, keys, caption)


def over_the_run(run: Recorded) -> list[tuple[str, Figure]]:
    """Speed, waiting, memory and the gradients' norm: small ones, side by side."""
    waits = {"exposed_ms": ("waited for", "update"), "hidden_ms": ("hidden", "store")}
    memory = {
        "device_peak_bytes": ("device, peak so far", "activations"),
        "device_bytes": ("device, after the step", "weights"),
        "host_rss_bytes": ("host, this process", "state"),
    }
    found = [
        ("Speed", _of_run(run, "tokens per second", {"tokens_per_s": ("tokens/s", "train")}, number)),
        ("Updates: waited for and hidden", _of_run(run, _WAITS, waits, in_ms)),
        ("Memory", _of_run(run, _MEMORY, memory, format_size)),
        (
            "Norm of the gradients",
            _of_run(run, "L2 norm before clipping", {"grad_norm": ("norm", "gradients")}, number),
        ),
    ]
    return [(title, figure) for title, figure in found if figure is not None]


def _of_run(
    run: Recorded, label: str, names: dict[str, tuple[str, str]], show: Callable[[float], str]
) -> Figure | None:
    series = [Series(color, text, run.series(name), show) for name, (text, color) in names.items()]
    found = lines(f"{label} over steps", label, series, small=True)
    if found is None:
        return None
    keys = [
        Key(color, text, show(usual), "line")
        for name, (text, color) in names.items()
        if (usual := run.usual(name)) is not None
    ]
    return Figure(found, keys)


# Two runs #


def losses(a: Recorded, b: Recorded) -> Figure | None:
    """Training and evaluation of both."""
    series = [
        Series(color, f"{name}, {what}", run.series(field), decimals, dashed, width)
        for run, name, color, width in both(a, b)
        for field, what, dashed in (("loss", "training", False), ("eval_loss", "evaluation", True))
    ]
    found = lines("Loss of both runs over steps", _LOSS, series)
    return None if found is None else Figure(found, _keys(series), "Values beside the names are the last ones.")


def compared(a: Recorded, b: Recorded) -> list[tuple[str, Figure]]:
    """One curve of each run: small figures, side by side."""
    shown: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("Speed", "tokens per second", "tokens_per_s", number),
        ("Step", "per step, ms", "step_ms", in_ms),
        ("Waited for updates", "per step, ms", "exposed_ms", in_ms),
        ("Peak on the device so far", _MEMORY, "device_peak_bytes", format_size),
        ("Host memory of the process", _MEMORY, "host_rss_bytes", format_size),
        ("Norm of the gradients", "L2 norm before clipping", "grad_norm", number),
    ]
    found = []
    for title, label, name, show in shown:
        series = [Series(color, text, run.series(name), show, width=width) for run, text, color, width in both(a, b)]
        html = lines(f"{title}: both runs over steps", label, series, small=True)
        usual = [(run.usual(name), text, color) for run, text, color, _ in both(a, b)]
        keys = [Key(color, text, show(value), "line") for value, text, color in usual if value is not None]
        if html is not None:
            found.append((title, Figure(html, keys)))
    return found


def both(a: Recorded, b: Recorded) -> list[tuple[Recorded, str, str, float]]:
    """Run, name, colour and width of lines: A shows on both sides of B where they are equal."""
    return [(a, "A", "train", 2.8), (b, "B", "eval", 1.3)]


def _keys(series: Sequence[Series]) -> list[Key]:
    kinds = {False: "line", True: "line dashed"}
    return [Key(one.color, one.name, one.show(one.points[-1][1]), kinds[one.dashed]) for one in series if one.points]


# Drawing #


def lines(
    description: str, label: str, series: Sequence[Series], *, dotted: Sequence[Series] = (), small: bool = False
) -> str | None:
    """Series over steps on one vertical axis; `dotted`: with a dot at each point. `None` without any point."""
    series = [one for one in series if one.points]
    if not series:
        return None
    steps = [x for one in series for x, _ in one.points]
    values = [y for one in series for _, y in one.points]
    axis = _axis(label, values, small=small)

    def draw(size: Size) -> Chart:
        chart = Chart(steps_axis(steps), axis, width=size.width, height=SMALL_HEIGHT if small else 300.0)
        for one in series:
            thin = thinned(one.points, 160 if small else 260)
            if len(thin) < len(one.points) and one not in dotted:
                chart.area([(x, a) for x, _, a, _ in thin], [(x, b) for x, _, _, b in thin], one.color, opacity=0.22)
            points = [(x, mean) for x, mean, _, _ in thin]
            chart.line(points, one.color, dashed=one.dashed, width=one.width)
            if one in dotted:
                chart.dots(points, one.color)
        return chart

    moments = over_steps(series, MOST_SMALL_MOMENTS if small else MOST_MOMENTS)
    return plot(draw, description, moments, (SMALL,) if small else (WIDE, NARROW))


def _axis(label: str, values: Sequence[float], *, small: bool) -> Axis:
    if label == _MEMORY:
        return bytes_axis(label, values, parts=4)
    return value_axis(label, values, zero=small, parts=4 if small else 5)
