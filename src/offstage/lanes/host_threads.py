# SPDX-License-Identifier: Apache-2.0
"""`HostThreads`: the CPU's threads for updates on the host.

A job is a list of slices that may run at the same time, and something it has to wait for first. Jobs begin in the
order in which they were given; a thread that finds no slice left in one goes on to the next, so that no thread idles
at the end of a chunk. Compiled slices (`NativeSlice`) run in `NativeThreads`, and threads of Python only wait for what
such a job waits for, hand its slices over, and say when it is done.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch

from offstage.memory.cpus import stay_on
from offstage.memory.interrupts import deferred_interrupts
from offstage.memory.threads import Latch, start_some

if TYPE_CHECKING:
    from offstage.lanes.native_threads import NativeThreads

_LONGEST_JOIN_S = 10.0
_NAME = "offstage-host-"
_phase: set[str] = set()
"""The letters of what the garbage collector has said last: "start" or "stop". Kept by methods of a set and not by a
function of Python, in which Ctrl-C would raise a KeyboardInterrupt that the collector ignores: it would be lost."""
gc.callbacks += [_phase.intersection_update, _phase.update]  # empty it, and then add the letters
_owners: weakref.WeakKeyDictionary[_Jobs, weakref.ref[HostThreads]] = weakref.WeakKeyDictionary()
_here = threading.local()
"""`is_host_thread`, in those of this module."""
_COORDINATORS = 5
"""Threads of Python for jobs that run natively: one waits for what the next job waits for, each of the others for one
that runs. There are no more of these at a time than staging buffers."""
Slice = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Kernel(Protocol):
    """A compiled function of ``(int64 start, int64 stop, int64 arguments)``, with its arguments."""

    address: int
    arguments: int
    """The address of their memory."""

    def __call__(self, start: int, stop: int) -> None:
        """Call it from Python, without the GIL."""


@dataclass(frozen=True, slots=True)
class NativeSlice:
    """A slice that needs no interpreter."""

    kernel: Callable[[], Kernel]
    """The same for all slices of one piece; not called before what the job waits for is there."""
    start: int
    stop: int

    def __call__(self) -> None:
        self.kernel()(self.start, self.stop)

    def ticket(self) -> tuple[int, int, int, int]:
        """For `NativeThreads`."""
        kernel = self.kernel()
        return kernel.address, self.start, self.stop, kernel.arguments


@dataclass(eq=False)
class _Job:
    slices: Sequence[Slice]
    wait: Callable[[], None]
    done: Done
    left: int = field(init=False)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = len(self.slices)


class HostThreads:
    """Threads that start with the first job and end when this object is dropped.

    Where the system allows fewer, these do all jobs; where it allows none, `give` does the job before it returns.
    """

    def __init__(self, num_threads: int, cpus: Collection[int] | None = None) -> None:
        """`cpus`: where the threads may run, if not everywhere."""
        self.num_threads = num_threads
        self._cpus = cpus
        self._starting = threading.Lock()
        self._queue = _Jobs()
        self._threads: list[threading.Thread] = []
        _close_queues(left_behind=True)
        _owners[self._queue] = weakref.ref(self)
        # Threads hold the queue, not this object: dropping it ends them.
        weakref.finalize(self, _end, self._queue, self._threads, os.getpid())

    @property
    def busy_s(self) -> float:
        """For how long any slice was running, so far."""
        return self._queue.busy_s

    def give(self, slices: Sequence[Slice], *, wait: Callable[[], None], done: Done) -> None:
        """Run `slices` after `wait` has returned; then `done`, in one of the threads, with the error if there is one.

        Returns at once.
        """
        with deferred_interrupts():
            if _are_native(slices):
                slices = [functools.partial(_run_natively, self._start_native(), slices)]
                self._start(min(self.num_threads, _COORDINATORS))
            else:
                self._start(self.num_threads)
            self._queue.add(_Job(slices, wait, done))
            if not self._threads:
                with torch.no_grad():
                    self._queue.work_off()

    def run(self, slices: Sequence[Slice]) -> None:
        """Run `slices` and return when they are done. Ctrl-C comes after that: threads may be writing until then."""
        with deferred_interrupts():
            self._run(slices)

    def _run(self, slices: Sequence[Slice]) -> None:
        if self.num_threads == 1 or len(slices) == 1:
            with self._queue.busy():
                for piece in slices:
                    piece()
            return
        if _are_native(slices):
            with self._queue.busy():
                _run_natively(self._start_native(), slices)
            return
        over = Latch()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            over.set()

        self.give(slices, wait=_nothing, done=done)
        over.wait()
        if errors[0] is not None:
            raise errors[0]

    def _start(self, wanted: int) -> None:
        """Start the threads that are missing, as far as the system allows it."""
        with self._starting:
            # Daemons: the interpreter joins others before anything else at its exit, when they wait for work.
            missing = (
                threading.Thread(target=_work, args=(self._queue, self._cpus), name=f"{_NAME}{number}", daemon=True)
                for number in range(len(self._threads), wanted)
            )
            started = start_some(missing, wanted)
            self._threads += started
            self._queue.started(len(started))

    def _start_native(self) -> NativeThreads:
        from offstage.lanes.native_threads import NativeThreads  # numba is slow to import

        with self._starting:
            if self._queue.native is None:
                self._queue.native = NativeThreads(self.num_threads, self._cpus, _NAME)
            return self._queue.native


class _Jobs:
    """Jobs, and which slice is next.

    Finalizers close it, in a thread that may be in the middle of any method: so there are no locks that are waited for,
    and what threads wait in is a queue of C, whose `put` may be interrupted by another.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.workers = 0
        """Threads of Python that have been started and have not ended."""
        self.native: NativeThreads | None = None
        """From the first job on that has native slices."""
        self._jobs: deque[_Job] = deque()
        self._turn = threading.Lock()
        """Held from the moment at which a job is the first one until what it waits for is there."""
        self._next: SimpleQueue[tuple[_Job, int | None] | None] = SimpleQueue()
        self._counting = threading.Lock()
        self._running = 0
        self._since = 0.0

    def add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._begin_next()

    def _begin_next(self) -> None:
        """Let the first job wait for what it waits for, unless another one does, which calls this when it has it."""
        while self._jobs and self._turn.acquire(blocking=False):
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread was faster
                self._turn.release()
                continue
            self._next.put((job, None))
            return

    def close(self) -> None:
        """Let the threads end, behind all jobs."""
        self.add(_Job((), _nothing, self._end))

    def _end(self, error: BaseException | None) -> None:
        self._next.put(None)
        if not self.workers:
            self._close_native()

    def started(self, count: int) -> None:
        """So many threads more."""
        with self._counting:
            self.workers += count

    def left(self) -> None:
        """A thread has ended. The last one lets the native threads end: until then a job may be about to use them."""
        with self._counting:
            self.workers -= 1
            last = self.workers == 0
        if last:
            self._close_native()

    def _close_native(self) -> None:
        if self.native is not None:
            self.native.close()

    def next(self) -> tuple[_Job, int | None] | None:
        """A slice to run; or `None` in its place: wait for what the job waits for. `None`: there will be no more."""
        found = self._next.get()
        if found is None:
            self._next.put(None)  # for the other threads
        return found

    def work_off(self) -> None:
        """Do all jobs in the caller's thread."""
        while not self._next.empty():
            found = self.next()
            if found is None:
                return
            self.do(*found)

    def do(self, job: _Job, index: int | None) -> None:
        """What `next` has returned."""
        if index is None:
            self._is_ready(job, _error_of(job.wait))
            return
        with self.busy():
            error = _error_of(job.slices[index])
        with self._counting:
            job.left -= 1
            job.error = job.error or error
            over = job.left == 0
        if over:
            job.done(job.error)

    def _is_ready(self, job: _Job, error: BaseException | None) -> None:
        """What `job` waited for is there; with an error none of its slices run."""
        slices = 0 if error is not None else len(job.slices)
        for index in range(slices):
            self._next.put((job, index))
        self._turn.release()
        self._begin_next()
        if not slices:
            job.done(error)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A slice runs within."""
        with self._counting:
            if self._running == 0:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._counting:
                self._running -= 1
                if self._running == 0:
                    self.busy_s += time.perf_counter() - self._since


def may_wait_for_threads() -> bool:
    """Whether a finalizer may wait for host threads here.

    Not in one of them, which would wait for itself; nor while the garbage collector runs, which interrupts a thread
    anywhere: it may hold a lock (of numba's compiler, of an import, of `threading`) that they need to go on.
    """
    return "a" not in _phase and not hasattr(_here, "is_host_thread")


def _end(queue: _Jobs, threads: list[threading.Thread], owner: int) -> None:
    """Let the threads end, and wait for it, here or at the end of the program."""
    if os.getpid() != owner:
        return  # a forked child has no such threads, and maybe a lock that one of them held
    with deferred_interrupts():
        queue.close()
        if not threads:
            queue.work_off()
    if may_wait_for_threads():
        _join([*threads, *(queue.native.threads if queue.native is not None else ())])


def _join(threads: Collection[threading.Thread]) -> None:
    for thread in threads:
        thread.join(_LONGEST_JOIN_S)


def _close_queues(*, left_behind: bool) -> None:
    """Close all queues; or those `left_behind`, whose owner is gone: Ctrl-C ends a finalizer too."""
    for queue, owner in list(_owners.items()):
        if not left_behind or owner() is None:
            queue.close()


def _join_at_exit() -> None:
    """A thread that is still in torch when the interpreter ends takes it down."""
    _close_queues(left_behind=False)
    _join([thread for thread in threading.enumerate() if thread.name.startswith(_NAME)])


weakref.finalize(_join, _join_at_exit)  # made first, so it runs behind all others of these rooms


def _work(queue: _Jobs, cpus: Collection[int] | None) -> None:
    _here.is_host_thread = True
    torch.set_grad_enabled(False)  # as in step(); this too is the thread's own
    stay_on(cpus)
    while (found := queue.next()) is not None:
        queue.do(*found)
        del found  # an idle thread keeps nothing alive
    queue.left()


def _are_native(slices: Sequence[Slice]) -> TypeGuard[Sequence[NativeSlice]]:
    return bool(slices) and all(isinstance(one, NativeSlice) for one in slices)


def _run_natively(native: NativeThreads, slices: Sequence[NativeSlice]) -> None:
    if not native.run([one.ticket() for one in slices]):
        for one in slices:
            one()


def _error_of(act: Callable[[], None]) -> BaseException | None:
    """What `act` raises: the job's `done` gets it."""
    try:
        act()
    except BaseException as error:
        return error
    return None


def _nothing() -> None:
    pass
