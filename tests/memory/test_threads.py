# SPDX-License-Identifier: Apache-2.0
"""Threads that work together: none is waited for that does not run, and all have ended when the caller goes on."""

import signal
import threading
import time

import pytest

from offstage.memory import threads as threads_module
from offstage.memory.threads import Latch, start_some, together
from tests.support.hurdles import thread_limit, within


@pytest.fixture(autouse=True)
def warned_again():
    """The warning comes once in a process."""
    threads_module._warn_of_limit.cache_clear()


def test_all_at_the_same_time_and_results_in_order():
    meeting = threading.Barrier(3)

    def act(number, crew):
        meeting.wait(10)  # none could pass if they ran one after the other
        return number, crew.count

    assert together(act, 3) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("allowed", [0, 1, 2, 3])
def test_those_that_can_be_started_do_the_work(allowed, caplog):
    left, where = list(range(100)), set()

    def act(_, crew):
        where.add(threading.current_thread())
        while left:
            left.pop()
        return crew.count

    with within(10), thread_limit(allowed):
        assert together(act, 3) == [max(allowed, 1)] * max(allowed, 1)
    assert not left
    assert (threading.current_thread() in where) == (allowed == 0)
    assert ("ulimit -u" in caplog.text) == (allowed < 3)


def test_an_error_stops_the_others():
    stops = []

    def act(number, crew):
        if number == 1:
            raise ZeroDivisionError
        while not crew.stopped:
            time.sleep(1e-3)

    with within(10), pytest.raises(ZeroDivisionError):
        together(act, 3, stop=lambda: stops.append(1))
    assert stops


def test_ctrl_c_stops_them_and_comes_when_none_runs():
    running = set()

    def act(number, crew):
        running.add(number)
        if number == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not crew.stopped:
            time.sleep(1e-3)
        time.sleep(0.02)
        running.discard(number)

    with within(10), pytest.raises(KeyboardInterrupt):
        together(act, 3)
    assert not running


def test_a_thread_that_is_refused_is_not_among_those_started(caplog):
    threads = [threading.Thread(target=lambda: None) for _ in range(3)]
    with thread_limit(2):
        started = start_some(threads, 3)
    assert started == threads[:2]
    for thread in started:
        thread.join()
    assert "3 threads" in caplog.text


def test_a_latch_lets_all_pass():
    latch, passed = Latch(), []
    threads = [threading.Thread(target=lambda: (latch.wait(), passed.append(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not latch.is_set
    latch.set()
    for thread in threads:
        thread.join(10)
    latch.wait()
    assert latch.is_set
    assert len(passed) == 3
