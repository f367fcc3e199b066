# SPDX-License-Identifier: Apache-2.0
"""The page about two runs: what differs in their settings and machines, and in what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from offstage.config import format_size
from offstage.train.report import figures, iteration, parts, tables
from offstage.train.report.headline import exposed_ms, net_saved_bytes, offloads, peak_bytes
from offstage.train.report.recorded import Recorded, is_number

_UNSET = "not set"


class Losses(NamedTuple):
    """The losses of the steps that both runs made."""

    num_common: int
    first_different: int | None
    most_apart: float
    at_step: int | None


def write_comparison(a: Path, b: Path) -> Path:
    """Write `a`/compare.html about the runs in `a` and `b`, and return its path."""
    found = Recorded.read(Path(a)), Recorded.read(Path(b))
    return parts.write_new(Path(a) / "compare.html", make_comparison(*found).encode())


def make_comparison(a: Recorded, b: Recorded) -> str:
    """The whole document, without scripts or external resources."""
    body = [_head(a, b), _problems(a, b), _results(a, b), _settings(a, b), _loss(a, b), _memory(a, b), _curves(a, b)]
    return parts.document(f"{a.name} and {b.name}", body, "the files of the two runs’ folders")


# Differences #


def losses(a: Recorded, b: Recorded) -> Losses:
    """Compare the training losses step by step."""
    of_a, of_b = dict(a.series("loss")), dict(b.series("loss"))
    common = sorted(of_a.keys() & of_b.keys())
    different = [step for step in common if of_a[step] != of_b[step]]
    worst = max(different, key=lambda step: abs(of_b[step] - of_a[step]), default=None)
    apart = 0.0 if worst is None else abs(of_b[worst] - of_a[worst])
    return Losses(len(common), int(different[0]) if different else None, apart, None if worst is None else int(worst))


def said_of(found: Losses) -> str:
    """The comparison of the losses as a sentence."""
    if not found.num_common:
        return "The runs have no step with a loss in common."
    if found.first_different is None:
        return f"Bit-identical losses in all {found.num_common:,} steps that both runs recorded."
    return (
        f"The losses first differ at step {found.first_different:,}, and most at step {found.at_step:,}, by "
        f"{found.most_apart:.3g}; {found.num_common:,} steps compared."
    )


def different_settings(a: Recorded, b: Recorded) -> list[tuple[str, str, str]]:
    """Settings of config.toml that are not equal, but for the folder."""
    found = []
    for section in dict.fromkeys([*a.settings, *b.settings]):
        of_a, of_b = a.settings.get(section, {}), b.settings.get(section, {})
        for name in dict.fromkeys([*of_a, *of_b]):
            if of_a.get(name) != of_b.get(name) and (section, name) != ("run", "folder"):
                found.append((f"{section}.{name}".removeprefix("."), _value(of_a.get(name)), _value(of_b.get(name))))
    return found


def different_surroundings(a: Recorded, b: Recorded) -> list[tuple[str, str, str]]:
    """Versions, machines, processes and sizes that are not equal."""
    found = []
    for name in ("versions", "machine", "world", "parameters", "tokens_per_step"):
        of_a, of_b = a.run.get(name), b.run.get(name)
        if isinstance(of_a, dict) and isinstance(of_b, dict):
            for part in dict.fromkeys([*of_a, *of_b]):
                if of_a.get(part) != of_b.get(part):
                    show = _size if part.endswith("_bytes") else _value
                    found.append((f"{name}.{part}", show(of_a.get(part)), show(of_b.get(part))))
        elif of_a != of_b:
            found.append((name.replace("_", " "), _value(of_a), _value(of_b)))
    return found


def _value(value: Any) -> str:
    if value is None:
        return _UNSET
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size(value: Any) -> str:
    return format_size(value) if is_number(value) else _value(value)


def results(a: Recorded, b: Recorded) -> list[tuple[str, str, str, str]]:
    """What came of the runs: A, B, and B as a share of A or less A."""

    def size(value: float) -> str:
        return format_size(value) if value >= 0 else f"−{format_size(-value)}"

    def milliseconds(value: float) -> str:
        return f"{value:,.0f} ms" if value >= 100 else f"{value:.2f} ms"

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    measures: list[tuple[str, Callable[[Recorded], float | None], Callable[[float], str]]] = [
        ("step", lambda run: run.usual("step_ms"), milliseconds),
        ("tokens per second", lambda run: run.usual("tokens_per_s"), whole),
        ("peak on the device", peak_bytes, size),
        ("net saving of offload", net_saved_bytes, size),
        ("waited for updates, per step", lambda run: exposed_ms(run) if offloads(run) else 0.0, milliseconds),
        ("to the device, per step", lambda run: run.usual("bytes_fetched"), size),
        ("to the host, per step", lambda run: run.usual("bytes_stored"), size),
        ("host, most", lambda run: run.most("host_rss_bytes"), size),
        ("steps", lambda run: float(run.rows[-1]["step"]) if run.rows else None, whole),
        ("loss, last", lambda run: run.last("loss"), figures.decimals),
        ("evaluation, last", lambda run: run.last("eval_loss"), figures.decimals),
    ]
    found = []
    for name, measure, show in measures:
        of_a, of_b = measure(a), measure(b)
        if of_a is not None or of_b is not None:
            texts = ["not measured" if value is None else show(value) for value in (of_a, of_b)]
            found.append((name, texts[0], texts[1], _change(of_a, of_b, show)))
    return found


def _change(a: float | None, b: float | None, show: Callable[[float], str]) -> str:
    if a is None or b is None:
        return "–"
    if a == b:
        return "equal"
    less = f"{'+' if b > a else '−'}{show(abs(b - a))}"
    return f"{less} ({100 * (b / a - 1):+.1f}%)".replace("(-", "(−") if a > 0 and b > 0 and b / a < 100 else less


# Sections #


def _head(a: Recorded, b: Recorded) -> str:
    lines = "".join(
        f'<li><i class="line" style="border-color:var(--{color})"></i><b>{letter}</b>&nbsp; {escape(run.name)}'
        f"{_started(run)}</li>"
        for run, letter, color in ((a, "A", "train"), (b, "B", "eval"))
    )
    peaks = ""
    same_work = all(a.run.get(name) == b.run.get(name) for name in ("parameters", "tokens_per_step"))
    if same_work and offloads(a) != offloads(b) and a.plan is not None and b.plan is not None:
        on, off = (a, b) if offloads(a) else (b, a)
        measured = [peak_bytes(run) for run in (on, off)]
        if None not in measured:
            with_, without = (format_size(value or 0.0) for value in measured)
            peaks = f"<p>Peak on the device: {with_} with offload, {without} without. Both are measured.</p>"
    return (
        f'<h1>Two runs</h1>\n<ul class="legend runs">{lines}</ul>\n<div class="advice"><p>{said_of(losses(a, b))}</p>'
        f"{peaks}</div>\n"
    )


def _started(run: Recorded) -> str:
    started = tables.moment(run.run.get("started"))
    return f', <span class="quiet">started {escape(started)}</span>' if started else ""


def _problems(a: Recorded, b: Recorded) -> str:
    return parts.problems([f"{name}: {text}" for run, name in ((a, "A"), (b, "B")) for text in run.problems])


def _results(a: Recorded, b: Recorded) -> str:
    intro = '<p class="quiet">Times, rates and bytes per step are medians of the second half of each run.</p>'
    return parts.section("Results", [intro, parts.grid(("A", "B", "B − A"), results(a, b))])


def _settings(a: Recorded, b: Recorded) -> str:
    known = [run for run in (a, b) if run.settings]
    absent = "No setting differs." if len(known) == 2 else "Not both runs have a config.toml that can be read."
    found = [_two(different_settings(a, b), absent)]
    around = different_surroundings(a, b)
    if around:
        found += ["<h3>Machine, versions, sizes</h3>", _two(around, "")]
    return parts.section("Settings that differ", found)


def _two(rows: Sequence[tuple[str, str, str]], absent: str) -> str:
    return parts.grid(("A", "B"), rows, kind="") if rows else parts.missing(absent)


def _loss(a: Recorded, b: Recorded) -> str:
    return parts.section("Loss", [parts.figure(figures.losses(a, b), "Neither run has a finite loss.")])


def _memory(a: Recorded, b: Recorded) -> str:
    absent = "Neither run has memory samples of an observed step."
    return parts.section("Memory over one iteration", [parts.figure(iteration.memories(a, b), absent)])


def _curves(a: Recorded, b: Recorded) -> str:
    found = figures.compared(a, b)
    if not found:
        return ""
    intro = '<p class="quiet">Values beside the names are medians of the second half.</p>'
    return parts.section(
        "Over the runs", [intro, parts.side_by_side((title, parts.figure(one, "")) for title, one in found)]
    )
