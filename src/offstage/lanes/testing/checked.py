# SPDX-License-Identifier: Apache-2.0
"""`CheckedLanes`: real lanes with the happens-before checker on. For tests and for hunting a race on a real machine.

    with use_lanes(CheckedLanes):
        optimizer = offstage.offload(optimizer, model)

Work runs as it always does; what is checked is the order that marks give, whatever order happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from offstage.lanes.host_threads import HostThreads, Slice
from offstage.lanes.lanes import UNORDERED, Buffers, Lane, Lanes, Log, Mark, Place, Work
from offstage.lanes.link import link_for, use_lanes
from offstage.lanes.testing.happens_before import CALLER, HOST, Clock, Clocks

_Moment = tuple[Mark, Clock]


class CheckedLanes(Lanes):
    """The lanes that fit the device; every declared access is checked."""

    checks = True

    def __init__(self, device: torch.device, *, clocks: Clocks | None = None) -> None:
        """`clocks`: those of another set of lanes, `beside()` which these are."""
        self.device = device
        with use_lanes(None):
            self._inner = link_for(device).lanes()
        self.at_once = self._inner.at_once
        self._clocks = clocks if clocks is not None else Clocks()
        self.accesses = 0
        """Buffers looked at so far."""

    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, _Moment | None],
        reads: Buffers = (),
        writes: Buffers = (),
        low_priority: bool = False,
    ) -> _Moment:
        marks, clock = self._checked(lane, after, reads, writes)
        return self._inner.submit(lane, work, after=marks, writes=writes, low_priority=low_priority), clock

    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, _Moment | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> _Moment:
        marks, clock = self._checked(Lane.HOST, after, reads, writes)
        return self._inner.submit_on_host(slices, after=marks), clock

    def _checked(
        self, lane: Lane, after: Mapping[str, _Moment | None], reads: Buffers, writes: Buffers
    ) -> tuple[dict[str, Mark], Clock]:
        moments = {reason: moment for reason, moment in after.items() if moment is not None}
        clocks = [moment[1] for moment in moments.values()]
        clock = self._work(lane.value, clocks, reads, writes, ordered=lane not in UNORDERED)
        return {reason: moment[0] for reason, moment in moments.items()}, clock

    @property  # type: ignore[override]
    def threads(self) -> HostThreads:
        return self._inner.threads

    @threads.setter
    def threads(self, threads: HostThreads) -> None:
        self._inner.threads = threads

    def mark(self) -> _Moment:
        return self._inner.mark(), self._work(CALLER)

    def wait(self, mark: _Moment, reason: str) -> None:
        self._inner.wait(mark[0], reason)
        self._clocks.wait(CALLER, mark[1])

    def wait_on_host(self, mark: _Moment, reason: str) -> None:
        self._inner.wait_on_host(mark[0], reason)
        self._clocks.wait(HOST, mark[1])

    def here(self) -> Place:
        return self._inner.here()

    def empty(self, nbytes: int) -> torch.Tensor:
        tensor = self._inner.empty(nbytes)
        self.touch(writes=[tensor])
        return tensor

    def release(self, tensor: torch.Tensor, after: _Moment, reason: str) -> None:
        self._clocks.wait(CALLER, after[1])
        self.touch(writes=[tensor])
        self._inner.release(tensor, after[0], reason)

    def drop(self, tensor: torch.Tensor) -> None:
        self.touch(writes=[tensor])
        self._inner.drop(tensor)

    def synchronize(self, reason: str) -> None:
        self._inner.synchronize(reason)
        self._clocks.wait_for_all()

    def blocking(self) -> contextlib.AbstractContextManager[Any]:
        return self._inner.blocking()

    def has_promised(self) -> bool:
        return self._inner.has_promised()

    def after_promises(self, act: Callable[[], None]) -> None:
        self._inner.after_promises(act)

    def check(self) -> None:
        self._inner.check()

    def forget(self) -> None:
        self._inner.forget()

    def passed(self, mark: _Moment) -> bool:
        done = self._inner.passed(mark[0])
        if done:
            self._clocks.wait(HOST, mark[1])
        return done

    def capturing(self) -> bool:
        return self._inner.capturing()

    def follow(self, place: Place) -> None:
        self._inner.follow(place)

    def reset_peak(self) -> None:
        self._inner.reset_peak()

    def allocated_bytes(self) -> int | None:
        return self._inner.allocated_bytes()

    def prioritise(self, mark: _Moment) -> None:
        self._inner.prioritise(mark[0])

    def peak_bytes(self) -> int:
        return self._inner.peak_bytes()

    def free_bytes(self) -> int:
        return self._inner.free_bytes()

    def stamp(self, lane: Lane) -> Any:
        return self._inner.stamp(lane)

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        return self._inner.elapsed_ms(start, stop)

    def reuse(self, stamps: Iterable[Any]) -> None:
        self._inner.reuse(stamps)

    def open_log(self, log: Log) -> None:
        self._inner.open_log(log)

    def close_log(self, log: Log) -> None:
        self._inner.close_log(log)

    def touch(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._work(CALLER, (), reads, writes)

    def touch_on_host(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._work(HOST, (), reads, writes)

    def _work(
        self, lane: str, after: Any = (), reads: Buffers = (), writes: Buffers = (), *, ordered: bool = True
    ) -> Clock:
        self.accesses += len(reads) + len(writes)
        return self._clocks.work(lane, after, reads=reads, writes=writes, ordered=ordered)
