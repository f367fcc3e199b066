# SPDX-License-Identifier: Apache-2.0
"""`Meter`: measurements of every step; `MetricsFile`: `metrics.jsonl`.

The host never waits for the step it has just queued: `Meter` reads a step's numbers after the next step has been
queued.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from offstage import OffloadedOptimizer, OffstageError
from offstage.engine.timer import StepTimer, exposed_ms
from offstage.lanes.accelerator import highest_peak
from offstage.lanes.lanes import Lane
from offstage.optimizer.optimizer import runtime_of
from offstage.train.reading import BadFileError, parse_object, read_lines
from offstage.train.run_folder import named

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_NAMED = 5


@dataclass(kw_only=True)
class Row:
    """One step, as one line of `metrics.jsonl`. `None`: not measured here."""

    step: int
    """Counted from 1."""
    loss: float | None
    """Mean over all micro-batches of all ranks, before the step's update; `None` if it is not finite."""
    lr: float
    grad_norm: float | None
    """Before clipping; `None` if it is not finite, or not known because gradients are used up in backward."""
    tokens_per_s: float
    """Of all ranks together."""
    step_ms: float
    """From taking the batch to the end of `step()`, on the device."""
    device_bytes: int | None
    """Allocated on the device at the end of the step."""
    device_peak_bytes: int | None
    """The most there was so far."""
    host_rss_bytes: int
    exposed_ms: float | None
    """How long this step's updates held up the caller's stream, or its thread, as in the receipt."""
    hidden_ms: float | None
    """Time of transfers, at the link's rate, and of updates on the host that overlapped other work."""
    bytes_fetched: int
    bytes_stored: int
    skipped: bool
    """Nothing was updated, because a gradient was not finite."""
    eval_loss: float | None = None

    def to_json(self) -> str:
        """One line, without `eval_loss` if there was no evaluation."""
        values = dataclasses.asdict(self)
        if self.eval_loss is None:
            del values["eval_loss"]
        return json.dumps(values, allow_nan=False)


@dataclass
class _Underway:
    """A step that the device may not have finished."""

    step: int
    lr: float
    tokens: int
    values: torch.Tensor
    """Loss and norm in host memory, valid once the device has reached `end`."""
    begin: Any
    end: Any
    phases: list[tuple[str, Any]]
    """The beginning of each phase between `begin` and `end`."""
    moved: tuple[int, int]
    skipped: bool


class Meter:
    """Measures steps without waiting for them."""

    RECENT = 9
    """Steps that `phase_ms` is the median of."""

    def __init__(self, optimizer: OffloadedOptimizer, device: torch.device, tokens: int) -> None:
        """`tokens`: of one step, over all ranks."""
        self._runtime, self._device, self._tokens = runtime_of(optimizer), device, tokens
        self._on_host = device.type == "cpu"
        # Two, alternating: the device may write one while the host reads the other.
        self._buffers = [
            torch.zeros(2, dtype=torch.float64, device="cpu", pin_memory=not self._on_host) for _ in range(2)
        ]
        self._begin: Any = None
        self._phases: list[tuple[str, Any]] = []
        self._recent: dict[str, deque[float]] = {}
        self._underway: _Underway | None = None

    def begin(self) -> None:
        """A step begins, before its batch is taken."""
        self._begin, self._phases = self._stamp(), []

    def mark(self, phase: str) -> None:
        """A phase of the step begins, and the one before ends."""
        self._phases.append((phase, self._stamp()))

    def phase_ms(self, phase: str) -> float | None:
        """Time of a phase per step: the median of recent steps."""
        return statistics.median(self._recent[phase]) if phase in self._recent else None

    def end(self, step: int, loss: torch.Tensor, norm: torch.Tensor | None, lr: float, *, skipped: bool) -> Row | None:
        """All work of `step` is queued. Returns the row of the step before."""
        values = self._buffers[step % 2]
        unknown = torch.full((), math.nan, dtype=torch.float32, device=loss.device)
        both = torch.stack([one.detach().double() for one in (loss, unknown if norm is None else norm)])
        last = self._runtime.last_moved
        moved = (0, 0) if skipped else (last.up, last.down)
        before = self.flush(queued=not skipped)
        values.copy_(both, non_blocking=True)
        self._underway = _Underway(
            step=step,
            lr=lr,
            tokens=self._tokens,
            values=values,
            begin=self._begin,
            end=self._stamp(),
            phases=self._phases,
            moved=moved,
            skipped=skipped,
        )
        return before

    def flush(self, *, queued: bool = False) -> Row | None:
        """Wait for the step under way and return its row. `queued`: another step has been made since."""
        underway, self._underway = self._underway, None
        if underway is None:
            return None
        if not self._on_host:
            underway.end.synchronize()
        loss, norm = underway.values.tolist()
        step_ms = self._elapsed_ms(underway.begin, underway.end)
        self._time_phases(underway)
        exposed = None if underway.skipped else self.exposed_ms(last=not queued)
        return Row(
            step=underway.step,
            loss=_finite(loss),
            lr=underway.lr,
            grad_norm=_finite(norm),
            tokens_per_s=round(underway.tokens / step_ms * 1e3, 3),
            step_ms=round(step_ms, 3),
            device_bytes=None if self._on_host else torch.accelerator.memory_allocated(self._device),
            device_peak_bytes=None if self._on_host else highest_peak(self._device),
            host_rss_bytes=host_rss_bytes(),
            exposed_ms=exposed,
            hidden_ms=self._hidden_ms(underway, exposed, last=not queued),
            bytes_fetched=underway.moved[0],
            bytes_stored=underway.moved[1],
            skipped=underway.skipped,
        )

    def _time_phases(self, underway: _Underway) -> None:
        stops = [*(stamp for _, stamp in underway.phases[1:]), underway.end]
        took: dict[str, float] = {}
        for (phase, start), stop in zip(underway.phases, stops, strict=False):
            took[phase] = took.get(phase, 0.0) + self._elapsed_ms(start, stop)
        for phase, ms in took.items():
            self._recent.setdefault(phase, deque(maxlen=self.RECENT)).append(ms)

    def exposed_ms(self, *, last: bool, in_step: bool = True) -> float | None:
        """How long the last step, or the one before, held up the caller; `in_step`: also in `step()`."""
        timers = self._timers()
        return round(exposed_ms(timers, last=last, in_step=in_step), 3) if timers else None

    def _hidden_ms(self, underway: _Underway, exposed: float | None, *, last: bool) -> float | None:
        rates = [engine.transport.link_gb_per_s for engine in self._runtime.engines]
        link = min((rate for rate in rates if rate), default=None)
        if link is None or exposed is None:
            return None
        host_ms = sum(sum(timer.lane_ms([Lane.HOST], last=last).values()) for timer in self._timers())
        return round(max(0.0, max(max(underway.moved) / link / 1e6, host_ms) - exposed), 3)

    def _timers(self) -> list[StepTimer]:
        return [engine.transport.timer for engine in self._runtime.engines if engine.transport.is_open]

    def _stamp(self) -> Any:
        if self._on_host:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _elapsed_ms(self, begin: Any, end: Any) -> float:
        return (end - begin) * 1e3 if self._on_host else float(begin.elapsed_time(end))


