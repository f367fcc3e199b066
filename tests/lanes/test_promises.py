# SPDX-License-Identifier: Apache-2.0
"""Promises: marks of work that waits for host threads; and the lanes that make them."""

import threading
import time

import pytest
import torch
from torch import nn

import offstage
from offstage.lanes.host_threads import HostThreads
from offstage.lanes.lanes import Lane
from offstage.lanes.promises import Promise, promised_after
from tests.support import threaded_lanes
from tests.support.lives import end_step
from tests.support.params import equal, result
from tests.support.threaded_lanes import ThreadedLanes


def noting(log, name):
    return lambda: log.append(name)


def test_a_promise_is_kept_with_its_mark():
    promise = Promise()
    assert not promise.is_over
    promise.resolve("mark")
    assert promise.is_over
    assert promise.mark() == "mark"
    promise.wait()


def test_a_promise_is_broken_by_an_error():
    promise, error = Promise(), ZeroDivisionError("broken")
    promise.reject(error)
    assert promise.is_over
    promise.wait()  # nothing left to wait for; only who asks for the mark is told
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            promise.mark()
        assert caught.value is error


@pytest.mark.parametrize("end", [lambda promise: promise.resolve(), lambda promise: promise.reject(ValueError())])
def test_then_is_called_once_when_it_is_over(end):
    promise, log = Promise(), []
    promise.then(noting(log, "first"))
    promise.then(noting(log, "second"))
    assert log == []
    end(promise)
    assert log == ["first", "second"]
    promise.then(noting(log, "late"))  # at once
    assert log == ["first", "second", "late"]


def test_then_sees_the_promise_over():
    promise, seen = Promise(), []
    promise.then(lambda: seen.append((promise.is_over, promise.mark())))
    promise.resolve(7)
    assert seen == [(True, 7)]


def test_then_may_ask_for_more():
    """What is asked for while it ends is called too, without waiting for itself."""
    promise, log = Promise(), []
    promise.then(lambda: promise.then(noting(log, "more")))
    promise.resolve()
    assert log == ["more"]


