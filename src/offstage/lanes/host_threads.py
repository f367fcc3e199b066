# SPDX-License-Identifier: Apache-2.0
"""`HostThreads`: the CPU's threads for updates on the host.

A job is a list of slices that may run at the same time, and something it has to wait for first. Jobs begin in the
order in which they were given; a thread that finds no slice left in one goes on to the next, so that no thread idles
at the end of a chunk. Slices release the GIL for nearly all of their time, so threads of Python are enough.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

_LONGEST_JOIN_S = 10.0
_NAME = "offstage-host-"
Slice = Callable[[], None]
Done = Callable[[BaseException | None], None]


@dataclass(eq=False)
class _Job:
    slices: Sequence[Slice]
    wait: Callable[[], None]
    done: Done
    taken: int = 0
    left: int = field(init=False)
    asked: bool = False
    """A thread is waiting for what the job waits for."""
    ready: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = len(self.slices)


class HostThreads:
    """Threads that start with the first job and end when this object is dropped."""

    def __init__(self, num_threads: int, cpus: Collection[int] | None = None) -> None:
        """`cpus`: where the threads may run, if not everywhere."""
        self.num_threads = num_threads
        self._cpus = cpus
        self._starting = threading.Lock()
        self._queue = _Jobs()
        self._threads: list[threading.Thread] = []
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
        self._start()
        self._queue.add(_Job(slices, wait, done))

    def run(self, slices: Sequence[Slice]) -> None:
        """Run `slices` and return when they are done."""
        if self.num_threads == 1 or len(slices) == 1:
            with self._queue.busy():
                for piece in slices:
                    piece()
            return
        over = threading.Event()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            over.set()

        self.give(slices, wait=_nothing, done=done)
        over.wait()
        if errors[0] is not None:
            raise errors[0]

    def _start(self) -> None:
        with self._starting:
            while len(self._threads) < self.num_threads:
                # Daemons: the interpreter joins others before anything else at its exit, when they wait for work.
                name = f"{_NAME}{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._queue, self._cpus), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()


class _Jobs:
    """Jobs, and who does what of them."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running = 0
        self._since = 0.0

    def add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next(self) -> tuple[_Job, int | None] | None:
        """A slice to run; or `None` in its place: wait for what the job waits for. `None`: there will be no more."""
        with self._changed:
            while True:
                job = self._jobs[0] if self._jobs else None
                if job is not None and job.ready:
                    index, job.taken = job.taken, job.taken + 1
                    if job.taken == len(job.slices):
                        self._jobs.popleft()
                    self._begin()
                    return job, index
                if job is not None and not job.asked:
                    job.asked = True
                    return job, None
                if job is None and self._closed:
                    return None
                self._changed.wait()

    def is_ready(self, job: _Job, error: BaseException | None) -> None:
        """What `job` waited for is there; with an error none of its slices run."""
        with self._changed:
            job.ready, job.error = True, error
            if error is not None or not job.slices:
                self._jobs.remove(job)
            self._changed.notify_all()
        if error is not None or not job.slices:
            job.done(error)

    def is_run(self, job: _Job, error: BaseException | None) -> None:
        with self._changed:
            self._end()
            job.left -= 1
            job.error = job.error or error
            over = job.left == 0
        if over:
            job.done(job.error)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A slice runs within, in the caller's own thread."""
        with self._changed:
            self._begin()
        try:
            yield
        finally:
            with self._changed:
                self._end()

    def _begin(self) -> None:
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1

    def _end(self) -> None:
        self._running -= 1
        if self._running == 0:
            self.busy_s += time.perf_counter() - self._since


def is_host_thread() -> bool:
    """Whether the caller is one of these threads."""
    return threading.current_thread().name.startswith(_NAME)


def _end(queue: _Jobs, threads: list[threading.Thread], owner: int) -> None:
    """Let the threads end, and wait for it: one that is still in torch when the interpreter ends takes it down."""
    if os.getpid() != owner:
        return  # a forked child has no such threads, and maybe a lock that one of them held
    if is_host_thread():  # the garbage collector runs anywhere, and none of them can wait for itself
        threading.Thread(target=_end, args=(queue, threads, owner)).start()
        return
    queue.close()
    for thread in threads:
        thread.join(_LONGEST_JOIN_S)


def _work(queue: _Jobs, cpus: Collection[int] | None) -> None:
    torch.set_grad_enabled(False)  # as in step(); this too is the thread's own
    if cpus is not None:
        with contextlib.suppress(OSError):  # the process may have lost them since: slower, otherwise the same
            os.sched_setaffinity(0, cpus)  # of this thread
    while (found := queue.next()) is not None:
        job, index = found
        error: BaseException | None = None
        try:
            if index is None:
                job.wait()
            else:
                job.slices[index]()
        except BaseException as raised:  # the job's `done` gets it
            error = raised
        if index is None:
            queue.is_ready(job, error)
        else:
            queue.is_run(job, error)
        del job, found  # an idle thread keeps nothing alive


def _nothing() -> None:
    pass