class MetricsFile:
    """`metrics.jsonl`: rows are appended; a resumed run first removes those of steps that it repeats.

    Lines that are damaged, or out of order, are dropped; the file that had them is kept beside this one.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        """`after_step`: the run continues after this one."""
        self._path = path
        self.dropped = ""
        """What was dropped and where it is kept, in words; empty if nothing was damaged."""
        cut = path.with_name(f".{path.name}.tmp")
        with named(path):
            with cut.open("wb") as file:
                damaged = _copy_rows(path, file, after_step)
            if damaged:
                self.dropped = _kept_aside(path, damaged)
            cut.replace(path)  # atomic: a process killed here leaves the old rows or the new ones
            self._file = path.open("a")

    def write(self, row: Row) -> None:
        with named(self._path):
            self._file.write(f"{row.to_json()}\n")
            self._file.flush()  # so that a killed run has all its rows

    def close(self) -> None:
        with named(self._path):
            self._file.close()


def host_rss_bytes() -> int:
    """Resident host memory of this process, shared pages included."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):  # no /proc
        return 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _copy_rows(path: Path, file: BinaryIO, after_step: int) -> list[int]:
    """Write the rows up to `after_step`; returns the numbers of lines that are no rows, or out of place."""
    damaged, repeated = [], []
    for number, line in enumerate(_lines(path), start=1):
        step = _step_of(line)
        if step is None:
            damaged.append(number)
        elif step > after_step:
            repeated.append(number)
        else:
            damaged += repeated  # rows of later steps come last
            repeated.clear()
            file.write(line)
    return sorted(damaged)


def _kept_aside(path: Path, damaged: list[int]) -> str:
    """Keep the file under another name as well; returns what is to be said about it."""
    names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        os.link(path, aside)
    except OSError:  # a file system without links
        shutil.copyfile(path, aside)
    lines = f"{'line' if len(damaged) == 1 else 'lines'} {', '.join(map(str, damaged[:_MOST_NAMED]))}"
    more = f" and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
    return f"{path.name}: {lines}{more} damaged and left out; the file as it was is kept as {aside.name}"


def _lines(path: Path) -> Iterator[bytes]:
    """All lines, the last one perhaps without its end."""
    try:
        yield from read_lines(path)
    except FileNotFoundError:
        return
    except BadFileError as error:
        raise OffstageError(
            f"{path} could not be written: {error}. Move it away, and run the same command again."
        ) from error


def _step_of(line: bytes) -> int | None:
    """`None` if the line is no row, or not all of one."""
    try:
        step = parse_object(line).get("step") if line.endswith(b"\n") else None
    except BadFileError:
        return None
    return step if type(step) is int else None