def test_others_wait_until_it_is_over():
    promise, found = Promise(), []
    threads = [threading.Thread(target=lambda: found.append(promise.mark())) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    assert found == []
    promise.resolve("mark")
    for thread in threads:
        thread.join(10)
    assert found == ["mark"] * 4


def test_acts_run_in_the_thread_that_ends_it():
    promise, ran_in = Promise(), []
    promise.then(lambda: ran_in.append(threading.current_thread()))
    ender = threading.Thread(target=promise.resolve)
    ender.start()
    ender.join(10)
    assert ran_in == [ender]


# After others


def test_nothing_to_wait_for():
    over = Promise()
    over.resolve()
    for promises in ([], [over]):
        made = promised_after(promises, lambda promise: promise.resolve("done"))
        assert made.mark() == "done"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_after_the_last_of_several(order):
    promises, calls = [Promise() for _ in range(3)], []

    def act(promise):
        calls.append(1)
        promise.resolve("done")

    made = promised_after(promises, act)
    for number in order[:-1]:
        promises[number].resolve()
        assert not made.is_over
    promises[order[-1]].resolve()
    assert made.mark() == "done"
    assert calls == [1]


def test_the_same_promise_twice():
    promise = Promise()
    made = promised_after([promise, promise], lambda made: made.resolve("done"))
    promise.resolve()
    assert made.mark() == "done"


def test_an_act_may_keep_it_later():
    first, held = Promise(), []
    made = promised_after([first], held.append)
    first.resolve()
    assert not made.is_over
    held[0].resolve("later")
    assert made.mark() == "later"


def test_what_an_act_raises_breaks_the_promise():
    first = Promise()

    def act(promise):
        raise ZeroDivisionError("act")

    made = [promised_after([], act), promised_after([first], act)]
    first.resolve()  # does not raise here: this may be a thread of the host
    for promise in made:
        with pytest.raises(ZeroDivisionError, match="act"):
            promise.mark()


def test_a_broken_promise_breaks_those_that_need_its_mark():
    first, log = Promise(), []
    second = promised_after([first], lambda promise: promise.resolve(first.mark()))
    third = promised_after([second], lambda promise: promise.resolve(second.mark()))
    other = promised_after([first], lambda promise: (log.append("ran"), promise.resolve("other")))
    error = ZeroDivisionError("the root")
    first.reject(error)
    for promise in (first, second, third):
        with pytest.raises(ZeroDivisionError) as caught:
            promise.mark()
        assert caught.value is error
    assert other.mark() == "other"  # work that does not need the mark is called all the same
    assert log == ["ran"]


def test_races_between_asking_and_ending():
    """Whether it is asked for before, while or after it ends: every act is called once."""
    for _ in range(150):
        promises, calls, made = [Promise() for _ in range(3)], [], []
        gate = threading.Barrier(5)

        def end(promise, gate=gate):
            gate.wait()
            promise.resolve()

        def ask(promises=promises, calls=calls, made=made, gate=gate):
            gate.wait()
            made.append(promised_after(promises, lambda one: (calls.append(1), one.resolve("done"))))

        threads = [threading.Thread(target=end, args=(promise,)) for promise in promises]
        threads += [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [promise.mark() for promise in made] == ["done"] * 2
        assert calls == [1, 1]


# Lanes that promise


@pytest.fixture
def lanes():
    made = ThreadedLanes(torch.device("cpu"))
    made.threads = HostThreads(2)
    return made


class Gate:
    """A slice that waits until it is let through."""

    def __init__(self):
        self.opened = threading.Event()

    def __call__(self):
        assert self.opened.wait(10)


def test_work_without_host_threads_is_given_at_once(lanes):
    log = []
    mark = lanes.submit(Lane.FETCH, noting(log, "fetch"), after={})
    lanes.submit(Lane.UPDATE, noting(log, "update"), after={"update: the state is fetched": mark})
    assert log == ["fetch", "update"]
    assert not isinstance(mark, Promise)


def test_what_follows_host_threads_is_promised(lanes):
    log, gate = [], Gate()
    lowered = lanes.submit(Lane.GRADIENTS_DOWN, noting(log, "lower"), after={})
    updated = lanes.submit_on_host([gate, noting(log, "slice")], after={"down": lowered})
    raised = lanes.submit(Lane.WEIGHTS_UP, noting(log, "raise"), after={"updated": updated})
    again = lanes.submit(Lane.GRADIENTS_DOWN, noting(log, "lower again"), after={"free": raised})
    host_again = lanes.submit_on_host([noting(log, "slice again")], after={"down": again})
    for mark in (updated, raised, again, host_again):
        assert isinstance(mark, Promise)
        assert not lanes.passed(mark)
    other = lanes.submit(Lane.FETCH, noting(log, "fetch"), after={})  # not held up
    assert lanes.passed(other)
    assert set(log) <= {"lower", "fetch", "slice"}
    gate.opened.set()
    lanes.wait(raised, "weights")
    lanes.wait_on_host(host_again, "state")
    assert [name for name in log if name not in ("fetch", "slice")] == ["lower", "raise", "lower again", "slice again"]
    assert log.index("slice") < log.index("raise")
    assert lanes.passed(host_again)


def test_work_behind_a_promise_that_is_over_is_given_at_once(lanes):
    updated = lanes.submit_on_host([lambda: None], after={})
    updated.wait()
    log = []
    mark = lanes.submit(Lane.WEIGHTS_UP, noting(log, "raise"), after={"updated": updated})
    assert log == ["raise"]
    assert not isinstance(mark, Promise)


def test_synchronize_waits_for_all_that_was_promised(lanes):
    log, gates = [], [Gate() for _ in range(3)]
    for number, gate in enumerate(gates):
        updated = lanes.submit_on_host([gate], after={})
        lanes.submit(Lane.WEIGHTS_UP, noting(log, number), after={"updated": updated})
    opener = threading.Timer(0.02, lambda: [gate.opened.set() for gate in gates])
    opener.start()
    lanes.synchronize("all")
    assert sorted(log) == [0, 1, 2]
    opener.join()


def test_a_failure_is_told_to_whoever_waits_and_nothing_follows_it(lanes):
    def fail():
        raise ZeroDivisionError("slice")

    log = []
    updated = lanes.submit_on_host([fail], after={})
    raised = lanes.submit(Lane.WEIGHTS_UP, noting(log, "raise"), after={"updated": updated})
    host = lanes.submit_on_host([noting(log, "slice")], after={"raised": raised})
    lanes.synchronize("all")  # does not raise: it only waits
    for mark in (updated, raised, host):
        with pytest.raises(ZeroDivisionError, match="slice"):
            lanes.wait(mark, "weights")
        with pytest.raises(ZeroDivisionError, match="slice"):
            lanes.wait_on_host(mark, "state")
    assert log == []
    with pytest.raises(ZeroDivisionError):  # it is over: the caller itself is told
        lanes.submit(Lane.GRADIENTS_DOWN, noting(log, "lower"), after={"free": raised})
    assert log == []
    assert lanes.passed(lanes.submit(Lane.GRADIENTS_DOWN, noting(log, "lower"), after={}))  # the lane goes on


def test_promises_that_are_over_are_forgotten(lanes):
    for _ in range(500):
        lanes.submit_on_host([lambda: None], after={}).wait()
    assert len(lanes._promises) <= 66  # looked through now and then, not every time


def test_a_long_step_that_waits_at_its_beginning(lanes):
    """As many chunks as a large model has, over four staging buffers, all given while the first is not done."""
    lowered, updated, raised, gate = [], [], [], Gate()
    free = [lanes.submit_on_host([gate], after={})] * 4
    for number in range(500):
        down = lanes.submit(Lane.GRADIENTS_DOWN, lambda n=number: lowered.append(n), after={"free": free[number % 4]})
        done = lanes.submit_on_host([lambda n=number: updated.append(n)], after={"down": down})
        free[number % 4] = lanes.submit(Lane.WEIGHTS_UP, lambda n=number: raised.append(n), after={"updated": done})
    assert (lowered, updated, raised) == ([], [], [])
    gate.opened.set()
    for mark in free:
        lanes.wait(mark, "weights")
    assert sorted(lowered) == sorted(updated) == sorted(raised) == list(range(500))
    for slot in range(4):  # each buffer: one chunk after the other
        assert [n for n in lowered if n % 4 == slot] == list(range(slot, 500, 4))
        assert [n for n in raised if n % 4 == slot] == list(range(slot, 500, 4))


# Streams that have no room


@pytest.fixture
def busy(monkeypatch):
    """No event passes before this is set, and three pieces of work are all that a stream has room for."""
    done = threading.Event()
    monkeypatch.setattr("offstage.lanes.accelerator._MOST_UNDER_WAY", 3)
    monkeypatch.setattr(threaded_lanes._Passed, "query", lambda event: done.is_set())
    monkeypatch.setattr(threaded_lanes._Passed, "synchronize", lambda event: done.wait(10))
    yield done
    done.set()


def test_what_a_stream_has_no_room_for_is_promised(lanes, busy):
    """The caller is not held up, and the order of the lane is kept."""
    log = []
    fetched = [lanes.submit(Lane.FETCH, noting(log, number), after={}) for number in range(10)]
    assert log == [0, 1, 2]
    assert [isinstance(mark, Promise) for mark in fetched] == [False] * 3 + [True] * 7
    updated = lanes.submit(Lane.UPDATE, noting(log, "update"), after={"fetched": fetched[9]})
    other = lanes.submit(Lane.STORE, noting(log, "store"), after={})  # another stream has room
    assert log == [0, 1, 2, "store"]
    assert not lanes.passed(updated)
    busy.set()
    lanes.wait(updated, "weights")
    assert [name for name in log if name != "store"] == [*range(10), "update"]
    assert lanes.passed(other)


def test_nothing_overtakes_what_was_promised(lanes, busy):
    """There is room again, but the feeder has not got there yet."""
    log, gate = [], Gate()
    for number in range(3):
        lanes.submit(Lane.FETCH, noting(log, number), after={})
    lanes.submit(Lane.FETCH, gate, after={})
    last = lanes.submit(Lane.FETCH, noting(log, "last"), after={})
    busy.set()
    after = lanes.submit(Lane.FETCH, noting(log, "after"), after={})
    assert log == [0, 1, 2]
    gate.opened.set()
    lanes.wait(last, "state")
    lanes.wait(after, "state")
    assert log == [0, 1, 2, "last", "after"]


def test_synchronize_waits_for_what_had_no_room(lanes, busy):
    log = []
    for number in range(8):
        lanes.submit(Lane.STORE, noting(log, number), after={})
    opener = threading.Timer(0.02, busy.set)
    opener.start()
    lanes.synchronize("all")
    assert log == list(range(8))
    opener.join()


def test_a_failure_in_promised_work_is_told_to_whoever_waits(lanes, busy):
    def fail():
        raise ZeroDivisionError("update")

    log = []
    for number in range(3):
        lanes.submit(Lane.UPDATE, noting(log, number), after={})
    failed = lanes.submit(Lane.UPDATE, fail, after={})
    stored = lanes.submit(Lane.STORE, noting(log, "store"), after={"updated": failed})
    busy.set()
    for mark in (failed, stored):
        with pytest.raises(ZeroDivisionError, match="update"):
            lanes.wait(mark, "weights")
    assert log == [0, 1, 2]


def test_lanes_without_room_give_the_bits_of_a_plain_step(monkeypatch):
    """Every stream has room for one piece of work, and every event takes a while."""
    monkeypatch.setattr("offstage.lanes.accelerator._MOST_UNDER_WAY", 1)
    monkeypatch.setattr(threaded_lanes._Passed, "query", lambda event: False)
    monkeypatch.setattr(threaded_lanes._Passed, "synchronize", lambda event: time.sleep(2e-4))

    def train(**config):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(8)))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = offstage.offload(inner, model, min_bytes=0, **config)
        for step in range(4):
            model(torch.full((3, 40), 0.1 * (step + 1))).pow(2).mean().backward()
            end_step(optimizer)
        return result(model.parameters(), optimizer)

    expected = train(fraction=0.0)
    small = {"chunk_bytes": "16KiB", "slots": 2}
    for overlap in ({}, {"overlap_forward": True}, {"update_in_backward": True, "overlap_forward": True}):
        for share in (0.0, 0.5, 1.0):
            with threaded_lanes.with_threads():
                got = train(**small, **overlap, host_fraction=share)
            assert equal(got, expected), (overlap, share)
