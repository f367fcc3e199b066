# SPDX-License-Identifier: Apache-2.0
"""`in_threads`: work on files by several threads, or by as many as can be started."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from offstage.optimizer.interrupts import deferred_interrupts

logger = logging.getLogger("offstage")
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int, *, stop: Callable[[], None] | None = None
) -> list[Result]:
    """`work(item)` of every item, by at most `threads` threads, of which the caller's is one.

    Where the system starts no more threads, those that run do all of the work. None runs any more when this returns or
    raises. After an error or Ctrl-C no thread takes another item, and `stop` is called, which may cut short `work`.
    """
    waiting = deque(range(len(items)))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def give_up(error: BaseException) -> None:
        errors.append(error)
        waiting.clear()  # a thread whose start was interrupted finds nothing to do
        if stop is not None:
            stop()

    def take_turns() -> None:
        try:
            while True:
                try:
                    index = waiting.popleft()
                except IndexError:
                    return
                results[index] = work(items[index])
        except BaseException as error:
            give_up(error)

    # Not a pool of concurrent.futures, which takes no work while the interpreter shuts down.
    others = [threading.Thread(target=take_turns, name="offstage-files") for _ in range(min(threads, len(items)) - 1)]
    try:
        _start(others)
        take_turns()
        _join(others)
    except BaseException as error:  # Ctrl-C: no thread may work on after the caller has been told that the work ended
        give_up(error)
        with deferred_interrupts():
            _join(others)
    if errors:
        first = errors[0]
        errors.clear()  # their tracebacks keep the state alive
        raise first
    return [results[index] for index in range(len(items))]


def _start(threads: Sequence[threading.Thread]) -> None:
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:  # a limit on threads, or the interpreter is shutting down
            logger.warning("files are read and written by %d of %d threads: %s", number + 1, len(threads) + 1, error)
            return


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # never started, or about to start and find nothing to do
            thread.join()
