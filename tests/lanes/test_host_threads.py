# SPDX-License-Identifier: Apache-2.0
"""Host threads: jobs begin in order, slices run at the same time, errors reach the caller that waits, idle ones end."""

import functools
import gc
import os
import signal
import threading
import time
import weakref

import pytest

from offstage.lanes.host_threads import HostThreads
from tests.support.threaded_lanes import wait_until


class Jobs:
    """Gives jobs and waits for them."""

    def __init__(self, threads):
        self.threads, self._over, self.errors = threads, [], {}

    def give(self, slices, wait=lambda: None):
        over, number = threading.Event(), len(self._over)
        self._over.append(over)

        def done(error):
            assert number not in self.errors, "done was called twice"
            self.errors[number] = error
            over.set()

        self.threads.give(slices, wait=wait, done=done)
        return over

    def wait(self):
        for over in self._over:
            assert over.wait(10)


def raising(error):
    def fail():
        raise error

    return fail


def our_threads(before):
    return {thread for thread in threading.enumerate() if thread not in before}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_slice_runs_once(num_threads):
    jobs, ran = Jobs(HostThreads(num_threads)), []
    for job in range(20):
        jobs.give([functools.partial(ran.append, (job, number)) for number in range(job % 7)])
    jobs.wait()
    assert sorted(ran) == [(job, number) for job in range(20) for number in range(job % 7)]
    assert set(jobs.errors.values()) == {None}


def test_one_thread_runs_everything_in_order():
    jobs, ran = Jobs(HostThreads(1)), []
    for job in range(5):
        jobs.give(
            [functools.partial(ran.append, (job, number)) for number in range(3)],
            wait=functools.partial(ran.append, (job, -1)),
        )
    jobs.wait()
    assert ran == [(job, number) for job in range(5) for number in range(-1, 3)]


def test_slices_of_a_job_begin_before_those_of_the_next():
    begun, permits = [], threading.Semaphore(0)

    def begin(job):
        begun.append(job)
        assert permits.acquire(timeout=10)

    jobs = Jobs(HostThreads(3))
    for job in range(3):
        jobs.give([functools.partial(begin, job) for _ in range(4)])
    for count in range(3, 13):  # three run; each permit lets one more begin
        assert wait_until(lambda: len(begun) == count)  # noqa: B023
        assert begun == [number // 4 for number in range(count)]
        permits.release()
    permits.release(2)
    jobs.wait()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_as_many_at_once_as_there_are_threads(num_threads):
    running, most, lock = 0, 0, threading.Lock()

    def slice_():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.003)
        with lock:
            running -= 1

    jobs = Jobs(HostThreads(num_threads))
    for _ in range(3):
        jobs.give([slice_] * 8)
    jobs.wait()
    assert most == num_threads


def test_slices_really_run_at_the_same_time():
    """All of them meet: none could pass if they ran one after the other."""
    meeting = threading.Barrier(4)
    jobs = Jobs(HostThreads(4))
    jobs.give([lambda: meeting.wait(10)] * 4)
    jobs.wait()
    assert jobs.errors == {0: None}


def test_threads_without_a_slice_go_on_to_the_next_job():
    """The last slice of a job does not hold up the next one."""
    gate = threading.Event()
    jobs = Jobs(HostThreads(2))
    first = jobs.give([lambda: None, lambda: gate.wait(10)])
    second = jobs.give([lambda: None] * 5)
    assert second.wait(10)
    assert not first.is_set()
    gate.set()
    jobs.wait()


def test_nothing_runs_before_what_the_job_waits_for():
    gate, log = threading.Event(), []

    def wait():
        log.append("waiting")
        assert gate.wait(10)
        log.append("there")

    jobs = Jobs(HostThreads(3))
    over = jobs.give([functools.partial(log.append, "slice")] * 4, wait=wait)
    assert wait_until(lambda: log == ["waiting"])
    time.sleep(0.02)  # two threads are idle: they must not begin
    assert log == ["waiting"]
    assert not over.is_set()
    gate.set()
    jobs.wait()
    assert log == ["waiting", "there", *["slice"] * 4]


