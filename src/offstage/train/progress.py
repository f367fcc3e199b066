# SPDX-License-Identifier: Apache-2.0
"""Progress of a run on one rank: a moving bar, lines for a log, or JSON."""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from offstage import ConfigError
from offstage.config import format_size
from offstage.memory.interrupts import deferred_interrupts
from offstage.train.metrics import Row

logger = logging.getLogger("offstage")

_EVERY_S = 15.0
"""How often a log without a terminal gets a line."""
_WIDE = 100


class Progress(abc.ABC):
    """Shows rows, and reports events between them."""

    @abc.abstractmethod
    def begin(self, step: int, steps: int) -> None:
        """Training continues after `step`, until `steps`."""

    @abc.abstractmethod
    def show(self, row: Row) -> None:
        """A step has ended."""

    @abc.abstractmethod
    def say(self, text: str, **values: Any) -> None:
        """Report an event. `values` are the same for programs."""

    def end(self) -> None:
        """Training has ended, successfully or not."""
        return


class Silent(Progress):
    """For all ranks but the first, which reports for all."""

    def begin(self, step: int, steps: int) -> None:
        return

    def show(self, row: Row) -> None:
        return

    def say(self, text: str, **values: Any) -> None:
        return


class Quiet(Progress):
    """A line every few seconds, and events."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left = TimeLeft()
        self._shown_at = 0.0
        self._last = 0

    def begin(self, step: int, steps: int) -> None:
        self._left.begin(step, steps)
        self._last = steps
        self._shown_at = time.monotonic()

    def show(self, row: Row) -> None:
        self._left.update(row)
        if time.monotonic() - self._shown_at < _EVERY_S and row.step != self._last:
            return
        self._shown_at = time.monotonic()
        parts = [f"step {row.step}/{self._last}", *(f"{name} {value}" for name, value in cells(row)), self._left.text()]
        self._write("  ".join(part for part in parts if part))

    def say(self, text: str, **values: Any) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


class Json(Progress):
    """One object per line: rows as in `metrics.jsonl`, and events with their text under `event`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, step: int, steps: int) -> None:
        self._write({"event": "begin", "step": step, "steps": steps})

    def show(self, row: Row) -> None:
        self._stream.write(f"{row.to_json()}\n")
        self._stream.flush()

    def say(self, text: str, **values: Any) -> None:
        self._write({"event": text, **values})

    def _write(self, values: dict[str, Any]) -> None:
        self._stream.write(f"{json.dumps(values, default=str)}\n")
        self._stream.flush()


class Rich(Progress):
    """A moving bar with numbers beside it, and events above it."""

    def __init__(self, stream: TextIO) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar
        except ImportError as error:
            raise ConfigError(
                "run.progress='rich' needs the rich package; found none. Run `pip install offstage[cli]`, or use "
                "run.progress='quiet'."
            ) from error
        console = Console(file=stream)
        bar = [BarColumn(bar_width=16)] if console.width >= _WIDE else []  # the numbers need most of 80 columns
        columns = (*bar, MofNCompleteColumn(), TextColumn("{task.fields[cells]}"))
        self._bar = Bar(*columns, console=console, refresh_per_second=5)
        self._redraws_itself = True
        self._task: Any = None
        self._left = TimeLeft()

    def begin(self, step: int, steps: int) -> None:
        self._left.begin(step, steps)
        self._task = self._bar.add_task("", total=steps, completed=step, cells="")
        try:
            with deferred_interrupts():  # half started, or half stopped, its thread would go on for ever
                self._bar.start()
        except RuntimeError as error:
            self._redraws_itself = False
            logger.warning("%s: the bar is redrawn after each step only. Raise the limit on processes", error)

    def show(self, row: Row) -> None:
        self._left.update(row)
        shown = [f"[dim]{name}[/] {value}" for name, value in cells(row) if name != "eval"]  # reported above the bar
        text = "  ".join([*shown, self._left.text()])
        self._bar.update(self._task, completed=row.step, cells=text, refresh=not self._redraws_itself)

    def say(self, text: str, **values: Any) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        with deferred_interrupts():
            self._bar.stop()


class TimeLeft:
    """Estimate of the remaining time, from recent steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._step = 0
        self._mean_s: float | None = None
        self._seen_at = 0.0

    def begin(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps
        self._seen_at = time.monotonic()

    def update(self, row: Row) -> None:
        """By wall clock, so that evaluations and saves count too."""
        now = time.monotonic()
        took, self._seen_at, self._step = now - self._seen_at, now, row.step
        self._mean_s = took if self._mean_s is None else self._mean_s + (took - self._mean_s) / 20

    def text(self) -> str:
        seconds = round((self._mean_s or 0.0) * (self._steps - self._step))
        if not seconds:
            return ""
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02} left"


def cells(row: Row) -> list[tuple[str, str]]:
    """The numbers to show beside a step. Memory is the device's; without one, the host's."""
    found = [("loss", "not finite" if row.loss is None else f"{row.loss:.4f}")]
    if row.eval_loss is not None:
        found.append(("eval", f"{row.eval_loss:.4f}"))
    found.append(("tokens/s", f"{row.tokens_per_s:,.0f}"))
    memory = row.host_rss_bytes if row.device_peak_bytes is None else row.device_peak_bytes
    found.append(("memory", format_size(memory)))
    if row.exposed_ms is not None:
        found.append(("exposed", f"{row.exposed_ms:.1f} ms"))
    return found


def progress_for(kind: str, *, first: bool, stream: TextIO | None = None) -> Progress:
    """The kind named by `run.progress`; `Silent` on ranks other than the `first`."""
    stream = sys.stdout if stream is None else stream
    if not first:
        return Silent()
    if kind == "auto":
        kind = "rich" if stream.isatty() and _has_rich() else "quiet"
    kinds: dict[str, Callable[[TextIO], Progress]] = {"rich": Rich, "quiet": Quiet, "json": Json}
    return kinds[kind](stream)


class _ToProgress(logging.Handler):
    """Sends the first line of each warning of the library to progress; errors are raised in full elsewhere."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().partition("\n")[0].rstrip(":")
        self._progress.say(f"{record.levelname.lower()}: {text}", level=record.levelname)


@contextlib.contextmanager
def warnings_to_progress(progress: Progress) -> Iterator[None]:
    """Within: warnings do not break the bar. If the application has configured logging, nothing changes."""
    logger = logging.getLogger("offstage")
    if logger.hasHandlers():
        yield
        return
    handler = _ToProgress(progress)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None
