# SPDX-License-Identifier: Apache-2.0
"""`AcceleratorLanes`: lanes as streams and marks as events.

A lane that copies has two streams that take turns. Work that a stream has no room for is promised, and submitted later
by a feeder thread. The host waits in `synchronize`, and for marks that are still promised.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offstage.lanes.host_threads import HostThreads, Slice
from offstage.lanes.lanes import (
    UNORDERED,
    Buffers,
    Lane,
    Lanes,
    Log,
    Mark,
    Place,
    Priority,
    Work,
    carried_bytes,
    note,
    pieces_of,
)
from offstage.lanes.promises import Promise, promised_after

_MOST_UNDER_WAY = 112
"""Pieces of work in one stream's queue. The driver has room for about a thousand operations, mostly fewer than eight to
a piece; a thread that submits more blocks in the driver, holding the GIL. So work beyond this is promised, and
submitted by a thread that waits for room: `step()` returns at once, and forward begins while most of the step is still
to come."""
_TAKES_TURNS = (Lane.FETCH, Lane.STORE)
"""They queue enough copies to keep other streams off the link; see [Note: the link takes turns]."""

_HIGHEST: dict[int, int] = {}
"""By device: the highest peak that was seen before the allocator's statistics were reset."""


def _index(device: torch.device) -> int:
    return torch.accelerator.current_device_index() if device.index is None else device.index


def highest_peak(device: torch.device) -> int:
    """The most that this process has had on the device, whatever was reset since."""
    return max(_HIGHEST.get(_index(device), 0), int(torch.accelerator.max_memory_allocated(device)))