def test_a_job_that_waits_holds_up_those_behind_it():
    """Jobs begin in the order in which they were given: so do the chunks that forward needs first."""
    gate, log = threading.Event(), []
    jobs = Jobs(HostThreads(3))
    jobs.give([functools.partial(log.append, "first")], wait=lambda: gate.wait(10))
    second = jobs.give([functools.partial(log.append, "second")])
    time.sleep(0.02)
    assert log == []
    assert not second.is_set()
    gate.set()
    jobs.wait()
    assert sorted(log) == ["first", "second"]


def test_done_comes_after_the_last_slice():
    left, lock = 10, threading.Lock()
    seen = []

    def slice_():
        nonlocal left
        time.sleep(0.001)
        with lock:
            left -= 1

    over = threading.Event()
    HostThreads(4).give([slice_] * 10, wait=lambda: None, done=lambda error: (seen.append(left), over.set()))
    assert over.wait(10)
    assert seen == [0]


def test_done_is_called_in_one_of_the_threads():
    before, where, over = set(threading.enumerate()), [], threading.Event()
    threads = HostThreads(2)
    threads.give(
        [lambda: None], wait=lambda: None, done=lambda e: (where.append(threading.current_thread()), over.set())
    )
    assert over.wait(10)
    assert where[0] in our_threads(before)


# Errors


def test_an_error_in_a_slice_is_told_and_the_others_run():
    error, ran = ZeroDivisionError("slice"), []
    jobs = Jobs(HostThreads(2))
    jobs.give([functools.partial(ran.append, 1), raising(error), functools.partial(ran.append, 2)])
    jobs.give([functools.partial(ran.append, 3)])
    jobs.wait()
    assert jobs.errors == {0: error, 1: None}
    assert sorted(ran) == [1, 2, 3]


def test_the_first_of_several_errors_is_told():
    first, gate = ZeroDivisionError("first"), threading.Event()

    def fail():
        gate.set()
        raise first

    def fail_later():
        assert gate.wait(10)
        time.sleep(0.01)
        raise ValueError("second")

    jobs = Jobs(HostThreads(2))
    jobs.give([fail, fail_later])
    jobs.wait()
    assert jobs.errors == {0: first}


@pytest.mark.parametrize("slices", [0, 3])
def test_an_error_while_waiting_runs_no_slice(slices):
    error, ran = ZeroDivisionError("wait"), []
    jobs = Jobs(HostThreads(2))
    jobs.give([functools.partial(ran.append, "slice")] * slices, wait=raising(error))
    jobs.give([functools.partial(ran.append, "next")])
    jobs.wait()
    assert jobs.errors == {0: error, 1: None}
    assert ran == ["next"]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_whatever_is_raised_ends_no_thread(error):
    before = set(threading.enumerate())
    jobs = Jobs(HostThreads(2))
    jobs.give([raising(error)] * 4)
    jobs.give([lambda: None] * 4)
    jobs.wait()
    assert jobs.errors == {0: error, 1: None}
    assert len(our_threads(before)) == 2


def test_a_job_without_slices():
    waited = []
    jobs = Jobs(HostThreads(2))
    jobs.give([], wait=functools.partial(waited.append, 1))
    jobs.give([lambda: None])
    jobs.wait()
    assert waited == [1]
    assert set(jobs.errors.values()) == {None}


# run()


@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_run_returns_when_all_is_done(num_threads, count):
    ran = []

    def slice_(number):
        time.sleep(0.001)
        ran.append(number)

    HostThreads(num_threads).run([functools.partial(slice_, number) for number in range(count)])
    assert sorted(ran) == list(range(count))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_run_raises_what_a_slice_raised(num_threads):
    threads = HostThreads(num_threads)
    with pytest.raises(ZeroDivisionError, match="slice"):
        threads.run([lambda: None, raising(ZeroDivisionError("slice")), lambda: None])
    threads.run([lambda: None] * 3)  # and it goes on


@pytest.mark.parametrize(("num_threads", "count"), [(1, 5), (4, 1), (4, 0)])
def test_run_needs_no_thread_for_what_the_caller_can_do(num_threads, count):
    where, before = [], set(threading.enumerate())
    threads = HostThreads(num_threads)
    threads.run([lambda: where.append(threading.current_thread())] * count)
    assert where == [threading.current_thread()] * count
    assert count == 0 or our_threads(before) == set()


# Times


