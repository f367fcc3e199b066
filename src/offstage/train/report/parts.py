# SPDX-License-Identifier: Apache-2.0
"""The parts of a page, and its file.

Every text of the run is escaped, and cut where it is long: whatever the files hold, a page has no scripts and at most
`MOST_PAGE_BYTES`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from offstage import OffstageError, __version__
from offstage.train.report.figures import Figure
from offstage.train.report.headline import Cell
from offstage.train.report.style import css

MOST_PAGE_BYTES = 3 * 2**20
"""What follows from the limits below and from those of the figures; a usual page has less than a tenth of it."""
MOST_TEXT, MOST_CELL, MOST_ITEM = 64 * 2**10, 2000, 400
"""Characters of a file, of a cell of a table, and of a problem."""
MOST_ROWS, MOST_ITEMS = 40, 30
_CONTROLS = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that HTML does not have: controls and halves of surrogate pairs."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""No browser runs or loads anything for this page."""


def document(title: str, body: Iterable[str], source: str) -> str:
    """The whole page, without scripts or external resources. `source`: what it was written from."""
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)} · offstage</title>\n<style>{css()}</style>\n'
        f"</head>\n<body>\n<main>\n{''.join(body)}"
        f"<footer>Written by offstage {escape(__version__)} from {escape(source)}.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )
    return _CONTROLS.sub("\ufffd", page)


def write_new(path: Path, content: bytes) -> Path:
    """Write a file in one piece. A link that has its name is replaced, not followed: a folder may be a stranger's."""
    temporary = path.parent / f".{path.name}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OffstageError(
            f"{path} could not be written: {error.strerror or error}. Make room for it there, or choose a place "
            "where you may write: a copy of the run's folder is a run's folder too."
        ) from error
    return path


def section(title: str, parts: Iterable[str]) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def cells(found: Sequence[Cell]) -> str:
    """The first numbers of the page, large."""
    each = "".join(
        f"<div{' class=bad' if cell.is_bad else ''}><dt>{escape(cell.name)}</dt><dd>{escape(cell.value)}</dd>"
        f"<dd>{escape(cell.note)}</dd></div>"
        for cell in found
    )
    return f'<dl class="headline">{each}</dl>\n' if found else ""


def figure(found: Figure | None, absent: str) -> str:
    """A figure; `absent`: why there is none."""
    if found is None:
        return missing(absent)
    caption = f"<figcaption>{escape(found.caption)}</figcaption>" if found.caption else ""
    return f"<figure>{_legend(found)}{found.html}{caption}</figure>"


def _legend(found: Figure) -> str:
    if not found.keys:
        return ""
    items = "".join(
        f'<li><i class="{key.kind}" style="{"border-color" if key.kind else "background"}:var(--{key.color})"></i>'
        f"{escape(key.text)}{f' <b>{escape(key.value)}</b>' if key.value else ''}</li>"
        for key in found.keys
    )
    return f'<ul class="legend">{items}</ul>'


def side_by_side(found: Iterable[tuple[str, str]]) -> str:
    """Small figures with titles."""
    parts = (f"<div><h3>{escape(title)}</h3>{html}</div>" for title, html in found)
    return f'<div class="pair">{"".join(parts)}</div>'


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values."""
    each = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escaped(value, MOST_CELL)}</td></tr>'
        for name, value in rows[:MOST_ROWS]
    )
    return f"<table><tbody>{each}</tbody></table>"


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "number") -> str:
    """A table with several columns, the first of which are names. It scrolls where it is wider than the page."""
    css_class = f' class="{kind}"' if kind else ""
    head = "".join(f'<th scope="col"{css_class}>{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escaped(name, MOST_ITEM)}</th>'
        f"{''.join(f'<td{css_class}>{escaped(value, MOST_ITEM)}</td>' for value in values)}</tr>"
        for name, *values in rows[:MOST_ROWS]
    )
    if len(rows) > MOST_ROWS:
        body += f'<tr><th scope="row">and {len(rows) - MOST_ROWS:,} more</th></tr>'
    return (
        f'<div class="scroll" tabindex="0"><table class="grid"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def toml(text: str) -> str:
    """In columns, broken between tables only."""
    shown = _cut(text, MOST_TEXT).split("\n\n")
    blocks = "".join(f"<span>{escape(block.strip())}\n</span>" for block in shown if block.strip())
    return f'<pre class="columns">{blocks}</pre>'


def code(text: str, *, kind: str = "plain") -> str:
    return f'<pre class="{kind}">{escaped(text.rstrip(), MOST_TEXT)}</pre>'


def missing(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def problems(texts: Sequence[str]) -> str:
    """What could not be read."""
    if not texts:
        return ""
    items = "".join(f"<p>{escaped(text, MOST_ITEM)}</p>" for text in texts[:MOST_ITEMS])
    if len(texts) > MOST_ITEMS:
        items += f"<p>And {len(texts) - MOST_ITEMS:,} more.</p>"
    return f'<section class="problems"><h2>Not complete</h2>{items}</section>\n'


def escaped(text: str, most: int) -> str:
    return escape(_cut(text, most))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
