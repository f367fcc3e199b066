# SPDX-License-Identifier: Apache-2.0
"""Lanes: ordered queues of device work, and marks that order them. The only module that knows a backend.

Work is submitted to a lane together with the marks it comes after, each under a name that says which hazard the
wait closes, and with the buffers it reads and writes. The caller's current stream is a lane too. Backends:

- `AcceleratorLanes`: streams and events. The host waits in `synchronize`, and for marks that are still promised.
- `ImmediateLanes`: a machine without an accelerator; work runs when it is submitted.
- `LazyLanes` (`lazy_lanes.py`): for tests; work runs as late and as out of order as its marks allow.

Lifetime: a tensor used on a lane is dropped through `release(tensor, after=...)` or after the caller has waited.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offstage.host_threads import HostThreads, Slice
from offstage.promises import Promise, promised_after

Mark = Any
"""A point in a lane that others can wait for. Opaque; made by `submit` and `mark`."""
Place = Any
"""Which stream is the caller's. Opaque; made by `here`."""
Buffers = Sequence[torch.Tensor]
Work = Callable[[], None] | Sequence[Callable[[], None]]
"""What a lane is given: one function, or several to be called one after the other, between which copies of others may
use the link ([Note: the link takes turns])."""


class Lane(enum.Enum):
    """The queues of one device, named for their work. Each exists so that its work overlaps the others'."""

    FETCH = "fetch"  # host → device copies; the link carries both directions at once only on two queues
    UPDATE = "update"  # the rules' arithmetic
    STORE = "store"  # device → host copies
    LOWER = "lower"  # gradients and weights → host, for updates there; waits for host threads, so not the store lane
    HOST = "host"  # updates on the host, by its threads
    RAISE = "raise"  # updated weights → device; would queue behind fetches that were given before
    CALLER = "caller"  # the stream that is current where the call is made

    __hash__ = object.__hash__  # every piece of work looks its lane up several times; enum's own is slow


_MOST_UNDER_WAY = 112
"""Pieces of work in one stream's queue. The driver has room for about a thousand operations, mostly fewer than eight to
a piece, and whoever gives it more waits with the interpreter in its hands. So what there is no room for is promised,
and given by a thread that waits for it: `step()` returns at once, and forward begins while most of the step is still to
come."""
_TAKES_TURNS = (Lane.FETCH, Lane.STORE)
"""They have enough copies in their queues to keep everyone else off the link; see [Note: the link takes turns]."""
UNORDERED = (Lane.LOWER, Lane.HOST, Lane.RAISE)
"""Their work has no order but that of its marks: host threads give it, in the order in which they get there."""

_urgent: dict[torch.device, Mark] = {}
"""For each device the last copy that was announced: activations and state have lanes of their own, and one link."""