def test_busy_is_the_time_in_which_any_slice_ran():
    threads = HostThreads(4)
    assert threads.busy_s == 0
    threads.run([lambda: time.sleep(0.05)] * 4)  # at once: not four times as long
    first = threads.busy_s
    assert 0.05 <= first < 0.2
    time.sleep(0.03)
    assert threads.busy_s == first
    jobs = Jobs(threads)
    jobs.give([lambda: time.sleep(0.02)], wait=lambda: time.sleep(0.2))  # waiting is not working
    jobs.wait()
    assert first + 0.02 <= threads.busy_s < first + 0.2


@pytest.mark.parametrize("slices", [1, 2])
def test_a_slice_that_fails_was_busy_and_is_not_any_more(slices):
    def fail():
        time.sleep(0.01)
        raise ZeroDivisionError

    threads = HostThreads(2)
    with pytest.raises(ZeroDivisionError):
        threads.run([fail] * slices)
    busy = threads.busy_s
    assert busy >= 0.01
    time.sleep(0.01)
    assert threads.busy_s == busy


# Life


def test_threads_start_with_the_first_job_and_end_with_their_owner():
    before = set(threading.enumerate())
    threads = HostThreads(3)
    assert our_threads(before) == set()
    Jobs(threads).give([lambda: None]).wait(10)
    Jobs(threads).give([lambda: None]).wait(10)
    started = our_threads(before)
    assert len(started) == 3
    assert all(thread.daemon and thread.name.startswith("offstage-host-") for thread in started)
    del threads
    gc.collect()
    assert wait_until(lambda: not any(thread.is_alive() for thread in started))


def test_dropping_the_owner_waits_for_what_was_given():
    gate, jobs, ran = threading.Event(), Jobs(HostThreads(2)), []
    jobs.give([functools.partial(ran.append, 1)], wait=lambda: gate.wait(10))
    jobs.give([functools.partial(ran.append, 2)] * 3)
    opener = threading.Timer(0.02, gate.set)
    opener.start()
    del jobs.threads
    gc.collect()
    assert sorted(ran) == [1, 2, 2, 2]
    jobs.wait()
    opener.join()


def test_threads_may_drop_their_owner():
    """The last reference may go in one of the threads themselves: it does not wait for itself."""
    before = set(threading.enumerate())
    owners, over = [HostThreads(2)], threading.Event()
    owners[0].give([owners.clear], wait=lambda: None, done=lambda error: over.set())
    started = our_threads(before)
    assert over.wait(10)
    assert wait_until(lambda: not any(thread.is_alive() for thread in started))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads: that is the point
def test_a_forked_child_may_drop_them():
    """It has none of the threads, and maybe a lock that one of them held."""
    threads = HostThreads(2)
    Jobs(threads).give([lambda: None]).wait(10)
    held, release = threading.Event(), threading.Event()

    def hold():
        with threads._queue._counting:
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        del threads
        gc.collect()
        os._exit(0)
    release.set()
    holder.join()
    if not wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0)):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child hangs")


def test_idle_threads_keep_nothing_alive():
    class Big:
        def __call__(self):
            pass

    big = Big()
    gone = weakref.ref(big)
    jobs = Jobs(HostThreads(3))
    jobs.give([big] * 5)
    jobs.wait()
    del big
    assert wait_until(lambda: gone() is None)


def test_threads_run_where_they_are_told_to():
    allowed = os.sched_getaffinity(0)
    cpus, found = {min(allowed)}, []
    jobs = Jobs(HostThreads(2, cpus))
    jobs.give([lambda: found.append(os.sched_getaffinity(0))] * 2)
    jobs.wait()
    assert found == [cpus] * 2
    assert os.sched_getaffinity(0) == allowed  # the caller's thread is not moved


def test_jobs_from_several_threads():
    jobs, ran, lock = HostThreads(3), [], threading.Lock()

    def note(value):
        with lock:
            ran.append(value)

    def giver(number):
        for job in range(30):
            jobs.run([functools.partial(note, (number, job, piece)) for piece in range(3)])

    givers = [threading.Thread(target=giver, args=(number,)) for number in range(4)]
    for thread in givers:
        thread.start()
    for thread in givers:
        thread.join(20)
    assert sorted(ran) == [(n, j, p) for n in range(4) for j in range(30) for p in range(3)]
