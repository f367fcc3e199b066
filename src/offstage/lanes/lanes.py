# SPDX-License-Identifier: Apache-2.0
"""Lanes: ordered queues of device work, and marks that order them; the same interface over every backend.

Work is submitted to a lane together with the marks it comes after, each under a name that says which hazard the
wait closes, and with the buffers it reads and writes. The caller's current stream is a lane too. Backends:

- `AcceleratorLanes`: streams and events.
- `ImmediateLanes`: without an accelerator, or with nothing off the device; work runs when it is submitted.
- `LazyLanes`: for tests; work runs as late and as out of order as its marks allow.
- `SimulatedLanes`: for tests; work runs when it is submitted, and clocks say when a device would have done it.

Lanes note when they were busy, in every log that is open (`open_log`).

Lifetime: a tensor used on a lane is dropped through `release(tensor, after=...)` or after the caller has waited.

[Note: the link takes turns] A device's copy engine serves one stream until that stream has to wait for something, and
priorities do not matter to it: what another stream asks for waits behind all that a fetch lane has been given before
(but for copies of up to 64 KiB, which travel with the commands). FSDP2 makes larger ones in every layer's backward,
data loaders do, and so do activations that backward waits for. So a lane that copies has two streams, and each copy
waits for the one before on the other stream: then the engine looks around after every copy, and a stranger waits for
one copy at most, while the link stays as busy as before.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from offstage.lanes.host_threads import HostThreads, Slice
from offstage.lanes.spans import Span

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
    GRADIENTS_DOWN = (
        "lower"  # gradients and weights → host, for updates there; waits for host threads, so not the store lane
    )
    HOST = "host"  # updates on the host, by its threads
    WEIGHTS_UP = "raise"  # updated weights → device; would queue behind fetches that were given before
    CALLER = "caller"  # the stream that is current where the call is made

    __hash__ = object.__hash__  # every piece of work looks its lane up several times; enum's own is slow


UNORDERED = (Lane.GRADIENTS_DOWN, Lane.HOST, Lane.WEIGHTS_UP)
"""Their work has no order but that of its marks: host threads submit it as they finish."""
CARRIES = (Lane.FETCH, Lane.STORE, Lane.GRADIENTS_DOWN, Lane.WEIGHTS_UP)
"""Their work copies between host and device."""
Log = dict[Lane, list[Span]]
"""When each lane was busy. Threads append to its lists."""


def new_log() -> Log:
    return {lane: [] for lane in Lane if lane is not Lane.CALLER}


class Priority:
    """The copy that goes first on a device's link, on whichever lanes it is."""

    mark: Mark | None = None


class CallerWaits:
    """Where the callers' streams of one device wait for its lanes, while that is to be known."""

    spans: deque[Span] | None = None
    """`None`: it is not noted. Bounded: what is watched may be dropped without a word."""