class Lanes(ABC):
    """The lanes of one device."""

    device: torch.device
    checks = False
    """True where declared buffers are looked at: callers may skip collecting them otherwise."""
    threads: HostThreads
    """Who works on the host lane; set by whoever uses it."""

    @abstractmethod
    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
        can_wait: bool = False,
    ) -> Mark:
        """Queue `work` on `lane` behind the marks in `after` (reason → mark; `None` is nothing to wait for).

        `can_wait`: copies that were announced as urgent go first. That is a matter of time only: nobody may rely on it.
        """

    @abstractmethod
    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> Mark:
        """Give `slices`, which may run at the same time, to the host's threads behind the marks in `after`."""

    @abstractmethod
    def mark(self) -> Mark:
        """A mark after everything the caller's stream has been given so far."""

    @abstractmethod
    def wait(self, mark: Mark, reason: str) -> None:
        """Make the caller's stream wait for `mark`."""

    @abstractmethod
    def wait_on_host(self, mark: Mark, reason: str) -> None:
        """Make the host wait for `mark`: only where it has to decide something."""

    def here(self) -> Place:
        """The caller's stream: what it allocates is handed on in its order."""
        return None

    def follow(self, place: Place) -> None:  # noqa: B027
        """Make the stream at `place`, if that is another one, wait for all that the caller's has been given."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, allocated in the order of the caller's stream; given back through `release`."""

    @abstractmethod
    def release(self, tensor: torch.Tensor, after: Mark, reason: str) -> None:
        """Give `tensor`'s memory back behind `after`. The caller drops its own reference."""

    def drop(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """The same for memory whose last use the caller's stream has waited for, or has been given."""

    @abstractmethod
    def synchronize(self, reason: str) -> None:
        """Make the host wait for every lane (not for the caller's stream)."""

    def has_promised(self) -> bool:
        """Whether there is work that other threads have still to give to its lane."""
        return False

    def patiently(self) -> contextlib.AbstractContextManager[Any]:
        """Within the context, whoever gives a lane more than it has room for waits, and promises nothing.

        For work that is given in backward: the lanes are then so far behind that backward must wait for them soon
        anyway, and a thread that feeds them would take the interpreter from autograd's at every turn.
        """
        return contextlib.nullcontext()

    def check(self) -> None:  # noqa: B027
        """Raise what work that another thread gave to its lane has failed with, if any has."""

    def forget(self) -> None:  # noqa: B027
        """Everything was drained, and what has failed does not matter any more."""

    @abstractmethod
    def passed(self, mark: Mark) -> bool:
        """Whether everything before `mark` is done. Never waits."""

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured into a graph: then nothing outside may be waited for."""
        return False

    def peak_bytes(self) -> int:
        """The most that the whole process has had allocated on the device so far."""
        return 0

    def reset_peak(self) -> None:  # noqa: B027
        """Let `peak_bytes` count from now on."""

    def free_bytes(self) -> int:
        """What this process could still allocate on the device."""
        return 0

    def allocated_bytes(self) -> int | None:
        """What the whole process has allocated on the device; `None` where nobody counts."""
        return None

    def announce(self, mark: Mark) -> None:  # noqa: B027
        """`mark` is of a copy that backward is about to wait for: copies that `can_wait` go behind it."""

    @abstractmethod
    def stamp(self, lane: Lane) -> Any:
        """A moment in `lane`, for `elapsed_ms`."""

    @abstractmethod
    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two stamps. Waits until both have been reached."""

    def touch(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:  # noqa: B027
        """Declare what the caller's stream does with buffers that lanes use too."""

    def touch_on_host(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:  # noqa: B027
        """Declare what the host itself reads or writes at this moment."""


class AcceleratorLanes(Lanes):
    """Streams and events of `torch.accelerator`. The streams are created once and live as long as the lanes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        queues = [lane for lane in Lane if lane not in (Lane.CALLER, Lane.HOST)]
        self._queues: dict[Lane, _Queue] = {lane: _Queue(device, 2 if lane in _TAKES_TURNS else 1) for lane in queues}
        self._allocated_on: dict[int, torch.Stream] = {}
        self._under_way: dict[Lane, deque[torch.Event]] = {lane: deque() for lane in queues}
        self._feeder = HostThreads(1)
        """Gives streams what they have no room for yet."""
        self._last: dict[Lane, Promise] = {}
        """The last work of a lane that was promised: what comes after it may not overtake it."""
        self._promises: list[Promise] = []
        """Of work that has not been given to its stream yet, and some that has."""
        self._look_through_at = 64
        self._patient = False

    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
        can_wait: bool = False,
    ) -> Mark:
        last = None if lane in UNORDERED else self._last.get(lane)
        if last is not None and last.is_over:
            last.mark()  # a lane whose work has failed stays so: whoever waits for its last mark must hear of it
            last = self._last.pop(lane)
        marks = [last, *after.values(), self._urgent_mark() if can_wait else None]
        promises = [mark for mark in marks if isinstance(mark, Promise) and not mark.is_over]
        if not promises and self._is_full(lane):
            if self._patient:
                self._under_way[lane][0].synchronize()
            else:
                promises = [self._room(lane)]
        if not promises:
            return self._submit(lane, work, marks)
        made = self._promise(promises, lambda promise: promise.keep(self._submit(lane, work, marks)))
        self._last[lane] = made
        return made

    def _urgent_mark(self) -> Mark | None:
        """What was announced, if its stream has been given it: it is not worth waiting for a promise."""
        mark = _urgent.get(self.device)
        if not isinstance(mark, Promise):
            return mark
        return mark.mark() if mark.is_kept else None

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    def _is_full(self, lane: Lane) -> bool:
        under_way = self._under_way[lane]
        while under_way and under_way[0].query():
            under_way.popleft()
        return len(under_way) >= _MOST_UNDER_WAY

    def _room(self, lane: Lane) -> Promise:
        """Kept when the oldest work of `lane` is done."""
        oldest = self._under_way[lane][0]
        room = Promise()
        self._feeder.give([], wait=oldest.synchronize, done=lambda error: room.keep())
        return room

    def _submit(self, lane: Lane, work: Work, after: Iterable[Mark | None]) -> torch.Event:
        queue = self._queues[lane]
        stream = queue.next()
        for mark in after:
            if (event := _event(mark)) is not None:
                stream.wait_event(event)
        with _span(lane):
            mark = queue.run(work)
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
        marks = list(after.values())

        def wait() -> None:
            for mark in marks:
                if (event := _event(mark)) is not None:
                    event.synchronize()

        def give(promise: Promise) -> None:
            self.threads.give(slices, wait=wait, done=lambda error: promise.fail(error) if error else promise.keep())

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
            self._caller().wait_event(event)

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
        torch.accelerator.reset_peak_memory_stats(self.device.index)

    def allocated_bytes(self) -> int | None:
        return int(torch.accelerator.memory_allocated(self.device.index))

    def announce(self, mark: Mark) -> None:
        _urgent[self.device] = mark

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
        self._allocated_on.pop(tensor.data_ptr()).wait_event(event)

    def drop(self, tensor: torch.Tensor) -> None:
        self.follow(self._allocated_on.pop(tensor.data_ptr()))

    def synchronize(self, reason: str) -> None:
        for promise in self._promises:
            promise.wait()
        for queue in self._queues.values():
            queue.synchronize()

    def has_promised(self) -> bool:
        return not all(promise.is_over for promise in self._promises)

    def check(self) -> None:
        for last in self._last.values():
            if last.is_over:
                last.mark()

    def forget(self) -> None:
        self._last.clear()
        self._promises.clear()

    def passed(self, mark: Mark) -> bool:
        if isinstance(mark, Promise) and not mark.is_kept:
            return False
        event = _event(mark)
        return event is None or bool(event.query())

    def stamp(self, lane: Lane) -> Any:
        last = self._last.get(lane)
        if last is not None and not last.is_over:
            return self._promise([last], lambda promise: promise.keep(self._stamp(self._queues[lane].stream)))
        return self._stamp(self._caller() if lane is Lane.CALLER else self._queues[lane].stream)

    def _stamp(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        start, stop = _event(start), _event(stop)
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def _caller(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


class _Queue:
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
        pieces = pieces_of(work)
        for number, piece in enumerate(pieces):
            if number:
                self.next()
            with self.stream:
                piece()
            self._last = self.stream.record_event()
        if not pieces:
            self._last = self.stream.record_event()
        assert self._last is not None
        return self._last

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


class ImmediateLanes(Lanes):
    """No accelerator: work runs at once, so every mark has passed when it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
        can_wait: bool = False,
    ) -> Mark:
        run_all(work)
        return None

    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> Mark:
        self.threads.run(slices)
        return None

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark, reason: str) -> None:
        pass

    def wait_on_host(self, mark: Mark, reason: str) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, tensor: torch.Tensor, after: Mark, reason: str) -> None:
        pass

    def synchronize(self, reason: str) -> None:
        pass

    def passed(self, mark: Mark) -> bool:
        return True

    def stamp(self, lane: Lane) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, stop: float) -> float:
        return (stop - start) * 1e3


def pieces_of(work: Work) -> Sequence[Callable[[], None]]:
    return (work,) if callable(work) else work


def run_all(work: Work) -> None:
    """Do `work` now."""
    for piece in pieces_of(work):
        piece()


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


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current, for work that is given to the caller's stream outside any lane."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


LanesFactory = Callable[[torch.device], Lanes]
_factory: contextvars.ContextVar[LanesFactory | None] = contextvars.ContextVar("offstage_lanes", default=None)


def lanes_for(device: torch.device) -> Lanes:
    """The lanes that fit `device`, or those a test asked for with `use_lanes`."""
    factory = _factory.get()
    if factory is not None:
        return factory(device)
    return ImmediateLanes(device) if device.type == "cpu" else AcceleratorLanes(device)


@contextlib.contextmanager
def use_lanes(factory: LanesFactory | None) -> Iterator[None]:
    """Within the context, optimizers are built on the lanes `factory` makes: lazy ones, checked ones, ones with delays.

    `None`: those that fit the device.
    """
    token = _factory.set(factory)
    try:
        yield
    finally:
        _factory.reset(token)
