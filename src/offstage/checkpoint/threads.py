# SPDX-License-Identifier: Apache-2.0
"""`in_threads`: work on files by several threads, or by as many as can be started."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from offstage.memory.threads import Crew, together

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """`work(item)` of every item, by at most `threads` threads.

    Where the system starts no more threads, those that run do all of the work. None runs any more when this returns or
    raises. After an error or Ctrl-C no thread takes another item, and `stop` is called, which may cut short `work`.
    """
    waiting = deque(range(len(items)))
    results: dict[int, Result] = {}

    def take_turns(_: int, crew: Crew[None]) -> None:
        while not crew.stopped:
            try:
                index = waiting.popleft()
            except IndexError:
                return
            results[index] = work(items[index])

    together(take_turns, min(threads, len(items)), stop=stop, name="offstage-files")
    return [results[index] for index in range(len(items))]