class Lanes(ABC):
    """The lanes of one device."""

    device: torch.device
    checks = False
    """True where declared buffers are looked at: callers may skip collecting them otherwise."""
    at_once = False
    """True where `submit` does the work, in the thread that calls it."""
    logs: tuple[Log, ...] = ()
    """The open ones."""
    threads: HostThreads
    """The host lane's workers; set by the user of the lanes."""
    priority: Priority
    """Set by the link: lanes of several users share it."""
    caller_waits = CallerWaits()
    """The same."""

    @abstractmethod
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
        """Queue `work` on `lane` behind the marks in `after` (reason → mark; `None` is nothing to wait for).

        `low_priority`: prioritised copies go first. That is a matter of time only; correctness must not rely on it.
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

    def begin_wait(self) -> Any:
        """The caller's stream is about to wait. Returns what `end_wait` needs."""
        return None if self.caller_waits.spans is None else self.stamp(Lane.CALLER)

    def end_wait(self, start: Any) -> None:
        """It has waited."""
        if start is not None and self.caller_waits.spans is not None:
            self.caller_waits.spans.append(Span(start, self.stamp(Lane.CALLER)))

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

    def after_promises(self, act: Callable[[], None]) -> None:
        """Call `act` when there is no such work: now, or later in the thread that gives the last of it."""
        act()

    def blocking(self) -> contextlib.AbstractContextManager[Any]:
        """Within the context, a submit to a full lane blocks until there is room, instead of promising the work.

        For work that is given in backward: the lanes are then so far behind that backward must wait for them soon
        anyway, and a thread that feeds them would take the GIL from autograd's thread again and again.
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
        """What the whole process has allocated on the device; `None` where the backend does not count."""
        return None

    def return_memory(self) -> None:  # noqa: B027
        """Give memory that torch's allocator keeps for later back to the driver. Waits for the device."""

    def reserve(self, nbytes: int) -> None:  # noqa: B027
        """Have torch's allocator take so much of the driver at once: allocations that follow are parts of it."""

    def device_memory(self) -> tuple[int, int, int]:
        """(bytes left for any process, bytes in the allocator's reserve, bytes that the device has); 0 if unknown."""
        return 0, 0, 0

    def prioritise(self, mark: Mark) -> None:  # noqa: B027
        """`mark` is of a copy that backward is about to wait for: copies of low priority go behind it."""

    @abstractmethod
    def stamp(self, lane: Lane) -> Any:
        """A moment in `lane`, for `elapsed_ms`."""

    @abstractmethod
    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two stamps. Waits until both have been reached."""

    def reuse(self, stamps: Iterable[Any]) -> None:  # noqa: B027
        """Stamps that will not be read any more."""

    def open_log(self, log: Log) -> None:
        """Note in `log` when the work was done that is submitted from now on."""
        self.logs = (*self.logs, log)

    def close_log(self, log: Log) -> None:
        """Work that was submitted before is still noted, when it is done."""
        self.logs = tuple(one for one in self.logs if one is not log)

    def touch(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:  # noqa: B027
        """Declare what the caller's stream does with buffers that lanes use too."""

    def touch_on_host(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:  # noqa: B027
        """Declare what the host itself reads or writes at this moment."""


class ImmediateLanes(Lanes):
    """Work runs at once, on the caller's stream: every mark has passed when it is made."""

    at_once = True

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
        low_priority: bool = False,
    ) -> Mark:
        start = time.perf_counter()
        with on_device(self.device):
            run_all(work)
        if self.logs:
            note(self.logs, lane, start, time.perf_counter(), carried_bytes(lane, writes))
        return None

    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, Mark | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> Mark:
        start = time.perf_counter()
        self.threads.run(slices)
        note(self.logs, Lane.HOST, start, time.perf_counter())
        return None

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark, reason: str) -> None:
        pass

    def wait_on_host(self, mark: Mark, reason: str) -> None:
        if self.device.type != "cpu":  # the work is on the caller's stream
            torch.accelerator.synchronize(self.device)

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


def carried_bytes(lane: Lane, writes: Buffers) -> int:
    """What work of `lane` carries over the link."""
    return sum(buffer.nbytes for buffer in writes) if lane in CARRIES else 0


def note(logs: Sequence[Log], lane: Lane, start: Any, stop: Any, nbytes: int = 0) -> None:
    """A piece of work was done from `start` to `stop`, or its stream will have done it."""
    span = Span(start, stop, nbytes, shared=len(logs) > 1)
    for log in logs:
        log[lane].append(span)


def pieces_of(work: Work) -> Sequence[Callable[[], None]]:
    return (work,) if callable(work) else work


def run_all(work: Work) -> None:
    """Do `work` now."""
    for piece in pieces_of(work):
        piece()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current, for work that is given to the caller's stream outside any lane."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


LONGEST_COPY = 32 * 1024 * 1024
"""Bytes. Shorter ones cost the host more and the link some of its rate."""


def copy_work(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], None]]:
    """One function per piece of (target, source): flat tensors of one dtype, one of each pair on the host."""
    work: list[Callable[[], None]] = []
    for target, source in copies:
        length = LONGEST_COPY // target.itemsize
        if target.numel() <= length:
            work.append(functools.partial(_copy, target, source))
            continue
        for start in range(0, target.numel(), length):
            stop = start + length
            work.append(functools.partial(_copy, target[start:stop], source[start:stop]))
    return work


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
