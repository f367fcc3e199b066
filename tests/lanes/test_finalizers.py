# SPDX-License-Identifier: Apache-2.0
"""Finalizers: the garbage collector runs them in any thread, in the middle of anything, with any lock held."""

import functools
import gc
import importlib
import inspect
import threading
import weakref

import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock
from torch import nn

import offstage
from offstage.lanes import host_threads as threads_of_host
from offstage.lanes.host_threads import HostThreads
from offstage.lanes.promises import Promise, promised_after
from offstage.optimizer.optimizer import runtime_of
from tests.support.hurdles import within
from tests.support.params import ON_HOST
from tests.support.threaded_lanes import host_threads, wait_until, with_threads


class Cycle:
    """Keeps what it is given until the garbage collector comes."""

    def __init__(self, *kept: object) -> None:
        self.kept, self.itself = kept, self


def under_way(before_each):
    """An optimizer whose threads are updating, in a cycle, and a reference to its transport."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    with with_threads():
        inner = torch.optim.AdamW(model.parameters())
        optimizer = offstage.offload(inner, model, **ON_HOST, threads=2, overlap_forward=True)
    rule = runtime_of(optimizer).rule
    slices_of = rule.slices
    rule.slices = lambda pieces: [functools.partial(_late, before_each, piece) for piece in slices_of(pieces)]
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    (engine,) = runtime_of(optimizer).engines
    Cycle(optimizer)
    return model, weakref.ref(engine.transport)


def _late(before, piece):
    before()
    piece()


def _in_numba(before):
    """Needs the lock of numba's compiler, as a first update does."""
    with global_compiler_lock:
        before()


def _start_thread():
    """Needs the locks of `threading`, as every start and end of a thread does."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


LOCKS = {
    "the compiler's": (global_compiler_lock, functools.partial(_in_numba, lambda: None)),
    "threading's": (threading._active_limbo_lock, _start_thread),
}


@pytest.mark.parametrize("name", LOCKS)
def test_the_collector_waits_for_no_thread(name):
    """Found while a thread holds a lock that the optimizer's threads need to come to their end."""
    lock, before_each = LOCKS[name]
    gc.collect()
    gc.disable()
    try:
        known = host_threads()
        asked = threading.Event()
        model, transport = under_way(lambda: (asked.wait(10), before_each()))
        ours = host_threads() - known
        with within(5), lock:
            asked.set()
            gc.collect()
            assert transport() is None
    finally:
        gc.enable()
    del model
    assert wait_until(lambda: not any(thread.is_alive() for thread in ours))


def test_the_owner_of_a_lock_is_collected_in_its_own_thread():
    """A host thread collects the object whose thread it is, from within a slice and from within the queue itself."""
    known, over = host_threads(), threading.Event()
    threads = HostThreads(2)
    threads.give([gc.collect], wait=gc.collect, done=lambda error: (gc.collect(), over.set()))
    Cycle(threads)
    del threads
    gc.collect()
    assert over.wait(10)
    assert wait_until(lambda: not host_threads() - known)


def test_what_follows_a_promise_may_be_added_while_it_ends():
    """A finalizer adds to it in the thread that is ending it: neither lost, nor done twice, nor a lock taken twice."""
    ran, promise = [], Promise()
    promise.then(lambda: promise.then(lambda: ran.append("within")))
    promise.then(lambda: ran.append("last"))
    with within(5):
        promise.resolve()
    assert sorted(ran) == ["last", "within"]


def test_promises_from_many_threads_are_counted_once():
    for _ in range(200):
        promises, ran = [Promise() for _ in range(4)], []
        promised_after(promises, lambda promise: ran.append(1))  # noqa: B023
        threads = [threading.Thread(target=promise.resolve) for promise in promises]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert ran == [1]


def test_the_collector_is_known_to_run():
    """In the thread in which it runs, and no longer than that."""
    host = importlib.import_module("offstage.lanes.host_threads")
    seen = []
    probe = Cycle()
    weakref.finalize(probe, lambda: seen.append(host.may_wait_for_threads()))
    del probe
    gc.collect()
    assert seen == [False]
    assert host.may_wait_for_threads()


def test_ctrl_c_is_not_lost_in_the_garbage_collector():
    """What a callback of the collector raises is ignored, a KeyboardInterrupt too: ours run no Python."""
    ours = [callback for callback in gc.callbacks if getattr(callback, "__self__", None) is threads_of_host._phase]
    assert len(ours) == 2
    assert all(inspect.isbuiltin(callback) for callback in ours)
    seen = []

    class Finalized:
        def __del__(self):
            seen.append(threads_of_host.may_wait_for_threads())

    cycle = Finalized()
    cycle.itself = cycle
    del cycle
    gc.collect()
    Finalized()
    assert seen == [False, True]