class AcceleratorLanes(Lanes):
    """Streams and events of `torch.accelerator`. The streams are created once and live as long as the lanes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.priority = Priority()
        queues = [lane for lane in Lane if lane not in (Lane.CALLER, Lane.HOST)]
        self._queues: dict[Lane, _Streams] = {
            lane: _Streams(device, 2 if lane in _TAKES_TURNS else 1) for lane in queues
        }
        self._allocated_on: dict[int, torch.Stream] = {}
        self._under_way: dict[Lane, deque[torch.Event]] = {lane: deque() for lane in queues}
        self._feeder = HostThreads(1)
        """Submits what streams have no room for yet."""
        self._last: dict[Lane, Promise] = {}
        """The last work of a lane that was promised: what comes after it may not overtake it."""
        self._promises: list[Promise] = []
        """Of work that has not been given to its stream yet, and some that has."""
        self._look_through_at = 64
        self._blocks = False
        self._spare_stamps: list[torch.Event] = []
        """To be recorded again: a step makes no new ones once it has as many as it needs."""

    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
        low_priority: bool = False,
    ) -> Mark:
        last = None if lane in UNORDERED else self._last.get(lane)
        if last is not None and last.is_over:
            last.mark()  # raises: a lane whose work has failed stays failed until the failure is handled
            last = self._last.pop(lane)
        marks = [last, *after.values(), self._prioritised() if low_priority else None]
        promises = [mark for mark in marks if isinstance(mark, Promise) and not mark.is_over]
        if not promises and self._is_full(lane):
            if self._blocks:
                self._under_way[lane][0].synchronize()
            else:
                promises = [self._room(lane)]
        logs = self.logs  # of now: the work may be given to its stream in a later step
        nbytes = carried_bytes(lane, writes) if logs else 0
        if not promises:
            return self._submit(lane, work, marks, logs, nbytes)
        made = self._promise(promises, lambda promise: promise.resolve(self._submit(lane, work, marks, logs, nbytes)))
        self._last[lane] = made
        return made

    def _prioritised(self) -> Mark | None:
        """The copy that goes first, once its stream has it: a promise is not worth waiting for."""
        mark = self.priority.mark
        if not isinstance(mark, Promise):
            return mark
        return mark.mark() if mark.is_resolved else None

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        before, self._blocks = self._blocks, True
        try:
            yield
        finally:
            self._blocks = before

    def _is_full(self, lane: Lane) -> bool:
        under_way = self._under_way[lane]
        while under_way and under_way[0].query():
            under_way.popleft()
        return len(under_way) >= _MOST_UNDER_WAY

    def _room(self, lane: Lane) -> Promise:
        """Resolved when the oldest work of `lane` is done."""
        oldest = self._under_way[lane][0]
        room = Promise()
        self._feeder.give([], wait=oldest.synchronize, done=lambda error: room.resolve())
        return room

    def _submit(
        self, lane: Lane, work: Work, after: Iterable[Mark | None], logs: Sequence[Log], nbytes: int
    ) -> torch.Event:
        queue = self._queues[lane]
        stream = queue.next()
        for mark in after:
            if (event := _event(mark)) is not None:
                stream.wait_event(event)
        start = self._stamp(stream) if logs else None
        with _span(lane):
            mark = queue.run(work)
        if logs:
            note(logs, lane, start, self._stamp(queue.stream), nbytes)
        self._under_way[lane].append(mark)
        if len(self._under_way[lane]) > _MOST_UNDER_WAY:  # one of several in a row that the feeder gives
            self._under_way[lane].popleft().synchronize()
        return mark

    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> Mark:
        marks, logs, start = list(after.values()), self.logs, 0.0

        def wait() -> None:
            nonlocal start
            for mark in marks:
                if (event := _event(mark)) is not None:
                    event.synchronize()
            start = time.perf_counter()

        def end(promise: Promise, error: BaseException | None) -> None:
            if error is not None:
                promise.reject(error)
                return
            note(logs, Lane.HOST, start, time.perf_counter())
            promise.resolve()

        def give(promise: Promise) -> None:
            self.threads.give(slices, wait=wait, done=lambda error: end(promise, error))

        return self._promise([mark for mark in marks if isinstance(mark, Promise)], give)

    def _promise(self, promises: Sequence[Promise], act: Callable[[Promise], None]) -> Promise:
        if len(self._promises) >= self._look_through_at:
            self._promises = [promise for promise in self._promises if not promise.is_over]
            self._look_through_at = 2 * len(self._promises) + 64
        made = promised_after(promises, act)
        self._promises.append(made)
        return made

    def mark(self) -> Mark:
        return self._caller().record_event()

    def wait(self, mark: Mark, reason: str) -> None:
        if (event := _event(mark)) is not None:
            start = self.begin_wait()
            self._caller().wait_event(event)
            self.end_wait(start)

    def wait_on_host(self, mark: Mark, reason: str) -> None:
        if (event := _event(mark)) is not None:
            event.synchronize()

    def here(self) -> Place:
        return self._caller()

    def follow(self, place: Place) -> None:
        caller = self._caller()
        if place != caller:
            place.wait_event(caller.record_event())

    def capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device.index))

    def reset_peak(self) -> None:
        _HIGHEST[_index(self.device)] = highest_peak(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device.index)

    def allocated_bytes(self) -> int | None:
        return int(torch.accelerator.memory_allocated(self.device.index))

    def return_memory(self) -> None:
        torch.accelerator.synchronize(self.device)
        torch.accelerator.empty_cache()

    def reserve(self, nbytes: int) -> None:
        torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def device_memory(self) -> tuple[int, int, int]:
        free, total = torch.accelerator.get_memory_info(self.device.index)
        index = self.device.index
        reserve = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
        return int(free), int(reserve), int(total)

    def prioritise(self, mark: Mark) -> None:
        self.priority.mark = mark

    def free_bytes(self) -> int:
        return device_free_bytes(self.device)

    def empty(self, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._allocated_on[tensor.data_ptr()] = self._caller()
        return tensor

    def release(self, tensor: torch.Tensor, after: Mark, reason: str) -> None:
        # The allocator hands memory on in the order of the stream that allocated it: that one must wait.
        event = _event(after)
        assert event is not None
        start = self.begin_wait()
        self._allocated_on.pop(tensor.data_ptr()).wait_event(event)
        self.end_wait(start)

    def drop(self, tensor: torch.Tensor) -> None:
        self.follow(self._allocated_on.pop(tensor.data_ptr()))

    def synchronize(self, reason: str) -> None:
        for promise in self._promises:
            promise.wait()
        for queue in self._queues.values():
            queue.synchronize()

    def has_promised(self) -> bool:
        return not all(promise.is_over for promise in self._promises)

    def after_promises(self, act: Callable[[], None]) -> None:
        promised_after(self._promises, lambda promise: act())

    def check(self) -> None:
        for last in self._last.values():
            if last.is_over:
                last.mark()

    def forget(self) -> None:
        self._last.clear()
        self._promises.clear()

    def passed(self, mark: Mark) -> bool:
        if isinstance(mark, Promise) and not mark.is_resolved:
            return False
        event = _event(mark)
        return event is None or bool(event.query())

    def stamp(self, lane: Lane) -> Any:
        last = self._last.get(lane)
        if last is not None and not last.is_over:
            return self._promise([last], lambda promise: promise.resolve(self._stamp(self._queues[lane].stream)))
        return self._stamp(self._caller() if lane is Lane.CALLER else self._queues[lane].stream)

    def _stamp(self, stream: torch.Stream) -> Any:
        try:
            event = self._spare_stamps.pop()
        except IndexError:
            event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def reuse(self, stamps: Iterable[Any]) -> None:
        self._spare_stamps.extend(stamp for stamp in stamps if isinstance(stamp, torch.Event))

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        start, stop = _event(start), _event(stop)
        if isinstance(start, float):  # of the host's threads
            return float(1e3 * (stop - start))
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def _caller(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


class _Streams:
    """The stream of a lane; or two, that take turns and wait for each other, so that their order is that of one."""

    def __init__(self, device: torch.device, num_streams: int) -> None:
        self._streams = deque(torch.Stream(device) for _ in range(num_streams))
        self._last: torch.Event | None = None

    @property
    def stream(self) -> torch.Stream:
        """The one that was given the last work."""
        return self._streams[-1]

    def next(self) -> torch.Stream:
        """The stream whose turn it is, behind the last work."""
        if len(self._streams) > 1:
            if self._last is not None:
                self._streams[0].wait_event(self._last)
            self._streams.rotate(-1)
        return self.stream

    def run(self, work: Work) -> torch.Event:
        """Give `work` to the stream whose turn it is. Returns the event behind it."""
        event: torch.Event | None = None  # not read back from `_last`: host threads submit to one lane at the same time
        for number, piece in enumerate(pieces_of(work)):
            if number:
                self.next()
            with self.stream:
                piece()
            event = self._last = self.stream.record_event()
        if event is None:
            event = self._last = self.stream.record_event()
        return event

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def _event(mark: Mark | None) -> torch.Event | None:
    """What a stream can wait for; the host waits until there is one."""
    return mark.mark() if isinstance(mark, Promise) else mark


def _span(lane: Lane) -> contextlib.AbstractContextManager[Any]:
    """A named span for profilers; free when none is looking."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"offstage: {lane.value}")
    return contextlib.nullcontext()


def device_free_bytes(device: torch.device) -> int:
    """What the driver has left, and what torch's allocator holds in reserve."""
    free, _ = torch.accelerator.get_memory_info(device.index)
    reserve = torch.accelerator.memory_reserved(device.index) - torch.accelerator.memory_allocated(device.index)
    return int(free + reserve)
