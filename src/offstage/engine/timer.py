# SPDX-License-Identifier: Apache-2.0
"""`StepTimer`: how long the lanes of one device worked for a step, and how long they held up the caller.

Two figures, the same on every backend:

- The time of a lane is what its work covers, from when it may begin to when it is done (`lanes/spans.py`). The work of
  a step is what lanes are given from the end of the step before to its own end: state that is fetched ahead belongs to
  the step that uses it.
- Exposed is how long the caller was held up: from where it reaches `step()` to where it leaves it, and wherever else it
  waits for updates, in backward or in the next forward. On an accelerator the caller is a stream. Where lanes do their
  work at once, in the thread that submits it, the caller is that thread, and work in backward holds it up as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offstage.lanes.lanes import Lane, Lanes, Log, new_log
from offstage.lanes.spans import Span, busy_ms


class _Hold(NamedTuple):
    """The caller is held up."""

    span: Span
    waits: bool
    """For updates; otherwise its thread does the lanes' work."""
    in_step: bool


class StepTimer:
    """Stamps of one device's last steps. Taking them waits for nothing; reading them does."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._start: Any = None
        self._step: Any = None
        self._held_at_start = self._held_at_step = 0
        self._underway = self._in_step = False
        self._ended = 0
        self._held: list[_Hold] = []
        """By the step that is under way, or by the last one: a forward may still have to wait for it."""
        self._held_before: list[_Hold] = []
        self._ahead: list[_Hold] = []
        """By fetches for the step that comes next."""
        self._logs: list[Log] = []
        """Of the step that comes next or is under way, of the last one, and of the one before."""

    @property
    def has_times(self) -> bool:
        """Whether there was a step with open logs."""
        return len(self._logs) > 1

    # Stamping

    def open_log(self) -> None:
        """Note what the lanes do from now on."""
        self._logs = [new_log()]
        self._lanes.open_log(self._logs[0])

    def start(self) -> None:
        """The caller reaches the step's first gradients. Whatever waited for the step before has done so."""
        if not self._underway:  # not a step that is made again, with clipped gradients
            self._reuse(hold.span for hold in self._held_before)
            self._held_before, self._held, self._ahead = self._held, self._ahead, []
            self._underway = True
        self._lanes.reuse([self._start])
        self._start, self._held_at_start = self._lanes.stamp(Lane.CALLER), len(self._held)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """`step()` runs within: backward is over."""
        self._step, self._held_at_step = self._lanes.stamp(Lane.CALLER), len(self._held)
        start, ended, self._in_step = self._step, self._ended, True
        try:
            yield
        finally:
            self._in_step = False
        if self._ended > ended:  # else it has made no step
            self._held.append(_Hold(Span(start, self._lanes.stamp(Lane.CALLER)), waits=False, in_step=True))

    def stop(self) -> None:
        """All work of the step has been given to the lanes."""
        self._underway = False
        self._ended += 1
        if self._logs:
            self._lanes.close_log(self._logs[0])
            for dropped in self._logs[2:]:
                self._reuse(span for spans in dropped.values() for span in spans)
            self._logs = [new_log(), *self._logs[:2]]
            self._lanes.open_log(self._logs[0])

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """The caller waits for updates within."""
        return contextlib.nullcontext() if self._in_step else self._holding(waits=True)

    def working(self) -> contextlib.AbstractContextManager[None]:
        """The caller gives work to the lanes within."""
        is_held = self._lanes.at_once and not self._in_step
        return self._holding(waits=False) if is_held else contextlib.nullcontext()

    @contextlib.contextmanager
    def _holding(self, *, waits: bool) -> Iterator[None]:
        start = self._lanes.stamp(Lane.CALLER)
        yield
        held = self._held if waits or self._underway else self._ahead
        held.append(_Hold(Span(start, self._lanes.stamp(Lane.CALLER)), waits, in_step=False))

    def _reuse(self, spans: Iterable[Span]) -> None:
        self._lanes.reuse(stamp for span in spans if not span.shared for stamp in (span.start, span.stop))

    # Reading

    def backward_ms(self) -> float:
        """From the first update in backward to `step()`, without waiting for updates."""
        waits = [hold.span for hold in self._held[self._held_at_start : self._held_at_step] if hold.waits]
        waited = sum(self._lanes.elapsed_ms(wait.start, wait.stop) for wait in waits)
        return self._lanes.elapsed_ms(self._start, self._step) - waited

    def lane_ms(self, lanes: Iterable[Lane] = tuple(Lane), *, last: bool = True) -> dict[Lane, float]:
        """For how long each of `lanes` worked for the last step, or for the one before, if it did."""
        log = self._log(last=last)
        return {lane: busy_ms(log[lane], self._lanes.elapsed_ms) for lane in lanes if log.get(lane)}

    def lane_bytes(self) -> dict[Lane, int]:
        """What each lane that carries has carried for the last step."""
        carried = {lane: sum(span.nbytes for span in spans) for lane, spans in self._log(last=True).items()}
        return {lane: nbytes for lane, nbytes in carried.items() if nbytes}

    def _log(self, *, last: bool) -> Mapping[Lane, Sequence[Span]]:
        number = 1 if last else 2
        return {lane: list(spans) for lane, spans in self._logs[number].items()} if len(self._logs) > number else {}

    def exposed_ms(self, *, last: bool, in_step: bool = True) -> float:
        """How long the caller was held up by the last step, or by the one before; `in_step`: also in `step()`."""
        held = self._held if last else self._held_before
        return busy_ms([hold.span for hold in held if in_step or not hold.in_step], self._lanes.elapsed_ms)

    @property
    def holds_thread(self) -> bool:
        """Whether the caller is a thread."""
        return self._lanes.at_once


def exposed_ms(timers: Sequence[StepTimer], *, last: bool, in_step: bool = True) -> float:
    """On all devices: streams are held up at the same time, and the caller's thread by one device after the other."""
    streams = [timer.exposed_ms(last=last, in_step=in_step) for timer in timers if not timer.holds_thread]
    threads = [timer.exposed_ms(last=last, in_step=in_step) for timer in timers if timer.holds_thread]
    return max(streams, default=0.0) + sum(threads)
