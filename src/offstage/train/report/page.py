# SPDX-License-Identifier: Apache-2.0
"""The page: sections in reading order, each with its content or the reason why it is missing.

Every text of the run is escaped, and cut where it is long: whatever the files hold, the page has no scripts and at most
`MOST_PAGE_BYTES`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from offstage import OffstageError, __version__
from offstage.train.report import figures, tables
from offstage.train.report.figures import Figure
from offstage.train.report.recorded import Recorded
from offstage.train.report.style import css

_NOT_OBSERVED = (
    "The run has no observed.json: it ended before the observed step (run.observe_step), or observing was switched off."
)
MOST_PAGE_BYTES = 3 * 2**20
"""What follows from the limits below and from those of the figures; a usual page has less than a tenth of it."""
_MOST_TEXT, _MOST_CELL, _MOST_ITEM = 64 * 2**10, 2000, 400
"""Characters of a file, of a cell of a table, and of a problem."""
_MOST_ROWS, _MOST_ITEMS = 40, 30
_CONTROLS = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that HTML does not have: controls and halves of surrogate pairs."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""No browser runs or loads anything for this page."""


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from the files of the run in `folder`, and return its path."""
    folder = Path(folder)
    page = make_page(Recorded.read(folder)).encode()
    path, temporary = folder / "report.html", folder / ".report.html.tmp"
    try:
        temporary.unlink(missing_ok=True)
        # A link that has this name is not followed: the folder may be a stranger's.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(page)
        temporary.replace(path)
    except OSError as error:
        raise OffstageError(
            f"{path} could not be written: {error.strerror or error}. Make room for it, or copy the run's folder to "
            "where you may write."
        ) from error
    return path


def make_page(run: Recorded) -> str:
    """The whole document, without scripts or external resources."""
    body = [_head(run), _problems(run), _loss(run), _over_the_run(run), _memory(run), _lanes(run), _link_and_cpu(run)]
    body += [_plan(run), _receipt(run), _sample(run), _configuration(run)]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(run.name)} · offstage</title>\n<style>{css()}</style>\n'
        f"</head>\n<body>\n<main>\n{''.join(body)}"
        f"<footer>Written by offstage {escape(__version__)} from the files of the run’s folder.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )
    return _CONTROLS.sub("\ufffd", page)


# Sections #


def _head(run: Recorded) -> str:
    values = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tables.tiles(run))
    started = tables.moment(run.run.get("started"))
    line = f"A training run with offstage{', started ' + started if started else ''}."
    return f'<h1>{escape(run.name)}</h1>\n<p class="quiet">{escape(line)}</p>\n<dl class="tiles">{values}</dl>\n'


def _problems(run: Recorded) -> str:
    noted = [f"While observing: {note}." for note in run.observed.get("notes") or []]
    if not run.problems and not noted:
        return ""
    texts = [*run.problems, *noted]
    items = "".join(f"<p>{_escaped(text, _MOST_ITEM)}</p>" for text in texts[:_MOST_ITEMS])
    if len(texts) > _MOST_ITEMS:
        items += f"<p>And {len(texts) - _MOST_ITEMS:,} more.</p>"
    return f'<section class="problems"><h2>Not complete</h2>{items}</section>\n'


def _loss(run: Recorded) -> str:
    missing = "No step of this run has a finite loss yet." if run.rows else "The run wrote no step to metrics.jsonl."
    return _section("Loss", [_figure(figures.loss(run), missing)])


def _over_the_run(run: Recorded) -> str:
    found = figures.over_the_run(run)
    if not found:
        return ""
    parts = [f"<div><h3>{escape(title)}</h3>{_figure(figure, '')}</div>" for title, figure in found]
    intro = '<p class="quiet">Values beside the names are medians of the second half.</p>'
    return _section("Over the run", [intro, f'<div class="pair">{"".join(parts)}</div>'])


def _memory(run: Recorded) -> str:
    missing = "The observed step has no memory samples." if run.observed else _NOT_OBSERVED
    return _section("Memory over one iteration, by owner", [_figure(figures.memory(run), missing)])


def _lanes(run: Recorded) -> str:
    missing = "No lane worked in the observed step: all state is resident." if run.observed else _NOT_OBSERVED
    return _section("Lanes over one iteration", [_figure(figures.lanes(run), missing)])


def _link_and_cpu(run: Recorded) -> str:
    if not run.observed:
        return _section("Link and CPU over one iteration", [_missing(_NOT_OBSERVED)])
    parts = [
        f"<div><h3>Link</h3>{_figure(figures.link(run), 'Nothing moved in the observed step.')}</div>",
        f"<div><h3>CPU</h3>{_figure(figures.cpu(run), 'The CPU was not watched in the observed step.')}</div>",
    ]
    return _section("Link and CPU over one iteration", [f'<div class="pair">{"".join(parts)}</div>'])


def _plan(run: Recorded) -> str:
    if run.plan is None:
        return _section("Plan against measured", [_missing("The run has left no plan in run.json.")])
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(planned)}</td>'
        f'<td class="number">{escape(measured)}</td><td class="number">{escape(ratio)}</td></tr>'
        for name, planned, measured, ratio in tables.plan_against_measured(run)
    )
    heads = "".join(f'<th scope="col" class="number">{text}</th>' for text in ("plan", "measured", "measured ÷ plan"))
    note = "" if run.plan.prediction else " It predicts no times: no workload was known."
    summary = run.plan.summary()
    intro = f"<p>{escape(summary[:1].upper() + summary[1:])}.{note}</p>"
    table = f"<div class='scroll'><table><thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    return _section(
        "Plan against measured", [intro, table, f"<h3>The plan</h3>{_code(str(run.plan).removesuffix(summary))}"]
    )


def _receipt(run: Recorded) -> str:
    rows = tables.receipt(run)
    missing = "The run has left no receipt.json: it ended before its first report, or nothing was offloaded."
    return _section("Receipt", [_table(rows) if rows else _missing(missing)])


def _sample(run: Recorded) -> str:
    return _section("What the model wrote last", [_code(run.sample, kind="wrap")]) if run.sample else ""


def _configuration(run: Recorded) -> str:
    rows = tables.about(run)
    parts = [_table(rows)] if rows else [_missing("The run has left no run.json.")]
    parts.append(f"<h3>config.toml</h3>{_toml(run.config)}" if run.config else _missing("There is no config.toml."))
    return _section("Configuration", parts)


# Parts #


def _section(title: str, parts: Iterable[str]) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _figure(figure: Figure | None, missing: str) -> str:
    if figure is None:
        return _missing(missing)
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f'<figure>{_legend(figure)}<div class="scroll">{figure.svg}</div>{caption}</figure>'


def _legend(figure: Figure) -> str:
    if not figure.keys:
        return ""
    items = "".join(
        f'<li><i class="{key.kind}" style="{"border-color" if key.kind else "background"}:var(--{key.color})"></i>'
        f"{escape(key.text)}{f' <b>{escape(key.value)}</b>' if key.value else ''}</li>"
        for key in figure.keys
    )
    return f'<ul class="legend">{items}</ul>'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{_escaped(value, _MOST_CELL)}</td></tr>'
        for name, value in rows[:_MOST_ROWS]
    )
    return f"<table><tbody>{cells}</tbody></table>"


def _toml(text: str) -> str:
    """In columns, broken between tables only."""
    shown = _cut(text, _MOST_TEXT).split("\n\n")
    blocks = "".join(f"<span>{escape(block.strip())}\n</span>" for block in shown if block.strip())
    return f'<pre class="columns">{blocks}</pre>'


def _code(text: str, *, kind: str = "plain") -> str:
    return f'<pre class="{kind}">{_escaped(text.rstrip(), _MOST_TEXT)}</pre>'


def _missing(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def _escaped(text: str, most: int) -> str:
    return escape(_cut(text, most))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
