# SPDX-License-Identifier: Apache-2.0
"""Work in several threads at once that ends before its caller goes on; and starting threads where they are limited.

A limit on threads (`ulimit -u`, a container's pids limit) makes work slower, never different: those threads that could
be started do all of it, and where there is none, the caller does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from offstage.memory.interrupts import deferred_interrupts

logger = logging.getLogger("offstage")

Result = TypeVar("Result")
_LOOK_EVERY_S = 0.5


class Latch:
    """What one thread sets and others wait for.

    `threading.Event` is not for waits that Ctrl-C may end: it arrives between the lines of `Condition.wait` too, which
    then releases a lock that it does not have, or keeps one that the setting thread needs.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """From now on no wait waits. May be called again."""
        self.is_set = True
        self._let_go()

    def wait(self, timeout: float | None = None) -> bool:
        """Return when it is set, or after `timeout` seconds; whether it is set."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        # Not without looking now and then: a signal that comes just before the thread falls asleep does not wake it,
        # and one that comes just after it has taken the lock lets it keep the lock.
        while not self.is_set and (left := end - time.monotonic()) > 0:
            if self._unset.acquire(timeout=min(left, _LOOK_EVERY_S)):
                self._let_go()
        return self.is_set

    def _let_go(self) -> None:
        with contextlib.suppress(RuntimeError):  # another thread has let it go already
            self._unset.release()


def start_some(threads: Iterable[threading.Thread], wanted: int) -> list[threading.Thread]:
    """Start `threads`, up to the first that the system refuses; returns those that run.

    `wanted`: how many there should be in the end, for the message.
    """
    started: list[threading.Thread] = []
    with deferred_interrupts():  # a thread that runs and is not known would never be waited for
        for thread in threads:
            try:
                thread.start()
            except RuntimeError as error:
                _warn_of_limit(wanted, str(error))
                break
            started.append(thread)
    return started


@functools.cache
def _warn_of_limit(wanted: int, error: str) -> None:
    logger.warning(
        "not all of %d threads could be started (%s): the others do their work, more slowly and with the same result. "
        "Raise the limit on processes (ulimit -u, or the container's pids limit), or use fewer threads",
        wanted,
        error,
    )


def together(
    act: Callable[[int, Crew[Result]], Result],
    num_threads: int,
    *,
    stop: Callable[[], None] = lambda: None,
    name: str = "offstage",
) -> list[Result]:
    """The results of `act(number, crew)` for each number below `crew.count`, called at the same time.

    `crew.count` is `num_threads`, or as many threads as could be started, at least 1. An error in one of them, or
    Ctrl-C, sets `crew.stopped`, which long work looks at, and calls `stop`; it is raised when all calls have returned.
    """
    crew: Crew[Result] = Crew(act, stop)
    try:
        with deferred_interrupts():
            crew.start(num_threads, name)
        crew.wait()
    except BaseException:
        crew.give_up()
        crew.wait()
        raise
    return crew.results() if crew.count else [act(0, crew.alone())]


class Crew(Generic[Result]):
    """The threads of one call of `together`."""

    def __init__(self, act: Callable[[int, Crew[Result]], Result], stop: Callable[[], None]) -> None:
        self.count = 0
        self.stopped = False
        self._act, self._stop = act, stop
        self._results: dict[int, Result] = {}
        self._errors: list[BaseException] = []
        self._all_started, self._over = Latch(), Latch()
        self._finished = itertools.count(1)

    def start(self, num_threads: int, name: str) -> None:
        made = (threading.Thread(target=self._work, args=(number,), name=name) for number in range(num_threads))
        try:
            self.count = len(start_some(made, num_threads))
        except BaseException:
            self.give_up()
            raise
        finally:
            self._all_started.set()

    def alone(self) -> Crew[Result]:
        """No thread could be started: the caller is the crew."""
        self.count = 1
        return self

    def give_up(self) -> None:
        """Threads that have not begun do nothing, and the others end soon."""
        self.stopped = True
        self._stop()

    def wait(self) -> None:
        """Return when no thread is in `act` any more."""
        if self.count:
            self._over.wait()

    def results(self) -> list[Result]:
        """In the order of their numbers."""
        if self._errors:
            first = self._errors[0]
            self._errors.clear()  # their tracebacks keep alive what `act` worked on
            raise first
        return [self._results[number] for number in range(self.count)]

    def _work(self, number: int) -> None:
        self._all_started.wait()
        try:
            if not self.stopped:
                self._results[number] = self._act(number, self)
        except BaseException as error:
            self._errors.append(error)
            self.give_up()
        if next(self._finished) == self.count:
            self._over.set()
