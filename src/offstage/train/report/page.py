# SPDX-License-Identifier: Apache-2.0
"""The page about one run: sections in reading order, each with its content or the reason why it is missing."""

from __future__ import annotations

from html import escape
from pathlib import Path

from offstage.planning.fit_plan import describe
from offstage.train.report import figures, iteration, parts, tables
from offstage.train.report.fitted import against_measured
from offstage.train.report.headline import headline, peak_bytes
from offstage.train.report.recorded import Recorded

_NOT_OBSERVED = (
    "The run has no observed.json: it ended before the observed step (run.observe_step), or observing was switched off."
)


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from the files of the run in `folder`, and return its path."""
    folder = Path(folder)
    return parts.write_new(folder / "report.html", make_page(Recorded.read(folder)).encode())


def make_page(run: Recorded) -> str:
    """The whole document, without scripts or external resources."""
    body = [_head(run), _problems(run), _loss(run), _over_the_run(run), _memory(run), _lanes(run), _link_and_cpu(run)]
    body += [_fitted(run), _plan(run), _receipt(run), _sample(run), _configuration(run)]
    return parts.document(run.name, body, "the files of the run’s folder")


# Sections #


def _head(run: Recorded) -> str:
    values = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tables.tiles(run))
    started = tables.moment(run.run.get("started"))
    line = f"A training run with offstage{', started ' + started if started else ''}."
    return (
        f'<h1>{escape(run.name)}</h1>\n<p class="quiet">{escape(line)}</p>\n{parts.cells(headline(run))}{_advice(run)}'
        f'<dl class="tiles">{values}</dl>\n'
    )


def _advice(run: Recorded) -> str:
    """What the receipt advises, and what did not happen as it was asked for."""
    found = [
        ("Advice", run.receipt.get("advice")),
        *(("Not as asked for", one) for one in run.receipt.get("fallbacks") or ()),
    ]
    lines = [
        f"<p><b>{name}:</b> {parts.escaped(text, parts.MOST_CELL)}</p>"
        for name, text in found[: parts.MOST_ITEMS]
        if isinstance(text, str) and text
    ]
    return f'<div class="advice">{"".join(lines)}</div>\n' if lines else ""


def _problems(run: Recorded) -> str:
    return parts.problems([*run.problems, *(f"While observing: {note}." for note in run.observed.get("notes") or [])])


def _loss(run: Recorded) -> str:
    missing = "No step of this run has a finite loss yet." if run.rows else "The run wrote no step to metrics.jsonl."
    return parts.section("Loss", [parts.figure(figures.loss(run), missing)])


def _over_the_run(run: Recorded) -> str:
    found = figures.over_the_run(run)
    if not found:
        return ""
    intro = '<p class="quiet">Values beside the names are medians of the second half.</p>'
    shown = ((title, parts.figure(figure, "")) for title, figure in found)
    return parts.section("Over the run", [intro, parts.side_by_side(shown)])


def _memory(run: Recorded) -> str:
    missing = "The observed step has no memory samples." if run.observed else _NOT_OBSERVED
    return parts.section("Memory over one iteration, by owner", [parts.figure(iteration.memory(run), missing)])


def _lanes(run: Recorded) -> str:
    missing = "No lane worked in the observed step: all state is resident." if run.observed else _NOT_OBSERVED
    return parts.section("Lanes over one iteration", [parts.figure(iteration.lanes(run), missing)])


def _link_and_cpu(run: Recorded) -> str:
    if not run.observed:
        return parts.section("Link and CPU over one iteration", [parts.missing(_NOT_OBSERVED)])
    link = parts.figure(iteration.link(run), "Nothing moved in the observed step.")
    cpu = parts.figure(iteration.cpu(run), "The CPU was not watched in the observed step.")
    return parts.section("Link and CPU over one iteration", [parts.side_by_side([("Link", link), ("CPU", cpu)])])


def _fitted(run: Recorded) -> str:
    """What was decided within device_peak; nothing of a run without it."""
    title = "Decided within device_peak"
    if not run.run.get("fit"):
        return ""
    if run.fitted is None:
        return parts.section(title, [parts.missing("The run has no plan in fit_plan.json: it ended while measuring.")])
    decided = f"<p>{escape(describe(run.fitted.setting, run.fitted.overrides))}.</p>"
    rows = against_measured(run.fitted, run.usual("step_ms"), peak_bytes(run))
    table = parts.grid(("limit", "predicted", "measured"), rows)
    return parts.section(title, [decided, table, f"<h3>The plan</h3>{parts.code(str(run.fitted))}"])


def _plan(run: Recorded) -> str:
    if run.plan is None:
        return parts.section("Plan against measured", [parts.missing("The run has left no plan in run.json.")])
    note = "" if run.plan.prediction else " It predicts no times: no workload was known."
    summary = run.plan.summary()
    intro = f"<p>{escape(summary[:1].upper() + summary[1:])}.{note}</p>"
    table = parts.grid(("plan", "measured", "measured ÷ plan"), tables.plan_against_measured(run))
    code = parts.code(str(run.plan).removesuffix(summary))
    return parts.section("Plan against measured", [intro, table, f"<h3>The plan</h3>{code}"])


def _receipt(run: Recorded) -> str:
    rows = tables.receipt(run)
    missing = "The run has left no receipt.json: it ended before its first report, or nothing was offloaded."
    return parts.section("Receipt", [parts.table(rows) if rows else parts.missing(missing)])


def _sample(run: Recorded) -> str:
    return parts.section("What the model wrote last", [parts.code(run.sample, kind="wrap")]) if run.sample else ""


def _configuration(run: Recorded) -> str:
    rows = tables.about(run)
    found = [parts.table(rows) if rows else parts.missing("The run has left no run.json.")]
    found.append(
        f"<h3>config.toml</h3>{parts.toml(run.config)}" if run.config else parts.missing("There is no config.toml.")
    )
    return parts.section("Configuration", found)
