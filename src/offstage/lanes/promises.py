# SPDX-License-Identifier: Apache-2.0
"""`Promise`: a mark of work that no stream has been given yet.

A stream cannot wait for the host, so the host thread that ends an update submits the work that follows it; and work
that a stream has no room for is submitted by a thread that waits for room. Until then its mark is a promise.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from offstage.memory.threads import Latch

_running = threading.local()
"""Per thread: what follows the promises it has ended, in their order. Chains are long, so they run in a loop."""


class Promise:
    """Resolved once, with the mark that was promised (`None`: nothing is left to wait for), or rejected."""

    def __init__(self) -> None:
        # No lock around these two: a finalizer calls `then`, in a thread that may be in the middle of any method.
        self._over = Latch()
        self._then: deque[Callable[[], None]] = deque()
        self._mark: Any = None
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set

    @property
    def is_resolved(self) -> bool:
        return self._over.is_set and self._error is None

    def resolve(self, mark: Any = None) -> None:
        self._end(mark, None)

    def reject(self, error: BaseException) -> None:
        self._end(None, error)

    def mark(self) -> Any:
        """The mark, as soon as there is one: the host waits. Raises the error of a rejected promise."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._mark

    def wait(self) -> None:
        """Wait until it is resolved or rejected."""
        self._over.wait()

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` when this is over: now, or later in the thread that ends it."""
        self._then.append(act)
        if self._over.is_set:
            for one in self._taken():
                one()

    def _end(self, mark: Any, error: BaseException | None) -> None:
        self._mark, self._error = mark, error
        self._over.set()
        _run_all(self._taken())

    def _taken(self) -> list[Callable[[], None]]:
        """What follows; each is taken once, by the thread that ended the promise or by the one that added it."""
        acts = []
        with contextlib.suppress(IndexError):
            while True:
                acts.append(self._then.popleft())
        return acts


def _run_all(acts: list[Callable[[], None]]) -> None:
    """Run `acts`, and all that they lead to, one after the other."""
    waiting: deque[Callable[[], None]] | None = getattr(_running, "waiting", None)
    if waiting is not None:  # called by an act: the loop that runs it runs these
        waiting.extend(acts)
        return
    waiting = _running.waiting = deque(acts)
    try:
        while waiting:
            waiting.popleft()()
    finally:
        _running.waiting = None


def promised_after(promises: Iterable[Promise], act: Callable[[Promise], None]) -> Promise:
    """A promise that `act` resolves, called when all `promises` are over; what it raises rejects the promise."""
    result = Promise()
    open_ones = [promise for promise in promises if not promise.is_over]
    over = itertools.count(1)

    def one_is_over() -> None:
        if next(over) == len(open_ones):
            run()

    def run() -> None:
        try:
            act(result)
        except BaseException as error:
            result.reject(error)

    if not open_ones:
        run()
    for promise in open_ones:
        promise.then(one_is_over)
    return result
