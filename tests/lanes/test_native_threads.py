# SPDX-License-Identifier: Apache-2.0
"""Native threads run slices without the interpreter, each once, and end with their owner."""

from __future__ import annotations

import gc
import sys
import threading
import time

import numba
import numpy as np
import pytest
from numba import carray, types
from numba.extending import intrinsic

from offstage.lanes.host_threads import HostThreads, NativeSlice
from offstage.lanes.native_threads import NativeThreads
from tests.support.hurdles import thread_limit

ENDED_WITHIN_S = 10.0


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.CPointer(types.int64)))

    return types.CPointer(types.int64)(types.int64), codegen


@numba.cfunc(types.void(types.int64, types.int64, types.int64))
def _mark(start, stop, address):
    """Adds 1 to words `[start, stop)` of the memory, after some thousand operations."""
    words = carray(_pointer(address), stop)
    for i in range(start, stop):
        for turn in range(20_000):
            words[i] += turn & 1
        words[i] -= 10_000 - 1


class Marks:
    """A kernel that marks elements."""

    def __init__(self, numel: int) -> None:
        self.words = np.zeros(numel, np.int64)
        self.address, self.arguments = _mark.address, self.words.ctypes.data

    def __call__(self, start: int, stop: int) -> None:
        _mark.ctypes(start, stop, self.arguments)

    def slices(self, size: int = 1) -> list[NativeSlice]:
        numel = len(self.words)
        return [NativeSlice(lambda: self, i, min(i + size, numel)) for i in range(0, numel, size)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 7])
def test_every_slice_runs_once(num_threads, size):
    threads, marks = HostThreads(num_threads), Marks(100)
    for times in (1, 2):
        threads.run(marks.slices(size))
        assert (marks.words == times).all()


def test_jobs_in_the_background_and_runs_of_several_threads_at_once():
    threads, jobs, over = HostThreads(2), [Marks(20) for _ in range(30)], threading.Semaphore(0)
    for job in jobs[:20]:
        threads.give(job.slices(), wait=lambda: None, done=lambda error: over.release())
    others = [threading.Thread(target=threads.run, args=(job.slices(),)) for job in jobs[20:]]
    for other in others:
        other.start()
    for other in others:
        other.join()
    for _ in range(20):
        assert over.acquire(timeout=ENDED_WITHIN_S)
    assert all((job.words == 1).all() for job in jobs)


def test_slices_need_no_interpreter():
    """A thread that never gives the GIL away sees all slices of a run that has begun come to their end."""
    threads, marks = HostThreads(2), Marks(400)
    threads.run(marks.slices())
    marks.words[:] = 0
    before = sys.getswitchinterval()
    other = threading.Thread(target=threads.run, args=(marks.slices(),))
    try:
        other.start()
        while not marks.words.any():
            time.sleep(0)
        sys.setswitchinterval(1e6)
        at_first = int((marks.words == 1).sum())
        deadline = time.perf_counter() + ENDED_WITHIN_S
        while not (marks.words == 1).all() and time.perf_counter() < deadline:
            pass  # comparing small arrays keeps the GIL
        done = int((marks.words == 1).sum())
    finally:
        sys.setswitchinterval(before)
        other.join()
    assert done == 400, (at_first, done)


def test_a_run_with_no_room_is_refused(monkeypatch):
    monkeypatch.setattr("offstage.lanes.native_threads._MOST", 8)
    native, marks = NativeThreads(2, None, "test-"), Marks(8)
    tickets = [one.ticket() for one in marks.slices()]
    for times in range(1, 20):
        assert native.run(tickets)
        assert (marks.words == times).all()
    assert not native.run([*tickets, tickets[0]])
    assert native.run([])
    native.close()
    for thread in native.threads:
        thread.join(ENDED_WITHIN_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_where_the_system_allows_fewer_threads_all_slices_run(allowed):
    marks = Marks(50)
    with thread_limit(allowed):
        threads = HostThreads(4)
        threads.run(marks.slices())
        over = threading.Event()
        threads.give(marks.slices(), wait=lambda: None, done=lambda error: over.set())
        assert over.wait(ENDED_WITHIN_S)
    assert (marks.words == 2).all()


@pytest.mark.parametrize("given", [False, True])
def test_threads_end_with_their_owner(given):
    before = set(threading.enumerate())
    threads, marks = HostThreads(3), Marks(10)
    threads.run(marks.slices())
    if given:
        over = threading.Event()
        threads.give(marks.slices(), wait=lambda: None, done=lambda error: over.set())
        assert over.wait(ENDED_WITHIN_S)
    ours = set(threading.enumerate()) - before
    assert len([thread for thread in ours if "native" in thread.name]) == 3
    del threads
    gc.collect()
    for thread in ours:
        thread.join(ENDED_WITHIN_S)
        assert not thread.is_alive()


def test_an_error_while_preparing_is_the_jobs_error_and_nothing_runs():
    def broken():
        raise ValueError("no kernel")

    threads, marks, errors, over = HostThreads(2), Marks(4), [], threading.Event()
    slices = [*marks.slices(), NativeSlice(broken, 0, 1)]
    threads.give(slices, wait=lambda: None, done=lambda error: (errors.append(error), over.set()))
    assert over.wait(ENDED_WITHIN_S)
    assert str(errors[0]) == "no kernel"
    assert not marks.words.any()
    with pytest.raises(ValueError, match="no kernel"):
        threads.run(slices)


def test_native_threads_outlive_jobs_that_are_about_to_use_them():
    """The owner is dropped while a job prepares its slices: its tickets come after the queue was closed."""
    ready, go, over = threading.Event(), threading.Event(), threading.Event()
    marks = Marks(8)

    def prepare():
        ready.set()
        assert go.wait(ENDED_WITHIN_S)
        return marks

    threads = HostThreads(3)
    threads.run(Marks(4).slices())
    threads.give([NativeSlice(prepare, i, i + 1) for i in range(8)], wait=lambda: None, done=lambda error: over.set())
    assert ready.wait(ENDED_WITHIN_S)
    dropping = threading.Thread(target=threads._queue.close)
    dropping.start()
    dropping.join()
    go.set()
    assert over.wait(ENDED_WITHIN_S)
    assert (marks.words == 1).all()


def test_a_run_that_is_not_over_keeps_its_place_in_the_ring(monkeypatch):
    monkeypatch.setattr("offstage.lanes.native_threads._MOST", 8)
    native, marks = NativeThreads(1, None, "test-"), Marks(4)
    tickets = [one.ticket() for one in marks.slices()]
    assert native.run(tickets)
    native._firsts.add(3)  # of a run that is not over
    assert native.run(tickets)
    assert not native.run(tickets)
    native._firsts.remove(3)
    assert native.run(tickets)
    assert (marks.words == 3).all()
    native.close()
