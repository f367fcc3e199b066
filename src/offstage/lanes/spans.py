# SPDX-License-Identifier: Apache-2.0
"""`Span`: from when to when a lane was busy with one piece of work; and for how long spans last together.

A span begins when all that its work waits for is done, and ends when the work is done. The time of a lane is what its
spans cover: waiting does not count, and what runs at the same time counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One piece of work of a lane, or one time in which the caller was held up."""

    start: Any
    stop: Any
    """Stamps of the lanes (`Lanes.elapsed_ms`)."""
    nbytes: int = 0
    """What it carried, if its lane carries."""
    shared: bool = False
    """More than one log has it: its stamps must not be used again."""


def covered_ms(times: Iterable[tuple[float, float]]) -> float:
    """The time in which at least one of these (start, stop) lasted."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(times):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def busy_ms(spans: Sequence[Span], elapsed_ms: Callable[[Any, Any], float]) -> float:
    """The same for spans of one clock. Waits until they are over."""
    if not spans:
        return 0.0
    first = spans[0].start
    return covered_ms((elapsed_ms(first, span.start), elapsed_ms(first, span.stop)) for span in spans)
