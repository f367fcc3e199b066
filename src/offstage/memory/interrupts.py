# SPDX-License-Identifier: Apache-2.0
"""Sections that Ctrl-C must not cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver SIGINT after the block instead of inside it.

    A step or a load that has begun is finished first, so that a program which catches `KeyboardInterrupt` and saves
    never saves something between two steps. Python raises it in the main thread only; elsewhere there is nothing to do.
    """
    previous = signal.getsignal(signal.SIGINT)
    # Not current_thread(): it takes a lock in threads that Python did not start, and finalizers come here.
    if threading.get_ident() != threading.main_thread().ident or previous is None:
        yield  # a handler that Python did not install (None) raises nothing here either
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            if callable(previous):
                previous(*caught[0])
            elif previous == signal.SIG_DFL:
                raise KeyboardInterrupt
